"""Example 15: distance to instability, where no single pair of data sets is worst at every epsilon.

The answer is released without noise where distance + Lap(1/eps0) exceeds log(1/delta0)/eps0.  Mode 1: f(x) = f(x'), the
distances d and d +- 1 differ and only the test leaks.  Mode 2: f(x) != f(x'), both distances are 0, and releasing,
which happens with probability delta0/2, tells them apart.  (The paper's text gives this probability as delta.  Its
parameters are lost: eps0 = 1, delta0 = 1e-2 and distances 0 to 60 are chosen.)
"""

import itertools

import numpy as np
from drawing import run
from scipy.stats import laplace

EPSILON, DELTA = 1.0, 1e-2


def numbers(small: bool) -> dict[str, np.ndarray]:
    eps = np.linspace(0.0, 1.2, 7 if small else 121)
    threshold = np.log(1.0 / DELTA) / EPSILON
    release = laplace.sf(threshold - np.arange(61.0), scale=1.0 / EPSILON)
    pairs = [*itertools.pairwise(release), *zip(release[1:], release[:-1], strict=True)]
    ratio = np.exp(eps)
    mode1 = np.max(
        [np.maximum(p - ratio * q, 0.0) + np.maximum((1.0 - p) - ratio * (1.0 - q), 0.0) for p, q in pairs], axis=0
    )
    mode2 = np.full(eps.shape, release[0])
    return {"epsilon": eps, "mode 1": mode1, "mode 2": mode2, "profile": np.maximum(mode1, mode2)}


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon", "delta", yscale="symlog")
