"""Changing a plan under way: what is spent stays, and the rest is given the noise with which the whole holds."""

from __future__ import annotations

import math
from typing import TypeVar

from jaxacct.calibration.search import least_private
from jaxacct.core.bounds import explain
from jaxacct.core.validation import COUNT, POSITIVE, InputError, check
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE
from jaxacct.training.plan.accounting import MARGIN, tolerance
from jaxacct.training.plan.filters import Filter, spent_renyi
from jaxacct.training.plan.passes import begins_pass, blocks
from jaxacct.training.plan.schedule import Piece, Segment, allocated, joined, merged, scaled, slots_for, steps_of
from jaxacct.training.plan.solved import SolvedPlan
from jaxacct.training.plan.solver import noise_for, together
from jaxacct.training.step.step_mechanisms import ALLOCATION, OF_ONE_SIZE

__all__ = ["recalibrated"]

_LEFT_IN_FILTER = 1e-9
"""Of its budget a filter must have more than this share left, or nothing can follow: the rest is rounding."""

Solved = TypeVar("Solved", bound=SolvedPlan)


def recalibrated(
    plan: Solved,
    step: int,
    steps: int | None,
    epochs: float | None,
    expected_batch_size: float | None,
    data_dependent: bool,
) -> Solved:
    """`Plan.recalibrate`: another plan, of the same class."""
    target = plan.target_epsilon
    if target is None:
        raise InputError("target_epsilon is missing; recalibrate a plan that has one")
    if plan.repetitions is not None:
        raise InputError("repetitions are given, and the K runs of a tuning must all be the same; make a new plan")
    plan.releases_after(step)  # refuses a step that is none
    if plan.sampling == ALLOCATION and not plan.begins_pass(step):
        _, first, last = plan.pass_of(min(int(step), plan.steps - 1))
        raise InputError(
            f"step = {step} is within the round of steps {first} to {last - 1}, whose slots are drawn; recalibrate at "
            f"step {first}, or at the end of a whole round"
        )
    spent, rest = _split(plan, int(step), steps, epochs, expected_batch_size)
    whole_run = blocks(merged([*spent, *rest]), plan.sampling, plan.dataset_size)
    if plan.sampling == ALLOCATION and not begins_pass(whole_run, int(step)):
        raise InputError(
            f"step = {step} would be within a round: the batch size is that of the steps before it, whose last round "
            "was cut short; give another expected_batch_size"
        )
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
    plan: SolvedPlan, step: int, steps: int | None, epochs: float | None, expected_batch_size: float | None
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
        if size > n or (plan.sampling in OF_ONE_SIZE and size != int(size)):
            what = "a whole number " if plan.sampling in OF_ONE_SIZE else ""
            raise InputError(f"expected_batch_size = {size!r} must be {what}<= dataset_size = {n}; use another size")
        batches = [Piece(None, n / slots_for(n, size) if plan.sampling == ALLOCATION else size)]
    open_noise, open_batches = _open_end(noise), _open_end(batches)
    if epochs is not None:
        seen = math.fsum(s.steps * s.expected_batch_size for s in spent)
        examples = float(check("epochs", epochs, POSITIVE)) * n - seen
        count = steps_of(open_batches, examples) if examples > 0 else 0
    else:
        count = plan.steps - step if steps is None else int(check("steps", steps, COUNT)) - step
    if count < 1:
        raise InputError(f"step = {step} leaves no steps to recalibrate; give steps (or epochs) beyond it")
    rest = joined(_cut(open_noise, count), _cut(open_batches, count), count, n)
    return spent, allocated(rest, n) if plan.sampling == ALLOCATION else rest


def _open_end(schedule: list[Piece]) -> list[Piece]:
    """The schedule with its last piece going on for ever."""
    return [*schedule[:-1], Piece(None, schedule[-1].value)]


def _cut(schedule: list[Piece], steps: int) -> list[Piece]:
    """The schedule of the first steps alone."""
    kept = [piece for piece in schedule if piece.until is not None and piece.until < steps]
    return [*kept, Piece(None, schedule[len(kept)].value)]


def _noise_in(
    chosen: Filter, plan: SolvedPlan, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float
) -> float:
    """The least scale of the remaining noise that the filter lets pass, all of it."""
    step = sum(s.steps for s in spent)
    most = chosen.budget * (1.0 - _LEFT_IN_FILTER)
    if spent and not (spent_renyi(plan.mechanism_after(step), chosen, plan.relation) < most):
        raise InputError(f"step = {step}: nothing is left of the Renyi filter, which holds what the plan uses; stop")
    used = lambda scales: spent_renyi(together(plan, spent, rest, scales), chosen, plan.relation)
    rtol = tolerance(chosen.budget)  # as near in epsilon as in the divergence
    limits = NOISE_RANGE
    found = least_private(used, chosen.budget, start, limits, falls=True, rtol=rtol, margin=MARGIN * rtol)
    if math.isnan(found):
        raise InputError(f"step = {step}: {explain('infeasible_noise')}")
    return found
