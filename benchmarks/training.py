"""One private training step beside one that is not, and beside other libraries: medians, and memory for each example.

    PYTHONPATH=. python benchmarks/training.py [--opacus PYTHON]

The network is the small convolutional one of 26,010 parameters for 28 x 28 images that the tutorials of DP-SGD
libraries share; a batch has 256 examples.  The kinds of steps are timed in turn, round by round, so that other work on
the machine slows all alike.  A turn takes some .05 seconds after a step that is not timed: a training loop goes on with
one kind, and the first step after those of another kind finds no memory at hand.  Rows of jax_privacy are left out
where it is not installed.  Rows of Opacus come from a process of the interpreter PYTHON, which has torch and opacus.
The process waits while the others work.

A second table, with Adam as the optimizer, has what a program costs before it runs: CPU seconds to trace and compile
it, and the memory of its arguments, results and scratch space together, as a multiple of the parameters' bytes, without
the batch or the data.

A third table has what the trainer's loop adds to a step, in wall time and in CPU seconds of all threads.  Steps with a
progress line (and its live epsilon), steps with a log in a file and steps alone alternate; ledger entries are timed by
themselves.

The last table has a loop of steps so small that the host's work for a step decides.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import pathlib
import statistics
import subprocess
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxacct.training import Ledger, Plan, Trainer, clipped_sum, fresh_key
from jaxacct.training.run import log
from jaxacct.training.run.log import run_log
from jaxacct.training.run.state import Stretch
from jaxacct.training.step import noise
from jaxacct.training.step.step_function import numbers_at

BATCH = 256
"""Expected examples of a batch."""
SIZE = 60_000
"""Examples of the data set."""
CLIP_NORM = 1.0
"""Norm to which gradients are clipped."""
TURN = 0.05
"""Seconds for which steps of one kind are timed before the next kind's turn."""
LOOKS = 500
"""Calls of the log's `look` that are timed together: to read the CPU clock takes longer than one call."""
NOISE = 1.1
"""Noise multiplier."""


class Convnet(nn.Module):
    """26,010 parameters."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (8, 8), strides=(2, 2), padding="SAME")(x))
        x = nn.max_pool(x, (2, 2))
        x = nn.relu(nn.Conv(32, (4, 4), strides=(2, 2), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2))
        x = nn.relu(nn.Dense(32)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(10)(x)


class Wide(nn.Module):
    """269,322 parameters in dense layers, whose gradients' norms are cheaper to find than the gradients."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x.reshape(*x.shape[:-3], -1)))
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(x)


def loss_of(module):
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return lambda params, example: cross_entropy(module.apply(params, example[0]), example[1])


def plain_step(loss, optimizer):
    """Mean gradient over the batch, and the update."""

    def step(params, state, batch, key):
        mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch))
        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def private_step(loss, optimizer, method):
    """Clip, sum, add noise, divide, update: the batch in one piece."""

    def step(params, state, batch, key):
        total = clipped_sum(loss, params, batch, clip_norm=CLIP_NORM, method=method).total
        mean = jax.tree.map(lambda g: g / BATCH, noise.add(key, total, NOISE * CLIP_NORM))
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    return step


def jax_privacy_step(loss, optimizer):
    """Like `private_step`, with jax_privacy's clipped gradients and noise from jax.random."""
    import jax_privacy

    clipped = jax_privacy.clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, normalize_by=BATCH, keep_batch_dim=False, batch_argnums=1
    )

    def step(params, state, batch, key):
        leaves, structure = jax.tree.flatten(clipped(params, batch))
        keys = jax.random.split(key, len(leaves))
        std = NOISE * CLIP_NORM / BATCH
        noisy = [g + std * jax.random.normal(k, g.shape, g.dtype) for g, k in zip(leaves, keys, strict=True)]
        updates, state = optimizer.update(jax.tree.unflatten(structure, noisy), state, params)
        return optax.apply_updates(params, updates), state

    return step


class TrainerStep:
    """Each call takes one step of the trainer: Poisson batches of 256 expected from 60,000, micro-batches of 64."""

    steps = 10_000

    def __init__(self, module, params, data, optimizer=None, micro_batch=None):
        self.plan = Plan(
            target_delta=1e-5,
            dataset_size=SIZE,
            expected_batch_size=BATCH,
            noise_multiplier=NOISE,
            steps=self.steps,
        )
        optimizer = optimizer or optax.sgd(0.1)
        self.trainer = Trainer(loss_of(module), optimizer, self.plan, CLIP_NORM, micro_batch=micro_batch)
        self.now = numbers_at(self.plan, 0, None)
        self.module, self.data, self.rng = module, data, np.random.default_rng(0)
        self.carried = self.trainer.placement.carried(self.trainer.init(params), params)

    def lower(self):
        """The program that `fit` compiles."""
        words = np.zeros(8, np.uint32)
        return self.trainer.placement.step(self.carried, words, words, self.data, self.now, None).lower()

    @functools.cached_property
    def step(self):
        return self.lower().compile()

    def __call__(self):
        words = self.rng.integers(0, 2**32, 8, np.uint32)
        self.carried, self.observed = self.step(self.carried, words, words, self.data, self.now, None)
        return self.carried

    def memory(self):
        """Bytes of scratch memory that one more example of a micro-batch takes."""
        used = {}
        for size in (32, 64):
            other = TrainerStep(self.module, self.carried.params, self.data, micro_batch=size)
            used[size] = other.step.memory_analysis().temp_size_in_bytes
        return (used[64] - used[32]) / 32


class OpacusSteps:
    """Steps of `opacus_step.py`, in a process of another interpreter; seconds are measured there."""

    def __init__(self, python, network):
        script = pathlib.Path(__file__).with_name("opacus_step.py")
        settings = ["--batch", str(BATCH), "--noise", str(NOISE), "--clip-norm", str(CLIP_NORM)]
        command = [python, "-W", "ignore", str(script), network, *settings]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.parameters, self.version, self.threads = self.process.stdout.readline().split()

    def seconds(self, mode):
        self.process.stdin.write(f"{mode}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline()), float("nan")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def memory(step, arguments, batch_of):
    """Bytes of scratch memory that one more example takes."""
    sizes = (BATCH // 2, BATCH)
    used = []
    for size in sizes:
        params, state, key = arguments
        compiled = jax.jit(step).lower(params, state, batch_of(size), key).compile()
        used.append(compiled.memory_analysis().temp_size_in_bytes)
    return (used[1] - used[0]) / (sizes[1] - sizes[0])


def held(compiled, params, batch):
    """Bytes of arguments, results and scratch memory together, without the batch, divided by the parameters' bytes."""
    used = compiled.memory_analysis()
    whole = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes + used.temp_size_in_bytes
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    return (whole - size(batch)) / size(params)


def before_running(module, params, batch, data):
    """Print seconds to trace and to compile, and memory, of steps with Adam."""
    optimizer, loss = optax.adam(1e-3), loss_of(module)
    arguments = (params, optimizer.init(params), batch, fresh_key())
    donated = {"donate_argnums": (0, 1)}
    plain, private = plain_step(loss, optimizer), private_step(loss, optimizer, "auto")
    programs = {
        "not private": (plain, {}),
        "not private, donated": (plain, donated),
        "private, donated": (private, donated),
    }
    lowered = {
        label: functools.partial(jax.jit(step, **more).lower, *arguments) for label, (step, more) in programs.items()
    }
    whole = TrainerStep(module, params, data, optimizer)
    lowered["Trainer's step"] = whole.lower
    base = None
    for label, lower in lowered.items():
        begin = time.process_time()
        traced = lower()
        middle = time.process_time()
        compiled = traced.compile()
        seconds = middle - begin, time.process_time() - middle
        base = base or sum(seconds)
        used = held(compiled, params, data if lower == whole.lower else batch)
        print(
            f"  Adam: {label:24} traced in {seconds[0]:5.2f} and compiled in {seconds[1]:5.2f} CPU s "
            f"({sum(seconds) / base:.2f} x), memory of {used:5.1f} models"
        )


def seconds_of(run):
    """(wall, CPU of all threads) of a step in this process: the mean of the steps that fit into TURN seconds."""
    begin, cpu, steps = time.perf_counter(), time.process_time(), 0
    while not steps or time.perf_counter() - begin < TURN:
        jax.block_until_ready(run())
        steps += 1
    return (time.perf_counter() - begin) / steps, (time.process_time() - cpu) / steps


def measure(name, module, rounds, opacus):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SIZE, 28, 28, 1)).astype(np.float32)
    data = (jnp.asarray(images), jnp.asarray(rng.integers(0, 10, len(images))))
    batch_of = lambda size: jax.tree.map(lambda a: a[:size], data)
    params = module.init(jax.random.key(0), images[0])
    optimizer, loss = optax.sgd(0.1), loss_of(module)
    state = optimizer.init(params)
    key, other = fresh_key(), jax.random.key(1)
    steps = {"not private": (plain_step(loss, optimizer), key)}
    for method in ("vmap", "ghost", "auto"):
        steps[f"private, {method}"] = (private_step(loss, optimizer, method), key)
    if importlib.util.find_spec("jax_privacy"):
        steps["jax_privacy"] = (jax_privacy_step(loss, optimizer), other)
    runs, scratch = {}, {}
    for label, (step, k) in steps.items():
        compiled = jax.jit(step)
        run = lambda compiled=compiled, k=k: compiled(params, state, batch_of(BATCH), k)
        runs[label] = lambda run=run: seconds_of(run)
        scratch[label] = memory(step, (params, state, k), batch_of)
    whole = TrainerStep(module, params, data)
    label = "Trainer's step, with its draw"
    runs[label], scratch[label] = lambda: seconds_of(whole), whole.memory()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    if opacus is not None:
        assert int(opacus.parameters) == count
        for mode in ("not private", "hooks", "ghost"):
            runs[f"torch, {mode}" if mode == "not private" else f"Opacus, {mode}"] = lambda m=mode: opacus.seconds(m)
    times = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            run()  # compiles in the first round; in each round it fills the caches of the processor
            times[label].append(run())
    print(f"{name}, {count:,} parameters, batch {BATCH}, {jax.devices()[0].device_kind}, {rounds} rounds")
    medians = {
        label: [statistics.median(column) for column in zip(*taken, strict=True)] for label, taken in times.items()
    }
    base = medians["not private"]
    for label, (wall, cpu) in medians.items():
        each = f"{scratch[label] / 1024:8.1f} KiB an example" if label in scratch else ""
        print(
            f"  {label:30} {1e3 * wall:8.2f} ms {wall / base[0]:6.2f} x  "
            f"{1e3 * cpu:8.2f} ms of CPU {cpu / base[1]:6.2f} x  {each}"
        )
    before_running(module, params, batch_of(BATCH), data)
    if opacus is not None:
        ours = medians["private, auto"][0]
        for mode in ("hooks", "ghost"):
            ratio = medians[f"Opacus, {mode}"][0] / ours
            print(f"  Opacus {opacus.version} {mode}, {opacus.threads} threads: {ratio:.2f} x our time")
        opacus.close()


def loop(module, rounds):
    """What a line of progress and a log of every step, and a ledger, add to the trainer's step."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SIZE, 28, 28, 1)).astype(np.float32)
    data = (jnp.asarray(images), jnp.asarray(rng.integers(0, 10, SIZE)))
    step = TrainerStep(module, module.init(jax.random.key(0), images[0]), data)
    jax.block_until_ready(step())
    log.PAUSES = (0.0, 0.0)  # a line for every step; the default is at most five lines a second
    begin = time.perf_counter()
    step.plan.live_epsilon(1)
    table = time.perf_counter() - begin
    state = step.trainer.init(step.carried.params)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        told = stack.enter_context(run_log(f"{folder}/log.jsonl", 1, state))
        told.begin(step.plan, state, None)
        line = log.ProgressLine(told.epsilon, 0, True)
        done_by = lambda number: (Stretch(step.plan, 0, number, ""),)
        adds = {
            "alone": lambda number: None,
            "with its line": lambda number: line.update(number, step.carried.clip_norm, done_by(number)),
            "with its log": lambda number: told.look(number, step.observed, done_by(number)),
        }
        adds["with its log"](1)  # starts the thread that computes the table of epsilon
        wait_for_tables()
        times, seconds, added = ({label: [] for label in adds} for _ in range(3))
        for number in range(2, 10 * rounds + 2):
            for label in list(adds)[:: 1 if number % 2 else -1]:
                with contextlib.redirect_stderr(io.StringIO()) as shown:
                    begin, cpu = time.perf_counter(), time.process_time()
                    jax.block_until_ready(step())
                    done = time.perf_counter()
                    adds[label](number)
                    added[label].append(time.perf_counter() - done)
                    times[label].append(time.perf_counter() - begin)
                    seconds[label].append(time.process_time() - cpu)
                assert ("epsilon <=" in shown.getvalue()) == (label == "with its line")
        last = 10 * rounds + 1
        copies = jax.block_until_ready([jax.tree.map(jnp.copy, step.observed) for _ in range(LOOKS)])
        begin = time.process_time()
        for number, observed in enumerate(copies, last + 1):
            told.look(number, observed, done_by(number))
        look = (time.process_time() - begin) / LOOKS
        stack.close()
        lines = pathlib.Path(folder, "log.jsonl").read_text().splitlines()
        assert len(lines) == last + LOOKS + 2  # one for each step, one for the begin and one for the end
    noted = []
    with tempfile.TemporaryDirectory() as folder, Ledger.create(f"{folder}/run.jsonl", step.plan) as ledger:
        for number in range(100):
            begin = time.perf_counter()
            ledger.record(number, f"key {number}", f"batch {number}", NOISE, BATCH / SIZE)
            noted.append(time.perf_counter() - begin)
    wall, cpu = ({label: statistics.median(taken) for label, taken in each.items()} for each in (times, seconds))
    print(
        f"the trainer's loop on the convnet, {10 * rounds} steps of each; table of epsilon, once, aside: {table:.1f} s"
    )
    for label in adds:
        more = [f"{100 * (each[label] / each['alone'] - 1):+.2f} %" for each in (wall, cpu)]
        print(
            f"  {label:30} {1e3 * wall[label]:8.2f} ms a step ({more[0]}), "
            f"{1e3 * cpu[label]:8.2f} ms of CPU ({more[1]})"
        )
    for label, taken in {"one line shown": added["with its line"], "one ledger entry": noted}.items():
        median = statistics.median(taken)
        print(f"  {label:30} {1e3 * median:8.3f} ms ({100 * median / wall['alone']:.3f} % of a step)")
    print(f"  {'one look of the log':30} {1e3 * look:8.3f} ms of CPU ({100 * look / cpu['alone']:.3f} % of a step's)")


def tiny(rounds):
    """A loop of 2,000 steps of six parameters, each on 32 of 1,000 examples: plain, and private with a ledger."""
    steps, size, batch = 2000, 1000, 32
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 5)).astype(np.float32)
    data = (x, (x @ rng.normal(size=5) > 0).astype(np.float32))
    params, optimizer = {"w": jnp.zeros(5), "b": jnp.zeros(())}, optax.sgd(0.1)

    def loss(params, example):
        z = example[0] @ params["w"] + params["b"]
        return jnp.logaddexp(0.0, z) - example[1] * z

    one = plain_step(loss, optimizer)
    whole = tuple(map(jnp.asarray, data))

    @jax.jit
    def step(params, state, key):
        drawn = jax.random.randint(key, (batch,), 0, size)
        return one(params, state, tuple(part[drawn] for part in whole), key)

    def plain():
        now, state, key = params, optimizer.init(params), jax.random.key(0)
        for _ in range(steps):
            key, own = jax.random.split(key)
            now, state = step(now, state, own)
        return now

    plan = Plan(noise_multiplier=1.0, batch_size=batch, dataset_size=size, steps=steps, target_delta=1e-5)
    trainer = Trainer(loss, optimizer, plan, 1.0)

    def private(ledger=None):
        return trainer.fit(trainer.init(params), data, ledger=ledger, progress=False).params

    with tempfile.TemporaryDirectory() as folder:
        names = (f"{folder}/{number}.jsonl" for number in range(rounds + 1))
        runs = {"plain": plain, "private": private, "private, with a ledger": lambda: private(next(names))}
        times = {label: [] for label in runs}
        for _ in range(rounds + 1):
            for label, run in runs.items():
                begin, cpu = time.perf_counter(), time.process_time()
                jax.block_until_ready(run())
                times[label].append((time.perf_counter() - begin, time.process_time() - cpu))
    medians = {label: np.median(taken[1:], axis=0) / steps for label, taken in times.items()}  # the first compiles
    print(f"a loop of {steps:,} tiny steps, {rounds} rounds")
    for label, (wall, cpu) in medians.items():
        ratio = cpu / medians["plain"][1]
        print(f"  {label:30} {1e6 * wall:8.0f} us a step, {1e6 * cpu:8.0f} us of CPU {ratio:6.2f} x")


def wait_for_tables():
    """Wait for the threads that compute tables of epsilon."""
    for thread in threading.enumerate():
        if "epsilon" in thread.name:
            thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--opacus", metavar="PYTHON", help="an interpreter that has torch and opacus")
    parser.add_argument("--only", choices=["convnet", "dense", "loop", "tiny"], help="one of the four parts")
    args = parser.parse_args()
    for name, title, module in (("convnet", "convnet", Convnet()), ("dense", "dense network", Wide())):
        if args.only in (None, name):
            opacus = OpacusSteps(args.opacus, name) if args.opacus else None
            measure(title, module, args.rounds, opacus)
    if args.only in (None, "loop"):
        loop(Convnet(), args.rounds)
    if args.only in (None, "tiny"):
        tiny(args.rounds)


if __name__ == "__main__":
    main()
