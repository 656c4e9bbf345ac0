"""The contour engine on batches: a ladder of resolutions, each one compiled program for chunks of fixed size.

Every configuration starts on the lowest rung; those whose certificate is not narrow enough climb.  What no rung
certifies (few expected hits, where the characteristic function does not decay) is left to the lattice engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.kernels import contour
from jaxacct.kernels.law import Law
from jaxacct.mechanisms.components import Components


class Rung(NamedTuple):
    """Quadrature points, contour nodes, placements of the contour, and configurations per call."""

    points: int
    nodes: int
    rounds: int
    chunk: int


NARROW = 1e-6
"""Relative width below which no further rung is tried, whatever was asked for."""

LADDER = (Rung(64, 24, 1, 256), Rung(192, 64, 2, 64), Rung(768, 256, 3, 8), Rung(3072, 1024, 2, 2))


class Answer(NamedTuple):
    """Ends and estimate of a batch; NaN-free, with lower = -inf and upper = inf where nothing is known."""

    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray


def law(parts: Components) -> Law:
    """The components as the kernels take them."""
    return Law(
        parts.sign,
        parts.mu2,
        parts.gauss_sigma,
        parts.gauss_q,
        parts.gauss_n,
        parts.laplace_scale,
        parts.laplace_n,
        parts.finite_loss,
        parts.finite_mass,
        parts.finite_n,
    )


def supports(parts: Components) -> np.ndarray:
    """Which configurations the contour can answer: a Gaussian part, and no sampled Laplace part."""
    smooth = (parts.mu2 > 0) | np.any(parts.gauss_n > 0, axis=1)
    sampled_laplace = np.any((parts.laplace_n > 0) & (parts.laplace_q < 1), axis=1)
    return smooth & ~sampled_laplace


@functools.cache
def program(kernel: Callable[..., Any], rung: Rung) -> Callable[..., Any]:
    """The kernel on one rung, vmapped over configurations and jitted."""
    options: dict[str, int] = {"points": rung.points, "count": rung.nodes}
    if kernel is contour.epsilon:
        options["rounds"] = rung.rounds
    return jax.jit(jax.vmap(functools.partial(kernel, **options)))


def in_chunks(compiled: Callable[..., Any], chunk: int, arguments: Any, size: int) -> list[np.ndarray]:
    """Run a compiled program over a batch in chunks of one shape, on all cores; the last chunk is padded."""

    def one(start: int) -> list[np.ndarray]:
        index = np.minimum(np.arange(start, start + chunk), size - 1)
        with jax.enable_x64():
            out = compiled(*jax.tree.map(lambda a: a[index], arguments))
            return [np.asarray(x) for x in out]

    starts = range(0, size, chunk)
    if len(starts) == 1:
        pieces = [one(0)]
    else:
        first = one(0)  # compiles once, before the threads start
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            pieces = [first, *pool.map(one, list(starts)[1:])]
    return [np.concatenate(columns)[:size] for columns in zip(*pieces, strict=True)]


def _climb(kernel: Callable[..., Any], parts: Components, values: tuple[np.ndarray, ...], good: Any) -> Answer:
    size = parts.mu2.size
    lower, estimate, upper = np.full(size, -np.inf), np.zeros(size), np.full(size, np.inf)
    todo = np.flatnonzero(supports(parts))
    for rung in LADDER:
        if todo.size == 0:
            break
        arguments = (law(parts.take(todo)), *(v[todo] for v in values))
        low, mid, high, ok = in_chunks(program(kernel, rung), rung.chunk, arguments, todo.size)
        low = np.where(ok & ~np.isnan(low), low, -np.inf)
        high = np.where(ok & ~np.isnan(high), high, np.inf)
        better = ok & np.isfinite(low + mid + high) & (high - low < upper[todo] - lower[todo])
        rows = todo[better]
        lower[rows], estimate[rows], upper[rows] = low[better], mid[better], high[better]
        todo = todo[~(better & good(low, high))]
    return Answer(lower, estimate, upper)


def epsilon(parts: Components, delta: np.ndarray, slack: np.ndarray, rtol: float) -> Answer:
    """Bracket of `inf {eps : delta_fin(eps) <= delta}`, before clipping at 0, for delta known up to a slack."""
    narrow = 0.5 * min(rtol, NARROW)
    values = (np.log(delta) + np.log1p(-slack), np.log(delta) + np.log1p(slack))
    return _climb(contour.epsilon, parts, values, lambda low, high: high - low <= narrow * np.abs(high))


def delta(parts: Components, epsilon: np.ndarray, rtol: float) -> Answer:
    """Bracket of the finite part of delta(eps)."""
    narrow = 0.5 * min(rtol, NARROW)
    logs = _climb(contour.delta, parts, (epsilon,), lambda low, high: high - low <= narrow)
    return Answer(np.exp(logs.lower), np.where(np.isfinite(logs.upper), np.exp(logs.estimate), 0.0), np.exp(logs.upper))
