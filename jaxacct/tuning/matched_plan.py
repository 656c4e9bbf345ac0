"""MatchedPlan: candidates that differ in what affects privacy, each with noise of its own, within one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, Constraint, InputError, check, check_one
from jaxacct.mechanisms import Mechanism, dp_sgd
from jaxacct.selection import Law, candidates_profile, select
from jaxacct.training.plan import Plan, Segment
from jaxacct.tuning.subset_accounting import least_noise

__all__ = ["MatchedPlan", "drawn_or_any", "matched_noise", "settings_grid"]

_RULES = {"target_epsilon": POSITIVE, "target_delta": DELTA, "dataset_size": COUNT}
_RATE = Constraint("use a sampling probability above 0 and at most 1", 0, 1, lower_open=True)
MIXTURE_POINTS = 200
"""Values of eps through which the mixture of the candidates' profiles is taken."""
LAST_DELTA_SHARE = 1e-4
"""The points end where delta is this share of the target delta; what is left counts as mass at infinity."""
FEW_CANDIDATES = 10.0
"""E[K] from which on the points end further down: the mass at infinity of a selection is up to E[K] times theirs."""


@dataclass(frozen=True, eq=False)
class MatchedPlan:
    """Plans that differ in sampling probability and length, for a `tune` that searches over these as well.

    The candidates are the product of the sampling probabilities with the epochs or steps.  Each has the least noise for
    one (epsilon, target_delta) that all share.  Which of them is trained is drawn with equal probabilities, apart from
    the space and the data, and released with the winner.  The tuning is accounted for by the exact worst case over
    scores of the mixture of their profiles.  The shared epsilon is solved for, so that all K runs meet the target.

    The solved plan has `plans`, a Plan for each candidate, rates first, its noise in ``plans[i].noise_multiplier``;
    `epsilon`, Bounds of kind "bound" for adding or removing one record; and `mechanism`, one candidate, drawn.

    Parameters
    ----------
    target_epsilon : float > 0
    target_delta : float in (0, 1)
    dataset_size : int
        Number of records n, which is public.
    repetitions : Law
        One law of K.
    sampling_probability : array_like in (0, 1]
        One or several.
    epochs, steps : array_like > 0, array_like of whole numbers
        One of the two, one or several values.

    Raises
    ------
    InputError
        Invalid values, and targets that no noise meets.

    References
    ----------
    Koskela and Kulkarni (2023), section 4 and Lemma 1, with profiles in place of Rényi divergences; README.md of this
    folder, "Candidates that differ in privacy".

    >>> from jaxacct import selection
    >>> plan = MatchedPlan(8.0, 1e-5, 1000, selection.PointMass(2), sampling_probability=1.0, steps=[1, 4])
    >>> [one.steps for one in plan.plans], bool(plan.epsilon.upper <= 8.0), plan.epsilon.kind
    ([1, 4], True, 'bound')
    """

    target_epsilon: Any
    target_delta: Any
    dataset_size: Any
    repetitions: Law
    sampling_probability: Any = None
    epochs: Any = None
    steps: Any = None
    plans: tuple[Plan, ...] = field(init=False, repr=False)
    epsilon: Bounds = field(init=False)
    mechanism: Mechanism = field(init=False, repr=False)
    relation: ClassVar[str] = "add_or_remove_one"

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            vars(self)[name] = check_one(name, getattr(self, name), rule, "a plan is for one tuning")
        if not isinstance(self.repetitions, Law) or self.repetitions.shape:
            raise InputError("repetitions must be one law of K; use one such as selection.Geometric(0.1)")
        rate, steps = settings_grid(self.sampling_probability, self.epochs, self.steps)
        known: dict[float, tuple[np.ndarray, Mechanism, Bounds]] = {}

        def upper(x: float) -> float:
            noise = matched_noise(x, self.target_delta, rate, steps)
            if np.isnan(noise).any():
                return np.inf
            runs = [dp_sgd(*row) for row in zip(noise, rate, steps, strict=True)]
            one = drawn_or_any(runs, self.target_delta, True, float(self.repetitions.mean))
            found = account.epsilon(select(one, self.repetitions), self.target_delta)
            known[x] = noise, one, found
            return float(found.upper)

        x = least_noise(upper, self.target_epsilon, 1.5 / self.target_epsilon)
        noise, one, found = known[x]
        plans = tuple(self._plan(*row) for row in zip(rate, steps, noise, strict=True))
        # the mixture is known through upper ends: nothing is certified from below
        claimed = Bounds(0.0, found.upper, found.upper, "bound", found.status, found.engine)
        vars(self).update(plans=plans, mechanism=one, epsilon=claimed if len(plans) > 1 else found)

    def _repr_html_(self) -> str:
        goal = [("target epsilon", repr(self.target_epsilon)), ("target delta", repr(self.target_delta))]
        known = [("dataset size", f"{self.dataset_size:,}"), ("repetitions", repr(self.repetitions))]
        shown, rest = markup.cut(len(self.plans))
        noise = [
            (f"candidate {row}", f"q = {one.sampling_probability!r}, T = {one.steps}, sigma = {one.noise_multiplier!r}")
            for row, one in enumerate(self.plans[: len(shown)])
        ]
        return markup.fields("MatchedPlan", [("epsilon", f"{self.epsilon:.6g}"), *goal, *known, *noise], rest)

    def _plan(self, rate: float, steps: float, noise: float) -> Plan:
        segment = Segment(0, int(steps), float(noise), float(rate), float(rate) * self.dataset_size)
        return Plan.of([segment], target_delta=self.target_delta, dataset_size=self.dataset_size)


def settings_grid(rate: Any, epochs: Any, steps: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rates and steps of all candidates, as flat arrays."""
    if rate is None or (epochs is None) == (steps is None):
        raise InputError("sampling_probability and one of epochs and steps are needed; give exactly these")
    rates = np.atleast_1d(check("sampling_probability", rate, _RATE))[:, None]
    if steps is None:
        count = np.ceil(np.atleast_1d(check("epochs", epochs, POSITIVE)) / rates * (1.0 - 1e-12))
    else:
        count = np.broadcast_to(np.atleast_1d(check("steps", steps, COUNT)), (rates.size, np.size(steps)))
    return np.broadcast_to(rates, count.shape).ravel(), np.maximum(count, 1.0).ravel()


def matched_noise(x: float, delta: float, rate: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Noise multipliers of the candidates.

    Of a single candidate it is x itself.  Otherwise each has the least noise with which it is (1/x, delta)-DP.
    """
    if rate.size == 1:
        return np.array([x])
    return np.asarray(calibrate_noise_multiplier(1.0 / x, delta, rate, steps).value)


def drawn_or_any(runs: Sequence[Mechanism], delta: float, drawn: bool, candidates: float = 1.0) -> Mechanism:
    """One guarantee for runs that differ: the mean of the profiles if drawn at random, else the maximum.

    candidates : E[K] of the selection that it is for, which multiplies the mass at infinity.
    """
    if len(runs) == 1:
        return runs[0]
    left = max(delta * LAST_DELTA_SHARE / max(candidates / FEW_CANDIDATES, 1.0), 1e-300)
    top = max(float(account.epsilon(run, left, rtol=0.01).upper) for run in runs)
    grid = np.linspace(0.0, top, MIXTURE_POINTS)
    return candidates_profile(runs, grid, np.full(len(runs), 1.0 / len(runs)) if drawn else None)
