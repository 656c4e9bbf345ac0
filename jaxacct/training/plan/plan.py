"""Plan: the noise, the batches and the steps of a private training run, and the epsilon that they cost."""

from __future__ import annotations

import bisect
import functools
import json
import math
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from jaxacct.calibration.search import status_of_upper_end
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.keywords import with_hints
from jaxacct.core.validation import InputError
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE
from jaxacct.training.plan import curve
from jaxacct.training.plan.document import load, plan_document, plan_from
from jaxacct.training.plan.recalibration import recalibrated
from jaxacct.training.plan.request import requested
from jaxacct.training.plan.solved import SolvedPlan
from jaxacct.training.plan.solver import solve
from jaxacct.training.step.step_mechanisms import POISSON

__all__ = ["Plan"]


NEARLY_SPENT = 1e-3
"""A plan with the status "ok" leaves at most this share of its target unspent."""


class Allowance(Protocol):
    """What a plan asks of a ledger (`jaxacct.training.Ledger`), which knows plans; a plan knows no ledger."""

    def leaves_room(self, plan: Plan, next_step: int, partition: str | None = None) -> bool:
        """Whether what was spent and one more step of the plan stay within its target and its filter."""


@dataclass(frozen=True, eq=False, init=False)
class Plan(SolvedPlan):
    """A DP-SGD run, with what is left open solved for, so that its certified epsilon meets a target.

    Every step draws a batch, sums the gradients clipped to norm C, adds noise of standard deviation
    `noise_multiplier * C`, and divides by `expected_batch_size`.  Of noise_multiplier, steps (or epochs) and
    sampling_probability (or expected_batch_size) exactly one is left out when there is a target_epsilon, and none when
    there is not; `steps = ceil(epochs * dataset_size / batch)`.

    The plan is frozen.  All five are numbers in it: with a schedule they are the averages over the steps and the
    overall scale of the noise.  The numbers of one step are `at(step)`.  Schedules must be fixed beforehand, or follow
    rules that do not look at the data.

    Parameters
    ----------
    target_epsilon : > 0, or None: then epsilon is only reported.
    target_delta : in (0, 1), always needed.
    dataset_size : a whole number, always needed, taken as public.
    sampling_probability, expected_batch_size : the rate in (0, 1], or that rate times dataset_size.  The latter may be
        given as `batch_size`, the word of `jaxacct.dp_sgd`.
    noise_multiplier : > 0, relative to the clip norm C for adding or removing a record.
    steps, epochs : how long the run is.
    sampling : how a batch is drawn.
        "poisson" : every record by itself.
        "truncated_poisson" : the same, and of more than `cap` records a uniform subset of `cap`: one shape of batch.
        "random_allocation" : at the start of a round of `slots` steps every record draws one slot by itself, uniformly,
        and takes part in that step.  A round that has begun costs a whole one; what is solved for is whole rounds.
        "without_replacement" : expected_batch_size records exactly.
        "fixed_batches", or "shuffled" : every record once in every pass, shuffled; no amplification, a pass costs as
        much as one Gaussian.
    relation : which data sets are neighbours, "add_or_remove_one" by default, "add_one", "remove_one", "zero_out" (a
        record's gradient becomes 0 and its place stays), or, unless sampling is "poisson", "replace_one".  With fixed
        batches "zero_out" is the default, and those in which a record is added or removed are refused: the shuffle
        then moves another record to another batch.
    noise_schedule : relative noise, one factor per step or pairs (until_step, factor), the last until_step may be None.
        Then the overall scale of the noise is what `noise_multiplier` is, given or solved for.
    batch_schedule : expected batch sizes in the same forms, in place of sampling_probability.
    repetitions : a law of K (`jaxacct.selection`): the target is met by all K runs of a tuning together.
    data_dependent : True where `recalibrate` may be decided by the data or by outputs, used in the end or not.  The
        steps compose through a Renyi filter, fixed here, which meets the target on every path and needs more noise.
    candidates : "iid" or "adaptive", what the K runs are taken for (`jaxacct.selection.select`).
    slots : of random allocation, in place of the batch size, which is then dataset_size/slots; by default
        ceil(dataset_size/expected_batch_size), so that batches are no larger than asked for.
    cap : of truncated Poisson sampling; by default one that costs nothing (`jaxacct.cap_for`).
    unit : "record" or "user": what is drawn and what neighbours differ in.  With users dataset_size is their number,
        and `Trainer.fit` is told whose each example is.

    Raises
    ------
    InputError : bad values, over- and under-determined plans, and targets that cannot be met.

    References
    ----------
    Abadi et al. 2016 (DP-SGD); Feldman and Zrnic 2021 (Renyi filters).  How each way of sampling is accounted for:
    jaxacct/training/plan/README.md.

    >>> plan = Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, expected_batch_size=60_000, epochs=20)
    >>> plan.steps, round(plan.noise_multiplier, 3), round(float(plan.epsilon.upper), 3), plan.epsilon.kind
    (20, 6.219, 3.0, 'certified')
    """

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
        sampling: str = POISSON,
        relation: str | None = None,
        noise_schedule: Any = None,
        batch_schedule: Any = None,
        repetitions: Any = None,
        data_dependent: bool = False,
        candidates: str = "iid",
        slots: int | None = None,
        cap: int | None = None,
        unit: str = "record",
        batch_size: float | None = None,
    ) -> None:
        if batch_size is not None:
            if expected_batch_size is not None:
                raise InputError("expected_batch_size and batch_size say the same thing twice; leave one of them out")
            expected_batch_size = batch_size
        request = requested(
            {
                "target_epsilon": target_epsilon,
                "target_delta": target_delta,
                "dataset_size": dataset_size,
                "sampling_probability": sampling_probability,
                "expected_batch_size": expected_batch_size,
                "noise_multiplier": noise_multiplier,
                "steps": steps,
                "epochs": epochs,
                "sampling": sampling,
                "relation": relation,
                "noise_schedule": noise_schedule,
                "batch_schedule": batch_schedule,
                "repetitions": repetitions,
                "data_dependent": data_dependent,
                "candidates": candidates,
                "slots": slots,
                "cap": cap,
                "unit": unit,
            }
        )
        self._hold(vars(request), solve(request))

    def _repr_html_(self) -> str:
        """The run in full numbers, and what it costs."""
        names = ("dataset_size", "unit", "sampling", "slots", "cap", "sampling_probability", "expected_batch_size")
        shown = [name for name in (*names, "noise_multiplier", "steps", "epochs", "relation")]
        pairs = [(name, repr(getattr(self, name))) for name in shown if getattr(self, name) is not None]
        target = "none" if self.target_epsilon is None else repr(self.target_epsilon)
        goal = [("target epsilon", target), ("target delta", repr(self.target_delta))]
        law = [] if self.repetitions is None else [("repetitions", f"{self.repetitions!r}, {self.candidates}")]
        parts = [("segments", f"{len(self.segments):,}; the numbers are averages")] if len(self.segments) > 1 else []
        spent = ("epsilon", f"{self.epsilon:.6g}")
        short = [] if self.status == "ok" else [("status", f"{self.status}: the target is not reached")]
        return markup.fields("Plan", [spent, *short, *goal, *pairs, *law, *parts])

    @property
    def status(self) -> str:
        """Whether the plan spends its target: "ok" if it leaves at most 0.1 % unspent, or has no target.

        "not_binding": it spends less, at a limit of the search: a noise multiplier of 0.1, or every record in every
        step.  "loose": it spends less for another reason, such as that one more step would exceed the target.

        >>> Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4).status
        'ok'
        """
        if self.target_epsilon is None:
            return "ok"
        noise, rate = (min(values) for values in zip(*(s[2:4] for s in self.segments), strict=True))
        at_limit = noise == NOISE_RANGE[0] or rate == 1.0
        return status_of_upper_end(float(self.epsilon.upper), self.target_epsilon, NEARLY_SPENT, at_limit)

    def to_json(self) -> str:
        """The plan as one line of JSON, as it is run: `Plan.from_json` gives an equal plan without solving again."""
        return json.dumps(plan_document(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote, safe on documents from strangers; InputError, in one line, for others."""
        try:
            return cls.from_document(load(text))
        except (ValueError, TypeError) as error:
            raise InputError(f"text is no plan: {error}; use what Plan.to_json wrote") from None

    @classmethod
    def from_document(cls, node: Any) -> Self:
        """The plan of an object that `document.plan_document` made, such as a ledger holds; InputError for others."""
        return plan_from(node, cls.of)

    def __eq__(self, other: object) -> bool:
        """The same settings and the same segments, to the last digit."""
        return isinstance(other, Plan) and (self is other or self.to_json() == other.to_json())

    def __hash__(self) -> int:
        return hash(self.segments)

    def epsilon_curve(self, points: int = 64) -> tuple[np.ndarray, Bounds]:
        """(steps, epsilon after them) of one run at about `points` places, computed in one call; brackets are coarse.

        Of a plan with many different steps it is an upper bound (kind "bound"): few kinds of step, each of which tells
        at least as much as those it stands for, and never above the whole plan's.

        >>> plan = Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4)
        >>> steps, curve = plan.epsilon_curve(2)
        >>> steps.tolist(), curve.upper.round(3).tolist()
        ([2, 4], [1.061, 1.555])
        """
        return curve.epsilon_curve(self, points)

    @functools.cached_property
    def _curve(self) -> tuple[list[int], list[float]]:
        steps, curve = self.epsilon_curve()
        return steps.tolist(), np.maximum.accumulate(curve.upper).tolist()

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
        """The plan whose first `step` steps stay and whose remaining noise is such that the whole meets the target.

        Parameters
        ----------
        step : how many steps stay.
        steps, epochs : the new total, counted from the beginning.
        expected_batch_size : from here on.
        data_dependent : True if the change, or that it happens now, may depend on the data or on anything that the run
            has put out.  This is refused unless the plan declared it from its first step, Plan(...,
            data_dependent=True): the run in which nothing is changed is one of the paths, and must be claimed through
            the filter as well.  Of such a plan every change goes through its filter.  Otherwise the composition is
            exact, and holds only for changes that look at neither (jaxacct/training/plan/README.md).

        What is left out stays; relative noise keeps its schedule.

        Raises
        ------
        InputError : what is spent already exceeds the target; or the plan has repetitions, as the K runs of a tuning
            must all be the same; or a bad value.

        >>> plan = Plan(target_epsilon=1.0, target_delta=1e-5, dataset_size=50, sampling_probability=1.0, steps=10)
        >>> [(s.start, s.steps, round(s.noise_multiplier, 2)) for s in plan.recalibrate(5, steps=20).segments]
        [(0, 5, 11.8), (5, 15, 20.43)]
        """
        return recalibrated(self, step, steps, epochs, expected_batch_size, data_dependent)

    def allows(self, ledger: Allowance, next_step: int, partition: str | None = None) -> bool:
        """Whether what a ledger holds and one more step stay within the target, certified; True without a target.

        Where the plan has a Renyi filter they must stay within its budget, too.  This costs nothing while the ledger
        follows the plan.  With repetitions only the current run of the ledger counts.

        Parameters
        ----------
        ledger : Ledger
        next_step : the step to be taken.
        partition : of fixed batches, the one that the step will be noted with; left out, the step is taken to go on
            with that of the last entry.

        Raises
        ------
        InputError : the ledger has a Rényi filter that the plan does not share: nothing can be certified.
        """
        if self.target_epsilon is None and self.filter is None:
            return True
        return 0 <= next_step < self.steps and ledger.leaves_room(self, next_step, partition)
