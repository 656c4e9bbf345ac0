"""Koskela, Redberg, Wang 2024, Figure 2: a selection among Gaussian mechanisms, K truncated negative binomial.

The text of the paper has lost eta, sigma and the two values of m; eta = 1 (geometric K), sigma = 4, and m = 10 and 300
are chosen.
"""

import numpy as np
from selecting import epsilons, run

import jaxacct as ja
from jaxacct import selection

SIGMA, MEANS = 4.0, (10, 300)


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    delta = np.geomspace(1e-10, 1e-2, 4 if small else 17)
    base = ja.Gaussian(SIGMA)
    return {
        f"sigma = {SIGMA:g}, geometric K, m = {m}": {
            "delta": delta,
            **epsilons(base, selection.Geometric(1.0 / m), delta, "renyi", "privacy_profile"),
        }
        for m in MEANS
    }


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon", xscale="log")
