"""A loss that closes over records is refused, whatever became of them; ordinary constants are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import refusal

from jaxacct import selection, tuning
from jaxacct.training import EarlyStop, Plan, Source, Trainer
from jaxacct.training.clipping.clipped_sum import clipped_sum
from jaxacct.training.clipping.examples_apart import refuse_closed_over, refuse_records
from jaxacct.training.run.evaluations import refuse_shared, units
from jaxacct.tuning import PrivateScore, key_words, private_score, side_by_side
from jaxacct.tuning.tuning_run import TRIALS

RNG, SIZE = np.random.default_rng(0), 200
X = RNG.normal(size=(SIZE, 6)).astype(np.float32)
LABELS = RNG.integers(0, 10, SIZE).astype(np.int32)
RARE = (RNG.random(SIZE) < 0.4).astype(np.int32)
TARGETS = RNG.normal(size=SIZE).astype(np.float32)
IMAGES = RNG.integers(0, 256, (SIZE, 5, 5, 1)).astype(np.uint8)
TOKENS = RNG.integers(0, 1000, (SIZE, 16)).astype(np.int32)
PAIRS = RNG.normal(size=(SIZE, 2)).astype(np.float32)
ONE_HOT = np.eye(10, dtype=np.float32)[LABELS]
PLACES = np.tile(np.arange(16, dtype=np.int32), (SIZE, 1))
MASK = (np.arange(16) < RNG.integers(1, 17, SIZE)[:, None]).astype(np.float32)
DATA = (X, LABELS, RARE, TARGETS, IMAGES, TOKENS, PAIRS, ONE_HOT, PLACES, MASK, np.arange(SIZE), np.sort(LABELS))
ONCE = {"target_delta": 1e-5, "sampling_probability": 0.1, "noise_multiplier": 1.0, "steps": 1}
PLAN = Plan(**ONCE, dataset_size=SIZE)

RECORDS = {
    "all": X,
    "slice": X[100:150],
    "one record": X[7],
    "transposed": X.T,
    "bfloat16": X.astype(jnp.bfloat16),
    "reshaped": X.reshape(-1, 2, 3),
    "flat": X.ravel(),
    "in another order": X[RNG.permutation(SIZE)[:50]],
    "every second": X[::2],
    "stacked": np.stack([X, X]),
    "padded": np.concatenate([np.zeros((5, 6), np.float32), X[:40]]),
    "one column": X[:, 2],
    "some columns": X[:, 3:5],
    "labels": LABELS,
    "labels of some": LABELS[50:120],
    "labels as float": LABELS.astype(np.float32),
    "labels, padded": np.pad(LABELS, (0, 7)),
    "labels in rows": LABELS.reshape(20, 10),
    "two classes": RARE,
    "as bool": RARE.astype(bool),
    "targets": TARGETS,
    "targets of some": TARGETS[50:90, None],
    "images": IMAGES.astype(np.float32),
    "images, flat": IMAGES.reshape(SIZE, -1),
    "tokens": TOKENS[:3],
    "pairs": PAIRS[:40],
    "pairs, turned": PAIRS[:, ::-1],
    "one-hot": ONE_HOT,
}
ORDINARY = {
    "zeros": np.zeros((SIZE, 6)),
    "ones": np.ones(SIZE),
    "arange": np.arange(SIZE),
    "places": np.arange(16),
    "identity": np.eye(10),
    "classes": np.eye(1000)[:, :10],
    "grid": np.linspace(0, 1, SIZE),
    "weights": RNG.normal(size=(6, 6)),
    "as large as the data": RNG.normal(size=(SIZE, 6)),
    "causal mask": np.tril(np.ones((16, 16))),
    "smoothed labels": np.full((10, 10), 0.01) + 0.9 * np.eye(10),
    "positions": np.sin(np.arange(SIZE)[:, None] / 10000 ** (np.arange(6) / 6)),
    "other labels": RNG.integers(0, 10, SIZE),
    "other coins": RNG.random(SIZE) < 0.4,
    "classes in turn": np.arange(SIZE) % 10,
    "sorted classes": np.repeat(np.arange(10), SIZE // 10),
    "bins": np.arange(256.0),
}


def trace_with(constant):
    constant = np.asarray(constant, jax.dtypes.canonicalize_dtype(constant.dtype))
    return jax.make_jaxpr(lambda w: w * jnp.sum(constant + w))(np.float32(1))


@pytest.mark.parametrize("name", RECORDS)
def test_records_among_the_constants_are_found(name):
    text = refusal(refuse_closed_over, "loss_fn", trace_with(RECORDS[name]), DATA)
    assert text.startswith("loss_fn closes over an array of shape (") and "public data" in text


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_constants_are_none(name):
    refuse_closed_over("loss_fn", trace_with(ORDINARY[name]), DATA)


def contrastive(others):
    """A contrastive loss that closes over the batch `others`, for its in-batch negatives."""
    return lambda w, x: optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(others) @ (w * x), 0)


class Memory(nnx.Module):
    def __init__(self, rows):
        self.w, self.rows = nnx.Param(np.ones(6, np.float32)), nnx.Variable(rows)


def in_a_loop(w, x):
    return jax.lax.fori_loop(0, 2, lambda i, c: c + jnp.sum(jnp.asarray(X)[:9] @ (w * x)), 0.0)


CLOSED = {
    "closure": contrastive(X),
    "slice": contrastive(X[20:40]),
    "partial": functools.partial(lambda rows, w, x: jnp.sum((w * x - jnp.asarray(rows)) ** 2), X[:30]),
    "loop": in_a_loop,
    "jit": lambda w, x: jax.jit(contrastive(X))(w, x),
    "checkpoint": lambda w, x: jax.checkpoint(contrastive(X))(w, x),
}


@pytest.mark.parametrize("name", CLOSED)
def test_records_are_found_wherever_the_loss_uses_them(name):
    closed = jax.make_jaxpr(CLOSED[name])(np.ones(6, np.float32), X[0])
    assert "loss_fn closes over" in refusal(refuse_closed_over, "loss_fn", closed, X)


def test_a_trainer_refuses_a_loss_that_closes_over_the_data(tmp_path):
    trainer = Trainer(CLOSED["jit"], optax.sgd(0.1), PLAN, 1.0)
    state = trainer.init(np.ones(6, np.float32))
    for data in (X, Source(X)):
        text = refusal(trainer.fit, state, data, ledger=tmp_path / "run.jsonl", progress=False)
        assert "loss_fn closes over" in text
    assert not (tmp_path / "run.jsonl").exists()


def test_a_rule_that_uses_its_example_from_outside_spends_nothing(tmp_path):
    """Tracing and compiling succeeded; the first call failed with JAX's words, after an entry; `tune` was silent."""
    loss = lambda w, x: jax.custom_gradient(lambda w: (w @ x, lambda g: (g * x,)))(w)
    for more, users in (({}, None), ({"examples_per_user": 2}, np.arange(SIZE) // 2)):
        plan = PLAN if users is None else Plan(**ONCE, dataset_size=SIZE // 2, unit="user")
        trainer = Trainer(loss, optax.sgd(0.1), plan, 1.0, **more)
        for data in (X, Source(X)) if users is None else (X,):
            given = {"users": users, "ledger": tmp_path / "run.jsonl", "progress": False}
            assert "keeps a traced value" in refusal(trainer.fit, trainer.init(ZEROS), data, **given)
    assert "keeps a traced value" in tuned("tune", tmp_path / "run.jsonl", loss)
    assert "keeps a traced value" in refusal(clipped_sum, loss, ZEROS, X[:4])
    scaled = jax.jit(lambda scale: clipped_sum(lambda w, x: scale * (w @ x), ZEROS, X[:4]).total)
    assert np.isfinite(scaled(2.0)).all() and not list(tmp_path.iterdir())


def test_records_in_a_frozen_variable_are_found(still_steps):
    trainer = Trainer(lambda m, x: jnp.sum(m.rows[...] @ (m.w[...] * x)), optax.sgd(0.1), PLAN, 1.0)
    assert "closes over" in refusal(trainer.fit, trainer.init(Memory(X[:20])), X, progress=False)
    state = trainer.fit(trainer.init(Memory(np.ones((20, 6), np.float32))), X, progress=False)
    assert state.step == 1


def test_every_other_door_refuses_it_too():
    train = side_by_side(contrastive(X), lambda config: optax.sgd(config["rate"]), PLAN)
    given = np.ones((2, 6), np.float32), {"rate": np.ones(2)}, key_words([bytes(32), bytes(range(32))])
    assert "loss_fn closes over" in refusal(train, *given, X)
    assert "loss_fn closes over" in refusal(clipped_sum, contrastive(X), np.ones(6, np.float32), X[5:20])
    value = lambda w, x: jnp.max(jnp.asarray(X) @ x) > w
    assert PrivateScore(value, X, noise_multiplier=1.0).data is X
    assert "value closes over" in refusal(units, value, 1.0, X, 2.0**-20)


def test_a_loss_that_closes_over_the_batch_of_a_traced_step_is_refused():
    step = jax.jit(lambda w, batch: clipped_sum(contrastive(batch), w, batch).total)
    w = np.ones(6, np.float32)
    assert "closes over the batch" in refusal(step, w, X[:8])
    frozen = jax.jit(lambda w, base, batch: clipped_sum(lambda w, x: jnp.sum(base @ (w * x)), w, batch).total)
    assert jax.eval_shape(frozen, w, np.ones((3, 6), np.float32), X[:8]).shape == (6,)


@pytest.mark.parametrize("name", ["all", "one record", "reshaped", "stacked", "in another order", "bfloat16"])
def test_records_among_first_parameters_are_found(name):
    records = jnp.asarray(RECORDS[name])
    assert "public data" in refusal(refuse_records, {"b": np.zeros(3), "w": records}, (DATA, None))
    assert "first parameters" in refusal(refuse_records, records, Source(DATA))


@pytest.mark.parametrize("name", [name for name in ORDINARY if name != "weights"])
def test_ordinary_first_parameters_hold_none(name):
    refuse_records({"w": ORDINARY[name], "more": np.stack([ORDINARY[name]] * 4)}, DATA)


def test_columns_are_compared_with_arrays_of_one_column():
    x, y = RNG.normal(size=(2, SIZE, 1)).astype(np.float32)
    assert "holds rows" in refusal(refuse_records, {"centres": x[:40]}, (x, y))
    assert "holds rows" in refusal(refuse_shared, "public_data", (x.copy(), y.copy()), (x, y), "; give others")
    refuse_records({"w": RNG.normal(size=(40, 1)), "v": RNG.normal(size=(6, 4))}, (x, y))


@pytest.mark.parametrize("width", [6, 8, 10, 14])
def test_rows_of_few_values_agree_by_chance(width):
    signs = RNG.choice([-1, 1], (4000, width)).astype(np.int8)
    refuse_records({"w": RNG.choice([-1.0, 1.0], (64, width)).astype(np.float32)}, signs)
    states = np.array(np.meshgrid(*[[-1.0, 1.0]] * width)).reshape(width, -1).T.astype(np.float32)
    refuse_closed_over("loss_fn", jax.make_jaxpr(lambda w: jnp.sum(w * states))(np.ones(width, np.float32)), signs)
    assert "holds rows" in refusal(refuse_records, {"w": signs[100:200].astype(np.float32)}, signs)


def test_no_function_and_no_first_parameter_may_hold_private_data_of_the_call():
    rule = EarlyStop(epsilon=0.5, every=1)
    plan = Plan(None, 1e-5, SIZE, 0.1, noise_multiplier=1.0, steps=2, early_stop=rule)
    ones, held_out = np.ones(6, np.float32), RNG.normal(size=(40, 6)).astype(np.float32)
    near = lambda rows: lambda w, x: jnp.min(jnp.sum((jnp.asarray(rows) - x) ** 2, axis=1)) < jnp.sum(w)
    plain = lambda w, x: jnp.sum((w * x) ** 2)

    def fit(loss=plain, first=ones, data=X, **more):
        trainer = Trainer(loss, optax.sgd(0.1), plan, 1.0)
        given = {"score": lambda w, x: jnp.sum(w * x) > 0, "validation": held_out} | more
        return refusal(trainer.fit, trainer.init(first), data, progress=False, **given)

    assert "loss_fn closes over" in fit(contrastive(held_out))
    for rows in (X, held_out):
        assert "score closes over" in fit(score=near(rows))
        of_two = lambda w, x: jnp.sum((w["centres"] - x) ** 2)
        for data in (X, Source(X)):
            assert "params has an array of shape (3, 6)" in fit(of_two, {"centres": rows[[3, 9, 27]]}, data)
        for public in (rows, rows.copy(), jnp.asarray(rows), Source(rows), {"x": rows[::-1].copy()}):
            assert "public_data holds rows" in fit(evaluate=lambda w, data: 0.0, public_data=public)


ZEROS = np.zeros(6, np.float32)
DOORS = ["tune", "rounds", "subset"]


@functools.cache  # it solves for its noise
def subset_plan():
    return tuning.SubsetPlan(8.0, 1e-5, SIZE, 0.2, selection.Poisson(3), sampling_probability=1.0, steps=1)


def tuned(door, path, loss=lambda w, x: jnp.sum((w - x) ** 2), first=ZEROS, data=X, **more):
    """What a tuning says that must spend nothing."""
    given = {"init": lambda key: first, "score": lambda w: 0.0, "ledger": path} | more
    make = given.pop("make", lambda config: optax.sgd(config["learning_rate"]))
    space = given.pop("space", tuning.grid(learning_rate=[0.1, 0.2]))
    repeated = Plan(None, 1e-5, SIZE, 1.0, noise_multiplier=3.0, steps=1, repetitions=selection.PointMass(2))
    if door == "subset":
        plan, call = subset_plan(), tuning.tune_on_subset
    elif door == "rounds":
        plan, call, given["update"] = repeated, tuning.tune_in_rounds, lambda winners: None
    else:
        plan, call = repeated, tuning.tune
    words = refusal(call, loss, make, space, data, plan, **given)
    assert not path.exists()
    return words


@pytest.mark.parametrize("door", DOORS)
def test_tunings_refuse_what_a_traced_step_shows_before_anything_is_spent(door, tmp_path):
    path = tmp_path / "run.jsonl"
    callback = lambda w, x: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), jnp.float32), x) * jnp.sum(w)
    assert "a Source" in tuned(door, path, data=Source(X))
    assert "loss_fn closes over" in tuned(door, path, contrastive(X))
    assert "loss_fn closes over" in tuned(door, path, contrastive(X[[5]]))  # a subset need not have this record
    assert "params has an array" in tuned(door, path, lambda w, x: jnp.sum((w - x) ** 2), X[[3, 9, 27]])
    transposed = tuned(door, path, lambda w, x: jnp.sum((x @ w) ** 2), X[:64].T)  # candidates are stacked before it
    assert "params has an array of shape (6, 64)" in transposed
    assert "prefix of the parameters" in tuned(door, path, clip_norm={"a": 1.0})
    assert "private_loss=" in tuned(door, path, make=lambda config: optax.contrib.momo(config["learning_rate"]))
    assert "pure_callback" in tuned(door, path, callback)
    if door != "subset":
        named = lambda config: getattr(optax, config["name"])(0.1) if config["name"] else optax.contrib.momo(0.1)
        assert "private_loss=" in tuned(door, path, make=named, space=tuning.grid(name=["sgd", "adam", "yogi", ""]))
        assert "selects none" in tuned(door, path, trainable=lambda path: False)


@pytest.mark.parametrize("door", DOORS[:2])
def test_tunings_keep_training_and_a_private_score_apart(door, tmp_path, monkeypatch):
    monkeypatch.setattr(private_score, "PROFILE_POINTS", 2)
    path, held_out = tmp_path / "run.jsonl", RNG.normal(size=(40, 6)).astype(np.float32)
    score = lambda value, data, **more: {"score": PrivateScore(value, data, noise_multiplier=1.0, **more)}
    right = lambda w, x: jnp.sum(w * x) > 0
    near = lambda rows: lambda w, x: jnp.min(jnp.sum((jnp.asarray(rows) - x) ** 2, axis=1)) < jnp.sum(w)
    assert "loss_fn closes over" in tuned(door, path, contrastive(held_out), **score(right, held_out))
    assert "params has an array" in tuned(door, path, first=held_out[[3, 9, 27]], **score(right, held_out))
    for rows in (X, held_out):
        assert "value closes over" in tuned(door, path, **score(near(rows), held_out))
    assert "value closes over" in tuned(door, path, **score(near(X), X, on="training"))
    for rows in (X, X[50:90].copy(), jnp.asarray(X)[::-1]):
        assert "use on='training'" in tuned(door, path, **score(right, rows))


def test_a_trial_candidate_is_none_of_the_i_i_d_ones_and_the_first_adaptive_one(tmp_path):
    path, seen = tmp_path / "run.jsonl", []

    class Listed:
        def sample(self, key):
            seen.append(jax.random.key_data(key).tolist())
            return {"learning_rate": 0.1 * len(seen)}

    def stop(w):
        raise KeyboardInterrupt

    plan = Plan(None, 1e-5, SIZE, 0.1, noise_multiplier=3.0, steps=1, repetitions=selection.PointMass(2))
    make, first = lambda config: optax.sgd(config["learning_rate"]), lambda key: np.zeros(6, np.float32)
    for candidates, draws in (("adaptive", 2), ("iid", 2 + TRIALS)):
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            tuning.tune(
                lambda w, x: jnp.sum((w - x) ** 2),
                make,
                Listed(),
                X,
                plan,
                init=first,
                score=stop,
                ledger=path,
                candidates=candidates,
                key=bytes(32),
            )
        assert len(seen) == draws and len({str(key) for key in seen}) == draws


def test_public_data_may_share_some_rows_by_chance():
    few = np.concatenate([X[:30], RNG.normal(size=(70, 6)).astype(np.float32)])[RNG.permutation(100)]
    votes = lambda: RNG.integers(0, 2, (SIZE, 40)).astype(np.float32)
    table, other = (
        np.repeat(np.eye(5, dtype=np.float32)[rows], 4, axis=1) * 1.7 for rows in RNG.integers(0, 5, (2, SIZE))
    )
    for own, private in ((few, X), (votes(), votes()), (table, other), (np.zeros((9, 6), np.float32), DATA)):
        refuse_shared("public_data", own, private, "")
    for own in (X, X[::-1].copy(), np.concatenate([few, X])):
        assert "public_data holds rows" in refusal(refuse_shared, "public_data", own, X.copy(), "")


def test_large_data_are_compared_by_some_rows(monkeypatch):
    monkeypatch.setattr("jaxacct.training.clipping.examples_apart._ALL_BYTES", 100)
    large = RNG.normal(size=(20_000, 6)).astype(np.float32)
    assert "closes over" in refusal(refuse_closed_over, "loss_fn", trace_with(large), large)
    assert "closes over" in refusal(refuse_closed_over, "loss_fn", trace_with(large[:100]), large)
