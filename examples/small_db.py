"""SmallDB: answer many linear queries from one small database chosen by the exponential mechanism.

Among all databases of m = ceil(log(2k) / (2 alpha^2)) records over the universe, the utility of y is
-max_f |f(x) - f(y)|, of sensitivity 1/n under replacing one record; some y has error at most alpha (sampling
and Hoeffding), and the exponential mechanism loses (2 / (n epsilon)) log(candidates / beta) more [Blum,
Ligett, Roth 2008; Dwork and Roth 2014, section 4.1].

    python examples/small_db.py --records 100 1000 10000 --out small_db.png
"""

import argparse
import itertools
import math

import jax
import numpy as np

from jaxacct import samplers
from jaxacct.training import CHACHA20


def candidates(universe, size):
    """Every multiset of `size` records, as frequencies: one row for each."""
    rows = list(itertools.combinations_with_replacement(range(universe), size))
    return np.stack([np.bincount(row, minlength=universe) for row in rows]) / size


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[100, 300, 1000, 3000, 10_000])
    parser.add_argument("--bits", type=int, default=3, help="the universe has 2**bits records")
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=0.45)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--beta", type=float, default=0.05)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="simulations only: real releases take no seed")
    parser.add_argument("--out", help="also draw the errors to this file")
    args = parser.parse_args(arguments)
    if min(args.bits, args.queries, args.trials) < 1:
        parser.error("--bits, --queries and --trials must be 1 or more")
    generator, universe = np.random.default_rng(args.seed), 2**args.bits
    size = math.ceil(math.log(2 * args.queries) / (2 * args.alpha**2))
    small = candidates(universe, size)
    queries = generator.integers(0, 2, (args.queries, universe))
    print(f"{len(small)} databases of {size} records over {universe}; {args.queries} queries, epsilon {args.epsilon}")
    law = generator.dirichlet(np.full(universe, 0.3))
    columns = {"best": [], "95 % of runs": [], "theorem": [], "noisy answers, 95 %": []}
    for n in args.records:
        data = generator.multinomial(n, law) / n
        errors = np.abs((small - data) @ queries.T).max(axis=1)
        mechanism = samplers.ExponentialChoice(args.epsilon, sensitivity=1 / n)
        chosen = mechanism.sample(jax.random.key(args.seed, impl=CHACHA20), -errors, (args.trials,))
        noise = generator.laplace(scale=args.queries / (n * args.epsilon), size=(args.trials, args.queries))
        loss = samplers.exponential_error(args.epsilon, args.beta, len(small), sensitivity=1 / n)
        values = (
            errors.min(),
            np.quantile(errors[chosen], 1 - args.beta),
            args.alpha + float(loss),
            np.quantile(np.abs(noise).max(axis=1), 1 - args.beta),
        )
        for column, value in zip(columns.values(), values, strict=True):
            column.append(float(value))
        print(f"n {n:7d}  " + "  ".join(f"{name} {value:.4f}" for name, value in zip(columns, values, strict=True)))
    if args.out:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
        for name, column in columns.items():
            axis.loglog(args.records, column, marker="o", label=name)
        axis.set(xlabel="records n", ylabel="largest error over the queries (normalised)", title="SmallDB")
        axis.legend()
        figure.savefig(args.out)
    return columns


if __name__ == "__main__":
    main()
