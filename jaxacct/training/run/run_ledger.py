"""Keeps one run's ledger open, writes the run's steps into it, and decides whether the run may go on with a plan."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, compose
from jaxacct.training.ledger import Ledger, Mark, contents
from jaxacct.training.plan import Plan
from jaxacct.training.run.checkpoints import Checkpoint, Store
from jaxacct.training.run.program import Prepared, Program, require_same_rows
from jaxacct.training.run.state import History, State, Stretch, document, followed, released, spent_by
from jaxacct.training.sharding.placement import Processes
from jaxacct.training.step.key_derivation import Root, StepKey, digest
from jaxacct.training.step.step_mechanisms import BY_PASS, composed, require_kept

Given = Ledger | str | os.PathLike[str] | None
"""An open ledger, the path of a new or an existing one, or None."""
_NOTING = 0.05
"""Share of a run's time that writing the ledger should take at most.  So one write enters several steps if needed."""


class RunLedger:
    """Open ledger of a run, into which only the first process writes.  `own` says whether `close` closes the ledger."""

    def __init__(self, processes: Processes, ledger: Ledger | None, own: bool, mark: Mark, most: int) -> None:
        self.ledger = ledger  # None except in the first process
        # `_most`: the most steps that one `note` writes; `_mark`: the ledger after this run's last entry
        self._processes, self._own, self._most, self._mark = processes, own, most, mark
        self._last = 0.0, 0.0, 1  # when the last `note` ended, how many seconds it took, how many steps it wrote

    def mark(self) -> Mark:
        """Return the ledger's present mark; with several processes, its mark after this run's last entry."""
        if self._processes.count == 1 and self.ledger is not None:
            return self.ledger.mark()._replace(run=self._mark.run)
        return self._mark

    def note(self, plan: Plan, step: int, now: Prepared, program: Program) -> int:
        """Write steps from `step` on that fit the budget.  After the write, return their number in every process."""

        def noted() -> int:
            begin, (last, seconds, steps) = time.perf_counter(), self._last
            few = math.ceil(seconds * steps / (_NOTING * max(begin - last, 1e-9)))
            count = max(min(few, self._most, plan.steps - step), 1)
            with self._own_run(plan) as ledger:
                keys = [now.key, *program.later(now.line, step + 1, count - 1)]
                count = _note(ledger, plan, step, keys, now.partition or None)
            self._last = time.perf_counter(), time.perf_counter() - begin, max(count, 1)
            return count

        return self._decided(noted)

    def seen(self, plan: Plan, step: int, looked: bool) -> None:
        """Write that outputs after `step` steps are about to be seen; `looked`: a callback has asked for them."""
        self._decided(lambda: self._write_seen(plan, step, looked))

    def _decided(self, write: Callable[[], int | None]) -> int:
        """Call `write` in the first process; in all, return its result (0 for None) and set the new `_mark`."""
        told = lambda: json.dumps([write(), self._mark.lines, self._mark.head]).encode()
        answer, lines, head = json.loads(self._processes.decide(told))
        self._mark = self._mark._replace(lines=lines, head=head)
        return answer or 0

    def stopped_early(self, plan: Plan, step: int) -> None:
        """Write that the early-stop rule ended the run after `step` steps.  The whole plan is then spent."""

        def write() -> None:
            with self._own_run(plan) as ledger:
                ledger.ended_early(step)

        self._decided(write)

    @property
    def ended(self) -> int | None:
        """Number of steps after which the early-stop rule ended this run, or None; always None in other processes."""
        return None if self.ledger is None else self.ledger.runs[self._mark.run].ended

    def cut_off(self, plan: Plan, step: int) -> None:
        """Write that an error ends the run after `step` steps, without waiting for processes without the error."""
        if self.ledger is not None:
            self._write_seen(plan, step, looked=False)

    def _write_seen(self, plan: Plan, step: int, looked: bool) -> None:
        assert self.ledger is not None
        if not self.ledger.is_open:  # an interrupt in the middle of an entry closes the ledger: open it again
            self.ledger, self._own = Ledger.open(self.ledger.path, self._mark.run), True
        with self._own_run(plan) as ledger:
            ledger.seen(step, looked)

    @contextlib.contextmanager
    def _own_run(self, plan: Plan) -> Iterator[Ledger]:
        """Lock the ledger for an entry of this run under `plan`'s batch rule; then set `_mark` to the new mark."""
        assert self.ledger is not None
        with self.ledger.lock:
            # A callback or a thread may have made another run the current run.
            self.ledger.run = self._mark.run
            rule = lambda plan: (plan.sampling, plan.truncation, plan.groups)
            if rule(self.ledger.plan) != rule(plan):
                self.ledger.replan(plan)
            yield self.ledger
            self._mark = self.ledger.mark()

    def close(self) -> None:
        """Close the ledger, if `open_run_ledger` opened it."""
        if self.ledger is not None and self._own:
            self.ledger.close()


def open_run_ledger(
    processes: Processes, ledger: Given, state: State, plan: Plan, by: str, note_ahead: int | None
) -> RunLedger | None:
    """Open the ledger in the first process, and make the state's run current.  Return None if there is no ledger."""
    # A step in the ledger counts as spent even if it is not taken.  So one write enters at most 1% of the plan's steps,
    # and only one step if a whole pass is one release: a step that is not taken could raise the cost of its pass.
    share = 1 if plan.sampling in BY_PASS else max(plan.steps // 100, 1)
    most = share if note_ahead is None else min(share, note_ahead)
    opened: Ledger | None = None

    def first() -> bytes:
        nonlocal opened
        with ledger.lock if isinstance(ledger, Ledger) else contextlib.nullcontext():
            opened = open_ledger(ledger, state, plan, by)
            return b"" if opened is None else json.dumps(opened.mark()).encode()

    told, own = processes.decide(first), not isinstance(ledger, Ledger)
    return RunLedger(processes, opened, own, Mark(*json.loads(told)), most) if told else None


def _note(ledger: Ledger, plan: Plan, step: int, keys: Sequence[StepKey], partition: str | None) -> int:
    """Write steps from `step` on, one for each key, and return how many; 0 if the budget has no room for the first."""
    require_same_rows(ledger, step, keys[0])
    entries = [
        (number, key.key_fingerprint, key.batch_fingerprint, *plan.at(number)[2:4])
        for number, key in enumerate(keys, step)
    ]
    there = ledger.step_entry(*entries[0], partition) in ledger.runs[ledger.run].seen
    until = None if there else ledger.another_way(step, partition)
    # after outputs were seen, all steps before the promised end are spent; a step that moves this end is written alone
    count = 1 if there or until is not None else len(entries)
    if not there and not plan.allows(ledger, step, partition, count):
        if count == 1 or not plan.allows(ledger, step, partition):
            return 0
        count = 1
    numbers, names, batches, noise, rates = zip(*entries[:count], strict=True)
    ledger.record_many(numbers, names, batches, noise, rates, [partition] * count)
    if until is not None:
        ledger.promise(step + 1, until)
    return count


def last_checkpoint(store: Store, state: State, like: Any, digest_of: Callable[[Any], bytes]) -> Checkpoint | None:
    """Return the last checkpoint or None.  Refuse a state of another run or step, unless it has spent nothing."""
    number = store.latest()
    if number is None:
        return None
    found = store.load(number, like, digest_of)
    if state.step == 0 and not state.history.stretches and state.history.ledger is None:
        return found
    known, line = state.lineage.root.known, found.lineage
    # a pickled state has no key, so compare what pickle writes; earlier versions wrote the plain digests
    same = state.lineage.root == line.root if known else state.lineage in (line.hidden(), line.replace(root=Root()))
    if not same:
        raise InputError(f"state of step {state.step} and the checkpoints are of two runs; use another folder")
    if known and (state.step, state.lineage.chain) != (found.step, line.chain):
        past = state.step > found.step
        what, remedy = ("past", "use another folder") if past else ("not", "give trainer.init(...) instead")
        raise InputError(f"state of step {state.step} is {what} the last checkpoint, {found.step}; {remedy}")
    return found


def require_same(processes: Processes, state: State, plan: Plan, *how: Any) -> None:
    """Raise InputError if the processes of a run have different arguments.  The message shows none of the arguments."""
    root = state.lineage.root
    key = root.key if root.known else None
    lineage, history = repr(state.lineage.fields() | {"root": key}), repr(document(state.history))
    told = (lineage, history, repr((state.step, state.stopped, state.seen)), plan.to_json(), repr(how))
    processes.agree("state, plan or options", digest(*(each.encode() for each in told)))


def require_ledger(history: History, ledger: Given) -> bytes:
    """Refuse a missing `ledger` if the history has spending in one.  Return b"", for `Processes.decide`."""
    mark = history.ledger
    if mark is None:
        return b""
    if ledger is None:
        raise InputError(f"ledger is missing: what was spent is noted in {mark.path}; give it as ledger")
    if not isinstance(ledger, Ledger) and not Path(ledger).exists():
        raise InputError(f"{ledger}: is not there, but {mark.lines} lines were noted in {mark.path}; restore it")
    return b""


def require_same_relation(plan: Plan, others: Sequence[Plan]) -> None:
    """Raise InputError if one of `others` has another relation or unit (record or user) than `plan`."""
    contents.one_unit(plan, others)
    contents.one_relation(plan.relation, others)


def open_ledger(ledger: Given, state: State, plan: Plan, by: str) -> Ledger | None:
    """Return the open ledger after `_settle`, or None if no ledger is given."""
    require_ledger(state.history, ledger)
    if ledger is None:
        return None
    name = digest(b"run", state.lineage.root.key).hex()[:16]
    settle = functools.partial(_settle, name=name, state=state, plan=plan, by=by)  # adds no frame, for the warning
    if isinstance(ledger, Ledger):
        settle(ledger)
        return ledger
    if not Path(ledger).exists():
        return Ledger.begun(ledger, settle)
    opened = Ledger.open(ledger)
    try:
        settle(opened)
    except BaseException:
        opened.close()
        raise
    return opened


def _settle(ledger: Ledger, name: str, state: State, plan: Plan, by: str) -> None:
    """Make `name` the current run; write its plan and what it spent without a ledger.  Refuse an unfit plan."""
    mark, stretches = state.history.ledger, state.history.stretches
    if mark is not None:
        if mark.run != name:
            raise InputError(f"state has another key than run {mark.run} in {mark.path}; give it as `fit` left it")
        ledger.require(mark)
    before = [line.plan for line in ledger.headers.get(name, [])] + [one.plan for one in stretches]
    ledger.run = name if name in ledger.runs else ledger.run
    names = contents.counted(plan, ledger) if plan.repetitions is None or name in ledger.runs else []
    require_same_relation(plan, [line.plan for each in names for line in ledger.headers[each]] + before)
    note = f"before this ledger began: {digest(state.lineage.chain).hex()[:32]}"
    earlier = composed(released(stretches))
    noted = [entry for entry in ledger.runs[name].noted if entry.note == note] if name in ledger.runs else []
    new = bool(stretches) and not any(entry.mechanism == earlier for entry in noted)
    require_kept("ledger", not (new and plan.shared))
    counting = [ledger.counting(each) if each != name else ledger.runs[each] for each in names]
    held = [contents.total(counting)] if names else []
    answers = []
    if plan.early_stop is not None and not (name in ledger.runs and ledger.runs[name].has_early_stop(plan)):
        answers = [plan.early_stop.mechanism]
    together = compose(*held, *([earlier] if new or not held else []), *answers)
    looks = ledger.runs[name].looks if name in ledger.runs and ledger.promised(name) else None
    _require_room(plan, before, together, state, state.seen or (looks is not None and looks.looked))
    begins = name not in ledger.runs
    if begins:
        if not stretches:
            _say_what_fits(ledger, name, state, plan)
        ledger.begin(before[0] if before else plan, name, by, earlier if new else None, note)
    ledger.run = name
    for one in stretches:
        if new and ledger.plan != one.plan:
            ledger.replan(one.plan)
    if new and not begins:
        ledger.spend(earlier, note)
    if ledger.plan != plan:
        ledger.replan(plan)
    if answers:
        ledger.spend(answers[0], contents.EARLY_STOP)
    if new and before[-1] == plan and (state.seen or state.stopped == "callback") and state.step < plan.steps:
        ledger.seen(state.step, state.seen)
    ended = ledger.runs[name].ended
    if ended is not None and state.stopped != "early_stop" and state.step >= ended:
        raise InputError(
            f"{ledger.path}: the early stop of the plan has ended this run after step {ended}; give the state that fit "
            "returned, or an older one"
        )
    ledger.promise_anew()


def _say_what_fits(ledger: Ledger, name: str, state: State, plan: Plan) -> None:
    """Warn how many steps of a new run fit if other runs have spent part of the budget; refuse if none fits."""
    others = [ledger.runs[each] for each in contents.counted(plan, ledger, name)]
    steps, more = sum(spent.steps + spent.torn for spent in others), sum(len(spent.noted) for spent in others)
    if not steps + more or state.step >= plan.steps:
        return
    fit, left = contents.room(plan, ledger, state.step, run=name), plan.steps - state.step
    counts = ((steps, "step"), (more, "other release"))
    held = " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts if count)
    begins = f"{ledger.path}: holds {held} of other runs; of this new run "
    remedy = (
        "to continue a run give the checkpoints= that it began with; a new run on the same data adds to what is spent, "
        "and needs a larger target_epsilon; for other data use another ledger"
    )
    if not fit:
        raise InputError(f"{begins}none of {left} steps fits the budget; {remedy}")
    warnings.warn(f"{begins}{fit} of {left} steps fit the budget; {remedy}", stacklevel=8)


def _require_room(plan: Plan, before: Sequence[Plan], spent: Mechanism, state: State, seen: bool) -> None:
    """Refuse `plan` if it may not follow the run's plans `before`.  `spent` is all that counts against `plan`."""
    choice = (plan.repetitions, plan.candidates)
    if any(one.repetitions is not None and (one.repetitions, one.candidates) != choice for one in before):
        raise InputError(
            "repetitions must be the same as in the steps so far, which do not pay for the choice of this run; let "
            "them stay, or begin another run by trainer.init(state.params), with a target that leaves room for it"
        )
    if not before or before[-1] == plan:
        return
    if before[-1].rates_digest != plan.rates_digest:
        raise InputError("sampling_rates must be the same as in the steps so far; let them stay, or begin another run")
    if before[-1].early_stop != plan.early_stop:
        raise InputError("early_stop must be the same as in the steps so far, which have paid for it; let it stay")
    plan.require_noise_of(before[-1])
    ended_by_itself = state.stopped in ("finished", "budget")
    if seen and not ended_by_itself and (plan.filter is None or before[-1].filter != plan.filter):
        raise InputError(
            "the run was stopped after callbacks had looked at its outputs, and so may not go on with another plan; "
            "go on with the same one, or begin with Plan(..., data_dependent=True) and recalibrate that"
        )
    if not plan.holds(spent):
        limit = f"target_epsilon = {plan.target_epsilon!r}" if plan.target_epsilon is not None else "filter"
        raise InputError(f"spending under another plan exceeds the plan's {limit}; make one with a larger target")


def require_room_after(state: State, plan: Plan) -> None:
    """Refuse a state if steps that may have followed it, and that no step repeats, leave no room for another one."""
    stretches, step = state.history.stretches, state.step
    followed_on = bool(stretches) and step < min(plan.steps, stretches[-1].end)
    if followed_on and last_step_in_budget(plan, stretches, state, "") == step:
        raise InputError(
            f"checkpoint of step {step} is of another plan, program, machine or data, or of a run without this ledger, "
            "and steps after it may have been released that no ledger holds; go on with the same ones, and keep a "
            "ledger from the first step on"
        )


def last_step_in_budget(plan: Plan, stretches: tuple[Stretch, ...], state: State, partition: str) -> int:
    """Return the first step that the budget of a run without a ledger does not allow, or `plan.steps`."""
    before, step = [one.plan for one in stretches], state.step
    require_same_relation(plan, before)
    contents.one_filter(plan, before)
    _require_room(plan, before, contents.total([spent_by(stretches)]), state, state.seen)
    if plan.target_epsilon is None and plan.filter is None:
        return plan.steps

    after = lambda steps: followed(stretches, plan, step, step + steps, partition)
    holds = lambda steps: plan.holds(contents.total([spent_by(after(steps))]))
    if step < plan.steps and plan.within and released(after(plan.steps - step)) <= plan.whole:
        return plan.steps
    return step + contents.furthest(holds, plan.steps - step)
