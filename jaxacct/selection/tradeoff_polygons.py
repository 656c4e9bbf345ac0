"""Trade-off curves of a base as polygons above and below, from certified brackets of its privacy profile.

The concave curve `T(u) = min_r (delta(log r) + r u)` (largest P-mass of a set of Q-mass u) is convex conjugate to the
profile, so every upper end of delta is a line above it.  Between two slopes the profile lies above the extensions of
its neighbouring chords, which makes lines that stay below it: an outer and an inner polygon.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.accounting.account import delta, epsilon
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import backend, contour
from jaxacct.engines.contour import delta_about
from jaxacct.kernels.worst_mesh import CELLS, Inner, Outer
from jaxacct.mechanisms import DIRECTIONS, Components, Mechanism, batch_shape, components
from jaxacct.mechanisms.base import element
from jaxacct.selection.base_profile import finite_once

__all__ = ["Curve", "curves", "inner", "outer", "upper_hull"]

EPS_POINTS = {"closed_form": 3000, "contour": 1280, "lattice": 800}
"""Values of eps per direction, by the engine that answers: the more a value costs, the fewer are taken."""
LAST_DELTA = 1e-18
"""The profile is taken down to this delta above its mass at infinity."""
PROFILE_RTOL = 0.01
"""rtol of the profile: the contour engine goes a hundred times further down, which moves eps by 1e-5 or so."""
CONTOURS = 16
"""Contours of a direction, each for a block of neighbouring eps."""
CONTOUR_WIDTH = 1e-4
"""Relative width of a bracket that a shared contour leaves; where it leaves more, an eps is asked for by itself."""
ASKED_AGAIN = 8
"""Where it leaves no lower end, one eps of so many is."""
CLOSED_SHARE = 0.5
"""A bracket whose lower end is below this share of its upper end is left out of the polygon below, which it would pull
down on either side; the chords of its neighbours say more."""
VALUE_ERROR = 1e-12
"""Relative allowance for the arithmetic on a value of the profile."""
LINE_EPS = 650.0
"""Largest eps of a line: its exp is far from overflow.  Above, mass of larger losses counts as mass at infinity."""
LEAST_Q_MASS = 1e-290
"""Least Q-mass of an atom, below: where float64 loses the mass, a larger one is still below the curve."""
ASKED_EPS = 600.0
"""Largest eps that the engines are asked for."""
STEEPEST_SLOPE = 1e290
"""Largest slope of the polygon below, far from overflow."""


class Curve(NamedTuple):
    """One direction of a base: a polygon above its curve and one below, of CELLS cells each."""

    above: Outer
    below: Inner


def curves(run: Mechanism, coarse: bool = False) -> list[dict[str, Curve]]:
    """For each configuration the curves of its directions; where it is symmetric they are one object.

    coarse : whether engines are asked for half as many points of the profile.
    """
    shape = batch_shape(run)
    return [_of_one(element(run, index) if shape else run, coarse) for index in np.ndindex(shape)]


def _of_one(run: Mechanism, coarse: bool) -> dict[str, Curve]:
    parts = [components(run, "add_or_remove_one", direction) for direction in DIRECTIONS]
    exact = all(map(finite_once, parts))
    ratio, low, high = _by_sum(run, parts) if exact else _by_engine(run, parts, coarse)
    inside = [_by_atoms(part) for part in parts] if exact else [None, None]
    remove = _curve(*_joined(ratio, low, high), inside[0])
    # the directions may be alike at some parameters only, such as a sampling probability of 1
    alike = run.symmetric() or (not exact and np.array_equal(low[0], low[1]) and np.array_equal(high[0], high[1]))
    add = remove if alike else _curve(*_joined(ratio, low[::-1], high[::-1]), inside[1])
    return dict(zip(DIRECTIONS, (remove, add), strict=True))


def _by_engine(run: Mechanism, parts: list[Components], coarse: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(eps, lower, upper) with ends of shape (2, K): delta for remove and add at eps >= 0."""
    names = ["add_or_remove_one"] * 2 if run.symmetric() else ["remove_one", "add_one"]
    known: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    infinite = max(float(part.delta_infinity[0]) for part in parts)
    lasts = {name: _last(run, LAST_DELTA + 1.001 * infinite, name) for name in names}
    first, at_most = min(lasts.values()), max(lasts.values())
    if first == ASKED_EPS and all(
        float(epsilon(run, 0.5, relation=name, rtol=PROFILE_RTOL).lower) > ASKED_EPS for name in names
    ):
        # half of the mass has losses beyond the engines' range: the bounds from the base alone answer instead
        at = np.array([0.0, 0.5 * ASKED_EPS, ASKED_EPS])
        return at, np.zeros((2, 3)), np.ones((2, 3))
    with backend.job(1, apart=True):  # one base's profile
        found = delta(run, 0.5 * at_most, relation=names[0], rtol=PROFILE_RTOL)
        engine = str(found.engine)
        count = EPS_POINTS.get(engine, EPS_POINTS["lattice"]) // (2 if coarse else 1)
        early = round(count * max(first / at_most, 0.5))  # as far as both directions go; beyond that there is one
        at = np.concatenate([np.linspace(0.0, first, early), np.linspace(first, at_most, count - early + 1)[1:]])
        # what the contour engine cannot resolve stays open: the lattice engine would compute it value by value
        chosen = (
            "contour" if engine == "contour" and all(contour.reach(part).answers.all() for part in parts) else "auto"
        )
        shared = chosen == "contour" and infinite == 0.0 and str(found.kind) == "certified"
        for part, (name, last) in zip(parts, lasts.items(), strict=False):
            within = at[at <= last]
            low, high = np.zeros(within.size), np.ones(within.size)
            wide = np.arange(within.size)
            if shared:
                low, high = _on_few_contours(part, within)
                wide = np.flatnonzero(high - low > CONTOUR_WIDTH * high)
                nothing = low[wide] == 0.0  # then a contour for each eps hardly ever says more
                wide = np.append(wide[~nothing], wide[nothing][::ASKED_AGAIN])
            if wide.size:
                rest = delta(run, within[wide], relation=name, engine=chosen, rtol=PROFILE_RTOL)
                low[wide], high[wide] = rest.lower, rest.upper
            high = np.minimum.accumulate(high)  # delta falls
            behind = at.size - within.size
            known[name] = np.append(low, np.zeros(behind)), np.append(high, np.full(behind, high[-1]))
    ends = [np.stack([known[name][i] for name in names]) for i in (0, 1)]
    return at, ends[0], ends[1]


def _on_few_contours(part: Components, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of delta at rising eps, CONTOURS contours for all of them; 0 and 1 where nothing is known."""
    blocks = -(-eps.size // CONTOURS)
    padded = np.append(eps, np.full(-eps.size % blocks, eps[-1])).reshape(-1, blocks)
    rows = part.take(np.zeros(len(padded), int))
    found = delta_about(rows, padded, np.zeros(padded.shape), CONTOUR_WIDTH, contour.TOLERANCE)
    outward = 4.0 * ROUNDOFF * np.array([[-1.0], [1.0]])
    low, high = np.stack([end.reshape(-1)[: eps.size] for end in (found.lower, found.upper)]) * (1.0 + outward)
    return low, np.minimum(high, 1.0)


def _last(run: Mechanism, level: float, relation: str) -> float:
    """An eps at which delta has fallen to a level."""
    with backend.job(1, apart=True):
        found = float(epsilon(run, min(level, 1.0 - ROUNDOFF), relation=relation, rtol=PROFILE_RTOL).upper)
    return min(max(found, 1e-6), ASKED_EPS)


def _by_sum(run: Mechanism, parts: list[Components]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same for a finite law, at its atoms: delta = sum_i p_i (1 - e^{eps - l_i})_+ + p_infinity."""
    losses = np.concatenate([np.abs(part.finite_loss[0, 0][part.finite_mass[0, 0] > 0.0]) for part in parts])
    at = np.unique(np.concatenate([[0.0], losses]))
    at = at[np.concatenate([[True], np.diff(at) > 1e-12])]
    # beyond the last atom there is nothing but mass at infinity
    at = np.append(at, at[-1] + 50.0) if at[-1] < LINE_EPS - 50.0 else np.append(at[at < LINE_EPS], LINE_EPS)
    low, high = [], []
    for part in parts:
        loss, mass = part.finite_loss[0, 0], part.finite_mass[0, 0]
        shift = 8.0 * ROUNDOFF * (np.abs(loss)[None] + at[:, None])
        gap = loss[None] - at[:, None]
        error = 1.0 + VALUE_ERROR * np.array([[-1.0], [1.0]])[:, None]
        ends = [
            np.sum(mass * e * np.maximum(-np.expm1(-np.maximum(gap + s * shift, 0.0)), 0.0), axis=1)
            for s, e in zip((-1.0, 1.0), error, strict=True)
        ]
        low.append(ends[0] + part.delta_infinity[0] * (1.0 - VALUE_ERROR))
        high.append(ends[1] + part.delta_infinity[0] * (1.0 + VALUE_ERROR))
    return at, np.stack(low), np.minimum(np.stack(high), 1.0)


def _by_atoms(part: Components) -> tuple[np.ndarray, np.ndarray]:
    """(u, T) at the knots below the curve of a finite law: masses in order of the loss, scaled towards T = 0, u = 1."""
    order = np.argsort(-part.finite_loss[0, 0], kind="stable")
    loss, mass = part.finite_loss[0, 0][order], part.finite_mass[0, 0][order]
    loss, mass = loss[mass > 0.0], mass[mass > 0.0]
    with np.errstate(over="ignore"):
        u = np.cumsum(np.maximum(mass * np.exp(-loss), LEAST_Q_MASS))
    u = np.minimum(u * (1.0 + VALUE_ERROR), 1.0)
    t = (np.cumsum(mass) + part.delta_infinity[0]) * (1.0 - VALUE_ERROR)
    u, t = np.concatenate([[0.0], u, [1.0]]), np.concatenate([part.delta_infinity * (1.0 - VALUE_ERROR), t, [1.0]])
    chain = upper_hull(u, t)
    return u[chain], t[chain]


def _joined(eps: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ratio ascending, lower, upper) over both signs of eps: delta(-eps) = 1 - e^-eps (1 - reverse(eps))."""
    shrink = np.exp(-eps)
    reverse = [-np.expm1(-eps) + shrink * end for end in (low[1], high[1])]
    keep = eps > 0.0
    ratio = np.concatenate([shrink[keep][::-1], np.exp(eps)])
    lower = np.concatenate([reverse[0][keep][::-1], low[0]]) * (1.0 - VALUE_ERROR)
    upper = np.concatenate([reverse[1][keep][::-1], high[0]]) * (1.0 + VALUE_ERROR)
    # e^eps is rounded: delta is convex, so over that it moves by less than the chord before it says, and than e^eps
    steepest = np.minimum(upper[:-1] / np.diff(ratio), 1.0)
    moved = 4.0 * ROUNDOFF * (1.0 + np.abs(np.log(ratio[1:]))) * ratio[1:] * steepest
    upper[1:] += moved
    lower[1:] -= moved
    return ratio, np.maximum(lower, np.maximum(1.0 - ratio, 0.0)), np.minimum(upper, 1.0)


def _curve(ratio: np.ndarray, low: np.ndarray, high: np.ndarray, inside: tuple[np.ndarray, np.ndarray] | None) -> Curve:
    slopes, u, t = outer(ratio, high)
    below_u, below_t = inner(ratio, low, high) if inside is None else inside
    cell, place_u, place_t = _cut(u, t)
    _, inside_u, inside_t = _cut(below_u, below_t)
    twin = np.searchsorted(inside_u, place_u)
    return Curve(Outer(slopes[cell], place_u, place_t, twin), Inner(inside_u, inside_t))


def outer(ratio: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slopes, u, T) of a concave polygon above the curve, from upper ends of delta at ratios e^eps, ascending."""
    keep = np.unique(np.linspace(0, ratio.size - 1, CELLS - 1).round().astype(int))  # any of the lines will do
    r, d = np.concatenate([[0.0], ratio[keep]])[::-1], np.concatenate([[1.0], upper[keep]])[::-1]
    return _envelope(r, np.minimum(d, 1.0), 1.0 + 4.0 * ROUNDOFF)


def inner(ratio: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(u, T) at the knots of a polygon below the curve, from brackets of delta at ascending ratios.

    A bracket that is nearly open would pull the polygon down to its line everywhere.  It is left out, since the chords
    of its neighbours say more.
    """
    ratio, lower, upper = (x[lower >= CLOSED_SHARE * upper] for x in (ratio, lower, upper))
    lower = np.maximum(lower, 1.0 - ratio)
    # delta(r) >= 1 - r stands in for a chord on the left; beyond the last ratio delta is at least 0 and falls
    r = np.concatenate([[0.0], ratio])
    low, high = np.concatenate([[1.0], lower]), np.concatenate([[1.0], upper])
    fall = np.concatenate([[-1.0], (low[1:] - high[:-1]) / np.diff(r)])  # steepest slope with which delta goes on
    rise = np.minimum(np.concatenate([(high[1:] - low[:-1]) / np.diff(r), [0.0]]), 0.0)  # flattest before it
    a, b = slice(None, -1), slice(1, None)
    # the extension from the left of r_k, low_k + fall_k (r - r_k), meets the one from the right of r_{k+1}
    steep = rise[b] - fall[a]
    gap = low[b] - low[a] - fall[a] * (r[b] - r[a])
    meet = np.clip(r[b] - np.where(steep > 0.0, gap / np.where(steep > 0.0, steep, 1.0), 0.0), r[a], r[b])
    at = np.maximum(low[a] + fall[a] * (meet - r[a]), low[b] + rise[b] * (meet - r[b]))
    with np.errstate(over="ignore"):
        end = r[-1] - low[-1] / fall[-1] if fall[-1] < 0.0 else 2.0 * r[-1]
    if not end >= 1.0:  # all that is known is for slopes below one: nothing lies below T(u) >= u
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    slopes = np.concatenate([r, meet, [min(end, STEEPEST_SLOPE)]])
    values = np.concatenate([low, at, [0.0]])
    order = np.lexsort((-values, slopes))[::-1]
    _, u, t = _envelope(slopes[order], values[order], 1.0 - 1e-13)
    return u, t


def _envelope(r: np.ndarray, d: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slopes and knots in [0, 1] of min_k (d_k + r_k u) for descending slopes r, the last of which is 0."""
    keep: list[int] = []
    slopes, heights = r.tolist(), d.tolist()
    for k, (slope, height) in enumerate(zip(slopes, heights, strict=True)):
        if keep and slopes[keep[-1]] == slope:
            if heights[keep[-1]] <= height:
                continue
            keep.pop()
        while keep and height <= heights[keep[-1]]:
            keep.pop()  # lower and flatter: the one before never counts
        while len(keep) > 1:
            a, b = keep[-2], keep[-1]
            if (height - heights[a]) * (slopes[a] - slopes[b]) > (heights[b] - heights[a]) * (slopes[a] - slope):
                break
            keep.pop()
        keep.append(k)
    r, d = r[keep], d[keep]
    u = np.concatenate([[0.0], np.diff(d) / -np.diff(r), [1.0]])
    u = np.minimum(np.maximum.accumulate(u), 1.0)
    left, right = d[:-1] + r[:-1] * u[1:-1], d[1:] + r[1:] * u[1:-1]
    between = np.maximum(left, right) * rounding if rounding > 1.0 else np.minimum(left, right) * rounding
    t = np.concatenate([[d[0]], between, [1.0]])
    return r, u, np.minimum(np.maximum.accumulate(t), 1.0)


def upper_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the upper concave hull of points whose x does not decrease.

    A point on or below the segment between its neighbours is left out, every second such point at a time: then its
    neighbours are still there, so that roundings add up over the passes only: some 160 for 15,000 points.
    """
    kept = np.lexsort((y, x))  # of points with one x the last is the highest
    kept = kept[np.append(x[kept[1:]] != x[kept[:-1]], True)] if kept.size else kept
    quiet, parity = 0, 0
    while quiet < 2 and kept.size > 2:
        along, up = np.diff(x[kept]), np.diff(y[kept])
        below = ~(up[:-1] * along[1:] > up[1:] * along[:-1])
        below[parity::2] = False
        quiet = 0 if below.any() else quiet + 1
        parity = 1 - parity
        kept = kept[np.concatenate([[True], ~below, [True]])]
    return kept


def _cut(u: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cell, u, T) of exactly CELLS cells, cut from fewer; from more (inside only) by leaving out knots."""
    if u.size - 1 > CELLS:
        keep = np.linspace(0, u.size - 1, CELLS + 1).round().astype(int)
        return keep[:-1], u[keep], t[keep]
    # finer where the odds that T stands for change fast, at both ends
    spread = np.abs(np.diff(np.log(t + 1e-7))) + np.abs(np.diff(np.log1p(1e-4 - t))) + 1e-9
    spare = CELLS - (u.size - 1)
    pieces = 1 + np.floor(spare * spread / spread.sum()).astype(int)
    pieces[np.argmax(spread)] += CELLS - pieces.sum()
    cell = np.repeat(np.arange(u.size - 1), pieces)
    start = np.repeat(np.cumsum(pieces) - pieces, pieces)
    share = (np.arange(CELLS) - start) / pieces[cell]
    cut_u, cut_t = u[cell] + share * np.diff(u)[cell], t[cell] + share * np.diff(t)[cell]
    return cell, np.append(cut_u, 1.0), np.append(np.minimum(cut_t, 1.0), 1.0)
