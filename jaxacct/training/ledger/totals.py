"""What a ledger's entries add up to, entry by entry."""

from __future__ import annotations

import heapq
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from jaxacct.mechanisms import Mechanism, compose, repeat
from jaxacct.training.ledger.format import Seen, Spend, Step, Torn
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS, FIXED, POISSON, Release, composed, slots_of

__all__ = ["MANY_RELEASES", "Spent", "at_least", "at_most", "cost", "total"]

MANY_RELEASES = 300
"""If more releases differ, similar ones are grouped: the time of an engine grows with their number."""

_ROUND_DOWN = 1.0 - 2.0**-40
"""Noise that stands for a sum of up to 1000 terms is never above the exact one."""
_TINY = 1e-150
"""Stands for a rate of 0 where rates are compared by their ratio."""


@dataclass
class _Partition:
    """Steps whose batches are disjoint: together they cost what the dearest of them does.

    dearest : the noise of the entries of that step.
    """

    sampling: str
    share: float
    steps: dict[int, list[float]] = field(default_factory=dict)
    dearest: list[float] = field(default_factory=list)

    def has_room_for(self, entry: Step) -> bool:
        """Whether a step can be one of these.

        A round has one number of slots, and no more steps than slots.  Others count as if all were in their batch.
        """
        if self.sampling == FIXED:
            return True
        full = len(self.steps) >= slots_of(self.share) and entry.step not in self.steps
        return self.share == entry.sampling_probability and not full

    def releases(self) -> list[Release]:
        """What the partition counts as.

        Of fixed batches each entry of the dearest step is a Gaussian.  Of random allocation the slots are the same in
        all entries, so that together they are one round, with the noise that 1/sigma^2 summed stands for.
        """
        if self.sampling == FIXED:
            return [Release(FIXED, sigma, 1.0) for sigma in self.dearest]
        if len(self.dearest) > 1:
            return [Release(ALLOCATION, cost(self.dearest) ** -0.5 * _ROUND_DOWN, self.share)]
        return [Release(ALLOCATION, sigma, self.share) for sigma in self.dearest]


@dataclass
class Spent:
    """What one run has released, derived from its entries alone.

    releases : the training steps, counted.  others : other mechanisms, counted; noted : their entries.
    steps : steps that count; of them `again` have a number that was there before.  same : exact replays, which do not
    count.  torn : lines that were cut off, which count.
    seen : the entries of steps; numbers : their step numbers; last : the last one.
    partitions : of fixed batches and random allocation, the passes over the data by their fingerprints.
    next : the step after the last one that counts.  looks : the `seen` entry under the current plan.  owed : the steps
    left of earlier plans that were replaced after their outputs were seen.
    """

    releases: Counter[Release] = field(default_factory=Counter)
    others: Counter[Mechanism] = field(default_factory=Counter)
    noted: list[Spend] = field(default_factory=list)
    steps: int = 0
    again: int = 0
    same: int = 0
    torn: int = 0
    seen: set[Step] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    partitions: dict[str, _Partition] = field(default_factory=dict)
    last: Step | None = None
    next: int = 0
    looks: Seen | None = None
    owed: Counter[Release] = field(default_factory=Counter)

    def add(self, entry: Step | Spend | Torn | Seen) -> None:
        """Count one more entry; an exact replay of a step counts once."""
        if isinstance(entry, Spend):
            self.others[entry.mechanism] += 1
            self.noted.append(entry)
            return
        if isinstance(entry, Seen):
            self.looks, self.next = entry, entry.step
            return
        if isinstance(entry, Torn):
            self.torn += 1
            self.next += 1  # it was this step, or an exact replay; it counts at least as much as this step
            self._release(entry)
            return
        if entry in self.seen:
            self.same += 1
            return
        self.seen.add(entry)
        self.last, self.next = entry, entry.step + 1
        self.again += entry.step in self.numbers
        self.steps += 1
        self.numbers.add(entry.step)
        if entry.sampling in BY_PASS and entry.partition is not None:
            of_its_kind = _Partition(entry.sampling, entry.sampling_probability)
            partition = self.partitions.setdefault(entry.partition, of_its_kind)
            if partition.has_room_for(entry):
                self._within(partition, entry)
                return
        self._release(entry)

    def _release(self, entry: Step | Torn) -> None:
        """Count one release; of a step of a pass that is not known its share of the data is 1, whatever it says."""
        share = 1.0 if entry.sampling in BY_PASS else entry.sampling_probability
        self.releases[Release(entry.sampling, entry.noise_multiplier, share, entry.cap, entry.dataset_size)] += 1

    def _within(self, partition: _Partition, entry: Step) -> None:
        """One more step in a partition: a record of its batch is in all its entries, and in no other's."""
        before = partition.releases()
        mine = partition.steps.setdefault(entry.step, [])
        mine.append(entry.noise_multiplier)
        if cost(mine) > cost(partition.dearest) or partition.dearest is mine:
            partition.dearest = mine
            self.releases.subtract(before)
            self.releases.update(partition.releases())
            self.releases += Counter()  # drops what has come down to 0

    def within(self, first: int, last: int, step: int, label: str | None) -> float:
        """What the partition of a new step costs already, as a sum of 1/sigma^2; 0 if the step does not continue one.

        label : the partition of the step; by default that of the last entry.  The step continues it if all steps of the
        partition are in the pass from step `first` to before step `last`, and none of them is this step.
        """
        label = label if label is not None or self.last is None else self.last.partition
        if label not in self.partitions:
            return 0.0
        partition = self.partitions[label]
        goes_on = step not in partition.steps and all(first <= number < last for number in partition.steps)
        return cost(partition.dearest) if goes_on else 0.0


def cost(noise: list[float]) -> float:
    """The sum of 1/sigma^2 of several Gaussians: they are ordered by it, and the larger one tells more."""
    return sum(sigma**-2 for sigma in noise)


def at_most(counts: Mapping[Release, int]) -> Counter[Release]:
    """An upper bound of the releases, with few different ones (README.md, "Many releases that differ")."""
    return _together(counts, min, max)


def at_least(counts: Mapping[Release, int]) -> Counter[Release]:
    """A lower bound of the releases: groups have their most noise and their lowest rate."""
    return _together(counts, max, min)


def _together(
    counts: Mapping[Release, int], noise: Callable[[list[float]], float], rate: Callable[[list[float]], float]
) -> Counter[Release]:
    found: Counter[Release] = Counter()
    for near in _near(counts) if len(counts) > MANY_RELEASES else [[release] for release in counts]:
        sigma = noise([release.noise_multiplier for release in near])
        share = rate([release.sampling_probability for release in near])
        found[near[0]._replace(noise_multiplier=sigma, sampling_probability=share)] += sum(counts[x] for x in near)
    return found


def _near(counts: Mapping[Release, int]) -> list[list[Release]]:
    """The releases in about `MANY_RELEASES` groups; the group that is costliest to join is split first."""
    kinds: dict[Release, list[Release]] = {}
    for release in counts:
        share = 1.0 if release.sampling == POISSON else release.sampling_probability
        kinds.setdefault(release._replace(noise_multiplier=1.0, sampling_probability=share), []).append(release)
    groups = [_group(counts, members) for members in kinds.values()]
    heapq.heapify(groups)
    while len(groups) < MANY_RELEASES and groups[0].gain < 0.0:
        _, _, along, members = heapq.heappop(groups)
        members = sorted(members, key=operator.itemgetter(along))
        values = [max(getattr(release, Release._fields[along]), _TINY) for release in members]
        ratios = [math.log(y / x) for x, y in pairwise(values)]
        middle = sum(ratios) / 2.0
        cut = 1 + next(i for i, passed in enumerate(accumulate(ratios)) if passed >= middle)
        for half in (members[:cut], members[cut:]):
            heapq.heappush(groups, _group(counts, half))
    return [members for _, _, _, members in groups]


class _Group(NamedTuple):
    """Releases of one kind.  gain : minus the cost of joining them, from worst to best; 0 for equal ones.

    along : the field in which they differ most.
    """

    gain: float
    first: Release
    along: int
    members: list[Release]


def _group(counts: Mapping[Release, int], members: list[Release]) -> _Group:
    noise = [release.noise_multiplier for release in members]
    rates = [max(release.sampling_probability, _TINY) for release in members]
    least, most, low, high = min(noise), max(noise), min(rates), max(rates)
    gain = -sum(counts[release] for release in members) * ((high / least) ** 2 - (low / most) ** 2)
    return _Group(gain, members[0], 1 if most / least >= high / low else 2, members)


def total(several: list[Spent], releases_as: Callable[[Counter[Release]], Counter[Release]] = Counter) -> Mechanism:
    """All releases of some runs as one mechanism; releases_as = `at_most` or `at_least` makes it shorter."""
    releases: Counter[Release] = Counter()
    others: Counter[Mechanism] = Counter()
    for spent in several:
        releases.update(spent.releases)
        others.update(spent.others)
    parts = [composed(releases_as(releases))] if releases or not others else []
    parts += [mechanism if count == 1 else repeat(mechanism, count) for mechanism, count in others.items()]
    return parts[0] if len(parts) == 1 else compose(*parts)
