"""Shared data: the reference table of the Poisson sampled Gaussian; and programs compiled once, or quickly."""

import csv
import gc
import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest

FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """One folder of compiled programs for all workers and files, and for later runs; the user's own is left alone.

    Tracing and compiling are most of the time: what one worker has compiled the others load.  Programs of other sources
    are never loaded, and the folder's size is bounded.
    """
    if not hasattr(config, "workerinput"):
        if hasattr(config, "cache"):  # under .pytest_cache
            folder = str(config.cache.mkdir("jaxacct-programs"))
        else:
            folder = config.stash[FOLDER] = tempfile.mkdtemp(prefix="jaxacct-tests-")
        os.chmod(folder, 0o700)
        os.environ["JAXACCT_CACHE_DIR"] = folder  # workers and other processes inherit it
    gc.set_threshold(50_000, 20, 20)  # tracing makes millions of objects that stay


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
def path(tmp_path):
    """Where a ledger goes."""
    return tmp_path / "run.jsonl"
