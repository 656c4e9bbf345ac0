"""Poisson sampling with a cap on the size of the batch.

The tails of the binomial law are bounded from both sides, for n up to 1e9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import COUNT, DELTA, OPEN_PROBABILITY, PROBABILITY, Constraint, check
from jaxacct.mechanisms.base import batch_shape, register, require_mechanism
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.gaussian_branches import (
    LOSS_OF_PRESENCE,
    Branch,
    OfGaussianMixtures,
    require_gaussian,
    rows_of,
)
from jaxacct.mechanisms.mixture_profiles import (
    Mixture,
    Points,
    mixed_pair,
    mixture_pair,
    points_above,
    profile_of_points,
    quantiles,
    two_points,
    zero_out_points,
)
from jaxacct.mechanisms.parts import FinitePair, GaussianPart, Part
from jaxacct.mechanisms.profile import stacked

__all__ = ["TruncatedPoissonSampled", "cap_for", "cap_of", "replaced_gaussian"]

CHUNK = 4096
"""Terms of a series that are taken at a time at first; each further chunk is twice as long."""
UNITS_PER_TERM = 16.0
"""Roundings of one factor of a product of ratios: a difference, two quotients and three products, and half as much
again for the odds, which are the same in all."""
NEGLIGIBLE = 1e-25
"""Share of a sum below which the rest of a falling series is bounded and no longer summed."""
SIZE = Constraint("use a whole number of records", 1, 1e9, integral=True)
"""What a number of records may be."""
FINENESS = 8
"""Points of the profile of a replaced record, over the usual number: an error of 1e-6 in epsilon instead of 1e-4."""
SHARE_OF_DELTA = 1e-3
"""The share of delta that all the steps in which a free cap binds may have together."""


@register
@dataclass(frozen=True, eq=False)
class TruncatedPoissonSampled(OfGaussianMixtures):
    """A Gaussian on a Poisson sample that is cut to ``cap`` records: a uniform subset of them where more are drawn.

    With n = ``dataset_size``, tau = Pr[Bin(n-1, q) >= cap] and q' = (cap/n) Pr[Bin(n, q) > cap]/tau, a step is with
    probability 1 - tau the Gaussian sampled at q, of sensitivity 1, and with probability tau the Gaussian sampled at
    q', of sensitivity 2: the record displaces another one. That is an upper bound for add and remove, of any number of
    adaptive steps; ``kind`` is "bound". For ``zero_out`` (the record keeps its slot) and ``replace_one`` the pair with
    probability tau is the one of README.md, "A cap on a Poisson sample". Both are put on finitely many losses from
    above.

    It holds where n is public (the larger of the two data sets), q and the cap do not depend on the data, the subset is
    uniform (not the first ``cap``), and the sum is divided by a constant, never by the number drawn. A cap is dear
    unless steps * tau is well below delta: `jaxacct.cap_for` finds one that is. A cap of n or more is plain Poisson
    sampling.

    Parameters
    ----------
    mechanism : Gaussian
        A single step; noise in units of the add/remove sensitivity.
    sampling_probability : array_like in [0, 1]
        q, the chance of each record to be drawn before the cut.
    dataset_size : array_like of whole numbers from 1 to 1e9
        n, the size of the larger data set.
    cap : array_like of whole numbers from 1 to 1e9
        The largest batch. All fields broadcast.

    Raises
    ------
    InputError
        A base that is not a Gaussian, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Ganesh (2025), on truncated Poisson sampling, arXiv 2508.15089. README.md, "A cap on a Poisson sample".

    >>> import jaxacct as ja
    >>> step = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, dataset_size=1000, cap=75)
    >>> f"{step.chance_of_cap():.6g}"
    '0.000399828'
    >>> round(float(ja.epsilon(ja.repeat(step, 1000), 1e-5).upper), 3)
    11.151
    """

    mechanism: Any
    sampling_probability: Any
    dataset_size: Any
    cap: Any
    constraints: ClassVar = {"sampling_probability": PROBABILITY, "dataset_size": SIZE, "cap": SIZE}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        require_gaussian("TruncatedPoissonSampled", self.mechanism)
        super().__post_init__()

    def chance_of_cap(self) -> Any:
        """tau, the chance that the others alone fill the batch, rounded up; one for each configuration.

        >>> import jaxacct as ja
        >>> float(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.4, dataset_size=5, cap=5).chance_of_cap())
        0.0
        """
        found = np.array([cap.chance[1] for _, _, cap in self._rows()])
        return found.reshape(batch_shape(self))[()]

    def symmetric(self) -> bool:
        return False

    def displaces(self) -> bool:
        return not self._never_binds()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return super().kind_under(relation, composed) if self._never_binds() and relation != "replace_one" else "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        once = np.asarray(1.0)
        if self._never_binds() and relation != "replace_one":
            rate = np.asarray(self.sampling_probability, np.float64)
            return [(GaussianPart(np.asarray(self.mechanism.noise_multiplier, np.float64), rate), once)]
        pair = stacked([_pair(*row, relation) for row in self._rows()], batch_shape(self))
        return [(sample_pair(pair, once, direction), once)]

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation not in LOSS_OF_PRESENCE and not (relation == "zero_out" and self._never_binds()):
            return None
        found = []
        for sigma, q, cap in self._rows():
            (low, high), rate = cap.chance, cap.rate[1]
            plain = (np.array([0.0, 1.0 / sigma]), np.array([1.0 - q, q]))
            capped = (np.array([0.0, 2.0 / sigma]), np.array([1.0 - rate, rate]))
            row = [Branch(_rest(low), *plain)] if low < 1.0 else []
            found.append([*row, Branch(high, *capped)] if high > 0.0 else row)
        return found

    def ordinary(self) -> bool:
        return self._never_binds()

    def attained(self, relation: str) -> bool:
        return self._never_binds()

    def _never_binds(self) -> bool:
        return bool(np.all(np.asarray(self.cap) >= np.asarray(self.dataset_size)))

    def _rows(self) -> list[tuple[float, float, Cap]]:
        fields = self.mechanism.noise_multiplier, self.sampling_probability, self.dataset_size, self.cap
        return [(sigma, q, cap_of(n, q, cap)) for sigma, q, n, cap in rows_of(self, *fields)]


def cap_for(
    sampling_probability: float, dataset_size: int, steps: int, delta: float, share: float = SHARE_OF_DELTA
) -> int:
    """The smallest cap that costs nothing: steps * Pr[Bin(n - 1, q) >= cap] is at most `share` of delta.

    A cap that binds lets a record displace another one, and a step in which it binds costs twice the sensitivity
    (`TruncatedPoissonSampled`).  With this cap all such steps together have at most the probability share * delta.

    Parameters
    ----------
    sampling_probability : float strictly between 0 and 1
        q.
    dataset_size : int from 1 to 1e9
        n, the size of the larger data set.
    steps : int from 1 to 2**53
    delta : float strictly between 0 and 1
        The delta of the claim.
    share : float strictly between 0 and 1
        Of delta, for the steps in which the cap binds.

    Returns
    -------
    int
        n where no smaller cap will do.

    Raises
    ------
    InputError
        A value outside its limits, or a batch.

    References
    ----------
    README.md, "A cap on a Poisson sample".

    >>> import jaxacct as ja
    >>> ja.cap_for(0.05, 1000, steps=1000, delta=1e-5)
    103
    """
    one = "a cap is for one run"
    q = float(check("sampling_probability", sampling_probability, OPEN_PROBABILITY, one))
    n = float(check("dataset_size", dataset_size, SIZE, one))
    count = float(check("steps", steps, COUNT, one))
    goal = float(check("delta", delta, DELTA, one)) * float(check("share", share, OPEN_PROBABILITY, one))
    low, high = max(np.floor(n * q) - 1.0, 0.0), n  # the first is too small or 0, the second always serves
    while high - low > 1.0:
        middle = float(np.floor(0.5 * (low + high)))
        low, high = (low, middle) if count * cap_of(n, q, middle).chance[1] <= goal else (middle, high)
    return int(high)


def _pair(sigma: float, q: float, cap: Cap, relation: str) -> FinitePair:
    """The pair of one step, in the direction remove, from above."""
    (low, high), rate, s = cap.chance, cap.rate[1], 1.0 / sigma
    plain = replaced_gaussian(q, s) if relation == "replace_one" else _sampled(q, s)
    if high == 0.0:
        return plain
    if relation == "replace_one":
        points = _sampled_points(rate, 2.0 * s)
        capped = profile_of_points(points, points, 2.0 * s)
    elif relation == "zero_out":
        capped = profile_of_points(*zero_out_points(rate, s), 2.0 * s)
    else:
        capped = _sampled(rate, 2.0 * s)
    return mixed_pair([_rest(low), high], [plain, capped])


def _rest(chance: float) -> float:
    """1 - chance, rounded up; 1 where the chance is 0."""
    return (1.0 - chance) * (1.0 + 4.0 * ROUNDOFF) if chance > 0.0 else 1.0


def _sampled(q: float, shift: float) -> FinitePair:
    return mixture_pair(np.array([0.0, shift]), np.array([1.0 - q, q]))


def _sampled_points(q: float, shift: float) -> Points:
    """H_a((1-q) N(0) + q N(shift) || N(0)) for a >= 1."""
    nothing = Mixture(np.zeros(1), np.ones(1))
    return points_above(two_points(0.0, shift, q), nothing, quantiles(0.0, shift))


def replaced_gaussian(q: float, s: float) -> FinitePair:
    """((1-q) N(0) + q N(s), (1-q) N(0) + q N(-s)): the ratio increases, and the pair is its own mirror image."""
    points = points_above(two_points(0.0, s, q), two_points(0.0, -s, q), quantiles(-s, s, FINENESS))
    return profile_of_points(points, points, 2.0 * s)


class Cap(NamedTuple):
    """What a cap on a Poisson sample does to one record, each from below and from above."""

    chance: tuple[float, float]
    """tau = Pr[Bin(n-1, q) >= cap]: enough of the others are sampled to fill the batch."""
    rate: tuple[float, float]
    """q' = (cap/n) Pr[Bin(n, q) > cap]/tau: the record's chance to be in the batch then."""


def cap_of(size: float, q: float, cap: float) -> Cap:
    """tau and q' of README.md, "A cap on a Poisson sample", with all rounding.

    With p_k = Pr[Bin(n-1, q) = k] and S = sum_{k >= cap} p_k/p_cap, q' = (cap/n) (S - 1 + q)/S, and tau is the share
    of the terms from cap on in the sum of all, each a product of ratios from the mode or from the cap on.
    """
    n = size - 1.0
    if cap >= size or q == 0.0:
        return Cap((0.0, 0.0), (0.0, 0.0))
    if q == 1.0:
        return Cap((1.0, 1.0), (cap / size * (1.0 - 2.0 * ROUNDOFF), min(cap / size * (1.0 + 2.0 * ROUNDOFF), 1.0)))
    beyond, wrong = _series(n, q, cap, 1)  # S - 1
    if not np.isfinite(
        beyond
    ):  # S is beyond 1e308, and the cap below the mode, so that all terms before it are smaller
        rate = cap / size
        return Cap((1.0 - 2.0 * ROUNDOFF, 1.0), (rate * (1.0 - 4.0 * ROUNDOFF), rate * (1.0 + 2.0 * ROUNDOFF)))
    around, doubt = _series(n, q, cap, -1)  # sum_{k < cap} p_k/p_cap
    if np.isfinite(around):
        tau = (1.0 + beyond) / (1.0 + beyond + around)
        error = wrong + doubt + 16.0 * ROUNDOFF
        chance = (tau * (1.0 - error), min(tau * (1.0 + error), 1.0))
    else:  # less than about 1e-300
        chance = (0.0, 1e-290)
    rate = cap / size * ((beyond + q) / (1.0 + beyond))
    error = 2.0 * wrong + 16.0 * ROUNDOFF
    return Cap(chance, (rate * (1.0 - error), min(rate * (1.0 + error), 1.0)))


def _series(n: float, q: float, start: float, way: int) -> tuple[float, float]:
    """(sum of p_k/p_start over k beyond `start` in one direction, its relative error); inf where it overflows.

    The series is summed to its end, or to where its terms fall and the rest is a geometric series below 1e-25 of it.
    """
    total, last, k, length, terms = 0.0, 1.0, float(start), CHUNK, 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        while True:
            left = n - k if way > 0 else k
            if left <= 0.0:
                rest = 0.0
                break
            step = k + way * np.arange(min(length, int(left)))
            odds = q / (1.0 - q)
            ratio = (n - step) / (step + 1.0) * odds if way > 0 else step / (n - step + 1.0) / odds
            product = last * np.cumprod(ratio)
            total += float(np.sum(product))
            if not np.isfinite(total):
                return np.inf, 0.0
            last, k, terms = float(product[-1]), k + way * step.size, terms + step.size
            at = (n - k) / (k + 1.0) * odds if way > 0 else k / (n - k + 1.0) / odds
            rest = last * at / (1.0 - at) if at < 1.0 else np.inf  # ratios fall along the series
            if rest <= NEGLIGIBLE * max(total, 1e-300):
                break
            length *= 2
    return total, UNITS_PER_TERM * ROUNDOFF * (terms + 4.0) + 4.0 * NEGLIGIBLE
