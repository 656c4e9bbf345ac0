"""Koskela, Redberg, Wang 2024, Figures 6 and 7: tuning DP-SGD, K geometric, as the number of candidates grows.

The text of the paper has lost the parameters.  Chosen for Figure 6, after the figure's source: MNIST with sigma = 1.1,
batches of 256 of 60,000, 60 epochs, delta = 1e-5.  Chosen for Figure 7, after De et al. 2022: CIFAR-10 with sigma = 3,
batches of 4096 of 50,000, 2500 steps, delta = 1e-5.  The second table of each figure gives the factors by which the
profile bound and the worst case allow more candidates at Rényi's epsilon.
"""

import numpy as np
from selecting import PROFILE, WORST, epsilons, gained, run

import jaxacct as ja
from jaxacct import selection

FIGURES = {
    "Figure 6": (1.1, 256 / 60_000, 14_062, 1e-5),
    "Figure 7": (3.0, 4096 / 50_000, 2500, 1e-5),
}


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    m = np.geomspace(3, 3000, 4 if small else 10)
    panels = {}
    for name, (sigma, q, steps, delta) in list(FIGURES.items())[: 1 if small else 2]:
        each = epsilons(ja.dp_sgd(sigma, q, steps), selection.Geometric(1.0 / m), delta, "renyi", "privacy_profile")
        columns = {"m = E[K]": m, **each}
        panels[f"{name}: sigma = {sigma:g}, q = {q:.4g}, T = {steps}"] = columns
        panels[f"{name}: times as many"] = {"m = E[K]": m, **{x: gained(columns, x) for x in (PROFILE, WORST)}}
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon|times")
