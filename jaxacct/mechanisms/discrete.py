"""Integer-valued noise: the discrete Gaussian and the discrete Laplace (two-sided geometric) mechanisms."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import Constraint, InputError
from jaxacct.mechanisms.base import SENSITIVITY, BaseMechanism, register
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.parts import FinitePair, FinitePart
from jaxacct.mechanisms.profile import stacked

__all__ = ["DiscreteGaussian", "DiscreteLaplace"]

MOST_UNGROUPED_OUTCOMES = 4096
"""Outcomes above which those of the discrete Gaussian are grouped; the discrete Laplace takes no more.

The lattice engine's work grows with the number of losses."""
MOST_GROUPED_OUTCOMES = 2**21
"""Outcomes of the discrete Gaussian above which it is refused: all of them are held in memory at once."""
CENTRAL_LOSSES, LOSSES_PER_TAIL = 3400, 250
"""Losses that groups are put on: within 9 deviations of the two centres, and on either side beyond.

In all about MOST_UNGROUPED_OUTCOMES; with so many, grouping costs about 1e-5 in epsilon."""
ENOUGH_NOISE = Constraint("use more noise; below that it hides nothing", 0.01)
"""Noise in units of the statistic; with less, what is released is all but always the statistic itself."""
REACH_IN_DEVIATIONS = 37.5
"""Standard deviations of the discrete Gaussian kept on either side: e^{-37.5^2/2} is 5e-306, near the least normal
float64."""
LEAST_MASS_AT_INFINITY = 1e-320
"""Mass at infinity of every cut discrete Gaussian: however small, its loss is unbounded."""


class _IntegerNoise(BaseMechanism):
    """Noise on the integers added to an integer statistic that a record moves by at most ``sensitivity``.

    The noise is log-concave and symmetric, so that the largest shift is the worst one, in both directions
    alike.
    """

    sensitivity: int

    def __post_init__(self) -> None:
        value = self.sensitivity
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise InputError(f"sensitivity = {value!r} must be an integer >= 1; scale the statistic to integers")
        object.__setattr__(self, "sensitivity", int(value))
        super().__post_init__()

    @abstractmethod
    def pair(self, shift: int) -> FinitePair:
        """The pair noise + shift, noise."""

    def finite_pair(self, relation: str) -> FinitePair:
        return self.pair(self.sensitivity * int(SENSITIVITY[relation]))

    def part(self, rate: np.ndarray, relation: str, direction: str) -> FinitePart:
        return sample_pair(self.finite_pair(relation), rate, direction)


@register
@dataclass(frozen=True, eq=False)
class DiscreteGaussian(_IntegerNoise):
    """Discrete Gaussian noise: Pr[x] proportional to e^{-x^2/(2 sigma^2)} on the integers.

    Pair: the noise shifted by ``sensitivity`` D, and the noise; the loss at x is D (2x - D)/(2 sigma^2). What
    lies beyond 37.5 sigma, less than 1e-303 of the mass, is counted as mass at infinity. Under
    ``replace_one`` the sensitivity is 2 D. Above 4096 outcomes, about 75 sigma + 2 D, neighbouring ones are
    grouped so that the pair dominates (about 1e-5 in epsilon); ``kind`` is then "bound", for the whole batch.

    Parameters
    ----------
    sigma : array_like >= 0.01
        In units of the statistic, not relative to the sensitivity; one configuration per element.
    sensitivity : int >= 1
        The most that a record moves the statistic under add/remove.

    Raises
    ------
    InputError
        A value outside its limits, with its index; when it is asked about, also more than 2^21 outcomes (sigma >
        27,900), where the continuous Gaussian with the same sigma is close.

    References
    ----------
    Canonne, Kamath, Steinke (2020), The Discrete Gaussian for Differential Privacy.

    >>> import jaxacct as ja
    >>> round(float(ja.epsilon(ja.DiscreteGaussian(sigma=2.0), 1e-5).upper), 6)
    2.01134
    """

    sigma: Any
    sensitivity: int = field(default=1, metadata={"static": True})
    constraints: ClassVar = {"sigma": ENOUGH_NOISE}

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound" if np.any(self._outcomes(2 * self.sensitivity) > MOST_UNGROUPED_OUTCOMES) else "certified"

    def pair(self, shift: int) -> FinitePair:
        sigma = np.asarray(self.sigma, np.float64)
        _refuse_atoms(
            "sigma",
            sigma,
            self._outcomes(shift),
            MOST_GROUPED_OUTCOMES,
            "use ja.ZCDP(sensitivity**2 / (2 * sigma**2)), which leaks no less",
        )
        many = self._outcomes(2 * self.sensitivity) > MOST_UNGROUPED_OUTCOMES
        rows = zip(sigma.ravel().tolist(), many.ravel().tolist(), strict=True)
        return stacked([_gaussian_pair(one, shift, grouped) for one, grouped in rows], sigma.shape)

    def _outcomes(self, shift: int) -> np.ndarray:
        return 2.0 * np.ceil(REACH_IN_DEVIATIONS * np.asarray(self.sigma, np.float64)) + shift + 1.0


@register
@dataclass(frozen=True, eq=False)
class DiscreteLaplace(_IntegerNoise):
    """Discrete Laplace (two-sided geometric) noise: Pr[x] proportional to e^{-|x|/scale} on the integers.

    Pair: the noise shifted by ``sensitivity`` D, and the noise. With r = e^{-1/scale} the loss is D/scale
    with mass 1/(1 + r), -D/scale with mass r^D/(1 + r), and (2x - D)/scale with mass (1-r)/(1+r) r^{D-x} for
    0 < x < D: (D/scale)-DP. Under ``replace_one`` the sensitivity is 2 D.

    Parameters
    ----------
    scale : array_like >= 0.01
        In units of the statistic; one configuration per element.
    sensitivity : int >= 1
        The most that a record moves the statistic under add/remove.

    Raises
    ------
    InputError
        A value outside its limits, with its index; when it is asked about, also a shift of 4096 or more.

    References
    ----------
    Ghosh, Roughgarden, Sundararajan (2009), Universally Utility-Maximizing Privacy Mechanisms.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.DiscreteLaplace(scale=1.0), 0.5)  # (1 - e^{1/2 - 1})/(1 + e^-1)
    >>> round(float(b.upper), 6)
    0.287649
    """

    scale: Any
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
    # Pr[X >= m] <= e^{-m^2/(2 sigma^2)} on either side (Canonne, Kamath, Steinke 2020, Proposition 25)
    beyond = np.asarray(max(2.0 * np.exp(-0.5 * np.square(reach / sigma)), LEAST_MASS_AT_INFINITY))
    if grouped:
        at, p, q = _grouped(at, p, q, shift / sigma / sigma, sigma, shift)
    return FinitePair(shift * (at - 0.5 * shift) / sigma / sigma, p, q, beyond, beyond)


def _grouped(
    at: np.ndarray, p: np.ndarray, q: np.ndarray, slope: float, sigma: float, shift: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each outcome split between the nodes around it so that the sums of p, of q and of both at each loss stay.

    The loss is ``slope`` times the outcome and a constant. With d and w the distance to the lower node and
    between the two, in loss, the upper one takes (1 - e^{-d})/(1 - e^{-w}) of p and e^{d-w} times as much of
    q: the profile becomes its chords (connect the dots). Rounded up.
    """
    low, high = -9.0 * sigma, shift + 9.0 * sigma
    ends = (
        np.linspace(at[0], low, LOSSES_PER_TAIL),
        np.linspace(low, high, CENTRAL_LOSSES),
        np.linspace(high, at[-1], LOSSES_PER_TAIL),
    )
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


def _refuse_atoms(name: str, values: np.ndarray, atoms: np.ndarray, most: int, remedy: str) -> None:
    bad = atoms > most
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f"{name}{list(index) if index else ''}"
        needed = int(min(atoms[index], 2.0**53))
        raise InputError(f"{place} = {float(values[index])!r} needs {needed} outcomes, must be <= {most}; {remedy}")
