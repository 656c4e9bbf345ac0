"""Interruption: whatever ends a sweep, what it had solved is kept, and going on gives the same bytes."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import refusal

from jaxacct.sweep import SweepInterrupted, run, sweep
from jaxacct.sweep.journal import MARK

GRID = {"noise_multiplier": [2.0, 4.0], "sampling_probability": 1.0, "steps": [1, 4, 9], "delta": 1e-5}
"""Gaussian throughout: answered by a formula, so nothing is compiled."""


def stop_after(monkeypatch, blocks):
    """Ctrl-C while the next block is solved."""
    solve, calls = run.solve, itertools.count()

    def interrupted(*args):
        if next(calls) == blocks:
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(run, "solve", interrupted)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The result of a sweep stopped after two of six blocks; its journal is there, the result is not."""
    out = tmp_path / "result.csv"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(SweepInterrupted):
            sweep(GRID, out=out, block=1)
    return out


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "whole.csv"
    sweep(GRID, out=path, block=1)
    return path.read_bytes()


def journal(out):
    return out.with_name(f"{out.name}.journal")


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(tmp_path, monkeypatch):
    stop_after(monkeypatch, 2)
    out = tmp_path / "result.csv"
    with pytest.raises(SweepInterrupted) as caught:
        sweep(GRID, out=out, block=1)
    assert (caught.value.done, caught.value.total, caught.value.journal) == (2, 6, journal(out))
    assert str(caught.value) == (
        f"interrupted after 2 of 6 rows, kept in {journal(out)}; continue with --resume (resume=True)"
    )
    assert journal(out).exists() and not out.exists()


def test_resuming_solves_only_the_rest_and_gives_the_same_bytes(stopped, whole, monkeypatch, capsys):
    stop_after(monkeypatch, 4)
    table = sweep(GRID, out=stopped, block=1, resume=True, progress=True)
    assert stopped.read_bytes() == whole and len(table) == 6
    assert not journal(stopped).exists() and sorted(p.name for p in stopped.parent.iterdir()) == [
        "result.csv", "whole.csv",
    ]  # fmt: skip
    shown = capsys.readouterr().err.splitlines()
    assert "2/6" in shown[0] and "rows/s" not in shown[0] and "6/6" in shown[-1]


def test_resuming_without_a_journal_begins(tmp_path, whole):
    out = tmp_path / "result.csv"
    sweep(GRID, out=out, block=1, resume=True)
    assert out.read_bytes() == whole


def test_a_journal_in_the_way_is_refused_unless_it_may_go(stopped, whole):
    message = refusal(sweep, GRID, out=stopped, block=1)
    assert "holds the rows of an interrupted run" in message and "--resume" in message and "--overwrite" in message
    sweep(GRID, out=stopped, block=1, overwrite=True)
    assert stopped.read_bytes() == whole
    assert "contradict" in refusal(sweep, GRID, out=stopped, resume=True, overwrite=True)
    assert "resume needs out" in refusal(sweep, GRID, resume=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rtol": 1e-3}, "rtol = 0.0001 instead of 0.001"),
        ({"relation": "add_one"}, "relation = 'add_or_remove_one' instead of 'add_one'"),
        ({"block": 2}, "block = 1 instead of 2"),
        ({"grid": {**GRID, "delta": 1e-6}}, "another grid"),
        ({"grid": {**GRID, "steps": [1, 4]}}, "another grid"),
    ],
)
def test_the_journal_of_another_sweep_is_refused(stopped, change, words):
    arguments = {"grid": GRID, "block": 1} | change
    before = journal(stopped).read_bytes()
    message = refusal(sweep, arguments.pop("grid"), out=stopped, resume=True, **arguments)
    assert words in message and "--overwrite" in message
    assert journal(stopped).read_bytes() == before


def test_the_journal_of_another_version_is_refused(stopped, monkeypatch):
    monkeypatch.setattr("jaxacct.__version__", "9.9.9")
    assert "jaxacct = '0.1.0' instead of '9.9.9'" in refusal(sweep, GRID, out=stopped, block=1, resume=True)


def test_whatever_is_cut_off_or_damaged_is_solved_again(stopped, whole):
    good = journal(stopped).read_bytes()
    second = good.index(MARK, 1)
    for end in (0, 3, 20, second - 1, second, second + 5, len(good) - 1):
        journal(stopped).write_bytes(good[:end])
        sweep(GRID, out=stopped, block=1, resume=True)
        assert stopped.read_bytes() == whole
    flipped = bytearray(good)
    flipped[-3] ^= 1
    journal(stopped).write_bytes(flipped)
    sweep(GRID, out=stopped, block=1, resume=True)
    assert stopped.read_bytes() == whole


def test_a_file_that_is_no_journal_is_left_alone(stopped):
    journal(stopped).write_text("my notes")
    assert "is no journal of a sweep" in refusal(sweep, GRID, out=stopped, block=1, resume=True)
    assert journal(stopped).read_text() == "my notes"


def test_a_journal_in_use_is_refused(stopped):
    fcntl = pytest.importorskip("fcntl")  # journals are locked where the system has such locks
    with journal(stopped).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing it" in refusal(sweep, GRID, out=stopped, block=1, resume=True)


def test_the_result_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    out = tmp_path / "result.csv"
    out.write_text("the earlier result")
    stop_after(monkeypatch, 3)
    with pytest.raises(SweepInterrupted):
        sweep(GRID, out=out, block=1, overwrite=True)
    assert out.read_text() == "the earlier result"


FORMULA = """
noise_multiplier = {start = 1, stop = 20, num = 60, scale = "log"}
sampling_probability = 1
steps = {start = 1, stop = 1000, num = 40, scale = "log"}
delta = [1e-5, 1e-6]
"""
SAMPLED = """
[defaults]
delta = [1e-5, 1e-7]
[[block]]
noise_multiplier = {start = 0.8, stop = 4, num = 30, scale = "log"}
sampling_probability = 0.02
steps = [2000, 4000, 8000]
[[block]]
target_epsilon = {start = 1, stop = 8, num = 20, scale = "log"}
sampling_probability = [0.01, 0.02]
steps = 4000
"""


def start(folder, out, *options):
    environment = os.environ | {"JAXACCT_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "jaxacct", "sweep", "grid.toml", "--out", out, *options]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def killed_and_resumed(folder, grid, block, kills, seed):
    """Kill a sweep with SIGKILL at random moments all along its work, and go on; returns how often it was hit."""
    (folder / "grid.toml").write_text(grid)
    whole, length = start(folder, "whole.csv", "--block", str(block)), 0
    while whole.poll() is None:
        length = max(length, size(folder / "whole.csv.journal"))
        time.sleep(0.002)
    assert whole.returncode == 0, whole.communicate()[1]
    chance, hits, written = random.Random(seed), 0, folder / "result.csv.journal"
    while True:
        process = start(folder, "result.csv", "--resume", "--block", str(block))
        if hits < kills:
            moment = length * (hits + chance.random()) / (kills + 1)
            while process.poll() is None and size(written) <= moment:
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.01))
            process.send_signal(signal.SIGKILL)
        error = process.communicate(timeout=600)[1]
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, error
            assert (folder / "result.csv").read_bytes() == (folder / "whole.csv").read_bytes()
            assert not written.exists()
            return hits
        hits += 1


def test_killed_and_resumed_gives_the_same_bytes(tmp_path):
    assert killed_and_resumed(tmp_path, FORMULA, 4, kills=3, seed=1) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "block"), [(FORMULA, 2), (SAMPLED, 5)])
def test_killed_twenty_times_and_resumed_gives_the_same_bytes(tmp_path, grid, block):
    assert killed_and_resumed(tmp_path, grid, block, kills=20, seed=2) == 20
