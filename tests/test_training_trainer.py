"""The trainer: its step against the definition, its ledger, its stop, and resumed runs."""

import math
import os
import pathlib
import random
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_runs
from flax import linen as nn
from helpers import refusal
from scipy import stats

import jaxacct as ja
from jaxacct.training import AdaptiveClip, Plan, Trainer, lineage
from jaxacct.training.ledger import Ledger
from jaxacct.training.steps import Carried, numbers

KEY = bytes(range(32))


def linear(params, example):
    """Its gradient is the example."""
    return jnp.dot(params, example)


def plan_of(size, q=1.0, noise=1.0, steps=1, **more):
    return Plan(
        target_delta=1e-5, dataset_size=size, sampling_probability=q, noise_multiplier=noise, steps=steps, **more
    )


def one_step(trainer, data, runs, seed=0):
    """The parameters, started at 0, after one real step with each of `runs` keys: shape (runs, dimension)."""
    rng = np.random.default_rng(seed)
    start = Carried(jnp.zeros(data.shape[1]), trainer.optimizer.init(jnp.zeros(data.shape[1])), jnp.float32(1), 0)
    now = numbers(trainer.plan.at(0), trainer.plan.sampling, trainer.adaptive, 0)
    step = lambda words: trainer.step_function(start, words, words, data, now).params
    words = rng.integers(0, 2**32, (runs, 8), np.uint32)
    return np.asarray(jax.jit(jax.vmap(step))(words), np.float64)


# One step


def test_a_run_against_its_definition():
    """Noise too small to see, clipping and Adam in float64."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(20, 3)).astype(np.float32), np.zeros(3)
    plan = plan_of(20, noise=1e-6, steps=15)
    trainer = Trainer(lambda p, e: 0.5 * jnp.sum((p - e) ** 2), optax.sgd(0.3, momentum=0.9), plan, 0.7, micro_batch=6)
    state = trainer.fit(trainer.init(jnp.zeros(3), KEY), x, progress=False)
    velocity = np.zeros(3)
    for _ in range(15):
        g = w - x
        g *= np.minimum(1, 0.7 / np.linalg.norm(g, axis=1, keepdims=True))
        velocity = 0.9 * velocity + g.sum(0) / 20
        w = w - 0.3 * velocity
    np.testing.assert_allclose(np.asarray(state.params), w, atol=2e-5)
    assert state.step == 15 and state.stopped == "finished" and state.not_finite == 0


def test_noise_of_a_step_has_the_deviation_of_the_plan():
    """Gradients of zero: what is left is noise of deviation z C / expected batch size, independent in each entry."""
    trainer = Trainer(linear, optax.sgd(1.0), plan_of(40, q=0.25, noise=1.7), 3.0)
    assert float(trainer.init(jnp.zeros(2)).clip_norm) == 3.0
    draws = one_step(trainer, jnp.zeros((40, 6)), 20_000) / (1.7 * 1.0 / 10.0)
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-6
    assert np.abs(np.corrcoef(draws.T) - np.eye(6)).max() < 6 / math.sqrt(20_000)


def scale_is_right(step_params):
    """Whether, without noise, a step moves by (number drawn) C / (expected batch size) and that number is binomial."""
    moved = -step_params[:, 0] * 10.0  # every example pulls by C = 1 along the first axis; 10 are expected of 40
    whole = np.abs(moved - np.round(moved)).max() < 1e-3
    counts = np.bincount(np.clip(np.round(moved), 0, 40).astype(int), minlength=41)
    expected = len(moved) * stats.binom.pmf(np.arange(41), 40, 0.25)
    body = expected > 10
    surprise = stats.chi2.sf(((counts - expected)[body] ** 2 / expected[body]).sum(), body.sum())
    return bool(whole and surprise > 1e-6)


BROKEN = {
    "normalised by the drawn batch size": lambda total, count: total * 10.0 / jnp.maximum(count, 1),
    "batch truncated to what is expected": lambda total, count: total * jnp.minimum(count, 10) / jnp.maximum(count, 1),
}


@pytest.mark.parametrize("variant", [None, *BROKEN])
def test_all_examples_drawn_are_used_and_normalised_by_the_expected_number(variant, monkeypatch):
    """The real step passes; steps broken in two well-known ways do not."""
    from jaxacct.training import sampler

    if variant is not None:
        fold = sampler.over_micro_batches

        def broken(selection, size, body, init):
            done = fold(selection, size, body, init)
            return done._replace(total=BROKEN[variant](done.total, selection.count))

        monkeypatch.setattr(sampler, "over_micro_batches", broken)
    trainer = Trainer(linear, optax.sgd(1.0), plan_of(40, q=0.25, noise=1e-6), 1.0, micro_batch=4)
    params = one_step(trainer, jnp.tile(jnp.array([[5.0, 0.0]]), (40, 1)), 4000)
    assert scale_is_right(params) == (variant is None)


# Audit: a lower bound on epsilon from many runs of the real step


def gaussian_epsilon(mu, delta=1e-5):
    """Epsilon of a Gaussian of sensitivity mu and deviation 1, from its closed form."""
    low, high = 0.0, 200.0
    for _ in range(100):
        eps = 0.5 * (low + high)
        now = stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)
        low, high = (eps, high) if now > delta else (low, eps)
    return high


def audited_epsilon(trainer, runs=60_000):
    """Gaussian-DP fit at 99.9 % confidence: a canary of norm C or more against an example without gradient."""
    rest = jnp.tile(jnp.array([[0.0, 0.5]]), (4, 1))
    scores = []
    for seed, canary in enumerate([jnp.array([[0.0, 0.0]]), jnp.array([[-9.0, 0.0]])]):
        params = one_step(trainer, jnp.concatenate([rest, canary]), runs, seed)
        scores.append(params[:, 0] * trainer.plan.expected_batch_size)
    without, present = scores
    cuts = np.array([0.25, 0.5, 0.75])
    level = 1e-3 / (2 * len(cuts))
    upper = lambda hits: stats.beta.ppf(1 - level, hits + 1, runs - hits)
    false_alarm = upper((without[:, None] > cuts).sum(0))
    missed = upper((present[:, None] <= cuts).sum(0))
    mu = (stats.norm.isf(false_alarm) - stats.norm.ppf(missed)).max()
    return gaussian_epsilon(max(mu, 1e-9))


def test_audit_of_one_step_finds_its_epsilon_and_no_more():
    plan = plan_of(5)
    claimed = float(plan.epsilon.upper)
    assert claimed == pytest.approx(gaussian_epsilon(1.0), rel=1e-6)
    found = audited_epsilon(Trainer(linear, optax.sgd(1.0), plan, 1.0))
    assert 0.9 * claimed <= found <= claimed


def test_audit_catches_noise_of_the_wrong_scale(monkeypatch):
    """Noise on the mean of what belongs on the sum, divided by the batch size once too often."""
    from jaxacct.training import noise

    right = noise.add
    monkeypatch.setattr(noise, "add", lambda key, tree, std: right(key, tree, std / 5))
    plan = plan_of(5)
    assert audited_epsilon(Trainer(linear, optax.sgd(1.0), plan, 1.0), runs=10_000) > 1.5 * float(plan.epsilon.upper)


# The loop: ledger, budget, callbacks


def small(noise=3.0, steps=4, rate=0.5, clip=1.0, **more):
    trainer = Trainer(
        lambda p, x: jnp.sum((p - x) ** 2), optax.sgd(rate), plan_of(10, noise=noise, steps=steps, **more), clip
    )
    return trainer, jnp.linspace(0.0, 1.0, 20).reshape(10, 2)


def test_epsilon_is_that_of_the_ledger(tmp_path):
    trainer, data = small()
    state = trainer.fit(trainer.init(jnp.zeros(2)), data, ledger=tmp_path / "run", progress=False, by="ada")
    assert float(state.epsilon.upper) == pytest.approx(gaussian_epsilon(math.sqrt(4) / 3.0), rel=1e-6)
    ledger = Ledger.read(tmp_path / "run")
    assert sum(ledger.releases().values()) == 4 and ledger.headers[ledger.run][0].by == "ada"
    assert KEY.hex() not in (tmp_path / "run").read_text()


def test_nothing_is_released_that_is_not_on_record(tmp_path, monkeypatch):
    real, seen = Ledger.record, []

    def record(self, step, *args, **kwargs):
        if step == 2:
            raise OSError("disk full")
        real(self, step, *args, **kwargs)

    monkeypatch.setattr(Ledger, "record", record)
    trainer, data = small()
    with pytest.raises(OSError, match="disk full"):
        trainer.fit(trainer.init(jnp.zeros(2)), data, ledger=tmp_path / "run", callbacks=[seen.append], progress=False)
    assert [state.step for state in seen] == [1, 2]
    assert sum(Ledger.read(tmp_path / "run").releases().values()) == 2


def test_an_exact_replay_counts_once_and_any_other_again(tmp_path):
    def spent(trainer, data, first=0.0):
        trainer.fit(trainer.init(jnp.full(2, first), KEY), data, ledger=tmp_path / "run", progress=False)
        return sum(Ledger.read(tmp_path / "run").releases().values())

    trainer, data = small(steps=2)
    assert spent(trainer, data) == 2
    assert spent(small(steps=2)[0], data) == 2
    assert spent(small(steps=2, rate=0.4)[0], data) == 4
    assert spent(trainer, data.at[0, 0].add(1.0)) == 6
    assert spent(trainer, data, first=1.0) == 8
    assert spent(small(steps=2, noise=2.9)[0], data) == 10


def test_keys_follow_from_everything_that_decides_a_step():
    def key(program=b"p", data=b"d", settings=(1, 2.0), first=-1, root=KEY, seal=b"s", before=b"p"):
        line = lineage.joined(lineage.begin(root), seal)
        line, _ = lineage.advance(line, before, data, (0,), first)
        return lineage.advance(line, program, data, settings, first)[1]

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
    """At the top, inside a loop and inside a rule of its own; also where JAX passes them as hidden arguments."""

    def program(value, place):
        array = jnp.zeros(size).at[size // 2].set(value)
        weigh = jax.custom_jvp(lambda x: jnp.sum(x * array))
        weigh.defjvp(lambda primals, tangents: (weigh(*primals), jnp.sum(tangents[0] * array)))
        inside = lambda x: jax.lax.fori_loop(0, 3, lambda i, total: total + jnp.sum(x * array), 0.0)
        function = {"top": lambda x: jnp.sum(x * array), "loop": inside, "rule": weigh}[place]
        return lineage.digest_program(jax.jit(function).trace(np.ones(size, np.float32)))

    for place in ("top", "loop", "rule"):
        assert program(1.0, place) == program(1.0, place) != program(2.0, place)


def test_the_budget_stops_the_run(tmp_path):
    """A ledger that holds something else already: fewer steps, and the whole within the target."""
    plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=8)
    with Ledger.create(tmp_path / "run", plan, "before") as ledger:
        ledger.spend(ja.Gaussian(2 * plan.noise_multiplier / math.sqrt(8)), "an earlier look")
    trainer = Trainer(lambda p, x: jnp.sum((p - x) ** 2), optax.sgd(0.1), plan, 1.0)
    data = jnp.ones((10, 2))
    state = trainer.fit(trainer.init(jnp.zeros(2)), data, ledger=tmp_path / "run", progress=False)
    assert (state.step, state.stopped) == (6, "budget")  # the look took a quarter of 8 steps
    whole = Ledger.read(tmp_path / "run").epsilon(1e-5)
    assert float(whole.upper) <= 2.0
    again = trainer.fit(trainer.init(jnp.zeros(2)), data, ledger=tmp_path / "run", progress=False)
    assert (again.step, again.stopped) == (0, "budget")


def test_a_recalibrated_plan_goes_on_in_the_same_ledger(tmp_path):
    plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=8)
    make = lambda plan: Trainer(lambda p, x: jnp.sum((p - x) ** 2), optax.sgd(0.1), plan, 1.0)
    trainer, data, path = make(plan), jnp.ones((10, 2)), tmp_path / "run"
    half = [lambda state: state.step == 4]
    state = trainer.fit(trainer.init(jnp.zeros(2)), data, ledger=path, callbacks=half, progress=False)
    longer = plan.recalibrate(4, steps=20)
    ended = make(longer).fit(state, data, ledger=path, progress=False)
    assert (ended.step, ended.stopped) == (20, "finished")
    mu = math.sqrt(4 / longer.segments[0].noise_multiplier ** 2 + 16 / longer.segments[1].noise_multiplier ** 2)
    assert float(ended.epsilon.upper) == pytest.approx(gaussian_epsilon(mu), rel=1e-6)
    assert 2.0 - 1e-4 <= float(ended.epsilon.upper) <= 2.0


def test_callbacks_see_every_step_and_can_stop():
    trainer, data = small(steps=6)
    seen = []
    state = trainer.fit(
        trainer.init(jnp.zeros(2)),
        data,
        callbacks=[lambda s: seen.append(s.step), lambda s: s.step == 4],
        progress=False,
    )
    assert seen == [1, 2, 3, 4] and state.stopped == "callback"
    rest = trainer.fit(state, data, progress=False)
    assert rest.step == 6 and float(rest.epsilon.upper) == pytest.approx(gaussian_epsilon(math.sqrt(6) / 3), rel=1e-6)


@pytest.mark.parametrize("sampling, q", [("without_replacement", 0.3), ("fixed_batches", 0.4)])
def test_other_ways_to_draw(sampling, q):
    """Every batch has its size; fixed batches hold every example once in a pass."""
    plan = plan_of(10, q=q, noise=1e-6, steps=6, sampling=sampling)
    trainer = Trainer(linear, optax.sgd(plan.expected_batch_size), plan, 1.0, micro_batch=3)
    seen = [np.zeros(10)]
    trainer.fit(
        trainer.init(jnp.zeros(10), KEY),
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
    z = rule.gradient_noise(2.0, 100.0)
    both = ja.epsilon(ja.compose(ja.Gaussian(z), ja.Gaussian(2 * 4.0)), 1e-5)
    assert float(both.upper) == pytest.approx(gaussian_epsilon(1 / 2.0), rel=1e-6)
    norms = np.linspace(0.5, 1.5, 101)[:100, None].astype(np.float32)
    trainer = Trainer(linear, optax.sgd(0.0), plan_of(100, noise=2.0, steps=60), rule)
    path = []
    trainer.fit(
        trainer.init(jnp.zeros(1), KEY), norms, callbacks=[lambda s: path.append(float(s.clip_norm))], progress=False
    )
    assert np.mean(path[-20:]) == pytest.approx(1.2, abs=0.06)
    assert "must be > 1, half the noise multiplier" in refusal(
        AdaptiveClip(1.0, count_noise=1.0).gradient_noise, 2.0, 9.0
    )


def test_a_module_with_a_loss():
    plan = plan_of(12, noise=0.01, steps=30)
    loss = lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out, y)
    trainer = Trainer(nn.Dense(2), optax.adam(0.2), plan, 1.0, loss=loss)
    x = np.linspace(-1, 1, 12, dtype=np.float32)[:, None]
    state = trainer.fit(trainer.init(key=KEY, example=jnp.zeros(1)), (x, (x[:, 0] > 0).astype(int)), progress=False)
    assert (np.argmax(nn.Dense(2).apply(state.params, x), 1) == (x[:, 0] > 0)).all()
    assert set(trainer.ways(state.params, (x, x[:, 0].astype(int))).values()) <= {"ghost", "vmap"}


def test_gradients_that_are_not_finite_are_counted():
    trainer, data = small(noise=1e-6, steps=2)
    bad = trainer.fit(trainer.init(jnp.zeros(2), KEY), data.at[3, 0].set(jnp.nan), progress=False)
    assert int(bad.not_finite) == 2 and np.isfinite(np.asarray(bad.params)).all()


# Checkpoints


def test_a_resumed_run_is_the_same_run(tmp_path):
    trainer, state, data = training_runs.start()
    whole = trainer.fit(state, data, progress=False)
    half = trainer.fit(
        state, data, checkpoints=tmp_path, checkpoint_every=7, callbacks=[lambda s: s.step == 23], progress=False
    )
    in_memory = trainer.fit(half, data, progress=False)
    resumed = trainer.fit(trainer.init(jnp.zeros(3)), data, checkpoints=tmp_path, checkpoint_every=7, progress=False)
    for other in (in_memory, resumed):
        assert other.step == training_runs.STEPS and other.lineage == whole.lineage
        for a, b in zip(jax.tree.leaves(other.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(other.params, whole.params)
    changed = Trainer(trainer.loss_fn, optax.sgd(0.1), trainer.plan, 1.0)
    assert "is not of this model and optimizer" in refusal(
        changed.fit, changed.init(jnp.zeros(3)), data, checkpoints=tmp_path, progress=False
    )


def killed_run(folder, kills, seed):
    """Kill a run at random steps, let it finish, and compare it with one that was left in peace."""
    rng = random.Random(seed)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    script = pathlib.Path(training_runs.__file__)
    acknowledged = 0
    for _ in range(kills):
        run = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment)
        after = rng.randint(1, 12)
        for count, line in enumerate(run.stdout, 1):
            acknowledged = max(acknowledged, int(line))
            if count == after:
                run.send_signal(signal.SIGKILL)
                break
        acknowledged = max([acknowledged, *map(int, run.stdout.read().split())])
        run.wait()
        ledger = Ledger.read(f"{folder}/run.jsonl")
        assert sum(ledger.releases().values()) >= acknowledged
        assert float(ledger.epsilon(1e-5).upper) <= 4.0
    trainer, state, data = training_runs.start()
    ended = trainer.fit(state, data, ledger=f"{folder}/run.jsonl", checkpoints=f"{folder}/checkpoints", progress=False)
    whole = trainer.fit(state, data, progress=False)
    np.testing.assert_array_equal(ended.params, whole.params)
    assert ended.step == training_runs.STEPS and float(ended.epsilon.upper) <= 4.0
    assert float(ended.epsilon.upper) == pytest.approx(float(whole.epsilon.upper), rel=1e-9)
    assert pathlib.Path(folder, "checkpoints").stat().st_mode & 0o077 == 0


def test_a_killed_run_loses_nothing(tmp_path):
    killed_run(tmp_path, kills=2, seed=0)


@pytest.mark.slow
def test_a_run_killed_fifty_times_loses_nothing(tmp_path):
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        killed_run(folder, kills=5, seed=seed)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: Trainer(nn.Dense(2), optax.sgd(0.1), plan_of(10), 1.0), "with a module, give loss as well"),
        (lambda: Trainer(linear, optax.sgd(0.1), plan_of(10), 0.0), "clip_norm = 0.0 must be"),
        (lambda: small()[0].init(jnp.zeros(2), b"short"), "key must be 32 bytes"),
        (lambda: small()[0].fit(small()[0].init(jnp.zeros(2)), jnp.ones((9, 2))), "the plan's dataset_size"),
        (lambda: small(clip=AdaptiveClip(1.0, count_noise=1.0)), "half the noise multiplier"),
    ],
)
def test_bad_training_is_refused(call, text):
    assert text in refusal(call)
