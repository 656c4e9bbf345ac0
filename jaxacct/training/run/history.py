"""History: what was released on the way to a state, and what may be claimed of it.

A state carries its history through memory, through checkpoints, and from one trainer to the next.  So what was spent
under one plan is never forgotten under another.  Either a ledger holds everything, and the history is a mark of how far
the ledger was, or the history holds the steps themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, check
from jaxacct.training.ledger import Ledger, Mark
from jaxacct.training.ledger.contents import Spent, claim
from jaxacct.training.ledger.format import LAST_STEP, Run, words
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import plan_document
from jaxacct.training.step.step_mechanisms import Release

__all__ = ["NOTHING", "History", "Stretch", "claimed", "document", "followed", "from_document", "released"]


class Stretch(NamedTuple):
    """Steps `first` to `end - 1` of a plan.

    partition : of fixed batches, a fingerprint of how the data were cut for the last pass; elsewhere "".
    """

    plan: Plan
    first: int
    end: int
    partition: str


class History(NamedTuple):
    """What led to a state: stretches of plans that no ledger holds, or a mark in the ledger that holds everything."""

    stretches: tuple[Stretch, ...] = ()
    ledger: Mark | None = None

    def whole(self) -> History:
        """The same with the last stretch taken to the end of its plan."""
        if not self.stretches:
            return self
        last = self.stretches[-1]
        return self._replace(stretches=(*self.stretches[:-1], last._replace(end=max(last.end, last.plan.steps))))


NOTHING = History()
"""The history of a run that has not begun."""
_LONGEST_PATH = 4096
"""Characters of a ledger's path in a document, at most: what Linux allows."""


def followed(stretches: tuple[Stretch, ...], plan: Plan, step: int, end: int, partition: str) -> tuple[Stretch, ...]:
    """The stretches with steps `step` to `end - 1` of a plan after them.

    The steps join the last stretch if they go on with its plan.  In the middle of a pass over fixed batches they join
    it only if the data are cut as before.  Otherwise a record may be in a batch of both parts of the pass.
    """
    if stretches:
        last = stretches[-1]
        goes_on = last.end == step and (last.plan is plan or last.plan == plan)
        if goes_on and (not partition or partition == last.partition or plan.pass_of(step)[1] == step):
            return (*stretches[:-1], Stretch(plan, last.first, end, partition))
    return (*stretches, Stretch(plan, step, end, partition))


def released(stretches: Sequence[Stretch]) -> Counter[Release]:
    """What some stretches have released, counted; a pass that two of them share counts in both."""
    counts: Counter[Release] = Counter()
    for plan, first, end, _ in stretches:
        counts.update(plan.releases_between(first, end))
    return counts


def claimed(history: History, plan: Plan, step: int, ended: bool, goes_on: bool) -> Bounds:
    """Epsilon at a plan's delta of all that a history holds, with the rest of the plan if outputs may have ended it.

    ended : whether the run ended by itself, or has shown no outputs.  goes_on : whether the run continues whatever it
    has shown; then only the steps taken count.
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
    return claim([(Spent(released(stretches)), headers)], plan.target_delta, plan.relation)


def document(history: History) -> dict[str, Any]:
    """A history as an object that JSON can hold."""
    return {
        "stretches": [[plan_document(plan), *rest] for plan, *rest in history.stretches],
        "ledger": list(history.ledger) if history.ledger is not None else None,
    }


def from_document(node: Any) -> History:
    """The history of a document; InputError for whatever is none."""
    try:
        stretches = tuple(_stretch(*row) for row in node["stretches"])
        if node["ledger"] is None:
            return History(stretches)
        path, run, lines, head = node["ledger"]
        count = int(check("lines", lines, LAST_STEP))
        mark = Mark(words("path", path, _LONGEST_PATH), words("run", run), count, words("head", head))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"history: {' '.join(str(error).split())}") from None
    return History(stretches, mark)


def _stretch(plan: Any, first: Any, end: Any, partition: Any) -> Stretch:
    """The stretch of a document; InputError for whatever is none."""
    known = Plan.from_document(plan)
    ends = [int(check(name, value, LAST_STEP)) for name, value in (("first", first), ("end", end))]
    if not 0 <= ends[0] <= ends[1] <= known.steps:
        raise InputError(f"steps {ends[0]} to {ends[1]} are not steps of the plan, which has {known.steps}")
    return Stretch(known, ends[0], ends[1], words("partition", partition))
