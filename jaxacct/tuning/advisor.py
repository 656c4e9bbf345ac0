"""Budget advisor: for one target, what each split of the data and each law of K buys.

Each way to search is asked what it costs, or allows, at one target.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
from jaxacct.calibration.search import least_private, status_of_upper_end
from jaxacct.core.progress import Progress
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    check,
    check_one,
    choice,
)
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
from jaxacct.selection.subset_privacy import VARIANTS
from jaxacct.tuning.advice import Advice, Option
from jaxacct.tuning.cost import Cost
from jaxacct.tuning.subset_accounting import LEAST_NOISE, least_noise, product, profile_of_run, profile_of_tuning
from jaxacct.tuning.subset_plan import guessed_noise

__all__ = ["FAMILIES", "advise", "law_of_mean"]

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
    rounds: Sequence[int] = (1,),
    adaptive: bool = False,
    progress: bool | None = None,
) -> Advice:
    """Which split of data and budget buys the most candidates at one target (epsilon, delta).

    Options are the product of `shares`, `variants` (for shares below 1), `families` and `candidates`.  Rate and steps
    are the same in all runs, so a run on a share of the data has batches that are as much smaller.  Candidates on all
    data may come in rounds, each round's winner public, or be adaptive.  It takes some seconds per option.

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
    rounds : sequence of int
        Numbers of rounds to look at (`tune_in_rounds`): 1 is i.i.d. candidates without rounds.  `candidates` and the
        answers count the candidates of all rounds together.
    adaptive : bool
        Look at a fixed number of candidates too, each of which may follow all before it (`Adaptive`).
    progress : bool, optional
        A line on standard error; None only on a terminal.

    Returns
    -------
    Advice
        All epsilons are upper ends of the certified accounting (exact worst case over scores), for adding or removing
        one record, and none exceeds the target.  What no noise or no E[K] meets has the status "infeasible".

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
    task = Task(target, delta, n, rate, count)
    counts = [int(check_one("rounds", number, COUNT, ONE_TARGET)) for number in rounds]
    solve: Callable[[Way, float], Option]
    if noise_multiplier is None:
        solve, known = task.noise, np.atleast_1d(check("candidates", candidates, MEAN)).tolist()
    else:
        solve, known = task.candidates, [check_one("noise_multiplier", noise_multiplier, POSITIVE, ONE_TARGET)]
    # only candidates on all data come in rounds: on a sample there is a final run after them
    ways = [
        Way(split, share, family, eta, number)
        for split, share in splits
        for number in (counts if split == "everything" else (1,))
        for family in families
    ]
    ways += [Way("everything", 1.0, FIXED, None, 1)] if adaptive else []
    todo = [(way, value) for way in ways for value in known]
    line = Progress(len(todo), progress, unit="options")
    options: list[Option] = []
    with contextlib.closing(line):
        for way, value in todo:
            line.update(len(options))
            options.append(solve(way, value))
        line.update(len(options))
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
