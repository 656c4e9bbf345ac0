"""Handwritten digits: a small convolutional network trained privately to epsilon 1, 3 and 8, and not privately.

    python examples/digits/digits_cnn.py --out digits.png

With --memmap the training images lie in a file, and each step reads its batch from there.

Needs the extras `training` and `examples`.  The 1,797 images of 8 x 8 pixels come with scikit-learn.
"""

import argparse
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxacct.training import Plan, Source, Trainer

DELTA = 1e-5
BATCH = 500
EPOCHS = 40
CLIP_NORM = 1.0
LEARNING_RATE = 1e-2


class Convnet(nn.Module):
    """32 features of 3 x 3 pixels and a dense layer; few parameters, since each of them gets the same noise."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(32, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(*x.shape[:-3], -1))


def load_digits():
    """(training images and labels, test images and labels); every fifth image, in a random order, is for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order].reshape(-1, 8, 8, 1) / 8.0 - 1.0).astype(np.float32)
    labels = labels[order].astype(np.int32)
    test = np.arange(len(images)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def in_files(train, folder):
    """The training images and labels as a Source that reads them from files."""
    for name, part in zip(("images", "labels"), train, strict=True):
        np.save(pathlib.Path(folder, f"{name}.npy"), part)
    return Source(tuple(np.load(pathlib.Path(folder, f"{name}.npy"), mmap_mode="r") for name in ("images", "labels")))


def accuracy_on(test):
    """A function of parameters: the share of test images that are named correctly."""
    images, labels = test
    return jax.jit(lambda params: jnp.mean(jnp.argmax(Convnet().apply(params, images), -1) == labels))


def loss_of(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def train_privately(epsilon, train, test, epochs=EPOCHS, ledger=None, progress=None, folder=None):
    """(plan, final state, [(steps, test accuracy)]) of one private run; epsilon does not cover the test images.

    With a folder the training images are put into files there, and read batch by batch.
    """
    plan = Plan(
        target_epsilon=epsilon,
        target_delta=DELTA,
        dataset_size=len(train[1]),
        expected_batch_size=BATCH,
        epochs=epochs,
    )
    optimizer = optax.adam(LEARNING_RATE)
    trainer = Trainer(Convnet(), optimizer, plan, CLIP_NORM, loss=loss_of, micro_batch=125)
    measure, curve = accuracy_on(test), []

    def watch(state):
        if state.step % 10 == 0 or state.step == plan.steps:
            curve.append((state.step, float(measure(state.params))))

    state = trainer.init(example=train[0][0])
    data = train if folder is None else in_files(train, folder)
    state = trainer.fit(state, data, ledger=ledger, callbacks=[watch], progress=progress)
    return plan, state, curve


def train_openly(train, test, steps):
    """[(steps, accuracy)] of the non-private twin: the same network, optimizer, batch size and number of steps."""
    images, labels = (jnp.asarray(a) for a in train)
    optimizer, measure, curve = optax.adam(LEARNING_RATE), accuracy_on(test), []
    params = Convnet().init(jax.random.key(0), images[0])
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, rows):
        mean = lambda p: jnp.mean(loss_of(Convnet().apply(p, images[rows]), labels[rows]))
        changes, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, changes), state

    rng = np.random.default_rng(1)
    for step in range(1, steps + 1):
        params, state = update(params, state, rng.choice(len(labels), BATCH, replace=False))
        if step % 10 == 0 or step == steps:
            curve.append((step, float(measure(params))))
    return curve


def draw(curves, path):
    """Test accuracy against epochs, one line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.7), layout="constrained")
    axes = figure.add_subplot()
    for name, per_epoch, curve in curves:
        steps, values = zip(*curve, strict=True)
        axes.plot(np.array(steps) / per_epoch, 100 * np.array(values), label=name)
    axes.set(xlabel="epochs", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.set_title(f"digits, clip norm {CLIP_NORM:g}, expected batch {BATCH}, $\\delta = 10^{{-5}}$", fontsize=9)
    axes.grid(color="0.9")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--memmap", action="store_true", help="read the training images from files, batch by batch")
    parser.add_argument("--out", help="learning curves, as .png, .svg or .pdf")
    args = parser.parse_args()
    train, test = load_digits()
    per_epoch, curves = len(train[1]) / BATCH, []
    for epsilon in args.epsilon:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            plan, state, curve = train_privately(
                epsilon, train, test, args.epochs, folder=folder if args.memmap else None
            )
        spent = float(state.epsilon.upper)
        print(
            f"epsilon {epsilon:g}: accuracy {100 * curve[-1][1]:.1f} %, spent {spent:.6f} at delta {DELTA:g}, "
            f"noise multiplier {plan.noise_multiplier:.4f}, {state.step} steps, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        curves.append((f"$\\varepsilon = {epsilon:g}$", per_epoch, curve))
    openly = train_openly(train, test, plan.steps)
    print(f"not private: accuracy {100 * openly[-1][1]:.1f} %")
    curves.append(("not private", per_epoch, openly))
    if args.out:
        draw(curves, args.out)


if __name__ == "__main__":
    main()
