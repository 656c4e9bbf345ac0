"""Plan: the noise, the batches and the steps of a private training run, and the epsilon that they cost."""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct import account
from jaxacct.bounds import Bounds
from jaxacct.mechanisms import RELATIONS, Mechanism
from jaxacct.training.releases import FIXED, POISSON, SAMPLING, Release, composed
from jaxacct.training.schedule import Block, Filter, Segment, blocks, pass_at, passes, releases
from jaxacct.training.search import tolerance
from jaxacct.validation import (
    COUNT,
    DELTA,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    check,
    check_one,
    choice,
)

if TYPE_CHECKING:
    from jaxacct.training.ledger import Ledger

__all__ = ["Plan"]

_RULES: dict[str, Constraint] = {
    "target_epsilon": POSITIVE,
    "target_delta": DELTA,
    "dataset_size": COUNT,
    "sampling_probability": PROBABILITY,
    "expected_batch_size": POSITIVE,
    "noise_multiplier": POSITIVE,
    "steps": COUNT,
    "epochs": POSITIVE,
}


@dataclass(frozen=True, eq=False)
class Plan:
    """A DP-SGD run, with what is left open solved for, so that its certified epsilon meets a target.

    Every step draws a batch, sums the gradients clipped to norm C, adds noise of standard deviation
    `noise_multiplier * C`, and divides by `expected_batch_size`.  Of noise_multiplier, steps (or epochs) and
    sampling_probability (or expected_batch_size) exactly one is left out when there is a target_epsilon, and none when
    there is not; `steps = ceil(epochs * dataset_size / batch)`.  Afterwards all five are numbers, with a schedule the
    averages over the steps and the overall scale of the noise; the numbers of one step are `at(step)`.

    target_epsilon : > 0, or None: the epsilon is only reported.  target_delta : in (0, 1), always needed.
    dataset_size : a whole number, taken as public.
    sampling : "poisson" (every record by itself), "without_replacement" (expected_batch_size records exactly), or
        "fixed_batches" (every record once in every pass): no amplification, a pass costs as much as one Gaussian.
    relation : "add_or_remove_one", "add_one", "remove_one", or, unless sampling is "poisson", "replace_one".  Of fixed
        batches a record that is added or removed leaves its place empty, so that no other changes its batch.
    noise_schedule : relative noise, one factor per step or pairs (until_step, factor), the last until_step may be None.
        Then the overall scale of the noise is what `noise_multiplier` is, given or solved for.
    batch_schedule : expected batch sizes in the same forms, in place of sampling_probability.
    repetitions : a law of K (`jaxacct.selection`): the target is met by all K runs of a tuning together.
    data_dependent : True where `recalibrate` may be decided by the data or by outputs, used in the end or not.  The
        steps compose through a Renyi filter, fixed here, which meets the target on every path and needs more noise.
    candidates : "iid" or "adaptive", what these runs are taken for (`jaxacct.selection.select`).

    Schedules must be fixed beforehand, or follow rules that do not look at the data.
    Raises InputError for bad values, over- and under-determined plans, and targets that cannot be met.

    >>> plan = Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, expected_batch_size=60_000, epochs=20)
    >>> plan.steps, round(plan.noise_multiplier, 3), round(float(plan.epsilon.upper), 3), plan.epsilon.kind
    (20, 6.219, 3.0, 'certified')
    """

    target_epsilon: Any = None
    target_delta: Any = None
    dataset_size: Any = None
    sampling_probability: Any = None
    expected_batch_size: Any = None
    noise_multiplier: Any = None
    steps: Any = None
    epochs: Any = None
    sampling: str = POISSON
    relation: str = "add_or_remove_one"
    noise_schedule: Any = None
    batch_schedule: Any = None
    repetitions: Any = None
    data_dependent: bool = False
    candidates: str = "iid"
    segments: tuple[Segment, ...] = field(init=False, repr=False)
    filter: Filter | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        from jaxacct.training.left_open import solved  # what rests on this module

        for name in ("target_delta", "dataset_size"):
            if getattr(self, name) is None:
                raise InputError(f"{name} is missing; a plan needs the {name.replace('_', ' ')}")
        self._check()
        self._settle(solved(self))
        if self.data_dependent:
            from jaxacct.training.filters import filter_of

            vars(self)["filter"] = filter_of(self)

    @classmethod
    def of(cls, segments: Sequence[Segment], like: Plan | None = None, **changed: Any) -> Plan:
        """The plan with these segments and, for the rest, the settings given or those of another plan; not solved."""
        settings = {name: getattr(like, name) for name in _KEPT} if like is not None else {}
        plan = object.__new__(cls)
        defaults = {name: f.default for name, f in cls.__dataclass_fields__.items() if f.init}
        vars(plan).update(defaults | {"filter": None} | settings | changed)
        vars(plan)["data_dependent"] = plan.filter is not None
        plan._check()
        plan._settle(tuple(segments))
        return plan

    def _check(self) -> None:
        """Numbers as Python numbers, words as known ones."""
        choice("sampling", self.sampling, SAMPLING)
        choice("relation", self.relation, RELATIONS)
        choice("candidates", self.candidates, ("iid", "adaptive"))
        if self.sampling == POISSON and self.relation == "replace_one":
            raise InputError(
                "relation = 'replace_one' is not supported with sampling = 'poisson'; "
                "use relation='add_or_remove_one' or sampling='without_replacement'"
            )
        for name, rule in _RULES.items():
            if (value := getattr(self, name)) is not None:
                vars(self)[name] = check_one(name, value, rule, "a plan is for one run")
        if self.repetitions is not None:
            from jaxacct.selection.noise import law_shape

            if law_shape(self.repetitions):
                raise InputError("repetitions must be one law of K, not a batch; a plan is for one run")
        if not isinstance(self.data_dependent, bool):
            raise InputError(f"data_dependent = {self.data_dependent!r:.40} must be True or False")
        if self.data_dependent and self.repetitions is not None:
            raise InputError(
                "data_dependent = True with repetitions: the K runs of a tuning must all be the same; drop it"
            )

    def _settle(self, segments: tuple[Segment, ...]) -> None:
        """Take the segments, and the averages over them."""
        steps = segments[-1].end
        batch = math.fsum(s.steps * s.expected_batch_size for s in segments) / steps
        settled = {"segments": segments, "steps": steps, "expected_batch_size": batch}
        settled |= {"sampling_probability": batch / self.dataset_size, "epochs": steps * batch / self.dataset_size}
        if len(segments) == 1:  # the very numbers, not an average of them
            rate = segments[0].sampling_probability
            settled |= {"sampling_probability": rate, "expected_batch_size": segments[0].expected_batch_size}
        if self.noise_multiplier is None:
            settled["noise_multiplier"] = segments[0].noise_multiplier
        vars(self).update(settled)

    def to_json(self) -> str:
        """The plan as one line of JSON, as it is run: `Plan.from_json` gives an equal plan without solving again."""
        from jaxacct.training.documents import plan_document

        return json.dumps(plan_document(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, safe on documents from strangers; InputError, in one line, for others."""
        from jaxacct.training.documents import load, plan_from

        try:
            return plan_from(load(text))
        except (ValueError, TypeError) as error:
            raise InputError(f"text is no plan: {error}; use what Plan.to_json wrote") from None

    def __eq__(self, other: object) -> bool:
        """The same settings and the same segments, to the last digit."""
        return isinstance(other, Plan) and (self is other or self.to_json() == other.to_json())

    def __hash__(self) -> int:
        return hash(self.segments)

    def at(self, step: int) -> Segment:
        """The segment that a step (from 0) belongs to."""
        self._require(step, self.steps - 1)
        return self.segments[bisect.bisect_right(self._ends, step)]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [segment.end for segment in self.segments]

    @functools.cached_property
    def _blocks(self) -> list[Block]:
        return blocks(self.segments, self.dataset_size)

    def pass_of(self, step: int) -> tuple[int, int, int]:
        """Of fixed batches: (number of the pass, its first step, the step after its last) in which a step is.

        A new pass begins where the batch size changes.  Within a pass the batches must be disjoint.
        """
        self._require(step, self.steps - 1)
        if self.sampling != FIXED:
            raise InputError(f"sampling = {self.sampling!r} has no passes; only 'fixed_batches' does")
        return pass_at(self._blocks, int(step))

    @functools.cached_property
    def passes(self) -> list[tuple[int, int]]:
        """(first step, step after the last) of every pass of fixed batches, all in one list."""
        return list(passes(self.segments, self.dataset_size))

    def releases_after(self, step: int) -> Counter[Release]:
        """What the first `step` steps release, counted."""
        self._require(step, self.steps)
        return self.releases_between(0, step)

    def releases_between(self, first: int, end: int) -> Counter[Release]:
        """What the steps from `first` to before `end` release; a pass that is cut at either end counts whole."""
        return releases(self.segments, end, self.sampling, self.dataset_size, first)

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
        return self._account(self.mechanism_after(step))

    def epsilon_curve(self, points: int = 64) -> tuple[np.ndarray, Bounds]:
        """(steps, epsilon after them) of one run at about `points` places, computed in one call; brackets are coarse.

        Of a plan with many different steps it is an upper bound (kind "bound"): few kinds of step, each of which tells
        at least as much as those it stands for, and never above the whole plan's.

        >>> plan = Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4)
        >>> steps, curve = plan.epsilon_curve(2)
        >>> steps.tolist(), curve.upper.round(3).tolist()
        ([2, 4], [1.061, 1.555])
        """
        from jaxacct.training.curve import epsilon_curve

        return epsilon_curve(self, points)

    @functools.cached_property
    def _curve(self) -> tuple[np.ndarray, Bounds]:
        return self.epsilon_curve()

    @property
    def has_curve(self) -> bool:
        """Whether the table of `live_epsilon` is there, so that a look-up takes no time."""
        return "_curve" in vars(self)

    def live_epsilon(self, step: int) -> Bounds:
        """An upper bound of the epsilon of the first `step` steps, from a table that is computed once.

        `upper` is that of the next step in the table, which is at least as large; kind "bound".
        """
        self._require(step, self.steps)
        if step == 0:
            return Bounds(0.0, 0.0, 0.0, "bound", "zero")
        steps, curve = self._curve
        upper = np.maximum.accumulate(curve.upper)[np.searchsorted(steps, step)]
        return Bounds(0.0, upper, upper, "bound", "zero" if upper == 0 else "ok" if np.isfinite(upper) else "width")

    def recalibrate(
        self,
        step: int,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        expected_batch_size: float | None = None,
        data_dependent: bool = False,
    ) -> Plan:
        """The plan whose first `step` steps stay and whose remaining noise is such that the whole meets the target.

        steps or epochs : the new total, counted from the beginning.  expected_batch_size : from here on.  What is left
        out stays; relative noise keeps its schedule.

        data_dependent : True if the change, or that it happens now, may depend on the data or on anything that the run
        has put out.  This is refused unless the plan declared it from its first step, Plan(..., data_dependent=True):
        the run in which nothing is changed is one of the paths, and must be claimed through the filter as well.  Of
        such a plan every change goes through its filter.  Otherwise the composition is exact, and True only of changes
        that look at neither (jaxacct/training/README.md).

        Raises InputError where what is spent already exceeds the target, and for repetitions: the K runs of a tuning
        must all be the same.

        >>> plan = Plan(target_epsilon=1.0, target_delta=1e-5, dataset_size=50, sampling_probability=1.0, steps=10)
        >>> [(s.start, s.steps, round(s.noise_multiplier, 2)) for s in plan.recalibrate(5, steps=20).segments]
        [(0, 5, 11.8), (5, 15, 20.43)]
        """
        from jaxacct.training.recalibration import recalibrated

        return recalibrated(self, step, steps, epochs, expected_batch_size, data_dependent)

    def allows(self, ledger: Ledger, next_step: int, partition: str | None = None) -> bool:
        """Whether what a ledger holds and one more step stay within the target, certified; True without a target.

        Of a plan with a Renyi filter they must stay within its budget, too.

        Costs nothing while the ledger follows the plan.  With repetitions only the current run of the ledger counts.
        partition : of fixed batches, the one that the step will be noted with; left out, the step is taken to go on
        with that of the last entry.

        Raises InputError where the ledger has a Rényi filter that the plan does not share: nothing can be certified.
        """
        from jaxacct.training.budget import allows

        return allows(self, ledger, next_step, partition)

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

    def _fits(self, mechanism: Mechanism) -> bool:
        """Whether the filter lets a mechanism pass in place of the run."""
        from jaxacct.training.filters import spent_renyi

        assert self.filter is not None
        return bool(spent_renyi(self, mechanism, self.filter) <= self.filter.budget)

    @functools.cached_property
    def _whole_fits(self) -> bool:
        return self._fits(self.mechanism)

    def of_all(self, mechanism: Mechanism) -> Bounds:
        """Epsilon at target_delta of a run, through the law of K where there are repetitions."""
        if self.repetitions is None:
            return self._account(mechanism)
        from jaxacct import selection

        return self._account(selection.select(mechanism, self.repetitions, candidates=self.candidates))

    def _account(self, mechanism: Mechanism) -> Bounds:
        rtol = 0.2 * tolerance(self.target_epsilon or 1.0)
        return account.epsilon(mechanism, self.target_delta, relation=self.relation, rtol=rtol)

    def promised(self, shape: tuple[int, ...] = ()) -> Bounds:
        """What a filter promises, whenever the run ends; nothing where a document holds more than it lets pass."""
        assert self.filter is not None
        upper = np.full(shape, self.filter.epsilon(self.target_delta) if self._whole_fits else np.inf)
        return Bounds(np.zeros(shape), upper, upper, "bound", "ok" if self._whole_fits else "width", "rdp_filter")

    def _require(self, step: int, last: int) -> None:
        number = check("step", step, NON_NEGATIVE)
        if number != int(number) or number > last:
            raise InputError(f"step = {step!r} must be a whole number <= {last}; the plan has {self.steps} steps")


_KEPT = (
    "target_epsilon",
    "target_delta",
    "dataset_size",
    "sampling",
    "relation",
    "repetitions",
    "candidates",
    "filter",
)
