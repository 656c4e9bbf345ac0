"""Balls in bins with noise of two bands: a transfer operator and its contour (README.md, "Bins that share noise").

The pair is P = (1/b) sum_j N(m_j) and Q = N(0), with m_j the sum of the columns that bin j uses. With two bands only
neighbouring bins have common rows, so that dP/dQ has under Q the law of

    S = (1/b) sum_j X_j,    X_j = e^{G_j - Var(G_j)/2},    G_j = first_j y_j + second_j y_{j+1},

with y_0, ..., y_{b-1} iid N(0, 1) and y_b = y_0. Bin 0 may have a further normal of its own. Psi(z) = E e^{-zS} is the
trace of a product of operators on functions of one y, and E(k - S)_+ = (1/2 pi i) int e^{zk} Psi(z) z^-2 dz.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, log_ndtr

RIGHT = 0.5 * np.pi
"""A right angle, in radians."""
TURNS = np.linspace(0.0, 1.0, 13)
"""Shifts that `log_modulus` tries, as shares of the largest one."""
STRIPS = np.array([0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.98])
"""Widths of the strip about a real path that are tried, as shares of the widest one."""
QUANTILES = np.linspace(-6.0, 3.0, 28)
"""Values u that are tried in E e^{-xX} >= Phi(u) e^{-x X(u)}, where X(u) is the value of X for a normal at u."""
SHAPES = ((0.0, 1.0), (0.1, 4.0), (0.25, 2.0), (0.25, 4.0), (0.5, 2.0), (0.5, 4.0))
"""(bend, scale / c) of the lines that are tried; `Line` defines these."""
COARSE, FINE = 60, 300
"""Numbers of cells on a line: while lines are compared, and on the line that is used."""
FAR = 1e3
"""A line is followed to this multiple of the largest x of `Decay`."""
BOX, MOST_BOXES = 0.6, 50
"""Growth of log X over one box of nodes; largest number of boxes for one normal, for which boxes may be larger."""
WINDOWS = (
    (0.0, 1.0),
    (0.8, 1.0),
    (0.8, 8.0),
    (0.8, 60.0),
    (1.0, 1.0),
    (1.0, 8.0),
    (1.0, 60.0),
    (0.3, 0.0),
    (0.5, 0.0),
    (0.75, 0.0),
)
"""Paths that are tried: the share of the largest shift, and |z| X/b where the window begins; 0 means no window."""
GROUPS = 20
"""Approximate number of wedges into which the nodes of a line are divided."""
REACH = 9.0
"""Approximate largest node of a lattice, in standard deviations of a normal."""
BLOCKS = ((9, 130.0), (7, 250.0))
"""(size of a block, largest number of nodes with this size); so small that the linear algebra starts no threads."""
LEAST = -200.0
"""Least real part of an exponent: smaller ones are raised to it, so that no product is subnormal."""
MOST_WORK = 3e9
"""Largest number of multiplications for one contour.

The contours of one call of `Profile.delta` with K losses may together take 2 + `SHARE` K times as many, and the rough
contours of `Profile.epsilon` 3 times as many.
"""
PLACING = 1e8
"""Number of multiplications as which the choice of a contour counts."""
SHARE = 0.005
"""Share of `MOST_WORK` that each loss adds to the work allowed for a profile."""
MOST_HALF, MOST_NODES = 400, 1500
"""Largest `half` of a lattice, and largest number of nodes on a line."""
SIZES = 1e-6, 20.0
"""Smallest and largest size of a bin for which contours are tried."""
MOST_TURN = 3.0
"""Largest shift of a normal that is tried."""
ABSOLUTE = 1e-14
"""Error of E(k - S)_+, relative to k >= 1, that float64 leaves; contours do not aim far below it."""


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins' normals, in units of the noise.

    first, second : (b,) coefficients >= 0 of y_j and y_{j+1} in bin j. In a chain first_0 = second_{b-1} = 0;
        otherwise the bins form a ring.
    own : coefficient of the normal that bin 0 has by itself.
    """

    first: np.ndarray
    second: np.ndarray
    own: float

    @property
    def count(self) -> int:
        return self.first.size

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """(b,) standard deviations of the G_j."""
        return np.sqrt(self.first**2 + self.second**2 + self.own**2 * (np.arange(self.count) == 0))

    @functools.cached_property
    def angles(self) -> np.ndarray:
        """Distinct values of first_j + second_j (+ own in bin 0), ascending; a shift v turns X_j by v times that."""
        return np.unique(self.first + self.second + self.own * (np.arange(self.count) == 0))

    @functools.cached_property
    def largest(self) -> float:
        """Largest coefficient, `own` excepted."""
        return float(max(self.first.max(), self.second.max()))

    @property
    def normals(self) -> int:
        return self.count + (self.own > 0.0) - (self.first[0] == 0.0)

    @functools.cached_property
    def deviation(self) -> float:
        """Standard deviation of S."""
        shared, risen = self.first * np.roll(self.second, 1), lambda x: np.expm1(np.minimum(x, 600.0))
        return float(np.sqrt(np.sum(risen(self.sizes**2) + 2.0 * risen(shared)))) / self.count

    def kinds(self) -> list[tuple[tuple[float, ...], int]]:
        """Return (coefficients, number of bins) for each kind of bin; in a ring `own` is the third one of bin 0."""
        first = np.append(self.own if self.first[0] == 0.0 else self.first[0], self.first[1:])
        pairs = list(zip(first.tolist(), self.second.tolist(), strict=True))
        third = [((*pairs.pop(0), self.own), 1)] if self.first[0] > 0.0 and self.own > 0.0 else []
        return third + list(collections.Counter(pairs).items())

    def runs(self) -> Iterator[tuple[float, float, int]]:
        """Yield (first, second, count) of equal neighbours among the bins 1 to b - 2."""
        for pair, some in itertools.groupby(zip(self.first[1:-1].tolist(), self.second[1:-1].tolist(), strict=True)):
            yield *pair, len(list(some))


class Lattice(NamedTuple):
    """Nodes i * step, |i| <= half, over which every normal is summed."""

    step: float
    half: int
    block: int
    """Number of nodes over which a matrix product is summed at a time; it divides 2 half + 1."""

    @property
    def nodes(self) -> np.ndarray:
        return self.step * np.arange(-self.half, self.half + 1)


class Path(NamedTuple):
    """Paths y(s) = s - i shift W(s), with W(s) = 1/(1 + e^{-(s - start)/width}); every field has shape (N,).

    Where `start` is -inf, W = 1. strip : how far s is moved up and down to bound the error of sums on the path.
    """

    shift: np.ndarray
    start: np.ndarray
    width: np.ndarray
    strip: np.ndarray

    def window(self, s: np.ndarray, up: Array = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return Re W, Im W and |W'| at s + i up, up >= 0, each of shape (N, s.size)."""
        width, always = self.width[:, None], np.isinf(self.start)[:, None]
        turn = np.broadcast_to(up, self.width.shape)[:, None] / width
        x = np.clip((s - np.where(always, 0.0, self.start[:, None])) / width, -80.0, 80.0)
        e, cosine = np.exp(-np.abs(x)), np.cos(turn)
        below = 1.0 + 2.0 * e * cosine + e * e
        real = np.where(x >= 0.0, 1.0 + e * cosine, e * e + e * cosine) / below
        real = np.where(always, 1.0, np.where(s == -np.inf, 0.0, real))
        return real, np.where(always, 0.0, e * np.sin(turn) / below), np.where(always, 0.0, e / below / width)


def lattice_for(bins: Bins, nats: float) -> Lattice:
    """Choose a lattice whose error is about e^-nats; bounds hold on any lattice."""
    width = min(0.85 * RIGHT / bins.largest, (2.0 * nats) ** 0.5)
    found = min(2.0 * np.pi * width / (nats + 0.5 * width * width), np.pi * (2.0 / nats) ** 0.5)
    unit = 2.0 ** (np.floor(np.log2(found)) - 7)
    step = float(unit * np.floor(found / unit))  # few binary digits, so that squares of nodes are exact
    block = next((size for size, most in BLOCKS if 2.0 * REACH / step <= most), 5)
    # with this `half`, 2 half + 1 is an odd multiple of the block
    return Lattice(step, block * int(np.ceil(REACH / step / block - 0.5)) + block // 2, block)


def transform(bins: Bins, lattice: Lattice, z: np.ndarray, path: Path) -> np.ndarray:
    """Return Psi at each z, (N,), by sums over the lattice on the path of this z."""
    s, ring = lattice.nodes, bins.first[0] > 0.0
    real = not (np.any(z.imag) or np.any(path.shift))
    windows, _, slopes = path.window(s)

    def at(one: complex, shift: float, window: np.ndarray, slope: np.ndarray) -> complex:
        y = s if real else s - 1j * shift * window
        grown = lambda coefficient: np.exp(coefficient * y - 0.5 * coefficient**2)
        weight = lattice.step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * y * y)
        weight = weight if real else weight * (1.0 - 1j * shift * slope)
        scale = -(one.real if real else one) / bins.count

        def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            exponent = np.multiply.outer(scale * a, b)
            np.maximum(exponent.real, LEAST, out=exponent.real)
            return np.exp(exponent, out=exponent)

        second = grown(bins.second[0])
        if not ring:
            product = np.sum(weight[:, None] * kernel(grown(bins.own), second), axis=0, keepdims=True) * weight
        elif bins.own > 0.0:
            line = s if real else s - 1j * shift
            flat = lattice.step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * line * line)
            sizes = np.exp(bins.own * line - 0.5 * bins.own**2)[:, None] * grown(bins.first[0])
            product = sum(w * kernel(size, second) for w, size in zip(flat, sizes, strict=True)) * weight
        else:
            product = kernel(grown(bins.first[0]), second) * weight
        for a, b, many in bins.runs():
            product = _times_power(product, kernel(grown(a), grown(b)) * weight, many, lattice.block)
        if not ring:
            return np.sum(product * kernel(grown(bins.first[-1]), np.ones(1))[:, 0])
        closed = product.T * kernel(grown(bins.first[-1]), grown(bins.second[-1]))
        return np.sum(np.sum(closed * weight, axis=1))

    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite narrow no bracket
        return np.array([at(*each) for each in zip(z.tolist(), path.shift.tolist(), windows, slopes, strict=True)])


def _times_power(product: np.ndarray, kernel: np.ndarray, count: int, block: int) -> np.ndarray:
    """Return product kernel^count, by squaring where that is less work."""
    rows, points = product.shape
    if rows * count <= points * np.log2(count + 1):
        for _ in range(count):
            product = _times(product, kernel, block)
        return product
    while count:
        if count & 1:
            product = _times(product, kernel, block)
        count >>= 1
        if count:
            kernel = _times(kernel, kernel, block)
    return product


def _times(a: np.ndarray, b: np.ndarray, block: int) -> np.ndarray:
    """Multiply matrices block by block: less rounding, and no threads of the linear algebra library."""
    blocks = b.reshape(-1, block, b.shape[1])
    if len(a) == 1:
        return np.sum(np.matmul(a.reshape(-1, 1, block), blocks), axis=0)
    total: Array = 0.0
    for left, right in zip(np.split(a, len(blocks), axis=1), blocks, strict=True):
        total = total + np.matmul(left.reshape(-1, block, block), right)
    return total.reshape(a.shape)


class Decay(NamedTuple):
    """Upper bounds of log Psi(x) at ascending x from 0 on; between these the chord is one: log Psi is convex."""

    x: np.ndarray
    log: np.ndarray

    def __call__(self, x: Array) -> Array:
        return np.interp(x, self.x, self.log)


class Wedge(NamedTuple):
    """Points z with least <= |z| <= size, low <= arg z <= high and Re z >= real; each (N,)."""

    least: np.ndarray
    size: np.ndarray
    low: np.ndarray
    high: np.ndarray
    real: np.ndarray

    @classmethod
    def around(cls, z: np.ndarray, groups: np.ndarray) -> Wedge:
        """Return one wedge for each group of consecutive z; `groups` holds the first index of each group."""
        size, angle, slack = np.abs(z), np.angle(z), 1e-12
        least, most = (
            np.minimum.reduceat(size, groups) * (1.0 - slack),
            np.maximum.reduceat(size, groups) * (1.0 + slack),
        )
        low, high = np.minimum.reduceat(angle, groups) - slack, np.maximum.reduceat(angle, groups) + slack
        return cls(least, most, low, high, np.minimum.reduceat(z.real, groups))


class Errors:
    """Bounds of the error of `transform` on a lattice."""

    def __init__(self, bins: Bins, lattice: Lattice) -> None:
        self.bins, self.lattice = bins, lattice
        nodes = 2 * lattice.half + 1
        self.boxes = self._boxes(int(np.ceil(max(BOX / bins.angles[-1] / lattice.step, nodes / MOST_BOXES))))
        widest = min(RIGHT / max(bins.largest, bins.own), 2.0 * np.pi / lattice.step)
        self.straight = (bins.normals + 3.0) * 2.0 * float(np.min(_geometric(STRIPS * widest, lattice.step)))
        self.units = bins.count * (3.0 * lattice.block + 2.0 * lattice.half / lattice.block + 50.0)
        self.units += 16.0 * lattice.half

    def _boxes(self, many: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges of boxes of `many` nodes, and each box's mass, the larger of sum and integral."""
        step, half, begin = self.lattice.step, self.lattice.half, np.arange(0, 2 * self.lattice.half + 1, many)
        edges = np.concatenate([(begin - half - 0.5) * step, [(half + 0.5) * step]])
        sums = np.add.reduceat(step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * self.lattice.nodes**2), begin)
        side = np.exp(log_ndtr(-np.abs(edges)))  # Phi below 0, and 1 - Phi above
        integrals = np.where(edges[1:] <= 0.0, np.diff(side), -np.diff(side))
        middle = (edges[1:] > 0.0) & (edges[:-1] < 0.0)
        integrals = np.where(middle, 1.0 - side[1:] - side[:-1], integrals)
        tail = [1.01 * float(np.exp(log_ndtr(np.asarray(-half * step))))]
        mass = np.concatenate([tail, np.maximum(sums, integrals) * (1.0 + 1e-12), tail])
        return np.concatenate([[-np.inf], edges, [np.inf]]), mass

    def freed(self, x: Array) -> Array:
        """Bound log E e^{-x rest} - log E e^{-xS} from above, where `rest` is S less the two bins of a normal."""
        sizes = np.unique(self.bins.sizes)[[0, -1]]
        best = np.clip(QUANTILES, *sizes)  # at each quantile, the size of bin with the largest X
        x = np.asarray(x, np.float64)[..., None] / self.bins.count
        each = x * np.exp(best * QUANTILES - 0.5 * best * best) - log_ndtr(QUANTILES)
        return 2.0 * np.minimum(np.min(each, axis=-1), x[..., 0]) + 1e-9

    def log_error(self, decay: Decay, z: Wedge, path: Path) -> np.ndarray:
        """Bound the log of the error of the transform, (N,)."""
        turned = np.maximum(z.high - path.shift * self.bins.angles[0], path.shift * self.bins.angles[-1] - z.low)
        away = np.where(np.isinf(path.start), turned, z.high)
        x = np.where(path.shift == 0.0, z.real, z.least * np.cos(np.minimum(away, RIGHT)))
        x = np.maximum(x, 0.0) * (1.0 - 1e-9)
        log_total, units, alone = np.zeros(x.size), np.zeros(x.size), np.zeros(x.size)
        pair = np.zeros((2, 3, x.size))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            lost = _geometric(path.strip, self.lattice.step, False)
            for coefficients, many in self.bins.kinds():
                bound = self._bin if len(coefficients) == 2 else self._first_of_ring
                total, rounded, missed = bound(coefficients, z, x, path)
                log_total += 0.5 * many * np.log(total)
                units += many * np.sqrt(rounded / total)
                pair = np.maximum(pair, np.sqrt(missed[:2] / total))
                if len(coefficients) == 3:
                    alone = np.sum(np.sqrt(missed[2] / total) * [lost, lost, np.ones(x.size)], axis=0)
            freed = np.exp(np.minimum(self.freed(x), 600.0))
            log_total += np.where((path.shift > 0.0) & (self.bins.normals > self.bins.count), 0.5 * self.freed(x), 0.0)
            both = np.sum(pair[0] * pair[1] * [lost, lost, np.ones(x.size)], axis=0)
            reach = self.lattice.step * self.lattice.half + path.shift
            units += self.units + 16.0 * self.bins.normals * path.shift * reach
            error = 1.05 * (freed * (self.bins.normals * both + alone) + ROUNDOFF * units)
            found = np.log(error) + log_total + decay(x)
        return np.where((self.straight * freed < 0.01) & ~np.isnan(found), found, np.inf)

    def _bin(
        self, coefficients: tuple[float, ...], z: Wedge, x: np.ndarray, path: Path
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bound squared norms: of a bin's factor, of the factor times its rounding, and of what sums of a normal miss.

        The last bounds have shape (place of the normal, kind, N). The kinds are: the normal is shifted up, is shifted
        down, and lies beyond the lattice.
        """
        edges, mass = self.boxes
        count, most = x.size, z.size / self.bins.count
        real, angles, density = _boxed(path, edges, 0)
        plain = mass * np.maximum.accumulate(density, axis=1)
        beyond = np.where(np.isinf(np.diff(edges)), plain, 0.0)
        used = [place for place, coefficient in enumerate(coefficients) if coefficient > 0.0]
        axis = {place: 1 + at for at, place in enumerate(used)}
        along = lambda array, place: array.reshape(count, *(-1 if place == other else 1 for other in used))
        each = lambda values: values.reshape(count, *(1 for _ in used))
        variance = float(np.sum(np.square(coefficients)))

        def rise(moved: int, ends: Array, turns: Array, x: Array) -> tuple[Array, Array]:
            """Bound X, and the log of the factor over e^{-x X/b}, in each box; the second bound is >= 0 and ascends."""
            log, low, high = each(np.full(count, -0.5 * variance)), each(z.low), each(z.high)
            for place in used:
                one, two = (ends, turns) if place == moved else (real, angles)
                log = log + coefficients[place] * along(one[1], place)
                low, high = (
                    low + coefficients[place] * along(two[0], place),
                    high + coefficients[place] * along(two[1], place),
                )
            cosine = np.minimum(np.cos(low), np.cos(high)) - 1e-15
            cosine = np.where((low < -np.pi) | (high > np.pi), -1.0, cosine)
            least = np.where(cosine < 0.0, each(most), each(z.least / self.bins.count)) * cosine
            if moved < 0:  # on the real line the factor is e^{-Re z X/b}
                least = np.where(each(path.shift) == 0.0, each(z.real / self.bins.count), least)
            rate = each(x / self.bins.count) - least
            size = np.exp(log) * (1.0 + 1e-12)
            found = np.where(rate > 0.0, size * rate, 0.0)
            for place in used:
                found = found if place == moved else np.maximum.accumulate(found, axis=axis[place])
            return size, found

        def norm(values: Array, weights: dict[int, Array]) -> Array:
            """Integrate over both places; a place of coefficient 0 contributes the sum of its weights."""
            for place in used:
                values = values * along(weights[place], place)
            apart = [weights[place].sum(1) for place in (0, 1) if place not in used]
            return values.sum(axis=tuple(axis.values())) * np.prod([np.ones(count), *apart], axis=0)

        weights = {0: plain, 1: plain}
        size, log = rise(-1, real, angles, x)
        square, spread = np.exp(2.0 * log), 24.0 * variance + 60.0
        for place in used:
            far = np.maximum(np.abs(edges[1:]), np.abs(edges[:-1])) + path.shift[:, None]
            spread = spread + 24.0 * coefficients[place] * along(far, place)
        square_units = np.where(np.isinf(size * spread), 0.0, square * np.square(each(most) * size * spread))
        total, rounded = norm(square, weights), norm(square_units, weights)
        missed = np.zeros((2, 3, count))
        for place in (0, 1):
            missed[place, 2] = norm(square, {**weights, place: beyond})
            for kind, side in enumerate((1, -1)):
                ends, turns, moved = _boxed(path, edges, side)
                shifted = rise(place, ends, turns, np.zeros(count))[1] if place in used else log
                missed[place, kind] = norm(np.exp(2.0 * shifted), {**weights, place: moved})
        return total, rounded, missed

    def _first_of_ring(
        self, coefficients: tuple[float, ...], z: Wedge, x: np.ndarray, path: Path
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bound as `_bin` does. The third normal has W = 1; where the factor may exceed 1, the bound is infinite."""
        edges, mass = self.boxes
        paths = path, path, path._replace(start=np.full(x.size, -np.inf))
        least = np.where(np.isinf(path.start), sum(coefficients), coefficients[2])
        angles = z.low - sum(coefficients) * path.shift, z.high - least * path.shift
        masses, missed = np.ones((3, x.size)), np.zeros((3, 3, x.size))
        steep = np.ones(x.size)
        for place, one in enumerate(paths):
            density = np.maximum.accumulate(_boxed(one, edges, 0)[2], axis=1)
            masses[place], missed[place, 2] = (mass * density).sum(1), (mass * density)[:, [0, -1]].sum(1)
            steep = steep * density[:, -1]
            for kind, side in enumerate((1, -1)):
                turn = side * coefficients[place] * path.strip
                fits = (angles[0] + min(side, 0) * np.abs(turn) > -RIGHT) & (angles[1] + max(side, 0) * turn < RIGHT)
                missed[place, kind] = np.where(fits, _boxed(one, edges, side)[2].sum(1), np.inf)
        total = masses[0] * masses[1] * masses[2] ** 2
        missed = total * (missed / masses[:, None]) ** np.array([1.0, 1.0, 2.0])[:, None, None]
        variance = float(np.sum(np.square(coefficients)))
        most = 24.0 * (sum(coefficients) * (-edges[1] + path.shift) + variance) + 60.0
        rounded = steep * masses[2] * np.square(z.size / self.bins.count * most) * np.exp(min(variance, 600.0))
        return np.where((angles[0] > -RIGHT) & (angles[1] < RIGHT), total, np.inf), rounded, missed


def _boxed(path: Path, edges: np.ndarray, side: int) -> tuple[tuple[Array, Array], tuple[Array, Array], Array]:
    """Bound Re y, Im y and the measure |N(y) dy| on boxes of s + i side strip; for side 0 relative to N(s) ds."""
    turn, shift, inside = abs(side) * path.strip / path.width, path.shift[:, None], path.start[:, None]
    inside = (edges[:-1] < inside) & (inside < edges[1:])
    windows, imaginary, slopes = path.window(edges, abs(side) * path.strip)
    ends = lambda values, top: (
        (np.minimum(values[:, 1:], values[:, :-1]), np.maximum(values[:, 1:], values[:, :-1]))
        if top is None
        else (
            np.minimum(values[:, 1:], values[:, :-1]),
            np.where(inside, top[:, None], np.maximum(values[:, 1:], values[:, :-1])),
        )
    )
    least, most = ends(imaginary, 0.5 * np.tan(0.5 * turn))
    steep = 1.0 + shift * ends(slopes, 1.0 / (path.width * (2.0 + 2.0 * np.cos(turn))))[1]
    least, most = (least, most) if side >= 0 else (-most, -least)
    real = edges[:-1] + shift * least, edges[1:] + shift * most
    strip = side * path.strip[:, None]
    angles = strip - shift * windows[:, 1:], strip - shift * windows[:, :-1]
    grown = np.exp(0.5 * np.square(np.maximum(np.abs(angles[0]), np.abs(angles[1])))) * steep
    if side == 0:
        return real, angles, grown
    near = np.where(real[0] * real[1] > 0.0, np.minimum(np.abs(real[0]), np.abs(real[1])), 0.0)
    flat = np.diff(edges) * np.exp(-0.5 * near * near) / np.sqrt(2.0 * np.pi)
    return real, angles, np.where(np.isinf(flat), np.exp(log_ndtr(-near)), flat) * grown


def _geometric(width: Array, step: float, whole: bool = True) -> Array:
    """Return e^{width^2/2}/(e^{2 pi width/step} - 1), with numerator 1 unless `whole`; inf where width is 0."""
    turns = 2.0 * np.pi * np.maximum(width, 1e-9) / step
    log = (0.5 * width * width if whole else 0.0) - turns
    return np.where(width > 0.0, np.exp(np.minimum(log, 600.0)) / -np.expm1(-turns), np.inf)


def paths(errors: Errors, z: Wedge) -> list[Path]:
    """Propose paths for each wedge; bounds hold on any path."""
    bins, size = errors.bins, z.size / errors.bins.count
    some = np.concatenate([bins.first, bins.second, [bins.own]])
    small, large, both = some[some > 0.0].min(), some.max(), bins.angles[-1]
    found = []
    for share, more in WINDOWS:
        shift = share * np.minimum(
            (z.low if more == 0.0 else 2.0 * z.high) / (both if more == 0.0 else small + both), MOST_TURN
        )
        start = np.clip((np.log(max(more, 1e-9) / size) + 0.5 * float(bins.sizes.max()) ** 2) / both, -3.0, 6.0)
        above = RIGHT - z.high + (bins.angles[0] if more == 0.0 else small) * shift
        strip = np.clip(
            0.97 * np.minimum(above, RIGHT + z.low - shift * both) / large, 1e-6, 2.0 * np.pi / errors.lattice.step
        )
        width = np.maximum(2.0 / np.pi * strip * (1.0 + 1e-9), 0.3)
        found.append(Path(shift, np.where(more == 0.0, -np.inf, start), width, strip))
    return found


def straight(size: int, errors: Errors) -> Path:
    """Return the real line for `size` points, with strips for real z."""
    strip = 0.97 * min(RIGHT / max(errors.bins.largest, errors.bins.own), 2.0 * np.pi / errors.lattice.step)
    return Path(np.zeros(size), np.full(size, -np.inf), np.full(size, strip), np.full(size, strip))


def decay_of(bins: Bins, x: np.ndarray) -> Decay:
    """Bound Psi from above at ascending x > 0."""
    errors = Errors(bins, lattice_for(bins, 45.0 + np.log(bins.count)))
    found, path = Decay(np.zeros(1), np.zeros(1)), straight(1, errors)
    for at, value in zip(x, transform(bins, errors.lattice, x + 0j, straight(x.size, errors)).real, strict=True):
        wedge = Wedge.around(np.array([at + 0j]), np.zeros(1, int))
        total = value + float(np.exp(errors.log_error(found, wedge, path)[0]))
        found = Decay(np.append(found.x, at), np.append(found.log, np.fmin(np.log(max(total, 1e-290)), found.log[-1])))
    return found


def best_paths(errors: Errors, decay: Decay, z: np.ndarray) -> tuple[Path, np.ndarray]:
    """Return a path for each z, and the log of a bound of the error on this path."""
    groups = np.arange(0, z.size, max(1, z.size // GROUPS))
    wedge = Wedge.around(z, groups)
    tried = paths(errors, wedge)
    logs = np.array([errors.log_error(decay, wedge, path) for path in tried])
    best, many = np.argmin(logs, axis=0), np.diff(np.append(groups, z.size))
    chosen = Path(*(np.repeat(np.choose(best, each), many) for each in zip(*tried, strict=True)))
    return chosen, np.repeat(np.min(logs, axis=0), many)


def log_modulus(bins: Bins, decay: Decay, size: Array, low: Array, high: Array) -> Array:
    """Bound log |Psi(z)| from above where |z| >= size and low <= arg z <= high, by the best shift."""
    shift = TURNS * np.minimum(high[..., None] / bins.angles[-1], MOST_TURN)
    ends = (high[..., None] - bins.angles[0] * shift, bins.angles[-1] * shift - low[..., None])
    away = np.maximum(*ends)
    logs = 0.5 * bins.normals * shift * shift + decay(size[..., None] * np.cos(np.minimum(away, RIGHT)))
    return np.min(np.where(away < RIGHT, logs, np.inf), axis=-1)


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
        """Return `count` + 1 ascending v from 0 on; on a line that is not bent they end at `span`."""
        if self.bend == 0.0:
            return self.c * np.sinh(np.linspace(0.0, np.arcsinh(span / self.c), count + 1))
        return self.scale * np.linspace(0.0, 8.0, count + 1)


class Cells(NamedTuple):
    """Bounds of the integral of |e^{zk} Psi(z) z^-2 dz| over parts of a line; the last part has no end."""

    real: np.ndarray
    """(J,) largest Re z."""
    log: np.ndarray
    """(J,) log of the bound without e^{k real}."""

    def log_sum(self, k: Array) -> Array:
        return np.logaddexp.reduce(self.log + np.asarray(k)[..., None] * self.real, axis=-1)


def cells_on(bins: Bins, decay: Decay, line: Line, up: float, v: np.ndarray) -> Cells:
    """Bound the integral over v + i up from cell to cell, and beyond the last v."""
    with np.errstate(all="ignore"):
        z, _ = line.at(v + 1j * up)
        angle, real, imag = np.angle(z), z.real, z.imag
        nearest = np.minimum(np.abs(real[1:]), np.abs(real[:-1])) * (real[1:] * real[:-1] > 0.0)
        size = np.hypot(nearest, imag[:-1]) * (1.0 - 1e-12)
        speed = 1.0 if line.bend == 0.0 else (1.0 + line.bend) * np.cosh(v[1:] / line.scale)
        log = log_modulus(bins, decay, size, angle[:-1] - 1e-12, angle[1:] + 1e-12)
        log = log + np.log(np.diff(v) * speed / size**2)
        fine = (real[0] > 0.0) & (np.diff(imag) > 0.0) & (np.diff(real) <= 1e-12 * np.abs(z[1:]))
        log = np.where(np.isnan(log) | ~fine, np.inf, log)
    return Cells(np.append(real[:-1], real[-1]), np.append(log, log_beyond(bins, decay, line, up, v[-1:])))


def log_beyond(bins: Bins, decay: Decay, line: Line, up: float, v: np.ndarray) -> np.ndarray:
    """Bound the log of the integral beyond each v, without e^{k Re z(v)}."""
    with np.errstate(all="ignore"):
        z, turn = line.at(v + 1j * up)[0][:, None], up / line.scale
        rise, fall = np.cos(turn) - line.bend * np.sin(turn), line.bend * np.cos(turn) + np.sin(turn)
        lean = fall / rise if line.bend > 0.0 else 0.0
        most = np.linspace(0.0, min(RIGHT, MOST_TURN * bins.angles[-1]), 40)[1:-1]
        least = most * bins.angles[0] / bins.angles[-1]
        # Re(z e^{-i psi}) is concave in psi, hence least at an end
        x = np.minimum(*(z.real * np.cos(psi) + z.imag * np.sin(psi) for psi in (least, most)))
        logs = 0.5 * bins.normals * (most / bins.angles[-1]) ** 2 + decay(np.maximum(x, 0.0))
        logs = np.min(np.where((np.tan(least) >= lean) & (lean >= 0.0) & (x > 0.0), logs, np.inf), axis=1)
        return np.where(z[:, 0].imag > 0.0, logs + np.log((1.0 + lean) / z[:, 0].imag), np.inf)


class Contour(NamedTuple):
    """A line with the transform on it; it serves every k near the k for which it was placed."""

    z: np.ndarray
    value: np.ndarray
    """(N,) terms without e^{zk}."""
    error: np.ndarray
    strips: tuple[Cells, ...]
    log_strip: float
    """log of 1/(e^{2 pi d/h} - 1), d the width of the strip and h the step."""
    beyond: Cells

    def put(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return E(k - S)_+ and a bound of its error, for k of any shape."""
        with np.errstate(all="ignore"):
            grown = np.exp(k[..., None] * self.z)
            units = self.z.size + 40.0 + 12.0 * k[..., None] * np.abs(self.z)
            error = np.sum(np.abs(grown) * (self.error + ROUNDOFF * units * np.abs(self.value)), axis=-1)
            cut = sum(np.exp(cells.log_sum(k) + self.log_strip) for cells in self.strips) + np.exp(
                self.beyond.log_sum(k)
            )
            return np.sum((grown * self.value).real, axis=-1), 1.001 * (error + cut / np.pi)


def contour(bins: Bins, decay: Decay, k: float, log_goal: float, most: float = MOST_WORK) -> tuple[Contour, float]:
    """Return a contour for k with an error of some e^log_goal, and the number of multiplications that it took.

    Raises ArithmeticError if `most` multiplications do not suffice.
    """
    x = np.geomspace(min(decay.x[1], 0.5 / k), decay.x[-1], 200)
    saddle = float(x[np.argmin(k * x + decay(x) - 2.0 * np.log(x))])
    best: tuple[Any, ...] = (np.inf,)
    for share, (bend, scale) in itertools.product((0.6, 1.0), SHAPES if bins.sizes.max() > 0.15 else SHAPES[:1]):
        line = Line(share * saddle, bend, scale * share * saddle)
        v = line.places(COARSE, FAR * decay.x[-1])
        enough = np.flatnonzero(log_beyond(bins, decay, line, 0.0, v) + k * line.at(v)[0].real < log_goal)
        if enough.size == 0:
            continue
        for width in np.array([0.4, 0.7, 0.85]) * min(line.c, line.scale * np.arctan(bend) if bend else line.c):
            strips = [float(cells_on(bins, decay, line, side * width, v).log_sum(k)) for side in (1.0, -1.0)]
            if max(strips) < np.inf:
                step = 2.0 * np.pi * width / max(np.logaddexp(strips[0], strips[1]) - log_goal, 1.0)
                best = min(best, (v[enough[0]] / step, line, v[enough[0]], step, width))
    if best[0] > MOST_NODES:
        raise ArithmeticError("no contour is known for these bins")
    nodes, line, end, step, width = best
    count = int(np.ceil(end / step))
    z, speed = line.at(step * np.arange(count + 1))
    factor = step / np.pi * speed / (1j * z * z) * np.where(np.arange(count + 1) == 0, 0.5, 1.0)
    nats = float(np.clip(2.4 * (k * line.c + decay(line.c) - np.log(line.c) - log_goal) + 6.0, 36.0, 110.0))
    found = None
    for lattice in (lattice_for(bins, nats), lattice_for(bins, 1.6 * nats)):
        work = (nodes + 3.0) * _work(bins, lattice)
        if work < most and lattice.half < MOST_HALF:
            errors = Errors(bins, lattice)
            found = errors, work, *best_paths(errors, decay, z)
            if np.logaddexp.reduce(found[3] + np.log(np.abs(factor)) + k * z.real) < log_goal:
                break
    if found is None:
        raise ArithmeticError("a contour for these bins takes too long")
    errors, work, path, log_error = found
    value = factor * transform(bins, errors.lattice, z, path)
    v, last, turns = line.places(FINE, FAR * decay.x[-1]), step * np.array([count]), 2.0 * np.pi * width / step
    sides = tuple(cells_on(bins, decay, line, side * width, v) for side in (1.0, -1.0))
    beyond = Cells(line.at(last)[0].real, log_beyond(bins, decay, line, 0.0, last))
    cut = -turns - np.log(-np.expm1(-turns))
    return Contour(z, value, np.exp(log_error) * np.abs(factor), sides, cut, beyond), work


def _work(bins: Bins, lattice: Lattice) -> float:
    """Estimate the multiplications for one z; an exponential counts as ten."""
    points, ring = 2.0 * lattice.half + 1.0, bins.first[0] > 0.0
    first = (points if ring else 1.0) * points * (10.0 * points if bins.own > 0.0 else 10.0)
    for _, _, many in bins.runs():
        first += points**2 * (10.0 + min(many * (points if ring else 8.0), 2.0 * points * np.log2(many + 1)))
    return first


def theorems(bins: Bins, sign: float, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bound delta without a contour (README.md, "Bins that share noise"): low and high, each (K,)."""
    excess = lambda x: 0.5 * x * x * np.exp(np.minimum(x, 500.0))  # at least e^x - 1 - x below 500
    shared = bins.first * np.roll(bins.second, 1)
    rest = np.sqrt(np.sum(excess(bins.sizes**2) + 2.0 * excess(shared))) / bins.count
    spread = bins.first + np.roll(bins.second, 1)
    along = np.sqrt(np.sum(spread**2) + bins.own**2)
    c = (bins.first * spread + bins.second * np.roll(spread, -1)) / along
    c[0] += bins.own**2 / along
    t = np.full(eps.shape, 0.5 * c.mean())
    for _ in range(20):  # Newton's steps for the log of the projected ratio, which is convex in t
        logs = c * t[:, None] - 0.5 * c * c
        ratio = np.logaddexp.reduce(logs, axis=1) - np.log(bins.count)
        t = t - (ratio - sign * eps) / np.sum(c * np.exp(logs - ratio[:, None]), axis=1) * bins.count
    tail = lambda x: np.exp(log_ndtr(-sign * x))
    with np.errstate(over="ignore", invalid="ignore"):
        k, sized = np.exp(eps), float(bins.sizes.max())
        p, q = np.mean(tail(t[:, None] - c), axis=1), tail(t)
        value = p - k * q if sign > 0 else q - k * p
        off = 1e-14 * np.where(sign > 0, p + k * q, q + k * p)
        low = value - off
        ratio = np.mean(np.exp(c * t[:, None] - 0.5 * c * c), axis=1)
        high = value + off + (0.5 * rest * (1.0 + 1e-9) + np.abs(ratio - np.exp(sign * eps))) * (1.0 if sign > 0 else k)
        if sign > 0:
            x = eps + np.log(bins.count)
            one = np.exp(log_ndtr(0.5 * sized - x / sized)), np.exp(x + log_ndtr(-0.5 * sized - x / sized))
            low = np.fmax(low, (one[0] * (1.0 - 1e-11) - one[1] * (1.0 + 1e-11)) / bins.count)
    return np.fmax(np.nan_to_num(low), 0.0), np.fmin(np.nan_to_num(high, nan=1.0), 1.0)


class Profile:
    """Brackets of delta in both directions; contours are placed where they are needed."""

    def __init__(self, bins: Bins) -> None:
        self.bins, self.contours, self.left = bins, list[Contour](), 0.0
        self.decay = Decay(np.zeros(1), np.zeros(1))
        sizes = bins.sizes
        if SIZES[0] <= sizes.min() and sizes.max() <= SIZES[1]:
            with contextlib.suppress(ArithmeticError):
                self.decay = decay_of(bins, np.geomspace(0.1, 500.0, 40) / min(bins.deviation, 3.0))

    def known(self, sign: float, eps: np.ndarray) -> np.ndarray:
        """Bracket delta_remove (sign 1) or delta_add (-1) by the contours there are: low, middle, high, (3, K)."""
        low, high = theorems(self.bins, sign, eps)
        if sign < 0 and self.decay.x.size > 1:
            k, x = np.exp(-eps), self.decay.x[1:]
            chernoff = np.min(k[:, None] * x + self.decay.log[1:] - 1.0 - np.log(x), axis=1)
            high = np.minimum(np.exp(np.minimum(chernoff + eps + 1e-9, 0.0)), high)
        found = np.array([np.minimum(low, high), high, high])
        for one in self.contours:
            found = _read(one, sign, np.exp(np.minimum(sign * eps, 700.0)), found)
        return found

    def _place(self, sign: float, eps: float, error: float) -> None:
        """Add a contour for one eps with an error of some `error`, unless no work is left or float64 forbids it."""
        if (
            self.left <= 0.0
            or self.decay.x.size == 1
            or sign * eps > 30.0
            or error <= (0.01 * ABSOLUTE * np.exp(eps) if sign > 0 else 0.0)
        ):
            return
        k, self.left = float(np.exp(sign * eps)), self.left - PLACING
        with contextlib.suppress(ArithmeticError):
            found, work = contour(self.bins, self.decay, k, float(np.log(error)), min(self.left, MOST_WORK))
            self.contours.append(found)
            self.left -= work

    def delta(
        self, sign: float, eps: np.ndarray, width: float = 1e-6, rough: float | None = None, tail: bool = False
    ) -> np.ndarray:
        """Bracket delta at ascending eps to a relative width, or as well as can be done; (3, K).

        rough : for sign 1, the error that contours aim at; none aims at a smaller one.
        tail : whether small delta may have wider brackets: a relative width of 1e-4 at delta = 1e-6 and of 1e-2 below
            1e-10, and any width below `least`.
        """
        found, k = self.known(sign, eps), np.exp(np.minimum(sign * eps, 700.0))
        if not rough:
            self.left = MOST_WORK * (2.0 + SHARE * eps.size)
        least = (3e-10 if sign > 0 else 1e-16) if tail else 1e-250
        for at, turn in itertools.product(range(eps.size), range(1 if rough else 2)):
            low, middle, high = found[:, at]
            if turn == 0 and high - low < 0.5 * high and sign > 0 and not rough:
                continue  # a contour is near enough to do without a rough one
            wanted = min(max(width, 1e-7 / middle**0.5), 1e-2) if tail and middle > 0.0 else width
            if high - low <= wanted * high or high < least:
                continue
            if sign < 0:
                goal = 0.1 * wanted * k[at] * (middle if low > 0.0 else 0.03 * high)
            else:
                goal = max(0.1 * wanted * middle, 20.0 * ABSOLUTE * k[at]) if turn else rough or max(1e-9, 0.01 * low)
            placed = len(self.contours)
            self._place(sign, float(eps[at]), goal)
            for one in self.contours[placed:]:
                found = _read(one, sign, k, found)
                found[1:] = np.minimum(found[1:], np.minimum.accumulate(found[2]))
            if tail and turn == 1 and sign > 0 and found[2, at] - found[0, at] > wanted * found[2, at]:
                break  # float64 allows no narrower bracket, here and at larger eps
        return found

    def epsilon(self, sign: float, delta: float, most: float) -> tuple[float, float, float]:
        """Bracket the eps at which delta(eps) = delta; the caller knows that this eps is at most `most`."""
        self.left = 3.0 * MOST_WORK
        if self.bins.deviation < 20.0 * delta and self.delta(sign, np.zeros(1), 1e-2, delta)[2, 0] <= delta:
            return 0.0, 0.0, 0.0
        many = len(self.contours) + 6
        low, high, eps, fine = 0.0, most, min(2.0 * self.bins.deviation, 0.5 * most), False
        for _ in range(60):
            # rough contours bring eps near the solution; a fine contour there gives the bracket
            if len(self.contours) < many:
                self.delta(sign, np.array([eps]), 0.1, 0.02 * delta)
            values = np.log(np.maximum(self.known(sign, eps * np.array([1.0, 1.0 + 1e-4]))[1], 1e-300))
            low, high = (eps, high) if values[0] > np.log(delta) else (low, eps)
            slope = (values[1] - values[0]) / (1e-4 * eps)
            step = (np.log(delta) - values[0]) / slope if slope < 0.0 else np.inf
            if abs(step) <= 1e-3 * eps and not fine:
                fine = True
                self.delta(sign, np.array([eps]), 5e-5 * abs(slope) * eps)
            elif abs(step) <= 1e-8 * eps:
                break
            eps = eps + step if low < eps + step < high else 0.5 * (low + high)
        less, more = 0.0, most
        for _ in range(4):  # points that lie closer from turn to turn
            below = np.append(eps - (eps - less) * np.geomspace(1e-9, 1.0, 40), np.linspace(less, eps, 20))
            above = np.append(eps + (more - eps) * np.geomspace(1e-9, 1.0, 40), np.linspace(eps, more, 20))
            less = max(less, np.append(below[self.known(sign, below)[0] > delta], 0.0).max())
            more = min(more, np.append(above[self.known(sign, above)[2] <= delta], most).min())
            eps = min(max(eps, less), more)
        return float(less), float(eps), float(more)


def _read(one: Contour, sign: float, k: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Narrow brackets of delta by a contour; a contour that contradicts them is not used."""
    low, middle, high = found
    put, error = one.put(k)
    value = (put - k) + 1.0 if sign > 0 else put / k
    error = error / (1.0 if sign > 0 else k) + 16.0 * ROUNDOFF * (np.abs(put) + k if sign > 0 else np.abs(value))
    with np.errstate(invalid="ignore"):
        good = (value - error <= high) & (value + error >= low) & (error < high - low)
        low, high = np.where(good, np.fmax(low, value - error), low), np.where(good, np.fmin(high, value + error), high)
    return np.array([low, np.clip(np.where(good, value, middle), low, high), high])
