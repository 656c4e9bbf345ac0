"""Any mechanism with finitely many outputs, given by its two probability vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import PROBABILITY, InputError, Tracer, broadcast_shape
from jaxacct.mechanisms.base import register
from jaxacct.mechanisms.finite import FiniteMechanism, log_of_ratio
from jaxacct.mechanisms.parts import FinitePair

__all__ = ["FiniteOutput", "refuse_sums", "sums"]

SUM_LIMIT = 1e-12
"""How far a probability vector's sum may be from 1; it is divided by its sum."""


@register
@dataclass(frozen=True, eq=False)
class FiniteOutput(FiniteMechanism):
    """A mechanism with finitely many outputs: probabilities ``p`` with the record and ``q`` without it.

    delta(eps) = sum_i (p_i - e^eps q_i)_+ for remove, and with p and q exchanged for add. An output with q_i = 0 < p_i
    has infinite loss. Under ``replace_one`` p and q are the two laws of the replaced record, in either order: the steps
    of a repetition all have the same order, different mechanisms of a composition each have their own. The answer is
    for these two laws: they must be the worst neighbours, in the sense that no other pair of neighbours has a larger
    delta at any eps.

    Parameters
    ----------
    p, q : array_like in [0, 1]
        The last axis runs over the outputs (the same number in both), the axes before it are the batch and
        broadcast. Each vector sums to 1 within 1e-12; the law is that of the numbers as given, divided by their sum.

    Raises
    ------
    InputError
        A value outside its limits, with its index; vectors that do not sum to 1, or of different lengths.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function
    (hockey-stick divergences of a pair, its two directions and its sampling).

    >>> import jaxacct as ja
    >>> coin = ja.FiniteOutput(p=[0.75, 0.25], q=[0.25, 0.75])
    >>> round(float(ja.delta(coin, 0.5).upper), 6)
    0.33782
    """

    p: Any
    q: Any
    constraints: ClassVar = {"p": PROBABILITY, "q": PROBABILITY}
    vectors: ClassVar = ("p", "q")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {}
        for name in self.vectors:
            value = getattr(self, name)
            if np.ndim(value) == 0 or np.shape(value)[-1] == 0:
                raise InputError(f"{name} must have one or more outcomes on its last axis; give a vector")
            sizes[name] = np.shape(value)[-1]
            if not isinstance(value, Tracer):
                refuse_sums(name, value)
        if sizes["p"] != sizes["q"]:
            raise InputError(
                f"p has {sizes['p']} outcomes and q has {sizes['q']}; give both the same, with 0 where one cannot occur"
            )

    def pair(self) -> FinitePair:
        shape = broadcast_shape({"p": np.shape(self.p), "q": np.shape(self.q)})
        given = [np.broadcast_to(np.asarray(x), shape) for x in (self.p, self.q)]
        above_p, above_q = (sums(np.concatenate([x, -np.ones_like(x[..., :1])], -1))[..., None] for x in given)
        p, q = (x / (1.0 + above) for x, above in zip(given, (above_p, above_q), strict=True))
        common = (p > 0.0) & (q > 0.0)
        # p/q - 1 and log p/q from the numbers as given, whose difference is exact where they are near, and what
        # their sums have above 1, to its own accuracy
        one, two = (np.where(common, x, 1.0) for x in given)
        with np.errstate(over="ignore"):
            excess = (one - two) / two
            shift = (above_q - above_p) / (1.0 + above_p)
            loss = log_of_ratio(one - two, one, two) + 2.0 * np.arctanh((above_q - above_p) / (2.0 + above_p + above_q))
            excess = excess + shift * (1.0 + excess)
        apart = (np.where(other == 0.0, here, 0.0).sum(-1) for here, other in ((p, q), (q, p)))
        p_infinity, q_infinity = (np.where(common.any(-1), np.minimum(mass, 1.0), 1.0) for mass in apart)
        loss, p, q, excess = (np.where(common, x, 0.0) for x in (loss, p, q, excess))
        return FinitePair(loss, p, q, p_infinity, q_infinity, excess)

    def infinity_exactly(self, direction: str) -> Fraction | None:
        p, q = (self.p, self.q) if direction == "remove" else (self.q, self.p)
        masses = [Fraction(float(x)) for x in p]
        return sum((x for x, other in zip(masses, q, strict=True) if other == 0.0), Fraction(0)) / sum(masses)

    def symmetric(self) -> bool:
        """Whether the loss has the same law in both directions, to the last bit; else both are computed."""
        pair = self.pair()
        here, there = _sorted_law(pair.loss, pair.p), _sorted_law(-pair.loss, pair.q)
        return bool(np.array_equal(here, there) and np.array_equal(pair.p_infinity, pair.q_infinity))


def sums(values: np.ndarray) -> np.ndarray:
    """Sums over the last axis, correctly rounded, so that permuting the outcomes changes nothing."""
    rows = values.reshape(-1, values.shape[-1])
    return np.array([math.fsum(row) for row in rows]).reshape(values.shape[:-1])


def refuse_sums(name: str, values: float | np.ndarray) -> None:
    """Refuse vectors that do not sum to 1 within SUM_LIMIT."""
    total = sums(np.asarray(values))
    bad = np.abs(total - 1.0) > SUM_LIMIT
    if bad.any():
        index = [int(i) for i in np.argwhere(bad)[0]]
        raise InputError(
            f"the sum of {name}{index if index else ''} = {float(total[tuple(index)])!r} must be 1 within "
            f"{SUM_LIMIT:g}; divide by the sum in float64"
        )


def _sorted_law(loss: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """(..., 2, A) losses and masses in ascending order of the loss, absent outcomes last."""
    loss = np.where(mass > 0.0, loss, np.inf)
    order = np.lexsort((mass, loss), axis=-1)
    return np.stack([np.take_along_axis(x, order, -1) for x in (loss, mass)], -2)
