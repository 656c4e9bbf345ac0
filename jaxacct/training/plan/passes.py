"""What the steps of a run release, and the passes over the data that they make up: of fixed batches, and rounds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxacct.training.plan.schedule import Segment
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS, TRUNCATED, Release, release_of_pass, slots_of

__all__ = ["Block", "begins_pass", "blocks", "pass_at", "passes", "releases"]


def steps_per_pass(segment: Segment, sampling: str, dataset_size: int) -> int:
    """Steps in which the batches of a pass hold every record once: of a round, its slots."""
    if sampling == ALLOCATION:
        return int(slots_of(segment.sampling_probability))
    return math.ceil(dataset_size / segment.expected_batch_size)


class Block(NamedTuple):
    """Batches of one size: first step, step after the last, steps per pass, and the segments."""

    start: int
    end: int
    length: int
    members: tuple[Segment, ...]


def blocks(segments: Sequence[Segment], sampling: str, dataset_size: int) -> list[Block]:
    """The blocks of a run; a new batch size begins a new block, and so a new pass."""
    found = []
    for _, group in itertools.groupby(segments, lambda segment: segment.expected_batch_size):
        members = tuple(group)
        length = steps_per_pass(members[0], sampling, dataset_size)
        found.append(Block(members[0].start, members[-1].end, length, members))
    return found


def pass_at(known: Sequence[Block], step: int) -> tuple[int, int, int]:
    """(number, first step, step after the last one) of the pass that a step is in."""
    before = 0
    for start, end, length, _ in known:
        if step < end:
            number = (step - start) // length
            first = start + number * length
            return before + number, first, min(first + length, end)
        before += -(-(end - start) // length)
    raise ValueError(f"step {step} is in no segment")


def begins_pass(known: Sequence[Block], step: int) -> bool:
    """Whether what comes before a step, or before the end of the run, is made of whole passes and ended blocks."""
    found = next((block for block in known if step < block.end), known[-1])
    return (step - found.start) % found.length == 0


def passes(segments: Sequence[Segment], sampling: str, dataset_size: int) -> Iterator[tuple[int, int]]:
    """(first step, step after the last one) of every pass, one by one."""
    for start, end, length, _ in blocks(segments, sampling, dataset_size):
        for first in range(start, end, length):
            yield first, min(first + length, end)


def releases(
    segments: Sequence[Segment], until: int, sampling: str, dataset_size: int, start: int = 0, cap: int = 0
) -> Counter[Release]:
    """What the steps from `start` to before `until` release, counted.

    A pass of fixed batches or of random allocation is one release, with the least noise of those of its steps that are
    in this range.  The number of passes is computed, without a loop over them: there may be 2^53.
    """
    counts: Counter[Release] = Counter()
    if sampling not in BY_PASS:
        cut = (cap, dataset_size) if sampling == TRUNCATED else ()
        for segment in segments:
            steps = min(segment.end, until) - max(segment.start, start)
            if steps > 0:
                counts[Release(sampling, segment.noise_multiplier, segment.sampling_probability, *cut)] += steps
        return counts
    for begin, end, length, members in blocks(segments, sampling, dataset_size):
        low, high = max(begin, start), min(end, until)
        share = members[0].sampling_probability
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
                counts[release_of_pass(sampling, noise, share)] += other - own
            for number in {(first - begin) // length, (last - 1 - begin) // length}:
                if not own <= number < other:
                    least[number] = min(least.get(number, math.inf), noise)
        for noise in least.values():
            counts[release_of_pass(sampling, noise, share)] += 1
    return counts
