"""The state of a run between two steps, its history, and its privacy claims (README.md, "What a state carries")."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.types import Leaf
from jaxacct.core.validation import InputError, check
from jaxacct.training.ledger import Ledger, Mark
from jaxacct.training.ledger.contents import Spent, claim
from jaxacct.training.ledger.format import LAST_STEP, Run, words
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import plan_document
from jaxacct.training.step.key_derivation import Lineage, Secret
from jaxacct.training.step.step_mechanisms import Release, Turn


@dataclass(frozen=True, repr=False)
class State:
    """State of a run between two steps.

    `epsilon` is the privacy claim, as Bounds at the plan's delta.  With a ledger it covers all spending in the ledger.
    Without a ledger it covers all steps that led to this state, also those under earlier plans.  The plan's remaining
    steps count as well if an early stop or a callback ended the run.  They also count if a callback looked at outputs
    and the run did not end by itself.  While a callback is being called, only the steps already taken count.  If the
    plan has repetitions, `epsilon` covers only this one of the K runs.

    Parameters
    ----------
    params : the whole model, with its frozen part; the trained part may be published.
    opt_state : the optimizer's state for the trained part; it may be published.
    clip_norm : the present clip norm.
    step : number of steps taken.
    not_finite : number of gradients so far with a NaN or an infinity.  Such a gradient counts as zero.  This number
        depends on the data without noise, so it is not private.
    lineage : the origin of the randomness.  It holds the secret key of the run.
    past : the correlated noise that later steps share.  It is secret.
    history : the spending so far, or a mark of the ledger that holds it.
    plan : the last plan.
    stopped : why `fit` returned: "finished", "callback", "early_stop" (the plan's early stop ended the run), or
        "budget" (one more step would exceed the target).
    seen : whether callbacks have looked at outputs.
    scores : the exact scores so far of an early stop.  They are secret.
    evaluations : pairs (step, value) of the ``evaluate=`` of the last `fit`, up to this state.

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import Plan, Trainer
    >>> plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=5.0, steps=3)
    >>> trainer = Trainer(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.1), plan, clip_norm=1.0)
    >>> state = trainer.init(jnp.zeros(2))
    >>> state.step, float(state.epsilon.upper)
    (0, 0.0)
    >>> state
    State(step 0 of 3, epsilon <= 0 at delta 1e-05, 2 parameters)
    """

    params: Leaf
    opt_state: Leaf
    clip_norm: Leaf
    step: int
    not_finite: int
    lineage: Lineage
    history: History
    plan: Plan
    stopped: str = ""
    seen: bool = False
    past: Past | None = None
    evaluations: Sequence[Evaluation] = ()
    scores: Scores = field(default_factory=lambda: Scores())

    def __repr__(self) -> str:
        """Return one line: the step, why the run stopped, epsilon and the number of parameters, but no parameter."""
        params = object.__getattribute__(self, "params")  # record no look: the number of parameters is no output
        count = sum(np.size(leaf) for leaf in jax.tree_util.tree_leaves(params) if hasattr(leaf, "dtype"))
        try:
            epsilon = f"epsilon <= {self.epsilon.upper:.7g} at delta {self.plan.target_delta:g}"
        except InputError as error:
            epsilon = f"epsilon unknown ({error})"
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return f"State(step {self.step} of {self.plan.steps}{stopped}, {epsilon}, {count:,} parameters)"

    @functools.cached_property
    def epsilon(self) -> Bounds:
        """Epsilon spent so far.

        If somebody who saw outputs may have ended the run because of them, the remaining steps count as well.
        """
        ended = self.stopped in ("finished", "budget") or (not self.stopped and not self.seen)
        return claimed(self.history, self.plan, self.step, ended, goes_on=False)


class Evaluation(NamedTuple):
    """Result of ``evaluate=`` after `step` steps: a number, or a dict of numbers."""

    step: int
    value: float | dict[str, float]


class Scores(Secret):
    """Exact scores of an early stop, in units of 1/UNITS.

    No noise protects these scores, so they are secret: pickle and repr leave them out.
    """

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...] = ()) -> None:
        self.values = values


class Past(Secret):
    """Buffers of correlated noise, and the clip norm that the noise was scaled by.

    Whoever has the buffers can remove noise from later steps, so pickle and repr leave them out.
    """

    __slots__ = ("arrays", "clip_norm")

    def __init__(self, arrays: Any = None, clip_norm: Any = None) -> None:
        self.arrays, self.clip_norm = arrays, clip_norm


class Looks:
    """Record of whether callbacks have looked at outputs.

    seen : whether callbacks of this or of an earlier `fit` have looked.
    at_this : whether callbacks have looked at outputs of the state with which they were last called.
    now : the state with which the callbacks are being called, or None.
    note : a function that is called before the first look of this `fit`.  If it raises, the callback gets the error
        instead of outputs.
    """

    def __init__(self, seen: bool, note: Callable[[], Any]) -> None:
        self.seen, self.at_this = seen, False
        self.now: State | None = None
        self._note: Callable[[], Any] | None = note

    def look(self) -> None:
        """Record that a callback is about to see outputs.  Before the first look, call `note`."""
        if self._note is not None:
            self._note()
            self._note = None
        self.seen = self.at_this = True

    def over(self) -> None:
        """Stop recording, since the `fit` has ended.

        Whoever sees outputs only afterwards cannot have ended the `fit` because of them.
        """
        self.now = self._note = None


class _Shown(State):
    """View of a state, for callbacks.  Before it returns an attribute that depends on outputs, it records the look."""

    looks: ClassVar[Looks]

    def __getattribute__(self, name: str) -> Any:
        looks: Looks | None = object.__getattribute__(self, "__dict__").get("looks")
        if looks is None:  # the view is being made or copied, and has no fields yet
            return super().__getattribute__(name)
        if name == "seen":
            return looks.seen
        if name == "epsilon":
            now = looks.now is self  # True while callbacks are called with this view: then only the steps taken count
            return claimed(self.history, self.plan, self.step, ended=not now and not looks.seen, goes_on=now)
        if name not in ("step", "plan", "stopped", "history", "__class__"):  # all other attributes depend on outputs
            looks.look()
        if name == "evaluations":  # leave out values of later steps, which the list may have by now
            return tuple(one for one in super().__getattribute__(name) if one.step <= self.step)
        return super().__getattribute__(name)


def shown(state: State, looks: Looks) -> State:
    """Return a view of the state for callbacks.  `looks` records whether a callback reads an output from the view."""
    view = object.__new__(_Shown)
    vars(view).update(vars(state), looks=looks)
    looks.now, looks.at_this = view, False
    return view


class Stretch(NamedTuple):
    """Steps `first` to `end - 1` of a plan."""

    plan: Plan
    first: int
    end: int
    partition: str  # the fingerprint of the pass or round of the last step; "" if the batch rule has neither


class History(NamedTuple):
    """What a run has spent up to a state.

    Without a ledger, `stretches` has the steps that led to the state.  With a ledger, the ledger holds all spending,
    and the field `ledger` is a mark of the ledger's state.
    """

    stretches: tuple[Stretch, ...] = ()
    ledger: Mark | None = None

    def whole(self) -> History:
        """Return the history with its last stretch extended to the last step of this stretch's plan."""
        if not self.stretches:
            return self
        last = self.stretches[-1]
        return self._replace(stretches=(*self.stretches[:-1], last._replace(end=max(last.end, last.plan.steps))))


NOTHING = History()
"""History of a run that has not begun."""


def followed(stretches: tuple[Stretch, ...], plan: Plan, step: int, end: int, partition: str) -> tuple[Stretch, ...]:
    """Return the stretches with steps `step` to `end - 1` of `plan` added.

    The last stretch is extended if it has the same plan and its last step is `step - 1`, unless `step` continues a pass
    whose fingerprint is not `partition`.  Otherwise the steps are a new stretch.
    """
    if stretches:
        last = stretches[-1]
        goes_on = last.end == step and (last.plan is plan or last.plan == plan)
        if goes_on and (not partition or partition == last.partition or plan.pass_of(step)[1] == step):
            return (*stretches[:-1], Stretch(plan, last.first, end, partition))
    return (*stretches, Stretch(plan, step, end, partition))


def released(stretches: Sequence[Stretch]) -> Counter[Release]:
    """Count the releases of some stretches.  A pass that lies in two stretches counts once in each of them.

    If steps share noise, one more release, of all records (`Turn.alone`), counts for the first step of a stretch.  It
    does not count in two cases: this step is the run's first step that shares noise, or `Turn.follows` holds for this
    step and the last step before it that shares noise.
    """
    counts: Counter[Release] = Counter()
    last: Turn | None = None
    known = 0
    for plan, first, end, _ in stretches:
        counts.update(plan.releases_between(first, end))
        begins = last is None and first == known  # first stretch that shares noise, and no step before it is missing
        if plan.shared and first < end:
            if not begins and not plan.turn(first).follows(last):
                counts[plan.turn(first).alone()] += 1
            last = plan.turn(end - 1)
        known = end
    return counts


def spent_by(stretches: Sequence[Stretch]) -> Spent:
    """Return the spending of several stretches: their releases, and the mechanism of each early-stop rule.

    The mechanism of a rule covers all answers of the rule, so it counts once even if several stretches have the rule.
    """
    rules = {one.plan.early_stop for one in stretches if one.first < one.end}
    return Spent(released(stretches), Counter(rule.mechanism for rule in rules if rule is not None))


def claimed(history: History, plan: Plan, step: int, ended: bool, goes_on: bool) -> Bounds:
    """Return bounds of the epsilon of all releases in a history.

    If neither `ended` nor `goes_on` is True, outputs may have ended the run.  Then the plan's remaining steps count.

    ended : True if the run ended by itself, or has shown no outputs.  It is ignored if a ledger holds the spending.
    goes_on : True if the run continues, whatever outputs it has shown.
    """
    if history.ledger is not None:
        ledger = Ledger.read(history.ledger.path)
        ledger.require(history.ledger)
        ledger.run = history.ledger.run
        epsilon = ledger.epsilon_of_entries if goes_on else ledger.epsilon
        return epsilon(plan.target_delta, plan.relation, ledger.run if plan.repetitions is not None else None)
    stretches = history.stretches
    if not ended and not goes_on and step < plan.steps:
        stretches = followed(stretches, plan, step, plan.steps, stretches[-1].partition if stretches else "")
    if not stretches:
        return plan.epsilon_after(0)
    if len(stretches) == 1 and stretches[0].first == 0 and stretches[0].plan == plan:
        return plan.epsilon_after(stretches[0].end)
    headers = [Run("", "", stretch.plan) for stretch in stretches]
    return claim([(spent_by(stretches), headers)], plan.target_delta, plan.relation)


def document(history: History) -> dict[str, Any]:
    """Return a history as a document: a dict that JSON can hold."""
    return {
        "stretches": [[plan_document(plan), *rest] for plan, *rest in history.stretches],
        "ledger": list(history.ledger) if history.ledger is not None else None,
    }


def from_document(node: Any) -> History:
    """Return the history that a document of `document` describes; raise InputError for any other object."""
    try:
        stretches = tuple(_stretch(*row) for row in node["stretches"])
        if node["ledger"] is None:
            return History(stretches)
        path, run, lines, head = node["ledger"]
        count = int(check("lines", lines, LAST_STEP))
        mark = Mark(words("path", path, 4096), words("run", run), count, words("head", head))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"history: {' '.join(str(error).split())}") from None
    return History(stretches, mark)


def _stretch(plan: Any, first: Any, end: Any, partition: Any) -> Stretch:
    """Return the stretch that these fields of a document describe; raise InputError for invalid fields."""
    known = Plan.from_document(plan)
    ends = [int(check(name, value, LAST_STEP)) for name, value in (("first", first), ("end", end))]
    if not 0 <= ends[0] <= ends[1] <= known.steps:
        raise InputError(f"steps {ends[0]} to {ends[1]} are not steps of the plan, which has {known.steps}")
    return Stretch(known, ends[0], ends[1], words("partition", partition))
