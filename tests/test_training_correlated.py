"""Training with correlated noise: the noise itself, who is drawn, resumption, and what a ledger counts.

The noise of the real steps, multiplied by the strategy's matrix, must be independent noise of the plan's size.
"""

import copy
import dataclasses
import itertools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from training_runs import KEY, linear, sgd, shared

import jaxacct as ja
from jaxacct import strategies
from jaxacct.cli import files
from jaxacct.report import subjects
from jaxacct.training import AdaptiveClip, Ledger, Plan, PrivateLoss, Source, Trainer, fresh_key
from jaxacct.training.sampling import sampler
from jaxacct.training.sharding.placement import Placement
from jaxacct.training.step import step_mechanisms
from jaxacct.training.step.step_mechanisms import CYCLIC, Release

WIDTH = 4000
"""Parameters: the correlation of two independent rows of noise is below 6 / sqrt(WIDTH) = .095 but for 1e-8."""


def plan_of(noise=None, size=8, steps=12, groups=4, sigma=0.5, rate=1.0, **more):
    kind = {"sampling": "cyclic_poisson", "noise": noise, "groups": groups, "sampling_probability": rate}
    return Plan(target_delta=1e-5, dataset_size=size, steps=steps, noise_multiplier=sigma, **kind | more)


BANDED = plan_of(strategies.Banded(4))


def noise_of(plan):
    """The noise of each step in clip norms, (steps, WIDTH): the data are zeros."""
    trainer = shared(linear, sgd(plan.expected_batch_size), plan)
    seen = [np.zeros(WIDTH)]
    look = lambda state: seen.append(np.asarray(state.params, np.float64))
    data = np.zeros((plan.dataset_size, WIDTH), np.float32)
    trainer.fit(trainer.init(jnp.zeros(WIDTH), KEY), data, callbacks=[look], progress=False)
    return -np.diff(seen, axis=0)


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


STRATEGIES = [
    strategies.Identity(12),
    strategies.Banded(4, 12),
    strategies.ColumnNormalised(3, 12),
    strategies.Toeplitz((2.0, -1.0, 0.5), 12),
    strategies.BLT(2, 12),
    strategies.BandedInverse(4, 12),
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


@pytest.mark.parametrize("strategy", STRATEGIES[1:4], ids=repr)
def test_the_noise_of_a_run_is_the_strategys(strategy):
    assert is_white(noise_of(plan_of(strategy)), strategy, 0.5)


def in_order(noise, **more):
    """A run of three passes of four batches, in one order."""
    kind = {"sampling": "fixed_order", "groups": None, "sampling_probability": None, "batch_size": 2}
    return plan_of(noise, **kind | more)


@pytest.mark.parametrize("strategy", [*STRATEGIES[:2], *STRATEGIES[4:]], ids=repr)
def test_in_one_order_the_noise_covers_all_passes(strategy):
    """A record is in steps j, j + 4 and j + 8: the noise is relative to the sensitivity of all three."""
    plan = in_order(strategy)
    apart = strategy.sensitivity(strategies.MinSeparation(4)).upper
    found = matrix(strategy) @ noise_of(plan) / (0.5 * apart)
    assert np.abs(found @ found.T / WIDTH - np.eye(12)).max() < 6.5 * np.sqrt(2 / WIDTH)
    assert plan.epsilon.upper == pytest.approx(float(ja.epsilon(ja.Gaussian(0.5), 1e-5).upper), rel=1e-9)
    run = ja.MatrixMechanism(strategy, 0.5 * float(apart), strategies.MinSeparation(4))
    assert plan.epsilon.upper == pytest.approx(float(ja.epsilon(run, 1e-5).upper), rel=1e-6)


def test_tree_aggregation_trains():
    """Prefix sums of its noise are sums of nodes: their variances are those of the strategy."""
    plan = in_order(strategies.PrefixSum())
    sums = np.cumsum(noise_of(plan), axis=0) / (0.5 * float(plan.noise.sensitivity(strategies.MinSeparation(4)).upper))
    assert np.mean(sums**2, axis=1) == pytest.approx(plan.noise.squared_errors(), rel=6.5 * np.sqrt(2 / WIDTH))


def test_an_order_is_kept_for_all_passes():
    data = np.eye(10, dtype=np.float32)
    drawn = batches(in_order(strategies.BLT(2), size=10, sigma=1e-4, batch_size=3), data)
    assert (drawn.sum(1) == [3, 3, 3, 1] * 3).all() and (drawn[:4].sum(0) == 1).all()
    assert (drawn[:4] == drawn[4:8]).all() and (drawn[:4] == drawn[8:]).all()
    other = batches(in_order(strategies.BLT(2), size=10, sigma=1e-4, batch_size=3), Source(data))
    assert (other == drawn).all()


def test_a_ledger_counts_a_run_in_one_order_once(tmp_path):
    plan = in_order(strategies.BLT(2), relation="zero_out")
    with ledger_of(tmp_path, plan) as ledger:
        for step in range(5):
            record(ledger, step, partition="order", plan=plan)
        assert ledger.releases() == {Release("fixed_order", 0.5, 1.0): 1}
        record(ledger, 3, key="other", partition="order", plan=plan)
        assert ledger.releases() == {Release("fixed_order", 0.5, 1.0): 2}
    assert "counts whole" in refusal(lambda: Plan.of(plan.segments, plan, target_epsilon=99.0).recalibrate(4, steps=24))
    assert "does not hold" in refusal(lambda: in_order(strategies.BLT(2), relation="add_or_remove_one"))
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
    assert is_white(noise_of(BANDED), BANDED.noise, 0.5)
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


def batches(plan, data, **more):
    """What each real step draws: a row for each step, a column for each record; the noise is too small to matter."""
    trainer = shared(linear, sgd(plan.expected_batch_size), plan, micro_batch=3)
    seen = [np.zeros(plan.dataset_size)]
    look = lambda state: seen.append(np.asarray(state.params))
    trainer.fit(trainer.init(jnp.zeros(plan.dataset_size), KEY), data, callbacks=[look], progress=False, **more)
    return np.round(-np.diff(seen, axis=0)).astype(int)


@pytest.mark.parametrize("source", [False, True])
def test_each_record_stays_in_its_group(source):
    """At rate 1 a record is in one step of each pass, always at the same place; at rate 1/2 in half of them."""
    size = 40
    data = np.eye(size, dtype=np.float32)
    for rate in (1.0, 0.5):
        plan = plan_of(strategies.Banded(3), size=size, steps=32, sigma=1e-4, rate=rate)
        drawn = batches(plan, Source(data) if source else data)
        assert set(drawn.ravel()) == {0, 1}
        passes = drawn.reshape(8, 4, size)
        places = passes.any(0)
        assert (
            (places.sum(0) <= 1).all()
            and places.any(0).sum() >= size - (0 if rate == 1.0 else 5)
            and (places.sum(1) > 3).all()
        )
        assert passes.sum() == 8 * size if rate == 1.0 else 120 < passes.sum() < 200
    where = {tuple(np.flatnonzero(column)) for column in passes.sum(1).T}
    assert len(where) > size / 2  # records are drawn independently


def test_host_and_device_draw_the_same():
    key, group_key = fresh_key(), fresh_key()
    limit = sampler.threshold(0.3)
    for position in range(3):
        drawn = sampler.cyclic_poisson(key, group_key, 200, limit, 3, position)
        words = [np.asarray(jax.random.key_data(each)) for each in (key, group_key)]
        turn = sampler.host_slots(words[1], 200, 3) == position
        found = sampler.host_poisson(words[0], 200, limit)
        assert drawn.indices[: int(drawn.count)].tolist() == found[turn[found]].tolist()


DATA = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
RUN = plan_of(strategies.Banded(3), size=24, steps=12, groups=4, sigma=2.0, rate=0.6)


def trainer_of(plan):
    return shared(linear, sgd(0.1), plan)


def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path):
    trainer = trainer_of(RUN)
    begin = lambda: trainer.init(jnp.zeros(3), KEY)
    whole = trainer.fit(begin(), DATA, progress=False, ledger=tmp_path / "a.jsonl")
    stopped = trainer.fit(begin(), DATA, progress=False, callbacks=[lambda state: state.step == 5])
    assert np.array_equal(trainer.fit(stopped, DATA, progress=False).params, whole.params)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            begin(),
            DATA,
            progress=False,
            ledger=tmp_path / "b.jsonl",
            checkpoints=tmp_path / "b",
            checkpoint_every=3,
            callbacks=[lambda state: (_ for _ in ()).throw(KeyboardInterrupt()) if state.step == 8 else None],
        )
    again = trainer.fit(
        begin(), DATA, progress=False, ledger=tmp_path / "b.jsonl", checkpoints=tmp_path / "b", checkpoint_every=3
    )
    assert np.array_equal(again.params, whole.params)
    assert Ledger.read(tmp_path / "b.jsonl").runs[Ledger.read(tmp_path / "b.jsonl").run].same > 0


def test_a_resumption_without_the_buffers_is_another_run(monkeypatch, tmp_path):
    trainer = trainer_of(RUN)
    whole = trainer.fit(trainer.init(jnp.zeros(3), KEY), DATA, progress=False)
    stopped = trainer.fit(trainer.init(jnp.zeros(3), KEY), DATA, progress=False, callbacks=[lambda s: s.step == 5])
    real = Placement.carried
    monkeypatch.setattr(
        Placement, "carried", lambda self, state, trained: real(self, dataclasses.replace(state, past=None), trained)
    )
    assert not np.array_equal(trainer.fit(stopped, DATA, progress=False).params, whole.params)


def test_the_buffers_are_secret():
    trainer = trainer_of(RUN)
    state = trainer.fit(trainer.init(jnp.zeros(3), KEY), DATA, progress=False, callbacks=[lambda s: s.step == 5])
    assert jax.tree_util.tree_leaves(state.past.arrays)[0].shape == (2, 3)
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


def test_a_ledger_must_begin_with_the_run(tmp_path):
    trainer = trainer_of(RUN)
    state = trainer.fit(trainer.init(jnp.zeros(3), KEY), DATA, progress=False, callbacks=[lambda s: s.step == 4])
    assert "from the first step on" in refusal(
        lambda: trainer.fit(state, DATA, progress=False, ledger=tmp_path / "l.jsonl")
    )


def test_another_plan_may_follow_where_the_noise_goes_on(tmp_path):
    target = 1.2 * float(RUN.epsilon.upper)
    plan = Plan.of(RUN.segments, RUN, target_epsilon=target)
    trainer = trainer_of(plan)
    state = trainer.fit(trainer.init(jnp.zeros(3), KEY), DATA, progress=False, callbacks=[lambda s: s.step == 8])
    longer = plan.recalibrate(8, steps=24)
    assert longer.noise.column.tolist() == plan.noise.column.tolist() and longer.noise.steps == 24
    assert longer.at(8).noise_multiplier > 2.0 and longer.epsilon.upper <= target
    done = trainer_of(longer).fit(state, DATA, progress=False)
    assert done.stopped == "finished" and float(done.epsilon.upper) <= target
    for other in (plan_of(strategies.Banded(2), 24, 12, 4, 3.0, 0.6), plan_of(None, 24, 12, 4, 3.0, 0.6)):
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
    solved = Plan(**terms, noise=noise, batch_size=50, steps=40)
    assert solved.noise == strategies.Banded(4, 40) and solved.sampling_probability == 0.2 and solved.groups == 4
    assert 1.999 < solved.epsilon.upper <= 2.0
    same = ja.epsilon(ja.dp_sgd(solved.noise_multiplier, 0.2, 10), 1e-5)
    assert solved.epsilon.upper == pytest.approx(float(same.upper), rel=1e-9)
    found = Plan(**terms, noise=noise, batch_size=50, noise_multiplier=solved.noise_multiplier)
    assert found.steps == 40
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
