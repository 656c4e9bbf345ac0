"""Private choices: of the best candidate, or of the keys of a table whose set of keys is itself private.

The exponential mechanism and report-noisy-max choose among candidates. Utilities are monotone if adding a record never
lowers any of them, or never raises any. Let Delta be the sensitivity of the utilities. For epsilon-DP the scale of the
noise is Delta/epsilon for monotone utilities, and 2 Delta/epsilon for others.
"""

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


class _PureChoice:
    """Choice of the candidate with the largest noisy score; noise of the scale `scale` makes the choice epsilon-DP."""

    epsilon: float
    sensitivity: float
    monotone: bool
    noise = "gumbel"  # gives the exponential mechanism

    def __post_init__(self) -> None:
        _check_fields(self, "epsilon", "sensitivity")

    @property
    def privacy(self) -> PureDP:
        """Guarantee of one choice."""
        return PureDP(self.epsilon)

    @property
    def scale(self) -> float:
        """Scale of the noise: 2 Delta / epsilon, or Delta / epsilon for monotone utilities."""
        return self.sensitivity * (1.0 if self.monotone else 2.0) / self.epsilon

    def sample(self, key: jax.Array | None, utilities: ArrayLike, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Draw independent choices of the given shape for each row of utilities, as indices of shape `shape` + batch.

        For a release, pass None as `key`: 256 bits are then drawn from the operating system. A JAX key must have at
        least 256 bits (``jaxacct.training.fresh_key()``); whoever has it knows the noise, so use it for nothing else.
        """
        return _noisy_argmax(key, utilities, shape, self.noise, self.scale)


@dataclass(frozen=True)
class ExponentialChoice(_PureChoice):
    """Choice of candidate r with probability proportional to exp(epsilon u_r / (2 Delta)): epsilon-DP.

    `sample` adds Gumbel noise and takes the largest score, in float64. It is fast and batched, and differentially
    private up to rounding only: a choice whose probability is below about 1e-16 is never made. `sample_exact` has
    exactly the stated law for the utilities as given.

    Parameters
    ----------
    epsilon : float > 0
    sensitivity : float > 0
        Delta, the most by which one record moves any single utility. The guarantee is for the neighbouring relation
        under which Delta and `monotone` are right. For example, counts are monotone if a record is added, but not if
        a record is replaced.
    monotone : bool
        Whether one record moves all utilities in the same direction. The exponent is then epsilon u_r / Delta, with the
        same guarantee.

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
        """Return the law of the choice over the last axis of `utilities` (finite numbers)."""
        u = _utilities(utilities)
        weights = np.exp((u - u.max(-1, keepdims=True)) / self.scale)
        return np.asarray(weights / weights.sum(-1, keepdims=True))

    def sample_exact(self, utilities: Sequence[Any], rng: random.Random | None = None) -> int:
        """Draw one choice, exactly distributed: uniform proposals, accepted with probability e^{-(OPT - u)/scale}.

        Utilities are ints, floats or Fractions, taken exactly. Random bits come from the operating system unless `rng`
        is given. For k candidates at most about k proposals are needed on average. The running time depends on the
        utilities, so it must not be observed.

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
    """Report-noisy-max: independent noise is added to every utility, and the index of the largest is released.

    The choice is epsilon-DP with noise of scale 2 Delta / epsilon, or Delta / epsilon for monotone utilities. Only the
    index may be released. The noise is sampled in float64, so the choice is private up to rounding;
    `ExponentialChoice.sample_exact` is exact.

    Parameters
    ----------
    epsilon : float > 0
    noise : {"laplace", "exponential", "gumbel"}
        "exponential" noise is one-sided; "gumbel" noise gives the exponential mechanism.
    sensitivity, monotone
        As for `ExponentialChoice`.

    References
    ----------
    Dwork and Roth (2014), Claim 3.9; Ding et al. (2021); README.md of this folder, "Report-noisy-max: one proof for all
    the noises".

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
    sensitivity, monotone
        As for `ExponentialChoice`.

    References
    ----------
    Koskela, Redberg and Wang (2024), Theorem 3.2; README.md of this folder, "Report-noisy-max: one proof for all the
    noises".

    >>> GaussianNoisyMaxChoice(noise_multiplier=10.0).privacy(1e-6, candidates=100).epsilon < 1.3
    True
    """

    noise_multiplier: float
    sensitivity: float = 1.0
    monotone: bool = False

    def __post_init__(self) -> None:
        _check_fields(self, "noise_multiplier", "sensitivity")

    def privacy(self, delta: float, candidates: int) -> ApproximateDP:
        """Return (epsilon, delta)-DP of one choice among `candidates`, by the bounds of `ja.GaussianNoisyMax`."""
        target = float(check("delta", delta, DELTA))
        count = check_int("candidates", candidates, 1, "count the utilities")
        mechanism = GaussianNoisyMax(self.noise_multiplier, count, monotone=self.monotone)
        return ApproximateDP(float(certified_epsilon(mechanism, target).upper), target)

    def sample(self, key: jax.Array | None, utilities: ArrayLike, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Draw independent choices, as `NoisyMaxChoice.sample` does."""
        return _noisy_argmax(key, utilities, shape, "normal", self.noise_multiplier * self.sensitivity)


def _check_fields(sampler: Any, *names: str) -> None:
    """Check positive scalars, and store them in the sampler as Python floats."""
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
    """Compute a shortfall from the optimum: a choice falls short by this much or more with probability at most `beta`.

    The shortfall is `U/epsilon log(candidates/(optimal beta))` in units of the utility, where U is 2 Delta, or Delta if
    the utilities are monotone.

    Parameters
    ----------
    epsilon : array_like > 0
    beta : array_like in (0, 1)
    candidates : array_like of whole numbers
    optimal : array_like of whole numbers
        Number of candidates that reach the optimum, at most ``candidates``.
    sensitivity : array_like > 0; all arguments broadcast.
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
"""Number of random bits of a decision. Probabilities are rounded down to multiples of 2^-128."""


@dataclass(frozen=True)
class _ByKey:
    """Release that decides on each key separately; the epsilon and delta for one key are exact fractions."""

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
        """Guarantee of one release of all keys."""
        return PartitionSelection(round_up(self.epsilon), round_up(self.delta), self.contributions)


@dataclass(frozen=True)
class PartitionChoice(_ByKey):
    """Release keys of a table of counts, by the (epsilon, delta)-DP rule that keeps the most keys.

    A key with count n is released with probability p(n), where p(0) = 0 and

        p(n) = min(e^epsilon p(n-1) + delta, 1 - (1 - p(n-1) - delta) e^-epsilon, 1).

    Probabilities are rounded down to multiples of 2^-128 and drawn exactly. (Rounding keeps the guarantee.)

    Parameters
    ----------
    epsilon, delta : int, float or Fraction > 0
        Guarantee for one key, taken exactly.
    contributions : int >= 1
        Largest number of keys to which one record contributes. A record adds at most 1 to the count of a key. Remove
        further contributions before you count, by a rule that looks at this record alone.

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
        """Return the keys that are released, sorted by their text.

        The random bits come from the operating system unless `rng` is given; a seeded `rng` is for tests only.
        """
        source, known = generator(rng), _checked(counts)
        table = self._table(max(known.values(), default=0))
        kept = [key for key, n in known.items() if source.getrandbits(_BITS) < table[min(n, len(table) - 1)]]
        return sorted(kept, key=repr)

    def _table(self, most: int) -> list[int]:
        """Return the probabilities for the counts 0, 1, ..., `most`, in units of 2^-128; stop at a probability of 1."""
        # `power` is at most e^epsilon, so that the rule is (epsilon, delta)-DP
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

    A count above 0 gets discrete Laplace noise of scale 1/epsilon, drawn exactly. The threshold is the smallest at
    which a key with count 1 is released with probability at most delta.

    Parameters
    ----------
    epsilon, delta, contributions
        As for `PartitionChoice`.

    References
    ----------
    Korolova et al. (2009), Releasing Search Queries and Clicks Privately.

    >>> table = ThresholdedCounts(epsilon=1, delta=1e-5)
    >>> table.threshold, sorted(table.release({"common": 1000, "absent": 0}))
    (13, ['common'])
    """

    @property
    def threshold(self) -> int:
        """Smallest t with Pr[1 + noise >= t] = e^(-epsilon (t-1)) / (1 + e^-epsilon) <= delta."""
        rate, target = float(self.epsilon) * (1 - 2.0**-50), float(self.delta) * (1 - 1e-9)
        least = 1 + max(math.ceil(-math.log(target * (1.0 + math.exp(-rate))) / rate), 0)
        while math.exp(-rate * (least - 1)) / (1.0 + math.exp(-rate)) > target:
            least += max(least >> 50, 1)  # floats near a large t lie farther apart than 1; a larger t is safe
        return least

    def release(self, counts: Mapping[Key, int], rng: random.Random | None = None) -> dict[Key, int]:
        """Return {key: noisy count} of the keys whose noisy count reaches the threshold, sorted by the keys' text."""
        source, least = generator(rng), self.threshold
        scale = 1 / Fraction(self.epsilon)
        noisy = {key: n + discrete_laplace(scale, source) for key, n in _checked(counts).items() if n}
        return {key: noisy[key] for key in sorted(noisy, key=repr) if noisy[key] >= least}


def _checked(counts: Mapping[Key, int]) -> dict[Key, int]:
    """Return the counts; refuse anything but whole numbers from 0."""
    if not isinstance(counts, Mapping):
        raise InputError(f"counts must be a dict of keys and counts, not {type(counts).__name__}; use {{'a': 3}}")
    known = {key: whole("count", n) for key, n in counts.items()}
    if any(n < 0 for n in known.values()):
        raise InputError("counts must be >= 0; count the records of each key")
    return known
