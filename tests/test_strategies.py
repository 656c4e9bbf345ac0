"""Strategies: sensitivity against brute force over patterns, error against dense matrices and published values."""

import csv
import itertools
import pathlib

import numpy as np
import pytest
from helpers import refusal

from jaxacct import InputError, strategies
from jaxacct.strategies import (
    BLT,
    Banded,
    BandedInverse,
    ColumnNormalised,
    FixedEpochs,
    Identity,
    MinSeparation,
    PrefixSum,
    SingleParticipation,
    Toeplitz,
)

with open(pathlib.Path(__file__).parent / "data" / "banded.csv") as file:
    TABLE = [row for row in csv.DictReader(file) if int(row["n"]) <= 256]


def dense(strategy):
    """C as a matrix, from the definition of each class."""
    n = strategy.steps
    match strategy:
        case PrefixSum():
            rows = []
            for begin in range(0, n, strategy.block):
                for level in range(strategy.block.bit_length()):
                    for node in range(strategy.block >> level):
                        first = begin + (node << level)
                        rows.append([first <= i < first + (1 << level) for i in range(n)])
            return np.array(rows, float)
        case ColumnNormalised():
            return sum(np.diag(row[: n - lag], -lag) for lag, row in enumerate(strategy.diagonals))
        case BLT():
            column = [1.0] + [
                sum(w * t**j for w, t in zip(strategy.scales, strategy.decays, strict=True)) for j in range(n - 1)
            ]
        case BandedInverse():
            inverse = sum(np.diag(np.full(n - lag, d), -lag) for lag, d in enumerate(strategy.inverse))
            return np.linalg.inv(inverse)
        case Identity():
            return np.eye(n)
        case _:
            column = strategy.coefficients
    return sum(np.diag(np.full(n - lag, c), -lag) for lag, c in enumerate(column))


def patterns(n, separation, most):
    """Every pattern with steps at least `separation` apart."""
    for size in range(1, most + 1):
        for steps in itertools.combinations(range(n), size):
            if all(b - a >= separation for a, b in itertools.pairwise(steps)):
                yield list(steps)


def brute(matrix, chosen):
    """The root of the largest sum of |C^T C| over a pattern, and whether no entry of C^T C is negative."""
    gram = matrix.T @ matrix
    return np.sqrt(max(np.abs(gram[np.ix_(p, p)]).sum() for p in chosen)), bool((gram >= -1e-13).all())


def of_size(n):
    """Strategies of every class, without long searches; some matrices have negative or rising entries."""
    draw, bands = np.random.default_rng(n), min(3, n)
    diagonals = np.outer((0.9, 0.4, 0.2)[:bands], np.linspace(1.0, 0.8, n))
    yield from (Identity(n), PrefixSum(n), Banded(min(2, n), n), ColumnNormalised(bands, n, diagonals=diagonals))
    yield BandedInverse(bands, n, inverse=(1.0, -0.5, -0.1)[:bands])
    yield Toeplitz((1.0, 0.0, 0.0, 1.0)[:n], n)
    yield Toeplitz(tuple(np.r_[1.0, draw.normal(size=min(n - 1, 3))]), n)
    if n > 1:
        yield BLT(2, n, scales=(0.35, 0.2), decays=(0.9, 0.3))
    if n % 2 == 0:
        yield PrefixSum(n, restarts=2)


@pytest.mark.parametrize(
    "n", [1, 2, 5, 8, pytest.param(11, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)]
)
def test_sensitivity_is_that_of_all_patterns(n):
    for strategy in of_size(n):
        matrix = dense(strategy)
        for separation, most in itertools.product(range(1, n + 1), {1, 2, n}):
            true, positive = brute(matrix, patterns(n, separation, most))
            found = strategy.sensitivity(MinSeparation(separation, most))
            assert found.upper >= true * (1 - 1e-14), (strategy, separation, most)
            assert found.lower <= true * (1 + 1e-14), (strategy, separation, most)
            if positive or most <= 2:
                np.testing.assert_allclose([found.lower, found.upper], true, rtol=1e-12, err_msg=f"{strategy}")
            if n % separation == 0 and most == n:
                epochs = [list(range(first, n, separation)) for first in range(separation)]
                found = strategy.sensitivity(FixedEpochs(n // separation))
                np.testing.assert_allclose(found.upper, brute(matrix, epochs)[0], rtol=1e-12)
        single = strategy.sensitivity(SingleParticipation()).upper
        np.testing.assert_allclose(single, np.linalg.norm(matrix, axis=0).max(), rtol=1e-12)


def test_a_later_step_may_be_worse_than_the_next_possible_one():
    assert Toeplitz((1.0, 0.0, 0.0, 1.0), 4).sensitivity(MinSeparation(2)).upper ** 2 == pytest.approx(5.0)


@pytest.mark.parametrize("n", [1, 6, 16])
def test_errors_are_those_of_dense_matrices(n):
    for strategy in of_size(n):
        if not isinstance(strategy, PrefixSum):  # its matrix is not square
            decoder = np.tri(n) @ np.linalg.inv(dense(strategy))
            np.testing.assert_allclose(
                strategy.squared_errors(), (decoder**2).sum(1), rtol=1e-10, err_msg=f"{strategy}"
            )


@pytest.mark.parametrize("scales, decays", [((0.4, 0.3), (0.9, 0.2)), ((0.3, 0.2, 0.3), (0.9, 0.9, 0.0))])
def test_a_long_buffered_matrix_has_the_errors_of_a_short_one(scales, decays):
    """The inverse is buffered, too. So the time for 100,000 steps is that of writing their errors down."""
    short = BLT(len(scales), 300, scales=scales, decays=decays)
    unit = np.linalg.inv(dense(short))[:, 0]
    np.testing.assert_allclose(short.inverse_column(), unit, atol=1e-13)
    long = short.for_steps(100_000)
    np.testing.assert_allclose(long.squared_errors()[:300], np.cumsum(np.cumsum(unit) ** 2), rtol=1e-11)


def test_the_tree_decodes_prefix_sums_from_disjoint_nodes():
    for n, restarts in ((1, 1), (7, 1), (16, 1), (24, 4)):
        tree = PrefixSum(n, restarts=restarts)
        nodes = {tuple(np.flatnonzero(row)) for row in dense(tree)}
        for i, variance in enumerate(tree.squared_errors()):
            left, used = i + 1, 0
            while left:  # the largest node that ends here
                left -= max(len(node) for node in nodes if node[-1] == left - 1)
                used += 1
            assert variance == used, (n, i)


@pytest.mark.parametrize(
    "row",
    # quick runs skip column-normalised rows: test_column_normalised_is_the_best_banded_matrix takes a small matrix
    [pytest.param(row, marks=[pytest.mark.slow] * (row["kind"] != "toeplitz")) for row in TABLE],
    ids=lambda row: f"{row['n']}-{row['bands']}-{row['epochs']}-{row['kind']}",
)
def test_published_errors(row):
    n, bands, epochs = (int(row[name]) for name in ("n", "bands", "epochs"))
    toeplitz = Banded(bands, n, epochs)
    if row["kind"] == "toeplitz":
        assert toeplitz.error == pytest.approx(float(row["error"]), rel=1e-7)
        assert toeplitz.max_error == pytest.approx(float(row["max_error"]), rel=1e-5)
        assert toeplitz.sensitivity().upper ** 2 == pytest.approx(float(row["sens2"]), rel=1e-12)
    else:
        error = ColumnNormalised(bands, n, epochs).error
        assert error <= float(row["error"]) * 1.001
        assert 0.95 < error / toeplitz.error < 0.985


def test_full_strategies_are_near_the_best_lower_triangular_one():
    best = Banded(64, 64).error
    assert best < BLT(3, 64).error < 1.002 * best
    assert best < BandedInverse(8, 64).error < 1.02 * best


def test_more_bands_of_the_inverse_have_less_error_over_several_epochs():
    """The search counts entries below 0 by their size, as the sensitivity does."""
    errors = [BandedInverse(bands, 16, epochs=4).error for bands in (2, 4)]
    assert errors[1] < 0.98 * errors[0]


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Banded(9, 64, epochs=8), "bands = 9 must be <= steps / epochs = 8"),
        (lambda: Banded(2, 64, epochs=7), "epochs = 7 must divide steps = 64"),
        (lambda: Toeplitz((0.0, 1.0), 4), r"coefficients\[0\] = 0.0 must be > 0"),
        (lambda: Toeplitz((1.0, float("nan")), 4), r"coefficients\[1\] = nan"),
        (lambda: Toeplitz((1e-160, 1e-161), 4), r"coefficients\[0\] = 1e-160 must be 0 or of size"),
        (lambda: Toeplitz((1.0, 1e200), 4), r"coefficients\[1\] = 1e\+200 must be 0 or of size"),
        (lambda: BandedInverse(2, 600, inverse=(1.0, -3.0)), "inverse has a matrix C whose entries exceed"),
        (lambda: Toeplitz((1.0,) * 5, 4), "coefficients must be 1 to steps = 4 numbers"),
        (lambda: BLT(2, 8, scales=(0.5, 0.1), decays=(0.5, 1.0)), r"decays\[1\] = 1.0 must be"),
        (lambda: Identity(-1), "steps = -1"),
        (lambda: Identity().error, "steps is missing"),
        (lambda: Identity(8).sensitivity(strategies.CyclicPoisson(2, 0.1)), "CyclicPoisson has no single sensitivity"),
        (lambda: strategies.CyclicPoisson(2, 1.5), "sampling_probability = 1.5 must be"),
        (lambda: MinSeparation(0), "separation = 0 must be an integer >= 1"),
    ],
)
def test_refusals_are_one_line(build, words):
    with pytest.raises(InputError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_given_matrix_may_be_an_array_and_is_never_ignored():
    some = np.array([0.5, 0.25])
    assert Banded(2, 8, coefficients=some) == Banded(2, 8, coefficients=(0.5, 0.25))
    assert BandedInverse(2, 8, inverse=some) == BandedInverse(2, 8, inverse=(0.5, 0.25))
    assert BLT(2, 8, scales=some, decays=some) == BLT(2, 8, scales=(0.5, 0.25), decays=(0.5, 0.25))
    for half in ({"scales": some}, {"decays": some}):  # the other half is not searched for
        with pytest.raises(InputError, match="must be buffers = 2 numbers"):
            BLT(2, 8, **half)


def test_the_search_is_left_out_where_the_matrix_is_given():
    found = Banded(3, 64)
    again = Banded(3, 64, coefficients=found.coefficients)
    assert again == found and hash(again) == hash(found)


@pytest.mark.parametrize("n", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_sensitivities_of_computed_columns_hold_in_exact_arithmetic(n):
    """The columns of BLT and BandedInverse are rounded; 60 digits show that the upper bound covers that."""
    import mpmath

    with mpmath.workdps(60):
        for strategy in (BLT(3, n), BandedInverse(4, n), BandedInverse(2, n)):
            if isinstance(strategy, BLT):
                terms = [(mpmath.mpf(w), mpmath.mpf(t)) for w, t in zip(strategy.scales, strategy.decays, strict=True)]
                column = [mpmath.mpf(1)] + [sum(w * t**j for w, t in terms) for j in range(n - 1)]
            else:
                taps, column = [mpmath.mpf(d) for d in strategy.inverse], []
                for i in range(n):
                    rest = sum(taps[k] * column[i - k] for k in range(1, min(len(taps), i + 1)))
                    column.append(((1 if i == 0 else 0) - rest) / taps[0])
            norm = mpmath.sqrt(sum(c * c for c in column))
            found = strategy.sensitivity(SingleParticipation())
            assert mpmath.mpf(float(found.lower)) <= norm <= mpmath.mpf(float(found.upper)), strategy
            assert found.upper <= found.lower * (1 + 1e-8)


@pytest.mark.parametrize("n, bands", [(16, 2), pytest.param(64, 4, marks=pytest.mark.slow)])
def test_column_normalised_is_the_best_banded_matrix(n, bands):
    """The error is within 1e-5 of the bound for banded matrices in jaxacct/strategies/README.md, "Error"."""
    strategy = ColumnNormalised(bands, n)
    x, sums = dense(strategy).T @ dense(strategy), np.tri(n)
    inverse = np.linalg.inv(x)
    gradient = -inverse @ sums.T @ sums @ inverse / n
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    assert np.all(np.diag(gradient) < 0.0)
    gap = np.abs(gradient)[(lag > 0) & (lag < bands)] @ (1.0 + np.abs(x))[(lag > 0) & (lag < bands)]
    assert strategy.error == pytest.approx(np.trace(sums @ inverse @ sums.T) / n, rel=1e-9)
    assert 0.0 <= gap < 1e-5 * strategy.error


def test_the_repr_of_a_strategy_shows_the_numbers_that_it_was_given():
    """The old repr omitted given numbers.  Only searched numbers may be omitted: they follow from other fields."""
    searched = strategies.Banded(2, steps=16)
    given = strategies.Banded(2, steps=16, coefficients=(1.0, 0.3))
    assert repr(searched) == "Banded(bands=2, steps=16, epochs=1)"
    for each in (searched, given, searched.for_steps(8), strategies.BLT(1, steps=8, scales=(0.5,), decays=(0.5,))):
        assert eval(repr(each), vars(strategies)) == each
    assert len(repr(strategies.ColumnNormalised(2, steps=64, diagonals=np.ones((2, 64)).tolist()))) < 1000


@pytest.mark.parametrize("made", [Banded, BLT, BandedInverse, ColumnNormalised])
@pytest.mark.parametrize("size", [0, -1, 8.5])
def test_sizes_are_checked_before_there_are_steps(made, size):
    assert f"= {size}" in refusal(made, size) and "epochs = 0" in refusal(made, 2, epochs=0)
