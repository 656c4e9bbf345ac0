"""The noise at which certified deltas meet targets, and the eps from which a true-positive rate is best seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.calibration_start import gaussian_mu
from jaxacct.certified_search import Found, Search, Start, certified_search
from jaxacct.dp_sgd_calibration import INFEASIBLE, NOISE_RANGE
from jaxacct.floats import ROUNDOFF
from jaxacct.mechanisms import dp_sgd

__all__ = ["Target", "noise_for", "noise_for_rate"]

ROUNDS = 3
"""How often the eps of a true-positive rate is moved to where it says most."""
ROUGH = 0.01
"""rtol of the searches before the last."""
STEP = 0.1
"""Distance of the three places of the profile from which the best eps is guessed, in deviations of the loss."""
LARGEST_MOVE = 1.0
"""Longest move of eps in a round, likewise."""


class Target(NamedTuple):
    """`delta(epsilon) <= delta` is enough, row by row."""

    epsilon: np.ndarray
    delta: np.ndarray


def noise_for(
    flat: dict[str, np.ndarray], target: Target, relation: str, rtol: float, noise: np.ndarray | None
) -> Found:
    """The least noise for which the certified delta at the target's eps is at most the target's delta."""
    q, steps = flat["sampling_probability"], flat["steps"]
    size = q.size

    def evaluate(rows: np.ndarray, values: np.ndarray) -> Bounds:
        run = dp_sgd(values, q[rows], steps[rows])
        return account.delta(run, target.epsilon[rows], relation=relation, rtol=0.25 * rtol)

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
    return certified_search(search, lambda rows: _start(flat, target, rows, noise))


def noise_for_rate(
    flat: dict[str, np.ndarray], goal: np.ndarray, fpr: np.ndarray, relation: str, rtol: float
) -> tuple[Found, Target]:
    """The least noise for which the true-positive rate at `fpr` is seen to be at most `goal`, and from which eps."""
    from scipy.special import ndtri

    # of mu-Gaussian DP: the loss at the threshold of the best test
    mu = ndtri(goal) - ndtri(fpr)
    epsilon = np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0)
    noise = None
    for _ in range(ROUNDS):
        rough = noise_for(flat, _target_of_rate(epsilon, goal, fpr), relation, ROUGH, noise)
        noise = np.where(np.isfinite(rough.value), rough.value, 1.0)
        epsilon = _better(flat, epsilon, noise, fpr, goal, mu, relation)
    target = _target_of_rate(epsilon, goal, fpr)
    return noise_for(flat, target, relation, rtol, noise), target


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
    run = dp_sgd(noise, flat["sampling_probability"], flat["steps"])
    sums = np.asarray(account.delta(run, at, relation=relation, rtol=1e-6).estimate) + np.exp(at) * fpr
    with np.errstate(all="ignore"):  # a guess that is not a number moves nothing
        slope, bend = 0.5 * (sums[2] - sums[0]) / step, (sums[2] - 2.0 * sums[1] + sums[0]) / step**2
        move = np.where(bend > 0.0, -slope / bend, -np.sign(slope) * LARGEST_MOVE * mu)
    moved = middle + np.clip(np.nan_to_num(move), -LARGEST_MOVE * mu, LARGEST_MOVE * mu)
    # e^eps a must stay below b
    return np.clip(moved, 0.0, np.maximum(np.log(goal / fpr) * 0.999, 0.0))


def _start(flat: dict[str, np.ndarray], target: Target, rows: np.ndarray, noise: np.ndarray | None) -> Start:
    """By the central limit theorem, or where a rougher search ended."""
    q, steps, epsilon, delta = (
        column[rows] for column in (flat["sampling_probability"], flat["steps"], target.epsilon, target.delta)
    )
    with np.errstate(all="ignore"):
        mu = gaussian_mu(epsilon, delta)
        x = -0.5 * np.log(np.log1p(mu**2 / (q**2 * steps))) if noise is None else np.log(noise[rows])
    x = np.clip(np.nan_to_num(x), *np.log(NOISE_RANGE))
    return Start(x, np.zeros(rows.size), np.zeros(rows.size, bool))
