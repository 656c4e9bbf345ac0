"""Training with correlated noise: the noise itself, who is drawn, resumption, and what a ledger counts.

The noise of the real steps, multiplied by the strategy's matrix, must be independent noise of the plan's size.
"""

import copy
import dataclasses
import functools
import itertools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_runs import KEY, linear, sgd, shared, still

import jaxacct as ja
from jaxacct import strategies
from jaxacct.cli import files
from jaxacct.report import subjects
from jaxacct.training import AdaptiveClip, Ledger, Plan, PrivateLoss, Source, Trainer, fresh_key, lora
from jaxacct.training.ledger.contents import Spent, ahead
from jaxacct.training.ledger.format import Step
from jaxacct.training.run.program import Program
from jaxacct.training.run.state import Stretch, released
from jaxacct.training.sampling import sampler
from jaxacct.training.sharding.placement import Placement
from jaxacct.training.step import step_function, step_mechanisms
from jaxacct.training.step.step_function import numbers_at
from jaxacct.training.step.step_mechanisms import CYCLIC, Release
from jaxacct.tuning import side_by_side

WIDTH = 4000
"""Number of parameters: two independent rows correlate above 6 / sqrt(WIDTH) = .095 with probability below 1e-8."""


def plan_of(noise=None, size=8, steps=12, groups=4, sigma=0.5, rate=1.0, **more):
    kind = {"sampling": "cyclic_poisson", "noise": noise, "groups": groups, "sampling_probability": rate}
    return Plan(target_delta=1e-5, dataset_size=size, steps=steps, noise_multiplier=sigma, **kind | more)


BANDED = plan_of(strategies.Banded(4), size=24)


def trainer_of(plan):
    """A trainer of real steps.  Plans with the same batches and buffers share one program."""
    return shared(linear, sgd(1.0), plan, micro_batch=3)


def noise_of(plan):
    """The noise of each step in clip norms, (steps, WIDTH): the data are zeros."""
    trainer = trainer_of(plan)
    seen = [np.zeros(WIDTH)]
    look = lambda state: seen.append(np.asarray(state.params, np.float64))
    data = np.zeros((plan.dataset_size, WIDTH), np.float32)
    trainer.fit(trainer.init(np.zeros(WIDTH, np.float32), KEY), data, callbacks=[look], progress=False)
    return -np.diff(seen, axis=0) * plan.expected_batch_size


@functools.cache
def of_banded():
    return noise_of(BANDED)


def matrix(strategy):
    """C, from the definition of each strategy and not from its filter."""
    steps = strategy.steps
    if isinstance(strategy, strategies.ColumnNormalised):
        found = np.zeros((steps, steps))
        for lag, row in enumerate(strategy.diagonals):
            for column in range(steps - lag):
                found[column + lag, column] = row[column]
        return found
    column = np.zeros(steps)
    if isinstance(strategy, strategies.BandedInverse):
        first = np.zeros(steps)
        first[: strategy.inverse_bands] = strategy.inverse
        inverse = sum(np.diag(np.full(steps - lag, first[lag]), -lag) for lag in range(steps))
        return np.linalg.inv(inverse)
    if isinstance(strategy, strategies.BLT):
        terms = zip(strategy.scales, strategy.decays, strict=True)
        column[0], column[1:] = 1.0, sum(scale * decay ** np.arange(steps - 1) for scale, decay in terms)
    else:
        column[: len(strategy.column)] = strategy.column
    return sum(np.diag(np.full(steps - lag, column[lag]), -lag) for lag in range(steps))


def is_white(noise, strategy, sigma):
    """Whether C W is independent noise of standard deviation sigma times the largest norm of a column."""
    found = matrix(strategy)
    rows = found @ noise[: len(found)] / (sigma * np.linalg.norm(found, axis=0).max())
    return np.abs(rows @ rows.T / WIDTH - np.eye(len(rows))).max() < 6.5 * np.sqrt(2 / WIDTH)


KNOWN = {"scales": (0.35, 0.2), "decays": (0.9, 0.3)}
"""Given, so that nothing is searched for while tests are collected."""
ORDERED = strategies.BLT(2, 12, **KNOWN)
STRATEGIES = [
    strategies.Identity(12),
    strategies.Banded(4, 12),
    strategies.ColumnNormalised(3, 12, diagonals=np.outer((0.9, -0.4, 0.2), np.linspace(1.0, 0.8, 12))),
    strategies.Toeplitz((2.0, -1.0, 0.5), 12),
    ORDERED,
    strategies.BandedInverse(4, 12, inverse=(1.0, -0.5, 0.2, -0.1)),
]


@pytest.mark.parametrize("strategy", [*STRATEGIES, strategies.PrefixSum(12), strategies.PrefixSum(12, 1, 3)], ids=repr)
def test_a_filter_makes_the_rows_of_the_inverse_matrix(strategy):
    steps = strategy.steps
    buffers = np.zeros((strategy.taps(0).past.size, steps))
    rows = []
    for step, fresh in enumerate(np.eye(steps)):
        own, past, keep, of_sum, of_fresh = strategy.taps(step)
        rows.append(own * fresh + past @ buffers)
        buffers = keep[:, None] * buffers + np.outer(of_sum, rows[-1]) + np.outer(of_fresh, fresh)
    if isinstance(strategy, strategies.PrefixSum):
        squares = np.sum(np.cumsum(rows, axis=0) ** 2, axis=1)
        assert squares == pytest.approx(strategy.squared_errors(), rel=1e-14)
    else:
        assert np.array(rows) == pytest.approx(np.linalg.inv(matrix(strategy)), abs=1e-12)


def test_the_noise_of_a_run_is_the_strategys():
    assert is_white(of_banded(), BANDED.noise, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[2:4], ids=repr)
def test_the_noise_of_a_run_is_any_strategys(strategy):
    assert is_white(noise_of(plan_of(strategy)), strategy, 0.5)


def in_order(noise, **more):
    """A run of three passes of four batches, in one order."""
    kind = {"sampling": "fixed_order", "groups": None, "sampling_probability": None, "batch_size": 3, "size": 10}
    return plan_of(noise, **kind | more)


@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[0], *STRATEGIES[4:]], ids=repr)
def test_in_one_order_the_noise_covers_all_passes(strategy):
    """A record is in steps j, j + 4 and j + 8: the noise is relative to the sensitivity of all three."""
    plan = in_order(strategy)
    apart = strategy.sensitivity(strategies.MinSeparation(4)).upper
    found = matrix(strategy) @ noise_of(plan) / (0.5 * apart)
    assert np.abs(found @ found.T / WIDTH - np.eye(12)).max() < 6.5 * np.sqrt(2 / WIDTH)
    assert plan.epsilon.upper == pytest.approx(float(ja.epsilon(ja.Gaussian(0.5), 1e-5).upper), rel=1e-9)
    run = ja.MatrixMechanism(strategy, 0.5 * float(apart), strategies.MinSeparation(4))
    assert plan.epsilon.upper == pytest.approx(float(ja.epsilon(run, 1e-5).upper), rel=1e-6)


@pytest.mark.parametrize("restarts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_tree_aggregation_trains(restarts):
    """Prefix sums of its noise are sums of nodes: their variances are those of the strategy."""
    plan = in_order(strategies.PrefixSum(restarts=restarts))
    sums = np.cumsum(noise_of(plan), axis=0) / (0.5 * float(plan.noise.sensitivity(strategies.MinSeparation(4)).upper))
    assert np.mean(sums**2, axis=1) == pytest.approx(plan.noise.squared_errors(), rel=6.5 * np.sqrt(2 / WIDTH))


# quick runs test sources in test_training_sources.py
@pytest.mark.parametrize("source", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_order_is_kept_for_all_passes(source):
    data, plan = np.eye(10, WIDTH, dtype=np.float32), in_order(strategies.Banded(4), sigma=1e-4)
    drawn = batches(plan, data)
    assert (drawn.sum(1) == [3, 3, 3, 1] * 3).all() and (drawn[:4].sum(0) == 1).all()
    assert (drawn[:4] == drawn[4:8]).all() and (drawn[:4] == drawn[8:]).all()
    assert not source or (batches(plan, Source(data)) == drawn).all()


def test_a_ledger_counts_a_run_in_one_order_once(tmp_path):
    plan = in_order(ORDERED, relation="zero_out")
    with ledger_of(tmp_path, plan) as ledger:
        for step in range(5):
            record(ledger, step, partition="order", plan=plan)
        assert ledger.releases() == {Release("fixed_order", 0.5, 1.0): 1}
        record(ledger, 3, key="other", partition="order", plan=plan)
        assert ledger.releases() == {Release("fixed_order", 0.5, 1.0): 2}
    assert "counts whole" in refusal(lambda: Plan.of(plan.segments, plan, target_epsilon=99.0).recalibrate(4, steps=24))
    assert "does not hold" in refusal(lambda: in_order(ORDERED, relation="add_or_remove_one"))
    assert Plan.from_json(plan.to_json()) == plan


def test_every_place_that_names_batch_rules_names_all():
    assert set(subjects.SAMPLING) == set(step_mechanisms.SAMPLING)
    assert set(files._COUNTED) == set(step_mechanisms.BY_PASS)


def broken(plan, change):
    """The plan with other weights in each step."""
    found = copy.copy(plan)
    vars(found)["taps"] = lambda step: change(step, plan.taps(step))
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda step, taps: taps._replace(past=np.where(np.arange(3) == step % 3, 0.0, taps.past)),  # a band less
        lambda step, taps: taps._replace(keep=taps.keep * (step != 6)),  # buffers lost at a resumption
        lambda step, taps: taps._replace(own=0.99 * taps.own * (0.9 if step == 3 else 1.0)),  # too little noise
    ],
    ids=["band", "lost", "small"],
)
def test_other_noise_is_found_out(change):
    assert is_white(of_banded(), BANDED.noise, 0.5)
    assert not is_white(noise_of(broken(BANDED, change)), BANDED.noise, 0.5)


def test_one_independent_noise_in_two_steps_is_found_out(monkeypatch):
    from jaxacct.training.run.program import Program

    real = Program.advance

    def again(self, line, step):
        after, key, *rest = real(self, line, step)
        if step == 4:
            self.kept = key.words
        return after, key._replace(words=self.kept) if step == 5 else key, *rest

    monkeypatch.setattr(Program, "advance", again)
    assert not is_white(noise_of(BANDED), BANDED.noise, 0.5)


def test_steps_of_two_dtypes_are_traced_under_x64(monkeypatch):
    """The loop over micro-batches also sums losses, whose dtype must not change within the loop."""
    compile = jax.stages.Lowered.compile  # only the check of the loss compiles with options
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *low, **how: compile(*low, **how) if how else None)
    monkeypatch.setattr(Program, "run", lambda self, carried, *given: still(carried, *given, None))
    with jax.enable_x64(True):
        loss = lambda params, x: sum(jnp.sum(p).astype(jnp.float32) for p in params.values()) * jnp.sum(x)
        trainer = Trainer(loss, sgd(1.0), BANDED, 1.0, micro_batch=3)
        first = trainer.init({name: np.ones(2, name) for name in ("float32", "float64")}, KEY)
        assert trainer.fit(first, np.zeros((24, 2), np.float32), progress=False).stopped == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
def test_noise_of_other_models_is_that_of_the_matrix(kind):
    """With weights or adapters of two dtypes and micro-batches of 3 records, C W is independent noise in each array."""
    with jax.enable_x64(kind == "float64"):
        first = {name: np.ones((60, 70), name) for name in ("float32", kind)}
        first = first if kind == "float64" else lora(first, rank=40, where=lambda path: True)
        loss = lambda params, x: sum(jnp.sum(p).astype(jnp.float32) for p in params.values()) * jnp.sum(x)
        trainer = Trainer(loss, optax.sgd(BANDED.expected_batch_size), BANDED, 1.0, micro_batch=3)
        seen = []
        adapters = lambda state: jax.tree.leaves(getattr(state.params, "adapters", state.params))
        note = lambda state: seen.append([np.ravel(np.asarray(p, np.float64)) for p in adapters(state)])
        state = trainer.init(first, KEY)
        note(state)
        done = trainer.fit(state, np.zeros((24, 2), np.float32), callbacks=[note], progress=False)
    assert done.stopped == "finished"
    for part in zip(*seen, strict=True):
        noise = -np.diff(np.array(part), axis=0)
        found = matrix(BANDED.noise)
        rows = found @ noise / (0.5 * np.linalg.norm(found, axis=0).max())
        limit = 8 * np.sqrt(2 / noise.shape[1]) + (0.1 if kind == "bfloat16" else 0.0)  # its sums are rounded
        assert np.abs(rows @ rows.T / noise.shape[1] - np.eye(len(rows))).max() < limit


def batches(plan, data, **more):
    """What each real step draws: a row for each step, a column for each record; the noise is too small to matter."""
    trainer, size = trainer_of(plan), plan.dataset_size
    seen = [np.zeros(size)]
    look = lambda state: seen.append(np.asarray(state.params)[:size] * plan.expected_batch_size)
    trainer.fit(trainer.init(np.zeros(WIDTH, np.float32), KEY), data, callbacks=[look], progress=False, **more)
    return np.round(-np.diff(seen, axis=0)).astype(int)


# quick runs test sources in test_training_sources.py
@pytest.mark.parametrize("source", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_record_stays_in_its_group(source):
    """At rate 1 a record is in one step of each pass, always at the same place; at rate 1/2 in half of them."""
    size = 24
    data = np.eye(size, WIDTH, dtype=np.float32)
    for rate in (1.0, 0.5):
        plan = plan_of(strategies.Banded(4), size=size, steps=32, sigma=1e-4, rate=rate)
        drawn = batches(plan, Source(data) if source else data)
        assert set(drawn.ravel()) == {0, 1}
        passes = drawn.reshape(8, 4, size)
        places = passes.any(0)
        assert (
            (places.sum(0) <= 1).all()
            and places.any(0).sum() >= size - (0 if rate == 1.0 else 5)
            and (places.sum(1) > 1).all()
        )
        assert passes.sum() == 8 * size if rate == 1.0 else 70 < passes.sum() < 122
    where = {tuple(np.flatnonzero(column)) for column in passes.sum(1).T}
    assert len(where) > size / 2  # records are drawn independently


def test_host_and_device_draw_the_same():
    key, group_key = fresh_key(), fresh_key()
    limit = sampler.threshold(0.3)
    draw = jax.jit(lambda key, group_key, position: sampler.cyclic_poisson(key, group_key, 200, limit, 3, position))
    for position in range(3):
        drawn = draw(key, group_key, position)
        words = [np.asarray(jax.random.key_data(each)) for each in (key, group_key)]
        turn = sampler.host_slots(words[1], 200, 3) == position
        found = sampler.host_poisson(words[0], 200, limit)
        assert np.asarray(drawn.indices)[: int(drawn.count)].tolist() == found[turn[found]].tolist()


DATA = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
RUN = plan_of(strategies.Banded(4), size=24, steps=12, groups=4, sigma=2.0, rate=0.6)
ROWS = np.random.default_rng(0).normal(size=(24, WIDTH)).astype(np.float32)


def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path):
    trainer = trainer_of(RUN)
    begin = lambda: trainer.init(np.zeros(WIDTH, np.float32), KEY)
    whole = trainer.fit(begin(), ROWS, progress=False, ledger=tmp_path / "a.jsonl")
    stopped = trainer.fit(begin(), ROWS, progress=False, callbacks=[lambda state: state.step == 5])
    assert np.array_equal(trainer.fit(stopped, ROWS, progress=False).params, whole.params)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            begin(),
            ROWS,
            progress=False,
            ledger=tmp_path / "b.jsonl",
            checkpoints=tmp_path / "b",
            checkpoint_every=6,
            callbacks=[lambda state: (_ for _ in ()).throw(KeyboardInterrupt()) if state.step == 8 else None],
        )
    again = trainer.fit(
        begin(), ROWS, progress=False, ledger=tmp_path / "b.jsonl", checkpoints=tmp_path / "b", checkpoint_every=6
    )
    assert np.array_equal(again.params, whole.params)
    assert Ledger.read(tmp_path / "b.jsonl").runs[Ledger.read(tmp_path / "b.jsonl").run].same > 0


def test_a_resumption_without_the_buffers_is_another_run(monkeypatch, tmp_path):
    trainer = trainer_of(RUN)
    whole = trainer.fit(trainer.init(np.zeros(WIDTH, np.float32), KEY), ROWS, progress=False)
    stopped = trainer.fit(
        trainer.init(np.zeros(WIDTH, np.float32), KEY), ROWS, progress=False, callbacks=[lambda s: s.step == 5]
    )
    real = Placement.carried
    monkeypatch.setattr(
        Placement, "carried", lambda self, state, trained: real(self, dataclasses.replace(state, past=None), trained)
    )
    assert not np.array_equal(trainer.fit(stopped, ROWS, progress=False).params, whole.params)


def test_the_buffers_are_secret():
    trainer = trainer_of(RUN)
    state = trainer.fit(
        trainer.init(np.zeros(WIDTH, np.float32), KEY), ROWS, progress=False, callbacks=[lambda s: s.step == 5]
    )
    assert jax.tree_util.tree_leaves(state.past.arrays)[0].shape == (3, WIDTH)
    assert "past" not in repr(state) and "past" not in repr(state.opt_state)
    assert copy.deepcopy(state).past.arrays is state.past.arrays
    told = pickle.dumps(state.past)
    assert pickle.loads(told).arrays is None and len(told) < 100


def ledger_of(tmp_path, plan=RUN):
    return Ledger.create(tmp_path / "l.jsonl", plan)


def record(ledger, step, key=None, partition=None, plan=RUN, sigma=None):
    label = f"pass {step // 4}" if partition is None else partition
    segment = plan.at(step)
    ledger.record(step, f"key {step}" if key is None else key, f"b{step}", sigma or segment[2], segment[3], label)


def counts(ledger):
    return {(release.sampling, release[2]): count for release, count in ledger.releases().items()}


def test_a_ledger_counts_passes(tmp_path):
    with ledger_of(tmp_path) as ledger:
        for step in range(6):
            record(ledger, step)
            record(ledger, step)  # an exact replay
        assert counts(ledger) == {(CYCLIC, RUN.sampling_probability): 2}
        assert ledger.epsilon(1e-5).upper == RUN.epsilon_after(6).upper == RUN.epsilon_after(8).upper
        assert RUN.epsilon_after(9).upper == RUN.epsilon.upper


@pytest.mark.parametrize(
    "wrong, more",
    [
        (lambda ledger: record(ledger, 2, key="other"), 1),  # a step twice, with noise of its own
        (lambda ledger: (record(ledger, 2, key="other"), record(ledger, 3, key="other")), 2),
        (lambda ledger: record(ledger, 9), 1),  # step 8 is missing: it shares noise with step 9
        (lambda ledger: record(ledger, 8, sigma=1.0), 1),  # less noise: earlier steps cost more
        (lambda ledger: record(ledger, 8, partition="pass 1"), 1),  # the second pass has no ninth step
        (lambda ledger: ledger._file.append(b'{"kind": "step", "run": "'), 1),
    ],
)
def test_what_does_not_follow_counts_as_a_gaussian(tmp_path, wrong, more):
    with ledger_of(tmp_path) as ledger:
        for step in range(8):
            record(ledger, step)
        before = counts(ledger)
        wrong(ledger)
    found = counts(Ledger.read(tmp_path / "l.jsonl"))
    assert before == {(CYCLIC, RUN.sampling_probability): 2}
    assert found[CYCLIC, 1.0] == more


def test_a_part_of_a_run_counts_what_it_shares_with_the_steps_before(tmp_path):
    with ledger_of(tmp_path) as ledger:
        for step in range(4, 8):
            record(ledger, step)
        assert counts(ledger) == {(CYCLIC, RUN.sampling_probability): 1, (CYCLIC, 1.0): 1}


def test_the_stop_rule_expects_what_the_ledger_will_count(tmp_path):
    target = float(RUN.epsilon.upper) * 1.0001
    plan = Plan.of(RUN.segments, RUN, target_epsilon=target)
    with ledger_of(tmp_path, plan) as ledger:
        for step in range(12):
            assert plan.allows(ledger, step, f"pass {step // 4}")
            if step < 8:
                record(ledger, step, plan=plan)
            else:
                break
        assert not plan.allows(ledger, 2, "pass 0") and not plan.allows(ledger, 10, "pass 2")


def test_a_ledger_must_begin_with_the_run(tmp_path, still_steps):
    trainer = trainer_of(RUN)
    state = trainer.fit(
        trainer.init(np.zeros(3, np.float32), KEY), DATA, progress=False, callbacks=[lambda s: s.step == 4]
    )
    assert "from the first step on" in refusal(
        lambda: trainer.fit(state, DATA, progress=False, ledger=tmp_path / "l.jsonl")
    )


def test_another_plan_may_follow_where_the_noise_goes_on(still_steps):
    plan = plan_of(strategies.Banded(3), 24, 12, 4, 2.0, 1.0)
    target = 1.2 * float(plan.epsilon.upper)
    plan = Plan.of(plan.segments, plan, target_epsilon=target)
    trainer = trainer_of(plan)
    state = trainer.fit(
        trainer.init(np.zeros(3, np.float32), KEY), DATA, progress=False, callbacks=[lambda s: s.step == 8]
    )
    longer = plan.recalibrate(8, steps=24)
    assert longer.noise.column.tolist() == plan.noise.column.tolist() and longer.noise.steps == 24
    assert longer.at(8).noise_multiplier > 2.0 and longer.epsilon.upper <= target
    done = trainer_of(longer).fit(state, DATA, progress=False)
    assert done.stopped == "finished" and float(done.epsilon.upper) <= target
    for other in (plan_of(strategies.Banded(2), 24, 12, 4, 3.0), plan_of(None, 24, 12, 4, 3.0)):
        assert "share noise" in refusal(lambda plan=other: trainer_of(plan).fit(state, DATA, progress=False))
    assert "within the pass" in refusal(lambda: plan.recalibrate(6, steps=24))
    assert "falls" in refusal(lambda: plan.recalibrate(4, steps=8))


def test_a_plan_costs_what_the_matrix_mechanism_costs():
    sampled = strategies.CyclicPoisson(4, RUN.sampling_probability)
    run = ja.MatrixMechanism(RUN.noise, 2.0, sampled)
    assert RUN.epsilon.upper == pytest.approx(float(ja.epsilon(run, 1e-5).upper), rel=1e-6)
    assert RUN.whole == {Release(CYCLIC, 2.0, RUN.sampling_probability): 3}


def test_a_plan_is_solved_for_each_of_its_settings():
    terms = {"target_epsilon": 2.0, "target_delta": 1e-5, "dataset_size": 1000, "sampling": "cyclic_poisson"}
    noise = strategies.Banded(4)
    solved = Plan(**terms, noise=noise, batch_size=50, steps=8)
    assert solved.noise == strategies.Banded(4, 8) and solved.sampling_probability == 0.2 and solved.groups == 4
    assert 1.999 < solved.epsilon.upper <= 2.0
    same = ja.epsilon(ja.dp_sgd(solved.noise_multiplier, 0.2, 2), 1e-5)
    assert solved.epsilon.upper == pytest.approx(float(same.upper), rel=1e-9)
    found = Plan(**terms, noise=noise, batch_size=50, noise_multiplier=solved.noise_multiplier)
    assert found.steps == 8
    assert Plan.from_json(solved.to_json()) == solved
    document = json.loads(solved.to_json())
    document["noise"]["coefficients"][0] *= 3
    assert Plan.from_document(document) != solved


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"groups": 3}, "groups = 3 must be >= 4"),
        ({"noise": strategies.BLT(2), "groups": None}, "groups is missing"),
        ({"noise": strategies.BLT(2)}, "groups = 4 must be >= 12"),
        ({"noise": "banded"}, "is no strategy"),
        ({"noise": 1.1}, "noise_multiplier for the size of the noise"),
        ({"sampling": "poisson", "groups": None}, "noise"),
        ({"noise_schedule": [(6, 2.0), (None, 1.0)]}, "falls from 1 to 0.5"),
        ({"sampling_probability": None, "batch_schedule": [(6, 1.0), (None, 2.0)]}, "batch_schedule"),
        ({"sampling_probability": None, "batch_size": 3}, "expected_batch_size = 3 must be <= 2"),
        ({"relation": "replace_one"}, "relation = 'replace_one'"),
        ({"data_dependent": True}, "data_dependent"),
    ],
)
def test_what_has_no_accounting_is_refused(settings, said):
    given = {"noise": strategies.Banded(4), "groups": 4, "sampling_probability": 1.0, "sampling": "cyclic_poisson"}
    terms = {"target_delta": 1e-5, "dataset_size": 8, "steps": 12, "noise_multiplier": 0.5}
    assert said in refusal(lambda: Plan(**terms, **given | settings))


def test_further_releases_of_a_step_are_refused():
    plan = plan_of(strategies.Banded(4), sigma=5.0, size=1000)
    for more in ({"clip_norm": AdaptiveClip(1.0)}, {"clip_norm": 1.0, "private_loss": PrivateLoss(1.0)}):
        assert "noise that steps share" in refusal(lambda more=more: Trainer(linear, sgd(1.0), plan, **more))


def test_every_pattern_of_draws_is_within_a_record_of_the_claim():
    """Brute force: blocks of one record never overlap, whatever it draws, and none has a norm above 1."""
    found = matrix(BANDED.noise) / np.linalg.norm(matrix(BANDED.noise), axis=0).max()
    for group in range(4):
        steps = range(group, 12, 4)
        columns = found[:, list(steps)]
        gram = columns.T @ columns
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-15 and np.diag(gram).max() <= 1 + 1e-15
    assert all(a // 4 != b // 4 for a, b in itertools.combinations(steps, 2))


# Changes after which later steps would tell more about earlier steps than is counted

SHARED = strategies.Toeplitz((0.6, 0.8))


def stopped_at(step, plan):
    trainer = trainer_of(plan)
    return trainer.fit(
        trainer.init(np.zeros(3, np.float32), KEY), DATA, progress=False, callbacks=[lambda s: s.step == step]
    )


def of_groups(noise=SHARED, steps=16, groups=4, sigma=2.0, rate=0.5, **more):
    return plan_of(noise, 24, steps, groups, sigma, rate, **more)


def test_noise_that_falls_under_another_plan_counts(tmp_path, still_steps):
    """Step 8 shares noise with step 7 at a smaller multiplier: a Gaussian is counted, with and without a ledger."""
    first, second = of_groups(), of_groups(sigma=0.5)
    done = trainer_of(second).fit(stopped_at(8, first), DATA, progress=False)
    with Ledger.create(tmp_path / "l.jsonl", first) as ledger:
        for plan, steps in ((first, range(8)), (second, range(8, 16))):
            ledger.replan(plan)
            for step in steps:
                record(ledger, step, plan=plan)
        assert released(done.history.stretches) == ledger.releases()
    assert ledger.releases()[Release(CYCLIC, 0.5, 1.0)] == 1


@pytest.mark.parametrize(
    "fact, before, after",
    [
        # columns grow
        ("noise", of_groups(strategies.BLT(2, 12, **KNOWN), 12, 24), lambda noise: of_groups(noise, 24, 24)),
        ("noise", of_groups(strategies.PrefixSum(12), 12, 16), lambda noise: of_groups(noise, 24, 16)),  # a level more
        ("noise", of_groups(), lambda noise: of_groups(strategies.Toeplitz((0.8, 0.6)))),
        ("noise", of_groups(), lambda noise: of_groups(None)),
        ("expected_batch_size", of_groups(), lambda noise: of_groups(noise, rate=0.25)),
        ("groups", of_groups(), lambda noise: of_groups(noise, groups=5)),
    ],
    ids=["columns", "tree", "matrix", "independent", "rate", "groups"],
)
def test_what_must_stay_is_asked_alike_everywhere(fact, before, after, tmp_path, still_steps):
    """The plan, the ledger of a user's own loop, and trainers with and without a ledger refuse in the same words."""
    other, path = after(before.noise), tmp_path / "run.jsonl"
    noted = trainer_of(before)
    state = noted.fit(
        noted.init(np.zeros(3, np.float32), KEY), DATA, ledger=path, progress=False, callbacks=[lambda s: s.step == 4]
    )
    with Ledger.create(tmp_path / "l.jsonl", before) as ledger:
        ledger.replan(other)
        ledger.replan(before)
        record(ledger, 0, plan=before)
        doors = [
            lambda: other.require_noise_of(before),
            lambda: ledger.replan(other),
            lambda: trainer_of(other).fit(stopped_at(4, before), DATA, progress=False),
            lambda: trainer_of(other).fit(state, DATA, progress=False, ledger=path),
        ]
        (told,) = {refusal(door) for door in doors}
    assert told.startswith(f"{fact} must be the same as in the steps so far") and "share noise" in told


@pytest.mark.parametrize(
    "steps, sigmas, alone",
    [
        ([0, 1, 2, 3], [1.0] * 4, 0),
        ([0, 1, 2, 3], [1.0, 1.0, 2.0, 2.0], 0),  # rises
        ([0, 1, 2, 3], [2.0, 2.0, 1.0, 1.0], 1),  # falls
        ([0, 1, 3, 4], [1.0] * 4, 1),  # a gap
        ([4, 5, 6, 7], [1.0] * 4, 1),  # the beginning is missing
        ([0, 1, 0, 1], [1.0] * 4, 2),  # from the beginning again, with other keys
        ([0, 1, 1, 2], [1.0] * 4, 1),  # step 1 twice: step 2 follows one of them
    ],
)
def test_what_does_not_follow_costs_alike_everywhere(steps, sigmas, alone):
    """The ledger, the stop rule and a run's history add the same Gaussians, and none where the noise is independent."""
    gaussians = lambda counts: sum(number for release, number in counts.items() if release.sampling_probability == 1.0)
    for noise, expected in ((SHARED, alone), (None, 0)):
        spent, ahead_of, stretches = Spent(shared=0 if noise else None), 0, []
        for number, (step, sigma) in enumerate(zip(steps, sigmas, strict=True)):
            plan = of_groups(noise, sigma=sigma)
            ahead_of += gaussians(ahead(plan, spent, step, 1, f"pass {step // 4}"))
            entry = Step("r", step, f"k{number}", "b", sigma, 0.5, CYCLIC, f"pass {step // 4}", groups=4)
            spent.add(entry)
            stretches.append(Stretch(plan, step, step + 1, ""))
        assert gaussians(spent.releases) == ahead_of == expected
        if len({*steps}) == len(steps):  # a history holds no step twice
            assert gaussians(released(stretches)) == expected


def test_independent_noise_may_fall_with_a_ledger(tmp_path, still_steps):
    """No step has the noise of another, so that the ledger counts what the plan does."""
    trainer = trainer_of(of_groups(noise=None, rate=1.0, noise_schedule=[(8, 2.0), (None, 1.0)]))
    state = trainer.init(np.zeros(3, np.float32), KEY)
    done = [trainer.fit(state, DATA, progress=False, ledger=ledger) for ledger in (None, tmp_path / "run.jsonl")]
    assert {(one.stopped, float(one.epsilon.upper)) for one in done} == {
        ("finished", float(trainer.plan.epsilon.upper))
    }


def test_trees_keep_their_length(still_steps):
    tree = strategies.PrefixSum(12, restarts=3)
    assert tree.for_steps(16).restarts == 4 and strategies.PrefixSum(restarts=2).for_steps(16).block == 8
    state = stopped_at(8, of_groups(tree, 12, 8))
    assert "multiple of 4" in refusal(lambda: tree.for_steps(15))
    other = of_groups(strategies.PrefixSum(15, restarts=3), 15, 8)
    assert "share noise" in refusal(lambda: trainer_of(other).fit(state, DATA, progress=False))


def test_records_that_move_to_other_groups_are_refused(still_steps):
    order = Plan(
        target_delta=1e-5, dataset_size=24, steps=16, noise_multiplier=2.0, sampling="fixed_order", batch_size=6
    )
    for plan in (of_groups(), of_groups(None), order):
        state = stopped_at(6, plan)
        told = refusal(lambda plan=plan, state=state: trainer_of(plan).fit(state, DATA[::-1].copy(), progress=False))
        assert "data must be the same" in told
        assert trainer_of(plan).fit(state, DATA.copy(), progress=False).step == 16


def test_another_clip_norm_or_other_parameters_are_refused(still_steps):
    state = stopped_at(6, of_groups())
    for fact, changed in (("clip_norm", {"clip_norm": jnp.float32(0.01)}), ("trained", {"params": jnp.zeros(2)})):
        other = dataclasses.replace(state, **changed)
        told = refusal(lambda other=other: trainer_of(of_groups()).fit(other, DATA, progress=False))
        assert told.startswith(fact) and "share noise" in told


def test_a_state_that_has_not_begun_goes_with_any_plan(keyed_steps):
    begun = trainer_of(of_groups()).init(np.zeros(WIDTH, np.float32), KEY)
    plan = of_groups(strategies.Toeplitz((0.8, 0.6, 0.1, 0.05)), rate=0.6)
    one, other = (
        trainer_of(plan).fit(state, ROWS, progress=False).params
        for state in (begun, trainer_of(plan).init(np.zeros(WIDTH, np.float32), KEY))
    )
    assert np.array_equal(one, other)


def test_groups_take_turns_in_all_segments():
    """A batch size that differs by rounding alone, or belongs to another rate, would let a group have a turn again."""
    plan = of_groups()
    segment = plan.segments[0]
    first, rest = segment._replace(steps=2), segment._replace(start=2, steps=14)
    for segments in (
        [first, rest._replace(expected_batch_size=3.0000000001)],
        [first, rest._replace(sampling_probability=0.5000000001)],
        [segment._replace(expected_batch_size=12.0)],
    ):
        assert "expected_batch_size" in refusal(lambda segments=segments: Plan.of(segments, plan))


MANY = [pytest.param(*case, marks=pytest.mark.slow) for case in [(24, 4, 0.3), (997, 7, 0.1), (1000, 7, 0.7)]]


@pytest.mark.parametrize("size, groups, rate", [(60_000, 7, 0.013), *MANY])
def test_a_recalibrated_run_keeps_its_rate_to_the_last_digit(size, groups, rate):
    plan = plan_of(None, size, 4 * groups, groups, 2.0, rate)
    plan = Plan.of(plan.segments, plan, target_epsilon=1.2 * float(plan.epsilon.upper))
    longer = plan.recalibrate(groups, steps=5 * groups)
    assert {segment.sampling_probability for segment in longer.segments} == {rate}
    assert longer.sampling_probability == pytest.approx(rate, rel=1e-14)  # of a group, not of the data


def test_a_step_noted_again_counts_as_a_gaussian_in_whichever_pass(tmp_path):
    """Step 1 shares noise with step 0 once more, whatever the label of its pass says."""
    plan = of_groups()
    with Ledger.create(tmp_path / "l.jsonl", plan) as ledger:
        for step, key, label in ((0, "a", "x"), (1, "b", "x"), (0, "c", "y"), (1, "d", "y")):
            record(ledger, step, key, label, plan)
        assert counts(ledger) == {(CYCLIC, 0.5): 1, (CYCLIC, 1.0): 2}


def test_a_pass_takes_only_steps_of_its_own_rule(tmp_path):
    """A step of groups does not join a pass of fixed batches, or a round, that has the same label."""
    more = {"target_delta": 1e-5, "dataset_size": 24, "noise_multiplier": 2.0, "steps": 16}
    fixed = Plan(**more, sampling="fixed_batches", batch_size=6)
    rounds = Plan(**more, sampling="random_allocation", slots=4)
    for place, plan in enumerate((fixed, rounds)):
        groups = of_groups(rate=plan.sampling_probability)
        with Ledger.create(tmp_path / f"{place}.jsonl", plan) as ledger:
            record(ledger, 0, partition="x", plan=plan)
            ledger.replan(groups)
            before = ledger.releases()
            assert ahead(groups, ledger.runs[ledger.run], 1, 1, "x")[Release(CYCLIC, 2.0, 1.0)] == 1
            record(ledger, 1, partition="x", plan=groups)
            assert (ledger.releases() - before)[Release(CYCLIC, 2.0, 1.0)] == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_ledger_counts_all_that_branches_of_a_run_tell(seed):
    """Brute force: runs resumed from earlier states, whose noise falls and rises, at rate 1 - 1e-9 and rate .1.

    An entry is (step, entry that it follows, noise multiplier).  A record in an entry moves, by a column of C,
    this entry and the later ones on each of its branches.  The stop rule must expect at least what is counted.
    """
    rng = np.random.default_rng(seed)
    for rate, begins in ((1.0 - 1e-9, 0), (0.1, 0), (1.0 - 1e-9, None)):
        for _ in range(200 if seed else 25):
            groups = int(rng.integers(1, 5))
            column = np.abs(rng.normal(size=int(rng.integers(1, groups + 1)) if begins == 0 else 1))
            column /= np.linalg.norm(column)
            entries, tips = [], [-1]
            plan = plan_of(None, 24, 20, groups, 1.0, rate)
            spent = Spent(shared=begins)  # None: independent noise
            for number in range(int(rng.integers(3, 14))):
                tip = tips.pop() if rng.random() < 0.7 else int(rng.choice(tips))
                step = entries[tip][0] + 1 if tip >= 0 else 0
                sigma = float(rng.choice([1.0, 1.0, 0.5, 2.0]))
                now = Plan.of([plan.segments[0]._replace(noise_multiplier=sigma)], plan)
                label = f"pass {step // groups}" if rng.random() < 0.8 else f"own {number}"
                expected = spent.releases + ahead(now, spent, step, 1, label)
                spent.add(Step("r", step, f"k{number}", "b", sigma, rate, CYCLIC, label, groups=groups))
                gaussians = lambda counts: sum(n / r[1] ** 2 for r, n in counts.items() if r[2] == 1.0)
                every = lambda counts: sum(n / r[1] ** 2 for r, n in counts.items())
                assert every(spent.releases) <= every(expected) + 1e-9
                assert gaussians(spent.releases) <= gaussians(expected) + 1e-9
                entries.append((step, tip, sigma))
                tips += [len(entries) - 1] if tips else [len(entries) - 1, tip]
            rows = np.zeros((len(entries), len(entries)))
            for row, (_, _, sigma) in enumerate(entries):
                at = row
                for weight in column:
                    if at >= 0:
                        rows[row, at], at = weight / sigma, entries[at][1]
            held = every(spent.releases)
            for group in range(groups):
                own = [place for place, (step, *_) in enumerate(entries) if step % groups == group]
                assert np.sum(rows[:, own].sum(1) ** 2) <= held * (1 + 1e-9)
                # what a step adds beyond one Gaussian of its own multiplier is counted as Gaussians without sampling
                for place in own:
                    beyond = np.sum(rows[:, place] ** 2) - entries[place][2] ** -2.0
                    assert beyond <= gaussians(spent.releases) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("sampling", ["cyclic_poisson", "fixed_order"])
def test_tunings_side_by_side_refuse_noise_that_is_relative_to_a_matrix(sampling):
    """Their steps have no filter, and would add too little noise."""
    more = {"groups": 4} if sampling == "cyclic_poisson" else {}
    plan = Plan(
        target_delta=1e-5, dataset_size=24, steps=16, noise_multiplier=2.0, sampling=sampling, batch_size=6, **more
    )
    assert sampling in refusal(lambda: side_by_side(linear, lambda config: sgd(0.1), plan, clip_norm=1.0))


@pytest.mark.parametrize("steps", [60, 3000])
def test_noise_that_grows_from_step_to_step_is_refused(steps):
    """The rows of C^-1 grow until float32 rounds the noise away or overflows: what is released is no Gaussian."""
    for column in ((3.0, 4.0), (1.0, -2.0)):
        for noise in (
            strategies.Toeplitz(column),
            strategies.Banded(2, steps, coefficients=column),
            strategies.ColumnNormalised(2, steps, diagonals=tuple((entry,) * steps for entry in column)),
            strategies.BLT(1, scales=(3.0,), decays=(0.5,)),
            strategies.BLT(2, scales=(2.0, 1.0), decays=(0.5, 0.2)),
        ):
            assert "grows" in refusal(lambda noise=noise: of_groups(noise, steps, groups=steps))
    for column in ((4.0, 3.0), (1.0, 1.0)):
        assert of_groups(strategies.Toeplitz(column), steps).steps == steps
        assert of_groups(strategies.Banded(2, steps, coefficients=column), steps).steps == steps


@pytest.mark.parametrize(
    "strategy", [strategies.BLT(2, 500, **KNOWN), strategies.Banded(16, 64)], ids=["BLT", "Banded"]
)
def test_rounding_of_the_weights_makes_no_matrix_larger(strategy):
    """The matrix that float32 weights make, in exact arithmetic, against the one that is accounted for.

    Beyond that the deviation of the noise has an allowance of 16 * 2^-24.
    """
    plan = plan_of(strategy, 1000, strategy.steps, 500, rate=0.5)
    own, past, keep, *_ = numbers_at(plan, strategy.steps - 1, None).taps
    exact = strategy.taps(strategy.steps - 1)
    assert (np.abs(past) <= np.abs(exact.past)).all() and (keep <= exact.keep).all() and own <= plan.taps(0).own
    if isinstance(strategy, strategies.BLT):
        made = dataclasses.replace(strategy, scales=tuple(-past.astype(float)), decays=tuple(keep.astype(float)))
        apart = strategies.MinSeparation(50)
        assert made.sensitivity(apart).upper <= strategy.sensitivity(apart).upper
        assert np.abs(own / plan.taps(0).own - 1) < 2.0**-22


def test_a_record_that_moves_another_costs_at_most_three_times_as_much():
    """One batch moves by 2 C, another batch by C.  Where steps share noise, the two changes are nearly parallel."""
    strategy = ORDERED
    dense, apart = matrix(strategy), strategy.sensitivity(strategies.MinSeparation(4)).upper
    passes = [dense[:, first::4].sum(1) for first in range(4)]
    most = max(np.linalg.norm(2 * one + other) for one, other in itertools.permutations(passes, 2)) / apart
    assert 5**0.5 < most <= 3
    said = refusal(lambda: in_order(strategy, relation="add_or_remove_one"))
    assert "noise_multiplier / 3)" in said and "5**0.5" not in said


def test_a_ledger_says_the_same(tmp_path):
    plan = in_order(ORDERED, relation="zero_out")
    with ledger_of(tmp_path, plan) as ledger:
        record(ledger, 0, partition="order", plan=plan)
        said = refusal(lambda: ledger.epsilon(1e-5, "add_or_remove_one"))
    assert "noise_multiplier / 3)" in said and "5**0.5" not in said


def test_products_of_correlated_noise_do_not_follow_the_default_precision():
    """At a device's default, of bfloat16 or TF32, the rounding errors of the noise tell a record from none."""
    taps = step_function.Taps(*(np.ones(shape, np.float32) for shape in ((), (3,), (3,), (3,), (3,))))
    fresh, past = {"w": np.ones(5, np.float32)}, {"w": np.ones((3, 5), np.float32)}
    traced = jax.make_jaxpr(lambda *given: step_function.filtered(*given))(taps, fresh, past)
    products = [eqn for eqn in traced.eqns if eqn.primitive.name == "dot_general"]
    assert products and all(eqn.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for eqn in products)
