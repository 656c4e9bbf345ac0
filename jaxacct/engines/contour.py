"""The contour engine on batches: a ladder of resolutions, each one compiled program for chunks of fixed size.

Every configuration starts on the lowest rung; those whose certificate is not narrow enough climb.  What no rung
certifies (few expected hits, where the characteristic function does not decay) is left to the lattice engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.engines.chunks import in_chunks
from jaxacct.kernels import contour
from jaxacct.kernels.law import Law
from jaxacct.mechanisms.components import Components


class Rung(NamedTuple):
    """Quadrature points, contour nodes, placements of the contour, and configurations per call."""

    points: int
    nodes: int
    rounds: int
    chunk: int


TOLERANCE = 1e-8
"""Relative size of delta down to which images and cut-off terms are driven, unless a call says otherwise."""

LADDER = (
    Rung(64, 32, 1, 128),
    Rung(192, 64, 2, 32),
    Rung(512, 192, 3, 8),
    Rung(1536, 512, 3, 2),
    Rung(2560, 1024, 3, 1),
    Rung(4096, 2048, 3, 1),
)


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


def suits(needs: np.ndarray, rung: Rung) -> np.ndarray:
    """Whether a rung has the (points, nodes) that a kernel asked for."""
    return (needs[:, 0] <= rung.points) & (needs[:, 1] <= rung.nodes)


def rung_for(needs: np.ndarray) -> np.ndarray:
    """The first rung that suits, the last one if none does."""
    fits = [suits(needs, rung) for rung in LADDER]
    return np.where(np.any(fits, axis=0), np.argmax(fits, axis=0), len(LADDER) - 1)


def _climb(
    kernel: Callable[..., Any],
    parts: Components,
    values: tuple[np.ndarray, ...],
    floor: np.ndarray,
    good: Any,
) -> Answer:
    size = parts.mu2.size
    lower, estimate, upper = np.full(size, -np.inf), np.zeros(size), np.full(size, np.inf)
    rows = np.flatnonzero(supports(parts))
    due = np.where(np.isin(np.arange(size), rows), 0, len(LADDER))
    for step, rung in enumerate(LADDER):
        todo = np.flatnonzero(due == step)
        if todo.size == 0:
            continue
        arguments = (law(parts.take(todo)), *(v[todo] for v in values))
        low, mid, high, ok, needs = in_chunks(program(kernel, rung), rung.chunk, arguments, todo.size)
        ok &= np.isfinite(low) & np.isfinite(high)
        low, high = np.where(ok, low, -np.inf), np.where(np.isnan(high), np.inf, high)
        better = ok & (high - low < upper[todo] - lower[todo])
        estimate[todo] = np.where(better, mid, estimate[todo])
        lower[todo], upper[todo] = np.maximum(low, lower[todo]), np.minimum(high, upper[todo])
        # the certificate says how fine a rung it wants; climb to that one, at least one up
        wanted = rung_for(needs)
        done = (ok & good(low, high)) | (upper[todo] <= floor[todo])
        # against a floor a coarse bracket often suffices: try every rung on the way
        wanted = np.where(np.isfinite(floor[todo]), step + 1, np.maximum(wanted, step + 1))
        due[todo] = np.where(done, len(LADDER), wanted)
    return Answer(lower, np.clip(estimate, lower, upper), upper)


def epsilon(
    parts: Components,
    delta: np.ndarray,
    slack: np.ndarray,
    floor: np.ndarray,
    width: float,
    tolerance: float = TOLERANCE,
) -> Answer:
    """Bracket of `inf {eps : delta_fin(eps) <= delta}`, before clipping at 0, for delta known up to a slack.

    Rungs are climbed until the relative width is reached; where the upper end is at most `floor` (what the other
    direction already needs) it is not refined.
    """
    log_tol = np.full(delta.shape, np.log(tolerance))
    values = (np.log(delta) + np.log1p(-slack), np.log(delta) + np.log1p(slack), log_tol)
    return _climb(contour.epsilon, parts, values, floor, lambda low, high: high - low <= width * np.abs(high))


def delta(
    parts: Components, epsilon: np.ndarray, floor: np.ndarray, width: float, tolerance: float = TOLERANCE
) -> Answer:
    """Bracket of the finite part of delta(eps), not refined where it is at most `floor`."""
    values = (epsilon, np.full(epsilon.shape, np.log(tolerance)))
    with np.errstate(divide="ignore"):
        logs = _climb(contour.delta, parts, values, np.log(floor), lambda low, high: high - low <= width)
    return Answer(*(np.exp(np.minimum(x, 0.0)) for x in logs))
