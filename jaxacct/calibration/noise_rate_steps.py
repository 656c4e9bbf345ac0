"""Calibration of DP-SGD: the noise, the sampling probability or the number of steps that meets a privacy target.

Every value returned is evaluated again with the certified engines, and `epsilon.upper <= target_epsilon` holds for
each.  `jaxacct.calibrate` (any_parameter.py) takes any parameter of any mechanism.

For other batch rules than Poisson sampling the search begins where Poisson sampling would end.  Only certified brackets
of the run itself decide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.calibrated import (
    MAX_STEPS,
    NOISE_RANGE,
    RATE_RANGE,
    Calibration,
    calibrated,
    checked_goal,
    result,
    search_for,
)
from jaxacct.calibration.risk_targets import RiskTarget, given_target
from jaxacct.calibration.search import Start, certified_search
from jaxacct.calibration.start import calibration_start
from jaxacct.core.bounds import Bounds
from jaxacct.core.keywords import with_hints
from jaxacct.core.validation import COUNT, RELATIONS, InputError, check_one, choice
from jaxacct.engines.backend import job
from jaxacct.mechanisms import SAMPLING, dp_sgd

if TYPE_CHECKING:
    from jaxacct.selection.law_of_k import Law

__all__ = ["Calibration", "calibrate_noise_multiplier", "calibrate_sampling_probability", "calibrate_steps"]


@with_hints
def calibrate_noise_multiplier(
    target_epsilon: Any = None,
    target_delta: Any = None,
    sampling_probability: Any = None,
    steps: Any = None,
    *,
    target_advantage: Any = None,
    target_tpr: Any = None,
    at_fpr: Any = None,
    target_bayes_success: Any = None,
    prior: Any = None,
    target_posterior: Any = None,
    target_reconstruction: Any = None,
    baseline: Any = None,
    target_mu: Any = None,
    above_fpr: Any = None,
    repetitions: Law | None = None,
    candidates: str = "iid",
    sampling: str = "poisson",
    dataset_size: Any = None,
    cap: Any = None,
    group: int = 1,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """The smallest noise multiplier for which Poisson sampled DP-SGD meets (target_epsilon, target_delta), or a risk.

    All arguments broadcast; thousands of configurations are solved in one call.  The noise multiplier is relative to
    the clip norm.  The certified epsilon at the value lies within `rtol` (relatively) below the target.

    Give exactly one target: epsilon with delta, or one risk with what belongs to it.

    * `target_advantage`: the largest TPR - FPR of any membership test, `delta(0)`.
    * `target_tpr` with `at_fpr`: the largest true-positive rate of any test at a false-positive rate a, at most
      `delta(eps) + e^eps a` for every eps >= 0, the best of which is looked for.
    * `target_bayes_success` with `prior`: the largest probability of telling rightly whether the record was there,
      `1 - r + r delta(log((1 - r)/r))` with r = min(prior, 1 - prior); the same under every relation.
    * `target_posterior` with `prior` and `at_fpr`: the largest probability of membership after a positive test.
    * `target_reconstruction` with `baseline`: the largest probability that a reconstruction succeeds which does so with
      probability `baseline` without output; the true-positive rate at that false-positive rate.
    * `target_mu` with `above_fpr`: mu of Gaussian differential privacy wherever both error rates are at least
      `above_fpr` (`Profile.gdp_mu`); under both directions, whatever the relation.

    Parameters
    ----------
    target_epsilon : array_like > 0
    target_delta : array_like in (0, 1)
    target_advantage, target_tpr, target_bayes_success, target_posterior, target_reconstruction : array_like in (0, 1)
        Above what holds without any output: at_fpr, max(prior, 1 - prior), prior, or baseline.
    target_mu : array_like > 0
    at_fpr, prior, baseline : array_like in (0, 1)
        What belongs to a target.
    above_fpr : array_like in (0, 1/2)
        1e-10 where it is left out.
    sampling_probability : array_like in [0, 1]
    steps : array_like of whole numbers >= 1
    repetitions : a law of K (`jaxacct.selection`), which broadcasts too
        The target is then met by the whole private selection, which runs K times and releases the best by any score,
        not only by a single run.  The value is within about .1 % of the smallest one.  Targets below .01, where the
        bracket of a selection is wide, may be found infeasible.  Rows are solved one by one; with sampling below 1
        every noise tried takes half a minute or more.
    candidates : {"iid", "adaptive"}
        What is assumed of the candidates (`jaxacct.selection.select`).
    sampling : {"poisson", "random_allocation", "truncated_poisson", "without_replacement"}
    dataset_size, cap, group
        How batches are drawn, as for `jaxacct.dp_sgd`.  What is not Poisson sampling of single records has epsilon and
        delta as its only target here.
    relation : {"add_or_remove_one", "add_one", "remove_one", "zero_out"}
        "replace_one", too, where the batch rule knows it.
    rtol : float in [1e-7, 1)
    backend : {"auto", "numpy", "xla"}
        As for `jaxacct.epsilon`.

    Returns
    -------
    Calibration
        Infeasible targets do not raise: see `Calibration.status`.

    Raises
    ------
    InputError
        No target or more than one, invalid values, shapes that do not broadcast, or a tracer.

    References
    ----------
    jaxacct/representations/README.md derives the risks.  The bounds are those of `jaxacct.epsilon`; the search is
    described in calibration/search.py.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_multiplier(2.0, 1e-5, sampling_probability=0.01, steps=10_000)
    >>> round(float(c.value), 3), bool(c.epsilon.upper <= 2.0)
    (2.127, True)
    >>> c = ja.calibrate_noise_multiplier(target_advantage=0.382924922548026, sampling_probability=1.0, steps=1)
    >>> round(float(c.value), 3), bool(c.risk.upper <= 0.382924922548026)
    (1.0, True)
    """
    known = {"sampling_probability": sampling_probability, "steps": steps}
    risks = {
        "target_advantage": target_advantage,
        "target_tpr": target_tpr,
        "at_fpr": at_fpr,
        "target_bayes_success": target_bayes_success,
        "prior": prior,
        "target_posterior": target_posterior,
        "target_reconstruction": target_reconstruction,
        "baseline": baseline,
        "target_mu": target_mu,
        "above_fpr": above_fpr,
    }
    risk = given_target(target_epsilon, target_delta, risks)
    if risk is not None:
        if repetitions is not None:
            raise InputError("repetitions goes with target_epsilon and target_delta alone; leave it out for a risk")
        _refuse_rule("a risk", sampling, group)
        return _to_risk("noise_multiplier", risk, known, relation, rtol, NOISE_RANGE, backend)
    if repetitions is not None:
        _refuse_rule("repetitions", sampling, group)
    rule = {"sampling": sampling, "dataset_size": dataset_size, "cap": cap, "group": group}
    if repetitions is None and not _is_plain(rule):
        return _by_rule(
            "noise_multiplier", target_epsilon, target_delta, known, rule, relation, rtol, NOISE_RANGE, backend
        )
    if repetitions is None:
        return calibrated("noise_multiplier", target_epsilon, target_delta, known, relation, rtol, NOISE_RANGE, backend)
    from jaxacct.calibration.noise_of_selections import law_shape, noise_of_selection
    from jaxacct.selection.mechanism import CANDIDATES  # takes a while to import, and single runs do not need it

    choice("candidates", candidates, CANDIDATES)
    shapes = {"repetitions": law_shape(repetitions)}
    goal, shape = checked_goal(
        "noise_multiplier", target_epsilon, target_delta, known, relation, rtol, NOISE_RANGE, shapes, backend
    )
    return result(noise_of_selection(goal, repetitions, shape, candidates, backend), shape)


@with_hints
def calibrate_sampling_probability(
    target_epsilon: Any = None,
    target_delta: Any = None,
    noise_multiplier: Any = None,
    steps: Any = None,
    *,
    target_advantage: Any = None,
    target_tpr: Any = None,
    at_fpr: Any = None,
    target_bayes_success: Any = None,
    prior: Any = None,
    target_posterior: Any = None,
    target_reconstruction: Any = None,
    baseline: Any = None,
    target_mu: Any = None,
    above_fpr: Any = None,
    sampling: str = "poisson",
    dataset_size: Any = None,
    cap: Any = None,
    group: int = 1,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """The largest sampling probability for which Poisson sampled DP-SGD meets the target.

    Where even the full batch meets it, the value is 1 with status "not_binding".

    Parameters
    ----------
    target_epsilon, target_delta, steps, relation, rtol, backend
    target_advantage, target_tpr, target_bayes_success, target_posterior, target_reconstruction, target_mu
    at_fpr, prior, baseline, above_fpr, sampling, dataset_size, cap, group
        As for `calibrate_noise_multiplier`.
    noise_multiplier : array_like > 0

    Returns
    -------
    Calibration

    References
    ----------
    As `calibrate_noise_multiplier`.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_sampling_probability(2.0, 1e-5, noise_multiplier=2.0, steps=10_000)
    >>> round(float(c.value), 5), bool(c.ok)
    (0.00932, True)
    """
    known = {"noise_multiplier": noise_multiplier, "steps": steps}
    risks = {
        "target_advantage": target_advantage,
        "target_tpr": target_tpr,
        "at_fpr": at_fpr,
        "target_bayes_success": target_bayes_success,
        "prior": prior,
        "target_posterior": target_posterior,
        "target_reconstruction": target_reconstruction,
        "baseline": baseline,
        "target_mu": target_mu,
        "above_fpr": above_fpr,
    }
    risk = given_target(target_epsilon, target_delta, risks)
    if risk is not None:
        _refuse_rule("a risk", sampling, group)
        return _to_risk("sampling_probability", risk, known, relation, rtol, RATE_RANGE, backend)
    rule = {"sampling": sampling, "dataset_size": dataset_size, "cap": cap, "group": group}
    if not _is_plain(rule):
        return _by_rule(
            "sampling_probability", target_epsilon, target_delta, known, rule, relation, rtol, RATE_RANGE, backend
        )
    return calibrated("sampling_probability", target_epsilon, target_delta, known, relation, rtol, RATE_RANGE, backend)


@with_hints
def calibrate_steps(
    target_epsilon: Any = None,
    target_delta: Any = None,
    noise_multiplier: Any = None,
    sampling_probability: Any = None,
    *,
    target_advantage: Any = None,
    target_tpr: Any = None,
    at_fpr: Any = None,
    target_bayes_success: Any = None,
    prior: Any = None,
    target_posterior: Any = None,
    target_reconstruction: Any = None,
    baseline: Any = None,
    target_mu: Any = None,
    above_fpr: Any = None,
    max_steps: int = MAX_STEPS,
    sampling: str = "poisson",
    dataset_size: Any = None,
    cap: Any = None,
    group: int = 1,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """The largest number of steps whose certified epsilon meets the target; a whole number (as float64).

    Where `max_steps` meets it, the value is `max_steps` with status "not_binding".  Where one step already exceeds
    it, the status is "infeasible_steps".

    Parameters
    ----------
    target_epsilon, target_delta, sampling_probability, relation, rtol, backend
    target_advantage, target_tpr, target_bayes_success, target_posterior, target_reconstruction, target_mu
    at_fpr, prior, baseline, above_fpr, sampling, dataset_size, cap, group
        As for `calibrate_noise_multiplier`.
    noise_multiplier : array_like > 0
    max_steps : int >= 1
        The largest number that is searched, one for the whole batch.

    Returns
    -------
    Calibration

    References
    ----------
    As `calibrate_noise_multiplier`.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_steps(2.0, 1e-5, noise_multiplier=2.0, sampling_probability=0.01)
    >>> int(c.value), bool(c.epsilon.upper <= 2.0)
    (8681, True)
    """
    limit = check_one("max_steps", max_steps, COUNT, "one limit serves the whole batch")
    known = {"noise_multiplier": noise_multiplier, "sampling_probability": sampling_probability}
    risks = {
        "target_advantage": target_advantage,
        "target_tpr": target_tpr,
        "at_fpr": at_fpr,
        "target_bayes_success": target_bayes_success,
        "prior": prior,
        "target_posterior": target_posterior,
        "target_reconstruction": target_reconstruction,
        "baseline": baseline,
        "target_mu": target_mu,
        "above_fpr": above_fpr,
    }
    risk = given_target(target_epsilon, target_delta, risks)
    limits = (1.0, float(limit))
    if risk is not None:
        _refuse_rule("a risk", sampling, group)
        return _to_risk("steps", risk, known, relation, rtol, limits, backend)
    rule = {"sampling": sampling, "dataset_size": dataset_size, "cap": cap, "group": group}
    if not _is_plain(rule):
        return _by_rule("steps", target_epsilon, target_delta, known, rule, relation, rtol, limits, backend)
    return calibrated("steps", target_epsilon, target_delta, known, relation, rtol, limits, backend)


def _by_rule(unknown: str, *asked: Any) -> Calibration:
    from jaxacct.calibration.noise_rate_steps import (
        calibrated_by_rule,  # only where a batch rule is not Poisson sampling
    )

    return calibrated_by_rule(unknown, *asked)


def _is_plain(rule: dict[str, Any]) -> bool:
    """Whether batches are Poisson samples of single records, and nothing else is said of them."""
    plain = rule["sampling"] == "poisson" and rule["group"] == 1
    return plain and rule["dataset_size"] is None and rule["cap"] is None


def _refuse_rule(what: str, sampling: str, group: int) -> None:
    """What is known for Poisson samples of single records alone."""
    if sampling != "poisson" or group != 1:
        rule = f"sampling = {sampling!r}" if sampling != "poisson" else f"group = {group!r}"
        raise InputError(
            f"{what} cannot be met here with {rule}; give target_epsilon and target_delta alone, or leave it out"
        )


def _to_risk(
    unknown: str,
    target: RiskTarget,
    known: dict[str, Any],
    relation: str,
    rtol: float,
    limits: tuple[float, float],
    backend: str,
) -> Calibration:
    from jaxacct.calibration.risks import calibrated_to_risk  # SciPy: only where a risk is the target

    return calibrated_to_risk(unknown, target, known, relation, rtol, limits, backend)


def calibrated_by_rule(
    unknown: str,
    target_epsilon: Any,
    target_delta: Any,
    known: dict[str, Any],
    rule: dict[str, Any],
    relation: str,
    rtol: float,
    limits: tuple[float, float],
    backend: str,
) -> Calibration:
    """The least private value of `unknown` that meets the target.

    known : the other parameters.
    rule : `sampling`, `dataset_size`, `cap` and `group`, as `dp_sgd` takes them.
    """
    choice("sampling", rule["sampling"], SAMPLING)
    sampling = rule["sampling"]
    if sampling == "random_allocation" and unknown == "sampling_probability":
        raise InputError(
            "sampling_probability cannot be solved for with sampling = 'random_allocation', whose slots are whole; use "
            "ja.calibrate(lambda t: ja.repeat(ja.RandomAllocation(ja.Gaussian(sigma), t), rounds), whole=True, ...)"
        )
    numbers = {name: rule[name] for name in ("dataset_size", "cap") if rule[name] is not None}
    words = {"sampling": sampling, "group": rule["group"]}
    goal, shape = checked_goal(
        unknown, target_epsilon, target_delta, known | numbers, relation, rtol, limits, {}, backend, RELATIONS
    )
    effort = account.effort_of_search(goal.rtol)

    def certified(rows: np.ndarray, values: np.ndarray) -> Bounds:
        fields = {name: column[rows] for name, column in goal.known.items()} | {unknown: values}
        return account.bracket_epsilon(dp_sgd(**fields, **words), goal.delta[rows], goal.relation, effort)

    def started(rows: np.ndarray) -> Start:
        start = calibration_start(near, rows)[0]
        x = start.x + math.log(rule["group"]) if unknown == "noise_multiplier" else start.x
        return Start(np.clip(x, *np.log(limits)), np.zeros(rows.size), np.zeros(rows.size, bool))

    near = goal._replace(known={name: goal.known[name] for name in known}, relation="add_or_remove_one")
    with job(goal.epsilon.size, backend):
        found = certified_search(search_for(goal, certified), started)
    # a cap binds more often at a larger rate, so that epsilon need not grow with the rate
    return result(found, shape, unknown != "sampling_probability" or sampling != "truncated_poisson")
