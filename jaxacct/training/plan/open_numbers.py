"""The largest number of steps, and the largest sampling probability, with which a run meets its target."""

from __future__ import annotations

import math
import warnings

import numpy as np

from jaxacct.calibration.dp_sgd_search import MAX_STEPS, RATE_RANGE
from jaxacct.calibration.search import least_private
from jaxacct.core.bounds import explain
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, cap_for, repeat
from jaxacct.training.plan.accounting import MARGIN, MARGIN_OF_WHOLE_NUMBERS, Terms, epsilon_of_run, tolerance
from jaxacct.training.plan.filters import promises
from jaxacct.training.plan.request import PlanRequest
from jaxacct.training.plan.schedule import Segment, allocated, slots_for
from jaxacct.training.step.step_mechanisms import ALLOCATION, FIXED, OF_ONE_SIZE, TRUNCATED, single, slots_of

__all__ = ["MANY_STEPS", "cap_of", "most_steps", "target_of", "upper_epsilon", "warn_not_reached", "with_rate"]

_STEPS_RANGE = (1.0, float(MAX_STEPS))
"""Where a number of steps is searched."""
_FIRST_STEPS, _FIRST_RATE = 1000.0, 0.01
"""Where these searches start: ordinary numbers of DP-SGD.  They change only how long a search takes."""
_SLOTS_RANGE = (1.0, 1e9)
"""Where a number of slots is searched."""
MANY_STEPS = 10**6
"""For a cap that has to be chosen before the number of steps is known: more than most runs have."""
_ROUNDING = 1e-12
"""Relative room for the rounding of epochs over a rate, before it is rounded up to steps."""


def target_of(terms: Terms) -> float:
    """The target, where there is one to solve for."""
    assert terms.target_epsilon is not None  # nothing is solved for without a target
    return terms.target_epsilon


def warn_not_reached(target: float, name: str, value: float, epsilon: float) -> None:
    """Warn that every searched value meets the target, so that the plan spends less than it may."""
    warnings.warn(
        f"target_epsilon = {target!r} is not reached: {name} = {value!r} is the limit of the search, and gives "
        f"epsilon = {epsilon:.6g}; give another number yourself to spend more, or lower the target",
        stacklevel=2,
    )


def _given_noise(request: PlanRequest) -> float:
    assert request.noise_multiplier is not None  # only one thing is left open
    return request.noise_multiplier


def cap_of(request: PlanRequest, rate: float, steps: int) -> int:
    """The cap that was asked for, or the least one that costs nothing."""
    if request.cap is not None:
        return request.cap
    if rate == 1.0:
        return request.dataset_size
    return cap_for(rate, request.dataset_size, steps, request.target_delta)


def upper_epsilon(terms: Terms, mechanism: Mechanism) -> np.ndarray:
    """Upper ends of epsilon of a batch of runs, as the plan will claim it: exactly, or through its filter."""
    if terms.data_dependent:
        return promises(mechanism, terms.target_delta, terms.relation)
    return np.asarray(epsilon_of_run(terms, mechanism).upper)


def _upper_without_schedule(request: PlanRequest, rate: np.ndarray, steps: np.ndarray, n: float) -> np.ndarray:
    """Upper ends of epsilon of runs without a schedule."""
    sigma = np.full(np.broadcast_shapes(rate.shape, steps.shape), request.noise_multiplier)
    if request.sampling == FIXED:
        length = np.ceil(n / np.round(rate * n))
        return upper_epsilon(request, repeat(single(FIXED, sigma, 1.0), np.ceil(steps / length)))
    if request.sampling == ALLOCATION:
        return upper_epsilon(request, repeat(single(ALLOCATION, sigma, rate), np.ceil(steps / slots_of(rate))))
    if request.sampling == TRUNCATED:
        rates, counts = np.broadcast_arrays(rate, steps)
        cap = np.array([cap_of(request, float(q), int(t)) for q, t in zip(rates, counts, strict=True)])
        return upper_epsilon(request, repeat(single(TRUNCATED, sigma, rates, cap, int(n)), steps))
    return upper_epsilon(request, repeat(single(request.sampling, sigma, rate), steps))


def most_steps(request: PlanRequest, rate: float, n: float) -> int:
    """The largest number of steps that meets the target."""
    target = target_of(request)
    # of random allocation only whole rounds: a part of one costs as much
    length = slots_for(n, rate * n) if request.sampling == ALLOCATION else 1
    rate = 1.0 / length if request.sampling == ALLOCATION else rate
    upper = lambda count: _upper_without_schedule(request, np.array(rate), length * count, n)
    found = least_private(
        upper,
        target,
        np.ceil(_FIRST_STEPS / length),
        _STEPS_RANGE,
        falls=False,
        rtol=tolerance(target),
        whole=True,
        margin=MARGIN_OF_WHOLE_NUMBERS,
    )
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} cannot be met: {explain('infeasible_steps')}")
    if found == _STEPS_RANGE[1]:
        raise InputError(f"target_epsilon = {target!r} allows {found:g} steps and more; give steps or epochs")
    return length * int(found)


def with_rate(request: PlanRequest, n: float) -> tuple[tuple[Segment, ...], int | None]:
    """The largest sampling probability that meets the target, with the steps that go with it: segments, and the cap."""
    target = target_of(request)

    def steps(rate: np.ndarray) -> np.ndarray:
        if request.steps is not None:
            return np.full(rate.shape, float(request.steps))
        return np.maximum(np.ceil(request.epochs / rate * (1.0 - _ROUNDING)), 1.0)

    def upper(rate: np.ndarray) -> np.ndarray:
        return _upper_without_schedule(request, rate, steps(rate), n)

    if request.sampling == ALLOCATION:
        slots = least_private(
            lambda slots: upper(1.0 / slots),
            target,
            1.0 / _FIRST_RATE,
            _SLOTS_RANGE,
            falls=True,
            rtol=tolerance(target),
            whole=True,
            margin=MARGIN_OF_WHOLE_NUMBERS,
        )
        rate = 1.0 / slots
    elif request.sampling not in OF_ONE_SIZE:
        limits = RATE_RANGE if request.steps is not None else (1.0 / n, 1.0)
        rate = least_private(
            upper, target, _FIRST_RATE, limits, falls=False, rtol=tolerance(target), margin=MARGIN * tolerance(target)
        )
    else:
        size = least_private(
            lambda size: upper(size / n),
            target,
            np.floor(_FIRST_RATE * n + 1.0),
            (1.0, n),
            falls=False,
            rtol=tolerance(target),
            whole=True,
            margin=MARGIN_OF_WHOLE_NUMBERS,
        )
        rate = size / n
    if math.isnan(rate):
        raise InputError(f"target_epsilon = {target!r} cannot be met: {explain('infeasible_rate')}")
    if rate == 1.0:
        spent = float(upper(np.array([rate]))[0])
        if spent < target * (1.0 - tolerance(target)):
            warn_not_reached(target, "sampling_probability", rate, spent)
    size = float(round(rate * n)) if request.sampling in OF_ONE_SIZE else rate * n
    sigma, count = _given_noise(request), int(steps(np.array(rate)))
    segments: tuple[Segment, ...] = (Segment(0, count, sigma, rate, size),)
    if request.sampling == ALLOCATION:
        segments = allocated(segments, int(n))
    cap = cap_of(request, rate, count) if request.sampling == TRUNCATED else None
    return segments, cap
