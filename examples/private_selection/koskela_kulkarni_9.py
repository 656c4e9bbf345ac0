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


def line_epsilon(slope: np.ndarray) -> np.ndarray:
    """The Poisson bound of Papernot and Steinke for candidates of Rényi divergence slope * order, at these orders."""
    line = ORDERS[:, None] * slope
    missed = np.array([delta_from_renyi(ORDERS, line, np.log1p(1.0 / (a - 1.0))).upper for a in ORDERS])
    return epsilon_from_renyi(ORDERS, line + M * missed + np.log(M) / (ORDERS[:, None] - 1.0), np.full(slope.shape, DELTA)).upper


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    panels = {}
    sigma, steps = (np.array(x) for x in zip(*CANDIDATES, strict=True))
    for gamma in GAMMAS[:1] if small else GAMMAS:
        base = ja.dp_sgd(sigma, gamma, steps)
        curves = renyi_divergence(base, ORDERS[:, None]).upper
        slope = np.max(curves / ORDERS[:, None], axis=0)
        columns = {"order": ORDERS}
        for (s, t), curve, c in zip(CANDIDATES, curves.T, slope, strict=True):
            columns |= {f"sigma = {s:g}, T = {t}": curve, f"line {c:.4f} order": c * ORDERS}
        panels[f"sampling probability {gamma:g}"] = columns
        each = epsilons(base, selection.Poisson(M), DELTA, "renyi")
        panels[f"K Poisson of mean {M}, delta = {DELTA:g}, q = {gamma:g}"] = {"sigma": sigma, "line": line_epsilon(slope), **each}
    return panels


if __name__ == "__main__":
    run(__doc__, numbers, "Renyi divergence|epsilon")
