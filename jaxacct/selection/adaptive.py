"""A selection among candidates that may depend on each other: `sum_k Pr[K=k] delta_k`, exact for the class."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import UnboundedLossError, broadcast_shape
from jaxacct.engines.protocol import MechanismEngine, MechanismQuestion
from jaxacct.engines.protocol import register as register_engine
from jaxacct.mechanisms import Mechanism, batch_shape, repeat
from jaxacct.mechanisms.base import element, register, require_mechanism
from jaxacct.mechanisms.expression import call
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.parts import FinitePair, Part
from jaxacct.mechanisms.profile import pair_of_profile, stacked
from jaxacct.selection import profile_ends
from jaxacct.selection.base_profile import sides, under
from jaxacct.selection.certified_ends import as_bounds
from jaxacct.selection.law_families import Law, PointMass, largest_k
from jaxacct.selection.law_of_k import require_law
from jaxacct.selection.mixture_over_k import Mixture
from jaxacct.selection.probabilities_of_k import weights

__all__ = ["AdaptiveSelection", "refuse_zero", "upper_ends"]

TAIL_SHARE = 1e-7
"""Probability of the numbers of K that are not listed, as a share of delta: it widens the bracket by no more."""
COMPOSED_POINTS = 160
"""Values of eps at which the profile is taken when the selection is composed with other mechanisms."""
LAST_DELTA = 1e-13
"""The profile that is composed ends where delta has fallen to this."""
LEAST_DELTA = 1e-290
"""Smallest positive delta that is solved for: for a smaller one its upper end is the largest loss."""
PAIRS_KEPT = 8
"""Pairs of composed selections that are kept, since each direction of each question asks for the same one."""
_pairs: OrderedDict[AdaptiveSelection, FinitePair] = OrderedDict()


@register
@dataclass(frozen=True, eq=False)
class AdaptiveSelection(Mechanism):
    """Run K candidates, each free to depend on the outputs of those before, and release any or all of them.

        delta(eps) = sum_k Pr[K = k] delta_k(eps)

    in each direction by itself, where delta_k is the profile of ``mechanism`` composed k times; nothing is released at
    k = 0.  Candidate k may be chosen after seeing all earlier outputs, K and public randomness, as long as
    ``mechanism`` dominates each.  K is independent of the data and need not be secret.  The sum is the exact supremum
    of that class, so that `ja.epsilon` and `ja.delta` of it are brackets of kind "certified".  Composed with other
    mechanisms it is the pair of the profile's upper ends on a grid, kind "bound".  With K fixed it is the k-fold
    composition itself.

    Parameters
    ----------
    mechanism : Mechanism
        One candidate.
    law : Law
        The law of K.  They broadcast.  `select(..., candidates="adaptive")` makes these objects.

    Raises
    ------
    InputError
        Another type, or shapes that do not broadcast.

    References
    ----------
    README.md of this folder, "Candidates that depend on each other", has the theorem and the proof.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> m = selection.select(ja.Gaussian(3.73), selection.Poisson(10.0), candidates="adaptive")
    >>> b = ja.epsilon(m, 1e-5)
    >>> round(float(b.upper), 2), b.kind
    (4.27, 'certified')
    """

    mechanism: Any
    law: Any
    constraints: ClassVar = {}
    candidates: ClassVar[str] = "adaptive"
    """What is assumed of the candidates."""

    def __post_init__(self) -> None:
        require_mechanism("run", self.mechanism)
        require_law("k", self.law)
        broadcast_shape({"the mechanism": batch_shape(self.mechanism), "k": self.law.shape})

    def validated(self) -> AdaptiveSelection:
        fields = {name: getattr(self.law, name) for name in self.law.constraints}
        return AdaptiveSelection(self.mechanism.validated(), type(self.law)(**fields))

    def symmetric(self) -> bool:
        return self.mechanism.symmetric()

    def expression(self) -> str:
        return f'selection.select({self.mechanism.expression()}, {call(self.law)}, candidates="adaptive")'

    def kind_under(self, relation: str, composed: bool = False) -> str:
        if not self.fixed:
            return "bound"
        several = bool(np.any(np.asarray(self.law.repetitions) > 1.0))
        return self.mechanism.kind_under(relation, composed or several)

    @property
    def fixed(self) -> bool:
        """Whether K is always the same number."""
        return isinstance(self.law, PointMass)

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if self.fixed:
            return repeat(self.mechanism, self.law.repetitions).expand(relation, direction)
        pair = _pair(AdaptiveSelection(under(self.mechanism, relation)[0], self.law))
        return [(sample_pair(pair, np.asarray(1.0), direction), np.asarray(1.0))]


class AdaptiveMixture(MechanismEngine):
    """The engine of `AdaptiveSelection`; with K fixed that is a composition, whose parts are asked."""

    name = "adaptive_mixture"
    classes = (AdaptiveSelection,)

    def supports(self, question: MechanismQuestion) -> bool:
        return not cast(AdaptiveSelection, question.mechanism).fixed

    def bracket(self, question: MechanismQuestion) -> Bounds:
        quantity, chosen, values, relation, effort, *_ = question
        return _bracket(quantity, cast(AdaptiveSelection, chosen), values, relation, effort.rtol)


register_engine(AdaptiveMixture())


def _bracket(quantity: str, chosen: AdaptiveSelection, values: np.ndarray, relation: str, rtol: float) -> Bounds:
    """The bracket of a selection by itself: epsilon at deltas or delta at eps."""
    run, relation = under(chosen.mechanism, relation)
    values = np.asarray(values, np.float64)
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": chosen.law.shape, quantity: values.shape})
    values = np.broadcast_to(values, shape)
    if quantity == "epsilon":
        refuse_zero(run, values)
    ends = np.zeros((2, *shape))
    for index in np.ndindex(shape):
        base, law = _element(run, index), chosen.law.element(_inside(index, chosen.law.shape))
        solve = _epsilon if quantity == "epsilon" else _delta
        ends[:, *index] = solve(base, law, float(values[index]), relation, rtol)
    return as_bounds(ends[0], ends[1], run.kind_under(relation, composed=True), rtol, "adaptive_mixture")


def refuse_zero(run: Mechanism, delta: np.ndarray) -> None:
    """InputError where delta is 0 and the loss of the base is unbounded."""
    bad = (delta == 0.0) & ~(profile_ends.bounded(run) if (delta == 0.0).any() else True)
    if bad.any():
        raise UnboundedLossError(bad, "a selection of runs")


def _epsilon(run: Mechanism, law: Law, delta: float, relation: str, rtol: float) -> tuple[float, float]:
    """(lower, upper) of epsilon of one selection: the larger of its directions."""
    if delta < LEAST_DELTA:
        bounded = bool(np.all(profile_ends.bounded(run)))
        low, high = _without_delta(run, law, relation) if bounded else (0.0, np.inf)
        return (low, high) if delta == 0.0 else (_epsilon(run, law, LEAST_DELTA, relation, rtol)[0], high)
    listed = weights(law, TAIL_SHARE * delta)
    each = [Mixture(run, listed, side.forward, rtol).epsilon(delta) for side in sides(run, relation)]
    return max(low for low, _ in each), max(high for _, high in each)


def _delta(run: Mechanism, law: Law, eps: float, relation: str, rtol: float) -> tuple[float, float]:
    """(lower, upper) of delta of one selection.

    More numbers k are listed until the probability of those left out is small against delta itself.
    """
    ends = (0.0, 1.0)
    for tail in (1e-12, 1e-40, 1e-150, LEAST_DELTA):
        listed = weights(law, tail)
        each = [Mixture(run, listed, side.forward, rtol).at(eps, 0.5 * rtol) for side in sides(run, relation)]
        ends = max(found.low for found in each), max(found.high for found in each)
        if listed.above + listed.below <= 0.1 * rtol * ends[1]:
            break
    return ends


def upper_ends(quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, rtol: float) -> np.ndarray:
    """Upper ends of "epsilon" at several deltas, or of "delta" at several eps >= 0, for one base and one law.

    Several eps share the numbers k at which the profiles are computed, so that the ends hold but may be wider.
    """
    if quantity == "epsilon":
        return np.array([_epsilon(run, law, float(x), relation, rtol)[1] for x in values])
    if values.size < 3:
        return np.array([_delta(run, law, float(x), relation, rtol)[1] for x in values])
    most = np.zeros(values.shape)
    listed = weights(law, LAST_DELTA * TAIL_SHARE)
    for side in sides(run, relation):
        mixture = Mixture(run, listed, side.forward, rtol)
        for eps in np.quantile(values, [0.05, 0.25, 0.5]):
            mixture.at(float(eps), rtol)  # places more nodes
        most = np.maximum(most, [found.high for found in mixture.sums(values)])
    return most


def _without_delta(run: Mechanism, law: Law, relation: str) -> tuple[float, float]:
    """(lower, upper) of epsilon at a delta of (nearly) 0, for a base of bounded loss: that of the largest K."""
    most = largest_k(law)
    if not np.isfinite(most):
        one = account.epsilon(run, 0.0, relation=relation)
        return (np.inf, np.inf) if one.lower > 0.0 else (0.0, 0.0 if one.upper == 0.0 else np.inf)
    if not most >= 1.0:
        return 0.0, 0.0
    found = account.epsilon(repeat(run, most), 0.0, relation=relation)
    return float(found.lower), float(found.upper)


def _pair(chosen: AdaptiveSelection) -> FinitePair:
    """The pair of the upper ends of the profile: forward at eps >= 0 and the reverse direction."""
    if chosen not in _pairs:
        run, law = chosen.mechanism, chosen.law
        shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape})
        rows = []
        for index in np.ndindex(shape):
            rows.append(_row(_element(run, index), law.element(_inside(index, law.shape))))
        _pairs[chosen] = stacked([pair_of_profile(*row) for row in rows], shape)
        while len(_pairs) > PAIRS_KEPT:
            _pairs.popitem(last=False)
    return _pairs[chosen]


def _row(run: Mechanism, law: Law) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(eps, upper ends of delta, those of the reverse direction) of one selection."""
    listed = weights(law, 1e-3 * LAST_DELTA)
    both = sides(run, "add_or_remove_one")
    each = {name: Mixture(run, listed, name, 1e-3) for name in dict.fromkeys((both[0].forward, both[-1].forward))}
    last = 1e-3
    for mixture in each.values():
        level = min(LAST_DELTA + 2.0 * mixture.at_infinity()[1], 0.5)
        high = mixture.epsilon(level)[1]
        last = max(last, high if np.isfinite(high) else 1.0)
    grid = np.linspace(0.0, 1.0, COMPOSED_POINTS) * last
    for mixture in each.values():
        for eps in grid[[8, 40, 80]]:
            mixture.at(float(eps), 1e-3)  # places more nodes
    upper = {name: np.array([found.high for found in mixture.sums(grid)]) for name, mixture in each.items()}
    return grid, upper[both[0].forward], upper[both[-1].forward]


def _element(run: Mechanism, index: tuple[int, ...]) -> Mechanism:
    """The base at one index of a shape that its batch broadcasts to."""
    return element(run, _inside(index, batch_shape(run)))


def _inside(index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index in an array of the given shape, which broadcasts to a batch, of an index of that batch."""
    return tuple(0 if n == 1 else i for i, n in zip(index[len(index) - len(shape) :], shape, strict=True))
