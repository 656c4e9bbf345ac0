"""The contour engine on batches: a ladder of resolutions, each a compiled program for chunks of fixed size.

Every configuration starts on the lowest rung; those whose certificate is not narrow enough climb, in the end to the
split contour, which answers where few hits are expected.  What no rung certifies is left to the lattice engine.
Several deltas of one composition that are near each other may share a contour (`delta_about`, `delta_along`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.engines import quick_bounds
from jaxacct.engines.backend import evaluate
from jaxacct.engines.protocol import Answer
from jaxacct.kernels.contour import plain
from jaxacct.kernels.contour import split as split_contour
from jaxacct.kernels.contour.split import Placement, Start, no_placements
from jaxacct.kernels.law import LossLaw
from jaxacct.mechanisms.loss_components import Components

__all__ = ["delta_about", "delta_along"]


class Rung(NamedTuple):
    """A program of fixed size; a ladder has them in ascending order."""

    points: int  # of the quadrature in u
    nodes: int  # of the contour
    rounds: int  # placements of the contour
    chunk: int  # configurations per call of an optimised program
    split: bool = False  # whether it is the split contour
    tolerance: float = 0.0  # least tolerance of images and cut-off, which so few nodes can reach


TOLERANCE = 1e-8
"""Size of images and cut-off terms relative to delta, unless a call says otherwise."""
LEAST_DELTA = 1e-305
"""The least upper end of delta that is not 0."""
LOWEST_LOG_DELTA = -700.0
"""Logarithm of delta below which a lower end is 0: exp loses digits there."""
PLAIN_TRUST = 5.0
"""Trust in an estimate by a plain rung: it starts the split contour if the saddle point is within this factor."""
BOUND_OUTWARD = 1.0 + 1e-12
"""Factor for the rounding of the total variation and of the largest loss."""
DELTA_ROUNDS = 2
"""Placements of the split contour for delta: its windows depend on delta only loosely."""
LADDER = (
    Rung(64, 32, 1, 128),
    Rung(192, 64, 2, 32),
    Rung(512, 192, 3, 8),
    Rung(384, 128, 2, 16, split=True, tolerance=1e-7),
    Rung(576, 384, 2, 8, split=True, tolerance=1e-7),
    Rung(2560, 1024, 3, 1, split=True, tolerance=3e-6),
)
"""Rungs for compositions of Gaussians.
Points and nodes grow about threefold from rung to rung, as does the time; a chunk shrinks accordingly.
"""
LEAST_SPLIT_SIGMA = 0.06
"""Noise multiplier below which no split rung has been seen to certify; their programs would be compiled for nothing."""
PLAIN = (
    *LADDER[:3],
    Rung(1536, 512, 3, 2),
    Rung(2560, 1024, 3, 1),
    Rung(4096, 2048, 3, 1),
)
"""Rungs for compositions with Laplace or finite parts, which are not split."""


FIRST_SPLIT = sum(not rung.split for rung in LADDER)
"""Place of the first split rung of the ladder."""


def law(parts: Components, rows: np.ndarray | slice = slice(None)) -> LossLaw:
    """Some rows of the components as the kernels take them."""
    return LossLaw(*(getattr(parts, field)[rows] for field in LossLaw._fields))


class Reach(NamedTuple):
    """The configurations that the contour can answer, and bounds of their losses; every array (B,)."""

    answers: np.ndarray
    """Whether it can answer: there is a Gaussian part, and no Poisson sampled Laplace part."""
    splits: np.ndarray
    """Whether the split contour can: there are Gaussians alone, and at least one of them is sampled."""
    largest_loss: np.ndarray
    """`-sum n log(1 - q)`, which the loss of sampled Gaussians alone cannot exceed in the add direction; else inf."""


def reach(parts: Components) -> Reach:
    """The `Reach` of each configuration."""
    sampled, laplace = parts.gauss_n > 0, parts.laplace_n > 0
    some = np.any(sampled, axis=1)
    splits = some & ~(np.any(laplace, axis=1) | np.any(parts.finite_n > 0, axis=1))
    with np.errstate(divide="ignore"):
        most = -np.sum(np.where(sampled, parts.gauss_n * np.log1p(-parts.gauss_q), 0.0), axis=1)
    return Reach(
        answers=((parts.mu2 > 0) | some) & ~np.any(laplace & (parts.laplace_q < 1), axis=1),
        splits=splits,
        largest_loss=np.where((parts.sign < 0) & splits & (parts.mu2 == 0), most * BOUND_OUTWARD, np.inf),
    )


def may_split(parts: Components) -> np.ndarray:
    """(B,) whether the split rungs are worth trying."""
    # below such a sampling probability no split rung has been seen to certify: such losses are lost beside 1
    beyond = (parts.gauss_sigma < LEAST_SPLIT_SIGMA) | (parts.gauss_q < 1e-13)
    return reach(parts).splits & ~np.any((parts.gauss_n > 0) & beyond, axis=1)


def rung_for(needs: np.ndarray, ladder: tuple[Rung, ...] = PLAIN) -> np.ndarray:
    """The first rung that has the (points, nodes) a kernel asked for, the last one if none does; needs : (B, 2)."""
    fits = [np.all(needs <= (rung.points, rung.nodes), axis=1) for rung in ladder]
    return np.where(np.any(fits, axis=0), np.argmax(fits, axis=0), len(ladder) - 1)


class Hint(NamedTuple):
    """What a search already knows of the rows."""

    near: np.ndarray  # where epsilon, or the logarithm of delta, is expected; 0 where it is not known
    rung: np.ndarray  # of LADDER, to begin on
    placed: Placement  # places on that rung, if it is a split one
    usable: np.ndarray  # where there is one


def no_hint(size: int) -> Hint:
    """Nothing is known; arrays to be filled in."""
    return Hint(np.zeros(size), np.zeros(size, int), no_placements(size, 1), np.zeros(size, bool))


class _Question(NamedTuple):
    """The question for every configuration, and how its answers are judged."""

    parts: Components
    reach: Reach
    kernel: Callable[..., Any]
    split: Callable[..., Any]
    values: tuple[np.ndarray, ...]
    start: Start  # where the split contour begins; arrays that are filled in as more is known
    floor: np.ndarray  # an upper end at most this need not be refined
    width: float  # relative width of a bracket that is narrow enough
    in_logs: bool  # whether answers are logarithms, whose difference is the relative width
    log_tol: float
    ceiling: np.ndarray  # an upper bound known beforehand
    enough: np.ndarray  # an upper end that need not be lowered
    hint: Hint | None = None

    def ask(self, rung: Rung, rows: np.ndarray, known: Hint | None) -> list[np.ndarray]:
        """The answers of the kernel for some rows, on the placements that are known (of epsilon) or on new ones."""
        arguments: tuple[Any, ...] = (law(self.parts, rows), *(v[rows] for v in self.values))
        log_tol = np.full(rows.size, max(self.log_tol, np.log(rung.tolerance)) if rung.tolerance else self.log_tol)
        static = {"points": rung.points, "count": rung.nodes}
        if known is not None:
            kernel = split_contour.epsilon_placed
            arguments += (known.near[rows], jax.tree.map(lambda a: a[rows], known.placed))
        elif rung.split:
            kernel = self.split
            arguments += (Start(self.start.value[rows], self.start.trust[rows]), log_tol)
        else:
            kernel = self.kernel
            arguments += (log_tol,)
        if kernel in (plain.epsilon, split_contour.epsilon):
            static["rounds"] = rung.rounds
        if kernel is split_contour.delta:
            static["rounds"] = DELTA_ROUNDS
        return evaluate(kernel, arguments, rows.size, rung.chunk, **static)


def _climb(question: _Question) -> Answer:
    """Let every configuration climb the ladder that suits it, until it is answered or the ladder ends."""
    parts, hint, (answers, split, *_) = question.parts, question.hint, question.reach
    answer = Answer(np.full(parts.mu2.size, -np.inf), np.zeros(parts.mu2.size), question.ceiling.copy())
    settled = answer.upper <= question.enough
    near = may_split(parts)
    ladders = ((LADDER, near), (LADDER[:3], split & ~near), (PLAIN, answers & ~split))
    for ladder, rows in ladders:
        first = hint.rung if hint is not None and ladder is LADDER else 0
        due = np.where(rows & ~settled, first, len(ladder))
        for step, rung in enumerate(ladder):
            todo = np.flatnonzero(due == step)
            placed = np.zeros(todo.size, bool)
            if hint is not None and rung.split:
                placed = hint.usable[todo] & (hint.rung[todo] == step)
            for some, known in ((todo[~placed], None), (todo[placed], hint)):
                if some.size:
                    due[some] = _step(question, ladder, step, some, known, answer)
    return answer._replace(estimate=np.clip(answer.estimate, answer.lower, answer.upper))


def _step(
    question: _Question, ladder: tuple[Rung, ...], step: int, rows: np.ndarray, known: Hint | None, answer: Answer
) -> np.ndarray:
    """Try some rows on one rung; returns the rung that each goes to next, the ladder's length where it is done."""
    lower, estimate, upper = answer
    rung = ladder[step]
    low, mid, high, ok, needs = question.ask(rung, rows, known)
    ok &= np.isfinite(low) & np.isfinite(high)
    low, high = np.where(ok, low, -np.inf), np.where(np.isnan(high), np.inf, high)
    better = ok & (high - low < upper[rows] - lower[rows])
    estimate[rows] = np.where(better, mid, estimate[rows])
    trust = np.where(ok, np.inf, split_contour.BELIEVED) if rung.split else np.full(mid.size, PLAIN_TRUST)
    found, start = np.isfinite(mid), question.start
    start.value[rows], start.trust[rows] = (
        np.where(found, new, old[rows]) for new, old in ((mid, start.value), (trust, start.trust))
    )
    lower[rows], upper[rows] = np.maximum(low, lower[rows]), np.minimum(high, upper[rows])
    narrow = high - low <= (question.width if question.in_logs else question.width * np.abs(high))
    done = (ok & narrow) | (upper[rows] <= question.enough[rows])
    # the certificate says how fine a plain rung it wants; climb to that one, or to the first split one
    wanted = np.maximum(rung_for(needs, ladder), step + 1)
    first_split = sum(not each.split for each in ladder)
    wanted = np.minimum(wanted, max(first_split, step + 1))
    # against a floor a coarse bracket often suffices: try every rung on the way
    wanted = np.where(np.isfinite(question.floor[rows]), step + 1, wanted)
    return np.where(done, len(ladder), wanted)


def epsilon(
    parts: Components,
    delta: np.ndarray,
    slack: np.ndarray,
    floor: np.ndarray,
    width: float,
    tolerance: float = TOLERANCE,
    hint: Hint | None = None,
) -> Answer:
    """Bracket of `inf {eps : delta_fin(eps) <= delta}`, before clipping at 0, for delta known up to a slack.

    Rungs are climbed until the relative width is reached; where the upper end is at most `floor` (what the other
    direction already needs) it is not refined.
    """
    near = np.zeros(delta.size)
    if hint is not None:
        near, hint = hint.near.copy(), hint._replace(rung=np.where(np.isfinite(floor), 0, hint.rung))
    values = (np.log(delta) + np.log1p(-slack), np.log(delta) + np.log1p(slack))
    known = reach(parts)
    question = _Question(
        parts,
        known,
        plain.epsilon,
        split_contour.epsilon,
        values,
        Start(near, np.where(near > 0, np.inf, 0.0)),
        floor,
        width,
        in_logs=False,
        log_tol=float(np.log(tolerance)),
        ceiling=np.where(_total_variation(parts, known) <= delta * (1.0 - slack), 0.0, known.largest_loss),
        enough=np.maximum(floor, 0.0),
        hint=hint,
    )
    return _climb(question)


def delta(
    parts: Components,
    epsilon: np.ndarray,
    floor: np.ndarray,
    width: float,
    tolerance: float = TOLERANCE,
    hint: Hint | None = None,
) -> Answer:
    """Bracket of the finite part of delta(eps), not refined where it is at most `floor`; a hint is used in part."""
    with np.errstate(divide="ignore"):
        logs = np.log(floor)
    near = np.zeros_like(epsilon)
    if hint is not None:
        near, rung = hint.near.copy(), np.where(np.isfinite(logs), 0, hint.rung)
        hint = hint._replace(rung=rung, usable=np.zeros(epsilon.size, bool))
    known = reach(parts)
    question = _Question(
        parts,
        known,
        plain.delta,
        split_contour.delta,
        (epsilon,),
        Start(near, np.where(near < 0, np.inf, 0.0)),
        logs,
        width,
        in_logs=True,
        log_tol=float(np.log(tolerance)),
        ceiling=np.where(epsilon > known.largest_loss, -np.inf, np.inf),
        enough=logs,
        hint=hint,
    )
    lower, middle, upper = _climb(question)
    ends = (np.exp(np.minimum(x, 0.0)) for x in (np.where(lower > LOWEST_LOG_DELTA, lower, -np.inf), middle, upper))
    low, mid, high = ends
    return Answer(low, mid, np.where(upper > -np.inf, np.maximum(high, LEAST_DELTA), 0.0))


def _total_variation(parts: Components, known: Reach) -> np.ndarray:
    """`sum n q (2 Phi(1/(2 sigma)) - 1)`, at least delta(0) of sampled Gaussians alone; inf with other parts."""
    each = np.vectorize(math.erf, otypes=[float])(8.0**-0.5 / parts.gauss_sigma)
    most = np.sum(np.where(parts.gauss_n > 0, parts.gauss_n * parts.gauss_q * each, 0.0), axis=1)
    return np.where(known.splits & (parts.mu2 == 0), most * BOUND_OUTWARD, np.inf)


def delta_about(parts: Components, epsilon: np.ndarray, floor: np.ndarray, width: float, tolerance: float) -> Answer:
    """Brackets of the finite part of delta, from one contour a row; [0, 1] if nothing is known.  Arrays are (B, K).

    epsilon : at least 0; those of a row should be within about a deviation of the loss.
    floor : an upper end at most this is not refined.
    width : relative width at which a bracket is narrow enough.
    tolerance : size of images and cut-off terms relative to delta.
    """
    middle = 0.5 * (np.min(epsilon, axis=1) + np.max(epsilon, axis=1))
    both = np.ones(epsilon.shape, bool)
    rung, widths = np.zeros(middle.size, int), np.full(epsilon.shape, width)
    return _climb_together(plain.delta_about, parts, middle, epsilon, floor, widths, both, tolerance, rung)


def delta_along(
    parts: Components,
    place: np.ndarray,
    epsilon: np.ndarray,
    floor: np.ndarray,
    width: np.ndarray,
    both: np.ndarray,
    tolerance: float,
    rung: np.ndarray,
) -> Answer:
    """Brackets of the finite part of delta at many rising eps of a row, from one contour placed for `place`.

    An eps may be several deviations of the loss from `place`, but far away the images leave no lower end.

    place : (B,), the eps for which the contour is placed.  width : (B, K).
    both : (B, K), whether the lower end is wanted; else the upper end need only be near the estimate.
    rung : (B,), on which each row begins; it is changed to the last one that was used.
    """
    return _climb_together(plain.delta_along, parts, place, epsilon, floor, width, both, tolerance, rung)


def _climb_together(
    kernel: Callable[..., Any],
    parts: Components,
    middle: np.ndarray,
    epsilon: np.ndarray,
    floor: np.ndarray,
    width: np.ndarray,
    both: np.ndarray,
    tolerance: float,
    last: np.ndarray,
) -> Answer:
    along = kernel is plain.delta_along
    # rungs for many eps: on finer ones a contour takes as long as the ladder does for each eps
    rungs = PLAIN[:5] if along else LADDER
    splits = may_split(parts)
    answer = Answer(np.zeros(epsilon.shape), np.full(epsilon.shape, np.nan), np.ones(epsilon.shape))
    answer.upper[epsilon > reach(parts).largest_loss[:, None]] = 0.0
    due = np.where(np.all(answer.upper <= floor, axis=1), len(rungs), last)
    for step, rung in enumerate(rungs):
        rows = np.flatnonzero(due == step)
        if not rows.size:
            continue
        last[rows] = step
        log_tol = np.full(rows.size, np.log(max(tolerance, rung.tolerance)))
        static, unknown = {"points": rung.points, "count": rung.nodes}, np.zeros(rows.size)
        more: tuple[Any, ...] = (log_tol,)
        if rung.split:
            ask, more = split_contour.delta_about, (split_contour.Start(unknown, unknown), log_tol)
            static["rounds"] = DELTA_ROUNDS
        else:
            ask = kernel
        arguments = (law(parts, rows), middle[rows], epsilon[rows], *more)
        found = evaluate(ask, arguments, rows.size, rung.chunk, **static)
        low, high = _from_logs(found[0], found[2], found[3] & (np.isfinite(found[0]) | ~both[rows]))
        low, high = (_all_agreed if along else _agreed)(parts.take(rows), epsilon[rows], low, high)
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
        if along:  # where the rung has all that is needed, and where none has, no other one would do better
            enough = np.all(needs <= (rung.points, rung.nodes), axis=1)
            beyond = np.any(needs > (rungs[-1].points, rungs[-1].nodes), axis=1)
            next_one = np.where(enough | beyond, len(rungs), next_one)
        else:
            next_one = np.minimum(next_one, max(FIRST_SPLIT, step + 1))
            next_one = np.where((next_one >= FIRST_SPLIT) & ~splits[rows], len(rungs), next_one)
        due[rows] = np.where(np.all(done, axis=1), len(rungs), next_one)
    middle_of = np.where(np.isnan(answer.estimate), answer.upper, answer.estimate)
    return answer._replace(estimate=np.clip(middle_of, answer.lower, answer.upper))


def _from_logs(low: np.ndarray, high: np.ndarray, ok: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of delta from the ends of its logarithm; 0 and 1 if there are none."""
    known = ok & np.isfinite(high) & (low < np.inf)
    lower = np.where(known & (low > LOWEST_LOG_DELTA), np.exp(np.minimum(low, 0.0)), 0.0)
    upper = np.where(known, np.maximum(np.exp(np.minimum(high, 0.0)), LEAST_DELTA), 1.0)
    return lower, upper


def _agreed(parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends where no quick theorem contradicts them, else 0 and 1."""
    each = parts.take(np.repeat(np.arange(len(epsilon)), epsilon.shape[1]))
    holds = _holds(each, *(x.reshape(-1) for x in (epsilon, low, high))).reshape(low.shape)
    return np.where(holds, low, 0.0), np.where(holds, high, 1.0)


def _all_agreed(
    parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ends of rows where no quick theorem contradicts the first, the middle or the last eps, else 0 and 1."""
    holds = np.ones(epsilon.shape[0], bool)
    for column in (0, epsilon.shape[1] // 2, -1):
        holds &= _holds(parts, epsilon[:, column], low[:, column], high[:, column])
    return np.where(holds[:, None], low, 0.0), np.where(holds[:, None], high, 1.0)


def _holds(parts: Components, epsilon: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Whether no quick theorem contradicts the ends."""
    least, most = quick_bounds.limits("delta", parts, epsilon, np.zeros(epsilon.size))
    return (low <= most) & (high >= least)
