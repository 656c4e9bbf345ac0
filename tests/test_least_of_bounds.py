"""Where several theorems hold, the answer is the smallest: each oracle is another theorem, written down anew here."""

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

import jaxacct as ja
from jaxacct.representations import rdp_epsilon


def renyi_epsilon_of_dp_sgd(sigma, q, steps, log_delta, orders=range(2, 400, 6)):
    """Mironov, Talwar and Zhang (2019) at whole orders, and Canonne, Kamath and Steinke's conversion."""
    best = np.inf
    for a in orders:
        k = np.arange(a + 1)
        choose = gammaln(a + 1) - gammaln(k + 1) - gammaln(a - k + 1)
        moment = steps * logsumexp(choose + k * np.log(q) + (a - k) * np.log1p(-q) + k * (k - 1) / (2 * sigma**2))
        best = min(best, (moment - log_delta - np.log(a) + (a - 1) * np.log1p(-1 / a)) / (a - 1))
    return best


@pytest.mark.parametrize(
    ("sigma", "group", "delta"),
    [(13.0, 1, 1e-300), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((4.0, 1, 3e-305), (1.0, 2, 1e-300)))],
)
def test_tiny_deltas_have_the_bound_by_moments(sigma, group, delta):
    found = ja.epsilon(ja.dp_sgd(sigma, 0.01, 1000, group=group), delta)
    if group == 1:
        known = renyi_epsilon_of_dp_sgd(sigma, 0.01, 1000, np.log(delta))
    else:
        known = rdp_epsilon(ja.dp_sgd(sigma, 0.01, 1000, group=group), delta).upper
    assert found.lower <= found.upper <= known * 1.001
    assert found.kind == "certified" and found.lower > 0.0


def test_wide_deltas_have_the_bound_by_moments():
    run = ja.dp_sgd(13.0, 0.01, 1000)
    known = renyi_epsilon_of_dp_sgd(13.0, 0.01, 1000, -690.0)
    assert ja.delta(run, known * 1.001).upper <= np.exp(-690.0)


@pytest.mark.slow
def test_calibration_at_a_tiny_delta_meets_what_moments_meet():
    found = ja.calibrate_noise_multiplier(1.0, 1e-300, 0.01, 1000)
    assert renyi_epsilon_of_dp_sgd(13.0, 0.01, 1000, np.log(1e-300)) < 1.0
    assert found.value <= 13.0
