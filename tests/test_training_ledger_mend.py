"""Opening a ledger mends a cut-off line; its step counts even if the mending stops.  Non-ledgers are refused."""

import os
import resource
import sys
import warnings

import numpy as np
import pytest
from helpers import refusal
from training_cases import DELTA, FULL, PLAN, mu2, note, written
from training_runs import still_trainer

import jaxacct as ja
from jaxacct.cli import main
from jaxacct.training import Ledger, Plan
from jaxacct.training.ledger import contents
from jaxacct.training.ledger.contents import Spent, claim, fewer
from jaxacct.training.ledger.format import Run
from jaxacct.training.ledger.ledger import LedgerFile
from jaxacct.training.step.step_mechanisms import Release

WORST = 0.01 + 2 / 16
"""Sum of 1/sigma^2 if the last step of `written` is cut off: this step counts at the least noise of its run."""


def test_a_kill_anywhere_in_the_mending_forgets_no_step(tmp_path):
    """A kill during `Ledger.open` leaves the files as they are at some line of its code; each such state is tried."""
    opened = tmp_path / "opened"
    opened.mkdir()
    path = opened / "run.jsonl"
    path.write_bytes(written(tmp_path / "whole.jsonl")[:-20])
    lines, left = 0, set()

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("ledger/ledger.py", "core/files.py")):
            return None
        if event == "line":
            lines += 1
            left.add(frozenset((file.name, file.read_bytes()) for file in opened.iterdir()))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with Ledger.open(path):
            pass
    finally:
        sys.settrace(before)
    assert lines > 40 and len(left) > 1
    for number, files in enumerate(left):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files:
            (folder / name).write_bytes(content)
        with warnings.catch_warnings(action="ignore"):
            assert mu2(Ledger.read(folder / path.name)) == WORST
            with Ledger.open(folder / path.name) as ledger:
                assert mu2(ledger) == WORST


@pytest.mark.parametrize("room", [0, 1, 100, 700])
def test_a_full_disk_leaves_the_torn_line(path, room):
    """A limit on the size of files, such as `ulimit -f` sets, makes a write fail at the first byte beyond the limit."""
    whole = written(path)
    torn = whole[:-20]
    path.write_bytes(torn)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        words = refusal(Ledger.open, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in words and path.read_bytes() == torn and [*path.parent.iterdir()] == [path]
    assert mu2(Ledger.read(path)) == pytest.approx(WORST)
    with Ledger.open(path) as ledger:
        assert mu2(ledger) == pytest.approx(WORST)


@pytest.mark.parametrize("name", ["open", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stop"])
def test_a_failure_of_any_call_leaves_the_torn_line(path, monkeypatch, name, error):
    whole = written(path)
    path.write_bytes(whole[:-20])

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as broken, pytest.raises((ja.InputError, KeyboardInterrupt)):
        broken.setattr(os, name, fail)
        Ledger.open(path)
    assert path.read_bytes() == whole[:-20] and [*path.parent.iterdir()] == [path]
    assert mu2(Ledger.read(path)) == pytest.approx(WORST)


def test_a_mended_ledger_keeps_its_place_rights_links_and_lock(path, tmp_path):
    whole = written(path)
    path.write_bytes(whole[:-20])
    path.chmod(0o640)
    copy, link = tmp_path / "copy", tmp_path / "link"
    os.link(path, copy)
    link.symlink_to(path)
    with Ledger.open(link) as ledger:
        assert "another process is writing it" in refusal(Ledger.open, path)
        note(ledger, 3)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert mu2(Ledger.read(path)) == pytest.approx(WORST + 0.01)
    assert copy.read_bytes() == whole[:-20] and mu2(Ledger.read(copy)) == pytest.approx(
        WORST
    )  # another name, untouched


def test_who_waits_with_the_old_file_does_not_mend_it_again(path, monkeypatch):
    """Between the opening and the locking of the file, another process mends the ledger: the old file is refused."""
    whole = written(path)
    path.write_bytes(whole[:-20])
    hold = LedgerFile.hold

    def late(self):
        monkeypatch.setattr(LedgerFile, "hold", hold)
        with Ledger.open(path) as first:
            note(first, 7)
        hold(self)

    monkeypatch.setattr(LedgerFile, "hold", late)
    assert "was replaced while it was being opened" in refusal(Ledger.open, path)
    assert mu2(Ledger.read(path)) == pytest.approx(WORST + 0.01)


@pytest.mark.parametrize("end", range(1, 40, 3))
def test_a_line_of_what_was_cut_off_counts_when_it_is_cut_off_itself(path, end):
    """An earlier release appended a `torn` line, which a full disk then cut off in the middle."""
    whole = written(path)
    start = whole[:-1].rindex(b"\n") + 1
    torn = b'{"kind": "torn", "run": "r", "noise_multiplier": 4.0, "sampling_probability": 1.0, "sam'
    path.write_bytes(whole[:start] + torn[: len(torn) - end])
    assert mu2(Ledger.read(path)) == pytest.approx(WORST)


def test_a_fragment_may_end_within_a_character(path):
    whole = written(path)
    path.write_bytes(whole + '{"kind": "step", "run": "r\N{GREEK SMALL LETTER DELTA}'.encode()[:-1])
    worst = 0.02 + 2 / 16
    for _ in range(2):
        assert mu2(Ledger.read(path)) == pytest.approx(worst)
        with Ledger.open(path) as ledger:
            assert mu2(ledger) == pytest.approx(worst) and ledger.runs["r"].torn == 1


def mu2_of(ledger, run):
    return sum(count / release.noise_multiplier**2 for release, count in ledger.releases(run).items())


@pytest.mark.parametrize(
    "names",
    [("dear", "cheap"), ("cheap", "dear"), ("r", "r2", "r22"), ("r22", "r", "r2"), ("é", "è", "e"), ('"', "\\", "")],
)
@pytest.mark.parametrize("writer", [0, -1])
@pytest.mark.parametrize("known", ["plans", "steps"])
def test_a_cut_off_line_counts_for_every_run_that_it_can_be_of(path, names, writer, known):
    """Wherever the line is cut off: no run, and not all runs together, cost less than with the whole line."""
    noise = {name: 0.5 + number for number, name in enumerate(names)}
    plans = {name: Plan(**FULL, steps=9, noise_multiplier=sigma) for name, sigma in noise.items()}
    first, *others = names
    with Ledger.create(path, plans[first], run=first) as ledger:
        for name in others:
            ledger.begin(plans[name], run=name)
        for name in names if known == "steps" else ():
            ledger.run = name
            note(ledger, 0, noise=noise[name])
    before = path.read_bytes()
    name = names[writer]
    with Ledger.open(path, run=name) as ledger:
        note(ledger, 1, noise=noise[name])
    whole = path.read_bytes()
    of_whole = {run: mu2_of(Ledger.read(path), run) for run in names}
    start = len(before)
    head = b'{"kind": "step", "run": '
    name_ends = whole.index(b", ", start + len(head))
    for end in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        ledger = Ledger.read(path)
        assert all(mu2_of(ledger, run) >= of_whole[run] - 1e-12 for run in names), end
        counted = {run: ledger.runs[run].torn for run in names}
        assert counted[name] == 1, end
        if end > name_ends:
            assert sum(counted.values()) == 1, end
        if end <= start + len(head):
            assert sum(counted.values()) == len(names), end
        if end % 7 == 0:  # `open` writes down what `read` counted, and a second one changes nothing
            for _ in range(2):
                with Ledger.open(path) as opened:
                    assert opened.releases() == ledger.releases()
                    assert {run: opened.runs[run].torn for run in names} == counted


def test_a_step_of_the_dear_run_never_counts_for_the_cheap_one_alone(path):
    given = {"target_delta": DELTA, "dataset_size": 100, "steps": 50}
    dear = Plan(**given, sampling_probability=0.5, noise_multiplier=0.5)
    cheap = Plan(**given, sampling_probability=0.01, noise_multiplier=20.0)
    with Ledger.create(path, dear, run="dear") as ledger:
        ledger.begin(cheap, run="cheap")
    before = len(path.read_bytes())
    with Ledger.open(path, run="dear") as ledger:
        ledger.record(0, "k", "b", 0.5, 0.5)
    whole = path.read_bytes()
    least = float(Ledger.read(path).epsilon(DELTA).upper)
    assert least > 5.0
    for cut in (1, 5, 15, 24, 25, 30, 36, 45):
        path.write_bytes(whole[: before + cut])
        for run in (None, "dear"):
            assert float(Ledger.read(path).epsilon(DELTA, run=run).upper) >= least, (cut, run)
    with Ledger.open(path, run="cheap") as ledger:
        assert float(ledger.epsilon(DELTA).upper) >= least
    assert float(Ledger.read(path).epsilon(DELTA, run="dear").upper) >= least


@pytest.mark.parametrize("text", ['{"kind": "step", "run": "nobody", "step"', '{"kind": "torn", "run": "nobody"'])
def test_a_name_that_no_run_has_may_be_of_any(path, text):
    with Ledger.create(path, PLAN, run="a") as ledger:
        ledger.begin(PLAN, run="b")
    path.write_bytes(path.read_bytes() + text.encode())
    ledger = Ledger.read(path)
    assert [ledger.runs[run].torn for run in "ab"] == [1, 1]


def test_a_cut_off_line_leaves_no_room_for_the_dear_step(path):
    """The budget of the current run counts the step that a cut-off line of another run can have been."""
    dear = Plan(**FULL, steps=1, noise_multiplier=1.0)
    spent = float(dear.epsilon.upper)
    cheap = Plan(target_epsilon=0.9 * spent, **FULL, steps=5)
    with Ledger.create(path, dear, run="dear") as ledger:
        ledger.begin(cheap, run="cheap")
        assert cheap.allows(ledger, 0)
    path.write_bytes(path.read_bytes() + b'{"kind": "ste')
    with Ledger.open(path) as ledger:
        assert ledger.run == "cheap" and not cheap.allows(ledger, 0)


# What is no ledger


def test_pipes_folders_devices_and_other_files_are_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe, text = tmp_path / "pipe", tmp_path / "README.md"
    os.mkfifo(pipe)
    text.write_text("# Notes\n\nNothing.\n")
    trainer = still_trainer(PLAN)
    data = np.ones((1000, 2), np.float32)
    for given, words in (
        (str(pipe), "it is a pipe, no ledger"),
        (str(tmp_path), "it is a folder, no ledger"),
        ("/dev/zero", "it is a device, no ledger"),
        ("", "names no file"),
        (str(text), "is no ledger: it does not begin with a run"),
    ):
        for call in (Ledger.open, Ledger.read):
            assert words in refusal(call, given)
        assert words in refusal(trainer.fit, trainer.init(np.zeros(2, np.float32)), data, ledger=given, progress=False)
        for command in (["ledger", "show", given], ["verify", given], ["report", given, "--out", "page.html"]):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1, (command, error)
            assert words in error or (command[0] == "report" and text.name not in given), (command, error)
    assert sorted(tmp_path.iterdir()) == [text, pipe]


def test_many_releases_that_differ_are_bracketed(path, monkeypatch):
    """Each release is a Gaussian at rate 1, so that the sum of 1/sigma^2 gives the exact epsilon."""
    monkeypatch.setattr(contents, "MANY_RELEASES", 60)
    spent, noise = Spent(), 12.0 + np.arange(300) * 0.02
    spent.releases.update({Release("poisson", float(sigma), 1.0): 1 for sigma in noise})
    most, least = fewer(spent.releases), fewer(spent.releases, dearer=False)
    assert max(len(most), len(least)) <= 60 and most.total() == least.total() == 300
    exact = ja.epsilon(ja.Gaussian(float((noise**-2.0).sum() ** -0.5)), DELTA)
    found = claim([(spent, [Run("", "", PLAN)])], DELTA, None)
    assert float(found.lower) <= float(exact.lower) and float(exact.upper) <= float(found.upper)
    assert float(found.upper) <= 1.01 * float(exact.upper) and found.kind == "certified" and found.status == "width"
    spent.others[ja.ZCDP(0.1)] = 1  # a guarantee has no lower end, so neither has the whole
    found = claim([(spent, [Run("", "", PLAN)])], DELTA, None)
    assert (found.kind, float(found.lower)) == ("bound", 0.0) and float(found.upper) > float(exact.upper)


def test_near_releases_are_taken_together_at_their_worst():
    rng = np.random.default_rng(0)
    counts = {
        Release("poisson", float(s), float(q)): int(n)
        for s, q, n in zip(rng.uniform(1, 9, 900), rng.uniform(0, 1, 900), rng.integers(1, 5, 900), strict=True)
    } | {Release("without_replacement", float(s), 0.5): 1 for s in rng.uniform(1, 2, 9)}
    most, least = fewer(counts), fewer(counts, dearer=False)
    for sampling in ("poisson", "without_replacement"):
        of = lambda found, sampling=sampling: [
            (r.noise_multiplier, r.sampling_probability, n) for r, n in found.items() if r.sampling == sampling
        ]
        total = lambda rows: sum(n * q**2 / s**2 for s, q, n in rows)
        assert total(of(least)) <= total(of(counts)) <= total(of(most)) <= 1.5 * total(of(counts))
    assert {r.sampling_probability for r in most if r.sampling == "without_replacement"} == {0.5}


# A ledger that was used


def small(steps=8):
    plan = Plan(target_epsilon=2.0, target_delta=DELTA, dataset_size=10, sampling_probability=1.0, steps=steps)
    return still_trainer(plan), np.ones((10, 2), np.float32)


def test_the_same_script_run_twice_is_refused(path):
    """As in the README, the script keeps no checkpoints, and each run's first state has a new key."""
    trainer, data = small()
    trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=path, progress=False)
    before = path.read_bytes()
    words = refusal(trainer.fit, trainer.init(np.zeros(2, np.float32)), data, ledger=path, progress=False)
    assert "holds 8 steps of other runs; of this new run none of 8 steps fits the budget" in words
    assert "give the checkpoints= that it began with" in words and "for other data use another ledger" in words
    assert path.read_bytes() == before
    with Ledger.open(path) as ledger:
        assert words == refusal(trainer.fit, trainer.init(np.zeros(2, np.float32)), data, ledger=ledger, progress=False)
    assert path.read_bytes() == before


def test_an_interrupted_run_that_is_begun_anew_says_so(path):
    trainer, data = small()
    with Ledger.create(path, trainer.plan, run="killed") as ledger:
        for step in range(3):
            note(ledger, step, noise=trainer.plan.noise_multiplier)
    with pytest.warns(UserWarning, match="holds 3 steps of other runs.* 5 of 8 steps fit the budget") as caught:
        state = trainer.fit(trainer.init(np.zeros(2, np.float32)), data, ledger=path, progress=False)
    assert caught[0].filename == __file__ and (state.step, state.stopped) == (5, "budget")
    assert float(state.epsilon.upper) <= 2.0


def test_going_on_says_nothing(path, tmp_path):
    trainer, data = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        more = {"ledger": path, "checkpoints": tmp_path / "run", "progress": False}
        half = trainer.fit(trainer.init(np.zeros(2, np.float32)), data, callbacks=[lambda s: s.step == 4], **more)
        assert trainer.fit(trainer.init(np.zeros(2, np.float32)), data, **more).step == 8
        assert trainer.fit(trainer.init(np.zeros(2, np.float32)), data, **more).step == 8
        assert half.step == 4


def test_the_same_first_state_without_room_is_refused(path):
    """The state's run is in the ledger with other data.  No step fits, and `fit` does not return the first state."""
    trainer, data = small()
    first = trainer.init(np.zeros(2, np.float32))
    trainer.fit(first, data, ledger=path, progress=False)
    before = path.read_bytes()
    words = refusal(trainer.fit, first, data + 1.0, ledger=path, progress=False)
    assert "none of the plan's 8 steps fits the budget" in words and path.read_bytes() == before
    assert trainer.fit(first, data, ledger=path, progress=False).step == 8  # the same steps again count once
