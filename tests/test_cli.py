"""The command line: JSON keys, exit statuses, and one clear line for whatever is wrong.

Configurations with sampling probability 1 are answered by a formula, so these tests compile next to nothing.
"""

import json
import math
import os
import runpy
import sys
from decimal import Decimal

import numpy as np
import pytest

from jaxacct import cli
from jaxacct.cli import output
from jaxacct.cli.arguments import COMMANDS, UsageError, number, parse
from jaxacct.sweeps import solve

GAUSSIAN = "--noise-multiplier 2 --sampling-probability 1 --steps 1"
TARGET = "calibrate --target-epsilon 1 --target-delta 1e-5 --sampling-probability 1"
ONE_STEP = "sampling_probability = 1\nsteps = 1\ndelta = 1e-5\n"
KEYS = {"lower", "estimate", "upper", "kind", "status", "engine"}


def query(noise, rate, steps):
    return f"epsilon --noise-multiplier {noise} --sampling-probability {rate} --steps {steps} --delta 1e-5"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")


def run(capsys, line):
    """(exit status, standard output, standard error) of a command line."""
    status = cli.main(line.split())
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, line):
    """The message of a refusal: status 2, one line, nothing on standard output."""
    status, out, err = run(capsys, line)
    assert (status, out) == (2, "") and err.count("\n") == 1 and "Traceback" not in err
    return err.strip()


def answered(capsys, line):
    status, out, err = run(capsys, line)
    assert (status, err) == (0, "")
    return out


def test_epsilon_answers_one_json_object(capsys):
    answer = json.loads(answered(capsys, f"epsilon {GAUSSIAN} --delta 1e-5 --json"))
    assert answer.keys() >= KEYS | {"noise_multiplier", "sampling_probability", "steps", "delta", "relation"}
    assert math.isclose(answer["upper"], 1.993091404415115, rel_tol=1e-9)
    assert answer["lower"] <= answer["estimate"] <= answer["upper"]
    assert (answer["kind"], answer["status"]) == ("certified", "ok")


def test_delta_inverts_epsilon(capsys):
    answer = json.loads(answered(capsys, f"delta {GAUSSIAN} --epsilon 1.993091404415115 --json"))
    assert answer.keys() >= KEYS and math.isclose(answer["upper"], 1e-5, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("left_out", "given", "least", "most"),
    [
        ("noise_multiplier", "--sampling-probability 1 --steps 4", 7, 8),
        ("steps", "--noise-multiplier 7.5 --sampling-probability 1", 4, 4),
    ],
)
def test_calibrate_solves_for_what_is_left_out(capsys, left_out, given, least, most):
    line = f"calibrate --target-epsilon 1 --target-delta 1e-5 {given} --json"
    answer = json.loads(answered(capsys, line))
    assert answer.keys() >= KEYS | {left_out, "target_epsilon", "target_delta"}
    assert least <= answer[left_out] <= most and answer["upper"] <= 1
    assert answer["quantity"] == left_out


def test_data_set_size_batch_size_and_epochs_stand_for_rate_and_steps(capsys):
    line = "epsilon --noise-multiplier 2 --dataset-size 10 --batch-size 10 --epochs 3 --delta 1e-5 --json"
    answer = json.loads(answered(capsys, line))
    assert (answer["steps"], answer["sampling_probability"]) == (3, 1.0)


def test_lists_answer_for_a_batch(capsys):
    line = "epsilon --noise-multiplier 2,4 --sampling-probability 1 --steps 1 --delta 1e-5"
    answer = json.loads(answered(capsys, f"{line} --json"))
    assert answer["noise_multiplier"] == [2, 4] and len(answer["upper"]) == 2
    assert answer["kind"] == ["certified"] * 2 and answer["relation"] == "add_or_remove_one"
    lines = answered(capsys, line).splitlines()
    assert len(lines) == 3 and len({len(text) for text in lines}) == 1


def test_the_human_answer_says_what_may_be_claimed(capsys):
    out = answered(capsys, f"epsilon {GAUSSIAN} --delta 1e-5")
    assert "claim     epsilon <= 1.9931 at delta = 1e-05" in out
    assert "1.9930914" in out and "certified" in out and "ok: " in out
    out = answered(capsys, f"delta {GAUSSIAN} --epsilon 1.99309")
    assert "delta <= 1.00002e-05 at epsilon = 1.99309" in out
    out = answered(capsys, f"{TARGET} --steps 4")
    assert out.startswith("noise_multiplier  7.46") and "at delta = 1e-05 (target 1.0)" in out


def test_printed_numbers_are_rounded_to_the_safe_side():
    assert output.up(1.2345678, 6) == "1.23457" and output.down(1.2345678, 6) == "1.23456"
    assert output.up(1.5, 6) == output.down(1.5, 6) == "1.5"
    assert output.up(3.00000001e-30, 3) == "3.01e-30" and output.up(0.0, 3) == "0"
    assert output.up(math.inf, 3) == "inf"


def test_an_infeasible_calibration_exits_1_and_says_why(capsys):
    line = f"{TARGET.replace('1 ', '1e-9,1 ', 1)} --noise-multiplier 7.5"
    status, out, err = run(capsys, f"{line} --json")
    answer = json.loads(out)
    assert status == 1 and err.startswith("jaxacct calibrate: infeasible_steps[0]: One step already exceeds")
    assert answer["steps"] == [None, 4] and answer["upper"][0] is None and answer["upper"][1] <= 1
    status, out, err = run(capsys, line.replace("1e-9,1 ", "1e-9 "))
    assert status == 1 and "steps     none" in out and "infeasible_steps: One step" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "jaxacct: give a command: epsilon, delta, calibrate, advise, risk, select, sweep"),
        ("epsilom", "jaxacct epsilom: argument COMMAND: invalid choice"),
        ("epsilon", "noise_multiplier, sampling_probability, steps and delta are missing"),
        ("epsilon --noise-multiplyer 1", "--noise-multiplyer; did you mean --noise-multiplier?"),
        (f"epsilon {GAUSSIAN} --delta 1e-5 extra", "unexpected 'extra'"),
        (f"epsilon {GAUSSIAN} --delta", "argument --delta: expected one argument"),
        (f"epsilon {GAUSSIAN} --delta abc", "delta = 'abc' must be a number"),
        (f"epsilon {GAUSSIAN} --delta 2", "delta = 2 must be > 0 and < 1"),
        (f"epsilon {GAUSSIAN} --delta 0", "delta = 0 must be > 0 and < 1"),
        (f"epsilon {GAUSSIAN} --delta 1e-5 --engine fft", "engine = 'fft' is not known"),
        (f"epsilon {GAUSSIAN} --delta 1e-5 --relation swap", "relation = 'swap' is not known"),
        (f"epsilon {GAUSSIAN} --delta 1e-5 --rtol -1", "rtol = -1 must be > 0 and < 1"),
        (f"epsilon {GAUSSIAN} --delta 1e-5,1e-6 --rtol 1e-4,1e-5", "rtol must be one number"),
        (f"delta {GAUSSIAN} --epsilon nan", "epsilon = nan must be"),
        (query("-1.0", "1", "1"), "noise_multiplier = -1.0 must be > 0"),
        (query("-1e-3", "1", "1"), "noise_multiplier = -0.001 must be"),
        (query("1,-2", "1", "1"), "noise_multiplier[1] = -2 must be"),
        (query("0", "1", "1"), "noise_multiplier = 0 must be > 0"),
        (query("nan", "1", "1"), "noise_multiplier = nan must be"),
        (query("1e400", "1", "1"), "noise_multiplier = inf must be finite and > 0"),
        (query("1", "1", "1e20"), "steps = 1e+20 must be an integer >= 1 and <= 2**53"),
        (query("1", "1", str(2**53 + 1)), "steps = 9007199254740993 must be an integer"),
        (query("1", "1", "1" * 5000), "steps = inf must be finite"),
        (f"epsilon {GAUSSIAN} --delta 1e-5 --rtol nan", "rtol = nan must be finite and > 0 and < 1"),
        (query("1,", "1", "1"), "noise_multiplier[1] = '' must be"),
        (query("1", "1.1", "1"), "sampling_probability = 1.1 must be"),
        (query("1", "1", "1.5"), "steps = 1.5 must be an integer"),
        (query("1,2", "1", "1,2,3"), "do not broadcast"),
        (f"calibrate {GAUSSIAN} --target-epsilon 1", "steps are all given; leave out the one to be"),
        (f"{TARGET.replace('1e-5', '2')} --steps 1", "target_delta = 2 must be > 0 and < 1"),
        (f"{TARGET.replace('1 ', '0 ', 1)} --steps 1", "target_epsilon = 0 must be > 0"),
        (f"calibrate {GAUSSIAN} --target-epsilon 1 --target-delta 1e-5", "nothing is left to solve for"),
        ("calibrate --target-epsilon 1 --steps 1 --noise-multiplier 1", "are missing"),
        ("calibrate --target-epsilon 1 --steps 1", "are missing"),
        ("sweep", "GRID is missing"),
        ("sweep grid.toml", "--out is missing"),
        ("sweep absent.toml --out result.csv", "absent.toml: cannot be read: No such file or directory"),
        ("sweep grid.toml --out result.csv --resum", "unknown option --resum; did you mean --resume?"),
        ("sweep grid.toml --out result.csv --block 1.5", "block = 1.5 must be a whole number"),
        ("explore --port abc", "port = 'abc' must be a whole number"),
        ("epsilon --steps abc --delta 1e-5", "steps = 'abc' must be a number, or several with commas between"),
        ("delta --noise-multiplier 1 --sampling-probability 1 --steps 1 --epsilon inf", "= inf must be finite; use"),
        ("sweep grid.toml --out result.csv --block 1,2", "block must be one number, not a list"),
        ("sweep grid.toml --out result.csv --process-id 0", "--process-id is for --distributed"),
        ("sweep grid.toml --out result.csv --distributed --process-id 0", "belong together; give all three"),
        (
            "sweep grid.toml --out r.csv --distributed --coordinator h:1 --process-id 2 --process-count 2",
            "--process-id = 2 must be a whole number >= 0 and < --process-count = 2",
        ),
        ("sweep grid.toml --out result.csv --shard 1/2 --distributed", "both slice the grid"),
        ("merge", "--out is missing"),
        ("merge --out result.csv", "parts is empty"),
        ("merge absent.part --out result.csv", "absent.part: cannot be read: No such file"),
        ("plot", "RESULT is missing"),
        ("plot result.csv", "--out is missing"),
        ("plot absent.csv --out figure.png", "absent.csv: cannot be read: No such file"),
        ("plot absent.csv --out figure.png --where x", "where = 'x' must be FIELD=VALUE"),
        ("plot absent.csv --out figure.png --rows a", "rows = 'a' must be a row number from 0"),
        ("plot absent.csv --out figure.png --knd curve", "unknown option --knd; did you mean --kind?"),
    ],
)  # fmt: skip
def test_bad_input_exits_2_with_one_line(capsys, line, words):
    message = refused(capsys, line)
    assert words in message and message.startswith("jaxacct")


def test_sweep_writes_a_csv_and_a_summary(capsys, tmp_path):
    grid, out = tmp_path / "grid.toml", tmp_path / "result.csv"
    grid.write_text("noise_multiplier = [2, 4]\nsampling_probability = 1\nsteps = [1, 2]\ndelta = 1e-5\n")
    text = answered(capsys, f"sweep {grid} --out {out}")
    assert "rows      4" in text and "status    4 ok" in text and str(out) in text
    assert len(out.read_text().splitlines()) == 5
    assert "is there already; replace it with --overwrite" in refused(capsys, f"sweep {grid} --out {out}")
    report = json.loads(answered(capsys, f"sweep {grid} --out {out} --overwrite --json"))
    assert (report["rows"], report["status"], report["kind"]) == (4, {"ok": 4}, {"certified": 4})
    assert report["lower"]["max"] <= report["upper"]["max"] and report["out"] == str(out)
    status, _, err = run(capsys, f"sweep {grid} --out {out} --overwrite --progress")
    assert status == 0 and "4/4" in err
    grid.write_text(grid.read_text().replace("steps", "stesp"))
    assert "did you mean 'steps'?" in refused(capsys, f"sweep {grid} --out {out}")


def test_what_is_shown_of_a_sweep_is_no_smaller_than_what_it_found(capsys, tmp_path):
    """The range of the upper ends is rounded outward, and a given delta is shown with all its digits."""
    grid, out = tmp_path / "grid.toml", tmp_path / "result.csv"
    grid.write_text(f"noise_multiplier = {[2 + i / 10 for i in range(8)]}\n{ONE_STEP}")
    report = json.loads(answered(capsys, f"sweep {grid} --out {out} --json"))["upper"]
    low, _, high = answered(capsys, f"sweep {grid} --out {out} --overwrite").split("upper     ")[1].split()[:3]
    assert "relation  8 add_or_remove_one" in answered(capsys, f"sweep {grid} --out {out} --overwrite")
    assert Decimal(low) <= Decimal(report["min"]) and Decimal(report["max"]) <= Decimal(high)
    one = {"sampling-probability": 1, "steps": 1, "noise-multiplier": "2,3", "delta": 1 / 7000}
    assert " 0.00014285714285714287 " in answered(capsys, "epsilon " + " ".join(f"--{k} {v}" for k, v in one.items()))


def test_a_dry_run_shows_the_plan_and_writes_nothing(capsys, tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text("noise_multiplier = [2, 4]\nsampling_probability = 1\nsteps = [1, 2]\ndelta = 1e-5\n")
    text = answered(capsys, f"sweep {grid} --dry-run --shard 1/2 --block 2")
    assert "configurations  4 (4 epsilon)" in text and "1 of 2: 2 configurations" in text
    assert "1 of up to 2 rows" in text and "1 cpu" in text and "from 2 configurations solved just now" in text
    report = json.loads(answered(capsys, f"sweep {grid} --dry-run --json"))
    assert (report["configurations"], report["quantities"], report["blocks"]) == (4, {"epsilon": 4}, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["grid.toml"]


def test_slices_are_merged_and_plotted(capsys, tmp_path, monkeypatch):
    grid, out = tmp_path / "grid.toml", tmp_path / "result.csv"
    grid.write_text("noise_multiplier = [2, 4]\nsampling_probability = 1\nsteps = [1, 2, 3]\ndelta = 1e-5\n")
    parts = [f"{out}.{i}-of-2.part" for i in (1, 2)]
    for i, part in enumerate(parts, 1):
        assert part in answered(capsys, f"sweep {grid} --out {out} --shard {i}/2 --block 2")
    answered(capsys, f"merge {' '.join(parts)} --out {out}")
    assert "is there already" in refused(capsys, f"merge {' '.join(parts)} --out {out}")
    report = json.loads(answered(capsys, f"merge {' '.join(parts)} --out {out} --overwrite --json"))
    assert (report["rows"], report["out"], report["status"]) == (6, str(out), {"ok": 6})
    assert "--resume (resume=True), or replace it with --overwrite" in refused(
        capsys, f"sweep {grid} --out {out} --shard 1/2"
    )
    figure = tmp_path / "figure.svg"
    text = answered(capsys, f"plot {out} --out {figure} --where noise-multiplier=2")
    assert "x        steps" in text and "noise_multiplier = 2" in text and figure.exists()
    monkeypatch.setattr("jaxacct.plots.style.save", lambda canvas, path: None)
    report = json.loads(answered(capsys, f"plot {out} --out {figure} --kind profile --rows 0,5 --json"))
    assert (report["kind"], report["curves"]) == ("profile", 2)


def test_rows_that_failed_are_told_in_one_line_and_exit_1(capsys, tmp_path, monkeypatch):
    def raises(*args, **kwargs):
        raise ArithmeticError("lattice bracket is empty")

    monkeypatch.setattr(solve.account, "epsilon", raises)
    status, out, err = run(capsys, f"epsilon {GAUSSIAN} --delta 1e-5 --json")
    answer = json.loads(out)
    assert (status, answer["status"], answer["lower"], answer["upper"]) == (1, "failed", 0.0, "inf")
    assert err.startswith("jaxacct epsilon: epsilon failed at noise_multiplier = 2.0") and err.count("\n") == 1
    status, out, _ = run(capsys, f"epsilon {GAUSSIAN} --delta 1e-5")
    assert status == 1 and "claim     none" in out and "failed: The engines failed" in out
    grid, result = tmp_path / "grid.toml", tmp_path / "result.csv"
    grid.write_text("noise_multiplier = [2, 4]\nsampling_probability = 1\nsteps = 1\ndelta = 1e-5\n")
    status, out, err = run(capsys, f"sweep {grid} --out {result}")
    assert status == 1 and "status    2 failed" in out and "(and 1 more in its block)" in err
    assert len(result.read_text().splitlines()) == 3


def test_an_interrupt_is_one_line_and_130(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    status, _, err = run(capsys, f"epsilon {GAUSSIAN} --delta 1e-5")
    assert (status, err) == (130, "jaxacct epsilon: interrupted\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_an_example_that_parses(capsys, command):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and COMMANDS[command].description.split()[0] in out
    assert parse(COMMANDS[command].example.split()[1:]).command == command


def test_every_number_of_a_json_object_is_json_at_any_depth():
    rows = [{"steps": 3.0, "at": math.nan}, {"upper": -math.inf, "lower": np.float64(0.5)}]
    answer = json.loads(output.dumps({"upper": math.inf, "fixed": {"cap": np.nan, "prior": 1.0}, "rows": tuple(rows)}))
    assert answer["upper"] == "inf" and answer["fixed"] == {"cap": None, "prior": 1.0}
    assert answer["rows"] == [{"steps": 3, "at": None}, {"upper": "-inf", "lower": 0.5}]


def test_numbers_stay_exact():
    assert number("steps", str(2**53 + 1)) == 2**53 + 1
    assert number("delta", "1e-5,0.5") == [1e-5, 0.5]
    with pytest.raises(UsageError):
        number("delta", "1_0x")


def test_python_m_jaxacct_exits_with_the_documented_status(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxacct", *f"epsilon {GAUSSIAN} --delta 1e-5 --json".split()])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("jaxacct", run_name="__main__")
    assert left.value.code == 0 and json.loads(capsys.readouterr().out)["status"] == "ok"
    assert refused(capsys, query("-1.0", 1, 1)).startswith("jaxacct epsilon: noise_multiplier = -1.0 must be > 0; ")
    line = f"{TARGET.replace('1 ', '1e-9 ', 1)} --noise-multiplier 1"
    assert run(capsys, line)[0] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_standard_output_that_is_full_is_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        status = cli.main(f"epsilon {GAUSSIAN} --delta 1e-5".split())
    assert status == 2
    said = "jaxacct epsilon: standard output: cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said
