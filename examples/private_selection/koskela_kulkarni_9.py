"""Koskela, Kulkarni 2023, Figure 9: Rényi curves of DP-SGD and the least lines through 0 above them.

Sampling probabilities 1/100 and 1/50 and orders up to 24, as in the paper.  The text of the paper has lost sigma and T;
(sigma, T) = (2, 2000) and (4, 10000) are chosen.  The figure has no selection, so no worst case of one is drawn.
"""

import numpy as np
from selecting import run

import jaxacct as ja
from jaxacct.representations.renyi_divergences import renyi_divergence

RATES, CANDIDATES = (0.01, 0.02), ((2.0, 2000), (4.0, 10_000))
ORDERS = np.arange(2.0, 25.0)


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    panels = {}
    for rate in RATES[:1] if small else RATES:
        columns = {"order": ORDERS}
        for sigma, steps in CANDIDATES:
            curve = renyi_divergence(ja.dp_sgd(sigma, rate, steps), ORDERS).upper
            slope = float(np.max(curve / ORDERS))
            columns |= {f"sigma = {sigma:g}, T = {steps}": curve, f"line {slope:.4f} order": slope * ORDERS}
        panels[f"sampling probability {rate:g}"] = columns
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "Renyi divergence")
