"""The trade-off function of a mechanism from certified values of its privacy profile, refined where it matters."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxacct.accounting.dispatch import answered_by_parts
from jaxacct.accounting.true_positive_rates import Deltas, best_epsilon, rate_at, start_at
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import broadcast_shape
from jaxacct.engines.loss_moments import Interval
from jaxacct.mechanisms import Mechanism, batch_shape, components, directions
from jaxacct.representations.convex_conjugate import best_cells, conjugate, consistent

__all__ = ["bracket", "is_narrow"]

QUICK_RATES = (1e-14, 1.0 - 1e-9)
"""False-positive rates between which three values of delta near the best slope are tried first."""

START_SLOPES = 65
"""Slopes e^eps of the first grid."""
ROUNDS = 4
"""How often the cells that keep the upper end high are split; the bracket is second order in their width."""
SPLIT = 5
"""Parts into which such a cell is split."""
DELTA_ABOVE_INFINITY = 1e-10
"""Slopes end where delta has come this close to the mass at infinity."""
HARD = 1e-6
"""If delta(0) has a larger relative width, the lattice evaluates all values of delta."""
ROUGHLY = 0.01
"""Least relative width that is asked of the epsilon at which slopes end, if the lattice evaluates it."""
FARTHEST_EPSILON = 50.0
"""Where slopes end if no epsilon is that close."""
LARGEST_EPSILON = 700.0
"""Slopes end here at the latest: e^eps and its product with a length-1 cell stay within float64."""
NARROW_ABSOLUTE = 1e-7
"""A bracket of the trade-off function no wider than this is narrow, whatever its relative width."""

REFINED_ABSOLUTE = 1e-12
"""Below this width cells are not split any more: the error of delta itself is of this order."""


class CertifiedProfile(Protocol):
    """What is read of a profile: `jaxacct.Profile`, which imports this module."""

    @property
    def mechanism(self) -> Mechanism: ...

    @property
    def relation(self) -> str: ...

    @property
    def engine(self) -> str: ...

    def element(self, index: tuple[Any, ...]) -> CertifiedProfile:
        """One configuration of a batch."""

    def altered(self, **settings: Any) -> CertifiedProfile:
        """This profile with other settings."""

    def deltas_of(self, rows: np.ndarray) -> Deltas:
        """The bracket of delta for some rows of the flat batch."""

    def epsilon(self, delta: Any) -> Bounds:
        """The bracket of epsilon."""

    def delta(self, epsilon: Any) -> Bounds:
        """The bracket of delta."""


def bracket(profile: CertifiedProfile, mechanism: Mechanism, fpr: float | np.ndarray, rtol: float) -> Bounds:
    """Certified f(fpr): by three values of delta where that is narrow, else by a grid of slopes for each element."""
    mine = batch_shape(mechanism)
    shape = broadcast_shape({"the mechanism": mine, "fpr": np.shape(fpr)})
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    wanted = np.broadcast_to(np.asarray(fpr, np.float64), shape).reshape(-1)
    low, high = np.zeros(rows.size), np.ones(rows.size)
    quick = np.flatnonzero(_smooth(profile)[rows] & (wanted >= QUICK_RATES[0]) & (wanted <= QUICK_RATES[1]))
    by_lattice = np.zeros(rows.size, bool)
    if quick.size:
        # where the loss is nearly an atom, as with little noise, the contour takes long and the secant finds no slope
        at_zero = profile.deltas_of(rows[quick])(np.zeros((1, quick.size)), np.arange(quick.size))
        advantage, width = at_zero.estimate[0], at_zero.upper[0] - at_zero.lower[0]
        hard = np.atleast_1d(at_zero.engine == "lattice").reshape(width.shape)
        by_lattice[quick] = hard | (width > HARD * at_zero.upper[0])
        easy = ~by_lattice[quick]
        quick, advantage = quick[easy], advantage[easy]
    if quick.size:
        deltas = profile.deltas_of(rows[quick])
        place = best_epsilon(deltas, wanted[quick], start_at(advantage, wanted[quick]))
        rates = rate_at(deltas, place, wanted[quick])
        low[quick], high[quick] = 1.0 - rates.high - 1e-16, 1.0 - rates.low + 1e-16
    open_ = ~is_narrow(low, high, rtol)
    for row in np.unique(rows[open_]):
        at = open_ & (rows == row)
        one = profile.element(np.unravel_index(row, mine)) if mine else profile
        for each in (one.altered(engine="lattice"), one) if by_lattice[at].any() else (one,):
            found = _element(each, wanted[at], rtol)
            # both brackets hold; if they contradict each other neither is used
            both = consistent(Interval(np.maximum(low[at], found.low), np.minimum(high[at], found.high)))
            low[at], high[at] = both
            if is_narrow(*both, rtol).all():
                break
    low, high = np.clip(low, 0.0, 1.0).reshape(shape), np.clip(high, 0.0, 1.0).reshape(shape)
    status = np.where(is_narrow(low, high, rtol), "ok", "width")
    return Bounds(low, 0.5 * (low + high), high, mechanism.kind_of_bracket(profile.relation), status, "tradeoff")


def _smooth(profile: CertifiedProfile) -> np.ndarray:
    """Rows whose loss has a density and no mass at infinity."""
    mechanism = profile.mechanism
    smooth = np.full(int(np.prod(batch_shape(mechanism))), answered_by_parts(mechanism))
    if smooth.size and smooth[0]:
        for side in directions(mechanism, profile.relation):
            parts = components(mechanism, profile.relation, side)
            steps, atoms = (np.sum(n, axis=1) for n in (parts.gauss_n, parts.finite_n))
            others = atoms + np.sum(parts.laplace_n, axis=1)
            smooth &= ((steps > 0) | (parts.mu > 0)) & (others == 0) & (parts.delta_infinity == 0)
    return smooth


def is_narrow(low: np.ndarray, high: np.ndarray, rtol: float) -> np.ndarray:
    """Whether a bracket of an error rate is as narrow as asked for."""
    return high - low <= np.maximum(rtol * high, NARROW_ABSOLUTE)


def _element(profile: CertifiedProfile, fpr: np.ndarray, rtol: float) -> Interval:
    """Start from the slopes that matter for some of the rates, then split the cells that keep the upper end high.

    Both error rates are read from f, so that the width is held against the smaller of f and 1 - f.
    """
    floor = _mass_at_infinity(profile)
    roughly = profile.altered(rtol=max(rtol, ROUGHLY)) if profile.engine == "lattice" else profile
    farthest = float(roughly.epsilon(min(1.000001 * floor + DELTA_ABOVE_INFINITY, 0.5)).upper)
    farthest = min(farthest, LARGEST_EPSILON) if np.isfinite(farthest) else FARTHEST_EPSILON
    with np.errstate(divide="ignore"):
        # the best slope e^eps for a rate a has e^eps a <= 1
        highest = min(farthest, -np.log(float(fpr.min())))
        lowest = min(farthest, 20.0 - np.log1p(-float(fpr.max())))
    # E = 0 belongs to the grid: H(0) = 1
    epsilon = np.linspace(-max(lowest, 1e-6), max(highest, 1e-6), START_SLOPES)
    if profile.engine == "lattice":  # the two directions meet at 0 with a kink
        epsilon = np.union1d(epsilon, 0.0)
    values = profile.delta(epsilon)
    x, below, above = (np.concatenate([[first], v]) for first, v in _ends(epsilon, values))
    low, high = np.zeros(fpr.shape), np.ones(fpr.shape)
    for turn in range(ROUNDS + 1):
        # each grid's bracket holds; a finer one may be wider, since errors of delta count for more on short cells
        found = conjugate(x, below, above, fpr, steepest=1.0, beyond=floor)
        low, high = np.maximum(low, found.low), np.minimum(high, found.high)
        wide = high - low > np.maximum(rtol * np.minimum(high, 1.0 - low), REFINED_ABSOLUTE)
        if turn == ROUNDS or not wide.any():
            break
        cells = np.unique(best_cells(x, below, above, fpr[wide], 1.0))
        near = np.unique(np.concatenate([cells - 1, cells, cells + 1]))
        near = near[(near > 0) & (near < x.size - 1)]
        if not near.size:
            break
        parts = np.arange(1, SPLIT) / SPLIT
        epsilon = (np.log(x[near]) + parts[:, None] * np.log(x[near + 1] / x[near])).ravel()
        added = (v for _, v in _ends(epsilon, profile.delta(epsilon)))
        x, below, above = (np.concatenate([old, new]) for old, new in zip((x, below, above), added, strict=True))
        order = np.argsort(x)
        x, below, above = x[order], below[order], above[order]
    return consistent(Interval(low, high))


def _mass_at_infinity(profile: CertifiedProfile) -> float:
    """The mass at infinity, below which delta(eps) never falls, rounded down."""
    sides = directions(profile.mechanism, profile.relation)
    parts = [components(profile.mechanism, profile.relation, side, below=True) for side in sides]
    rounded = (part.delta_infinity[0] * (1.0 - (4.0 + part.infinity_units[0]) * ROUNDOFF) for part in parts)
    return max(0.0, *(float(mass) for mass in rounded))


def _ends(epsilon: np.ndarray, values: Bounds) -> tuple[tuple[float, np.ndarray], ...]:
    return (0.0, np.exp(epsilon)), (1.0, values.lower), (1.0, values.upper)
