"""Sweeps: what a grid means, what is refused and in which words, and what is written."""

import csv
import importlib.util
import itertools
import math
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers import refusal

from jaxacct.core.progress import Progress, bar
from jaxacct.core.validation import InputError
from jaxacct.sweeps import Table, read_grid, read_table, solve, sweep
from jaxacct.sweeps.grid import FIELDS, QUANTITIES, concatenate, expand

EXAMPLE = Path(__file__).parents[1] / "examples" / "dpsgd_grid.toml"
SMALL = {"noise_multiplier": [2.0, 4.0], "sampling_probability": 1.0, "steps": [1, 4], "delta": 1e-5}
"""Gaussian throughout: answered by a formula, so nothing is compiled."""


def write(folder, name, text):
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_the_product_varies_the_last_field_fastest():
    sizes = {"noise_multiplier": [1.0, 2.0], "sampling_probability": [0.1, 0.2, 0.3], "steps": [5, 6]}
    grid = expand({**sizes, "delta": 1e-5})
    rows = list(zip(*(grid.inputs[name].tolist() for name in sizes), strict=True))
    assert rows == list(itertools.product(*sizes.values()))


def test_zip_broadcasts_and_a_clash_names_both_fields():
    grid = expand({"noise_multiplier": [1, 2], "sampling_probability": 0.1, "steps": [3, 4], "delta": 1e-5}, mode="zip")
    assert len(grid) == 2 and grid.inputs["sampling_probability"].tolist() == [0.1, 0.1]
    fields = {"noise_multiplier": [1, 2], "sampling_probability": 0.1, "steps": [3, 4, 5], "delta": 1e-5}
    assert "noise_multiplier of shape (2,) and steps of shape (3,)" in refusal(expand, fields, mode="zip")


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_what_is_left_out_is_solved_for(quantity):
    full = {
        "noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 10, "epsilon": 1.0, "delta": 1e-5,
    }  # fmt: skip
    del full[quantity]
    grid = expand(full)
    assert grid.quantity.tolist() == [quantity]
    assert expand(full, quantity=quantity).inputs.keys() == grid.inputs.keys()
    targets = {"target_epsilon", "target_delta"} & grid.inputs.keys()
    assert len(targets) == (0 if quantity in ("epsilon", "delta") else 2)


def test_ranges_include_both_ends_and_round_counts():
    grid = expand(
        {
            "noise_multiplier": {"start": 0.5, "stop": 8, "num": 5, "scale": "log"},
            "sampling_probability": {"start": 0.1, "stop": 0.3, "num": 3},
            "steps": {"start": 1, "stop": 1000, "num": 4, "scale": "log"},
            "delta": 1e-5,
        }
    )
    assert np.allclose(np.unique(grid.inputs["noise_multiplier"]), [0.5, 1, 2, 4, 8])
    assert np.allclose(np.unique(grid.inputs["sampling_probability"]), [0.1, 0.2, 0.3])
    assert np.unique(grid.inputs["steps"]).tolist() == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "steps"),
    [(60_000, 128, 10, 4688), (60_000, 256, 40, 9375), (3, 3, 0.1 + 0.2, 1), (30, 3, 0.3, 3), (10, 10, 7, 7)],
)
def test_steps_are_rounded_up_from_epochs(size, batch, epochs, steps):
    fields = {
        "dataset_size": size,
        "batch_size": batch,
        "epochs": epochs,
        "noise_multiplier": 1,
        "delta": 1e-5,
    }
    grid = expand(fields)
    assert grid.inputs["steps"].tolist() == [steps]
    assert grid.inputs["sampling_probability"].tolist() == [batch / size]


GOOD = {"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 10, "delta": 1e-5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multipler": 1.0}, "unknown field 'noise_multipler'; did you mean 'noise_multiplier'?"),
        ({"noise_multiplier": [1.0, -1.0]}, "noise_multiplier[1] = -1.0 must be > 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier = nan must be finite and > 0"),
        ({"noise_multiplier": 0}, "noise_multiplier = 0 must be > 0"),
        ({"noise_multiplier": []}, "noise_multiplier is empty"),
        ({"noise_multiplier": "big"}, "noise_multiplier = 'big' must be a number > 0"),
        ({"noise_multiplier": True}, "noise_multiplier = True must be a number > 0"),
        ({"sampling_probability": 1.5}, "sampling_probability = 1.5 must be >= 0 and <= 1"),
        ({"steps": 1.5}, "steps = 1.5 must be an integer >= 1"),
        ({"delta": 0}, "delta = 0 must be > 0 and < 1"),
        ({"delta": 1.0}, "delta = 1.0 must be > 0 and < 1"),
        ({"epsilon": 1.0}, "nothing is left to solve for"),
        ({"target_delta": 1e-5}, "delta and target_delta say the same thing twice"),
        (
            {"batch_size": 10, "dataset_size": 100},
            "sampling_probability and batch_size say the same thing twice",
        ),
        ({"dataset_size": 100}, "dataset_size needs batch_size"),
        ({"noise_multiplier": {"start": 1, "stop": 2}}, "noise_multiplier range lacks 'num'"),
        ({"noise_multiplier": {"start": 1, "stop": 2, "nun": 2}}, "unknown key 'nun'; did you mean 'num'?"),
        ({"noise_multiplier": {"start": -1, "stop": 2, "num": 2}}, "noise_multiplier.start = -1 must be > 0"),
        (
            {"noise_multiplier": {"start": 1, "stop": 2, "num": 2, "scale": "ln"}},
            "noise_multiplier.scale = 'ln' is not known; use one of 'linear', 'log'",
        ),
        (
            {"sampling_probability": {"start": 0, "stop": 1, "num": 2, "scale": "log"}},
            "sampling_probability range on a log scale must have start and stop > 0",
        ),
        ({"noise_multiplier": {"start": 1, "stop": 2, "num": 1e9}}, "num = 1000000000 must be <= 10000000"),
        (
            {name: {"start": 0.01, "stop": 0.9, "num": 9999} for name in ("noise_multiplier", "delta")},
            "the grid has 99,980,001 configurations",
        ),
    ],
)
def test_a_bad_field_is_refused_in_one_line(change, words):
    assert words in refusal(expand, {**GOOD, **change})


def test_missing_fields_are_named():
    assert "steps and delta are missing" in refusal(
        expand, {"noise_multiplier": 1, "sampling_probability": 0.1, "epsilon": 1}
    )
    assert "delta is missing" in refusal(
        expand, {"noise_multiplier": 1, "sampling_probability": 0.1, "steps": 1}, quantity="epsilon"
    )
    assert "quantity = 'steps' is given as well as asked for" in refusal(expand, GOOD, quantity="steps")
    large = {"dataset_size": 10, "batch_size": 20, "epochs": 1, "noise_multiplier": 1, "delta": 1e-5}
    assert "batch_size = 20 must be <= dataset_size = 10" in refusal(expand, large)


def test_a_toml_grid_has_defaults_blocks_and_ranges(tmp_path):
    path = write(
        tmp_path,
        "grid.toml",
        """
        [defaults]
        target_delta = [1e-5, 1e-6]
        steps = 100
        [[block]]
        name = "first"
        sampling_probability = 0.5
        target_epsilon = {start = 1, stop = 4, num = 3, scale = "log"}
        [[block]]
        zip = true
        sampling_probability = [0.1, 0.2]
        noise_multiplier = [1, 2]
        delta = [1e-7, 1e-8]
        target_delta = 1e-5
        """,
    )
    assert "block 2: delta and target_delta say the same thing twice" in refusal(read_grid, path)
    path.write_text(path.read_text().replace("delta = [1e-7, 1e-8]\n", "", 1))
    grid = read_grid(path)
    assert grid.name.tolist() == ["first"] * 6 + [""] * 2
    assert grid.quantity.tolist() == ["noise_multiplier"] * 6 + ["epsilon"] * 2
    assert np.allclose(grid.inputs["target_epsilon"][:6], [1, 2, 4, 1, 2, 4])
    assert grid.inputs["delta"][6:].tolist() == [1e-5, 1e-5]
    assert np.isnan(grid.inputs["target_delta"][6:]).all()


FLAT = "noise_multiplier = 1\nsampling_probability = 0.1\nsteps = [1, 2]\ndelta = 1e-5\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FLAT.replace("steps", "stesp"), "unknown key 'stesp'; did you mean 'steps'?"),
        (FLAT.replace("[1, 2]", "[1, 2.5]"), "steps[1] = 2.5 must be an integer >= 1"),
        (FLAT.replace("[1, 2]", "'ten'"), "steps = 'ten' must be an integer >= 1"),
        (FLAT.replace("[1, 2]", "[1, 2"), "not valid TOML"),
        (FLAT.replace("delta = 1e-5", ""), "epsilon and delta are missing"),
        (FLAT + "zip = 1", "zip = 1 must be true or false"),
        (FLAT + "name = 1", "name = 1 must be text in quotes"),
        (FLAT + "quantity = 'noise'", "quantity = 'noise' is not known"),
        (FLAT + "[defualts]\nsteps = 1", "unknown key 'defualts'"),
        ("[[blok]]\nsteps = 1", "unknown key 'blok'"),
        (
            "steps = 1\n[[block]]\ndelta = 1e-5",
            "unknown top-level key 'steps'; write shared keys under [defaults]",
        ),
        (
            "[default]\nsteps = 1\n[[block]]\ndelta = 1e-5",
            "unknown top-level key 'default'; did you mean 'defaults'?",
        ),
        ("[block]\ndelta = 1e-5", "write [[block]]"),
        ("defaults = 1", "defaults must be a table"),
        ("[[block]]\nname = 'A'\n" + FLAT.replace("1e-5", "2"), "block 'A': delta = 2 must be > 0 and < 1"),
        ("", "are missing"),
        (FLAT.replace("[1, 2]", "1" * 5000), "not valid TOML"),
        (FLAT.replace("[1, 2]", "[" * 5000 + "]" * 5000), "nested too deeply"),
        (FLAT.replace("[1, 2]", "[[1, 2], [3]]"), "not a ragged sequence"),
    ],
)
def test_a_bad_toml_is_refused_in_one_line_with_its_place(tmp_path, text, words):
    path = write(tmp_path, "grid.toml", text)
    message = refusal(read_grid, path)
    assert words in message and message.startswith(str(path))


def test_a_csv_grid_keeps_its_order_and_leaves_empty_cells_open(tmp_path):
    path = write(
        tmp_path,
        "grid.csv",
        """\
        name,noise_multiplier,sampling_probability,steps,epsilon,delta
        a,1.0,0.1,10,,1e-5
        b,,0.1,10,2,1e-5

        c,2.0,0.2,20,,1e-6
        d,2.0,0.2,20,1,
        """,
    )
    grid = read_grid(path)
    assert grid.name.tolist() == ["a", "b", "c", "d"]
    assert grid.quantity.tolist() == ["epsilon", "noise_multiplier", "epsilon", "delta"]
    assert grid.inputs["delta"].tolist()[::2] == [1e-5, 1e-6]
    assert grid.inputs["target_delta"][1] == 1e-5


HEAD = "noise_multiplier,sampling_probability,steps,delta\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + "1,0.1,10,1e-5\n-1,0.1,10,1e-5\n", "line 3: noise_multiplier = -1.0 must be > 0"),
        (HEAD + "1,0.1,ten,1e-5\n", "line 2: steps = 'ten' must be an integer >= 1"),
        (HEAD + "1,0.1,1_0,1e-5\n", "line 2: steps = '1_0' must be an integer >= 1"),
        (HEAD + "1_0,0.1,10,1e-5\n", "line 2: noise_multiplier = '1_0' must be a number > 0"),
        (
            HEAD + "1,0.1,9007199254740993,1e-5\n",
            "line 2: steps = '9007199254740993' must be an integer >= 1 and <= 2**53",
        ),
        (HEAD + "1,0.1,9.007199254740993e15,1e-5\n", "must be an integer >= 1 and <= 2**53"),
        (HEAD + "1,0.1,9007199254740994,1e-5\n", "must be an integer >= 1 and <= 2**53"),
        (HEAD + "1,0.1,0.99999999999999999999,1e-5\n", "line 2: steps = '0.99999999999999999999' must be an integer"),
        (HEAD + "1,0.1,10\n", "line 2: 3 cells under a header of 4"),
        (HEAD + "1,0.1,,1e-5\n", "line 2: steps and epsilon are missing"),
        (HEAD + "1,nan,10,1e-5\n", "line 2: sampling_probability = nan must be finite"),
        (HEAD.replace("steps", "stesp") + "1,0.1,10,1e-5\n", "unknown column 'stesp'; did you mean 'steps'?"),
        (HEAD.replace("steps", "delta") + "1,0.1,10,1e-5\n", "column 'delta' appears twice"),
        (HEAD, "no configurations"),
        ("", "no configurations"),
        (HEAD + '"1,0.1,10,1e-5\n', "line 2: not valid CSV"),
    ],
)
def test_a_bad_csv_is_refused_with_its_line(tmp_path, text, words):
    path = write(tmp_path, "grid.csv", text)
    message = refusal(read_grid, path)
    assert words in message and message.startswith(str(path))


@pytest.mark.parametrize("text", ["a\nb", "a\x0cb", "a\x85b", "a\u2028b", "a\n\nb"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_text_of_a_csv_keeps_its_line_breaks(tmp_path, text, end):
    lines = [f"notes,{HEAD.strip()}", f'"{text}",1,0.1,10,1e-5', "c,2,0.1,9007199254740992,1e-5"]
    (tmp_path / "grid.csv").write_bytes(end.join([*lines, ""]).encode())
    grid = read_grid(tmp_path / "grid.csv")
    assert grid.beside["notes"].tolist() == [text, "c"] and grid.inputs["steps"].tolist() == [10, 2**53]


def test_unreadable_files_are_refused(tmp_path):
    assert "No such file or directory" in refusal(read_grid, tmp_path / "absent.toml")
    assert "must end in .toml or .csv" in refusal(read_grid, tmp_path / "grid.yaml")
    (tmp_path / "folder.csv").mkdir()
    assert "cannot be read" in refusal(read_grid, tmp_path / "folder.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    assert "not UTF-8" in refusal(read_grid, tmp_path / "binary.csv")


def test_a_small_sweep_is_right_whatever_the_block(tmp_path):
    out = tmp_path / "result.csv"
    table = sweep(SMALL, out=out, block=3)
    assert isinstance(table, Table) and len(table) == 4
    assert list(table.columns) == [
        "quantity", "noise_multiplier", "sampling_probability", "steps", "delta", "relation",
        "lower", "estimate", "upper", "kind", "status", "engine",
    ]  # fmt: skip
    assert (table["lower"] <= table["upper"]).all() and (table["kind"] == "certified").all()
    assert math.isclose(table["upper"][0], 1.993091404415115, rel_tol=1e-9)
    assert table["upper"][0] == sweep(SMALL)["upper"][0]
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["upper"]) for row in rows] == table["upper"].tolist()
    assert [row["steps"] for row in rows] == ["1", "4", "1", "4"]
    copy = tmp_path / "copy.csv"
    table.to_csv(copy)
    assert copy.read_text() == out.read_text()


def test_quantities_mix_in_one_sweep(tmp_path):
    grid = concatenate(
        [
            expand({**SMALL, "steps": 4}),
            expand({"epsilon": 1.0, "delta": 1e-5, "sampling_probability": 1.0, "steps": 4}),
            expand({"epsilon": 1.0, "noise_multiplier": 7.0, "sampling_probability": 1.0, "steps": 4}),
            expand({"epsilon": 1e-9, "delta": 1e-5, "sampling_probability": 1.0, "noise_multiplier": 1.0}),
        ]
    )
    table = sweep(grid, block=2)
    assert table["quantity"].tolist() == ["epsilon", "epsilon", "noise_multiplier", "delta", "steps"]
    sigma = table["noise_multiplier"][2]
    assert 7.0 < sigma < 8.0 and 0.9999 < table["upper"][2] <= 1.0
    assert 0 < table["lower"][3] <= table["upper"][3] < 1e-5 * 10
    assert table["status"][4] == "infeasible_steps" and math.isnan(table["steps"][4])
    table.to_csv(tmp_path / "mixed.csv")
    rows = list(csv.DictReader((tmp_path / "mixed.csv").open(newline="")))
    assert rows[4]["steps"] == rows[4]["upper"] == "nan"
    assert rows[0]["target_epsilon"] == "" and rows[2]["target_epsilon"] == "1.0"


@pytest.fixture
def breaking(monkeypatch):
    """Engines that raise on whatever batch has a noise multiplier of 3."""
    answer = solve._answer

    def breaks(quantity, inputs, chosen):
        if (inputs["noise_multiplier"] == 3.0).any():
            raise ArithmeticError("lattice bracket is empty:\n2.0 > 1.0")
        return answer(quantity, inputs, chosen)

    monkeypatch.setattr(solve, "_answer", breaks)


@pytest.mark.parametrize(
    ("quantity", "ends"),
    [("epsilon", (0.0, math.inf, math.inf)), ("delta", (0.0, 1.0, 1.0)), ("steps", (math.nan,) * 3)],
)
def test_a_row_that_raises_leaves_the_others_alone(tmp_path, breaking, quantity, ends):
    noise = [2.5, 3.0, 2.0, 4.0, 5.0]
    fields = {"noise_multiplier": noise, "sampling_probability": 1.0, "steps": 2, "epsilon": 2.0, "delta": 1e-5}
    fields.pop(quantity)
    good = sweep(fields | {"noise_multiplier": [x for x in noise if x != 3.0]})
    out = tmp_path / "result.csv"
    with pytest.warns(solve.FailedRows, match=r"noise_multiplier = 3\.0.*: ArithmeticError: lattice bracket") as told:
        table = sweep(fields, out=out)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    for name, column in table.columns.items():
        assert np.delete(column, 1).tolist() == good[name].tolist()
    np.testing.assert_array_equal([table[name][1] for name in ("lower", "estimate", "upper")], ends)
    assert (table["status"][1], table["kind"][1], table["noise_multiplier"][1]) == ("failed", "certified", 3.0)
    assert quantity != "steps" or math.isnan(table["steps"][1])
    assert read_table(out)["status"].tolist() == ["ok", "failed", "ok", "ok", "ok"]


def test_only_the_rows_that_raise_fail_also_where_there_are_several(breaking):
    with pytest.warns(solve.FailedRows, match=r"\(and 1 more in its block\)"):
        table = sweep({**SMALL, "noise_multiplier": [2.0, 3.0, 4.0]})
    assert table["status"].tolist() == ["ok"] * 2 + ["failed"] * 2 + ["ok"] * 2
    with pytest.warns(solve.FailedRows):
        assert sweep({**SMALL, "noise_multiplier": 3.0, "steps": 1})["status"].tolist() == ["failed"]


def test_bad_input_that_an_engine_finds_is_bad_input_of_the_call(monkeypatch):
    def refuses(*args, **kwargs):
        raise InputError("engine = 'contour' needs a Gaussian part")

    monkeypatch.setattr(solve.account, "epsilon", refuses)
    assert "needs a Gaussian part" in refusal(sweep, SMALL)
    assert "needs a Gaussian part" in refusal(sweep, {**SMALL, "noise_multiplier": 2.0, "steps": 1})


@pytest.mark.parametrize("grid", [None, 5, b"grid.csv", SMALL.items()])
def test_what_is_no_grid_is_refused(grid):
    assert "is no grid; give a dict of fields, a DataFrame" in refusal(sweep, grid)


def test_switches_and_names_of_results_are_checked(tmp_path):
    for name in ("resume", "overwrite", "distributed"):
        assert f"{name} = 'no' must be True or False" in refusal(sweep, SMALL, out=tmp_path / "r.csv", **{name: "no"})
    for out in (5, "", b"r.csv", ["r.csv"]):
        assert "must be the path of a file" in refusal(sweep, SMALL, out=out)
    fields = {"epsilon": 1.0, "delta": 1e-5, "sampling_probability": 1.0, "steps": 4}
    assert "rtol = 1e-09 must be >= 1e-07" in refusal(sweep, fields, rtol=1e-9)  # before anything is solved


def test_calibration_settings_that_do_not_exist_are_refused():
    fields = {"epsilon": 1.0, "delta": 1e-5, "sampling_probability": 1.0, "steps": 4}
    assert "engine = 'lattice' is not available" in refusal(sweep, fields, engine="lattice")
    assert "relation = 'swap' is not known" in refusal(sweep, fields, relation="swap")
    assert "rtol = 2.0 must be" in refusal(sweep, fields, rtol=2.0)
    assert "block = 0 must be" in refusal(sweep, fields, block=0)


def test_a_result_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    assert "must end in .csv or .parquet" in refusal(sweep, SMALL, out=tmp_path / "result.xlsx")
    assert "cannot be written: No such file" in refusal(sweep, SMALL, out=tmp_path / "absent" / "result.csv")
    path = write(tmp_path, "grid.csv", HEAD + "1,1,10,1e-5\n")
    assert "would overwrite the grid" in refusal(sweep, path, out=path)
    assert path.read_text().startswith("noise_multiplier")
    assert "mode and quantity are for a dict" in refusal(sweep, path, mode="zip")


@pytest.mark.parametrize(("module", "writes"), [("pyarrow", "to_parquet"), ("pandas", "to_pandas")])
def test_extras_are_used_where_installed_and_named_where_not(tmp_path, monkeypatch, module, writes):
    table = sweep(SMALL)
    path = tmp_path / "result.parquet"
    arguments = [path] if writes == "to_parquet" else []
    if importlib.util.find_spec(module) is None:
        assert f"needs the package {module}" in refusal(getattr(table, writes), *arguments)
        return
    result = getattr(table, writes)(*arguments)
    if writes == "to_parquet":
        from pyarrow import parquet

        result = parquet.read_table(path).to_pydict()
    assert list(result["upper"]) == table["upper"].tolist()
    monkeypatch.setitem(__import__("sys").modules, module, None)
    assert f"needs the package {module}" in refusal(getattr(table, writes), *arguments)


def test_progress_is_shown_when_asked_for_and_off_a_terminal_only_then(capsys):
    sweep(SMALL, block=2)
    assert capsys.readouterr().err == ""
    sweep(SMALL, block=2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert "0/4" in lines[0] and "4/4" in lines[-1] and "rows/s" in lines[-1]
    silent = Progress(4, False)
    silent.update(4)
    silent.close()
    assert capsys.readouterr().err == ""
    assert bar(1, 100_000, 1.0).endswith("1 rows/s  27:46:39 left")


def test_the_example_is_the_table_of_the_paper():
    grid = read_grid(EXAMPLE)
    assert len(grid) == 1120
    assert set(grid.quantity) == {"noise_multiplier"}
    document = tomllib.loads(EXAMPLE.read_text())
    sizes = {block["name"]: block["dataset_size"] for block in document["block"]}
    assert sizes == {"MNIST": 60_000, "FashionMNIST": 60_000, "CIFAR-10": 50_000, "IMDB": 25_000}
    assert grid.inputs["steps"][0] == 4688
    assert grid.inputs["target_epsilon"].min() == 0.25 and grid.inputs["target_epsilon"].max() == 16
    assert set(grid.inputs) <= set(FIELDS)
