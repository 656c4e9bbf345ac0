"""Batch rules where they are asked for: dp_sgd, calibrations, sweeps, the command line, reports and pictures."""

import json

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.cli import main
from jaxacct.core.validation import InputError
from jaxacct.mechanisms.dp_sgd_run import rounds_of, slots_of
from jaxacct.plots import results
from jaxacct.sweeps import read_table
from jaxacct.sweeps.solve import run_of_row

GRID = {"noise_multiplier": 2.0, "sampling_probability": 0.1, "steps": 20, "delta": 1e-5}
NUMBERS = {"truncated_poisson": {"cap": 20, "dataset_size": 100}}
RULES = ("poisson", "random_allocation", "truncated_poisson", "without_replacement")


def run(sampling, noise=2.0, **more):
    return ja.dp_sgd(noise, 0.1, 20, sampling=sampling, **NUMBERS.get(sampling, {}), **more)


def test_each_word_is_its_mechanism():
    base = ja.Gaussian(2.0)
    assert run("poisson") == ja.repeat(ja.PoissonSampled(base, 0.1), 20) == ja.dp_sgd(2.0, 0.1, 20)
    assert run("random_allocation") == ja.repeat(ja.RandomAllocation(base, slots=10), 2)
    capped = ja.TruncatedPoissonSampled(base, 0.1, dataset_size=100, cap=20)
    assert run("truncated_poisson") == ja.repeat(capped, 20)
    assert run("without_replacement") == ja.repeat(ja.SampledWithoutReplacement(base, 0.1), 20)
    assert run("poisson", group=3) == ja.repeat(ja.PoissonSampled(base, 0.1, group=3), 20)


def test_a_begun_round_counts_whole_and_slots_are_whole():
    assert rounds_of([1, 10, 11], 10.0).tolist() == [1.0, 1.0, 2.0]
    assert slots_of(1 / 3) == 3.0 and slots_of(1.0) == 1.0
    for rate in (0.3, 0.0, 0.0999999):
        with pytest.raises(InputError, match=r"sampling_probability\[1\] = .* one over a whole number of slots"):
            slots_of([0.1, rate])


@pytest.mark.parametrize(
    "given, said",
    [
        ({"sampling": "shuffle"}, "sampling = 'shuffle' is not known"),
        ({"sampling": "balls_in_bins"}, "ja.BallsInBins"),
        ({"slots": 4}, "sampling_probability and slots say the same thing twice"),
        ({"epochs": 4}, "steps and epochs say the same thing twice"),
        ({"sampling": "with_replacement", "dataset_size": 9}, "batch_size is missing"),
        ({"sampling": "shuffled", "group": 2}, "noise_multiplier / group"),
        ({"cap": 5}, "cap goes with sampling = 'truncated_poisson'"),
        ({"sampling": "truncated_poisson", "dataset_size": 9}, "cap is missing"),
        ({"sampling": "truncated_poisson", "cap": 9}, "dataset_size is missing"),
        ({"sampling": "without_replacement", "group": 2}, "dataset_size is missing"),
        ({"sampling": "truncated_poisson", "cap": 9, "dataset_size": 99, "group": 2}, "group = 2 is not known"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(given, said):
    with pytest.raises(InputError, match=said) as error:
        ja.dp_sgd(1.0, 0.1, 10, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "sampling",
    # calibrations of noise with random allocation are in test_allocation_fast.py
    [pytest.param(rule, marks=[pytest.mark.slow] * (rule == "random_allocation")) for rule in RULES],
)
def test_calibrated_noise_meets_the_target_and_little_less_does_not(sampling):
    asked = {"sampling_probability": 0.1, "steps": 20, "sampling": sampling, **NUMBERS.get(sampling, {})}
    found = ja.calibrate_noise_multiplier(2.0, 1e-5, **asked, rtol=0.2)
    assert found.ok and found.best
    assert ja.epsilon(run(sampling, float(found.value)), 1e-5).upper <= 2.0
    assert ja.epsilon(run(sampling, 0.7 * float(found.value)), 1e-5).upper > 2.0


def test_steps_and_rate_of_a_group():
    steps = ja.calibrate_steps(0.5, 1e-5, noise_multiplier=5.0, sampling_probability=0.2, group=2)
    spent = ja.epsilon(ja.dp_sgd(5.0, 0.2, steps.value + np.array([0, 1]), group=2), 1e-5).upper
    assert spent[0] <= 0.5 < spent[1]
    rate = ja.calibrate_sampling_probability(1.0, 1e-2, noise_multiplier=2.0, steps=1, group=2, rtol=0.2)
    assert rate.ok and 0.8 <= rate.epsilon.upper <= 1.0
    with pytest.raises(InputError, match="slots are whole"):
        ja.calibrate_sampling_probability(3.0, 1e-5, noise_multiplier=5.0, steps=100, sampling="random_allocation")
    with pytest.raises(InputError, match="a risk cannot be met here with group = 2"):
        ja.calibrate_noise_multiplier(target_advantage=0.1, sampling_probability=0.01, steps=100, group=2)


def test_a_grid_of_rules_is_row_by_row_the_single_question():
    numbers = {"cap": [None, None, 20, None, None], "dataset_size": [None, None, 100, None, None]}
    records = [
        GRID | {"sampling": rule} | {name: column[i] for name, column in numbers.items()}
        for i, rule in enumerate(RULES)
    ] + [GRID | {"group": 2}]
    table = ja.sweep(records, relation="remove_one", progress=False)
    runs = [*(run(rule) for rule in RULES), run("poisson", group=2)]
    single = [ja.epsilon(one, 1e-5, relation="remove_one").upper for one in runs]
    np.testing.assert_allclose(table["upper"], single, rtol=1e-4)
    assert list(table["sampling"]) == [*RULES, ""]


def test_a_bad_row_fails_alone_and_the_file_gives_the_same_rows_back(tmp_path):
    grid = GRID | {"sampling": "random_allocation", "sampling_probability": [0.1, 0.3], "steps": [20, 40]}
    with pytest.warns(match="one over a whole number of slots"):
        table = ja.sweep(grid, progress=False)
    assert list(table["status"]) == ["ok", "ok", "failed", "failed"]
    table.to_csv(tmp_path / "result.csv")
    back = read_table(tmp_path / "result.csv")
    assert list(back["sampling"]) == ["random_allocation"] * 4 and np.array_equal(back["upper"], table["upper"])
    row = {name: column[0] for name, column in back.columns.items()}
    assert run_of_row(row) == run("random_allocation")


def test_a_grid_refuses_a_cap_without_its_rule():
    with pytest.raises(InputError, match="cap needs sampling = 'truncated_poisson'"):
        ja.sweep(GRID | {"cap": 10}, progress=False)
    with pytest.raises(InputError, match="needs dataset_size"):
        ja.sweep(GRID | {"cap": 10, "sampling": "truncated_poisson"}, progress=False)
    with pytest.raises(InputError, match="sampling = 'shuffle' is not known"):
        ja.sweep(GRID | {"sampling": "shuffle"}, progress=False)


def test_the_command_line_knows_the_words(capsys):
    numbers = ["--noise-multiplier", "2", "--sampling-probability", "0.1", "--steps", "20"]
    assert main(["epsilon", *numbers, "--delta", "1e-5", "--sampling", "random_allocation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == ja.epsilon(run("random_allocation"), 1e-5).upper
    assert main(["delta", *numbers, "--epsilon", "1", "--group", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == ja.delta(run("poisson", group=2), 1.0).upper
    assert main(["epsilon", *numbers, "--delta", "1e-5", "--sampling", "shuffle"]) == 2
    assert "sampling = 'shuffle' is not known" in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_and_reports_describe_the_run_of_the_row(tmp_path):
    from jaxacct.report import report

    table = ja.sweep(GRID | {"sampling": ["poisson", "random_allocation"]}, progress=False)
    assert [curve.profile.mechanism for curve in results._curves(table)] == [run("poisson"), run("random_allocation")]
    table.to_csv(tmp_path / "result.csv")
    report(str(tmp_path / "result.csv"), out=str(tmp_path / "page.md"))
    text = (tmp_path / "page.md").read_text()
    assert "RandomAllocation" in text or "In every round each record takes part" in text
    assert "Not to be claimed" not in text


def test_groups_of_fixed_size_samples_at_every_door(capsys):
    """Old sweeps, calibrations and commands took the data set's size for a batch, and the mechanism refused it."""
    run = {"noise_multiplier": 4.0, "batch_size": 10, "dataset_size": 100, "steps": 7}
    run |= {"sampling": "without_replacement", "group": 2}
    one = ja.epsilon(ja.dp_sgd(**run), 1e-4)
    table = ja.sweep({**run, "dataset_size": [100, 200], "delta": 1e-4}, progress=False)
    assert table["upper"][0] == one.upper > table["upper"][1] > 0.0
    left = {name: value for name, value in run.items() if name != "noise_multiplier"}
    found = ja.calibrate_noise_multiplier(one.upper, 1e-4, **left)
    assert found.best and abs(found.value - 4.0) < 4e-3
    flags = [word for name, value in run.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["epsilon", *flags, "--delta", "1e-4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == one.upper
