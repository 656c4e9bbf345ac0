"""Selections a second: "run K times, keep the best" of DP-SGD runs, at the exact worst case over scores.

    python benchmarks/selection.py [--count 1000] [--rtol 1e-3] [--rounds 5] [--backend xla] [--json]

Five bases, (noise, sampling probability, steps) from (0.8, .004, 3000) to (4, 1, 20); for each law of K as many
configurations as asked for, with random parameters of the law and delta log-uniform in (1e-9, 1e-3).  First the curves
of the bases, which are computed once and kept; then the compilation of the law's programs; then the warm selections,
both directions, median of the rounds.  Widths are upper - lower as a share of upper.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np

import jaxacct as ja
from jaxacct import selection

BASES = ([1.0, 0.8, 2.0, 1.5, 4.0], [0.01, 0.004, 0.1, 0.02, 1.0], [3000, 3000, 1000, 2000, 20])
"""Noise multipliers, sampling probabilities and steps of the bases, side by side."""


def laws(rng, size):
    """By name, of shape (size, 1), to be paired with bases of shape (5,)."""
    uniform = lambda low, high: rng.uniform(low, high, (size, 1))
    return {
        "truncated negative binomial": selection.TruncatedNegativeBinomial(
            uniform(-0.7, 3.0), 10.0 ** uniform(-2.5, -0.3)
        ),
        "Poisson": selection.Poisson(10.0 ** uniform(0.0, 2.0)),
        "binomial": selection.Binomial(100.0, uniform(0.02, 0.5)),
    }


def timed(call):
    begin = time.perf_counter()
    answer = call()
    return time.perf_counter() - begin, answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="auto", choices=["auto", "numpy", "xla"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, size = np.random.default_rng(0), -(-options.count // len(BASES[0]))
    runs = ja.dp_sgd(*BASES)
    deltas = 10.0 ** rng.uniform(-9.0, -3.0, (size, 1))
    rows = []
    for name, law in laws(rng, size).items():
        ask = lambda law=law: ja.epsilon(
            selection.select(runs, law), deltas, rtol=options.rtol, backend=options.backend
        )
        first, _ = timed(ask)
        walls, answers = zip(*(timed(ask) for _ in range(options.rounds)), strict=True)
        found, wall = answers[0], statistics.median(walls)
        share = np.where(np.isfinite(found.upper), (found.upper - found.lower) / found.upper, np.inf)
        rows.append(
            {
                "law": name,
                "selections": share.size,
                "first call seconds": first,
                "selections per second": share.size / wall,
                "slowest round": share.size / max(walls),
                "fastest round": share.size / min(walls),
                "width median": float(np.median(share)),
                "width 90 %": float(np.quantile(share, 0.9)),
                "width largest": float(share.max()),
            }
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if options.json:
        print(json.dumps({"cores": cores, "rtol": options.rtol, "rows": rows}))
        return
    print(
        f"rtol {options.rtol:g}, {cores} cores; the first call of all has computed the curves of {len(BASES[0])} bases"
    )
    for row in rows:
        print("\n" + row.pop("law"))
        for key, value in row.items():
            print(f"  {key:24s} {value:10.4g}")


if __name__ == "__main__":
    main()
