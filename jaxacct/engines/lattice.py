"""The lattice engine: certified brackets of epsilon and delta for one configuration of any composition.

A plan (tilt, window, range) is made on a sketch of the laws; then each lattice length in turn gives a
dominating and a dominated composition (`kernels.lattice`, `kernels.tilted_fft`) and with them a bracket, until it
is narrow enough or the memory limit is reached.  Brackets of several lengths are intersected.

Charged to the bracket, besides the discretisation: mass moved to infinity or dropped, node positions, wrap-around
(Chernoff bounds of the tilted mass outside the window, under the same lattice laws), the rounding of masses, tilt,
transforms, power and sums.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxacct.engines.lattice_laws import Law, Placed, Sketch, laws_of
from jaxacct.kernels.lattice import UNIT
from jaxacct.kernels.tilted_fft import Composition, compose, payoff
from jaxacct.mechanisms.components import Components

__all__ = ["LatticeAnswer", "delta", "epsilon"]

LENGTHS = (2**12, 2**15, 2**18, 2**20, 2**22)
ESTIMATE = 2.0 / 3.0
"""Where the truth lies between lower and upper for a smooth law: the errors are as 2 to 1."""


class LatticeAnswer(NamedTuple):
    """lower <= truth <= upper; status "ok", "zero" (epsilon is 0) or "width" (wider than asked for)."""

    lower: float
    estimate: float
    upper: float
    status: str


class _Plan(NamedTuple):
    """Tilt, expected eps, window, the tilts added for the Chernoff bounds, and logs of what may be left out."""

    theta: float
    centre: float
    cut: float
    share: float
    bottom: float
    top: float
    above: float
    below: float


class _Side(NamedTuple):
    """A composition, rounded one way, with all that is needed to evaluate delta from it."""

    composed: Composition
    theta: float
    log_moment: float
    log_size: float
    base: float
    start: float
    step: float
    span: float
    shift: float
    above: float
    below: float
    extra: float
    upper: bool


def epsilon(
    parts: Components,
    index: int,
    delta_fin_lower: float,
    delta_fin_upper: float,
    *,
    rtol: float = 1e-4,
    memory_bytes: int = 2**30,
) -> LatticeAnswer:
    """Bracket of eps = inf {eps >= 0 : delta_fin(eps) <= d} for configuration `index`.

    Parameters
    ----------
    parts : Components of one direction.
    delta_fin_lower, delta_fin_upper : ends of what is known of d > 0, the target for the finite part of the loss;
        `upper` holds for the first, `lower` for the second.
    rtol : wanted (upper - lower)/upper.
    memory_bytes : limit that decides the longest lattice.

    Call inside `with jax.enable_x64():`.
    """
    laws = laws_of(parts, index)
    if not laws or delta_fin_lower >= 1.0:
        return LatticeAnswer(0.0, 0.0, 0.0, "zero")
    low, high = 0.0, np.inf
    log_delta, share = float(np.log(delta_fin_lower)), _share(rtol)
    plan = _plan(laws, None, log_delta, share)
    for length in _lengths(len(laws), memory_bytes):
        for attempt in range(3):
            down, up = _sides(laws, plan, length)
            tolerance = 0.02 * rtol * max(plan.centre, 1e-12)
            low = max(low, _crossing(down, delta_fin_upper, plan.centre, tolerance)[0])
            high = min(high, _crossing(up, delta_fin_lower, plan.centre, tolerance)[1])
            middle = 0.5 * (low + high)
            inside = plan.bottom <= middle <= plan.top
            near = abs(middle - plan.centre) <= 0.05 * (plan.top - plan.bottom)
            if not np.isfinite(high) or (inside and near) or attempt == 2:
                break
            plan = _plan(laws, middle, log_delta, share)
        if high == 0.0:
            return LatticeAnswer(0.0, 0.0, 0.0, "zero")
        if high - low <= rtol * high:
            break
    return _answer(low, high, rtol)


def delta(
    parts: Components, index: int, epsilon: float, *, rtol: float = 1e-4, memory_bytes: int = 2**30
) -> LatticeAnswer:
    """Bracket of delta_fin(epsilon) = E_P[(1 - e^{epsilon - L})_+ ; L finite] for configuration `index`.

    Arguments as in `epsilon`; the width is relative here too.
    """
    laws = laws_of(parts, index)
    if not laws:
        return LatticeAnswer(0.0, 0.0, 0.0, "ok")
    share = _share(rtol)
    log_delta = _plan(laws, epsilon, 0.0, share).cut - share
    plan = _plan(laws, epsilon, log_delta, share)
    low, high = max(0.0, -float(np.expm1(epsilon))), 1.0
    for length in _lengths(len(laws), memory_bytes):
        down, up = _sides(laws, plan, length)
        low = max(low, _evaluate(down, epsilon)[0])
        high = min(high, _evaluate(up, epsilon)[0])
        if high - low <= rtol * high:
            break
    return _answer(low, high, rtol)


def _answer(low: float, high: float, rtol: float) -> LatticeAnswer:
    if low > high:
        raise ArithmeticError(f"lattice bracket is empty: lower {low!r} > upper {high!r}")
    middle = low + ESTIMATE * (high - low) if np.isfinite(high) else high
    return LatticeAnswer(float(low), float(middle), float(high), "ok" if high - low <= rtol * high else "width")


def _lengths(count: int, memory_bytes: int) -> tuple[int, ...]:
    """Lattice lengths within the memory limit (at least the shortest): 40 + 12 R float64 arrays of length N."""
    fitting = tuple(n for n in LENGTHS if 8 * n * (40 + 12 * count) <= memory_bytes)
    return fitting or LENGTHS[:1]


def _cumulants(sketches: list[Sketch], theta: float) -> tuple[float, float, float]:
    """K(theta) = log E[e^{theta L}] of the composition, its mean and its variance under the tilt."""
    total, mean, variance = 0.0, 0.0, 0.0
    for loss, log_mass, count in sketches:
        exponent = log_mass + theta * loss
        top = exponent.max()
        weight = np.exp(exponent - top)
        size = weight.sum()
        centre = float(weight @ loss) / size
        total += count * (top + np.log(size))
        mean += count * centre
        variance += count * float(weight @ np.square(loss - centre)) / size
    return float(total), float(mean), float(variance)


def _share(rtol: float) -> float:
    """log of the share of delta that truncated mass may carry."""
    return float(np.log(rtol)) - 4.0


def _plan(laws: list[Law], eps: float | None, log_delta: float, share: float) -> _Plan:
    """Tilt and window for a given eps, or for the eps at which delta is given; eps is taken as at least 0.

    The tilt is the saddle point of K(theta) - theta eps - log theta(theta + 1), under the law without the losses so
    high that they do not matter at `log_delta` (with them a heavy tail would draw the saddle to itself).
    """
    untruncated = -1e4 if log_delta == 0.0 else log_delta + share
    sketches = [law.sketch(untruncated) for law in laws]

    def state(theta: float) -> tuple[float, float, float]:
        k, mean, variance = _cumulants(sketches, theta)
        at = mean - 1.0 / theta - 1.0 / (1.0 + theta)
        curvature = variance + theta**-2.0 + (1.0 + theta) ** -2.0
        return k, at, k - theta * at - np.log(theta * (theta + 1.0)) - 0.5 * np.log(2 * np.pi * curvature)

    low, high = np.log(1e-3), np.log(1e6)
    for _ in range(45):
        theta = float(np.exp(0.5 * (low + high)))
        _, at, value = state(theta)
        past = at >= eps if eps is not None else (value <= log_delta and at >= 0.0)
        low, high = (low, np.log(theta)) if past else (np.log(theta), high)
    theta = float(np.exp(high))
    k, at, _ = state(theta)
    centre = max(at, 0.0) if eps is None else max(eps, 0.0)
    if log_delta == 0.0:
        log_delta = min(k - theta * centre + np.log(_peak(theta)), 0.0)
    left_out = share - 6.0
    grid = np.geomspace(1e-2, 1e3, 41) * max(1.0, 0.1 * theta)
    up = np.array([(_cumulants(sketches, theta + t)[0] - k - left_out) / t for t in grid])
    down = np.array([(k - _cumulants(sketches, theta - t)[0] + left_out) / t for t in grid])
    top, bottom = float(np.min(up)), float(np.max(down))
    return _Plan(
        theta, centre, float(log_delta + share), share, min(bottom, centre), max(top, centre),
        float(grid[np.argmin(up)]), float(grid[np.argmax(down)]),
    )


def _sides(laws: list[Law], plan: _Plan, length: int) -> tuple[_Side, _Side]:
    """The dominated and the dominating composition on lattices of one length."""
    extents = [law.extent(plan.theta, plan.cut, plan.share) for law in laws]
    margin = 1.0 + 8.0 / length
    span = max(plan.top - plan.bottom, *(1.01 * (high - low) for low, high in extents)) * margin
    step = _common_step(span / (length - 4), laws)
    gaps = [max((d for d, _ in law.gaps()), default=0.0) for law in laws]
    main = laws[int(np.argmax(gaps))]
    return tuple(_side(laws, extents, plan, length, main.step(step, upper), upper) for upper in (False, True))


def _common_step(step: float, laws: list[Law]) -> float:
    """The step in [step, 1.5 step] for which the laws' own gaps are closest to whole numbers of steps."""
    gaps = [pair for law in laws for pair in law.gaps() if pair[0] >= step]
    if not gaps:
        return step
    distance, weight = (np.array(x) for x in zip(*gaps, strict=True))
    lead = distance[np.argmax(weight * distance)]
    cells = np.arange(max(np.floor(lead / step), 1.0), max(np.ceil(lead / (1.5 * step)), 1.0) - 1.0, -1.0)[:20000]
    steps = lead / cells
    cost = np.zeros(steps.size)
    for d, w in zip(distance, weight, strict=True):
        cost += w * steps * np.abs(d / steps - np.rint(d / steps))
    return float(steps[np.argmin(cost + 1e-12 * weight.sum() * steps)])


def _side(
    laws: list[Law], extents: list[tuple[float, float]], plan: _Plan, length: int, step: float, upper: bool
) -> _Side:
    placed = [law.place(extent, step, length, upper) for law, extent in zip(laws, extents, strict=True)]
    tilts = np.array([plan.theta, plan.theta + plan.above, plan.theta - plan.below])
    direction, unit, count, origin = (
        np.array([getattr(x, name) for x in placed]) for name in ("direction", "unit", "count", "origin")
    )
    coefficient = unit[:, None] + direction[:, None] * tilts
    base = float(np.sum(count * direction * origin))
    centred = 0.5 * (plan.top + plan.bottom) - 0.5 * length * step
    roll = int(np.floor((centred - base) / step))
    composed = compose(
        jnp.stack([x.mass for x in placed]), coefficient, direction, count, step, roll % length, upper=upper
    )
    logs = count[:, None] * (coefficient * origin[:, None] + np.asarray(composed.log_moments))
    k, k_above, k_below = logs.sum(axis=0)
    log_size = float(np.sum(count * (np.abs(coefficient[:, 0] * origin) + np.abs(composed.log_moments[:, 0]))))
    start, span = base + roll * step, length * step
    growth = 1.0 + 1e-9 + 8.0 * UNIT * float(np.abs(logs).sum())
    above = growth * np.exp(min(k_above - k - plan.above * (start + span), 0.0))
    below = growth * np.exp(min(k_below - k + plan.below * start, 0.0))
    shift = float(np.sum(count * [x.shift for x in placed])) + 8.0 * UNIT * (2.0 * abs(base) + span + abs(start))
    return _Side(composed, plan.theta, float(k), log_size, base, start, step, span, shift, float(above), float(below),
                 _extra(placed, upper), upper)


def _extra(placed: list[Placed], upper: bool) -> float:
    """What mass at infinity adds to an upper delta, or overstated mass takes from a lower one."""
    if upper:
        survival = sum(x.count * np.log1p(-min(x.infinity, 1.0 - UNIT)) for x in placed)
        return float(-np.expm1(survival) * (1.0 + 1e-12) + 1e-290 * sum(x.count for x in placed))
    return float(sum(x.count * x.deficit for x in placed))


def _peak(theta: float) -> float:
    """sup over d of e^{-theta d}(1 - e^{-d})."""
    return float(np.exp(theta * np.log(theta / (1.0 + theta)) - np.log1p(theta)))


def _evaluate(side: _Side, eps: float) -> tuple[float, float]:
    """delta(eps) rounded outward, and the derivative of log delta."""
    theta, outward = side.theta, side.shift + 8.0 * UNIT * abs(eps)
    eps = eps - outward if side.upper else eps + outward
    sums = payoff(side.composed.mass, side.start - eps, side.step, theta)
    value, slope, norm, magnitude = (float(x) for x in sums)
    length, end = side.composed.mass.shape[0], side.start + side.span - eps
    rounding = UNIT * (length + 32.0 + 8.0 * theta * side.span) * magnitude
    wrong = float(side.composed.error) * norm * (1.0 + 1e-9) + rounding
    log_scale = side.log_moment - theta * eps
    relative = outward + 8.0 * UNIT * (side.log_size + theta * abs(eps) + 8.0)
    scale = np.exp(min(log_scale + (relative if side.upper else -relative), 700.0))
    if side.upper:
        beyond = np.log1p(1.0 / theta)
        worst = _peak(theta) if end < beyond else np.exp(-theta * end)
        wrong += side.above * worst + (side.below * _peak(theta) if side.start > eps else 0.0)
        result = scale * (value + wrong) * (1.0 + 1e-14) + side.extra
    else:
        wrong += (side.above + side.below) * _peak(theta)
        result = scale * (value - wrong) * (1.0 - 1e-14) - side.extra
    return float(result), -slope / value if value > 0 else -theta


def _crossing(side: _Side, target: float, guess: float, tolerance: float) -> tuple[float, float]:
    """(a, b) with delta(a) > target >= delta(b), evaluated at both but for a = 0, which needs no proof.

    Newton on log delta, kept inside the bracket; b is 0 if already delta(0) <= target, inf if none was found.
    """
    if side.upper and _evaluate(side, 0.0)[0] <= target:
        return 0.0, 0.0
    low, high, at = 0.0, np.inf, max(guess, tolerance)
    width = tolerance
    for _ in range(60):
        value, slope = _evaluate(side, at)
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
