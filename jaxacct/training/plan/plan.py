"""Plan: the noise, the batches and the steps of a private training run, and their epsilon."""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from jaxacct import selection
from jaxacct.calibration.search import status_of_upper_end
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import COUNT, NON_NEGATIVE, POSITIVE, InputError, check, check_one, shown, with_hints
from jaxacct.interop.documents import from_json, to_json
from jaxacct.mechanisms import MatrixMechanism, Mechanism, PureDP
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE, NUMBERS, nearest_slots
from jaxacct.selection.law_of_k import Law
from jaxacct.strategies.strategy import SingleParticipation, Strategy, Taps, require_groups
from jaxacct.training.plan import solver
from jaxacct.training.plan.early_stop import EarlyStop, early_stop_of, with_early_stop
from jaxacct.training.plan.segments import (
    Block,
    Schedule,
    Segment,
    begins_pass,
    blocks,
    even_steps,
    gathered,
    merged,
    pass_at,
    releases,
    scaled,
    slots_for,
    stand_ins,
)
from jaxacct.training.plan.solver import Filter, PlanRequest, Solution
from jaxacct.training.step import step_mechanisms as rules
from jaxacct.training.step.step_mechanisms import Release, Turn, composed, require_kept

MANY_KINDS = 16
"""Above this number of different releases `Plan.epsilon_curve` uses stand-ins, which leak at least as much."""
_CURVE_RTOL = 0.02
"""Relative width of the brackets of epsilon along a curve.  Wide brackets save time and are still valid bounds."""
_FORMAT, _VERSION = "jaxacct.plan", 1
"""Format and version that a document states; no other version is read."""
_MAX_SEGMENTS = 10**6
"""Largest number of segments in a document; a longer list is refused unread."""
_TERMS = ("target_epsilon", "target_delta", "dataset_size", "sampling", "relation")
"""Settings that a plan's document holds unchanged."""
UNUSUAL = {"candidates": "iid", "unit": "record"} | dict.fromkeys(
    ("cap", "noise", "groups", "early_stop", "rates_digest")
)
"""Usual values of settings; a plan's document holds such a setting only if its value differs."""
_RATE = replace(NUMBERS["sampling_probability"], lower_open=True, remedy="use a number above 0 and at most 1")
_SEGMENT_NUMBERS = {name: NUMBERS[name] for name in ("steps", "noise_multiplier")}
_SEGMENT_NUMBERS |= {"sampling_probability": _RATE, "expected_batch_size": POSITIVE}
"""Numbers of a segment, in the order in which a document lists them, and the values that each may have."""


class Allowance(Protocol):
    """What `Plan.allows` needs of a ledger.  This module cannot import `Ledger`, whose module imports this one."""

    def leaves_room(self, plan: Plan, next_step: int, partition: str | None = None, steps: int = 1) -> bool:
        """Return whether the ledger's entries and the plan's next `steps` steps meet the plan's target and filter."""


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Plan(PlanRequest):
    """Settings of a DP-SGD run.  The plan solves for a missing setting, so that its certified epsilon meets a target.

    A step draws a batch, clips each gradient to norm C, and sums the gradients.  It adds noise of standard deviation
    `noise_multiplier * C` to the sum, and divides by `expected_batch_size`.

    With a target_epsilon leave out exactly one of noise_multiplier, steps (or epochs), and sampling_probability (or
    expected_batch_size); without it leave out none.
    With epochs, the number of steps is `ceil(epochs * dataset_size / expected_batch_size)`.

    The plan is frozen.  Its fields hold all these settings as numbers.  With a schedule, sampling_probability and
    expected_batch_size are averages over the steps, noise_multiplier is the overall scale of the noise, and `at(step)`
    has the numbers of a step.  Fix a schedule before the run, or by a rule that does not look at the data.

    Parameters
    ----------
    target_epsilon : > 0, or None to solve for nothing.
    target_delta : in (0, 1), always needed.
    dataset_size : the number of records, always needed, and assumed to be public.
    sampling_probability, expected_batch_size : the rate in (0, 1], or that rate times dataset_size, divided by `groups`
        if there are any.  The argument `batch_size` is another name of expected_batch_size.
    noise_multiplier : > 0, the standard deviation of the noise divided by the clip norm C, the most by which adding or
        removing a record changes the sum.
    steps, epochs : the length of the run, in steps or in passes over the data.
    sampling : the batch rule, as for `jaxacct.dp_sgd` ("fixed_batches" is another name of "shuffled"), or
        "fixed_order": every pass takes each record once, always at the same place.  A round or pass that has begun
        counts in full.  A pass over fixed batches and a whole run in a fixed order each cost one Gaussian release.
    relation : "add_or_remove_one" (the default), "add_one", "remove_one", "zero_out" (a record's gradient becomes 0,
        its place stays) or "replace_one", which Poisson and cyclic Poisson sampling refuse.  Fixed batches and a fixed
        order have the default "zero_out".  With them a relation that adds or removes a record is refused, since other
        records would move to other batches.
    noise_schedule : factors of noise_multiplier, one per step or as pairs (until_step, factor); the last until_step may
        be None, the end of the run.
    batch_schedule : expected batch sizes, one per step or as pairs (until_step, size), in place of a rate.
    repetitions : the distribution of K, the number of runs of a tuning (`jaxacct.selection`).  All K runs together meet
        the target.
    data_dependent : True if the data or outputs of the run may decide whether and how you call `recalibrate`, even if
        you then never do.  The steps compose through a Renyi filter that is fixed when the plan is made.  It meets the
        target whatever you decide, and needs more noise than exact composition.
    candidates : "iid" or "adaptive": the assumption on the K runs (`jaxacct.selection.select`).
    slots : the number of slots of a round of random allocation, in place of the batch size dataset_size/slots.  The
        default is ceil(dataset_size/expected_batch_size), so that no batch is expected to be larger.
    cap : the largest batch of truncated Poisson sampling, by default one that costs practically nothing
        (`jaxacct.cap_for`).
    noise : the strategy of correlated noise, such as ``strategies.Banded(32)``, for "cyclic_poisson" or "fixed_order".
        By default all noise is independent.  Step i adds row i of C^-1 Z, where C is the strategy's matrix and Z is
        independent noise.  The standard deviation of Z is noise_multiplier times the clip norm times the sensitivity of
        C.  With "cyclic_poisson" that sensitivity is the largest norm of a column of C.  With "fixed_order" it is taken
        for a record whose steps are at least ceil(dataset_size / expected_batch_size) apart.  The noise multiplier must
        not fall during the run.
    groups : the number of groups of cyclic Poisson sampling, at least the strategy's number of bands, which is the
        default.  The rate is groups * expected_batch_size / dataset_size.
    unit : "record" or "user".  A step draws units, dataset_size counts units, and neighbouring data sets differ in one
        unit.  With "user", `Trainer.fit` gets the user of each example.
    early_stop : an `EarlyStop`, a rule that ends the run when a private score no longer rises.  The plan's epsilon
        includes its answers.
    sampling_rates : for Poisson sampling, in place of one rate: a rate in (0, 1] for each record (or user), of shape
        (dataset_size,).  The rates must be public, and chosen without looking at the data: rate i belongs to place i,
        whatever record is there.  ``sampling_probability`` is then the largest rate, and ``expected_batch_size`` the
        sum of the rates.  The plan, its ledger and its runs claim the epsilon of the largest rate; ``own_epsilon`` has
        the epsilon of each record.
    rates_digest : no argument, but a field: the SHA-256 of sampling_rates, which the plan's document holds in their
        place.

    Raises
    ------
    InputError : too many or too few settings are given, or no value of the missing setting meets the target.

    References
    ----------
    Abadi et al. 2016 (DP-SGD); Feldman and Zrnic 2021 (Renyi filters); Boenisch et al. 2023, arXiv 2303.17046 (a rate
    for each record).  The accounting for each batch rule: jaxacct/training/plan/README.md.

    >>> plan = Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, expected_batch_size=60_000, epochs=20)
    >>> plan.steps, round(plan.noise_multiplier, 3), round(float(plan.epsilon.upper), 3), plan.epsilon.kind
    (20, 6.219, 3.0, 'certified')
    """

    sampling_probability: float
    expected_batch_size: float
    noise_multiplier: float
    steps: int
    epochs: float
    segments: tuple[Segment, ...] = field(init=False, repr=False)
    filter: Filter | None = field(init=False, repr=False)

    @with_hints
    def __init__(
        self,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        dataset_size: int | None = None,
        sampling_probability: float | None = None,
        expected_batch_size: float | None = None,
        noise_multiplier: float | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        sampling: str = rules.POISSON,
        relation: str | None = None,
        noise_schedule: Schedule | None = None,
        batch_schedule: Schedule | None = None,
        repetitions: Law | None = None,
        data_dependent: bool = False,
        candidates: str = "iid",
        slots: int | None = None,
        cap: int | None = None,
        unit: str = "record",
        batch_size: float | None = None,
        noise: Strategy | None = None,
        groups: int | None = None,
        early_stop: EarlyStop | None = None,
        sampling_rates: ArrayLike | None = None,
    ) -> None:
        if batch_size is not None:
            if expected_batch_size is not None:
                raise InputError("expected_batch_size and batch_size say the same thing twice; leave one of them out")
            expected_batch_size = batch_size
        given: dict[str, Any] = locals() | {"rates_digest": None}
        request = PlanRequest(**solver.checked({name: given[name] for name in solver.DEFAULTS}))
        self._hold(vars(request), solver.solve(request))

    @classmethod
    def of(cls, segments: Sequence[Segment], like: Plan | None = None, **changed: Any) -> Self:
        """Return a plan with the given segments, without solving.

        segments : the stretches of the run, from step 0, each beginning where the previous one ends.
        like : a plan from which the new plan takes its other settings; None for the defaults.
        changed : settings by name, which replace those; noise_multiplier and filter may be among them.

        Raises
        ------
        InputError : the segments do not follow one another, or contradict themselves or another setting.
        """
        names = (*_TERMS, *UNUSUAL, "sampling_rates", "repetitions", "filter")
        kept = {} if like is None else {name: getattr(like, name) for name in names}
        known = {*names, "noise_multiplier"}
        if unknown := sorted(changed.keys() - known):
            raise InputError(f"{unknown[0]} is no setting of a plan of segments; use one of {', '.join(sorted(known))}")
        plan = cls._of_rows([tuple(segment)[1:] for segment in segments], kept | changed)
        for place, (given, own) in enumerate(zip(segments, plan.segments, strict=True)):
            if given[0] != own.start:
                raise InputError(
                    f"segments[{place}].start = {given[0]!r:.40} must be {own.start}, the number of steps before it; "
                    "let each segment begin where the one before ends"
                )
        return plan

    @classmethod
    def _of_rows(cls, rows: Sequence[Sequence[Any]], given: dict[str, Any]) -> Self:
        """Make a plan from settings and from one row of `_SEGMENT_NUMBERS` for each segment. Both are checked here."""
        settings = solver.DEFAULTS | {"filter": None} | given
        chosen = _filter(settings.pop("filter"))
        settings = solver.checked({**settings, "data_dependent": chosen is not None})
        if settings["sampling"] == rules.TRUNCATED and settings["cap"] is None:
            raise InputError("cap is missing; give the largest batch of truncated Poisson sampling")
        segments, noise = _segments(rows), settings["noise_multiplier"]
        noise = segments[0].noise_multiplier if noise is None else noise
        plan = object.__new__(cls)
        plan._hold(settings, Solution(segments, noise, chosen, cap=settings["cap"]))
        return plan

    def _hold(self, settings: dict[str, Any], solution: Solution) -> None:
        """Set all fields; `sampling_probability` and `expected_batch_size` become averages over the steps."""
        segments, noise, chosen, epsilon, cap = solution
        self._require_sizes(settings, segments)
        steps, size = segments[-1].end, settings["dataset_size"]
        batch = math.fsum(s.steps * s.expected_batch_size for s in segments) / steps
        rate = batch / size * (settings["groups"] or 1)
        averages = {"steps": steps, "epochs": steps * batch / size, "noise_multiplier": noise}
        own = {segment[3:] for segment in segments}
        if len(own) == 1:  # one rate and batch size in all segments: an average would be rounded
            rate, batch = segments[0][3:]
        given = settings["sampling_rates"]
        if settings["rates_digest"] and (len(own) > 1 or (given is not None and own != {solver.rate_and_batch(given)})):
            raise InputError("segments must all have the largest of sampling_rates, and their sum as batch size")
        averages |= {"sampling_probability": rate, "expected_batch_size": batch}
        one_round = settings["sampling"] == rules.ALLOCATION and len(own) == 1
        averages |= {"slots": int(nearest_slots(segments[0].sampling_probability)) if one_round else None, "cap": cap}
        if settings["sampling"] in rules.WITH_NOISE:
            averages["noise"] = _strategy_of_run(settings["noise"], settings["groups"], segments)
        vars(self).update(settings | averages | {"segments": segments, "filter": chosen})
        if epsilon is not None:
            vars(self)["epsilon"] = epsilon  # the solver has found it already

    @staticmethod
    def _require_sizes(settings: dict[str, Any], segments: Sequence[Segment]) -> None:
        """Raise InputError unless each segment's rate fits its batch size.  The accounting uses the rate alone."""
        n, groups, sampling = settings["dataset_size"], settings["groups"] or 1, settings["sampling"]
        for place, (_, _, _, rate, size) in enumerate(segments):
            must, right = f"sampling_probability * dataset_size = {n * rate!r}", size * groups / n
            near = math.isclose(n * rate, size * groups, rel_tol=1e-9)
            if settings["rates_digest"] is not None:  # `rate` is the largest rate
                must, near = f"at most {must}", size <= n * rate * (1.0 + 1e-9)
            elif sampling in rules.OF_ONE_SIZE:
                must, near = f"{must}, a whole number,", near and rate == right and size == round(size)
            elif sampling == rules.ALLOCATION:
                right = 1.0 / slots_for(n, size)
                must, near = f"{must} for whole slots, such as {n * right!r},", near and rate == right
            elif sampling == rules.CYCLIC:
                must = f"sampling_probability * dataset_size / groups = {n * rate / groups!r}"
                near = near and round(n * rate / size) == groups
            if not near:
                other = f", or the rate {right!r}" if right <= 1.0 else ""
                raise InputError(
                    f"segments[{place}].expected_batch_size = {size!r} must be {must} at sampling_probability = "
                    f"{rate!r}; use that{other}"
                )

    @property
    def truncation(self) -> tuple[int, int]:
        """The pair (cap, dataset_size) for truncated Poisson sampling, (0, 0) for any other batch rule."""
        return (self.cap or 0, self.dataset_size if self.cap else 0)

    @functools.cached_property
    def _unit(self) -> float:
        assert self.noise is not None
        return solver.unit_of_noise(self.noise, self.sampling, self.batches)

    @property
    def batches(self) -> int:
        """Number of batches in a pass over the data, each of the first segment's size."""
        return math.ceil(self.dataset_size / self.segments[0].expected_batch_size)

    @property
    def shared(self) -> bool:
        """Whether the plan has cyclic Poisson sampling and correlated noise."""
        return self.sampling == rules.CYCLIC and self.noise is not None and self.noise.overlap > 1

    def turn(self, step: int) -> Turn:
        """Return the `Turn` of a step, with 0 groups if the batch rule has none."""
        return Turn(step, self.groups or 0, self.at(step).noise_multiplier)

    def taps(self, step: int) -> Taps | None:
        """Return the weights that turn independent noise into the noise of a step; None if it stays independent.

        The independent noise has standard deviation `noise_multiplier` times the clip norm.
        """
        if self.noise is None or not (self.shared or self.sampling == rules.ORDER):
            return None
        own, past, keep, of_sum, of_fresh = self.noise.taps(step)
        return Taps(own * self._unit, past, keep, of_sum, of_fresh * self._unit)

    def require_noise_of(self, other: Plan) -> None:
        """Raise InputError if `other.taps` gives weights, and this plan has another strategy, groups or batch size."""
        if other.taps(0) is None:
            return
        same = False
        if self.noise is not None and other.noise is not None:
            # `for_steps` raises InputError if the matrix of `other` cannot have so many steps
            with contextlib.suppress(InputError):
                same = other.noise.for_steps(self.steps) == self.noise and other._unit == self._unit
        require_kept("noise", same)
        require_kept("groups", self.groups == other.groups)
        require_kept("expected_batch_size", self.segments[0][3:] == other.segments[0][3:])

    def at(self, step: int) -> Segment:
        """Return the segment that contains a step; steps count from 0."""
        self._require(step, self.steps - 1)
        return self.segments[bisect.bisect_right(self.segments, step, key=lambda segment: segment.end)]

    @functools.cached_property
    def _blocks(self) -> list[Block]:
        return blocks(self.segments, self.sampling, self.dataset_size)

    def pass_of(self, step: int) -> tuple[int, int, int]:
        """Return (number, first step, last step + 1) of the pass that contains a step.

        With fixed batches a pass goes over the data, and with cyclic Poisson sampling through the groups.  With random
        allocation a pass is a round, in which each record must keep its slot.  In these three cases the batches of one
        pass must be disjoint.  With a fixed order the whole run is one pass.  A new batch size begins a new pass.
        """
        self._require(step, self.steps - 1)
        if self.sampling not in rules.BY_PASS:
            raise InputError(f"sampling = {self.sampling!r} has no passes; only {' and '.join(rules.BY_PASS)} do")
        return pass_at(self._blocks, int(step))

    def begins_pass(self, step: int) -> bool:
        """Return whether a pass begins at a step, or a whole last pass ends there; True if there are no passes."""
        self._require(step, self.steps)
        return self.sampling not in rules.BY_PASS or begins_pass(self._blocks, int(step))

    def releases_after(self, step: int) -> Counter[Release]:
        """Return how often each release occurs in the first `step` steps."""
        self._require(step, self.steps)
        return self.releases_between(0, step)

    def releases_between(self, first: int, end: int) -> Counter[Release]:
        """Return the counts of releases in steps `first` to `end - 1`.  A pass partly in this range counts in full."""
        return releases(self.segments, end, self.sampling, self.dataset_size, first, self.cap or 0)

    @functools.cached_property
    def whole(self) -> Counter[Release]:
        """Counts of all releases of the plan."""
        return self.releases_after(self.steps)

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism of one run with its early stop; with repetitions, of each of the K runs."""
        return self.mechanism_after(self.steps)

    def mechanism_after(self, step: int) -> Mechanism:
        """Return the mechanism of the first `step` steps and, if `step` > 0, of all answers of the early-stop rule."""
        return with_early_stop(composed(self.releases_after(step)), self.early_stop if step else None)

    @functools.cached_property
    def epsilon(self) -> Bounds:
        """Certified bounds of epsilon at target_delta of the whole plan; with repetitions, of all K runs together.

        With data_dependent = True the upper bound is the filter's promise, even for a run that is never recalibrated.
        """
        return self.promised() if self.filter else self.of_all(self.mechanism)

    @functools.cached_property
    def own_epsilon(self) -> Bounds:
        """Epsilon at target_delta of each record, of shape (dataset_size,), for a plan with sampling_rates.

        Entry i is the epsilon of the whole plan at the rate of record i, and holds for data sets that differ in record
        i alone.  No entry is above `epsilon`, which covers all records.

        >>> plan = Plan(None, 1e-5, 3, noise_multiplier=5.0, steps=4, sampling_rates=[1.0, 0.1, 0.1])
        >>> plan.own_epsilon.upper.round(3).tolist(), round(float(plan.epsilon.upper), 3)
        ([1.555, 0.148, 0.148], 1.555)
        """
        rates, place = np.unique(self.require_rates(), return_inverse=True)
        found = self.of_all(with_early_stop(composed(self.whole, rates), self.early_stop))
        # at the largest rate `found` may exceed `epsilon` in its last digits
        most = float(self.epsilon.upper)
        lower, estimate, upper = (np.minimum(end, most)[place] for end in (found.lower, found.estimate, found.upper))
        words = (np.asarray(word)[place] for word in (found.kind, found.status, found.engine))
        return Bounds(lower, estimate, upper, *words)

    def require_rates(self) -> np.ndarray:
        """Return the records' sampling rates; raise InputError if all have one rate, or a document left them out."""
        if self.sampling_rates is not None:
            return self.sampling_rates
        if self.rates_digest is None:
            raise InputError("sampling_rates are not given, so each record has plan.epsilon; use that")
        raise InputError(
            "sampling_rates are left out of a plan's document, which holds their SHA-256 only; make the plan anew, by "
            "Plan(..., sampling_rates=rates)"
        )

    def epsilon_after(self, step: int) -> Bounds:
        """Return epsilon at target_delta of a run's first `step` steps, or of the whole plan if it has a filter."""
        self._require(step, self.steps)
        if self.filter or (step == self.steps and self.repetitions is None):
            return self.epsilon
        return solver.epsilon_of_run(self, self.mechanism_after(step))

    @functools.cached_property
    def within(self) -> bool:
        """Whether the plan's epsilon meets its target and its steps fit its filter, as in every solved plan."""
        return self.holds(self.mechanism)

    def holds(self, mechanism: Mechanism) -> bool:
        """Return whether a run with this mechanism surely meets the plan's target and filter, if there are any."""
        if self.filter is not None:
            promise = self.filter.epsilon(self.target_delta)
            return self._fits(mechanism) and (self.target_epsilon is None or promise <= self.target_epsilon)
        if self.target_epsilon is None:
            return True
        known = self.epsilon if mechanism == self.mechanism else self.of_all(mechanism)
        return bool(known.upper <= self.target_epsilon)

    def of_all(self, mechanism: Mechanism) -> Bounds:
        """Return epsilon at target_delta of a run with this mechanism; with repetitions, of K such runs together."""
        if self.repetitions is not None:
            mechanism = selection.select(mechanism, self.repetitions, candidates=self.candidates)
        return solver.epsilon_of_run(self, mechanism)

    def promised(self, shape: tuple[int, ...] = ()) -> Bounds:
        """Return the filter's promise as upper bounds, valid wherever the run ends; inf if its budget is exceeded."""
        assert self.filter is not None
        fits = self._fits(self.mechanism)
        upper = np.full(shape, self.filter.epsilon(self.target_delta) if fits else np.inf)
        return Bounds(np.zeros(shape), upper, upper, "bound", "ok" if fits else "width", "rdp_filter")

    def _fits(self, mechanism: Mechanism) -> bool:
        """Return whether the filter's budget suffices for a run with this mechanism."""
        assert self.filter is not None
        return bool(solver.spent_renyi(mechanism, self.filter, self.relation) <= self.filter.budget)

    def _require(self, step: int, last: int) -> None:
        number = check("step", step, NON_NEGATIVE)
        if number != int(number) or number > last:
            raise InputError(f"step = {step!r} must be a whole number <= {last}; the plan has {self.steps} steps")

    def _repr_html_(self) -> str:
        """Return an HTML table of the run's epsilon and its settings, with all their digits."""
        names = ("dataset_size", "unit", "sampling", "slots", "cap", "sampling_probability", "expected_batch_size")
        shown = (*names, "noise_multiplier", "steps", "epochs", "relation")
        pairs = [(name, repr(getattr(self, name))) for name in shown if getattr(self, name) is not None]
        if self.rates_digest is not None:
            pairs.append(("sampling_rates", f"one for each {self.unit}; sampling_probability is the largest"))
        target = "none" if self.target_epsilon is None else repr(self.target_epsilon)
        goal = [("target epsilon", target), ("target delta", repr(self.target_delta))]
        law = [] if self.repetitions is None else [("repetitions", f"{self.repetitions!r}, {self.candidates}")]
        parts = [("segments", f"{len(self.segments):,}; the numbers are averages")] if len(self.segments) > 1 else []
        spent = ("epsilon", f"{self.epsilon:.6g}")
        short = [] if self.status == "ok" else [("status", f"{self.status}: the target is not reached")]
        return markup.fields("Plan", [spent, *short, *goal, *pairs, *law, *parts])

    @property
    def status(self) -> str:
        """Whether the plan's epsilon comes close to the target: "ok", "not_binding" or "loose".

        "ok": epsilon is at most 0.1 % below the target, or there is no target.  "not_binding": it is further below,
        since the search ended at a noise multiplier of 0.1 or with all records in every step.  "loose": it is further
        below for another reason, for example since one more step would exceed the target.

        >>> Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4).status
        'ok'
        """
        if self.target_epsilon is None:
            return "ok"
        noise, rate = (min(values) for values in zip(*(s[2:4] for s in self.segments), strict=True))
        at_limit = noise == NOISE_RANGE[0] or rate == 1.0
        return status_of_upper_end(float(self.epsilon.upper), self.target_epsilon, 1e-3, at_limit)

    def to_json(self) -> str:
        """Return the solved plan as one line of JSON.  `Plan.from_json` makes an equal plan of it without solving."""
        return json.dumps(plan_document(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote; raise InputError for other texts.  Strangers' texts do no harm."""
        try:
            return cls.from_document(load(text))
        except (ValueError, TypeError) as error:
            raise InputError(f"text is no plan: {error}; use what Plan.to_json wrote") from None

    @classmethod
    def from_document(cls, node: object) -> Self:
        """Return the plan of a `plan_document`; raise InputError for other objects.  Epsilon is computed, not read."""
        wanted = ("format", "version", *_TERMS, "noise_multiplier", "segments", "filter", "repetitions")
        if not isinstance(node, dict) or set(node) - set(UNUSUAL) != set(wanted):
            raise InputError(f"plan must be an object with the keys {', '.join(wanted)}")
        if node["format"] != _FORMAT or node["version"] != _VERSION or type(node["version"]) is not int:
            raise InputError(f"plan: format and version must be {_FORMAT!r} and {_VERSION}, which this release reads")
        settings = {name: node[name] for name in (*_TERMS, "noise_multiplier")}
        if settings["sampling"] == rules.FIXED and settings["relation"] in solver.DISPLACING:
            # in older versions an absent record left its place empty, which is "zero_out" now
            settings["relation"] = "zero_out"
        if settings["noise_multiplier"] is None:
            raise InputError("plan: noise_multiplier is missing; give a number")
        free = {"type": "PureDP", "epsilon": 0.0}
        settings["repetitions"] = _read("law", node["repetitions"], "Selection", mechanism=free, bound="worst_case")
        settings["filter"] = node["filter"]
        settings |= {name: node.get(name, usual) for name, usual in UNUSUAL.items()}
        once = {"type": "SingleParticipation"}
        around = {"noise_multiplier": 1.0, "participation": once}
        settings["noise"] = _read("strategy", settings["noise"], "MatrixMechanism", **around)
        settings["early_stop"] = early_stop_of(settings["early_stop"])
        needed = {rules.CYCLIC: ("noise", "groups"), rules.ORDER: ("noise",)}.get(str(settings["sampling"]), ())
        if any(settings[name] is None for name in needed):
            raise InputError(f"plan: {' and '.join(needed)} must be given with sampling = {settings['sampling']!r}")
        return cls._of_rows(node["segments"], settings)

    def __eq__(self, other: object) -> bool:
        """Return whether two plans have the same settings and segments, to the last digit."""
        return isinstance(other, Plan) and (self is other or self.to_json() == other.to_json())

    def __hash__(self) -> int:
        return hash(self.segments)

    def epsilon_curve(self, points: int = 64) -> tuple[np.ndarray, Bounds]:
        """Return at most `points` evenly spaced steps of one run, and coarse bounds of epsilon after each of them.

        If the plan has many different steps, stand-ins that leak at least as much replace them.  Each epsilon is then
        only an upper bound (kind "bound"), at most that of the whole plan.

        >>> plan = Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4)
        >>> steps, curve = plan.epsilon_curve(2)
        >>> steps.tolist(), curve.upper.round(3).tolist()
        ([2, 4], [1.061, 1.555])
        """
        at = even_steps(0, self.steps, int(check("points", points, COUNT)))
        if self.filter:
            return at, self.promised(at.shape)
        counts = [self.releases_after(int(step)) for step in at]
        if len(self.whole) <= MANY_KINDS:
            return at, solver.epsilon_of_several(self, counts, _CURVE_RTOL)
        known = stand_ins(functools.reduce(operator.or_, counts), 3 * MANY_KINDS)
        curve = solver.epsilon_of_several(self, [gathered(each, known) for each in counts], _CURVE_RTOL)
        upper = np.minimum(curve.upper, self.epsilon.upper)
        return at, Bounds(np.zeros(at.size), upper, upper, "bound", curve.status, curve.engine)

    @functools.cached_property
    def _curve(self) -> tuple[list[int], list[float]]:
        steps, curve = self.epsilon_curve()
        return steps.tolist(), np.maximum.accumulate(curve.upper).tolist()

    def live_epsilon(self, step: int) -> Bounds:
        """Return an upper bound of epsilon after `step` steps: `epsilon_curve`'s bound at its first step >= `step`."""
        self._require(step, self.steps)
        if step == 0:
            return Bounds(0.0, 0.0, 0.0, "bound", "zero")
        steps, uppers = self._curve
        upper = uppers[bisect.bisect_left(steps, step)]
        return Bounds(0.0, upper, upper, "bound", "zero" if upper == 0 else "ok" if math.isfinite(upper) else "width")

    def recalibrate(
        self,
        step: int,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        expected_batch_size: float | None = None,
        data_dependent: bool = False,
    ) -> Self:
        """Return a plan that keeps the first `step` steps, and meets the target by new noise in the later steps.

        A setting that you do not give stays as it is.  With a `noise_schedule`, every step keeps its factor.

        Parameters
        ----------
        step : the number of steps to keep.
        steps, epochs : the new total, counted from the beginning.
        expected_batch_size : that of the later steps.
        data_dependent : True if the change, or its moment, may depend on the data or on any output of the run.  This
            needs a plan made by Plan(..., data_dependent=True), whose filter all its new plans fit.  Any other plan
            composes its steps exactly, which is valid only if no change depends on data or outputs
            (jaxacct/training/plan/README.md).

        Raises
        ------
        InputError : the steps so far exceed the target, or the plan has repetitions, whose runs must all be the same.

        >>> plan = Plan(target_epsilon=1.0, target_delta=1e-5, dataset_size=50, sampling_probability=1.0, steps=10)
        >>> [(s.start, s.steps, round(s.noise_multiplier, 2)) for s in plan.recalibrate(5, steps=20).segments]
        [(0, 5, 11.8), (5, 15, 20.43)]
        """
        target = self.target_epsilon
        if target is None:
            raise InputError("target_epsilon is missing; recalibrate a plan that has one")
        if self.repetitions is not None:
            raise InputError("repetitions are given, and the K runs of a tuning must all be the same; make a new plan")
        self._require(step, self.steps)
        if self.sampling in (rules.ALLOCATION, *rules.WITH_NOISE) and not self.begins_pass(step):
            _, first, last = self.pass_of(min(int(step), self.steps - 1))
            what = "round" if self.sampling == rules.ALLOCATION else "pass"
            raise InputError(
                f"step = {step} is within the {what} of steps {first} to {last - 1}, which counts whole; recalibrate "
                f"at step {first}, or at the end of a whole {what}"
            )
        spent, rest = solver.rest_of_run(self, self.segments, int(step), steps, epochs, expected_batch_size)
        whole_run = blocks(merged([*spent, *rest]), self.sampling, self.dataset_size)
        if self.sampling in (rules.ALLOCATION, *rules.WITH_NOISE) and not begins_pass(whole_run, int(step)):
            raise InputError(
                f"step = {step} would be within a round: the batch size is that of the steps before it, whose last "
                "round was cut short; give another expected_batch_size"
            )
        chosen = self.filter
        if data_dependent and chosen is None:
            raise InputError(
                "data_dependent = True needs a plan that declared it from its first step; make it with "
                "Plan(..., data_dependent=True), whose claim holds whether anything is changed or not"
            )
        if chosen is None and spent and self.epsilon_after(step).upper >= target:
            raise InputError(f"step = {step}: what is spent already exceeds target_epsilon = {target!r}; raise it")
        start = rest[0].noise_multiplier
        given = self, spent, scaled(rest, 1.0 / start), start
        scale = solver.noise_for(*given) if chosen is None else solver.noise_in_filter(chosen, *given)
        whole = merged([*spent, *scaled(given[2], scale)])
        return type(self).of(whole, self, filter=chosen, noise_multiplier=scale)

    def allows(self, ledger: Allowance, next_step: int, partition: str | None = None, steps: int = 1) -> bool:
        """Return whether a ledger's entries and the plan's next steps surely meet the target and fit the Renyi filter.

        Without target and filter the answer is True.  If a run in the ledger has a filter, raise InputError unless the
        plan has one of the same order.  With repetitions only the ledger's current run counts.

        next_step : the first of the next `steps` steps.
        partition : the fingerprint of the pass or round of `next_step`, by default that of the ledger's last step
            entry.  If that entry has no fingerprint, each of the next steps counts alone.
        """
        if self.target_epsilon is None and self.filter is None:
            return True
        return 0 <= next_step <= self.steps - steps and ledger.leaves_room(self, next_step, partition, steps)


def require_plan(plan: Any) -> None:
    """Raise InputError unless this is a Plan."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan = {shown(plan)} must be a training.Plan; use Plan(target_epsilon=..., ...)")


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a dict that can be written as JSON; `Plan.from_document` reads it."""
    law = plan.repetitions
    unusual: dict[str, Any] = {name: x for name, usual in UNUSUAL.items() if (x := getattr(plan, name)) != usual}
    if "noise" in unusual:
        unusual["noise"] = _part("strategy", MatrixMechanism(unusual["noise"], 1.0, SingleParticipation()))
    if "early_stop" in unusual:
        unusual["early_stop"] = list(unusual["early_stop"].numbers)
    return {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(plan, name) for name in (*_TERMS, "noise_multiplier")},
        "segments": [list(segment[1:]) for segment in plan.segments],
        "filter": list(plan.filter) if plan.filter else None,
        "repetitions": None if law is None else _part("law", selection.select(PureDP(0.0), law)),
        **unusual,
    }


def load(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError if an object has a key twice, or a number is not finite."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    def number(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number here")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _segments(rows: Sequence[Sequence[Any]]) -> tuple[Segment, ...]:
    """Make a run's segments, the first at step 0, from the numbers of each. Raise InputError for impossible ones."""
    if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_SEGMENTS:
        raise InputError(f"segments must be a list of 1 to {_MAX_SEGMENTS} segments; give so many")
    found: list[Segment] = []
    for place, row in enumerate(rows):
        if not isinstance(row, list | tuple) or len(row) != len(_SEGMENT_NUMBERS):
            raise InputError(f"segments[{place}] must be a list of {', '.join(_SEGMENT_NUMBERS)}; give all of them")
        items = zip(_SEGMENT_NUMBERS.items(), row, strict=True)
        steps, *rest = (check(f"segments[{place}].{name}", value, rule) for (name, rule), value in items)
        if any(np.ndim(value) for value in (steps, *rest)):
            raise InputError(f"segments[{place}] must hold numbers; found a list, give one number for each")
        start = found[-1].end if found else 0
        found.append(Segment(start, int(steps), *(float(value) for value in rest)))
    return tuple(found)


def _filter(node: object) -> Filter | None:
    """Return a plan's Renyi filter or None, else raise InputError.  `Plan.promised` checks the budget."""
    if node is None:
        return None
    if not isinstance(node, list | tuple) or len(node) != 2:
        raise InputError("filter must be a list of its order and its budget, or None; give one of them")
    order, budget = (check_one("filter", value, POSITIVE, "give its order and its budget") for value in node)
    if not order > 1.0:
        raise InputError(f"filter: its order = {order!r} must be > 1; use such an order")
    return Filter(order, budget)


def _strategy_of_run(strategy: Strategy, groups: int | None, segments: Sequence[Segment]) -> Strategy:
    """Return the strategy for the run's steps; raise InputError for noise beyond float32, or without accounting."""
    known = strategy.for_steps(segments[-1].end)
    if groups is not None:
        require_groups(known, groups)
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.max(known.squared_errors()) * np.max(known.squared_norms()[1])
    # `grown`, the largest noise variance of a prefix sum, is `steps` for independent noise: allow 2^20 times that
    if not grown <= 2.0**20 * known.steps:
        raise InputError(
            f"noise = {strategy!r:.60} grows from step to step, beyond what float32 holds; use a matrix whose columns "
            "fall from their first entry"
        )
    for before, after in pairwise(segments):
        last = Turn(before.end - 1, groups or 0, before.noise_multiplier)
        if known.overlap > 1 and not Turn(after.start, groups or 0, after.noise_multiplier).follows(last):
            raise InputError(
                f"noise_multiplier falls from {last.noise_multiplier:g} to {after.noise_multiplier:g} during the run; "
                "with correlated noise this raises the cost of earlier steps; let it stay or rise"
            )
        require_kept("expected_batch_size", before[3:] == after[3:])
    return known


def _part(name: str, mechanism: Mechanism) -> Any:
    """Return the field `name` of a mechanism, as a JSON value."""
    return json.loads(to_json(mechanism))["mechanism"][name]


def _read(name: str, node: object, kind: str, **others: object) -> Any:
    """Return field `name` of a mechanism of type `kind` with the fields `others`, all as JSON values; None for None."""
    if node is None:
        return None
    inside = {"type": kind, name: node, **others}
    return getattr(from_json(json.dumps({"format": "jaxacct.mechanism", "version": 1, "mechanism": inside})), name)
