"""The questions that engines get, the answers that engines give, and the list of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import GIBIBYTE, RELATIONS
from jaxacct.mechanisms.base import Mechanism
from jaxacct.mechanisms.loss_components import Components


class Answer(NamedTuple):
    """Bounds and estimate for each row, without NaN. An unknown lower bound is -inf, and an unknown upper bound inf."""

    lower: np.ndarray
    estimate: np.ndarray
    upper: np.ndarray


class Effort(NamedTuple):
    """How narrow the brackets [lower, upper] should be, and at what cost. The bounds are true at every effort."""

    rtol: float  # relative width at which a bracket is narrow enough
    memory_bytes: int = GIBIBYTE
    in_search: bool = False  # whether a search asks. If not, engines aim at a smaller width than rtol.


class MechanismQuestion(NamedTuple):
    """A question of a user or a search: epsilon at deltas, or delta at epsilons, of a mechanism under a relation."""

    quantity: str  # "epsilon" or "delta"
    mechanism: Mechanism
    given: Any = 0.0  # the deltas or epsilons, at least 0; they broadcast with the mechanism
    relation: str = RELATIONS[0]
    effort: Effort = Effort(1e-4)
    engine: str = "auto"  # the name of the engine that the user wants, or "auto"
    hint: Any = None  # what a search knows about the answer (`contour.Hint`). It changes only the running time.
    floor: Any = None  # a known lower bound of the final answer. If parts answer, a bracket below it is not refined.
    attacks: bool = False  # whether the engine also looks for attacks that raise the lower bound, which takes longer


class Kinds(NamedTuple):
    """The kinds of parts in each of B compositions."""

    empty: np.ndarray  # (B,) whether nothing is released: every part is sampled at rate 0
    gaussian: np.ndarray  # (B,) whether all parts are Gaussians without sampling
    beyond_kernels: np.ndarray  # (B,) whether the row is not `gaussian`, and mu^2 is too small or large for kernels
    hits_settle: np.ndarray  # (B,) whether counting the hits gives an exact answer (`hit_counts.Reach`)
    nearly_always_sampled: np.ndarray  # (B,) whether a sampling rate is above 0.9. Theorems check the row's answer.
    answered_by: dict[str, np.ndarray]  # for each `Engine` of jaxacct, by its name: (B,) whether it can answer the row

    def before_contours(self) -> np.ndarray:
        """Return (B,) whether an engine that needs neither a contour nor a lattice gives a narrow answer."""
        return self.answered_by["closed_form"] | self.answered_by["two_steps"] | self.hits_settle


class Question(NamedTuple):
    """A question for B configurations in one direction (such as remove): epsilon at a delta, or delta at an epsilon."""

    parts: Components
    kinds: Kinds
    target: np.ndarray  # (B,) the given delta minus the mass at infinity, or the given epsilon
    slack: np.ndarray  # (B,) relative error of `target` if it is a delta; 0 if it is an epsilon
    floor: np.ndarray  # (B,) known lower bound of the final answer. A bracket that lies below it needs no refining.
    effort: Effort
    hint: Any = None  # what a search knows about each row (`MechanismQuestion.hint`)


class Engine(ABC):
    """A way to compute brackets of epsilon and delta from the parts of a composition, one direction at a time."""

    name: ClassVar[str]  # the name that `Bounds.engine` shows
    cost: ClassVar[float]  # seconds of CPU for one configuration, roughly; cheap engines are asked first
    refusal: ClassVar[str] = "this engine cannot answer for every configuration of the batch; use engine='auto'"
    """The message to a user who names this engine for a configuration that it cannot answer."""

    def supports(self, question: Question) -> np.ndarray:
        """Return (B,) whether the engine can answer each row, as `kinds` says. Engines outside jaxacct override it."""
        return question.kinds.answered_by[self.name]

    def settles(self, question: Question) -> np.ndarray:
        """Return (B,) whether answers are exact up to rounding, so that no other engine is asked."""
        return np.zeros(question.target.shape, bool)

    @abstractmethod
    def epsilon(self, question: Question) -> Answer:
        """Return brackets of epsilon at a delta."""

    @abstractmethod
    def delta(self, question: Question) -> Answer:
        """Return brackets of delta at an epsilon. This delta leaves out the mass at infinity."""


class MechanismEngine(ABC):
    """A way to compute epsilon and delta in all directions of a relation, for mechanisms whose parts do not suffice."""

    name: ClassVar[str]
    cost: ClassVar[float] = 0.0  # engines of cost 0 come before engines of compositions, in order of registration
    classes: ClassVar[tuple[type[Mechanism], ...]]  # the classes of mechanisms that the engine may answer for
    steps: ClassVar[tuple[type[Mechanism], ...]] = ()
    """If not empty, the engine is asked only if a step of one of these classes has an `ordinary()` that is False."""
    relations: ClassVar[tuple[str, ...]] = RELATIONS  # the engine is asked only under these relations
    if_engine_is_named: ClassVar[str] = "refuses"
    """What happens if a user names an engine of compositions. "refuses": InputError is raised. "stands back": the named
    engine answers from the parts; its bounds are true. "answers": this engine answers, and may ask the named one."""

    def supports(self, question: MechanismQuestion) -> bool:
        """Return whether the engine answers this question. It is asked only about mechanisms of its `classes`."""
        return True

    @abstractmethod
    def bracket(self, question: MechanismQuestion) -> Bounds:
        """Return the bracket of epsilon or delta."""


ENGINES: list[Engine | MechanismEngine] = []
"""All engines in the order in which they are asked. Importing `jaxacct.accounting` registers its engines."""


def register(engine: Engine | MechanismEngine) -> None:
    """Put an engine in the list, behind engines of the same or lower cost; remove an older engine of the same name."""
    known = [one for one in ENGINES if one.name != engine.name] + [engine]
    ENGINES[:] = sorted(known, key=lambda one: one.cost)
