"""LowerBound: what an audit has shown, with its confidence, the number of its trials, and what it assumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core.validation import OPEN_PROBABILITY, InputError, broadcast_shape, check

__all__ = ["CONDITIONAL", "UNCONDITIONAL", "LowerBound", "error_of", "plain", "require_at_most"]

UNCONDITIONAL = "lower bound"
"""Kind of a bound that assumes nothing of the mechanism."""
CONDITIONAL = "conditional: Gaussian DP"
"""Kind of a bound that holds only where the trade-off curve is that of a Gaussian."""


@dataclass(frozen=True, eq=False)
class LowerBound:
    """With probability at least ``confidence`` the mechanism is not (e, delta)-DP for any e < ``epsilon``.

    The probability is over the trials of the audit.  A batch holds each element at ``confidence`` by itself; for k
    statements that hold together ask each for 1 - (1 - confidence)/k.

    Parameters
    ----------
    epsilon : float or numpy.ndarray
        0 says nothing.
    delta : float or numpy.ndarray
    confidence : float
    trials : int or numpy.ndarray
        Runs, both worlds together; of an audit in one run its canaries.
    method : str
    kind : str
        "lower bound", or "conditional: Gaussian DP": true if the trade-off curve is that of a Gaussian.
    mu : float or numpy.ndarray, optional
        The Gaussian-DP parameter of a Gaussian fit.

    References
    ----------
    README.md of this folder, "What a lower bound says".

    >>> LowerBound(0.75, 1e-5, 0.99, 20_000, "clopper_pearson")
    LowerBound(epsilon >= 0.75 at delta 1e-05, confidence 0.99, 20,000 trials, clopper_pearson)
    """

    epsilon: Any
    delta: Any
    confidence: float
    trials: Any
    method: str
    kind: str = UNCONDITIONAL
    mu: Any = None

    def __repr__(self) -> str:
        trials = f"{self.trials:,}" if isinstance(self.trials, int) else str(self.trials)
        condition = "" if self.kind == UNCONDITIONAL else f", {self.kind}"
        epsilon = np.array2string(np.asarray(self.epsilon), precision=6, threshold=8)
        return (
            f"LowerBound(epsilon >= {epsilon} at delta {self.delta}, confidence {self.confidence:g}, "
            f"{trials} trials, {self.method}{condition})"
        )


def error_of(confidence: Any) -> float:
    """1 - confidence, the probability with which a lower bound may be wrong."""
    number = check("confidence", confidence, OPEN_PROBABILITY)
    if np.ndim(number):
        raise InputError("confidence must be one number; ask for every statement by itself")
    return 1.0 - float(number)


def require_at_most(name: str, values: np.ndarray, of: str, limits: np.ndarray, remedy: str) -> None:
    """Refuse, in one line, the first value above its limit; they broadcast."""
    shape = broadcast_shape({name: values.shape, of: limits.shape})
    bad = np.broadcast_to(values > limits, shape)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        value, limit = (np.broadcast_to(x, shape)[index] for x in (values, limits))
        place = f"[{', '.join(map(str, index))}]" if index else ""
        raise InputError(f"{name}{place} = {value:g} must be <= {of} = {limit:g}; {remedy}")


def plain(values: Any) -> Any:
    """A Python number of an array without a shape; other arrays as they are."""
    values = np.asarray(values)
    return values.item() if not values.shape else values
