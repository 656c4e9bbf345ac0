"""The bracket of E(S - k)_+ and E(k - S)_+ from the contour and the closed forms beside it (README.md, section 1).

Chernoff's bound of the put is cheap, and settles most of the smaller directions (README.md, section 7).
"""

from typing import NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.allocation.cutoff import log_images, log_power
from jaxacct.kernels.allocation.law import ROOM, Windows, cells_of, cuts_of, tail
from jaxacct.kernels.allocation.placement import (
    TOLERANCE,
    Place,
    place,
    place_of_bulk,
    place_split,
    replaced,
    tilted_mode,
)
from jaxacct.kernels.allocation.quadrature import panels_of
from jaxacct.kernels.allocation.transform import Powers, powers_on, turned_by
from jaxacct.kernels.arrays import Array
from jaxacct.kernels.special import log_ndtr

__all__ = ["Contour", "bracket_near", "brackets_at", "contours_at", "estimate_near", "put_below", "rows_of"]

CELLS = 48
"""Cells of the grid."""
ABSCISSAS = 12
"""Abscissas that are tried."""
REACH = 8.6
"""Deviations of the standard normal law that the cells cover; the rest is bounded by its mass."""
TERMS_TOGETHER = 6000
"""Nodes of lines that are evaluated together, over all rows: what they need stays near the processor."""
LONG_BULK = 100
"""Nodes of the bulk's line above which a bulk that ends lower is tried."""
LOWER_SHARES = (0.25, 0.15)
"""Where that bulk ends, as a share of the threshold's distance from the mean: more jumps, and no chance of the bulk."""


class Contour(NamedTuple):
    """A contour that has been evaluated, for thresholds near the one it was placed for."""

    sign: float
    s: Array
    t: Array
    place: Place
    powers: Powers
    bulk: "Contour | None"
    """The contour of A^t by itself; None where there is no bulk, or Chernoff's bound of it suffices."""


def contours_at(
    sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array | float = TOLERANCE
) -> list[tuple[Array, Contour]]:
    """Place contours for E(S - k)_+ (sign = 1) or E(k - S)_+ (sign = -1), and evaluate them; all (B,).

    Rows whose lines are about as long come together, with their numbers, and short ones are not padded to long ones.
    """
    tolerance = np.broadcast_to(tolerance, s.shape)
    where = place(sign, s, t, k, guess, tolerance)
    goal = guess + np.log(tolerance)
    rows = np.flatnonzero(_bulk_chance(where, k) > goal) if sign > 0 else np.zeros(0, int)
    if rows.size == 0:
        return _evaluated(sign, s, t, where)
    below = place_of_bulk(s[rows], t[rows], k[rows], guess[rows], tolerance[rows], _rows_of(where, rows))
    for share in LOWER_SHARES:
        long = np.flatnonzero(below.line.count > LONG_BULK)
        if long.size == 0:
            break
        some = rows[long]
        other = place_split(s[some], t[some], k[some], guess[some], tolerance[some], share)
        shorter = other.line.count < where.line.count[some] + below.line.count[long]
        alone = np.flatnonzero((_bulk_chance(other, k[some]) <= goal[some]) & shorter)
        where = replaced(where, some[alone], _rows_of(other, alone))
        kept = np.setdiff1d(np.arange(rows.size), long[alone])
        rows, below = rows[kept], _rows_of(below, kept)
    rest = np.setdiff1d(np.arange(s.size), rows)
    found = [(rest[at], one) for at, one in _evaluated(sign, s[rest], t[rest], _rows_of(where, rest))]
    above = _evaluated(sign, s[rows], t[rows], _rows_of(where, rows), below)
    return found + [(rows[at], one) for at, one in above]


def _rows_of(where: Place, rows: Array) -> Place:
    return jax.tree.map(lambda x: x[rows], where)


def _evaluated(sign: float, s: Array, t: Array, where: Place, bulk: Place | None = None) -> list[tuple[Array, Contour]]:
    """Contours placed at `where`, and beside each the one of its bulk, in groups of lines that are about as long."""
    longest = where.line.count if bulk is None else np.maximum(where.line.count, bulk.line.count)
    length = np.ceil(np.log2(longest + 1.0))
    found = []
    with np.errstate(all="ignore"):
        for one in np.unique(length):
            alike = np.flatnonzero(length == one)
            size = max(int(TERMS_TOGETHER / 2.0**one), 1)
            for rows in (alike[first : first + size] for first in range(0, alike.size, size)):
                below = None if bulk is None else _contour(sign, s[rows], t[rows], _rows_of(bulk, rows), None)
                found.append((rows, _contour(sign, s[rows], t[rows], _rows_of(where, rows), below)))
    return found


def _contour(sign: float, s: Array, t: Array, where: Place, bulk: Contour | None) -> Contour:
    line, windows = where.line, where.windows
    ends = panels_of(s, t, windows, np.hypot(line.c, line.count * line.step))
    return Contour(sign, s, t, where, powers_on(line, s, t, windows, ends, sign), bulk)


def rows_of(found: Contour, rows: Array) -> Contour:
    """Some rows of a contour, in any order and as often as wanted."""
    place_of, powers = jax.tree.map(lambda x: x[rows], (found.place, found.powers))
    bulk = None if found.bulk is None else rows_of(found.bulk, rows)
    return Contour(found.sign, found.s[rows], found.t[rows], place_of, powers, bulk)


def brackets_at(
    sign: float, s: Array, t: Array, k: Array, guess: Array, tolerance: Array | float = TOLERANCE
) -> tuple[Array, Array, Array, Array]:
    """(lower, estimate, upper, slope) at the thresholds that contours are placed for, as from `bracket_near`."""
    ends = np.empty((4, len(s)))
    for rows, contour in contours_at(sign, s, t, k, guess, tolerance):
        ends[:, rows] = bracket_near(contour, k[rows])
    return ends[0], ends[1], ends[2], ends[3]


def bracket_near(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    """(lower, estimate, upper) of the value at k, and estimates of Q(S > k) or Q(S < k), its derivative's size; (B,).

    The bracket holds for every threshold within 8 units of k.
    """
    with np.errstate(all="ignore"):
        return _bracket(found, k)


def estimate_near(found: Contour, k: Array) -> tuple[Array, Array]:
    """(estimate, slope) as `bracket_near` has them, for a fraction of its work."""
    with np.errstate(all="ignore"):
        mid, slope = _outside(found, k)[:2]
        for one in (found,) if found.bulk is None else (found, found.bulk):
            plain, slope_here = _sums(one, _turned(one, k))
            scale = _scale(one, k)
            mid, slope = mid + scale * plain, slope + scale * slope_here
    return mid, slope


def _bracket(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    low, mid, high, slope = _beside(found, k)
    for one in (found,) if found.bulk is None else (found, found.bulk):
        ends = _integrated(one, k)
        low, mid, high, slope = low + ends[0], mid + ends[1], high + ends[2], slope + ends[3]
    low, high = low - 8.0 * ROUNDOFF * np.abs(low), high + 8.0 * ROUNDOFF * np.abs(high)
    good = low <= high
    low, high = np.where(good, low, -np.inf), np.where(good, high, np.inf)
    return low, np.clip(np.where(good, mid, 0.0), low, high), high, slope


def _scale(found: Contour, k: Array) -> Array:
    return np.exp(found.powers.log_scale - found.sign * found.place.line.c * k)


def _turned(found: Contour, k: Array) -> Array:
    """The integrand at the nodes without 1/z^2, relative to its scale, (B, N)."""
    turned = found.powers.value * (1.0 + turned_by(-found.sign * found.powers.turn * k[:, None]))
    turned[:, 0] *= 0.5
    return turned


def _sums(found: Contour, turned: Array) -> tuple[Array, Array]:
    """The integrals of turned/z^2 and turned/z, relative to the scale."""
    line = found.place.line
    over = turned / (line.c[:, None] + 1j * found.powers.turn)
    plain = np.sum((over / (line.c[:, None] + 1j * found.powers.turn)).real, axis=1)
    return plain * line.step / np.pi, np.sum(over.real, axis=1) * line.step / np.pi


def _integrated(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    """(lower, estimate, upper, slope) of the integral on one line."""
    sign, where, powers = found.sign, found.place, found.powers
    c, step, period = where.line.c, where.line.step, 2.0 * np.pi / where.line.step
    scale, turned = _scale(found, k), _turned(found, k)
    plain, slope = _sums(found, turned)
    half = np.ones(powers.turn.shape[1])
    half[0] = 0.5
    size = c[:, None] ** 2 + powers.turn**2
    phase = powers.turn * k[:, None]
    wrong = powers.error * half + np.abs(turned) * ROUNDOFF * (40.0 + turned.shape[1] + 12.0 * phase)
    wrong = np.sum(wrong / size, axis=1) * step / np.pi * (1.0 + 1e-9)
    wrong = wrong + (np.abs(plain) + wrong) * ROUNDOFF * (60.0 + 6.0 * (np.abs(powers.log_scale) + 4.0 * c * k))
    cut = np.exp(where.log_beyond - sign * c * k) * (1.0 + 8.0 * ROUNDOFF * (16.0 + np.abs(where.log_beyond) + c * k))
    ratio = np.exp(-c * period)
    if sign > 0:
        near_images = ratio * (1.0 + period) / (1.0 - ratio) ** 2
    else:
        near_images = ratio * (k + period) / (1.0 - ratio) ** 2
    right = log_images(k, c, period, where.far, where.log_far, sign)
    images = near_images * (1.0 + 1e-9 + 8.0 * ROUNDOFF * c * period) + np.exp(right + 1e-9)
    return scale * (plain - wrong) - cut - images, scale * plain, scale * (plain + wrong) + cut, scale * slope


def _outside(found: Contour, k: Array) -> tuple[Array, Array, Array]:
    """(value, slope, bound of its rounding) of the closed forms of what is not integrated."""
    sign, s, t, windows = found.sign, found.s, found.t, found.place.windows
    whole: Array = np.isneginf(windows.low)
    if sign > 0:
        root = np.sqrt(1.0 + windows.high_blur**2)
        far, far_x = tail(windows.high / root), tail((windows.high - s) / root)
        gone, gone_x = t * np.log1p(-far), np.log1p(-far_x) + (t - 1.0) * np.log1p(-far)
        first, second = -np.expm1(gone_x), -np.expm1(gone)
        units = (80.0 + 8.0 * (windows.high + s) ** 2) * ROUNDOFF
        return first - k * second, second, units * (first + k * second)
    if whole.all():
        return np.zeros_like(k), np.zeros_like(k), np.zeros_like(k)
    m, mx, shrunk, units = _all_bulk(windows, s, t, whole)
    value, doubt = shrunk * (k * m - mx), units * shrunk * (k * m + mx)
    return np.where(whole, 0.0, value), np.where(whole, 0.0, shrunk * m), np.where(whole, 0.0, doubt)


def _all_bulk(windows: Windows, s: Array, t: Array, whole: Array) -> tuple[Array, Array, Array, Array]:
    """E w1, E[X w1], (E w1)^{t-1}, and the relative rounding of what they make up."""
    root, at = np.sqrt(1.0 + windows.low_blur**2), np.where(whole, 0.0, windows.low)
    log_m, log_mx = log_ndtr(at / root), log_ndtr((at - s) / root)
    units = (60.0 + 10.0 * t * (1.0 + np.abs(log_m)) + 8.0 * (np.abs(at) + s) ** 2) * ROUNDOFF
    return np.exp(log_m), np.exp(log_mx), np.exp((t - 1.0) * log_m), units


def _beside(found: Contour, k: Array) -> tuple[Array, Array, Array, Array]:
    """(lower, estimate, upper, slope) of what is not integrated: slots beyond the far window, and bulk alone."""
    sign, s, t, where = found.sign, found.s, found.t, found.place
    windows = where.windows
    whole: Array = np.isneginf(windows.low)
    value, slope, doubt = _outside(found, k)
    low, high = value - doubt, value + doubt
    if sign > 0:
        far = tail(windows.high / np.sqrt(1.0 + windows.high_blur**2))
        lost = tail((windows.end - windows.high) / windows.high_blur) * (tail(windows.end - s) + t * tail(windows.end))
        high = high + _far_but_small(windows, s, t, k, far) + lost
        if found.bulk is not None:
            differs = _bulk_differs(windows, np.minimum(found.bulk.place.windows.end, windows.end), s, t)
            low, high = low - differs, high + differs
        elif not whole.all():
            high = high + np.exp(_bulk_chance(where, k))
    elif not whole.all():
        m, mx, shrunk, _ = _all_bulk(windows, s, t, whole)
        at = np.where(whole, 0.0, windows.low)
        edge = np.log(k) / s + 0.5 * s  # S > k needs a slot above k
        # beyond the edge w1 <= Phi(-d) e^{-d (u - edge)/blur}
        d = (edge - at) / windows.low_blur
        pull = d / windows.low_blur
        leak_x = log_ndtr(-d) + pull * edge - 0.5 * s * s + 0.5 * (s - pull) ** 2 + log_ndtr(s - pull - edge)
        leak = log_ndtr(-d) + pull * edge + 0.5 * pull**2 + log_ndtr(-pull - edge)
        over = shrunk * (np.exp(leak_x) + t * np.exp(leak) * mx / m) * (1.0 + 1e-6)
        high = high + np.where(whole, 0.0, np.where(d > 0.0, over, np.inf))
    return low, 0.5 * (low + high), high, slope


def _bulk_chance(where: Place, k: Array) -> Array:
    """log of Chernoff's bound of the call on the bulk alone, (B,); -inf where there is no bulk."""
    each = where.log_bulk - where.far * k[:, None] - 1.0 - np.log(where.far)
    return np.where(np.isneginf(where.windows.low), -np.inf, np.min(np.where(np.isnan(each), np.inf, each), axis=1))


def _bulk_differs(windows: Windows, end: Array, s: Array, t: Array) -> Array:
    """A bound of |E(S - k)_+| over the law w1 w2 less that over the law w1 up to `end`, all slots of either, (B,).

    (S - k)_+ <= S, and slots are exchanged one by one: t (m + m_x), m and m_x the mass and the mean of X/t where the
    laws differ.  Beyond `end` w1 <= Phi(-(end - low)/blur_1); w1 (1 - w2) <= e^{-d^2/2(blur_1^2 + blur_2^2)} above low,
    d = high - low, and <= Phi(-d/blur_2) below.
    """
    low, blur, gap = windows.low, windows.low_blur, windows.high - windows.low
    beyond = tail((end - low) / blur) * (t * tail(end) + tail(end - s))
    both = np.exp(-0.5 * gap * gap / (blur**2 + windows.high_blur**2)) * (t * tail(low) + tail(low - s))
    differs = (beyond + both + tail(gap / windows.high_blur) * (t + 1.0)) * (1.0 + 1e-9)
    return np.where(gap > 0.0, differs, np.inf)


def _far_but_small(windows: Windows, s: Array, t: Array, k: Array, far: Array) -> Array:
    """A bound of E[(k - S)_+; some slot is far], far the mass beyond the window; (B,).

    Below u_0 = high - ROOM blur a slot is far with at most Phi((u - high)/blur) <= Phi(-ROOM) e^{-ROOM (u_0 - u)/blur}.
    Beyond, (k - S)_+ <= (k - x_0 - R)_+ with R the sum of the other slots, of mean 1 - 1/t each, and
    E(y - R)_+ <= y and <= e^{cy}/(ec) (1 - c/t + c^2 e^{s^2}/(2 t^2))^{t-1} for every c > 0.
    """
    d, blur = ROOM, windows.high_blur
    edge = windows.high - d * blur
    log_below = log_ndtr(-d) - d * edge / blur + 0.5 * (d / blur) ** 2 + log_ndtr(edge - d / blur)
    below = np.fmin(np.exp(log_below + 1e-6), far) * k
    left = k - np.exp(s * edge - 0.5 * s * s - np.log(t)) * (1.0 - 1e-12)
    spread = np.exp(s * s) / t
    c = np.maximum(1.0 - 1.0 / t - left, 1e-3) / spread
    log_put = (
        (t - 1.0) * np.log1p(np.minimum(-c / t + 0.5 * c * c * spread / t, 0.0) + 1e-16) + c * left - 1.0 - np.log(c)
    )
    log_put = np.where(-c / t + 0.5 * c * c * spread / t > 0.0, np.inf, log_put)
    put = np.where(left <= 0.0, 0.0, np.fmin(np.exp(log_put + 1e-8), left))
    return t * (below + far * put) * (1.0 + 1e-9)


def put_below(s: Array, t: Array, k: Array) -> Array:
    """log of an upper bound of E(k - S)_+, (B,): the least over some c of log(e^{ck} E e^{-cS}/(e c))."""
    with np.errstate(all="ignore"):
        deviation = np.sqrt(np.expm1(np.minimum(s * s, 600.0)) / t)
        near = np.maximum(1.0 - k, deviation) / deviation**2  # the saddle point of a normal law
        grid = near[:, None] * np.geomspace(0.5, 60.0, ABSCISSAS) ** np.minimum(s, 1.0)[:, None]
        none, one = np.full_like(s, -np.inf), np.ones_like(s)
        start = tilted_mode(s, t, grid[:, -1]) - REACH
        windows = Windows(none, one, -none, one, start, np.full_like(s, REACH))
        cells = cells_of(s, t, windows, CELLS)
        log = log_power(cells, cuts_of(cells, windows), t, grid, -1.0)[0]
        each = log + grid * k[:, None] - 1.0 - np.log(grid) + 1e-12 * grid * k[:, None] + 1e-9
        return np.min(np.where(np.isnan(each), np.inf, each), axis=1)
