"""Budget advisor: for one target, what each split of the data and each law of K buys, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct import account
from jaxacct.calibration import calibrate_noise_multiplier
from jaxacct.files import optional_package, write_csv
from jaxacct.mechanisms import PrivacyProfile, dp_sgd
from jaxacct.progress import Progress
from jaxacct.selection import Law, Poisson, TruncatedNegativeBinomial, select
from jaxacct.selection.subset import VARIANTS
from jaxacct.tuning.cost import Cost
from jaxacct.tuning.subset_accounting import least_noise, product, profile_of_run, profile_of_tuning
from jaxacct.tuning.subset_plan import guessed_noise
from jaxacct.validation import COUNT, DELTA, POSITIVE, PROBABILITY, Constraint, InputError, check, check_one, choice

__all__ = ["FAMILIES", "Advice", "Option", "advise", "law_of_mean"]

FAMILIES = ("geometric", "poisson", "logarithmic", "truncated_negative_binomial")
MOST = 1e6
"""Largest E[K] that is looked for."""
CLOSE = 0.01
"""Relative closeness of E[K] to one that no longer meets the target."""
ASKED = "ask for one target at a time"
_MEAN = Constraint("use an expected number of candidates above 0", 0, MOST, lower_open=True)
_ETA = Constraint("use an eta above -1, such as 0.5", -1, lower_open=True)


@dataclass(frozen=True)
class Option:
    """One way to spend the budget.

    split : "everything" (candidates on all data, the winner released), "rest" or "all" (on a sample, then a final run).
    share : of the sample; 1 for "everything".  family, parameter : the law of K: gamma, of Poisson laws the mean.
    candidates : E[K].  noise_multiplier : of candidates and final run.
    released_noise, candidate_noise : noise multiplier over expected batch size, of the released model and of the
        candidates: the standard deviation of the noise on a mean gradient, per clip norm.
    epsilon : certified upper end for the whole, at most the target; NaN where nothing meets it.
    gradients, gradients_95 : gradient evaluations, expectation and 95 % quantile by the law of K.
    status : "ok", "not_binding" (E[K] of a million meets the target) or "infeasible".
    """

    split: str
    share: float
    family: str
    parameter: float
    candidates: float
    noise_multiplier: float
    released_noise: float
    candidate_noise: float
    epsilon: float
    gradients: float
    gradients_95: float
    status: str


@dataclass(frozen=True)
class Advice:
    """The options for one target, in the order of the grid.

    solved : "noise_multiplier" or "candidates", what was solved for.  untuned_noise : of a single run that takes the
    whole budget.  `print(advice)` is a table; `to_csv`, `to_pandas` and `draw` write it.
    """

    options: tuple[Option, ...]
    target_epsilon: float
    target_delta: float
    solved: str
    untuned_noise: float

    def best(self, noise: float | None = None) -> Option:
        """The option with the most candidates, and of equals the least noise; `noise` limits the released noise.

        Without a limit it is for advice at a given noise multiplier; InputError where no option is left.
        """
        limit = math.inf if noise is None else float(check("noise", noise, POSITIVE))
        left = [one for one in self.options if one.status != "infeasible" and one.released_noise <= limit]
        if not left:
            raise InputError("no option meets the target within this noise; allow more, or raise the target")
        return max(left, key=lambda one: (one.candidates, -one.released_noise))

    def rows(self) -> list[list[str]]:
        """The cells as text, floats in full precision."""
        return [[x if isinstance(x, str) else repr(x) for x in dataclasses.astuple(one)] for one in self.options]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV with a header line."""
        write_csv(Path(path), _COLUMNS, self.rows())

    def to_pandas(self) -> Any:
        """The table as a pandas.DataFrame (needs pandas)."""
        return optional_package("pandas", "a DataFrame").DataFrame([dataclasses.asdict(one) for one in self.options])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw released noise, or the candidates that were solved for: .png, .svg or .pdf (needs matplotlib)."""
        from jaxacct.plots import style

        place = Path(path)
        style.check_picture(place)
        with style.settings():
            canvas, axes = style.figure(square=False)
            (_draw_noise if self.solved == "noise_multiplier" else _draw_candidates)(self, axes)
            target = {"target_epsilon": self.target_epsilon, "target_delta": self.target_delta}
            style.title(axes, "what the budget buys, certified", style.described(target))
            style.save(canvas, place)

    def __str__(self) -> str:
        head = ("split", "share", "law of K", "E[K]", "sigma", "noise/batch", "epsilon", "gradients", "95 %", "status")
        lines: list[tuple[str, ...]] = [head]
        for one in self.options:
            law = f"{one.family} {one.parameter:.4g}"
            numbers = [f"{x:.4g}" for x in (one.candidates, one.noise_multiplier, one.released_noise)]
            cost = [f"{one.epsilon:.5g}", f"{one.gradients:.3g}", f"{one.gradients_95:.3g}"]
            lines.append((one.split, f"{one.share:g}", law, *numbers, *cost, one.status))
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(f"{x:>{w}}" for x, w in zip(line, wide, strict=True)) for line in lines)


_COLUMNS = tuple(f.name for f in dataclasses.fields(Option))


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

    Options are the product of `shares` (1: candidates on all data, nothing else; below 1: on a Poisson sample, with
    a final run, in each of the `variants` "rest" and "all"), `families` of the law of K, and `candidates`.  With
    `candidates`, the E[K] to look at, each is given the least noise that meets the target; with `noise_multiplier`
    instead, the largest E[K] that it allows.  Rate and steps are the same in all runs, so a run on a share of the
    data has batches that are as much smaller.

    target_epsilon > 0, target_delta in (0, 1), dataset_size n, sampling_probability of DP-SGD in (0, 1], and epochs
    or steps: numbers.  families : "geometric", "poisson", "logarithmic", or "truncated_negative_binomial" with eta.
    progress : a line on standard error; None only on a terminal.  Some seconds per option.

    All epsilons are upper ends of the certified accounting (exact worst case over scores, README.md), for adding or
    removing one record, and none exceeds the target.  What no noise or no E[K] meets has the status "infeasible".
    InputError for invalid values.

    >>> advice = advise(4.0, 1e-5, 1000, 1.0, steps=1, noise_multiplier=2.0, shares=[1.0], families=["poisson"])
    >>> 10.5 < advice.options[0].candidates < 11.5, advice.options[0].epsilon <= 4.0
    (True, True)
    """
    target = check_one("target_epsilon", target_epsilon, POSITIVE, ASKED)
    delta = check_one("target_delta", target_delta, DELTA, ASKED)
    n = int(check_one("dataset_size", dataset_size, COUNT, ASKED))
    rate = check_one("sampling_probability", sampling_probability, PROBABILITY, ASKED)
    if (epochs is None) == (steps is None) or (candidates is None) == (noise_multiplier is None):
        raise InputError("one of epochs and steps, and one of candidates and noise_multiplier, are needed; give these")
    if rate == 0.0:
        raise InputError("sampling_probability = 0.0 must be > 0; a run that sees nothing needs no tuning")
    if steps is None:
        steps = math.ceil(check_one("epochs", epochs, POSITIVE, ASKED) / rate * (1.0 - 1e-12))
    count = int(check_one("steps", steps, COUNT, ASKED))
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
        solve, known = task.candidates, [check_one("noise_multiplier", noise_multiplier, POSITIVE, ASKED)]
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
    mean = check_one("mean", mean, _MEAN, ASKED)
    if family == "poisson":
        return Poisson(mean)
    if mean <= 1.0:
        raise InputError(f"mean = {mean!r} must be > 1 for the family {family!r}; use 'poisson', or more candidates")
    shape = {"geometric": 1.0, "logarithmic": 0.0}.get(family, eta)
    shape = check_one("eta", shape, _ETA, ASKED)
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
        """The largest E[K] that a noise allows, by bisection on log E[K]: tried, and met the target."""
        low, high = (math.log(x) for x in (0.05 if family == "poisson" else 1.0 + 1e-6, MOST))
        value = lambda x: self.epsilon(split, share, law(math.exp(x)), sigma)
        held = value(low)
        if held > self.target:
            return self._option(split, share, family, law(math.exp(low)), sigma, math.nan, "infeasible")
        step, x = 1.0, max(low, math.log(4.0))
        while x < high and (found := value(x)) <= self.target:  # outwards, in growing steps
            low, held, x, step = x, found, min(x + step, high), 2.0 * step
        if x >= high and (found := value(high)) <= self.target:
            return self._option(split, share, family, law(MOST), sigma, found, "not_binding")
        high = x
        while high - low > CLOSE:
            middle = 0.5 * (low + high)
            if (found := value(middle)) <= self.target:
                low, held = middle, found
            else:
                high = middle
        return self._option(split, share, family, law(math.exp(low)), sigma, held, "ok")

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


def _draw_noise(advice: Advice, axes: Any) -> None:
    """Released noise against E[K], a line for every split and law."""
    _lines(advice, axes, lambda one: (one.candidates, one.released_noise), "E[K]")
    axes.set(xlabel="expected number of candidates $E[K]$", ylabel="noise of the released model / batch size")


def _draw_candidates(advice: Advice, axes: Any) -> None:
    """E[K] against the share, a line for every variant and law."""
    _lines(advice, axes, lambda one: (one.share, one.candidates), "share")
    axes.set(xlabel="share of the data that is tuned on", ylabel="expected number of candidates $E[K]$")


def _lines(advice: Advice, axes: Any, point: Callable[[Option], tuple[float, float]], x: str) -> None:
    from jaxacct.plots import style

    named: dict[str, list[tuple[float, float]]] = {}
    for one in advice.options:
        if one.status != "infeasible":
            split = one.split if x == "share" or one.split == "everything" else f"{one.split} of {one.share:g}"
            named.setdefault(f"{split}, {one.family}", []).append(point(one))
    for (name, points), colour, dash in zip(
        named.items(), style.colours(list(named)), style.dashes(len(named)), strict=True
    ):
        across, up = zip(*sorted(points), strict=True)
        axes.plot(across, up, dash, marker="o", markersize=3.5, color=colour, label=name)
    style.scale(axes, "x", [p[0] for points in named.values() for p in points])
    style.scale(axes, "y", [p[1] for points in named.values() for p in points])
    style.legend(axes, len(named))
