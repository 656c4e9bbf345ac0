"""Mechanisms with finitely many losses: randomised response, pure and approximate differential privacy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import DELTA_OR_ZERO, NON_NEGATIVE, OPEN_PROBABILITY, InputError
from jaxacct.mechanisms.base import BaseMechanism, register
from jaxacct.mechanisms.parts import FinitePair, FinitePart, Part

__all__ = [
    "ApproximateDP",
    "FiniteMechanism",
    "PureDP",
    "RandomisedResponse",
    "RandomizedResponse",
    "log_mixture",
    "log_of_ratio",
    "sample_pair",
]


class FiniteMechanism(BaseMechanism):
    """A base mechanism given by a finite pair, the same under every neighbouring relation.

    The pair is taken to be symmetric; a class whose pairs need not be overrides ``symmetric``.
    """

    @abstractmethod
    def pair(self) -> FinitePair:
        """The dominating pair of the unsampled mechanism."""

    def finite_pair(self, relation: str) -> FinitePair:
        return self.pair()

    def part(self, rate: np.ndarray, relation: str, direction: str) -> Part:
        return sample_pair(self.finite_pair(relation), rate, direction)


@register
@dataclass(frozen=True, eq=False)
class RandomizedResponse(FiniteMechanism):
    """Tell the true answer with probability ``probability``, else one of the other categories uniformly.

    Two categories: pair (p, 1-p), (1-p, p), loss +-log(p/(1-p)). With k categories the true answer has mass
    p and each other r = (1-p)/(k-1): loss log(p/r) with mass p, -log(p/r) with mass r, 0 with mass (k-2) r.
    Taken per record, so the same under every neighbouring relation.

    Parameters
    ----------
    probability : array_like, strictly between 0 and 1
        p; one configuration per element.
    categories : int >= 2
        k, the number of possible answers.

    References
    ----------
    Warner (1965), Randomized Response. Kairouz, Oh, Viswanath (2014), Extremal Mechanisms for Local Differential
    Privacy.

    >>> RandomizedResponse(probability=0.75)
    RandomizedResponse(probability=0.75, categories=2)
    >>> RandomizedResponse([0.5, 0.6], categories=3).probability
    array([0.5, 0.6])
    """

    probability: Any
    categories: int = field(default=2, metadata={"static": True})
    constraints: ClassVar = {"probability": OPEN_PROBABILITY}

    def __post_init__(self) -> None:
        k = self.categories
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 2:
            raise InputError(f"categories = {k!r} must be an integer >= 2; use the number of possible answers")
        object.__setattr__(self, "categories", int(k))
        super().__post_init__()

    def infinity_exactly(self, direction: str) -> Fraction | None:
        return Fraction(0)

    def pair(self) -> FinitePair:
        p = np.asarray(self.probability, np.float64)
        k = self.categories
        other = (1.0 - p) / (k - 1)
        above = _product_less_one(k, p)
        excess = above / (1.0 - p)
        log_ratio = log_of_ratio(above / (k - 1), p, other)
        loss, mass, base = [log_ratio, -log_ratio], [p, other], [other, p]
        ratios = [excess, -above / (k - 1) / p]
        if k > 2:
            loss.append(np.zeros_like(p))
            ratios.append(np.zeros_like(p))
            mass.append((k - 2) * other)
            base.append((k - 2) * other)
        zero = np.zeros_like(p)
        losses, masses, bases, excesses = (np.stack(x, -1) for x in (loss, mass, base, ratios))
        return FinitePair(losses, masses, bases, zero, zero, excesses)


RandomisedResponse = RandomizedResponse


@register
@dataclass(frozen=True, eq=False)
class PureDP(FiniteMechanism):
    """Any ``epsilon``-DP mechanism, through the pair that dominates them all: randomised response.

    Loss +epsilon with mass 1/(1 + e^-epsilon), -epsilon with the rest. The guarantee is taken as stated for the
    neighbouring relation in use.

    Parameters
    ----------
    epsilon : array_like >= 0, finite
        One configuration per element.

    References
    ----------
    Kairouz, Oh, Viswanath (2015), The Composition Theorem for Differential Privacy.

    >>> PureDP(epsilon=0.5)
    PureDP(epsilon=0.5)
    """

    epsilon: Any
    constraints: ClassVar = {"epsilon": NON_NEGATIVE}

    def infinity_exactly(self, direction: str) -> Fraction | None:
        return Fraction(0)

    def pair(self) -> FinitePair:
        return _response_pair(np.asarray(self.epsilon, np.float64), np.asarray(0.0))


@register
@dataclass(frozen=True, eq=False)
class ApproximateDP(FiniteMechanism):
    """Any (``epsilon``, ``delta``)-DP mechanism, through the pair that dominates them all.

    Mass delta at +infinity (and Q-mass delta where dP = 0), and 1 - delta times randomised response with
    e^epsilon. The guarantee is taken as stated for the neighbouring relation in use.

    Parameters
    ----------
    epsilon : array_like >= 0, finite
    delta : array_like in [0, 1)
        Broadcasts with epsilon.

    References
    ----------
    Kairouz, Oh, Viswanath (2015), The Composition Theorem for Differential Privacy.

    >>> ApproximateDP(epsilon=0.1, delta=1e-7)
    ApproximateDP(epsilon=0.1, delta=1e-07)
    """

    epsilon: Any
    delta: Any
    constraints: ClassVar = {"epsilon": NON_NEGATIVE, "delta": DELTA_OR_ZERO}

    def infinity_exactly(self, direction: str) -> Fraction | None:
        return Fraction(float(self.delta))

    def pair(self) -> FinitePair:
        epsilon, delta = np.asarray(self.epsilon, np.float64), np.asarray(self.delta, np.float64)
        return _response_pair(epsilon, delta)


def sample_pair(pair: FinitePair, rate: np.ndarray, direction: str) -> FinitePart:
    """The finite law of the loss of a pair Poisson sampled at ``rate``, in one direction.

    remove: ((1-q) Q + q P, Q), loss log(1 - q + q e^loss), and log(1-q) where dP = 0; mass q p_infinity at
    infinity.
    add: (Q, (1-q) Q + q P), the losses negated, under Q; where dP = 0 the loss is -log(1-q), infinite when q
    = 1.
    Source: Zhu, Dong, Wang 2022, Theorem 11.
    """
    q = np.asarray(rate, np.float64)
    atoms = log_mixture(pair.loss, q[..., None], pair.excess)
    certain = q == 1.0
    apart = np.log1p(-np.where(certain, 0.0, q))
    if direction == "remove":
        mass = (1.0 - q[..., None]) * pair.q + q[..., None] * pair.p
        apart_mass = (1.0 - q) * pair.q_infinity
        infinity = q * pair.p_infinity
    else:
        atoms, apart = -atoms, -apart
        mass = pair.q
        apart_mass = np.where(certain, 0.0, pair.q_infinity)
        infinity = np.where(certain, pair.q_infinity, 0.0)
    shape = np.broadcast_shapes(atoms.shape[:-1], mass.shape[:-1], np.shape(infinity))
    loss = np.concatenate([_atoms(atoms, shape), _atoms(apart[..., None], shape)], -1)
    mass = np.concatenate([_atoms(mass, shape), _atoms(np.asarray(apart_mass)[..., None], shape)], -1)
    return FinitePart(np.where(mass > 0.0, loss, 0.0), mass, np.broadcast_to(infinity, shape))


def log_mixture(loss: np.ndarray, rate: np.ndarray, excess: np.ndarray | None = None) -> np.ndarray:
    """log(1 - q + q e^loss) within 16 units of itself and 1e-323, for every finite loss and 0 <= q <= 1.

    With x = q (e^loss - 1): log1p(x), or log((1-q) + q e^loss) where x < -1/2, since 1 + x would cancel. Beyond a
    loss of 700, e^loss is taken by halves; where x overflows, the loss + log(q) is at least 700 and does not cancel.
    excess: e^loss - 1, where it is known better than through the loss; it is used where it is finite.
    """
    given = np.nan if excess is None else excess
    loss, q, given = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (loss, rate, given)))
    large = loss > 700.0
    with np.errstate(over="ignore", invalid="ignore"):
        half = np.exp(0.5 * np.where(large, loss, 0.0))
        risen = np.where(np.isfinite(given), given, np.expm1(np.where(large, 0.0, loss)))
        change = np.where(large, q * half * half, q * risen)
    vast = ~(change < np.inf)
    proper = (q > 0.0) & (q < 1.0)
    deep = (change < -0.5) & proper
    ordinary = np.log1p(np.where(deep | vast | ~proper, 0.0, change))
    ratio = np.where(np.isfinite(given), 1.0 + given, np.exp(np.where(deep, loss, 0.0)))
    below = np.log(np.where(deep, (1.0 - q) + q * ratio, 1.0))
    above = loss + np.log(np.where(vast & proper, q, 1.0))
    mixed = np.where(vast, above, np.where(deep, below, ordinary))
    return np.where(q == 1.0, loss, np.where(q == 0.0, 0.0, mixed))


def log_of_ratio(difference: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """log(p/q) within 8 units of itself for positive masses p and q; exchanging them changes the sign alone.

    By the difference p - q, known to a few units, where they are near; else by the logarithm of the ratio, whose
    rounding is a few units against at least .4; by the difference of logarithms only beyond 690, where it is safe.
    """
    large, small = np.maximum(p, q), np.minimum(p, q)
    near = np.abs(difference) <= 0.5 * small
    close = 2.0 * np.arctanh(np.where(near, difference, 0.0) / (large + small))
    with np.errstate(over="ignore"):
        ratio = large / small
    plain = ratio < 1e300
    apart = np.where(plain, np.log(np.where(plain, ratio, 1.0)), np.log(large) - np.log(small))
    return np.where(near, close, np.sign(p - q) * apart)


def _product_less_one(k: int, p: np.ndarray) -> np.ndarray:
    """k p - 1, rounded once."""
    exact = [float(k * Fraction(float(x)) - 1) for x in p.ravel()]
    return np.array(exact, np.float64).reshape(p.shape)


def _response_pair(epsilon: np.ndarray, delta: np.ndarray) -> FinitePair:
    """(1 - delta) times randomised response with ratio e^epsilon, and delta on each side apart."""
    epsilon, delta = np.broadcast_arrays(epsilon, delta)
    likely = (1.0 - delta) / (1.0 + np.exp(-epsilon))
    rare = likely * np.exp(-epsilon)
    loss = np.stack([epsilon, -epsilon], -1)
    return FinitePair(loss, np.stack([likely, rare], -1), np.stack([rare, likely], -1), delta, delta)


def _atoms(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(values, (*shape, values.shape[-1]))
