"""A selection's base, the mechanism that it runs K times: directions, profile and trade-off curve T (README.md).

README.md of this folder, "From the profile to polygons", says how polygons above and below T follow from the profile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.accounting.account import REVERSED, delta, epsilon, with_infinite_mass
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import NON_NEGATIVE, PROBABILITY, RELATIONS, InputError, check, choice
from jaxacct.engines import backend, contour
from jaxacct.engines.contour import delta_about
from jaxacct.kernels.worst_score import CELLS, Inner, Outer
from jaxacct.mechanisms import (
    DIRECTIONS,
    Components,
    Mechanism,
    PrivacyProfile,
    batch_shape,
    components,
)
from jaxacct.mechanisms.base import Part, element, register, require_mechanism, take_rows
from jaxacct.mechanisms.combinators import in_either_order
from jaxacct.mechanisms.loss_components import add_and_remove
from jaxacct.representations.mechanism_profile import profile
from jaxacct.selection.law_of_k import Law

LEAST_DELTA = 1e-300
"""Smallest delta for which engines are asked. A smaller float64 loses relative accuracy."""
SAYS_NOTHING = {"epsilon": np.inf, "delta": 1.0}
"""Largest value of each quantity. As an upper bound it says nothing."""
_RELATION_OF = {"remove": "remove_one", "add": "add_one"}
"""For each direction, the relation that has only this direction."""
EPS_POINTS = {"closed_form": 3000, "contour": 1280, "two_steps": 1100, "lattice": 800}
"""For each engine, the number of eps in one direction at which it evaluates the profile. A slower engine has fewer."""
LAST_DELTA = 1e-18
"""The profile is evaluated up to the eps at which delta exceeds the mass at infinity by this much."""
PROFILE_RTOL = 0.01
"""The argument rtol of calls that compute a profile. A contour's error is 1 % of this, and moves eps by about 1e-5."""
CONTOURS = 16
"""Number of contours for one direction. Each gives delta at a block of neighbouring eps."""
TOGETHER = 32
"""Number of bases whose profiles one call computes. A larger number would take more memory and save hardly any time."""
CONTOUR_WIDTH = 1e-4
"""Largest relative width of a bracket from a shared contour. An eps with a wider bracket gets a contour of its own."""
FEW = 64
"""Up to this many eps of a base get a contour each. For more, the lattice engine is faster."""
VALUE_ERROR = 1e-12
"""Relative error that is allowed for arithmetic with values of the profile."""
LINE_EPS = 650.0
"""Largest eps of a finite law's profile. The bounds that follow from the profile count larger losses as infinite."""
ASKED_EPS = 600.0
"""Largest eps for which the engines are asked."""


@register
class _Under(Mechanism):
    """A base under one fixed relation, whatever relation it is asked about. Its directions are "remove" and "add".

    If ``either_order``, either value of a replaced record may be the first one, anew for each candidate. An asymmetric
    base is then given the larger of both orders' profiles.
    """

    mechanism: Any
    relation: str = field(metadata={"static": True})
    either_order: bool = field(metadata={"static": True})
    constraints: ClassVar = {}

    def _mixes_orders(self) -> bool:
        return self.either_order and self.relation == "replace_one" and not self.mechanism.symmetric()

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if self._mixes_orders():
            return in_either_order(self.mechanism, self.relation)
        return self.mechanism.expand(self.relation, direction)

    def symmetric(self) -> bool:
        return self._mixes_orders() or self.mechanism.symmetric()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        # The larger profile may belong to no two data sets. A selection uses all of it, so the answer is only a bound.
        return "bound" if self._mixes_orders() else self.mechanism.kind_under(self.relation, composed)


def under(run: Mechanism, relation: str, either_order: bool = True) -> tuple[Mechanism, str]:
    """Return (base, relation) with the same guarantee, for a relation add_one, remove_one or add_or_remove_one."""
    if not add_and_remove(run, relation):
        return _Under(run, relation, either_order), "add_or_remove_one"
    return run, "add_or_remove_one" if relation == "zero_out" else relation


class Sides(NamedTuple):
    """One direction of a base and its reverse direction, each given as the relation to pass to an engine."""

    forward: str  # relation under which an engine computes the direction itself
    reverse: str  # relation under which an engine computes the reverse direction

    @property
    def direction(self) -> str:
        return "add" if self.forward == "add_one" else "remove"

    @property
    def opposite(self) -> str:
        return "remove" if self.forward == "add_one" else "add"


def sides(run: Mechanism, relation: str) -> tuple[Sides, ...]:
    """Return those directions of a relation that need a bound of their own. For a symmetric base one is enough."""
    if relation in REVERSED or run.symmetric():
        return (Sides(relation, REVERSED.get(relation, relation)),)
    return (Sides("remove_one", "add_one"), Sides("add_one", "remove_one"))


def delta_ends(run: Mechanism, at: np.ndarray, relation: str, rtol: float = 1e-4) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds of a base's delta at the eps `at`, which may be of either sign."""
    return _ends("delta", run, np.asarray(at, np.float64), relation, rtol)


def upper_delta(run: Mechanism, at: np.ndarray, relation: str, rtol: float = 1e-4) -> np.ndarray:
    """Return only the upper bounds of delta that `delta_ends` returns."""
    return delta_ends(run, at, relation, rtol)[1]


def epsilon_ends(
    run: Mechanism, target: np.ndarray, relation: str, rtol: float = 1e-4
) -> tuple[np.ndarray, np.ndarray]:
    """Return (lower, upper) bounds of a base's epsilon at the deltas `target`; upper is inf if delta < LEAST_DELTA."""
    at, target = np.clip(target, LEAST_DELTA, 1.0 - ROUNDOFF), np.asarray(target)
    low, high = _ends("epsilon", run, at, relation, rtol)
    high = np.where(target >= LEAST_DELTA, high, np.inf)
    return np.where(target >= 1.0, 0.0, low), np.where(target >= 1.0, 0.0, high)


def _ends(quantity: str, run: Mechanism, at: np.ndarray, relation: str, rtol: float) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of a base's delta at eps, or epsilon at delta. Those of one configuration at few `at` are kept."""
    if batch_shape(run) or at.size > 1024:  # more would take too much memory
        return _asked(quantity, run, at, relation, rtol)
    return _asked_once(quantity, run, at.tobytes(), at.shape, relation, rtol, backend.on_numpy(1))


@functools.lru_cache(256)
def _asked_once(
    quantity: str, run: Mechanism, at: bytes, shape: tuple[int, ...], relation: str, rtol: float, plain: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return `_asked`. A search over laws of K asks the same of its base for each law. `plain`: whether by NumPy."""
    return _asked(quantity, run, np.frombuffer(at).reshape(shape), relation, rtol)


def _asked(quantity: str, run: Mechanism, at: np.ndarray, relation: str, rtol: float) -> tuple[np.ndarray, np.ndarray]:
    if quantity == "epsilon":
        found = epsilon(run, at, relation=relation, rtol=rtol)
    else:
        found = profile(run, relation).delta(at) if np.any(at < 0.0) else delta(run, at, relation=relation, rtol=rtol)
    return np.asarray(found.lower), np.asarray(found.upper)


def upper_epsilon(run: Mechanism, target: np.ndarray, relation: str, rtol: float = 1e-4) -> np.ndarray:
    """Return only the upper bounds of epsilon that `epsilon_ends` returns."""
    return epsilon_ends(run, target, relation, rtol)[1]


def sum_of_atoms(loss: np.ndarray, mass: np.ndarray, infinite: Any, at: np.ndarray, side: float) -> np.ndarray:
    """Return delta `infinite + sum_i mass_i (1 - e^{at - loss_i})_+`, rounded up if `side` is 1, down if it is -1."""
    eps = np.asarray(at)[..., None]
    # 2^-50 is eight roundoffs, the allowed rounding error of `eps - loss`
    below = eps - loss - side * 2.0**-50 * (np.abs(loss) + np.abs(eps))
    with np.errstate(over="ignore"):
        total = np.sum(mass * np.maximum(-np.expm1(np.minimum(below, 0.0)), 0.0), axis=-1)
    return np.minimum((total + infinite) * (1.0 + side * 1e-12), 1.0)


def meet(one: Any, other: Any, most: float) -> np.ndarray:
    """Return the intersection of two brackets, (2, *shape), or (0, most) where they are disjoint. A NaN is ignored."""
    low, high = np.fmax(np.fmax(one[0], other[0]), 0.0), np.fmin(np.fmin(one[1], other[1]), most)
    agree = low <= high
    return np.stack([np.where(agree, low, 0.0), np.where(agree, high, most)])


def each_pair(
    run: Mechanism, law: Law, shape: tuple[int, ...], asked: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, Mechanism, Law]]:
    """Yield (places, base, law) for each pair of base and law: where the flat `shape` has this pair and is `asked`."""
    mine = batch_shape(run)
    pairs = np.broadcast_shapes(mine, law.shape)
    number = np.broadcast_to(np.arange(int(np.prod(pairs))).reshape(pairs), shape).reshape(-1)
    if asked is not None:
        number = np.where(np.broadcast_to(asked, shape).reshape(-1), number, -1)
    for count, index in enumerate(np.ndindex(pairs)):
        if (here := np.flatnonzero(number == count)).size:
            base = element(run, _inside(mine, index)) if mine else run
            yield here, base, law.element(_inside(law.shape, index)) if law.shape else law


def _inside(own: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index, in an array of shape `own`, of the element that is at `index` after the array is broadcast."""
    return tuple(i if n > 1 else 0 for i, n in zip(index[len(index) - len(own) :], own, strict=True))


def infinite_mass(run: Mechanism, relation: str) -> np.ndarray:
    """Return each base's mass at infinity, in the batch's shape. The largest of the relation's directions is taken."""
    named = [direction for direction, one in _RELATION_OF.items() if relation in (one, "add_or_remove_one")]
    each = [components(run, "add_or_remove_one", direction).delta_infinity for direction in named]
    return np.max(each, axis=0).reshape(batch_shape(run))


def bounded_loss(parts: Components) -> np.ndarray:
    """Return whether the finite losses of each configuration are bounded, (B,)."""
    return ~((parts.mu > 0.0) | np.any(parts.gauss_n > 0.0, axis=1))


def gaussian_mu(run: Mechanism) -> np.ndarray | None:
    """Return mu of every configuration, (B,), if all are compositions of unsampled Gaussians. Otherwise return None."""
    parts = components(run, "add_or_remove_one", "remove")
    if any(np.any(n > 0) for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)):
        return None
    return None if np.any(parts.mu == 0.0) or np.any(parts.delta_infinity > 0.0) else parts.mu


def finite_once(parts: Components) -> bool:
    """Return whether the base is one finite law that is run once. The curve of such a base has a knot for each atom."""
    others = (parts.mu > 0.0).any() or (parts.gauss_n > 0.0).any() or (parts.laplace_n > 0.0).any()
    return not others and parts.finite_n.shape[1] == 1 and bool((parts.finite_n == 1.0).all())


class Curve(NamedTuple):
    """Bounds of the trade-off curve of one direction of a base: a polygon above and one below, of CELLS cells each."""

    above: Outer
    below: Inner


class Profile(NamedTuple):
    """Lower and upper bounds, (2, n), of one base's delta at n eps >= 0. Row 0 is for removing, row 1 for adding."""

    eps: np.ndarray  # (n,), ascending from 0
    low: np.ndarray
    high: np.ndarray

    def joined(self, direction: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (e^eps, lower, upper): bounds of delta in one direction at ascending e^eps, for eps of both signs."""
        turn = slice(None, None, 1 if direction == "remove" else -1)
        eps, low, high = self.eps, self.low[turn], self.high[turn]
        shrink = np.exp(-eps)
        # bounds of delta(-eps), which is 1 - e^-eps + e^-eps times the delta(eps) of the reverse direction
        reverse = [-np.expm1(-eps) + shrink * end for end in (low[1], high[1])]
        keep = eps > 0.0
        ratio = np.concatenate([shrink[keep][::-1], np.exp(eps)])
        lower = np.concatenate([reverse[0][keep][::-1], low[0]]) * (1.0 - VALUE_ERROR)
        upper = np.concatenate([reverse[1][keep][::-1], high[0]]) * (1.0 + VALUE_ERROR)
        # As a function of e^eps, delta is convex and falls at a rate of at most 1. So beyond a point delta falls no
        # faster than along the chord that ends at this point; `steepest` bounds the rate. Hence the rounding of e^eps
        # changes delta by at most `moved`.
        steepest = np.append(1.0, np.minimum(upper[:-1] / np.diff(ratio), 1.0))
        moved = 4.0 * ROUNDOFF * (1.0 + np.abs(np.log(ratio))) * ratio * steepest
        lower, upper = lower - moved, upper + moved
        return ratio, np.maximum(lower, np.maximum(1.0 - ratio, 0.0)), np.minimum(upper, 1.0)


class Base(NamedTuple):
    """One configuration of a base: its profile, and the curve of each direction."""

    profile: Profile
    curves: dict[str, Curve]


def bases(run: Mechanism, coarse: bool = False) -> list[Base]:
    """Return the Base of each configuration. If `coarse`, profiles and curves are made from half as many points."""
    size, parts = math.prod(batch_shape(run)), _both(run)
    # Gaussian bases share calls, which saves time. Any other base gets a call of its own, because a shared call may
    # change the last bits of its profile.
    together = not any(np.any(part.laplace_n > 0.0) or np.any(part.finite_n > 0.0) for part in parts)
    if batch_shape(run) and not (together and size):
        return [_bases(element(run, index), coarse)[0] for index in np.ndindex(batch_shape(run))]
    found: list[Base] = []
    for first in range(0, size, TOGETHER):
        rows = np.arange(first, min(first + TOGETHER, size))
        found += _bases(_rows(run, rows), coarse)
    return found


def _both(run: Mechanism) -> list[Components]:
    return [components(run, "add_or_remove_one", direction) for direction in DIRECTIONS]


def _rows(run: Mechanism, rows: np.ndarray) -> Mechanism:
    """Return the configurations at the indices `rows` of a batch. A mechanism without a batch is returned unchanged."""
    return take_rows(run, rows) if batch_shape(run) else run


def _bases(run: Mechanism, coarse: bool) -> list[Base]:
    """Return the Base of each configuration. The caller passes a batch only if all parts of `run` are Gaussian."""
    found, parts = [], _both(run)
    finite = all(map(finite_once, parts))
    inside = [_by_atoms(part) if finite else None for part in parts]
    for each in [_by_sum(parts)] if finite else _by_engine(run, parts, coarse):
        # at some parameters, such as a sampling probability of 1, both directions have equal bounds and share a curve
        equal = all(np.array_equal(*ends) for ends in (each.low, each.high))
        alike = run.symmetric() or (equal and inside[0] is None)
        remove = _curve(*each.joined("remove"), inside[0])
        found.append(Base(each, {"remove": remove, "add": remove if alike else _curve(*each.joined("add"), inside[1])}))
    return found


def _by_engine(run: Mechanism, parts: list[Components], coarse: bool) -> list[Profile]:
    """Return the profile of each configuration, computed by engines up to the eps that LAST_DELTA determines."""
    names = ["add_or_remove_one"] * 2 if run.symmetric() else ["remove_one", "add_one"]
    infinite = np.max([part.delta_infinity for part in parts], axis=0)
    level, size = LAST_DELTA + 1.001 * infinite, infinite.size
    with backend.job(1, apart=True):  # for a batch of any size, NumPy or XLA is chosen as for a single base
        lasts = {name: _last(run, level, name) for name in dict.fromkeys(names)}
        first, at_most = (pick(list(lasts.values()), axis=0) for pick in (np.min, np.max))
        beyond = first == ASKED_EPS
        for name in lasts:
            due = np.flatnonzero(beyond)
            if due.size:
                half = epsilon(_rows(run, due), np.full(due.size, 0.5), relation=name, rtol=PROFILE_RTOL)
                beyond[due] = half.lower > ASKED_EPS
        probe = delta(run, 0.5 * at_most, relation=names[0], rtol=PROFILE_RTOL)
        engines = np.broadcast_to(probe.engine, (size,))
        # the contour engine is asked by name: with "auto" the slower lattice engine would narrow the wide brackets
        by_contour = (engines == "contour") & np.all([contour.reach(part).answers for part in parts], axis=0)
        shared = by_contour & np.equal(probe.kind, "certified")
        at = [_places(*ends, coarse) for ends in zip(first, at_most, engines, strict=True)]
        known: dict[str, list[np.ndarray]] = {}
        for part, (name, last) in zip(parts, lasts.items(), strict=False):
            within = [np.zeros(0) if far else eps[eps <= end] for eps, end, far in zip(at, last, beyond, strict=True)]
            known[name] = _bounds_at(run, part, name, within, by_contour, shared, engines == "lattice")
            for row, (eps, ends) in enumerate(zip(within, known[name], strict=True)):
                # `last` is an upper bound of the epsilon at delta = `level`, so delta(last) is at most `level`
                if eps.size and eps[-1] == last[row] < ASKED_EPS:
                    ends[1, -1] = min(ends[1, -1], level[row])
    # if half of the mass has losses above ASKED_EPS, the bounds are 0 and 1; `profile_ends.by_base` gives better ones
    nothing = Profile(np.array([0.0, 0.5 * ASKED_EPS, ASKED_EPS]), np.zeros((2, 3)), np.ones((2, 3)))
    whole = lambda row: np.stack([_filled(known[name][row], at[row].size) for name in names], axis=1)
    return [nothing if beyond[row] else Profile(at[row], *whole(row)) for row in range(size)]


def _bounds_at(
    run: Mechanism,
    part: Components,
    relation: str,
    places: list[np.ndarray],
    by_contour: np.ndarray,  # (B,), whether the contour engine is asked about the base
    shared: np.ndarray,  # (B,), whether neighbouring eps share a contour. Wide brackets are computed again
    by_lattice: np.ndarray,  # (B,), whether the lattice engine is asked about the base
) -> list[np.ndarray]:
    """Return, for each base, lower and upper bounds of delta at the eps that `places` lists for it."""
    sizes, eps = np.array([each.size for each in places]), np.concatenate(places)
    row = np.repeat(np.arange(sizes.size), sizes)
    ends, due = np.stack([np.zeros(eps.size), np.ones(eps.size)]), np.ones(eps.size, bool)
    some, open_ = np.flatnonzero(shared & (sizes > 0)), np.zeros(sizes.size)
    for index, found in zip(some, _on_few_contours(part.take(some), [places[index] for index in some]), strict=True):
        wide = found[1] - found[0] > CONTOUR_WIDTH * found[1]
        open_[index] = wide.sum()
        # Most lower bounds of 0 stay 0, so only every eighth of these eps is asked about again.
        nothing = wide & (found[0] == 0.0)
        ends[:, row == index] = found
        due[row == index] = wide & ~nothing | nothing & (np.cumsum(nothing) % 8 == 1)

    by_lattice = by_lattice | (open_ > FEW)
    named = by_contour | by_lattice
    for engine, those in (("contour", by_contour & ~by_lattice), ("lattice", by_lattice), ("auto", ~named)):
        asked = np.flatnonzero(due & those[row])
        if asked.size:
            # a lattice hides small finite losses behind a mass at infinity, unless its brackets are narrower
            rtol = 0.1 * PROFILE_RTOL if engine == "lattice" and np.any(part.delta_infinity) else PROFILE_RTOL
            rest = delta(_rows(run, row[asked]), eps[asked], relation=relation, engine=engine, rtol=rtol)
            ends[:, asked] = np.maximum(ends[0, asked], rest.lower), np.minimum(ends[1, asked], rest.upper)
    return np.split(ends, np.cumsum(sizes)[:-1], axis=1)


def _places(first: float, last: float, engine: str, coarse: bool) -> np.ndarray:
    """Return eps from 0 to `last`. The profile of one direction ends at `first`, the other's at `last` >= `first`."""
    count = EPS_POINTS.get(engine, EPS_POINTS["lattice"]) // (2 if coarse else 1)
    early = round(count * max(first / last, 0.5))
    return np.concatenate([np.linspace(0.0, first, early), np.linspace(first, last, count - early + 1)[1:]])


def _filled(ends: np.ndarray, count: int) -> np.ndarray:
    """Extend bounds of delta at ascending eps to (2, count): lower bounds by 0, upper bounds by the last."""
    behind = np.zeros(count - ends.shape[1])
    # delta does not rise with eps, so an upper bound holds at every larger eps, and a lower bound at every smaller one
    low, high = np.maximum.accumulate(ends[0][::-1])[::-1], np.minimum.accumulate(ends[1])
    return np.stack([np.append(low, behind), np.append(high, behind + high[-1])])


def _on_few_contours(parts: Components, eps: list[np.ndarray]) -> list[np.ndarray]:
    """Return bounds of delta at each row's ascending eps, by at most CONTOURS contours. A failed one gives 0 and 1."""
    if not eps:
        return []
    blocks = [-(-each.size // CONTOURS) for each in eps]
    cut = [np.append(x, np.full(-x.size % n, x[-1])).reshape(-1, n) for x, n in zip(eps, blocks, strict=True)]
    places = np.concatenate([np.pad(x, ((0, 0), (0, max(blocks) - x.shape[1])), mode="edge") for x in cut])
    rows = parts.take(np.repeat(np.arange(len(cut)), [len(x) for x in cut]))
    found = delta_about(rows, places, np.zeros(places.shape), CONTOUR_WIDTH, contour.TOLERANCE)
    infinite = rows.delta_infinity[:, None], rows.infinity_units[:, None]
    ends = np.stack(with_infinite_mass(found.lower, found.upper, *infinite))
    each = np.split(ends, np.cumsum([len(x) for x in cut])[:-1], axis=1)
    return [x[:, :, :n].reshape(2, -1)[:, : at.size] for x, n, at in zip(each, blocks, eps, strict=True)]


def _last(run: Mechanism, level: np.ndarray, relation: str) -> np.ndarray:
    """Return an upper bound of the epsilon at delta = `level`, clipped to the interval from 1e-9 to ASKED_EPS."""
    found = epsilon(run, np.minimum(level, 1.0 - ROUNDOFF), relation=relation, rtol=PROFILE_RTOL).upper
    return np.fmin(np.maximum(found, 1e-9), ASKED_EPS)  # fmin returns ASKED_EPS where the engines failed (NaN)


def _by_sum(parts: list[Components]) -> Profile:
    """Return the profile of a base whose directions are finite laws, at the sizes |loss| of the losses of both laws."""
    losses = np.concatenate([np.abs(part.finite_loss[0, 0][part.finite_mass[0, 0] > 0.0]) for part in parts])
    at = np.unique(np.concatenate([[0.0], losses]))
    at = at[np.concatenate([[True], np.diff(at) > 1e-12])]
    # beyond the last atom delta is the mass at infinity, so one eps beyond that atom is enough
    at = np.append(at, at[-1] + 50.0) if at[-1] < LINE_EPS - 50.0 else np.append(at[at < LINE_EPS], LINE_EPS)
    laws = [(part.finite_loss[0, 0], part.finite_mass[0, 0], part.delta_infinity[0]) for part in parts]
    low, high = (np.stack([sum_of_atoms(*law, at, side) for law in laws]) for side in (-1.0, 1.0))
    return Profile(at, low, high)


def _by_atoms(part: Components) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots (Q-mass, P-mass) of a finite law's trade-off curve, rounded so that none lies above it."""
    order = np.argsort(-part.finite_loss[0, 0], kind="stable")
    loss, mass = part.finite_loss[0, 0][order], part.finite_mass[0, 0][order]
    loss, mass = loss[mass > 0.0], mass[mass > 0.0]
    with np.errstate(over="ignore"):
        # a Q-mass that underflows is replaced by 1e-290: a knot with a larger Q-mass still lies below the curve
        u = np.cumsum(np.maximum(mass * np.exp(-loss), 1e-290))
    u = np.minimum(u * (1.0 + VALUE_ERROR), 1.0)
    t = (np.cumsum(mass) + part.delta_infinity[0]) * (1.0 - VALUE_ERROR)
    u, t = np.concatenate([[0.0], u, [1.0]]), np.concatenate([part.delta_infinity * (1.0 - VALUE_ERROR), t, [1.0]])
    chain = upper_hull(u, t)
    return u[chain], t[chain]


def _curve(ratio: np.ndarray, low: np.ndarray, high: np.ndarray, inside: tuple[np.ndarray, np.ndarray] | None) -> Curve:
    """Return polygons above and below one direction's curve. `inside` holds the knots of the one below, if known."""
    slopes, u, t = outer(ratio, high)
    below_u, below_t = inner(ratio, low, high) if inside is None else inside
    cell, place_u, place_t = _cut(u, t)
    _, inside_u, inside_t = _cut(below_u, below_t)
    twin = np.searchsorted(inside_u, place_u)
    return Curve(Outer(slopes[cell], place_u, place_t, twin), Inner(inside_u, inside_t))


def outer(ratio: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (slopes, Q-masses, P-masses) of a polygon above T, the minimum of lines r u + d with d >= delta(log r)."""
    # every line is above T, so the minimum of some of the lines, those in `keep`, is above T too
    keep = np.linspace(0, ratio.size - 1, min(ratio.size, CELLS - 1)).round().astype(int)
    r, d = np.concatenate([[0.0], ratio[keep]])[::-1], np.concatenate([[1.0], upper[keep]])[::-1]
    return _envelope(r, np.minimum(d, 1.0), 1.0 + 4.0 * ROUNDOFF)


def inner(ratio: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots (Q-mass, P-mass) of a polygon below the curve T, from bounds of delta at e^eps = `ratio`."""
    # wide brackets of delta are left out, since they would make the polygon lower
    ratio, lower, upper = (x[lower >= 0.5 * upper] for x in (ratio, lower, upper))
    lower = np.maximum(lower, 1.0 - ratio)
    # The point r = 0 is put first. There delta is 1, and its slope is at least -1, because delta(r) >= 1 - r.
    r = np.concatenate([[0.0], ratio])
    low, high = np.concatenate([[1.0], lower]), np.concatenate([[1.0], upper])
    # After each r the slope of delta is at least `fall`, and before each r it is at most `rise`. After the last r no
    # chord is known, but delta does not rise there, so the last `rise` is 0.
    fall = np.concatenate([[-1.0], (low[1:] - high[:-1]) / np.diff(r)])
    rise = np.minimum(np.concatenate([(high[1:] - low[:-1]) / np.diff(r), [0.0]]), 0.0)
    a, b = slice(None, -1), slice(1, None)
    # Between r_k and r_{k+1} delta lies above the lines low_k + fall_k (r - r_k) and
    # low_{k+1} + rise_{k+1} (r - r_{k+1}). They intersect at r = `meet`, where their value is `at`.
    steep = rise[b] - fall[a]
    gap = low[b] - low[a] - fall[a] * (r[b] - r[a])
    meet = np.clip(r[b] - np.where(steep > 0.0, gap / np.where(steep > 0.0, steep, 1.0), 0.0), r[a], r[b])
    at = np.maximum(low[a] + fall[a] * (meet - r[a]), low[b] + rise[b] * (meet - r[b]))
    with np.errstate(over="ignore"):
        end = r[-1] - low[-1] / fall[-1] if fall[-1] < 0.0 else 2.0 * r[-1]
    if not end >= 1.0:  # if all slopes are below 1, the general bound T(u) >= u is better than the lines
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    slopes = np.concatenate([r, meet, [min(end, 1e290)]])
    values = np.concatenate([low, at, [0.0]])
    order = np.lexsort((-values, slopes))[::-1]
    _, u, t = _envelope(slopes[order], values[order], 1.0 - 1e-13)
    return u, t


def _envelope(r: np.ndarray, d: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return slopes and knots (u, T) of `T = min_k (d_k + r_k u)`, r falling to 0; T is rounded up if rounding > 1."""
    kept = (r.size - 1 - upper_hull(r[::-1], -d[::-1]))[::-1]
    # lines steeper than the line of the smallest d are nowhere lower than it, so they are dropped
    kept = kept[kept.size - 1 - np.argmin(d[kept][::-1]) :]
    r, d = r[kept], d[kept]
    u = np.concatenate([[0.0], np.diff(d) / -np.diff(r), [1.0]])
    u = np.minimum(np.maximum.accumulate(u), 1.0)
    left, right = d[:-1] + r[:-1] * u[1:-1], d[1:] + r[1:] * u[1:-1]
    between = np.maximum(left, right) * rounding if rounding > 1.0 else np.minimum(left, right) * rounding
    t = np.concatenate([[d[0]], between, [1.0]])
    return r, u, np.minimum(np.maximum.accumulate(t), 1.0)


def upper_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the indices of the points on the upper convex hull of the points (x, y), by ascending x."""
    kept = np.lexsort((y, x))  # of points with equal x the last is the highest
    kept = kept[np.append(x[kept[1:]] != x[kept[:-1]], True)] if kept.size else kept
    quiet, parity = 0, 0
    while quiet < 2 and kept.size > 2:
        along, up = np.diff(x[kept]), np.diff(y[kept])
        below = ~(up[:-1] * along[1:] > up[1:] * along[:-1])
        below[parity::2] = False
        quiet = 0 if below.any() else quiet + 1
        parity = 1 - parity
        kept = kept[np.concatenate([[True], ~below, [True]])]
    return kept


def _cut(u: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (cell, u, t). The polygon (u, t) has CELLS cells. New cell i begins in the given cell `cell[i]`."""
    if u.size - 1 > CELLS:
        keep = np.linspace(0, u.size - 1, CELLS + 1).round().astype(int)
        return keep[:-1], u[keep], t[keep]
    # a cell over which the odds of t change much is divided into more pieces. These cells lie near t = 0 and t = 1
    spread = np.abs(np.diff(np.log(t + 1e-7))) + np.abs(np.diff(np.log1p(1e-4 - t))) + 1e-9
    pieces = 1 + np.floor((CELLS - (u.size - 1)) * spread / spread.sum()).astype(int)
    pieces[np.argmax(spread)] += CELLS - pieces.sum()
    cell = np.repeat(np.arange(u.size - 1), pieces)
    share = (np.arange(CELLS) - np.repeat(np.cumsum(pieces) - pieces, pieces)) / pieces[cell]
    cut_u, cut_t = u[cell] + share * np.diff(u)[cell], t[cell] + share * np.diff(t)[cell]
    return cell, np.append(cut_u, 1.0), np.append(np.minimum(cut_t, 1.0), 1.0)


def candidates_profile(
    candidates: Sequence[Mechanism],
    epsilon: ArrayLike,
    weights: ArrayLike | None = None,
    relation: str = "add_or_remove_one",
) -> PrivacyProfile:
    """Return one guarantee for candidates drawn at random: a mechanism whose profile is given at `epsilon`.

    Without weights the guarantee is the pointwise maximum of the candidates' profiles.  It holds for every rule of
    drawing that does not depend on the data.  With weights the guarantee is `sum_j w_j delta_j(eps)`, and holds even if
    the index of the drawn candidate is released.  Under ``replace_one`` each delta_j is the larger one of both orders
    of a record's values.

    Parameters
    ----------
    candidates : sequence of Mechanism
        One configuration each.
    epsilon : array_like, shape (G,)
        Values >= 0, ascending by 1e-9 or more.
    weights : array_like, optional
        The probabilities with which the candidates are drawn.  They sum to 1.
    relation : {"add_or_remove_one", "replace_one", "zero_out"}

    Returns
    -------
    PrivacyProfile

    References
    ----------
    Koskela and Kulkarni (2023), Lemma 1 (for Rényi divergences); README.md of this folder, "Candidates that differ in
    their privacy".

    >>> import jaxacct as ja
    >>> two = [ja.Gaussian(2.0), ja.Gaussian(4.0)]
    >>> worst, mixed = candidates_profile(two, [0.0, 1.0]), candidates_profile(two, [0.0, 1.0], [0.5, 0.5])
    >>> bool(worst.delta[1] >= 1.9 * mixed.delta[1])
    True
    """
    if not candidates:
        raise InputError("candidates is empty; give at least one mechanism")
    for index, one in enumerate(candidates):
        require_mechanism(f"candidates[{index}]", one)
        if batch_shape(one):
            raise InputError(
                f"candidates[{index}] is a batch of shape {batch_shape(one)}; give its elements one by one"
            )
    grid = np.atleast_1d(check("epsilon", epsilon, NON_NEGATIVE))
    choice("relation", relation, RELATIONS)
    if relation in ("add_one", "remove_one"):
        raise InputError(f"relation = {relation!r} has one direction; use 'add_or_remove_one' or 'replace_one'")
    runs = [under(one, relation)[0] for one in candidates]
    each = np.array([[upper_delta(run, grid, way, PROFILE_RTOL) for way in _RELATION_OF.values()] for run in runs])
    if weights is None:
        return PrivacyProfile(grid, *np.max(each, axis=0))
    share = np.atleast_1d(check("weights", weights, PROBABILITY))
    if share.shape != (len(candidates),) or abs(float(np.sum(share)) - 1.0) > 1e-12:
        raise InputError(f"weights must be {len(candidates)} numbers that sum to 1; give the probabilities of drawing")
    return PrivacyProfile(grid, *np.minimum(np.tensordot(share, each, axes=1) * (1.0 + 1e-12), 1.0))
