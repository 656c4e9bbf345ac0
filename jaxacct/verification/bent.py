"""delta(eps) of sampled Gaussians from a bent line, where M does not fall along the vertical one.

    delta(eps) = (1/pi) Im int_c^inf M(z) e^{-z eps}/(z (z + 1)) dz   along a line in the upper half plane

Where few steps have a hit, M tends slowly to the share of the losses near T log(1 - q).  On a line that is bent, to the
right for remove and to the left for add, e^{-z eps} makes that share fall, and the rest falls by itself.  The line is
cut in panels, each by Gauss and Legendre's rule with an error from a bound of |M| on an ellipse.  See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxacct.verification.balls import acb, arb, ball, precision, tick, within
from jaxacct.verification.contour import saddle
from jaxacct.verification.record import Unplanned
from jaxacct.verification.sampled_gaussian import ANGLES, SampledGauss, whole_between

__all__ = ["enclose", "fits"]

LEANS = (0.0, 0.1, 0.3, 0.6)
"""How far the line may go aside for each unit upward."""
ELLIPSES = (1.4, 1.8, 2.3, 3.0, 4.0)
"""Sums of the half axes of the ellipses, for a panel from -1 to 1."""
MOST_PANELS, MOST_NODES = 150, 40


@dataclass(frozen=True)
class Panel:
    """From z = start to stop, exactly the next one's start; `rho` and `count` of Gauss and Legendre's rule."""

    start: complex
    stop: complex
    rho: float
    count: int
    size: float
    """log of the bound of |f| on the ellipse, in floats."""
    angles: tuple[Any, ...]
    """For each part the angle of the line that its bound is taken on, None for the real line."""

    def enclosed(self) -> tuple[Any, Any]:
        """The middle and half the way from start to stop, as balls."""
        start, stop = (acb(arb(z.real), arb(z.imag)) for z in (self.start, self.stop))
        return (start + stop) / 2, (stop - start) / 2


def fits(parts: Any) -> bool:
    """Whether the composition has sampled Gaussians only."""
    return bool(parts) and all(isinstance(part, SampledGauss) for part, _ in parts)


def enclose(build: Any, epsilon: float, log_scale: float, digits: int) -> Any:
    """Enclose delta(epsilon) to about `digits` digits of e^log_scale."""
    wanted = log_scale - digits * np.log(10.0) - 4.0
    with precision(128):
        parts = build()
        panels, end = _plan(parts, epsilon, wanted)
    lost = max(panel.size for panel in panels) - wanted
    bits = float(np.log2(max(count for _, count in parts)) + 1.5 * max(lost, 1.0))
    with precision(int(96 + bits)):
        return _sum(build(), panels, end, ball(epsilon), wanted)


def _place(law: SampledGauss, x: Any) -> tuple[SampledGauss, Any]:
    """The law and the c > -1 at which `law` at Re z = x is evaluated: E[mix^a] with a >= 0 is the remove law's."""
    exponent = law._exponent(x)
    if exponent >= 0:
        return replace(law, direction="remove", _means={}), exponent - 1
    if exponent < 0:
        return replace(law, direction="add", _means={}), -exponent
    raise Unplanned("its bent line passes too near an end")


def _log_size(parts: Any, x: float, t: float, epsilon: float) -> float:
    """log of a bound of |M e^{-z eps}| at x and beyond t, in floats."""
    total = -x * epsilon
    for law, count in parts:
        same, c = _place(law, x)
        flat = float(same.log_mgf(np.array([c]))[0])
        total += count * (min(flat, same.log_decay(c, t)) if t > 0 else flat)
    return total


def _plan(parts: Any, epsilon: float, wanted: float) -> tuple[list[Panel], complex]:
    """The panels and where they end, in floats: each goes aside where that makes |f| small at its end."""
    sign = 1.0 if parts[0][0].direction == "remove" else -1.0
    panels: list[Panel] = []
    with np.errstate(all="ignore"):
        at = complex(saddle(parts, epsilon))
        step = 0.5 * abs(at)
        while len(panels) < MOST_PANELS:
            tick()
            if panels and _log_size(parts, at.real, at.imag, epsilon) - np.log(at.imag) < wanted:
                return panels, at
            panel = None
            while panel is None or panel.count > MOST_NODES:
                tick()
                sizes = {
                    way: _log_size(parts, (at + step * way).real, step + at.imag, epsilon)
                    for way in (complex(sign * lean, 1.0) for lean in LEANS)
                }
                # as far aside as costs next to nothing: what is near the atom falls with Re z alone
                least = min(sizes.values()) + 0.3
                way = max((x for x in sizes if sizes[x] <= least), key=lambda x: abs(x.real), default=1j)
                panel = _panel(parts, epsilon, at, at + step * way, wanted)
                step *= 0.5
                if step < 1e-12 * abs(at):
                    raise Unplanned("its bent line is too long")
            panels.append(panel)
            at = panel.stop
            step *= 4.0 if panel.count <= 0.6 * MOST_NODES else 2.2
    raise Unplanned("its bent line is too long")


def _panel(parts: Any, epsilon: float, start: complex, stop: complex, wanted: float) -> Panel | None:
    best: Panel | None = None
    middle, half = (start + stop) / 2, (stop - start) / 2
    for rho in ELLIPSES:
        reach = abs(half) * (rho + 1 / rho) / 2
        if abs(middle) < 1.05 * reach or abs(middle + 1) < 1.05 * reach:
            continue
        gap = (abs(middle) - reach) * (abs(middle + 1) - reach)
        t, sides = max(middle.imag - reach, 0.0), (middle.real - reach, middle.real + reach)
        sizes, angles = np.array([-x * epsilon for x in sides]), []
        for law, count in parts:
            places = [_place(law, x) for x in sides]
            grid = count * np.array(
                [same.log_moved(c, t) if t > 0 else np.full(ANGLES.shape, np.inf) for same, c in places]
            )
            flat = count * np.array([float(same.log_mgf(np.array([c]))[0]) for same, c in places])
            each = int(np.argmin(np.max(sizes[:, None] + grid, axis=0)))
            moved = np.max(sizes + grid[:, each]) < np.max(sizes + flat)
            angles.append(float(ANGLES[each]) if moved else None)
            sizes = sizes + (grid[:, each] if moved else flat)
        size = float(np.max(sizes) - np.log(gap))
        if not np.isfinite(size):
            continue
        # 64/15 B rho^(2 - 2n)/(1 - rho^-2) |half|
        needed = size + np.log(abs(half)) + 1.5 - np.log(1 - rho**-2) - wanted
        count = max(int(np.ceil(1 + needed / (2 * np.log(rho)))), 2)
        if best is None or count < best.count:
            best = Panel(start, stop, rho, count, size, tuple(angles))
    return best


def _sum(parts: Any, panels: list[Panel], end: complex, epsilon: Any, wanted: float) -> Any:
    total, error = acb(0), arb(0)
    for panel in panels:
        tick()
        middle, half = panel.enclosed()
        values, nodes = acb(0), [arb.legendre_p_root(panel.count, k, weight=True) for k in range(panel.count)]
        places = [middle + half * x for x, _ in nodes]
        lines = [_values(part, count, panel, places, wanted) for part, count in parts]
        for k, z in enumerate(places):
            value = (-z * epsilon).exp() / (z * (z + 1)) * nodes[k][1]
            for (_, count), line in zip(parts, lines, strict=True):
                value *= line[k] ** count
            values += value
        total += values * half
        rho = arb(panel.rho)
        share = arb(64) / 15 * rho ** (2 - 2 * panel.count) / (1 - rho**-2)
        error += share * half.abs_upper() * _largest(parts, panel, epsilon)
    # beyond the last panel the line goes straight up
    x, t = arb(end.real), arb(end.imag)
    left = (-x * epsilon).exp() / t
    for part, count in parts:
        law, c = _place(part, x)
        left *= law.decay(c, t, count) ** count
    return (total.imag + within(error.abs_upper() + left.abs_upper())) / arb.pi()


def _largest(parts: Any, panel: Panel, epsilon: Any) -> Any:
    """Upper bound of |f| on a square around the panel's ellipse: log-convex in Re z, falling in Im z."""
    rho = arb(panel.rho)
    middle, half = panel.enclosed()
    reach = half.abs_upper() * (rho + 1 / rho) / 2
    low = middle.imag - reach
    sides = [middle.real - reach, middle.real + reach]
    # M(x + it) is conj M(x - it): with t < 0 on the square, t = 0 is its worst
    t = low.max(0).lower()
    factors = [arb(1), arb(1)]
    for (part, count), angle in zip(parts, panel.angles, strict=True):
        for side, x in enumerate(sides):
            law, c = _place(part, x)
            if angle is None:
                bound = law.mean(c).abs_upper()
            else:
                flat = float(law.log_mgf(np.array([float(c.mid())]))[0])
                fallen = max(flat - law.log_decay(float(c.mid()), float(t)), 0.0)
                bound = law._moved_bound(c, t, arb(angle), float(np.log(count) + 6.0) + fallen)
            factors[side] *= bound**count
    gap = (middle.abs_lower() - reach) * ((middle + 1).abs_lower() - reach)
    if not (middle.abs_lower() > reach and (middle + 1).abs_lower() > reach):
        return arb("inf")
    both = [factor * (-x * epsilon).exp() for factor, x in zip(factors, sides, strict=True)]
    return (both[0].max(both[1]) / gap).abs_upper()


def _values(part: SampledGauss, count: int, panel: Panel, places: list[Any], wanted: float) -> list[Any]:
    """Enclosures of M at the nodes of a panel."""
    ends = [panel.start, panel.stop]
    laws = [_place(part, arb(z.real)) for z in ends]
    bits = max(panel.size - wanted, 1.0) + float(np.log(count)) + 4.0
    flats = [float(law.log_mgf(np.array([float(c.mid())]))[0]) for law, c in laws]
    size = min(law.log_decay(float(c.mid()), max(z.imag, 1e-300)) for (law, c), z in zip(laws, ends, strict=True))
    bits += max(0.0, max(flats) - size)
    h, points, logs, error = _line(laws, bits)
    found = []
    unit = acb(within(error), within(error))
    remove = part.direction == "remove"
    for z in places:
        tick()
        # M(z) = E[mix^{z + 1}], or E[mix^{-z}] = conj E[mix^{-conj z}]
        power = z + 1 if remove else -z.conjugate()
        total = acb(0)
        for weight, log in zip(points, logs, strict=True):
            total += (weight + power * log).exp()
        total = total * h / (2 * arb.pi()).sqrt() + unit
        found.append(total if remove else total.conjugate())
    return found


def _line(laws: list[tuple[SampledGauss, Any]], bits: float) -> tuple[Any, list[Any], list[Any], Any]:
    """Step, -u^2/2 and log mix on a line, and a bound of the error of the sum for any E[mix^w], Re w between two ends.

    Trapezoid rule and range have bounds that are log-convex in Re w, so that the larger of the ends' serves between.
    """
    angles = ANGLES[(1.0 if any(law.direction == "add" for law, _ in laws) else 1.5) > ANGLES]
    sigma = float(laws[0][0].sigma.mid())
    nodes, found, wanted, turn = np.inf, 0.0, 0.0, 1.0
    for each in angles:
        most = bits + max(law._log_grown(float(c.mid()), 2 * float(each)) for law, c in laws)
        count = most**1.5 / (sigma * each)
        if count < nodes:
            nodes, found, wanted, turn = count, float(each), most, most / (sigma * float(each))
    angle, h = arb(found), 2 * arb.pi() / arb(turn)
    ranges = [law._range(float(c.mid()), wanted) for law, c in laws]
    low, high = ranges[0][0].min(ranges[1][0]), ranges[0][1].max(ranges[1][1])
    law = laws[0][0]
    squares, logs = [], []
    for j in whole_between(low, high, h):
        tick()
        u = j * h
        moved = acb(u, law.sigma * angle)
        squares.append(-moved * moved / 2)
        logs.append(law._mix(u, angle).log())
    error = arb(0)
    for law, c in laws:
        mean = law.mean(c)
        left_out = law._outside(c, low, high, h, mean * (-arb(wanted)).exp()) * law._grown(c, angle)
        error = error.max(law._trapezoid(c, angle, 2 * angle, h) * mean.upper() + left_out)
    return h, squares, logs, error.abs_upper()
