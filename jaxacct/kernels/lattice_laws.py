"""Lattice laws, which are laws on a uniform lattice of losses, and their composition by FFT (engines/README.md).

A *payoff* is a function of the loss whose mean is wanted: delta is the mean of (1 - e^{eps - loss})_+.  Kernels here
take one law at a time, without batch axes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import Array, Namespace, iterate, log1p, logsumexp, namespace

REACH = 38.0
"""Largest distance of the grid to P's nearest mode, in standard deviations. The tail, <= 2.9e-316, may underflow."""
PANELS = 4096
"""Number of quadrature panels around P's modes, before nodes divide them. A panel's error is below rounding errors."""
QUADRATURE_ORDER = 5
"""Number of Gauss-Legendre points on each panel."""
NARROW_ORDER = 2
"""Number of Gauss-Legendre points on a narrow panel, where the error of two points is already below rounding errors."""
LONG = 2**18
"""On lattices of at least this many nodes, NumPy uses NARROW_ORDER for narrow panels. This halves the time."""
LARGEST_ETA = 0.1
"""If a panel's quadrature may be off by this share or more, a bound of the panel's mass goes to one node instead."""
FFT_CONSTANT = 8.0
"""The error of an FFT, in roundoffs, is at most this times log2 of its length. Higham's constant is 7."""
ROUNDED_UP = 1.001
"""Factor on an error bound that covers the rounding of the bound itself."""
ROW = 1024
"""Largest number of nodes in a row of `payoff`. The number of nodes is a multiple of it, or smaller."""


class Composition(NamedTuple):
    """The result of `compose`: R laws on N nodes are tilted, and then composed by cyclic convolution."""

    mass: Array  # (N,) masses of the composition of the tilted laws
    error: Array  # upper bound of the 2-norm of the error of `mass`
    log_moments: Array  # (R, 3) logarithms of M_i(c) = sum_k mass_ik e^{c k h} of each law i at three tilts c


class Payoff(NamedTuple):
    """Three sums over the nodes of a lattice. T is the tilted mass of a node, and f is the payoff at its loss."""

    value: Array  # sum T f
    norm: Array  # |f|_2
    magnitude: Array  # sum |T| f


def compose(
    mass: Array, tilt: Array, direction: Array, count: Array, step: Array, roll: Array, upper: Array
) -> Composition:
    """Compose R lattice laws, law i `count[i]` times. Mass j of the result is at the cyclic index `roll` + j.

    mass, direction : (R, N) masses and (R,) signs s_i. Entry [i, k] of `mass` is law i's mass at the loss s_i k h.
    tilt : (R, 3) exponents c of e^{c k h}. The first one tilts law i, and the others serve Chernoff bounds.
    step, upper : distance h of neighbouring losses, and whether masses are rounded up (otherwise down).
    """
    xp = namespace(mass, tilt, direction, count, step, roll, upper)
    laws, length = mass.shape
    place, full = step * xp.arange(length), mass
    if xp is np:  # nodes without mass are skipped, which saves time for laws of few atoms; nodes with NaN are kept
        there = np.flatnonzero((mass != 0).any(axis=0) | (np.arange(length) == 0))
        place, mass = place[there], mass[:, there]
    log_mass = xp.log(mass)

    def moment(c: Array) -> Array:
        return logsumexp(log_mass + c[:, None] * place)

    log_moments = xp.stack([moment(tilt[:, i]) for i in range(tilt.shape[1])], axis=1)
    tilted = tilt[:, :1] * place
    exponent = log_mass + tilted - log_moments[:, :1]
    size = xp.where(mass > 0, xp.abs(log_mass) + xp.abs(tilted), 0.0)
    slack = ROUNDOFF * (8.0 + 4.0 * (size + xp.abs(log_moments[:, :1])))
    weight = xp.where(mass > 0, xp.exp(exponent) * (1.0 + xp.where(upper, slack, -slack)), 0.0)
    if xp is np:
        some, weight = weight, np.zeros_like(full)
        weight[:, there] = some

    first = weight[:, :1]
    rest = xp.concatenate([xp.zeros_like(first), weight[:, 1:]], axis=1)
    relative = FFT_CONSTANT * ROUNDOFF * np.log2(length)
    phi = xp.fft.rfft(rest, axis=1) + first
    modulus = xp.abs(phi)
    wrong = relative * xp.sum(rest, axis=1, keepdims=True) + 2.0 * ROUNDOFF * modulus
    log_modulus, log_bound = xp.log(modulus), xp.log(modulus + wrong)
    times = count[:, None]
    angle = xp.sum(direction[:, None] * times * xp.angle(phi), axis=0)
    power = xp.exp(xp.sum(times * log_modulus, axis=0))
    largest = xp.exp(xp.sum(times * log_bound, axis=0))
    polar = ROUNDOFF * (22.0 + 3.2 * laws + (4.0 + laws) * xp.abs(log_bound))
    factor = xp.sum(times * (wrong / (modulus + wrong) + polar), axis=0)
    error = largest * (factor + ROUNDOFF * 12.0)
    spectrum = power * (xp.cos(angle) + 1j * xp.sin(angle))
    composed = xp.roll(xp.fft.irfft(spectrum, n=length), -roll)

    twice = xp.where(
        xp.arange(largest.size) % (largest.size - 1) == 0, 1.0, 2.0
    )  # a real FFT keeps one of two conjugate frequencies, so all but the first and the last count twice in a norm
    norm = xp.sqrt(xp.sum(twice * largest * largest) / length)
    total = xp.sqrt(xp.sum(twice * error * error) / length) + relative * norm
    return Composition(composed, ROUNDED_UP * total, log_moments)


def payoff(mass: Array, start: Array, step: Array, theta: Array) -> Payoff:
    """Return sums of T = `mass` times f = e^{-theta d} (1 - e^{-d})_+ at d = loss - eps = start + i step.

    Nodes form rows of up to ROW. Let x be the first d of a row, and d = x + y. If x > 0, then f is the product of
    e^{-theta x} e^{-theta y} and (1 - e^{-x}) + e^{-x} (1 - e^{-y}). So products of matrices give the sums over rows.
    """
    xp = namespace(mass, start, step, theta)
    rows = mass.reshape(-1, min(ROW, mass.shape[0]))
    x, y = start + step * rows.shape[1] * xp.arange(rows.shape[0]), step * xp.arange(rows.shape[1])
    after = x > 0
    x = xp.where(after, x, 0.0)
    at_row = xp.where(after, xp.exp(-theta * x), 0.0)
    by_x, by_y, ends = at_row * -xp.expm1(-x), at_row * xp.exp(-x), xp.exp(-theta * y)
    rise = -xp.expm1(-y) / (-xp.expm1(-y[-1]) + 1e-300)  # at most 1, so that no square overflows
    by_y = by_y * (-xp.expm1(-y[-1]) + 1e-300)
    columns = xp.stack([ends, ends * rise], axis=1)
    sums, sizes = rows @ columns, xp.abs(rows) @ columns
    # eps lies in the last row that is not `after`, or before all rows
    crossed = xp.maximum(rows.shape[0] - 1 - xp.sum(after), 0)
    d = start + step * (rows.shape[1] * crossed + xp.arange(rows.shape[1]))
    above = (d > 0) & ~after[crossed]
    d = xp.where(above, d, 0.0)
    f = xp.where(above, -xp.exp(-theta * d) * xp.expm1(-d), 0.0)
    # Before numbers are squared, they are divided by `largest`, which is at least f. 1e-290 makes up for underflow.
    largest = xp.maximum(xp.maximum(xp.max(f), xp.max(by_x + by_y)), 1e-300)
    u, v, w = by_x / largest, by_y / largest, f / largest
    squares = [xp.sum(ends * ends * rise**power) for power in (0, 1, 2)]
    square = 1e-290 + xp.sum(w * w) + xp.sum(u * u * squares[0] + 2.0 * u * v * squares[1] + v * v * squares[2])
    total = lambda sums, row: xp.sum(by_x * sums[:, 0] + by_y * sums[:, 1]) + xp.sum(row * f)
    return Payoff(total(sums, rows[crossed]), largest * xp.sqrt(square), total(sizes, xp.abs(rows[crossed])))


class Cells(NamedTuple):
    """Cells of a lattice with N nodes. Entry k is the cell between nodes k and k + 1. Entry N - 1 is not a cell."""

    low: Array  # (N,) hat mass at the cell's node of lower loss
    high: Array  # (N,) hat mass at the cell's node of higher loss
    eta: Array  # (N,) upper bound of the relative error of both hat masses, below 1/4
    whole: Array  # (N,) P-mass without a useful error bound. Upper laws move it up to a node, lower laws down

    def reversed(self) -> Cells:
        """Return the cells of the mirrored law: cell k becomes cell N - 2 - k, and entry N - 1 stays."""
        xp = namespace(*self)
        flipped = (xp.concatenate([x[-2::-1], x[-1:]]) for x in (self.high, self.low, self.eta, self.whole))
        return Cells(*flipped)

    def without_first(self) -> Cells:
        """Return a copy of the cells that has no mass in cell 0."""
        xp = namespace(*self)
        return Cells(*(xp.concatenate([xp.zeros(1), x[1:]]) for x in self))

    def with_atom(self, cell: Array, low: Array, high: Array, eta: Array) -> Cells:
        """Add an atom to one cell. `low` and `high` are its hat masses, and `eta` bounds the relative error of both."""
        here = namespace(*self).arange(self.low.shape[0]) == cell
        low, high, eta = self.low + here * low, self.high + here * high, self.eta + here * eta
        return Cells(low, high, eta, self.whole)


def gaussian_nodes(sigma: Array, q: Array, shift: Array, step: Array, nodes: int) -> Array:
    """Return (nodes,) outputs in units of sigma, with log likelihood ratios log(1 - q) + shift + k step, 0 < q < 1."""
    xp = namespace(sigma, q, shift, step)
    rise = shift + step * xp.arange(nodes)
    y = log1p(-q) - xp.log(q) + rise + xp.log(-xp.expm1(-rise))  # -inf where `rise` is 0
    return sigma * y + 0.5 / sigma


def plain_gaussian_nodes(deviation: Array, origin: Array, step: Array, nodes: int) -> Array:
    """Return (loss + s^2/2)/s, (nodes,), at the losses origin + k step, s = `deviation`: Q's loss is N(-s^2/2, s^2)."""
    xp = namespace(deviation, origin, step)
    return (origin + step * xp.arange(nodes)) / deviation + 0.5 * deviation


def gaussian_cells(
    u: Array,  # (N,) ascending outputs in units of sigma; the first may be -inf
    last: Array,  # index of the last node in use; cells from there on are empty
    rate: Array,  # 1/sigma
    lift: Array,  # (N,) log likelihood ratio of each node; 0 for add, where P is N(0, 1)
    hit: Array,  # sampling rate, 1 without sampling; 0 for add
    upper: Array,  # whether `Cells.whole` is rounded up; otherwise it is rounded down
) -> Cells:
    """Return the cells of a Gaussian between N outputs (engines/README.md, on Gaussian cells)."""
    xp = namespace(u, last, rate, lift, hit, upper)
    nodes = u.shape[0]
    if xp is np and (rest := nodes - 1 - int(last)) > 0:  # one step often spans a small part of the lattice
        used = gaussian_cells(u[:-rest], last, rate, lift[:-rest], hit, upper)
        return Cells(*(np.pad(x, (0, rest)) for x in used))
    top = u[last]
    # The mass below the standard quantile -37.5, less than 4.7e-308, is dropped here. The caller adds it back.
    bottom = xp.minimum(xp.maximum(u[0], -37.5), top)
    mode = xp.where(hit > 0, rate, 0.0)
    end_of_grid = xp.clip(mode + REACH, bottom, top)
    # Each half of the grid lies around one mode of P. If the modes are near each other, the halves meet between them.
    turn = xp.clip(REACH, bottom, 0.5 * (bottom + end_of_grid))
    again = xp.clip(mode - REACH, turn, end_of_grid)
    grid = xp.concatenate([_grid(xp, bottom, turn), _grid(xp, again, end_of_grid)])
    clipped = xp.clip(u, bottom, top)
    before = xp.searchsorted(clipped, grid, side="right")
    earlier = xp.cumsum(_sums(xp, xp.ones(PANELS), before, nodes + 1))[:nodes].astype(before.dtype)
    of_node, of_grid = xp.arange(nodes) + earlier, before + xp.arange(PANELS)
    merged = _put(xp, _put(xp, xp.zeros(nodes + PANELS), of_node, clipped), of_grid, grid)
    cell = _put(xp, _put(xp, xp.zeros(nodes + PANELS, int), of_node, xp.arange(nodes)), of_grid, before - 1)
    cell = xp.maximum(cell[:-1], 0)
    start, end = merged[:-1], merged[1:]
    following = xp.minimum(cell + 1, nodes - 1)
    left, right = u[cell], u[following]
    width = end - start
    half = 0.5 * width
    used = (width > 0) & (cell < last)
    span = rate * xp.where(used, right - left, 1.0)
    to_left, to_right = (xp.where(used, x, 1.0) for x in (rate * (start - left), rate * (right - end)))
    lift_left, lift_right = lift[cell], lift[following]
    centre = xp.abs(start + half)
    panels = start, half, to_left, to_right, lift_left, lift_right
    if xp is np and nodes >= LONG:
        low, high, eta = np.zeros_like(width), np.zeros_like(width), _quadrature_error(centre, half, rate, NARROW_ORDER)
        narrow = used & (eta < ROUNDOFF)
        for order, some in ((NARROW_ORDER, narrow), (QUADRATURE_ORDER, used & ~narrow)):
            low[some], high[some] = _quadrature(order, rate, *(x[some] for x in panels))
        eta[some] = _quadrature_error(centre[some], half[some], rate, QUADRATURE_ORDER)
    else:
        low, high = _quadrature(QUADRATURE_ORDER, rate, *panels)
        eta = _quadrature_error(centre, half, rate, QUADRATURE_ORDER)
    scale = xp.where(used, half / (xp.sqrt(2 * xp.pi) * -xp.expm1(-span)), 0.0)
    size = xp.square(start + half) + xp.maximum(xp.abs(lift_left), xp.abs(lift_right)) + to_right + rate * width
    units = ROUNDOFF * (80.0 + 8.0 * size)
    eta = 1.2 * eta + units
    fine = used & (eta < LARGEST_ETA) & xp.isfinite(low * scale) & xp.isfinite(high * scale)
    low, high, crude = low * scale, high * scale, xp.zeros_like(width)
    spared = fine
    if xp is not np or np.any(used & ~fine):
        # A distance from the mode is off by a few roundoffs times the mode, a log density by up to REACH times as much.
        rounding = 1.0 + xp.where(upper, 1.0, -1.0) * ROUNDOFF * (64.0 + 8.0 * REACH * (REACH + mode))
        rounding = xp.maximum(rounding, 0.0)
        density = (1.0 - hit) * _extreme(start, end, upper) + hit * _extreme(start - mode, end - mode, upper)
        crude = xp.where(used & ~fine, width * density * rounding, 0.0)
        far, share = xp.exp(-to_right), lift_right - lift_left - to_right
        alone = 1.2 * (_quadrature_error(centre, half, 0.0, QUADRATURE_ORDER) + 3.0 * far) + units
        # The panels in `spared` lack an error bound for `high`. Their right node gets less than e^-34 of their mass.
        # The left node still gets `low`. The right node gets its share of the crude bound of the panel's mass.
        spared = (crude > 0) & upper & (xp.maximum(share, -to_right) < -34.0) & (alone < LARGEST_ETA)
        spared = spared & xp.isfinite(low)
        share = xp.exp(xp.where(spared, share, 0.0)) / -xp.expm1(-span) * (1.0 + 1e-9)
        crude, eta = xp.where(spared, crude * share, crude), xp.where(spared, alone, eta)
        spared |= fine
    low, high, eta = xp.where(spared, low, 0.0), xp.where(fine, high, 0.0), xp.where(spared, eta, 0.0)
    total = partial(_sums, xp, index=cell, size=nodes)
    sum_low, sum_high = total(low), total(high)
    wrong_low, wrong_high = total(low * eta), total(high * eta)
    worst = xp.maximum(
        xp.where(sum_low > 0, wrong_low / sum_low, 0.0), xp.where(sum_high > 0, wrong_high / sum_high, 0.0)
    )
    # A sum over the panels of a cell, in any order, is off by at most as many roundoffs as the cell has panels.
    number = total(xp.where(used, 1.0, 0.0))
    outward = 1.0 + xp.where(upper, 1.0, -1.0) * ROUNDOFF * (number + 4.0)
    return Cells(sum_low, sum_high, worst * (1.0 + 1e-9) + (4.0 + number) * ROUNDOFF, total(crude) * outward)


def _grid(xp: Namespace, start: Array, stop: Array) -> Array:
    """Return PANELS/2 equidistant ends of panels, from `start` to `stop`. Rounding moves none of them beyond `stop`."""
    return xp.minimum(start + (stop - start) * (xp.arange(PANELS // 2) / (PANELS // 2 - 1)), stop)


def _put(xp: Namespace, x: Array, index: Array, values: Array) -> Array:
    """Return x with `values` at the indices `index`. x may be overwritten."""
    if xp is not np:
        return x.at[index].set(values)
    x[index] = values
    return x


def _sums(xp: Namespace, x: Array, index: Array, size: int) -> Array:
    """Return for each i < `size` the sum of the entries of x whose `index` is i. The indices ascend."""
    if xp is not np:
        return jax.ops.segment_sum(x, index, num_segments=size, indices_are_sorted=True)
    return np.bincount(index, weights=x, minlength=size)


def _extreme(start: Array, end: Array, upper: Array) -> Array:
    """Return the largest standard normal density on [start, end] if `upper`, otherwise the least."""
    xp = namespace(start, end, upper)
    nearest = xp.maximum(xp.maximum(start, -end), 0.0)
    farthest = xp.maximum(xp.abs(start), xp.abs(end))
    return xp.exp(-0.5 * xp.square(xp.where(upper, nearest, farthest))) / xp.sqrt(2.0 * xp.pi)


def _quadrature(
    order: int,
    rate: Array,
    start: Array,
    half: Array,
    to_left: Array,
    to_right: Array,
    lift_left: Array,
    lift_right: Array,
) -> tuple[Array, Array]:
    """Return two Gauss-Legendre sums for each panel. `gaussian_cells` scales them to the panel's two hat masses."""
    xp = namespace(start, half)
    low, high = xp.zeros_like(half), xp.zeros_like(half)
    for x, w in zip(*np.polynomial.legendre.leggauss(order), strict=True):
        up, down = half * (1.0 + x), half * (1.0 - x)
        below, above = -xp.expm1(-(to_left + rate * up)), -xp.expm1(-(to_right + rate * down))
        exponent = -0.5 * xp.square(start + up)
        low += w * xp.exp(exponent + lift_left) * above
        high += w * xp.exp(exponent + (lift_right - (to_right + rate * down))) * below
    return low, high


def _quadrature_error(centre: Array, half: Array, rate: Array, order: int) -> Array:
    """Bound the relative error of the sums of `_quadrature` on a panel by a Bernstein ellipse. `order` is 2 or 5."""
    xp = namespace(centre, half, rate)
    growth = half * (centre + rate) + half * half
    widest = 4.0 / xp.maximum(half, 1e-4)
    rho = xp.clip(4.0 * order / (growth + 1e-12), 1.5, widest)
    reach = half * 0.5 * (rho + 1.0 / rho)
    exponent = rho * half * rate + centre * (reach + half) + 0.5 * (reach * reach + half * half)
    inverse = 1.0 / xp.square(rho)
    geometric = xp.square(inverse) * (inverse * xp.square(inverse) if order == 5 else 1.0) / (1.0 - inverse)
    error = 64.0 / 15.0 * geometric * (1.0 + rho) * xp.exp(xp.minimum(exponent, 700.0))
    return xp.where(rho > 1.0, error, xp.inf)  # rho <= 1 where half >= 4: there the ellipse gives no bound


def laplace_cells(
    scale: Array,
    first: Array,  # log likelihood ratio of node 0 without sampling
    origin: Array,  # log likelihood ratio of node 0 with sampling
    q: Array,
    step: Array,
    last: Array,  # index of the last node in use
    lifted: Array,  # whether P is the mixture; otherwise Q is
    *,
    nodes: int,
) -> Cells:
    """Return the Laplace law's cells by closed forms (engines/README.md). Nodes ascend in the likelihood ratio."""
    xp = namespace(scale, first, origin, q, step, last, lifted)
    if xp is np and (rest := nodes - 1 - int(last)) > 0:  # as in `gaussian_cells`
        used = laplace_cells(scale, first, origin, q, step, last, lifted, nodes=nodes - rest)
        return Cells(*(np.pad(x, (0, rest)) for x in used))
    rise = step * xp.arange(nodes + 1)
    node = origin + rise
    position = xp.logaddexp(first, node - xp.log(q) + xp.log(-xp.expm1(-rise)))
    v, width = position[:-1], xp.diff(position)
    inside = xp.clip(1.0 / scale - v, 0.0, width)
    used = (xp.arange(nodes) < last) & (inside > 0)
    width, inside = xp.where(used, width, 1.0), xp.where(used, inside, 0.0)
    log_density = -0.5 * (1.0 / scale + v)
    lift_left, lift_right = (xp.where(lifted, x, 0.0) for x in (node[:-1], node[1:]))
    part = -xp.expm1(-0.5 * inside)
    whole = -2.0 * xp.expm1(-width)
    low = xp.exp(log_density + lift_left) * part * -xp.expm1(0.5 * inside - width) / whole
    high = xp.exp(log_density + (lift_right + 0.5 * inside - width)) * part * part / whole
    size = xp.abs(v) + 1.0 / scale + xp.abs(lift_left) + xp.abs(lift_right) + width
    eta = xp.where(used, ROUNDOFF * (40.0 + 4.0 * size), 0.0)
    fine = used & (eta < LARGEST_ETA) & xp.isfinite(low) & xp.isfinite(high)  # other cells get no mass
    low, high, eta = (xp.where(fine, x, 0.0) for x in (low, high, eta))
    return Cells(low, high, eta, xp.zeros(nodes))


def upper_masses(cells: Cells, atoms: Array) -> Array:
    """Return the masses, (N,), of a law that dominates the given law (connect the dots). The masses are rounded up."""
    grown = 1.0 + 1.5 * cells.eta + 8.0 * ROUNDOFF
    return cells.low * grown + _from_left(cells.high * grown + cells.whole) * (1.0 + 4.0 * ROUNDOFF) + atoms


def lower_masses(cells: Cells, atoms: Array, step: Array, first: Array, last: Array) -> Array:
    """Return masses, (N,), dominated by `cells` plus the masses `atoms` on nodes. `cancelled` removes negative ones."""
    xp = namespace(*cells, atoms, step, first, last)
    if xp is np and (span := int(last) - int(first)) < atoms.shape[0] - 1:  # all other masses are 0
        masses, inside = np.zeros(atoms.shape[0]), slice(int(first), int(last) + 1)
        masses[inside] = lower_masses(Cells(*(x[inside] for x in cells)), atoms[inside], step, 0, span)
        return masses
    index = xp.arange(atoms.shape[0])
    open_cell = (index >= first) & (index < last)
    low, high, eta, whole = (xp.where(open_cell, x, 0.0) for x in cells)
    crossing = (index == first) | (last < first + 2)
    low, high = low + xp.where(crossing, high, 0.0), xp.where(crossing, 0.0, high)
    back = xp.exp(-step)
    # `spread` is low high/(low + high e^-h), which is at most `high`. The product low high may leave float64's range.
    larger = low >= high
    ratio = xp.where(larger, high, low) / xp.where(low + high > 0, xp.maximum(low, high), 1.0)
    denominator = xp.where(larger, 1.0 + ratio * back, ratio + back)
    spread = xp.where(larger, high, low) / xp.where(denominator > 0, denominator, 1.0)
    spread = xp.where(denominator > 0, xp.minimum(spread, high), high) * (1.0 + 4.0 * eta + 16.0 * ROUNDOFF)
    lowered = xp.maximum(_from_left(spread), spread)
    final = last - 1
    lowered = xp.where(index == final, xp.maximum(lowered, high * (1.0 + 2.0 * eta)), lowered)
    lowered = xp.where((index <= first) | (index >= last), 0.0, lowered)
    kept = low * (1.0 - eta) + _from_left(high * (1.0 - eta)) + whole + atoms
    given = (1.0 + back) * lowered
    taken = back * _from_right(lowered) + _from_left(lowered)
    jump = kept + given - taken - 16.0 * ROUNDOFF * (kept + given + taken)
    jump = xp.where((index >= first) & (index <= last), jump, 0.0)
    return _convex_minorant(jump, back, first, last)


def cancelled(jump: np.ndarray, step: float) -> tuple[np.ndarray, float]:
    """Set negative masses to 0, and deduct as much P-mass at higher losses. Return (new masses, missing P-mass)."""
    # The two changes together lower the mean of every payoff that rises with the loss. The missing P-mass m, for which
    # masses of higher loss do not suffice, raises the mean of a payoff of at most 1 by at most m.
    if not np.any(jump < 0.0):
        return jump, 0.0
    mass = _above_zero(jump.copy(), step)
    missing = 0.0
    above = np.flatnonzero(mass > 0.0)
    for k in np.flatnonzero(mass < 0.0)[::-1]:  # negative masses, from the highest loss down
        debt, mass[k] = -mass[k] * (1.0 + 4.0 * ROUNDOFF), 0.0
        place = first = int(np.searchsorted(above, k))
        while debt > 0.0 and place < above.size:
            j = above[place]
            if mass[j] > debt:
                mass[j] = (mass[j] - debt) * (1.0 - 4.0 * ROUNDOFF)
                debt = 0.0
            else:
                debt = max(debt - mass[j], 0.0) * (1.0 + 4.0 * ROUNDOFF)
                mass[j] = 0.0
                place += 1
        if place > first:
            above = np.delete(above, slice(first, place))
        missing += debt
    return mass, missing * (1.0 + 1e-9)


def _above_zero(mass: np.ndarray, step: float) -> np.ndarray:
    """Return masses whose delta is at most max(c(eps), 0) at each eps, where c(eps) is the delta of `mass`."""
    some = np.flatnonzero(mass)
    if some.size == 0 or mass[some[-1]] > 0.0:
        return mass
    back, total, discounted, size = np.exp(-step), 0.0, 0.0, 0.0
    for k in range(int(some[-1]) - 1, 0, -1):
        total, discounted = total + mass[k + 1], back * (discounted + mass[k + 1])
        size += abs(mass[k + 1])
        here = total - discounted
        slack = 64.0 * ROUNDOFF * (some[-1] - k + 2.0) * (size + abs(mass[k]))
        if here > slack:  # c_k > 0 despite rounding, so the new delta is lower
            before = (total + mass[k]) - back * (discounted + mass[k])
            whole = -np.expm1(-step)
            mass[k + 1 :] = 0.0
            mass[k] = max(before - slack, 0.0) / whole * (1.0 - 8.0 * ROUNDOFF)
            mass[k - 1] -= (here + slack) * back / whole * (1.0 + 8.0 * ROUNDOFF)
            return mass
    return np.zeros_like(mass)


def _from_left(x: Array) -> Array:
    xp = namespace(x)
    return xp.concatenate([xp.zeros(1), x[:-1]])


def _from_right(x: Array) -> Array:
    xp = namespace(x)
    return xp.concatenate([x[1:], xp.zeros(1)])


def _convex_minorant(jump: Array, back: Array, first: Array, last: Array) -> Array:
    """Spread each negative mass over its two neighbours, in at most 32 sweeps. P-mass and Q-mass stay the same."""
    xp = namespace(jump, back, first, last)
    index = xp.arange(jump.shape[0])
    inner = (index > first) & (index < last)

    def negative(x: Array) -> Array:
        return xp.where(inner & (x < 0), x, 0.0)

    def going(state: tuple[Array, Array]) -> Array:
        return (state[0] < 32) & xp.any(negative(state[1]) < 0)

    def sweep(state: tuple[Array, Array]) -> tuple[Array, Array]:
        done, x = state
        debt = negative(x)
        share = _from_right(debt) * (back / (1.0 + back)) + _from_left(debt) / (1.0 + back)
        rest = x - debt
        return done + 1, rest + share - 8.0 * ROUNDOFF * (xp.abs(rest) - share) * (share < 0)

    return iterate(xp, going, sweep, (xp.zeros((), int), jump))[1]
