"""The log of a run: what it says, and that following a run changes nothing of it."""

import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from training_cases import gaussian_epsilon
from training_runs import KEY, keyed, linear, plan_of, still_trainer

from jaxacct.core.validation import InputError
from jaxacct.training import Ledger, Plan, Trainer
from jaxacct.training.run import log as run_log
from jaxacct.training.run.log import ProgressLine
from jaxacct.training.step.counts_and_losses import PrivateLoss


def start():
    """(trainer, first state, data) of a small run with a target; a step moves the parameters by its key."""
    plan = Plan(target_epsilon=4.0, target_delta=1e-5, dataset_size=30, sampling_probability=1.0, steps=40)
    trainer = still_trainer(plan, step=keyed)
    return trainer, trainer.init(np.zeros(3, np.float32), KEY), np.zeros((30, 3), np.float32)


def run(log=None, **more):
    """The last state of the small run with a target."""
    trainer, state, data = start()
    return trainer.fit(state, data, log=log, progress=False, **more)


def lines(path):
    """The records of a file, each of which is JSON in the strict sense."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(records):
    return [record["step"] for record in records if record["event"] == "step"]


# What a record says


def test_what_is_seen_of_a_batch():
    """A record's numbers agree with sums over the data, also if one gradient is not finite and some are clipped."""
    data = np.array([[0.5, 0.0], [3.0, 4.0], [0.0, -2.0], [np.nan, 1.0]], np.float32)
    kept, norms, records, before = data[:3], [0.5, 5.0, 2.0], [], []
    trainer = Trainer(
        lambda p, x: (linear(p, x), {"norm": jnp.linalg.norm(x), "pair": x}),
        optax.sgd(0.1),
        plan_of(4, noise=0.5, steps=3),
        1.5,
        has_aux=True,
        private_loss=PrivateLoss(bound=2.0, noise=50.0),
    )
    state = trainer.init(np.ones(2, np.float32), KEY)
    before.append(np.asarray(state.params))
    keep = lambda state: before.append(np.asarray(state.params))
    ended = trainer.fit(state, data, log=records.append, progress=False, callbacks=[keep])
    assert steps(records) == [1, 2, 3] and int(ended.not_finite) == 3 and np.isfinite(ended.params).all()
    for record, params in zip(records, before, strict=False):
        seen = record["not_private"]
        assert seen["loss"] == pytest.approx(float(np.mean(kept @ params)), rel=1e-5)
        assert (seen["members"], seen["not_finite"], seen["clipped_share"]) == (4, 1, 2 / 3)
        assert seen["aux"]["norm"] == pytest.approx(np.mean(norms), rel=1e-6)
        assert seen["aux"]["pair"] == pytest.approx(kept.mean(axis=0), rel=1e-6)
        assert 0.0 <= record["private"]["loss"] <= 2.0
        assert list(record) == ["event", "run", "step", "not_private", "private", "epsilon"]
    times = [record["not_private"]["seconds"] for record in records]
    assert times == sorted(times) and times[0] >= 0.0
    assert records[0]["not_private"]["steps_per_second"] is None and records[2]["not_private"]["steps_per_second"] > 0.0


def test_a_batch_of_nobody_has_no_mean():
    nobody = run_log.Observed(*(np.float32(0), (), np.int32(0), np.int32(0), np.int32(0), None))
    assert run_log.numbers_of(nobody) == {"loss": None, "clipped_share": None, "not_finite": 0, "members": 0}


def test_epsilon_is_that_of_the_state():
    """The log's epsilon is a bound on the state's, at most 2 % above it, and agrees with the closed form."""
    records, claims = [], {}
    claim = lambda state: claims.update({state.step: float(state.epsilon.upper)}) if state.step % 8 in (0, 1) else None
    state = run(records.append, callbacks=[claim])
    plan = state.plan
    assert steps(records) == [*range(1, plan.steps + 1)] and len(claims) == 10
    for step, claimed in claims.items():
        told = records[step - 1]["epsilon"]
        assert claimed <= told["upper"] * (1 + 1e-9) and told["upper"] <= 1.02 * claimed
        exact = gaussian_epsilon(math.sqrt(step) / plan.noise_multiplier)
        assert told["upper"] == pytest.approx(exact, rel=0.02)
        assert told == {"upper": told["upper"], "delta": plan.target_delta, "kind": "bound", "covers": "this run"}


# A file


def test_a_file_of_json_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    state = run(path, ledger=tmp_path / "run.jsonl", log_every=15)
    first, *told, last = lines(path)
    assert (first["event"], first["step"], first["steps"], first["log_every"]) == ("begin", 0, 40, 15)
    assert not first["resumed"] and "again_until" not in first
    assert steps(told) == [15, 30, 40] and {r["epsilon"]["covers"] for r in told} == {"all runs of the ledger"}
    assert (last["event"], last["ended"], last["step"]) == ("end", "finished", 40)
    assert last["epsilon"]["upper"] == float(state.epsilon.upper) and last["epsilon"]["kind"] == "certified"
    assert {record["run"] for record in lines(path)} == {state.history.ledger.run}
    assert path.stat().st_mode & 0o077 == 0  # for its owner alone


def test_a_run_that_is_interrupted_and_resumed(tmp_path, monkeypatch):
    """A run is interrupted at step 10, its log's last line is cut off, and it resumes from the checkpoint of step 7."""
    path, place = tmp_path / "log.jsonl", tmp_path / "checkpoints"

    def interrupt(self, step, *_):
        if step == 10:
            raise KeyboardInterrupt

    kept = {"checkpoints": place, "checkpoint_every": 7}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ProgressLine, "update", interrupt)
        run(path, **kept)
    before = lines(path)
    assert steps(before) == [*range(1, 11)] and before[-1]["ended"] == "KeyboardInterrupt" and "step" not in before[-1]
    with path.open("a") as file:
        file.write('{"event": "step", "run": "0')
    state = run(path, **kept)
    after = lines(path)
    assert after[: len(before)] == before  # nothing is overwritten
    resumed, *more, end = after[len(before) :]
    assert resumed["event"] == "begin" and resumed["resumed"] and (resumed["step"], resumed["again_until"]) == (7, 10)
    assert steps(more) == [*range(8, 41)] and [r["step"] for r in more if "again" in r] == [8, 9, 10]
    assert end["ended"] == "finished" and state.step == 40
    seen = {r["step"]: r["not_private"]["loss"] for r in before if r["event"] == "step"}
    assert [r["not_private"]["loss"] for r in more[:3]] == [seen[step] for step in (8, 9, 10)]  # bit by bit


@pytest.mark.slow
def test_several_runs_in_one_file(tmp_path):
    """A run with another key repeats no step of the first run."""
    path = tmp_path / "log.jsonl"
    for key in (bytes(32), bytes([1] * 32)):
        trainer, _, data = start()
        trainer.fit(trainer.init(np.zeros(3, np.float32), key), data, log=path, log_every=20, progress=False)
    found = lines(path)
    assert [record["event"] for record in found] == ["begin", "step", "step", "end"] * 2
    assert len({record["run"] for record in found}) == 2 and not any("again" in record for record in found)


@pytest.mark.slow
def test_what_json_has_no_number_for(tmp_path):
    """An infinite loss whose gradient is finite."""
    path = tmp_path / "log.jsonl"
    trainer = Trainer(lambda p, x: linear(p, x) + jnp.inf, optax.sgd(0.1), plan_of(4, steps=1), 1.0)
    trainer.fit(trainer.init(np.ones(2, np.float32)), np.ones((4, 2), np.float32), log=path, progress=False)
    assert lines(path)[1]["not_private"]["loss"] is None


def test_another_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    for content in ("epsilon,delta\n", '{"event": "run"}\n', '{"format": 1}'):
        path.write_text(content)
        with pytest.raises(InputError, match="is no log of a training") as caught:
            run_log.LogFile(path, "run")
        assert path.read_text() == content and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="is no log of a training"):
        run(path, ledger=tmp_path / "run.jsonl")
    assert not (tmp_path / "run.jsonl").exists()  # nothing was begun


def test_a_file_that_others_could_read_becomes_its_owners_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "begin"}\n')  # as a copy that was restored
    path.chmod(0o644)
    run_log.LogFile(path, "run").close()
    assert path.stat().st_mode & 0o777 == 0o600
    run_log.LogFile("/dev/null", "run").close()


def test_a_pipe_is_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: cannot be written: Illegal seek" in refusal(run_log.LogFile, tmp_path / "pipe", "run")


@pytest.mark.parametrize(("log", "words"), [(3, "a function of one record"), ("/nowhere/log.jsonl", "be written")])
def test_what_is_no_log_is_refused(log, words):
    with pytest.raises(InputError, match=words), run_log.run_log(run_log.checked_log(log), 1, start()[1]):
        pass


def test_a_run_of_a_process_by_itself_has_its_log_whatever_the_processes_number(monkeypatch):
    """Any process may train by itself, on its own devices alone; it has a ledger of its own, too."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    records = []
    with run_log.run_log(records.append, 1, start()[1]) as told:
        told.tell({"event": "step"})
    assert records == [{"event": "step"}]


@pytest.mark.parametrize("given", ["text", "another way", "open"])
def test_the_path_of_the_ledger_is_refused(tmp_path, given):
    path = tmp_path / "run.jsonl"
    trainer, state, data = start()
    ledger = Ledger.create(path, trainer.plan) if given == "open" else str(path)
    log = tmp_path / "." / ".." / tmp_path.name / "run.jsonl" if given == "another way" else path
    told = refusal(trainer.fit, state, data, log=log, ledger=ledger)
    assert "log and ledger are both" in told and "a file of its own" in told
    assert path.exists() == (given == "open")


# The log changes nothing of its run


def test_what_the_function_does_changes_nothing(capsys):
    """If the function returns something true, empties its record or raises, all steps are taken as without a log."""
    calls = []

    def spoil(record):
        record.clear()
        return True

    def fail(record):
        calls.append(record)
        raise RuntimeError(f"step {record['step']}\nand more")

    wanted = run()
    assert capsys.readouterr().err == ""
    for log in (spoil, fail):
        state = run(log)
        assert (state.step, state.stopped, state.seen) == (40, "finished", False)
        assert np.array_equal(state.params, wanted.params) and state.epsilon.upper == wanted.epsilon.upper
    assert len(calls) == 1
    told = "jaxacct: log raised RuntimeError: step 1 and more; training goes on without it\n"
    said = capsys.readouterr().err.replace("\r", "")  # "\r" comes first if the line replaces an open bar
    assert " ".join(said.split()) == told.strip()


def test_a_full_disk_ends_the_log_alone(tmp_path, monkeypatch, capsys):
    real = run_log.LogFile.write

    def full(self, record):
        if record["event"] == "step" and record["step"] == 3:
            raise OSError(28, "No space left on device")
        real(self, record)

    monkeypatch.setattr(run_log.LogFile, "write", full)
    assert run(tmp_path / "log.jsonl").step == 40
    assert steps(lines(tmp_path / "log.jsonl")) == [1, 2] and "No space left" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["look", "number", "line"])
@pytest.mark.parametrize("at", [2, 9])
def test_an_interrupt_within_the_log_loses_no_line(tmp_path, monkeypatch, place, at):
    """Wherever the interrupt comes, each step that was taken is in the file, and is there only once."""
    where = {
        "look": (run_log.RunLog, "_tell"),
        "number": (run_log, "numbers_of"),
        "line": (run_log.LogFile, "write"),
    }
    monkeypatch.setattr(run_log, "PAUSE_SECONDS", 0.0)
    owner, name = where[place]
    real, calls = getattr(owner, name), []

    def interrupted(*arguments, **more):
        calls.append(None)
        if len(calls) != at:
            return real(*arguments, **more)
        if place == "line":
            real(*arguments)  # and the log does not know it
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    taken = []
    path = tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, callbacks=[lambda state: taken.append(state.step)])
    monkeypatch.undo()
    records = lines(path)
    assert steps(records) == [*range(1, len(taken) + 2)] and len(taken) < 39
    assert records[0]["event"] == "begin" and records[-1]["event"] == "end"
    assert records[-1]["ended"] == "KeyboardInterrupt" and len(records) == len(steps(records)) + 2
