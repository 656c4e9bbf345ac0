"""What the tests of plans, ledgers and recalibration share."""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from jaxacct.training import Ledger, Plan

DELTA = 1e-5
FULL = {"target_delta": DELTA, "dataset_size": 1000, "sampling_probability": 1.0}
FIXED = {"target_delta": DELTA, "dataset_size": 1000, "sampling": "fixed_batches"}
PLAN = Plan(**FULL, steps=100, noise_multiplier=10.0)
TARGETED = Plan(target_epsilon=1.0, **FULL, steps=50, noise_schedule=[(20, 1.0), (None, 1.5)])


def gaussian_epsilon(mu, delta=DELTA):
    """epsilon of mu-GDP by root finding on Phi(mu/2 - e/mu) - e^e Phi(-mu/2 - e/mu) [Balle and Wang 2018]."""
    excess = lambda e: ndtr(mu / 2 - e / mu) - math.exp(e + log_ndtr(-mu / 2 - e / mu)) - delta
    return brentq(excess, 0.0, mu**2 + 40 * mu, xtol=1e-12) if excess(0.0) > 0 else 0.0


def note(ledger, step, key=None, noise=10.0, rate=1.0, **more):
    ledger.record(step, f"key {step}" if key is None else key, f"batch {step}", noise, rate, **more)


def mu2(ledger):
    """Sum of count/sigma^2 over what a ledger has counted."""
    return sum(count / release.noise_multiplier**2 for release, count in ledger.releases().items())


def written(path):
    """Write a ledger with three steps, and return its bytes; a test can cut off the last line, as a crash does."""
    with Ledger.create(path, PLAN, run="r") as ledger:
        for step in range(3):
            note(ledger, step, noise=[10.0, 4.0, 10.0][step])
    return path.read_bytes()
