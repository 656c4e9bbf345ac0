"""Finds the value of any one parameter of any mechanism with which the mechanism meets a privacy target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.accounting.account import answer
from jaxacct.calibration.dp_sgd_search import LEAST_RTOL, Calibration, result
from jaxacct.calibration.search import ROUGH_EFFORTS, BestValues, Search, certified_search, start_at
from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    COUNT,
    DELTA_OR_ZERO,
    POSITIVE,
    InputError,
    Options,
    UnboundedLossError,
    broadcast_shape,
    check,
    check_flag,
    options,
    with_hints,
)
from jaxacct.engines.backend import job
from jaxacct.engines.protocol import Effort, MechanismQuestion
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism, rows_in, take_rows

FARTHEST = 30.0
"""To choose the start of the search, log(epsilon/target) at the ends of the bracket is clipped to this magnitude."""
LADDER = 1e-9, 1e9
"""Smallest and largest value that is tried where no bracket is given."""


@with_hints
def calibrate(
    mechanism: Callable[[Any], Mechanism],
    *,
    target_epsilon: ArrayLike,
    target_delta: ArrayLike,
    bracket: tuple[Any, Any] | None = None,
    whole: bool = False,
    monotone: bool = False,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> Calibration:
    """Return the value of one parameter, of any mechanism, at which the mechanism meets (target_epsilon, target_delta).

    The search looks for an `x` in `bracket` with `epsilon(mechanism(x), target_delta) <= target_epsilon`, as near as
    possible to the end of the bracket that protects less.  It evaluates both ends to find out which one that is.  The
    returned value was itself evaluated, so it meets the target.  If epsilon is monotone in x, every value that protects
    less misses the target, up to `rtol`.  The library cannot see whether epsilon is monotone; `monotone=True` says so.

    Parameters
    ----------
    mechanism : function from x, one float or an array of the shape of the batch, to a Mechanism whose batch shape
        broadcasts with the targets.
    target_epsilon : array_like > 0; largest epsilon allowed.
    target_delta : array_like in [0, 1); delta at which epsilon is taken.  At 0 no mechanism with an unbounded loss
        meets the target; the status says so.
    bracket : (lowest, highest), array_likes > 0; ends of the search.  All arguments broadcast.  Without a bracket,
        powers of 10 are tried from 1 up to 1e9 and down to 1e-9 (to 1 for whole numbers), or to the first power that
        the function refuses.  The bracket lies between the first two neighbouring powers of which only one meets the
        target, and is widened a little.  Without such powers it lies between the outermost powers that were tried.
    whole : whether the parameter is a whole number, such as a number of steps.
    monotone : whether epsilon is known only to grow, or only to fall, with x in the bracket.  If not,
        `Calibration.best` is False.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}; neighbouring relation.
    rtol : the certified epsilon lies within this relative distance below the target, unless the search ends at an end
        of the bracket, between two adjacent whole numbers, or at a jump of epsilon.
    backend : {"auto", "numpy", "xla"}, as for `jaxacct.epsilon`.

    Returns
    -------
    Calibration
        status "not_binding" where both ends of the bracket meet the target (the value is the end that protects less),
        "infeasible" where neither does.

    Raises
    ------
    InputError
        Invalid values, or a function that returns no mechanism, or that does not take 1 where no bracket is given.

    References
    ----------
    The search is described in calibration/search.py.

    >>> import jaxacct as ja
    >>> c = ja.calibrate(lambda b: ja.Laplace(b), target_epsilon=0.5, target_delta=1e-6)
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
    given = {
        "target_epsilon": check("target_epsilon", target_epsilon, POSITIVE),
        "target_delta": check("target_delta", target_delta, DELTA_OR_ZERO),
    }
    if bracket is None:
        bracket = _bracket(mechanism, given, whole, chosen)
    if not isinstance(bracket, tuple | list) or len(bracket) != 2:
        raise InputError(f"bracket = {bracket!r:.40} must be a pair (lowest, highest); give two positive values")
    rule = COUNT if whole else POSITIVE
    given |= {f"bracket[{place}]": check(f"bracket[{place}]", end, rule) for place, end in enumerate(bracket)}
    shapes = {name: np.shape(value) for name, value in given.items()}
    first = np.broadcast_to(given["bracket[0]"], broadcast_shape(shapes))
    shape = broadcast_shape({"the mechanism": batch_shape(_made(mechanism, first))} | shapes)
    epsilon, delta, low, high = (np.broadcast_to(value, shape) for value in given.values())
    if not (low < high).all():
        index = [int(i) for i in np.argwhere(~(low < high))[0]] if shape else ""
        raise InputError(f"bracket{index} must be (lowest, highest) with lowest < highest; give a wider one")
    with job(int(np.prod(shape)), chosen.backend):
        beside = chosen.relation, account.effort_of_search(chosen.rtol), chosen.rtol, whole
        found = search_mechanisms(lambda x: _made(mechanism, x), epsilon, delta, (low, high), *beside)
    return result(found, shape, chosen.relation, monotone)


def _bracket(
    mechanism: Callable[[Any], Mechanism], targets: dict[str, Any], whole: bool, chosen: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's bracket: two powers of 10 around the solution, else the outermost values tried."""
    shapes = {name: np.shape(value) for name, value in targets.items()}
    epsilon, delta = targets["target_epsilon"], targets["target_delta"]
    try:
        one = _made(mechanism, np.ones(broadcast_shape(shapes)))
    except InputError as error:
        raise InputError(
            f"mechanism does not take the value 1 ({error}); give a bracket of values that it takes"
        ) from None
    shape = broadcast_shape({"the mechanism": batch_shape(one)} | shapes)
    low, high = np.ones(shape), np.ones(shape)
    ends, found = [1.0, 1.0], np.zeros(shape, bool)
    meets: dict[float, np.ndarray] = {}

    def look(x: float) -> None:
        made = _made(mechanism, np.full(shape, x))
        try:
            rough = account.epsilon(made, delta, relation=chosen.relation, rtol=0.05, backend=chosen.backend).upper
        except UnboundedLossError:
            rough = np.array(np.inf)
        meets[x] = np.broadcast_to(rough <= epsilon, shape)

    look(1.0)
    sides = {1: 10.0} if whole else {1: 10.0, 0: 0.1}
    while sides and not found.all():
        for side, factor in list(sides.items()):
            before, here = ends[side], float(f"{ends[side] * factor:.0e}")
            try:
                look(here)
            except InputError:  # the function does not take this value, such as a rate above 1
                here = 0.0
            if not LADDER[0] <= here <= LADDER[1]:
                del sides[side]
                continue
            ends[side] = here
            new = (meets[here] != meets[before]) & ~found
            low[new], high[new] = min(before, here), max(before, here)
            found |= new
    least, most = sorted(ends)
    low[~found], high[~found] = least, most
    # widen the bracket, so that a power of 10 can itself be shown to be the best value
    low, high = np.maximum(low / 1.25, least), np.minimum(high * 1.25, most)
    return (np.floor(low), np.ceil(high)) if whole else (low, high)


def search_mechanisms(
    make: Callable[[np.ndarray], Mechanism],
    epsilon: np.ndarray,
    delta: np.ndarray,
    limits: tuple[np.ndarray, np.ndarray],
    relation: str,
    effort: Effort,
    rtol: float,
    whole: bool,
    closest: float = 1e-12,
) -> BestValues:
    """Return each element's least protective value that meets the target, as flat arrays. `make` takes a full batch."""
    low, high = (end.reshape(-1).astype(np.float64) for end in limits)
    values, target = low.copy(), epsilon.reshape(-1)
    deltas, unbounded = delta.reshape(-1).copy(), np.zeros(low.size, bool)

    def evaluate(rows: np.ndarray, some: np.ndarray, effort: Effort = effort) -> Bounds:
        values[rows] = some
        made = make(values.reshape(epsilon.shape))
        if batch_shape(made):
            made = take_rows(made, rows_in(made, epsilon.shape)[rows])
        found = answer(MechanismQuestion("epsilon", made, deltas[rows], relation, effort))
        lost = unbounded[rows]
        if not lost.any():
            return found
        low, middle, high = (np.where(lost, np.inf, end) for end in (found.lower, found.estimate, found.upper))
        return Bounds(low, middle, high, found.kind, np.where(lost, "mass_at_infinity", found.status), found.engine)

    rows = np.arange(low.size)
    while (deltas == 0.0).any():  # find the rows whose loss is unbounded: at delta = 0 their epsilon is infinite
        try:
            evaluate(rows, low, ROUGH_EFFORTS[0])
            break
        except UnboundedLossError as error:
            unbounded |= error.bad.reshape(-1)
            deltas[unbounded] = 0.5  # any delta will do: the answers for these rows are not used
    at_low, at_high, falls = np.zeros(low.size), np.zeros(low.size), np.zeros(low.size, bool)
    # rough epsilons at the ends decide only `falls`, `start_at` and `privates_first`
    for rough in ROUGH_EFFORTS:
        if rows.size == 0:
            break
        first, last = (evaluate(rows, x[rows], rough) for x in (low, high))
        at_low[rows], at_high[rows], falls[rows] = first.upper, last.upper, last.upper <= first.upper
        rows = rows[~((last.upper < first.lower) | (first.upper < last.lower))]
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
        reach=max(0.3, float(np.max(np.log(high) - np.log(low), initial=0.0)) / 8.0),
        roughly=evaluate,
    )
    # log(epsilon) is interpolated linearly in log(value) between the ends of the bracket
    with np.errstate(divide="ignore", invalid="ignore"):
        first, last = (np.clip(np.log(end / target), -FARTHEST, FARTHEST) for end in (at_low, at_high))
        share = np.clip(np.nan_to_num(first / (first - last), nan=0.5), 0.0, 1.0)
    return certified_search(search, start_at(low ** (1.0 - share) * high**share))


def _made(mechanism: Callable[[Any], Mechanism], values: np.ndarray) -> Mechanism:
    """Return the mechanism that the function gives for values of the shape of the batch."""
    return require_mechanism("mechanism", mechanism(values if values.shape else float(values)))
