"""Query release compared: noisy answers, noisy data, and private multiplicative weights (the lecture's table).

k linear queries on n records of a universe X, each answered as a fraction of n (n is public; neighbours add or
remove one record). Noisy answers spend the budget on k answers, noisy data adds noise to every cell of the
histogram, and private multiplicative weights (Hardt and Rothblum 2010) answers from a synthetic distribution.
AboveThreshold finds the queries that this distribution answers badly; a noisy answer to each, at most c in all,
updates the distribution. A method that is composed of equal parts gives each part the largest epsilon for which
jaxacct's certified epsilon of the composition meets the target, for delta = 0 and for delta > 0. The lecture's
error bounds are printed without their constants.
At sizes that fit on a laptop, the weights have a smaller error than noisy answers only for many queries, and a
smaller error than noisy data only for a universe of about n^2 records.

    python examples/private_multiplicative_weights.py --queries 100 1000 10000 --out query_release.png
"""

import argparse
import math
import random

import numpy as np

import jaxacct as ja
from jaxacct import samplers


def part_epsilon(parts, epsilon, delta):
    """The largest epsilon of each of `parts` equal pure-DP parts whose certified composition meets the target."""
    if delta == 0:
        return epsilon / parts * (1 - 1e-12)
    grid = epsilon / np.linspace(max(1.0, 0.5 * math.sqrt(parts)), parts, 16)
    holds = ja.epsilon(ja.repeat(ja.PureDP(grid), parts), delta).upper <= epsilon
    return float(grid[np.argmax(holds)]) if holds.any() else epsilon / parts * (1 - 1e-12)


def noisy_answers(data, queries, epsilon, delta, rng):
    each = part_epsilon(len(queries), epsilon, delta)
    noise = samplers.DiscreteLaplaceNoise(1 / each)
    return np.array(noise.release((queries @ data).tolist(), rng)) / data.sum()


def noisy_data(data, queries, epsilon, delta, rng):
    released = np.array(samplers.DiscreteLaplaceNoise(1 / epsilon).release(data.tolist(), rng))
    return queries @ released / data.sum()


def plan(n, universe, k, epsilon, delta):
    """The number of updates, the epsilon of each part and the threshold, all chosen without the data."""
    best = None
    for updates in (3, 10, 30, 100, 300, 1000):
        parts = 2 * updates
        rough = epsilon / (parts if delta == 0 else min(parts, math.sqrt(2 * parts * math.log(1 / delta))))
        noise = samplers.SparseVector(rough, 0).accuracy(0.05, k) / 2
        threshold = math.ceil(max(noise, 0.4 * n * math.sqrt(math.log(universe) / updates)))
        if best is None or threshold < best[1]:
            best = updates, threshold
    updates, threshold = best
    return updates, part_epsilon(2 * updates, epsilon, delta), threshold


def multiplicative_weights(data, queries, epsilon, delta, rng):
    n, universe = int(data.sum()), data.size
    left, each, threshold = plan(n, universe, len(queries), epsilon, delta)
    noise = samplers.DiscreteLaplaceNoise(1 / each)
    above = samplers.SparseVector(each, threshold, rng=rng)
    weights, answers = np.full(universe, 1.0 / universe), []
    for query in queries:
        guess, truth = float(query @ weights), int(query @ data)
        if left and above.ask(abs(truth - round(n * guess))):
            left -= 1
            answer = noise.release(truth, rng) / n
            weights = weights * np.exp(np.clip(2 * (answer - guess), -1, 1) * query)
            weights /= weights.sum()
            if left:
                above = samplers.SparseVector(each, threshold, rng=rng)
            guess = answer
        answers.append(guess)
    return np.array(answers)


METHODS = {
    "noisy answers": noisy_answers,
    "noisy data": noisy_data,
    "multiplicative weights": multiplicative_weights,
}


def orders(k, universe, n, epsilon, delta, beta=0.05):
    """The lecture's bounds on the errors of the three methods, without constants."""
    log = math.log(k / beta)
    cells = math.sqrt(universe) * log / (n * epsilon)
    if delta == 0:
        return k * log / (n * epsilon), cells, (math.log(universe) * log / (n * epsilon)) ** (1 / 3)
    return math.sqrt(k) * log / (n * epsilon), cells, (math.sqrt(math.log(universe)) * log / (n * epsilon)) ** 0.5


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--bits", type=int, default=10, help="the universe has 2**bits records")
    parser.add_argument("--queries", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, nargs="+", default=[0.0, 1e-6])
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="simulations only: real releases take no seed")
    parser.add_argument("--out", help="also draw the errors to this file")
    args = parser.parse_args(arguments)
    if min(args.records, args.bits, args.trials) < 1:
        parser.error("--records, --bits and --trials must be 1 or more")
    rng, generator, universe = random.Random(args.seed), np.random.default_rng(args.seed), 2**args.bits
    data = generator.multinomial(args.records, generator.dirichlet(np.full(universe, 0.05)))
    table = {}
    for delta in args.delta:
        print(f"epsilon {args.epsilon}, delta {delta}: largest error over the queries (order without constants)")
        for k in args.queries:
            queries = generator.integers(0, 2, (k, universe))
            truth = queries @ data / args.records
            row = []
            for (name, method), order in zip(
                METHODS.items(), orders(k, universe, args.records, args.epsilon, delta), strict=True
            ):
                runs = [method(data, queries, args.epsilon, delta, rng) for _ in range(args.trials)]
                error = float(np.median([np.abs(run - truth).max() for run in runs]))
                table.setdefault((delta, name), []).append(error)
                row.append(f"{name} {error:.4f} ({order:.4f})")
            print(f"  k {k:6d}  " + "  ".join(row))
    if args.out:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(
            1, len(args.delta), figsize=(9, 3.8), sharey=True, squeeze=False, layout="constrained"
        )
        for (delta, name), column in table.items():
            axis = axes[0, args.delta.index(delta)]
            axis.loglog(args.queries, column, marker="o", label=name)
            axis.set(title=f"ε = {args.epsilon:g}, δ = {delta:g}", xlabel="queries k")
        axes[0, 0].set_ylabel("largest error (fraction of n)")
        axes[0, -1].legend()
        figure.savefig(args.out)
    return table


if __name__ == "__main__":
    main()
