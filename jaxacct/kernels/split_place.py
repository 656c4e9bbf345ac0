"""Where to integrate the split contour: windows, abscissa, period and nodes.  No bound depends on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import aside, certificate, saddle, split_certificate
from jaxacct.kernels.contour import MULTIPLES, period_for
from jaxacct.kernels.law import Law
from jaxacct.kernels.split import AWAY, Window, cumulants, frame, shares, tilted

CUTS = (8.0, 4096.0, 19)
CANCEL = 9.0
CANCEL_LEAST = 1.5
AFFORDED = 16.0
"""Nats that may be lost to cancellation in all; rounding is some e^-30."""
AXIS = 128
"""Points for placing the contour."""


class Place(NamedTuple):
    """Where to integrate: windows, abscissa and period, and what the cut-off asks for."""

    window: Window
    c: jax.Array
    period: jax.Array
    images_at: jax.Array  # abscissa for the Chernoff bound of the images
    count: jax.Array  # nodes needed
    kept: jax.Array  # nodes kept, as many of those as there are
    lost: jax.Array  # nats by which the integrand exceeds delta


class Placed(NamedTuple):
    """A place with the windows' own data, which together are all that a certificate needs to know of it."""

    place: Place
    choice: aside.Choice


def unplaced(size, parts):
    """A batch of nothing, to be filled: NumPy arrays for `size` configurations of `parts` sampled Gaussians."""
    one, each = np.zeros(size), np.zeros((size, parts))
    place = Place(Window(each, each, one), one, one, one, one, one, one)
    choice = aside.Choice(each, each, one, one, one.astype(bool))
    return jax.tree.map(np.copy, Placed(place, choice))


def frames_of(law: Law, window: Window, c, points, frequency=None):
    """Grids for the J sampled Gaussians, even or following a frequency."""
    each = jax.vmap(frame, (0, 0, None, 0, 0, None, None, None))
    return each(law.gauss_sigma, law.gauss_q, law.sign, window.low, window.high, c, points, frequency)


def _option(law: Law, window: Window, epsilon, log_delta, log_tol, count):
    """The best contour for one pair of windows."""
    start = jnp.maximum(-log_delta, 1.0) / jnp.maximum(epsilon, 1e-12)
    frames = frames_of(law, window, start, AXIS)
    both = shares(frames)

    def k(c):
        return cumulants(law, window.keep, both, c)

    def size(c):
        return k(c)[0] + certificate.log_kappa(c)

    _, mean, variance = k(1e-3 * start)
    gap = epsilon - mean
    normal = (gap + jnp.sqrt(gap**2 + 4.0 * variance)) / (2.0 * variance)  # where many steps make it normal
    scan = jnp.append(start * jnp.geomspace(0.04, 6.0, 7), jnp.clip(normal, 1e-3 * start, 1e4 * start))
    first = scan[jnp.argmin(jax.vmap(size)(scan) - scan * epsilon)]
    point = saddle.search(k, epsilon, first, saddle.REFINEMENTS)
    at = point.c * jnp.array(MULTIPLES)
    sizes = jax.vmap(size)(at)
    least = jnp.min(sizes - at * epsilon) - log_delta  # lost to cancellation even at the saddle point
    allowed = jnp.clip(AFFORDED - least, CANCEL_LEAST, CANCEL)
    c, period = period_for(point.c, at, sizes, epsilon, log_delta, log_tol, allowed)
    right = jnp.where(at > c, sizes - at * epsilon - (at - c) * period, jnp.inf)
    images_at = at[jnp.argmin(right)]
    parts = jax.vmap(tilted, (None, None, 0))(law.sign, c, frames)
    cuts = jnp.ceil(jnp.geomspace(*CUTS))
    t = 2.0 * jnp.pi / period * cuts
    decay = split_certificate.decay(law, window, frames, parts, c, t) + jnp.log(jnp.pi * (t - 0.5 * t / cuts))
    lost = k(c)[0] - c * epsilon - log_delta
    enough = decay >= lost - log_tol + 2.0
    needed = jnp.where(jnp.any(enough), cuts[jnp.argmax(enough)], 2.0 * cuts[-1])
    kept = jnp.maximum(jnp.sum(cuts <= jnp.minimum(needed, float(count))), 1) - 1
    needed = jnp.where(jnp.isfinite(period), needed, 2.0 * cuts[-1])
    return Place(window, c, period, images_at, needed, cuts[kept], lost)


def plan(law: Law, epsilon, log_delta, log_tol, count) -> Placed:
    """Windows and contour: with the calm compositions or without, whichever needs fewer nodes."""
    choice = aside.choose(law, epsilon, log_delta, log_tol)
    keep = jnp.array([1.0, 0.0])
    lows = jnp.stack([jnp.full_like(choice.low, AWAY), choice.low])
    windows = Window(lows, jnp.stack([choice.high, choice.high]), keep)
    options = jax.vmap(lambda w: _option(law, w, epsilon, log_delta, log_tol, count))(windows)
    cost = jnp.log(options.count) + jnp.maximum(options.lost - 12.0, 0.0)
    cost = jnp.where(jnp.isfinite(cost), cost, jnp.inf)
    cost = cost.at[1].set(jnp.where(choice.separable, cost[1], jnp.inf))
    return Placed(jax.tree.map(lambda x: x[jnp.argmin(cost)], options), choice)
