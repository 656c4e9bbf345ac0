"""Batches of a fixed size: drawn with replacement, or without."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import ClassVar, cast

import numpy as np

from jaxacct.core.types import Leaf
from jaxacct.core.validation import PROBABILITY, RECORDS, InputError, Tracer, refuse_where
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.base import (
    DIRECTIONS,
    BaseMechanism,
    FinitePair,
    FinitePart,
    Mechanism,
    Part,
    batch_shape,
    register,
    require_mechanism,
)
from jaxacct.mechanisms.finite import log_mixture, once, sample_pair
from jaxacct.mechanisms.gaussian_mixtures import (
    LARGEST_GROUP,
    LOSS_OF_PRESENCE,
    Branch,
    OfGaussianMixtures,
    binomial,
    hypergeometric,
    mixture_pair,
    profile_of_points,
    require_gaussian,
    revealed_pair,
    rows_of,
    whole_number,
    zero_out_points,
)
from jaxacct.mechanisms.profile import either_order, stacked
from jaxacct.mechanisms.sampled_releases import (
    Several,
    one_gaussian,
    pair_of_releases,
    part_below_sampled,
    require_samplable,
)


@register
@dataclass(frozen=True, eq=False)
class SampledWithoutReplacement(OfGaussianMixtures):
    """A base mechanism run on a sample of fixed size without replacement, a share ``sampling_ratio`` g of the data.

    A sample of fixed size changes by a replacement, so (P, Q) is the base's pair under ``replace_one``, which has twice
    the sensitivity of add/remove. Remove is ((1-g) Q + g P, Q) and add is (Q, (1-g) Q + g P). The pair of
    ``replace_one`` has the profile H_a((1-g) Q + g P || Q) for a >= 1 and H_a(P || (1-g) P + g Q) for a < 1. If the two
    laws of the base differ, a record is replaced in either order, and (P, Q) has the larger of the two profiles
    (README.md, "Two orders of a replaced record"). A pair that joins several pairs is a bound when it is repeated or
    composed, and so are its Renyi divergences. For Gaussian and Laplace bases the pair of ``replace_one`` is put on
    finitely many losses from above, which adds about 1e-5 to epsilon, and ``kind_under("replace_one")`` is "bound". A
    composition inside runs on one sample, as in PoissonSampled. The guarantee differs from that of Poisson sampling.

    ``zero_out`` replaces a record by one that contributes 0, in the same slot. A Gaussian has a dominating pair of its
    own for it (README.md, "Zero-out where the slot is kept"). For other bases the pair of ``replace_one`` is a bound.

    ``group`` = k > 1 protects k records of n = ``dataset_size`` together. A batch holds B = n * ``sampling_ratio``
    records, of which Hypergeometric(n, k, B) many belong to the group. Each displaces another record, so the pair of a
    Gaussian is (sum_j Hyp_j N(2j, s^2), N(0, s^2)), exact for add and remove of k records. Under ``replace_one`` and
    ``zero_out`` the number j of group records in the batch is revealed. They move the sum by 2j or by j, and the answer
    is a bound.

    Parameters
    ----------
    mechanism : Mechanism
        Step or composition that runs on one sample.
    sampling_ratio : array_like in [0, 1]
        Sample size over the size of the larger data set under add/remove, which broadcasts with the base's fields.
    group : int from 1 to 1000
        k, the same for all configurations; above 1 the base must be Gaussian, or a composition of Gaussians.
    dataset_size : int from 2 to 1e9
        n, the size of the larger data set, needed only for a group. n * sampling_ratio must be a whole number of at
        most n - k.

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
        require_mechanism("mechanism", self.mechanism)
        require_samplable("SampledWithoutReplacement", self.mechanism, fixed_size=True)
        object.__setattr__(self, "group", whole_number("group", self.group, LARGEST_GROUP))
        if self.dataset_size is not None:
            object.__setattr__(self, "dataset_size", whole_number("dataset_size", self.dataset_size, 10**9))
        super().__post_init__()
        if self.group > 1:
            if self.mechanism.gaussians() is None:
                require_gaussian(f"group = {self.group}: SampledWithoutReplacement", self.mechanism)
            if self.dataset_size is None:
                raise InputError(f"group = {self.group} needs dataset_size; give the number of records of the data set")
            if not isinstance(self.sampling_ratio, Tracer):
                self._batch_sizes()

    def __repr__(self) -> str:
        more = f", group={self.group}, dataset_size={self.dataset_size}" if self.group > 1 else ""
        return f"SampledWithoutReplacement(mechanism={self.mechanism!r}, sampling_ratio={self.sampling_ratio!r}{more})"

    def kind_under(self, relation: str, composed: bool = False) -> str:
        base = self._base()
        if not isinstance(base, BaseMechanism) or base != self._base(up=True):
            return "bound"
        return self._kind(relation, composed, base.kind_under("replace_one", composed))

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        base = self._base()
        if self.group > 1:
            return super().kind_of_bracket(relation, composed)
        return self._kind(relation, composed, base.kind_of_bracket("replace_one", composed))

    def _kind(self, relation: str, composed: bool, kind: str) -> str:
        base = self._base()
        if self.group > 1 or relation == "zero_out":
            return "bound"
        replaced = relation == "replace_one" and not self._trivial()
        # a joined pair covers several pairs of data sets; Gaussian and Laplace bases are put on finitely many losses
        joined = replaced or not base.symmetric()
        rough = replaced and isinstance(base, BaseMechanism) and not base.finite
        return "bound" if rough or (joined and composed) else kind

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, ratio = self._base(), np.asarray(self.sampling_ratio, np.float64)
        if self.group > 1 or (relation == "zero_out" and isinstance(base, Gaussian)):
            pairs = [self._pair(row, relation) for row in self._rows()]
            return once(stacked(pairs, batch_shape(self)), direction)
        replaced = relation in ("replace_one", "zero_out")  # setting a contribution to 0 replaces it
        if not isinstance(base, BaseMechanism):
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
        if relation in ("replace_one", "zero_out") and not self._trivial():  # a joined pair has no lower bound
            nothing = np.zeros((*batch_shape(self), 1))
            return [(FinitePart(nothing, nothing + 1.0, nothing[..., 0]), np.asarray(1.0))]
        if isinstance(base, BaseMechanism):
            return [(base.part(ratio, "replace_one", direction), np.asarray(1.0))]
        return [(part_below_sampled(base, ratio, batch_shape(self), "replace_one", direction), np.asarray(1.0))]

    def has_bracket(self) -> bool:
        base = self._base()
        return super().has_bracket() or not isinstance(base, BaseMechanism) or base != self._base(up=True)

    def several(self, relation: str) -> Several | None:
        """Return the releases from one sample.

        None if their profile does not determine the answer for this relation.
        """
        base = self._base()
        if isinstance(base, BaseMechanism) or relation == "zero_out":
            return None
        return Several(base, np.asarray(self.sampling_ratio, np.float64), dict.fromkeys(DIRECTIONS, "replace_one"))

    def _base(self, up: bool = False) -> Mechanism:
        """Return the base; several Gaussians become one Gaussian, whose noise is rounded up if `up`, else down."""
        both = None if isinstance(self.mechanism, BaseMechanism) else one_gaussian(self.mechanism)
        return cast(Mechanism, self.mechanism) if both is None else both[up]

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
        return self.group == 1

    def of_gaussians(self) -> bool:
        return isinstance(self._base(), Gaussian)

    def attained(self, relation: str) -> bool:
        return relation in LOSS_OF_PRESENCE

    def _rows(self) -> list[tuple[float, ...]]:
        """Return (sigma, sampling ratio, batch size) of every configuration; the size is 0 without a group."""
        size = self._batch_sizes() if self.group > 1 else 0.0
        return rows_of(self, cast(Gaussian, self._base()).noise_multiplier, self.sampling_ratio, size)

    def _batch_sizes(self) -> np.ndarray:
        """Return n * sampling_ratio; refuse values that are no whole number, or above n - k."""
        n, ratio = cast(int, self.dataset_size), np.asarray(self.sampling_ratio, np.float64)
        size = np.rint(n * ratio)
        bad = (np.abs(n * ratio - size) > 1e-6) | (size > n - self.group)
        most = f"must be a whole number <= dataset_size - group = {n - self.group}"
        rest = f"{most}; use sampling_ratio = batch size / dataset_size"
        refuse_where(bad, "dataset_size * sampling_ratio", n * ratio, rest)
        return size

    def _pair(self, row: tuple[float, ...], relation: str) -> FinitePair:
        """Return the pair of a group, or of a record whose contribution becomes 0, from above."""
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

    def _trivial(self) -> bool:
        ratio = np.asarray(self.sampling_ratio, np.float64)
        return bool(np.all((ratio == 0.0) | (ratio == 1.0)))


def _replaced(pair: FinitePair, ratio: np.ndarray) -> FinitePair:
    """Return the pair of Corollary 31: positive losses mixed towards Q, negative ones towards P, the rest at loss 0."""
    g = ratio[..., None]
    above, below = pair.loss > 0.0, pair.loss < 0.0
    mixed_p, mixed_q = (1.0 - g) * pair.q + g * pair.p, (1.0 - g) * pair.p + g * pair.q
    loss = np.where(above, log_mixture(pair.loss, g), -log_mixture(-pair.loss, g))
    p = np.where(above, mixed_p, np.where(below, pair.p, 0.0))
    q = np.where(above, pair.q, np.where(below, mixed_q, 0.0))
    p_infinity, q_infinity = ratio * pair.p_infinity, ratio * pair.q_infinity
    # both laws share the mass of P at loss 0, and (1-g) times the total variation
    apart = np.where(above, pair.p - pair.q, 0.0).sum(-1) + pair.p_infinity
    centre = np.where(above | below, 0.0, pair.p).sum(-1) + (1.0 - ratio) * np.maximum(apart, 0.0)
    shape = np.broadcast_shapes(loss.shape[:-1], centre.shape)

    def joined(values: np.ndarray, last: np.ndarray) -> np.ndarray:
        values = np.broadcast_to(values, (*shape, values.shape[-1]))
        return np.concatenate([values, np.broadcast_to(last, shape)[..., None]], -1)

    zero = np.zeros(shape)
    return FinitePair(
        joined(np.where(above | below, loss, 0.0), zero),
        joined(p, centre),
        joined(q, centre),
        np.broadcast_to(p_infinity, shape),
        np.broadcast_to(q_infinity, shape),
    )


@register
@dataclass(frozen=True, eq=False)
class SampledWithReplacement(OfGaussianMixtures):
    """A Gaussian on ``batch_size`` B draws from n = ``dataset_size`` records, each draw independent of the others.

    A record is drawn Binomial(B, 1/n) times, and each time it takes the place of another record. The pair is (sum_m
    Bin_m N(2m, s^2), N(0, s^2)), exact for add and remove. ``group`` = k > 1 protects any k records together, with
    Binomial(B, k/n) draws. Under ``replace_one`` and ``zero_out`` the answer is a bound: delta(log a) <= sum_{m >= 1}
    Bin_m delta_{2m}(log a'), where delta_{2m} is that of the Gaussian of sensitivity 2m, a' = 1 + (a - 1)/eta and eta =
    1 - (1 - k/n)^B. ``kind`` is that of the pair put on finitely many losses: "bound".

    A record that is drawn m times counts m times: clip every draw, not the sum of a record's draws. n and B are public,
    and the sum is divided by a constant.

    Parameters
    ----------
    mechanism : Gaussian
        One step, with noise in units of the add/remove sensitivity.
    batch_size : array_like of whole numbers from 1 to 1e9
        B, the number of draws.
    dataset_size : array_like of whole numbers from 1 to 1e9
        n, the size of the larger data set. All fields broadcast.
    group : int from 1 to 1000
        k, one for the whole batch, less than n.

    References
    ----------
    Balle, Barthe, Gaboardi (2018), Privacy Amplification by Subsampling, Theorem 10. README.md, "Draws with
    replacement".

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
        require_mechanism("mechanism", self.mechanism)
        require_gaussian("SampledWithReplacement", self.mechanism)
        object.__setattr__(self, "group", whole_number("group", self.group, LARGEST_GROUP))
        super().__post_init__()
        if not isinstance(self.dataset_size, Tracer) and np.any(np.asarray(self.dataset_size) <= self.group):
            smallest = int(np.min(self.dataset_size))
            raise InputError(f"dataset_size = {smallest} must be > group = {self.group}; other records must be left")

    def symmetric(self) -> bool:
        return False

    def displaces(self) -> bool:
        return True

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        pairs = [_pair(shift, weight, relation) for shift, weight in self._contributions()]
        return once(stacked(pairs, batch_shape(self)), direction)

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation not in LOSS_OF_PRESENCE:
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self._contributions()]

    def attained(self, relation: str) -> bool:
        return relation in LOSS_OF_PRESENCE

    def _contributions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return shifts in deviations and weights of every configuration."""
        found = []
        for sigma, batch, size in rows_of(self, self.mechanism.noise_multiplier, self.batch_size, self.dataset_size):
            with localcontext(prec=60):
                chance = Decimal(self.group) / Decimal(int(size))
            weights = binomial(int(batch), chance)
            found.append((2.0 * np.arange(weights.size) / sigma, weights))
        return found


def _pair(shift: np.ndarray, weight: np.ndarray, relation: str) -> FinitePair:
    if relation in LOSS_OF_PRESENCE:
        return mixture_pair(shift, weight)
    return revealed_pair(shift, weight)
