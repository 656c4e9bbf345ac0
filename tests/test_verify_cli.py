"""--verify and jaxacct verify."""

import json

import numpy as np
import pytest

from jaxacct.cli import main
from jaxacct.report import report
from jaxacct.sweeps import Table, sweep

pytest.importorskip("flint")

HEAD = "quantity,noise_multiplier,sampling_probability,steps,delta,relation,lower,estimate,upper,kind,status,engine\n"
ROW = "epsilon,1.0,0.01,1000,1e-05,add_or_remove_one,{},{},{},certified,ok,contour\n"
TRUE, FALSE = ROW.format(1.82823, 1.82824, 1.82825), ROW.format(1.828, 1.8281, 1.8282)


def test_epsilon_with_verify(capsys):
    command = ["epsilon", "--noise-multiplier", "2", "--sampling-probability", "1", "--steps", "1", "--delta", "1e-5"]
    assert main([*command, "--verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("verified to ")
    assert main([*command, "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verification"] == "verified" and found["verification_digits"] > 6
    assert {"lower", "estimate", "upper", "kind", "status"} <= set(found)


def test_a_result_is_verified_row_by_row(tmp_path, capsys):
    path = tmp_path / "result.csv"
    path.write_text(HEAD + TRUE)
    assert main(["verify", str(path)]) == 0
    path.write_text(HEAD + TRUE + FALSE)
    capsys.readouterr()
    assert main(["verify", str(path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"verified": 1, "refuted": 1}
    assert [row["verification"] for row in found["results"]] == ["verified", "refuted"]


@pytest.mark.parametrize("changed", [{}, {"dataset_size": 80}, {"batch_size": 24}, {"epochs": 3}])
@pytest.mark.parametrize("sampling", ["poisson", "with_replacement"])
def test_a_row_whose_numbers_contradict_each_other_is_not_verified(sampling, changed, tmp_path, capsys):
    row = {"quantity": "epsilon", "sampling": sampling, "dataset_size": 100, "batch_size": 20, "epochs": 2}
    row |= {"noise_multiplier": 4.0, "sampling_probability": 0.2, "steps": 10, "delta": 1e-5}
    row |= {"relation": "add_or_remove_one", "lower": 0.0, "estimate": 9.0, "upper": 9.0, "kind": "bound"} | changed
    path = tmp_path / "result.csv"
    path.write_text(",".join([*row, "status", "engine"]) + "\n" + ",".join([*map(str, row.values()), "ok", "contour"]))
    assert main(["verify", str(path)]) == (4 if changed else 0)
    assert ("its parameters describe no run" in capsys.readouterr().out) is bool(changed)


@pytest.mark.parametrize(("target", "verdict"), [(1.0, "verified"), (0.5, "refuted")])
def test_a_calibrated_row_that_misses_its_target_is_refuted(target, verdict, tmp_path, capsys):
    row = sweep({"sampling_probability": 1, "steps": 1, "target_epsilon": 1.0, "target_delta": 1e-5}, progress=False)
    path = tmp_path / "result.csv"
    Table(row.columns | {"target_epsilon": np.array([target])}).to_csv(path)
    assert main(["verify", str(path), "--json"]) == (0 if verdict == "verified" else 3)
    assert json.loads(capsys.readouterr().out)["counts"] == {verdict: 1}
    assert report(path).may_all_be_claimed is (verdict == "verified")


@pytest.mark.parametrize(
    ("without", "put", "words"),
    [
        ("", {"quantity": "delta"}, "row 0: epsilon is missing"),
        ("", {"quantity": "noise_multiplier"}, "row 0: target_delta is missing"),
        ("delta", {}, "row 0: delta is missing"),
        ("", {"delta": ""}, "row 0: delta is missing"),
        ("", {"quantity": "privacy"}, "quantity = 'privacy' is not known"),
        ("steps", {"quantity": "steps"}, "it has no column 'steps'"),
        ("kind", {}, "it has no column 'kind'"),
        ("noise_multiplier", {}, "undecided: its parameters describe no run: noise_multiplier"),
        ("", {"group": "inf"}, "undecided: its parameters describe no run: group = inf"),
    ],
)
def test_a_row_without_what_its_bracket_needs_gets_one_line(without, put, words, tmp_path, capsys):
    row = dict(zip(HEAD.strip().split(","), TRUE.strip().split(","), strict=True)) | put
    row.pop(without, None)
    path = tmp_path / "result.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    status = main(["verify", str(path)])
    told = capsys.readouterr()
    assert status == (4 if "undecided" in words else 2)
    assert words in (told.out if status == 4 else told.err) and told.err.count("\n") == (status == 2)
    assert main(["report", str(path), "--out", str(tmp_path / "page.md")]) in (1, 2)


def test_a_ledger_is_verified(tmp_path, capsys):
    from jaxacct.training import Ledger, Plan

    plan = Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4)
    path = tmp_path / "run.jsonl"
    with Ledger.create(path, plan) as ledger:
        ledger.record(0, "key 0", "all", 5.0, 1.0)
        ledger.record(1, "key 1", "all", 5.0, 1.0)
    assert main(["verify", str(path)]) == 0
    assert "verified" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path, capsys):
    assert main(["verify"]) == 2
    assert main(["verify", str(tmp_path / "nothing.csv")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
