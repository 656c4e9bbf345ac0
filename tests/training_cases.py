"""What the tests of plans, ledgers and recalibration share."""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

DELTA = 1e-5
FULL = {"target_delta": DELTA, "dataset_size": 1000, "sampling_probability": 1.0}
FIXED = {"target_delta": DELTA, "dataset_size": 1000, "sampling": "fixed_batches"}


def gaussian_epsilon(mu, delta=DELTA):
    """epsilon of mu-GDP by root finding on Phi(mu/2 - e/mu) - e^e Phi(-mu/2 - e/mu) [Balle and Wang 2018]."""
    excess = lambda e: ndtr(mu / 2 - e / mu) - math.exp(e + log_ndtr(-mu / 2 - e / mu)) - delta
    return brentq(excess, 0.0, mu**2 + 40 * mu, xtol=1e-12) if excess(0.0) > 0 else 0.0
