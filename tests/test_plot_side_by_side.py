"""Pictures of mechanisms side by side: they draw the bracket, on any axes, and stay bounds between the points."""

import os
import subprocess
import sys

import numpy as np
import pytest

import jaxacct as ja

pytest.importorskip("matplotlib")

POINTS = [0.0, 0.3, 0.9, 1.5]


@pytest.fixture(autouse=True)
def pyplot():
    """Import pyplot in the worker that runs a test, not in each that collects tests. Close all figures at the end."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")


def line(axes, label):
    (found,) = (one for one in axes.get_lines() if one.get_label().startswith(label))
    return found.get_xdata(), found.get_ydata()


def test_a_profile_is_drawn_by_its_upper_ends_and_above_delta_between_them():
    run = ja.dp_sgd(1.0, 0.01, 1000)
    at, drawn = line(ja.plot_profiles({"A": run, "B": ja.Gaussian(2.0)}, epsilon=POINTS), "A (certified)")
    there = ja.delta(run, POINTS)
    np.testing.assert_array_equal(drawn[np.isin(at, POINTS)], there.upper)
    assert at.size > 20 and (drawn >= ja.delta(run, at).lower).all()


def test_a_loss_that_is_bounded_is_not_drawn_below_its_profile():
    """Randomised response has delta = 0 from eps = log 3 on. Just below, delta is far above 1e-10, the least drawn."""
    at, drawn = line(ja.plot_profiles({"R": ja.RandomizedResponse(0.75), "G": ja.Gaussian(0.8)}), "R (certified")
    true = np.maximum(0.75 - 0.25 * np.exp(at), 0.0)
    assert (drawn >= true * (1 - 1e-12)).all() and drawn.max() < 0.51 and drawn[-1] < 1e-2


def test_the_band_is_the_bracket():
    mechanism = ja.ReportNoisyMax(1.0)  # known through a bound
    bounds = ja.delta(mechanism, POINTS)
    axes = ja.plot_profiles(mechanism, epsilon=POINTS)
    corners = axes.collections[0].get_paths()[0].vertices
    for x, low, high in zip(POINTS, bounds.lower, bounds.upper, strict=True):
        heights = corners[np.isclose(corners[:, 0], x), 1]
        assert np.isclose(heights.max(), high) and np.isclose(heights.min(), max(low, 1e-300))
    assert f"({bounds.kind[0]}" in axes.get_legend().get_texts()[0].get_text()


def test_a_trade_off_is_drawn_by_its_lower_ends():
    profile, rates = ja.profile(ja.Gaussian(2.0)), [0.0, 0.05, 0.5, 1.0]
    axes = profile.plot_tradeoff(fpr=rates)
    _, drawn = line(axes, "Gaussian (certified)")
    np.testing.assert_array_equal(drawn, profile.tradeoff(rates).lower)
    assert "lower ends" in axes.get_title(loc="left") and axes.get_xlim() == (0, 1)


def test_a_batch_is_a_curve_each_and_a_profile_keeps_its_relation():
    axes = ja.plot_profiles({"A": ja.Gaussian([1.0, 2.0])}, epsilon=POINTS)
    assert [one.get_label() for one in axes.get_lines()] == ["A [0] (certified)", "A [1] (certified)"]
    np.testing.assert_array_equal(line(axes, "A [1]")[1][-1], ja.delta(ja.Gaussian(2.0), 1.5).upper)
    axes = ja.profile(ja.Gaussian(1.0), "replace_one").plot(epsilon=POINTS)
    assert "replace one record" in axes.get_title(loc="left")
    assert line(axes, "Gaussian")[1][-1] == ja.delta(ja.Gaussian(1.0), 1.5, relation="replace_one").upper


def test_axes_that_are_given_are_drawn_on(pyplot):
    given = pyplot.matplotlib.figure.Figure().add_subplot()
    assert ja.profile(ja.Gaussian(1.0)).plot(epsilon=POINTS, axes=given) is given and len(given.get_lines()) == 1
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("mechanisms", "words"),
    [
        ({}, "mechanisms is empty"),
        ({"A": 3}, "mechanisms['A'] = 3"),
        (None, "mechanisms = None"),
        (ja.Gaussian(np.ones(9)), "at most 8"),
        ({"A": ja.Gaussian(np.ones(5)), "B": ja.Gaussian(np.ones(4))}, "at most 8"),
        ({"A": ja.profile(ja.Gaussian(1.0), "add_one"), "B": ja.Gaussian(1.0)}, "different relations"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(mechanisms, words):
    for draw in (ja.plot_profiles, ja.plot_tradeoffs):
        with pytest.raises(ja.InputError) as refused:
            draw(mechanisms)
        assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ja.InputError, match="not that of the profile"):
        ja.plot_profiles(ja.profile(ja.Gaussian(1.0)), relation="add_one")
    with pytest.raises(ja.InputError, match="epsilon"):
        ja.plot_profiles(ja.Gaussian(1.0), epsilon=[-1.0])


@pytest.mark.slow  # a process of its own, since a backend is chosen once
def test_it_draws_without_a_display(tmp_path):
    code = "import sys, jaxacct as ja; ja.profile(ja.Gaussian(1.0)).plot().figure.savefig(sys.argv[1])"
    hidden = {
        name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    }
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p.png")], env=hidden, check=True)
    assert (tmp_path / "p.png").stat().st_size > 5000
