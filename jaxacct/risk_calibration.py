"""The least noise for which an attack succeeds no more often than a target says: advantage, true-positive rate, Bayes.

Every target follows from one certified value of the privacy profile: `delta(eps*) <= d*`.  The noise is searched for at
that eps*.  Where eps* is free (true-positive rates), any choice is valid, and the best one is looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.calibration_start import gaussian_mu
from jaxacct.certified_search import Found, Search, Start, certified_search
from jaxacct.dp_sgd_calibration import INFEASIBLE, LEAST_RTOL, NOISE_RANGE
from jaxacct.engines.backend import job
from jaxacct.floats import ROUNDOFF
from jaxacct.mechanisms import dp_sgd
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

ROUNDS = 2
"""How often the eps of a true-positive rate is moved to where it says most."""
ROUGH = 0.01
"""rtol of the searches before the last."""
STEP = 0.1
"""Distance of the three places of the profile from which the best eps is guessed, in deviations of the loss."""
LARGEST_MOVE = 1.0
"""Longest move of eps in a round, likewise."""


class Target(NamedTuple):
    """`delta(epsilon) <= delta` in these directions is enough, row by row."""

    epsilon: np.ndarray
    delta: np.ndarray


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
        All on one side of 1/2.
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
    return _made(_searched(flat, target, relation, rtol, None), target, lambda delta: delta, shape)


def _to_bayes_success(
    flat: dict[str, np.ndarray], relation: str, rtol: float, shape: tuple[int, ...]
) -> RiskCalibration:
    goal, prior = flat["bayes_success"], flat["prior"]
    rare, odds = np.minimum(prior, 1.0 - prior), np.abs(np.log(prior) - np.log1p(-prior))
    _above("bayes_success", goal, "max(prior, 1 - prior)", np.maximum(prior, 1.0 - prior), shape)
    if np.any(prior > 0.5) and np.any(prior < 0.5):
        raise InputError("prior has values on both sides of 1/2, which ask for different directions; call once for each")
    wrong = 8.0 * ROUNDOFF * (2.0 + odds)  # as in Profile.bayes_success
    room = (goal - (1.0 - rare) - 2.0 * wrong) / rare * (1.0 - 4.0 * ROUNDOFF)
    target = Target(odds, room)
    side = "remove_one" if np.all(prior <= 0.5) else "add_one"
    risk = lambda delta: 1.0 - rare + rare * delta
    found = _searched(flat, target, side, rtol, None)
    return _made(found, target, risk, shape, wrong)


def _to_true_positive_rate(
    flat: dict[str, np.ndarray], relation: str, rtol: float, shape: tuple[int, ...]
) -> RiskCalibration:
    from scipy.special import ndtri

    goal, fpr = flat["true_positive_rate"], flat["at_fpr"]
    _above("true_positive_rate", goal, "at_fpr", fpr, shape)
    # of mu-Gaussian DP: the loss at the threshold of the best test
    mu = ndtri(goal) - ndtri(fpr)
    epsilon = np.maximum(-mu * (ndtri(fpr) + 0.5 * mu), 0.0)
    noise = None
    for _ in range(ROUNDS):
        rough = _searched(flat, _target_of_rate(epsilon, goal, fpr), relation, ROUGH, noise)
        noise = np.where(np.isfinite(rough.value), rough.value, 1.0)
        epsilon = _better(flat, epsilon, noise, fpr, goal, mu, relation)
    target = _target_of_rate(epsilon, goal, fpr)
    found = _searched(flat, target, relation, rtol, noise)
    result = _made(found, target, lambda delta: (delta + np.exp(epsilon) * fpr) * (1.0 + 8.0 * ROUNDOFF), shape)
    upper = result.risk.upper
    floor = Bounds(np.zeros(shape), np.asarray(upper), upper, "bound", result.risk.status, result.risk.engine)
    return RiskCalibration(result.value, floor, result.epsilon, result.status, result.ok)


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
    slope, bend = 0.5 * (sums[2] - sums[0]) / step, (sums[2] - 2.0 * sums[1] + sums[0]) / step**2
    with np.errstate(divide="ignore", invalid="ignore"):
        move = np.where(bend > 0.0, -slope / bend, -np.sign(slope) * LARGEST_MOVE * mu)
    moved = middle + np.clip(np.nan_to_num(move), -LARGEST_MOVE * mu, LARGEST_MOVE * mu)
    # e^eps a must stay below b
    return np.clip(moved, 0.0, np.maximum(np.log(goal / fpr) * 0.999, 0.0))


def _searched(
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
