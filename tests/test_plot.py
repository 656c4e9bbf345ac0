"""Pictures: what is chosen to be drawn, that the data reach the axes, and what is refused."""

import math

import numpy as np
import pytest
from helpers import refusal
from scipy import special

from jaxacct.plots import plot, results, side_by_side, style
from jaxacct.sweeps import Table, sweep
from jaxacct.sweeps.grid import INPUTS, concatenate, expand
from jaxacct.sweeps.table import TEXT

pytest.importorskip("matplotlib")

FULL = {"sampling_probability": 1.0, "delta": 1e-5}
"""Gaussian throughout: answered by a formula, so nothing is compiled."""


@pytest.fixture(scope="module")
def table():
    """Two inputs with few values and one with many."""
    fields = {"noise_multiplier": [8.0, 2.0, 4.0], "steps": [1, 4, 9, 16, 400], "delta": [1e-5, 1e-6]}
    return sweep({**FULL, **fields})


@pytest.fixture(scope="module")
def calibrated():
    fields = {"target_epsilon": np.geomspace(0.5, 8, 9), "steps": np.geomspace(1, 1e4, 10).round()}
    return sweep({"sampling_probability": 1.0, "target_delta": 1e-5, **fields})


def drawn(draw, kind, view_of, **choices):
    arguments = dict.fromkeys(("x", "by", "value")) | {"where": {}} | choices
    chosen, view = results.choose(view_of, kind, **arguments)
    with style.settings():
        canvas, axes = style.figure(square=False)
        draw(view, canvas, axes)
    assert chosen == kind or kind is None
    return view, axes


@pytest.mark.parametrize(
    ("kind", "ending", "mark"),
    [
        ("curve", "pdf", b"%PDF"),
        ("heatmap", "svg", b"<?xml"),
        ("profile", "png", b"\x89PNG"),
        pytest.param("tradeoff", "svg", b"<?xml", marks=pytest.mark.slow),  # the tests below write svg too
    ],
)
def test_every_kind_and_format_is_written_and_again_the_same_bytes(tmp_path, table, kind, ending, mark):
    path, again = tmp_path / f"figure.{ending}", tmp_path / f"again.{ending}"
    report = plot(table, path, kind=kind, where={"delta": 1e-5})
    plot(table, again, kind=kind, where={"delta": 1e-5})
    assert report["kind"] == kind and report["written"] == str(path)
    assert path.read_bytes().startswith(mark) and path.read_bytes() == again.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_picture_of_a_file_is_that_of_its_table(tmp_path, table, monkeypatch):
    drawn = []
    lines = lambda canvas, path: drawn.append([line.get_xydata().tolist() for line in canvas.figure.axes[0].lines])
    monkeypatch.setattr(style, "save", lines)
    table.to_csv(tmp_path / "result.csv")
    plot(tmp_path / "result.csv", tmp_path / "one.svg")
    plot(table, tmp_path / "two.svg")
    assert drawn[0] == drawn[1] != []


@pytest.fixture
def unsaved(monkeypatch):
    """Skip the saving of pictures, which takes most of the time."""
    monkeypatch.setattr(style, "save", lambda canvas, path: None)


def test_the_input_with_most_values_goes_along_x_and_the_next_makes_the_family(tmp_path, table, calibrated, unsaved):
    report = plot(table, tmp_path / "figure.svg")
    assert report == {
        "kind": "curve", "value": "epsilon", "x": "steps", "by": "noise_multiplier", "fixed": {"delta": 1e-5},
        "curves": 3, "written": str(tmp_path / "figure.svg"),
    }  # fmt: skip
    report = plot(calibrated, tmp_path / "figure.svg")
    assert (report["kind"], report["value"], report["cells"]) == ("heatmap", "noise_multiplier", 90)
    report = plot(table, tmp_path / "figure.svg", x="noise_multiplier", by="delta", where={"steps": "4"})
    assert (report["x"], report["by"], report["curves"]) == ("noise_multiplier", "delta", 2)
    assert report["fixed"] == {"steps": "4"}
    report = plot(calibrated, tmp_path / "figure.svg", kind="curve", x="steps", value="epsilon")
    assert (report["value"], report["by"]) == ("epsilon", None) and set(report["fixed"]) == {"target_epsilon"}


def test_what_follows_from_an_axis_is_not_held_fixed(tmp_path, unsaved):
    fields = {"epochs": [1, 4], "noise_multiplier": [2.0, 4.0], "delta": 1e-5}
    sizes = {"a": 10, "b": 20}
    blocks = [expand({"dataset_size": n, "batch_size": n, **fields}, name=name) for name, n in sizes.items()]
    table = sweep(concatenate(blocks))
    report = plot(table, tmp_path / "figure.svg", x="epochs", by="name")
    assert report["curves"] == 2 and set(report["fixed"]) == {"noise_multiplier"}
    assert plot(table, tmp_path / "figure.svg", x="steps", by="noise_multiplier")["fixed"].keys() == {"name"}


def test_curves_are_the_columns_with_the_bracket_as_a_band(table):
    wide = Table(table.columns | {"lower": 0.5 * table["estimate"], "upper": 2.0 * table["estimate"]})
    view, axes = drawn(results.draw_curves, None, wide, where={"delta": 1e-5})
    assert [line.get_label() for line in axes.lines] == ["2", "4", "8"]
    for line, sigma in zip(axes.lines, (2.0, 4.0, 8.0), strict=True):
        rows = (table["noise_multiplier"] == sigma) & (table["delta"] == 1e-5)
        assert line.get_xdata().tolist() == [1, 4, 9, 16, 400]
        assert line.get_ydata().tolist() == wide["upper"][rows].tolist()
    band = axes.collections[0].get_paths()[0].vertices
    at_first = band[band[:, 0] == 1.0][:, 1]
    upper = axes.lines[0].get_ydata()[0]
    assert math.isclose(at_first.min(), 0.25 * upper) and math.isclose(at_first.max(), upper)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "epsilon" in axes.get_ylabel() and "steps" in axes.get_xlabel()
    assert axes.get_legend().get_title().get_text() == style.MEANING["noise_multiplier"]
    assert view.value == "epsilon"


def test_axes_are_linear_where_values_are_near(table):
    _, axes = drawn(results.draw_curves, "curve", table, x="noise_multiplier", where={"delta": 1e-5, "steps": 1})
    assert axes.get_xscale() == "linear"


def test_a_heat_map_has_every_value_in_its_cell(calibrated):
    _, axes = drawn(results.draw_heatmap, "heatmap", calibrated, x="target_epsilon", by="steps")
    mesh = axes.collections[0]
    cells = mesh.get_array().reshape(10, 9)
    for i, steps in enumerate(np.unique(calibrated["steps"])):
        for j, target in enumerate(np.unique(calibrated["target_epsilon"])):
            row = (calibrated["steps"] == steps) & (calibrated["target_epsilon"] == target)
            assert cells[i, j] == calibrated["noise_multiplier"][row].item()
    x, y = mesh.get_coordinates()[0, :, 0], mesh.get_coordinates()[:, 0, 1]
    assert (np.diff(x) > 0).all() and x[0] < 0.5 < x[1] and y[0] < 1 < y[1]


def test_rows_without_an_answer_leave_gaps():
    fields = {"target_epsilon": [1e-9, 4.0, 8.0], "target_delta": 1e-5, "noise_multiplier": [2.0, 4.0]}
    table = sweep({"sampling_probability": 1.0, **fields})
    _, axes = drawn(results.draw_curves, "curve", table, x="target_epsilon")
    assert [math.isnan(y) for y in axes.lines[0].get_ydata()] == [True, False, False]


def lines_of(draw, chosen):
    axes = style.figure(square=False)[1]
    draw(axes, results._curves(chosen), None)
    return {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in axes.get_lines()}, axes


def test_a_profile_falls_and_holds_at_the_target(table):
    chosen = results.pick(table, [0, 12])
    lines, axes = lines_of(results.draw_profiles, chosen)
    assert list(lines) == ["$\\sigma$ = 8, $T$ = 1 (certified)", "$\\sigma$ = 4, $T$ = 9 (certified)"]
    for target, end, (epsilon, delta) in zip(chosen["delta"], chosen["estimate"], lines.values(), strict=True):
        assert (np.diff(delta) < 0).all() and delta[epsilon <= end].min() >= 0.9 * target
        assert math.isclose(np.interp(end, epsilon, np.log(delta)), math.log(target), rel_tol=1e-2)
    assert axes.get_ylim() == (side_by_side.SMALLEST_DELTA, 1.5)


def test_profiles_whose_ends_lie_apart_have_a_logarithmic_axis(table):
    lines, axes = lines_of(results.draw_profiles, results.pick(table, [0, 14]))
    assert axes.get_xscale() == "log"
    assert min((np.diff(np.log(y[(y > 1e-9) & (y < 1e-2)])) < 0).sum() for _, y in lines.values()) > 100


def test_the_trade_off_of_a_gaussian_is_bounded_from_below_and_closely():
    table = sweep({**FULL, "noise_multiplier": [1.0, 0.5], "steps": 1})
    lines, _ = lines_of(results.draw_tradeoffs, table)
    for mu, (alpha, bound) in zip((1.0, 2.0), lines.values(), strict=False):
        exact = special.ndtr(special.ndtri(1.0 - alpha) - mu)
        assert (bound <= exact + 1e-12).all() and np.max(exact - bound) < 1e-4


def test_a_picture_of_several_batch_rules_says_every_relation():
    run = {"noise_multiplier": [2.0, 3.0], "slots": 10, "epochs": 1, "delta": 1e-5}
    table = sweep(run | {"sampling": ["random_allocation", "shuffled"]}, progress=False)
    axes = drawn(results.draw_curves, "curve", table, by="sampling")[1]
    assert "add or remove one record, or zero out one record" in axes.get_title(loc="left")


def test_every_input_has_a_label():
    assert set(INPUTS) <= set(style.MEANING)


@pytest.mark.parametrize("name", ["name", *INPUTS])
def test_a_picture_says_every_input_of_its_rows(name, monkeypatch):
    """Curves of rows that differ have labels that differ; what all rows share stands above them."""
    monkeypatch.setattr(results, "profile", lambda run, relation: None)
    monkeypatch.setattr(results, "run_of_row", lambda row: None)
    one = {name: "beta" if name in TEXT else 7.0}
    table = sweep({**FULL, "noise_multiplier": 5.0, "steps": 1})
    shared = Table({n: np.repeat(c, 2) for n, c in (table.columns | {n: [v] for n, v in one.items()}).items()})
    cells = np.array(["", "alpha", "beta"], object) if name in TEXT else np.array([np.nan, 2.0, 7.0])
    apart = Table({n: np.repeat(c, 3) for n, c in table.columns.items()} | {name: cells})
    said = style.described(one)
    assert said in style.described(results._shared(shared)).split(", ") and said not in results._curves(shared)[0].name
    labels = [curve.name for curve in results._curves(apart)]
    assert said in labels[2].split(", ") and len(set(labels)) == 3 and "nan" not in "".join(labels)


def test_curves_of_groups_are_told_apart():
    rows = [{**FULL, "noise_multiplier": 4.0, "steps": 2, "group": group} for group in (1, 3)]
    table = sweep(rows)
    assert [curve.name for curve in results._curves(table)] == ["group = 1", "group = 3"]
    by_size = [{**FULL, "noise_multiplier": 4.0, "epochs": n, "batch_size": 5, "dataset_size": 5} for n in (2, 3)]
    by_size = sweep([{k: v for k, v in row.items() if k != "sampling_probability"} for row in by_size])
    assert [curve.name for curve in results._curves(by_size)] == ["epochs = 2", "epochs = 3"]
    assert "$q$" not in style.described(results._shared(by_size))


def test_long_labels_stand_below_the_axes_and_names_that_differ_stand_alone(tmp_path, monkeypatch):
    given = {"sampling_probability": 1.0, "epochs": [10, 20], "target_epsilon": [2.0, 6.0], "target_delta": 1e-5}
    table = sweep(given, progress=False)
    labels = [curve.name for curve in results._curves(table)]
    assert "$\\sigma$" not in "".join(labels) and len(set(labels)) == 4  # the solved noise is no input
    named = lambda *names: results._curves(Table({"name": np.array(names, object)} | table.columns))
    assert [curve.name for curve in named(*"abcd")] == list("abcd")
    assert [curve.name.split(", ")[0] for curve in named(*"abca")] == list("abca")
    canvases = []
    monkeypatch.setattr(style, "save", lambda canvas, path: canvases.append(canvas))
    long = Table(
        {"name": np.array([f"a data set with a name of many words, number {i}" for i in range(4)], object)}
        | table.columns
    )
    for kind in ("profile", "tradeoff"):
        results.plot(long, tmp_path / "figure.png", kind=kind)
        (canvas,) = canvases[-1:]
        canvas.draw_without_rendering()
        (axes,) = canvas.axes
        frame, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert legend.y1 < frame.y0 and legend.y0 >= 0 <= legend.x0 and legend.x1 <= canvas.bbox.x1
        assert frame.height > 0.3 * canvas.bbox.height


def test_rows_without_a_column_of_steps_are_drawn(tmp_path):
    """A rate that was solved for epochs has no steps; and a row without a rate describes no run."""
    table = sweep({"noise_multiplier": [4.0, 5.0], "epochs": 2, "target_epsilon": 3.0, "target_delta": 1e-5})
    assert plot(table, tmp_path / "figure.svg", kind="tradeoff")["curves"] == 2
    without = Table({name: column for name, column in table.columns.items() if name != "epochs"})
    assert "steps is missing" in refusal(plot, without, tmp_path / "figure.svg", kind="tradeoff")


def test_labels_have_powers_of_ten_and_symbols():
    assert (
        style.described({"delta": 1e-6, "name": "MNIST", "steps": 4688.0})
        == "$\\delta$ = $10^{-6}$, MNIST, $T$ = 4,688"
    )
    assert style.number(0.0) == "0" and style.number(3e7) == "$3\\times10^{7}$"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "bars"}, "kind = 'bars' is not known; use one of 'curve', 'heatmap'"),
        ({"x": "stesp"}, "'stesp' is no input of this result; did you mean 'steps'?"),
        ({"by": "upper"}, "'upper' is no input of this result"),
        ({"x": "steps", "by": "steps"}, "x and by are both steps"),
        ({"x": "epsilon"}, "'epsilon' is no input of this result"),
        ({"value": "sigma"}, "value = 'sigma' is not known; use one of 'epsilon', 'noise_multiplier'"),
        ({"where": {"delta": 1e-7}}, "no row has delta = 1e-07; use one of 1e-05, 1e-06"),
        ({"where": {"dleta": 1e-7}}, "unknown column 'dleta'; did you mean 'delta'?"),
        ({"where": {"delta": "small"}}, "delta = 'small' must be a number"),
        ({"where": {"delta": 1e-5, "steps": 1, "noise_multiplier": 2}}, "nothing to draw along an axis"),
        ({"kind": "heatmap", "where": {"delta": 1e-5, "steps": 1}}, "a heat map needs two inputs"),
        ({"rows": [0]}, "rows is for profiles and trade-off curves"),
        ({"kind": "profile", "x": "steps"}, "x is for curves and heat maps"),
        ({"kind": "profile", "rows": [99]}, "rows: 99 must be >= 0 and < 30"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, table, arguments, words):
    assert words in refusal(plot, table, tmp_path / "figure.png", **arguments)
    assert not list(tmp_path.iterdir())


def test_other_refusals(tmp_path, table, calibrated, monkeypatch):
    assert "must end in .png, .svg or .pdf" in refusal(plot, table, tmp_path / "figure.jpg")
    assert "cannot be written: No such file" in refusal(plot, table, tmp_path / "absent" / "figure.png")
    assert "cannot be read" in refusal(plot, tmp_path / "absent.csv", tmp_path / "figure.png")
    both = sweep(
        concatenate(
            [
                expand({**FULL, "noise_multiplier": 1.0, "steps": [1, 2]}),
                expand({"sampling_probability": 1.0, "steps": [1, 2], "target_epsilon": 1.0, "target_delta": 1e-5}),
            ]
        )
    )
    assert "solves for noise_multiplier and epsilon; choose one" in refusal(plot, both, tmp_path / "figure.png")
    zipped = sweep(
        {**FULL, "noise_multiplier": [1.0, 2.0, 3.0], "steps": [1, 2, 3], "delta": [1e-5, 1e-6, 1e-7]}, mode="zip"
    )
    with monkeypatch.context() as patch:
        patch.setattr(style, "save", lambda canvas, path: None)
        assert plot(zipped, tmp_path / "figure.svg")["by"] is None
    cost = Table(table.columns | {"cost": table["steps"]})  # a column of the user
    assert "'cost' is no input of this result" in refusal(plot, cost, tmp_path / "figure.png", x="cost")
    assert "value = 'cost' is not known" in refusal(plot, cost, tmp_path / "figure.png", value="cost")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "needs the package matplotlib" in refusal(plot, table, tmp_path / "figure.png")
