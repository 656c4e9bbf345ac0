"""A small language model, pre-trained on a public dictionary, tuned privately with LoRA on WordNet's glosses.

    python examples/wordnet_lora/wordnet_lora.py --data FOLDER --cache FOLDER --out FOLDER

Needs the extras `training` and `examples`, and the files of Debian's packages wordnet-base and dict-gcide.  The task: to
which of 45 lexicographer files (noun.animal, verb.motion, ...) does a gloss belong?  Writes a row of wordnet_lora.csv
for every run, and draws wordnet_lora.png from all rows; a run that has its row is not repeated.
"""

import argparse
import collections
import csv
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
from encoder import RANK, STEPS, initial, pretrain, scores, with_weights
from flax import serialization

from jaxacct.progress import Progress
from jaxacct.training import Plan, Trainer

DELTA = 1e-6
"""Below one over the number of glosses, 117,659."""
BATCH = 1024
"""Expected size of a private batch; the size of one that is not private."""
TUNING_STEPS = 300
CLIP_NORM = 1.0
TEST_SHARE = 10
"""One in so many glosses is for testing, and no private data."""
WAYS = {
    "lora": "LoRA, pre-trained",
    "full": "all parameters, pre-trained",
    "random": "LoRA, random weights",
    "open": "LoRA, pre-trained, not private",
}
LEARNING_RATES = {"lora": 5e-3, "full": 1e-3, "random": 5e-3, "open": 5e-3}
"""Of Adam; chosen on the public rehearsal (README)."""
COLUMNS = (
    ["task", "way", "epsilon", "seed", "accuracy", "spent", "delta", "noise_multiplier", "trained", "steps"]
    + ["expected_batch_size", "clip_norm", "learning_rate", "pretraining_steps", "seconds"]
)


# The two tasks


def glosses_of_wordnet(folder, definitions):
    """(texts, classes) of the private task."""
    return read_glosses(folder)


def public_rehearsal(folder, definitions):
    """(texts, classes) of a public task of the same kind, to choose settings on: GCIDE's own marks as 45 classes.

    The class of a definition is its subject (Zool., Bot., ...) if that is one of the 39 most frequent, else its part of
    speech.
    """
    subjects = collections.Counter(sense.field for sense in definitions if sense.field)
    names = [name for name, _ in subjects.most_common(CLASSES - 6)] + ["n.", "a.", "v. t.", "v. i.", "adv."]
    numbers = {name: number for number, name in enumerate(names)}
    classes = [numbers.get(d.field, numbers.get(d.part, CLASSES - 1)) for d in definitions]
    return [sense.text for sense in definitions], np.array(classes, np.int32)


TASKS = {"wordnet": glosses_of_wordnet, "rehearsal": public_rehearsal}


def split(texts, classes, vocabulary):
    """((numbers, classes) to train on, the same to test on), in an order that is the same for all runs."""
    order = np.random.default_rng(0).permutation(len(classes))
    numbers, classes = vocabulary.encode(texts)[order], classes[order]
    cut = len(classes) // TEST_SHARE
    return (numbers[cut:], classes[cut:]), (numbers[:cut], classes[:cut])


# Public pre-training


def pretrained(definitions, vocabulary, seed, steps, cache):
    """Weights for a seed, from the cache or made now and put there."""
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


def trained_part(way):
    """Which parameters are trained: a function of their path."""
    if way == "full":
        return lambda path: True
    return lambda path: "lora_" in path or path.startswith("head")


def starting_point(way, weights, vocabulary, seed):
    """(parameters, rank of LoRA) before tuning."""
    rank = 0 if way == "full" else RANK
    params = initial(len(vocabulary), rank, seed + 100)
    return (params if way == "random" else with_weights(params, weights)), rank


def loss_of(rank):
    """(params, example) -> cross-entropy of one definition."""
    return lambda params, example: optax.softmax_cross_entropy_with_integer_labels(
        scores(params, example[0], rank), example[1]
    )


def tune_privately(params, rank, way, epsilon, train, steps, rate, clip_norm=CLIP_NORM, progress=True):
    """(plan, state) after DP-SGD of the part that the way trains."""
    plan = Plan(
        target_epsilon=epsilon,
        target_delta=DELTA,
        dataset_size=len(train[1]),
        expected_batch_size=BATCH,
        steps=steps,
    )
    trainer = Trainer(loss_of(rank), optax.adam(rate), plan, clip_norm, trainable=trained_part(way))
    return plan, trainer.fit(trainer.init(params), train, progress=progress)


def tune_openly(params, rank, way, train, steps, rate, seed, progress=True):
    """Parameters after as many steps of Adam on batches of the same size, without clipping and noise."""
    ...
