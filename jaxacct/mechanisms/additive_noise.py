"""Mechanisms that add noise to a statistic: Gaussian, Laplace, discrete, or scaled to a smooth sensitivity."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import LOST_TAIL, ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.types import Leaf
from jaxacct.core.validation import NOISE, POSITIVE, Constraint, InputError, check_int, refuse_where
from jaxacct.mechanisms.base import (
    SENSITIVITY,
    AdditiveNoise,
    FinitePair,
    GaussianPart,
    LaplacePart,
    batch_shape,
    register,
)
from jaxacct.mechanisms.finite import FiniteMechanism, OfFinitePair
from jaxacct.mechanisms.profile import LEAST_GAP, pair_of_profile, stacked

MOST_UNGROUPED_OUTCOMES = 4096
"""Most outcomes that each get their own loss. DiscreteGaussian groups more outcomes, DiscreteLaplace refuses them."""
MOST_GROUPED_OUTCOMES = 2**21
"""Largest number of outcomes of the discrete Gaussian; all of them are held in memory at once."""
ENOUGH_NOISE = Constraint("use more noise; below that it hides nothing", 0.01)
"""Smallest noise, in units of the statistic; with less noise, the release is nearly always the statistic itself."""
REACH_IN_DEVIATIONS = 37.5
"""The discrete Gaussian is cut off at this many deviations, where its density is 4e-306 of the largest."""
LOSS_CELLS = 2048
"""Number of cells of the loss grid of ``laplace_pair``; the grid adds about 1e-5 to epsilon."""
PROFILE_POINTS = (2000, 500)
"""Numbers of points of a Gaussian's profile, at epsilon = mu (mu/2 + z). The first is for z from 0 to 12. The second is
for z from 12 to 37, and again for z below 0. The chords between the points add about 1e-5 to epsilon."""


@register
class Gaussian(AdditiveNoise):
    """Gaussian noise of standard deviation ``noise_multiplier`` times the add/remove sensitivity.

    The pair is N(1, s^2), N(0, s^2). In both directions the loss is N(1/(2 s^2), 1/s^2) and the profile is

        delta(eps) = Phi(1/(2s) - eps s) - e^eps Phi(-1/(2s) - eps s).

    Under ``replace_one`` the sensitivity is 2, so s is halved.

    If only rho-zCDP is known, use `jaxacct.ZCDP`: such a mechanism may leak more than ``Gaussian(1/sqrt(2 rho))``.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        s, relative to the add/remove sensitivity; one configuration per element.

    References
    ----------
    Balle, Wang (2018), Improving the Gaussian Mechanism for Differential Privacy.

    >>> Gaussian(noise_multiplier=1.5)
    Gaussian(noise_multiplier=1.5)
    >>> Gaussian([1.0, 2.0]).noise_multiplier
    array([1., 2.])
    """

    exact_pair: ClassVar = True
    noise_multiplier: Leaf
    constraints: ClassVar = {"noise_multiplier": NOISE}
    law: ClassVar = GaussianPart

    def gaussians(self) -> list[tuple[Any, tuple[Any, ...]]]:
        return [(self.noise_multiplier, ())]

    def finite_pair(self, relation: str) -> FinitePair:
        mu = SENSITIVITY[relation] / np.asarray(self.noise_multiplier)
        return stacked([gaussian_pair(one) for one in mu.ravel()], mu.shape)


def gaussian_pair(mu: float, factor: float = 1.0, other: float = np.inf) -> FinitePair:
    """Return a pair whose profile is >= min(1, factor d(mu), d(other)); d(m) is the profile of N(m, 1) and N(0, 1)."""
    mu, other = mu * (1.0 + 8.0 * ROUNDOFF), other * (1.0 + 8.0 * ROUNDOFF)
    if other == 0.0:
        return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
    epsilon = _points_of_gaussian(mu) if other > mu else _points_of_gaussian(other)
    if mu < other < factor * mu:
        epsilon = np.union1d(epsilon, _points_of_gaussian(other))
        epsilon = epsilon[np.append(True, np.diff(epsilon) > LEAST_GAP)]
    delta = np.minimum(factor * (1.0 + 2.0 * ROUNDOFF) * profile_of_gaussian(mu, epsilon), 1.0)
    if other < np.inf:
        delta = np.maximum(np.minimum(delta, profile_of_gaussian(other, epsilon)), SMALLEST_POSITIVE)
    return pair_of_profile(epsilon, delta, delta)


def _points_of_gaussian(mu: float) -> np.ndarray:
    """Return the epsilons at which the profile of a Gaussian of sensitivity mu is evaluated."""
    z = np.concatenate(
        [np.linspace(0.0, 12.0, PROFILE_POINTS[0], endpoint=False), np.linspace(12.0, 37.0, PROFILE_POINTS[1])]
    )
    epsilon = mu * (0.5 * mu + z)
    below = np.linspace(0.0, epsilon[0], PROFILE_POINTS[1], endpoint=False)
    return np.concatenate([below, epsilon])


def profile_of_gaussian(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """Return upper bounds of delta for a Gaussian of sensitivity mu and sigma 1 (README.md, "A Gaussian's profile")."""
    from scipy import special  # slow to import

    place = epsilon / mu
    a, b = place - 0.5 * mu, place + 0.5 * mu
    slack = 2.0 * ROUNDOFF * (place + np.abs(a))  # bounds the rounding of a and of b
    mills_a, mills_b = (np.sqrt(np.pi / 2) * special.erfcx(x / np.sqrt(2)) for x in (np.maximum(a, 0.0), b))
    density = np.exp(-0.5 * a**2) / np.sqrt(2 * np.pi)
    moved = mu * mills_b * slack
    tail = density * (mills_a - mills_b + 1e-13 * mills_a + moved) * (1.0 + ROUNDOFF * (64.0 + 2.0 * a**2))
    near = special.ndtr(-a) - density * (mills_b - moved) + 1e-13
    delta = np.where(a > 0.0, tail + 4.0 * SMALLEST_POSITIVE, near)
    # delta is Phi(-a) less a positive term, so Phi(-a) bounds delta where the rounding error `slack` is large
    return np.where(slack <= 1e-3, delta, special.ndtr(slack - a) + 1e-13)


@register
class Laplace(AdditiveNoise):
    """Laplace noise of scale ``scale`` times the add/remove sensitivity: (1/scale)-DP.

    The pair is Lap(0, b), Lap(1, b), with delta(eps) = 1 - e^{(eps - 1/b)/2} for 0 <= eps <= 1/b. Under ``replace_one``
    the sensitivity is 2, so b is halved.

    Parameters
    ----------
    scale : array_like > 0, finite
        b, relative to the add/remove sensitivity; one configuration per element.

    References
    ----------
    Dwork, McSherry, Nissim, Smith (2006), Calibrating Noise to Sensitivity in Private Data Analysis.
    Balle, Barthe, Gaboardi (2018), Privacy Amplification by Subsampling (the profile).

    >>> Laplace(scale=10.0)
    Laplace(scale=10.0)
    """

    exact_pair: ClassVar = True
    scale: Leaf
    constraints: ClassVar = {"scale": POSITIVE}
    law: ClassVar = LaplacePart

    def finite_pair(self, relation: str) -> FinitePair:
        return laplace_pair(SENSITIVITY[relation] / np.asarray(self.scale))


def laplace_pair(largest: np.ndarray) -> FinitePair:
    """Return a pair that dominates Laplace noise of largest loss `largest`, one number per configuration."""
    # Adjacent losses x of the pair differ by d. Except at both ends, the P-mass of x is e^{(x - largest)/2} tanh(d/4).
    top = largest[..., None]
    place = np.arange(LOSS_CELLS + 1) / LOSS_CELLS
    ends = (place == 0.0) | (place == 1.0)
    height = np.tanh(0.5 * top / LOSS_CELLS) * np.where(ends, 0.5, 1.0)
    p = np.exp(-top * (1.0 - place)) * (height + np.where(ends, 0.5, 0.0))
    zero = np.zeros(top.shape[:-1])
    return FinitePair(top * (2.0 * place - 1.0), p, p[..., ::-1], zero, zero)


class _IntegerNoise(OfFinitePair):
    """Log-concave, symmetric noise on the integers; a record moves the integer statistic by at most ``sensitivity``."""

    follows_relation: ClassVar = True
    sensitivity: int

    def __post_init__(self) -> None:
        value = check_int("sensitivity", self.sensitivity, 1, "scale the statistic to integers")
        object.__setattr__(self, "sensitivity", value)
        super().__post_init__()

    @abstractmethod
    def pair(self, shift: int) -> FinitePair:
        """Return the pair (P, Q): P is the law of the noise plus `shift`, Q the law of the noise."""

    def finite_pair(self, relation: str) -> FinitePair:
        return self.pair(self.sensitivity * int(SENSITIVITY[relation]))


@register
class DiscreteGaussian(_IntegerNoise):
    """Discrete Gaussian noise: Pr[x] proportional to e^{-x^2/(2 sigma^2)} on the integers.

    P is the law of the noise shifted by ``sensitivity`` D, Q the law of the noise; ``replace_one`` doubles D. The mass
    beyond 37.5 sigma, less than 1e-303, counts as mass at infinity. If there are more than 4096 outcomes (75 sigma +
    2 D), they are grouped. This adds about 1e-5 to epsilon, and ``kind`` is "bound" for the whole batch.

    Parameters
    ----------
    sigma : array_like >= 0.01
        Parameter in units of the statistic, at most about 27,900. Beyond, use ``ja.ZCDP(D**2 / (2 * sigma**2))``.
    sensitivity : int >= 1
        How far one record can move the statistic under add/remove.

    References
    ----------
    Canonne, Kamath, Steinke (2020), The Discrete Gaussian for Differential Privacy.

    >>> import jaxacct as ja
    >>> round(float(ja.epsilon(ja.DiscreteGaussian(sigma=2.0), 1e-5).upper), 6)
    2.01134
    """

    sigma: Leaf
    sensitivity: int = field(default=1, metadata={"static": True})
    constraints: ClassVar = {"sigma": ENOUGH_NOISE}

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound" if np.any(self._outcomes(2 * self.sensitivity) > MOST_UNGROUPED_OUTCOMES) else "certified"

    def pair(self, shift: int) -> FinitePair:
        sigma = np.asarray(self.sigma, np.float64)
        outcomes = self._outcomes(shift)
        rest = lambda index: (
            f"needs {int(min(float(outcomes[index]), 2.0**53))} outcomes, must be <= {MOST_GROUPED_OUTCOMES}; "
            "use ja.ZCDP(sensitivity**2 / (2 * sigma**2)), which leaks no less"
        )
        refuse_where(outcomes > MOST_GROUPED_OUTCOMES, "sigma", sigma, rest)
        many = self._outcomes(2 * self.sensitivity) > MOST_UNGROUPED_OUTCOMES
        rows = zip(sigma.ravel().tolist(), many.ravel().tolist(), strict=True)
        return stacked([_gaussian_pair(one, shift, grouped) for one, grouped in rows], sigma.shape)

    def _outcomes(self, shift: int) -> np.ndarray:
        return 2.0 * np.ceil(REACH_IN_DEVIATIONS * np.asarray(self.sigma, np.float64)) + shift + 1.0


@register
class DiscreteLaplace(_IntegerNoise):
    """Discrete Laplace (two-sided geometric) noise: Pr[x] proportional to e^{-|x|/scale} on the integers.

    P is the law of the noise shifted by ``sensitivity`` D, Q that of the noise: (D/scale)-DP. `replace_one` doubles D.

    Parameters
    ----------
    scale : array_like >= 0.01
        Parameter in units of the statistic; one configuration per element.
    sensitivity : int >= 1
        D, the largest move of the statistic under add/remove. D (2 D under ``replace_one``) must be below 4096.

    References
    ----------
    Ghosh, Roughgarden, Sundararajan (2009), Universally Utility-Maximizing Privacy Mechanisms.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.DiscreteLaplace(scale=1.0), 0.5)  # (1 - e^{1/2 - 1})/(1 + e^-1)
    >>> round(float(b.upper), 6)
    0.287649
    """

    exact_pair: ClassVar = True
    scale: Leaf
    sensitivity: int = field(default=1, metadata={"static": True})
    constraints: ClassVar = {"scale": ENOUGH_NOISE}

    def pair(self, shift: int) -> FinitePair:
        scale = np.asarray(self.scale, np.float64)
        if shift >= MOST_UNGROUPED_OUTCOMES:
            raise InputError(
                f"sensitivity = {shift} needs {shift + 1} outcomes, must be <= {MOST_UNGROUPED_OUTCOMES}; "
                "use ja.PureDP(sensitivity / scale), which leaks no less"
            )
        at = np.arange(shift + 1, dtype=np.float64)
        rate = 1.0 / scale[..., None]
        ratio = np.exp(-rate)
        inner = -np.expm1(-rate)
        share = np.where((at == 0.0) | (at == shift), 1.0, inner) / (1.0 + ratio)
        p, q = share * np.exp(-rate * (shift - at)), share * np.exp(-rate * at)
        zero = np.zeros(scale.shape)
        return FinitePair((2.0 * at - shift) * rate, p, q, zero, zero)


def _gaussian_pair(sigma: float, shift: int, grouped: bool) -> FinitePair:
    reach = np.ceil(REACH_IN_DEVIATIONS * sigma)
    at = np.arange(-reach, reach + shift + 1.0)

    def mass(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) <= reach, np.exp(-0.5 * np.square(x / sigma)), 0.0)

    q = mass(at)
    p, q = mass(at - shift) / q.sum(), q / q.sum()
    # A tail has Pr[X >= m] <= e^{-m^2/(2 sigma^2)} (Canonne, Kamath, Steinke 2020, Proposition 25). Both tails count as
    # mass at infinity. 1e-320 keeps this mass above 0, since the loss is unbounded.
    beyond = np.asarray(max(2.0 * np.exp(-0.5 * np.square(reach / sigma)), 1e-320))
    if grouped:
        at, p, q = _grouped(at, p, q, shift / sigma / sigma, sigma, shift)
    return FinitePair(shift * (at - 0.5 * shift) / sigma / sigma, p, q, beyond, beyond)


def _grouped(
    at: np.ndarray, p: np.ndarray, q: np.ndarray, slope: float, sigma: float, shift: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (nodes, p, q): each outcome's mass moves to the two nodes beside it. This raises the profile a little."""
    low, high = -9.0 * sigma, shift + 9.0 * sigma
    # grouping with this number of nodes adds about 1e-5 to epsilon
    ends = (np.linspace(at[0], low, 250), np.linspace(low, high, 3400), np.linspace(high, at[-1], 250))
    nodes = np.unique(np.rint(np.concatenate(ends)))
    cell = np.minimum(np.searchsorted(nodes, at, side="right") - 1, nodes.size - 2)
    below, above = slope * (at - nodes[cell]), slope * (nodes[cell + 1] - at)
    whole = -np.expm1(-below - above)
    rise, fall = -np.expm1(-below) / whole, -np.expm1(-above) / whole
    many = np.bincount(cell, minlength=nodes.size)
    grown = 1.0 + ROUNDOFF * (many + np.append(0, many[:-1]) + 16.0)

    def collected(to_lower: np.ndarray, to_upper: np.ndarray) -> np.ndarray:
        lower, upper = (np.bincount(cell + k, x, nodes.size) for k, x in enumerate((to_lower, to_upper)))
        return (lower + upper) * grown

    return nodes, collected(p * np.exp(-below) * fall, p * rise), collected(q * fall, q * np.exp(-above) * rise)


@register
class SmoothSensitivityGaussian(FiniteMechanism):
    """A number f(X) plus Gaussian noise of standard deviation ``noise_multiplier`` * S(X); S(X) depends on the data.

    S is a b-smooth upper bound of the local sensitivity: |f(X) - f(X')| <= S(X) and S(X) <= e^b S(X') for all
    neighbours under the relation that is asked about. With R = e^b and m = 1/noise_multiplier, at every eps >= 0 one of
    three pairs has the largest delta (README.md, "Smooth sensitivity"):

        N(m, 1), N(0, 1);   N(m, R^2), N(0, 1);   N(m, 1), N(0, R^2)

    Rényi divergences of orders above 1 + 1/(R^2 - 1) are infinite, although delta is small. The answers are for one
    pair that dominates the three, which adds about 1e-5 to epsilon if b is small; ``kind`` is "bound".

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise, divided by S(X).
    smoothness : array_like in [0, 10]
        b, which broadcasts with the noise multiplier; 0 is the Gaussian mechanism.

    References
    ----------
    Nissim, Raskhodnikova, Smith (2007), Smooth Sensitivity and Sampling in Private Data Analysis.
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Example 14.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.SmoothSensitivityGaussian(noise_multiplier=4.0, smoothness=0.05), 1e-6)
    >>> b.kind, round(float(b.upper), 3), round(float(ja.epsilon(ja.Gaussian(4.0), 1e-6).upper), 3)
    ('bound', 2.106, 1.061)
    """

    noise_multiplier: Leaf
    smoothness: Leaf
    constraints: ClassVar = {
        "noise_multiplier": POSITIVE,
        "smoothness": Constraint("use a smoother bound of the sensitivity", 0, 10),
    }

    def pair(self) -> FinitePair:
        shape = batch_shape(self)
        fields = (np.broadcast_to(x, shape).ravel() for x in (self.noise_multiplier, self.smoothness))
        return stacked([_pair(1.0 / sigma, b) for sigma, b in zip(*fields, strict=True)], shape)


def _pair(m: float, smoothness: float) -> FinitePair:
    """Return a pair whose profile is nowhere below the profiles of the three pairs of `SmoothSensitivityGaussian`."""
    ratio, more = np.exp(smoothness), np.expm1(2.0 * smoothness)
    first = max(float(_above(m, smoothness, np.zeros(1))[0][0]), -9.0)
    # The quantiles end at 37 deviations, where the tail is 6e-300. The chords add about 1e-5 to epsilon.
    z = np.append(np.linspace(first, 9.0, 2500), np.linspace(9.0, 37.0, 400)[1:])
    loss = 0.5 * (m * m + 2.0 * m * ratio * z + more * z * z) - smoothness
    epsilon = np.append(0.0, loss[loss > 1e-9 * loss[-1]])
    families = (_wider(m, 0.0, epsilon), _wider(m, smoothness, epsilon), _narrower(m, smoothness, epsilon))
    delta = np.minimum(np.max(families, axis=0), 1.0)
    return pair_of_profile(epsilon, delta, delta)


def _above(m: float, smoothness: float, epsilon: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return (high - m)/R, (low - m)/R, high, low. log N(m, R^2)/N(0, 1) is epsilon at high > low. R = e^smoothness."""
    ratio, more = np.exp(smoothness), np.expm1(2.0 * smoothness)
    rise = 2.0 * smoothness + 2.0 * epsilon
    root = np.sqrt(m * m + more * rise)
    high = (rise - m * m) / (root + m * ratio)
    with np.errstate(divide="ignore", over="ignore"):
        low = -(m * ratio + root) / more
        low_q = -(m + ratio * root) / more
    return high, low, (m * root + ratio * rise) / (root + m * ratio), low_q


def _wider(m: float, smoothness: float, epsilon: np.ndarray) -> np.ndarray:
    """Bound the hockey-stick divergence H_{e^eps}(N(m, R^2) || N(0, 1)) from above, with R = e^smoothness."""
    from scipy import special  # slow to import

    high, low, high_q, low_q = _above(m, smoothness, epsilon)
    gain = special.ndtr(-high) + special.ndtr(low)
    cost = np.exp(epsilon + special.log_ndtr(-high_q)) + np.exp(epsilon + special.log_ndtr(low_q))
    return np.maximum(gain - cost, 0.0) + _rounding(epsilon) * (gain + cost) + LOST_TAIL


def _narrower(m: float, smoothness: float, epsilon: np.ndarray) -> np.ndarray:
    """Bound H_{e^eps}(N(m, 1) || N(0, R^2)) from above, R = e^smoothness. If R = 1, return 0: `_wider` covers it."""
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
    """Return the relative rounding error allowed for each of the two terms (gain and cost) of which delta is made."""
    return 1e-12 + 32.0 * ROUNDOFF * epsilon
