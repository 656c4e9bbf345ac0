"""The picture of a claim: the best attacker's rates, as an SVG that needs nothing and prints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from jaxacct.report.readings import FALSE_POSITIVE_RATES, Readings
from jaxacct.report.rounding import percent

__all__ = ["attacker_curve"]

_LEFT, _TOP, _WIDTH, _HEIGHT = 96.0, 22.0, 464.0, 320.0
"""The plotting area, in the units of the view box."""
_DECADES = 4
"""Both axes go from 10^-4 to 1."""
_LINE, _GUESS, _INK, _GRID = "#0b5394", "#777777", "#333333", "#e2e2e2"


def attacker_curve(readings: Readings) -> str:
    """True-positive rate against false-positive rate on logarithmic axes, with the two rates of the sentences."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 410" role="img" font-family="inherit" '
        f'font-size="14" fill="{_INK}">'
    ]
    for decade in range(_DECADES + 1):
        value = 10.0 ** (decade - _DECADES)
        x, y, label = _x(value), _y(value), f"{100.0 * value:g} %"
        parts += [
            f'<path d="M{x:.1f},{_TOP} V{_TOP + _HEIGHT} M{_LEFT},{y:.1f} H{_LEFT + _WIDTH}" stroke="{_GRID}"/>',
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{label}</text>',
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    points = [(float(a), float(b)) for a, b in zip(readings.fpr, readings.tpr.upper, strict=True)]
    curve = " L".join(f"{_x(a):.1f},{_y(b):.1f}" for a, b in _above(points))
    corner = f"{_LEFT + _WIDTH:.1f},{_TOP:.1f} L{_LEFT:.1f},{_TOP:.1f}"
    parts += [
        f'<path d="M{curve} L{corner} Z" fill="{_LINE}" fill-opacity="0.08"/>',
        f'<path d="M{_x(1e-4):.1f},{_y(1e-4):.1f} L{_x(1.0):.1f},{_y(1.0):.1f}" stroke="{_GUESS}" fill="none" '
        'stroke-dasharray="5 4"/>',
        f'<path d="M{curve}" stroke="{_LINE}" stroke-width="2.5" fill="none"/>',
        f'<text x="{_LEFT + 12}" y="{_TOP + 20}" fill="{_LINE}">no attacker gets above the line</text>',
        f'<text x="{_x(2.2e-2):.1f}" y="{_y(8e-3):.1f}" fill="{_GUESS}">guessing</text>',
    ]
    for fpr in FALSE_POSITIVE_RATES:
        rate = readings.rate(fpr)
        x, y = _x(fpr), _y(rate)
        below = y < _TOP + 60.0
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{_LINE}"/>',
            f'<text x="{x - 9:.1f}" y="{y + (20.0 if below else -9.0):.1f}" text-anchor="end" fill="{_LINE}" '
            f'font-weight="bold">{escape(percent(rate))}</text>',
        ]
    middle, down = _LEFT + _WIDTH / 2, _TOP + _HEIGHT / 2
    parts += [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999999"/>',
        f'<text x="{middle}" y="{_TOP + _HEIGHT + 44}" text-anchor="middle">false-positive rate</text>',
        f'<text transform="translate(15,{down}) rotate(-90)" text-anchor="middle">true-positive rate, at most</text>',
        "</svg>",
    ]
    return "".join(parts)


def _above(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of a line that is no lower than the best attacker between the rates that were computed, either.

    True-positive rates only grow with the false-positive rate, and their quotient by it only falls.

    >>> _above([(0.1, 0.4), (0.2, 0.5)])
    [(0.1, 0.4), (0.125, 0.5), (0.2, 0.5)]
    """
    found = [*points[:1]]
    for (fpr, tpr), (after, higher) in itertools.pairwise(points):
        found += [(min(after, fpr * higher / tpr), higher)] if 0.0 < tpr < higher else []
        found.append((after, max(tpr, higher)))
    return found


def _x(value: float) -> float:
    return _LEFT + _WIDTH * _share(value)


def _y(value: float) -> float:
    return _TOP + _HEIGHT * (1.0 - _share(value))


def _share(value: float) -> float:
    """Where a rate lies on an axis, from 0 to 1; what is below the axis lies at its end."""
    return 1.0 + math.log10(min(max(value, 10.0**-_DECADES), 1.0)) / _DECADES
