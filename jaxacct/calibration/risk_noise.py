"""The noise at which certified deltas meet targets, and the eps from which a true-positive rate is best seen."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import jax
import numpy as np

from jaxacct.accounting import account
from jaxacct.accounting.directions import by_parts
from jaxacct.calibration.dp_sgd_search import INFEASIBLE, started
from jaxacct.calibration.search import AIM, CLAIMED, Found, Search, Start, certified_search
from jaxacct.calibration.starting_points import NEARLY, PLAIN_FOR_DELTA, TOLERANCE, Goal, calibration_start, room
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.backend import evaluate
from jaxacct.engines.contour import no_hint
from jaxacct.engines.protocol import MechanismQuestion
from jaxacct.kernels import calibration
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE, dp_sgd

__all__ = ["Solved", "Target", "by_contour", "noise_for", "noise_for_rate"]

ROUNDS = ((0.5, 5), (0.2, 3), (0.1, 3))
"""How the eps of a true-positive rate is looked for where few hits are expected, round by round.

The distance of the places of the profile that are compared, in deviations of the loss, and their number.
"""
ROUGH = 1e-4
"""rtol at which the noise is solved for in a round."""
ROUGH_DELTA = 1e-3
"""rtol of the deltas from which it is guessed; their estimates are better than that."""
LARGEST_MOVE = 2.0
"""Longest move of eps from the best of these places, over their distance."""
SETTLED = 0.01
"""Last step of the kernel in eps, times c, below which its eps is taken: the noise changes by the square of that."""
ATTEMPTS = ((0, 4, TOLERANCE), (0, 14, TOLERANCE), (1, 7, TOLERANCE), (2, 14, 1e-11))
"""Rungs, steps of the kernel on the contour integral, and what that may cut off by a first approximation of delta: more
steps, and less cut off, where the approximation has been poor."""
AGREES = 3e-4
"""Largest distance of the certified noise from that of a solve that was cut short, in the logarithm, if it is taken."""
CLOSE = 1e-4
"""Last step of the kernel in x below which its noise is taken; else it is solved for anew at that eps."""
FEW_NODES = 8.0
"""How many times its nodes an eps may need for what the first attempt left to be a good guess."""
CUT_SHORT = 25.0
"""Of how many times the nodes of the last rung an eps may need: what is cut off hardly moves it."""


class Target(NamedTuple):
    """`delta(epsilon) <= delta` is enough, row by row."""

    epsilon: np.ndarray
    delta: np.ndarray


class Solved(NamedTuple):
    """What the solve for eps and the noise together has found, row by row."""

    noise: np.ndarray
    slope: np.ndarray
    """d log delta/d log noise."""
    rung: np.ndarray
    """Of the contour."""
    fits: np.ndarray
    """Whether the contour had the nodes that its eps needs: otherwise that is a guess."""
    close: np.ndarray
    """Whether the noise is near enough to be certified as it is."""


def noise_for(
    flat: dict[str, np.ndarray],
    target: Target,
    relation: str,
    rtol: float,
    noise: np.ndarray | None,
    solved: Solved | None = None,
) -> Found:
    """The least noise for which the certified delta at the target's eps is at most the target's delta.

    noise : where the search begins, if that is known.  solved : rows of it that need no solve.
    """
    q, steps = flat["sampling_probability"], flat["steps"]
    size, effort = q.size, account.effort_of_search(rtol)
    known = {"sampling_probability": q, "steps": steps}
    goal = Goal("noise_multiplier", *target, known, NOISE_RANGE, relation, rtol, no_hint(size), noise, True)

    def start(rows: np.ndarray) -> Start:
        if solved is None:
            return started(goal, rows)
        close = solved.close[rows]
        slope = solved.slope[rows]
        aim = AIM * rtol * room(target.delta[rows]) / target.delta[rows]
        aimed = np.log(solved.noise[rows]) - np.where(close, aim / np.where(close, slope, 1.0), 0.0)
        begin = Start(aimed, np.where(close, target.delta[rows] * slope, 0.0), close)
        there, left = rows[close], np.flatnonzero(~close)
        goal.hint.near[there], goal.hint.rung[there] = np.log(target.delta[there]), solved.rung[there]
        if left.size:
            own = started(goal, rows[left])
            begin.x[left], begin.slope[left], begin.solved[left] = own.x, own.slope, own.solved
        return begin

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        run, hint = dp_sgd(values, q[rows], steps[rows]), jax.tree.map(itemgetter(rows), goal.hint)
        return by_parts(MechanismQuestion("delta", run, target.epsilon[rows], relation, effort, hint=hint))

    search = Search(
        evaluate=evaluate,
        target=target.delta,
        lowest=np.full(size, NOISE_RANGE[0]),
        highest=np.full(size, NOISE_RANGE[1]),
        falls=np.full(size, True),
        rtol=rtol,
        infeasible=INFEASIBLE["noise_multiplier"],
        privates_first=q == 0.0,
        scale=room(target.delta),
    )
    return certified_search(search, start)


def noise_for_rate(
    flat: dict[str, np.ndarray], goal: np.ndarray, fpr: np.ndarray, relation: str, rtol: float
) -> tuple[Found, Target]:
    """The least noise for which the true-positive rate at `fpr` is seen to be at most `goal`, and from which eps.

    Any eps gives a certified noise.  The one that is chosen decides how small the noise is.
    """
    from scipy.special import ndtri

    # of mu-Gaussian DP: the loss at the threshold of the best test
    mu = ndtri(goal) - ndtri(fpr)
    epsilon = np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0)
    solved, settled = by_contour(flat, goal, fpr, mu, epsilon, relation)
    noise = solved.noise
    full = flat["sampling_probability"] == 1.0  # mu-Gaussian DP itself: that eps is the best one
    solved.close[full] = False
    noise[full] = np.clip(np.sqrt(flat["steps"]) / np.maximum(mu, 1e-300), *NOISE_RANGE)[full]
    epsilon = np.where(full, np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0), epsilon)
    places, solved_noise = epsilon.copy(), noise.copy()

    def by_rounds(rows: np.ndarray) -> None:
        some = {name: column[rows] for name, column in flat.items()}
        start = np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0)[rows]
        places[rows], noise[rows] = _by_rounds(some, goal[rows], fpr[rows], mu[rows], start, relation)

    left = np.flatnonzero(~(settled | full))
    if left.size:
        by_rounds(left)
    target = _target_of_rate(places.copy(), goal, fpr)  # places may change below
    found = noise_for(flat, target, relation, rtol, noise, solved)
    with np.errstate(all="ignore"):  # what is no number is another guess
        doubtful = ~(np.abs(np.log(found.value / solved_noise)) <= AGREES) & settled & ~solved.fits & ~full
    again = np.flatnonzero(doubtful)
    if again.size:  # two guesses at the best eps: the one of less noise is the better
        by_rounds(again)
        some = {name: column[again] for name, column in flat.items()}
        other = _target_of_rate(places[again], goal[again], fpr[again])
        second = noise_for(some, other, relation, rtol, noise[again])
        first_holds, holds = (np.isin(x, CLAIMED) for x in (found.status[again], second.status))
        better = holds & ~(first_holds & (found.value[again] <= second.value))
        for column, new in zip((*found, *target), (*second, *other), strict=True):
            column[again[better]] = new[better]
    return found, target


@np.errstate(all="ignore")  # a guess that is not a number is not used
def by_contour(
    flat: dict[str, np.ndarray],
    goal: np.ndarray,
    fpr: np.ndarray,
    mu: np.ndarray,
    epsilon: np.ndarray,
    relation: str,
    guess: bool = False,
) -> tuple[Solved, np.ndarray]:
    """The noise and the best eps together, for rows with 0 < q < 1: (what is found, whether it is found).

    mu, epsilon : those of Gaussian differential privacy with the same rate; `epsilon` is replaced where it is found.
    guess : whether the first attempt's result is taken in place of the last attempt's, where it lacked few nodes: it is
    closer there, as a rule, since the last attempt is cut short.
    """
    q, steps = flat["sampling_probability"], flat["steps"]
    settled = np.zeros(q.size, bool)
    no = np.zeros(q.size, bool)
    solved = Solved(np.ones(q.size), np.zeros(q.size), np.zeros(q.size, int), no.copy(), no)
    x = np.clip(np.nan_to_num(-0.5 * np.log(np.log1p(mu**2 / (q**2 * steps)))), *np.log(NOISE_RANGE))
    # the slope at the best eps of mu-Gaussian DP: e^eps a / delta
    share = np.clip(np.exp(epsilon) * fpr / goal, 0.01, 0.99)
    arguments = (
        np.full(q.size, -1.0 if relation == "add_one" else 1.0),
        np.log(np.maximum(q, 1e-300)),
        np.log(steps),
        x,
        share / (1.0 - share),
        np.log(goal),
        np.log(fpr),
    )
    due, guessed = np.where(q > 0.0, 0, len(ATTEMPTS)), no.copy()
    rung_of = np.array([rung for rung, *_ in ATTEMPTS])
    for turn, (step, steps_there, tolerance) in enumerate(ATTEMPTS):
        rows = np.flatnonzero(due == turn)
        if rows.size == 0:
            continue
        rung = PLAIN_FOR_DELTA[step]
        part = *(column[rows] for column in arguments), np.full(rows.size, np.log(tolerance))
        static = {"points": rung.points, "count": rung.nodes, "steps": steps_there}
        at, x, moved, off, slope, need = evaluate(calibration.solve_rate, part, rows.size, rung.chunk, **static)
        fits, last = need <= NEARLY * rung.nodes, turn == len(ATTEMPTS) - 1
        good = (moved < SETTLED) & (fits | (last & (need <= CUT_SHORT * rung.nodes))) & np.isfinite(at)
        # at the end of the range of eps no step is left to be taken, and none was needed
        inside = (
            (at < np.log(goal[rows] / fpr[rows]) + 2.0 * np.log(calibration.LARGEST_SHARE))
            & (x > np.log(NOISE_RANGE[0]))
            & (x < np.log(NOISE_RANGE[1]))
        )
        good &= inside
        close = good & fits & (np.abs(off) < CLOSE) & (slope < 0.0)
        wanted = np.searchsorted(rung_of, np.searchsorted([NEARLY * each.nodes for each in PLAIN_FOR_DELTA[:-1]], need))
        following = np.maximum(wanted, turn + 1)
        if guess and turn == 0:
            guessed[rows] = inside & (slope < 0.0) & (need <= FEW_NODES * rung.nodes)
        enough = good | guessed[rows] & (following == len(ATTEMPTS) - 1)
        due[rows] = np.where(enough, len(ATTEMPTS), following)
        kept = good | guessed[rows] & (turn == 0)
        for column, new in zip(solved, (np.exp(x), slope, np.full(rows.size, step), fits, close), strict=True):
            column[rows[kept]] = new[kept]
        epsilon[rows[kept]] = at[kept]
        settled[rows[kept]] = True
    return solved, settled


def _by_rounds(
    flat: dict[str, np.ndarray],
    goal: np.ndarray,
    fpr: np.ndarray,
    mu: np.ndarray,
    epsilon: np.ndarray,
    relation: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(the best eps, the noise there), by the fast solves for the noise at one eps after another."""
    size, noise = goal.size, None
    for distance, places in ROUNDS:
        target = _target_of_rate(epsilon, goal, fpr)
        rough = Goal("noise_multiplier", *target, flat, NOISE_RANGE, relation, ROUGH, no_hint(size), noise, True)
        noise = np.exp(calibration_start(rough, np.arange(size))[0].x)
        epsilon = _better(flat, epsilon, noise, fpr, goal, distance * mu, places, relation)
    return epsilon, np.ones(size) if noise is None else noise


def _target_of_rate(epsilon: np.ndarray, goal: np.ndarray, fpr: np.ndarray) -> Target:
    """`delta + e^eps a <= b`, the sum rounded up."""
    return Target(epsilon, goal * (1.0 - 16.0 * ROUNDOFF) - np.exp(epsilon) * fpr * (1.0 + 16.0 * ROUNDOFF))


def _better(
    flat: dict[str, np.ndarray],
    epsilon: np.ndarray,
    noise: np.ndarray,
    fpr: np.ndarray,
    goal: np.ndarray,
    step: np.ndarray,
    places: int,
    relation: str,
) -> np.ndarray:
    """The eps at which `delta + e^eps a` is least, by a parabola through the best of some places and its neighbours."""
    half = places // 2
    at = np.maximum(epsilon, half * step) + step * np.arange(-half, half + 1.0)[:, None]
    run, effort = dp_sgd(noise, flat["sampling_probability"], flat["steps"]), account.effort_of_search(ROUGH_DELTA)
    side = "add_one" if relation == "add_one" else "remove_one"  # the larger as a rule
    with np.errstate(over="ignore"):  # a place whose sum is infinite is not the best
        asked = MechanismQuestion("delta", run, at, side, effort, "contour")
        sums = by_parts(asked).estimate + np.exp(at) * fpr
    best = np.clip(np.argmin(np.where(np.isnan(sums), np.inf, sums), axis=0), 1, places - 2)
    left, middle, right = (np.take_along_axis(sums, best[None] + by, axis=0)[0] for by in (-1, 0, 1))
    with np.errstate(all="ignore"):  # a guess that is not a number moves nothing
        slope, bend = 0.5 * (right - left), right - 2.0 * middle + left
        move = np.where(bend > 0.0, -slope / bend, -np.sign(slope) * LARGEST_MOVE)
    moved = np.take_along_axis(at, best[None], axis=0)[0]
    moved = moved + step * np.clip(np.nan_to_num(move), -LARGEST_MOVE, LARGEST_MOVE)
    # e^eps a must stay below b
    return np.clip(moved, 0.0, np.maximum(np.log(goal / fpr) * 0.999, 0.0))
