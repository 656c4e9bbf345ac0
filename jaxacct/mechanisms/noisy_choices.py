"""Mechanisms that choose with noise: the exponential mechanism, noisy maxima, and queries above a threshold."""

from __future__ import annotations

from dataclasses import field
from fractions import Fraction
from typing import ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, NON_NEGATIVE, POSITIVE, check_flag, choice
from jaxacct.mechanisms.additive_noise import Laplace, gaussian_pair, laplace_pair
from jaxacct.mechanisms.base import (
    SENSITIVITY,
    BaseMechanism,
    FinitePair,
    GaussianPart,
    LaplacePart,
    Mechanism,
    Part,
    register,
)
from jaxacct.mechanisms.combinators import repeat
from jaxacct.mechanisms.finite import ApproximateDP, FiniteMechanism, OfFinitePair, PureDP, sample_pair
from jaxacct.mechanisms.profile import stacked

LOSS_CELLS = 1024
"""Number of cells of a bounded-range mechanism's loss grid; this grid raises epsilon by about a millionth."""


@register
class ExponentialMechanism(FiniteMechanism):
    """The exponential mechanism, Pr[r] proportional to e^{epsilon u(r)/(2 D)}, with D the sensitivity of u.

    D is the most by which a score moves under the neighbouring relation of the question; if all scores move the same
    way, D/2 may replace D. The log ratios lie in [t - epsilon, t] for some t. At the worst t the delta is

        delta(s) = (e^{epsilon/2} - e^{s/2})^2/(e^epsilon - 1),   -epsilon <= s <= epsilon.

    This is tight for one step. Adaptive compositions leak no more; ``kind`` is "bound" (README.md, "Bounded range").

    Parameters
    ----------
    epsilon : array_like >= 0, finite

    References
    ----------
    McSherry, Talwar (2007), Mechanism Design via Differential Privacy.
    Durfee, Rogers (2019), Practical Differentially Private Top-k Selection with Pay-what-you-get Composition.
    Dong, Durfee, Rogers (2020), Optimal Differential Privacy Composition for Exponential Mechanisms.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.repeat(ja.ExponentialMechanism(0.1), 100), 1e-6)
    >>> b.kind, round(float(b.upper), 3), round(float(ja.epsilon(ja.repeat(ja.PureDP(0.1), 100), 1e-6).upper), 3)
    ('bound', 2.612, 4.775)
    """

    epsilon: Leaf
    constraints: ClassVar = {"epsilon": NON_NEGATIVE}

    def pair(self) -> FinitePair:
        return _bounded_range_pair(np.asarray(self.epsilon, np.float64))


@register
class ReportNoisyMax(FiniteMechanism):
    """Report which candidate has the largest score after adding noise to each.

    The noise has the scale 2D/epsilon, or D/epsilon if all scores move the same way. D is the most by which a score
    moves under the neighbouring relation. "gumbel" noise gives the law of ExponentialMechanism. For "laplace" and for
    "exponential" noise (permute and flip), the pair of Laplace noise of scale 1/epsilon dominates the mechanism, for
    any number of candidates (README.md, "Noisy maxima"). The values of the scores must not be released. ``kind`` is
    "bound".

    Parameters
    ----------
    epsilon : array_like >= 0, finite
    noise : {"laplace", "exponential", "gumbel"}

    References
    ----------
    Dwork, Roth (2014), The Algorithmic Foundations of Differential Privacy, Section 3.3.
    McKenna, Sheldon (2020), Permute-and-Flip: A New Mechanism for Differentially Private Selection.
    Ding et al. (2021), on permute and flip as report noisy max with exponential noise.

    >>> import jaxacct as ja
    >>> round(float(ja.epsilon(ja.ReportNoisyMax(0.5, noise="exponential"), 0.0).upper), 6)
    0.5
    """

    epsilon: Leaf
    noise: str = field(default="laplace", metadata={"static": True})
    constraints: ClassVar = {"epsilon": NON_NEGATIVE}

    def __post_init__(self) -> None:
        choice("noise", self.noise, ("laplace", "exponential", "gumbel"))
        super().__post_init__()

    def pair(self) -> FinitePair:
        epsilon = np.asarray(self.epsilon, np.float64)
        return _bounded_range_pair(epsilon) if self.noise == "gumbel" else laplace_pair(epsilon)

    def part(self, rate: np.ndarray, relation: str, direction: str) -> Part:
        if self.noise == "gumbel":
            return super().part(rate, relation, direction)
        epsilon = np.asarray(self.epsilon, np.float64)
        noisy = epsilon > 0.0
        scale = np.nextafter(1.0 / np.where(noisy, epsilon, 1.0), 0.0)  # rounded down, since less noise protects less
        return LaplacePart(scale, np.where(noisy, rate, 0.0))


@register
class GaussianNoisyMax(BaseMechanism):
    """Report which of ``candidates`` has the largest score after adding Gaussian noise to each.

    Let D = 2, or D = 1 for ``monotone`` scores; ``replace_one`` doubles D. Let delta_D be the delta of the Gaussian
    mechanism with this noise and sensitivity D. For m candidates delta(eps) is at most m delta_D(eps), and at most
    delta_S(eps) with S = D (floor(m/2) ceil(m/2)/m)^1/2 (README.md, "Noisy maxima"). The smaller bound at each eps is
    taken; ``kind`` is "bound".

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise, divided by the largest move of a score under add/remove.
    candidates : array_like of whole numbers >= 1
    monotone : bool
        Whether all scores rise, or all fall, with a record.

    References
    ----------
    Koskela, Redberg, Wang (2024), Privacy Profiles for Private Selection, Theorem 3.2.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.GaussianNoisyMax(10.0, candidates=100), 1.0)
    >>> b.kind, bool(b.upper >= 100 * ja.delta(ja.Gaussian(5.0), 1.0).lower)
    ('bound', True)
    """

    noise_multiplier: Leaf
    candidates: Leaf
    monotone: bool = field(default=False, metadata={"static": True})
    constraints: ClassVar = {"noise_multiplier": POSITIVE, "candidates": COUNT}
    follows_relation: ClassVar = True

    def __post_init__(self) -> None:
        check_flag("monotone", self.monotone, "say whether all scores move alike")
        super().__post_init__()

    def finite_pair(self, relation: str) -> FinitePair:
        several, differences = self._shifts(relation)
        many = np.broadcast_to(self.candidates, several.shape)
        rows = zip(several.ravel(), many.ravel(), differences.ravel(), strict=True)
        return stacked([gaussian_pair(*row) for row in rows], several.shape)

    def part(self, rate: np.ndarray, relation: str, direction: str) -> Part:
        several, differences = self._shifts(relation)
        if np.all((differences > 0.0) & (differences <= several)):
            return GaussianPart(1.0 / differences, rate)
        return sample_pair(self.finite_pair(relation), rate, direction)

    def _shifts(self, relation: str) -> tuple[np.ndarray, np.ndarray]:
        """Return two sensitivities, in sigma: of the difference of two scores, and of the vector of all differences."""
        moves = (2.0 if relation == "replace_one" else 1.0) * (1.0 if self.monotone else 2.0)
        sigma, many = np.broadcast_arrays(np.asarray(self.noise_multiplier, np.float64), self.candidates)
        both = np.floor(0.5 * many) * np.ceil(0.5 * many)
        return moves / sigma, moves / sigma * np.sqrt(both / many) * (1.0 + 4.0 * ROUNDOFF)


def _bounded_range_pair(epsilon: np.ndarray) -> FinitePair:
    """Return the pair of `ExponentialMechanism`: an inner loss l has mass e^{l/2} tanh(step/4)/sinh(epsilon/2)."""
    place = np.arange(LOSS_CELLS + 1) / LOSS_CELLS
    step = 2.0 * epsilon / LOSS_CELLS
    # `height` is e^{epsilon/2} tanh(step/4)/sinh(epsilon/2), computed without overflow
    positive = np.where(epsilon > 0.0, epsilon, 1.0)
    height = np.where(epsilon > 0.0, 2.0 * np.tanh(0.25 * step) / -np.expm1(-positive), 1.0 / LOSS_CELLS)
    ends = np.where((place == 0.0) | (place == 1.0), 0.5, 1.0)
    p = ends * height[..., None] * np.exp(-epsilon[..., None] * (1.0 - place))
    zero = np.zeros(epsilon.shape)
    return FinitePair(epsilon[..., None] * (2.0 * place - 1.0), p, p[..., ::-1], zero, zero)


@register
class AboveThreshold(OfFinitePair):
    """Say of each query in a stream whether it is above a noisy threshold. Stop after ``answers`` queries above it.

    Laplace noise is drawn once for the threshold, and anew for each query. However many queries are below the
    threshold, the answers are epsilon-DP with epsilon = 1/threshold_scale + 2 answers/query_scale. The factor 2 is left
    out if the queries are ``monotone``. Under ``replace_one`` a query moves up to twice as far, and ``monotone`` has no
    effect. ``kind`` is "bound".

    Parameters
    ----------
    threshold_scale, query_scale : array_like > 0, finite
        Scales of the noise, divided by the largest move of a query under add/remove. All fields broadcast.
    answers : array_like of whole numbers >= 1
    monotone : bool
        Whether all queries rise, or all fall, with a record.

    References
    ----------
    Lyu, Su, Li (2017), Understanding the Sparse Vector Technique for Differential Privacy, Theorems 2 and 5
    (Algorithm 7). Dwork, Roth (2014), The Algorithmic Foundations of Differential Privacy, Section 3.6.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.AboveThreshold(threshold_scale=4.0, query_scale=8.0), 0.0)
    >>> b.kind, round(float(b.upper), 9)
    ('bound', 0.5)
    """

    threshold_scale: Leaf
    query_scale: Leaf
    answers: Leaf = 1
    monotone: bool = field(default=False, metadata={"static": True})
    constraints: ClassVar = {"threshold_scale": POSITIVE, "query_scale": POSITIVE, "answers": COUNT}
    follows_relation: ClassVar = True

    def __post_init__(self) -> None:
        check_flag("monotone", self.monotone, "say whether all queries move alike")
        super().__post_init__()

    def finite_pair(self, relation: str) -> FinitePair:
        twice = 1.0 if self.monotone and relation != "replace_one" else 2.0
        threshold, query = np.asarray(self.threshold_scale), np.asarray(self.query_scale)
        epsilon = SENSITIVITY[relation] * (1.0 / threshold + twice * np.asarray(self.answers) / query)
        return PureDP(epsilon).pair()


@register
class NumericSparse(Mechanism):
    """AboveThreshold that also releases the value of each query found above the threshold, with fresh Laplace noise.

    It counts as `AboveThreshold` composed with ``answers`` Laplace mechanisms, since concurrent composition leaks no
    more than composition one after the other. If it is sampled, all its releases share a sample. ``kind`` is "bound".

    Parameters
    ----------
    threshold_scale, query_scale, answers, monotone
        As in AboveThreshold.
    value_scale : array_like > 0, finite
        Scale of the noise on a released value, divided by the largest move of a query under add/remove.

    References
    ----------
    Lyu, Su, Li (2017), Understanding the Sparse Vector Technique for Differential Privacy.
    Vadhan, Zhang (2023), Concurrent Composition Theorems for Differential Privacy.

    >>> import jaxacct as ja
    >>> sparse = ja.NumericSparse(threshold_scale=10.0, query_scale=100.0, value_scale=50.0, answers=5)
    >>> round(float(ja.epsilon(sparse, 0.0).upper), 9)  # 1/10 + 2 * 5/100 + 5/50
    0.3
    """

    threshold_scale: Leaf
    query_scale: Leaf
    value_scale: Leaf
    answers: Leaf = 1
    monotone: bool = field(default=False, metadata={"static": True})
    constraints: ClassVar = {**AboveThreshold.constraints, "value_scale": POSITIVE}
    follows_relation: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._finding()

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        value = Laplace(self.value_scale).part(np.asarray(1.0), relation, direction)
        return [*self._finding().expand(relation, direction), (value, np.asarray(self.answers))]

    def symmetric(self) -> bool:
        return True

    def _finding(self) -> AboveThreshold:
        return AboveThreshold(self.threshold_scale, self.query_scale, self.answers, self.monotone)


@register
class PartitionSelection(Mechanism):
    """Release keys (partitions) of a table of counts, alone or with noisy counts. The keys need not be public.

    A record adds at most 1 to the count of a key, for at most ``contributions`` keys. Whether a key is released, and
    with which noisy count, is decided for each key by itself. If a record is added or removed, this decision is
    (epsilon, delta)-DP. A key with count 0 is never released. `jaxacct.samplers` has two such rules. The release counts
    as a composition of k (epsilon, delta)-DP mechanisms. k is ``contributions``, doubled under ``replace_one``, since
    the record leaves some keys and enters others. ``kind`` is "bound". At deltas below 1 - (1 - delta)^k epsilon is
    infinite.

    Parameters
    ----------
    epsilon : array_like >= 0, finite
    delta : array_like in [0, 1)
        Guarantee for one key. All fields broadcast.
    contributions : array_like of whole numbers >= 1

    References
    ----------
    Desfontaines, Voss, Gipson, Mandayam (2022), Differentially private partition selection.
    Korolova et al. (2009), Releasing Search Queries and Clicks Privately.

    >>> import jaxacct as ja
    >>> keys = ja.PartitionSelection(epsilon=0.1, delta=1e-8, contributions=20)
    >>> round(float(ja.epsilon(keys, 1e-6).upper), 3)
    1.793
    """

    epsilon: Leaf
    delta: Leaf
    contributions: Leaf = 1
    constraints: ClassVar = {**ApproximateDP.constraints, "contributions": COUNT}
    follows_relation: ClassVar = True

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        one = ApproximateDP(self.epsilon, self.delta).part(np.asarray(1.0), relation, direction)
        return [(one, self._keys(relation))]

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        keys = repeat(ApproximateDP(self.epsilon, self.delta), self._keys(relation))
        return keys.infinity_exactly(relation, direction)

    def _keys(self, relation: str) -> np.ndarray:
        """Return the largest number of keys whose decisions one record can change."""
        return np.asarray(SENSITIVITY[relation] * np.asarray(self.contributions))

    def symmetric(self) -> bool:
        return True
