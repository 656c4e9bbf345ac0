"""Mechanisms with finitely many losses: randomised response, pure and approximate differential privacy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, register
from jaxacct.mechanisms.parts import FinitePart
from jaxacct.validation import DELTA_OR_ZERO, NON_NEGATIVE, OPEN_PROBABILITY, InputError

__all__ = [
    "ApproximateDP",
    "FiniteMechanism",
    "FinitePair",
    "PureDP",
    "RandomisedResponse",
    "RandomizedResponse",
    "log_mixture",
    "sample_pair",
]


class FinitePair(NamedTuple):
    """A dominating pair (P, Q) with finitely many likelihood ratios.

    ``loss``, ``p`` and ``q`` have a trailing atom axis: outcomes with log p/q = loss. ``p_infinity`` is the
    P-mass where dQ = 0, ``q_infinity`` the Q-mass where dP = 0 (batch shape).
    """

    loss: np.ndarray
    p: np.ndarray
    q: np.ndarray
    p_infinity: np.ndarray
    q_infinity: np.ndarray


class FiniteMechanism(BaseMechanism):
    """A base mechanism given by a finite pair, the same under every neighbouring relation.

    The pair is taken to be symmetric; a class whose pairs need not be overrides ``symmetric``.
    """

    @abstractmethod
    def pair(self) -> FinitePair:
        """The dominating pair of the unsampled mechanism."""

    def part(self, rate: np.ndarray, relation: str, direction: str) -> FinitePart:
        return sample_pair(self.pair(), rate, direction)


@register
@dataclass(frozen=True, eq=False)
class RandomizedResponse(FiniteMechanism):
    """Tell the true answer with probability ``probability``, else one of the other categories uniformly.

    Two categories: pair (p, 1-p), (1-p, p), loss +-log(p/(1-p)). With k categories the true answer has mass
    p and each other r = (1-p)/(k-1): loss log(p/r) with mass p, -log(p/r) with mass r, 0 with mass (k-2) r
    [Warner 1965; Kairouz, Oh, Viswanath 2014]. Taken per record, so the same under every relation.

    probability : strictly between 0 and 1; a scalar or an array.  categories : a Python int >= 2.

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

    def pair(self) -> FinitePair:
        p = np.asarray(self.probability, np.float64)
        k = self.categories
        other = (1.0 - p) / (k - 1)
        excess = (k * p - 1.0) / (1.0 - p)
        near = np.abs(excess) <= 0.5
        log_ratio = np.where(near, np.log1p(np.where(near, excess, 0.0)), np.log(p) - np.log1p(-p) + np.log(k - 1.0))
        loss, mass, base = [log_ratio, -log_ratio], [p, other], [other, p]
        if k > 2:
            loss.append(np.zeros_like(p))
            mass.append((k - 2) * other)
            base.append((k - 2) * other)
        zero = np.zeros_like(p)
        return FinitePair(np.stack(loss, -1), np.stack(mass, -1), np.stack(base, -1), zero, zero)


RandomisedResponse = RandomizedResponse


@register
@dataclass(frozen=True, eq=False)
class PureDP(FiniteMechanism):
    """Any ``epsilon``-DP mechanism, through the pair that dominates them all: randomised response.

    Loss +epsilon with mass 1/(1 + e^-epsilon), -epsilon with the rest [Kairouz, Oh, Viswanath 2015]. The
    guarantee is taken as stated for the neighbouring relation in use.

    epsilon : finite, >= 0; a scalar or an array.

    >>> PureDP(epsilon=0.5)
    PureDP(epsilon=0.5)
    """

    epsilon: Any
    constraints: ClassVar = {"epsilon": NON_NEGATIVE}

    def pair(self) -> FinitePair:
        return _response_pair(np.asarray(self.epsilon, np.float64), np.asarray(0.0))


@register
@dataclass(frozen=True, eq=False)
class ApproximateDP(FiniteMechanism):
    """Any (``epsilon``, ``delta``)-DP mechanism, through the pair that dominates them all.

    Mass delta at +infinity (and Q-mass delta where dP = 0), and 1 - delta times randomised response with
    e^epsilon [Kairouz, Oh, Viswanath 2015]. The guarantee is taken as stated for the neighbouring relation
    in use.

    epsilon : finite, >= 0.  delta : at least 0 and below 1.  Scalars or arrays.

    >>> ApproximateDP(epsilon=0.1, delta=1e-7)
    ApproximateDP(epsilon=0.1, delta=1e-07)
    """

    epsilon: Any
    delta: Any
    constraints: ClassVar = {"epsilon": NON_NEGATIVE, "delta": DELTA_OR_ZERO}

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
    atoms = log_mixture(pair.loss, q[..., None])
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


def log_mixture(loss: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """log(1 - q + q e^loss) to relative accuracy for every finite loss and 0 <= q <= 1.

    Branches: q = 1 returns the loss; loss > 700 avoids overflow as loss + log(q + (1-q) e^-loss); q (1 -
    e^loss) > 1/2 avoids cancellation as log((1-q) + q e^loss); otherwise log1p(q expm1(loss)).
    """
    loss, q = np.broadcast_arrays(np.asarray(loss, np.float64), np.asarray(rate, np.float64))
    large = loss > 700.0
    change = q * np.expm1(np.where(large, 0.0, loss))
    deep = change < -0.5
    proper = (q > 0.0) & (q < 1.0)
    ordinary = np.log1p(np.where(deep, 0.0, change))
    below = np.log(np.where(deep & proper, (1.0 - q) + q * np.exp(np.where(deep, loss, 0.0)), 1.0))
    above = loss + np.log(np.where(large & proper, q + (1.0 - q) * np.exp(-np.where(large, loss, 0.0)), 1.0))
    mixed = np.where(large, above, np.where(deep, below, ordinary))
    return np.where(q == 1.0, loss, np.where(q == 0.0, 0.0, mixed))


def _response_pair(epsilon: np.ndarray, delta: np.ndarray) -> FinitePair:
    """(1 - delta) times randomised response with ratio e^epsilon, and delta on each side apart."""
    epsilon, delta = np.broadcast_arrays(epsilon, delta)
    likely = (1.0 - delta) / (1.0 + np.exp(-epsilon))
    rare = likely * np.exp(-epsilon)
    loss = np.stack([epsilon, -epsilon], -1)
    return FinitePair(loss, np.stack([likely, rare], -1), np.stack([rare, likely], -1), delta, delta)


def _atoms(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(values, (*shape, values.shape[-1]))
