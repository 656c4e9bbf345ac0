"""Budget advisor: for one target, what each split of the data and each law of K buys."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
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
from jaxacct.selection.subset_privacy import VARIANTS
from jaxacct.tuning.advice import Advice, Option
from jaxacct.tuning.ways_to_search import FAMILIES, FIXED, MEAN, ONE_TARGET, Task, Way, law_of_mean

__all__ = ["FAMILIES", "advise", "law_of_mean"]


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
