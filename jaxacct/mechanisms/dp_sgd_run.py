"""DP-SGD as a mechanism, by how its batches are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.core.keywords import with_hints
from jaxacct.core.validation import COUNT, PROBABILITY, InputError, Tracer, check, choice
from jaxacct.mechanisms.base import Mechanism
from jaxacct.mechanisms.combinators import Repeated
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.poisson_sampled import PoissonSampled
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.mechanisms.truncated_poisson import TruncatedPoissonSampled
from jaxacct.mechanisms.without_replacement import SampledWithoutReplacement

__all__ = ["SAMPLING", "dp_sgd", "rounds_of", "slots_of"]

NEAR_WHOLE = 1e-9
"""How far 1/q may be from a whole number of slots, relatively; that many slots are then taken."""


@with_hints
def dp_sgd(
    noise_multiplier: Any,
    sampling_probability: Any,
    steps: Any,
    *,
    sampling: str = "poisson",
    dataset_size: Any = None,
    cap: Any = None,
    group: int = 1,
) -> Repeated:
    """DP-SGD: ``steps`` Gaussian steps on random batches, under adding or removing one record.

    All numbers broadcast, one configuration per element: an array of noise multipliers is a batch of runs, not a
    schedule (for a schedule, compose the steps).  The batch rule says how batches are drawn:

    * "poisson": every record by itself with probability q in every step;
    * "random_allocation": the steps are in rounds of t = 1/q, and every record is in exactly one step of each round,
      drawn independently and afresh; a begun round counts whole;
    * "truncated_poisson": a Poisson sample, of which a uniformly random subset of ``cap`` is kept where it is larger;
    * "without_replacement": a uniformly random set of a share q of the data in every step.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise over the clip norm, the add/remove sensitivity.
    sampling_probability : array_like in [0, 1]
        q, the chance of each record to be in a batch; with "random_allocation" one over a whole number of slots.
    steps : array_like of whole numbers from 1 to 2**53
    sampling : {"poisson", "random_allocation", "truncated_poisson", "without_replacement"}
    dataset_size : array_like of whole numbers >= 1, optional
        Records, the larger number under add/remove; for "truncated_poisson", and for groups without replacement.
    cap : array_like of whole numbers >= 1, optional
        Most records of a batch, for "truncated_poisson".
    group : int >= 1
        Records of one person, which are protected together; one number for the whole batch.

    Returns
    -------
    Repeated
        For Poisson sampling ``repeat(PoissonSampled(Gaussian(noise_multiplier), sampling_probability), steps)``.

    Raises
    ------
    InputError
        A value outside its limits, with its index, shapes that do not broadcast, an argument that the batch rule lacks
        or has no use for.

    References
    ----------
    Abadi et al. (2016), Deep Learning with Differential Privacy.  README.md of this folder, for the other batch rules.

    >>> dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=1000).mechanism
    PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    >>> dp_sgd(1.0, 0.01, 1000, sampling="random_allocation").steps  # rounds of 100 steps
    10.0
    """
    if sampling in OTHER_RULES:
        raise InputError(f"sampling = {sampling!r} is not a rule of dp_sgd; build {OTHER_RULES[sampling]}")
    choice("sampling", sampling, SAMPLING)
    if (cap is not None) != (sampling == "truncated_poisson"):
        if cap is None:
            raise InputError("cap is missing; sampling = 'truncated_poisson' needs the most records of a batch")
        raise InputError(f"cap goes with sampling = 'truncated_poisson', not {sampling!r}; leave it out")
    if cap is not None and dataset_size is None:
        raise InputError("dataset_size is missing; sampling = 'truncated_poisson' needs the number of records")
    return _RUNS[sampling](Gaussian(noise_multiplier), sampling_probability, steps, dataset_size, cap, group)


def slots_of(sampling_probability: Any) -> float | np.ndarray:
    """The slots of a round of random allocation, 1/q; InputError where that is no whole number.

    >>> slots_of([0.01, 0.5])
    array([100.,   2.])
    """
    rate = np.asarray(check("sampling_probability", sampling_probability, PROBABILITY))
    exact = 1.0 / np.where(rate > 0.0, rate, 1.0)
    slots = np.rint(exact)
    bad = (rate <= 0.0) | (np.abs(exact - slots) > NEAR_WHOLE * exact)
    if bad.any():
        index = [int(i) for i in np.argwhere(bad)[0]]
        place = f"sampling_probability{index if index else ''}"
        raise InputError(
            f"{place} = {float(rate[tuple(index)])!r} must be one over a whole number of slots for "
            "sampling = 'random_allocation'; use 1/slots, such as 0.01"
        )
    return float(slots) if slots.ndim == 0 else slots


def rounds_of(steps: Any, slots: Any) -> float | np.ndarray:
    """The rounds that so many steps begin; a begun round counts whole.

    >>> rounds_of(1001, 100.0)
    11.0
    """
    rounds = np.ceil(np.asarray(check("steps", steps, COUNT)) / np.asarray(slots))
    return float(rounds) if rounds.ndim == 0 else rounds


def _poisson(base: Gaussian, rate: Any, steps: Any, size: Any, cap: Any, group: int) -> Repeated:
    return Repeated(PoissonSampled(base, rate, group=group), steps)


def _random_allocation(base: Gaussian, rate: Any, steps: Any, size: Any, cap: Any, group: int) -> Repeated:
    for name, value in (("sampling_probability", rate), ("steps", steps)):
        if isinstance(value, Tracer):
            raise InputError(
                f"{name} is a tracer; build RandomAllocation(Gaussian(...), slots) and repeat it inside jit"
            )
    slots = slots_of(rate)
    return Repeated(RandomAllocation(base, slots, group=group), rounds_of(steps, slots))


def _truncated_poisson(base: Gaussian, rate: Any, steps: Any, size: Any, cap: Any, group: int) -> Repeated:
    if group != 1:
        raise InputError(
            f"group = {group!r} is not known with sampling = 'truncated_poisson'; "
            "use ja.dp_sgd(noise_multiplier / (2 * group), 1.0, steps), which leaks no less"
        )
    return Repeated(TruncatedPoissonSampled(base, rate, dataset_size=size, cap=cap), steps)


def _without_replacement(base: Gaussian, rate: Any, steps: Any, size: Any, cap: Any, group: int) -> Repeated:
    step: Mechanism
    if group == 1:
        step = SampledWithoutReplacement(base, rate)
    else:
        if size is None:
            raise InputError("dataset_size is missing; a group without replacement needs the number of records")
        step = SampledWithoutReplacement(base, rate, dataset_size=size, group=group)
    return Repeated(step, steps)


_RUNS: dict[str, Callable[..., Repeated]] = {
    "poisson": _poisson,
    "random_allocation": _random_allocation,
    "truncated_poisson": _truncated_poisson,
    "without_replacement": _without_replacement,
}
"""The batch rules, each with the run that it makes."""
OTHER_RULES = {
    "balls_in_bins": "ja.BallsInBins(ja.Gaussian(noise_multiplier), slots, epochs)",
    "with_replacement": "ja.repeat(ja.SampledWithReplacement(ja.Gaussian(noise_multiplier), batch_size, dataset_size), "
    "steps)",
    "shuffled": "ja.repeat(ja.ShuffledBatches(ja.Gaussian(noise_multiplier), batches), epochs)",
}
"""Batch rules with other parameters than those of `dp_sgd`, each with the mechanism that accounts for it."""
SAMPLING = tuple(_RUNS)
"""The batch rules by name."""
