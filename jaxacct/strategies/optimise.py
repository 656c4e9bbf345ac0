"""Search for the strategy of least mean squared error, by L-BFGS in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.progress import waiting


@functools.lru_cache(maxsize=256)
def banded(bands: int, steps: int) -> tuple[float, ...]:
    """Return the first column, scaled to norm 1, of the banded Toeplitz matrix of least mean squared error."""
    column = _toeplitz(_square_root(bands), steps, steps, inverse=False)
    return tuple((column / np.linalg.norm(column)).tolist())


@functools.lru_cache(maxsize=256)
def banded_inverse(bands: int, steps: int, epochs: int) -> tuple[float, ...]:
    """Return the `bands` entries 1, d_1, ... of column 0 of the Toeplitz C^-1 whose C has the least error."""
    # begin at column 0 of A^(-1/2), where A is the prefix-sum matrix
    start = np.diff(_square_root(bands), prepend=0.0)
    return tuple(_toeplitz(start, steps, steps // epochs, inverse=True).tolist())


def _toeplitz(start: np.ndarray, steps: int, period: int, inverse: bool) -> np.ndarray:
    """Search from `start` for the best banded C, or C^-1 if `inverse`. Return the first column of that matrix."""

    def loss(rest: np.ndarray) -> tuple[float, np.ndarray]:
        given = np.append(1.0, rest)
        other = reciprocal(given, steps)
        if inverse:
            value, through, own = _log_error(other, given, period)
        else:
            value, own, through = _log_error(given, other, period)
        return value, (own + _through(other, through))[1 : start.size]

    return np.append(1.0, _minimise(loss, start[1:]))


@functools.lru_cache(maxsize=256)
def buffered(buffers: int, steps: int, epochs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scales and decays of the buffered linear Toeplitz matrix of least mean squared error."""

    def parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # map any real numbers to scales of sum below 1 and to decays below 1, so that the first column of C falls
        logits, places = np.split(values, 2)
        weights = np.exp(np.append(logits, 0.0) - max(logits.max(), 0.0))
        return weights[:-1] / weights.sum(), 1.0 / (1.0 + np.exp(-places))

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        scales, decays = parts(values)
        inverse = buffered_inverse(scales, decays, steps)
        value, slope, of_inverse = _log_error(buffered_column(scales, decays, steps), inverse, steps // epochs)
        slope += _through(inverse, of_inverse)
        lags = np.arange(steps - 1)
        powers = decays[:, None] ** lags
        of_scales, of_decays = powers @ slope[1:], scales * (powers[:, :-1] @ (lags[1:] * slope[2:]))
        of_logits = scales * (of_scales - scales @ of_scales)
        return value, np.append(of_logits, of_decays * decays * (1.0 - decays))

    starts = []
    for fastest in (0.9, 0.5):  # 1 minus the decay of the term that falls fastest
        falls = np.geomspace(fastest, min(1.0 / steps, 0.5 * fastest), buffers)
        starts.append(np.concatenate([np.full(buffers, -np.log(buffers)), np.log((1.0 - falls) / falls)]))
    scales, decays = parts(_minimise(loss, *starts))
    return tuple(scales.tolist()), tuple(decays.tolist())


@functools.lru_cache(maxsize=64)
def column_normalised(bands: int, steps: int) -> np.ndarray:
    """Return the diagonals, (bands, n), of the matrix of least error among the banded ones with columns of norm 1."""
    lengths = np.minimum(bands, steps - np.arange(steps))
    inside = np.arange(bands)[:, None] < lengths

    def diagonals(values: Any) -> Any:
        entries = jnp.where(inside, jnp.reshape(values, (bands, steps)), 0.0)
        return entries / jnp.sqrt(jnp.sum(entries**2, 0))

    loss = jax.jit(jax.value_and_grad(lambda values: jnp.log(jnp.mean(banded_errors(diagonals(values))))))
    start = np.broadcast_to(np.array(banded(bands, steps))[:, None], inside.shape)
    with jax.enable_x64():
        return np.asarray(diagonals(_minimise(loss, start.ravel())))


@jax.jit
def banded_errors(diagonals: Any) -> Any:
    """Return the variance of each noisy prefix sum, (n,), for the banded C with C[i + l, i] = diagonals[l, i]."""
    bands, steps = diagonals.shape
    # row i of C has the entries diagonals[l, i - l]
    row = jnp.stack([jnp.pad(diagonals[lag, : steps - lag], (lag, 0)) for lag in range(bands)], 1)

    def step(covariance: Any, entries: Any) -> tuple[Any, Any]:
        # `covariance` belongs to the last bands - 1 noises, the latest first, followed by the sum of all noises
        noise = jnp.append(-entries[1:], 0.0) / entries[0]
        total = noise.at[-1].add(1.0)
        move = jnp.concatenate([noise[None], jnp.eye(bands)])[: bands - 1]
        move, fresh = jnp.concatenate([move, total[None]]), jnp.zeros(bands).at[0].set(1.0).at[-1].set(1.0)
        covariance = move @ covariance @ move.T + jnp.outer(fresh, fresh) / entries[0] ** 2
        return covariance, covariance[-1, -1]

    return jax.lax.scan(step, jnp.zeros((bands, bands)), row)[1]


def _square_root(count: int) -> np.ndarray:
    """Return binom(2 j, j)/4^j for j < count: the first column of the square root of the matrix of prefix sums."""
    index = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod(1.0 - 0.5 / index)])


def reciprocal(column: Sequence[float] | np.ndarray, steps: int) -> np.ndarray:
    """Return the first column of T^-1, (n,), for the lower triangular Toeplitz matrix T of first column `column`."""
    from scipy.linalg import blas  # slow to import

    column = np.asarray(column, np.float64)[:steps]
    bands = np.asfortranarray(np.repeat(column[:, None], steps, axis=1))
    return np.asarray(blas.dtbsv(column.size - 1, bands, np.eye(1, steps)[0], lower=1))


def buffered_column(scales: np.ndarray, decays: np.ndarray, steps: int) -> np.ndarray:
    """Return the first column of a buffered C, (n,): 1, then `sum_k scales_k decays_k^j` for j = 0, ..., n - 2."""
    return np.append(1.0, scales @ decays[:, None] ** np.arange(steps - 1))


def buffered_inverse(scales: np.ndarray, decays: np.ndarray, steps: int) -> np.ndarray:
    """Return the first column of C^-1, (n,), for a buffered C, whose inverse is buffered, too (README.md, "Error")."""
    root = np.sqrt(scales)
    decays, vectors = np.linalg.eigh(np.diag(decays) - np.outer(root, root))
    return buffered_column(-np.square(root @ vectors), decays, steps)


def _log_error(column: np.ndarray, inverse: np.ndarray, period: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return log(sum of the prefix sums' variances * squared sensitivity of |C|), and its gradients in both columns."""
    steps = max(column.size, inverse.size)
    column, inverse = (np.pad(each, (0, steps - each.size)) for each in (column, inverse))
    passes = lambda values: np.cumsum(np.pad(values, (0, -steps % period)).reshape(-1, period), 0).ravel()
    total, sums = passes(np.abs(column))[:steps], np.cumsum(inverse)
    weighted = np.arange(steps, 0.0, -1.0) * sums
    square, error = total @ total, weighted @ sums
    of_column = passes(total[::-1])[:steps][::-1] * np.sign(column)
    return math.log(error * square), 2.0 / square * of_column, 2.0 / error * np.cumsum(weighted[::-1])[::-1]


def _through(inverse: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Return a loss's gradient in column 0 of a Toeplitz matrix T, from `slope`, its gradient in column 0 of T^-1."""
    # d inverse_j / d column_k = -(inverse * inverse)_(j - k), * for convolution: correlate `slope` twice with `inverse`
    size = inverse.size
    reflected = np.conj(np.fft.rfft(inverse, 2 * size))
    for _ in range(2):
        slope = np.fft.irfft(np.fft.rfft(slope, 2 * size) * reflected)[:size]
    return -slope


def _minimise(loss: Callable[[np.ndarray], tuple[Any, Any]], *starts: np.ndarray) -> np.ndarray:
    """Run L-BFGS from each start, and return the point of least loss; `loss` returns its value and its gradient."""
    if not starts[0].size:
        return starts[0]
    from scipy import optimize  # slow to import

    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30}
    with np.errstate(all="ignore"), waiting(None, "steps of the search for a strategy") as work:
        count = lambda x: setattr(work, "done", work.done + 1)
        settings: Any = {"jac": True, "method": "L-BFGS-B", "callback": count, "options": options}
        found = [optimize.minimize(loss, start, **settings) for start in starts]
    return np.asarray(min(found, key=lambda one: float(one.fun)).x)
