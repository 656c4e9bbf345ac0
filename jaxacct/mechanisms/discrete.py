"""Integer-valued noise: the discrete Gaussian and the discrete Laplace (two-sided geometric) mechanisms."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, register, sensitivity
from jaxacct.mechanisms.finite import FinitePair, sample_pair
from jaxacct.mechanisms.parts import FinitePart
from jaxacct.validation import Constraint, InputError

__all__ = ["DiscreteGaussian", "DiscreteLaplace"]

MOST_ATOMS = 4096
"""Largest number of outcomes that a discrete mechanism may need."""
NOISE = Constraint("use more noise; below that it hides nothing", 0.01)
REACH = 37.5
"""Standard deviations of the discrete Gaussian kept on either side: e^{-REACH^2/2} is 5e-306."""
LEAST = 1e-320
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

    def part(self, rate: np.ndarray, relation: str, direction: str) -> FinitePart:
        return sample_pair(self.pair(self.sensitivity * int(sensitivity(relation))), rate, direction)


@register
@dataclass(frozen=True, eq=False)
class DiscreteGaussian(_IntegerNoise):
    """Discrete Gaussian noise: Pr[x] proportional to e^{-x^2/(2 sigma^2)} on the integers.

    Pair: the noise shifted by ``sensitivity`` D, and the noise; the loss at x is D (2x - D)/(2 sigma^2). What
    lies beyond 37.5 sigma, less than 1e-303 of the mass, is counted as mass at infinity. Under
    ``replace_one`` the sensitivity is 2 D.

    sigma : >= 0.01, in units of the statistic (not relative to the sensitivity); a scalar or an array.
    sensitivity : a Python int >= 1, of add/remove. About 75 sigma outcomes are enumerated, at most 4096;
    InputError beyond (sigma > 54), where the continuous Gaussian with the same sigma is close.

    Source: Canonne, Kamath, Steinke 2020.

    >>> import jaxacct as ja
    >>> round(float(ja.epsilon(ja.DiscreteGaussian(sigma=2.0), 1e-5).upper), 6)
    2.01134
    """

    sigma: Any
    sensitivity: int = field(default=1, metadata={"static": True})
    constraints: ClassVar = {"sigma": NOISE}

    def pair(self, shift: int) -> FinitePair:
        sigma = np.asarray(self.sigma, np.float64)
        reach = np.ceil(REACH * sigma)
        _refuse_atoms("sigma", sigma, 2.0 * reach + shift + 1.0, "use Gaussian, or a coarser statistic")
        most = int(reach.max(initial=1.0))
        at = np.arange(-most, most + shift + 1, dtype=np.float64)
        wide = sigma[..., None]

        def mass(x: np.ndarray) -> np.ndarray:
            return np.where(np.abs(x) <= reach[..., None], np.exp(-0.5 * np.square(x / wide)), 0.0)

        total = mass(at).sum(-1, keepdims=True)
        loss = shift * (at - 0.5 * shift) / wide / wide
        # Pr[X >= m] <= e^{-m^2/(2 sigma^2)} on either side (Canonne, Kamath, Steinke 2020, Proposition 25)
        beyond = np.maximum(2.0 * np.exp(-0.5 * np.square(reach / sigma)), LEAST)
        return FinitePair(loss, mass(at - shift) / total, mass(at) / total, beyond, beyond)


@register
@dataclass(frozen=True, eq=False)
class DiscreteLaplace(_IntegerNoise):
    """Discrete Laplace (two-sided geometric) noise: Pr[x] proportional to e^{-|x|/scale} on the integers.

    Pair: the noise shifted by ``sensitivity`` D, and the noise. With r = e^{-1/scale} the loss is D/scale
    with mass 1/(1 + r), -D/scale with mass r^D/(1 + r), and (2x - D)/scale with mass (1-r)/(1+r) r^{D-x} for
    0 < x < D: (D/scale)-DP. Under ``replace_one`` the sensitivity is 2 D.

    scale : >= 0.01, in units of the statistic; a scalar or an array.  sensitivity : a Python int >= 1, of
    add/remove, at most 4095 (InputError beyond).

    Source: Ghosh, Roughgarden, Sundararajan 2009.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.DiscreteLaplace(scale=1.0), 0.5)  # (1 - e^{1/2 - 1})/(1 + e^-1)
    >>> round(float(b.upper), 6)
    0.287649
    """

    scale: Any
    sensitivity: int = field(default=1, metadata={"static": True})
    constraints: ClassVar = {"scale": NOISE}

    def pair(self, shift: int) -> FinitePair:
        scale = np.asarray(self.scale, np.float64)
        if shift >= MOST_ATOMS:
            raise InputError(f"sensitivity = {shift} needs {shift + 1} outcomes, must be <= {MOST_ATOMS}; use Laplace")
        at = np.arange(shift + 1, dtype=np.float64)
        rate = 1.0 / scale[..., None]
        ratio = np.exp(-rate)
        inner = -np.expm1(-rate)
        share = np.where((at == 0.0) | (at == shift), 1.0, inner) / (1.0 + ratio)
        p, q = share * np.exp(-rate * (shift - at)), share * np.exp(-rate * at)
        zero = np.zeros(scale.shape)
        return FinitePair((2.0 * at - shift) * rate, p, q, zero, zero)


def _refuse_atoms(name: str, values: np.ndarray, atoms: np.ndarray, remedy: str) -> None:
    bad = atoms > MOST_ATOMS
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f"{name}{list(index) if index else ''}"
        needed = int(min(atoms[index], 2.0**53))
        raise InputError(
            f"{place} = {float(values[index])!r} needs {needed} outcomes, must be <= {MOST_ATOMS}; {remedy}"
        )
