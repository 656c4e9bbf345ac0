"""Several releases from one sample. Sampling acts on two pairs, above and below the releases' composition.

The two pairs are the ends of the composition's bracketed profile (README.md, "Several releases from one sample").
"""

from __future__ import annotations

import functools
import importlib
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import UnboundedLossError
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.base import (
    FinitePair,
    FinitePart,
    Mechanism,
    batch_shape,
    element,
    rows_in,
)
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.mechanisms.gaussian_mixtures import replaced_gaussian
from jaxacct.mechanisms.loss_components import exact_product
from jaxacct.mechanisms.profile import (
    LEAST_GAP,
    BracketedProfile,
    direction_of,
    pair_above,
    pair_below,
    pair_of_profile,
    spaced,
    stacked,
    stacked_parts,
)

POINTS = 480
"""Largest number of intervals of a profile. If n divides it, intervals end where n equal releases' profile may bend."""
BEYOND = 1e5
"""Largest loss at which a profile is bracketed; delta at this loss counts as the mass at infinity."""
KEPT = 256


class Several(NamedTuple):
    """Several releases from one sample."""

    base: Mechanism  # the composition of the releases, without the sampling
    rate: np.ndarray
    relations: dict[str, str]  # for each direction of the sample ("remove", "add"), the relation of the releases


@functools.lru_cache(maxsize=KEPT)
def one_gaussian(mechanism: Mechanism) -> tuple[Gaussian, Gaussian] | None:
    """Return the Gaussian equal to a composition of Gaussians, as (noise rounded down, noise rounded up). Else None."""
    parts = mechanism.gaussians()
    if parts is None:
        return None
    shape = batch_shape(mechanism)
    counted = ((z, functools.reduce(exact_product, map(np.asarray, counts), np.asarray(1.0))) for z, counts in parts)
    columns = [[np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1) for x in part] for part in counted]
    rows = [_noise_of_all([(float(z[row]), int(n[row])) for z, n in columns]) for row in range(math.prod(shape))]
    down, up = (ends.reshape(shape)[()] for ends in np.array(rows).reshape(-1, 2).T)
    return Gaussian(down), Gaussian(up)


def _noise_of_all(parts: list[tuple[float, int]]) -> tuple[float, float]:
    """Given (z, n), n releases at noise multiplier z each, return (sum n/z^2)^{-1/2} rounded down and rounded up."""
    least = min(z for z, _ in parts)
    bits = 200 + 2 * math.frexp(least)[1]
    unit, low, high = Fraction(2) ** bits, 0, 0
    for z, n in parts:
        term = n * unit / Fraction(z) ** 2
        low, high = low + math.floor(term), high + math.ceil(term)
    rough = least / math.sqrt(math.fsum(n * (least / z) ** 2 for z, n in parts))
    down = up = rough
    while Fraction(down) ** 2 * high > unit:
        down = math.nextafter(down, 0.0)
    while Fraction(math.nextafter(down, math.inf)) ** 2 * high <= unit:
        down = math.nextafter(down, math.inf)
    while Fraction(up) ** 2 * low < unit:
        up = math.nextafter(up, math.inf)
    while Fraction(math.nextafter(up, 0.0)) ** 2 * low >= unit:
        up = math.nextafter(up, 0.0)
    return down, up


def pair_of_releases(base: Mechanism, under: str) -> FinitePair:
    """Return the pair that dominates the composition of all releases, for every configuration of the base."""
    shape = batch_shape(base)
    return stacked([_above(one, under) for one in _elements(base, shape)], shape)


def part_below_sampled(
    base: Mechanism, rate: np.ndarray, shape: tuple[int, ...], under: str, direction: str
) -> FinitePart:
    """Return the loss law of a pair that the sampled releases dominate, for every configuration."""
    rates = np.broadcast_to(rate, shape).reshape(-1)
    laws = []
    for row, one in enumerate(_elements(base, shape)):
        pair, g = _below(one, under), rates[row]
        mixed = pair._replace(loss=log_mixture(pair.loss, g), p=(1.0 - g) * pair.q + g * pair.p)
        laws.append(direction_of(mixed, direction))
    return stacked_parts(laws, shape)


def replaced_pair(base: Mechanism, rate: np.ndarray, shape: tuple[int, ...]) -> FinitePair:
    """Return a pair that dominates the releases from a Poisson sample if a record is replaced."""
    rates = np.broadcast_to(rate, shape).reshape(-1).tolist()
    return stacked([_replaced(one, q) for one, q in zip(_elements(base, shape), rates, strict=True)], shape)


@functools.lru_cache(maxsize=KEPT)
def _replaced(base: Mechanism, q: float) -> FinitePair:
    """Return `replaced_pair` of one configuration. Its delta is the smaller of two upper bounds."""
    if q == 0.0:
        return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
    if isinstance(base, Gaussian):
        return replaced_gaussian(q, 1.0 / base.noise_multiplier)
    grid = _losses(base, "replace_one")
    grid = grid[grid < 600.0]  # e^loss must not overflow
    replaced, removed = (_ask(base, grid, relation).upper for relation in ("replace_one", "remove_one"))
    added = removed if base.symmetric() else _ask(base, grid, "add_one").upper
    eps = np.minimum(log_mixture(grid, np.asarray(q)) * (1.0 + 32.0 * ROUNDOFF), grid)
    share = np.exp(eps - grid)
    whole = q * ((1.0 - share) * removed + share * replaced)
    whole *= 1.0 + 64.0 * ROUNDOFF * (1.0 + grid)
    # the second bound is NaN where neighbouring values of e^loss are equal in float64
    delta = np.minimum(np.fmin(whole, _one_after_the_other(grid, removed, added, eps, q)), 1.0)
    keep = np.isin(eps, spaced(eps))
    return pair_of_profile(eps[keep], delta[keep], delta[keep])


def replaced_pair_in_two_steps(base: Mechanism, relation: str) -> FinitePair:
    """Return a pair that dominates a replacement, which counts as a removal followed by an addition."""
    shape = batch_shape(base)
    return stacked([_in_two_steps(one, relation) for one in _elements(base, shape)], shape)


@functools.lru_cache(maxsize=KEPT)
def _in_two_steps(base: Mechanism, relation: str) -> FinitePair:
    once = _losses(base, relation)
    if once[-1] == 0.0:  # all losses are smaller than the grid's steps
        once = np.array([0.0, 10.0 * LEAST_GAP])
    grid = spaced(np.unique(np.concatenate([once, 2.0 * once * (1.0 + 4.0 * ROUNDOFF)])))
    grid = grid[grid < 600.0]  # e^loss must not overflow
    sides = ("remove_one", "add_one") if relation == "add_or_remove_one" else (relation, relation)
    removed, added = (_ask(base, grid, side).upper for side in sides)
    delta = np.minimum(_one_after_the_other(grid, removed, added, grid, 1.0), 1.0)
    # two steps of loss at most L have a loss of at most 2 L
    ends = 2.0 * once[-1] if _ask(base, once[-1], relation).upper == 0.0 else math.inf
    delta = np.where(grid > ends, 0.0, delta)
    return pair_of_profile(grid, delta, delta)


def _one_after_the_other(
    loss: np.ndarray, removed: np.ndarray, added: np.ndarray, eps: np.ndarray, q: float
) -> np.ndarray:
    """Bound delta at `eps` by one record removed, then one added, from the unsampled deltas at `loss` (README.md)."""
    decay = np.exp(-loss[:0:-1])
    at = np.concatenate([decay, np.exp(loss)])
    both_sides = []
    for ahead, back in ((removed, added), (added, removed)):
        value = np.concatenate([(1.0 - decay + decay * back[:0:-1]) * (1.0 + 8.0 * ROUNDOFF) + 4.0 * ROUNDOFF, ahead])
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.concatenate([[0.0], np.abs(np.diff(value) / np.diff(at)), [0.0]])
        # the second term bounds the effect of the rounding of e^loss
        both_sides.append(value + 16.0 * ROUNDOFF * at * np.maximum(slope[1:], slope[:-1]))
    first, value = both_sides
    a = np.exp(eps)[:, None] * (1.0 - 4.0 * ROUNDOFF)
    less = np.expm1(eps)[:, None] * ((1.0 - q) / q) * (1.0 - 16.0 * ROUNDOFF)
    factor = np.maximum(at - less + 8.0 * ROUNDOFF * (at + less), 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        place = a / factor * (1.0 - 8.0 * ROUNDOFF)
    both = first + factor * np.interp(place, at, value, left=1.0)
    return q * np.min(both, axis=1) * (1.0 + 64.0 * ROUNDOFF)


def _elements(base: Mechanism, shape: tuple[int, ...]) -> list[Mechanism]:
    """Return the base's configuration for each element of a batch of this shape."""
    each = [element(base, index) for index in np.ndindex(*batch_shape(base))]
    return [each[row] for row in rows_in(base, shape)]


@functools.lru_cache(maxsize=KEPT)
def _above(base: Mechanism, under: str) -> FinitePair:
    return pair_above(*_profiles(base, under))


@functools.lru_cache(maxsize=KEPT)
def _below(base: Mechanism, under: str) -> FinitePair:
    return pair_below(*_profiles(base, under))


@functools.lru_cache(maxsize=KEPT)
def _profiles(base: Mechanism, under: str) -> tuple[BracketedProfile, BracketedProfile]:
    """Return the bracketed profiles H_a(P || Q) and H_a(Q || P) of one composition, a = e^eps >= 1."""
    epsilon = _losses(base, under)
    sides = ("remove_one", "add_one") if under == "add_or_remove_one" else (under,)
    found = []
    for side in sides:
        delta = _ask(base, epsilon, side)
        found.append(BracketedProfile(epsilon, delta.lower, delta.upper))
    return found[0], found[-1]


def _losses(base: Mechanism, under: str) -> np.ndarray:
    """Return a grid of losses from 0 to where delta is negligible. A largest loss below BEYOND is the last point."""
    infinite = float(_ask(base, np.asarray(BEYOND), under).upper)
    last = float(_epsilon(base, infinite * (1.0 + 1e-9) + 1e-40, under)) if infinite < 1.0 else 0.0
    last = min(last, BEYOND)
    try:
        largest = float(_epsilon(base, 0.0, under))
    except UnboundedLossError:
        largest = math.inf
    if last >= largest * (1.0 - 1e-9):
        last = largest
    count = int(min(POINTS, last / (2.0 * LEAST_GAP)))
    points = np.linspace(0.0, last, count + 1) if count else np.zeros(1)
    return np.append(points, largest) if last < largest < BEYOND else points


def _ask(base: Mechanism, epsilon: np.ndarray, relation: str) -> Any:
    return _accounting().profile_at(base, epsilon, relation=relation, rtol=1e-4)


def _epsilon(base: Mechanism, delta: float, relation: str) -> Any:
    return _accounting().epsilon(base, delta, relation=relation).upper


def _accounting() -> Any:
    """Return `jaxacct.accounting.account`. It is imported only when needed, since it imports this module."""
    return importlib.import_module("jaxacct.accounting.account")
