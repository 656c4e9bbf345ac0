"""Budget advisor: for one target, what each split of the data and each law of K buys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxacct import account
from jaxacct.calibration import calibrate_noise_multiplier
from jaxacct.certified_search import least_private
from jaxacct.mechanisms import PrivacyProfile, dp_sgd
from jaxacct.progress import Progress
from jaxacct.selection import Law, Poisson, TruncatedNegativeBinomial, select
from jaxacct.selection.subset_privacy import VARIANTS
from jaxacct.tuning.advice import Advice, Option
from jaxacct.tuning.cost import Cost
from jaxacct.tuning.subset_accounting import least_noise, product, profile_of_run, profile_of_tuning
from jaxacct.tuning.subset_plan import guessed_noise
from jaxacct.validation import COUNT, DELTA, POSITIVE, PROBABILITY, Constraint, InputError, check, check_one, choice

__all__ = ["FAMILIES", "advise", "law_of_mean"]

FAMILIES = ("geometric", "poisson", "logarithmic", "truncated_negative_binomial")
"""Families of laws of K that the advisor compares; each has one free number, which its mean decides."""
LARGEST_MEAN = 1e6
"""Largest E[K] that is looked for: more candidates than anybody trains."""
EPSILON_RTOL = 1e-4
"""An E[K] whose epsilon is within half of this, relatively, below the target is near enough."""
MEAN_RTOL = 0.01
"""How close, relatively, E[K] comes to one that no longer meets the target; finer is of no use for advice."""
ONE_TARGET = "ask for one target at a time"
"""The remedy in errors about arguments that must be single numbers."""
_MEAN = Constraint("use an expected number of candidates above 0", 0, LARGEST_MEAN, lower_open=True)
_ETA = Constraint("use an eta above -1, such as 0.5", -1, lower_open=True)


def advise(
    target_epsilon: float,
    target_delta: float,
    dataset_size: int,
    sampling_probability: float,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    candidates: Sequence[float] | None = None,
    noise_multiplier: float | None = None,
    shares: Sequence[float] = (1.0, 0.1, 0.2, 0.4),
    variants: Sequence[str] = ("rest",),
    families: Sequence[str] = ("geometric", "poisson"),
    eta: float | None = None,
    progress: bool | None = None,
) -> Advice:
    """Which split of data and budget buys the most candidates at one target (epsilon, delta).

    Options are the product of `shares`, `variants` (for shares below 1), `families` and `candidates`.  Rate and steps
    are the same in all runs, so a run on a share of the data has batches that are as much smaller.  It takes some
    seconds per option.

    Parameters
    ----------
    target_epsilon : float > 0
    target_delta : float in (0, 1)
    dataset_size : int
        Number of records n.
    sampling_probability : float in (0, 1]
        Of DP-SGD.
    epochs, steps : float > 0, int
        One of the two.
    candidates : sequence of float
        The E[K] to look at: each is given the least noise that meets the target.
    noise_multiplier : float > 0
        Given in place of candidates: the largest E[K] that it allows is found.
    shares : sequence of float in (0, 1]
        1 is candidates on all data and nothing else; below 1 they are on a Poisson sample, with a final run.
    variants : sequence of {"rest", "all"}
        What the final run is on: the other data, or all data.
    families : sequence of {"geometric", "poisson", "logarithmic", "truncated_negative_binomial"}
        Of the law of K.
    eta : float > -1, optional
        Of "truncated_negative_binomial", and only of it.
    progress : bool, optional
        A line on standard error; None only on a terminal.

    Returns
    -------
    Advice
        All epsilons are upper ends of the certified accounting (exact worst case over scores), for adding or removing
        one record, and none exceeds the target.  What no noise or no E[K] meets has the status "infeasible".

    Raises
    ------
    InputError
        Invalid values.

    References
    ----------
    README.md of this folder, "Budget advisor".

    >>> advice = advise(4.0, 1e-5, 1000, 1.0, steps=1, noise_multiplier=2.0, shares=[1.0], families=["poisson"])
    >>> 10.5 < advice.options[0].candidates < 11.5, advice.options[0].epsilon <= 4.0
    (True, True)
    """
    target = check_one("target_epsilon", target_epsilon, POSITIVE, ONE_TARGET)
    delta = check_one("target_delta", target_delta, DELTA, ONE_TARGET)
    n = int(check_one("dataset_size", dataset_size, COUNT, ONE_TARGET))
    rate = check_one("sampling_probability", sampling_probability, PROBABILITY, ONE_TARGET)
    if (epochs is None) == (steps is None) or (candidates is None) == (noise_multiplier is None):
        raise InputError("one of epochs and steps, and one of candidates and noise_multiplier, are needed; give these")
    if rate == 0.0:
        raise InputError("sampling_probability = 0.0 must be > 0; a run that sees nothing needs no tuning")
    if steps is None:
        steps = math.ceil(check_one("epochs", epochs, POSITIVE, ONE_TARGET) / rate * (1.0 - 1e-12))
    count = int(check_one("steps", steps, COUNT, ONE_TARGET))
    for family in families:
        choice("families", family, FAMILIES)
    if (eta is None) == ("truncated_negative_binomial" in families):
        raise InputError("eta goes with the family 'truncated_negative_binomial'; give both or neither")
    splits = [
        (variant if share < 1.0 else "everything", float(share))
        for share in np.atleast_1d(check("shares", shares, Constraint("use a share above 0", 0, 1, lower_open=True)))
        for variant in (_known_variants(variants) if share < 1.0 else ("",))
    ]
    task = _Task(target, delta, n, rate, count)
    solve: Callable[[str, float, str, Callable[[float], Law], float], Option]
    if noise_multiplier is None:
        solve, known = task.noise, np.atleast_1d(check("candidates", candidates, _MEAN)).tolist()
    else:
        solve, known = task.candidates, [check_one("noise_multiplier", noise_multiplier, POSITIVE, ONE_TARGET)]
    todo = [(split, family, value) for split in splits for family in families for value in known]
    line = Progress(len(todo), progress, unit="options")
    options: list[Option] = []
    for (split, share), family, value in todo:
        line.update(len(options))
        law = lambda m, family=family: law_of_mean(family, m, eta)
        options.append(solve(split, share, family, law, value))
    line.update(len(options))
    line.close()
    alone = calibrate_noise_multiplier(target, delta, rate, count)
    solved = "candidates" if candidates is None else "noise_multiplier"
    return Advice(tuple(options), target, delta, solved, float(alone.value))


def _known_variants(variants: Sequence[str]) -> list[str]:
    """The variants, each a known one."""
    return [choice("variants", variant, VARIANTS) for variant in variants]


def law_of_mean(family: str, mean: float, eta: float | None = None) -> Law:
    """The law of a family with a given E[K]: above 1, of Poisson laws above 0.

    >>> round(float(law_of_mean("logarithmic", 21.49758).gamma), 6), law_of_mean("poisson", 3.0)
    (0.01, Poisson(mean=3.0))
    """
    choice("family", family, FAMILIES)
    mean = check_one("mean", mean, _MEAN, ONE_TARGET)
    if family == "poisson":
        return Poisson(mean)
    if mean <= 1.0:
        raise InputError(f"mean = {mean!r} must be > 1 for the family {family!r}; use 'poisson', or more candidates")
    shape = {"geometric": 1.0, "logarithmic": 0.0}.get(family, eta)
    shape = check_one("eta", shape, _ETA, ONE_TARGET)
    if shape == 1.0:
        return TruncatedNegativeBinomial(1.0, 1.0 / mean)
    from scipy.optimize import brentq

    law = lambda x: TruncatedNegativeBinomial(shape, 1.0 / (1.0 + math.exp(x)))
    # at gamma near 1 the mean is 1, and it grows without limit as gamma falls
    return law(brentq(lambda x: math.log(float(law(x).mean) / mean), -30.0, 80.0, xtol=1e-13))


@dataclass(frozen=True)
class _Task:
    """What all options share."""

    target: float
    delta: float
    n: int
    rate: float
    steps: int

    def epsilon(self, split: str, share: float, law: Law, sigma: float) -> float:
        """The certified upper end for the whole."""
        run = dp_sgd(sigma, self.rate, self.steps)
        if split == "everything":
            return float(account.epsilon(select(run, law), self.delta).upper)
        tuning = profile_of_tuning(run, law, self.delta)
        return product(tuning, self._final(sigma), share, split).epsilon(self.delta)

    def _final(self, sigma: float) -> PrivacyProfile:
        return profile_of_run(dp_sgd(sigma, self.rate, self.steps), self.delta)

    def noise(self, split: str, share: float, family: str, law: Callable[[float], Law], mean: float) -> Option:
        """The least noise for an E[K]."""
        known: dict[float, float] = {}

        def upper(sigma: float) -> float:
            known[sigma] = self.epsilon(split, share, law(mean), sigma)
            return known[sigma]

        try:
            sigma = least_noise(upper, self.target, guessed_noise(self.target, self.delta, self.rate, self.steps))
        except InputError:
            return self._option(split, share, family, law(mean), math.nan, math.nan, "infeasible")
        return self._option(split, share, family, law(mean), sigma, known[sigma], "ok")

    def candidates(self, split: str, share: float, family: str, law: Callable[[float], Law], sigma: float) -> Option:
        """The largest E[K] that a noise allows: tried, and met the target."""
        known: dict[float, float] = {}

        def upper(means: np.ndarray) -> np.ndarray:
            for mean in means.tolist():
                known[mean] = self.epsilon(split, share, law(mean), sigma)
            return np.array([known[mean] for mean in means.tolist()])

        limits = (0.05 if family == "poisson" else 1.0 + 1e-6, LARGEST_MEAN)
        mean = least_private(upper, self.target, 4.0, limits, falls=False, rtol=EPSILON_RTOL, closest=MEAN_RTOL)
        if math.isnan(mean):
            return self._option(split, share, family, law(limits[0]), sigma, math.nan, "infeasible")
        status = "not_binding" if mean == LARGEST_MEAN else "ok"
        return self._option(split, share, family, law(mean), sigma, known[mean], status)

    def _option(
        self, split: str, share: float, family: str, law: Law, sigma: float, epsilon: float, status: str
    ) -> Option:
        cost = Cost(law, self.n, self.rate * self.steps, split, share)
        batch = self.rate * self.n
        released = {"everything": 1.0, "rest": 1.0 - share, "all": 1.0}[split]
        parameter = float(law.gamma) if isinstance(law, TruncatedNegativeBinomial) else float(law.mean)
        noises = (sigma, sigma / (batch * released), sigma / (batch * share))
        gradients = (cost.expected, float(cost.quantile(0.95)))
        return Option(split, share, family, parameter, float(law.mean), *noises, epsilon, *gradients, status)
