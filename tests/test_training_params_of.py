"""Parameters of a run from its folder alone, and what is told when the run has not ended."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_runs
from flax import nnx
from helpers import refusal
from training_runs import KEY

from jaxacct.training import Trainer, averaged, lora, params_of
from jaxacct.training.ledger import Ledger
from jaxacct.training.sharding import placement

DATA = np.eye(20, 2, dtype=np.float32)
PLAIN = {"it's": {"b": jnp.arange(3.0)}, '"]': jnp.ones((2, 2), jnp.bfloat16)}


def module(seed):
    return nnx.Linear(3, 2, rngs=nnx.Rngs(seed))


def equinox_module(seed):
    return pytest.importorskip("equinox").nn.MLP(3, 2, 4, 1, key=jax.random.key(seed))


MODELS = {  # what is trained, what `like` gets or None, more for the trainer
    "array": (jnp.arange(2.0), None, {}),
    "dicts": (PLAIN, None, {}),
    "dicts, given": (PLAIN, jax.tree.map(jnp.zeros_like, PLAIN), {}),
    "list": ([jnp.arange(2.0), {"a": jnp.ones(1)}], [jnp.zeros(2), {"a": jnp.zeros(1)}], {}),
    "part": (PLAIN, PLAIN | {"it's": {"b": jnp.zeros(3)}}, {"trainable": lambda path: "it" in path}),
    "adapters": (lambda: lora({"kernel": jnp.ones((4, 3))}, 2), lambda: lora({"kernel": jnp.ones((4, 3))}, 2), {}),
    "nnx": (lambda: module(0), lambda: module(1), {}),
    "equinox": (lambda: equinox_module(0), lambda: equinox_module(1), {}),
}


def begun(model, loss=lambda w, x: jnp.sum(x), optimizer=None, steps=3, noise=1.0, **more):
    """A trainer and its first state."""
    plan = training_runs.plan_of(20, steps=steps, noise=noise)
    trainer = Trainer(loss, optimizer or training_runs.sgd(0.1), plan, 1.0, **more)
    return trainer, trainer.init(model, key=KEY)


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_those_of_the_state(tmp_path, still_steps, kind):
    model, like, more = MODELS[kind]
    model, like = (x() if callable(x) else x for x in (model, like))
    trainer, state = begun(model, **more)
    state = trainer.fit(state, DATA, checkpoints=tmp_path, progress=False)
    found = params_of(tmp_path, like)
    assert jax.tree.structure(found) == jax.tree.structure(state.params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state.params), strict=True):
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(a, b)
    assert "finished" in repr(state) and "20" not in repr(state)[-24:]


@pytest.fixture(params=[True, False], ids=["ledger", "no ledger"])
def killed(request, tmp_path, monkeypatch):
    """What kill -9 at step 6 leaves: (fit, folder, ledger, parameters and epsilon of a run that was left in peace)."""
    monkeypatch.setattr(placement, "private_step", lambda rule: training_runs.moving)
    folder, path = tmp_path / "run", tmp_path / "run.jsonl"
    trainer, state = begun(jnp.zeros(2), steps=12)

    def fit(trainer=trainer, callbacks=()):
        more = {"ledger": path} if request.param else {}
        return trainer.fit(
            state, DATA, checkpoints=folder, checkpoint_every=4, callbacks=callbacks, progress=False, **more
        )

    def copy(state):
        if state.step == 6:
            shutil.copytree(folder, tmp_path / "copy")
            if request.param:
                shutil.copy(path, tmp_path / "copy.jsonl")

    whole = fit(callbacks=[copy])
    assert not whole.seen
    claim = float(whole.epsilon.upper)  # read from the ledger while it is whole
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    if request.param:
        (tmp_path / "copy.jsonl").rename(path)
    return fit, folder, path if request.param else None, whole.params, claim


def test_a_run_that_was_cut_off_counts_as_seen(killed):
    fit, folder, path, params, claim = killed
    if path is not None:
        assert float(Ledger.read(path).epsilon(1e-5).upper) < claim * 0.95
    found = params_of(folder)
    np.testing.assert_array_equal(found, params_of(folder))
    if path is not None:
        ledger = Ledger.read(path)
        assert float(ledger.epsilon(1e-5).upper) == pytest.approx(claim, rel=1e-6)
        assert ledger.runs[ledger.run].looks.looked
    longer, _ = begun(jnp.zeros(2), steps=18, noise=30.0)
    assert "may not go on with another plan" in refusal(fit, longer)
    resumed = fit()
    assert resumed.seen and resumed.stopped == "finished" and float(resumed.epsilon.upper) == pytest.approx(claim)
    np.testing.assert_array_equal(resumed.params, params)
    np.testing.assert_array_equal(params_of(folder), params)


def test_what_cannot_be_read_is_refused(tmp_path, still_steps):
    assert "is no folder of checkpoints" in refusal(params_of, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in refusal(params_of, tmp_path / "empty")
    trainer, state = begun([jnp.arange(2.0)])
    trainer.fit(state, DATA, checkpoints=tmp_path / "run", progress=False)
    assert "give the model as like=" in refusal(params_of, tmp_path / "run")
    for other in (
        [jnp.zeros(3)],
        [jnp.zeros(2, jnp.bfloat16)],
        {"a": jnp.zeros(2)},
        [jnp.zeros(2), jnp.zeros(1)][::-1],
    ):
        assert "is not the model of the checkpoint" in refusal(params_of, tmp_path / "run", other)


def test_a_ledger_in_use_or_lost_is_refused(tmp_path, still_steps):
    folder, path = tmp_path / "run", tmp_path / "run.jsonl"
    trainer, state = begun(jnp.zeros(2))
    stop = [lambda state: state.step == 2]
    trainer.fit(state, DATA, checkpoints=folder, ledger=path, callbacks=stop, progress=False)
    with Ledger.open(path):
        assert "another process is writing it" in refusal(params_of, folder)
    path.rename(f"{path}.away")
    assert str(path) in refusal(params_of, folder)


@pytest.mark.parametrize(
    "kind", ["dicts", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("part", "adapters", "nnx"))]
)
def test_the_moving_average_is_read_too(tmp_path, monkeypatch, kind):
    """The steps have no noise; their gradient of a leaf's k-th number is k."""
    model, like, more = MODELS[kind]
    model, like = (x() if callable(x) else x for x in (model, like))
    optimizer = averaged(optax.sgd(0.1), 0.2)

    def step(carried, *given):
        pulls = jax.tree.map(lambda leaf: jnp.arange(1.0, leaf.size + 1).reshape(leaf.shape), carried.params)
        pulls, opt_state = optimizer.update(pulls, carried.opt_state, carried.params)
        after = carried._replace(params=optax.apply_updates(carried.params, pulls), opt_state=opt_state)
        return after, training_runs.still(carried, *given)[1]

    monkeypatch.setattr(placement, "private_step", lambda rule: step)
    more = {"optimizer": optimizer} | more
    trainer, state = begun(model, **more)
    seen = []
    state = trainer.fit(state, DATA, checkpoints=tmp_path, progress=False, callbacks=[lambda s: seen.append(s.params)])
    found = params_of(tmp_path, like, average=True)
    assert jax.tree.structure(found) == jax.tree.structure(state.params)
    trained = [np.asarray(a) for a in jax.tree.leaves(state.opt_state.average)]
    known = iter(trained)
    for got, params, start in zip(*(jax.tree.leaves(x) for x in (found, state.params, like or model)), strict=True):
        if np.array_equal(got, start) and np.array_equal(params, start):
            continue  # frozen
        np.testing.assert_array_equal(got, next(known))
    assert next(known, None) is None
    # by hand, for the first trained leaf of the three steps
    path = [jax.tree.leaves(p) for p in seen]
    moved = next(i for i, a in enumerate(path[0]) if not np.array_equal(a, jax.tree.leaves(model)[i]))
    by_hand = np.asarray(jax.tree.leaves(model)[moved], np.float32)
    for step, params in enumerate(path, 1):
        kept = min(0.2, (1 + step) / (10 + step))
        by_hand = kept * by_hand + (1 - kept) * np.asarray(params[moved], np.float32)
    rough = np.asarray(path[0][moved]).dtype != np.float32  # the step rounds bfloat16 once less
    np.testing.assert_allclose(trained[0], by_hand, rtol=1e-2 if rough else 1e-5)


def test_without_an_average_there_is_none(tmp_path, still_steps):
    trainer, state = begun(jnp.zeros(2))
    trainer.fit(state, DATA, checkpoints=tmp_path, progress=False)
    assert "holds no moving average" in refusal(params_of, tmp_path, average=True)
    assert "must be" in refusal(averaged, optax.sgd(0.1), 1.0) and "Optax" in refusal(averaged, None)
