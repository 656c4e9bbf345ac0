"""The contour engine's parts against mpmath, and each certificate against the error it certifies."""

import jax
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels import arrays
from jaxacct.kernels.contour import core, gaussian_errors, plain
from jaxacct.kernels.law import LossLaw, log_mix, tilted_gaussian


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(), np.errstate(all="ignore"):  # as the engines call the kernels
        yield


def exact_moment(sigma, q, sign, z):
    """E_P[e^{zL}] of one sampled Gaussian, by a fine sum with the digits of long doubles."""
    power = z + 1 if sign > 0 else -z
    last = (z.real + 1) / sigma + 16 if sign > 0 else 16.0
    u, step = np.linspace(np.longdouble(-16), np.longdouble(last), 20_001, retstep=True)
    log_mix = np.log1p(q * np.expm1(u / sigma - 0.5 / sigma**2))
    return np.sum(np.exp(power * log_mix - u * u / 2)) * step / np.sqrt(8 * np.arctan(np.longdouble(1)))


CASES = [
    (1.0, 0.01, 6.0, 20.0),
    (0.5, 0.2, 2.0, 5.0),
    (0.7, 1e-3, 4.0, 30.0),
    (5.0, 0.9, 20.0, 60.0),
    (30.0, 0.5, 50.0, 100.0),
]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("sigma", "q", "c", "t_max"), CASES)
def test_moments_are_within_their_certificate(sigma, q, c, t_max, sign):
    points, count = 512, 32
    sigma, q, sign, c, t_max = map(np.float64, (sigma, q, sign, c, t_max))
    grid = tilted_gaussian(sigma, q, sign, c, points)
    h = t_max / (count - 1)
    re, im = core.departures(grid.weight, h * sign * grid.loss, count)
    depth = core.depth(points, count)
    bound, _ = certified(gaussian_errors.gaussian_errors(sigma, q, sign, grid, t_max, depth), t_max)
    assert float(bound) < 1e-12
    at_c = exact_moment(sigma, q, sign, np.longdouble(c))
    assert abs(float(grid.log_m - np.log(at_c))) < 1e-12 * max(1.0, abs(float(grid.log_m)))
    for k in (1, 31):
        exact = exact_moment(sigma, q, sign, np.clongdouble(c + 1j * h * k))
        ours = np.clongdouble(1 + re[k] + 1j * im[k]) * np.exp(np.longdouble(grid.log_m))
        assert abs(ours - exact) <= (float(bound) + 1e-13) * abs(at_c)


def certified(errors, t):
    """(bound on M(c + it)/M(c), bound on log M(c)) from what gaussian_errors returns."""
    flat, rate, most, at_c = errors
    return flat + np.minimum(rate * t, most), at_c


def deviation_of(grid):
    mean = np.sum(grid.weight * grid.loss)
    return np.sqrt(np.sum(grid.weight * (grid.loss - mean) ** 2)) + 1e-12


def coarse_error(sigma, q, sign, c, turns, points):
    """(difference of a coarse from a fine M(c + it)/M(c), its certificate)."""
    sigma, q, sign, c = map(np.float64, (sigma, q, sign, c))
    coarse, fine = (tilted_gaussian(sigma, q, sign, c, n) for n in (points, 16_384))
    t = turns / deviation_of(fine)

    def moment(grid):
        scale = np.exp(grid.log_m - fine.log_m)
        return scale * np.sum(grid.weight * np.exp(1j * t * grid.loss))

    return np.abs(moment(coarse) - moment(fine)), certified(
        gaussian_errors.gaussian_errors(sigma, q, sign, coarse, t, 200.0), t
    )[0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@settings(deadline=None, max_examples=80)
@given(
    st.floats(-1.2, 2.0),
    st.floats(-5, -0.01),
    st.floats(-1, 1.5),
    st.floats(0.05, 40.0),
    st.sampled_from([32, 64, 192, 512]),
)
def test_step_certificate_covers_coarse_grids(sign, log_sigma, log_q, log_c, turns, points):
    """The error of a coarse grid, measured against a fine one, stays below what the certificate says."""
    error, bound = coarse_error(10.0**log_sigma, 10.0**log_q, sign, 10.0**log_c, turns, points)
    assert float(error) <= float(bound) * (1 + 1e-6) + 1e-11


def quadrature_error(sigma, q, sign, c, t, points):
    """Return the error of the grid's sum for M(c + it), relative to M(c), in long double, and its certificate."""
    grid = tilted_gaussian(*(np.array([x]) for x in (sigma, q, sign, c)), points)
    low, step = np.longdouble(grid.u[0, 0]), np.longdouble(grid.step[0])

    def of(u):
        y = u / np.longdouble(sigma) - 0.5 / np.longdouble(sigma) ** 2
        log_mix = np.log1p(np.longdouble(q) * np.expm1(y))
        weight = np.exp(np.longdouble(grid.power[0]) * log_mix - 0.5 * u * u)
        return np.sum(weight), np.sum(weight * np.exp(1j * (np.longdouble(t) * log_mix).astype(np.clongdouble)))

    _, coarse = of(low + step * np.arange(points))
    total, fine = of(low - 4 + step / 16 * np.arange(16 * points + int(128 / float(step))))
    law = [np.array([x]) for x in (sigma, q, sign)]
    certified = gaussian_errors._range_error(*law, grid) + gaussian_errors._step_error(*law, grid, np.array([t]))
    return float(abs(16 * coarse - fine) / total), float(certified[0])


@pytest.mark.parametrize(
    "case",
    [
        (1.186, 5.49e-7, 1.0, 1.801, 1.533e6, 512),
        (2.102, 0.00144, 1.0, 0.8931, 1.254e4, 576),
        (2.904, 1.32e-6, 1.0, 2.819, 1.153e7, 192),
        (1.04, 1.38e-7, 1.0, 0.518, 1.507e5, 64),
        (4.458, 1.38e-7, -1.0, 8.142e5, 1.079e8, 64),
    ],
)
def test_nodes_at_which_the_phase_turns_too_fast_count_in_full(case):
    """The certificate said 1e-17, and errors were up to 6e-12: on a line beyond pi/2 the phase is small again."""
    error, bound = quadrature_error(*case)
    assert 1e-16 < error <= bound < 1e-6


def decay_and_truth(sigma, q, sign, c, turns, points=64):
    """(certified 1 - |phi| beyond a frequency, |phi| on a fan of larger ones, which of those are resolved)."""
    sigma, q, sign, c = map(np.float64, (sigma, q, sign, c))
    grid, fine = (tilted_gaussian(sigma, q, sign, c, n) for n in (points, 8192))
    start = turns / deviation_of(fine)
    t = start * np.geomspace(1.0, 30.0, 25)
    resolved = t * np.max(fine.posterior) * fine.step / sigma < 1.0
    modulus = np.abs(np.exp(1j * t[:, None] * fine.loss) @ fine.weight)
    return (
        gaussian_errors.gaussian_decay(*gaussian_errors.level_sets(sigma, q, grid), start),
        modulus,
        resolved,
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@settings(deadline=None, max_examples=25)
@given(st.floats(-0.7, 1.5), st.floats(-5, -0.01), st.floats(-1, 1.6), st.floats(-1.0, 3.0))
def test_decay_holds_for_all_larger_frequencies(sign, log_sigma, log_q, log_c, log_turns):
    lost, modulus, resolved = decay_and_truth(10.0**log_sigma, 10.0**log_q, sign, 10.0**log_c, 10.0**log_turns)
    assert 0 <= float(lost) <= 1
    assert np.all(np.asarray(modulus)[np.asarray(resolved)] <= 1 - float(lost) + 1e-9)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.0, 2.0), st.floats(-12, -5), st.floats(-1.0, 1.0), st.floats(-1.0, 1.5))
def test_decay_where_samples_are_rare(log_sigma, log_q, log_share, log_turns):
    """Abscissae are of the order 1/q.  The bound was 0, as if the posterior were 1/2 somewhere on the grid."""
    q = 10.0**log_q
    lost, modulus, resolved = decay_and_truth(10.0**log_sigma, q, -1.0, 10.0**log_share / q, 10.0**log_turns, 512)
    assert np.all(np.asarray(modulus)[np.asarray(resolved)] <= 1 - float(lost) + 1e-9)
    assert float(lost) >= 0.3 * (1 - modulus[0])


def test_sinc_envelope():
    y = np.linspace(0, 200, 400_001)
    sinc = np.abs(np.sinc(y / np.pi))
    envelope = np.maximum.accumulate(sinc[::-1])[::-1]
    ours = np.asarray(gaussian_errors.sinc_envelope(y))
    assert np.all(ours >= envelope - 1e-12)
    assert np.all(np.diff(ours) <= 1e-12)
    assert np.all(ours[y < 2] - envelope[y < 2] < 2e-3)


@pytest.mark.parametrize("q", [1e-12, 1e-6, 0.01, 0.5, 0.9, 1 - 1e-9])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 1000.0])
def test_log_mix(sigma, q):
    u = np.array([-12.0, -3.0, -1e-3, 0.0, 1e-6, 0.5, 4.0, 20.0, 60.0])
    ours, posterior = log_mix(np.float64(sigma), np.float64(q), u)
    with mpmath.workdps(50):
        for i, x in enumerate(u):
            y = mpmath.mpf(float(x)) / mpmath.mpf(sigma) - 1 / (2 * mpmath.mpf(sigma) ** 2)
            mix = 1 - mpmath.mpf(q) + mpmath.mpf(q) * mpmath.exp(y)
            p = q * mpmath.exp(y) / mix
            through_y = float(p) * 4 * ROUNDOFF * (abs(x) / sigma + 0.5 / sigma**2)
            assert abs(ours[i] - float(mpmath.log(mix))) <= through_y + 12 * ROUNDOFF * abs(ours[i])
            assert abs(posterior[i] - float(p)) <= 1e-12


@pytest.mark.slow
def test_kernels_trace_and_vmap():
    none, table = np.zeros((3, 0)), np.zeros((3, 0, 0))
    law = LossLaw(
        np.ones(3),
        np.zeros(3),
        np.array([[0.8], [1.0], [1.2]]),
        np.full((3, 1), 0.01),
        np.full((3, 1), 1000.0),
        none,
        none,
        table,
        table,
        none,
    )

    @jax.jit
    def run(law, log_delta):
        return jax.vmap(lambda l, d: plain.epsilon(l, d, d, np.float64(-18.0), 64, 32))(law, log_delta)

    out = run(law, np.full(3, np.log(1e-5)))
    assert out.estimate.shape == (3,)
    assert abs(float(out.estimate[1]) - 1.82823667) < 1e-7


@pytest.mark.parametrize(("function", "units"), [(arrays.log1p, 6.0), (arrays.log1p_inline, 2.5)])
def test_log1p(function, units):
    middle = np.random.default_rng(0).uniform(-0.9, 3.0, 3001)
    x = np.concatenate([-(10.0 ** np.linspace(-18, -1e-3, 3001)), 10.0 ** np.linspace(-18, 300, 3001), middle, [0.0]])
    ours = np.asarray(jax.jit(function)(x))
    for value, argument in list(zip(ours, x, strict=True))[::-15]:
        exact = mpmath.log1p(mpmath.mpf(float(argument)))
        assert abs(value - exact) <= units * ROUNDOFF * abs(exact)


def test_log1p_at_its_ends_and_its_derivatives():
    with jax.enable_x64():
        first = jax.grad(arrays.log1p_inline)
        values = jax.jit(lambda x, at: (arrays.log1p_inline(x), first(at), jax.grad(first)(at)))
        ends, slope, bend = values(np.array([-1.0, np.inf, -1.5, np.nan]), 3.0)
        np.testing.assert_array_equal(ends, [-np.inf, np.inf, np.nan, np.nan])
        assert (float(slope), float(bend)) == (0.25, -1.0 / 16.0)


def test_chernoff_bounds_hold_on_coarse_grids():
    """Bounds on coarse grids are at least the sum over 20,001 points, even at tilts where only rare losses matter."""
    rng = np.random.default_rng(0)
    size = 1200
    sigma, q = 10.0 ** rng.uniform(-0.7, 3.0, size), 10.0 ** rng.uniform(-6.0, -0.01, size)
    c = 10.0 ** rng.uniform(-1.0, 2.5, size) / np.minimum(q / sigma * 3.0 + 1e-9, 1.0)
    sign = np.where(rng.random(size) < 0.8, -1.0, 1.0)
    none = np.zeros((size, 0))
    column = lambda x: x[:, None]
    law = LossLaw(
        sign,
        np.zeros(size),
        column(sigma),
        column(q),
        np.ones((size, 1)),
        none,
        none,
        none[..., None],
        none[..., None],
        none,
    )
    narrow = 0
    for points in (32, 48, 128):
        bound = gaussian_errors.chernoff(law, c, nodes=points)
        log_kappa = -np.log1p(c) - c * np.log1p(1.0 / c)
        for i in np.flatnonzero(np.isfinite(bound))[:: 16 if points < 128 else 80]:
            power = c[i] + 1.0 if sign[i] > 0 else -c[i]
            middle = 0.5 * power / sigma[i] if sign[i] > 0 else 0.0
            if middle > 300.0:
                continue
            u = np.linspace(-60.0, 60.0 + 2.0 * middle, 20_001)
            loss = log_mix(sigma[i], q[i], u)[0]
            exponent = power * loss - 0.5 * u**2
            top = exponent.max()
            exact = top + np.log(np.sum(np.exp(exponent - top)) * (u[1] - u[0]) / np.sqrt(2.0 * np.pi))
            gap = bound[i] - log_kappa[i] - exact
            assert gap > -1e-11 * (1.0 + abs(exact)), (points, sigma[i], q[i], c[i], sign[i], gap)
            narrow += gap < 1e-3
    assert narrow > 50  # many bounds are close, not only valid
