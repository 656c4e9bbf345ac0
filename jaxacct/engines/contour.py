"""The contour engine for batches: it climbs a ladder of resolutions, the rungs, until a bracket is narrow enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import quick_bounds
from jaxacct.engines.backend import evaluate
from jaxacct.engines.protocol import Answer, Engine, Question
from jaxacct.kernels.contour import plain
from jaxacct.kernels.contour import split as split_contour
from jaxacct.kernels.contour.split import Start
from jaxacct.kernels.law import LossLaw
from jaxacct.mechanisms.loss_components import Components


class Rung(NamedTuple):
    """One resolution: the sizes of one compiled program. A ladder is a tuple of rungs, from coarse to fine."""

    points: int  # quadrature points in u = output/sigma
    nodes: int  # nodes of the contour
    rounds: int  # number of times that the contour is placed
    chunk: int  # configurations per call of the compiled program
    split: bool = False  # whether the rung is for the split contour
    tolerance: float = 0.0  # least size of aliases and cut-off terms, relative to delta, that the nodes allow


TOLERANCE = 1e-8
"""Default limit on the aliases of a contour and on the terms that it cuts off, relative to delta."""
ROUNDING = 600.0 * ROUNDOFF
"""Rounding makes a bracket of log delta about n * ROUNDING wide in n steps, so refining may end at that width."""
LEAST_DELTA = 1e-305
"""An upper bound of delta that is not 0 is raised to at least this value, because exp underflows a little below it."""
LOWEST_LOG_DELTA = -700.0
"""If a lower bound of log delta is at most this, the lower bound of delta is 0, because exp would lose digits."""
DELTA_ROUNDS = 2
"""Number of placements of the split contour for delta. Two suffice, since the best place hardly depends on delta."""
LADDER = (
    Rung(64, 32, 1, 128),
    Rung(192, 64, 2, 32),
    Rung(512, 192, 3, 8),
    Rung(384, 128, 2, 16, split=True, tolerance=1e-7),
    Rung(576, 384, 2, 8, split=True, tolerance=1e-7),
    Rung(2560, 1024, 3, 1, split=True, tolerance=3e-6),
)
"""Rungs for compositions of Gaussians: three of the plain contour, then three of the split contour."""

PLAIN = (*LADDER[:3], Rung(1536, 512, 3, 2), Rung(2560, 1024, 3, 1), Rung(4096, 2048, 3, 1))
"""Rungs of the plain contour alone. The split contour cannot answer for Laplace or finite parts."""


FIRST_SPLIT = sum(not rung.split for rung in LADDER)
"""Index in LADDER of the first rung of the split contour."""


def law(parts: Components, rows: np.ndarray | slice = slice(None)) -> LossLaw:
    """Return the given rows of the components, in the form that kernels take."""
    return LossLaw(*(getattr(parts, field)[rows] for field in LossLaw._fields))


class Reach(NamedTuple):
    """Masks of the configurations that the contour engine can bracket, and upper bounds of their losses, each (B,)."""

    answers: np.ndarray  # where the contour can be used: there is a Gaussian part and no Poisson sampled Laplace part
    splits: np.ndarray  # where the split contour can be used: all parts are Gaussians, and at least one is sampled
    certifies_split: np.ndarray  # `splits`, except sigma < .06 or q < 1e-13, where no split bracket was ever certified
    largest_loss: np.ndarray  # upper bound: `-sum n log(1 - q)` if all parts are sampled Gaussians under add, else inf


def reach(parts: Components) -> Reach:
    sampled, laplace = parts.gauss_n > 0, parts.laplace_n > 0
    some = np.any(sampled, axis=1)
    splits = some & ~(np.any(laplace, axis=1) | np.any(parts.finite_n > 0, axis=1))
    with np.errstate(divide="ignore"):
        most = -np.sum(np.where(sampled, parts.gauss_n * np.log1p(-parts.gauss_q), 0.0), axis=1)
    return Reach(
        answers=((parts.mu2 > 0) | some) & ~np.any(laplace & (parts.laplace_q < 1), axis=1),
        splits=splits,
        certifies_split=splits & ~np.any(sampled & ((parts.gauss_sigma < 0.06) | (parts.gauss_q < 1e-13)), axis=1),
        # 1 + 1e-12 covers the rounding errors of `most`
        largest_loss=np.where((parts.sign < 0) & splits & (parts.mu2 == 0), most * (1.0 + 1e-12), np.inf),
    )


def rung_for(needs: np.ndarray, ladder: tuple[Rung, ...] = PLAIN) -> np.ndarray:
    """Return indices (B,) of rungs: the first with at least the points and nodes in `needs`, (B, 2), else the last."""
    fits = [np.all(needs <= (rung.points, rung.nodes), axis=1) for rung in ladder]
    return np.where(np.any(fits, axis=0), np.argmax(fits, axis=0), len(ladder) - 1)


class Hint(NamedTuple):
    """What a search already knows about each row."""

    near: np.ndarray  # the expected answer (epsilon, or log delta); 0 where it is not known
    rung: np.ndarray  # index of the first rung of LADDER to try


def no_hint(size: int) -> Hint:
    return Hint(np.zeros(size), np.zeros(size, int))


class Contour(Engine):
    """The engine for compositions with a Gaussian part. It integrates the characteristic function along a contour."""

    name = "contour"
    cost = 2e-3
    refusal = "engine = 'contour' needs a Gaussian part and no Poisson sampled Laplace; use engine='auto' or 'lattice'"

    def epsilon(self, question: Question) -> Answer:
        parts, delta, slack, floor = question.parts, question.target, question.slack, question.floor
        values = (np.log(delta) + np.log1p(-slack), np.log(delta) + np.log1p(slack))
        known = reach(parts)
        found = _climb("epsilon", question, known, values, floor, known.largest_loss, np.maximum(floor, 0.0))
        return Answer(*(np.maximum(end, 0.0) for end in found))  # kernels may return negative ends, but epsilon is >= 0

    def delta(self, question: Question) -> Answer:
        epsilon, known = question.target, reach(question.parts)
        floor = np.maximum(question.floor - question.parts.delta_infinity, 0.0) * (1 - 8 * ROUNDOFF)
        with np.errstate(divide="ignore"):
            floor = np.log(floor)
        ceiling = np.where(epsilon > known.largest_loss, -np.inf, np.inf)
        lower, middle, upper = _climb("delta", question, known, (epsilon,), floor, ceiling, floor)
        lower = np.where(lower > LOWEST_LOG_DELTA, lower, -np.inf)
        low, mid, high = (np.exp(np.minimum(x, 0.0)) for x in (lower, middle, upper))
        return Answer(low, mid, np.where(upper > -np.inf, np.maximum(high, LEAST_DELTA), 0.0))


def _climb(
    quantity: str,
    question: Question,
    known: Reach,
    values: tuple[np.ndarray, ...],  # (eps,), or (lower, upper) bounds of the given log delta
    floor: np.ndarray,  # a known lower bound of the largest answer of all directions, or -inf
    ceiling: np.ndarray,  # a known upper bound of the answer
    enough: np.ndarray,  # a row is finished once its upper bound is at most this
) -> Answer:
    """Return brackets of epsilon (the ends may be negative), or of log delta without the mass at infinity."""
    parts, hint, size = question.parts, question.hint, question.target.size
    rtol = question.effort.rtol
    # a bracket is refined to the relative width `width`; `tolerance` is the size of cut-off terms, relative to delta
    width, tolerance = rtol, 0.04 * rtol
    if not question.effort.in_search:  # a final answer gets a narrower bracket than `rtol`, at little cost
        width, tolerance = 0.5 * min(rtol, max(1e-6, 0.01 * rtol)), TOLERANCE
    rounding = ROUNDING * np.sum(parts.gauss_n, axis=1)  # no rung has less rounding
    width = np.clip(rounding, width, rtol)
    near, first = np.zeros(size), np.zeros(size, int)
    if hint is not None:
        near, first = hint.near.copy(), np.where(np.isfinite(floor), 0, hint.rung)
    # The split contour is first placed for the value in `start`. Every rung puts its own estimate there.
    start = Start(near, np.where(near > 0.0 if quantity == "epsilon" else near < 0.0, np.inf, 0.0))
    lower, estimate, upper = np.full(size, -np.inf), np.zeros(size), ceiling.copy()
    settled = upper <= enough
    ladders = (
        (LADDER, known.certifies_split),
        (LADDER[:FIRST_SPLIT], known.splits & ~known.certifies_split),
        (PLAIN, known.answers & ~known.splits),
    )
    for ladder, suited in ladders:
        due = np.where(suited & ~settled, first if ladder is LADDER else 0, len(ladder))
        first_split = sum(not rung.split for rung in ladder)
        for step, rung in enumerate(ladder):
            rows = np.flatnonzero(due == step)
            if not rows.size:
                continue
            arguments: tuple[Any, ...] = (law(parts, rows), *(value[rows] for value in values))
            static = {"points": rung.points, "count": rung.nodes}
            if rung.split:
                arguments += (Start(start.value[rows], start.trust[rows]),)
                static["rounds"] = rung.rounds if quantity == "epsilon" else DELTA_ROUNDS
            elif quantity == "epsilon":
                static["rounds"] = rung.rounds
            kernel = getattr(split_contour if rung.split else plain, quantity)
            log_tol = np.full(rows.size, np.log(max(tolerance, rung.tolerance)))
            found = evaluate(kernel, (*arguments, log_tol), rows.size, rung.chunk, **static)
            low, mid, high, ok, needs = found
            ok &= np.isfinite(low) & np.isfinite(high)
            low, high = np.where(ok, low, -np.inf), np.where(np.isnan(high), np.inf, high)
            better = ok & (high - low < upper[rows] - lower[rows])
            estimate[rows] = np.where(better, mid, estimate[rows])
            # A plain rung's estimate serves as start only if the saddle point approximation is within a factor 5.
            trust = np.where(ok, np.inf, split_contour.BELIEVED) if rung.split else np.full(mid.size, 5.0)
            for old, new in ((start.value, mid), (start.trust, trust)):
                old[rows] = np.where(np.isfinite(mid), new, old[rows])
            lower[rows], upper[rows] = np.maximum(low, lower[rows]), np.minimum(high, upper[rows])
            # for log delta, high - low is the relative width of delta's bracket, so it is compared with `width` itself
            scale = np.abs(high) if quantity == "epsilon" else 1.0
            # If a plain rung has enough points and nodes, rounding causes the width, and finer rungs round as much.
            fits = np.all(needs <= (rung.points, rung.nodes), axis=1) & ~np.bool_(rung.split)
            narrow = high - low <= np.where(fits, np.maximum(2.0 * rounding[rows], width[rows]), width[rows]) * scale
            done = (ok & narrow) | (upper[rows] <= enough[rows])
            # next: the first rung with as many points and nodes as needed, or the first split rung if it comes earlier
            wanted = np.maximum(rung_for(needs, ladder), step + 1)
            wanted = np.minimum(wanted, max(first_split, step + 1))
            # Rows with a floor try every rung, since a coarse bracket often shows that the answer is below the floor.
            wanted = np.where(np.isfinite(floor[rows]), step + 1, wanted)
            due[rows] = np.where(done, len(ladder), wanted)
    return Answer(lower, np.clip(estimate, lower, upper), upper)


def delta_about(parts: Components, epsilon: np.ndarray, floor: np.ndarray, width: float, tolerance: float) -> Answer:
    """Return brackets as `delta_along` does. A row's eps should span at most about a standard deviation of the loss."""
    middle = 0.5 * (np.min(epsilon, axis=1) + np.max(epsilon, axis=1))
    both, widths = np.ones(epsilon.shape, bool), np.full(epsilon.shape, width)
    return delta_along(parts, middle, epsilon, floor, widths, both, tolerance, along=False)


def delta_along(
    parts: Components,
    place: np.ndarray,  # (B,), the eps for which the contour is placed; far from it, aliases spoil the lower bound
    epsilon: np.ndarray,  # (B, K), at least 0 and ascending
    floor: np.ndarray,  # (B, K), a bracket whose upper bound is at most this is not refined
    width: np.ndarray,  # (B, K), relative width at which a bracket is narrow enough
    both: np.ndarray,  # (B, K), whether the lower bound is wanted
    tolerance: float,  # size of aliases and cut-off terms, relative to delta
    along: bool = True,  # False for `delta_about`, which also climbs to the split rungs
) -> Answer:
    """Bracket delta, less the mass at infinity, at each row's K eps by one contour; [0, 1] where the contour fails."""

    # For `along`, finer rungs are left out: on them, one contour for many eps takes as long as one contour per eps.
    rungs = PLAIN[:5] if along else LADDER
    answers_of = reach(parts)
    answer = Answer(np.zeros(epsilon.shape), np.full(epsilon.shape, np.nan), np.ones(epsilon.shape))
    answer.upper[epsilon > answers_of.largest_loss[:, None]] = 0.0
    due = np.where(np.all(answer.upper <= floor, axis=1), len(rungs), 0)
    for step, rung in enumerate(rungs):
        rows = np.flatnonzero(due == step)
        if not rows.size:
            continue
        log_tol = np.full(rows.size, np.log(max(tolerance, rung.tolerance)))
        static, unknown = {"points": rung.points, "count": rung.nodes}, np.zeros(rows.size)
        ask: Callable[..., Any] = plain.delta_along if along else plain.delta_about
        more: tuple[Any, ...] = (log_tol,)
        if rung.split:
            ask, more = split_contour.delta_about, (split_contour.Start(unknown, unknown), log_tol)
            static["rounds"] = DELTA_ROUNDS
        arguments = (law(parts, rows), place[rows], epsilon[rows], *more)
        found = evaluate(ask, arguments, rows.size, rung.chunk, **static)
        low, high = found[0], found[2]
        sound = found[3] & (np.isfinite(low) | ~both[rows]) & np.isfinite(high) & (low < np.inf)
        low = np.where(sound & (low > LOWEST_LOG_DELTA), np.exp(np.minimum(low, 0.0)), 0.0)
        high = np.where(sound, np.maximum(np.exp(np.minimum(high, 0.0)), LEAST_DELTA), 1.0)
        low, high = _agreed(parts.take(rows), epsilon[rows], low, high, each=not along)
        middle_of = np.exp(np.minimum(found[1], 0.0))
        better = high - low < answer.upper[rows] - answer.lower[rows]
        answer.estimate[rows] = np.where(better, middle_of, answer.estimate[rows])
        low, high = np.maximum(low, answer.lower[rows]), np.minimum(high, answer.upper[rows])
        agree = low <= high
        answer.lower[rows], answer.upper[rows] = np.where(agree, low, 0.0), np.where(agree, high, 1.0)
        below = np.where(both[rows], low, middle_of)
        done = agree & ((high - below <= width[rows] * high) | (high <= floor[rows]))
        needs = found[4].reshape(rows.size, 2)
        next_one = np.maximum(rung_for(needs, rungs), step + 1)
        if along:  # a finer rung helps only rows that lack points or nodes, and only if some rung has enough of both
            enough = np.all(needs <= (rung.points, rung.nodes), axis=1)
            beyond = np.any(needs > (rungs[-1].points, rungs[-1].nodes), axis=1)
            next_one = np.where(enough | beyond, len(rungs), next_one)
        else:
            next_one = np.minimum(next_one, max(FIRST_SPLIT, step + 1))
            next_one = np.where((next_one >= FIRST_SPLIT) & ~answers_of.certifies_split[rows], len(rungs), next_one)
        due[rows] = np.where(np.all(done, axis=1), len(rungs), next_one)
    middle_of = np.where(np.isnan(answer.estimate), answer.upper, answer.estimate)
    return answer._replace(estimate=np.clip(middle_of, answer.lower, answer.upper))


def _agreed(
    parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray, each: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Replace brackets that `quick_bounds` contradicts by [0, 1]. Unless `each`, three tests decide on a whole row."""
    columns = np.arange(epsilon.shape[1]) if each else np.array([0, epsilon.shape[1] // 2, -1])
    some = parts.take(np.repeat(np.arange(len(epsilon)), columns.size))
    at = epsilon[:, columns]
    least, most = quick_bounds.limits("delta", some, at.reshape(-1), np.zeros(at.size))
    holds = (low[:, columns].reshape(-1) <= most) & (high[:, columns].reshape(-1) >= least)
    holds = holds.reshape(at.shape)
    if not each:
        holds = np.all(holds, axis=1, keepdims=True)
    return np.where(holds, low, 0.0), np.where(holds, high, 1.0)
