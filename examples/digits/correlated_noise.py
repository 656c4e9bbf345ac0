"""Handwritten digits with noise that steps share: DP-SGD, random allocation and banded noise at equal epsilon.

    python examples/digits/correlated_noise.py --out correlated_noise.png

All runs have the same network, optimizer, expected batch and number of steps; they differ in how a batch is drawn and
in the noise. `advise_strategy` finds the noise of each kind of run, and the number of bands with the least error.

Needs the extras `training` and `examples`.
"""

import argparse
import tempfile

import jax
import numpy as np
import optax
from digits_cnn import DELTA, Convnet, accuracy_on, load_digits, loss_of

from jaxacct.training import Plan, Trainer, advise_strategy

BATCH = 48
EPOCHS = 20
CLIP_NORM = 1.0
MOMENTUM = 0.9
NAMES = {"poisson": "DP-SGD", "random_allocation": "random allocation", "cyclic_poisson": "banded noise"}


def plans(epsilon, size, epochs=EPOCHS, bands=(2, 4, 8, 16)):
    """{name: (plan, error of the prefix sums)}; "banded noise" has the number of bands with the least error."""
    run = {"dataset_size": size, "batch_size": BATCH, "epochs": epochs, "bands": bands}
    advice, found = advise_strategy(target_epsilon=epsilon, target_delta=DELTA, **run), {}
    for sampling, name in NAMES.items():
        best = min((one for one in advice.options if one.sampling == sampling), key=lambda one: one.error)
        shared = f", {best.strategy.overlap} bands" if sampling == "cyclic_poisson" else ""
        found[name + shared] = Plan(**advice.plan_arguments(best)), best.error
    return found


def train(plan, data, rate):
    """The final state of one private run."""
    optimizer = optax.inject_hyperparams(optax.sgd)(rate, MOMENTUM)  # all rates share a program
    trainer = Trainer(Convnet(), optimizer, plan, CLIP_NORM, loss=loss_of, micro_batch=BATCH)
    return trainer.fit(trainer.init(example=data[0][0]), data, progress=False)


def draw(results, rates, path):
    """Test accuracy of every run, and the mean of each way, against the learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (epsilon, ways) in zip(panels, results.items(), strict=True):
        for number, (name, values) in enumerate(ways.items()):
            values, at = 100 * np.array(values), np.array(rates) * 1.04 ** (number - 1)
            axes.plot(at, values, "o", color=f"C{number}", alpha=0.4, markersize=3)
            axes.plot(at, values.mean(axis=1), color=f"C{number}", label=name)
        axes.set(xscale="log", xlabel="learning rate", title=f"$\\varepsilon = {epsilon:g}$")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.legend(frameon=False, loc="lower left", fontsize=8)
    panels[0].set(ylabel="test accuracy (%)")
    figure.savefig(path, dpi=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--rate", type=float, nargs="+", default=[0.02, 0.06, 0.2], help="learning rates")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", help="picture, as .png, .svg or .pdf")
    args = parser.parse_args()
    data, test = load_digits()
    measure, results = accuracy_on(test), {}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)  # all runs of a plan share a program
        for epsilon in args.epsilon:
            ways = results[epsilon] = {}
            for name, (plan, error) in plans(epsilon, len(data[1])).items():
                print(
                    f"epsilon {epsilon:g}, {name}: {plan.steps} steps, noise multiplier {plan.noise_multiplier:.3f}, "
                    f"error of prefix sums {error:.2f}, epsilon <= {plan.epsilon.upper:.6f}"
                )
                ways[name] = []
                for rate in args.rate:
                    ways[name].append([float(measure(train(plan, data, rate).params)) for _ in range(args.runs)])
                    values = 100 * np.array(ways[name][-1])
                    spread = values.std(ddof=1) if args.runs > 1 else 0.0
                    print(f"    rate {rate:g}: accuracy {values.mean():.1f} % +- {spread:.1f}", flush=True)
    if args.out:
        draw(results, args.rate, args.out)


if __name__ == "__main__":
    main()
