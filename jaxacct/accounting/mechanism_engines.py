"""Engines that answer for a mechanism as a whole, in the order of asking. Proofs: jaxacct/mechanisms/README.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxacct.accounting.account import REVERSED, answer, by_parts, flat
from jaxacct.accounting.dispatch import is_open, single_steps
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.progress import Progress, waiting
from jaxacct.core.validation import UnboundedLossError
from jaxacct.engines.protocol import Answer, MechanismEngine, MechanismQuestion, register
from jaxacct.mechanisms import (
    Gaussian,
    MatrixMechanism,
    Mechanism,
    PoissonSampled,
    SampledWithoutReplacement,
    batch_shape,
    directions,
    repeat,
)
from jaxacct.mechanisms.base import take_rows, weakest
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.mechanisms.gaussian_mixtures import LOSS_OF_PRESENCE, OfGaussianMixtures
from jaxacct.mechanisms.matrix_mechanism import SharedBins, delta_of_bins, epsilon_of_bins
from jaxacct.mechanisms.random_allocation import BallsInBins, RandomAllocation
from jaxacct.mechanisms.sampled_releases import Several
from jaxacct.mechanisms.shuffled_batches import ShuffledBatches, attacks_on

if TYPE_CHECKING:
    from jaxacct.engines.mixture import Ends, Row

MEMORY_ALONE = 2**27
"""Memory limit, in bytes, of a lattice for the upper pair alone. The limit allows 2^18 nodes for one or two laws. The
lattice gives only an upper end."""


class Attacked(MechanismEngine):
    """Raises the lower end of the other engines' answer by the best known attack on the mechanism."""

    name, classes, if_engine_is_named = "attacks", (Mechanism,), "answers"
    steps = (ShuffledBatches,)

    def supports(self, question: MechanismQuestion) -> bool:
        if not question.attacks or question.relation in LOSS_OF_PRESENCE:
            return False
        return bool(attacks_on(question.mechanism, question.relation, flat(question)[1].size))

    def bracket(self, question: MechanismQuestion) -> Bounds:
        found, low = answer(question._replace(attacks=False)), None
        for attacked in attacks_on(question.mechanism, question.relation, found.upper.size):
            seen = answer(question._replace(mechanism=attacked, engine="auto", attacks=False)).lower
            low = np.fmax(found.lower if low is None else low, seen)
        agree = low <= found.upper
        low = np.where(agree, low, found.lower)
        status = np.where(agree, found.status, "contradiction")
        return Bounds(low, np.clip(found.estimate, low, found.upper), found.upper, found.kind, status, found.engine)


# One sample with several releases
#
# Let q be the sampling rate, a = e^eps and k = 1 - (1 - q) a. Let H(e^x) be the delta at epsilon x of the composition
# without sampling. Then
#
#     remove: delta(eps) = q H(1 + (a - 1)/q),        add: delta(eps) = k H(1 + (a - 1)/k) if k > 0, otherwise 0.

UNITS = 32.0
"""Bound on a formula's relative rounding error, in units of ROUNDOFF: up to four operations of a few units each."""
SECTIONS = 16
"""Number of points inside a bracket of epsilon at which each turn of the search for epsilon evaluates delta."""
LARGEST_EPSILON = 1e300
"""Largest epsilon at which delta without sampling is evaluated. At a larger epsilon the lower bound of delta is 0."""
_SIDES = {"remove_one": ("remove",), "replace_one": ("remove",), "add_one": ("add",)}
"""The only direction that is evaluated under each listed relation. Under other relations both are evaluated."""
_Ends = tuple[np.ndarray, np.ndarray]  # lower ends, upper ends


class SampledOnce(MechanismEngine):
    """Answers exactly for several mechanisms that run on one sample once, from the profile of their composition."""

    name, if_engine_is_named = "sampled_once", "stands back"
    classes = steps = (PoissonSampled, SampledWithoutReplacement)

    def supports(self, question: MechanismQuestion) -> bool:
        mechanism: Any = question.mechanism
        return mechanism.several(question.relation) is not None

    def bracket(self, question: MechanismQuestion) -> Bounds:
        quantity, relation, rtol = question.quantity, question.relation, question.effort.rtol
        mechanism: Any = question.mechanism
        drawn = mechanism.several(relation)
        shape, _, given = flat(question)
        at = given.reshape(shape)
        run = _Releases(question, drawn, np.broadcast_to(np.asarray(drawn.rate, np.float64), shape))
        low, high = np.zeros(shape), np.zeros(shape)
        for side in _SIDES.get(relation, ("remove", "add")):
            ends = run.delta(at, side) if quantity == "delta" else run.epsilon(at, side, high)
            low, high = np.maximum(low, ends[0]), np.maximum(high, ends[1])
        kind = weakest({*run.kinds, question.mechanism.kind_of_bracket(relation)})
        low = low if kind == "certified" else np.zeros(shape)
        agree = low <= high
        low, high = np.where(agree, low, 0.0), np.where(agree, high, 1.0 if quantity == "delta" else np.inf)
        with np.errstate(invalid="ignore"):
            middle = np.where(np.isfinite(high), low + 0.5 * (high - low), high) if kind == "certified" else high
        status = np.where((kind == "certified") & is_open(Answer(low, middle, high), rtol), "width", "ok")
        status = status.astype("<U32")
        status[np.isinf(high)] = "width"
        status[~agree] = "contradiction"
        status[high == 0.0] = "zero"
        if quantity == "epsilon":
            status[low == np.inf] = "mass_at_infinity"
        return Bounds(low, middle, high, kind, status, run.engine)


class _Releases:
    """Brackets for all releases from one sample together: `ask` is without sampling, `delta` and `epsilon` with it."""

    def __init__(self, question: MechanismQuestion, drawn: Several, rate: np.ndarray) -> None:
        self.question, self.rate, self.relations = question._replace(mechanism=drawn.base), rate, drawn.relations
        self.kinds: set[str] = set()
        self.engine = np.full(rate.shape, "", "<U32")

    def ask(self, quantity: str, values: np.ndarray, side: str) -> Bounds:
        """Return brackets for the releases without sampling, in one direction. `values` may have extra leading axes."""
        found = answer(self.question._replace(quantity=quantity, given=values, relation=self.relations[side]))
        self.kinds |= set(np.ravel(found.kind).tolist())
        words = np.asarray(found.engine).reshape(-1, *self.rate.shape)[0] if found.upper.size else self.engine
        self.engine = np.where(self.engine == "", words, self.engine)
        return found

    def delta(self, eps: np.ndarray, side: str) -> _Ends:
        """Return bounds of delta with the sampling, in one direction. `eps` may have extra leading axes."""
        wrong, q = UNITS * ROUNDOFF, self.rate
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            risen = np.expm1(eps)
            if side == "remove":
                least, most = q + 0.0 * eps, q + 0.0 * eps
            else:
                factor, off = q - (1.0 - q) * risen, wrong * (q + (1.0 - q) * risen)
                factor, off = np.where(q == 1.0, 1.0, factor), np.where(q == 1.0, 0.0, off)
                least, most = np.maximum(factor - off, 0.0), np.maximum(factor + off, 0.0)
            inner = [_inner(eps, risen, factor) for factor in (least, most)]
        inside = np.stack([inner[0] * (1.0 + wrong), inner[1] * (1.0 - wrong)])
        found = self.ask("delta", np.minimum(inside, LARGEST_EPSILON), side)
        low = np.where(inside[0] > LARGEST_EPSILON, 0.0, least * found.lower[0] * (1.0 - wrong))
        return np.where(least > 0.0, low, 0.0), np.where(most > 0.0, most * found.upper[1] * (1.0 + wrong), 0.0)

    def epsilon(self, delta: np.ndarray, side: str, known: np.ndarray) -> _Ends:
        """Return bounds of epsilon in one direction, not refined below `known`, the other direction's upper bound."""
        wrong, q = UNITS * ROUNDOFF, self.rate
        if side == "add":
            return self._searched(delta, known)
        share = np.where(delta < q, delta / np.where(q > 0.0, q, 1.0), 0.5)
        more, less = share * (1.0 + wrong), share * (1.0 - wrong)
        low = _after_sampling(self.ask("epsilon", np.minimum(more, 0.5 + 0.5 * less), side).lower, q) * (1.0 - wrong)
        high = _after_sampling(self.ask("epsilon", less, side).upper, q) * (1.0 + wrong)
        return np.where((delta < q) & (more < 1.0), low, 0.0), np.where(delta < q, high, 0.0)

    def _searched(self, delta: np.ndarray, known: np.ndarray) -> _Ends:
        """Return lower and upper bounds of epsilon in the add direction, where 0 <= epsilon <= -log(1 - q)."""
        q = self.rate
        with np.errstate(divide="ignore"):
            top = np.where(q < 1.0, -np.log1p(-q) * (1.0 + UNITS * ROUNDOFF), np.inf)
        # sampling does not raise epsilon, so epsilon without sampling (`plain`) is an upper bound
        plain = self.ask("epsilon", np.where(q > 0.0, delta, 0.5), "add")
        low, high = np.where(q < 1.0, 0.0, plain.lower), np.minimum(plain.upper, top)
        high = np.where(q > 0.0, high, 0.0)
        low = np.where(q > 0.0, low, 0.0)
        ends = self.delta(np.where(np.isfinite(known), known, 0.0), "add")
        small = (ends[1] <= delta) & np.isfinite(known)  # epsilon is at most `known`
        high = np.where(small, np.minimum(high, known), high)
        share = np.arange(1, SECTIONS + 1).reshape(-1, *(1,) * q.ndim) / (SECTIONS + 1)
        # The search narrows [`floor`, `high`]. If the answers for delta are certified, `floor` equals `low`. Otherwise
        # `low` stays 0, and `floor` is the largest eps found at which the upper bound of delta exceeds the given delta.
        floor = low
        for _ in range(40):
            wide = high * (1.0 - 0.25 * self.question.effort.rtol) > floor
            if not np.any(~small & np.isfinite(high) & wide):  # an infinite upper end is not searched
                break
            first = np.where(np.isfinite(floor), floor, 0.0)
            last = np.where(np.isfinite(high), high, first)
            at = np.concatenate([first[None], first + share * (last - first)])
            ends = self.delta(at, "add")
            above, below = ends[0] > delta, ends[1] <= delta
            before, low = floor, np.maximum(low, np.max(np.where(above, at, 0.0), axis=0))
            missed = np.max(np.where(below, 0.0, at), axis=0)
            floor = low if self.kinds == {"certified"} else np.maximum(floor, missed)
            narrower = np.minimum(high, np.min(np.where(below, at, np.inf), axis=0))
            if np.all((narrower == high) & (floor == before)):
                break
            high = narrower
        return np.minimum(low, high), high


def _inner(eps: np.ndarray, risen: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return `log(1 + (e^eps - 1)/factor)`, the epsilon without sampling for `eps` with it. `risen` is e^eps - 1."""
    safe = np.where(factor > 0.0, factor, 1.0)
    ratio = risen / safe
    return np.where(np.isfinite(ratio), np.log1p(ratio), eps - np.log(safe))


def _after_sampling(eps: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return `max(log(1 - q + q e^eps), 0)`: epsilon with sampling at rate q, where `eps` is epsilon without it."""
    mixed = log_mixture(np.where(np.isfinite(eps), eps, 0.0), q)
    return np.where(np.isfinite(eps), np.maximum(mixed, 0.0), np.where(q > 0.0, np.inf, 0.0))


# The replacement of a record, bounded as a removal followed by an addition

WALK = 4
"""The search for the best split between removal and addition begins with equal parts. It then moves the removal's eps,
or the log odds of the removal's share of delta, up or down by at most this many steps of equal size."""
LEAST_REACH = 1.0
"""If eps/2 is smaller than this, a second search moves the removal's part this far up or down from eps/2. One of the
parts may then be negative."""


class RemovedAndAdded(MechanismEngine):
    """Bounds a replacement as a removal and an addition, for mechanisms without a good pair for the replacement."""

    name, classes, if_engine_is_named = "remove_and_add", (Mechanism,), "answers"
    relations = ("replace_one",)

    def supports(self, question: MechanismQuestion) -> bool:
        groups = any(isinstance(one, PoissonSampled) and one.group > 1 for one in question.mechanism.walk())
        return groups or question.mechanism.replaced_apart()

    def bracket(self, question: MechanismQuestion) -> Bounds:
        # a guarantee for replacements says nothing about a removal
        apart = question._replace(mechanism=_with_guarantees_unsampled(question.mechanism))
        in_two_steps = (epsilon_replaced if question.quantity == "epsilon" else _delta_replaced)(apart)
        if question.mechanism.replaced_apart():
            return in_two_steps
        at_once = by_parts(question)
        better = in_two_steps.upper < at_once.upper
        upper, status, engine = (
            np.where(better, getattr(in_two_steps, name), getattr(at_once, name))
            for name in ("upper", "status", "engine")
        )
        return Bounds(np.zeros_like(upper), upper, upper, "bound", status, engine)


def _with_guarantees_unsampled(mechanism: Mechanism) -> Mechanism:
    """Return the mechanism in which each sampled guarantee runs on all records. It leaks no less."""
    sampled = lambda node: isinstance(node, PoissonSampled | RandomAllocation) and node.reveals("replace_one")

    def bare(node: Any) -> Any:
        if not sampled(node):
            return node
        times = node.participations if isinstance(node, RandomAllocation) else 1.0
        return repeat(node.mechanism, np.broadcast_to(times, batch_shape(node)))

    while mechanism.reveals("replace_one"):  # a sampled guarantee may contain another one
        mechanism = jax.tree.map(bare, mechanism, is_leaf=sampled).validated()
    return mechanism


def _upper_epsilon(question: MechanismQuestion, delta: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of epsilon at each delta."""
    asked = question._replace(quantity="epsilon", relation=relation, hint=None, given=delta)
    return np.asarray(answer(asked).upper)


def _upper_delta(question: MechanismQuestion, epsilon: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of delta at real eps. Each eps is a question by itself, since a shared lattice is coarser."""

    def at(eps: np.ndarray, relation: str) -> np.ndarray:
        return np.asarray(answer(question._replace(quantity="delta", relation=relation, hint=None, given=eps)).upper)

    found = []
    for eps in epsilon:
        below = np.minimum(eps, 0.0)
        ahead = 1.0 if np.all(eps < 0.0) else at(np.maximum(eps, 0.0), relation)
        back = at(-below, REVERSED[relation]) if np.any(eps < 0.0) else 1.0
        back = (np.exp(below) * back - np.expm1(below)) * (1.0 + 8.0 * ROUNDOFF)
        found.append(np.where(eps < 0.0, back, ahead))
    return np.stack(found)


def _delta_replaced(question: MechanismQuestion) -> Bounds:
    """Bound a replacement's delta from above, by the best split of eps found between removal and addition."""
    shape, _, given = flat(question)
    eps = np.minimum(given.reshape(shape), 700.0)  # e^eps must not overflow, and delta never grows with eps

    def both(first: np.ndarray) -> np.ndarray:
        rest = (eps - first) - 2.0 * ROUNDOFF * np.abs(eps - first)
        removed, added = _upper_delta(question, first, "remove_one"), _upper_delta(question, rest, "add_one")
        size = np.abs(first)
        with np.errstate(over="ignore"):
            total = removed + np.exp(first + 4.0 * ROUNDOFF * size) * added * (1.0 + 16.0 * ROUNDOFF * (1.0 + size))
        return np.where(np.isnan(total), np.inf, total * (1.0 + 4.0 * ROUNDOFF))

    found = np.minimum(_least(both, 0.5 * eps, 0.5 * eps), 1.0)
    if np.any(0.5 * eps < LEAST_REACH):
        found = np.minimum(found, _least(both, 0.5 * eps, np.maximum(0.5 * eps, LEAST_REACH)))
    return _bound(found)


def epsilon_replaced(question: MechanismQuestion) -> Bounds:
    """Bound a replacement's epsilon from above, by the best split of delta found between removal and addition."""
    shape, _, given = flat(question)
    target = given.reshape(shape)
    if not target.all():
        _upper_epsilon(question, target, "remove_one")  # raises an error if the loss is unbounded

    def both(log_odds: np.ndarray) -> np.ndarray:
        share = 1.0 / (1.0 + np.exp(-log_odds))
        first = np.maximum(target * share, SMALLEST_POSITIVE)
        x = _upper_epsilon(question, first, "remove_one")
        with np.errstate(over="ignore", invalid="ignore"):
            left = (target - first) * (1.0 - 8.0 * ROUNDOFF) * np.exp(-x * (1.0 + 4.0 * ROUNDOFF))
        usable = (left > 1e-300) & np.isfinite(x)
        rest = _upper_epsilon(question, np.where(usable, left, 0.5), "add_one")
        return np.where(usable & ~np.isnan(rest), (x + rest) * (1.0 + 4.0 * ROUNDOFF), np.inf)

    return _bound(_least(both, np.zeros(shape), 12.0))  # log odds of the removal's share of delta, up to +-12


def _least(values: Callable[[np.ndarray], np.ndarray], middle: np.ndarray, reach: float | np.ndarray) -> np.ndarray:
    """Return the least of `values`, a function of stacked points, that a walk finds up to `reach` from `middle`."""
    # The walk starts at the best of three points, or of all points if all three are infinite for some element. It goes
    # downhill, and then tries two more points near its end.
    apart, column = reach / WALK, (-1, *(1,) * middle.ndim)
    for steps in (1, WALK):
        points = middle + apart * np.arange(-steps, steps + 1.0).reshape(column)
        found = values(points)
        best, place = found.min(axis=0), np.argmin(found, axis=0)[None]
        if not np.isinf(best).any():
            break
    at = np.take_along_axis(points, place, 0)[0]
    while True:
        point = np.clip(at + apart * np.sign(at - middle), middle - reach, middle + reach)
        found = values(point[None])[0] if np.any(point != at) else best
        better = found < best
        if not better.any():
            break
        best, at = np.where(better, found, best), np.where(better, point, at)
    points = np.clip(at + apart / 3.0 * np.array([-1.0, 1.0]).reshape(column), middle - reach, middle + reach)
    return np.minimum(best, values(points).min(axis=0))


def _bound(upper: np.ndarray) -> Bounds:
    status = np.where(upper == 0.0, "zero", np.where(np.isfinite(upper), "ok", "width"))
    return Bounds(np.zeros_like(upper), upper, upper, "bound", status, RemovedAndAdded.name)


class OneRound(MechanismEngine):
    """Answers for one round of random allocation of a Gaussian, in which each record gets one slot."""

    name, classes = "allocation", (RandomAllocation,)

    def supports(self, question: MechanismQuestion) -> bool:
        mechanism: Any = question.mechanism
        return (
            type(mechanism.mechanism) is Gaussian
            and bool(np.all(np.equal(mechanism.participations, 1.0) & np.equal(mechanism.group, 1.0)))
            and not mechanism.symmetric()  # where every record is in every slot, nothing is drawn
        )

    def bracket(self, question: MechanismQuestion) -> Bounds:
        from jaxacct.engines import allocation  # imported here, since it imports SciPy, which is slow

        mechanism: Any = question.mechanism
        relation, rtol = question.relation, question.effort.rtol
        if question.quantity == "epsilon" and np.any(np.equal(question.given, 0.0)):
            raise UnboundedLossError(np.equal(question.given, 0.0))
        mechanism.require_pair(relation, "for random allocation")
        shape, _, target = flat(question)
        sigma, slots = (
            np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1)
            for x in (mechanism.mechanism.noise_multiplier, mechanism.slots)
        )
        ways = directions(mechanism, relation)
        direction = ways[0] if len(ways) == 1 else None
        if question.quantity == "epsilon":
            worst = allocation.epsilon(sigma, slots, target, direction, rtol)
        else:
            worst = allocation.delta(sigma, slots, target, direction)
        return _as_bounds(worst, shape, rtol, OneRound.name)


class SameBins(MechanismEngine):
    """Answers for balls in bins that are not composed, which equal one round of random allocation with less noise."""

    name, classes = "same_bins", (BallsInBins, MatrixMechanism)

    def supports(self, question: MechanismQuestion) -> bool:
        mechanism: Any = question.mechanism
        return isinstance(mechanism.equivalent(), RandomAllocation) and not mechanism.symmetric()

    def bracket(self, question: MechanismQuestion) -> Bounds:
        mechanism: Any = question.mechanism
        # the round's noise multiplier is rounded down for the upper end and up for the lower end
        rounds = (question._replace(mechanism=mechanism.equivalent(below)) for below in (False, True))
        above, below = (OneRound().bracket(each) for each in rounds)
        low, high = np.minimum(below.lower, above.upper), above.upper
        return Bounds(low, np.clip(above.estimate, low, high), high, above.kind, above.status, above.engine)


class NeighbouringBins(MechanismEngine):
    """Answers for balls in bins whose neighbouring bins share noise, by contour integrals of a transfer operator."""

    name, classes = "banded_bins", (MatrixMechanism,)

    def supports(self, question: MechanismQuestion) -> bool:
        mechanism: Any = question.mechanism
        return isinstance(mechanism.equivalent(), SharedBins)

    def bracket(self, question: MechanismQuestion) -> Bounds:
        mechanism: Any = question.mechanism
        run = mechanism.equivalent()
        if question.quantity == "epsilon" and np.any(np.equal(question.given, 0.0)):
            raise UnboundedLossError(np.equal(question.given, 0.0))
        shape, _, given = flat(question)
        noise = np.broadcast_to(np.asarray(run.noise_multiplier, np.float64), shape).reshape(-1)
        signs = [1.0 if way == "remove" else -1.0 for way in directions(run, question.relation)]
        found = np.empty((3, noise.size))
        with waiting(noise.size) as work:
            for sigma in np.unique(noise):
                at, which = np.flatnonzero(noise == sigma), (run.strategy, run.bins, float(sigma))
                if question.quantity == "delta":
                    found[:, at] = delta_of_bins(*which, signs, given[at], 3e-3 * question.effort.rtol, 1e-250)
                    work.done += at.size
                    continue
                for row in at:
                    found[:, row] = epsilon_of_bins(*which, signs, given[row])
                    work.done += 1
        return _as_bounds(Answer(*found), shape, question.effort.rtol, NeighbouringBins.name)


def _as_bounds(
    ends: Answer, shape: tuple[int, ...], rtol: float, engine: str | np.ndarray, certified: bool = True
) -> Bounds:
    """Return flat ends as Bounds of `shape`. Lower ends are 0 unless `certified`."""
    status = np.where(is_open(ends, rtol), "width", "ok").astype("<U16")
    status[ends.upper == 0.0] = "zero"
    lower = ends.lower if certified else np.zeros(ends.upper.size)
    columns = (lower, ends.estimate, ends.upper, "certified" if certified else "bound", status, engine)
    return Bounds(*(column if isinstance(column, str) else column.reshape(shape) for column in columns))


class MixtureContour(MechanismEngine):
    """Answers for compositions of Gaussian mixtures and Gaussians, by contours, or else by finite dominating pairs."""

    name, classes, if_engine_is_named = "mixture_contour", (Mechanism,), "stands back"
    steps = (OfGaussianMixtures,)

    def supports(self, question: MechanismQuestion) -> bool:
        """Return whether all steps are Gaussians or mixtures, and some mixture is no plain or sampled Gaussian."""
        steps = single_steps(question.mechanism)
        of_mixtures = [step for step in steps if isinstance(step, OfGaussianMixtures)]
        if all(step.ordinary() for step in of_mixtures):
            return False
        others = all(isinstance(step, Gaussian | OfGaussianMixtures) for step in steps)
        return others and all(step.of_gaussians() for step in of_mixtures)

    def bracket(self, question: MechanismQuestion) -> Bounds:
        from jaxacct.engines import mixture  # imported here, since it imports SciPy, which is slow

        quantity, mechanism, relation, rtol = question[0], question.mechanism, question.relation, question.effort.rtol
        parts_of = question._replace(hint=None)
        branches = mixture.rows_of_branches(mechanism, relation)
        if branches is None:
            return by_parts(parts_of)
        shape, places, target = flat(question)
        answers = Answer(*np.full((3, target.size), np.nan))
        bar = Progress(target.size, None if target.size > 8 else False)
        with contextlib.closing(bar):
            place, most = -1, np.inf
            # in rising order, since neighbouring targets share contours, and `most` serves for larger eps
            for done, at in enumerate(np.lexsort((target, places)).tolist()):
                place, most = int(places[at]), (most if places[at] == place else np.inf)
                ends, most = _larger(quantity, branches[place], float(target[at]), relation, rtol, most)
                answers.lower[at], answers.estimate[at], answers.upper[at] = ends
                bar.update(done + 1)
        engine = np.full(target.size, self.name, dtype="<U32")
        certified = mechanism.kind_of_bracket(relation) == "certified"
        with np.errstate(invalid="ignore"):
            left = np.flatnonzero(~(answers.upper < np.inf) | is_open(answers, rtol))
        for at in left.tolist():  # one by one: a batch gets no answer if its lattice fails on one row
            one = take_rows(mechanism, places[[at]]) if batch_shape(mechanism) else mechanism
            asked = parts_of._replace(mechanism=one, given=float(target[at]))
            lower, upper, word = _by_parts(asked, certified)
            low = float(np.fmax(np.fmax(answers.lower[at], lower), 0.0))
            if upper < answers.upper[at] or np.isnan(answers.upper[at]):
                engine[at] = word
            high = float(np.fmin(answers.upper[at], upper))
            if not low <= high:  # the bracket from contours and that from pairs contradict each other: neither is used
                low, high, engine[at] = 0.0, (np.inf if quantity == "epsilon" else 1.0), "theorem"
            answers.lower[at], answers.upper[at] = low, high
            answers.estimate[at] = np.clip(np.fmin(answers.estimate[at], high), low, high)
        return _as_bounds(answers, shape, rtol, engine, certified)


def _by_parts(question: MechanismQuestion, certified: bool) -> tuple[float, float, str]:
    """Return (lower, upper, engine) from the pairs of one configuration. `lower` is -inf unless `certified`."""
    found = by_parts(question)
    lower, upper = (float(np.reshape(end, -1)[0]) for end in (found.lower, found.upper))
    word = str(np.reshape(found.engine, -1)[0])
    if not certified:
        return -np.inf, upper, word
    if np.reshape(found.status, -1)[0] == "width":
        # A lattice for the upper pair alone may lower the upper end. A lattice too long for MEMORY_ALONE would take
        # seconds, and could lower the upper end by at most the bracket's width.
        effort = question.effort._replace(memory_bytes=min(question.effort.memory_bytes, MEMORY_ALONE))
        alone = by_parts(question._replace(effort=effort), above_only=True)
        upper = float(np.fmin(upper, np.reshape(alone.upper, -1)[0]))
    return lower, upper, word


def _larger(
    quantity: str, row: Row | None, value: float, relation: str, rtol: float, most: float
) -> tuple[Ends, float]:
    """Return the larger of the directions' brackets, end by end, and a new `most`. The upper end may be inf.

    most : an upper bound of the second direction's delta at a smaller eps, and so at this eps, since delta falls with
        eps. The second direction is not evaluated if `most` is at most the first direction's lower end.
    """
    from jaxacct.engines import mixture

    if row is None or (quantity == "epsilon" and value == 0.0):
        return mixture.UNKNOWN, most  # then `by_parts` answers, or raises an error
    signs = {"add_one": (-1.0,), "remove_one": (1.0,)}.get(relation, (1.0, -1.0))  # 1 is remove, -1 is add
    known, found = mixture.contours_of(row), list[mixture.Ends]()
    for sign in signs:
        if quantity == "epsilon":
            found.append(mixture.one_epsilon(row, sign, value, rtol))
        elif not found or most > found[0][0]:
            found.append(mixture.one_delta(row, sign, value, known.setdefault(sign, {})))
            most = min(most, found[-1][2]) if len(found) == 2 else most
    low, mid, high = (float(x) for x in np.max(found, axis=0))
    return (low, mid, np.inf if np.isnan(mid) else high), most


for _engine in (Attacked, SampledOnce, RemovedAndAdded, OneRound, SameBins, NeighbouringBins, MixtureContour):
    register(_engine())
