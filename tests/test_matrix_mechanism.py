"""Matrix mechanisms: their epsilon against Gaussians, sampled runs and draws of the exact likelihood ratio."""

import numpy as np
import pytest

import jaxacct as ja
from jaxacct import strategies
from jaxacct.strategies import (
    Banded,
    ColumnNormalised,
    CyclicPoisson,
    FixedEpochs,
    Toeplitz,
)


def monte_carlo(strategy, noise, groups, rate, eps, draws, seed=0):
    """delta(eps) of removing a record of group 0, and its standard error, by the exact likelihood ratio of all rows."""
    draw, n = np.random.default_rng(seed), strategy.steps
    column = np.asarray(strategy.coefficients)
    starts = range(0, n, groups)
    total = np.zeros(draws)
    taken = draw.random((draws, len(starts))) < rate
    rows = draw.normal(0.0, noise, (draws, n))
    for block, start in enumerate(starts):
        shape = column[: n - start]
        rows[:, start : start + shape.size] += taken[:, block, None] * shape
    for start in starts:
        shape = column[: n - start]
        inner = (rows[:, start : start + shape.size] * shape).sum(1) / noise**2 - (shape**2).sum() / (2 * noise**2)
        total += np.logaddexp(np.log1p(-rate), np.log(rate) + inner)
    values = np.maximum(0.0, -np.expm1(eps - total))
    return values.mean(), values.std() / np.sqrt(draws)


def column_normalised(bands, n):
    """Random columns of norm 1, but for rounding."""
    columns = np.random.default_rng(bands).uniform(0.1, 1.0, (bands, n))
    columns *= np.add.outer(np.arange(bands), np.arange(n)) < n
    return ColumnNormalised(bands, n, diagonals=columns / np.linalg.norm(columns, axis=0))


def unit(*column):
    return tuple((np.array(column) / np.linalg.norm(column)).tolist())


@pytest.mark.parametrize(
    "noise, rate, n, bands, groups", [(0.7, 0.5, 60, 3, 6), (1.0, 0.08, 512, 8, 8), (3.0, 0.01, 128, 1, 1)]
)
def test_whole_blocks_are_dp_sgd(noise, rate, n, bands, groups):
    run = ja.MatrixMechanism(Banded(bands, n), noise, CyclicPoisson(groups, rate))
    plain = ja.dp_sgd(noise, rate, n // groups)
    for relation in ("zero_out", "replace_one") if groups == 1 else ("zero_out",):
        mine, theirs = (ja.epsilon(x, 1e-5, relation=relation) for x in (run, plain))
        np.testing.assert_allclose([mine.upper, mine.lower], [theirs.upper, theirs.lower], rtol=1e-9)
        assert mine.kind == theirs.kind


def test_a_cut_last_block_costs_less_than_a_whole_one():
    run = ja.MatrixMechanism(Toeplitz(unit(1, -0.7), 5), 1.5, CyclicPoisson(2, 0.5))
    # mpmath values of the composition with the cut block; without the cut they are .2262, .0910, .0284
    np.testing.assert_allclose(ja.delta(run, [0.0, 0.5, 1.0]).upper, [0.213727, 0.079404, 0.022163], atol=1e-6)


@pytest.mark.parametrize("draws", [40_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_what_the_exact_likelihood_ratio_draws(draws):
    draw = np.random.default_rng(7)
    for case in range(20 if draws > 40_000 else 2):
        bands = int(draw.integers(1, 4))
        groups, n = bands + int(draw.integers(0, 2)), int(draw.integers(4, 12))
        strategy = Toeplitz(tuple(np.r_[1.0, draw.normal(0, 0.6, bands - 1)]), n)
        noise, rate, eps = float(draw.uniform(0.6, 1.5)), float(draw.uniform(0.1, 0.9)), float(draw.uniform(0, 0.7))
        found = ja.delta(
            ja.MatrixMechanism(strategy, noise, CyclicPoisson(groups, rate)), eps, relation="remove_one", rtol=1e-3
        )
        chunks = [monte_carlo(strategy, noise, groups, rate, eps, 40_000, (case, i)) for i in range(draws // 40_000)]
        mean, error = np.mean(chunks, axis=0)[0], np.linalg.norm([e for _, e in chunks]) / len(chunks)
        assert abs(float(found.upper) - mean) < 5 * error + 1e-6, (case, found, mean, error)


def test_without_sampling_it_is_one_gaussian():
    strategy = Banded(4, 64, epochs=4)
    run = ja.MatrixMechanism(strategy, [1.0, 5.0])
    expected = ja.epsilon(ja.Gaussian(np.array([1.0, 5.0]) / 2.0), 1e-6)
    np.testing.assert_allclose(ja.epsilon(run, 1e-6).upper, expected.upper, rtol=1e-10)
    assert run == ja.MatrixMechanism(strategy, [1.0, 5.0], FixedEpochs(4))


def test_columns_that_differ_by_rounding_are_one_law():
    run = ja.MatrixMechanism(column_normalised(4, 64), 2.0, CyclicPoisson(4, 0.1))
    assert len(run.expand("add_or_remove_one", "remove")) == 1
    np.testing.assert_allclose(ja.epsilon(run, 1e-5).upper, ja.epsilon(ja.dp_sgd(2.0, 0.1, 16), 1e-5).upper, rtol=1e-9)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: ja.MatrixMechanism(Banded(8, 64), 1.0, CyclicPoisson(4, 0.1)), "groups = 4 must be >= 8"),
        (lambda: ja.MatrixMechanism(strategies.PrefixSum(64), 1.0, CyclicPoisson(4, 0.1)), "groups = 4 must be >= 64"),
        (lambda: ja.MatrixMechanism("banded", 1.0), "strategy = 'banded' is no strategy"),
        (lambda: ja.MatrixMechanism(Banded(2, 64), 1.0, "cyclic"), "participation = 'cyclic' is not known"),
        (lambda: ja.MatrixMechanism(Banded(2, 64), -1.0), "noise_multiplier = -1.0 must be > 0"),
    ],
)
def test_refusals_are_one_line(build, words):
    with pytest.raises(ja.InputError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_more_bands_than_groups_would_be_a_false_claim():
    """Such a run is refused: the formula gives delta(1) = .0355, but 400,000 exact likelihood ratios give over .055."""
    draw, c = np.random.default_rng(1), np.array([1.0, 1.0]) / np.sqrt(2)
    taken = draw.random((400_000, 3)) < 0.3
    matrix = np.array([[c[0], 0, 0], [c[1], c[0], 0], [0, c[1], c[0]]])
    rows = taken @ matrix.T + draw.normal(size=(400_000, 3))
    ratio = 0.0
    for choice in np.ndindex(2, 2, 2):
        shift = matrix @ choice
        weight = 0.3 ** sum(choice) * 0.7 ** (3 - sum(choice))
        ratio = ratio + weight * np.exp(rows @ shift - shift @ shift / 2)
    assert np.mean(np.maximum(0, 1 - np.e / ratio)) > 0.055


def test_json_expressions_and_events_say_the_same():
    from jaxacct import interop

    for strategy in (Banded(3, 12), strategies.PrefixSum(8, 2, 2), column_normalised(2, 6), strategies.BLT(2, 8)):
        run = ja.MatrixMechanism(strategy, [1.0, 2.0], strategies.MinSeparation(2))
        assert interop.from_json(interop.to_json(run)) == run


EVENTS = [
    ja.MatrixMechanism(Banded(4, 64, epochs=4), 5.0),
    ja.MatrixMechanism(strategies.PrefixSum(8, 2, 2), 5.0),
    ja.MatrixMechanism(Toeplitz((1.0, -0.7, 0.3), 10), 5.0, strategies.MinSeparation(1)),
    ja.MatrixMechanism(Banded(2, 4), 1.5, CyclicPoisson(2, 0.1)),
    ja.MatrixMechanism(Banded(3, 8), 1.5, CyclicPoisson(3, 0.1)),
    ja.compose(ja.repeat(ja.MatrixMechanism(column_normalised(2, 6), 2.0, CyclicPoisson(2, 0.2)), 2), ja.Gaussian(5.0)),
]


@pytest.mark.parametrize("run", EVENTS, ids=lambda run: run.expression().replace("ja.", "")[:80])
def test_an_event_is_read_back_with_the_same_epsilon(run):
    from jaxacct import interop

    event = interop.to_dp_event(run)
    back = interop.from_dp_event(event)
    mine, theirs = (ja.epsilon(one, 1e-5) for one in (run, back))
    assert (mine.upper, mine.kind) == (theirs.upper, theirs.kind)
    from dp_accounting.pld import PLDAccountant

    other = PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    np.testing.assert_allclose(other, mine.upper, rtol=5e-3)


def test_whole_blocks_are_one_repeated_event():
    from jaxacct import interop

    event = interop.to_dp_event(ja.MatrixMechanism(Banded(2, 8), 1.5, CyclicPoisson(2, 0.1)))
    assert (event.count, event.event.sampling_probability) == (4, 0.1)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('"coefficients": [', '"coefficients": [], "x": [', "unknown key"),
        ('"steps": 12', '"steps": 1e30', r"mechanism.strategy: steps = 1e\+30 must be"),
        ('"type": "Banded"', '"type": "Gaussian"', "must be an object whose type is one of"),
        (r'"epochs": 1}}', '"epochs": "one"}}', "mechanism.participation.epochs must be a number"),
    ],
)
def test_documents_of_strangers_are_refused(old, new, words):
    from jaxacct import interop

    text = interop.to_json(ja.MatrixMechanism(Banded(3, 12), 1.0))
    assert old in text
    with pytest.raises(ja.InputError, match=words):
        interop.from_json(text.replace(old, new))


@pytest.mark.parametrize("given", ["[]", "null", '"all"', "[[]]"])
def test_a_document_without_its_matrix_starts_no_search(given):
    import re

    from jaxacct import interop

    text = interop.to_json(ja.MatrixMechanism(Banded(3, 12), 1.0))
    with pytest.raises(ja.InputError, match="mechanism.strategy.coefficients must be"):
        interop.from_json(re.sub(r'"coefficients": \[[^]]*\]', f'"coefficients": {given}', text))
