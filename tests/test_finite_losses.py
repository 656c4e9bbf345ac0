"""Losses of finite laws against mpmath, over the whole range of float64."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.mechanisms import components
from jaxacct.mechanisms.finite import log_mixture

UNITS, ABSOLUTE = 16, 1e-26  # mechanisms/README.md, "Rounding of finite laws"


def exactly(value):
    return mpmath.mpf(value.numerator) / mpmath.mpf(value.denominator)


def units_off(ours, exact, absolute):
    """The error of a loss beyond `absolute`, in units of 2^-53 |exact|."""
    off = abs(mpmath.mpf(float(ours)) - exact) - absolute
    return float(off / (abs(exact) * mpmath.mpf(2) ** -53)) if off > 0 else 0.0


def mixture(excess, rate):
    """log(1 + q (p/q - 1)) for Fractions."""
    change = excess * Fraction(rate)
    return mpmath.log(exactly(1 + change)) if change < -0.5 else mpmath.log1p(exactly(change))


@pytest.mark.parametrize("case", ["ordinary", "small rates", "near one", "balanced", "tiny losses"])
def test_log_mixture(case):
    rng = np.random.default_rng(3)
    loss = np.concatenate(
        [rng.uniform(-800, 1500, 100), rng.uniform(-50, 50, 100), [1e300, -1e300, 745.0, 709.9, 700.1]]
    )
    if case == "tiny losses":
        loss = 10.0 ** rng.uniform(-300, 0, loss.size) * rng.choice([-1, 1], loss.size)
    rate = {
        "ordinary": rng.uniform(0, 1, loss.size),
        "small rates": 10.0 ** rng.uniform(-323, 0, loss.size),
        "near one": 1 - 10.0 ** rng.uniform(-16, -1, loss.size),
        "balanced": np.exp(-np.clip(loss, 0.0, 740.0)) * 10.0 ** rng.uniform(-2, 2, loss.size),
        "tiny losses": 10.0 ** rng.uniform(-20, 0, loss.size),
    }[case]
    rate = np.clip(rate, 5e-324, 1 - 2.0**-53)
    ours = log_mixture(loss, rate)
    with mpmath.workdps(60):
        for l, q, found in zip(loss, rate, ours, strict=True):
            x, r = mpmath.mpf(float(l)), mpmath.mpf(float(q))
            exact = x + mpmath.log(r + (1 - r) * mpmath.exp(-x)) if x > 600 else mpmath.log1p(r * mpmath.expm1(x))
            assert units_off(found, exact, mpmath.mpf(1e-322)) <= UNITS, (l, q, found)


@pytest.mark.parametrize("rate", [1.0, 0.3, 1e-6, 1e-200])
@pytest.mark.parametrize("small", [1e-5, 0.1, 1e-300, 5e-324])
@pytest.mark.parametrize("ratio", [1 + 1e-12, 1.3, 2.7, 1e5])
def test_losses_of_given_masses(small, ratio, rate):
    """Every loss, sampled or not and in both directions, is that of the given masses divided by their exact sums."""
    p = np.array([small, min(small * ratio, 0.3), 0.25, 0.0])
    q = np.array([min(small * ratio, 0.3), small, 0.2, 0.0])
    p[3], q[3] = 1.0 - p.sum() + 3e-13, 1.0 - q.sum() - 7e-13
    total_p, total_q = sum(map(Fraction, p)), sum(map(Fraction, q))
    part = ja.FiniteOutput(p, q).part(np.asarray(rate), "add_or_remove_one", "remove")
    added = ja.FiniteOutput(p, q).part(np.asarray(rate), "add_or_remove_one", "add")
    with mpmath.workdps(60):
        for i in range(4):
            if p[i] == 0.0 or q[i] == 0.0:
                continue
            excess = Fraction(p[i]) / total_p / (Fraction(q[i]) / total_q) - 1
            exact = mixture(excess, rate)
            for loss, sign in ((part.loss[i], 1), (added.loss[i], -1)):
                assert units_off(loss, sign * exact, mpmath.mpf(ABSOLUTE)) <= UNITS, (i, loss, exact)


@pytest.mark.parametrize("rate", [1.0, 0.2, 1e-9])
@pytest.mark.parametrize("categories", [2, 3, 1000])
@pytest.mark.parametrize("probability", [1e-300, 1e-5, 0.4, 0.75, 1 - 1e-16, None])
def test_losses_of_randomized_response(probability, categories, rate):
    p = 1.0 / categories * (1 + 1e-12) if probability is None else probability
    part = ja.RandomizedResponse(p, categories).part(np.asarray(rate), "add_or_remove_one", "remove")
    ratio = Fraction(p) / ((1 - Fraction(p)) / (categories - 1))
    with mpmath.workdps(60):
        for loss, excess in zip(part.loss[:2], (ratio - 1, 1 / ratio - 1), strict=True):
            exact = mixture(excess, rate)
            assert units_off(loss, exact, mpmath.mpf(ABSOLUTE)) <= UNITS, (loss, exact)


def test_no_small_mass_is_lost_in_the_wrong_direction():
    """An atom whose mass underflows has a very low loss, so the remaining atoms still dominate."""
    for direction in ("remove", "add"):
        for rate in (1.0, 0.25):
            part = ja.PureDP(800.0).part(np.asarray(rate), "add_or_remove_one", direction)
            assert part.mass.sum() + part.infinity == 1.0
            top = 800.0 + np.log(rate) if direction == "remove" else (800.0 if rate == 1.0 else -np.log1p(-rate))
            assert part.loss[part.mass > 0].max() == pytest.approx(top, rel=1e-15)


def test_summed_mass_at_infinity_is_within_its_units():
    rng = np.random.default_rng(0)
    for parts in (1, 3, 20):
        mass = 10.0 ** rng.uniform(-12, -3, parts)
        counts = [int(n) for n in rng.integers(1, 2000, parts)]
        run = ja.compose(*(ja.repeat(ja.ApproximateDP(0.1, d), n) for d, n in zip(mass, counts, strict=True)))
        found = components(run, "add_or_remove_one", "remove")
        with mpmath.workdps(60):
            survival = mpmath.fprod((1 - mpmath.mpf(float(d))) ** n for d, n in zip(mass, counts, strict=True))
            exact = 1 - survival
            off = abs(mpmath.mpf(float(found.delta_infinity[0])) - exact)
            assert off <= float(found.infinity_units[0]) * mpmath.mpf(2) ** -53 * exact
