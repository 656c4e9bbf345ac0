"""Contents: what the entries of a ledger say, wherever they are kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jaxacct.bounds import Bounds
from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger.claim import claim
from jaxacct.training.ledger.format import Line, Run, Torn, run_of
from jaxacct.training.ledger.totals import Spent, total
from jaxacct.training.plan import Plan
from jaxacct.training.step.step_mechanisms import ALLOCATION, POISSON, TRUNCATED, Release
from jaxacct.validation import InputError

__all__ = ["Contents"]


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
        """The training steps spent, counted: of one run, or of all."""
        known = self.runs.values() if run is None else [self._known(run)]
        return sum((spent.releases for spent in known), Counter())

    def spent(self, run: str | None = None) -> Mechanism:
        """Everything released by one run, or by all, as one mechanism: derived from the entries, not from the plan."""
        return total(list(self.runs.values()) if run is None else [self._known(run)])

    def epsilon(self, delta: float, relation: str | None = None, run: str | None = None) -> Bounds:
        """Epsilon of what is spent, by one run or by all, as a certified bracket; relation by default the plans' own.

        Of a run whose plan was recalibrated by what the data said, it is that of the plan's filter (kind "bound"), at
        the filter's order composed with the other releases; inf where the run has spent more than the filter lets pass.
        """
        names = list(self.runs) if run is None else [run]
        several = [(self._known(name), self.headers[name]) for name in names]
        return claim(several, delta, relation)

    def count(self, entry: Line) -> None:
        """Count one more entry.  That of a run makes it the current one."""
        if isinstance(entry, Run):
            self.headers.setdefault(entry.run, []).append(entry)
            self.runs.setdefault(entry.run, Spent())
            self.run = entry.run
        else:
            self._known(entry.run).add(entry)

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

    def _known(self, run: str) -> Spent:
        """What a run has spent; InputError for one that is not there."""
        if run not in self.runs:
            raise InputError(f"run = {run!r:.60} is not in {self.path}; it has {', '.join(map(repr, self.runs))}")
        return self.runs[run]
