"""The lattice engine for a composition with two pairs: one that dominates the mechanism, and one that it dominates.

The upper end of a bracket is that of the first, rounded up, the lower end that of the second, rounded down.  The two
differ by more than any lattice resolves, so that the first length is one at which a formula says that discretisation
adds little.  A longer one is taken where the bracket is wide and the lattice is what keeps it so: what discretisation
adds falls as length^-2, and two lengths tell it from the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.engines.lattice import (
    ATTEMPTS,
    NEARLY_AS_NARROW,
    LatticeAnswer,
    fitting,
    highest_loss,
    laws_of,
    pieces_of,
    read,
)
from jaxacct.engines.lattice_backend import runner
from jaxacct.engines.lattice_part import LatticePart
from jaxacct.engines.lattice_plan import LatticePlan, plan_for, share_of, unresolved
from jaxacct.engines.lattice_sides import Side, crossing, evaluate, sides_of, upper_side
from jaxacct.mechanisms.loss_components import Components

__all__ = ["deltas", "epsilon"]

PAIR_LENGTHS = tuple(2**k for k in range(12, 21))
"""Lengths of lattices; each that is tried is LONGER places behind the one before."""
LONGER = 2
FIRST_ADDS = 1e-4
"""What discretisation may add to epsilon at the first length, relatively, by a formula."""
ENOUGH = 4e-4
"""Relative width of a bracket of epsilon at which no longer lattice is tried."""
MOST_PAIRS = 2**14
"""Pairs of atoms that are added up for fewer steps: rounds have hundreds of atoms, which is fine enough."""
SHARE_OF_LATTICE = 0.1
"""What discretisation may add to a bracket, over all of its width, before a longer lattice is taken."""
NEARLY_ONE = 1.0 - 1e-12
"""The largest relative width of a bracket that has a lower end, as it is compared."""
NOTHING = LatticeAnswer(-np.inf, np.nan, np.inf, "width")


class Pairs(NamedTuple):
    """The laws of one configuration: of the pair that dominates, and of the pair that is dominated."""

    above: list[LatticePart]
    below: list[LatticePart]


def epsilon(
    above: Components,
    below: Components,
    index: int,
    targets: tuple[float, float],
    ceiling: float,
    rtol: float,
    memory_bytes: int,
) -> LatticeAnswer:
    """Bracket of eps = inf {eps >= 0 : delta_fin(eps) <= d} for configuration `index`.

    targets : d > 0 less the mass at infinity, rounded down for the pair above and rounded up for the pair below.
    ceiling : where eps is shown to be at most this, and it is above 0, that is the answer.

    Call inside `with devices.double_precision():`.
    """
    laws, run = Pairs(laws_of(above, index), laws_of(below, index)), runner()
    if not laws.above or not laws.below or not 0.0 < targets[0] < 1.0:
        return NOTHING
    low, high = 0.0, highest_loss(laws.above)
    log_delta, share = float(np.log(targets[0])), share_of(rtol)
    plan = plan_for(laws.above, None, log_delta, share)
    pieces = Pairs(*(pieces_of(each, plan.cut, MOST_PAIRS) for each in laws))
    fit = fitting(pieces.above, memory_bytes, PAIR_LENGTHS)
    if unresolved(laws.above, plan, fit[-1]):
        return NOTHING
    lengths = fit[min(_first(plan, laws.above), len(fit) - 1) :: LONGER]
    if 0.0 < ceiling < np.inf:
        up = upper_side(pieces.above, plan, lengths[0], run)
        if evaluate(up, ceiling)[0] <= targets[0]:
            return _answer(0.0, ceiling)
    widths: list[float] = []
    for length in lengths:
        for attempt in range(ATTEMPTS):
            down, up = sides_of(pieces.above, plan, length, run, pieces.below)
            tolerance = 0.02 * rtol * max(plan.centre, 1e-12)
            low = max(low, crossing(down, targets[1], plan.centre, tolerance)[0])
            high = min(high, crossing(up, targets[0], max(low, tolerance), tolerance)[1])
            middle = 0.5 * (low + high)
            near = abs(middle - plan.centre) <= max(2.0 / plan.theta, 1e-3 * middle)
            if near or not np.isfinite(middle) or attempt == ATTEMPTS - 1:
                break
            plan = plan_for(laws.above, middle, log_delta, share)
        widths.append((high - low) / high if 0.0 < high < np.inf else np.inf if high else 0.0)
        if _resolved(widths, lengths, max(rtol, ENOUGH)):
            break
    return _answer(low, high)


def _first(plan: LatticePlan, laws: list[LatticePart]) -> int:
    """Place of the first length to be tried.

    Above, a loss goes to two nodes h apart, so that E e^{theta L} grows by a share theta (theta + 1) h^2/12 on average
    in each of n steps, and epsilon by n (theta + 1) h^2/12.  Below it loses about twice as much.
    """
    steps = sum(law.count for law in laws)
    for place, length in enumerate(PAIR_LENGTHS):
        step = (plan.top - plan.bottom) / length
        if 0.25 * steps * (plan.theta + 1.0) * step * step <= FIRST_ADDS * plan.centre:
            return place
    return len(PAIR_LENGTHS) - 1


def deltas(
    above: Components, below: Components, rows: np.ndarray, epsilon: np.ndarray, rtol: float, memory_bytes: int
) -> list[LatticeAnswer]:
    """Brackets of delta_fin(epsilon[i]) of configuration `rows[i]`; rows of the same numbers share compositions."""
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(tuple(x[row].tobytes() for pair in (above, below) for x in pair), []).append(place)
    answers = [NOTHING] * len(rows)
    for places in alike.values():
        index = int(rows[places[0]])
        laws = Pairs(laws_of(above, index), laws_of(below, index))
        if not laws.above or not laws.below:
            continue
        left = [sorted(places, key=lambda place: epsilon[place])]
        while left:
            now = left.pop()
            if not now:
                continue
            middle = len(now) // 2
            low, high, sides = _composed_for(laws, float(epsilon[now[middle]]), rtol, memory_bytes)
            answers[now[middle]] = _answer(low, high)
            enough = max(rtol, NEARLY_AS_NARROW * (high - low) / high) if high > 0.0 else rtol
            for side in (now[middle - 1 :: -1] if middle else [], now[middle + 1 :]):
                for done, place in enumerate(side):
                    low, high = read(sides, float(epsilon[place]))
                    if not high - low <= enough * high:
                        left.append(sorted(side[done:], key=lambda place: epsilon[place]))
                        break
                    answers[place] = _answer(low, high)
    return answers


def _composed_for(
    laws: Pairs, epsilon: float, rtol: float, memory_bytes: int
) -> tuple[float, float, tuple[Side, Side]]:
    """(lower, upper) of delta at one eps, and the last compositions that gave it."""
    share, run = share_of(rtol), runner()
    log_delta = plan_for(laws.above, epsilon, 0.0, share).cut - share
    low, high = 0.0, 1.0
    lengths, widths = fitting(laws.above, memory_bytes, PAIR_LENGTHS)[::LONGER], []
    for length in lengths:
        for _ in range(ATTEMPTS):
            plan = plan_for(laws.above, epsilon, log_delta, share)
            pieces = Pairs(*(pieces_of(each, plan.cut, MOST_PAIRS) for each in laws))
            sides = sides_of(pieces.above, plan, length, run, pieces.below)
            here = read(sides, epsilon)
            low, high = max(low, here[0]), min(high, here[1])
            found = float(np.log(max(0.5 * (low + high), 1e-290)))
            if found > log_delta - 0.5:
                break
            log_delta = found
        widths.append((high - low) / high)
        if _resolved(widths, lengths, rtol):
            break
    return low, high, sides


def _resolved(widths: list[float], lengths: list[int], rtol: float) -> bool:
    """Whether what discretisation adds to the last of the relative widths is small, by the one before.

    Relative widths end at 1, so that what falls is the logarithm of upper over lower end.
    """
    if widths[-1] <= rtol:
        return True
    if len(widths) < 2 or not np.isfinite(widths[-2]):
        return False
    if widths[-1] >= 1.0:
        return True  # no lower end at either length
    before, now = (-np.log1p(-min(width, NEARLY_ONE)) for width in widths[-2:])
    fall = (lengths[len(widths) - 1] / lengths[len(widths) - 2]) ** 2
    return bool((before - now) / (fall - 1.0) <= max(rtol, SHARE_OF_LATTICE * now))


def _answer(low: float, high: float) -> LatticeAnswer:
    if not low <= high:
        return LatticeAnswer(-np.inf, np.nan, np.inf, "contradiction")
    return LatticeAnswer(float(low), float(low), float(high), "zero" if high == 0.0 else "ok")
