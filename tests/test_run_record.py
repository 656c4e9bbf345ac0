"""One record describes a run of DP-SGD, and every door takes it: the same words, the same answer."""

import inspect
import json

import numpy as np
import pytest
from helpers import refusal
from mechanism_tables import EXAMPLES

import jaxacct as ja
from jaxacct import strategies
from jaxacct.cli import main
from jaxacct.cli.arguments import CONFIGURATION
from jaxacct.interop.documents import mechanism_of
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, NUMBERS, RATES, RULES, usual_relation
from jaxacct.plots import style
from jaxacct.report import report
from jaxacct.sweeps import Table
from jaxacct.sweeps.grid import FIELDS
from jaxacct.training import Plan

DELTA = 1e-5
NOT_IN_PLANS = {"group", "bands"}
"""A plan has `unit="user"` for groups. Its bands are those of its noise strategy."""
SOLVED = {
    ja.calibrate_noise_multiplier: {"noise_multiplier"},
    ja.calibrate_sampling_probability: set(RATES),
    ja.calibrate_steps: set(LENGTHS),
}
"""The calibrations, with the numbers that they solve for."""
RUNS = {
    "poisson": {"batch_size": 30, "dataset_size": 1000, "epochs": 2},
    "random_allocation": {"batch_size": 30, "dataset_size": 1000, "epochs": 2},
    "truncated_poisson": {"batch_size": 30, "dataset_size": 1000, "epochs": 2, "cap": 60},
    "without_replacement": {"batch_size": 30, "dataset_size": 1000, "epochs": 2},
    "with_replacement": {"batch_size": 2, "dataset_size": 20, "epochs": 0.1},
    "cyclic_poisson": {"batch_size": 30, "dataset_size": 1000, "epochs": 2, "bands": 4, "groups": 5},
    "shuffled": {"slots": 34, "epochs": 1},
}
"""A run by every batch rule."""


def doors():
    """(door, the words it takes, the words it need not take)."""
    yield "dp_sgd", inspect.signature(ja.dp_sgd).parameters, set()
    for function, solved in SOLVED.items():
        yield function.__name__, inspect.signature(function).parameters, solved
    yield "sweep", {*FIELDS, "sampling"}, set()
    yield "command line", {*CONFIGURATION, "sampling"}, set()
    yield "Plan", inspect.signature(Plan).parameters, NOT_IN_PLANS


@pytest.mark.parametrize("door, taken, left", list(doors()), ids=lambda x: x if isinstance(x, str) else "")
def test_every_door_takes_every_word(door, taken, left):
    assert {*NUMBERS, "sampling"} - set(left) <= set(taken), door


def with_a_bad(name):
    """A run of which one number is not allowed; all others are right."""
    run = {"noise_multiplier": 2.0, "sampling_probability": 0.1, "steps": 10}
    if name in ("batch_size", "dataset_size"):
        run = {"noise_multiplier": 2.0, "batch_size": 30, "dataset_size": 1000, "steps": 10}
    elif name == "slots":
        run = {"noise_multiplier": 2.0, "slots": 10, "steps": 10, "sampling": "shuffled"}
    elif name == "epochs":
        run = {"noise_multiplier": 2.0, "sampling_probability": 0.1, "epochs": 2}
    elif name == "cap":
        run |= {"dataset_size": 1000, "cap": 60, "sampling": "truncated_poisson"}
    elif name in ("bands", "groups"):
        run |= {"bands": 4, "groups": 5, "sampling": "cyclic_poisson"}
    return run | {name: -1}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_door_reads_every_number(capsys, name):
    """Each door refuses a bad number. A door that ignored the number would answer."""
    run = with_a_bad(name)
    assert name in refusal(ja.dp_sgd, **run)
    assert name in refusal(ja.sweep, {**run, "delta": DELTA}, progress=False)
    line = [f"--{word.replace('_', '-')}={number}" for word, number in run.items()]
    assert main(["epsilon", "--delta", "1e-5", *line]) == 2
    assert name in capsys.readouterr().err
    for calibrate, solved in SOLVED.items():
        if name not in solved:
            left = set(solved) | ({"steps"} if name == "epochs" else set())
            given = {word: number for word, number in run.items() if word not in left}
            assert name in refusal(calibrate, 1.0, DELTA, **given), calibrate
    if name not in NOT_IN_PLANS:
        own = {word: number for word, number in run.items() if word == name or word not in NOT_IN_PLANS}
        said = refusal(Plan, target_delta=DELTA, **{"dataset_size": 1000, **own})
        assert name in said


def test_axes_have_names_for_every_word():
    assert {*NUMBERS, "sampling"} <= set(style.MEANING)


def test_every_rule_has_an_example():
    assert set(RUNS) == set(RULES)


@pytest.mark.parametrize("sampling", RULES)
def test_every_door_gives_the_same_epsilon(capsys, sampling):
    run, relation = RUNS[sampling], usual_relation(sampling)
    asked = ja.epsilon(ja.dp_sgd(2.0, **run, sampling=sampling), DELTA, relation=relation)
    table = ja.sweep({"noise_multiplier": 2.0, **run, "sampling": sampling, "delta": DELTA}, progress=False)
    assert table["upper"][0] == pytest.approx(float(asked.upper), rel=1e-9)
    assert table["relation"][0] == relation
    line = [word for name, number in run.items() for word in (f"--{name.replace('_', '-')}", str(number))]
    line += ["--noise-multiplier", "2", "--delta", "1e-5", "--sampling", sampling, "--json"]
    assert main(["epsilon", *line]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["upper"] == pytest.approx(float(asked.upper), rel=1e-9) and told["relation"] == relation


@pytest.mark.parametrize("sampling", ["poisson", "random_allocation", "shuffled", "without_replacement"])
def test_a_plan_gives_the_same_epsilon(sampling):
    run = {"noise_multiplier": 2.0, "batch_size": 50, "dataset_size": 1000, "epochs": 1, "sampling": sampling}
    asked = ja.epsilon(ja.dp_sgd(**run), DELTA, relation=usual_relation(sampling))
    assert float(Plan(target_delta=DELTA, **run).epsilon.upper) == pytest.approx(float(asked.upper), rel=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("poisson", "random_allocation")),
        *("with_replacement", "cyclic_poisson", "shuffled"),
    ],
)
def test_calibrated_noise_meets_the_target_in_the_run(sampling):
    """The other rules are in `test_batch_rules_asked.py`."""
    run, relation = RUNS[sampling], usual_relation(sampling)
    found = ja.calibrate_noise_multiplier(2.0, DELTA, **run, sampling=sampling)
    assert found.relation == relation
    spent = ja.epsilon(ja.dp_sgd(found.value, **run, sampling=sampling), DELTA, relation=relation)
    assert 1.99 <= float(spent.upper) <= 2.0


def test_noise_under_replace_one():
    """The old code refused the relation. Its error advised other relations, under which the same run leaks less."""
    run = {"sampling_probability": 0.3, "steps": 1}
    found = ja.calibrate_noise_multiplier(1.0, DELTA, **run, relation="replace_one")
    spent = ja.epsilon(ja.dp_sgd(found.value, **run), DELTA, relation="replace_one")
    assert 0.999 <= float(spent.upper) <= 1.0 and found.epsilon.kind == "bound"
    assert found.value > ja.calibrate_noise_multiplier(1.0, DELTA, **run).value
    full = {"sampling_probability": 1.0, "steps": 2}  # in closed form
    alone = ja.calibrate_noise_multiplier(1.0, DELTA, **full, relation="replace_one")
    table = ja.sweep({**full, "target_epsilon": 1.0, "target_delta": DELTA}, relation="replace_one", progress=False)
    assert table["noise_multiplier"][0] == alone.value and table["relation"][0] == "replace_one"
    words = refusal(ja.calibrate_noise_multiplier, target_advantage=0.1, **run, relation="replace_one")
    assert "relation = 'replace_one'; give target_epsilon" in words


def test_epochs_with_a_rate_that_is_solved_for():
    found = ja.calibrate_sampling_probability([1.0, 2.0], DELTA, noise_multiplier=1.5, epochs=10)
    run = ja.dp_sgd(1.5, found.value, epochs=10)
    assert np.all(found.ok) and not np.any(found.best)  # a larger rate has fewer steps
    assert np.all(ja.epsilon(run, DELTA).upper <= [1.0, 2.0]) and np.all(found.epsilon.upper > [0.99, 1.98])


def test_many_epochs_and_no_rate_that_holds_are_a_status():
    found = ja.calibrate_sampling_probability(2.0, DELTA, noise_multiplier=[1.0, 100.0], epochs=[1e15, 20])
    assert found.status.tolist() == ["infeasible_rate", "not_binding"]


def test_epochs_and_batch_sizes_are_rounded_to_whole_steps_and_slots():
    assert ja.dp_sgd(1.0, batch_size=256, dataset_size=50_000, epochs=10).steps == 1954
    assert ja.dp_sgd(1.0, 0.1, epochs=3).steps == 30
    shuffled = ja.dp_sgd(1.0, batch_size=300, dataset_size=1000, epochs=2.5, sampling="shuffled")
    assert shuffled.mechanism.batches == 4 and shuffled.steps == 3
    # 12 steps are 4 epochs if the loader drops the last batch of an epoch, and 3 epochs if it keeps this batch
    for keep in (False, True):
        size = 4 if keep else 3
        counted = ja.dp_sgd(1.0, batch_size=300, dataset_size=1000, steps=12, sampling="shuffled").steps
        assert counted >= np.ceil(12 / size)
    allocated = ja.dp_sgd(1.0, batch_size=[300, 500], dataset_size=1000, epochs=3, sampling="random_allocation")
    assert allocated.mechanism.slots.tolist() == [4.0, 2.0] and allocated.steps.tolist() == [3.0, 3.0]


def test_a_rule_may_differ_from_row_to_row():
    rules = ["poisson", "shuffled", "poisson"]
    grid = {"noise_multiplier": 4.0, "batch_size": 250, "dataset_size": 1000, "epochs": 1, "delta": DELTA}
    table = ja.sweep(grid | {"sampling": rules}, mode="zip", progress=False)
    assert table["relation"].tolist() == ["add_or_remove_one", "zero_out", "add_or_remove_one"]
    for row, rule in enumerate(rules):
        run = ja.dp_sgd(4.0, batch_size=250, dataset_size=1000, epochs=1, sampling=rule)
        assert table["upper"][row] == ja.epsilon(run, DELTA, relation=usual_relation(rule)).upper


def test_the_answer_says_which_rate_and_steps_follow(capsys):
    line = ["--batch-size", "256", "--dataset-size", "50000", "--epochs", "10"]
    assert main(["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", *line]) == 0
    assert "run       sampling_probability = 0.00512, steps = 1954" in capsys.readouterr().out
    found = ja.calibrate(ja.Gaussian, target_epsilon=1.0, target_delta=DELTA, bracket=(1.0, 10.0), relation="zero_out")
    assert found.relation == "zero_out"


def test_what_is_said_twice_or_not_at_all_is_refused_in_one_line():
    assert "say the same thing twice" in refusal(ja.dp_sgd, 1.0, 0.1, 10, epochs=1)
    assert "batch_size needs dataset_size" in refusal(ja.dp_sgd, 1.0, batch_size=5, steps=10)
    assert "batch_size[1] = 50 must be <= dataset_size = 20" in refusal(
        ja.dp_sgd, 1.0, batch_size=[5, 50], dataset_size=20, steps=10
    )
    assert "batch_size = 2.5 must be an integer" in refusal(
        ja.dp_sgd, 1.0, batch_size=2.5, dataset_size=20, steps=10, sampling="without_replacement"
    )
    assert "steps is missing; give steps, or epochs" in refusal(ja.dp_sgd, 1.0, 0.1)
    assert "batch_size = 50 must be <= dataset_size = 20" in refusal(
        ja.dp_sgd, 1.0, batch_size=50, dataset_size=20, steps=10, sampling="with_replacement"
    )
    for call, first in ((ja.dp_sgd, (1.0,)), (ja.calibrate_noise_multiplier, (1.0, DELTA))):
        sizes = {"sampling_probability": [0.1, 0.2], "epochs": [1, 2, 3]}
        assert "epochs of shape (3,)" in refusal(call, *first, **sizes)
    assert "do not broadcast" in refusal(ja.dp_sgd, 1.0, slots=[2, 3], steps=[1, 2, 3], sampling="shuffled")
    assert "sampling = ['poisson'] is not known" in refusal(ja.dp_sgd, 1.0, 0.1, 10, sampling=["poisson"])


def test_the_other_name_of_a_rule_is_known_at_every_door(capsys):
    run = {"noise_multiplier": 2.0, "slots": 10, "epochs": 1, "delta": DELTA}
    table = ja.sweep(run | {"sampling": ["fixed_batches", "shuffled"]}, progress=False)
    assert table["sampling"].tolist() == ["shuffled"] * 2 and table["upper"][0] == table["upper"][1]
    line = ["--noise-multiplier", "2", "--slots", "10", "--epochs", "1", "--sampling", "fixed_batches"]
    assert main(["epsilon", *line, "--delta", "1e-5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["upper"] == table["upper"][0] and told["relation"] == "zero_out"
    words = refusal(ja.sweep, run | {"sampling": ["shuffled", "balls_in_bins"]}, progress=False)
    assert words.startswith("sampling[1] = 'balls_in_bins' is not a rule of dp_sgd; build ja.BallsInBins")


def test_a_rate_is_solved_for_in_rows_with_steps_and_rows_with_epochs(capsys):
    target = {"noise_multiplier": 1.5, "target_epsilon": 2.0, "target_delta": DELTA}
    lengths = [{"epochs": 3}, {"steps": 30}]
    table = ja.sweep([target | length for length in lengths], progress=False)
    for row, length in enumerate(lengths):
        alone = ja.calibrate_sampling_probability(2.0, DELTA, noise_multiplier=1.5, **length)
        assert table["status"][row] == "ok" and table["sampling_probability"][row] == pytest.approx(float(alone.value))
    line = ["--noise-multiplier", "100", "--epochs", "3", "--target-epsilon", "2", "--target-delta", "1e-5"]
    assert main(["calibrate", *line]) == 0
    assert "run " not in capsys.readouterr().out  # no other number follows
    line = ["--noise-multiplier", "4", "--slots", "3,4", "--epochs", "1", "--sampling", "shuffled", "--epsilon", "1"]
    assert main(["delta", *line]) == 0
    assert "zero_out" in capsys.readouterr().out  # a table says the relation where it is not the usual one


def test_a_report_knows_the_slots_that_follow_from_a_batch_size(tmp_path):
    sampling = "shuffled"
    run = {"noise_multiplier": 2.0, "batch_size": 300, "dataset_size": 1000, "epochs": 1, "delta": DELTA}
    table = ja.sweep(run | {"sampling": sampling}, progress=False)
    claim = report(table, tmp_path / "page.html").claims[0]
    assert claim.may_be_claimed and claim.upper >= table["upper"][0]
    for name, false in (("sampling_probability", 0.02), ("steps", 34.0)):
        other = Table(table.columns | {name: np.array([false])})
        assert not report(other, tmp_path / f"{name}.html").claims[0].may_be_claimed
    slots = ja.sweep({"noise_multiplier": 2.0, "slots": 5, "epochs": 1, "delta": DELTA, "sampling": sampling})
    other = Table(slots.columns | {"sampling_probability": np.array([0.1])})
    assert not report(other, tmp_path / "slots.html").claims[0].may_be_claimed


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Laplace(10.0)", "ja.Laplace(scale=10.0)"),
        ("ja.repeat(ja.Gaussian(2), 5)", "ja.repeat(ja.Gaussian(noise_multiplier=2.0), steps=5)"),
        ("compose(PureDP(1/4), Gaussian([1, 2.5e0]))", "ja.compose(ja.PureDP(epsilon=0.25), ja.Gaussian("),
        ("selection.select(Gaussian(4.0), Geometric(0.5))", "selection.select(ja.Gaussian("),
        ("dp_sgd(1.0, slots=10, epochs=2, sampling='random_allocation')", "RandomAllocation"),
    ],
)
def test_the_command_takes_any_mechanism(capsys, text, expected):
    assert main(["delta", "--mechanism", text, "--epsilon", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    name = told["mechanism"] if isinstance(told["mechanism"], str) else told["mechanism"][0]
    assert expected in name


IN_BINS = ja.MatrixMechanism(strategies.Identity(4), 4.0, strategies.BallsInBins(2))


@pytest.mark.parametrize("mechanism", [*EXAMPLES, IN_BINS])
def test_what_a_mechanism_shows_can_be_typed(mechanism):
    """The old code read `ja.BallsInBins(mechanism=...)` as `strategies.BallsInBins`, a rule of participation."""
    assert mechanism_of(mechanism.expression()) == mechanism


def test_a_mechanism_may_be_json(capsys):
    from jaxacct.interop import to_json

    run = ja.compose(ja.Laplace(3.0), ja.Gaussian([2.0, 4.0]))
    assert main(["epsilon", "--mechanism", to_json(run), "--delta", "1e-5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == ja.epsilon(run, DELTA).upper.tolist()


@pytest.mark.parametrize(
    "text, words",
    [
        ("Laplas(1)", "did you mean 'Laplace'"),
        ("Laplace(-1)", "scale = -1 must be > 0"),
        ("__import__('os').system('true')", "is no mechanism"),
        ("Laplace(", "is no mechanism"),
        ("Laplace(9**9**9)", "is no mechanism"),
        ("Laplace(*[1])", "cannot stand in a mechanism"),
        ("Laplace(**{'scale': 1})", "cannot stand in a mechanism"),
        ("(lambda: 1)()", "is no mechanism"),
        ("Gaussian.expand(1, 2)", "is no mechanism"),
        ("3", "is no mechanism"),
        ("(" * 9000 + "1", "is no mechanism"),
        ("Laplace(True)", "scale"),
        ("Laplace([])", "is an empty batch"),
        ("{", "mechanism"),
    ],
)
def test_what_is_no_mechanism_is_one_line(capsys, text, words):
    assert main(["epsilon", "--mechanism", text, "--delta", "1e-5"]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_a_mechanism_and_a_run_exclude_each_other(capsys):
    assert main(["epsilon", "--mechanism", "Laplace(1)", "--steps", "3", "--delta", "1e-5"]) == 2
    assert "leave out --steps" in capsys.readouterr().err
