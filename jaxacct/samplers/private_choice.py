"""Private choices of two kinds: one candidate among several, or the keys to release from a table with private keys."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import jax
import numpy as np

from jaxacct.accounting.account import epsilon as certified_epsilon
from jaxacct.core.chacha import fresh_key, secret
from jaxacct.core.types import ArrayLike, Leaf, Numbers
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    POSITIVE,
    Constraint,
    InputError,
    broadcast_shape,
    check,
    check_int,
    check_one,
    choice,
)
from jaxacct.engines import devices
from jaxacct.mechanisms import ApproximateDP, GaussianNoisyMax, PartitionSelection, PureDP
from jaxacct.samplers.exact_draws import bernoulli_exp, discrete_laplace, generator, rational, round_up, whole

SCALE = Constraint("give utilities and sensitivity in other units", 1e-290, 1e290)
"""Allowed scales of noise, in the unit of the utilities. Beyond these limits noise may underflow or overflow."""


class _PureChoice:
    """Base class of epsilon-DP choices: add noise of scale `scale` to every utility, and choose the largest sum."""

    epsilon: float
    sensitivity: float
    monotone: bool
    noise = "gumbel"  # with Gumbel noise the choice is the exponential mechanism

    def __post_init__(self) -> None:
        _check_fields(self, "epsilon", "sensitivity")
        check("sensitivity / epsilon", self.scale, SCALE)

    @property
    def privacy(self) -> PureDP:
        """Guarantee of one choice."""
        return PureDP(self.epsilon)

    @property
    def scale(self) -> float:
        """Scale of the noise: 2 Delta / epsilon, or Delta / epsilon for monotone utilities. Delta: the sensitivity."""
        return self.sensitivity * (1.0 if self.monotone else 2.0) / self.epsilon

    def sample(self, key: jax.Array | None, utilities: ArrayLike, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Draw `shape` choices per row (last axis) of `utilities`. Return the indices, of shape `shape` + batch shape.

        For a release pass None as `key`: the operating system then gives 256 random bits. A JAX key must have at least
        256 bits, like ``jaxacct.training.fresh_key()``. Keep it secret and use it for nothing else: whoever knows the
        key can compute the noise.
        """
        return _noisy_argmax(key, utilities, shape, self.noise, self.scale)


@dataclass(frozen=True)
class ExponentialChoice(_PureChoice):
    """Choice of candidate r with probability proportional to exp(epsilon u_r / (2 Delta)): epsilon-DP.

    `sample` adds Gumbel noise in float64. It is fast and works on batches, but it is private only up to rounding: it
    never makes a choice of probability below about 1e-16. `sample_exact` draws from exactly the stated law.

    Parameters
    ----------
    epsilon : float > 0
    sensitivity : float > 0
        Delta, the largest change of any single utility between neighbours under the relation of the guarantee.
    monotone : bool
        Whether one record moves all utilities in the same direction: true of counts if a record is added, not if one is
        replaced. If True, the exponent is epsilon u_r / Delta.

    References
    ----------
    McSherry and Talwar (2007); Dwork and Roth (2014), section 3.4.

    >>> votes = ExponentialChoice(epsilon=1.0, monotone=True)
    >>> votes.probabilities([10, 9, 2]).round(4)
    array([7.309e-01, 2.689e-01, 2.000e-04])
    >>> votes.privacy
    PureDP(epsilon=1.0)
    """

    epsilon: float
    sensitivity: float = 1.0
    monotone: bool = False

    def probabilities(self, utilities: ArrayLike) -> np.ndarray:
        """Return the probability of each candidate. The candidates lie along the last axis of `utilities`."""
        u = _utilities(utilities)
        weights = np.exp((u - u.max(-1, keepdims=True)) / self.scale)
        return np.asarray(weights / weights.sum(-1, keepdims=True))

    def sample_exact(self, utilities: Sequence[Any], rng: random.Random | None = None) -> int:
        """Draw one choice from exactly the stated law, by rejection. Pass a seeded `rng` in tests only.

        A uniform candidate of utility u (an int, a float or a Fraction, taken exactly) is accepted with probability
        e^{-(OPT - u)/scale}, where OPT is the largest utility.
        k candidates take at most k proposals on average. The running time depends on the utilities: keep it secret.

        >>> ExponentialChoice(epsilon=50.0).sample_exact([0, 3, 1])
        1
        """
        exact = [rational(f"utilities[{i}]", u, positive=False) for i, u in enumerate(utilities)]
        if not exact:
            raise InputError("utilities is empty; give one number for each candidate")
        rate = rational("epsilon", self.epsilon) / rational("sensitivity", self.sensitivity)
        rate /= 1 if self.monotone else 2
        source, best = generator(rng), max(exact)
        while True:
            candidate = source.randrange(len(exact))
            if bernoulli_exp((best - exact[candidate]) * rate, source):
                return candidate


@dataclass(frozen=True)
class NoisyMaxChoice(_PureChoice):
    """Report-noisy-max: add independent noise to every utility, and release the index of the largest noisy utility.

    The choice is epsilon-DP with noise of scale 2 Delta / epsilon, or Delta / epsilon for monotone utilities. Only the
    index may be released. Float64 noise is private only up to rounding; `ExponentialChoice.sample_exact` is exact.

    Parameters
    ----------
    epsilon : float > 0
    noise : {"laplace", "exponential" (one-sided), "gumbel" (the exponential mechanism)}
    sensitivity, monotone : as for `ExponentialChoice`

    References
    ----------
    Dwork and Roth (2014), Claim 3.9; Ding et al. (2021); README.md, "Report-noisy-max: one proof for all the noises".

    >>> NoisyMaxChoice(epsilon=1.0).scale, NoisyMaxChoice(epsilon=1.0, monotone=True).scale
    (2.0, 1.0)
    """

    epsilon: float
    noise: str = "laplace"
    sensitivity: float = 1.0
    monotone: bool = False

    def __post_init__(self) -> None:
        choice("noise", self.noise, ("laplace", "exponential", "gumbel"))
        super().__post_init__()


@dataclass(frozen=True)
class GaussianNoisyMaxChoice:
    """Report-noisy-max with Gaussian noise of standard deviation `noise_multiplier` * sensitivity.

    Parameters
    ----------
    noise_multiplier : float > 0
    sensitivity, monotone : as for `ExponentialChoice`

    References
    ----------
    Koskela, Redberg and Wang (2024), Theorem 3.2; README.md, "Report-noisy-max: one proof for all the noises".

    >>> GaussianNoisyMaxChoice(noise_multiplier=10.0).privacy(1e-6, candidates=100).epsilon < 1.3
    True
    """

    noise_multiplier: float
    sensitivity: float = 1.0
    monotone: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "noise_multiplier", "sensitivity")
        check("noise_multiplier * sensitivity", self.noise_multiplier * self.sensitivity, SCALE)

    def privacy(self, delta: float, candidates: int) -> ApproximateDP:
        """Return an (epsilon, delta)-DP guarantee of one choice among `candidates`, from `ja.GaussianNoisyMax`."""
        target = float(check("delta", delta, DELTA))
        count = check_int("candidates", candidates, 1, "count the utilities")
        mechanism = GaussianNoisyMax(self.noise_multiplier, count, monotone=self.monotone)
        return ApproximateDP(float(certified_epsilon(mechanism, target).upper), target)

    def sample(self, key: jax.Array | None, utilities: ArrayLike, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Draw independent choices, as `NoisyMaxChoice.sample` does."""
        return _noisy_argmax(key, utilities, shape, "normal", self.noise_multiplier * self.sensitivity)


def _check_fields(sampler: Any, *names: str) -> None:
    """Check that the named fields of the sampler are positive scalars, and store them as Python floats."""
    for name in names:
        number = check_one(name, getattr(sampler, name), POSITIVE, "make one sampler for each")
        object.__setattr__(sampler, name, number)


def _utilities(utilities: Any) -> np.ndarray:
    u = np.asarray(utilities, np.float64)
    if not u.ndim or not u.shape[-1] or not np.isfinite(u).all():
        raise InputError("utilities must be finite numbers, one for each candidate on the last axis; use [3, 1, 4]")
    return u


def _noisy_argmax(
    key: jax.Array | None, utilities: Any, shape: tuple[int, ...], noise: str, scale: float
) -> np.ndarray:
    u = _utilities(utilities)
    key = fresh_key() if key is None else secret(key)
    with devices.double_precision():
        key = jax.device_put(key, devices.local()[0])
        draws = getattr(jax.random, noise)(key, (*shape, *u.shape), dtype=jax.numpy.float64)
        return np.asarray(jax.numpy.argmax(u + scale * draws, axis=-1))


def exponential_error(
    epsilon: ArrayLike,
    beta: ArrayLike,
    candidates: ArrayLike,
    *,
    optimal: ArrayLike = 1,
    sensitivity: ArrayLike = 1.0,
    monotone: bool = False,
) -> Numbers:
    """Compute how much utility an `ExponentialChoice` loses at most, except with probability `beta`.

    The loss is the largest utility minus the chosen one. It is at least `U/epsilon log(candidates/(optimal beta))` with
    probability at most `beta`. U is 2 Delta, or Delta if the utilities are monotone.

    Parameters
    ----------
    epsilon : array_like > 0
    beta : array_like in (0, 1)
    candidates : array_like of whole numbers
    optimal : array_like of whole numbers; how many candidates reach the optimum
    sensitivity : array_like > 0; Delta, which broadcasts with the arguments above
    monotone : bool

    Returns
    -------
    float or numpy.ndarray

    References
    ----------
    McSherry and Talwar (2007); Dwork and Roth (2014), Theorem 3.11.

    >>> round(float(exponential_error(1.0, 0.05, 100)), 4)
    15.2018
    """
    k, r = np.asarray(check("candidates", candidates, COUNT)), np.asarray(check("optimal", optimal, COUNT))
    eps, b = check("epsilon", epsilon, POSITIVE), check("beta", beta, DELTA)
    delta = np.asarray(check("sensitivity", sensitivity, POSITIVE))
    each = {"epsilon": eps, "beta": b, "candidates": k, "optimal": r, "sensitivity": delta}
    broadcast_shape({name: np.shape(x) for name, x in each.items()})
    if np.any(r > k):
        raise InputError(f"optimal must be <= candidates; found {np.max(r):g} of {np.min(k):g}, count them again")
    return (delta * (1.0 if monotone else 2.0) / eps * (np.log(k / r) - np.log(b)))[()]


Key = TypeVar("Key", bound=Hashable)
_BITS = 128
"""Number of random bits that decide on one key. Its probability of release is rounded down to a multiple of 2^-128."""


@dataclass(frozen=True)
class _ByKey:
    """Base class of releases that decide on each key separately. Each key has an (`epsilon`, `delta`)-DP guarantee."""

    epsilon: Leaf
    delta: Leaf
    contributions: int = 1

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, rational(name, getattr(self, name)))
        if not self.delta < 1:
            raise InputError(f"delta = {float(self.delta)!r} must be < 1; use one such as 1e-8")
        most = check_one("contributions", self.contributions, COUNT, "a release has one")
        object.__setattr__(self, "contributions", int(most))

    @property
    def privacy(self) -> PartitionSelection:
        """Guarantee of one release, for all keys together."""
        return PartitionSelection(round_up(self.epsilon), round_up(self.delta), self.contributions)


@dataclass(frozen=True)
class PartitionChoice(_ByKey):
    """Release keys of a table of counts. Of all (epsilon, delta)-DP rules the rule used here releases the most keys.

    A key with count n is released with probability p(n), where p(0) = 0 and

        p(n) = min(e^epsilon p(n-1) + delta, 1 - (1 - p(n-1) - delta) e^-epsilon, 1).

    Each p(n) is rounded down to a multiple of 2^-128, which keeps the guarantee, and the draw has exactly this p(n).

    Parameters
    ----------
    epsilon, delta : int, float or Fraction > 0; the guarantee for one key, taken exactly
    contributions : int >= 1
        Largest number of keys to which one record contributes, at most 1 to the count of each. Remove further
        contributions before you count, by a rule that looks at this record alone.

    References
    ----------
    Desfontaines, Voss, Gipson, Mandayam (2022), Differentially private partition selection, Theorem 1.

    >>> keys = PartitionChoice(epsilon=1.0, delta=1e-5, contributions=3)
    >>> [float(round(keys.probability(n), 6)) for n in (0, 1, 5, 12, 40)]
    [0.0, 1e-05, 0.000858, 0.760311, 1.0]
    >>> keys.sample({"common": 1000, "absent": 0})
    ['common']
    """

    def probability(self, count: int) -> Fraction:
        """Return the probability that a key with this count is released."""
        number = whole("count", count)
        if number < 0:
            raise InputError(f"count = {number} must be >= 0; count the records of each key")
        return Fraction(self._table(number)[-1], 2**_BITS)

    def sample(self, counts: Mapping[Key, int], rng: random.Random | None = None) -> list[Key]:
        """Draw the keys to release, and return them sorted by their `repr`. Pass a seeded `rng` in tests only."""
        source, known = generator(rng), _checked(counts)
        table = self._table(max(known.values(), default=0))
        kept = [key for key, n in known.items() if source.getrandbits(_BITS) < table[min(n, len(table) - 1)]]
        return sorted(kept, key=repr)

    def _table(self, most: int) -> list[int]:
        """Return the release probabilities of the counts 0 to `most`, in units of 2^-128. The first 1 ends the list."""
        # `power` is e^epsilon rounded down. The rule with `power` in place of e^epsilon is still (epsilon, delta)-DP.
        power = max(Fraction(math.exp(min(float(self.epsilon), 700.0) * (1 - 2.0**-50)) * (1 - 2.0**-50)), Fraction(1))
        found, one = [0], 2**_BITS
        while len(found) <= most and found[-1] < one:
            last = Fraction(found[-1], one)
            following = min(power * last + self.delta, 1 - (1 - last - self.delta) / power, Fraction(1))
            found.append(max(math.floor(following * one), found[-1]))
        return found


@dataclass(frozen=True)
class ThresholdedCounts(_ByKey):
    """Release noisy counts of the keys whose noisy count reaches a threshold.

    A count above 0 gets discrete Laplace noise of scale 1/epsilon, drawn exactly. The threshold is so high that a key
    with count 1 is released with probability at most delta.

    Parameters
    ----------
    epsilon, delta, contributions : as for `PartitionChoice`

    References
    ----------
    Korolova et al. (2009), Releasing Search Queries and Clicks Privately.

    >>> table = ThresholdedCounts(epsilon=1, delta=1e-5)
    >>> table.threshold, sorted(table.release({"common": 1000, "absent": 0}))
    (13, ['common'])
    """

    @property
    def threshold(self) -> int:
        """Smallest t with Pr[1 + noise >= t] = e^(-epsilon (t-1))/(1 + e^-epsilon) <= delta. Rounding only raises t."""
        rate, target = float(self.epsilon) * (1 - 2.0**-50), float(self.delta) * (1 - 1e-9)
        least = 1 + max(math.ceil(-math.log(target * (1.0 + math.exp(-rate))) / rate), 0)
        while math.exp(-rate * (least - 1)) / (1.0 + math.exp(-rate)) > target:
            # A large t may be unchanged as a float by a step of 1, so step by t / 2^50. A larger t keeps the guarantee.
            least += max(least >> 50, 1)
        return least

    def release(self, counts: Mapping[Key, int], rng: random.Random | None = None) -> dict[Key, int]:
        """Return the noisy counts that reach the threshold, as a dict by key. The keys are sorted by their `repr`."""
        source, least = generator(rng), self.threshold
        scale = 1 / Fraction(self.epsilon)
        noisy = {key: n + discrete_laplace(scale, source) for key, n in _checked(counts).items() if n}
        return {key: noisy[key] for key in sorted(noisy, key=repr) if noisy[key] >= least}


def _checked(counts: Mapping[Key, int]) -> dict[Key, int]:
    """Return the counts as a dict of ints. Refuse a count that is negative or no integer."""
    if not isinstance(counts, Mapping):
        raise InputError(f"counts must be a dict of keys and counts, not {type(counts).__name__}; use {{'a': 3}}")
    known = {key: whole("count", n) for key, n in counts.items()}
    if any(n < 0 for n in known.values()):
        raise InputError("counts must be >= 0; count the records of each key")
    return known
