"""ja.verify of matrix mechanisms: sensitivities by brute force, blocks by their norms, and every field read."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import jaxacct as ja
from jaxacct import strategies
from jaxacct.strategies import Banded, CyclicPoisson, FixedEpochs, MinSeparation, SingleParticipation, Toeplitz

pytest.importorskip("flint")

from jaxacct.verification.ball_arithmetic import NotCovered, outward, precision
from jaxacct.verification.loss_definition import MATRICES, WAYS, _moves

KNOWN = {"scales": (0.35, 0.2), "decays": (0.9, 0.3)}
"""Given, so that nothing is searched for while tests are collected."""


def of_columns(steps):
    return strategies.ColumnNormalised(2, steps, diagonals=np.outer((0.9, -0.4), np.linspace(1.0, 0.8, steps)))


STRATEGIES = [
    strategies.Identity(6),
    Toeplitz((1.0, -0.7, 0.3), 6),
    Banded(3, 7),
    strategies.BLT(2, 6, **KNOWN),
    strategies.BandedInverse(3, 6, inverse=(1.0, -0.5, 0.2)),
    of_columns(6),
    strategies.PrefixSum(6, restarts=2),
]
WAYS_OF = [SingleParticipation(), FixedEpochs(2), MinSeparation(2), MinSeparation(1, 2), CyclicPoisson(4, 0.3)]


def as_matrix(strategy):
    """C in float64, by the definitions in the docstrings."""
    n = strategy.steps
    if isinstance(strategy, strategies.PrefixSum):
        size, rows = n // strategy.restarts, []
        for start, width in itertools.product(range(0, n, size), (1, 2, 4, 8)):
            rows += [
                [start + k <= leaf < start + k + width for leaf in range(n)] for k in range(0, size - width + 1, width)
            ]
        return np.array(rows, float)
    matrix = np.zeros((n, n))
    if isinstance(strategy, strategies.ColumnNormalised):
        for lag, first in itertools.product(range(strategy.bands), range(n)):
            if first + lag < n:
                matrix[first + lag, first] = strategy.diagonals[lag][first]
        return matrix
    if isinstance(strategy, strategies.BandedInverse):
        return np.linalg.inv(as_matrix(Toeplitz(strategy.inverse, n)))
    column = {
        strategies.Identity: lambda: [1.0],
        Toeplitz: lambda: strategy.coefficients,
        Banded: lambda: strategy.coefficients,
        strategies.BLT: lambda: [1.0, *(np.dot(strategy.scales, np.power(strategy.decays, j)) for j in range(n - 1))],
    }[type(strategy)]()
    for lag, entry in enumerate(column):
        matrix += np.diag([entry] * (n - lag), -lag)
    return matrix


def brute_force(matrix, way):
    """Bounds of the largest squared move over all patterns: low by all signs, high by the entries of |C^T C|."""
    n = matrix.shape[1]
    apart = lambda pattern: all(j - i >= way.separation for i, j in itertools.pairwise(pattern))
    sizes = range(1, n + 1)
    patterns = {
        SingleParticipation: lambda: [(i,) for i in range(n)],
        FixedEpochs: lambda: [range(j, n, n // way.epochs) for j in range(n // way.epochs)],
        MinSeparation: lambda: [
            p for k in sizes if k <= (way.most or n) for p in itertools.combinations(range(n), k) if apart(p)
        ],
    }[type(way)]()
    low, high = 0.0, 0.0
    for pattern in map(list, patterns):
        part = matrix[:, pattern]
        high = max(high, np.abs(part.T @ part).sum())
        for signs in itertools.product((-1.0, 1.0), repeat=len(pattern)):
            low = max(low, np.square(part @ signs).sum())
    return low, high


@pytest.mark.parametrize("way", WAYS_OF[:-1], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_sensitivities_are_those_of_all_patterns(strategy, way):
    if isinstance(way, FixedEpochs) and strategy.steps % way.epochs:
        with pytest.raises(NotCovered):
            _moves(strategy, way, 128)
        return
    with precision(128):
        rate, [(square, count)] = _moves(strategy, way, 128)
        assert rate == 1 and count == 1
        found = outward(square)
    low, high = brute_force(as_matrix(strategy), way)
    np.testing.assert_allclose(found, (low, high), rtol=1e-9)  # the radius of a ball has 30 bits
    bounds = strategy.sensitivity(way)
    assert found[0] <= bounds.upper**2 and bounds.lower**2 <= found[1]


@pytest.mark.parametrize("strategy", STRATEGIES[:3] + STRATEGIES[5:6], ids=lambda s: type(s).__name__)
def test_blocks_have_the_norms_of_their_columns(strategy):
    with precision(128):
        rate, blocks = _moves(strategy, CyclicPoisson(4, 0.25), 128)
        found = [outward(square) for square, count in blocks for _ in range(count)]
        assert rate == 0.25
    norms = np.square(as_matrix(strategy)).sum(0)
    np.testing.assert_allclose(found, np.repeat([norms[0], norms[4]], 2).reshape(2, 2), rtol=1e-12)


def run(strategy, way=None, noise=2.0):
    return ja.MatrixMechanism(strategy, noise, way)


CASES = [
    *(run(strategy, None) for strategy in STRATEGIES),
    run(Toeplitz((1.0, 0.0, 0.0, 1.0), 4), MinSeparation(2)),
    run(strategies.BLT(2, 12, 3, **KNOWN), MinSeparation(3, 2)),
    run(Banded(3, 8), CyclicPoisson(3, 0.2)),
    run(of_columns(9), CyclicPoisson(4, 0.2)),
    ja.compose(run(Banded(2, 8), CyclicPoisson(2, 0.2)), ja.Gaussian(3.0)),
]
SLOW = [
    pytest.param(one, marks=pytest.mark.slow)
    for one in (CASES[-2], run(Toeplitz((1.0, -0.7), 5), CyclicPoisson(2, 0.5)))
]


@pytest.mark.parametrize(
    "mechanism", [*CASES[:-2], CASES[-1], *SLOW], ids=lambda m: m.expression().replace("ja.", "")[:90]
)
def test_answers_are_verified_and_false_ones_refuted(mechanism):
    found = ja.epsilon(mechanism, 1e-5)
    assert ja.verify(mechanism, found, delta=1e-5).status == "verified"
    for share in (0.999, 1.001):
        false = SimpleNamespace(lower=share * found.lower, upper=share * found.upper)
        assert ja.verify(mechanism, false, delta=1e-5).status == "refuted"
    if mechanism not in CASES[-3:-1]:  # the last case, sampled too, stands for these
        zeroed = ja.delta(mechanism, 1.0, relation="zero_out")
        assert ja.verify(mechanism, zeroed, epsilon=1.0, relation="zero_out").status == "verified"


def test_a_claim_without_the_block_cut_is_refuted_from_below():
    """With whole blocks the upper end is true of the run with a cut block, and the lower end is false."""
    cut = run(Banded(6, 13), CyclicPoisson(6, 0.3), 0.8)
    whole = ja.epsilon(ja.dp_sgd(0.8, 0.3, 13, sampling="cyclic_poisson", bands=6), 1e-5)
    assert ja.verify(cut, whole, delta=1e-5).status == "refuted"
    assert ja.verify(cut, SimpleNamespace(lower=0.0, upper=whole.upper), delta=1e-5).status == "verified"


@pytest.mark.parametrize(
    "mechanism, words",
    [
        (run(strategies.PrefixSum(4), CyclicPoisson(4, 0.2)), "of a tree"),
        (run(Banded(2, 60), MinSeparation(3)), "more than 20000 patterns"),
        (run(strategies.BLT(2, 400, **KNOWN)), "a matrix of more than 100000 entries"),
    ],
)
def test_what_is_not_covered_is_said(mechanism, words):
    found = ja.verify(mechanism, SimpleNamespace(lower=0.0, upper=50.0), delta=1e-5)
    assert found.status == "undecided" and words in found.explanation
    sampled = run(Banded(3, 8), CyclicPoisson(3, 0.2))
    claim = SimpleNamespace(lower=0.0, upper=50.0)
    said = ja.verify(sampled, claim, delta=1e-5, relation="replace_one").explanation
    assert "cyclic Poisson sampling under replace_one" in said


def changed(value):
    """Other values of a field."""
    if value is None:
        return [1]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value]
    if isinstance(value, float):
        return [1.25 * value]
    return [(*value[:i], new, *value[i + 1 :]) for i, one in enumerate(value) for new in changed(one)[:1]]


REPEATED = {"bands", "buffers", "inverse_bands", "steps"}
"""Counts that may be the length of another field; the constructor then refuses any other count."""


def told(strategy, way):
    with precision(128):
        try:
            rate, moves = _moves(strategy, way, 128)
        except NotCovered as error:
            return str(error)
        return [outward(rate), *((outward(square), count) for square, count in moves)]


def others(record, name):
    """The record with other values of a field, where its constructor allows them."""
    for value in changed(getattr(record, name)):
        with contextlib.suppress(ja.InputError):
            yield dataclasses.replace(record, **{name: value})


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_every_field_of_a_strategy_is_read(strategy):
    every_step = lambda one: told(one, FixedEpochs(one.steps))  # every entry of C counts
    for field in dataclasses.fields(strategy):
        found = [every_step(other) != every_step(strategy) for other in others(strategy, field.name)]
        if field.name == "epochs":
            assert not any(found)  # no matrix depends on it
        else:
            assert any(found) if found else field.name in REPEATED, field.name


@pytest.mark.parametrize("way", WAYS_OF, ids=str)
def test_every_field_of_a_participation_is_read(way):
    strategy = Toeplitz((1.0, 0.6), 12)
    for field in dataclasses.fields(way):
        assert any(told(strategy, other) != told(strategy, way) for other in others(way, field.name)), field.name


def test_every_strategy_and_participation_has_an_example():
    public = [getattr(strategies, name) for name in strategies.__all__ if name != "Strategy"]
    # balls in bins are undecided: nothing but the transfer operator computes their law
    assert set(public) - {strategies.BallsInBins} == {*MATRICES, *WAYS}
    assert set(map(type, STRATEGIES)) == set(MATRICES) and set(map(type, WAYS_OF)) == set(WAYS)


def test_a_class_with_a_further_field_is_not_covered():
    more = dataclasses.make_dataclass("More", [("extra", int, 1)], bases=(Banded,), frozen=True)
    way = dataclasses.make_dataclass("Way", [("extra", int, 1)], bases=(FixedEpochs,), frozen=True)
    for mechanism, name in ((run(more(2, 6)), "More"), (run(Banded(2, 6), way(2)), "Way")):
        found = ja.verify(mechanism, SimpleNamespace(lower=0.0, upper=50.0), delta=1e-5)
        assert found.status == "undecided" and f"no definition for {name}" in found.explanation
