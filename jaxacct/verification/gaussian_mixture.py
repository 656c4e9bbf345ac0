"""Losses of mixtures of Gaussians. Proofs: README.md of this folder, "Mixtures of Gaussians"."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.verification.ball_arithmetic import acb, arb, ctx, gaussian_tail, within
from jaxacct.verification.sampled_gaussian import SampledGaussian, around_fixed_point

NEGLIGIBLE = arb(2) ** -400
"""A mixture leaves out the largest numbers of drawn records, whose probabilities sum to less than this."""


def binomial_weights(trials: int, chance: Any) -> tuple[list[Any], Any]:
    """Return Pr[Bin(trials, chance) = j] for j = 0, 1, ..., last, and an upper bound of Pr[Bin > last]."""
    weights, j = [], 0
    while j <= trials:
        weights.append(math.comb(trials, j) * chance**j * (1 - chance) ** (trials - j))
        j += 1
        # beyond j = 2 (trials * chance + 1) each term is below half its predecessor, so Pr[Bin >= j] < 2 weights[-1]
        if j > 2 * float((trials * chance + 1).upper()) and 2 * weights[-1] < NEGLIGIBLE:
            return weights, (2 * weights[-1]).abs_upper() if j <= trials else arb(0)
    return weights, arb(0)


def hypergeometric_weights(size: int, group: int, batch: int) -> tuple[list[Any], Any]:
    """Return Pr[j of the `group` are among `batch` of `size` records] for all j, and 0, since no j is left out."""
    total = math.comb(size, batch)
    most = min(group, batch)
    return [arb(math.comb(group, j) * math.comb(size - group, batch - j)) / total for j in range(most + 1)], arb(0)


@dataclass(frozen=True)
class GaussianMixture(SampledGaussian):
    """The loss of sum_j weight_j N(share_j, sigma^2) against N(0, sigma^2). `SampledGaussian` has shares 0 and 1."""

    shares: tuple[Any, ...] = ()  # ascending; the last is 1
    weights: tuple[Any, ...] = ()
    lost: Any = 0  # upper bound of the probability, under P, that a left-out component is drawn

    @classmethod
    def of(cls, sigma: Any, weights: Any, lost: Any, direction: str) -> GaussianMixture:
        """Return the mixture in which j records take part with probability weights[j], and each moves the mean by 1."""
        kept = [(j, w) for j, w in enumerate(weights) if j == 0 or not w.is_zero()]
        top = kept[-1][0]
        shares = tuple(arb(j) / top for j, _ in kept)
        return cls(sigma / top, 1 - kept[0][1], direction, shares=shares, weights=tuple(w for _, w in kept), lost=lost)

    @property
    def key(self) -> Any:
        numbers = tuple(x.str(40) for x in (self.sigma, *self.shares, *self.weights))
        return ("GaussianMixture", numbers, self.direction)

    @property
    def largest(self) -> Any:
        """The largest loss. None if losses are unbounded, as they are for remove, and for add if weights[0] is 0."""
        return None if self.direction == "remove" or not self.weights[0] > 0 else -self.weights[0].log()

    @property
    def least(self) -> Any:
        return self.weights[0].log() if self.direction == "remove" and self.weights[0] > 0 else None

    @property
    def masses(self) -> tuple[Any, Any]:
        mixed = sum(self.weights, arb(0))
        return (mixed, arb(1)) if self.direction == "remove" else (arb(1), mixed)

    def hockey_stick(self, epsilon: Any) -> Any:
        mixed = tuple((share / self.sigma, w) for share, w in zip(self.shares, self.weights, strict=True))
        pair = mixed, ((arb(0), arb(1)),)
        found = PairOfMixtures(*(pair if self.direction == "remove" else pair[::-1])).hockey_stick(epsilon)
        return found + within(self.lost * epsilon.exp())

    def _mix(self, u: Any, angle: Any) -> Any:
        term = lambda share: acb(share * u / self.sigma - share**2 / (2 * self.sigma**2), share * angle).exp()
        return sum((w * term(share) for share, w in zip(self.shares, self.weights, strict=True)), acb(0))

    def _mix_real(self, u: Any) -> Any:
        return self._terms_of(u)[0]

    def _share_of_slope(self, u: Any) -> Any:
        """Return the mean of `shares` over the mixture's components, given the output u. This mean rises with u."""
        total, mean = self._terms_of(u)
        return mean / total

    def _terms_of(self, u: Any) -> tuple[Any, Any]:
        total, mean = arb(0), arb(0)
        for share, w in zip(self.shares, self.weights, strict=True):
            term = w * (share * u / self.sigma - share**2 / (2 * self.sigma**2)).exp()
            total, mean = total + term, mean + share * term
        return total, mean

    def _log_mix(self, u: np.ndarray, angle: Any = None) -> Any:
        sigma = float(self.sigma.mid())
        shares = np.array([float(x.mid()) for x in self.shares])
        weights = np.array([float(x.mid()) for x in self.weights])
        u = np.asarray(u)
        logs = np.log(weights) + shares * u[..., None] / sigma - 0.5 * (shares / sigma) ** 2
        top = logs.max(-1)
        terms = np.exp(logs - top[..., None])
        if angle is None:
            return top + np.log(terms.sum(-1))
        return top + np.log((terms * np.exp(1j * shares * np.asarray(angle)[..., None])).sum(-1))

    def _windows(self, c: np.ndarray, far: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return one window that reaches `far` beyond all peaks u of N(u) mix^e (N, mix, e: see `SampledGaussian`)."""
        scale = self._exponent(c) / float(self.sigma.mid())
        shares = np.array([float(x.mid()) for x in self.shares])
        weights = np.log(np.array([float(x.mid()) for x in self.weights]))
        sigma = float(self.sigma.mid())

        def slope(u: np.ndarray) -> np.ndarray:
            logs = weights + shares * u[:, None] / sigma - 0.5 * (shares / sigma) ** 2
            terms = np.exp(logs - logs.max(-1, keepdims=True))
            return np.asarray(scale * (terms @ shares) / terms.sum(-1))

        low, high = np.minimum(scale, 0.0), np.maximum(scale, 0.0)
        if self.direction == "add":
            low, high = around_fixed_point(slope, low, high)
            return [(low - far, high + far)]
        for _ in range(60):
            low, high = slope(low), slope(high)
        return [(low - far, np.maximum(low, high) + far)]


@dataclass(frozen=True)
class PairOfMixtures:
    """Two mixtures p and q of normal laws N(mean, 1), each given as pairs (mean, weight)."""

    p: tuple[tuple[Any, Any], ...]
    q: tuple[tuple[Any, Any], ...]
    infinity = None
    largest = None

    @property
    def key(self) -> Any:
        numbers = tuple((m.str(40), w.str(40)) for law in (self.p, self.q) for m, w in law)
        return ("PairOfMixtures", numbers, len(self.p))

    def hockey_stick(self, epsilon: Any) -> Any:
        """Return the integral of (p - e^eps q)_+, or nan if the coefficients of `_terms` change sign more than once."""
        terms = self._terms(epsilon.exp())
        signs = [1 if c > 0 else -1 if c < 0 else 0 for _, c in terms]
        if 0 in signs:
            return arb("nan")
        changes = [i for i in range(1, len(signs)) if signs[i] != signs[i - 1]]
        if not changes:
            return sum((c for _, c in terms), arb(0)).max(0)
        if len(changes) > 1:
            return arb("nan")
        up = signs[-1] > 0
        place = _zero(terms, 1 if up else -1)
        return sum((c * gaussian_tail((place - m) if up else (m - place)) for m, c in terms), arb(0)).max(0)

    def _terms(self, grown: Any) -> list[tuple[Any, Any]]:
        """Return p - grown q as terms (mean, coefficient), by ascending mean. Terms of equal mean are merged."""
        found: dict[str, list[Any]] = {}
        for law, factor in ((self.p, arb(1)), (self.q, -grown)):
            for mean, weight in law:
                entry = found.setdefault(mean.str(30, radius=False), [mean, arb(0)])
                entry[1] = entry[1] + factor * weight
        kept = [(m, c) for m, c in found.values() if not c.is_zero()]
        return sorted(kept, key=lambda each: float(each[0].mid()))


def _zero(terms: list[tuple[Any, Any]], sign: int) -> Any:
    """Return a ball around the only zero of f(u) = sum over (m, c) of c e^{m u - m^2/2}. Above it f has sign `sign`."""

    def side(u: Any) -> int:
        logs = [m * u - m * m / 2 for m, _ in terms]
        top = max(logs, key=lambda x: float(x.mid()))
        value = sign * sum((c * (x - top).exp() for x, (_, c) in zip(logs, terms, strict=True)), arb(0))
        return 1 if value > 0 else -1 if value < 0 else 0

    low, high = arb(-1), arb(1)
    while side(low) != -1:
        low = 2 * low
        if low < -(2**60):
            return arb("nan")
    while side(high) != 1:
        high = 2 * high
        if high > 2**60:
            return arb("nan")
    for _ in range(2 * ctx.prec):
        middle = ((low + high) / 2).mid()
        where = side(middle)
        if where == 0:
            break
        low, high = (middle, high) if where < 0 else (low, middle)
    return low.union(high)


@dataclass(frozen=True)
class RevealedPairs:
    """A step that draws a pair of laws and reveals which it drew. `ways` lists (probability, loss) of every pair."""

    ways: tuple[tuple[Any, Any], ...]
    infinity = None
    masses = (arb(1), arb(1))

    @property
    def key(self) -> Any:
        return ("a cap", tuple((share.str(40), law.key) for share, law in self.ways))

    @property
    def largest(self) -> Any:
        return self._end("largest", arb.max)

    @property
    def least(self) -> Any:
        return self._end("least", arb.min)

    def _end(self, name: str, choose: Any) -> Any:
        found = [getattr(law, name, None) for _, law in self.ways]
        return None if any(end is None for end in found) else functools.reduce(choose, found)

    def hockey_stick(self, epsilon: Any) -> Any:
        return sum((share * law.hockey_stick(epsilon) for share, law in self.ways), arb(0))


@dataclass(frozen=True)
class Revealed(RevealedPairs):
    """A `RevealedPairs` whose losses can all be composed. Its E[e^{zL}] is the weighted mean of their E[e^{zL}]."""

    def mgf(self, z: Any) -> Any:
        return sum((share * law.mgf(z) for share, law in self.ways), acb(0))

    def log_mgf(self, c: np.ndarray) -> np.ndarray:
        return self._log_sum([law.log_mgf(c) for _, law in self.ways])

    def decay(self, c: Any, t: Any, count: int) -> Any:
        return sum((share * law.decay(c, t, count) for share, law in self.ways), arb(0)).abs_upper()

    def log_decay(self, c: float, t: float) -> float:
        return float(self._log_sum([np.asarray(law.log_decay(c, t)) for _, law in self.ways]))

    def _log_sum(self, logs: list[np.ndarray]) -> np.ndarray:
        shares = [np.log(float(share.mid())) for share, _ in self.ways]
        return np.asarray(np.logaddexp.reduce([a + b for a, b in zip(shares, logs, strict=True)]))

    def cost(self, c: float, bits: float) -> int:
        return sum(law.cost(c, bits) for _, law in self.ways)

    def values(self, c: Any, step: Any, rows: range, width: int, count: int, bits: float) -> Iterator[list[Any]]:
        lines = [law.values(c, step, rows, width, count, bits) for _, law in self.ways]
        for found in zip(*lines, strict=True):
            pairs = [(share, line) for (share, _), line in zip(self.ways, found, strict=True)]
            yield [sum((share * line[j] for share, line in pairs), acb(0)) for j in range(width)]
