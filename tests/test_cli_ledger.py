"""`jaxacct ledger show`."""

import json
import math
import re
from decimal import Decimal

import pytest
from training_cases import TARGETED, gaussian_epsilon, note, written

import jaxacct as ja
from jaxacct import cli
from jaxacct.training import Ledger, Plan


def shown(capsys, *words):
    status = cli.main(["ledger", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_shows_each_run_and_all(path, capsys, monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    with Ledger.create(path, TARGETED, run="first", by="ada\x1b[2J") as ledger:
        for step in range(4):
            note(ledger, step)
        note(ledger, 1, key="again")
        note(ledger, 3)
        ledger.begin(TARGETED, "second")
        note(ledger, 0, noise=5.0)
        ledger.spend(ja.Gaussian(20.0), "labels")
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "run": "second", "st')
    status, out, _ = shown(capsys, "show", path)
    assert status == 0 and "\x1b" not in out
    for words in (
        "by         ada?[2J",
        "target     epsilon 1.0 at delta 1e-05",
        "steps      4 (1 replayed otherwise, counted again, 1 replayed exactly, counted once)",
        "segment 1  5 steps, poisson, noise multiplier 10, rate 1",
        "steps      1 (1 cut off, counted)",
        "other 1    Gaussian(noise_multiplier=20.0)  labels",
    ):
        assert words in out
    status, out, _ = shown(capsys, "show", path, "--json", "--delta", "1e-6")
    report = json.loads(out)
    first, second = report["runs"]
    assert status == 0 and report["delta"] == 1e-6 and (first["run"], first["counted_again"]) == ("first", 1)
    assert first["upper"] == pytest.approx(gaussian_epsilon(math.sqrt(0.05), 1e-6), rel=1e-6)
    least = min(s.noise_multiplier for s in TARGETED.segments)
    rest = 1 / 25 + 1 / 400 + max(1 / 25, least**-2)
    assert second["upper"] == pytest.approx(gaussian_epsilon(math.sqrt(rest), 1e-6), rel=1e-6)
    assert report["upper"] == pytest.approx(gaussian_epsilon(math.sqrt(0.05 + rest), 1e-6), rel=1e-6)
    assert report["kind"] == "certified" and "epsilon" in shown(capsys, "show", path)[1]


def test_users_and_caps_are_shown(path, capsys):
    plan = Plan(
        target_delta=1e-5, dataset_size=50, noise_multiplier=5.0, steps=4, sampling_probability=0.1,
        sampling="truncated_poisson", cap=20, unit="user",
    )  # fmt: skip
    with Ledger.create(path, plan) as ledger:
        note(ledger, 0, noise=5.0, rate=0.1)
    _, out, _ = shown(capsys, "show", path)
    assert "relation   add_or_remove_one, unit user" in out and "rate 0.1, cap 20 of 50" in out


def test_a_candidate_is_shown_with_what_its_choice_costs(path, capsys):
    """A candidate's epsilon leaves out what its choice costs. The command says so, with the whole tuning's epsilon."""
    given = {"target_delta": 1e-5, "dataset_size": 50, "sampling_probability": 1.0, "steps": 4}
    plan = Plan(**given, noise_multiplier=9.0, repetitions=ja.selection.PointMass(3))
    with Ledger.create(path, plan) as ledger:
        note(ledger, 0, noise=9.0)
        ledger.replan(Plan(**given | {"target_delta": 1e-6}, noise_multiplier=9.0))
    _, out, _ = shown(capsys, "show", path)
    assert "at delta = 1e-05\n" in out.split("not counted")[1] + "\n"
    assert f"by its plan the whole tuning costs epsilon <= {plan.epsilon.upper:.3f}"[:-1] in out
    report = json.loads(shown(capsys, "show", path, "--json")[1])
    assert report["runs"][0]["upper_of_tuning"] == float(plan.epsilon.upper) > report["runs"][0]["upper"]


def test_runs_that_do_not_add_up_are_shown_one_by_one(path, capsys):
    given = {"target_delta": 1e-5, "dataset_size": 50, "noise_multiplier": 9.0, "steps": 4}
    with Ledger.create(path, Plan(**given, sampling_probability=1.0)) as ledger:
        note(ledger, 0, noise=9.0)
        ledger.begin(Plan(**given, sampling="fixed_batches", expected_batch_size=10))
        note(ledger, 0, noise=9.0, rate=0.2, partition="a")
    status, out, _ = shown(capsys, "show", path)
    assert status == 0 and out.count("epsilon    <= 0.382099") == 2
    assert "all runs  none: relation is missing; the plans have add_or_remove_one and zero_out" in out
    report = json.loads(shown(capsys, "show", path, "--json")[1])
    assert report["upper"] is None and all(one["upper"] < 0.5 for one in report["runs"])


def test_the_command_refuses_in_one_line(path, capsys, monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2]]))
    for words, message in (
        (["show", path], "line 2 is damaged"),
        (["show", path, "--delta", "2"], "line 2 is damaged"),
        (["show"], "LEDGER is missing"),
        ([], "ACTION is missing"),
        (["burn", path], "action = 'burn' is not known"),
        (["show", path, "--delta", "1e-5,1e-6"], "delta must be one number"),
        (["show", path, "--dleta", "1"], "did you mean --delta?"),
    ):
        status, out, err = shown(capsys, *words)
        assert status == 2 and not out and message in err and err.count("\n") == 1


def test_both_ends_are_rounded_outward(path, capsys):
    with Ledger.create(path, TARGETED) as ledger:
        for step in range(20):
            note(ledger, step, noise=5.0 + step / 7)
            report = json.loads(shown(capsys, "show", path, "--json")[1])
            noise = re.findall(r"noise multiplier (\S+),", shown(capsys, "show", path)[1])
            assert max(map(Decimal, noise)) >= Decimal(5.0 + step / 7)
            low, high = re.search(r"epsilon +<= (\S+) .*from (\S+)\)", shown(capsys, "show", path)[1]).groups()[::-1]
            assert Decimal(low) <= Decimal(report["lower"]) and Decimal(report["upper"]) <= Decimal(high)
