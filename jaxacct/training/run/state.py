"""The state of a run between two steps, its history, and its privacy claims (README.md, "What a state carries")."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.text import exact, outward, unusual
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

    `epsilon` is the privacy claim, as Bounds at the plan's delta.  It covers all spending in the ledger or, without a
    ledger, all steps that led to this state, also under earlier plans.  The plan's remaining steps count as well if an
    early stop or a callback ended the run, or if a callback looked at outputs and the run did not end by itself.  They
    do not count while a callback is being called.  With repetitions in the plan, `epsilon` covers only one of K runs.

    Parameters
    ----------
    params, opt_state : the whole model, and the optimizer's state; the trained part and its state may be published.
    clip_norm, step : the present clip norm, and the number of steps taken.
    not_finite : number of gradients that counted as zero (`Clipped.not_finite`).  No noise protects this number.
    lineage : the origin of the randomness, with the secret key of the run.
    past, scores : the noise that later steps share, and the exact scores of an early stop; both are secret.
    history : the spending so far, or a mark of the ledger that holds it.
    plan : the last plan.
    stopped : why `fit` returned: "finished", "callback", "early_stop", "budget" (a step more would exceed the target).
    seen : whether callbacks have looked at outputs.
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
        try:
            plan = self.plan
            epsilon = at_most(self.epsilon, plan.target_delta, plan.relation, plan.unit, epsilon_of(plan))
        except InputError as error:
            epsilon = f"epsilon unknown ({error})"
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return f"State(step {self.step} of {self.plan.steps}{stopped}, {epsilon}, {size_of(params)})"

    @property
    def epsilon(self) -> Bounds:
        """Epsilon of the steps so far; of the whole plan if somebody may have ended the run because of its outputs.

        A ledger that has grown is read anew, since other runs may have been added to it.
        """
        now = None if self.history.ledger is None else _stamp(self.history.ledger.path)
        found = self._claimed.get(now)
        if found is None:
            ended = self.stopped in ("finished", "budget") or (not self.stopped and not self.seen)
            found = self._claimed[now] = claimed(self.history, self.plan, ended, goes_on=False)
        return found

    @functools.cached_property
    def _claimed(self) -> dict[Any, Bounds]:
        """The claims that were read, each by the stamp of the ledger at that time."""
        return {}


def _stamp(path: str) -> Any:
    """Return a value that changes when the file is written to or replaced."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return object()  # equal to no other; whoever reads the file raises the error


class Evaluation(NamedTuple):
    """Result of ``evaluate=`` after `step` steps: a number, or a dict of numbers."""

    step: int
    value: float | dict[str, float]


class Scores(Secret):
    """Exact scores of an early stop, in units of 1/UNITS; secret, since no noise protects them."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...] = ()) -> None:
        self.values = values


class Past(Secret):
    """Buffers of correlated noise, which can remove noise from later steps, and the clip norm that scaled the noise."""

    __slots__ = ("arrays", "clip_norm")

    def __init__(self, arrays: Any = None, clip_norm: Any = None) -> None:
        self.arrays, self.clip_norm = arrays, clip_norm


class Looks:
    """Record of whether callbacks have looked at outputs, in this `fit` or before."""

    def __init__(self, seen: bool, note: Callable[[], Any]) -> None:
        self.seen, self.at_this = seen, False  # at_this: looked at the state with which callbacks were last called
        self.now: State | None = None  # the state with which the callbacks are being called
        self._note: Callable[[], Any] | None = note  # may raise: the callback then gets the error instead of outputs

    def look(self) -> None:
        """Record that a callback is about to see outputs.  Before the first look of a `fit`, call `note`."""
        if self._note is not None:
            self._note()
            self._note = None
        self.seen = self.at_this = True

    def over(self) -> None:
        """Stop recording: whoever sees outputs only after a `fit` cannot have ended the `fit` because of them."""
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
            return claimed(self.history, self.plan, ended=not now and not looks.seen, goes_on=now)
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


class Released:
    """Base of what tunings release."""

    def __repr__(self) -> str:
        """Return one line, as that of a State, with the assumption about the candidates if somebody declares it."""
        of = {"target_delta": None, "relation": "add_or_remove_one", "candidates": "iid", "status": "", **vars(self)}
        declared = "" if of["candidates"] == "iid" else f"candidates {of['candidates']}"
        claim = "" if of["target_delta"] is None else at_most(of["epsilon"], of["target_delta"], of["relation"])
        words = of["status"], f"{of['config']}", f"score {of['score']:.7g}", claim, declared, size_of(of["params"])
        return f"{type(self).__name__}({', '.join(word for word in words if word not in ('', '0 parameters'))})"


def at_most(epsilon: Bounds, delta: float, relation: str, unit: str = "record", what: str = "epsilon") -> str:
    return f"{what} <= {outward(epsilon.upper, '.7g', up=True)} at delta {exact(delta)}{unusual(relation, unit)}"


def size_of(params: Any) -> str:
    count = sum(np.size(leaf) for leaf in jax.tree_util.tree_leaves(params) if hasattr(leaf, "dtype"))
    return f"{count:,} parameters"


def epsilon_of(plan: Plan) -> str:
    """Return "epsilon", or "epsilon of one run" for a plan of a tuning, which has several runs."""
    return "epsilon" if plan.repetitions is None else "epsilon of one run"


class Stretch(NamedTuple):
    """Steps `first` to `end - 1` of a plan."""

    plan: Plan
    first: int
    end: int
    partition: str  # the fingerprint of the pass or round of the last step; "" if the batch rule has neither


class History(NamedTuple):
    """What a run has spent up to a state."""

    stretches: tuple[Stretch, ...] = ()  # without a ledger, the steps that led to the state
    ledger: Mark | None = None  # a mark of the ledger, which then holds all spending

    def whole(self) -> History:
        """Return the history with its last stretch extended to the last step of this stretch's plan."""
        if not self.stretches:
            return self
        last = self.stretches[-1]
        return self._replace(stretches=(*self.stretches[:-1], last._replace(end=max(last.end, last.plan.steps))))


NOTHING = History()
"""History of a run that has not begun."""


def followed(stretches: tuple[Stretch, ...], plan: Plan, step: int, end: int, partition: str) -> tuple[Stretch, ...]:
    """Return stretches with steps `step` to `end - 1` of `plan`, which extend the last stretch or form a new one."""
    if stretches:
        last = stretches[-1]
        goes_on = last.end == step and (last.plan is plan or last.plan == plan)
        # a pass may not continue with another partition of the records
        if goes_on and (not partition or partition == last.partition or plan.pass_of(step)[1] == step):
            return (*stretches[:-1], Stretch(plan, last.first, end, partition))
    return (*stretches, Stretch(plan, step, end, partition))


def released(stretches: Sequence[Stretch]) -> Counter[Release]:
    """Count the releases of some stretches.  A pass that lies in two stretches counts once in each of them.

    A stretch of steps that share noise adds one release of all records, for its first step (`Turn.alone`).  The
    stretch adds none if no earlier step shares noise, or if its first step `follows` the last earlier step that does.
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
    """Return the spending of stretches.  An early-stop rule counts once, as its mechanism covers all its answers."""
    rules = {one.plan.early_stop for one in stretches if one.first < one.end}
    return Spent(released(stretches), Counter(rule.mechanism for rule in rules if rule is not None))


def claimed(history: History, plan: Plan, ended: bool, goes_on: bool) -> Bounds:
    """Return bounds of a history's epsilon.  They cover the last plan to its end if outputs may have ended the run.

    Outputs cannot have ended a run that ended by itself or showed no outputs (`ended`), or that continues (`goes_on`).
    With a ledger `ended` is ignored: the ledger itself knows which remaining steps count.
    """
    if history.ledger is not None:
        ledger = Ledger.read(history.ledger.path)
        ledger.require(history.ledger)
        ledger.run = history.ledger.run
        epsilon = ledger.epsilon_of_entries if goes_on else ledger.epsilon
        return epsilon(plan.target_delta, plan.relation, ledger.run if plan.repetitions is not None else None)
    stretches = (history if ended or goes_on else history.whole()).stretches
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
    """Return the history from which `document` made the object `node`; raise InputError for any other object."""
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
