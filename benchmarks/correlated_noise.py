"""The cost of noise that steps share: a training step with banded noise beside one of DP-SGD, and the buffers' memory.

    PYTHONPATH=. python benchmarks/correlated_noise.py [--rounds 9] [--bands 32] [--network wide]

Networks, batch and data set are those of `benchmarks/training.py`.  A step is keys, draw, gradients, noise and
update.  The kinds of steps take turns in blocks, so that other work on the machine slows all alike.  Figures are
medians over blocks, of wall time and of CPU seconds of all threads.  "cyclic, independent" draws its batches as the
banded rows do, by cyclic Poisson sampling, and adds noise as DP-SGD does.  Rows of jax_privacy are left out where it
is not installed; its step clips one fixed batch of 256 in one piece, adds noise and updates, but draws no batch.
A ratio is the median, over the rounds, of a step's time divided by that of the same library's DP-SGD step.
"""

import argparse
import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training import BATCH, CLIP_NORM, NOISE, SIZE, Convnet, Wide, loss_of
from training_sources import BLOCK, Steps

from jaxacct import strategies
from jaxacct.training import Plan, Trainer


def plan_of(steps, bands):
    """DP-SGD where bands is None; else cyclic Poisson sampling, with independent noise for one band."""
    more = {}
    if bands is not None:
        noise = strategies.Banded(bands) if bands > 1 else None
        more = {"sampling": "cyclic_poisson", "groups": max(bands, 32), "noise": noise}
    settings = {"expected_batch_size": BATCH, "noise_multiplier": NOISE, "steps": steps}
    return Plan(target_delta=1e-5, dataset_size=SIZE, **settings, **more)


class PeerSteps:
    """Steps of jax_privacy, with independent noise where bands is None, else with the noise of `Banded(bands)`."""

    def __init__(self, module, params, data, steps, bands):
        import jax_privacy
        from jax_privacy import noise_addition
        from jax_privacy.matrix_factorization import toeplitz

        clipped = jax_privacy.clipped_grad(
            loss_of(module), l2_clip_norm=CLIP_NORM, normalize_by=BATCH, keep_batch_dim=False, batch_argnums=1
        )
        std = NOISE * CLIP_NORM / BATCH
        if bands is None:
            privatizer = noise_addition.gaussian_privatizer(stddev=std, prng_key=jax.random.key(1))
        else:
            column = strategies.Banded(bands, steps=steps).column
            privatizer = noise_addition.matrix_factorization_privatizer(
                toeplitz.inverse_as_streaming_matrix(jnp.asarray(column, jnp.float32)),
                stddev=std,
                prng_key=jax.random.key(1),
            )
        optimizer = optax.sgd(0.1)

        def step(params, noise, state, batch):
            noisy, noise = privatizer.update(clipped(params, batch), noise)
            updates, state = optimizer.update(noisy, state, params)
            return optax.apply_updates(params, updates), noise, state

        self.carried = params, privatizer.init(params), optimizer.init(params)
        self.step, self.batch = jax.jit(step), jax.tree.map(lambda a: a[:BATCH], data)

    def block(self):
        """(seconds, processor seconds) of one step in a block."""
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(BLOCK):
            self.carried = self.step(*self.carried, self.batch)
        jax.block_until_ready(self.carried)
        return (time.perf_counter() - wall) / BLOCK, (time.process_time() - processor) / BLOCK


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bands", type=int, nargs="+", default=[32])
    parser.add_argument("--network", choices=("convnet", "wide"), default="convnet")
    given = parser.parse_args()
    rng, steps = np.random.default_rng(0), BLOCK * (given.rounds + 1)
    images = rng.normal(size=(SIZE, 28, 28, 1)).astype(np.float32)
    data = (jnp.asarray(images), jnp.asarray(rng.integers(0, 10, SIZE).astype(np.int32)))
    module = Convnet() if given.network == "convnet" else Wide()
    params = module.init(jax.random.key(0), images[0])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1024

    def ours(bands):
        trainer = Trainer(loss_of(module), optax.sgd(0.1), plan_of(steps, bands), CLIP_NORM)
        return Steps(trainer, trainer.init(params), data)

    def theirs(bands):
        return PeerSteps(module, params, data, steps, bands)

    makers = {"": ours} | ({"jax_privacy, ": theirs} if importlib.util.find_spec("jax_privacy") else {})
    rows = {(library, bands): make(bands) for library, make in makers.items() for bands in (None, *given.bands)}
    rows["", 1] = ours(1)
    taken = {row: [] for row in rows}
    for turn in range(given.rounds + 1):
        for row in list(rows)[:: 1 if turn % 2 else -1]:
            found = rows[row].block()
            if turn:  # the first warms up
                taken[row].append(found)
    print(f"{given.network} of {size:.0f} KiB, batch {BATCH} of {SIZE:,}, {given.rounds} blocks of {BLOCK} steps each")
    for (library, bands), found in taken.items():
        wall, cpu = np.median(found, axis=0)
        more = np.median(np.divide(found, taken[library, None]), axis=0)
        name = {None: "DP-SGD", 1: "cyclic, independent"}.get(bands, f"{bands} bands")
        print(
            f"  {library + name:20} {1e3 * wall:7.2f} ms a step ({more[0]:.2f} x)  {1e3 * cpu:7.2f} ms of CPU "
            f"({more[1]:.2f} x)  buffers {((bands or 1) - 1) * size:6.0f} KiB"
        )


if __name__ == "__main__":
    main()
