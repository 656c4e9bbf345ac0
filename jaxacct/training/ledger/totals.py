"""What a ledger's entries add up to, entry by entry."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jaxacct.mechanisms import Mechanism, compose, repeat
from jaxacct.training.ledger.format import Spend, Step, Torn
from jaxacct.training.step.step_mechanisms import FIXED, Release, composed

__all__ = ["Spent", "cost", "total"]


@dataclass
class _Partition:
    """Steps whose batches are disjoint: together they cost what the dearest of them does."""

    steps: dict[int, list[float]] = field(default_factory=dict)
    dearest: list[float] = field(default_factory=list)


@dataclass
class Spent:
    """What one run has released, derived from its entries alone.

    releases : the training steps, counted.  others : other mechanisms, counted; noted : their entries.
    steps : steps that count; of them `again` have a number that was there before.  same : exact replays, which do not
    count.  torn : lines that were cut off, which count.
    seen : the entries of steps; numbers : their step numbers; last : the last one.
    partitions : of fixed batches, the passes over the data by their fingerprints.
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

    def add(self, entry: Step | Spend | Torn) -> None:
        """Count one more entry; an exact replay of a step counts once."""
        if isinstance(entry, Spend):
            self.others[entry.mechanism] += 1
            self.noted.append(entry)
            return
        if isinstance(entry, Torn):
            self.torn += 1
            self._release(entry.sampling, entry.noise_multiplier, entry.sampling_probability)
            return
        if entry in self.seen:
            self.same += 1
            return
        self.seen.add(entry)
        self.last = entry
        self.again += entry.step in self.numbers
        self.steps += 1
        self.numbers.add(entry.step)
        if entry.sampling == FIXED and entry.partition is not None:
            self._within(self.partitions.setdefault(entry.partition, _Partition()), entry)
        else:
            self._release(entry.sampling, entry.noise_multiplier, entry.sampling_probability)

    def _release(self, sampling: str, noise_multiplier: float, sampling_probability: float) -> None:
        """Count one release; of fixed batches its share of the data is 1, whatever the entry says."""
        share = 1.0 if sampling == FIXED else sampling_probability
        self.releases[Release(sampling, noise_multiplier, share)] += 1

    def _within(self, partition: _Partition, entry: Step) -> None:
        """One more step in a partition: a record of its batch is in all its entries, and in no other's."""
        mine = partition.steps.setdefault(entry.step, [])
        mine.append(entry.noise_multiplier)
        if cost(mine) > cost(partition.dearest) or partition.dearest is mine:
            if partition.dearest is mine:
                self._release(FIXED, entry.noise_multiplier, 1.0)
                return
            self.releases.subtract(Release(FIXED, sigma, 1.0) for sigma in partition.dearest)
            self.releases += Counter()  # drops what has come down to 0
            self.releases.update(Release(FIXED, sigma, 1.0) for sigma in mine)
            partition.dearest = mine

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


def total(several: list[Spent]) -> Mechanism:
    """Everything that some runs have released, as one mechanism."""
    releases: Counter[Release] = Counter()
    others: Counter[Mechanism] = Counter()
    for spent in several:
        releases.update(spent.releases)
        others.update(spent.others)
    parts = [composed(releases)] if releases or not others else []
    parts += [mechanism if count == 1 else repeat(mechanism, count) for mechanism, count in others.items()]
    return parts[0] if len(parts) == 1 else compose(*parts)
