"""The lattice engine: certified brackets of epsilon and delta for one configuration of any composition.

A plan (tilt, window, range) is made on a sketch of the laws; then each lattice length in turn gives a
dominating and a dominated composition (`kernels.lattice`, `kernels.tilted_fft`) and with them a bracket,
until it is narrow enough or the memory limit is reached.  Brackets of several lengths are intersected.

Charged to the bracket, besides the discretisation: mass moved to infinity or dropped, node positions,
wrap-around (Chernoff bounds of the tilted mass outside the window, under the same lattice laws), the rounding
of masses, tilt, transforms, power and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxacct.engines.lattice_finite import Finite
from jaxacct.engines.lattice_gaussian import PlainGaussian, SampledGaussian
from jaxacct.engines.lattice_laplace import Laplace
from jaxacct.engines.lattice_law import Law, Placed
from jaxacct.engines.lattice_plan import Plan, common_step, peak, plan_for, share_of, unresolved
from jaxacct.floats import ROUNDOFF
from jaxacct.kernels.tilted_fft import Composition, compose, payoff
from jaxacct.mechanisms.loss_components import Components

__all__ = ["LatticeAnswer", "delta", "deltas", "epsilon"]

LENGTHS = (2**12, 2**15, 2**18, 2**20, 2**21, 2**22)
ESTIMATE = 2.0 / 3.0
"""Where the truth lies between lower and upper for a smooth law: the errors are as 2 to 1."""
UNDERFLOW = 1e-300
"""More than all that underflow takes from a payoff: 2.3e-308 from f and from each T f, at most 2^22 of them.

Times e^700, at which the scale of delta is capped, it is above 1, so that the cap is an upper bound too.
"""
LOST = 1e-290
"""More P-mass than underflow takes from one law on the lattice, or moves on it."""
LARGEST_GROWTH = 0.69
"""log of the P-mass of a lower composition above which no lower bound is drawn from it; below log 2."""


class LatticeAnswer(NamedTuple):
    """lower <= truth <= upper; status "ok", "zero" (epsilon is 0), "width" (wider than asked for), or "contradiction".

    Ends that contradict each other are not used; the bracket is then (-inf, inf).
    """

    lower: float
    estimate: float
    upper: float
    status: str


class _Side(NamedTuple):
    """A composition, rounded one way, with all that is needed to evaluate delta from it."""

    composed: Composition
    theta: float
    log_moment: float
    log_size: float
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
    delta_fin_lower, delta_fin_upper : ends of what is known of d > 0, the target for the finite part of the
        loss; `upper` holds for the first, `lower` for the second.
    rtol : wanted (upper - lower)/upper.
    memory_bytes : limit that decides the longest lattice.

    Call inside `with jax.enable_x64():`.
    """
    laws = laws_of(parts, index)
    if not laws or delta_fin_lower >= 1.0:
        return LatticeAnswer(0.0, 0.0, 0.0, "zero")
    low, high = 0.0, _highest(laws)
    log_delta, share = float(np.log(delta_fin_lower)), share_of(rtol)
    plan = plan_for(laws, None, log_delta, share)
    pieces = pieces_of(laws, plan.cut)
    length = _next_length(0, np.inf, pieces, memory_bytes)
    if unresolved(laws, plan, _longest(pieces, memory_bytes)):
        length = 0
    while length:
        for attempt in range(3):
            down, up = _sides(pieces, plan, length)
            tolerance = 0.02 * rtol * max(plan.centre, 1e-12)
            low = max(low, _crossing(down, delta_fin_upper, plan.centre, tolerance)[0])
            high = min(high, _crossing(up, delta_fin_lower, plan.centre, tolerance)[1])
            middle = 0.5 * (low + high)
            near = abs(middle - plan.centre) <= max(2.0 / plan.theta, 1e-3 * middle)
            if near or not np.isfinite(middle) or attempt == 2:
                break
            plan = plan_for(laws, middle, log_delta, share)
        if high == 0.0:
            return LatticeAnswer(0.0, 0.0, 0.0, "zero")
        excess = (high - low) / (rtol * high) if np.isfinite(high) else np.inf
        length = _next_length(length, excess, pieces, memory_bytes)
    return _answer(low, high, rtol)


def delta(
    parts: Components, index: int, epsilon: float, *, rtol: float = 1e-4, memory_bytes: int = 2**30
) -> LatticeAnswer:
    """Bracket of delta_fin(epsilon) = E_P[(1 - e^{epsilon - L})_+ ; L finite] for configuration `index`.

    Arguments as in `epsilon`; the width is relative here too.
    """
    return deltas(parts, [index], np.array([epsilon]), rtol=rtol, memory_bytes=memory_bytes)[0]


def deltas(
    parts: Components, rows: Sequence[int], epsilon: np.ndarray, *, rtol: float = 1e-4, memory_bytes: int = 2**30
) -> list[LatticeAnswer]:
    """`delta` of configuration `rows[i]` at `epsilon[i]`, for each i.

    Rows of the same numbers are one configuration, whose compositions are shared.
    """
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(tuple(x[row].tobytes() for x in parts), []).append(place)
    answers = [LatticeAnswer(0.0, 0.0, 0.0, "ok")] * len(rows)
    for places in alike.values():
        laws = laws_of(parts, rows[places[0]])
        highest = _highest(laws) if laws else -np.inf
        places = sorted((place for place in places if epsilon[place] < highest), key=lambda place: epsilon[place])
        brackets = _along(laws, [float(epsilon[place]) for place in places], rtol, memory_bytes)
        for place, (low, high) in zip(places, brackets, strict=True):
            answers[place] = _answer(low, high, rtol)
    return answers


def _along(laws: list[Law], epsilon: list[float], rtol: float, memory_bytes: int) -> list[tuple[float, float]]:
    """(lower, upper) of delta at ascending eps.

    A composition made for one eps brackets delta at others too, and as narrowly where they are near: the middle one of
    those that are left is composed for, and its neighbours are read off for as long as that is narrow enough.
    """
    found = [(0.0, 1.0)] * len(epsilon)
    left = [range(len(epsilon))]
    while left:
        now = left.pop()
        if not now:
            continue
        middle = now[len(now) // 2]
        low, high, sides = _composed_for(laws, epsilon[middle], rtol, memory_bytes)
        found[middle] = low, high
        for side in (range(middle - 1, now[0] - 1, -1), range(middle + 1, now[-1] + 1)):
            for done, place in enumerate(side):
                low, high = _read(sides, epsilon[place])
                if not high - low <= rtol * high:
                    left.append(range(min(side[done:]), max(side[done:]) + 1))
                    break
                found[place] = low, high
    return found


def _composed_for(
    laws: list[Law], epsilon: float, rtol: float, memory_bytes: int
) -> tuple[float, float, tuple[_Side, _Side]]:
    """(lower, upper) of delta at one eps, and the last compositions that gave it."""
    share = share_of(rtol)
    log_delta = plan_for(laws, epsilon, 0.0, share).cut - share
    low, high = 0.0, 1.0
    pieces = laws
    length = _next_length(0, np.inf, laws, memory_bytes)
    while length:
        for _ in range(3):
            plan = plan_for(laws, epsilon, log_delta, share)
            pieces = pieces_of(laws, plan.cut)
            sides = _sides(pieces, plan, length)
            here = _read(sides, epsilon)
            low, high = max(low, here[0]), min(high, here[1])
            found = float(np.log(max(0.5 * (low + high), 1e-290)))
            if found > log_delta - 0.5:
                break
            log_delta = found
        length = _next_length(length, (high - low) / (rtol * high), pieces, memory_bytes)
    return low, high, sides


def _read(sides: tuple[_Side, _Side], epsilon: float) -> tuple[float, float]:
    """(lower, upper) of delta at an eps, from compositions for this or another."""
    down, up = sides
    return max(0.0, -float(np.expm1(epsilon)), _evaluate(down, epsilon)[0]), min(1.0, _evaluate(up, epsilon)[0])


def laws_of(parts: Components, index: int) -> list[Law]:
    """The parts of configuration `index` that are present."""
    sign = float(parts.sign[index])
    laws: list[Law] = []
    if parts.mu2[index] > 0:
        laws.append(PlainGaussian(np.sqrt(parts.mu2[index]), sign))
    gauss = (parts.gauss_sigma[index], parts.gauss_q[index], parts.gauss_n[index])
    for sigma, q, n in zip(*gauss, strict=True):
        if n > 0:
            laws.append(SampledGaussian(sigma, q, n, sign))
    laplace = (parts.laplace_scale[index], parts.laplace_q[index], parts.laplace_n[index])
    for scale, q, n in zip(*laplace, strict=True):
        if n > 0:
            laws.append(Laplace(scale, q, n, sign))
    finite = (parts.finite_loss[index], parts.finite_mass[index], parts.finite_n[index])
    for loss, mass, n in zip(*finite, strict=True):
        if n > 0:
            laws.append(Finite(loss[mass > 0], mass[mass > 0], float(n), sign))
    return laws


def pieces_of(laws: list[Law], cut: float) -> list[Law]:
    """The same composition for the lattice; what is left out of it has mass e^cut."""
    return [piece for law in laws for piece in (law.pieces(cut) if isinstance(law, Finite) else [law])]


def _highest(laws: list[Law]) -> float:
    """A loss that the composition cannot exceed, inf where there is none; at least 0."""
    size = sum(law.count * abs(law.highest()) for law in laws)
    return max(sum(law.count * law.highest() for law in laws) + 256.0 * ROUNDOFF * size, 0.0)


def _answer(low: float, high: float, rtol: float) -> LatticeAnswer:
    if not low <= high:
        return LatticeAnswer(-np.inf, np.nan, np.inf, "contradiction")
    middle = low + ESTIMATE * (high - low) if np.isfinite(high) else high
    status = "ok" if np.isfinite(high) and high - low <= rtol * high else "width"
    return LatticeAnswer(float(low), float(middle), float(high), status)


def _next_length(length: int, excess: float, laws: list[Law], memory_bytes: int) -> int:
    """The next lattice length, 0 to stop: `excess` is the width over the wanted one, and falls as length^-2.

    A length N needs about 40 + 12 R float64 arrays of N elements for R laws (measured).
    """
    fitting = _fitting(laws, memory_bytes)
    if length == 0:
        return fitting[min(1, len(fitting) - 1)]
    longer = [n for n in fitting if n > length]
    if excess <= 1.0 or not longer:
        return 0
    if not np.isfinite(excess):
        return longer[0]
    return next((n for n in longer if 2.0 * excess * (length / n) ** 2 <= 1.0), longer[-1])


def _fitting(laws: list[Law], memory_bytes: int) -> list[int]:
    return [n for n in LENGTHS if 8 * n * (40 + 12 * len(laws)) <= memory_bytes] or [LENGTHS[0]]


def _longest(laws: list[Law], memory_bytes: int) -> int:
    return _fitting(laws, memory_bytes)[-1]


def _sides(laws: list[Law], plan: Plan, length: int) -> tuple[_Side, _Side]:
    """The dominated and the dominating composition on lattices of one length."""
    extents = [law.extent(plan.theta, plan.cut, plan.share) for law in laws]
    margin = 1.0 + 8.0 / length
    span = max(plan.top - plan.bottom, *(1.01 * (high - low) for low, high in extents)) * margin
    span = max(span, 1e-12 * (abs(plan.top) + abs(plan.bottom)), 1e-290)  # a law of one atom has no extent
    step = common_step(span / (length - 4), laws)
    # a law that adjusts the step for itself, in every repetition: the one with the most to lose
    main = max(laws, key=lambda law: law.count * isinstance(law, Laplace))
    return tuple(_side(laws, extents, plan, length, main.step(step, upper), upper) for upper in (False, True))


def _side(
    laws: list[Law], extents: list[tuple[float, float]], plan: Plan, length: int, step: float, upper: bool
) -> _Side:
    placed = [law.place(extent, step, length, upper) for law, extent in zip(laws, extents, strict=True)]
    tilts = np.array([plan.theta, plan.theta + plan.above, plan.theta - plan.below])
    direction, count, origin = (
        np.array([getattr(x, name) for x in placed]) for name in ("direction", "repeats", "origin")
    )
    coefficient = direction[:, None] * tilts
    base = float(np.sum(count * direction * origin))
    centred = 0.5 * (plan.top + plan.bottom) - 0.5 * length * step
    roll = int(np.floor((centred - base) / step))
    composed = compose(jnp.stack([x.mass for x in placed]), coefficient, direction, count, step, roll % length, upper)
    logs = count[:, None] * (coefficient * origin[:, None] + np.asarray(composed.log_moments))
    k, k_above, k_below = logs.sum(axis=0)
    sizes = np.abs(coefficient[:, 0] * origin) + np.abs(np.asarray(composed.log_moments)[:, 0])
    start, span = base + roll * step, length * step
    # moments are sums in any order: n times as many units as there are nodes, over all parts
    growth = float(np.exp(min(1e-9 + ROUNDOFF * (8.0 * np.abs(logs).sum() + 2.0 * length * count.sum()), 700.0)))
    above = growth * np.exp(min(k_above - k - plan.above * (start + span), 0.0))
    below = growth * np.exp(min(k_below - k + plan.below * start, 0.0))
    rounding = 8.0 * ROUNDOFF * (2.0 * abs(base) + span + abs(start))
    return _Side(
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
        return float(-np.expm1(survival) * (1.0 + 1e-12) + LOST * sum(x.repeats for x in placed))
    growth = float(sum(x.repeats * np.log1p(x.deficit + LOST) for x in placed))
    return float(np.expm1(growth) * (1.0 + 1e-12)) if growth < LARGEST_GROWTH else float("inf")


def _evaluate(side: _Side, eps: float) -> tuple[float, float]:
    """delta(eps) rounded outward, and the derivative of log delta."""
    theta, outward = side.theta, side.shift + 8.0 * ROUNDOFF * abs(eps)
    eps = eps - outward if side.upper else eps + outward
    sums = payoff(side.composed.mass, side.start - eps, side.step, theta)
    value, slope, norm, magnitude = (float(x) for x in sums)
    length, end = side.composed.mass.shape[0], side.start + side.span - eps
    rounding = ROUNDOFF * (length + 32.0 + 8.0 * theta * side.span) * magnitude
    wrong = float(side.composed.error) * norm * (1.0 + 1e-9) + rounding + UNDERFLOW
    log_scale = side.log_moment - theta * eps
    relative = outward + 8.0 * ROUNDOFF * (side.log_size + theta * abs(eps) + 8.0)
    scale = np.exp(min(log_scale + (relative if side.upper else -relative), 700.0))
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


def _crossing(side: _Side, target: float, guess: float, tolerance: float) -> tuple[float, float]:
    """(a, b) with delta(a) > target >= delta(b), evaluated at both but for a = 0, which needs no proof.

    Newton on log delta, kept inside the bracket; b is 0 if already delta(0) <= target, inf if none was found.  An upper
    delta of 1 and a lower one of 0, which say nothing, move neither end to the wrong side.
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
