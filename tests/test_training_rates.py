"""A sampling rate for each record: each record's own epsilon holds, and the run claims that of the largest rate."""

import itertools
import json
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, norm
from training_runs import KEY, keyed, linear, sgd, shared, squares, still_trainer

import jaxacct as ja
from jaxacct.audit import from_scores, gradient_canaries
from jaxacct.core.chacha import CHACHA20, host_bits
from jaxacct.report.subjects import subject_of
from jaxacct.selection import PointMass
from jaxacct.training import EarlyStop, Ledger, Plan, Source, Trainer, cyclic_poisson, poisson, truncated_poisson
from jaxacct.training.sampling import sampler
from jaxacct.training.step import step_function
from jaxacct.tuning import side_by_side

DELTA, STEPS = 1e-5, 6
RATES = np.array([0.2, 0.05, 0.05, 1.0, 0.2, 0.05, 0.2, 0.05])
DATA = jnp.linspace(-1.0, 1.0, 2 * RATES.size).reshape(RATES.size, 2)


def plan_of(rates=RATES, **more):
    settings = {"noise_multiplier": 1.5, "steps": STEPS} | more
    return Plan(target_delta=DELTA, dataset_size=len(rates), sampling_rates=rates, **settings)


def trainer_of(plan):
    return still_trainer(plan, step=keyed)


def key_of(words):
    return jax.random.wrap_key_data(jnp.asarray(words), impl=CHACHA20)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_a_threshold_is_exact(rates):
    words = sampler.threshold(rates).astype(object)
    for rate, (certain, high, low) in zip(rates, words.T, strict=True):
        assert (certain << 64) + (high << 32) + low == math.floor(Fraction(rate) * 2**64)


def test_each_record_is_drawn_at_its_rate(monkeypatch):
    """A chi-square test by record, which fails if two neighbours exchange their rates; host and device agree."""
    rates, runs = np.tile([0.02, 0.3, 0.36, 1.0, 0.6], 7), 4000
    words = np.random.default_rng(5).integers(0, 2**32, (runs, 8), np.uint32)
    one = lambda words: poisson(key_of(words), rates.size, rates)
    drawn = jax.jit(jax.vmap(one))(words)
    there = np.arange(rates.size) < np.asarray(drawn.count)[:, None]
    found = np.bincount(np.asarray(drawn.indices)[there], minlength=rates.size)
    for place, piece in enumerate((2**20, 2**20, 16, 16)):
        monkeypatch.setattr(sampler, "_HOST_PIECE", piece)
        on_host = sampler.host_poisson(words[place], rates.size, sampler.threshold(rates))
        assert on_host.tolist() == np.asarray(drawn.indices)[place][there[place]].tolist()
    assert (found[rates == 1.0] == runs).all()
    some = rates < 1.0
    distance = lambda q: np.sum((found[some] - runs * q[some]) ** 2 / (runs * q[some] * (1.0 - q[some])))
    low, high = chi2.ppf([1e-3, 1.0 - 1e-3], some.sum())
    assert low < distance(rates) < high
    assert distance(np.tile([0.02, 0.36, 0.3, 1.0, 0.6], 7)) > high


def test_the_low_word_decides_for_each_record():
    """The limits' high words equal the drawn high words, so that the low words decide."""
    words, size = np.arange(8, dtype=np.uint32), 40
    high, low = host_bits(words, 2 * size).reshape(2, size)
    limit = np.stack([np.zeros(size, np.uint32), high, low + (np.arange(size) % 2).astype(np.uint32)])
    found = jax.jit(lambda words, limit: poisson(key_of(words), size, limit))(words, limit)
    assert np.asarray(found.indices)[: int(found.count)].tolist() == list(range(1, size, 2))
    assert sampler.host_poisson(words, size, limit).tolist() == list(range(1, size, 2))


def test_equal_rates_are_one_rate():
    one = plan_of(np.full(8, 0.3))
    other = Plan(None, DELTA, 8, 0.3, noise_multiplier=1.5, steps=STEPS)
    assert one.epsilon.upper == other.epsilon.upper
    assert one.own_epsilon.upper == pytest.approx(np.full(8, other.epsilon.upper), rel=1e-5)
    assert one.segments[0].sampling_probability == 0.3 and one.expected_batch_size == pytest.approx(2.4)
    words = np.arange(16, dtype=np.uint32).reshape(2, 8)
    first, second = trainer_of(one), trainer_of(other)
    for plan in (one, other):
        assert plan.steps == STEPS
    batches = [
        step_function.draw_on_host(t.rule, *words, 8, step_function.numbers_at(t.plan, 0, None))
        for t in (first, second)
    ]
    assert batches[0].tolist() == batches[1].tolist()


ONE_WAY = [pytest.param(relation, marks=pytest.mark.slow) for relation in ("add_one", "remove_one")]


@pytest.mark.parametrize("relation", ["add_or_remove_one", "zero_out", *ONE_WAY])
def test_own_epsilon_is_that_of_the_rate(relation):
    plan = plan_of(relation=relation)
    asked = ja.epsilon(ja.dp_sgd(1.5, RATES, STEPS), DELTA, relation=relation)
    assert plan.own_epsilon.shape == RATES.shape and (plan.own_epsilon.kind == "certified").all()
    assert plan.own_epsilon.upper == pytest.approx(np.asarray(asked.upper), rel=1e-4)
    assert (plan.own_epsilon.upper >= asked.lower).all() and (plan.own_epsilon.lower <= asked.upper).all()
    assert plan.own_epsilon.upper[3] == plan.epsilon.upper == plan.own_epsilon.upper.max()


def test_own_epsilon_of_other_plans():
    """Noise that changes, a plan that is recalibrated, and an early stop."""
    steps = ((2, 1.0), (None, 2.0))
    rates = [1.0, 0.2]
    scheduled = plan_of(rates, noise_schedule=steps)
    parts = [ja.dp_sgd(1.5 * factor, 0.2, count) for factor, count in ((1.0, 2), (2.0, 4))]
    assert scheduled.own_epsilon.upper[1] == pytest.approx(float(ja.epsilon(ja.compose(*parts), DELTA).upper), rel=1e-4)
    assert (scheduled.sampling_probability, scheduled.expected_batch_size) == (1.0, math.fsum(rates))
    longer = plan_of(rates, noise_multiplier=None, target_epsilon=2.0).recalibrate(2, steps=10)
    assert {segment[3:] for segment in longer.segments} == {(1.0, math.fsum(rates))} and longer.steps == 10
    parts = [ja.dp_sgd(s.noise_multiplier, 0.2, s.steps) for s in longer.segments]
    assert longer.own_epsilon.upper[1] == pytest.approx(float(ja.epsilon(ja.compose(*parts), DELTA).upper), rel=1e-4)
    assert 1.999 < longer.epsilon.upper <= 2.0
    rule = EarlyStop(epsilon=0.2, every=2)
    stopping = plan_of(rates, early_stop=rule)
    asked = ja.epsilon(ja.compose(ja.dp_sgd(1.5, 0.2, STEPS), rule.mechanism), DELTA)
    assert stopping.own_epsilon.upper[1] == pytest.approx(float(asked.upper), rel=1e-4)


@pytest.mark.slow
def test_own_epsilon_of_a_tuning():
    several = plan_of([0.9, 0.2], repetitions=PointMass(2))
    one = Plan(None, DELTA, 8, 0.2, noise_multiplier=1.5, steps=STEPS, repetitions=PointMass(2))
    assert several.own_epsilon.upper[1] == pytest.approx(float(one.epsilon.upper), rel=1e-3)


def test_steps_are_solved_for_the_largest_rate():
    asked = {"noise_multiplier": 2.0, "target_epsilon": 2.0, "target_delta": DELTA, "dataset_size": 8}
    assert Plan(**asked, sampling_rates=RATES).steps == Plan(**asked, sampling_probability=1.0).steps
    assert plan_of(steps=None, epochs=3).steps == math.ceil(3 * 8 / math.fsum(RATES))


def hockey_stick(epsilon, with_it, without, sigma):
    density = lambda x, law: sum(weight * norm.pdf(x, mean, sigma) for mean, weight in law.items())
    gap = lambda x: np.maximum(density(x, with_it) - math.exp(epsilon) * density(x, without), 0.0)
    return np.trapezoid(gap(x := np.linspace(-12.0, 12.0, 100_001)), x)


@pytest.mark.parametrize("other", [None, 1.0])  # -1 mirrors 1
def test_one_step_by_its_densities(other):
    """By exact densities, a record's delta at its own epsilon is at most the plan's, even beside one of a high rate."""
    delta, sigma, q, most = 0.01, 0.8, 0.1, 0.9
    plan = Plan(None, delta, 2, noise_multiplier=sigma, steps=1, sampling_rates=[q, most])
    alone = {0.0: 1.0} if other is None else {0.0: 1.0 - most, other: most}
    with_it = {}
    for (mean, weight), (own, chance) in itertools.product(alone.items(), {0.0: 1.0 - q, 1.0: q}.items()):
        with_it[mean + own] = with_it.get(mean + own, 0.0) + weight * chance
    at = lambda epsilon: max(hockey_stick(epsilon, with_it, alone, sigma), hockey_stick(epsilon, alone, with_it, sigma))
    own = float(plan.own_epsilon.upper[0])
    assert 0.0 < own < 0.3 * float(plan.epsilon.upper)
    assert at(own) <= delta * (1.0 + 1e-6)
    assert at(0.999 * own) > delta if other is None else at(own) < delta


@pytest.mark.slow
def test_audit_of_the_trainers_step():
    """The rare record's bound is 0.5 to 1 times its own epsilon; the frequent record's is above 1.3 times it."""
    plan = Plan(None, 0.01, 2, noise_multiplier=0.4, steps=1, sampling_rates=[0.1, 0.9])
    game = gradient_canaries(shared(linear, sgd(0.1), plan), None, 2)
    scores = [game.play(jnp.zeros(2), there, 8000, seed=4).scores for there in ([False, False], [True, True])]
    rare, frequent = (
        from_scores(*(score[:, record] for score in scores), delta=0.01, thresholds=[0.8, 1.0, 1.2]).epsilon
        for record in range(2)
    )
    own = plan.own_epsilon.upper
    assert 0.5 * own[0] < rare <= own[0] and 1.3 * own[0] < frequent <= own[1]


def test_a_resumed_run_is_the_direct_one(tmp_path):
    trainer = trainer_of(plan_of())
    first = trainer.init(np.zeros(2, np.float32), KEY)
    whole = trainer.fit(first, DATA, ledger=tmp_path / "whole", progress=False)

    class Crash(Exception):
        pass

    def crash(state):
        if state.step == 4:
            raise Crash

    more = {"ledger": tmp_path / "cut", "checkpoints": tmp_path / "run", "checkpoint_every": 3, "progress": False}
    with pytest.raises(Crash):
        trainer_of(plan_of()).fit(first, DATA, callbacks=[crash], **more)
    resumed = trainer_of(plan_of()).fit(trainer.init(np.zeros(2, np.float32), KEY), DATA, **more)
    assert resumed.params.tolist() == whole.params.tolist() and resumed.step == STEPS
    entries = [Ledger.read(tmp_path / name) for name in ("whole", "cut")]
    fingerprints = [{(one.step, one.key, one.batch) for one in ledger.runs[ledger.run].seen} for ledger in entries]
    assert fingerprints[0] == fingerprints[1] and len(fingerprints[0]) == STEPS
    plan = trainer.plan
    assert whole.epsilon.upper == pytest.approx(float(plan.epsilon.upper), rel=1e-6)
    for ledger in entries:
        assert float(ledger.epsilon(DELTA).upper) == pytest.approx(float(plan.epsilon.upper), rel=1e-4)
        assert {entry.sampling_probability for entry in ledger.runs[ledger.run].seen} == {1.0}
    about = subject_of(tmp_path / "whole", None, None, None)
    assert any("each record has a public sampling rate" in line for line in about.assumed)
    text = (tmp_path / "whole").read_text()
    assert plan.rates_digest in text and "0.05" not in text


def test_other_rates_have_other_keys(tmp_path):
    """One root, the same largest rate and the same sum: the rates alone tell the runs apart."""
    keys = []
    for place, rates in enumerate((RATES, RATES[::-1])):
        trainer = trainer_of(plan_of(rates))
        trainer.fit(trainer.init(np.zeros(2, np.float32), KEY), DATA, ledger=tmp_path / str(place), progress=False)
        ledger = Ledger.read(tmp_path / str(place))
        keys.append({entry.key for entry in ledger.runs[ledger.run].seen})
    assert len(keys[0]) == STEPS and not keys[0] & keys[1]


@pytest.mark.parametrize(
    "how", ["source of users", *(pytest.param(how, marks=pytest.mark.slow) for how in ("source", "mesh of users"))]
)
def test_other_ways_to_train(how):
    """Only records of rate 1 are drawn, so that there is one sum; it is divided by the sum of the rates."""
    rates = np.array([1.0, 1e-9, 1.0, 1e-9])
    plan = plan_of(rates, noise_multiplier=1e-6, steps=2, unit="user" if "users" in how else "record")
    data = np.array([[0.25], [0.5], [0.125], [0.5]], np.float32)
    if "users" in how:
        data = np.concatenate([data, [[0.75], [0.375]]], dtype=np.float32)  # of users 0 and 2
        data[0], data[2] = -0.25, -0.125
    mesh = {"mesh": jax.make_mesh((1,), ("devices",))} if "mesh" in how else {}
    users = {"users": np.array([0, 1, 2, 3, 0, 2])} if "users" in how else {}
    most = {"examples_per_user": 2} if "users" in how else {}
    trainer = Trainer(linear, optax.sgd(1.0), plan, 1.0, **mesh, **most)
    state = trainer.init(np.zeros(1, np.float32))
    given = Source(data) if "source" in how else data
    assert trainer.fit(state, given, progress=False, **users).params == pytest.approx([-2 * 0.375 / 2], abs=1e-4)


def test_a_document_has_the_digest_of_the_rates():
    plan = plan_of()
    read = Plan.from_json(plan.to_json())
    assert read == plan != plan_of(RATES[::-1]) and read.epsilon.upper == plan.epsilon.upper
    trainer_of(plan)  # an equal plan whose rates are known
    for call in (lambda: read.own_epsilon, lambda: trainer_of(read)):
        assert "left out of a plan's document" in refusal(call)
    assert "left out" in refusal(lambda: step_function.numbers_at(read, 0, None))
    for change, words in (
        ({"rates_digest": "0" * 63}, "must be 64 hexadecimal digits"),
        ({"rates_digest": 7}, "must be 64 hexadecimal digits"),
        ({"sampling": "truncated_poisson", "cap": 5}, "sampling_rates needs sampling = 'poisson'"),
        ({"segments": [[3, 1.5, 1.0, 2.0], [3, 1.5, 0.8, 2.0]]}, "segments must all have the largest"),
        ({"segments": [[6, 1.5, 0.2, 2.0]]}, "expected_batch_size = 2.0 must be at most"),
        ({"rates_digest": None}, "expected_batch_size = "),
    ):
        assert words in refusal(Plan.from_json, json.dumps(json.loads(plan.to_json()) | change))
    assert "sampling_rates" in refusal(Plan.of, Plan(None, DELTA, 8, 0.5, None, 1.0, 1).segments, plan)


def test_rates_stay_as_they_were_given():
    rates = RATES.copy()
    plan = plan_of(rates)
    rates[:] = 1.0
    assert plan.sampling_rates.tolist() == RATES.tolist()
    with pytest.raises(ValueError, match="read-only"):
        plan.sampling_rates[0] = 1.0


def test_a_run_keeps_its_rates(tmp_path):
    trainer = trainer_of(plan_of())
    more = {"ledger": tmp_path / "ledger", "progress": False}
    state = trainer.fit(trainer.init(np.zeros(2, np.float32)), DATA, callbacks=[lambda s: s.step == 2], **more)
    other = Plan(target_delta=DELTA, dataset_size=8, sampling_probability=1.0, noise_multiplier=1.5, steps=STEPS)
    for plan in (plan_of(RATES[::-1]), other):
        words = refusal(trainer_of(plan).fit, state, DATA, **more)
        assert "sampling_rates must be the same as in the steps so far" in words


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: Plan(None, DELTA, 8, steps=1, sampling_rates=[0.1] * 7),
            "sampling_rates has shape (7,), must be (8,)",
        ),
        (lambda: plan_of([RATES]), "sampling_rates has shape (1, 8), must be (1,)"),
        (lambda: plan_of([0.5, 0.0]), "sampling_rates[1] = 0.0 must be > 0 and <= 1; use a rate above 0"),
        (lambda: plan_of([0.5, 1.5]), "sampling_rates[1] = 1.5 must be"),
        (lambda: plan_of([0.5, math.nan]), "sampling_rates[1] = nan must be"),
        (lambda: plan_of(sampling="truncated_poisson"), "sampling_rates needs sampling = 'poisson'"),
        (lambda: plan_of(sampling="cyclic_poisson", groups=2), "sampling_rates needs sampling = 'poisson'"),
        (lambda: plan_of(data_dependent=True), "sampling_rates needs data_dependent = False"),
        (lambda: plan_of(sampling_probability=0.5), "sampling_probability and sampling_rates are both given"),
        (lambda: plan_of(batch_size=2), "expected_batch_size and sampling_rates are both given"),
        (lambda: plan_of(batch_schedule=[(None, 2.0)]), "sampling_rates and batch_schedule are both given"),
        (lambda: plan_of().recalibrate(2, expected_batch_size=2), "target_epsilon is missing"),
        (
            lambda: plan_of(noise_multiplier=None, target_epsilon=2.0).recalibrate(2, expected_batch_size=2),
            "expected_batch_size is the sum of sampling_rates",
        ),
        (lambda: Plan(None, DELTA, 8, 0.5, None, 1.0, 1).own_epsilon, "sampling_rates are not given"),
        (lambda: side_by_side(squares, optax.sgd, plan_of()), "sampling_rates is not supported side by side"),
        (lambda: poisson(key_of(np.arange(8, dtype=np.uint32)), 4, [0.1, 0.2]), "has shape (2,), must be a number, or"),
        (
            lambda: truncated_poisson(key_of(np.arange(8, dtype=np.uint32)), 2, [0.1, 0.2], 1),
            "has shape (2,), must be a number; only `poisson`",
        ),
        (
            lambda: cyclic_poisson(*[key_of(np.arange(8, dtype=np.uint32))] * 2, 2, [0.1, 0.2], 1, 0),
            "has shape (2,), must be a number; only `poisson`",
        ),
    ],
)
def test_bad_rates_are_refused(call, words):
    assert words in refusal(call)


@pytest.mark.parametrize("word", ["rates", "sampling_rates"])
def test_dp_sgd_names_the_word_that_it_has(word):
    with pytest.raises(TypeError, match="sampling_probability"):
        ja.dp_sgd(1.0, steps=1, **{word: [0.5]})
