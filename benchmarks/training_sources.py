"""Steps whose data lie in a file beside steps whose data lie on the device: time, processor time, and memory.

    PYTHONPATH=. python benchmarks/training_sources.py

*Time.*  The small convolutional network of `benchmarks/training.py`, Poisson batches of 256 expected from 60,000
images.  Steps of a resident array, of a memmap and of a memmap that is read item by item take turns in blocks, so that
other work on the machine slows all alike.  A step is draw, load, keys and update.  The medians are over blocks;
processor time is of all threads.

*Memory.*  A process of its own trains on a memmap of 4 GB (a file with holes) and tells how much private memory it had
at most, as Linux counts it: RssAnon in /proc/self/status, looked at after every step.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training import BATCH, CLIP_NORM, NOISE, SIZE, Convnet, loss_of

from jaxacct.training import Plan, Source, Trainer
from jaxacct.training.run.program import Program, Streamed

BLOCK = 20
"""Steps of a block: enough that the one batch loaded ahead at the end of a block matters little."""
ROWS, COLUMNS = 2**20, 1024
"""Shape of the float32 array in the file of 4 GB."""


class Items:
    """Examples looked up one by one."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.images[number], self.labels[number]


class Steps:
    """The steps of one run, a block at a time."""

    def __init__(self, trainer, state, data):
        where = trainer.placement
        rest = (trainer.rule, trainer.plan, where.carried(state, state.params), state.lineage, 0, data)
        if isinstance(data, Source):
            self.program = Streamed(where, *rest, None, None, None, False)
        else:
            self.program = Program(where, *rest)
        self.carried, self.line, self.step = self.program.carried, self.program.line, 0
        self.program.begin(self.line, 0, trainer.plan.steps)

    def block(self):
        """(seconds, processor seconds) of one step in a block."""
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(BLOCK):
            self.line, key, settings, _, batch = self.program.prepared(self.line, self.step)
            self.carried, _ = self.program.run(self.carried, key, settings, batch)
            self.step += 1
        jax.block_until_ready(self.carried)
        return (time.perf_counter() - wall) / BLOCK, (time.process_time() - processor) / BLOCK


def times(rounds):
    """Print the median times of a step for each kind of data; the kinds take turns, a block each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, SIZE).astype(np.int32)
    plan = Plan(
        target_delta=1e-5,
        dataset_size=SIZE,
        expected_batch_size=BATCH,
        noise_multiplier=NOISE,
        steps=BLOCK * rounds * 2,
    )
    trainer = Trainer(loss_of(Convnet()), optax.sgd(0.1), plan, CLIP_NORM)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/images.npy"
        np.save(path, rng.normal(size=(SIZE, 28, 28, 1)).astype(np.float32))
        images = np.load(path, mmap_mode="r")
        state = trainer.init(Convnet().init(jax.random.key(0), jnp.asarray(images[0])))
        runs = {
            "resident": (jnp.asarray(images), jnp.asarray(labels)),
            "memmap": Source((images, labels)),
            "item by item": Source(Items(images, labels)),
        }
        runs = {name: Steps(trainer, state, data) for name, data in runs.items()}
        taken = {name: [] for name in runs}
        for turn in range(rounds + 1):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                found = runs[name].block()
                if turn:  # the first warms up
                    taken[name].append(found)
        for run in runs.values():
            run.program.close()
    print(f"convnet, batches of {BATCH} expected from {SIZE:,}, {rounds} blocks of {BLOCK} steps each")
    base = [statistics.median(column) for column in zip(*taken["resident"], strict=True)]
    for name, rows in taken.items():
        wall, processor = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"  {name:14} {1e3 * wall:7.2f} ms a step ({wall / base[0]:.3f} x)  "
            f"{1e3 * processor:7.2f} ms of processor time ({processor / base[1]:.3f} x)"
        )


def memory_of(field):
    """Bytes of this process, as Linux counts them."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", text)[1])


def train_from_a_large_file(path, steps):
    """Train on the file and print the most memory that this process takes; it does nothing else."""
    data = np.memmap(path, np.float32, "r", shape=(ROWS, COLUMNS))
    plan = Plan(target_delta=1e-5, dataset_size=ROWS, expected_batch_size=BATCH, noise_multiplier=NOISE, steps=steps)
    trainer = Trainer(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.1), plan, CLIP_NORM)
    most = {"RssAnon": memory_of("RssAnon"), "RssFile": 0}
    before = most["RssAnon"]

    def look(state):
        for field in most:
            most[field] = max(most[field], memory_of(field))

    trainer.fit(trainer.init(jnp.zeros(COLUMNS)), Source(data), callbacks=[look], progress=False)
    mebi = {field: round(value / 2**20) for field, value in most.items()}
    print(
        f"  private memory at most {mebi['RssAnon']} MiB ({round(before / 2**20)} before training), pages of files at "
        f"most {mebi['RssFile']} MiB, in {steps} steps"
    )


def memory(steps):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/large.bin"
        with open(path, "wb") as file:
            file.truncate(4 * ROWS * COLUMNS)
        print(
            f"a memmap of {4 * ROWS * COLUMNS / 1e9:.2f} GB, {ROWS:,} examples, batches of {BATCH} expected", flush=True
        )
        subprocess.run([sys.executable, __file__, "--train-on", path, "--steps", str(steps)], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100, help="of the part on memory")
    parser.add_argument("--only", choices=["times", "memory"], help="one of the two parts")
    parser.add_argument("--train-on", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train_on:
        train_from_a_large_file(args.train_on, args.steps)
        return
    if args.only in (None, "times"):
        times(args.rounds)
    if args.only in (None, "memory"):
        memory(args.steps)


if __name__ == "__main__":
    main()
