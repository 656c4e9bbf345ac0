"""Which engine answers: both directions of the relation, row by row, closed form, contour and lattice."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.engines import contour, programs
from jaxacct.engines.contour import Answer
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.validation import InputError

NOTHING = 1e-300
"""About the end of float64's range: a delta down there has no relative accuracy."""


class Side(NamedTuple):
    """One direction's answer with the engine of each element."""

    answer: Answer
    engine: np.ndarray


def both_directions(
    mechanism: Mechanism,
    values: float | np.ndarray,
    shape: tuple[int, ...],
    relation: str,
    solve: Callable[[Components, np.ndarray, np.ndarray], Side],
) -> Side:
    """Solve every direction on the common batch and keep the larger answer, element by element."""
    mine = batch_shape(mechanism)
    flat = np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    best: Side | None = None
    for direction in directions(mechanism, relation):
        parts = components(mechanism, relation, direction)
        if not np.array_equal(rows, np.arange(parts.mu2.size)):
            parts = parts.take(rows)
        floor = np.full(flat.shape, -np.inf) if best is None else best.answer.lower
        with programs.large(flat.size):
            side = solve(parts, flat, floor)
        best = side if best is None else _larger(best, side)
    assert best is not None
    return best


def _larger(first: Side, second: Side) -> Side:
    ends = Answer(*(np.maximum(a, b) for a, b in zip(first.answer, second.answer, strict=True)))
    return Side(ends, np.where(second.answer.upper > first.answer.upper, second.engine, first.engine))


def by_engines(
    parts: Components,
    rows: np.ndarray,
    engine: str,
    rtol: float,
    floor: np.ndarray,
    by_formula: Callable[[Components, np.ndarray], Answer],
    by_contour: Callable[[Components, np.ndarray], Answer],
    by_lattice: Callable[[Components, np.ndarray], list[Any]],
) -> Side:
    """Hand each row to the engine that suits it; rows left out keep the empty answer [-inf, inf]."""
    size = parts.mu2.size
    low, mid, high = np.full(size, -np.inf), np.zeros(size), np.full(size, np.inf)
    used = np.full(size, "contour" if engine == "contour" else "closed_form", dtype="<U16")
    if engine == "auto":
        known = _only_gaussian(parts) | _one_step(parts)
        formula = rows[known[rows]]
        if formula.size:
            with np.errstate(invalid="ignore", over="ignore"):  # a mu beyond 1e154: caught as an open bracket
                low[formula], mid[formula], high[formula] = by_formula(parts.take(formula), formula)
            low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
        rows = rows[~known[rows]]
    if engine != "lattice" and rows.size:
        if engine == "contour" and not contour.supports(parts.take(rows)).all():
            raise InputError(
                "engine = 'contour' needs a Gaussian part and no Poisson sampled Laplace; "
                "use engine='auto' or 'lattice'"
            )
        low[rows], mid[rows], high[rows] = by_contour(parts.take(rows), rows)
        used[rows] = "contour"
    if engine != "contour":
        wide = rows if engine == "lattice" else rows[~(narrow(low, high, rtol) | (high <= floor))[rows]]
        with jax.enable_x64(), np.errstate(over="ignore"):
            answers = by_lattice(parts, wide)
        for row, answer in zip(wide, answers, strict=True):
            if answer.upper - answer.lower < high[row] - low[row]:
                mid[row], used[row] = answer.estimate, "lattice"
            low[row], high[row] = max(low[row], answer.lower), min(high[row], answer.upper)
    mid = np.clip(np.where(np.isnan(mid), low, mid), low, high)
    return Side(Answer(low, mid, high), used)


def narrow(low: np.ndarray, high: np.ndarray, rtol: float) -> np.ndarray:
    """Whether a bracket is as narrow as asked for; one that is open above never is, one below NOTHING always."""
    with np.errstate(invalid="ignore"):
        return (high <= NOTHING) | (low == high) | (np.isfinite(high) & (high - np.maximum(low, 0.0) <= rtol * high))


def _only_gaussian(parts: Components) -> np.ndarray:
    others = (parts.gauss_n, parts.laplace_n, parts.finite_n)
    return (parts.mu2 > 0) & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def _one_step(parts: Components) -> np.ndarray:
    """One Poisson sampled Gaussian, once, and nothing else."""
    others = (parts.laplace_n, parts.finite_n)
    once = (np.sum(parts.gauss_n, axis=1) == 1) & (parts.mu2 == 0)
    return once & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def _single(parts: Components) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sigma, q, whether removing) of the one sampled Gaussian of each row."""
    column = np.argmax(parts.gauss_n, axis=1)[:, None]
    sigma, q = (np.take_along_axis(x, column, 1)[:, 0] for x in (parts.gauss_sigma, parts.gauss_q))
    return sigma, q, parts.sign > 0


def _by_formula(parts: Components, plain: Callable[..., Answer], once: Callable[..., Answer], *values: Any) -> Answer:
    """Composed Gaussians by one formula, single sampled steps by the other."""
    ends = np.zeros((3, parts.mu2.size))
    for rows, formula in ((np.flatnonzero(~_one_step(parts)), plain), (np.flatnonzero(_one_step(parts)), once)):
        if rows.size:
            part = parts.take(rows)
            law = (part.mu2,) if formula is plain else _single(part)
            ends[:, rows] = formula(*law, *(v[rows] for v in values))
    return Answer(*ends)


def epsilon_by_formula(parts: Components, delta: np.ndarray, slack: np.ndarray) -> Answer:
    """Brackets of epsilon where there is a closed form."""
    from jaxacct.engines import closed_form  # SciPy, which takes a while to import: only where a row needs it

    return _by_formula(parts, closed_form.epsilon, closed_form.epsilon_of_one_step, delta, slack)


def delta_by_formula(parts: Components, eps: np.ndarray) -> Answer:
    """Brackets of delta where there is a closed form."""
    from jaxacct.engines import closed_form

    return _by_formula(parts, closed_form.delta, closed_form.delta_of_one_step, eps)


def lattice() -> ModuleType:
    """The lattice engine."""
    from jaxacct.engines import lattice  # SciPy again

    return lattice


def absent(parts: Components) -> np.ndarray:
    """Nothing is released: every part is sampled at rate 0."""
    others = (parts.gauss_n, parts.laplace_n, parts.finite_n)
    return (parts.mu2 == 0) & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def largest_loss(parts: Components) -> np.ndarray:
    """The supremum of the loss of the Laplace and finite parts: epsilon at delta = 0 (0 if negative)."""
    rate = parts.laplace_q
    up = log_mixture(1.0 / parts.laplace_scale, rate)
    down = -log_mixture(-1.0 / parts.laplace_scale, rate)
    laplace = np.sum(parts.laplace_n * np.where(parts.sign[:, None] > 0, up, down), axis=1)
    finite = np.where(parts.finite_mass > 0, parts.finite_loss, -np.inf)
    top = np.max(finite, axis=2, initial=-np.inf)
    finite_total = np.sum(parts.finite_n * np.where(parts.finite_n > 0, top, 0.0), axis=1)
    return np.maximum(laplace + finite_total, 0.0)
