"""The definition of each rule by which records come into a batch: the pair of one step, as losses."""

from __future__ import annotations

import math
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
from jaxacct.verification.rules import Asked, Part, defines, fields_of
from jaxacct.verification.sampled_gaussian import SampledGaussian

__all__ = ["drawn_group", "group_of", "kept_slot"]

MOST_RECORDS = 20_000
"""Most records of a data set whose cap is added up term by term."""


@defines(RandomAllocation)
def _allocated(asked: Asked, mechanism: Any, slots: Any, participations: Any, group: Any) -> list[Part]:
    """One slot of t, of a single slot the Gaussian itself.  Under zero_out nobody else's slot moves either."""
    _refuse(asked, "RandomAllocation")
    if participations != 1:
        raise NotCovered("random allocation of several slots to a record")
    if group != 1:
        raise NotCovered("random allocation of a group of records")
    if asked.relation == "replace_one":
        raise NotCovered("random allocation under replace_one")
    deviation, many = _noise(mechanism), int(slots)
    return [(GaussianLoss(1 / deviation**2) if many == 1 else AllocationLoss(deviation, many, asked.direction), 1)]


def group_of(asked: Asked, mechanism: Any, group: int) -> list[Part]:
    """Binomial(k, q) records of a group take part, and each adds 1; q is the product of all nested rates."""
    if asked.relation == "replace_one":
        raise NotCovered("a group of records under replace_one")
    rate = asked.rate
    while type(mechanism) is known.PoissonSampled:
        inner = fields_of(mechanism)
        if inner["group"] != 1:
            raise NotCovered("a group of records inside another sampling")
        rate, mechanism = rate * ball(inner["sampling_probability"]), inner["mechanism"]
    return _mixture(_noise(mechanism), *binomial_weights(group, rate), asked.direction)


@defines(known.SampledWithReplacement)
def _with_replacement(asked: Asked, mechanism: Any, batch_size: Any, dataset_size: Any, group: int) -> list[Part]:
    """Binomial(B, k/n) many draws, each of which displaces another record."""
    _refuse(asked, "SampledWithReplacement", "replace_one", "zero_out")
    weights = binomial_weights(int(batch_size), ball(float(group)) / ball(float(dataset_size)))
    return _mixture(_noise(mechanism) / 2, *weights, asked.direction)


def drawn_group(asked: Asked, mechanism: Any, ratio: Any, group: int, dataset_size: Any) -> list[Part]:
    """A hypergeometric number of the group's records is drawn, and each displaces another record."""
    _refuse(asked, "a group of records sampled without replacement", "replace_one", "zero_out")
    size = int(dataset_size)
    weights = hypergeometric_weights(size, group, round(size * float(ratio)))
    return _mixture(_noise(mechanism) / 2, *weights, asked.direction)


def kept_slot(asked: Asked, mechanism: Any, rate: Any) -> list[Part]:
    """Sampling without replacement under zero_out: the record keeps its slot, where another could have been."""
    if not asked.alone:
        raise NotCovered("zero_out where a record displaces others")
    return [(_zero_out(_noise(mechanism), rate, asked.direction), 1)]


@defines(known.TruncatedPoissonSampled)
def _capped(asked: Asked, mechanism: Any, sampling_probability: Any, dataset_size: Any, cap: Any) -> list[Part]:
    """With probability tau the others fill the batch, and the record displaces one of them with probability q'."""
    _refuse(asked, "capped Poisson sampling", "replace_one")
    if asked.relation == "zero_out" and not asked.alone:
        raise NotCovered("zero_out where a record displaces others")
    noise, q, direction = _noise(mechanism), ball(sampling_probability), asked.direction
    tau, kept = _cap(int(dataset_size), int(cap), q)
    plain = None if q.is_zero() else _sampled(noise, q, direction)
    if not tau > 0:
        return [] if plain is None else [(plain, 1)]
    removed = asked.relation == "zero_out"
    ways: type[RevealedPairs] = RevealedPairs if removed else Revealed
    rule, scale = (_zero_out, noise) if removed else (_sampled, noise / 2)
    capped = rule(scale, kept / tau, direction)
    return [(capped if tau == 1 else ways(((1 - tau, plain), (tau, capped))), 1)]


def _refuse(asked: Asked, name: str, *relations: str) -> None:
    """Raise NotCovered under sampling and under the listed relations."""
    if not asked.whole:
        raise NotCovered(f"{name} under sampling")
    if asked.relation in relations:
        raise NotCovered(f"{name} under {asked.relation}")


def _noise(mechanism: Any) -> Any:
    """The noise multiplier of a Gaussian; raise NotCovered for any other mechanism."""
    if type(mechanism) is not known.Gaussian:
        raise NotCovered(f"batches of {type(mechanism).__name__}")
    return ball(fields_of(mechanism)["noise_multiplier"])


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


def _mixture(noise: Any, weights: Any, lost: Any, direction: str) -> list[Part]:
    """Contribution j has weight_j, and noise is in units of one record; no losses if nobody contributes."""
    some = [j for j, w in enumerate(weights) if not w.is_zero()]
    if some == [0]:
        return []
    if len(some) == 1:
        return [(GaussianLoss((some[0] / noise) ** 2), 1)]
    return [(GaussianMixture.of(noise, weights, lost, direction), 1)]
