"""Shared data: the reference table of the Poisson sampled Gaussian; and programs compiled once, or quickly."""

import csv
import gc
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest

from jaxacct.cli.executable_cache import ExecutableCache
from jaxacct.engines import programs

FOLDER = pytest.StashKey[str]()


def pytest_configure(config):
    """One folder of compiled programs for all workers of a run, and for no other run.

    Tracing and compiling are most of the time: what one worker has compiled the others load.
    """
    if hasattr(config, "workerinput"):
        folder = config.workerinput["programs"]
    else:
        folder = config.stash[FOLDER] = tempfile.mkdtemp(prefix="jaxacct-tests-")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    programs.keep_on(ExecutableCache(pathlib.Path(folder)))
    gc.set_threshold(50_000, 20, 20)  # tracing makes millions of objects that stay


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["programs"] = node.config.stash[FOLDER]


def pytest_unconfigure(config):
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


@pytest.fixture(scope="session")
def dp_sgd_table() -> dict[str, np.ndarray]:
    """Columns of tests/data/dp_sgd.csv, computed elsewhere and correct to 2e-7 relative."""
    path = pathlib.Path(__file__).parent / "data" / "dp_sgd.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


@pytest.fixture
def quick():
    """A middling batch by the programs of small ones, whose compilation would take most of the test."""
    with programs.alike(True):
        yield


@pytest.fixture
def path(tmp_path):
    """Where a ledger goes."""
    return tmp_path / "run.jsonl"
