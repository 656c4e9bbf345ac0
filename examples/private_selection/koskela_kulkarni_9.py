"""Koskela, Kulkarni 2023, Figure 9: Rényi curves of DP-SGD and the least lines through 0 above them.

Sampling probabilities 1/100 and 1/50 and orders up to 24, as in the paper; its legends, with sigma and T, are lost:
(sigma, T) = (2, 2000) and (4, 10000) are chosen.  The second table of each is epsilon at delta = 1e-5 of a selection
with K Poisson of mean 15 (by the Rényi bound from the line, from the curve, and the exact worst case), by candidate.
"""

import numpy as np
from selecting import epsilons, run

import jaxacct as ja
from jaxacct import selection
from jaxacct.representations.concentrated import delta_from_renyi, epsilon_from_renyi
from jaxacct.representations.renyi import renyi_divergence

GAMMAS, CANDIDATES, M, DELTA = (0.01, 0.02), ((2.0, 2000), (4.0, 10_000)), 15, 1e-5
ORDERS = np.arange(2.0, 25.0)


def line_epsilon(slope: float) -> float:
    """The Poisson bound of Papernot and Steinke for candidates of Rényi divergence slope * order, at these orders."""
    missed = [float(delta_from_renyi(ORDERS, slope * ORDERS, np.log1p(1.0 / (a - 1.0))).upper) for a in ORDERS]
    tuned = slope * ORDERS + M * np.array(missed) + np.log(M) / (ORDERS - 1.0)
    return float(epsilon_from_renyi(ORDERS, tuned, DELTA).upper)


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    panels = {}
    for gamma in GAMMAS[:1] if small else GAMMAS:
        columns, rows = {"order": ORDERS}, []
        for sigma, steps in CANDIDATES:
            base = ja.dp_sgd(sigma, gamma, steps)
            curve = renyi_divergence(base, ORDERS).upper
            slope = float(np.max(curve / ORDERS))
            columns |= {f"sigma = {sigma:g}, T = {steps}": curve, f"line {slope:.4f} order": slope * ORDERS}
            each = epsilons(base, selection.Poisson(M), DELTA, "renyi")
            rows.append({"sigma": sigma, "Renyi from the line": line_epsilon(slope), **each})
        panels[f"sampling probability {gamma:g}"] = columns
        tuned = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
        panels[f"K Poisson, mean {M}, delta = {DELTA:g}, rate {gamma:g}"] = tuned
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "Renyi divergence|epsilon")
