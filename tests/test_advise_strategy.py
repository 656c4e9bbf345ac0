"""Advice on correlated noise: certified noise, errors by dense matrices, and the optimum of a worked example."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from helpers import refusal
from scipy import optimize

import jaxacct as ja
from jaxacct import strategies
from jaxacct.cli import main
from jaxacct.training import Plan, advise_strategy
from jaxacct.training.plan import strategy_advice

WORKED = {
    0.5: [28.94, 28.10, 28.13, 29.16, 31.53, 35.80],
    2.0: [13.69, 11.57, 10.37, 9.93, 10.17, 11.08],
    8.0: [8.70, 6.84, 5.55, 4.73, 4.28, 4.16],
}
"""{epsilon: errors of 1, 2, 4, ..., 32 bands}: 512 steps, rate .01, delta 1e-5, by another optimiser and accountant."""
RUN = {"target_delta": 1e-5, "dataset_size": 1050, "batch_size": 100.0, "steps": 11}
"""A pass takes 10.5 steps. Neither a pass nor a run is a whole number of blocks of 4 steps."""


@pytest.fixture(scope="module", params=[11, pytest.param(23, marks=pytest.mark.slow)])
def advice(request):
    return advise_strategy(target_epsilon=5.0, **RUN | {"steps": request.param}, bands=[4, 1, 4], relation="zero_out")


@pytest.fixture
def banded(advice):
    """The options with Poisson samples. Banded noise is the best of them."""
    return dataclasses.replace(advice, options=advice.options[::2])


def mechanism(option, noise, steps):
    """The run of an option, built from its numbers alone."""
    if option.sampling == "random_allocation":
        return ja.dp_sgd(noise, slots=option.groups, steps=steps, sampling="random_allocation")
    if option.sampling == "fixed_order":
        way = strategies.MinSeparation(option.groups)
        return ja.MatrixMechanism(option.strategy, noise * option.strategy.sensitivity(way).upper, way)
    way = strategies.CyclicPoisson(option.groups, option.sampling_probability)
    return ja.MatrixMechanism(option.strategy, noise, way)


def test_every_noise_meets_the_target_and_little_less_does_not(advice):
    assert [one.sampling for one in advice.options] == [
        "poisson",
        "random_allocation",
        "cyclic_poisson",
        "fixed_order",
    ]
    for option in advice.options:
        assert option.status == "ok" and option.epsilon <= 5.0
        assert ja.epsilon(mechanism(option, option.noise_multiplier, advice.steps), 1e-5).upper <= 5.0 * (1 + 1e-12)
        short = 0.97 if option.sampling == "cyclic_poisson" else 0.999  # advice counts a cut last block as whole
        assert ja.epsilon(mechanism(option, short * option.noise_multiplier, advice.steps), 1e-5).lower > 5.0, option


def test_the_groups_have_the_batch_that_was_asked_for(advice):
    for option in advice.options[:3]:
        records = 1050 * option.sampling_probability / (1 if option.sampling == "random_allocation" else option.groups)
        assert records == pytest.approx(100.0 if option.sampling != "random_allocation" else 1050 / 11)


def test_errors_are_those_of_dense_matrices(advice):
    size = advice.steps
    sums, found = np.tri(size), {}
    for option in advice.options:
        matrix = np.zeros((size, size))
        for lag, value in enumerate(option.strategy.column):
            matrix += value * np.eye(size, k=-lag)
        unit = option.strategy.sensitivity(strategies.MinSeparation(max(option.groups, 11))).upper
        noise = option.noise_multiplier * (unit if option.sampling == "fixed_order" else 1.0)
        found[option.sampling] = noise * np.linalg.norm(sums @ np.linalg.inv(matrix)) / size**0.5
    found["random_allocation"] *= 100.0 / (1050 / 11)
    for option in advice.options:
        assert option.error == pytest.approx(found[option.sampling], rel=1e-9)
        assert option.relative == pytest.approx(found[option.sampling] / found["poisson"], rel=1e-9)
    assert advice.best.error == pytest.approx(min(found.values()), rel=1e-12)


def test_the_plan_of_an_option_has_its_noise_and_costs_what_the_advice_says(advice):
    for option in advice.options:
        plan = Plan(**advice.plan_arguments(option))
        assert plan.noise_multiplier == pytest.approx(option.noise_multiplier, rel=2e-4), option
        assert plan.epsilon.upper == pytest.approx(option.epsilon, rel=1e-3) and plan.steps == advice.steps
        if option.sampling != "fixed_order":
            assert plan.sampling_probability == pytest.approx(option.sampling_probability)


@pytest.mark.parametrize(
    "relation, names",
    [
        ("add_or_remove_one", ["poisson", "random_allocation", "cyclic_poisson"]),
        ("replace_one", ["random_allocation", "fixed_order"]),
    ],
)
def test_only_options_that_a_plan_takes_are_listed(monkeypatch, relation, names):
    real = strategy_advice.calibrate_noise_multiplier

    def of_all_records(sampling_probability=1.0, steps=1, slots=None, sampling=None, **settings):
        return real(sampling_probability=np.ones(np.shape(sampling_probability)), steps=steps, **settings)

    monkeypatch.setattr(strategy_advice, "calibrate_noise_multiplier", of_all_records)  # in closed form
    found = advise_strategy(target_epsilon=8.0, **RUN, bands=[2], relation=relation)
    assert [option.sampling for option in found.options] == names and found.best.sampling in names
    for option in found.options:
        given = found.plan_arguments(option) | {"target_epsilon": None}
        assert Plan(**given, noise_multiplier=option.noise_multiplier).sampling == option.sampling
    assert (", replace_one" in str(found)) == (relation == "replace_one") and found.plot()


@pytest.mark.slow
def test_buffered_noise_is_near_the_best_falling_toeplitz_matrix():
    given = {"target_delta": 1e-5, "dataset_size": 10, "batch_size": 1, "steps": 40}
    option = advise_strategy(target_epsilon=2.0, **given, bands=[], relation="zero_out").options[-1]
    place = np.subtract.outer(np.arange(40), np.arange(40))

    def error(drops):
        column = np.append(1.0, np.exp(-np.cumsum(np.exp(drops))))
        matrix = np.where(place >= 0, column[np.maximum(place, 0)], 0.0)
        return np.linalg.norm(matrix[:, ::10].sum(1)) * np.linalg.norm(np.tri(40) @ np.linalg.inv(matrix)) / 40**0.5

    best = optimize.minimize(error, np.log(0.5 / np.arange(1.0, 40.0)), options={"maxiter": 60}).fun
    spent = ja.calibrate_noise_multiplier(2.0, 1e-5, 1.0, 1).value
    assert option.groups == 10 and 0.999 < option.error / (spent * best) < 1.06


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_the_worked_optimum(epsilon):
    given = {"target_delta": 1e-5, "dataset_size": 10_000, "batch_size": 100, "steps": 512}
    found = advise_strategy(target_epsilon=epsilon, **given).options
    expected = dict(zip([1, 2, 4, 8, 16, 32], WORKED[epsilon], strict=True))
    errors = {one.groups: one.error for one in found if one.sampling in ("poisson", "cyclic_poisson")}
    assert set(errors) == set(expected)
    for number, error in errors.items():
        assert error == pytest.approx(expected[number], abs=0.0051 + 2e-4 * error)


def test_the_best_option_has_the_arguments_of_its_plan(banded):
    assert banded.best.sampling == "cyclic_poisson"
    given = banded.plan_arguments()
    assert given["noise"] == strategies.Banded(4, banded.steps) and given["sampling"] == "cyclic_poisson"


def test_a_budget_that_nothing_meets():
    given = {"target_delta": 1e-300, "dataset_size": 9, "batch_size": 9, "steps": 1}
    found = advise_strategy(target_epsilon=1e-9, **given)
    assert {one.status for one in found.options} == {"infeasible_noise"} and "nan" in str(found)
    assert "met by no option" in refusal(lambda: found.best)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"bands": [2, 11]}, "bands[1] = 11 must be <= 10, the steps of a pass and of the run"),
        ({"bands": [2.0]}, "bands[0] = 2.0 must be an integer >= 1"),
        ({"batch_size": 2000}, "batch_size = 2000 must be <= dataset_size = 1050"),
        ({"epochs": 2}, "steps and epochs say the same thing twice"),
        ({"target_epsilon": [1.0, 2.0]}, "target_epsilon must be one number"),
        ({"target_delta": 0.0}, "target_delta = 0.0 must be > 0"),
        ({"relation": "swap"}, "relation = 'swap' is not known"),
    ],
)
def test_refusals(given, words):
    assert words in refusal(advise_strategy, **{"target_epsilon": 2.0, **RUN, **given})


def test_the_picture_has_every_option(advice):
    axes = advice.plot()
    line, *others = axes.get_lines()
    assert line.get_xydata().tolist() == [[1, advice.options[0].error], [4, advice.options[2].error]]
    assert [each.get_ydata()[0] for each in others] == [advice.options[1].error, advice.options[3].error]


def test_the_command_prints_and_writes_the_table(capsys, tmp_path, banded, monkeypatch):
    asked = []
    monkeypatch.setattr("jaxacct.training.advise_strategy", lambda **given: asked.append(given) or banded)
    names = {"target_epsilon": 5, **RUN, "relation": "zero_out"}
    words = [word for name, value in names.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["advise", *words, "--bands", "4", "1", "--json", "--out", str(tmp_path / "table.csv")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(banded.to_dict()))
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["noise_multiplier"]) for row in rows] == [one.noise_multiplier for one in banded.options]
    assert main(["advise", *words, "--bands", "4,1", "--out", str(tmp_path / "picture.png")]) == 0
    out = capsys.readouterr().out
    assert "least error: cyclic_poisson, Banded(bands=4" in out and "try bands=[8]" in out
    assert len(out.splitlines()) == 7 and (tmp_path / "picture.png").stat().st_size
    assert asked == [names | {"bands": [4, 1]}] * 2
    monkeypatch.undo()
    assert main(["epsilon", "--bands", "4", "16"]) == 2
    assert "'16'; several numbers have commas between, such as 4,16" in capsys.readouterr().err
    assert main(["advise", "--target-epsilon", "2"]) == 2
    assert capsys.readouterr().err == "jaxacct advise: target_delta is missing; give --target-delta\n"
