"""Segments: the stretches of a run in which nothing changes, made from schedules of noise and of batch size."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.representations.renyi_conversions import epsilon_from_renyi
from jaxacct.training.releases import FIXED, Release
from jaxacct.validation import COUNT, POSITIVE, InputError, check

__all__ = ["Filter", "Piece", "Segment", "blocks", "joined", "pass_at", "passes", "pieces", "releases", "steps_of"]


class Segment(NamedTuple):
    """Steps `start` to `start + steps - 1` of a run, all alike.

    The noise added to the sum of clipped gradients has standard deviation `noise_multiplier` times the clip norm;
    the sum is divided by `expected_batch_size` = `sampling_probability` * dataset_size.
    """

    start: int
    steps: int
    noise_multiplier: float
    sampling_probability: float
    expected_batch_size: float

    @property
    def end(self) -> int:
        """The first step after it."""
        return self.start + self.steps


class Filter(NamedTuple):
    """A Rényi filter [Feldman and Zrnic 2021]: at this order no more than `budget` is ever spent."""

    order: float
    budget: float

    def epsilon(self, delta: float) -> float:
        """What it promises at delta."""
        return float(epsilon_from_renyi([self.order], [self.budget], delta).upper)


class Piece(NamedTuple):
    """A value that holds for the steps before `until`, from the end of the piece before it; None is the end."""

    until: int | None
    value: float


def pieces(name: str, schedule: Any) -> list[Piece]:
    """A schedule as pieces: one number per step, or pairs (until_step, value) of which the last may end at None."""
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
            found.append(Piece(None, value))
            break
        until = int(check(f"{name}[{index}][0]", item[0], COUNT))
        before = found[-1].until if found else 0
        if before is not None and until <= before:
            raise InputError(f"{name}[{index}][0] = {until} must be > {before}, where the one before ends; sort them")
        found.append(Piece(until, value))
    return found


def steps_of(batches: Sequence[Piece], examples: float) -> int:
    """The least number of steps whose expected batches add up to so many examples."""
    done, start = 0.0, 0
    for until, batch in batches:
        needed = start + math.ceil((examples - done) / batch * (1.0 - 1e-12))
        if until is None or needed <= until:
            return max(needed, 1)
        done, start = done + batch * (until - start), until
    raise InputError(f"batch_schedule ends at step {start}, before the epochs are over; let its last piece end at None")


def joined(noise: Sequence[Piece], batch: Sequence[Piece], steps: int, dataset_size: int) -> tuple[Segment, ...]:
    """The segments of a run whose noise and expected batch size are scheduled."""
    for name, schedule in (("noise_schedule", noise), ("batch_schedule", batch)):
        end = schedule[-1].until
        if end is not None and end != steps:
            raise InputError(f"{name} ends at step {end} but the plan has {steps} steps; let both end together")
    cuts = sorted({until if until is not None else steps for until, _ in (*noise, *batch)})
    found: list[Segment] = []
    start = 0
    for cut in cuts:
        size = _value(batch, start)
        found.append(Segment(start, cut - start, _value(noise, start), size / dataset_size, size))
        start = cut
    return merged(found)


def merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbours that do the same as one, empty ones left out, numbered from step 0."""
    found: list[Segment] = []
    start = 0
    for segment in segments:
        if segment.steps == 0:
            continue
        if found and found[-1][2:] == segment[2:]:
            found[-1] = found[-1]._replace(steps=found[-1].steps + segment.steps)
        else:
            found.append(segment._replace(start=start))
        start += segment.steps
    return tuple(found)


def steps_per_pass(dataset_size: int, batch_size: float) -> int:
    """Steps in which fixed batches hold every record once."""
    return math.ceil(dataset_size / batch_size)


class Block(NamedTuple):
    """Fixed batches of one size: first step, step after the last, steps per pass, and the segments."""

    start: int
    end: int
    length: int
    members: tuple[Segment, ...]


def blocks(segments: Sequence[Segment], dataset_size: int) -> list[Block]:
    """The blocks of a run; a new batch size begins a new block, and so a new pass."""
    found = []
    for size, group in itertools.groupby(segments, lambda segment: segment.expected_batch_size):
        members = tuple(group)
        found.append(Block(members[0].start, members[-1].end, steps_per_pass(dataset_size, size), members))
    return found


def pass_at(known: Sequence[Block], step: int) -> tuple[int, int, int]:
    """(number, first step, step after the last one) of the pass of fixed batches that a step is in."""
    before = 0
    for start, end, length, _ in known:
        if step < end:
            number = (step - start) // length
            first = start + number * length
            return before + number, first, min(first + length, end)
        before += -(-(end - start) // length)
    raise ValueError(f"step {step} is in no segment")


def passes(segments: Sequence[Segment], dataset_size: int) -> Iterator[tuple[int, int]]:
    """(first step, step after the last one) of every pass of fixed batches, one by one."""
    for start, end, length, _ in blocks(segments, dataset_size):
        for first in range(start, end, length):
            yield first, min(first + length, end)


def releases(
    segments: Sequence[Segment], until: int, sampling: str, dataset_size: int, start: int = 0
) -> Counter[Release]:
    """What the steps from `start` to before `until` release; a pass of fixed batches counts at its least noise there.

    Passes are counted, not gone through: there may be 2^53.
    """
    counts: Counter[Release] = Counter()
    if sampling != FIXED:
        for segment in segments:
            steps = min(segment.end, until) - max(segment.start, start)
            if steps > 0:
                counts[Release(sampling, segment.noise_multiplier, segment.sampling_probability)] += steps
        return counts
    for begin, end, length, members in blocks(segments, dataset_size):
        low, high = max(begin, start), min(end, until)
        least: dict[int, float] = {}  # the noise of passes that are in more than one segment
        for segment in members:
            first, last = max(segment.start, low), min(segment.end, high)
            if first >= last:
                continue
            noise = segment.noise_multiplier
            # the first pass that begins in the segment, and the first that does not end in it
            own = -(-(first - begin) // length) if first > low else (first - begin) // length
            other = (last - begin) // length if last < high else -(-(last - begin) // length)
            if own < other:
                counts[Release(FIXED, noise, 1.0)] += other - own
            for number in {(first - begin) // length, (last - 1 - begin) // length}:
                if not own <= number < other:
                    least[number] = min(least.get(number, math.inf), noise)
        for noise in least.values():
            counts[Release(FIXED, noise, 1.0)] += 1
    return counts


def _value(schedule: Sequence[Piece], step: int) -> float:
    return next(value for until, value in schedule if until is None or step < until)
