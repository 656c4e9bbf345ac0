"""Ways to search that the budget advisor compares, and what each of them costs or allows at one target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.search import least_private, status_of_upper_end
from jaxacct.core.validation import Constraint, InputError, check_one, choice
from jaxacct.mechanisms import dp_sgd
from jaxacct.selection import (
    Categorical,
    Law,
    PointMass,
    Poisson,
    TruncatedNegativeBinomial,
    rounds,
    select,
)
from jaxacct.tuning.advice import Option
from jaxacct.tuning.cost import Cost
from jaxacct.tuning.subset_accounting import LEAST_NOISE, least_noise, product, profile_of_run, profile_of_tuning
from jaxacct.tuning.subset_plan import guessed_noise

__all__ = ["FAMILIES", "FIXED", "MEAN", "ONE_TARGET", "Task", "Way", "law_of_mean"]

FAMILIES = ("geometric", "poisson", "logarithmic", "truncated_negative_binomial")
"""Families of laws of K that the advisor compares; each has one free number, which its mean decides."""
FIXED = "fixed"
"""A fixed number of candidates, for adaptive ones."""
LARGEST_MEAN = 1e6
"""Largest E[K] that is looked for: more candidates than anybody trains."""
LARGEST_ROUND = 2**20
"""Numbers of candidates of one round that count for the quantile of several, at most."""
EPSILON_RTOL = 1e-4
"""An E[K] whose epsilon is within half of this, relatively, below the target is near enough."""
MEAN_RTOL = 0.01
"""How close, relatively, E[K] comes to one that no longer meets the target; finer is of no use for advice."""
UNSPENT = 2e-3
"""An option with the status "ok" leaves at most this share of the target unspent."""
ONE_TARGET = "ask for one target at a time"
"""The remedy in errors about arguments that must be single numbers."""
MEAN = Constraint("use an expected number of candidates above 0", 0, LARGEST_MEAN, lower_open=True)
"""What an E[K] must be."""
_ETA = Constraint("use an eta above -1, such as 0.5", -1, lower_open=True)


def law_of_mean(family: str, mean: float, eta: float | None = None) -> Law:
    """The law of a family with a given E[K]: above 1, of Poisson laws above 0.

    >>> round(float(law_of_mean("logarithmic", 21.49758).gamma), 6), law_of_mean("poisson", 3.0)
    (0.01, Poisson(mean=3.0))
    """
    choice("family", family, FAMILIES)
    mean = check_one("mean", mean, MEAN, ONE_TARGET)
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
class Way:
    """A split of the data, a family of laws of K, and the number of rounds."""

    split: str
    share: float
    family: str
    eta: float | None
    count: int

    def law(self, mean: float) -> Law:
        """Of K in one round, for so many expected candidates in all rounds together."""
        return (
            PointMass(max(math.floor(mean), 1))
            if self.adaptive
            else law_of_mean(self.family, mean / self.count, self.eta)
        )

    @property
    def adaptive(self) -> bool:
        """Whether every candidate may follow all before it."""
        return self.family == FIXED

    @property
    def search(self) -> str:
        """In words."""
        return "adaptive" if self.adaptive else "iid" if self.count == 1 else f"{self.count} rounds"

    @property
    def least(self) -> float:
        """The least number of expected candidates that is looked for."""
        return self.count * {"poisson": 0.05, FIXED: 1.0}.get(self.family, 1.0 + 1e-6)


@dataclass(frozen=True)
class Task:
    """What all options share."""

    target: float
    delta: float
    n: int
    rate: float
    steps: int

    def epsilon(self, way: Way, mean: float, sigma: float) -> float:
        """The certified upper end for the whole."""
        run, law = dp_sgd(sigma, self.rate, self.steps), way.law(mean)
        if way.split == "everything":
            whole = (
                rounds(run, law, way.count, target_delta=self.delta)
                if way.count > 1
                else select(run, law, candidates="adaptive" if way.adaptive else "iid")
            )
            return float(account.epsilon(whole, self.delta).upper)
        final = profile_of_run(dp_sgd(sigma, self.rate, self.steps), self.delta)
        return product(profile_of_tuning(run, law, self.delta), final, way.share, way.split).epsilon(self.delta)

    def noise(self, way: Way, mean: float) -> Option:
        """The least noise for an E[K]."""
        mean = float(math.ceil(mean)) if way.adaptive else mean
        known: dict[float, float] = {}

        def upper(sigma: float) -> float:
            known[sigma] = self.epsilon(way, mean, sigma)
            return known[sigma]

        try:
            sigma = least_noise(upper, self.target, guessed_noise(self.target, self.delta, self.rate, self.steps))
        except InputError:
            return self._option(way, mean, math.nan, math.nan, "infeasible")
        return self._option(way, mean, sigma, known[sigma], self._status(known[sigma], sigma == LEAST_NOISE))

    def candidates(self, way: Way, sigma: float) -> Option:
        """The largest E[K] that a noise allows: tried, and met the target."""
        known: dict[float, float] = {}

        def upper(means: np.ndarray) -> np.ndarray:
            for mean in means.tolist():
                known[mean] = self.epsilon(way, mean, sigma)
            return np.array([known[mean] for mean in means.tolist()])

        limits = (way.least, LARGEST_MEAN)
        start = max(4.0, 2.0 * way.least)
        mean = least_private(upper, self.target, start, limits, falls=False, rtol=EPSILON_RTOL, closest=MEAN_RTOL)
        if math.isnan(mean):
            return self._option(way, way.least, sigma, math.nan, "infeasible")
        return self._option(way, mean, sigma, known[mean], self._status(known[mean], mean == LARGEST_MEAN))

    def _status(self, epsilon: float, at_limit: bool) -> str:
        return status_of_upper_end(epsilon, self.target, UNSPENT, at_limit)

    def _option(self, way: Way, mean: float, sigma: float, epsilon: float, status: str) -> Option:
        law = way.law(mean)
        cost = Cost(_sum(law, way.count), self.n, self.rate * self.steps, way.split, way.share)
        batch = self.rate * self.n
        released = {"everything": 1.0, "rest": 1.0 - way.share, "all": 1.0}[way.split]
        parameter = float(law.gamma) if isinstance(law, TruncatedNegativeBinomial) else float(law.mean)
        noises = (sigma, sigma / (batch * released), sigma / (batch * way.share))
        gradients = (cost.expected, float(cost.quantile(0.95)))
        head = (way.split, way.share, way.family, parameter, way.count * float(law.mean))
        return Option(*head, *noises, epsilon, *gradients, status, way.search)


def _sum(law: Law, count: int) -> Law:
    """The law of a sum of so many draws, for what it costs; negligible tails are left out."""
    if count == 1:
        return law
    if isinstance(law, Poisson):
        return Poisson(count * law.mean)
    most = int(min(float(law.quantile(1.0 - 1e-9)), LARGEST_ROUND))
    mass = np.asarray(law.probability(np.arange(most + 1.0)))
    size = count * most + 1
    total = np.maximum(np.fft.irfft(np.fft.rfft(mass / mass.sum(), 2 * size) ** count, 2 * size)[:size], 0.0)
    return Categorical(total / math.fsum(total))
