"""Compares ways to spend one budget: splits of the data, laws of K (the number of candidates), and kinds of search."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxacct.calibration.allowed_repetitions import LARGEST_MEAN
from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
from jaxacct.calibration.search import least_private, status_of_upper_end
from jaxacct.core import markup
from jaxacct.core.files import optional_package, write_csv
from jaxacct.core.progress import tracked
from jaxacct.core.text import aligned, outward
from jaxacct.core.types import Foreign
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, Constraint, InputError, check, check_one, choice
from jaxacct.mechanisms import dp_sgd
from jaxacct.selection import Categorical, Law, PointMass, Poisson, TruncatedNegativeBinomial
from jaxacct.selection.subset_privacy import VARIANTS, product
from jaxacct.tuning import plans
from jaxacct.tuning.plans import ABOVE_ZERO, LEAST_NOISE, Cost, guessed_noise, least_noise
from jaxacct.tuning.private_score import whole

FAMILIES = ("geometric", "poisson", "logarithmic", "truncated_negative_binomial")
"""Families of laws of K, the number of candidates.  The mean E[K] fixes the family's one free parameter."""
FIXED = "fixed"
"""Name of the family of laws in which K is a fixed number.  The advisor uses this family for adaptive candidates."""
ONE_TARGET = "ask for one target at a time"
MEAN = Constraint("use an expected number of candidates above 0", 0, LARGEST_MEAN, lower_open=True)


@dataclass(frozen=True)
class Option:
    """One way to spend the budget of a tuning: how candidates are drawn and trained, and what this costs."""

    split: str  # `split` and `share` are those of `Cost`
    share: float
    family: str  # of the law of K, the number of candidates
    parameter: float  # the law's gamma; for a law without gamma, its mean
    candidates: float  # the expected number of candidates, E[K], of all rounds together
    noise_multiplier: float  # of the candidates and of the final run
    released_noise: float  # noise multiplier / expected batch size of the released model, in units of the clip norm
    candidate_noise: float  # the same for a candidate
    epsilon: float  # certified upper bound for the whole tuning, at most the target; NaN if "infeasible"
    gradients: float  # mean number of gradient evaluations under the law of K (`gradients_95`: 95 % quantile)
    gradients_95: float
    # "infeasible": nothing meets the target.  "ok": at most 0.2 % of the target is unspent.  If more is unspent:
    # "not_binding" at the least noise or an E[K] of a million, "loose" for another reason, such as that K is whole.
    status: str
    search: str = "iid"  # or "4 rounds" (each winner is public, `parameter` is of one round), or "adaptive"


@dataclass(frozen=True)
class Advice:
    """Options for one target, in the order of the grid.  `advise` makes them, and `print(advice)` shows a table.

    Parameters
    ----------
    options : the options that were compared.
    target_epsilon, target_delta : the target that each option meets.
    solved : the setting that was solved for, "noise_multiplier" or "candidates".
    untuned_noise : the noise multiplier with which a single run takes the whole budget.

    >>> from jaxacct import tuning
    >>> advice = tuning.advise(4.0, 1e-5, 1000, 1.0, steps=1, noise_multiplier=2.0, shares=[1.0], families=["poisson"])
    >>> advice.solved, advice.best().family, len(advice.rows())
    ('candidates', 'poisson', 1)
    """

    options: tuple[Option, ...]
    target_epsilon: float
    target_delta: float
    solved: str
    untuned_noise: float

    def best(self, noise: float | None = None) -> Option:
        """Return the option with most candidates, in a tie with least `released_noise`, which is at most `noise`."""
        limit = math.inf if noise is None else float(check("noise", noise, POSITIVE))
        left = [one for one in self.options if one.status != "infeasible" and one.released_noise <= limit]
        if not left:
            raise InputError("no option meets the target within this noise; allow more, or raise the target")
        return max(left, key=lambda one: (one.candidates, -one.released_noise))

    def rows(self) -> list[list[str]]:
        """Return the rows of the table as text, floats in full precision."""
        return [[x if isinstance(x, str) else repr(x) for x in dataclasses.astuple(one)] for one in self.options]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as a CSV file with a header line."""
        write_csv(Path(path), tuple(f.name for f in dataclasses.fields(Option)), self.rows())

    def to_pandas(self) -> Foreign:
        """Return the table as a pandas.DataFrame (needs pandas)."""
        return optional_package("pandas", "a DataFrame").DataFrame([dataclasses.asdict(one) for one in self.options])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw a picture (.png, .svg, .pdf; needs matplotlib) of released noise, or of E[K] if it was solved for."""
        from jaxacct.plots import style

        place = Path(path)
        style.check_picture(place)
        of_noise = self.solved == "noise_multiplier"
        named: dict[str, list[tuple[float, float]]] = {}  # {label of a line (split, search, law): points of the line}
        for one in self.options:
            if one.status != "infeasible":
                split = one.split if not of_noise or one.split == "everything" else f"{one.split} of {one.share:g}"
                how = one.family if one.search == "iid" else f"{one.search}, {one.family}"
                point = (one.candidates, one.released_noise) if of_noise else (one.share, one.candidates)
                named.setdefault(f"{split}, {how}", []).append(point)
        labels = ("share of the data that is tuned on", "expected number of candidates $E[K]$")
        if of_noise:
            labels = labels[1], "noise of the released model / batch size"
        with style.settings():
            canvas, axes = style.figure(square=False)
            looks = zip(named.items(), style.colours(list(named)), style.dashes(len(named)), strict=True)
            for (name, points), colour, dash in looks:
                across, up = zip(*sorted(points), strict=True)
                axes.plot(across, up, dash, marker="o", markersize=3.5, color=colour, label=name)
            for axis, side in enumerate("xy"):
                style.scale(axes, side, [point[axis] for points in named.values() for point in points])
            style.legend(axes, len(named))
            axes.set(xlabel=labels[0], ylabel=labels[1])
            target = {"target_epsilon": self.target_epsilon, "target_delta": self.target_delta}
            style.title(axes, "what the budget buys, certified", style.described(target))
            style.save(canvas, place)

    def _repr_html_(self) -> str:
        shown, rest = markup.cut(len(self.options))
        lines = (_cells(self.options[row]) for row in shown)
        note = f"numbers are rounded; sigma and epsilon upward{'; ' + rest if rest else ''}"
        title = f"What epsilon = {self.target_epsilon!r}, delta = {self.target_delta!r} buys; solved for {self.solved}"
        return markup.table(title, _HEAD, lines, note)

    def __str__(self) -> str:
        return "\n".join(aligned([_HEAD, *map(_cells, self.options)]))


_NUMBERS = ("E[K]", "sigma", "noise/batch", "epsilon", "gradients", "95 %")
_HEAD = ("search", "split", "share", "law of K", *_NUMBERS, "status")


def _cells(one: Option) -> tuple[str, ...]:
    """Return the printed cells of an option; noise and epsilon are rounded up, so that the printed numbers are safe."""
    law = f"{one.family} {one.parameter:.4g}"
    noise = [outward(x, ".4g", up=True) for x in (one.noise_multiplier, one.released_noise)]
    cost = [outward(one.epsilon, ".5g", up=True), f"{one.gradients:.3g}", f"{one.gradients_95:.3g}"]
    return one.search, one.split, f"{one.share:g}", law, f"{one.candidates:.4g}", *noise, *cost, one.status


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
    """Find which split of data and budget buys the most candidates at one target (epsilon, delta).

    Options, which take some seconds each, are the product of `shares`, `variants` (for shares below 1), `families` and
    `candidates`.  All runs have the same rate and number of steps, so on a share q of the data the expected batch size
    is q times that on all data.  With share 1 the search may also have rounds, each with a public winner, or be
    adaptive.

    Parameters
    ----------
    target_epsilon, target_delta : the target; target_epsilon is > 0, target_delta in (0, 1).
    dataset_size, sampling_probability : the number of records n, and the rate of DP-SGD, in (0, 1].
    epochs, steps : the length of a run; give one of the two.
    candidates : expected numbers of candidates, E[K].  For each, the least noise that meets the target is found.
    noise_multiplier : the noise of all options, in place of candidates.  The largest E[K] that it allows is found.
    shares : shares of the data in (0, 1].  With share 1 candidates are trained on all data, and there is no final run;
        with a smaller share they are trained on a Poisson sample, and a final run follows.
    variants : "rest" or "all": the final run trains on the data outside the sample, or on all data.
    families : families of laws of K: "geometric", "poisson", "logarithmic", "truncated_negative_binomial".
    eta : > -1, for the family "truncated_negative_binomial"; give eta if, and only if, this family is compared.
    rounds : numbers of rounds to compare (`tune_in_rounds`); 1 for none.  `candidates` counts those of all rounds.
    adaptive : whether to include `Adaptive`: a fixed number of candidates, each of which may depend on earlier results.
    progress : whether to show a line on standard error; None shows it only on a terminal.

    Returns
    -------
    Advice : every epsilon is a certified upper bound for adding or removing one record, whatever the scores are, and at
        most the target.  The status is "infeasible" if no noise, or no E[K], meets the target.

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
    rate = check_one("sampling_probability", sampling_probability, ABOVE_ZERO, ONE_TARGET)
    if (epochs is None) == (steps is None) or (candidates is None) == (noise_multiplier is None):
        raise InputError("one of epochs and steps, and one of candidates and noise_multiplier, are needed; give these")
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
        for variant in ([choice("variants", word, VARIANTS) for word in variants] if share < 1.0 else [""])
    ]
    task = Task(target, delta, n, rate, count)
    counts = [int(check_one("rounds", number, COUNT, ONE_TARGET)) for number in rounds]
    solve: Callable[[Way, float], Option]
    if noise_multiplier is None:
        solve, known = task.noise, np.atleast_1d(check("candidates", candidates, MEAN)).tolist()
    else:
        solve, known = task.candidates, [check_one("noise_multiplier", noise_multiplier, POSITIVE, ONE_TARGET)]
    # only a search on all data may have several rounds; a search on a sample has a final run instead
    ways = [
        Way(split, share, family, eta, number)
        for split, share in splits
        for number in (counts if split == "everything" else (1,))
        for family in families
    ]
    ways += [Way("everything", 1.0, FIXED, None, 1)] if adaptive else []
    options = [solve(way, value) for way, value in tracked(itertools.product(ways, known), "options", progress)]
    alone = calibrate_noise_multiplier(target, delta, rate, count)
    solved = "candidates" if candidates is None else "noise_multiplier"
    return Advice(tuple(options), target, delta, solved, float(alone.value))


def law_of_mean(family: str, mean: float, eta: float | None = None) -> Law:
    """Return a family's law with the given mean E[K], which must be above 0 for Poisson laws, above 1 for others."""
    choice("family", family, FAMILIES)
    mean = check_one("mean", mean, MEAN, ONE_TARGET)
    if family == "poisson":
        return Poisson(mean)
    if mean <= 1.0:
        raise InputError(f"mean = {mean!r} must be > 1 for the family {family!r}; use 'poisson', or more candidates")
    shape = {"geometric": 1.0, "logarithmic": 0.0}.get(family, eta)
    shape = check_one("eta", shape, Constraint("use an eta above -1, such as 0.5", -1, lower_open=True), ONE_TARGET)
    if shape == 1.0:
        return TruncatedNegativeBinomial(1.0, 1.0 / mean)
    from scipy.optimize import brentq

    law = lambda x: TruncatedNegativeBinomial(shape, 1.0 / (1.0 + math.exp(x)))
    # x from -30 to 80 covers every mean > 1: the mean is near 1 at x = -30, and it grows without limit with x
    return law(brentq(lambda x: math.log(float(law(x).mean) / mean), -30.0, 80.0, xtol=1e-13))


@dataclass(frozen=True)
class Way:
    """A way to tune: a split of the data, a family of laws of K, and a number of rounds."""

    split: str
    share: float
    family: str
    eta: float | None
    count: int

    def law(self, mean: float) -> Law:
        """Return the law of K in one round, for a given expected number of candidates in all rounds together."""
        if self.family == FIXED:
            return PointMass(max(math.floor(mean), 1))
        return law_of_mean(self.family, mean / self.count, self.eta)

    @property
    def search(self) -> str:
        """Kind of search, in words."""
        return "adaptive" if self.family == FIXED else "iid" if self.count == 1 else f"{self.count} rounds"

    @property
    def least(self) -> float:
        """Smallest expected number of candidates, of all rounds together, that the search tries."""
        return self.count * {"poisson": 0.05, FIXED: 1.0}.get(self.family, 1.0 + 1e-6)


@dataclass(frozen=True)
class Task:
    """Settings that all options share."""

    target: float
    delta: float
    n: int
    rate: float
    steps: int

    def epsilon(self, way: Way, mean: float, sigma: float) -> float:
        """Return the certified upper bound of the whole tuning's epsilon at E[K] = `mean`, noise multiplier `sigma`."""
        run, law = dp_sgd(sigma, self.rate, self.steps), way.law(mean)
        if way.split != "everything":
            tuning, final = plans.profile_of_tuning(run, law, self.delta), plans.profile_of_run(run, self.delta)
            return product(tuning, final, way.share, way.split).epsilon(self.delta)
        kind = "adaptive" if way.family == FIXED else "iid"
        found = whole(run, law, None, self.delta, "add_or_remove_one", candidates=kind, count=way.count)
        return float(found.epsilon.upper)

    def noise(self, way: Way, mean: float) -> Option:
        """Return the option with E[K] = `mean` and the least noise that meets the target."""
        mean = float(math.ceil(mean)) if way.family == FIXED else mean
        upper = functools.cache(lambda sigma: self.epsilon(way, mean, sigma))
        try:
            sigma = least_noise(upper, self.target, guessed_noise(self.target, self.delta, self.rate, self.steps))
        except InputError:
            return self._option(way, mean, math.nan, None, False)
        return self._option(way, mean, sigma, upper(sigma), sigma == LEAST_NOISE)

    def candidates(self, way: Way, sigma: float) -> Option:
        """Return the option with the largest E[K] tried that meets the target at the noise multiplier `sigma`."""
        upper = functools.cache(lambda mean: self.epsilon(way, mean, sigma))
        several = lambda means: np.array([upper(mean) for mean in means.tolist()])
        limits, start = (way.least, LARGEST_MEAN), max(4.0, 2.0 * way.least)
        # stop if at most 5e-5 (rtol / 2) of the target is unspent, or if 1 % more candidates (closest) miss the target
        mean = least_private(several, self.target, start, limits, falls=False, rtol=1e-4, closest=0.01)
        if math.isnan(mean):
            return self._option(way, way.least, sigma, None, False)
        return self._option(way, mean, sigma, upper(mean), mean == LARGEST_MEAN)

    def _option(self, way: Way, mean: float, sigma: float, epsilon: float | None, at_limit: bool) -> Option:
        """Return an option with its costs and its status; epsilon is None where nothing meets the target."""
        status = "infeasible" if epsilon is None else status_of_upper_end(epsilon, self.target, 2e-3, at_limit)
        law = way.law(mean)
        cost = Cost(_sum(law, way.count), self.n, self.rate * self.steps, way.split, way.share)
        batch = self.rate * self.n
        released = {"everything": 1.0, "rest": 1.0 - way.share, "all": 1.0}[way.split]
        parameter = float(law.gamma) if isinstance(law, TruncatedNegativeBinomial) else float(law.mean)
        noises = (sigma, sigma / (batch * released), sigma / (batch * way.share))
        gradients = (cost.expected, float(cost.quantile(0.95)))
        head = (way.split, way.share, way.family, parameter, way.count * float(law.mean))
        return Option(*head, *noises, math.nan if epsilon is None else epsilon, *gradients, status, way.search)


def _sum(law: Law, count: int) -> Law:
    """Return the law of the sum of `count` draws of K.  Its far tail may be cut off: use it only to estimate costs."""
    if count == 1:
        return law
    if isinstance(law, Poisson):
        return Poisson(count * law.mean)
    most = int(min(float(law.quantile(1.0 - 1e-9)), 2**20))  # a larger K is rare and is left out
    mass = np.asarray(law.probability(np.arange(most + 1.0)))
    size = count * most + 1
    total = np.maximum(np.fft.irfft(np.fft.rfft(mass / mass.sum(), 2 * size) ** count, 2 * size)[:size], 0.0)
    return Categorical(total / math.fsum(total))
