"""Progress in a notebook: one line that is updated, and none for work of a moment."""

import sys
import time
import types

import pytest

from jaxacct.core import progress


class Shell:
    """A stand-in for the IPython of a kernel. It lists every message that a front end would get."""

    def __init__(self, kernel):
        self.messages, self.kernel = [], kernel

    def display(self, data, raw, display_id):
        assert raw and display_id
        self.messages.append(("display", data["text/plain"]))
        return types.SimpleNamespace(update=lambda data, raw: self.messages.append(("update", data["text/plain"])))


@pytest.fixture
def shell(monkeypatch):
    found = Shell(kernel=object())
    package = types.ModuleType("IPython")
    package.get_ipython, package.display = lambda: found, types.ModuleType("IPython.display")
    package.display.display = found.display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", package.display)
    return found


def drive(bar, clock, monkeypatch, count, step):
    for done in range(count + 1):
        monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
        bar.update(done)
        clock[0] += step
    bar.close()


def bar_at(clock, monkeypatch, count, show):
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return progress.Progress(count, show)


def test_one_line_is_shown_and_updated(shell, monkeypatch, capsys):
    clock = [100.0]
    bar = bar_at(clock, monkeypatch, 1000, None)
    drive(bar, clock, monkeypatch, 1000, 0.01)  # ten seconds
    kinds = [kind for kind, _ in shell.messages]
    assert kinds.count("display") == 1 and kinds[0] == "display" and 40 <= len(kinds) <= 51
    assert shell.messages[-1][1].startswith("[########################] 1,000/1,000")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("show", "count"), [(None, 0), (False, 0), (True, 2)])
def test_work_of_a_moment_leaves_no_line_unless_it_was_asked_for(shell, monkeypatch, show, count):
    clock = [100.0]
    drive(bar_at(clock, monkeypatch, 10, show), clock, monkeypatch, 10, 0.001)
    assert len(shell.messages) == count


def test_without_a_kernel_nothing_changes(shell, monkeypatch, capsys):
    shell.kernel = None
    clock = [100.0]
    drive(bar_at(clock, monkeypatch, 3, True), clock, monkeypatch, 3, 2.0)
    assert shell.messages == [] and capsys.readouterr().err.count("\n") == 4
    drive(bar_at(clock, monkeypatch, 3, None), clock, monkeypatch, 3, 2.0)
    assert capsys.readouterr().err == ""


@pytest.mark.slow  # a real kernel takes seconds to start
def test_a_real_kernel_keeps_one_line_and_the_forms():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = (
        "import time\nfrom jaxacct.core.progress import Progress\nbar = Progress(40, None)\n"
        "for done in range(41):\n    bar.update(done)\n    time.sleep(0.03)\nbar.close()",
        "import jaxacct as ja\nja.epsilon(ja.Gaussian([1.0, 2.0]), 1e-5)",
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (line,) = book.cells[0].outputs
    assert line["output_type"] == "display_data" and "40/40" in line["data"]["text/plain"]
    (answer,) = book.cells[1].outputs
    assert "batch of shape (2,)" in answer["data"]["text/html"] and "Bounds" in answer["data"]["text/plain"]


def test_the_line_of_a_slow_search_goes_when_it_is_done(shell, monkeypatch, capsys):
    monkeypatch.setattr(progress, "WAIT", 0.02)
    monkeypatch.setattr(progress, "TICK", 0.02)
    monkeypatch.setattr(progress, "NOTEBOOK_PAUSE", 0.0)
    with progress.waiting(7) as work:
        work.done = 3
        time.sleep(0.2)
    assert shell.messages[0][0] == "display" and "3/7" in shell.messages[0][1]
    assert shell.messages[-1] == ("update", "")
    assert capsys.readouterr() == ("", "")
