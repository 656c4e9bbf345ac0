"""Figure 4(a): the two halves of the profile of a sampled mechanism under the symmetric relation (Proposition 29).

H_a((1-q) Q + q P || Q) dominates for a >= 1 and H_a(P || (1-q) P + q Q) for a < 1; neither dominates
at the other a.  The text of the paper has lost its mechanism and q; the Gaussian with sigma = 0.5 and q = 0.3 are
chosen.  A reflection of the line turns the Gaussian's (P, (1-q) P + q Q) into (Q, (1-q) Q + q P), the add direction.
"""

import numpy as np
from drawing import run

import jaxacct as ja

SIGMA, Q = 0.5, 0.3


def numbers(small: bool) -> dict[str, np.ndarray]:
    alpha = np.geomspace(0.1, 10.0, 7 if small else 101)
    step = ja.PoissonSampled(ja.Gaussian(SIGMA), Q)
    sides = [ja.profile(step, relation).delta(np.log(alpha)).estimate for relation in ("remove_one", "add_one")]
    return {
        "alpha": alpha,
        "H(mixture || Q)": sides[0],
        "H(P || mixture)": sides[1],
        "dominating": np.where(alpha >= 1.0, *sides),
    }


if __name__ == "__main__":
    run(__doc__, numbers, "alpha", "hockey-stick divergence", xscale="log")
