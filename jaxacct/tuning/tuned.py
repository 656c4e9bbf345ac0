"""What a tuning releases, and what is checked before it begins: its cost against the target, its data, its score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, InputError, check, choice
from jaxacct.mechanisms import Mechanism
from jaxacct.selection import Law
from jaxacct.selection.mechanism import CANDIDATES
from jaxacct.training.plan import Plan
from jaxacct.tuning.adaptive_search import Adaptive
from jaxacct.tuning.best_candidate import rank
from jaxacct.tuning.candidate_runs import Winner
from jaxacct.tuning.keys_and_ledger import Secret
from jaxacct.tuning.padding import fits
from jaxacct.tuning.private_score import PrivateScore, Whole, noise_for_score, noisy, units, whole
from jaxacct.tuning.search_spaces import draws_alike

__all__ = ["Prepared", "Tuned", "law_of", "taken_for", "value_of"]


@dataclass(frozen=True, eq=False)
class Tuned:
    """What a tuning releases, all of it covered by `epsilon`.

    Parameters
    ----------
    params : pytree
        Of the winner.
    config : dict
        The hyper-parameters of the winner.
    score : float
        By which it won; NaN with status "none".
    status : {"tuned", "none"}
        "none" where K was 0 or a candidate wins that raised an exception (all did, or all others are NaN): params are
        first parameters and config is a configuration that no data enter.
    epsilon : Bounds
        Of the whole at the plan's delta.
    mechanism : Mechanism
        The whole, as it is in the ledger.
    plan : Plan, optional
        By which the winner was trained; None of `tune_with`.
    candidates : {"iid", "iid, declared", "adaptive"}
        What the claim takes the candidates for: "iid" of the library's spaces, "iid, declared" where that is the user's
        word.
    winners : tuple of Winner
        All that are released: the best `top`, best first; of `tune_in_rounds` those of the first round, then those of
        the second, and so on.  Empty with status "none".

    >>> import jaxacct as ja
    >>> run = ja.Gaussian(2.0)
    >>> Tuned(0.0, {"rate": 0.1}, 0.9, "tuned", ja.epsilon(run, 1e-5), run).config
    {'rate': 0.1}
    """

    params: Any
    config: dict[str, Any]
    score: float
    status: str
    epsilon: Bounds = field(repr=False)
    mechanism: Mechanism = field(repr=False)
    plan: Plan | None = field(repr=False, default=None)
    candidates: str = "iid"
    winners: tuple[Winner, ...] = field(repr=False, default=())


@dataclass(frozen=True)
class Prepared:
    """A tuning that may begin: its plans, its score with its noise, what it costs and what its candidates are."""

    plans: Sequence[Plan]
    score: Any
    cost: Whole
    word: str

    @classmethod
    def of(
        cls,
        plan: Any,
        law: Law,
        space: Any,
        candidates: str | None,
        score: Any,
        data: Any,
        top: int,
        count: int,
    ) -> Self:
        """Checked: InputError where the whole, `count` selections of the best `top`, exceeds the plan's target."""
        planned = getattr(plan, "candidates", "iid")
        kind, word = taken_for(candidates or ("adaptive" if planned == "adaptive" else None), space)
        score = _with_noise(score, plan, kind, top, count)
        as_planned = (top, count) == (getattr(plan, "top", 1), getattr(plan, "rounds", 1))
        known = plan.epsilon if as_planned else None
        cost = whole(plan.mechanism, law, score, plan.target_delta, plan.relation, known, kind, planned, top, count)
        if plan.target_epsilon is not None and not cost.epsilon.upper <= plan.target_epsilon:
            raise InputError(_too_much(float(cost.epsilon.upper), plan.target_epsilon, kind != planned, as_planned))
        if not isinstance(score, PrivateScore) and not callable(score):
            raise InputError("score must be a function of params on public data, or a tuning.PrivateScore")
        sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)}
        if sizes != {(plan.dataset_size,)}:
            raise InputError(
                f"data has first axes {sorted(sizes)}, must be ({plan.dataset_size},); make the plan for them"
            )
        return cls(getattr(plan, "plans", (plan,)), score, cost, word)

    def released(self, winners: Sequence[Winner], nothing: Winner) -> Tuned:
        """The winners, of which the one with the best score comes first in the fields."""
        order = [rank(one.score, number) for number, one in enumerate(winners)]
        best = winners[order.index(max(order))] if winners else nothing
        status = "tuned" if winners else "none"
        cost = self.cost
        fields = (best.params, best.config, best.score, status, cost.epsilon, cost.mechanism, best.plan, self.word)
        return Tuned(*fields, winners=tuple(winners))


def law_of(plan: Any, space: Any, pad: int | None) -> Law:
    """The law of K of a plan, checked against the padding."""
    law = plan.repetitions
    if not isinstance(law, Law):
        raise InputError("plan has no repetitions; make it with repetitions=law, so that its noise covers all K runs")
    if pad is not None and isinstance(space, Adaptive):
        raise InputError(
            f"pad = {pad!r} is for a secret K; leave it out, since an Adaptive search pays for a public one"
        )
    if pad is not None:
        fits(law, int(check("pad", pad, COUNT)))
    return law


def taken_for(declared: str | None, space: Any) -> tuple[str, str]:
    """("iid" or "adaptive", the same with "declared" where it is the user's word)."""
    known = draws_alike(space)
    if isinstance(space, Adaptive) and declared == "iid":
        raise InputError(
            "candidates = 'iid' is not so of an Adaptive search; leave it out, or use candidates='adaptive'"
        )
    if declared is None:
        return ("iid", "iid") if known else ("adaptive", "adaptive")
    kind = choice("candidates", declared, CANDIDATES)
    return kind, "iid, declared" if kind == "iid" and not known else kind


def _too_much(cost: float, target: float, unplanned: bool, as_planned: bool) -> str:
    """The error line: what the whole costs, and what would help."""
    if unplanned:
        return (
            f"candidates = 'adaptive' cost epsilon {cost:.6g} with this plan, above the plan's target {target:.6g}; "
            "make the plan with candidates='adaptive', or declare candidates='iid' if all draws of the space are "
            "independent and from one law"
        )
    if not as_planned:
        return (
            f"the whole costs epsilon {cost:.6g}, above the plan's target {target:.6g}; make a tuning.SearchPlan with "
            "these rounds and winners, which solves for their noise"
        )
    return (
        f"the whole with its private score costs epsilon {cost:.6g}, above the plan's target "
        f"{target:.6g}; make the plan for a lower target, or give the score more noise"
    )


def _with_noise(score: Any, plan: Any, kind: str, top: int, count: int) -> Any:
    """The score; a private one with its noise found where it was left out."""
    if not isinstance(score, PrivateScore) or score.noise_multiplier is not None:
        return score
    if top > 1 or count > 1:
        raise InputError("noise_multiplier of the score is missing; give it for several winners or rounds")
    if plan.target_epsilon is None:
        raise InputError("noise_multiplier of the score is missing; give it, or make the plan with a target_epsilon")
    found = noise_for_score(plan.repetitions, plan.target_epsilon, plan.target_delta, plan.relation, kind)
    return replace(score, noise_multiplier=found)


def value_of(score: Any, secret: Secret) -> Callable[[Any, int], float]:
    """(params, number) -> the score of a candidate."""
    if not isinstance(score, PrivateScore):
        return lambda params, _: float(score(params))
    held = jax.tree.map(jax.numpy.asarray, score.data)
    count = jax.jit(lambda params: units(score.value, params, held, score.unit))
    return lambda params, number: noisy(count(params), secret.key(b"score", number), score.noise_multiplier, score.unit)
