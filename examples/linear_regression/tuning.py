"""Linear regression by generalised propose-test-release, tuned privately, beside methods that do not adapt to the data.

    python examples/linear_regression/tuning.py --out examples/linear_regression

Writes tuning.csv and tuning.png.  Needs scikit-learn (the diabetes data come with it) and matplotlib.
"""

import argparse
import csv
import pathlib
from dataclasses import dataclass

import numpy as np
from accounting import ACCOUNTINGS, calibrated
from regression import (
    clipped_error,
    normalised,
    output_perturbation,
    posterior_delta,
    posterior_pair,
    posterior_precision,
    released_bounds,
    residual_bound,
    ridge,
    sample_posterior,
    split,
)

import jaxacct as ja
from jaxacct import selection
from jaxacct.core.progress import Progress

DELTA = 1e-6
CANDIDATES = selection.Geometric(1.0 / 30.0)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
COPIES = (1, 40)
RIDGES = 4.0 ** np.arange(1, 7)
LEAST = 4.0
"""A sample is worth releasing if its noise gives no prediction a standard deviation above 1/sqrt(LEAST)."""
RADIUS = 1.0
"""Norm of theta: the constraint of output perturbation, and what the rules for a ridge assume."""
TUNED = {accounting: f"tuned, {accounting}" for accounting in ACCOUNTINGS}
PLAIN = ("OPS", "OPS-balanced", "OPS-balanced, published", "output perturbation")


@dataclass(frozen=True)
class Tuning:
    """Private selection of a ridge and a precision for one posterior sample, by one Budget."""

    budget: object

    def candidate(self, rng, x, y):
        """(score, theta) of one ridge drawn at random; the score is -inf where the test lets no useful sample pass."""
        budget, lam = self.budget, float(rng.choice(RIDGES))
        eigenvalue_mu, norm_mu, score_mu, _ = budget.parts
        least, residual = released_bounds(rng, x, y, lam, 1.0 / eigenvalue_mu, norm_mu, budget.failure)
        precision = posterior_precision(1.0 / (lam + least), residual, *budget.proposal)
        if precision * (lam + least) < LEAST:
            return -np.inf, None
        theta = sample_posterior(rng, *ridge(x, y, lam), precision)
        return -clipped_error(x, y, theta) + rng.normal() / score_mu, theta

    def run(self, rng, x, y):
        """The theta of the best of K candidates, K secret; zero where none passes its test."""
        count = rng.geometric(float(self.budget.law.gamma))
        _, theta = max((self.candidate(rng, x, y) for _ in range(count)), key=lambda found: found[0])
        return np.zeros(x.shape[1]) if theta is None else theta


def balanced_ridge(size, width, epsilon):
    """The ridge of OPS-balanced, which minimises a bound of the prediction error [Wang 2018]."""
    share, log = 0.05, np.log(2.0 / DELTA)
    least = min(epsilon / 2.0, np.sqrt(epsilon / 2.0))
    c = (width / 2.0 + np.sqrt(width * np.log(1.0 / share)) + np.log(1.0 / share)) * log / least**2
    return max((c * size / 2.0 / RADIUS**2) ** (1.0 / 3.0), least_ridge(epsilon))


def least_ridge(epsilon):
    """The least ridge at which the theorem of [Wang 2018] makes a posterior sample (epsilon, DELTA)-DP for all data."""
    return (1.0 + np.log(2.0 / DELTA)) / epsilon


def published_precision(size, lam, epsilon):
    """Precision of OPS-balanced by the formula of [Wang 2018]: a root of a quadratic, below `posterior_precision`."""
    log = np.log(2.0 / DELTA)
    lipschitz = 1.0 + min(np.sqrt(size / (2.0 * lam)), size / lam)
    a, b = lipschitz**2 / (lam + 1.0), lipschitz * np.sqrt(log / lam)
    c = (1.0 + log) / (2.0 * lam) - epsilon
    return ((-b + np.sqrt(b**2 - 4.0 * a * c)) / (2.0 * a)) ** 2


def posterior_sampler(size, lam, epsilon, precision=None):
    """One posterior sample that is (epsilon, DELTA)-DP for all data, as a function (rng, x, y)."""
    share, residual = 1.0 / lam, residual_bound(size, lam)
    if precision is None:
        precision = posterior_precision(share, residual, epsilon, DELTA)
    if precision == 0.0 or not posterior_delta(epsilon, *posterior_pair(precision, share, residual)) <= DELTA:
        raise ja.InputError(f"precision = {precision!r} is not ({epsilon!r}, {DELTA!r})-DP at ridge {lam!r}; lower it")
    return lambda rng, x, y: sample_posterior(rng, *ridge(x, y, lam), precision)


def perturbed(size, epsilon):
    """(epsilon, DELTA)-DP output perturbation; lam minimises an error bound, lam R^2 + n (noise (1 + R)/lam)^2."""
    noise = ja.calibrate_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sampling_probability=1.0, steps=1
    ).value
    lam = (2.0 * size * (noise * (1.0 + RADIUS) / RADIUS) ** 2) ** (1.0 / 3.0)
    return lambda rng, x, y: output_perturbation(rng, x, y, lam, noise, RADIUS)


def methods(size, width, epsilon):
    """{name: function (rng, x, y) -> theta}, each (epsilon, DELTA)-DP for data of this size."""
    found = {TUNED[name]: Tuning(calibrated(epsilon, DELTA, CANDIDATES, name)).run for name in ACCOUNTINGS}
    balanced = balanced_ridge(size, width, epsilon)
    found["OPS"] = posterior_sampler(size, 4.0 * least_ridge(epsilon), epsilon)
    found["OPS-balanced"] = posterior_sampler(size, balanced, epsilon)
    published = published_precision(size, balanced, epsilon)
    found["OPS-balanced, published"] = posterior_sampler(size, balanced, epsilon, published)
    found["output perturbation"] = perturbed(size, epsilon)
    return found


def error(theta, test):
    """Mean squared error of the predictions, cut to [-1, 1], divided by the variance of the test records' targets."""
    x, y = test
    return float(np.mean((y - np.clip(x @ theta, -1.0, 1.0)) ** 2) / np.var(y))


def experiment(x, y, copies, epsilons, repeats, seed, progress=None):
    """Rows (copies, records, epsilon, method, mean error, standard error, repeats)."""
    rows, splits = [], [split(np.random.default_rng([seed, k]), x, y, copies) for k in range(repeats)]
    size = len(splits[0][0][1])
    every = len(TUNED) + len(PLAIN)
    bar = Progress(len(epsilons) * every, progress, unit="methods")
    for place, epsilon in enumerate(epsilons):
        errors = {}
        for number, (name, method) in enumerate(methods(size, x.shape[1], epsilon).items(), 1):
            rng = np.random.default_rng()
            errors[name] = [error(method(rng, *train), test) for train, test in splits]
            bar.update(place * every + number)
        errors["not private"] = [error(ridge(*train, 1.0)[1], test) for train, test in splits]
        errors["zero"] = [error(np.zeros(x.shape[1]), test) for _, test in splits]
        for name, values in errors.items():
            deviation = np.std(values, ddof=1) / np.sqrt(repeats)
            rows.append((copies, size, epsilon, name, float(np.mean(values)), float(deviation), repeats))
    bar.close()
    return rows


COLUMNS = ("copies", "records", "epsilon", "method", "error", "standard_error", "repeats")


def write(rows, path):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*row[:4], f"{row[4]:.6f}", f"{row[5]:.6f}", row[6]] for row in rows)


def draw(rows, path):
    """Error against epsilon, one panel per size of the data, with standard errors."""
    from matplotlib.figure import Figure

    sizes = sorted({row[:2] for row in rows})
    figure = Figure(figsize=(4.6 * len(sizes) + 1.8, 4.0), layout="constrained")
    for axes, (copies, size) in zip(figure.subplots(1, len(sizes), squeeze=False).flat, sizes, strict=True):
        for name in dict.fromkeys(row[3] for row in rows):
            _, _, at, _, mean, deviation, _ = zip(*(r for r in rows if r[0] == copies and r[3] == name), strict=True)
            style = "-o" if name.startswith("tuned") else "--s" if name in PLAIN else ":"
            axes.errorbar(at, mean, deviation, fmt=style, markersize=4, capsize=2, label=name)
        axes.set(xscale="log", xlabel=r"$\varepsilon$", ylabel="test error / variance")
        axes.set_xticks(at, [f"{value:g}" for value in at], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_title(f"diabetes, {size:,} records" + (f" (each {copies} times)" if copies > 1 else ""))
        axes.grid(color="0.9")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the table and the picture"
    )
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the splits into training and test data, not of the noise"
    )
    parser.add_argument("--quick", action="store_true", help="one epsilon, the data once, 20 repeats")
    args = parser.parse_args(arguments)
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    x, y = normalised(data.data, data.target)
    rows = []
    for copies in COPIES[:1] if args.quick else COPIES:
        epsilons, repeats = ((4.0,), 20) if args.quick else (EPSILONS, args.repeats)
        rows += experiment(x, y, copies, epsilons, repeats, args.seed)
    for row in rows:
        print(f"{row[1]:>7,} records  epsilon {row[2]:<4g} {row[3]:22} {row[4]:.4f} +- {row[5]:.4f}")
    args.out.mkdir(parents=True, exist_ok=True)
    write(rows, args.out / "tuning.csv")
    draw(rows, args.out / "tuning.png")
    return rows


if __name__ == "__main__":
    main()
