"""Masses and points of profiles that are made by exp, erfc and Phi are at least the truth, by mpmath."""

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.mechanisms.additive_noise import _narrower, _wider, gaussian_pair, profile_of_gaussian


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(80):
        yield


def uniform_exponent(rng, low, high):
    return float(10.0 ** rng.uniform(low, high))


def gaussian_delta(mu, epsilon):
    mu, epsilon = mp.mpf(float(mu)), mp.mpf(float(epsilon))
    with mp.workdps(60 + int(0.45 * min(epsilon, 700))):
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def test_the_mass_of_propose_test_release():
    rng = np.random.default_rng(1)
    scale = 10.0 ** rng.uniform(-3.0, 4.0, 70)
    threshold = scale * np.concatenate(
        [rng.uniform(0.0, 745.0, 30), rng.uniform(0.0, 3.0, 20), np.linspace(600, 900, 20)]
    )
    release = ja.ProposeTestRelease(ja.PureDP(0.1), test_scale=scale, threshold=threshold)
    found = ja.delta(release, 1e6)
    for upper, lower, b, t in zip(found.upper, found.lower, scale, threshold, strict=True):
        truth = mp.exp(-mp.mpf(float(t)) / mp.mpf(float(b))) / 2
        assert lower <= truth <= upper <= truth * (1 + mp.mpf(10) ** -12) + mp.mpf(10) ** -320
    # at the float just below the mass, epsilon is infinite
    most = np.nextafter(
        [float(mp.exp(-mp.mpf(float(t)) / float(b)) / 2) for b, t in zip(scale, threshold, strict=True)], 0
    )
    assert np.all(np.isinf(ja.epsilon(release, np.maximum(most, 1e-320)).upper[most > 1e-300]))
    assert ja.ProposeTestRelease(ja.PureDP(0.1), test_scale=1e-300, threshold=1e300)._passing() > 0.0


@pytest.mark.parametrize(
    ("low", "high", "width"), [(-6, -2, 0.1), (-2, 2, 1e-8), (2, 4, 1e-9), (4, 7, 1e-6), (7, 20, None)]
)
def test_a_point_of_a_gaussian_profile(low, high, width):
    rng = np.random.default_rng(2)
    for _ in range(20):
        mu = uniform_exponent(rng, low, high)
        place = rng.choice([rng.uniform(-3.0, 37.0), rng.uniform(-0.5 * mu, 0.0), 0.0])
        epsilon = max(mu * (0.5 * mu + place), 0.0)
        found, truth = mp.mpf(float(profile_of_gaussian(mu, np.array([epsilon]))[0])), gaussian_delta(mu, epsilon)
        assert found >= truth, (mu, epsilon)
        assert width is None or found <= truth * (1 + width) + mp.mpf(10) ** -12


def test_the_pair_of_a_gaussian_of_little_noise():
    """The pair's profile is no lower than the Gaussian's even at its own losses, although 1/sigma is rounded."""
    rng = np.random.default_rng(3)
    for sigma in (3.3e-5, 0.0007, 0.3, 1.7, 30.0):
        pair = gaussian_pair(1.0 / sigma, 1.0)
        exact = 1 / mp.mpf(sigma)
        for epsilon in rng.choice(pair.loss[pair.loss > 0.0], 6):
            at = pair.loss > epsilon
            found = mp.fsum(map(mp.mpf, pair.p[at] * -np.expm1(epsilon - pair.loss[at]))) + mp.mpf(
                float(pair.p_infinity)
            )
            delta = mp.ncdf(exact / 2 - epsilon / exact) - mp.exp(epsilon) * mp.ncdf(-exact / 2 - epsilon / exact)
            assert found * (1 + mp.mpf(10) ** -13) >= delta, (sigma, epsilon)


def hockey_stick(mean, p_scale, q_scale, epsilon):
    """H_{e^eps}(N(mean, p_scale^2) || N(0, q_scale^2)) from the roots of the log ratio."""
    grown = mp.exp(epsilon)
    a = 1 / (2 * q_scale**2) - 1 / (2 * p_scale**2)
    b, c = mean / p_scale**2, -(mean**2) / (2 * p_scale**2) + mp.log(q_scale / p_scale) - epsilon
    p, q = (lambda x: mp.ncdf((x - mean) / p_scale)), (lambda x: mp.ncdf(x / q_scale))
    over_p, over_q = (lambda x: mp.ncdf((mean - x) / p_scale)), (lambda x: mp.ncdf(-x / q_scale))
    square = b * b - 4 * a * c
    if square <= 0:
        return mp.mpf(0) if a < 0 else 1 - grown
    low, high = sorted((-b + sign * mp.sqrt(square)) / (2 * a) for sign in (-1, 1))
    if a > 0:
        return p(low) + over_p(high) - grown * (q(low) + over_q(high))
    return over_p(low) - over_p(high) - grown * (over_q(low) - over_q(high))


def test_points_of_smooth_sensitivity():
    rng = np.random.default_rng(4)
    for _ in range(8):
        m, smoothness = uniform_exponent(rng, -4, 4), uniform_exponent(rng, -5, 0.3)
        ratio, more = np.exp(smoothness), np.expm1(2 * smoothness)
        place = rng.uniform(-3.0, 36.0)
        epsilon = max(0.5 * (m * m + 2 * m * ratio * place + more * place**2) - smoothness, 0.0)
        exact, at, grown = mp.mpf(m), mp.mpf(float(epsilon)), mp.exp(mp.mpf(smoothness))
        with mp.workdps(80 + int(0.45 * min(epsilon, 1000.0))):
            wider, narrower = hockey_stick(exact, grown, mp.mpf(1), at), hockey_stick(exact, mp.mpf(1), grown, at)
        with np.errstate(all="ignore"):
            found = [f(m, smoothness, np.array([epsilon]))[0] for f in (_wider, _narrower)]
        assert found[0] >= wider and (found[1] >= narrower or narrower < mp.mpf(10) ** -300), (m, smoothness, epsilon)


def test_epsilon_is_infinite_where_delta_is_below_the_mass_at_infinity():
    """The mass at infinity is an exact fraction of the given floats, and replace_one does not lower that mass."""
    rng = np.random.default_rng(6)
    for _ in range(5):
        given = [(uniform_exponent(rng, -12, -0.3), int(rng.integers(1, 6))) for _ in range(rng.integers(1, 4))]
        run = ja.compose(*(ja.repeat(ja.ApproximateDP(0.5, d), n) for d, n in given))
        mass = 1 - math.prod((1 - Fraction(d)) ** n for d, n in given)
        near = float(mass)
        below = near if Fraction(near) < mass else np.nextafter(near, 0.0)
        assert ja.epsilon(run, below).upper == np.inf
        assert ja.epsilon(run, np.nextafter(below, 1.0)).upper <= 0.5 * sum(n for _, n in given) * (1 + 1e-9)
    known = ja.FiniteOutput([0.1, 0.2, 0.7], [0.0, 0.0, 1.0])
    mass = 1 - Fraction(0.7) / sum(map(Fraction, (0.1, 0.2, 0.7)))
    below = np.nextafter(float(mass), 0.0)
    for relation in ("remove_one", "add_or_remove_one", "replace_one"):
        assert ja.epsilon(known, below, relation=relation).upper == np.inf
