"""Search for the strategy of least mean squared error, by L-BFGS in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.progress import waiting


@functools.lru_cache(maxsize=256)
def banded(bands: int, steps: int) -> tuple[float, ...]:
    """Return the first column, scaled to norm 1, of the banded Toeplitz matrix of least mean squared error."""
    from scipy import signal  # slow to import

    unit, left = np.eye(1, steps)[0], np.arange(steps, 0.0, -1.0)

    def loss(rest: np.ndarray) -> tuple[float, np.ndarray]:
        column = np.append(1.0, rest)
        inverse = signal.lfilter([1.0], column, unit)
        twice = signal.lfilter([1.0], column, inverse)  # d inverse_j / d column_k = -twice_(j - k)
        sums = np.cumsum(inverse)
        error, square = (left * sums) @ sums, column @ column
        later = np.cumsum((left * sums)[::-1])[::-1]
        slope = np.array([later[lag:] @ twice[: steps - lag] for lag in range(1, bands)])
        return math.log(error * square), 2.0 * (rest / square - slope / error)

    column = np.append(1.0, _minimise(loss, _square_root(bands)[1:]))
    return tuple((column / np.linalg.norm(column)).tolist())


@functools.lru_cache(maxsize=256)
def banded_inverse(bands: int, steps: int, epochs: int) -> tuple[float, ...]:
    """Return the first column of C^-1, which begins with 1, for the Toeplitz matrix C of least mean squared error.

    Only matrices C whose inverse has at most `bands` bands are searched.
    """

    def loss(rest: Any) -> Any:
        inverse = jnp.concatenate([jnp.ones(1), rest])
        column = _inverse(inverse, steps)
        return _log_error(jnp.pad(inverse, (0, steps - bands))) + _log_square(column, steps // epochs)

    # the first `bands` entries of the inverse of the square root of the prefix-sum matrix
    start = np.diff(_square_root(bands), prepend=0.0)
    return tuple([1.0, *_minimise(_traced(loss), start[1:]).tolist()])


@functools.lru_cache(maxsize=256)
def buffered(buffers: int, steps: int, epochs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scales and decays of the buffered linear Toeplitz matrix of least mean squared error."""

    def parts(values: Any) -> tuple[Any, Any]:
        # these scales sum to less than 1, and these decays are below 1, so the column falls
        logits, places = jnp.split(values, 2)
        scales = jax.nn.softmax(jnp.append(logits, 0.0))[:-1]
        return scales, jax.nn.sigmoid(places)

    def loss(values: Any) -> Any:
        scales, decays = parts(values)
        column = jnp.append(jnp.ones(1), scales @ decays[:, None] ** jnp.arange(steps - 1.0))

        def step(state: Any, unit: Any) -> tuple[Any, Any]:
            noise = unit - scales @ state
            return decays * state + noise, noise

        _, inverse = jax.lax.scan(step, jnp.zeros(buffers), jnp.zeros(steps).at[0].set(1.0))
        return _log_error(inverse) + _log_square(column, steps // epochs)

    starts = []
    for fastest in (0.9, 0.5):  # 1 minus the decay of the term that falls fastest
        falls = np.geomspace(fastest, min(1.0 / steps, 0.5 * fastest), buffers)
        starts.append(np.concatenate([np.full(buffers, -np.log(buffers)), np.log((1.0 - falls) / falls)]))
    found = _minimise(_traced(loss), *starts)
    with jax.enable_x64():
        scales, decays = (np.asarray(part) for part in jax.jit(parts)(found))
    return tuple(scales.tolist()), tuple(decays.tolist())


@functools.lru_cache(maxsize=64)
def column_normalised(bands: int, steps: int) -> np.ndarray:
    """Return the diagonals, (bands, n), of the banded matrix of least mean squared error whose columns have norm 1."""
    lengths = np.minimum(bands, steps - np.arange(steps))
    inside = np.arange(bands)[:, None] < lengths

    def diagonals(values: Any) -> Any:
        entries = jnp.where(inside, jnp.reshape(values, (bands, steps)), 0.0)
        return entries / jnp.sqrt(jnp.sum(entries**2, 0))

    loss = lambda values: jnp.log(jnp.mean(banded_errors(diagonals(values))))
    start = np.broadcast_to(np.array(banded(bands, steps))[:, None], inside.shape)
    found = _minimise(_traced(loss), start.ravel())
    with jax.enable_x64():
        return np.asarray(diagonals(found))


@jax.jit
def banded_errors(diagonals: Any) -> Any:
    """Return the variance of each noisy prefix sum, (n,), for C[i + l, i] = diagonals[l, i]."""
    bands, steps = diagonals.shape
    # row i of C has the entries diagonals[l, i - l]
    row = jnp.stack([jnp.pad(diagonals[lag, : steps - lag], (lag, 0)) for lag in range(bands)], 1)

    def step(covariance: Any, entries: Any) -> tuple[Any, Any]:
        # the rows of `covariance` are the last bands - 1 noises, the latest first, and the sum of all noises
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


def _inverse(column: Any, steps: int) -> Any:
    """Return the first column of the inverse of a Toeplitz matrix with 1 on its diagonal, (n,)."""

    def step(recent: Any, unit: Any) -> tuple[Any, Any]:
        entry = unit - recent @ column[1:]
        return jnp.append(entry, recent)[: recent.size], entry

    return jax.lax.scan(step, jnp.zeros(column.size - 1), jnp.zeros(steps).at[0].set(1.0))[1]


def _log_error(inverse: Any) -> Any:
    """Return the log of the mean variance of the prefix sums, from the first column of C^-1."""
    squares = jnp.cumsum(inverse) ** 2
    return jnp.log(jnp.mean(squares * jnp.arange(inverse.size, 0.0, -1.0)))


def _log_square(column: Any, period: int) -> Any:
    """Return log(squared norm of the sum of columns 0, period, ... of |C|), a bound of log(squared sensitivity)."""
    steps = column.size
    total = sum(jnp.pad(jnp.abs(column), (start, 0))[:steps] for start in range(0, steps, period))
    return jnp.log(jnp.sum(jnp.asarray(total) ** 2))


def _traced(loss: Callable[[Any], Any]) -> Callable[[np.ndarray], tuple[Any, Any]]:
    """Return a function that computes the loss and its gradient by a program of JAX, which is compiled once."""
    both = jax.jit(jax.value_and_grad(loss))

    def in_numpy(x: np.ndarray) -> tuple[Any, Any]:
        value, gradient = both(x)
        return np.asarray(value), np.asarray(gradient)

    return in_numpy


def _minimise(loss: Callable[[np.ndarray], tuple[Any, Any]], *starts: np.ndarray) -> np.ndarray:
    """Run L-BFGS from each start, and return the point of least loss that it finds.

    `loss` returns the value of the loss and its gradient.
    """
    if not starts[0].size:
        return starts[0]
    from scipy import optimize  # slow to import

    with jax.enable_x64(), waiting(None, "steps of the search for a strategy") as work:
        found = [
            optimize.minimize(
                loss,
                start,
                jac=True,
                method="L-BFGS-B",
                callback=lambda x: setattr(work, "done", work.done + 1),
                options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30},
            )
            for start in starts
        ]
    return np.asarray(min(found, key=lambda one: float(one.fun)).x)
