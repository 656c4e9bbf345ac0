"""Which engine answers: both directions of the relation, row by row, closed form, two steps, contour and lattice.

No engine has the last word.  Every bracket is held against theorems that share nothing with the engines
(`engines.threshold_tests` from below, `engines.simple_bounds` from above), and those of two engines against each other.
What contradicts is not used, neither of the two where engines contradict; then the theorems answer.  Where a bracket
is wider than asked for, the theorems narrow it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.engines import contour, programs, quick_bounds
from jaxacct.engines.contour import Answer
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.loss_components import LEAST_SQUARE
from jaxacct.validation import InputError

FAILURES = (ArithmeticError, ValueError, IndexError, RuntimeError, MemoryError)
"""What an engine may raise on a configuration that it cannot answer."""
ENOUGH = 0.01
"""Share of rtol at which a bracket by theorems alone is as good as an engine's."""
NOTHING = 1e-300
"""About the end of float64's range: a delta down there has no relative accuracy."""


class Side(NamedTuple):
    """One direction's answer with the engine of each element, and where answers contradicted each other."""

    answer: Answer
    engine: np.ndarray
    contradicted: np.ndarray


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
    engine = np.where(second.answer.upper > first.answer.upper, second.engine, first.engine)
    return Side(ends, engine, first.contradicted | second.contradicted)


class Methods(NamedTuple):
    """How a question is answered, each for the components of some rows and the places of these rows in the batch."""

    by_formula: Callable[[Components, np.ndarray], Answer]
    by_two_steps: Callable[[Components, np.ndarray], Answer]
    by_contour: Callable[[Components, np.ndarray], Answer]
    by_lattice: Callable[[Components, np.ndarray], list[Any]]
    limits: Callable[[Components, np.ndarray, bool], tuple[np.ndarray, np.ndarray]]
    """(lower, upper) by theorems; quick ones, or all of them."""


def by_engines(
    parts: Components, rows: np.ndarray, engine: str, rtol: float, floor: np.ndarray, methods: Methods
) -> Side:
    """Hand each row to the engine that suits it; rows left out keep the empty answer [-inf, inf]."""
    size = parts.mu2.size
    asked = rows
    answer = Answer(np.full(size, -np.inf), np.full(size, np.nan), np.full(size, np.inf))
    used = np.full(size, "contour" if engine == "contour" else "closed_form", dtype="<U16")
    contradicted = np.zeros(size, bool)
    rows = rows[~_beyond_kernels(parts)[rows]]
    if engine == "auto":
        known = _only_gaussian(parts) | _one_step(parts)
        formula = rows[known[rows]]
        if formula.size:
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                found = methods.by_formula(parts.take(formula), formula)
            contradicted[formula] |= _narrowed(answer, formula, found)
        rows = rows[~known[rows]]
        pairs = rows[_two_steps(parts)[rows]]
        if pairs.size:
            found = _guarded(methods.by_two_steps, "two-step", parts.take(pairs), pairs)
            contradicted[pairs] |= _narrowed(answer, pairs, found)
            used[pairs] = "two_steps"
    left = rows[~_two_steps(parts)[rows] | _open(answer, rtol, floor)[rows]] if engine == "auto" else rows
    if engine != "lattice" and left.size:
        if engine == "contour" and not contour.supports(parts.take(left)).all():
            raise InputError(
                "engine = 'contour' needs a Gaussian part and no Poisson sampled Laplace; "
                "use engine='auto' or 'lattice'"
            )
        found = _guarded(methods.by_contour, "contour", parts.take(left), left)
        better = found.upper - found.lower < answer.upper[left] - answer.lower[left]
        contradicted[left] |= _narrowed(answer, left, found)
        used[left[better | (used[left] != "two_steps")]] = "contour"
    if asked.size:
        contradicted[asked] |= _against(answer, asked, *methods.limits(parts.take(asked), asked, False))
    wanting = _open(answer, rtol, floor) | contradicted
    # "nothing leaks" is the claim that no width can show to be wrong
    doubtful = asked[(wanting | (answer.upper <= 0.0) | _hardly_sampled(parts))[asked]]
    limits = None
    if doubtful.size:
        limits = methods.limits(parts.take(doubtful), doubtful, True)
        contradicted[doubtful] |= _by_theorems(answer, used, doubtful, *limits)
    if engine != "contour":
        # a bracket by theorems alone is left at that only where it is far narrower than asked for
        wide = rows if engine == "lattice" else rows[(wanting & _open(answer, ENOUGH * rtol, floor))[rows]]
        if wide.size:
            with jax.enable_x64(), np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
                found = _by_lattice(methods, parts, wide)
            better = found.upper - found.lower < answer.upper[wide] - answer.lower[wide]
            used[wide[better]] = "lattice"
            answer.estimate[wide[better]] = np.nan
            contradicted[wide] |= _narrowed(answer, wide, found)
            if limits is not None:  # a contradiction leaves nothing; theorems stand
                again = _by_theorems(answer, used, doubtful, *limits)
                contradicted[doubtful] |= again
    low, mid, high = answer
    mid = np.clip(np.where(np.isnan(mid), low, mid), low, high)
    return Side(Answer(low, mid, high), used, contradicted)


def _narrowed(answer: Answer, rows: np.ndarray, found: Answer) -> np.ndarray:
    """Intersect the brackets of some rows with what an engine found; where that contradicts, neither is kept.

    An end that is NaN says nothing, nor does a lower end of inf: what is infinite is known before.
    Returns the rows that contradict, as a mask.
    """
    low = np.where(np.isnan(found.lower) | (found.lower == np.inf), -np.inf, found.lower)
    high = np.where(np.isnan(found.upper), np.inf, found.upper)
    low, high = np.maximum(low, answer.lower[rows]), np.minimum(high, answer.upper[rows])
    agree = low <= high
    answer.lower[rows], answer.upper[rows] = np.where(agree, low, -np.inf), np.where(agree, high, np.inf)
    known = answer.estimate[rows]
    answer.estimate[rows] = np.where(agree, np.where(np.isnan(known), found.estimate, known), np.nan)
    return ~agree


def _open(answer: Answer, rtol: float, floor: np.ndarray) -> np.ndarray:
    """Where a bracket is wider than asked for, and not below what the other direction needs."""
    return ~(narrow(answer.lower, answer.upper, rtol) | (answer.upper <= floor))


def _by_theorems(answer: Answer, used: np.ndarray, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Hold the brackets of rows against theorems and narrow them by these; returns which contradict, as a mask."""
    contradicting = _against(answer, rows, low, high)
    better = (high < answer.upper[rows]) | contradicting
    used[rows[better]] = "theorem"
    answer.lower[rows], answer.upper[rows] = np.fmax(answer.lower[rows], low), np.fmin(answer.upper[rows], high)
    return contradicting


def _against(answer: Answer, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Drop the brackets of rows that contradict theorems: the truth lies in [low, high]; returns which, as a mask."""
    agree = (answer.lower[rows] <= high) & (answer.upper[rows] >= low)
    answer.lower[rows] = np.where(agree, answer.lower[rows], -np.inf)
    answer.upper[rows] = np.where(agree, answer.upper[rows], np.inf)
    answer.estimate[rows] = np.where(agree, answer.estimate[rows], np.nan)
    return ~agree


def _guarded(
    method: Callable[[Components, np.ndarray], Answer], name: str, parts: Components, rows: np.ndarray
) -> Answer:
    """An engine's answers; where it fails there are none, and another engine or a theorem answers."""
    try:
        return method(parts, rows)
    except InputError:
        raise
    except (ArithmeticError, ValueError, RuntimeError) as error:
        warnings.warn(f"the {name} engine failed ({error}); the others answer", stacklevel=2)
        nothing = np.full(rows.size, np.inf)
        return Answer(-nothing, np.nan * nothing, nothing)


def _by_lattice(methods: Methods, parts: Components, rows: np.ndarray) -> Answer:
    """The lattice engine's answers; a row on which it fails has none, and does not end the others."""
    try:
        answers = methods.by_lattice(parts, rows)
    except FAILURES:
        answers = [_one_by_lattice(methods, parts, row) for row in rows]
    ends = np.array([(x.lower, x.estimate, x.upper) for x in answers], np.float64).reshape(-1, 3)
    return Answer(*ends.T)


def _one_by_lattice(methods: Methods, parts: Components, row: int) -> Answer:
    try:
        (answer,) = methods.by_lattice(parts, np.array([row]))
    except FAILURES as error:
        warnings.warn(f"the lattice engine failed on configuration {row} ({error}); a theorem answers", stacklevel=2)
        return Answer(np.array(-np.inf), np.array(np.nan), np.array(np.inf))
    return answer


def narrow(low: np.ndarray, high: np.ndarray, rtol: float) -> np.ndarray:
    """Whether a bracket is as narrow as asked for; one that is open above never is, one below NOTHING always."""
    with np.errstate(invalid="ignore"):
        return (high <= NOTHING) | (low == high) | (np.isfinite(high) & (high - np.maximum(low, 0.0) <= rtol * high))


def _beyond_kernels(parts: Components) -> np.ndarray:
    """Gaussians whose mu^2 under- or overflows beside other parts: the kernels would take them for nothing."""
    square = (parts.mu > 0) & ~((parts.mu2 > LEAST_SQUARE) & (parts.mu2 < 1.0 / LEAST_SQUARE))
    return square & ~_only_gaussian(parts)


def _hardly_sampled(parts: Components) -> np.ndarray:
    """Where sampling changes so little that the answer without it may be below the upper end of a narrow bracket."""
    return np.any((parts.gauss_n > 0) & (parts.gauss_q > 0.9), axis=1)


def _only_gaussian(parts: Components) -> np.ndarray:
    others = (parts.gauss_n, parts.laplace_n, parts.finite_n)
    return (parts.mu > 0) & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def _one_step(parts: Components) -> np.ndarray:
    """One Poisson sampled Gaussian, once, and nothing else."""
    others = (parts.laplace_n, parts.finite_n)
    once = (np.sum(parts.gauss_n, axis=1) == 1) & (parts.mu == 0)
    return once & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def _two_steps(parts: Components) -> np.ndarray:
    """Two Poisson sampled Gaussians, alike or not, and nothing else."""
    others = (parts.laplace_n, parts.finite_n)
    twice = (np.sum(parts.gauss_n, axis=1) == 2) & (parts.mu == 0)
    return twice & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


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
            law = (part.mu,) if formula is plain else _single(part)
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


def epsilon_by_two_steps(parts: Components, delta: np.ndarray, slack: np.ndarray, floor: np.ndarray) -> Answer:
    """Brackets of epsilon of two steps, not refined where the upper end is at most `floor`."""
    from jaxacct.engines import two_steps

    return two_steps.epsilon(parts, delta, slack, floor)


def delta_by_two_steps(parts: Components, eps: np.ndarray) -> Answer:
    """Brackets of delta of two steps."""
    from jaxacct.engines import two_steps

    return two_steps.delta(parts, eps)


def lattice() -> ModuleType:
    """The lattice engine."""
    from jaxacct.engines import lattice  # SciPy again

    return lattice


def absent(parts: Components) -> np.ndarray:
    """Nothing is released: every part is sampled at rate 0."""
    others = (parts.gauss_n, parts.laplace_n, parts.finite_n)
    return (parts.mu == 0) & ~np.any([np.any(n > 0, axis=1) for n in others], axis=0)


def epsilon_limits(
    parts: Components, delta: np.ndarray, slack: np.ndarray, thorough: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of epsilon by theorems."""
    if not thorough:
        return quick_bounds.epsilon_limits(parts, delta, slack)
    from jaxacct.engines import simple_bounds, threshold_tests

    most = delta * (1.0 + slack)
    with np.errstate(all="ignore"):
        low = threshold_tests.best_epsilon(threshold_tests.tests_of(parts), most)
        low = np.fmax(low, threshold_tests.rare_step_epsilon(parts, most))
        return low, simple_bounds.least_epsilon(parts, delta, slack)


def delta_limits(parts: Components, eps: np.ndarray, thorough: bool) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of the finite part's delta by theorems."""
    if not thorough:
        return quick_bounds.delta_limits(parts, eps)
    from jaxacct.engines import simple_bounds, threshold_tests

    with np.errstate(all="ignore"):
        low = threshold_tests.best_delta(threshold_tests.tests_of(parts), eps)
        low = np.fmax(low, threshold_tests.rare_step_delta(parts, eps))
        return low, simple_bounds.least_delta(parts, eps)
