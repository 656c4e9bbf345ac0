"""Whatever a run is resumed from, it claims at least what was spent, or is refused in one line."""

import itertools
import math
import shutil
from contextlib import suppress

import jax
import jax.numpy as jnp
import pytest
from helpers import refusal
from training_cases import gaussian_epsilon
from training_runs import still_trainer as trained

from jaxacct.core.validation import InputError
from jaxacct.strategies import Banded
from jaxacct.training import Plan
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.ledger import LedgerFile

STEPS, CRASH = 8, 7
STATES = {"fresh": 0, "older": 3, "same": 6, "newer": 7}
FOLDERS = {"none": None, "begun": 0, "older": 2, "same": 6, "newer": 8}
LEDGERS = {"not given": None, "missing": 0, "older": 3, "same": 7, "newer": 8, "of another run": -1}
OTHERS = ("same", "other plan", "other program")
DATA = jnp.linspace(0.0, 1.0, 20).reshape(10, 2)


class Crash(Exception):
    pass


def trainer_of(which):
    noise, steps = (5.0, 10) if which == "other plan" else (1.0, STEPS)
    plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=noise, steps=steps)
    return trained(plan, 0.2 if which == "other program" else 0.1)


@pytest.fixture
def noise_drawn(monkeypatch):
    """{key words: noise multiplier} of every step that ran: equal words are equal noise, which counts once."""
    drawn, real_call = {}, jax.stages.Compiled.__call__

    def call(self, *args):
        if len(args) == 6 and hasattr(args[4], "gradient_noise"):
            drawn[args[1].tobytes()] = float(args[4].gradient_noise)
        return real_call(self, *args)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", call)
    return drawn


def begun(folder, with_ledger, drawn):
    """A run that crashed at its step 7: its states, and copies of its folder and ledger as they were at some steps.

    Also the keys in the order of the steps.
    """
    trainer, states = trainer_of("same"), {}
    first = trainer.init(jnp.zeros(2))
    copies = {0: first}

    def keep(state):
        states[state.step] = state
        if state.step in (1, 3):
            shutil.copytree(folder / "run", folder / f"run at {state.step - 1}")
        if with_ledger and state.step == 3:
            shutil.copy(folder / "ledger", folder / "ledger at 3")
        if state.step == CRASH:  # a killed process leaves what is there now; without a ledger an exception adds a look
            shutil.copytree(folder / "run", folder / "run at 6")
            raise Crash

    more = {"checkpoints": folder / "run", "checkpoint_every": 2, "progress": False}
    more["ledger"] = folder / "ledger" if with_ledger else None
    with suppress(Crash):
        trainer.fit(first, DATA, callbacks=[keep], **more)
    if with_ledger:
        shutil.copy(folder / "ledger", folder / "ledger at 7")
    keys = list(drawn)
    trainer.fit(trainer.init(jnp.zeros(2)), DATA, **more)
    shutil.copytree(folder / "run", folder / "run at 8")
    with Ledger.create(folder / "ledger at -1", trainer.plan) as other:
        other.record(0, "key", "batch", 1.0, 1.0)
    if with_ledger:
        shutil.copy(folder / "ledger", folder / "ledger at 8")
    assert list(drawn)[:CRASH] == keys and len(drawn) == STEPS
    return copies | states, list(drawn)


def cells(with_ledger):
    ledgers = LEDGERS if with_ledger else ["not given", "missing", "of another run"]
    return list(itertools.product(STATES, FOLDERS, ledgers, OTHERS))


def went_on(folder, states, cell, drawn):
    """The state that a cell ends with, or the refusal."""
    state, copy, ledger, other = cell
    here = folder / "here"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    more = {}
    if FOLDERS[copy] is not None:
        shutil.copytree(folder / f"run at {FOLDERS[copy]}", here / "run")
    if LEDGERS[ledger]:
        shutil.copy(folder / f"ledger at {LEDGERS[ledger]}", here / "ledger")
    if LEDGERS[ledger] is not None:
        more["ledger"] = here / "ledger"
    trainer = trainer_of(other)
    start = trainer.init(jnp.zeros(2)) if state == "fresh" else states[STATES[state]]
    if copy != "none":
        more["checkpoints"] = here / "run"
    before = dict(drawn)
    drawn.clear()
    try:
        ended = trainer.fit(start, DATA, progress=False, **more)
        return ended, float(ended.epsilon.upper), dict(drawn)
    except InputError as error:
        assert "\n" not in str(error)
        return None, str(error), {}
    finally:
        drawn.clear()
        drawn.update(before)


def spent_at_least(cell, keys, with_ledger):
    """The keys of the steps that a run from a cell's state, folder and ledger must count.

    A state counts for the steps that led to it, and a ledger for its entries.  A folder without a ledger also counts
    for the steps after its last checkpoint.
    """
    state, copy, ledger, _ = cell
    known = max(STATES[state], FOLDERS[copy] or 0, LEDGERS[ledger] or 0)
    if not with_ledger and FOLDERS[copy] in (0, 2, 6):
        known = max(known, CRASH)
    return keys[:known]


GOES_ON = {
    True: [
        ("fresh", "begun", "same"),
        ("fresh", "older", "same"),
        ("fresh", "same", "same"),
        ("fresh", "older", "older"),
        ("fresh", "newer", "newer"),
        ("same", "same", "same"),
        ("older", "none", "same"),
        ("newer", "none", "same"),
        ("same", "none", "newer"),
    ],
    False: [
        ("fresh", "begun", "not given"),
        ("fresh", "older", "not given"),
        ("fresh", "same", "not given"),
        ("fresh", "newer", "missing"),
        ("same", "same", "not given"),
        ("older", "none", "not given"),
        ("newer", "none", "missing"),
    ],
}
"""(state, folder, ledger): with the same plan and program these are not refused, and count nothing twice."""


def failures(tmp_path, with_ledger, drawn, chosen):
    """The cells whose claim is below what was spent, with claim and truth; and how many went on."""
    states, keys = begun(tmp_path, with_ledger, drawn)
    wrong, on = [], {}
    for cell in chosen:
        ended, claimed, used = went_on(tmp_path, states, cell, drawn)
        if ended is None:
            continue
        noises = {key: 1.0 for key in spent_at_least(cell, keys, with_ledger)} | used
        noises |= {"of another run": 1.0} if cell[2] == "of another run" else {}
        truth = gaussian_epsilon(math.sqrt(sum(z**-2.0 for z in noises.values())))
        on[cell] = claimed / truth
        if not claimed >= truth * (1 - 1e-6):
            wrong.append((*cell, round(claimed, 3), round(truth, 3)))
    return wrong, on


@pytest.mark.parametrize("with_ledger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_some_cells_of_the_matrix(tmp_path, noise_drawn, with_ledger):
    """One in a hundred and thirteen of all cells, and half of those that must go on."""
    must = GOES_ON[with_ledger][::2]
    chosen = [*cells(with_ledger)[::113], *((*cell, "same") for cell in must)]
    wrong, on = failures(tmp_path, with_ledger, noise_drawn, chosen)
    assert wrong == []
    assert {cell: on.get((*cell, "same")) for cell in must} == dict.fromkeys(must, pytest.approx(1.0, rel=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("with_ledger", [True, False])
def test_the_whole_matrix(tmp_path, noise_drawn, with_ledger):
    wrong, on = failures(tmp_path, with_ledger, noise_drawn, cells(with_ledger))
    assert wrong == [] and len(on) > 20
    must = GOES_ON[with_ledger]
    assert {cell: on.get((*cell, "same")) for cell in must} == dict.fromkeys(must, pytest.approx(1.0, rel=1e-6))


# Another plan


def full(noise=None, steps=STEPS, target=None, **more):
    given = {"target_delta": 1e-5, "dataset_size": 10, "sampling_probability": 1.0, "steps": steps}
    return Plan(target_epsilon=target, noise_multiplier=noise, **given, **more)


def mu(*parts):
    """mu of the composition of full-batch steps, given as (noise multiplier, steps) pairs."""
    return math.sqrt(sum(steps / noise**2 for noise, steps in parts))


@pytest.mark.parametrize("way", ["state", "folder", "ledger"])
def test_what_a_plan_spent_counts_under_the_next(tmp_path, way):
    """Twenty steps at noise .5 cost 68; a trainer with noise 5 that resumes after them claimed less than 1."""
    first, second = trained(full(0.5, 20)), trained(full(5.0, 30))
    folder = {"checkpoints": tmp_path / "run"} if way == "folder" else {}
    state = first.fit(first.init(jnp.zeros(2)), DATA, progress=False, **folder)
    start = second.init(jnp.zeros(2)) if way == "folder" else state
    more = folder | ({"ledger": tmp_path / "ledger"} if way == "ledger" else {})
    ended = second.fit(start, DATA, progress=False, **more)
    assert ended.step == 30
    assert float(ended.epsilon.upper) == pytest.approx(gaussian_epsilon(mu((0.5, 20), (5.0, 10))), rel=1e-6)


def test_a_target_that_was_passed_before_is_refused(tmp_path):
    spent, wanted = trained(full(target=8.0)), trained(full(target=1.0))
    more = {"checkpoints": tmp_path / "run", "progress": False}
    spent.fit(spent.init(jnp.zeros(2)), DATA, **more)
    words = "under another plan exceeds the plan's target_epsilon = 1.0"
    assert words in refusal(wanted.fit, wanted.init(jnp.zeros(2)), DATA, **more)
    assert words in refusal(wanted.fit, wanted.init(jnp.zeros(2)), DATA, ledger=tmp_path / "ledger", **more)
    assert not (tmp_path / "ledger").exists()
    same = spent.fit(spent.init(jnp.zeros(2)), DATA, **more)
    assert same.stopped == "finished" and 8.0 - 1e-3 <= same.epsilon.upper <= 8.0


@pytest.mark.parametrize("with_ledger", [True, False])
def test_the_budget_counts_what_came_before(tmp_path, with_ledger):
    """Half of a target is spent under another plan: the run stops just in time, with a ledger and without."""
    plan = full(target=2.0, steps=20)
    before = full(plan.noise_multiplier, steps=10)
    more = {"ledger": tmp_path / "ledger"} if with_ledger else {}
    state = trained(before).fit(trained(before).init(jnp.zeros(2)), DATA, progress=False)
    longer = plan.recalibrate(0, steps=40)
    ended = trained(longer).fit(state, DATA, progress=False, **more)
    left = 40 - 10  # steps of the longer plan at its own, larger noise
    most = next(
        k for k in range(left, -1, -1)
        if gaussian_epsilon(mu((plan.noise_multiplier, 10), (longer.noise_multiplier, k))) <= 2.0
    )  # fmt: skip
    assert 0 < most < left and (ended.step, ended.stopped) == (10 + most, "budget")
    truth = gaussian_epsilon(mu((plan.noise_multiplier, 10), (longer.noise_multiplier, most)))
    assert float(ended.epsilon.upper) == pytest.approx(truth, rel=1e-6)


def test_a_pass_that_goes_on_with_other_data_is_another_pass():
    """Other data are cut into batches anew, so a record may be in both passes; both count without a ledger, too."""
    plan = Plan(
        target_delta=1e-5, dataset_size=10, expected_batch_size=2, steps=5, noise_multiplier=2.0,
        sampling="fixed_batches",
    )  # fmt: skip
    trainer = trained(plan)
    half = trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[lambda s: s.step == 2], progress=False)
    for data, passes in ((DATA, 1), (DATA + 1.0, 2)):
        ended = trainer.fit(half, data, progress=False)
        assert float(ended.epsilon.upper) == pytest.approx(gaussian_epsilon(mu((2.0, passes))), rel=1e-6)


def test_a_warm_start_in_the_same_ledger_counts_both_runs(tmp_path):
    trainer = trained(full(1.0))
    first = trainer.fit(trainer.init(jnp.zeros(2)), DATA, ledger=tmp_path / "ledger", progress=False)
    second = trainer.fit(trainer.init(first.params), DATA, ledger=tmp_path / "ledger", progress=False)
    assert float(second.epsilon.upper) == pytest.approx(gaussian_epsilon(mu((1.0, 16))), rel=1e-6)


def test_other_relations_and_filters_are_refused(tmp_path):
    plan = full(1.0, 4, sampling="without_replacement", relation="replace_one")
    state = trained(full(1.0, 2)).fit(trained(full(1.0, 2)).init(jnp.zeros(2)), DATA, progress=False)
    for more in ({}, {"ledger": tmp_path / "ledger"}):
        assert "use one relation for both" in refusal(trained(plan).fit, state, DATA, progress=False, **more)
    filtered = full(10.0, 2, data_dependent=True)
    state = trained(filtered).fit(trained(filtered).init(jnp.zeros(2)), DATA, progress=False)
    assert "Renyi filter" in refusal(trained(full(1.0, 4)).fit, state, DATA, progress=False)


def test_a_change_of_plan_after_looks_at_outputs_must_be_declared(tmp_path):
    """After a stop by the number of steps another plan may follow; after a stop by outputs, only under a filter."""
    for declared, looks in ((False, False), (False, True), (True, True)):
        plan = full(target=2.0, steps=8, data_dependent=declared)
        trainer, folder = trained(plan), tmp_path / f"{declared} {looks}"
        policy = (lambda s: s.step == 5 and bool(s.params[0] < 1e9)) if looks else (lambda s: s.step == 5)
        state = trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[policy], checkpoints=folder, progress=False)
        assert state.stopped == "callback" and state.seen == looks
        longer = trained(plan.recalibrate(5, steps=10))
        for start, more in ((state, {}), (longer.init(jnp.zeros(2)), {"checkpoints": folder})):
            if looks and not declared:
                words = refusal(longer.fit, start, DATA, progress=False, **more)
                assert "may not go on with another plan" in words
                continue
            ended = longer.fit(start, DATA, progress=False, **more)
            assert ended.step == 10 and 2.0 - 1e-3 <= ended.epsilon.upper <= 2.0
            assert ended.epsilon.kind == ("bound" if declared else "certified")
        if looks:
            same = trainer.fit(state, DATA, progress=False)
            assert same.step == 8 and same.epsilon.upper <= 2.0
        shutil.rmtree(folder)


def test_a_ledger_that_is_taken_away_while_it_is_open_is_noticed(tmp_path):
    for number, harm in enumerate((lambda p: p.unlink(), lambda p: p.rename(f"{p}.old"), lambda p: p.write_bytes(b""))):
        trainer, path, seen = trained(full(1.0)), tmp_path / str(number), []

        def tamper(state, path=path, seen=seen, harm=harm):
            seen.append(state.step)
            if state.step == 3:
                harm(path)

        start = trainer.init(jnp.zeros(2))
        words = refusal(trainer.fit, start, DATA, ledger=path, callbacks=[tamper], progress=False)
        assert "while it was open; restore it from a copy" in words and seen == [1, 2, 3]


def test_a_ledger_that_begins_late_notes_what_came_before_once(tmp_path):
    trainer, path = trained(full(1.0)), tmp_path / "ledger"
    half = trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[lambda s: s.step == 4], progress=False)
    for _ in range(2):
        ended = trainer.fit(half, DATA, ledger=path, progress=False)
    assert float(ended.epsilon.upper) == pytest.approx(gaussian_epsilon(mu((1.0, 8))), rel=1e-6)
    entry = Ledger.read(path).runs[Ledger.read(path).run].noted
    assert len(entry) == 1 and entry[0].note.startswith("before this ledger began")


def test_a_refused_fit_leaves_no_ledger_behind(tmp_path):
    """A ledger that does not hold what the run has spent would claim an epsilon of 0."""
    cyclic = {"sampling": "cyclic_poisson", "groups": 2, "noise": Banded(2), "sampling_probability": 0.5, "steps": 8}
    shared = Plan(target_delta=1e-5, dataset_size=10, noise_multiplier=1.0, **cyclic)
    other = full(1.0, 10, sampling="without_replacement", relation="replace_one")
    for first, second, words in ((shared, shared, "ledger must be the same"), (full(1.0), other, "use one relation")):
        state = trained(first).fit(trained(first).init(jnp.zeros(2)), DATA, progress=False)
        assert words in refusal(trained(second).fit, state, DATA, ledger=tmp_path / "ledger", progress=False)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("among_others", [False, True])
@pytest.mark.parametrize("fails_at", range(1, 5))
def test_a_ledger_that_begins_late_has_what_came_before_from_its_first_line_on(
    tmp_path, monkeypatch, fails_at, among_others
):
    """Whichever write fails while a run joins a ledger: the ledger does not know the run, or claims what it spent."""
    first, then, path = full(1.0), full(2.0, 12), tmp_path / "ledger"
    half = trained(first).fit(
        trained(first).init(jnp.zeros(2)), DATA, callbacks=[lambda s: s.step == 4], progress=False
    )
    if among_others:
        Ledger.create(path, then, "other").close()
    append, count = LedgerFile.append, itertools.count(1)

    def fails(self, content):
        if next(count) == fails_at:
            raise InputError("the disk is full")
        append(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(LedgerFile, "append", fails)
        assert "the disk is full" in refusal(trained(then).fit, half, DATA, ledger=path, progress=False)
    ledger = Ledger.read(path) if path.exists() else None
    for run in [] if ledger is None else set(ledger.runs) - {"other"}:
        assert float(ledger.epsilon(1e-5, run=run).lower) >= gaussian_epsilon(mu((1.0, 4))) * (1 - 1e-6)
    ended = trained(then).fit(half, DATA, ledger=path, progress=False)
    assert float(ended.epsilon.upper) == pytest.approx(gaussian_epsilon(mu((1.0, 4), (2.0, 8))), rel=1e-6)
