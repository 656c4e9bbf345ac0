"""Strategies and plans of jax_privacy, read and written, with stand-ins that have jax_privacy's fields and formulas.

The fields and formulas were read at commit 07068c9 of github.com/google-deepmind/jax_privacy: BandMFExecutionPlanConfig
(experimental/execution_plan.py), CyclicPoissonSampling (batch_selection.py), BufferedToeplitz, ColumnNormalizedBanded
and inverse_as_streaming_matrix (matrix_factorization/), amplified_bandmf_event (accounting.py).
"""

import dataclasses
import enum
import sys
import types
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct import strategies
from jaxacct.interop import from_jax_privacy, to_jax_privacy


@dataclasses.dataclass(kw_only=True)
class BufferedToeplitz:
    buf_decay: Any
    output_scale: Any

    def toeplitz_coefs(self, n):
        return np.append(1.0, (self.buf_decay ** np.arange(n - 1)[:, None] * self.output_scale).sum(1))


@dataclasses.dataclass(kw_only=True)
class ColumnNormalizedBanded:
    params: Any

    def materialize(self):
        """Entry (i, j) is params[j, i - j] over the norm of column j."""
        n, bands = self.params.shape
        matrix = np.zeros((n, n))
        for j in range(n):
            column = self.params[j, : min(bands, n - j)]
            matrix[j : j + column.size, j] = column / np.linalg.norm(column)
        return matrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandMFExecutionPlanConfig:
    iterations: int
    strategy: Any
    noise_multiplier: float | None = None
    l2_clip_norm: float = 1.0
    rescale_to_unit_norm: bool = True
    normalize_by: float = 1.0
    sampling_prob: float = 1.0
    truncated_batch_size: int | None = None
    num_examples: int | None = None
    column_normalize: bool = False

    def runs(self):
        """Return C and the standard deviation of the noise Z, in clip norms, of the plan that `make` builds."""
        n, coef = self.iterations, np.asarray(self.strategy)
        inverse = np.linalg.inv(sum(c * np.eye(n, k=-lag) for lag, c in enumerate(coef)))
        if self.column_normalize:
            norms = np.sqrt(np.cumsum(np.pad(coef, (0, n - coef.size)) ** 2))[::-1]
            inverse = norms[:, None] * inverse
        return np.linalg.inv(inverse), self.noise_multiplier * np.linalg.norm(coef)

    def event(self, sigma):
        """Return what jax_privacy's amplified_bandmf_event returns for this plan."""
        step = dpa.PoissonSampledDpEvent(self.sampling_prob, dpa.GaussianDpEvent(sigma))
        return dpa.SelfComposedDpEvent(step, -(-self.iterations // len(self.strategy)))

    def calibrate(self, epsilon, delta, accountant=dpa.pld.PLDAccountant):
        relation = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
        if self.num_examples is not None:
            relation = dpa.NeighboringRelation.REPLACE_SPECIAL
        found = dpa.calibrate_dp_mechanism(lambda: accountant(relation), self.event, epsilon, delta)
        return dataclasses.replace(self, noise_multiplier=found)


def coarse(relation):
    """Their accountant with wider steps: a larger upper bound, found sooner."""
    return dpa.pld.PLDAccountant(relation, value_discretization_interval=1e-3)


class PartitionType(enum.Enum):
    INDEPENDENT = 1
    EQUAL_SPLIT = 2


PLAN = BandMFExecutionPlanConfig(
    iterations=13, strategy=np.array([2.0, 1.0, 0.5]), noise_multiplier=0.8, sampling_prob=0.3
)


@pytest.fixture
def theirs(monkeypatch):
    """Install stand-in jax_privacy modules, whose classes `to_jax_privacy` then imports."""
    for name, cls in {
        "matrix_factorization.buffered_toeplitz": BufferedToeplitz,
        "matrix_factorization.banded": ColumnNormalizedBanded,
        "experimental.execution_plan": BandMFExecutionPlanConfig,
    }.items():
        module = types.ModuleType(f"jax_privacy.{name}")
        setattr(module, cls.__name__, cls)
        for parent in ("jax_privacy", f"jax_privacy.{name.partition('.')[0]}"):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def dense(strategy):
    """The matrix of a strategy from its entries."""
    n, matrix = strategy.steps, np.zeros((strategy.steps, strategy.steps))
    rows = (
        strategy.entries if isinstance(strategy, strategies.ColumnNormalised) else strategy.column[:, None] * np.ones(n)
    )
    for lag, row in enumerate(rows):
        matrix += np.eye(n, k=-lag) * row
    return matrix


@pytest.mark.parametrize("column_normalize", [False, True])
def test_a_plan_is_read_as_what_it_runs(column_normalize):
    """C over the standard deviation of Z, which fixes the law of C X + Z up to a scale, is that of the plan."""
    plan = dataclasses.replace(PLAN, column_normalize=column_normalize)
    matrix, deviation = plan.runs()
    mine = from_jax_privacy(plan)
    np.testing.assert_allclose(dense(mine.strategy) / mine.noise_multiplier, matrix / deviation, atol=1e-13)
    assert mine.participation == strategies.CyclicPoisson(3, 0.3)


@pytest.mark.parametrize("column_normalize", [False, True])
def test_a_plan_costs_no_more_than_its_event(column_normalize):
    """A plan costs no more than its event, unless its columns have norm 1 and its coefficients a norm below 1."""
    plan = dataclasses.replace(PLAN, column_normalize=column_normalize)
    mine = ja.epsilon(from_jax_privacy(plan), 1e-5).upper
    event = coarse(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(plan.event(0.8)).get_epsilon(1e-5)
    assert mine <= event
    small = dataclasses.replace(plan, strategy=0.3 * plan.strategy)
    found = ja.epsilon(from_jax_privacy(small), 1e-5)
    assert found.lower > event if column_normalize else abs(found.upper - mine) < 1e-9 * mine


@pytest.mark.parametrize(
    "iterations, examples, accountant",
    [
        (13, None, coarse),
        pytest.param(60, None, dpa.pld.PLDAccountant, marks=pytest.mark.slow),
        pytest.param(61, 1000, dpa.pld.PLDAccountant, marks=pytest.mark.slow),
    ],
)
def test_the_same_plan_needs_no_more_noise_certified(iterations, examples, accountant):
    coefs, cut = strategies.Banded(4, iterations).column, iterations % 4 > 0  # the end of the run cuts a block
    plan = BandMFExecutionPlanConfig(iterations=iterations, strategy=coefs, sampling_prob=0.2, num_examples=examples)
    relation = "add_or_remove_one" if examples is None else "zero_out"
    known = plan.calibrate(2.0, 1e-5, accountant)
    assert ja.epsilon(from_jax_privacy(known, relation=relation), 1e-5, relation=relation).upper <= 2.0
    less = dataclasses.replace(known, noise_multiplier=known.noise_multiplier * (0.998 if cut else 0.9999))
    spent = ja.epsilon(from_jax_privacy(less, relation=relation), 1e-5, relation=relation)
    assert spent.upper <= 2.0 if cut else spent.lower > 2.0


def test_strategies_are_read_and_written(theirs):
    buffered = BufferedToeplitz(buf_decay=np.array([0.9, 0.5]), output_scale=np.array([0.3, 0.2]))
    mine = from_jax_privacy(buffered, steps=9)
    np.testing.assert_allclose(mine.column, buffered.toeplitz_coefs(9), rtol=1e-14)
    again = to_jax_privacy(mine)
    assert type(again) is BufferedToeplitz and again.buf_decay.tolist() == [0.9, 0.5]
    assert from_jax_privacy(again, steps=9) == mine == from_jax_privacy(again).for_steps(9)

    params = np.random.default_rng(0).uniform(0.2, 1.0, (7, 3))
    params[-1, 1:] = params[-2, 2:] = 0.0
    banded = ColumnNormalizedBanded(params=params)
    mine = from_jax_privacy(banded)
    np.testing.assert_allclose(dense(mine), banded.materialize(), atol=1e-15)
    np.testing.assert_allclose(to_jax_privacy(mine).materialize(), banded.materialize(), atol=1e-15)

    assert from_jax_privacy(np.array([1.0, 0.5, 0.2]), steps=2) == strategies.Toeplitz((1.0, 0.5), 2)
    assert from_jax_privacy([1.0, 0.5]).for_steps(9) == strategies.Toeplitz((1.0, 0.5), 9)
    assert to_jax_privacy(strategies.Banded(2, 8)).tolist() == strategies.Banded(2, 8).column.tolist()


@pytest.mark.parametrize("groups", [3, 5])
def test_a_written_plan_has_at_least_the_noise(theirs, groups):
    run = ja.MatrixMechanism(strategies.Toeplitz((2.0, 1.0, 0.5), 13), 0.7, strategies.CyclicPoisson(groups, 0.3))
    plan = to_jax_privacy(run)
    matrix, deviation = plan.runs()
    np.testing.assert_allclose(matrix, dense(run.strategy), atol=1e-14)
    assert 0.7 <= deviation <= 0.7 * (1 + 1e-14) and len(plan.strategy) == groups
    assert plan.num_examples is None and plan.truncated_batch_size is None  # groups are independent; add or remove one
    again = ja.epsilon(from_jax_privacy(plan), 1e-5)
    assert again.upper == pytest.approx(float(ja.epsilon(run, 1e-5).upper), rel=1e-9)


@pytest.mark.parametrize(
    "thing, given, words",
    [
        (dataclasses.replace(PLAN, noise_multiplier=None), {}, "noise_multiplier of the plan is None"),
        (
            dataclasses.replace(PLAN, truncated_batch_size=9, num_examples=90),
            {"relation": "zero_out"},
            "truncated_batch_size = 9 is not accounted for",
        ),
        (dataclasses.replace(PLAN, num_examples=90), {}, "'add_or_remove_one' moves records of an equal split"),
        (dataclasses.replace(PLAN, num_examples=90), {"relation": "remove_one"}, "moves records of an equal split"),
        (PLAN, {"relation": "swap"}, "relation = 'swap' is not known"),
        ([1.0, 0.5], {"steps": -1}, "steps = -1 must be"),
        (BufferedToeplitz(buf_decay=[1.0], output_scale=[0.5]), {"steps": 9}, "decays[0] = 1.0 must be"),
        ("nonsense", {"steps": 9}, "coefficients = 'nonsense' must be"),
        (types.SimpleNamespace(sampling_prob=0.1, iterations=9, cycle_length=3), {"steps": 9}, "coefficients = name"),
        (dataclasses.replace(PLAN, strategy=[-1.0, 0.5]), {}, "coefficients[0] = -0.894427190999"),
        (dataclasses.replace(PLAN, iterations=2), {}, "bands = 3 must be <= steps / epochs = 2"),
    ],
)
def test_refusals_of_reading(thing, given, words):
    assert words in refusal(from_jax_privacy, thing, **given)


def test_earlier_plans_say_how_they_split():
    earlier = types.SimpleNamespace(**vars(PLAN), partition_type=PartitionType.EQUAL_SPLIT)
    assert "equal split" in refusal(from_jax_privacy, earlier)
    earlier.partition_type = PartitionType.INDEPENDENT
    assert from_jax_privacy(earlier).participation.groups == 3


def test_refusals_of_writing(monkeypatch):
    run = ja.MatrixMechanism(strategies.Toeplitz((1.0, 0.5), 4), 1.0, strategies.CyclicPoisson(2, 0.3))
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    assert "needs the package jax-privacy" in refusal(to_jax_privacy, run)
    assert "Gaussian has no counterpart in jax_privacy" in refusal(to_jax_privacy, ja.Gaussian(1.0))
    unsampled = dataclasses.replace(run, participation=strategies.FixedEpochs(2))
    assert "MatrixMechanism has no counterpart" in refusal(to_jax_privacy, unsampled)
