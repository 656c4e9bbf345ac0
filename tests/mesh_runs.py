"""Runs on several devices: `mesh_runs.py 'COMMAND ...' FOLDER DEVICES [ADDRESS NUMBER]`.

XLA_FLAGS must set the number of devices before JAX is imported.  With a coordinator's ADDRESS and the NUMBER of the
process, the script is one of two processes, each with DEVICES devices.
"""

import dataclasses
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
    "cyclic_poisson": {"sampling": "cyclic_poisson", "sampling_probability": 0.5, "groups": 3},
}
BANDED = (0.8, 0.5, 0.3)
"""Coefficients of the Toeplitz strategy, the noise of the rule "cyclic_poisson"."""
QUICKLY = "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
SIZE = 41  # no multiple of the number of devices


def begin(command, folder, devices, *process):
    """Start a process that runs `command` and compiles quickly; (address, number) makes it one of two processes."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "XLA_FLAGS": f"{QUICKLY} --xla_force_host_platform_device_count={devices or 1}",
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
    """Rows, and the user of each row, which only the rule "users" needs."""
    import numpy as np

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2 * SIZE, 48)).astype(np.float32)
    return rows, rng.integers(0, SIZE, 2 * SIZE)


def params():
    """Parameters, some to be sharded along various axes and some to stay whole."""
    import numpy as np

    rng = np.random.default_rng(1)
    shapes = {"first": (48, 32), "bias": (32,), "odd": (3, 32, 20), "last": (20,)}
    return {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def loss(params, example):
    """The loss of a small network on one example."""
    import jax.numpy as jnp

    hidden = jnp.tanh(example @ params["first"] + params["bias"])
    return jnp.tanh(jnp.sum(hidden @ params["odd"], 0)) @ params["last"]


def trainer(shard, rule="poisson", optimizer=None, mesh=True, loss_fn=None, clip_norm=0.5, **more):
    """A Trainer on the given mesh, else on all devices; without a mesh if the script was asked for 0 devices."""
    import jax
    import optax

    from jaxacct import strategies
    from jaxacct.training import Plan, Trainer

    noise = strategies.Toeplitz(BANDED) if rule == "cyclic_poisson" else None
    plan = Plan(target_delta=1e-5, dataset_size=SIZE, noise_multiplier=1.0, steps=STEPS, noise=noise, **RULES[rule])
    if rule == "users":
        more["examples_per_user"] = 2
    if mesh is True:
        mesh = None if sys.argv[3] == "0" else jax.make_mesh((jax.device_count(),), ("devices",))
    where = {} if mesh is None else {"mesh": mesh, "shard": shard}
    return Trainer(loss_fn or loss, optimizer or optax.sgd(1.0), plan, clip_norm, micro_batch=4, **where, **more)


def whole(tree):
    """Arrays on the host, wherever they were."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    return jax.tree.map(lambda a: np.asarray(a) if a.is_fully_addressable else process_allgather(a, tiled=True), tree)


def one_step(trainer, words, params, noise_multiplier, rows, users=None, past=None):
    """`taken_off` of one step with the given noise; six calls with equal keys must give equal bits."""
    import jax
    import numpy as np

    from jaxacct.training.run.state import Past
    from jaxacct.training.sharding.placement import copied
    from jaxacct.training.step.models import split_model

    where, now = trainer.placement, numbers_of(trainer, noise_multiplier)
    state = trainer.init(params, KEY)
    if past is not None:
        state = dataclasses.replace(state, past=Past(past, state.clip_norm))
    trained, rest = split_model(state.params, trainer.trainable)
    carried, frozen = where.carried(state, trained), where.frozen(trained, rest)
    given = (words, words, where.data(rows, users), now, frozen)
    compiled = where.step(carried, *given).lower().compile()
    after, observed = compiled(copied(carried), *given)  # a copy, since a step overwrites its first argument
    for _ in range(5):  # equal keys must mean equal sums, to the last bit
        again = compiled(copied(carried), *given)[0]
        for one, other in zip(*map(jax.tree.leaves, map(whole, (after, again))), strict=True):
            np.testing.assert_array_equal(one, other)
    return taken_off(carried, after, observed, now)


def loaded_step(trainer, words, params, rows):
    """`taken_off` of one step without noise on a batch that the host has loaded."""
    import jax
    import numpy as np

    where, now = trainer.placement, numbers_of(trainer, 0.0)
    state = trainer.init(params, KEY)
    carried = where.carried(state, state.params)
    size = 4 * where.devices
    batch = rows[:size], np.arange(size, dtype=np.int32), np.ones(size, bool)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    nothing, one, end = (each.lower().compile() for each in where.loaded(carried, words, shapes, now, None))
    so_far = nothing(carried, None)
    for first in range(0, 32, size):
        numbers = np.arange(first, first + size, dtype=np.int32)
        so_far = one(carried, words, so_far, *where.batch((rows[numbers], numbers, numbers % 7 != 3)), None)
    return taken_off(carried, *end(carried, words, so_far, now), now)


def numbers_of(trainer, noise_multiplier):
    """The `Numbers` of the plan's second step (if there is one), but with `noise_multiplier` as the gradient noise."""
    import numpy as np

    from jaxacct.training.step.step_function import numbers_at

    at = min(1, trainer.plan.steps - 1)
    now = numbers_at(trainer.plan, at, trainer.adaptive, trainer.rule.private_loss, np.zeros(8))
    return now._replace(gradient_noise=np.float32(noise_multiplier))


def taken_off(carried, after, observed, now):
    """{path: array} of one step: decreases of parameters times the expected batch size, clip norm, observed values."""
    import jax

    before, after = whole(carried), whole(after)
    lost = jax.tree.map(lambda a, b: (a - b) * now.expected_batch_size, before.params, after.params)
    beside = {"clip_norm": after.clip_norm, "observed": whole(observed)}
    found = jax.tree_util.tree_flatten_with_path(lost | beside)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def noisy_loss(params, example, key):
    """A loss with a key of its example, and aux beside it."""
    import jax
    import jax.numpy as jnp

    kept = jax.random.bernoulli(key, 0.5, example.shape)
    return loss(params, jnp.where(kept, example, 0)), {"kept": jnp.sum(kept)}


def steps(folder, name):
    """One step of every rule, without noise; and one of Poisson with noise alone."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from jaxacct.training import AdaptiveClip, PrivateLoss

    rows, users = data()
    words, start = np.arange(8, dtype=np.uint32), params()
    found = {}
    keep = lambda name, made: found.update({f"{name} {k}": v for k, v in made.items()})
    for rule in RULES:
        own = (rows, users) if rule == "users" else (rows[:SIZE],)
        keep(rule, one_step(trainer("data" if rule == "poisson" else "fsdp", rule), words, start, 0.0, *own))
    nothing = {name: np.zeros_like(a) for name, a in start.items()}  # so that the gradients are 0
    for shard in ("data", "fsdp"):
        keep(f"noise {shard}", one_step(trainer(shard), words, nothing, 2.0, np.zeros_like(rows[:SIZE])))
        past = {name: np.stack([a, 2 * a]) for name, a in start.items()}
        banded = trainer(shard, "cyclic_poisson")
        keep(f"noise banded {shard[0]}", one_step(banded, words, nothing, 2.0, np.zeros_like(rows[:SIZE]), past=past))
    cut = {"first": P(None, "devices"), "bias": P("devices"), "odd": P(None, None, "devices"), "last": P()}
    keep("specs", one_step(trainer(cut, clip_norm=AdaptiveClip(0.5)), words, start, 0.0, rows[:SIZE]))
    more = {"rngs": True, "has_aux": True, "trainable": lambda path: path != "first", "private_loss": PrivateLoss(9.0)}
    keep("model", one_step(trainer("fsdp", loss_fn=noisy_loss, **more), words, start, 0.0, rows[:SIZE]))
    if name != "none":
        keep("loaded", loaded_step(trainer("fsdp"), words, start, rows))
    if jax.process_index() == 0:
        np.savez(pathlib.Path(folder, f"{name}.npz"), **found)


def on_record_first(cls, ledger):
    """Make `cls.run` assert, before it runs a step, that the fingerprint of its key is in the ledger's file."""
    real = cls.run

    def run(self, carried, key, settings, batch):
        assert key.key_fingerprint in pathlib.Path(ledger).read_text()
        return real(self, carried, key, settings, batch)

    cls.run = run


def run(folder, name):
    """Train until killed or finished; print each step, at the end epsilon and a hash of the parameters."""
    import hashlib

    import jax
    import numpy as np
    import optax

    from jaxacct.training import Source
    from jaxacct.training.run.program import Program, Streamed

    for kind in (Program, Streamed):
        on_record_first(kind, f"{folder}/run.jsonl")
    made = trainer("fsdp", "poisson", optax.adam(0.01))
    rows = data()[0][:SIZE]
    ended = made.fit(
        made.init(params(), KEY),
        Source(rows) if folder.endswith("source") else rows,
        ledger=f"{folder}/run.jsonl",
        checkpoints=f"{folder}/checkpoints",
        checkpoint_every=3,
        callbacks=[lambda state: print(state.step, flush=True)],
        progress=False,
    )
    bits = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in jax.tree.leaves(whole(ended.params))))
    epsilon = float(ended.epsilon.upper)
    print(json.dumps({"step": ended.step, "stopped": ended.stopped, "epsilon": epsilon, "bits": bits.hexdigest()}))


def move(folder, _):
    """Train on one mesh, resume on another, then on one device; print steps, devices and the number of releases."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh

    from jaxacct.training import Ledger

    rows = data()[0][:SIZE]
    meshes = [np.array(jax.devices()).reshape(2, 2), np.array(jax.devices()[:2]).reshape(1, 2), None]
    told = []
    for stop, devices in zip((4, 8, 12), meshes, strict=True):
        mesh = None if devices is None else Mesh(devices, ("rows", "columns"))
        made = trainer(None if mesh is None else "fsdp", optimizer=optax.adam(0.01), mesh=mesh)
        seen = []

        def watch(state, stop=stop, seen=seen):
            seen.append((state.step, whole(state.params)))
            return state.step == stop

        state = made.fit(
            made.init(params()),
            rows,
            ledger=f"{folder}/run.jsonl",
            checkpoints=f"{folder}/checkpoints",
            callbacks=[watch],
            progress=False,
        )
        told.append([seen[0][0], state.step, len(state.params["first"].sharding.device_set)])
        if stop == 4:
            resumed = whole(state.params)
        elif stop == 8:  # one step of Adam moves a parameter by about its learning rate, 0.01
            assert max(np.abs(seen[0][1][k] - resumed[k]).max() for k in resumed) < 0.05
    print(json.dumps([told, sum(Ledger.read(f"{folder}/run.jsonl").releases().values())]))


def noise(_, __):
    """Print sharded noise's collectives, its scratch memory and one device's, and how far its draws are off those.

    Scratch memory is given as a multiple of the whole tree's bytes.
    """
    import re

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxacct.core.chacha import key_from_bytes
    from jaxacct.training.sharding.mesh_step import param_specs, sharded_noise
    from jaxacct.training.step import noise

    key = key_from_bytes(KEY)
    tree = {
        name: jnp.zeros(shape)
        for name, shape in {"a": (2048, 512), "b": (7, 128, 3), "c": (9,), "d": (12, 100)}.items()
    }
    alone = jax.jit(noise.add).lower(key, tree, 1.0).compile()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    P = PartitionSpec
    told = []
    whole = param_specs(mesh, "fsdp", tree)["a"]  # over both axes
    for specs in ({"a": whole, "b": P(None, "y"), "c": P(), "d": P("y", "x")},):
        put = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in tree.items()}
        program = jax.jit(sharded_noise(mesh, specs)).lower(key, put, 1.0).compile()
        crossing = re.findall(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute", program.as_text())
        drawn, one = program(key, put, 1.0), alone(key, tree, 1.0)
        off = 0.0
        for name, leaf in drawn.items():
            # entry p is draw p % 32 of unit p // 32 on a mesh, and draw p // units of unit p % units on one device
            flat, size = np.asarray(leaf).reshape(-1), leaf.size
            units, numbers = -(-size // 32), np.arange(size)
            there = numbers % 32 * units + numbers // 32
            both = there < size  # if 32 units > size, the two layouts leave out different draws
            off = max(off, float(np.abs(flat[both] - np.asarray(one[name]).reshape(-1)[there[both]]).max()))
        model = sum(leaf.nbytes for leaf in tree.values())
        shares = [each.memory_analysis().temp_size_in_bytes / model for each in (program, alone)]
        told.append([crossing, *shares, off])
    print(json.dumps(told))


def kept(folder, _):
    """For two runs on devices in reverse order: the parameters, and how many steps were saved and loaded so far."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from training_runs import moving, plan_of, still_trainer

    from jaxacct.engines import programs

    os.environ["JAXACCT_CACHE_DIR"], programs.STEP_SECONDS = folder, 0.0
    jax.config.update("jax_compilation_cache_dir", None)
    rows, told = np.ones((20, 2), np.float32), []
    for _ in range(2):
        mesh = Mesh(np.array(jax.devices())[[1, 0]], ("x",))
        made = still_trainer(plan_of(20, 0.5, steps=2), step=moving, mesh=mesh)
        ended = made.fit(made.init(np.zeros(2, np.float32), KEY), rows, progress=False)
        told.append([ended.params.tolist(), programs.saving.count, programs.loading.count])
    print(json.dumps(told))


def audit(rule, _):
    """The epsilon that an audit of the steps finds, and what is claimed."""
    import jax
    from test_training_rules_audit import CASES, found

    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    print(json.dumps(found(CASES[rule](), 1, mesh)))


def one_audit(how, _):
    """The epsilon that a Gaussian fit finds for one step with a planted gradient of norm C, and the claimed one."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec
    from training_runs import linear, plan_of

    from jaxacct.audit import from_scores
    from jaxacct.training import Trainer
    from jaxacct.training.sharding import mesh_step
    from jaxacct.training.step.step_function import Carried

    if how == "less noise":
        real = mesh_step.sharded_noise
        less = lambda noise: lambda key, tree, std: noise(key, tree, 0.9 * std)
        mesh_step.sharded_noise = lambda mesh, specs: less(real(mesh, specs))
    mesh, rng = jax.make_mesh((jax.device_count(),), ("devices",)), np.random.default_rng(0)
    made = Trainer(linear, optax.sgd(1.0), plan_of(5), 1.0, mesh=mesh, shard="fsdp")
    now, everywhere = numbers_of(made, 1.0), NamedSharding(mesh, PartitionSpec())

    def moved(words, rows):
        start = Carried(jnp.zeros(2), made.optimizer.init(jnp.zeros(2)), jnp.float32(1), jnp.int32(0))
        return -made.step_function(start, words, words, rows, now)[0].params[0] * now.expected_batch_size

    program, scores = jax.jit(jax.vmap(moved, (0, None)), out_shardings=everywhere), []
    for canary in (0.0, 7.0):
        rows = made.placement.data(np.array([[0, 0.5]] * 3 + [[canary, 0]] + [[0, 0.5]], np.float32), None)
        words = rng.integers(0, 2**32, (12, 5000, 8), np.uint32)
        scores.append(np.concatenate([np.asarray(program(each, rows), np.float64) for each in words]))
    options = {"method": "gaussian_fit", "thresholds": [0.25, 0.5, 0.75]}
    found = from_scores(*scores, delta=1e-5, confidence=0.999, **options).epsilon
    print(json.dumps([float(found), float(made.plan.epsilon.upper)]))


if __name__ == "__main__":
    command, folder, devices, *process = sys.argv[1:]
    import jax

    if process:
        jax.distributed.initialize(process[0], 2, int(process[1]), initialization_timeout=60)
    here = "none" if devices == "0" else f"{devices}x2" if process else devices
    commands = {each.__name__: each for each in (steps, run, move, noise, kept, audit, one_audit)}
    for each in command.split():
        commands[each](folder, here)
