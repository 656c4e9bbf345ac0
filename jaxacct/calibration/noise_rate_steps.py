"""Finds the noise, the sampling probability or the number of steps with which DP-SGD meets a privacy target.

Each returned value was evaluated by the certified engines: the upper bound of its epsilon or risk meets the target.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.accounting.account import answer
from jaxacct.calibration.dp_sgd_search import (
    MAX_STEPS,
    ORDER,
    RATE_RANGE,
    RISK_RULES,
    Calibration,
    Goal,
    certified,
    checked,
    given_target,
    result,
    search_for,
    started,
)
from jaxacct.calibration.search import BestValues, Start, certified_search
from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import COUNT, RELATIONS, InputError, check_one, choice, refuse_tracers, with_hints
from jaxacct.engines.backend import job
from jaxacct.engines.protocol import Effort, MechanismQuestion
from jaxacct.mechanisms.dp_sgd_run import (
    NOISE_RANGE,
    NUMBERS,
    RULES,
    described,
    dp_sgd,
    numbers_of_rule,
    rounds_of,
    rule_name,
    usual_relation,
)

if TYPE_CHECKING:
    from jaxacct.selection.law_of_k import Law


@with_hints
def calibrate_noise_multiplier(
    target_epsilon: ArrayLike | None = None,
    target_delta: ArrayLike | None = None,
    sampling_probability: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    target_advantage: ArrayLike | None = None,
    target_tpr: ArrayLike | None = None,
    at_fpr: ArrayLike | None = None,
    target_bayes_success: ArrayLike | None = None,
    prior: ArrayLike | None = None,
    target_posterior: ArrayLike | None = None,
    target_reconstruction: ArrayLike | None = None,
    baseline: ArrayLike | None = None,
    target_mu: ArrayLike | None = None,
    above_fpr: ArrayLike | None = None,
    repetitions: Law | None = None,
    candidates: str = "iid",
    batch_size: ArrayLike | None = None,
    dataset_size: ArrayLike | None = None,
    slots: ArrayLike | None = None,
    epochs: ArrayLike | None = None,
    sampling: str = "poisson",
    cap: ArrayLike | None = None,
    bands: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group: int = 1,
    relation: str | None = None,
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """Return the least noise multiplier for which DP-SGD meets (target_epsilon, target_delta), or a target for a risk.

    All arguments broadcast.  The noise multiplier is relative to the clip norm.  The certified epsilon at the value is
    usually within `rtol` of the target; see `status`.  Give exactly one target: epsilon with delta, or one risk.

    * `target_advantage`: the largest TPR - FPR of any membership test, `delta(0)`.
    * `target_tpr` with `at_fpr`: the largest true-positive rate of any test at a false-positive rate a.  It is at most
      `delta(eps) + e^eps a` for every eps >= 0; the calibration searches for the eps with the least bound.
    * `target_bayes_success` with `prior`: the largest probability that a guess about the record's presence is right.
      Under every relation it is `1 - r + r delta(log((1 - r)/r))` with r = min(prior, 1 - prior).
    * `target_posterior` with `prior` and `at_fpr`: the largest probability of membership after a positive test.
    * `target_reconstruction` with `baseline`: the largest probability of success of a reconstruction that would succeed
      with probability `baseline` without output.  It equals the true-positive rate at a false-positive rate `baseline`.
    * `target_mu` with `above_fpr`: mu of Gaussian differential privacy, claimed only where both error rates are at
      least `above_fpr` (`Profile.gdp_mu`).  Whatever the relation, mu holds for adding and for removing a record.

    Parameters
    ----------
    target_epsilon, target_mu : array_like > 0
    target_delta : array_like in (0, 1)
    target_advantage, target_tpr, target_bayes_success, target_posterior, target_reconstruction : array_like in (0, 1)
        Each must exceed the risk of an attacker who sees no output.  In the order of the names this risk is 0, at_fpr,
        max(prior, 1 - prior), prior, baseline.
    at_fpr, prior, baseline : array_like in (0, 1); settings of a target.
    above_fpr : array_like in (0, 1/2); setting of `target_mu`, 1e-10 where it is left out.
    sampling_probability : array_like in [0, 1]
    steps : array_like of whole numbers >= 1
    repetitions : a law of the random number K of runs (`jaxacct.selection`), which broadcasts too.  DP-SGD then runs K
        times, and the best run by any score is released.  This whole selection meets the target.  The value is within
        about 0.1 % of the smallest one.  A target below 0.01 may be found infeasible.  Rows are solved one by one.
        A target_delta far below 1e-18 may take a minute, and its value may be "loose".
    candidates : {"iid", "adaptive"}; assumption on the candidates (`jaxacct.selection.select`).
    batch_size, dataset_size, slots, epochs, sampling, cap, bands, groups, group
        The run, as for `jaxacct.dp_sgd`: `batch_size` with `dataset_size`, or `slots`, in place of
        `sampling_probability`; `epochs` in place of `steps`.  A risk as target needs `sampling` "poisson" or
        "cyclic_poisson", and `group` 1.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
        By default "zero_out" for shuffled batches, else "add_or_remove_one".  "replace_one" allows no risk as target.
    rtol : float in [1e-7, 1)
    backend : {"auto", "numpy", "xla"}, as for `jaxacct.epsilon`.

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
    >>> c = ja.calibrate_noise_multiplier(2.0, 1e-6, batch_size=4096, dataset_size=300_000, epochs=10)
    >>> round(float(c.value), 3)
    1.132
    >>> c = ja.calibrate_noise_multiplier(target_advantage=0.382924922548026, sampling_probability=1.0, steps=1)
    >>> round(float(c.value), 3), bool(c.risk.upper <= 0.382924922548026)
    (1.0, True)
    """
    return _calibrated("noise_multiplier", locals(), NOISE_RANGE)


@with_hints
def calibrate_sampling_probability(
    target_epsilon: ArrayLike | None = None,
    target_delta: ArrayLike | None = None,
    noise_multiplier: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    target_advantage: ArrayLike | None = None,
    target_tpr: ArrayLike | None = None,
    at_fpr: ArrayLike | None = None,
    target_bayes_success: ArrayLike | None = None,
    prior: ArrayLike | None = None,
    target_posterior: ArrayLike | None = None,
    target_reconstruction: ArrayLike | None = None,
    baseline: ArrayLike | None = None,
    target_mu: ArrayLike | None = None,
    above_fpr: ArrayLike | None = None,
    dataset_size: ArrayLike | None = None,
    epochs: ArrayLike | None = None,
    sampling: str = "poisson",
    cap: ArrayLike | None = None,
    bands: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group: int = 1,
    relation: str | None = None,
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """Return the largest sampling probability for which DP-SGD meets the target.

    Where even the full batch meets the target, the value is 1 with status "not_binding".

    Parameters
    ----------
    target_epsilon, target_delta, steps, relation, rtol, backend
    target_advantage, target_tpr, target_bayes_success, target_posterior, target_reconstruction, target_mu
    at_fpr, prior, baseline, above_fpr, dataset_size, epochs, sampling, cap, bands, groups, group
        As for `calibrate_noise_multiplier`.  With `epochs` a risk cannot be the target.
    noise_multiplier : array_like > 0

    Returns
    -------
    Calibration

    References
    ----------
    As for `calibrate_noise_multiplier`.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_sampling_probability(2.0, 1e-5, noise_multiplier=2.0, steps=10_000)
    >>> round(float(c.value), 5), bool(c.ok)
    (0.00932, True)
    """
    return _calibrated("sampling_probability", locals(), RATE_RANGE)


@with_hints
def calibrate_steps(
    target_epsilon: ArrayLike | None = None,
    target_delta: ArrayLike | None = None,
    noise_multiplier: ArrayLike | None = None,
    sampling_probability: ArrayLike | None = None,
    *,
    target_advantage: ArrayLike | None = None,
    target_tpr: ArrayLike | None = None,
    at_fpr: ArrayLike | None = None,
    target_bayes_success: ArrayLike | None = None,
    prior: ArrayLike | None = None,
    target_posterior: ArrayLike | None = None,
    target_reconstruction: ArrayLike | None = None,
    baseline: ArrayLike | None = None,
    target_mu: ArrayLike | None = None,
    above_fpr: ArrayLike | None = None,
    max_steps: int = MAX_STEPS,
    batch_size: ArrayLike | None = None,
    dataset_size: ArrayLike | None = None,
    slots: ArrayLike | None = None,
    sampling: str = "poisson",
    cap: ArrayLike | None = None,
    bands: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group: int = 1,
    relation: str | None = None,
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """Return the largest number of steps whose certified epsilon meets the target: a whole number, as float64.

    Where `Calibration.best` is True, the true largest number is greater by at most the relative distance d given there.
    Where `max_steps` meets the target, it is the value, with status "not_binding".  Where one step already exceeds the
    target, the status is "infeasible_steps".

    Parameters
    ----------
    target_epsilon, target_delta, sampling_probability, relation, rtol, backend
    target_advantage, target_tpr, target_bayes_success, target_posterior, target_reconstruction, target_mu
    at_fpr, prior, baseline, above_fpr, batch_size, dataset_size, slots, sampling, cap, bands, groups, group
        As for `calibrate_noise_multiplier`, but with "cyclic_poisson" a risk cannot be the target.
    noise_multiplier : array_like > 0
    max_steps : int >= 1; the largest number of steps that is tried, the same for the whole batch.

    Returns
    -------
    Calibration

    References
    ----------
    As for `calibrate_noise_multiplier`.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_steps(2.0, 1e-5, noise_multiplier=2.0, sampling_probability=0.01)
    >>> int(c.value), bool(c.epsilon.upper <= 2.0)
    (8681, True)
    """
    given = locals()
    most = check_one("max_steps", max_steps, COUNT, "one limit serves the whole batch")
    return _calibrated("steps", given, (1.0, float(most)))


def _calibrated(unknown: str, given: dict[str, Any], limits: tuple[float, float]) -> Calibration:
    """Return the least protective value of `unknown` that meets the target; `given` holds all arguments by name."""
    sampling, group, backend, law = given["sampling"], given["group"], given["backend"], given.get("repetitions")
    target = {name: given[name] for name in ("target_epsilon", "target_delta")}
    risk = given_target(given["target_epsilon"], given["target_delta"], {name: given[name] for name in RISK_RULES})
    run = {name: given[name] for name in NUMBERS if name != "group" and given.get(name) is not None}
    run = described(run, sampling, group, unknown)
    numbers = numbers_of_rule(sampling, run, group)  # the run's numbers, all but the unknown
    relation = usual_relation(sampling) if given["relation"] is None else given["relation"]
    choice("relation", relation, RELATIONS)
    # Where groups take turns, a round counts as one step of a Poisson run. But a replaced record may change its group.
    if RULES[rule_name(sampling)].in_turns and group == 1 and "steps" in numbers and relation != "replace_one":
        fewer = {"steps": rounds_of(numbers["steps"], numbers["groups"])}
        numbers, sampling = {name: numbers[name] for name in ORDER if name in numbers} | fewer, "poisson"
    settings = relation, limits, given["rtol"], backend
    beyond = _beyond_plain(unknown, numbers, sampling, group, relation)
    if risk is not None and law is not None:
        raise InputError("repetitions goes with target_epsilon and target_delta alone; leave it out for a risk")
    if risk is not None:
        if beyond:
            raise InputError(f"a risk cannot be met here with {beyond}; give target_epsilon and target_delta instead")
        from jaxacct.calibration.risks import calibrated_to_risk  # imports SciPy, so only where a risk is the target

        return calibrated_to_risk(next(iter(risk)), *checked(unknown, risk, numbers, *settings), backend)
    if law is not None:
        if beyond:
            raise InputError(
                f"repetitions cannot be met here with {beyond}; use ja.calibrate(lambda x: selection.select("
                "ja.dp_sgd(...), law), ...) with the same run, candidates and relation"
            )
        shapes = {"repetitions": law_shape(law, given["candidates"])}
        goal, _, shape = checked(unknown, target, numbers, *settings, shapes)
        return result(_noise_of_selection(goal, law, shape, given["candidates"], backend), shape, relation)
    if not beyond:
        goal, _, shape = checked(unknown, target, numbers, *settings)
        with job(goal.epsilon.size, backend):
            found = certified_search(search_for(goal, partial(certified, goal)), partial(started, goal))
        return result(found, shape, relation)
    if RULES[rule_name(sampling)].in_passes and unknown == "sampling_probability":
        raise InputError(
            f"sampling_probability cannot be solved for with sampling = {sampling!r}, whose slots are whole; use "
            "ja.calibrate(lambda t: ja.dp_sgd(sigma, slots=t, ...), whole=True, ...), all else the same"
        )
    rate = {name: value for name, value in run.items() if name == "sampling_probability"}  # empty if not given
    goal, _, shape = checked(unknown, target, numbers | rate, *settings)
    # A larger sampling probability may give a smaller epsilon: `cap` cuts more batches, and `epochs` takes fewer steps.
    monotone = unknown != "sampling_probability" or not {"cap", "epochs"} & set(goal.known)
    return result(_by_rule(goal, tuple(numbers), sampling, group, backend), shape, relation, monotone)


def _beyond_plain(unknown: str, numbers: dict[str, Any], sampling: str, group: int, relation: str) -> str:
    """Return the setting that the quick calibration (Poisson samples, single records) does not cover; "" if none."""
    if sampling != "poisson":
        return f"sampling = {sampling!r}"
    if group != 1:
        return f"group = {group!r}"
    if {unknown, *numbers} != set(ORDER):
        return "epochs"
    return "relation = 'replace_one'" if relation == "replace_one" else ""


def _by_rule(goal: Goal, numbers: tuple[str, ...], sampling: str, group: int, backend: str) -> BestValues:
    """Return the best values, judged by the run's certified epsilon. The search starts at a Poisson run's value."""
    effort = account.effort_of_search(goal.rtol)

    def evaluate(rows: np.ndarray, values: np.ndarray, effort: Effort = effort) -> Bounds:
        fields = {name: goal.known[name][rows] for name in numbers} | {goal.unknown: values}
        run = dp_sgd(**fields, sampling=sampling, group=group)
        return answer(MechanismQuestion("epsilon", run, goal.delta[rows], goal.relation, effort))

    search = search_for(goal, evaluate)._replace(roughly=evaluate)
    if "epochs" in goal.known:  # a rate below epochs/2^52 would mean more than 2^52 steps
        search = search._replace(lowest=np.clip(goal.known["epochs"] / 2.0**52, *goal.limits))

    def begin(rows: np.ndarray) -> Start:
        start = started(near, rows)
        x = start.x + math.log(group) if goal.unknown == "noise_multiplier" else start.x
        x = x + np.log(goal.known["groups"][rows]) if goal.unknown == "steps" and "groups" in goal.known else x
        x = np.clip(x, np.log(search.lowest[rows]), np.log(search.highest[rows]))
        return Start(x, np.zeros(rows.size), np.zeros(rows.size, bool))

    usual = {name: goal.known[name] for name in ORDER if name in goal.known}
    if "epochs" in goal.known:
        usual["steps"] = np.ceil(goal.known["epochs"] / 0.01)  # the start assumes a sampling probability of 0.01
    share = 0.6 if goal.relation == "replace_one" else 1.0
    # the noise that meets epsilon under replace_one is about the noise that meets 0.6 epsilon under add_or_remove_one
    near = goal._replace(known=usual, relation="add_or_remove_one", epsilon=share * goal.epsilon)
    with job(goal.epsilon.size, backend):
        return certified_search(search, begin)


def law_shape(law: Any, candidates: str) -> tuple[int, ...]:
    """Return the batch shape of a law of K, the number of runs. Raise InputError if `law` is not a law of K."""
    from jaxacct.selection.law_of_k import require_law  # imports slowly, and single runs do not need it
    from jaxacct.selection.mechanism import CANDIDATES

    choice("candidates", candidates, CANDIDATES)
    require_law("repetitions", law)
    refuse_tracers("ja.calibrate_noise_multiplier", "jaxacct.kernels.worst_score", repetitions=law)
    return law.shape


def _noise_of_selection(goal: Goal, law: Law, shape: tuple[int, ...], candidates: str, backend: str) -> BestValues:
    """For every row, return the noise multiplier with which the whole selection meets the target."""
    from jaxacct.selection.mechanism import select

    # the bracket of a selection's epsilon is too wide for an rtol below 1e-3
    laws, rtol = law.flattened(shape), max(goal.rtol, 1e-3)

    def certify(rows: np.ndarray, values: np.ndarray) -> Bounds:
        chosen = select(goal.run(rows, values), laws.taken(rows), candidates=candidates)
        return account.epsilon(chosen, goal.delta[rows], relation=goal.relation, rtol=rtol)

    search = search_for(goal, certify)._replace(rtol=rtol, closest=0.25 * rtol)
    # the search for the noise begins where the epsilon of a single run is 0.65 times the target
    near = goal._replace(epsilon=0.65 * goal.epsilon)
    with job(goal.epsilon.size, backend):
        return certified_search(search, lambda rows: started(near, rows)._replace(solved=np.zeros(rows.size, bool)))
