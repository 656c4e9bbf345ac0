"""The best j of K candidates, released together: `selection.select(run, k, top=j)`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import Constraint, InputError, broadcast_shape, check_one
from jaxacct.engines import backend
from jaxacct.engines.protocol import MechanismEngine, MechanismQuestion
from jaxacct.engines.protocol import register as register_engine
from jaxacct.mechanisms import Mechanism, batch_shape, repeat
from jaxacct.mechanisms.base import element, register, require_mechanism
from jaxacct.mechanisms.expression import call
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.parts import FinitePair, Part
from jaxacct.selection import top_envelope
from jaxacct.selection.adaptive import refuse_zero, upper_ends
from jaxacct.selection.base_profile import SAYS_NOTHING, place, under
from jaxacct.selection.certified_ends import pair_of
from jaxacct.selection.law_families import Law, PointMass
from jaxacct.selection.law_of_k import require_law

__all__ = ["TOP", "TopSelection"]

MOST = 16
"""Largest j: the bound for the best j needs the profiles of 1, ..., j runs."""
TOP = Constraint(f"use a whole number of candidates from 1 to {MOST}", 1, MOST, integral=True)
"""What j must be."""
LEAST_DELTA = 1e-290
"""Smallest delta that is solved for: of a smaller one the answer is the largest loss."""
SHARES = (0.7, 2.0, 4.0, 8.0)
"""The numbers k, as shares of E[K], at which the average over K is looked at from below."""
LARGEST_COUNT = 2.0**52
"""Largest of these numbers."""
PAIRS_KEPT = 8
"""Pairs of composed selections that are kept, since each direction of each question asks for the same one."""
_pairs: OrderedDict[TopSelection, FinitePair] = OrderedDict()


@register
@dataclass(frozen=True, eq=False)
class TopSelection(Mechanism):
    """Run ``mechanism`` K times, K from ``law``, and release the best ``top`` by any score, or all where K is less.

    The profile is at most min(B_j, D, 1), in each direction by itself, with B_j the envelope for the best j
    (`top_envelope`) and D the average over K of the profiles of k runs, which covers the release of all candidates.
    `ja.epsilon` and `ja.delta` of it have kind "bound": it is above the truth, and how far is not known.  It composes.

    Parameters
    ----------
    mechanism : Mechanism
        The base, one candidate.  Candidates are i.i.d. given the data.
    law : Law
        The law of K.  They broadcast.
    top : int
        j, from 2 to 16.  `select(..., top=j)` makes these objects.

    Raises
    ------
    InputError
        Another type, a `top` outside its range, or shapes that do not broadcast.

    References
    ----------
    README.md of this folder, "The best j", has the bound and its proof.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = ja.epsilon(selection.select(ja.Gaussian(3.73), selection.Geometric(0.1), top=2), 1e-5)
    >>> 1.6 < b.upper < 2.7, b.kind
    (np.True_, 'bound')
    """

    mechanism: Any
    law: Any
    top: int = field(default=2, metadata={"static": True})
    constraints: ClassVar = {}
    candidates: ClassVar[str] = "iid"
    """What is assumed of the candidates."""

    def __post_init__(self) -> None:
        require_mechanism("run", self.mechanism)
        require_law("k", self.law)
        object.__setattr__(self, "top", int(check_one("top", self.top, TOP, "j is one number for all")))
        broadcast_shape({"the mechanism": batch_shape(self.mechanism), "k": self.law.shape})

    def validated(self) -> TopSelection:
        fields = {name: getattr(self.law, name) for name in self.law.constraints}
        return TopSelection(self.mechanism.validated(), type(self.law)(**fields), self.top)

    def symmetric(self) -> bool:
        return self.mechanism.symmetric()

    def expression(self) -> str:
        return f"selection.select({self.mechanism.expression()}, {call(self.law)}, top={self.top})"

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if isinstance(self.law, PointMass) and np.all(np.asarray(self.law.repetitions) <= self.top):
            return repeat(self.mechanism, self.law.repetitions).expand(relation, direction)  # all are released
        known = _pair(TopSelection(under(self.mechanism, relation)[0], self.law, self.top))
        return [(sample_pair(known, np.asarray(1.0), direction), np.asarray(1.0))]


class BestOfMany(MechanismEngine):
    """The engine of `TopSelection`."""

    name = "top_envelope"
    classes = (TopSelection,)

    def bracket(self, question: MechanismQuestion) -> Bounds:
        quantity, chosen, values, relation, effort, *_ = question
        return _bracket(quantity, cast(TopSelection, chosen), values, relation, effort.rtol)


register_engine(BestOfMany())


def _bracket(quantity: str, chosen: TopSelection, values: np.ndarray, relation: str, rtol: float) -> Bounds:
    """The bound of a selection by itself: epsilon at deltas or delta at eps."""
    run, relation = under(chosen.mechanism, relation)
    values = np.asarray(values, np.float64)
    if quantity == "epsilon":
        shape = broadcast_shape({"the mechanism": batch_shape(run), "k": chosen.law.shape, quantity: values.shape})
        refuse_zero(run, np.broadcast_to(values, shape))
    upper = _upper(quantity, run, chosen.law, chosen.top, values, relation, rtol)
    status = np.where(np.isinf(upper) | (upper == 1.0) & (quantity == "delta"), "width", "ok")
    status = np.where(upper == 0.0, "zero", status)
    return Bounds(np.zeros(upper.shape), upper, upper, "bound", status, BestOfMany.name)


def _upper(
    quantity: str, run: Mechanism, law: Law, top: int, values: np.ndarray, relation: str, rtol: float
) -> np.ndarray:
    """Upper ends of "epsilon" or "delta"; run, law and values broadcast."""
    pairs = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape})
    shape = broadcast_shape({"the selection": pairs, quantity: values.shape})
    number = np.broadcast_to(np.arange(int(np.prod(pairs))).reshape(pairs), shape)
    wanted, found = np.broadcast_to(values, shape), np.empty(shape)
    for count, index in enumerate(np.ndindex(pairs)):
        here = number == count
        base = element(run, place(batch_shape(run), index))
        one = law.element(place(law.shape, index))
        with backend.job(1, apart=True), np.errstate(all="ignore"):  # of one selection; what is no number says nothing
            found[here] = _of_one(quantity, base, one, top, wanted[here], relation, rtol)
    return found


def _of_one(
    quantity: str, run: Mechanism, law: Law, top: int, values: np.ndarray, relation: str, rtol: float
) -> np.ndarray:
    """The least of the envelope, of what the ends of the profile say, and of the average over K."""
    most = SAYS_NOTHING[quantity]
    largest, mass = top_envelope.ends(run, law, top, relation)
    if quantity == "epsilon":
        found = top_envelope.epsilon(run, law, top, np.maximum(values, LEAST_DELTA), relation)
        found = np.where(values >= LEAST_DELTA, found, np.inf)
        found = np.where(values >= mass, np.fmin(found, largest), found)
    else:
        found = top_envelope.delta(run, law, top, values, relation)
        found = np.where(values >= largest, np.fmin(found, mass), found)
    found = np.where((found >= 0.0) & (found <= most), found, most)  # what is not a number says nothing
    due = ~_above(quantity, run, law, values, found, relation)
    if due.any():
        other = upper_ends(quantity, run, law, values[due], relation, max(rtol, 1e-3))
        found[due] = np.fmin(found[due], np.where(other >= 0.0, other, most))
    return found


def _above(quantity: str, run: Mechanism, law: Law, values: np.ndarray, found: np.ndarray, relation: str) -> np.ndarray:
    """Whether the average over K is seen to be above what was found, so that it need not be computed."""
    at, target = (found, values) if quantity == "epsilon" else (values, found)
    above = np.zeros(values.shape, bool)
    for share in SHARES:
        k = float(np.floor(np.clip(share * law.mean, 1.0, LARGEST_COUNT)))
        try:
            beyond = float(law.survival(k - 1.0))
        except InputError:  # a law whose tails are not known
            break
        open_ = np.flatnonzero(~above & np.isfinite(at))
        if open_.size:
            least = beyond * account.delta(repeat(run, k), at[open_], relation=relation).lower
            above[open_] = least > target[open_]
    return above


def _pair(chosen: TopSelection) -> FinitePair:
    """The pair of the upper ends of the profile: forward at eps >= 0 and the reverse direction."""
    if chosen not in _pairs:
        run, law, top = chosen.mechanism, chosen.law, chosen.top
        ask = lambda quantity, at, name: _upper(quantity, run, law, top, at, name, 1e-3)

        def last(relation: str) -> tuple[np.ndarray, np.ndarray]:
            shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape})
            each = np.zeros((2, *shape))
            for index in np.ndindex(shape):
                base = element(run, place(batch_shape(run), index))
                each[:, *index] = top_envelope.ends(base, law.element(place(law.shape, index)), top, relation)
            return each[0], each[1]

        _pairs[chosen] = pair_of(run, law, ask, last)
        while len(_pairs) > PAIRS_KEPT:
            _pairs.popitem(last=False)
    return _pairs[chosen]
