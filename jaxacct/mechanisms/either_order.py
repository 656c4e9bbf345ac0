"""A replaced record has two orders: the laws of its two values may stand either way round.

Two laws p and q of a finite mechanism bound a replacement by `max(H_a(p || q), H_a(q || p))` at every a, since the
relation does not say which value is replaced by which.  The maximum of two profiles is a profile, so one pair attains
it, and that pair is symmetric.  It dominates each step of a composition, whichever order each step has; a single step
attains it at every a in one order or the other, a composition in general does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.mechanisms.parts import FinitePair, FinitePart
from jaxacct.mechanisms.profile import LEAST_GAP, pair_of_profile, stacked

__all__ = ["either_order", "profile_of_law", "spaced"]

LARGEST_LOSS_STEP = 600.0
"""Distance of two losses up to which the point is looked for where the two profiles cross between them.

Beyond it e^step overflows soon; without the crossing the profile only rises."""


def either_order(forward: FinitePart, reverse: FinitePart) -> FinitePair:
    """The pair of the larger of two profiles, given by the finite laws of the loss in the two directions.

    Arrays with the same batch in front.  Between two neighbouring losses both profiles are straight lines in e^eps, so
    that the losses, and the points where the lines cross, are all the knots there are.  Values are rounded up.
    """
    shape = forward.infinity.shape
    rows = int(np.prod(shape, dtype=np.int64))
    flat = [[np.reshape(x, (rows, -1)) for x in part] for part in (forward, reverse)]
    return stacked([_of_row(*([x[row] for x in part] for part in flat)) for row in range(rows)], shape)


def _of_row(forward: Sequence[np.ndarray], reverse: Sequence[np.ndarray]) -> FinitePair:
    (one, mass_one, infinite_one), (two, mass_two, infinite_two) = forward, reverse
    losses = np.concatenate([[0.0], one[(mass_one > 0.0) & (one > 0.0)], two[(mass_two > 0.0) & (two > 0.0)]])
    knots = spaced(np.unique(losses))
    laws = ((one, mass_one, infinite_one[0]), (two, mass_two, infinite_two[0]))
    first, second = (profile_of_law(*law, knots) for law in laws)
    step, gap = np.diff(knots), first - second
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        share = gap[:-1] / (gap[:-1] - gap[1:])
        crossing = knots[:-1] + np.log1p(np.expm1(step) * share)
    inside = (gap[:-1] * gap[1:] < 0.0) & (step < LARGEST_LOSS_STEP) & np.isfinite(crossing)
    knots = spaced(np.unique(np.concatenate([knots, crossing[inside]])))
    knots[-1] *= 1.0 + 4.0 * ROUNDOFF  # at least the largest loss; beyond it only the mass at infinity remains
    delta = np.maximum(*(profile_of_law(*law, knots) for law in laws))
    delta[-1] = max(infinite_one[0], infinite_two[0])
    return pair_of_profile(knots, delta, delta)


def profile_of_law(loss: np.ndarray, mass: np.ndarray, infinite: float, eps: np.ndarray) -> np.ndarray:
    """delta(eps) of a finite law of the loss, rounded up."""
    below = eps[:, None] - loss
    below = np.minimum(below - 2.0 * ROUNDOFF * (np.abs(loss) + eps[:, None]), 0.0)
    total = np.sum(mass * -np.expm1(below), axis=1) + infinite
    return np.minimum(total * (1.0 + ROUNDOFF * (8.0 + loss.size)), 1.0)


def spaced(points: np.ndarray) -> np.ndarray:
    """Ascending points without those too near the one before; a profile without some of its knots only rises."""
    kept = [points[0]]
    for point in points[1:]:
        if point - kept[-1] >= max(LEAST_GAP, 64.0 * ROUNDOFF * point):
            kept.append(point)
    if kept[-1] < points[-1]:  # the largest loss stays, beyond it only the mass at infinity is left
        kept[-1] = points[-1]
    return np.array(kept)
