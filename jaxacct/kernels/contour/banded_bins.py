"""Balls in bins with noise of two bands: Psi(z) as the trace of a product of operators on functions of one normal y.

README.md of this folder, "Bins that share noise", defines S, X_j, G_j and Psi, and proves the bounds.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, log_ndtr

RIGHT = 0.5 * np.pi
"""A right angle, in radians."""
SAME = 4.0 * ROUNDOFF
"""If the squares of `second` of neighbouring bins differ by at most this relative amount, they are made equal."""
RAISED = 8.0 * ROUNDOFF
"""Variances get the factor 1 + RAISED. Without it, rounding errors might leave no coefficients with these variances."""
ALIKE = 64
"""Bins get the same error bounds if their coefficients differ by at most 1/ALIKE of the largest coefficient."""
ROUGHLY = 4
"""Takes the place of `ALIKE` where error bounds are only estimated. The bins then form fewer groups."""
QUANTILES = np.linspace(-6.0, 3.0, 28)
"""Values of u for the bound E e^{-xX} >= Phi(u) e^{-x X(u)}: X is X(u) where log X is u deviations above its mean."""
SHAPES, COSTLY = ((0.0, 1.0), (0.25, 4.0), (0.5, 2.0), (0.5, 4.0)), 30.0
"""Pairs (bend, scale/c), one for each shape of line that is tried. `Line` defines bend, scale and c.

Far out on a bent line, the bound of |Psi| turns every X_j. A shape is left out if this costs a factor above e^COSTLY.
"""
SHARES = {False: (0.6, 1.0), True: (0.6,)}
"""Values of c that are tried, as shares of the saddle point: for integrals of Psi (False) and of Psi - 1 (True)."""
CELLS = 200
"""Number of cells into which a line is divided, to bound an integral along it."""
BOX, MOST_BOXES, ROUGH_BOXES = 0.4, 64, 18
"""log X grows by about BOX over a box of nodes; by more if MOST_BOXES (in estimates ROUGH_BOXES) would not suffice."""
WINDOWS = {
    (-np.inf, 1.0): ((0.0, 1.0), (0.8, 8.0), (0.9, 25.0), (0.3, 0.0), (0.5, 0.0), (0.75, 0.0)),
    (1.25, 1.25): ((0.3, 0.0), (0.45, 0.0), (0.6, 0.0), (0.75, 0.0)),
    (2.0, 0.75): ((0.8, 8.0), (0.9, 25.0)),
}
"""For (join, turn) of a `Lattice`: (share of the largest shift, begin) of each path that is tried with it.

The path's window begins at |z| X/b = begin; if begin is 0, W = 1.
"""
NEAR = 0.5
"""Where |z| > NEAR, Psi - 1 is computed as Psi minus 1. There this rounds no worse than the sums of `_less_one`."""
NEARLY, CHEAP = (0.1, 0.3), 1e9
"""If no lattice reaches the wanted accuracy, an error of up to e^NEARLY[0] times the least possible error is accepted.

If the points then take more than CHEAP multiplications, NEARLY[1] replaces NEARLY[0].
"""
REACH, FARTHEST = 9.0, 14.0
"""Largest reach of a lattice: for k >= 1, and for k < 1. The reach is the largest node, in deviations of a normal."""
BENT = 4.0
"""Nodes far left of `join` are 1 + BENT times as far apart as those on the right (`Lattice`)."""
BLOCK = 12
"""Largest number of nodes over which one matrix product sums (`_times`)."""
ROWS = 64
"""Number of rows of a matrix product that are computed at a time, since they fit into a processor's cache."""
LEAST = -200.0
"""Real parts of exponents are raised to at least this number, so that no product falls below float64's normal range."""
MOST_WORK = 3e10
"""Largest number of multiplications for one contour. All contours of one call together may take 1.5 times as many."""
PLACING = 5e8
"""Placing one contour counts as this many multiplications against the work limit of a call."""
MOST_HALF, MOST_NODES = 400, 1500
"""`half` of a `Lattice` is less than MOST_HALF. A line has at most about MOST_NODES nodes."""
SIZES = 1e-6, 20.0
"""Smallest and largest standard deviation of a bin's normal for which contours are tried."""
MOST_TURN = 3.0
"""Largest imaginary shift of the path of a normal variable, in standard deviations."""
ABSOLUTE = {False: 6e-14, True: 2.7e-13}
"""Least error of E(S - k)_+ at which a contour aims: for integrals of Psi (False), and of Psi - 1 (True)."""
DIFFERENT = 2.5
"""E(S - k)_+ is an integral of Psi - 1 if k >= DIFFERENT. For smaller k, an integral of Psi has as small an error."""


class Kind(NamedTuple):
    """(Smallest, largest) first_j, second_j and variance of G_j (see `Bins`) in one group of similar bins."""

    first: tuple[float, float]
    second: tuple[float, float]
    variance: tuple[float, float]
    many: int  # number of bins in the group


class Bins:
    """The normals G_j of b bins (see above), in units of the noise: a chain if `second[-1]` is 0, and else a ring."""

    def __init__(self, variance: np.ndarray, shared: np.ndarray) -> None:
        """Find coefficients for which G_j has `variance[j]`, and G_j and G_{j+1} have the covariance `shared[j]`."""
        if variance.size == 2:  # each bin is the other's neighbour on both sides, so both covariances add up
            shared = np.array([shared.sum(), 0.0])
        variance = variance * (1.0 + RAISED)
        begin = 0.0  # a lower bound of the square of the last entry of `second`
        for _ in range(10_000):
            first, second = [], [begin]
            for own, beside in zip(variance[::-1].tolist(), np.roll(shared, 1)[::-1].tolist(), strict=True):
                first.append(own - second[-1])
                found = beside * (beside / first[-1])
                second.append(second[-1] if abs(found - second[-1]) <= SAME * found else found)
            if abs(second[-1] - begin) <= SAME * begin:
                break
            begin = second[-1]
        else:
            raise ArithmeticError("coefficients of a ring of bins were not found")
        self.first, self.second, self.count = np.sqrt(first[::-1]), np.sqrt(second[-2::-1]), variance.size
        self.variances = self.first**2 + self.second**2
        self.sizes, both = np.sqrt(self.variances), self.first + self.second
        self.angles, self.largest = (
            (float(both.min()), float(both.max())),  # least and largest turn of an X_j if every y is shifted by i
            float(max(self.first.max(), self.second.max())),
        )
        self.shared = self.first * np.roll(self.second, 1)  # covariances of G_{j-1} and G_j; 0 at j = 0 if b = 2
        risen = lambda x: np.expm1(np.minimum(x, 600.0))
        # the standard deviation of S
        self.deviation = float(np.sqrt(np.sum(risen(self.variances) + 2.0 * risen(self.shared)))) / self.count

    def kinds(self, rough: bool = False) -> Iterator[Kind]:
        """Yield a `Kind` for each group of similar bins; if `rough`, for larger groups and with means as both ends."""
        alike = ROUGHLY if rough else ALIKE
        ends: tuple[Any, Any] = (np.mean, np.mean) if rough else (np.min, np.max)
        pairs, groups = np.stack([self.first, self.second]), collections.defaultdict[tuple[float, ...], list[int]](list)
        for at, cell in enumerate(np.ceil(pairs * (alike / self.largest)).T.tolist()):
            groups[tuple(cell)].append(at)
        for some in groups.values():
            first, second, variance = (
                (float(ends[0](x[some])), float(ends[1](x[some]))) for x in (*pairs, self.variances)
            )
            yield Kind(first, second, variance, len(some))

    def runs(self) -> Iterator[tuple[float, float, int]]:
        """Yield (first, second, count) for each run of neighbouring bins 1, ..., b - 2 with equal coefficients."""
        for pair, some in itertools.groupby(zip(self.first[1:-1].tolist(), self.second[1:-1].tolist(), strict=True)):
            yield *pair, len(list(some))


class Lattice(NamedTuple):
    """The nodes s(t), t = i step, first <= i <= half, of the sums that replace integrals over a normal.

    s(t) = t + BENT/2 (t - join - ((t - join)^2 + turn^2)^{1/2}), or t if `join` is -inf. So nodes left of `join` are
    further apart.
    """

    step: float
    half: int
    first: int
    join: float
    turn: float

    @property
    def plain(self) -> bool:
        return self.join == -np.inf

    @property
    def slant(self) -> float:
        """The supremum of Im s(t + ia)/a."""
        return 1.0 if self.plain else 1.0 + BENT

    @property
    def widest(self) -> float:
        """The largest a for which s(t + ia) is bounded (README.md)."""
        return np.inf if self.plain else 0.7 * self.turn

    def place(self, t: Array) -> np.ndarray:
        """Return s(t) at real or complex t, |Im t| < turn."""
        apart = np.asarray(t) - (0.0 if self.plain else self.join)
        return np.asarray(t) if self.plain else t + 0.5 * BENT * (apart - np.sqrt(apart * apart + self.turn**2))

    def nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays: numbers with few digits, whose squares are exact; nodes minus these numbers; ds/dt."""
        t = self.step * np.arange(self.first, self.half + 1)
        if self.plain:
            return t, np.zeros(t.size), np.ones(t.size)
        apart = t - self.join
        square = apart * apart + self.turn**2
        root = np.sqrt(square)
        short = np.round(root * 2.0**16) / 2.0**16
        rest = (square - short * short) / (root + short)  # root - short; the difference of the squares is exact
        return t + 0.5 * BENT * (apart - short), -0.5 * BENT * rest, 1.0 + 0.5 * BENT * (1.0 - apart / root)


class Path(NamedTuple):
    """N paths y(s) = s - i shift W(s). W(s) = 1/(1 + e^{-(s - start)/width}), or 1 if start = -inf. Fields are (N,)."""

    shift: np.ndarray
    start: np.ndarray
    width: np.ndarray
    strip: np.ndarray  # distance by which t of s(t) is moved up and down in the complex plane, to bound errors of sums
    less: np.ndarray  # whether sums are of Psi - 1 rather than of Psi

    def window(self, s: np.ndarray, up: Array = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return Re W, Im W and |W'| at s + i up, each of shape (N, s.shape[-1]). 0 <= up < pi width."""
        width, always = self.width[:, None], np.isinf(self.start)[:, None]
        turn = up / width
        x = np.clip((s - np.where(always, 0.0, self.start[:, None])) / width, -80.0, 80.0)
        e, cosine = np.exp(-np.abs(x)), np.cos(turn)
        below = 1.0 + 2.0 * e * cosine + e * e
        real = np.where(x >= 0.0, 1.0 + e * cosine, e * e + e * cosine) / below
        real = np.where(always, 1.0, np.where(s == -np.inf, 0.0, real))
        return real, np.where(always, 0.0, e * np.sin(turn) / below), np.where(always, 0.0, e / below / width)


def lattice_for(bins: Bins, nats: float, reach: float = REACH, join: float = -np.inf, turn: float = 1.0) -> Lattice:
    """Choose a lattice from -reach to reach whose sums are off by about e^-nats. `Errors` bounds the true error."""
    width = min(0.85 * RIGHT / bins.largest, (2.0 * nats) ** 0.5)
    found = min(2.0 * np.pi * width / (nats + 0.5 * width * width), np.pi * (2.0 / nats) ** 0.5)
    unit = 2.0 ** (np.floor(np.log2(found)) - 7)
    step = float(unit * np.floor(found / unit))  # few binary digits, so that squares of nodes are exact
    first = -reach if join == -np.inf else (BENT * join - reach) / (1.0 + BENT)
    return Lattice(step, int(np.ceil(reach / step)), int(np.floor(first / step)), join, turn)


def transform(bins: Bins, lattice: Lattice, z: np.ndarray, path: Path) -> np.ndarray:
    """Return Psi, or Psi - 1 if `path.less`, at each z, (N,), by sums over the lattice. z[i] is summed along path i."""
    short, rest, speed = lattice.nodes()
    s = short + rest
    normal = lattice.step / np.sqrt(2.0 * np.pi) * speed
    normal = normal * np.exp(-0.5 * short * short) * np.exp(-rest * (short + 0.5 * rest))  # y * y would not be exact
    real = not (np.any(z.imag) or np.any(path.shift))
    windows, _, slopes = path.window(s)

    def at(one: complex, shift: float, less: bool, window: np.ndarray, slope: np.ndarray) -> complex:
        turn = shift * window
        y = s if real else s - 1j * turn
        weight = normal if real else normal * np.exp(turn * (0.5 * turn + 1j * s)) * (1.0 - 1j * shift * slope)
        if less:  # weights that add up to 1
            weight = weight / complex(math.fsum(weight.real), math.fsum(weight.imag))
        scale = -(one.real if real else one) / bins.count

        @functools.lru_cache(maxsize=1)  # if the next bins have equal coefficients, their kernel is reused
        def kernel(a: float, b: float, columns: int) -> np.ndarray:
            grown = [np.exp(coefficient * y - 0.5 * coefficient**2) for coefficient in (a, b)]
            exponent = np.multiply.outer(scale * grown[0], grown[1][:columns])
            np.maximum(exponent.real, LEAST, out=exponent.real)
            return (np.expm1 if less else np.exp)(exponent, out=exponent)

        if less:
            return _less_one(bins, weight, kernel)
        product = weight[:, None] * kernel(bins.first[0], bins.second[0], s.size) * weight
        if bins.second[-1] == 0.0:
            product = _times(np.ones((1, s.size)), product)
        nothing = np.zeros((len(product), 3)), np.zeros((3, s.size))
        for a, b, many in bins.runs():
            product = _times_power(product, kernel(a, b, s.size) * weight, many, *nothing)
        last = kernel(bins.first[-1], bins.second[-1], len(product))  # all columns of a chain are equal: use one
        return _sum(product * last.T)

    with np.errstate(over="ignore", invalid="ignore"):  # no warning is needed: inf or nan narrows no bracket
        given = z.tolist(), path.shift.tolist(), path.less.tolist(), windows, slopes
        return np.array([at(*each) for each in zip(*given, strict=True)])


def _less_one(bins: Bins, weight: np.ndarray, kernel: Callable[[float, float, int], np.ndarray]) -> complex:
    """Return Psi - 1 = sum_j E F_j + E(prod (1 + F_j) - 1 - sum_j F_j), where F_j = `kernel` = e^{-zX_j/b} - 1.

    `weight` sums up to 1. Arrays contain the weights of their normals. After n bins, with y_0 and y_n fixed, `pairs` is
    the mean of prod (1 + F_j) - 1 - sum_j F_j, and row(y_0) + column(y_n) + inner is the mean of sum_j F_j.
    """
    ones, begin = np.ones((1, weight.size)), weight[:, None]
    single = begin * kernel(bins.first[0], bins.second[0], weight.size) * weight
    row, inner, pairs = _times(single, ones.T), complex(0.0), None
    if bins.second[-1] == 0.0:  # a chain: y_0 is summed at once
        single, begin, row = _times(ones, single), np.ones((1, 1)), np.zeros((1, 1))
        inner = _sum(single)
    column = _times(np.ones((1, len(single))), single)
    mean: complex = _sum(column)
    total = mean
    for a, b, many in bins.runs():
        change = kernel(a, b, weight.size)
        factor, beside = (change + 1.0) * weight, _times(np.concatenate([weight[None], column]), change) * weight
        if pairs is None:
            pairs = _times(single, change * weight)
        else:
            pairs = _times(pairs, factor) + row * beside[:1] + begin * (beside[1:] + inner * beside[:1])
            inner += mean
        column, mean = beside[:1], _sum(beside[:1])
        if many > 1:
            left = np.hstack([row + inner * begin, begin, mean * begin])
            right = np.concatenate([column, _times(column, change) * weight, 0.0 * column])
            pairs = _times_power(pairs, factor, many - 1, left, right)
        inner, total = inner + (many - 1) * mean, total + many * mean
    last = kernel(bins.first[-1], bins.second[-1], len(single)).T
    if pairs is None:
        return total + _sum((single + begin * weight) * last)
    return total + _sum(pairs * (last + 1.0) + (row * weight + begin * (column + (inner + 1.0) * weight)) * last)


def _times_power(
    product: np.ndarray, kernel: np.ndarray, count: int, left: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """Repeat product -> product kernel + left right `count` times; left[:, 2] is added to left[:, 0] each time.

    Where that is less work, the map is composed with itself, as in a power by squaring.
    """
    size = 1
    while count:
        one_by_one = len(product) * count <= len(kernel) * count.bit_length()
        for _ in range(count if one_by_one else count & 1):
            product = _times(product, kernel) + left @ right
            left = left + np.outer(left[:, 2], [size, 0.0, 0.0])
        count = 0 if one_by_one else count >> 1
        if count:
            right = _times(right, kernel) + right + np.outer([0.0, 0.0, size], right[0])
            kernel, size = _times(kernel, kernel), 2 * size
    return product


def _sum(values: np.ndarray) -> complex:
    """Add up the entries of a matrix in blocks, as `_times` does."""
    return complex(_times(_times(np.ones((1, len(values))), values), np.ones((values.shape[1], 1)))[0, 0])


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply matrices. Products over at most `BLOCK` nodes are added in pairs, which rounds less than one product."""
    if len(a) > ROWS:
        return np.concatenate([_times(a[row : row + ROWS], b) for row in range(0, len(a), ROWS)])
    if len(b) <= BLOCK:
        return a @ b
    half = (len(b) + BLOCK - 1) // BLOCK // 2 * BLOCK
    product = _times(a[:, :half], b[:half])
    product += _times(a[:, half:], b[half:])
    return product


class Decay(NamedTuple):
    """Upper bounds of log Psi(x) at ascending x >= 0. Chords between them are upper bounds too: log Psi is convex."""

    x: np.ndarray
    log: np.ndarray

    def __call__(self, x: Array) -> Array:
        return np.interp(x, self.x, self.log)


class Wedge(NamedTuple):
    """N sets of points z: least <= |z| <= size, low <= arg z <= high and Re z >= real. Every field has shape (N,)."""

    least: np.ndarray
    size: np.ndarray
    low: np.ndarray
    high: np.ndarray
    real: np.ndarray

    @classmethod
    def around(cls, z: np.ndarray, groups: np.ndarray) -> Wedge:
        """Return one wedge for each group of consecutive z; `groups` holds the first index of each group."""
        size, angle, slack = np.abs(z), np.angle(z), 1e-12
        least, most = (lambda each, reduce=one.reduceat: reduce(each, groups) for one in (np.minimum, np.maximum))
        ends = least(size) * (1.0 - slack), most(size) * (1.0 + slack), least(angle) - slack, most(angle) + slack
        return cls(*ends, least(z.real))


class Boxed(NamedTuple):
    """Bounds, (N, boxes) each, of y(s + i side strip) on each `Path`, for s in each of several intervals ("boxes")."""

    real: np.ndarray  # upper bound of Re y
    low: np.ndarray  # low <= Im y <= high
    high: np.ndarray
    density: np.ndarray  # upper bound of int |phi(y) dy|, phi: normal density; for side 0, of |phi(y) dy/(phi(s) ds)|


def freed(bins: Bins, x: Array) -> Array:
    """Return an upper bound of log E e^{-x rest} - log E e^{-xS}; `rest` is S without two bins that share a y_j."""
    best = np.clip(QUANTILES, bins.sizes.min(), bins.sizes.max())
    # For each u of `QUANTILES`, `best` is the standard deviation, within the bins' range, that makes X(u) largest.
    x = np.asarray(x, np.float64)[..., None] / bins.count
    each = x * np.exp(best * QUANTILES - 0.5 * best * best) - log_ndtr(QUANTILES)
    return np.minimum(2.0 * np.minimum(np.min(each, axis=-1), x[..., 0]) + 1e-9, 600.0)


class Norms(NamedTuple):
    """Upper bounds for one bin and N wedges of z, of functions of the bin's two normals. f is e^{-zX/b}."""

    whole: np.ndarray
    """(N,) norm in L2 of the larger of e^{x|X|/b} |f| and 1."""
    top: np.ndarray
    """(N,) largest value of this function at nodes."""
    shares: np.ndarray
    """(2, 4, N) norms in L2 and in L1, each divided by `whole`, of four functions.

    They are the rounding of X, the rounding of weights, f - 1, and the rounding of weights times f - 1.
    """
    missed: np.ndarray
    """(2, 3, N) norms of f in L2 if one normal is shifted up, shifted down, or beyond the lattice."""
    apart: np.ndarray
    """(3, N) norms of f - 1 in these three cases, over those of f."""


class Errors:
    """Bounds of the error of `transform` on a lattice."""

    def __init__(self, bins: Bins, lattice: Lattice, rough: bool = False) -> None:
        self.bins, self.lattice, self.kinds = bins, lattice, list(bins.kinds(rough))
        step, (short, rest, speed) = lattice.step, lattice.nodes()
        nodes = short + rest
        width = max(BOX / bins.angles[1], (nodes[-1] - nodes[0]) / (ROUGH_BOXES if rough else MOST_BOXES))
        begin = np.flatnonzero(np.diff(np.floor((nodes - nodes[0]) / width), prepend=-1.0))
        self.places = (np.append(begin, nodes.size) + lattice.first - 0.5) * step  # edges of boxes, as values of t
        edges = lattice.place(self.places)
        sums = np.add.reduceat(step * speed / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * nodes**2), begin)
        side = np.exp(log_ndtr(-np.abs(edges)))  # Phi at edges below 0, and 1 - Phi at edges above 0
        middle = (edges[1:] > 0.0) & (edges[:-1] < 0.0)
        integrals = np.where(middle, 1.0 - side[1:] - side[:-1], np.abs(np.diff(side)))
        tail = [1.01 * float(np.exp(log_ndtr(np.asarray(max(nodes[0], -nodes[-1])))))]
        self.edges = np.concatenate([[-np.inf], edges, [np.inf]])
        # for each box, the larger of two masses: the lattice sum and the integral of the normal density
        self.mass = np.concatenate([tail, np.maximum(sums, integrals) * (1.0 + 1e-12), tail])
        widest = min(RIGHT / bins.largest / lattice.slant, 2.0 * np.pi / step, lattice.widest)
        strips = np.linspace(0.25, 0.98, 8) * widest
        off = 2.2 * float(np.min(_geometric(strips, step) * np.exp(0.5 * np.square(lattice.slant * strips))))
        self.straight = (bins.count + 3.0) * 2.0 * (off + tail[0])
        self.unit = 2.83 * BLOCK + (nodes.size // BLOCK).bit_length() + 10.0  # rounding of one sum and of a kernel

    def log_error(self, decay: Decay, z: Wedge, path: Path, others: Sequence[Errors] = ()) -> np.ndarray:
        """Return (1 + len(others), N) logs of errors: upper bounds for this lattice, then estimates for `others`."""
        bins, edges, less = self.bins, self.edges, path.less
        turned = np.maximum(z.high - path.shift * bins.angles[0], path.shift * bins.angles[1] - z.low)
        away = np.where(np.isinf(path.start), turned, z.high)
        x = np.where(path.shift == 0.0, z.real, z.least * np.cos(np.minimum(away, RIGHT)))
        x = np.where(less, 0.0, np.maximum(x, 0.0) * (1.0 - 1e-9))
        shapes: tuple[tuple[int, ...], ...] = ((), (), (3,), (2, 4), (2, 3))
        log_whole, top, apart, shares, pair = (np.zeros((*shape, x.size)) for shape in shapes)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            sides = [_boxed(path, self.lattice, self.places, side) for side in (0, 1, -1)]
            plain = self.mass * np.maximum.accumulate(sides[0].density, axis=1)
            beyond = np.where(np.isinf(np.diff(edges)), plain, 0.0)
            weights = plain, sides[1].density, sides[2].density, beyond
            for kind in self.kinds:
                one = self._bin(kind, z, x, path, sides, weights)
                log_whole, top = log_whole + kind.many * np.log(one.whole), np.maximum(top, one.top)
                shares = shares + kind.many * one.shares
                pair, apart = np.maximum(pair, one.missed / one.whole), np.maximum(apart, one.apart)
            # A bin's norm in L1 may replace its norm in L2. The two bins that share its normals then count as `top`.
            exponents, alone = (np.minimum(shares[0, at], shares[1, at] * top**2) for at in (0, 2))
            _, turned, changes, changes_turned = shares[0]
            # Harris' inequality needs an ascending function. The rounding of weights is not ascending. So its largest
            # value counts, or the two bins that share the normal are left out (`freed`).
            lost, of_weights = np.exp(freed(bins, x)), self._turned(path, sides[0])
            turned = np.where(less, turned, np.minimum(lost * turned, bins.count * np.max(of_weights, axis=1)))
            # `of_one` bounds what a normal's sum of weights misses of 1, `missed` what its sum misses of Psi or Psi - 1
            of_one = np.array([np.sum(each, axis=1) for each in weights[1:]])
            missed = pair[0] * pair[1] * np.where(less, changes + 2.0 * apart, lost)
            missed = missed + np.where(less, of_one * changes, 0.0)
            weight = np.where(less, 40.0 + np.sum(plain * (34.0 + of_weights), axis=1), 34.0)
            rows = []
            for each in (self, *others):
                factor = bins.count * _geometric(path.strip, each.lattice.step)
                rest = 3.0 * bins.count * each.mass[0] / self.mass[0]  # ratio of the masses beyond the two lattices
                off, off_one = ((one[0] + one[1]) * factor + one[2] * rest for one in (missed, of_one))
                unit = each.unit + weight
                all_sums = (bins.count + np.where(less, 4.0, 2.0)) * unit + 20.0
                of_changes = (2.0 * unit + bins.count + 20.0) * alone + 0.5 * all_sums * changes**2
                of_changes = of_changes + (turned * changes + changes_turned) * (1.0 + changes)
                rounding = exponents + np.where(less, of_changes, all_sums + turned)
                found = np.log(1.1 * (off + ROUNDOFF * rounding)) + log_whole + decay(x)
                good = (np.where(less, off_one, each.straight * lost) < 0.01) & (path.strip <= each.lattice.widest)
                rows.append(np.where(good & ~np.isnan(found), found, np.inf))
        return np.array(rows)

    def _turned(self, path: Path, boxed: Boxed) -> np.ndarray:
        """Return bounds, (N, boxes) in units of `ROUNDOFF`, of the rounding that a path's shift adds to weights."""
        nodes = np.isfinite(np.diff(self.edges))
        far = np.where(nodes, np.maximum(np.abs(self.edges[1:]), np.abs(self.edges[:-1])), 0.0) + path.shift[:, None]
        return np.where(nodes, -boxed.low * (16.0 * far + 10.0 / path.width[:, None]), 0.0)

    def _bin(
        self, kind: Kind, z: Wedge, x: np.ndarray, path: Path, sides: list[Boxed], weights: tuple[np.ndarray, ...]
    ) -> Norms:
        """Return the `Norms` of a bin of one kind."""
        both, most, less = (kind.first, kind.second), z.size / self.bins.count, np.any(path.less)
        along = lambda place, values: values[:, None, :] if place else values[:, :, None]
        each = lambda values: values[:, None, None]

        def rise(used: tuple[Boxed, Boxed], x: np.ndarray) -> tuple[Array, Array]:
            """Bound |X|, and log |e^{-zX/b}| + x |X|/b, from above in each box. The second bound is at least 0."""
            log, low, high = -0.5 * kind.variance[0], each(z.low), each(z.high)
            for place, ((least, largest), boxed) in enumerate(zip(both, used, strict=True)):
                if largest > 0.0:
                    log = log + along(place, np.where(boxed.real > 0.0, largest, least) * boxed.real)
                    low = low + along(place, np.minimum(least * boxed.low, largest * boxed.low))
                    high = high + along(place, np.maximum(least * boxed.high, largest * boxed.high))
            cosine = np.cos(np.minimum(np.maximum(-low, high), np.pi)) - 1e-15
            least = np.where(cosine < 0.0, each(most), each(z.least / self.bins.count)) * cosine
            if used[0] is used[1]:  # no normal is moved off the path. For a real X, |e^{-zX/b}| = e^{-(Re z) X/b}
                least = np.where(each(path.shift) == 0.0, each(z.real / self.bins.count), least)
            size, rate = np.exp(log) * (1.0 + 1e-12), each(x / self.bins.count) - least
            return size, np.where(rate > 0.0, size * rate, 0.0)

        norm = lambda values, one, two: np.einsum("nij,ni,nj->n", values, one, two)
        ordered = lambda place, one, two: (two, one) if place else (one, two)
        grow = np.maximum.accumulate
        shape = x.size, *(self.mass.size,) * 2
        size, log = (np.broadcast_to(part, shape) for part in rise((sides[0], sides[0]), x))
        square = np.exp(2.0 * grow(grow(log, axis=1), axis=2))
        change = lambda size: np.minimum(each(most) * size, 2.0)  # >= |f - 1| over the larger of |f| and 1
        nodes = np.isfinite(np.diff(self.edges))  # all boxes but the two infinite ones, which have no nodes
        plain, missed, apart = weights[0], np.empty((2, 3, x.size)), np.full((2, 3, x.size), 4.0)
        for place, (kind_of, side) in itertools.product((0, 1), enumerate(sides[1:])):
            moved = rise(ordered(place, side, sides[0]), np.zeros(x.size))
            # the other normal stays within the boxes that have nodes
            away, log = (np.where(along(1 - place, nodes[None]), np.broadcast_to(part, shape), 0.0) for part in moved)
            square_moved = np.exp(2.0 * grow(log, axis=2 - place))
            measures = ordered(place, weights[1 + kind_of], plain * nodes)
            missed[place, kind_of] = norm(square_moved, *measures)
            if less:
                apart[place, kind_of] = norm(square_moved * change(away) ** 2, *measures) / missed[place, kind_of]
        missed[:, 2] = [norm(square, *ordered(place, weights[3], plain)) for place in (0, 1)]
        far = np.where(nodes, np.maximum(np.abs(self.edges[1:]), np.abs(self.edges[:-1])), 0.0) + path.shift[:, None]
        spread = 26.0 * (kind.variance[1] + sum(along(p, both[p][1] * far) for p in (0, 1))) + 42.0
        size, factor = (np.where(nodes[:, None] & nodes, values, 0.0) for values in (size, np.sqrt(square)))
        turned = self._turned(path, sides[0])[:, :, None]
        parts = each(most) * size * spread, turned, change(size), change(size) * turned
        whole, shares = np.sqrt(norm(square, plain, plain)), np.zeros((2, 4, x.size))
        for at, one in enumerate(parts if less else parts[:2]):
            shares[:, at] = norm(np.square(factor * one), plain, plain) ** 0.5, norm(factor * one, plain, plain)
        return Norms(
            whole, np.max(factor, axis=(1, 2)), shares / whole, np.sqrt(missed), np.sqrt(np.max(apart, axis=0))
        )


class Piece(NamedTuple):
    """Points of a line that use one lattice. `at` has their indices. Each point has a path and a log error bound."""

    at: np.ndarray
    lattice: Lattice
    path: Path
    log_error: np.ndarray


def pieces(
    bins: Bins,
    decay: Decay,
    z: np.ndarray,
    log_weight: np.ndarray,
    log_goal: float,
    lattices: Sequence[Lattice],
    less: bool,
) -> Iterator[Piece]:
    """Choose a path and one of `lattices` (coarsest first) for each z. Weighted errors should sum to <= e^log_goal."""
    groups = np.arange(0, z.size, max(1, z.size // 16))  # about 16 groups; each has one error bound (`Wedge`)
    many = np.diff(np.append(groups, z.size))
    wedge, errors = Wedge.around(z, groups), [Errors(bins, lattice) for lattice in lattices]
    tried, guesses_of = list[Path](), list[np.ndarray]()
    for join in dict.fromkeys(lattice.join for lattice in lattices):
        some = [number for number, lattice in enumerate(lattices) if lattice.join == join]
        middle = Errors(bins, lattices[some[len(some) // 2]], rough=True)
        for path in paths(middle, wedge, less):
            found = np.full((len(lattices), groups.size), np.inf)
            found[some] = middle.log_error(decay, wedge, path, [errors[number] for number in some])[1:]
            tried, guesses_of = [*tried, path], [*guesses_of, found]
    guess = np.array(guesses_of)  # (paths, lattices, wedges)
    total = np.min(guess, axis=0) + np.logaddexp.reduceat(log_weight, groups)
    work = np.multiply.outer([_work(bins, lattice) for lattice in lattices], many)
    each, least = np.arange(groups.size), float(np.logaddexp.reduce(np.min(total, axis=0)))
    for nearly in NEARLY:
        limit = min(max(log_goal, least + nearly), 600.0)  # `least` may be infinite
        share = np.exp(np.minimum(total - limit, 600.0))
        # each wedge takes the lattice of least work + price * share, at the lowest price that reaches `limit`
        for price in work.max() * 1.5 ** np.arange(-20.0, 60.0):
            chosen = np.argmin(work + price * share, axis=0)
            if np.sum(share[chosen, each]) <= 1.0:
                break
        if np.sum(work[chosen, each]) <= CHEAP:
            break
    route, owner, log_error = np.zeros(groups.size, int), np.full(groups.size, -1), np.full(groups.size, np.inf)
    wanted = np.min(guess, axis=0)[chosen, each] + 1.0
    for number, one in enumerate(errors):
        # a wedge whose bound is much worse than its estimate tries other lattices, and keeps its least bound
        here = np.flatnonzero((log_error > wanted) & (chosen <= number) & (np.min(guess[:, number], axis=0) <= wanted))
        if here.size == 0:
            continue
        best = np.argmin(guess[:, number, here], axis=0)
        path = Path(*(np.array(every)[best, here] for every in zip(*tried, strict=True)))
        logs = one.log_error(decay, Wedge(*(every[here] for every in wedge)), path)[0]
        lost = np.isinf(logs)  # a path without a bound is not tried again
        guess[best[lost], :, here[lost]] = np.inf
        better = logs < log_error[here]
        some = here[better]
        route[some], owner[some], log_error[some] = best[better], number, logs[better]
    for number in np.unique(owner[owner >= 0]).tolist():
        here = np.flatnonzero(owner == number)
        path = Path(*(np.repeat(np.array(every)[route[here], here], many[here]) for every in zip(*tried, strict=True)))
        at = np.concatenate([np.arange(groups[i], groups[i] + many[i]) for i in here])
        yield Piece(at, lattices[number], path, np.repeat(log_error[here], many[here]))


def _boxed(path: Path, lattice: Lattice, places: np.ndarray, side: int) -> Boxed:
    """Bound y(s + i side strip) of each path in each box: with s unmoved (side 0), moved up (1), or moved down (-1)."""
    moved, shift, start = abs(side) * path.strip[:, None], path.shift[:, None], path.start[:, None]
    edges = lattice.place(places + 1j * moved)
    beyond = np.full((len(edges), 1), np.inf)
    real, up = np.hstack([-beyond, edges.real, beyond]), np.hstack([lattice.slant * moved, edges.imag, moved])
    left, right, up, most_up = real[:, :-1], real[:, 1:], up[:, 1:], up[:, :-1]
    windows, imaginary, slopes = zip(
        *(path.window(x, each) for x in (left, right) for each in (up, most_up)), strict=True
    )
    inside, turn = (left < start) & (start < right), most_up / path.width[:, None]
    at_start = 0.5 * np.tan(0.5 * turn), 1.0 / (path.width[:, None] * (2.0 + 2.0 * np.cos(turn)))
    least_window, window = np.min(windows, axis=0), np.max(windows, axis=0)
    moves = np.min(imaginary, axis=0), np.where(inside, at_start[0], np.max(imaginary, axis=0))
    steep = np.where(inside, at_start[1], np.max(slopes, axis=0))
    # left of the window, where s is moved further than the window is wide: |W| <= e/(1 - e), |W'| <= e/(1 - e)^2/width
    e = np.exp(np.minimum(right - start, 0.0) / path.width[:, None])
    far, most = (turn > RIGHT) & ~np.isinf(start), e / np.maximum(1.0 - e, 1e-300)
    least_window, window = np.where(far, -most, least_window), np.where(far, most, window)
    moves = np.where(far, -most, moves[0]), np.where(far, most, moves[1])
    steep = 1.0 + shift * np.where(far, most / np.maximum(1.0 - e, 1e-300) / path.width[:, None], steep)
    least, largest = (shift * each for each in (moves if side >= 0 else (-moves[1], -moves[0])))
    y_real = left + least, right + largest
    ends = (up, most_up) if side >= 0 else (-most_up, -up)
    low, high = ends[0] - shift * window, ends[1] - shift * least_window
    grown = np.exp(0.5 * np.square(np.maximum(np.abs(low), np.abs(high)))) * steep
    if side != 0:
        near = np.where(y_real[0] * y_real[1] > 0.0, np.minimum(np.abs(y_real[0]), np.abs(y_real[1])), 0.0)
        flat = (right - left) * np.exp(-0.5 * near * near) / np.sqrt(2.0 * np.pi)
        if not lattice.plain:  # |ds/d Re s| on the moved curve
            flat = flat * np.hypot(1.0, 0.5 * BENT * moved / np.sqrt(lattice.turn**2 - moved**2))
        grown = np.where(np.isinf(flat), 1.3 * np.exp(log_ndtr(-near)), flat) * grown
    return Boxed(y_real[1], low, high, grown)


def _geometric(width: Array, step: float) -> Array:
    """Return 1/(e^{2 pi width/step} - 1). Where width is 0, return inf."""
    turns = 2.0 * np.pi * np.maximum(width, 1e-9) / step
    return np.where(width > 0.0, np.exp(np.maximum(-turns, -700.0)) / -np.expm1(-turns), np.inf)


def paths(errors: Errors, z: Wedge, less: bool) -> list[Path]:
    """Propose several paths for each wedge. `Errors` bounds the error on any path, so a poor path is still valid."""
    bins, size = errors.bins, z.size / errors.bins.count
    some = np.concatenate([bins.first, bins.second])
    small, both, found = some[some > 0.0].min(), bins.angles[1], []
    for share, more in WINDOWS[errors.lattice.join, errors.lattice.turn]:
        most = z.low / both if more == 0.0 else 2.0 * z.high / (small + both)
        shift = share * np.clip(most, 0.0, MOST_TURN)
        start = np.clip((np.log(max(more, 1e-9) / size) + 0.5 * float(bins.variances.max())) / both, -3.0, 6.0)
        above = RIGHT - z.high + (bins.angles[0] if more == 0.0 else small) * shift
        strip = 0.97 * np.minimum(above, RIGHT + z.low - shift * both) / bins.largest
        strip = np.clip(strip, 1e-6, min(2.0 * np.pi / errors.lattice.step, errors.lattice.widest))
        # where s(t) bends, s moves slightly further than t at the start of the window
        width = np.maximum(2.0 / np.pi * strip * (1.0 + 1e-9 if errors.lattice.plain else 1.2), 0.3)
        found.append(Path(shift, np.where(more == 0.0, -np.inf, start), width, strip, less & (z.size <= NEAR)))
    return found


def decay_of(bins: Bins, x: np.ndarray) -> Decay:
    """Return a `Decay` at 0 and at those x > 0 (ascending) where lattice sums are proved to be off by at most 1 %."""
    value = np.full(x.size, np.nan)
    for nats, reach in ((20.0, REACH), (45.0, REACH), (90.0, FARTHEST)):
        errors = Errors(bins, lattice_for(bins, nats + np.log(bins.count), reach))
        now = np.isnan(value) & (errors.straight * np.exp(freed(bins, x)) < 0.01)
        path = Path(*np.outer([0.0, -np.inf, 1.0, 1.0, 0.0], np.ones(np.sum(now))))
        value[now] = transform(bins, errors.lattice, x[now] + 0j, path).real
    known = np.isfinite(value)
    return Decay(np.append(0.0, x[known]), np.append(0.0, np.log(np.maximum(value[known], 1e-290)) + 0.02))


def log_modulus(bins: Bins, decay: Decay, least: Array, most: Array, low: Array, high: Array, less: bool) -> Array:
    """Return an upper bound of log |Psi(z) - less| for all z with least <= |z| <= most and low <= arg z <= high."""
    # each shift, an imaginary number added to every y_j, gives a bound
    shift = np.linspace(0.0, 1.0, 13) * np.minimum(high[..., None] / bins.angles[1], MOST_TURN)
    ends = (high[..., None] - bins.angles[0] * shift, bins.angles[1] * shift - low[..., None])
    away = np.maximum(*ends)
    cost = np.where(away < RIGHT, 0.5 * bins.count * shift * shift, np.inf)
    logs = np.min(cost + decay(least[..., None] * np.cos(np.minimum(away, RIGHT))), axis=-1)
    # |Psi - 1| is at most |Psi| + 1. It is also at most |z| times the largest |Psi'| between 0 and z.
    return np.minimum(np.logaddexp(logs, 0.0), np.log(most) + np.min(cost, axis=-1)) if less else logs


class Line(NamedTuple):
    """The path z(v) = c + bend scale (1 - cosh(v/scale)) + i scale sinh(v/scale), or c + iv where bend = 0."""

    c: float
    bend: float
    scale: float

    def at(self, v: Array) -> tuple[Array, Array]:
        """Return z and dz/dv at a complex v."""
        if self.bend == 0.0:
            return self.c + 1j * v, np.full(np.shape(v), 1j)
        u = np.asarray(v) / self.scale
        z = self.c + self.bend * self.scale * (1.0 - np.cosh(u)) + 1j * self.scale * np.sinh(u)
        return z, 1j * np.cosh(u) - self.bend * np.sinh(u)

    def places(self, count: int, span: float) -> np.ndarray:
        """Return `count` + 1 ascending values of v, from 0. If `bend` is 0, the last value is `span`."""
        if self.bend == 0.0:
            return self.c * np.sinh(np.linspace(0.0, np.arcsinh(span / self.c), count + 1))
        return self.scale * np.linspace(0.0, 8.0, count + 1)


class Cells(NamedTuple):
    """Bounds of the integral of |e^{zk} (Psi(z) - less) z^-2 dz| over J parts of a line. The last part is infinite."""

    real: np.ndarray
    """(J,) largest Re z on each part."""
    log: np.ndarray
    """(J,) log of a bound of the integral over each part, without the factor e^{k real}. `real` is the field above."""

    def log_sum(self, k: Array) -> Array:
        return np.logaddexp.reduce(self.log + np.asarray(k)[..., None] * self.real, axis=-1)


def cells_on(bins: Bins, decay: Decay, line: Line, up: float, v: np.ndarray, less: bool) -> Cells:
    """Return the `Cells` of the line z(v + i up). Parts lie between neighbouring v, the last part beyond the last v."""
    with np.errstate(all="ignore"):
        z, _ = line.at(v + 1j * up)
        angle, real, imag = np.angle(z), z.real, z.imag
        nearest = np.minimum(np.abs(real[1:]), np.abs(real[:-1])) * (real[1:] * real[:-1] > 0.0)
        size = np.hypot(nearest, imag[:-1]) * (1.0 - 1e-12)
        most = np.hypot(np.maximum(np.abs(real[1:]), np.abs(real[:-1])), imag[1:]) * (1.0 + 1e-12)
        speed = 1.0 if line.bend == 0.0 else (1.0 + line.bend) * np.cosh(v[1:] / line.scale)
        log = log_modulus(bins, decay, size, most, angle[:-1] - 1e-12, angle[1:] + 1e-12, less)
        log = log + np.log(np.diff(v) * speed / size**2)
        fine = (real[0] > 0.0) & (np.diff(imag) > 0.0) & (np.diff(real) <= 1e-12 * np.abs(z[1:]))
        log = np.where(np.isnan(log) | ~fine, np.inf, log)
    return Cells(np.append(real[:-1], real[-1]), np.append(log, log_beyond(bins, decay, line, up, v[-1:], less)))


def log_beyond(bins: Bins, decay: Decay, line: Line, up: float, v: np.ndarray, less: bool) -> np.ndarray:
    """Bound, for each v, log int |e^{(z - z(v + i up)) k} Psi(z) z^-2 dz| over z(x + i up), x >= v; or of Psi - 1."""
    with np.errstate(all="ignore"):
        z, turn = line.at(v + 1j * up)[0][:, None], up / line.scale
        rise, fall = np.cos(turn) - line.bend * np.sin(turn), line.bend * np.cos(turn) + np.sin(turn)
        lean = fall / rise if line.bend > 0.0 else 0.0
        most = np.linspace(0.0, min(RIGHT, MOST_TURN * bins.angles[1]), 40)[1:-1]
        least = most * bins.angles[0] / bins.angles[1]
        # Re(z e^{-i psi}) is concave in psi, so its minimum over least <= psi <= most is at `least` or at `most`
        x = np.minimum(*(z.real * np.cos(psi) + z.imag * np.sin(psi) for psi in (least, most)))
        logs = 0.5 * bins.count * (most / bins.angles[1]) ** 2 + decay(np.maximum(x, 0.0))
        logs = np.min(np.where((np.tan(least) >= lean) & (lean >= 0.0) & (x > 0.0), logs, np.inf), axis=1)
        logs = np.logaddexp(logs, 0.0) if less else logs
        return np.where(z[:, 0].imag > 0.0, logs + np.log((1.0 + lean) / z[:, 0].imag), np.inf)


class Contour(NamedTuple):
    """A line of integration, placed for one k, with the transform on the line. Other k near this k use the line too."""

    less: bool
    """Whether the transform is Psi - 1, whose integral is E(k - S)_+ - k, or Psi, whose integral is E(k - S)_+."""
    z: np.ndarray
    """(N,) points of the line, at which the sum takes its terms."""
    value: np.ndarray
    """(N,) terms of the sum, without their factor e^{zk}."""
    error: np.ndarray
    """(N,) bounds of the errors of `value`."""
    strips: tuple[Cells, ...]
    """Bounds of the integral along the upper and the lower edge of a strip around the line."""
    log_strip: float
    """log of 1/(e^{2 pi d/h} - 1), the factor of `strips` in the trapezoid error, for step h and half width d."""
    beyond: Cells
    """Bound of the part of the integral beyond the last point of the line."""

    def put(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return E(k - S)_+, or E(k - S)_+ - k if `less`, and a bound of the error, for k of any shape."""
        with np.errstate(all="ignore"):
            grown = np.exp(k[..., None] * self.z)
            units = self.z.size + 40.0 + 12.0 * k[..., None] * np.abs(self.z)
            error = np.sum(np.abs(grown) * (self.error + ROUNDOFF * units * np.abs(self.value)), axis=-1)
            cut = sum(np.exp(cells.log_sum(k) + self.log_strip) for cells in self.strips) + np.exp(
                self.beyond.log_sum(k)
            )
            return np.sum((grown * self.value).real, axis=-1), 1.001 * (error + cut / np.pi)


def shapes_for(bins: Bins, less: bool) -> list[tuple[float, float]]:
    """Return those of `SHAPES` that suit the bins. With Psi - 1, lines must bend."""
    cost = lambda bend: 0.5 * bins.count * (np.arctan(bend) / bins.angles[0]) ** 2
    return [(bend, scale) for bend, scale in SHAPES if (bend > 0.0 or not less) and cost(bend) < COSTLY]


def contour(
    bins: Bins, decay: Decay, k: float, log_goal: float, log_most: float, most: float, less: bool
) -> tuple[Contour, float]:
    """Aim at error e^log_goal. Return (contour for k, work). ArithmeticError if work > `most` or error > e^log_most."""
    x = np.geomspace(min(decay.x[1], 0.5 / k), decay.x[-1], 200)
    saddle = float(x[np.argmin(k * x + decay(x) - 2.0 * np.log(x))])
    best: tuple[Any, ...] = (np.inf,)
    shapes = shapes_for(bins, less)
    for share, (bend, scale) in itertools.product(SHARES[less], shapes):
        line = Line(share * saddle, bend, scale * share * saddle)
        v = line.places(CELLS, 1e3 * decay.x[-1])
        enough = np.flatnonzero(log_beyond(bins, decay, line, 0.0, v, less) + k * line.at(v)[0].real < log_goal - 3.0)
        if enough.size == 0:
            continue
        for width in np.array([0.7, 0.95]) * min(line.c, line.scale * np.arctan(bend) if bend else line.c):
            strips = tuple(cells_on(bins, decay, line, side * width, v, less) for side in (1.0, -1.0))
            log_sum = float(np.logaddexp(*(each.log_sum(k) for each in strips)))
            if log_sum == np.inf:
                continue
            step = 2.0 * np.pi * width / max(log_sum - log_goal + 2.0, 1.0)
            best = min(best, (v[enough[0]] / step, line, v[enough[0]], step, width, strips), key=lambda each: each[0])
    if best[0] > MOST_NODES:
        raise ArithmeticError("no contour is known for these bins")
    nodes, line, end, step, width, strips = best
    count = int(np.ceil(end / step))
    z, speed = line.at(step * np.arange(count + 1))
    factor = step / np.pi * speed / (1j * z * z) * np.where(np.arange(count + 1) == 0, 0.5, 1.0)
    log_weight = np.log(np.abs(factor)) + k * z.real
    nats = max(float(k * line.c + decay(line.c) - np.log(line.c)) - log_goal, 10.0)
    lost = 0.0 if less else float(freed(bins, saddle))
    nats += lost
    reach = min((2.0 * nats + 8.0) ** 0.5, REACH) if k >= 1.0 else max(REACH, min((2.0 * lost + 40.0) ** 0.5, FARTHEST))
    tries = np.geomspace(0.6 * nats, 6.0 * nats + 36.0, 24).tolist()
    lattices = [lattice_for(bins, each, reach, *bend) for bend in WINDOWS for each in tries]
    lattices = [each for each in lattices if each.half < MOST_HALF and (nodes + 3.0) * _work(bins, each) < most]
    lattices = sorted(lattices, key=lambda each: _work(bins, each))
    # most of the error may come from the lattices, whose accuracy takes far more work than that of the line
    used = list(pieces(bins, decay, z, log_weight, log_goal + 0.3, lattices, less)) if lattices else []
    logs, psi = np.full(z.size, np.inf), np.zeros(z.size, complex)
    for piece in used:
        logs[piece.at] = piece.log_error
    if not max(float(np.logaddexp.reduce(logs + log_weight)), log_goal) < log_most:
        raise ArithmeticError("a contour for these bins takes too long, or its error is too large")
    for piece in used:
        psi[piece.at] = transform(bins, piece.lattice, z[piece.at], piece.path) - (less & ~piece.path.less)
    work = sum(len(piece.at) * _work(bins, piece.lattice) for piece in used)
    last, turns = step * np.array([count]), 2.0 * np.pi * width / step
    beyond = Cells(line.at(last)[0].real, log_beyond(bins, decay, line, 0.0, last, less))
    cut = -turns - np.log(-np.expm1(-turns))
    return Contour(less, z, factor * psi, np.exp(logs) * np.abs(factor), strips, cut, beyond), work


def _work(bins: Bins, lattice: Lattice) -> float:
    """Estimate the number of multiplications that `transform` takes for one z. An exponential counts as 60."""
    points = lattice.half - lattice.first + 1.0
    rows = 3.0 if bins.second[-1] == 0.0 else points
    steps = [60.0 + min(many * rows, 2.0 * points * np.log2(many + 1)) for _, _, many in bins.runs()]
    return points**2 * (120.0 + sum(steps))


def theorems(bins: Bins, sign: float, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds of delta, each (K,), without a contour (README.md, "Bins that share noise")."""
    excess = lambda x: 0.5 * np.square(np.minimum(x, 500.0)) * np.exp(np.minimum(x, 500.0))  # >= e^x - 1 - x if x < 500
    rest = np.sqrt(np.sum(excess(bins.variances) + 2.0 * excess(bins.shared))) / bins.count
    spread = bins.first + np.roll(bins.second, 1)
    c = (bins.first * spread + bins.second * np.roll(spread, -1)) / np.sqrt(np.sum(spread**2))
    t = np.full(eps.shape, 0.5 * c.mean())
    for _ in range(20):  # Newton steps for t: log E[S | T = t] = sign * eps (README.md). The left side is convex in t.
        logs = c * t[:, None] - 0.5 * c * c
        ratio = np.logaddexp.reduce(logs, axis=1) - np.log(bins.count)
        t = t - (ratio - sign * eps) / np.sum(c * np.exp(logs - ratio[:, None]), axis=1) * bins.count
    tail = lambda x: np.exp(log_ndtr(-sign * x))
    # In units of ROUNDOFF, log_ndtr(x) is off by at most 12 + 3 x^2, and its argument x = t - c by |t| + 40 c.
    units = lambda x, c: ROUNDOFF * (32.0 + 3.0 * x * x + (1.0 + np.abs(x)) * (np.abs(t[:, None]) + 40.0 * c))
    with np.errstate(over="ignore", invalid="ignore"):
        k, sized = np.exp(eps), float(bins.sizes.max())
        p, q = tail(t[:, None] - c), tail(t)
        p_off, q_off = np.mean(p * units(t[:, None] - c, c), axis=1), q * units(t[:, None], 0.0)[:, 0]
        p = np.mean(p, axis=1)
        value, off = (p - k * q, p_off + k * q_off) if sign > 0 else (q - k * p, q_off + k * p_off)
        low = value - off
        ratio = np.mean(np.exp(c * t[:, None] - 0.5 * c * c), axis=1)
        high = value + off + (0.5 * rest * (1.0 + 1e-9) + np.abs(ratio - np.exp(sign * eps))) * (1.0 if sign > 0 else k)
        if sign > 0:
            x = eps + np.log(bins.count)
            one = np.exp(log_ndtr(0.5 * sized - x / sized)), np.exp(x + log_ndtr(-0.5 * sized - x / sized))
            low = np.fmax(low, (one[0] * (1.0 - 1e-11) - one[1] * (1.0 + 1e-11)) / bins.count)
    return np.fmax(np.nan_to_num(low), 0.0), np.fmin(np.nan_to_num(high, nan=1.0), 1.0)


class Profile:
    """Brackets of delta in both directions. If a bracket is too wide, `delta` places another contour."""

    def __init__(self, bins: Bins) -> None:
        self.bins, self.contours, self.left = bins, list[Contour](), 0.0
        self.missed = list[tuple[float, float, float]]()  # (sign, eps, width/scale) of brackets that stayed too wide
        self.decay = Decay(np.zeros(1), np.zeros(1))
        if SIZES[0] <= bins.sizes.min() and bins.sizes.max() <= SIZES[1]:
            x = np.geomspace(0.1, 500.0, 40) / min(bins.deviation, 3.0)
            far = x[-1] * 1.6 ** np.arange(1.0, 25.0)  # while log Psi may be above -60
            self.decay = decay_of(bins, np.append(x, far[0.5 * bins.count * freed(bins, far) < 60.0]))

    def known(self, sign: float, eps: np.ndarray) -> np.ndarray:
        """Return the best lower bound, estimate and upper bound, (3, K), of delta_remove (sign 1) or of delta_add."""
        low, high = theorems(self.bins, sign, eps)
        if sign < 0 and self.decay.x.size > 1:
            k, x = np.exp(-eps), self.decay.x[1:]
            chernoff = np.min(k[:, None] * x + self.decay.log[1:] - 1.0 - np.log(x), axis=1)
            high = np.minimum(np.exp(np.minimum(chernoff + eps + 1e-9, 0.0)), high)
        found = np.array([np.minimum(low, high), high, high])
        for one in self.contours:
            found = _read(one, sign, np.exp(np.minimum(sign * eps, 700.0)), found)
        return found

    def delta(
        self, sign: float, eps: np.ndarray, width: float = 1e-6, error: float = 0.0, least: Array = 1e-250
    ) -> np.ndarray:
        """Return lower bounds, estimates and upper bounds, (3, K), of delta at ascending eps.

        `width` is the wanted relative width. A bracket is wider if the work limit or rounding prevents this width. It
        may be wider if delta is below `least`. `error` is an absolute width that suffices. A call with `error` > 0 is a
        step of a search. All steps of a search share one work limit.
        """
        found, k = self.known(sign, eps), np.exp(np.minimum(sign * eps, 700.0))
        least = np.broadcast_to(least, eps.shape)
        self.left = self.left if error else 1.5 * MOST_WORK
        for at, place in enumerate(eps.tolist()):
            low, _, high = found[:, at]
            scale, wanted = 1.0 if sign > 0 else high, max(width * high, error)
            near = [wide for side, there, wide in self.missed if side == sign and 0.8 * place <= there <= 1.25 * place]
            if high - low <= max(wanted, 2.0 * scale * max(near, default=0.0)) or high < least[at]:
                continue
            less = bool(sign > 0 and k[at] >= DIFFERENT and shapes_for(self.bins, True))
            # `goal` is the error of E(k - S)_+ to aim at
            if sign > 0:  # if `low` is far too small, 0.05 width low is far less than is asked for
                enough = max(0.05 * width * low, min(30.0 * width * low, 10.0 * ABSOLUTE[True]))
                goal = max(enough, 0.4 * error, ABSOLUTE[less])
            else:
                goal = k[at] * max(0.05 * width * max(low, 0.03 * high), 0.4 * error)
            if 2.0 * goal >= (high - low) * (1.0 if sign > 0 else k[at]):  # the bracket would stay as it is
                continue
            if self.left <= 0.0 or self.decay.x.size == 1 or sign * place > 30.0 or goal == 0.0:
                continue
            self.left -= PLACING
            try:
                most = np.log((high - low) * (1.0 if sign > 0 else k[at]))
                one, work = contour(self.bins, self.decay, k[at], np.log(goal), most, min(self.left, MOST_WORK), less)
            except ArithmeticError:
                self.missed += [(sign, place, np.inf)] if self.left > MOST_WORK else []
                continue
            self.contours.append(one)
            self.left -= work
            found = _read(one, sign, k, found)
            found[1:] = np.minimum(found[1:], np.minimum.accumulate(found[2]))
            if not error and found[2, at] - found[0, at] > wanted:
                self.missed.append((sign, place, float(found[2, at] - found[0, at]) / scale))
        return found

    def epsilon(self, sign: float, delta: float, most: float) -> tuple[float, float, float]:
        """Return (lower, estimate, upper) of the eps with delta(eps) = delta. The caller knows that eps <= `most`."""
        self.left = 1.5 * MOST_WORK
        if self.bins.deviation < 20.0 * delta and self.delta(sign, np.zeros(1), 0.0, 0.1 * delta)[2, 0] <= delta:
            return 0.0, 0.0, 0.0
        # Coarse contours (for sign 1 often one) bring eps near the solution. The last contour, at this eps, is fine.
        many, near, fine = len(self.contours) + 6, 0.35 if sign > 0 else 1e-3, False
        low, high, grid = 0.0, most, np.linspace(0.0, most, 400)
        least = grid[theorems(self.bins, sign, grid)[0] > delta].max(initial=0.0)
        eps = max(float(least), min(2.0 * self.bins.deviation, 0.5 * most))
        error = (3e-5 if sign > 0 else 0.3) * delta
        for _ in range(60):
            if len(self.contours) < many and not fine:
                self.delta(sign, np.array([eps]), 0.0, error)
            values = np.log(np.maximum(self.known(sign, eps * np.array([1.0, 1.0 + 1e-4]))[1], 1e-300))
            low, high = (eps, high) if values[0] > np.log(delta) else (low, eps)
            slope = (values[1] - values[0]) / (1e-4 * eps)
            step = (np.log(delta) - values[0]) / slope if slope < 0.0 else np.inf
            eps = eps + step if low < eps + step < high else 0.5 * (low + high)
            if abs(step) <= near * eps and not fine:
                fine, low, high = True, 0.0, most
                error = max(3e-6 * abs(slope) * eps * delta, 12.0 * ABSOLUTE[True] if sign > 0 else 0.0)
                self.delta(sign, np.array([eps]), 0.0, error)
            elif abs(step) <= 1e-8 * eps:
                break
        less, more = 0.0, most
        for _ in range(4):  # in each pass the points lie closer to the solution
            below = np.append(eps - (eps - less) * np.geomspace(1e-9, 1.0, 40), np.linspace(less, eps, 20))
            above = np.append(eps + (more - eps) * np.geomspace(1e-9, 1.0, 40), np.linspace(eps, more, 20))
            less = max(less, np.append(below[self.known(sign, below)[0] > delta], 0.0).max())
            more = min(more, np.append(above[self.known(sign, above)[2] <= delta], most).min())
            eps = min(max(eps, less), more)
        return float(less), float(eps), float(more)


def _read(one: Contour, sign: float, k: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Narrow the brackets `found` of delta by a contour. A bracket that the contour contradicts is left as it is."""
    low, middle, high = found
    put, error = one.put(k)
    with np.errstate(all="ignore"):
        if sign > 0:  # E(S - k)_+ = 1 - k + E(k - S)_+
            value = put + (1.0 if one.less else 1.0 - k)
            error = error + 16.0 * ROUNDOFF * (np.abs(put) + 1.0 + (0.0 if one.less else k))
        else:
            value = put / k + one.less
            error = error / k + 16.0 * ROUNDOFF * (np.abs(put / k) + one.less)
        good = (value - error <= high) & (value + error >= low) & (error < high - low)
        low, high = np.where(good, np.fmax(low, value - error), low), np.where(good, np.fmin(high, value + error), high)
    return np.array([low, np.clip(np.where(good, value, middle), low, high), high])
