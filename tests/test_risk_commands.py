"""`jaxacct risk`, risks in `jaxacct calibrate`, and risks as columns of a sweep."""

import json

import numpy as np
from helpers import refusal

import jaxacct as ja
from jaxacct.cli import main

FULL = ["--sampling-probability", "1", "--steps", "1"]


def test_risk_prints_its_table_and_json(capsys):
    assert main(["risk", "--noise-multiplier", "1", *FULL, "--fpr", ".01", ".001", "--prior", ".1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and lines[1].split()[:3] == ["advantage", "0.3829249", "0.3829250"]
    assert main(["risk", "--noise-multiplier", "1,2", *FULL, "--json"]) == 0
    readings = json.loads(capsys.readouterr().out)["readings"]
    assert readings[-2]["reading"] == "gdp_mu" and np.allclose(readings[-2]["upper"], [1.0, 0.5])
    assert readings[-2]["above_fpr"] == 1e-10


def test_risk_says_for_which_relation_and_at_which_rates(capsys):
    given = ["--noise-multiplier", "1", "--dataset-size", "100", "--batch-size", "20", "--epochs", "1"]
    assert main(["risk", *given, "--sampling", "shuffled", "--fpr", "0.0012345678"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "RiskTable, zero_out" and any("fpr 0.0012345678 " in line for line in lines)


def test_risk_refuses_in_one_line(capsys):
    assert main(["risk", "--noise-multiplier", "1", "--sampling-probability", "1"]) == 2
    assert capsys.readouterr().err == "jaxacct risk: steps is missing; give --steps\n"
    assert main(["risk", "--noise-multiplier", "1", *FULL, "--fpr", "2"]) == 2
    assert "fpr = 2 must be" in capsys.readouterr().err


def test_calibrate_to_a_risk(capsys):
    assert main(["calibrate", "--advantage", "0.382924922548026", *FULL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["noise_multiplier"] - 1.0) < 1e-4 and found["upper"] <= found["target_advantage"]
    assert main(["calibrate", "--tpr", ".05", "--at-fpr", ".001", *FULL]) == 0
    out = capsys.readouterr().out
    assert "tpr <= 0.0499" in out and "at fpr = 0.001 (target 0.05)" in out
    assert main(["calibrate", "--mu", "1", *FULL]) == 0
    assert "mu <= 1 where both error rates are at least 1e-10 (target 1.0)" in capsys.readouterr().out
    assert main(["calibrate", "--mu", "1", "--above-fpr", "1e-6", *FULL]) == 0
    assert "where both error rates are at least 1e-06 (target 1.0)" in capsys.readouterr().out
    assert main(["calibrate", "--tpr", ".05", *FULL]) == 2
    assert "target_tpr needs at_fpr; give both" in capsys.readouterr().err


def test_a_sweep_of_mixed_targets(tmp_path):
    (tmp_path / "grid.csv").write_text(
        "target_advantage,target_tpr,at_fpr,target_epsilon,target_delta,target_mu,above_fpr,"
        "sampling_probability,steps,noise_multiplier\n"
        ".1,,,,,,,1,1,\n,.05,.01,,,,,1,1,\n,,,2,1e-5,,,1,1,\n,,,,,1,,1,1,\n,,,,,1,1e-8,1,1,\n,.05,.01,,,,,1,,4\n"
    )
    table = ja.sweep(tmp_path / "grid.csv", progress=False)
    noise = ja.calibrate_noise_multiplier
    run = {"sampling_probability": 1.0, "steps": 1}
    wanted = [
        noise(target_advantage=0.1, **run).value,
        noise(target_tpr=0.05, at_fpr=0.01, **run).value,
        noise(2.0, 1e-5, **run).value,
        noise(target_mu=1.0, **run).value,
        noise(target_mu=1.0, above_fpr=1e-8, **run).value,
    ]
    assert np.allclose(table["noise_multiplier"][:5], wanted, rtol=1e-9)
    steps = ja.calibrate_steps(target_tpr=0.05, at_fpr=0.01, noise_multiplier=4.0, sampling_probability=1.0)
    assert table["steps"][5] == steps.value and set(table["kind"]) == {"certified"}
    assert np.all(table["upper"] <= [0.1, 0.05, 2.0, 1.0, 1.0, 0.05])


def test_a_grid_has_one_target():
    grid = {"sampling_probability": 1.0, "steps": 1, "target_advantage": [0.1, 0.2]}
    assert ja.sweep(grid, progress=False)["upper"].size == 2
    assert "2 targets are given" in refusal(ja.sweep, grid | {"target_mu": 1.0})
    assert "2 targets are given" in refusal(ja.sweep, grid | {"target_epsilon": 1.0, "target_delta": 1e-5})
    assert "at_fpr belongs to" in refusal(ja.sweep, grid | {"at_fpr": 0.1})
