"""Which engine answers: the list of engines is walked, cheap ones first, for one direction of a batch.

No engine has the last word.  Every bracket is held against theorems that share nothing with the engines
(`engines.threshold_tests` from below, `engines.simple_bounds` from above), and the brackets of two engines are held
against each other.  What contradicts a theorem is not used; where two engines contradict each other, neither is used.
Then the theorems answer.  Theorems also narrow a bracket that is wider than asked for.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from jaxacct.engines import entries, quick_bounds
from jaxacct.engines.protocol import ENGINES, Answer, Engine, MechanismEngine, Question, register
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.loss_components import LEAST_SQUARE
from jaxacct.validation import InputError

__all__ = ["Side", "ask_engines", "engine_of_mechanism", "is_narrow", "limits_by_theorems"]

FAILURES = (ArithmeticError, ValueError, IndexError, RuntimeError, MemoryError)
"""What an engine may raise on a configuration that it cannot answer."""
COSTLY = 0.05
"""Seconds of CPU for one configuration above which an engine is asked only after all theorems."""
NARROW_BY_THEOREMS = 0.01
"""Share of rtol at which a bracket by theorems alone is left at that, without a costly engine."""
NO_RELATIVE_ACCURACY = 1e-300
"""Near the end of float64's range a delta has no relative accuracy, so any bracket below it is narrow."""
NEARLY_ALWAYS_SAMPLED = 0.9
"""Sampling rate above which sampling may change less than the width of a bracket."""


for _engine in (entries.ClosedForm(), entries.TwoSteps(), entries.Contour(), entries.Lattice()):
    register(_engine)


class Side(NamedTuple):
    """One direction's answer, the engine of each configuration, and where answers contradicted each other."""

    answer: Answer
    engine: np.ndarray
    contradicted: np.ndarray


def engine_of_mechanism(mechanism: Mechanism, engine: str) -> MechanismEngine | None:
    """The engine that answers for the mechanism as a whole, None where its parts are asked.

    InputError where another engine is wanted.
    """
    for known in ENGINES:
        if isinstance(known, MechanismEngine) and known.supports(mechanism):
            if engine != "auto":
                raise InputError(
                    f"engine = {engine!r} cannot answer for a {type(mechanism).__name__}, which has a method of its "
                    "own; use 'auto'"
                )
            return known
    return None


def ask_engines(quantity: str, question: Question, asked: np.ndarray, engine: str) -> Side:
    """Brackets of "epsilon" or "delta" for the rows of the mask `asked`; others keep the empty answer [-inf, inf]."""
    size, rtol, floor = question.target.size, question.effort.rtol, question.floor
    side = Side(
        Answer(np.full(size, -np.inf), np.full(size, np.nan), np.full(size, np.inf)),
        np.full(size, "", dtype="<U16"),
        np.zeros(size, bool),
    )
    answer, used, contradicted = side
    left = asked & ~_beyond_kernels(question)
    known = [one for one in ENGINES if isinstance(one, Engine) and engine in ("auto", one.name)]
    for one in known:
        can = one.supports(question)
        if engine != "auto" and not can[left].all():
            raise InputError(one.refusal)
        rows = np.flatnonzero(left & can & _open(answer, rtol, floor))
        if rows.size and one.cost <= COSTLY:
            _ask(one, quantity, question, rows, side)
        if one.settles:
            left &= ~can
    rows = np.flatnonzero(asked)
    if rows.size:
        contradicted[rows] |= _against(answer, rows, *limits_by_theorems(quantity, question.take(rows), False))
    wanting = _open(answer, rtol, floor) | contradicted
    # "nothing leaks" is the claim that no width can show to be wrong
    doubtful = np.flatnonzero(asked & (wanting | (answer.upper <= 0.0) | _hardly_sampled(question)))
    limits = limits_by_theorems(quantity, question.take(doubtful), True) if doubtful.size else None
    if limits is not None:
        _narrow_by_theorems(side, doubtful, *limits)
    wide = left & (engine != "auto" or (wanting & _open(answer, NARROW_BY_THEOREMS * rtol, floor)))
    for one in known:
        rows = np.flatnonzero(wide & one.supports(question))
        if one.cost > COSTLY and rows.size:
            _ask(one, quantity, question, rows, side)
            if limits is not None:  # a contradiction leaves nothing; theorems stand
                _narrow_by_theorems(side, doubtful, *limits)
    used[used == ""] = "closed_form"  # known without asking
    low, mid, high = answer
    mid = np.clip(np.where(np.isnan(mid), low, mid), low, high)
    return Side(Answer(low, mid, high), used, contradicted)


def is_narrow(low: np.ndarray, high: np.ndarray, rtol: float) -> np.ndarray:
    """Whether a bracket is as narrow as asked for; one that is open above never is."""
    with np.errstate(invalid="ignore"):
        width = high - np.maximum(low, 0.0)
        return (high <= NO_RELATIVE_ACCURACY) | (low == high) | (np.isfinite(high) & (width <= rtol * high))


def limits_by_theorems(quantity: str, question: Question, thorough: bool) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) by theorems: the quick ones, or all of them."""
    parts, target, slack = question.parts, question.target, question.slack
    if not thorough and quantity == "epsilon":
        return quick_bounds.epsilon_limits(parts, target, slack)
    if not thorough:
        return quick_bounds.delta_limits(parts, target)
    from jaxacct.engines import simple_bounds, threshold_tests  # SciPy: only where a row needs it

    with np.errstate(all="ignore"):
        tests = threshold_tests.tests_of(parts)
        if quantity == "delta":
            low, rare = threshold_tests.best_delta(tests, target), threshold_tests.rare_step_delta(parts, target)
            return np.fmax(low, rare), simple_bounds.least_delta(parts, target)
        most = target * (1.0 + slack)
        low, rare = threshold_tests.best_epsilon(tests, most), threshold_tests.rare_step_epsilon(parts, most)
        return np.fmax(low, rare), simple_bounds.least_epsilon(parts, target, slack)


def _ask(engine: Engine, quantity: str, question: Question, rows: np.ndarray, side: Side) -> None:
    """Intersect the brackets of some rows with what an engine answers, and note who answered and who contradicts."""
    found = _answers(engine, quantity, question, rows)
    answer = side.answer
    better = found.upper - found.lower < answer.upper[rows] - answer.lower[rows]
    side.engine[rows[better | (side.engine[rows] == "")]] = engine.name
    answer.estimate[rows[better]] = np.nan
    side.contradicted[rows] |= _narrowed(answer, rows, found)


def _answers(engine: Engine, quantity: str, question: Question, rows: np.ndarray) -> Answer:
    """An engine's answers; rows on which it fails have none and do not end the others."""
    ask = engine.epsilon if quantity == "epsilon" else engine.delta
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            return ask(question.take(rows))
    except InputError:
        raise
    except FAILURES as error:
        if rows.size == 1:
            warnings.warn(
                f"the {engine.name} engine failed on configuration {rows[0]} ({error}); another or a theorem answers",
                stacklevel=2,
            )
            return Answer(np.array([-np.inf]), np.array([np.nan]), np.array([np.inf]))
        each = [_answers(engine, quantity, question, rows[[place]]) for place in range(rows.size)]
        return Answer(*(np.concatenate(ends) for ends in zip(*each, strict=True)))


def _narrowed(answer: Answer, rows: np.ndarray, found: Answer) -> np.ndarray:
    """Intersect the brackets of some rows with those found; where they contradict each other, neither is kept.

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
    return ~(is_narrow(answer.lower, answer.upper, rtol) | (answer.upper <= floor))


def _narrow_by_theorems(side: Side, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Hold the brackets of rows against theorems and narrow them by these."""
    answer = side.answer
    contradicting = _against(answer, rows, low, high)
    side.engine[rows[(high < answer.upper[rows]) | contradicting]] = "theorem"
    side.contradicted[rows] |= contradicting
    answer.lower[rows], answer.upper[rows] = np.fmax(answer.lower[rows], low), np.fmin(answer.upper[rows], high)


def _against(answer: Answer, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Drop the brackets of rows that contradict theorems: the truth lies in [low, high]; returns which, as a mask."""
    agree = (answer.lower[rows] <= high) & (answer.upper[rows] >= low)
    answer.lower[rows] = np.where(agree, answer.lower[rows], -np.inf)
    answer.upper[rows] = np.where(agree, answer.upper[rows], np.inf)
    answer.estimate[rows] = np.where(agree, answer.estimate[rows], np.nan)
    return ~agree


def _beyond_kernels(question: Question) -> np.ndarray:
    """Gaussians whose mu^2 under- or overflows beside other parts: the kernels would take them for nothing."""
    parts = question.parts
    square = (parts.mu > 0) & ~((parts.mu2 > LEAST_SQUARE) & (parts.mu2 < 1.0 / LEAST_SQUARE))
    return square & ~question.kinds.gaussian


def _hardly_sampled(question: Question) -> np.ndarray:
    """Where sampling changes so little that the answer without it may be below the upper end of a narrow bracket."""
    return np.any((question.parts.gauss_n > 0) & (question.parts.gauss_q > NEARLY_ALWAYS_SAMPLED), axis=1)
