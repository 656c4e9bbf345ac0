"""Where to look for the worst score: a sketch on few cells, and the rows and columns that it asks for.

Nothing here enters a bound: whichever lines of a curve are kept, the polygon through them lies above the curve.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CELLS = 16384
"""Cells of a curve."""
SKETCH = (96, 256)
"""Rows and columns of the sketch."""
SAMPLE = 1024
"""Cells at which the growth of phi' is looked at to place them."""


class Effort(NamedTuple):
    """Sizes: how narrow the bracket gets, and what it costs; it holds for any."""

    groups: int  # active rows: groups of so many
    lines: int  # lines of the curve each
    columns: int  # columns beyond the active rows
    joined: int  # rows from the active ones to slope one
    sketches: int  # the first on cells chosen by the curve and phi', each other by the one before
    tolerance: float  # relative error of a row that columns aim at


QUICK = Effort(40, 8, 448, 36, 1, 1e-4)
MIDDLE = Effort(80, 6, 900, 64, 3, 3e-5)
FINE = Effort(320, 2, 2000, 200, 3, 1e-5)
UNIT = 2.0**-53
SHIFT = 16.0 * UNIT
"""Absolute error of a difference of two masses."""
RELATIVE = 4e-12
"""Relative error of phi'."""


class Outer(NamedTuple):
    """A concave polygon above a curve: lines of descending slope, the last one of slope 0."""

    ratio: Any  # (N,) slopes
    q: Any  # (N + 1,) where the cells begin and end, from 0 to 1
    p: Any  # (N + 1,) the polygon there


class Inner(NamedTuple):
    """Knots of a concave polygon below a curve."""

    q: Any  # (N + 1,)
    p: Any  # (N + 1,)


class Sketch(NamedTuple):
    """Gain and cost of each coarse row if all of it is served at the end of a coarse column."""

    gain: jax.Array  # (A, B)
    cost: jax.Array  # (A, B)
    infinite: jax.Array  # leak of the outcomes with dQ = 0
    mass: jax.Array  # (2, A) P- and Q-mass of the rows
    rows: jax.Array  # (A + 1,) cells of the curve at which rows end
    columns: jax.Array  # (B + 1,)


class Plan(NamedTuple):
    """Densities of rows and columns over the pieces of a sketch, and the cell with which the active rows end."""

    rows: jax.Array  # of those that are active
    joined: jax.Array  # of those after them
    columns: jax.Array
    end: jax.Array


def steep(phi, mass, side=0.0):
    """phi' at a mass; rounded up for side 1, down for side -1."""
    return phi(1.0 - jnp.clip(mass + side * SHIFT, 0.0, 1.0))[1] * (1.0 + side * RELATIVE)


def middles(ends):
    return 0.5 * (ends[1:] + ends[:-1])


def first_cells(phi, q, p, above):
    """Cells at which the rows and columns of a first sketch end: equal shares of cells and of what phi' grows by."""
    cells = q.size - 1
    grown = lambda mass: jnp.log(jnp.maximum(steep(phi, mass), 1e-300))

    def ends(sample, growth, count):
        size = jnp.abs(growth - growth[0])
        reach = (sample - sample[0]) / jnp.maximum(sample[-1] - sample[0], 1) + size / jnp.maximum(size[-1], 8.0)
        levels = jnp.linspace(0.0, 1.0, count + 1) * reach[-1]
        return jnp.round(jnp.interp(levels, reach, sample.astype(q.dtype))).astype(jnp.int64)

    rows, columns = (jnp.arange(SAMPLE + 1) * above) // SAMPLE, (jnp.arange(SAMPLE + 1) * cells) // SAMPLE
    return ends(rows, grown(1.0 - p[rows]), SKETCH[0]), ends(columns, grown(p[columns]), SKETCH[1])


def sketch(phi, q, p, rows, columns):
    """A coarse look at a polygon given by N + 1 knots: rows and columns end at the cells given, from 0."""
    u_q, u_p, w_q, w_p = q[rows], p[rows], q[columns[1:]], p[columns[1:]]
    gain = jnp.diff(u_p)[:, None] * steep(phi, w_p[None] - middles(u_p)[:, None])
    cost = jnp.diff(u_q)[:, None] * steep(phi, w_q[None] - middles(u_q)[:, None])
    later = columns[None, 1:] >= rows[1:, None]
    infinite = p[0] * steep(phi, 1.0 - p[0])
    mass = jnp.stack([jnp.diff(u_p), jnp.diff(u_q)])
    return Sketch(jnp.where(later, gain, 0.0), jnp.where(later, cost, jnp.inf), infinite, mass, rows, columns)


def looked_at(phi, q, p, above, known, effort: Effort):
    """The last of the sketches of an effort, and E; `above` cells have slopes above one; known : sketch -> E."""
    even = first_cells(phi, q, p, above)
    found = sketch(phi, q, p, *even)
    for _ in range(effort.sketches - 1):
        where = plan(found, known(found), effort)
        rows = placed(where.rows + where.joined, found.rows, 0, above, SKETCH[0] // 2)
        columns = placed(where.columns, found.columns, 0, q.size - 1, SKETCH[1] // 2)
        # what a sketch does not see it cannot ask for
        rows, columns = (jnp.sort(jnp.concatenate([x[::2], y])) for x, y in zip(even, (rows, columns), strict=True))
        found = sketch(phi, q, p, rows, columns)
    return found, known(found)


def sketched_epsilon(found: Sketch, log_delta, highest):
    """eps in [0, highest] at which the sketch leaks delta, by bisection."""

    def step(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        best = jnp.max(found.gain - jnp.exp(middle) * found.cost, axis=1)
        leak = jnp.sum(jnp.maximum(best, 0.0)) + found.infinite
        over = jnp.log(jnp.maximum(leak, 1e-320)) > log_delta
        return jnp.where(over, middle, low), jnp.where(over, high, middle)

    low, high = lax.fori_loop(0, 20, step, (0.0 * highest, highest))
    return 0.5 * (low + high)


def plan(found: Sketch, ratio, effort: Effort):
    """Where rows and columns are needed at E = ratio."""
    value = found.gain - ratio * found.cost
    best = jnp.maximum(jnp.max(value, axis=1), 0.0)
    total = jnp.sum(best) + 1e-300
    size = jnp.arange(best.size)
    # chords overstate a row by the square of its height, and a group by the square of what phi' changes over it; the
    # rows after the last active one are treated as if they were
    last = jnp.max(jnp.where(best > 3e-5 * total, size, 0))
    end = jnp.minimum(last + 2, best.size)
    at = jnp.argmax(value[jnp.minimum(size, last)], axis=1)
    p_mass, q_mass = found.mass
    steep = found.gain / jnp.maximum(p_mass, 1e-300)[:, None]
    here, after = steep[size, at], steep[jnp.minimum(size + 1, best.size - 1), at]
    change = jnp.clip(1.0 - after / jnp.maximum(here, 1e-300), 0.0, 1.0)
    rows = ((best + 0.5 * effort.lines**2 * p_mass * here * change**2) / total) ** (1.0 / 3.0)
    rows = jnp.maximum(rows, jnp.where(size > 0, jnp.roll(rows, 1), 0.0))
    rows = jnp.maximum(rows, jnp.where(size > 0, jnp.roll(rows, 1), 0.0)) + 0.02 * jnp.max(rows) + 1e-6
    rows = jnp.maximum(rows, jnp.where(jnp.cumsum(best) > 1e-6 * total, 0.15 * jnp.max(rows), 0.0))
    # a cell over which the gain grows by g is overstated by g^2/8 of it, which must not pass what the best is ahead
    ahead = best[:, None] - value + effort.tolerance * (best + total / 16.0)[:, None]
    share = jnp.where(found.gain > 0.0, found.gain / ahead, 0.0)
    height = jnp.log(jnp.maximum(steep, 1e-300))
    before = jnp.concatenate([height[:, :1], height[:, :-1]], axis=1)
    columns = jnp.max(jnp.clip(height - before, 0.0, 4.0) * jnp.sqrt(share), axis=0)
    # joined rows by the same, and by how much less their last slope is than the first
    above = jnp.concatenate([height[:1], height[:-1]], axis=0)
    slope = jnp.log(jnp.maximum(p_mass, 1e-300)) - jnp.log(jnp.maximum(q_mass, 1e-300))
    fall = jnp.clip(jnp.concatenate([slope[:1], slope[:-1]]) - slope, 0.0, 4.0)
    wanted = jnp.clip(above - height, 0.0, 4.0) * jnp.sqrt(share) + 2.0 * fall[:, None] * jnp.minimum(share, 1e3)
    joined = jnp.max(jnp.where(found.gain > 0.0, wanted, 0.0), axis=1)
    joined = jnp.maximum(joined, jnp.where(size > 0, jnp.roll(joined, 1), 0.0))
    filled = lambda density: density + 0.2 * jnp.mean(density) + 1e-6
    return Plan(rows, filled(joined), filled(columns), found.rows[end])


def placed(density, pieces, first, last, count):
    """`count` ascending cells from `first` to before `last`, where density puts them."""
    ends = jnp.clip(pieces, first, last).astype(jnp.float64)
    mass = jnp.concatenate([jnp.zeros(1), jnp.cumsum(density * jnp.diff(ends) / jnp.maximum(jnp.diff(pieces), 1))])
    share = (jnp.arange(count) + 0.5) / count * mass[-1]
    cell = jnp.floor(jnp.interp(share, mass, ends)).astype(pieces.dtype)
    return jnp.clip(cell, first, jnp.maximum(last - 1, first))
