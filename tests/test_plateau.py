"""epsilon where delta is the mass at infinity, or next to it: decided by exact sums, against rational arithmetic."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

import jaxacct as ja

ABOVE, BELOW = (lambda x: np.nextafter(x, 1.0)), (lambda x: np.nextafter(x, 0.0))


def test_at_the_mass_itself_it_is_the_largest_loss():
    for mechanism, delta, largest in (
        (ja.ApproximateDP(1.0, 1e-5), 1e-5, 1.0),
        (ja.repeat(ja.ApproximateDP(1.0, 0.5), 2), 0.75, 2.0),
        (ja.compose(ja.ApproximateDP(1.0, 0.5), ja.Laplace(2.0)), 0.5, 1.5),
        (ja.compose(ja.ApproximateDP(1.0, 0.25), ja.RandomizedResponse(0.75)), 0.25, 1.0 + np.log(3.0)),
        (ja.FiniteOutput([0.5, 0.25, 0.25], [0.25, 0.75, 0.0]), 0.25, np.log(2.0)),
        (ja.PoissonSampled(ja.ApproximateDP(1.0, 0.5), 0.25), 0.125, np.log(0.75 + 0.25 * np.e)),
    ):
        found = ja.epsilon(mechanism, delta)
        assert found.status == "ok" and found.upper - found.lower <= 1e-9, mechanism
        assert found.lower * (1 - 1e-14) <= largest <= found.upper * (1 + 1e-14), mechanism
        assert ja.epsilon(mechanism, BELOW(delta), relation="remove_one").lower == np.inf
    assert ja.epsilon(ja.ApproximateDP(1.0, 1e-5), 1e-5, relation="replace_one").upper <= 1.0 + 1e-13


def test_rounding_decides_nothing():
    """The mass is no float. If delta is the next float below it, epsilon is infinite; if the next above, finite."""
    for one, steps in ((0.1, 2), (0.3, 5), (1e-5, 7), (1e-9, 100)):
        exact = 1 - (1 - Fraction(one)) ** steps
        near = float(exact)
        low, high = (near, ABOVE(near)) if Fraction(near) < exact else (BELOW(near), near)
        found = ja.epsilon(ja.repeat(ja.ApproximateDP(0.5, one), steps), [low, high])
        assert found.lower[0] == np.inf and found.status[0] == "mass_at_infinity", (one, steps)
        assert found.upper[1] <= 0.5 * steps * (1 + 1e-12) and np.isfinite(found.upper[1]), (one, steps)


def test_a_batch_keeps_its_other_rows():
    found = ja.epsilon(ja.ApproximateDP([1.0, 2.0, 0.0], [1e-5, 0.3, 0.1]), [[1e-5, 0.3, 0.1], [0.01, 0.3, 0.01]])
    alone = ja.epsilon(ja.ApproximateDP(1.0, 1e-5), 0.01)
    assert np.allclose(found.upper[0], [1.0, 2.0, 0.0], rtol=1e-13, atol=0) and found.status[0].tolist() == [
        "ok",
        "ok",
        "zero",
    ]
    assert found.upper[1, 0] == alone.upper and found.upper[1, 1] == found.upper[0, 1] and found.upper[1, 2] == np.inf


def test_beside_gaussians():
    mass = ja.ApproximateDP(1.0, 0.5)
    assert ja.epsilon(ja.compose(mass, ja.Gaussian(2.0)), 0.5).lower == np.inf
    sampled = ja.compose(mass, ja.PoissonSampled(ja.Gaussian(1.0), 0.5))
    assert ja.epsilon(sampled, 0.5, relation="remove_one").lower == np.inf
    bounded = ja.epsilon(sampled, 0.5, relation="add_one")  # its losses end at 1 + log 2
    assert bounded.lower <= 1.0 + np.log(2.0) <= bounded.upper


@pytest.mark.parametrize("seed", range(6))
def test_random_finite_laws_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    p, q = (rng.multinomial(64, rng.dirichlet(np.ones(5))) / 64 for _ in range(2))
    p, q = np.where(np.arange(5) == 0, p + 1 / 64, p), np.where(np.arange(5) == 0, q + 1 / 64, q)
    p, q = p * 64 / 65, q * 64 / 65  # sums of p are 1 up to rounding
    run, steps = ja.repeat(ja.FiniteOutput(p, q), 2), 2
    one, other = ([Fraction(float(x)) for x in law] for law in (p, q))
    one, other = ([x / sum(law) for x in law] for law in (one, other))
    pairs = [(a * c, b * d) for (a, b), (c, d) in product(zip(one, other, strict=True), repeat=steps)]
    mass = sum(x for x, y in pairs if y == 0)
    near = float(mass)
    for delta in (near, ABOVE(near), BELOW(near)):
        if not 0.0 < delta < 1.0:
            continue
        found = ja.epsilon(run, delta, relation="remove_one")
        ratios = sorted({x / y for x, y in pairs if x > 0 and y > 0}, reverse=True)
        if Fraction(delta) < mass:
            assert found.lower == np.inf
        elif ratios[0] > 1 and Fraction(delta) == mass:
            assert abs(found.upper - np.log(float(ratios[0]))) <= 1e-12
        elif ratios[0] > 1:
            assert found.upper <= np.log(float(ratios[0])) * (1 + 1e-12)
