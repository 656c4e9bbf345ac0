"""Runs with banded noise and cyclic Poisson sampling, at every door that takes the record of a run."""

import json

import numpy as np
import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct.cli import main
from jaxacct.strategies import Banded, ColumnNormalised, CyclicPoisson, optimise
from jaxacct.sweeps import read_grid

DELTA = 1e-5
CYCLIC = {"sampling": "cyclic_poisson"}


@pytest.mark.parametrize("bands, groups, steps", [(3, 5, 60), (8, 8, 64), (1, 1, 20)])
def test_whole_blocks_are_the_matrix_mechanism(bands, groups, steps):
    mine = ja.dp_sgd(0.8, 0.1, steps, bands=bands, groups=groups, **CYCLIC)
    theirs = ja.MatrixMechanism(Banded(bands, steps), 0.8, CyclicPoisson(groups, 0.1))
    found = [ja.epsilon(run, DELTA, relation="zero_out") for run in (mine, theirs)]
    np.testing.assert_allclose(found[0].upper, found[1].upper, rtol=1e-9)
    assert [one.kind for one in found] == ["certified"] * 2


def test_a_cut_block_is_a_bound_that_a_strategy_attains():
    run = ja.epsilon(ja.dp_sgd(0.8, 0.3, 13, bands=6, **CYCLIC), DELTA)
    column = 0.5 ** np.arange(6)
    columns = column[:, None] * (np.add.outer(np.arange(6), np.arange(13)) < 13)  # the last ones are short
    diagonals = columns / np.linalg.norm(columns, axis=0)
    cut, whole = (
        ja.epsilon(ja.MatrixMechanism(strategy, 0.8, CyclicPoisson(6, 0.3)), DELTA)
        for strategy in (
            Banded(6, 13, coefficients=tuple(column / np.linalg.norm(column))),
            ColumnNormalised(6, 13, diagonals=diagonals),
        )
    )
    assert cut.upper < 0.97 * run.lower  # the last block has one row of six
    np.testing.assert_allclose(whole.upper, run.upper, rtol=1e-9)


def test_the_rate_is_that_of_a_group():
    run = ja.dp_sgd(1.0, batch_size=30, dataset_size=1000, epochs=2, bands=4, groups=5, **CYCLIC)
    assert run.mechanism.sampling_probability == 0.15 and run.steps == 14  # ceil(67 / 5)
    assert ja.dp_sgd(1.0, 0.15, epochs=2, bands=4, groups=5, **CYCLIC).steps == 14
    assert ja.dp_sgd(1.0, batch_size=250, dataset_size=1000, steps=9, bands=4, **CYCLIC) == ja.repeat(
        ja.PoissonSampled(ja.Gaussian(1.0), 1.0, in_turns=True), 3
    )
    assert ja.dp_sgd(1.0, 0.1, 9, bands=[2, 4], **CYCLIC).steps.tolist() == [5, 3]
    assert ja.dp_sgd(1.0, 0.1, 9, bands=[2, 4], groups=4, **CYCLIC).steps.tolist() == [3, 3]


@pytest.mark.parametrize(
    "given, words",
    [
        ({"bands": 8, "groups": 4}, "bands = 8 must be <= groups = 4; or blocks of one record overlap"),
        ({"bands": [2, 8], "groups": 4}, "bands[1] = 8 must be <= groups = 4"),
        ({"groups": 4}, "bands is missing"),
        ({"bands": 2.5}, "bands = 2.5 must be an integer"),
        ({"bands": 4, "group": 2}, "ja.dp_sgd(noise_multiplier / group, 1.0, ceil(steps / groups)), which leaks no"),
        ({"bands": 4, "cap": 3}, "cap goes with sampling = 'truncated_poisson', not 'cyclic_poisson'"),
        ({"bands": 4, "sampling": "poisson"}, "bands goes with sampling = 'cyclic_poisson', not 'poisson'"),
    ],
)
def test_refusals_of_a_run(given, words):
    assert words in refusal(ja.dp_sgd, 1.0, 0.1, 9, **CYCLIC | given)


def test_a_batch_that_a_group_does_not_hold_is_refused(capsys):
    run = {"noise_multiplier": 1.0, "batch_size": 200, "dataset_size": 1000, "epochs": 2, "bands": 8, **CYCLIC}
    words = "batch_size = 200 must be <= dataset_size / groups = 125; use fewer groups or a smaller batch_size"
    assert words in refusal(ja.dp_sgd, **run)
    assert words in refusal(ja.sweep, run | {"delta": DELTA}, progress=False)
    line = [word for name, value in run.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["delta", *line, "--epsilon", "1"]) == 2 and words in capsys.readouterr().err
    assert "bands needs sampling = 'cyclic_poisson'" in refusal(
        ja.sweep, {"noise_multiplier": 1, "sampling_probability": 0.1, "steps": 9, "bands": 2, "delta": DELTA}
    )


def test_the_remedy_for_several_records_leaks_no_less():
    """For two records in one group, the remedy (half the noise, no sampling) costs more than the exact pair."""
    blocks = ja.repeat(ja.PoissonSampled(ja.Gaussian(2.0), 0.3, group=2), 3)
    assert ja.epsilon(blocks, DELTA).upper < ja.epsilon(ja.dp_sgd(2.0 / 2, 1.0, 3), DELTA).upper


def test_every_parameter_is_calibrated():
    run = {"bands": 4, "groups": 5, **CYCLIC}
    ask = lambda noise, rate, **length: ja.epsilon(ja.dp_sgd(noise, rate, **length, **run), DELTA).upper
    noise = ja.calibrate_noise_multiplier(1.0, DELTA, 0.2, 33, **run)
    assert noise.value == ja.calibrate_noise_multiplier(1.0, DELTA, 0.2, 7).value
    steps = ja.calibrate_steps(1.0, DELTA, 2.0, 0.2, **run)
    assert steps.value % 5 == 0 and steps.best  # a whole block costs no more than its first step
    assert ask(2.0, 0.2, steps=steps.value) <= 1.0 < ask(2.0, 0.2, steps=steps.value + 1)
    rate = ja.calibrate_sampling_probability(1.0, DELTA, 2.0, 33, **run)
    assert 0.999 <= ask(2.0, rate.value, steps=33) <= 1.0
    passes = ja.calibrate_sampling_probability(1.0, DELTA, 2.0, epochs=3, rtol=1e-2, **run)
    assert 0.97 <= ask(2.0, passes.value, epochs=3) <= 1.0
    risk = ja.calibrate_noise_multiplier(target_advantage=0.1, sampling_probability=0.2, steps=33, **run)
    assert 0.0999 <= risk.risk.upper <= 0.1


def test_a_sweep_searches_for_no_matrix(monkeypatch):
    monkeypatch.setattr(optimise, "_minimise", None)
    grid = {"bands": [1, 5], "epochs": [1, 2.5], "batch_size": 30, "dataset_size": 1000, **CYCLIC}
    table = ja.sweep(grid | {"noise_multiplier": 2.0, "delta": DELTA}, progress=False)
    assert table["groups"].tolist() == table["bands"].tolist() == np.repeat([1.0, 5.0], 2).tolist()
    columns = {name: table[name] for name in ("bands", "epochs", "batch_size")}
    runs = ja.dp_sgd(2.0, dataset_size=1000, **columns, **CYCLIC)
    np.testing.assert_allclose(table["upper"], ja.epsilon(runs, DELTA).upper, rtol=1e-6)
    target = {"target_epsilon": 1.0, "target_delta": DELTA, "epochs": 2.5, "batch_size": 30}
    noise = ja.sweep(grid | target, progress=False)["noise_multiplier"]
    assert (
        noise[-1]
        == ja.calibrate_noise_multiplier(1.0, DELTA, steps=84, sampling_probability=0.15, bands=5, **CYCLIC).value
    )


def test_rows_of_other_rules_have_no_bands(tmp_path):
    grid = tmp_path / "grid.csv"
    lines = ["sampling,bands,groups,cap,dataset_size,noise_multiplier,sampling_probability,steps,delta"]
    lines += ["cyclic_poisson,4,,,,1,0.1,9,1e-5", "cyclic_poisson,4,5,,,1,0.1,9,1e-5", "poisson,,,,,1,0.1,3,1e-5"]
    grid.write_text("\n".join(lines))
    table = ja.sweep(read_grid(grid), progress=False)
    np.testing.assert_array_equal(table["groups"], [4, 5, np.nan])
    assert table["upper"][0] == table["upper"][2] > table["upper"][1]
    both = {"sampling": ["poisson", "cyclic_poisson", "truncated_poisson"], "bands": 4, "cap": 99}
    mixed = both | {"batch_size": 30, "dataset_size": 1000, "epochs": 1, "noise_multiplier": 1.0, "delta": DELTA}
    table = ja.sweep(mixed, progress=False)
    np.testing.assert_array_equal(table["bands"], [np.nan, 4, np.nan])
    np.testing.assert_array_equal(table["cap"], [np.nan, np.nan, 99])


def test_the_command_line_takes_bands(capsys):
    run = ["--noise-multiplier", "1", "--sampling", "cyclic_poisson", "--bands", "4", "--groups", "5"]
    run += ["--batch-size", "30", "--dataset-size", "1000"]
    asked = ["--epsilon", "1", "--json"]
    assert main(["delta", *run, "--steps", "5", *asked]) == 0
    told = json.loads(capsys.readouterr().out)["upper"]
    assert main(["delta", "--noise-multiplier", "1", "--sampling-probability", "0.15", "--steps", "1", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == told
    assert main(["epsilon", *run, "--epochs", "2", "--delta", "1e-5"]) == 0
    assert "run       sampling_probability = 0.15, steps = 67" in capsys.readouterr().out
