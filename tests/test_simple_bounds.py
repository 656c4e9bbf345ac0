"""Threshold tests never exceed the truth, simple bounds never fall below it: truths in mpmath and by brute force."""

import itertools
import math

import mpmath
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accounting.dispatch import kinds_of, limits_by_theorems
from jaxacct.engines import closed_form, quick_bounds, theorems
from jaxacct.engines.protocol import Question
from jaxacct.mechanisms import components

RELATION = "add_or_remove_one"
LARGEST_COUNT = 2.0**53


def by_theorems(quantity, asked, thorough):
    """(lower, upper) by all theorems, or by the quick ones."""
    if thorough:
        return limits_by_theorems(quantity, asked)
    return quick_bounds.limits(quantity, asked.parts, asked.target, asked.slack)


def limits(mechanism, direction, *, delta=None, eps=None, thorough=True):
    """(lower, upper) of epsilon or of the finite part of delta, for each total delta or each eps given."""
    at = np.atleast_1d(eps if delta is None else delta)
    parts = components(mechanism, RELATION, direction).take(np.zeros(at.size, int))
    nothing = np.zeros(at.size)
    with np.errstate(all="ignore"):
        if eps is None:
            left = at - parts.delta_infinity
            asked = Question(parts, kinds_of(parts), left, nothing + 1e-14, -left, None)
            return by_theorems("epsilon", asked, thorough)
        asked = Question(parts, kinds_of(parts), at, nothing, nothing, None)
        return tuple(x + parts.delta_infinity for x in by_theorems("delta", asked, thorough))


def hold(mechanism, direction, truth, epsilons, slack=1e-13):
    """Assert that the limits of epsilon and of delta, quick and thorough, contain the truth, delta = truth(eps)."""
    eps = np.array(epsilons)
    true, before = (np.array([float(truth(x)) for x in at]) for at in (eps.tolist(), (0.999 * eps).tolist()))
    some = (true > 1e-290) & (true < 1.0)
    falls = (before > true * (1 + 1e-8))[some]
    at, delta = eps[some], true[some]
    for thorough in (False, True):
        low, high = limits(mechanism, direction, eps=eps, thorough=thorough)
        assert np.all(low <= true * (1 + slack) + 1e-300), (eps, low, true)
        assert np.all(high >= true * (1 - slack) - 1e-300), (eps, high, true)
        if not some.any():
            continue
        wider = limits(mechanism, direction, delta=np.minimum(delta * (1 + 1e-9), 1.0), thorough=thorough)[0]
        assert np.all(wider <= at * (1 + 1e-9) + 1e-12), (at, delta, wider)
        above = limits(mechanism, direction, delta=delta * (1 - 1e-9), thorough=thorough)[1]
        assert np.all((above >= at * (1 - 1e-9))[falls]), (at, delta, above)


def tail(x):
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def gaussian(mu, eps):
    with mpmath.workdps(60 + 2 * max(0, int(-math.log10(mu)))):
        mu, eps = mpmath.mpf(mu), mpmath.mpf(eps)
        a, b = eps / mu - mu / 2, eps / mu + mu / 2
        if a > 1e7:
            mills = [(1 - x**-2 + 3 * x**-4 - 15 * x**-6 + 105 * x**-8) / x for x in (a, b)]
            return mpmath.exp(-a * a / 2) / mpmath.sqrt(2 * mpmath.pi) * (mills[0] - mills[1])
        return tail(a) - mpmath.exp(eps) * tail(b)


def sampled(sigma, q, removing, eps):
    """delta(eps) of one Poisson sampled Gaussian."""
    smallest = min(float(x) for x in (1.0, 1.0 / sigma, eps) if x > 0)
    with mpmath.workdps(90 + 2 * int(-math.log10(smallest))):
        q, eps = mpmath.mpf(q), mpmath.mpf(eps)
        if removing:
            return q * gaussian(1 / sigma, mpmath.log1p(mpmath.expm1(eps) / q))
        k = 1 - (1 - q) * mpmath.exp(eps)
        return k * gaussian(1 / sigma, mpmath.log(q) + eps - mpmath.log(k)) if k > 0 else mpmath.mpf(0)


def mixed(law, rate, removing):
    base = [q for _, q in law]
    blend = [(1 - mpmath.mpf(rate)) * q + mpmath.mpf(rate) * p for p, q in law]
    return list(zip(blend, base, strict=True) if removing else zip(base, blend, strict=True))


EPSILONS = (0.0, 1e-6, 0.3, 3.0)


@pytest.mark.parametrize(("sigma", "n"), [(1e-3, 1), (0.3, 2), (5.0, 30), (1e5, 7), (1e9, 2e15)])
def test_composed_gaussians(sigma, n):
    mechanism, mu = ja.repeat(ja.Gaussian(sigma), n), math.sqrt(n) / sigma
    scale = max(mu * mu / 2, mu)
    exact = mpmath.sqrt(n) / sigma
    hold(
        mechanism,
        "remove",
        lambda eps: gaussian(exact, eps),
        [0.0, 0.1 * scale, 0.9 * scale, 2 * scale, 8 * scale],
        1e-9,
    )


@pytest.mark.parametrize("q", [1e-30, 0.01, 0.5, 1 - 2.0**-50])
@pytest.mark.parametrize("sigma", [0.05, 0.7, 1e6])
def test_one_sampled_step(sigma, q):
    mechanism = ja.PoissonSampled(ja.Gaussian(sigma), q)
    for direction in ("remove", "add"):
        removing = direction == "remove"
        last = float(-mpmath.log1p(-mpmath.mpf(q)))
        epsilons = (0.0, 0.01, 10.0) if removing else (0.3 * last, 0.9999 * last)
        hold(mechanism, direction, lambda eps, removing=removing: sampled(sigma, q, removing, eps), epsilons)


@pytest.mark.parametrize("q", [1e-12, 0.02, 0.7, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 0.2, 1.0, 50.0])
def test_one_laplace_step(scale, q):
    mechanism = ja.PoissonSampled(ja.Laplace(scale), q) if q < 1 else ja.Laplace(scale)
    s, rate = 1 / mpmath.mpf(scale), mpmath.mpf(q)

    def base(eps):  # of the Laplace pair, which is symmetric
        return max(1 - mpmath.exp((eps - s) / 2), 0)

    def remove(eps):
        return rate * base(mpmath.log1p(mpmath.expm1(eps) / rate))

    def add(eps):
        k = 1 - (1 - rate) * mpmath.exp(eps)
        return k * base(mpmath.log(rate) + eps - mpmath.log(k)) if k > 0 else mpmath.mpf(0)

    with mpmath.workdps(60):
        for direction, truth in (("remove", remove), ("add", add)):
            hold(mechanism, direction, truth, EPSILONS)


@pytest.mark.parametrize("rate", [1.0, 0.3, 1e-4])
@pytest.mark.parametrize(("p", "categories"), [(0.75, 2), (0.5001, 2), (0.999, 3), (0.2, 4), (1 - 1e-12, 2)])
def test_repeated_randomised_response(p, categories, rate):
    step = ja.RandomizedResponse(p, categories)
    with mpmath.workdps(60):
        p = mpmath.mpf(p)
        other = (1 - p) / (categories - 1)
        law = [(p, other), (other, p)] + [((categories - 2) * other, (categories - 2) * other)] * (categories > 2)
        for n in (1, 6):
            for direction in ("remove", "add"):
                pairs = mixed(law, rate, direction == "remove")
                exact = exact_of(pairs, n)
                run = ja.repeat(ja.PoissonSampled(step, rate) if rate < 1 else step, n)
                hold(run, direction, exact, EPSILONS, 1e-10)


def exact_of(pairs, n):
    """delta(eps) of `n` steps as a function of eps; `pairs` are the masses (P, Q) of a step's outcomes, in mpmath."""
    items = []
    for c in itertools.product(range(n + 1), repeat=len(pairs)):
        if sum(c) == n:
            ways = mpmath.mpf(math.factorial(n)) / math.prod(math.factorial(k) for k in c)
            items.append(
                tuple(ways * mpmath.fprod(pair[i] ** k for pair, k in zip(pairs, c, strict=True)) for i in (0, 1))
            )
    return lambda eps: mpmath.fsum(max(a - mpmath.exp(mpmath.mpf(eps)) * b, 0) for a, b in items)


def approximate(eps, lost):
    """The masses (P, Q) of the outcomes of the pair that dominates (eps, lost)-DP.  In one outcome Q has no mass."""
    e = mpmath.exp(mpmath.mpf(eps))
    lost = mpmath.mpf(lost)
    rare = (1 - lost) / (1 + e)
    return [(rare * e, rare), (rare, rare * e), (lost, 0), (0, lost)]


@pytest.mark.parametrize("lost", [1e-9, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_mass_at_infinity_bounds_no_finite_delta(lost, n):
    """Only P's outcomes of finite loss count.  Their mass is below 1; the old limits took it for 1 and were false."""
    with mpmath.workdps(60):
        exact = exact_of(approximate(0.7, lost), n)
        hold(ja.repeat(ja.ApproximateDP(0.7, lost), n), "remove", exact, (0.0, 0.2, 0.7, 1.4, 2.0), 1e-12)


@pytest.mark.parametrize("lost", [1e-3, 0.5, 0.99])
@pytest.mark.parametrize("sampled_at", [None, 0.4])
def test_mass_at_infinity_beside_a_gaussian(lost, sampled_at):
    sigma = 0.6
    step = ja.Gaussian(sigma) if sampled_at is None else ja.PoissonSampled(ja.Gaussian(sigma), sampled_at)

    def exact(eps):
        one = gaussian(1 / sigma, eps) if sampled_at is None else sampled(sigma, sampled_at, True, eps)
        return lost + (1 - lost) * one

    hold(ja.compose(step, ja.ApproximateDP(0.0, lost)), "remove", exact, (0.0, 0.3, 1.0, 3.0), 1e-12)


def test_a_mixture_of_parts():
    """Randomised response beside a Gaussian and a Laplace step: the convolution over the response is exact."""
    sigma, p = 0.8, 0.8
    loss = mpmath.log(mpmath.mpf(p) / (1 - mpmath.mpf(p)))

    def beside(single):
        def exact(eps):
            total = mpmath.mpf(0)
            for mass, shift in ((mpmath.mpf(p), loss), (1 - mpmath.mpf(p), -loss)):
                at = eps - shift
                # H at a < 1 by symmetry: H_a = 1 - a + a H_{1/a}
                value = single(at) if at >= 0 else 1 - mpmath.exp(at) + mpmath.exp(at) * single(-at)
                total += mass * value
            return total

        return exact

    response = ja.RandomizedResponse(p)
    with mpmath.workdps(50):
        hold(ja.compose(ja.Gaussian(sigma), response), "remove", beside(lambda e: gaussian(1 / sigma, e)), EPSILONS)
        laplace = lambda e: max(1 - mpmath.exp((e - mpmath.mpf(1) / 2) / 2), 0)
        hold(ja.compose(ja.Laplace(2.0), response), "remove", beside(laplace), EPSILONS)


def test_two_sampled_steps_by_quadrature():
    """delta of two sampled steps, remove: the inner integral is the closed form of one step at a shifted eps."""
    sigma, q = 0.7, 0.2
    u, weights = np.polynomial.hermite_e.hermegauss(120)

    def one(eps):
        eps = np.atleast_1d(eps)
        law, removing, turned = (np.full(eps.size, sigma), np.full(eps.size, q)), eps >= 0, np.exp(np.minimum(eps, 0))
        found = closed_form.delta_of_one_step(*law, removing, np.abs(eps)).estimate
        return np.where(removing, found, 1 - turned + turned * found)

    mechanism = ja.repeat(ja.PoissonSampled(ja.Gaussian(sigma), q), 2)
    epsilons = np.array([0.0, 0.2, 1.0, 2.5])
    for eps, low, high in zip(epsilons, *limits(mechanism, "remove", eps=epsilons), strict=True):
        true = 0.0
        for share, mean in ((1 - q, 0.0), (q, 1 / sigma)):
            x = u + mean
            loss = np.log1p(q * np.expm1(x / sigma - 0.5 / sigma**2))
            true += share * float(np.sum(weights * one(eps - loss)) / np.sqrt(2 * np.pi))
        assert low <= true * (1 + 1e-4) and high >= true * (1 - 1e-4)
        assert low >= 0.05 * true and high <= 40 * true


def random_mechanism(rng):
    """A composition of random mechanisms, with parameters over the range of float64."""

    def between(a, b):
        return float(np.exp(rng.uniform(np.log(a), np.log(b))))

    def rate():
        return (between(1e-300, 1e-10), between(1e-10, 0.5), rng.uniform(0.01, 0.99), 1 - between(2e-16, 1e-2))[
            rng.integers(4)
        ]

    def step():
        scale = (between(1e-12, 1e170), between(0.05, 50.0))[rng.integers(2)]
        loss = (0.0, between(1e-12, 1e3), 1e300, between(0.01, 3.0))[rng.integers(4)]
        lost = (0.0, between(1e-300, 0.5), 0.5, 1 - 1e-10)[rng.integers(4)]
        return (
            lambda: ja.Gaussian(scale),
            lambda: ja.PoissonSampled(ja.Gaussian(scale), rate()),
            lambda: ja.PoissonSampled(ja.Laplace(scale), rate()),
            lambda: ja.Laplace(scale),
            lambda: ja.RandomizedResponse(rate(), int(rng.integers(2, 5))),
            lambda: ja.ApproximateDP(loss, lost),
        )[rng.integers(6)]()

    def count():
        return (1.0, float(rng.integers(1, 20)), np.floor(between(1, 1e6)), np.floor(between(1, LARGEST_COUNT / 4)))[
            rng.integers(4)
        ]

    return ja.compose(*(ja.repeat(step(), count()) for _ in range(rng.integers(1, 4))))


def test_limits_are_in_order_over_the_whole_range():
    rng = np.random.default_rng(20)
    deltas, epsilons = np.array([1e-300, 1e-30, 1e-6, 0.3, 0.999]), np.array([0.0, 1e-300, 0.5, 30.0, 1e300])
    open_lower = 0
    for _ in range(20):
        mechanism, direction = random_mechanism(rng), ("remove", "add")[rng.integers(2)]
        parts = components(mechanism, RELATION, direction).take(np.zeros(5, int))
        for thorough in (False, True):
            with np.errstate(all="ignore"):
                kinds, nothing = kinds_of(parts), np.zeros(5)
                asked = Question(parts, kinds, deltas, np.full(5, 1e-15), nothing, None)
                low, high = by_theorems("epsilon", asked, thorough)
                least, most = by_theorems("delta", asked._replace(target=epsilons, slack=nothing), thorough)
            assert np.all(np.isfinite(low)) and np.all(low >= 0.0) and np.all(low <= high), mechanism
            assert np.all(least >= 0.0) and np.all(least <= most) and np.all(most <= 1.0), mechanism
            # a larger delta costs less
            assert np.all(np.diff(low) <= 1e-12 * low[:-1])
            known = high[np.isfinite(high)]
            assert np.all(np.diff(known) <= 0.01 * known[:-1])
            assert np.all(np.diff(least) <= 1e-12)
        open_lower += np.sum(low > 0)
    assert open_lower > 10


def test_limits_are_of_use():
    """At delta = 1e-5 the upper limit is below 40 (Gaussian) or 60 (randomised response) times the lower."""
    for mechanism in (ja.dp_sgd(1.0, 0.01, 1000), ja.repeat(ja.Gaussian(10.0), 100), ja.dp_sgd(0.5, 0.001, 100)):
        low, high = limits(mechanism, "remove", delta=1e-5)
        assert 0 < low < high < 40 * low
    low, high = limits(ja.repeat(ja.RandomizedResponse(0.6), 100), "remove", delta=1e-5)
    assert 0 < low < high < 60 * low
    assert limits(ja.repeat(ja.PoissonSampled(ja.Laplace(0.2), 0.1), 20), "remove", delta=1e-5)[0] > 4.0


def test_nothing_is_drawn_from_what_is_nan():
    tests = theorems.Tests(np.array([[np.nan, -1.0]]), np.array([[-3.0, np.nan]]))
    known = theorems.Tests(*(np.where(np.isnan(x), -np.inf, x) for x in tests))
    assert theorems.best_epsilon(known, np.array([0.01]))[0] >= 0.0
    for bad in (np.array([np.nan]), np.array([2.0])):
        assert theorems.best_epsilon(known, bad)[0] == 0.0


@pytest.mark.parametrize("sigma", [0.02, 0.3, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.4, 1.0])
@pytest.mark.parametrize("n", [1, 7, 10**4, 10**9])
def test_total_variation_is_above_delta_at_0(sigma, q, n):
    """By tests on the sum of the outputs, in mpmath: delta(0) is at least what any event says."""
    bound = quick_bounds.total_variation(components(ja.dp_sgd(sigma, q, n), RELATION, "remove"))[0]
    with mpmath.workdps(40):
        s, rate = mpmath.mpf(1) / mpmath.mpf(sigma), mpmath.mpf(q)
        one = rate * mpmath.erf(s / mpmath.sqrt(8))
        if q == 1.0:
            truth = mpmath.erf(mpmath.sqrt(n) * s / mpmath.sqrt(8))
        elif n == 1:
            truth = one
        else:  # the sum of the outputs is above half its mean, or one output is
            drift, spread = mpmath.sqrt(n) * rate * s, mpmath.sqrt(1 + rate * (1 - rate) * s**2)
            tail = 1 - 1 / (1 + (drift / (2 * spread)) ** 2)  # Cantelli: Pr[sum <= its mean - drift/2] <= 1 - tail
            truth = max(one, tail - mpmath.erfc(drift / 2 / mpmath.sqrt(2)) / 2)
        assert truth <= mpmath.mpf(bound) <= 1
        if n == 1 or q == 1.0:
            assert bound <= float(truth) * 1.2 + 1e-300


def test_total_variation_of_numbers_whose_squares_underflow():
    parts = components(ja.repeat(ja.PoissonSampled(ja.Gaussian(1e160), 1e-200), 2**53), RELATION, "remove")
    assert quick_bounds.total_variation(parts)[0] >= 2**53 * 1e-200 / (1e160 * math.sqrt(2 * math.pi))


def test_epsilon_is_0_where_delta_is_above_the_total_variation():
    """n q TV is .04 here, but delta(0) is 1.3e-6."""
    found = ja.epsilon(ja.dp_sgd(10.0, 1e-9, 1e9), [1e-5, 1e-6])
    assert found.upper[0] == 0.0 < found.lower[1]
    assert found.status[0] == "zero" and found.engine[0] == "theorem"


@pytest.mark.parametrize("run", [(10.0, 1e-9, 1e9), (1.0, 0.01, 1000), (0.7, 1e-3, 1e4), (3.0, 0.3, 20)])
def test_total_variation_of_many_steps_is_close(run):
    """Where the sum of the losses is about normal, delta(0) is sqrt(2/pi) = .8 times the bound."""
    mechanism = ja.compose(ja.dp_sgd(*run), ja.Gaussian(30.0))
    for direction in ("remove", "add"):
        truth = ja.delta(mechanism, 0.0, relation=f"{direction}_one")
        bound = quick_bounds.total_variation(components(mechanism, RELATION, direction))[0]
        assert truth.upper <= bound <= 1.4 * truth.lower


def test_total_variation_of_noise_at_the_end_of_the_range():
    parts = components(ja.repeat(ja.PoissonSampled(ja.Gaussian(1.7e308), 0.5), 2**50), RELATION, "remove")
    assert quick_bounds.total_variation(parts)[0] >= 2**50 * 0.5 / (1.7e308 * math.sqrt(2 * math.pi))


@pytest.mark.parametrize(
    ("sigma", "q", "eps"),
    [
        (5.7151849335681174e141, 0.23770137254648271, 0.0),
        (6.635730121412852e39, 0.44182863148398765, 1e-80),
        (1e170, 0.3, 1e-171),
    ],
)
def test_one_step_of_next_to_no_shift_is_not_without_cost(sigma, q, eps):
    """The old delta was below 1e-305 in the add direction.  The true delta is nearly q mu/sqrt(2 pi)."""
    for removing in (True, False):
        law = (np.array([x]) for x in (sigma, q, removing))
        with np.errstate(all="ignore"):
            low, _, high = (x[0] for x in closed_form.delta_of_one_step(*law, np.array([eps])))
        with mpmath.workdps(500):
            true = sampled(mpmath.mpf(sigma), q, removing, eps)
        assert low <= true <= high


@pytest.mark.parametrize(
    ("sigma", "q", "delta"), [(0.552, 0.356334820246307, 2.8e-172), (0.00884591840227676, 0.9999999985717004, 2e-97)]
)
def test_one_step_up_to_its_largest_loss(sigma, q, delta):
    """k = 1 - (1 - q) e^eps is positive even where it rounds to 0.  The old epsilon was slightly too small."""
    law = (np.array([x]) for x in (sigma, q, False))
    with np.errstate(all="ignore"):
        low, _, high = (x[0] for x in closed_form.epsilon_of_one_step(*law, np.array([delta]), np.zeros(1)))
    assert sampled(sigma, q, False, high) <= delta <= sampled(sigma, q, False, low) and high - low < 1e-12 * high


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [(0.191, 5.6e-257, 77, 9.7e-262), (5.87, 2.02e-23, 364_000, 2e-197), (1.9e53, 1.54e-13, 45, 6.45e-273)],
)
def test_basic_composition_where_hits_are_rare(sigma, q, steps, delta):
    """The old upper ends were those without sampling, 195, 17 and 5e-52 in these three cases."""
    bounds = ja.epsilon(ja.dp_sgd(sigma, q, steps), delta, engine="contour")  # no lattice is narrow here
    most = max(
        steps * float(ja.epsilon(ja.dp_sgd(sigma, q, 1), delta / steps, relation=relation).upper)
        for relation in ("remove_one", "add_one")
    )
    least = ja.epsilon(ja.dp_sgd(sigma, q, 1), delta).lower
    assert least * (1 - 1e-9) <= bounds.lower <= bounds.upper <= most * (1 + 1e-9) < 1e-9
    back = ja.delta(ja.dp_sgd(sigma, q, steps), float(bounds.upper), engine="contour")
    assert back.lower <= delta <= back.upper * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sigma", "q", "n"),
    [
        *((0.7, 2.06e-9, 1000), (1.0, 1e-6, 100), (2.0, 1e-12, 10), (0.5, 1e-3, 2), (1.0, 0.3, 2)),
        # in these two u was rounded up for eps > 1, where a sampled loss of eps was taken to be eps - log q
        *((2.6, 0.497, 28735), (1.66, 0.0835, 329)),
    ],
)
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-3, 0.01, 0.5, 1.05, 1.12, 3.0])
def test_any_step_is_a_test(sigma, q, n, eps):
    """The bound of `_any_step` is at most the exact gain of the test, and nearly equal to it where hits are rare."""
    law = (np.array([x]) for x in (sigma, q, float(n), True, eps))
    found = float(theorems._any_step(*law)[0])
    with mpmath.workdps(400):
        s, rate = 1 / mpmath.mpf(sigma), mpmath.mpf(q)
        u = mpmath.log1p(mpmath.expm1(mpmath.mpf(eps)) / rate) / s + s / 2
        tail = lambda x: mpmath.erfc(x / mpmath.sqrt(2)) / 2
        p, other = (1 - rate) * tail(u) + rate * tail(u - s), tail(u)
        gain = 1 - (1 - p) ** n - mpmath.exp(mpmath.mpf(eps)) * (1 - (1 - other) ** n)
        assert 0 <= found <= max(gain, 0)
        if n * p < 1e-6:
            assert found >= gain * (1 - 1e-5) - 1e-300


def test_rare_large_losses_are_found():
    """The old code gave [.0037, .0100] for these 1,000 steps, because it had no test of `_any_step`."""
    run = ja.dp_sgd(0.7, 2.0557e-9, 1000)
    low, high = limits(run, "remove", delta=1e-30)
    assert 0.00995 < low <= high
    back = limits(run, "remove", eps=low)
    assert back[0] <= 1e-30 * (1 + 1e-6) and back[0] > 0.999e-30
