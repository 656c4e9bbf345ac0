"""The search for the least private value, on functions whose answer is known, and the line that tells how far it is."""

import collections
import io
import threading
import time

import numpy as np
import pytest

from jaxacct.calibration.search import Search, Start, certified_search
from jaxacct.core import progress
from jaxacct.core.bounds import Bounds


def search_of(upper, target, calls, **more):
    """A search over [0.01, 100] for functions that fall; `calls` keeps the rows of every evaluation."""

    def evaluate(rows, values):
        calls.append(rows.copy())
        ends = upper(rows, values)
        return Bounds(np.where(np.isfinite(ends), ends, 0.0), ends, ends, "certified", "ok")

    size = target.size
    limits = {"lowest": np.full(size, 0.01), "highest": np.full(size, 100.0)}
    rest = {"falls": np.full(size, True), "rtol": 1e-4, "privates_first": np.zeros(size, bool)}
    return Search(evaluate=evaluate, target=target, **(limits | rest | more))


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_a_start_whose_slope_is_wrong_is_moved_by_the_secant(wrong):
    power, target = np.linspace(0.5, 3.0, 11), np.full(11, 2.0)
    calls = []
    search = search_of(lambda rows, values: 3.0 * values ** -power[rows], target, calls)
    exact = np.log(1.5) / power
    start = Start(exact - 0.02, -wrong * target * power, np.full(11, True))
    found = certified_search(search, lambda rows: Start(*(x[rows] for x in start[:3])))
    assert np.all(found.status == "ok") and np.all(found.upper <= target)
    assert np.all(found.upper >= target * (1.0 - 0.5e-4))
    # a row takes at most six evaluations (one may only show that its value is the best), three more without a start
    assert sum(rows.size for rows in calls) <= 6 * power.size


def test_an_upper_end_that_is_not_known_gives_no_slope():
    calls = []
    known = lambda rows, values: np.where(values < 1.45, np.inf, 3.0 / values)
    search = search_of(known, np.full(1, 2.0), calls)
    found = certified_search(search, lambda rows: Start(np.log([1.4]), np.array([-2.0]), np.full(1, True)))
    assert found.status[0] == "ok" and found.value[0] == pytest.approx(1.5, rel=1e-4) and found.value[0] >= 1.5


def test_rough_brackets_lead_to_the_solution_and_only_the_last_ones_are_narrow():
    """Row 0 gets narrow brackets where it asks for them; row 1 never does, so it is judged by its rough brackets."""
    narrow, rough = [], []
    search = search_of(lambda rows, values: 3.0 / values, np.array([2.0, 0.5]), narrow)

    def roughly(rows, values, effort):
        rough.append(rows.copy())
        ends, wide = 3.0 / values * (1.0 + 0.1 * effort.rtol), rows == 1
        lower = np.where(wide, 0.0, ends * (1.0 - effort.rtol))
        status = np.where(wide, "width", "ok")
        return Bounds(lower, 0.5 * (lower + ends), ends, "certified", status, np.full(rows.size, "rough"))

    start = lambda rows: Start(np.zeros(rows.size), np.zeros(rows.size), np.zeros(rows.size, bool))
    found = certified_search(search._replace(roughly=roughly), start)
    assert found.status.tolist() == ["ok", "loose"] and np.all(found.upper <= search.target)
    assert found.value == pytest.approx([1.5, 6.0], rel=1e-3)
    assert [rows.tolist() for rows in narrow] in ([[0]], [[0], [0]])
    assert found.engine[1] == "rough" and np.all(found.upper >= search.target * (1.0 - 0.5e-4))


def test_brackets_that_stay_wide_end_the_search_early():
    """Where the upper end jumps past the target and brackets stay wide, the value is next to the jump and "loose"."""
    calls = []
    search = search_of(lambda rows, values: np.where(values < 1.4837, 2.0, 0.5), np.full(1, 1.0), calls)
    evaluate = search.evaluate

    def wide(rows, values):
        found = evaluate(rows, values)
        return Bounds(0.4 * found.upper, found.upper, found.upper, "certified", "width")

    start = Start(np.log([1.0]), np.array([-2.0]), np.full(1, True))
    found = certified_search(search._replace(evaluate=wide), lambda rows: start)
    assert found.status[0] == "loose" and 1.4837 <= found.value[0] < 1.4838
    assert len(calls) < 25


class Terminal(io.StringIO):
    def isatty(self):
        return True


def a_terminal(monkeypatch):
    """Standard error as a terminal; asked for inside a test, since pytest changes it between fixtures and tests."""
    found = Terminal()
    monkeypatch.setattr("sys.stderr", found)
    monkeypatch.setattr(progress, "_open", collections.deque(maxlen=1))
    monkeypatch.setattr(progress, "WAIT", 0.05)
    monkeypatch.setattr(progress, "TICK", 0.02)
    return found


def slow(rows, values):
    time.sleep(0.15)
    return 3.0 / values


def test_a_slow_search_says_how_far_it_is_and_takes_its_line_away(monkeypatch):
    terminal = a_terminal(monkeypatch)
    search = search_of(slow, np.array([2.0]), [])
    certified_search(search, lambda rows: Start(np.log([1.5001]), np.array([-2.0]), np.full(1, True)))
    shown = terminal.getvalue()
    assert "0/1" in shown and "for 0:00" in shown
    assert shown.endswith("\r") and shown.split("\r")[-2].strip() == ""
    assert not progress._open


def test_one_of_two_searches_at_a_time_has_a_line_and_an_error_takes_it_away(monkeypatch):
    terminal = a_terminal(monkeypatch)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), progress.waiting(2) as outer, progress.waiting(1):
        outer.done = 1
        time.sleep(0.15)
        raise KeyboardInterrupt
    shown = terminal.getvalue()
    assert "1/2" in shown and "/1 " not in shown.replace("1/2", "") and shown.endswith("\r")
    assert threading.active_count() == before and progress._waiting.acquire(blocking=False)
    progress._waiting.release()


def test_a_quick_search_shows_nothing(monkeypatch):
    terminal = a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "WAIT", 5.0)
    search = search_of(lambda rows, values: 3.0 / values, np.array([2.0]), [])
    certified_search(search, lambda rows: Start(np.log([1.5001]), np.array([-2.0]), np.full(1, True)))
    assert terminal.getvalue() == ""
