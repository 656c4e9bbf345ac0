"""Losses with closed forms: of Gaussian, Laplace and bounded-range mechanisms, and of one sampled Laplace step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.verification.ball_arithmetic import acb, arb, gaussian_tail


class ClosedForm:
    """The law of the loss L = log dP/dQ of two laws P and Q, with a closed form of M(z) = E_P[e^{zL}]."""

    infinity = None
    masses = (arb(1), arb(1))
    """The mass of the finite losses under P, which is M(0), and under Q, which is M(-1)."""

    def mgf(self, z: Any) -> Any:
        raise NotImplementedError  # each law has its own

    def log_mgf(self, c: np.ndarray) -> np.ndarray:
        """Compute log M(c) in floats, for planning only."""
        return np.array([float(self.mgf(acb(float(x))).real.log().mid()) for x in c])

    def decay(self, c: Any, t: Any, count: int) -> Any:
        """Bound |M(c + iu)| from above for all u >= t."""
        raise NotImplementedError  # each law has its own

    def log_decay(self, c: float, t: float) -> float:
        """Compute the logarithm of `decay` in floats, for planning only."""
        return float(self.decay(arb(c), arb(t), 1).log().mid())

    def values(self, c: Any, step: Any, rows: range, width: int, count: int, bits: float) -> Iterator[list[Any]]:
        """Yield, for each row, a list of balls M(c + i k step), i^2 = -1, for `width` numbers k from row * width on."""
        for row in rows:
            yield [self.mgf(acb(c, (row * width + j) * step)) for j in range(width)]


@dataclass(frozen=True)
class GaussianLoss(ClosedForm):
    """The loss N(square/2, square) of composed Gaussians; `square` is the sum of 1/sigma^2."""

    square: Any
    largest = None

    @property
    def key(self) -> Any:
        return ("Gauss", self.square.str(40))

    def mgf(self, z: Any) -> Any:
        return (self.square * z * (z + 1) / 2).exp()

    def decay(self, c: Any, t: Any, count: int) -> Any:
        return (self.square * (c * (c + 1) - t * t) / 2).exp().abs_upper()

    def hockey_stick(self, epsilon: Any) -> Any:
        mu = self.square.sqrt()
        return gaussian_tail(epsilon / mu - mu / 2) - epsilon.exp() * gaussian_tail(epsilon / mu + mu / 2)


@dataclass(frozen=True)
class _UpTo(ClosedForm):
    """A loss from -top to top."""

    top: Any
    name: ClassVar[str]

    @property
    def key(self) -> Any:
        return (self.name, self.top.str(40))

    @property
    def largest(self) -> Any:
        return self.top


class LaplaceLoss(_UpTo):
    """The loss of Lap(0, 1/top) against Lap(1, 1/top). It has atoms at -top and top, and a density between them."""

    name = "Laplace"

    def mgf(self, z: Any) -> Any:
        share = 1 / (1 + 2 * z)
        return ((z * self.top).exp() * (1 + share) + (-(1 + z) * self.top).exp() * (1 - share)) / 2

    def decay(self, c: Any, t: Any, count: int) -> Any:
        """Bound |M(c + iu)| for all u >= t by the sum of its terms' sizes at u = t. The sizes fall as u grows."""
        share = 1 / acb(1 + 2 * c, 2 * t).abs_lower()
        whole = ((c * self.top).exp() * (1 + share) + (-(1 + c) * self.top).exp() * (1 + share)) / 2
        return whole.abs_upper()

    def hockey_stick(self, epsilon: Any) -> Any:
        """Return delta: 1 - e^{(eps - top)/2} for |eps| <= top, 0 for eps > top, 1 - e^eps for eps < -top."""
        inside = 1 - ((epsilon - self.top) / 2).exp()
        if epsilon >= self.top:
            return arb(0)
        below = 1 - epsilon.exp()
        if epsilon <= -self.top:
            return below
        if epsilon > -self.top and epsilon < self.top:
            return inside
        return inside.max(0).max(below)


class BoundedRange(_UpTo):
    """The loss with density e^{l/2}/(4 sinh(top/2)) on [-top, top]. It dominates the exponential mechanism's loss."""

    name = "BoundedRange"

    def mgf(self, z: Any) -> Any:
        return ((z + arb(0.5)) * self.top).sinh() / ((2 * z + 1) * (self.top / 2).sinh())

    def decay(self, c: Any, t: Any, count: int) -> Any:
        top = ((c + arb(0.5)) * self.top).cosh() / (acb(1 + 2 * c, 2 * t).abs_lower() * (self.top / 2).sinh())
        return top.abs_upper()

    def hockey_stick(self, epsilon: Any) -> Any:
        """Return delta: (e^{top/2} - e^{eps/2})^2/(e^top - 1) for |eps| <= top, 0 for eps > top, else 1 - e^eps."""
        if epsilon >= self.top:
            return arb(0)
        if epsilon <= -self.top:
            return 1 - epsilon.exp()
        return ((self.top / 2).exp() - (epsilon / 2).exp()) ** 2 / self.top.expm1()


@dataclass(frozen=True)
class SampledLaplace:
    """One step of Lap(0, 1/top) against Lap(1, 1/top), Poisson sampled at a rate in (0, 1), in one direction."""

    top: Any
    rate: Any
    direction: str
    infinity = None

    @property
    def key(self) -> Any:
        return ("SampledLaplace", self.top.str(40), self.rate.str(40), self.direction)

    @property
    def largest(self) -> Any:
        if self.direction == "remove":
            return (1 - self.rate + self.rate * self.top.exp()).log()
        return -(1 - self.rate + self.rate * (-self.top).exp()).log()

    def hockey_stick(self, epsilon: Any) -> Any:
        return sampled_hockey_stick(LaplaceLoss(self.top), self.rate, self.direction, epsilon)


def sampled_hockey_stick(base: Any, rate: Any, direction: str, epsilon: Any) -> Any:
    """Return delta of a sampled step. In both directions the unsampled loss must be `base` (README.md, "One step")."""
    grown = epsilon.exp()
    if direction == "remove":
        inner = 1 + (grown - 1) / rate
        return rate * base.hockey_stick(inner.log())
    left = 1 - grown * (1 - rate)
    if left <= 0:
        return arb(0)
    if not left > 0:
        return left.max(0).union(arb(0))
    return left * base.hockey_stick((grown * rate / left).log())
