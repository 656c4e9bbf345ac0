"""The sparse vector technique: AboveThreshold with exact integer noise."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

from jaxacct.core.validation import DELTA, InputError, check
from jaxacct.mechanisms import PureDP
from jaxacct.samplers.exact_draws import discrete_laplace, generator, rational, round_up, whole

__all__ = ["SparseVector"]


class SparseVector:
    """Says for one integer query after another whether it is above a threshold, and stops at the first yes.

    epsilon-DP for the whole sequence of answers, however many and however adaptively chosen the queries.  The threshold
    gets discrete Laplace noise of scale 2 Delta / epsilon, each query noise of scale 4 Delta / epsilon.  Fractions of n
    people are counts once multiplied by n.  For c positive answers use c instances, `ja.repeat(privacy, c)`.

    Parameters
    ----------
    epsilon : int, float or Fraction > 0
        Taken exactly.
    threshold : int
    sensitivity : int >= 1
        The most by which one record moves any query.
    rng : random.Random, optional
        Only for tests; by default the system's random bits.

    References
    ----------
    Dwork and Roth (2014), Theorem 3.23; README.md of this folder, "AboveThreshold with discrete noise".

    >>> import random
    >>> svt = SparseVector(epsilon=2.0, threshold=100, rng=random.Random(1))
    >>> [svt.ask(count) for count in (3, 20, 500)], svt.halted
    ([False, False, True], True)
    >>> svt.privacy
    PureDP(epsilon=2.0)
    """

    def __init__(self, epsilon: Any, threshold: int, *, sensitivity: int = 1, rng: random.Random | None = None) -> None:
        self._epsilon = rational("epsilon", epsilon)
        unit = whole("sensitivity", sensitivity)
        if unit < 1:
            raise InputError(f"sensitivity = {unit} must be >= 1; use the most that one record moves a query")
        self._rng = generator(rng)
        self.threshold_scale = Fraction(2 * unit) / self._epsilon
        self.query_scale = Fraction(4 * unit) / self._epsilon
        self._noisy = whole("threshold", threshold) + discrete_laplace(self.threshold_scale, self._rng)
        self.halted = False

    @property
    def privacy(self) -> PureDP:
        """The guarantee of all the answers together."""
        return PureDP(round_up(self._epsilon))

    def ask(self, value: int) -> bool:
        """Whether the noisy value reaches the noisy threshold; after the first yes no more are answered."""
        if self.halted:
            raise InputError("SparseVector has halted after its positive answer; start a new one, which costs again")
        self.halted = whole("value", value) + discrete_laplace(self.query_scale, self._rng) >= self._noisy
        return self.halted

    def failure(self, alpha: Any, queries: int) -> float:
        """A bound on the probability that any of `queries` answers is wrong by more than `alpha` (>= 0).

        Wrong: "yes" for a value below threshold - alpha, or "no" for one above threshold + alpha. All are
        right while no noise exceeds alpha / 2, and Pr[|x| > t] = 2 e^{-(floor(t)+1)/b} / (1 + e^{-1/b}).
        """
        half = math.floor(rational("alpha", alpha, positive=False) / 2)
        count = whole("queries", queries)
        if half < 0 or count < 1:
            raise InputError(f"alpha = {alpha!r} must be >= 0 and queries = {count} >= 1; use a larger alpha or count")
        bound = _tail(half, self.threshold_scale) + count * _tail(half, self.query_scale)
        return min(1.0, bound * (1 + 1e-12))

    def accuracy(self, beta: Any, queries: int) -> int:
        """The smallest even alpha for which `failure(alpha, queries)` is at most `beta`.

        About 8 Delta (log queries + log(2/beta)) / epsilon [Dwork and Roth 2014, Theorem 3.24].

        >>> SparseVector(1.0, 0).accuracy(0.05, queries=100)
        60
        """
        target = float(check("beta", beta, DELTA))
        high = 1
        while self.failure(2 * high, queries) > target:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.failure(2 * middle, queries) <= target else (middle, high)
        return 2 * high


def _tail(size: int, scale: Fraction) -> float:
    """Pr[|x| > size] of discrete Laplace noise."""
    rate = 1.0 / float(scale)
    return 2.0 * math.exp(-rate * (size + 1)) / (1.0 + math.exp(-rate))
