"""Koskela, Kulkarni 2023, Figure 1: epsilon of tuning on a Poisson sample of rate q, then one training run.

DP-SGD for 50 epochs at sampling probability 0.01 and sigma = 2, K Poisson of mean 15 or 45, delta = 1e-5, as in the
paper.  Variant 1 trains on the rest of the data, variant 2 on all data; the baseline tunes on all data and releases
the winner.  Our bound takes the exact worst case of the tuning as a privacy profile.  For variant 1 it puts this
profile into the paper's pair of distributions; for variant 2 it subsamples the profile and composes it with the final
run.
"""

import numpy as np
from scipy.special import gammaln, logsumexp
from selecting import ATTACK, WORST, epsilons, run, tuned_profile

import jaxacct as ja
from jaxacct import representations, selection
from jaxacct.selection.base_profile import sides
from jaxacct.selection.named_bounds import curve

SIGMA, GAMMA, EPOCHS, DELTA, MEANS = 2.0, 0.01, 50, 1e-5, (15, 45)


ORDERS = np.arange(2.0, 129.0)
"""Whole orders, for which the published sums are finite."""


def published_epsilon(base: ja.Mechanism, k: selection.Law, q: float, variant: str) -> float:
    """The published epsilon: of "rest" by Theorem 1 (3.6, 3.7), of "all" by sampling [Zhu, Wang] and composition."""
    tuning = np.stack([curve(base, k, ORDERS, side) for side in sides(base, "add_or_remove_one")])
    names = ("remove_one", "add_one")
    training = np.stack([representations.renyi_divergence(base, ORDERS, name).upper for name in names])
    value, worst = [], np.max(tuning, axis=0)
    for a in range(2, ORDERS.size + 2):
        j = np.arange(a + 1)
        if variant == "all":
            found = log_mean(q, moment(worst, j) + np.log(np.where(j > 2, 3.0, 1.0)))
        else:
            removed = moment(tuning[0], j) + moment(training[0], a - j)
            added = moment(tuning[1], j[1:]) + moment(training[1], a + 1 - j[1:])
            found = max(log_mean(q, removed), log_mean(q, added))
        value.append(found / (a - 1))
    total = np.array(value) + (np.max(training, axis=0) if variant == "all" else 0.0)
    return float(representations.epsilon_from_renyi(ORDERS, np.maximum(total, 0.0), DELTA).upper)


def moment(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`(a - 1) R(a)` at whole orders a, with R(2), R(3), ... in `values`; 0 at orders 0 and 1."""
    return np.concatenate([[0.0, 0.0], values * np.arange(1, values.size + 1)])[order]


def log_mean(q: float, terms: np.ndarray) -> float:
    """`log sum_j C(n, j) q^j (1-q)^{n-j} e^{terms_j}`, j from 0 to n, 0 < q < 1."""
    n, j = terms.size - 1, np.arange(terms.size)
    choose = gammaln(n + 1) - gammaln(j + 1) - gammaln(n - j + 1)
    return float(logsumexp(choose + j * np.log(q) + (n - j) * np.log1p(-q) + terms))


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
            published = [published_epsilon(base, k, x, variant) for x in q]
            columns[f"{name}, Renyi"] = np.array(published)
            # the profile `tuned` already covers the K runs, so it is passed as a single run
            exact = [selection.subset_epsilon(tuned, once, base, x, DELTA, variant=variant) for x in q]
            columns[f"{name}, ours"] = np.array([float(b.upper) for b in exact])
        baseline = epsilons(base, k, DELTA, "renyi")
        columns["baseline, Renyi"] = np.full(q.shape, next(iter(baseline.values())))
        columns[f"baseline, {WORST}"], columns[ATTACK] = (np.full(q.shape, baseline[x]) for x in (WORST, ATTACK))
        panels[f"K Poisson of mean {m}, delta = {DELTA:g}"] = columns
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon")
