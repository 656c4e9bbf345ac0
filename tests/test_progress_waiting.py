"""The line of a search that takes long: work goes on whatever becomes of the terminal, and nothing is left behind."""

import collections
import errno
import sys
import threading
import time
import types

import pytest

import jaxacct as ja
from jaxacct.core import progress
from jaxacct.strategies import optimise
from jaxacct.tuning.candidates import best_few


class Terminal:
    """Standard error as a terminal, which may go away."""

    text, gone = "", False

    def isatty(self):
        return True

    def write(self, text):
        self.flush()
        self.text += text

    def flush(self):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def terminal(monkeypatch):
    for name, value in (("WAIT", 0.01), ("TICK", 0.01), ("_open", collections.deque(maxlen=1))):
        monkeypatch.setattr(progress, name, value)
    found = Terminal()
    # pytest puts its own standard error in place between a fixture and its test
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=found, modules={}))
    yield found
    assert not progress._waiting.locked() and not progress._open


def until(condition):
    end = time.monotonic() + 10.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_a_terminal_that_goes_away_does_not_end_the_work(terminal):
    before = threading.active_count()
    with progress.waiting(10):
        until(lambda: "0/10" in terminal.text)
        terminal.gone = True
    assert threading.active_count() == before


def test_work_is_done_where_no_thread_can_be_started(terminal, monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with progress.waiting(10) as work:
        work.done = 1
    with pytest.raises(RuntimeError, match="mine"), progress.waiting(10):
        raise RuntimeError("mine")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_ends_the_work_takes_the_line_along(terminal, error):
    with pytest.raises(error), progress.waiting(10):
        until(lambda: progress._open)
        raise error
    assert terminal.text.endswith("\r")


def test_a_bar_that_begins_later_has_the_line_to_itself(terminal):
    with progress.waiting(10):
        until(lambda: progress._open)
        bar = progress.Progress(5, True)
        bar.update(1)
        shown = terminal.text
        time.sleep(0.1)
        assert terminal.text == shown
        bar.close()


class NoTerminal:
    """A stream without isatty. Some hosts replace standard error by such a stream."""

    def write(self, text):
        return len(text)


@pytest.mark.parametrize("stream", [None, NoTerminal()])
def test_calibration_needs_no_standard_error(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    assert ja.calibrate_noise_multiplier(1.0, 1e-5, 0.01, 1000).status == "ok"


def test_a_bar_does_not_stand_after_an_interrupt(terminal, monkeypatch):
    """A bar that stayed would hide the lines of all later searches."""

    def interrupted(numbers):
        raise KeyboardInterrupt

    bar = progress.Progress(2, True)
    bar.update(1)
    assert bar.stands
    with pytest.raises(KeyboardInterrupt):
        best_few(["a", "a"], lambda kind: interrupted, lambda result, number: 0.0, 2, 1, bar)
    assert not progress._open


def test_a_search_for_a_strategy_counts_its_steps(terminal):
    optimise.column_normalised.cache_clear()
    optimise.column_normalised(2, 4)
    assert "steps of the search for a strategy  for 0:0" in terminal.text and "[" not in terminal.text
