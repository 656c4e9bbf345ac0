"""Calibrates DP-SGD to a risk: finds the least protective parameter with which the risk is at most its target.

A risk other than mu meets its target if delta at one eps is small enough.  A true-positive rate is at most
`delta(eps) + e^eps fpr` for every eps; the *best eps* has the least such bound.  mu of Gaussian DP must hold where both
error rates are at least `above_fpr`; tangents to the trade-off curve bound it.  See jaxacct/representations/README.md.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import jax
import numpy as np
from scipy.special import ndtr, ndtri

from jaxacct.accounting import account
from jaxacct.accounting.account import by_parts
from jaxacct.accounting.risk_readings import (
    KNOWN_WIDTH,
    Deltas,
    Place,
    best_epsilon,
    deltas_about,
    deltas_along,
    gaussian_fit,
    largest_mu,
    least_mu,
    posterior_of,
    rate_at,
    rate_from_three,
    three_places,
)
from jaxacct.calibration.dp_sgd_search import (
    INFEASIBLE,
    NEARLY,
    PLAIN_FOR_DELTA,
    TOLERANCE,
    Calibration,
    Goal,
    chance_of_a_sample,
    result,
    room,
    search_for,
    started,
)
from jaxacct.calibration.search import AIM, CLAIMED, BestValues, Start, beside, certified_search, conclude, least_apart
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import refuse_where, require_taken_out
from jaxacct.engines.backend import evaluate, job
from jaxacct.engines.contour import no_hint
from jaxacct.engines.protocol import Answer, MechanismQuestion
from jaxacct.kernels import calibration
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE

LOWER_ENDS = (0.02, 1e-4), (0.1, 1e-3)
"""Two attempts at a lower bound of a true-positive rate. The bounds are about 0.05 % and 1 % below the rate. An attempt
is a pair: the step between the three eps at which delta is evaluated, in standard deviations of the loss, and the rtol
of delta."""
Risk = tuple[BestValues, np.ndarray, np.ndarray]
"""The best values, the risk at them (lower bounds, estimates and upper bounds, (3, n)), the eps that shows the risk."""


def calibrated_to_risk(
    name: str, goal: Goal, flat: dict[str, np.ndarray], shape: tuple[int, ...], backend: str
) -> Calibration:
    """Return the least protective value of the unknown that keeps the named risk at or below its target."""
    by_name = {"target_advantage": _to_advantage, "target_bayes_success": _to_bayes_success, "target_mu": _to_mu}
    with job(goal.epsilon.size, backend):
        found, ends, epsilon = by_name.get(name, _to_rate)(goal, name, flat, shape)
    # a value is withdrawn unless the upper bound of its risk is at most the target
    found.fail(np.flatnonzero(np.isin(found.status, CLAIMED) & ~(ends[2] <= flat[name])), INFEASIBLE[goal.unknown])
    ok = np.isin(found.status, CLAIMED)
    ends, epsilon = np.where(ok, ends, np.nan), np.where(ok, epsilon, np.nan).reshape(shape)
    words = (np.where(ok, found.word, found.status), found.engine)
    risk = Bounds(*(column.reshape(shape) for column in (*ends, found.kind, *words)))
    # the search chose `epsilon`, so it is known exactly
    at = Bounds(epsilon, epsilon, epsilon, "certified", np.where(ok, "ok", found.status).reshape(shape))
    return result(found, shape, goal.relation, bounds=at, risk=risk)


def _value_for(goal: Goal, solved: RateSolve | None = None) -> BestValues:
    """Return the least protective value whose certified delta is at most the goal's. `solved` gives starting noises."""
    goal = goal._replace(hint=no_hint(goal.delta.size))
    effort = account.effort_of_search(goal.rtol)

    def start(rows: np.ndarray) -> Start:
        if solved is None:
            return started(goal, rows)
        close, slope, delta = solved.close[rows], solved.slope[rows], goal.delta[rows]
        aim = AIM * goal.rtol * room(delta) / delta
        aimed = np.log(solved.noise[rows]) - np.where(close, aim / np.where(close, slope, 1.0), 0.0)
        begin = Start(aimed, np.where(close, slope, 0.0), close)
        there, left = rows[close], np.flatnonzero(~close)
        goal.hint.near[there], goal.hint.rung[there] = np.log(goal.delta[there]), solved.rung[there]
        if left.size:
            own = started(goal, rows[left])
            begin.x[left], begin.slope[left], begin.solved[left] = own.x, own.slope, own.solved
        return begin

    def evaluate_delta(rows: np.ndarray, values: np.ndarray) -> Bounds:
        hint = jax.tree.map(itemgetter(rows), goal.hint)
        run = goal.run(rows, values)
        return by_parts(MechanismQuestion("delta", run, goal.epsilon[rows], goal.relation, effort, hint=hint))

    return certified_search(search_for(goal, evaluate_delta)._replace(target=goal.delta, scale=room(goal.delta)), start)


def _to_advantage(goal: Goal, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    found = _value_for(goal._replace(delta=flat[name]))
    return found, np.stack([found.lower, found.estimate, found.upper]), goal.epsilon


def _to_bayes_success(goal: Goal, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    wanted, prior = flat[name], flat["prior"]
    rare, odds = np.minimum(prior, 1.0 - prior), np.abs(np.log(prior) - np.log1p(-prior))
    _require_above(name, wanted, "max(prior, 1 - prior)", np.maximum(prior, 1.0 - prior), shape)
    wrong = 8.0 * ROUNDOFF * (2.0 + odds)  # bound of the success rate's rounding errors, as in Profile.bayes_success
    most = (wanted - (1.0 - rare) - 2.0 * wrong) / rare * (1.0 - 4.0 * ROUNDOFF)
    goal, rare_member, pieces = goal._replace(epsilon=odds, delta=most), prior <= 0.5, []
    for relation, mask in (("remove_one", rare_member), ("add_one", ~rare_member)):
        rows = np.flatnonzero(mask)
        if rows.size or not mask.size:
            pieces.append((rows, _value_for(goal._replace(relation=relation).take(rows))))
    found = _together(pieces)
    ends = 1.0 - rare + rare * np.stack([found.lower, found.estimate, found.upper])
    low, high = np.maximum(ends[0] - wrong, 1.0 - rare), np.minimum(ends[2] + wrong, 1.0)
    return found, np.stack([low, np.clip(ends[1], low, high), high]), odds


def _together(pieces: list[tuple[np.ndarray, BestValues]]) -> BestValues:
    """Join the best values of several groups of rows, in the order of the rows."""
    order = np.argsort(np.concatenate([rows for rows, _ in pieces]))
    return BestValues(*(np.concatenate(columns)[order] for columns in zip(*(some for _, some in pieces), strict=True)))


def _require_above(name: str, value: np.ndarray, least: str, floor: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise InputError where a target is at most `floor`, the risk of an attacker who sees no output."""
    value, floor = value.reshape(shape), floor.reshape(shape)
    remedy = f"the risk without output; use a larger {name.replace('_', ' ')}"
    said = lambda index: f"must be above {least} = {floor[index]:g}, {remedy}"
    refuse_where(~(value > floor), name, value, said, "{:g}".format)


def _to_rate(goal: Goal, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    """Calibrate to a true-positive rate; a posterior or a reconstruction is first turned into such a rate."""
    if name == "target_reconstruction":
        require_taken_out(goal.relation)
    if name != "target_tpr" and goal.relation in ("add_or_remove_one", "zero_out"):
        goal = goal._replace(relation="remove_one")  # these risks are about a record that was used
    beside_it = {"target_posterior": "prior", "target_tpr": "at_fpr", "target_reconstruction": "baseline"}[name]
    _require_above(name, flat[name], beside_it, flat[beside_it], shape)
    fpr = flat["baseline" if name == "target_reconstruction" else "at_fpr"]
    wanted = _rate_of_posterior(flat[name], flat["prior"], fpr) if name == "target_posterior" else flat[name]
    asked = (wanted < 1.0) & (wanted > fpr)
    if goal.unknown == "noise_multiplier":  # where the record is sampled this rarely, every noise meets the target
        seldom = asked & (chance_of_a_sample(goal.known) < (wanted - fpr) * (1.0 - 1e-6))
        asked &= ~seldom
    else:
        seldom = np.zeros(wanted.shape, bool)
    # The best eps is about `-mu (ndtri(fpr) + ndtri(wanted))/2`, as for mu-Gaussian DP: negative where
    # `fpr + wanted > 1`. These rows are `mirrored`: the data sets are exchanged, so that the best eps is positive.
    mirrored = asked & (wanted - 0.5 > 0.5 - fpr)
    # Rows not `asked` need no search for eps: a wanted rate of 1 allows every delta, a rate of at most fpr allows none.
    epsilon, delta, pieces = np.zeros(wanted.shape), np.where(wanted >= 1.0, 1.0, -1.0), []
    delta = np.where(seldom, _at_rate(goal, epsilon, wanted, fpr).delta, delta)
    rows = np.flatnonzero(~asked)
    if rows.size or not asked.size:
        pieces.append((rows, _value_for(goal._replace(epsilon=epsilon, delta=delta).take(rows))))
    rows = np.flatnonzero(asked & ~mirrored)
    if rows.size:
        one, epsilon[rows] = _value_for_rate(goal.take(rows), wanted[rows], fpr[rows])
        pieces.append((rows, one))
    rows = np.flatnonzero(mirrored)
    if rows.size:
        back = goal.take(rows)._replace(relation=account.REVERSED.get(goal.relation, goal.relation))
        one, epsilon[rows] = _value_for_rate(back, 1.0 - fpr[rows], 1.0 - wanted[rows])
        pieces.append((rows, one))
    found = _together(pieces)
    high = (found.upper + np.exp(epsilon) * fpr) * (1.0 + 8.0 * ROUNDOFF)
    # A mirrored row has the best eps -x < 0, where x = `epsilon`. Its true-positive rate is at most
    # `delta(-x) + e^-x fpr = 1 - e^-x (1 - fpr - delta'(x))`. delta' is delta with the two data sets exchanged.
    missed = np.exp(-epsilon) * (1.0 - fpr - found.upper) * (1.0 - 8.0 * ROUNDOFF)
    high = np.minimum(np.where(mirrored, 1.0 - missed, high), 1.0)
    epsilon[mirrored] *= -1.0
    # a value is shown to be the best if its rate is at least `enough`
    enough = wanted - 2e-3 * np.minimum(wanted - fpr, 1.0 - wanted)
    low = _rates_at_least(goal, found.value, epsilon, wanted, fpr, np.where(found.status == "ok", enough, 0.0))
    rows = np.flatnonzero((found.status == "ok") & asked)
    best = low[rows] >= enough[rows]
    doubtful = rows[~best]
    if doubtful.size:  # a value is also the best if one that protects slightly less misses the target
        falls = np.full(doubtful.size, goal.unknown == "noise_multiplier")
        others = beside(found.value[doubtful], falls, least_apart(goal.rtol), goal.unknown == "steps")
        columns = (column[doubtful] for column in (epsilon, wanted, fpr, wanted))
        best[~best] = _rates_at_least(goal.take(doubtful), others, *columns) > wanted[doubtful]
    conclude(found, rows, best)
    agree = ~(low > high)  # bounds that contradict each other are not used
    high = np.where(agree, high, 1.0)
    low = np.where(agree & (found.kind == "certified"), low, 0.0)
    # a bracket of a rate has the status "ok" up to a relative width of 0.02
    found.word[:] = np.where((found.word == "ok") & (high - low > 0.02 * high), "width", found.word)
    ends = np.stack([low, high, high])
    if name == "target_posterior":
        turned = zip(ends, (-1, 0, 1), strict=True)
        ends = np.stack([posterior_of(end, flat["prior"], fpr, turn) for end, turn in turned])
        ends[1] = np.clip(ends[1], ends[0], ends[2])
    return found, ends, epsilon


def _rate_of_posterior(posterior: np.ndarray, prior: np.ndarray, fpr: np.ndarray) -> np.ndarray:
    """Return the largest true-positive rate in [0, 1], rounded down, that keeps the posterior at most `posterior`."""
    # prior rate/(prior rate + (1 - prior) fpr) <= posterior, solved for the rate
    goal = posterior * (1.0 - 32.0 * ROUNDOFF)
    with np.errstate(over="ignore"):
        rate = (1.0 - prior) / prior * (goal / (1.0 - goal)) * fpr * (1.0 - 16.0 * ROUNDOFF)
    return np.minimum(rate, 1.0)


def _rates_at_least(
    goal: Goal, values: np.ndarray, epsilon: np.ndarray, wanted: np.ndarray, fpr: np.ndarray, enough: np.ndarray
) -> np.ndarray:
    """Return lower bounds of the true-positive rate at `fpr` for `values`, from delta at three eps near `epsilon`."""
    low, left = fpr.copy(), np.isfinite(values)
    for about, rtol in LOWER_ENDS:
        # with both directions, delta is the larger of the directions' deltas, so `leading` alone gives a lower bound
        for sign, leading in ((1.0, "remove_one"), (-1.0, "add_one")):
            rows = np.flatnonzero(left & (np.where(epsilon < 0.0, -1.0, 1.0) == sign))
            if rows.size == 0:
                continue
            mu = -ndtri(fpr[rows]) + ndtri(np.minimum(wanted[rows], 1.0 - 1e-12))
            mu = np.clip(np.nan_to_num(mu, nan=1.0), 1e-9, 50.0)
            place = Place(sign * np.maximum(np.abs(epsilon[rows]), about * mu), mu)
            relation = goal.relation if goal.relation in account.REVERSED else leading
            run = goal.run(rows, values[rows])
            deltas = lambda at, _, run=run, asked=(relation, rtol): deltas_about(run, at, *asked)
            low[rows] = np.maximum(rate_at(deltas, place, fpr[rows], about).lower, low[rows])
        left &= low < enough
    return low


class RateSolve(NamedTuple):
    """The result of solving for eps and the noise together, row by row."""

    noise: np.ndarray
    slope: np.ndarray  # d log delta/d log noise
    rung: np.ndarray  # index in PLAIN_FOR_DELTA of the contour size
    fits: np.ndarray  # whether at most `NEARLY` times the contour's nodes are needed; if not, eps is only a guess
    close: np.ndarray  # whether the certified search can start at this noise; if not, it is solved for again


def _value_for_rate(goal: Goal, rate: np.ndarray, fpr: np.ndarray) -> tuple[BestValues, np.ndarray]:
    """Return a value with a certified true-positive rate of at most `rate` at `fpr`, and the eps that shows this."""
    # Every eps gives such a value; the best eps gives the least protective one. `gaussian` is best for mu-Gaussian DP.
    mu = ndtri(rate) - ndtri(fpr)
    gaussian = np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0)
    epsilon, near, solved = gaussian.copy(), np.ones(mu.size), None
    settled = sure = np.zeros(mu.size, bool)
    if goal.unknown == "noise_multiplier":
        solved, settled = _by_contour(goal, rate, fpr, mu, epsilon)
        near = solved.noise.copy()
        full = goal.known["sampling_probability"] == 1.0  # such runs are mu-Gaussian DP, so `gaussian` is exact
        solved.close[full] = False
        near[full] = np.clip(np.sqrt(goal.known["steps"]) / np.maximum(mu, 1e-300), *NOISE_RANGE)[full]
        epsilon[full] = gaussian[full]
        known = full | (goal.known["sampling_probability"] == 0.0)  # if nothing is sampled, any eps will do
        settled, sure = settled | known, solved.fits | known

    def by_rounds(rows: np.ndarray) -> None:
        epsilon[rows], near[rows] = _by_rounds(goal.take(rows), rate[rows], fpr[rows], mu[rows], gaussian[rows])

    left = np.flatnonzero(~settled)
    if left.size:
        by_rounds(left)
    found = _value_for(_at_rate(goal, epsilon, rate, fpr)._replace(near=near), solved)
    with np.errstate(all="ignore"):  # a comparison with NaN is False, so that a row without a noise is in `again`
        # a row whose contour had too few nodes (`~sure`) is solved again, unless its noise and the certified one agree
        again = np.flatnonzero(~(np.abs(np.log(found.value / near)) <= 3e-4) & settled & ~sure)
    if again.size:  # of the two eps found, the one that needs less noise is kept
        first = epsilon[again].copy()
        by_rounds(again)
        some = _at_rate(goal.take(again), epsilon[again], rate[again], fpr[again])
        second = _value_for(some._replace(near=near[again]))
        first_holds, holds = (np.isin(x, CLAIMED) for x in (found.status[again], second.status))
        better = holds & ~(first_holds & (found.value[again] <= second.value))
        epsilon[again] = np.where(better, epsilon[again], first)
        for column, new in zip(found, second, strict=True):
            column[again[better]] = new[better]
    return found, epsilon


def _at_rate(goal: Goal, epsilon: np.ndarray, rate: np.ndarray, fpr: np.ndarray) -> Goal:
    """Return the goal with this epsilon, and with the target delta `rate - e^eps fpr`, rounded down."""
    delta = rate * (1.0 - 16.0 * ROUNDOFF) - np.exp(epsilon) * fpr * (1.0 + 16.0 * ROUNDOFF)
    return goal._replace(epsilon=epsilon.copy(), delta=delta)


ATTEMPTS = ((8, TOLERANCE), (14, TOLERANCE), (14, 1e-11))
"""For each contour size in PLAIN_FOR_DELTA: the number of steps that the kernel takes, and the size of the terms that
the contour may cut off, relative to an estimate of delta. The estimate is poor in rows that get to the last pair."""


@np.errstate(all="ignore")  # guesses that are NaN are not used
def _by_contour(
    goal: Goal, rate: np.ndarray, fpr: np.ndarray, mu: np.ndarray, epsilon: np.ndarray, guess: bool = False
) -> tuple[RateSolve, np.ndarray]:
    """Solve for the noise and the best eps together. Return the solution, and which rows have one.

    `epsilon` holds the best eps of mu-Gaussian DP, and is overwritten by the best eps of the solution.
    """
    q, steps = goal.known["sampling_probability"], goal.known["steps"]
    settled, fits, close = np.zeros((3, q.size), bool)
    solved = RateSolve(np.ones(q.size), np.zeros(q.size), np.zeros(q.size, int), fits, close)
    x = np.clip(np.nan_to_num(-0.5 * np.log(np.log1p(mu**2 / (q**2 * steps)))), *np.log(NOISE_RANGE))
    # mu-Gaussian DP gives the first guess of the saddle point c: `share/(1 - share)`, which is e^eps fpr/delta
    share = np.clip(np.exp(epsilon) * fpr / rate, 0.01, 0.99)
    arguments = (
        np.full(q.size, -1.0 if goal.relation == "add_one" else 1.0),
        np.log(np.maximum(q, 1e-300)),
        np.log(steps),
        x,
        share / (1.0 - share),
        np.log(rate),
        np.log(fpr),
    )
    due = np.where(q > 0.0, 0, len(ATTEMPTS))
    for step, (rung, (steps_there, tolerance)) in enumerate(zip(PLAIN_FOR_DELTA, ATTEMPTS, strict=True)):
        rows = np.flatnonzero(due == step)
        if rows.size == 0:
            continue
        part = *(column[rows] for column in arguments), np.full(rows.size, np.log(tolerance))
        static = {"points": rung.points, "count": rung.nodes, "steps": steps_there}
        at, x, moved, off, slope, need = evaluate(calibration.solve_rate, part, rows.size, rung.chunk, **static)
        fits, last = need <= NEARLY * rung.nodes, step == len(ATTEMPTS) - 1
        # `moved` is the saddle point c times the last step of eps. The step changes the noise by about `moved` squared.
        # On the last rung a row may need up to 25 times the rung's nodes, since the terms cut off hardly change eps.
        good = (moved < 0.01) & (fits | (last & (need <= 25.0 * rung.nodes))) & np.isfinite(at)
        # at an end of the range of eps or x, a small last step does not show that the row is solved
        inside = at < np.log(rate[rows] / fpr[rows]) + 2.0 * np.log(calibration.LARGEST_SHARE)
        inside &= (x > np.log(NOISE_RANGE[0])) & (x < np.log(NOISE_RANGE[1]))
        good &= inside
        # `off` is the last step of x; if it is not below 1e-4, only the eps is kept, and the noise is solved for again
        close = good & fits & (np.abs(off) < 1e-4) & (slope < 0.0)
        following = np.maximum(np.searchsorted([NEARLY * each.nodes for each in PLAIN_FOR_DELTA[:-1]], need), step + 1)
        # With `guess`, a row that needs at most 8 times the first attempt's nodes keeps this result, and skips the last
        # attempt, which is usually less close.
        kept = good | ((guess and step == 0) & inside & (slope < 0.0) & (need <= 8.0 * rung.nodes))
        due[rows] = np.where(good | (kept & (following == len(ATTEMPTS) - 1)), len(ATTEMPTS), following)
        for column, new in zip(solved, (np.exp(x), slope, np.full(rows.size, step), fits, close), strict=True):
            column[rows[kept]] = new[kept]
        epsilon[rows[kept]] = at[kept]
        settled[rows[kept]] = True
    return solved, settled


def _by_rounds(
    goal: Goal, rate: np.ndarray, fpr: np.ndarray, mu: np.ndarray, epsilon: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best eps and the unknown's value. Each round solves for the value, then for this value's best eps."""
    rows, near = np.arange(rate.size), np.ones(rate.size)
    side = "add_one" if goal.relation == "add_one" else "remove_one"  # usually the direction with the larger delta

    # one or two steps have engines of their own; the lattice is never worth its time here
    engine = "auto" if np.all(goal.known.get("steps", np.full(1, np.inf)) <= 2.0) else "contour"

    def deltas(at: np.ndarray, some: np.ndarray) -> Bounds:
        run, effort = goal.run(some, near[some]), account.effort_of_search(1e-3)
        return by_parts(MechanismQuestion("delta", run, np.maximum(at, 0.0), side, effort, engine))

    for turn in range(3):  # two rounds would give too rough an eps for runs of one or two steps with a small target
        begin = near if turn else None
        rough = _at_rate(goal, epsilon, rate, fpr)._replace(rtol=1e-4, hint=no_hint(rate.size), near=begin)
        near = np.clip(np.exp(started(rough, rows).x), *goal.limits)
        near = np.maximum(np.round(near), 1.0) if goal.unknown == "steps" else near
        found = best_epsilon(deltas, fpr, Place(epsilon, mu)).epsilon
        # eps is limited so that the target delta, rate - e^eps fpr, stays positive
        epsilon = np.clip(found, 0.0, np.maximum(np.log(rate / fpr) * 0.999, 0.0))
    return epsilon, near


TRIES = ((1, 1e-2), (4, 1e-8))
"""(`times`, `tolerance`) for `by_tangents`; the second try is made if the first bracket is too wide. Nearly Gaussian
runs need more tangents. Rare and large losses need a smaller tolerance, as the contour cuts off more than estimated."""
BELOW, ABOVE = 53, 8
"""Numbers of tangents at eps below and above the estimated best eps. The best eps may be above its estimate."""
FARTHEST = 0.12
"""The largest eps of a tangent is (1 + FARTHEST) times the estimated best eps."""


def _to_mu(goal: Goal, name: str, flat: dict[str, np.ndarray], shape: tuple[int, ...]) -> Risk:
    """Return the least protective value whose mu is at most the target, its bracket of mu, and its best eps."""
    goal = goal._replace(relation="add_or_remove_one")  # mu holds in both directions, whatever the relation
    wanted, floor = flat[name], flat["above_fpr"]
    first, place = _start_for_mu(goal, wanted, floor)
    epsilon, width = np.full(wanted.shape, np.nan), 0.5 * goal.rtol
    made = first.x.copy()  # logarithm of the value for which `place` was found

    def deltas_at(mine: np.ndarray, values: np.ndarray) -> Deltas:
        def deltas(at: np.ndarray, some: np.ndarray) -> Bounds:
            run = goal.run(mine[some], values[some])
            return account.profile_at(run, at, relation=goal.relation, rtol=min(1e-4, goal.rtol), in_search=True)

        return deltas

    def evaluate_mu(rows: np.ndarray, values: np.ndarray) -> Bounds:
        fields = {name: column[rows] for name, column in goal.known.items()} | {goal.unknown: values}
        mu = np.sqrt(fields["steps"]) / fields["noise_multiplier"]
        ends = np.stack([mu * (1.0 - 8.0 * ROUNDOFF), mu, mu * (1.0 + 8.0 * ROUNDOFF)])
        epsilon[rows] = mu * (-ndtri(floor[rows]) - 0.5 * mu)
        status = np.full(rows.size, "ok", "<U16")
        left = np.flatnonzero(fields["sampling_probability"] < 1.0)  # at probability 1 mu is known exactly
        if left.size:
            mine, x = rows[left], np.log(values[left])
            # the best eps is searched for again where log(value) has changed by more than 0.2 since the last call
            far = np.flatnonzero(~(np.abs(x - made[mine]) <= 0.2))
            if far.size:
                again = best_epsilon(deltas_at(mine[far], values[left][far]), floor[mine[far]])
                place.epsilon[mine[far]], place.deviation[mine[far]] = again
            made[mine] = x
            for times, tolerance in TRIES:
                mine = rows[left]
                there = Place(place.epsilon[mine], place.deviation[mine])
                run = goal.run(mine, values[left])
                low, high, best = by_tangents(run, goal.relation, floor[mine], there, width, times, tolerance)
                ends[:, left], epsilon[mine] = (low, high, high), there.epsilon
                wide = ~(np.isfinite(high) & (low <= high) & (high - low <= width * high))
                left = left[wide]
                place.epsilon[rows[left]] = np.where(np.isfinite(best), best, there.epsilon)[wide]
                if not left.size:
                    break
        if left.size:
            mine = rows[left]
            there = Place(place.epsilon[mine], place.deviation[mine])
            fit = gaussian_fit(deltas_at(mine, values[left]), floor[mine], "certified", there, width)
            ends[:, left] = fit.mu.lower, fit.mu.estimate, fit.mu.upper
            status[left], epsilon[mine], place.epsilon[mine] = fit.mu.status, fit.epsilon, fit.epsilon
        return Bounds(ends[0], ends[1], ends[2], "certified", status, "tradeoff")

    search = search_for(goal, evaluate_mu)._replace(target=wanted)
    found = certified_search(search, lambda rows: Start(*(column[rows] for column in first)))
    return found, np.stack([found.lower, found.estimate, found.upper]), epsilon


def _start_for_mu(goal: Goal, wanted: np.ndarray, floor: np.ndarray) -> tuple[Start, Place]:
    """Estimate the unknown's value for mu = `wanted`, and the best eps for the false-positive rate `floor`."""
    nothing = np.zeros(wanted.size)
    start = Start(nothing.copy(), nothing.copy(), nothing.astype(bool))
    with np.errstate(all="ignore"):
        rate = np.clip(ndtr(ndtri(floor) + wanted), np.minimum(1.001 * floor, 0.9), 1.0 - 1e-12)
        mu = ndtri(rate) - ndtri(floor)
        place = Place(np.maximum(-mu * (ndtri(floor) + 0.5 * mu), 0.0), np.clip(wanted, 1e-9, 50.0))
        if goal.unknown == "noise_multiplier":
            solved, start.solved[:] = _by_contour(goal, rate, floor, mu, place.epsilon, guess=True)
            # d mu/d log(noise), from `solved.slope` and mu = ndtri(delta + e^eps floor) - ndtri(floor)
            left_over = rate - np.exp(place.epsilon) * floor
            slope = np.sqrt(2.0 * np.pi) * np.exp(0.5 * ndtri(rate) ** 2) * left_over * solved.slope
            start.solved[:] &= (slope < 0.0) & np.isfinite(slope)
            start.slope[:] = np.where(start.solved, slope / wanted, 0.0)
            start.x[:] = np.log(solved.noise) - np.where(start.solved, AIM * goal.rtol * wanted / slope, 0.0)
        left = np.flatnonzero(~start.solved)
        if left.size:
            some = goal._replace(rtol=max(goal.rtol, 1e-6)).take(left)
            found, place.epsilon[left] = _value_for_rate(some, rate[left], floor[left])
            middle = np.sqrt(goal.limits[0]) * np.sqrt(goal.limits[1])
            start.x[left] = np.log(np.where(np.isfinite(found.value), found.value, middle))
    return start, place


@np.errstate(invalid="ignore")  # comparisons with NaN are False
def by_tangents(
    run: Mechanism, relation: str, floor: np.ndarray, place: Place, width: float, times: int, tolerance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bounds of mu at rates >= `floor`, by tangents, and estimates of the best eps (`place` holds earlier ones).

    The relation must have both directions, so that delta is the same if the two data sets are exchanged.
    """
    near = three_places(place, KNOWN_WIDTH)
    # The rate `floor` usually needs the largest mu, so the tangents are densest at the best eps of `floor`.
    # The tangents' distances from this eps grow as 1, 4, 9.
    below = 1.0 - np.linspace(1.0, 0.0, times * BELOW + 1)[:-1] ** 2
    above = 1.0 + FARTHEST * np.linspace(0.0, 1.0, times * ABOVE + 1)[1:] ** 2
    epsilon = np.concatenate([place.epsilon * np.append(below, above)[:, None], near])
    order = np.argsort(epsilon, axis=0, kind="stable")
    epsilon, at_floor = np.take_along_axis(epsilon, order, axis=0), order >= times * (BELOW + ABOVE)
    ends = deltas_along(run, place.epsilon, epsilon, at_floor, relation, width, tolerance)
    back = np.argsort(order, axis=0)[-3:]
    low, high = (np.take_along_axis(end, back, axis=0) for end in ends)
    rate = rate_from_three(near, Answer(low, high, high), place, floor, KNOWN_WIDTH)
    upper = largest_mu(np.stack([epsilon, *ends]), floor)[0]
    return np.nan_to_num(least_mu(rate, ends[0][0], floor)), upper, _lowest(epsilon, ends[1], floor)


@np.errstate(all="ignore")  # an eps that is NaN is not used
def _lowest(epsilon: np.ndarray, delta: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Estimate the eps at which `delta + e^eps floor` is least, by a parabola through three values."""
    rates = delta + np.exp(epsilon) * floor
    best = np.clip(np.argmin(rates, axis=0), 2, epsilon.shape[0] - 3)
    # not direct neighbours, whose values may differ by rounding alone
    x, y = (np.take_along_axis(v, best + np.array([-2, 0, 2])[:, None], axis=0) for v in (epsilon, rates))
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    bend = (right - left) / (x[2] - x[0])
    found = 0.5 * (x[0] + x[1]) - 0.5 * left / bend
    return np.where((bend > 0.0) & (found > 0.0), np.clip(found, 0.8 * x[0], 1.2 * x[2]), x[1])
