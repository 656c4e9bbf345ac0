"""Balls in bins with noise of two bands: a transfer operator and its contour (README.md, "Bins that share noise").

P = (1/b) sum_j N(m_j) and Q = N(0), m_j the sum of the columns that bin j uses. With two bands only neighbours meet, so
that dP/dQ has the law under Q of

    S = (1/b) sum_j e^{G_j - Var(G_j)/2},    G_j = first_j y_j + second_j y_{j+1},    y_0, ..., y_{b-1} iid N(0, 1),

with y_b = y_0. Bin 0 may have a further normal of its own. Psi(z) = E e^{-zS} is the trace of a product of operators on
functions of one y, and E(k - S)_+ = (1/2 pi i) int e^{zk} Psi(z) z^-2 dz.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, log_ndtr

RIGHT = 0.5 * np.pi
"""A right angle."""
TURNS = np.linspace(0.0, 1.0, 13)
"""Angles by which the paths in y turn zX, relative to the angle of z."""
STRIPS = np.array([0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.98])
"""Widths of strips in y that are tried, as shares of the widest one."""
TAKEN = np.array([0.01, 0.03, 0.1, 0.3, 0.6])
"""Shares t that are tried in -x Psi'(x) <= Psi(x (1 - t))/t."""
QUANTILES = np.linspace(-6.0, 3.0, 28)
"""Values u that are tried in E e^{-xX} >= Phi(u) e^{-x X(u)}."""
SHAPES = ((0.0, 1.0), (0.1, 4.0), (0.25, 2.0), (0.25, 4.0), (0.5, 2.0), (0.5, 4.0))
"""Bend and scale, relative to the abscissa, of the lines that are tried."""
NATS = (28.0, 38.0, 52.0, 75.0, 110.0, 170.0)
"""Accuracies of the lattices that are tried."""
TRIED = 4
"""Number of lines with which lattices are tried, those of fewest nodes."""
COARSE, FINE, SAMPLE = 60, 300, 14
"""Cells on a line while it is compared with others and when it is used; points at which lattices are compared."""
FAR = 1e3
"""A line is followed to this multiple of the largest x of `Decay`."""
REACH = 10.0
"""End of the lattices."""
BLOCKS = ((15, 130.0), (9, 380.0))
"""Size of a block, up to a number of nodes: so small that the linear algebra library starts no threads."""
LEAST = -200.0
"""Exponents with smaller real parts are raised to it, so that no product is subnormal."""
MOST_WORK = 3e9
"""Largest number of multiplications for one contour, and in a profile for each loss that is asked about (`SHARE`)."""
SHARE = 0.02
"""Share of `MOST_WORK` for each loss of a profile."""
MOST_NODES = 1500
"""Largest number of nodes of a lattice."""
SIZES = 1e-6, 20.0
"""Sizes of bins for which contours are tried."""
MOST_TURN = 3.0
"""Largest shift of a normal that is tried."""
ABSOLUTE = 1e-14
"""Error of E(k - S)_+ below which float64 does not allow a call."""


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins' normals, in units of the noise.

    first, second : (b,) coefficients >= 0 of y_j and y_{j+1} in bin j. A chain has first_0 = second_{b-1} = 0.
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
        """Distinct values of first_j + second_j (+ own), ascending: the shift v turns X_j by v times its value."""
        return np.unique(self.first + self.second + self.own * (np.arange(self.count) == 0))

    @functools.cached_property
    def largest(self) -> float:
        """Largest coefficient, bin 0's own apart."""
        return float(max(self.first.max(), self.second.max()))

    @property
    def normals(self) -> int:
        return self.count + (self.own > 0.0) - (self.first[0] == 0.0)

    @functools.cached_property
    def deviation(self) -> float:
        """Standard deviation of S."""
        shared, risen = self.first * np.roll(self.second, 1), lambda x: np.expm1(np.minimum(x, 600.0))
        return float(np.sqrt(np.sum(risen(self.sizes**2) + 2.0 * risen(shared)))) / self.count

    def runs(self) -> Iterator[tuple[float, float, int]]:
        """Yield (first, second, count) of equal neighbours among the bins 1 to b - 2."""
        for pair, some in itertools.groupby(zip(self.first[1:-1].tolist(), self.second[1:-1].tolist(), strict=True)):
            yield *pair, len(list(some))


class Lattice(NamedTuple):
    """Nodes i step, |i| <= half, in each y; and those in bin 0's own normal."""

    step: float
    half: int
    own_step: float
    own_half: int
    block: int
    """Number of nodes over which a matrix product is summed at a time; it divides 2 half + 1."""


def lattice_for(bins: Bins, nats: float) -> Lattice:
    """Choose a lattice whose error is about e^-nats; no bound depends on it."""

    def step(largest: float) -> float:
        width = min(0.85 * RIGHT / largest, (2.0 * nats) ** 0.5)
        found = min(2.0 * np.pi * width / (nats + 0.5 * width * width), np.pi * (2.0 / nats) ** 0.5)
        unit = 2.0 ** (np.floor(np.log2(found)) - 7)
        return float(unit * np.floor(found / unit))  # few binary digits, so that squares of nodes are exact

    one, own = step(bins.largest), step(max(bins.own, 1e-3))
    block = next((size for size, most in BLOCKS if 2.0 * REACH / one <= most), 5)
    half = block * int(np.ceil(REACH / one / block - 0.5)) + block // 2  # an odd multiple of the block
    return Lattice(one, half, own, int(np.ceil(REACH / own)), block)


def transform(bins: Bins, lattice: Lattice, z: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Sum Psi over the lattice y - i shift; z and shift have shape (N,)."""
    y, own = (step * np.arange(-half, half + 1) for step, half in (lattice[:2], lattice[2:4]))
    real = not (np.any(z.imag) or np.any(shift))
    grown = lambda coefficient, at: np.exp(coefficient * at - 0.5 * coefficient**2)
    ring = bins.first[0] > 0.0
    begin = np.outer(grown(bins.first[0], y if ring else np.zeros(1)), grown(bins.second[0], y))
    end = grown(bins.first[-1], y)[:, None] * (grown(bins.second[-1], y) if ring else 1.0)
    between = [(np.outer(grown(a, y), grown(b, y)), a + b, many) for a, b, many in bins.runs()]
    alone = grown(bins.own, own) if bins.own > 0.0 else np.ones(1)

    def at(one: complex, turn: float) -> complex:
        def normal(nodes: np.ndarray, step: float) -> np.ndarray:
            flat = step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * nodes * nodes)
            return flat if real else flat * np.exp(1j * turn * nodes + 0.5 * turn * turn)

        def kernel(size: np.ndarray, angle: float) -> np.ndarray:
            if real:
                return np.exp(np.maximum(-one.real / bins.count * size, LEAST))
            exponent = (-one * np.exp(-1j * angle * turn) / bins.count) * size
            exponent.real = np.maximum(exponent.real, LEAST)
            return np.exp(exponent)

        weight, angle = normal(y, lattice.step), float(bins.first[0] + bins.second[0] + bins.own)
        share = normal(own, lattice.own_step) if bins.own > 0.0 else np.ones(1)
        if ring:
            product = sum(w * kernel(size * begin, angle) for w, size in zip(share, alone, strict=True)) * weight
        else:
            product = np.sum(share[:, None] * kernel(alone[:, None] * begin, angle), axis=0, keepdims=True) * weight
        for size, angle, many in between:
            product = _times_power(product, kernel(size, angle) * weight, many, lattice.block)
        closed = product.T * kernel(end, float(bins.first[-1] + bins.second[-1]))
        return np.sum(np.sum(closed * weight if ring else closed, axis=1))

    return np.array([at(one, turn) for one, turn in zip(z.tolist(), shift.tolist(), strict=True)])


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
    """Upper bounds of log Psi(x) at ascending x from 0 on; between them lies the chord, since log Psi is convex."""

    x: np.ndarray
    log: np.ndarray

    def __call__(self, x: Array) -> Array:
        return np.interp(x, self.x, self.log)


class Errors:
    """Bounds of the error of `transform` on a lattice, relative to e^{normals shift^2/2} Psi(|z| cos)."""

    def __init__(self, bins: Bins, lattice: Lattice) -> None:
        self.bins, self.lattice = bins, lattice
        reach = min(lattice.step * lattice.half, lattice.own_step * lattice.own_half)
        self.beyond = 1.03 * bins.normals * float(np.exp(log_ndtr(np.asarray(-reach))))
        # a bin: complex sum over the nodes, weights, exponentials; bin 0 has a second sum
        self.units = bins.count * (3.0 * lattice.block + 2.0 * lattice.half / lattice.block + 50.0) + 8.0 * (
            lattice.half + lattice.own_half
        )
        most = (2.0 * bins.largest + bins.own) * (lattice.step * lattice.half + 1.0)
        self.exponent_units = 48.0 * (most + float(bins.sizes.max()) ** 2) + 60.0
        widest = 2.0 * np.pi / max(lattice.step, lattice.own_step)  # no wider strip says more
        self.strips = STRIPS * min(1.0, widest * max(bins.largest, bins.own) / RIGHT)
        self.straight = float(np.min([self._sites(0.0, angle, angle, 3) for angle in self.strips * RIGHT]))

    def _sites(self, shift: Array, up: Array, down: Array, more: int = 0) -> Array:
        """Add up what one normal's sum is off by; `up` and `down` are the angles by which a strip turns zX."""

        def one(size: float, step: float) -> Array:
            return _geometric(up / size, -shift, step) + _geometric(down / size, shift, step)

        total = (self.bins.normals + more) * one(self.bins.largest, self.lattice.step)
        return total + (one(self.bins.own, self.lattice.own_step) if self.bins.own > 0.0 else 0.0)

    def freed(self, x: Array) -> Array:
        """Bound log E e^{-x rest} - log E e^{-xS} from above, where `rest` lacks the two bins of one normal."""
        sizes = np.unique(self.bins.sizes)[[0, -1]]
        best = np.clip(QUANTILES, *sizes)  # the size of largest X at a quantile
        x = np.asarray(x, np.float64)[..., None] / self.bins.count
        each = x * np.exp(best * QUANTILES - 0.5 * best * best) - log_ndtr(QUANTILES)
        return 2.0 * np.minimum(np.min(each, axis=-1), x[..., 0]) + 1e-9

    def quadrature(self, shift: Array, up: Array, down: Array, freed: Array) -> Array:
        """Bound what the lattice sum is off by."""
        with np.errstate(over="ignore", invalid="ignore"):
            grown = np.exp(np.minimum(freed, 600.0))
            found = self._sites(shift, up, down) * grown
            return np.where((found < 0.01) & (self.straight * grown < 0.01), 1.05 * found, np.inf)

    def rest(self, decay: Decay, x: Array, cosine: Array, shift: Array) -> Array:
        """Bound range and rounding at x = |z| cosine."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            grown = np.exp(np.minimum(self.freed(x), 600.0))
            logs = decay(x[..., None] * (1.0 - TAKEN)) - decay(x)[..., None]
            slope = np.min(np.exp(np.minimum(logs, 600.0)) / TAKEN, axis=-1)
            turned = 4.0 * self.bins.normals * shift * (self.lattice.step * self.lattice.half + shift)
            units = self.units + turned + self.exponent_units * slope / cosine
            found = 1.05 * (self.beyond * (1.0 + grown) + ROUNDOFF * units)
            return np.where((self.straight * grown < 0.01) & (cosine > 0.0), found, np.inf)


def _geometric(width: Array, shift: Array, step: float) -> Array:
    """Return e^{width^2/2 + width shift}/(e^{2 pi width/step} - 1), or inf without a strip."""
    turns = 2.0 * np.pi * np.maximum(width, 1e-9) / step
    log = 0.5 * width * width + width * shift - turns
    return np.where(width > 0.0, np.exp(np.minimum(log, 600.0)) / -np.expm1(-turns), np.inf)


def decay_of(bins: Bins, x: np.ndarray) -> Decay:
    """Bound Psi from above at ascending x > 0."""
    lattice = lattice_for(bins, 40.0 + np.log(bins.count))
    errors = Errors(bins, lattice)
    angles = errors.strips * RIGHT
    found = Decay(np.zeros(1), np.zeros(1))
    for at, value in zip(x, transform(bins, lattice, x + 0j, np.zeros(x.size)).real, strict=True):
        together = errors.quadrature(0.0, angles, angles, 0.0) * (np.exp(found(at * np.cos(angles))) + errors.straight)
        alone = errors.quadrature(0.0, angles, angles, errors.freed(at)) * np.exp(found(at))
        rest = float(errors.rest(found, np.asarray(at), np.ones(()), np.zeros(()))) * np.exp(found(at))
        total = value + min(together.min(), alone.min()) + rest
        found = Decay(np.append(found.x, at), np.append(found.log, np.fmin(np.log(max(total, 1e-290)), found.log[-1])))
    return found


def shifts(errors: Errors, decay: Decay, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose the shift for each z; return it and the log of a bound of the error of the transform, (N,) each."""
    angles, angle, size = errors.bins.angles, np.angle(z)[:, None], np.abs(z)[:, None]
    shift = TURNS * np.minimum(angle / angles[-1], MOST_TURN)
    high, low = angle - angles[0] * shift, angle - angles[-1] * shift  # the angles of z X on the turned paths
    cosine = np.cos(np.minimum(np.maximum(high, -low), RIGHT))
    up, down = errors.strips * (RIGHT - high)[..., None], errors.strips * (RIGHT + low)[..., None]
    with np.errstate(all="ignore"):
        x, moved = size * cosine, shift[..., None]
        wide = np.cos(np.clip(np.maximum(high[..., None] + up, down - low[..., None]), 0.0, RIGHT))
        together = np.log(errors.quadrature(moved, up, down, 0.0))
        together = together + np.logaddexp(decay(size[..., None] * wide), np.log(errors.straight))
        alone = np.log(errors.quadrature(moved, up, down, errors.freed(x)[..., None])) + decay(x)[..., None]
        rest = np.log(errors.rest(decay, x, cosine, shift)) + decay(x)
        total = 0.5 * errors.bins.normals * shift * shift + np.logaddexp(
            np.min(np.fmin(together, alone), axis=-1), rest
        )
    total = np.where((high < RIGHT) & (low > -RIGHT) & ~np.isnan(total), total, np.inf)
    rows, best = np.arange(z.size), np.argmin(total, axis=1)
    return shift[rows, best], total[rows, best]


def log_modulus(bins: Bins, decay: Decay, size: Array, low: Array, high: Array) -> Array:
    """Bound log |Psi(z)| from above where |z| >= size and low <= arg z <= high, by the best turn."""
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
        """Return ascending v from 0 on."""
        if self.bend == 0.0:
            return self.c * np.sinh(np.linspace(0.0, np.arcsinh(span / self.c), count + 1))
        return self.scale * np.linspace(0.0, 8.0, count + 1)


class Cells(NamedTuple):
    """Bounds of the integral of |e^{zk} Psi(z) z^-2 dz| over parts of a line, one of which is all that lies beyond."""

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
    """An evaluated line; it serves every k near the one it was placed for."""

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
    """Evaluate the transform on a line chosen for k, with errors of some e^log_goal; return its multiplications, too.

    Raises ArithmeticError where at most `most` multiplications do not suffice.
    """
    x = np.geomspace(min(decay.x[1], 0.5 / k), decay.x[-1], 200)
    saddle = float(x[np.argmin(k * x + decay(x) - 2.0 * np.log(x))])
    lattices = [(Errors(bins, lattice), _work(bins, lattice)) for lattice in (lattice_for(bins, nats) for nats in NATS)]
    lattices = [one for one in lattices if 4.0 * one[1] < most and one[0].lattice.half < MOST_NODES]
    lines = []
    for share, (bend, scale) in itertools.product((0.6, 1.0), SHAPES):
        line = Line(share * saddle, bend, scale * share * saddle)
        v = line.places(COARSE, FAR * decay.x[-1])
        enough = np.flatnonzero(log_beyond(bins, decay, line, 0.0, v) + k * line.at(v)[0].real < log_goal)
        if enough.size == 0:
            continue
        end, steps = v[enough[0]], []
        for width in np.array([0.4, 0.7, 0.85]) * min(line.c, line.scale * np.arctan(bend) if bend else line.c):
            strips = [float(cells_on(bins, decay, line, side * width, v).log_sum(k)) for side in (1.0, -1.0)]
            if max(strips) < np.inf:
                steps.append((2.0 * np.pi * width / max(np.logaddexp(strips[0], strips[1]) - log_goal, 1.0), width))
        if not steps:
            continue
        lines.append((end / max(steps)[0], line, end, *max(steps)))
    best, least, work = None, np.inf, 0.0
    for nodes, line, end, step, width in sorted(lines, key=lambda one: one[0])[:TRIED]:
        z, speed = line.at(np.linspace(0.0, end, SAMPLE))
        log_factor = np.log(np.abs(speed) * end / SAMPLE / np.abs(z) ** 2) + k * z.real - log_goal
        for errors, work in lattices:
            lost = max(np.logaddexp.reduce(shifts(errors, decay, z)[1] + log_factor), 0.0)
            total = (nodes + 3.0) * work
            if total < most and np.log(total) + lost < least:
                best, least, work = (errors, line, step, width, end), np.log(total) + lost, total
    if best is None:
        raise ArithmeticError("no contour is known for these bins")
    errors, line, step, width, end = best
    count = int(np.ceil(end / step))
    z, speed = line.at(step * np.arange(count + 1))
    shift, log_error = shifts(errors, decay, z)
    factor = step / np.pi * speed / (1j * z * z) * np.where(np.arange(count + 1) == 0, 0.5, 1.0)
    value = factor * transform(bins, errors.lattice, z, shift)
    v, last, turns = line.places(FINE, FAR * decay.x[-1]), step * np.array([count]), 2.0 * np.pi * width / step
    sides = tuple(cells_on(bins, decay, line, side * width, v) for side in (1.0, -1.0))
    beyond = Cells(line.at(last)[0].real, log_beyond(bins, decay, line, 0.0, last))
    cut = -turns - np.log(-np.expm1(-turns))
    return Contour(z, value, np.exp(log_error) * np.abs(factor), sides, cut, beyond), work


def _work(bins: Bins, lattice: Lattice) -> float:
    """Estimate the multiplications for one z; an exponential counts as ten."""
    points, ring = 2.0 * lattice.half + 1.0, bins.first[0] > 0.0
    first = (points if ring else 1.0) * points * (20.0 * lattice.own_half if bins.own > 0.0 else 10.0)
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
        """Add a contour for one eps, with errors of some `error`, unless too much work was done."""
        if self.decay.x.size == 1 or sign * eps > 30.0 or error <= (0.01 * ABSOLUTE * np.exp(eps) if sign > 0 else 0.0):
            return
        k = float(np.exp(sign * eps))
        with contextlib.suppress(ArithmeticError):
            found, work = contour(self.bins, self.decay, k, float(np.log(error)), min(self.left, MOST_WORK))
            self.contours.append(found)
            self.left -= work

    def delta(
        self, sign: float, eps: np.ndarray, width: float = 1e-6, rough: float | None = None, tail: bool = False
    ) -> np.ndarray:
        """Bracket delta at ascending eps to a relative width, or as well as can be done; (3, K).

        With `rough` no smaller error is asked for. In the `tail` of a profile less is asked for: 1e-4 at 1e-6, a
        hundredth below 1e-10, nothing below `least`.
        """
        found, k = self.known(sign, eps), np.exp(np.minimum(sign * eps, 700.0))
        if not rough:
            self.left = MOST_WORK * (2.0 + SHARE * eps.size)
        least = (3e-10 if sign > 0 else 1e-16) if tail else 1e-250
        for at, turn in itertools.product(range(eps.size), range(1 if rough else 2)):
            low, middle, high = found[:, at]
            if turn == 0 and high - low < 0.01 * high and sign > 0 and not rough:
                continue  # a rough contour is near
            wanted = min(max(width, 1e-7 / middle**0.5), 1e-2) if tail and middle > 0.0 else width
            if high - low <= wanted * high or high < least:
                continue
            if sign < 0:
                goal = 0.1 * wanted * k[at] * (middle if low > 0.0 else 0.03 * high)
            else:
                goal = max(0.02 * wanted * middle, ABSOLUTE) if turn else rough or max(1e-9, 0.01 * low)
            placed = len(self.contours)
            self._place(sign, float(eps[at]), goal)
            for one in self.contours[placed:]:
                found = _read(one, sign, k, found)
                found[1:] = np.minimum(found[1:], np.minimum.accumulate(found[2]))
            if tail and turn == 1 and sign > 0 and found[2, at] - found[0, at] > wanted * found[2, at]:
                break  # float64 allows no more, here and beyond
        return found

    def epsilon(self, sign: float, delta: float, most: float) -> tuple[float, float, float]:
        """Bracket the eps at which delta(eps) = delta; the caller knows that it is at most `most`."""
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
