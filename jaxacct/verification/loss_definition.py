"""The definition of each mechanism's privacy loss in one direction. It shares no code with `Mechanism.expand`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from jaxacct import mechanisms as known
from jaxacct import strategies
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.verification.ball_arithmetic import NotCovered, arb, ball, between, ctx, tick
from jaxacct.verification.closed_form_losses import BoundedRange, GaussianLoss, LaplaceLoss, SampledLaplace
from jaxacct.verification.finite_losses import (
    FiniteLosses,
    discrete_gaussian,
    discrete_laplace,
    from_masses,
    in_either_order,
    output_masses,
    response,
    several_answers,
)
from jaxacct.verification.gaussian_mixture import (
    GaussianMixture,
    PairOfMixtures,
    Revealed,
    RevealedPairs,
    binomial_weights,
    hypergeometric_weights,
)
from jaxacct.verification.random_allocation import AllocationLoss
from jaxacct.verification.sampled_gaussian import SampledGaussian

Part = tuple[Any, int]
"""A loss, and the number of times that it is composed."""
Rule = Callable[..., list[Part]]
"""A function that takes an `Asked` and, by name, the fields of a mechanism. It returns the losses of one run."""
RULES: dict[type, Rule] = {}
"""The rule of each class of mechanism; subclasses do not inherit it."""
R = TypeVar("R", bound=Rule)
MOST_RECORDS = 20_000
"""Largest number of records under capped sampling, since Pr[the cap is reached] has a term for almost every record."""
EITHER = "either"
"""The direction that covers both orders of each pair of laws, (p, q) and (q, p). Its delta is the larger of the two."""


@dataclass(frozen=True)
class Asked:
    """The case for which a mechanism's losses are asked: a relation, its direction and the record's sampling rate."""

    relation: str
    direction: str  # "remove", "add" or EITHER
    rate: Any = dataclasses.field(default_factory=lambda: arb(1))  # probability that the record takes part
    alone: bool = True  # whether the mechanism is a single step, not part of a composition

    @property
    def moved(self) -> int:
        """The most that one record moves a statistic, in units of the sensitivity under add/remove."""
        return 2 if self.relation == "replace_one" else 1

    @property
    def whole(self) -> bool:
        """Whether the record always takes part."""
        return bool(self.rate == 1)


def defines(*classes: type) -> Callable[[R], R]:
    """Return a decorator that registers the decorated function as the `Rule` of these classes."""

    def enter(rule: R) -> R:
        RULES.update(dict.fromkeys(classes, rule))
        return rule

    return enter


def losses(asked: Asked, mechanism: Any) -> list[Part]:
    """Return the losses of a mechanism, from the rule of its class."""
    held = fields_of(mechanism)  # raises NotCovered for a class without a rule
    return RULES[type(mechanism)](asked, **held)


def fields_of(mechanism: Any, rules: Mapping[type, Any] = RULES, beside: Container[str] = ()) -> dict[str, Any]:
    """Return a mechanism's fields but those in `beside`. Raise NotCovered if no rule of its class takes them all."""
    name = type(mechanism).__name__
    if type(mechanism) not in rules:
        raise NotCovered(name)
    named = inspect.signature(rules[type(mechanism)]).parameters
    fields = [field.name for field in dataclasses.fields(mechanism) if field.name not in beside]
    held = {field: getattr(mechanism, field) for field in fields}
    if unread := [field for field in held if field not in named]:
        raise NotCovered(f"{name} with the field {unread[0]}")
    return held


@dataclass(frozen=True)
class Composition:
    """A composition of independent losses: pairs (loss, number of times that it is composed)."""

    parts: tuple[Part, ...]

    @property
    def infinity(self) -> Any:
        """The probability, under P, of an infinite loss: 1 minus the product of the parts' chances of a finite loss."""
        finite = ((1 - part.infinity) ** count for part, count in self.parts if isinstance(part, FiniteLosses))
        return 1 - math.prod(finite, start=arb(1))

    @property
    def cut(self) -> Any:
        """An upper bound of Pr[some step has an outcome that `discrete_gaussian` left out], under P."""
        return sum((count * part.cut for part, count in self.parts if isinstance(part, FiniteLosses)), arb(0))

    @property
    def lost(self) -> Any:
        """An upper bound of Pr[some step draws a component that its mixture left out], under P."""
        return sum((count * part.lost for part, count in self.parts if isinstance(part, GaussianMixture)), arb(0))

    @property
    def keys(self) -> frozenset[Any]:
        """A key of the composition. It is equal for two directions whose losses have the same law."""
        return frozenset((part.key, count) for part, count in self.parts)

    @property
    def largest(self) -> Any:
        """The largest finite loss, or None if the losses are unbounded."""
        total = arb(0)
        for part, count in self.parts:
            if part.largest is None:
                return None
            total += count * part.largest
        return total


def expand(mechanism: Any, relation: str, direction: str) -> Composition:
    """Return the mechanism's losses in one direction of a neighbouring relation: "remove", "add" or EITHER."""
    square = arb(0)
    counts: dict[Any, Part] = {}
    for part, count in losses(Asked(relation, direction), mechanism):
        if isinstance(part, GaussianLoss):
            square += count * part.square
            continue
        before = counts.get(part.key, (part, 0))[1]
        counts[part.key] = (part, before + count)
    parts = list(counts.values())
    if not square.is_zero():
        parts.append((GaussianLoss(square), 1))
    return Composition(tuple(parts))


def directions(mechanism: Any, relation: str) -> list[tuple[Any, str]]:
    """Return pairs (mechanism, direction). Delta is the largest of their deltas, or possibly more if `mixes_orders`."""
    names = (relation.split("_")[0],) if relation in ("add_one", "remove_one") else ("remove", "add")
    fixed_size = type(mechanism) is known.SampledWithoutReplacement and mechanism.group == 1
    if fixed_size and relation == "replace_one" and mechanism.sampling_ratio != 1:
        names = ("remove",)
    orders = [mechanism]
    # In n FiniteOutput mechanisms p and q can be exchanged in 2^n ways. For n > 4 only the given order is tried.
    if (fixed_size or relation == "replace_one") and _unlike(mechanism) <= 4:
        orders = _orders(mechanism)
    return [(order, name) for order in orders for name in names]


def mixes_orders(mechanism: Any, relation: str) -> bool:
    """Return whether the relation may exchange p and q of a FiniteOutput mechanism, as another output says."""
    return relation == "replace_one" and _unlike(mechanism) > 0 and _count(mechanism, lambda each: 1) > 1


def _unlike(mechanism: Any) -> int:
    """Return how many FiniteOutput mechanisms in `mechanism` change when their p and q are exchanged."""

    def changes(each: Any) -> int:
        if type(each) is not known.FiniteOutput:
            return 0
        pairs = list(zip(np.asarray(each.p).tolist(), np.asarray(each.q).tolist(), strict=True))
        return int(sorted(pairs) != sorted((q, p) for p, q in pairs))

    return _count(mechanism, changes)


def _count(mechanism: Any, of_one: Callable[[Any], int]) -> int:
    """Return the sum of `of_one` over all mechanisms inside. Those of a repetition count twice."""
    # a MatrixMechanism holds no FiniteOutput, and its `inside` would run code of the engines
    inside = () if type(mechanism) is known.MatrixMechanism else mechanism.inside()
    if not inside:
        return of_one(mechanism)
    times = 2 if type(mechanism) is known.Repeated and np.any(np.greater(mechanism.steps, 1.0)) else 1
    return times * sum(_count(each, of_one) for each in inside)


def _orders(mechanism: Any) -> list[Any]:
    """Return every version of the mechanism in which each FiniteOutput has p and q as given or exchanged."""
    if not _unlike(mechanism):
        return [mechanism]
    if type(mechanism) is known.FiniteOutput:
        return [mechanism, replace(mechanism, p=mechanism.q, q=mechanism.p)]
    found = itertools.product(*(_orders(each) for each in mechanism.inside()))
    if hasattr(mechanism, "mechanisms"):
        return [replace(mechanism, mechanisms=each) for each in found]
    return [replace(mechanism, mechanism=each) for (each,) in found]


@defines(known.Repeated)
def _repeated(asked: Asked, mechanism: Any, steps: Any) -> list[Part]:
    return [(part, count * int(steps)) for part, count in losses(_beside_others(asked), mechanism)]


@defines(known.Composed)
def _composed(asked: Asked, mechanisms: tuple[Any, ...]) -> list[Part]:
    inside = _beside_others(asked)
    return [item for each in mechanisms for item in losses(inside, each)]


def _beside_others(asked: Asked) -> Asked:
    if not asked.whole:
        raise NotCovered("several releases from one sample")
    return replace(asked, alone=False)


SUMS = (known.Gaussian, known.Laplace, known.DiscreteGaussian, known.DiscreteLaplace, known.FiniteOutput)
"""Mechanisms whose law without the record is known. In them, setting a record to zero is the same as removing it."""


@defines(known.PoissonSampled)
def _poisson(asked: Asked, mechanism: Any, sampling_probability: Any, group: int, in_turns: bool) -> list[Part]:
    rate = asked.rate * ball(sampling_probability)
    if group > 1:
        return group_of(replace(asked, rate=rate), mechanism, group)
    if asked.relation == "replace_one" and (in_turns or not (rate == 1 or rate.is_zero())):
        raise NotCovered("Poisson sampling under replace_one")
    if asked.relation == "zero_out" and type(mechanism) not in (*SUMS, known.PoissonSampled) and not rate == 1:
        raise NotCovered(f"a sampled {type(mechanism).__name__} under zero_out")
    found = losses(replace(asked, rate=arb(1) if rate.is_zero() else rate), mechanism)
    return [] if rate.is_zero() else found


@defines(known.SampledWithoutReplacement)
def _without_replacement(
    asked: Asked, mechanism: Any, sampling_ratio: Any, group: int, dataset_size: Any
) -> list[Part]:
    if not asked.whole:
        raise NotCovered("SampledWithoutReplacement under sampling")
    if group > 1:
        return drawn_group(asked, mechanism, sampling_ratio, group, dataset_size)
    rate = ball(sampling_ratio)
    if asked.relation == "zero_out":
        return kept_slot(asked, mechanism, rate)
    if not asked.alone and asked.relation == "replace_one" and not (rate == 1 or rate.is_zero()):
        raise NotCovered("sampling without replacement, composed, under replace_one")
    if not asked.alone and type(mechanism) is known.FiniteOutput:
        raise NotCovered("FiniteOutput sampled without replacement and composed")
    if asked.relation != "replace_one" and type(mechanism) not in (*SUMS, known.RandomizedResponse):
        raise NotCovered(f"{type(mechanism).__name__} sampled without replacement under {asked.relation}")
    replaced = replace(asked, relation="replace_one", rate=arb(1) if rate.is_zero() else rate)
    found = losses(replaced, mechanism)
    return [] if rate.is_zero() else found


@defines(known.Gaussian)
def _gaussian(asked: Asked, noise_multiplier: Any) -> list[Part]:
    deviation = ball(noise_multiplier) / asked.moved
    if asked.whole:
        return [(GaussianLoss(1 / deviation**2), 1)]
    return [(SampledGaussian(deviation, asked.rate, asked.direction), 1)]


@defines(known.Laplace)
def _laplace(asked: Asked, scale: Any) -> list[Part]:
    return _laplace_loss(asked, asked.moved / ball(scale))


def _laplace_loss(asked: Asked, top: Any) -> list[Part]:
    return [(LaplaceLoss(top) if asked.whole else SampledLaplace(top, asked.rate, asked.direction), 1)]


@defines(known.ExponentialMechanism)
def _exponential_mechanism(asked: Asked, epsilon: Any) -> list[Part]:
    if not asked.whole:
        raise NotCovered("bounded range under sampling")
    return [(BoundedRange(ball(epsilon)), 1)] if epsilon > 0 else []


@defines(known.ReportNoisyMax)
def _report_noisy_max(asked: Asked, epsilon: Any, noise: str) -> list[Part]:
    if noise == "gumbel":
        return _exponential_mechanism(asked, epsilon)
    if noise not in ("laplace", "exponential"):
        raise NotCovered(f"ReportNoisyMax with {noise} noise")
    top = ball(epsilon)  # the loss is that of Laplace noise of scale 1/epsilon, under every relation
    return [] if top.is_zero() else _laplace_loss(asked, top)


@defines(known.PureDP)
def _pure(asked: Asked, epsilon: Any) -> list[Part]:
    return _responds(asked, ball(epsilon), arb(0))


@defines(known.ApproximateDP)
def _approximate(asked: Asked, epsilon: Any, delta: Any) -> list[Part]:
    return _responds(asked, ball(epsilon), ball(delta))


@defines(known.AboveThreshold)
def _above_threshold(asked: Asked, threshold_scale: Any, query_scale: Any, answers: Any, monotone: bool) -> list[Part]:
    twice = 1 if monotone and asked.relation != "replace_one" else 2
    epsilon = 1 / ball(threshold_scale) + twice * ball(answers) / ball(query_scale)
    return _responds(asked, asked.moved * epsilon, arb(0))


@defines(known.NumericSparse)
def _numeric_sparse(
    asked: Asked, threshold_scale: Any, query_scale: Any, value_scale: Any, answers: Any, monotone: bool
) -> list[Part]:
    if not asked.whole:
        raise NotCovered("NumericSparse under sampling")
    found = _above_threshold(asked, threshold_scale, query_scale, answers, monotone)
    return [*found, (LaplaceLoss(asked.moved / ball(value_scale)), int(answers))]


@defines(known.PartitionSelection)
def _partition_selection(asked: Asked, epsilon: Any, delta: Any, contributions: Any) -> list[Part]:
    if not asked.whole:
        raise NotCovered("PartitionSelection under sampling")
    times = int(contributions) * (2 if asked.relation == "replace_one" else 1)
    return [(loss, number * times) for loss, number in _responds(asked, ball(epsilon), ball(delta))]


@defines(known.RandomizedResponse)
def _randomized_response(asked: Asked, probability: Any, categories: int) -> list[Part]:
    key = ("RandomizedResponse", float(probability), categories)
    return _of_masses(asked, key, several_answers(ball(probability), categories))


@defines(known.FiniteOutput)
def _finite_output(asked: Asked, p: Any, q: Any) -> list[Part]:
    laws = [np.asarray(law).tolist() for law in (p, q)]
    if asked.whole and asked.direction == "add":
        return _finite_output(replace(asked, direction="remove"), q, p)
    outcomes = tuple(sorted(zip(*laws, strict=True)))
    if asked.direction == EITHER:
        return _of_masses(asked, ("FiniteOutput in either order", outcomes), in_either_order(*laws))
    return _of_masses(asked, ("FiniteOutput", outcomes), output_masses(*laws), alike=False)


@defines(known.DiscreteLaplace)
def _discrete_laplace(asked: Asked, scale: Any, sensitivity: int) -> list[Part]:
    shift = sensitivity * asked.moved
    return _of_masses(asked, ("DiscreteLaplace", float(scale), shift), discrete_laplace(ball(scale), shift))


@defines(known.DiscreteGaussian)
def _discrete_gaussian(asked: Asked, sigma: Any, sensitivity: int) -> list[Part]:
    shift = sensitivity * asked.moved
    return _of_masses(asked, ("DiscreteGaussian", float(sigma), shift), discrete_gaussian(float(sigma), shift))


def _responds(asked: Asked, epsilon: Any, delta: Any) -> list[Part]:
    return _of_masses(asked, ("response", epsilon.str(40), delta.str(40)), response(epsilon, delta))


def _of_masses(asked: Asked, key: tuple[Any, ...], masses: Any, alike: bool = True) -> list[Part]:
    """Return the losses of one step from its masses. `alike` tells whether both directions have the same losses."""
    way = "both" if alike and asked.whole else asked.direction
    return [(from_masses((*key, asked.rate.str(40), way), masses, asked.rate, asked.direction), 1)]


@defines(RandomAllocation)
def _allocated(asked: Asked, mechanism: Any, slots: Any, participations: Any, group: Any) -> list[Part]:
    """Return the loss of random allocation. The record gets one of `slots` slots at random; others keep theirs."""
    _refuse(asked, "RandomAllocation")
    if participations != 1:
        raise NotCovered("random allocation of several slots to a record")
    if group != 1:
        raise NotCovered("random allocation of a group of records")
    if asked.relation == "replace_one":
        raise NotCovered("random allocation under replace_one")
    deviation, many = _noise(mechanism), int(slots)
    return [(GaussianLoss(1 / deviation**2) if many == 1 else AllocationLoss(deviation, many, asked.direction), 1)]


@defines(known.MatrixMechanism)
def _matrix(asked: Asked, strategy: Any, noise_multiplier: Any, participation: Any) -> list[Part]:
    """Return the losses of independent Gaussian releases. `_moves` gives how far one record moves each release."""
    _refuse(asked, "MatrixMechanism")
    rate, moves = _moves(strategy, participation, ctx.prec)
    if rate.is_zero():
        return []
    if asked.relation == "replace_one" and isinstance(participation, strategies.CyclicPoisson):
        raise NotCovered("cyclic Poisson sampling under replace_one")
    noise = ball(noise_multiplier) / asked.moved
    return [(_sampled_step(noise / square.sqrt(), rate, asked.direction), count) for square, count in moves]


@functools.lru_cache(maxsize=16)
def _moves(strategy: Any, participation: Any, bits: int) -> Moves:
    """Return the `Moves` of C X, for the strategy's matrix C and data X. `bits` keeps precisions apart in the cache."""
    held, told = fields_of(strategy, MATRICES, beside=("epochs",)), fields_of(participation, WAYS)
    return WAYS[type(participation)](MATRICES[type(strategy)](**held), **told)


def group_of(asked: Asked, mechanism: Any, group: int) -> list[Part]:
    """Return the loss of a Poisson-sampled group. Each record adds 1 with the product of all rates as probability."""
    if asked.relation == "replace_one":
        raise NotCovered("a group of records under replace_one")
    rate = asked.rate
    while type(mechanism) is known.PoissonSampled:
        inner = fields_of(mechanism)
        if inner["group"] != 1:
            raise NotCovered("a group of records inside another sampling")
        rate, mechanism = rate * ball(inner["sampling_probability"]), inner["mechanism"]
    return _mixture(_noise(mechanism), *binomial_weights(group, rate), asked.direction)


@defines(known.SampledWithReplacement)
def _with_replacement(asked: Asked, mechanism: Any, batch_size: Any, dataset_size: Any, group: int) -> list[Part]:
    """Return the loss of draws with replacement. Binomial(batch_size, group/dataset_size) draws hit the group."""
    _refuse(asked, "SampledWithReplacement", "replace_one", "zero_out")
    weights = binomial_weights(int(batch_size), ball(float(group)) / ball(float(dataset_size)))
    # each draw of the group takes the place of an ordinary record, so it moves the sum by up to twice the clip norm
    return _mixture(_noise(mechanism) / 2, *weights, asked.direction)


def drawn_group(asked: Asked, mechanism: Any, ratio: Any, group: int, dataset_size: Any) -> list[Part]:
    """Return the loss of draws without replacement. The number of the group's records drawn is hypergeometric."""
    _refuse(asked, "a group of records sampled without replacement", "replace_one", "zero_out")
    size = int(dataset_size)
    weights = hypergeometric_weights(size, group, round(size * float(ratio)))
    return _mixture(_noise(mechanism) / 2, *weights, asked.direction)  # halved as in `_with_replacement`


def kept_slot(asked: Asked, mechanism: Any, rate: Any) -> list[Part]:
    """Return the loss of sampling without replacement under zero_out: a zeroed record keeps its place in the batch."""
    if not asked.alone:
        raise NotCovered("zero_out where a record displaces others")
    return [(_zero_out(_noise(mechanism), rate, asked.direction), 1)]


@defines(known.TruncatedPoissonSampled)
def _capped(asked: Asked, mechanism: Any, sampling_probability: Any, dataset_size: Any, cap: Any) -> list[Part]:
    """Return the loss of capped Poisson sampling. If `cap` or more others are drawn, its rate is kept/tau (`_cap`)."""
    _refuse(asked, "capped Poisson sampling", "replace_one")
    if asked.relation == "zero_out" and not asked.alone:
        raise NotCovered("zero_out where a record displaces others")
    noise, q, direction = _noise(mechanism), ball(sampling_probability), asked.direction
    tau, kept = _cap(int(dataset_size), int(cap), q)
    plain = None if q.is_zero() else _sampled_step(noise, q, direction)
    if not tau > 0:
        return [] if plain is None else [(plain, 1)]
    removed = asked.relation == "zero_out"
    ways: type[RevealedPairs] = RevealedPairs if removed else Revealed
    rule, scale = (_zero_out, noise) if removed else (_sampled_step, noise / 2)
    capped = rule(scale, kept / tau, direction)
    return [(capped if tau == 1 else ways(((1 - tau, plain), (tau, capped))), 1)]


def _refuse(asked: Asked, name: str, *relations: str) -> None:
    """Raise NotCovered if the mechanism is sampled, or the relation is one of `relations`."""
    if not asked.whole:
        raise NotCovered(f"{name} under sampling")
    if asked.relation in relations:
        raise NotCovered(f"{name} under {asked.relation}")


def _noise(mechanism: Any) -> Any:
    """Return the noise multiplier of a Gaussian mechanism. Raise NotCovered for any other mechanism."""
    if type(mechanism) is not known.Gaussian:
        raise NotCovered(f"batches of {type(mechanism).__name__}")
    return ball(fields_of(mechanism)["noise_multiplier"])


def _cap(size: int, cap: int, q: Any) -> tuple[Any, Any]:
    """Let E be: at least `cap` other records are sampled. Return Pr[E] and Pr[E, and the record is in the batch]."""
    if cap >= size or q.is_zero():
        return arb(0), arb(0)
    if size > MOST_RECORDS:
        raise NotCovered(f"a cap with more than {MOST_RECORDS} records")
    tau, kept = arb(0), arb(0)
    for others in range(cap, size):
        chance = math.comb(size - 1, others) * q**others * (1 - q) ** (size - 1 - others)
        tau, kept = tau + chance, kept + chance * q * cap / (others + 1)
    return tau, kept


def _sampled_step(noise: Any, rate: Any, direction: str) -> Any:
    return GaussianLoss(1 / noise**2) if rate == 1 else SampledGaussian(noise, rate, direction)


def _zero_out(noise: Any, rate: Any, direction: str) -> Any:
    """Return the worst pair of laws of the noisy sum for eps >= 0."""
    # With chance `rate` the record is drawn. Then it adds x in one law and 0 in the other.
    # Otherwise another record is drawn in its place. That record adds -x (remove) or x (add) in both laws.
    s, nothing = 1 / noise, arb(0)
    if direction == "remove":
        return PairOfMixtures(((-s, 1 - rate), (s, rate)), ((-s, 1 - rate), (nothing, rate)))
    return PairOfMixtures(((s, 1 - rate), (nothing, rate)), ((s, arb(1)),))


def _mixture(noise: Any, weights: Any, lost: Any, direction: str) -> list[Part]:
    """Return the loss of Gaussian noise on the number j of records, Pr[j] = weights[j], or [] if j is always 0."""
    some = [j for j, w in enumerate(weights) if not w.is_zero()]
    if some == [0]:
        return []
    if len(some) == 1:
        return [(GaussianLoss((some[0] / noise) ** 2), 1)]
    return [(GaussianMixture.of(noise, weights, lost, direction), 1)]


Column = dict[Any, Any]
"""The non-zero entries of a column of C, by row."""
MOST_ENTRIES = 100_000
"""Largest number of entries of a matrix C that the verifier covers."""
MOST_PATTERNS = 20_000
"""Largest number of patterns, which are the sets of steps in which a record may take part."""
NEARLY = arb(1e-12)
"""Two squared norms are merged into one ball if their relative difference is below this."""
Moves = tuple[Any, list[tuple[Any, int]]]
"""The rate at which a record is sampled, and pairs (s, n): the record moves n of the releases by the root of s."""


def _toeplitz(column: Sequence[Any], steps: int) -> list[Column]:
    _require_size(steps, len(column))
    return [{first + lag: c for lag, c in enumerate(column[: steps - first])} for first in range(steps)]


def _require_size(steps: int, bands: int) -> None:
    if steps * bands > MOST_ENTRIES:
        raise NotCovered(f"a matrix of more than {MOST_ENTRIES} entries")


def _given(coefficients: Sequence[float], steps: int) -> list[Column]:
    return _toeplitz([ball(c) for c in coefficients], steps)


def _buffered(buffers: int, steps: int, scales: Sequence[float], decays: Sequence[float]) -> list[Column]:
    _require_size(steps, steps)
    terms = [(ball(scales[k]), ball(decays[k])) for k in range(buffers)]
    powers = [sum((scale * decay**lag for scale, decay in terms), arb(0)) for lag in range(steps - 1)]
    return _toeplitz([arb(1), *powers], steps)


def _banded_inverse(inverse_bands: int, steps: int, inverse: Sequence[float]) -> list[Column]:
    """Return the columns of C. The first column solves inverse * column = (1, 0, 0, ...), where * is a convolution."""
    _require_size(steps, steps)
    given = [ball(d) for d in inverse[:inverse_bands]]
    column = [1 / given[0]]
    for row in range(1, steps):
        earlier = sum((given[lag] * column[row - lag] for lag in range(1, min(len(given), row + 1))), arb(0))
        column.append(-earlier / given[0])
    return _toeplitz(column, steps)


def _column_normalised(bands: int, steps: int, diagonals: Sequence[Sequence[float]]) -> list[Column]:
    _require_size(steps, bands)
    lags = lambda first: range(min(bands, steps - first))
    return [{first + lag: ball(diagonals[lag][first]) for lag in lags(first)} for first in range(steps)]


def _tree(steps: int, restarts: int) -> list[Column]:
    """Return the columns of C. A step's column is 1 at each tree node (block, level, place) that covers the step."""
    _require_size(steps, steps.bit_length())
    size = steps // restarts
    nodes = lambda leaf: [(k, leaf >> k) for k in range(size.bit_length()) if ((leaf >> k) + 1) << k <= size]
    return [{(step // size, *node): arb(1) for node in nodes(step % size)} for step in range(steps)]


def _product(one: Column, other: Column) -> Any:
    return sum((entry * other[row] for row, entry in one.items() if row in other), arb(0))


def _squared_move(columns: list[Column], patterns: list[Sequence[int]]) -> Moves:
    """Enclose the largest || sum_{i in pi} C e_i x_i^T ||^2 over patterns pi and all |x_i| <= 1 (README.md)."""
    gram = functools.lru_cache(None)(lambda i, j: _product(columns[i], columns[j]))

    def total(pattern: Sequence[int], signs: Sequence[int] | None) -> Any:
        tick()
        found = sum((gram(i, i) for i in pattern), arb(0))
        for (m, i), (n, j) in itertools.combinations(enumerate(pattern), 2):
            found += 2 * (abs(gram(i, j)) if signs is None else signs[m] * signs[n] * gram(i, j))
        return found

    sizes = [total(pattern, None) for pattern in patterns]
    worst = patterns[max(range(len(sizes)), key=lambda place: float(sizes[place].mid()))]
    rest = len(worst) - 1
    # all signs of the contributions are tried for patterns of few steps
    signs = itertools.product((1, -1), repeat=rest) if rest < 10 else [(1,) * rest]
    trace = sum((gram(i, i) for i in worst), arb(0))
    reached = functools.reduce(arb.max, (total(worst, (1, *each)) for each in signs), trace)
    return arb(1), [(between(reached, functools.reduce(arb.max, sizes)), 1)]


def _in_epochs(columns: list[Column], epochs: int) -> Moves:
    period, rest = divmod(len(columns), epochs)
    if rest:
        raise NotCovered("epochs that do not divide the steps")
    return _squared_move(columns, [range(first, len(columns), period) for first in range(period)])


def _apart(columns: list[Column], separation: int, most: int | None) -> Moves:
    longest = -(-len(columns) // separation)
    most = longest if most is None else min(most, longest)

    def after(pattern: tuple[int, ...]) -> Iterator[Sequence[int]]:
        later = range(pattern[-1] + separation if pattern else 0, len(columns))
        if not later or len(pattern) == most:
            yield pattern
            return
        # A gap of 2 * separation or more has room for one more step, which never lowers the sum of |G_ij|. So patterns
        # with a gap of this length are left out, unless `most` limits the number of steps.
        for step in later[:separation] if most == longest else later:
            yield from after((*pattern, step))

    patterns = list(itertools.islice(after(()), MOST_PATTERNS + 1))
    if len(patterns) > MOST_PATTERNS:
        raise NotCovered(f"more than {MOST_PATTERNS} patterns of participation")
    return _squared_move(columns, patterns)


def _cyclic(columns: list[Column], groups: int, sampling_probability: float) -> Moves:
    """Return the rate and balls [a, b]. a: r-th largest squared norm of a column in one group; b: in any group."""
    for first, column in enumerate(columns):
        if not all(type(row) is int and first <= row < first + groups for row in column):
            raise NotCovered("cyclic Poisson sampling of more bands than groups, or of a tree")
    squares = [_product(column, column) for column in columns]
    size = lambda square: float(square.mid())
    ranked = [sorted(squares[j::groups], key=size, reverse=True) for j in range(min(groups, len(squares)))]
    by_rank = list(itertools.zip_longest(*ranked, fillvalue=arb(0)))
    leading = max(range(len(ranked)), key=lambda j: sum(map(size, ranked[j])))
    runs: list[tuple[Any, int]] = []
    for each in (between(rank[leading], functools.reduce(arb.max, rank)) for rank in by_rank):
        if not each > 0:
            raise NotCovered("a block of noise whose column may be 0")
        if runs and abs(runs[-1][0] - each) < NEARLY * each:
            runs[-1] = runs[-1][0].union(each), runs[-1][1] + 1
        else:
            runs.append((each, 1))
    return ball(sampling_probability), runs


MATRICES: dict[type, Callable[..., list[Column]]] = {
    strategies.Identity: lambda steps: _toeplitz([arb(1)], steps),
    strategies.Toeplitz: _given,
    strategies.Banded: lambda bands, steps, coefficients: _given(coefficients[:bands], steps),
    strategies.BLT: _buffered,
    strategies.BandedInverse: _banded_inverse,
    strategies.ColumnNormalised: _column_normalised,
    strategies.PrefixSum: _tree,
}
"""For each class of strategy, the function from its fields to the columns of C. No matrix depends on `epochs`."""
WAYS: dict[type, Callable[..., Moves]] = {
    strategies.SingleParticipation: lambda columns: _squared_move(columns, [(step,) for step in range(len(columns))]),
    strategies.FixedEpochs: _in_epochs,
    strategies.MinSeparation: _apart,
    strategies.CyclicPoisson: _cyclic,
}
"""For each class of participation, the function from the columns of C and the fields of the class to `Moves`."""
