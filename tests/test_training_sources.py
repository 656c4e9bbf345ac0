"""Training from a Source: results equal to those of resident data, keys that depend on loaded examples, replays."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_runs import KEY, linear, plan_of, sgd, shared, still

from jaxacct import strategies
from jaxacct.core.validation import InputError
from jaxacct.training import AdaptiveClip, Ledger, Plan, Source, Trainer
from jaxacct.training.run import program
from jaxacct.training.run.checkpoints import Store
from jaxacct.training.sharding.placement import Placement
from jaxacct.training.step import key_derivation
from jaxacct.training.step.key_derivation import StepKey

ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
RULES = {
    "poisson": {"sampling_probability": 0.3},
    "truncated_poisson": {"sampling_probability": 0.3, "cap": 14},
    "without_replacement": {"sampling_probability": 0.3},
    "fixed_batches": {"sampling_probability": 0.3},
    "random_allocation": {"slots": 4},
    "cyclic_poisson": {"sampling_probability": 0.6, "noise": strategies.Toeplitz((1.0, 0.5))},
}


class Rows:
    """A dataset that is looked up item by item, and returns `act(number)` for each number that `at` accepts."""

    def __init__(self, rows, at=None, act=None):
        self.rows, self.at, self.act, self.seen = rows, at, act, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.seen.append(number)
        if self.at is not None and self.at(number):
            return self.act(number)
        return self.rows[number]


def trainer_of(plan, loss=linear, clip=1.0, **more):
    return shared(loss, sgd(0.1), plan, clip, micro_batch=4, **more)


def states_of(trainer, data, state=None, **more):
    """Return {step: parameters} of a run, and its last state or the error that cut the run off."""
    seen = {}
    keep = lambda state: seen.update({state.step: np.asarray(state.params)})
    state = trainer.init(np.zeros(3, np.float32), KEY) if state is None else state
    try:
        return seen, trainer.fit(state, data, callbacks=[keep], progress=False, **more)
    except (InputError, KeyboardInterrupt) as error:
        return seen, error


def fit(trainer, data, **more):
    return trainer.fit(trainer.init(np.zeros(3, np.float32), KEY), data, progress=False, **more)


def of_users():
    return trainer_of(plan_of(9, unit="user"), examples_per_user=2)


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Fits whose steps do the same, on examples of the same form, share the three programs of a step."""
    made, real = {}, Placement.loaded

    def loaded(self, *given):
        leaves, structure = jax.tree.flatten(given)
        forms = [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
        key = self.step_function, structure, *forms
        if key not in made:
            made[key] = real(self, *given)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placement, "loaded", loaded)
        yield


def loading():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jaxacct source")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loading()


@pytest.fixture
def equal_keys(monkeypatch):
    """Keys that follow from the step alone, for both paths."""

    def advance(line, program, data, settings, first, cut=b"", groups=None):
        numbers = settings[0], 1000 + (first if groups is None else 0)
        of_step, of_pass = (np.arange(8, dtype=np.uint32) + 100 * number for number in numbers)
        return line, StepKey(of_step, of_pass, "key", "batch", "pass")

    monkeypatch.setattr(key_derivation, "advance", advance)
    monkeypatch.setattr(key_derivation, "loaded", lambda line, key, rows: (line, key))


# From equal keys the same examples, and the same result


@pytest.mark.slow
@pytest.mark.parametrize("sampling", RULES)
def test_equal_keys_give_what_resident_data_give(equal_keys, sampling):
    plan = Plan(target_delta=1e-5, dataset_size=60, noise_multiplier=0.5, steps=5, sampling=sampling, **RULES[sampling])
    trainer = trainer_of(plan)
    resident, _ = states_of(trainer, ROWS)
    streamed, last = states_of(trainer, Source(ROWS))
    assert list(streamed) == [1, 2, 3, 4, 5] and last.stopped == "finished"
    for step, params in streamed.items():
        np.testing.assert_allclose(params, resident[step], rtol=2e-6, atol=1e-6)


def test_equal_keys_give_the_same_of_users_keys_of_examples_and_adaptive_norms(equal_keys):
    """A Source draws users, their examples, the loss's masks and the clip norm's noise as resident data do."""
    plan = plan_of(20, 0.5, noise=0.5, steps=5, unit="user")
    users = np.random.default_rng(1).integers(0, 17, 60)  # of 20 users four have no example
    loss = lambda w, x, key: jnp.dot(w, x * jax.random.bernoulli(key, 0.5, x.shape))
    trainer = trainer_of(plan, loss, AdaptiveClip(0.5), rngs=True, examples_per_user=2)
    resident, first = states_of(trainer, ROWS, users=users)
    streamed, second = states_of(trainer, Source(Rows(ROWS)), users=users)
    np.testing.assert_allclose([*streamed.values()], [*resident.values()], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(second.clip_norm, first.clip_norm, rtol=1e-6)


@pytest.mark.slow
def test_frozen_parameters_go_with_a_source(equal_keys):
    params = {"a": jnp.ones(3), "b": jnp.arange(3.0)}
    loss = lambda p, x: jnp.dot(p["a"] * p["b"], x)
    trainer = trainer_of(plan_of(60, 0.3, steps=3), loss, trainable={"a": True, "b": False})
    resident, streamed = (trainer.fit(trainer.init(params, KEY), d, progress=False) for d in (ROWS, Source(ROWS)))
    np.testing.assert_allclose(streamed.params["a"], resident.params["a"], rtol=2e-6)
    np.testing.assert_array_equal(streamed.params["b"], params["b"])


KINDS = {
    "item by item": lambda: Rows(ROWS),
    "a list": lambda: list(ROWS),
    "float64": lambda: ROWS.astype(np.float64),
    "big-endian": lambda: ROWS.astype(">f4"),
    "of the device": lambda: jnp.asarray(ROWS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_of_any_kind_gives_the_same_examples(kind):
    source = Source(KINDS[kind](), workers=3)
    (found,) = source.layout.buffers((5,))
    numbers = np.array([7, 3, 59, 3, 0])
    source.layout.load(numbers, [found], lambda: False)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, ROWS[numbers])


def test_parts_of_several_kinds_make_one_example(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, ROWS)
    items = [{"label": number, "half": np.float16(number / 2)} for number in range(60)]
    source = Source({"x": np.load(path, mmap_mode="r"), "rest": (Rows(items), jnp.arange(60, dtype=jnp.bfloat16))})
    shapes = jax.tree.map(
        lambda a: (a.shape, str(a.dtype)), source.layout.example, is_leaf=lambda a: hasattr(a, "dtype")
    )
    number = ((), "int32")
    assert shapes == {"x": ((3,), "float32"), "rest": ({"label": number, "half": ((), "float16")}, ((), "bfloat16"))}
    leaves = source.layout.buffers((2,))
    source.layout.load(np.array([4, 8]), leaves, lambda: False)
    example = jax.tree.unflatten(jax.tree.structure(source.layout.example), leaves)
    assert example["rest"][0]["label"].tolist() == [4, 8] and example["rest"][0]["half"].tolist() == [2.0, 4.0]
    np.testing.assert_array_equal(example["x"], ROWS[[4, 8]])
    assert example["rest"][1].astype(float).tolist() == [4.0, 8.0]


def test_a_run_compiles_before_its_first_step_alone():
    """Later steps compile nothing, whether their batch has no micro-batch, one or several."""
    trainer = Trainer(linear, optax.sgd(0.1), plan_of(60, 0.02, steps=40), 1.0, micro_batch=1)
    compiled, at, sizes = [], [], []
    listen = lambda name, seconds, **more: compiled.append(name) if "backend_compile" in name else None
    real = program.Streamed.run

    def run(self, carried, key, settings, batch):
        sizes.append(int(batch.mask.sum()))
        found = real(self, carried, key, settings, batch)
        at.append(len(compiled))
        return found

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program.Streamed, "run", run)
            fit(trainer, Source(ROWS))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert {0, 1, 2} <= set(sizes) and len(at) == 40
    assert at[0] == at[-1] >= 3


# Keys and ledger


def test_the_key_of_the_noise_follows_from_what_was_loaded_and_that_of_the_draw_does_not():
    line, key = key_derivation.advance(key_derivation.begin(KEY), b"program", b"data", (0,), -1)
    one, other, again = (key_derivation.loaded(line, key, rows) for rows in (b"rows", b"others", b"rows"))
    assert one[0] == again[0] and one[1].key_fingerprint == again[1].key_fingerprint
    assert len({each.key_fingerprint for each in (key, one[1], other[1])}) == 3
    assert len({each.chain for each in (line, one[0], other[0])}) == 3
    assert {each.batch_fingerprint for each in (key, one[1], other[1])} == {key.batch_fingerprint}
    assert len({each.words.tobytes() for each in (key, one[1], other[1])}) == 3


def test_every_bit_that_was_loaded_is_digested():
    make = lambda x, y, count: program.Batch([x, y], None, np.zeros(4, np.int32), np.arange(4) < count)
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, jnp.bfloat16)
    told = {program._digest(make(x, y, 3)), program._digest(make(x, y, 2))}
    for leaf in (x, y):
        for place in (0, 2):
            whole = leaf.view(np.uint8).reshape(4, -1)
            whole[place, -1] ^= 1
            told.add(program._digest(make(x, y, 3)))
            whole[place, -1] ^= 1
    assert len(told) == 6
    y[3] = 1  # a place without a member
    assert program._digest(make(x, y, 3)) in told


def entries(path):
    ledger = Ledger.read(path)
    return ledger.runs[ledger.run]


def test_every_step_is_in_the_ledger_before_its_sum_is_released(monkeypatch, path):
    noted, real = [], program.Streamed.run

    def run(self, *rest):
        noted.append(entries(path).steps)
        return real(self, *rest)

    monkeypatch.setattr(program.Streamed, "run", run)
    states_of(trainer_of(plan_of(60, 0.3, steps=4)), Source(ROWS, prefetch=3), ledger=path)
    assert noted == [1, 2, 3, 4]


@contextlib.contextmanager
def killed():
    """Runs end as if the process had been killed: no checkpoint at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.Streamed, "session_after", lambda self, error: None)
        yield


def cut_off_at(number):
    """A callback that ends a run at a step."""

    def cut(state):
        if state.step == number:
            raise KeyboardInterrupt

    return cut


def files_in(folder):
    return {"ledger": folder / "run.jsonl", "checkpoints": folder / "run", "checkpoint_every": 6, "progress": False}


@pytest.fixture(scope="module")
def left_by_a_kill(tmp_path_factory):
    """A run of 12 steps that was killed after step 8, with a checkpoint of step 6: (trainer, parameters, folder)."""
    trainer, folder = trainer_of(plan_of(60, 0.3, steps=12)), tmp_path_factory.mktemp("killed")
    more, seen = files_in(folder), {}
    keep = lambda state: seen.update({state.step: np.asarray(state.params)})
    with killed(), pytest.raises(KeyboardInterrupt):
        trainer.fit(trainer.init(np.zeros(3, np.float32), KEY), Source(ROWS), callbacks=[keep, cut_off_at(8)], **more)
    return trainer, seen, folder


@pytest.fixture
def killed_run(left_by_a_kill, tmp_path):
    """Return (trainer, parameters, options). The options name files that no other test uses."""
    trainer, seen, folder = left_by_a_kill
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return trainer, seen, files_in(tmp_path)


def go_on(killed_run, data):
    trainer, _, more = killed_run
    seen = {}
    keep = lambda state: seen.update({state.step: np.asarray(state.params)})
    return seen, trainer.fit(trainer.init(np.zeros(3, np.float32), KEY), data, callbacks=[keep], **more)


def test_a_run_that_was_killed_repeats_its_last_steps_to_the_last_bit_and_counts_them_once(killed_run):
    _, before, more = killed_run
    assert entries(more["ledger"]).steps == 8
    after, state = go_on(killed_run, Source(Rows(ROWS), workers=1, prefetch=0))  # however it is loaded
    assert list(after) == [7, 8, 9, 10, 11, 12]
    for step in (7, 8):
        np.testing.assert_array_equal(after[step], before[step])
    spent = entries(more["ledger"])
    assert (spent.steps, spent.again, spent.same) == (12, 0, 2)
    assert state.epsilon.upper == trainer_epsilon(killed_run[0])


def trainer_epsilon(trainer):
    return trainer.plan.epsilon_after(12).upper


def test_other_examples_under_a_draw_that_was_used_are_refused(killed_run):
    """Two releases of one draw, each with its own noise, would tell more than releases of two draws."""
    trainer, _, more = killed_run
    before = entries(more["ledger"])
    changed = ROWS + np.float32(1e-3)
    for _ in range(2):  # the first refusal writes nothing that would let the second fit pass
        message = refusal(go_on, killed_run, Source(changed))
        assert "step 6 was released with other examples" in message and "repeats=False" in message
    assert entries(more["ledger"]).seen == before.seen
    _, state = go_on(killed_run, Source(changed, repeats=False))
    spent = entries(more["ledger"])
    assert (spent.steps, spent.again, spent.same) == (14, 2, 0)
    assert len({entry.batch for entry in spent.seen}) == 14  # no draw is used twice
    assert state.step == 12 and state.epsilon.upper > trainer_epsilon(trainer)


@pytest.mark.slow
def test_a_source_that_does_not_repeat_itself_gets_draws_of_its_own_after_a_cut(killed_run):
    after, _ = go_on(killed_run, Source(ROWS, repeats=False))
    spent = entries(killed_run[2]["ledger"])
    assert (spent.steps, spent.again) == (14, 2) and len({entry.batch for entry in spent.seen}) == 14
    assert not np.array_equal(after[7], killed_run[1][7])


def test_without_a_ledger_a_killed_run_counts_whole(tmp_path):
    trainer = trainer_of(plan_of(60, 0.3, steps=6))
    more = {"checkpoints": tmp_path / "run", "checkpoint_every": 2, "progress": False}
    with killed(), pytest.raises(KeyboardInterrupt):
        trainer.fit(trainer.init(np.zeros(3, np.float32), KEY), Source(ROWS), callbacks=[cut_off_at(3)], **more)
    state = trainer.fit(trainer.init(np.zeros(3, np.float32), KEY), Source(ROWS), **more)
    whole = state.epsilon.upper
    assert whole > plan_of(60, 0.3, steps=6).epsilon_after(6).upper * 1.05


def test_continuations_of_one_state_have_draws_of_their_own(path):
    """The source may have changed meanwhile; two releases with equal draws and different noise are not independent."""
    trainer = trainer_of(plan_of(60, 0.3, steps=2))
    first = trainer.init(np.zeros(3, np.float32), KEY)
    batches = set()
    for number in range(3):
        states_of(trainer, Source(ROWS), first, ledger=path.with_name(f"{number}.jsonl"))
        batches |= {entry.batch for entry in entries(path.with_name(f"{number}.jsonl")).seen}
    assert len(batches) == 6


@pytest.mark.parametrize("sampling", [pytest.param("fixed_batches", marks=pytest.mark.slow), "random_allocation"])
def test_a_fit_that_does_not_repeat_begins_a_pass_of_its_own(sampling, path):
    """Records may have moved in the source. If the old pass went on, a record could be in two of its batches."""
    rule = RULES[sampling]
    plan = Plan(target_delta=1e-5, dataset_size=60, noise_multiplier=1.0, steps=4, sampling=sampling, **rule)
    trainer = trainer_of(plan)
    stop = lambda state: state.step == 2
    state = trainer.fit(
        trainer.init(np.zeros(3, np.float32)), Source(ROWS), ledger=path, callbacks=[stop], progress=False
    )
    trainer.fit(state, Source(ROWS), ledger=path, progress=False)
    by_step = {entry.step: entry.partition for entry in entries(path).seen}
    assert by_step[0] == by_step[1] != by_step[2] == by_step[3]


# What goes wrong


def one_less(rows):
    rows.rows = ROWS[:59]
    return rows.rows[0]


def fails(number):
    raise OSError("disk\non fire")


WRONG = {
    "length": (lambda rows: lambda n: one_less(rows), "has 59 examples, had 60"),
    "shape": (lambda rows: lambda n: ROWS[n, :2], "has a part of shape (2,) and dtype float32, where item 0 has (3,)"),
    "dtype": (lambda rows: lambda n: ROWS[n].astype(int), "and dtype int32, where item 0 has (3,) and float32"),
    "structure": (lambda rows: lambda n: {"x": ROWS[n]}, "let all items have one structure"),
    "text": (lambda rows: lambda n: "words", "must be numbers"),
    "error": (lambda rows: fails, "cannot be loaded (OSError: disk on fire)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_in_a_source_is_one_line(name):
    make, words = WRONG[name]
    rows = Rows(ROWS)
    source = Source(rows)
    rows.at, rows.act = lambda number: number == 9, make(rows)
    leaves = source.layout.buffers((3,))
    message = refusal(source.layout.load, np.array([4, 9, 8]), leaves, lambda: False)
    assert words in message and ("[9]" in message or name == "length")


@pytest.mark.parametrize("rows", [[1, 2**40], [np.int64(1), np.int64(2**40)], np.array([1, 2**40])])
def test_integers_that_the_device_has_no_dtype_for_are_refused(rows):
    """They would wrap around: 2**40 is 0 in int32."""
    source = Source(rows)
    leaves = source.layout.buffers((2,))
    assert "has integers that int32 cannot hold" in refusal(source.layout.load, np.arange(2), leaves, lambda: False)


@pytest.mark.parametrize("prefetch, workers", [pytest.param(0, 2, marks=pytest.mark.slow), (2, 3)])
def test_after_an_error_of_the_source_the_run_goes_on_where_it_was(prefetch, workers, tmp_path):
    rows = Rows(ROWS)
    rows.at, rows.act = lambda number: len(rows.seen) > 60, fails
    trainer = trainer_of(plan_of(60, 0.3, steps=8))
    more = {"ledger": tmp_path / "run.jsonl", "checkpoints": tmp_path / "run"}
    before, error = states_of(trainer, Source(rows, workers, prefetch), **more)
    assert "disk on fire" in str(error) and 1 <= len(before) < 8 and not loading()
    assert entries(tmp_path / "run.jsonl").steps == len(before)  # what was only loaded is not spent
    after, state = states_of(trainer, Source(ROWS), **more)
    assert sorted([*before, *after]) == list(range(1, 9)) and state.stopped == "finished"
    spent = entries(tmp_path / "run.jsonl")
    assert (spent.steps, spent.again) == (8, 0)


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_interrupt_while_the_source_is_waited_for(prefetch, tmp_path, capsys):
    """The signal comes while an item is being loaded; the run has no ledger, and goes on from its checkpoint.

    The signal may reach the main thread between a step and its callback.
    """
    # a shell that starts the tests in the background has interrupts ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = Rows(ROWS)
    loaded = itertools.count()  # `next` of a count is atomic, unlike a look at the length of a list
    rows.at = lambda number: next(loaded) == 100
    rows.act = lambda number: os.kill(os.getpid(), signal.SIGINT) or ROWS[number]
    trainer = trainer_of(plan_of(60, 0.3, steps=12))
    before, error = states_of(trainer, Source(rows, prefetch=prefetch), checkpoints=tmp_path / "run")
    assert isinstance(error, KeyboardInterrupt)
    step = int(re.search(r"cut off after step (\d+); its checkpoint is written", capsys.readouterr().err)[1])
    assert step - len(before) in (0, 1) and 1 <= step < 12
    after, state = states_of(trainer, Source(rows), checkpoints=tmp_path / "run")
    assert list(after) == list(range(step + 1, 13))
    assert state.epsilon.upper == trainer.plan.epsilon_after(12).upper


def test_checkpoints_hold_no_examples(tmp_path, monkeypatch):
    compile = jax.stages.Lowered.compile  # the loss's check passes options, and it alone is compiled
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *low, **how: compile(*low, **how) if how else None)
    monkeypatch.setattr(program.Streamed, "run", lambda self, carried, *given: still(carried, *given, None))
    data = np.random.default_rng(0).normal(size=(60, 20_000)).astype(np.float32)
    loss = lambda w, x: jnp.dot(w, x[:3])
    trainer = trainer_of(plan_of(60, 0.3, steps=2), loss)
    more = {"ledger": tmp_path / "run.jsonl", "checkpoints": tmp_path / "run", "checkpoint_every": 1}
    state = trainer.fit(trainer.init(np.zeros(3, np.float32)), Source(data, prefetch=2), progress=False, **more)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < data[0].nbytes
    store = Store(tmp_path / "run")
    found = store.load(store.latest(), program.Carried(state.params, state.opt_state, state.clip_norm, jnp.int32(0)))
    store.close()
    assert found.lineage == state.lineage and len(found.lineage.chain) == 32


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Source(iter([1])), "must have __len__ and __getitem__"),
        (lambda: Source("text"), "must have __len__ and __getitem__"),
        (lambda: Source((ROWS, 5)), "dataset[1] is int"),
        (lambda: Source((ROWS, np.zeros(59))), "parts of [59, 60] examples"),
        (lambda: Source([]), "0 examples"),
        (lambda: Source(np.zeros((0, 3))), "0 examples"),
        (lambda: Source(np.array(["a"])), "must be numbers"),
        (lambda: Source(np.float32(1.0)), "must have __len__"),
        (lambda: Source(np.zeros(())), "must have examples"),
        (lambda: Source([{"a": "text"}]), "must be numbers"),
        (lambda: Source(ROWS, workers=0), "workers = 0"),
        (lambda: Source(ROWS, prefetch=-1), "prefetch = -1"),
        (lambda: fit(trainer_of(plan_of(61)), Source(ROWS)), "data has first axes [(60,)], must be (61,)"),
        (lambda: fit(trainer_of(plan_of(60)), Source(ROWS), users=range(60)), "users is given"),
        (lambda: fit(of_users(), Source(ROWS), users=np.arange(59)), "one integer for each example"),
        (lambda: fit(of_users(), Source(ROWS), users=np.arange(60)), "users[9] = 9 must be from 0 to 8"),
    ],
)
def test_what_is_no_source_is_refused(make, words):
    assert words in refusal(make)


def test_how_norms_are_found_is_told_of_a_source_as_well():
    loss = lambda p, x: jnp.sum(x.reshape(1, 3) @ p["w"])
    trainer = trainer_of(plan_of(60), loss)
    params = {"w": jnp.zeros((3, 40))}
    assert trainer.norm_methods(params, Source(ROWS)) == trainer.norm_methods(params, ROWS)


# Loading ahead


def test_no_more_batches_are_loaded_ahead_than_asked_for():
    for depth in (0, 1, 3):
        made = []
        ahead = program.Ahead((made.append(i) or i for i in range(10)), depth, threading.Event())
        try:
            for number in range(10):
                assert ahead.take() == number
                assert len(made) <= number + 1 + depth
            with pytest.raises(StopIteration):
                ahead.take()
        finally:
            ahead.close()


def test_a_source_that_is_slow_to_end_is_waited_for_with_a_word(monkeypatch, capsys):
    monkeypatch.setattr("jaxacct.training.run.program._PATIENCE", 0.01)
    stop, busy = threading.Event(), threading.Event()

    def items():
        busy.set()
        stop.wait()
        threading.Event().wait(0.1)
        yield 1

    ahead = program.Ahead(items(), 1, stop)
    busy.wait()
    ahead.close()
    assert "waiting for the source" in capsys.readouterr().err
