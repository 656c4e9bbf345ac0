"""Koskela, Redberg, Wang 2024, Figure 3: epsilon at a fixed delta as the mean number of candidates grows.

The text of the paper has lost eta, sigma and delta; eta = 1 (geometric K), sigma = 4 and delta = 1e-6 are chosen.  The
second table gives the factors by which the profile bound and the worst case allow more candidates at Rényi's epsilon.
"""

import numpy as np
from selecting import PROFILE, WORST, epsilons, gained, run

import jaxacct as ja
from jaxacct import selection

SIGMA, DELTA = 4.0, 1e-6


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    m = np.geomspace(2, *((100, 4) if small else (1e5, 25)))
    law = selection.Geometric(1.0 / m)
    columns = {"m = E[K]": m, **epsilons(ja.Gaussian(SIGMA), law, DELTA, "renyi", "privacy_profile")}
    far, one = (0.5 / SIGMA**2 + np.sqrt(2.0 * np.log(x)) / SIGMA for x in (m / DELTA, m))
    columns["closed form (Corollary 5.5)"] = far + 2.0 * np.log(np.exp(one) + 1.0 - 1.0 / m)
    times = {"m = E[K]": m, **{name: gained(columns, name) for name in (PROFILE, WORST)}}
    return {f"epsilon, sigma = {SIGMA:g}, delta = {DELTA:g}": columns, "times as many candidates as Renyi": times}


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon|times", xscale="log", yscale="log")
