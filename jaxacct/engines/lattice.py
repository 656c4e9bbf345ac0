"""The lattice engine: brackets from laws on a lattice, composed by FFT (README.md, "The lattice engine")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import lattice_parts
from jaxacct.engines.backend import Runner, runner
from jaxacct.engines.lattice_parts import ApproximateLaw, Finite, Laplace, LatticePart, Placed
from jaxacct.kernels.lattice_laws import ROW, Composition, compose, payoff
from jaxacct.mechanisms.loss_components import Components

LENGTHS = (2**12, 2**15, 2**18, 2**19, 2**20, 2**21, 2**22)
"""Numbers of nodes of lattices. A bracket's width falls as length^-2. Time grows a little faster than the length."""
QUICK = 2**18
"""Lattices longer than this are made only while the bracket is wider than `Case.enough`."""
NARROW = 2e-4
"""No lattice longer than QUICK is made if even the longest would leave a bracket wider than NARROW and `enough`."""
SAYS_NOTHING = 0.9
"""A bracket of at least this relative width is useless: its lower bound is far too low, or its upper bound is inf."""
STALLED = 0.5
"""Longer lattices are tried only while each narrows the bracket to at most this share of its relative width."""
ATTEMPTS = 3
"""Largest number of plans for one length. A new plan is made if the answer is far from the expected answer."""
PAIR_LENGTHS = tuple(2**k for k in range(12, 21))
"""Lengths of lattices for a mechanism that is only known to lie between two pairs of distributions."""
UNDERFLOW = 1e-300
"""Upper bound of what the sum for delta loses by underflow. At most 2^22 terms lose at most 2.3e-308 each. `evaluate`
multiplies sum + UNDERFLOW by `scale`. If `scale` is lowered to e^700, the product is above 1 and still bounds delta."""
LARGEST_EXPONENT = 700.0
"""An exponent above this number is lowered to it, because e^710 exceeds float64's range."""
LOST_MASS = 1e-290
"""Upper bound of the P-mass that underflow removes or moves when the law of one step is put on the lattice."""
ESTIMATE = 2.0 / 3.0
"""Place of the estimate in a bracket, from 0 (lower end) to 1. For smooth laws the lower end has twice the error."""


class LatticeAnswer(NamedTuple):
    """A bracket, lower <= truth <= upper, with a status."""

    lower: float
    estimate: float
    upper: float
    status: str  # "ok", "zero" (epsilon is 0), "width" (too wide) or "contradiction" (ends crossed; then (-inf, inf))


NOTHING = LatticeAnswer(-np.inf, np.nan, np.inf, "width")


class Case(NamedTuple):
    """One configuration, and how narrow its bracket should be."""

    above: list[LatticePart]  # the laws of the upper pair, which dominates the mechanism
    below: list[LatticePart]  # the laws of the lower pair, which the mechanism dominates; `above` if there is one pair
    rtol: float
    enough: float  # no lattice is longer than QUICK once the bracket's relative width is at most this (>= rtol)
    memory_bytes: int
    run: Runner

    def two(self) -> bool:
        """Return whether the mechanism is only known to lie between two pairs of distributions."""
        return self.above is not self.below

    def pieces(self, cut: float) -> Case:
        """Return the case with finite laws convolved into fewer steps of more atoms, less a mass of at most e^cut."""
        most = 2**14 if self.two() else lattice_parts.MOST_PAIRS  # largest number of pairs of atoms in a convolution

        def of(laws: list[LatticePart]) -> list[LatticePart]:
            return [piece for law in laws for piece in (law.pieces(cut, most) if isinstance(law, Finite) else [law])]

        above = of(self.above)
        return self._replace(above=above, below=of(self.below) if self.two() else above)


def epsilon(
    parts: Components,
    index: int,
    delta_lower: float,  # lower bound of d: the target minus the mass at infinity (of the upper pair)
    delta_upper: float,  # upper bound of d: the target minus the mass at infinity (of the lower pair)
    *,
    below: Components | None = None,  # the lower pair, if `parts` are those of an upper pair
    ceiling: float = np.inf,  # if epsilon is shown to be at most this, the answer is [0, ceiling]
    rtol: float = 1e-4,
    enough: float = 0.0,  # as in `Case`
    memory_bytes: int = 2**30,
) -> LatticeAnswer:
    """Return the bracket of inf {eps >= 0 : delta_fin(eps) <= d} of a row, where `deltas` defines delta_fin and d > 0.

    Call it inside `with devices.double_precision():`.
    """
    laws = laws_of(parts, index)
    others = laws if below is None else laws_of(below, index)
    if below is None and (not laws or delta_lower >= 1.0):
        return LatticeAnswer(0.0, 0.0, 0.0, "zero")
    if below is not None and not (laws and others and 0.0 < delta_lower < 1.0):
        return NOTHING
    # For a mechanism between two pairs, a bracket of relative width 4e-4 is always narrow enough.
    enough = max(enough, rtol, 0.0 if below is None else 4e-4)
    case = Case(laws, others, rtol, enough, memory_bytes, runner())
    low, high = 0.0, highest_loss(case.above)
    log_delta, share = float(np.log(delta_lower)), share_of(case.rtol)
    plan = plan_for(case.above, None, log_delta, share)
    pieces = case.pieces(plan.cut)
    least = LOST_MASS * sum(law.count for law in pieces.above)  # the bounds of delta allow at least this for underflow
    if delta_upper <= least or unresolved(case.above, plan, fitting(pieces)[-1]):
        return NOTHING if case.two() else _answer(low, high, case.rtol)
    tried: list[tuple[int, float]] = []
    needed = lambda: _sufficient(plan, case.above, case.rtol) if case.two() else None
    length = _next_length(pieces, tried, needed())
    if 0.0 < ceiling < np.inf and evaluate(_upper_side(pieces, plan, length), ceiling) <= delta_lower:
        return _answer(0.0, ceiling, case.rtol)
    while length:
        for attempt in range(ATTEMPTS):
            down, up = sides_of(pieces, plan, length)
            tolerance = 0.02 * case.rtol * max(plan.centre, 1e-12)
            bracketed = 0.0 < low < high < np.inf
            guess = low + ESTIMATE * (high - low) if bracketed else plan.centre
            low = crossing(down, delta_upper, guess, tolerance, low=low)[0]
            high = crossing(up, delta_lower, low if case.two() else guess, tolerance, high=high)[1]
            middle = high if case.two() else 0.5 * (low + high)
            near = abs(middle - plan.centre) <= max(2.0 / plan.theta, 1e-3 * middle)
            # `middle` estimates epsilon only if the bracket is not wide
            known = high - low < SAYS_NOTHING * high
            # A `middle` above 1e3 times both the plan's eps and `ceiling` is too far off for a new plan.
            lost = middle > 1e3 * max(plan.centre, ceiling)
            if near or not known or lost or not np.isfinite(middle) or attempt == ATTEMPTS - 1:
                break
            plan = plan_for(case.above, middle, log_delta, share)
        if high == 0.0:
            break
        tried.append((length, (high - low) / high if np.isfinite(high) else np.inf))
        length = _next_length(pieces, tried, needed())
    return _answer(low, high, case.rtol)


def deltas(
    parts: Components,
    rows: Sequence[int],
    epsilon: np.ndarray,
    *,
    below: Components | None = None,
    rtol: float = 1e-4,
    enough: float = 0.0,
    memory_bytes: int = 2**30,
) -> list[LatticeAnswer]:
    """Return brackets of delta_fin(eps) = E_P[(1 - e^{eps - L})_+ ; L finite] of row rows[i] at epsilon[i]."""
    answers = [LatticeAnswer(0.0, 0.0, 0.0, "ok") if below is None else NOTHING] * len(rows)
    run = runner()
    for places in _alike(rows, epsilon, parts, *(() if below is None else (below,))):
        laws = laws_of(parts, rows[places[0]])
        others = laws if below is None else laws_of(below, rows[places[0]])
        if not laws or not others:
            continue
        highest = highest_loss(laws) if below is None else np.inf
        some = [place for place in places if epsilon[place] < highest]
        case = Case(laws, others, rtol, max(enough, rtol), memory_bytes, run)
        for place, ends in zip(some, _along(case, [float(epsilon[place]) for place in some]), strict=True):
            answers[place] = _answer(*ends, rtol)
    return answers


def _alike(rows: Sequence[int], epsilon: np.ndarray, *pairs: Components) -> list[list[int]]:
    """Return indices into `rows`, in groups of rows with equal components, each group sorted by eps."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(tuple(x[row].tobytes() for parts in pairs for x in parts), []).append(place)
    return [sorted(places, key=lambda place: epsilon[place]) for places in groups.values()]


def _along(case: Case, epsilon: list[float]) -> list[tuple[float, float]]:
    """Return bounds of delta at ascending eps. One composition serves the nearby eps whose brackets are narrow."""
    found = [(0.0, 1.0)] * len(epsilon)
    left = [range(len(epsilon))]
    while left:
        now = left.pop()
        if not now:
            continue
        middle = now[len(now) // 2]
        low, high, sides = _composed_for(case, epsilon[middle])
        found[middle] = low, high
        # Brackets widen away from epsilon[middle]. `farther` is the relative width allowed at larger eps, `nearer` at
        # smaller eps. The two are equal if the bracket at epsilon[middle] is wide, or if there are two pairs.
        width = (high - low) / high if high > 0.0 else 0.0
        farther = max(case.enough, 1.5 * width)
        nearer = farther if case.two() or width > case.enough else case.enough
        before, after = range(middle - 1, now[0] - 1, -1), range(middle + 1, now[-1] + 1)
        for side, enough in ((before, nearer), (after, farther)):
            for done, place in enumerate(side):
                low, high = read(sides, epsilon[place])
                if not high - low <= enough * high:
                    left.append(range(min(side[done:]), max(side[done:]) + 1))
                    break
                found[place] = low, high
    return found


def _composed_for(case: Case, epsilon: float) -> tuple[float, float, tuple[Side, Side]]:
    """Return a lower and an upper bound of delta at one eps, and compositions (`sides_of`) that are narrow there."""
    share = share_of(case.rtol)
    log_delta = plan_for(case.above, epsilon, 0.0, share).cut - share
    low, high, pieces = 0.0, 1.0, case
    tried: list[tuple[int, float]] = []
    narrowest = np.inf
    while length := _next_length(pieces, tried):
        for attempt in range(ATTEMPTS):
            width = high - low
            plan = plan_for(case.above, epsilon, log_delta, share)
            pieces = case.pieces(plan.cut)
            sides = sides_of(pieces, plan, length)
            here = read(sides, epsilon)
            own = 1.0 - here[0] / here[1] if here[1] > 0.0 else 0.0
            if STALLED * own <= narrowest:  # the latest plan is kept unless it is far worse
                narrowest, kept = min(own, narrowest), (sides, log_delta)
            low, high = max(low, here[0]), min(high, here[1])
            found = float(np.log(max(0.5 * (low + high), 1e-290)))
            if found > log_delta - 0.5 or (attempt and high - low > STALLED * width):
                break
            log_delta = found
        if narrowest < SAYS_NOTHING:  # the last plan may be worse, as it holds rarer losses: go on with the best
            log_delta = kept[1]
        tried.append((length, (high - low) / high))
    return low, high, kept[0]


def _answer(low: float, high: float, rtol: float) -> LatticeAnswer:
    if not low <= high:
        return LatticeAnswer(-np.inf, np.nan, np.inf, "contradiction")
    if high == 0.0:
        return LatticeAnswer(0.0, 0.0, 0.0, "zero")
    middle = low + ESTIMATE * (high - low) if np.isfinite(high) else high
    status = "ok" if np.isfinite(high) and high - low <= rtol * high else "width"
    return LatticeAnswer(float(low), float(middle), float(high), status)


def _next_length(case: Case, tried: list[tuple[int, float]], needed: int | None = None) -> int:
    """Return the next lattice's length, or 0 to stop. `tried`: (length, relative bracket width) of past lattices."""
    known = fitting(case)
    if case.two():  # if `needed` is given, a longer lattice than that is tried only while the bracket has no upper end
        last, width = tried[-1] if tried else (0, np.inf)
        least = next((n for n in known if n >= (needed or 0)), known[-1])
        if last < least:
            return least
        done = needed is not None and np.isfinite(width)
        longer = known[known.index(last) + 2 :: 2]  # 4 times as long
        return 0 if done or not longer or _resolved(tried, case.enough) else longer[0]
    first_length = known[min(1, len(known) - 1)]
    if not tried:
        return first_length
    (length, width), rtol, enough = tried[-1], case.rtol, case.enough
    longer = [n for n in known if n > length]
    if width <= rtol or not longer:
        return 0
    if not width < SAYS_NOTHING:  # the bracket is useless: try one longer lattice, and then stop
        return longer[0] if length == first_length else 0
    if len(tried) > 1 and not width <= STALLED * tried[-2][1]:
        return 0
    end = lambda n: width * (length / n) ** 2
    quick = [n for n in longer if n <= QUICK]
    if quick and (2.0 * end(quick[-1]) <= rtol or end(quick[-1]) <= enough):
        return next((n for n in quick if 2.0 * end(n) <= rtol), quick[-1])
    if width <= enough:
        return 0
    # For a bracket wider than 1 %, a lattice of QUICK nodes first tests whether the width falls as length^-2.
    if quick and width > 0.01:
        return quick[-1]
    if end(longer[-1]) > max(NARROW, enough):
        return quick[-1] if quick else 0
    return next((n for n in longer if n > QUICK and 2.0 * end(n) <= enough), longer[-1])


def fitting(case: Case) -> list[int]:
    """Return the lengths of lattices that fit into the memory; the shortest is returned in any case."""
    # measured: 40 float64 arrays as long as the lattice are in memory at once, and 12 more for each law
    lengths, size = PAIR_LENGTHS if case.two() else LENGTHS, 40 + 12 * len(case.above)
    return [n for n in lengths if 8 * n * size <= case.memory_bytes] or [lengths[0]]


def _sufficient(plan: LatticePlan, laws: list[LatticePart], rtol: float) -> int:
    """Return a length of PAIR_LENGTHS that suffices for epsilon of two pairs (README.md), or the longest."""
    steps = sum(law.count for law in laws)
    for length in PAIR_LENGTHS:
        step = (plan.top - plan.bottom) / length
        if 0.25 * steps * (plan.theta + 1.0) * step * step <= max(1e-4, 0.1 * rtol) * plan.centre:
            return length
    return PAIR_LENGTHS[-1]


def _resolved(tried: list[tuple[int, float]], rtol: float) -> bool:
    """Return whether discretisation, judged by the last two widths, adds little to the last bracket."""
    length, width = tried[-1]
    if width <= rtol:
        return True
    if len(tried) < 2 or not np.isfinite(tried[-2][1]):
        return False
    if width >= 1.0:
        return True  # the lower bound is still 0: a longer lattice would not help
    # widths as log(upper/lower), since relative widths never exceed 1
    before, now = (-np.log1p(-min(width, 1.0 - 1e-12)) for _, width in tried[-2:])
    fall = (length / tried[-2][0]) ** 2
    return bool((before - now) / (fall - 1.0) <= max(rtol, 0.1 * now))


def laws_of(parts: Components, index: int) -> list[LatticePart]:
    """Return the laws of the parts that are present in configuration `index`."""
    sign = float(parts.sign[index])
    laws: list[LatticePart] = []
    if parts.mu2[index] > 0:
        laws.append(lattice_parts.PlainGaussian(np.sqrt(parts.mu2[index]), sign))
    gauss = zip(parts.gauss_sigma[index], parts.gauss_q[index], parts.gauss_n[index], strict=True)
    laws += [lattice_parts.SampledGaussian(sigma, q, n, sign) for sigma, q, n in gauss if n > 0]
    laplace = zip(parts.laplace_scale[index], parts.laplace_q[index], parts.laplace_n[index], strict=True)
    laws += [Laplace(scale, q, n, sign) for scale, q, n in laplace if n > 0]
    finite = zip(parts.finite_loss[index], parts.finite_mass[index], parts.finite_n[index], strict=True)
    laws += [Finite(loss[mass > 0], mass[mass > 0], float(n), sign) for loss, mass, n in finite if n > 0]
    return laws


def highest_loss(laws: list[LatticePart]) -> float:
    """Return an upper bound of the composition's loss, at least 0; inf if the loss is unbounded."""
    size = sum(law.count * abs(law.highest()) for law in laws)
    return max(sum(law.count * law.highest() for law in laws) + 256.0 * ROUNDOFF * size, 0.0)


# Plans


class LatticePlan(NamedTuple):
    """The settings for bounding delta on a lattice. They affect how narrow the bounds are, never whether they hold."""

    theta: float  # the tilt: the mass at a loss L is multiplied by e^{theta L}
    centre: float  # the given eps, or an estimate of the eps that belongs to the given delta
    cut: float  # log of the mass of high losses that may be left out
    share: float  # log of the tilted mass of low losses that may be left out
    bottom: float  # smallest composed loss that the lattice must hold
    top: float  # largest composed loss that the lattice must hold
    above: float  # Chernoff's bound of the tilted mass above `top` uses the tilt theta + above
    below: float  # Chernoff's bound of the tilted mass below `bottom` uses the tilt theta - below


def _cumulants(sketches: list[ApproximateLaw], theta: float) -> tuple[float, float, float]:
    """Return K(theta) = log E[e^{theta L}] of the composed loss L, and the mean and variance of L tilted by theta."""
    total, mean, variance = 0.0, 0.0, 0.0
    for loss, log_mass, count in sketches:
        exponent = log_mass + theta * loss
        top = exponent.max()
        weight = np.exp(exponent - top)
        size = weight.sum()
        centre = float(weight @ loss) / size
        total += count * (top + np.log(size))
        mean += count * centre
        variance += count * float(weight @ np.square(loss - centre)) / size
    return float(total), float(mean), float(variance)


def share_of(rtol: float) -> float:
    """Return the log of the share of delta that left-out losses may carry; `rtol`: the brackets' relative width."""
    return float(np.log(rtol)) - 4.0


def plan_for(laws: list[LatticePart], eps: float | None, log_delta: float, share: float) -> LatticePlan:
    """Return the plan for `eps`; if it is None, for the eps with delta = e^log_delta (log_delta 0: unknown).

    The tilt is the saddle point of K(theta) - theta eps - log(theta (theta + 1)), with K(theta) = log E[e^{theta L}] of
    the composed loss L without rare high losses. A heavy tail would move the saddle point far out.
    """
    untruncated = -1e4 if log_delta == 0.0 else log_delta + share
    sketches = [law.sketch(untruncated) for law in laws]

    def state(theta: float) -> tuple[float, float, float]:
        k, mean, variance = _cumulants(sketches, theta)
        at = mean - 1.0 / theta - 1.0 / (1.0 + theta)
        curvature = variance + theta**-2.0 + (1.0 + theta) ** -2.0
        return k, at, k - theta * at - np.log(theta * (theta + 1.0)) - 0.5 * np.log(2 * np.pi * curvature)

    # the tilt is of the order of 1/(standard deviation of the loss)
    spread = max(1.0, float(np.sqrt(_cumulants(sketches, 0.0)[2])))
    low, high = np.log(1e-3 / spread), np.log(1e6)
    for _ in range(26):
        theta = float(np.exp(0.5 * (low + high)))
        _, at, value = state(theta)
        past = at >= eps if eps is not None else (value <= log_delta and at >= 0.0)
        low, high = (low, np.log(theta)) if past else (np.log(theta), high)
    theta = float(np.exp(high))
    k, at, _ = state(theta)
    centre = max(at, 0.0) if eps is None else max(eps, 0.0)
    if log_delta == 0.0:
        log_delta = min(k - theta * centre + np.log(peak(theta)), 0.0)
    # where the tilted law has two modes, delta is far below e^{K - theta eps}, and less mass may be left out
    left_out = share - 3.0 + min(log_delta - (k - theta * centre), -3.0)
    grid = np.geomspace(1e-2, 1e3, 41) * max(1.0 / spread, 0.1 * theta)
    up = np.array([(_cumulants(sketches, theta + t)[0] - k - left_out) / t for t in grid])
    down = np.array([(k - _cumulants(sketches, theta - t)[0] + left_out) / t for t in grid])
    top, bottom = float(np.min(up)), float(np.max(down))
    return LatticePlan(
        theta,
        centre,
        float(log_delta + share),
        share,
        min(bottom, centre),
        max(top, centre),
        float(grid[np.argmin(up)]),
        float(grid[np.argmax(down)]),
    )


def unresolved(laws: list[LatticePart], plan: LatticePlan, length: int) -> bool:
    """Return whether narrow laws, rounded up, raise the mean of the composed loss by more than max(eps, spacing)."""
    step = (plan.top - plan.bottom) / length
    moved = 0.0
    for law in laws:
        sketch = law.sketch(plan.cut)
        _, _, variance = _cumulants([sketch._replace(repeats=1.0)], 0.0)
        if variance < (step / 30.0) ** 2:  # the law is narrow
            share = np.exp(sketch.log_mass) @ -np.expm1(sketch.loss.min() - sketch.loss)
            moved += sketch.repeats * step * float(share)
    return moved > max(plan.centre, step)


def common_step(step: float, laws: list[LatticePart]) -> float:
    """Return a lattice spacing in [step, 1.5 step] that nearly divides the distances of atoms (the laws' `gaps`)."""
    gaps = [pair for law in laws for pair in law.gaps() if pair[0] >= step]
    if not gaps:
        return step
    distance, weight = (np.array(x) for x in zip(*gaps, strict=True))
    lead = distance[np.argmax(weight * distance)]
    most, fewest = max(np.floor(lead / step), 1.0), max(np.ceil(lead / (1.5 * step)), 1.0)
    if fewest > most:  # lead/k is outside [step, 1.5 step] for every whole number k
        return step
    steps = lead / np.arange(most, fewest - 1.0, -1.0)[:20000]
    cost = np.zeros(steps.size)
    for d, w in zip(distance, weight, strict=True):
        cost += w * steps * np.abs(d / steps - np.rint(d / steps))
    return float(steps[np.argmin(cost + 1e-12 * weight.sum() * steps)])


def peak(theta: float) -> float:
    """Return the supremum of e^{-theta d}(1 - e^{-d}) over d >= 0, where d stands for a loss minus eps."""
    return float(np.exp(theta * np.log(theta / (1.0 + theta)) - np.log1p(theta)))


# Compositions on a lattice, rounded down or up


class Side(NamedTuple):
    """A composition rounded up or down to a lattice. `evaluate` reads an upper or a lower bound of delta from it."""

    composed: Composition
    theta: float  # the tilt: the mass at a loss L is multiplied by e^{theta L}
    log_moment: float  # log E[e^{theta L}] of the composed loss L
    log_size: float  # sum of |x| over log_moment's terms x; 8 ROUNDOFF log_size bounds log_moment's rounding error
    start: float  # loss of the first node
    step: float  # difference in loss between neighbouring nodes
    span: float  # length of the lattice, in units of loss
    shift: float  # bound of the absolute error of each loss
    above: float  # bound of the tilted mass that wraps around from above the lattice
    below: float  # bound of the tilted mass that wraps around from below the lattice
    extra: float  # if `upper`, the mass at infinite loss, else a bound of (this side's delta - true delta)
    upper: bool  # whether the composition is rounded up
    run: Runner  # calls the kernels


def sides_of(case: Case, plan: LatticePlan, length: int) -> tuple[Side, Side]:
    """Return (lower side, upper side). The true law dominates the lower side. The upper side dominates the true law."""
    extents = [[law.extent(plan.theta, plan.cut, plan.share) for law in laws] for laws in (case.below, case.above)]
    down, up = _steps(case.above, extents, plan, length)
    lower = _side(case.below, extents[0], plan, length, down, False, case.run)
    return lower, _side(case.above, extents[1], plan, length, up, True, case.run)


def _upper_side(case: Case, plan: LatticePlan, length: int) -> Side:
    extents = [law.extent(plan.theta, plan.cut, plan.share) for law in case.above]
    return _side(case.above, extents, plan, length, _steps(case.above, [extents], plan, length)[1], True, case.run)


def _steps(
    laws: list[LatticePart], extents: list[list[tuple[float, float]]], plan: LatticePlan, length: int
) -> tuple[float, float]:
    """Return the spacings of the lower and the upper side. With `length` nodes, both cover every law's extent."""
    margin = 1.0 + 8.0 / length
    widest = max(1.01 * (high - low) for each in extents for low, high in each)
    span = max(plan.top - plan.bottom, widest) * margin
    span = max(span, 1e-12 * (abs(plan.top) + abs(plan.bottom)), 1e-290)  # so span > 0 even if each law is one atom
    step = common_step(span / (length - 4), laws)
    # If there are Laplace laws, the one that is composed most often adjusts the spacing to its own atoms.
    main = max(laws, key=lambda law: law.count * isinstance(law, Laplace))
    return main.step(step, False), main.step(step, True)


def _side(
    laws: list[LatticePart],
    extents: list[tuple[float, float]],
    plan: LatticePlan,
    length: int,
    step: float,
    upper: bool,
    run: Runner,
) -> Side:
    placed = [law.place(extent, step, length, upper, run) for law, extent in zip(laws, extents, strict=True)]
    tilts = np.array([plan.theta, plan.theta + plan.above, plan.theta - plan.below])
    direction, count, origin = (
        np.array([getattr(x, name) for x in placed]) for name in ("direction", "repeats", "origin")
    )
    coefficient = direction[:, None] * tilts
    base = float(np.sum(count * direction * origin))
    centred = 0.5 * (plan.top + plan.bottom) - 0.5 * length * step
    roll = int(np.floor((centred - base) / step))
    mass = np.stack([x.mass for x in placed])
    composed = run(compose, mass, coefficient, direction, count, step, roll % length, upper)
    logs = count[:, None] * (coefficient * origin[:, None] + np.asarray(composed.log_moments))
    k, k_above, k_below = logs.sum(axis=0)
    sizes = np.abs(coefficient[:, 0] * origin) + np.abs(np.asarray(composed.log_moments)[:, 0])
    start, span = base + roll * step, length * step
    # `growth` exceeds the factor by which rounding may change a moment. A part's moment is a sum over `length` nodes.
    # If the part is composed n times, its moment is raised to the power n, so the sum's relative error counts n times.
    growth = float(
        np.exp(min(1e-9 + ROUNDOFF * (8.0 * np.abs(logs).sum() + 2.0 * length * count.sum()), LARGEST_EXPONENT))
    )
    above = growth * np.exp(min(k_above - k - plan.above * (start + span), 0.0))
    below = growth * np.exp(min(k_below - k + plan.below * start, 0.0))
    rounding = 8.0 * ROUNDOFF * (2.0 * abs(base) + span + abs(start))
    return Side(
        composed=composed,
        theta=plan.theta,
        log_moment=float(k),
        log_size=float(np.sum(count * sizes)),
        start=start,
        step=step,
        span=span,
        shift=float(np.sum(count * [x.shift for x in placed])) + rounding,
        above=float(above),
        below=float(below),
        extra=_extra(placed, upper),
        upper=upper,
        run=run,
    )


def _extra(placed: list[Placed], upper: bool) -> float:
    """Return the mass at infinite loss of an upper side, or a bound of (delta of a lower side - true delta)."""
    if upper:
        survival = sum(x.repeats * np.log1p(-min(x.infinity, 1.0 - ROUNDOFF)) for x in placed)
        return float(-np.expm1(survival) * (1.0 + 1e-12) + LOST_MASS * sum(x.repeats for x in placed))
    growth = float(sum(x.repeats * np.log1p(x.deficit + LOST_MASS) for x in placed))
    # The composition's deficit is e^growth - 1. If growth >= log 2, the deficit is at least 1 and proves nothing.
    return float(np.expm1(growth) * (1.0 + 1e-12)) if growth < 0.69 else float("inf")


def evaluate(side: Side, eps: float) -> float:
    """Return the side's upper or lower bound of delta at eps."""
    theta, outward = side.theta, side.shift + 8.0 * ROUNDOFF * abs(eps)
    eps = eps - outward if side.upper else eps + outward
    mass, start = side.composed.mass, side.start
    if isinstance(mass, np.ndarray):
        # Rows of nodes below eps add nothing to delta, so NumPy skips them. JAX would compile anew for each new length.
        before = (eps - start) / side.step - 2.0
        first = int(min(before, mass.shape[0] - 1)) // ROW * ROW if before > 0.0 else 0
        mass, start = mass[first:], start + first * side.step
    sums = side.run(payoff, mass, start - eps, side.step, theta)
    value, norm, magnitude = (float(x) for x in sums)
    length, end = side.composed.mass.shape[0], side.start + side.span - eps
    rounding = ROUNDOFF * (length + 32.0 + 8.0 * theta * side.span) * magnitude
    wrong = float(side.composed.error) * norm * (1.0 + 1e-9) + rounding + UNDERFLOW
    log_scale = side.log_moment - theta * eps
    relative = outward + 8.0 * ROUNDOFF * (side.log_size + theta * abs(eps) + 8.0)
    scale = np.exp(min(log_scale + (relative if side.upper else -relative), LARGEST_EXPONENT))
    if side.upper:
        beyond = np.log1p(1.0 / theta)
        worst = peak(theta) if end < beyond else np.exp(-theta * end)
        wrong += side.above * worst + (side.below * peak(theta) if side.start > eps else 0.0)
        result = scale * (value + wrong) * (1.0 + 1e-14) + side.extra
    else:
        wrong += (side.above + side.below) * peak(theta)
        result = scale * (value - wrong) * (1.0 - 1e-14) - side.extra
    if not np.isfinite(result):  # use the trivial bound of delta
        result = 1.0 if side.upper else 0.0
    return float(result)


def crossing(
    side: Side, target: float, guess: float, tolerance: float, low: float = 0.0, high: float = np.inf
) -> tuple[float, float]:
    """Return (a, b), where the side's bound of delta is above the target at eps = a, and at most the target at eps = b.

    So `a` of a lower side is a lower bound of epsilon, and `b` of an upper side is an upper bound of epsilon. `low` and
    `high` are such numbers from earlier sides, or 0 and inf. The search returns them if it finds no better ones.
    """
    if side.upper and evaluate(side, 0.0) <= target:
        return 0.0, 0.0
    at = min(max(guess, tolerance), high)
    width, slope, last = tolerance, -side.theta, None
    # `known`: whether a lower side's bound at `high` is above 0. `blind`: an eps below `high` where the bound is <= 0.
    wide, blind, known = 0.0, 0.0, False
    moves = [np.inf, np.inf]  # sizes of the last two moves by secants
    for _ in range(60):  # wherever these steps end, only proved eps are returned
        value = evaluate(side, at)
        if value > target:
            low = at
        elif value <= 0.0 and known:
            blind = at
        else:
            high, known = at, value > 0.0 and not side.upper
            # A bound below -target has an error above the target, so the search may end at a relative width of 1e-3.
            wide = 1e-3 * at if value < -target else 2.0 * tolerance
        if value <= 0.0 and low == 0.0 and not known:
            if evaluate(side, tolerance) <= target:
                return 0.0, tolerance  # the bound is above the target at no eps that was tried
            low = tolerance
        left = max(low, blind)
        if high - left <= max(wide, 2.0 * tolerance):
            break
        secant = value > 0.0 and last is not None and last[1] > 0.0 and value != last[1]
        if last is not None and secant:
            slope = float(np.log(value / last[1])) / (at - last[0])
        last = at, value
        move = float(np.log(value / target)) / -slope if value > 0.0 and slope < 0.0 else np.nan
        moves = [moves[1], abs(move) if secant else np.inf]
        shrinks = not moves[1] > max(0.5 * moves[0], tolerance) or not np.isfinite(high)
        if abs(move) <= tolerance:
            move = width if value > target else -width
            width *= 2.0
        if left < at + move < high and shrinks:
            at += move
        elif np.isfinite(high):
            at = float(np.sqrt(left * high)) if high > 4.0 * left > 0.0 else 0.5 * (left + high)
        else:
            at = 2.0 * left + tolerance
    return low, high


def read(sides: tuple[Side, Side], epsilon: float) -> tuple[float, float]:
    """Return lower and upper bounds of delta at `epsilon`. The sides may have been made for another eps."""
    down, up = sides
    return max(0.0, -float(np.expm1(epsilon)), evaluate(down, epsilon)), min(1.0, evaluate(up, epsilon))
