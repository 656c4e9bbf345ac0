"""The model of rounding in kernels/arrays.py, held against mpmath on this machine, and bounds that rely on it."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax import lax

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import arrays
from jaxacct.kernels.contour import core, gaussian_errors
from jaxacct.kernels.law import LossLaw, log_mix

RNG = np.random.default_rng(0)
WIDE = 10.0 ** RNG.uniform(-300, 20, 100) * RNG.choice([-1.0, 1.0], 100)
NEAR = RNG.uniform(-40.0, 40.0, 100)
POSITIVE = np.concatenate([10.0 ** RNG.uniform(-307, 308, 100), 1.0 + 10.0 ** RNG.uniform(-15, -0.5, 50)])
SIMPLE, COMPOUND = (lambda x: arrays.SIMPLE_UNITS), (lambda x: arrays.COMPOUND_UNITS)
FUNCTIONS = {
    "exp": (jnp.exp, mpmath.exp, np.concatenate([NEAR, RNG.uniform(-708.0, 709.0, 100)]), SIMPLE),
    "log": (jnp.log, mpmath.log, POSITIVE, SIMPLE),
    "sin": (jnp.sin, mpmath.sin, np.concatenate([NEAR, WIDE, np.pi * np.arange(1, 100)]), SIMPLE),
    "cos": (jnp.cos, mpmath.cos, np.concatenate([NEAR, WIDE, np.pi * (np.arange(100) + 0.5)]), SIMPLE),
    "expm1": (jnp.expm1, mpmath.expm1, np.concatenate([NEAR, WIDE[np.abs(WIDE) < 700], NEAR / 40.0]), COMPOUND),
    "log1p": (
        arrays.log1p,
        mpmath.log1p,
        np.concatenate([POSITIVE, -(10.0 ** RNG.uniform(-300, -0.01, 100))]),
        COMPOUND,
    ),
    "erfc": (lax.erfc, mpmath.erfc, RNG.uniform(-6.0, 26.0, 150), lambda x: arrays.SIMPLE_UNITS * (4.0 + x * x)),
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64():
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_keep_to_their_units(name):
    ours, exactly, arguments, units = FUNCTIONS[name]
    values = np.asarray(jax.jit(ours)(jnp.asarray(arguments)))
    with mpmath.workdps(60):
        for x, value in zip(arguments, values, strict=True):
            exact = exactly(mpmath.mpf(float(x)))
            if abs(exact) < arrays.SMALLEST_NORMAL:
                assert abs(value) <= arrays.SMALLEST_NORMAL
                continue
            assert abs(mpmath.mpf(float(value)) - exact) <= units(float(x)) * ROUNDOFF * abs(exact), (x, value)


@pytest.mark.parametrize("turn", [1e-9, 0.01, 1.0, 2.26])
def test_departures_are_within_their_depth(turn):
    """Sums of w (e^{i k angle} - 1) agree with mpmath within `core.depth` roundoffs of the sum of w min(2, k angle)."""
    points, count = 128, 64
    weight = RNG.random(points)
    weight /= weight.sum()
    angle = turn * RNG.random(points)
    re, im = jax.jit(lambda w, a: core.departures(w, a, count))(weight, angle)
    with mpmath.workdps(40):
        for k in (1, 7, 8, count - 1):
            terms = [(mpmath.mpf(float(w)), mpmath.mpf(float(a)) * k) for w, a in zip(weight, angle, strict=True)]
            exact = mpmath.fsum(w * mpmath.expm1(1j * x) for w, x in terms)
            allowed = sum(w * (min(2, x) * core.depth(points, count) + 12 * x) for w, x in terms) * ROUNDOFF
            assert abs(mpmath.mpc(float(re[k]), float(im[k])) - exact) <= allowed


def test_log_mix_where_the_sampling_probability_is_tiny():
    """Where y + log q cancels, the result of the old code was off by thousands of units."""
    y = np.array([40.0, 300.0, 600.0, 690.0, 691.5, 706.0])
    q = np.array([1e-20, 1e-132, 1e-262, 1e-300, 1e-300, 1e-307])
    ours = np.asarray(jax.jit(lambda q, u: log_mix(1.0, q, u)[0])(q, y + 0.5))
    with mpmath.workdps(60):
        for x, r, found in zip(y, q, ours, strict=True):
            r = mpmath.mpf(float(r))
            exact = mpmath.log1p(r * mpmath.expm1(mpmath.mpf(float(x))))
            share = r * mpmath.exp(mpmath.mpf(float(x))) / mpmath.exp(exact)
            allowed = 18 * exact + share * (4 * (mpmath.mpf(float(x)) + 1) - 3 * mpmath.log(r))
            assert abs(mpmath.mpf(float(found)) - exact) <= allowed * ROUNDOFF


@jax.jit
def chernoff(sigma, q, c, sign):
    none = np.zeros(0)
    law = lambda s, r, d: LossLaw(d, 0.0, s[None], r[None], np.ones(1), none, none, none[:, None], none[:, None], none)
    return jax.vmap(lambda s, r, x, d: gaussian_errors.chernoff(law(s, r, d), x, 32))(sigma, q, c, sign)


def test_a_chernoff_bound_is_never_below_the_least_that_it_can_be():
    """The old bound of log M(c) was -inf where float64 merges grid nodes, so the old code certified epsilon = 0."""
    size = 600
    sigma, q = 10.0 ** RNG.uniform(-12, 12, size), 10.0 ** RNG.uniform(-300, -0.01, size)
    c, sign = 10.0 ** RNG.uniform(-10, 60, size), RNG.choice([-1.0, 1.0], size)
    bound = np.asarray(chernoff(sigma, q, c, sign))
    assert not np.isnan(bound).any() and np.isfinite(bound).sum() > 100
    least = -np.log1p(c) - c * np.log1p(1.0 / c)
    assert np.all(bound >= least - 1e-12 * np.abs(least))
    # in the direction remove, log M(c) >= (c + 1) (log q + c/(2 sigma^2)), too
    grown = (c + 1.0) * (np.log(q) + c / (2.0 * sigma**2)) + least
    removing = sign > 0
    assert np.all(bound[removing] >= (grown - 1e-12 * np.abs(grown) - 1e-12)[removing])
