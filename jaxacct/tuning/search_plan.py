"""SearchPlan: one noise for a whole search, in rounds, of adaptive candidates or with several winners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, InputError, check_one, choice
from jaxacct.mechanisms import Mechanism, dp_sgd
from jaxacct.selection import Law
from jaxacct.selection.mechanism import CANDIDATES
from jaxacct.selection.top import TOP
from jaxacct.training.plan import Plan, Segment
from jaxacct.tuning.matched_plan import settings_grid
from jaxacct.tuning.private_score import Whole, whole
from jaxacct.tuning.subset_accounting import least_noise
from jaxacct.tuning.subset_plan import guessed_noise

__all__ = ["SearchPlan"]

_RULES = {"target_epsilon": POSITIVE, "target_delta": DELTA, "dataset_size": COUNT, "rounds": COUNT, "top": TOP}


@dataclass(frozen=True, eq=False)
class SearchPlan:
    """The least noise for a whole search: rounds whose winners are public, adaptive candidates, or several winners.

    The solved plan has `plans`, the one Plan of a candidate, its noise in ``plans[0].noise_multiplier``; `epsilon`,
    Bounds of the whole; and `mechanism`, one candidate.

    Parameters
    ----------
    target_epsilon : float > 0
    target_delta : float in (0, 1)
    dataset_size : int
        Number of records n, which is public.
    repetitions : Law
        One law of K; of every round a fresh draw.
    sampling_probability : float in (0, 1]
    epochs, steps : float > 0, int
        One of the two.
    rounds : int
        For `tune_in_rounds`; 1 for `tune`.
    top : int
        How many of the best are released, in every round.
    candidates : {"iid", "adaptive"}
        What the candidates of a round are taken for.

    Raises
    ------
    InputError
        Invalid values, and targets that no noise meets.

    References
    ----------
    jaxacct/selection/README.md, "Rounds", "The best j" and "Candidates that depend on each other".

    >>> from jaxacct import selection
    >>> plan = SearchPlan(4.0, 1e-5, 1000, selection.PointMass(4), 1.0, steps=2, candidates="adaptive")
    >>> bool(plan.epsilon.upper <= 4.0), plan.plans[0].steps
    (True, 2)
    """

    target_epsilon: Any
    target_delta: Any
    dataset_size: Any
    repetitions: Law
    sampling_probability: Any
    epochs: Any = None
    steps: Any = None
    rounds: Any = 1
    top: Any = 1
    candidates: str = "iid"
    plans: tuple[Plan, ...] = field(init=False, repr=False)
    epsilon: Bounds = field(init=False)
    mechanism: Mechanism = field(init=False, repr=False)
    relation: ClassVar[str] = "add_or_remove_one"

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            number = check_one(name, getattr(self, name), rule, "a plan is for one tuning")
            vars(self)[name] = int(number) if name in ("dataset_size", "rounds", "top") else number
        if not isinstance(self.repetitions, Law) or self.repetitions.shape:
            raise InputError("repetitions must be one law of K; use one such as selection.Geometric(0.1)")
        choice("candidates", self.candidates, CANDIDATES)
        rates, counts = settings_grid(self.sampling_probability, self.epochs, self.steps)
        if rates.size != 1:
            raise InputError("sampling_probability and epochs or steps must be one number each; use a MatchedPlan")
        rate, steps = float(rates[0]), float(counts[0])
        known: dict[float, Whole] = {}

        def upper(sigma: float) -> float:
            known[sigma] = self._cost(dp_sgd(sigma, rate, steps))
            return float(known[sigma].epsilon.upper)

        near = guessed_noise(self.target_epsilon, self.target_delta, rate, steps)
        sigma = least_noise(upper, self.target_epsilon, near * float(np.sqrt(self.rounds)))
        segment = Segment(0, int(steps), sigma, rate, rate * self.dataset_size)
        plan = Plan.of([segment], target_delta=self.target_delta, dataset_size=self.dataset_size)
        vars(self).update(plans=(plan,), mechanism=known[sigma].candidate, epsilon=known[sigma].epsilon)

    def _cost(self, run: Mechanism) -> Whole:
        law, delta = self.repetitions, self.target_delta
        more = {"candidates": self.candidates, "top": self.top, "count": self.rounds}
        return whole(run, law, None, delta, self.relation, **more)
