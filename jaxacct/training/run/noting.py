"""A run's ledger as all its processes use it: the first one has it open, and the others wait for what it says."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from jaxacct.training.ledger import Ledger, Mark
from jaxacct.training.ledger.format import Step
from jaxacct.training.plan import Plan
from jaxacct.training.run.processes import Processes
from jaxacct.training.run.resume import open_ledger, require_ledger
from jaxacct.training.run.state import State
from jaxacct.training.run.streaming import require_same_rows
from jaxacct.training.step.key_derivation import StepKey

__all__ = ["Noted", "find_ledger", "open_noted"]


class Noted:
    """An open ledger.  `note` returns in no process before the entry is on the disk."""

    def __init__(self, processes: Processes, ledger: Ledger | None, own: bool, mark: Mark) -> None:
        self._processes, self._ledger, self._own = processes, ledger, own
        self._mark = mark

    @property
    def ledger(self) -> Ledger | None:
        """What it holds; None but in the first process."""
        return self._ledger

    def mark(self) -> Mark:
        """How far the ledger is; with several processes, how far it was after the last step."""
        if self._processes.count == 1 and self._ledger is not None:
            return self._ledger.mark()._replace(run=self._mark.run)
        return self._mark

    def note(self, plan: Plan, step: int, key: StepKey, partition: str | None) -> bool:
        """Put a step on record, if it is in the ledger already or the budget allows it."""

        def noted() -> bytes:
            assert self._ledger is not None
            with self._ledger.lock:
                self._own_run(self._ledger, plan)
                allowed = _note(self._ledger, plan, step, key, partition)
                self._mark = self._ledger.mark()
            return json.dumps([allowed, self._mark.lines, self._mark.head]).encode()

        allowed, lines, head = json.loads(self._processes.decide(noted))
        self._mark = self._mark._replace(lines=lines, head=head)
        return bool(allowed)

    def seen(self, plan: Plan, step: int, looked: bool) -> None:
        """Note that outputs are about to be seen, after `step` steps."""

        def noted() -> bytes:
            self._write_seen(plan, step, looked)
            return json.dumps([self._mark.lines, self._mark.head]).encode()

        lines, head = json.loads(self._processes.decide(noted))
        self._mark = self._mark._replace(lines=lines, head=head)

    def cut_off(self, plan: Plan, step: int) -> None:
        """Note that an error ends the run after `step` steps.  The first process writes; it waits for no other."""
        if self._ledger is not None:
            self._write_seen(plan, step, looked=False)

    def _write_seen(self, plan: Plan, step: int, looked: bool) -> None:
        assert self._ledger is not None
        if not self._ledger.is_open:  # an interrupt within an entry has closed it
            self._ledger, self._own = Ledger.open(self._ledger.path, self._mark.run), True
        with self._ledger.lock:
            self._own_run(self._ledger, plan)
            self._ledger.seen(step, looked)
            self._mark = self._ledger.mark()

    def _own_run(self, ledger: Ledger, plan: Plan) -> None:
        """Make this run the ledger's current one, by this plan: a callback or another thread may have begun one in it.

        An entry is of the run that is current, and by the batch rule of that run's plan.
        """
        ledger.run = self._mark.run
        if (ledger.plan.sampling, ledger.plan.truncation) != (plan.sampling, plan.truncation):
            ledger.replan(plan)

    def close(self) -> None:
        """Close the ledger, if it was opened here."""
        if self._ledger is not None and self._own:
            self._ledger.close()


def find_ledger(processes: Processes, state: State, ledger: Ledger | str | os.PathLike[str] | None) -> None:
    """InputError where what was spent is in a ledger that is not given, or not there."""

    def found() -> bytes:
        require_ledger(state.history, ledger)
        return b""

    processes.decide(found)


def open_noted(
    processes: Processes, ledger: Ledger | str | os.PathLike[str] | None, state: State, plan: Plan, by: str
) -> Noted | None:
    """The ledger at the run of a state, opened by the first process; None where that has none."""
    opened: Ledger | None = None
    own = False

    def first() -> bytes:
        nonlocal opened, own
        with ledger.lock if isinstance(ledger, Ledger) else contextlib.nullcontext():
            opened, own = open_ledger(ledger, state, plan, by)
            return b"" if opened is None else json.dumps(opened.mark()).encode()

    told: Any = processes.decide(first)
    return Noted(processes, opened, own, Mark(*json.loads(told))) if told else None


def _note(ledger: Ledger, plan: Plan, step: int, key: StepKey, partition: str | None) -> bool:
    require_same_rows(ledger, step, key)
    segment = plan.at(step)
    entry = (step, key.key_fingerprint, key.batch_fingerprint, *segment[2:4])
    there = Step(ledger.run, *entry, plan.sampling, partition, *plan.truncation) in ledger.runs[ledger.run].seen
    if not there and not plan.allows(ledger, step, partition):
        return False
    until = None if there else ledger.another_way(step, partition)
    ledger.record(*entry, partition=partition)
    if until is not None:
        ledger.promise(step + 1, until)
    return True
