"""Gaussian noise whose variance depends on the data, by a smooth bound of the local sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import LOST_TAIL, ROUNDOFF
from jaxacct.core.validation import POSITIVE, Constraint
from jaxacct.mechanisms.base import batch_shape, register
from jaxacct.mechanisms.finite import FiniteMechanism
from jaxacct.mechanisms.parts import FinitePair
from jaxacct.mechanisms.profile import pair_of_profile, stacked

__all__ = ["SmoothSensitivityGaussian"]

CENTRAL_QUANTILES, TAIL_QUANTILES = 2500, 400
"""Quantiles at which the profile is taken: up to 9 deviations, and beyond up to 37.

So many cost about 1e-5 in epsilon; at 37 deviations the normal tail is 6e-300."""
SMOOTHNESS = Constraint("use a smoother bound of the sensitivity", 0, 10)
"""Range of b: at 10 the noise of two neighbours may differ by a factor of e^10, beyond any use."""


@register
@dataclass(frozen=True, eq=False)
class SmoothSensitivityGaussian(FiniteMechanism):
    """A number f(X) plus Gaussian noise of deviation ``noise_multiplier`` * S(X), where S(X) depends on the data.

    S is a b-smooth upper bound of the local sensitivity: |f(X) - f(X')| <= S(X) and S(X) <= e^b S(X') for all
    neighbours of the relation in use, whichever it is. With R = e^b and m = 1/noise_multiplier the pairs of
    neighbours are N(m', r^2), N(0, 1) with 1/R <= r <= R and |m'| <= m min(1, r), and their largest delta(eps),
    eps >= 0, is that of one of

        N(m, 1), N(0, 1);   N(m, R^2), N(0, 1);   N(m, 1), N(0, R^2)

    (proof in README.md, "Smooth sensitivity"). The loss has no moment generating function beyond 1/(R^2 - 1), so no
    Renyi divergence of orders above 1 + 1/(R^2 - 1), yet its delta is small. The profile is put on 2900 losses from
    above (about 1e-5 in epsilon where b is small): ``kind`` is "bound". Alike in both directions.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise over S(X).
    smoothness : array_like in [0, 10]
        b; 0 is the Gaussian mechanism. Broadcasts with the noise multiplier.

    References
    ----------
    Nissim, Raskhodnikova, Smith (2007), Smooth Sensitivity and Sampling in Private Data Analysis.
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Example 14.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.SmoothSensitivityGaussian(noise_multiplier=4.0, smoothness=0.05), 1e-6)
    >>> b.kind, round(float(b.upper), 3), round(float(ja.epsilon(ja.Gaussian(4.0), 1e-6).upper), 3)
    ('bound', 2.106, 1.061)
    """

    noise_multiplier: Any
    smoothness: Any
    constraints: ClassVar = {"noise_multiplier": POSITIVE, "smoothness": SMOOTHNESS}

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def pair(self) -> FinitePair:
        shape = batch_shape(self)
        fields = (np.broadcast_to(x, shape).ravel() for x in (self.noise_multiplier, self.smoothness))
        return stacked([_pair(1.0 / sigma, b) for sigma, b in zip(*fields, strict=True)], shape)


def _pair(m: float, smoothness: float) -> FinitePair:
    """The pair of the profile at the losses of a grid of quantiles of N(m, R^2)."""
    ratio, more = np.exp(smoothness), np.expm1(2.0 * smoothness)
    first = max(float(_above(m, smoothness, np.zeros(1))[0][0]), -9.0)
    z = np.append(np.linspace(first, 9.0, CENTRAL_QUANTILES), np.linspace(9.0, 37.0, TAIL_QUANTILES)[1:])
    loss = 0.5 * (m * m + 2.0 * m * ratio * z + more * z * z) - smoothness
    epsilon = np.append(0.0, loss[loss > 1e-9 * loss[-1]])
    families = (_wider(m, 0.0, epsilon), _wider(m, smoothness, epsilon), _narrower(m, smoothness, epsilon))
    delta = np.minimum(np.max(families, axis=0), 1.0)
    return pair_of_profile(epsilon, delta, delta)


def _above(m: float, smoothness: float, epsilon: np.ndarray) -> tuple[np.ndarray, ...]:
    """Where log dP/dQ = epsilon >= 0 for P = N(m, R^2), Q = N(0, 1): above and below, in deviations of P, then of Q."""
    ratio, more = np.exp(smoothness), np.expm1(2.0 * smoothness)
    rise = 2.0 * smoothness + 2.0 * epsilon
    root = np.sqrt(m * m + more * rise)
    high = (rise - m * m) / (root + m * ratio)
    with np.errstate(divide="ignore", over="ignore"):
        low = -(m * ratio + root) / more
        low_q = -(m + ratio * root) / more
    return high, low, (m * root + ratio * rise) / (root + m * ratio), low_q


def _wider(m: float, smoothness: float, epsilon: np.ndarray) -> np.ndarray:
    """H_{e^eps}(N(m, R^2) || N(0, 1)), rounded up."""
    from scipy import special  # takes a while to import: only where it is needed

    high, low, high_q, low_q = _above(m, smoothness, epsilon)
    gain = special.ndtr(-high) + special.ndtr(low)
    cost = np.exp(epsilon + special.log_ndtr(-high_q)) + np.exp(epsilon + special.log_ndtr(low_q))
    return np.maximum(gain - cost, 0.0) + _rounding(epsilon) * (gain + cost) + LOST_TAIL


def _narrower(m: float, smoothness: float, epsilon: np.ndarray) -> np.ndarray:
    """H_{e^eps}(N(m, 1) || N(0, R^2)), rounded up: the gain inside an interval, which is empty for large eps."""
    from scipy import special

    ratio, more = np.exp(smoothness), np.expm1(2.0 * smoothness)
    if more == 0.0:
        return np.zeros(epsilon.shape)
    rise = 2.0 * smoothness - 2.0 * epsilon
    square = m * m + more * rise
    root = np.sqrt(np.maximum(square, 0.0))
    ends = (
        ((-ratio * rise - m * root) / (m * ratio + root), (m + ratio * root) / more),
        ((m * m - rise) / (m * ratio + root), (m * ratio + root) / more),
    )
    (low, high), (low_q, high_q) = ends
    size, grown = special.ndtr(-low), np.exp(np.minimum(epsilon + special.log_ndtr(-low_q), 700.0))
    gain = size - special.ndtr(-high) + _rounding(epsilon) * size + LOST_TAIL
    share = -np.expm1(np.minimum(special.log_ndtr(-high_q) - special.log_ndtr(-low_q), 0.0))
    value = np.maximum(gain - grown * share, 0.0) + _rounding(epsilon) * grown + LOST_TAIL
    return np.where(square >= 0.0, np.minimum(value, gain), 0.0)


def _rounding(epsilon: np.ndarray) -> np.ndarray:
    """Relative error allowed for the two terms whose difference is a point of the profile."""
    return 1e-12 + 32.0 * ROUNDOFF * epsilon
