"""Calibration of any one parameter of any mechanism: the value that meets a privacy target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.certified_search import Found, Search, Start, certified_search, start_at
from jaxacct.dispatch import engine_of_mechanism
from jaxacct.dp_sgd_calibration import LEAST_RTOL, Calibration, result
from jaxacct.engines.backend import job
from jaxacct.engines.protocol import Effort
from jaxacct.keywords import with_hints
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism, take_rows
from jaxacct.validation import COUNT, DELTA, POSITIVE, InputError, broadcast_shape, check, check_flag, options

__all__ = ["calibrate", "search_mechanisms"]

BISECTIONS = 16
STEP = 1e-3
"""Of x, for the slope of a guess."""
ROUGH = 0.9, 0.05
"""Relative widths at which epsilon is evaluated at both ends of the bracket, the second where the first cannot tell."""


@with_hints
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
    backend: str = "auto",
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
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    rtol : float
        The certified epsilon lies within this (relatively) below the target, unless the search ends at an end of the
        bracket, between two adjacent whole numbers, or at a jump of epsilon.
    backend : {"auto", "numpy", "xla"}
        As for `jaxacct.epsilon`.

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
    >>> round(float(c.value), 3), bool(c.epsilon.upper <= 0.5), c.status
    (2.0, True, 'ok')
    """
    if not callable(mechanism):
        raise InputError(
            f"mechanism = {mechanism!r:.40} must be a function of the value, such as lambda s: ja.dp_sgd(s, 0.01, 1000)"
        )
    chosen = options(relation=relation, rtol=rtol, backend=backend, least_rtol=LEAST_RTOL)
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
    first = np.broadcast_to(given["bracket[0]"], broadcast_shape(shapes))
    shape = broadcast_shape({"the mechanism": batch_shape(_made(mechanism, first))} | shapes)
    epsilon, delta, low, high = (np.broadcast_to(value, shape) for value in given.values())
    if not (low < high).all():
        index = [int(i) for i in np.argwhere(~(low < high))[0]] if shape else ""
        raise InputError(f"bracket{index} must be (lowest, highest) with lowest < highest; give a wider one")
    with job(int(np.prod(shape)), chosen.backend):
        found = search_mechanisms(
            lambda x: _made(mechanism, x),
            epsilon,
            delta,
            (low, high),
            chosen.relation,
            account.effort_of_search(chosen.rtol),
            chosen.rtol,
            whole,
        )
    return result(found, shape, monotone)


def search_mechanisms(
    make: Callable[[np.ndarray], Mechanism],
    epsilon: np.ndarray,
    delta: np.ndarray,
    bracket: tuple[np.ndarray, np.ndarray],
    relation: str,
    effort: Effort,
    rtol: float,
    whole: bool,
    closest: float = 1e-12,
) -> Found:
    """The least private value of each element, for arrays of one shape; what is found is flat.

    `make` is asked for all elements, since it may hold arrays of the shape of the batch; elements that are settled keep
    the value tried last.  Where an evaluation is costly only the others are evaluated.  Both ends of the bracket are
    evaluated roughly: they only tell which way epsilon goes, and what a search tries first.
    """
    low, high = (end.reshape(-1).astype(np.float64) for end in bracket)
    values, target = low.copy(), epsilon.reshape(-1)

    def evaluate(rows: np.ndarray, some: np.ndarray, effort: Effort = effort) -> Bounds:
        values[rows] = some
        made = make(values.reshape(epsilon.shape))
        if made.has_bracket() and rows.size < target.size:
            mine = batch_shape(made)
            places = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), epsilon.shape).reshape(-1)[rows]
            one = take_rows(made, places) if mine else made
            return account.bracket_epsilon(one, delta.reshape(-1)[rows], relation, effort)
        found = account.bracket_epsilon(made, delta, relation, effort)
        columns = found.lower, found.estimate, found.upper, found.kind, found.status, found.engine
        return Bounds(*(np.asarray(column).reshape(-1)[rows] for column in columns))

    at_low, at_high, falls = _at_ends(evaluate, low, high, effort)
    search = Search(
        evaluate=evaluate,
        target=target,
        lowest=low,
        highest=high,
        falls=falls,
        rtol=rtol,
        closest=closest,
        whole=whole,
        privates_first=(at_low <= target) & (at_high <= target),
    )

    def guess(x: np.ndarray) -> np.ndarray | None:
        made = make(np.exp(x).reshape(epsilon.shape))
        known = engine_of_mechanism(made, "auto")
        found = None if known is None else known.guess(made, delta)
        return None if found is None else np.log(np.maximum(found.reshape(-1), 1e-300))

    guessed = None if whole else _guessed(guess, np.log(target), np.log(low), np.log(high), falls)
    return certified_search(search, guessed or start_at(np.sqrt(low) * np.sqrt(high)))


def _guessed(
    guess: Callable[[np.ndarray], np.ndarray | None],
    goal: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    falls: np.ndarray,
) -> Callable[[np.ndarray], Start] | None:
    """Where a quick guess of log(epsilon) at x, if there is one, meets the goal, by bisection, and its slope there."""
    for _ in range(BISECTIONS):
        x = 0.5 * (low + high)
        found = guess(x)
        if found is None:
            return None
        further = (found > goal) == falls
        low, high = np.where(further, x, low), np.where(further, high, x)
    x = 0.5 * (low + high)
    near, beside = guess(x), guess(x + STEP)
    assert near is not None and beside is not None
    slope = (beside - near) / STEP
    return lambda rows: Start(x[rows], np.zeros(rows.size), np.zeros(rows.size, bool), slope[rows])


def _at_ends(
    evaluate: Callable[[np.ndarray, np.ndarray, Effort], Bounds], low: np.ndarray, high: np.ndarray, effort: Effort
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(upper ends at both ends of the bracket, whether epsilon falls), from brackets no narrower than that needs."""
    rows = np.arange(low.size)
    at_low, at_high, falls = np.full(low.size, np.nan), np.full(low.size, np.nan), np.zeros(low.size, bool)
    for rtol in ROUGH:
        first, last = (evaluate(rows, x[rows], effort._replace(rtol=max(effort.rtol, rtol))) for x in (low, high))
        at_low[rows], at_high[rows] = first.upper, last.upper
        falls[rows] = np.asarray(last.upper <= first.upper)
        rows = rows[~((last.upper < first.lower) | (first.upper < last.lower))]
        if rows.size == 0:
            break
    return at_low, at_high, falls


def _made(mechanism: Callable[[Any], Mechanism], values: np.ndarray) -> Mechanism:
    """What the function returns for values of the shape of the batch."""
    return require_mechanism("mechanism", mechanism(values if values.shape else float(values)))
