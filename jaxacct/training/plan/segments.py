"""Segments, the stretches of a run whose steps are all alike: their releases and their passes."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxacct.core.validation import COUNT, POSITIVE, InputError, check
from jaxacct.mechanisms.dp_sgd_run import nearest_slots
from jaxacct.training.step import step_mechanisms as rules
from jaxacct.training.step.step_mechanisms import Release, release_of_pass

ROUNDING = 1e-12
"""Relative amount by which a quotient is lowered before it is rounded up; more than the quotient's rounding error."""

_TINY = 1e-150
"""Stand-in for a rate of 0, so that rates can be compared by their ratio."""


class Segment(NamedTuple):
    """Steps `start` to `start + steps - 1` of a run, which have the same noise, rate and batch size.

    Parameters
    ----------
    start, steps : the first step, counted from 0, and the number of steps.
    noise_multiplier : the standard deviation of the noise on the sum of clipped gradients, divided by the clip norm.
    sampling_probability : the rate at which a step draws records; the largest rate, if records have different rates.
    expected_batch_size : the expected number of records in a batch, by which the noisy sum is divided.

    >>> Segment(start=10, steps=5, noise_multiplier=1.0, sampling_probability=0.1, expected_batch_size=6.0).end
    15
    """

    start: int
    steps: int
    noise_multiplier: float
    sampling_probability: float
    expected_batch_size: float

    @property
    def end(self) -> int:
        """First step after the segment."""
        return self.start + self.steps


class Piece(NamedTuple):
    """Steps with one value, from the end of the previous piece to step `until - 1`, or to the run's end if None."""

    until: int | None
    value: float


Schedule: TypeAlias = Sequence[float] | Sequence[tuple[int | None, float]] | np.ndarray
"""One number per step, or pairs (until_step, value), where the last until_step may be None for the end of the run."""


def pieces(name: str, schedule: Any) -> list[Piece]:
    items = list(schedule.tolist() if isinstance(schedule, np.ndarray) else schedule)
    if not items:
        raise InputError(f"{name} is empty; give one number per step, or pairs (until_step, value)")
    if not any(isinstance(item, Sequence) for item in items):
        values = np.asarray(check(name, items, POSITIVE))
        ends = [*(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
        return [Piece(end, float(values[end - 1])) for end in ends]
    found: list[Piece] = []
    for index, item in enumerate(items):
        if not isinstance(item, Sequence) or len(item) != 2:
            raise InputError(f"{name}[{index}] = {item!r:.40} must be a pair (until_step, value); pair all")
        value = float(check(f"{name}[{index}][1]", item[1], POSITIVE))
        if item[0] is None and index == len(items) - 1:
            return [*found, Piece(None, value)]
        until = int(check(f"{name}[{index}][0]", item[0], COUNT))
        before = found[-1].until if found else 0
        if before is not None and until <= before:
            raise InputError(f"{name}[{index}][0] = {until} must be > {before}, where the one before ends; sort them")
        found.append(Piece(until, value))
    return found


def steps_of(batches: Sequence[Piece], examples: float) -> int:
    """Return the smallest number of steps whose expected batches add up to at least `examples`."""
    done, start = 0.0, 0
    for until, batch in batches:
        needed = start + math.ceil((examples - done) / batch * (1.0 - ROUNDING))
        if until is None or needed <= until:
            return max(needed, 1)
        done, start = done + batch * (until - start), until
    raise InputError(f"batch_schedule ends at step {start}, before the epochs are over; let its last piece end at None")


def joined(noise: Sequence[Piece], batch: Sequence[Piece], steps: int, dataset_size: int) -> tuple[Segment, ...]:
    """Return the segments of a run, given the pieces of its noise schedule and of its batch schedule."""
    for name, schedule in (("noise_schedule", noise), ("batch_schedule", batch)):
        end = schedule[-1].until
        if end is not None and end != steps:
            raise InputError(f"{name} ends at step {end} but the plan has {steps} steps; let both end together")
    cuts = sorted({until if until is not None else steps for until, _ in (*noise, *batch)})
    found: list[Segment] = []
    start = 0
    for cut in cuts:
        factor, size = (
            next(value for until, value in schedule if until is None or start < until) for schedule in (noise, batch)
        )
        found.append(Segment(start, cut - start, factor, size / dataset_size, size))
        start = cut
    return merged(found)


def slots_for(dataset_size: float, batch_size: float) -> int:
    """Return the smallest number of slots for which dataset_size/slots is at most `batch_size`."""
    return max(math.ceil(dataset_size / batch_size * (1.0 - ROUNDING)), 1)


def with_rates(
    segments: Sequence[Segment], sampling: str, groups: int | None, dataset_size: int
) -> tuple[Segment, ...]:
    """Return the segments with the batch rule's rates; random allocation lowers batch sizes to dataset_size/slots."""
    if sampling == rules.ALLOCATION:
        each = [(s, slots_for(dataset_size, s.expected_batch_size)) for s in segments]
        return merged([s._replace(sampling_probability=1.0 / k, expected_batch_size=dataset_size / k) for s, k in each])
    if sampling == rules.CYCLIC:
        assert groups is not None
        # solver.py refuses batches whose rate is above 1, so `min` removes only a rounding error
        rate = lambda size: min(groups * size / dataset_size, 1.0)
        return tuple(s._replace(sampling_probability=rate(s.expected_batch_size)) for s in segments)
    return tuple(segments)


def merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return a run's segments from step 0: drop empty ones, and join neighbours of equal noise, rate and batch size."""
    found: list[Segment] = []
    start = 0
    for numbers, group in itertools.groupby((s for s in segments if s.steps), lambda segment: segment[2:]):
        found.append(Segment(start, sum(segment.steps for segment in group), *numbers))
        start = found[-1].end
    return tuple(found)


def scaled(segments: Sequence[Segment], scale: float) -> tuple[Segment, ...]:
    """Return the segments with every noise multiplier multiplied by `scale`."""
    return tuple(s._replace(noise_multiplier=s.noise_multiplier * scale) for s in segments)


class Block(NamedTuple):
    """Steps `start` to `end - 1`: the segments `members`, of one batch size, in passes or rounds of `length` steps."""

    start: int
    end: int
    length: int
    members: tuple[Segment, ...]


def blocks(segments: Sequence[Segment], sampling: str, dataset_size: int) -> list[Block]:
    """Return the blocks of a run.  A new batch size begins a new block, and so a new pass or round."""
    found = []
    for _, group in itertools.groupby(segments, lambda segment: segment.expected_batch_size):
        members = tuple(group)
        start, _, _, rate, size = members[0]
        end = members[-1].end
        if sampling == rules.ALLOCATION:
            length = int(nearest_slots(rate))
        elif sampling == rules.CYCLIC:
            length = round(rate * dataset_size / size)
        else:
            length = end - start if sampling == rules.ORDER else math.ceil(dataset_size / size)
        found.append(Block(start, end, length, members))
    return found


def even_steps(first: int, last: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced steps after step `first`, up to step `last`."""
    return np.unique(np.ceil(np.linspace(first, last, min(most, last - first) + 1)[1:])).astype(int)


def pass_at(known: Sequence[Block], step: int) -> tuple[int, int, int]:
    """Return (number, first step, last step + 1) of the pass that contains a step of a run of these blocks."""
    before = 0
    for start, end, length, _ in known:
        if step < end:
            number = (step - start) // length
            first = start + number * length
            return before + number, first, min(first + length, end)
        before += -(-(end - start) // length)
    raise ValueError(f"step {step} is in no segment")


def begins_pass(known: Sequence[Block], step: int) -> bool:
    """Return whether a pass begins at a step of these blocks; at the run's end, whether the last pass is whole."""
    found = next((block for block in known if step < block.end), known[-1])
    return (step - found.start) % found.length == 0


def releases(
    segments: Sequence[Segment], until: int, sampling: str, dataset_size: int, start: int = 0, cap: int = 0
) -> Counter[Release]:
    """Count releases of steps `start` to `until - 1`.  A pass or round is one release with these steps' least noise."""
    counts: Counter[Release] = Counter()
    if sampling not in rules.BY_PASS:
        cut = (cap, dataset_size) if sampling == rules.TRUNCATED else ()
        for segment in segments:
            steps = min(segment.end, until) - max(segment.start, start)
            if steps > 0:
                counts[Release(sampling, segment.noise_multiplier, segment.sampling_probability, *cut)] += steps
        return counts
    for begin, _, length, members in blocks(segments, sampling, dataset_size):
        share = members[0].sampling_probability
        # {pass: its least noise} for the first and last pass of each segment; no other pass can have several segments
        least: dict[int, float] = {}
        for segment in members:
            first, last = max(segment.start, start), min(segment.end, until)
            if first >= last:
                continue
            noise = segment.noise_multiplier
            ends = (first - begin) // length, (last - 1 - begin) // length
            counts[release_of_pass(sampling, noise, share)] += max(ends[1] - ends[0] - 1, 0)
            for number in ends:
                least[number] = min(least.get(number, math.inf), noise)
        for noise in least.values():
            counts[release_of_pass(sampling, noise, share)] += 1
    return +counts


def stand_ins(counts: Mapping[Release, int], most: int, dearer: bool = True) -> dict[Release, Release]:
    """Map releases to about `most` stand-ins that cost at least as much, or at most as much if `dearer` is False."""
    noise, rate = (min, max) if dearer else (max, min)
    found: dict[Release, Release] = {}
    for near in _near(counts, most):
        sigma = noise(release.noise_multiplier for release in near)
        share = rate(release.sampling_probability for release in near)
        found |= dict.fromkeys(near, near[0]._replace(noise_multiplier=sigma, sampling_probability=share))
    return found


def gathered(counts: Mapping[Release, int], known: Mapping[Release, Release]) -> Counter[Release]:
    """Return counts of stand-ins, given counts of releases and `known`, which maps releases to stand-ins."""
    found: Counter[Release] = Counter()
    for release, number in counts.items():
        found[known[release]] += number
    return found


def _near(counts: Mapping[Release, int], most: int) -> list[list[Release]]:
    """Return about `most` groups of releases that differ only in noise and, with Poisson sampling, in the rate."""

    def group(members: list[Release]) -> tuple[float, Release, int, list[Release]]:
        """Return (minus the cost of one stand-in, first member, field to split by: 1 noise or 2 rate, all members)."""
        noise = [release.noise_multiplier for release in members]
        rates = [max(release.sampling_probability, _TINY) for release in members]
        least, most, low, high = min(noise), max(noise), min(rates), max(rates)
        gain = -sum(counts[release] for release in members) * ((high / least) ** 2 - (low / most) ** 2)
        return gain, members[0], 1 if most / least >= high / low else 2, members

    # releases that may share a group, by a key with noise 1 and, with Poisson sampling, rate 1
    kinds: dict[Release, list[Release]] = {}
    for release in counts:
        share = 1.0 if release.sampling == rules.POISSON else release.sampling_probability
        kinds.setdefault(release._replace(noise_multiplier=1.0, sampling_probability=share), []).append(release)
    groups = [group(members) for members in kinds.values()]
    heapq.heapify(groups)
    while len(groups) < most and groups[0][0] < 0.0:
        _, _, along, members = heapq.heappop(groups)
        members = sorted(members, key=operator.itemgetter(along))
        values = [max(float(release[along]), _TINY) for release in members]
        ratios = [math.log(y / x) for x, y in pairwise(values)]
        middle = sum(ratios) / 2.0
        cut = 1 + next(i for i, passed in enumerate(accumulate(ratios)) if passed >= middle)
        for half in (members[:cut], members[cut:]):
            heapq.heappush(groups, group(half))
    return [members for _, _, _, members in groups]
