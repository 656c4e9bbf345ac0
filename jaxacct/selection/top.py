"""Selections that release the best j of K candidates: `selection.select(run, k, top=j)` (README.md, "The best j")."""

from __future__ import annotations

import math
from dataclasses import field

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import Constraint, InputError, check_one
from jaxacct.engines import backend
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, repeat
from jaxacct.mechanisms.base import FinitePair, register
from jaxacct.selection import envelope, profile_ends
from jaxacct.selection.adaptive import LEAST_DELTA, upper_ends
from jaxacct.selection.any_selection import AnySelection, pair_of
from jaxacct.selection.base_profile import (
    SAYS_NOTHING,
    Sides,
    bounded_loss,
    each_pair,
    finite_once,
    sides,
    sum_of_atoms,
    upper_delta,
)
from jaxacct.selection.law_of_k import Law, PointMass, derivative, evaluated, probability_of
from jaxacct.selection.profile_ends import RELATIVE_ERROR

TOP = Constraint("use a whole number of candidates from 1 to 16", 1, 16, integral=True)
"""Allowed values of j, the number of released candidates. The bound needs the profiles of 1, ..., j runs."""
MOST_ATOMS = 1500
"""If several runs together have at most this many outcomes, their joint law is computed outcome by outcome."""


@register
class TopSelection(AnySelection):
    """A selection that runs ``mechanism`` K times, K from ``law``, and releases the best ``top`` by any score.

    All candidates are released if K is less than ``top``.  An answer has kind "bound": it is the least of an envelope
    for the best j, a bound by the largest loss, and a bound for releasing all candidates.  Selections can be composed.

    Parameters
    ----------
    mechanism : the base, one candidate; candidates are i.i.d. given the data.
    law : the law of K; it broadcasts with the mechanism.
    top : j, from 2 to 16; `select(..., top=j)` makes these objects.

    References
    ----------
    README.md of this folder, "The best j", has the bound and its proof.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = ja.epsilon(selection.select(ja.Gaussian(3.73), selection.Geometric(0.1), top=2), 1e-5)
    >>> 1.6 < b.upper < 2.7, b.kind
    (np.True_, 'bound')
    """

    top: int = field(default=2, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "top", int(check_one("top", self.top, TOP, "one number for all configurations")))

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def _options(self) -> str:
        return f", top={self.top}"

    def _as_composition(self) -> Mechanism | None:
        if isinstance(self.law, PointMass) and np.all(np.asarray(self.law.repetitions) <= self.top):
            return repeat(self.mechanism, self.law.repetitions)
        return None

    def _pair(self) -> FinitePair:
        run, law = self.mechanism, self.law
        ask = lambda quantity, at, name: self._upper(quantity, run, at, name, 1e-3)

        def last(relation: str) -> tuple[np.ndarray, np.ndarray]:
            shape = np.broadcast_shapes(batch_shape(run), law.shape)
            found = [ends(base, one, self.top, relation) for _, base, one in each_pair(run, law, shape)]
            largest, mass = np.reshape(found, (*shape, 2)).transpose(-1, *range(len(shape)))
            return largest, mass

        return pair_of(run, law, ask, last)

    def _answer(self, quantity: str, run: Mechanism, values: np.ndarray, relation: str, rtol: float) -> Bounds:
        upper = self._upper(quantity, run, values, relation, rtol)
        open_ = np.isinf(upper) | (upper == 1.0) & (quantity == "delta")
        status = np.where(upper == 0.0, "zero", np.where(open_, "width", "ok"))
        return Bounds(np.zeros(upper.shape), upper, upper, "bound", status, "top_envelope")

    def _upper(self, quantity: str, run: Mechanism, values: np.ndarray, relation: str, rtol: float) -> np.ndarray:
        """Return upper bounds of "epsilon" or "delta" at `values`. The base, the law and the values broadcast."""
        shape = np.broadcast_shapes(batch_shape(run), self.law.shape, np.shape(values))
        wanted, found = np.broadcast_to(values, shape).reshape(-1), np.empty(int(np.prod(shape)))
        for here, base, one in each_pair(run, self.law, shape):
            # NumPy or XLA is chosen as for one selection. Warnings are off, since `_of_one` handles overflow and NaN.
            with backend.job(1, apart=True), np.errstate(all="ignore"):
                found[here] = _of_one(quantity, base, one, self.top, wanted[here], relation, rtol)
        return found.reshape(shape)


def _of_one(
    quantity: str, run: Mechanism, law: Law, top: int, values: np.ndarray, relation: str, rtol: float
) -> np.ndarray:
    """Return the least of three upper bounds: by `by_envelope`, by `ends`, and by the average over K (`upper_ends`)."""
    most = SAYS_NOTHING[quantity]
    largest, mass = ends(run, law, top, relation)
    if quantity == "epsilon":
        found = by_envelope(quantity, run, law, top, np.maximum(values, LEAST_DELTA), relation)
        found = np.where(values >= LEAST_DELTA, found, np.inf)
        found = np.where(values >= mass, np.fmin(found, largest), found)
    else:
        found = by_envelope(quantity, run, law, top, values, relation)
        found = np.where(values >= largest, np.fmin(found, mass), found)
    found = np.where((found >= 0.0) & (found <= most), found, most)  # NaN becomes the trivial bound
    due = ~_above(quantity, run, law, values, found, relation)
    if due.any():
        other = upper_ends(quantity, run, law, values[due], relation, max(rtol, 1e-3))
        found[due] = np.fmin(found[due], np.where(other >= 0.0, other, most))
    return found


def _above(quantity: str, run: Mechanism, law: Law, values: np.ndarray, found: np.ndarray, relation: str) -> np.ndarray:
    """Return where the bound by the average over K (`upper_ends`) surely exceeds `found` and need not be computed."""
    at, target = (found, values) if quantity == "epsilon" else (values, found)
    above = np.zeros(values.shape, bool)
    for share in (0.7, 2.0, 4.0, 8.0):
        k = float(np.floor(np.clip(share * law.mean, 1.0, 2.0**52)))
        try:
            beyond = float(law.survival(k - 1.0))
        except InputError:  # the tails of this law are unknown
            break
        open_ = np.flatnonzero(~above & np.isfinite(at))
        if open_.size:
            above[open_] = beyond * account.delta(repeat(run, k), at[open_], relation=relation).lower > target[open_]
    return above


def by_envelope(quantity: str, run: Mechanism, law: Law, top: int, values: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of "epsilon" at delta > 0 (inf where none is found) or of "delta" at eps >= 0."""
    found = np.zeros(values.shape)
    for side in sides(run, relation):
        level = np.min(values if quantity == "epsilon" else upper_delta(run, values, side.forward), initial=1.0)
        made, unit = _envelope(run, law, top, side, float(level))
        found = np.maximum(found, made.leak(values) if quantity == "delta" else envelope.solved(made, values, unit))
    return found


def ends(run: Mechanism, law: Law, top: int, relation: str) -> tuple[float, float]:
    """Return upper bounds of the largest finite loss and of the mass at infinity: (inf, 1) if losses are unbounded."""
    largest, mass = 0.0, 0.0
    for side in sides(run, relation):
        part = components(run, "add_or_remove_one", side.direction)
        if not bounded_loss(part)[0]:
            return np.inf, 1.0
        one = float(largest_loss(part).above[0])
        scale, other = derivative(law, top)
        grown, _ = profile_ends.last(run, other, side.forward) if scale > 0.0 else (np.zeros(()), 0.0)
        total = (float(grown) + (top - 1) * one) * (1.0 + 8.0 * ROUNDOFF)
        # NaN or overflow: no bound of the largest loss is known
        largest = max(largest, total) if total >= 0.0 and np.isfinite(scale) else np.inf
        mass = max(mass, float(profile_ends.last(run, law, side.forward)[1]))
    return largest, mass


def _envelope(run: Mechanism, law: Law, top: int, side: Sides, level: float) -> tuple[envelope.Envelope, float]:
    """Return one direction's envelope for deltas >= `level`, and the largest eps in the profile of `top` runs."""
    parts = components(run, "add_or_remove_one", side.direction)
    # `apart`, the base's mass at infinity, is subtracted from the profiles and the curve; `Envelope.start` bounds what
    # this mass adds to delta. The subtraction is sound only if the mass is exact. A pair that merely dominates the base
    # may have more mass at infinity, so `apart` is 0 unless the kind of the base is "certified".
    certain = run.kind_under("add_or_remove_one", composed=True) == "certified"
    apart = float(np.abs(parts.delta_infinity[0])) * (1.0 - RELATIVE_ERROR) if certain else 0.0
    apart = apart if apart >= LEAST_DELTA else 0.0  # a smaller mass may be only the cut-off tail of a table
    scale, other = derivative(law, top)
    most = scale * float(evaluated(other, np.zeros(()))[1]) if scale > 0.0 else 1.0
    share = envelope.TAIL_SHARE / max(most, 1.0) if np.isfinite(most) else 0.0
    one, sums = np.ones(1), []
    for k in range(1, top + 1):
        ratio, high = _profile(run, parts, k, side, level * share)
        table, knots = envelope.table_of(ratio, high)
        if k == 1:
            u, t = knots
        lost = -math.expm1(k * math.log1p(-min(apart, 1.0 - ROUNDOFF))) * (1.0 - RELATIVE_ERROR)  # `1 - (1 - apart)^k`
        table = envelope.Table(table.ratio, np.maximum(table.delta - lost, 0.0))
        if k < top:
            sums.append(envelope.points_of(one, one, table, probability_of(law, k)))
        elif scale > 0.0:
            best = envelope.lines(other, u, np.clip(t - apart + 4.0 * ROUNDOFF, 0.0, 1.0))
            weight = scale / math.factorial(top) * (1.0 + 2.0 * envelope.INFLATED)
            sums.append(envelope.points_of(*best, table, weight))
    infinite = profile_ends.mass_on_top(law, apart)[1] if apart > 0.0 else 0.0
    return envelope.Envelope(infinite, tuple(sums)), float(np.log(ratio[-1]))


def _profile(run: Mechanism, parts: Components, count: int, side: Sides, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return e^eps for several eps, and upper bounds of the delta of `count` runs at these eps."""
    seen = parts.finite_mass[0, 0] > 0.0 if finite_once(parts) else np.zeros(0, bool)
    if not (seen.any() and np.count_nonzero(seen) ** count <= MOST_ATOMS):
        return envelope.profile_points(repeat(run, count), level, side)
    # Compute the joint law of the runs outcome by outcome. Its profile bends at the losses and is evaluated there.
    loss, mass = parts.finite_loss[0, 0][seen], parts.finite_mass[0, 0][seen]
    total, product = np.zeros(1), np.ones(1)
    for _ in range(count):
        total, product = (total[:, None] + loss).ravel(), (product[:, None] * mass).ravel()
    slack = 16.0 * ROUNDOFF * count * (np.max(np.abs(loss)) + 1.0)
    at = np.unique(np.concatenate([total, [0.0]]))
    at = at[np.concatenate([[True], np.diff(at) > 1e-9])]
    at = np.concatenate([[at[0] - 1.0], at, at[-1] + np.array([10.0 * slack, 50.0])])
    at = np.unique(np.clip(at, -envelope.LARGEST_EPS, envelope.LARGEST_EPS))
    infinite = -math.expm1(count * math.log1p(-min(float(np.abs(parts.delta_infinity[0])), 1.0 - ROUNDOFF)))
    high = sum_of_atoms(total + slack, product, infinite * (1.0 + RELATIVE_ERROR), at, 1.0)
    return np.exp(at) * (1.0 + 4.0 * ROUNDOFF), high
