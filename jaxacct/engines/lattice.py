"""The lattice engine: certified brackets of epsilon and delta for one configuration of any composition.

A plan (tilt, window, range) is made on a sketch of the laws; then each lattice length in turn gives a
dominating and a dominated composition (`kernels.lattice_masses`, `kernels.tilted_fft`) and with them a bracket,
until it is narrow enough or the memory limit is reached.  Brackets of several lengths are intersected.

What is charged to the bracket besides the discretisation is in `lattice_sides.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.lattice_backend import Runner, runner
from jaxacct.engines.lattice_finite import MOST_PAIRS, Finite
from jaxacct.engines.lattice_gaussian import PlainGaussian, SampledGaussian
from jaxacct.engines.lattice_laplace import Laplace
from jaxacct.engines.lattice_part import LatticePart
from jaxacct.engines.lattice_plan import plan_for, share_of, unresolved
from jaxacct.engines.lattice_sides import Side, crossing, evaluate, sides_of
from jaxacct.mechanisms.loss_components import Components

__all__ = [
    "ATTEMPTS",
    "LatticeAnswer",
    "delta",
    "deltas",
    "epsilon",
    "fitting",
    "highest_loss",
    "laws_of",
    "pieces_of",
    "read",
]

LENGTHS = (2**12, 2**15, 2**18, 2**19, 2**20, 2**21, 2**22)
"""Lengths of lattices; the width of a bracket falls as length^-2, its time grows a little faster than the length."""
QUICK = 2**18
"""Longest lattice made for a bracket narrower than the user's rtol; it costs a tenth of the longest of all."""
NARROW = 2e-4
"""A row is given up if even the longest lattice would leave it wider than this, relatively, and than rtol."""
SAYS_NOTHING = 0.9
"""Relative width of a bracket whose lower end is next to nothing, or whose upper end is missing."""
NEARLY_AS_NARROW = 1.5
"""A bracket from a composition for another eps is used if it is at most this factor wider than at that eps."""
ESTIMATE = 2.0 / 3.0
"""Where the truth lies between lower and upper for a smooth law: the errors are as 2 to 1."""
ATTEMPTS = 3
"""Plans for one length at most: where the solution is far from the eps of a plan, another is made for the solution."""
ARRAYS = 40
"""float64 arrays of the lattice's length that are alive at once (measured)."""
ARRAYS_PER_LAW = 12
"""The same for each law (measured)."""


class LatticeAnswer(NamedTuple):
    """lower <= truth <= upper; status "ok", "zero" (epsilon is 0), "width" (wider than asked for), or "contradiction".

    Ends that contradict each other are not used; the bracket is then (-inf, inf).
    """

    lower: float
    estimate: float
    upper: float
    status: str


def epsilon(
    parts: Components,
    index: int,
    delta_fin_lower: float,
    delta_fin_upper: float,
    *,
    rtol: float = 1e-4,
    enough: float = 0.0,
    memory_bytes: int = 2**30,
) -> LatticeAnswer:
    """Bracket of eps = inf {eps >= 0 : delta_fin(eps) <= d} for configuration `index`.

    Parameters
    ----------
    parts : Components of one direction.
    delta_fin_lower, delta_fin_upper : ends of what is known of d > 0, the target for the finite part of the
        loss.  The answer's `upper` holds for the first, its `lower` for the second.
    rtol : wanted (upper - lower)/upper.
    enough : a larger one; lattices longer than QUICK are made only to reach it.
    memory_bytes : limit that decides the longest lattice.

    Call inside `with devices.double_precision():`.
    """
    laws, run = laws_of(parts, index), runner()
    if not laws or delta_fin_lower >= 1.0:
        return LatticeAnswer(0.0, 0.0, 0.0, "zero")
    low, high = 0.0, highest_loss(laws)
    log_delta, share = float(np.log(delta_fin_lower)), share_of(rtol)
    plan = plan_for(laws, None, log_delta, share)
    pieces = pieces_of(laws, plan.cut)
    wanted = rtol, max(enough, rtol)
    length = _next_length(0, np.inf, wanted, pieces, memory_bytes)
    if unresolved(laws, plan, _longest(pieces, memory_bytes)):
        length = 0
    while length:
        for attempt in range(ATTEMPTS):
            down, up = sides_of(pieces, plan, length, run)
            tolerance = 0.02 * rtol * max(plan.centre, 1e-12)
            low = max(low, crossing(down, delta_fin_upper, plan.centre, tolerance)[0])
            high = min(high, crossing(up, delta_fin_lower, plan.centre, tolerance)[1])
            middle = 0.5 * (low + high)
            near = abs(middle - plan.centre) <= max(2.0 / plan.theta, 1e-3 * middle)
            known = high - low < SAYS_NOTHING * high  # otherwise the middle is no estimate of epsilon
            if near or not known or not np.isfinite(middle) or attempt == ATTEMPTS - 1:
                break
            plan = plan_for(laws, middle, log_delta, share)
        if high == 0.0:
            return LatticeAnswer(0.0, 0.0, 0.0, "zero")
        width = (high - low) / high if np.isfinite(high) else np.inf
        length = _next_length(length, width, wanted, pieces, memory_bytes)
    return _answer(low, high, rtol)


def delta(
    parts: Components,
    index: int,
    epsilon: float,
    *,
    rtol: float = 1e-4,
    enough: float = 0.0,
    memory_bytes: int = 2**30,
) -> LatticeAnswer:
    """Bracket of delta_fin(epsilon) = E_P[(1 - e^{epsilon - L})_+ ; L finite] for configuration `index`.

    Arguments as in `epsilon`; the width is relative here too.
    """
    return deltas(parts, [index], np.array([epsilon]), rtol=rtol, enough=enough, memory_bytes=memory_bytes)[0]


def deltas(
    parts: Components,
    rows: Sequence[int],
    epsilon: np.ndarray,
    *,
    rtol: float = 1e-4,
    enough: float = 0.0,
    memory_bytes: int = 2**30,
) -> list[LatticeAnswer]:
    """`delta` of configuration `rows[i]` at `epsilon[i]`, for each i.

    Rows of the same numbers are one configuration, whose compositions are shared.
    """
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(tuple(x[row].tobytes() for x in parts), []).append(place)
    answers = [LatticeAnswer(0.0, 0.0, 0.0, "ok")] * len(rows)
    run = runner()
    for places in alike.values():
        laws = laws_of(parts, rows[places[0]])
        highest = highest_loss(laws) if laws else -np.inf
        places = sorted((place for place in places if epsilon[place] < highest), key=lambda place: epsilon[place])
        brackets = _along(
            laws, [float(epsilon[place]) for place in places], (rtol, max(enough, rtol)), memory_bytes, run
        )
        for place, (low, high) in zip(places, brackets, strict=True):
            answers[place] = _answer(low, high, rtol)
    return answers


def _along(
    laws: list[LatticePart], epsilon: list[float], wanted: tuple[float, float], memory_bytes: int, run: Runner
) -> list[tuple[float, float]]:
    """(lower, upper) of delta at ascending eps.

    A composition made for one eps brackets delta at others too, and as narrowly where they are near.  So one is made
    for the middle eps of those that are left.  Its neighbours are read off as long as their brackets are narrow enough.
    """
    found = [(0.0, 1.0)] * len(epsilon)
    left = [range(len(epsilon))]
    while left:
        now = left.pop()
        if not now:
            continue
        middle = now[len(now) // 2]
        low, high, sides = _composed_for(laws, epsilon[middle], wanted, memory_bytes, run)
        found[middle] = low, high
        # epsilons farther out have wider brackets still
        farther = max(wanted[1], NEARLY_AS_NARROW * (high - low) / high if high > 0.0 else 0.0)
        before, after = range(middle - 1, now[0] - 1, -1), range(middle + 1, now[-1] + 1)
        for side, enough in ((before, wanted[1]), (after, farther)):
            for done, place in enumerate(side):
                low, high = read(sides, epsilon[place])
                if not high - low <= enough * high:
                    left.append(range(min(side[done:]), max(side[done:]) + 1))
                    break
                found[place] = low, high
    return found


def _composed_for(
    laws: list[LatticePart], epsilon: float, wanted: tuple[float, float], memory_bytes: int, run: Runner
) -> tuple[float, float, tuple[Side, Side]]:
    """(lower, upper) of delta at one eps, and the last compositions that gave it."""
    share = share_of(wanted[0])
    log_delta = plan_for(laws, epsilon, 0.0, share).cut - share
    low, high = 0.0, 1.0
    pieces = laws
    length = _next_length(0, np.inf, wanted, laws, memory_bytes)
    while length:
        for _ in range(ATTEMPTS):
            plan = plan_for(laws, epsilon, log_delta, share)
            pieces = pieces_of(laws, plan.cut)
            sides = sides_of(pieces, plan, length, run)
            here = read(sides, epsilon)
            low, high = max(low, here[0]), min(high, here[1])
            found = float(np.log(max(0.5 * (low + high), 1e-290)))
            if found > log_delta - 0.5:
                break
            log_delta = found
        length = _next_length(length, (high - low) / high, wanted, pieces, memory_bytes)
    return low, high, sides


def read(sides: tuple[Side, Side], epsilon: float) -> tuple[float, float]:
    """(lower, upper) of delta at an eps, from compositions for this or another."""
    down, up = sides
    return max(0.0, -float(np.expm1(epsilon)), evaluate(down, epsilon)[0]), min(1.0, evaluate(up, epsilon)[0])


def laws_of(parts: Components, index: int) -> list[LatticePart]:
    """The parts of configuration `index` that are present."""
    sign = float(parts.sign[index])
    laws: list[LatticePart] = []
    if parts.mu2[index] > 0:
        laws.append(PlainGaussian(np.sqrt(parts.mu2[index]), sign))
    gauss = (parts.gauss_sigma[index], parts.gauss_q[index], parts.gauss_n[index])
    for sigma, q, n in zip(*gauss, strict=True):
        if n > 0:
            laws.append(SampledGaussian(sigma, q, n, sign))
    laplace = (parts.laplace_scale[index], parts.laplace_q[index], parts.laplace_n[index])
    for scale, q, n in zip(*laplace, strict=True):
        if n > 0:
            laws.append(Laplace(scale, q, n, sign))
    finite = (parts.finite_loss[index], parts.finite_mass[index], parts.finite_n[index])
    for loss, mass, n in zip(*finite, strict=True):
        if n > 0:
            laws.append(Finite(loss[mass > 0], mass[mass > 0], float(n), sign))
    return laws


def pieces_of(laws: list[LatticePart], cut: float, most_pairs: int = MOST_PAIRS) -> list[LatticePart]:
    """The same composition for the lattice; what is left out of it has mass e^cut.

    most_pairs : of atoms of a finite law that are added up for fewer steps.
    """
    return [piece for law in laws for piece in (law.pieces(cut, most_pairs) if isinstance(law, Finite) else [law])]


def highest_loss(laws: list[LatticePart]) -> float:
    """A loss that the composition cannot exceed, inf where there is none; at least 0."""
    size = sum(law.count * abs(law.highest()) for law in laws)
    return max(sum(law.count * law.highest() for law in laws) + 256.0 * ROUNDOFF * size, 0.0)


def _answer(low: float, high: float, rtol: float) -> LatticeAnswer:
    if not low <= high:
        return LatticeAnswer(-np.inf, np.nan, np.inf, "contradiction")
    middle = low + ESTIMATE * (high - low) if np.isfinite(high) else high
    status = "ok" if np.isfinite(high) and high - low <= rtol * high else "width"
    return LatticeAnswer(float(low), float(middle), float(high), status)


def _next_length(
    length: int, width: float, wanted: tuple[float, float], laws: list[LatticePart], memory_bytes: int
) -> int:
    """The next lattice length, 0 to stop: the relative width of a bracket falls as length^-2.

    wanted : the width that is aimed at, and a larger one that is enough. A lattice longer than QUICK is made only for
    the second, and only if the longest would reach the second or NARROW.

    A bracket that says nothing at the first length gets one longer one.  If that says nothing either, no length does.
    A length N needs about ARRAYS + ARRAYS_PER_LAW R float64 arrays of N elements for R laws.
    """
    known = fitting(laws, memory_bytes)
    first, (rtol, enough) = known[min(1, len(known) - 1)], wanted
    if length == 0:
        return first
    longer = [n for n in known if n > length]
    if width <= rtol or not longer:
        return 0
    if not width < SAYS_NOTHING:
        return longer[0] if length == first else 0
    end = lambda n: width * (length / n) ** 2
    quick = [n for n in longer if n <= QUICK]
    if quick and (2.0 * end(quick[-1]) <= rtol or end(quick[-1]) <= enough):
        return next((n for n in quick if 2.0 * end(n) <= rtol), quick[-1])
    if width <= enough:
        return 0
    if end(longer[-1]) > max(NARROW, enough):
        return quick[-1] if quick else 0
    return next((n for n in longer if n > QUICK and 2.0 * end(n) <= enough), longer[-1])


def fitting(laws: list[LatticePart], memory_bytes: int, lengths: Sequence[int] = LENGTHS) -> list[int]:
    """The lengths of lattices for which the memory suffices, the shortest in any case."""
    return [n for n in lengths if 8 * n * (ARRAYS + ARRAYS_PER_LAW * len(laws)) <= memory_bytes] or [lengths[0]]


def _longest(laws: list[LatticePart], memory_bytes: int) -> int:
    return fitting(laws, memory_bytes)[-1]
