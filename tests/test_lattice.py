"""The lattice engine against closed forms, exact sums, quadrature and the reference table."""

from __future__ import annotations

import math
from itertools import pairwise

import jax
import numpy as np
import pytest
from scipy import optimize, stats
from scipy.special import gammaln, log_ndtr

import jaxacct as ja
from jaxacct.engines import lattice
from jaxacct.engines.backend import job, runner
from jaxacct.engines.lattice_parts import Placed
from jaxacct.kernels import lattice_laws
from jaxacct.kernels.lattice_laws import Cells, cancelled, gaussian_cells, gaussian_nodes, lower_masses, upper_masses
from jaxacct.kernels.lattice_laws import compose as compose_lattices
from jaxacct.mechanisms import (
    ApproximateDP,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    components,
    compose,
    dp_sgd,
    repeat,
)

RELATION = "add_or_remove_one"
SMALL = 2**25
# From the project's reference table: two resolutions of a contour integral agree, and epsilon is correct to 2e-7.
ROWS = [  # noise multiplier, sampling probability, steps, delta, epsilon remove, epsilon add
    (1.0, 0.01, 1000, 1e-5, 1.82823667, 1.41666195),
    (1.0, 0.01, 10000, 1e-5, 6.18771239, 5.61150862),
    (2.0, 0.02, 1500, 1e-5, 1.65376574, 1.55333291),
    (0.6, 1e-4, 100000, 1e-12, 4.10424121, 0.700561685),
    (1.0, 0.01, 1000, 1e-30, 9.34189563, 3.52437641),
    (2.797, 0.000275, 22156, 0.00012, 0.0307883835, 0.0305968503),
]


def deltas(parts, epsilons, **options):
    """One configuration at several eps."""
    at = np.array(epsilons)
    return lattice.deltas(parts.take(np.zeros(at.size, int)), range(at.size), at, **options)


def delta(parts, index, epsilon, **options):
    """One configuration at one eps."""
    return lattice.deltas(parts, [index], np.array([epsilon]), **options)[0]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64():
        yield


@pytest.fixture(params=["numpy", pytest.param("xla", marks=pytest.mark.slow)])
def backend(request):
    with job(1, request.param):
        yield


def symmetric_profile(kind: str, size: float, alpha):
    """H_alpha(P || Q) of the unsampled Gaussian ("g", sigma) or Laplace ("l", b) pair."""
    e = np.log(alpha)
    if kind == "g":
        value = np.exp(log_ndtr(0.5 / size - e * size)) - alpha * np.exp(log_ndtr(-0.5 / size - e * size))
    else:
        value = np.where(np.abs(e) >= 1.0 / size, np.maximum(1.0 - alpha, 0.0), -np.expm1(0.5 * (e - 1.0 / size)))
    return np.where(alpha <= 0, 1.0 - alpha, value)


def one_step(kind: str, size: float, q: float, direction: str, eps):
    """delta(eps) of one Poisson-sampled step, by the hockey-stick identities for mixtures."""
    a = np.exp(eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        if direction == "remove":
            return np.where(a > 1.0 - q, q * symmetric_profile(kind, size, 1.0 + (a - 1.0) / q), 1.0 - a)
        rest = 1.0 - a * (1.0 - q)
        return np.where(rest > 0, rest * symmetric_profile(kind, size, a * q / rest), 0.0)


def step(kind: str, size: float, q: float):
    base = Gaussian(size) if kind == "g" else Laplace(size)
    return PoissonSampled(base, q) if q < 1 else base


def law(kind: str, size: float, q: float, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """Losses and P-masses of one step by piecewise Gauss-Legendre (the Laplace atoms included)."""
    pieces = 160  # the integrand has kinks: 8 pieces of 300 points each would be off by 2e-7
    x, w = np.polynomial.legendre.leggauss(40)
    edge = 1.0 / size
    edges = np.linspace(-11.0, 11.0 + edge, pieces + 1) if kind == "g" else np.linspace(-edge, edge, pieces + 1)
    at = np.concatenate([0.5 * (a + b) + 0.5 * (b - a) * x for a, b in pairwise(edges)])
    weight = np.tile(w * 0.5 * (edges[1] - edges[0]), pieces)
    if kind == "g":
        base, mass = at * edge - 0.5 * edge**2, weight * np.exp(-0.5 * at**2) / math.sqrt(2 * math.pi)
    else:
        base = np.append(at, [-edge, edge])
        mass = np.append(weight * 0.25 * np.exp(-0.5 * (edge + at)), [0.5, 0.5 * math.exp(-edge)])
    ratio = np.log1p(q * np.expm1(base))
    return (ratio, mass * np.exp(ratio)) if direction == "remove" else (-ratio, mass)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow) if row[2] == 100_000 else row for row in ROWS]
)
def test_reference_table(row, direction, backend):
    sigma, q, n, target, remove, add = row
    truth = remove if direction == "remove" else add
    b = lattice.epsilon(components(dp_sgd(sigma, q, n), RELATION, direction), 0, target, target)
    assert b.lower <= truth * (1 + 3e-7) and b.upper >= truth * (1 - 3e-7)
    assert b.status == "ok" and b.upper - b.lower <= 1e-4 * b.upper


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("target", [1e-6, 1e-12, 1e-30])
def test_few_expected_hits_are_narrow(target, direction, backend):
    parts = components(dp_sgd(0.3, 1e-4, 10_000), RELATION, direction)
    b = lattice.epsilon(parts, 0, target, target)
    assert b.status == "ok"
    back = delta(parts, 0, b.estimate, rtol=1e-2)
    assert back.lower <= target * 1.01 and back.upper >= target * 0.99


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    "kind, size, q",
    [("g", 0.3, 1e-4), ("g", 0.3, 1.0), ("g", 5.0, 0.2), ("l", 0.1, 1e-5), ("l", 0.7, 0.3), ("l", 2.0, 1.0)],
)
def test_one_step_closed_form(kind, size, q, direction, backend):
    parts = components(step(kind, size, q), RELATION, direction)
    epsilons = (0.0, 0.1, 3.0)
    for eps, b in zip(epsilons, deltas(parts, epsilons, memory_bytes=SMALL), strict=True):
        truth = float(one_step(kind, size, q, direction, eps))
        assert b.lower <= truth * (1 + 1e-12) + 1e-16 and b.upper >= truth * (1 - 1e-12) - 1e-16
        assert b.upper - b.lower <= 5e-2 * b.upper + 1e-16
        if eps == 0.1 and truth > 1e-12:
            e = lattice.epsilon(parts, 0, truth, truth, memory_bytes=SMALL)
            assert e.lower <= eps * (1 + 1e-9) + 1e-12 and e.upper >= eps * (1 - 1e-9) - 1e-12


def test_tail_of_one_step_to_1e_minus_30():
    parts = components(PoissonSampled(Gaussian(0.5), 1e-3), RELATION, "remove")
    for eps in (2.0, 18.0):
        truth = one_step("g", 0.5, 1e-3, "remove", eps)
        b = delta(parts, 0, eps)
        assert b.lower <= truth * (1 + 1e-11) and b.upper >= truth * (1 - 1e-11)
        assert b.upper - b.lower <= 1e-4 * b.upper
    assert truth < 1e-30


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    "first, second",
    [
        (("g", 0.4, 0.01), ("g", 1.5, 0.3)),
        (("g", 0.8, 0.1), ("l", 0.5, 0.05)),
        (("l", 0.3, 0.2), ("l", 1.1, 1.0)),
    ],
)
def test_two_laws_and_finite_parts(first, second, direction, backend):
    finite = [PoissonSampled(PureDP(0.7), 0.4), repeat(ApproximateDP(0.3, 1e-4), 2)]
    parts = components(compose(step(*first), step(*second), *finite), RELATION, direction)
    loss, mass = law(*second, direction)
    for values, weights, n in zip(parts.finite_loss[0], parts.finite_mass[0], parts.finite_n[0], strict=True):
        for _ in range(int(n)):
            loss = (loss[:, None] + values).ravel()
            mass = (mass[:, None] * weights).ravel()
    for eps, b in zip((0.0, 1.5), deltas(parts, (0.0, 1.5), memory_bytes=2 * SMALL), strict=True):
        truth = mass @ one_step(*first, direction, eps - loss)
        assert b.lower <= truth * (1 + 1e-7) and b.upper >= truth * (1 - 1e-7)
        assert b.upper - b.lower <= 2e-2 * b.upper


@pytest.mark.parametrize("eps, n", [(0.05, 1000), (1.2, 7), (0.3, 100)])
def test_pure_dp_is_the_binomial(eps, n):
    parts = components(repeat(PureDP(eps), n), RELATION, "remove")
    k = np.arange(n + 1)
    log_mass = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    log_mass += k * eps - n * np.log1p(np.exp(eps))
    loss = (2 * k - n) * eps
    for at in (0.0, 0.3 * eps * math.sqrt(n), 3 * eps * math.sqrt(n)):
        truth = float(np.sum(np.exp(log_mass) * np.maximum(-np.expm1(at - loss), 0.0)))
        b = delta(parts, 0, at, rtol=1e-9, memory_bytes=SMALL)
        assert b.lower <= truth * (1 + 1e-11) and b.upper >= truth * (1 - 1e-11)
        assert b.upper - b.lower <= 1e-8 * b.upper


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_sampled_approximate_dp_composed(direction):
    parts = components(repeat(PoissonSampled(ApproximateDP(0.8, 1e-3), 0.1), 6), RELATION, direction)
    loss, mass = np.zeros(1), np.ones(1)
    for _ in range(6):
        loss = (loss[:, None] + parts.finite_loss[0, 0]).ravel()
        mass = (mass[:, None] * parts.finite_mass[0, 0]).ravel()
    truth = float(np.sum(mass * np.maximum(-np.expm1(0.1 - loss), 0.0)))
    b = delta(parts, 0, 0.1, memory_bytes=2**27)
    assert b.lower <= truth * (1 + 1e-12) and b.upper >= truth * (1 - 1e-12)
    assert b.upper - b.lower <= 1e-2 * b.upper


def test_edges():
    bounded = components(repeat(RandomizedResponse(0.6), 3), RELATION, "remove")
    largest = 3 * math.log(1.5)
    assert delta(bounded, 0, largest + 1e-9) == (0.0, 0.0, 0.0, "ok")
    tiny = lattice.epsilon(bounded, 0, 1e-12, 1e-12, memory_bytes=SMALL)
    assert tiny.lower <= tiny.upper <= largest * (1 + 1e-12)
    at_zero = one_step("g", 1.0, 0.1, "remove", 0.0)
    parts = components(dp_sgd(1.0, 0.1, 1), RELATION, "remove")
    assert lattice.epsilon(parts, 0, 1.01 * at_zero, 1.01 * at_zero, memory_bytes=SMALL) == (
        0.0,
        0.0,
        0.0,
        "zero",
    )
    near = lattice.epsilon(parts, 0, 0.999 * at_zero, 0.999 * at_zero, memory_bytes=SMALL)
    assert near.lower > 0.0 and one_step("g", 1.0, 0.1, "remove", near.lower) >= 0.999 * at_zero
    wide = lattice.epsilon(components(dp_sgd(1.0, 0.01, 10_000), RELATION, "remove"), 0, 1e-5, 1e-5, memory_bytes=0)
    assert wide.status == "width" and wide.lower <= 6.18771239 <= wide.upper


def payoff(masses: np.ndarray, losses: np.ndarray, at: np.ndarray) -> np.ndarray:
    """E_P[(1 - e^{eps - L})_+] at each eps."""
    return np.array([np.sum(masses * -np.expm1(np.minimum(eps - losses, 0.0))) for eps in at])


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("h, size", [(0.05, 1.0), (2.0, 1.0), (900.0, 1.0), (0.05, 1e-290), (0.05, 1e-170)])
@pytest.mark.parametrize("seed", range(4))
def test_rough_laws_stay_between_their_lattice_laws(seed, h, size, turned, backend):
    """Some cases have masses of 1e-290 or lattice steps of 900: products of masses, or e^900, leave float64's range."""
    rng = np.random.default_rng(seed)
    nodes, last = 64, 40
    where = np.sort(rng.uniform(0.0, last * h, rng.integers(2, 300)))
    mass = rng.dirichlet(np.full(where.size, 0.2)) * np.exp(-rng.uniform(-8, 8) * where / (20.0 * h)) * size
    cell = np.minimum((where / h).astype(int), last - 1)
    share = np.expm1(cell * h - where) / math.expm1(-h)
    low, high = np.zeros(nodes), np.zeros(nodes)
    np.add.at(low, cell, mass * np.exp(cell * h - where) * np.expm1(where - (cell + 1) * h) / math.expm1(-h))
    np.add.at(high, cell, mass * share)
    cells = Cells(low, high, np.full(nodes, 1e-15), np.zeros(nodes))
    first, end, losses, atoms = 0, last, h * np.arange(nodes), np.zeros(nodes)
    if turned:  # the same law with its losses in descending order, reversed again
        flipped = [np.append(x[:-1][::-1], 0.0) for x in (high, low, cells.eta, cells.whole)]
        cells = Cells(*flipped).reversed()
    run = runner()
    up = np.asarray(run(upper_masses, cells, atoms))
    signed = run(lower_masses, cells, atoms, h, first, end)
    down, missing = cancelled(np.asarray(signed), h)
    at = np.concatenate([np.linspace(-h, 1.2 * last * h, 400), losses])
    assert down.min() >= 0.0 and missing <= 1e-9 * size
    truth, above, below = (payoff(m, x, at) for m, x in ((mass, where), (up, losses), (down, losses)))
    slack = 1e-13 * mass.sum() + missing
    assert np.all(below <= truth + slack) and np.all(truth <= above + slack)
    assert below.max() > 0.0 or truth.max() < 1e-3 * size


def test_debts_are_paid_from_above():
    mass, missing = cancelled(np.array([0.5, -0.2, 0.1, 0.4, -0.01, 0.3]), 0.1)
    np.testing.assert_allclose(mass, [0.5, 0.0, 0.0, 0.3, 0.0, 0.29], rtol=1e-12)
    assert missing == 0.0


def test_a_debt_at_the_top_lowers_the_payoff_to_zero_there():
    signed, h = np.array([0.5, 0.3, 0.1, -0.02]), 0.1
    mass, missing = cancelled(signed, h)
    losses, at = h * np.arange(4), np.linspace(-1.0, 0.4, 57)
    given = np.maximum(payoff(signed, losses, at), 0.0)
    assert missing == 0.0 and mass.min() >= 0.0 and mass.sum() > 0.3
    assert np.all(payoff(mass, losses, at) <= given + 1e-15)


@pytest.mark.parametrize("sigma, q, h", [(2.0, 0.02, 1e-3), (0.3, 1e-4, 1e-2), (50.0, 0.5, 1e-3)])
@pytest.mark.parametrize("remove", [True, False])
def test_gaussian_cells_keep_both_masses(sigma, q, h, remove, backend):
    """Cells keep the mass under N(0, 1), which is Q for remove and P for add, and the mass under the mixture."""
    run, node = runner(), math.log1p(-q) + h * np.arange(4096)
    u = run(gaussian_nodes, sigma, q, 0.0, h, nodes=4096)
    cells = run(gaussian_cells, u, 4000, 1.0 / sigma, node * remove, q * remove, True)
    low, high = np.asarray(cells.low) * np.exp(-node * remove), np.asarray(cells.high)
    masses = low + np.append(0.0, high[:-1]) * np.exp(-node * remove)
    inside = float(np.exp(log_ndtr(float(u[4000]))))
    mean = np.sum(masses * np.exp(node))
    assert abs(masses.sum() / inside - 1) < 1e-12 and float(np.sum(cells.eta * (cells.low + cells.high))) < 1e-12
    assert float(cells.whole.sum()) == 0.0
    assert mean <= 1 + 1e-12 and mean >= inside * (1 - q) - 1e-12


@pytest.mark.parametrize("sigma", [0.02, 1e-3, 1e-6, 1e-12])
def test_no_hit_is_lost_however_large_its_loss(sigma, backend):
    """A hit's loss is about 1250 or more. The old code got its P-mass from its Q-mass, e^-1250 or less, which was 0."""
    q, n = 0.3, 4096
    law = lattice.laws_of(components(dp_sgd(sigma, q, 5), RELATION, "remove"), 0)[0]
    top = 0.5 / sigma**2 + 40.0 / sigma
    for upper in (True, False):
        placed = law.place((math.log1p(-q), top), top / (n - 10), n, upper, runner())
        mass, loss = np.asarray(placed.mass), placed.origin + top / (n - 10) * np.arange(n)
        hits = mass[loss > 0.25 * top].sum() + placed.infinity
        assert (hits >= q) if upper else (0.9 * q <= hits <= q)
        assert hits <= 1.2 * q


@pytest.mark.parametrize("count", [1.0, 3.0, 40.0])
def test_composition_error_bound_holds(count, backend):
    rng = np.random.default_rng(1)
    n, h = 2048, 1e-3
    mass = np.zeros(n)
    mass[:50] = rng.dirichlet(np.ones(50))
    tilt = np.array([[2.0, 3.0, 1.0]])
    composed = runner()(compose_lattices, mass[None], tilt, np.ones(1), np.array([count]), h, 0, True)
    weight = mass.astype(np.longdouble) * np.exp(np.longdouble(2 * h) * np.arange(n))
    weight /= np.exp(np.longdouble(float(composed.log_moments[0, 0])))
    exact = np.ones(1, np.longdouble)
    for _ in range(int(count)):
        exact = np.convolve(exact, weight[:50])
    exact = np.pad(exact, (0, n - exact.size))
    wrong = np.asarray(composed.mass) - exact
    allowed = float(composed.error) + count * 2e-15 * float(np.linalg.norm(exact.astype(float)))
    assert np.linalg.norm(wrong.astype(float)) <= allowed
    assert float(composed.error) < 1e-11


@pytest.mark.parametrize("direction, low, high", [("remove", 149.92632813, 149.92632837), ("add", 149.87499, 149.875)])
def test_a_lattice_as_coarse_as_a_step_stays_sound(direction, low, high):
    """2.8e6 steps of deviation 6e-3 at lattice steps of 4e-3 and 4e-2; low and high from the contour engine.

    Each step overstates its mass by 7e-4. In a window far above 0, the payoff underflows.
    """
    parts = components(dp_sgd(27.94617002489216, 0.1758438099003096, 2824664.0), RELATION, direction)
    d = 1.741173849008626e-19
    for memory in (0, 2**26):
        answer = lattice.epsilon(parts, 0, d, d, rtol=1e-6, memory_bytes=memory)
        assert answer.lower <= high and low <= answer.upper
        assert delta(parts, 0, high, rtol=1e-6, memory_bytes=memory).lower <= d
        assert delta(parts, 0, low, rtol=1e-6, memory_bytes=memory).upper >= d


def test_overstated_mass_compounds():
    placed = Placed(np.ones(1), 0.0, 1.0, 1e6, 0.0, 0.0, 5e-7)
    compounded = math.expm1(1e6 * math.log1p(5e-7))
    assert compounded <= lattice._extra([placed], False) <= compounded * (1.0 + 1e-9)
    assert lattice._extra([placed._replace(deficit=7e-7)], False) == math.inf
    assert lattice._extra([placed._replace(deficit=0.0)], False) < 1e-280


MANY = [
    (repeat(Laplace(10.0), 50), np.linspace(0.0, 6.0, 16)),
    (repeat(RandomizedResponse(0.6), 12), np.linspace(4.0, 0.0, 16)),
    (repeat(PoissonSampled(Laplace(1.0), 0.1), 30), np.linspace(0.0, 5.0, 16)),
]


@pytest.mark.parametrize(("mechanism", "eps"), MANY, ids=["Laplace", "finite", "sampled"])
def test_many_eps_share_compositions(mechanism, eps, monkeypatch):
    """Brackets of many eps meet rtol, overlap those of each eps alone, keep their order, and need few compositions."""
    made, compose_for = [], lattice._composed_for
    monkeypatch.setattr(lattice, "_composed_for", lambda *all_: made.append(1) or compose_for(*all_))
    for direction in ("remove", "add"):
        parts = components(mechanism, RELATION, direction).take(np.zeros(eps.size, int))
        made.clear()
        together = lattice.deltas(parts, range(eps.size), eps, rtol=1e-3)
        assert len(made) <= eps.size / 3
        for place in (4, 12):
            alone = delta(parts, place, float(eps[place]), rtol=1e-3)
            found = together[place]
            assert found.status == "ok"
            assert found.lower <= alone.upper
            assert alone.lower <= found.upper


def test_wide_brackets_share_compositions_on_both_sides(monkeypatch):
    """Where rtol cannot be reached, no eps gets a composition of its own."""
    made, compose_for = [], lattice._composed_for
    monkeypatch.setattr(lattice, "_composed_for", lambda *all_: made.append(1) or compose_for(*all_))
    eps = np.linspace(0.5, 1.5, 24)
    parts = components(repeat(PoissonSampled(Laplace(1.0), 0.1), 30), RELATION, "remove").take(np.zeros(24, int))
    together = lattice.deltas(parts, range(24), eps, rtol=1e-9, memory_bytes=2**24)
    assert len(made) <= 4
    assert {found.status for found in together} == {"width"}
    assert max((found.upper - found.lower) / found.upper for found in together) < 1e-3


def test_rare_high_losses_share_compositions_of_the_best_plan(monkeypatch):
    """A plan for a smaller delta holds rarer losses on coarser cells. If that widens the bracket, the plan is left."""
    made, compose_for = [], lattice._composed_for
    monkeypatch.setattr(lattice, "_composed_for", lambda *all_: made.append(1) or compose_for(*all_))
    eps = np.linspace(0.0145, 0.01455, 7)
    parts = components(dp_sgd(0.9, 1e-6, 1e6), RELATION, "remove").take(np.zeros(7, int))
    together = lattice.deltas(parts, range(7), eps, rtol=1e-3)
    assert len(made) == 1
    assert max((found.upper - found.lower) / found.upper for found in together) < 0.35


def test_rows_of_different_numbers_do_not_share_compositions():
    several = Laplace(np.array([5.0, 10.0, 5.0, 10.0]))
    parts = components(repeat(several, 20), RELATION, "remove")
    eps = np.array([1.0, 1.0, 1.5, 1.5])
    together = lattice.deltas(parts, range(4), eps)
    for place in (1, 2):
        found = together[place]
        alone = delta(components(repeat(Laplace(5.0 + 5.0 * (place % 2)), 20), RELATION, "remove"), 0, eps[place])
        assert max(found.lower, alone.lower) <= min(found.upper, alone.upper)
        assert found.upper - found.lower <= 1e-4 * found.upper


MIXED = {
    "Laplace": repeat(PoissonSampled(Laplace(1.0), 0.05), 200),
    "mixed": compose(repeat(Laplace(5.0), 10), dp_sgd(1.0, 0.01, 1000)),
    "plain": compose(Gaussian(3.0), repeat(PureDP(0.2), 20)),
}


@pytest.mark.parametrize(
    ("kind", "direction", "rtol"),
    [("Laplace", "remove", 1e-2)]
    + [pytest.param(kind, way, 1e-4, marks=pytest.mark.slow) for kind in MIXED for way in ("remove", "add")],
)
def test_numpy_and_xla_agree(kind, direction, rtol):
    parts = components(MIXED[kind], RELATION, direction)
    with job(1, "numpy"):
        ours = lattice.epsilon(parts, 0, 1e-6, 1e-6, rtol=rtol)
    with job(1, "xla"):
        theirs = lattice.epsilon(parts, 0, 1e-6, 1e-6, rtol=rtol)
    assert ours.status == theirs.status
    assert np.all(np.abs(np.subtract(ours[:3], theirs[:3])) <= 1e-9 + 1e-5 * theirs.upper)


@pytest.mark.parametrize("gap", [1.0, 1.2, 1.5, 1.6, 1.99, 2.0, 2.9, 3.1, 700.3])
def test_a_step_fits_a_gap_or_is_the_one_asked_for(gap):
    """If no gap/k with whole k is in [1, 1.5], as for 1.6, the step that was asked for is used. The old code failed."""

    class Law:
        def gaps(self):
            return [(gap, 1.0)]

    step = lattice.common_step(1.0, [Law()])
    assert 1.0 <= step <= 1.5 and (step == 1.0 or abs(gap / step - round(gap / step)) < 1e-9)


def test_a_mass_that_is_no_number_is_not_left_out_of_a_composition():
    """NumPy skips nodes without mass, but NaN at any node makes all moments NaN."""
    mass = np.zeros((1, 64))
    mass[0, 3], mass[0, 10] = 0.5, np.nan
    composed = runner()(compose_lattices, mass, np.array([[0.3, 0.5, 0.1]]), np.ones(1), np.ones(1), 0.1, 0, True)
    assert np.isnan(composed.log_moments).all()


@pytest.mark.slow  # test_false_certificates.py has brackets of little noise
def test_little_noise_is_narrow():
    """Hits of sigma .01 are 100 deviations apart, so that the loss given their number is Gaussian (to e^-700)."""
    q, n, sigma, delta = 0.1, 20, 0.01, 1e-5
    hits = np.arange(1, n + 1)
    mean, deviation = hits * (0.5 / sigma**2 + math.log(q)) + (n - hits) * math.log1p(-q), np.sqrt(hits) / sigma

    def excess(eps):
        z = (eps - mean) / deviation
        given = stats.norm.sf(z) - np.exp(eps - mean + 0.5 * deviation**2 + stats.norm.logsf(z + deviation))
        return stats.binom.pmf(hits, n, q) @ given - delta

    truth = optimize.brentq(excess, 4e4, 5e4, xtol=1e-9)
    found = ja.epsilon(ja.dp_sgd(sigma, q, n), delta, relation="remove_one")
    assert found.lower <= truth * (1 + 1e-9) and found.upper >= truth * (1 - 1e-9) and found.ok
    assert found.upper - found.lower < 1e-5 * truth


def test_few_hits_stop_where_the_width_asked_for_is_reached():
    found = ja.epsilon(ja.dp_sgd(1.0, 0.01, 5), 0.01, relation="remove_one")
    assert found.ok and 6.132265e-4 <= found.upper <= 6.1326e-4 and found.lower <= 6.1323195e-4


def test_lengths_beyond_the_quick_ones_are_for_what_is_asked():
    laws = lattice.laws_of(components(dp_sgd(1.0, 0.01, 5), RELATION, "remove"), 0)

    def following(length, width, wanted=(1e-5, 1e-4)):
        return lattice._next_length(lattice.Case(laws, laws, *wanted, 2**30, None), [(length, width)])

    assert following(2**15, 2e-4) == following(2**15, 6e-3) == 2**18  # 2^18 nodes reach rtol, or `enough`
    assert following(2**15, 9e-3) == 2**19 and following(2**18, 9e-5) == 0
    # no lattice that fits into the memory narrows 5 % to 2e-4, but 2^20 nodes narrow it to 1e-2
    assert following(2**18, 0.05) == 0 and following(2**18, 0.05, (1e-3, 1e-2)) == 2**20
    assert following(2**18, 1e-3, (1e-10, 1e-9)) == 2**21  # as narrow as the memory allows


def test_narrow_panels_need_fewer_points(monkeypatch):
    law = lattice.laws_of(components(dp_sgd(1.0, 0.01, 5), RELATION, "remove"), 0)[0]
    where = (math.log1p(-0.01), 7.0), 7.1 / 2**18, 2**18, True, runner()
    placed = law.place(*where)
    monkeypatch.setattr(lattice_laws, "LONG", 2**30)
    exact = law.place(*where)
    np.testing.assert_allclose(placed.mass, exact.mass, rtol=1e-6, atol=1e-20)
    assert abs(placed.mass.sum() - exact.mass.sum()) < 1e-13


def test_a_trade_off_function_of_nearly_an_atom_is_narrow():
    found = ja.profile(ja.dp_sgd(0.1, 0.01, 100)).tradeoff(0.1)
    assert found.upper - found.lower < 1e-6 and found.ok
    assert abs(found.estimate - (0.9 - (1 - 0.99**100))) < 1e-4  # a hit goes unnoticed with probability Phi(-5)


@pytest.mark.parametrize(
    ("run", "delta", "longest"),
    [
        ((12.3, 0.01, 1000), 1e-288, 0),
        pytest.param((0.1, 1e-9, 1e9), 0.01, 2**18, marks=pytest.mark.slow),
        pytest.param((10.0, 1e-9, 1e6), 1e-20, 2**18, marks=pytest.mark.slow),
    ],
)
def test_lattices_that_cannot_help_are_not_made(run, delta, longest, monkeypatch):
    """Lattices stay short where delta is below 1e-290 a step, the width stalls, or the first width predicts nothing."""
    lengths = [0]
    make = lattice.sides_of
    monkeypatch.setattr(lattice, "sides_of", lambda *given: (lengths.append(given[2]), make(*given))[1])
    found = ja.epsilon(ja.dp_sgd(*run), delta, engine="auto" if longest else "lattice")
    assert max(lengths) == longest and found.status == "width" and 0.0 < found.lower < found.upper < np.inf


@pytest.mark.parametrize("edge", [0.0, 1e-33], ids=["noise", "plateau"])
@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("guess", [1e-3, 40.0, 1e4])
def test_crossings_of_staircases_are_found_in_few_evaluations(upper, edge, guess, monkeypatch):
    """If nearly all mass lies at few losses, delta falls in steep steps, and Newton's method leaps beyond the last."""
    asked = []

    def evaluate(side, eps):
        asked.append(eps)
        return 0.5 * math.exp(-eps / 1e3) if eps < 40.0 else 1e-9 if eps < 50.0 else edge

    monkeypatch.setattr(lattice, "evaluate", evaluate)
    side = lattice.Side(*[None] * len(lattice.Side._fields))._replace(theta=0.01, upper=upper)
    low, high = lattice.crossing(side, 1e-6, guess, 1e-6)
    assert low <= 40.0 <= high <= low + 2e-6
    low, high = lattice.crossing(side, 1e-20, guess, 1e-6)
    assert low <= 50.0 <= high <= low + (0.05 if edge == 0.0 else 2e-6)
    assert len(asked) < 90


@pytest.mark.parametrize("seed", [3, 4, 5, 6, 7, 8])
def test_a_search_that_meets_a_negative_lower_bound_goes_on(seed):
    """Far below the eps of a lattice, its lower bound of delta is negative, and the old search ended there."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3))
    finite = ja.FiniteOutput(p, q)
    for mechanism in (
        ja.PoissonSampled(ja.compose(finite, ja.FiniteOutput([0.7, 0.3], [0.6, 0.4])), 0.01),
        ja.compose(finite, ja.Laplace(rng.uniform(0.5, 5.0))),
    ):
        found = ja.epsilon(mechanism, 10.0 ** rng.uniform(-6.0, -3.0), relation="remove_one")
        assert found.status == "ok" and found.upper > 0.0
