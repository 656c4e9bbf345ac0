"""Xiang, Wang, Wang 2024, Figure 6 and the setting of Table 4: Algorithm 3 beside the worst score.

The base is the Gaussian that is (eps_B, 1e-5)-DP, eps_B = 1, 2 and 4, as in the paper.  The paper's laws of K are lost:
geometric K is chosen for Figure 6; for Table 4, K = 1 with probability p = 1, 0.5 or 0.1, else K = 100.  Algorithm 3
holds only for scores that are monotone in the likelihood ratio.  Where the attack, a genuine score, exceeds Algorithm
3, the algorithm gives no guarantee for scores in general.
"""

import numpy as np
from selecting import epsilons, run

import jaxacct as ja
from jaxacct import selection
from jaxacct.representations.profile_conversions import gdp_from_profile

BASES, DELTA, MANY = (1.0, 2.0, 4.0), 1e-5, 100


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    m = np.geomspace(2, 1000, 4 if small else 12)
    p = np.array([0.1, 0.5, 1.0])
    figure, table = {}, {}
    for target in BASES[:1] if small else BASES:
        mu = gdp_from_profile(target, DELTA).lower
        for panels, name, x, law, published in (
            (figure, "m", m, selection.Geometric(1.0 / m), ["renyi"]),
            (table, "p", p, selection.TwoPoint(1, MANY, p), []),
        ):
            title = "geometric K" if published else f"K = 1 with probability p, else {MANY}"
            base = ja.Gaussian(1.0 / mu)
            score = selection.bound_epsilon(base, law, DELTA, bound="monotone_score").upper
            each = epsilons(base, law, DELTA, *published)
            panels[f"base {target:g}, {title}"] = {name: x, "Algorithm 3": score, **each}
    return {**figure, **table}


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon", xscale="log")
