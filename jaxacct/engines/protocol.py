"""What every engine is asked and answers, and the list of engines that dispatch walks.

An engine answers for one direction of a batch (`Engine`), or for a mechanism as a whole that its parts do not describe,
such as a private selection (`MechanismEngine`).  To add one, append it to the list by `register`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.engines.contour import Answer, Hint
from jaxacct.mechanisms.loss_components import Components

__all__ = ["ENGINES", "Answer", "Effort", "Engine", "Kinds", "MechanismEngine", "Question", "register"]


class Effort(NamedTuple):
    """How narrow brackets should be: in the end, and engine by engine.  It changes widths and never what holds."""

    rtol: float
    """Relative width at which a bracket is narrow enough."""
    contour_width: float
    """Relative width at which the contour engine stops refining."""
    contour_tolerance: float
    """Relative size of delta down to which the contour engine drives what it cuts off."""
    lattice_rtol: float
    """Relative width for which the lattice engine plans."""
    memory_bytes: int
    """Limit on the lattice engine's memory."""


class Kinds(NamedTuple):
    """What B compositions consist of, as far as it decides which engine suits."""

    empty: np.ndarray
    """(B,) nothing is released: every part is sampled at rate 0."""
    gaussian: np.ndarray
    """(B,) Gaussians without sampling, and nothing else."""
    closed_form: np.ndarray
    """(B,) Gaussians without sampling, or one sampled step: their delta is a formula."""
    two_steps: np.ndarray
    """(B,) two sampled Gaussian steps, alike or not."""
    smooth: np.ndarray
    """(B,) what the contour can answer: a Gaussian part, and no Poisson sampled Laplace part."""
    nearly_always_sampled: np.ndarray
    """(B,) some sampling rate is so high that sampling may change less than the width of a bracket."""
    beyond_kernels: np.ndarray
    """(B,) Gaussians whose mu^2 under- or overflows beside other parts: the kernels would take them for nothing."""


class Question(NamedTuple):
    """epsilon at a delta, or delta at an epsilon, in one direction, for B configurations."""

    parts: Components
    kinds: Kinds
    target: np.ndarray
    """(B,) the delta that is left beside the mass at infinity, or the epsilon."""
    slack: np.ndarray
    """(B,) relative error of a delta; 0 for an epsilon."""
    floor: np.ndarray
    """(B,) the answer is not refined where its upper end is at most this, since the other direction is larger."""
    effort: Effort
    hint: Hint | None = None
    """Where the contour engine should begin."""


class Engine(ABC):
    """A way to compute brackets of epsilon and delta from the parts of a composition, one direction at a time."""

    name: ClassVar[str]
    """As it stands in `Bounds.engine`."""
    cost: ClassVar[float]
    """Seconds of CPU for one configuration, roughly; cheap engines are registered first."""
    settles: ClassVar[bool] = False
    """Whether what it answers is exact up to rounding, so that no other engine is asked."""
    refusal: ClassVar[str] = "this engine cannot answer for every configuration of the batch; use engine='auto'"
    """What a user is told who asks for this engine where it cannot answer."""

    @abstractmethod
    def supports(self, question: Question) -> np.ndarray:
        """(B,) the configurations that it can answer."""

    @abstractmethod
    def epsilon(self, question: Question) -> Answer:
        """Brackets of epsilon at a delta."""

    @abstractmethod
    def delta(self, question: Question) -> Answer:
        """Brackets of the finite part of delta at an epsilon."""


class MechanismEngine(ABC):
    """A way to compute epsilon and delta of a mechanism as a whole, in all directions of a relation."""

    name: ClassVar[str]
    beside_parts: ClassVar[bool] = False
    """Whether the parts of the mechanism bound it as well, so that an engine of compositions may be asked for."""
    by_rows: ClassVar[bool] = False
    """Whether its time grows with the rows of a batch, so that a search asks only for those that it needs."""

    @abstractmethod
    def supports(self, mechanism: Any) -> bool:
        """Whether it answers for this mechanism."""

    @abstractmethod
    def epsilon(self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float) -> Bounds:
        """The bracket of epsilon at delta >= 0, which broadcasts with the mechanism."""

    @abstractmethod
    def delta(self, mechanism: Any, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
        """The bracket of delta at epsilon >= 0, which broadcasts with the mechanism."""

    def epsilon_near(self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float, near: np.ndarray) -> Bounds:
        """`epsilon`, begun at about what it is; `near` has the shape of delta and decides nothing but the time."""
        return self.epsilon(mechanism, delta, relation, rtol)

    def guess(self, mechanism: Any, delta: np.ndarray) -> np.ndarray | None:
        """About epsilon at delta, at next to no cost, for a search to begin with; None where nothing is known."""
        return None

    def excess(self, mechanism: Any, epsilon: np.ndarray, delta: np.ndarray, relation: str) -> np.ndarray | None:
        """About log(epsilon at delta) - log(epsilon given), for a search; None where only brackets are known.

        It is good where the given epsilon is near the one at delta, and costs less than a bracket.
        """
        return None


ENGINES: list[Engine | MechanismEngine] = []
"""All engines, in the order in which they are asked; those of compositions are there once dispatch is imported."""


def register(engine: Engine | MechanismEngine) -> None:
    """Put an engine in the list that dispatch walks, behind all that cost less; one of the same name is replaced."""
    known = [one for one in ENGINES if one.name != engine.name] + [engine]
    ENGINES[:] = sorted(known, key=lambda one: one.cost if isinstance(one, Engine) else 0.0)
