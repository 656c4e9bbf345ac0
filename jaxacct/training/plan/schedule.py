"""Segments: the stretches of a run in which nothing changes, made from schedules of noise and of batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.validation import COUNT, POSITIVE, InputError, check

__all__ = ["Piece", "Segment", "allocated", "joined", "merged", "pieces", "scaled", "slots_for", "steps_of"]

_ROUNDING = 1e-12
"""Relative room for the rounding of a number of examples over a batch size, before it is rounded up to steps."""


class Segment(NamedTuple):
    """Steps `start` to `start + steps - 1` of a run, all alike.

    The noise added to the sum of clipped gradients has standard deviation `noise_multiplier` times the clip norm;
    the sum is divided by `expected_batch_size` = `sampling_probability` * dataset_size.

    Parameters
    ----------
    start, steps : whole numbers; steps count from 0.
    noise_multiplier, sampling_probability, expected_batch_size : of each of these steps.

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
        """The first step after it."""
        return self.start + self.steps


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
        needed = start + math.ceil((examples - done) / batch * (1.0 - _ROUNDING))
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


def slots_for(dataset_size: float, batch_size: float) -> int:
    """The slots of a round whose expected batches, dataset_size/slots, are no larger than asked for.

    >>> slots_for(60_000, 512), slots_for(100, 100 / 49)
    (118, 49)
    """
    return max(math.ceil(dataset_size / batch_size * (1.0 - _ROUNDING)), 1)


def allocated(segments: Sequence[Segment], dataset_size: int) -> tuple[Segment, ...]:
    """The segments with the batches of random allocation: rates of exactly 1/slots."""
    found = []
    for segment in segments:
        slots = slots_for(dataset_size, segment.expected_batch_size)
        found.append(segment._replace(sampling_probability=1.0 / slots, expected_batch_size=dataset_size / slots))
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


def scaled(segments: Sequence[Segment], scale: float) -> tuple[Segment, ...]:
    """The same steps with all noise multiplied."""
    return tuple(s._replace(noise_multiplier=s.noise_multiplier * scale) for s in segments)


def _value(schedule: Sequence[Piece], step: int) -> float:
    """The value of a schedule at a step."""
    return next(value for until, value in schedule if until is None or step < until)
