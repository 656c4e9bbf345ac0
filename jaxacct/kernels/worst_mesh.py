"""The mesh for the worst score: a sketch on few cells, and the rows and columns that it asks for.

Nothing here enters a bound: whichever lines of a curve are kept, the polygon through them lies above the curve.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, Generating

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


def steep(phi: Generating, mass: Array, side: float = 0.0) -> Array:
    """phi' at a mass; rounded up for side 1, down for side -1."""
    value = phi(1.0 - jnp.clip(mass + side * MASS_ERROR, 0.0, 1.0))[1] * (1.0 + side * SLOPE_ERROR)
    return jnp.maximum(value, LEAST_SLOPE) if side > 0.0 else value


def at_infinity(phi: Generating, mass: Array, side: float) -> Array:
    """phi(1) - phi(1 - mass): the leak of outcomes with dQ = 0 and so much P-mass, rounded as `steep` is.

    Between mass phi'(1 - mass) and mass phi'(1); the difference itself cancels where mass is small.
    """
    sure, survived = phi(jnp.zeros_like(mass)), phi(mass)
    difference = sure[0] - survived[0] + side * (SLOPE_ERROR * sure[0] + MASS_ERROR * sure[1])
    if side > 0.0:
        return jnp.minimum(mass * steep(phi, jnp.ones_like(mass), side), difference)
    return jnp.maximum(mass * steep(phi, 1.0 - mass, side), difference)


def middles(ends: Array) -> Array:
    return 0.5 * (ends[1:] + ends[:-1])


def sketch(phi: Generating, q: Array, p: Array, above: Array, resolution: Resolution) -> Sketch:
    """A coarse look at a polygon given by N + 1 knots; `above` of its cells have slopes above one.

    Rows and columns end at equal shares of cells and of what log phi' grows by, rows of what log p does as well.
    """
    cells = q.size - 1
    log = lambda x, least: jnp.log(jnp.maximum(x, least))

    def ends(sample: Array, count: int, *growths: Array) -> Array:
        reach = (sample - sample[0]) / jnp.maximum(sample[-1] - sample[0], 1)
        for growth in growths:
            size = jnp.abs(growth - growth[0])
            reach = reach + size / jnp.maximum(size[-1], 8.0)
        levels = jnp.linspace(0.0, 1.0, count + 1) * reach[-1]
        return jnp.round(_between(levels, reach, sample.astype(q.dtype))).astype(sample.dtype)

    rows, columns = (
        (jnp.arange(SKETCH_SAMPLES + 1) * above) // SKETCH_SAMPLES,
        (jnp.arange(SKETCH_SAMPLES + 1) * cells) // SKETCH_SAMPLES,
    )
    rows = ends(rows, resolution.sketch[0], log(steep(phi, 1.0 - p[rows]), 1e-300), log(p[rows], LEAST_ROW_MASS))
    columns = ends(columns, resolution.sketch[1], log(steep(phi, p[columns]), 1e-300))
    u_q, u_p, w_q, w_p = q[rows], p[rows], q[columns[1:]], p[columns[1:]]
    height = steep(phi, w_p[None] - middles(u_p)[:, None])
    growth = jnp.diff(log(height, 1e-300), axis=1, prepend=jnp.inf)
    gain = jnp.diff(u_p)[:, None] * height
    cost = jnp.diff(u_q)[:, None] * steep(phi, w_q[None] - middles(u_q)[:, None])
    later = columns[None, 1:] >= rows[1:, None]
    infinite = at_infinity(phi, p[0], -1.0)
    mass = jnp.stack([jnp.diff(u_p), jnp.diff(u_q)])
    gain, cost = jnp.where(later, gain, 0.0), jnp.where(later, cost, jnp.inf)
    return Sketch(gain, cost, jnp.clip(growth, 0.0, LARGEST_FALL), infinite, mass, rows, columns)


def sketched_epsilon(found: Sketch, log_delta: Array, highest: Array) -> Array:
    """eps in [0, highest] at which the sketch leaks delta, by bisection."""

    def step(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        best = jnp.max(found.gain - jnp.exp(middle) * found.cost, axis=1)
        leak = jnp.sum(jnp.maximum(best, 0.0)) + found.infinite
        over = jnp.log(jnp.maximum(leak, 1e-320)) > log_delta
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    low, high = lax.fori_loop(0, BISECTIONS, step, (0.0 * highest, highest))
    return 0.5 * (low + high)


def mesh(found: Sketch, ratio: Array, resolution: Resolution) -> Mesh:
    """Where rows and columns are needed at E = ratio."""
    value = found.gain - ratio * found.cost
    best = jnp.maximum(jnp.max(value, axis=1), 0.0)
    total = jnp.sum(best) + 1e-300
    size = jnp.arange(best.size)
    # chords overstate a row by the square of its height, and a group by the square of what phi' changes over it; the
    # rows after the last active one are treated as if they were
    last = jnp.max(jnp.where(best > ACTIVE_SHARE * total, size, 0))
    end = jnp.minimum(last + 2, best.size)
    at = jnp.argmax(value[jnp.minimum(size, last)], axis=1)
    p_mass, q_mass = found.mass
    steep = found.gain / jnp.maximum(p_mass, 1e-300)[:, None]
    here, after = steep[size, at], steep[jnp.minimum(size + 1, best.size - 1), at]
    change = jnp.clip(1.0 - after / jnp.maximum(here, 1e-300), 0.0, 1.0)
    slope = jnp.log(jnp.maximum(p_mass, 1e-300)) - jnp.log(jnp.maximum(q_mass, 1e-300))
    fall = jnp.clip(slope - jnp.append(slope[1:], slope[-1]), 0.0, LARGEST_FALL)
    error = best + 0.1 * p_mass * here * (fall**2 + resolution.lines**2 * change * (change + fall))
    rows = (error / total) ** (1.0 / 3.0)
    rows = jnp.maximum(rows, jnp.where(size > 0, jnp.roll(rows, 1), 0.0))
    rows = jnp.maximum(rows, jnp.where(size > 0, jnp.roll(rows, 1), 0.0)) + 0.02 * jnp.max(rows) + 1e-6
    # a cell over which the gain grows by g is overstated by g^2/8 of it, which must not pass what the best is ahead
    ahead = best[:, None] - value + (SHARE_OF_BEST * best + SHARE_OF_ALL * total)[:, None]
    share = jnp.where(found.gain > 0.0, found.gain / ahead, 0.0)
    columns = jnp.max(found.growth * jnp.sqrt(share), axis=0)
    columns = columns + 0.2 * jnp.mean(columns) + 1e-6
    stop = found.rows[end]
    inside = _placed(rows, found.rows, 0, stop, resolution.groups * resolution.lines).at[0].set(0)
    beyond = _placed(columns, found.columns, stop, found.columns[-1], resolution.columns)
    return Mesh(jnp.append(inside, stop), beyond, found.rows[-1])


def _placed(density: Array, pieces: Array, first: Array, last: Array, count: int) -> Array:
    """`count` ascending cells from `first` to before `last`, where density puts them."""
    ends = jnp.clip(pieces, first, last).astype(jnp.float64)
    mass = jnp.concatenate([jnp.zeros(1), jnp.cumsum(density * jnp.diff(ends) / jnp.maximum(jnp.diff(pieces), 1))])
    share = (jnp.arange(count) + 0.5) / count * mass[-1]
    cell = jnp.floor(_between(share, mass, ends)).astype(pieces.dtype)
    return jnp.clip(cell, first, jnp.maximum(last - 1, first))


def _between(x: Array, at: Array, values: Array) -> Array:
    """Linear interpolation at x between ascending points: `jnp.interp` without its loop, for few points."""
    i = jnp.clip(jnp.searchsorted(at, x, side="right", method="compare_all") - 1, 0, at.size - 2)
    share = (x - at[i]) / jnp.maximum(at[i + 1] - at[i], 1e-300)
    return values[i] + jnp.clip(share, 0.0, 1.0) * (values[i + 1] - values[i])
