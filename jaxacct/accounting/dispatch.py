"""Asks engines, cheap ones first, until a question is answered (engines/README.md). Holds those for compositions."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core.floats import FAILURES, ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.validation import InputError
from jaxacct.engines import hit_counts, quick_bounds
from jaxacct.engines.contour import Contour, reach
from jaxacct.engines.devices import double_precision
from jaxacct.engines.protocol import (
    ENGINES,
    Answer,
    Effort,
    Engine,
    Kinds,
    MechanismEngine,
    MechanismQuestion,
    Question,
    register,
)
from jaxacct.mechanisms import Composed, Mechanism, Repeated
from jaxacct.mechanisms.loss_components import LEAST_SQUARE, Components

COSTLY = 0.05
"""An engine that takes more CPU seconds than this for one configuration is asked only after all theorems."""
WIDE = {"epsilon": 0.1, "delta": 0.5}
"""Rényi accounting is tried only for brackets whose relative width exceeds this. It does not improve narrower ones."""
ATOMS_TOGETHER = 1_000_000
"""Largest number of atoms (losses with a mass), over all rows, that one call evaluates, to bound the memory."""


class Side(NamedTuple):
    """The answer in one direction, row by row."""

    answer: Answer
    engine: np.ndarray  # name of the engine that gave each row's answer
    contradicted: np.ndarray  # whether answers for the row contradicted each other or a theorem


def engine_of_mechanism(question: MechanismQuestion) -> MechanismEngine | None:
    """Return the first engine for the whole mechanism, or None; raise InputError if the user's engine cannot answer."""
    steps = [step for step in single_steps(question.mechanism) if not step.ordinary()]
    for known in ENGINES:
        if not isinstance(known, MechanismEngine) or question.relation not in known.relations:
            continue
        suits = not known.steps or any(isinstance(step, known.steps) for step in steps)
        if suits and isinstance(question.mechanism, known.classes) and known.supports(question):
            if question.engine == "auto" or known.if_engine_is_named == "answers":
                return known
            if known.if_engine_is_named == "refuses":
                raise InputError(
                    f"engine = {question.engine!r} cannot answer for a {type(question.mechanism).__name__}, which has "
                    "a method of its own; use 'auto'"
                )
    return None


def single_steps(mechanism: Mechanism) -> list[Mechanism]:
    """Return the single steps that a mechanism composes."""
    if isinstance(mechanism, Repeated | Composed):
        return [step for inner in mechanism.inside() for step in single_steps(inner)]
    return [mechanism]


def answered_by_parts(mechanism: Mechanism, relation: str) -> bool:
    """Return whether no engine answers for the mechanism as a whole under a relation."""
    return engine_of_mechanism(MechanismQuestion("delta", mechanism, relation=relation)) is None


def kinds_of(parts: Components) -> Kinds:
    """Return, for each composition, the kinds of its parts and the engines that can answer it."""
    steps, others = np.sum(parts.gauss_n, axis=1), np.sum(parts.laplace_n, axis=1) + np.sum(parts.finite_n, axis=1)
    plain, alone = parts.mu > 0, (steps == 0) & (others == 0)
    ordinary = (parts.mu2 > LEAST_SQUARE) & (parts.mu2 < 1.0 / LEAST_SQUARE)
    finite = ~plain & (steps + np.sum(parts.laplace_n, axis=1) == 0) & (np.sum(parts.finite_n, axis=1) == 1.0)
    empty, gaussian, sampled = ~plain & alone, plain & alone, np.where(plain | (others > 0), 0.0, steps)
    hits = hit_counts.reach(parts)
    return Kinds(
        empty,
        gaussian,
        beyond_kernels=plain & ~alone & ~ordinary,
        hits_settle=hits.settles,
        nearly_always_sampled=np.any((parts.gauss_n > 0) & (parts.gauss_q > 0.9), axis=1),
        answered_by={
            "closed_form": gaussian | (sampled == 1) | finite,
            "two_steps": sampled == 2,
            "hit_counts": hits.answers,
            "contour": reach(parts).answers & ~empty,
            "lattice": np.ones(empty.shape, bool),
        },
    )


def ask_engines(quantity: str, question: Question, asked: np.ndarray, engine: str) -> Side:
    """Return brackets of "epsilon" or "delta" for the rows of the mask `asked`; other rows get [-inf, inf]."""
    size, rtol, floor, parts = question.target.size, question.effort.rtol, question.floor, question.parts
    side = Side(
        Answer(np.full(size, -np.inf), np.full(size, np.nan), np.full(size, np.inf)),
        np.full(size, "", dtype="<U32"),
        np.zeros(size, bool),
    )
    answer, used, contradicted = side
    left = asked & ~question.kinds.beyond_kernels  # rows that engines may still be asked about
    if quantity == "epsilon" and engine == "auto":
        # the slack may be inf where the target is 0
        safe = question.target * (1.0 - np.minimum(question.slack, 1.0)) * (1.0 - 4.0 * ROUNDOFF)
        zero = left & (quick_bounds.total_variation(parts) <= safe)
        used[zero] = "theorem"
        for end in answer:
            end[zero] = 0.0
        left, asked = left & ~zero, asked & (~zero | parts.guaranteed())
    mine = [one for one in ENGINES if isinstance(one, Engine) and engine in ("auto", one.name)]
    known = [(one, one.supports(question)) for one in mine]
    # an epsilon that is still open is asked for again with the effort of a search: larger errors are easier to certify
    in_search = question.effort._replace(in_search=quantity == "epsilon" or question.effort.in_search)
    for effort in dict.fromkeys((question.effort, in_search)):
        for one, can in known:
            if one.cost > COSTLY:
                continue
            if engine != "auto" and not can[left].all():
                raise InputError(one.refusal)
            rows = np.flatnonzero(left & can & is_open(answer, rtol, floor))
            if rows.size:
                _ask(one, quantity, question._replace(effort=effort), rows, side)
                left[rows] &= ~one.settles(some_rows(question, rows))
    wanting = is_open(answer, rtol, floor) | contradicted
    # Theorems check the `doubtful` rows. Any bracket with the upper end 0 counts as narrow, so it is among them.
    doubtful = np.flatnonzero(asked & (wanting | (answer.upper <= 0.0) | question.kinds.nearly_always_sampled))
    limits = limits_by_theorems(quantity, some_rows(question, doubtful)) if doubtful.size else None
    if limits is not None:
        _narrow_by_theorems(side, doubtful, *limits)
    wide = left & (wanting if engine == "auto" else True)  # rows for the costly engines
    if engine == "auto" and wide.any():
        # a bracket that the theorems made narrower than this needs no costly engine
        enough = max(rtol, min(5e-4, 4.0 * rtol)) if question.effort.in_search else 0.01 * rtol
        wide &= is_open(answer, enough, floor)
    for one, can in known:
        rows = np.flatnonzero(wide & can)
        if one.cost > COSTLY and rows.size:
            _ask(one, quantity, question, rows, side)
            if limits is not None:  # where `_ask` dropped contradicting answers, the theorems still bound the row
                _narrow_by_theorems(side, doubtful, *limits)
    guaranteed = parts.guaranteed()
    rows = np.flatnonzero(asked & ~guaranteed & is_open(answer, WIDE[quantity], floor))
    if rows.size:
        high = upper_by_moments(quantity, some_rows(question, rows))
        _narrow_by_theorems(side, rows, np.full(rows.size, -np.inf), high)
    used[used == ""] = "closed_form"  # no engine was needed for these rows
    low, mid, high = answer
    mid = np.clip(np.where(np.isnan(mid), low, mid), low, high)
    # a zCDP guarantee has two upper bounds: by its moments, and by its dominating pair
    rows = np.flatnonzero(asked & guaranteed)
    if rows.size:
        most = upper_by_moments(quantity, some_rows(question, rows))
        used[rows[most < high[rows]]] = "theorem"
        for end in (low, mid, high):
            end[rows] = np.fmin(end[rows], most)
    return Side(Answer(low, mid, high), used, contradicted)


def is_open(answer: Answer, rtol: float, floor: np.ndarray | float = -np.inf) -> np.ndarray:
    """Return whether a bracket is wider than `rtol`, and above `floor`, the lower end in the other direction."""
    low, _, high = answer
    with np.errstate(invalid="ignore"):
        narrow = np.isfinite(high) & (high - np.maximum(low, 0.0) <= rtol * high)
    # in float64 a delta up to 1e-300 has no relative accuracy, so such a bracket counts as narrow
    return ~(narrow | (high <= 1e-300) | (low == high) | (high <= floor))


def limits_by_theorems(quantity: str, question: Question) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds by all theorems, not only by the quick theorems of `quick_bounds.limits`."""
    from jaxacct.engines import theorems

    parts, target, slack = question.parts, question.target, question.slack
    with np.errstate(all="ignore"):
        tests = theorems.tests_of(parts)
        if quantity == "delta":
            low, rare = theorems.best_delta(tests, target), theorems.rare_step_delta(parts, target)
            return np.fmax(low, rare), theorems.least_delta(parts, target)
        most = target * (1.0 + slack)
        low, rare = theorems.best_epsilon(tests, most), theorems.rare_step_epsilon(parts, most)
        return np.fmax(low, rare), theorems.least_epsilon(parts, target, slack)


def upper_by_moments(quantity: str, question: Question) -> np.ndarray:
    """Return upper bounds of epsilon or delta by Rényi accounting."""
    from jaxacct.engines import loss_moments  # imported only where a row needs it

    with np.errstate(all="ignore"):
        if quantity == "delta":
            return loss_moments.least_delta(question.parts, question.target)
        least = question.target * (1.0 - question.slack) * (1.0 - 4.0 * ROUNDOFF)
        return loss_moments.least_epsilon(question.parts, np.maximum(least, SMALLEST_POSITIVE))


def some_rows(question: Question, rows: np.ndarray) -> Question:
    arrays = question.parts, question.kinds, question.target, question.slack, question.floor, question.hint
    parts, kinds, target, slack, floor, hint = jax.tree.map(operator.itemgetter(rows), arrays)
    return Question(parts, kinds, target, slack, floor, question.effort, hint)


def _ask(engine: Engine, quantity: str, question: Question, rows: np.ndarray, side: Side) -> None:
    """Intersect the brackets of rows with an engine's answer. A row on which the engine fails keeps its bracket."""
    some = some_rows(question, rows)
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            found = engine.epsilon(some) if quantity == "epsilon" else engine.delta(some)
    except InputError:
        raise
    except FAILURES as error:
        if rows.size > 1:
            for place in range(rows.size):
                _ask(engine, quantity, question, rows[[place]], side)
            return
        warnings.warn(
            f"the {engine.name} engine failed on configuration {rows[0]} ({error}); another or a theorem answers",
            stacklevel=2,
        )
        found = Answer(np.array([-np.inf]), np.array([np.nan]), np.array([np.inf]))
    lower, estimate, upper = (end[rows] for end in side.answer)
    # a lower end of inf is not used: rows with an infinite answer were settled before
    low = np.where(np.isnan(found.lower) | (found.lower == np.inf), -np.inf, found.lower)
    high = np.where(np.isnan(found.upper), np.inf, found.upper)
    least, most = quick_bounds.limits(quantity, some.parts, some.target, some.slack)
    # an answer that contradicts the quick theorems is not used; if it contradicts the row's bracket, neither is used
    holds = (low <= most) & (high >= least)
    low = np.where(holds, np.fmax(low, least), low)  # the quick theorems bound a delta near 1 best
    better = holds & (found.upper - found.lower < upper - lower)
    side.engine[rows[better | (side.engine[rows] == "")]] = engine.name
    low, high = np.where(holds, np.maximum(low, lower), lower), np.where(holds, np.minimum(high, upper), upper)
    agree = low <= high
    kept = (np.isnan(estimate) | better) & holds
    side.answer.lower[rows], side.answer.upper[rows] = np.where(agree, low, -np.inf), np.where(agree, high, np.inf)
    side.answer.estimate[rows] = np.where(agree, np.where(kept, found.estimate, estimate), np.nan)
    side.contradicted[rows] |= ~(holds & agree)


def _narrow_by_theorems(side: Side, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Intersect brackets with the theorems' intervals [low, high], which replace a bracket that contradicts them."""
    lower, estimate, upper = (end[rows] for end in side.answer)
    agree = (lower <= high) & (upper >= low)
    lower, upper = np.where(agree, lower, -np.inf), np.where(agree, upper, np.inf)
    side.engine[rows[(high < upper) | ~agree]] = "theorem"
    side.contradicted[rows] |= ~agree
    side.answer.lower[rows], side.answer.upper[rows] = np.fmax(lower, low), np.fmin(upper, high)
    side.answer.estimate[rows] = np.where(agree, estimate, np.nan)


# The engines for compositions other than `Contour`. Their modules need SciPy, and are imported at their first use.


class ClosedForm(Engine):
    """Answers for composed Gaussians without sampling, one sampled Gaussian, or one part with finitely many losses."""

    name = "closed_form"
    cost = 1e-5

    def settles(self, question: Question) -> np.ndarray:
        return self.supports(question)

    def epsilon(self, question: Question) -> Answer:
        from jaxacct.engines import closed_form

        steps = closed_form.epsilon_of_one_step, closed_form.epsilon_of_atoms
        return _by_formula(question, closed_form.epsilon, *steps, question.slack)

    def delta(self, question: Question) -> Answer:
        from jaxacct.engines import closed_form

        steps = closed_form.delta_of_one_step, closed_form.delta_of_atoms
        return _by_formula(question, closed_form.delta, *steps)


class TwoSteps(Engine):
    """Answers for two Poisson sampled Gaussian steps, which may differ."""

    name = "two_steps"
    cost = 1e-3

    def epsilon(self, question: Question) -> Answer:
        from jaxacct.engines import two_steps

        return two_steps.epsilon(question.parts, question.target, question.slack, question.floor)

    def delta(self, question: Question) -> Answer:
        from jaxacct.engines import two_steps

        return two_steps.delta(question.parts, question.target)


class HitCounts(Engine):
    """Answers for sampled Gaussian steps whose outputs show whether the record was hit, beside unsampled Gaussians."""

    name = "hit_counts"
    cost = 2e-4

    def settles(self, question: Question) -> np.ndarray:
        return question.kinds.hits_settle

    def epsilon(self, question: Question) -> Answer:
        return hit_counts.epsilon(question.parts, question.target, question.slack)

    def delta(self, question: Question) -> Answer:
        return hit_counts.delta(question.parts, question.target)


class Lattice(Engine):
    """Answers for any composition, by the law of its loss on a grid."""

    name = "lattice"
    cost = 0.1

    def epsilon(self, question: Question) -> Answer:
        from jaxacct.engines import lattice

        low, high = question.target * (1.0 - question.slack), question.target * (1.0 + question.slack)
        with double_precision():
            found = [
                lattice.epsilon(question.parts, row, low[row], high[row], **self._accuracy(question.effort))
                for row in range(low.size)
            ]
        return _stacked(found)

    def delta(self, question: Question) -> Answer:
        from jaxacct.engines import lattice

        rows = range(question.target.size)
        with double_precision():
            found = lattice.deltas(question.parts, rows, question.target, **self._accuracy(question.effort))
        return _stacked(found)

    @staticmethod
    def _accuracy(effort: Effort) -> dict[str, Any]:
        """Return the lattice's settings: the relative width to aim at, the width to accept, and the memory limit."""
        planned = (0.8 if effort.in_search else 0.1) * effort.rtol
        return {"rtol": planned, "enough": effort.rtol, "memory_bytes": effort.memory_bytes}


def _by_formula(
    question: Question,
    plain: Callable[..., Answer],
    one_step: Callable[..., Answer],
    of_atoms: Callable[..., Answer],
    *more: np.ndarray,
) -> Answer:
    """Answer each row by the function for its kind of law. Each function takes (parameters of law, target, *more)."""
    ends, parts = np.zeros((3, question.target.size)), question.parts
    values = question.target, *more
    finite = np.any(parts.finite_n > 0, axis=1)
    rows = np.flatnonzero(question.kinds.gaussian)
    if rows.size:
        ends[:, rows] = plain(parts.mu[rows], *(value[rows] for value in values))
    rows = np.flatnonzero(~question.kinds.gaussian & ~finite)
    if rows.size:
        part = parts.take(rows)
        column = np.argmax(part.gauss_n, axis=1)[:, None]
        sigma, q = (np.take_along_axis(x, column, 1)[:, 0] for x in (part.gauss_sigma, part.gauss_q))
        ends[:, rows] = one_step(sigma, q, part.sign > 0, *(value[rows] for value in values))
    rows = np.flatnonzero(finite)
    together = max(1, ATOMS_TOGETHER // max(parts.finite_loss.shape[-1], 1))
    for first in range(0, rows.size, together):
        some = rows[first : first + together]
        column = np.argmax(parts.finite_n[some], axis=1)
        law = parts.finite_loss[some, column], parts.finite_mass[some, column]
        ends[:, some] = of_atoms(*law, *(value[some] for value in values))
    return Answer(*ends)


def _stacked(found: Sequence[Any]) -> Answer:
    """Return the answers of single configurations as one answer of a batch."""
    ends = np.array([(x.lower, x.estimate, x.upper) for x in found], np.float64).reshape(-1, 3)
    return Answer(*ends.T)


for _engine in (ClosedForm(), HitCounts(), TwoSteps(), Contour(), Lattice()):
    register(_engine)
