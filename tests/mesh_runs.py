"""Runs on several devices, which have to be there before JAX is: `python mesh_runs.py COMMAND FOLDER DEVICES [...]`.

With a coordinator's address and a number it is one of two processes, each with so many devices.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

HERE = pathlib.Path(__file__)
STEPS = 12
KEY = bytes(range(32))
RULES = {
    "poisson": {"sampling_probability": 0.5},
    "truncated_poisson": {"sampling": "truncated_poisson", "sampling_probability": 0.7, "cap": 20},
    "random_allocation": {"sampling": "random_allocation", "slots": 3},
    "without_replacement": {"sampling": "without_replacement", "expected_batch_size": 13},
    "fixed_batches": {"sampling": "fixed_batches", "expected_batch_size": 13},
    "users": {"sampling_probability": 0.5, "unit": "user"},
}
QUICKLY = "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
SIZE = 41  # no multiple of the number of devices


def begin(command, folder, devices, *process):
    """A process that runs a command; (address, number) makes it one of two.  It compiles quickly."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "XLA_FLAGS": f"{QUICKLY} --xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    arguments = [sys.executable, HERE, command, folder, str(devices), *map(str, process)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def address():
    """Where the processes of a run find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def done(*running):
    """What processes print, when all have ended well."""
    results = [process.communicate(timeout=500) for process in running]
    for process, (_, errors) in zip(running, results, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in results]


def data():
    """Rows, and whose they are where users are asked for."""
    import numpy as np

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2 * SIZE, 48)).astype(np.float32)
    return rows, rng.integers(0, SIZE, 2 * SIZE)


def params():
    """Some that are cut, in several ways, and some that are not."""
    import numpy as np

    rng = np.random.default_rng(1)
    shapes = {"first": (48, 32), "bias": (32,), "odd": (3, 32, 20), "last": (20,)}
    return {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def loss(params, example):
    """Of a small network."""
    import jax.numpy as jnp

    hidden = jnp.tanh(example @ params["first"] + params["bias"])
    return jnp.tanh(jnp.sum(hidden @ params["odd"], 0)) @ params["last"]


def trainer(shard, rule="poisson", optimizer=None, **more):
    """One on all devices there are."""
    import jax
    import optax

    from jaxacct.training import Plan, Trainer

    plan = Plan(target_delta=1e-5, dataset_size=SIZE, noise_multiplier=1.0, steps=STEPS, **RULES[rule])
    if rule == "users":
        more["examples_per_user"] = 2
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    return Trainer(loss, optimizer or optax.sgd(1.0), plan, 0.5, micro_batch=4, mesh=mesh, shard=shard, **more)


def whole(tree):
    """Arrays on the host, wherever they were."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    return jax.tree.map(lambda a: np.asarray(a) if a.is_fully_addressable else process_allgather(a, tiled=True), tree)


def one_step(trainer, words, params, noise_multiplier, rows, users=None):
    """What a step takes off the parameters, times the expected batch size: the sum, with noise or without."""
    import numpy as np

    from jaxacct.training.step.step_function import numbers

    state = trainer.init(params, KEY)
    where = trainer.placement
    carried = where.carried(state, state.params)
    now = numbers(trainer.plan.at(1), trainer.plan.sampling, None, 1)._replace(
        gradient_noise=np.float32(noise_multiplier)
    )
    given = (carried, words, words, where.data(rows, users), now, None)
    after, observed = where.step(*given).lower().compile()(*given)
    before, after = whole(carried.params), whole(after.params)
    sums = {name: (before[name] - after[name]) * now.expected_batch_size for name in before}
    return sums | {"members": np.asarray(observed.members), "loss": np.asarray(observed.loss)}


def steps(folder, name):
    """One step of every rule, without noise; and one of Poisson with noise alone."""
    import jax
    import numpy as np

    rows, users = data()
    words = np.arange(8, dtype=np.uint32)
    found = {}
    for rule in RULES:
        own = (rows, users) if rule == "users" else (rows[:SIZE],)
        made = trainer("data" if rule == "poisson" else "fsdp", rule)
        found |= {f"{rule} {k}": v for k, v in one_step(made, words, params(), 0.0, *own).items()}
    for shard in ("data", "fsdp"):
        nothing = {name: np.zeros_like(a) for name, a in params().items()}  # so that the gradients are 0
        noisy = one_step(trainer(shard), words, nothing, 2.0, np.zeros_like(rows[:SIZE]))
        found |= {f"noise {shard} {k}": v for k, v in noisy.items()}
    if jax.process_index() == 0:
        np.savez(pathlib.Path(folder, f"{name}.npz"), **found)


def run(folder, _):
    """A run to be killed: prints its steps."""
    import jax
    import optax

    made = trainer("fsdp", "poisson", optax.adam(0.01))
    rows, _ = data()
    ended = made.fit(
        made.init(params()),
        rows[:SIZE],
        ledger=f"{folder}/run.jsonl",
        checkpoints=f"{folder}/checkpoints",
        checkpoint_every=3,
        callbacks=[lambda state: print(state.step, flush=True)],
        progress=False,
    )
    if jax.process_index() == 0:
        print(json.dumps({"step": ended.step, "stopped": ended.stopped, "epsilon": float(ended.epsilon.upper)}))


def audit(_, rule):
    """The epsilon that an audit of the steps finds, and what is claimed."""
    import jax
    from test_training_rules_audit import CASES, found

    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    print(json.dumps(found(CASES[rule](), 1, mesh)))


if __name__ == "__main__":
    command, folder, devices, *process = sys.argv[1:]
    import jax

    if process:
        jax.distributed.initialize(process[0], 2, int(process[1]), initialization_timeout=60)
    if command == "audit":
        audit(folder, "poisson")
    else:
        {"steps": steps, "run": run}[command](folder, f"{devices}x2" if process else devices)
