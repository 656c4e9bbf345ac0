"""Regressions of the split contour's certificate."""

import jax
import numpy as np
import pytest

from jaxacct.kernels.contour import split as split_contour
from jaxacct.kernels.contour import split_remainder
from jaxacct.kernels.law import LossLaw


def law(sigma, q, n):
    none, flat = np.zeros(0), np.zeros((0, 1))
    return LossLaw(1.0, 0.0, np.array([sigma]), np.array([q]), np.array([float(n)]), none, none, flat, flat, none)


@pytest.mark.slow
def test_many_jumps_claim_no_decay():
    # more than 600 expected jumps: the old code capped an exponent at 600 and so claimed a decay that is not there
    with jax.enable_x64():
        run = jax.jit(
            lambda law, eps: split_contour.delta(law, eps, split_contour.Start(0.0, 0.0), np.log(1e-7), 384, 128, 4)
        )
        for sigma, q, n, eps in [(0.66232, 0.22855, 7788, 0.73581), (0.32318, 0.184535, 5805, 0.50759)]:
            lower = run(law(sigma, q, n), eps).lower
            assert not lower > 1e-12, (sigma, q, n, eps, lower)


def test_far_proves_nothing_where_its_masses_vanish():
    with np.errstate(all="ignore"):
        masses = split_remainder.far_masses(law(0.05, 0.001, 1), np.array([41.0]))
        assert masses.p > 0
        assert split_remainder.far(masses, np.float64(620.0))[0] == 0.0
