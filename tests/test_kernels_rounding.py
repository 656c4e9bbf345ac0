"""The model of rounding in kernels/rounding.py, held against mpmath on this machine; and what rests on it."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax import lax

import jaxacct as ja
from jaxacct.kernels import nodes, rounding, special
from jaxacct.kernels.law import log_mix

RNG = np.random.default_rng(0)
WIDE = 10.0 ** RNG.uniform(-300, 20, 300) * RNG.choice([-1.0, 1.0], 300)
NEAR = RNG.uniform(-40.0, 40.0, 300)
POSITIVE = np.concatenate([10.0 ** RNG.uniform(-307, 308, 300), 1.0 + 10.0 ** RNG.uniform(-15, -0.5, 100)])
SIMPLE, COMPOUND = (lambda x: rounding.SIMPLE), (lambda x: rounding.COMPOUND)
FUNCTIONS = {
    "exp": (jnp.exp, mpmath.exp, np.concatenate([NEAR, RNG.uniform(-708.0, 709.0, 300)]), SIMPLE),
    "log": (jnp.log, mpmath.log, POSITIVE, SIMPLE),
    "sin": (jnp.sin, mpmath.sin, np.concatenate([NEAR, WIDE, np.pi * np.arange(1, 200)]), SIMPLE),
    "cos": (jnp.cos, mpmath.cos, np.concatenate([NEAR, WIDE, np.pi * (np.arange(200) + 0.5)]), SIMPLE),
    "expm1": (jnp.expm1, mpmath.expm1, np.concatenate([NEAR, WIDE[np.abs(WIDE) < 700], NEAR / 40.0]), COMPOUND),
    "log1p": (
        special.log1p,
        mpmath.log1p,
        np.concatenate([POSITIVE, -(10.0 ** RNG.uniform(-300, -0.01, 300))]),
        COMPOUND,
    ),
    "erfc": (lax.erfc, mpmath.erfc, RNG.uniform(-6.0, 26.0, 400), lambda x: rounding.SIMPLE * (4.0 + x * x)),
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
            if abs(exact) < rounding.TINY:
                assert abs(value) <= rounding.TINY
                continue
            assert abs(mpmath.mpf(float(value)) - exact) <= units(float(x)) * rounding.UNIT * abs(exact), (x, value)


@pytest.mark.parametrize("turn", [1e-9, 0.01, 1.0, 2.26])
def test_departures_are_within_their_depth(turn):
    """Sums of e^{i k angle} - 1, against mpmath, in units of the sum of w min(2, k angle)."""
    points, count = 128, 64
    weight = RNG.random(points)
    weight /= weight.sum()
    angle = turn * RNG.random(points)
    re, im = jax.jit(lambda w, a: nodes.departures(w, a, count))(weight, angle)
    with mpmath.workdps(40):
        for k in (1, 2, 7, 8, 37, count - 1):
            terms = [(mpmath.mpf(float(w)), mpmath.mpf(float(a)) * k) for w, a in zip(weight, angle, strict=True)]
            exact = mpmath.fsum(w * mpmath.expm1(1j * x) for w, x in terms)
            allowed = sum(w * (min(2, x) * nodes.depth(points, count) + 12 * x) for w, x in terms) * rounding.UNIT
            assert abs(mpmath.mpc(float(re[k]), float(im[k])) - exact) <= allowed


def test_log_mix_where_the_sampling_probability_is_tiny():
    """y + log q cancels there: it was off by thousands of units."""
    y = np.array([40.0, 300.0, 600.0, 690.0, 691.5, 706.0])
    q = np.array([1e-20, 1e-132, 1e-262, 1e-300, 1e-300, 1e-307])
    ours = np.asarray(jax.jit(lambda q, u: log_mix(1.0, q, u)[0])(q, y + 0.5))
    with mpmath.workdps(60):
        for x, r, found in zip(y, q, ours, strict=True):
            r = mpmath.mpf(float(r))
            exact = mpmath.log1p(r * mpmath.expm1(mpmath.mpf(float(x))))
            share = r * mpmath.exp(mpmath.mpf(float(x))) / mpmath.exp(exact)
            allowed = 18 * exact + share * (4 * (mpmath.mpf(float(x)) + 1) - 3 * mpmath.log(r))
            assert abs(mpmath.mpf(float(found)) - exact) <= allowed * rounding.UNIT


def test_a_chernoff_bound_that_is_not_finite_bounds_nothing():
    """Once epsilon = 0 was certified here: the nodes of the grid could not be told apart, and log M was -inf."""
    sigma, q, steps, delta = 0.4252111651324522, 3.3175719982713695e-26, 113.0, 6.7364472326387346e-195
    bounds = ja.epsilon(ja.dp_sgd(sigma, q, steps), delta, relation="remove_one", engine="contour")
    # delta(eps) >= P(max u > c) - e^eps T Q(u > c), at c = 20
    with mpmath.workdps(60):
        hit = 1 - (mpmath.mpf(1) - mpmath.mpf(q) * mpmath.ncdf(1 / mpmath.mpf(sigma) - 20)) ** int(steps)
        assert hit - mpmath.exp(1) * steps * mpmath.ncdf(-20) > delta
    assert bounds.upper > 1.0 and bounds.lower <= bounds.upper
