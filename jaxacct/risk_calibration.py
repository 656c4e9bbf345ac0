"""The least noise for which an attack succeeds no more often than a target says: advantage, true-positive rate, Bayes.

Every target follows from one certified value of the privacy profile: `delta(eps*) <= d*`.  The noise is searched for at
that eps*.  Where eps* is free (true-positive rates), any choice is valid, and the best one is looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxacct import markup
from jaxacct.bounds import Bounds
from jaxacct.certified_search import Found
from jaxacct.dp_sgd_calibration import LEAST_RTOL
from jaxacct.engines.backend import job
from jaxacct.floats import ROUNDOFF
from jaxacct.keywords import with_hints
from jaxacct.number_text import plain_record
from jaxacct.risk_search import Target, noise_for, noise_for_rate
from jaxacct.validation import (
    COUNT,
    OPEN_PROBABILITY,
    PROBABILITY,
    SIDED,
    InputError,
    broadcast_shape,
    check,
    options,
    refuse_tracers,
)

__all__ = ["RiskCalibration", "calibrate_noise_to_risk"]


@dataclass(frozen=True, eq=False)
class RiskCalibration:
    """Noise multipliers with the certified risk that they give; made by `calibrate_noise_to_risk`.

    Parameters
    ----------
    value : array of the batch shape
        NaN where `ok` is False.
    risk : Bounds
        The upper end is at most the target wherever `ok`.  For true-positive rates kind "bound": the lower end is 0.
    epsilon : array of the batch shape
        The eps of the privacy profile from which the risk follows.
    status : str or array of str
        "ok", "not_binding" or "infeasible_noise", as in `Calibration`.
    ok : bool or array of bool
        Whether there is a value.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_to_risk(1.0, 1, advantage=0.382924922548026)
    >>> round(float(c.value), 3), bool(c.risk.upper <= 0.382924922548026)
    (1.0, True)
    """

    value: Any
    risk: Bounds
    epsilon: Any
    status: Any
    ok: Any

    def to_dict(self) -> dict[str, Any]:
        """The result as plain Python, ready for JSON: as `Bounds.to_dict`, which `Bounds.from_dict` reads back."""
        return plain_record(self)

    def _repr_html_(self) -> str:
        """Values in full, since a rounded one need not meet the target, with the ends of their risk."""

        def cells(index: tuple[int, ...]) -> list[str]:
            value, epsilon, status = (np.asarray(x)[index] for x in (self.value, self.epsilon, self.status))
            return [repr(float(value)), f"{self.risk[index]:.6g}", f"{epsilon:.6g}", str(status)]

        head = ("noise multiplier", "risk", "at epsilon", "status")
        return markup.batch("Calibration to a risk", head, np.shape(self.value), cells)


@with_hints
def calibrate_noise_to_risk(
    sampling_probability: Any,
    steps: Any,
    *,
    advantage: Any = None,
    true_positive_rate: Any = None,
    at_fpr: Any = None,
    bayes_success: Any = None,
    prior: Any = None,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> RiskCalibration:
    """The smallest noise multiplier for which Poisson sampled DP-SGD keeps the risk of an attack at a target.

    Give one of three targets.  `advantage`: the largest TPR - FPR of any membership test.  `true_positive_rate` with
    `at_fpr`: the largest true positive rate at that false positive rate.  `bayes_success` with `prior`: the largest
    probability of telling rightly whether a record was there, whose prior probability is given; it is the same under
    all three relations.  All arguments broadcast.

    `advantage = delta(0)`; `tpr(a) <= delta(eps) + e^eps a` for any eps, the best of which is looked for;
    `bayes_success = 1 - r + r delta(log((1 - r)/r))` with r = min(prior, 1 - prior), delta of removing where
    prior <= 1/2 and of adding above.

    Parameters
    ----------
    sampling_probability : array_like in [0, 1]
    steps : array_like of whole numbers >= 1
    advantage : array_like in (0, 1)
    true_positive_rate : array_like in (0, 1)
        Larger than at_fpr.
    at_fpr : array_like in (0, 1)
    bayes_success : array_like in (0, 1)
        Larger than max(prior, 1 - prior), the success without any output.
    prior : array_like in (0, 1)
    relation : {"add_or_remove_one", "add_one", "remove_one"}
    rtol : float in [1e-7, 1)
        The delta from which the risk follows is at most this much (relatively) below what the target allows.
    backend : {"auto", "numpy", "xla"}
        As for `jaxacct.epsilon`.

    Returns
    -------
    RiskCalibration
        Infeasible targets do not raise: see its status.

    Raises
    ------
    InputError
        No target or more than one, invalid values, shapes that do not broadcast, or a tracer.

    References
    ----------
    jaxacct/representations/README.md, "Trade-off function and profile" and "Bayes success".

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_to_risk(0.01, 1000, true_positive_rate=0.01, at_fpr=0.001)
    >>> bool(c.ok), bool(c.risk.upper <= 0.01)
    (True, True)
    """
    given = {
        "advantage": advantage,
        "true_positive_rate": true_positive_rate,
        "bayes_success": bayes_success,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InputError(f"{len(named)} targets are given; give one of advantage, true_positive_rate, bayes_success")
    beside = {"true_positive_rate": ("at_fpr", at_fpr), "bayes_success": ("prior", prior)}
    for name, (other, value) in beside.items():
        if (value is not None) != (name == named[0]):
            raise InputError(f"{other} belongs to the target {name}; give both or neither")
    values: dict[str, Any] = {named[0]: given[named[0]]}
    if named[0] in beside:
        values[beside[named[0]][0]] = beside[named[0]][1]
    known = {"sampling_probability": sampling_probability, "steps": steps}
    refuse_tracers("ja.calibrate_noise_to_risk", "jaxacct.kernels.calibration", **values, **known)
    chosen = options(relation=relation, rtol=rtol, backend=backend, relations=SIDED, least_rtol=LEAST_RTOL)
    rules = {"sampling_probability": PROBABILITY, "steps": COUNT} | dict.fromkeys(values, OPEN_PROBABILITY)
    checked = {name: check(name, value, rules[name]) for name, value in (values | known).items()}
    shape = broadcast_shape({name: np.shape(value) for name, value in checked.items()})
    flat = {k: np.broadcast_to(np.asarray(v, np.float64), shape).reshape(-1) for k, v in checked.items()}
    size = int(np.prod(shape))
    with job(size, backend):
        return _CALIBRATED[named[0]](flat, chosen.relation, chosen.rtol, shape)


def _to_advantage(flat: dict[str, np.ndarray], relation: str, rtol: float, shape: tuple[int, ...]) -> RiskCalibration:
    goal = flat["advantage"]
    target = Target(np.zeros(goal.shape), goal)
    return _made(noise_for(flat, target, relation, rtol, None), target, lambda delta: delta, shape)


def _to_bayes_success(
    flat: dict[str, np.ndarray], relation: str, rtol: float, shape: tuple[int, ...]
) -> RiskCalibration:
    goal, prior = flat["bayes_success"], flat["prior"]
    rare, odds = np.minimum(prior, 1.0 - prior), np.abs(np.log(prior) - np.log1p(-prior))
    _above("bayes_success", goal, "max(prior, 1 - prior)", np.maximum(prior, 1.0 - prior), shape)
    wrong = 8.0 * ROUNDOFF * (2.0 + odds)  # as in Profile.bayes_success
    room = (goal - (1.0 - rare) - 2.0 * wrong) / rare * (1.0 - 4.0 * ROUNDOFF)
    target = Target(odds, room)
    risk = lambda delta: 1.0 - rare + rare * delta
    rare_member = prior <= 0.5
    found = noise_for(flat, target, "remove_one" if rare_member.all() else "add_one", rtol, None)
    if rare_member.any() and not rare_member.all():
        other = noise_for(flat, target, "remove_one", rtol, None)
        found = Found(*(np.where(rare_member, a, b) for a, b in zip(other, found, strict=True)))
    return _made(found, target, risk, shape, wrong)


def _to_true_positive_rate(
    flat: dict[str, np.ndarray], relation: str, rtol: float, shape: tuple[int, ...]
) -> RiskCalibration:
    goal, fpr = flat["true_positive_rate"], flat["at_fpr"]
    _above("true_positive_rate", goal, "at_fpr", fpr, shape)
    found, target = noise_for_rate(flat, goal, fpr, relation, rtol)
    result = _made(found, target, lambda delta: (delta + np.exp(target.epsilon) * fpr) * (1.0 + 8.0 * ROUNDOFF), shape)
    upper = np.asarray(result.risk.upper)
    risk = Bounds(0.0 * upper, upper, upper, "bound", result.risk.status, result.risk.engine)
    return replace(result, risk=risk)


def _made(
    found: Found,
    target: Target,
    risk: Callable[[np.ndarray], np.ndarray],
    shape: tuple[int, ...],
    wrong: np.ndarray | float = 0.0,
) -> RiskCalibration:
    delta = found.bounds((target.epsilon.size,))
    low, middle, high = (risk(np.asarray(end)) for end in (delta.lower, delta.estimate, delta.upper))
    low, high = np.maximum(low - wrong, 0.0), np.minimum(high + wrong, 1.0)
    ends = (x.reshape(shape) for x in (low, np.clip(middle, low, high), high))
    words = (np.asarray(word).reshape(shape) for word in (delta.kind, delta.status, delta.engine))
    ok = np.isin(found.status, ("ok", "not_binding")).reshape(shape)
    status, value = found.status.reshape(shape), found.value.reshape(shape)
    bounds, epsilon = Bounds(*ends, *words), target.epsilon.reshape(shape)
    if shape == ():
        return RiskCalibration(value[()], bounds, epsilon[()], str(status), ok[()])
    return RiskCalibration(value, bounds, epsilon, status, ok)


def _above(name: str, value: np.ndarray, least: str, floor: np.ndarray, shape: tuple[int, ...]) -> None:
    low = np.flatnonzero(~(value > floor))
    if low.size:
        index = f"[{', '.join(map(str, np.unravel_index(low[0], shape)))}]" if shape else ""
        raise InputError(
            f"{name}{index} = {value[low[0]]:g} must be above {least} = {floor[low[0]]:g}, the risk without any output"
        )


_CALIBRATED = {
    "advantage": _to_advantage,
    "true_positive_rate": _to_true_positive_rate,
    "bayes_success": _to_bayes_success,
}
