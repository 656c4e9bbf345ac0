"""A first private model with jaxacct and with jax_privacy: lines of code, seconds to the first step, seconds in all.

    PYTHONPATH=. python benchmarks/first_model.py [--repeats 5]      # with the extras benchmark, examples and training

The programs train the same network on the digits of scikit-learn, with the same optimizer, batch, steps and clip norm,
and calibrate their noise to the same epsilon and delta.  Each run is a process of its own.  The programs take
turns: each runs once in an empty folder ("first process") and once more with the programs that are then kept there
("second process").  All have JAX's compilation cache, set to keep every program; without it jax_privacy keeps none.

Lines are those of the program as Ruff formats it, imports included, without empty ones.  CPU seconds are given from the
start of a process to the end of the first private step, and to the end of the process.

jax_privacy is used as its documentation says: an execution plan, Poisson batches padded to a multiple, and a mask of
the padding.  Its examples pad to multiples of 32, so that about four sizes of batch each need a program; padded to 320,
almost all batches have one size.  Its plan is given the strategy of DP-SGD, [1.0]; `default(num_bands=1)` would first
optimise it.
"""

import argparse
import importlib.metadata
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import jaxacct as ja

DELTA, STEPS, BATCH = 1e-5, 200, 256
JAXACCT = """
import numpy as np
import optax
from flax import linen as nn
from jaxacct.training import Plan, Trainer

data = np.load("digits.npz")
train = data["images"], data["labels"]
model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
loss = optax.softmax_cross_entropy_with_integer_labels
plan = Plan(3.0, 1e-5, dataset_size=len(train[1]), expected_batch_size=256, steps=200)
trainer = Trainer(model, optax.adam(1e-2), plan, clip_norm=1.0, loss=loss)
state = trainer.init(example=train[0][0])
state = trainer.fit(state, train, ledger="run.jsonl", callbacks=[mark])
found = model.apply(state.params, data["test_images"]).argmax(1)
print((found == data["test_labels"]).mean(), state.epsilon.upper)
"""
JAX_PRIVACY = """
import jax
import numpy as np
import optax
from flax import linen as nn
from jax_privacy import batch_selection
from jax_privacy.experimental import execution_plan

data = np.load("digits.npz")
images, labels = data["images"], data["labels"]
model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
plan = execution_plan.BandMFExecutionPlanConfig(
    iterations=200,
    strategy=[1.0],
    epsilon=3.0,
    delta=1e-5,
    sampling_prob=256 / len(labels),
    l2_clip_norm=1.0,
    normalize_by=256,
).plan

def loss(params, x, y):
    logits = model.apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

grad_fn = plan.clipped_grad(loss, batch_argnums=(1, 2))
privatizer, optimizer = plan.noise_addition_transform, optax.adam(1e-2)

@jax.jit
def update(params, x, y, is_padding, noise_state, opt_state):
    grad = grad_fn(params, x, y, is_padding_example=is_padding)
    grad, noise_state = privatizer.update(grad, noise_state)
    updates, opt_state = optimizer.update(grad, opt_state)
    return optax.apply_updates(params, updates), noise_state, opt_state

params = model.init(jax.random.key(0), images[:1])
noise_state, opt_state = privatizer.init(params), optimizer.init(params)
for rows in plan.batch_selection_strategy.batch_iterator(len(labels)):
    rows = batch_selection.pad_to_multiple_of(rows, PADDING)
    params, noise_state, opt_state = update(
        params, images[rows], labels[rows], rows == -1, noise_state, opt_state
    )
    mark()
found = model.apply(params, data["test_images"]).argmax(1)
print((found == data["test_labels"]).mean(), plan.dp_event)
"""
PROGRAMS = {"jaxacct": JAXACCT} | {
    f"jax_privacy, padded to {multiple}": JAX_PRIVACY.replace("PADDING", str(multiple)) for multiple in (32, 320)
}
BEFORE = """
import time
first = []
def mark(state=None):
    if not first:
        import jax
        jax.block_until_ready(jax.live_arrays())
        first.extend([time.process_time(), time.time()])
"""
"""Code put before a program: `mark` notes when the first step is done, without reading its result."""
AFTER = """
event = getattr(plan, "dp_event", None)
print(plan.noise_multiplier if event is None else event.event.event.noise_multiplier, *first)
"""
HAS = [
    "a ledger of every step, a certified claim from it, a report; with `checkpoints=` it resumes",
    "the planned event and its target; no ledger, no count of the steps taken, no resumption",
]
"""What a program leaves to its user at the end."""


def lines(program):
    """Number of lines that are not empty, without the calls of `mark`, which the benchmark adds."""
    return sum(bool(line.strip()) and line.strip() != "mark()" for line in program.splitlines())


def save_digits(path):
    """Write the digits of scikit-learn to a file; every fifth image, in a random order, is for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 8.0 - 1.0).astype(np.float32), labels[order].astype(np.int32)
    test = np.arange(len(images)) % 5 == 0
    tests = {"test_images": images[test], "test_labels": labels[test]}
    np.savez(path, images=images[~test], labels=labels[~test], **tests)
    return int((~test).sum())


def run(program, folder, again):
    """Seconds and results of one process; `again` only labels the row: the folder decides which programs are kept."""
    where = {"JAXACCT_CACHE_DIR": f"{folder}/kept", "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax"}
    where |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    pathlib.Path(folder, "run.jsonl").unlink(missing_ok=True)  # with this ledger the program would resume
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    command, where = [sys.executable, "-c", BEFORE + program + AFTER], os.environ | where
    done = subprocess.run(command, cwd=folder, env=where, capture_output=True, text=True, check=False)
    wall, after = time.time() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found, times = (line.split() for line in done.stdout.splitlines()[-2:])
    sigma, cpu, moment = map(float, times)
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    number = {"first": cpu, "all": total, "first wall": moment - begin, "all wall": wall}
    return {"again": again, "sigma": sigma, "accuracy": float(found[0]), "said": found[1]} | number


def epsilon_by_dp_accounting(sigma, q):
    """Epsilon by the accountant with which jax_privacy's plan calibrates."""
    import dp_accounting
    from jax_privacy.experimental.accounting import amplified_bandmf_event

    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(amplified_bandmf_event(noise_multiplier=sigma, iterations=STEPS, num_bands=1, sampling_prob=q))
    return accountant.get_epsilon(DELTA)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    runs = {name: [] for name in PROGRAMS}
    for _ in range(options.repeats):
        for name, program in PROGRAMS.items():
            with tempfile.TemporaryDirectory() as folder:
                os.chmod(folder, 0o700)
                size = save_digits(f"{folder}/digits.npz")
                runs[name] += [run(program, folder, again) for again in (False, True)]
    middle = lambda one, key, again: statistics.median(each[key] for each in one if each["again"] is again)
    rows = {"lines of code": [str(lines(program)) for program in PROGRAMS.values()]}
    for process, again in (("first", False), ("second", True)):
        for words, key in (("to the end of the first step", "first"), ("in all", "all")):
            pairs = [(middle(one, key, again), middle(one, f"{key} wall", again)) for one in runs.values()]
            name = f"{process} process, {words}: CPU (wall) seconds"
            rows[name] = [f"{cpu:.1f} ({wall:.1f})" for cpu, wall in pairs]
    q, sigmas = BATCH / size, [one[0]["sigma"] for one in runs.values()]
    rows["noise multiplier"] = [f"{sigma:.6f}" for sigma in sigmas]
    certified = [float(ja.epsilon(ja.dp_sgd(sigma, q, STEPS), DELTA).upper) for sigma in sigmas]
    claims = [runs["jaxacct"][0]["said"], *(epsilon_by_dp_accounting(sigma, q) for sigma in sigmas[1:])]
    rows["epsilon by the library itself"] = [f"{float(claim):.6f}" for claim in claims]
    rows["certified upper end of epsilon"] = [f"{epsilon:.6f}" for epsilon in certified]
    accuracies = [statistics.median(each["accuracy"] for each in one) for one in runs.values()]
    rows["accuracy on the test images"] = [f"{accuracy:.1%}" for accuracy in accuracies]
    rows["at the end the user has"] = [HAS[0], HAS[1], "the same"]
    print(f"| with jax_privacy {importlib.metadata.version('jax-privacy')} | {' | '.join(PROGRAMS)} |\n|{'---|' * 4}")
    print("\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()))


if __name__ == "__main__":
    main()
