"""Replacement as removal and addition of a record, for mechanisms without a good pair for the replacement.

From data D over D less a record to that with another record in its place,

    delta_replace(eps) <= min_x delta_remove(x) + e^x delta_add(eps - x),

for the profiles of all that is run, composed first.  jaxacct/mechanisms/README.md, "Random allocation".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.validation import broadcast_shape
from jaxacct.mechanisms import Mechanism, batch_shape

__all__ = ["Ask", "delta_replaced", "epsilon_replaced", "smaller"]

SHARES = 9
"""Shares of eps, or of delta in logarithms of the odds, that are tried for the first of the two steps."""
NEARER = 5
"""As many again between the neighbours of the best of them."""
WIDEST_LOG_ODDS = 12.0
"""Shares of delta from e^-12 to 1 - e^-12."""
Ask = Callable[[str, np.ndarray, str], np.ndarray]
"""(quantity, values, relation) -> upper ends."""


def delta_replaced(mechanism: Mechanism, epsilon: np.ndarray, upper: Ask) -> Bounds:
    """delta(eps) of a replaced record, from above; the best of some x in [0, eps]."""
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), "epsilon": np.shape(epsilon)})
    eps = np.broadcast_to(np.asarray(epsilon, np.float64), shape)

    def both(x: np.ndarray) -> np.ndarray:
        first = np.minimum(x, eps)
        rest = np.maximum(eps - first, 0.0) * (1.0 - 2.0 * ROUNDOFF)
        removed, added = (
            np.stack([upper("delta", each, name) for each in at])
            for at, name in ((first, "remove_one"), (rest, "add_one"))
        )
        with np.errstate(over="ignore"):
            total = removed + np.exp(first * (1.0 + 4.0 * ROUNDOFF)) * added * (1.0 + 16.0 * ROUNDOFF * (1.0 + first))
        return np.minimum(np.where(np.isnan(total), 1.0, total * (1.0 + 4.0 * ROUNDOFF)), 1.0)

    share = np.linspace(0.0, 1.0, SHARES).reshape(-1, *(1,) * len(shape))
    found = _refined(lambda at: both(at * eps), share, 1.0 / (SHARES - 1))
    return _bound(found, "delta")


def epsilon_replaced(mechanism: Mechanism, delta: np.ndarray, upper: Ask) -> Bounds:
    """epsilon at delta of a replaced record, from above; the best of some shares of delta for the first step."""
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), "delta": np.shape(delta)})
    target = np.broadcast_to(np.asarray(delta, np.float64), shape)
    if not target.all():
        upper("epsilon", target, "remove_one")  # refuses delta = 0

    def both(log_odds: np.ndarray) -> np.ndarray:
        share = 1.0 / (1.0 + np.exp(-log_odds))
        first = np.maximum(target * share, SMALLEST_POSITIVE)
        x = np.stack([upper("epsilon", each, "remove_one") for each in first])
        with np.errstate(over="ignore", invalid="ignore"):
            left = (target - first) * (1.0 - 8.0 * ROUNDOFF) * np.exp(-x * (1.0 + 4.0 * ROUNDOFF))
        usable = (left > 1e-300) & np.isfinite(x)
        rest = np.stack([upper("epsilon", each, "add_one") for each in np.where(usable, left, 0.5)])
        return np.where(usable, (x + rest) * (1.0 + 4.0 * ROUNDOFF), np.inf)

    odds = np.linspace(-WIDEST_LOG_ODDS, WIDEST_LOG_ODDS, SHARES).reshape(-1, *(1,) * len(shape))
    found = _refined(both, odds, 2.0 * WIDEST_LOG_ODDS / (SHARES - 1))
    return _bound(found, "epsilon")


def smaller(one: Bounds, other: Bounds) -> Bounds:
    """The smaller upper end of two bounds of the same values."""
    better = other.upper < one.upper
    upper, status, engine = (
        np.where(better, getattr(other, name), getattr(one, name)) for name in ("upper", "status", "engine")
    )
    return Bounds(np.zeros_like(upper), upper, upper, "bound", status, engine)


def _refined(values: Callable[[np.ndarray], np.ndarray], at: np.ndarray, apart: float) -> np.ndarray:
    """The least of the values at some places, and at more between the neighbours of the best."""
    coarse = values(at)
    best = np.take_along_axis(np.broadcast_to(at, coarse.shape), np.argmin(coarse, axis=0)[None], 0)
    nearer = np.linspace(-1.0, 1.0, NEARER + 2)[1:-1].reshape(-1, *(1,) * (coarse.ndim - 1))
    lowest, highest = at.reshape(len(at), -1)[0, 0], at.reshape(len(at), -1)[-1, 0]
    fine = values(np.clip(best + apart * nearer, lowest, highest))
    return np.minimum(coarse.min(axis=0), fine.min(axis=0))


def _bound(upper: np.ndarray, quantity: str) -> Bounds:
    status = np.where(upper == 0.0, "zero", np.where(np.isfinite(upper), "ok", "width"))
    upper = np.where(np.isnan(upper), np.inf if quantity == "epsilon" else 1.0, upper)
    return Bounds(np.zeros_like(upper), upper, upper, "bound", status, "remove_and_add")
