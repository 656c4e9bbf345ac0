"""Several releases from one sample, against enumeration and quadrature of the laws themselves."""

import itertools
import math

import numpy as np
import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct import interop
from jaxacct.mechanisms import components, sampled_releases

P1, Q1, P2, Q2 = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), np.array([0.7, 0.3]), np.array([0.6, 0.4])
ONE, TWO = ja.FiniteOutput(P1, Q1), ja.FiniteOutput(P2, Q2)
BOTH = ja.compose(ONE, TWO)
EPS = np.array([0.0, 0.02, 0.1, 0.3])


@pytest.fixture
def few_points(monkeypatch):
    """Profiles are bracketed at a tenth of the losses: a looser pair at a fraction of the cost."""
    monkeypatch.setattr(sampled_releases, "POINTS", 48)
    cached = [each for each in vars(sampled_releases).values() if hasattr(each, "cache_clear")]
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def product(*laws):
    return np.array([np.prod(choice) for choice in itertools.product(*laws)])


def hockey(p, q, eps):
    return np.array([np.maximum(p - np.exp(e) * q, 0.0).sum() for e in np.ravel(eps)]).reshape(np.shape(eps))


def sampled(p, q, rate):
    """(P, Q) of remove."""
    return (1.0 - rate) * q + rate * p, q


def holds(found, truth, width):
    np.testing.assert_array_less(found.lower, truth + 1e-14)
    np.testing.assert_array_less(truth - 1e-14, found.upper)
    assert np.all(found.upper - found.lower <= width * found.upper + 1e-12), found


def epsilon_by_search(p, q, delta):
    low, high = 0.0, 50.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if hockey(p, q, middle) > delta else (low, middle)
    return high


def test_the_case_that_was_refused():
    both = ja.PoissonSampled(ja.repeat(ja.Laplace(1.0), 2), 0.1)
    found = ja.epsilon(both, 1e-6)
    assert found.ok and found.kind == "certified" and found.upper == pytest.approx(0.4940107, rel=1e-6)
    assert ja.delta(both, 0.3).upper == pytest.approx(0.01229330, rel=1e-6)
    apart = ja.repeat(ja.PoissonSampled(ja.Laplace(1.0), 0.1), 2)
    assert ja.epsilon(apart, 1e-6).upper < 0.32  # a sample for each release leaks less


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.95])
def test_finite_outputs_by_enumeration(rate):
    p, q = sampled(product(P1, P2), product(Q1, Q2), rate)
    run = ja.PoissonSampled(BOTH, rate)
    holds(ja.delta(run, EPS, relation="remove_one"), hockey(p, q, EPS), 1e-4)
    holds(ja.delta(run, EPS, relation="add_one"), hockey(q, p, EPS), 1e-4)
    for relation, (one, two) in {"add_one": (q, p), "zero_out": (p, q)}.items():
        delta = 0.05 * rate
        truth = epsilon_by_search(one, two, delta)
        if relation == "zero_out":
            truth = max(truth, epsilon_by_search(two, one, delta))
        found = ja.epsilon(run, delta, relation=relation, rtol=1e-2)
        assert found.lower - 1e-9 <= truth <= found.upper + 1e-9 and found.upper - found.lower <= 1e-2 * found.upper


@pytest.mark.slow
def test_repeated_samples_by_enumeration():
    rate = 0.3
    p, q = sampled(product(P1, P2), product(Q1, Q2), rate)
    other = sampled(P1, Q1, 0.5)
    laws = product(p, p, other[0]), product(q, q, other[1])
    run = ja.compose(ja.repeat(ja.PoissonSampled(BOTH, rate), 2), ja.PoissonSampled(ONE, 0.5))
    for relation, (one, two) in {"remove_one": laws, "add_one": laws[::-1]}.items():
        found = ja.delta(run, 0.1, relation=relation)
        holds(found, hockey(one, two, 0.1), 2e-2)
        assert found.kind == "certified"


def test_a_sample_inside_a_sample():
    inner = sampled(P1, Q1, 0.5)
    laws = sampled(product(inner[0], inner[0]), product(inner[1], inner[1]), 0.2)
    run = ja.PoissonSampled(ja.repeat(ja.PoissonSampled(ONE, 0.5), 2), 0.2)
    holds(ja.delta(run, EPS, relation="remove_one"), hockey(*laws, EPS), 1e-4)
    holds(ja.delta(run, EPS, relation="add_one"), hockey(*laws[::-1], EPS), 1e-4)
    twice = ja.PoissonSampled(ja.PoissonSampled(BOTH, 0.5), 0.4)
    one, two = (ja.delta(each, 0.1, relation="remove_one") for each in (twice, ja.PoissonSampled(BOTH, 0.2)))
    assert one.upper == pytest.approx(float(two.upper), 1e-12)


def test_gaussians_are_one_gaussian():
    run = ja.PoissonSampled(ja.compose(ja.Gaussian(2.0), ja.repeat(ja.Gaussian(2.0), 3)), 0.01)
    same = ja.PoissonSampled(ja.Gaussian(1.0), 0.01)
    for relation in ("add_or_remove_one", "add_one", "remove_one", "replace_one"):
        parts = [components(m, relation, "remove") for m in (run, same)]
        assert all(np.array_equal(a, b) for a, b in zip(*parts, strict=True))
    assert components(ja.PoissonSampled(ja.repeat(ja.Gaussian(2.0), 4), 1.0), "replace_one", "remove").mu2 == 4.0
    grouped = ja.PoissonSampled(ja.repeat(ja.Gaussian(2.0), 4), 0.01, group=3)
    ours, known = ja.epsilon(grouped, 1e-5), ja.epsilon(ja.PoissonSampled(ja.Gaussian(1.0), 0.01, group=3), 1e-5)
    assert ours.upper == known.upper and ours.kind == "certified"
    fixed = ja.SampledWithoutReplacement(ja.repeat(ja.Gaussian(4.0), 4), 0.1)
    for relation in ("add_or_remove_one", "zero_out"):
        known = ja.epsilon(ja.SampledWithoutReplacement(ja.Gaussian(2.0), 0.1), 1e-5, relation=relation)
        assert ja.epsilon(fixed, 1e-5, relation=relation).upper == known.upper


def test_gaussians_whose_root_is_no_float():
    from fractions import Fraction

    from jaxacct.mechanisms.sampled_releases import one_gaussian

    rng = np.random.default_rng(3)
    for noises in (rng.uniform(0.3, 9.0, 5), np.array([1e-150, 3.0]), np.array([1e200, 3e200, 7e199])):
        down, up = one_gaussian(ja.compose(*(ja.repeat(ja.Gaussian(z), 7) for z in noises)))
        total = sum(7 / Fraction(z) ** 2 for z in noises)
        low, high = (Fraction(float(g.noise_multiplier)) for g in (down, up))
        assert low**2 * total <= 1 <= high**2 * total and high <= low * (1 + Fraction(1, 2**51))
    run = ja.repeat(ja.PoissonSampled(ja.repeat(ja.Gaussian(2.0), 3), 0.01), 1000)
    found, known = ja.epsilon(run, 1e-5), ja.epsilon(ja.dp_sgd(2.0 / np.sqrt(3.0), 0.01, 1000), 1e-5)
    assert found.ok and found.kind == "certified" and found.upper == pytest.approx(float(known.upper), rel=1e-7)


def test_gaussian_and_laplace_by_quadrature():
    sigma, scale, rate = 2.0, 3.0, 0.2
    x, y = np.linspace(-16.0, 17.0, 661), np.linspace(-60.0, 61.0, 2421)
    normal = lambda m: np.exp(-0.5 * ((x - m) / sigma) ** 2) / (sigma * np.sqrt(2.0 * np.pi))
    laplace = lambda m: np.exp(-np.abs(y - m) / scale) / (2.0 * scale)
    cell = (x[1] - x[0]) * (y[1] - y[0])
    p, q = (np.outer(normal(m), laplace(m)) * cell for m in (1.0, 0.0))
    run = ja.PoissonSampled(ja.compose(ja.Gaussian(sigma), ja.Laplace(scale)), rate)
    for relation, (one, two) in {"remove_one": sampled(p, q, rate), "add_one": sampled(p, q, rate)[::-1]}.items():
        found = ja.delta(run, 0.1, relation=relation, rtol=1e-4)
        assert found.upper == pytest.approx(float(hockey(one, two, 0.1)), rel=3e-4)


@pytest.mark.slow
def test_batches_and_delta_zero():
    rates, scales = np.array([[0.0], [0.1], [1.0]]), np.array([1.0, 4.0])
    run = ja.PoissonSampled(ja.repeat(ja.Laplace(scales), 3), rates)
    found, zero = ja.epsilon(run, 1e-3), ja.epsilon(run, 0.0)
    assert found.upper.shape == (3, 2) and found.ok.all()
    exact = np.log1p(rates * np.expm1(3.0 / scales))
    np.testing.assert_allclose(zero.upper, exact, rtol=1e-9)
    for index in np.ndindex(3, 2):
        alone = ja.PoissonSampled(ja.repeat(ja.Laplace(scales[index[1]]), 3), rates[index[0], 0])
        assert ja.epsilon(alone, 1e-3).upper == pytest.approx(found.upper[index], rel=2e-4)
    unbounded = ja.PoissonSampled(ja.compose(ja.Gaussian(1.0), ja.Laplace(1.0)), 0.1)
    assert "unbounded loss" in refusal(ja.epsilon, unbounded, 0.0)
    assert ja.epsilon(ja.repeat(unbounded, 3), [1e-5, 1e-3]).ok.all()


@pytest.mark.parametrize(
    ("sampling", "relation"), [(ja.PoissonSampled, "add_one"), (ja.SampledWithoutReplacement, "replace_one")]
)
def test_an_infinite_epsilon_beside_a_finite_one(sampling, relation):
    run = sampling(ja.compose(ja.ApproximateDP(0.5, 0.2), ja.RandomizedResponse(0.7)), [1.0, 0.5])
    with np.errstate(all="raise", under="ignore"):
        found = ja.epsilon(run, 1e-3, relation=relation, rtol=1e-2)
    assert found.status[0] == "mass_at_infinity" and np.isinf(found.lower[0])
    if relation == "add_one":
        assert found.status[1] == "ok" and found.upper[1] <= np.log(2.0) * (1.0 + 1e-9)


def test_a_mass_at_infinity_is_sampled(few_points):
    run = ja.PoissonSampled(ja.compose(ja.ApproximateDP(0.5, 1e-3), ja.RandomizedResponse(0.7)), 0.1)
    assert ja.epsilon(run, 1e-5, relation="remove_one").status == "mass_at_infinity"
    assert np.isfinite(ja.epsilon(run, 2e-4, rtol=0.1).upper)
    assert np.isinf(ja.epsilon(ja.repeat(run, 3), 1e-5, relation="remove_one").upper)
    assert ja.delta(ja.repeat(run, 3), 50.0).upper == pytest.approx(1.0 - (1.0 - 1e-4) ** 3, rel=1e-6)


def three_laws(scale, count, step=0.02, width=40.0):
    """Laplace noise about 0, 1 and -1, `count` times."""
    x = np.arange(-width * scale, width * scale, step * scale)
    laws = (np.exp(-np.abs(x - m) / scale) / (2.0 * scale) * step * scale for m in (0.0, 1.0, -1.0))
    return [law if count == 1 else np.outer(law, law).ravel() for law in laws]


@pytest.mark.parametrize(
    ("scale", "rate", "count"),
    [(2.0, 0.2, 2), *(pytest.param(*row, 1, marks=pytest.mark.slow) for row in ((1.0, 0.1), (0.3, 0.01), (5.0, 0.5)))],
)
def test_a_replaced_record_of_a_poisson_sample(scale, rate, count, request):
    if count == 2:
        request.getfixturevalue("few_points")
    none, one, other = three_laws(scale, count, 0.02 if count == 2 else 1e-4, 15.0 if count == 2 else 40.0)
    p, q = ((1.0 - rate) * none + rate * law for law in (one, other))
    base = ja.Laplace(scale) if count == 1 else ja.repeat(ja.Laplace(scale), count)
    eps = EPS[1]
    found = ja.delta(ja.PoissonSampled(base, rate), eps, relation="replace_one", rtol=1e-3)
    truth = hockey(p, q, eps)
    assert set(np.ravel(found.kind)) == {"bound"}
    assert np.all(found.upper >= truth * (1.0 - 2e-3) - 1e-12), (found.upper, truth)
    assert np.all(found.upper <= truth * (1.03 if count == 2 else 1.003) + 2e-5), (found.upper, truth)


def test_a_replaced_record_of_finite_laws():
    """Under replacement, three laws whose log-ratios are at most 0.8 leak no more than the bound of PureDP(0.8)."""
    rate, eps = 0.25, np.array([0.0, 0.05, 0.2, 0.4])
    rng = np.random.default_rng(5)
    base = ja.PureDP(0.8)
    top = ja.delta(ja.PoissonSampled(base, rate), eps, relation="replace_one").upper
    for _ in range(300):
        laws = []
        middle = rng.dirichlet(np.ones(4))
        for _ in range(3):
            law = middle * np.exp(rng.uniform(-0.4, 0.4, 4))
            laws.append(law / law.sum())
        ratios = [np.abs(np.log(a / b)).max() for a, b in itertools.combinations(laws, 2)]
        if max(ratios) > 0.8:
            continue
        p, q = ((1.0 - rate) * laws[0] + rate * law for law in laws[1:])
        assert np.all(hockey(p, q, eps) <= top + 1e-12)


@pytest.mark.slow
def test_every_door_answers_replace_one():
    step = ja.PoissonSampled(ja.Gaussian(2.0), 0.01)
    capped = ja.TruncatedPoissonSampled(ja.Gaussian(2.0), 0.01, dataset_size=1, cap=1)
    one, two = (ja.epsilon(ja.repeat(m, 10), 1e-5, relation="replace_one") for m in (step, capped))
    assert one.upper == two.upper and one.kind == "bound"
    assert ja.profile(step, "replace_one").delta(0.1).upper < 0.01
    rates = ja.epsilon(ja.PoissonSampled(ja.Laplace(2.0), [0.0, 0.3, 1.0]), 1e-5, relation="replace_one").upper
    assert rates[0] == 0.0 and rates[0] < rates[1] < rates[2]
    assert rates[2] == pytest.approx(float(ja.epsilon(ja.Laplace(1.0), 1e-5).upper), rel=1e-4)


def test_without_replacement_by_enumeration(few_points):
    base = ja.compose(ja.RandomizedResponse(0.7), ja.RandomizedResponse(0.6, categories=3))
    laws = ([0.7, 0.3], [0.6, 0.2, 0.2]), ([0.3, 0.7], [0.2, 0.6, 0.2])
    ratio = 0.2
    p, q = sampled(product(*laws[0]), product(*laws[1]), ratio)
    run = ja.SampledWithoutReplacement(base, ratio)
    holds(ja.delta(run, EPS, relation="remove_one"), hockey(p, q, EPS), 1e-4)
    holds(ja.delta(run, EPS, relation="add_one"), hockey(q, p, EPS), 1e-4)
    holds(ja.delta(run, EPS, relation="replace_one"), hockey(p, q, EPS), 1e-4)
    truth = hockey(product(p, p, p), product(q, q, q), 0.1)
    holds(ja.delta(ja.repeat(run, 3), 0.1, relation="remove_one"), truth, 2e-2)
    swapped = ja.delta(ja.repeat(run, 3), 0.1, relation="replace_one")
    assert swapped.kind == "bound" and swapped.upper >= truth


def test_without_replacement_of_two_orders():
    """The base's two laws are not alike. Delta is the larger of the deltas for both orders of the laws."""
    p, q, ratio = product([0.9, 0.1], [0.9, 0.1]), product([0.6, 0.4], [0.6, 0.4]), 0.3
    base = ja.FiniteOutput(np.ravel(p), np.ravel(q))
    one, two = sampled(p, q, ratio), sampled(q, p, ratio)
    run = ja.SampledWithoutReplacement(base, ratio)
    for relation, truth in {
        "remove_one": np.maximum(hockey(*one, EPS), hockey(*two, EPS)),
        "add_one": np.maximum(hockey(*one[::-1], EPS), hockey(*two[::-1], EPS)),
        "replace_one": np.maximum(hockey(*one, EPS), hockey(*two, EPS)),
    }.items():
        holds(ja.delta(run, EPS, relation=relation), truth, 1e-4)
        repeated = ja.SampledWithoutReplacement(ja.repeat(ja.FiniteOutput([0.9, 0.1], [0.6, 0.4]), 2), ratio)
        assert np.all(ja.delta(repeated, EPS, relation=relation).upper >= truth)


def test_zero_out_without_replacement_is_bounded():
    base = ja.compose(ja.Gaussian(2.0), ja.Laplace(5.0))
    for mechanism in (ja.Laplace(2.0), base):
        step = ja.SampledWithoutReplacement(mechanism, 0.1)
        zeroed, replaced = (ja.epsilon(step, 1e-5, relation=name) for name in ("zero_out", "replace_one"))
        assert zeroed.kind == "bound" and zeroed.upper >= replaced.upper * (1.0 - 1e-4)


def test_what_cannot_be_sampled():
    fixed = ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.1)
    message = refusal(ja.PoissonSampled, ja.compose(ja.Gaussian(1.0), fixed), 0.1)
    assert "SampledWithoutReplacement" in message and "draw all batches by PoissonSampled" in message
    capped = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.1, 100, 20)
    assert "draw all batches by PoissonSampled" in refusal(ja.PoissonSampled, capped, 0.1)
    grouped = ja.repeat(ja.PoissonSampled(ja.Gaussian(1.0), 0.1, group=2), 2)
    for owner in (ja.PoissonSampled, ja.SampledWithoutReplacement):
        assert "group belongs to the outermost sampling" in refusal(owner, grouped, 0.1)
    assert "group = 2" in refusal(ja.PoissonSampled, BOTH, 0.1, group=2)
    assert ja.epsilon(ja.SampledWithoutReplacement(ja.repeat(fixed, 2), 0.5), 1e-5, relation="replace_one").upper > 0


@pytest.mark.slow
def test_sampling_leaks_no_more_and_one_sample_no_less_than_two():
    for base in (ja.compose(ja.Gaussian(2.0), ja.RandomizedResponse(0.6)), ja.repeat(ja.PureDP(0.3), 2)):
        for relation in ("remove_one", "add_one", "replace_one"):
            plain = ja.delta(base, EPS, relation=relation).upper
            for rate in (0.02, 0.5):
                once = ja.delta(ja.PoissonSampled(base, rate), EPS, relation=relation).upper
                assert np.all(once <= plain * (1.0 + 1e-4))


@pytest.mark.slow
def test_forms():
    for run in (
        ja.PoissonSampled(BOTH, 0.1),
        ja.repeat(ja.SampledWithoutReplacement(ja.compose(ja.Gaussian(2.0), ja.Laplace(5.0)), 0.25), 7),
    ):
        assert eval(run.expression(), {"ja": ja}) == run
        assert interop.from_json(interop.to_json(run)) == run
        assert ja.verify(run, ja.delta(run, 0.1), epsilon=0.1).status in ("verified", "undecided")
    g = ja.epsilon_gradient(ja.PoissonSampled(ja.repeat(ja.Gaussian(2.0), 4), 0.1), 1e-5)
    same = ja.epsilon_gradient(ja.PoissonSampled(ja.Gaussian(1.0), 0.1), 1e-5)
    assert float(g.sampling_probability) == pytest.approx(float(same.sampling_probability), rel=1e-4)


@pytest.mark.slow
def test_calibration():
    found = ja.calibrate(
        lambda z: ja.PoissonSampled(ja.compose(ja.Gaussian(z), ja.Laplace(10.0)), 0.1),
        target_epsilon=0.3,
        target_delta=1e-6,
        bracket=(0.5, 20.0),
        rtol=1e-3,
    )
    assert found.ok and found.epsilon.upper <= 0.3


def test_a_bound_on_the_add_direction_is_searched_to_its_end():
    """The old search stopped after one pass, 3 % above the least epsilon, since the lower end of a bound stays 0."""
    releases = ja.compose(ja.ReportNoisyMax(0.019), ja.FiniteOutput([0.002, 0.998], [0.1, 0.9]))
    found = ja.epsilon(ja.PoissonSampled(releases, 0.48), 4e-6, relation="add_one")
    largest = math.log(50.0) + 0.019  # of the releases
    least = -math.log(1.0 - 0.48 + 0.48 * math.exp(-largest))
    assert found.kind == "bound" and found.upper <= least * (1.0 + 1e-4)
    once = ja.PoissonSampled(releases, [0.2, 0.48])
    rows = ja.epsilon(once, [1e-3, 4e-6], relation="add_one").upper
    np.testing.assert_allclose(rows[1], found.upper, rtol=1e-4)
    assert np.all(ja.delta(once, rows, relation="add_one").upper <= [1e-3, 4e-6])


def test_huge_noise_of_a_replaced_record_leaks_nothing():
    step = ja.PoissonSampled(ja.Laplace(1e200), 0.1)
    assert float(ja.epsilon(step, 1e-6, relation="replace_one").upper) == 0.0
