"""Mixtures of Gaussians seen through cells of u = x/sigma: a pair that the mixture dominates (data processing)."""

from __future__ import annotations

import numpy as np

from jaxacct.core.floats import LOST_TAIL, ROUNDOFF
from jaxacct.mechanisms.bracketing_pairs import lowered_part
from jaxacct.mechanisms.contribution_laws import LEAST
from jaxacct.mechanisms.mixture_profiles import quantiles
from jaxacct.mechanisms.parts import FinitePart

__all__ = ["cells_below", "stacked_parts"]


def cells_below(shift: np.ndarray, weight: np.ndarray, direction: str) -> FinitePart:
    """The law of the loss of (sum_j weight_j N(shift_j, 1), N(0, 1)) in a direction, where only the cell is seen.

    The masses of the law that the loss is drawn from are rounded down, those of the other law up.  Weights that
    `contribution_laws` leaves out count as errors of every mass.
    """
    kept = weight > 0.0
    shift, weight = shift[kept], weight[kept]
    edges = np.concatenate([[-np.inf], quantiles(0.0, float(shift.max())), [np.inf]])
    p, p_off = np.zeros(edges.size - 1), np.zeros(edges.size - 1)
    for one, chance in zip(shift, weight, strict=True):
        mass, off = _masses(edges - one, abs(one))
        p += chance * mass
        p_off += chance * (off + 16.0 * ROUNDOFF * mass)
    p_off += ROUNDOFF * shift.size * p + float(LEAST)
    q, q_off = _masses(edges, 0.0)
    if direction == "add":
        p, p_off, q, q_off = q, q_off, p, p_off
    return lowered_part(p - p_off, q + q_off)


def stacked_parts(parts: list[FinitePart], shape: tuple[int, ...]) -> FinitePart:
    """The laws of all configurations of a batch as one, padded with atoms without mass."""
    most = max((part.loss.size for part in parts), default=1)
    atoms = np.zeros((2, len(parts), most))
    for row, part in enumerate(parts):
        atoms[0, row, : part.loss.size], atoms[1, row, : part.mass.size] = part.loss, part.mass
    loss, mass = atoms.reshape(2, *shape, most)
    return FinitePart(loss, mass, np.array([part.infinity for part in parts], np.float64).reshape(shape))


def _masses(edges: np.ndarray, moved: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses of N(0, 1) between edges, and their errors; the edges are off by roundings of their own size and `moved`.

    Differences are taken in the nearer tail.
    """
    from scipy import special  # takes a while to import: only where it is needed

    low, high = edges[:-1], edges[1:]
    upper = low > 0.0
    first = special.ndtr(np.where(upper, -low, high))
    second = special.ndtr(np.where(upper, -high, low))
    size = np.minimum(np.where(upper, np.abs(low), np.abs(high)), 40.0)
    units = 16.0 + 8.0 * size**2 + 4.0 * (size + 1.0) * moved
    return np.maximum(first - second, 0.0), ROUNDOFF * units * (first + second) + LOST_TAIL
