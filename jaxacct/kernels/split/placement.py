"""Where to integrate the split contour: windows, abscissa, period and number of nodes.

No bound depends on these choices.  A bad one makes the bracket wide.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import certificate, saddle
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.contour import ABSCISSA_MULTIPLES, period_for
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.split import cutoff, remainder
from jaxacct.kernels.split.parts import NO_WINDOW, Grid, Windows, cumulants, grid, shares, tilted

FEWEST_NODES, MOST_NODES = 8.0, 4096.0
"""Ends of the range in which numbers of contour nodes are tried for the cut-off in t."""
NODE_COUNTS = 19
"""How many are tried, in geometric steps: two to an octave."""
LARGEST_CANCELLATION = 9.0
"""Nats by which moving the abscissa away from the saddle point may enlarge the integrand, where it is small there."""
SURE_CANCELLATION = 1.5
"""Nats that this may cost in any case: less would leave hardly any choice of abscissa."""
AFFORDED_CANCELLATION = 16.0
"""Nats that may be lost to cancellation in all.  Rounding is some e^-30, which leaves a relative accuracy of e^-14."""
FREE_CANCELLATION = 12.0
"""Nats lost to cancellation that do not count against a choice of windows."""
SPARE_NATS = 2.0
"""Nats beyond the tolerance by which the cut-off terms must have decayed: the decay is estimated on a coarse grid."""
PLACEMENT_POINTS = 128
"""Quadrature points for placing the contour."""
SCAN_FROM, SCAN_TO, SCAN_STEPS = 0.04, 6.0, 7
"""Where the search for the saddle point may begin: so many abscissae between these multiples of log(1/delta)/eps."""


class Contour(NamedTuple):
    """Where to integrate: windows, abscissa and period, and how many nodes the cut-off asks for."""

    windows: Windows
    c: Array  # abscissa
    period: Array  # 2 pi over the spacing of the nodes in t
    images_at: Array  # abscissa for the Chernoff bound of the images
    nodes_needed: Array
    nodes_kept: Array  # those that are needed, or as many of them as the program has
    cancellation: Array  # nats by which the integrand exceeds delta


class Placement(NamedTuple):
    """A contour and how its windows were chosen: all that a certificate needs to know of where to integrate."""

    contour: Contour
    choice: remainder.WindowChoice


def no_placements(size: int, parts: int) -> Placement:
    """Placements to be filled in: NumPy arrays for `size` configurations of `parts` sampled Gaussians."""
    one, each = np.zeros(size), np.zeros((size, parts))
    contour = Contour(Windows(each, each, one), one, one, one, one, one, one)
    choice = remainder.WindowChoice(each, each, one, one, one.astype(bool))
    return jax.tree.map(np.copy, Placement(contour, choice))


def grids_of(law: LossLaw, windows: Windows, c: Array, points: int, frequency: Array | None = None) -> Grid:
    """Grids for the J sampled Gaussians, even or following a frequency."""
    each = jax.vmap(grid, (0, 0, None, 0, 0, None, None, None))
    return each(law.gauss_sigma, law.gauss_q, law.sign, windows.low, windows.high, c, points, frequency)


def _contour_for(
    law: LossLaw, windows: Windows, epsilon: Array, log_delta: Array, log_tol: Array, count: int
) -> Contour:
    """The best contour for one choice of windows."""
    start = jnp.maximum(-log_delta, 1.0) / jnp.maximum(epsilon, 1e-12)
    grids = grids_of(law, windows, start, PLACEMENT_POINTS)
    both = shares(grids)

    def k(c: Array) -> tuple[Array, Array, Array]:
        return cumulants(law, windows.keep_bulk, both, c)

    def size(c: Array) -> Array:
        return k(c)[0] + certificate.log_kappa(c)

    _, mean, variance = k(1e-3 * start)
    gap = epsilon - mean
    normal = (gap + jnp.sqrt(gap**2 + 4.0 * variance)) / (2.0 * variance)  # where many steps make it normal
    scan = jnp.append(
        start * jnp.geomspace(SCAN_FROM, SCAN_TO, SCAN_STEPS), jnp.clip(normal, 1e-3 * start, 1e4 * start)
    )
    first = scan[jnp.argmin(jax.vmap(size)(scan) - scan * epsilon)]
    point = saddle.search(k, epsilon, first, saddle.REFINEMENT_STEPS)
    at = point.c * jnp.array(ABSCISSA_MULTIPLES)
    sizes = jax.vmap(size)(at)
    least = jnp.min(sizes - at * epsilon) - log_delta  # lost to cancellation even at the saddle point
    allowed = jnp.clip(AFFORDED_CANCELLATION - least, SURE_CANCELLATION, LARGEST_CANCELLATION)
    c, period = period_for(point.c, at, sizes, epsilon, log_delta, log_tol, allowed)
    right = jnp.where(at > c, sizes - at * epsilon - (at - c) * period, jnp.inf)
    images_at = at[jnp.argmin(right)]
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, grids)
    cuts = jnp.ceil(jnp.geomspace(FEWEST_NODES, MOST_NODES, NODE_COUNTS))
    t = 2.0 * jnp.pi / period * cuts
    decay = cutoff.decay(law, windows, grids, parts, c, t) + jnp.log(jnp.pi * (t - 0.5 * t / cuts))
    lost = k(c)[0] - c * epsilon - log_delta
    enough = decay >= lost - log_tol + SPARE_NATS
    needed = jnp.where(jnp.any(enough), cuts[jnp.argmax(enough)], 2.0 * cuts[-1])
    kept = jnp.maximum(jnp.sum(cuts <= jnp.minimum(needed, float(count))), 1) - 1
    needed = jnp.where(jnp.isfinite(period), needed, 2.0 * cuts[-1])
    return Contour(windows, c, period, images_at, needed, cuts[kept], lost)


def place(law: LossLaw, epsilon: Array, log_delta: Array, log_tol: Array, count: int) -> Placement:
    """Windows and contour: with the compositions of bulk steps or without, whichever needs fewer nodes."""
    choice = remainder.choose(law, epsilon, log_delta, log_tol)
    keep_bulk = jnp.array([1.0, 0.0])
    lows = jnp.stack([jnp.full_like(choice.low, NO_WINDOW), choice.low])
    windows = Windows(lows, jnp.stack([choice.high, choice.high]), keep_bulk)
    options = jax.vmap(lambda w: _contour_for(law, w, epsilon, log_delta, log_tol, count))(windows)
    cost = jnp.log(options.nodes_needed) + jnp.maximum(options.cancellation - FREE_CANCELLATION, 0.0)
    cost = jnp.where(jnp.isfinite(cost), cost, jnp.inf)
    cost = cost.at[1].set(jnp.where(choice.separable, cost[1], jnp.inf))
    return Placement(jax.tree.map(lambda x: x[jnp.argmin(cost)], options), choice)
