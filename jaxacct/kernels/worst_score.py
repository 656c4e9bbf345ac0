"""The worst score for "run K times, keep the best": an upper bound of its leak, and an order that leaks almost as much.

jaxacct/selection/README.md, "The worst score" and "Bounding the integral", has the proofs, and defines T, L, phi, E,
rows, columns, cells and groups. A row is served at w if the integrand at this w is used for the whole row, in place of
the maximum over w. A row is active if its integrand is positive. A coarse evaluation (`Sketch`) chooses E, the active
rows and the columns. Arrays have the cells of w on the first axis, and the groups of rows on the last.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, Namespace, iterate, namespace, repeat

CELLS = 16384
"""Number of cells of each polygon that bounds a trade-off curve. A polygon is straight on a cell."""


class Resolution(NamedTuple):
    """The sizes of a mesh. Larger sizes narrow the bracket of eps but take longer. Brackets hold for any sizes."""

    groups: int  # groups of active rows
    lines: int  # tangents of the curve T in each group; each gives one active row
    columns: int  # columns beyond the active rows, shared by all groups
    window: int  # columns that each group has for itself, around the w at which its rows have their maximum
    sketch: tuple[int, int]  # rows and columns of the sketch that places the mesh


GLANCE = Resolution(24, 4, 64, 16, (24, 64))
"""The coarsest resolution. It serves to decide whether the second direction can leak more than the first direction."""
QUICK = Resolution(36, 6, 80, 24, (36, 96))
"""The usual resolution of the first evaluation. Each resolution below serves for brackets that are still too wide."""
STEADY = Resolution(60, 6, 120, 32, (36, 96))
MIDDLE = Resolution(96, 6, 192, 48, (36, 96))
"""This resolution also serves for a delta that is evaluated only once."""
FINE = Resolution(256, 6, 768, 192, (36, 96))
"""This resolution follows QUICK if the narrowest brackets are wanted."""
FINEST = FINE._replace(sketch=(144, 192))
"""The last resolution, for very narrow brackets. Its finer sketch shows changes of the best order that FINE misses."""
MASS_ERROR = 16.0 * ROUNDOFF
"""Upper bound of the absolute error of a difference of two masses."""
SLOPE_ERROR = 4e-12
"""Upper bound of the relative error of a computed phi'. phi is the generating function of K."""
LEAST_SLOPE = 1e-300
"""Rounding up raises phi' to at least this number, since a smaller phi' may have underflowed in float64."""
LARGEST_FALL = 4.0
"""Cap, in nats, on two changes: of the curve's log slope from row to row, and of log phi' from column to column."""


class Repetitions(Protocol):
    """The law of K, the number of runs, as these kernels use it. phi is the generating function of K."""

    def generating(self, y: Array) -> tuple[Array, Array, Array]:
        """Return (phi, phi', phi'') at 1 - y."""

    def slopes(self, y: Array) -> tuple[Array, Array]:
        """Return the derivatives (phi', phi'') of the generating function at 1 - y."""


class Outer(NamedTuple):
    """A concave polygon above a curve. It is straight on each of N cells, and the slopes fall to 0 along the cells."""

    ratio: Array  # (N,) slopes
    q: Array  # (N + 1,) ends of the cells, which are Q-masses from 0 to 1
    p: Array  # (N + 1,) height of the polygon, a P-mass, at these ends
    twin: Array  # (N + 1,) for each end q, the index of the first knot of the inner polygon at q or beyond


class Inner(NamedTuple):
    """The N + 1 knots of a concave polygon below a curve."""

    q: Array  # (N + 1,) Q-mass of each knot
    p: Array  # (N + 1,) P-mass of each knot


class Sketch(NamedTuple):
    """Coarse rows and columns. A row that is served at the end of a column adds gain - e^eps cost to the leak."""

    gain: Array  # (A, B) for A rows and B columns
    cost: Array  # (A, B)
    growth: Array  # (A, B) growth of log phi' from column to column
    infinite: Array  # leak of the outcomes with dQ = 0
    mass: Array  # (2, A) P-mass and Q-mass of the rows
    rows: Array  # (A + 1,) ends of the rows, as indices of cells of the curve
    columns: Array  # (B + 1,) ends of the columns, as indices of cells of the curve


class Mesh(NamedTuple):
    """The active rows of a mesh, and the columns that lie beyond all active rows. All fields are indices of cells."""

    rows: Array  # (groups * lines + 1,) ascending from 0: where each active row begins, and where the last one ends
    columns: Array  # (columns,) cells at which the columns begin, ascending
    above: Array  # the first cell whose slope dP/dQ is at most 1; all cells before it have a slope above 1


def steep(law: Repetitions, mass: Array, side: float = 0.0) -> Array:
    """Return phi' at x = `mass`, rounded up for side 1, down for side -1, and not rounded for side 0."""
    xp = namespace(mass)
    value = xp.asarray(law.slopes(1.0 - xp.clip(mass + side * MASS_ERROR, 0.0, 1.0))[0]) * (1.0 + side * SLOPE_ERROR)
    return xp.maximum(value, LEAST_SLOPE) if side > 0.0 else value


def at_infinity(law: Repetitions, mass: Array, side: float) -> Array:
    """Return phi(1) - phi(1 - mass), the leak of outcomes with dQ = 0 and P-mass `mass`, rounded as `steep` rounds."""
    # For a small `mass` the difference loses its digits. It lies between mass phi'(1 - mass) and mass phi'(1).
    xp = namespace(mass)
    sure, survived = ([xp.asarray(x) for x in law.generating(y)] for y in (xp.zeros_like(mass), mass))
    difference = sure[0] - survived[0] + side * (SLOPE_ERROR * sure[0] + MASS_ERROR * sure[1])
    if side > 0.0:
        return xp.minimum(mass * steep(law, xp.ones_like(mass), side), difference)
    return xp.maximum(mass * steep(law, 1.0 - mass, side), difference)


def before(xp: Namespace, at: Array, x: Array, side: str = "left") -> Array:
    """For each entry of x, count the smaller entries of `at` (short, ascending). Side "right" counts equal ones too."""
    if xp is jnp:
        return jnp.searchsorted(at, x, side=side, method="compare_all")
    return np.searchsorted(at, x, side=side)  # type: ignore[call-overload]  # NumPy's types want a literal `side`


def middles(ends: Array) -> Array:
    return 0.5 * (ends[1:] + ends[:-1])


def sketch(law: Repetitions, q: Array, p: Array, above: Array, resolution: Resolution) -> Sketch:
    """Return the sketch of a polygon with N + 1 knots (q, p). The first `above` of its cells have slopes above one."""
    xp, cells = namespace(q), q.size - 1
    log = lambda x, least: xp.log(xp.maximum(x, least))

    def ends(sample: Array, count: int, *growths: Array) -> Array:
        reach = (sample - sample[0]) / xp.maximum(sample[-1] - sample[0], 1)
        for growth in growths:
            size = xp.abs(growth - growth[0])
            reach = reach + size / xp.maximum(size[-1], 8.0)
        levels = xp.linspace(0.0, 1.0, count + 1) * reach[-1]
        placed = xp.round(_between(levels, reach, sample.astype(q.dtype))).astype(sample.dtype)
        return xp.clip(placed, sample[0], sample[-1])  # a NaN was cast to an arbitrary integer, and is clipped

    # All rows have about the same size, and so have all columns. The size of a row is the sum of its shares of three
    # totals: the cells, the growth of log phi', and the growth of log p. The size of a column has the first two shares.
    # phi' is evaluated at 385 ends of cells.
    rows, columns = ((xp.arange(385) * size) // 384 for size in (above, cells))
    # A P-mass below 1e-18 counts as 1e-18, so that few rows lie there.
    rows = ends(rows, resolution.sketch[0], log(steep(law, 1.0 - p[rows]), 1e-300), log(p[rows], 1e-18))
    columns = ends(columns, resolution.sketch[1], log(steep(law, p[columns]), 1e-300))
    u_q, u_p, w_q, w_p = q[rows], p[rows], q[columns[1:]], p[columns[1:]]
    height = steep(law, w_p[None] - middles(u_p)[:, None])
    growth = xp.diff(log(height, 1e-300), axis=1, prepend=xp.inf)
    gain = xp.diff(u_p)[:, None] * height
    cost = xp.diff(u_q)[:, None] * steep(law, w_q[None] - middles(u_q)[:, None])
    later = columns[None, 1:] >= rows[1:, None]
    infinite = at_infinity(law, p[0], -1.0)
    mass = xp.stack([xp.diff(u_p), xp.diff(u_q)])
    gain, cost = xp.where(later, gain, 0.0), xp.where(later, cost, xp.inf)
    return Sketch(gain, cost, xp.clip(growth, 0.0, LARGEST_FALL), infinite, mass, rows, columns)


def sketched_epsilon(found: Sketch, log_delta: Array, highest: Array) -> Array:
    """Return, by bisection, the eps in [0, highest] at which the sketch's leak is e^log_delta."""
    xp = namespace(found.gain)

    def step(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        best = xp.max(found.gain - xp.exp(middle) * found.cost, axis=1)
        leak = xp.sum(xp.maximum(best, 0.0)) + found.infinite
        over = xp.log(xp.maximum(leak, 1e-320)) > log_delta
        return xp.where(over, middle, low), xp.where(over, high, middle)

    # 20 bisections find eps to a millionth of its range, which is less than the error of the sketch
    low, high = repeat(xp, 20, step, (0.0 * highest, highest))
    return 0.5 * (low + high)


def mesh(found: Sketch, ratio: Array, resolution: Resolution) -> Mesh:
    """Choose the mesh for e^eps = `ratio`. Its rows and columns are dense where coarse ones would widen the bracket."""
    xp = namespace(found.gain)
    value = found.gain - ratio * found.cost
    best = xp.maximum(xp.max(value, axis=1), 0.0)
    total = xp.sum(best) + 1e-300
    size = xp.arange(best.size)
    # `error` is a row's best value plus an estimate of how much the mesh overstates the row. From one row to the next,
    # the curve's log slope falls by `fall`, and phi' falls by the share `change` of itself. Over a group of `lines`
    # rows, both fall by `lines` times as much.
    last = xp.max(xp.where(best > 3e-5 * total, size, 0))
    end = xp.minimum(last + 2, best.size)
    at = xp.argmax(value[xp.minimum(size, last)], axis=1)
    p_mass, q_mass = found.mass
    slopes = found.gain / xp.maximum(p_mass, 1e-300)[:, None]
    here, after = slopes[size, at], slopes[xp.minimum(size + 1, best.size - 1), at]
    change = xp.clip(1.0 - after / xp.maximum(here, 1e-300), 0.0, 1.0)
    slope = xp.log(xp.maximum(p_mass, 1e-300)) - xp.log(xp.maximum(q_mass, 1e-300))
    fall = xp.clip(slope - xp.append(slope[1:], slope[-1]), 0.0, LARGEST_FALL)
    error = best + 0.1 * p_mass * here * (fall**2 + resolution.lines**2 * change * (change + fall))
    rows = (error / total) ** (1.0 / 3.0)
    rows = xp.maximum(rows, xp.where(size > 0, xp.roll(rows, 1), 0.0))
    rows = xp.maximum(rows, xp.where(size > 0, xp.roll(rows, 1), 0.0)) + 0.02 * xp.max(rows) + 1e-6
    # Where log gain grows by g over a column, the column overstates the gain by a share of g^2/8. This excess should
    # stay below `ahead`: the row's best value minus the column's value, plus 1e-4 of the leak, plus 0.3 of the best
    # value. The 0.3 is allowed since near the best value the finer columns of a window replace the shared columns.
    ahead = best[:, None] - value + (0.3 * best + 1e-4 * total)[:, None]
    share = xp.where(found.gain > 0.0, found.gain / ahead, 0.0)
    columns = xp.max(found.growth * xp.sqrt(share), axis=0)
    columns = columns + 0.2 * xp.mean(columns) + 1e-6
    stop = found.rows[end]
    inside = _placed(rows, found.rows, 0, stop, resolution.groups * resolution.lines)
    beyond = _placed(columns, found.columns, stop, found.columns[-1], resolution.columns)
    return Mesh(xp.concatenate([xp.zeros_like(inside[:1]), inside[1:], stop[None]]), beyond, found.rows[-1])


def _placed(density: Array, pieces: Array, first: Array, last: Array, count: int) -> Array:
    """Return `count` ascending indices of cells in [first, last), spread over the pieces in proportion to `density`."""
    xp = namespace(density)
    ends = xp.clip(pieces, first, last).astype(xp.float64)
    mass = xp.concatenate([xp.zeros(1), xp.cumsum(density * xp.diff(ends) / xp.maximum(xp.diff(pieces), 1))])
    share = (xp.arange(count) + 0.5) / count * mass[-1]
    cell = xp.floor(_between(share, mass, ends)).astype(pieces.dtype)
    return xp.clip(cell, first, xp.maximum(last - 1, first))


def _between(x: Array, at: Array, values: Array) -> Array:
    """Return values at x, by linear interpolation between few ascending points `at`. `jnp.interp` would loop."""
    xp = namespace(at)
    i = xp.clip(before(xp, at, x, "right") - 1, 0, at.size - 2)
    share = (x - at[i]) / xp.maximum(at[i + 1] - at[i], 1e-300)
    return values[i] + xp.clip(share, 0.0, 1.0) * (values[i + 1] - values[i])


SUM_ROUNDING = 1e-9
"""Relative error allowed for a sum of positive terms. The error of a sum of thousands of terms is far below it."""
WINDOW_MARGIN = 2
"""A window of finer columns covers the columns where a group's rows leak most, and this many columns on each side."""
OUTWARD = 1e-12
"""Bounds of delta move outward by this share of delta, and bounds of eps by this amount, to allow for rounding."""


class Order(NamedTuple):
    """An order of scores for an inner polygon, in R rows. Row k has the Q-masses from q_k to q_{k+1}."""

    row_q: Array  # (R + 1,) Q-masses at the ends of the rows
    row_p: Array  # (R + 1,) P-masses at the ends of the rows
    served_q: Array  # (R,) the w_k at which row k is served, a Q-mass: non-increasing in k, and at least row_q[-1]
    served_p: Array  # (R,) the P-mass that the curve has at the Q-mass w_k
    active: Array  # (R,) True before the first row whose value is not positive; later rows add nothing to the leak
    places: Array  # (G + 1,) for each end of the G groups of rows, the w at which the rows beside this end leak most


def order(law: Repetitions, curve: Inner, where: Mesh, ratio: Array, resolution: Resolution) -> Order:
    """Given the rows of a mesh, return an order of scores whose leak at e^eps = `ratio` is nearly the largest."""
    xp = namespace(curve.q)
    groups, each = resolution.groups, resolution.lines
    row_q, row_p = curve.q[where.rows], curve.p[where.rows]
    size_q, size_p = xp.diff(row_q), xp.diff(row_p)

    def value(at: Array, size_q: Array, size_p: Array, u_q: Array, u_p: Array) -> tuple[Array, Array]:
        """Return (gain - cost, cost) of rows of masses (size_q, size_p) at (u_q, u_p), if served at the cells `at`."""
        cost = xp.where(size_q > 0.0, ratio * size_q * steep(law, curve.q[at] - u_q), 0.0)
        return size_p * steep(law, curve.p[at] - u_p) - cost, cost

    def best_of(at: Array) -> Array:
        """For each end of a group, return where in `at` gain - cost is largest; if never > 0, where gain/cost is."""
        win, cost = value(at, around_q, around_p, row_q[::each], row_p[::each])
        win = xp.where(xp.max(win, axis=0) > 0.0, win, win / xp.maximum(cost, 1e-300))
        return xp.argmax(win, axis=0)

    # For each end of a group find the best column, and then the best of 33 cells around this column.
    node = xp.arange(groups + 1)
    left, right = xp.maximum(node - 1, 0) * each, xp.minimum(node + 1, groups) * each
    around_q, around_p = row_q[right] - row_q[left], row_p[right] - row_p[left]
    columns = xp.concatenate([where.rows[-1:], where.columns, xp.array([curve.q.size - 1])])
    best = best_of(columns[:, None])
    first, last = columns[xp.maximum(best - 1, 0)], columns[xp.minimum(best + 1, columns.size - 1)]
    near = first + (last - first) * xp.arange(33)[:, None] // 32
    best = xp.take_along_axis(near, best_of(near)[None], axis=0)[0]
    # Each row of a group is served at the best of three cells: a, b (the best for the group's ends), and one between.
    a, b = best[:-1, None], best[1:, None]
    between = a + (b - a) * (2 * xp.arange(each) + 1) // (2 * each)
    tried = xp.stack([x.reshape(-1) for x in xp.broadcast_arrays(a, b, between)])
    values = value(tried, size_q, size_p, middles(row_q), middles(row_p))[0]
    stops = (xp.max(values, axis=0) <= 0.0) & (size_q > 0.0)
    number = xp.where(xp.any(stops), xp.argmax(stops), size_q.size)
    active = xp.arange(size_q.size) < number
    served = xp.take_along_axis(tried, xp.argmax(values, axis=0)[None], axis=0)[0]
    served = _latest(xp.where(active, served, where.rows[-1]).reshape(groups, each)).reshape(-1)
    return Order(row_q, row_p, curve.q[served], curve.p[served], active, curve.q[best])


def _latest(served: Array) -> Array:
    """Return for each entry of a matrix the largest of this entry and all later entries, in row-major order."""
    xp = namespace(served)
    later = lambda n: xp.arange(n)[:, None] <= xp.arange(n)
    within = xp.max(xp.where(later(served.shape[1]), served[:, None, :], 0), axis=2)
    whole = xp.max(xp.where(later(served.shape[0]), within[:, 0], 0), axis=1)
    return xp.maximum(within, xp.append(whole[1:], 0)[:, None])


def attained(law: Repetitions, curve: Inner, found: Order) -> tuple[Array, Array]:
    """Return (gain, cost) such that the order of scores `found` leaks at least gain - E cost at every E = e^eps."""
    # phi' is convex. So phi(x+h) - phi(x) is at least h phi'(x + h/2), for the gain, and at most h times the mean of
    # phi'(x) and phi'(x+h), for the cost.
    xp = namespace(curve.q)
    row_q, row_p, served_q, served_p, active, _ = found
    size_q, size_p = xp.diff(row_q), xp.diff(row_p)
    gain = size_p * steep(law, served_p - middles(row_p), -1.0)
    cost = 0.5 * size_q * (steep(law, served_q - row_q[:-1], 1.0) + steep(law, served_q - row_q[1:], 1.0))
    infinite = at_infinity(law, curve.p[0], -1.0)
    gain = (xp.sum(xp.where(active, gain, 0.0)) + infinite) * (1.0 - SUM_ROUNDING)
    genuine = xp.all(size_q >= 0.0) & xp.all(xp.diff(served_q) <= 0.0) & (served_q[-1] >= row_q[-1])
    # A gain cannot exceed the whole mass, which is 1. So a larger sum is wrong, and 0 is returned in its place.
    return xp.where(genuine & (gain <= 1.0), gain, 0.0), xp.sum(xp.where(active, cost, 0.0)) * (1.0 + SUM_ROUNDING)


def delta(law: Repetitions, above: Outer, below: Inner, ratio: Array, resolution: Resolution) -> tuple[Array, Array]:
    """Return (lower, upper) for the worst leak at e^eps = `ratio` >= 1. If they contradict each other: (0, 1)."""
    xp = namespace(above.q)
    where = mesh(sketch(law, above.q, above.p, xp.sum(above.ratio > 1.0), resolution), ratio, resolution)
    found = order(law, below, _moved(where, above), ratio, resolution)
    gain, cost = attained(law, below, found)
    upper = bound(lines(law, above, where, found.places, resolution), ratio)
    lower = gain - ratio * cost
    lower, upper = xp.where(lower > 0.0, lower, 0.0), xp.where(upper <= 1.0, upper, 1.0)
    agree = lower <= upper
    return xp.where(agree, lower, 0.0), xp.where(agree, upper, 1.0)


def best_order(law: Repetitions, below: Inner, ratio: Array, resolution: Resolution) -> Order:
    """Return the order of scores that leaks most, or nearly most, at e^eps = `ratio`."""
    xp = namespace(below.q)
    count = xp.sum(xp.diff(below.p) > xp.diff(below.q))
    return order(
        law, below, mesh(sketch(law, below.q, below.p, count, resolution), ratio, resolution), ratio, resolution
    )


def _moved(where: Mesh, above: Outer) -> Mesh:
    """Return the mesh on the inner polygon that corresponds to a mesh on the outer polygon."""
    return Mesh(*(above.twin[index] for index in where))


def epsilon(
    law: Repetitions, above: Outer, below: Inner, log_delta: Array, highest: Array, resolution: Resolution
) -> tuple[Array, Array]:
    """Return (lower, upper) of the eps >= 0 where the worst leak is e^log_delta; upper is inf if eps > `highest`."""
    xp = namespace(above.q)
    seen = sketch(law, above.q, above.p, xp.sum(above.ratio > 1.0), resolution)
    target = xp.exp(log_delta) * (1.0 + OUTWARD)
    infinite = at_infinity(law, below.p[0], -1.0) * (1.0 - SUM_ROUNDING)

    def reached(start: Array) -> tuple[Array, Array]:
        """Return the eps at which the best order for eps = `start` leaks delta, and the `places` of this order."""
        found = order(law, below, _moved(mesh(seen, xp.exp(start), resolution), above), xp.exp(start), resolution)
        gain, cost = attained(law, below, found)
        room = gain - target
        end = xp.log(xp.maximum(room, 1e-300)) - xp.log(xp.maximum(cost, 1e-300)) - OUTWARD
        return xp.clip(xp.where(room > 0.0, end, 0.0), 0.0, highest), found.places

    def better(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        i, start, low, _ = carry
        next_low, places = reached(xp.where(i == 0, start, low))
        return i + 1, xp.where(i == 0, start, low), xp.maximum(next_low, low), places

    def unsettled(carry: tuple[Array, ...]) -> Array:
        i, start, low, _ = carry
        # The order that is best for one eps is nearly the best up to 1e-3 from this eps. At most five orders are tried.
        return (i < 1) | ((i < 5) & (xp.abs(low - start) > 1e-3) & (low > 0.0))

    start = sketched_epsilon(seen, log_delta, highest)
    carry = (0, start, 0.0 * start, xp.zeros(resolution.groups + 1))
    _, _, lower, places = iterate(xp, unsettled, better, carry)

    def refine(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        i, _, here, best = carry
        known = lines(law, above, mesh(seen, xp.exp(here), resolution), places, resolution)
        upper = _crossing(lambda e: bound(known, xp.exp(e)), lower, xp.exp(log_delta), highest)
        # A positive `lower` is proved. An `upper` at or below it is wrong and set to -inf: (0, inf) is then returned.
        upper = xp.where((upper > lower) | (lower == 0.0) & (upper >= 0.0), upper, -xp.inf)
        return i + 1, here, xp.minimum(upper, highest), xp.minimum(best, upper)

    def again(carry: tuple[Array, ...]) -> Array:
        i, before, here, _ = carry
        # Lines are tight only near the eps they are made for. If eps moves by more than .02, make new ones (up to 3).
        return (i < 3) & (xp.abs(here - before) > 0.02)

    first = xp.where(lower > 0.0, lower, start)
    carry = (0, xp.inf * highest, first, xp.inf * highest)
    upper = iterate(xp, again, refine, carry)[3]
    lower = xp.where(infinite > target, xp.inf, lower)
    agree = lower <= upper  # bounds that contradict each other become (0, inf)
    return xp.where(agree, lower, 0.0), xp.where(agree, upper, xp.inf)


def _crossing(leak: Callable[[Array], Array], start: Array, delta: Array, highest: Array) -> Array:
    """Return an upper bound of the least eps in [start, highest] with leak(eps) <= delta, or inf if there is none."""
    xp = namespace(start)

    def outwards(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array, Array]:
        _, _, right, at_right, width = carry
        further = xp.minimum(right + width, highest)
        return right, at_right, further, leak(further), 5.0 * width

    def short(carry: tuple[Array, ...]) -> Array:
        _, _, right, at_right, _ = carry
        return (at_right > delta) & (right < highest)

    at_start = leak(start)
    carry = (start, at_start, start, at_start, 4e-4 * xp.ones_like(highest))  # 4e-4 is the first step to the right
    left, at_left, right, at_right, _ = iterate(xp, short, outwards, carry)
    # 1e-320 keeps the logarithm finite; no bound depends on it.
    excess = lambda value: xp.log(xp.maximum(value, 1e-320)) - xp.log(delta)

    def step(carry: tuple[Array, ...]) -> tuple[Array, Array, Array, Array, Array]:
        i, left, at_left, right, at_right = carry
        share = xp.clip(excess(at_left) / (excess(at_left) - excess(at_right)), 0.02, 0.98)
        middle = left + (right - left) * xp.where(i % 3 == 2, 0.5, share)
        here = leak(middle)
        over = here > delta
        pick = lambda a, b: xp.where(over, a, b)
        return i + 1, pick(middle, left), pick(here, at_left), pick(right, middle), pick(at_right, here)

    def wide(carry: tuple[Array, ...]) -> Array:
        i, left, at_left, right, at_right = carry
        # Regula falsi stops where the chord is close to the leak. The result is an upper bound in any case.
        return (i < 30) & (right - left > 2e-3) & (at_left > delta) & (at_right <= delta)

    _, left, at_left, right, at_right = iterate(xp, wide, step, (0, left, at_left, right, at_right))
    # The leak is convex in e^eps and lies below its chord. Where the chord is delta, the leak is at most delta.
    share = (at_left - delta) / xp.where(at_left > at_right, at_left - at_right, 1.0)
    crossed = left + xp.log1p(xp.clip(share, 0.0, 1.0) * xp.expm1(right - left)) + OUTWARD
    crossed = xp.minimum(xp.where(at_left > at_right, crossed, right), right)
    return xp.where(at_left <= delta, left, xp.where(at_right <= delta, crossed, xp.inf))


class Lines(NamedTuple):
    """What `bound` needs of a polygon: G groups of S lines (tangents of T), and C cells of w for each group."""

    infinite: Array  # leak of the outcomes with dQ = 0
    slope: Array  # (2, G) largest and smallest slope of the lines of a group
    # At an end of a group (axis 0) and an end of a cell of w (axis 1), the integrand is at most slope gain - E cost.
    gain: Array  # (2, 2, C, G)
    cost: Array  # (2, 2, C, G) inf for unused cells
    height: Array  # (S, G) Q-mass of each line's row, the interval of u on which the polygon coincides with the line
    share: Array  # (2, S, G) where each line's row begins and ends, as shares of the Q-mass of the group
    weight: Array  # (2, S, G) the line's slope is weight[0] slope[0] + weight[1] slope[1]
    own_gain: Array  # (S, G) gain by `_own`, for every w between the line's row and the group's first cell of w
    own_cost: Array  # (S, G) cost that `_own` returns with this gain
    after: Array  # Q-mass from the end of the last group to the point after which the curve's slope is at most 1


def _meet(curve: Outer, index: Array) -> tuple[Array, Array]:
    """Return the points (q, p) where neighbouring lines meet. The lines are the tangents at the cells `index`."""
    xp = namespace(curve.q)
    a, b = index[:-1], index[1:]
    ratio, q, p, _ = curve
    fall = ratio[a] - ratio[b]
    # Between the end of cell a and the start of cell b both lines lie above the polygon, and there they meet.
    gap = p[b] - p[a + 1] - ratio[b] * (q[b] - q[a + 1])
    ahead = xp.where(fall > 0.0, gap / xp.where(fall > 0.0, fall, 1.0), xp.inf)
    ahead = xp.clip(ahead, 0.0, xp.maximum(q[b] - q[a + 1], 0.0))
    at_q = xp.where(a == b, q[a], q[a + 1] + ahead)
    rising, falling = p[a + 1] + ratio[a] * ahead, p[b] - ratio[b] * xp.maximum(q[b] - at_q, 0.0)
    return at_q, xp.where(a == b, p[a], xp.minimum(xp.maximum(rising, falling), 1.0))


def _own(law: Repetitions, slope: Array, reach: Array) -> tuple[Array, Array]:
    """Return (gain, cost) such that the integrand is at most max(gain - E cost, 0) for every w with w - u <= reach."""
    # For x = w - u, T(w) - T(u) is at most slope x. `phi'(slope x)/phi'(x)` is non-decreasing, since phi is a power
    # series with terms >= 0. So a positive gain - E cost is largest where x is the smaller of `reach` and 1/slope.
    reach = namespace(reach).clip(reach, 0.0, 1.0 / slope)
    return slope * steep(law, slope * reach, 1.0), steep(law, reach, -1.0)


def _costs(law: Repetitions, u: Array, w: Array) -> Array:
    """Return numbers at the corners of cells, (2, 2, C, G), whose linear interpolation is at most phi'(w - u)."""
    # u, (2, G), and w, (2, C, G), are the ends of cells. The numbers lie on the tangent of phi' in the middle of a
    # cell. If the tangent falls far below the least phi' of the cell, they are this least phi'.
    xp = namespace(w)
    first, second = map(xp.asarray, law.slopes(1.0 - xp.clip(0.5 * (w[0] + w[1] - u[0] - u[1]), 0.0, 1.0)))
    height, width = u[1] - u[0], w[1] - w[0]
    reach = 0.5 * (width + height)
    first = first - SLOPE_ERROR * first - (SLOPE_ERROR * reach + MASS_ERROR) * second
    least = steep(law, w[0] - u[1], -1.0)
    flat = first - second * reach < 0.8 * least - 0.05 * first
    corners = [[first + second * ((e - 0.5) * width - (s - 0.5) * height) for e in (0, 1)] for s in (0, 1)]
    tangents = xp.where(flat, least, xp.stack([xp.stack(row) for row in corners]))
    return xp.where(w[0] >= u[1], tangents, xp.inf)


def lines(law: Repetitions, curve: Outer, where: Mesh, served: Array, resolution: Resolution) -> Lines:
    """Compute the `Lines` of a mesh on the outer polygon. `served`, the `Order.places`, says where the windows lie."""
    xp = namespace(curve.q)
    groups, each = resolution.groups, resolution.lines
    index, end = where.rows[:-1], where.rows[-1:]
    ends_q, ends_p = _meet(curve, where.rows)
    ends_q, ends_p = xp.concatenate([curve.q[:1], ends_q]), xp.concatenate([curve.p[:1], ends_p])
    q, p = ends_q[::each], ends_p[::each]
    grouped = lambda x: x.reshape(groups, each).T
    slope, height = grouped(curve.ratio[index]), grouped(xp.diff(ends_q))
    fraction = lambda part, whole: xp.clip(part / xp.where(whole > 0.0, whole, 1.0), 0.0, 1.0)
    share = xp.stack([fraction(grouped(x) - q[:-1], xp.diff(q)) for x in (ends_q[:-1], ends_q[1:])])
    # Slopes of a group may differ by a factor of 1e23. Then 1 - weight has no digits, so both weights are computed.
    weight = xp.stack(
        [fraction(slope - slope[-1], slope[0] - slope[-1]), fraction(slope[0] - slope, slope[0] - slope[-1])]
    )
    weight = xp.where(slope[0] > slope[-1], weight, xp.array([0.0, 1.0])[:, None, None])

    few = index[:: 4 * each]  # shared columns also begin at the first line of every fourth group
    shared = xp.concatenate([few, index[-1:], end, where.columns, xp.array([curve.ratio.size - 1])])
    w_q, w_p = _meet(curve, shared)
    w_q = xp.concatenate([xp.zeros(1), w_q, xp.ones(1)])
    w_p = xp.concatenate([curve.p[:1], w_p, xp.ones(1)])
    start = w_q[before(xp, w_q, q[1:])]
    own_gain, own_cost = _own(law, slope, start - grouped(ends_q[:-1]))

    # For each group a window of finer cells of w replaces the shared cells from `first` to `last`.
    cell = before(xp, w_q, xp.concatenate([xp.ones(1), served[1:]]), "right") - 1
    first = xp.clip(xp.minimum(cell[1:], cell[:-1]) - WINDOW_MARGIN, few.size + 1, shared.size - 1)
    last = xp.clip(xp.maximum(cell[1:], cell[:-1]) + WINDOW_MARGIN, first, shared.size - 1)
    step = xp.arange(resolution.window)[:, None] * (last - first)
    below, part = first + step // (resolution.window - 1), step % (resolution.window - 1)
    after = xp.minimum(below + 1, shared.size - 1)
    inside = shared[below] + (shared[after] - shared[below]) * part // (resolution.window - 1)
    v_q, v_p = _meet(curve, inside)
    v_q = xp.concatenate([w_q[first][None], v_q, w_q[last + 1][None]])
    v_p = xp.concatenate([w_p[first][None], v_p, w_p[last + 1][None]])

    ends = lambda x: xp.stack([x[:-1], x[1:]])
    u = ends(q)
    gain = steep(law, w_p[:, None] - p, 1.0)
    gain = xp.stack([ends(gain[:, :-1]), ends(gain[:, 1:])])
    size = xp.arange(shared.size)[:, None]
    cost = xp.where((size >= first) & (size <= last), xp.inf, _costs(law, u, ends(w_q)[:, :, None]))
    near = xp.stack([ends(steep(law, v_p - p[s : groups + s], 1.0)) for s in (0, 1)])
    both = lambda a, b: xp.concatenate([a, b], axis=2)
    # If the sketch has NaN, its mesh is not ascending, and the bound is inf.
    placed = xp.all(xp.diff(shared) >= 0) & xp.all(height >= 0.0) & xp.all(xp.diff(where.rows) >= 0)
    placed = placed & xp.all(xp.diff(w_q) >= 0.0)  # since `before` has searched w_q as an ascending array
    return Lines(
        infinite=xp.where(placed, at_infinity(law, curve.p[0], 1.0), xp.inf),
        slope=xp.stack([slope[0], slope[-1]]),
        gain=both(gain, near),
        cost=both(cost, _costs(law, u, ends(v_q))),
        height=height,
        share=share,
        weight=weight,
        own_gain=own_gain,
        own_cost=own_cost,
        after=xp.maximum(curve.q[where.above] - q[-1], 0.0),
    )


def _mean_above(least: Array, a: Array, b: Array) -> Array:
    """Return the mean of `max(x, least)` where x runs linearly from a to b."""
    xp = namespace(least)
    low, high = xp.minimum(a, b) - least, xp.maximum(a, b) - least
    crossing = xp.maximum(high, 0.0) ** 2 / xp.where(high > low, 2.0 * (high - low), 1.0)
    return least + xp.where(low >= 0.0, 0.5 * (low + high), crossing)


def bound(known: Lines, ratio: Array) -> Array:
    """Return an upper bound of the leak at e^eps = `ratio` >= 1; the bound is convex in `ratio`."""
    xp = namespace(known.height)
    ends = []
    for s in (0, 1):
        # If all costs are infinite, the maximum is -inf. -1e300 replaces it, since -inf times a weight of 0 is NaN.
        first, last = (
            xp.maximum(xp.max(slope * known.gain[s] - ratio * known.cost[s], axis=(0, 1)), -1e300)
            for slope in known.slope
        )
        ends.append(known.weight[0] * first + known.weight[1] * last)
    own = xp.maximum(known.own_gain - ratio * known.own_cost, 0.0)
    best = _mean_above(own, *((1.0 - share) * ends[0] + share * ends[1] for share in known.share))
    # After the last group the integrand is nowhere above its bound at the end of this group.
    after = known.after * xp.maximum(own[-1, -1], ends[1][-1, -1])
    return (known.infinite + xp.sum(known.height * best) + after) * (1.0 + SUM_ROUNDING)
