"""A small language model, pre-trained on a public dictionary, tuned privately with LoRA on WordNet's glosses.

    python examples/wordnet_lora/wordnet_lora.py --data FOLDER --cache FOLDER --out FOLDER

Needs the extras `training` and `examples`, and the files of Debian's packages wordnet-base and dict-gcide.  The task:
to which of 45 lexicographer files (noun.animal, verb.motion, ...) does a gloss belong?  Every run gets a row of
wordnet_lora.csv, and is not repeated where it has one.  wordnet_lora.png is drawn from the rows.
"""

import argparse
import collections
import csv
import dataclasses
import itertools
import math
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dictionaries import CLASSES, MissingData, Vocabulary, read_definitions, read_glosses
from encoder import STEPS, in_attention, initial, pretrain, scores
from flax import serialization, traverse_util

from jaxacct.core.progress import Progress
from jaxacct.training import LoRA, Plan, Trainer, lora

DELTA = 1e-6
"""Below one over the number of glosses, 117,659."""
BATCH = 1024
"""Expected size of a batch with privacy, and exact size of a batch without."""
TUNING_STEPS = 300
CLIP_NORM, RANK = 1.0, 8
TEST_SHARE = 10
"""One gloss in ten is for testing and does not count as private data."""
WAYS = {
    "lora": "LoRA, pre-trained",
    "full": "all parameters, pre-trained",
    "random": "LoRA, random weights",
    "open": "LoRA, pre-trained, not private",
}
LEARNING_RATES = {"lora": 1e-2, "full": 3e-3, "random": 1e-2, "open": 1e-2}
"""Learning rates of Adam, chosen on the public rehearsal (README)."""
SETTINGS = ["task", "way", "epsilon", "seed", "steps", "batch", "clip_norm", "learning_rate", "pretraining_steps"]
FOUND = ["trained_parameters", "noise_multiplier", "epsilon_spent", "accuracy", "seconds"]
"""Columns of the table: what a run was asked, and what came out."""


# The two tasks


def glosses_of_wordnet(folder, definitions):
    """(texts, classes) of the private task."""
    return read_glosses(folder)


def public_rehearsal(folder, definitions):
    """(texts, classes) of a public task of the same kind, on which settings are chosen: GCIDE's definitions.

    The class of a definition is its subject (Zool., Bot., ...) if that is one of the 39 most frequent, else its part of
    speech if that is one of five, else the 45th class.
    """
    subjects = collections.Counter(sense.field for sense in definitions if sense.field)
    names = [name for name, _ in subjects.most_common(CLASSES - 6)] + ["n.", "a.", "v. t.", "v. i.", "adv."]
    numbers = {name: number for number, name in enumerate(names)}
    classes = [numbers.get(d.field, numbers.get(d.part, CLASSES - 1)) for d in definitions]
    return [sense.text for sense in definitions], np.array(classes, np.int32)


TASKS = {"wordnet": glosses_of_wordnet, "rehearsal": public_rehearsal}


def read_task(task, folder):
    """(definitions, vocabulary, data to train on, data to test on); ends the script if the data are missing."""
    try:
        definitions = read_definitions(folder)
        texts, classes = TASKS[task](folder, definitions)
    except MissingData as error:
        sys.exit(str(error))
    vocabulary = Vocabulary.of([d.text for d in definitions] + [d.headword for d in definitions])
    return definitions, vocabulary, *split(texts, classes, vocabulary)


def split(texts, classes, vocabulary):
    """((numbers, classes) to train on, the same to test on), in an order that is the same for all runs."""
    order = np.random.default_rng(0).permutation(len(classes))
    numbers, classes = vocabulary.encode(texts)[order], classes[order]
    cut = len(classes) // TEST_SHARE
    return (numbers[cut:], classes[cut:]), (numbers[:cut], classes[:cut])


# Public pre-training


def pretrained(definitions, vocabulary, seed, steps, cache):
    """Pre-trained weights for a seed: read from the cache, or made now and saved there."""
    path = None if cache is None else pathlib.Path(cache) / f"pretrained_{seed}_{steps}.msgpack"
    if path is not None and path.is_file():
        return serialization.msgpack_restore(path.read_bytes())
    print(f"pre-training on {len(definitions):,} public definitions, seed {seed}", flush=True)
    numbers = vocabulary.encode([sense.text for sense in definitions])
    headwords = vocabulary.encode([sense.headword for sense in definitions], 1)[:, 0]
    weights, _ = pretrain(numbers, headwords, len(vocabulary), seed, steps)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(serialization.msgpack_serialize(jax.tree.map(np.asarray, weights)))
    return weights


# Tuning


def starting_point(way, weights, vocabulary, seed):
    """The parameters before tuning: with LoRA in the attention, except for the way "full", which trains all weights."""
    if way == "full":
        return weights
    params = initial(len(vocabulary), seed) if way == "random" else weights
    return lora(params, RANK, where=in_attention, key=jax.random.key(seed))


def plain(params):
    """The parameters of the encoder, with each product of LoRA's adapters added to the matrix that they adapt."""
    return params.merge() if isinstance(params, LoRA) else params


def is_head(path):
    """Whether a path is that of a parameter of the layer that gives the scores of the classes."""
    return path.startswith("head/")


def loss(params, example):
    """Cross-entropy of one gloss."""
    numbers, label = example
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, numbers), label)


def optimizer_of(rate, steps):
    """Adam whose learning rate goes down from `rate` to 0 along a cosine."""
    return optax.adam(optax.cosine_decay_schedule(rate, steps))


def tune_privately(params, epsilon, train, steps, rate, clip_norm, progress=True):
    """(plan, state) of DP-SGD: on LoRA and the head, or on all parameters where there is no LoRA."""
    plan = Plan(
        target_epsilon=epsilon,
        target_delta=DELTA,
        dataset_size=len(train[1]),
        expected_batch_size=BATCH,
        steps=steps,
    )
    trainable = is_head if isinstance(params, LoRA) else None  # the adapters are trained anyhow
    trainer = Trainer(loss, optimizer_of(rate, steps), plan, clip_norm, trainable=trainable)
    return plan, trainer.fit(trainer.init(params), train, progress=progress)


def tune_openly(params, train, steps, rate, seed, progress=True):
    """Parameters after `steps` steps of Adam on LoRA and the head, without clipping or noise."""
    base = traverse_util.path_aware_map(lambda path, _: is_head("/".join(path)), params.base)
    trained = dataclasses.replace(params, base=base, adapters=jax.tree.map(lambda _: True, params.adapters))
    optimizer = optax.partition({True: optimizer_of(rate, steps), False: optax.set_to_zero()}, trained)
    numbers, classes = (jnp.asarray(a) for a in train)

    @jax.jit
    def update(carried, key):
        params, state = carried
        rows = jax.random.randint(key, (BATCH,), 0, len(classes))
        losses = lambda p: jax.vmap(loss, (None, 0))(p.merge(), (numbers[rows], classes[rows]))
        changes, state = optimizer.update(jax.grad(lambda p: jnp.mean(losses(p)))(params), state, params)
        return optax.apply_updates(params, changes), state

    carried, bar = (params, optimizer.init(params)), Progress(steps, progress, unit="steps")
    for step, key in enumerate(jax.random.split(jax.random.key(seed), steps)):
        carried = jax.block_until_ready(update(carried, key))
        bar.update(step + 1)
    return carried[0]


def accuracy_on(params, test):
    """Share of the test texts whose class has the highest score."""
    guess = jax.jit(jax.vmap(lambda params, numbers: jnp.argmax(scores(params, numbers)), (None, 0)))
    return float(np.mean(np.asarray(guess(params, test[0])) == test[1]))


# Rows and picture


def asked(args):
    """The settings of every run that is asked for: the first columns of its row."""
    for seed, way in itertools.product(args.seeds, args.ways):
        for epsilon in [math.inf] if way == "open" else args.epsilon:
            rate = args.learning_rate or LEARNING_RATES[way]
            clip_norm = math.inf if way == "open" else args.clip_norm
            before = 0 if way == "random" else args.pretraining_steps
            values = args.task, way, epsilon, seed, args.steps, BATCH, clip_norm, rate, before
            yield dict(zip(SETTINGS, map(str, values), strict=True))


def run(settings, train, test, weights, vocabulary, progress=True):
    """Train once, and return the settings and results as a row of the table."""
    begin = time.perf_counter()
    way, seed, steps = settings["way"], int(settings["seed"]), int(settings["steps"])
    rate, clip_norm = float(settings["learning_rate"]), float(settings["clip_norm"])
    params = starting_point(way, weights, vocabulary, seed)
    if way == "open":
        params = tune_openly(params, train, steps, rate, seed, progress)
        noise, spent = 0.0, math.inf
    else:
        plan, state = tune_privately(params, float(settings["epsilon"]), train, steps, rate, clip_norm, progress)
        params, noise, spent = state.params, plan.noise_multiplier, float(state.epsilon.upper)
    adapters, head = (params.adapters, params.base["head"]) if isinstance(params, LoRA) else ({}, params)
    trained = sum(leaf.size for leaf in jax.tree.leaves((adapters, head)))
    accuracy = accuracy_on(plain(params), test)
    found = trained, noise, spent, accuracy, round(time.perf_counter() - begin)
    return settings | dict(zip(FOUND, map(str, found), strict=True))


def read_rows(path):
    """Rows of earlier runs; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    """All rows, one a run; the old file stays until the new one is complete."""
    new = path.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


def summary(rows):
    """{way: {epsilon: accuracies in per cent, one a seed}}."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        found[row["way"]][float(row["epsilon"])].append(100 * float(row["accuracy"]))
    return found


def table(rows):
    """Lines of a table in Markdown: mean accuracy over the seeds, and the lowest and highest."""
    found = summary(rows)
    epsilons = sorted({epsilon for of_way in found.values() for epsilon in of_way})
    heads = ["not private" if epsilon == math.inf else f"epsilon = {epsilon:g}" for epsilon in epsilons]
    yield "| | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for way, of_way in found.items():
        cells = [
            f"{np.mean(of_way[e]):.1f} ({min(of_way[e]):.1f} to {max(of_way[e]):.1f})" if e in of_way else ""
            for e in epsilons
        ]
        yield f"| {WAYS[way]} | " + " | ".join(cells) + " |"


def draw(rows, path):
    """Accuracy against epsilon: means over the seeds, with bars from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    axes = figure.add_subplot()
    for way, of_way in summary(rows).items():
        if way == "open":
            axes.axhline(np.mean(of_way[math.inf]), color="0.4", linestyle="--", label=WAYS[way])
            continue
        epsilons = sorted(of_way)
        means = np.array([np.mean(of_way[e]) for e in epsilons])
        ends = np.array([[min(of_way[e]), max(of_way[e])] for e in epsilons]).T
        axes.errorbar(epsilons, means, np.abs(ends - means), marker="o", markersize=4, capsize=3, label=WAYS[way])
    axes.set(xscale="log", xlabel="epsilon", ylabel="test accuracy (%)", ylim=(0, None))
    ticks = sorted({float(row["epsilon"]) for row in rows if row["way"] != "open"})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(f"WordNet's glosses, 45 classes, expected batch {BATCH}, $\\delta = 10^{{-6}}$", fontsize=9)
    axes.grid(color="0.9")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=200)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = os.environ.get("WORDNET_LORA_DATA", "/")
    parser.add_argument(
        "--data",
        default=folder,
        metavar="FOLDER",
        help="where the packages are unpacked (default: $WORDNET_LORA_DATA, or / for installed packages)",
    )
    parser.add_argument("--cache", metavar="FOLDER", help="keep pre-trained weights here")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="for wordnet_lora.csv and .png (default: here)")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--task", choices=TASKS, default="wordnet")
    parser.add_argument("--steps", type=int, default=TUNING_STEPS)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--clip-norm", type=float, default=CLIP_NORM)
    parser.add_argument("--pretraining-steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    definitions, vocabulary, train, test = read_task(args.task, args.data)
    largest = np.bincount(test[1]).max() / len(test[1])
    print(
        f"{len(train[1]):,} texts to train on, {len(test[1]):,} to test on; the largest class is {largest:.1%}",
        flush=True,
    )
    folder = pathlib.Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "wordnet_lora.csv"
    weights = {}
    for settings in asked(args):
        rows, seed = read_rows(path), int(settings["seed"])
        if any(settings.items() <= row.items() for row in rows):
            continue
        if seed not in weights:
            weights[seed] = pretrained(definitions, vocabulary, seed, args.pretraining_steps, args.cache)
        print(f"{WAYS[settings['way']]}, epsilon {settings['epsilon']}, seed {seed}", flush=True)
        row = run(settings, train, test, weights[seed], vocabulary)
        write_rows(path, [*rows, row])
        print(
            f"accuracy {float(row['accuracy']):.1%}, epsilon spent {row['epsilon_spent']}, {row['seconds']} s",
            flush=True,
        )
    shown = [row for row in read_rows(path) if any(settings.items() <= row.items() for settings in asked(args))]
    print("\n".join(table(shown)))
    draw(shown, folder / "wordnet_lora.png")


if __name__ == "__main__":
    main()
