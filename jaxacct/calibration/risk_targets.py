"""The targets of a calibration: which one is given, with what belongs to it, checked and brought to one shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import OPEN_PROBABILITY, POSITIVE, Constraint, InputError, broadcast_shape, check

__all__ = ["BESIDE", "RULES", "TARGETS", "USUAL_FLOOR", "RiskTarget", "above", "flat_values", "given_target", "rate_of"]

TARGETS = (
    "target_advantage",
    "target_tpr",
    "target_bayes_success",
    "target_posterior",
    "target_reconstruction",
    "target_mu",
)
"""Risks that a calibration can be asked to keep."""
BESIDE = {
    "target_tpr": ("at_fpr",),
    "target_bayes_success": ("prior",),
    "target_posterior": ("prior", "at_fpr"),
    "target_reconstruction": ("baseline",),
    "target_mu": ("above_fpr",),
}
"""What belongs to each of them."""
USUAL_FLOOR = 1e-10
"""`above_fpr` where it is left out."""
RULES: dict[str, Constraint] = dict.fromkeys((*TARGETS[:5], "at_fpr", "prior", "baseline"), OPEN_PROBABILITY) | {
    "target_mu": POSITIVE,
    "above_fpr": Constraint(
        "use a floor such as 1e-10, which is part of the claim", 0, 0.5, lower_open=True, upper_open=True
    ),
}
"""What each may be."""


class RiskTarget(NamedTuple):
    """One target, by name, with its values and those of what belongs to it."""

    name: str
    values: dict[str, Any]


def given_target(target_epsilon: Any, target_delta: Any, risks: dict[str, Any]) -> RiskTarget | None:
    """The one risk that is a target, None where epsilon with delta is; InputError, one line, where it is not one."""
    named = [name for name in TARGETS if risks[name] is not None]
    wanted = [*(["target_epsilon"] if target_epsilon is not None or target_delta is not None else []), *named]
    choices = f"target_epsilon with target_delta, or one of {', '.join(TARGETS)}"
    if len(wanted) != 1:
        which = f" ({', '.join(wanted)})" if wanted else ""
        raise InputError(f"{len(wanted)} targets are given{which}; give {choices}")
    belongs = BESIDE.get(wanted[0], ())
    for other in ("at_fpr", "prior", "baseline", "above_fpr"):
        if risks[other] is not None and other not in belongs:
            owners = " or ".join(name for name, more in BESIDE.items() if other in more)
            raise InputError(f"{other} belongs to {owners}; leave it out beside {wanted[0]}")
        if risks[other] is None and other in belongs and other != "above_fpr":
            raise InputError(f"{wanted[0]} needs {other}; give both")
    if not named:
        for name, value, other in (
            ("target_epsilon", target_epsilon, "target_delta"),
            ("target_delta", target_delta, "target_epsilon"),
        ):
            if value is None:
                raise InputError(f"{other} needs {name}; give both")
        return None
    values = {name: risks[name] for name in (named[0], *belongs)}
    if "above_fpr" in belongs and values["above_fpr"] is None:
        values["above_fpr"] = USUAL_FLOOR
    return RiskTarget(named[0], values)


def flat_values(
    values: dict[str, Any], known: dict[str, Any], rules: dict[str, Constraint], more: dict[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """All numbers checked, broadcast together and flat; and the shape of the batch."""
    rules = rules | RULES
    checked = {name: check(name, value, rules[name]) for name, value in (values | known).items()}
    shape = broadcast_shape({name: np.shape(value) for name, value in checked.items()} | more)
    return {k: np.broadcast_to(np.asarray(v, np.float64), shape).reshape(-1) for k, v in checked.items()}, shape


def rate_of(name: str, flat: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(true-positive rate rounded down, false-positive rate) that a target comes to; a rate of 1 asks nothing.

    posterior: `p t/(p t + (1 - p) a) <= s` where `t <= s (1 - p) a/((1 - s) p)`.
    """
    if name == "target_tpr":
        return flat[name], flat["at_fpr"]
    if name == "target_reconstruction":
        return flat[name], flat["baseline"]
    prior, fpr, goal = flat["prior"], flat["at_fpr"], flat[name] * (1.0 - 32.0 * ROUNDOFF)
    with np.errstate(over="ignore"):
        rate = (1.0 - prior) / prior * (goal / (1.0 - goal)) * fpr * (1.0 - 16.0 * ROUNDOFF)
    return np.minimum(rate, 1.0), fpr


def above(name: str, value: np.ndarray, least: str, floor: np.ndarray, shape: tuple[int, ...]) -> None:
    """InputError where a target is at most what holds without any output."""
    low = np.flatnonzero(~(value > floor))
    if low.size:
        index = f"[{', '.join(map(str, np.unravel_index(low[0], shape)))}]" if shape else ""
        raise InputError(
            f"{name}{index} = {value[low[0]]:g} must be above {least} = {floor[low[0]]:g}, the risk without output; "
            f"use a larger {name.replace('_', ' ')}"
        )
