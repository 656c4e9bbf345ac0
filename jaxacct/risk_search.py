"""The noise at which certified deltas meet targets, and the eps from which a true-positive rate is best seen."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import jax
import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.calibration_start import NEARLY, PLAIN_FOR_DELTA, TOLERANCE, Goal
from jaxacct.certified_search import Found, Search, certified_search
from jaxacct.dp_sgd_calibration import INFEASIBLE, NOISE_RANGE, started
from jaxacct.engines.backend import evaluate
from jaxacct.engines.contour import no_hint
from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import rate_calibration
from jaxacct.mechanisms import dp_sgd
from jaxacct.worse_direction import worse_direction

__all__ = ["Target", "noise_for", "noise_for_rate"]

ROUNDS = 3
"""How often the eps of a true-positive rate is moved to where it says most."""
ROUGH = 0.01
"""rtol of the searches before the last."""
ROUGH_DELTA = 1e-3
"""rtol of the deltas from which it is guessed; their estimates are better than that."""
STEP = 0.1
"""Distance of the three places of the profile from which the best eps is guessed, in deviations of the loss."""
LARGEST_MOVE = 1.0
"""Longest move of eps in a round, likewise."""
SETTLED = 1e-3
"""Last step in log noise below which eps is good enough: the noise changes by its square, and is certified anew."""


class Target(NamedTuple):
    """`delta(epsilon) <= delta` is enough, row by row."""

    epsilon: np.ndarray
    delta: np.ndarray


def noise_for(
    flat: dict[str, np.ndarray], target: Target, relation: str, rtol: float, noise: np.ndarray | None
) -> Found:
    """The least noise for which the certified delta at the target's eps is at most the target's delta.

    noise : where the search begins, if that is known.
    """
    q, steps = flat["sampling_probability"], flat["steps"]
    size, effort = q.size, account.effort_of_search(rtol)
    known = {"sampling_probability": q, "steps": steps}
    goal = Goal("noise_multiplier", *target, known, NOISE_RANGE, relation, rtol, no_hint(size), noise, True)

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        run, hint = dp_sgd(values, q[rows], steps[rows]), jax.tree.map(itemgetter(rows), goal.hint)
        return worse_direction("delta", run, target.epsilon[rows], relation, effort, "auto", hint)

    search = Search(
        evaluate=evaluate,
        target=target.delta,
        lowest=np.full(size, NOISE_RANGE[0]),
        highest=np.full(size, NOISE_RANGE[1]),
        falls=np.full(size, True),
        rtol=rtol,
        infeasible=INFEASIBLE["noise_multiplier"],
        privates_first=q == 0.0,
    )
    return certified_search(search, lambda rows: started(goal, rows))


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
    noise, solved = _by_contour(flat, goal, fpr, mu, epsilon, relation)
    left = np.flatnonzero(~solved)
    if left.size:
        some = {name: column[left] for name, column in flat.items()}
        epsilon[left], noise[left] = _by_rounds(some, goal[left], fpr[left], mu[left], epsilon[left], relation)
    target = _target_of_rate(epsilon, goal, fpr)
    return noise_for(flat, target, relation, rtol, noise), target


@np.errstate(all="ignore")  # a guess that is not a number is not used
def _by_contour(
    flat: dict[str, np.ndarray],
    goal: np.ndarray,
    fpr: np.ndarray,
    mu: np.ndarray,
    epsilon: np.ndarray,
    relation: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(noise, whether it and the best eps were found), on the plain contour; `epsilon` is replaced where they were."""
    q, steps = flat["sampling_probability"], flat["steps"]
    noise, solved = np.ones(q.size), np.zeros(q.size, bool)
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
        np.full(q.size, np.log(TOLERANCE)),
    )
    for rung in PLAIN_FOR_DELTA:
        rows = np.flatnonzero(~solved & (q > 0.0))
        if rows.size == 0:
            break
        part = tuple(column[rows] for column in arguments)
        found = evaluate(rate_calibration.solve, part, rows.size, rung.chunk, points=rung.points, count=rung.nodes)
        at, x, moved, need = found
        good = (np.abs(moved) < SETTLED) & (need <= NEARLY * rung.nodes) & np.isfinite(at) & np.isfinite(x)
        good &= (at < np.log(goal[rows] / fpr[rows])) & (x > np.log(NOISE_RANGE[0])) & (x < np.log(NOISE_RANGE[1]))
        rows = rows[good]
        epsilon[rows], noise[rows], solved[rows] = np.maximum(at[good], 0.0), np.exp(x[good]), True
    return noise, solved


def _by_rounds(
    flat: dict[str, np.ndarray],
    goal: np.ndarray,
    fpr: np.ndarray,
    mu: np.ndarray,
    epsilon: np.ndarray,
    relation: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(the best eps, the noise there), by rough searches for the noise at one eps after another."""
    noise = None
    for _ in range(ROUNDS):
        rough = noise_for(flat, _target_of_rate(epsilon, goal, fpr), relation, ROUGH, noise)
        noise = np.where(np.isfinite(rough.value), rough.value, 1.0)
        epsilon = _better(flat, epsilon, noise, fpr, goal, mu, relation)
    return epsilon, noise if noise is not None else np.ones_like(goal)


def _target_of_rate(epsilon: np.ndarray, goal: np.ndarray, fpr: np.ndarray) -> Target:
    """`delta + e^eps a <= b`, the sum rounded up."""
    return Target(epsilon, goal * (1.0 - 16.0 * ROUNDOFF) - np.exp(epsilon) * fpr * (1.0 + 16.0 * ROUNDOFF))


def _better(
    flat: dict[str, np.ndarray],
    epsilon: np.ndarray,
    noise: np.ndarray,
    fpr: np.ndarray,
    goal: np.ndarray,
    mu: np.ndarray,
    relation: str,
) -> np.ndarray:
    """The eps at which `delta + e^eps a` is least, by a step of Newton from three places."""
    step = STEP * mu
    middle = np.maximum(epsilon, step)
    at = middle + step * np.array([-1.0, 0.0, 1.0])[:, None]
    run, effort = dp_sgd(noise, flat["sampling_probability"], flat["steps"]), account.effort_of_search(ROUGH_DELTA)
    side = "add_one" if relation == "add_one" else "remove_one"  # the larger as a rule
    sums = worse_direction("delta", run, at, side, effort, "contour").estimate + np.exp(at) * fpr
    with np.errstate(all="ignore"):  # a guess that is not a number moves nothing
        slope, bend = 0.5 * (sums[2] - sums[0]) / step, (sums[2] - 2.0 * sums[1] + sums[0]) / step**2
        move = np.where(bend > 0.0, -slope / bend, -np.sign(slope) * LARGEST_MOVE * mu)
    moved = middle + np.clip(np.nan_to_num(move), -LARGEST_MOVE * mu, LARGEST_MOVE * mu)
    # e^eps a must stay below b
    return np.clip(moved, 0.0, np.maximum(np.log(goal / fpr) * 0.999, 0.0))
