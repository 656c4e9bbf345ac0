"""Calibration of DP-SGD: the noise, the sampling probability or the number of steps that meets a privacy target.

Every value returned is evaluated again with the certified engines, and `epsilon.upper <= target_epsilon` holds for
each.  `jaxacct.calibrate` (mechanism_calibration.py) takes any parameter of any mechanism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxacct.dp_sgd_calibration import (
    MAX_STEPS,
    NOISE_RANGE,
    RATE_RANGE,
    Calibration,
    calibrated,
    checked_goal,
    result,
)
from jaxacct.keywords import with_hints
from jaxacct.validation import COUNT, check_one, choice

if TYPE_CHECKING:
    from jaxacct.selection.law_of_k import Law

__all__ = [
    "Calibration",
    "calibrate_noise_multiplier",
    "calibrate_sampling_probability",
    "calibrate_steps",
]


@with_hints
def calibrate_noise_multiplier(
    target_epsilon: Any,
    target_delta: Any,
    sampling_probability: Any,
    steps: Any,
    *,
    repetitions: Law | None = None,
    candidates: str = "iid",
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """The smallest noise multiplier for which Poisson sampled DP-SGD meets (target_epsilon, target_delta).

    All arguments broadcast; thousands of configurations are solved in one call.  The noise multiplier is relative to
    the clip norm.  The certified epsilon at the value lies within `rtol` (relatively) below the target.

    Parameters
    ----------
    target_epsilon : array_like > 0
    target_delta : array_like in (0, 1)
    sampling_probability : array_like in [0, 1]
    steps : array_like of whole numbers >= 1
    repetitions : a law of K (`jaxacct.selection`), which broadcasts too
        The target is then met by the whole private selection, which runs K times and releases the best by any score,
        not only by a single run.  The value is within about .1 % of the smallest one.  Targets below .01, where the
        bracket of a selection is wide, may be found infeasible.  Rows are solved one by one; with sampling below 1
        every noise tried takes half a minute or more.
    candidates : {"iid", "adaptive"}
        What is assumed of the candidates (`jaxacct.selection.select`).
    relation : {"add_or_remove_one", "add_one", "remove_one"}
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
        Invalid values, shapes that do not broadcast, or a tracer.

    References
    ----------
    The bounds are those of `jaxacct.epsilon`; the search is described in jaxacct/certified_search.py.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_multiplier(2.0, 1e-5, sampling_probability=0.01, steps=10_000)
    >>> round(float(c.value), 3), bool(c.epsilon.upper <= 2.0)
    (2.127, True)
    """
    known = {"sampling_probability": sampling_probability, "steps": steps}
    if repetitions is None:
        return calibrated("noise_multiplier", target_epsilon, target_delta, known, relation, rtol, NOISE_RANGE, backend)
    from jaxacct.selection.mechanism import CANDIDATES  # takes a while to import, and single runs do not need it
    from jaxacct.selection.noise import law_shape, noise_of_selection

    choice("candidates", candidates, CANDIDATES)
    shapes = {"repetitions": law_shape(repetitions)}
    goal, shape = checked_goal(
        "noise_multiplier", target_epsilon, target_delta, known, relation, rtol, NOISE_RANGE, shapes, backend
    )
    return result(noise_of_selection(goal, repetitions, shape, candidates, backend), shape)


@with_hints
def calibrate_sampling_probability(
    target_epsilon: Any,
    target_delta: Any,
    noise_multiplier: Any,
    steps: Any,
    *,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """The largest sampling probability for which Poisson sampled DP-SGD meets the target.

    Where even the full batch meets it, the value is 1 with status "not_binding".

    Parameters
    ----------
    target_epsilon, target_delta, steps, relation, rtol, backend : as for `calibrate_noise_multiplier`
    noise_multiplier : array_like > 0

    Returns
    -------
    Calibration

    Raises
    ------
    InputError
        As `calibrate_noise_multiplier`.

    References
    ----------
    As `calibrate_noise_multiplier`.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_sampling_probability(2.0, 1e-5, noise_multiplier=2.0, steps=10_000)
    >>> round(float(c.value), 5), bool(c.ok)
    (0.00932, True)
    """
    known = {"noise_multiplier": noise_multiplier, "steps": steps}
    return calibrated("sampling_probability", target_epsilon, target_delta, known, relation, rtol, RATE_RANGE, backend)


@with_hints
def calibrate_steps(
    target_epsilon: Any,
    target_delta: Any,
    noise_multiplier: Any,
    sampling_probability: Any,
    *,
    max_steps: int = MAX_STEPS,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """The largest number of steps whose certified epsilon meets the target; a whole number (as float64).

    Where `max_steps` meets it, the value is `max_steps` with status "not_binding".  Where one step already exceeds
    it, the status is "infeasible_steps".

    Parameters
    ----------
    target_epsilon, target_delta, sampling_probability, relation, rtol, backend : as for `calibrate_noise_multiplier`
    noise_multiplier : array_like > 0
    max_steps : int >= 1
        The largest number that is searched, one for the whole batch.

    Returns
    -------
    Calibration

    Raises
    ------
    InputError
        As `calibrate_noise_multiplier`.

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
    return calibrated("steps", target_epsilon, target_delta, known, relation, rtol, (1.0, float(limit)), backend)
