"""The sparse vector technique: which queries exceed a threshold, with and without their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, Mechanism, register, sensitivity
from jaxacct.mechanisms.finite import PureDP, sample_pair
from jaxacct.mechanisms.laplace import Laplace
from jaxacct.mechanisms.parts import FinitePair, FinitePart, Part
from jaxacct.validation import COUNT, POSITIVE, check_flag

__all__ = ["AboveThreshold", "NumericSparse"]


@register
@dataclass(frozen=True, eq=False)
class AboveThreshold(BaseMechanism):
    """Say of each query in a stream whether it is above a noisy threshold, until ``answers`` of them were.

    Laplace noise of scale ``threshold_scale`` on the threshold, drawn once, and of scale ``query_scale`` on
    each query: epsilon-DP with

        epsilon = 1/threshold_scale + 2 answers/query_scale,

    without the 2 if all queries rise, or all fall, with a record (``monotone``). However many queries are
    below. Scales are relative to what a query moves under add/remove; ``replace_one`` doubles that, and its
    queries are never taken as monotone. The pair is that of every epsilon-DP mechanism: ``kind`` is "bound".

    threshold_scale, query_scale : finite, > 0.  answers : whole numbers >= 1.  Scalars or arrays.  monotone : a
    bool.  InputError otherwise.

    Source: Lyu, Su, Li 2017, Theorems 2 and 5 (Algorithm 7); Dwork, Roth 2014, Section 3.6.

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

    @property
    def kind(self) -> str:
        return "bound"

    def finite_pair(self, relation: str) -> FinitePair:
        twice = 1.0 if self.monotone and relation != "replace_one" else 2.0
        threshold, query = np.asarray(self.threshold_scale), np.asarray(self.query_scale)
        epsilon = sensitivity(relation) * (1.0 / threshold + twice * np.asarray(self.answers) / query)
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

    value_scale : finite, > 0; a scalar or an array.  The others as in AboveThreshold.

    Source: Lyu, Su, Li 2017; Vadhan, Zhang 2023.

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

    @property
    def kind(self) -> str:
        return "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        value = Laplace(self.value_scale).part(np.asarray(1.0), relation, direction)
        return [*self._finding().expand(relation, direction), (value, np.asarray(self.answers))]

    def symmetric(self) -> bool:
        return True

    def _finding(self) -> AboveThreshold:
        return AboveThreshold(self.threshold_scale, self.query_scale, self.answers, self.monotone)
