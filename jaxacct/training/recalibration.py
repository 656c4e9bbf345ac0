"""Changing a plan under way: what is spent stays, and the rest is given the noise with which the whole holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from jaxacct import dp_sgd_calibration
from jaxacct.bounds import explain
from jaxacct.training.filters import spent_renyi
from jaxacct.training.left_open import noise_for, scaled, together
from jaxacct.training.releases import POISSON
from jaxacct.training.schedule import Filter, Piece, Segment, joined, merged, steps_of
from jaxacct.training.search import search, tolerance
from jaxacct.validation import COUNT, POSITIVE, InputError, check

if TYPE_CHECKING:
    from jaxacct.training.plan import Plan

__all__ = ["recalibrated"]


def recalibrated(
    plan: Plan,
    step: int,
    steps: int | None,
    epochs: float | None,
    expected_batch_size: float | None,
    data_dependent: bool,
) -> Plan:
    """`Plan.recalibrate`."""
    target = plan.target_epsilon
    if target is None:
        raise InputError("target_epsilon is missing; recalibrate a plan that has one")
    if plan.repetitions is not None:
        raise InputError("repetitions are given, and the K runs of a tuning must all be the same; make a new plan")
    plan.releases_after(step)  # refuses a step that is none
    spent, rest = _split(plan, int(step), steps, epochs, expected_batch_size)
    filter_ = plan.filter
    if data_dependent and filter_ is None:
        raise InputError(
            "data_dependent = True needs a plan that declared it from its first step; make it with "
            "Plan(..., data_dependent=True), whose claim holds whether anything is changed or not"
        )
    if filter_ is None and spent and plan.epsilon_after(step).upper >= target:
        raise InputError(
            f"step = {step}: what is spent by then already exceeds target_epsilon = {target!r}; raise it, or stop there"
        )
    start = rest[0].noise_multiplier
    relative = scaled(rest, 1.0 / start)
    if filter_ is None:
        scale = noise_for(plan, spent, relative, start)
    else:
        scale = _noise_in(filter_, plan, spent, relative, start)
    whole = merged([*spent, *scaled(relative, scale)])
    return type(plan).of(whole, plan, filter=filter_, noise_multiplier=scale)


def _split(
    plan: Plan, step: int, steps: int | None, epochs: float | None, expected_batch_size: float | None
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """What is spent, and what is left as it is to be run but for its noise, numbered from 0."""
    n = plan.dataset_size
    if steps is not None and epochs is not None:
        raise InputError("steps and epochs are both given; give one of them")
    spent = merged([s._replace(steps=max(min(s.end, step) - s.start, 0)) for s in plan.segments])
    left = [(s.end - step, s) for s in plan.segments if s.end > step] or [(1, plan.segments[-1])]
    noise = [Piece(until, s.noise_multiplier) for until, s in left]
    batches = [Piece(until, s.expected_batch_size) for until, s in left]
    if expected_batch_size is not None:
        size = float(check("expected_batch_size", expected_batch_size, POSITIVE))
        if size > n or (plan.sampling != POISSON and size != int(size)):
            what = "" if plan.sampling == POISSON else "a whole number "
            raise InputError(f"expected_batch_size = {size!r} must be {what}<= dataset_size = {n}; use another size")
        batches = [Piece(None, size)]
    open_noise, open_batches = _open_end(noise), _open_end(batches)
    if epochs is not None:
        seen = math.fsum(s.steps * s.expected_batch_size for s in spent)
        examples = float(check("epochs", epochs, POSITIVE)) * n - seen
        count = steps_of(open_batches, examples) if examples > 0 else 0
    else:
        count = plan.steps - step if steps is None else int(check("steps", steps, COUNT)) - step
    if count < 1:
        raise InputError(f"step = {step} leaves no steps to recalibrate; give steps (or epochs) beyond it")
    return spent, joined(_cut(open_noise, count), _cut(open_batches, count), count, n)


def _open_end(schedule: list[Piece]) -> list[Piece]:
    return [*schedule[:-1], Piece(None, schedule[-1].value)]


def _cut(schedule: list[Piece], steps: int) -> list[Piece]:
    """The schedule of the first steps alone."""
    kept = [piece for piece in schedule if piece.until is not None and piece.until < steps]
    return [*kept, Piece(None, schedule[len(kept)].value)]


def _noise_in(chosen: Filter, plan: Plan, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float) -> float:
    """The least scale of the remaining noise that the filter lets pass, all of it."""
    step = sum(s.steps for s in spent)
    if spent and not (spent_renyi(plan, plan.mechanism_after(step), chosen) < chosen.budget * (1.0 - 1e-9)):
        raise InputError(f"step = {step}: nothing is left of the Renyi filter, which holds what the plan uses; stop")
    used = lambda scales: spent_renyi(plan, together(plan, spent, rest, scales), chosen)
    rtol = tolerance(chosen.budget)  # as near in epsilon as in the divergence
    found = search(used, chosen.budget, start, dp_sgd_calibration.NOISE_RANGE, falling=True, rtol=rtol)
    if math.isnan(found):
        raise InputError(f"step = {step}: {explain('infeasible_noise')}")
    return found
