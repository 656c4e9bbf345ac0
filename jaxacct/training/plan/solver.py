"""The solver: from a request to the segments, the noise and the filter of the plan that meets its target.

What may be left open is the noise, the number of steps, or the sampling probability.  Every search keeps only a value
that was itself evaluated by a certified engine (calibration/search.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
from jaxacct.calibration.search import least_private
from jaxacct.calibration.starting_points import gaussian_mu
from jaxacct.core.bounds import Bounds, explain
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, compose, dp_sgd, repeat
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE
from jaxacct.training.plan.accounting import (
    MARGIN,
    Terms,
    tolerance,
)
from jaxacct.training.plan.filters import Filter, filter_of
from jaxacct.training.plan.open_numbers import (
    MANY_STEPS,
    cap_of,
    most_steps,
    target_of,
    upper_epsilon,
    warn_not_reached,
    with_rate,
)
from jaxacct.training.plan.passes import releases
from jaxacct.training.plan.request import PlanRequest
from jaxacct.training.plan.schedule import (
    Piece,
    Segment,
    allocated,
    joined,
    merged,
    pieces,
    scaled,
    slots_for,
    steps_of,
)
from jaxacct.training.step.step_mechanisms import (
    ALLOCATION,
    FIXED,
    OF_ONE_SIZE,
    TRUNCATED,
    composed,
    prefixes,
    single,
)

__all__ = ["Solution", "noise_for", "solve", "together"]

_NEAR_WHOLE = 1e-9
"""How far, relatively, sampling_probability * dataset_size may be from a whole batch size by rounding alone."""
_EVERY_STEP = 2**53
"""A step past the end of every run."""


class Solution(NamedTuple):
    """What a request is solved to.

    segments : the run.  noise_multiplier : the scale of its noise.
    filter : the Renyi filter of a plan whose changes may depend on the data, or None.
    epsilon : that of the whole tuning, where it was found on the way (it takes half a minute), or None.
    cap : the largest batch of truncated Poisson sampling, or None.
    """

    segments: tuple[Segment, ...]
    noise_multiplier: float
    filter: Filter | None = None
    epsilon: Bounds | None = None
    cap: int | None = None


def solve(request: PlanRequest) -> Solution:
    """The request with what it leaves open solved for.

    Raises
    ------
    InputError : too much or too little is left open, schedules that do not fit, a target that no value meets.
    """
    solution = _solved(request)
    if not request.data_dependent:
        return solution
    segments = solution.segments
    cap = solution.cap or 0
    run = composed(releases(segments, segments[-1].end, request.sampling, request.dataset_size, cap=cap))
    return solution._replace(filter=filter_of(run, request.target_delta, request.relation))


def noise_for(terms: Terms, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float | None = None) -> float:
    """The least scale of the noise of `rest`, run after `spent`, with which both together meet the target.

    start : where the search starts; by default the noise of a Gaussian mechanism that resembles the run.

    Raises
    ------
    InputError : no noise meets the target.
    """
    target = target_of(terms)

    def upper(scales: np.ndarray) -> np.ndarray:
        return upper_epsilon(terms, together(terms, spent, rest, scales))

    if start is None:
        steps = math.fsum(s.steps for s in rest)
        rate = 1.0 if terms.sampling == FIXED else math.fsum(s.steps * s.sampling_probability for s in rest) / steps
        if terms.sampling == FIXED:
            steps = sum(releases(rest, rest[-1].end, FIXED, terms.dataset_size).values())
        mu = float(gaussian_mu(np.array([target]), np.array([terms.target_delta]))[0])
        start = float(np.log1p(mu**2 / (rate**2 * steps)) ** -0.5)
    rtol = tolerance(target)
    found = least_private(upper, target, start, NOISE_RANGE, falls=True, rtol=rtol, margin=MARGIN * rtol)
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} cannot be met: {explain('infeasible_noise')}")
    if found == NOISE_RANGE[0]:
        warn_not_reached(target, "noise_multiplier", found, float(upper(np.array([found]))[0]))
    return found


def together(terms: Terms, spent: Sequence[Segment], rest: Sequence[Segment], scales: np.ndarray) -> Mechanism:
    """Two stretches of a run, the noise of the second scaled by each of several factors: a batch of mechanisms."""
    n = terms.dataset_size
    if terms.sampling == FIXED:  # a pass may begin in the one and end in the other
        whole = [merged([*spent, *scaled(rest, float(scale))]) for scale in scales]
        return prefixes([releases(segments, segments[-1].end, FIXED, n) for segments in whole])
    parts = []
    for segments, factor in ((spent, np.ones_like(scales)), (rest, scales)):
        for release, count in releases(segments, _EVERY_STEP, terms.sampling, n, cap=terms.cap or 0).items():
            noise = release.noise_multiplier * factor
            parts.append(repeat(single(release.sampling, noise, *release[2:]), count))
    return parts[0] if len(parts) == 1 else compose(*parts)


def _solved(request: PlanRequest) -> Solution:
    """The solution but for the filter."""
    opened = request.left_open()
    n = float(request.dataset_size)
    given = request.noise_schedule
    noise = [Piece(None, 1.0)] if given is None else pieces("noise_schedule", given)
    if opened == "sampling_probability":
        segments, cap = with_rate(request, n)
        return Solution(segments, segments[0].noise_multiplier, cap=cap)
    batches = _batches(request, n)
    if opened == "steps":
        if request.sampling == TRUNCATED:
            request = replace(request, cap=cap_of(request, batches[0].value / n, MANY_STEPS))
        steps = most_steps(request, batches[0].value / n, n)
    elif request.steps:
        steps = request.steps
    else:
        assert request.epochs is not None
        steps = steps_of(batches, request.epochs * n)
    segments = joined(noise, batches, steps, int(n))
    if request.sampling == ALLOCATION:
        segments = allocated(segments, int(n))
    elif request.sampling not in OF_ONE_SIZE and request.sampling_probability is not None:
        rate = request.sampling_probability  # as given, not through the batch size
        segments = tuple(s._replace(sampling_probability=rate) for s in segments)
    if request.sampling == TRUNCATED:
        request = replace(request, cap=cap_of(request, max(s.sampling_probability for s in segments), steps))
    scale, epsilon = request.noise_multiplier, None
    if scale is None and request.searched_here:
        scale = noise_for(request, (), segments)
    elif scale is None:
        scale, epsilon = _calibrated_noise(request, segments[0])
    return Solution(scaled(segments, scale), scale, epsilon=epsilon, cap=request.cap)


def _batches(request: PlanRequest, n: float) -> list[Piece]:
    """Expected batch sizes, as pieces; refused where they do not fit the data."""
    if request.batch_schedule is not None:
        found = pieces("batch_schedule", request.batch_schedule)
    elif request.expected_batch_size is not None:
        found = [Piece(None, request.expected_batch_size)]
    elif request.slots is not None:
        found = [Piece(None, n / request.slots)]
    else:
        assert request.sampling_probability is not None
        found = [Piece(None, request.sampling_probability * n)]
        if found[0].value == 0.0:
            raise InputError("sampling_probability = 0.0 must be > 0 in a plan; use a positive one")
    name = "batch_schedule" if request.batch_schedule is not None else "expected_batch_size"
    for _, size in found:
        if size > n:
            raise InputError(f"{name} = {size:g} must be <= dataset_size = {n:g}; use smaller batches")
        if request.sampling in OF_ONE_SIZE and size != round(size):
            near = round(size)
            if request.sampling_probability is None or abs(size - near) > _NEAR_WHOLE * near:
                raise InputError(
                    f"{name} = {size!r} must be a whole number with sampling = {request.sampling!r}; use {max(near, 1)}"
                )
    if request.sampling == ALLOCATION:
        return [Piece(until, n / slots_for(n, size)) for until, size in found]
    return [Piece(until, float(round(size))) for until, size in found] if request.sampling in OF_ONE_SIZE else found


def _calibrated_noise(request: PlanRequest, segment: Segment) -> tuple[float, Bounds | None]:
    """The noise of a plain run; of a whole tuning that noise, and the epsilon that was found with it."""
    target = target_of(request)
    rate, steps = segment.sampling_probability, segment.steps
    rtol = tolerance(target)
    for aim in (target, target * (1.0 - 0.2 * rtol)):  # the second where two brackets differ by their rounding
        c = calibrate_noise_multiplier(
            aim,
            request.target_delta,
            sampling_probability=rate,
            steps=steps,
            repetitions=request.repetitions,
            candidates=request.candidates,
            relation=request.relation,
            rtol=rtol,
        )
        if not c.ok:
            raise InputError(f"target_epsilon = {target!r} cannot be met: {explain(str(c.status))}")
        sigma = float(c.value)
        if c.status == "not_binding":
            warn_not_reached(target, "noise_multiplier", sigma, float(c.epsilon.upper))
        if request.repetitions is not None:
            return sigma, c.epsilon
        if upper_epsilon(request, dp_sgd(sigma, sampling_probability=rate, steps=steps)) <= target:
            return sigma, None
    raise InputError(f"target_epsilon = {target!r} was met by no more than rounding; raise it a little")
