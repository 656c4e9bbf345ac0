"""The tuning audit with few games: lower bounds stay below the claims, and those of three strong attacks are large."""

import csv
import importlib.util
import pathlib

import pytest

pytest.importorskip("sklearn")
PATH = pathlib.Path(__file__).parents[1] / "examples" / "tuning_audit" / "tuning_audit.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("tuning_audit", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_lower_bounds_are_below_what_holds(example, tmp_path):
    pytest.importorskip("matplotlib")
    rows = example.run((4.0,), 100, 500_000, progress=False)
    assert len(rows[4.0]) == 26
    for row in rows[4.0]:
        claims = {claim.name: claim.epsilon for claim in row.claims}
        assert row.found.epsilon <= claims[example.OURS] < claims["profile (Koskela et al.)"]
        assert claims[example.ONE_RUN] < claims[example.ALGORITHM_3] < claims[example.OURS]
    found = {(row.name, row.found.method): row.found.epsilon for row in rows[4.0]}
    assert found["ETCV, gradient, proxy", "gaussian_fit"] > 1.0
    assert found["reduced game, score x", "clopper_pearson"] > 3.0
    assert found["reduced game, worst score", "clopper_pearson"] > 2.0
    example.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len(list(example.table3(rows))) == 2


def test_winners_are_the_best_of_their_group(example):
    import numpy as np

    drawn = {"proxy": np.arange(6.0), "score": np.array([0.0, 2.0, 1.0, 5.0, 5.0, -1.0])}
    proxy, score = example.best_of(np.array([3, 1, 2]), drawn, "score")
    assert proxy.tolist() == [1.0, 3.0, 4.0] and score.tolist() == [2.0, 5.0, 5.0]


def test_saved_results_hold(example):
    """In the saved results no lower bound exceeds a certified epsilon of the tuning."""
    with (PATH.parent / "tuning_audit.csv").open() as file:
        records = list(csv.DictReader(file))
    assert len(records) == 3 * 26 * 5
    for record in records:
        claimed = record["claim"] not in (example.ONE_RUN, example.ALGORITHM_3)
        assert record["refuted"] == str(float(record["lower_bound"]) > float(record["epsilon"]))
        assert not (claimed and record["refuted"] == "True")
