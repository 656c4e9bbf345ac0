"""The certified ends of a selection: its worst score, and what else holds where the bracket of that is wide."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import broadcast_shape
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.parts import FinitePair
from jaxacct.mechanisms.profile import LEAST_GAP, pair_of_profile, stacked
from jaxacct.selection import bounds_from_base, profile_ends
from jaxacct.selection.base_profile import SAYS_NOTHING, infinite_mass, meet, sides
from jaxacct.selection.law_of_k import Law
from jaxacct.selection.named_bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.worst_case import bracket

__all__ = ["OK_WIDTH", "as_bounds", "certified", "pair", "pair_of"]

OK_WIDTH = 2e-4
"""Relative width up to which a bracket has the status "ok" however small rtol is: the bracket of a selection is hardly
ever narrower than that, and asking for less is no failure."""

WIDE = 0.01
"""Relative width above which the ends of the profile, the envelope and the bounds from the base are evaluated too."""
LEAST_DELTA = 1e-300
"""Smallest delta that the worst score is solved for: a smaller one has the lower end of this one, and the largest loss
as its upper end."""
COMPOSED_POINTS = 160
"""Values of eps at which the profile is taken when the selection is composed with other mechanisms."""
LAST_DELTA = 1e-13
"""The points lie evenly up to the eps at which delta has fallen to this."""
FAR_DELTAS = 10.0 ** -np.array([16.0, 20.0, 30.0, 60.0, 120.0, 250.0])
"""Deltas of the points after them where losses are unbounded: what is left at the last counts as mass at infinity."""


def certified(
    quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, width: float = 0.0
) -> np.ndarray:
    """(2, *shape) lower and upper ends of "epsilon" at delta in [0, 1) or of "delta" at eps >= 0.

    width : as for `worst_case.bracket`.
    """
    most = SAYS_NOTHING[quantity]
    ends = meet(*(bracket(quantity, run, law, np.maximum(values, LEAST_DELTA), relation, width),) * 2, most)
    known = np.broadcast_to((values >= LEAST_DELTA) | (quantity == "delta"), ends.shape[1:])
    ends[1] = np.where(known, ends[1], most)
    if (wide := _loose(*ends)).any():
        ends = profile_ends.narrowed(quantity, run, law, values, relation, ends, wide)
    # the envelope reaches deltas far below those of the curve's polygon; Rényi accounting stands many candidates
    for name in ("envelope", "renyi"):
        if isinstance(law, BOUNDS[name].laws) and (wide := _loose(*ends) & known).any():
            other = bound_epsilon if quantity == "epsilon" else bound_delta
            at = np.maximum(values, LEAST_DELTA) if quantity == "epsilon" else values
            above = other(run, law, at, bound=name, relation=relation).upper
            ends = np.where(wide, meet(ends, (np.zeros_like(above), above), most), ends)
    if (wide := _loose(*ends)).any():
        ends = np.where(wide, meet(ends, bounds_from_base.ends(quantity, run, law, values, relation), most), ends)
    return ends


def as_bounds(low: np.ndarray, high: np.ndarray, kind: str, rtol: float, engine: str) -> Bounds:
    """The ends of a selection as Bounds: the status says how narrow they are, the kind what is known of its base.

    Of a base whose pair is only known to dominate (kind "bound") nothing is claimed from below.
    """
    if kind != "certified":
        low = np.zeros_like(low)
    with np.errstate(invalid="ignore"):
        narrow = (low == high) | np.isfinite(high) & (high - low <= max(rtol, OK_WIDTH) * np.maximum(high, 1e-300))
    status = np.where(high == 0.0, "zero", np.where(np.isinf(low), "mass_at_infinity", np.where(narrow, "ok", "width")))
    return Bounds(low, high, high, kind, status, engine)


def _loose(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (~np.isfinite(high) | ~(high - low <= WIDE * high)) & np.isfinite(low)


def pair(run: Mechanism, law: Law) -> FinitePair:
    """The pair that dominates the selection of the best one."""
    ask = lambda quantity, at, name: certified(quantity, run, law, at, name, np.inf)[1]
    return pair_of(run, law, ask, lambda name: profile_ends.last(run, law, name))


def pair_of(
    run: Mechanism,
    law: Law,
    ask: Callable[[str, np.ndarray, str], np.ndarray],
    last_of: Callable[[str], tuple[np.ndarray, np.ndarray]],
) -> FinitePair:
    """The pair of upper ends of a profile, forward at eps >= 0 and the reverse direction.

    Where the losses are bounded the points end at the largest loss, where the profile is the mass at infinity and no
    more.

    ask : (quantity, values, relation of one direction) -> upper ends.  last_of : relation -> (largest loss, mass at
        infinity).
    """
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape})
    both = sides(run, "add_or_remove_one")
    names = [both[0].forward, both[-1].forward]
    level = np.minimum(LAST_DELTA + 2.0 * law.mean * infinite_mass(run, "add_or_remove_one"), 0.5)
    beyond = np.maximum(FAR_DELTAS.reshape(-1, *(1,) * len(shape)), np.minimum(level - LAST_DELTA, 0.5))
    unique = dict.fromkeys(names)
    last = np.max([np.broadcast_to(ask("epsilon", level, name), shape) for name in unique], axis=0)
    last = np.where(np.isfinite(last), last, 1.0)
    share = np.linspace(0.0, 1.0, COMPOSED_POINTS).reshape(-1, *(1,) * len(shape))
    at = share * np.maximum(last, COMPOSED_POINTS * LEAST_GAP)
    upper = {name: ask("delta", at, name) for name in unique}
    ends = {name: last_of(name) for name in unique}
    largest = np.max([loss for loss, _ in ends.values()], axis=0)
    if np.isfinite(largest).all():
        at = np.concatenate([at, largest[None]])
        upper = {name: np.concatenate([each, ends[name][1][None]]) for name, each in upper.items()}
    else:
        further = np.max([ask("epsilon", beyond, name) for name in unique], axis=0)
        bounded = np.isfinite(largest)
        at = np.concatenate([at, np.where(bounded, largest, further)])
        upper = {name: np.concatenate([each, np.where(bounded, ends[name][1], beyond)]) for name, each in upper.items()}
    rows = [np.moveaxis(x, 0, -1).reshape(-1, at.shape[0]) for x in (at, *(upper[name] for name in names))]
    return stacked([_pair_of(*row) for row in zip(*rows, strict=True)], shape)


def _pair_of(epsilon: np.ndarray, *deltas: np.ndarray) -> FinitePair:
    """The pair of points in any order.

    Of points that are too near to each other the last is kept, except at eps = 0.
    """
    order = np.argsort(epsilon, kind="stable")
    order = order[np.isfinite(epsilon[order])]
    kept: list[int] = []
    for place in range(order.size):
        if not kept or epsilon[order[place]] - epsilon[order[kept[-1]]] >= LEAST_GAP:
            kept.append(place)
        elif len(kept) > 1:
            kept[-1] = place
    return pair_of_profile(epsilon[order][kept], *(np.minimum.accumulate(delta[order])[kept] for delta in deltas))
