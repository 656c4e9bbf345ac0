"""SubsetPlan: the noise for which "tune on a random subset, then train once" meets a target, solved beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, Constraint, InputError, check_one, choice
from jaxacct.mechanisms import PrivacyProfile, dp_sgd
from jaxacct.selection import Law
from jaxacct.selection.subset_privacy import VARIANTS
from jaxacct.tuning.cost import Cost
from jaxacct.tuning.matched_plan import drawn_or_any, matched_noise, settings_grid
from jaxacct.tuning.subset_accounting import Product, least_noise, product, profile_of_run, profile_of_tuning

__all__ = ["Setting", "SubsetPlan", "guessed_noise"]

_SHARE = Constraint("use a share of the records such as 0.1", 2.0**-11, 1, upper_open=True)
"""Shares that the sampler realises exactly."""


@dataclass(frozen=True)
class Setting:
    """One way to run DP-SGD: rate, steps, and its noise in tuning and in the final run."""

    sampling_probability: float
    steps: int
    tuning_noise: float
    final_noise: float

    @property
    def epochs(self) -> float:
        """Passes over the records that the run works on."""
        return self.sampling_probability * self.steps


@dataclass(frozen=True, eq=False)
class SubsetPlan:
    """Tune on a Poisson sample X_1 of the data, train the winner's configuration once; the whole meets a target.

    1. Every record is in X_1 with probability `share`, secretly.  2. K is drawn from `repetitions`, secretly, and K
    candidates are trained on X_1 by DP-SGD.  3. The winner's configuration is trained on X without X_1 (variant "rest")
    or on X ("all").  Winner and final model are released.  Rate and steps are those of the candidate, so the final run
    has a batch as many times larger as its data are (`growth`).

    Where several rates or epochs are given the candidates are their product, each drawn with the same probability, each
    with the least noise for one (epsilon, target_delta) that all share.  The tuning is then accounted for by the
    mixture of their profiles, and the final run by their maximum.

    The solved plan has `settings`, of every candidate; `epsilon`, Bounds of kind "bound" for adding or removing one
    record, with `epsilon.upper <= target_epsilon`; and `mechanism`, the whole as a PrivacyProfile for ledgers and
    composition.

    Parameters
    ----------
    target_epsilon : float > 0
    target_delta : float in (0, 1)
    dataset_size : int
        Number of records n, which is public.
    share : float in [2^-11, 1)
    repetitions : Law
        One law of K.
    sampling_probability : array_like in (0, 1]
        Of DP-SGD, one or several.
    epochs, steps : array_like > 0, array_like of whole numbers
        One of the two, one or several values.
    variant : {"rest", "all"}
    noise_ratio : float > 0
        Noise multiplier of the final run over that of the candidates: how the budget is split.  By default 1, as in the
        paper; below 1 favours the final model, above 1 the tuning.

    Raises
    ------
    InputError
        Invalid values, and targets that no noise meets.

    References
    ----------
    Koskela and Kulkarni (2023); README.md of this folder, "Tuning on a random subset".

    >>> from jaxacct import selection
    >>> plan = SubsetPlan(8.0, 1e-5, 1000, 0.2, selection.Poisson(5), sampling_probability=1.0, steps=1)
    >>> plan.settings[0].final_noise < 0.75, bool(plan.epsilon.upper <= 8.0), plan.epsilon.kind, plan.growth
    (True, True, 'bound', 4.0)
    """

    target_epsilon: Any
    target_delta: Any
    dataset_size: Any
    share: Any
    repetitions: Law
    sampling_probability: Any = None
    epochs: Any = None
    steps: Any = None
    variant: str = "rest"
    noise_ratio: Any = 1.0
    settings: tuple[Setting, ...] = field(init=False)
    epsilon: Bounds = field(init=False)
    mechanism: PrivacyProfile = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rules = {"target_epsilon": POSITIVE, "target_delta": DELTA, "dataset_size": COUNT, "share": _SHARE}
        for name, rule in (rules | {"noise_ratio": POSITIVE}).items():
            vars(self)[name] = check_one(name, getattr(self, name), rule, "a plan is for one tuning")
        choice("variant", self.variant, VARIANTS)
        if not isinstance(self.repetitions, Law) or self.repetitions.shape:
            raise InputError("repetitions must be one law of K; use one such as selection.Poisson(15)")
        rate, steps = settings_grid(self.sampling_probability, self.epochs, self.steps)
        known: dict[float, Product] = {}

        def upper(x: float) -> float:
            found = self._product(rate, steps, matched_noise(x, self.target_delta, rate, steps))
            if found is None:
                return math.inf
            known[x] = found
            return found.epsilon(self.target_delta)

        single = rate.size == 1
        near = guessed_noise(self.target_epsilon, self.target_delta, rate[0], steps[0])
        x = least_noise(upper, self.target_epsilon, near if single else 1.5 / self.target_epsilon)
        noise = matched_noise(x, self.target_delta, rate, steps)
        final = self.noise_ratio * noise
        whole = known[x]
        reached = whole.epsilon(self.target_delta)
        rows = zip(rate, steps, noise, final, strict=True)
        settings = tuple(Setting(float(g), int(t), float(s), float(f)) for g, t, s, f in rows)
        vars(self).update(
            settings=settings,
            epsilon=Bounds(0.0, reached, reached, "bound", "ok", "profile"),
            mechanism=whole.profile(reached),
        )

    @property
    def growth(self) -> float:
        """Expected records of the final run over those of a candidate: (1-q)/q or 1/q."""
        return ((1.0 - self.share) if self.variant == "rest" else 1.0) / self.share

    @property
    def cost(self) -> Cost:
        """Gradient evaluations, by the law of K; the final run counts as long as an average candidate."""
        epochs = float(np.mean([setting.epochs for setting in self.settings]))
        return Cost(self.repetitions, self.dataset_size, epochs, self.variant, self.share)

    def expected_batch_size(self, setting: Setting, final: bool) -> float:
        """The rate times the expected number of records, of a candidate or of the final run."""
        share = self.share * (self.growth if final else 1.0)
        return setting.sampling_probability * share * self.dataset_size

    def _repr_html_(self) -> str:
        goal = [("target epsilon", repr(self.target_epsilon)), ("target delta", repr(self.target_delta))]
        known = [("dataset size", f"{self.dataset_size:,}"), ("share", repr(self.share)), ("variant", self.variant)]
        shown, rest = markup.cut(len(self.settings))
        noise = [
            (
                f"candidate {row}",
                f"q = {one.sampling_probability!r}, T = {one.steps}, sigma = {one.tuning_noise!r}, "
                f"of the final run {one.final_noise!r}",
            )
            for row, one in enumerate(self.settings[: len(shown)])
        ]
        law = ("repetitions", repr(self.repetitions))
        return markup.fields("SubsetPlan", [("epsilon", f"{self.epsilon:.6g}"), *goal, *known, law, *noise], rest)

    def _product(self, rate: np.ndarray, steps: np.ndarray, noise: np.ndarray) -> Product | None:
        if np.isnan(noise).any():
            return None
        tuned = [dp_sgd(*row) for row in zip(noise, rate, steps, strict=True)]
        trained = [dp_sgd(*row) for row in zip(self.noise_ratio * noise, rate, steps, strict=True)]
        base = drawn_or_any(tuned, self.target_delta, True, float(self.repetitions.mean))
        final = drawn_or_any(trained, self.target_delta, False)
        tuning = profile_of_tuning(base, self.repetitions, self.target_delta)
        return product(tuning, profile_of_run(final, self.target_delta), self.share, self.variant)


def guessed_noise(epsilon: float, delta: float, rate: float, steps: float) -> float:
    """A noise multiplier to begin a search at.

    It is the central limit's for a run with 0.6 of epsilon, and no bound.
    """
    mu = 0.6 * epsilon / math.sqrt(2.0 * math.log(1.0 / delta) + epsilon)
    return 1.0 / math.sqrt(math.log1p((mu / rate) ** 2 / steps))
