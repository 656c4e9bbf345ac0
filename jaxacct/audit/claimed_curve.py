"""A claimed trade-off function from its certified upper side: lines above it, and what they say of its inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import POSITIVE, InputError, check_one, shown
from jaxacct.mechanisms import Gaussian, Mechanism, batch_shape
from jaxacct.mechanisms.loss_components import add_and_remove
from jaxacct.representations.mechanism_profile import Profile, profile
from jaxacct.training import Plan

__all__ = ["DOWN", "Inverse", "Lines", "by_gaussian", "by_lines", "claimed_lines", "halved", "words"]

SLOPES = 257
"""Lines of the claimed curve with slope above 1, and as many below; their error is second order in the distance."""
LEAST_DELTA = 1e-15
"""Lines end at the epsilon of this delta; smaller p-values than about this cannot be told from 0."""
FARTHEST_EPSILON = 50.0
"""Where lines end if no epsilon has so small a delta."""
DOWN = 1.0 - 8.0 * ROUNDOFF
"""Factor that rounds a result of a few operations down."""
GAUSSIAN_ERROR = 1e-11
"""Relative allowance for Phi(Phi^-1(y) - mu) by SciPy, whose functions err by about 1e-14."""
Inverse = Callable[[np.ndarray], np.ndarray]
"""y -> a lower bound of inf{x : F(x) >= y}, infinite where y > 1."""


class Lines(NamedTuple):
    """Lines above the claimed curve: Pr[S with the record] <= intercept + slope Pr[S without], for every event S.

    Sorted by slope; only those that are lowest somewhere.  ``breaks`` are the values y between which each is.
    """

    intercept: np.ndarray
    slope: np.ndarray
    breaks: np.ndarray


def claimed_lines(claim: Any, guessed: str) -> Lines:
    """Lines above the claimed curve: of both directions, or of removing alone for guesses "in".

    A line with slope e^x >= 1 is what (x, delta(x))-DP of this direction says.  One with slope e^-x < 1 is what it says
    of the reverse direction and of the complement of the event.
    """
    relation = "add_or_remove_one" if guessed == "both" else "remove_one"
    if isinstance(claim, Plan):
        one = profile(claim.mechanism, claim.relation)
    elif isinstance(claim, Profile):
        one = claim
    elif isinstance(claim, Mechanism):
        one = profile(claim)
    else:
        one = profile(
            Gaussian(1.0 / check_one("claim", claim, POSITIVE, "give a Plan, a mechanism, a Profile or a mu"))
        )
    if batch_shape(one.mechanism) != ():
        raise InputError("claim is a batch of mechanisms; test one claim at a time")
    if not add_and_remove(one.mechanism, one.relation):
        relation = one.relation
    reverse = "add_one" if relation == "remove_one" else relation
    settings = {name: getattr(one, name) for name in ("engine", "rtol", "memory_bytes", "backend")}
    steep, steep_delta = _deltas(profile(one.mechanism, relation, **settings))
    flat, flat_delta = (
        (steep, steep_delta) if reverse == relation else _deltas(profile(one.mechanism, reverse, **settings))
    )
    slope = np.concatenate([np.exp(-flat[::-1]), np.exp(steep)])
    above = np.concatenate([1.0 - np.exp(-flat[::-1]) * (1.0 - flat_delta[::-1]), steep_delta])
    return _lowest(above + 4.0 * ROUNDOFF * np.maximum(above, slope < 1.0), slope)


def _deltas(side: Profile) -> tuple[np.ndarray, np.ndarray]:
    farthest = float(np.asarray(side.epsilon(LEAST_DELTA).upper))
    epsilon = np.linspace(0.0, min(farthest, FARTHEST_EPSILON) if np.isfinite(farthest) else FARTHEST_EPSILON, SLOPES)
    return epsilon, np.asarray(side.delta(epsilon).upper)


def _lowest(intercept: np.ndarray, slope: np.ndarray) -> Lines:
    """The lines that are lowest somewhere, which are those of which (y - intercept)/slope is largest for some y."""
    order = np.lexsort((intercept, -slope))
    kept: list[int] = []
    breaks: list[float] = []
    for k in order:
        while kept:
            last = kept[-1]
            if slope[k] >= slope[last]:
                break  # as steep and not lower
            # (y - a)/s = (y - b)/t at y = (a/s - b/t)/(1/s - 1/t), the new line with t < s above it from there on
            meet = (intercept[k] * slope[last] - intercept[last] * slope[k]) / (slope[last] - slope[k])
            if len(breaks) and meet <= breaks[-1]:
                kept.pop(), breaks.pop()
                continue
            breaks.append(float(meet))
            kept.append(int(k))
            break
        else:
            kept.append(int(k))
    return Lines(intercept[kept], slope[kept], np.asarray(breaks))


def by_lines(lines: Lines) -> Inverse:
    """Every line gives a lower bound, so that rounding may choose any of them."""

    def inverse(y: np.ndarray) -> np.ndarray:
        best = np.searchsorted(lines.breaks, y)
        x = DOWN * (y - lines.intercept[best]) / lines.slope[best]
        return np.where(y > 1.0, np.inf, np.maximum(x, 0.0))

    return inverse


def by_gaussian(mu: np.ndarray) -> Inverse:
    """Of mu-Gaussian DP in closed form, rounded down; mu broadcasts with y."""
    from scipy.special import ndtr, ndtri

    def inverse(y: np.ndarray) -> np.ndarray:
        x = (1.0 - GAUSSIAN_ERROR) * ndtr(ndtri(np.minimum(y, 1.0)) - mu)
        return np.where(y > 1.0, np.inf, np.minimum(x, y))

    return inverse


def halved(inverse: Inverse) -> Inverse:
    """For guesses "in": of the curve F(2 x)/2, since either side holds the 1/2 of the coin."""
    return lambda y: 0.5 * inverse(2.0 * y)


def words(claim: Any) -> str:
    """What is claimed."""
    if isinstance(claim, Plan):
        return "curve of the plan"
    if isinstance(claim, Mechanism | Profile):
        return f"curve of {shown(claim.mechanism if isinstance(claim, Profile) else claim)}"
    return f"{float(claim):g}-Gaussian DP"
