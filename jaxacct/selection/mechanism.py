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
from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_plan import FINE, Inner
from jaxacct.mechanisms import RELATIONS, Mechanism, batch_shape
from jaxacct.mechanisms.base import register, require_mechanism
from jaxacct.mechanisms.finite import FinitePair, sample_pair
from jaxacct.mechanisms.parts import Part
from jaxacct.selection.adaptive import AdaptiveSelection, refuse_zero
from jaxacct.selection.base_profile import sides, under
from jaxacct.selection.certified_ends import OK_WIDTH, as_bounds, certified, pair
from jaxacct.selection.law_families import Law, PointMass
from jaxacct.selection.law_of_k import require_law
from jaxacct.selection.named_bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.worst_case import LARGEST_EPS, bracket, known_curves
from jaxacct.validation import DELTA, InputError, broadcast_shape, check, choice, refuse_tracers

__all__ = ["CANDIDATES", "Attack", "Selection", "attack", "select"]

CANDIDATES = ("iid", "adaptive")
"""What may be assumed of the candidates."""
WORST_CASE = "worst_case"
"""The default bound: the exact worst case."""
PAIRS_KEPT = 8
"""Pairs of composed selections that are kept, since each direction of each question asks for the same one."""
_pairs: OrderedDict[Selection, FinitePair] = OrderedDict()


@register
@dataclass(frozen=True, eq=False)
class Selection(Mechanism):
    """Run ``mechanism`` K times, K from ``law``, and release the best by any score: the worst case over scores.

    The profile is H_E(A(X) || A(X')) of README.md of this folder, "The worst score", for every score that is a total
    preorder of a candidate's own output, the same for every K.  Candidates must be i.i.d. given the data;
    `AdaptiveSelection` is for others.  `ja.epsilon` and `ja.delta` of a selection by itself are brackets: the upper end
    is the theorem's bound with all rounding, the lower end is what a genuine score order leaks.  Composed with other
    mechanisms it is the pair of the profile's upper ends on a grid, and the answer is a bound.

    Parameters
    ----------
    mechanism : Mechanism
        The base, one candidate.
    law : Law
        The law of K.  They broadcast.
    bound : str
        As for `select`, which makes these objects.

    Raises
    ------
    InputError
        Another type, an unknown bound, or shapes that do not broadcast.

    References
    ----------
    README.md of this folder: "The worst score", and "What every guarantee here assumes".

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
        require_law("k", self.law)
        broadcast_shape({"the mechanism": batch_shape(self.mechanism), "k": self.law.shape})

    def validated(self) -> Selection:
        fields = {name: getattr(self.law, name) for name in self.law.constraints}
        return Selection(self.mechanism.validated(), type(self.law)(**fields), self.bound)

    def symmetric(self) -> bool:
        return self.mechanism.symmetric()

    @property
    def kind(self) -> str:
        return BOUNDS[self.bound].kind if self.bound in BOUNDS else "bound"

    def direct(self, quantity: str, values: Any, relation: str, rtol: float) -> Bounds:
        """The bracket of a selection by itself: epsilon at deltas or delta at eps."""
        choice("relation", relation, RELATIONS)
        refuse_tracers(f"ja.{quantity}", "jaxacct.kernels.worst_score", mechanism=self)
        values = np.asarray(values)
        run, relation = under(self.mechanism, relation)
        if self.bound != WORST_CASE:
            by_name = bound_epsilon if quantity == "epsilon" else bound_delta
            return by_name(run, self.law, values, bound=self.bound, relation=relation)
        shape = broadcast_shape({"the mechanism": batch_shape(run), "k": self.law.shape, quantity: values.shape})
        if quantity == "epsilon":
            refuse_zero(run, np.broadcast_to(values, shape))
        width = rtol if rtol > OK_WIDTH else OK_WIDTH if np.prod(shape) > programs.MANY else 0.0
        low, high = certified(quantity, run, self.law, values, relation, width)
        return as_bounds(low, high, run.kind_under(relation), rtol, "worst_score")

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if self.bound != WORST_CASE:
            raise InputError(f"bound = {self.bound!r} gives no pair to compose; use bound={WORST_CASE!r}")
        if isinstance(self.law, PointMass) and np.all(np.equal(self.law.repetitions, 1.0)):
            return self.mechanism.expand(relation, direction)  # one candidate is the base itself
        known = _pair(Selection(under(self.mechanism, relation)[0], self.law))
        return [(sample_pair(known, np.asarray(1.0), direction), np.asarray(1.0))]


def select(
    run: Mechanism, k: Law, *, bound: str = WORST_CASE, candidates: str = "iid"
) -> Selection | AdaptiveSelection:
    """The mechanism that runs `run` K times, K drawn from the law `k`, and releases the best candidate.

    With candidates="iid" its privacy profile is the worst case over all scores (`Selection`), for candidates that are
    i.i.d. given the data: each is drawn afresh from one law of configurations and run with fresh randomness.  A list
    tried in order, a shuffled list, a sampler that keeps state, pruning and warm starts are not i.i.d., and leak more.
    With candidates="adaptive" a candidate may depend on all outputs before it in any way, and all of them may be
    released (`AdaptiveSelection`).  That costs more, and the more so the more K varies.

    Parameters
    ----------
    run : Mechanism
        The base, one candidate.
    k : Law
        The law of K.  They broadcast, one selection per element.
    bound : str
        "worst_case", or another bound by its name in `selection.bound_epsilon` ("envelope", "privacy_profile", "renyi",
        "monotone_score", "auto").  The others are for i.i.d. candidates.  They answer `ja.epsilon` and `ja.delta` but
        do not compose.
    candidates : {"iid", "adaptive"}
        What is assumed of the candidates.

    Returns
    -------
    Selection or AdaptiveSelection

    Raises
    ------
    InputError
        Another type, unknown names, a bound for adaptive candidates, or shapes that do not broadcast.

    References
    ----------
    README.md of this folder: "The worst score", and "Candidates that depend on each other".

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
    """The epsilon that a score order reaches, which is a lower bound of every honest answer, together with the order.

    Outcomes of the base are ranked by likelihood ratio: rank u is the Q-mass of those with a higher one.  The active
    ranks are scored above exactly the ranks in (u, served], and below everything else.

    Parameters
    ----------
    epsilon : float
    direction : {"remove", "add"}
    rank : numpy.ndarray, shape (R + 1,)
        The ends of the active intervals of ranks, from 0.
    served : numpy.ndarray, shape (R,)
        Up to which rank each interval is served; it does not increase.

    References
    ----------
    README.md of this folder, "The worst score".

    >>> found = Attack(0.6, "remove", np.array([0.0, 0.1]), np.array([0.3]))
    >>> found.epsilon, found.score([0.0, 0.05, 0.2, 0.5]).round(2).tolist()
    (0.6, [1.0, 0.25, 0.1, 0.5])
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

    The order is that of a base whose trade-off curve is just below that of `run`, so that any base with at least the
    curve of `run` reaches at least this.

    Parameters
    ----------
    run : Mechanism
    k : Law
    delta : float in (0, 1)
        One configuration of each.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one"}
    candidates : {"iid"}
        Of adaptive candidates the lower end of `ja.epsilon` is reached.

    Returns
    -------
    Attack

    Raises
    ------
    InputError
        Invalid values, batches, or adaptive candidates.

    References
    ----------
    README.md of this folder, "The worst score".

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
            order, (gain, cost) = _order(k, curve.below, np.exp(min(reached, LARGEST_EPS)))
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


def _pair(chosen: Selection) -> FinitePair:
    """The pair of the upper ends of the profile: forward at eps >= 0 and the reverse direction."""
    if chosen not in _pairs:
        _pairs[chosen] = pair(chosen.mechanism, chosen.law)
        while len(_pairs) > PAIRS_KEPT:
            _pairs.popitem(last=False)
    return _pairs[chosen]
