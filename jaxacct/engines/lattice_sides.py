"""A composition on the lattice, rounded down or up: delta from it, and where that crosses a target.

Charged to the bracket, besides the discretisation: mass moved to infinity or dropped, node positions,
wrap-around (Chernoff bounds of the tilted mass outside the window, under the same lattice laws), the rounding
of masses, tilt, transforms, power and sums.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.lattice_backend import Runner
from jaxacct.engines.lattice_laplace import Laplace
from jaxacct.engines.lattice_part import LatticePart, Placed
from jaxacct.engines.lattice_plan import LatticePlan, common_step, peak
from jaxacct.kernels.tilted_fft import Composition, compose, payoff

__all__ = ["Side", "crossing", "evaluate", "sides_of", "upper_side"]

UNDERFLOW = 1e-300
"""More than all that underflow takes from a payoff: 2.3e-308 from f and from each T f, at most 2^22 of them.

Times e^700, at which the scale of delta is capped, it is above 1, so that the cap is an upper bound too.
"""
LARGEST_EXPONENT = 700.0
"""Cap of exponents: e^700 is near the end of float64's range."""
LOST_MASS = 1e-290
"""More P-mass than underflow takes from one law on the lattice, or moves on it."""
LARGEST_LOG_GROWTH = 0.69
"""log of the P-mass of a lower composition above which no lower bound is drawn from it; below log 2."""
CROSSING_STEPS = 60
"""Steps of Newton's method and bisections at most; the ends are evaluated wherever they lead."""


class Side(NamedTuple):
    """A composition, rounded one way, with all that is needed to evaluate delta from it."""

    composed: Composition
    theta: float  # the tilt
    log_moment: float  # K(theta)
    log_size: float  # magnitudes of its terms, for their rounding
    start: float  # loss of the first element
    step: float  # between nodes
    span: float  # length of the lattice in loss
    shift: float  # how far losses may be off
    above: float  # bound of the tilted mass that wraps around from above the lattice
    below: float  # and from below it
    extra: float  # what mass at infinity adds to delta (upper), or overstated mass takes from it (lower)
    upper: bool  # whether it is rounded up
    run: Runner  # where the kernels run


def sides_of(
    laws: list[LatticePart], plan: LatticePlan, length: int, run: Runner, below: list[LatticePart] | None = None
) -> tuple[Side, Side]:
    """The dominated and the dominating composition on lattices of one length.

    below : the laws of the dominated composition, where they are others.
    """
    below = laws if below is None else below
    extents = [[law.extent(plan.theta, plan.cut, plan.share) for law in each] for each in (below, laws)]
    down, up = _steps(laws, extents, plan, length)
    return _side(below, extents[0], plan, length, down, False, run), _side(
        laws, extents[1], plan, length, up, True, run
    )


def upper_side(laws: list[LatticePart], plan: LatticePlan, length: int, run: Runner) -> Side:
    """The dominating composition alone."""
    extents = [law.extent(plan.theta, plan.cut, plan.share) for law in laws]
    return _side(laws, extents, plan, length, _steps(laws, [extents], plan, length)[1], True, run)


def _steps(
    laws: list[LatticePart], extents: list[list[tuple[float, float]]], plan: LatticePlan, length: int
) -> tuple[float, float]:
    """The steps of the dominated and of the dominating composition, for which all extents find room."""
    margin = 1.0 + 8.0 / length
    widest = max(1.01 * (high - low) for each in extents for low, high in each)
    span = max(plan.top - plan.bottom, widest) * margin
    span = max(span, 1e-12 * (abs(plan.top) + abs(plan.bottom)), 1e-290)  # a law of one atom has no extent
    step = common_step(span / (length - 4), laws)
    # a law that adjusts the step for itself, in every repetition: the one with the most to lose
    main = max(laws, key=lambda law: law.count * isinstance(law, Laplace))
    return main.step(step, False), main.step(step, True)


def _side(
    laws: list[LatticePart],
    extents: list[tuple[float, float]],
    plan: LatticePlan,
    length: int,
    step: float,
    upper: bool,
    run: Runner,
) -> Side:
    placed = [law.place(extent, step, length, upper, run) for law, extent in zip(laws, extents, strict=True)]
    tilts = np.array([plan.theta, plan.theta + plan.above, plan.theta - plan.below])
    direction, count, origin = (
        np.array([getattr(x, name) for x in placed]) for name in ("direction", "repeats", "origin")
    )
    coefficient = direction[:, None] * tilts
    base = float(np.sum(count * direction * origin))
    centred = 0.5 * (plan.top + plan.bottom) - 0.5 * length * step
    roll = int(np.floor((centred - base) / step))
    mass = np.stack([x.mass for x in placed])
    composed = run(compose, mass, coefficient, direction, count, step, roll % length, upper)
    logs = count[:, None] * (coefficient * origin[:, None] + np.asarray(composed.log_moments))
    k, k_above, k_below = logs.sum(axis=0)
    sizes = np.abs(coefficient[:, 0] * origin) + np.abs(np.asarray(composed.log_moments)[:, 0])
    start, span = base + roll * step, length * step
    # moments are sums in any order: n times as many units as there are nodes, over all parts
    growth = float(
        np.exp(min(1e-9 + ROUNDOFF * (8.0 * np.abs(logs).sum() + 2.0 * length * count.sum()), LARGEST_EXPONENT))
    )
    above = growth * np.exp(min(k_above - k - plan.above * (start + span), 0.0))
    below = growth * np.exp(min(k_below - k + plan.below * start, 0.0))
    rounding = 8.0 * ROUNDOFF * (2.0 * abs(base) + span + abs(start))
    return Side(
        composed=composed,
        theta=plan.theta,
        log_moment=float(k),
        log_size=float(np.sum(count * sizes)),
        start=start,
        step=step,
        span=span,
        shift=float(np.sum(count * [x.shift for x in placed])) + rounding,
        above=float(above),
        below=float(below),
        extra=_extra(placed, upper),
        upper=upper,
        run=run,
    )


def _extra(placed: list[Placed], upper: bool) -> float:
    """What mass at infinity adds to an upper delta, or overstated mass takes from a lower one.

    Lower: H_g = E_P[(1 - g e^{-L})_+] of a step is at most d (`deficit`) above that of the true step, for
    every g >= 0, so at g = 0 its P-mass is at most 1 + d.  (p r - g q s)_+ = r (p - g (s/r) q)_+ shows that
    putting one such step for a true one, in a composition whose other steps have P-mass R, adds at most R d
    to delta.  Steps put in one after the other thus add d (1 + (1 + d) + ... + (1 + d)^{n-1}), over all parts
    prod (1 + d_i)^{n_i} - 1: more than sum n_i d_i, and nothing is known (inf) where it is near 1.
    """
    if upper:
        survival = sum(x.repeats * np.log1p(-min(x.infinity, 1.0 - ROUNDOFF)) for x in placed)
        return float(-np.expm1(survival) * (1.0 + 1e-12) + LOST_MASS * sum(x.repeats for x in placed))
    growth = float(sum(x.repeats * np.log1p(x.deficit + LOST_MASS) for x in placed))
    return float(np.expm1(growth) * (1.0 + 1e-12)) if growth < LARGEST_LOG_GROWTH else float("inf")


def evaluate(side: Side, eps: float) -> tuple[float, float]:
    """delta(eps) rounded outward, and the derivative of log delta."""
    theta, outward = side.theta, side.shift + 8.0 * ROUNDOFF * abs(eps)
    eps = eps - outward if side.upper else eps + outward
    mass, start = side.composed.mass, side.start
    if isinstance(mass, np.ndarray):  # no shapes to compile for: losses below eps pay nothing
        before = (eps - start) / side.step - 2.0
        first = int(min(before, mass.shape[0] - 1)) if before > 0.0 else 0
        mass, start = mass[first:], start + first * side.step
    sums = side.run(payoff, mass, start - eps, side.step, theta)
    value, slope, norm, magnitude = (float(x) for x in sums)
    length, end = side.composed.mass.shape[0], side.start + side.span - eps
    rounding = ROUNDOFF * (length + 32.0 + 8.0 * theta * side.span) * magnitude
    wrong = float(side.composed.error) * norm * (1.0 + 1e-9) + rounding + UNDERFLOW
    log_scale = side.log_moment - theta * eps
    relative = outward + 8.0 * ROUNDOFF * (side.log_size + theta * abs(eps) + 8.0)
    scale = np.exp(min(log_scale + (relative if side.upper else -relative), LARGEST_EXPONENT))
    if side.upper:
        beyond = np.log1p(1.0 / theta)
        worst = peak(theta) if end < beyond else np.exp(-theta * end)
        wrong += side.above * worst + (side.below * peak(theta) if side.start > eps else 0.0)
        result = scale * (value + wrong) * (1.0 + 1e-14) + side.extra
    else:
        wrong += (side.above + side.below) * peak(theta)
        result = scale * (value - wrong) * (1.0 - 1e-14) - side.extra
    if not np.isfinite(result):  # nothing is known, and nothing may follow from a comparison
        result = 1.0 if side.upper else 0.0
    return float(result), -slope / value if value > 0 else -theta


def crossing(side: Side, target: float, guess: float, tolerance: float) -> tuple[float, float]:
    """(a, b) with delta(a) > target >= delta(b), evaluated at both but for a = 0, which needs no proof.

    Newton on log delta, kept inside the bracket; b is 0 if already delta(0) <= target, inf if none was found.  An upper
    delta of 1 and a lower one of 0 are no bounds; they move neither end to the wrong side.
    """
    if side.upper and evaluate(side, 0.0)[0] <= target:
        return 0.0, 0.0
    low, high, at = 0.0, np.inf, max(guess, tolerance)
    width = tolerance
    for _ in range(CROSSING_STEPS):
        value, slope = evaluate(side, at)
        if value > target:
            low = at
        else:
            high = at
        if high - low <= 2.0 * tolerance:
            break
        newton = at + np.log(value / target) / -slope if value > 0 and slope < 0 else np.nan
        if abs(newton - at) <= tolerance:
            at = at + width if value > target else at - width
            width *= 2.0
        else:
            at = newton
        if not low < at < high:
            at = 0.5 * (low + high) if np.isfinite(high) else 2.0 * low + tolerance
    return low, high
