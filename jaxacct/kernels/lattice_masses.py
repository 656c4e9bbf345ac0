"""Laws on a uniform lattice that dominate a privacy loss (connect the dots) or are dominated by it.

Both are made from the hat masses low_k, high_k of the cells (lattice_cells.py), P-masses all.

*Above.* low_k + high_{k-1} on node k keeps both masses of every cell and dominates the law (Doroshenko et al. 2022).

*Below.* The chord of v(alpha) = int (alpha' - alpha)_+ dQ over cell k exceeds v by at most E_k =
(alpha_{k+1} - alpha_k) a b/(a + b), with the Q-masses a = low_k/alpha_k and b = high_k/alpha_{k+1}.  With g_k =
max(E_{k-1}, E_k) the chords of v(alpha_k) - g_k lie below v; the mass is the jump of their slope.  Negative jumps are
spread on the neighbours (greatest convex minorant), and what stays negative is cancelled against mass of higher loss;
both only lower the profile.  Whatever cannot be stored goes to a higher loss above, and to a lower one or to nothing
below.

Rounding moves masses up (above) or down (below), so that the statements hold for the stored numbers.
"""

from __future__ import annotations

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, iterate, namespace
from jaxacct.kernels.lattice_cells import Cells

__all__ = ["cancelled", "lower_masses", "upper_masses"]

SWEEPS = 32
"""Most times that negative jumps are spread on their neighbours; what is left after them is cancelled."""


def upper_masses(cells: Cells, atoms: Array) -> Array:
    """Connect-the-dots masses on the nodes in ascending order of the loss, rounded up: a dominating law; (N,)."""
    grown = 1.0 + 1.5 * cells.eta + 8.0 * ROUNDOFF
    return cells.low * grown + _from_left(cells.high * grown + cells.whole) * (1.0 + 4.0 * ROUNDOFF) + atoms


def lower_masses(cells: Cells, atoms: Array, step: Array, first: Array, last: Array) -> Array:
    """Signed masses on the nodes of a law that is dominated by the given one, second order in the step.

    At the two ends the profile may not be lowered (no mass can be merged onto an extreme point).  At the lower end all
    mass of the first cell moves to its node of lower loss.  At the upper end g_{last-1} >= b_{last-1} (alpha_last -
    alpha_{last-1}), which puts the chord below the tangent there.  With P-masses at the nodes and M_k =
    e^h g_k/(e^h - 1), P-relative, the jump of the slope of -g is (1 + e^-h) M_k - e^-h M_{k+1} - M_{k-1}.

    Parameters
    ----------
    cells : hat masses of the open cells;  atoms : (N,) masses exactly on nodes;  step : h;
    first, last : indices of the first and the last node in use.

    Returns
    -------
    (N,) masses, few of them negative; `cancelled` takes those away.
    """
    xp = namespace(*cells, atoms, step, first, last)
    index = xp.arange(atoms.shape[0])
    open_cell = (index >= first) & (index < last)
    low, high, eta, whole = (xp.where(open_cell, x, 0.0) for x in cells)
    crossing = (index == first) | (last < first + 2)
    low, high = low + xp.where(crossing, high, 0.0), xp.where(crossing, 0.0, high)
    back = xp.exp(-step)
    # low high/(low + high e^-h), at most high; neither product nor quotient may underflow or overflow
    larger = low >= high
    ratio = xp.where(larger, high, low) / xp.where(low + high > 0, xp.maximum(low, high), 1.0)
    denominator = xp.where(larger, 1.0 + ratio * back, ratio + back)
    spread = xp.where(larger, high, low) / xp.where(denominator > 0, denominator, 1.0)
    spread = xp.where(denominator > 0, xp.minimum(spread, high), high) * (1.0 + 4.0 * eta + 16.0 * ROUNDOFF)
    lowered = xp.maximum(_from_left(spread), spread)
    final = last - 1
    lowered = xp.where(index == final, xp.maximum(lowered, high * (1.0 + 2.0 * eta)), lowered)
    lowered = xp.where((index <= first) | (index >= last), 0.0, lowered)
    kept = low * (1.0 - eta) + _from_left(high * (1.0 - eta)) + whole + atoms
    given = (1.0 + back) * lowered
    taken = back * _from_right(lowered) + _from_left(lowered)
    jump = kept + given - taken - 16.0 * ROUNDOFF * (kept + given + taken)
    jump = xp.where((index >= first) & (index <= last), jump, 0.0)
    return _convex_minorant(jump, back, first, last)


def cancelled(jump: np.ndarray, step: float) -> tuple[np.ndarray, float]:
    """(masses without negative ones, P-mass that was missing): each debt is paid by the next masses of higher loss.

    That lowers every payoff that rises with the loss.  What no mass of higher loss can pay is returned; it overstates
    a payoff of at most 1 by as much.
    """
    if not np.any(jump < 0.0):
        return jump, 0.0
    mass = _above_zero(jump.copy(), step)
    missing = 0.0
    above = np.flatnonzero(mass > 0.0)
    for k in np.flatnonzero(mass < 0.0)[::-1]:  # those of highest loss first
        debt, mass[k] = -mass[k] * (1.0 + 4.0 * ROUNDOFF), 0.0
        place = first = int(np.searchsorted(above, k))
        while debt > 0.0 and place < above.size:
            j = above[place]
            if mass[j] > debt:
                mass[j] = (mass[j] - debt) * (1.0 - 4.0 * ROUNDOFF)
                debt = 0.0
            else:
                debt = max(debt - mass[j], 0.0) * (1.0 + 4.0 * ROUNDOFF)
                mass[j] = 0.0
                place += 1
        if place > first:
            above = np.delete(above, slice(first, place))
        missing += debt
    return mass, missing * (1.0 + 1e-9)


def _above_zero(mass: np.ndarray, step: float) -> np.ndarray:
    """The measure of max(c, 0), c being the payoff of the given one, where c is negative at its upper end.

    With c_k = E[(1 - e^{l_k - L})_+] and k the last node with c_k > 0, c is set to 0 from node k on: the chord from
    c_{k-1} to 0 lies below that to c_k.  The mass of node k becomes c_{k-1}/(1 - e^-h).
    """
    some = np.flatnonzero(mass)
    if some.size == 0 or mass[some[-1]] > 0.0:
        return mass
    back, total, discounted, size = np.exp(-step), 0.0, 0.0, 0.0
    for k in range(int(some[-1]) - 1, 0, -1):
        total, discounted = total + mass[k + 1], back * (discounted + mass[k + 1])
        size += abs(mass[k + 1])
        here = total - discounted
        slack = 64.0 * ROUNDOFF * (some[-1] - k + 2.0) * (size + abs(mass[k]))
        if here > slack:  # else c_k may not be above 0, and the chord to 0 not below the profile
            before = (total + mass[k]) - back * (discounted + mass[k])
            whole = -np.expm1(-step)
            mass[k + 1 :] = 0.0
            mass[k] = max(before - slack, 0.0) / whole * (1.0 - 8.0 * ROUNDOFF)
            mass[k - 1] -= (here + slack) * back / whole * (1.0 + 8.0 * ROUNDOFF)
            return mass
    return np.zeros_like(mass)


def _from_left(x: Array) -> Array:
    xp = namespace(x)
    return xp.concatenate([xp.zeros(1), x[:-1]])


def _from_right(x: Array) -> Array:
    xp = namespace(x)
    return xp.concatenate([x[1:], xp.zeros(1)])


def _convex_minorant(jump: Array, back: Array, first: Array, last: Array) -> Array:
    """Spread negative slope jumps on the two neighbours, keeping both masses, a capped number of times."""
    xp = namespace(jump, back, first, last)
    index = xp.arange(jump.shape[0])
    inner = (index > first) & (index < last)

    def negative(x: Array) -> Array:
        return xp.where(inner & (x < 0), x, 0.0)

    def going(state: tuple[Array, Array]) -> Array:
        return (state[0] < SWEEPS) & xp.any(negative(state[1]) < 0)

    def sweep(state: tuple[Array, Array]) -> tuple[Array, Array]:
        done, x = state
        debt = negative(x)
        share = _from_right(debt) * (back / (1.0 + back)) + _from_left(debt) / (1.0 + back)
        rest = x - debt
        return done + 1, rest + share - 8.0 * ROUNDOFF * (xp.abs(rest) - share) * (share < 0)

    return iterate(xp, going, sweep, (xp.zeros((), int), jump))[1]
