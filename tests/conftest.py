"""Fixtures and settings of all tests: programs are compiled only once, and in the quick run with less effort."""

import csv
import gc
import os
import pathlib
import shutil
import tempfile

import hypothesis
import numpy as np
import pytest
from thinned import DOCTESTS, THINNED

hypothesis.settings.register_profile(
    "jaxacct",
    hypothesis.settings(),  # new examples in each run, but always the same ones under CI
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a busy machine is no fault of a test
)
hypothesis.settings.load_profile("jaxacct")

FOLDER = pytest.StashKey[str]()
QUICKLY = "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
"""For XLA: its plain emitters compile in half the time of those for fused loops, which are the default.

The plain emitters read uint8 indices above 127 as negative, so a test of such indices asks for the default.
"""
EXAMPLES = 4, 3
"""The quick run draws a quarter of a property's examples, and at least three; the slow run draws all of them."""
LARGEST_CACHE = 2**28
"""Bytes of JAX's own cache that a run may begin with."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """One folder of compiled programs for all workers and files, and for later runs; the user's own is left alone.

    Compiling takes most of the time, so each test and worker loads what another has compiled.  The library keeps the
    programs of the accounting kernels; JAX's own cache keeps all others, such as training steps.
    """
    if not hasattr(config, "workerinput"):
        if hasattr(config, "cache"):  # under .pytest_cache
            folder = str(config.cache.mkdir("jaxacct-programs"))
        else:
            folder = config.stash[FOLDER] = tempfile.mkdtemp(prefix="jaxacct-tests-")
        os.chmod(folder, 0o700)
        of_jax = pathlib.Path(folder, "jax")
        if sum(file.stat().st_size for file in of_jax.glob("*")) > LARGEST_CACHE:
            shutil.rmtree(of_jax)
        # workers and other processes inherit these
        os.environ["JAXACCT_CACHE_DIR"] = os.path.join(folder, "kernels")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(of_jax)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test begins compiles the package
        if config.getoption("numprocesses", None):  # rewriting asserts is half of each worker's collection time
            os.environ["PYTEST_ADDOPTS"] = f"--assert=plain {os.environ.get('PYTEST_ADDOPTS', '')}"
        if config.option.markexpr != "slow":  # the slow run tests programs as users have them
            os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
            os.environ.setdefault("XLA_FLAGS", QUICKLY)
    gc.set_threshold(200_000, 50, 50)  # tracing makes millions of objects that stay


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow two in three cases of the tests that `thinned.py` lists, and all doctests that it lists.

    The quick run draws fewer examples of each property; the slow run draws all of them.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    properties = {}
    for item in items:
        if hypothesis.is_hypothesis_test(test := getattr(item, "obj", None)):
            if config.option.markexpr == "slow":
                item.add_marker("slow")
            properties[test] = None
        if item.name in DOCTESTS:
            item.add_marker("slow")
        name = getattr(item, "originalname", None)
        if name in THINNED.get(item.path.stem, ()):
            cases.setdefault((item.path.stem, name), []).append(item)
    for group in cases.values():
        for place, item in enumerate(group):
            # Keep one case in three; in a group of six or more the place of this case changes from three to three, so
            # that all values of an inner loop over three values occur.
            shift = place // 3 if len(group) > 5 else 0
            if (place + shift) % 3:
                item.add_marker("slow")
    if config.option.markexpr == "not slow":
        for test in properties:
            given = test._hypothesis_internal_use_settings  # settings can be given to a test only once
            part, least = EXAMPLES
            fewer = min(given.max_examples, max(least, given.max_examples // part))
            test._hypothesis_internal_use_settings = hypothesis.settings(given, max_examples=fewer)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests: looking for them takes as long as finding the tests."""
    return [found for found in (yield) if type(found).__name__ != "DoctestModule"]


def pytest_collection_finish():
    gc.freeze()  # what was imported stays, and need not be looked at again


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if exitstatus == pytest.ExitCode.TESTS_FAILED and config.getoption("numprocesses", None):
        terminalreporter.write_line("Workers do not show the values in asserts; `python -m pytest --lf` does.")


def pytest_unconfigure(config):
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


@pytest.fixture(scope="module")
def without_cache_of_jax():
    """JAX's own cache is off, here and in child processes: for tests of what is compiled and what the library keeps."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_COMPILATION_CACHE_DIR")
        before = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def dp_sgd_table() -> dict[str, np.ndarray]:
    """Columns of tests/data/dp_sgd.csv, computed elsewhere and correct to 2e-7 relative."""
    path = pathlib.Path(__file__).parent / "data" / "dp_sgd.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


@pytest.fixture
def still_steps(monkeypatch):
    """Steps that move nothing, compiled in no time, for tests of counts that do not depend on the steps' outputs."""
    _steps_are(monkeypatch, "still")


@pytest.fixture
def keyed_steps(monkeypatch):
    """Steps that move parameters by their keys, compiled in no time."""
    _steps_are(monkeypatch, "keyed")


def _steps_are(monkeypatch, name):
    import training_runs

    from jaxacct.training.sharding import placement

    monkeypatch.setattr(training_runs, "_FIRST", {})
    monkeypatch.setattr(placement, "private_step", lambda rule: getattr(training_runs, name))


_ANSWERS = {}
OF_ROWS = "test_training_apart", "test_training_mixing"
"""Files that ask whether a change of one row changes another row's result."""


@pytest.fixture(autouse=True)
def asked_once(request):
    """Compute each epsilon once in tests of training, where plans, ledgers and states ask for the same ones.

    Except in OF_ROWS, the quick run omits the check that examples are kept apart, which compiles each loss again.
    """
    if not request.path.stem.startswith(("test_training_", "test_tuning_", "test_audit_")):
        yield
        return
    from jaxacct.accounting import account

    real = account.epsilon

    def epsilon(mechanism, delta, **settings):
        try:
            key = mechanism, delta, *sorted(settings.items())
            if key not in _ANSWERS:
                _ANSWERS[key] = real(mechanism, delta, **settings)
        except TypeError:  # arrays are no keys
            return real(mechanism, delta, **settings)
        return _ANSWERS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(account, "epsilon", epsilon)
        if request.config.option.markexpr != "slow" and request.path.stem not in OF_ROWS:
            patch.setattr("jaxacct.training.clipping.examples_apart._rows_stay", lambda *given: True)
        yield


@pytest.fixture
def coarse_pairs(monkeypatch):
    """Profiles of selections have 20 points, not 160, and of tunings 12, not 48: looser bounds at less cost."""
    from jaxacct.selection import any_selection
    from jaxacct.tuning import private_score

    monkeypatch.setattr(private_score, "PROFILE_POINTS", 12)
    monkeypatch.setattr(any_selection, "COMPOSED_POINTS", 20)
    any_selection._pair_of.cache_clear()
    yield
    any_selection._pair_of.cache_clear()


@pytest.fixture
def path(tmp_path):
    """Where a ledger goes."""
    return tmp_path / "run.jsonl"
