"""The HTML that results show of themselves in a notebook: well formed, escaped, cut, and with the true numbers."""

import html
from html.parser import HTMLParser

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxacct as ja
from jaxacct import selection, tuning
from jaxacct.core import markup
from jaxacct.training import Plan, Trainer

PLAN = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=50, sampling_probability=1.0, steps=3)
GRID = {"noise_multiplier": np.linspace(1, 2, 13), "sampling_probability": 1, "steps": 1, "delta": 1e-5}
FORMS = {
    "bounds": lambda: ja.epsilon(ja.Gaussian(1.0), 1e-5),
    "batch": lambda: ja.epsilon(ja.Gaussian(np.linspace(1, 2, 12).reshape(3, 4)), 1e-5),
    "table": lambda: ja.sweep(GRID),
    "mechanism": lambda: ja.dp_sgd([1.0, 2.0], 0.01, 10),
    "selection": lambda: selection.select(ja.Gaussian(2.0), selection.Geometric(0.1)),
    "profile": lambda: ja.profile(ja.Gaussian(1.0)),
    "calibration": lambda: ja.calibrate_noise_multiplier([1e-6, 2.0], [1e-30, 1e-5], 1.0, 1),
    "risk": lambda: ja.calibrate_noise_multiplier(None, None, 1.0, 1, target_advantage=0.38),
    "plan": lambda: PLAN,
    "trainer": lambda: Trainer(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.1), PLAN, clip_norm=1.0),
    "matched": lambda: tuning.MatchedPlan(8.0, 1e-5, 1000, selection.PointMass(1), sampling_probability=1.0, steps=1),
    "advice": lambda: tuning.advise(
        4.0, 1e-5, 1000, 1.0, steps=1, noise_multiplier=2.0, shares=[1.0], families=["poisson"]
    ),
    "verification": lambda: ja.verify(ja.Gaussian(2.0), ja.epsilon(ja.Gaussian(2.0), 1e-5), delta=1e-5),
}


class Page(HTMLParser):
    """A parser that keeps the open tags, the tags used, the cells of each row, and the whole text in `said`."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.said = [], set(), [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_small_well_formed_and_without_scripts(name):
    if name == "verification":
        pytest.importorskip("flint")
    text = FORMS[name]()._repr_html_()
    page = Page(text)
    assert page.open == [] and page.tags <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "code"}
    assert len(text) < 12_000 and page.rows
    assert "color:#" not in text and "color:inherit" in text  # the form sets no colour except for grey lines


def test_what_is_written_is_escaped():
    nasty = "<script>alert('&\"')</script>"
    for text in (markup.table(nasty, [nasty], [[nasty]], nasty), markup.fields(nasty, [(nasty, nasty)], nasty)):
        assert "<script" not in text and html.escape(nasty) in text
    table = ja.sweep([{"noise_multiplier": 2.0, "sampling_probability": 1, "steps": 1, "delta": 1e-5, nasty: nasty}])
    assert "<script" not in table._repr_html_() and nasty in Page(table._repr_html_()).said


def test_a_batch_is_cut_with_the_count_said_and_each_row_is_its_own():
    bounds = FORMS["batch"]()
    page = Page(bounds._repr_html_())
    assert "2 more rows of 12 are not shown" in page.said and "batch of shape (3, 4)" in page.said
    assert len(page.rows) == 1 + markup.MOST_ROWS
    for index, low, _, high, *words in page.rows[1:]:
        place = tuple(map(int, index.split(", ")))
        assert float(low) <= bounds.lower[place] <= bounds.upper[place] <= float(high) < float(low) * 1.00001
        assert words == ["certified", "ok", "closed_form"]
    assert "3 more rows of 13" in Page(FORMS["table"]()._repr_html_()).said


def test_calibrated_values_are_shown_in_full():
    found = FORMS["calibration"]()
    (_, first, second) = Page(found._repr_html_()).rows
    assert first[1] == "nan" and float(second[1]) == found.value[1]
    assert repr(PLAN.noise_multiplier) in PLAN._repr_html_()


@pytest.mark.parametrize(
    "mechanism",
    [
        ja.dp_sgd([1.0, 2.0], 0.01, 1000),
        ja.dp_sgd([[1.0], [2.0]], [0.01, 0.02, 0.5], [10, 20, 30]),
        ja.Gaussian(1.0),
        ja.repeat(ja.Laplace(0.1), 7),
        ja.repeat(ja.PoissonSampled(ja.Laplace(2.0), 0.1), [3, 4]),
        ja.PoissonSampled(ja.PoissonSampled(ja.Gaussian(1.0), 0.5), 0.1),
        ja.repeat(ja.PoissonSampled(ja.PoissonSampled(ja.Gaussian(1.0), 0.5), 0.1), 3),
        ja.compose(ja.Gaussian(1.0), ja.repeat(ja.Gaussian(2.0), 3), ja.ApproximateDP(1.0, 1e-6)),
        ja.PrivacyProfile([0.0, 0.5], [0.1, 0.01]),
        ja.FiniteOutput([0.5, 0.5], [0.25, 0.75]),
        ja.DiscreteGaussian(3.0),
        ja.ReportNoisyMax(1.0, noise="gumbel"),
        ja.MixtureOfGaussians(1.0, [1.0, 2.0], [0.5, 0.5]),
        selection.select(ja.Gaussian(2.0), selection.Geometric([0.1, 0.2])),
        selection.select(ja.Gaussian(2.0), selection.Poisson(5.0), candidates="adaptive"),
        selection.select(ja.Gaussian(2.0), selection.Geometric(0.1), bound="auto"),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_the_expression_of_a_mechanism_gives_it_back(mechanism):
    typed = mechanism.expression()
    assert eval(typed, {"ja": ja, "selection": selection}) == mechanism
    page = Page(mechanism._repr_html_())
    assert dict(page.rows)["typed"] == typed and mechanism.kind in dict(page.rows)["answers are"]


def test_the_form_of_a_batch_says_its_shape():
    assert "(4, 5), 20 configurations" in ja.dp_sgd(np.ones((4, 1)), np.full(5, 0.1), 10)._repr_html_()
    assert "... 20 numbers" in ja.Gaussian(np.ones(20)).expression()


def test_numbers_of_numpy_are_shown_as_plain_ones():
    run = ja.Gaussian(2.0)
    found = ja.repetitions_allowed(run, 2.0, 1e-5)
    assert f"repetitions={float(found.repetitions)!r}, " in repr(found) and "ok=True, family=" in repr(found)
    gradient = ja.epsilon_gradient(ja.repeat(run, 3), 1e-5)
    for one in (found, found.law, gradient, ja.calibrate_noise_multiplier(2.0, 1e-5, 1.0, 1), ja.Gaussian([1.0, 2.0])):
        assert "np." not in repr(one)
