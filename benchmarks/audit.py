"""How many selections per second are simulated: candidate by candidate for any score, or by the winner's rank.

    python benchmarks/audit.py [--runs 10000000] [--repeats 3] [--json]

For every law of K it prints the selections per second of wall time and per second of processor time; other work on the
machine changes the second less.  Programs are compiled before the clock starts.  `generic` draws K, then K Gaussian
candidates, scores them by |x - 1.67| and keeps the best; `cells` draws K and the winner's rank, and finds the winner's
cell among 400.
"""

import argparse
import json
import os
import time

import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr

from jaxacct import audit, selection

LAWS = {
    "geometric, mean 10": selection.Geometric(0.1),
    "logarithmic, mean 10": selection.Logarithmic(0.0268),
    "Poisson, mean 10": selection.Poisson(10.0),
    "always 10": selection.PointMass(10),
    "geometric, mean 100": selection.Geometric(0.01),
}
CELLS = np.diff(ndtr(np.concatenate([[-np.inf], np.linspace(-5, 5, 399), [np.inf]])))


def score(x):
    return jnp.abs(x - 1.67)


def beyond(x):
    return x > 2.0


def generic(law, runs, seed):
    return audit.count_winners(audit.gaussian(), score, law, runs, beyond, seed=seed)


def cells(law, runs, seed):
    return audit.cell_counts(CELLS, law, runs, seed=seed)


def measured(play, law, runs, repeats):
    """(selections per second, selections per second of processor time), the best of the repeats."""
    play(law, 1000, 0)
    best = [0.0, 0.0]
    for seed in range(repeats):
        clock, processor = time.perf_counter(), time.process_time()
        play(law, runs, seed)
        spent = time.perf_counter() - clock, time.process_time() - processor
        best = [max(b, runs / s) for b, s in zip(best, spent, strict=True)]
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name, law in LAWS.items():
        for play in (generic, cells):
            runs = max(arguments.runs // (10 if float(law.mean) > 50 and play is generic else 1), 1)
            clock, processor = measured(play, law, runs, arguments.repeats)
            rows.append({"law": name, "game": play.__name__, "per_second": clock, "per_core_second": processor})
    if arguments.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}))
        return
    print(f"{os.cpu_count()} cores; million selections per second: by the clock; per second of one core's time")
    for row in rows:
        print(f"{row['law']:>22} {row['game']:>8} {row['per_second'] / 1e6:8.2f} {row['per_core_second'] / 1e6:8.2f}")


if __name__ == "__main__":
    main()
