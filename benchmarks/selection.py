"""Selections a CPU second: "run K times, keep the best" over new bases, in the exact worst case over scores.

    python benchmarks/selection.py [--gaussians 100] [--dp-sgd 16] [--rtol 1e-3] [--rounds 3] [--backend xla] [--json]

Every selection of every round has a base of its own that no earlier call has seen: a Gaussian (noise 1 to 20), or a
DP-SGD run (noise .8 to 5, sampling probability .002 to .1, 100 to 10,000 steps), both log-uniform.  K's law and delta
(1e-9 to 1e-3) are drawn anew, too.  "again" asks the same question a second time, when the curves of the bases are in a
cache.  A first round, which does not count, imports and, with --backend xla, compiles.  The last line solves for the
noise of tuned DP-SGD runs.  Rates are by CPU seconds of all threads of the process, medians over the rounds.  Widths
are upper - lower as a share of upper.
"""

import argparse
import json
import statistics
import time

import numpy as np

import jaxacct as ja
from jaxacct import selection


def uniform_in_log(rng, low, high, size):
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def gaussians(rng, size):
    return ja.Gaussian(uniform_in_log(rng, 1.0, 20.0, size))


def runs(rng, size):
    steps = np.round(uniform_in_log(rng, 100, 10_000, size))
    return ja.dp_sgd(uniform_in_log(rng, 0.8, 5.0, size), uniform_in_log(rng, 0.002, 0.1, size), steps)


def laws(rng, size):
    """Yield (name, law of K) of each of three families."""
    yield (
        "truncated negative binomial",
        selection.TruncatedNegativeBinomial(rng.uniform(-0.7, 3.0, size), 10.0 ** rng.uniform(-2.5, -0.3, size)),
    )
    yield "Poisson", selection.Poisson(10.0 ** rng.uniform(0.0, 2.0, size))
    yield "binomial", selection.Binomial(100.0, rng.uniform(0.02, 0.5, size))


def seconds(call):
    begin = time.process_time()
    answer = call()
    return time.process_time() - begin, answer


def measured(rng, bases, size, rounds, keywords):
    """A row for each law of K: selections a CPU second with new bases and with the same bases again, and widths."""
    rows = []
    for place, (name, _) in enumerate(laws(rng, 1)):
        new, again, widths = [], [], []
        for turn in range(rounds + 1):
            law = list(laws(rng, size))[place][1]
            chosen, deltas = selection.select(bases(rng, size), law), 10.0 ** rng.uniform(-9.0, -3.0, size)
            ask = lambda chosen=chosen, deltas=deltas: ja.epsilon(chosen, deltas, **keywords)
            (first, found), (second, _) = seconds(ask), seconds(ask)
            if turn:
                new.append(first / size)
                again.append(second / size)
                finite = np.isfinite(found.upper)
                widths.append(np.where(finite, (found.upper - found.lower) / found.upper, np.inf))
        width = np.concatenate(widths)
        rows.append(
            {
                "bases": bases.__name__,
                "K": name,
                "new bases a CPU second": 1.0 / statistics.median(new),
                "again": 1.0 / statistics.median(again),
                "width median": float(np.median(width)),
                "width 90 %": float(np.quantile(width, 0.9)),
                "width largest": float(width.max()),
            }
        )
    return rows


def solved(rng, size, keywords):
    """How many tuned runs a CPU second have their noise calibrated, and how many of them meet the target."""
    q, steps = uniform_in_log(rng, 0.002, 0.1, size), np.round(uniform_in_log(rng, 100, 10_000, size))
    law = selection.TruncatedNegativeBinomial(1.0, 10.0 ** rng.uniform(-2.0, -0.3, size))
    targets = rng.uniform(1.0, 8.0, size)
    cost, found = seconds(lambda: ja.calibrate_noise_multiplier(targets, 1e-5, q, steps, repetitions=law, **keywords))
    return {"noise solved a CPU second": size / cost, "targets met": int(np.sum(found.epsilon.upper <= targets))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gaussians", type=int, default=100, help="Gaussian bases in a round")
    parser.add_argument("--dp-sgd", type=int, default=16, help="DP-SGD bases in a round")
    parser.add_argument("--solve", type=int, default=8, help="tuned runs whose noise is solved for")
    parser.add_argument(
        "--rtol", type=float, default=1e-3, help="wanted relative width; the default of ja.epsilon is 1e-4"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="auto", choices=["auto", "numpy", "xla"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, keywords = np.random.default_rng(0), {"rtol": options.rtol, "backend": options.backend}
    rows = []
    for bases, size in ((gaussians, options.gaussians), (runs, options.dp_sgd)):
        rows += measured(rng, bases, size, options.rounds, keywords) if size else []
    more = solved(rng, options.solve, {"backend": options.backend}) if options.solve else {}
    if options.json:
        print(json.dumps({"rtol": options.rtol, "backend": options.backend, "rows": rows, **more}))
        return
    print(f"rtol {options.rtol:g}, backend {options.backend}; medians of {options.rounds} rounds")
    for row in rows:
        print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else str(value) for key, value in row.items()))
    for key, value in more.items():
        print(f"{key} {value:.3g}")


if __name__ == "__main__":
    main()
