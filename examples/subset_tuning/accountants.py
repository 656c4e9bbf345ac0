"""The same tuner at the same total epsilon, accounted for by the exact worst case over scores and by Renyi divergences.

    python examples/subset_tuning/accountants.py [--quick] [--out FOLDER]

DP-SGD on digits, its learning rate tuned on all training data, K geometric.  Three arms: Renyi accounting [Papernot,
Steinke 2022]; ours with the same candidates and less noise; ours with the same noise and more candidates.  The
last arm is not trained if its expected number of candidates exceeds MOST; then only this number is stated.
"""

import argparse
from pathlib import Path

import digits
import numpy as np
from subset_tuning import Arm, experiment, plain

import jaxacct as ja
from jaxacct import selection
from jaxacct.tuning import Cost

RATE, EPOCHS, MEAN = (0.1,), (15,), 10
EPSILON = 2.0
MOST = 60
"""Expected number of candidates up to which an arm is trained."""


def arms_for(epsilon, epochs, mean, n):
    law = selection.Geometric(1 / mean)
    renyi = plain(epsilon, law, RATE, epochs, n, renyi=True)
    less = plain(epsilon, law, RATE, epochs, n, renyi=False)
    rate, steps, noise, _ = renyi.settings[0]
    allowed = ja.repetitions_allowed(ja.dp_sgd(noise, rate, steps), epsilon, digits.DELTA, rtol=1e-2)
    cost = Cost(allowed.law, n, rate * steps)
    more = Arm("ours, more candidates", 1.0, "", renyi.settings, cost, float(allowed.epsilon.upper))
    return [renyi._replace(name="Renyi"), less._replace(name="ours, less noise"), more]


def table(epsilon, epochs, mean, data, seeds):
    rows, first = [], None
    for arm in arms_for(epsilon, epochs, mean, len(data[0][1])):
        trained = float(arm.cost.law.mean) <= MOST
        found = 100 * experiment(arm, "DP-SGD", data, seeds)[0] if trained else np.full(len(seeds), np.nan)
        first = found if first is None else first
        average, error = digits.mean_and_error(found)
        gain, gain_error = digits.mean_and_error(found - first)
        rows.append(
            {
                "arm": arm.name,
                "target_epsilon": epsilon,
                "certified_epsilon": arm.epsilon,
                "noise_multiplier": float(arm.settings[0][2]),
                "expected_candidates": float(arm.cost.law.mean),
                "test_accuracy": average,
                "standard_error": error,
                "gain_over_renyi": gain,
                "gain_standard_error": gain_error,
                "seeds": len(seeds),
            }
        )
        print(*(f"{x:.5g}" if isinstance(x, float) else x for x in rows[-1].values()), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, few candidates: a look, no result")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the table")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds, mean = ([0, 1], 2) if args.quick else (list(range(10)), MEAN)
    rows = table(EPSILON, EPOCHS, mean, digits.load(), seeds)
    digits.write(rows, args.out / "accountants.csv")


if __name__ == "__main__":
    main()
