"""Calibration: the noise multiplier, the number of steps or the sampling probability that meets a target.

Every value returned is the safe end: it is evaluated again with the certified engines, and `epsilon.upper <=
target_epsilon` holds for each.  A fast path solves the whole batch with fixed iteration counts; what it misses
(few expected hits, targets at the edge of what is possible) is bracketed with the certified engines themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxacct import account, solvers
from jaxacct.bounds import Bounds
from jaxacct.engines import programs
from jaxacct.engines.contour import no_hint
from jaxacct.guess import Goal
from jaxacct.mechanisms import dp_sgd
from jaxacct.options import GIBIBYTE, SIDED, options
from jaxacct.validation import (
    COUNT,
    DELTA,
    POSITIVE,
    PROBABILITY,
    Constraint,
    broadcast_shape,
    check,
    check_one,
    choice,
    refuse_tracers,
)

NOISE_RANGE = (0.1, 1e6)
"""Noise multipliers that are searched."""
RATE_RANGE = (1e-12, 1.0)
"""Sampling probabilities that are searched."""
MAX_STEPS = 10**9
"""The largest number of steps that is searched, unless the call says otherwise."""
LEAST_RTOL = 1e-7
"""The smallest rtol: brackets narrower than that cannot be relied on to be found."""

_CONSTRAINTS: dict[str, Constraint] = {
    "noise_multiplier": POSITIVE,
    "sampling_probability": PROBABILITY,
    "steps": COUNT,
}


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibrated values with the certified epsilon they give.

    value : array of the batch shape; NaN where `ok` is False.
    epsilon : Bounds at that value; `epsilon.upper <= target_epsilon` wherever `ok`.
    status : "ok", "not_binding" (every searched value meets the target; the value is the end of the search
        range), or "infeasible_..." (`jaxacct.explain(status)` says what would help).
    """

    value: Any
    epsilon: Bounds
    status: Any
    ok: Any


def calibrate_noise_multiplier(
    target_epsilon: Any,
    target_delta: Any,
    sampling_probability: Any,
    steps: Any,
    *,
    repetitions: Any = None,
    candidates: str = "iid",
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
) -> Calibration:
    """The smallest noise multiplier for which Poisson sampled DP-SGD meets (target_epsilon, target_delta).

    All arguments broadcast; thousands of configurations are solved in one call.  The neighbouring relation is
    add/remove of one record unless `relation` says otherwise, and the noise multiplier is relative to the clip
    norm.  The certified epsilon at the value lies within `rtol` (relative) below the target.

    repetitions : a law of K (`jaxacct.selection`), which broadcasts too.  Then the target is met by the whole private
    selection, running K times and releasing the best by any score, not only by a single run; the value is within
    about .1 % of the smallest one, and targets below .01, where the bracket of a selection is wide, may be found
    infeasible.  Rows are solved one by one; with sampling below 1 every noise tried takes half a minute or more.
    candidates : "iid" or "adaptive", what is assumed of them (`jaxacct.selection.select`).

    Raises InputError for invalid values; infeasible targets do not raise (see `Calibration.status`).

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_multiplier(2.0, 1e-5, sampling_probability=0.01, steps=10_000)
    >>> round(float(c.value), 3), bool(c.epsilon.upper <= 2.0)
    (2.127, True)
    """
    return _calibrate(
        "noise_multiplier",
        {"sampling_probability": sampling_probability, "steps": steps},
        target_epsilon,
        target_delta,
        relation,
        rtol,
        NOISE_RANGE,
        repetitions,
        candidates,
    )


def calibrate_sampling_probability(
    target_epsilon: Any,
    target_delta: Any,
    noise_multiplier: Any,
    steps: Any,
    *,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
) -> Calibration:
    """The largest sampling probability for which Poisson sampled DP-SGD meets the target.

    Where even the full batch meets it, the value is 1 with status "not_binding".  Otherwise as
    `calibrate_noise_multiplier`.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_sampling_probability(2.0, 1e-5, noise_multiplier=2.0, steps=10_000)
    >>> round(float(c.value), 5), bool(c.ok)
    (0.00932, True)
    """
    return _calibrate(
        "sampling_probability",
        {"noise_multiplier": noise_multiplier, "steps": steps},
        target_epsilon,
        target_delta,
        relation,
        rtol,
        RATE_RANGE,
    )


def calibrate_steps(
    target_epsilon: Any,
    target_delta: Any,
    noise_multiplier: Any,
    sampling_probability: Any,
    *,
    max_steps: int = MAX_STEPS,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
) -> Calibration:
    """The largest number of steps whose certified epsilon meets the target; a whole number (as float64).

    Where `max_steps` meets it, the value is `max_steps` with status "not_binding"; where one step already
    exceeds it, the status is "infeasible_steps".

    >>> import jaxacct as ja
    >>> c = ja.calibrate_steps(2.0, 1e-5, noise_multiplier=2.0, sampling_probability=0.01)
    >>> int(c.value), bool(c.epsilon.upper <= 2.0)
    (8681, True)
    """
    limit = check_one("max_steps", max_steps, COUNT, "one limit serves the whole batch")
    return _calibrate(
        "steps",
        {"noise_multiplier": noise_multiplier, "sampling_probability": sampling_probability},
        target_epsilon,
        target_delta,
        relation,
        rtol,
        (1.0, float(limit)),
    )


def _calibrate(
    unknown: str,
    known: dict[str, Any],
    target_epsilon: Any,
    target_delta: Any,
    relation: str,
    rtol: float,
    limits: tuple[float, float],
    law: Any = None,
    candidates: str = "iid",
) -> Calibration:
    call = f"ja.calibrate_{unknown}"
    given = {"target_epsilon": target_epsilon, "target_delta": target_delta, **known}
    refuse_tracers(call, "jaxacct.kernels.calibration", **given)
    relation, _, rtol, _ = options(relation=relation, rtol=rtol, relations=SIDED, least_rtol=LEAST_RTOL)
    rules = {"target_epsilon": POSITIVE, "target_delta": DELTA, **_CONSTRAINTS}
    checked = {name: check(name, value, rules[name]) for name, value in given.items()}
    shapes = {name: np.shape(value) for name, value in checked.items()}
    if law is not None:
        from jaxacct.selection import calibrate  # what rests on this module, where it is asked for
        from jaxacct.selection.mechanism import CANDIDATES

        choice("candidates", candidates, CANDIDATES)
        shapes["repetitions"] = calibrate.law_shape(law)
    shape = broadcast_shape(shapes)
    flat = {k: np.broadcast_to(np.asarray(v, np.float64), shape).reshape(-1) for k, v in checked.items()}
    goal = Goal(
        unknown=unknown,
        epsilon=flat["target_epsilon"],
        delta=flat["target_delta"],
        known={name: flat[name] for name in known},
        limits=limits,
        relation=relation,
        rtol=rtol,
        hint=no_hint(flat["target_epsilon"].size),
    )
    with programs.large(goal.epsilon.size):
        solved = solvers.solve(goal, _certify) if law is None else calibrate.solve(goal, law, shape, candidates)
        value, status, bounds = solved
    ok = np.isin(status, ("ok", "not_binding"))
    reshaped = Bounds(*(np.asarray(a).reshape(shape) for a in bounds))
    fine = ok.reshape(shape)
    out, word = value.reshape(shape), status.reshape(shape)
    return Calibration(out if shape else out[()], reshaped, word if shape else str(word), fine if shape else fine[()])


def _certify(goal: Goal, rows: np.ndarray, values: np.ndarray) -> Bounds:
    fields = {name: column[rows] for name, column in goal.known.items()} | {goal.unknown: values}
    effort = account.Effort(0.25 * goal.rtol, 0.25 * goal.rtol, 0.01 * goal.rtol, 0.2 * goal.rtol)
    hint = jax.tree.map(lambda known: known[rows], goal.hint)
    run = dp_sgd(**fields)
    return account.bracket_epsilon(run, goal.delta[rows], goal.relation, "auto", effort, GIBIBYTE, hint)
