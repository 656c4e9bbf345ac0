"""Figure 3(b): epsilon of k Gaussian mechanisms composed with k randomised responses.

The text of the paper has lost sigma, p and delta; after Koskela and Honkela 2021 sigma = 5 and p = 0.52 are chosen,
with delta = 1e-6, for k up to 50.
"""

import numpy as np
from drawing import run
from figure3a import fourier_epsilon

import jaxacct as ja
from jaxacct.representations.renyi_divergences import rdp_epsilon

SIGMA, P, DELTA = 5.0, 0.52, 1e-6


def mechanism(k: float | np.ndarray) -> ja.Mechanism:
    return ja.compose(ja.repeat(ja.Gaussian(SIGMA), k), ja.repeat(ja.RandomizedResponse(P), k))


def numbers(small: bool) -> dict[str, np.ndarray]:
    k = np.unique(np.geomspace(2, 50, 2 if small else 12).round())
    renyi = rdp_epsilon(mechanism(k), DELTA).upper
    fourier = [fourier_epsilon(mechanism(n), DELTA, top) for n, top in zip(k, renyi, strict=True)]
    exact = ja.epsilon(mechanism(k), DELTA).upper
    return {"k": k, "exact (certified)": exact, "Fourier": np.array(fourier), "Renyi": renyi}


if __name__ == "__main__":
    run(__doc__, numbers, "k", "epsilon at delta = 1e-6")
