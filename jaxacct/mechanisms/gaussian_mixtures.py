"""Mechanisms with Gaussian mixtures as outputs: dominating pairs (README.md, "Pairs of mixtures"), mixture weights."""

from __future__ import annotations

from abc import abstractmethod
from decimal import Context, Decimal, localcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxacct.core.floats import LOST_TAIL, ROUNDOFF
from jaxacct.core.types import Leaf
from jaxacct.core.validation import NON_NEGATIVE, POSITIVE, PROBABILITY, InputError, Tracer
from jaxacct.mechanisms.additive_noise import Gaussian, profile_of_gaussian
from jaxacct.mechanisms.base import BaseMechanism, FinitePair, FinitePart, Mechanism, Part, batch_shape, register
from jaxacct.mechanisms.finite import refuse_sums, sample_pair, sums
from jaxacct.mechanisms.profile import lowered_part, pair_of_profile, stacked, stacked_parts

LOSS_OF_PRESENCE = ("add_or_remove_one", "add_one", "remove_one")
"""Relations under which a record, or a group, is present in only one of the two data sets."""
MOST_TERMS = 20_000
"""Largest number of values that the law of a count may have, such as the number of group records in a batch."""
LEAST = Decimal("1e-300")
"""The largest values of a count are left out if their total probability is below this. Bounds of delta allow for it."""
CENTRAL_QUANTILES, QUANTILES_PER_TAIL = 2000, 250
"""Numbers of points at which Gaussian tails are evaluated: within 9 sigma of the range of the means, and in each tail
from 9 to 37 sigma. The mass beyond 37 sigma is 6e-300. Pairs from so many points add about 1e-4 to epsilon."""
LEAST_RELATIVE_GAP = 1e-7
"""Smallest gap between two eps of a profile, as a share of the largest shift. Slopes over smaller gaps lose digits."""
Points = tuple[np.ndarray, np.ndarray]


class Mixture(NamedTuple):
    """The law sum_j weight_j N(mean_j, 1). Means (A,) are in standard deviations of the noise, weights (A,) are > 0."""

    mean: np.ndarray
    weight: np.ndarray


def quantiles(low: float, high: float, fineness: int = 1) -> np.ndarray:
    """Return ends of half lines, from low - 37 to high + 37, for means in [low, high]. `fineness` scales the number."""
    far = QUANTILES_PER_TAIL * fineness
    below, above = np.linspace(-37.0, -9.0, far)[:-1] + low, np.linspace(9.0, 37.0, far)[1:] + high
    return np.concatenate([below, np.linspace(low - 9.0, high + 9.0, CENTRAL_QUANTILES * fineness), above])


def half_line_points(p: Mixture, q: Mixture, u: np.ndarray, sign: float = 1.0) -> Points:
    """Return eps = log p(u)/q(u), P(L) - e^eps Q(L). L = (u, inf), or (-inf, u) if sign = -1. p/q must rise outward."""
    from scipy import special  # slow to import

    def log_tail(law: Mixture) -> np.ndarray:
        return special.logsumexp(np.log(law.weight) + special.log_ndtr(sign * (law.mean - u[:, None])), axis=1)

    def log_density(law: Mixture) -> np.ndarray:
        return special.logsumexp(np.log(law.weight) + law.mean * u[:, None] - 0.5 * law.mean**2, axis=1)

    with np.errstate(over="ignore", invalid="ignore"):
        loss = log_density(p) - log_density(q)
        gain = np.exp(log_tail(p))
        cost = np.exp(log_tail(q) + loss)
        squares = u**2 + max(np.max(p.mean**2), np.max(q.mean**2))
        # `doubt` bounds the relative error of gain and cost: 1e-12 for logarithms up to 700, each rounded by 8e-14, and
        # the rest for the rounding of terms of size u^2 and mean^2, which cancel in `cost`
        doubt = 1e-12 + 4e-15 * squares
        delta = np.maximum(gain - cost, 0.0) + doubt * (gain + cost)
    order = np.flatnonzero((loss > 0.0) & np.isfinite(loss) & ~np.isnan(delta))[:: int(sign)]
    return loss[order], np.minimum(delta[order], 1.0)


def profile_of_points(forward: Points, reverse: Points, scale: float) -> FinitePair:
    """Return a pair that dominates every pair with profiles below the points `forward` (remove) and `reverse` (add)."""
    # `scale` is the largest shift of a mean, in standard deviations
    least = LEAST_RELATIVE_GAP * scale
    # raise small eps to `least`: a profile falls, so the delta of a point also bounds delta at any larger eps
    epsilon = np.maximum(np.concatenate([forward[0], reverse[0]]), least)
    if not epsilon.size:
        return pair_of_profile(np.zeros(1), np.ones(1), np.ones(1))
    none = (np.ones(forward[0].size), np.ones(reverse[0].size))
    delta, back = np.concatenate([forward[1], none[1]]), np.concatenate([none[0], reverse[1]])
    order = np.argsort(epsilon, kind="stable")
    epsilon, delta, back = epsilon[order], delta[order], back[order]
    # each point gets the least delta up to its eps; of nearly equal eps the last is kept
    delta, back = np.minimum.accumulate(delta), np.minimum.accumulate(back)
    keep = np.append(np.diff(epsilon) > least, True)
    return pair_of_profile(epsilon[keep], delta[keep], back[keep])


def mixture_pair(shift: np.ndarray, weight: np.ndarray) -> FinitePair:
    """Return a pair that dominates (sum_j weight_j N(shift_j, 1), N(0, 1)), for shifts >= 0."""
    shift, weight = shift[weight > 0.0], weight[weight > 0.0]
    widest = float(shift.max())
    if widest == 0.0:
        return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
    p, q = Mixture(shift, weight), Mixture(np.zeros(1), np.ones(1))
    u = quantiles(0.0, widest)
    forward, reverse = half_line_points(p, q, u), half_line_points(q, p, u, -1.0)
    nothing = float(weight[shift == 0.0].sum())
    if nothing > 0.0:  # for add no loss exceeds -log(nothing), so delta is 0 at `largest`
        largest = -np.log(nothing) * (1.0 + 1e-15) + 1e-15
        keep = reverse[0] < largest
        reverse = (np.append(reverse[0][keep], largest), np.append(reverse[1][keep], 0.0))
    return profile_of_points(forward, reverse, widest)


def mixed_pair(shares: list[float], pairs: list[FinitePair]) -> FinitePair:
    """Return the pair of a step that draws pair i with probability share_i and reveals i; shares may be rounded up."""
    atoms = [np.concatenate([pair.loss for pair in pairs])]
    for law in ("p", "q"):
        atoms.append(np.concatenate([share * getattr(pair, law) for share, pair in zip(shares, pairs, strict=True)]))
    ends = [  # cut at 1, since shares that are rounded up may sum to more
        np.minimum(sum(share * getattr(pair, end) for share, pair in zip(shares, pairs, strict=True)), 1.0)
        for end in ("p_infinity", "q_infinity")
    ]
    return FinitePair(*atoms, *ends)


def revealed_pair(shift: np.ndarray, weight: np.ndarray, always: np.ndarray | None = None) -> FinitePair:
    """Return a pair with delta(log a) >= sum_{j > 0} weight_j delta_j(log a'), where a' = 1 + (a - 1)/Pr[j > 0].

    weight_j is the chance of j contributions, delta_j the delta of the Gaussian of sensitivity shift_j (README.md,
    "Groups of records"). If `always` is given, a second bound is sum_j weight_j times the delta(log a) of the Gaussian
    of sensitivity always_j. At each eps the pair takes the smaller bound.
    """
    reach = min(float(weight[1:].sum()) * (1.0 + 1e-12), 1.0)  # chance of j > 0, rounded up, which raises delta
    ways = [(shift, weight, reach)] if always is None else [(shift, weight, reach), (always, weight, 1.0)]
    laws, grids = [], [np.zeros(1)]
    z = np.concatenate([np.linspace(-1.0, 12.0, 400), np.linspace(12.0, 37.0, 80)[1:]])
    for shift, weight, reach in ways:
        some = (shift > 0.0) & (weight > 0.0)
        if not some.any():
            return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
        order = np.argsort(shift[some])
        shift, weight = shift[some][order], weight[some][order]
        laws.append((shift, weight, reach))
        for one in shift[np.unique(np.linspace(0, shift.size - 1, 12).astype(int))]:
            inner = np.concatenate([np.linspace(0.0, one, 100), one * (0.5 * one + z)])
            inner = inner[inner > 0.0]
            grids.append(inner if reach == 1.0 else np.logaddexp(np.log1p(-reach), np.log(reach) + inner))
    epsilon = np.unique(np.concatenate(grids))
    least = LEAST_RELATIVE_GAP * min(float(epsilon[-1]), float(laws[0][0][-1]))
    epsilon = epsilon[np.append(True, np.diff(epsilon) > least)]
    delta = np.ones(epsilon.size)
    for shift, weight, reach in laws:
        with np.errstate(over="ignore"):
            inner = np.where(epsilon < 600.0, np.log1p(np.expm1(epsilon) / reach), epsilon - np.log(reach))
        inner = inner * (1.0 - 1e-13)  # delta falls with eps, so rounding eps down gives an upper bound
        found = np.zeros(epsilon.size)
        for one, chance in zip(shift, weight, strict=True):
            found += chance * profile_of_gaussian(one * (1.0 + 4.0 * ROUNDOFF), inner)
        delta = np.minimum(delta, found * (1.0 + 1e-12))
    return pair_of_profile(epsilon, delta, delta)


def two_points(first: float, second: float, q: float) -> Mixture:
    law = ((mean, weight) for mean, weight in ((first, 1.0 - q), (second, q)) if weight > 0.0)
    mean, weight = zip(*law, strict=True)
    return Mixture(np.array(mean), np.array(weight))


def zero_out_points(rate: float, s: float) -> tuple[Points, Points]:
    """Return points of a profile, (forward, reverse), for zero_out (README.md, "Zero-out where the slot is kept")."""
    u = quantiles(-s, s)
    with_it, without = two_points(-s, s, rate), two_points(-s, 0.0, rate)
    forward = half_line_points(with_it, without, np.append(0.5 * s, u[u > 0.5 * s]))
    return forward, sampled_points(rate, s)


def sampled_points(q: float, shift: float) -> Points:
    """Return points (log a, H_a((1-q) N(0, 1) + q N(shift, 1) || N(0, 1))) for a >= 1."""
    nothing = Mixture(np.zeros(1), np.ones(1))
    return half_line_points(two_points(0.0, shift, q), nothing, quantiles(0.0, shift))


def replaced_gaussian(q: float, s: float) -> FinitePair:
    """Return a pair that dominates ((1-q) N(0) + q N(s), (1-q) N(0) + q N(-s)), at 8 times as many points as usual."""
    points = half_line_points(two_points(0.0, s, q), two_points(0.0, -s, q), quantiles(-s, s, 8))
    return profile_of_points(points, points, 2.0 * s)


def binomial(trials: int, chance: Decimal) -> np.ndarray:
    """Return Pr[Bin(trials, chance) = j] for j = 0, 1, ..., until less than 1e-300 of the mass is left."""
    with localcontext(Context(prec=60)):
        if chance >= 1:
            return np.eye(trials + 1)[trials]
        if chance <= 0:
            return np.ones(1)
        odds, rest = chance / (1 - chance), (1 - chance) ** trials
        terms = [rest]
        for j in range(trials):
            if terms[-1] * (trials + 1) < LEAST and j > chance * trials:
                break
            if j >= MOST_TERMS:
                raise InputError(
                    f"{float(chance * trials):.6g} contributions of one record or group in a batch are expected; "
                    f"so many are not counted; that must stay below about {MOST_TERMS}"
                )
            terms.append(terms[-1] * (trials - j) / (j + 1) * odds)
        return np.array([float(term) for term in terms])


def hypergeometric(size: int, group: int, batch: int) -> np.ndarray:
    """Return Pr[a batch, drawn from `size` records without replacement, has j of the `group` records], j = 0..group."""
    first = max(0, group + batch - size)
    last = min(group, batch)
    with localcontext(Context(prec=60)):
        terms = [Decimal(1)]
        for j in range(first, last):
            terms.append(terms[-1] * ((group - j) * (batch - j)) / ((j + 1) * (size - group - batch + j + 1)))
        total = sum(terms)
        found = np.zeros(group + 1)
        found[first : last + 1] = [float(term / total) for term in terms]
    return found


def cells_below(shift: np.ndarray, weight: np.ndarray, direction: str) -> FinitePart:
    """Return the loss law, rounded down, for an observer who sees only which grid cell contains the output."""
    kept = weight > 0.0
    shift, weight = shift[kept], weight[kept]
    edges = np.concatenate([[-np.inf], quantiles(0.0, float(shift.max())), [np.inf]])
    p, p_off = np.zeros(edges.size - 1), np.zeros(edges.size - 1)
    for one, chance in zip(shift, weight, strict=True):
        mass, off = _cell_masses(edges - one, abs(one))
        p += chance * mass
        p_off += chance * (off + 16.0 * ROUNDOFF * mass)
    p_off += ROUNDOFF * shift.size * p + float(LEAST)
    q, q_off = _cell_masses(edges, 0.0)
    if direction == "add":
        p, p_off, q, q_off = q, q_off, p, p_off
    return lowered_part(p - p_off, q + q_off)


def _cell_masses(edges: np.ndarray, moved: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the N(0, 1) masses between `edges` and their error bounds. `edges` were shifted by `moved` and rounded."""
    from scipy import special  # slow to import

    low, high = edges[:-1], edges[1:]
    upper = low > 0.0
    first = special.ndtr(np.where(upper, -low, high))
    second = special.ndtr(np.where(upper, -high, low))
    size = np.minimum(np.where(upper, np.abs(low), np.abs(high)), 40.0)
    units = 16.0 + 8.0 * size**2 + 4.0 * (size + 1.0) * moved
    return np.maximum(first - second, 0.0), ROUNDOFF * units * (first + second) + LOST_TAIL


class Branch(NamedTuple):
    """One case of a step. It has the probability `share` and the pair (sum_j weights_j N(shifts_j, 1), N(0, 1))."""

    share: float
    shifts: np.ndarray  # (A,) shifts >= 0 in standard deviations
    weights: np.ndarray  # (A,) weights, each rounded once
    doubt: float = 0.0  # relative error of `share`


class OfGaussianMixtures(Mechanism):
    """Mechanism made of mixtures of Gaussians, called branches. engines/mixture.py computes its deltas and epsilons."""

    @abstractmethod
    def branches(self, relation: str) -> list[list[Branch]] | None:
        """Return the branches of each configuration for "remove", or None if unknown. For "add" swap their two laws."""

    def of_gaussians(self) -> bool:
        """Return whether the mechanism has branches under some relation."""
        return True

    def attained(self, relation: str) -> bool:
        """Return whether the branches give the exact delta under the relation. If not, they give an upper bound."""
        return relation in LOSS_OF_PRESENCE

    def has_bracket(self) -> bool:
        return self.of_gaussians() and not self.ordinary()

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return "certified" if self._pair_is_known(relation) else self.kind_under(relation, composed)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if not self._pair_is_known(relation):
            return self.expand(relation, direction)
        laws = [cells_below(row[0].shifts, row[0].weights, direction) for row in self.branches(relation) or []]
        return [(stacked_parts(laws, batch_shape(self)), np.asarray(1.0))]

    def _pair_is_known(self, relation: str) -> bool:
        return self.has_bracket() and relation != "replace_one" and self.attained(relation)


def require_gaussian(name: str, mechanism: Any) -> None:
    """Refuse a base that is not one Gaussian. The error for several Gaussians says which one Gaussian equals them."""
    if isinstance(mechanism, Gaussian):
        return
    remedy = "give the one Gaussian of noise (sum z^-2)^(-1/2) that they are"
    if mechanism.gaussians() is None:
        remedy = "its law is not known there, so account for it without the sampling, "
        remedy += "with noise for the most that all the records together move it"
    raise InputError(f"{name} of {type(mechanism).__name__} is not supported; {remedy}")


def rows_of(mechanism: Mechanism, *fields: Any) -> list[tuple[float, ...]]:
    """Return the values of some fields, one tuple for each configuration in the flat order of the batch."""
    shape = batch_shape(mechanism)
    flat = (np.broadcast_to(np.asarray(field, np.float64), shape).reshape(-1).tolist() for field in fields)
    return list(zip(*flat, strict=True))


@register
class MixtureOfGaussians(BaseMechanism, OfGaussianMixtures):
    """Gaussian noise on a sum to which a record, or a group, contributes ``sensitivities``_i with probability p_i.

    The pair is sum_i p_i N(s_i, sigma^2), N(0, sigma^2). Sensitivities 0, 1, ..., k with binomial probabilities are a
    group of k records under Poisson sampling. If contributions are vectors, the s_i are bounds of their norms. Brackets
    are certified, and up to about 1e-4 wide in compositions with mechanisms other than Gaussians and their mixtures.
    Rényi divergences and selections use a pair that only dominates this one: kind "bound". ``replace_one`` is refused.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        sigma, in the units of the sensitivities.
    sensitivities : array_like >= 0
        s_i on the last axis; the axes before it are the batch.
    probabilities : array_like in [0, 1]
        p_i on the last axis, one for each s_i. They sum to 1 within 1e-12, and are divided by their sum.

    References
    ----------
    Choquette-Choo et al. (2024), on mixture of Gaussians mechanisms.

    >>> import jaxacct as ja
    >>> pair_of_records = ja.MixtureOfGaussians(2.0, sensitivities=[0, 1, 2], probabilities=[0.81, 0.18, 0.01])
    >>> ja.delta(pair_of_records, 0.5).kind
    'certified'
    """

    noise_multiplier: Leaf
    sensitivities: Leaf
    probabilities: Leaf
    constraints: ClassVar = {"noise_multiplier": POSITIVE, "sensitivities": NON_NEGATIVE, "probabilities": PROBABILITY}
    vectors: ClassVar = ("sensitivities", "probabilities")
    follows_relation: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [np.shape(getattr(self, name))[-1:] for name in self.vectors]
        if sizes[0] != sizes[1] or sizes[0] in ((), (0,)):
            raise InputError("sensitivities and probabilities must be vectors; give both the same number, 1 or more")
        if not isinstance(self.probabilities, Tracer):
            refuse_sums("probabilities", self.probabilities)

    def symmetric(self) -> bool:
        return False

    def part(self, rate: np.ndarray, relation: str, direction: str) -> FinitePart:
        if relation == "replace_one":
            raise InputError(
                "relation = 'replace_one' is not supported for MixtureOfGaussians; use for each step "
                "ja.Gaussian(noise_multiplier / largest sensitivity), which leaks no less"
            )
        return sample_pair(stacked([mixture_pair(*row) for row in self.rows()], batch_shape(self)), rate, direction)

    def rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the shifts (in standard deviations) and weights of every configuration, in the batch's flat order."""
        shape, size = batch_shape(self), np.shape(self.sensitivities)[-1]
        sigma = np.broadcast_to(self.noise_multiplier, shape)
        shifts = np.broadcast_to(np.asarray(self.sensitivities) / sigma[..., None], (*shape, size))
        weights = np.asarray(self.probabilities)
        weights = np.broadcast_to(weights / sums(weights)[..., None], (*shape, size))
        return list(zip(shifts.reshape(-1, size), weights.reshape(-1, size), strict=True))

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation == "replace_one":
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self.rows()]

    def attained(self, relation: str) -> bool:
        return True
