"""WordNet's glosses with noise that steps share: DP-SGD, random allocation and banded noise at equal epsilon.

    python examples/wordnet_lora/correlated_noise.py --data FOLDER --cache FOLDER --out FOLDER

All runs start from the same pre-trained weights, and tune LoRA and the head with the same number of steps and the same
batch size.  `advise_strategy` finds the noise multiplier of each way, and the number of bands with the least error.
Every run gets a row of correlated_noise.csv; a run that already has a row there is skipped.  correlated_noise.png is
drawn from the rows.

Needs the extras `training` and `examples`, and the data of wordnet_lora.py.
"""

import argparse
import collections
import itertools
import os
import pathlib
import time

import numpy as np
import optax
from encoder import STEPS
from wordnet_lora import (
    BATCH,
    CLIP_NORM,
    DELTA,
    TASKS,
    TUNING_STEPS,
    accuracy_on,
    is_head,
    loss,
    optimizer_of,
    pretrained,
    read_rows,
    read_task,
    starting_point,
    write_rows,
)

from jaxacct.training import Plan, Trainer, advise_strategy

WAYS = {"poisson": "DP-SGD", "random_allocation": "random allocation", "cyclic_poisson": "banded noise"}
OPTIMIZERS = {
    "adam": optimizer_of,
    "momentum": lambda rate, steps: optax.sgd(optax.cosine_decay_schedule(rate, steps), 0.9),
}
SETTINGS = ["task", "optimizer", "learning_rate", "way", "epsilon", "seed", "steps"]
FOUND = ["bands", "noise_multiplier", "relative_error", "epsilon_spent", "accuracy", "seconds"]
"""Columns of the table: what a run was asked, and what came out."""


def plans(epsilon, size, steps, bands):
    """{way: (bands, error of the prefix sums relative to DP-SGD, plan)}: the option of least error for each way."""
    run = {"dataset_size": size, "batch_size": BATCH, "steps": steps, "bands": bands}
    advice, found = advise_strategy(target_epsilon=epsilon, target_delta=DELTA, **run), {}
    for way in WAYS:
        best = min((one for one in advice.options if one.sampling == way), key=lambda one: one.error)
        found[way] = best.strategy.overlap, best.relative, Plan(**advice.plan_arguments(best))
    return found


def run(settings, planned, train, test, weights, vocabulary):
    """Train once, and return the settings and results as a row of the table."""
    begin, (bands, relative, plan) = time.perf_counter(), planned
    optimizer = OPTIMIZERS[settings["optimizer"]](float(settings["learning_rate"]), plan.steps)
    trainer = Trainer(loss, optimizer, plan, CLIP_NORM, trainable=is_head)  # the adapters are trained anyhow
    params = starting_point("lora", weights, vocabulary, int(settings["seed"]))
    state = trainer.fit(trainer.init(params), train)
    accuracy = accuracy_on(state.params.merge(), test)
    spent, seconds = float(state.epsilon.upper), round(time.perf_counter() - begin)
    found = bands, plan.noise_multiplier, relative, spent, accuracy, seconds
    return settings | dict(zip(FOUND, map(str, found), strict=True))


def summary(rows):
    """{optimizer: {(way, rate): {epsilon: accuracies in per cent, one a seed}}}."""
    found = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    for row in rows:
        way = row["way"], float(row["learning_rate"])
        found[row["optimizer"]][way][float(row["epsilon"])].append(100 * float(row["accuracy"]))
    return found


def table(rows):
    """Lines of a table in Markdown: mean accuracy over the seeds, and its standard deviation."""
    epsilons = sorted({float(row["epsilon"]) for row in rows})
    yield "| optimizer, learning rate | | " + " | ".join(f"epsilon = {epsilon:g}" for epsilon in epsilons) + " |"
    yield "|---" * (len(epsilons) + 2) + "|"
    for optimizer, ways in summary(rows).items():
        for (way, rate), of_way in ways.items():
            cells = [
                f"{np.mean(of_way[e]):.1f} ± {np.std(of_way[e], ddof=len(of_way[e]) > 1):.1f}" if e in of_way else ""
                for e in epsilons
            ]
            yield f"| {optimizer}, {rate:g} | {WAYS[way]} | " + " | ".join(cells) + " |"


def draw(rows, path):
    """Every run, and the mean of each way, against epsilon: a panel for each optimizer and learning rate."""
    from matplotlib.figure import Figure

    panels = collections.defaultdict(dict)
    for optimizer, ways in summary(rows).items():
        for (way, rate), of_way in ways.items():
            panels[optimizer, rate][way] = of_way
    figure = Figure(figsize=(1.2 + 3.1 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for at, ((optimizer, rate), ways) in zip(axes, panels.items(), strict=True):
        for number, (way, of_way) in enumerate(ways.items()):
            epsilons = sorted(of_way)
            shifted = [epsilon * 1.04 ** (number - 1) for epsilon in epsilons]
            for epsilon, place in zip(epsilons, shifted, strict=True):
                at.plot(
                    [place] * len(of_way[epsilon]), of_way[epsilon], "o", color=f"C{number}", alpha=0.4, markersize=3
                )
            means = [np.mean(of_way[e]) for e in epsilons]
            at.plot(shifted, means, "_-", color=f"C{number}", markersize=14, label=WAYS[way])
        at.set(xscale="log", xlabel="epsilon", title=f"{optimizer}, learning rate {rate:g}")
        at.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        at.margins(x=0.3)
        at.minorticks_off()
        at.grid(color="0.9")
    axes[0].set(ylabel="test accuracy (%)")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=200)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = os.environ.get("WORDNET_LORA_DATA", "/")
    parser.add_argument("--data", default=data, metavar="FOLDER", help="where the packages are unpacked")
    parser.add_argument("--cache", metavar="FOLDER", help="keep pre-trained weights here")
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="for correlated_noise.csv and .png (default: here)"
    )
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--rates", type=float, nargs="+", help="learning rate of each optimizer", default=[1e-2, 1.0])
    parser.add_argument(
        "--bands", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="numbers of bands to choose from"
    )
    parser.add_argument("--task", choices=TASKS, default="wordnet")
    parser.add_argument("--steps", type=int, default=TUNING_STEPS)
    parser.add_argument("--pretraining-steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    definitions, vocabulary, train, test = read_task(args.task, args.data)
    weights = pretrained(definitions, vocabulary, 0, args.pretraining_steps, args.cache)
    folder = pathlib.Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path, planned = folder / "correlated_noise.csv", {}
    kinds = zip(args.optimizers, args.rates, strict=True)
    asked = [
        dict(zip(SETTINGS, map(str, (args.task, *kind, way, epsilon, seed, args.steps)), strict=True))
        for seed, epsilon, kind, way in itertools.product(range(args.runs), args.epsilon, kinds, args.ways)
    ]
    for settings in asked:
        rows, epsilon = read_rows(path), float(settings["epsilon"])
        if any(settings.items() <= row.items() for row in rows):
            continue
        if epsilon not in planned:
            planned[epsilon] = plans(epsilon, len(train[1]), args.steps, args.bands)
        row = run(settings, planned[epsilon][settings["way"]], train, test, weights, vocabulary)
        write_rows(path, [*rows, row])
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    shown = [row for row in read_rows(path) if any(settings.items() <= row.items() for settings in asked)]
    print("\n".join(table(shown)))
    draw(shown, folder / "correlated_noise.png")


if __name__ == "__main__":
    main()
