"""Propose-test-release: a mechanism that is only run where its data is found to be stable."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.validation import NON_NEGATIVE, POSITIVE
from jaxacct.mechanisms.base import Combinator, register
from jaxacct.mechanisms.finite import ApproximateDP
from jaxacct.mechanisms.laplace import Laplace
from jaxacct.mechanisms.parts import Part

__all__ = ["ProposeTestRelease"]

LARGEST_RATIO = 800.0
"""For larger ratios of threshold and noise scale e^-ratio is below the smallest float64."""


@register
@dataclass(frozen=True, eq=False)
class ProposeTestRelease(Combinator):
    """Release ``mechanism`` only if the data is far enough from unstable data, by a noisy distance.

    The distance to instability is the least number of steps of the neighbouring relation to data where
    ``mechanism`` does not have its guarantee. It is released with Laplace noise of scale ``test_scale`` (it
    moves by at most 1 under that relation, whichever it is), and the mechanism is run if it comes out above
    ``threshold``. Two unstable neighbours are told apart at worst always, but pass with probability

        delta_infinity = e^{-threshold/test_scale}/2

    at most, and at any other two neighbours the mechanism has its guarantee; the composition of the Laplace
    mechanism, a mass delta_infinity at infinite loss, and the mechanism dominates both cases. ``kind`` is
    "bound". It cannot be sampled.

    Parameters
    ----------
    mechanism : Mechanism
        What is released.
    test_scale : array_like > 0, finite
        Scale of the Laplace noise on the distance; broadcasts with the mechanism's fields.
    threshold : array_like >= 0, finite
        The noisy distance above which the mechanism is run.

    Raises
    ------
    InputError
        No mechanism, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Dwork, Lei (2009), Differential Privacy and Robust Statistics. Dwork, Roth (2014), The Algorithmic Foundations of
    Differential Privacy, Section 7.3.

    >>> import jaxacct as ja
    >>> guarded = ja.ProposeTestRelease(ja.Gaussian(5.0), test_scale=2.0, threshold=30.0)
    >>> float(ja.epsilon(guarded, 1e-7).upper)  # e^{-15}/2 is 1.5e-7
    inf
    """

    mechanism: Any
    test_scale: Any
    threshold: Any
    constraints: ClassVar = {"test_scale": POSITIVE, "threshold": NON_NEGATIVE}

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        test = Laplace(self.test_scale).expand("add_or_remove_one", direction)
        missed = ApproximateDP(0.0, self._passing()).expand(relation, direction)
        return [*test, *missed, *self.mechanism.expand(relation, direction)]

    def infinity_exactly(self, direction: str) -> Fraction | None:
        inner = self.mechanism.infinity_exactly(direction)
        return None if inner is None else 1 - (1 - Fraction(float(self._passing()))) * (1 - inner)

    def _passing(self) -> np.ndarray:
        """delta_infinity, rounded up (README.md, "A Gaussian's profile") and never 0, as epsilon at 0 is infinite."""
        with np.errstate(over="ignore"):
            ratio = np.minimum(np.asarray(self.threshold) / np.asarray(self.test_scale), LARGEST_RATIO)
        return 0.5 * np.exp(-ratio) * (1.0 + ROUNDOFF * (8.0 + 2.0 * ratio)) + 2.0 * SMALLEST_POSITIVE
