"""Integer noise, sampled exactly, with the guarantee it gives."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxacct.core.validation import DELTA, InputError, check
from jaxacct.mechanisms import ApproximateDP, PureDP
from jaxacct.samplers.exact_draws import discrete_gaussian, discrete_laplace, generator, rational, round_up, whole

__all__ = ["DiscreteGaussianNoise", "DiscreteLaplaceNoise"]


@dataclass(frozen=True)
class DiscreteLaplaceNoise:
    """Adds integers with Pr[x] proportional to exp(-|x|/scale) to integer counts: (sensitivity/scale)-DP.

    Sampled exactly in integer arithmetic, so the guarantee holds as implemented.  The running time depends on the noise
    drawn: do not let it be observed.

    Parameters
    ----------
    scale : int, float or Fraction > 0
        Taken exactly.
    sensitivity : int, float or Fraction > 0
        The largest L1 distance between the counts of neighbours, for whichever neighbouring relation it was worked out.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Algorithm 2.

    >>> noise = DiscreteLaplaceNoise(scale=2)
    >>> noise.privacy
    PureDP(epsilon=0.5)
    >>> isinstance(noise.release(100), int)
    True
    """

    scale: Any
    sensitivity: Any = 1

    def __post_init__(self) -> None:
        for name in ("scale", "sensitivity"):
            object.__setattr__(self, name, rational(name, getattr(self, name)))

    @property
    def privacy(self) -> PureDP:
        """The guarantee of one release (of one count or a vector of them)."""
        return PureDP(round_up(self.sensitivity / self.scale))

    def release(self, counts: Any, rng: random.Random | None = None) -> Any:
        """The count, or the list of counts, with fresh noise; from the system's random bits by default.

        A seeded `random.Random` is for tests: its noise can be predicted. InputError for what is no integer.
        """
        source = generator(rng)
        return _added(counts, lambda: discrete_laplace(self.scale, source))


@dataclass(frozen=True)
class DiscreteGaussianNoise:
    """Adds integers with Pr[x] proportional to exp(-x^2/(2 variance)): (sensitivity^2/(2 variance))-zCDP.

    Sampled exactly in integer arithmetic.  The running time depends on the noise drawn: do not let it be observed.

    Parameters
    ----------
    variance : int, float or Fraction > 0
        Taken exactly.
    sensitivity : int, float or Fraction > 0
        The largest L2 distance between the counts of neighbours.

    References
    ----------
    Canonne, Kamath and Steinke (2020), Algorithm 3, Theorem 4 and its multivariate form.

    >>> noise = DiscreteGaussianNoise(variance=100)
    >>> noise.rho, round(noise.privacy(1e-5).epsilon, 6)
    (0.005, 0.484853)
    """

    variance: Any
    sensitivity: Any = 1

    def __post_init__(self) -> None:
        for name in ("variance", "sensitivity"):
            object.__setattr__(self, name, rational(name, getattr(self, name)))

    @property
    def rho(self) -> float:
        """The zero-concentrated guarantee, sensitivity^2 / (2 variance), rounded up."""
        return round_up(self.sensitivity**2 / (2 * self.variance))

    def privacy(self, delta: float) -> ApproximateDP:
        """(rho + 2 sqrt(rho log(1/delta)), delta)-DP [Bun and Steinke 2016, Proposition 1.3]: a bound."""
        target = float(check("delta", delta, DELTA))
        epsilon = self.rho + 2.0 * math.sqrt(self.rho * -math.log(target))
        return ApproximateDP(epsilon * (1 + 4 * 2.0**-52), target)

    def release(self, counts: Any, rng: random.Random | None = None) -> Any:
        """The count, or the list of counts, with fresh noise; otherwise as for DiscreteLaplaceNoise."""
        source = generator(rng)
        return _added(counts, lambda: discrete_gaussian(self.variance, source))


def _added(counts: Any, draw: Any) -> Any:
    if isinstance(counts, str | bytes | dict):
        raise InputError(f"counts must be an integer or a list of them, not {type(counts).__name__}; use [3, 1, 4]")
    if isinstance(counts, Iterable):
        checked = [whole(f"counts[{i}]", count) for i, count in enumerate(counts)]
        return [count + draw() for count in checked]
    return whole("counts", counts) + draw()
