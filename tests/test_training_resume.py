"""Whatever a run is resumed from, it is refused or claims at least what was spent; and what is refused, in one line."""

import itertools
import math
import shutil
from contextlib import suppress

import jax
import jax.numpy as jnp
import optax
import pytest
from training_cases import gaussian_epsilon
from training_runs import linear, plan_of

from jaxacct.training import Plan, Trainer
from jaxacct.training.ledger import Ledger
from jaxacct.validation import InputError

STEPS, CRASH = 8, 7
STATES = {"fresh": 0, "older": 3, "same": 6, "newer": 7}
FOLDERS = {"none": 0, "older": 2, "same": 6, "newer": 8}
LEDGERS = {"not given": None, "missing": 0, "older": 3, "same": 7, "newer": 8}
OTHERS = ("same", "other plan", "other program")
DATA = jnp.linspace(0.0, 1.0, 20).reshape(10, 2)


class Crash(Exception):
    pass


def trainer_of(which):
    noise, steps = (5.0, 10) if which == "other plan" else (1.0, STEPS)
    plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=noise, steps=steps)
    return Trainer(linear, optax.sgd(0.2 if which == "other program" else 0.1), plan, 1.0)


@pytest.fixture
def noise_drawn(monkeypatch):
    """{key words: noise multiplier} of every step that ran: equal words are equal noise, which counts once."""
    drawn, compiled = {}, {}
    real_call, real_compile = jax.stages.Compiled.__call__, jax.stages.Lowered.compile

    def call(self, *args):
        if len(args) == 5 and hasattr(args[4], "gradient_noise"):
            drawn[args[1].tobytes()] = float(args[4].gradient_noise)
        return real_call(self, *args)

    def compile_once(self, *args, **kwargs):
        text = self.as_text()
        if text not in compiled:
            compiled[text] = real_compile(self, *args, **kwargs)
        return compiled[text]

    monkeypatch.setattr(jax.stages.Compiled, "__call__", call)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_once)
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
        if state.step == 3:
            shutil.copytree(folder / "run", folder / "run at 2")
        if with_ledger and state.step == 3:
            shutil.copy(folder / "ledger", folder / "ledger at 3")
        if state.step == CRASH:
            raise Crash

    more = {"checkpoints": folder / "run", "checkpoint_every": 2, "progress": False}
    more["ledger"] = folder / "ledger" if with_ledger else None
    with suppress(Crash):
        trainer.fit(first, DATA, callbacks=[keep], **more)
    shutil.copytree(folder / "run", folder / "run at 6")
    if with_ledger:
        shutil.copy(folder / "ledger", folder / "ledger at 7")
    keys = list(drawn)
    trainer.fit(trainer.init(jnp.zeros(2)), DATA, **more)
    shutil.copytree(folder / "run", folder / "run at 8")
    if with_ledger:
        shutil.copy(folder / "ledger", folder / "ledger at 8")
    assert list(drawn)[:CRASH] == keys and len(drawn) == STEPS
    return copies | states, list(drawn)


def cells(with_ledger):
    ledgers = LEDGERS if with_ledger else {"not given": None, "missing": 0}
    return list(itertools.product(STATES, FOLDERS, ledgers, OTHERS))


def went_on(folder, states, cell, drawn):
    """The state that a cell ends with, or the refusal."""
    state, copy, ledger, other = cell
    here = folder / "here"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    more = {}
    if FOLDERS[copy]:
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
    """The keys that must have been used by what a cell starts from.

    A state answers for the steps that led to it.  A folder without a ledger also answers for those after its last
    checkpoint, and a ledger for what is in it.
    """
    state, copy, ledger, _ = cell
    known = max(STATES[state], FOLDERS[copy], LEDGERS[ledger] or 0)
    if not with_ledger and FOLDERS[copy] in (2, 6):
        known = max(known, CRASH)
    return keys[:known]


GOES_ON = {  # (state, folder, ledger): with the same plan and program, nothing may be refused and nothing counted twice
    True: [("fresh", "same", "same"), ("same", "same", "same"), ("fresh", "older", "same"), ("fresh", "newer", "newer")]
    + [("older", "none", "same"), ("newer", "none", "same"), ("same", "none", "newer"), ("fresh", "older", "older")],
    False: [("fresh", "same", "not given"), ("same", "same", "not given"), ("fresh", "older", "not given")]
    + [("older", "none", "not given"), ("newer", "none", "missing"), ("fresh", "newer", "missing")],
}


def failures(tmp_path, with_ledger, drawn, chosen):
    """The cells whose claim is below what was spent, with claim and truth; and how many went on."""
    states, keys = begun(tmp_path, with_ledger, drawn)
    wrong, on = [], {}
    for cell in chosen:
        ended, claimed, used = went_on(tmp_path, states, cell, drawn)
        if ended is None:
            continue
        noises = {key: 1.0 for key in spent_at_least(cell, keys, with_ledger)} | used
        truth = gaussian_epsilon(math.sqrt(sum(z**-2.0 for z in noises.values())))
        on[cell] = claimed / truth
        if not claimed >= truth * (1 - 1e-6):
            wrong.append((*cell, round(claimed, 3), round(truth, 3)))
    return wrong, on


def chosen_cells(with_ledger):
    """One in seven of all cells, and those that must go on."""
    every = cells(with_ledger)[:: 7]
    return [*every, *[(*cell, "same") for cell in GOES_ON[with_ledger]]]


@pytest.mark.parametrize("with_ledger", [True, False])
def test_every_seventh_cell_of_the_matrix(tmp_path, noise_drawn, with_ledger):
    wrong, on = failures(tmp_path, with_ledger, noise_drawn, chosen_cells(with_ledger))
    assert wrong == []
    exact = {cell: on.get((*cell, "same")) for cell in GOES_ON[with_ledger]}
    assert exact == dict.fromkeys(GOES_ON[with_ledger], pytest.approx(1.0, rel=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("with_ledger", [True, False])
def test_the_whole_matrix(tmp_path, noise_drawn, with_ledger):
    wrong, on = failures(tmp_path, with_ledger, noise_drawn, cells(with_ledger))
    assert wrong == [] and len(on) > 20
