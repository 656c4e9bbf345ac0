"""Tuning on a random subset against plain private tuning at equal epsilon, on digits (Koskela, Kulkarni, Figures 2-8).

    python examples/subset_tuning/subset_tuning.py [--quick] [--out FOLDER]

Arms: "plain" tunes on all training data and releases the winner; its noise is calibrated by the exact worst case over
scores, or by Renyi accounting (the papers' baseline).  "rest" and "all" tune on a Poisson sample of share q, and then
train once with the winner's configuration: "rest" on the rest of the data, "all" on all data.  Every arm as a whole
meets the same (epsilon, 1e-5).
Winners are chosen by accuracy on a public validation set; accuracies are those of the released model on the test set.
"""

import argparse
import random
from pathlib import Path
from typing import NamedTuple

import digits
import numpy as np

import jaxacct as ja
from jaxacct import selection
from jaxacct.tuning import Cost
from jaxacct.tuning.plans import SubsetPlan, guessed_noise, least_noise

RATES = {"DP-SGD": 10.0 ** np.arange(-3.0, 1.6, 0.5), "DP-Adam": 10.0 ** np.arange(-4.0, 0.1, 0.5)}
"""Learning rates: the grids of Table 2 for FashionMNIST (DP-SGD) and MNIST (DP-Adam)."""
ALONE = {"rate": (0.1,), "epochs": (15,), "mean": 15, "shares": (0.1,), "epsilons": (1.0, 4.0)}
"""Settings to tune only the learning rate; "rate" is the probability of DP-SGD's Poisson sampling."""
JOINT = {"rate": (0.1, 0.2), "epochs": (10, 20), "mean": 15, "shares": (0.1,), "epsilons": (4.0,)}
"""Settings to tune the learning rate, the sampling probability and the epochs jointly."""


class Arm(NamedTuple):
    """One way to tune, with the noise for each (rate, steps), the cost and the epsilon of the whole."""

    name: str
    share: float  # of the training data that is tuned on; 1 for plain tuning
    variant: str
    settings: list  # (rate, steps, noise of candidates, noise of the final run)
    cost: Cost
    epsilon: float


def plain(epsilon, law, rates, epochs, n, renyi):
    """Plain private tuning: noise by the exact worst case, or by Renyi accounting [Papernot, Steinke 2022]."""
    pairs = [(rate, int(np.ceil(e / rate))) for rate in rates for e in epochs]
    known = {}

    def noises(x):
        if len(pairs) == 1:
            return [x]
        return ja.calibrate_noise_multiplier(1 / x, digits.DELTA, *np.array(pairs).T).value

    def upper(x):
        runs = [ja.dp_sgd(s, *pair) for s, pair in zip(noises(x), pairs, strict=True)]
        base = runs[0]
        if len(runs) > 1:
            top = max(float(ja.epsilon(run, digits.DELTA * 1e-4).upper) for run in runs)
            share = np.full(len(runs), 1 / len(runs))
            base = selection.candidates_profile(runs, np.linspace(0.0, top, 200), share)
        answer = (
            selection.bound_epsilon(base, law, digits.DELTA, bound="renyi")
            if renyi
            else ja.epsilon(selection.select(base, law), digits.DELTA)
        )
        known[x] = float(answer.upper)
        return known[x]

    near = guessed_noise(epsilon, digits.DELTA, *pairs[0]) if len(pairs) == 1 else 1.5 / epsilon
    x = least_noise(upper, epsilon, near)
    reached = known[min(known, key=lambda tried: abs(tried - x))]
    settings = [(*pair, s, s) for pair, s in zip(pairs, noises(x), strict=True)]
    mean_epochs = float(np.mean([rate * steps for rate, steps in pairs]))
    return Arm("plain, Renyi" if renyi else "plain, ours", 1.0, "", settings, Cost(law, n, mean_epochs), reached)


def on_subset(epsilon, law, rates, epochs, n, share, variant):
    plan = SubsetPlan(epsilon, digits.DELTA, n, share, law, sampling_probability=rates, epochs=epochs, variant=variant)
    settings = [(s.sampling_probability, s.steps, s.tuning_noise, s.final_noise) for s in plan.settings]
    return Arm(f"{variant}, q = {share:g}", share, variant, settings, plan.cost, float(plan.epsilon.upper))


def arms_for(epsilon, what, n):
    law, rates, epochs = selection.Poisson(what["mean"]), what["rate"], what["epochs"]
    found = [plain(epsilon, law, rates, epochs, n, renyi=False)]
    if len(rates) * len(epochs) == 1:
        found.append(plain(epsilon, law, rates, epochs, n, renyi=True))
    for share in what["shares"]:
        found += [on_subset(epsilon, law, rates, epochs, n, share, variant) for variant in ("rest", "all")]
    return found


def experiment(arm, optimizer, data, seeds):
    """(test accuracies, learning rates), one per seed; every arm gets the same K and random draws from a seed."""
    train, valid, test = data
    n, grid = len(train[1]), RATES[optimizer]
    candidates, samples = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        k = max(arm.cost.law.sample(random.Random(seed)), 1)  # Pr[K = 0] is 3e-7, with --quick 2e-2
        drawn = [(rng.integers(len(grid)), rng.integers(2**30), digits.initial(rng)) for _ in range(k)]
        inside = np.random.default_rng([seed, 1]).random(n) < arm.share
        samples.append(inside)
        candidates.append([(grid[i], arm.settings[j % len(arm.settings)], first) for i, j, first in drawn])
    owner = np.repeat(np.arange(len(seeds)), [len(c) for c in candidates])
    flat = [one for each in candidates for one in each]
    room = max(int(inside.sum()) for inside in samples)
    members = np.stack([_padded(np.flatnonzero(samples[who]), room) for who in owner])
    tuned = digits.train(optimizer, _runs(flat, members, arm.share * n, final=False), train, seed=[*seeds, 7])
    score = digits.accuracy(tuned, valid)
    best = [int(np.flatnonzero(owner == s)[np.argmax(score[owner == s])]) for s in range(len(seeds))]
    if not arm.variant:
        return digits.accuracy(tuned, test)[best], np.array([flat[b][0] for b in best])
    growth = (1.0 - arm.share if arm.variant == "rest" else 1.0) / arm.share
    factor = growth if optimizer == "DP-SGD" else 1.0  # only SGD's learning rate grows with the data
    final = [
        (flat[b][0] * factor, flat[b][1], digits.initial(np.random.default_rng([s, 2])))
        for b, s in zip(best, seeds, strict=True)
    ]
    used = [np.flatnonzero(~inside) if arm.variant == "rest" else np.arange(n) for inside in samples]
    members = np.stack([_padded(rows, n) for rows in used])
    runs = _runs(final, members, arm.share * growth * n, final=True)
    return digits.accuracy(digits.train(optimizer, runs, train, seed=[*seeds, 8]), test), np.array(
        [rate for rate, _, _ in final]
    )


def _runs(each, members, records, final):
    import jax

    rates = np.array([one[0] for one in each])
    rate, steps, tuning, last = np.array([one[1] for one in each], np.float64).T
    params = jax.tree.map(lambda *x: np.stack(x), *(one[2] for one in each))
    return digits.Runs(params, rates, last if final else tuning, rate, steps.astype(int), rate * records, members)


def _padded(rows, room):
    return np.concatenate([rows, np.full(room - len(rows), -1)])


def table(what, optimizers, data, seeds, path):
    """Return one row per optimizer, epsilon and arm; after each, write all rows so far to the CSV `path`."""
    rows = []
    for epsilon in what["epsilons"]:
        for arm in arms_for(epsilon, what, len(data[0][1])):
            for optimizer in optimizers:
                found, rates = experiment(arm, optimizer, data, seeds)
                mean, error = digits.mean_and_error(100 * found)
                rows.append(
                    {
                        "optimizer": optimizer,
                        "epsilon": epsilon,
                        "arm": arm.name,
                        "certified_epsilon": arm.epsilon,
                        "noise_multiplier": float(np.mean([s[3] for s in arm.settings])),
                        "test_accuracy": mean,
                        "standard_error": error,
                        "gradient_evaluations": arm.cost.expected,
                        "gradient_evaluations_95": float(arm.cost.quantile(0.95)),
                        "learning_rate_median": float(np.median(rates)),
                        "seeds": len(seeds),
                    }
                )
                digits.write(rows, path)
                print(f"{optimizer} eps {epsilon:g} {arm.name}: {mean:.1f} +- {error:.1f} %", flush=True)
    return rows


def draw(rows, path):
    """Accuracy against epsilon, and against gradient evaluations, a panel for each optimizer."""
    from matplotlib.figure import Figure

    from jaxacct.plots import style

    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    with style.settings():
        figure = Figure(figsize=(7.2, 3.0 * len(names)), layout="constrained")
        panels = figure.subplots(len(names), 2, squeeze=False)
        for name, (left, right) in zip(names, panels, strict=True):
            for arm, colour in zip(arms, style.colours(arms), strict=True):
                some = [row for row in rows if row["optimizer"] == name and row["arm"] == arm]
                x, y, e, cost = (
                    np.array([row[key] for row in some])
                    for key in ("epsilon", "test_accuracy", "standard_error", "gradient_evaluations")
                )
                left.errorbar(x, y, e, marker="o", markersize=3, capsize=2, color=colour, label=arm)
                right.errorbar(cost, y, e, marker="o", markersize=3, capsize=2, color=colour, linestyle="none")
            left.set(xlabel=style.MEANING["epsilon"] + " of the whole", ylabel="test accuracy (%)", title=name)
            right.set(xlabel="expected gradient evaluations", xscale="log", title=name)
        panels[0, 0].legend()
        figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, one epsilon, short runs: a look, no result")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for tables and pictures")
    args = parser.parse_args()
    data, seeds, optimizers = digits.load(), list(range(10)), list(RATES)
    parts = {"rate_alone": ALONE, "rate_epochs_sampling": JOINT}
    if args.quick:
        seeds, optimizers = [0, 1], ["DP-SGD"]
        less = {"mean": 4, "shares": (0.3,), "epsilons": (4.0,)}
        short = {"rate": (0.5,), "epochs": (12,)}, {"rate": (0.4, 0.5), "epochs": (12,)}
        parts = {"rate_alone": ALONE | less | short[0], "rate_epochs_sampling": JOINT | less | short[1]}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, what in parts.items():
        rows = table(what, optimizers, data, seeds, args.out / f"{name}.csv")
        draw(rows, args.out / f"{name}.png")


if __name__ == "__main__":
    main()
