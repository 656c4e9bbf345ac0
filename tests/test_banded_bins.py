"""Balls in bins with noise of two bands: brackets against integrals, draws and finer lattices."""

import itertools

import mpmath as mp
import numpy as np
import pytest
from helpers import refusal
from scipy import integrate, special

import jaxacct as ja
from jaxacct import interop, strategies
from jaxacct.kernels.contour import banded_bins as kernel
from jaxacct.kernels.contour.allocation import losses_for
from jaxacct.mechanisms import matrix_mechanism
from jaxacct.mechanisms.matrix_mechanism import normals_of
from jaxacct.strategies import BallsInBins, Banded, ColumnNormalised, Identity, Toeplitz

HALF = Toeplitz((2 / 5**0.5, 1 / 5**0.5), 50)
"""c ~ (1, 1/2)."""
COLUMNS = np.random.default_rng(5).uniform(0.1, 1.0, (2, 200))
"""Entries of a matrix of two bands."""


def matrix(strategy):
    n, dense = strategy.steps, np.zeros((strategy.steps,) * 2)
    if isinstance(strategy, ColumnNormalised):
        for lag, row in enumerate(strategy.entries):
            dense[np.arange(lag, n), np.arange(n - lag)] = row[: n - lag]
        return dense
    for lag, entry in enumerate(strategy.column):
        dense[np.arange(lag, n), np.arange(n - lag)] = entry
    return dense


def drawn(strategy, noise, bins, eps, draws, seed=0):
    """Means of draws of delta_remove(eps) and of delta_add(eps), each with its standard error.

    The draws are exact: each uses the likelihood ratio of all rows of C X + Z.

    All contributions are parallel. Their signs make the products of neighbouring columns positive.
    """
    dense, rng = matrix(strategy), np.random.default_rng(seed)
    dense = dense * np.cumprod(np.append(1.0, np.where(np.diag(dense, -1) * np.diag(dense)[1:] < 0.0, -1.0, 1.0)))
    means = np.array([dense[:, j::bins].sum(1) for j in range(bins)]) / noise
    half, sums, squares = 0.5 * np.square(means).sum(1), np.zeros(2), np.zeros(2)
    for begin in range(0, draws, 25_000):
        many = min(25_000, draws - begin)
        ratio = np.exp(rng.standard_normal((many, strategy.steps)) @ means.T - half).mean(1)
        values = np.maximum(0.0, [ratio - np.exp(eps), 1.0 - np.exp(eps) * ratio])
        sums, squares = sums + values.sum(1), squares + np.square(values).sum(1)
    mean = sums / draws
    return mean, np.sqrt((squares / draws - mean**2) / draws)


def cases(count):
    """Settings with one or more epochs (the last may be cut), entries of either sign, and equal or unequal columns."""
    rng = np.random.default_rng(11)
    for case in range(count):
        bins = int(rng.integers(2, 9))
        n = int(bins * rng.integers(1, 4) + (rng.integers(0, bins) if case % 3 else 0))
        first = tuple(np.r_[1.0, rng.normal(0.0, 0.6)])
        strategy = ColumnNormalised(2, bins) if case % 5 == 4 else Toeplitz(first, n)
        noise = float(rng.uniform(0.7, 2.0) * np.sqrt(strategy.steps / bins))
        yield strategy, noise, bins, float(rng.uniform(0.1, 1.0)), case


def agree(strategy, noise, bins, eps, case, draws, widths):
    run = ja.MatrixMechanism(strategy, noise, BallsInBins(bins))
    mean, error = drawn(strategy, noise, bins, eps, draws, case)
    for relation, value, off in zip(("remove_one", "add_one"), mean, error, strict=True):
        found = ja.delta(run, eps, relation=relation)
        assert found.kind == "certified" and found.upper - found.lower <= 1e-4 * found.upper
        assert found.lower - widths * off <= value <= found.upper + widths * off, (case, relation, found, value, off)


def test_the_reference_of_two_million_draws():
    run = ja.MatrixMechanism(HALF, 1.0, BallsInBins(50))
    remove, add = (ja.delta(run, 0.2, relation=r) for r in ("remove_one", "add_one"))
    np.testing.assert_allclose([remove.estimate, add.estimate], [0.0268724, 0.0242256], rtol=5e-6)
    for found in (remove, add):
        assert found.kind == "certified" and found.ok and found.upper - found.lower < 1e-6 * found.upper


@pytest.mark.parametrize("eps", [0.1, 1.0, 2.5])
def test_two_bins_by_one_integral(eps):
    """Given the loss of bin 0, the other bin's is normal: a Black-Scholes price is averaged."""
    strategy, noise = Toeplitz((1.0, -0.7), 2), 1.3
    (a, b), cut = np.array([1.0, 0.7]) / noise, 1.0 / noise
    size = np.hypot(a, b)
    slope, rest = b * cut / size, cut * np.sqrt(1.0 - (b / size) ** 2)

    def call(u):
        mean, strike = np.exp(slope * u - 0.5 * slope**2), 2.0 * np.exp(eps) - np.exp(size * u - 0.5 * size**2)
        if strike <= 0.0:
            return mean - strike
        d = np.log(mean / strike) / rest
        return mean * special.ndtr(d + 0.5 * rest) - strike * special.ndtr(d - 0.5 * rest)

    price = lambda u: 0.5 * call(u) * np.exp(-0.5 * u * u) / np.sqrt(2.0 * np.pi)
    knee = (np.log(2.0 * np.exp(eps)) + 0.5 * size**2) / size
    exact = sum(integrate.quad(price, *ends, epsabs=1e-15, limit=200)[0] for ends in ((-12, 0), (0, knee), (knee, 14)))
    found = ja.delta(ja.MatrixMechanism(strategy, noise, BallsInBins(2)), eps, relation="remove_one")
    assert found.lower - 1e-13 <= exact <= found.upper + 1e-13
    assert found.upper - found.lower < 1e-8


def test_the_likelihood_ratio_draws_the_same():
    agree(*[*cases(4)][3], 25_000, 5.0)


@pytest.mark.slow
def test_the_likelihood_ratio_draws_the_same_ten_million_times():
    """All 40 answers agree within 4.3 standard errors, which is a confidence of 99.9 % by Bonferroni."""
    for case in cases(20):
        agree(*case, 10_000_000, 4.3)


def test_one_band_is_random_allocation():
    run = ja.MatrixMechanism(Identity(steps=60), 2.0, BallsInBins(20))
    same = ja.RandomAllocation(ja.Gaussian(2.0 / 3**0.5), 20)
    for relation in ("zero_out", "add_one"):
        mine, theirs = (ja.epsilon(x, 1e-5, relation=relation) for x in (run, same))
        np.testing.assert_allclose([mine.lower, mine.upper], [theirs.lower, theirs.upper], rtol=1e-9)
        assert mine.kind == theirs.kind == "certified"
    # one bin is a Gaussian
    uneven = ColumnNormalised(1, 3, diagonals=COLUMNS[:1, :3])
    run, alone = ja.MatrixMechanism(uneven, 1.0, BallsInBins(1)), ja.Gaussian(1.0 / np.linalg.norm(uneven.entries))
    for ask, given in ((ja.epsilon, 1e-5), (ja.delta, 1.0)):
        mine, theirs = ask(run, given), ask(alone, given)
        np.testing.assert_allclose([mine.lower, mine.upper], [theirs.lower, theirs.upper], rtol=1e-9)
    # the transfer operator says the same
    plain = kernel.Profile(normals_of(Toeplitz((1.0, 1e-12), 20), 20, 2.0 / 3**0.5))
    np.testing.assert_allclose(plain.delta(1.0, np.array([0.7]))[1, 0], ja.delta(same, 0.7).estimate, rtol=1e-7)


def test_epsilon_and_delta_are_inverse():
    run = ja.MatrixMechanism(Toeplitz(HALF.column[:2], 8), 1.0, BallsInBins(8))
    found = ja.epsilon(run, 1e-5)
    assert found.ok and found.upper - found.lower < 1e-4 * found.upper
    assert ja.delta(run, found.upper, rtol=1e-2).lower <= 1e-5 <= ja.delta(run, found.lower, rtol=1e-2).upper


def test_more_shared_noise_between_bins_costs_more():
    """Kahane: with the norms of the columns fixed, delta grows with the products of neighbours."""
    deltas = []
    for angle in (0.1, np.pi / 4):
        run = ja.MatrixMechanism(Toeplitz((np.cos(angle), np.sin(angle)), 4), 1.0, BallsInBins(4))
        deltas.append(ja.delta(run, 0.5, relation="remove_one", rtol=1e-2))
    assert deltas[0].upper < deltas[1].lower


def test_contributions_that_are_not_parallel_or_adapt_cost_less():
    """Three bins whose directions turn with the outputs leak less, by draws of the exact likelihood ratio."""
    rng, c, draws, eps = np.random.default_rng(3), np.array([0.8, 0.6]), 50_000, 0.3
    ratio, before = np.ones((3, draws)), np.zeros((2, draws))
    angle = np.zeros(draws)
    for step in range(3):
        now = np.array([np.cos(angle), np.sin(angle)])
        row = rng.standard_normal((2, draws))
        for j, mean in ((step, c[0] * now), (step - 1, c[1] * before)):
            if j >= 0:
                ratio[j] *= np.exp((row * mean).sum(0) - 0.5 * (mean * mean).sum(0))
        before, angle = now, angle + 1.5 * np.sign(row[0]) + 0.5 * row[1]
    mixed = ratio.mean(0)
    run = ja.MatrixMechanism(Toeplitz(tuple(c), 3), 1.0, BallsInBins(3))
    for values, relation in ((mixed - np.exp(eps), "remove_one"), (1.0 - np.exp(eps) * mixed, "add_one")):
        seen = np.maximum(values, 0.0)
        assert seen.mean() + 4.0 * seen.std() / draws**0.5 < ja.delta(run, eps, relation=relation, rtol=1e-3).lower


@pytest.mark.parametrize("less", [False, True])
@pytest.mark.parametrize(
    "strategy, bins, noise",
    [(HALF, 50, 1.0), (Toeplitz((1.0, 0.8), 5), 3, 4.0), (Banded(2, 6), 6, 0.6), (Banded(2, 60), 60, 1.0)],
)
def test_bounds_cover_what_a_coarse_lattice_is_off_by(strategy, bins, noise, less):
    """The bounds hold at six points for every path of `paths`, some of which turn too little or too much."""
    law = normals_of(strategy, bins, noise)
    decay = kernel.decay_of(law, np.geomspace(0.1, 500.0, 40) / law.deviation)
    z = np.array([2.0, 3.0 + 4.0j, 10.0 + 30.0j, 1.0 + 15.0j, 15.0j - 1.0, 40.0j - 9.0]) * min(
        1.0, 0.25 / law.deviation
    )
    z = 0.49 * z / np.abs(z) * np.geomspace(1e-3, 1.0, 6) if less else z
    fine = kernel.lattice_for(law, 110.0)
    (best,) = kernel.pieces(law, decay, z, np.zeros(z.size), -np.inf, [fine], less)
    exact, log_error = kernel.transform(law, fine, z, best.path), best.log_error
    wedge, tight = kernel.Wedge.around(z, np.arange(z.size)), []
    for bend, (nats, reach) in itertools.product(kernel.WINDOWS, ((12.0, 5.0), (34.0, 7.0), (60.0, 9.0))):
        errors = kernel.Errors(law, kernel.lattice_for(law, nats, reach, *bend))
        for path in kernel.paths(errors, wedge, less):
            assert np.all(path.less == less)
            log = errors.log_error(decay, wedge, path)[0]
            seen = log < 2.0
            found = kernel.transform(law, errors.lattice, z[seen], kernel.Path(*(each[seen] for each in path)))
            off, log, rest = np.abs(found - exact[seen]), log[seen], np.exp(log_error[seen])
            assert np.all(off <= np.exp(log) + rest)
            tight += (log - np.log(off + 1e-300))[off > 10.0 * rest].tolist()
    assert min(tight) < 18.0  # the bounds are not vacuous
    x = decay.x[1::4]
    straight = kernel.Path(*np.outer([0.0, -np.inf, 1.0, 1.0, 0.0], np.ones(x.size)))
    real = kernel.transform(law, fine, x + 0j, straight).real
    assert np.all(np.log(real) <= decay.log[1::4])


@pytest.mark.parametrize(
    ("strategy", "bins"),
    [
        (HALF, 50),
        (Toeplitz((1.0, 0.8), 7), 5),
        pytest.param(Toeplitz((1.0, 0.8), 36), 12, marks=pytest.mark.slow),  # 10 CPU seconds
    ],
)
def test_a_lattice_with_a_coarse_left_part_gives_the_same(strategy, bins):
    """Psi by equal steps, by larger steps on the left, and as Psi - 1 agree; so does Psi - 1 where it is nearly -z."""
    law, z = normals_of(strategy, bins, 1.3), np.array([0.3, 0.05 + 0.2j, 0.7 * np.exp(1.2j), 1e-5 + 1e-5j])
    parts = np.array([0.0, 0.0, 0.5, 0.0]), np.array([-np.inf, -np.inf, 2.0, -np.inf]), np.ones(4), np.full(4, 0.3)
    for bend in kernel.WINDOWS:
        lattice = kernel.lattice_for(law, 110.0, 9.0, *bend)
        whole, rest = (
            kernel.transform(law, lattice, z, kernel.Path(*parts, np.full(4, less))) for less in (False, True)
        )
        np.testing.assert_allclose(rest[:3], whole[:3] - 1.0, rtol=1e-13)
        second = -z[3] + 0.5 * z[3] ** 2 * (1.0 + law.deviation**2)
        assert abs(rest[3] - second) < 1e-8 * abs(z[3])


def test_complex_expm1_is_off_by_less_than_the_bound_counts():
    """`banded_bins` counts 6 units of 2^-53 for e^v - 1, relatively, also where v is tiny."""
    rng = np.random.default_rng(0)
    v = 10.0 ** rng.uniform(-12.0, 1.5, 20_000) * np.exp(1j * rng.uniform(0.0, 2.0 * np.pi, 20_000))
    x, y = v.real.astype(np.longdouble), v.imag.astype(np.longdouble)
    exact = np.expm1(x) * np.cos(y) - 2.0 * np.sin(y / 2.0) ** 2 + 1j * np.exp(x) * np.sin(y)
    assert np.all(np.abs(np.expm1(v) - exact) <= 6.0 * 2.0**-53 * np.abs(exact))


def test_sums_of_differences_round_no_more_than_their_bound():
    """For every |z|, Psi - 1 in float64 is compared with the same sums in extended precision."""
    law = normals_of(Toeplitz((1.0, 0.8), 7), 5, 1.3)
    lattice, angles = kernel.lattice_for(law, 12.0, 5.0), np.array([0.3, 1.2])
    s = lattice.nodes()[0].astype(np.longdouble)
    for size in (1e-6, 1e-3, 0.1, 0.5):
        z = size * np.exp(1j * angles)
        path = kernel.Path(np.zeros(2), np.full(2, -np.inf), np.ones(2), np.full(2, 0.3), np.ones(2, bool))
        found = kernel.transform(law, lattice, z, path)
        weight = np.exp(-s * s / 2)
        weight /= weight.sum()
        for one, mine in zip(z.tolist(), found.tolist(), strict=True):
            product = None
            for a, b in zip(law.first.tolist(), law.second.tolist(), strict=True):
                a, b = np.longdouble(a), np.longdouble(b)
                size_of = np.exp(a * s - a * a / 2)[:, None] * np.exp(b * s - b * b / 2) / law.count
                step = np.exp(-np.clongdouble(one) * size_of) * weight
                product = step if product is None else product @ step
            exact = complex(np.trace(product) - 1)
            assert abs(mine - exact) < 300 * 2.0**-53 * abs(exact) + 1e-18 * 20


@pytest.mark.parametrize(
    "case", [case if case in (3, 13, 18) else pytest.param(case, marks=pytest.mark.slow) for case in range(20)]
)
def test_small_deltas_have_narrow_brackets(case):
    """At delta = 1e-8 brackets of delta are at most 1e-4 wide, relatively, in both directions."""
    strategy, noise, bins, _, _ = [*cases(20)][case]
    run = ja.MatrixMechanism(strategy, noise, BallsInBins(bins))
    for relation in ("remove_one", "add_one"):
        eps = ja.epsilon(run, 1e-8, relation=relation)
        assert eps.kind == "certified" and eps.ok and eps.upper - eps.lower <= 2e-5 * eps.upper
        found = ja.delta(run, eps.estimate, relation=relation)
        assert found.ok and found.upper - found.lower <= 1e-4 * found.upper
        assert found.lower * 0.999 <= 1e-8 <= found.upper * 1.001


def test_every_point_of_a_line_gets_one_lattice_and_its_bound_holds():
    """Points far out get coarse lattices. Bounds hold against a finer lattice, and their sum is at most 3 e^goal."""
    law = normals_of(Toeplitz((1.0, 0.8), 7), 5, 1.3)
    decay = kernel.decay_of(law, np.geomspace(0.1, 500.0, 40) / law.deviation)
    z = 3.0 + 1j * np.arange(0.0, 40.0)
    weight, goal = -2.0 * np.log(np.abs(z)), -16.0
    lattices = [kernel.lattice_for(law, nats) for nats in (12.0, 20.0, 35.0, 60.0, 90.0)]
    found = list(kernel.pieces(law, decay, z, weight, goal, lattices, False))
    assert sorted(np.concatenate([piece.at for piece in found]).tolist()) == list(range(40))
    assert sum(piece.at.size > 0 for piece in found) >= 2
    fine = kernel.lattice_for(law, 110.0)
    (best,) = kernel.pieces(law, decay, z, weight, -np.inf, [fine], False)
    total = 0.0
    for piece in found:
        some = np.arange(0, piece.at.size, 5)
        points, own, finest = piece.at[some], kernel.Path(*np.array(piece.path)[:, some]), np.array(best.path)
        exact = kernel.transform(law, fine, z[points], kernel.Path(*finest[:, points]))
        off = np.abs(kernel.transform(law, piece.lattice, z[points], own) - exact)
        assert np.all(off <= np.exp(piece.log_error[some]) + np.exp(best.log_error[points]))
        total += float(np.sum(np.exp(piece.log_error + weight[piece.at])))
    assert total <= 3.0 * np.exp(goal)


def test_a_contour_keeps_the_error_of_each_of_its_terms(monkeypatch):
    """A term is factor Psi(z), and its error is |factor| times the error of Psi(z), also where Psi(z) is small."""
    law, seen, pieces = normals_of(Toeplitz((1.0, 0.8), 7), 5, 1.3), [], kernel.pieces
    monkeypatch.setattr(kernel, "pieces", lambda *given: seen.extend(pieces(*given)) or seen)
    decay = kernel.decay_of(law, np.geomspace(0.1, 500.0, 40) / law.deviation)
    found, _ = kernel.contour(law, decay, 1.5, -20.0, 0.0, 1e12, False)
    assert np.concatenate([piece.at for piece in seen]).size == found.z.size
    for piece in seen:
        size = np.abs(kernel.transform(law, piece.lattice, found.z[piece.at], piece.path))
        expected = np.exp(piece.log_error) * np.abs(found.value[piece.at]) / size
        np.testing.assert_allclose(found.error[piece.at], expected, rtol=1e-9)


@pytest.mark.parametrize("rows, inner, columns", [(1, 5, 3), (12, 12, 12), (30, 193, 7), (141, 141, 141)])
def test_products_in_blocks_round_no_more_than_their_bound(rows, inner, columns):
    rng = np.random.default_rng(inner)
    a, b = (rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in ((rows, inner), (inner, columns)))
    wide = a.astype(np.clongdouble) @ b.astype(np.clongdouble)
    units = 2.83 * kernel.BLOCK + (inner // kernel.BLOCK).bit_length()
    assert np.all(np.abs(kernel._times(a, b) - wide) <= units * 2.0**-53 * (np.abs(a) @ np.abs(b)) * 1.001)


def test_several_answers_of_one_contour():
    """A contour gives wide brackets at thresholds far from its own, but never wrong ones."""
    law = normals_of(Toeplitz((1.0, 0.5), 8), 8, 1.0)
    one, many = kernel.Profile(law), kernel.Profile(law)
    one.delta(1.0, np.array([0.5]), 1e-3)
    eps = np.array([0.0, 0.7])
    rough, exact = one.known(1.0, eps), many.delta(1.0, eps, 1e-3)
    assert np.all((rough[0] <= exact[2]) & (rough[2] >= exact[0]))


@pytest.mark.parametrize(
    "strategy, bins, words",
    [
        (Banded(3, 12), 4, "Banded has 3 bands, and balls in bins need at most 2"),
        (Banded(2, 12), 1, "bins = 1 must be between 2"),
        (Banded(2, 12), 13, "bins = 13 must be between 2, the number of bands, and steps = 12"),
        (strategies.PrefixSum(2), 2, "PrefixSum has no bound with balls in bins"),
    ],
)
def test_refusals(strategy, bins, words):
    with pytest.raises(ja.InputError, match=words) as caught:
        ja.MatrixMechanism(strategy, 1.0, BallsInBins(bins))
    assert "\n" not in str(caught.value)
    with pytest.raises(ja.InputError, match="bins"):
        BallsInBins(0)


def test_it_composes_and_is_written_down(monkeypatch):
    """Only every 40th loss is used, which makes the brackets wider."""
    monkeypatch.setattr(matrix_mechanism, "losses_for", lambda *given: losses_for(*given)[::40])
    run = ja.MatrixMechanism(Toeplitz((1.0, 0.5), 3), 4.5, BallsInBins(3))
    assert interop.from_json(interop.to_json(run)) == run
    assert "BallsInBins(bins=3)" in run.expression()
    alone, both = (ja.epsilon(x, 1e-3, relation="add_one") for x in (run, ja.compose(run, ja.Gaussian(4.0))))
    assert alone.upper < both.lower and both.upper < alone.upper + ja.epsilon(ja.Gaussian(4.0), 1e-4).upper
    assert both.upper - both.lower < 0.2 * both.upper and both.kind == "certified"


def test_several_deltas_are_as_narrow_as_one():
    run, eps = ja.MatrixMechanism(Toeplitz((1.0, 0.5), 3), 4.0, BallsInBins(3)), np.array([0.1, 0.0, 0.3, 0.1])
    one = ja.MatrixMechanism(Toeplitz((1.0, 0.5), 3), 4.0 * (1.0 + 1e-15), BallsInBins(3))  # with contours of its own
    several, alone = ja.delta(run, eps, relation="add_one"), ja.delta(one, 0.3, relation="add_one")
    assert np.all(several.upper - several.lower <= 1e-6 * several.upper) and several.upper[0] == several.upper[3]
    assert abs(several.estimate[2] - alone.estimate) <= 1e-6 * alone.estimate


def test_one_direction_is_not_refined_below_the_other():
    profile, eps = kernel.Profile(normals_of(HALF, 50, 1.0)), np.array([0.5])
    low, _, high = profile.delta(-1.0, eps, least=0.05)
    assert not profile.contours and low <= 0.00099336 <= high < 0.05
    assert np.ptp(profile.delta(-1.0, eps)[::2]) < 1e-9 and len(profile.contours) == 1


@pytest.mark.parametrize(
    "bins, steps, beside",
    [(2, 2, 0.7), (2, 7, 1.0), (3, 11, 1.3), (50, 149, 0.5), (9, 9, -2.0), (6, 6, 70.0), (200, 200, 70.0), (3, 3, 1e9)],
)
def test_normals_have_the_covariances_of_the_columns(bins, steps, beside):
    for strategy in (Toeplitz((1.0, beside), steps), ColumnNormalised(2, steps, diagonals=COLUMNS[:, :steps])):
        columns = np.abs(matrix(strategy))
        means = np.array([columns[:, j::bins].sum(1) for j in range(bins)]) / 1.7
        law, mixed = normals_of(strategy, bins, 1.7), np.zeros((bins, bins))
        for j in range(bins):
            mixed[j, j] += law.first[j]
            mixed[j, (j + 1) % bins] += law.second[j]
        np.testing.assert_allclose(mixed @ mixed.T, means @ means.T, rtol=1e-14, atol=1e-16)
        assert np.all(law.first >= 0.0) and np.all(law.second >= 0.0)
        assert sum(kind.many for kind in law.kinds()) == bins


def test_columns_that_differ_in_several_epochs_are_exact():
    """Two bins whose columns are not parallel: given the loss of one, the other's is normal."""
    run = ja.MatrixMechanism(ColumnNormalised(2, 6, diagonals=COLUMNS[:, :6]), 1.9, BallsInBins(2))
    columns = np.abs(matrix(run.strategy)) / 1.9
    means, eps, y = np.array([columns[:, j::2].sum(1) for j in range(2)]), 0.4, np.arange(-12.0, 12.0, 2e-3)
    (v, c), w = (means @ means.T)[0], (means[1] ** 2).sum()
    one, rest = np.exp(np.sqrt(w) * y - 0.5 * w) / 2.0, np.sqrt(v - c * c / w)
    other = np.exp(c / np.sqrt(w) * y - 0.5 * c * c / w) / 2.0
    strike = np.exp(eps) - one
    d = np.log(other / np.where(strike > 0.0, strike, 1.0)) / rest
    price = other * special.ndtr(d + 0.5 * rest) - strike * special.ndtr(d - 0.5 * rest)
    price = np.where(strike > 0.0, price, other - strike)
    found = ja.delta(run, eps, relation="remove_one")
    exact = float(price @ np.exp(-0.5 * y * y)) * 2e-3 / np.sqrt(2.0 * np.pi)
    assert found.lower - 1e-11 <= exact <= found.upper + 1e-11 and found.upper - found.lower < 1e-6 * exact


@pytest.mark.slow
def test_paths_without_a_bound_give_way_to_others():
    """At some points of this run's contour, the path with the least estimated error has no bound on any lattice."""
    run = ja.MatrixMechanism(Banded(2, 105), 6.2, BallsInBins(35))
    found = ja.epsilon(run, 3.265e-7, relation="remove_one")
    assert found.ok and 0.27 < found.upper < 0.28


def test_no_event_says_so_in_the_words_of_the_user():
    run = ja.MatrixMechanism(Banded(2, 8), 1.0, BallsInBins(4))
    assert "MatrixMechanism with BallsInBins" in refusal(lambda: ja.interop.to_dp_event(run))


@pytest.mark.parametrize("noise", [1e-170, 1e-60, 1e60, 1e170])
def test_noise_of_any_size_is_answered_or_refused(noise):
    run = ja.MatrixMechanism(Banded(2, 6), noise, BallsInBins(6))
    for ask, given in ((ja.epsilon, 1e-6), (ja.delta, 1.0)):
        if 1e-100 < noise < 1e100:
            found = ask(run, given)
            assert 0.0 <= found.lower <= found.upper < np.inf
        else:
            with pytest.raises(ja.InputError, match="noise_multiplier = 1e.*lost to rounding"):
                ask(run, given)


@pytest.mark.parametrize("noise", [1e-12, 0.1, 1e4, 1e42])
def test_every_noise_has_an_end(noise, monkeypatch):
    """Contours are given up before the transform is evaluated at 2,000 points in all. Theorems still give brackets."""
    seen, transform = [], kernel.transform
    monkeypatch.setattr(kernel, "transform", lambda *given: seen.append(given[2].size) or transform(*given))
    run = ja.MatrixMechanism(Banded(2, 6), noise, BallsInBins(6))
    for relation in ("remove_one", "add_one"):
        found = ja.epsilon(run, 1e-6, relation=relation)
        assert 0.0 <= found.lower <= found.upper < np.inf and found.status in ("ok", "width", "zero")
        at = ja.delta(run, 1.01 * found.upper, relation=relation)
        assert at.lower <= 1e-6
    assert sum(seen) < 2000


@pytest.mark.parametrize("noise, eps", [(0.3, 2.0), (1.0, 0.5), (30.0, 0.03), (1e4, 1e-5)])
def test_theorems_hold_without_a_contour(noise, eps):
    law, at = normals_of(Toeplitz((1.0, 0.8), 6), 6, noise), np.array([eps])
    mean, error = drawn(Toeplitz((1.0, 0.8), 6), noise, 6, eps, 200_000)
    for sign, value, off in zip((1.0, -1.0), mean, error, strict=True):
        low, high = kernel.theorems(law, sign, at)
        assert low[0] - 5.0 * off <= value <= high[0] + 5.0 * off
        assert noise < 1e3 or high[0] - low[0] < 1e-3 * high[0]


@pytest.mark.parametrize("noise, root", [(5.0, -28.0), (3.0, -28.0), (30.0, 36.0), (1.0, -14.0)])
def test_theorems_count_their_rounding(noise, root):
    """The lower bound is at most the payoff of the mean along one direction, which is computed with 50 digits."""
    law = normals_of(Toeplitz((1.0, 0.8), 2), 2, noise)
    with mp.workdps(50):
        first, second = ([mp.mpf(x) for x in each.tolist()] for each in (law.first, law.second))
        spread = first[0] + second[1], first[1] + second[0]
        size = mp.sqrt(spread[0] ** 2 + spread[1] ** 2)
        c = [(first[j] * spread[j] + second[j] * spread[1 - j]) / size for j in (0, 1)]
        ratio = lambda t: (mp.exp(c[0] * t - c[0] ** 2 / 2) + mp.exp(c[1] * t - c[1] ** 2 / 2)) / 2
        sign = 1 if root > 0 else -1
        eps = float(sign * mp.log(ratio(root)))
        t = mp.findroot(lambda t: mp.log(ratio(t)) - sign * mp.mpf(eps), root)
        p, q = (mp.ncdf(-sign * (t - c[0])) + mp.ncdf(-sign * (t - c[1]))) / 2, mp.ncdf(-sign * t)
        exact = p - mp.exp(eps) * q if sign > 0 else q - mp.exp(eps) * p
    x = eps + np.log(2.0)
    size = float(law.sizes.max())
    assert sign < 0 or special.ndtr(size / 2 - x / size) < 1e-3 * exact  # else one bin alone is the better bound
    assert kernel.theorems(law, float(sign), np.array([eps]))[0][0] <= exact


@pytest.mark.parametrize("beside, noise, eps", [(0.98, 3.33, 0.472), (0.55, 3.91, 0.69), (1.2, 2.78, 0.267)])
def test_three_bins_by_a_double_integral(beside, noise, eps):
    """Given the two normals that bins share, bin 0 is lognormal: Black-Scholes prices are averaged."""
    strategy = Toeplitz((1.0, beside), 3)
    a, b = strategy.column / noise
    y = np.arange(-11.0, 13.0, 0.02)
    weight = np.exp(-0.5 * y * y) / np.sqrt(2.0 * np.pi) * 0.02
    size = np.exp(b * y - 0.5 * b * b)[:, None] / 3.0
    rest = (np.exp(np.add.outer(a * y, b * y) - 0.5 * (a * a + b * b)) + np.exp(a * y - 0.5 * a * a)) / 3.0
    run = ja.MatrixMechanism(strategy, noise, BallsInBins(3))
    for sign, relation in ((1.0, "remove_one"), (-1.0, "add_one")):
        strike = np.exp(sign * eps) - rest
        d = np.log(size / np.where(strike > 0.0, strike, 1.0)) / a
        price = sign * (size * special.ndtr(sign * (d + 0.5 * a)) - strike * special.ndtr(sign * (d - 0.5 * a)))
        price = np.where(strike > 0.0, price, (size - strike) * (sign > 0.0)) * (1.0 if sign > 0.0 else np.exp(eps))
        found = ja.delta(run, eps, relation=relation)
        assert found.lower - 1e-11 <= weight @ (price @ weight) <= found.upper + 1e-11
        assert found.upper - found.lower < 3e-7 * found.upper  # the width that deltas aim at


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["alternating", "first", "random"])
def test_columns_of_unequal_sizes_stay_in_compositions(columns):
    """Sizes that differ by a factor of 50 from one step to the next: norms of products overflow easily."""
    n = 50 if columns == "random" else 300
    odd = np.arange(n) % 2 == 1
    rng = np.random.default_rng(1)
    own, next_ = {
        "alternating": (np.where(odd, 1.0, 0.02), np.where(odd, 0.02, 1.0)),
        "first": (np.where(np.arange(n) == 0, 0.01, 1.0), np.where(np.arange(n) == 0, 1.0, 0.9)),
        "random": (rng.uniform(0.1, 1.0, n), rng.uniform(0.1, 1.0, n)),
    }[columns]
    run = ja.MatrixMechanism(ColumnNormalised(2, n, diagonals=[own, next_]), 0.5, BallsInBins(n))
    alone = ja.epsilon(run, 1e-5, relation="add_one")
    assert alone.ok and alone.upper - alone.lower < 1e-4
    assert ja.delta(run, alone.lower, relation="add_one").upper >= 1e-5 * (1 - 1e-9)
    assert ja.epsilon(ja.compose(run, ja.Gaussian(4.0)), 1e-5, relation="add_one").upper > alone.lower
