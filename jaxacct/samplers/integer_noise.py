"""Exactly sampled integer noise with its privacy guarantee, and the mechanism AboveThreshold with this noise."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, cast

from jaxacct.core.types import ArrayLike, Leaf, Numbers
from jaxacct.core.validation import DELTA, InputError, check
from jaxacct.mechanisms import ApproximateDP, PureDP
from jaxacct.samplers.exact_draws import discrete_gaussian, discrete_laplace, generator, rational, round_up, whole


class _IntegerNoise:
    """Base class of noise that is added to integer counts. All fields are stored as exact fractions."""

    def __post_init__(self) -> None:
        for field in fields(cast(Any, self)):
            object.__setattr__(self, field.name, rational(field.name, getattr(self, field.name)))

    def _draw(self, source: random.Random) -> int:
        raise NotImplementedError  # each subclass draws from its own law

    def release(self, counts: ArrayLike, rng: random.Random | None = None) -> Numbers:
        """Return the count, or each of a list, plus independent noise. Pass a seeded `rng` in tests only."""
        source = generator(rng)
        if isinstance(counts, str | bytes | dict):
            raise InputError(f"counts must be an integer or a list of them, not {type(counts).__name__}; use [3, 1, 4]")
        if isinstance(counts, Iterable):
            checked = [whole(f"counts[{i}]", count) for i, count in enumerate(counts)]
            return [count + self._draw(source) for count in checked]
        return whole("counts", counts) + self._draw(source)


@dataclass(frozen=True)
class DiscreteLaplaceNoise(_IntegerNoise):
    """Integer noise with Pr[x] proportional to exp(-|x|/scale), added to integer counts: (sensitivity/scale)-DP.

    The noise is sampled exactly in integer arithmetic. The running time depends on the noise: keep the time secret.

    Parameters
    ----------
    scale : int, float or Fraction > 0, taken exactly
    sensitivity : int, float or Fraction > 0, taken exactly
        Largest L1 distance between the counts of data sets that are neighbours under the relation of the guarantee.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Algorithm 2.

    >>> noise = DiscreteLaplaceNoise(scale=2)
    >>> noise.privacy
    PureDP(epsilon=0.5)
    >>> isinstance(noise.release(100), int)
    True
    """

    scale: Leaf
    sensitivity: Leaf = 1

    @property
    def privacy(self) -> PureDP:
        """Guarantee of one call of `release`, for a single count or for a whole list of counts."""
        return PureDP(round_up(self.sensitivity / self.scale))

    def _draw(self, source: random.Random) -> int:
        return discrete_laplace(self.scale, source)


@dataclass(frozen=True)
class DiscreteGaussianNoise(_IntegerNoise):
    """Integer noise with Pr[x] proportional to exp(-x^2/(2 variance)): (sensitivity^2/(2 variance))-zCDP.

    The noise is sampled exactly in integer arithmetic. The running time depends on the noise: keep the time secret.

    Parameters
    ----------
    variance : int, float or Fraction > 0, taken exactly
    sensitivity : int, float or Fraction > 0, taken exactly
        Largest L2 distance between the counts of data sets that are neighbours under the relation of the guarantee.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Algorithm 3, Theorem 4 and its multivariate form; for `privacy`: Bun and
    Steinke (2016), Proposition 1.3.

    >>> noise = DiscreteGaussianNoise(variance=100)
    >>> noise.rho, round(noise.privacy(1e-5).epsilon, 6)
    (0.005, 0.484853)
    """

    variance: Leaf
    sensitivity: Leaf = 1

    @property
    def rho(self) -> float:
        """The rho of the zCDP guarantee of one release: sensitivity^2 / (2 variance), rounded up to a float."""
        return round_up(self.sensitivity**2 / (2 * self.variance))

    def privacy(self, delta: float) -> ApproximateDP:
        """Return the (epsilon, delta)-DP of one release, by zCDP: epsilon = rho + 2 sqrt(rho log(1/delta))."""
        target = float(check("delta", delta, DELTA))
        epsilon = self.rho + 2.0 * math.sqrt(self.rho * -math.log(target))
        return ApproximateDP(epsilon * (1 + 4 * 2.0**-52), target)

    def _draw(self, source: random.Random) -> int:
        return discrete_gaussian(self.variance, source)


class SparseVector:
    """AboveThreshold: says for one integer query after another whether it is above a threshold, until the first yes.

    All answers together are epsilon-DP, however many queries there are and however they depend on earlier answers. The
    threshold gets discrete Laplace noise of scale 2 Delta / epsilon, and each query noise of scale 4 Delta / epsilon.
    If a query is a fraction of n people, multiply the fraction by n. To get c positive answers use c instances, which
    together guarantee `ja.repeat(privacy, c)`.

    Parameters
    ----------
    epsilon : int, float or Fraction > 0, taken exactly
    threshold : int
    sensitivity : int >= 1
        Delta, the largest change of any query between neighbours under the relation of the guarantee.
    rng : random.Random, for tests only; by default the bits come from the operating system

    References
    ----------
    Dwork and Roth (2014), Theorems 3.23 and 3.24; README.md of this folder, "AboveThreshold with discrete noise".

    >>> import random
    >>> svt = SparseVector(epsilon=2.0, threshold=100, rng=random.Random(1))
    >>> [svt.ask(count) for count in (3, 20, 500)], svt.halted
    ([False, False, True], True)
    >>> svt.privacy
    PureDP(epsilon=2.0)
    """

    def __init__(
        self, epsilon: ArrayLike, threshold: int, *, sensitivity: int = 1, rng: random.Random | None = None
    ) -> None:
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
        """Guarantee of all answers of this instance together."""
        return PureDP(round_up(self._epsilon))

    def ask(self, value: int) -> bool:
        """Return whether the noisy value is at least the noisy threshold. After the first yes, refuse every query."""
        if self.halted:
            raise InputError("SparseVector has halted after its positive answer; start a new one, which costs again")
        self.halted = whole("value", value) + discrete_laplace(self.query_scale, self._rng) >= self._noisy
        return self.halted

    def failure(self, alpha: ArrayLike, queries: int) -> float:
        """Bound the probability that any of `queries` answers is wrong by more than `alpha` (>= 0).

        Such an answer is "yes" below threshold - alpha, or "no" above threshold + alpha. It occurs only if the noise of
        the threshold or of the query exceeds alpha / 2 in size.
        """
        half = math.floor(rational("alpha", alpha, positive=False) / 2)
        count = whole("queries", queries)
        if half < 0 or count < 1:
            raise InputError(f"alpha = {alpha!r} must be >= 0 and queries = {count} >= 1; use a larger alpha or count")
        return min(1.0, (_tail(half, self.threshold_scale) + count * _tail(half, self.query_scale)) * (1 + 1e-12))

    def accuracy(self, beta: ArrayLike, queries: int) -> int:
        """Return the smallest even alpha >= 2 for which `failure(alpha, queries)` is at most `beta`.

        Alpha is about 8 Delta (log queries + log(2/beta)) / epsilon.

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
    """Compute Pr[|x| > size] for discrete Laplace noise x of scale `scale`."""
    least, last = (math.exp(-float(min(count / scale, Fraction(1000)))) for count in (1, size + 1))  # e^-1000 is 0.0
    return 2.0 * last / (1.0 + least)
