"""Contents: what the entries of a ledger say, wherever they are kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger.claim import claim
from jaxacct.training.ledger.format import Line, Run, Seen, Torn, run_of
from jaxacct.training.ledger.totals import Spent, total
from jaxacct.training.plan import Plan
from jaxacct.training.step.step_mechanisms import (
    ALLOCATION,
    BY_PASS,
    POISSON,
    TRUNCATED,
    Release,
    release_of_pass,
)

__all__ = ["Contents", "ahead"]


class Contents:
    """The runs of a ledger, what each has spent, and the plans that each has followed.

    path : where the ledger is, for messages.  run : the name of the current run.
    runs : what each run has spent, by its name.  headers : its `run` lines, with its plans.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Spent] = {}
        self.headers: dict[str, list[Run]] = {}
        self.run = ""

    @property
    def plan(self) -> Plan:
        """The plan that the current run follows now."""
        return self.headers[self.run][-1].plan

    def releases(self, run: str | None = None) -> Counter[Release]:
        """The counts of the training steps taken, of one run or of all."""
        known = self.runs.values() if run is None else [self._known(run)]
        return sum((spent.releases for spent in known), Counter())

    def spent(self, run: str | None = None) -> Mechanism:
        """All that counts, of one run or of all, as one mechanism, with the steps in `promised`."""
        return total([self.counting(name) for name in self._names(run)])

    def epsilon(
        self, delta: float, relation: str | None = None, run: str | None = None, *, whole: bool = False
    ) -> Bounds:
        """A certified bracket of the epsilon that counts, of one run or of all; by default under the plans' relation.

        If outputs of a run were seen before it ended, the rest of its plan counts as well (see `promised`).
        whole : count every run to the end of its plan.  Needed if a run was ended because of outputs that were seen
        outside of its callbacks, such as a process killed because of its checkpoints; the ledger cannot know this.

        A run whose plan was recalibrated from the data counts with its plan's filter (kind "bound"), composed with the
        other releases at the filter's order; inf if the run has spent more than the filter allows.
        """
        names = self._names(run)
        return claim([(self.counting(name, whole), self.headers[name]) for name in names], delta, relation)

    def epsilon_of_entries(self, delta: float, relation: str | None = None, run: str | None = None) -> Bounds:
        """Epsilon of the entries alone, for a run that continues whatever they show; no claim if it may have ended."""
        return claim([(self._known(name), self.headers[name]) for name in self._names(run)], delta, relation)

    def counting(self, run: str, whole: bool = False) -> Spent:
        """What counts of a run: its entries, and the rest of its plan if its outputs were seen."""
        spent, more = self._known(run), self.promised(run, whole)
        return replace(spent, releases=spent.releases + more) if more else spent

    def promised(self, run: str, whole: bool = False) -> Counter[Release]:
        """The steps left to a run whose outputs were seen; nothing if it ended by itself or has a Rényi filter.

        README.md of this folder, "Outputs that were seen", says why they count.  `whole` is that of `epsilon`.
        """
        spent, headers = self._known(run), self.headers[run]
        if any(line.plan.filter for line in headers):
            return Counter()
        plan, looks = headers[-1].plan, spent.looks
        until = plan.steps if whole else spent.next if looks is None else looks.until
        return spent.owed + ahead(plan, spent, spent.next, until - spent.next, None)

    def unfinished(self, run: str | None = None) -> list[str]:
        """The runs, of one or of all, that stopped before the end of their plan and have no `seen` entry."""
        names = self._names(run)
        return [name for name in names if self.runs[name].looks is None and self.promised(name, whole=True)]

    def count(self, entry: Line) -> None:
        """Count one more entry.  That of a run makes it the current one."""
        if isinstance(entry, Run):
            self._begin(entry)
            return
        spent = self._known(entry.run)
        if isinstance(entry, Seen) and entry.until > self.headers[entry.run][-1].plan.steps:
            raise InputError(f"{self.path}: until = {entry.until} is beyond the plan of run {entry.run!r:.60}")
        spent.add(entry)

    def _begin(self, entry: Run) -> None:
        """Begin a run, or continue it with another plan (README.md, "Outputs that were seen")."""
        headers, spent = self.headers.setdefault(entry.run, []), self.runs.setdefault(entry.run, Spent())
        self.run = entry.run
        if not headers or headers[-1].plan != entry.plan:
            if spent.looks is not None and spent.looks.looked:
                spent.owed = self.promised(entry.run)
            spent.looks = None if entry.told else Seen(entry.run, spent.next, entry.plan.steps, False)
        headers.append(entry)

    def torn(self, fragment: bytes) -> Torn:
        """The most that a step which was cut off can have been: the least noise and the highest rate of its run.

        With caps a higher rate may tell less.  So where there are several rates or caps it counts as a sum in which one
        record displaces another: a Gaussian of half the noise.
        """
        name = run_of(fragment)
        name = name if name in self.runs else self.run
        known = [*self.runs[name].releases]
        for line in self.headers[name]:
            known += [Release(line.plan.sampling, *s[2:4], *line.plan.truncation) for s in line.plan.segments]
        noise = min(release.noise_multiplier for release in known)
        rate = max(release.sampling_probability for release in known)
        sampling = self.headers[name][-1].plan.sampling
        if sampling == TRUNCATED:
            if len({(release.sampling, *release[2:]) for release in known}) > 1:
                return Torn(name, noise / 2.0, 1.0, POISSON)
            return Torn(name, noise, rate, TRUNCATED, known[0].cap, known[0].dataset_size)
        return Torn(name, noise, 1.0 if sampling == ALLOCATION else rate, sampling)

    def _names(self, run: str | None) -> list[str]:
        return list(self.runs) if run is None else [run]

    def _known(self, run: str) -> Spent:
        """What a run has spent; InputError for one that is not there."""
        if run not in self.runs:
            raise InputError(f"run = {run!r:.60} is not in {self.path}; it has {', '.join(map(repr, self.runs))}")
        return self.runs[run]


def ahead(plan: Plan, spent: Spent, step: int, steps: int, partition: str | None) -> Counter[Release]:
    """What the next steps of a run release under its plan.

    A pass of fixed batches, or a round of random allocation, costs as much as its step with the least noise.  So the
    pass under way adds a release only if its remaining steps have less noise than those in the ledger.
    """
    if steps < 1:
        return Counter()
    end = step + steps
    if plan.sampling not in BY_PASS:
        return plan.releases_between(step, end)
    _, first, last = plan.pass_of(step)
    found = plan.releases_between(min(last, end), end)
    noise = min(release.noise_multiplier for release in plan.releases_between(step, min(last, end)))
    if spent.within(first, last, step, partition) < noise**-2:
        found[release_of_pass(plan.sampling, noise, plan.at(step).sampling_probability)] += 1
    return found
