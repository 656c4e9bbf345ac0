"""What a plan leaves open, solved for: the noise, the steps or the sampling probability that meets its target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct import account, calibration, dp_sgd_calibration
from jaxacct.bounds import explain
from jaxacct.calibration_start import gaussian_mu
from jaxacct.mechanisms import Mechanism, compose, dp_sgd, repeat
from jaxacct.training.filters import promises
from jaxacct.training.releases import FIXED, POISSON, prefixes, single
from jaxacct.training.schedule import Piece, Segment, joined, merged, pieces, releases, steps_of
from jaxacct.training.search import search, tolerance
from jaxacct.validation import InputError

if TYPE_CHECKING:
    from jaxacct.training.plan import Plan

__all__ = ["noise_for", "scaled", "solved", "together"]

OPEN = {
    "noise_multiplier": ("noise_multiplier",),
    "steps": ("steps", "epochs"),
    "sampling_probability": ("sampling_probability", "expected_batch_size", "batch_schedule"),
}
"""What may be left open, and the names that give it."""
STEPS, RATE = (1.0, 1e9), (1e-12, 1.0)
"""Where a number of steps and a sampling probability are searched."""


def solved(plan: Plan) -> tuple[Segment, ...]:
    """The segments of a plan, with what it leaves open solved for."""
    opened = _open(plan)
    n = float(plan.dataset_size)
    noise = [Piece(None, 1.0)] if plan.noise_schedule is None else pieces("noise_schedule", plan.noise_schedule)
    if opened == "sampling_probability":
        rate, steps = _rate(plan, n)
        size = rate * n if plan.sampling == POISSON else float(round(rate * n))
        return (Segment(0, steps, plan.noise_multiplier, rate, size),)
    batches = _batches(plan, n)
    if opened == "steps":
        steps = _steps(plan, batches[0].value / n, n)
    else:
        steps = plan.steps or steps_of(batches, plan.epochs * n)
    segments = joined(noise, batches, steps, int(n))
    if plan.sampling == POISSON and plan.sampling_probability is not None:  # as given, not through the batch size
        segments = tuple(s._replace(sampling_probability=plan.sampling_probability) for s in segments)
    scale = plan.noise_multiplier
    if scale is None:
        scale = noise_for(plan, (), segments) if _own(plan) else _calibrated_noise(plan, segments[0])
        vars(plan)["noise_multiplier"] = scale
    return scaled(segments, scale)


def scaled(segments: tuple[Segment, ...], scale: float) -> tuple[Segment, ...]:
    """The same steps with all noise multiplied."""
    return tuple(s._replace(noise_multiplier=s.noise_multiplier * scale) for s in segments)


def noise_for(plan: Plan, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float | None = None) -> float:
    """The least scale of the noise of `rest`, run after `spent`, with which both together meet the target."""
    target = plan.target_epsilon

    def upper(scales: np.ndarray) -> np.ndarray:
        return _epsilon(plan, together(plan, spent, rest, scales))

    if start is None:
        steps = math.fsum(s.steps for s in rest)
        rate = 1.0 if plan.sampling == FIXED else math.fsum(s.steps * s.sampling_probability for s in rest) / steps
        if plan.sampling == FIXED:
            steps = sum(releases(rest, rest[-1].end, FIXED, plan.dataset_size).values())
        mu = float(gaussian_mu(np.array([target]), np.array([plan.target_delta]))[0])
        start = float(np.log1p(mu**2 / (rate**2 * steps)) ** -0.5)
    found = search(upper, target, start, dp_sgd_calibration.NOISE_RANGE, falling=True)
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} cannot be met: {explain('infeasible_noise')}")
    return found


def together(plan: Plan, spent: tuple[Segment, ...], rest: tuple[Segment, ...], scales: np.ndarray) -> Mechanism:
    """Two stretches of a run, the noise of the second scaled by each of several factors: a batch of mechanisms."""
    n = plan.dataset_size
    if plan.sampling == FIXED:  # a pass may begin in the one and end in the other
        whole = [merged([*spent, *scaled(rest, float(scale))]) for scale in scales]
        return prefixes([releases(segments, segments[-1].end, FIXED, n) for segments in whole])
    parts = []
    for segments, factor in ((spent, np.ones_like(scales)), (rest, scales)):
        for release, count in releases(segments, 2**53, plan.sampling, n).items():
            parts.append(repeat(single(plan.sampling, release.noise_multiplier * factor, release[2]), count))
    return parts[0] if len(parts) == 1 else compose(*parts)


def _open(plan: Plan) -> str | None:
    """The one thing to solve for; refusals of plans that leave open too much or too little."""
    given = {key: [n for n in names if getattr(plan, n) is not None] for key, names in OPEN.items()}
    for names in given.values():
        if len(names) > 1:
            raise InputError(f"{names[0]} and {names[1]} are both given; give one of them")
    opened = [key for key, names in given.items() if not names]
    words = " and ".join(" or ".join(OPEN[key][:2]) for key in opened)
    if plan.target_epsilon is None:
        if opened:
            raise InputError(f"{words} is left open without a target_epsilon to solve it for; give it, or the target")
        return None
    if not opened:
        raise InputError(
            "target_epsilon is given and nothing is left open; leave out noise_multiplier, steps or the batch size, "
            "or leave out target_epsilon to have epsilon reported"
        )
    if len(opened) > 1:
        raise InputError(f"{words} are left open; one can be solved for, give the others")
    if opened[0] != "noise_multiplier":
        for name in ("noise_schedule", "batch_schedule", "repetitions"):
            if getattr(plan, name) is not None:
                raise InputError(f"{name} is given, so only noise_multiplier can be left open; give {words}")
    elif plan.repetitions is not None and _own(plan):
        raise InputError(
            "repetitions with a target need sampling = 'poisson' and no schedule; give noise_multiplier and leave out "
            "target_epsilon to have epsilon reported"
        )
    return opened[0]


def _own(plan: Plan) -> bool:
    """Whether the noise is found by the search of this module, not by ja.calibrate_noise_multiplier."""
    scheduled = plan.noise_schedule is not None or plan.batch_schedule is not None
    return plan.sampling != POISSON or scheduled or plan.data_dependent


def _batches(plan: Plan, n: float) -> list[Piece]:
    """Expected batch sizes, as pieces; refused where they do not fit the data."""
    if plan.batch_schedule is not None:
        found = pieces("batch_schedule", plan.batch_schedule)
    elif plan.expected_batch_size is not None:
        found = [Piece(None, plan.expected_batch_size)]
    else:
        found = [Piece(None, plan.sampling_probability * n)]
        if found[0].value == 0.0:
            raise InputError("sampling_probability = 0.0 must be > 0 in a plan; use a positive one")
    name = "batch_schedule" if plan.batch_schedule is not None else "expected_batch_size"
    for _, size in found:
        if size > n:
            raise InputError(f"{name} = {size:g} must be <= dataset_size = {n:g}; use smaller batches")
        if plan.sampling != POISSON and size != round(size):
            near = round(size)
            if plan.sampling_probability is None or abs(size - near) > 1e-9 * near:
                raise InputError(
                    f"{name} = {size!r} must be a whole number with sampling = {plan.sampling!r}; use {max(near, 1)}"
                )
    return found if plan.sampling == POISSON else [Piece(until, float(round(size))) for until, size in found]


def _epsilon(plan: Plan, mechanism: Mechanism) -> np.ndarray:
    """Upper ends of epsilon of a batch of runs, as the plan will claim it: exactly, or through its filter."""
    if plan.data_dependent:
        return promises(plan, mechanism)
    rtol = 0.2 * tolerance(plan.target_epsilon or 1.0)
    return np.asarray(account.epsilon(mechanism, plan.target_delta, relation=plan.relation, rtol=rtol).upper)


def _upper(plan: Plan, rate: np.ndarray, steps: np.ndarray, n: float) -> np.ndarray:
    """Upper ends of epsilon of runs without a schedule."""
    sigma = np.full(np.broadcast_shapes(rate.shape, steps.shape), plan.noise_multiplier)
    if plan.sampling == FIXED:
        length = np.ceil(n / np.round(rate * n))
        return _epsilon(plan, repeat(single(FIXED, sigma, 1.0), np.ceil(steps / length)))
    return _epsilon(plan, repeat(single(plan.sampling, sigma, rate), steps))


def _steps(plan: Plan, rate: float, n: float) -> int:
    """The largest number of steps that meets the target."""
    target = plan.target_epsilon
    found = search(
        lambda steps: _upper(plan, np.array(rate), steps, n), target, 1000.0, STEPS, falling=False, whole=True
    )
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} cannot be met: {explain('infeasible_steps')}")
    if found == STEPS[1]:
        raise InputError(f"target_epsilon = {target!r} allows {found:g} steps and more; give steps or epochs")
    return int(found)


def _rate(plan: Plan, n: float) -> tuple[float, int]:
    """The largest sampling probability that meets the target, and the number of steps."""
    target = plan.target_epsilon

    def steps(rate: np.ndarray) -> np.ndarray:
        if plan.steps is not None:
            return np.full(rate.shape, float(plan.steps))
        return np.maximum(np.ceil(plan.epochs / rate * (1.0 - 1e-12)), 1.0)

    if plan.sampling == POISSON:
        limits = RATE if plan.steps is not None else (1.0 / n, 1.0)
        found = search(lambda q: _upper(plan, q, steps(q), n), target, 0.01, limits, falling=False)
    else:
        size = search(
            lambda b: _upper(plan, b / n, steps(b / n), n), target, 0.01 * n + 1.0, (1.0, n), falling=False, whole=True
        )
        found = size / n
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} cannot be met: {explain('infeasible_rate')}")
    return found, int(steps(np.array(found)))


def _calibrated_noise(plan: Plan, segment: Segment) -> float:
    """The noise of a plain run; also that of a whole tuning."""
    target = plan.target_epsilon
    fields: dict[str, Any] = {"sampling_probability": segment.sampling_probability, "steps": segment.steps}
    rtol = tolerance(target)
    for aim in (target, target * (1.0 - 0.2 * rtol)):  # the second where two brackets differ by their rounding
        c = calibration.calibrate_noise_multiplier(
            aim,
            plan.target_delta,
            **fields,
            repetitions=plan.repetitions,
            candidates=plan.candidates,
            relation=plan.relation,
            rtol=rtol,
        )
        if not c.ok:
            raise InputError(f"target_epsilon = {target!r} cannot be met: {explain(str(c.status))}")
        sigma = float(c.value)
        if plan.repetitions is not None:
            vars(plan)["epsilon"] = c.epsilon  # each takes half a minute
            return sigma
        if _epsilon(plan, dp_sgd(sigma, **fields)) <= target:
            return sigma
    raise InputError(f"target_epsilon = {target!r} was met by no more than rounding; raise it a little")
