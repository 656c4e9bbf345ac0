"""Koskela, Redberg, Wang 2024, Figure 4: binomial K is more concentrated than Poisson K at the same privacy.

K is Poisson of mean m, with epsilon by the Rényi bound; or K is binomial with n trials and the largest success
probability p for which Theorem 5.7, or the exact worst case, gives at most the epsilon of the Poisson K.  The text of
the paper has lost sigma, delta, m and n; sigma = 4, delta = 1e-6 and (m, n) = (3, 6) and (10, 20) are chosen.
"""

import numpy as np
from selecting import PROFILE, RENYI, WORST, epsilons, run

import jaxacct as ja
from jaxacct import selection

SIGMA, DELTA, CASES = 4.0, 1e-6, ((3, 6), (10, 20))


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    base, panels = ja.Gaussian(SIGMA), {}
    share = np.arange(0.3, 0.6, 0.05 if small else 0.01)
    for m, n in CASES:
        target = float(selection.bound_epsilon(base, selection.Poisson(m), DELTA, bound="renyi").upper)
        each = epsilons(base, selection.Binomial(n, share), DELTA, "privacy_profile")
        k = np.arange(0.0, n + 1.0)
        at_most = {f"Poisson {m}, {RENYI}": np.cumsum(selection.Poisson(m).probability(k))}
        for name in (PROFILE, WORST):
            best = float(np.max(share[each[name] <= target]))
            at_most[f"n = {n}, p = {best:.2f}, {name}"] = np.cumsum(selection.Binomial(n, best).probability(k))
        panels[f"epsilon = {target:.3f} at delta = {DELTA:g}, sigma = {SIGMA:g}"] = {"k": k, **at_most}
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "Pr[K <= k]", yscale="log")
