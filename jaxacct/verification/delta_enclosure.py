"""Enclosures of delta(eps) of one direction, by the method that suits the law; each level of effort is finer.

Finitely many losses are enclosed by adding up every total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from flint import arb_poly

from jaxacct.verification import direct_integration, line_sum, small_loss_steps
from jaxacct.verification.ball_arithmetic import arb, ball, between, precision, tick, within
from jaxacct.verification.closed_form_losses import LaplaceLoss
from jaxacct.verification.finite_losses import FiniteLosses, spread
from jaxacct.verification.loss_definition import Composition
from jaxacct.verification.random_allocation import AllocationLoss
from jaxacct.verification.result import NotCovered, Unplanned

MOST_STEPS = 10**7
"""More steps of a law with two or more losses are never enumerated."""
TOO_MANY = 10**12
"""More totals than can be added up in practice."""
FAR_TOO_MANY = 10**30
"""Stands for any number of totals above TOO_MANY."""
LEVELS = 4
"""Levels of effort; the tuples below have one entry for each."""
BITS = (160, 320, 1280, 5120)
"""Bits of the closed forms and of enumeration, by level: the last are for losses that cancel to thousands of bits."""
DIGITS = (4, 10, 15, 22)
"""Decimal digits wanted of a sum over a line, by level: most brackets are decided by the first."""
NODES = (20_000, 100_000, 400_000, 1_000_000)
"""Most nodes of a sum over a line, by level: the last bounds the time and memory that one question may take."""
GAUSSIAN_DIGITS = (12, 15, 19, 25)
"""DIGITS where all steps are sampled Gaussians: engines are so narrow there that fewer digits seldom decide."""
MOST_TOTALS = (300_000, 300_000, 300_000, 2_000_000)
"""Most totals of finite laws that are added up one by one, by level; more are left to the sum over a line."""


def enclose(build: Callable[[], Composition], epsilon: float, log_scale: float, level: int) -> Any:
    """delta(epsilon) of one direction; log_scale is the logarithm of the number with which it is compared."""
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
    digits, most = GAUSSIAN_DIGITS[level], max(NODES[level], 100_000)
    methods = [lambda: line_sum.enclose(build, epsilon, log_scale, digits, most)]
    if direct_integration.fits(parts):
        methods.insert(0, lambda: direct_integration.enclose(build, epsilon, log_scale, digits))
        if sum(count for _, count in parts) > 2:
            # two nested integrals take seconds: a short sum is faster
            methods.insert(0, lambda: line_sum.enclose(build, epsilon, log_scale, digits, most, 4_000_000))
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
        if isinstance(part, LaplaceLoss) and count <= 300:  # its cost grows with their square
            # the powers cancel: digits in proportion to their number
            with precision(BITS[level] + 8 * count):
                return repeated_laplace(part.top, count, epsilon)
        if isinstance(part, FiniteLosses):
            found = power_of_grid(part, count, epsilon, 200_000)
            if found is not None:
                return found
    if all(isinstance(part, FiniteLosses) for part, _ in parts):
        if not all(part.loss for part, _ in parts):
            return arb(0)
        many = states(parts)
        if many <= MOST_TOTALS[level]:
            return enumerate_totals(sorted(parts, key=lambda item: states([item])), epsilon)
    return None


def states(parts: Any) -> int:
    """How many totals of counts there are, a product of binomial coefficients; FAR_TOO_MANY beyond TOO_MANY."""
    total = 1
    for part, count in parts:
        atoms = len(part.loss)
        if atoms == 0:
            return 0
        if count > MOST_STEPS and atoms > 1:
            return FAR_TOO_MANY
        total *= math.comb(count + atoms - 1, atoms - 1)
        if total > TOO_MANY:
            return FAR_TOO_MANY
    return total


def enumerate_totals(parts: Any, epsilon: Any) -> Any:
    """The sum of mass (1 - e^{eps - loss})_+ over all totals of the losses."""
    *rest, last = parts
    fixed = [(arb(0), arb(1))]
    for part, count in rest:
        fixed = [(x + y, m * n) for x, m in fixed for y, n in _totals(part, count)]
    total = arb(0)
    for loss, mass in _totals(*last):
        for start, share in fixed:
            gap = epsilon - loss - start
            if not gap >= 0:
                total += mass * share * (-gap.expm1()).max(0)
    return total


def power_of_grid(part: Any, count: int, epsilon: Any, most: int) -> Any:
    """The sum of `enumerate_totals` for one law on a grid, by a power of its generating function; None if too long."""
    if part.grid is None or len(part.loss) < 3:
        return None
    offset, step, ks = part.grid
    low, by = min(ks), spread(part.grid)
    if (max(ks) - low) // by * count > most:
        return None
    masses = [arb(0)] * ((max(ks) - low) // by + 1)
    for k, p in zip(ks, part.p, strict=True):
        masses[(k - low) // by] += p
    tick()
    total = arb(0)
    for j, mass in enumerate((arb_poly(masses) ** count).coeffs()):
        gap = epsilon - count * offset - (count * low + j * by) * step
        if not gap >= 0:
            total += mass * (-gap.expm1()).max(0)
    return total


def repeated_laplace(top: Any, count: int, epsilon: Any) -> Any:
    """delta(eps) of n Laplace mechanisms by a closed form.

    With w = 1 + 2z, M^n is a sum of powers of 1/w times exponentials of z.  The integral of such a term,
    I_m = (1/2 pi i) int e^{zd}/(z(z + 1) w^m) dz is 0 for d <= 0.  For d > 0, I_0 = 1 - e^{-d}, I_1 = (1 - e^{-d/2})^2
    and I_m = I_{m-2} - 2 e^{-d/2} (d/2)^{m-1}/(m-1)!, since 1/((w^2 - 1) w^m) = 1/((w^2 - 1) w^{m-2}) - 1/w^m.
    """
    total = arb(0)
    for k in range(count + 1):
        tick()
        d = (2 * k - count) * top - epsilon
        if d <= 0:
            continue
        d = d.max(0)
        small = (-d / 2).exp()
        integrals, term = [-(-d).expm1(), (1 - small) ** 2], 2 * small
        for m in range(2, count + 1):
            term *= d / 2 / (m - 1)
            integrals.append(integrals[m - 2] - term)
        powers = arb_poly([1, 1]) ** k * arb_poly([1, -1]) ** (count - k)
        inner = sum((a * b for a, b in zip(powers.coeffs(), integrals, strict=False)), arb(0))
        total += math.comb(count, k) * (-(count - k) * top).exp() * inner
    return total / arb(2) ** count


def _totals(part: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Loss and mass of every way to distribute the steps over the outcomes."""
    if len(part.loss) == 1:
        yield count * part.loss[0], part.p[0] ** count
        return
    if len(part.loss) == 2:
        yield from _binomial(part, count)
        return
    powers = []
    for p in part.p:
        line = [arb(1)]
        for k in range(1, count + 1):
            line.append(line[-1] * p / k)
        powers.append(line)
    yield from _multinomial(part.loss, powers, count, arb(0), arb(count).gamma() * count)


def _binomial(part: Any, count: int) -> Iterator[tuple[Any, Any]]:
    (one, two), (p, q) = part.loss, part.p
    mass, ratio = q**count, p / q
    for k in range(count + 1):
        if k % 4096 == 0:
            tick()
        yield k * one + (count - k) * two, mass
        mass *= ratio * (count - k) / (k + 1)


def _multinomial(losses: Any, powers: Any, left: int, loss: Any, mass: Any) -> Iterator[tuple[Any, Any]]:
    if len(losses) == 1:
        yield loss + left * losses[0], mass * powers[0][left]
        return
    tick()
    for k in range(left + 1):
        yield from _multinomial(losses[1:], powers[1:], left - k, loss + k * losses[0], mass * powers[0][k])
