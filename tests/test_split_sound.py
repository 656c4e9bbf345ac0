"""Regressions of the split contour's certificate."""

import jax
import numpy as np
import pytest

from jaxacct.kernels.contour import split as split_contour
from jaxacct.kernels.contour import split_parts, split_remainder
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


def test_sides_are_bounded_where_mix_falls_outwards():
    """Half a step behind the last node |mix|^-c may be larger than at the node: the bound was e^430 too small."""
    rng, open_ = np.random.default_rng(1), np.array([1e9])
    windows = split_parts.Windows(open_, open_, np.ones(1))
    for _ in range(300):
        sigma, q, c = 10 ** rng.uniform(-0.5, 1.5), 10 ** rng.uniform(-8, -0.5), 10 ** rng.uniform(0.0, 5.0)
        alpha = min(rng.uniform(0.01, 0.97) * np.pi * sigma, 9.0)
        steps = split_parts.steps_of(law(sigma, q, 10)._replace(sign=np.float64(-1.0)), windows.low, windows.high)
        with np.errstate(all="ignore"):
            nodes = split_parts.grid(steps, np.array([c]), int(rng.choice([24, 64, 256])), None)
            bounds = split_parts.side_bounds(steps, np.array([c]), np.array([alpha]), nodes)[0, 0]
        ends = (nodes.u[0, 0], -0.5 * nodes.step[0]), (nodes.u[0, -1], 0.5 * nodes.gap[0, -1])
        for bound, (end, way) in zip(bounds, ends, strict=True):
            u = end + way * np.linspace(0, 1, 30)[:, None] + 1j * np.linspace(0, alpha, 30)
            mix = 1 - q + q * np.exp(u / sigma - 0.5 / sigma**2)
            density = -c * np.log(np.abs(mix)) - 0.5 * (u**2).real - 0.5 * np.log(2 * np.pi)
            assert np.max(density) <= bound + 1e-6, (sigma, q, c, alpha)
