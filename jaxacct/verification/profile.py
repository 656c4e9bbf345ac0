"""Enclosures of delta(eps) of one direction, by whichever way suits the law; each level of effort is finer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxacct.verification import calm, contour, few_steps
from jaxacct.verification.balls import arb, ball, between, precision
from jaxacct.verification.enumeration import enumerate_totals, power_of_grid, repeated_laplace, states
from jaxacct.verification.finite import Finite
from jaxacct.verification.laws import Composition
from jaxacct.verification.record import NotCovered, Unplanned
from jaxacct.verification.smooth import LaplaceLoss

__all__ = ["LEVELS", "at_most", "enclose"]

LEVELS = 4
BITS = (160, 320, 1280, 5120)
"""Precision of the closed forms and of enumeration, by level."""
DIGITS, NODES = (4, 10, 15, 22), (20_000, 100_000, 400_000, 1_000_000)
"""Digits wanted of a sum over a line and the most nodes in it, by level."""
FEW_DIGITS = (12, 15, 19, 25)
"""Digits wanted where all steps are sampled Gaussians, by level: engines are seldom wider."""
DEAREST = 4_000_000
"""Products of a sum that takes as long as two integrals one in the other."""
LAPLACES, GRID = 300, 200_000
"""Most repetitions of Laplace, and most totals on a grid, that are added up."""
STATES = (300_000, 300_000, 300_000, 2_000_000)


def enclose(build: Callable[[], Composition], epsilon: float, log_scale: float, level: int) -> Any:
    """delta(epsilon) of one direction; log_scale is the logarithm of what it is compared with."""
    with precision(BITS[level]):
        composition = build()
        parts, infinite = composition.parts, composition.infinity
        if math.isinf(epsilon) or not parts:
            return infinite
        left_out = between(0, composition.cut.abs_upper())
        largest = composition.largest
        if largest is not None and largest <= ball(epsilon):
            return infinite + left_out
        if level == 0 and all(count > 0 and hasattr(part, "hockey_stick") for part, count in parts):
            # total variations add up, and delta(eps) <= delta(0): enough where next to nothing leaks
            most = sum((count * part.hockey_stick(ball(0.0)) for part, count in parts), infinite + left_out)
            if most.abs_upper() < ball(log_scale).exp():
                return between(0, most.abs_upper())
        exact = _exactly(parts, ball(epsilon), level)
        if exact is not None:
            return exact + infinite + left_out
    for part, _ in parts:
        if not hasattr(part, "log_mgf"):
            raise NotCovered(f"a composition with {part.key[0]}")
    return _by_integrals(lambda: build().parts, parts, epsilon, log_scale, level).max(0) + infinite + left_out


def at_most(composition: Composition, epsilon: float) -> Any:
    """Upper bound of delta(epsilon) of one direction by Chernoff, infinite where there is none."""
    parts = composition.parts
    if math.isinf(epsilon) or not parts or not all(count > 0 and hasattr(part, "log_mgf") for part, count in parts):
        return arb("inf")
    largest = composition.largest
    if largest is not None and largest <= ball(epsilon):
        return composition.infinity + composition.cut
    try:
        return contour.at_most(parts, epsilon) + composition.infinity + composition.cut
    except Unplanned:
        return arb("inf")


def _by_integrals(build: Callable[[], Any], parts: Any, epsilon: float, log_scale: float, level: int) -> Any:
    """The finite part, directly for two steps, else by a sum over a line; three steps whose sum is long directly."""
    if not calm.fits(parts):
        return contour.enclose(build, epsilon, log_scale, DIGITS[level], NODES[level])
    digits, most = FEW_DIGITS[level], max(NODES[level], 100_000)
    ways = [lambda: contour.enclose(build, epsilon, log_scale, digits, most)]
    if few_steps.fits(parts):
        ways.insert(0, lambda: few_steps.enclose(build, epsilon, log_scale, digits))
        if sum(count for _, count in parts) > 2:
            # two integrals one in the other take seconds: a short sum is faster
            ways.insert(0, lambda: contour.enclose(build, epsilon, log_scale, digits, most, DEAREST))
    for way in ways[:-1]:
        try:
            return way()
        except Unplanned:
            pass
    return ways[-1]()


def _exactly(parts: Any, epsilon: Any, level: int) -> Any:
    """The finite part by a formula or by enumeration, None where there is neither."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0].hockey_stick(epsilon)
    if len(parts) == 1:
        ((part, count),) = parts
        if isinstance(part, LaplaceLoss) and count <= LAPLACES:
            # the powers cancel: digits in proportion to their number
            with precision(BITS[level] + 8 * count):
                return repeated_laplace(part.top, count, epsilon)
        if isinstance(part, Finite):
            found = power_of_grid(part, count, epsilon, GRID)
            if found is not None:
                return found
    if all(isinstance(part, Finite) for part, _ in parts):
        if not all(part.loss for part, _ in parts):
            return arb(0)
        many = states(parts)
        if many <= STATES[level]:
            return enumerate_totals(sorted(parts, key=lambda item: states([item])), epsilon)
    return None
