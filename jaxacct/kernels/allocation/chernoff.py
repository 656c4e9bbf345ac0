"""Chernoff's bound of the put, which is cheap: it settles most directions that are not the larger (README.md, 7)."""

import numpy as np

from jaxacct.kernels.allocation.cutoff import log_power
from jaxacct.kernels.allocation.law import Windows, cells_of, cuts_of
from jaxacct.kernels.allocation.placement import tilted_mode
from jaxacct.kernels.arrays import Array

__all__ = ["put_below"]

CELLS = 48
"""Cells of the grid."""
ABSCISSAS = 12
"""Abscissas that are tried."""
REACH = 8.6
"""Deviations of the standard normal law that the cells cover; the rest is bounded by its mass."""


def put_below(s: Array, t: Array, k: Array) -> Array:
    """log of an upper bound of E(k - S)_+, (B,): the least over some c of log(e^{ck} E e^{-cS}/(e c))."""
    with np.errstate(all="ignore"):
        deviation = np.sqrt(np.expm1(np.minimum(s * s, 600.0)) / t)
        near = np.maximum(1.0 - k, deviation) / deviation**2  # the saddle point of a normal law
        grid = near[:, None] * np.geomspace(0.5, 60.0, ABSCISSAS) ** np.minimum(s, 1.0)[:, None]
        none, one = np.full_like(s, -np.inf), np.ones_like(s)
        start = tilted_mode(s, t, grid[:, -1]) - REACH
        windows = Windows(none, one, -none, one, start, np.full_like(s, REACH))
        cells = cells_of(s, t, windows, CELLS)
        log = log_power(cells, cuts_of(cells, windows), t, grid, -1.0)[0]
        each = log + grid * k[:, None] - 1.0 - np.log(grid) + 1e-12 * grid * k[:, None] + 1e-9
        return np.min(np.where(np.isnan(each), np.inf, each), axis=1)
