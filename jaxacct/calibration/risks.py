"""Calibration to a risk: the least private parameter of DP-SGD for which no attack succeeds more often than allowed.

Every target but mu follows from one certified value of the privacy profile: `delta(eps*) <= d*`.  The parameter is
searched for at that eps*.  Where eps* is free (true-positive rates), any choice is valid, and the best one is looked
for.  mu is searched for by its own certified bracket.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtri

from jaxacct.accounting.account import REVERSED
from jaxacct.accounting.true_positive_rates import Place, posterior_of, rate_at
from jaxacct.calibration.dp_sgd_search import INFEASIBLE, LEAST_RTOL, RULES, Calibration
from jaxacct.calibration.risk_delta_search import (
    Unknown,
    deltas_near,
    less_private,
    value_for,
    value_for_mu,
    value_for_rate,
)
from jaxacct.calibration.risk_noise import Target
from jaxacct.calibration.risk_targets import RiskTarget, above, flat_values, rate_of
from jaxacct.calibration.search import CLAIMED, Found
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import options, refuse_tracers
from jaxacct.engines.backend import job

__all__ = ["calibrated_to_risk"]

LOWER_ENDS = (0.02, 1e-4), (0.1, 1e-3)
"""Two attempts at the lower end of a true-positive rate: the assumed distance of eps from the best one, in deviations
of the loss, and the rtol of the deltas.  That end is then some 0.05 % or 1 % low."""
_NEAR = 2e-3
"""A value is shown to be the best if the lower end of its rate is this near to the target, relative to the target's
distances from chance and from 1."""
WIDE = 0.02
"""Relative width up to which the bracket of a rate has the status "ok"."""
Risk = tuple[Found, np.ndarray, np.ndarray, np.ndarray]
"""What was found; the ends of the risk, (3, n); the eps that it follows from; its kinds."""


def calibrated_to_risk(
    unknown: str,
    target: RiskTarget,
    known: dict[str, Any],
    relation: str,
    limits: tuple[float, float],
    rtol: float,
    backend: str,
) -> Calibration:
    """The least private value of `unknown` that keeps a risk at its target."""
    refuse_tracers(f"ja.calibrate_{unknown}", "jaxacct.kernels.calibration", **target.values, **known)
    chosen = options(relation=relation, rtol=rtol, backend=backend, least_rtol=LEAST_RTOL)
    flat, shape = flat_values(target.values, known, RULES, {})
    task = Unknown(unknown, limits, {name: flat[name] for name in known}, chosen.relation, chosen.rtol)
    solve = {
        "target_advantage": _to_advantage,
        "target_bayes_success": _to_bayes_success,
        "target_mu": _to_mu,
    }.get(target.name, _to_rate)
    with job(int(np.prod(shape)), chosen.backend):
        found, ends, epsilon, kind = solve(task, target.name, flat, shape)
    # nothing that is not shown to hold is claimed
    claimed = np.isin(found.status, CLAIMED)
    found.fail(np.flatnonzero(claimed & ~(ends[2] <= flat[target.name])), INFEASIBLE[unknown])
    ok = np.isin(found.status, CLAIMED)
    ends, epsilon = np.where(ok, ends, np.nan), np.where(ok, epsilon, np.nan)
    return _result(found, ends, epsilon, kind, ok, ok & found.shown, shape, chosen.relation)


def _result(
    found: Found,
    ends: np.ndarray,
    epsilon: np.ndarray,
    kind: np.ndarray,
    ok: np.ndarray,
    best: np.ndarray,
    shape: tuple[int, ...],
    relation: str,
) -> Calibration:
    word = np.where(ok, found.word, found.status)
    words = (column.reshape(shape) for column in (kind, word, found.engine))
    risk = Bounds(*(end.reshape(shape) for end in ends), *words)
    exactly = epsilon.reshape(shape)
    # the eps is a choice, and known exactly
    at = Bounds(exactly, exactly, exactly, "certified", np.where(ok, "ok", found.status).reshape(shape))
    value, status, ok, best = (x.reshape(shape) for x in (found.value, found.status, ok, best))
    if shape == ():
        return Calibration(value[()], at, str(status), ok[()], best[()], risk, relation=relation)
    return Calibration(value, at, status, ok, best, risk, relation=relation)


def _to_advantage(task: Unknown, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    goal = flat[name]
    target = Target(np.zeros(goal.shape), goal)
    found = value_for(task, target)
    return found, np.stack([found.lower, found.estimate, found.upper]), target.epsilon, found.kind


def _to_bayes_success(task: Unknown, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    goal, prior = flat[name], flat["prior"]
    rare, odds = np.minimum(prior, 1.0 - prior), np.abs(np.log(prior) - np.log1p(-prior))
    above(name, goal, "max(prior, 1 - prior)", np.maximum(prior, 1.0 - prior), shape)
    wrong = 8.0 * ROUNDOFF * (2.0 + odds)  # as in Profile.bayes_success
    room = (goal - (1.0 - rare) - 2.0 * wrong) / rare * (1.0 - 4.0 * ROUNDOFF)
    target = Target(odds, room)
    rare_member = prior <= 0.5
    found = value_for(task._replace(relation="remove_one" if rare_member.all() else "add_one"), target)
    if rare_member.any() and not rare_member.all():
        other = value_for(task._replace(relation="remove_one"), target)
        found = Found(*(np.where(rare_member, a, b) for a, b in zip(other, found, strict=True)))
    ends = 1.0 - rare + rare * np.stack([found.lower, found.estimate, found.upper])
    low, high = np.maximum(ends[0] - wrong, 1.0 - rare), np.minimum(ends[2] + wrong, 1.0)
    return found, np.stack([low, np.clip(ends[1], low, high), high]), target.epsilon, found.kind


def _to_rate(task: Unknown, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    """A true-positive rate, and what comes to one: a posterior probability, a reconstruction."""
    if name == "target_posterior":
        above(name, flat[name], "prior", flat["prior"], shape)
    else:
        beside = "at_fpr" if name == "target_tpr" else "baseline"
        above(name, flat[name], beside, flat[beside], shape)
    goal, fpr = rate_of(name, flat)
    asked = (goal < 1.0) & (goal > fpr)
    # the best eps, about -mu (quantile(a) + quantile(b))/2, is below 0 where a + b > 1
    mirrored = asked & (goal - 0.5 > 0.5 - fpr)
    # where nothing is asked any delta will do, and where too much is asked none
    target = Target(np.zeros(goal.shape), np.where(goal >= 1.0, 1.0, -1.0))
    pieces = []
    for mask, mirror in ((asked & ~mirrored, False), (mirrored, True)):
        rows = np.flatnonzero(mask)
        if rows.size:
            ends_of_test = (1.0 - fpr[rows], 1.0 - goal[rows]) if mirror else (goal[rows], fpr[rows])
            some, places = value_for_rate(_reversed(task.take(rows), mirror), *ends_of_test)
            pieces.append((rows, some))
            target.epsilon[rows], target.delta[rows] = places.epsilon, places.delta
    if not asked.all():
        rows = np.flatnonzero(~asked)
        pieces.append((rows, value_for(task.take(rows), Target(target.epsilon[rows], target.delta[rows]))))
    order = np.argsort(np.concatenate([rows for rows, _ in pieces]))
    found = Found(*(np.concatenate(columns)[order] for columns in zip(*(some for _, some in pieces), strict=True)))
    ends = np.full((3, goal.size), np.nan)
    high = (found.upper + np.exp(target.epsilon) * fpr) * (1.0 + 8.0 * ROUNDOFF)
    # `delta(-x) + e^-x a = 1 - e^-x (1 - a - delta'(x))`, with delta' of the reverse direction
    missed = np.exp(-target.epsilon) * (1.0 - fpr - found.upper) * (1.0 - 8.0 * ROUNDOFF)
    high = np.minimum(np.where(mirrored, 1.0 - missed, high), 1.0)
    target.epsilon[mirrored] *= -1.0
    enough = goal - _NEAR * np.minimum(goal - fpr, 1.0 - goal)
    low = _rates_at_least(task, found.value, target.epsilon, goal, fpr, enough)
    rows = np.flatnonzero((found.status == "ok") & asked & ~(low >= enough))
    found.shown[:] &= (low >= enough) | ~asked
    if rows.size:
        least = _rates_at_least(
            task.take(rows),
            less_private(task, found.value[rows]),
            target.epsilon[rows],
            goal[rows],
            fpr[rows],
            goal[rows],
        )
        found.shown[rows] = least > goal[rows]
    agree = ~(low > high)  # ends that contradict each other claim nothing
    high = np.where(agree, high, 1.0)
    low = np.where(agree & (found.kind == "certified"), low, 0.0)
    found.status[(found.status == "ok") & ~found.shown] = "loose"
    found.word[:] = np.where((found.word == "ok") & (high - low > WIDE * high), "width", found.word)
    ends = np.stack([low, high, high])
    if name == "target_posterior":
        ends = np.stack(
            [posterior_of(end, flat["prior"], fpr, turn) for end, turn in zip(ends, (-1, 0, 1), strict=True)]
        )
        ends[1] = np.clip(ends[1], ends[0], ends[2])
    return found, ends, target.epsilon, found.kind


def _reversed(task: Unknown, mirror: bool) -> Unknown:
    """The task, in the reverse direction if `mirror`."""
    return task._replace(relation=REVERSED.get(task.relation, task.relation)) if mirror else task


def _rates_at_least(
    task: Unknown, values: np.ndarray, epsilon: np.ndarray, goal: np.ndarray, fpr: np.ndarray, enough: np.ndarray
) -> np.ndarray:
    """A lower end of the true-positive rate at some values, from three values of delta around each eps.

    It is tight if eps is near the best one.  Rows below `enough` are repeated with points further apart.
    """
    low, left = fpr.copy(), np.isfinite(values)
    for about, rtol in LOWER_ENDS:
        for sign, leading in ((1.0, "remove_one"), (-1.0, "add_one")):  # one direction is enough for a lower end
            rows = np.flatnonzero(left & (np.where(epsilon < 0.0, -1.0, 1.0) == sign))
            if rows.size == 0:
                continue
            mu = -ndtri(fpr[rows]) + ndtri(np.minimum(goal[rows], 1.0 - 1e-12))
            mu = np.clip(np.nan_to_num(mu, nan=1.0), 1e-9, 50.0)
            place = Place(sign * np.maximum(np.abs(epsilon[rows]), about * mu), mu)
            one = task._replace(relation=task.relation if task.relation in REVERSED else leading).take(rows)
            found = rate_at(deltas_near(one, values[rows], rtol), place, fpr[rows], about)
            low[rows] = np.maximum(found.low, low[rows])
        left &= low < enough
    return low


def _to_mu(task: Unknown, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    found, epsilon = value_for_mu(task, flat[name], flat["above_fpr"])
    return found, np.stack([found.lower, found.estimate, found.upper]), epsilon, found.kind
