"""SolvedPlan: what a plan whose numbers are all known says of its steps, of what they release, and of their epsilon."""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import NON_NEGATIVE, InputError, check
from jaxacct.mechanisms import Mechanism
from jaxacct.training.plan.accounting import epsilon_of_run, epsilon_of_tuning
from jaxacct.training.plan.filters import Filter, spent_renyi
from jaxacct.training.plan.passes import Block, begins_pass, blocks, pass_at, passes, releases
from jaxacct.training.plan.request import DEFAULTS, checked
from jaxacct.training.plan.schedule import Segment
from jaxacct.training.plan.solver import Solution
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS, TRUNCATED, Release, composed, slots_of

__all__ = ["SolvedPlan"]

_KEPT = (
    "target_epsilon",
    "target_delta",
    "dataset_size",
    "sampling",
    "relation",
    "repetitions",
    "candidates",
    "cap",
    "unit",
    "filter",
)
"""The settings that a plan made `like` another one takes over."""


@dataclass(frozen=True, eq=False, init=False)
class SolvedPlan:
    """A run whose numbers are all known.  `jaxacct.training.Plan` is the class that callers use, and adds the solving.

    It is written once, by its own constructors, and never changes.  Its fields are those of a `PlanRequest`, with
    numbers in place of what was left open; segments are the steps, and filter the Renyi filter, if there is one.
    """

    target_epsilon: float | None
    target_delta: float
    dataset_size: int
    sampling_probability: float
    expected_batch_size: float
    noise_multiplier: float
    steps: int
    epochs: float
    sampling: str
    relation: str
    noise_schedule: Any
    batch_schedule: Any
    repetitions: Any
    data_dependent: bool
    candidates: str
    slots: int | None
    cap: int | None
    unit: str
    segments: tuple[Segment, ...] = field(init=False, repr=False)
    filter: Filter | None = field(init=False, repr=False)

    @classmethod
    def of(cls, segments: Sequence[Segment], like: SolvedPlan | None = None, **changed: Any) -> Self:
        """The plan with these segments and, for the rest, the settings given or those of another plan; not solved.

        Parameters
        ----------
        segments : the steps, from step 0 on, without gaps.
        like : a plan whose target, data, sampling, relation, law of K and filter are taken over.
        changed : any of these, and noise_multiplier, by name.

        Raises
        ------
        InputError : a value that `Plan` would refuse, or an unknown name.
        """
        kept = {name: getattr(like, name) for name in _KEPT} if like is not None else {}
        known = DEFAULTS | {"filter": None}
        unknown = sorted(changed.keys() - known.keys())
        if unknown:
            raise InputError(f"{unknown[0]} is no setting of a plan; use one of {', '.join(sorted(known))}")
        settings = known | kept | changed
        chosen: Filter | None = settings.pop("filter")
        settings = checked({**settings, "data_dependent": chosen is not None})
        given = settings["noise_multiplier"]
        noise = segments[0].noise_multiplier if given is None else given
        plan = object.__new__(cls)
        if settings["sampling"] == TRUNCATED and settings["cap"] is None:
            raise InputError("cap is missing; give the largest batch of truncated Poisson sampling")
        plan._hold(settings, Solution(tuple(segments), noise, chosen, cap=settings["cap"]))
        return plan

    def _hold(self, settings: dict[str, Any], solution: Solution) -> None:
        """Write every field, once: the settings, the solution, and the averages over its segments."""
        segments, noise, chosen, epsilon, cap = solution
        steps, size = segments[-1].end, settings["dataset_size"]
        batch = math.fsum(s.steps * s.expected_batch_size for s in segments) / steps
        rate = batch / size
        averages = {"steps": steps, "epochs": steps * batch / size, "noise_multiplier": noise}
        if len(segments) == 1:  # the very numbers, not an average of them
            rate, batch = segments[0].sampling_probability, segments[0].expected_batch_size
        averages |= {"sampling_probability": rate, "expected_batch_size": batch}
        one_size = len({s.expected_batch_size for s in segments}) == 1
        slots = int(slots_of(segments[0].sampling_probability)) if settings["sampling"] == ALLOCATION else None
        averages |= {"slots": slots if one_size else None, "cap": cap}
        vars(self).update(settings | averages | {"segments": segments, "filter": chosen})
        if epsilon is not None:
            vars(self)["epsilon"] = epsilon  # the solver found it already: what `epsilon` would compute

    @property
    def truncation(self) -> tuple[int, int]:
        """(cap, dataset_size) of truncated Poisson sampling, as a `Release` and a ledger hold them; elsewhere zeros."""
        return (self.cap or 0, self.dataset_size if self.cap else 0)

    def at(self, step: int) -> Segment:
        """The segment that a step (from 0) belongs to."""
        self._require(step, self.steps - 1)
        return self.segments[bisect.bisect_right(self._ends, step)]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [segment.end for segment in self.segments]

    @functools.cached_property
    def _blocks(self) -> list[Block]:
        return blocks(self.segments, self.sampling, self.dataset_size)

    def pass_of(self, step: int) -> tuple[int, int, int]:
        """(number of the pass, its first step, the step after its last) in which a step is.

        Fixed batches have passes, and random allocation has rounds.  A new one begins where the batch size changes.
        Within a pass the batches must be disjoint, and within a round each record must keep the slot that it drew.
        """
        self._require(step, self.steps - 1)
        if self.sampling not in BY_PASS:
            raise InputError(f"sampling = {self.sampling!r} has no passes; only {' and '.join(BY_PASS)} do")
        return pass_at(self._blocks, int(step))

    @functools.cached_property
    def passes(self) -> list[tuple[int, int]]:
        """(first step, step after the last) of every pass of fixed batches, or round, all in one list."""
        return list(passes(self.segments, self.sampling, self.dataset_size))

    def begins_pass(self, step: int) -> bool:
        """Whether no pass or round is under way before a step, or after the last one."""
        self._require(step, self.steps)
        return self.sampling not in BY_PASS or begins_pass(self._blocks, int(step))

    def releases_after(self, step: int) -> Counter[Release]:
        """What the first `step` steps release, counted."""
        self._require(step, self.steps)
        return self.releases_between(0, step)

    def releases_between(self, first: int, end: int) -> Counter[Release]:
        """What the steps from `first` to before `end` release; a pass that is cut at either end counts whole."""
        return releases(self.segments, end, self.sampling, self.dataset_size, first, self.cap or 0)

    @property
    def kind(self) -> str:
        """How the steps compose: "composition", exactly, or "rdp_filter", where recalibrations may look at the data."""
        return "rdp_filter" if self.filter else "composition"

    @functools.cached_property
    def whole(self) -> Counter[Release]:
        """What all steps release, counted."""
        return self.releases_after(self.steps)

    @property
    def mechanism(self) -> Mechanism:
        """One whole run; of a tuning, one of its K runs."""
        return self.mechanism_after(self.steps)

    def mechanism_after(self, step: int) -> Mechanism:
        """The first `step` steps of a run."""
        return composed(self.releases_after(step))

    @functools.cached_property
    def epsilon(self) -> Bounds:
        """Epsilon at target_delta of the whole plan, of all K runs where there are repetitions.

        A certified bracket; where recalibrations may look at the data the filter's bound, from the first step on.
        """
        return self.promised() if self.filter else self.of_all(self.mechanism)

    def epsilon_after(self, step: int) -> Bounds:
        """Epsilon at target_delta of the first `step` steps of one run."""
        self._require(step, self.steps)
        if self.filter or (step == self.steps and self.repetitions is None):
            return self.epsilon
        return epsilon_of_run(self, self.mechanism_after(step))

    @functools.cached_property
    def within(self) -> bool:
        """Whether the plan as it stands meets its target and its filter, as every plan does that was solved for."""
        return self.holds(self.mechanism)

    def holds(self, mechanism: Mechanism) -> bool:
        """Whether a mechanism in place of the run meets the target: certified, or by the filter where there is one."""
        if self.filter is not None:
            promise = self.filter.epsilon(self.target_delta)
            return self._fits(mechanism) and (self.target_epsilon is None or promise <= self.target_epsilon)
        if self.target_epsilon is None:
            return True
        known = self.epsilon if mechanism == self.mechanism else self.of_all(mechanism)
        return bool(known.upper <= self.target_epsilon)

    def of_all(self, mechanism: Mechanism) -> Bounds:
        """Epsilon at target_delta of a run, through the law of K where there are repetitions."""
        return epsilon_of_tuning(self, mechanism)

    def promised(self, shape: tuple[int, ...] = ()) -> Bounds:
        """What a filter promises, whenever the run ends; nothing where a document holds more than it lets pass."""
        assert self.filter is not None
        upper = np.full(shape, self.filter.epsilon(self.target_delta) if self._whole_fits else np.inf)
        return Bounds(np.zeros(shape), upper, upper, "bound", "ok" if self._whole_fits else "width", "rdp_filter")

    def _fits(self, mechanism: Mechanism) -> bool:
        """Whether the filter lets a mechanism pass in place of the run."""
        assert self.filter is not None
        return bool(spent_renyi(mechanism, self.filter, self.relation) <= self.filter.budget)

    @functools.cached_property
    def _whole_fits(self) -> bool:
        return self._fits(self.mechanism)

    def _require(self, step: int, last: int) -> None:
        number = check("step", step, NON_NEGATIVE)
        if number != int(number) or number > last:
            raise InputError(f"step = {step!r} must be a whole number <= {last}; the plan has {self.steps} steps")
