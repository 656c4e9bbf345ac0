"""The file of a ledger: what is noted is on the disk, what is cut off counts, and damage is refused."""

import json
import os
import subprocess
import sys
import zlib

import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import PLAN, mu2, note, written

import jaxacct as ja
from jaxacct.training import Ledger
from jaxacct.training.ledger.contents import Spent
from jaxacct.training.ledger.ledger import LedgerFile


def test_what_was_acknowledged_survives_a_kill(tmp_path):
    """Twice a process is killed while it writes; every step that `record` returned for is in the ledger.

    A process that is killed before a ledger has its first line leaves no ledger.
    """
    program = """
import os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")
from jaxacct.training import Ledger, Plan
path = sys.argv[1]
plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=10**6, noise_multiplier=1.0)
Ledger.create(path, plan).close()
random.seed(1)
for life in range(2):
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
if os.fork() == 0:
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
    Ledger.create(sys.argv[2], plan)
os.wait()
"""
    path, new = tmp_path / "run.jsonl", tmp_path / "new.jsonl"
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program, str(path), str(new)]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout
    assert not new.exists()
    Ledger.create(new, PLAN).close()
    assert Ledger.read(new).runs
    ledger = Ledger.read(path)
    noted = {(entry.key, entry.step) for entry in ledger.runs[ledger.run].seen}
    lives = out.splitlines()
    assert len(lives) == 2
    for line in lives:
        life, *steps = line.split()
        assert steps and {(life, int(step.strip("b'"))) for step in steps} <= noted
    assert ledger.releases().total() >= len(noted)


def test_the_line_is_on_the_disk_when_record_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (real(file), synced.append(path.exists() and path.read_bytes())))
    with Ledger.create(path, PLAN) as ledger:
        for step in range(3):
            note(ledger, step)
            assert synced[-1] == path.read_bytes() and synced[-1].endswith(b"}\n") and len(synced) == step + 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("name", ["fsync", "link"])
def test_a_ledger_that_could_not_be_begun_is_not_there(path, monkeypatch, error, name):
    """An empty file would be refused by `open` and by `create`."""

    def fail(*_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(os, name, fail)
        if name == "link" and isinstance(error, OSError):
            broken.setattr(os, "rename", fail)
        if isinstance(error, OSError):
            assert "No space left on device" in refusal(Ledger.create, path, PLAN)
        else:
            with pytest.raises(KeyboardInterrupt):
                Ledger.create(path, PLAN)
    assert not list(path.parent.iterdir())
    Ledger.create(path, PLAN).close()
    assert [*path.parent.iterdir()] == [path] and Ledger.read(path).runs


def test_no_ledger_takes_the_place_of_another(path, monkeypatch):
    """A file that was created meanwhile is not replaced either, with hard links or without."""
    real = os.link

    def meanwhile(old, new):
        path.write_text("another")
        real(old, new)

    def none(old, new):
        path.write_text("another")
        raise OSError(95, "Operation not supported")

    for link in (meanwhile, none):
        monkeypatch.setattr(os, "link", link)
        assert "is there already" in refusal(Ledger.create, path, PLAN)
        assert path.read_text() == "another" and [*path.parent.iterdir()] == [path]
        path.unlink()


@pytest.mark.parametrize("name", ["x" * 255, "\N{GREEK SMALL LETTER DELTA}" * 127])
def test_a_ledger_may_have_the_longest_name(path, name):
    place = path.with_name(name)
    Ledger.create(place, PLAN).close()
    assert [*path.parent.iterdir()] == [place] and Ledger.read(place).runs


def test_a_file_system_without_hard_links(path, monkeypatch):
    def none(old, new):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    with Ledger.create(path, PLAN) as ledger:
        note(ledger, 0)
    assert [*path.parent.iterdir()] == [path] and Ledger.read(path).releases().total() == 1


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


@pytest.mark.parametrize("at", ["in fsync", "when it is on the disk", "when it is counted"])
def test_after_an_interrupt_in_the_middle_of_an_entry_the_ledger_is_opened_again(path, monkeypatch, at):
    """In a notebook the open ledger outlives the run: the checksum of its next line may not fit the line before."""
    places = {
        "in fsync": (os, "fsync"),
        "when it is on the disk": (LedgerFile, "append"),
        "when it is counted": (Spent, "add"),
    }
    owner, name = places[at]
    real = getattr(owner, name)

    def interrupted(*given):
        real(*given)
        raise KeyboardInterrupt

    with Ledger.create(path, PLAN) as ledger:
        note(ledger, 0)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            note(ledger, 1)
        assert "is not open for writing; use Ledger.open" in refusal(note, ledger, 2)
    with Ledger.open(path) as ledger:
        note(ledger, 2)
        assert ledger.runs[ledger.run].numbers == {0, 1, 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
def test_a_fork_cannot_write_into_the_ledger_that_it_shares(path):
    """Two processes with one open file, and one place in it, would write over each other's lines."""
    program = """
import os, sys
from jaxacct.training import Ledger, Plan
plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, steps=9, noise_multiplier=1.0)
ledger = Ledger.create(sys.argv[1], plan)
if os.fork() == 0:
    try:
        ledger.record(0, "child", "b", 1.0, 1.0)
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
ledger.record(0, "parent", "b", 1.0, 1.0)
"""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", program, str(path)]
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout
    assert told.count("\n") == 1 and "was opened by another process, of which this one is a fork; write there" in told
    ledger = Ledger.read(path)
    assert [entry.key for entry in ledger.runs[ledger.run].seen] == ["parent"]


def test_a_last_line_cut_off_anywhere_counts_at_its_worst(path):
    whole = written(path)
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start + 1, len(whole)):
        path.write_bytes(whole[:end])
        worst = 0.01 + 2 / 16 if end < len(whole) - 1 else 0.02 + 1 / 16  # a line that lacks only its newline is whole
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
    for start in (
        whole[:100],
        b"{",
        b"",
    ):  # a file of another kind, or a copy that is not whole: neither may be deleted
        path.write_bytes(start)
        said = refusal(Ledger.open, path)
        assert "is no ledger, or its first line was cut off" in said or "is empty" in said
        assert "restore" in said and "delete" not in said


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


def test_a_ledger_is_its_owners_alone(path):
    before = os.umask(0o000)
    try:
        Ledger.create(path, PLAN).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_mark_holds_of_what_goes_on_from_it_alone(path, tmp_path):
    with Ledger.create(path, PLAN, run="r") as ledger:
        note(ledger, 0)
        early = path.read_bytes()
        note(ledger, 1)
        mark = ledger.mark()
        note(ledger, 2)
        ledger.begin(PLAN, "s")
    Ledger.read(path).require(mark)
    other = tmp_path / "other"
    other.write_bytes(early)
    assert "has 2 lines, but 3 were noted" in refusal(Ledger.read(other).require, mark)
    with Ledger.open(other) as ledger:
        note(ledger, 1, noise=9.0)
        assert "is another ledger" in refusal(ledger.require, mark)
    assert "is another ledger" in refusal(Ledger.read(path).require, mark._replace(lines=0))
    assert "is another ledger" in refusal(Ledger.read(path).require, mark._replace(run="t"))


def test_a_run_name_that_was_cut_off_in_an_escape_is_read(path):
    whole = written(path)
    path.write_bytes(whole + b'{"kind": "step", "run": "\\x", "st')
    assert Ledger.read(path).runs["r"].torn == 1
