"""Interruption: whatever ends a sweep, what it had solved is kept, and going on gives the same bytes."""

import errno
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import refusal

from jaxacct import cli
from jaxacct.sweeps import SweepInterrupted, merge, run, sweep
from jaxacct.sweeps.journal import MARK, Journal, Settings, header, peek

GRID = {"noise_multiplier": [2.0, 4.0], "sampling_probability": 1.0, "steps": [1, 4, 9], "delta": 1e-5}
"""Gaussian throughout: answered by a formula, so nothing is compiled."""


TEXT_GRID = "noise_multiplier = [2, 4]\nsampling_probability = 1\nsteps = [1, 4, 9]\ndelta = 1e-5\n"
"""GRID as the text of a grid file."""


def stop_after(monkeypatch, blocks):
    """Make the sweep raise KeyboardInterrupt, as Ctrl-C does, while it solves block number `blocks`, counted from 0."""
    solve, calls = run.solve, itertools.count()

    def interrupted(*args):
        if next(calls) == blocks:
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(run, "solve", interrupted)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Return the path of a sweep's result. The sweep stopped after two of six blocks and left only its journal."""
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


def test_resuming_takes_the_block_from_the_journal(stopped, whole, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        sweep(GRID, out=stopped, resume=True)
    assert stopped.read_bytes() == whole
    out = stopped.with_name("sliced.csv")
    sweep(GRID, out=out, block=2, shard="2/2")
    with monkeypatch.context() as patch:
        stop_after(patch, 0)
        with pytest.raises(SweepInterrupted):
            sweep(GRID, out=out, resume=True, shard="1/2")  # slice 2/2 left a part file, which records the block size
    assert peek(journal(out.with_name(f"{out.name}.1-of-2"))).block == 2


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


def test_names_with_the_separator_do_not_make_two_sweeps_equal():
    class Named(list):
        quantity, inputs = ("epsilon", "epsilon"), {}
        name = property(tuple)

    settings = Settings(*("" for _ in Settings._fields))
    heads = [header(Named(names), (), settings, 1, (0, 1)) for names in (["a", "b\x1fc"], ["a\x1fb", "c"], ["a", "b"])]
    assert len({head.grid for head in heads}) == 3


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


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}])
def test_a_journal_in_use_is_refused(stopped, options):
    fcntl = pytest.importorskip("fcntl")  # journals are locked where the system has such locks
    before = journal(stopped).read_bytes()
    with journal(stopped).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing it" in refusal(sweep, GRID, out=stopped, block=1, **options)
    assert journal(stopped).read_bytes() == before


def test_a_second_run_beside_the_first_leaves_it_alone(tmp_path, whole, monkeypatch):
    pytest.importorskip("fcntl")
    out, solve, calls = tmp_path / "result.csv", run.solve, itertools.count()

    def beside(*args):
        if next(calls) == 2:
            for options in ({"overwrite": True}, {"resume": True}, {}):
                assert "another process is writing it" in refusal(sweep, GRID, out=out, block=1, **options)
        return solve(*args)

    monkeypatch.setattr(run, "solve", beside)
    sweep(GRID, out=out, block=1)
    assert out.read_bytes() == whole and not journal(out).exists()


def test_a_lock_on_a_name_that_is_gone_is_taken_again(tmp_path, monkeypatch):
    from jaxacct.core import files

    path, lock, calls = tmp_path / "r.journal", files.lock, itertools.count()

    def late(file, name, remedy):
        if next(calls) == 0:
            path.unlink()  # the run that had it finishes between our opening and our locking
        lock(file, name, remedy)

    monkeypatch.setattr(files, "lock", late)
    held = Journal.hold(path)
    assert path.exists() and held.fresh and next(calls) == 2
    held.close()


def test_a_result_that_is_there_is_not_written_over(tmp_path, whole):
    out = tmp_path / "result.csv"
    sweep(GRID, out=out, block=1)
    for options in ({}, {"resume": True}):
        message = refusal(sweep, GRID, out=out, **options)
        assert "result.csv: is there already" in message and "--overwrite (overwrite=True)" in message
        assert out.read_bytes() == whole and not journal(out).exists()
    out.write_text("my notes")
    assert "is there already" in refusal(sweep, GRID, out=out)
    assert out.read_text() == "my notes"
    sweep(GRID, out=out, block=1, overwrite=True)
    assert out.read_bytes() == whole


def test_a_run_that_may_replace_the_result_may_be_resumed(tmp_path, whole, monkeypatch):
    out = tmp_path / "result.csv"
    out.write_text("an earlier result")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(SweepInterrupted):
            sweep(GRID, out=out, block=1, overwrite=True)
    assert out.read_text() == "an earlier result"
    sweep(GRID, out=out, resume=True)
    assert out.read_bytes() == whole


def test_merging_does_not_write_over_a_result(tmp_path, whole):
    out = tmp_path / "result.csv"
    for shard in ("1/2", "2/2"):
        sweep(GRID, out=out, block=1, shard=shard)
    parts = [f"{out}.{i}-of-2.part" for i in (1, 2)]
    out.write_text("an earlier result")
    assert "is there already; replace it with --overwrite" in refusal(merge, parts, out)
    assert out.read_text() == "an earlier result"
    merge(parts, out, overwrite=True)
    assert out.read_bytes() == whole


@pytest.mark.parametrize("room", [0, 100, 2000])
def test_a_full_disk_is_one_line_and_what_is_solved_is_kept(tmp_path, whole, room, monkeypatch, capsys):
    resource = pytest.importorskip("resource")
    (tmp_path / "grid.toml").write_text(TEXT_GRID)
    out, limits = tmp_path / "result.csv", resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.chdir(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # no file may be longer: EFBIG
    try:
        status = cli.main(["sweep", "grid.toml", "--out", "result.csv", "--block", "1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = capsys.readouterr()
    assert (status, told.out, told.err.count("\n")) == (2, "", 1), told.err
    assert "cannot be written: File too large" in told.err and not out.exists()
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".tmp") == []
    if journal(out).exists():
        assert "rows are kept in result.csv.journal" in told.err and "--resume" in told.err
    sweep(tmp_path / "grid.toml", out=out, resume=True)
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert [row[-6:] for row in rows] == [line.split(",")[-6:] for line in whole.decode().splitlines()]


def test_a_full_disk_where_the_result_goes_keeps_every_row(tmp_path, whole, monkeypatch):
    out = tmp_path / "result.csv"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("jaxacct.core.files.os.fsync", full)
        assert "cannot be written: No space left on device" in refusal(sweep, GRID, out=out, block=1)
        patch.undo()
        patch.setattr("jaxacct.core.files.os.replace", full)
        message = refusal(sweep, GRID, out=out, block=1, overwrite=True)
    assert "6 of 6 rows are kept in" in message and "--resume" in message and not out.exists()
    stop_after(monkeypatch, 0)  # nothing is solved again
    sweep(GRID, out=out, resume=True)
    assert out.read_bytes() == whole and [p.name for p in tmp_path.glob("*.tmp")] == []


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
    """Kill a sweep with SIGKILL at random moments and resume it each time; return how many kills hit it at work."""
    (folder / "grid.toml").write_text(grid)
    sweep(folder / "grid.toml", out=folder / "whole.csv", block=block)
    length = size(folder / "whole.csv")  # the journal becomes about as long
    chance, hits, written = random.Random(seed), 0, folder / "result.csv.journal"
    for number in range(kills):
        process = start(folder, "result.csv", "--resume", "--block", str(block))
        moment = length * (number + chance.random()) / (kills + 1)
        while process.poll() is None and size(written) <= moment:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.01))
        process.send_signal(signal.SIGKILL)
        error = process.communicate(timeout=600)[1]
        assert process.returncode in (0, -signal.SIGKILL), error
        if process.returncode == 0:
            break
        hits += 1
    else:
        sweep(folder / "grid.toml", out=folder / "result.csv", block=block, resume=True)
    assert (folder / "result.csv").read_bytes() == (folder / "whole.csv").read_bytes() and not written.exists()
    return hits


def test_killed_and_resumed_gives_the_same_bytes(tmp_path):
    assert killed_and_resumed(tmp_path, FORMULA.replace("num = 60", "num = 2"), 4, kills=1, seed=1) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_terminated_it_says_how_to_go_on(tmp_path, monkeypatch, capsys, number, status):
    (tmp_path / "grid.toml").write_text(TEXT_GRID)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jaxacct", "sweep", "grid.toml", "--out", "result.csv", "--block", "1"])
    solve, calls = run.solve, itertools.count()

    def hit(*args):
        if next(calls) == 2:
            os.kill(os.getpid(), number)
        return solve(*args)

    # a shell that starts the tests in the background has interrupts ignored
    before = [(each, signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thresholds = gc.get_threshold()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(run, "solve", hit)
            assert cli.command() == status
    finally:
        for each, handler in before:
            signal.signal(each, handler)
        gc.set_threshold(*thresholds)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "2 of 6 rows, kept in result.csv.journal; continue with --resume (resume=True)" in error
    sweep("grid.toml", out="result.csv", resume=True)
    assert len((tmp_path / "result.csv").read_text().splitlines()) == 7


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "block"), [(FORMULA, 2), (SAMPLED, 5)])
def test_killed_twenty_times_and_resumed_gives_the_same_bytes(tmp_path, grid, block):
    assert killed_and_resumed(tmp_path, grid, block, kills=20, seed=2) == 20
