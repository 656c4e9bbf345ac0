"""The matrices C of strategies: Toeplitz matrices, banded matrices whose columns differ, and trees."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import jax
import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import POSITIVE, REAL, Constraint, InputError, check, refuse_where
from jaxacct.strategies import optimise
from jaxacct.strategies.strategy import Strategy, Taps, ring


class ToeplitzStrategy(Strategy):
    """A strategy whose matrix C is lower triangular and Toeplitz: C[i + l, i] = column[l] for all i and all l >= 0."""

    coefficients: tuple[float, ...]

    def _settle(self) -> None:
        _store_column(self, "coefficients", self.coefficients)

    @property
    def column(self) -> np.ndarray:
        """The first column of C without the zeros at its end."""
        return np.array(self.coefficients)

    @property
    def overlap(self) -> int:
        return int(self.column.size)

    @property
    def entries(self) -> np.ndarray:
        return np.repeat(self.column[:, None], self.steps, axis=1)

    def lags(self, count: int) -> np.ndarray:
        column, left = self.column, np.arange(self.steps, 0, -1)
        found = np.zeros((count, self.steps))
        for lag in range(count):
            sums = np.cumsum(column[: column.size - lag] * column[lag:])
            # column i of C has `left[i]` rows on and below the diagonal
            found[lag, : self.steps - lag] = sums[np.minimum(left[lag:], sums.size) - 1]
        return found

    def squared_errors(self) -> np.ndarray:
        return np.cumsum(np.square(np.cumsum(self.inverse_column())))

    def taps(self, step: int) -> Taps:
        column = self.column
        return ring(step, 1.0 / column[0], -column[1:] / column[0], of_sum=True)

    def inverse_column(self) -> np.ndarray:
        """Return the first column of C^-1, (n,)."""
        return optimise.reciprocal(self.column, self.steps)

    def _square(self, separation: int, most: int, periodic: bool) -> tuple[float, float]:
        column = self.column
        falls = bool(np.all(column >= 0.0) and np.all(np.diff(column) <= 0.0))
        if not falls and column.size > separation:
            return super()._square(separation, most, periodic)
        # A record's worst steps are 0, b, 2b, ..., with b the separation (README.md, "Sensitivity"). The
        # absolute values may be added: either the entries are >= 0, or the columns at these steps do not overlap.
        starts = range(0, self.steps, separation)[:most]
        total = np.zeros(self.steps + column.size)
        for start in starts:
            total[start : start + column.size] += np.abs(column)
        square = math.fsum(np.square(total[: self.steps]))
        rounding = 4.0 * (len(starts) + 2) * ROUNDOFF
        return square * (1.0 - rounding), square * (1.0 + rounding)


@dataclass(frozen=True)
class Toeplitz(ToeplitzStrategy):
    """The lower triangular Toeplitz matrix with a given first column.

    Parameters
    ----------
    coefficients : c_0 > 0, c_1, ..., c_{p-1}; later entries of the first column are 0.
    steps, epochs : the size n >= p of the matrix, and the number of fixed epochs that `error` is for (it divides n).

    References
    ----------
    Kalinin and Lampert (2024), Banded Square Root Matrix Factorization, arXiv:2405.13763.

    >>> strategy = Toeplitz((1.0, 0.5), steps=4)
    >>> float(round(strategy.sensitivity().upper ** 2, 9)), round(strategy.error, 6)
    (1.25, 1.958008)
    """

    coefficients: tuple[float, ...]
    steps: int = 0
    epochs: int = 1

    @property
    def bands(self) -> int:
        return len(self.coefficients)


@dataclass(frozen=True)
class Identity(ToeplitzStrategy):
    """The identity: independent noise in each step, as in DP-SGD.

    Parameters
    ----------
    steps, epochs : the size n of the matrix, and the number of fixed epochs that `error` is for (it divides n).

    References
    ----------
    Denisov et al. (2022), arXiv:2202.08312.

    >>> Identity(steps=64).error
    32.5
    """

    steps: int = 0
    epochs: int = 1
    bands: ClassVar = 1
    coefficients: ClassVar = (1.0,)  # type: ignore[misc]  # the same for every Identity


@dataclass(frozen=True, repr=False)
class Banded(ToeplitzStrategy):
    """The banded Toeplitz matrix of least mean squared error of the prefix sums; its first column has norm 1.

    It is the best matrix for ``epochs`` fixed epochs of at least ``bands`` steps, and for cyclic Poisson sampling from
    at least ``bands`` groups: the privacy of both depends on C only through the norm of its first column.

    Parameters
    ----------
    bands : p, the number of steps that share noise.
    steps, epochs : n, the size of the matrix, and the number of fixed epochs, a divisor of n with n/epochs >= p.
    coefficients : the first column, if it is known; otherwise it is searched for.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> round(Banded(2, steps=64).error, 6)
    17.654779
    """

    bands: int
    steps: int = 0
    epochs: int = 1
    coefficients: tuple[float, ...] = field(default=(), repr=False)

    def _settle(self) -> None:
        _check_bands(self)
        found = self.coefficients if np.size(self.coefficients) else optimise.banded(self.bands, self.steps)
        _store_column(self, "coefficients", found, self.bands)


@dataclass(frozen=True, repr=False)
class BLT(ToeplitzStrategy):
    """A buffered linear Toeplitz matrix. Its first column is c_0 = 1, c_j = sum_k scales_k decays_k^(j-1).

    Parameters
    ----------
    buffers : d, the number of terms of the sum over k, and the number of noise buffers that a run keeps.
    steps, epochs : the size n of the matrix, and the number of fixed epochs that `error` is for (it divides n).
    scales, decays : d numbers each, scales > 0 and 0 <= decays < 1, if known; otherwise they are searched for.

    References
    ----------
    Dvijotham et al. (2024), Efficient and Near-Optimal Noise Generation for Streaming DP, arXiv:2404.16706.

    >>> blt = BLT(3, steps=64)
    >>> round(blt.error, 2)
    4.75
    """

    buffers: int
    steps: int = 0
    epochs: int = 1
    scales: tuple[float, ...] = field(default=(), repr=False)
    decays: tuple[float, ...] = field(default=(), repr=False)

    def _settle(self) -> None:
        scales, decays = self.scales, self.decays
        if not (np.size(scales) or np.size(decays)):
            scales, decays = optimise.buffered(self.buffers, self.steps, self.epochs)
        below_one = Constraint("use numbers below 1", 0, 1, upper_open=True)
        for name, values, rule in (("scales", scales, POSITIVE), ("decays", decays, below_one)):
            array = np.atleast_1d(check(name, values, rule))
            if array.shape != (self.buffers,):
                raise InputError(f"{name} must be buffers = {self.buffers} numbers, found shape {array.shape}")
            object.__setattr__(self, name, tuple(array.tolist()))

    @functools.cached_property
    def column(self) -> np.ndarray:
        return optimise.buffered_column(np.array(self.scales), np.array(self.decays), self.steps)

    def inverse_column(self) -> np.ndarray:
        return optimise.buffered_inverse(np.array(self.scales), np.array(self.decays), self.steps)

    def taps(self, step: int) -> Taps:
        # Before step i, buffer k holds sum_{j < i} decays_k^(i-1-j) w_j, with w_j the noise that step j has added.
        return Taps(1.0, -np.array(self.scales), np.array(self.decays), np.ones(self.buffers), np.zeros(self.buffers))

    @property
    def entry_error(self) -> float:
        return 2.0 * (self.buffers + 8) * ROUNDOFF * (1.0 + sum(self.scales))


@dataclass(frozen=True, repr=False)
class BandedInverse(ToeplitzStrategy):
    """The Toeplitz matrix C whose inverse has p bands.

    A step's noise is a weighted sum of the independent noises of the last p steps. So it can be drawn again from the
    keys of these steps alone. C itself is full, so no cyclic sampling amplifies its privacy.

    Parameters
    ----------
    inverse_bands : p, the number of bands of C^-1.
    steps, epochs : the size n of the matrix, and the number of fixed epochs that `error` is for (it divides n).
    inverse : the first column d_0 > 0, d_1, ..., d_{p-1} of C^-1, if it is known; otherwise it is searched for.

    References
    ----------
    Kalinin et al. (2025), Back to Square Roots, arXiv:2505.12128.

    >>> strategy = BandedInverse(4, steps=64)
    >>> round(strategy.error, 2)
    5.11
    """

    inverse_bands: int
    steps: int = 0
    epochs: int = 1
    inverse: tuple[float, ...] = field(default=(), repr=False)

    def _settle(self) -> None:
        if self.inverse_bands > self.steps:
            raise InputError(f"inverse_bands = {self.inverse_bands} must be <= steps = {self.steps}; use fewer bands")
        given = np.size(self.inverse) > 0
        found = self.inverse if given else optimise.banded_inverse(self.inverse_bands, self.steps, self.epochs)
        _store_column(self, "inverse", found, self.inverse_bands)
        if not np.all(np.abs(self.column) <= 1e100):
            raise InputError("inverse has a matrix C whose entries exceed 1e100; use coefficients that decay")

    @functools.cached_property
    def column(self) -> np.ndarray:
        return optimise.reciprocal(self.inverse, self.steps)

    def taps(self, step: int) -> Taps:
        return ring(step, self.inverse[0], np.array(self.inverse[1:]), of_sum=False)

    @property
    def entry_error(self) -> float:
        # The recursion solves C^-1 c = e_1 up to a residual r. So the error of the column c is the convolution c * r,
        # whose entries the product below bounds.
        size, taps = np.abs(self.column), np.abs(self.inverse)
        return float(8.0 * (taps.size + 2) * ROUNDOFF * taps.sum() * size.max() * size.sum())

    def inverse_column(self) -> np.ndarray:
        return np.pad(np.array(self.inverse), (0, self.steps - len(self.inverse)))


def _check_bands(strategy: Banded | ColumnNormalised) -> None:
    """Refuse more bands than an epoch has steps. Otherwise columns of C for two steps of one record would overlap."""
    if strategy.bands * strategy.epochs > strategy.steps:
        raise InputError(
            f"bands = {strategy.bands} must be <= steps / epochs = {strategy.steps // strategy.epochs}, or the columns "
            "of one record overlap; use fewer bands"
        )


def _store_column(strategy: Strategy, name: str, column: tuple[float, ...], size: int | None = None) -> None:
    """Check a first column and store it as a tuple. `size`: its number of entries; if None, 1 to `strategy.steps`."""
    values = np.atleast_1d(check(name, column, REAL))
    if values.ndim != 1 or not 1 <= values.size <= strategy.steps or size not in (None, values.size):
        wanted = f"1 to steps = {strategy.steps}" if size is None else str(size)
        raise InputError(f"{name} must be {wanted} numbers, found shape {values.shape}")
    check(f"{name}[0]", values[0], POSITIVE)
    require_range(name, values)
    object.__setattr__(strategy, name, tuple(values.tolist()))


def require_range(name: str, values: np.ndarray) -> None:
    """Refuse a matrix if float64 does not hold the squares of all its entries to full accuracy."""
    size = np.abs(values)
    bad = (values != 0.0) & ~((size >= 1e-100) & (size <= 1e100))
    refuse_where(bad, name, values, "must be 0 or of size 1e-100 to 1e100; scale the matrix and the noise alike")


@dataclass(frozen=True, repr=False)
class ColumnNormalised(Strategy):
    """The banded matrix with columns of norm 1 whose prefix sums have the least mean squared error.

    ``Banded`` cuts off its last columns to norms below 1 and has about 2 to 5 % more error (README.md, "Error").

    Parameters
    ----------
    bands : p, the number of non-zero diagonals of C.
    steps, epochs : n, the size of the matrix, and the number of fixed epochs, a divisor of n with n/epochs >= p.
    diagonals : (bands, steps), C[i + l, i] in row l, column i, if the matrix is known; otherwise it is searched for.

    References
    ----------
    McKenna (2024), Scaling up the Banded Matrix Factorization Mechanism, arXiv:2405.15913.

    >>> from jaxacct.strategies import Banded
    >>> round(ColumnNormalised(2, steps=16).error, 4), round(Banded(2, steps=16).error, 4)
    (5.1322, 5.2117)
    """

    bands: int
    steps: int = 0
    epochs: int = 1
    diagonals: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def _settle(self) -> None:
        _check_bands(self)
        found = self.diagonals if len(self.diagonals) else optimise.column_normalised(self.bands, self.steps)
        values = np.asarray(check("diagonals", found, REAL))
        if values.shape != (self.bands, self.steps):
            raise InputError(f"diagonals must have shape {(self.bands, self.steps)}, found {values.shape}")
        require_range("diagonals", values)
        object.__setattr__(self, "diagonals", tuple(map(tuple, values.tolist())))

    @property
    def overlap(self) -> int:
        return self.bands

    def taps(self, step: int) -> Taps:
        own = self.diagonals[0][step]
        past = [-self.diagonals[lag][step - lag] / own if lag <= step else 0.0 for lag in range(1, self.bands)]
        return ring(step, 1.0 / own, np.array(past), of_sum=True)

    @property
    def entries(self) -> np.ndarray:
        """The entries of C, (bands, n), with C[i + l, i], or 0 if i + l >= n, in row l, column i."""
        inside = np.arange(self.bands)[:, None] < self.steps - np.arange(self.steps)
        return np.where(inside, np.asarray(self.diagonals), 0.0)

    def lags(self, count: int) -> np.ndarray:
        entries, found = self.entries, np.zeros((count, self.steps))
        for lag in range(count):
            products = entries[lag:, : self.steps - lag] * entries[: self.bands - lag, lag:]
            found[lag, : self.steps - lag] = products.sum(0)
        return found

    def squared_errors(self) -> np.ndarray:
        with jax.enable_x64():
            return np.asarray(optimise.banded_errors(self.entries))


@dataclass(frozen=True)
class PrefixSum(Strategy):
    """Tree aggregation: C has one row for each node of a binary tree over the steps of a block.

    A node is the sum of the steps below it. A prefix sum adds up nodes: for each complete block one node per binary
    digit 1 of the block's length, and for the first r steps of the next block one node per binary digit 1 of r.

    Parameters
    ----------
    steps, epochs : the number n of leaves, and the number of fixed epochs that `error` is for (it divides n).
    restarts : the number of blocks, a divisor of n; each has its own trees.  ``restarts = epochs``: a block per epoch.

    References
    ----------
    Kairouz et al. (2021), Practical and Private (Deep) Learning without Sampling or Shuffling, arXiv:2103.00039.

    >>> tree = PrefixSum(steps=64)
    >>> float(round(tree.sensitivity().upper ** 2, 9)), round(tree.error, 4)
    (7.0, 21.1094)
    """

    steps: int = 0
    epochs: int = 1
    restarts: int = 1
    rounding: ClassVar = 0.0  # type: ignore[misc]  # the entries of C are 0 or 1, so C^T C is computed exactly

    def _settle(self) -> None:
        if self.steps % self.restarts:
            raise InputError(f"restarts = {self.restarts} must divide steps = {self.steps}; use blocks of one length")

    def taps(self, step: int) -> Taps:
        # Buffer k holds the noise of the latest node of 2^k steps.  At step t = 1, 2, ... of a block, one new node
        # replaces the smaller nodes of the prefix sum.  It is a node of 2^l steps, for t with l trailing 0 bits.
        count = step % self.block + 1
        levels, level = np.arange(self.overlap.bit_length()), (count & -count).bit_length() - 1
        below, now = (levels < level).astype(float), (levels == level).astype(float)
        return Taps(1.0, -below, 1.0 - now, np.zeros(levels.size), now)

    def for_steps(self, steps: int) -> Self:
        if not self.steps or self.restarts == 1:  # a single tree may have any number of steps
            return replace(self, steps=steps)
        if steps % self.block:
            raise InputError(f"steps = {steps} must be a multiple of {self.block}, the steps of a tree; use a multiple")
        return replace(self, steps=steps, restarts=steps // self.block)

    @property
    def block(self) -> int:
        return self.steps // self.restarts

    @property
    def overlap(self) -> int:
        # the number of leaves of the largest node: steps at least this many apart share no node
        return 1 << (self.block.bit_length() - 1)

    def lags(self, count: int) -> np.ndarray:
        leaf = np.arange(self.steps) % self.block
        shared = np.zeros((count, self.steps))
        for level in range(self.block.bit_length()):
            node = leaf >> level
            whole = (node + 1) << level <= self.block  # the tree has only nodes that end in the block
            for lag in range(min(1 << level, count)):
                shared[lag] += whole & (node == (leaf + lag) >> level)
        return shared

    def squared_errors(self) -> np.ndarray:
        blocks, leaves = np.divmod(np.arange(self.steps) + 1, self.block)
        return blocks * float(self.block.bit_count()) + np.array([int(count).bit_count() for count in leaves], float)
