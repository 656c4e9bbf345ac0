"""Little noise: against quadrature by mpmath, the other engines, and the moments' quadrature."""

import mpmath as mp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accounting.dispatch import kinds_of
from jaxacct.engines import closed_form, hit_counts, lattice, loss_moments, two_steps
from jaxacct.mechanisms import components
from jaxacct.selection import Geometric, select

DIRECTIONS = ("remove", "add")


def parts_of(run, direction):
    return components(run, "add_or_remove_one", direction)


def above(x):
    """Pr[N(0, 1) > x]."""
    return mp.erfc(x / mp.sqrt(2)) / 2


def one_step(direction, s, q, eps):
    """H_{e^eps}(P || Q) of one step, at any real eps. The set where the loss exceeds eps is an interval of outputs."""
    odds = mp.e ** (eps if direction == "remove" else -eps)
    if odds <= 1 - q:  # all outputs have mix > odds
        return 1 - mp.e**eps if direction == "remove" else mp.mpf(0)
    edge = mp.log((odds - 1 + q) / q) / s + s / 2
    mixed, plain = (1 - q) * above(edge) + q * above(edge - s), above(edge)
    if direction == "remove":
        return mixed - mp.e**eps * plain
    return 1 - plain - mp.e**eps * (1 - mixed)


def two(direction, sigma, q, eps):
    """Delta of two steps: the mean of the second step's profile over the first step's output, by quadrature."""
    s, q = 1 / mp.mpf(sigma), mp.mpf(q)

    def inside(x):
        mix = 1 - q + q * mp.e ** (s * x - s * s / 2)
        loss = mp.log(mix) if direction == "remove" else -mp.log(mix)
        return mp.npdf(x) * (mix if direction == "remove" else 1) * one_step(direction, s, q, eps - loss)

    # the integrand bends where the first step's loss is eps
    bend = ((eps if direction == "remove" else 0) - mp.log(q)) / s + s / 2
    nodes = {-12, -6, 0, 6, s / 2 - 4, s / 2, s / 2 + 4, s - 6, s, s + 6, s + 12, bend - 0.3, bend, bend + 0.3}
    return mp.quad(inside, sorted(nodes), maxdegree=6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "q", "eps"), [(0.03, 0.01, 1e-3), (0.03, 1e-5, 500.0), (0.04, 0.3, 0.5)])
def test_two_steps_against_quadrature(direction, sigma, q, eps):
    parts = parts_of(ja.dp_sgd(sigma, q, 2), direction)
    assert hit_counts.reach(parts).answers.all()
    found = hit_counts.delta(parts, np.array([eps]))
    with mp.workdps(25):
        exact = two(direction, sigma, q, mp.mpf(eps))
    assert found.lower[0] <= exact <= found.upper[0]
    assert found.upper[0] - found.lower[0] <= 1e-9 * found.upper[0] + 1e-30


@np.errstate(all="ignore")
def test_against_other_engines():
    """Other engines answer for one step and for two. The lattice answers for more, with or without other Gaussians."""
    rng, compared = np.random.default_rng(0), 0
    while compared < 40:
        sigma, q = 10 ** rng.uniform(-3, -1.2), 10 ** rng.uniform(-9, -0.01)
        n, direction = int(rng.choice([1, 2, 3, 30, 10**4, 10**9])), DIRECTIONS[rng.integers(2)]
        run = ja.dp_sgd(sigma, q, n)
        beside = n > 2 and rng.random() < 0.5
        run = ja.compose(run, ja.Gaussian(10 ** rng.uniform(-1, 1.5))) if beside else run
        parts = parts_of(run, direction)
        if not hit_counts.reach(parts).answers[0]:
            continue
        eps = np.array([rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 1) / sigma**2, -n * np.log1p(-q)])])
        found = hit_counts.delta(parts, eps)
        if n == 1:
            other = closed_form.delta_of_one_step(parts.gauss_sigma[:, 0], parts.gauss_q[:, 0], parts.sign > 0, eps)
        elif n == 2:
            other = two_steps.delta(parts, eps)
        elif compared % 5:  # the lattice takes .3 seconds
            continue
        else:
            bounds = ja.delta(run, eps, relation=f"{direction}_one", engine="lattice")
            other = bounds.lower, bounds.estimate, bounds.upper
        low, high = other[0][0], other[2][0]
        assert found.lower[0] <= found.upper[0], (sigma, q, n, direction, eps)
        assert found.lower[0] <= high and low <= found.upper[0], (sigma, q, n, direction, eps)
        compared += 1


@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.5])
@pytest.mark.parametrize("n", [3.0, 1e3, 1e9])
def test_answers_are_narrow_and_agree(q, n):
    """Epsilon is found from delta: delta at the two ends of epsilon encloses the target."""
    if n * q > 1e4:
        assert not hit_counts.reach(parts_of(ja.dp_sgd(0.01, q, n), "remove")).answers.any()
        return
    target = np.array([1e-2, 1e-6, 1e-30, 1e-200])
    found = ja.epsilon(ja.dp_sgd(0.01, q, n), target)
    assert np.all(found.ok) and np.all(found.upper - found.lower <= 1e-7 * found.upper)
    some = found.upper > 0.0
    for direction in DIRECTIONS:
        parts = parts_of(ja.dp_sgd(np.full(4, 0.01), q, n), direction)
        assert np.all(hit_counts.delta(parts, found.upper).lower <= target)
    parts = parts_of(ja.dp_sgd(np.full(4, 0.01), q, n), "remove")
    assert np.all(hit_counts.delta(parts, found.lower * (1.0 - 1e-12)).upper[some] >= target[some])


def test_which_rows_are_answered():
    little = ja.dp_sgd([0.01, 0.03, 0.2], 0.01, 100)
    assert hit_counts.reach(parts_of(little, "remove")).answers.tolist() == [True, True, False]
    assert hit_counts.reach(parts_of(little, "remove")).settles.tolist() == [True, False, False]
    beside = ja.compose(ja.dp_sgd(0.01, 0.01, 100), ja.Gaussian(3.0))
    assert kinds_of(parts_of(beside, "add")).answered_by["hit_counts"].all()
    for more in (ja.Laplace(3.0), ja.ApproximateDP(1.0, 1e-6), ja.dp_sgd(0.02, 0.01, 100)):
        assert not hit_counts.reach(parts_of(ja.compose(ja.dp_sgd(0.01, 0.01, 100), more), "remove")).answers.any()


@pytest.mark.parametrize(("other", "n", "eps"), [(1 / 0.099, 355, 1e-3), (1 / 0.08, 300, 0.2), (100.0, 340, 1e-3)])
def test_gaussians_of_much_noise_beside_little(other, n, eps):
    """Below the largest loss of the sampled steps eps is negative for the Gaussian: quadrature was wrong by 5e-10."""
    run = ja.compose(ja.dp_sgd(0.005, 0.01, n), ja.Gaussian(other))
    found = ja.delta(run, eps, relation="add_one")
    with mp.workdps(40):
        mu, at = 1 / mp.mpf(other), mp.mpf(eps) + n * mp.log1p(-mp.mpf(0.01))
        exact = above(at / mu - mu / 2) - mp.e**at * above(at / mu + mu / 2)
    assert found.engine == "hit_counts" and found.lower <= exact <= found.upper and found.ok
    assert found.upper - found.lower <= 1e-9 * found.upper


@pytest.mark.parametrize(
    ("sigma", "q", "n", "fpr"),
    [(0.0884898, 7.208435e-6, 243, 0.0128739), (0.0497314, 5.599239e-4, 1184, 4.817e-7), (0.0573, 1.8e-4, 197, 0.5299)],
)
def test_wide_counts_do_not_keep_error_rates_from_lattices(sigma, q, n, fpr):
    assert ja.profile(ja.dp_sgd(sigma, q, n)).true_positive_rate(fpr).ok


def test_more_noise_is_answered_by_others():
    """The chance that an output misleads widens the bracket of a small delta."""
    run = ja.dp_sgd(0.05, 0.01, 100)
    wide = hit_counts.delta(parts_of(run, "remove"), np.array([3000.0]))
    found = ja.delta(run, 3000.0)
    assert wide.upper[0] > 1.5 * wide.lower[0]
    assert found.engine != "hit_counts" and found.ok
    assert wide.lower[0] <= found.upper and found.lower <= wide.upper[0]
    assert ja.delta(run, 600.0).engine == "hit_counts"


def test_no_lattice_is_asked_for_little_noise(monkeypatch):
    """A selection over such a base took 15 CPU seconds, most of them for lattices and quadratures."""

    def refuse(*_, **__):
        raise AssertionError("a lattice was asked")

    for name in ("epsilon", "deltas"):
        monkeypatch.setattr(lattice, name, refuse)
    run = ja.dp_sgd(0.01, 0.001, 10)
    assert ja.epsilon(select(run, Geometric(0.1)), 1e-6).lower > 1e4
    assert ja.profile(run).tradeoff(0.1).ok and ja.profile(run).gdp_mu().ok


def moment(sigma, q, power):
    s, q = 1 / mp.mpf(sigma), mp.mpf(q)
    modes = [0, s / 2, s, power * s]
    nodes = sorted({float(mode + move) for mode in modes for move in (-12, -4, 0, 4, 12)} | {-40.0, float(s) + 40.0})
    inside = lambda x: mp.npdf(x) * (1 - q + q * mp.e ** (s * x - s * s / 2)) ** power
    return mp.log(mp.quad(inside, nodes, maxdegree=5))


@pytest.mark.parametrize(("sigma", "q"), [(0.02, 1e-6), pytest.param(0.05, 0.3, marks=pytest.mark.slow)])
def test_moments_of_little_noise(sigma, q):
    power = np.array([1.0, 1.001, 1.5, 3.0, 7.0, -0.01, -1.0, -5.0])
    with np.errstate(all="ignore"):
        found = loss_moments._little_noise(np.full(8, sigma), np.full(8, q), power, power - 1.0)
    with mp.workdps(25):
        exact = [moment(sigma, q, mp.mpf(p)) for p in power.tolist()]
    assert all(low <= truth <= high for low, truth, high in zip(found.low, exact, found.high, strict=True))
    assert np.all(found.high - found.low <= 1e-9 * np.abs(found.high) + 1e-20)


def test_moments_at_the_given_order():
    """The old code rounded 1 + c. This moved the moment by more than its bracket's width."""
    sigma, q, c = 0.029014440292751836, 0.028704848514787152, 0.00147716730428292
    found = loss_moments.log_moments(parts_of(ja.dp_sgd(sigma, q, 1), "remove"), np.array([c]))
    with mp.workdps(30):
        exact = moment(sigma, q, 1 + mp.mpf(c))
    assert found.low[0] <= exact <= found.high[0]


@np.errstate(all="ignore")
def test_moments_of_little_noise_against_trapezoids():
    rng = np.random.default_rng(1)
    sigma, q, c = 10 ** rng.uniform([[-3], [-9], [-3]], [[np.log10(0.05)], [-0.003], [5]], (3, 200))
    power = np.where(rng.random(200) < 0.6, c + 1.0, -c)
    one = loss_moments._little_noise(sigma, q, power, power - 1.0)
    other = loss_moments._by_trapezoids(sigma, q, power)
    assert np.all(one.low <= one.high) and np.all(one.low <= other.high) and np.all(other.low <= one.high)
