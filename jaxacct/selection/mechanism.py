"""`selection.select`: "run K times, release the best" as a mechanism, and `selection.attack`: its worst score."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.engines import programs
from jaxacct.engines.protocol import MechanismEngine
from jaxacct.engines.protocol import register as register_engine
from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_mesh import FINE, Inner
from jaxacct.mechanisms import RELATIONS, Mechanism, batch_shape
from jaxacct.mechanisms.base import register, require_mechanism
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.parts import FinitePair, Part
from jaxacct.selection.adaptive import AdaptiveSelection, refuse_zero
from jaxacct.selection.answers import certified, pair
from jaxacct.selection.base import sides, under
from jaxacct.selection.bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.laws import Law, PointMass
from jaxacct.selection.worst_case import HIGHEST, bracket, known_curves
from jaxacct.validation import DELTA, InputError, broadcast_shape, check, choice

__all__ = ["CANDIDATES", "Attack", "Selection", "attack", "select"]

CANDIDATES = ("iid", "adaptive")
"""What may be assumed of the candidates."""
WORST_CASE = "worst_case"
"""The default bound: the exact worst case."""
NARROW = 2e-4
"""Relative width up to which a bracket is called ok whatever rtol."""
KEPT = 8
_pairs: OrderedDict[Selection, FinitePair] = OrderedDict()


@register
@dataclass(frozen=True, eq=False)
class Selection(Mechanism):
    """Run ``mechanism`` K times, K from ``law``, and release the best by any score: the worst case over scores.

    The profile is H_E(A(X) || A(X')) of mathematics.md, section 4.1, for every score that is a total preorder of a
    candidate's own output, the same for every K.  Candidates must be i.i.d. given the data; `AdaptiveSelection` is for
    others.  `ja.epsilon` and `ja.delta` of a selection by itself are brackets:
    above the theorem's bound with all rounding, below a genuine score order.  Composed, it is the pair of the
    profile's upper ends on a grid, and the answer a bound.  What is assumed of K is in README.md of this folder.

    mechanism : a Mechanism.  law : a law of K.  They broadcast.  bound : as in `select`, which makes them.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> m = selection.select(ja.Gaussian(2.0), selection.Geometric(0.1))
    >>> m.law.mean, m.mechanism
    (np.float64(10.0), Gaussian(noise_multiplier=2.0))
    """

    mechanism: Any
    law: Any
    bound: str = field(default=WORST_CASE, metadata={"static": True})
    constraints: ClassVar = {}
    candidates: ClassVar[str] = "iid"
    """What is assumed of the candidates."""

    def __post_init__(self) -> None:
        require_mechanism("run", self.mechanism)
        choice("bound", self.bound, (WORST_CASE, "auto", *BOUNDS))
        if not isinstance(self.law, Law):
            raise InputError(f"k = {self.law!r:.40} must be a law of K; use one such as selection.Geometric(0.1)")
        broadcast_shape({"the mechanism": batch_shape(self.mechanism), "k": self.law.shape})

    def validated(self) -> Selection:
        fields = {name: getattr(self.law, name) for name in self.law.constraints}
        return Selection(self.mechanism.validated(), type(self.law)(**fields), self.bound)

    def symmetric(self) -> bool:
        return self.mechanism.symmetric()

    @property
    def kind(self) -> str:
        return BOUNDS[self.bound].kind if self.bound in BOUNDS else "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if self.bound != WORST_CASE:
            raise InputError(f"bound = {self.bound!r} gives no pair to compose; use bound={WORST_CASE!r}")
        if isinstance(self.law, PointMass) and np.all(np.equal(self.law.repetitions, 1.0)):
            return self.mechanism.expand(relation, direction)  # one candidate is the base itself
        known = _pair(Selection(under(self.mechanism, relation)[0], self.law))
        return [(sample_pair(known, np.asarray(1.0), direction), np.asarray(1.0))]


class WorstScore(MechanismEngine):
    """The engine of `Selection`: the worst score, or the bound that the selection names."""

    name = "worst_score"

    def supports(self, mechanism: Any) -> bool:
        return isinstance(mechanism, Selection)

    def epsilon(self, mechanism: Any, delta: np.ndarray, relation: str, rtol: float) -> Bounds:
        return _bracket("epsilon", mechanism, delta, relation, rtol)

    def delta(self, mechanism: Any, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
        return _bracket("delta", mechanism, epsilon, relation, rtol)


register_engine(WorstScore())


def select(
    run: Mechanism, k: Law, *, bound: str = WORST_CASE, candidates: str = "iid"
) -> Selection | AdaptiveSelection:
    """The mechanism that runs `run` K times, K drawn from the law `k`, and releases the best candidate.

    With candidates = "iid" its privacy profile is the worst case over all scores (`Selection`), for candidates that
    are i.i.d. given the data: each is drawn afresh from one law of configurations and run with fresh randomness.  A
    list tried in order, a shuffled list, a sampler that keeps state, pruning and warm starts are not: they leak more.
    With "adaptive" candidates may depend on all outputs before in any way, and all of them may be released
    (`AdaptiveSelection`), which costs more and more the more K varies.

    Other bounds, by their names in `selection.bound_epsilon` ("envelope", "privacy_profile", "renyi",
    "monotone_score", "auto"), are for i.i.d. candidates, and answer `ja.epsilon` and `ja.delta` but do not compose.

    run : a Mechanism.  k : a law of K.  They broadcast, one selection per element.  InputError otherwise.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = ja.epsilon(selection.select(ja.Gaussian(3.73), selection.Geometric(0.1)), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.54, 'certified')
    """
    if choice("candidates", candidates, CANDIDATES) == "iid":
        return Selection(run, k, bound)
    if bound != WORST_CASE:
        raise InputError(f"bound = {bound!r} is for i.i.d. candidates; leave it out with candidates='adaptive'")
    return AdaptiveSelection(run, k)


class Attack(float):
    """The epsilon that a score order reaches, a lower bound of every honest answer, with the order.

    Outcomes of the base are ranked by likelihood ratio: rank u is the Q-mass of those with a higher one.  ``rank``
    (R + 1,) are the ends of the active intervals of ranks, from 0; of them ``served`` (R,), non-increasing, are
    scored above exactly the ranks in (u, served], and below everything else.  ``direction`` is "remove" or "add".
    """

    direction: str
    rank: np.ndarray
    served: np.ndarray

    def __new__(cls, epsilon: float, direction: str, rank: np.ndarray, served: np.ndarray) -> Attack:
        self = super().__new__(cls, epsilon)
        self.direction, self.rank, self.served = direction, rank, served
        return self

    @property
    def epsilon(self) -> float:
        """The number itself."""
        return float(self)

    def score(self, rank: Any) -> np.ndarray:
        """Scores in [0, 1] of outcomes by their rank u in [0, 1]; of two candidates the larger score wins.

        Outcomes with dQ = 0 have rank 0 and come before all others.
        """
        u = np.asarray(rank, np.float64)
        active = u < self.rank[-1]
        # time runs through the Q-mass: an active outcome is served when the inactive ranks up to `served` are
        row = np.clip(np.searchsorted(self.rank, u, side="right") - 1, 0, self.served.size - 1)
        below = self.served[row] - u
        # an inactive outcome of rank w comes after the active ones that are served before it
        rows = np.searchsorted(-self.served, -u, side="right")
        before = self.rank[-1] - self.rank[np.minimum(rows, self.served.size)]
        first = self.served[-1]
        inactive = np.where(u <= first, first - u, u - self.rank[-1] + before)
        return np.where(u == 0.0, 1.0, np.where(active, below, inactive))


def attack(
    run: Mechanism, k: Law, *, delta: float, relation: str = "add_or_remove_one", candidates: str = "iid"
) -> Attack:
    """The worst score at `delta`, and the epsilon that it reaches: no honest answer for the selection is below it.

    run, k, delta : one configuration.  candidates : "iid"; of adaptive ones the lower end of `ja.epsilon` is reached.
    The order is that of a base whose trade-off curve is just below that of `run`, so that any base with at least the
    curve of `run` reaches at least this.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> found = selection.attack(ja.Gaussian(3.73), selection.Geometric(0.1), delta=1e-5)
    >>> round(found, 3)
    1.54
    """
    if choice("candidates", candidates, CANDIDATES) != "iid":
        raise InputError(
            "candidates = 'adaptive' has no worst order of scores: candidates that carry their history reach the lower "
            "end of ja.epsilon(select(..., candidates='adaptive'), delta); use that"
        )
    chosen = Selection(run, k)
    target = float(np.asarray(check("delta", delta, DELTA)))
    if batch_shape(chosen):
        raise InputError(
            f"an attack is on one selection, not on a batch of shape {batch_shape(chosen)}; take an element"
        )
    best: Attack | None = None
    run, relation = under(run, relation)
    curves = known_curves(run)[0]
    for side in sides(run, relation):
        curve, direction = curves[side.direction], side.direction
        reached = float(bracket("epsilon", run, k, target, side.forward, math.inf)[0])
        with jax.enable_x64():
            order, (gain, cost) = _order(k, curve.below, np.exp(min(reached, HIGHEST)))
            gain, cost = float(gain), float(cost)
        count = int(np.sum(np.asarray(order.active)))
        epsilon = max(math.log((gain - target) / cost), 0.0) if gain > target and cost > 0.0 else 0.0
        found = Attack(epsilon, direction, np.asarray(order.row_q)[: count + 1], np.asarray(order.served_q)[:count])
        best = found if best is None or found > best else best
    assert best is not None
    return best


@jax.jit
def _order(law: Law, below: Inner, ratio: Any) -> Any:
    """The best order at E = ratio, and the gain and cost that it attains."""
    order = worst_score.best_order(law.generating, below, ratio, FINE)
    return order, worst_score.attained(law.generating, below, order)


def _bracket(quantity: str, chosen: Selection, values: np.ndarray, relation: str, rtol: float) -> Bounds:
    """The bracket of a selection by itself: epsilon at deltas or delta at eps."""
    choice("relation", relation, RELATIONS)
    run, relation = under(chosen.mechanism, relation)
    if chosen.bound != WORST_CASE:
        by_name = bound_epsilon if quantity == "epsilon" else bound_delta
        return by_name(run, chosen.law, values, bound=chosen.bound, relation=relation)
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": chosen.law.shape, quantity: values.shape})
    if quantity == "epsilon":
        refuse_zero(run, np.broadcast_to(values, shape))
    width = rtol if rtol > NARROW else NARROW if np.prod(shape) > programs.MANY else 0.0
    low, high = certified(quantity, run, chosen.law, values, relation, width)
    kind = run.kind_under(relation)
    if kind != "certified":
        low = np.zeros_like(low)
    with np.errstate(invalid="ignore"):
        narrow = (low == high) | np.isfinite(high) & (high - low <= max(rtol, NARROW) * np.maximum(high, 1e-300))
    status = np.where(high == 0.0, "zero", np.where(np.isinf(low), "mass_at_infinity", np.where(narrow, "ok", "width")))
    return Bounds(low, high, high, kind, status, "worst_score")


def _pair(chosen: Selection) -> FinitePair:
    """The pair of the upper ends of the profile: forward at eps >= 0 and the reverse direction."""
    if chosen not in _pairs:
        _pairs[chosen] = pair(chosen.mechanism, chosen.law)
        while len(_pairs) > KEPT:
            _pairs.popitem(last=False)
    return _pairs[chosen]
