"""Answers the public questions about epsilon and delta (jaxacct/README.md, "One question, step by step")."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from jaxacct.accounting.dispatch import Side, ask_engines, engine_of_mechanism, is_open, kinds_of
from jaxacct.core.bounds import Bounds, by_column, in_order
from jaxacct.core.floats import FAILURES, ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.progress import Progress
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    DELTA_OR_ZERO,
    GIBIBYTE,
    REAL,
    UnboundedLossError,
    check,
    options,
    refuse_tracers,
    with_hints,
)
from jaxacct.engines import quick_bounds
from jaxacct.engines.backend import job, on_cores
from jaxacct.engines.devices import double_precision
from jaxacct.engines.protocol import Answer, Effort, MechanismQuestion, Question
from jaxacct.mechanisms import (
    Components,
    Composed,
    Mechanism,
    Repeated,
    batch_shape,
    components,
    directions,
    random_allocation,
)
from jaxacct.mechanisms.base import element, on_batch, require_mechanism, take_rows
from jaxacct.mechanisms.random_allocation import rounds_inside

LARGEST_SLACK = 1e-3
"""Engines are asked only about rows where delta minus the mass at infinity has a relative rounding error below this."""
BLOCK = 100_000
"""Largest number of rows answered together. This many rows take about 1 GiB of memory."""
ROUNDS_TOGETHER = 20
"""Largest number of rounds of random allocation whose profiles one call computes."""
ROWS_TOGETHER = 256
"""Largest number of configurations whose theorems are evaluated together, to bound the memory."""
BETWEEN_PAIRS = 7.0 / 9.0
"""Position of the estimate in a bracket, from 0 at the lower pair's answer to 1 at the upper pair's. The chords of a
smooth profile f, known at points h apart, lie on average f'' h^2/12 above f (the upper pair). The extended chords lie
7 f'' h^2/24 below f (the lower pair). So f lies at (7/24)/(7/24 + 1/12)."""
OK_WIDTH = {"epsilon": 1e-3, "delta": 5e-2}
"""A bracket from two pairs has the status "ok" if its relative width is at most this, even if rtol is smaller."""
WIDE = 8e-4
"""A bracket of epsilon is computed again if its relative width exceeds both this and rtol. Then each round of random
allocation has a profile at more losses, or at larger losses if the upper end is infinite."""
REVERSED = {"add_one": "remove_one", "remove_one": "add_one"}
"""Each relation that is not symmetric, and the relation with the two data sets exchanged."""
_KERNEL = "jaxacct.kernels.contour"
"""The module that an error message proposes for use inside jit."""


@with_hints
def epsilon(
    mechanism: Mechanism,
    delta: ArrayLike,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
) -> Bounds:
    """Return the smallest epsilon >= 0 for which the mechanism is (epsilon, delta)-DP, as a certified bracket.

    `epsilon = inf {eps >= 0 : delta(eps) <= delta}`. Here `delta(eps)` is the largest of H_{e^eps}(P || Q) over the
    relation's directions, and H is the hockey-stick divergence of the composed dominating pair (P, Q). A privacy claim
    may use `upper`.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `delta` broadcast; the answer has their common shape.
    delta : array_like in [0, 1)
        0 is allowed where the privacy loss is bounded. The loss of Gaussian noise counts as unbounded.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    engine : {"auto", "contour", "lattice"}
    rtol : float in (0, 1)
        Wanted relative width (upper - lower)/upper. A wider bracket still holds, and its status is "width". Whatever
        rtol is, composed rounds of `RandomAllocation` and composed samples of several releases have the status "ok" up
        to a width of 1e-3 for epsilon and .05 for delta, and selections up to 2e-4.
    memory_bytes : int of 2**24 or more
        Limit on the lattice engine's memory.
    backend : {"auto", "numpy", "xla"}
        What evaluates the kernels: NumPy, or programs that XLA compiles and keeps (`jaxacct.cache_info`). On a CPU
        "auto" is NumPy for up to 40,000 configurations, or up to 1,500 after `jaxacct warm`, or up to 2,400 private
        selections. Both backends are certified; they agree to 1e-9 + rtol/10.

    Returns
    -------
    Bounds
        Discretisation, truncation, aliasing and rounding are inside the bracket. Its kind is "certified", or "bound"
        where the lower end is not claimed to be near the truth.

    Raises
    ------
    InputError
        Values are invalid, shapes do not broadcast, or an argument is a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10. jaxacct/kernels/README.md proves the engines' error bounds.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.Gaussian(2.0), 1e-5)
    >>> round(float(b.upper), 6), b.kind
    (1.993091, 'certified')
    """
    refuse_tracers("ja.epsilon", _KERNEL, mechanism=mechanism, delta=delta)
    given = options(relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes, backend=backend)
    mechanism = require_mechanism("mechanism", mechanism)
    at, effort = np.asarray(check("delta", delta, DELTA_OR_ZERO)), Effort(given.rtol, given.memory_bytes)
    question = MechanismQuestion("epsilon", mechanism, at, given.relation, effort, given.engine, attacks=True)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        found = answer(question)
    return _below_infinity(question, found) if np.any(found.status == "width") else found


@with_hints
def delta(
    mechanism: Mechanism,
    epsilon: ArrayLike,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
) -> Bounds:
    """Return the mechanism's privacy profile at one or many real eps, as a certified bracket.

    `delta(eps)` is the largest of H_{e^eps}(P || Q) over the relation's directions, and H is the hockey-stick
    divergence of the composed dominating pair (P, Q). The bracket's relative width is small in the far tail, too. At a
    negative eps = -x, delta follows from the reverse direction: `H_{e^-x}(P || Q) = 1 - e^-x + e^-x H_{e^x}(Q || P)`.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `epsilon` broadcast; the answer has their common shape.
    epsilon : array_like
    relation, engine, rtol, memory_bytes, backend
        As for `jaxacct.epsilon`.

    Returns
    -------
    Bounds
        As for `jaxacct.epsilon`. A privacy claim may use `upper`.

    Raises
    ------
    InputError
        Values are invalid, shapes do not broadcast, or an argument is a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10 and Lemma 45. jaxacct/kernels/README.md proves the engines' error bounds.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.RandomizedResponse(0.75), 0.5)
    >>> round(float(b.upper), 6)
    0.33782
    """
    refuse_tracers("ja.delta", _KERNEL, mechanism=mechanism, epsilon=epsilon)
    settings: dict[str, Any] = {"engine": engine, "rtol": rtol, "memory_bytes": memory_bytes, "backend": backend}
    return profile_at(mechanism, epsilon, attacks=True, relation=relation, **settings)


def profile_at(
    mechanism: Mechanism, epsilon: Any, *, attacks: bool = False, in_search: bool = False, **keywords: Any
) -> Bounds:
    """Answer as `delta` does. Without `attacks` some mechanisms have lower ends of 0. `Effort` explains `in_search`."""
    given = options(**keywords)
    mechanism = require_mechanism("mechanism", mechanism)
    epsilon = np.asarray(check("epsilon", epsilon, REAL))
    effort = Effort(given.rtol, given.memory_bytes, in_search)
    asked = MechanismQuestion("delta", mechanism, epsilon, given.relation, effort, given.engine, attacks=attacks)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        below = np.less(epsilon, 0.0)
        if not below.any():
            return answer(asked)
        asked = asked._replace(given=np.abs(epsilon))
        back = answer(asked._replace(relation=REVERSED.get(given.relation, given.relation)))
        ahead = answer(asked) if given.relation in REVERSED and not below.all() else back
        return _reflected(ahead, back, epsilon, given.rtol)


def _reflected(ahead: Bounds, back: Bounds, epsilon: float | np.ndarray, rtol: float) -> Bounds:
    """Return delta at real eps from profiles at |eps|; `back` is for the reverse relation (Zhu 2022, Lemma 45)."""
    below, scale, gap = np.less(epsilon, 0.0), np.exp(np.minimum(epsilon, 0.0)), -np.expm1(np.minimum(epsilon, 0.0))
    ends = []
    for name, turn in (("lower", -8.0 * ROUNDOFF), ("estimate", 0.0), ("upper", 8.0 * ROUNDOFF)):
        reflected = np.clip((gap + scale * getattr(back, name)) * (1.0 + turn), 0.0, 1.0)
        ends.append(np.where(below, reflected, getattr(ahead, name)))
    low, high = ends[0], ends[2]
    # for eps < 0 both ends grew by 1 - e^eps, so that a relative width above rtol may now be below it
    narrow = np.isin(back.status, ("ok", "zero")) | (np.equal(back.status, "width") & (high - low <= rtol * high))
    status = np.where(narrow, "ok", back.status)
    choose = lambda one, other: np.where(below, one, other)
    words = (choose(back.kind, ahead.kind), choose(status, ahead.status), choose(back.engine, ahead.engine))
    return Bounds(low, np.clip(ends[1], low, high), high, *words)


def effort_of_search(rtol: float) -> Effort:
    """Return the `Effort` of each evaluation in a search that ends within `rtol` of its target."""
    return Effort(0.25 * rtol, in_search=True)


def answer(question: MechanismQuestion) -> Bounds:
    """Return the bracket of the first engine that answers for the whole mechanism, or else that from its parts."""
    # Some engines answer for a step, but not for a composition. So a configuration that runs one step once is answered
    # as that step, unless an engine answers for the composition but not for the step.
    whole = engine_of_mechanism(question)
    step, once = question.mechanism, np.asarray(question.engine == "auto")
    while isinstance(step, Repeated | Composed) and len(step.inside()) == 1:
        once = once & np.equal(getattr(step, "steps", 1.0), 1.0)
        (step,) = step.inside()
    if step is not question.mechanism and once.any():
        shape, rows, given = flat(question)
        alone = question._replace(mechanism=step, given=given.reshape(shape))
        if whole is not None and (not isinstance(step, whole.classes) or engine_of_mechanism(alone) is None):
            return whole.bracket(question)
        if once.all():
            return answer(alone)
        # Configurations that run the step once are answered apart from the others. If a given delta is 0, all are
        # answered together, since `by_parts` may then raise an error that names rows of the whole batch.
        if engine_of_mechanism(alone) not in (None, whole) and (question.quantity == "delta" or given.all()):
            once, question = np.broadcast_to(once, shape).reshape(-1), question._replace(given=given)
            found = []
            for places in (np.flatnonzero(once), np.flatnonzero(~once)):
                some = _some(question, places)._replace(mechanism=take_rows(question.mechanism, rows[places]))
                found.append((places, answer(some)))
            return by_column(lambda column: column.reshape(shape), in_order(found))
    return by_parts(question) if whole is None else whole.bracket(question)


def flat(question: MechanismQuestion) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Return (shape of the answer, index of each flat row's configuration, each flat row's given delta or epsilon)."""
    return on_batch(question.mechanism, "delta" if question.quantity == "epsilon" else "epsilon", question.given)


@np.errstate(under="ignore")  # the bounds allow for underflow, so underflow must never raise an error
def by_parts(question: MechanismQuestion, above_only: bool = False) -> Bounds:
    """Return the larger of the two directions' answers; by the dominating pairs only (kind "bound") if `above_only`."""
    quantity, mechanism, relation, effort = question.quantity, question.mechanism, question.relation, question.effort
    shape, rows, target = flat(question)
    question = question._replace(given=target)
    kind = "bound" if above_only else mechanism.kind_of_bracket(relation)
    with job(target.size):
        two = mechanism.has_bracket() and not above_only
        # False: the pairs that dominate the mechanism. True: those that it dominates, if they can certify a lower end.
        which = (False, True) if kind == "certified" and two else (False,)
        if two:
            _prepare_pairs(mechanism)
        sides = directions(mechanism, relation)
        pairs = [[components(mechanism, relation, side, below) for side in sides] for below in which]
        if len(sides) == 2 and all(_alike(*pair) for pair in pairs):
            pairs = [pair[:1] for pair in pairs]
        if quantity == "epsilon" and not target.all():
            zeros = np.flatnonzero(target == 0)
            for above, parts in zip(pairs[0], pairs[-1], strict=True):
                _refuse_zero_delta(above.take(rows[zeros]), parts.take(rows[zeros]), zeros, shape)
        found, in_order = [], batch_shape(mechanism) == shape
        for first in range(0, max(target.size, 1), BLOCK):
            block = slice(first, first + BLOCK)
            taken = [[parts.take(block if in_order else rows[block]) for parts in pair] for pair in pairs]
            asked = _some(question, block)
            found.append(_larger(asked, taken[0]) if len(taken) == 1 else _larger_of_pairs(asked, *taken))
        joined = found[0] if len(found) == 1 else jax.tree.map(lambda *blocks: np.concatenate(blocks), *found)
        if len(pairs) > 1 and quantity == "epsilon" and question.engine != "contour":
            _with_more_losses(question, rows, joined)
    if quantity == "epsilon" and len(pairs) == 1:
        _near_infinity(question, pairs[0], rows, joined)
    wanted = max(effort.rtol, OK_WIDTH[quantity]) if len(pairs) > 1 else effort.rtol
    worst, engines, contradicted = joined
    del found, joined, pairs, taken  # .3 GiB for a million rows
    status = np.where(is_open(worst, wanted), "width", "ok").astype("<U16")
    status[contradicted] = "contradiction"
    status[worst.upper == 0] = "zero"
    if quantity == "epsilon":
        status[worst.lower == np.inf] = "mass_at_infinity"
    if kind != "certified":
        worst = worst._replace(lower=np.zeros(target.shape))
    low, mid, high, status, engines = (x.reshape(shape) for x in (*worst, status, engines))
    return Bounds(low, mid, high, kind, status, engines)


def _alike(one: Components, other: Components) -> bool:
    """Return whether the losses of two directions have the same law to the last bit. The order of atoms is ignored."""
    if one.gauss_n.size or one.laplace_n.size or one.finite_loss.shape != other.finite_loss.shape:
        return False  # the law of sampled noise depends on `sign`

    def ordered(parts: Components) -> list[np.ndarray]:
        order = np.lexsort((parts.finite_mass, parts.finite_loss), axis=-1)
        law = (np.take_along_axis(x, order, axis=-1) for x in (parts.finite_loss, parts.finite_mass))
        return [*law, *parts._replace(sign=parts.mu, finite_loss=parts.mu, finite_mass=parts.mu)]

    return all(np.array_equal(a, b) for a, b in zip(ordered(one), ordered(other), strict=True))


def _some(question: MechanismQuestion, rows: slice | np.ndarray) -> MechanismQuestion:
    hint = None if question.hint is None else jax.tree.map(itemgetter(rows), question.hint)
    floor = None if question.floor is None else question.floor[rows]
    return question._replace(given=question.given[rows], hint=hint, floor=floor)


def _near_infinity(question: MechanismQuestion, sides: list[Components], rows: np.ndarray, found: Side) -> None:
    """Where rounding spoils `delta - mass at infinity`, compute this difference exactly and answer the row again."""
    target, mechanism, relation = question.given, question.mechanism, question.relation
    due = np.zeros(target.shape, bool)
    for parts in sides:
        infinite = parts.delta_infinity[rows]
        wrong = parts.infinity_units[rows] * ROUNDOFF * infinite + 4.0 * ROUNDOFF * target
        due |= (infinite > 0.0) & (target > 0.0) & (np.abs(target - infinite) * LARGEST_SLACK <= wrong)
    for row in np.flatnonzero(due):
        one = element(mechanism, np.unravel_index(rows[row], batch_shape(mechanism)))
        left = [float(Fraction(target[row]) - mass) for mass in _masses_at_infinity(one, relation)]
        if not left:
            continue
        some = [parts.take(rows[[row]]) for parts in sides]
        again = _larger(question._replace(given=target[[row]], hint=None, floor=None), some, left)
        for kept, new in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
            kept[row] = new[0]


def _masses_at_infinity(mechanism: Mechanism, relation: str) -> list[Fraction]:
    """Return one configuration's exact mass at infinity in each direction, or [] if it is unknown in some direction."""
    if relation == "replace_one" and not mechanism.symmetric():
        return []
    masses = [mechanism.infinity_exactly(relation, side) for side in directions(mechanism, relation)]
    known = [mass for mass in masses if mass is not None]
    return known if len(known) == len(masses) else []


def _below_infinity(question: MechanismQuestion, found: Bounds) -> Bounds:
    """Return the answer with the status "mass_at_infinity" where delta is surely below the mass at infinity."""
    shape, rows, given = flat(question)
    lower, estimate, upper, status = (
        np.array(x).reshape(-1) for x in (found.lower, found.estimate, found.upper, found.status)
    )
    status, certified = status.astype("<U16"), np.reshape(np.broadcast_to(found.kind, shape), -1) == "certified"
    for row in np.flatnonzero((status == "width") & np.isinf(upper)):
        one = element(question.mechanism, np.unravel_index(rows[row], batch_shape(question.mechanism)))
        if max(_masses_at_infinity(one, question.relation), default=0) > Fraction(given[row]):
            status[row], estimate[row], lower[row] = "mass_at_infinity", np.inf, np.inf if certified[row] else 0.0
    low, mid, high, words = (x.reshape(shape) for x in (lower, estimate, upper, status))
    return Bounds(low, mid, high, found.kind, words, found.engine)


def _larger(question: MechanismQuestion, sides: list[Components], left: list[float] | None = None) -> Side:
    """Return the larger of the directions' answers, end by end. `left` has exact values of delta - mass at infinity."""
    given = question.given
    worst = Answer(*(np.full(given.shape, -np.inf) for _ in range(3)))
    engines: np.ndarray = np.full(given.shape, "", dtype="<U32")
    contradicted = np.zeros(given.shape, bool)
    # delta(0) is the total variation distance, the same in both directions. So rows with eps = 0 that have neither
    # finite parts nor mass at infinity are answered in the direction "remove" alone.
    same = np.full(given.shape, question.quantity == "delta") & (given == 0.0)
    for parts in sides:
        same &= ~np.any(parts.finite_n > 0, axis=1) & (parts.delta_infinity == 0.0)
    known = -np.inf if question.floor is None else question.floor
    for place, parts in enumerate(sides[:1] if same.all() else sides):
        asked = ~same | (place == 0)
        if question.quantity == "epsilon":
            side = _one_epsilon(question, parts, np.maximum(worst.lower, known), None if left is None else left[place])
        else:
            side = _one_delta(question, parts._replace(sign=np.where(same, 1.0, parts.sign)), worst.lower, asked)
            question = question._replace(hint=None)  # the hint is for the first direction
        engines = np.where(asked & (side.answer.upper > worst.upper), side.engine, engines)
        worst = Answer(*(np.where(asked, np.maximum(a, b), a) for a, b in zip(worst, side.answer, strict=True)))
        contradicted |= side.contradicted
    return Side(worst, engines, contradicted)


def _one_epsilon(question: MechanismQuestion, parts: Components, floor: np.ndarray, left: float | None) -> Side:
    """Return epsilon in one direction. The engines get delta minus the mass at infinity as their target."""
    kinds, infinite, target = kinds_of(parts), parts.delta_infinity, question.given
    finite = target - infinite if left is None else np.full(target.shape, left)
    wrong = parts.infinity_units * ROUNDOFF * infinite if left is None else 0.0 * infinite
    with np.errstate(over="ignore"):
        slack = (4.0 * ROUNDOFF * (target if left is None else finite) + wrong) / np.maximum(finite, SMALLEST_POSITIVE)
    at_infinity = finite < -wrong
    live = (finite > 0) & (slack < LARGEST_SLACK)
    asked = Question(parts, kinds, finite, slack, floor, question.effort, question.hint)
    side = ask_engines("epsilon", asked, live & ~kinds.empty, question.engine)

    low, mid, high = (np.maximum(end, 0.0) for end in side.answer)
    # No engine is asked about the rows `edge` (see LARGEST_SLACK). The largest loss bounds their epsilon.
    edge = ~live & ~at_infinity
    largest, above = quick_bounds.largest_loss(parts)
    unbounded = (parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1)
    exactly = (target == 0.0) if left is None else (finite == 0.0)
    # In the rows `rising` the losses have no upper bound. Losses of sampled Gaussians have one in the direction "add".
    rising = (parts.mu > 0) | (np.any(parts.gauss_n > 0, axis=1) & (parts.sign > 0))
    of_gaussians = np.where(rising & (left is not None), np.inf, 0.0)
    at_largest = np.where(unbounded, of_gaussians, np.fmax(2.0 * largest - above, 0.0))
    low = np.where(edge, np.where(exactly, at_largest, 0.0), low)
    sure = finite >= wrong  # delta is surely at least the mass at infinity
    mid, high = np.where(edge, np.where(unbounded | ~sure, np.inf, [largest, above]), [mid, high])
    known = (np.where(kinds.empty, 0.0, np.where(at_infinity, np.inf, end)) for end in (low, mid, high))
    return Side(Answer(*known), np.where(live, side.engine, "closed_form"), side.contradicted)


def _one_delta(question: MechanismQuestion, parts: Components, floor: np.ndarray, rows: np.ndarray) -> Side:
    """Return delta of `rows` in one direction: the engines' delta of the finite losses, plus the mass at infinity."""
    kinds, infinite, eps = kinds_of(parts), parts.delta_infinity, question.given
    asked = Question(parts, kinds, eps, np.zeros(eps.shape), floor, question.effort, question.hint)
    side = ask_engines("delta", asked, rows & ~kinds.empty & (infinite < 1.0), question.engine)

    low, mid, high = (np.where(kinds.empty, 0.0, end) for end in side.answer)
    (low, high), mid = with_infinite_mass(low, high, infinite, parts.infinity_units), mid + infinite
    wrong = parts.infinity_units * ROUNDOFF * infinite
    agree = low <= high
    low, high = np.where(agree, low, np.maximum(infinite - wrong, 0.0)), np.where(agree, high, 1.0)
    return Side(Answer(low, np.clip(mid, low, high), high), side.engine, side.contradicted | ~agree)


def with_infinite_mass(
    low: np.ndarray, high: np.ndarray, infinite: np.ndarray, units: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add the mass at infinity, whose relative error is `units` ROUNDOFF, to bounds of the delta of finite losses."""
    low, high = np.clip(low, 0, 1) + infinite, np.minimum(high, 1.0) + infinite
    wrong = units * ROUNDOFF * infinite
    return np.maximum(low - 4 * ROUNDOFF * low - wrong, 0.0), np.minimum(high + 4 * ROUNDOFF * high + wrong, 1.0)


def _refuse_zero_delta(parts: Components, below: Components, rows: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise UnboundedLossError if the loss is unbounded in one of `rows`, the rows of the flat batch with delta 0."""
    # Gaussian losses count as unbounded in both directions. Mass at infinity raises the error only where the upper pair
    # `parts` has more of it than the lower pair `below`: if both have the same positive mass, epsilon is infinite.
    bad = (parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1) | (parts.delta_infinity > below.delta_infinity)
    if bad.any():
        raise UnboundedLossError(np.isin(np.arange(int(np.prod(shape))), rows[bad]).reshape(shape))


def _prepare_pairs(mechanism: Mechanism) -> None:
    """Compute and keep the pairs of a mechanism's rounds of random allocation."""
    rounds = rounds_inside(mechanism)[: random_allocation.KEPT]
    blocks = [rounds[first : first + ROUNDS_TOGETHER] for first in range(0, len(rounds), ROUNDS_TOGETHER)]
    # one thread: the arrays are so short that two threads would wait for the interpreter
    for _ in on_cores(random_allocation.prepare, blocks, _bar(len(rounds)), [len(block) for block in blocks], 1):
        pass


def _bar(size: int) -> Progress:
    return Progress(size, None if size >= 16 else False)


def _with_more_losses(question: MechanismQuestion, rows: np.ndarray, found: Side) -> None:
    """Narrow the wide brackets of epsilon in `found`, in place, by profiles of random allocation at more losses."""
    worst, _, contradicted = found
    wide, ended = is_open(worst, max(question.effort.rtol, WIDE)) & ~contradicted, np.isfinite(worst.upper)
    with np.errstate(invalid="ignore"):
        # more losses hardly narrow a bracket wider than 3e-3, since they do not narrow the rounds' brackets of delta
        useful = wide & ended & (worst.upper - worst.lower <= 3e-3 * worst.upper)
    which: tuple[tuple[random_allocation.Losses, np.ndarray], ...] = ("dense", useful), ("far", wide & ~ended)
    for losses, asked in which:
        if not asked.any():
            continue
        some = take_rows(question.mechanism, rows[asked])
        if not rounds_inside(some):
            continue
        with random_allocation.with_losses(losses):
            _prepare_pairs(some)
            sides = directions(some, question.relation)
            above, below = ([components(some, question.relation, x, lower) for x in sides] for lower in (False, True))
        again = _larger_of_pairs(question._replace(given=question.given[asked], hint=None, floor=None), above, below)
        low, high = worst.lower[asked], worst.upper[asked]
        low = np.where(again.contradicted, low, np.maximum(low, again.answer.lower))
        high = np.where(again.contradicted, high, np.minimum(high, again.answer.upper))
        ends, agree = _between("epsilon", low, high)
        contradicted[asked] = ~agree
        for kept, end in zip(worst, ends, strict=True):
            kept[asked] = end


def _between(quantity: str, low: np.ndarray, high: np.ndarray) -> tuple[Answer, np.ndarray]:
    """Return (bracket from `low` to `high`, whether low <= high). Where low > high the bracket is the trivial one."""
    agree = low <= high
    low, high = np.where(agree, low, 0.0), np.where(agree, high, np.inf if quantity == "epsilon" else 1.0)
    with np.errstate(invalid="ignore"):
        middle = np.where(np.isfinite(high), low + BETWEEN_PAIRS * (high - low), high)
    return Answer(low, np.clip(middle, low, high), high), agree


def _larger_of_pairs(question: MechanismQuestion, above: list[Components], below: list[Components]) -> Side:
    """Return the larger of the directions' answers, end by end, for a mechanism between pairs `above` and `below`."""
    given, quantity = question.given, question.quantity
    low, high = np.full(given.shape, np.nan), np.full(given.shape, np.nan)
    engines = np.full(given.shape, "lattice", dtype="<U32")
    contradicted = np.zeros(given.shape, bool)
    if question.engine != "contour":
        lattices = ~np.all([kinds_of(parts).answered_by["closed_form"] for parts in (*above, *below)], axis=0)
        rows = np.flatnonzero(lattices & _differing(above, below) & (given > 0.0 if quantity == "epsilon" else True))
        low[rows] = high[rows] = 0.0
        for up, down in zip(above, below, strict=True) if rows.size else ():
            asked = up.take(rows), down.take(rows), given[rows]
            ends = (
                _epsilon_of_pairs(*asked, high[rows], question.effort)
                if quantity == "epsilon"
                else _delta_of_pairs(*asked, question.effort)
            )
            low[rows], high[rows] = np.maximum(low[rows], ends.lower), np.maximum(high[rows], ends.upper)
    rows = np.flatnonzero(np.isnan(low) | np.isnan(high))
    if rows.size:  # rows without a lattice's answer: the upper end comes from `above`, the lower end from `below`
        one, other = (_larger(_some(question, rows), [parts.take(rows) for parts in sides]) for sides in (above, below))
        low[rows], high[rows], engines[rows] = np.maximum(other.answer.lower, 0.0), one.answer.upper, one.engine
        contradicted[rows] = one.contradicted | other.contradicted
    ends, agree = _between(quantity, low, high)
    return Side(ends, engines, contradicted | ~agree)


def _differing(above: list[Components], below: list[Components]) -> np.ndarray:
    """Return whether the pairs differ in finite parts or mass at infinity, (B,). The noise differs by rounding only."""
    found = np.zeros(above[0].sign.size, bool)
    for one, other in zip(above, below, strict=True):
        for a, b in ((one.finite_loss, other.finite_loss), (one.finite_mass, other.finite_mass)):
            if a.shape != b.shape:
                found |= np.any(one.finite_n > 0, axis=1) | np.any(other.finite_n > 0, axis=1)
            else:
                found |= np.any(a != b, axis=tuple(range(1, a.ndim)))
        found |= one.log_survival != other.log_survival
    return found


def _epsilon_of_pairs(
    above: Components, below: Components, target: np.ndarray, ceiling: np.ndarray, effort: Effort
) -> Answer:
    """Return epsilon of a mechanism between two pairs, NaN if unanswered. An epsilon below `ceiling` is not refined."""
    from jaxacct.engines import lattice

    wrong, off = (pair.infinity_units * ROUNDOFF * pair.delta_infinity for pair in (above, below))
    least = (target - above.delta_infinity - wrong) * (1.0 - 4.0 * ROUNDOFF)
    most = (target - below.delta_infinity + off) * (1.0 + 4.0 * ROUNDOFF)
    ends = np.full((3, target.size), np.nan)
    more: dict[str, Any] = {"below": below, "rtol": effort.rtol, "memory_bytes": effort.memory_bytes}

    def asked(row: int) -> lattice.LatticeAnswer:
        try:
            with np.errstate(all="ignore"), double_precision():
                return lattice.epsilon(above, row, least[row], most[row], ceiling=ceiling[row], **more)
        except FAILURES:
            return lattice.NOTHING

    rows = np.flatnonzero(least > SMALLEST_POSITIVE).tolist()
    for place, found in on_cores(asked, rows, _bar(len(rows)), threads=1):
        if found.lower <= found.upper < np.inf:
            ends[:, rows[place]] = max(found.lower, 0.0), found.lower, found.upper
    for first in range(0, len(rows), ROWS_TOGETHER):
        some = np.array(rows[first : first + ROWS_TOGETHER])
        zero = np.zeros(some.size)
        low = quick_bounds.limits("epsilon", above.take(some), least[some], zero)[0]
        high = quick_bounds.limits("epsilon", below.take(some), most[some], zero)[1]
        ends[:, some[~((ends[2, some] >= low) & (ends[1, some] <= high))]] = np.nan
    return Answer(*ends)


def _delta_of_pairs(above: Components, below: Components, eps: np.ndarray, effort: Effort) -> Answer:
    """Return delta, with the mass at infinity, of a mechanism between two pairs; NaN in rows without an answer."""
    from jaxacct.engines import lattice

    ends = np.full((3, eps.size), np.nan)
    try:
        with np.errstate(all="ignore"), double_precision():
            more: dict[str, Any] = {"below": below, "rtol": effort.rtol, "memory_bytes": effort.memory_bytes}
            found = lattice.deltas(above, range(eps.size), eps, **more)
    except FAILURES:
        return Answer(*ends)
    zero = np.zeros(eps.size)
    least = quick_bounds.limits("delta", above, eps, zero)[0]
    most = quick_bounds.limits("delta", below, eps, zero)[1]
    for row, one in enumerate(found):
        if not (one.lower <= one.upper < np.inf and one.upper >= least[row] and one.lower <= most[row]):
            continue
        low = one.lower + below.delta_infinity[row] * (1.0 - (4.0 + below.infinity_units[row]) * ROUNDOFF)
        high = one.upper + above.delta_infinity[row] * (1.0 + (4.0 + above.infinity_units[row]) * ROUNDOFF)
        low, high = max(low * (1.0 - 4.0 * ROUNDOFF), 0.0), min(high * (1.0 + 4.0 * ROUNDOFF), 1.0)
        ends[:, row] = low, low, high
    return Answer(*ends)
