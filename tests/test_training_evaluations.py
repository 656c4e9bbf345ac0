"""Evaluations on public data change nothing of a run, cost nothing at its end, and count as looks before its end."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from training_runs import KEY, keyed, still_trainer

from jaxacct.core.validation import InputError
from jaxacct.training import Ledger, Plan

DATA = np.eye(20, 2, dtype=np.float32)
PUBLIC = np.ones((4, 2), np.float32)
PLAN = {"target_epsilon": 2.0, "target_delta": 1e-5, "dataset_size": 20, "sampling_probability": 1.0, "steps": 12}


def score(params, data):
    return {"mean": jnp.mean(data @ params), "first": params[0]}


def fit(path=None, state=None, rate=0.1, **more):
    trainer = still_trainer(Plan(**PLAN), rate, step=keyed)
    state = trainer.init(np.zeros(2, np.float32), KEY) if state is None else state
    return trainer.fit(state, DATA, ledger=path, progress=False, **more)


def upper(path, **more):
    return float(Ledger.read(path).epsilon(1e-5, **more).upper)


def test_values_are_those_of_the_parameters_and_nothing_else_changes(tmp_path):
    plain, kept, log = fit(tmp_path / "a.jsonl"), {}, tmp_path / "log.jsonl"
    keep = lambda state: kept.update({state.step: (np.asarray(state.params), state.evaluations)})
    given = {"evaluate": score, "public_data": PUBLIC, "eval_every": 5}
    state = fit(tmp_path / "b.jsonl", log=log, callbacks=[keep], **given)
    assert np.array_equal(state.params, plain.params) and float(state.epsilon.upper) == float(plain.epsilon.upper)
    assert upper(tmp_path / "b.jsonl") == upper(tmp_path / "a.jsonl") and state.stopped == "finished"
    assert [step for step, _ in state.evaluations] == [5, 10, 12] and plain.evaluations == ()
    for step, value in state.evaluations:
        params = kept[step][0]
        assert value == {"mean": pytest.approx(params.sum(), rel=1e-5), "first": float(params[0])}
        assert kept[step][1][-1] == (step, value)  # a callback of the same step gets this value
    records = [json.loads(line) for line in log.read_text().splitlines()]
    found = [(record["step"], record["value"]) for record in records if record["event"] == "evaluation"]
    assert found == [tuple(each) for each in state.evaluations]
    order = [record["step"] for record in records if record["event"] in ("step", "evaluation")]
    assert order == sorted(order) and len(order) == 15


def test_the_look_is_noted_before_the_function_gets_the_parameters(tmp_path):
    """Whoever kills the process from here on leaves a ledger that claims the whole plan."""
    path, found = tmp_path / "run.jsonl", []

    def watch(params, data):
        ledger = Ledger.read(path)
        found.append((ledger.runs[ledger.run].looks.step, float(ledger.epsilon(1e-5).upper)))
        return 0.0

    state = fit(path, evaluate=watch, public_data=(), eval_every=4)
    whole = float(state.epsilon.upper)
    assert found == [(4, pytest.approx(whole))] * 3


@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_stop_because_of_a_value_claims_the_whole_plan(tmp_path, with_ledger):
    """The callback reads no output itself: it knows what `evaluate` has left in a variable."""
    path, told = (tmp_path / "run.jsonl") if with_ledger else None, []
    stop = lambda state: bool(told)
    evaluate = lambda params, data: told.append(params) or 1.0
    state = fit(path, evaluate=evaluate, public_data=PUBLIC, eval_every=3, callbacks=[stop])
    whole = float(Plan(**PLAN).epsilon.upper)
    assert (state.step, state.stopped, state.seen) == (3, "callback", True)
    assert float(state.epsilon.upper) == pytest.approx(whole, rel=1e-6)
    np.asarray(told[0])  # the next step has not overwritten what the function kept
    other = still_trainer(Plan(**PLAN | {"steps": 20}), step=keyed)
    with pytest.raises(InputError, match="looked at its outputs"):
        other.fit(state, DATA, ledger=path, progress=False)
    if with_ledger:
        assert upper(path) == float(state.epsilon.upper)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_in_the_function_ends_the_run_and_counts(tmp_path, error):
    path = tmp_path / "run.jsonl"

    def fails(params, data):
        raise error

    with pytest.raises(error):
        fit(path, evaluate=fails, public_data=PUBLIC, eval_every=2)
    ledger = Ledger.read(path)
    assert ledger.runs[ledger.run].looks.looked and ledger.runs[ledger.run].looks.step == 2
    assert upper(path) == pytest.approx(float(Plan(**PLAN).epsilon.upper), rel=1e-6)


def test_what_is_refused():
    assert "public_data is missing" in refusal(lambda: fit(evaluate=score))
    assert "without evaluate" in refusal(lambda: fit(public_data=PUBLIC))
    for private in (DATA, DATA[3:9], [PUBLIC, DATA[::2]]):
        assert "training data" in refusal(lambda private=private: fit(evaluate=score, public_data=private))
    assert "must be a function" in refusal(lambda: fit(evaluate=3, public_data=PUBLIC))
    assert "must give a number" in refusal(lambda: fit(evaluate=lambda p, d: p, public_data=PUBLIC))
    assert "eval_every" in refusal(lambda: fit(evaluate=score, public_data=PUBLIC, eval_every=0))
    halves = np.concatenate([DATA, PUBLIC])  # parts of one array that do not overlap
    trainer = still_trainer(Plan(**PLAN))
    more = {"evaluate": score, "public_data": halves[20:], "progress": False}
    assert trainer.fit(trainer.init(np.zeros(2, np.float32)), halves[:20], **more).evaluations[-1].step == 12
