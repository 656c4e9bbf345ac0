"""Private voting: publish noisy counts, or only the winner by report-noisy-max (lecture: private selection).

One ballot names one candidate, or any number of them (approval). If it names one, noise of scale 1/epsilon
makes noisy counts and report-noisy-max epsilon-DP. If it names any number, it can change every count: noisy counts
then need the scale (number of candidates)/epsilon. Report-noisy-max still needs only 1/epsilon, because a ballot
changes all counts in the same direction.

    python examples/private_voting.py --ballots 200 --out voting.png
"""

import argparse
import random

import jax
import numpy as np

import jaxacct as ja
from jaxacct import samplers
from jaxacct.training import CHACHA20

EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def elect(counts, sensitivity, epsilon, trials, rng):
    """How often the true winner is elected: by noisy counts, and by report-noisy-max with three noises."""
    winner = int(np.argmax(counts))
    histogram = samplers.DiscreteLaplaceNoise(scale=sensitivity / epsilon, sensitivity=sensitivity)
    released = np.array([histogram.release(counts, rng) for _ in range(trials)])
    shares = {"noisy counts": np.mean(np.argmax(released, axis=1) == winner)}
    for noise in ("laplace", "exponential", "gumbel"):
        mechanism = samplers.NoisyMaxChoice(epsilon, noise, monotone=True)
        chosen = mechanism.sample(jax.random.key(rng.randrange(2**31), impl=CHACHA20), counts, (trials,))
        shares[f"noisy max, {noise}"] = np.mean(chosen == winner)
    return shares, histogram.privacy


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ballots", type=int, default=200)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="simulations only: real releases take no seed")
    parser.add_argument("--out", help="also draw the shares to this file")
    args = parser.parse_args(arguments)
    if min(args.ballots, args.candidates, args.trials) < 1:
        parser.error("--ballots, --candidates and --trials must be 1 or more")
    rng = random.Random(args.seed)
    weights = np.arange(args.candidates, 0, -1) / np.sum(np.arange(args.candidates + 1))
    counts = np.round(args.ballots * weights).astype(int)
    curves = {}
    for title, sensitivity in (("one name", 1), ("any number of names", args.candidates)):
        print(f"{title}: counts {counts.tolist()}")
        for epsilon in EPSILONS:
            shares, privacy = elect(counts, sensitivity, epsilon, args.trials, rng)
            claimed = float(ja.epsilon(privacy, 0.0).upper)
            bound = samplers.exponential_error(epsilon, 0.05, args.candidates, monotone=True)
            words = "  ".join(f"{name} {share:.3f}" for name, share in shares.items())
            print(f"  epsilon {claimed:.2f}  {words}  (gumbel is {bound:.0f} votes short in at most 5 %)")
            for name, share in shares.items():
                curves.setdefault((title, name), []).append(share)
    if args.out:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
        for (title, name), shares in curves.items():
            axis = axes[0 if title == "one name" else 1]
            axis.plot(EPSILONS, shares, marker="o", label=name)
            axis.set(title=title, xlabel="ε of the election", xscale="log")
        axes[0].set_ylabel("share of runs that elect the true winner")
        axes[1].legend()
        figure.savefig(args.out)
    return curves


if __name__ == "__main__":
    main()
