"""CPU seconds of every public question over the whole grid: median and worst of each cell, as a table and a picture.

    python benchmarks/operations.py [--only WORD ...] [--points 3] [--seconds 12] [--again]

A cell is a question, a noise multiplier and a sampling rate. It pools a few numbers of steps and deltas, drawn from the
grid with a fixed seed. Calibrations take the noise as their target epsilon. Every answered point is written to
points.csv at once, so that the next run goes on where a stopped run ended. After `--seconds` of CPU a question waits
for the next run; `--again` asks the questions of `--only` anew. At the end cells.csv and operations.png are made
of all points, and the cells above their limit are printed. A question starts in a fresh process after a warm-up, so
that imports do not count. One run takes some 12 CPU minutes.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

NOISE = (0.01, 0.1, 1.0, 10.0, 100.0)
RATE = (1e-9, 1e-6, 1e-3, 0.1, 1.0)
STEPS = (1.0, 10.0, 1e3, 1e6, 1e9)
DELTA = (1e-2, 1e-6, 1e-20, 1e-100)
EPSILON = {1e-2: 0.1, 1e-6: 1.0, 1e-20: 10.0, 1e-100: 100.0, 1e-200: 300.0, 1e-300: 600.0}
"""Epsilon at which delta is asked, for each delta of the grid."""
FAR_NOISE, FAR_DELTA = (1e-12, 1e-3, 1e6, 1e20, 1e42), (1e-6, 1e-100, 1e-200, 1e-300)
STOP = 20.0
"""CPU seconds after which a point is stopped."""
COLUMNS = ("question", "noise", "rate", "steps", "delta", "seconds", "width", "status")


class Point(NamedTuple):
    noise: float
    rate: float
    steps: float
    delta: float


class Stopped(BaseException):
    """The time of a point is over."""


def questions() -> dict[str, tuple[float, object]]:
    """Return (limit in CPU seconds, question of a point) by name."""
    import jaxacct as ja
    from jaxacct.selection import Geometric, select
    from jaxacct.training import Plan

    slots = lambda p: float(np.round(1.0 / p.rate))
    passes = lambda p: float(max(np.round(p.steps * p.rate), 1.0))
    size = lambda p: float(max(1000.0, np.round(10.0 / p.rate)))
    batch = lambda p: float(max(np.round(p.rate * size(p)), 1.0))
    noise = lambda p: ja.Gaussian(p.noise)
    steps_of = {
        "Poisson": lambda p: ja.dp_sgd(p.noise, p.rate, p.steps),
        "cyclic Poisson": lambda p: ja.dp_sgd(p.noise, p.rate, p.steps, sampling="cyclic_poisson", bands=4, groups=4),
        "truncated Poisson": lambda p: ja.repeat(
            ja.TruncatedPoissonSampled(noise(p), p.rate, size(p), np.ceil(1.5 * batch(p))), p.steps
        ),
        "without replacement": lambda p: ja.repeat(ja.SampledWithoutReplacement(noise(p), p.rate), p.steps),
        "with replacement": lambda p: ja.repeat(ja.SampledWithReplacement(noise(p), batch(p), size(p)), p.steps),
        "shuffled": lambda p: ja.repeat(ja.ShuffledBatches(noise(p), slots(p)), passes(p)),
        "random allocation": lambda p: ja.repeat(ja.RandomAllocation(noise(p), slots(p)), passes(p)),
        "balls in bins": lambda p: ja.BallsInBins(noise(p), slots(p), passes(p)),
        "groups of 2": lambda p: ja.dp_sgd(p.noise, p.rate, p.steps, group=2),
        "Laplace": lambda p: ja.repeat(ja.PoissonSampled(ja.Laplace(p.noise), p.rate), p.steps),
        "two runs": lambda p: ja.compose(
            ja.dp_sgd(p.noise, p.rate, p.steps), ja.dp_sgd(2.0 * p.noise, p.rate, p.steps), ja.Laplace(10.0)
        ),
        "exponential": lambda p: ja.repeat(ja.ExponentialMechanism(1.0 / p.noise), p.steps),
        "discrete Gaussian": lambda p: ja.repeat(ja.DiscreteGaussian(p.noise), p.steps),
        "response": lambda p: ja.repeat(ja.RandomizedResponse(0.5 + 0.5 * p.rate / (1.0 + p.noise)), p.steps),
        "zCDP": lambda p: ja.ZCDP(0.5 * p.rate * p.steps / p.noise**2),
    }
    run = steps_of["Poisson"]
    relation = {"shuffled": "zero_out", "without replacement": "replace_one", "with replacement": "replace_one"}
    found: dict[str, tuple[float, object]] = {}
    for name, made in steps_of.items():
        word = {"relation": relation[name]} if name in relation else {}
        found[f"epsilon, {name}"] = 1.0, lambda p, made=made, word=word: ja.epsilon(made(p), p.delta, **word)
        if name in ("Poisson", "random allocation", "without replacement", "Laplace"):
            found[f"delta, {name}"] = 1.0, lambda p, made=made, word=word: ja.delta(made(p), EPSILON[p.delta], **word)
    found["epsilon, Poisson, replace_one"] = 1.0, lambda p: ja.epsilon(run(p), p.delta, relation="replace_one")
    found["epsilon, one round"] = 1.0, lambda p: ja.epsilon(ja.RandomAllocation(noise(p), slots(p)), p.delta)
    found["epsilon_gradient"] = 1.0, lambda p: ja.epsilon_gradient(run(p), p.delta)
    found["rdp_epsilon"] = 1.0, lambda p: ja.rdp_epsilon(run(p), p.delta)
    found["renyi"] = 1.0, lambda p: ja.profile(run(p)).renyi(4.0)
    found["tradeoff"] = 1.0, lambda p: ja.profile(run(p)).tradeoff(0.1)
    found["advantage"] = 1.0, lambda p: ja.profile(run(p)).advantage()
    found["true_positive_rate"] = 1.0, lambda p: ja.profile(run(p)).true_positive_rate(max(p.delta, 1e-10))
    found["gdp_mu"] = 1.0, lambda p: ja.profile(run(p)).gdp_mu()
    found["risk"] = 3.0, lambda p: ja.risk(run(p))
    goal = lambda p: {"target_epsilon": p.noise, "target_delta": p.delta}
    rest = lambda p: {"sampling_probability": p.rate, "steps": p.steps}
    noise_for = ja.calibrate_noise_multiplier
    found["noise"] = 3.0, lambda p: noise_for(**goal(p), **rest(p))
    found["noise, replace_one"] = 3.0, lambda p: noise_for(**goal(p), **rest(p), relation="replace_one")
    found["noise, random allocation"] = (
        3.0,
        lambda p: noise_for(**goal(p), slots=slots(p), epochs=passes(p), sampling="random_allocation"),
    )
    found["noise, without replacement"] = 3.0, lambda p: noise_for(**goal(p), **rest(p), sampling="without_replacement")
    found["noise, target_advantage"] = 3.0, lambda p: noise_for(target_advantage=0.05, **rest(p))
    found["noise, target_tpr"] = 3.0, lambda p: noise_for(target_tpr=0.02, at_fpr=0.01, **rest(p))
    found["noise, target_mu"] = 3.0, lambda p: noise_for(target_mu=min(p.noise, 6.0), **rest(p))
    found["rate"] = (
        3.0,
        lambda p: ja.calibrate_sampling_probability(1.0, p.delta, noise_multiplier=p.noise, steps=p.steps),
    )
    found["steps"] = (
        3.0,
        lambda p: ja.calibrate_steps(1.0, p.delta, noise_multiplier=p.noise, sampling_probability=p.rate),
    )
    found["calibrate"] = (
        3.0,
        lambda p: ja.calibrate(
            lambda scale: ja.repeat(ja.PoissonSampled(ja.Laplace(scale), p.rate), p.steps),
            **goal(p),
            bracket=(1e-3, 1e9),
        ),
    )
    law = Geometric(0.1)
    found["selection, epsilon"] = 5.0, lambda p: ja.epsilon(select(run(p), law), p.delta)
    found["selection, delta"] = 5.0, lambda p: ja.delta(select(run(p), law), EPSILON[p.delta])
    found["noise with repetitions"] = 5.0, lambda p: noise_for(**goal(p), **rest(p), repetitions=law)
    found["repetitions_allowed"] = 5.0, lambda p: ja.repetitions_allowed(run(p), 12.0, p.delta)
    data = lambda p: {"dataset_size": int(size(p)), "expected_batch_size": batch(p), "steps": int(p.steps)}
    goal_of_plan = lambda p: {"target_epsilon": p.noise, "target_delta": p.delta}
    found["plan"] = 5.0, lambda p: Plan(**goal_of_plan(p), **data(p))
    found["plan with repetitions"] = 5.0, lambda p: Plan(**goal_of_plan(p), **data(p), repetitions=law)
    found["far: epsilon"] = 2.0, found["epsilon, Poisson"][1]
    found["far: delta"] = 2.0, found["delta, Poisson"][1]
    found["far: epsilon, random allocation"] = 2.0, found["epsilon, random allocation"][1]
    found["far: noise"] = 2.0, lambda p: noise_for(1.0, p.delta, **rest(p))
    return found


def points(name: str, count: int) -> list[Point]:
    """Draw the points of all cells of a question."""
    noises, deltas = (FAR_NOISE, FAR_DELTA) if name.startswith("far:") else (NOISE, DELTA)
    found = []
    for i, noise in enumerate(noises):
        for j, rate in enumerate(RATE):
            rng = np.random.default_rng([i, j, *name.encode()])
            drawn = rng.permutation(len(STEPS) * len(deltas))[:count].tolist()
            found += [Point(noise, rate, STEPS[one % len(STEPS)], deltas[one // len(STEPS)]) for one in drawn]
    order = np.random.default_rng(len(found)).permutation(len(found))
    return [found[place] for place in order]


def ask(name: str, count: int, budget: float, table: Path) -> None:
    """Ask a question at points that the table lacks, for `budget` CPU seconds, and write each answer to the table."""
    warnings.simplefilter("ignore")
    _, question = questions()[name]
    known = {tuple(map(float, row[1:5])) for row in rows_of(table) if row[0] == name}

    def stop(*_: object) -> None:
        raise Stopped

    signal.signal(signal.SIGPROF, stop)
    warm = False
    for point in points(name, count):
        if tuple(point) in known:
            continue
        if not warm:
            import scipy.optimize  # noqa: F401 - the first lattice imports it, in .2 s

            warm = True
            for _ in range(2):
                once(question, Point(1.0, 0.1, 10.0, 1e-6))
            end = time.process_time() + budget
        if time.process_time() > end:
            break
        seconds, width, status = once(question, point)
        with table.open("a", newline="") as file:
            csv.writer(file).writerow([name, *point, f"{seconds:.4f}", f"{width:.2g}", status])


def once(question: object, point: Point) -> tuple[float, float, str]:
    """Return (CPU seconds, relative width, status) of one answer."""
    signal.setitimer(signal.ITIMER_PROF, STOP)
    begin, width = time.process_time(), np.nan
    try:
        found = question(point)
        bounds = getattr(found, "epsilon", found)
        bounds = bounds if hasattr(bounds, "upper") else None
        status = str(np.ravel(getattr(found, "status", getattr(bounds, "status", "")))[0])
        if bounds is not None:
            with np.errstate(all="ignore"):
                width = float(np.max((np.asarray(bounds.upper) - bounds.lower) / bounds.upper))
    except Stopped:
        status = "stopped"
    except Exception as error:  # refused, or a defect: its first words say which
        status = f"{type(error).__name__}: {str(error)[:60]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return time.process_time() - begin, width, status


def rows_of(table: Path) -> list[list[str]]:
    with table.open(newline="") as file:
        return list(csv.reader(file))[1:]


def cells_of(table: Path) -> dict[tuple[str, float, float], list[tuple[float, list[str]]]]:
    """Return the seconds and rows of each cell."""
    found = defaultdict(list)
    for row in rows_of(table):
        found[row[0], float(row[1]), float(row[2])].append((float(row[5]), row))
    return dict(found)


def report(table: Path, limits: dict[str, float]) -> None:
    """Write cells.csv and the picture; print every cell whose worst point is above its limit."""
    cells = cells_of(table)
    with (table.parent / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["question", "limit", "noise", "rate", "median", "worst", "steps", "delta", "width", "status"])
        for (name, noise, rate), some in cells.items():
            worst, row = max(some)
            median = float(np.median([seconds for seconds, _ in some]))
            writer.writerow([name, limits[name], noise, rate, f"{median:.3f}", f"{worst:.3f}", *row[3:5], *row[6:]])
            if worst > limits[name]:
                print(f"{name:36} noise {noise:<8g} rate {rate:<8g} {worst:6.2f} s  {', '.join(row[3:5] + row[6:])}")
    over = sum(max(some)[0] > limits[name] for (name, _, _), some in cells.items())
    print(f"{over} of {len(cells)} cells are above their limit")
    draw(cells, limits, table.parent / "operations.png")


def draw(cells: dict, limits: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in limits if any(name == key[0] for key in cells)]
    across = 6
    figure, axes = pyplot.subplots(-(-len(names) // across), across, figsize=(20, 2.9 * -(-len(names) // across)))
    for axis in np.ravel(axes)[len(names) :]:
        axis.axis("off")
    for axis, name in zip(np.ravel(axes), names, strict=False):
        noises = FAR_NOISE if name.startswith("far:") else NOISE
        pooled = [[[x[0] for x in cells.get((name, n, r), [])] or [np.nan] for n in noises] for r in RATE]
        shares = np.array([[max(one) / limits[name] for one in line] for line in pooled])
        axis.imshow(np.log10(shares + 1e-9), vmin=-2.0, vmax=1.0, cmap="RdYlGn_r", aspect="auto", origin="lower")
        for j, line in enumerate(pooled):
            for i, one in enumerate(line):
                if np.isnan(one).any():  # a cell that was not asked
                    continue
                axis.text(i, j, f"{np.median(one):.2g}\n{max(one):.2g}", ha="center", va="center", fontsize=6.5)
        axis.set_title(f"{name} ({limits[name]:g} s)", fontsize=9)
        axis.set_xticks(range(5), [f"{n:g}" for n in noises], fontsize=7)
        axis.set_yticks(range(5), [f"{r:g}" for r in RATE], fontsize=7)
    figure.suptitle(
        "CPU seconds, median over worst of each cell; noise (or target epsilon) across, rate up; red: above the limit"
    )
    figure.tight_layout(rect=(0.0, 0.0, 1.0, 0.985))
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[""], help="questions that begin so")
    parser.add_argument("--points", type=int, default=3, help="points of a cell")
    parser.add_argument("--seconds", type=float, default=12.0, help="CPU seconds of a question in this run")
    parser.add_argument("--again", action="store_true", help="forget the points of these questions first")
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_suffix(""))
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    given = parser.parse_args()
    table = given.folder / "points.csv"
    if given.ask:
        ask(given.ask, given.points, given.seconds, table)
        return
    limits = {name: limit for name, (limit, _) in questions().items()}
    chosen = [name for name in limits if name.startswith(tuple(given.only))]
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = [row for row in rows_of(table) if not (given.again and row[0] in chosen)] if table.exists() else []
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *(row for row in kept if row[0] in limits)])
    for name in chosen:
        command = [sys.executable, str(Path(__file__).resolve()), "--ask", name]
        more = ["--points", str(given.points), "--seconds", str(given.seconds), "--folder", str(given.folder)]
        begin = os.times()
        subprocess.run([*command, *more], check=False)
        done = os.times()
        busy = done.children_user + done.children_system - begin.children_user - begin.children_system
        print(f"{name:36} {busy:7.1f} CPU s", flush=True)
    report(table, limits)


if __name__ == "__main__":
    main()
