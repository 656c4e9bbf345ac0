"""The law of one slot in random allocation: transforms of its likelihood ratio with error bounds (README.md).

The transform E[w e^{sign z X/t}] is A(z) for the weight w = w1 w2 of the bulk, and B(z) for w = (1 - w1) w2 of the
jumps.  Arrays have a leading batch axis (B,).
"""

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, log1p_complex, log_ndtr, log_ndtr_sides

NEGLIGIBLE = 1e-24
"""Nodes at both ends of a sum are left out if their terms are below NEGLIGIBLE times the sum."""
POINTS = 24
"""Number of Gauss-Legendre nodes on each panel."""
_PLACES, _WEIGHTS = np.polynomial.legendre.leggauss(POINTS)
_ELLIPSES = np.array([1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.5, 9.0, 14.0, 25.0])
"""Sizes rho of the Bernstein ellipses that are tried for every panel. The best one bounds the panel's error."""
ROOM = 6.3
"""At outputs u < `Windows.high` - ROOM * `Windows.high_blur`, the weight of "far" is less than Phi(-6.3) = 1.5e-10."""
SMALLEST = 1e-290
"""Masses and likelihood ratios below this number may have lost digits to underflow."""
LARGEST_LOG = 600.0
"""Cap on the logarithm of a bound of a window's modulus. A larger bound would be useless."""
SLACK = 1e-11
"""Relative error allowed for a sum over cells. A cell's mass is off by about 100 roundoffs (README.md, section 5)."""


class Windows(NamedTuple):
    """The smooth cuts of one slot's law by its output u: bulk below `low`, jumps up to `high`, far outputs beyond."""

    low: Array  # (B,) upper end of the bulk in u; if -inf, there is no bulk, and all outputs below `high` are jumps
    low_blur: Array  # (B,) width of the window at `low`, in u
    high: Array  # (B,) lower end of the far outputs in u; if inf, nothing is far
    high_blur: Array  # (B,) width of the window at `high`, in u
    start: Array  # (B,) lower end of the grid in u; below it the law is bounded, not integrated
    end: Array  # (B,) upper end of the grid in u. Above it, u is far (call), or the law is only bounded (put)


class Cells(NamedTuple):
    """A grid of J cells in u. Every cell has a probability `mass`, and a mean of X, given by `share`."""

    s: Array  # (B, 1) 1/sigma
    edges: Array  # (B, J + 1) values of u
    x: Array  # (B, J + 1) X/t at the edges
    mass: Array  # (B, J) probability of each cell
    share: Array  # (B, J) (mean of X in the cell - X at the lower edge)/(X at the upper edge - X at the lower edge)
    doubt: Array  # (B, J) bound of the error of `share`; 1 where underflow destroys the digits of `share`


class Cuts(NamedTuple):
    """(log w, log(1 - w)) at the edges of a grid, with the window w = Phi(-(edge - centre of w)/width of w)."""

    windows: Windows
    low: tuple[Array, Array] | None  # at the window `low`, (B, J + 1) each; None if no row has a bulk
    high: tuple[Array, Array] | None  # at the window `high`, (B, J + 1) each; None if no row has far outputs


def ratio(u: Array, s: Array, t: Array) -> Array:
    """Compute X/t = e^{s u - s^2/2}/t, for u of shape (B, ...) and s, t that broadcast with u."""
    return np.exp(s * u - 0.5 * s * s - np.log(t))


def tail(x: Array) -> Array:
    """Return Phi(-x)."""
    from scipy import special

    return special.ndtr(-x)


def interval(a: Array, b: Array) -> Array:
    """Return Phi(b) - Phi(a) for a <= b, with a small relative error in either tail."""
    flip = a + b > 0.0
    return tail(np.where(flip, a, -b)) - tail(np.where(flip, b, -a))


def cells_of(s: Array, t: Array, windows: Windows, size: int) -> Cells:
    """Cut [`windows.start`, `windows.end`] into `size` cells, which are narrower around each window at a finite u."""
    s, t = s[:, None], t[:, None]
    start, end = windows.start[:, None], windows.end[:, None]
    grid = start + (end - start) * np.linspace(0.0, 1.0, 4 * size + 1)
    total = np.linspace(0.0, 1.0, 4 * size + 1) + np.zeros_like(grid)
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        there = np.abs(place[:, None]) < np.inf
        at = (grid - np.where(there, place[:, None], 0.0)) / blur[:, None]
        total = total + np.where(there, np.clip(at / 18.0 + 0.5, 0.0, 1.0), 0.0)
    total = (total - total[:, :1]) / (total[:, -1:] - total[:, :1])
    levels = np.linspace(0.0, 1.0, size + 1)
    edges = np.array([np.interp(levels, *row) for row in zip(total, grid, strict=True)])
    edges[:, :1], edges[:, -1:] = start, end
    mass = interval(edges[:, :-1], edges[:, 1:])
    moment = interval(edges[:, :-1] - s, edges[:, 1:] - s)
    width = s * (edges[:, 1:] - edges[:, :-1])
    low = np.exp(s * edges[:, :-1] - 0.5 * s * s)
    with np.errstate(all="ignore"):
        share = (moment / (mass * low) - 1.0) / np.expm1(width)
    share = np.where(share >= 0.0, np.minimum(share, 1.0), np.where(share < 0.0, 0.0, 1.0))
    doubt = SLACK / np.minimum(width.min(axis=1, keepdims=True), 1.0)
    doubt = np.where(np.minimum(np.minimum(mass, moment), low) > SMALLEST, doubt, 1.0)
    return Cells(s, edges, ratio(edges, s, t), mass, share, doubt)


def cuts_of(cells: Cells, windows: Windows) -> Cuts:
    """Evaluate the windows at the edges of the cells."""

    def sides(place: Array, blur: Array) -> tuple[Array, Array] | None:
        if np.isinf(place).all():
            return None
        return log_ndtr_sides(-(cells.edges - np.clip(place, -1e300, 1e300)[:, None]) / blur[:, None])

    return Cuts(windows, sides(windows.low, windows.low_blur), sides(windows.high, windows.high_blur))


def shares(cuts: Cuts, alpha: Array) -> tuple[Array, Array]:
    """Return upper bounds, (B, J), of |w1 w2| (bulk) and |(1 - w1) w2| (jumps) in each cell for |Im u| <= alpha."""

    # |Phi(x + iy)| <= min(e^{y^2/2} Phi(x), 1 + e^{y^2/2} Phi(-x)), by logs: a factor may leave float64's range
    def window(most: Array, least: Array, y: Array) -> Array:
        grown = np.exp(np.minimum(0.5 * y * y + most, LARGEST_LOG))
        return np.minimum(grown, 1.0 + np.where(y > 0.0, np.exp(np.minimum(0.5 * y * y + least, LARGEST_LOG)), 0.0))

    windows = cuts.windows
    bulk: Array = np.zeros((len(windows.low), 1))
    jump, near = np.ones_like(bulk), np.ones_like(bulk)
    if cuts.low is not None:
        y = alpha / windows.low_blur[:, None]
        inside, beyond = cuts.low
        bulk, jump = window(inside[:, :-1], beyond[:, 1:], y), window(beyond[:, 1:], inside[:, :-1], y)
        whole: Array = np.isneginf(windows.low)
        bulk, jump = np.where(whole[:, None], 0.0, bulk), np.where(whole[:, None], 1.0, jump)
    if cuts.high is not None:
        near = window(cuts.high[0][:, :-1], cuts.high[1][:, 1:], alpha / windows.high_blur[:, None])
        open_: Array = np.isinf(windows.high)
        near = np.where(open_[:, None], 1.0, near)
    return bulk * near, jump * near


def jump_below(windows: Windows) -> Array:
    """Return the largest value, (B,), of the jumps' weight 1 - w1 below the start of the grid."""
    return tail((windows.low - windows.start) / windows.low_blur)


def log_real(cells: Cells, weight: Array, below: Array, r: Array, sign: float) -> Array:
    """Bound log E[w e^{sign r X/t}] from above for r >= 0, (B, R), by chords of the exponential, which is convex in X.

    `weight`, (B, J), is the largest w in each cell; `below`, (B,), is the largest w below the first edge. If sign = 1,
    w is 0 above the last edge.
    """
    share = np.clip(cells.share + sign * cells.doubt, 0.0, 1.0)
    w0, w1 = weight * cells.mass * (1.0 - share), weight * cells.mass * share
    top = cells.x[:, -1:] * r if sign > 0 else np.zeros_like(r)  # with `top` subtracted, no exponent is positive
    grown = np.exp(sign * r[:, :, None] * cells.x[:, None, :] - top[:, :, None])
    total = np.einsum("brj,bj->br", grown[:, :, :-1], w0) + np.einsum("brj,bj->br", grown[:, :, 1:], w1)
    less = below[:, None] * tail(-cells.edges[:, :1]) * np.exp((sign > 0) * r * cells.x[:, :1] - top)
    beyond = tail(cells.edges[:, -1:]) * np.exp(-r * cells.x[:, -1:]) if sign < 0 else 0.0
    with np.errstate(divide="ignore"):
        log = np.log(total + less + beyond) + top
    return log + 2.0 * SLACK + 4.0 * _relative(cells) * np.minimum(r * cells.x[:, -1:], 750.0)


def _relative(cells: Cells) -> Array:
    """Return the largest relative rounding error of X/t on the grid, (B, 1)."""
    return ROUNDOFF * (8.0 + 4.0 * (cells.s * (np.abs(cells.edges[:, -1:]) + cells.s) + 30.0))


def log_path(cells: Cells, cuts: Cuts, c: Array, y: Array, alpha: Array, sign: float) -> tuple[Array, Array]:
    """Bound log |A(c + iy')| (bulk) and log |B(c + iy')| (jumps) from above for every y' >= y, (B,) each.

    On the path u + i sign alpha(u), |e^{sign z X/t}| is e^{r (sign c cos(s alpha) - y sin(s alpha))}, with r = X(u)/t.
    `alpha`, (B, J + 1), is alpha(u) at the edges, linear between them, in [0, pi/(2 s)], and 0 at both ends.
    """
    s, windows = cells.s, cuts.windows
    most, least = np.maximum(alpha[:, :-1], alpha[:, 1:]), np.minimum(alpha[:, :-1], alpha[:, 1:])
    slope = (alpha[:, 1:] - alpha[:, :-1]) / (cells.edges[:, 1:] - cells.edges[:, :-1])
    stretch = np.sqrt(1.0 + slope * slope)
    c, y = c[:, None], y[:, None]
    fall = y * np.sin(s * least) * (1.0 - 1e-9)
    if sign > 0:
        rate = c * np.cos(s * least) * (1.0 + 1e-9) - fall
        top = c * cells.x[:, -1:]
    else:
        rate = -c * np.cos(s * most) * (1.0 - 1e-9) - fall
        top = np.zeros_like(c)
    exponent = np.where(rate > 0.0, rate * cells.x[:, 1:], rate * cells.x[:, :-1])
    grown = cells.mass * stretch * np.exp(0.5 * most * most + exponent - top)
    bulk, jump = shares(cuts, most)
    below = tail(-cells.edges[:, 0]) * np.exp((sign > 0) * (c * cells.x[:, :1]) - top)[:, 0]
    beyond = tail(cells.edges[:, -1]) * np.exp(-c * cells.x[:, -1:])[:, 0] if sign < 0 else 0.0
    whole: Array = np.isneginf(windows.low)
    share_below = jump_below(windows)
    slack = (2.0 * SLACK + 4.0 * _relative(cells) * np.minimum((c + y) * cells.x[:, -1:], 750.0))[:, 0]
    with np.errstate(divide="ignore"):
        log_bulk = np.log(np.sum(bulk * grown, axis=1) + np.where(whole, 0.0, below))
        log_jump = np.log(np.sum(jump * grown, axis=1) + beyond + below * share_below)
    return log_bulk + top[:, 0] + slack, log_jump + top[:, 0] + slack


def bounds(sign: float, s: Array, t: Array, k: Array) -> tuple[Array, Array]:
    """Return lower and upper bounds, (B,) each, of the call E(S - k)_+ (sign = 1) or the put E(k - S)_+ (sign = -1).

    Upper: `(sqrt(v + (k-1)^2) -+ (k-1))/2` (Scarf), - for the call. S has mean 1 and variance v = (e^{s^2} - 1)/t.
    Lower: max((1 - k)_+, E[S - k; some X_i > tk]) for the call, max((k - 1)_+, E[k - S; all X_i <= k]) for the put.
    """
    with np.errstate(all="ignore"):
        # 1e-300 is added so that the variance of S does not become too small where s^2 underflows.
        variance = np.expm1(s * s) / t * (1.0 + (16.0 + 8.0 * s * s) * ROUNDOFF) + 1e-300
        away = sign * (k - 1.0)
        root = np.hypot(np.sqrt(variance), away)
        upper = 0.5 * np.where(away > 0.0, variance / (root + away), root - away) * (1.0 + 32.0 * ROUNDOFF)
        upper = np.fmin(upper + 32.0 * ROUNDOFF * np.maximum(-away, 0.0), np.where(sign > 0, 1.0, k))
        if sign > 0:
            edge = (np.log(t) + np.log(k)) / s + 0.5 * s
            far, far_x = tail(edge), tail(edge - s)
            gone, gone_x = t * np.log1p(-far), np.log1p(-far_x) + (t - 1.0) * np.log1p(-far)
            first, second = -np.expm1(gone_x), -np.expm1(gone)
            doubt = (100.0 + 10.0 * (edge * edge + s * np.abs(edge))) * ROUNDOFF * (first + k * second)
            lower = first - k * second - doubt
        else:
            edge = np.log(k) / s + 0.5 * s
            log_m, log_mx = log_ndtr(edge), log_ndtr(edge - s)
            shrunk, m, mx = np.exp((t - 1.0) * log_m), np.exp(log_m), np.exp(log_mx)
            units = 100.0 + 20.0 * t * (1.0 + np.abs(log_m)) + 10.0 * (np.abs(edge) + s) ** 2
            lower = shrunk * (k * m - mx) - units * ROUNDOFF * shrunk * (k * m + mx)
        lower = np.fmax(lower, np.maximum(-away, 0.0) * (1.0 - 4.0 * ROUNDOFF))
        upper = np.where(np.isnan(upper), np.where(sign > 0, 1.0, k), upper)
    return np.where(lower <= upper, lower, 0.0), upper


def one_slot_above(s: Array, t: Array, k: Array) -> Array:
    """Bound E(S - k)_+, (B,), from above by a theorem on one large slot (README.md, 6), or by 1 if s <= 3 or t = 1."""
    found = np.ones_like(s)
    rows = np.flatnonzero((s > 3.0) & (t > 1.0))
    s, t, k = s[rows, None], t[rows, None], k[rows, None]
    with np.errstate(all="ignore"):
        # Each r of `others` gives the bound `value` + `large`. `large` bounds P(the other slots add more than r to S).
        others = k * np.geomspace(1e-12, 0.3, 24)
        strike = t * (k - others)
        edge = np.log(strike) / s + 0.5 * s
        first, second = tail(edge - s), strike * tail(edge)
        value = first - second + (100.0 + 10.0 * (edge * edge + s * np.abs(edge))) * ROUNDOFF * (first + second)
        large = (t - 1.0) * tail(np.log(t * others / (t - 1.0)) / s + 0.5 * s) * (1.0 + 1e-9)
        found[rows] = np.min(np.where(np.isnan(value + large), 1.0, value + large), axis=1, initial=1.0)
    return found


def guess(sign: float, s: Array, t: Array, k: Array) -> Array:
    """Guess log E(S - k)_+ (sign = 1) or log E(k - S)_+ from a lognormal S and, for sign = 1, from one large slot."""
    with np.errstate(all="ignore"):
        spread = np.sqrt(np.log1p(np.expm1(np.minimum(s * s, 600.0)) / t))
        d = -np.log(k) / spread
        plus, minus = d + 0.5 * spread, d - 0.5 * spread
        if sign > 0:
            first, second = log_ndtr(plus), np.log(k) + log_ndtr(minus)
        else:
            first, second = np.log(k) + log_ndtr(-minus), log_ndtr(-plus)
        found = first + np.log(-np.expm1(np.minimum(second - first, -1e-12)))
        low = np.log(np.maximum(bounds(sign, s, t, k)[0], 1e-300))
        if sign < 0:
            return np.where(np.isnan(found), low, found)
        strike = t * (k - 1.0)
        edge = np.log(strike) / s + 0.5 * s
        first, second = log_ndtr(s - edge), np.log(k - 1.0) + np.log(t) + log_ndtr(-edge)
        large = first + np.log(-np.expm1(np.minimum(second - first, -1e-12)))
        # `large` is the guess from one large slot. It is used only if on average fewer than 0.1 slots have X/t > k - 1.
        return np.fmax(np.fmax(found, low), np.where(t * tail(edge) < 0.1, large, -np.inf))


class Nodes(NamedTuple):
    """Quadrature nodes u and their weights. N is the normal density, and du the Gauss-Legendre weight of a node."""

    u: Array  # (B, X) the nodes
    x: Array  # (B, X) the likelihood ratio of one slot at each node, divided by t
    bulk: Array  # (B, X) weight of each node for the bulk, N(u) w1 w2 du, with the windows w1 at `low` and w2 at `high`
    jump: Array  # (B, X) weight of each node for the jumps, N(u) (1 - w1) w2 du


def panels_of(s: Array, t: Array, windows: Windows, size: Array) -> Array:
    """Choose panel ends, (B, J + 1), closer where e^{zX/t}, |z| = `size`, oscillates. Any ends give valid bounds."""
    grid = windows.start[:, None] + (windows.end - windows.start)[:, None] * np.linspace(0.0, 1.0, 601)
    middle = 0.5 * (grid[:, 1:] + grid[:, :-1])
    turn = size[:, None] * ratio(middle, s[:, None], t[:, None])
    turn = np.minimum(turn, 1e6)
    rate = 0.25 + s[:, None] * (turn / (0.25 + turn) / 2.5 + turn / 36.0)
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        with np.errstate(invalid="ignore"):
            far = np.abs(middle - place[:, None]) / blur[:, None]
        rate = rate + np.where(far < 9.0, 0.3 / blur[:, None], 0.0)
    total = np.cumsum(rate * np.diff(grid, axis=1), axis=1)
    total = np.concatenate([np.zeros_like(total[:, :1]), total], axis=1)
    count = int(np.ceil(np.minimum(total[:, -1].max(), 3000.0)))  # at most 3,000 panels
    levels = np.linspace(0.0, 1.0, count + 1)
    found = [np.interp(levels * row[-1], row, places) for row, places in zip(total, grid, strict=True)]
    ends = np.array(found)
    ends[:, 0], ends[:, -1] = windows.start, windows.end
    return ends


def nodes_of(s: Array, t: Array, windows: Windows, ends: Array) -> Nodes:
    """Return the nodes and weights of all panels."""
    middle, half = 0.5 * (ends[:, 1:] + ends[:, :-1]), 0.5 * (ends[:, 1:] - ends[:, :-1])
    u = (middle[:, :, None] + half[:, :, None] * _PLACES).reshape(len(ends), -1)
    weight = (half[:, :, None] * _WEIGHTS).reshape(len(ends), -1) * np.exp(-0.5 * u * u) / np.sqrt(2.0 * np.pi)
    whole: Array = np.isneginf(windows.low)
    open_: Array = np.isinf(windows.high)
    if not open_.all():
        weight = weight * tail((u - windows.high[:, None]) / windows.high_blur[:, None])
    bulk, jump = np.zeros_like(weight), weight
    if not whole.all():
        at = (u - np.where(whole, -60.0, windows.low)[:, None]) / windows.low_blur[:, None]
        bulk = np.where(whole[:, None], 0.0, weight * tail(at))
        jump = np.where(whole[:, None], weight, weight * tail(-at))
    return Nodes(u, ratio(u, s[:, None], t[:, None]), bulk, jump)


def panel_errors(
    s: Array, t: Array, windows: Windows, ends: Array, c: Array, y: Array, sign: float, less_one: Array
) -> tuple[Array, Array]:
    """Bound the quadrature errors of int N w (e^{sign z X/t} - 1), |Im z| <= y, for bulk and for jumps (README.md, 3).

    N is the normal density. The "- 1" counts only where `less_one` is true, and never for the jumps beside a bulk.
    """
    middle, half = 0.5 * (ends[:, 1:] + ends[:, :-1])[..., None], 0.5 * (ends[:, 1:] - ends[:, :-1])[..., None]
    real, imag = half * (_ELLIPSES + 1.0 / _ELLIPSES) * 0.5, half * (_ELLIPSES - 1.0 / _ELLIPSES) * 0.5
    left, right = middle - real, middle + real
    s, t, c, y = (a[:, None, None] for a in (s, t, c, y))
    near = np.maximum(np.maximum(left, -right), 0.0)
    log = 0.5 * (imag * imag - near * near) - 0.5 * np.log(2.0 * np.pi)
    with np.errstate(over="ignore"):
        x_most, x_least = ratio(right, s, t), ratio(left, s, t)
        angle = s * imag
        swing = np.where(angle < 0.5 * np.pi, np.sin(np.minimum(angle, 1.5)), 1.0)
        swing = np.where(angle < 1.5, swing, 1.0)
        if sign > 0:
            growth = (c + y * swing) * x_most
        else:
            falling = -c * x_least * np.cos(np.minimum(angle, 1.5)) + y * swing * x_most
            growth = np.where(angle < 1.5, falling, (c + y) * x_most)
        # With v = sign z X/t, up + gain bounds log |e^v - 1|, since |e^v - 1| <= min(|v|, 2) e^{max(Re v, 0)}.
        up = np.maximum(growth, 0.0)
        gain = np.minimum(np.log(c + y) + np.log(x_most), np.log(2.0))
        gain = np.where(less_one[:, None, None], gain, 0.0)
    log = log + up + np.log(8.0 * half) - 2.0 * POINTS * np.log(_ELLIPSES) - np.log1p(-(_ELLIPSES**-2.0))

    def window(x_most: Array, x_least: Array, shift: Array) -> Array:
        grown = np.exp(np.minimum(0.5 * shift * shift, 600.0))
        return np.log(np.minimum(grown * tail(-x_most), 1.0 + grown * tail(x_least)) + 1e-300)

    whole, open_ = windows.low[:, None, None] == -np.inf, windows.high[:, None, None] == np.inf
    if not open_.all():
        high, blur = np.where(open_, 0.0, windows.high[:, None, None]), windows.high_blur[:, None, None]
        log = log + np.where(open_, 0.0, window((high - left) / blur, (high - right) / blur, imag / blur))
    bulk, jump = np.where(whole, -np.inf, log), log + gain
    if not whole.all():
        low, blur = np.where(whole, 0.0, windows.low[:, None, None]), windows.low_blur[:, None, None]
        bulk = np.where(whole, -np.inf, log + gain + window((low - left) / blur, (low - right) / blur, imag / blur))
        jump = np.where(whole, log + gain, log + window((right - low) / blur, (left - low) / blur, imag / blur))
    with np.errstate(over="ignore", invalid="ignore"):
        return tuple(np.exp(np.fmin(np.min(one, axis=2), 700.0)).sum(axis=1) for one in (bulk, jump))


def rounding_units(nodes: Nodes, s: Array, t: Array, windows: Windows) -> Array:
    """Bound the rounding of each node's term, (B, X), in units of 2^-53 times the product of its factors' moduli."""
    u = np.abs(nodes.u)
    units = nodes.u.shape[1] + 60.0 + 4.0 * u * u + 6.0 * (s[:, None] * u + 0.5 * s[:, None] ** 2 + np.log(t)[:, None])
    for place, blur in ((windows.low, windows.low_blur), (windows.high, windows.high_blur)):
        there: Array = np.isfinite(place)
        centre, blur = np.where(there, place, 0.0)[:, None], blur[:, None]
        at = np.abs(nodes.u - centre) / blur
        moved = (1.0 + at) * 3.0 * (u + np.abs(centre)) / blur + 12.0 + 2 * at * at
        units = units + np.where(there[:, None] & (at < 40.0), moved, 0.0)
    return units


class Line(NamedTuple):
    """The line Re z = c on which the integral is evaluated."""

    c: Array  # (B,) the abscissa
    step: Array  # (B,) spacing of Im z, which is 2 pi/period
    count: Array  # (B,) index of the last node that is used


class Powers(NamedTuple):
    """F = (A + B)^t - A^t at N nodes, divided by (A(c) + B(c))^t. A and B are the transforms of bulk and jumps."""

    log_scale: Array  # (B,) t log(A(c) + B(c)), the log of the divisor of `value` and `error`
    value: Array  # (B, N) F at the nodes (B^t where there is no bulk), divided as above; 0 at unused nodes
    error: Array  # (B, N) bound of the error of `value`
    turn: Array  # (B, N) Im z


def turned_by(angle: Array) -> Array:
    """Return e^{i angle} - 1 = 2 i tau/(1 - i tau). Its relative error is that of tau = tan(angle/2), at most 4 ulp."""
    tau = np.tan(0.5 * angle)
    share = 2.0 * tau / (1.0 + tau * tau)
    found = np.empty(angle.shape, np.complex128)
    found.real, found.imag = -tau * share, share
    return found


def _tables(x: Array, step: Array, many: int) -> Array:
    """Return e^{i k step x} - 1 for k < many, (B, many, X)."""
    angle = np.arange(many)[None, :, None] * (step[:, None] * x)[:, None, :]
    return turned_by(angle)


def _spun(weight: Array, first: Array, second: Array, count: int) -> Array:
    """Sum w (e^{iyx} - 1) over x for each y, (B, count). `first` holds e^{iyx} - 1 for coarse y, `second` for fine."""
    # Take `size` nodes at a time. The linear algebra library starts no threads for at most 32,000 multiplications.
    size = max(32_000 // (first.shape[1] * second.shape[2]), 1)
    found: Array | float = 0.0
    for begin in range(0, weight.shape[1], size):
        some = slice(begin, begin + size)
        part = weight[:, some]
        left = first[:, :, some] * part[:, None, :]
        alone = np.sum(left, axis=2)[:, :, None]
        found = found + (alone + (left + part[:, None, :]) @ second[:, some])
    return np.reshape(found, (len(weight), -1))[:, :count]


def powers_on(line: Line, s: Array, t: Array, windows: Windows, ends: Array, sign: float) -> Powers:
    """Return F and its error bounds (`Powers`) at all nodes."""
    count = int(line.count.max()) + 1
    whole: Array = np.isneginf(windows.low)
    nodes = nodes_of(s, t, windows, ends)
    c, step = line.c, line.step
    grown = np.exp(sign * c[:, None] * nodes.x)
    less = np.expm1(sign * c[:, None] * nodes.x)
    base = np.where(whole[:, None], nodes.jump, nodes.bulk)
    rest = np.where(whole[:, None], 0.0, nodes.jump)
    # `base` has the weights of the bulk, or of the jumps if there is no bulk. `lack` is 1 minus the mass of `base`.
    root = np.sqrt(1.0 + windows.low_blur**2)
    lack = np.where(whole, 0.0, tail(np.where(whole, 0.0, windows.low) / root))
    lost = np.where(whole, 0.0, 2.0 * tail((windows.end - np.where(whole, 0.0, windows.low)) / windows.low_blur))
    if sign > 0:
        lack = lack + np.where(whole, tail(windows.high / np.sqrt(1.0 + windows.high_blur**2)), 0.0)
        lost = lost + tail((windows.end - windows.high) / windows.high_blur) * tail(windows.end)
        lost = lost + np.where(whole, 0.0, tail((windows.high - windows.low) / (windows.low_blur + windows.high_blur)))
        lost_rest = np.zeros_like(lost)
    else:
        beyond = tail(windows.end) * np.exp(-c * ratio(windows.end, s, t))
        lack = lack + np.where(whole, tail(windows.end), 0.0)
        lost, lost_rest = lost + np.where(whole, beyond, 0.0), beyond
    small = ratio(windows.start, s, t)
    below = tail(-windows.start)
    start_grown = np.exp(np.maximum(sign, 0.0) * c * small)
    departure = np.sum(base * less, axis=1) - lack
    direct = ~(departure > -0.5)  # True where the sum of `base * grown` is more accurate than 1 + departure
    at_c = np.where(direct, np.maximum(np.sum(base * grown, axis=1), 1e-200), 1.0 + departure)
    log_at_c = np.where(direct, np.log(at_c), np.log1p(np.where(direct, 0.0, departure)))
    rest_at_c = np.sum(rest * grown, axis=1)
    log_total = log_at_c + np.log1p(rest_at_c / at_c)
    total = np.exp(log_total)
    # Tables of e^{i sign k step x} - 1: `first` has k = 0, fine, 2 fine, ..., and `second` has k = 0, ..., fine - 1.
    fine = int(np.ceil(np.sqrt(count)))
    coarse = -(-count // fine)
    first = _tables(nodes.x, sign * step * fine, coarse)
    second = _tables(nodes.x, sign * step, fine).transpose(0, 2, 1)
    spun, dropped = [], []
    for weight in (base * grown, rest * grown):
        # Sum from the first to the last node whose weight is not negligible. `dropped` bounds the terms of other nodes.
        large = np.flatnonzero(np.any(weight > NEGLIGIBLE * np.sum(weight, axis=1)[:, None], axis=0))
        if large.size:
            some = slice(large[0], large[-1] + 1)
            spun.append(_spun(weight[:, some], first[:, :, some], second[:, some], count))
            dropped.append(2.0 * (np.sum(weight[:, : some.start], axis=1) + np.sum(weight[:, some.stop :], axis=1)))
        else:
            spun.append(np.zeros((len(c), count), np.complex128))
            dropped.append(2.0 * np.sum(weight, axis=1))
    turn = np.arange(count) * step[:, None]
    used = np.arange(count) <= line.count[:, None]
    moved, other = spun[0], spun[1] + rest_at_c[:, None]
    at = at_c[:, None]
    a, b = moved.real / at, moved.imag / at
    bent = np.abs(a) + b * b  # scale of the error of log|1 + a + ib|, where 2 a and a^2 + b^2 may cancel
    log_base = log_at_c[:, None] + log1p_complex(a, b)
    size_base = np.exp(log_base.real - log_total[:, None])
    t_ = t[:, None]
    main = np.exp(t_ * (log_base - log_total[:, None]))
    if whole.all():
        value, size_rest, log_more = main, np.zeros_like(size_base), np.zeros_like(log_base)
    else:
        quotient = other * np.exp(-log_base)
        a, b = quotient.real, quotient.imag
        log_more = log1p_complex(a, b)
        w = t_ * log_more
        half = np.sin(0.5 * w.imag)
        grow = np.expm1(np.minimum(w.real, 700.0))
        more = (grow * np.cos(w.imag) - 2.0 * half * half) + 1j * (1.0 + grow) * np.sin(w.imag)
        # (A + B)^t - A^t is `main * more`. For a large Re w, `both - main` replaces this product: `main` may underflow.
        both = np.exp(t_ * (log_base + log_more - log_total[:, None]))
        value = np.where(whole[:, None], main, np.where(w.real > 30.0, both - main, main * more))
        size_rest = np.where(whole[:, None], 0.0, np.abs(other) / total[:, None])
    # from here on, errors are relative to A(c) + B(c)
    units = rounding_units(nodes, s, t, windows) * ROUNDOFF
    last = line.count * step
    quad_base, quad_rest = panel_errors(s, t, windows, ends, c, last, sign, ~direct)
    quad_base, quad_rest = np.where(whole, quad_rest, quad_base), np.where(whole, 0.0, quad_rest)
    moved = c[:, None] * nodes.x * grown  # a relative error r of X moves e^{cX} by c X e^{cX} r
    fixed = np.sum(base * units * (np.where(direct[:, None], grown, np.abs(less)) + moved), axis=1)
    fixed = fixed + np.where(direct, 0.0, 600.0 * ROUNDOFF * lack)
    slope = 6.0 * np.sum(base * units * grown * nodes.x, axis=1) + np.where(direct, 0.0, below * small * start_grown)
    fixed = fixed + quad_base + lost + dropped[0] + np.where(direct, below, 0.0) + below * small * start_grown * c
    error_base = (fixed[:, None] + turn * slope[:, None]) / total[:, None]
    fixed = np.sum(rest * units * (grown + moved), axis=1) + quad_rest + lost_rest + dropped[1]
    fixed = fixed + np.where(whole, 0.0, below * start_grown * jump_below(windows))
    slope = 6.0 * np.sum(rest * units * grown * nodes.x, axis=1)
    error_rest = np.where(whole[:, None], 0.0, (fixed[:, None] + turn * slope[:, None]) / total[:, None])
    reach = size_base + size_rest + error_base + error_rest
    log_reach = np.log(reach) + 4.0 * ROUNDOFF
    with np.errstate(over="ignore", invalid="ignore"):
        powered = np.exp(np.minimum((t_ - 1.0) * log_reach, 700.0))
        beside_bulk = t_ * (t_ - 1.0) * (size_rest + error_rest) * error_base / reach
        per_base = np.where(whole[:, None], t_ * error_base, beside_bulk)
        error = powered * (per_base + t_ * error_rest)
        # add the error of `value` that comes from rounding in the exponents of `main`, `both` and `more`
        size = np.abs(value)
        logs = np.abs(log_base) + np.abs(log_at_c)[:, None] + np.abs(log_total)[:, None]
        error = error + ROUNDOFF * size * (40.0 + 12.0 * t_ * logs)
        error = error + ROUNDOFF * size * 12.0 * t_ * bent
        swell = np.exp(np.maximum(t_ * (log_base.real + np.maximum(log_more.real, 0.0) - log_total[:, None]), -745.0))
        error = error + np.where(whole[:, None], 0.0, 40.0 * ROUNDOFF * t_ * np.abs(log_more) * swell)
    value, error = np.where(used, value, 0.0), np.where(used, error, 0.0)
    return Powers(t * log_total, value, error, turn)
