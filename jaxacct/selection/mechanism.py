"""`selection.select`: "run K times, release the best" as a mechanism."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, broadcast_shape, check_one, choice
from jaxacct.engines.protocol import MechanismEngine, MechanismQuestion
from jaxacct.engines.protocol import register as register_engine
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import register, require_mechanism
from jaxacct.mechanisms.expression import call
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.parts import FinitePair, Part
from jaxacct.selection.adaptive import AdaptiveSelection, refuse_zero
from jaxacct.selection.base_profile import under
from jaxacct.selection.certified_ends import OK_WIDTH, as_bounds, certified, pair
from jaxacct.selection.law_families import Law, PointMass
from jaxacct.selection.law_of_k import require_law
from jaxacct.selection.named_bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.top import TOP, TopSelection

__all__ = ["CANDIDATES", "Selection", "select"]

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

    def expression(self) -> str:
        bound = "" if self.bound == WORST_CASE else f", bound={self.bound!r}"
        return f"selection.select({self.mechanism.expression()}, {call(self.law)}{bound})"

    def kind_under(self, relation: str, composed: bool = False) -> str:
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
    classes = (Selection,)

    def bracket(self, question: MechanismQuestion) -> Bounds:
        quantity, chosen, values, relation, effort, *_ = question
        return _bracket(quantity, cast(Selection, chosen), values, relation, effort.rtol)


register_engine(WorstScore())


def select(
    run: Mechanism, k: Law, *, bound: str = WORST_CASE, candidates: str = "iid", top: int = 1
) -> Selection | AdaptiveSelection | TopSelection:
    """The mechanism that runs `run` K times, K drawn from the law `k`, and releases the best candidate or candidates.

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
    top : int
        How many of the best are released, from 1 to 16; all of them where K is less.  Above 1 the answer is a theorem's
        bound (`TopSelection`).  Adaptive candidates cost the same whatever is released of them.

    Returns
    -------
    Selection, AdaptiveSelection or TopSelection

    Raises
    ------
    InputError
        Another type, unknown names, a bound for adaptive candidates or for several winners, a `top` outside its range,
        or shapes that do not broadcast.

    References
    ----------
    README.md of this folder: "The worst score", "The best j", "Candidates that depend on each other", and "Rounds" for
    rounds that follow each other, `ja.repeat(selection.select(run, k), rounds)`.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = ja.epsilon(selection.select(ja.Gaussian(3.73), selection.Geometric(0.1)), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.54, 'certified')
    """
    several = check_one("top", top, TOP, "j is one number for all") > 1
    if choice("candidates", candidates, CANDIDATES) == "iid" and not several:
        return Selection(run, k, bound)
    if bound != WORST_CASE:
        if several:
            raise InputError(f"bound = {bound!r} is for one winner; leave it out with top = {top!r}")
        raise InputError(f"bound = {bound!r} is for i.i.d. candidates; leave it out with candidates='adaptive'")
    return AdaptiveSelection(run, k) if candidates == "adaptive" else TopSelection(run, k, top)


def _bracket(quantity: str, chosen: Selection, values: np.ndarray, relation: str, rtol: float) -> Bounds:
    """The bracket of a selection by itself: epsilon at deltas or delta at eps."""
    run, relation = under(chosen.mechanism, relation)
    if chosen.bound != WORST_CASE:
        by_name = bound_epsilon if quantity == "epsilon" else bound_delta
        return by_name(run, chosen.law, values, bound=chosen.bound, relation=relation)
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": chosen.law.shape, quantity: values.shape})
    if quantity == "epsilon":
        refuse_zero(run, np.broadcast_to(values, shape))
    width = rtol if rtol >= OK_WIDTH else 0.0
    low, high = certified(quantity, run, chosen.law, values, relation, width)
    # a selection uses all of the curve, as a composition does
    return as_bounds(low, high, run.kind_under(relation, composed=True), rtol, "worst_score")


def _pair(chosen: Selection) -> FinitePair:
    """The pair of the upper ends of the profile: forward at eps >= 0 and the reverse direction."""
    if chosen not in _pairs:
        _pairs[chosen] = pair(chosen.mechanism, chosen.law)
        while len(_pairs) > PAIRS_KEPT:
            _pairs.popitem(last=False)
    return _pairs[chosen]
