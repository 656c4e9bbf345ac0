"""Shared data: the reference table of the Poisson sampled Gaussian; and programs that compile quickly."""

import csv
import pathlib

import numpy as np
import pytest

from jaxacct.engines import programs


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
