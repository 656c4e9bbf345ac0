"""Mechanisms with finitely many losses: given by their outputs, or by a guarantee of (epsilon, delta)-DP."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import field
from fractions import Fraction
from typing import ClassVar

import numpy as np

from jaxacct.core.types import Leaf
from jaxacct.core.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    OPEN_PROBABILITY,
    PROBABILITY,
    InputError,
    Tracer,
    broadcast_shape,
    check_int,
    refuse_where,
)
from jaxacct.mechanisms.base import BaseMechanism, FinitePair, FinitePart, Mechanism, Part, register

SUM_LIMIT = 1e-12
"""The sum of a probability vector may differ from 1 by at most this; the vector is divided by its sum."""


class OfFinitePair(BaseMechanism):
    """Base mechanism with a finite pair. The law of its loss, plain or Poisson sampled, is computed from the pair."""

    def part(self, rate: np.ndarray, relation: str, direction: str) -> Part:
        return sample_pair(self.finite_pair(relation), rate, direction)


class FiniteMechanism(OfFinitePair):
    """Base mechanism with one finite pair for all relations. By default remove and add have the same loss law."""

    @abstractmethod
    def pair(self) -> FinitePair:
        """Return the dominating pair of the unsampled mechanism."""

    def finite_pair(self, relation: str) -> FinitePair:
        return self.pair()


@register
class RandomizedResponse(FiniteMechanism):
    """Tell the true answer with probability ``probability``, else another category, drawn uniformly.

    With k categories the true answer has mass p and each other answer r = (1-p)/(k-1). The loss is log(p/r) with mass
    p, -log(p/r) with mass r, and 0 with mass (k-2) r. All neighbouring relations have the same pair: under add and
    remove, an absent record's place holds an answer for another category. If it holds none, use ``replace_one``.

    Parameters
    ----------
    probability : array_like, strictly between 0 and 1
        p; one configuration per element.
    categories : int >= 2
        k, the number of possible answers, one for the whole batch.

    References
    ----------
    Warner (1965), Randomized Response. Kairouz, Oh, Viswanath (2014), Extremal Mechanisms for Local Differential
    Privacy.

    >>> RandomizedResponse(probability=0.75)
    RandomizedResponse(probability=0.75, categories=2)
    >>> RandomizedResponse([0.5, 0.6], categories=3).probability
    array([0.5, 0.6])
    """

    exact_pair: ClassVar = True
    follows_relation: ClassVar = True
    probability: Leaf
    categories: int = field(default=2, metadata={"static": True})
    constraints: ClassVar = {"probability": OPEN_PROBABILITY}

    def __post_init__(self) -> None:
        k = check_int("categories", self.categories, 2, "use the number of possible answers")
        object.__setattr__(self, "categories", k)
        super().__post_init__()

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        return Fraction(0)

    def pair(self) -> FinitePair:
        p = np.asarray(self.probability, np.float64)
        k = self.categories
        other = (1.0 - p) / (k - 1)
        # k p - 1, rounded once
        above = np.array([float(k * Fraction(float(x)) - 1) for x in p.ravel()]).reshape(p.shape)
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
class PureDP(FiniteMechanism):
    """Any ``epsilon``-DP mechanism, through the pair that dominates them all: randomised response.

    The guarantee must hold under the neighbouring relation for which the caller asks epsilon or delta, in both orders
    of the data sets: an epsilon of ``add_one`` or ``remove_one`` alone is no such guarantee.

    Parameters
    ----------
    epsilon : array_like >= 0, finite

    References
    ----------
    Kairouz, Oh, Viswanath (2015), The Composition Theorem for Differential Privacy.

    >>> PureDP(epsilon=0.5)
    PureDP(epsilon=0.5)
    """

    exact_pair: ClassVar = True
    epsilon: Leaf
    constraints: ClassVar = {"epsilon": NON_NEGATIVE}

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        return Fraction(0)

    def pair(self) -> FinitePair:
        return ApproximateDP(self.epsilon, 0.0).pair()

    def of_every_relation(self) -> bool:
        return not np.any(self.epsilon)


@register
class ApproximateDP(FiniteMechanism):
    """Any (``epsilon``, ``delta``)-DP mechanism, through the pair that dominates them all.

    The pair has P-mass delta where dQ = 0, Q-mass delta where dP = 0, and (1 - delta) times the pair of
    `PureDP(epsilon)` elsewhere. The guarantee must hold under the neighbouring relation of the question, in both orders
    of the data sets: an epsilon of ``add_one`` or ``remove_one`` alone is no such guarantee.

    Parameters
    ----------
    epsilon : array_like >= 0, finite
    delta : array_like in [0, 1)

    References
    ----------
    Kairouz, Oh, Viswanath (2015), The Composition Theorem for Differential Privacy.

    >>> ApproximateDP(epsilon=0.1, delta=1e-7)
    ApproximateDP(epsilon=0.1, delta=1e-07)
    """

    exact_pair: ClassVar = True
    epsilon: Leaf
    delta: Leaf
    constraints: ClassVar = {"epsilon": NON_NEGATIVE, "delta": DELTA_OR_ZERO}

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        return Fraction(float(self.delta))

    def pair(self) -> FinitePair:
        epsilon, delta = np.broadcast_arrays(np.asarray(self.epsilon, np.float64), self.delta)
        likely = (1.0 - delta) / (1.0 + np.exp(-epsilon))
        rare = likely * np.exp(-epsilon)
        loss = np.stack([epsilon, -epsilon], -1)
        return FinitePair(loss, np.stack([likely, rare], -1), np.stack([rare, likely], -1), delta, delta)


def sample_pair(pair: FinitePair, rate: np.ndarray, direction: str) -> FinitePart:
    """Return the law of the loss after Poisson sampling a pair at ``rate`` (README.md, "Finite pairs and sampling")."""
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


def with_sample_revealed(pair: FinitePair, rate: np.ndarray) -> FinitePair:
    """Return the pair of a step that also tells whether the record is sampled. Its delta is q times the base's."""
    q = np.asarray(rate, np.float64)
    shape = np.broadcast_shapes(pair.loss.shape[:-1], q.shape)
    wide = lambda values, last: np.concatenate([_atoms(values, shape), np.broadcast_to(last, shape)[..., None]], -1)
    p, absent = (wide(q[..., None] * mass, 1.0 - q) for mass in (pair.p, pair.q))
    excess = None if pair.excess is None else wide(pair.excess, 0.0)
    return FinitePair(wide(pair.loss, 0.0), p, absent, q * pair.p_infinity, q * pair.q_infinity, excess)


def once(pair: FinitePair, direction: str) -> list[tuple[Part, np.ndarray]]:
    """Return one unsampled release with this pair, in the form that `Mechanism.expand` returns."""
    return [(sample_pair(pair, np.asarray(1.0), direction), np.asarray(1.0))]


def log_mixture(loss: np.ndarray, rate: np.ndarray, excess: np.ndarray | None = None) -> np.ndarray:
    """Return log(1 - q + q e^loss) of finite losses and rates q. The error is <= 1e-323 + 16 roundoffs of the value."""
    given = np.nan if excess is None else excess  # e^loss - 1, used where finite: more accurate than expm1(loss)
    loss, q, given = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (loss, rate, given)))
    large = loss > 700.0  # here e^loss might overflow, so q e^loss is computed from e^(loss/2)
    with np.errstate(over="ignore", invalid="ignore"):
        half = np.exp(0.5 * np.where(large, loss, 0.0))
        risen = np.where(np.isfinite(given), given, np.expm1(np.where(large, 0.0, loss)))
        change = np.where(large, q * half * half, q * risen)
    vast = ~(change < np.inf)
    proper = (q > 0.0) & (q < 1.0)
    deep = (change < -0.5) & proper  # then digits of 1 + `change` would cancel
    ordinary = np.log1p(np.where(deep | vast | ~proper, 0.0, change))
    ratio = np.where(np.isfinite(given), 1.0 + given, np.exp(np.where(deep, loss, 0.0)))
    below = np.log(np.where(deep, (1.0 - q) + q * ratio, 1.0))
    above = loss + np.log(np.where(vast & proper, q, 1.0))  # at least 700, so no digits cancel
    mixed = np.where(vast, above, np.where(deep, below, ordinary))
    return np.where(q == 1.0, loss, np.where(q == 0.0, 0.0, mixed))


def log_of_ratio(difference: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return log(p/q) of positive masses within 8 roundoffs of the value. `difference` is p - q to a few roundoffs."""
    large, small = np.maximum(p, q), np.minimum(p, q)  # so that exchanging p and q only changes the answer's sign
    near = np.abs(difference) <= 0.5 * small
    close = 2.0 * np.arctanh(np.where(near, difference, 0.0) / (large + small))
    with np.errstate(over="ignore"):
        ratio = large / small
    plain = ratio < 1e300
    # here |answer| is at least .4, and at least 690 where logarithms are subtracted, so no digits cancel
    apart = np.where(plain, np.log(np.where(plain, ratio, 1.0)), np.log(large) - np.log(small))
    return np.where(near, close, np.sign(p - q) * apart)


def _atoms(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(values, (*shape, values.shape[-1]))


@register
class FiniteOutput(FiniteMechanism):
    """Mechanism with finitely many outputs: probabilities ``p`` with the record and ``q`` without it.

    delta(eps) = sum_i (p_i - e^eps q_i)_+ for remove, and with p and q exchanged for add. Under ``replace_one``, and
    inside `SampledWithoutReplacement`, p and q are the laws for the two values of the record, in either order
    (README.md, "Two orders of a replaced record"). A zeroed record counts as no record. The pair of any other
    neighbours must be dominated by (p, q), or under ``replace_one`` by (p, q) or by (q, p).

    Parameters
    ----------
    p, q : array_like in [0, 1]
        The last axis runs over the outputs, whose number is the same for p and q. The axes before it are the batch and
        broadcast. Each vector sums to 1 within 1e-12, and is divided by its sum.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function.

    >>> import jaxacct as ja
    >>> coin = ja.FiniteOutput(p=[0.75, 0.25], q=[0.25, 0.75])
    >>> round(float(ja.delta(coin, 0.5).upper), 6)
    0.33782
    """

    exact_pair: ClassVar = True
    p: Leaf
    q: Leaf
    constraints: ClassVar = {"p": PROBABILITY, "q": PROBABILITY}
    vectors: ClassVar = ("p", "q")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {}
        for name in self.vectors:
            value = getattr(self, name)
            if np.ndim(value) == 0 or np.shape(value)[-1] == 0:
                raise InputError(f"{name} must have one or more outcomes on its last axis; give a vector")
            sizes[name] = np.shape(value)[-1]
            if not isinstance(value, Tracer):
                refuse_sums(name, value)
        if sizes["p"] != sizes["q"]:
            raise InputError(
                f"p has {sizes['p']} outcomes and q has {sizes['q']}; give both the same, with 0 where one cannot occur"
            )

    def pair(self) -> FinitePair:
        shape = broadcast_shape({"p": np.shape(self.p), "q": np.shape(self.q)})
        given = [np.broadcast_to(np.asarray(x), shape) for x in (self.p, self.q)]
        above_p, above_q = (sums(np.concatenate([x, -np.ones_like(x[..., :1])], -1))[..., None] for x in given)
        p, q = (x / (1.0 + above) for x, above in zip(given, (above_p, above_q), strict=True))
        common = (p > 0.0) & (q > 0.0)
        # `one` and `two` are p and q before the division by their sums, 1 + `above_p` and 1 + `above_q`. Where they are
        # close, `one - two` is exact. So p/q - 1 and log p/q are computed from it, and then corrected for the division.
        one, two = (np.where(common, x, 1.0) for x in given)
        with np.errstate(over="ignore"):
            excess = (one - two) / two
            shift = (above_q - above_p) / (1.0 + above_p)
            loss = log_of_ratio(one - two, one, two) + 2.0 * np.arctanh((above_q - above_p) / (2.0 + above_p + above_q))
            excess = excess + shift * (1.0 + excess)
        apart = (np.where(other == 0.0, here, 0.0).sum(-1) for here, other in ((p, q), (q, p)))
        p_infinity, q_infinity = (np.where(common.any(-1), np.minimum(mass, 1.0), 1.0) for mass in apart)
        loss, p, q, excess = (np.where(common, x, 0.0) for x in (loss, p, q, excess))
        return FinitePair(loss, p, q, p_infinity, q_infinity, excess)

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        p, q = (self.p, self.q) if direction == "remove" else (self.q, self.p)
        masses = [Fraction(float(x)) for x in p]
        return sum((x for x, other in zip(masses, q, strict=True) if other == 0.0), Fraction(0)) / sum(masses)

    def symmetric(self) -> bool:
        """Return whether the loss has the same law for remove and for add, bit for bit."""
        pair = self.pair()
        here, there = _sorted_law(pair.loss, pair.p), _sorted_law(-pair.loss, pair.q)
        return bool(np.array_equal(here, there) and np.array_equal(pair.p_infinity, pair.q_infinity))


def only_stated(mechanism: Mechanism) -> bool:
    """Return whether the mechanism contains a stated guarantee, which holds for the relation of the question only."""
    if mechanism.states_relation:
        return True
    inside = mechanism.inside()
    known = mechanism.of_every_relation() or isinstance(mechanism, FiniteOutput)
    return any(map(only_stated, inside)) if inside else not known


def answers_at_random(mechanism: Mechanism) -> bool:
    return any(isinstance(one, RandomizedResponse) for one in mechanism.walk())


def absence_unknown(mechanism: Mechanism, relation: str) -> bool:
    """Return whether the mechanism's law on a batch without the record is unknown under the relation."""
    return relation in ("zero_out", "replace_one") and (only_stated(mechanism) or answers_at_random(mechanism))


def sums(values: np.ndarray) -> np.ndarray:
    """Return sums over the last axis, correctly rounded, so that permuting the outcomes changes nothing."""
    rows = values.reshape(-1, values.shape[-1])
    return np.array([math.fsum(row) for row in rows]).reshape(values.shape[:-1])


def refuse_sums(name: str, values: float | np.ndarray) -> None:
    """Refuse vectors that do not sum to 1 within SUM_LIMIT."""
    total = sums(np.asarray(values))
    rest = f"must be 1 within {SUM_LIMIT:g}; divide by the sum in float64"
    refuse_where(np.abs(total - 1.0) > SUM_LIMIT, f"the sum of {name}", total, rest)


def _sorted_law(loss: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return losses and masses (..., 2, A) in ascending order of the loss; outcomes of mass 0 come last."""
    loss = np.where(mass > 0.0, loss, np.inf)
    order = np.lexsort((mass, loss), axis=-1)
    return np.stack([np.take_along_axis(x, order, -1) for x in (loss, mass)], -2)
