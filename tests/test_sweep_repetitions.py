"""Private selection in a sweep: laws by name in grids and files, the answers of rows, slices and interruptions."""

import numpy as np
import pytest
from helpers import refusal
from selection_cases import rows

from jaxacct.plots import plot
from jaxacct.sweeps import merge, read_grid, read_table, run, solve, sweep
from jaxacct.sweeps.grid import expand
from jaxacct.sweeps.run import SweepInterrupted

BASE = {"noise_multiplier": 2.0, "sampling_probability": 1.0, "steps": 1, "delta": 1e-5}
GEOMETRIC = BASE | {"repetitions": "geometric", "gamma": [0.1, 0.01]}


def test_laws_and_their_numbers_are_axes_of_the_product():
    grid = expand(BASE | {"repetitions": ["geometric", "logarithmic"], "gamma": [0.1, 0.01]})
    assert grid.inputs["repetitions"].tolist() == ["geometric"] * 2 + ["logarithmic"] * 2
    assert grid.inputs["gamma"].tolist() == [0.1, 0.01, 0.1, 0.01] and set(grid.quantity) == {"epsilon"}
    ranged = {"start": 1, "stop": 100, "num": 4, "scale": "log"}
    counted = expand(BASE | {"repetitions": "point_mass", "count": ranged})
    assert counted.inputs["count"].tolist() == [1.0, 5.0, 22.0, 100.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repetitions": "geometrical"}, "repetitions = 'geometrical' is not known; use one of 'geometric'"),
        ({"repetitions": ["geometric", 3]}, "repetitions[1] = 3 is not known"),
        ({"repetitions": "poisson"}, "repetitions = 'poisson' takes mean; give mean"),
        ({"repetitions": ["geometric", "poisson"], "mean": 3}, "'geometric' takes gamma; leave out mean"),
        ({"mean": 3}, "repetitions = 'geometric' takes gamma; leave out mean"),
        ({"gamma": 1.0}, "gamma = 1.0 must be > 0 and < 1"),
        ({"gama": 0.1}, "unknown field 'gama'; did you mean 'gamma'?"),
        ({"repetitions": []}, "repetitions is empty"),
    ],
)
def test_a_bad_law_is_refused_in_one_line(change, words):
    assert words in refusal(expand, GEOMETRIC | change)


def test_only_epsilon_is_solved_for_and_by_one_engine():
    without = {name: value for name, value in GEOMETRIC.items() if name != "repetitions"}
    assert "gamma needs repetitions" in refusal(expand, without)
    for left_out in ("noise_multiplier", "sampling_probability", "steps", "delta"):
        fields = {name: value for name, value in GEOMETRIC.items() if name != left_out} | {"epsilon": 1.0}
        assert f"{left_out} cannot be solved for with repetitions" in refusal(expand, fields)
    assert "engine = 'lattice' is not available with repetitions" in refusal(sweep, GEOMETRIC, engine="lattice")


def test_toml_and_csv_are_the_same_grid(tmp_path):
    toml, table = tmp_path / "grid.toml", tmp_path / "grid.csv"
    toml.write_text(
        "[defaults]\nnoise_multiplier = 2\nsampling_probability = 1\nsteps = 1\ndelta = 1e-5\n"
        '[[block]]\nrepetitions = ["geometric", "logarithmic"]\ngamma = 0.1\n'
        '[[block]]\nrepetitions = "poisson"\nmean = 3\n[[block]]\n'
    )
    table.write_text(
        "noise_multiplier,sampling_probability,steps,delta,repetitions,gamma,mean\n"
        "2,1,1,1e-5,geometric,0.1,\n2,1,1,1e-5,logarithmic,0.1,\n2,1,1,1e-5,poisson,,3\n2,1,1,1e-5,,,\n"
    )
    first, second = read_grid(toml), read_grid(table)
    assert first.inputs["repetitions"].tolist() == ["geometric", "logarithmic", "poisson", ""]
    assert list(first.inputs) == list(second.inputs)
    for name, column in first.inputs.items():
        assert column.dtype == second.inputs[name].dtype
        assert [str(x) for x in column] == [str(x) for x in second.inputs[name]]
    table.write_text(table.read_text().replace("poisson,,3", "poisson,,"))
    assert "line 4: repetitions = 'poisson' takes mean; give mean" in refusal(read_grid, table)
    toml.write_text(toml.read_text().replace("mean", "meen"))
    assert "block 2: unknown key 'meen'; did you mean 'mean'?" in refusal(read_grid, toml)


def test_the_answers_are_those_of_the_reference_table_in_the_order_of_the_grid(tmp_path):
    """Rows of two bases in mixed order, and one row without repetitions.  All laws are of one class: one program."""
    known = [row for _, row in rows() if row["repetitions"] == "truncated_negative_binomial"]
    known = [row for row in known if row["gdp_mu"] in ("0.2681", "0.5016")]
    known = [known[i] for i in np.random.default_rng(1).permutation(len(known))[::3]]
    numbers = [[part.split("=")[1] for part in row["parameters"].split(";")] for row in known]
    lines = [
        f"{1 / float(row['gdp_mu'])!r},1,1,1e-5,truncated_negative_binomial,{eta},{gamma}"
        for row, (eta, gamma) in zip(known, numbers, strict=True)
    ]
    path, out = tmp_path / "grid.csv", tmp_path / "result.csv"
    head = "noise_multiplier,sampling_probability,steps,delta,repetitions,eta,gamma"
    path.write_text("\n".join([head, lines[0], "2.0,1,1,1e-5,,,", *lines[1:]]) + "\n")
    table = sweep(path, out=out)
    base, selected = 1, np.delete(np.arange(len(table)), 1)
    exact = np.array([float(row["epsilon_exact"]) for row in known])
    assert (table["lower"][selected] <= exact + 1e-5).all() and (table["upper"][selected] >= exact - 1e-6).all()
    assert (table["upper"][selected] - table["lower"][selected] <= 2e-4).all()
    assert table["upper"][base] == pytest.approx(1.993091404415115, rel=1e-9)
    assert table["engine"][base] == "closed_form" and set(table["engine"][selected]) == {"worst_score"}
    assert set(table["kind"]) == {"certified"} and table["repetitions"][base] == ""
    again = read_table(out)
    for name, column in table.columns.items():
        assert [str(x) for x in column] == [str(x) for x in again[name]]


def test_rows_of_a_base_are_looked_at_together():
    inputs = expand(GEOMETRIC | {"noise_multiplier": [2.0, 4.0, 3.0]}).inputs
    inputs = {name: np.append(column, column[2]) for name, column in inputs.items()}
    groups = list(solve._by_base(inputs, np.arange(7), ("noise_multiplier", "sampling_probability", "steps")))
    assert sorted(int(row) for group in groups for row in group.ravel()) == list(range(7))
    for group in groups:
        same = inputs["noise_multiplier"][group]
        assert (same == same[:, :1]).all() and np.unique(same[:, 0]).size == len(same)
    assert sorted(group.shape for group in groups) == [(1, 3), (2, 2)]


@pytest.fixture
def stand_in(monkeypatch):
    """Answer each selection at once with a number that identifies its row, without a computation of the bounds."""

    def solved(word, some, numbers, rule, **accuracy):
        number = some["noise_multiplier"] / some["gamma"]
        return solve.Bounds(number, number, number, engine=word)

    monkeypatch.setattr(solve, "_solved", solved)


def test_slices_and_interruptions_give_the_same_bytes(tmp_path, monkeypatch, stand_in):
    grid = GEOMETRIC | {"noise_multiplier": [2.0, 4.0, 3.0], "repetitions": ["geometric", "logarithmic"]}
    whole, cut, parts = (tmp_path / f"{name}.csv" for name in ("whole", "cut", "parts"))
    table = sweep(grid, out=whole, block=2)
    assert (table["upper"] == table["noise_multiplier"] / table["gamma"]).all()
    assert (table["engine"] == table["repetitions"]).all()
    for shard in ("1/2", "2/2"):
        sweep(grid, out=parts, block=2, shard=shard)
    merge([f"{parts}.{i}-of-2.part" for i in (1, 2)], parts)
    calls, solve = iter(range(99)), run.solve

    def interrupted(*arguments):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return solve(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run, "solve", interrupted)
        with pytest.raises(SweepInterrupted):
            sweep(grid, out=cut, block=2)
    other = grid | {"repetitions": ["logarithmic", "geometric"]}
    assert "another grid" in refusal(sweep, other, out=cut, block=2, resume=True)
    sweep(grid, out=cut, block=2, resume=True)
    assert whole.read_bytes() == cut.read_bytes() == parts.read_bytes()


def test_pictures_of_selections_are_drawn_but_not_the_profile_of_their_base(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr("jaxacct.plots.style.save", lambda canvas, path: None)
    out, figure = tmp_path / "result.csv", tmp_path / "figure.svg"
    sweep(GEOMETRIC | {"gamma": [0.1, 0.03, 0.01], "repetitions": ["geometric", "logarithmic"]}, out=out)
    report = plot(out, figure)
    assert (report["x"], report["by"]) == ("gamma", "repetitions")
    assert "row 0 is a private selection" in refusal(plot, out, figure, kind="profile")
