"""The bracket of a composition with two pairs, one that dominates it and one that it dominates, in one direction.

Both go through the lattice engine together.  What it answers is held against the quick theorems of either pair; an
answer that contradicts them, or its own other end, is not used, and neither is one that never came.
"""

from __future__ import annotations

import numpy as np

from jaxacct.accounting.dispatch import FAILURES
from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.progress import Progress
from jaxacct.core.validation import InputError
from jaxacct.engines import quick_bounds
from jaxacct.engines.backend import on_cores
from jaxacct.engines.devices import double_precision
from jaxacct.engines.protocol import Answer, Effort
from jaxacct.mechanisms import Components, Mechanism, allocation_rounds
from jaxacct.mechanisms.balls_in_bins import rounds_inside
from jaxacct.mechanisms.base import take_rows

__all__ = [
    "BETWEEN_PAIRS",
    "OK_WIDTH",
    "WIDE",
    "delta_of_pairs",
    "differing",
    "epsilon_of_pairs",
    "prepare_pairs",
    "rows_with_rounds",
]

ROWS_WITH_PROGRESS = 16
"""Configurations from which on a progress bar shows."""
ROUNDS_TOGETHER = 20
"""Rounds whose profiles are computed together: their contours are then fewer and larger arrays."""
ROWS_TOGETHER = 256
"""Configurations whose theorems are evaluated together."""
THREADS = 1
"""Threads: arrays are short, and two threads that wait for the interpreter take half as much CPU time again as one, and
as long."""
BETWEEN_PAIRS = 7.0 / 9.0
"""Where the truth lies between the lower and the upper pair of a smooth loss.

Chords between points a distance h apart lie f'' h^2/12 above a function on average, and the corners below, where chords
that are continued meet, make a polygon 7 f'' h^2/24 below it."""
OK_WIDTH = {"epsilon": 1e-3, "delta": 5e-2}
"""Relative width up to which such a bracket has the status "ok" however small rtol is: the pairs are hardly ever
narrower than that, and asking for less is no failure."""
WIDE = 8e-4
"""Relative width of epsilon from which on rounds of random allocation are asked again with more losses."""


def prepare_pairs(mechanism: Mechanism) -> None:
    """Make the profiles of all rounds of random allocation inside, which takes the longest."""
    rounds = rounds_inside(mechanism)[: allocation_rounds.KEPT]
    blocks = [rounds[first : first + ROUNDS_TOGETHER] for first in range(0, len(rounds), ROUNDS_TOGETHER)]
    bar = Progress(len(rounds), None if len(rounds) >= ROWS_WITH_PROGRESS else False)
    for _ in on_cores(allocation_rounds.prepare, blocks, bar, [len(block) for block in blocks], THREADS):
        pass


def rows_with_rounds(mechanism: Mechanism, rows: np.ndarray) -> Mechanism | None:
    """Some configurations, if there are any and rounds of random allocation are inside."""
    try:
        some = take_rows(mechanism, rows) if rows.size else None
    except InputError:  # of a mechanism that is not taken apart
        return None
    return some if some is not None and rounds_inside(some) else None


def differing(above: list[Components], below: list[Components]) -> np.ndarray:
    """(B,) the configurations whose finite parts differ in some direction; noise differs only by its rounding."""
    rows = above[0].sign.size
    found = np.zeros(rows, bool)
    for one, other in zip(above, below, strict=True):
        for a, b in ((one.finite_loss, other.finite_loss), (one.finite_mass, other.finite_mass)):
            if a.shape != b.shape:  # some configurations may not have finite parts
                found |= np.any(one.finite_n > 0, axis=1) | np.any(other.finite_n > 0, axis=1)
            else:
                found |= np.any((a != b).reshape(rows, int(np.prod(a.shape[1:]))), axis=1)
        found |= one.log_survival != other.log_survival
    return found


def epsilon_of_pairs(
    above: Components, below: Components, target: np.ndarray, ceiling: np.ndarray, effort: Effort
) -> Answer:
    """Epsilon at deltas; NaN at all three ends of a row that has no answer.

    ceiling : the upper end of the other direction; less than that is not asked for.
    """
    from jaxacct.engines import lattice

    wrong = above.infinity_units * ROUNDOFF * above.delta_infinity
    least = (target - above.delta_infinity - wrong) * (1.0 - 4.0 * ROUNDOFF)
    most = (target - below.delta_infinity + below.infinity_units * ROUNDOFF * below.delta_infinity) * (
        1.0 + 4.0 * ROUNDOFF
    )
    ends = np.full((3, target.size), np.nan)

    def asked(row: int) -> lattice.LatticeAnswer:
        try:
            with np.errstate(all="ignore"), double_precision():
                return lattice.epsilon_of_pairs(
                    above, below, row, (least[row], most[row]), ceiling[row], effort.rtol, effort.memory_bytes
                )
        except FAILURES:
            return lattice.NOTHING

    rows = np.flatnonzero(least > SMALLEST_POSITIVE).tolist()
    bar = Progress(len(rows), None if len(rows) >= ROWS_WITH_PROGRESS else False)
    for place, found in on_cores(asked, rows, bar, threads=THREADS):
        if found.lower <= found.upper < np.inf:
            ends[:, rows[place]] = max(found.lower, 0.0), found.lower, found.upper
    for first in range(0, len(rows), ROWS_TOGETHER):
        some = np.array(rows[first : first + ROWS_TOGETHER])
        zero = np.zeros(some.size)
        low = quick_bounds.limits("epsilon", above.take(some), least[some], zero)[0]
        high = quick_bounds.limits("epsilon", below.take(some), most[some], zero)[1]
        ends[:, some[~((ends[2, some] >= low) & (ends[1, some] <= high))]] = np.nan
    return Answer(*ends)


def delta_of_pairs(above: Components, below: Components, eps: np.ndarray, effort: Effort) -> Answer:
    """Delta at epsilons, with the mass at infinity; NaN at all three ends of a row that has no answer."""
    from jaxacct.engines import lattice

    ends = np.full((3, eps.size), np.nan)
    try:
        with np.errstate(all="ignore"), double_precision():
            found = lattice.deltas_of_pairs(above, below, range(eps.size), eps, effort.rtol, effort.memory_bytes)
    except FAILURES:
        return Answer(*ends)
    zero = np.zeros(eps.size)
    least = quick_bounds.limits("delta", above, eps, zero)[0]
    most = quick_bounds.limits("delta", below, eps, zero)[1]
    for row, one in enumerate(found):
        if not (one.lower <= one.upper < np.inf and one.upper >= least[row] and one.lower <= most[row]):
            continue
        low = one.lower + below.delta_infinity[row] * (1.0 - (4.0 + below.infinity_units[row]) * ROUNDOFF)
        high = one.upper + above.delta_infinity[row] * (1.0 + (4.0 + above.infinity_units[row]) * ROUNDOFF)
        low, high = max(low * (1.0 - 4.0 * ROUNDOFF), 0.0), min(high * (1.0 + 4.0 * ROUNDOFF), 1.0)
        ends[:, row] = low, low, high
    return Answer(*ends)
