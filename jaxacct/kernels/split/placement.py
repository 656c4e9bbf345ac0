"""Where to integrate the split contour: windows, abscissa, period and number of nodes.

No bound depends on these choices.  A bad one makes the bracket wide.
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxacct.kernels import certificate, saddle
from jaxacct.kernels.arrays import Array, namespace, pick
from jaxacct.kernels.contour import ABSCISSA_MULTIPLES, period_for
from jaxacct.kernels.law import LossLaw
from jaxacct.kernels.split import cutoff, remainder
from jaxacct.kernels.split.parts import NO_WINDOW, Grid, Windows, cumulants, grid, log_size, shares, tilted

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
"""Where the search for the saddle point may begin: so many abscissae between these multiples.

They are multiples of log(1/delta) over the scale of losses.
"""

_SCAN = np.geomspace(SCAN_FROM, SCAN_TO, SCAN_STEPS)
"""These multiples."""
_CUTS = np.ceil(np.geomspace(FEWEST_NODES, MOST_NODES, NODE_COUNTS))
"""Numbers of contour nodes that are tried for the cut-off."""


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
    at, turns = c[..., None], None if frequency is None else frequency[..., None]
    return grid(law.gauss_sigma, law.gauss_q, law.sign[..., None], windows.low, windows.high, at, points, turns)


def _contours(law: LossLaw, windows: Windows, epsilon: Array, log_delta: Array, log_tol: Array, count: int) -> Contour:
    """The best contours for two choices of windows, an axis in front: with the compositions of bulk steps, without."""
    xp = namespace(law.gauss_n, windows.low, epsilon)
    start = xp.maximum(-log_delta, 1.0) / remainder.scale_of(law, epsilon)
    start = xp.broadcast_to(start, windows.low.shape[:-1])
    grids = grids_of(law, windows, start, PLACEMENT_POINTS)
    both = shares(grids)

    def k(c: Array) -> tuple[Array, Array, Array]:
        return cumulants(law, windows.keep_bulk, both, c)

    def size(c: Array) -> Array:
        return log_size(law, windows.keep_bulk, both, c) + certificate.log_kappa(c)

    _, mean, variance = k(1e-3 * start)
    gap = epsilon - mean
    normal = (gap + xp.sqrt(gap**2 + 4.0 * variance)) / (2.0 * variance)  # where many steps make it normal
    scan = xp.stack([f * start for f in _SCAN] + [xp.clip(normal, 1e-3 * start, 1e4 * start)])
    first = _pick_in_front(scan, xp.argmin(size(scan) - scan * epsilon, axis=0))
    point = saddle.search(k, epsilon, first, saddle.REFINEMENT_STEPS)
    at = xp.stack([f * point.c for f in ABSCISSA_MULTIPLES])
    sizes = size(at)
    # lost to cancellation even at the saddle point
    least = xp.min(sizes - at * epsilon, axis=0) - log_delta
    allowed = xp.clip(AFFORDED_CANCELLATION - least, SURE_CANCELLATION, LARGEST_CANCELLATION)
    tried, bound = (xp.moveaxis(x, 0, -1) for x in (at, sizes))
    c, period = period_for(point.c, tried, bound, epsilon, log_delta, log_tol, allowed[..., None])
    right = xp.where(at > c, sizes - at * epsilon - (at - c) * period, xp.inf)
    images_at = _pick_in_front(at, xp.argmin(right, axis=0))
    parts = tilted(law.sign[..., None], c[..., None], grids)
    cuts = _CUTS.reshape(-1, *[1] * c.ndim)
    t = 2.0 * xp.pi / period * cuts
    decay = cutoff.decay_of_both(law, windows, grids, parts, c, t) + xp.log(xp.pi * (t - 0.5 * t / cuts))
    lost = log_size(law, windows.keep_bulk, both, c) - c * epsilon - log_delta
    enough = decay >= lost - log_tol + SPARE_NATS
    cuts = xp.asarray(_CUTS)
    needed = xp.where(xp.any(enough, axis=0), cuts[xp.argmax(enough, axis=0)], 2.0 * cuts[-1])
    kept = xp.sum(cuts <= xp.minimum(needed, float(count))[..., None], axis=-1)
    needed = xp.where(xp.isfinite(period), needed, 2.0 * cuts[-1])
    return Contour(windows, c, period, images_at, needed, cuts[xp.maximum(kept, 1) - 1], lost)


def _pick_in_front(x: Array, index: Array) -> Array:
    """The entry of x at a place along its first axis."""
    xp = namespace(x)
    return pick(xp, xp.moveaxis(x, 0, -1), index)


def place(law: LossLaw, epsilon: Array, log_delta: Array, log_tol: Array, count: int) -> Placement:
    """Windows and contour: with the compositions of bulk steps or without, whichever needs fewer nodes."""
    xp = namespace(law.gauss_n, epsilon)
    choice = remainder.choose(law, epsilon, log_delta, log_tol)
    low, high, one = choice.low, choice.high, xp.ones_like(choice.bulk_at)
    windows = Windows(
        xp.stack([xp.full_like(low, NO_WINDOW), low]), xp.stack([high, high]), xp.stack([one, xp.zeros_like(one)])
    )
    options = _contours(law, windows, epsilon, log_delta, log_tol, count)
    cost = xp.log(options.nodes_needed) + xp.maximum(options.cancellation - FREE_CANCELLATION, 0.0)
    cost = xp.where(xp.isfinite(cost), cost, xp.inf)
    without = choice.separable & (cost[1] < cost[0])

    def chosen(x: Array) -> Array:
        return xp.where(xp.reshape(without, without.shape + (1,) * (x.ndim - 1 - without.ndim)), x[1], x[0])

    return Placement(jax.tree.map(chosen, options), choice)
