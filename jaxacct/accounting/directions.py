"""The bracket of a mechanism's epsilons or deltas: each direction of the neighbouring relation is composed and answered
by itself, and the larger answer is taken at the end.

A mechanism whose pair is known from points alone has two pairs, one that dominates it and one that it dominates.  Each
is composed by itself: the upper end of the answer is that of the first, the lower end that of the second.

Which engine answers is decided in dispatch.py; `Bounds.engine` says which one did.
"""

from __future__ import annotations

from fractions import Fraction
from operator import itemgetter

import jax
import numpy as np

from jaxacct.accounting.dispatch import Side, ask_engines, is_open, kinds_of, some_rows, upper_by_moments
from jaxacct.accounting.pairs_above_and_below import (
    BETWEEN_PAIRS,
    OK_WIDTH,
    WIDE,
    delta_of_pairs,
    differing,
    epsilon_of_pairs,
    prepare_pairs,
    rows_with_rounds,
)
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.validation import UnboundedLossError, broadcast_shape
from jaxacct.engines.backend import job
from jaxacct.engines.contour import Answer, Hint
from jaxacct.engines.protocol import Effort, Question
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.mechanisms import Components, Mechanism, allocation_rounds, batch_shape, components, directions
from jaxacct.mechanisms.base import element

__all__ = ["worse_direction"]

LARGEST_SLACK = 1e-3
"""Engines are asked if the difference of delta and the mass at infinity has at most this relative uncertainty."""
BLOCK = 100_000
"""Rows answered together: 100,000 hold about 1 GiB while they are answered."""


@np.errstate(under="ignore")  # bounds allow for it; a user may have asked NumPy to raise
def worse_direction(
    quantity: str,
    mechanism: Mechanism,
    given: float | np.ndarray,
    relation: str,
    effort: Effort,
    engine: str,
    hint: Hint | None = None,
) -> Bounds:
    """The bracket of "epsilon" at given deltas, or of "delta" at given epsilons: the larger of the directions' answers.

    If the kind is not "certified", the lower end is set to 0.
    """
    mine = batch_shape(mechanism)
    shape = broadcast_shape({"the mechanism": mine, "delta" if quantity == "epsilon" else "epsilon": np.shape(given)})
    target = np.broadcast_to(np.asarray(given, np.float64), shape).reshape(-1)
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    kind = mechanism.kind_of_bracket(relation)
    with job(target.size):
        # the pairs that dominate the mechanism, then those that it dominates, where they are others and say something
        which = (False, True) if kind == "certified" and mechanism.has_bracket() else (False,)
        if mechanism.has_bracket():
            prepare_pairs(mechanism)
        pairs = [_sides(mechanism, relation, below) for below in which]
        if quantity == "epsilon" and not target.all():
            zeros = np.flatnonzero(target == 0)
            for above, parts in zip(pairs[0], pairs[-1], strict=True):
                _refuse_zero_delta(above.take(rows[zeros]), parts.take(rows[zeros]), zeros, shape)
        found = []
        for first in range(0, max(target.size, 1), BLOCK):
            block = slice(first, first + BLOCK)
            near = None if hint is None else jax.tree.map(itemgetter(block), hint)
            taken = [[parts.take(block if mine == shape else rows[block]) for parts in sides] for sides in pairs]
            if len(taken) == 1:
                found.append(_larger(quantity, taken[0], target[block], effort, engine, near))
            else:
                found.append(_larger_of_pairs(quantity, taken[0], taken[1], target[block], effort, engine, near))
        if len(pairs) > 1 and quantity == "epsilon" and engine != "contour":
            found = [_with_more_losses(mechanism, rows, _joined(found), target, relation, effort, engine)]
    worst, engines, contradicted = _joined(found)
    if quantity == "epsilon" and len(pairs) == 1:
        _near_infinity(mechanism, relation, pairs[0], rows, target, effort, engine, Side(worst, engines, contradicted))
    wanted = max(effort.rtol, OK_WIDTH[quantity]) if len(pairs) > 1 else effort.rtol
    status = np.where(is_open(worst, wanted), "width", "ok").astype("<U16")
    status[contradicted] = "contradiction"
    status[worst.upper == 0] = "zero"
    if quantity == "epsilon":
        status[worst.lower == np.inf] = "mass_at_infinity"
    if kind != "certified":
        worst = worst._replace(lower=np.zeros(target.shape))
    low, mid, high, status, engines = (x.reshape(shape) for x in (*worst, status, engines))
    return Bounds(low, mid, high, kind, status, engines)


def _near_infinity(
    mechanism: Mechanism,
    relation: str,
    sides: list[Components],
    rows: np.ndarray,
    target: np.ndarray,
    effort: Effort,
    engine: str,
    found: Side,
) -> None:
    """Repeat, with exact sums, rows whose delta is so near the mass at infinity that rounding decides; update found."""
    due = np.zeros(target.shape, bool)
    for parts in sides:
        infinite = parts.delta_infinity[rows]
        wrong = parts.infinity_units[rows] * ROUNDOFF * infinite + 4.0 * ROUNDOFF * target
        due |= (infinite > 0.0) & (target > 0.0) & (np.abs(target - infinite) * LARGEST_SLACK <= wrong)
    shape = batch_shape(mechanism)
    for row in np.flatnonzero(due):
        one = element(mechanism, np.unravel_index(rows[row], shape))
        masses = [one.infinity_exactly(side) for side in directions(mechanism, relation)]
        if (relation == "replace_one" and not one.symmetric()) or any(mass is None for mass in masses):
            continue
        left = [float(Fraction(target[row]) - mass) for mass in masses if mass is not None]
        some = [parts.take(rows[[row]]) for parts in sides]
        again = _larger("epsilon", some, target[[row]], effort, engine, None, left)
        for kept, new in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
            kept[row] = new[0]


def _sides(mechanism: Mechanism, relation: str, below: bool) -> list[Components]:
    return [components(mechanism, relation, side, below) for side in directions(mechanism, relation)]


def _joined(found: list[Side]) -> Side:
    """The answers of several blocks as one."""
    worst = Answer(*(np.concatenate(ends) for ends in zip(*(side.answer for side in found), strict=True)))
    engines, contradicted = (np.concatenate([getattr(side, name) for side in found]) for name in Side._fields[1:])
    return Side(worst, engines, contradicted)


def _with_more_losses(
    mechanism: Mechanism,
    rows: np.ndarray,
    found: Side,
    target: np.ndarray,
    relation: str,
    effort: Effort,
    engine: str,
) -> Side:
    """The answers for epsilon, where those that are wide have been asked again, with more losses of rounds inside.

    rows : (B,) the configuration of each answer.
    """
    worst, engines, contradicted = found
    wide, ended = is_open(worst, max(effort.rtol, WIDE)) & ~contradicted, np.isfinite(worst.upper)
    which: tuple[tuple[allocation_rounds.Losses, np.ndarray], ...] = ("dense", wide & ended), ("far", wide & ~ended)
    for losses, asked in which:
        some = rows_with_rounds(mechanism, rows[asked])
        if some is None:
            continue
        with allocation_rounds.with_losses(losses):
            prepare_pairs(some)
            above, below = (_sides(some, relation, lower) for lower in (False, True))
        again = _larger_of_pairs("epsilon", above, below, target[asked], effort, engine, None)
        first, kept = Answer(*(end[asked] for end in worst)), again.contradicted
        low = np.where(kept, first.lower, np.maximum(first.lower, again.answer.lower))
        high = np.where(kept, first.upper, np.minimum(first.upper, again.answer.upper))
        agree = low <= high  # of ends that contradict each other neither is used
        contradicted[asked] = ~agree
        low, high = np.where(agree, low, 0.0), np.where(agree, high, np.inf)
        worst.lower[asked], worst.upper[asked] = low, high
        with np.errstate(invalid="ignore"):
            middle = np.where(np.isfinite(high), low + BETWEEN_PAIRS * (high - low), high)
        worst.estimate[asked] = np.clip(middle, low, high)
    return Side(worst, engines, contradicted)


def _larger(
    quantity: str,
    sides: list[Components],
    given: np.ndarray,
    effort: Effort,
    engine: str,
    hint: Hint | None,
    left: list[float] | None = None,
) -> Side:
    """Answer the rows of one block.  Each end is the larger of the two directions' ends.

    left : for a single row, delta less the mass at infinity in each direction, if it is known exactly.
    """
    worst = Answer(*(np.full(given.shape, -np.inf) for _ in range(3)))
    engines: np.ndarray = np.full(given.shape, "", dtype="<U32")
    contradicted = np.zeros(given.shape, bool)
    first: Side | None = None
    for place, parts in enumerate(sides):
        if quantity == "epsilon":
            known = None if left is None else left[place]
            side = _one_epsilon(parts, given, worst.lower, effort, engine, hint, known)
        elif first is None:
            first = side = _one_delta(_removing(parts, given), given, worst.lower, effort, engine, hint)
        else:
            side = _other_delta((sides[0], parts), first, given, worst.lower, effort, engine)
        engines = np.where(side.answer.upper > worst.upper, side.engine, engines)
        worst = Answer(*(np.maximum(a, b) for a, b in zip(worst, side.answer, strict=True)))
        contradicted |= side.contradicted
    return Side(worst, engines, contradicted)


def _larger_of_pairs(
    quantity: str,
    above: list[Components],
    below: list[Components],
    given: np.ndarray,
    effort: Effort,
    engine: str,
    hint: Hint | None,
) -> Side:
    """`_larger` for mechanisms with two pairs: the upper end of the one that dominates, the lower end of the other.

    Both go through the lattice together; rows without an answer from there ask about each pair by itself.
    """
    low, high = np.full(given.shape, np.nan), np.full(given.shape, np.nan)
    engines = np.full(given.shape, "lattice", dtype="<U32")
    contradicted = np.zeros(given.shape, bool)
    if engine != "contour":
        rows = np.flatnonzero(differing(above, below) & (given > 0.0 if quantity == "epsilon" else True))
        low[rows] = high[rows] = 0.0
        for up, down in zip(above, below, strict=True) if rows.size else ():
            asked = up.take(rows), down.take(rows), given[rows]
            ends = (
                epsilon_of_pairs(*asked, high[rows], effort)
                if quantity == "epsilon"
                else delta_of_pairs(*asked, effort)
            )
            low[rows], high[rows] = np.maximum(low[rows], ends.lower), np.maximum(high[rows], ends.upper)
    rows = np.flatnonzero(np.isnan(low) | np.isnan(high))
    if rows.size:
        near = None if hint is None else jax.tree.map(itemgetter(rows), hint)
        one, other = (
            _larger(quantity, [parts.take(rows) for parts in sides], given[rows], effort, engine, near)
            for sides in (above, below)
        )
        low[rows], high[rows], engines[rows] = np.maximum(other.answer.lower, 0.0), one.answer.upper, one.engine
        contradicted[rows] = one.contradicted | other.contradicted
    agree = low <= high
    low, high = np.where(agree, low, 0.0), np.where(agree, high, np.inf if quantity == "epsilon" else 1.0)
    with np.errstate(invalid="ignore"):
        middle = np.where(np.isfinite(high), low + BETWEEN_PAIRS * (high - low), high)
    return Side(Answer(low, np.clip(middle, low, high), high), engines, contradicted | ~agree)


def _one_epsilon(
    parts: Components,
    target: np.ndarray,
    floor: np.ndarray,
    effort: Effort,
    engine: str,
    hint: Hint | None,
    left: float | None = None,
) -> Side:
    """Epsilon in one direction: what is left of delta beside the mass at infinity goes to the engines."""
    kinds, infinite = kinds_of(parts), parts.delta_infinity
    finite = target - infinite if left is None else np.full(target.shape, left)
    wrong = parts.infinity_units * ROUNDOFF * infinite if left is None else 0.0 * infinite
    with np.errstate(over="ignore"):
        slack = (4.0 * ROUNDOFF * (target if left is None else finite) + wrong) / np.maximum(finite, SMALLEST_POSITIVE)
    at_infinity = finite < -wrong
    live = (finite > 0) & (slack < LARGEST_SLACK)
    question = Question(parts, kinds, finite, slack, floor, effort, hint)
    side = ask_engines("epsilon", question, live & ~kinds.empty, engine)
    side = _least_of_guarantee("epsilon", question, live, side)
    low, mid, high = (np.maximum(end, 0.0) for end in side.answer)
    # what is left of delta is 0, or lost in the rounding of the mass at infinity
    edge = ~live & ~at_infinity
    largest, above = largest_loss(parts)
    unbounded = (parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1)
    exactly = (target == 0.0) if left is None else (finite == 0.0)
    rising = (parts.mu > 0) | (np.any(parts.gauss_n > 0, axis=1) & (parts.sign > 0))  # losses without an upper bound
    of_gaussians = np.where(rising & (left is not None), np.inf, 0.0)
    at_largest = np.where(unbounded, of_gaussians, np.maximum(2.0 * largest - above, 0.0))
    low = np.where(edge, np.where(exactly, at_largest, 0.0), low)
    sure = finite >= wrong  # delta is at least the mass at infinity; otherwise epsilon may be infinite
    mid, high = np.where(edge, np.where(unbounded | ~sure, np.inf, [largest, above]), [mid, high])
    known = (np.where(kinds.empty, 0.0, np.where(at_infinity, np.inf, end)) for end in (low, mid, high))
    return Side(Answer(*known), np.where(live, side.engine, "closed_form"), side.contradicted)


def _one_delta(
    parts: Components, eps: np.ndarray, floor: np.ndarray, effort: Effort, engine: str, hint: Hint | None = None
) -> Side:
    """Delta in one direction: that of the finite losses by the engines, and the mass at infinity."""
    kinds, infinite = kinds_of(parts), parts.delta_infinity
    question = Question(parts, kinds, eps, np.zeros(eps.shape), floor, effort, hint)
    side = ask_engines("delta", question, ~kinds.empty & (infinite < 1.0), engine)
    side = _least_of_guarantee("delta", question, infinite < 1.0, side)
    low, mid, high = (np.where(kinds.empty, 0.0, end) for end in side.answer)
    low, mid, high = np.clip(low, 0, 1) + infinite, mid + infinite, np.minimum(high, 1.0) + infinite
    wrong = parts.infinity_units * ROUNDOFF * infinite
    low = np.maximum(low - 4 * ROUNDOFF * low - wrong, 0.0)
    high = np.minimum(high + 4 * ROUNDOFF * high + wrong, 1.0)
    agree = low <= high
    low, high = np.where(agree, low, np.maximum(infinite - wrong, 0.0)), np.where(agree, high, 1.0)
    return Side(Answer(low, np.clip(mid, low, high), high), side.engine, side.contradicted | ~agree)


def _least_of_guarantee(quantity: str, question: Question, asked: np.ndarray, side: Side) -> Side:
    """The answer, lowered to the bound from the moments for rows that hold a zCDP guarantee."""
    rows = np.flatnonzero(asked & question.parts.guaranteed())
    if not rows.size:
        return side
    most = np.full(asked.shape, np.inf)
    most[rows] = upper_by_moments(quantity, some_rows(question, rows))
    engine = np.where(most < side.answer.upper, "theorem", side.engine)
    return Side(Answer(*(np.fmin(end, most) for end in side.answer)), engine, side.contradicted)


def _removing(parts: Components, eps: np.ndarray) -> Components:
    """The parts with the direction remove at eps = 0, where it has the same delta as add and the engines do better.

    `delta(0) = H_1(P || Q) = TV(P, Q)`, and TV is symmetric.  Sampled Gaussians and Laplace parts have the pair (Q, P)
    in the direction add where they have (P, Q) in the direction remove; finite parts are left alone.
    """
    symmetric = (eps == 0.0) & ~np.any(parts.finite_n > 0, axis=1) & (parts.delta_infinity == 0.0)
    return parts._replace(sign=np.where(symmetric, 1.0, parts.sign))


def _other_delta(
    both: tuple[Components, Components], first: Side, eps: np.ndarray, floor: np.ndarray, effort: Effort, engine: str
) -> Side:
    """Delta in the second of both directions; where it is the same question as the first, that answer is taken."""
    one, parts = (_removing(side, eps) for side in both)
    differs = [
        np.any((a != b).reshape(eps.size, int(np.prod(a.shape[1:]))), axis=1)
        if a.shape == b.shape  # laws made for one direction may have other numbers of atoms
        else np.ones(eps.size, bool)
        for a, b in zip(one, parts, strict=True)
    ]
    rows = np.flatnonzero(np.any(differs, axis=0))
    if rows.size == 0:
        return first
    found = _one_delta(parts.take(rows), eps[rows], floor[rows], effort, engine)
    if rows.size == eps.size:
        return found
    side = jax.tree.map(np.copy, first)
    for kept, new in zip(jax.tree.leaves(side), jax.tree.leaves(found), strict=True):
        kept[rows] = new
    return side


def _refuse_zero_delta(parts: Components, below: Components, rows: np.ndarray, shape: tuple[int, ...]) -> None:
    """delta = 0, as it is in these rows of the batch, is for mechanisms of bounded loss.

    Mass at infinity that the pair below has not stands for losses without a bound.
    """
    bad = (parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1) | (parts.delta_infinity > below.delta_infinity)
    if bad.any():
        raise UnboundedLossError(np.isin(np.arange(int(np.prod(shape))), rows[bad]).reshape(shape))
