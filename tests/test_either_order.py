"""The larger of two profiles: against the brute-force maximum over both orders, step by step."""

import itertools

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

import jaxacct as ja
from jaxacct import representations
from jaxacct.mechanisms import components
from jaxacct.mechanisms.base import FinitePart
from jaxacct.mechanisms.profile import either_order, profile_of_law


def parts_of(p, q):
    """The laws of the loss in the two orders of two laws p, q on the same outcomes."""

    def one(a, b):
        both = (a > 0) & (b > 0)
        loss = np.where(both, np.log(np.where(both, a, 1.0)) - np.log(np.where(both, b, 1.0)), 0.0)
        return FinitePart(loss, np.where(both, a, 0.0), np.asarray(np.sum(a[b == 0])))

    return one(p, q), one(q, p)


def delta_of(p, q, eps):
    return np.sum(np.maximum(p - np.exp(eps) * q, 0.0))


def delta_of_pair(pair, eps):
    p, q = (np.asarray(x, float) for x in (pair.p, pair.q))
    return np.sum(np.where(pair.loss > eps, p - np.exp(eps) * q, 0.0)) + pair.p_infinity


def delta_reverse(pair, eps):
    p, q = (np.asarray(x, float) for x in (pair.p, pair.q))
    return np.sum(np.where(-pair.loss > eps, q - np.exp(eps) * p, 0.0)) + pair.q_infinity


def random_pair(rng, lost):
    size = int(rng.integers(2, 6))
    p, q = rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 5.0]))), rng.dirichlet(np.full(size, 1.0))
    if lost & 1:
        q[0] = 0.0
    if lost & 2:
        p[-1] = 0.0
    if rng.integers(3) == 0:  # equal losses
        p, q = np.repeat(p, 2) / 2, np.repeat(q, 2) / 2
    return p / p.sum(), q / q.sum()


def test_the_pair_has_the_larger_profile():
    rng = np.random.default_rng(5)
    for turn in range(60):
        p, q = random_pair(rng, turn % 4)
        pair = either_order(*parts_of(p, q))
        for eps in np.concatenate([[0.0], rng.exponential(0.7, 12), rng.exponential(5.0, 3)]):
            true = max(delta_of(p, q, eps), delta_of(q, p, eps))
            for found in (delta_of_pair(pair, eps), delta_reverse(pair, eps)):
                assert found >= true * (1 - 1e-14) - 1e-15, (p, q, eps)
                assert found <= true + 1e-7, (p, q, eps, found, true)
        assert np.sum(pair.p) + pair.p_infinity >= 1 - 1e-14


def test_batches_are_taken_row_by_row():
    rng = np.random.default_rng(6)
    p, q = rng.dirichlet(np.ones(3), (2, 2)), rng.dirichlet(np.ones(3), (2, 2))
    loss = np.log(p / q)
    zero = np.zeros((2, 2))
    pair = either_order(FinitePart(loss, p, zero), FinitePart(-loss, q, zero))
    for i, j in np.ndindex(2, 2):
        alone = either_order(*parts_of(p[i, j], q[i, j]))
        for eps in (0.0, 0.1, 0.5, 2.0):
            mine = np.sum(np.where(pair.loss[i, j] > eps, pair.p[i, j] - np.exp(eps) * pair.q[i, j], 0.0))
            np.testing.assert_allclose(mine, delta_of_pair(alone, eps), atol=1e-14)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5], [0.5, 0.5]),
        ([1.0, 0.0], [0.0, 1.0]),
        ([1 - 1e-300, 1e-300], [0.5, 0.5]),
        ([1e-300, 1.0], [1.0, 1e-300]),
        ([0.5, 0.5 - 1e-12, 1e-12], [0.5, 0.5 - 2e-12, 2e-12]),
        ([5e-324, 1.0], [1.0, 5e-324]),
    ],
)
def test_ends_of_the_range(p, q):
    p, q = np.array(p), np.array(q)
    pair = either_order(*parts_of(p, q))
    for eps in (0.0, 1e-9, 0.3, 1.0, 300.0, 600.0, 700.0):
        true = max(delta_of(p, q, eps), delta_of(q, p, eps))
        for found in (delta_of_pair(pair, eps), delta_reverse(pair, eps)):
            assert np.isfinite(found) and found >= true * (1 - 1e-13) - 1e-15, (eps, found, true)


def exact_delta(parts, eps):
    """delta of a composition of finite parts, by brute force over all outcomes, with the mass at infinity."""
    losses, masses = np.zeros(1), np.ones(1)
    for loss, mass, n in zip(parts.finite_loss[0], parts.finite_mass[0], parts.finite_n[0], strict=True):
        for _ in range(int(n)):
            losses = (losses[:, None] + loss[mass > 0]).ravel()
            masses = (masses[:, None] * mass[mass > 0]).ravel()
    return np.sum(masses * np.maximum(-np.expm1(eps - losses), 0.0)) + parts.delta_infinity[0]


def sampled_orders(p, q, g):
    """Laws before and after a replacement in a sample of share g: p by q or q by p, with p or q as the common law."""
    for one, two in ((p, q), (q, p)):
        for common in (one, two):
            yield (1 - g) * common + g * one, (1 - g) * common + g * two


def composed(orders, eps):
    first, second = np.ones(1), np.ones(1)
    for one, two in orders:
        first, second = np.outer(first, one).ravel(), np.outer(second, two).ravel()
    return delta_of(first, second, eps)


def test_a_replacement_in_a_sample_of_asymmetric_laws():
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    fixed = ja.SampledWithoutReplacement(ja.FiniteOutput([0.9, 0.1], [0.5, 0.5]), 0.5)
    for eps, true in ((0.6, 0.1178), (0.2, 0.17786)):
        found = max(exact_delta(components(fixed, "replace_one", d), eps) for d in ("remove", "add"))
        brute = max(delta_of(a, b, eps) for a, b in sampled_orders(p, q, 0.5))
        np.testing.assert_allclose(brute, true, rtol=2e-4)
        assert found >= brute * (1 - 1e-12)


def test_compositions_hold_for_every_order_of_every_step():
    rng = np.random.default_rng(9)
    for _ in range(3):
        laws = [random_pair(rng, 0)[:2] for _ in range(2)]
        steps = [ja.FiniteOutput(p, q) for p, q in laws]
        for eps in (0.0, 0.2, 0.7, 1.5):
            run = ja.compose(*steps)
            found = max(exact_delta(components(run, "replace_one", d), eps) for d in ("remove", "add"))
            orders = itertools.product(*[[(p, q), (q, p)] for p, q in laws])
            assert found >= max(composed(order, eps) for order in orders) * (1 - 1e-12)
            g = float(rng.uniform(0.1, 0.9))
            fixed = ja.repeat(ja.SampledWithoutReplacement(steps[0], g), 2)
            found = max(exact_delta(components(fixed, "replace_one", d), eps) for d in ("remove", "add"))
            choices = itertools.product(list(sampled_orders(*laws[0], g)), repeat=2)
            assert found >= max(composed(order, eps) for order in choices) * (1 - 1e-12)
        assert run.kind_under("replace_one") == "bound" and fixed.kind_under("replace_one") == "bound"


def test_repeated_samples_under_replacement_are_a_bound():
    """Each step's common records may be the worst ones for the outputs so far. The pair covers both choices at once."""
    p, q, g = np.array([0.75, 0.25]), np.array([0.25, 0.75]), 0.5
    pairs = [((1 - g) * common + g * p, (1 - g) * common + g * q) for common in (p, q)]
    step = ja.SampledWithoutReplacement(ja.RandomizedResponse(0.75), g)
    run, strict = ja.repeat(step, 2), False
    for eps in (0.0, 0.2, 0.5):
        # after each output of the first step, the second step has whichever pair is worse
        best = lambda a, b, cost: max(np.sum(np.maximum(a * one - cost * b * two, 0.0)) for one, two in pairs)
        truth = max(sum(best(a, b, np.exp(eps)) for a, b in zip(*first, strict=True)) for first in pairs)
        found = ja.delta(run, eps, relation="replace_one")
        assert found.lower <= truth <= found.upper and found.kind == "bound"
        strict |= bool(found.upper > 1.001 * truth)
    assert strict and ja.delta(step, 0.2, relation="replace_one").kind == "certified"


P, Q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
STEP, LOSS = ja.FiniteOutput(P, Q), np.log(1.8)
LEFT = 0.5 * np.exp(-0.25)  # of Laplace noise of scale 2 around 0, the mass beyond 1/2
BESIDE = {  # a symmetric mechanism, and its law with the record's first value and with its second one
    "response": (ja.RandomizedResponse(0.6), [0.6, 0.4], [0.4, 0.6]),
    "output": (ja.FiniteOutput([0.2, 0.3, 0.5], [0.5, 0.3, 0.2]), [0.2, 0.3, 0.5], [0.5, 0.3, 0.2]),
    "sign of a Gaussian": (ja.Gaussian(2.0), [ndtr(0.25), ndtr(-0.25)], [ndtr(-0.25), ndtr(0.25)]),
    "sign of Laplace noise": (ja.Laplace(2.0), [1.0 - LEFT, LEFT], [LEFT, 1.0 - LEFT]),
}


def in_the_worst_orders(first, second, eps):
    """Delta of outputs y of the laws `first` and `second`, after each of which the order of STEP is the worse one."""
    orders = ((P, Q), (Q, P))
    each = [
        max(np.sum(np.maximum(a * p - np.exp(eps) * b * q, 0.0)) for p, q in orders)
        for a, b in zip(first, second, strict=True)
    ]
    return sum(each)


@pytest.mark.parametrize("name", BESIDE)
def test_the_order_of_a_step_may_follow_from_the_outputs_beside_it(name):
    """A step's order counted as free only beside another asymmetric step: .4, "certified", for .48."""
    other, first, second = BESIDE[name]
    doors = {
        "composed": ja.compose(other, STEP),
        "repeated once": ja.repeat(ja.compose(STEP, other), 1),
        "sampled surely": ja.compose(ja.PoissonSampled(STEP, 1.0), other),
        "a repetition inside": ja.compose(ja.repeat(STEP, [1.0]), other),
        "its profile": ja.compose(other, ja.PrivacyProfile([0.0, LOSS, 1.61], [0.4, 0.32, 0.0], [0.4, 0.0, 0.0])),
    }
    eps = 0.0 if name in ("response", "output") else 0.2
    truth = in_the_worst_orders(first, second, eps)
    for door, run in doors.items():
        found = ja.delta(run, eps, relation="replace_one")
        assert np.all(found.upper >= truth * (1.0 - 1e-9)) and np.all(found.kind == "bound"), door
    assert ja.profile(doors["composed"], "replace_one").delta(eps).upper >= truth * (1.0 - 1e-9)
    claim = ja.Bounds(0.0, 0.0, truth * (1.0 - 1e-6), "bound", "ok", "")
    assert ja.verify(doors["composed"], claim, epsilon=eps, relation="replace_one").status != "verified"
    low = min(delta_of(np.outer(first, p).ravel(), np.outer(second, q).ravel(), 0.0) for p, q in ((P, Q), (Q, P)))
    assert in_the_worst_orders(first, second, 0.0) > 1.01 * low
    found = ja.delta(ja.ProposeTestRelease(STEP, 2.0, 1e6), 0.0, relation="replace_one").upper
    assert found >= in_the_worst_orders(*BESIDE["sign of Laplace noise"][1:], 0.0)


def test_a_sample_of_several_releases_displaces_a_record_in_an_order_that_outputs_choose():
    """Data {1, 0} and {0}, one record in the sample, under the default relation: .2 was claimed for .24."""
    run = ja.SampledWithoutReplacement(ja.compose(ja.RandomizedResponse(0.6), STEP), 0.5)
    truth = 0.5 * in_the_worst_orders([0.6, 0.4], [0.4, 0.6], 0.0)
    assert truth == pytest.approx(0.24) and ja.delta(run, 0.0).upper >= truth * (1.0 - 1e-9)
    assert ja.epsilon(run, 0.21).upper > 0.0


def test_renyi_divergences_of_joined_pairs_are_bounds():
    p, q, g = np.array([0.9, 0.1]), np.array([0.5, 0.5]), 0.5
    fixed = ja.SampledWithoutReplacement(ja.FiniteOutput([0.9, 0.1], [0.5, 0.5]), g)
    for order in (2.0, 8.0):
        truth = max(np.log(np.sum(a**order * b ** (1 - order))) / (order - 1) for a, b in sampled_orders(p, q, g))
        found = representations.renyi_divergence(fixed, order, "replace_one")
        assert found.kind == "bound" and found.lower <= truth <= found.upper and found.upper > 1.0001 * truth
    found = representations.zero_concentrated(fixed, "replace_one")
    assert found.kind == "bound" and found.lower == 0.0 < found.upper


def test_no_mass_lies_beyond_the_largest_loss():
    """The rounding of a profile must not leave mass at infinity, which would make epsilon infinite at delta 0."""
    step = ja.SampledWithoutReplacement(ja.FiniteOutput([0.5, 0.3, 0.2], [0.1, 0.3, 0.6]), 0.25)
    largest = np.log(2.0)  # (.75 * .1 + .25 * .5)/.1
    found = ja.epsilon(step, 0.0)
    assert found.lower <= largest <= found.upper <= largest * (1.0 + 1e-12)
    assert ja.delta(step, 1.0).upper == 0.0
    mixed = ja.compose(ja.FiniteOutput([0.9, 0.1], [0.6, 0.4]), ja.FiniteOutput([0.6, 0.4], [0.9, 0.1]))
    most = ja.epsilon(mixed, 0.0, relation="replace_one").upper
    assert 2.0 * np.log(4.0) <= most <= 2.0 * np.log(4.0) * (1.0 + 1e-12)


def test_a_profile_of_many_losses_is_at_least_the_sum_and_near_it():
    """The profile is compared with exact sums and, for 20,000 losses at as many eps (4e8 terms), with an integral."""
    rng = np.random.default_rng(5)
    for size, scale in ((1, 1.0), (30, 1e-5), (30, 3.0), (30, 300.0)):
        loss, mass = rng.normal(size=size) * scale, rng.dirichlet(np.ones(size))
        eps = np.sort(np.abs(np.append(rng.normal(size=20) * scale, 0.0)))
        found = profile_of_law(loss, mass, 1e-9, eps)
        with mpmath.workprec(200):
            for at, delta in zip(eps.tolist(), found.tolist(), strict=True):
                terms = zip(loss.tolist(), mass.tolist(), strict=True)
                exact = mpmath.mpf(1e-9) + sum(p * -mpmath.expm1(at - mpmath.mpf(x)) for x, p in terms if x > at)
                assert exact <= delta <= exact * (1.0 + 1e-9)
    odd = profile_of_law(np.array([np.inf, np.nan, -np.inf, 1e308]), np.full(4, 0.25), 0.0, np.array([0.0, 1.0]))
    np.testing.assert_allclose(odd, 0.75, rtol=1e-12)  # all but the loss of -inf count as infinite
    eps = np.linspace(0.0, 5.0, 20_001)
    whole = profile_of_law(np.linspace(-5.0, 5.0, 20_001), np.full(20_001, 1.0 / 20_001), 0.0, eps)
    rest = 5.0 - eps  # the integral of (1 - e^(eps - x)) / 10 from eps to 5
    np.testing.assert_allclose(whole, (rest + np.expm1(-rest)) / 10.0, atol=1e-4)


def test_two_runs_of_sampled_steps_under_replacement():
    """Two runs of 100 steps at two close rates cost between 200 steps at the lower rate and 200 at the higher."""
    two = ja.compose(ja.dp_sgd(1.0, 0.01, 100), ja.dp_sgd(1.0, 0.010001, 100))
    one = [ja.epsilon(ja.dp_sgd(1.0, q, 200), 1e-5, relation="replace_one").upper for q in (0.01, 0.010001)]
    assert one[0] * (1.0 - 1e-5) <= ja.epsilon(two, 1e-5, relation="replace_one").upper <= one[1] * (1.0 + 1e-5)


@pytest.mark.parametrize(
    ("p", "q", "eps"),
    [
        (
            [2.2198413178119604e-05, 0.4969499084437866, 0.28120869973923535, 0.2218191934037999],
            [3.8400963811518664e-06, 0.15612635468469213, 0.31440850117344854, 0.5294613040454782],
            1.0,
        ),
        ([1.0, 0.0], [1.0 / 64.0, 63.0 / 64.0], 1.5),
        ([0.7, 0.2, 0.1], [0.3, 0.3, 0.4], 0.15),
    ],
)
def test_lower_ends_of_one_sample_are_not_rounded_up(p, q, eps):
    """The larger profile of both orders is rounded up. Lower ends of one sample come from the base without sampling."""
    with mpmath.workprec(200):
        one, two = ([mpmath.mpf(x) / mpmath.fsum(law) for x in law] for law in (p, q))
        half, grown = [(a + b) / 2 for a, b in zip(one, two, strict=True)], mpmath.exp(eps)
        leak = lambda a, b: mpmath.fsum(max(x - grown * y, 0) for x, y in zip(a, b, strict=True))
        remove, add = (max(leak(*laws[::way]) for laws in ((half, one), (half, two))) for way in (1, -1))
        truths = {"remove_one": remove, "add_one": add, "replace_one": remove, "add_or_remove_one": max(remove, add)}
        step = ja.SampledWithoutReplacement(ja.FiniteOutput(p, q), 0.5)
        for relation, truth in truths.items():
            found = ja.delta(step, eps, relation=relation)
            assert found.kind == "certified" and found.lower <= truth <= found.upper <= found.lower * (1.0 + 1e-11)
            for name in ("auto", "lattice"):
                assert ja.delta(step, eps, relation=relation, engine=name).lower <= truth
        assert ja.verify(step, found, epsilon=eps, relation=relation).status == "verified"
