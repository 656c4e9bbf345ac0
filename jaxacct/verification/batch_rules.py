"""The definition of each rule by which records come into a batch: the pair of one step, as losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxacct import mechanisms as known
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.verification.ball_arithmetic import arb, ball
from jaxacct.verification.closed_form_losses import GaussianLoss
from jaxacct.verification.gaussian_mixture import (
    GaussianMixture,
    PairOfMixtures,
    Revealed,
    RevealedPairs,
    binomial_weights,
    hypergeometric_weights,
)
from jaxacct.verification.random_allocation import AllocationLoss
from jaxacct.verification.result import NotCovered
from jaxacct.verification.sampled_gaussian import SampledGaussian

__all__ = ["knows", "parts"]

MOST_RECORDS = 20_000
"""Most records of a data set whose cap is added up term by term."""


def knows(mechanism: Any, relation: str) -> bool:
    """Whether the mechanism is a rule of this file."""
    if isinstance(mechanism, known.SampledWithoutReplacement):
        return mechanism.group > 1 or (relation == "zero_out" and isinstance(mechanism.mechanism, known.Gaussian))
    if isinstance(mechanism, known.PoissonSampled):
        return mechanism.group > 1
    return isinstance(mechanism, RandomAllocation | known.TruncatedPoissonSampled | known.SampledWithReplacement)


def parts(mechanism: Any, relation: str, direction: str) -> list[tuple[Any, int]]:
    """The losses of one step of such a rule."""
    rules: dict[type, Callable[[Any, str, str], Any]] = {
        RandomAllocation: _allocated,
        known.TruncatedPoissonSampled: _capped,
        known.PoissonSampled: _group,
        known.SampledWithReplacement: _with_replacement,
        known.SampledWithoutReplacement: _without_replacement,
    }
    found = rules[type(mechanism)](mechanism, relation, direction)
    return [] if found is None else [(found, 1)]


def _allocated(mechanism: Any, relation: str, direction: str) -> Any:
    """One slot of t, of a single slot the Gaussian itself.  Under zero_out nobody else's slot moves either."""
    if mechanism.participations != 1:
        raise NotCovered("random allocation of several slots to a record")
    if relation == "replace_one":
        raise NotCovered("random allocation under replace_one")
    if not isinstance(mechanism.mechanism, known.Gaussian):
        raise NotCovered("random allocation of a mechanism with finitely many outputs")
    deviation, slots = ball(mechanism.mechanism.noise_multiplier), int(mechanism.slots)
    return GaussianLoss(1 / deviation**2) if slots == 1 else AllocationLoss(deviation, slots, direction)


def _group(mechanism: Any, relation: str, direction: str) -> Any:
    """Binomial(k, q) many records of a group, each of which adds 1."""
    if relation == "replace_one":
        raise NotCovered("a group of records under replace_one")
    rate, base = ball(mechanism.sampling_probability), mechanism.mechanism
    while isinstance(base, known.PoissonSampled):
        rate *= ball(base.sampling_probability)
        base = base.mechanism
    return _mixture(ball(base.noise_multiplier), *binomial_weights(mechanism.group, rate), direction)


def _with_replacement(mechanism: Any, relation: str, direction: str) -> Any:
    """Binomial(B, k/n) many draws, each of which displaces another record."""
    if relation in ("replace_one", "zero_out"):
        raise NotCovered(f"sampling with replacement under {relation}")
    chance = ball(float(mechanism.group)) / ball(float(mechanism.dataset_size))
    weights = binomial_weights(int(mechanism.batch_size), chance)
    return _mixture(ball(mechanism.mechanism.noise_multiplier) / 2, *weights, direction)


def _without_replacement(mechanism: Any, relation: str, direction: str) -> Any:
    """Records of a group that displace others; under zero_out the record keeps its slot and another may be there."""
    noise = ball(mechanism.mechanism.noise_multiplier)
    if mechanism.group == 1:
        return _zero_out(noise, ball(mechanism.sampling_ratio), direction)
    if relation in ("replace_one", "zero_out"):
        raise NotCovered(f"a group of records sampled without replacement under {relation}")
    size = int(mechanism.dataset_size)
    batch = round(size * float(mechanism.sampling_ratio))
    return _mixture(noise / 2, *hypergeometric_weights(size, mechanism.group, batch), direction)


def _capped(mechanism: Any, relation: str, direction: str) -> Any:
    """With probability tau the others fill the batch, and the record displaces one of them with probability q'."""
    noise, q = ball(mechanism.mechanism.noise_multiplier), ball(mechanism.sampling_probability)
    size, cap = int(mechanism.dataset_size), int(mechanism.cap)
    if relation == "replace_one":
        raise NotCovered("capped Poisson sampling under replace_one")
    tau, kept = _cap(size, cap, q)
    plain = None if q.is_zero() else _sampled(noise, q, direction)
    if not tau > 0:
        return plain
    ways: type[RevealedPairs] = RevealedPairs if relation == "zero_out" else Revealed
    rule, scale = (_zero_out, noise) if relation == "zero_out" else (_sampled, noise / 2)
    capped = rule(scale, kept / tau, direction)
    return capped if tau == 1 else ways(((1 - tau, plain), (tau, capped)))


def _cap(size: int, cap: int, q: Any) -> tuple[Any, Any]:
    """Pr[at least cap of the others are sampled], and the probability of that with the record kept."""
    if cap >= size or q.is_zero():
        return arb(0), arb(0)
    if size > MOST_RECORDS:
        raise NotCovered(f"a cap with more than {MOST_RECORDS} records")
    tau, kept = arb(0), arb(0)
    for others in range(cap, size):
        chance = math.comb(size - 1, others) * q**others * (1 - q) ** (size - 1 - others)
        tau, kept = tau + chance, kept + chance * q * cap / (others + 1)
    return tau, kept


def _sampled(noise: Any, rate: Any, direction: str) -> Any:
    return GaussianLoss(1 / noise**2) if rate == 1 else SampledGaussian(noise, rate, direction)


def _zero_out(noise: Any, rate: Any, direction: str) -> Any:
    """The worst pair for e^eps >= 1: another record opposite to x (remove), or like it (add)."""
    s, nothing = 1 / noise, arb(0)
    if direction == "remove":
        return PairOfMixtures(((-s, 1 - rate), (s, rate)), ((-s, 1 - rate), (nothing, rate)))
    return PairOfMixtures(((s, 1 - rate), (nothing, rate)), ((s, arb(1)),))


def _mixture(noise: Any, weights: Any, lost: Any, direction: str) -> Any:
    """Contributions of j with weight_j, noise in units of one; None where nobody contributes."""
    some = [j for j, w in enumerate(weights) if not w.is_zero()]
    if some == [0]:
        return None
    if len(some) == 1:
        return GaussianLoss((some[0] / noise) ** 2)
    return GaussianMixture.of(noise, weights, lost, direction)
