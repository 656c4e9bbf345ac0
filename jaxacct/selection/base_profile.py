"""What the bounds of a selection take from its base: certified upper ends of its profile, direction by direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxacct.accounting.account import delta, epsilon
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import broadcast_shape
from jaxacct.mechanisms import Components, Mechanism, SampledWithoutReplacement, batch_shape, components
from jaxacct.mechanisms.base import register
from jaxacct.mechanisms.loss_components import add_and_remove
from jaxacct.mechanisms.parts import Part
from jaxacct.representations.mechanism_profile import profile
from jaxacct.selection.law_of_k import Law, require_law

__all__ = [
    "SAYS_NOTHING",
    "Sides",
    "base_delta",
    "base_epsilon",
    "bounded_loss",
    "common_shape",
    "finite_once",
    "infinite_mass",
    "meet",
    "place",
    "sides",
    "under",
    "upper_delta",
    "upper_epsilon",
]

LEAST_DELTA = 1e-300
"""Smallest delta that the engines are asked for: below it float64 soon loses relative accuracy."""
BISECTIONS = 100
"""Bisections for the epsilon of a finite law: more than there are bits in a float64."""
LOSS_ERROR = 2.0**-50
"""Relative error allowed for a loss and for the difference of a loss and eps: eight units."""
SAYS_NOTHING = {"epsilon": np.inf, "delta": 1.0}
"""For each quantity the upper end that says nothing, which is the largest value that it can have."""
_RELATION_OF = {"remove": "remove_one", "add": "add_one"}
"""The relation that has one direction alone, by the name of the direction."""


@register
@dataclass(frozen=True, eq=False)
class _Under(Mechanism):
    """A run under a relation of its own, whose two directions there answer for removing and for adding a record."""

    mechanism: Any
    relation: str = field(metadata={"static": True})
    constraints: ClassVar = {}

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self.mechanism.expand(self.relation, direction)

    def symmetric(self) -> bool:
        return self.mechanism.symmetric()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        # its pair is that of several pairs of data sets, each the worst for some eps, and a selection takes all of them
        sampled = lambda x: isinstance(x, SampledWithoutReplacement)
        found = filter(sampled, jax.tree.leaves(self.mechanism, is_leaf=sampled))
        joined = any(np.any((np.asarray(x.sampling_ratio) > 0.0) & (np.asarray(x.sampling_ratio) < 1.0)) for x in found)
        return "bound" if joined else self.mechanism.kind_under(self.relation, composed)


def under(run: Mechanism, relation: str) -> tuple[Mechanism, str]:
    """(run, relation), with a relation whose directions have names: the caller knows add_one and remove_one alone."""
    if not add_and_remove(run, relation):
        return _Under(run, relation), "add_or_remove_one"
    return run, "add_or_remove_one" if relation == "zero_out" else relation


class Sides(NamedTuple):
    """The relations that answer for one direction of a base, and for its reverse."""

    forward: str
    reverse: str

    @property
    def direction(self) -> str:
        """The name of this direction."""
        return "add" if self.forward == "add_one" else "remove"

    @property
    def opposite(self) -> str:
        """The name of the reverse direction."""
        return "remove" if self.forward == "add_one" else "add"


def sides(run: Mechanism, relation: str) -> tuple[Sides, ...]:
    """The directions that are bounded separately: one where both are alike, else two.

    All code of a selection takes its directions from here, so that none skips the only one.
    """
    if relation in _RELATION_OF.values():
        other = _RELATION_OF["add" if relation == "remove_one" else "remove"]
        return (Sides(relation, other),)
    if run.symmetric():
        return (Sides(relation, relation),)
    return (Sides("remove_one", "add_one"), Sides("add_one", "remove_one"))


def common_shape(run: Mechanism, law: Law, name: str, values: np.ndarray) -> tuple[int, ...]:
    """The shape that a base, a law and values broadcast to; InputError for anything but a law."""
    require_law("k", law)
    return broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape, name: np.shape(values)})


def upper_delta(run: Mechanism, at: np.ndarray, relation: str) -> np.ndarray:
    """Upper ends of delta(eps), for every real eps, which broadcasts with the batch.

    A single finite law is summed; the engines answer for everything else.
    """
    if batch_shape(run) == ():
        each = [components(run, "add_or_remove_one", direction) for direction in _named(relation)]
        if all(finite_once(parts) for parts in each):
            return np.max([_by_sum(parts, at) for parts in each], axis=0)
    if np.all(at >= 0.0):
        return np.asarray(delta(run, at, relation=relation).upper)
    return np.asarray(profile(run, relation).delta(at).upper)


def base_delta(run: Mechanism, at: np.ndarray, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of delta(eps >= 0) of one configuration.

    A single finite law of any size is summed; the engines answer for everything else.
    """
    each = [components(run, "add_or_remove_one", direction) for direction in _named(relation)]
    if all(finite_once(parts) for parts in each):
        low, high = (np.max([_by_sum(parts, at, side) for parts in each], axis=0) for side in (-1.0, 1.0))
        return low, high
    found = delta(run, at, relation=relation)
    return np.asarray(found.lower), np.asarray(found.upper)


def base_epsilon(run: Mechanism, target: np.ndarray, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of epsilon(delta) of one configuration, found as in `base_delta`.

    (0, 0) where delta is 1 or more; the upper end is inf where delta is below 1e-300.
    """
    each = [components(run, "add_or_remove_one", direction) for direction in _named(relation)]
    at = np.clip(target, LEAST_DELTA, 1.0 - ROUNDOFF)
    if all(finite_once(parts) for parts in each):
        low = np.max([_crossing(parts, at, -1.0) for parts in each], axis=0)
        high = np.max([_crossing(parts, at, 1.0) for parts in each], axis=0)
    else:
        found = epsilon(run, at, relation=relation)
        low, high = np.asarray(found.lower), np.asarray(found.upper)
    return np.where(target >= 1.0, 0.0, low), np.where(
        target >= 1.0, 0.0, np.where(target >= LEAST_DELTA, high, np.inf)
    )


def _crossing(parts: Components, target: np.ndarray, side: float) -> np.ndarray:
    """One end of the eps at which the sum falls to delta, by bisection: the upper end for side 1.

    inf where delta is below the mass at infinity.
    """
    top = float(np.max(np.where(parts.finite_mass[0, 0] > 0.0, parts.finite_loss[0, 0], 0.0), initial=0.0))
    low, high = np.zeros(target.shape), np.full(target.shape, top * (1.0 + 4.0 * LOSS_ERROR))
    beyond = _by_sum(parts, high, side) > target
    at_zero = _by_sum(parts, low, side) <= target
    for _ in range(BISECTIONS):
        middle = low + 0.5 * (high - low)
        within = _by_sum(parts, middle, side) <= target
        low, high = np.where(within, low, middle), np.where(within, middle, high)
    return np.where(beyond, np.inf, np.where(at_zero, 0.0, high if side > 0.0 else low))


def upper_epsilon(run: Mechanism, target: np.ndarray, relation: str) -> np.ndarray:
    """Upper ends of epsilon(delta); inf where delta is below 1e-300, 0 where it is 1 or more."""
    target = np.asarray(target)
    found = np.asarray(epsilon(run, np.clip(target, 1e-300, 1.0 - ROUNDOFF), relation=relation).upper)
    return np.where(target >= 1.0, 0.0, np.where(target >= 1e-300, found, np.inf))


def meet(one: Any, other: Any, most: float) -> np.ndarray:
    """What two brackets (lower, upper) have in common, (2, *shape); (0, most) where they have nothing in common.

    Where two brackets contradict each other, it cannot be known which is true, so that neither is used.  An end that is
    NaN is not used either.
    """
    low, high = np.fmax(np.fmax(one[0], other[0]), 0.0), np.fmin(np.fmin(one[1], other[1]), most)
    agree = low <= high
    return np.stack([np.where(agree, low, 0.0), np.where(agree, high, most)])


def place(own: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, ...]:
    """The index in an array of shape `own` that belongs to an index of a shape that it broadcasts to."""
    tail = index[len(index) - len(own) :]
    return tuple(i if n > 1 else 0 for i, n in zip(tail, own, strict=True))


def infinite_mass(run: Mechanism, relation: str) -> np.ndarray:
    """The larger mass at infinity of the directions of a relation, of the batch's shape."""
    each = [components(run, "add_or_remove_one", direction).delta_infinity for direction in _named(relation)]
    return np.max(each, axis=0).reshape(batch_shape(run))


def bounded_loss(parts: Components) -> np.ndarray:
    """(B,) whether the finite losses are bounded."""
    return ~((parts.mu > 0.0) | np.any(parts.gauss_n > 0.0, axis=1))


def _named(relation: str) -> list[str]:
    """The directions of a relation."""
    return [direction for direction, one in _RELATION_OF.items() if relation in (one, "add_or_remove_one")]


def finite_once(parts: Components) -> bool:
    """Whether the parts are a single finite law.

    Its profile is a sum, and its trade-off curve has one knot for each atom.
    """
    others = (parts.mu > 0.0).any() or (parts.gauss_n > 0.0).any() or (parts.laplace_n > 0.0).any()
    return not others and parts.finite_n.shape[1] == 1 and bool((parts.finite_n == 1.0).all())


def _by_sum(parts: Components, at: np.ndarray, side: float = 1.0) -> np.ndarray:
    """`sum_i p_i (1 - e^{eps - l_i})_+` and the mass at infinity, rounded up for side 1 and down for side -1."""
    loss, mass = parts.finite_loss[0, 0], parts.finite_mass[0, 0]
    eps = np.asarray(at)[..., None]
    below = eps - loss - side * LOSS_ERROR * (np.abs(loss) + np.abs(eps))
    with np.errstate(over="ignore"):
        total = np.sum(mass * np.maximum(-np.expm1(np.minimum(below, 0.0)), 0.0), axis=-1)
    return np.minimum((total + parts.delta_infinity[0]) * (1.0 + side * 1e-12), 1.0)
