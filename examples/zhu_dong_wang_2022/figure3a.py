"""Figure 3(a): epsilon of composed Gaussian mechanisms: characteristic function, exact, and Rényi.

The text of the paper has lost sigma and delta; sigma = 20 and delta = 1e-5 are chosen, for up to 1000 compositions.
"""

import numpy as np
from drawing import run
from fourier_accountant import fourier_delta

import jaxacct as ja
from jaxacct.representations.renyi_divergences import rdp_epsilon

SIGMA, DELTA = 20.0, 1e-5


def fourier_epsilon(mechanism: ja.Mechanism, delta: float, high: float, steps: int = 40) -> float:
    """Bisection on the Fourier accountant's delta(eps), as Algorithm 1 of the paper does."""
    low = 0.0
    for _ in range(steps):
        middle = 0.5 * (low + high)
        found = fourier_delta(mechanism, middle, method="analytical").estimate
        low, high = (middle, high) if found > delta else (low, middle)
    return high


def numbers(small: bool) -> dict[str, np.ndarray]:
    k = np.unique(np.geomspace(1, 1000, 3 if small else 25).round())
    run_k = ja.repeat(ja.Gaussian(SIGMA), k)
    exact, renyi = ja.epsilon(run_k, DELTA), rdp_epsilon(run_k, DELTA)
    tops = 1.5 * exact.upper + 0.1
    fourier = [fourier_epsilon(ja.repeat(ja.Gaussian(SIGMA), n), DELTA, top) for n, top in zip(k, tops, strict=True)]
    return {"compositions": k, "exact (certified)": exact.upper, "Fourier": np.array(fourier), "Renyi": renyi.upper}


if __name__ == "__main__":
    run(__doc__, numbers, "compositions", "epsilon at delta = 1e-5")
