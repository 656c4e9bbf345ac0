"""The mesh for the worst score: a sketch on few cells, and the rows and columns that it asks for.

Nothing here enters a bound: whichever lines of a curve are kept, the polygon through them lies above the curve.

The kernels of the worst score take one configuration, without batch axes: its cells fill the cache by themselves, and
each configuration has cells of its own.  A batch is answered one configuration after the other.
"""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, Namespace, namespace, repeat

CELLS = 16384
"""Cells of a trade-off curve."""
SKETCH_SAMPLES = 384
"""Cells at which the growth of phi' is looked at to place the sketch's rows and columns."""


class Resolution(NamedTuple):
    """Sizes of a mesh.  They decide how narrow the bracket gets and what it costs; it holds for any sizes."""

    groups: int  # of active rows
    lines: int  # lines of the curve in each group
    columns: int  # columns beyond the active rows, for all groups
    window: int  # columns of each group where its best is
    sketch: tuple[int, int]  # rows and columns of the sketch that places all these


GLANCE = Resolution(24, 4, 64, 16, (24, 64))
"""For whether a direction matters at all."""
QUICK = Resolution(36, 6, 80, 24, (36, 96))
"""The first look at every configuration; those below have more rows and columns, take longer and are narrower."""
STEADY = Resolution(60, 6, 120, 32, (36, 96))
"""The second look at many configurations."""
MIDDLE = Resolution(96, 6, 192, 48, (36, 96))
"""The first look where nothing is looked at twice, and the one before FINE."""
FINE = Resolution(256, 6, 768, 192, (36, 96))
"""The last look at many configurations, and the second at a few."""
FINEST = FINE._replace(sketch=(144, 192))
"""Sees turns of the order that FINE misses here and there; not always better."""
LEAST_ROW_MASS = 1e-18
"""P-mass of rows below which they are all one."""
MASS_ERROR = 16.0 * ROUNDOFF
"""Absolute error of a difference of two masses."""
SLOPE_ERROR = 4e-12
"""Relative error of phi'."""
LEAST_SLOPE = 1e-300
"""phi' rounded up is at least this: below it float64 may have lost it."""
SHARE_OF_BEST = 0.3
"""Share of a row's best by which a column may overstate it: windows see to what is nearer."""
SHARE_OF_ALL = 1e-4
"""The same as a share of the whole leak."""
ACTIVE_SHARE = 3e-5
"""Share of the whole leak that the best of a row must have for the row to be active."""
LARGEST_FALL = 4.0
"""Nats by which a slope, or phi', may change from one sketched row or column to the next; more counts as this."""
BISECTIONS = 20
"""Of eps on the sketch: to a millionth of its range, far finer than the sketch sees."""


class Repetitions(Protocol):
    """What these kernels need of a law of K, with phi its generating function (generating.py)."""

    def generating(self, y: Array) -> tuple[Array, Array, Array]:
        """(phi, phi', phi'') at 1 - y."""

    def slopes(self, y: Array) -> tuple[Array, Array]:
        """(phi', phi'') at 1 - y."""


class Outer(NamedTuple):
    """A concave polygon above a curve: lines of descending slope, the last one of slope 0."""

    ratio: Array  # (N,) slopes
    q: Array  # (N + 1,) where the cells begin and end, from 0 to 1
    p: Array  # (N + 1,) the polygon there
    twin: Array  # (N + 1,) the first knots of the polygon below that are not before these


class Inner(NamedTuple):
    """Knots of a concave polygon below a curve."""

    q: Array  # (N + 1,)
    p: Array  # (N + 1,)


class Sketch(NamedTuple):
    """Gain and cost of each coarse row if all of it is served at the end of a coarse column."""

    gain: Array  # (A, B)
    cost: Array  # (A, B)
    growth: Array  # (A, B) of log phi' from column to column
    infinite: Array  # leak of the outcomes with dQ = 0
    mass: Array  # (2, A) P- and Q-mass of the rows
    rows: Array  # (A + 1,) cells of the curve at which rows end
    columns: Array  # (B + 1,)


class Mesh(NamedTuple):
    """Cells of a curve at which rows begin or end, those of the last row included, and columns after them."""

    rows: Array  # (groups * lines + 1,) ascending from 0
    columns: Array  # (columns,) ascending
    above: Array  # the first cell whose slope is not above one


def steep(law: Repetitions, mass: Array, side: float = 0.0) -> Array:
    """phi' at a mass; rounded up for side 1, down for side -1."""
    xp = namespace(mass)
    value = xp.asarray(law.slopes(1.0 - xp.clip(mass + side * MASS_ERROR, 0.0, 1.0))[0]) * (1.0 + side * SLOPE_ERROR)
    return xp.maximum(value, LEAST_SLOPE) if side > 0.0 else value


def at_infinity(law: Repetitions, mass: Array, side: float) -> Array:
    """phi(1) - phi(1 - mass): the leak of outcomes with dQ = 0 and so much P-mass, rounded as `steep` is.

    Between mass phi'(1 - mass) and mass phi'(1); the difference itself cancels where mass is small.
    """
    xp = namespace(mass)
    sure, survived = ([xp.asarray(x) for x in law.generating(y)] for y in (xp.zeros_like(mass), mass))
    difference = sure[0] - survived[0] + side * (SLOPE_ERROR * sure[0] + MASS_ERROR * sure[1])
    if side > 0.0:
        return xp.minimum(mass * steep(law, xp.ones_like(mass), side), difference)
    return xp.maximum(mass * steep(law, 1.0 - mass, side), difference)


def before(xp: Namespace, at: Array, x: Array, side: str = "left") -> Array:
    """How many of the few ascending numbers `at`, (A,), are below x, (X,); not above x for side "right"."""
    if xp is jnp:
        return jnp.searchsorted(at, x, side=side, method="compare_all")
    return np.searchsorted(at, x, side=side)  # type: ignore[call-overload]  # a str that is "left" or "right"


def middles(ends: Array) -> Array:
    return 0.5 * (ends[1:] + ends[:-1])


def sketch(law: Repetitions, q: Array, p: Array, above: Array, resolution: Resolution) -> Sketch:
    """A coarse look at a polygon given by N + 1 knots; `above` of its cells have slopes above one.

    Rows and columns end at equal shares of cells and of what log phi' grows by, rows of what log p does as well.
    """
    xp, cells = namespace(q), q.size - 1
    log = lambda x, least: xp.log(xp.maximum(x, least))

    def ends(sample: Array, count: int, *growths: Array) -> Array:
        reach = (sample - sample[0]) / xp.maximum(sample[-1] - sample[0], 1)
        for growth in growths:
            size = xp.abs(growth - growth[0])
            reach = reach + size / xp.maximum(size[-1], 8.0)
        levels = xp.linspace(0.0, 1.0, count + 1) * reach[-1]
        placed = xp.round(_between(levels, reach, sample.astype(q.dtype))).astype(sample.dtype)
        return xp.clip(placed, sample[0], sample[-1])  # NaN becomes any whole number

    rows, columns = (
        (xp.arange(SKETCH_SAMPLES + 1) * above) // SKETCH_SAMPLES,
        (xp.arange(SKETCH_SAMPLES + 1) * cells) // SKETCH_SAMPLES,
    )
    rows = ends(rows, resolution.sketch[0], log(steep(law, 1.0 - p[rows]), 1e-300), log(p[rows], LEAST_ROW_MASS))
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
    """eps in [0, highest] at which the sketch leaks delta, by bisection."""
    xp = namespace(found.gain)

    def step(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        best = xp.max(found.gain - xp.exp(middle) * found.cost, axis=1)
        leak = xp.sum(xp.maximum(best, 0.0)) + found.infinite
        over = xp.log(xp.maximum(leak, 1e-320)) > log_delta
        return xp.where(over, middle, low), xp.where(over, high, middle)

    low, high = repeat(xp, BISECTIONS, step, (0.0 * highest, highest))
    return 0.5 * (low + high)


def mesh(found: Sketch, ratio: Array, resolution: Resolution) -> Mesh:
    """Where rows and columns are needed at E = ratio."""
    xp = namespace(found.gain)
    value = found.gain - ratio * found.cost
    best = xp.maximum(xp.max(value, axis=1), 0.0)
    total = xp.sum(best) + 1e-300
    size = xp.arange(best.size)
    # chords overstate a row by the square of its height, and a group by the square of what phi' changes over it; the
    # rows after the last active one are treated as if they were
    last = xp.max(xp.where(best > ACTIVE_SHARE * total, size, 0))
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
    # a cell over which the gain grows by g is overstated by g^2/8 of it, which must not pass what the best is ahead
    ahead = best[:, None] - value + (SHARE_OF_BEST * best + SHARE_OF_ALL * total)[:, None]
    share = xp.where(found.gain > 0.0, found.gain / ahead, 0.0)
    columns = xp.max(found.growth * xp.sqrt(share), axis=0)
    columns = columns + 0.2 * xp.mean(columns) + 1e-6
    stop = found.rows[end]
    inside = _placed(rows, found.rows, 0, stop, resolution.groups * resolution.lines)
    beyond = _placed(columns, found.columns, stop, found.columns[-1], resolution.columns)
    return Mesh(xp.concatenate([xp.zeros_like(inside[:1]), inside[1:], stop[None]]), beyond, found.rows[-1])


def _placed(density: Array, pieces: Array, first: Array, last: Array, count: int) -> Array:
    """`count` ascending cells from `first` to before `last`, where density puts them."""
    xp = namespace(density)
    ends = xp.clip(pieces, first, last).astype(xp.float64)
    mass = xp.concatenate([xp.zeros(1), xp.cumsum(density * xp.diff(ends) / xp.maximum(xp.diff(pieces), 1))])
    share = (xp.arange(count) + 0.5) / count * mass[-1]
    cell = xp.floor(_between(share, mass, ends)).astype(pieces.dtype)
    return xp.clip(cell, first, xp.maximum(last - 1, first))


def _between(x: Array, at: Array, values: Array) -> Array:
    """Linear interpolation at x between ascending points: `interp` without its loop, for few points."""
    xp = namespace(at)
    i = xp.clip(before(xp, at, x, "right") - 1, 0, at.size - 2)
    share = (x - at[i]) / xp.maximum(at[i + 1] - at[i], 1e-300)
    return values[i] + xp.clip(share, 0.0, 1.0) * (values[i + 1] - values[i])
