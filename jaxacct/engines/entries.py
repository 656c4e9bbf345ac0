"""The engines for compositions, as entries of the list that dispatch walks.

Most engines use SciPy, which takes a while to import: they are imported when they are first asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxacct.engines import contour
from jaxacct.engines.protocol import Answer, Engine, Question
from jaxacct.floats import ROUNDOFF

__all__ = ["ClosedForm", "Contour", "Lattice", "TwoSteps"]


class ClosedForm(Engine):
    """Composed Gaussians without sampling, and one Poisson sampled Gaussian step."""

    name = "closed_form"
    cost = 1e-5
    settles = True

    def supports(self, question: Question) -> np.ndarray:
        return question.kinds.gaussian | (question.kinds.sampled_steps == 1)

    def epsilon(self, question: Question) -> Answer:
        from jaxacct.engines import closed_form

        return _by_formula(question, closed_form.epsilon, closed_form.epsilon_of_one_step, question.slack)

    def delta(self, question: Question) -> Answer:
        from jaxacct.engines import closed_form

        return _by_formula(question, closed_form.delta, closed_form.delta_of_one_step)


class TwoSteps(Engine):
    """Two Poisson sampled Gaussian steps, alike or not."""

    name = "two_steps"
    cost = 1e-3

    def supports(self, question: Question) -> np.ndarray:
        return question.kinds.sampled_steps == 2

    def epsilon(self, question: Question) -> Answer:
        from jaxacct.engines import two_steps

        return two_steps.epsilon(question.parts, question.target, question.slack, question.floor)

    def delta(self, question: Question) -> Answer:
        from jaxacct.engines import two_steps

        return two_steps.delta(question.parts, question.target)


class Contour(Engine):
    """Compositions with a Gaussian part, by the contour integral of the characteristic function."""

    name = "contour"
    cost = 2e-3
    refusal = "engine = 'contour' needs a Gaussian part and no Poisson sampled Laplace; use engine='auto' or 'lattice'"

    def supports(self, question: Question) -> np.ndarray:
        return contour.supports(question.parts)

    def epsilon(self, question: Question) -> Answer:
        effort = question.effort
        asked = question.parts, question.target, question.slack, question.floor
        found = contour.epsilon(*asked, effort.contour_width, effort.contour_tolerance, question.hint)
        return Answer(*(np.maximum(end, 0.0) for end in found))  # the kernels look at negative epsilons too

    def delta(self, question: Question) -> Answer:
        floor = np.maximum(question.floor - question.parts.delta_infinity, 0.0) * (1 - 8 * ROUNDOFF)
        return contour.delta(question.parts, question.target, floor, question.effort.contour_width)


class Lattice(Engine):
    """Any composition, by the law of its loss on a grid."""

    name = "lattice"
    cost = 0.1

    def supports(self, question: Question) -> np.ndarray:
        return np.ones(question.target.shape, bool)

    def epsilon(self, question: Question) -> Answer:
        from jaxacct.engines import lattice

        ask = functools.partial(
            lattice.epsilon, rtol=question.effort.lattice_rtol, memory_bytes=question.effort.memory_bytes
        )
        low, high = question.target * (1.0 - question.slack), question.target * (1.0 + question.slack)
        with jax.enable_x64():
            found = [ask(question.parts, row, low[row], high[row]) for row in range(low.size)]
        return _stacked(found)

    def delta(self, question: Question) -> Answer:
        from jaxacct.engines import lattice

        effort, rows = question.effort, range(question.target.size)
        with jax.enable_x64():
            found = lattice.deltas(
                question.parts, rows, question.target, rtol=effort.lattice_rtol, memory_bytes=effort.memory_bytes
            )
        return _stacked(found)


def _by_formula(
    question: Question, plain: Callable[..., Answer], one_step: Callable[..., Answer], *more: np.ndarray
) -> Answer:
    """Composed Gaussians by one formula, single sampled steps by the other; `more` follows the target."""
    ends = np.zeros((3, question.target.size))
    values = question.target, *more
    rows = np.flatnonzero(question.kinds.gaussian)
    if rows.size:
        ends[:, rows] = plain(question.parts.mu[rows], *(value[rows] for value in values))
    rows = np.flatnonzero(~question.kinds.gaussian)
    if rows.size:
        part = question.parts.take(rows)
        column = np.argmax(part.gauss_n, axis=1)[:, None]
        sigma, q = (np.take_along_axis(x, column, 1)[:, 0] for x in (part.gauss_sigma, part.gauss_q))
        ends[:, rows] = one_step(sigma, q, part.sign > 0, *(value[rows] for value in values))
    return Answer(*ends)


def _stacked(found: Sequence[Any]) -> Answer:
    """Answers of single configurations as those of a batch."""
    ends = np.array([(x.lower, x.estimate, x.upper) for x in found], np.float64).reshape(-1, 3)
    return Answer(*ends.T)
