"""Training on several devices: loss curves of the digits on meshes of 1, 2 and 4 devices and on two processes.

    python benchmarks/mesh.py --out mesh.png

Devices are simulated on this processor, so nothing here is about speed.  Keys depend on the mesh, so that
curves differ as those of two runs with different keys do.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys

DIGITS = pathlib.Path(__file__).parent.parent / "examples" / "digits"
EPSILON, EVERY = 3.0, 4
RUNS = {
    "no mesh": (1, None, 1),
    "1 device": (1, "data", 1),
    "2 devices": (2, "data", 1),
    "4 devices": (4, "data", 1),
    "4 devices, fsdp": (4, "fsdp", 1),
    "2 processes of 2 devices, fsdp": (2, "fsdp", 2),
}
"""By name: devices of a process, how parameters lie, and how many processes."""


def train(shard, epochs):
    """[(step, loss on the test images)] of one run on all devices of all processes, as JSON."""
    sys.path.insert(0, str(DIGITS))
    import digits_cnn as digits
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental.multihost_utils import process_allgather

    from jaxacct.training import Plan, Trainer

    data, (images, labels) = digits.load_digits()
    plan = Plan(
        target_epsilon=EPSILON,
        target_delta=digits.DELTA,
        dataset_size=len(data[1]),
        expected_batch_size=digits.BATCH,
        epochs=epochs,
    )
    where = {} if shard is None else {"mesh": jax.make_mesh((jax.device_count(),), ("devices",)), "shard": shard}
    optimizer = optax.adam(digits.LEARNING_RATE)
    trainer = Trainer(
        digits.Convnet(), optimizer, plan, digits.CLIP_NORM, loss=digits.loss_of, micro_batch=125, **where
    )
    loss = jax.jit(lambda params: jnp.mean(digits.loss_of(digits.Convnet().apply(params, images), labels)))
    on_host = lambda a: np.asarray(a) if a.is_fully_addressable else process_allgather(a, tiled=True)
    curve = []

    def watch(state):
        if state.step % EVERY == 0 or state.step == plan.steps:
            curve.append((state.step, float(loss(jax.tree.map(on_host, state.params)))))

    state = trainer.init(example=data[0][0], key=bytes(range(32)))
    state = trainer.fit(state, data, callbacks=[watch], progress=False)
    if jax.process_index() == 0:
        print(json.dumps({"curve": curve, "epsilon": float(state.epsilon.upper), "step": state.step}))


def begun(devices, shard, number, count, address, epochs):
    """Start process `number` of the `count` processes of a run; it simulates `devices` devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    told = json.dumps([shard, number, count, address, epochs])
    command = [sys.executable, __file__, "--run", told]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"XLA_FLAGS": flags})


def address():
    """Where the processes of a run find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def draw(curves, path):
    """Test loss against steps, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name, lw=1.2)
    axes.set(xlabel="steps", ylabel="loss on the test images", ylim=(0, None))
    axes.set_title(f"digits to $\\varepsilon$ = {EPSILON:g}: the same mechanism on every mesh", fontsize=9)
    axes.grid(color="0.9")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=20.0)
    parser.add_argument("--out", help="the curves, as .png, .svg or .pdf")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        shard, number, count, coordinator, epochs = json.loads(args.run)
        if count > 1:
            import jax

            jax.distributed.initialize(coordinator, count, number)
        train(shard, epochs)
        return
    curves = {}
    for name, (devices, shard, count) in RUNS.items():
        where = address()
        running = [begun(devices, shard, number, count, where, args.epochs) for number in range(count)]
        outputs = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            sys.exit(f"{name}: failed")
        told = json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))
        curves[name] = told["curve"]
        print(
            f"{name}: loss {told['curve'][-1][1]:.3f} after {told['step']} steps, epsilon {told['epsilon']:.6f}",
            flush=True,
        )
    if args.out:
        draw(curves, args.out)


if __name__ == "__main__":
    main()
