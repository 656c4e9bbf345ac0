"""Selections, "run K times, release the best", as mechanisms: `select` makes one, and `rounds` a sequence of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import Any, cast

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, DELTA, InputError, check_one, choice
from jaxacct.engines.protocol import MechanismEngine, MechanismQuestion
from jaxacct.engines.protocol import register as register_engine
from jaxacct.mechanisms import Mechanism, compose, repeat
from jaxacct.mechanisms.base import FinitePair, Part, register
from jaxacct.selection import profile_ends
from jaxacct.selection.adaptive import AdaptiveSelection
from jaxacct.selection.any_selection import OK_WIDTH, AnySelection, as_bounds, pair_of
from jaxacct.selection.base_profile import LEAST_DELTA, SAYS_NOTHING, meet, under
from jaxacct.selection.law_of_k import Law, PointMass, Poisson, require_law
from jaxacct.selection.named_bounds import BOUNDS, bound_delta, bound_epsilon
from jaxacct.selection.top import TOP, TopSelection
from jaxacct.selection.worst_case import bracket

CANDIDATES = ("iid", "adaptive")
WORST_CASE = "worst_case"
"""The default bound of `select`: the exact worst case."""
WIDE = 0.01
"""If the relative width of a bracket exceeds this, other bounds are evaluated as well."""
ONE_DELTA = "the cheaper mechanism is chosen for one delta"
"""Why `target_delta` and `count` of `rounds` must be single numbers: the end of the message that refuses an array."""


@register
class Selection(AnySelection):
    """Selection that draws K from ``law``, runs ``mechanism`` K times and releases the output with the highest score.

    The answers hold for every score that depends only on the candidate's own output, not on K.  Ties are allowed.
    Candidates must be i.i.d. given the data; `AdaptiveSelection` is for other candidates.  The upper end of a bracket
    is the bound of the worst-score theorem, and the lower end is what one actual score leaks.  A composition with other
    mechanisms uses a dominating pair made from upper bounds of the profile, so its answer is only a bound.

    Parameters
    ----------
    mechanism : the base, one candidate.
    law : the law of K; it broadcasts with the mechanism.
    bound : as for `select`, which makes these objects.

    References
    ----------
    README.md of this folder: "The worst score", and "What every guarantee here assumes".

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> m = selection.select(ja.Gaussian(2.0), selection.Geometric(0.1))
    >>> m.law.mean, m.mechanism
    (np.float64(10.0), Gaussian(noise_multiplier=2.0))
    """

    bound: str = field(default=WORST_CASE, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("bound", self.bound, (WORST_CASE, "auto", *BOUNDS))

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return BOUNDS[self.bound].kind if self.bound in BOUNDS else "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if self.bound != WORST_CASE:
            raise InputError(f"bound = {self.bound!r} gives no pair to compose; use bound={WORST_CASE!r}")
        return super().expand(relation, direction)

    def bracket(self, quantity: str, values: np.ndarray, relation: str, rtol: float) -> Bounds:
        if self.bound == WORST_CASE:
            return super().bracket(quantity, values, relation, rtol)
        run, relation = under(self.mechanism, relation)
        by_name = bound_epsilon if quantity == "epsilon" else bound_delta
        return by_name(run, self.law, values, bound=self.bound, relation=relation)

    def _options(self) -> str:
        return "" if self.bound == WORST_CASE else f", bound={self.bound!r}"

    def _as_composition(self) -> Mechanism | None:
        one = isinstance(self.law, PointMass) and bool(np.all(np.equal(self.law.repetitions, 1.0)))
        return self.mechanism if one else None

    def _pair(self) -> FinitePair:
        run, law = self.mechanism, self.law
        ask = lambda quantity, at, name: certified(quantity, run, law, at, name, np.inf)[1]
        return pair_of(run, law, ask, lambda name: profile_ends.last(run, law, name))

    def _answer(self, quantity: str, run: Mechanism, values: np.ndarray, relation: str, rtol: float) -> Bounds:
        low, high = certified(quantity, run, self.law, values, relation, rtol if rtol >= OK_WIDTH else 0.0)
        # a selection uses the base's whole curve, as a composition does, so its answer has the composition's kind
        return as_bounds(low, high, run.kind_under(relation, composed=True), rtol, "worst_score")


class OfSelections(MechanismEngine):
    """The engine of all selections except adaptive ones with a fixed K, which other engines answer as compositions."""

    name = "selection"
    classes = (Selection, AdaptiveSelection, TopSelection)

    def supports(self, question: MechanismQuestion) -> bool:
        return not (isinstance(question.mechanism, AdaptiveSelection) and isinstance(question.mechanism.law, PointMass))

    def bracket(self, question: MechanismQuestion) -> Bounds:
        quantity, chosen, values, relation, effort, *_ = question
        return cast(AnySelection, chosen.validated()).bracket(quantity, values, relation, effort.rtol)


register_engine(OfSelections())


def select(
    run: Mechanism, k: Law, *, bound: str = WORST_CASE, candidates: str = "iid", top: int = 1
) -> Selection | AdaptiveSelection | TopSelection:
    """Make the mechanism that draws K from the law `k`, runs `run` K times and releases the best outputs.

    candidates="iid" assumes that each candidate is drawn afresh from one law of configurations and run with fresh
    randomness.  The profile is then the worst case over all scores (`Selection`).  A list tried in order, a shuffled
    list, a sampler that keeps state, pruning and warm starts are not i.i.d., and leak more.  With "adaptive" a
    candidate may depend on all earlier outputs, and all outputs may be released (`AdaptiveSelection`).  Adaptive
    candidates cost more privacy, above all if K varies a lot.

    Parameters
    ----------
    run : the base, one candidate.
    k : the law of K; it broadcasts with the base, and each element of the batch is one selection.
    bound : "worst_case", or, for i.i.d. candidates, a bound of `selection.bound_epsilon` ("envelope", "renyi",
        "privacy_profile", "monotone_score", "auto").  A selection with one of these bounds cannot be composed.
    candidates : {"iid", "adaptive"}, the assumption about the candidates.
    top : the number of best candidates that are released, from 1 to 16; if K is smaller, all K are.  If top > 1, the
        answer is a theorem's bound (`TopSelection`).  Adaptive candidates cost the same for every `top`.

    Returns
    -------
    Selection, AdaptiveSelection or TopSelection

    References
    ----------
    README.md of this folder: "The worst score", "The best j", "Candidates that depend on each other", and "Rounds" for
    selections in sequence, `ja.repeat(selection.select(run, k), rounds)`.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = ja.epsilon(selection.select(ja.Gaussian(3.73), selection.Geometric(0.1)), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.54, 'certified')
    """
    several = check_one("top", top, TOP, "one number for all configurations") > 1
    if choice("candidates", candidates, CANDIDATES) == "iid" and not several:
        return Selection(run, k, bound)
    if bound != WORST_CASE:
        if several:
            raise InputError(f"bound = {bound!r} is for one winner; leave it out with top = {top!r}")
        raise InputError(f"bound = {bound!r} is for i.i.d. candidates; leave it out with candidates='adaptive'")
    return AdaptiveSelection(run, k) if candidates == "adaptive" else TopSelection(run, k, top)


def certified(
    quantity: str, run: Mechanism, law: Law, values: np.ndarray, relation: str, width: float = 0.0
) -> np.ndarray:
    """Return brackets (2, *shape) of "epsilon" or "delta" under the worst score. Other bounds narrow wide brackets."""
    most = SAYS_NOTHING[quantity]
    # A delta below LEAST_DELTA is replaced by LEAST_DELTA. The lower bound of epsilon there also holds at the smaller
    # delta. The upper bound need not, and is replaced by `most`.
    found = bracket(quantity, run, law, np.maximum(values, LEAST_DELTA), relation, width)
    ends = meet(found, found, most)
    known = np.broadcast_to((values >= LEAST_DELTA) | (quantity == "delta"), ends.shape[1:])
    ends[1] = np.where(known, ends[1], most)
    if (wide := _loose(*ends)).any():
        ends = profile_ends.narrowed(quantity, run, law, values, relation, ends, wide)
    # the envelope helps where delta is too small for the trade-off curve, and the Rényi bound where K is large
    for name in ("envelope", "renyi"):
        if isinstance(law, BOUNDS[name].laws) and (wide := _loose(*ends) & known).any():
            other = bound_epsilon if quantity == "epsilon" else bound_delta
            at = np.maximum(values, LEAST_DELTA) if quantity == "epsilon" else values
            above = other(run, law, at, bound=name, relation=relation).upper
            ends = np.where(wide, meet(ends, (np.zeros_like(above), above), most), ends)
    if (wide := _loose(*ends)).any():
        ends = np.where(wide, meet(ends, profile_ends.by_base(quantity, run, law, values, relation, wide), most), ends)
    return ends


def _loose(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return whether the relative width of each bracket exceeds WIDE."""
    with np.errstate(invalid="ignore"):
        return (~np.isfinite(high) | ~(high - low <= WIDE * high)) & np.isfinite(low)


def rounds(
    run: Mechanism,
    k: Law | Sequence[Law],
    count: int | None = None,
    *,
    target_delta: float,
    relation: str = "add_or_remove_one",
    top: int = 1,
) -> Mechanism:
    """Make the mechanism of several selections in sequence: in round r the best of K_r candidates is public.

    The candidates of a round are i.i.d. from one law of configurations, which may depend on the *public* winners of
    earlier rounds in any way.  Two mechanisms bound all rounds together at every delta: the composition of the rounds,
    of kind "bound", and, if all K_r are fixed or all are Poisson, `sum_r K_r` adaptive candidates.  The mechanism with
    the smaller epsilon at target_delta is returned.  The rounds leak at most as much as it does, so of its epsilon and
    delta only the upper ends are claims about the rounds.

    Parameters
    ----------
    run : one candidate.
    k : the law of every round's K_r, or the laws of the rounds.  Each K_r is a fresh, secret draw.
    count : the number of rounds, if k is one law.
    target_delta : in (0, 1).
    relation : as for `ja.epsilon`.
    top : the number of best candidates that are public in each round, as for `select`.

    Returns
    -------
    Mechanism

    References
    ----------
    README.md of this folder, "Rounds".

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> whole = selection.rounds(ja.Gaussian(3.73), selection.Geometric(0.25), 2, target_delta=1e-5)
    >>> b = ja.epsilon(whole, 1e-5)
    >>> round(float(b.upper), 2), b.kind
    (2.12, 'bound')
    """
    delta = check_one("target_delta", target_delta, DELTA, ONE_DELTA)
    number = int(check_one("count", 1 if count is None else count, COUNT, ONE_DELTA))
    if not isinstance(k, Sequence):
        require_law("k", k)
    laws = [k] * number if isinstance(k, Law) else list(k)
    if not laws or (count is None) == isinstance(k, Law):
        raise InputError("rounds are one law of K and a count, or a sequence of laws without one; give either")
    for law in laws:
        require_law("k", law)
        if law.shape:
            raise InputError(f"k has a law of shape {law.shape}; give one law of K for each round")
    each: list[Any] = [repeat(select(run, law, top=top), times) for law, times in Counter(laws).items()]
    one_by_one = each[0] if len(each) == 1 else compose(*each)
    together = _sum_of(laws)
    if together is None:
        return one_by_one
    adaptive = select(run, together, candidates="adaptive")
    costs = [account.epsilon(some, delta, relation=relation).upper for some in (one_by_one, adaptive)]
    if np.ndim(costs[0]):
        raise InputError(f"run is a batch of shape {np.shape(costs[0])}; give one mechanism")
    return adaptive if costs[1] < costs[0] else one_by_one


def _sum_of(laws: Sequence[Law]) -> Law | None:
    """Return the law of K_1 + K_2 + ... if all laws are point masses or all are Poisson; otherwise None."""
    fixed = [law for law in laws if type(law) is PointMass]
    if len(fixed) == len(laws):
        return PointMass(math.fsum(float(law.repetitions) for law in fixed))
    if all(type(law) is Poisson for law in laws):
        # The delta of adaptive candidates does not fall as the mean grows, so the rounded-up mean gives a bound.
        return Poisson(math.nextafter(math.fsum(float(law.mean) for law in laws), math.inf))
    return None
