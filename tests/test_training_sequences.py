"""Two to four fits on one folder: whatever ends each of them, the last claims what all have released, or is refused."""

import math
import shutil
from contextlib import suppress
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_cases import gaussian_epsilon
from training_runs import squares, still_trainer

from jaxacct import strategies
from jaxacct.core.validation import InputError
from jaxacct.training import Ledger, Plan, Source, Trainer, params_of
from jaxacct.training.run.checkpoints import Store

STEPS = 10
DATA = np.linspace(0.0, 1.0, 40, dtype=np.float32).reshape(20, 2)
PLANS = {
    "noise": {"noise_multiplier": 2.0},
    "target": {"target_epsilon": 3.0},
    "other": {"noise_multiplier": 3.0},
}


class Mistake(Exception):
    pass


def trainer_of(rate=0.1, plan="noise"):
    given = {"target_delta": 1e-5, "dataset_size": 20, "sampling_probability": 1.0, "steps": STEPS}
    return still_trainer(Plan(**given, **PLANS[plan]), rate)


@pytest.fixture
def drawn(monkeypatch):
    """{key words: noise multiplier} of every step that ran."""
    found, real_call = {}, jax.stages.Compiled.__call__

    def call(self, *args):
        if len(args) == 6 and hasattr(args[4], "gradient_noise"):
            found[args[1].tobytes()] = float(args[4].gradient_noise)
        return real_call(self, *args)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", call)
    return found


def fitted(here, state, end=None, rate=0.1, plan="noise", ledger=False, alone=False):
    """One fit, ended by ("stop" | "raise" | "kill", step) or None: the state, or None if there is none."""
    trainer, copy = trainer_of(rate, plan), here.with_name(f"{here.name} copy")

    def callback(now):
        if end is None or now.step != end[1]:
            return False
        if end[0] == "kill":  # what is on the disk at this moment is all that stays
            shutil.copytree(here, copy)
        if end[0] != "stop":
            raise Mistake
        return True

    start = state if alone else trainer.init(jnp.zeros(2))
    more = {} if alone else {"checkpoints": here / "run", "checkpoint_every": 5}
    if ledger:
        more["ledger"] = here / "ledger"
    here.mkdir(exist_ok=True)
    state = None
    with suppress(Mistake):
        state = trainer.fit(start, DATA, callbacks=[callback], progress=False, **more)
    if copy.exists():
        shutil.rmtree(here)
        copy.rename(here)
    return state


def fit(end=None, **more):
    return {"end": end} | more


def raised(step, **more):
    return fit(("raise", step), **more)


def stopped(step, **more):
    return fit(("stop", step), **more)


def killed(step, **more):
    return fit(("kill", step), **more)


OTHER = {"rate": 0.2}
SEQUENCES = {
    "stop before the steps of a fit that died": [killed(9), stopped(6), fit(**OTHER)],
    "raised in place of killed": [raised(7), killed(9), stopped(8), fit(**OTHER)],
    "raised, and another program": [raised(7), fit(**OTHER)],
    "a ledger that joins": [killed(9), killed(6, ledger=True), fit(ledger=True, **OTHER)],
    "a ledger that joins and is left": [killed(9), raised(6, ledger=True), fit(ledger=True, **OTHER)],
    "a ledger that joins before the first checkpoint": [killed(3), killed(1, ledger=True), fit(ledger=True, **OTHER)],
    "a ledger that joins after the stop": [killed(9), stopped(6), fit(ledger=True, **OTHER)],
    "a ledger that joins and stops": [killed(9), stopped(6, ledger=True), fit(ledger=True, **OTHER)],
    "from memory, without the folder": [killed(9), stopped(6), fit(alone=True, **OTHER)],
    "from memory into a ledger": [killed(9), stopped(6), fit(alone=True, ledger=True, **OTHER)],
    "stopped twice": [killed(9), stopped(6), stopped(7), fit(**OTHER)],
    "stopped and killed": [killed(9), stopped(6), killed(7), fit(**OTHER)],
    "killed and stopped": [killed(9), killed(8), stopped(6), fit(**OTHER)],
    "another plan": [killed(9), stopped(6), fit(plan="other")],
    "another plan and back": [killed(9), stopped(7, plan="other"), fit()],
    "another plan that died": [killed(9), killed(8, plan="other"), stopped(6, plan="other"), fit(**OTHER)],
    "another program that died": [killed(9), killed(8, **OTHER), stopped(6, **OTHER), fit()],
    "with a ledger throughout": [killed(9, ledger=True), stopped(6, ledger=True), fit(ledger=True, **OTHER)],
    "a finished run goes on": [killed(9), fit(), fit(plan="other")],
}


def at_least(state, drawn):
    truth = gaussian_epsilon(math.sqrt(sum(noise**-2.0 for noise in drawn.values())))
    return float(state.epsilon.upper) >= truth * (1 - 1e-6)


@pytest.mark.parametrize("plan", ["noise", "target"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_no_step_is_forgotten(tmp_path, drawn, name, plan):
    """Whatever fit a state is of, it claims all that was released until then."""
    state, number = None, 0
    for number, given in enumerate(SEQUENCES[name], 1):
        try:
            state = fitted(tmp_path / "here", state, **{"plan": plan} | given)
        except InputError as error:
            assert number > 1 and "\n" not in str(error)
            return
        if state is not None:
            assert at_least(state, drawn), (number, state, len(drawn))
    assert state is not None and number == len(SEQUENCES[name])


REPEATED = {
    "raised": [raised(9), fit()],
    "killed twice": [killed(9), killed(7), fit()],
    "killed, stopped": [killed(9), stopped(6), fit()],
    "killed, stopped twice": [killed(9), stopped(6), stopped(8), fit()],
    "killed, raised, stopped": [killed(9), raised(6), stopped(8), fit()],
    "killed, stopped, killed": [killed(9), stopped(6), killed(8), fit()],
    "stopped": [stopped(6), killed(9), stopped(7), fit()],
}


@pytest.mark.parametrize("plan", ["noise", "target"])
@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_a_run_that_repeats_itself_to_its_end_claims_its_plan_alone(tmp_path, drawn, name, ledger, plan):
    state = None
    for given in REPEATED[name]:
        state = fitted(tmp_path / "here", state, ledger=ledger, plan=plan, **given)
        if state is not None and not ledger:  # stopped or finished: the whole plan, neither more nor less
            assert float(state.epsilon.upper) == float(state.plan.epsilon.upper)
    assert (state.step, state.stopped, len(drawn)) == (STEPS, "finished", STEPS)
    assert float(state.epsilon.upper) == pytest.approx(float(state.plan.epsilon.upper), rel=1e-9)


def test_a_ledger_that_joins_without_room_is_refused_before_it_is_made(tmp_path, drawn):
    """Where the steps that may have followed leave no room, the run can still go on without the ledger."""
    here = tmp_path / "here"
    fitted(here, None, plan="target", **killed(9))
    with pytest.raises(InputError, match="steps after it may have been released that no ledger holds"):
        fitted(here, None, plan="target", ledger=True, **fit())
    assert not (here / "ledger").exists()
    state = fitted(here, None, plan="target", **fit())
    assert (state.stopped, len(drawn)) == ("finished", STEPS)


@pytest.mark.parametrize("data", ["source", "correlated"])
def test_sources_and_shared_noise_forget_no_step(tmp_path, data):
    """Real steps: the claim is at least that of as many plans as there are different parameters of a step."""
    given = {"target_delta": 1e-5, "dataset_size": 20, "steps": STEPS, "noise_multiplier": 2.0}
    shared = {"sampling": "cyclic_poisson", "expected_batch_size": 4, "groups": 4, "noise": strategies.Banded(3)}
    plan = Plan(**given, **(shared if data == "correlated" else {"sampling_probability": 1.0}))
    rows = Source(DATA) if data == "source" else DATA
    seen, here, copy = set(), tmp_path / "run", tmp_path / "copy"

    def run(rate, end, kill=False):
        def callback(state):
            seen.add((state.step, np.asarray(state.params).tobytes()))
            if state.step == end and kill:
                shutil.copytree(here, copy)
                raise Mistake
            return state.step == end

        trainer = Trainer(squares, optax.sgd(rate), plan, 1.0)
        start, more = trainer.init(jnp.zeros(2)), {"checkpoints": here, "checkpoint_every": 5}
        with suppress(Mistake):
            return trainer.fit(start, rows, callbacks=[callback], progress=False, **more)
        shutil.rmtree(here)
        copy.rename(here)

    run(0.1, 9, kill=True)
    stopped = run(0.1, 6)
    assert stopped.step == 6 and float(stopped.epsilon.upper) >= float(plan.epsilon.upper)
    state = run(0.05, None)
    assert len(seen) > STEPS
    if data == "source":
        assert at_least(state, dict.fromkeys(seen, 2.0))
    else:  # the passes of the plan, and those of the steps that are drawn anew
        assert float(state.epsilon.upper) > float(plan.epsilon.upper)


def test_params_of_leaves_the_steps_that_may_follow(tmp_path, drawn):
    here = tmp_path / "here"
    fitted(here, None, **killed(9))
    fitted(here, None, **stopped(6))
    params_of(here / "run")
    with pytest.raises(InputError, match="may not go on with another plan"):
        fitted(here, None, plan="other")
    state = fitted(here, None, **fit(**OTHER))
    assert at_least(state, drawn) and len(drawn) > STEPS


def test_a_ledger_that_joins_holds_the_whole_plan_that_may_have_been_taken(tmp_path, drawn):
    here = tmp_path / "here"
    fitted(here, None, **killed(9))
    fitted(here, None, ledger=True, **killed(6))
    with Ledger.open(here / "ledger") as ledger:
        (entry,) = ledger.runs[ledger.run].noted
    assert entry.note.startswith("before this ledger began") and f"steps={float(STEPS)}" in repr(entry.mechanism)


@pytest.mark.parametrize("ends", ["raise at the look", "raise later", "kill later", "interrupt later"])
def test_without_a_ledger_a_checkpoint_says_that_a_callback_looked(tmp_path, ends, drawn):
    """Another plan may not follow what a look may have ended; the same run goes on, and claims its plan alone."""
    here, trainer, copy = tmp_path / "here", trainer_of(), tmp_path / "copy"

    def callback(state):
        if state.step == 7:
            assert np.isfinite(state.params).all()
            if ends == "raise at the look":
                raise Mistake
        if state.step == 8:
            if ends == "kill later":
                shutil.copytree(here, copy)
            raise KeyboardInterrupt if ends == "interrupt later" else Mistake

    with suppress(Mistake, KeyboardInterrupt):
        more = {"checkpoints": here / "run", "checkpoint_every": 5, "progress": False}
        trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[callback], **more)
    if copy.exists():
        shutil.rmtree(here)
        copy.rename(here)
    with pytest.raises(InputError, match="after callbacks had looked at its outputs"):
        fitted(here, None, plan="other")
    state = fitted(here, None)
    assert (state.stopped, len(drawn)) == ("finished", STEPS)
    assert float(state.epsilon.upper) == float(state.plan.epsilon.upper)


def test_a_look_writes_one_checkpoint_more(tmp_path, drawn, monkeypatch):
    saved, save = [], Store.save
    monkeypatch.setattr(Store, "save", lambda self, found: (saved.append((found.step, found.seen)), save(self, found)))
    trainer, more = trainer_of(), {"checkpoint_every": 5, "progress": False}
    trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[lambda s: None], checkpoints=tmp_path / "one", **more)
    assert saved == [(0, False), (5, False), (10, False)]
    saved.clear()
    look = lambda state: state.params is None
    trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[look], checkpoints=tmp_path / "two", **more)
    assert saved == [(0, False), (1, True), (5, True), (10, True)]
    saved.clear()
    more["ledger"] = tmp_path / "ledger"
    trainer.fit(trainer.init(jnp.zeros(2)), DATA, callbacks=[look], checkpoints=tmp_path / "three", **more)
    assert saved == [(0, False), (5, True), (10, True)]


def test_a_state_with_steps_and_no_history_is_refused(tmp_path):
    """Steps of a state put together by hand were forgotten: epsilon 3.71, and 0 for the last step, for 5.54."""
    plan = Plan(noise_multiplier=2.0, sampling_probability=1.0, target_delta=1e-5, dataset_size=10, steps=6)
    trainer, data = still_trainer(plan), np.zeros((10, 2), np.float32)
    begun = trainer.init(np.zeros(2, np.float32))
    for step in (3, 6):
        for ledger in (None, tmp_path / "run.jsonl"):
            given = {"ledger": ledger, "progress": False}
            assert "its history has no step" in refusal(trainer.fit, replace(begun, step=step), data, **given)
    assert not list(tmp_path.iterdir())
