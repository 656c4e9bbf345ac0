"""Mechanisms that run on random batches: Poisson samples, with or without a cap, and samples of a fixed size."""

from __future__ import annotations

import bisect
import math
from dataclasses import field
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import ClassVar, NamedTuple, cast

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import Leaf, Numbers
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    OPEN_PROBABILITY,
    PROBABILITY,
    RECORDS,
    Constraint,
    InputError,
    Tracer,
    check_flag,
    check_one,
    refuse_where,
)
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.base import (
    DIRECTIONS,
    BaseMechanism,
    FinitePair,
    FinitePart,
    GaussianPart,
    Mechanism,
    Part,
    batch_shape,
    register,
    rows_in,
)
from jaxacct.mechanisms.finite import (
    absence_unknown,
    log_mixture,
    once,
    only_stated,
    sample_pair,
    with_sample_revealed,
)
from jaxacct.mechanisms.gaussian_mixtures import (
    LOSS_OF_PRESENCE,
    Branch,
    OfGaussianMixtures,
    binomial,
    hypergeometric,
    mixed_pair,
    mixture_pair,
    profile_of_points,
    replaced_gaussian,
    require_gaussian,
    revealed_pair,
    rows_of,
    sampled_points,
    zero_out_points,
)
from jaxacct.mechanisms.profile import either_order, stacked
from jaxacct.mechanisms.sampled_releases import (
    Several,
    one_gaussian,
    pair_of_releases,
    part_below_sampled,
    replaced_pair,
    replaced_pair_in_two_steps,
)

NEGLIGIBLE = 1e-25
"""A falling series is summed until its rest is below this share of the sum. The rest is only bounded."""
GROUP = Constraint("use a whole number of records", 1, 1000, integral=True)
ONE_GROUP = "ask for one group size at a time"


@register
class PoissonSampled(OfGaussianMixtures):
    """A base mechanism on a Poisson sample, which holds each record with ``sampling_probability`` q, independently.

    Let (P, Q) be the base's pair. The pair of the sampled step is ((1-q) Q + q P, Q) for remove, and (Q, (1-q) Q + q P)
    for add. The rates of nested samplings multiply. Under ``replace_one`` the answer is a bound for 0 < q < 1.

    A base such as `PureDP` is a guarantee for the relation of the question. Under ``zero_out`` and ``replace_one`` it
    says nothing about a batch without the record. The sample then counts as public, and delta is q times the base's.

    ``PoissonSampled(compose(Gaussian(1.0), Laplace(5.0)), 0.01)`` runs both mechanisms on one sample (README.md,
    "Several releases from one sample"). A composition of sampled mechanisms draws a new sample for each of them.

    ``group`` = k > 1 protects any k records together. For a Gaussian of noise multiplier s the pair is then
    (sum_j Bin_j N(j, s^2), N(0, s^2)), where Bin_j is the Binomial(k, q) probability of j. It is exact for add, remove
    and zero-out of at most k records, and a bound under ``replace_one`` (README.md, "Groups of records").

    Parameters
    ----------
    mechanism : Mechanism; it runs on one sample, and is refused if it needs a data set of fixed size.
    sampling_probability : array_like in [0, 1]; q, which broadcasts with the base's fields.
    group : int from 1 to 1000; k, the same for all configurations. Above 1 the base must consist of Gaussians.
    in_turns : bool; whether groups of records take turns, as in `CyclicPoisson`. A replaced record may then be in
        another group, and under ``replace_one`` counts as one that is removed and one that is added.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 11.
    Ganesh (2024), Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians Mechanisms.

    >>> PoissonSampled(Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    >>> import jaxacct as ja
    >>> both = ja.repeat(ja.Laplace(1.0), 2)
    >>> round(float(ja.epsilon(ja.PoissonSampled(both, 0.1), 1e-6).upper), 4)  # one sample
    0.494
    >>> round(float(ja.epsilon(ja.repeat(ja.PoissonSampled(ja.Laplace(1.0), 0.1), 2), 1e-6).upper), 4)  # two samples
    0.3171
    >>> PoissonSampled(Gaussian(1.0), 0.01, group=5).expression()
    'ja.PoissonSampled(mechanism=ja.Gaussian(noise_multiplier=1.0), sampling_probability=0.01, group=5)'
    """

    exact_pair: ClassVar = True
    mechanism: Leaf
    sampling_probability: Leaf
    group: int = field(default=1, metadata={"static": True, "optional": True})
    in_turns: bool = field(default=False, metadata={"static": True, "optional": True})
    constraints: ClassVar = {"sampling_probability": PROBABILITY}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_samplable("PoissonSampled", self.mechanism, fixed_size=False)
        check_flag("in_turns", self.in_turns, "True if groups of records take turns")
        object.__setattr__(self, "group", check_one("group", self.group, GROUP, ONE_GROUP))
        if self.group > 1 and self.in_turns:
            raise InputError(
                f"group = {self.group} is not known with in_turns=True, since its records may take different turns; "
                "use ja.Gaussian(noise_multiplier / group) without sampling, which leaks no less"
            )
        if self.group > 1 and self._innermost().gaussians() is None:
            require_gaussian(f"group = {self.group}: PoissonSampled", self._innermost())

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, rate = self._flat()
        self.require_pair(relation, "where groups take turns")
        if self.group > 1:
            contributions = self._contributions()
            if relation == "replace_one":
                pairs = [revealed_pair(2.0 * shift, weight) for shift, weight in contributions]
            else:
                pairs = [mixture_pair(shift, weight) for shift, weight in contributions]
            return once(stacked(pairs, batch_shape(self)), direction)
        if self._reveals(relation):
            one = isinstance(base, BaseMechanism)
            pair = cast(BaseMechanism, base).finite_pair(relation) if one else pair_of_releases(base, relation)
            return once(with_sample_revealed(pair, rate), direction)
        if relation == "replace_one" and self._draws():
            return once(replaced_pair(base, rate, batch_shape(self)), direction)
        if isinstance(base, BaseMechanism):
            return [(base.part(rate, relation, direction), np.asarray(1.0))]
        if np.all(rate == 1.0):
            return base.expand(relation, direction)
        return [(sample_pair(pair_of_releases(base, _under(relation)), rate, direction), np.asarray(1.0))]

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, rate = self._flat(up=True)
        if super().has_bracket():
            return super().expand_below(relation, direction)
        if isinstance(base, BaseMechanism):
            return [(base.part(rate, relation, direction), np.asarray(1.0))]
        if np.all(rate == 1.0):
            return base.expand_below(relation, direction)
        return [(part_below_sampled(base, rate, batch_shape(self), _under(relation), direction), np.asarray(1.0))]

    def has_bracket(self) -> bool:
        return not self.ordinary() or self._flat()[0] != self._flat(up=True)[0]

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        rate, inner = Fraction(float(self.sampling_probability)), self.mechanism.infinity_exactly(relation, direction)
        if self.group > 1 or inner is None:
            return None
        return rate * inner if direction == "remove" or rate == 1 or self._reveals(relation) else Fraction(0)

    def symmetric(self) -> bool:
        base, _ = self._flat()
        return base.symmetric() and not self._draws()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        base, rate = self._flat()
        if self.group > 1 or self._bounds(relation):
            return "bound"
        if isinstance(base, BaseMechanism):
            return super().kind_under(relation, composed) if base == self._flat(up=True)[0] else "bound"
        return base.kind_under(relation, composed) if np.all(rate == 1.0) else "bound"

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        base, _ = self._flat()
        if super().has_bracket():
            return super().kind_of_bracket(relation, composed)
        return "bound" if self._bounds(relation) else base.kind_of_bracket(relation, composed)

    def several(self, relation: str) -> Several | None:
        """Return the sample's releases, or None if there is only one, or if their profile does not determine delta."""
        base, rate = self._flat()
        if isinstance(base, BaseMechanism) or self._bounds(relation):
            return None
        replaced = relation == "replace_one"
        return Several(base, rate, {side: relation if replaced else f"{side}_one" for side in DIRECTIONS})

    def _draws(self) -> bool:
        """Return whether any record is drawn with a probability strictly between 0 and 1."""
        rate = self._flat()[1]
        return bool(np.any((rate > 0.0) & (rate < 1.0)))

    def _bounds(self, relation: str) -> bool:
        return self._reveals(relation) or (relation == "replace_one" and self._draws())

    def reveals(self, relation: str) -> bool:
        return self._reveals(relation) or super().reveals(relation)

    def replaced_apart(self) -> bool:
        return self.in_turns or super().replaced_apart()

    def _reveals(self, relation: str) -> bool:
        """Return whether this sample counts as public, since the base's law without the record is not known."""
        return absence_unknown(self._flat()[0], relation) and self._draws()

    def _innermost(self) -> Mechanism:
        inner = self.mechanism
        while isinstance(inner, PoissonSampled):
            inner = inner.mechanism
        return cast(Mechanism, inner)

    def branches(self, relation: str) -> list[list[Branch]] | None:
        base, rate = self._flat()
        if relation == "replace_one":
            return None
        if isinstance(base, OfGaussianMixtures):
            shape, inner = batch_shape(self), base.branches(relation)
            rows = zip(np.broadcast_to(rate, shape).reshape(-1), rows_in(base, shape), strict=True)
            return None if inner is None else [[_branch_sampled(one, q) for one in inner[row]] for q, row in rows]
        if not isinstance(base, Gaussian):
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self._contributions()]

    def ordinary(self) -> bool:
        base = self._flat()[0]
        return self.group == 1 and isinstance(base, BaseMechanism) and not base.has_bracket()

    def of_gaussians(self) -> bool:
        return isinstance(self._flat()[0], Gaussian | OfGaussianMixtures)

    def attained(self, relation: str) -> bool:
        base = self._flat()[0]
        return base.attained(relation) if isinstance(base, OfGaussianMixtures) else True

    def _contributions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each configuration's possible shifts of the sum, in units of sigma, and their probabilities."""
        base, rate = self._flat()
        found = []
        for sigma, q in rows_of(self, cast(Gaussian, base).noise_multiplier, rate):
            weights = binomial(self.group, Decimal(q))
            found.append((np.arange(weights.size) / sigma, weights))
        return found

    def _flat(self, up: bool = False) -> tuple[Mechanism, np.ndarray]:
        """Return (innermost base, product of rates). Gaussians become one, noise rounded up if `up`, else down."""
        rate = np.asarray(self.sampling_probability, np.float64)
        if not isinstance(self.mechanism, PoissonSampled):
            base: Mechanism = self.mechanism
            both = None if isinstance(base, BaseMechanism) else one_gaussian(base)
            return base if both is None else both[up], rate
        base, inner = self.mechanism._flat(up)
        product = rate * inner
        if np.any((product == 0.0) & (rate > 0.0) & (inner > 0.0)):
            raise InputError("nested sampling_probability multiply to less than float64 can hold; use larger rates")
        # a product near 1 must be exact, since losses depend on 1 - product
        for index in np.argwhere(product > 0.999):
            factors = (float(np.broadcast_to(part, product.shape)[tuple(index)]) for part in (rate, inner))
            exact = math.prod(Fraction(factor) for factor in factors)
            if exact != Fraction(float(product[tuple(index)])):
                place = f"sampling_probability{index.tolist() if index.size else ''}"
                raise InputError(
                    f"nested {place} multiply to {float(product[tuple(index)])!r} after rounding, too near 1 for its "
                    "distance from 1 to be known; give the product as one rate"
                )
        return base, product


def _branch_sampled(branch: Branch, rate: float) -> Branch:
    """Return the branch for a record that takes part only with probability `rate`."""
    shifts, weights = np.append(0.0, branch.shifts), np.append(1.0 - rate, rate * branch.weights)
    return branch._replace(shifts=shifts, weights=weights)


def _under(relation: str) -> str:
    """Return the relation under which to take the releases' pair. Sampling this pair gives a bound under `relation`."""
    return relation if relation == "replace_one" else "add_or_remove_one"


def require_samplable(owner: str, mechanism: Mechanism, fixed_size: bool) -> None:
    """Refuse groups inside a sample. Unless `fixed_size`, also refuse mechanisms that need data of fixed size."""
    if isinstance(mechanism, BaseMechanism):
        return
    if not fixed_size and mechanism.displaces():
        fixed = (one for one in mechanism.walk() if one.displaces() and not any(x.displaces() for x in one.inside()))
        raise InputError(
            f"{owner} of {type(next(fixed)).__name__} is not supported, since a Poisson sample has no fixed size; "
            "draw all batches by PoissonSampled, which needs none"
        )
    if any(np.any(np.not_equal(getattr(one, "group", 1), 1)) for one in mechanism.walk()):
        raise InputError("group belongs to the outermost sampling; give it there, or claim one record alone")


@register
class TruncatedPoissonSampled(OfGaussianMixtures):
    """A Gaussian on a Poisson sample, which is cut to a uniform subset of ``cap`` records if it is larger.

    With n = ``dataset_size``, tau = Pr[Bin(n-1, q) >= cap] is the chance that the n - 1 other records fill the batch.
    Given a filled batch, a record is in it with the chance q' = (cap/n) Pr[Bin(n, q) > cap]/tau, and has then displaced
    another record. So a step counts, with probability tau, as a Gaussian of sensitivity 2 sampled at q', and else as a
    Gaussian of sensitivity 1 sampled at q. This is a bound for add and remove, and for any number of adaptive steps.

    The bound has four conditions. n, the size of the larger data set, is public. q and the cap do not depend on the
    data. The subset is uniform (not the first ``cap`` records). The sum is divided by a constant, never by the number
    drawn. A cap costs much privacy unless steps * tau is well below delta; `jaxacct.cap_for` finds a cap for which it
    is. A cap of n or more is plain Poisson sampling.

    Parameters
    ----------
    mechanism : Gaussian; one step, with noise in units of the add/remove sensitivity.
    sampling_probability : array_like in [0, 1]; q, the chance of each record to be drawn before the sample is cut.
    dataset_size : whole numbers from 1 to 1e9; n, the size of the larger data set.
    cap : whole numbers from 1 to 1e9; the size of the largest batch. All fields broadcast.

    References
    ----------
    Ganesh (2025), arXiv 2508.15089. README.md, "A cap on a Poisson sample", also has the other relations.

    >>> import jaxacct as ja
    >>> step = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, dataset_size=1000, cap=75)
    >>> f"{step.chance_of_cap():.6g}"
    '0.000399828'
    >>> round(float(ja.epsilon(ja.repeat(step, 1000), 1e-5).upper), 3)
    11.151
    """

    exact_pair: ClassVar = True
    mechanism: Leaf
    sampling_probability: Leaf
    dataset_size: Leaf
    cap: Leaf
    constraints: ClassVar = {"sampling_probability": PROBABILITY, "dataset_size": RECORDS, "cap": RECORDS}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_gaussian("TruncatedPoissonSampled", self.mechanism)

    def chance_of_cap(self) -> Numbers:
        """Return tau, the chance that the other n - 1 records fill the batch, rounded up, for each configuration.

        >>> import jaxacct as ja
        >>> float(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.4, dataset_size=5, cap=5).chance_of_cap())
        0.0
        """
        found = np.array([cap.chance[1] for _, _, cap in self._rows()])
        return found.reshape(batch_shape(self))[()]

    def displaces(self) -> bool:
        return not self._never_binds()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return super().kind_under(relation, composed) if self._never_binds() and relation != "replace_one" else "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if self._never_binds() and relation != "replace_one":
            rate = np.asarray(self.sampling_probability, np.float64)
            return [(GaussianPart(np.asarray(self.mechanism.noise_multiplier, np.float64), rate), np.asarray(1.0))]
        return once(stacked([_pair_of_step(*row, relation) for row in self._rows()], batch_shape(self)), direction)

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


def cap_for(sampling_probability: float, dataset_size: int, steps: int, delta: float, share: float = 1e-3) -> int:
    """Return the smallest cap for which steps * Pr[Bin(n - 1, q) >= cap] is at most share * delta.

    This product bounds the chance that a record displaces another one in any step (see `TruncatedPoissonSampled`).

    Parameters
    ----------
    sampling_probability : float in (0, 1); q, the chance of each record to be drawn.
    dataset_size : int from 1 to 1e9; n, the size of the larger data set.
    steps : int from 1 to 2**53
    delta : float in (0, 1); delta of the claim.
    share : float in (0, 1)

    Returns
    -------
    int : the cap, which is n if no smaller cap suffices.

    References
    ----------
    README.md, "A cap on a Poisson sample".

    >>> import jaxacct as ja
    >>> ja.cap_for(0.05, 1000, steps=1000, delta=1e-5)
    103
    """
    one = "a cap is for one run"
    q = check_one("sampling_probability", sampling_probability, OPEN_PROBABILITY, one)
    n = float(check_one("dataset_size", dataset_size, RECORDS, one))
    count = float(check_one("steps", steps, COUNT, one))
    goal = check_one("delta", delta, DELTA, one) * check_one("share", share, OPEN_PROBABILITY, one)
    suffices = lambda cap: count * cap_of(n, q, float(cap)).chance[1] <= goal
    return 1 + bisect.bisect_left(range(1, int(n)), True, key=suffices)  # a cap of n always suffices


def _pair_of_step(sigma: float, q: float, cap: Cap, relation: str) -> FinitePair:
    """Return a pair that dominates one step under the relation."""
    (low, high), rate, s = cap.chance, cap.rate[1], 1.0 / sigma
    plain = replaced_gaussian(q, s) if relation == "replace_one" else _sampled(q, s)
    if high == 0.0:
        return plain
    if relation == "replace_one":
        points = sampled_points(rate, 2.0 * s)
        capped = profile_of_points(points, points, 2.0 * s)
    elif relation == "zero_out":
        capped = profile_of_points(*zero_out_points(rate, s), 2.0 * s)
    else:
        capped = _sampled(rate, 2.0 * s)
    return mixed_pair([_rest(low), high], [plain, capped])


def _rest(chance: float) -> float:
    """Return 1 - chance, rounded up; 1 if the chance is 0."""
    return (1.0 - chance) * (1.0 + 4.0 * ROUNDOFF) if chance > 0.0 else 1.0


def _sampled(q: float, shift: float) -> FinitePair:
    return mixture_pair(np.array([0.0, shift]), np.array([1.0 - q, q]))


class Cap(NamedTuple):
    """The effect of a cap on one record of a Poisson sample. Each field is (lower bound, upper bound) of a chance."""

    chance: tuple[float, float]  # tau = Pr[Bin(n-1, q) >= cap], the chance that the other records fill the batch
    rate: tuple[float, float]  # q' = (cap/n) Pr[Bin(n, q) > cap]/tau, the record's chance to be in a filled batch


def cap_of(size: float, q: float, cap: float) -> Cap:
    """Return bounds of tau and q', from sums of p_k/p_cap over k, where p_k = Pr[Bin(size - 1, q) = k]."""
    n = size - 1.0
    if cap >= size or q == 0.0:
        return Cap((0.0, 0.0), (0.0, 0.0))
    if q == 1.0:
        return Cap((1.0, 1.0), (cap / size * (1.0 - 2.0 * ROUNDOFF), min(cap / size * (1.0 + 2.0 * ROUNDOFF), 1.0)))
    beyond, wrong = _series(n, q, cap, 1)  # sum_{k > cap} p_k/p_cap
    if not np.isfinite(beyond):  # the sum overflows, so the terms up to the cap are negligible: tau is about 1
        rate = cap / size
        return Cap((1.0 - 2.0 * ROUNDOFF, 1.0), (rate * (1.0 - 4.0 * ROUNDOFF), rate * (1.0 + 2.0 * ROUNDOFF)))
    around, doubt = _series(n, q, cap, -1)  # sum_{k < cap} p_k/p_cap
    if np.isfinite(around):
        tau = (1.0 + beyond) / (1.0 + beyond + around)
        error = wrong + doubt + 16.0 * ROUNDOFF
        chance = (tau * (1.0 - error), min(tau * (1.0 + error), 1.0))
    else:  # `around` overflows, so tau is less than about 1e-300
        chance = (0.0, 1e-290)
    rate = cap / size * ((beyond + q) / (1.0 + beyond))
    error = 2.0 * wrong + 16.0 * ROUNDOFF
    return Cap(chance, (rate * (1.0 - error), min(rate * (1.0 + error), 1.0)))


def _series(n: float, q: float, start: float, way: int) -> tuple[float, float]:
    """Return the sum of Bin(n, q)'s p_k/p_start over k > start (k < start if `way` < 0), and its relative error."""
    total, last, k, length, terms = 0.0, 1.0, float(start), 4096, 0.0
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
            # a geometric series bounds the sum of all further terms, since the ratios of the terms fall
            rest = last * at / (1.0 - at) if at < 1.0 else np.inf
            if rest <= NEGLIGIBLE * max(total, 1e-300):
                break
            length *= 2
    # a term has at most `terms` ratios, each with <= 16 roundoffs: a difference, 2 quotients, 3 products, and the odds
    return total, 16.0 * ROUNDOFF * (terms + 4.0) + 4.0 * NEGLIGIBLE


@register
class SampledWithoutReplacement(OfGaussianMixtures):
    """A base mechanism run on a sample of fixed size without replacement, a share ``sampling_ratio`` g of the data.

    Adding or removing a record replaces a record of the sample. So let (P, Q) be the base's pair under ``replace_one``,
    which has twice the sensitivity of add/remove. The pair of the sampled step is ((1-g) Q + g P, Q) for remove, and
    (Q, (1-g) Q + g P) for add. Under ``replace_one`` the sampled step has the profile H_a((1-g) Q + g P || Q) for
    a >= 1 and H_a(P || (1-g) P + g Q) for a < 1. If (P, Q) is not symmetric, it is replaced by the pair whose
    profile is the larger of the profiles of (P, Q) and (Q, P) (README.md, "Two orders of a replaced record"). This
    larger profile, and that of ``replace_one``, may belong to no single pair of data sets. So their repetitions,
    compositions and Rényi divergences are bounds. For Gaussian and Laplace bases epsilon under ``replace_one`` is a
    bound, about 1e-5 above the exact value. A composition inside runs on one sample, as in `PoissonSampled`.

    Under ``zero_out`` a record contributes 0 but keeps its slot. A Gaussian base has a pair of its own for this
    (README.md, "Zero-out where the slot is kept"). Other bases use the pair of ``replace_one``, which is a bound.

    A base such as `PureDP` is a guarantee for the relation of the question. Under add, remove and zero-out a
    replacement counts as two such steps, and the answer is a bound (README.md, "Several releases from one sample").

    ``group`` = k > 1 protects k records together. Let n = ``dataset_size`` be the size of the larger data set. Each of
    the k in the batch displaces another record, so the pair of a Gaussian of noise multiplier s is (sum_j Hyp_j N(2j,
    s^2), N(0, s^2)), where Hyp_j is the hypergeometric probability that a batch of n g records holds j of the k. It is
    exact for add and remove, and a bound under ``replace_one`` and ``zero_out`` (README.md, "Groups of records").

    Parameters
    ----------
    mechanism : Mechanism; it runs on one sample.
    sampling_ratio : array_like in [0, 1]; g, which broadcasts. Under add/remove it is a share of the larger data set.
    group : int from 1 to 1000; k, the same for all configurations. Above 1 the base must consist of Gaussians.
    dataset_size : int from 2 to 1e9; n, needed only for a group. n g must be a whole number of at most n - k.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 11 and
    Corollary 31. Lebeda et al. (2024), on accounting for sampling without replacement.

    >>> import jaxacct as ja
    >>> fixed = ja.SampledWithoutReplacement(ja.Gaussian(2.0), 0.01)
    >>> poisson = ja.PoissonSampled(ja.Gaussian(1.0), 0.01)  # half the noise: a replacement moves twice as far
    >>> bool(ja.epsilon(fixed, 1e-5).upper == ja.epsilon(poisson, 1e-5).upper)
    True
    """

    mechanism: Leaf
    sampling_ratio: Leaf
    group: int = field(default=1, metadata={"static": True, "optional": True})
    dataset_size: int | None = field(default=None, metadata={"static": True, "optional": True})
    constraints: ClassVar = {"sampling_ratio": PROBABILITY}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_samplable("SampledWithoutReplacement", self.mechanism, fixed_size=True)
        object.__setattr__(self, "group", check_one("group", self.group, GROUP, ONE_GROUP))
        if self.dataset_size is not None:
            size = check_one("dataset_size", self.dataset_size, RECORDS, "give the number of records of one data set")
            object.__setattr__(self, "dataset_size", size)
        if self.group > 1:
            if self.mechanism.gaussians() is None:
                require_gaussian(f"group = {self.group}: SampledWithoutReplacement", self.mechanism)
            if self.dataset_size is None:
                raise InputError(f"group = {self.group} needs dataset_size; give the number of records of the data set")
            if not isinstance(self.sampling_ratio, Tracer):
                self._batch_sizes()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        base = self._base()
        if not self.ordinary() or base != self._base(up=True):
            return "bound"
        return self._kind(relation, composed, base.kind_under("replace_one", composed or not self._trivial()))

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        base = self._base()
        if self.group > 1:
            return super().kind_of_bracket(relation, composed)
        return self._kind(relation, composed, base.kind_of_bracket("replace_one", composed or not self._trivial()))

    def _kind(self, relation: str, composed: bool, kind: str) -> str:
        base = self._base()
        if self.group > 1 or relation == "zero_out" or self._in_two_steps(relation):
            return "bound"
        replaced = relation == "replace_one" and not self._trivial()
        # `joined`: perhaps no single pair of data sets has the whole profile. `rough`: the base's pair is only bounded.
        joined = replaced or not base.symmetric()
        rough = replaced and isinstance(base, BaseMechanism) and not base.finite
        return "bound" if rough or (joined and composed) else kind

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, ratio = self._base(), np.asarray(self.sampling_ratio, np.float64)
        if self.group > 1 or (relation == "zero_out" and isinstance(base, Gaussian)):
            pairs = [self._pair(row, relation) for row in self._rows()]
            return once(stacked(pairs, batch_shape(self)), direction)
        replaced = relation in ("replace_one", "zero_out")
        if self._in_two_steps(relation):
            pair = replaced_pair_in_two_steps(base, "zero_out" if relation == "zero_out" else "add_or_remove_one")
        elif not isinstance(base, BaseMechanism):
            pair = pair_of_releases(base, "replace_one")
        elif base.symmetric():
            if not replaced or self._trivial():
                return [(base.part(ratio, "replace_one", direction), np.asarray(1.0))]
            pair = base.finite_pair("replace_one")
        else:
            orders = [base.part(np.asarray(1.0), "replace_one", each) for each in DIRECTIONS]
            pair = either_order(*(cast(FinitePart, part) for part in orders))
        if not replaced or self._trivial():
            return [(sample_pair(pair, ratio, direction), np.asarray(1.0))]
        return once(_replaced(pair, ratio), direction)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, ratio = self._base(up=True), np.asarray(self.sampling_ratio, np.float64)
        if self.group > 1:
            return super().expand_below(relation, direction)
        # `_replaced` bounds delta only from above. The lower bound is 0, the delta of a law whose only loss is 0.
        if relation in ("replace_one", "zero_out") and not self._trivial():
            nothing = np.zeros((*batch_shape(self), 1))
            return [(FinitePart(nothing, nothing + 1.0, nothing[..., 0]), np.asarray(1.0))]
        if self.ordinary():
            return [(cast(BaseMechanism, base).part(ratio, "replace_one", direction), np.asarray(1.0))]
        return [(part_below_sampled(base, ratio, batch_shape(self), "replace_one", direction), np.asarray(1.0))]

    def has_bracket(self) -> bool:
        return not self.ordinary() or self._base() != self._base(up=True)

    def several(self, relation: str) -> Several | None:
        """Return the sample's releases; None if one pair has their profile, or if no profile determines delta."""
        if self.group > 1 or self.ordinary() or relation == "zero_out" or self._in_two_steps(relation):
            return None
        ratio = np.asarray(self.sampling_ratio, np.float64)
        return Several(self._base(), ratio, dict.fromkeys(DIRECTIONS, "replace_one"))

    def _base(self, up: bool = False) -> Mechanism:
        """Return the base; several Gaussians become one, whose noise is rounded up if `up`, else down."""
        both = None if isinstance(self.mechanism, BaseMechanism) else one_gaussian(self.mechanism)
        return cast(Mechanism, self.mechanism) if both is None else both[up]

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        unknown = self.group > 1 or relation not in LOSS_OF_PRESENCE or not self.mechanism.symmetric()
        if unknown or self._in_two_steps(relation):
            return None
        rate, inner = Fraction(float(self.sampling_ratio)), self.mechanism.infinity_exactly("replace_one", direction)
        if inner is None:
            return None
        return rate * inner if direction == "remove" or rate == 1 else Fraction(0)

    def symmetric(self) -> bool:
        return self._trivial() and self.group == 1

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation not in LOSS_OF_PRESENCE or not self.of_gaussians():
            return None
        found = []
        for sigma, ratio, batch in self._rows():
            weights = np.array([1.0 - ratio, ratio])
            if self.group > 1:
                weights = hypergeometric(cast(int, self.dataset_size), self.group, int(batch))
            found.append([Branch(1.0, 2.0 * np.arange(weights.size) / sigma, weights)])
        return found

    def ordinary(self) -> bool:
        # an asymmetric base has two orders; the larger of their profiles is rounded up, so it gives no lower ends
        base = self._base()
        return self.group == 1 and isinstance(base, BaseMechanism) and base.symmetric()

    def of_gaussians(self) -> bool:
        return isinstance(self._base(), Gaussian)

    def _rows(self) -> list[tuple[float, ...]]:
        """Return (sigma, sampling ratio, batch size) of every configuration. The batch size is 0 if `group` is 1."""
        size = self._batch_sizes() if self.group > 1 else 0.0
        return rows_of(self, cast(Gaussian, self._base()).noise_multiplier, self.sampling_ratio, size)

    def _batch_sizes(self) -> np.ndarray:
        """Return n * sampling_ratio; refuse values that are no whole number, or above n - group."""
        n, ratio = cast(int, self.dataset_size), np.asarray(self.sampling_ratio, np.float64)
        size = np.rint(n * ratio)
        bad = (np.abs(n * ratio - size) > 1e-6) | (size > n - self.group)
        most = f"must be a whole number <= dataset_size - group = {n - self.group}"
        rest = f"{most}; use sampling_ratio = batch size / dataset_size"
        refuse_where(bad, "dataset_size * sampling_ratio", n * ratio, rest)
        return size

    def _pair(self, row: tuple[float, ...], relation: str) -> FinitePair:
        """Return a pair that dominates one step under the relation, which is zero_out if `group` is 1."""
        sigma, ratio, batch = row
        if self.group == 1:
            return profile_of_points(*zero_out_points(ratio, 1.0 / sigma), 2.0 / sigma)
        weights = hypergeometric(cast(int, self.dataset_size), self.group, int(batch))
        count = np.arange(weights.size) / sigma
        if relation in LOSS_OF_PRESENCE:
            return mixture_pair(2.0 * count, weights)
        return revealed_pair(2.0 * count, weights, count if relation == "zero_out" else None)

    def displaces(self) -> bool:
        return True

    def _in_two_steps(self, relation: str) -> bool:
        """Return whether the base's guarantee is for one record more or less, while the sample replaces a record."""
        same_place = relation == "replace_one" or (relation == "zero_out" and self._trivial())
        return only_stated(self.mechanism) and not same_place

    def _trivial(self) -> bool:
        ratio = np.asarray(self.sampling_ratio, np.float64)
        return bool(np.all((ratio == 0.0) | (ratio == 1.0)))


def _replaced(pair: FinitePair, ratio: np.ndarray) -> FinitePair:
    """Return the sample's pair under `replace_one` from the base's (Zhu, Dong, Wang 2022, Corollary 31)."""
    g = ratio[..., None]
    # P becomes (1 - g) Q + g P where the loss is positive. Q becomes (1 - g) P + g Q where the loss is negative.
    above, below = pair.loss > 0.0, pair.loss < 0.0
    mixed_p, mixed_q = (1.0 - g) * pair.q + g * pair.p, (1.0 - g) * pair.p + g * pair.q
    loss = np.where(above, log_mixture(pair.loss, g), -log_mixture(-pair.loss, g))
    p = np.where(above, mixed_p, np.where(below, pair.p, 0.0))
    q = np.where(above, pair.q, np.where(below, mixed_q, 0.0))
    p_infinity, q_infinity = ratio * pair.p_infinity, ratio * pair.q_infinity
    # the rest of the mass, P's mass at loss 0 plus (1 - g) times the total variation of P and Q, has loss 0
    apart = np.where(above, pair.p - pair.q, 0.0).sum(-1) + pair.p_infinity
    centre = np.where(above | below, 0.0, pair.p).sum(-1) + (1.0 - ratio) * np.maximum(apart, 0.0)
    shape = np.broadcast_shapes(loss.shape[:-1], centre.shape)

    def joined(values: np.ndarray, last: np.ndarray) -> np.ndarray:
        values = np.broadcast_to(values, (*shape, values.shape[-1]))
        return np.concatenate([values, np.broadcast_to(last, shape)[..., None]], -1)

    atoms = joined(np.where(above | below, loss, 0.0), np.zeros(shape)), joined(p, centre), joined(q, centre)
    return FinitePair(*atoms, np.broadcast_to(p_infinity, shape), np.broadcast_to(q_infinity, shape))


@register
class SampledWithReplacement(OfGaussianMixtures):
    """A Gaussian on ``batch_size`` B draws from n = ``dataset_size`` records, each draw independent of the others.

    A record is drawn Binomial(B, 1/n) times, and each time it takes the place of another record. If Bin_m is the
    probability of m draws and s the noise multiplier, the pair is (sum_m Bin_m N(2m, s^2), N(0, s^2)), exact for add
    and remove. ``group`` = k > 1 protects any k records together, which are drawn Binomial(B, k/n) times. Under
    ``replace_one`` and ``zero_out`` the answer is a bound (README.md, "Draws with replacement").

    The pair has three conditions. A record that is drawn m times counts m times, and every draw is clipped, not the sum
    of a record's draws. n and B are public. The sum is divided by a constant.

    Parameters
    ----------
    mechanism : Gaussian; one step, with noise in units of the add/remove sensitivity.
    batch_size : whole numbers from 1 to dataset_size; B, the number of draws.
    dataset_size : whole numbers from 2 to 1e9; n, the size of the larger data set. All fields broadcast.
    group : int from 1 to 1000; k, the same for all configurations, less than n.

    References
    ----------
    Balle, Barthe, Gaboardi (2018), Privacy Amplification by Subsampling, Theorem 10.

    >>> import jaxacct as ja
    >>> step = ja.SampledWithReplacement(ja.Gaussian(2.0), batch_size=10, dataset_size=1000)
    >>> b = ja.epsilon(ja.repeat(step, 1000), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.882, 'certified')
    """

    mechanism: Leaf
    batch_size: Leaf
    dataset_size: Leaf
    group: int = field(default=1, metadata={"static": True, "optional": True})
    constraints: ClassVar = {"batch_size": RECORDS, "dataset_size": RECORDS}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_gaussian("SampledWithReplacement", self.mechanism)
        object.__setattr__(self, "group", check_one("group", self.group, GROUP, ONE_GROUP))
        if not isinstance(self.dataset_size, Tracer):
            few = np.asarray(self.dataset_size) <= self.group
            rest = f"must be > group = {self.group}; other records stay"
            refuse_where(few, "dataset_size", self.dataset_size, rest, "{:g}".format)
            if not isinstance(self.batch_size, Tracer):
                batch, size = np.broadcast_arrays(self.batch_size, self.dataset_size)
                order = lambda index: f"must be <= dataset_size = {size[index]:g}; batch_size is the first of the two"
                refuse_where(batch > size, "batch_size", batch, order, "{:g}".format)

    def displaces(self) -> bool:
        return True

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        pair = mixture_pair if relation in LOSS_OF_PRESENCE else revealed_pair
        pairs = [pair(shift, weight) for shift, weight in self._contributions()]
        return once(stacked(pairs, batch_shape(self)), direction)

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation not in LOSS_OF_PRESENCE:
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self._contributions()]

    def _contributions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each configuration's possible shifts of the sum, in units of sigma, and their probabilities."""
        found = []
        for sigma, batch, size in rows_of(self, self.mechanism.noise_multiplier, self.batch_size, self.dataset_size):
            with localcontext(prec=60):
                chance = Decimal(self.group) / Decimal(int(size))
            weights = binomial(int(batch), chance)
            found.append((2.0 * np.arange(weights.size) / sigma, weights))
        return found
