"""Sweeps of a DataFrame or a list of dicts: rows in order, with columns of the user's own beside the answers."""

import inspect
import warnings

import numpy as np
import pytest

import jaxacct as ja
from jaxacct import plots, report
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.core.keywords import MEANINGS
from jaxacct.selection import select
from jaxacct.sweeps import read_grid, read_table
from jaxacct.sweeps.grid import COLUMNS
from jaxacct.training import Plan

RUN = {"noise_multiplier": 2.0, "sampling_probability": 1, "steps": 1, "delta": 1e-5}
CALIBRATION = {"sampling_probability": 1, "steps": 1, "target_delta": 1e-5, "target_epsilon": 2.0}
CSV = "site,noise_multiplier,sampling_probability,steps,delta\nA,2,1,1,1e-5\n07,3,1,1,1e-5\n"


def refusal(call, *args, **kwargs):
    with pytest.raises(ja.InputError) as refused:
        call(*args, **kwargs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {
            "site": ["A", "B", "C"],
            "noise_multiplier": [2.0, None, 3.0],
            "sampling_probability": 1.0,
            "steps": [1, 1, 2],
            "target_delta": 1e-5,
            "target_epsilon": [None, 2.0, None],
            "day": pandas.date_range("2024-01-01", periods=3),
            "patients": [10, 20, 30],
            "blind": [True, False, True],
        },
        index=["z", "y", "x"],
    )


def test_records_are_answered_in_order_with_what_else_they_hold():
    runs = [
        RUN | {"site": "A", "n": 5},
        CALIBRATION | {"site": "B"},
        RUN | {"noise_multiplier": 3.0, "site": "C", "n": 7},
    ]
    table = ja.sweep(runs)
    assert table["site"].tolist() == ["A", "B", "C"]
    np.testing.assert_array_equal(table["n"], [5.0, np.nan, 7.0])
    assert table["quantity"].tolist() == ["epsilon", "noise_multiplier", "epsilon"]
    exact = ja.epsilon(ja.Gaussian([2.0, 3.0]), 1e-5)
    np.testing.assert_allclose(table["upper"][[0, 2]], exact.upper, rtol=1e-12)
    assert table["noise_multiplier"][1] == ja.calibrate_noise_multiplier(2.0, 1e-5, 1.0, 1).value


def test_a_frame_comes_back_with_its_index_and_columns():
    given = frame()
    answered = ja.sweep(given)
    assert type(answered) is type(given) and answered.index.tolist() == ["z", "y", "x"]
    for name in ("site", "day", "patients", "blind"):
        assert answered[name].tolist() == given[name].tolist() and answered[name].dtype == given[name].dtype
    assert answered["quantity"].tolist() == ["epsilon", "noise_multiplier", "epsilon"]
    joined = given.join(answered[["upper"]])
    assert joined.loc["z", "upper"] == ja.epsilon(ja.Gaussian(2.0), 1e-5).upper


def test_columns_keep_their_types():
    pandas = pytest.importorskip("pandas")
    given = pandas.DataFrame(
        {
            "noise_multiplier": np.array([1.0, 1.5], np.float32),
            "batch_size": [64, 32],
            "dataset_size": np.array([6400, 6400], np.int32),
            "steps": pandas.array([100, 200], dtype="Int64"),
            "delta": [1e-5, None],
            "epsilon": [None, 1],
            "site": pandas.Categorical(["A", "B"]),
            "seed": pandas.array([None, 7], dtype="Int64"),
        },
        index=pandas.MultiIndex.from_tuples([("x", 1), ("x", 2)]),
    )
    answered = ja.sweep(given)
    assert answered.index.equals(given.index)
    for name in given.columns.drop(["delta", "epsilon"]):
        pandas.testing.assert_series_equal(answered[name], given[name])
    assert set(answered[["delta", "epsilon"]].dtypes) == {np.dtype(float)}


def test_counts_are_whole_numbers_and_levels_of_an_index_have_names(tmp_path):
    pandas = pytest.importorskip("pandas")
    given = pandas.DataFrame(
        {"noise_multiplier": [50.0, 60.0], "batch_size": 10, "dataset_size": 100, "epochs": [1, 2], "delta": 1e-5},
        index=pandas.MultiIndex.from_tuples([("x", 1), ("x", 2)]),
    )
    answered = ja.sweep(given)
    whole = ["dataset_size", "batch_size", "epochs", "steps"]
    assert set(answered[whole].dtypes) == {np.dtype(np.int64)} and answered["steps"].tolist() == [10, 20]
    answered.to_csv(tmp_path / "result.csv")
    given.to_csv(tmp_path / "grid.csv")
    for table in (read_table(tmp_path / "result.csv"), ja.sweep(tmp_path / "grid.csv")):
        assert table["level_0"].tolist() == ["x", "x"] and [float(x) for x in table["level_1"]] == [1.0, 2.0]
        back = table.to_pandas()
        assert set(back[whole].dtypes) == {np.dtype(np.int64)} and back["upper"].tolist() == answered["upper"].tolist()
    given["epochs"], given["steps"] = [1.0, None], [None, 7.0]  # a cell that is empty, or not whole, leaves floats
    assert ja.sweep(given)["epochs"].dtype == float
    table = read_table(answered)
    table.columns["epochs"] = np.array([0.5, np.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.to_pandas()["epochs"].tolist() == [0.5, np.inf]


def test_an_answer_is_converted_as_before():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answered = ja.sweep(frame())
    assert answered.to_pandas().equals(answered)


def test_the_answer_of_a_frame_is_drawn_and_reported(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    given = pandas.DataFrame(
        {
            "noise_multiplier": pandas.array([2, 3, 4], dtype="Int64"),
            "sampling_probability": 1,
            "steps": 1,
            "delta": 1e-5,
            "site": pandas.Categorical(["A", None, "C"]),
        },
        index=[7, 8, 9],
    )
    answered, table = ja.sweep(given), read_table(ja.sweep(given))
    assert table["site"].tolist() == ["A", "", "C"] and table["noise_multiplier"].tolist() == [2.0, 3.0, 4.0]
    np.testing.assert_array_equal(table["upper"], answered["upper"])
    monkeypatch.setattr("jaxacct.plots.style.save", lambda canvas, path: None)
    assert plots.plot(answered, tmp_path / "figure.png") == plots.plot(table, tmp_path / "figure.png")
    reports = [
        report.report(each, tmp_path / f"{name}.html", rows=[1]) for name, each in (("a", answered), ("b", table))
    ]
    assert [claim.upper for claim in reports[0].claims] == [claim.upper for claim in reports[1].claims]
    assert "no column" in refusal(read_table, given)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_stands_beside_the_answers_is_written_and_read(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"result.{ending}"
    table = ja.sweep(frame(), out=path)
    assert table.index.tolist() == ["z", "y", "x"]
    again = read_table(path)
    assert list(again.columns) == list(table.columns)
    assert again["site"].tolist() == ["A", "B", "C"] and again["patients"].tolist() == [10.0, 20.0, 30.0]
    assert again["blind"].tolist() == ["True", "False", "True"] and again["day"][0].startswith("2024-01-01")
    np.testing.assert_array_equal(again["upper"], table["upper"])


def test_a_csv_grid_keeps_its_other_columns(tmp_path):
    (tmp_path / "grid.csv").write_text(CSV)
    assert read_grid(tmp_path / "grid.csv").beside["site"].tolist() == ["A", "07"]
    assert ja.sweep(tmp_path / "grid.csv", out=tmp_path / "out.csv")["site"].tolist() == ["A", "07"]
    assert "A,epsilon" in (tmp_path / "out.csv").read_text()


def test_an_interrupted_sweep_goes_on_with_its_other_columns(tmp_path):
    (tmp_path / "grid.csv").write_text(CSV)
    out = tmp_path / "out.csv"
    ja.sweep(tmp_path / "grid.csv", out=out)
    whole = out.read_text()
    ja.sweep(tmp_path / "grid.csv", out=out, overwrite=True, block=1)
    assert out.read_text() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sigma": 1}, "unknown column 'sigma'; did you mean 'noise_multiplier'?"),
        ({"noise_multipler": 1}, "did you mean 'noise_multiplier'?"),
    ],
)
def test_a_column_that_looks_like_a_missing_input_is_refused(change, words):
    rest = {name: value for name, value in RUN.items() if name != "noise_multiplier"}
    assert words in refusal(ja.sweep, [rest | change])
    assert len(ja.sweep([RUN | change])) == 1  # no input is missing, so `change` is a column of the user's own


@pytest.mark.parametrize("name", ["Noise Multiplier", "STEPS", "Group", "groupSize", "Cap", "noise-multiplier", "tpr"])
def test_another_spelling_of_an_input_is_refused(name):
    right = {"noise": "noise_multiplier", "steps": "steps", "group": "group", "cap": "cap", "tpr": "target_tpr"}
    wanted = next(word for start, word in right.items() if name.lower().startswith(start))
    assert f"unknown column {name!r}; did you mean {wanted!r}?" in refusal(ja.sweep, [RUN | {name: 3}])


OTHER_WORDS = {
    "candidates": "adaptive", "top": 3, "bound": "renyi", "k": 3, "Top": 3, "candidate": "adaptive",
    "Relation": "replace_one", "adjacency": "replace", "neighbouring_relation": "replace_one",
    "neighboring relation": "replace_one", "Neighbouring": "replace_one", "relation": "replace_one",
    "group_size": 3, "sampling_method": "shuffled", "sampler": "shuffled", "batch rule": "shuffled",
    "unit": "user", "strategy": "banded", "noise": "banded", "Noise-Schedule": "linear", "sampling_rates": 0.5,
    "rtol": 0.1, "backend": "xla", "mechanism": "Laplace", "max_steps": 5, "participations": 2, "Engine": "lattice",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_WORDS)
@pytest.mark.parametrize("make", ["records", "frame", "csv"])
def test_a_column_that_would_change_the_answer_is_refused(tmp_path, name, make):
    row = RUN | {"repetitions": "geometric", "gamma": 0.2, "site": "A", name: OTHER_WORDS[name]}
    if make == "csv":
        grid = tmp_path / "grid.csv"
        grid.write_text("\n".join(",".join(map(str, line)) for line in (row, row.values())))
    else:
        grid = [row] if make == "records" else pytest.importorskip("pandas").DataFrame([row])
    assert name in refusal(ja.sweep, grid)


def test_the_refusal_says_who_takes_the_column():
    runs = [RUN | {"repetitions": "geometric", "gamma": 0.2, "top": top} for top in (None, 3)]
    told = refusal(ja.sweep, runs)
    assert told.startswith("record 1: top = 3 is no input of a sweep") and "selection.select" in told
    assert "relation=" in (told := refusal(ja.sweep, [RUN | {"adjacency": "replace"}])) and "--relation" in told
    assert "training.Plan" in refusal(ja.sweep, [RUN | {"unit": "user"}])


def words_of_questions():
    questions = (ja.dp_sgd, ja.epsilon, ja.delta, ja.risk, ja.calibrate, ja.calibrate_noise_multiplier, select, Plan)
    questions += (ja.calibrate_sampling_probability, ja.calibrate_steps)
    words = {word for question in questions for word in inspect.signature(question).parameters}
    asked = ("epsilon", "delta", "calibrate", "advise", "risk", "select")
    words |= {*CONFIGURATION, *(word for command in asked for word in QUESTION[command]), "mechanism", "candidates"}
    return sorted(words - {*COLUMNS, "run"})  # `run` is a mechanism, which no cell holds


@pytest.mark.parametrize("name", words_of_questions())
def test_a_word_of_any_question_is_refused(name):
    refusal(ja.sweep, [RUN | {name: 1}])


@pytest.mark.parametrize("name", sorted(set(MEANINGS) - {*COLUMNS}))
def test_a_name_from_elsewhere_is_refused_unless_a_given_input_says_the_same(name):
    said = {"noise_multiplier", "sampling_probability", "steps", "dataset_size", "batch_size", "epochs"}
    if MEANINGS[name][0] in said and name not in words_of_questions():
        assert ja.sweep([RUN | {name: 7}])["steps"].tolist() == [1.0]
    else:
        refusal(ja.sweep, [RUN | {name: 1}])


def test_columns_of_the_users_own_are_kept():
    own = {"model": "cnn", "dataset": "MNIST", "accuracy": 0.9, "notes": "x", "seed": 1, "site": "A", "run": 4}
    own |= {"lr": 0.1, "clip_norm": 1.0, "round": 2, "cost": 3.0, "date": "today", "loss": 0.1, "author": "B", "id": 5}
    table = ja.sweep([RUN | own | {"name": "first"}])
    assert {name: table[name][0] for name in own} == own and table["name"].tolist() == ["first"]
    inputs = {name: table[name][0] for name in table.columns if name in COLUMNS and name != "epsilon"}
    assert ja.sweep([inputs | own])["upper"].tolist() == table["upper"].tolist()


CAPPED = {"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 2, "delta": 1e-5, "dataset_size": 100}
TRUNCATED = CAPPED | {"sampling": "truncated_poisson", "cap": 12}


@pytest.mark.parametrize("extra", [{"cap": 12}, {"bands": 4}, {"groups": 4}, {"bands": 4, "groups": 4}])
@pytest.mark.parametrize("make", ["records", "frame", "csv"])
def test_a_number_of_another_rule_is_refused_in_the_row_that_has_it(tmp_path, extra, make):
    rule = "truncated_poisson" if "cap" in extra else "cyclic_poisson"
    rows = [CAPPED | {"sampling": rule, "bands": 4} | extra, CAPPED | {"sampling": "poisson"} | extra]
    rows[0] = {name: rows[0][name] for name in rows[0] if name != "bands" or rule == "cyclic_poisson"}
    pandas = pytest.importorskip("pandas")
    if make == "csv":
        pandas.DataFrame(rows).to_csv(tmp_path / "grid.csv", index=False)
    grid = {"records": rows, "frame": pandas.DataFrame(rows), "csv": tmp_path / "grid.csv"}[make]
    place = {"records": "record 1: ", "frame": "row 1: ", "csv": f"{tmp_path / 'grid.csv'}: line 3: "}[make]
    told = refusal(ja.sweep, grid)
    assert told.startswith(f"{place}{next(iter(extra))}") and f"needs sampling = {rule!r}" in told


def test_rows_that_leave_the_number_out_stand_beside_rows_that_give_it():
    rows = [CAPPED | {"sampling": "poisson", "cap": np.nan}, TRUNCATED, CAPPED | {"sampling": "poisson"}]
    np.testing.assert_array_equal(ja.sweep(rows)["cap"], [np.nan, 12, np.nan])
    zipped = CAPPED | {"sampling": ["truncated_poisson", "poisson"], "cap": 12}
    assert "sampling[1] = 'poisson'" in refusal(ja.sweep, zipped, mode="zip")


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ([], "no configurations"),
        ([3], "grid[0] = 3 of type int is no record"),
        (["a"], "no record"),
        ([{"a": 1}], "no column is an input"),
        ([RUN | {"upper": 3}], "name of a column of the answer"),
        ([RUN, RUN | {"steps": -1}], "record 1: steps = -1 must be"),
        ([RUN, RUN | {"steps": "a"}], "record 1: steps = 'a' must be"),
        ([RUN, RUN | {"steps": None}], "record 1: steps and epsilon are missing"),
        ([RUN | {"num_steps": 1, "steps": 2}, {"q": 3}], "record 1"),
    ],
)
def test_bad_records_are_refused_with_their_place(grid, words):
    assert words in refusal(ja.sweep, grid)


def test_a_bad_row_of_a_frame_is_named_by_its_label():
    bad = frame()
    bad.loc["y", "steps"] = 0
    assert "row 'y': steps" in refusal(ja.sweep, bad)
    assert "appears twice" in refusal(ja.sweep, frame().rename(columns={"day": "site"}))
    assert "no configurations" in refusal(ja.sweep, frame().iloc[:0])


def test_options_that_do_not_go_with_records_are_refused(tmp_path):
    assert "mode is for a dict" in refusal(ja.sweep, [RUN], mode="zip")
    assert "leave steps out" in refusal(ja.sweep, [RUN], quantity="steps")
    beside = refusal(ja.sweep, [RUN | {"site": "A"}], out=tmp_path / "out.csv", shard="1/2")
    assert "'site'" in beside and "without shard" in beside


@pytest.mark.parametrize(
    "cells", [([2.0], [4.0]), ([2.0, 3.0], [4.0, 5.0]), (np.array([2.0]), np.array([4.0])), ((2.0,), (4.0,))]
)
@pytest.mark.parametrize("make", [list, "frame"])
def test_a_list_in_a_cell_does_not_give_one_row_the_answer_of_another(cells, make):
    rows = [
        {"noise_multiplier": c, "sampling_probability": 1, "steps": 1, "delta": 1e-5, "site": s}
        for c, s in zip(cells, "AB", strict=True)
    ]
    grid = rows if make is list else pytest.importorskip("pandas").DataFrame(rows)
    with pytest.raises(ja.InputError, match=r"noise_multiplier = .* must be one value") as refused:
        ja.sweep(grid, progress=False)
    assert str(refused.value).startswith(("record 0: ", "row 0: ")) and "\n" not in str(refused.value)


def test_columns_that_are_one_as_text_are_refused():
    row = {"noise_multiplier": 2.0, "sampling_probability": 1, "steps": 1, "delta": 1e-5}
    with pytest.raises(ja.InputError, match="record 1: two of its columns"):
        ja.sweep([row, row | {1: "a", "1": "b"}], progress=False)
    nan = ja.sweep([row | {"epsilon": np.float32("nan")}], progress=False)
    assert nan["upper"].tolist() == ja.sweep([row], progress=False)["upper"].tolist()
