"""The risks of a claim: the largest success of an attacker who sees the output, in numbers and as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.text import percent
from jaxacct.mechanisms import Mechanism, PrivacyProfile
from jaxacct.report.claim import Claim
from jaxacct.representations.mechanism_profile import profile
from jaxacct.selection.any_selection import AnySelection

_LEFT, _TOP, _WIDTH, _HEIGHT = 96.0, 22.0, 464.0, 320.0
"""The plotting area of the picture (left, top, width, height), in the units of the SVG's view box."""
_DECADES = 4
"""Number of decades on both axes, which go from 10^-4 to 1."""
_LINE, _GUESS, _INK, _GRID = "#0b5394", "#777777", "#333333", "#e2e2e2"
FALSE_POSITIVE_RATES = (1e-2, 1e-3)
"""Rates at which a report states the true-positive rate."""
_DRAWN = np.geomspace(1e-4, 1.0, 129)
"""Rates at which the picture's line has points."""


class Readings(NamedTuple):
    """Brackets of the largest success of any attacker."""

    tpr: Bounds  # the largest true-positive rate at each of FALSE_POSITIVE_RATES
    drawn: np.ndarray  # upper bounds of the true-positive rate at each of _DRAWN
    advantage: Bounds  # the largest difference tpr - fpr
    prior: float  # the probability, before the output is seen, that the record was used
    posterior: Bounds  # largest probability that the record was used if the attacker says so, at FALSE_POSITIVE_RATES
    bayes_success: Bounds  # the largest probability, given the prior, that the attacker's guess is right

    def rate(self, fpr: float) -> float:
        """Return the upper end of the true-positive rate at `fpr`, which is one of `FALSE_POSITIVE_RATES`."""
        return float(self.tpr.upper[FALSE_POSITIVE_RATES.index(fpr)])

    def as_bounds(self) -> Readings:
        """Return the readings with lower ends 0: they hold for every mechanism that leaks no more than the one read."""
        tpr, advantage, posterior, success = (
            Bounds(np.zeros_like(b.upper), b.upper, b.upper, "bound", "ok", b.engine)
            for b in (self.tpr, self.advantage, self.posterior, self.bayes_success)
        )
        return self._replace(tpr=tpr, advantage=advantage, posterior=posterior, bayes_success=success)


def readings_of(claim: Claim, prior: float) -> Readings | None:
    """Return the risks of a claim; None if nothing may be claimed, or if no finite risks follow from the claim."""
    if not claim.may_be_claimed:
        return None
    mechanism, relation, points = claim.mechanism, claim.relation, claim.profile
    epsilon, delta = (claim.upper, claim.given) if claim.quantity == "epsilon" else (claim.given, claim.upper)
    if points is None and isinstance(mechanism, AnySelection):  # its whole profile would take too long
        at = np.array([0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0]) * epsilon if epsilon > 0.0 else np.zeros(1)
        points = tuple(zip(at.tolist(), np.asarray(profile(mechanism, relation).delta(at).upper).tolist(), strict=True))
    if points is not None:
        both = relation not in ("add_one", "remove_one")  # `by_points` needs points that hold in both directions
        stand_in = by_points([*points, (epsilon, delta)]) if both else None
        found = None if stand_in is None else _read(stand_in, "add_or_remove_one", prior).as_bounds()
    else:
        found = None if mechanism is None else _read(mechanism, relation, prior)
    finite = found is not None and all(np.isfinite(b.upper).all() for b in found if hasattr(b, "upper"))
    return found if finite else None


def _read(mechanism: Mechanism, relation: str, prior: float) -> Readings:
    known = profile(mechanism, relation)
    tpr = known.true_positive_rate(FALSE_POSITIVE_RATES)
    advantage = known.advantage()
    posterior = known.posterior(prior, FALSE_POSITIVE_RATES)
    # TPR <= delta(eps) + e^eps FPR at every real eps; no rate drawn needs an eps whose e^eps FPR is above 1
    farthest = min(float(known.epsilon(1e-6).upper), -math.log(_DRAWN[0]))
    eps = np.linspace(-farthest, farthest, 81)
    lines = np.asarray(known.delta(eps).upper)[:, None] + np.exp(eps)[:, None] * _DRAWN
    drawn = np.minimum(lines.min(axis=0) * (1.0 + 4.0 * np.finfo(float).eps), 1.0)
    return Readings(tpr, drawn, advantage, prior, posterior, known.bayes_success(prior))


def by_points(points: Sequence[tuple[float, float]]) -> PrivacyProfile | None:
    """Return a mechanism that in both directions leaks as much as any with these `points`. None if no point helps."""
    kept: list[tuple[float, float]] = []
    for epsilon, delta in sorted(points):
        if not (np.isfinite(epsilon) and 0.0 <= delta < 1.0) or (kept and delta >= kept[-1][1]):
            continue
        least = kept[-1][0] + 1e-4 if kept else 1e-4 if epsilon else 0.0
        epsilon = max(epsilon, least)  # a larger epsilon is safe: the delta of a profile never grows with epsilon
        kept.append((epsilon, delta))
    return PrivacyProfile([e for e, _ in kept], [d for _, d in kept]) if kept else None


def attacker_curve(readings: Readings) -> str:
    """Draw the true-positive rate against the false-positive rate on logarithmic axes, as SVG text."""
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
    points = list(zip(_DRAWN.tolist(), readings.drawn.tolist(), strict=True))
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
    """Given (FPR, TPR) points on or above the best attacker's curve, return the corners of a line nowhere below it."""
    # As FPR grows, TPR never falls and TPR/FPR never grows. So between two points TPR is at most that of the right
    # point, and at most FPR times the TPR/FPR of the left point.
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
    """Return the position of a rate on its axis, from 0 to 1 (0 for a rate below the axis)."""
    return 1.0 + math.log10(min(max(value, 10.0**-_DECADES), 1.0)) / _DECADES
