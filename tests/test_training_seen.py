"""The ledger knows that outputs were seen: however early a run ends, its reader claims no less than the state."""

import copy
import functools
import json
import math
import os
import pickle
import shutil
import zlib
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pytest
from helpers import refusal
from training_cases import DELTA, gaussian_epsilon, note
from training_runs import KEY, still_trainer

import jaxacct as ja
from jaxacct import cli, strategies
from jaxacct.core.text import outward
from jaxacct.training import AdaptiveClip, Ledger, Plan
from jaxacct.training.run.run_ledger import RunLedger
from jaxacct.training.sharding.placement import Processes

DATA = np.eye(20, 2, dtype=np.float32)
RULES = {
    "everyone": {"sampling_probability": 1.0, "steps": 12},  # accounted for in closed form
    "poisson": {"sampling_probability": 0.3, "steps": 12},
    "random_allocation": {"sampling": "random_allocation", "slots": 4, "steps": 12},
    "truncated": {
        "sampling": "truncated_poisson", "sampling_probability": 0.2, "cap": 12, "steps": 12,
        "target_epsilon": None, "noise_multiplier": 2.0,
    },
    "fixed": {"sampling": "fixed_batches", "expected_batch_size": 5, "steps": 12, "relation": "zero_out"},
    "groups": {
        "sampling": "cyclic_poisson", "sampling_probability": 0.6, "steps": 12,
        "noise": strategies.Toeplitz((1.0, 0.5)), "groups": 4, "target_epsilon": None, "noise_multiplier": 2.0,
    },
    "without replacement": {
        "sampling": "without_replacement", "sampling_probability": 0.25, "steps": 12, "relation": "replace_one",
        "target_epsilon": None, "noise_multiplier": 3.0,
    },
    "user": {"sampling_probability": 1.0, "steps": 12, "unit": "user"},
    "repetitions": {
        "sampling_probability": 0.3, "steps": 12, "target_epsilon": None, "noise_multiplier": 2.0,
        "repetitions": ja.selection.PointMass(2),
    },
    "adaptive clip": {"sampling_probability": 1.0, "steps": 12},
}  # fmt: skip


@functools.cache
def trainer_of(rule="everyone", rate=0.1, **more):
    given = {"target_epsilon": 2.0, "target_delta": DELTA, "dataset_size": 20} | RULES[rule] | more
    clip = AdaptiveClip(initial=1.0, count_noise=5.0) if rule == "adaptive clip" else 1.0
    users = {"examples_per_user": 1} if given.get("unit") == "user" else {}
    return still_trainer(Plan(**given), rate, clip, **users)


def fit(trainer, path, state=None, **more):
    state = trainer.init(np.zeros(2, np.float32), KEY) if state is None else state
    users = {"users": np.arange(20)} if trainer.plan.unit == "user" else {}
    return trainer.fit(state, DATA, ledger=path, progress=False, **users, **more)


def look(state):
    return state.step == 5 and float(state.params[0]) < 1e9


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(capsys, *words):
    """What a command puts out."""
    assert cli.main(words) == 0
    return capsys.readouterr().out


def upper(path, **more):
    ledger = Ledger.read(path)
    return float(ledger.epsilon(ledger.plan.target_delta, **more).upper)


DEEPER = ("random_allocation", "truncated", "groups")
"""Rules whose accounting takes longest."""


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.slow if rule in DEEPER else ()) for rule in RULES if rule != "everyone"],
)
def test_a_stop_by_outputs_is_in_the_ledger(path, rule):
    """For every rule both the ledger and the state claim the whole plan, of which 5 of 12 steps were run."""
    trainer = trainer_of(rule)
    state = fit(trainer, path, callbacks=[look])
    ledger = Ledger.read(path)
    claimed = float(state.epsilon.upper)
    assert (state.step, state.stopped) == (5, "callback") and lines(path)[-1]["kind"] == "seen"
    assert upper(path, run=ledger.run) == claimed
    whole = float(trainer.plan.epsilon_after(12).upper)
    assert claimed == pytest.approx(whole, rel=1e-3)
    assert claimed <= (trainer.plan.target_epsilon or math.inf)
    assert float(ja.epsilon(ledger.spent(), DELTA, relation=trainer.plan.relation).upper) == pytest.approx(
        claimed, rel=1e-3
    )
    taken = float(ledger.epsilon_of_entries(DELTA, run=ledger.run).upper)
    assert taken < claimed * 0.95
    ended = fit(trainer, path, state)
    assert (ended.step, ended.stopped) == (12, "finished")
    assert float(ended.epsilon.upper) == upper(path) == pytest.approx(whole, rel=1e-3)


def test_the_line_is_there_before_the_first_look(path):
    found = []

    def watch(state):
        asked = state.step, state.plan, state.epsilon, state.stopped, state.seen
        before = Ledger.read(path).runs[Ledger.read(path).run].looks
        value = state.params if asked[0] == 3 else None
        after = Ledger.read(path).runs[Ledger.read(path).run].looks
        found.append((asked[0], before is None, after is None, value is None))

    fit(trainer_of(), path, callbacks=[watch])
    assert found[:3] == [(1, True, True, True), (2, True, True, True), (3, True, False, False)]
    seen = [line for line in lines(path) if line["kind"] == "seen"]
    assert [(line["step"], line["until"], line["looked"]) for line in seen] == [(3, 12, True)]  # one line suffices


WAYS = {
    "params": lambda s: s.params,
    "opt_state": lambda s: s.opt_state,
    "clip_norm": lambda s: s.clip_norm,
    "not_finite": lambda s: s.not_finite,
    "lineage": lambda s: s.lineage,  # it holds a digest of the parameters
    "vars": vars,
    "copy": copy.copy,
    "pickle": lambda s: suppressed(pickle.dumps, s),
    "an attribute that is not known": lambda s: getattr(s, "more", None),
}


def suppressed(function, *given):
    with suppress(Exception):
        return function(*given)


@pytest.mark.parametrize("way", WAYS)
def test_whatever_shows_outputs_is_a_look(path, way):
    state = fit(trainer_of(), path, callbacks=[lambda s: s.step == 2 and WAYS[way](s) is None])
    ledger = Ledger.read(path)
    assert state.seen and ledger.runs[ledger.run].looks[1:] == (2, 12, True)


class Killed(BaseException):
    pass


def test_a_refusal_before_the_first_step_leaves_the_ledger_as_it_was(path, monkeypatch):
    """Nobody has looked, and nothing was released: the run costs its steps, and no more."""
    trainer, given = trainer_of(), {"checkpoints": path.with_name("run"), "checkpoint_every": 2}

    def ends_at(step, error, patch):
        real = RunLedger.note

        def note(self, plan, number, *rest):
            if number == step:
                raise error
            return real(self, plan, number, *rest)

        patch.setattr(RunLedger, "note", note)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunLedger, "cut_off", lambda *_: None)
        ends_at(5, Killed(), patch)
        fit(trainer, path, **given)
    before, claimed = path.read_bytes(), upper(path)
    with monkeypatch.context() as patch:
        ends_at(4, ja.InputError("the source has other examples"), patch)
        refusal(fit, trainer, path, **given)
    assert path.read_bytes() == before and upper(path) == claimed
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        ends_at(4, KeyboardInterrupt(), patch)
        fit(trainer, path, **given)
    assert upper(path) > claimed  # who interrupts a run may have seen the outputs of its earlier steps


def test_without_looks_and_stops_nothing_is_noted(path):
    steps = []
    told = lambda s: steps.append((s.step, float(s.epsilon.upper), s.stopped, repr(s)))
    state = fit(trainer_of(), path, callbacks=[told])
    shown = outward(steps[1][1], ".7g", up=True)
    assert steps[1][-1] == f"State(step 2 of 12, epsilon <= {shown} at delta 1e-05, 2 parameters)"
    assert len(steps) == 12 and not state.seen and {line["kind"] for line in lines(path)} == {"run", "step"}


class Oops(Exception):
    pass


def raises(error):
    def callback(state):
        if state.step == 4:
            raise error

    return callback


@pytest.mark.parametrize(
    ("error", "checkpoints"),
    [(Oops(), False), (KeyboardInterrupt(), False), (SystemExit(), False), (Oops(), True)],
    ids=repr,
)
def test_a_callback_that_raises_has_looked(path, tmp_path, error, checkpoints):
    more = {"checkpoints": tmp_path / "run", "checkpoint_every": 3} if checkpoints else {}
    trainer = trainer_of()
    with pytest.raises(type(error)):
        fit(trainer, path, callbacks=[raises(error)], **more)
    whole = float(trainer.plan.epsilon.upper)
    assert upper(path) == pytest.approx(whole, rel=1e-6)
    longer = trainer_of(steps=14)  # another plan, as one might choose after seeing outputs
    if checkpoints:
        words = refusal(fit, longer, path, **more)
        assert "may not go on with another plan" in words
    ended = fit(trainer, path, **more)
    assert ended.stopped == "finished" and float(ended.epsilon.upper) == upper(path) <= 2.0


def test_an_interrupt_by_hand_counts_the_plan_to_its_end(path):
    """Whoever interrupts a run may have seen the log, the progress or a checkpoint."""

    trainer = trainer_of(steps=400)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, path, log=lambda record: (_ for _ in ()).throw(KeyboardInterrupt))
    ledger = Ledger.read(path)
    assert 0 < ledger.runs[ledger.run].steps < 400 and upper(path) == pytest.approx(2.0, rel=1e-3)
    assert not ledger.runs[ledger.run].looks.looked


class FirstOfTwo(Processes):
    """The first of two processes; after an error the other one answers no more."""

    gone = False

    def gather(self, own):
        assert not self.gone
        return [own, own]


def test_an_error_in_the_first_of_several_processes_is_noted(path, monkeypatch):
    trainer, processes = trainer_of(steps=400), FirstOfTwo(2, 0)
    monkeypatch.setattr(trainer.placement, "processes", processes)

    def interrupt(record):
        processes.gone = True
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(trainer, path, log=interrupt)
    assert any(line["kind"] == "seen" for line in lines(path))
    assert upper(path) == pytest.approx(2.0, rel=1e-3)


def test_a_state_that_a_callback_kept_claims_no_less_than_the_ledger(path):
    """In the callback the state claims its steps; afterwards the whole plan, as its outputs may have ended the run."""
    kept, within = [], []

    def keep(state):
        kept.append(state)
        within.append(float(state.epsilon.upper))
        if state.step == 4:
            raise Oops

    for ledger in (path, None):
        kept.clear(), within.clear()
        with pytest.raises(Oops):
            fit(trainer_of(), ledger, callbacks=[keep])
        assert within == sorted(within) and within[-1] < 1.5
        assert all(float(state.epsilon.upper) == pytest.approx(2.0, rel=1e-3) for state in kept)
        assert kept[0].params.shape == (2,)  # the ledger is closed, and nothing more is noted


def test_a_state_claims_what_was_spent_after_it(path):
    """A state read once, and shown, counts what another run adds to its ledger, also after the run itself."""
    state = fit(trainer_of("poisson"), path)
    before = float(state.epsilon.upper)
    other = trainer_of("poisson", noise_multiplier=1.0, target_epsilon=None)
    fit(other, path, other.init(np.zeros(2, np.float32), bytes(32)))
    assert before < float(state.epsilon.upper) == upper(path)
    assert f"epsilon <= {outward(upper(path), '.7g', up=True)} at" in repr(state)
    assert state.epsilon is state.epsilon  # a ledger of many steps takes long to read
    path.unlink()
    assert "epsilon unknown" in repr(state)


@pytest.mark.parametrize(
    ("rule", "more", "words"),
    [
        ("fixed", {}, "at delta 1e-05, zero_out, 2"),
        ("user", {}, "at delta 1e-05, unit user, 2"),
        ("everyone", {"target_delta": 1 / 7000}, "at delta 0.00014285714285714287, 2"),
        ("repetitions", {}, "epsilon of one run <= "),
    ],
)
def test_a_state_says_what_its_epsilon_is_of(path, rule, more, words):
    trainer = trainer_of(rule, **more)
    states = [fit(trainer, path), trainer.init(np.zeros(2, np.float32))]
    for state in states:
        text = repr(state)
        assert words in text and Decimal(text.split("<= ")[1].split(" ")[0]) >= Decimal(float(state.epsilon.upper))


def test_a_second_run_is_given_nothing_of_what_was_promised(path):
    """The first run took 5 of the 12 steps for its target of 2; the other 7 steps count as spent."""
    trainer = trainer_of()
    fit(trainer, path, callbacks=[look])
    before = path.read_bytes()
    other = trainer.init(np.zeros(2, np.float32), bytes(32))
    words = refusal(fit, trainer, path, other)
    assert "holds 5 steps of other runs" in words and "none of 12 steps fits the budget" in words
    assert path.read_bytes() == before
    wider = trainer_of(target_epsilon=4.0)
    with pytest.warns(UserWarning, match=r"holds 5 steps of other runs.* \d+ of 12 steps fit"):
        state = fit(wider, path, wider.init(np.zeros(2, np.float32), bytes(32)))
    assert state.stopped == "budget" and 2.0 < float(state.epsilon.upper) == upper(path) <= 4.0
    with Ledger.open(path) as ledger:
        assert "would cost epsilon" in refusal(spend_tuning, ledger)


def spend_tuning(ledger):
    from jaxacct.tuning.tuning_run import note_whole

    plan = Plan(target_delta=DELTA, dataset_size=20, sampling_probability=0.3, steps=1, noise_multiplier=9.0)
    note_whole(ledger, plan, ja.Gaussian(2.0), "tuning", 4.0)


def test_a_run_that_is_begun_in_a_callback_is_given_nothing_either(path):
    trainer, words = trainer_of(), []
    with Ledger.create(path, trainer.plan) as ledger:

        def begin_another(state):
            if state.step == 3 and state.params is not None:
                words.append(
                    refusal(trainer.fit, trainer.init(np.zeros(2, np.float32)), DATA, ledger=ledger, progress=False)
                )

        state = trainer.fit(
            trainer.init(np.zeros(2, np.float32)), DATA, ledger=ledger, callbacks=[begin_another], progress=False
        )
    assert state.stopped == "finished" and "none of 12 steps fits the budget" in words[0]
    assert float(state.epsilon.upper) == upper(path) <= 2.0


@pytest.mark.parametrize("far", [True, False])
def test_a_run_that_may_go_on_beyond_its_promise_promises_more(path, far):
    """After the second run's outputs were seen, the first run changes to a shorter plan: the second has more room."""
    first, second = trainer_of(), trainer_of(target_epsilon=3.0)
    half = fit(first, path, callbacks=[lambda state: state.step == 5])
    looks = lambda step: [lambda state: state.params is not None and state.step == step]
    with pytest.warns(UserWarning, match="steps fit the budget"):
        other = fit(second, path, second.init(np.zeros(2, np.float32), bytes(32)), callbacks=looks(2))
    promised = lambda: [line for line in lines(path) if line["kind"] == "seen"][-1]["until"]
    until = promised()
    assert 2 < until < 12
    fit(trainer_of(steps=6, target_epsilon=None, noise_multiplier=9.0), path, half)
    fit(second, path, other, callbacks=looks(until + 1 if far else 4))
    assert until + 1 < promised() < 12
    cost = lambda steps, noise: steps / noise**2
    whole = lambda steps: gaussian_epsilon(
        math.sqrt(cost(5, first.plan.noise_multiplier) + 1 / 81 + cost(steps, second.plan.noise_multiplier))
    )
    assert upper(path) == pytest.approx(whole(promised()), rel=1e-6) and whole(promised()) <= 3.0 < whole(
        promised() + 1
    )


def test_what_another_run_spends_after_a_look_shortens_no_promise(path):
    """The second run has a wider target and leaves the first one no room. The first still counts to its old end."""
    trainer, wider = trainer_of(), trainer_of(target_epsilon=4.0)
    half = fit(trainer, path, callbacks=[look])
    with pytest.warns(UserWarning, match="steps fit the budget"):
        fit(wider, path, wider.init(np.zeros(2, np.float32), bytes(32)))
    before = upper(path)
    ended = fit(trainer, path, half)
    assert (ended.step, ended.stopped) == (5, "budget") and upper(path) == before > 3.5


def test_every_command_counts_what_was_promised(path, tmp_path, capsys):
    state = fit(trainer_of(), path, callbacks=[look])
    page = tmp_path / "page.html"
    shown = json.loads(said(capsys, "ledger", "show", str(path), "--json"))
    assert shown["upper"] == shown["runs"][0]["upper"] == float(state.epsilon.upper)
    assert shown["runs"][0]["outputs_seen_from"] == 5 and shown["runs"][0]["promised"][0]["count"] == 7
    assert "outputs were seen from step 5 on" in said(capsys, "ledger", "show", str(path))
    assert "verified  1" in said(capsys, "verify", str(path))
    said(capsys, "report", str(path), "--out", str(page))
    assert "Its outputs could be seen from step 5 on" in page.read_text() and "1.99" in page.read_text()


def test_an_unfinished_run_says_what_is_assumed(path, capsys):
    """Without looks only its steps count; `ledger show` also says what holds if outputs ended the run."""
    with Ledger.create(path, Plan(target_delta=DELTA, dataset_size=20, sampling_probability=1.0, steps=9,
                                  noise_multiplier=3.0)) as ledger:  # fmt: skip
        for step in range(4):
            note(ledger, step, noise=3.0)
    assert upper(path) == pytest.approx(gaussian_epsilon(2 / 3), rel=1e-6)
    assert upper(path, whole=True) == pytest.approx(gaussian_epsilon(1.0), rel=1e-6)
    out = said(capsys, "ledger", "show", str(path))
    assert "its plan is not at its end; if outputs decided that, epsilon is <=" in out
    with Ledger.open(path) as ledger:
        ledger.seen(4)
        ledger.seen(4)
    assert upper(path) == upper(path, whole=True) == pytest.approx(gaussian_epsilon(1.0), rel=1e-6)
    assert [line["kind"] for line in lines(path)].count("seen") == 1


def as_version_1(path):
    """A ledger as an earlier version of jaxacct wrote it: no looks, and another format version."""
    total, text = 0, b""
    for line in lines(path):
        if line["kind"] == "seen":
            continue
        del line["check"]
        line |= {"version": 1} if line["kind"] == "run" else {}
        body = json.dumps(line)[:-1].encode()
        total = zlib.crc32(body, total)
        text += body + f', "check": "{total:08x}"}}\n'.encode()
    path.write_bytes(text)


@pytest.mark.parametrize("rule", ["poisson", pytest.param("random_allocation", marks=pytest.mark.slow), "fixed"])
def test_an_old_ledger_of_an_unfinished_run_counts_its_plan_to_the_end(path, rule, capsys):
    """Such a ledger does not say whether outputs were seen.  A finished run costs what its steps cost."""
    trainer = trainer_of(rule)
    state = fit(trainer, path, callbacks=[look])
    as_version_1(path)
    assert upper(path) == pytest.approx(float(trainer.plan.epsilon.upper), rel=1e-6)
    out = said(capsys, "ledger", "show", str(path))
    assert "an earlier version of jaxacct wrote this, and did not note whether outputs were seen" in out
    fresh = path.with_name("finished")
    fit(trainer, fresh)
    as_version_1(fresh)
    assert upper(fresh) == pytest.approx(float(trainer.plan.epsilon.upper), rel=1e-6)
    assert state.step == 5


def test_a_history_without_a_ledger_tells_the_ledger_that_begins_late(path):
    trainer = trainer_of()
    half = trainer.fit(trainer.init(np.zeros(2, np.float32)), DATA, callbacks=[look], progress=False)
    with pytest.raises(Oops):
        trainer.fit(half, DATA, ledger=path, callbacks=[lambda s: (_ for _ in ()).throw(Oops)], progress=False)
    kinds = [line["kind"] for line in lines(path)]
    assert kinds == ["run", "spend", "seen", "step"]
    assert upper(path) == pytest.approx(2.0, rel=1e-3)


def test_a_plan_that_is_left_after_looks_counts_to_its_end(path):
    """The plan is changed by hand, as `fit` refuses to.  After a stop without looks only the steps taken count."""
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling_probability": 1.0, "steps": 10}
    plan = lambda noise: Plan(**given, noise_multiplier=noise)
    for looked, steps in ((True, 10), (False, 4)):
        place = path.with_name(str(looked))
        with Ledger.create(place, plan(2.0)) as ledger:
            for step in range(4):
                note(ledger, step, noise=2.0)
            ledger.seen(4, looked)
            ledger.replan(plan(4.0))
            note(ledger, 4, noise=4.0)
            assert float(ledger.epsilon(DELTA).upper) == pytest.approx(
                gaussian_epsilon(math.sqrt(steps / 4 + 1 / 16)), rel=1e-6
            )
        assert upper(place) == pytest.approx(gaussian_epsilon(math.sqrt(steps / 4 + 1 / 16)), rel=1e-6)


def test_a_filter_that_follows_by_hand_forgets_no_promise(path):
    """The run was ended by outputs, and the filter was chosen after them: what was left of the plan stays a debt."""
    given = {"target_delta": DELTA, "dataset_size": 20, "sampling_probability": 1.0}
    with Ledger.create(path, Plan(**given, noise_multiplier=2.0, steps=40)) as ledger:
        note(ledger, 0, noise=2.0)
        ledger.seen(1)
        promised = upper(path)
        ledger.replan(Plan(**given, noise_multiplier=6.0, steps=60, data_dependent=True))
        assert upper(path) >= promised


def test_a_full_disk_shows_nothing(path, monkeypatch):
    """If the ledger cannot note the look, the callback gets an error and no outputs."""
    got = []

    def full(*_):
        raise OSError(28, "No space left on device")

    def watch(state):
        if state.step == 3:
            with monkeypatch.context() as patch:
                patch.setattr("os.fsync", full)
                got.append(refusal(lambda: state.params))

    words = refusal(fit, trainer_of(), path, callbacks=[watch])
    assert "No space left on device" in got[0] and "is not open for writing" in words


PATHS = ["finish", "look and stop", "stop", "raise", "interrupt", "killed", "killed after a look"]
NEXT = ["none", "same", "other program", "other plan", "second run", "recalibrated"]


QUICK = [("fixed", "killed after a look")]
SLOW = [(rule, way) for rule in ("everyone", "poisson", "random_allocation", "fixed") for way in PATHS]


@pytest.mark.parametrize(
    ("rule", "way"), QUICK + [pytest.param(*each, marks=pytest.mark.slow) for each in SLOW if each not in QUICK]
)
def test_the_ledger_claims_what_the_state_does_on_every_path(path, tmp_path, monkeypatch, rule, way):
    """Every way to end a run, then every way to go on: state <= ledger <= target, and the looks are never forgotten."""
    trainer = trainer_of(rule)
    more = {"checkpoints": tmp_path / "run", "checkpoint_every": 2}
    real = RunLedger.note

    def note(self, plan, step, *rest):
        if "killed" in way and step == 7:
            raise Killed
        return real(self, plan, step, *rest)

    calls = {
        "look and stop": [look],
        "stop": [lambda s: s.step == 5],
        "raise": [raises(Oops())],
        "interrupt": [raises(KeyboardInterrupt())],
        "killed after a look": [lambda s: s.params is None],
    }
    with monkeypatch.context() as patch:
        patch.setattr(RunLedger, "note", note)
        if "killed" in way:  # a killed process notes nothing
            patch.setattr(RunLedger, "cut_off", lambda *_: None)
        patch.setattr("jaxacct.training.run.program.Program.session_after", lambda *_: None)
        with suppress(Oops, Killed, KeyboardInterrupt):
            fit(trainer, path, callbacks=calls.get(way, []), **more)
    after_first = upper(path)
    assert after_first <= 2.0
    assert (after_first > 1.98) == (way != "killed"), after_first
    folder, first = tmp_path / "run", path.read_bytes()
    for following in NEXT:
        path.write_bytes(first)
        here = tmp_path / following
        shutil.copytree(folder, here)
        more["checkpoints"] = here
        target, words = 2.0, ""
        try:
            if following == "none":
                continue
            if following == "same":
                state = fit(trainer, path, **more)
            elif following == "other program":
                state = fit(trainer_of(rule, rate=0.2), path, **more)
            elif following == "other plan":
                state = fit(trainer_of(rule, target_epsilon=3.0), path, **more)
                target = 3.0
            elif following == "second run":
                state = fit(trainer, path, trainer.init(np.zeros(2, np.float32), bytes(32)), checkpoints=None)
            else:
                state = fit(still_trainer(trainer.plan.recalibrate(4, steps=16)), path, **more)
        except ja.InputError as error:
            words = str(error)
        if words:
            assert "\n" not in words
            assert upper(path) >= after_first * (1 - 1e-6)
            continue
        assert float(state.epsilon.upper) <= upper(path) * (1 + 1e-9) <= target * (1 + 1e-9), following
        left = following == "recalibrated" and way == "stop"  # without looks another plan may follow
        assert upper(path) >= min(after_first, 1.98) * (1 - 1e-6) or left, following
        looked = way in ("look and stop", "raise", "interrupt", "killed after a look")
        assert following not in ("other plan", "recalibrated") or not looked


@pytest.mark.parametrize("cut", [False, True], ids=["", "killed before its promise is noted"])
def test_a_pass_that_another_program_begins_again_costs_one_more(path, monkeypatch, cut):
    """Steps 0 to 6 run, then another program runs 4 to 7: a record is in one batch of steps 0 to 3, and from step 4 on
    in one batch of each program.  The target allows three passes, whatever was seen, so the run ends after 8 steps.
    """
    given = {"checkpoints": path.with_name("run"), "checkpoint_every": 4}
    real = RunLedger.note

    def note(self, plan, step, *rest):
        if step == 7:
            raise Killed
        return real(self, plan, step, *rest)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(RunLedger, "note", note)
        patch.setattr(RunLedger, "cut_off", lambda *_: None)
        fit(trainer_of("fixed"), path, callbacks=[lambda state: state.params is None], **given)
    if cut:
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(RunLedger, "cut_off", lambda *_: None)
            patch.setattr(Ledger, "promise", lambda *_: (_ for _ in ()).throw(Killed))
            fit(trainer_of("fixed", rate=0.2), path, **given)
    state = fit(trainer_of("fixed", rate=0.2), path, **given)
    steps = [line["step"] for line in lines(path) if line["kind"] == "step"]
    assert steps == [*range(7), *([4] if cut else []), *range(4, 8)]
    mu = math.sqrt(3) / trainer_of("fixed").plan.noise_multiplier
    assert (state.step, state.stopped) == (8, "budget")
    assert float(state.epsilon.upper) == upper(path) == pytest.approx(gaussian_epsilon(mu), rel=1e-6)


def test_a_pass_whose_noise_falls_counts_with_what_it_would_have_had(path, capsys):
    """Outputs are seen within a pass. Its least noise is yet to come, and counts instead of the least noise so far."""
    trainer = trainer_of("fixed", noise_schedule=((3, 1.0), (6, 1.6), (None, 1.2)))
    state = fit(trainer, path, callbacks=[lambda state: state.step == 6 and state.params is not None])
    seen = [line for line in lines(path) if line["kind"] == "seen"]
    assert [(line["step"], line["until"]) for line in seen] == [(6, 12)]
    shown = json.loads(said(capsys, "ledger", "show", str(path), "--json"))["runs"][0]
    assert [[one["count"] for one in shown[name]] for name in ("releases", "promised")] == [[1], [2]]
    whole = float(trainer.plan.epsilon.upper)
    assert float(state.epsilon.upper) == upper(path) == pytest.approx(whole, rel=1e-6)
    assert float(fit(trainer, path, state).epsilon.upper) == pytest.approx(whole, rel=1e-6)


class Enough(BaseException):
    """What a user's signal handler may raise."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Enough, TimeoutError])
def test_an_end_within_an_entry_is_noted(path, monkeypatch, error):
    """An interrupt while an entry is being written closes the file; the look is noted all the same."""
    trainer, asked = trainer_of(), []

    def cut(descriptor, sync=os.fsync):
        asked.append(descriptor)
        if len(asked) == 6:
            raise error
        sync(descriptor)

    monkeypatch.setattr("os.fsync", cut)
    with pytest.raises((error, ja.InputError)):
        fit(trainer, path)
    monkeypatch.undo()
    assert any(line["kind"] == "seen" for line in lines(path))
    assert upper(path) >= float(trainer.plan.epsilon_after(12).upper) * 0.999


def test_an_error_of_the_log_is_noted(path):
    trainer, told = trainer_of(), []

    def tell(record):
        told.append(record)
        if record.get("step", 0) >= 3:
            raise Enough

    with suppress(Enough):
        fit(trainer, path, log=tell)
    assert told and upper(path) >= float(trainer.plan.epsilon_after(12).upper) * 0.999


def test_a_stop_by_what_the_log_told_is_a_look(path):
    """A callback that asks for no outputs may know them from the log: no other plan follows."""
    trainer, told = trainer_of(), []
    state = fit(trainer, path, log=told.append, callbacks=[lambda s: s.step >= 5])
    assert state.seen and lines(path)[-1]["looked"]
    assert "plan" in refusal(fit, trainer_of(steps=7), path, state)
