"""Releases of the keys of a table, or of noisy counts, where the set of keys is itself private."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, InputError, check_one
from jaxacct.mechanisms import PartitionSelection
from jaxacct.samplers.exact_draws import discrete_laplace, generator, rational, round_up, whole

Key = TypeVar("Key", bound=Hashable)
_BITS = 128
"""Number of random bits of a decision. Probabilities are rounded down to multiples of 2^-128."""


class _ByKey:
    """Release that decides about each key by itself; epsilon and delta of one key are exact fractions."""

    epsilon: Leaf
    delta: Leaf
    contributions: int

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
    """Release keys of a table of counts: the (epsilon, delta)-DP rule that keeps most keys.

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

    epsilon: Leaf
    delta: Leaf
    contributions: int = 1

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
        """Return, in units of 2^-128, the probabilities that a key with the count 0, 1, ... is released.

        The list ends with the count `most`, or with the first probability that is 1.
        """
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

    epsilon: Leaf
    delta: Leaf
    contributions: int = 1

    @property
    def threshold(self) -> int:
        """Smallest t with Pr[1 + noise >= t] = e^(-epsilon (t-1)) / (1 + e^-epsilon) <= delta."""
        rate, target = float(self.epsilon) * (1 - 2.0**-50), float(self.delta) * (1 - 1e-9)
        least = 1 + max(math.ceil(-math.log(target * (1.0 + math.exp(-rate))) / rate), 0)
        while math.exp(-rate * (least - 1)) / (1.0 + math.exp(-rate)) > target:
            least += 1
        return least

    def release(self, counts: Mapping[Key, int], rng: random.Random | None = None) -> dict[Key, int]:
        """Return {key: noisy count} of the keys whose noisy count reaches the threshold, sorted by the keys' text.

        rng : as for `PartitionChoice.sample`.
        """
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
