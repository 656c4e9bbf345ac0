"""Enclosures of delta(eps) of one direction, by the method that suits the law; each level of effort is finer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxacct.verification import direct_integration, line_sum, small_loss_steps
from jaxacct.verification.ball_arithmetic import arb, ball, between, precision, within
from jaxacct.verification.closed_form_losses import LaplaceLoss
from jaxacct.verification.enumeration import enumerate_totals, power_of_grid, repeated_laplace, states
from jaxacct.verification.finite_losses import FiniteLosses
from jaxacct.verification.loss_definition import Composition
from jaxacct.verification.random_allocation import AllocationLoss
from jaxacct.verification.result import NotCovered, Unplanned

__all__ = ["LEVELS", "at_most", "enclose"]

LEVELS = 4
"""Levels of effort; the tuples below have one entry for each."""
BITS = (160, 320, 1280, 5120)
"""Bits of the closed forms and of enumeration, by level: the last are for losses that cancel to thousands of bits."""
DIGITS = (4, 10, 15, 22)
"""Decimal digits wanted of a sum over a line, by level: most brackets are decided by the first."""
NODES = (20_000, 100_000, 400_000, 1_000_000)
"""Most nodes of a sum over a line, by level: the last bounds the time and memory that one question may take."""
GAUSSIAN_DIGITS = (12, 15, 19, 25)
"""The same where all steps are sampled Gaussians: engines are so narrow there that fewer digits seldom decide."""
SHORT_SUM_PRODUCTS = 4_000_000
"""A sum of fewer products than this is faster than two nested integrals."""
MOST_LAPLACES = 300
"""Most repetitions of one Laplace mechanism for which the closed form is used: its cost grows with their square."""
MOST_GRID_TOTALS = 200_000
"""Most totals on a grid that are added up; a longer power of the generating function is not formed."""
MOST_TOTALS = (300_000, 300_000, 300_000, 2_000_000)
"""Most totals of finite laws that are added up one by one, by level; more are left to the sum over a line."""
LAPLACE_BITS_PER_STEP = 8
"""Bits that the terms of the Laplace closed form cancel, for each repetition."""
LEAST_GAUSSIAN_NODES = 100_000
"""`NODES` is at least this where all steps are sampled Gaussians, whose digits wanted are more."""


def enclose(build: Callable[[], Composition], epsilon: float, log_scale: float, level: int) -> Any:
    """delta(epsilon) of one direction; log_scale is the logarithm of what it is compared with."""
    with precision(BITS[level]):
        composition = build()
        parts, infinite = composition.parts, composition.infinity
        if math.isinf(epsilon) or not parts:
            return infinite
        left_out = between(0, composition.cut.abs_upper()) + within(composition.lost * ball(epsilon).exp())
        largest = composition.largest
        if largest is not None and largest <= ball(epsilon):
            return infinite + left_out
        if level == 0 and all(count > 0 and hasattr(part, "hockey_stick") for part, count in parts):
            # total variations add up, and delta(eps) <= delta(0): enough where next to nothing leaks
            most = sum((count * part.hockey_stick(ball(0.0)) for part, count in parts), infinite + left_out)
            if most.abs_upper() < ball(log_scale).exp():
                return between(0, most.abs_upper())
        if len(parts) == 1 and parts[0][1] == 1 and isinstance(parts[0][0], AllocationLoss):
            return parts[0][0].one_round(ball(epsilon), log_scale - DIGITS[level] * math.log(10.0))
        exact = _exactly(parts, ball(epsilon), level)
        if exact is not None:
            return exact + infinite + left_out
    for part, _ in parts:
        if not hasattr(part, "log_mgf"):
            words = "several rounds of" if isinstance(part, AllocationLoss) else "a composition with"
            raise NotCovered(f"{words} {part.key[0]}")
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
        return line_sum.at_most(parts, epsilon) + composition.infinity + composition.cut
    except Unplanned:
        return arb("inf")


def _by_integrals(build: Callable[[], Any], parts: Any, epsilon: float, log_scale: float, level: int) -> Any:
    """The finite part by direct integration (two steps, or three whose sum is long) or by a sum over a line."""
    if not small_loss_steps.only_sampled_gaussians(parts):
        return line_sum.enclose(build, epsilon, log_scale, DIGITS[level], NODES[level])
    digits, most = GAUSSIAN_DIGITS[level], max(NODES[level], LEAST_GAUSSIAN_NODES)
    methods = [lambda: line_sum.enclose(build, epsilon, log_scale, digits, most)]
    if direct_integration.fits(parts):
        methods.insert(0, lambda: direct_integration.enclose(build, epsilon, log_scale, digits))
        if sum(count for _, count in parts) > 2:
            # two nested integrals take seconds: a short sum is faster
            methods.insert(0, lambda: line_sum.enclose(build, epsilon, log_scale, digits, most, SHORT_SUM_PRODUCTS))
    for method in methods[:-1]:
        try:
            return method()
        except Unplanned:
            pass
    return methods[-1]()


def _exactly(parts: Any, epsilon: Any, level: int) -> Any:
    """The finite part by a formula or by enumeration, None where there is neither."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0].hockey_stick(epsilon)
    if len(parts) == 1:
        ((part, count),) = parts
        if isinstance(part, LaplaceLoss) and count <= MOST_LAPLACES:
            # the powers cancel: digits in proportion to their number
            with precision(BITS[level] + LAPLACE_BITS_PER_STEP * count):
                return repeated_laplace(part.top, count, epsilon)
        if isinstance(part, FiniteLosses):
            found = power_of_grid(part, count, epsilon, MOST_GRID_TOTALS)
            if found is not None:
                return found
    if all(isinstance(part, FiniteLosses) for part, _ in parts):
        if not all(part.loss for part, _ in parts):
            return arb(0)
        many = states(parts)
        if many <= MOST_TOTALS[level]:
            return enumerate_totals(sorted(parts, key=lambda item: states([item])), epsilon)
    return None
