"""Two sampled steps: against quadrature by mpmath, the other engines, tests from below, and limits of all kinds."""

import functools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import jaxacct as ja
from jaxacct.accounting.dispatch import kinds_of
from jaxacct.engines import closed_form, contour, two_steps
from jaxacct.engines.protocol import Answer
from jaxacct.engines.two_steps import placed, surveyed
from jaxacct.mechanisms import components

NOWHERE = np.array([-np.inf])
DIRECTIONS = ("remove", "add")


def pair(sigma, q, other_sigma, other_q):
    """Two steps that may differ."""
    return ja.compose(ja.dp_sgd(sigma, q, 1), ja.dp_sgd(other_sigma, other_q, 1))


def delta_of(direction, law, eps):
    parts = components(pair(*law), "add_or_remove_one", direction)
    low, _, high = two_steps.delta(parts, np.broadcast_to(np.asarray(eps, float), parts.mu2.shape))
    return low, high


def epsilon_of(direction, law, delta):
    parts = components(pair(*law), "add_or_remove_one", direction)
    target = np.broadcast_to(np.asarray(delta, float), parts.mu2.shape)
    low, _, high = two_steps.epsilon(parts, target, np.zeros_like(target), np.full_like(target, -np.inf))
    return low, high


def steps_of(sigma, q, other_sigma, other_q, direction):
    """`two_steps.Steps` of one row: arrays of shape (1, 1)."""
    columns = (np.array([[x]], float) for x in (sigma, q, other_sigma, other_q))
    return two_steps.Steps(*columns, np.array([[direction == "remove"]]))


def bounded(steps, nodes, eps):
    """(lower, upper) of delta(eps) on cells between given nodes."""
    with np.errstate(all="ignore"):
        made = two_steps.cells(steps, np.atleast_2d(nodes))
        return tuple(float(x[0]) for x in two_steps.bounds(steps, made, np.array([eps])))


def tail(x):
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def mass(a, b):
    """The normal law's mass between two points."""
    return tail(a) - tail(b) if a > 0 else tail(-b) - tail(-a)


def one_step(sigma, q, direction, alpha):
    """H_alpha of one step for any alpha >= 0, by the outputs on which the integrand is positive."""
    s = 1 / mpmath.mpf(sigma)
    q = mpmath.mpf(q)
    ratio = alpha if direction == "remove" else (1 / alpha if alpha > 0 else mpmath.inf)
    edge = (ratio - 1 + q) / q  # of the Gaussians' likelihood ratio
    at = mpmath.log(edge) / s + s / 2 if edge > 0 else -mpmath.inf
    if direction == "remove":  # outputs above it
        return (1 - q - alpha) * tail(at) + q * tail(at - s)
    return (1 - alpha * (1 - q)) * tail(-at) - alpha * q * tail(s - at)


@functools.cache
def integrated(law, direction, eps, reach=13, method="gauss-legendre"):
    """delta of two steps, to 1e-12: the outer integral by mpmath, from the definition, to `reach` deviations.

    For add, the integrand is almost singular at the edges far in the tail; tanh-sinh can integrate it.
    """
    sigma, q, other_sigma, other_q = law
    with mpmath.workdps(20):
        s, q, grown = 1 / mpmath.mpf(sigma), mpmath.mpf(q), mpmath.exp(mpmath.mpf(eps))

        def outer(u):
            mix = 1 - q + q * mpmath.exp(s * u - s * s / 2)
            if direction == "remove":
                return mpmath.npdf(u) * mix * one_step(other_sigma, other_q, direction, grown / mix)
            return mpmath.npdf(u) * one_step(other_sigma, other_q, direction, grown * mix)

        starts, far = ((0, s), 3) if method == "tanh-sinh" else ((0,), 6)
        breaks = {start + mpmath.mpf(x) for start in starts for x in range(-reach, reach + int(s) + 1)}
        mix = grown if direction == "remove" else 1 / grown
        for edge in (mix, mix / (1 - mpmath.mpf(other_q))):  # where `edge` in `one_step` is 1, or 0
            z = (edge - 1 + q) / q
            if z > 0:
                centre = mpmath.log(z) / s + s / 2
                breaks |= {centre} | {
                    centre + side * mpmath.mpf(2) ** -k for k in range(0, 40, far) for side in (1, -1)
                }
        points = sorted(x for x in breaks if -reach <= x <= s + reach)
        return mpmath.quad(outer, points, maxdegree=4 if method == "gauss-legendre" else 6, method=method)


LAWS = [
    ((1.0, 0.01, 1.0, 0.01), 0.05),
    ((0.6, 0.001, 0.6, 0.001), 0.2),
    ((1.0, 0.3, 1.0, 0.3), 0.2),
    ((2.0, 0.2, 0.7, 0.05), 0.08),
    ((0.3, 0.5, 4.0, 0.9), 0.6),
    ((30.0, 0.1, 20.0, 0.2), 2e-3),
    ((0.1, 0.05, 0.1, 0.05), 0.09),
    ((1.5, 0.95, 1.5, 0.95), 3.0),
    ((300.0, 1e-6, 300.0, 1e-6), 1e-9),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("law", "eps"), [case if k % 2 else pytest.param(*case, marks=pytest.mark.slow) for k, case in enumerate(LAWS)]
)
def test_delta_by_quadrature(law, eps, direction):
    low, high = delta_of(direction, law, eps)
    truth = integrated(law, direction, eps)
    if direction == "add" and eps > -math.log1p(-law[1]) - math.log1p(-law[3]):
        assert truth == 0 and low[0] == high[0] == 0.0
        return
    assert low[0] * (1 - 1e-12) <= truth <= high[0] * (1 + 1e-12)
    assert high[0] - low[0] <= 1e-6 * high[0]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "q", "eps"), [(1.0, 0.2, 0.3), (0.7, 0.5, 0.5), (3.0, 0.4, 0.1)])
def test_delta_by_a_sum_over_the_plane(sigma, q, eps, direction):
    """The definition alone, both outputs summed over: no closed form of one step."""
    u = np.linspace(-9.0, 9.0 + 1.0 / sigma, 2001)
    density = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    mixture = density * (1.0 - q + q * np.exp(u / sigma - 0.5 / sigma**2))
    p, other = (mixture, density) if direction == "remove" else (density, mixture)
    summed = np.sum(np.maximum(np.outer(p, p) - math.exp(eps) * np.outer(other, other), 0.0))
    low, high = delta_of(direction, (sigma, q, sigma, q), eps)
    assert low[0] * (1 - 1e-5) <= summed <= high[0] * (1 + 1e-5)


@pytest.mark.parametrize(
    ("law", "delta", "direction", "reach", "method"),
    [
        pytest.param((1.0, 0.05, 1.0, 0.05), 1e-3, "remove", 13, "gauss-legendre", marks=pytest.mark.slow),
        ((4.0, 0.3, 1.0, 0.02), 1e-40, "remove", 16, "gauss-legendre"),
        pytest.param((1.0, 0.05, 1.0, 0.05), 1e-3, "add", 13, "gauss-legendre", marks=pytest.mark.slow),
        pytest.param((4.0, 0.3, 1.0, 0.02), 1e-40, "add", 16, "tanh-sinh", marks=pytest.mark.slow),
    ],
)
def test_epsilon_by_quadrature(law, delta, direction, reach, method):
    low, high = epsilon_of(direction, law, delta)
    assert 0.0 < low[0] <= high[0] and high[0] - low[0] <= 1e-6 * high[0]
    assert integrated(law, direction, high[0], reach, method) <= delta * (1 + 1e-12)
    assert integrated(law, direction, low[0], reach, method) >= delta * (1 - 1e-12)


RUNS = pair([2.0, 0.8], [0.2, 0.5], [0.9, 0.8], [0.1, 0.5])


def overlapping(one, other):
    return np.all(np.maximum(one.lower, other.lower) <= np.minimum(one.upper, other.upper))


@pytest.mark.parametrize("relation", ["remove_one", "add_one"])
def test_the_lattice_engine_agrees(relation):
    one, other = (ja.epsilon(RUNS, 1e-6, relation=relation, engine=x, rtol=1e-3) for x in ("auto", "lattice"))
    assert set(one.engine) == {"two_steps"} and set(one.status) == {"ok"}
    assert overlapping(one, other) and np.all(other.relative_width < 1e-3)


@pytest.mark.slow
def test_the_contour_engine_agrees(monkeypatch):
    monkeypatch.setattr(contour, "LADDER", contour.LADDER[3:4])  # one program to compile
    run = ja.dp_sgd([1.0, 2.0, 5.0], [0.01, 0.2, 0.5], 2)
    one, other = (ja.epsilon(run, 1e-4, relation="remove_one", engine=engine) for engine in ("auto", "contour"))
    assert set(one.engine) == {"two_steps"} and np.all(other.relative_width < 1e-4)
    assert overlapping(one, other)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("second", [(1.0, 1e-290), (1e90, 0.3), (0.05, 1e-200)])
def test_a_second_step_of_next_to_no_effect_leaves_one(direction, second):
    """delta of one step <= delta of two <= delta of one + the total variation of the other."""
    rng = np.random.default_rng(3)
    sigma, q = np.exp(rng.uniform(-3, 5, 40)), rng.uniform(1e-3, 0.99, 40)
    eps = rng.uniform(0.0, 2.0, 40)
    eps = np.where(direction == "add", np.minimum(eps, -0.9 * np.log1p(-q)), eps)
    low, high = delta_of(direction, (sigma, q, *second), eps)
    one = closed_form.delta_of_one_step(sigma, q, np.full(40, direction == "remove"), eps)
    variation = second[1] * special.erf(8**-0.5 / second[0])
    assert np.all(low <= one.upper + variation) and np.all(high >= one.lower)
    large = one.estimate > 1e-80
    assert np.all((high - low)[large] <= 1e-6 * high[large])


def extreme(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


ANY = {
    "sigma": st.one_of(extreme(0.1, 100.0), extreme(1e-12, 1e170)),
    "q": st.one_of(extreme(1e-5, 0.99), extreme(1e-300, 0.99), st.floats(1e-16, 0.5).map(lambda x: 1.0 - x)),
}
LAW = st.tuples(ANY["sigma"], ANY["q"], ANY["sigma"], ANY["q"])


@settings(deadline=None, max_examples=12)
@given(LAW, st.sampled_from(DIRECTIONS), extreme(1e-300, 0.999), st.floats(1.05, 3.0))
def test_monotone_in_everything(law, direction, delta, factor):
    """With more noise, less sampling, a larger delta or one step less, no lower end exceeds this law's upper end."""
    sigma, q, other_sigma, other_q = law
    low, high = epsilon_of(direction, law, delta)
    assert 0.0 <= low[0] <= high[0]
    laws = np.array([[sigma * factor, q, other_sigma, other_q], [sigma, q / factor, other_sigma, other_q], law]).T
    lows, highs = epsilon_of(direction, laws, delta * np.array([1.0, 1.0, factor if delta * factor < 1 else 1.0]))
    assert np.all(lows <= high) and np.all(lows <= highs)
    with np.errstate(all="ignore"):
        removing = np.array([direction == "remove"])
        one = closed_form.epsilon_of_one_step(*np.array([[sigma], [q]]), removing, np.array([delta]), np.zeros(1))
    assert one.lower[0] <= high[0]


def digits_for(law, eps):
    """Return how many digits a difference of the law's probabilities needs."""
    sigma, q, other_sigma, other_q = law
    smallest = min(q, other_q, 1 - q, 1 - other_q, 1 / sigma, 1 / other_sigma, max(eps, 1e-300))
    return 40 + 2 * int(-math.log10(min(smallest, 0.1)))


def rectangle(law, direction, first, second, union):
    """(P, Q) of the outputs beyond both thresholds, or beyond either; thresholds in deviations, on P's side."""
    chances = []
    for sigma, q, x in ((*law[:2], first), (*law[2:], second)):
        s, q = 1 / mpmath.mpf(sigma), mpmath.mpf(q)
        side = 1 if direction == "remove" else -1
        plain = tail(side * mpmath.mpf(x))
        mixed = (1 - q) * plain + q * tail(side * (mpmath.mpf(x) - s))
        chances.append((mixed, plain) if direction == "remove" else (plain, mixed))
    (p, other_p), (q, other_q) = zip(*chances, strict=True)
    return (p + other_p - p * other_p, q + other_q - q * other_q) if union else (p * other_p, q * other_q)


@settings(deadline=None, max_examples=25)
@given(LAW, st.sampled_from(DIRECTIONS), extreme(1e-300, 0.999), st.data())
def test_no_test_exceeds_an_upper_end_and_no_lower_end_exceeds_what_is_not_sampled(law, direction, delta, data):
    low, high = (float(x[0]) for x in epsilon_of(direction, law, delta))
    assert not math.isnan(low) and low <= high
    eps = high if math.isfinite(high) else min(low, 700.0)
    at_low, at_high = (float(x[0]) for x in delta_of(direction, law, eps))
    assert 0.0 <= at_low <= at_high <= 1.0
    mu = math.hypot(1 / law[0], 1 / law[2])
    if 1e-100 < mu < 1e5:
        with np.errstate(all="ignore"):
            plain = closed_form.delta(np.array([mu]), np.array([eps]))
        assert at_low <= plain.upper[0] * (1 + 1e-12)
    with mpmath.workdps(digits_for(law, eps)):
        for union in (False, True):
            first, second = (data.draw(st.sampled_from([0.0, 1 / s])) + data.draw(st.floats(-6, 6)) for s in law[::2])
            p, q = rectangle(law, direction, first, second, union)
            assert p - mpmath.exp(eps) * q <= at_high * (1 + mpmath.mpf("1e-30"))
            if math.isfinite(high) and p > delta and q > 0:
                assert mpmath.log((p - delta) / q) <= high * (1 + mpmath.mpf("1e-15")) + mpmath.mpf("1e-320")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("sigma", "q"), [(1.0, 0.01), (0.2, 0.7), (50.0, 0.3), (0.05, 1e-6), (3.0, 1e-12), (2.0, 0.9999)]
)
def test_profile_at_any_eps_known_only_so_well(direction, sigma, q):
    rng = np.random.default_rng(1)
    eps = rng.choice([-1.0, 1.0], 24) * np.exp(rng.uniform(np.log(1e-9 * q), np.log(3.0), 24))
    off = np.abs(eps) * np.exp(rng.uniform(np.log(1e-16), np.log(0.2), 24))
    with np.errstate(all="ignore"):
        low, high = closed_form.profile_of_one_step(sigma, q, np.full(24, direction == "remove"), eps, off)
    with mpmath.workdps(60):
        for share in (-1, 0, 1):
            for e, wrong, least, most in zip(eps, off, low, high, strict=True):
                alpha = mpmath.exp(mpmath.mpf(e) + share * mpmath.mpf(wrong))
                truth = max(one_step(sigma, q, direction, alpha), 0)
                assert least * (1 - mpmath.mpf("1e-30")) <= truth <= most
    sharp = off < 1e-13 * np.abs(eps)
    assert np.all((high - low)[sharp] <= 1e-6 * np.maximum(high, 1e-300)[sharp] + 1e-12 * q)


@pytest.mark.parametrize(
    ("sigma", "a", "w"), [(1.0, 0.3, 0.2), (1.0, -5.0, 0.2), (0.5, 3.0, 0.2), (0.02, 25.0, 0.015), (1e4, 30.0, 0.06)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_weights_of_a_cell(sigma, a, w, direction):
    q = 0.3
    steps = steps_of(sigma, q, 1.0, 0.1, direction)
    made = two_steps.cells(steps, np.array([[a, a + w]]))
    assert made.sound.all()
    with mpmath.workdps(400):
        s, end = 1 / mpmath.mpf(sigma), mpmath.mpf(a + w)
        z = [mpmath.exp(s * u - s * s / 2) for u in (mpmath.mpf(a), end)]
        # masses and moments of z by the normal law's own tails
        n = [mpmath.exp(k * (k - 1) * s * s / 2) * mass(a - k * s, end - k * s) for k in range(3)]
        right = (n[1] - z[0] * n[0]) / (z[1] - z[0])
        mix = [1 - q + q * x if direction == "remove" else 1 for x in z]
        for found, truth in ((made.first, (n[0] - right) * mix[0]), (made.last, right * mix[1])):
            assert abs(found[0, 0] - truth) <= made.wrong[0, 0] * truth
        curved = mpmath.log((-n[2] + (z[0] + z[1]) * n[1] - z[0] * z[1] * n[0]) / 2)
        assert abs(made.log_bend[0, 0] - curved) <= made.bend_wrong[0, 0]
        below, above = 1 - tail(a), tail(end)
        if direction == "remove":
            below, above = (1 - q) * below + q * (1 - tail(a - s)), (1 - q) * above + q * tail(end - s)
        for (low, high), truth in ((made.below[0], below), (made.above[0], above)):
            assert low <= truth <= high and high - low <= 1e-11 * high


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("law", "eps"),
    [
        ((1.0, 0.2, 0.8, 0.1), 0.3),
        ((2.0, 0.5, 3.0, 0.4), 0.05),
        ((0.4, 0.3, 0.3, 0.5), 1.0),
        ((1.0, 1e-3, 1.0, 1e-3), 2e-3),
    ],
)
def test_bounds_of_the_second_derivative(law, eps, direction):
    """m <= G'' <= M on cells, by the second difference of G; C/2 cancels."""
    steps = steps_of(*law, direction)
    nodes = np.linspace(-3.0, 4.0, 60)[None, :]
    made = two_steps.cells(steps, nodes)
    with np.errstate(all="ignore"):
        least, most = (x[0] / np.exp(made.log_bend[0]) for x in two_steps._bends(steps, made, np.array([[eps]])))
    with mpmath.workdps(60):
        s, q, grown = 1 / mpmath.mpf(law[0]), mpmath.mpf(law[1]), mpmath.exp(eps)

        def g(z):
            mix = 1 - q + q * z
            if direction == "remove":
                return mix * one_step(*law[2:], direction, grown / mix)
            return one_step(*law[2:], direction, grown * mix)

        for cell in range(0, 59, 4):
            for share in (0.02, 0.5, 0.98):
                z = mpmath.exp(s * (nodes[0, cell] * (1 - share) + nodes[0, cell + 1] * share) - s * s / 2)
                h = z * mpmath.mpf("1e-14")
                second = (g(z + h) - 2 * g(z) + g(z - h)) / h**2
                assert least[cell] * (1 - 1e-9) - 1e-15 <= second <= most[cell] * (1 + 1e-9) + 1e-15
        assert np.median(most / np.maximum(least, 1e-300)) < 3.0


def test_cells_that_are_too_long_say_nothing():
    steps = steps_of(1.0, 0.2, 1.0, 0.2, "remove")
    for nodes in ([-1.0, 0.0, 1.0], [1.0, 0.9, 1.1], [0.0, np.nan, 0.1]):
        assert bounded(steps, np.array(nodes), 0.3) == (0.0, 1.0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_badly_placed_cells_are_wide_and_not_wrong(direction):
    law, eps = (1.0, 0.2, 1.0, 0.2), 0.25
    steps, truth = steps_of(*law, direction), integrated(law, direction, eps)
    rng = np.random.default_rng(8)
    widths = []
    for _ in range(40):
        start = rng.uniform(-6.0, 4.0)
        nodes = start + np.cumsum(rng.uniform(0.0, 0.2, rng.integers(1, 40)))
        low, high = bounded(steps, nodes, eps)
        assert low <= truth <= high
        widths.append((high - low) / float(truth))
    assert min(widths) < 0.1 and max(widths) > 0.5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cells_placed_elsewhere_are_not_wrong(direction):
    """Cells for one eps, asked about another."""
    law = (1.0, 0.2, 1.0, 0.2)
    steps = steps_of(*law, direction)
    nodes = placed(steps, np.array([0.1]), 300, surveyed(steps, np.array([0.1])))
    low, high = bounded(steps, nodes, 0.25)
    assert low <= integrated(law, direction, 0.25) <= high


def test_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(5)
    law = [np.exp(rng.uniform(-1, 3, 30)), rng.uniform(1e-3, 0.9, 30), np.exp(rng.uniform(-1, 3, 30)), np.full(30, 0.2)]
    delta = np.exp(rng.uniform(-30, -3, 30))
    together = epsilon_of("add", law, delta)
    for row in (0, 7, 29):
        alone = epsilon_of("add", [x[row] for x in law], delta[row])
        assert all(one[0] == every[row] for one, every in zip(alone, together, strict=True))


def test_the_order_of_the_steps_does_not_matter():
    law = np.array([[1.0, 0.3, 4.0, 0.05], [0.3, 1e-3, 9.0, 0.7], [2.0, 0.9, 2.0, 0.1]]).T
    for direction in DIRECTIONS:
        low, high = epsilon_of(direction, law, 1e-7)
        other_low, other_high = epsilon_of(direction, law[[2, 3, 0, 1]], 1e-7)
        assert np.all(np.maximum(low, other_low) <= np.minimum(high, other_high))


def test_what_is_below_the_floor_is_not_refined():
    parts = components(pair(1.0, 0.2, 1.0, 0.2), "add_or_remove_one", "add")
    delta, free = np.array([1e-6]), two_steps.epsilon
    exact = free(parts, delta, np.zeros(1), NOWHERE).upper
    assert free(parts, delta, np.zeros(1), exact * 1.05).upper == exact * 1.05
    assert free(parts, delta, np.zeros(1), exact * 0.95).upper == exact


def test_answers_of_the_library():
    run = ja.dp_sgd([1.0, 1.0, 1.0], [0.2, 0.2, 1e-4], [2, 1, 2])
    bounds = ja.epsilon(run, [1e-6, 1e-6, 0.5])
    assert bounds.engine.tolist()[:2] == ["two_steps", "closed_form"]
    assert bounds.status.tolist() == ["ok", "ok", "zero"] and bounds.lower[0] > bounds.upper[1]
    back = ja.delta(ja.dp_sgd(1.0, 0.2, 2), float(bounds.upper[0]))
    assert back.engine == "two_steps" and back.lower <= 1e-6 and back.upper >= 1e-6 * (1 - 1e-4)
    assert ja.delta(ja.dp_sgd(1.0, 0.2, 2), 3.0, relation="add_one").upper == 0.0  # beyond the largest loss
    assert ja.epsilon(ja.dp_sgd(1.0, 0.2, 2), 1e-300, relation="add_one").upper <= -2 * math.log1p(-0.2) * (1 + 1e-14)


def test_what_counts_as_two_steps():
    step, other = ja.dp_sgd(1.0, 0.2, [1, 2, 3]), ja.dp_sgd(2.0, 0.1, 1)
    for run, expected in (
        (step, [False, True, False]),
        (ja.compose(step, other), [True, False, False]),
        (ja.compose(step, ja.dp_sgd(1.0, 0.2, 1)), [True, False, False]),
        (ja.compose(step, ja.Gaussian(3.0)), [False, False, False]),
        (ja.compose(step, ja.RandomizedResponse(0.7)), [False, False, False]),
        (ja.compose(step, ja.PoissonSampled(ja.Laplace(1.0), 0.1)), [False, False, False]),
    ):
        for direction in DIRECTIONS:
            kinds = kinds_of(components(run, "add_or_remove_one", direction))
            assert kinds.answered_by["two_steps"].tolist() == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", [(1e-9, 2e-9), (np.nan, np.nan), ValueError("values")])
def test_a_wrong_bracket_is_not_the_answer(monkeypatch, wrong):
    right = ja.epsilon(ja.dp_sgd(1.0, 0.2, 2), 1e-6, relation="remove_one")

    def broken(parts, *others):
        if isinstance(wrong, Exception):
            raise wrong
        ends = [np.full(parts.mu2.size, end) for end in wrong]
        return Answer(ends[0], ends[0], ends[1])

    monkeypatch.setattr(two_steps, "epsilon", broken)
    monkeypatch.setattr(contour, "LADDER", ())  # else its programs would be compiled for this test alone
    found = ja.epsilon(ja.dp_sgd(1.0, 0.2, 2), 1e-6, relation="remove_one")
    assert found.lower <= right.upper and found.upper >= right.lower and np.isfinite(found.upper)
    assert found.engine != "two_steps"


def test_ndtr_over_its_range():
    """SciPy's ndtr has a relative error of at most 64 + 8 x^2 units of 2^-53; `two_steps._tail` counts no less."""
    x = np.concatenate([np.linspace(-38.0, 9.0, 400), [-1e-300, 0.0, 1e-5]])
    with mpmath.workdps(40):
        for at, value in zip(x, special.ndtr(x), strict=True):
            truth = tail(-mpmath.mpf(float(at)))
            # ndtr is 0 where the truth is below 1e-307
            assert abs(value - truth) <= 2.0**-53 * (64 + 8 * at * at) * truth + mpmath.mpf("1e-307")
