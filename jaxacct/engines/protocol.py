"""The questions that engines get, the answers that they give, and the list of engines that dispatch walks.

An engine answers for one direction of a batch (`Engine`), or for a mechanism as a whole that its parts do not describe,
such as a private selection (`MechanismEngine`).  To add one, append it to the list by `register`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import GIBIBYTE, RELATIONS, broadcast_shape
from jaxacct.mechanisms.base import Mechanism, batch_shape
from jaxacct.mechanisms.loss_components import Components

__all__ = [
    "ENGINES",
    "Answer",
    "Effort",
    "Engine",
    "Kinds",
    "MechanismEngine",
    "MechanismQuestion",
    "Question",
    "register",
]


class Answer(NamedTuple):
    """Ends and estimate of a batch, without NaN; lower = -inf and upper = inf if nothing is known."""

    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray


class Effort(NamedTuple):
    """How narrow brackets should be, and at what cost.  It changes widths and never what holds."""

    rtol: float
    """Relative width at which a bracket is narrow enough."""
    memory_bytes: int = GIBIBYTE
    """Limit on an engine's memory."""
    in_search: bool = False
    """Whether it is one evaluation of many, of which only its place beside a target matters: no engine refines further
    than rtol because it is cheap to do so."""


class MechanismQuestion(NamedTuple):
    """A question of a user or a search: epsilon at deltas, or delta at epsilons, of a mechanism under a relation."""

    quantity: str
    """"epsilon" or "delta"."""
    mechanism: Mechanism
    given: Any = 0.0
    """The deltas or epsilons, at least 0; they broadcast with the mechanism."""
    relation: str = RELATIONS[0]
    effort: Effort = Effort(1e-4)
    engine: str = "auto"
    """The engine that is wanted, by name."""
    hint: Any = None
    """Knowledge of a search for the engine that answers; it changes only the time that the answer takes."""
    attacks: bool = False
    """Whether attacks, which take longer, may raise the lower end."""

    def flat(self) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
        """(shape of the answer, number of each row's configuration, given value of each row), in flat order."""
        mine, other = batch_shape(self.mechanism), "delta" if self.quantity == "epsilon" else "epsilon"
        shape = broadcast_shape({"the mechanism": mine, other: np.shape(self.given)})
        rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
        return shape, rows, np.broadcast_to(np.asarray(self.given, np.float64), shape).reshape(-1)


class Kinds(NamedTuple):
    """The kinds of parts in each of B compositions."""

    empty: np.ndarray
    """(B,) nothing is released: every part is sampled at rate 0."""
    gaussian: np.ndarray
    """(B,) Gaussians without sampling, and nothing else."""
    sampled_steps: np.ndarray
    """(B,) how many sampled Gaussian steps, where there is nothing else; otherwise 0."""
    beyond_kernels: np.ndarray
    """(B,) mu^2 of Gaussians under- or overflows beside other parts: the kernels would take mu for 0."""
    nearly_always_sampled: np.ndarray
    """(B,) a sampling rate is so high that sampling may change less than the width of a bracket."""


class Question(NamedTuple):
    """epsilon at a delta, or delta at an epsilon, in one direction, for B configurations."""

    parts: Components
    kinds: Kinds
    target: np.ndarray
    """(B,) delta less the mass at infinity, or epsilon."""
    slack: np.ndarray
    """(B,) relative error of a delta; 0 for an epsilon."""
    floor: np.ndarray
    """(B,) the answer is not refined where its upper end is at most this, since the other direction is larger."""
    effort: Effort
    hint: Any = None
    """`MechanismQuestion.hint`, row by row."""


class Engine(ABC):
    """A way to compute brackets of epsilon and delta from the parts of a composition, one direction at a time."""

    name: ClassVar[str]
    """The name that `Bounds.engine` shows."""
    cost: ClassVar[float]
    """Seconds of CPU for one configuration, roughly; cheap engines are asked first."""
    settles: ClassVar[bool] = False
    """Whether its answers are exact up to rounding, so that no other engine is asked."""
    refusal: ClassVar[str] = "this engine cannot answer for every configuration of the batch; use engine='auto'"
    """The message to a user who names this engine for a configuration that it cannot answer."""

    @abstractmethod
    def supports(self, question: Question) -> np.ndarray:
        """(B,) whether the engine can answer each configuration."""

    @abstractmethod
    def epsilon(self, question: Question) -> Answer:
        """Brackets of epsilon at a delta."""

    @abstractmethod
    def delta(self, question: Question) -> Answer:
        """Brackets of the finite part of delta at an epsilon."""


class MechanismEngine(ABC):
    """A way to compute epsilon and delta of a mechanism as a whole, in all directions of a relation."""

    name: ClassVar[str]
    cost: ClassVar[float] = 0.0
    """0: these engines are asked before the engines of compositions, in the order in which they were registered."""
    classes: ClassVar[tuple[type[Mechanism], ...]]
    """The classes of mechanisms that it may answer for."""
    steps: ClassVar[tuple[type[Mechanism], ...]] = (Mechanism,)
    """It may answer where one of the composed single steps is of these classes."""
    if_engine_is_named: ClassVar[str] = "refuses"
    """What this engine does if a user names an engine of compositions.  It "refuses"; or it "stands back", since the
    parts bound the mechanism as well; or it "answers", and asks the named engine about other mechanisms."""
    by_rows: ClassVar[bool] = False
    """Whether its time grows with the rows of a batch, so that a search asks only for those that it needs."""

    def supports(self, question: MechanismQuestion) -> bool:
        """Whether the engine answers for this mechanism (one of its classes) under this relation."""
        return True

    @abstractmethod
    def bracket(self, question: MechanismQuestion) -> Bounds:
        """The bracket of epsilon or delta."""

    def guess(self, mechanism: Any, delta: np.ndarray) -> np.ndarray | None:
        """A cheap estimate of epsilon at delta, where a search can start; None if nothing is known."""
        return None

    def excess(self, mechanism: Any, epsilon: np.ndarray, delta: np.ndarray, relation: str) -> np.ndarray | None:
        """An estimate of log(epsilon at delta) - log(epsilon given), for a search; None if only brackets are known.

        It is good if the given epsilon is near the one at delta, and costs less than a bracket.
        """
        return None


ENGINES: list[Engine | MechanismEngine] = []
"""All engines, in the order in which they are asked; importing accounting registers the engines of compositions."""


def register(engine: Engine | MechanismEngine) -> None:
    """Put an engine in the list that dispatch walks, behind all that cost less; one of the same name is replaced."""
    known = [one for one in ENGINES if one.name != engine.name] + [engine]
    ENGINES[:] = sorted(known, key=lambda one: one.cost)
