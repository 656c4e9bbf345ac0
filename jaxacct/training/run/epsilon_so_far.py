"""Epsilon along a run, for its log: upper ends from tables that are computed once, beside the first steps.

What may be claimed of a run covers all that its history or its ledger holds.  Before a number of a table is told, what
has been released by then is compared with what the table is of: it must be among that, since leaving releases out never
costs more.  The plan's own table serves as long as that is so.  Otherwise there is one of what was held at the first
step and the plan's steps after it.  Where neither has everything, nothing is told.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.contents import Spent, claim, counted
from jaxacct.training.ledger.format import Run
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import MANY_KINDS
from jaxacct.training.plan.solver import epsilon_of_several
from jaxacct.training.run.history import Stretch, released
from jaxacct.training.step.step_mechanisms import BY_PASS, Release

__all__ = ["EpsilonSoFar", "Place"]

POINTS = 16
"""Places of a table that is made for one run.  Each is a claim of its own; those of a plan are made in two calls."""
EVEN_PLACES = 64
"""Places of the plan's own table."""
APART = 1.1
"""Factor between two places early in a plan, where the plan's own table, evenly spaced, has few."""
EARLY_RTOL = 0.01
"""Relative width of the brackets there, of which upper ends are used."""

Held = list[tuple[Spent, list[Run]]]
"""What counts against a plan: for each run what it has spent, and its plans; the current one comes first."""


class _Table:
    """Upper ends of epsilon along a plan, computed in a thread of its own when they are first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._uppers: tuple[list[int], list[float]] = [], []  # after which steps, in one piece for other threads
        self._thread: threading.Thread | None = None

    def at(self, step: int) -> Place:
        """The place after so many steps; the table is begun, unless it was before."""
        if self._thread is None:
            # no daemon: a compilation must not be cut off when the interpreter ends, which waits for it
            self._thread = threading.Thread(target=self._safely, name="epsilon of the log")
            self._thread.start()
        return Place(self, step)

    @property
    def ready(self) -> bool:
        """Whether all is there that ever will be."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait so long at most until it is there."""
        if self._thread is not None:
            self._thread.join(seconds)

    def planned(self, step: int) -> Counter[Release]:
        """The releases that it is of, after so many steps."""
        return self._plan.releases_after(step)

    def upper(self, step: int) -> float | None:
        """The upper end after so many steps; None where it is not computed."""
        steps, uppers = self._uppers
        return uppers[bisect.bisect_left(steps, step)] if steps else None

    def _safely(self) -> None:
        try:
            self._compute()
        except Exception:  # for the log alone: what fails here fails in the state's epsilon, too, and is told there
            return

    def _compute(self) -> None:
        plan = self._plan
        even = np.unique(np.ceil(np.linspace(0.0, plan.steps, min(EVEN_PLACES, plan.steps) + 1)[1:])).astype(int)
        curve = [(step, float(plan.live_epsilon(step).upper)) for step in even.tolist()]
        self._put(curve)
        if plan.filter is not None or plan.sampling in BY_PASS or len(plan.whole) > MANY_KINDS:
            return
        steps, step, apart = [], 1, plan.steps / EVEN_PLACES
        while step * (APART - 1.0) < apart and apart > 1.0:
            steps.append(step)
            step = max(step + 1, int(APART * step))
        if steps:
            found = epsilon_of_several(plan, [plan.releases_after(step) for step in steps], EARLY_RTOL)
            self._put([*curve, *zip(steps, found.upper.tolist(), strict=True)])

    def _put(self, found: list[tuple[int, float]]) -> None:
        """The table, from upper ends after some steps, of which a later one holds as well: the least from each on."""
        found = sorted(found)
        least = np.minimum.accumulate([upper for _, upper in found[::-1]])[::-1]
        self._uppers = [step for step, _ in found], least.tolist()


class _TableAfter(_Table):
    """The same of what was held before a step, and the plan's steps from there on."""

    def __init__(self, plan: Plan, step: int, held: Held) -> None:
        super().__init__(plan)
        self._first, self._held = step, held
        self._before = _added(held)[0]

    def planned(self, step: int) -> Counter[Release]:
        return self._before + self._plan.releases_between(self._first, step)

    def _compute(self) -> None:
        first, last = self._first, self._plan.steps
        (own, headers), *rest = self._held
        headers = [*headers, Run("", "", self._plan)]
        uppers = []
        steps = np.unique(np.ceil(np.linspace(first, last, min(POINTS, last - first) + 1)[1:])).astype(int).tolist()
        for step in steps:
            spent = replace(own, releases=own.releases + self._plan.releases_between(first, step))
            found = claim([(spent, headers), *rest], self._plan.target_delta, self._plan.relation)
            uppers.append((step, float(found.upper)))
        self._put(uppers)


class Place(NamedTuple):
    """After how many steps a table is of all that has been released."""

    table: _Table
    step: int


class EpsilonSoFar:
    """Upper ends of epsilon after the steps of one `fit`.

    Parameters
    ----------
    plan : the plan that the steps follow.
    step : steps taken before.
    stretches : what was spent before, where there is no ledger.
    ledger : what holds everything else; None.
    """

    def __init__(self, plan: Plan, step: int, stretches: tuple[Stretch, ...], ledger: Ledger | None) -> None:
        self.plan, self._ledger = plan, ledger
        held = [
            (replace(spent, releases=Counter(spent.releases), others=Counter(spent.others)), list(headers))
            for spent, headers in self._held(stretches)
        ]
        self._others = _added(held)[1]
        filters = {line.plan.filter for _, headers in held for line in headers} | {plan.filter}
        self._of_plan = len(filters) == 1 and (plan.filter is None or len(held) == 1) and not self._others
        self._tables = [*([_Table(plan)] if self._of_plan else []), _TableAfter(plan, step, held)]

    def place(self, step: int, stretches: tuple[Stretch, ...]) -> Place | None:
        """Where a table has all that has been released until now, so many steps having been taken; it is begun.

        The place is after more steps where a run goes on from a checkpoint, and what it repeats is in the ledger.
        """
        if self._ledger is None and self._of_plan and len(stretches) == 1:  # as a rule, and then nothing is counted
            plan, first, end, _ = stretches[0]
            if plan is self.plan and first == 0:
                return self._tables[0].at(end)
        spent, others = _added(self._held(stretches))
        last = self.plan.steps
        for table in self._tables if others == self._others else []:
            holds = lambda end, table=table: spent <= table.planned(end)
            if holds(step):
                return table.at(step)
            if holds(last):
                return table.at(step + bisect.bisect_left(range(step, last), True, key=holds))
        return None

    def told(self, place: Place | None) -> dict[str, Any]:
        """Epsilon as a log has it, where `place` returned this: `upper` is None where nothing is known, and why."""
        upper, why = None, "more was released than a table has"
        if place is not None:
            upper, why = place.table.upper(place.step), "the table could not be computed, or not in time"
        known = upper is not None and math.isfinite(upper)
        found = {"upper": upper if known else None, "delta": self.plan.target_delta, "kind": "bound"}
        return found | {"covers": self.covers} | ({} if known else {"why": f"{why}; see state.epsilon"})

    @property
    def covers(self) -> str:
        """What epsilon is of."""
        if self.plan.repetitions is not None:
            return "this run of the tuning"
        return "this run" if self._ledger is None else "all runs of the ledger"

    def _held(self, stretches: tuple[Stretch, ...]) -> Held:
        ledger = self._ledger
        if ledger is None:
            return [(Spent(released(stretches)), [Run("", "", one.plan) for one in stretches])]
        names = [name for name in counted(self.plan, ledger) if name != ledger.run]
        others = [(ledger.counting(name), ledger.headers[name]) for name in names]
        own = ledger.runs[ledger.run]
        own = replace(own, releases=own.releases + own.owed) if own.owed else own
        return [(own, ledger.headers[ledger.run]), *others]


def _added(runs: Held) -> tuple[Counter[Release], Counter[Mechanism]]:
    """The training steps, and the other mechanisms, of several runs, counted."""
    releases: Counter[Release] = Counter()
    others: Counter[Mechanism] = Counter()
    for spent, _ in runs:
        releases.update(spent.releases)
        others.update(spent.others)
    return releases, others
