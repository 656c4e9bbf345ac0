"""The trainer: its ledger, its budget, its callbacks, and the ways to draw."""

import contextlib
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from helpers import refusal
from training_cases import gaussian_epsilon
from training_runs import drawing_trainer, linear, plan_of, sgd, shared, squares, still_trainer

import jaxacct as ja
from jaxacct import tuning
from jaxacct.training import AdaptiveClip, Plan, Trainer
from jaxacct.training.ledger import Ledger
from jaxacct.training.run import run_ledger
from jaxacct.training.step import key_derivation
from jaxacct.training.step.counts_and_losses import gradient_noise

KEY = bytes(range(32))


def small(noise=3.0, steps=4, rate=0.5, clip=1.0, **more):
    trainer = shared(squares, sgd(rate), plan_of(10, noise=noise, steps=steps, **more), clip)
    return trainer, jnp.linspace(0.0, 1.0, 20).reshape(10, 2)


@pytest.mark.usefixtures("still_steps")
def test_epsilon_is_that_of_the_ledger(tmp_path):
    trainer, data = small()
    state = trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=tmp_path / "run", progress=False, by="ada")
    assert float(state.epsilon.upper) == pytest.approx(gaussian_epsilon(math.sqrt(4) / 3.0), rel=1e-6)
    ledger = Ledger.read(tmp_path / "run")
    assert sum(ledger.releases().values()) == 4 and ledger.headers[ledger.run][0].by == "ada"
    assert KEY.hex() not in (tmp_path / "run").read_text()


@pytest.mark.usefixtures("still_steps")
def test_steps_that_use_no_data_go_with_data_of_any_form():
    """Their programs have one text, whatever the shapes of what they do not use."""
    for width in (2, 3):
        trainer, _ = small()
        state = trainer.fit(trainer.init(np.zeros(2, np.float32)), np.zeros((10, width), np.float32), progress=False)
        assert state.step == 4


@pytest.mark.usefixtures("still_steps")
def test_nothing_is_released_that_is_not_on_record(tmp_path, monkeypatch):
    real, seen = Ledger.record_many, []

    def record_many(self, steps, *args, **kwargs):
        if 2 in steps:
            raise OSError("disk full")
        real(self, steps, *args, **kwargs)

    monkeypatch.setattr(Ledger, "record_many", record_many)
    trainer, data = small()
    with pytest.raises(OSError, match="disk full"):
        trainer.fit(
            trainer.init(np.zeros(2, np.float32)),
            data,
            ledger=tmp_path / "run",
            callbacks=[seen.append],
            progress=False,
        )
    assert [state.step for state in seen] == [1, 2]
    assert sum(Ledger.read(tmp_path / "run").releases().values()) == 2


@pytest.mark.usefixtures("still_steps")
def test_a_run_within_a_run_leaves_the_outer_ones_entries_what_they_are(path):
    """A callback trains on the same open ledger by another batch rule. In its run the outer steps would cost more."""
    outer = plan_of(10, 0.2, steps=5, sampling="fixed_batches", relation="zero_out")
    inner = plan_of(10, 0.2, steps=1, relation="zero_out")
    data = np.ones((10, 2), np.float32)
    trainers = [shared(linear, sgd(0.1), plan) for plan in (outer, inner)]
    with Ledger.create(path, outer) as ledger:

        def train_another(state):
            if state.step == 1:
                trainers[1].fit(trainers[1].init(np.zeros(2, np.float32)), data, ledger=ledger, progress=False)

        first = trainers[0].init(np.zeros(2, np.float32))
        state = trainers[0].fit(first, data, ledger=ledger, callbacks=[train_another], progress=False)
    ledger = Ledger.read(path)
    own, *others = [ledger.runs[name] for name in sorted(ledger.runs, key=lambda name: -ledger.runs[name].steps)]
    assert own is ledger.runs[state.history.ledger.run] and {entry.sampling for entry in own.seen} == {"fixed_batches"}
    assert own.numbers == set(range(5)) and sorted(other.steps for other in others) == [0, 1]
    trainers[0].fit(state, data, ledger=path, progress=False)  # the state's mark names the outer run


@pytest.mark.usefixtures("still_steps")
def test_runs_in_threads_on_one_open_ledger_each_have_their_own_entries(path, monkeypatch):
    """Both runs note their first step at once.  Without a lock each would wait until the other is about to write."""
    together, at_once = threading.Barrier(2), threading.Barrier(2)
    real, real_note = run_ledger.RunLedger.note, run_ledger._note

    def note(self, plan, step, *rest):
        if step == 0:
            together.wait(60)
        return real(self, plan, step, *rest)

    def about_to_write(*given):
        with contextlib.suppress(threading.BrokenBarrierError):
            at_once.wait(0.5)
        return real_note(*given)

    monkeypatch.setattr(run_ledger.RunLedger, "note", note)
    monkeypatch.setattr(run_ledger, "_note", about_to_write)
    plans = [plan_of(10, 0.2, steps=4, relation="zero_out", **more) for more in ({}, {"sampling": "fixed_batches"})]
    data, states, errors = np.ones((10, 2), np.float32), {}, []
    with Ledger.create(path, plans[0]) as ledger:

        def train(plan):
            trainer = shared(linear, sgd(0.1), plan)
            try:
                states[plan.sampling] = trainer.fit(
                    trainer.init(np.zeros(2, np.float32)), data, ledger=ledger, progress=False
                )
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=train, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    ledger = Ledger.read(path)
    for sampling, state in states.items():
        own = ledger.runs[state.history.ledger.run]
        assert own.numbers == set(range(4)) and {entry.sampling for entry in own.seen} == {sampling}


def test_an_exact_replay_counts_once_and_any_other_again(tmp_path):
    def spent(data, first=0.0, rate=0.5, noise=3.0):
        trainer = still_trainer(plan_of(10, noise=noise, steps=2), rate)
        trainer.fit(trainer.init(jnp.full(2, first), KEY), data, ledger=tmp_path / "run", progress=False)
        return sum(Ledger.read(tmp_path / "run").releases().values())

    data = np.ones((10, 2), np.float32)
    assert spent(data) == 2
    assert spent(data) == 2
    assert spent(data, rate=0.4) == 4
    assert spent(data + 1.0) == 6
    assert spent(data, first=1.0) == 8
    assert spent(data, noise=2.9) == 10


def test_keys_follow_from_everything_that_decides_a_step():
    def key(program=b"p", data=b"d", settings=(1, 2.0), first=-1, root=KEY, seal=b"s", before=b"p"):
        line = key_derivation.joined(key_derivation.begin(root), seal)
        line, _ = key_derivation.advance(line, before, data, (0,), first)
        return key_derivation.advance(line, program, data, settings, first)[1]

    same, plain = key(), key()
    assert (same.words == plain.words).all() and same.key_fingerprint == plain.key_fingerprint
    changes = [{"program": b"q"}, {"data": b"e"}, {"settings": (1, 2.5)}, {"root": bytes(32)}, {"seal": b"t"}]
    changed = [key(**change) for change in [*changes, {"before": b"q"}]]
    assert len({k.words.tobytes() for k in [plain, *changed]}) == 7
    assert len({k.key_fingerprint for k in [plain, *changed]}) == 7
    # a pass over the data keeps its order, unless it begins anew or the data are others
    assert key(first=0).partition == key(first=0, program=b"q").partition != key(first=0, data=b"e").partition


@pytest.mark.parametrize("size", [3, 5000])
def test_arrays_that_a_loss_closes_over_are_part_of_the_program(size):
    """The array is used directly, in a loop or in a custom derivative rule; JAX may pass it as a hidden argument."""

    def program(value, place):
        array = jnp.zeros(size).at[size // 2].set(value)
        weigh = jax.custom_jvp(lambda x: jnp.sum(x * array))
        weigh.defjvp(lambda primals, tangents: (weigh(*primals), jnp.sum(tangents[0] * array)))
        inside = lambda x: jax.lax.fori_loop(0, 3, lambda i, total: total + jnp.sum(x * array), 0.0)
        function = {"top": lambda x: jnp.sum(x * array), "loop": inside, "rule": weigh}[place]
        return key_derivation.digest_program(jax.jit(function).trace(np.ones(size, np.float32)))

    for place in ("top", "loop", "rule"):
        assert program(1.0, place) == program(1.0, place) != program(2.0, place)


@pytest.mark.usefixtures("still_steps")
def test_the_budget_stops_the_run(tmp_path):
    """A run stops early if its ledger holds an earlier release, so that both together meet the target."""
    plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=8)
    with Ledger.create(tmp_path / "run", plan, "before") as ledger:
        ledger.spend(ja.Gaussian(2 * plan.noise_multiplier / math.sqrt(8)), "an earlier look")
    trainer = shared(squares, sgd(0.1), plan)
    data = np.ones((10, 2), np.float32)
    state = trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=tmp_path / "run", progress=False)
    assert (state.step, state.stopped) == (6, "budget")  # the look took a quarter of 8 steps
    whole = Ledger.read(tmp_path / "run").epsilon(1e-5)
    assert float(whole.upper) <= 2.0
    before = (tmp_path / "run").read_bytes()
    words = refusal(trainer.fit, trainer.init(np.zeros(2, np.float32)), data, ledger=tmp_path / "run", progress=False)
    assert "holds 6 steps and 1 other release of other runs" in words and "none of 8 steps fits the budget" in words
    assert (tmp_path / "run").read_bytes() == before


@pytest.mark.usefixtures("still_steps")
def test_a_recalibrated_plan_goes_on_in_the_same_ledger(tmp_path):
    plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=8)
    make = lambda plan: shared(squares, sgd(0.1), plan)
    trainer, data, path = make(plan), np.ones((10, 2), np.float32), tmp_path / "run"
    half = [lambda state: state.step == 4]
    state = trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=path, callbacks=half, progress=False)
    longer = plan.recalibrate(4, steps=20)
    ended = make(longer).fit(state, data, ledger=path, progress=False)
    assert (ended.step, ended.stopped) == (20, "finished")
    mu = math.sqrt(4 / longer.segments[0].noise_multiplier ** 2 + 16 / longer.segments[1].noise_multiplier ** 2)
    assert float(ended.epsilon.upper) == pytest.approx(gaussian_epsilon(mu), rel=1e-6)
    assert 2.0 - 1e-4 <= float(ended.epsilon.upper) <= 2.0


@pytest.mark.usefixtures("still_steps")
def test_callbacks_see_every_step_and_can_stop():
    trainer, data = small(steps=6)
    seen = []
    state = trainer.fit(
        trainer.init(np.zeros(2, np.float32)),
        data,
        callbacks=[lambda s: seen.append(s.step), lambda s: s.step == 4],
        progress=False,
    )
    assert seen == [1, 2, 3, 4] and state.stopped == "callback"
    assert state.epsilon.upper == trainer.plan.epsilon.upper  # the callback may have looked at what was put out
    rest = trainer.fit(state, data, progress=False)
    assert rest.step == 6 and float(rest.epsilon.upper) == pytest.approx(gaussian_epsilon(math.sqrt(6) / 3), rel=1e-6)


@pytest.mark.usefixtures("still_steps")
def test_a_stop_by_outputs_costs_what_the_ledger_holds_and_the_rest_of_the_plan(tmp_path):
    """A replay that is in the ledger counts beside the whole plan; in callbacks epsilon is what is spent."""
    trainer, data = small(steps=6)
    trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=tmp_path / "other", progress=False)
    state, seen = trainer.init(np.zeros(2, np.float32), KEY), []
    stop = [lambda s: seen.append(float(s.epsilon.upper)), lambda s: s.step == 2]
    half = trainer.fit(state, data, ledger=tmp_path / "run", callbacks=stop, progress=False)
    epsilon = lambda steps: pytest.approx(gaussian_epsilon(math.sqrt(steps) / 3.0), rel=1e-6)
    assert seen == [epsilon(1), epsilon(2)] and float(half.epsilon.upper) == epsilon(6)
    stop = [lambda s: s.step == 3]
    again = trainer.fit(state, data.at[0, 0].add(1.0), ledger=tmp_path / "run", callbacks=stop, progress=False)
    assert float(again.epsilon.upper) == epsilon(2 + 6) and again.epsilon.kind == "certified"
    ended = trainer.fit(half, data, ledger=tmp_path / "run", progress=False)
    assert (ended.stopped, float(ended.epsilon.upper)) == ("finished", epsilon(6 + 1 + 2))  # 3 steps of other data


@pytest.mark.usefixtures("still_steps")
def test_a_stop_by_outputs_in_fixed_batches_costs_every_pass(tmp_path):
    trainer, data = small(steps=6, q=0.5, sampling="fixed_batches")
    stop = [lambda s: s.step == 3]
    state = trainer.fit(
        trainer.init(np.zeros(2, np.float32)), data, ledger=tmp_path / "run", callbacks=stop, progress=False
    )
    assert float(state.epsilon.upper) == pytest.approx(gaussian_epsilon(math.sqrt(3) / 3.0), rel=1e-6)


@pytest.mark.usefixtures("still_steps")
def test_other_data_in_the_middle_of_a_pass_are_another_pass(tmp_path):
    """Other data are cut into batches anew: a record may be in a batch of each pass, and each pass costs a Gaussian."""
    plan = Plan(
        target_epsilon=1.0,
        target_delta=1e-5,
        dataset_size=10,
        expected_batch_size=2,
        epochs=1,
        sampling="fixed_batches",
    )
    trainer = shared(squares, sgd(0.1), plan)
    data, path = jnp.linspace(0.0, 1.0, 20).reshape(10, 2), tmp_path / "run"
    stop = [lambda s: s.step == 2]
    state = trainer.fit(trainer.init(np.zeros(2, np.float32), KEY), data, ledger=path, callbacks=stop, progress=False)
    other = trainer.fit(state, data.at[0, 0].add(1.0), ledger=path, progress=False)
    assert (other.step, other.stopped) == (2, "budget")
    same = trainer.fit(state, data, ledger=path, progress=False)
    assert (same.step, same.stopped) == (5, "finished")
    assert 1.0 - 1e-4 <= float(Ledger.read(path).epsilon(1e-5).upper) <= 1.0


@pytest.mark.parametrize("sampling, q", [("without_replacement", 0.3), ("fixed_batches", 0.4)])
def test_other_ways_to_draw(sampling, q):
    """Each batch without replacement has three examples; fixed batches hold every example once in a pass."""
    trainer = drawing_trainer(plan_of(10, q=q, steps=6, sampling=sampling))
    seen = [np.zeros(10)]
    trainer.fit(
        trainer.init(np.zeros(10, np.float32), KEY),
        jnp.eye(10),
        callbacks=[lambda s: seen.append(np.asarray(s.params))],
        progress=False,
    )
    batches = np.round(-np.diff(seen, axis=0)).astype(int)
    assert set(np.unique(batches)) == {0, 1}
    if sampling == "fixed_batches":
        assert batches.sum(1).tolist() == [4, 4, 2, 4, 4, 2]
        assert (batches[:3].sum(0) == 1).all() and (batches[3:].sum(0) == 1).all()
        assert (batches[0] != batches[3]).any()
    else:
        assert batches.sum(1).tolist() == [3] * 6


def test_adaptive_clipping_follows_the_quantile_and_costs_what_the_plan_says():
    rule = AdaptiveClip(initial=0.01, quantile=0.7, learning_rate=0.5, count_noise=4.0)
    z = gradient_noise(2.0, 100.0, rule, None)
    both = ja.epsilon(ja.compose(ja.Gaussian(z), ja.Gaussian(2 * 4.0)), 1e-5)
    assert float(both.upper) == pytest.approx(gaussian_epsilon(1 / 2.0), rel=1e-6)
    norms = np.linspace(0.5, 1.5, 101)[:100, None].astype(np.float32)
    trainer = Trainer(linear, optax.sgd(0.0), plan_of(100, noise=2.0, steps=60), rule)
    path = []
    trainer.fit(
        trainer.init(np.zeros(1, np.float32), KEY),
        norms,
        callbacks=[lambda s: path.append(float(s.clip_norm))],
        progress=False,
    )
    assert np.mean(path[-20:]) == pytest.approx(1.2, abs=0.06)
    assert "must be > 1, which leaves room" in refusal(
        gradient_noise, 2.0, 9.0, AdaptiveClip(1.0, count_noise=1.0), None
    )


@pytest.mark.slow
def test_a_module_with_a_loss():
    plan = plan_of(12, noise=0.01, steps=30)
    loss = lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out, y)
    trainer = Trainer(nn.Dense(2), optax.adam(0.2), plan, 1.0, loss=loss)
    x = np.linspace(-1, 1, 12, dtype=np.float32)[:, None]
    state = trainer.fit(trainer.init(key=KEY, example=jnp.zeros(1)), (x, (x[:, 0] > 0).astype(int)), progress=False)
    layer = jax.tree.map(np.asarray, state.params)["params"]
    assert (np.argmax(x @ layer["kernel"] + layer["bias"], 1) == (x[:, 0] > 0)).all()
    assert set(trainer.norm_methods(state.params, (x, x[:, 0].astype(int))).values()) <= {"ghost", "vmap"}


def fitted(data, users=None):
    """Train by users if `users` are given."""
    plan = plan_of(10) if users is None else Plan(None, 1e-5, 10, 1.0, noise_multiplier=1.0, steps=1, unit="user")
    trainer = Trainer(linear, optax.sgd(0.1), plan, 1.0, examples_per_user=None if users is None else 2)
    return trainer.fit(trainer.init(np.zeros(2, np.float32)), data, users=users, progress=False)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: Trainer(nn.Dense(2), optax.sgd(0.1), plan_of(10), 1.0), "with a module, give loss as well"),
        (lambda: Trainer(linear, optax.sgd(0.1), plan_of(10), 0.0), "clip_norm = 0.0 must be"),
        (lambda: small()[0].init(np.zeros(2, np.float32), b"short"), "key must be 32 bytes"),
        (lambda: small()[0].fit(small()[0].init(np.zeros(2, np.float32)), jnp.ones((9, 2))), "the plan's dataset_size"),
        (lambda: small(clip=AdaptiveClip(1.0, count_noise=1.0)), "which leaves room"),
        (lambda: Trainer(linear, optax.sgd(0.1), 3, 1.0), "plan = 3 must be a training.Plan"),
        (lambda: Ledger.create("never.jsonl", 3), "plan = 3 must be a training.Plan"),
        (lambda: tuning.side_by_side(linear, lambda config: optax.sgd(0.1), 3), "plan = 3 must be a training.Plan"),
        (lambda: fitted(np.full((10, 2), "a")), "data has dtype <U1, must be numbers"),
        (
            lambda: fitted({"x": np.ones((10, 2)), "y": np.full(10, None)}),
            "data['y'] has dtype object, must be numbers",
        ),
        (lambda: fitted(np.full((10, 2), "a"), np.zeros(10, int)), "data has dtype <U1, must be numbers"),
    ],
)
def test_bad_training_is_refused(call, text):
    assert text in refusal(call)


@pytest.mark.usefixtures("still_steps")
@pytest.mark.parametrize("ledger", [None, "run"])
def test_a_candidate_of_a_tuning_goes_on_with_no_plan_that_forgets_the_choice(tmp_path, ledger):
    """The best of ten runs of epsilon 1.55 costs 4.78; a plan that counts one run alone would meet a target of 2.5."""
    given = {"target_delta": 1e-5, "dataset_size": 10, "sampling_probability": 1.0}
    one = Plan(**given, noise_multiplier=5.0, steps=4, repetitions=ja.selection.PointMass(10))
    data, path = jnp.linspace(0.0, 1.0, 20).reshape(10, 2), ledger and tmp_path / ledger
    trainer = shared(squares, sgd(0.5), one)
    state = trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=path, progress=False)
    for plan in (Plan(2.5, **given, steps=6), Plan.of(one.segments, one, candidates="adaptive")):
        words = refusal(shared(squares, sgd(0.5), plan).fit, state, data, ledger=path, progress=False)
        assert "repetitions must be the same" in words
