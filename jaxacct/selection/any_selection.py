"""The base class of selections, which run a mechanism K times, and `pair_of`, which makes a pair that dominates one."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import UnboundedLossError, broadcast_shape
from jaxacct.engines import quick_bounds
from jaxacct.mechanisms import Mechanism, batch_shape, components
from jaxacct.mechanisms.base import FinitePair, Part, call, require_mechanism
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.profile import LEAST_GAP, pair_of_profile, stacked
from jaxacct.selection.base_profile import bounded_loss, infinite_mass, sides, under
from jaxacct.selection.law_of_k import Law, rebuilt, require_law

OK_WIDTH = 2e-4
"""A bracket of at most this relative width has status "ok", even if rtol is smaller: few brackets are narrower."""
COMPOSED_POINTS = 160
"""The profile of a selection that is composed is evaluated at this many eps, evenly spaced from 0."""
LAST_DELTA = 1e-13
"""Delta at the last of the COMPOSED_POINTS eps, if no mass is at infinity."""


@dataclass(frozen=True, eq=False)
class AnySelection(Mechanism):
    """A selection: `mechanism` is run K times, and K is drawn from `law`."""

    mechanism: Mechanism
    law: Law
    constraints: ClassVar = {}
    candidates: ClassVar[str] = "iid"
    """Assumption about the candidates: "iid" or "adaptive"."""

    def __post_init__(self) -> None:
        require_mechanism("run", self.mechanism)
        require_law("k", self.law)
        broadcast_shape({"the mechanism": batch_shape(self.mechanism), "k": self.law.shape})

    def validated(self) -> Self:
        return dataclasses.replace(self, mechanism=self.mechanism.validated(), law=rebuilt(self.law))

    def symmetric(self) -> bool:
        return bool(self.mechanism.symmetric())

    def group_sizes(self) -> set[int]:
        return set(self.mechanism.group_sizes())

    def expression(self) -> str:
        return f"selection.select({self.mechanism.expression()}, {call(self.law)}{self._options()})"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if (runs := self._as_composition()) is not None:
            return runs.expand(relation, direction)
        chosen = dataclasses.replace(self, mechanism=under(self.mechanism, relation)[0])
        return [(sample_pair(_pair_of(chosen), np.asarray(1.0), direction), np.asarray(1.0))]

    def bracket(self, quantity: str, values: np.ndarray, relation: str, rtol: float) -> Bounds:
        """Return the bracket of this selection's "epsilon" at deltas `values`, or of its "delta" at eps `values`."""
        run, relation = under(self.mechanism, relation)
        values = np.asarray(values, np.float64)
        given = "delta" if quantity == "epsilon" else "epsilon"
        shape = broadcast_shape({"the mechanism": batch_shape(run), "k": self.law.shape, given: values.shape})
        values = np.broadcast_to(values, shape)
        if quantity == "epsilon" and (values == 0.0).any():
            bounded = bounded_loss(components(run, "add_or_remove_one", "remove")).reshape(batch_shape(run))
            if (bad := (values == 0.0) & ~bounded).any():
                raise UnboundedLossError(bad, "a selection of runs")
        if quantity == "epsilon" and (self._total_variation(run) <= values).all():
            return as_bounds(np.zeros(shape), np.zeros(shape), "certified", rtol, "theorem")
        return self._answer(quantity, run, values, relation, rtol)

    def _total_variation(self, run: Mechanism) -> np.ndarray:
        """Return an upper bound of delta(0): E[K] times the base's, since k candidates have at most k times as much."""
        each = [components(run, "add_or_remove_one", side) for side in ("remove", "add")]
        most = [quick_bounds.total_variation(parts) + parts.delta_infinity for parts in each]
        with np.errstate(invalid="ignore"):
            return np.asarray(self.law.mean * np.max(most, axis=0).reshape(batch_shape(run)) * (1.0 + 1e-9))

    @abstractmethod
    def _options(self) -> str:
        """Return, as text, the arguments that follow the base and the law in a call of `selection.select`."""

    @abstractmethod
    def _as_composition(self) -> Mechanism | None:
        """Return the composition of runs that equals the selection. Return None if no composition equals it."""

    @abstractmethod
    def _pair(self) -> FinitePair:
        """Return a pair of laws (P, Q) that dominates the selection under add_or_remove_one."""

    @abstractmethod
    def _answer(self, quantity: str, run: Mechanism, values: np.ndarray, relation: str, rtol: float) -> Bounds:
        """Return what `bracket` returns, in the shape of `values`, for a base and a relation that `under` returned."""


# `expand` needs the same pair for both directions
_pair_of = functools.lru_cache(maxsize=8)(lambda chosen: chosen._pair())


def as_bounds(low: np.ndarray, high: np.ndarray, kind: str, rtol: float, engine: str) -> Bounds:
    """Return Bounds, status "ok" if narrow. Unless `kind` is "certified", low becomes 0 and finite ends are "ok"."""
    low, allowed = (low, max(rtol, OK_WIDTH)) if kind == "certified" else (np.zeros_like(low), 1.0)
    with np.errstate(invalid="ignore"):
        narrow = (low == high) | np.isfinite(high) & (high - low <= allowed * np.maximum(high, 1e-300))
    status = np.where(high == 0.0, "zero", np.where(np.isinf(low), "mass_at_infinity", np.where(narrow, "ok", "width")))
    return Bounds(low, high, high, kind, status, engine)


def pair_of(
    run: Mechanism,
    law: Law,
    ask: Callable[[str, np.ndarray, str], np.ndarray],  # (quantity, values, relation of a direction) -> upper bounds
    last: Callable[[str], tuple[np.ndarray, np.ndarray]],  # relation -> upper bounds of (finite losses, infinite mass)
) -> FinitePair:
    """Return a pair of laws that dominates a selection, made from upper bounds of its profile in both directions."""
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape})
    both = sides(run, "add_or_remove_one")
    names = [both[0].forward, both[-1].forward]
    level = np.minimum(LAST_DELTA + 2.0 * law.mean * infinite_mass(run, "add_or_remove_one"), 0.5)
    # If losses are unbounded, points (epsilon, delta) at the deltas `beyond` are added. The smallest of these deltas
    # that has a finite epsilon counts as the pair's mass at infinity.
    far = 10.0 ** -np.array([16.0, 20.0, 30.0, 60.0, 120.0, 250.0]).reshape(-1, *(1,) * len(shape))
    beyond = np.maximum(far, np.minimum(level - LAST_DELTA, 0.5))
    unique = dict.fromkeys(names)
    furthest = np.max([np.broadcast_to(ask("epsilon", level, name), shape) for name in unique], axis=0)
    furthest = np.where(np.isfinite(furthest), furthest, 1.0)
    share = np.linspace(0.0, 1.0, COMPOSED_POINTS).reshape(-1, *(1,) * len(shape))
    at = share * np.maximum(furthest, COMPOSED_POINTS * LEAST_GAP)
    upper = {name: ask("delta", at, name) for name in unique}
    ends = {name: last(name) for name in unique}
    largest = np.max([loss for loss, _ in ends.values()], axis=0)
    bounded = np.isfinite(largest)
    if bounded.all():
        further, beyond = largest[None], largest[None]
    else:
        further = np.where(bounded, largest, np.max([ask("epsilon", beyond, name) for name in unique], axis=0))
    at = np.concatenate([at, further])
    upper = {name: np.concatenate([each, np.where(bounded, ends[name][1], beyond)]) for name, each in upper.items()}
    rows = [np.moveaxis(x, 0, -1).reshape(-1, at.shape[0]) for x in (at, *(upper[name] for name in names))]
    return stacked([_pair_of_points(*row) for row in zip(*rows, strict=True)], shape)


def _pair_of_points(epsilon: np.ndarray, *deltas: np.ndarray) -> FinitePair:
    """Return the pair from points (eps, deltas) in any order. Non-finite eps are dropped; of close eps one is kept."""
    order = np.argsort(epsilon, kind="stable")
    order = order[np.isfinite(epsilon[order])]
    kept: list[int] = []
    for place in range(order.size):
        if not kept or epsilon[order[place]] - epsilon[order[kept[-1]]] >= LEAST_GAP:
            kept.append(place)
        elif len(kept) > 1:
            kept[-1] = place
    return pair_of_profile(epsilon[order][kept], *(np.minimum.accumulate(delta[order])[kept] for delta in deltas))
