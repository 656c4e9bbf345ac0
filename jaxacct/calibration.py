"""Calibration: the value of one parameter that meets a privacy target.

Every value returned is evaluated again with the certified engines, and `epsilon.upper <= target_epsilon` holds for
each.  `calibrate` takes any parameter of any mechanism; the others are for DP-SGD and start from fast vectorised
solves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.certified_search import Search, certified_search, start_at
from jaxacct.dp_sgd_calibration import (
    LEAST_RTOL,
    MAX_STEPS,
    NOISE_RANGE,
    RATE_RANGE,
    Calibration,
    calibrated,
    checked_goal,
    result,
)
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.options import options
from jaxacct.validation import COUNT, DELTA, POSITIVE, InputError, broadcast_shape, check, check_flag, check_one, choice

if TYPE_CHECKING:
    from jaxacct.selection.law import Law

__all__ = [
    "Calibration",
    "calibrate",
    "calibrate_noise_multiplier",
    "calibrate_sampling_probability",
    "calibrate_steps",
]


def calibrate(
    mechanism: Callable[[Any], Mechanism],
    *,
    target_epsilon: Any,
    target_delta: Any,
    bracket: tuple[Any, Any],
    whole: bool = False,
    monotone: bool = False,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
) -> Calibration:
    """The value of any one parameter of any mechanism that meets (target_epsilon, target_delta).

    Searched is `x` in `bracket` with `epsilon(mechanism(x), target_delta) <= target_epsilon`, as near as possible to
    the less private end of the bracket.  Which end that is, is found out by evaluating both.  The value returned has
    itself been evaluated, so it meets the target in any case.  That no less private value does is known only where
    epsilon is monotone in the parameter, which the library cannot see from a function: say so by `monotone=True`.

    Parameters
    ----------
    mechanism : function of x that returns a Mechanism
        It is given one float, or an array of the shape of the batch; the batch shape of what it returns must
        broadcast with the targets.
    target_epsilon : array_like > 0
    target_delta : array_like in (0, 1)
    bracket : (lowest, highest), array_likes > 0
        All arguments broadcast, one search for each element.
    whole : bool
        Whether the parameter is a whole number, such as a number of steps.
    monotone : bool
        The caller's statement that epsilon only grows, or only falls, with x in the bracket; `Calibration.best`
        repeats it.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one"}
    rtol : float
        The certified epsilon lies within this (relatively) below the target, unless the search ends at an end of the
        bracket, between two adjacent whole numbers, or at a jump of epsilon.

    Returns
    -------
    Calibration
        status "not_binding" where both ends of the bracket meet the target (the value is the less private end),
        "infeasible" where neither does.

    Raises
    ------
    InputError
        Invalid values, a bracket out of order, shapes that do not broadcast, or a function that returns no mechanism.

    References
    ----------
    The search is described in jaxacct/certified_search.py.

    >>> import jaxacct as ja
    >>> c = ja.calibrate(lambda b: ja.Laplace(b), target_epsilon=0.5, target_delta=1e-6, bracket=(0.1, 100.0))
    >>> round(float(c.value), 4), bool(c.epsilon.upper <= 0.5), c.status
    (1.9999, True, 'ok')
    """
    if not callable(mechanism):
        raise InputError(
            f"mechanism = {mechanism!r:.40} must be a function of the value, such as lambda s: ja.dp_sgd(s, 0.01, 1000)"
        )
    relation, _, rtol, _ = options(relation=relation, rtol=rtol, least_rtol=LEAST_RTOL)
    check_flag("whole", whole, "say whether the value is a whole number")
    check_flag("monotone", monotone, "say whether epsilon is known to be monotone in the value")
    if not isinstance(bracket, tuple | list) or len(bracket) != 2:
        raise InputError(f"bracket = {bracket!r:.40} must be a pair (lowest, highest); give two positive values")
    rule = COUNT if whole else POSITIVE
    given = {
        "target_epsilon": check("target_epsilon", target_epsilon, POSITIVE),
        "target_delta": check("target_delta", target_delta, DELTA),
        "bracket[0]": check("bracket[0]", bracket[0], rule),
        "bracket[1]": check("bracket[1]", bracket[1], rule),
    }
    shapes = {name: np.shape(value) for name, value in given.items()}
    shape = broadcast_shape(shapes)
    lowest = np.broadcast_to(given["bracket[0]"], shape)
    shape = broadcast_shape({"the mechanism": batch_shape(_made(mechanism, lowest))} | shapes)
    epsilon, delta, low, high = (np.broadcast_to(value, shape).reshape(-1).copy() for value in given.values())
    if not (low < high).all():
        index = list(np.argwhere(~(low < high).reshape(shape))[0]) if shape else ""
        raise InputError(f"bracket{index} must be (lowest, highest) with lowest < highest; give a wider one")
    effort = account.effort_of_search(rtol)
    values = low.copy()  # of all rows: a function may hold arrays of the shape of the batch

    def evaluate(rows: np.ndarray, some: np.ndarray) -> Bounds:
        values[rows] = some
        made = _made(mechanism, values.reshape(shape))
        found = account.bracket_epsilon(made, delta.reshape(shape), relation, effort)
        flat = Bounds(*(np.asarray(x).reshape(-1) for x in _columns(found)))
        return flat[rows]

    everywhere = np.arange(epsilon.size)
    at_low, at_high = evaluate(everywhere, low), evaluate(everywhere, high)
    search = Search(
        evaluate=evaluate,
        target=epsilon,
        lowest=low,
        highest=high,
        falls=np.asarray(at_high.upper <= at_low.upper),
        rtol=rtol,
        whole=whole,
        infeasible="infeasible",
        privates_first=np.asarray((at_low.upper <= epsilon) & (at_high.upper <= epsilon)),
    )
    middle = np.sqrt(low) * np.sqrt(high)
    return result(certified_search(search, start_at(middle)), shape, monotone)


def _made(mechanism: Callable[[Any], Mechanism], values: np.ndarray) -> Mechanism:
    """What the function returns for values of the shape of the batch."""
    return require_mechanism("mechanism", mechanism(values if values.shape else float(values)))


def _columns(found: Bounds) -> tuple[Any, ...]:
    return found.lower, found.estimate, found.upper, found.kind, found.status, found.engine


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
        return calibrated("noise_multiplier", target_epsilon, target_delta, known, relation, rtol, NOISE_RANGE)
    from jaxacct.selection.mechanism import CANDIDATES  # takes a while to import, and single runs do not need it
    from jaxacct.selection.noise import law_shape, noise_of_selection

    choice("candidates", candidates, CANDIDATES)
    shapes = {"repetitions": law_shape(repetitions)}
    goal, shape = checked_goal(
        "noise_multiplier", target_epsilon, target_delta, known, relation, rtol, NOISE_RANGE, shapes
    )
    return result(noise_of_selection(goal, repetitions, shape, candidates), shape)


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

    Where even the full batch meets it, the value is 1 with status "not_binding".

    Parameters
    ----------
    target_epsilon, target_delta, steps, relation, rtol : as for `calibrate_noise_multiplier`
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
    return calibrated("sampling_probability", target_epsilon, target_delta, known, relation, rtol, RATE_RANGE)


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

    Where `max_steps` meets it, the value is `max_steps` with status "not_binding".  Where one step already exceeds
    it, the status is "infeasible_steps".

    Parameters
    ----------
    target_epsilon, target_delta, sampling_probability, relation, rtol : as for `calibrate_noise_multiplier`
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
    return calibrated("steps", target_epsilon, target_delta, known, relation, rtol, (1.0, float(limit)))
