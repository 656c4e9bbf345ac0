"""The benchmark that asks each mechanism in every way finds no answer that loses. These tests run its quick part."""

import importlib.util
import pathlib

import pytest

import jaxacct as ja

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "bounds_that_lose.py"
SPEC = importlib.util.spec_from_file_location("bounds_that_lose", PATH)
BENCHMARK = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BENCHMARK)


@pytest.mark.parametrize(
    "name", [pytest.param("zCDP", marks=pytest.mark.slow), "maxima", "ReportNoisyMax", "PureDP", "Composed"]
)
def test_no_answer_loses(name):
    assert BENCHMARK.losses(quick=True, only=name) == []


def test_an_answer_that_loses_is_found(monkeypatch):
    worse = (("worse", ja.repeat(ja.Gaussian(4.0), 10)),)
    monkeypatch.setattr(BENCHMARK, "mechanisms", lambda quick: iter(worse))
    monkeypatch.setattr(BENCHMARK, "ways", lambda *_: iter([("another", lambda: 0.5)]))
    (line,) = BENCHMARK.losses(quick=True)
    assert "worse" in line and "another" in line


@pytest.mark.slow
def test_no_answer_loses_of_all_mechanisms():
    assert BENCHMARK.losses(quick=True) == []
