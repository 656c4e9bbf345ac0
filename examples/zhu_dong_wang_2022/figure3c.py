"""Figure 3(c): delta of the Poisson sampled Gaussian over compositions: Riemann bounds, double quadrature, Rényi.

The text of the paper has lost q, sigma and epsilon; q = 0.02, sigma = 2 and epsilon = 1 are chosen, in the remove
direction, for up to 2000 compositions.
"""

import numpy as np
from drawing import run
from fourier_accountant import fourier_delta, riemann_delta

import jaxacct as ja
from jaxacct.representations.renyi_divergences import rdp_delta

Q, SIGMA, EPSILON = 0.02, 2.0, 1.0


def numbers(small: bool) -> dict[str, np.ndarray]:
    k = np.unique(np.geomspace(500, 2000, 2 if small else 10).round())
    batch = ja.dp_sgd(SIGMA, Q, k)
    riemann = [riemann_delta(SIGMA, Q, n, EPSILON, cells=400 if small else 40_000) for n in k]
    double = [fourier_delta(ja.dp_sgd(SIGMA, Q, n), EPSILON, relation="remove_one").estimate for n in k]
    return {
        "compositions": k,
        "exact (certified)": ja.delta(batch, EPSILON, relation="remove_one", rtol=1e-3).upper,
        "Riemann lower": np.array([float(b.lower) for b in riemann]),
        "Riemann upper": np.array([float(b.upper) for b in riemann]),
        "double quadrature": np.array(double),
        "Renyi": rdp_delta(batch, EPSILON, relation="remove_one").upper,
    }


if __name__ == "__main__":
    run(__doc__, numbers, "compositions", "delta at epsilon = 1", yscale="log")
