"""One parameter of Poisson sampled DP-SGD solved for: noise multiplier, sampling probability or number of steps.

Fast vectorised solves say where to begin (starting_points.py); the certified search does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxacct.accounting import account
from jaxacct.accounting.directions import answer
from jaxacct.calibration.search import CLAIMED, Found, Search, Start, certified_search
from jaxacct.calibration.starting_points import Goal, calibration_start
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.text import plain_record
from jaxacct.core.validation import (
    DELTA,
    POSITIVE,
    Constraint,
    broadcast_shape,
    check,
    options,
    refuse_tracers,
)
from jaxacct.engines.backend import job
from jaxacct.engines.contour import no_hint
from jaxacct.engines.protocol import MechanismQuestion
from jaxacct.mechanisms.dp_sgd_run import NUMBERS, dp_sgd

__all__ = ["Calibration", "calibrated", "certified", "checked_goal", "result", "search_for", "started"]

RATE_RANGE = (1e-12, 1.0)
"""Sampling probabilities that are searched."""
MAX_STEPS = 10**9
"""The largest number of steps that is searched, unless the call says otherwise."""
LEAST_RTOL = 1e-7
"""The smallest rtol: brackets narrower than that cannot be relied on to be found."""
INFEASIBLE = {
    "noise_multiplier": "infeasible_noise",
    "sampling_probability": "infeasible_rate",
    "steps": "infeasible_steps",
}
"""Status of a row in which no value holds."""
RULES: dict[str, Constraint] = {"target_epsilon": POSITIVE, "target_delta": DELTA, **NUMBERS}


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibrated values with the certified epsilon that they give; made by the calibrations.

    Parameters
    ----------
    value : array of the batch shape
        NaN where `ok` is False.
    epsilon : Bounds
        At that value; `epsilon.upper <= target_epsilon` wherever `ok`.  For a risk as target: the eps of the privacy
        profile from which the risk follows, all three ends the same; at this eps delta was evaluated.
    status : str or array of str
        "ok" (the value meets the target, and either a slightly less private one is shown to miss it, or epsilon is
        within rtol of it), "not_binding" (every searched value meets the target; the value is the end of the search
        range), "loose" (the value meets the target, but neither is shown), or
        "infeasible_..." (`jaxacct.explain(status)` says what would help).
    ok : bool or array of bool
        Whether there is a value.
    best : bool or array of bool
        Whether the value is shown to be the best one, up to a relative distance of 10 rtol and at most max(0.01, rtol).
        It is shown if epsilon is monotone in the value, and either a value that much less private misses the target, or
        epsilon is within rtol of the target and changes with the value at a usual rate.  For an epsilon of kind "bound"
        it is the best value for that bound; with a risk as target the risk takes the place of epsilon.  False at
        "not_binding", unless the value is a sampling probability of 1.
    risk : Bounds, or None where epsilon is the target
        The risk at that value; `risk.upper` is at most the target wherever `ok`, NaN elsewhere.
    relation : str
        The neighbouring relation for which epsilon and the risk hold.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_multiplier([1e-6, 2.0], [1e-30, 1e-5], 1.0, 1)
    >>> c.ok.tolist(), c.status.tolist(), c.value.round(3).tolist()
    ([False, True], ['infeasible_noise', 'ok'], [nan, 1.994])
    """

    value: Any
    epsilon: Bounds
    status: Any
    ok: Any
    best: Any = True
    risk: Any = None
    relation: str = field(kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain Python, ready for JSON: as `Bounds.to_dict`, which `Bounds.from_dict` reads back."""
        return plain_record(self)

    def _repr_html_(self) -> str:
        """Values in full, since a rounded one need not meet the target, with the ends of their epsilon or risk."""
        name, bounds = ("epsilon", self.epsilon) if self.risk is None else ("risk", self.risk)

        def cells(index: tuple[int, ...]) -> list[str]:
            value, status, best = (np.asarray(x)[index] for x in (self.value, self.status, self.best))
            return [repr(float(value)), f"{bounds[index]:.6g}", str(status), "yes" if best else "not known"]

        head = ("value", name, "status", "best")
        return markup.batch("Calibration", head, np.shape(self.value), cells)


def checked_goal(
    unknown: str,
    target_epsilon: Any,
    target_delta: Any,
    known: dict[str, Any],
    relation: str,
    limits: tuple[float, float],
    rtol: float,
    backend: str,
    more_shapes: dict[str, tuple[int, ...]],
) -> tuple[Goal, tuple[int, ...]]:
    """The arguments of a public call as a flat goal, and the shape of the batch; InputError where they are refused."""
    given = {"target_epsilon": target_epsilon, "target_delta": target_delta, **known}
    refuse_tracers(f"ja.calibrate_{unknown}", "jaxacct.kernels.calibration", **given)
    chosen = options(relation=relation, rtol=rtol, backend=backend, least_rtol=LEAST_RTOL)
    checked = {name: check(name, value, RULES[name]) for name, value in given.items()}
    shape = broadcast_shape({name: np.shape(value) for name, value in checked.items()} | more_shapes)
    flat = {k: np.broadcast_to(np.asarray(v, np.float64), shape).reshape(-1) for k, v in checked.items()}
    epsilon, delta = flat.pop("target_epsilon"), flat.pop("target_delta")
    return Goal(unknown, epsilon, delta, flat, limits, chosen.relation, chosen.rtol, no_hint(epsilon.size)), shape


def calibrated(
    unknown: str,
    target_epsilon: Any,
    target_delta: Any,
    known: dict[str, Any],
    relation: str,
    limits: tuple[float, float],
    rtol: float,
    backend: str,
) -> Calibration:
    """The value of `unknown` that meets the target for DP-SGD with the other parameters known."""
    goal, shape = checked_goal(unknown, target_epsilon, target_delta, known, relation, limits, rtol, backend, {})
    with job(goal.epsilon.size, backend):
        search = search_for(goal, lambda rows, values: certified(goal, goal.relation, rows, values))
        if goal.relation == "add_or_remove_one":  # remove is the larger direction as a rule
            search = search._replace(leader=lambda rows, values: certified(goal, "remove_one", rows, values))
        found = certified_search(search, lambda rows: started(goal, rows))
    return result(found, shape, goal.relation)


def search_for(goal: Goal, evaluate: Any) -> Search:
    """The search that a goal describes; which values are tried first where nothing depends on them."""
    size = goal.epsilon.size
    first = np.full(size, True) if goal.unknown == "sampling_probability" else goal.known["sampling_probability"] == 0
    return Search(
        evaluate=evaluate,
        target=goal.epsilon,
        lowest=np.full(size, goal.limits[0]),
        highest=np.full(size, goal.limits[1]),
        falls=np.full(size, goal.unknown == "noise_multiplier"),
        rtol=goal.rtol,
        whole=goal.unknown == "steps",
        infeasible=INFEASIBLE[goal.unknown],
        privates_first=first,
        all_there_is=goal.unknown == "sampling_probability" and goal.limits[1] == 1.0,
    )


def certified(goal: Goal, relation: str, rows: np.ndarray, values: np.ndarray) -> Bounds:
    """The certified epsilon of some rows at some values, as narrow as a search needs it."""
    fields = {name: column[rows] for name, column in goal.known.items()} | {goal.unknown: values}
    effort = account.effort_of_search(goal.rtol)
    hint = jax.tree.map(lambda known: known[rows], goal.hint)
    return answer(MechanismQuestion("epsilon", dp_sgd(**fields), goal.delta[rows], relation, effort, hint=hint))


def result(found: Found, shape: tuple[int, ...], relation: str, best: Any = True) -> Calibration:
    """What was found, in the shape of the batch; scalars for one configuration."""
    ok = np.isin(found.status, CLAIMED).reshape(shape)
    value, status = found.value.reshape(shape), found.status.reshape(shape)
    best = ok & best & found.shown.reshape(shape)
    if shape == ():
        return Calibration(value[()], found.bounds(shape), str(status), ok[()], best[()], relation=relation)
    return Calibration(value, found.bounds(shape), status, ok, best, relation=relation)


def started(goal: Goal, rows: np.ndarray) -> Start:
    """Where to begin; what the fast solves learn for the certificates is left in the goal's hint."""
    start, hint = calibration_start(goal, rows)
    for known, found_out in zip(jax.tree.leaves(goal.hint), jax.tree.leaves(hint), strict=True):
        known[rows] = found_out
    return start
