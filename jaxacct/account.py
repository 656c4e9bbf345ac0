"""epsilon and delta of a mechanism, as certified brackets: mechanism + engine -> Bounds.

The two directions of the neighbouring relation are composed separately and the larger is taken at the end.
`engine="auto"` uses the closed form where the mechanism is Gaussian throughout, the contour engine where its
certificate is narrow, and the lattice engine for the rest; `Bounds.engine` says which one answered.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.engines import contour, programs
from jaxacct.engines.contour import Answer
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, directions
from jaxacct.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    InputError,
    broadcast_shape,
    check,
    choice,
    refuse_tracers,
)

ENGINES = ("auto", "contour", "lattice")
GIBIBYTE = 2**30
NARROW = 1e-6
"""Relative width at which the contour engine stops refining, whatever was asked for."""
UNIT = 2.0**-53
_KERNEL = "jaxacct.kernels.contour"


class Effort(NamedTuple):
    """How narrow brackets should be: in the end, and engine by engine."""

    rtol: float
    contour_width: float
    contour_tolerance: float
    lattice_rtol: float


class _Side(NamedTuple):
    """One direction's answer with the engine of each element."""

    answer: Answer
    engine: np.ndarray


def epsilon(
    mechanism: Mechanism,
    delta: Any,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
) -> Bounds:
    """The smallest epsilon >= 0 for which the mechanism is (epsilon, delta)-DP, as a certified bracket.

    `epsilon = inf {eps >= 0 : delta(eps) <= delta}` with `delta(eps) = sup over the relation's directions of
    H_{e^eps}(P || Q)`, the hockey-stick divergence of the composed dominating pair.  `upper` is what a privacy
    claim may use.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `delta` broadcast; the answer has their common shape.
    delta : array_like in [0, 1)
        0 is allowed where the privacy loss is bounded.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one"}
    engine : {"auto", "contour", "lattice"}
    rtol : float
        Wanted relative width (upper - lower)/upper; where it is not reached the bracket still holds and the
        status is "width".
    memory_bytes : int
        Limit on the lattice engine's memory.

    Returns
    -------
    Bounds
        kind "certified": discretisation, truncation, aliasing and rounding are inside the bracket.

    Raises
    ------
    InputError
        Invalid values, shapes that do not broadcast, or a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10; the engines' own error bounds are in jaxacct/kernels/README.md.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.Gaussian(2.0), 1e-5)
    >>> round(float(b.upper), 6), b.kind
    (1.993091, 'certified')
    """
    refuse_tracers("ja.epsilon", _KERNEL, mechanism=mechanism, delta=delta)
    delta = check("delta", delta, DELTA_OR_ZERO)
    choice("engine", engine, ENGINES)
    effort = Effort(rtol, 0.5 * min(rtol, NARROW), contour.TOLERANCE, min(0.1 * rtol, NARROW))
    return bracket_epsilon(mechanism, delta, relation, engine, effort, memory_bytes)


def bracket_epsilon(
    mechanism: Mechanism,
    delta: float | np.ndarray,
    relation: str,
    engine: str,
    effort: Effort,
    memory_bytes: int,
    hint: contour.Hint | None = None,
) -> Bounds:
    """`epsilon` for checked arguments, with the effort of each engine spelt out."""
    rtol = effort.rtol
    shape = _common_shape(mechanism, delta, "delta")

    def solve(parts: Components, target: np.ndarray, floor: np.ndarray) -> _Side:
        infinite = parts.delta_infinity
        bounded = ~((parts.mu2 > 0) | np.any(parts.gauss_n > 0, axis=1))
        unbounded = (target == 0) & ~bounded
        if unbounded.any():
            raise InputError(
                f"delta{_index(unbounded, shape)} = 0 must be > 0 for a mechanism with an unbounded loss; "
                "use a small positive delta such as 1e-5"
            )
        finite = target - infinite
        slack = 4.0 * UNIT * (target + infinite) / np.maximum(finite, 1e-300)
        at_infinity = finite < 0
        exact_zero = target == 0
        live = (finite > 0) & (slack < 1e-3)
        side = _engines(
            parts,
            np.flatnonzero(live),
            engine,
            rtol,
            floor,
            lambda p, rows: _epsilon_by_formula(p, finite[rows], slack[rows]),
            lambda p, rows: contour.epsilon(
                p,
                finite[rows],
                slack[rows],
                floor[rows],
                effort.contour_width,
                effort.contour_tolerance,
                hint and contour.Hint(*(known[rows] for known in hint)),
            ),
            lambda p, i, row: _lattice().epsilon(
                p,
                i,
                finite[row] * (1 - slack[row]),
                finite[row] * (1 + slack[row]),
                rtol=effort.lattice_rtol,
                memory_bytes=memory_bytes,
            ),
        )
        low, mid, high = (np.maximum(x, 0.0) for x in side.answer)
        largest = _largest_loss(parts)
        # what is left of delta is 0, or lost in the rounding of the mass at infinity
        edge = ~live & ~at_infinity
        low = np.where(edge, np.where(exact_zero, largest, 0.0), low)
        mid, high = (np.where(edge, np.where(bounded, largest, np.inf), x) for x in (mid, high))
        low, mid, high = (np.where(at_infinity, np.inf, x) for x in (low, mid, high))
        absent = _absent(parts)
        low, mid, high = (np.where(absent, 0.0, x) for x in (low, mid, high))
        return _Side(Answer(low, mid, high), np.where(live, side.engine, "closed_form"))

    side = _both_directions(mechanism, delta, shape, relation, solve)
    low, _, high = side.answer
    status = np.where(_narrow(low, high, rtol), "ok", "width").astype("<U16")
    status = np.where(high == 0, "zero", status)
    status = np.where(np.isinf(low), "mass_at_infinity", status)
    return _bounds(shape, side, status, mechanism.kind)


def delta(
    mechanism: Mechanism,
    epsilon: Any,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
) -> Bounds:
    """The privacy profile delta(eps) of the mechanism at one or many eps >= 0, as a certified bracket.

    `delta(eps) = max over directions of H_{e^eps}(P || Q)`, relative accuracy also in the far tail.
    Parameters, errors and sources are those of `jaxacct.epsilon`.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.RandomizedResponse(0.75), 0.5)
    >>> round(float(b.upper), 6)
    0.33782
    """
    refuse_tracers("ja.delta", _KERNEL, mechanism=mechanism, epsilon=epsilon)
    epsilon = check("epsilon", epsilon, NON_NEGATIVE)
    choice("engine", engine, ENGINES)

    def solve(parts: Components, eps: np.ndarray, floor: np.ndarray) -> _Side:
        infinite = parts.delta_infinity
        side = _engines(
            parts,
            np.flatnonzero(~_absent(parts) & (infinite < 1.0)),
            engine,
            rtol,
            floor,
            lambda p, rows: _delta_by_formula(p, eps[rows]),
            lambda p, rows: contour.delta(
                p,
                eps[rows],
                np.maximum(floor - infinite, 0.0)[rows] * (1 - 8 * UNIT),
                0.5 * min(rtol, NARROW),
            ),
            lambda p, i, row: _lattice().delta(
                p, i, float(eps[row]), rtol=min(0.1 * rtol, NARROW), memory_bytes=memory_bytes
            ),
        )
        low, mid, high = (np.where(_absent(parts), 0.0, x) for x in side.answer)
        low, mid, high = np.clip(low, 0, 1) + infinite, mid + infinite, np.minimum(high, 1.0) + infinite
        low, high = low - 4 * UNIT * low, np.minimum(high + 4 * UNIT * high, 1.0)
        return _Side(Answer(low, np.clip(mid, low, high), high), side.engine)

    shape = _common_shape(mechanism, epsilon, "epsilon")
    side = _both_directions(mechanism, epsilon, shape, relation, solve)
    low, _, high = side.answer
    status = np.where(_narrow(low, high, rtol), "ok", "width").astype("<U16")
    return _bounds(shape, side, np.where(high == 0, "zero", status), mechanism.kind)


def _common_shape(mechanism: Mechanism, values: float | np.ndarray, name: str) -> tuple[int, ...]:
    return broadcast_shape({"the mechanism": batch_shape(mechanism), name: np.shape(values)})


def _both_directions(
    mechanism: Mechanism,
    values: float | np.ndarray,
    shape: tuple[int, ...],
    relation: str,
    solve: Callable[[Components, np.ndarray, np.ndarray], _Side],
) -> _Side:
    """Solve every direction on the common batch and keep the larger answer, element by element."""
    mine = batch_shape(mechanism)
    flat = np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    best: _Side | None = None
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


def _larger(first: _Side, second: _Side) -> _Side:
    ends = Answer(*(np.maximum(a, b) for a, b in zip(first.answer, second.answer, strict=True)))
    return _Side(ends, np.where(second.answer.upper > first.answer.upper, second.engine, first.engine))


def _engines(
    parts: Components,
    rows: np.ndarray,
    engine: str,
    rtol: float,
    floor: np.ndarray,
    by_formula: Callable[[Components, np.ndarray], Answer],
    by_contour: Callable[[Components, np.ndarray], Answer],
    by_lattice: Callable[[Components, int, int], Any],
) -> _Side:
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
        wide = rows if engine == "lattice" else rows[~(_narrow(low, high, rtol) | (high <= floor))[rows]]
        for row in wide:
            with jax.enable_x64(), np.errstate(over="ignore"):
                answer = by_lattice(parts, int(row), int(row))
            if answer.upper - answer.lower < high[row] - low[row]:
                mid[row], used[row] = answer.estimate, "lattice"
            low[row], high[row] = max(low[row], answer.lower), min(high[row], answer.upper)
    mid = np.clip(np.where(np.isnan(mid), low, mid), low, high)
    return _Side(Answer(low, mid, high), used)


def _narrow(low: np.ndarray, high: np.ndarray, rtol: float) -> np.ndarray:
    """Whether a bracket is as narrow as asked for; one that is open above never is."""
    with np.errstate(invalid="ignore"):
        return (high <= 0) | (low == high) | (np.isfinite(high) & (high - np.maximum(low, 0.0) <= rtol * high))


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


def _epsilon_by_formula(parts: Components, delta: np.ndarray, slack: np.ndarray) -> Answer:
    from jaxacct.engines import closed_form  # SciPy, which takes a while to import: only where a row needs it

    return _by_formula(parts, closed_form.epsilon, closed_form.epsilon_of_one_step, delta, slack)


def _delta_by_formula(parts: Components, eps: np.ndarray) -> Answer:
    from jaxacct.engines import closed_form

    return _by_formula(parts, closed_form.delta, closed_form.delta_of_one_step, eps)


def _lattice() -> ModuleType:
    from jaxacct.engines import lattice  # SciPy again

    return lattice


def _absent(parts: Components) -> np.ndarray:
    """Nothing is released: every part is sampled at rate 0."""
    others = (parts.gauss_n, parts.laplace_n, parts.finite_n)
    return (parts.mu2 == 0) & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def _largest_loss(parts: Components) -> np.ndarray:
    """The supremum of the loss of the Laplace and finite parts: epsilon at delta = 0 (0 if negative)."""
    rate = parts.laplace_q
    up = np.log1p(rate * np.expm1(1.0 / parts.laplace_scale))
    down = -np.log1p(rate * np.expm1(-1.0 / parts.laplace_scale))
    laplace = np.sum(parts.laplace_n * np.where(parts.sign[:, None] > 0, up, down), axis=1)
    finite = np.where(parts.finite_mass > 0, parts.finite_loss, -np.inf)
    top = np.max(finite, axis=2, initial=-np.inf)
    finite_total = np.sum(parts.finite_n * np.where(parts.finite_n > 0, top, 0.0), axis=1)
    return np.maximum(laplace + finite_total, 0.0)


def _index(bad: np.ndarray, shape: tuple[int, ...]) -> str:
    where = [int(i) for i in np.argwhere(bad.reshape(shape))[0]] if shape else []
    return str(where) if where else ""


def _bounds(shape: tuple[int, ...], side: _Side, status: np.ndarray, kind: str) -> Bounds:
    """The bracket as an answer; below a bound nothing is claimed of the mechanism, so lower is 0 there."""
    low, mid, high = (x.reshape(shape) for x in side.answer)
    low = low if kind == "certified" else np.zeros_like(low)
    return Bounds(low, mid, high, kind, status.reshape(shape), side.engine.reshape(shape))
