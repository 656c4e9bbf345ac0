"""The subset tuning experiment: its arms meet one target, its runs see what they should, its scripts run."""

import csv
import importlib
import pathlib
import sys

import numpy as np
import pytest

from jaxacct import selection
from jaxacct.tuning import Cost

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "subset_tuning"
pytest.importorskip("sklearn")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.slow
def test_plain_and_subset_runs_learn_from_the_data_they_are_given(script):
    """With little noise the winners learn. A rate found on 40 % of the data grows by 1.5 or 2.5, as the data do."""
    experiment, digits = script("subset_tuning"), script("digits")
    train, valid, test = digits.load()
    data = (tuple(a[:300] for a in train), valid, test)
    law, settings = selection.Poisson(12), [(0.5, 20, 0.05, 0.05)]
    for split, share in (("", 1.0), ("rest", 0.4), ("all", 0.4)):
        cost = Cost(law, 300, 10.0, split or "everything", share)
        arm = experiment.Arm(split, share, split, settings, cost, np.nan)
        found, rates = experiment.experiment(arm, "DP-SGD", data, [0, 1, 2])
        assert found.shape == rates.shape == (3,) and found.mean() > 0.3  # chance is .1
        growth = {"": 1.0, "rest": 1.5, "all": 2.5}[split]
        assert np.isclose(rates[:, None] / growth, experiment.RATES["DP-SGD"]).any(axis=1).all()


def test_saved_tables_are_those_of_the_readme():
    """Every saved row meets its target, with certified epsilons, and the noise is in the order that is claimed."""
    for name in ("rate_alone", "rate_epochs_sampling"):
        with (FOLDER / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            assert float(row["certified_epsilon"]) <= float(row["epsilon"]) and row["seeds"] == "10"
        noise = {(r["epsilon"], r["arm"]): float(r["noise_multiplier"]) for r in rows}
        for epsilon in {r["epsilon"] for r in rows}:
            plain = noise[epsilon, "plain, ours"]
            assert noise[epsilon, "rest, q = 0.1"] < noise[epsilon, "all, q = 0.1"] < plain
            assert plain < noise.get((epsilon, "plain, Renyi"), np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subset_tuning", "accountants"])
def test_scripts_run_quickly(name, script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--out", str(tmp_path)])
    script(name).main()
    tables = sorted(path.name for path in tmp_path.glob("*.csv"))
    assert tables == (["accountants.csv"] if name == "accountants" else ["rate_alone.csv", "rate_epochs_sampling.csv"])
    assert capsys.readouterr().out.count("\n") >= 3
