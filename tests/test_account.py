"""epsilon and delta at their edges, and mechanisms against closed forms and brute force."""

import jax
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct import selection, strategies
from jaxacct.accounting import account


def hockey_stick(losses, masses, eps):
    """E_P[(1 - e^{eps - L})_+] of a finite law, in mpmath."""
    return sum(m * (1 - mpmath.exp(eps - x)) for x, m in zip(losses, masses, strict=True) if x > eps)


def contains(bounds, truth, rounding=1e-12):
    return bounds.lower <= truth * (1 + rounding) + 1e-300 and truth * (1 - rounding) <= bounds.upper + 1e-300


@pytest.mark.parametrize("p", [0.6, 0.75, 0.9])
@pytest.mark.parametrize("steps", [1, 7, 200])
@pytest.mark.parametrize("eps", [0.0, 0.3, 3.0])
def test_randomised_response_is_a_binomial(p, steps, eps):
    with mpmath.workdps(40):
        q, unit = mpmath.mpf(p), mpmath.log(mpmath.mpf(p) / (1 - mpmath.mpf(p)))
        masses = [mpmath.binomial(steps, k) * q**k * (1 - q) ** (steps - k) for k in range(steps + 1)]
        truth = float(hockey_stick([(2 * k - steps) * unit for k in range(steps + 1)], masses, mpmath.mpf(eps)))
    bounds = ja.delta(ja.repeat(ja.RandomizedResponse(p), steps), eps)
    if truth < 1e-250:
        assert bounds.lower <= truth + 1e-300
        return
    assert contains(bounds, truth, 1e-9)
    assert bounds.relative_width < 1e-4


@pytest.mark.parametrize("scale", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("eps", [0.0, 0.05, 0.3])
def test_laplace_closed_form(scale, eps):
    """One Laplace: delta = 1 - e^{(eps - 1/b)/2}."""
    bounds = ja.delta(ja.Laplace(scale), eps)
    truth = max(-np.expm1((eps - 1 / scale) / 2), 0.0)
    assert contains(bounds, truth, 1e-9) and bounds.upper <= truth * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize("rate", [1.0, 1 - 1e-12, 0.3])
@pytest.mark.parametrize("inverse_scale", [0.1, 20.0, 35.0, 38.0, 1000.0])
def test_largest_loss_of_little_laplace_noise(inverse_scale, rate):
    """epsilon(0) is log(1 - q + q e^{1/b}) for remove and -log(1 - q + q e^{-1/b}) for add."""
    step = ja.PoissonSampled(ja.Laplace(1 / inverse_scale), rate)
    with mpmath.workdps(60):
        loss, q = 1 / mpmath.mpf(step.mechanism.scale), mpmath.mpf(rate)
        exact = {
            "remove_one": mpmath.log(1 - q + q * mpmath.exp(loss)),
            "add_one": -mpmath.log(1 - q + q * mpmath.exp(-loss)),
        }
        for relation, truth in exact.items():
            assert ja.epsilon(step, 0.0, relation=relation).upper == pytest.approx(float(truth), rel=1e-14)


def test_laplace_composition_against_brute_force():
    """Three Laplace losses convolved on a fine independent grid, from both sides."""
    scale, eps, count = 1.5, 0.8, 40_001
    edges = np.linspace(-1 / scale, 1 / scale, count)
    inner = 0.5 * np.exp(-0.5 / scale) * (np.exp(edges[1:] / 2) - np.exp(edges[:-1] / 2))
    for ends in ("low", "high"):
        mass = np.zeros(count)
        mass[:-1] += inner * (ends == "low")
        mass[1:] += inner * (ends == "high")
        mass[-1] += 0.5
        mass[0] += 0.5 * np.exp(-1 / scale)
        length = 3 * count
        total = np.fft.irfft(np.fft.rfft(mass, length) ** 3, length)
        losses = 3 * edges[0] + np.arange(length) * (edges[1] - edges[0])
        bound = np.sum(total * np.maximum(1 - np.exp(eps - losses), 0))
        ours = ja.delta(ja.repeat(ja.Laplace(scale), 3), eps)
        assert ours.upper >= bound * (1 - 1e-9) if ends == "low" else ours.lower <= bound * (1 + 1e-9)
    assert ours.relative_width < 1e-4


@pytest.mark.parametrize(("eps0", "delta0", "steps"), [(0.1, 1e-6, 30), (1.0, 1e-3, 4), (0.5, 0.0, 10)])
def test_kairouz_oh_viswanath(eps0, delta0, steps):
    """Exact composition of (eps0, delta0)-DP: delta = 1 - (1-d)^k (1 - binomial part)."""
    base = ja.ApproximateDP(eps0, delta0) if delta0 else ja.PureDP(eps0)
    with mpmath.workdps(40):
        e, p = mpmath.mpf(eps0), 1 / (1 + mpmath.exp(-mpmath.mpf(eps0)))
        masses = [mpmath.binomial(steps, k) * p**k * (1 - p) ** (steps - k) for k in range(steps + 1)]
        losses = [(2 * k - steps) * e for k in range(steps + 1)]
        keep = (1 - mpmath.mpf(delta0)) ** steps
        for eps in (0.0, eps0, 0.5 * steps * eps0):
            truth = float(1 - keep + keep * hockey_stick(losses, masses, mpmath.mpf(eps)))
            assert contains(ja.delta(ja.repeat(base, steps), eps), truth, 1e-9)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("q", [1e-5, 0.03, 0.7])
@pytest.mark.parametrize("eps", [0.0, 0.02, 1.0])
def test_one_sampled_step_in_closed_form(sigma, q, eps):
    """Remove: H_alpha((1-q)Q + qP || Q) = q H_{1 + (alpha-1)/q}(P || Q); add: the complement at 1/alpha."""

    def gauss(alpha):
        s = mpmath.mpf(sigma)
        if alpha <= 0:
            return 1 - alpha
        return mpmath.ncdf(1 / (2 * s) - mpmath.log(alpha) * s) - alpha * mpmath.ncdf(
            -1 / (2 * s) - mpmath.log(alpha) * s
        )

    with mpmath.workdps(400):
        alpha, rate = mpmath.exp(mpmath.mpf(eps)), mpmath.mpf(q)

        def remove(a):
            return rate * gauss(1 + (a - 1) / rate)

        truth = {"remove_one": remove(alpha), "add_one": 1 - alpha + alpha * remove(1 / alpha)}
    for relation, value in truth.items():
        value = max(value, 0)
        bounds = ja.delta(ja.PoissonSampled(ja.Gaussian(sigma), q), eps, relation=relation)
        assert contains(bounds, float(value), 1e-9) or bounds.lower <= float(value) <= bounds.upper + 1e-15
        narrow = bounds.relative_width < 1e-6 or bounds.upper <= 1e-300  # the end of float64's range
        assert bounds.engine == "closed_form" and narrow
        if 1e-250 < value < 0.5 and eps > 0.0:
            back = ja.epsilon(ja.PoissonSampled(ja.Gaussian(sigma), q), float(value), relation=relation)
            assert back.lower <= eps * (1 + 1e-9) + 1e-14 and back.upper >= eps * (1 - 1e-9) - 1e-14


def test_edges():
    run = ja.dp_sgd(1.0, 0.01, 10)
    assert ja.epsilon(run, 0.5).status == "zero" and ja.epsilon(run, 0.5).upper == 0
    assert ja.epsilon(ja.dp_sgd(1.0, 0.0, 10), 1e-5).upper == 0
    infinite = ja.epsilon(ja.ApproximateDP(0.1, 1e-3), 1e-5)
    assert infinite.status == "mass_at_infinity" and np.isinf(infinite.upper) and infinite.ok
    assert ja.epsilon(ja.PureDP(0.7), 0).upper == pytest.approx(0.7)
    assert ja.epsilon(ja.repeat(ja.Laplace(2.0), 3), 0).upper == pytest.approx(1.5)
    with pytest.raises(ja.InputError, match="delta = 0"):
        ja.epsilon(ja.Gaussian(1.0), 0)
    with pytest.raises(ja.InputError, match=r"delta\[1\] = 2.0"):
        ja.epsilon(run, [1e-5, 2.0])
    with pytest.raises(ja.InputError, match="broadcast|shape"):
        ja.epsilon(ja.dp_sgd([1.0, 2.0, 3.0], 0.01, 10), [1e-5, 1e-6])
    with pytest.raises(ja.InputError, match="engine"):
        ja.epsilon(run, 1e-5, engine="magic")
    with pytest.raises(ja.InputError, match="contour"):
        ja.epsilon(ja.Laplace(1.0), 1e-5, engine="contour")
    with pytest.raises(ja.InputError, match="tracer"):
        jax.jit(lambda s: ja.epsilon(ja.Gaussian(s), 1e-5).upper)(1.0)


@pytest.mark.slow
def test_heterogeneous_composition_brackets_intersect():
    run = ja.compose(ja.dp_sgd([0.8, 1.2], 0.01, 500), ja.Laplace(10.0), ja.ApproximateDP(0.1, 1e-7))
    contour = ja.epsilon(run, 1e-5, engine="contour")
    lattice = ja.epsilon(run, 1e-5, engine="lattice")
    assert np.all(contour.lower <= lattice.upper) and np.all(lattice.lower <= contour.upper)
    assert np.all(contour.relative_width < 1e-6) and np.all(lattice.relative_width < 1e-3)
    assert np.all(contour.upper > ja.epsilon(ja.dp_sgd([0.8, 1.2], 0.01, 500), 1e-5).upper)


@settings(deadline=None, max_examples=10)
@given(st.floats(-0.1, 1.0), st.floats(-3, -0.5), st.integers(300, 10**5), st.floats(-12, -3))
def test_monotone_in_everything(log_sigma, log_q, steps, log_delta):
    check_monotone(10.0**log_sigma, 10.0**log_q, steps, 10.0**log_delta)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.floats(-0.7, 3.0), st.floats(-6, 0.0), st.integers(1, 10**7), st.floats(-30, -2))
def test_monotone_in_everything_to_the_ends(log_sigma, log_q, steps, log_delta):
    check_monotone(10.0**log_sigma, 10.0**log_q, steps, 10.0**log_delta)


def check_monotone(sigma, q, steps, delta):
    sigmas, rates = [sigma, 1.1 * sigma, sigma, sigma, sigma], [q, q, 0.9 * q, q, q]
    counts, deltas = (
        [steps, steps, steps, max(steps - 1, 1), steps],
        [delta, delta, delta, delta, 1.5 * delta],
    )
    b = ja.epsilon(ja.dp_sgd(sigmas, rates, counts), deltas, engine="contour")
    assert np.all(b.lower[1:] <= b.upper[0])


def random_configurations(seed, count):
    """sigma in [.2, 1000], q in [1e-6, 1], T in [1, 1e7], delta in [1e-30, 1e-2], all log-uniform."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: 10.0 ** rng.uniform(low, high, count)
    sigma, q = draw(np.log10(0.2), 3), draw(-6, 0)
    return ja.dp_sgd(sigma, q, np.round(draw(0, 7))), draw(-30, -2)


def engines_agree(seed, count, memory_bytes=2**30, rtol=1e-4):
    run, delta = random_configurations(seed, count)
    contour = ja.epsilon(run, delta, engine="contour")
    lattice = ja.epsilon(run, delta, engine="lattice", memory_bytes=memory_bytes, rtol=rtol)
    both = ja.epsilon(run, delta)
    assert not np.any(np.isnan([b.upper for b in (contour, lattice, both)]))
    assert np.all(contour.lower <= lattice.upper) and np.all(lattice.lower <= contour.upper)
    assert np.all((both.lower >= contour.lower * (1 - 1e-9)) | (both.engine != "contour"))
    return contour, lattice, both


def test_engines_agree_on_random_configurations():
    _, _, both = engines_agree(seed=4, count=2, memory_bytes=2**25, rtol=1e-2)
    assert np.median(both.relative_width) <= 2e-6


@pytest.mark.slow
def test_engines_agree_on_a_thousand_random_configurations():
    _, _, both = engines_agree(seed=0, count=1000, memory_bytes=2**26)  # longer lattices would take hours
    assert np.median(both.relative_width) <= 1e-6
    assert np.max(both.relative_width) <= 1e-2


def test_a_bracket_open_above_is_never_ok():
    bounds = ja.epsilon(ja.compose(ja.Gaussian(5.0), ja.ApproximateDP(0.1, 1e-5)), 1e-5 * (1 + 1e-13))
    assert np.isfinite(bounds.upper) or bounds.status == "width"
    assert ja.epsilon(ja.Gaussian(1e-160), 1e-5).status == "width"


@pytest.mark.parametrize("noise", [1e105, 1e159])
def test_a_user_who_lets_numpy_raise_is_answered(noise):
    with np.errstate(all="raise"):
        run = ja.dp_sgd(noise, 1e-177, 10**8)
        assert ja.delta(run, 5.0).upper < 1e-100
        assert ja.epsilon(run, 1e-5).lower == 0.0
        assert ja.epsilon(ja.repeat(ja.Gaussian(1e160), 10**8), 1e-290).upper < 1e-100


def test_blocks_of_a_large_batch_change_nothing(monkeypatch):
    """A batch answered in blocks of eight rows is the batch answered at once; a bad row is named by its batch index."""
    run, deltas = ja.dp_sgd(np.array([0.8, 1.0, 2.0])[:, None], 0.01, 1000), np.geomspace(1e-9, 1e-2, 5)
    whole = ja.epsilon(run, deltas)
    solved = lambda: ja.calibrate_noise_multiplier(np.geomspace(0.5, 8, 10), 1e-5, 1.0, 1000).value
    noise = solved()
    monkeypatch.setattr("jaxacct.accounting.account.BLOCK", 8)
    cut = ja.epsilon(run, deltas)
    for end in ("lower", "estimate", "upper", "status", "engine"):
        np.testing.assert_array_equal(getattr(whole, end), getattr(cut, end))
    np.testing.assert_array_equal(noise, solved())
    assert ja.epsilon(ja.dp_sgd(1.0, 0.01, np.ones(0)), 1e-5).upper.shape == (0,)
    with pytest.raises(ja.InputError, match=r"delta\[2, 1\] = 0"):
        ja.epsilon(run, np.where(np.arange(15).reshape(3, 5) == 11, 0.0, 1e-5))


def test_directions_that_agree_are_solved_once(monkeypatch):
    """Under replace_one the law of the loss is the same to the last bit in both directions."""
    solved = []
    whole = account.ask_engines
    monkeypatch.setattr(account, "ask_engines", lambda *given: solved.append(1) or whole(*given))
    ja.epsilon(ja.dp_sgd(2.0, 0.1, 1), 1e-6, relation="replace_one", rtol=1e-2)
    assert len(solved) == 1
    ja.epsilon(ja.dp_sgd(2.0, 0.1, 1), 1e-6, rtol=1e-2)
    assert len(solved) == 3


@pytest.mark.parametrize(
    "mechanism",
    [
        selection.select(ja.Gaussian(4.0), selection.PointMass(2)),
        ja.BallsInBins(ja.Gaussian(4.0), 5, 1),
        ja.MatrixMechanism(strategies.Banded(2, steps=4), 3.0, strategies.BallsInBins(2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_one_repetition_is_the_mechanism_itself(mechanism):
    """For one repetition the old code gave a selection the bound of compositions, and balls in bins a wider bracket."""
    for ask, at in ((ja.epsilon, 1e-4), (ja.delta, 0.5)):
        alone, once = ask(mechanism, at), ask(ja.repeat(ja.compose(mechanism), 1), at)
        assert (once.kind, once.engine) == (alone.kind, alone.engine)
        assert (once.lower, once.upper) == pytest.approx((alone.lower, alone.upper), rel=1e-9)
    rows = ja.epsilon(ja.repeat(mechanism, [1, 1]), [1e-4, 1e-3])
    assert rows.upper[0] == pytest.approx(ja.epsilon(mechanism, 1e-4).upper, rel=1e-6) and np.all(
        rows.kind == "certified"
    )


def test_a_delta_below_the_mass_at_infinity_of_several_releases_says_so():
    """Epsilon is infinite at the first delta. The old code gave a finite lower end, with the status "width"."""
    inside = ja.compose(ja.Gaussian(2.0), ja.ApproximateDP(0.1, 1e-4))
    fixed = (ja.SampledWithoutReplacement(inside, 0.1), "replace_one")
    for step, relation in ((ja.PoissonSampled(inside, 0.1), "add_or_remove_one"), fixed):
        found = ja.epsilon(step, [9.99e-6, 1.1e-5], relation=relation)
        assert found.status[0] == "mass_at_infinity" and found.lower[0] == np.inf and found.upper[1] < np.inf


def test_a_profile_at_its_last_delta_has_its_last_epsilon():
    """The old code rounded the mass at infinity up to more than the last delta, where epsilon was then infinite."""
    known = ja.PrivacyProfile([0.0, 0.5, 1.0], [0.3, 0.1, 1e-3], [0.3, 0.1, 2e-3])
    found = ja.epsilon(known, [9e-4, 1e-3, 2e-3], relation="remove_one")
    assert found.upper[0] == np.inf and 1.0 <= found.upper[1] <= 1.0 + 1e-13 and found.upper[2] < 1.0
    assert found.status.tolist() == ["mass_at_infinity", "ok", "ok"]
    assert ja.epsilon(known, 1e-3).upper == np.inf and ja.epsilon(known, 2e-3).upper <= 1.0 + 1e-13


def test_a_contour_that_certifies_no_small_error_is_asked_for_a_larger_one():
    found = ja.epsilon(ja.dp_sgd(0.48690357, 1e-9, 10), 1e-20, engine="contour")
    assert found.status == "ok" and found.upper - found.lower <= 1e-4 * found.upper
