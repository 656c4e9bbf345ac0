"""Plans of whole tunings: each plan finds the noise at which the whole search for the winner meets its target."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
from jaxacct.calibration.search import least_private
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike, Leaf, Numbers
from jaxacct.core.validation import COUNT, NON_NEGATIVE, POSITIVE, Constraint, InputError, check, check_one, choice
from jaxacct.mechanisms import Mechanism, PrivacyProfile, dp_sgd
from jaxacct.selection import Law, bound_delta, bound_epsilon, candidates_profile, select
from jaxacct.selection.base_profile import upper_delta
from jaxacct.selection.mechanism import CANDIDATES
from jaxacct.selection.subset_privacy import RELATIONS, VARIANTS, product
from jaxacct.selection.top import TOP
from jaxacct.selection.worst_case import bracket
from jaxacct.training.plan import Plan, Segment
from jaxacct.training.plan.solver import RULES
from jaxacct.tuning.private_score import Whole, whole

TUNING_POINTS = 112
"""Number of points of a selection's profile (epsilon, delta): twice as many would lower epsilon by less than 0.1 %."""
LAST_DELTA_SHARE = 1e-4
"""The last delta of a profile is this share of the target delta.  It counts as the chance of an infinite loss."""
LEAST_NOISE, LARGEST_NOISE = 1e-2, 1e5
"""Range of the noise multipliers that are searched."""
ABOVE_ZERO = Constraint("use a number above 0 and at most 1", 0, 1, lower_open=True)


@dataclass(frozen=True)
class Cost:
    """Gradient evaluations of "draw K, train K candidates", and of the final run if there is one.

    Given K, the number of evaluations, averaged over the draw of the sample, is ``K E' q n + E n_2``: each candidate
    has q n records for E' epochs, and the final run has n_2 records for E epochs.  n_2 is (1 - q) n for split "rest",
    n for "all" and 0 for "everything".  A run of DP-SGD has `sampling_probability * steps` epochs.  The *actual* cost
    would reveal K: it is noted nowhere.  Its mean and quantiles depend on the law of K alone and may be published.

    Parameters
    ----------
    law, dataset_size : one law of K, and the number of records n.
    epochs : E > 0, the epochs of the final run; for "everything", the epochs of the candidates.
    split : "everything": candidates train on all data, and there is no other run.  "rest" or "all": candidates
        train on a sample, and the final run trains on the rest of the data, or on all data.
    share : q in (0, 1], the sample's share of the data; 1 for "everything".
    tuning_epochs : E' > 0, the epochs of a candidate, by default E; their mean if candidates have different epochs.

    References
    ----------
    Koskela and Kulkarni (2023), section 3.4.

    >>> from jaxacct import selection
    >>> cost = Cost(selection.Poisson(15), 60_000, 40, "rest", 0.1)
    >>> cost.expected, float(cost.quantile(0.95)), Cost(selection.Poisson(15), 60_000, 40).expected / cost.expected
    (5760000.0, 7440000.0, 6.25)
    """

    law: Law
    dataset_size: Leaf
    epochs: Leaf
    split: str = "everything"
    share: Leaf = 1.0
    tuning_epochs: Leaf = None

    def __post_init__(self) -> None:
        if not isinstance(self.law, Law) or self.law.shape:
            raise InputError("law must be one law of K, not a batch; use one such as selection.Poisson(15)")
        choice("split", self.split, ("everything", "rest", "all"))
        rules = {"dataset_size": COUNT, "epochs": POSITIVE, "share": ABOVE_ZERO, "tuning_epochs": POSITIVE}
        for name, rule in rules.items():
            if (value := getattr(self, name)) is not None:
                vars(self)[name] = float(check_one(name, value, rule, "a cost is of one tuning"))
        if self.tuning_epochs is None:
            vars(self)["tuning_epochs"] = self.epochs
        if self.split == "everything" and self.share != 1.0:
            raise InputError(f"share = {self.share!r} must be 1 for split 'everything'; use split='rest' or 'all'")

    @property
    def candidate(self) -> float:
        """Gradient evaluations of one candidate, in expectation over its batches."""
        return self.tuning_epochs * self.share * self.dataset_size

    @property
    def final(self) -> float:
        """Gradient evaluations of the final run."""
        records = {"everything": 0.0, "rest": 1.0 - self.share, "all": 1.0}[self.split]
        return self.epochs * records * self.dataset_size

    def of(self, candidates: ArrayLike) -> Numbers:
        """Return the number of gradient evaluations of a tuning with a given number of candidates."""
        return np.asarray(check("candidates", candidates, NON_NEGATIVE))[()] * self.candidate + self.final

    @property
    def expected(self) -> float:
        """Expected number of gradient evaluations, over K."""
        return float(self.law.mean) * self.candidate + self.final

    def quantile(self, p: ArrayLike) -> Numbers:
        """Return the p-quantile of the number of gradient evaluations, where K is random and p is in [0, 1)."""
        return self.of(self.law.quantile(np.asarray(p)))


@dataclass(frozen=True, eq=False)
class MatchedPlan:
    """The plan of a tuning whose candidates differ in sampling probability and length, besides their configurations.

    Each pair of a sampling probability and a length has a plan.  All plans have the same epsilon, the largest at which
    the whole tuning meets the target.  Each has the least noise with which a run is (epsilon, target_delta)-DP.
    Each candidate draws its plan with equal probabilities, independently of the space and the data, and the winner's
    plan is released.  The solved plan has `plans`: first those of all lengths at the first sampling probability, then
    at the second.  Its `epsilon` is a Bounds for adding or removing one record; with several plans its kind is "bound".
    Its `mechanism` draws a plan and trains one candidate.

    Parameters
    ----------
    target_epsilon, target_delta : the target of the whole tuning; target_epsilon is > 0, target_delta in (0, 1).
    dataset_size, repetitions : the number of records n, which is public, and one law of K, the number of candidates.
    sampling_probability, epochs, steps : one or several rates in (0, 1], and lengths: give either epochs or steps.

    References
    ----------
    Koskela and Kulkarni (2023), section 4 and Lemma 1, with profiles in place of Rényi divergences; README.md of this
    folder, "Candidates that differ in privacy".

    >>> from jaxacct import selection
    >>> plan = MatchedPlan(8.0, 1e-5, 1000, selection.PointMass(2), sampling_probability=1.0, steps=[1, 4])
    >>> [one.steps for one in plan.plans], bool(plan.epsilon.upper <= 8.0), plan.epsilon.kind
    ([1, 4], True, 'bound')
    """

    target_epsilon: Leaf
    target_delta: Leaf
    dataset_size: Leaf
    repetitions: Law
    sampling_probability: Leaf = None
    epochs: Leaf = None
    steps: Leaf = None
    plans: tuple[Plan, ...] = field(init=False, repr=False)
    epsilon: Bounds = field(init=False)
    mechanism: Mechanism = field(init=False, repr=False)
    relation: ClassVar[str] = "add_or_remove_one"

    def __post_init__(self) -> None:
        rate, steps = _checked(self)

        @functools.cache
        def solved(x: float) -> tuple[float, Any]:
            noise = _matched_noise(x, self.target_delta, rate, steps)
            if np.isnan(noise).any():
                return math.inf, None
            runs = [dp_sgd(*row) for row in zip(noise, rate, steps, strict=True)]
            one = _drawn_or_any(runs, self.target_delta, True, float(self.repetitions.mean))
            found = account.epsilon(select(one, self.repetitions), self.target_delta)
            return float(found.upper), (noise, one, found)

        x = least_noise(lambda x: solved(x)[0], self.target_epsilon, 1.5 / self.target_epsilon)
        noise, one, found = solved(x)[1]
        plans = tuple(plan_of(self, *row) for row in zip(rate, steps, noise, strict=True))
        vars(self).update(plans=plans, mechanism=one, epsilon=found)

    def _repr_html_(self) -> str:
        known = [("dataset size", f"{self.dataset_size:,}"), ("repetitions", repr(self.repetitions))]
        each = (
            f"q = {one.sampling_probability!r}, T = {one.steps}, sigma = {one.noise_multiplier!r}" for one in self.plans
        )
        return _shown(self, known, list(each))


@dataclass(frozen=True, eq=False)
class SearchPlan:
    """A plan with the least noise for a whole search: in rounds, with adaptive candidates, or with several winners.

    The solved plan has `plans`, with the one Plan that every candidate runs, `epsilon`, the Bounds of the whole search,
    and `mechanism`, the training of one candidate.

    Parameters
    ----------
    target_epsilon, target_delta, dataset_size, repetitions, sampling_probability, epochs, steps : as for `MatchedPlan`,
        with one sampling probability and one length.  Each round has a fresh draw of K.
    rounds : number of rounds of `tune_in_rounds`; 1 for `tune`.
    top : number of the best candidates that are released, in every round.
    candidates : "iid" or "adaptive", the assumption about the candidates of a round.

    References
    ----------
    jaxacct/selection/README.md, "Rounds", "The best j" and "Candidates that depend on each other".

    >>> from jaxacct import selection
    >>> plan = SearchPlan(4.0, 1e-5, 1000, selection.PointMass(4), 1.0, steps=2, candidates="adaptive")
    >>> bool(plan.epsilon.upper <= 4.0), plan.plans[0].steps
    (True, 2)
    """

    target_epsilon: Leaf
    target_delta: Leaf
    dataset_size: Leaf
    repetitions: Law
    sampling_probability: Leaf
    epochs: Leaf = None
    steps: Leaf = None
    rounds: Leaf = 1
    top: Leaf = 1
    candidates: str = "iid"
    plans: tuple[Plan, ...] = field(init=False, repr=False)
    epsilon: Bounds = field(init=False)
    mechanism: Mechanism = field(init=False, repr=False)
    relation: ClassVar[str] = "add_or_remove_one"

    def __post_init__(self) -> None:
        choice("candidates", self.candidates, CANDIDATES)
        rates, counts = _checked(self, rounds=COUNT, top=TOP)
        vars(self)["top"] = int(self.top)
        if rates.size != 1:
            raise InputError("sampling_probability and epochs or steps must be one number each; use a MatchedPlan")
        rate, steps = float(rates[0]), float(counts[0])
        more = {"candidates": self.candidates, "top": self.top, "count": self.rounds}

        @functools.cache
        def solved(sigma: float) -> Whole:
            run = dp_sgd(sigma, rate, steps)
            return whole(run, self.repetitions, None, self.target_delta, self.relation, **more)

        near = guessed_noise(self.target_epsilon, self.target_delta, rate, steps) * float(np.sqrt(self.rounds))
        sigma = least_noise(lambda sigma: float(solved(sigma).epsilon.upper), self.target_epsilon, near)
        found = solved(sigma)
        plans = (plan_of(self, rate, steps, sigma),)
        vars(self).update(plans=plans, mechanism=found.candidate, epsilon=found.epsilon)


@dataclass(frozen=True)
class Setting:
    """Settings of a way to run DP-SGD: rate, steps, and the noise multipliers of candidates and of the final run."""

    sampling_probability: float
    steps: int
    tuning_noise: float
    final_noise: float

    @property
    def epochs(self) -> float:
        """Number of passes that a run makes over its records."""
        return self.sampling_probability * self.steps


@dataclass(frozen=True, eq=False)
class SubsetPlan:
    """A plan to tune on a Poisson sample X_1 of the data X and to train the winner's configuration once.

    Every record is in X_1 with probability `share`, secretly.  K is drawn from `repetitions`, secretly, and K
    candidates are trained on X_1 by DP-SGD.  Then the winner's configuration is trained on X without X_1 (variant
    "rest") or on X ("all"), with the winner's rate and steps, so its data and batches are larger by the factor
    `growth`.  The configuration and the final model are released.  Tuning and final run together meet the target.
    Candidates draw their setting, a pair of a rate and a length, as they draw their plan under `MatchedPlan`.  The
    solved plan has `settings`, one for each pair.  Its `epsilon` is a Bounds of kind "bound" for adding or removing one
    record.  Its `mechanism` is tuning and final run together, as a PrivacyProfile, for ledgers and composition.

    Parameters
    ----------
    target_epsilon, target_delta, dataset_size, repetitions, sampling_probability, epochs, steps : as for `MatchedPlan`.
    share, variant : in [2^-11, 1); "rest" or "all".
    noise_ratio : the final run's noise multiplier divided by the candidates', by default 1 as in the reference.

    References
    ----------
    Koskela and Kulkarni (2023); README.md of this folder, "Tuning on a random subset".

    >>> from jaxacct import selection
    >>> plan = SubsetPlan(8.0, 1e-5, 1000, 0.2, selection.Poisson(5), sampling_probability=1.0, steps=1)
    >>> plan.settings[0].final_noise < 0.75, bool(plan.epsilon.upper <= 8.0), plan.epsilon.kind, plan.growth
    (True, True, 'bound', 4.0)
    """

    target_epsilon: Leaf
    target_delta: Leaf
    dataset_size: Leaf
    share: Leaf
    repetitions: Law
    sampling_probability: Leaf = None
    epochs: Leaf = None
    steps: Leaf = None
    variant: str = "rest"
    noise_ratio: Leaf = 1.0
    settings: tuple[Setting, ...] = field(init=False)
    epsilon: Bounds = field(init=False)
    mechanism: PrivacyProfile = field(init=False, repr=False)

    def __post_init__(self) -> None:
        choice("variant", self.variant, VARIANTS)
        # floats from 2^-11 to 1 are multiples of 2^-64, so the sampler draws with exactly the given share
        drawn = Constraint("use a share of the records such as 0.1", 2.0**-11, 1, upper_open=True)
        rate, steps = _checked(self, share=drawn, noise_ratio=POSITIVE)
        target, delta, law = self.target_epsilon, self.target_delta, self.repetitions

        @functools.cache
        def solved(x: float) -> tuple[float, Any]:
            noise = _matched_noise(x, delta, rate, steps)
            if np.isnan(noise).any():
                return math.inf, None
            tuned, trained = (
                [dp_sgd(*row) for row in zip(sigma, rate, steps, strict=True)]
                for sigma in (noise, self.noise_ratio * noise)
            )
            tuning = profile_of_tuning(_drawn_or_any(tuned, delta, True, float(law.mean)), law, delta)
            final = profile_of_run(_drawn_or_any(trained, delta, False), delta)
            found = product(tuning, final, self.share, self.variant)
            return found.epsilon(delta), (noise, found)

        near = guessed_noise(target, delta, rate[0], steps[0]) if rate.size == 1 else 1.5 / target
        reached, (noise, found) = solved(least_noise(lambda x: solved(x)[0], target, near))
        rows = zip(rate, steps, noise, self.noise_ratio * noise, strict=True)
        vars(self).update(
            settings=tuple(Setting(float(g), int(t), float(s), float(f)) for g, t, s, f in rows),
            epsilon=Bounds(0.0, reached, reached, "bound", "ok", "profile"),
            mechanism=found.profile(reached),
        )

    @property
    def growth(self) -> float:
        """Expected records of the final run divided by a candidate's: (1-q)/q for "rest", 1/q for "all", q = share."""
        return ((1.0 - self.share) if self.variant == "rest" else 1.0) / self.share

    @property
    def cost(self) -> Cost:
        """Cost in gradient evaluations; the final run is assumed to have the mean epochs of the settings."""
        epochs = float(np.mean([setting.epochs for setting in self.settings]))
        return Cost(self.repetitions, self.dataset_size, epochs, self.variant, self.share)

    def expected_batch_size(self, setting: Setting, final: bool) -> float:
        """Return the expected batch size of the final run if `final` is true, else that of a candidate."""
        share = self.share * (self.growth if final else 1.0)
        return setting.sampling_probability * share * self.dataset_size

    def _repr_html_(self) -> str:
        known = [("dataset size", f"{self.dataset_size:,}"), ("share", repr(self.share)), ("variant", self.variant)]
        each = (
            f"q = {one.sampling_probability!r}, T = {one.steps}, sigma = {one.tuning_noise!r}, "
            f"of the final run {one.final_noise!r}"
            for one in self.settings
        )
        return _shown(self, [*known, ("repetitions", repr(self.repetitions))], list(each))


def _checked(plan: Any, **more: Constraint) -> tuple[np.ndarray, np.ndarray]:
    """Check the numbers of a plan.  Return (rates, steps), flat arrays with an element for each setting."""
    rules = {name: RULES[name] for name in ("target_epsilon", "target_delta", "dataset_size")} | more
    for name, rule in rules.items():
        vars(plan)[name] = check_one(name, getattr(plan, name), rule, "a plan is for one tuning")
    if not isinstance(plan.repetitions, Law) or plan.repetitions.shape:
        raise InputError("repetitions must be one law of K; use one such as selection.Geometric(0.1)")
    if plan.sampling_probability is None or (plan.epochs is None) == (plan.steps is None):
        raise InputError("sampling_probability and one of epochs and steps are needed; give exactly these")
    rates = np.atleast_1d(check("sampling_probability", plan.sampling_probability, ABOVE_ZERO))[:, None]
    if plan.steps is None:
        count = np.ceil(np.atleast_1d(check("epochs", plan.epochs, POSITIVE)) / rates * (1.0 - 1e-12))
    else:
        steps = np.atleast_1d(check("steps", plan.steps, COUNT))
        count = np.broadcast_to(steps, (rates.size, steps.size))
    return np.broadcast_to(rates, count.shape).ravel(), np.maximum(count, 1.0).ravel()


def least_noise(epsilon: Callable[[float], float], target: float, near: float) -> float:
    """Search from `near`; of the noise multipliers tried, return the smallest at which `epsilon` meets the target."""
    several = lambda values: np.array([epsilon(float(value)) for value in values])
    # `margin`: two evaluations of `epsilon` at the same noise may differ by this share
    found = least_private(several, target, near, (LEAST_NOISE, LARGEST_NOISE), falls=True, rtol=2e-3, margin=1e-5)
    if math.isnan(found):
        raise InputError(f"target_epsilon = {target!r} is met by no noise up to {LARGEST_NOISE:g}; raise the target")
    return found


def guessed_noise(epsilon: float, delta: float, rate: float, steps: float) -> float:
    """Return the noise multiplier that a search tries first. With this noise one run costs about 0.6 `epsilon`."""
    mu = 0.6 * epsilon / math.sqrt(2.0 * math.log(1.0 / delta) + epsilon)
    return 1.0 / math.sqrt(math.log1p((mu / rate) ** 2 / steps))


def plan_of(plan: Any, rate: float, steps: float, noise: float) -> Plan:
    """Return the plan of one run of a tuning."""
    segment = Segment(0, int(steps), float(noise), float(rate), float(rate) * plan.dataset_size)
    return Plan.of([segment], target_delta=plan.target_delta, dataset_size=plan.dataset_size)


def _matched_noise(x: float, delta: float, rate: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the runs' noise multipliers: `x` for a single run, else the least that make each run (1/x, delta)-DP."""
    if rate.size == 1:
        return np.array([x])
    return np.asarray(calibrate_noise_multiplier(1.0 / x, delta, rate, steps).value)


def _drawn_or_any(runs: Sequence[Mechanism], delta: float, drawn: bool, candidates: float = 1.0) -> Mechanism:
    """Return one profile for any of the runs: their mean profile if the run is `drawn` uniformly, else the maximum."""
    if len(runs) == 1:
        return runs[0]
    # A loss past the grid, of chance <= `left`, counts as infinite.  Selecting multiplies `left` by `candidates`, E[K].
    left = max(delta * LAST_DELTA_SHARE / max(candidates / 10.0, 1.0), 1e-300)
    top = max(float(account.epsilon(run, left, rtol=0.01).upper) for run in runs)
    grid = np.linspace(0.0, top, 200)
    return candidates_profile(runs, grid, np.full(len(runs), 1.0 / len(runs)) if drawn else None)


def _shown(plan: Any, known: list[tuple[str, str]], each: list[str]) -> str:
    """Return a plan's HTML: epsilon, targets, the (name, value) pairs `known`, and a row for each line of `each`."""
    goal = [("target epsilon", repr(plan.target_epsilon)), ("target delta", repr(plan.target_delta))]
    shown, rest = markup.cut(len(each))
    rows = [(f"candidate {row}", line) for row, line in enumerate(each[: len(shown)])]
    return markup.fields(type(plan).__name__, [("epsilon", f"{plan.epsilon:.6g}"), *goal, *known, *rows], rest)


def profile_of_tuning(run: Mechanism, law: Law, delta: float) -> PrivacyProfile:
    """Return upper bounds, for any score, of the profile of a selection among K runs, with deltas far below `delta`."""
    both = RELATIONS[: 1 if run.symmetric() else 2]
    envelope = lambda at, name: bound_delta(run, law, at, bound="envelope", relation=name).upper
    last = float(bound_epsilon(run, law, max(LAST_DELTA_SHARE * delta, 1e-15), bound="envelope").upper)
    grid = np.linspace(0.0, max(last, 1e-3) if math.isfinite(last) else 50.0, TUNING_POINTS)
    # Take the smaller of two upper bounds.  The bracket is a little tighter, but the envelope resolves smaller deltas.
    sides = [np.minimum(bracket("delta", run, law, grid, name, math.inf)[1], envelope(grid, name)) for name in both]
    return PrivacyProfile(grid, sides[0], sides[-1])


def profile_of_run(run: Mechanism, delta: float) -> PrivacyProfile:
    """Return a profile made of upper bounds of one run's delta, at a grid of epsilons and in both directions."""
    if isinstance(run, PrivacyProfile):
        return run
    last = float(account.epsilon(run, max(LAST_DELTA_SHARE * delta, 1e-15), rtol=0.01).upper)
    grid = np.linspace(0.0, max(last if math.isfinite(last) else 50.0, 1e-3), 2 * TUNING_POINTS)
    return PrivacyProfile(grid, *(upper_delta(run, grid, name) for name in RELATIONS))
