"""Programs kept between processes: soundness of the folder and of each file, its size, and what users see of it."""

import collections
import contextlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxacct as ja
from jaxacct import cli
from jaxacct.calibration import dp_sgd_search
from jaxacct.cli import warm
from jaxacct.core import progress
from jaxacct.engines import backend, contour, programs

pytestmark = pytest.mark.usefixtures("without_cache_of_jax")

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path)}


def half(x, scale):
    """A kernel of one line."""
    return (0.5 * scale * x,)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of programs."""
    chosen = tmp_path / "programs"
    monkeypatch.setenv("JAXACCT_CACHE_DIR", str(chosen))
    yield chosen
    backend.program.cache_clear()


def answer(values=3, chunk=128):
    """Return values of the one-line kernel with no program in memory. Each chunk size is a program of its own."""
    backend.program.cache_clear()
    (out,) = backend.in_chunks(backend.program(half, scale=3), chunk, (np.arange(float(values)),), values)
    return out.tolist()


def kept(folder):
    return sorted(folder.glob("*.program"))


@pytest.fixture
def compilations(monkeypatch):
    """A list with one entry for each compilation."""
    done, compile = [], programs._compile

    def counted(*arguments):
        done.append(arguments)
        return compile(*arguments)

    monkeypatch.setattr(programs, "_compile", counted)
    return done


# Keeping and loading


def test_a_kept_program_is_not_compiled_again(folder, compilations):
    assert answer() == answer() == [0.0, 1.5, 3.0]
    assert len(compilations) == len(kept(folder)) == 1


def test_the_folder_and_its_files_are_for_this_user_alone(folder):
    answer()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *kept(folder))]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign", "sound digest of nonsense", "renamed"])
def test_a_damaged_program_is_ignored_and_written_anew(folder, compilations, damage):
    answer()
    (path,) = kept(folder)
    sound = path.read_bytes()
    nonsense = b"not an executable"
    renamed = sound[32:]
    content = {
        "cut": sound[:-100],
        "changed": sound[:-1] + bytes([sound[-1] ^ 1]),
        "empty": b"",
        "foreign": b"something else altogether" * 10,
        "sound digest of nonsense": programs._digest(path.name, nonsense) + nonsense,
        "renamed": programs._digest("0" * 64 + ".program", renamed) + renamed,
    }
    path.write_bytes(content[damage])
    assert answer() == [0.0, 1.5, 3.0]
    # the file holds the program's serial number in its process, so the length differs by a few bytes each time
    assert len(compilations) == 2 and abs(len(path.read_bytes()) - len(sound)) < 64 < len(sound)
    assert path.read_bytes() != content[damage]
    assert answer() == [0.0, 1.5, 3.0] and len(compilations) == 2


def test_a_program_that_loads_but_does_not_run_is_compiled_anew(folder, compilations, monkeypatch):
    def run(*_):
        raise jax.errors.JaxRuntimeError("NOT_FOUND: Function add_concatenate_fusion not found (type id: 1)")

    monkeypatch.setattr(programs, "load", lambda *_: run)
    assert answer() == [0.0, 1.5, 3.0] and len(compilations) == len(kept(folder)) == 1


@pytest.mark.parametrize("works", [True, False])
def test_what_came_from_the_cache_of_jax_is_kept_only_if_it_works(folder, tmp_path, monkeypatch, works):
    """XLA omits the functions when it serialises a program that it had loaded. Only running the result shows that."""
    inner = programs._works
    monkeypatch.setattr(programs, "_works", lambda *given: works and inner(*given))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of jax"))
    try:
        assert answer() == [0.0, 1.5, 3.0] and len(kept(folder)) == works
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()  # else JAX would go on to use that folder for what later tests compile


@pytest.mark.parametrize("what", ["version", "environment", "setting", "label", "sources", "processor"])
def test_programs_of_other_sources_versions_and_machines_are_not_looked_at(tmp_path, monkeypatch, what):
    device = jax.devices()[0]
    before = programs.path_of(tmp_path, "x", device)
    assert before == programs.path_of(tmp_path, "x", device)
    label, setting = "x", contextlib.nullcontext()
    if what == "version":
        monkeypatch.setattr("jaxacct.__version__", "0.0.0")
    elif what == "environment":
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true")
    elif what == "setting":
        setting = jax.default_matmul_precision("bfloat16")
    elif what == "label":
        label = "y"
    elif what == "sources":
        monkeypatch.setattr(programs, "_sources", lambda: "others")
    else:
        monkeypatch.setattr(programs, "_machine", lambda: ("another",))
    with setting:
        assert programs.path_of(tmp_path, label, device) != before


def test_where_the_cache_of_jax_is_makes_no_difference(tmp_path, monkeypatch):
    device = jax.devices()[0]
    before = programs.path_of(tmp_path, "x", device)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert programs.path_of(tmp_path, "x", device) == before


def test_functions_of_other_packages_are_not_kept(folder):
    class Ours(dict):
        __module__ = "jaxacct.selection"

    class Theirs(dict):
        __module__ = "notebook"

    for kind in (Ours, Theirs):
        jax.tree_util.register_pytree_node(kind, lambda x: (list(x.values()), tuple(x)), lambda k, v: {k[0]: v[0]})
    double = backend.Compiled(lambda law: 2 * law["x"], None, "double")
    for kind, count in ((Theirs, 0), (Ours, 1)):
        (out,) = double(kind(x=np.ones(3)))
        assert np.asarray(out).tolist() == [2.0, 2.0, 2.0] and len(list(folder.glob("*.program"))) == count


# Who may write


def test_another_users_program_is_ignored(folder, compilations, monkeypatch):
    answer()
    monkeypatch.setattr(programs, "_ours", lambda status: stat.S_ISDIR(status.st_mode))
    assert answer() == [0.0, 1.5, 3.0] and len(compilations) == 2


def test_a_program_that_others_may_write_is_ignored(folder, compilations):
    answer()
    (path,) = kept(folder)
    path.chmod(0o620)
    answer()
    assert len(compilations) == 2 and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_not_used(folder, compilations, mode):
    folder.mkdir()
    folder.chmod(mode)
    assert answer() == answer() == [0.0, 1.5, 3.0]
    info = ja.cache_info()
    assert len(compilations) == 2 and not kept(folder) and not info.used and "written by others" in info.reason
    assert ja.clear_cache() == 0


def test_a_folder_of_another_user_is_not_used(folder, compilations, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert answer() == [0.0, 1.5, 3.0] and not kept(folder)
    assert "another user" in ja.cache_info().reason


def test_a_folder_that_cannot_be_written_is_no_obstacle(folder, compilations, monkeypatch):
    """The tests may run as a user who may write everywhere. So the test itself raises the system's error."""

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    answer()
    monkeypatch.setattr(programs.tempfile, "mkstemp", refused)
    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert answer() == [0.0, 1.5, 3.0] and len(compilations) == 1
    assert answer(chunk=16) == [0.0, 1.5, 3.0] and len(kept(folder)) == 1
    info = ja.cache_info()
    assert info.used and "only be read" in info.reason


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXACCT_CACHE_DIR", str(tmp_path / "file" / "programs"))
    assert answer() == [0.0, 1.5, 3.0]
    assert not ja.cache_info().used and ja.cache_info().reason


def test_a_full_disk_leaves_nothing_half_written(folder, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", lambda handle, mode: Full(handle, mode))
    assert answer() == [0.0, 1.5, 3.0] and list(folder.iterdir()) == []


# Size


def test_what_was_unused_for_longest_goes_first(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    for age, name in enumerate("abcd"):
        path = folder / f"{name}.program"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    programs.trim(folder, 250)
    assert [path.name for path in kept(folder)] == ["a.program", "b.program"]


def test_loading_a_program_counts_as_use(folder, monkeypatch):
    answer(), answer(chunk=16)
    for path in kept(folder):
        os.utime(path, (1e9, 1e9))
    answer()
    young = [path for path in kept(folder) if path.stat().st_mtime > 2e9 or time.time() - path.stat().st_mtime < 600]
    assert len(young) == 1
    monkeypatch.setattr(programs, "LIMIT_BYTES", young[0].stat().st_size)
    programs.trim(folder)
    assert kept(folder) == young


def test_the_folder_stays_below_its_limit(folder, monkeypatch):
    monkeypatch.setattr(programs, "LIMIT_BYTES", 10)
    assert answer() == [0.0, 1.5, 3.0] and not kept(folder)


def test_what_a_process_left_unfinished_is_removed_in_time(folder):
    folder.mkdir(mode=0o700)
    old, new = (folder / f"{programs.TEMPORARY}{name}" for name in ("old", "new"))
    old.write_bytes(b"half"), new.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    answer()
    assert new.exists() and not old.exists()


# Several processes


def test_two_processes_at_once(folder):
    """This process begins when the other one says that it is ready: both then want the same program."""
    code = (
        "import numpy as np\nimport jaxacct.engines.backend as backend\nimport jaxacct as ja\n"
        "def third(x, scale):\n    return (x * scale / 3,)\n"
        "program = backend.program(third, scale=1)\n"
        "def run():\n    return backend.in_chunks(program, 4, (np.arange(4.0),), 4)[0].tolist()\n"
    )
    here = {"__name__": "__main__"}
    exec(code, here)
    before = ja.cache_info()
    code += "print('ready', flush=True)\nout, info = run(), ja.cache_info()\n"
    code += "print(out, info.loaded + info.compiled, info.programs)\n"
    environment = os.environ | ENVIRONMENT
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        out, info = here["run"](), ja.cache_info()
        assert other.communicate(timeout=300)[0] == f"{(np.arange(4.0) / 3).tolist()} 1 1\n"
    assert out == (np.arange(4.0) / 3).tolist() and len(list(folder.iterdir())) == 1
    assert info.loaded + info.compiled == before.loaded + before.compiled + 1


def test_threads_share_one_compilation(folder, compilations):
    backend.program.cache_clear()
    (out,) = backend.in_chunks(backend.program(half, scale=5), 4, (np.arange(64.0),), 64)
    assert out.tolist() == (2.5 * np.arange(64.0)).tolist() and len(compilations) == 1


def test_a_program_loaded_by_several_threads_gives_the_bits_of_a_compiled_one(folder):
    def waves(x, scale):
        return (jax.numpy.sin(scale * x) / 3, jax.lax.fori_loop(0, 5, lambda i, y: jax.numpy.exp(-y), x))

    x, found = np.linspace(0.0, 1.0, 640), []
    for _ in range(2):
        backend.program.cache_clear()
        found.append(backend.in_chunks(backend.program(waves, scale=7), 16, (x,), 640))
    assert np.array_equal(found[0], found[1]) and len(kept(folder)) == 1


# What users see


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    assert programs.directory() is None
    monkeypatch.setenv("JAXACCT_CACHE_DIR", str(tmp_path / "mine"))
    assert programs.directory() == tmp_path / "mine"
    monkeypatch.delenv("JAXACCT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert programs.directory() == tmp_path / "jaxacct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert programs.directory().parts[-2:] == (".cache", "jaxacct")


def test_an_empty_variable_turns_it_off(monkeypatch, tmp_path, compilations):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer(), answer()
    info = ja.cache_info()
    assert len(compilations) == 2 and list(tmp_path.iterdir()) == []
    assert (info.folder, info.used, info.programs) == (None, False, 0) and "JAXACCT_CACHE_DIR" in info.reason


def test_cache_info_counts_and_clear_cache_removes(folder):
    before = ja.cache_info()
    assert (before.folder, before.used, before.reason, before.programs) == (folder, True, "", 0)
    answer(), answer()
    after = ja.cache_info()
    assert (after.programs, after.bytes) == (1, kept(folder)[0].stat().st_size)
    assert after.compiled - before.compiled == after.saved - before.saved == after.loaded - before.loaded == 1
    assert after.compile_seconds > before.compile_seconds and after.load_seconds > before.load_seconds
    assert ja.clear_cache() == 1 and ja.cache_info().programs == 0 and ja.clear_cache() == 0


@pytest.mark.slow  # test_cold_start.py asks through the command, in a process too
def test_nothing_is_made_before_something_is_compiled(tmp_path):
    environment = os.environ | ENVIRONMENT | {"JAXACCT_CACHE_DIR": str(tmp_path / "programs")}
    code = "import jaxacct as ja; assert ja.cache_info().used; print(ja.epsilon(ja.dp_sgd(2.0, 1.0, 1), 1e-5).engine)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


# Compiling ahead


def test_warm_compiles_what_the_same_question_then_loads(folder, monkeypatch, capsys):
    monkeypatch.setattr(warm, "questions", lambda: [lambda: ja.epsilon(ja.dp_sgd(1.0, 0.01, 10_000), 1e-5)])
    monkeypatch.setattr(programs, "note_warm", lambda: None)
    monkeypatch.setattr(programs, "_once", threading.Lock())
    backend.program.cache_clear()
    assert cli.main(["warm", "--for", "sweep", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(folder) and told["programs"] == len(kept(folder)) >= 1
    compiled = ja.cache_info().compiled
    backend.program.cache_clear()
    run = ja.dp_sgd([1.5, 2.0, 4.0], [0.1, 0.02, 0.05], 2000)  # the same program answers, and NumPy says the same
    by_numpy, by_xla = (ja.epsilon(run, 1e-6, backend=name) for name in ("numpy", "xla"))
    assert ja.cache_info().compiled == compiled and by_numpy.status.tolist() == by_xla.status.tolist() == ["ok"] * 3
    np.testing.assert_allclose([by_xla.lower, by_xla.upper], [by_numpy.lower, by_numpy.upper], rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_warm_reaches_every_rung_with_every_kernel(monkeypatch):
    asked, evaluate = set(), backend.evaluate

    def listed(kernel, arguments, size, chunk, **static):
        asked.add((kernel, static["points"], static["count"]))
        return evaluate(kernel, arguments, size, chunk, **static)

    for module in (contour, dp_sgd_search):
        monkeypatch.setattr(module, "evaluate", listed)
    for question in warm.questions():
        question()
    rungs, solved = len(contour.LADDER), len(dp_sgd_search.PLAIN)
    lasting = sum(rung.split and rung.chunk > 1 for rung in contour.LADDER)
    # The terms count kernels for epsilon and delta, for starts of calibrations, and for those on the split contour.
    assert len(asked) == 2 * rungs + solved + lasting


@pytest.mark.parametrize(
    ("arguments", "cache", "words"),
    [(["--for", "nothing"], None, "use one of 'sweep', 'training', 'all'"), ([], "", "JAXACCT_CACHE_DIR is empty")],
)
def test_warm_refuses_in_one_line(folder, monkeypatch, capsys, arguments, cache, words):
    if cache is not None:
        monkeypatch.setenv("JAXACCT_CACHE_DIR", cache)
    assert cli.main(["warm", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# The line that says that programs are being compiled


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal as standard error, in a process that has compiled nothing; the line is due at once."""
    shown = Terminal()
    system = types.SimpleNamespace(stderr=shown, modules=sys.modules)  # pytest replaces sys.stderr before the test
    monkeypatch.setattr(progress, "sys", system)
    monkeypatch.setattr(progress, "_open", collections.deque(maxlen=1))
    monkeypatch.setattr(programs, "_once", threading.Lock())
    monkeypatch.setattr(programs, "compiling", programs.Clock())
    monkeypatch.setattr(programs, "NOTICE_SECONDS", 0.01)
    monkeypatch.delenv("JAXACCT_QUIET", raising=False)
    return shown


def wait_for(shown, words):
    """Compile until the words stand on the terminal."""
    with programs.announced():
        end = time.monotonic() + 30.0
        while words not in shown.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        return shown.getvalue()


def test_the_line_appears_while_compiling_and_once(folder, terminal):
    said = wait_for(terminal, "\n")
    assert said.startswith("jaxacct: compiling kernels for this machine (once; kept in ") and str(folder) in said
    assert "jaxacct warm" in said and said.count("\n") == 1
    with programs.announced():
        time.sleep(0.1)
    assert terminal.getvalue() == said


def test_the_line_says_where_nothing_is_kept(monkeypatch, terminal):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    assert "in each process: JAXACCT_CACHE_DIR is empty" in wait_for(terminal, "\n")


@pytest.mark.parametrize("how", ["quiet", "pipe", "soon done", "warm"])
def test_no_line(folder, monkeypatch, terminal, how):
    if how == "quiet":
        monkeypatch.setenv("JAXACCT_QUIET", "1")
    elif how == "pipe":
        progress.sys.stderr = io.StringIO()
    elif how == "soon done":
        monkeypatch.setattr(programs, "NOTICE_SECONDS", 600.0)
    else:
        programs.say_nothing()
    with programs.announced():
        time.sleep(0.1)
    assert terminal.getvalue() == progress.sys.stderr.getvalue() == ""


def test_many_short_compilations_add_up(folder, monkeypatch, terminal):
    monkeypatch.setattr(programs, "NOTICE_SECONDS", 0.05)
    end = time.monotonic() + 30.0
    while "\n" not in terminal.getvalue() and time.monotonic() < end:
        with programs.announced():
            time.sleep(0.02)
    assert "compiling" in terminal.getvalue()


def test_a_notebook_is_told_too(monkeypatch, folder, terminal):
    class ZMQInteractiveShell:
        kernel = object()

    class IPython:
        get_ipython = staticmethod(ZMQInteractiveShell)

    progress.sys.stderr = shown = io.StringIO()
    assert not programs._shown()
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert "compiling" in wait_for(shown, "\n")


def test_the_line_takes_the_place_of_a_bar_and_the_bar_goes_on_below(terminal):
    bar = progress.Progress(10, True)
    bar.update(1)
    progress.say("a line")
    bar.update(2)
    bar.close()
    progress.say("another")
    lines = terminal.getvalue().split("\n")
    assert lines[0].split("\r")[-1].rstrip() == "a line" and "2/10" in lines[1] and lines[2:] == ["another", ""]


def test_seconds_of_compiling_do_not_count_for_the_rate(terminal, monkeypatch):
    clock, apart = iter([0.0, 11.0, 11.0, 11.0]), iter([3.0, 13.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    bar = progress.Progress(200, True, apart=lambda: next(apart))
    bar.update(100)
    assert "100 rows/s" in terminal.getvalue()


def test_a_clock_counts_time_in_which_some_thread_works_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(programs.time, "monotonic", lambda: now[0])
    clock = programs.Clock()
    with clock.running():
        now[0] = 1.0
        with clock.running():
            now[0] = 3.0
            assert clock.seconds == 3.0
        now[0] = 4.0
    now[0] = 9.0
    assert clock.seconds == 4.0
