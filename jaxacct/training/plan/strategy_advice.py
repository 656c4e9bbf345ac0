"""Advice on correlated noise: compares several batch rules and noise strategies by their errors at one budget."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.calibration.noise_rate_steps import Calibration, calibrate_noise_multiplier
from jaxacct.core.files import write_csv
from jaxacct.core.progress import waiting
from jaxacct.core.text import aligned, outward, plain, unusual
from jaxacct.core.types import Foreign
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, InputError, check_int, check_one, refuse_where, with_hints
from jaxacct.mechanisms.dp_sgd_run import ROUNDING, described
from jaxacct.strategies import BLT, Banded, Identity, Strategy, optimise
from jaxacct.training.plan.solver import unit_of_noise, why_not
from jaxacct.training.step.step_mechanisms import ALLOCATION, CYCLIC, ORDER, POISSON, WITH_NOISE

BUFFERS = 4
"""Number of buffers of the `BLT` noise that is compared."""
_ONE = "advice is for one run"


@dataclass(frozen=True)
class StrategyOption:
    """Batch rule and noise strategy, with the least noise multiplier that meets the budget (NaN if none does)."""

    sampling: str
    strategy: Strategy
    groups: int  # number of groups of records, slots of a round, or steps of a pass; 1 with "poisson"
    sampling_probability: float
    noise_multiplier: float
    error: float  # see `advise_strategy`
    relative: float  # error divided by that of DP-SGD with "poisson"
    epsilon: float  # certified upper bound
    status: str

    def row(self) -> dict[str, Any]:
        """Return the option's row of the table: a dict from the names of the columns to numbers and strings."""
        named = {"strategy": type(self.strategy).__name__, "bands": self.strategy.overlap}
        return {"sampling": self.sampling} | named | {k: plain(v) for k, v in vars(self).items() if k != "strategy"}


@dataclass(frozen=True)
class StrategyAdvice:
    """Options for one budget.  ``print(advice)`` shows a table, ``Plan(**advice.plan_arguments())`` plans a run."""

    options: tuple[StrategyOption, ...]
    target_epsilon: float
    target_delta: float
    dataset_size: int
    batch_size: float
    steps: int
    relation: str

    @property
    def best(self) -> StrategyOption:
        """The option of least error; InputError if no option meets the budget."""
        known = [one for one in self.options if not math.isnan(one.error)]
        if not known:
            raise InputError(f"target_epsilon = {self.target_epsilon!r} is met by no option; allow more")
        return min(known, key=lambda option: option.error)

    def plan_arguments(self, option: StrategyOption | None = None) -> dict[str, Any]:
        """Return the keyword arguments with which `Plan` plans an option, by default the best option."""
        option = option or self.best
        found = {name: value for name, value in vars(self).items() if name != "options"} | {"sampling": option.sampling}
        return found | ({"noise": option.strategy} if option.sampling in WITH_NOISE else {})

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as a dict for JSON, with the strategies' names, and "nan" for missing numbers."""
        return vars(self) | {"options": [option.row() for option in self.options]}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the options to a CSV file with a header line. The numbers have full precision."""
        rows = [option.row() for option in self.options]
        write_csv(Path(path), tuple(rows[0]), [list(map(str, row.values())) for row in rows])

    def plot(self, axes: Foreign = None) -> Foreign:
        """Draw the error against the number of bands, and return the matplotlib Axes (needs matplotlib)."""
        from jaxacct.plots.side_by_side import draw_strategies

        return draw_strategies(self, axes)

    def __str__(self) -> str:
        safe = lambda name, x: outward(x, ".5g", up=True) if name in ("noise_multiplier", "epsilon") else f"{x:.5g}"
        lines = [list(self.options[0].row())]
        for option in self.options:
            lines.append([safe(name, x) if isinstance(x, float) else str(x) for name, x in option.row().items()])
        notes = [f"error: root mean square, of prefix sums by the noise alone, in clip norms{unusual(self.relation)}"]
        if not all(math.isnan(option.error) for option in self.options):
            notes.append(f"least error: {self.best.sampling}, {self.best.strategy!r}")
            bands = 2 * max([one.strategy.overlap for one in self.options if one.sampling in (POISSON, CYCLIC)] or [0])
            if 2 * self.best.strategy.overlap == bands <= min(self.steps, self.dataset_size // self.batch_size):
                notes.append(f"more bands may have less error: try bands=[{bands}]")
        return "\n".join([*aligned(lines), "", *notes])


@with_hints
def advise_strategy(
    *,
    target_epsilon: float,
    target_delta: float,
    dataset_size: int,
    batch_size: float,
    epochs: float | None = None,
    steps: int | None = None,
    bands: int | Sequence[int] | None = None,
    relation: str = "add_or_remove_one",
) -> StrategyAdvice:
    """Compare independent and correlated noise at one budget and one batch size.

    Each option that a `Plan` takes under the relation gets the least noise that is certified to meet the budget.  Let
    q = batch_size / dataset_size.  The options are:

    * "poisson": DP-SGD, where each record is in a step with probability q;
    * "random_allocation": DP-SGD, where each record is in one of the ceil(1/q) steps of each round;
    * "cyclic_poisson": ``strategies.Banded`` noise of b bands, for each b. Records are in b groups that take turns, one
      group a step. A step draws each record of its group with probability b q;
    * "fixed_order": ``strategies.BLT`` noise. Nothing is sampled: each record is in every ceil(1/q)-th step. This needs
      the relation ``zero_out`` or ``replace_one``.

    The error is ``sigma sqrt(mean_i e_i)``, in clip norms. Here sigma is the noise multiplier, and e_i the variance, at
    sigma = 1, of the noise in the sum of the clipped gradients of steps 1 to i. The error leaves out the variance of
    sampling, the bias of clipping, and the effect on an optimiser. For random allocation the error is multiplied by
    q ceil(1/q), since a batch has dataset_size / ceil(1/q) records on average, which may be fewer than batch_size.

    Parameters
    ----------
    target_epsilon, target_delta : the budget; target_epsilon is > 0, target_delta in (0, 1).
    dataset_size : number of records.
    batch_size : expected number of records in a step.
    epochs, steps : the length of the run; give one of the two.  With epochs, the run has n = ceil(epochs / q) steps.
    bands : one or several numbers b, each at most 1/q and n. By default those of 2, 4, 8, 16 and 32 that fit, and the
        largest that fits if it is at most 64. With b = 1/q bands nothing is sampled. One band is DP-SGD.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
        The accounting holds only if the other records stay in their groups and steps when a record is added or removed.

    Returns
    -------
    StrategyAdvice

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153. Proofs:
    jaxacct/strategies/README.md.

    >>> from jaxacct.training import advise_strategy
    >>> run = {"dataset_size": 1000, "batch_size": 100, "steps": 20, "bands": [4]}
    >>> advice = advise_strategy(target_epsilon=8.0, target_delta=1e-5, **run)
    >>> advice.best.relative < 0.9, advice.best.epsilon <= 8.0, advice.plan_arguments()["noise"]
    (True, True, Banded(bands=4, steps=20, epochs=1))
    """
    epsilon = check_one("target_epsilon", target_epsilon, POSITIVE, _ONE)
    delta = check_one("target_delta", target_delta, DELTA, _ONE)
    size = int(check_one("dataset_size", dataset_size, COUNT, _ONE))
    batch = check_one("batch_size", batch_size, POSITIVE, _ONE)
    length = {name: value for name, value in (("epochs", epochs), ("steps", steps)) if value is not None}
    run = described({"batch_size": batch, "dataset_size": size, **length}, "poisson", unknown="noise_multiplier")
    n = int(check_one("steps", run["steps"], COUNT, _ONE))
    rate, period, slots = batch / size, math.floor(size / batch), math.ceil(size / batch * (1.0 - ROUNDING))
    banded = _bands(bands, min(period, n))
    groups = [1, *([] if why_not(CYCLIC, relation) else banded), slots]
    rates, counts = np.minimum(np.multiply(groups, rate), 1.0), np.ceil(np.divide(n, groups))
    rates[-1] = counts[-1] = 1.0  # "fixed_order": the whole run is one Gaussian mechanism, so 1 step at rate 1
    settings: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta, "relation": relation}
    with waiting(2, "calibrations") as work:
        found = calibrate_noise_multiplier(**settings, sampling_probability=rates, steps=counts)
        work.done += 1
        allocated = calibrate_noise_multiplier(**settings, slots=slots, steps=n, sampling=ALLOCATION)
    plain, rows = Identity(n), list[tuple[str, Strategy, Calibration, int]]()
    rows += [(POISSON, plain, found, 0), (ALLOCATION, plain, allocated, 0)]
    rows += [(CYCLIC, Banded(b, n), found, place) for place, b in enumerate(groups[1:-1], 1)]
    if not why_not(ORDER, relation):
        scales, decays = optimise.buffered(BUFFERS, n, max(n // slots, 1))  # last argument: number of complete passes
        rows.append((ORDER, BLT(BUFFERS, n, scales=scales, decays=decays), found, len(groups) - 1))

    def option(sampling: str, strategy: Strategy, of: Calibration, place: int) -> StrategyOption:
        noise, upper, status = (np.ravel(each)[place] for each in (of.value, of.epsilon.upper, of.status))
        allocation = sampling == ALLOCATION
        scale = slots * rate if allocation else unit_of_noise(strategy, sampling, slots)
        error = float(noise) * scale * math.sqrt(np.mean(strategy.squared_errors()))
        relative = error / (float(found.value[0]) * math.sqrt(0.5 * (n + 1)))
        at = (slots, 1.0 / slots) if allocation else (groups[place], float(rates[place]))
        return StrategyOption(sampling, strategy, *at, float(noise), error, relative, float(upper), str(status))

    options = tuple(option(*row) for row in rows if not why_not(row[0], relation))
    return StrategyAdvice(options, epsilon, delta, size, batch, n, relation)


def _bands(bands: int | Sequence[int] | None, most: int) -> list[int]:
    """Return the numbers of bands above 1 to compare; refuse numbers that exceed the steps of a pass or of the run."""
    if bands is None:
        return sorted({b for b in (2, 4, 8, 16, 32, most) if 1 < b <= min(most, 64)})
    given = enumerate(np.atleast_1d(bands).tolist())
    found = [check_int(f"bands[{place}]", b, 1, "use a whole number of bands") for place, b in given]
    why = f"must be <= {most}, the steps of a pass and of the run; use fewer"
    refuse_where(np.greater(found, most), "bands", np.array(found), why, "{:.0f}".format)
    return [b for b in dict.fromkeys(found) if b > 1]
