"""Koskela, Redberg, Wang 2024, Figure 1: report noisy max with Gaussian noise, Rényi against privacy profile.

The text of the paper has lost sigma, m and delta; sigma = 5 (scores move by at most 1, in either direction), m = 100
and delta = 1e-6 are chosen.  The number of candidates is fixed here and no selection theorem applies.  Our bound is
the smaller of two epsilons: that of Theorem 3.2, and that of a release of all m noisy scores, which is a Gaussian
mechanism of sensitivity sqrt(m).  The attack asks whether one candidate wins.  The record raises the score of this
candidate by 1 and lowers the m - 1 other scores, which are equal, by 1.
"""

import numpy as np
from scipy.special import ndtr
from selecting import ATTACK, run

import jaxacct as ja
from jaxacct.representations.renyi_divergences import epsilon_from_renyi

SIGMA, M, DELTA = 5.0, 100, 1e-6
ORDERS = 1.0 + np.geomspace(1e-2, 1e4, 400)


def attack(m: float, delta: float) -> float:
    """Largest log((p - delta)/q) over leads, where the candidate wins with probability p, or q without the record."""
    z = np.linspace(-12.0, 12.0, 4001)
    lead = np.linspace(-8.0, 6.0, 281)[:, None]
    weight = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi) * (z[1] - z[0])
    p, q = (np.sum(weight * ndtr(z + lead + d) ** (m - 1.0), axis=1) for d in (2.0 / SIGMA, 0.0))
    return float(np.max(np.log(np.maximum(p - delta, 1e-300) / q)))


def bounds(m: np.ndarray, delta: np.ndarray) -> dict[str, np.ndarray]:
    along = ORDERS[:, None]
    renyi = along * 2.0 / SIGMA**2 + np.log(m) / (along - 1.0)  # Zhu and Wang (2022), Theorem 8
    theorem = ja.epsilon(ja.Gaussian(SIGMA / 2.0), delta / m).upper
    return {
        "Renyi (Zhu, Wang)": epsilon_from_renyi(ORDERS, renyi, delta).upper,
        "closed form (Corollary 3.4)": 2.0 / SIGMA**2 + 2.0 / SIGMA * np.sqrt(2.0 * np.log(m / delta)),
        "profile (Theorem 3.2)": theorem,
        "or all scores (ours)": np.minimum(theorem, ja.epsilon(ja.Gaussian(SIGMA / np.sqrt(m)), delta).upper),
        ATTACK: np.array([attack(*each) for each in zip(m, delta, strict=True)]),
    }


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    m = np.unique(np.geomspace(2, 1e4, 2 if small else 17).round())
    delta = np.geomspace(1e-10, 1e-2, 2 if small else 17)
    return {
        f"sigma = {SIGMA:g}, delta = {DELTA:g}": {"m": m, **bounds(m, np.full(m.shape, DELTA))},
        f"sigma = {SIGMA:g}, m = {M}": {"delta": delta, **bounds(np.full(delta.shape, float(M)), delta)},
    }


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon", xscale="log")
