"""Representations of a mechanism against closed forms, mpmath, brute force and dp_accounting."""

import importlib

import jax
import mpmath
import numpy as np
import pytest
from helpers import doctests_of, gaussian_moment, integral, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import jaxacct as ja
from jaxacct.engines.loss_moments import log_moments
from jaxacct.mechanisms import Components, components
from jaxacct.representations import mechanism_profile
from jaxacct.representations.profile_conversions import conjugate
from jaxacct.representations.renyi_divergences import renyi_divergence, zero_concentrated

flint = pytest.importorskip("flint")
arb = flint.arb

BOTH = "add_or_remove_one"
RATES = np.array([0.0, 1e-6, 1e-3, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0])


def contains(bounds, truth, slack=1e-14):
    truth = np.asarray(truth, np.float64)
    return bool(np.all((bounds.lower <= truth + slack) & (truth <= bounds.upper + slack)))


@pytest.mark.parametrize("name", ["mechanism_profile", "renyi_divergences"])
def test_doctests(name):
    assert doctests_of(importlib.import_module(f"jaxacct.representations.{name}")) > 0


# Moments


@flint.ctx.workprec(100)
@pytest.mark.parametrize("sigma,q", [(0.3, 0.01), (1.0, 1e-4), (1.0, 0.5), (4.0, 0.01), (2.0, 0.999)])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_sampled_gaussian_moments(sigma, q, direction):
    parts = components(ja.PoissonSampled(ja.Gaussian(sigma), q), BOTH, direction)
    for c in (-0.5, 60.0):
        low, high = log_moments(parts, np.array([c]))
        truth = gaussian_moment(sigma, q, c + 1 if direction == "remove" else -c).real.log()
        assert truth.rad() < 1e-18 * abs(truth) and low[0] <= truth <= high[0]
        assert high[0] - low[0] <= 1e-6 * abs(float(truth))


@flint.ctx.workprec(260)
def log_moment_by_trapezoids(sigma, q, power):
    """log E_Q[mix^power] of a sampled Gaussian, for power > 1; the rule's error and its ends are below e^-110."""
    s, q, p = 1 / arb(sigma), arb(q), arb(power)
    height = min(0.8 * np.pi * sigma, 8.0)
    step = arb(2 * np.pi * height / (110.0 + 0.5 * height**2))
    low, high = (int(end / float(step)) for end in (-25.0, power / sigma + 25.0))
    total = arb(0)
    for k in range(low, high + 1):
        u = step * k
        mix = 1 - q + q * (s * u - s * s / 2).exp()
        total += (-u * u / 2).exp() * (mix**p - 1 - p * (mix - 1))
    return (1 + total * step / (2 * arb.pi()).sqrt()).log()


MOMENTS = [(23.063609501697528, 2.4179160419261338e-11, 6749.375967282199), (5.5864, 3.4148e-12, 1452.0)]
"""(sigma, q, c): both ends, or one of them, were false, since the rounding of the nodes' places was left out."""


def test_moments_of_rare_samples_at_large_orders():
    rng = np.random.default_rng(11)
    cases = list(MOMENTS)
    for _ in range(40):  # about the order at which hits begin to decide
        sigma, q = np.exp(rng.uniform(0.0, np.log(30.0))), 10.0 ** -rng.uniform(2.0, 14.0)
        cases.append((sigma, q, rng.uniform(0.2, 1.6) * 2.0 * sigma**2 * -np.log(q)))
    for sigma, q, c in cases:
        low, high = log_moments(components(ja.dp_sgd(sigma, q, 1), BOTH, "remove"), np.array([c]))
        truth = log_moment_by_trapezoids(sigma, q, c + 1.0)
        assert low[0] <= truth <= high[0], (sigma, q, c)


def test_every_kind_of_part_has_its_moment():
    # a kind of part that is added to Components must also be added to moments, renyi, characteristic and profile
    kinds = {name.split("_")[0] for name in Components._fields}
    assert kinds == {"sign", "mu2", "mu", "gauss", "laplace", "finite", "log", "delta", "infinity", "rho", "xi"}


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_moments_of_a_zero_concentrated_guarantee(direction):
    # by definition the divergence of order 1 + c is at most xi + rho (1 + c); composed guarantees and a Gaussian add up
    run = ja.compose(ja.repeat(ja.ZCDP(0.1, 0.02), 3), ja.Gaussian(2.0))
    parts = components(run, "add_or_remove_one", direction)
    for c in (0.5, 1.0, 7.0):
        low, high = log_moments(parts, np.array([c]))
        gaussian = c * (c + 1.0) / 8.0
        guarantee = c * (0.06 + 0.3 * (c + 1.0))
        assert low[0] <= gaussian + 1e-14 and gaussian + guarantee <= high[0] <= (gaussian + guarantee) * (1.0 + 1e-12)


@flint.ctx.workprec(100)
@pytest.mark.parametrize("scale,q", [(1.0, 1.0), (0.2, 1.0), (0.5, 0.1), (5.0, 0.9)])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_laplace_moments(scale, q, direction):
    parts = components(ja.PoissonSampled(ja.Laplace(scale), q), BOTH, direction)
    b, rate = arb(scale), arb(q)
    mix = lambda x: 1 - rate + rate * ((1 - 2 * x) / b).exp()  # likelihood ratio at x in [0, 1]
    for c in (-0.5, 3000.0):
        p = c + 1 if direction == "remove" else -c
        inside = lambda x, analytic, p=p: ((x - 1) / b + p * mix(x).log(analytic=analytic)).exp() / (2 * b)
        truth = integral(inside, 0, 1).real + mix(0) ** p * (-1 / b).exp() / 2 + mix(1) ** p / 2
        low, high = log_moments(parts, np.array([c]))
        assert truth.rad() < 1e-18 * truth and low[0] <= truth.log() <= high[0]


@given(
    st.floats(1e-3, 5.0),
    st.sampled_from([0.0, 1e-3, 0.3]),
    st.floats(1e-3, 1.0),
    st.floats(-0.9, 50.0).filter(lambda c: abs(c) > 1e-6),
    st.sampled_from(["remove", "add"]),
)
@settings(max_examples=60, deadline=None)
def test_finite_moments(epsilon, delta, q, c, direction):
    parts = components(ja.PoissonSampled(ja.ApproximateDP(epsilon, delta), q), BOTH, direction)
    low, high = log_moments(parts, np.array([c]))
    with mpmath.workdps(40):
        e, d, rate = (mpmath.mpf(float(x)) for x in (epsilon, delta, q))
        likely = (1 - d) / (1 + mpmath.exp(-e))
        p, base = [likely, likely * mpmath.exp(-e), d, 0], [likely * mpmath.exp(-e), likely, 0, d]
        mixed = [(1 - rate) * y + rate * x for x, y in zip(p, base, strict=True)]
        first, second = (mixed, base) if direction == "remove" else (base, mixed)
        terms = [x * (x / y) ** mpmath.mpf(c) for x, y in zip(first, second, strict=True) if x > 0 and y > 0]
        assert low[0] <= mpmath.log(mpmath.fsum(terms)) <= high[0]
        assert high[0] - low[0] <= 1e-11 * (1 + abs(c))


# Rényi divergence and zero-concentrated privacy


def test_renyi_of_dp_sgd_is_that_of_dp_accounting():
    import dp_accounting
    from dp_accounting import rdp

    # integer orders: at fractional ones the peer interpolates, which gives more
    orders = [2.0, 3.0, 32.0, 256.0]
    for sigma, q in ((0.7, 0.01), (2.0, 0.1)):
        peer = rdp.RdpAccountant(orders)
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        peer.compose(dp_accounting.SelfComposedDpEvent(event, 100))
        ours = renyi_divergence(ja.dp_sgd(sigma, q, 100), orders)
        np.testing.assert_allclose(ours.upper, peer._rdp, rtol=1e-6)
        np.testing.assert_allclose(ours.lower, ours.upper, rtol=1e-8)


def test_renyi_in_closed_form():
    orders = np.array([0.3, 1.0, 2.0, 10.0])
    assert contains(renyi_divergence(ja.compose(ja.Gaussian(2.0), ja.Gaussian(1.0)), orders), orders * 0.625)
    response = renyi_divergence(ja.PureDP(1.5), orders[[0, 2, 3]])
    p = 1 / (1 + np.exp(-1.5))
    truth = [np.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1) for a in (0.3, 2.0, 10.0)]
    assert contains(response, truth) and response.kind.tolist() == ["certified"] * 3
    assert contains(renyi_divergence(ja.PureDP(1.5), 1.0), 1.5 * np.tanh(0.75))
    assert contains(renyi_divergence(ja.Laplace(2.0), 1.0), 0.5 - 1 + np.exp(-0.5))


def test_renyi_with_mass_at_infinity():
    found = renyi_divergence(ja.ApproximateDP(1.0, 0.1), [0.5, 1.0, 2.0])
    assert found.status.tolist() == ["ok", "mass_at_infinity", "mass_at_infinity"] and np.isinf(found.lower[1:]).all()
    both = 0.9 * 2 * np.sqrt(np.e) / (1 + np.e)
    assert contains(found[0:1], [-2 * np.log(both)])


def test_parts_that_are_absent_from_some_elements():
    parts = (ja.PureDP(1.0), ja.Laplace(1.0), ja.Gaussian(1.0))
    found = renyi_divergence(ja.compose(*(ja.PoissonSampled(part, [0.0, 0.5, 1.0]) for part in parts)), 2.0)
    each = [[renyi_divergence(ja.PoissonSampled(part, q), 2.0).upper for part in parts] for q in (0.0, 0.5, 1.0)]
    np.testing.assert_allclose(found.upper, np.sum(each, axis=1), rtol=1e-9, atol=1e-13)


def test_renyi_broadcasts_and_refuses():
    assert renyi_divergence(ja.dp_sgd([1.0, 2.0], 0.1, 10), [[2.0], [3.0], [4.0]]).shape == (3, 2)
    assert "order[1] = -1.0 must be > 0" in refusal(renyi_divergence, ja.Gaussian(1.0), [2.0, -1.0])
    assert "host call" in refusal(jax.jit(lambda s: renyi_divergence(ja.Gaussian(s), 2.0).upper), 1.0)


def test_zero_concentrated():
    grid = np.geomspace(1.00001, 1e4, 9)
    for mechanism in (ja.PureDP(1.0), ja.RandomizedResponse(0.75, 3), ja.Laplace(0.5)):
        rho = zero_concentrated(mechanism)
        brute = np.max(renyi_divergence(mechanism, grid).upper / grid)
        assert rho.lower <= brute * (1 + 1e-9) and brute <= rho.upper and rho.relative_width < 1e-4
    assert contains(zero_concentrated(ja.PureDP(1.0)), np.tanh(0.5), 1e-12)
    gaussian = zero_concentrated(ja.repeat(ja.Gaussian([1.0, 2.0]), 4))
    np.testing.assert_allclose([gaussian.lower, gaussian.upper], [[2.0, 0.5]] * 2, rtol=1e-11)
    sampled = zero_concentrated(ja.dp_sgd(4.0, 0.01, 100))
    assert sampled.lower <= 3.125 <= sampled.upper < 3.13
    assert np.isinf(zero_concentrated(ja.ApproximateDP(1.0, 1e-6)).lower)


# Trade-off function


@pytest.mark.parametrize("sampling, relation", [("shuffled", "zero_out"), ("poisson", "add_or_remove_one")])
def test_no_trade_off_exceeds_that_of_a_guess(sampling, relation):
    run = ja.dp_sgd(1.1, batch_size=600, dataset_size=60_000, epochs=2, sampling=sampling)
    assert ja.profile(run, relation=relation).tradeoff(0.9).upper <= 0.1 + 1e-15


def gaussian_tradeoff(mu, a):
    return norm.cdf(norm.isf(a) - mu)


@pytest.mark.parametrize("sigma", [0.2, 1.0, 20.0])
def test_tradeoff_of_the_gaussian(sigma):
    found = ja.profile(ja.Gaussian(sigma)).tradeoff(RATES)
    truth = gaussian_tradeoff(1 / sigma, RATES)
    assert contains(found, truth) and (found.kind == "certified").all() and found.ok.all()
    assert np.max(found.upper - found.lower) < 1e-4


def test_a_trade_off_function_of_next_to_nothing_needs_delta_at_0_alone(monkeypatch):
    asked, whole = [], ja.Profile.delta
    monkeypatch.setattr(ja.Profile, "delta", lambda self, epsilon: asked.append(epsilon) or whole(self, epsilon))
    found = ja.profile(ja.dp_sgd(1.0, 1e-9, 1)).tradeoff(0.1)
    assert len(asked) == 1
    assert 0.9 - 1e-8 < found.lower <= found.upper < 0.9 + 1e-15 and found.ok


def test_tradeoff_of_a_single_sampled_gaussian():
    # remove: tests of the mixture against Q have power (1 - q) a + q (1 - f_mu(a)); add: the inverse function
    sigma, q = 0.7, 0.2
    step = ja.PoissonSampled(ja.Gaussian(sigma), q)
    removed = (1 - q) * (1 - RATES) + q * gaussian_tradeoff(1 / sigma, RATES)
    assert contains(ja.profile(step, "remove_one").tradeoff(RATES[::4]), removed[::4])
    fine = np.concatenate([np.geomspace(1e-12, 0.1, 20_000), np.linspace(0.1, 1, 200_001)])
    forward = (1 - q) * (1 - fine) + q * gaussian_tradeoff(1 / sigma, fine)
    added = np.interp(RATES, forward[::-1], fine[::-1])
    assert contains(ja.profile(step, "add_one").tradeoff(RATES[3:5]), added[3:5], 1e-8)
    assert ja.profile(step).tradeoff(0.05).lower <= min(removed[3], added[3]) + 1e-8


def test_tradeoff_under_replace_one():
    found = ja.profile(ja.Gaussian(2.0), "replace_one").tradeoff(RATES)
    assert contains(found, gaussian_tradeoff(1.0, RATES))
    sampled = ja.profile(ja.PoissonSampled(ja.Gaussian(2.0), 0.1), "replace_one")
    assert sampled.delta(0.1).kind == "bound"
    assert "no single direction" in refusal(sampled.cdf, 0.1)


def test_tradeoff_where_nothing_is_released():
    found = ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), 0.0)).tradeoff(RATES)
    assert contains(found, 1 - RATES) and found.ok.all()


def test_tradeoff_of_pure_dp_is_two_lines():
    a = np.array([0.1, 0.5])
    found = ja.profile(ja.PureDP(1.0)).tradeoff(a)
    assert contains(found, np.maximum(1 - np.e * a, (1 - a) / np.e)) and np.max(found.upper - found.lower) < 1e-4


@given(st.lists(st.floats(0.0, 3.0), min_size=2, max_size=6), st.floats(0.0, 2.0), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_conjugate_holds_the_truth_of_any_convex_function(losses, slope, seed):
    # H of a finite pair with Q-masses q at likelihood ratios r: sum (r - E)_+ q, known only within noise
    rng = np.random.default_rng(seed)
    ratio = np.exp(np.sort(np.asarray(losses)) - 1.5)
    q = rng.dirichlet(np.ones(ratio.size))
    ratio = ratio / (q @ ratio)
    h = lambda e: np.maximum(ratio - np.asarray(e)[..., None], 0.0) @ q
    x = np.concatenate([[0.0], np.sort(rng.uniform(0.0, 1.3 * ratio[-1], 12))])
    noise = rng.uniform(0, 1e-3, (2, x.size)) * (x > 0)
    low, high = np.maximum(h(x) - noise[0], 0), np.minimum(h(x) + noise[1], 1)
    found = conjugate(x, low, high, slope, steepest=1.0, beyond=0.0)
    corners = np.concatenate([[0.0], ratio])
    truth = np.max(1 - h(corners) - slope * corners)
    assert found.low <= truth + 1e-12 and truth <= found.high + 1e-12


# Loss distribution, characteristic function, readings


def test_distribution_of_the_gaussian_loss():
    mu, loss = 0.8, np.array([-2.0, 0.0, 0.5, 3.0])
    found = ja.profile(ja.Gaussian(1 / mu)).cdf(loss)
    assert contains(found.p, norm.cdf((loss - mu**2 / 2) / mu)) and contains(found.q, norm.cdf((loss + mu**2 / 2) / mu))
    assert max(np.max(b.upper - b.lower) for b in found) < 1e-4


def test_distribution_of_one_sampled_step_by_direction():
    sigma, q, loss = 0.7, 0.2, np.array([0.05, 0.3, 1.0])
    profile = ja.profile(ja.PoissonSampled(ja.Gaussian(sigma), q))
    x = sigma**2 * np.log(np.expm1(loss) / q + 1) + 0.5  # where the loss of the remove direction is `loss`
    removed = profile.cdf(loss)
    assert contains(removed.q, norm.cdf(x / sigma))
    assert contains(removed.p, (1 - q) * norm.cdf(x / sigma) + q * norm.cdf((x - 1) / sigma))
    below = np.array([-0.3, -1.0])
    x = sigma**2 * np.log(np.expm1(-below) / q + 1) + 0.5
    added = profile.cdf(below, "add")
    assert contains(added.p, norm.sf(x / sigma))


def test_distribution_at_an_atom_stays_as_wide_as_the_atom():
    found = ja.profile(ja.RandomizedResponse(0.75)).cdf(np.log(3.0))
    assert found.q.lower <= 0.75 + 1e-9 and found.q.upper >= 1 - 1e-9 and found.q.status == "width"


def test_log_characteristic():
    t = np.array([0.0, 0.5, 3.0])
    gaussian = ja.profile(ja.Gaussian(2.0)).log_characteristic(t)
    np.testing.assert_allclose(gaussian.value, -(t**2 - 1j * t) / 8, atol=1e-15)
    assert gaussian.kind == "estimate"
    b = 0.5
    laplace = ja.profile(ja.Laplace(b)).log_characteristic(t)
    w = 1 + 2j * t
    formula = 0.5 * (np.exp(1j * t / b) * (1 + 1 / w) + np.exp(-(1 + 1j * t) / b) * (1 - 1 / w))
    np.testing.assert_allclose(np.exp(laplace.value), formula, rtol=1e-13)
    for base in (ja.Gaussian(1.0), ja.Laplace(0.7)):
        nearly = ja.profile(ja.PoissonSampled(base, 1 - 1e-13)).log_characteristic(t).value
        whole = ja.profile(base).log_characteristic(t).value
        np.testing.assert_allclose(np.exp(nearly), np.exp(whole), atol=1e-11)
    part = ja.profile(ja.compose(ja.ApproximateDP(1.0, 0.1), ja.dp_sgd(1.0, 0.1, 3)))
    np.testing.assert_allclose(part.log_characteristic(0.0, "add").value, np.log(0.9), atol=1e-14)
    step = ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), 0.1))
    for direction, power in (("remove", 1 + 2j), ("add", -2j)):
        truth = complex(gaussian_moment(1.0, 0.1, power))
        assert np.exp(step.log_characteristic(2.0, direction).value) == pytest.approx(truth, abs=1e-13)


def test_profile_at_negative_epsilon():
    step = ja.PoissonSampled(ja.Gaussian(0.7), 0.2)
    eps = np.array([-2.0, -0.1, 0.0, 1.0])
    profile = ja.profile(step, "remove_one")
    grid = np.linspace(-12, 16, 400_001)
    base = norm.pdf(grid, scale=0.7)
    mixed = 0.8 * base + 0.2 * norm.pdf(grid, 1.0, 0.7)
    brute = [np.trapezoid(np.maximum(mixed - np.exp(e) * base, 0), grid) for e in eps]
    assert contains(profile.delta(eps), brute, 1e-8)
    assert "epsilon = inf must be finite" in refusal(profile.delta, np.inf)


def test_a_mechanism_that_is_only_bounded_claims_no_more(monkeypatch):
    monkeypatch.setattr(ja.Gaussian, "kind_under", lambda *_, **__: "bound")
    profile = ja.profile(ja.Gaussian(1.0))
    for found in (profile.renyi(2.0), profile.zcdp(), profile.tradeoff(0.1)):
        assert found.kind == "bound"
    assert profile.renyi(2.0).lower == 0 and profile.zcdp().lower == 0 and profile.renyi(2.0).upper >= 1.0
    mu = profile.gdp_mu()
    assert mu.kind == "bound" and mu.lower == 0 and mu.upper >= 1.0


def test_readings():
    profile = ja.profile(ja.Gaussian(1.0))
    assert contains(profile.advantage(), 2 * norm.cdf(0.5) - 1)
    power = 1 - gaussian_tradeoff(1.0, np.array([0.01, 0.1]))
    assert contains(profile.true_positive_rate([0.01, 0.1]), power)
    assert contains(profile.posterior(0.3, [0.01, 0.1]), 0.3 * power / (0.3 * power + 0.7 * np.array([0.01, 0.1])))
    assert contains(profile.reconstruction([0.01, 0.1]), power)
    assert "prior = 1.5" in refusal(profile.posterior, 1.5, 0.1) and "baseline" in refusal(profile.reconstruction, -1)


def test_profile_is_a_frozen_pytree_and_refuses():
    profile = ja.profile(ja.Gaussian([1.0, 2.0]))
    leaves, structure = jax.tree_util.tree_flatten(profile)
    assert len(leaves) == 1 and jax.tree_util.tree_unflatten(structure, leaves) == profile
    with pytest.raises(AttributeError):
        profile.relation = "add_one"
    assert "relation = 'swap'" in refusal(ja.profile, ja.Gaussian(1.0), "swap")
    assert "not a mechanism" in refusal(ja.profile, 1.0)
    assert "fpr" in refusal(profile.tradeoff, 1.5)
    found = profile.tradeoff([[0.1], [0.2], [0.3]])
    assert found.shape == (3, 2)
    assert contains(found, gaussian_tradeoff(np.array([1.0, 0.5]), np.array([[0.1], [0.2], [0.3]])))


def test_profile_of_dp_sgd_is_that_of_the_engines():
    run = ja.dp_sgd(1.0, 0.01, 1000)
    profile = ja.profile(run, "remove_one")
    assert profile.delta(1.0).upper == ja.delta(run, 1.0, relation="remove_one").upper


@pytest.mark.slow
def test_tradeoff_of_dp_sgd():
    run = ja.dp_sgd(1.0, 0.01, 1000)
    found = ja.profile(run).tradeoff(0.05)
    eps = np.linspace(0.0, 1.0, 21)
    assert found.upper >= np.max(1 - ja.delta(run, eps).lower - np.exp(eps) * 0.05) - 1e-12
    assert found.upper - found.lower < 1e-3


def test_a_cut_tail_leaves_moments_open_above_and_vectors_are_taken_apart():
    p = ja.profile(ja.DiscreteGaussian(2.0))
    r, rho = p.renyi([0.5, 2.0]), p.zcdp()
    assert np.all(r.lower <= [0.0625 + 1e-12, 0.25 + 1e-12]) and list(r.upper) == [pytest.approx(0.0625), np.inf]
    assert rho.lower <= 0.125 + 1e-12 and rho.upper == np.inf and rho.status == r.status[1] == "width"
    batch = ja.FiniteOutput([[0.5, 0.5], [0.6, 0.4]], [[0.4, 0.6], [0.3, 0.7]])
    single = [ja.profile(ja.FiniteOutput(a, b)).tradeoff(0.1) for a, b in zip(batch.p, batch.q, strict=True)]
    np.testing.assert_array_equal(ja.profile(batch).tradeoff(0.1).upper, [b.upper for b in single])


# Bayes success


RISKS = [  # sigma, q, T, advantage, success at priors of .1 and .9: closed forms and another contour integral
    (0.5, 1, 1, 0.682689492, 0.929939314, 0.929939314),
    (0.5, 0.5, 1, 0.341344746, 0.910266131, None),
    (1, 0.01, 10000, 0.480072359, 0.906399351, 0.905502962),
    (3, 0.2, 1000, 0.714372907, 0.935712725, 0.93496454),
]


@pytest.mark.parametrize(("sigma", "q", "steps", "advantage", "rare", "usual"), RISKS)
def test_bayes_success_against_the_table(sigma, q, steps, advantage, rare, usual):
    p = ja.profile(ja.dp_sgd(sigma, q, steps))
    found = p.bayes_success([0.1, 0.5, 0.9])
    for place, truth in enumerate((rare, 0.5 + 0.5 * advantage, usual)):
        if truth is not None:
            assert found.lower[place] - 1e-9 <= truth <= found.upper[place] + 1e-9
    assert np.all(found.upper - found.lower < 1e-5) and np.all(found.ok) and np.all(found.kind == "certified")
    if steps == 1:
        for relation in ("remove_one", "add_one"):  # the same attack
            one = ja.profile(p.mechanism, relation).bayes_success([0.1, 0.5, 0.9])
            np.testing.assert_array_equal((one.lower, one.upper), (found.lower, found.upper))


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-300, 1.0, exclude_max=True), st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(0.01, 1.0))
def test_bayes_success_is_that_of_the_best_rule(prior, p, other, rate):
    """All four rules for one bit, where the record may or may not be sampled."""
    present = np.array([p, 1.0 - p])
    absent = np.array([other, 1.0 - other])
    found = ja.profile(ja.PoissonSampled(ja.FiniteOutput(present, absent), rate)).bayes_success(prior)
    mixed = [
        rate * mpmath.mpf(a) + (1 - mpmath.mpf(rate)) * mpmath.mpf(b) for a, b in zip(present, absent, strict=True)
    ]
    truth = sum(
        max(mpmath.mpf(prior) * a, (1 - mpmath.mpf(prior)) * mpmath.mpf(b)) for a, b in zip(mixed, absent, strict=True)
    )
    assert found.lower - 1e-14 <= truth <= found.upper + 1e-14 and found.upper - found.lower < 1e-9


def test_bayes_success_without_a_leak_and_at_the_ends():
    free = ja.profile(ja.dp_sgd(1.0, 0.0, 10)).bayes_success([1e-300, 0.3, 0.5])
    np.testing.assert_allclose(free.upper, [1.0, 0.7, 0.5], rtol=1e-14)
    assert "prior = 1.0" in refusal(ja.profile(ja.Gaussian(1.0)).bayes_success, 1.0)


def test_true_positive_rates_are_as_narrow_as_asked_for():
    """The old rates near .004 were half a per cent wide, since only the width of f, which is near 1, was checked."""
    p = ja.profile(ja.dp_sgd([1.0, 0.8, 2.0], [0.01, 0.01, 0.1], [1000, 2000, 500]))
    truth = [[0.0291390946, 0.0744412177, 0.127841778], [0.00406844788, 0.0145887568, 0.0293358559]]
    found = p.true_positive_rate([[0.01], [0.001]])
    assert np.all((found.lower < truth) & (truth < found.upper)) and np.all(found.ok)
    assert np.all(found.upper - found.lower <= 1e-4 * found.upper)


def test_orders_at_the_ends_of_float64():
    """In the old code rounding and overflow gave NaN, no upper end, or the bracket [0, 2e269] with status "ok"."""
    order = np.array([5e-324, 1e-300, 1e-12, 1.0 + 1e-12, 1e6, 1e300])
    for mechanism in (ja.Gaussian(2.0), ja.dp_sgd(2.0, 0.1, 5), ja.Laplace(1.0)):
        found, rho = renyi_divergence(mechanism, order), zero_concentrated(mechanism)
        assert np.all(found.lower <= found.estimate) and np.all(found.estimate <= found.upper)
        assert np.all(np.diff(found.upper) >= 0.0) and np.all(found.upper[:3] <= 1e-11)
        assert np.all(found.upper[4:] <= order[4:] * rho.upper * (1.0 + 1e-9) + 1.0)
        wide = found.upper - found.lower > 1e-3 * found.upper
        assert np.array_equal(found.status == "width", wide)
        assert found.upper[3] <= found.lower[3] * (1.0 + 1e-3)
    assert renyi_divergence(ja.Laplace(1.0), 1e300).upper == pytest.approx(1.0)
    beyond = renyi_divergence(ja.Gaussian(1e-5), [1e150, 1e300])
    assert beyond.upper.tolist() == pytest.approx([5e159, np.inf]) and np.all(beyond.lower >= 0.0)


def test_the_zcdp_of_a_guarantee_is_the_guarantee():
    """The old code took chords between grid points and gave .1001139 for ZCDP(0.1), with status "width"."""
    for mechanism, rho in (
        (ja.ZCDP(0.1), 0.1),
        (ja.repeat(ja.ZCDP(0.1, 0.05), 3), 0.45),
        (ja.compose(ja.ZCDP(0.1), ja.Gaussian(2.0)), 0.225),
    ):
        found = zero_concentrated(mechanism)
        assert rho <= found.upper <= rho * (1.0 + 1e-9)
        assert (found.kind, found.status, found.lower) == ("bound", "ok", 0.0) and found.estimate == found.upper


def test_distribution_of_losses_beyond_the_largest_exponent():
    """In the old code exp(loss) overflowed and gave NaN."""
    for mechanism in (ja.Gaussian(2.0), ja.ApproximateDP(1.0, 0.01)):
        under = ja.profile(mechanism).cdf([-1e308, -800.0, 800.0, 1e308])
        for found in under:
            assert (
                np.all(found.lower <= found.upper) and np.all(found.upper[2:] == 1.0) and np.all(found.lower[:2] == 0.0)
            )
        assert np.all(under.p.lower[2:] >= 0.99 - 1e-12) and np.all(under.p.upper[:2] <= 1e-12)


def test_a_posterior_is_ok_only_where_its_own_bracket_is_narrow():
    """Small true-positive rates are known to within 1e-7, which says nothing of their ratio to a smaller rate."""
    for fpr in (0.0, 5e-324):
        found = ja.profile(ja.Gaussian(2.0)).posterior(0.3, fpr)
        assert 0.3 <= found.lower <= found.upper == 1.0 and found.status == "width"
    assert ja.profile(ja.Gaussian(2.0)).posterior(0.3, 1e-3).status == "ok"


def test_the_estimate_of_a_reading_of_a_bound_is_the_bound():
    """The old estimate was the middle between the bound and the value of a guess that ignores the output."""
    found = ja.profile(ja.ZCDP(0.1))
    f, rate = found.tradeoff([0.01, 0.3]), found.true_positive_rate([0.01, 0.3])
    assert np.all(f.kind == "bound") and np.array_equal(f.estimate, f.lower)
    np.testing.assert_allclose(rate.estimate, rate.upper, rtol=1e-14)
    posterior = found.posterior(0.5, 0.01)
    assert posterior.estimate == pytest.approx(posterior.upper, rel=1e-14)


def test_a_reading_of_a_bound_is_ok_where_the_bound_is_close():
    """The old status was "width". No tolerance could help, since a bound has no known lower end."""
    found = ja.profile(ja.ZCDP(0.1))
    mu, regret = found.gaussian_readings(1e-10)
    read = (found.tradeoff(0.1), found.true_positive_rate(0.1), found.posterior(0.5, 0.1), mu, regret)
    assert {(str(one.kind), str(one.status)) for one in read} == {("bound", "ok")}
    nothing = ja.delta(ja.Gaussian(1.0 / mu.upper), 0.0)  # the true f may be 1 - a: no leak
    assert regret.upper == pytest.approx(0.5 * nothing.upper, rel=1e-9) and mu.lower == regret.lower == 0.0
    assert found.posterior(0.5, 1e-9).status == "width"  # rates are known to within 1e-7
    assert ja.profile(ja.PrivacyProfile([0.0, 1.0], [0.3, 0.0])).cdf(0.5).p.status == "ok"


def test_risks_of_random_allocation_under_replacement():
    """The old trade-off function was refused: it asked for a pair's mass at infinity, and replace_one gives no pair."""
    mechanism = ja.RandomAllocation(ja.Gaussian(4.0), 4)
    read = ja.profile(mechanism, "replace_one").true_positive_rate(0.01)
    delta = ja.delta(mechanism, [0.0, 0.5, 1.0], relation="replace_one").upper
    assert read.kind == "bound" and 0.01 < read.upper <= np.min(delta + 0.01 * np.exp([0.0, 0.5, 1.0])) + 1e-9


def test_the_tradeoff_of_a_bound_is_as_close_as_that_of_its_pair():
    """A profile through points of a PureDP has the PureDP's pair. Only the upper ends of its delta are known."""
    points = np.linspace(0.0, 0.7, 30)
    bound = ja.PrivacyProfile(points, ja.delta(ja.PureDP(0.7), points).upper)
    found, exact = (ja.profile(ja.repeat(each, 20)).tradeoff([1e-3, 0.01]) for each in (bound, ja.PureDP(0.7)))
    assert np.all(found.kind == "bound") and np.all(exact.kind == "certified")
    np.testing.assert_allclose(found.lower, exact.lower, rtol=1e-6)


def test_divergences_beyond_float64_are_infinite():
    """In the old code the lower end was NaN, which raised an error."""
    for mechanism in (ja.Gaussian(5e-324), ja.Laplace(5e-324)):
        for found in (renyi_divergence(mechanism, 2.0), zero_concentrated(mechanism)):
            assert found.lower >= 0.0 and found.upper == np.inf


def test_rates_with_a_closed_form_ask_no_lattice(monkeypatch):
    asked, curve = [], mechanism_profile._curve
    monkeypatch.setattr(mechanism_profile, "_curve", lambda one, at: asked.append(one.engine) or curve(one, at))
    run = ja.dp_sgd(noise_multiplier=0.38148, sampling_probability=0.0043072, steps=1)
    assert ja.profile(run, "add_one").true_positive_rate(0.173).ok and "lattice" not in asked
