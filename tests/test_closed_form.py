"""Composed Gaussians against mpmath, down to delta = 1e-30."""

import mpmath
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accounting import dispatch
from jaxacct.engines import closed_form


def exact_delta(mu, eps):
    with mpmath.workdps(60):
        mu, eps = mpmath.mpf(mu), mpmath.mpf(eps)
        upper = mpmath.ncdf(mu / 2 - eps / mu)
        return upper - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize(("sigma", "steps"), [(100.0, 1e4), (1000.0, 1e6), (0.5, 1), (30.0, 7), (1e4, 3)])
@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-14, 1e-20, 1e-30])
def test_epsilon_of_composed_gaussians(sigma, steps, delta):
    bounds = ja.epsilon(ja.repeat(ja.Gaussian(sigma), steps), delta)
    mu = mpmath.sqrt(steps) / sigma
    if bounds.upper == 0:
        assert exact_delta(mu, 0) <= delta
        return
    assert bounds.relative_width < 1e-9
    assert exact_delta(mu, bounds.upper) <= delta
    assert bounds.lower == 0 or exact_delta(mu, bounds.lower) >= delta


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0, 8.0])
def test_log_delta_is_within_its_own_error(mu, factor):
    eps = factor * mu + mu**2 / 2 * (factor > 0)
    value, _, error = closed_form.log_delta(np.array([mu]), np.array([eps]))
    assert abs(value[0] - float(mpmath.log(exact_delta(mu, eps)))) <= error[0]
    assert error[0] < 1e-6


def test_known_failure_of_a_peer():
    """dp_accounting 0.6.0 returns 7.64671 here, below the truth."""
    bounds = ja.epsilon(ja.repeat(ja.Gaussian(100.0), 10_000), 1e-14)
    assert bounds.lower <= 7.86873647 * (1 + 1e-8) and bounds.upper >= 7.86873647 * (1 - 1e-8)


def test_contour_agrees_with_the_closed_form():
    run = ja.repeat(ja.Gaussian([0.7, 3.0, 40.0]), [1, 10, 1000])
    formula, contour = ja.epsilon(run, 1e-8), ja.epsilon(run, 1e-8, engine="contour")
    assert np.all(contour.lower <= formula.upper) and np.all(formula.lower <= contour.upper)
    assert np.all(contour.relative_width < 1e-6)


def test_a_delta_that_underflows_is_not_zero_above():
    for mechanism, eps in ((ja.Gaussian(20.0), 2.0), (ja.PoissonSampled(ja.Gaussian(20.0), 0.5), 3.0)):
        b = ja.delta(mechanism, eps)
        assert b.lower == 0.0 and 0.0 < b.upper <= 1e-300 and b.status == "ok"
    assert ja.delta(ja.PoissonSampled(ja.Gaussian(20.0), 0.5), 3.0, relation="add_one").upper == 0.0  # losses <= log 2


def exact_delta_of_one_step(sigma, q, removing, eps):
    """delta by its definition. The caller sets mpmath's precision: eps = 1e-n needs more than n digits."""
    q, eps = mpmath.mpf(q), mpmath.mpf(eps)
    if removing:
        return q * exact_delta_of_gaussian(1 / mpmath.mpf(sigma), mpmath.log1p(mpmath.expm1(eps) / q))
    k = 1 - (1 - q) * mpmath.exp(eps)
    return k * exact_delta_of_gaussian(1 / mpmath.mpf(sigma), mpmath.log(q * mpmath.exp(eps) / k)) if k > 0 else 0


def exact_delta_of_gaussian(mu, eps):
    tail = lambda x: mpmath.erfc(x / mpmath.sqrt(2)) / 2
    return tail(eps / mu - mu / 2) - mpmath.exp(eps) * tail(eps / mu + mu / 2)


@pytest.mark.parametrize("removing", [True, False])
@pytest.mark.parametrize(
    ("sigma", "q", "delta"),
    [(1.08, 3.52e-141, 1.38e-197), (0.19, 5.6e-257, 9.7e-262), (1e50, 0.1, 1e-60), (2.0, 1e-40, 1e-45)],
)
def test_one_step_of_next_to_no_epsilon(sigma, q, delta, removing):
    """The bisection once ended at absolute steps of 1e-59: [0, 1.7e-59] where the truth is 1e-134."""
    law = (np.array([x]) for x in (sigma, q, removing, delta, 1e-15))
    low, _, high = (float(x[0]) for x in closed_form.epsilon_of_one_step(*law))
    assert 0 < low <= high <= low * (1 + 1e-9)
    with mpmath.workdps(700):
        assert exact_delta_of_one_step(sigma, q, removing, high) <= delta
        assert exact_delta_of_one_step(sigma, q, removing, low) >= delta


@mpmath.workdps(60)
def exact_delta_of_atoms(loss, mass, eps):
    return sum((m * (1 - mpmath.exp(eps - x)) for x, m in zip(loss, mass, strict=True) if x > eps), mpmath.mpf(0))


@pytest.mark.parametrize("seed", range(10))
def test_one_step_of_atoms(seed):
    """Every end holds for all losses and masses within their errors, and is narrow."""
    rng = np.random.default_rng(seed)
    loss = 10.0 ** rng.uniform(-6, 3, 50) * rng.choice([-1, 1], 50)
    mass = 10.0 ** rng.uniform(-250, 0, 50)
    mass /= mass.sum()
    exact = [mpmath.mpf(x) for x in loss], [mpmath.mpf(m) for m in mass]
    for eps in (0.0, 1e-7, *(1.001 * loss[:4].clip(0.0)), 500.0):
        low, _, high = (float(x[0]) for x in closed_form.delta_of_atoms(loss[None], mass[None], np.array([eps])))
        truth = exact_delta_of_atoms(*exact, mpmath.mpf(eps))
        assert low <= truth <= high <= truth * (1 + mpmath.mpf(1e-9)) + 1e-300
    for delta in (0.9, 1e-3, 1e-20, 1e-200):
        at = np.array([delta]), np.array([1e-15])
        low, _, high = (float(x[0]) for x in closed_form.epsilon_of_atoms(loss[None], mass[None], *at))
        assert exact_delta_of_atoms(*exact, mpmath.mpf(high)) <= delta
        assert low == 0.0 or exact_delta_of_atoms(*exact, mpmath.mpf(low)) >= delta
        assert low <= high <= low * (1 + 1e-9) + 1e-15


def test_atoms_that_are_asked_together_are_those_asked_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "ATOMS_TOGETHER", 3)
    choices = ja.PoissonSampled(ja.RandomizedResponse(np.linspace(0.6, 0.9, 5)), 0.3)
    together = ja.epsilon(choices, 1e-4)
    alone = [ja.epsilon(ja.PoissonSampled(ja.RandomizedResponse(p), 0.3), 1e-4) for p in np.linspace(0.6, 0.9, 5)]
    assert together.upper.tolist() == [float(one.upper) for one in alone]
    assert set(together.engine) == {"closed_form"}


def test_delta_that_is_attained_by_mass_at_infinity():
    """Approximate DP at its own delta has its own epsilon."""
    found = ja.epsilon(ja.ApproximateDP(1.0, 1e-5), 1e-5)
    assert 1.0 - 1e-12 < found.lower <= 1.0 <= found.upper < 1.0 + 1e-12
