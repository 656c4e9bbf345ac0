"""Koskela, Kulkarni 2023, Figure 1: epsilon of tuning on a Poisson sample of rate q, then one training run.

DP-SGD for 50 epochs at sampling probability 0.01 and sigma = 2, K Poisson of mean 15 and 45, delta = 1e-5, as in the
paper.  Variant 1 trains on the rest of the data, variant 2 on all of it; the baseline tunes on all and releases the
winner.  Ours: the exact worst case of the tuning as a privacy profile, in the pair of variant 1, and sampled and
composed with the run for variant 2.
"""

import numpy as np
from selecting import ATTACK, WORST, epsilons, run, tuned_profile

import jaxacct as ja
from jaxacct import selection

SIGMA, GAMMA, EPOCHS, DELTA, MEANS = 2.0, 0.01, 50, 1e-5, (15, 45)


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    q = np.array([0.1, 0.5]) if small else np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5])
    base = ja.dp_sgd(SIGMA, GAMMA, round(EPOCHS / GAMMA))
    panels = {}
    for m in MEANS[:1] if small else MEANS:
        k = selection.Poisson(m)
        tuned = tuned_profile(base, k, DELTA)
        once = selection.PointMass(1)
        columns = {"q": q}
        for variant, name in (("rest", "variant 1"), ("all", "variant 2")):
            published = [selection.subset_epsilon(base, k, base, x, DELTA, variant=variant, form="renyi") for x in q]
            columns[f"{name}, Renyi"] = np.array([float(b.upper) for b in published])
            # the tuning is already in the profile, of which a single run is made
            exact = [selection.subset_epsilon(tuned, once, base, x, DELTA, variant=variant) for x in q]
            columns[f"{name}, ours"] = np.array([float(b.upper) for b in exact])
        baseline = epsilons(base, k, DELTA, "renyi")
        columns["baseline, Renyi"] = np.full(q.shape, next(iter(baseline.values())))
        columns[f"baseline, {WORST}"], columns[ATTACK] = (np.full(q.shape, baseline[x]) for x in (WORST, ATTACK))
        panels[f"K Poisson of mean {m}, delta = {DELTA:g}"] = columns
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon")
