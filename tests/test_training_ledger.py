"""Ledgers: what is noted is on the disk, nothing is counted too little, and damage is refused."""

import json
import math
import os
import subprocess
import sys
import zlib
from collections import defaultdict

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting import pld as peer
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import DELTA, FIXED, FULL, gaussian_epsilon

import jaxacct as ja
from jaxacct import cli, selection
from jaxacct.training import Ledger, Plan

PLAN = Plan(**FULL, steps=100, noise_multiplier=10.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def note(ledger, step, key=None, noise=10.0, rate=1.0, **more):
    ledger.record(step, f"key {step}" if key is None else key, f"batch {step}", noise, rate, **more)


def mu2(ledger):
    """Sum of count/sigma^2 over what a ledger has counted."""
    return sum(count / release.noise_multiplier**2 for release, count in ledger.releases().items())


# What counts


def test_an_exact_replay_counts_once_and_any_other_again(path):
    with Ledger.create(path, PLAN) as ledger:
        for step in (0, 1, 2, 1, 1):
            note(ledger, step)
        assert mu2(ledger) == pytest.approx(0.03)
        note(ledger, 1, key="another")
        note(ledger, 1, noise=5.0)  # the same key, but not the same release
        ledger.record(2, "key 2", "another batch", 10.0, 1.0)
        assert mu2(ledger) == pytest.approx(0.05 + 0.04)
        spent = ledger.runs[ledger.run]
        assert (spent.steps, spent.same, spent.again, len(spent.numbers)) == (6, 2, 3, 3)
        expected = gaussian_epsilon(0.3)
        assert ledger.epsilon(DELTA).upper == pytest.approx(expected, rel=1e-6)
    assert Ledger.read(path).epsilon(DELTA).upper == pytest.approx(expected, rel=1e-6)


def test_equal_entries_are_merged_into_repeats(path):
    with Ledger.create(path, PLAN) as ledger:
        ledger.record_many(range(60), [f"k{s}" for s in range(60)], ["b"] * 60, [10.0] * 50 + [20.0] * 10, 1.0)
        assert ledger.spent() == ja.compose(ja.dp_sgd(10.0, 1.0, 50), ja.dp_sgd(20.0, 1.0, 10))
        assert ledger.epsilon(DELTA).upper == pytest.approx(gaussian_epsilon(math.sqrt(0.525)), rel=1e-6)


def test_several_in_one_write_are_the_same_lines(path, tmp_path):
    one, many = (Ledger.create(p, PLAN, run="r") for p in (path, tmp_path / "many"))
    for step in range(5):
        note(one, step)
    many.record_many(range(5), [f"key {s}" for s in range(5)], [f"batch {s}" for s in range(5)], 10.0, [1.0] * 5)
    assert path.read_bytes() == (tmp_path / "many").read_bytes()
    assert "needs 2 fingerprints of each kind" in refusal(many.record_many, [1, 2], ["k"], ["b", "c"], 1.0, 1.0)


def test_a_heterogeneous_run_against_dp_accounting(path):
    plan = Plan(target_delta=DELTA, dataset_size=500, expected_batch_size=100, steps=55, noise_multiplier=3.0)
    with Ledger.create(path, plan) as ledger:
        for sigma, q, steps in ((3.0, 0.2, range(25)), (4.0, 0.3, range(25, 55))):
            ledger.record_many(steps, [str(s) for s in steps], ["b"] * len(steps), sigma, q)
        found = ledger.epsilon(DELTA)
    accountant = peer.PLDAccountant(value_discretization_interval=1e-4)
    for sigma, q, count in ((3.0, 0.2, 25), (4.0, 0.3, 30)):
        accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), count))
    assert found.kind == "certified" and accountant.get_epsilon(DELTA) == pytest.approx(found.upper, abs=1e-6)


def test_other_mechanisms_compose_with_the_steps(path):
    chosen = selection.select(ja.Gaussian(30.0), selection.Geometric(0.1))
    with Ledger.create(path, PLAN) as ledger:
        note(ledger, 0)
        ledger.spend(ja.Laplace(50.0), "look at the labels")
        ledger.spend(ja.Laplace(50.0), "look again")
        ledger.spend(chosen, "tuning")
        whole = ledger.spent()
    assert whole == Ledger.read(path).spent()
    assert set(whole.mechanisms) == {ja.dp_sgd(10.0, 1.0, 1), ja.repeat(ja.Laplace(50.0), 2), chosen}
    with Ledger.open(path) as ledger:
        assert "must be a mechanism" in refusal(ledger.spend, "Laplace")
        assert "must be one configuration" in refusal(ledger.spend, ja.Laplace([1.0, 2.0]))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_partition_costs_its_dearest_step(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "run"
    rows = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from([1.0, 2.0, 3.0]), st.integers(0, 2))
    entries = data.draw(st.lists(rows, max_size=15))
    with Ledger.create(path, Plan(**FIXED, expected_batch_size=100, steps=100, noise_multiplier=1.0)) as ledger:
        for step, partition, noise, key in entries:
            note(ledger, step, key=str(key), noise=noise, rate=0.1, partition=partition)
        counted = mu2(ledger)
    costs = defaultdict(float)  # a record of the batch of a step of a partition is in all its entries
    for step, partition, noise, _ in set(entries):
        costs[partition, step] += noise**-2
    worst = sum(max((c for (p, _), c in costs.items() if p == label), default=0.0) for label in "ab")
    assert counted == pytest.approx(worst, abs=1e-12) == pytest.approx(mu2(Ledger.read(path)), abs=1e-12)


def test_without_a_partition_every_fixed_batch_counts(path):
    with Ledger.create(path, Plan(**FIXED, expected_batch_size=100, steps=100, noise_multiplier=10.0)) as ledger:
        for step in range(7):
            note(ledger, step, rate=0.1)
        assert ledger.spent() == ja.repeat(ja.Gaussian(10.0), 7)


def test_runs_are_told_apart_and_add_up(path):
    with Ledger.create(path, PLAN, run="first", by="ada") as ledger:
        note(ledger, 0)
        assert ledger.begin(PLAN, "second", by="grace") == ledger.run == "second"
        note(ledger, 0)
        assert "is in the ledger already" in refusal(ledger.begin, PLAN, "first")
    with Ledger.open(path, run="first") as ledger:
        note(ledger, 0)
        note(ledger, 1)
        assert ledger.releases("first").total() == 2 and ledger.releases("second").total() == 1
        assert ledger.spent() == ja.dp_sgd(10.0, 1.0, 3) and ledger.spent("second") == ja.dp_sgd(10.0, 1.0, 1)
        assert ledger.epsilon(DELTA, run="first").upper == pytest.approx(gaussian_epsilon(math.sqrt(0.02)), rel=1e-6)
        assert "run = 'third' is not in" in refusal(ledger.spent, "third")
    assert "run = 'third' is not in" in refusal(Ledger.open, path, run="third")
    assert [line.by for line in Ledger.read(path).headers["second"]] == ["grace"]


def test_nothing_spent_is_nothing(path):
    with Ledger.create(path, PLAN) as ledger:
        assert ledger.epsilon(DELTA).upper == 0.0


# The file


def test_what_was_acknowledged_survives_a_kill(tmp_path):
    """Twenty times a process is killed while it writes; every step that `record` returned for is in the ledger."""
    program = """
import os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")
from jaxacct.training import Ledger, Plan
path = sys.argv[1]
plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=10**6, noise_multiplier=1.0)
Ledger.create(path, plan).close()
random.seed(1)
for life in range(20):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        ledger = Ledger.open(path)
        for step in range(10**6):
            ledger.record(step, f"{life}", "b", 1.0, 1.0)
            os.write(tell, b"%d\\n" % step)
    os.close(tell)
    said = os.read(told, 1)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(told, 65536):
        said += more
    os.close(told)
    print(life, *said.split(b"\\n")[:-1], flush=True)
"""
    path = tmp_path / "run.jsonl"
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program, str(path)]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout
    ledger = Ledger.read(path)
    noted = {(entry.key, entry.step) for entry in ledger.runs[ledger.run].seen}
    lives = out.splitlines()
    assert len(lives) == 20
    for line in lives:
        life, *steps = line.split()
        assert steps and {(life, int(step.strip("b'"))) for step in steps} <= noted
    assert ledger.releases().total() >= len(noted)


def test_the_line_is_on_the_disk_when_record_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (real(file), synced.append(path.read_bytes())))
    with Ledger.create(path, PLAN) as ledger:
        for step in range(3):
            note(ledger, step)
            assert synced[-1] == path.read_bytes() and synced[-1].endswith(b"}\n") and len(synced) == step + 3


def test_a_disk_that_fails_is_told_and_nothing_more_is_written(path, monkeypatch):
    with Ledger.create(path, PLAN) as ledger:
        note(ledger, 0)

        def fail(_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            assert "No space left on device" in refusal(note, ledger, 1)
        assert "is not open for writing" in refusal(note, ledger, 2)
    with Ledger.open(path) as ledger:
        assert ledger.releases().total() == 2  # what may be on the disk counts


def written(path):
    """A ledger of a run with three steps, the last line of which a crash can cut off."""
    with Ledger.create(path, PLAN, run="r") as ledger:
        for step in range(3):
            note(ledger, step, noise=[10.0, 4.0, 10.0][step])
    return path.read_bytes()


def test_a_last_line_cut_off_anywhere_counts_at_its_worst(path):
    whole = written(path)
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start + 1, len(whole)):
        path.write_bytes(whole[:end])
        worst = 0.01 + 2 / 16 if end < len(whole) - 1 else 0.02 + 1 / 16  # without the line's end it is complete
        assert mu2(Ledger.read(path)) == pytest.approx(worst), end
        if end % 8 == 0 or end > len(whole) - 3:
            with Ledger.open(path) as ledger:  # mends the file, and goes on
                assert mu2(ledger) == pytest.approx(worst)
                note(ledger, 3)
            assert mu2(Ledger.read(path)) == pytest.approx(worst + 0.01), end
    path.write_bytes(whole[:start])
    assert mu2(Ledger.read(path)) == pytest.approx(0.01 + 1 / 16)


def test_other_lines_cut_off_are_no_steps(path):
    whole = written(path)
    with Ledger.open(path) as ledger:
        ledger.spend(ja.Laplace(1.0))
    path.write_bytes(path.read_bytes()[: len(whole) + 30])
    assert Ledger.read(path).spent() == ja.compose(ja.dp_sgd(10.0, 1.0, 2), ja.dp_sgd(4.0, 1.0, 1))
    path.write_bytes(whole[:100])
    assert "line 1 was cut off before anything was noted" in refusal(Ledger.open, path)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_byte_changed_anywhere_is_refused_with_its_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "run"
    whole = written(path)
    place = data.draw(st.integers(0, len(whole) - 2))
    value = data.draw(st.integers(0, 255).filter(lambda v: v != whole[place] and v != 10))
    damaged = whole[:place] + bytes([value]) + whole[place + 1 :]
    path.write_bytes(damaged)
    line = whole[:place].count(b"\n") + 1
    if whole[place] == 10:
        assert f"line {line} is damaged" in refusal(Ledger.read, path)
    else:
        assert f"line {line} is damaged" in refusal(Ledger.open, path)
    assert path.read_bytes() == damaged


def test_lines_lost_swapped_or_added_are_refused(path):
    lines = written(path).splitlines(keepends=True)
    for changed, number in (
        (lines[:1] + lines[2:], 2),
        ([lines[0], lines[2], lines[1], lines[3]], 2),
        (lines + [lines[-1]], 5),
        (lines + [b"\n"], 5),
        (lines + [b"{}\n"], 5),
        (lines + [b"\x00\x00"], 5),
        (lines[1:], 1),
    ):
        path.write_bytes(b"".join(changed))
        assert f"line {number} is damaged" in refusal(Ledger.open, path)
    path.write_bytes(b"")
    assert "is empty" in refusal(Ledger.open, path)


def forged(path, *nodes):
    """A ledger with lines that anyone could write, checksums included."""
    whole = written(path)
    total = int(json.loads(whole.splitlines()[-1])["check"], 16)
    for node in nodes:
        body = json.dumps(node)[:-1].encode()
        total = zlib.crc32(body, total)
        whole += body + f', "check": "{total:08x}"}}\n'.encode()
    path.write_bytes(whole)
    return refusal(Ledger.open, path)


STEP = {"kind": "step", "run": "r", "step": 3, "key": "k", "batch": "b"}
STEP |= {"noise_multiplier": 1.0, "sampling_probability": 1.0, "sampling": "poisson", "partition": None}
HOSTILE = [
    STEP | {"run": "never"},
    STEP | {"step": -1},
    STEP | {"step": 1.5},
    STEP | {"step": "os.system('true')"},
    STEP | {"noise_multiplier": 0.0},
    STEP | {"noise_multiplier": True},
    STEP | {"noise_multiplier": [1.0, 2.0]},
    STEP | {"sampling_probability": 1.5},
    STEP | {"sampling": "none"},
    STEP | {"key": 7},
    STEP | {"key": "k" * 1000},
    STEP | {"partition": ["a"]},
    STEP | {"more": 1},
    {"kind": "step"},
    {"kind": "exec", "code": "1"},
    {"kind": ["step"]},
    {"no": "kind"},
    {"kind": "spend", "run": "r", "mechanism": {"type": "os.system"}, "note": ""},
    {"kind": "spend", "run": "r", "mechanism": "import os", "note": ""},
    {"kind": "torn", "run": "r", "noise_multiplier": -1, "sampling_probability": 1, "sampling": "poisson"},
    {"kind": "run", "format": "jaxacct.ledger", "version": 2, "run": "s", "by": "", "plan": {}},
    {"kind": "run", "format": "jaxacct.ledger", "version": 1, "run": "s", "by": "", "plan": {}},
    {"kind": "run", "run": "s", "by": "", "plan": {}},
]


@pytest.mark.parametrize("node", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_lines_are_refused_with_their_number(path, node):
    assert "line 5 is" in forged(path, node)


def test_files_that_cannot_be_used_are_refused(path, tmp_path):
    with Ledger.create(path, PLAN) as ledger:
        assert "another process is writing it" in refusal(Ledger.open, path)
        assert "is there already" in refusal(Ledger.create, path, PLAN)
        assert "step = -1" in refusal(note, ledger, -1)
        assert "key_fingerprint = 7 must be text" in refusal(ledger.record, 0, 7, "b", 1.0, 1.0)
        assert ledger.releases().total() == 0
        assert Ledger.read(path).run == ledger.run  # looking is allowed
    assert "is not open for writing" in refusal(note, ledger, 0)
    assert "cannot be opened" in refusal(Ledger.open, tmp_path / "none")
    assert "cannot be read" in refusal(Ledger.read, tmp_path)
    assert "cannot be written" in refusal(Ledger.create, tmp_path / "none" / "run", PLAN)


# The hard stop


def trained(plan, ledger, replays=()):
    """Steps until the plan forbids the next one; some are run a second time, with noise of their own."""
    again = dict(replays)
    for step in range(plan.steps + 5):
        if not plan.allows(ledger, step):
            return step
        segment = plan.at(step)
        label = str(plan.pass_of(step)[0]) if plan.sampling == "fixed_batches" else None
        note(ledger, step, "first", segment.noise_multiplier, segment.sampling_probability, partition=label)
        if step in again:
            noise = segment.noise_multiplier * again[step]
            note(ledger, step, "again", noise, segment.sampling_probability, partition=label)
    raise AssertionError("the hard stop never came")


TARGETED = Plan(target_epsilon=1.0, **FULL, steps=50, noise_schedule=[(20, 1.0), (None, 1.5)])


def test_following_the_plan_needs_no_accounting(path, monkeypatch):
    assert TARGETED.within

    def counted(*_, **__):
        raise AssertionError("accounted for")

    monkeypatch.setattr(ja.account, "epsilon", counted)
    with Ledger.create(path, TARGETED) as ledger:
        assert trained(TARGETED, ledger) == 50


@pytest.mark.parametrize("replays", [{3: 1.0}, {40: 1.0}, {3: 2.0, 4: 0.9}, {0: 0.7, 49: 5.0}, {10: 0.26}], ids=str)
def test_the_stop_comes_just_in_time(path, replays):
    """No step is allowed after which the closed form exceeds the target, and none forbidden that would not."""
    with Ledger.create(path, TARGETED) as ledger:
        done = trained(TARGETED, ledger, replays)
        spent = [TARGETED.at(s).noise_multiplier ** -2.0 for s in range(done)]
        spent += [(TARGETED.at(s).noise_multiplier * x) ** -2.0 for s, x in replays.items() if s < done]
        if done not in (s + 1 for s in replays):  # a replay itself is not asked for
            assert gaussian_epsilon(math.sqrt(sum(spent))) <= 1.0
        if done < 50:
            more = TARGETED.at(done).noise_multiplier ** -2.0
            assert gaussian_epsilon(math.sqrt(sum(spent) + more)) > 1.0 - 1e-9
        assert mu2(ledger) == pytest.approx(sum(spent))


def test_the_stop_sees_other_mechanisms_runs_and_filters(path, tmp_path):
    with Ledger.create(path, TARGETED) as ledger:
        ledger.spend(ja.Gaussian(5.0), "look")
        done = trained(TARGETED, ledger)
        assert 0 < done < 50 and ledger.epsilon(DELTA).upper <= 1.0
        ledger.begin(TARGETED)
        assert not TARGETED.allows(ledger, 0)
    filtered = Plan(target_epsilon=1.0, **FULL, steps=50).recalibrate(20, steps=60, data_dependent=True)
    with Ledger.create(tmp_path / "filtered", filtered) as ledger:
        claim_run = ledger.run
        assert trained(filtered, ledger, {50: 1.0}) == 59
        assert ledger.epsilon(DELTA).upper == filtered.epsilon.upper and ledger.epsilon(DELTA).kind == "bound"
        assert "a Renyi filter of another order" in refusal(TARGETED.allows, ledger, 0)
        ledger.begin(PLAN, "other")
        note(ledger, 0)
        order, budget = filtered.filter
        renyi = budget + order / 2 / 100  # the filter's budget and one Gaussian of noise multiplier 10
        expected = renyi + math.log((order - 1) / order) - (math.log(DELTA) + math.log(order)) / (order - 1)
        assert ledger.epsilon(DELTA).upper == pytest.approx(expected, rel=1e-9)
        ledger.run = claim_run
        note(ledger, 59, noise=1.0)
        assert np.isinf(ledger.epsilon(DELTA).upper)  # beyond its budget a filter says nothing


@pytest.mark.parametrize(("replays", "done"), [({}, 60), ({13: 1.0}, 60), ({5: 1.0}, 30)], ids=str)
def test_the_stop_of_fixed_batches(path, replays, done):
    """Passes of ten steps; a replay costs a second Gaussian (2.25 later passes) unless its pass has room."""
    plan = Plan(
        target_epsilon=1.0, **FIXED, expected_batch_size=100, epochs=6, noise_schedule=[(13, 1.0), (None, 1.5)]
    )  # fmt: skip
    with Ledger.create(path, plan) as ledger:
        assert trained(plan, ledger, replays) == done
        assert ledger.epsilon(DELTA).upper <= 1.0


def test_another_partition_in_a_pass_costs_a_pass(path):
    """Shuffled anew in the middle of the last pass, the steps left cost another Gaussian, for which nothing is left."""
    plan = Plan(target_epsilon=1.0, **FIXED, expected_batch_size=100, epochs=2)
    with Ledger.create(path, plan) as ledger:
        for step in range(15):
            assert plan.allows(ledger, step, partition=str(step // 10))
            note(ledger, step, noise=plan.noise_multiplier, rate=0.1, partition=str(step // 10))
        assert plan.allows(ledger, 15) and plan.allows(ledger, 15, partition="1")
        assert not plan.allows(ledger, 15, partition="anew")
        assert not plan.allows(ledger, 14, partition="1")  # in that partition it was taken already


def test_without_a_target_everything_is_allowed(path):
    with Ledger.create(path, PLAN) as ledger:
        assert PLAN.allows(ledger, 10**6)


# The command


def shown(capsys, *words):
    status = cli.main(["ledger", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_shows_each_run_and_all(path, capsys, monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    with Ledger.create(path, TARGETED, run="first", by="ada\x1b[2J") as ledger:
        for step in range(4):
            note(ledger, step)
        note(ledger, 1, key="again")
        note(ledger, 3)
        ledger.begin(TARGETED, "second")
        note(ledger, 0, noise=5.0)
        ledger.spend(ja.Gaussian(20.0), "labels")
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "run": "second", "st')
    status, out, _ = shown(capsys, "show", path)
    assert status == 0 and "\x1b" not in out
    for words in (
        "by         ada?[2J",
        "target     epsilon 1 at delta 1e-05",
        "steps      4 (1 replayed otherwise, counted again, 1 replayed exactly, counted once)",
        "segment 1  5 steps, poisson, noise multiplier 10, rate 1",
        "steps      1 (1 cut off, counted)",
        "other 1    Gaussian(noise_multiplier=20.0)  labels",
    ):
        assert words in out
    status, out, _ = shown(capsys, "show", path, "--json", "--delta", "1e-6")
    report = json.loads(out)
    first, second = report["runs"]
    assert status == 0 and report["delta"] == 1e-6 and (first["run"], first["counted_again"]) == ("first", 1)
    assert first["upper"] == pytest.approx(gaussian_epsilon(math.sqrt(0.05), 1e-6), rel=1e-6)
    least = min(s.noise_multiplier for s in TARGETED.segments)
    rest = 1 / 25 + 1 / 400 + max(1 / 25, least**-2)
    assert second["upper"] == pytest.approx(gaussian_epsilon(math.sqrt(rest), 1e-6), rel=1e-6)
    assert report["upper"] == pytest.approx(gaussian_epsilon(math.sqrt(0.05 + rest), 1e-6), rel=1e-6)
    assert report["kind"] == "certified" and "epsilon" in shown(capsys, "show", path)[1]


def test_the_command_refuses_in_one_line(path, capsys, monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2]]))
    for words, message in (
        (["show", path], "line 2 is damaged"),
        (["show", path, "--delta", "2"], "line 2 is damaged"),
        (["show"], "LEDGER is missing"),
        ([], "ACTION is missing"),
        (["burn", path], "action = 'burn' is not known"),
        (["show", path, "--delta", "1e-5,1e-6"], "delta must be one number"),
        (["show", path, "--dleta", "1"], "did you mean --delta?"),
    ):
        status, out, err = shown(capsys, *words)
        assert status == 2 and not out and message in err and err.count("\n") == 1
