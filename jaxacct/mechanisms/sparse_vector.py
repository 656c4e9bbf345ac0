"""The sparse vector technique: which queries exceed a threshold, with and without their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import COUNT, POSITIVE, check_flag
from jaxacct.mechanisms.base import SENSITIVITY, BaseMechanism, Mechanism, register
from jaxacct.mechanisms.finite import PureDP, sample_pair
from jaxacct.mechanisms.laplace import Laplace
from jaxacct.mechanisms.parts import FinitePair, FinitePart, Part

__all__ = ["AboveThreshold", "NumericSparse"]


@register
@dataclass(frozen=True, eq=False)
class AboveThreshold(BaseMechanism):
    """Say of each query in a stream whether it is above a noisy threshold, until ``answers`` of them were.

    Laplace noise of scale ``threshold_scale`` on the threshold, drawn once, and of scale ``query_scale`` on
    each query: epsilon-DP with

        epsilon = 1/threshold_scale + 2 answers/query_scale,

    without the 2 if the queries are ``monotone``. However many queries are below. ``replace_one`` doubles what a query
    moves, and its queries are never taken as monotone. The pair is that of every epsilon-DP mechanism: ``kind`` is
    "bound".

    Parameters
    ----------
    threshold_scale, query_scale : array_like > 0, finite
        Scales of the noise over what a query moves under add/remove; all fields broadcast.
    answers : array_like of whole numbers >= 1
        How many queries above the threshold are told before it stops.
    monotone : bool
        Whether all queries rise, or all fall, with a record.

    References
    ----------
    Lyu, Su, Li (2017), Understanding the Sparse Vector Technique for Differential Privacy, Theorems 2 and 5
    (Algorithm 7). Dwork, Roth (2014), The Algorithmic Foundations of Differential Privacy, Section 3.6.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.AboveThreshold(threshold_scale=4.0, query_scale=8.0), 0.0)
    >>> b.kind, round(float(b.upper), 9)
    ('bound', 0.5)
    """

    threshold_scale: Any
    query_scale: Any
    answers: Any = 1
    monotone: bool = field(default=False, metadata={"static": True})
    constraints: ClassVar = {"threshold_scale": POSITIVE, "query_scale": POSITIVE, "answers": COUNT}

    def __post_init__(self) -> None:
        check_flag("monotone", self.monotone, "say whether all queries move alike")
        super().__post_init__()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def finite_pair(self, relation: str) -> FinitePair:
        twice = 1.0 if self.monotone and relation != "replace_one" else 2.0
        threshold, query = np.asarray(self.threshold_scale), np.asarray(self.query_scale)
        epsilon = SENSITIVITY[relation] * (1.0 / threshold + twice * np.asarray(self.answers) / query)
        return PureDP(epsilon).pair()

    def part(self, rate: np.ndarray, relation: str, direction: str) -> FinitePart:
        return sample_pair(self.finite_pair(relation), rate, direction)


@register
@dataclass(frozen=True, eq=False)
class NumericSparse(Mechanism):
    """AboveThreshold that also releases the value of each query found above, with fresh Laplace noise.

    The composition of ``AboveThreshold(threshold_scale, query_scale, answers, monotone)`` with ``answers``
    Laplace mechanisms of scale ``value_scale``, interleaved (concurrent composition is no worse than
    composition one after the other). Relations and units as there; it cannot be sampled. ``kind`` is "bound".

    Parameters
    ----------
    threshold_scale, query_scale : array_like > 0, finite
        As in AboveThreshold.
    value_scale : array_like > 0, finite
        Scale of the noise on a released value over what a query moves under add/remove.
    answers, monotone
        As in AboveThreshold.

    References
    ----------
    Lyu, Su, Li (2017), Understanding the Sparse Vector Technique for Differential Privacy.
    Vadhan, Zhang (2023), Concurrent Composition Theorems for Differential Privacy.

    >>> import jaxacct as ja
    >>> sparse = ja.NumericSparse(threshold_scale=10.0, query_scale=100.0, value_scale=50.0, answers=5)
    >>> round(float(ja.epsilon(sparse, 0.0).upper), 9)  # 1/10 + 2 * 5/100 + 5/50
    0.3
    """

    threshold_scale: Any
    query_scale: Any
    value_scale: Any
    answers: Any = 1
    monotone: bool = field(default=False, metadata={"static": True})
    constraints: ClassVar = {**AboveThreshold.constraints, "value_scale": POSITIVE}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._finding()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        value = Laplace(self.value_scale).part(np.asarray(1.0), relation, direction)
        return [*self._finding().expand(relation, direction), (value, np.asarray(self.answers))]

    def symmetric(self) -> bool:
        return True

    def _finding(self) -> AboveThreshold:
        return AboveThreshold(self.threshold_scale, self.query_scale, self.answers, self.monotone)
