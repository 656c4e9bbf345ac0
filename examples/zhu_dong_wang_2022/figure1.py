"""Figure 1: a Rényi guarantee does not pin the trade-off function down.

Randomised response with ratio e^eps0 has R_alpha <= rho alpha for every alpha >= 1/2 when rho = 4 log cosh(eps0/2),
attained at alpha = 1/2; the Gaussian mechanism with mu^2 = 2 rho has R_alpha = rho alpha.  So a trade-off function
derived from R_alpha <= rho alpha cannot lie above that of either mechanism.  The one derived by two-point constraints
touches that of randomised response at its corner, where no derivation can be better.  The text of the paper has lost
the parameter; its appendix B speaks of 1-zCDP, so rho = 1 is chosen, with eps0 = 2 arccosh(e^{rho/4}).
"""

import numpy as np
from drawing import run
from scipy.special import ndtr, ndtri

import jaxacct as ja
from jaxacct.representations import epsilon_from_renyi, tradeoff_from_profile, tradeoff_from_renyi

RHO = 1.0


def numbers(small: bool) -> dict[str, np.ndarray]:
    ratio, mu = 2.0 * np.arccosh(np.exp(RHO / 4.0)), np.sqrt(2.0 * RHO)
    corner = 1.0 / (1.0 + np.exp(ratio))
    fpr = np.sort(np.append(np.linspace(0.01, 0.99, 9 if small else 99), corner))
    orders = np.concatenate([[0.5, 0.55, 0.7, 0.85, 1.0], np.geomspace(1.05, 100.0, 20 if small else 120)])
    values = RHO * orders
    deltas = np.geomspace(1e-6, 0.9, 15 if small else 80)
    eps = epsilon_from_renyi(orders, values, deltas).upper
    response = np.linspace(0.0, ratio, 30)
    return {
        "false positive rate": fpr,
        "Gaussian": ndtr(-ndtri(fpr) - mu),
        "randomised response": np.maximum(1.0 - np.exp(ratio) * fpr, np.exp(-ratio) * (1.0 - fpr)),
        "Renyi to f": tradeoff_from_renyi(orders, values, fpr).lower,
        "Renyi to (eps, delta) to f": tradeoff_from_profile(eps, deltas, fpr).lower,
        "response by its profile": tradeoff_from_profile(
            response, ja.delta(ja.PureDP(ratio), response, rtol=1e-3), fpr
        ).lower,
    }


if __name__ == "__main__":
    run(__doc__, numbers, "false positive rate", "false negative rate")
