"""Reports: what a page says equals the brackets, what must not be claimed is not, and text from files stays text."""

import hashlib
import json
import math
import re
import shlex
import sys
from decimal import Decimal
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from training_cases import PLAN, TARGETED, gaussian_epsilon, note, written

import jaxacct as ja
from jaxacct import cli, selection
from jaxacct.core.bounds import STATUSES
from jaxacct.core.text import percent
from jaxacct.interop import to_json
from jaxacct.report import Claim, report, wording
from jaxacct.report.claim import down, safe, up
from jaxacct.report.page import Code, Facts, Heading, Paragraph, Picture, Rows, html, markdown
from jaxacct.report.readings import _DRAWN, FALSE_POSITIVE_RATES, _above, _read, by_points
from jaxacct.report.subjects import counted
from jaxacct.report.wording import in_words
from jaxacct.selection.any_selection import AnySelection
from jaxacct.strategies import Banded, CyclicPoisson, FixedEpochs, MinSeparation, SingleParticipation
from jaxacct.sweeps import Table, sweep
from jaxacct.sweeps.grid import INPUTS
from jaxacct.sweeps.table import TEXT
from jaxacct.training import EarlyStop, Ledger, Plan

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&`|**_[x](javascript:1)\u202e\x1b\n# no"
VOID = {"meta"}
CANDIDATE = {
    "target_delta": 1e-5,
    "dataset_size": 100,
    "sampling_probability": 1.0,
    "noise_multiplier": 8.0,
    "steps": 2,
}
RUN = {"noise_multiplier": [2.0, 4.0], "sampling_probability": 1, "steps": 3, "delta": 1e-5}


class Page(HTMLParser):
    """The tags, attributes and words of a page; its tags must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.values, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.values += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.words.append("" if tag == "span" else " ")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words)).replace("≤", "<=")


def parsed(made):
    page = Page(made.to_html())
    allowed = (
        {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "div", "b", "strong"}
        | {
            "ul",
            "li",
            "dl",
            "dt",
            "dd",
            "figure",
            "figcaption",
            "svg",
            "path",
            "text",
            "circle",
            "rect",
            "table",
        }
        | {"thead", "tbody", "tr", "th", "td", "pre", "span"}
    )
    assert set(page.tags) <= allowed
    names = {name for _, name, _ in page.values}
    assert not [name for name in names if name.startswith("on")] and not names & {"src", "href", "srcset", "action"}
    assert "nan" not in re.findall(r"[a-z]+", page.text.lower())
    return page


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    return tmp_path / "run.jsonl"


def table(**changed):
    """Return a result of two rows. Each argument sets a value in the first row."""
    columns = {name: column.copy() for name, column in sweep(RUN, progress=False).columns.items()}
    for name, value in changed.items():
        if name not in columns:
            columns[name] = np.full(2, "", object)
        columns[name][0] = value
    return Table(columns)


# The numbers of a page


def test_the_figures_of_a_mechanism_are_upper_ends():
    run = ja.Gaussian(2.0)
    made = report(run, delta=1e-5, prior=0.1)
    page, known = parsed(made), ja.profile(run)
    upper = float(ja.epsilon(run, 1e-5).upper)
    assert made.claims[0].upper == upper and f"epsilon <= {up(upper, 6)} at delta = 1e-05" in page.text
    (readings,) = made.readings
    for place, fpr in enumerate(FALSE_POSITIVE_RATES):
        exact = float(ndtr(ndtri(fpr) + 0.5))  # the Neyman-Pearson test of N(0, 1) against N(1/2, 1)
        assert exact <= readings.rate(fpr) <= exact * (1.0 + 1e-3)
        assert f"rightly accuses at most {percent(readings.rate(fpr))} of" in page.text.replace("\xa0", " ")
        right = 0.1 * exact / (0.1 * exact + 0.9 * fpr)
        assert float(readings.posterior.upper[place]) == pytest.approx(right, rel=1e-3)
        assert percent(float(readings.posterior.upper[place])) in page.text.replace("\xa0", " ")
    for bounds in (known.advantage(), known.bayes_success(0.1)):
        assert percent(float(bounds.upper)) in page.text.replace("\xa0", " ")


def test_a_gaussian_run_by_a_closed_form(path):
    with Ledger.create(path, PLAN, run="r", by="ada") as ledger:
        for step in range(4):
            note(ledger, step)
    made = report(path)
    assert made.claims[0].upper == pytest.approx(gaussian_epsilon(math.sqrt(4) / 10), rel=1e-6)
    page = parsed(made)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in page.text
    for words in ("Gaussian noise, Poisson-sampled batches", "by ada", "What is released is", f"jaxacct verify {path}"):
        assert words in page.text
    assert "4 of the 100 steps of its plan" in page.text
    whole = PLAN.epsilon.upper
    assert f"the whole plan counts: epsilon <= {up(float(whole), 6)}" in page.text


def test_epsilon_of_a_ledger_is_not_that_of_its_plan(path):
    with Ledger.create(path, TARGETED, run="r") as ledger:
        for step in range(3):
            note(ledger, step, noise=0.5)
    made = report(path, delta=1e-6)
    assert made.claims[0].upper == pytest.approx(gaussian_epsilon(math.sqrt(12), 1e-6), rel=1e-6)
    assert "not kept by all that the ledger holds" in parsed(made).text


def test_a_plan_is_shown_as_a_plan(tmp_path):
    place = tmp_path / "plan.json"
    place.write_text(TARGETED.to_json())
    made = report(place)
    text = parsed(made).text
    assert made.claims[0].upper == float(TARGETED.epsilon.upper) and not made.claims[0].happened
    assert "This is a plan. Nothing on this page says that it was carried out." in text
    assert "What would be released is" in text and "What is claimed" not in text and "What could be claimed" in text


@pytest.mark.parametrize("relation", ["add_or_remove_one", "add_one", "remove_one", "replace_one"])
def test_every_relation_has_its_sentences(relation):
    made = report(ja.Gaussian(2.0), delta=1e-5, relation=relation)
    text = parsed(made).text
    verb = {"replace_one": "wrongly names", "add_one": "wrongly clears"}.get(relation, "falsely accuses")
    assert f"{verb}" in text and relation.replace("_", " ").split(" ")[0] in text
    assert made.claims[0].upper == float(ja.epsilon(ja.Gaussian(2.0), 1e-5, relation=relation).upper)


# Groups of records


SEVERAL = {
    "run": (ja.dp_sgd(4.0, 0.1, 10, group=3), 3),
    "step": (ja.PoissonSampled(ja.Gaussian(2.0), 0.01, group=7), 7),
    "without replacement": (ja.SampledWithoutReplacement(ja.Gaussian(2.0), 0.1, group=3, dataset_size=100), 3),
    "with replacement": (ja.SampledWithReplacement(ja.Gaussian(4.0), 10, 1000, group=2), 2),
    "allocation": (ja.RandomAllocation(ja.Gaussian(4.0), 10, group=3), 3),
    "repeated": (ja.repeat(ja.repeat(ja.PoissonSampled(ja.Gaussian(90.0), 1.0, group=4), 2), 5), 4),
    "two sizes": (ja.compose(ja.dp_sgd(2.0, 0.01, 10, group=5), ja.dp_sgd(2.0, 0.02, 10, group=3)), 3),
    "a part of one": (ja.compose(ja.dp_sgd(9.0, 0.1, 10, group=5), ja.Gaussian(9.0)), 1),
    "a run of one": (ja.compose(ja.dp_sgd(2.0, 0.01, 10, group=5), ja.dp_sgd(2.0, 0.01, 10)), 1),
    "nested": (ja.compose(ja.repeat(ja.compose(ja.Gaussian(9.0), ja.dp_sgd(2.0, 0.01, 2, group=2)), 2)), 1),
    "one": (ja.dp_sgd(2.0, 0.01, 10), 1),
}


def test_a_claim_covers_the_smallest_group_of_its_parts():
    for mechanism, group in SEVERAL.values():
        assert min(mechanism.group_sizes()) == group


@pytest.mark.parametrize("name", SEVERAL)
def test_a_page_says_how_many_records_its_claim_covers(name):
    """The claim holds for the smallest group of all parts, where a part without a group covers one record."""
    mechanism, group = SEVERAL[name]
    made = report(mechanism, delta=1e-5)
    text = parsed(made).text
    assert made.claims[0].group == group
    if group == 1:
        assert "If one record were added or taken out" in text and "counts as several records" in text
        assert "group of up to" not in text
        return
    for words in (
        f"If one group of up to {group} records were added or taken out",
        f"add or remove one group of up to {group} records:",
        f"Up to {group} of them are protected together",
        f"of the groups of up to {group} records that were not used",
        f"took a group of up to {group} records to be used",
        f"says nothing about a person who counts as more than {group} records",
    ):
        assert words in text, words
    for words in ("one record were", "one record:", "several records", "the records that were"):
        assert words not in text, words


@pytest.mark.parametrize(
    ("relation", "words"),
    [
        ("add_one", "result without a group of up to 3 records is at most"),
        ("remove_one", "result with a group of up to 3 records is at most"),
        ("replace_one", "If one group of up to 3 records were replaced by another"),
        ("zero_out", "If the contribution of one group of up to 3 records were set to zero"),
    ],
)
def test_every_relation_of_a_group_has_its_sentences(relation, words):
    run, bounds = ja.dp_sgd(1.0, 0.01, 10, group=3), ja.epsilon(ja.Gaussian(2.0), 1e-5)
    assert words in in_words(Claim("x", "epsilon", 1e-5, relation, bounds, run))
    said = wording.of_group(3, wording.RELATIONS[relation])
    assert "one group of up to 3 records" in said and "number of groups" not in said and "one record" not in said


def test_a_choice_among_runs_of_a_group_covers_the_group():
    run = selection.select(ja.dp_sgd(8.0, 0.01, 10, group=2), selection.PointMass(2))
    assert Claim("x", "epsilon", 1e-5, "add_or_remove_one", None, run).group == 2
    test = ja.ProposeTestRelease(ja.dp_sgd(8.0, 0.01, 10, group=2), 1.0, 20.0)
    assert Claim("x", "epsilon", 1e-5, "add_or_remove_one", None, test).group == 1


def test_rows_of_several_groups_each_say_theirs():
    given = {"noise_multiplier": 90.0, "sampling_probability": 1.0, "steps": 100, "delta": 1e-5}
    groups = [3, 1]
    made = report(sweep([given | {"group": group} for group in groups], progress=False))
    text = parsed(made).text
    assert [claim.group for claim in made.claims] == [3, 1]
    assert "If one group of up to 3 records were" in text and "If one record were" in text
    assert "counts as more records than its neighbouring relation names" in text and "several records" not in text
    listed = wording.limits({3, 2})[0]  # of a row in detail, and of a row in the table alone
    assert "counts as more records than its neighbouring relation names" in listed


def test_a_ledger_covers_the_smallest_group_of_its_entries(path):
    with Ledger.create(path, PLAN, run="r") as ledger:
        ledger.spend(ja.dp_sgd(90.0, 1.0, 10, group=3), "one release")
        ledger.seen(PLAN.steps)
    assert report(path).claims[0].group == 3
    with Ledger.open(path) as ledger:
        note(ledger, 0)
    made = report(path)
    assert made.claims[0].group == 1 and "If one record were" in parsed(made).text


def test_rows_of_a_result(tmp_path):
    result = sweep(RUN, progress=False)
    result.to_csv(tmp_path / "r.csv")
    made = report(tmp_path / "r.csv", tmp_path / "r.html", rows=[1])
    assert [claim.upper for claim in made.claims] == pytest.approx(result["upper"][1:].tolist(), rel=1e-4)
    assert made.claims[0].upper >= result["upper"][1]
    assert (tmp_path / "r.html").read_text() == made.to_html() and "1 of 2 rows" in parsed(made).text
    both = report(result)
    assert len(both.claims) == 2 and parsed(both).tags.count("svg") == 2


def test_many_rows_are_cut_at_a_stated_limit():
    result = sweep(RUN | {"steps": list(range(1, 41))}, progress=False)
    made = report(result)
    text = parsed(made).text
    assert len(made.claims) == 3 and "50 of 80 rows; the limit is 50, choose others with --rows" in text


@pytest.mark.parametrize("name", ["name", *INPUTS, "relation"])
def test_the_overview_shows_every_input(name):
    """A column that is shown nowhere would make rows look alike whose claims differ."""
    result = sweep(RUN | {"noise_multiplier": 2.0, "steps": [2, 3, 4, 5, 6]}, progress=False)
    words = name in TEXT
    cells = np.array(["", "a", "b", "c", "d"], object) if words else np.array([np.nan, 0.125, 0.25, 0.75, 2.5])
    made = report(Table(result.columns | {name: cells}))
    (overview,) = [block for block in made.blocks if isinstance(block, Rows)]
    column = [row[overview.header.index(name.replace("_", " "))] for row in overview.rows]
    assert column == ["none", *(map(str, cells[1:]))]
    assert "bands" not in overview.header or name == "bands"  # no row has it


def test_fixed_batches_and_those_without_replacement_say_what_they_assume():
    some = {"target_delta": 1e-5, "dataset_size": 50, "expected_batch_size": 50, "noise_multiplier": 5.0, "steps": 4}
    text = parsed(report(Plan(**some, sampling="fixed_batches"))).text
    assert "The batches of a pass are disjoint" in text and "Poisson" not in text
    assert "one pass over fixed batches" in text
    text = parsed(report(Plan(**some, sampling="without_replacement"))).text
    assert "all batches of its size being equally likely" in text


@pytest.mark.parametrize(
    "way, words",
    [
        (SingleParticipation(), "takes part in at most one step"),
        (FixedEpochs(2), "once in every pass"),
        (MinSeparation(3), "lie at least as far apart"),
        (CyclicPoisson(3, 1.0), "step i draws every record of group i mod groups"),
    ],
)
def test_a_matrix_mechanism_says_how_records_take_part(way, words):
    text = parsed(report(ja.MatrixMechanism(Banded(3, 8), 2.0, way), delta=1e-5)).text
    assert words in text and "the release is C X + Z" in text and "Batches are Poisson samples" not in text
    assert "moves no other record to another step or group" in text


def test_plans_and_ledgers_say_who_takes_part_and_which_steps_share_noise(tmp_path):
    some = {"target_delta": 1e-5, "dataset_size": 40, "expected_batch_size": 10, "noise_multiplier": 5.0, "steps": 8}
    noise = Banded(3, coefficients=(1.0, 0.75, 0.5))
    turns = Plan(**some, sampling="cyclic_poisson", noise=noise, groups=4, unit="user")
    order = Plan(**some, sampling="fixed_order", noise=Banded(3), relation="zero_out")
    plain = Plan(**some, sampling="cyclic_poisson", groups=4)
    said = {
        turns: ["step i draws users of group i mod 4 alone", "the records of the group in turn", "[1.0, 0.75, 0.5]"],
        order: ["any two steps of a record lie at least 4 steps apart", "Banded(bands=3, steps=8"],
        plain: ["step i draws records of group i mod 4 alone", "the records of the group in turn"],
    }
    for place, (plan, sentences) in enumerate(said.items()):
        with Ledger.create(tmp_path / str(place), plan):
            pass
        for subject in (plan, Ledger.read(tmp_path / str(place))):
            text = parsed(report(subject)).text
            for words in sentences:
                assert words.replace("records", f"{plan.unit}s") in text
            assert ("the noise is correlated" in text) is (plan is not plain)


def test_a_result_with_banded_noise_says_what_it_assumes():
    run = {"noise_multiplier": 2.0, "sampling_probability": 1.0, "steps": 3, "delta": 1e-5}
    text = parsed(report(sweep(run | {"sampling": "cyclic_poisson", "bands": 3}, progress=False))).text
    assert "whose columns have norm at most 1" in text and "Groups" in text
    plain = sweep(run, progress=False)
    assert "whose columns have norm at most 1" not in parsed(report(plain)).text


@pytest.mark.slow
def test_caps_and_users_are_on_the_page():
    some = {"target_delta": 1e-5, "dataset_size": 50, "sampling_probability": 0.1, "noise_multiplier": 5.0, "steps": 4}
    text = parsed(report(Plan(**some, sampling="truncated_poisson", cap=20, unit="user"))).text
    assert "a uniformly random subset of that size is kept" in text and "Largest batch" in text
    assert "at most 20 of 50 users" in text
    assert "The user of each example was stated correctly" in text and "The number of users, 50, is public" in text


def test_a_page_about_users_says_record_nowhere(tmp_path):
    some = {"target_delta": 1e-5, "dataset_size": 50, "noise_multiplier": 5.0, "steps": 4, "unit": "user"}
    for more in (
        {"sampling": "random_allocation", "slots": 1},
        {"sampling": "fixed_batches", "expected_batch_size": 50},
    ):
        plan = Plan(**some, **more)
        with Ledger.create(tmp_path / plan.sampling, plan) as ledger:
            note(ledger, 0, noise=5.0, rate=plan.sampling_probability, partition="a")
        for subject in (plan, ledger) if plan.sampling == "fixed_batches" else (ledger,):
            text = parsed(report(subject)).text.replace("Record", "")  # the title of the last section
            assert "record" not in text and "One user: all examples of a user together" in text


def test_rows_of_private_choices_are_derived_again():
    some = {"noise_multiplier": 4.0, "sampling_probability": 1, "steps": 1, "delta": 1e-5, "repetitions": "geometric"}
    result = sweep(some | {"gamma": [0.2, 0.5]}, progress=False)
    result.columns["upper"][0] = result.columns["estimate"][0] = result.columns["lower"][0] = 1e-3
    made = report(result)
    assert "The file was changed" in made.claims[0].trouble and "leaves them undecided" in parsed(made).text
    assert made.claims[1].upper == pytest.approx(result["upper"][1], rel=1e-3)


def test_a_row_of_delta():
    result = sweep({"noise_multiplier": 2.0, "sampling_probability": 1, "steps": 1, "epsilon": 1.0}, progress=False)
    made = report(result)
    assert f"delta <= {up(made.claims[0].upper, 6)} at epsilon = 1.0" in parsed(made).text


def commands(made):
    """The lines of code on a page."""
    (code,) = [block for block in made.blocks if isinstance(block, Code)]
    return list(code.lines)


def test_the_command_lines_on_the_page_verify_the_claim(path, capsys, tmp_path):
    pytest.importorskip("flint")
    with Ledger.create(path, PLAN, run="r") as ledger:
        note(ledger, 0)
    sweep(RUN | {"noise_multiplier": 2.0}, progress=False).to_csv(tmp_path / "a result's.csv")
    for source in (path, tmp_path / "a result's.csv"):
        digest, *others = map(shlex.split, commands(report(source)))
        assert digest == ["sha256sum", str(source)] and others
        assert [cli.main(words[1:]) for words in others] == [0] * len(others)
    capsys.readouterr()
    for name, text, options in (
        ("a plan's.json", PLAN.to_json(), {}),
        ("m.json", to_json(ja.Gaussian(2.0)), {"delta": 1e-5, "relation": "add_one"}),
    ):
        (tmp_path / name).write_text(text)
        python, flag, code = shlex.split(commands(report(tmp_path / name, **options))[1])
        exec(code, {})
        assert (python, flag) == ("python", "-c") and "verified" in capsys.readouterr().out
    for mechanism in (ja.Gaussian(2.0), ja.MatrixMechanism(Banded(4, 4), 2.0, SingleParticipation())):
        exec("\n".join(commands(report(mechanism, delta=1e-5))), {})
        assert "verified" in capsys.readouterr().out


# What must not be claimed


@pytest.mark.parametrize("status", list(STATUSES))
def test_every_status(status):
    fine = status in ("ok", "zero", "not_binding", "loose")
    ends = dict.fromkeys(("lower", "estimate", "upper"), math.nan) if status.startswith("infeasible") else {}
    if status == "mass_at_infinity":
        ends = dict.fromkeys(("lower", "estimate", "upper"), math.inf)
    made = report(table(status=status, **ends), rows=[0])
    text = parsed(made).text
    assert made.claims[0].may_be_claimed == fine == made.may_all_be_claimed
    assert ja.explain("ok" if fine else status) in text  # a fine status is derived, not taken from the file
    assert fine or ("Not to be claimed" in text and "What an attacker can do" not in text and made.readings == (None,))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"upper": 1e-3, "lower": 0.0, "estimate": 1e-4}, "The file was changed"),
        ({"upper": 99.0, "lower": 98.0, "estimate": 98.5}, "The file was changed"),
        ({"lower": 9e9}, "no bracket that jaxacct writes"),
        ({"status": ATTACK}, "no bracket that jaxacct writes"),
        ({"kind": ATTACK}, "no bracket that jaxacct writes"),
        ({"relation": ATTACK}, "relation is not one that jaxacct knows"),
        ({"noise_multiplier": -1.0}, "Its parameters describe no run"),
        ({"noise_multiplier": math.nan}, "has no noise multiplier"),
        ({"repetitions": ATTACK}, "Its parameters describe no run"),
        ({"delta": math.nan}, "has no delta"),
        ({"delta": 2.0}, "cannot be derived again"),
        ({"kind": "estimate"}, "do not use it in a privacy claim"),
        ({"kind": "asymptotic"}, "bounds nothing"),
        ({"kind": "conditional: monotone score"}, "claim nothing without that"),
    ],
)
def test_rows_that_were_tampered_with_or_hold_no_claim(changed, words):
    made = report(table(**changed), rows=None if "upper" in changed else [0])
    text = parsed(made).text
    assert words in text and [claim.may_be_claimed for claim in made.claims] == [False, True][: len(made.claims)]
    assert not made.may_all_be_claimed and "not to be claimed" in text
    markdown_of = made.to_markdown()
    assert "<script" not in markdown_of and "<img" not in markdown_of


def test_a_claim_without_bounds_or_with_infinite_ones():
    none = Claim("x", "epsilon", 1e-5, "add_or_remove_one", None)
    wide = Claim("x", "epsilon", 1e-5, "add_or_remove_one", ja.Bounds(0.0, math.inf, math.inf, "bound", "ok"))
    infinite = report(ja.ApproximateDP(0.1, 1e-3), delta=1e-5)
    assert "epsilon is infinite" in parsed(infinite).text and not infinite.may_all_be_claimed
    for claim in (none, wide):
        assert not claim.may_be_claimed and "Nothing may be claimed" in in_words(claim)
    with pytest.raises(ValueError, match="one configuration"):
        Claim("x", "epsilon", 1e-5, "add_or_remove_one", ja.epsilon(ja.Gaussian([1.0, 2.0]), 1e-5))


# Ledgers that are damaged, open, or of several runs


def test_a_torn_line_counts_and_is_told(path):
    content = written(path)
    path.write_bytes(content[:-20])
    made = report(path)
    least = 4.0
    assert made.claims[0].upper == pytest.approx(gaussian_epsilon(math.sqrt(1 / 100 + 2 / least**2)), rel=1e-6)
    assert "1 step(s) were cut off" in parsed(made).text


def test_damaged_and_open_ledgers_are_refused_in_one_line(path, capsys):
    lines = written(path).splitlines(keepends=True)
    out = path.with_suffix(".html")
    for content, words in (
        (lines[0] + lines[2], "line 2 is damaged"),
        (
            lines[0] + lines[1].replace(b'"noise_multiplier": 10.0', b'"noise_multiplier": 99.0') + lines[2],
            "is damaged",
        ),
        (b"", "is empty"),
        (b"hello\n", "is no ledger"),
        (b'{"format": "jaxacct.plan"}', "plan must be an object"),
        (b'{"format": "jaxacct.mechanism"}', "lacks a key"),
        (b"\xff\xfe", "is no ledger"),
        (b"{", "nor a whole plan or mechanism"),
        (b'{"a": 1}', "nor a whole plan or mechanism"),
        (lines[0][:60], "restore the ledger"),
    ):
        path.write_bytes(content)
        assert (
            cli.main(["report", str(path), "--out", str(out), *(["--delta", "1e-5"] * (b"mechanism" in content))]) == 2
        )
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and not out.exists()
    path.write_bytes(b"".join(lines))
    with Ledger.open(path):
        assert cli.main(["report", str(path), "--out", str(out)]) == 2
    assert "another process is writing it" in capsys.readouterr().err
    assert cli.main(["report", str(path), "--out", str(out)]) == 0 and out.exists()


def test_several_runs_are_composed(path):
    with Ledger.create(path, PLAN, run="a") as ledger:
        note(ledger, 0)
        ledger.begin(PLAN, "b")
        note(ledger, 0, noise=5.0)
        ledger.spend(ja.Gaussian(20.0), ATTACK.replace("\n", ""))
    made = report(path)
    mu2 = 1 / 100 + 1 / 25 + 1 / 400
    assert made.claims[0].upper == pytest.approx(gaussian_epsilon(math.sqrt(mu2)), rel=1e-6)
    page = parsed(made)
    assert page.tags.count("tr") == 4 and "All runs of the ledger together" in page.text
    assert up(float(ledger.epsilon(1e-5, run="b").upper), 6) in page.text


def test_a_renyi_filter_has_risks_by_its_points(path):
    plan = Plan(
        target_epsilon=2.0, target_delta=1e-5, dataset_size=100, sampling_probability=1.0, steps=4, data_dependent=True
    )
    with Ledger.create(path, plan, run="r") as ledger:
        note(ledger, 0, noise=plan.noise_multiplier)
    made = report(path)
    claim, readings = made.claims[0], made.readings[0]
    assert claim.kind == "bound" and claim.upper == float(ledger.epsilon(1e-5).upper) <= 2.0
    # the stated rate is at most what the filter promises, and at least what the noted step itself leaks
    for fpr in FALSE_POSITIVE_RATES:
        direct = math.exp(claim.upper) * fpr + 1e-5
        floor = float(ja.profile(ledger.spent()).true_positive_rate(fpr).lower)
        assert floor <= readings.rate(fpr) <= direct * (1 + 1e-9)
    assert set(np.ravel(readings.tpr.kind)) == {"bound"} and "A Renyi filter bounds every path" in parsed(made).text
    assert report(plan).claims[0].upper == float(plan.epsilon.upper)


def test_a_ledger_that_holds_a_private_choice(path):
    run = selection.select(ja.Gaussian(4.0), selection.PointMass(5), candidates="adaptive")
    with Ledger.create(path, PLAN, run="tuning") as ledger:
        ledger.spend(run, "the tuning")
    made = report(path)
    assert made.claims[0].upper == float(ja.epsilon(run, 1e-5).upper)
    text = parsed(made).text
    assert "0 training steps and 1 other release has been noted" in text and "leaves them undecided" in text


def test_every_private_choice_says_what_stays_secret():
    assert all("stays secret" in wording._OF_CLASS[one.__name__] for one in AnySelection.__subclasses__())


def test_a_tuning_that_is_noted_as_points_says_what_is_assumed_of_it(path):
    """Points do not say that K stays secret, so the report says it. A ledger with only a tuning takes no steps."""
    points = ja.PrivacyProfile([0.0, 1.0], [0.1, 1e-6])
    with Ledger.create(path, PLAN, run="tuning") as ledger:
        ledger.spend(points, "tuning: a selection among runs of the plan; candidates iid")
        assert not ledger.unfinished()
    text = parsed(report(path)).text
    assert wording.TUNED in text and "steps of its plan" not in text
    with Ledger.open(path) as ledger:
        ledger.spend(ja.Gaussian(50.0), "a mean")
        assert ledger.unfinished()


def test_an_early_stop_says_what_is_assumed_of_its_scores():
    plan = Plan(**CANDIDATE | {"early_stop": EarlyStop(0.1, every=1)})
    assert f"In the plan {wording.ANSWERS}" in parsed(report(plan)).text


def test_a_private_choice():
    run = selection.select(ja.Gaussian(4.0), selection.Geometric(0.2))
    made = report(run, delta=1e-5)
    assert "Only the best of K candidates is released" in parsed(made).text
    assert made.claims[0].upper == float(ja.epsilon(run, 1e-5).upper)
    assert made.readings[0].rate(0.01) >= float(ja.profile(ja.Gaussian(4.0)).true_positive_rate(0.01).lower)


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_points_of_a_profile_are_never_below_what_they_say(points):
    """Each point of the stand-in follows from a given point: delta is the same, and epsilon is no smaller."""
    stand_in = by_points(points)
    if stand_in is None:
        assert all(delta >= 1.0 for _, delta in points)
        return
    kept = list(zip(stand_in.epsilon, stand_in.delta, strict=True))
    for epsilon, delta in kept:
        assert any(e <= epsilon and d == delta for e, d in points)


# Text from files


def test_names_from_files_stay_text(path):
    with Ledger.create(path, PLAN, run=ATTACK, by=ATTACK) as ledger:
        note(ledger, 0)
    made = report(path)
    page = parsed(made)
    assert "script" not in page.tags and "img" not in page.tags
    assert "<script>alert(1)</script>" in page.text and "\u202e" not in page.text and "\x1b" not in page.text
    text = made.to_markdown()
    assert "<script" not in text and "<img" not in text and "\u202e" not in text
    assert "\n# no" not in text and not re.search(r"(?<!\\)\]\(", text)


def test_the_name_of_a_file_stays_text(tmp_path):
    place = tmp_path / "a\n# <script>'\u202e.json"
    place.write_text(PLAN.to_json())
    made = report(place)
    page, text = parsed(made), made.to_markdown()
    assert "script" not in page.tags and "\u202e" not in page.text + text and "\n# <" not in text


@given(st.text(st.sampled_from([*map(chr, range(256)), *"\u202e\u2028≤😀"])))
@settings(deadline=None, max_examples=30)
def test_any_text_comes_back_from_html_and_stays_in_its_cell_of_markdown(text):
    shown = safe(text)
    blocks = [Heading("t"), Paragraph(shown), Facts([(shown, shown)]), Rows(shown, [shown, "b"], [[shown, shown]])]
    page = Page(html(shown, blocks))
    assert set(page.tags) - {"span"} == {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "h2",
        "p",
        "dl",
        "dt",
    } | {"dd", "div", "table", "thead", "tbody", "tr", "th", "td"}
    assert shown.replace("<=", "≤").replace(" %", "\xa0%") in "".join(page.words)
    row = markdown(blocks).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3
    assert "<" not in re.sub("&lt;", "", markdown(blocks))


def test_a_picture_is_described_and_prints():
    made = report(ja.Gaussian(1.0), delta=1e-5)
    (picture,) = [block for block in made.blocks if isinstance(block, Picture)]
    page = parsed(made)
    assert ("svg", "aria-label", picture.description.replace(" %", "\xa0%")) in page.values
    numbers = [float(x) for x in re.findall(r"[ML ](\d+\.\d+),", picture.svg)]
    assert numbers and all(0.0 <= x <= 600.0 for x in numbers)
    heights = {float(p): float(y) for y, p in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+) %', picture.svg)}
    circles = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', picture.svg)]
    for fpr, y in zip(FALSE_POSITIVE_RATES, circles, strict=True):
        share = (heights[0.01] - 4.0 - y) / (heights[0.01] - heights[100.0])
        assert 10.0 ** (4.0 * share - 4.0) == pytest.approx(made.readings[0].rate(fpr), rel=5e-3)
    assert "@media print" in made.to_html() and "default-src 'none'" in made.to_html()


@pytest.mark.parametrize("run", [ja.PureDP(0.0), ja.Gaussian(1e-3), ja.Gaussian(1e6), ja.ApproximateDP(0.0, 1e-6)])
def test_the_ends_of_the_scale(run):
    made = report(run, delta=1e-5)
    text = parsed(made).text
    assert made.claims[0].may_be_claimed and ("1 times as large" in text) == (made.claims[0].upper == 0.0)


# Numbers as text


@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-323, 308).map(lambda power: float(f"1e{power}"))
    | st.integers(1, 2**52).map(lambda n: n * 5e-324)
    | st.decimals(-10, 10, places=3).map(float),
    st.integers(1, 17),
)
@example(0.1, 6)
@example(sys.float_info.max, 17)
@settings(deadline=None)
def test_rounding_goes_to_the_safe_side_of_the_very_number(value, digits):
    """The exact value is between both texts. They differ by at most a unit of the last digit or two ulps."""
    low, high = Decimal(down(value, digits)), Decimal(up(value, digits))
    assert low <= Decimal(value) <= high
    unit = Decimal(1).scaleb(Decimal(value).adjusted() - digits + 1) if value else Decimal(0)
    assert high - low <= max(unit, 2 * Decimal(math.ulp(value))) or math.inf in map(abs, map(float, (low, high)))


@given(st.floats(0, 1) | st.integers(1, 1000).map(lambda n: n / 1000))
@example(0.29)
@settings(deadline=None)
def test_per_cent_is_never_too_low(value):
    shown = Decimal(percent(value).removesuffix(" %"))
    assert Decimal(value) * 100 <= shown <= 100


def test_a_long_list_of_releases_is_cut_at_a_stated_limit():
    rows = counted("Every release.", ["name"], [[str(k)] for k in range(600)])
    assert len(rows.rows) == 500 and rows.caption.endswith("The first 500 of 600 kinds are shown; epsilon counts all.")


# Wrong inputs and the command


@pytest.mark.parametrize(
    ("subject", "options", "words"),
    [
        (3, {}, "subject = 3 must be"),
        ("", {}, "must be a Ledger"),
        ("nowhere.jsonl", {}, "cannot be read"),
        ("nowhere.csv", {}, "cannot be read"),
        (ja.Gaussian(1.0), {}, "delta is missing"),
        (ja.Gaussian([1.0, 2.0]), {"delta": 1e-5}, "must be one configuration"),
        (ja.Gaussian(1.0), {"delta": [1e-5, 1e-6]}, "delta"),
        (ja.Gaussian(1.0), {"delta": 1e-5, "prior": 0.0}, "prior = 0.0 must be > 0"),
        (ja.Gaussian(1.0), {"delta": 1e-5, "relation": "x"}, "relation = 'x' is not known"),
        (ja.Gaussian(1.0), {"delta": 1e-5, "rows": [0]}, "rows is for the result of a sweep"),
        (ja.Gaussian(1.0), {"delta": 1e-5, "out": "x.pdf"}, "must end in .html"),
        (ja.Gaussian(1.0), {"delta": 1e-5, "out": 3}, "out = 3 must be the path"),
        (PLAN, {"delta": 1e-5}, "a plan has its own"),
        (PLAN, {"relation": "add_one"}, "a plan has its own"),
    ],
)
def test_wrong_inputs_get_one_line(subject, options, words):
    with pytest.raises(ja.InputError) as refused:
        report(subject, **options)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("rows", [[2], [-1], [], list(range(21))])
def test_rows_that_are_not_there(rows):
    with pytest.raises(ja.InputError, match="rows: "):
        report(table(), rows=rows)


def test_whose_page_it_is(tmp_path):
    page = tmp_path / "page.md"
    words = ["--model", "<b>Digits\x00 v2</b>", "--contact", "dp@example.org"]
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(ja.Gaussian(2.0)))
    assert cli.main(["report", str(plan), "--out", str(page), "--delta", "1e-5", *words]) == 0
    text = page.read_text()
    assert "- Model: &lt;b&gt;Digits? v2&lt;/b&gt;\n- Contact: dp@example.org\n" in text and "Organisation" not in text
    assert (
        "<dl><dt>Organisation</dt><dd>A &amp; B</dd></dl>"
        in report(ja.Gaussian(2.0), delta=1e-5, organisation="A & B").to_html()
    )


def test_the_command_says_for_which_relation(tmp_path, capsys):
    given = {"target_delta": 1e-5, "dataset_size": 50, "noise_multiplier": 2.0, "steps": 3, "expected_batch_size": 10}
    (tmp_path / "plan.json").write_text(Plan(**given, sampling="fixed_batches").to_json())
    words = ["report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "r.md")]
    assert cli.main(words) == 0 and "(bound, zero_out)" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claims"][0]["relation"] == "zero_out"


def test_the_command(tmp_path, capsys):
    sweep(RUN, progress=False).to_csv(tmp_path / "r.csv")
    source, page = str(tmp_path / "r.csv"), tmp_path / "r.md"
    assert cli.main(["report", source, "--out", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["written"] == str(page) and len(told["claims"]) == 2 and told["claims"][0]["may_be_claimed"]
    assert page.read_text().startswith("# Privacy report")
    table(status="failed").to_csv(tmp_path / "r.csv")
    assert cli.main(["report", source, "--out", str(page), "--rows", "1"]) == 0
    assert cli.main(["report", source, "--out", str(page)]) == 1
    assert "not to be claimed (failed)" in capsys.readouterr().out
    table(upper=99.0, lower=98.0, estimate=98.5).to_csv(tmp_path / "r.csv")
    assert cli.main(["report", source, "--out", str(page)]) == 1
    assert "not to be claimed (The file says epsilon <= 99" in capsys.readouterr().out  # its status is ok
    assert cli.main(["report", source, "--out", str(page), "--json"]) == 1
    assert "The file was changed" in json.loads(capsys.readouterr().out)["claims"][0]["obstacle"]
    for words, message in (
        ([], "FILE is missing"),
        ([source], "--out is missing"),
        ([source, "--out", "x.txt"], "must end in .html"),
        ([source, "--out", str(tmp_path / "no" / "x.md")], "cannot be written"),
        ([source, "--out", str(page), "--rows", "a"], "rows = 'a' must be a row number"),
        ([source, "--out", str(page), "--prior", "0.1,0.2"], "prior must be one number"),
        ([source, "--out", str(page), "--delta", "1e-5"], "a result has its own"),
        ([source, "--out", str(page), "--prio", "1"], "did you mean --prior?"),
    ):
        assert cli.main(["report", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert "jaxacct report run.jsonl --out report.html" in capsys.readouterr().out


def test_the_command_with_a_target_that_is_a_risk_has_no_delta_in_its_json(tmp_path, capsys):
    out = tmp_path / "result.csv"
    sweep({"target_advantage": [0.1, 0.2], "sampling_probability": 1, "steps": 4}, out=out)
    assert cli.main(["report", str(out), "--out", str(tmp_path / "page.md"), "--json"]) == 1
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert [claim["at"] for claim in claims] == [None, None]


def test_a_claim_in_one_direction_names_the_direction_that_holds():
    """The epsilon of a claim holds for every set of outputs in the named direction. That of add fails for remove."""
    with_record, without = np.array([0.7, 0.2, 0.1, 0.0]), np.array([0.2, 0.4, 0.2, 0.2])
    said = {
        "remove_one": ("result with a record is at most", with_record, without),
        "add_one": ("result without a record is at most", without, with_record),
    }
    for relation, (words, more, less) in said.items():
        claim = report(ja.FiniteOutput(with_record, without), delta=0.3, relation=relation).claims[0]
        text, factor = in_words(claim), math.exp(claim.upper)
        assert words in text and "in one direction only" in text
        parts = np.array([[n >> k & 1 for k in range(4)] for n in range(16)])
        assert np.all(parts @ more <= factor * (parts @ less) + 0.3 + 1e-12)
        if relation == "add_one":  # the smaller epsilon does not hold for remove_one
            assert not np.all(parts @ less <= factor * (parts @ more) + 0.3)


def test_a_noise_multiplier_copied_from_the_page_keeps_the_claim():
    """One release of Gaussian noise, by its closed form: displayed digits of sigma are all that a reader has."""
    row = {"sampling_probability": 1, "steps": 1, "epsilon": [0.3, 1.0], "delta": 1e-5}
    made = report(sweep(row, progress=False))
    (overview,) = [block for block in made.blocks if isinstance(block, Rows)]
    for claim, cells in zip(made.claims, overview.rows, strict=True):
        noise = float(cells[overview.header.index("noise multiplier")])
        assert gaussian_epsilon(1.0 / noise) <= claim.upper * (1.0 + 1e-11)  # the root finder's own error
    plan = Plan(target_epsilon=1.0, target_delta=1e-5, dataset_size=100, sampling_probability=1.0, steps=1)
    (facts,) = [dict(block.pairs) for block in report(plan).blocks if isinstance(block, Facts)][:1]
    assert float(facts["Noise multiplier"]) == plan.noise_multiplier


def test_numbers_edited_within_the_bracket_are_not_believed():
    honest = report(table(), rows=[0]).claims[0].bounds
    upper = float(honest.upper)
    made = report(table(lower=upper, estimate=upper, upper=9.0, kind="bound", status="not_binding"), rows=[0])
    claim = made.claims[0]
    assert claim.upper == 9.0 and float(claim.bounds.lower) == float(honest.lower)
    assert (claim.kind, claim.status) == (honest.kind, "ok")
    zero = parsed(report(table(status="zero"), rows=[0])).text
    assert "so epsilon is 0" not in zero


def test_a_batch_size_that_is_not_that_of_the_row_is_not_claimed():
    grid = {"noise_multiplier": 2.0, "dataset_size": 1000, "batch_size": 1000, "epochs": 1, "delta": 1e-5}
    assert report(sweep(grid, progress=False)).may_all_be_claimed
    right = sweep(grid, progress=False)
    for name, value in (("batch_size", 20.0), ("dataset_size", 500.0), ("epochs", 2.0), ("batch_size", 0.0)):
        columns = {key: column.copy() for key, column in right.columns.items()}
        columns[name][0] = value
        made = report(Table(columns))
        assert not made.claims[0].may_be_claimed and "Its parameters describe no run" in made.claims[0].trouble


def test_a_rate_that_was_solved_for_epochs_is_claimed():
    grid = {"noise_multiplier": 4.0, "epochs": 50, "target_epsilon": 2.0, "target_delta": 1e-5}
    made = report(sweep(grid, progress=False))
    assert made.may_all_be_claimed and 1.98 < made.claims[0].upper <= 2.0


def test_a_kind_of_several_lines_does_not_leave_its_cell():
    made = report(table(kind="conditional: x\n\nEverything on this page may be claimed.\n"), rows=[0])
    assert "\n\nEverything" not in made.to_markdown() and not made.may_all_be_claimed


def test_large_counts_are_in_full():
    made = report(sweep(RUN | {"noise_multiplier": 1e6, "steps": 123_456_789}, progress=False))
    assert dict(next(b for b in made.blocks if isinstance(b, Facts)).pairs)["Steps"] == "123456789"


def test_a_page_does_not_take_the_place_of_its_ledger(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXACCT_CACHE_DIR", "")
    path = tmp_path / "run.md"
    content = written(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.md").hardlink_to(path)
    for out in (path, "run.md", "./run.md", "link.md"):
        assert cli.main(["report", str(path), "--out", str(out)]) == 2
        assert "would overwrite" in capsys.readouterr().err and path.read_bytes() == content
    with pytest.raises(ja.InputError, match="would overwrite"):
        report(Ledger.read(path), path)


def test_paths_that_cannot_be_written_or_are_no_files(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ja.InputError, match="cannot be written"):
        report(ja.Gaussian(2.0), tmp_path / "file" / "page.html", delta=1e-5)
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(ja.InputError, match="it is a folder, a pipe or a device"):
            report(path)


@pytest.mark.parametrize("rows", [[1.0], ["1"], [True], "1", 1, [None]])
def test_rows_that_are_no_numbers(rows):
    with pytest.raises(ja.InputError, match="rows"):
        report(table(), rows=rows)


def test_a_mechanism_of_arrays_is_made_again_to_the_last_digit(tmp_path):
    thirds = ja.FiniteOutput([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    made = report(thirds, delta=1e-3)
    scope = {}
    exec("\n".join(commands(made)[:-1]), scope)
    assert scope["m"].p.tolist() == thirds.p.tolist() and float(scope["b"].upper) == made.claims[0].upper
    (rows,) = [block for block in made.blocks if isinstance(block, Rows)]
    assert "0.3333333333333333," in rows.rows[0][0]
    path = tmp_path / "\U0001f600 it's.json"
    path.write_text(to_json(thirds))
    exec(shlex.split(commands(report(path, delta=1e-3))[1])[2].split("; print")[0], {})


@pytest.mark.parametrize(
    ("prior", "words"), [(0.99999999, "99.999999 %"), (0.07, "93 %"), (1e-30, "almost 100 %"), (0.5, "50 %")]
)
def test_a_prior_near_its_ends_is_not_rounded_to_certainty(prior, words):
    text = parsed(report(ja.Gaussian(2.0), delta=1e-5, prior=prior)).text.replace("\xa0", " ")
    assert f"Without the output it is {words}" in text


def test_no_attacker_is_above_the_line_between_its_points():
    """The curve of randomized response has corners. A line through points of the curve would cut the corners off."""
    points = [(float(x), min(20.0 * x, 1.0 - (1.0 - x) / 20.0)) for x in np.geomspace(1e-4, 1.0, 33)]
    line = np.log(_above(points))
    at = np.geomspace(1e-4, 1.0, 5000)
    drawn = np.exp(np.interp(np.log(at), *line.T))
    assert np.all(drawn >= np.minimum(20.0 * at, 1.0 - (1.0 - at) / 20.0) * (1.0 - 1e-12))
    assert np.all(np.isin(points, _above(points)))


@pytest.mark.parametrize(
    ("mechanism", "relation", "exact"),
    [
        (ja.Gaussian(0.3), "add_or_remove_one", lambda a: ndtr(ndtri(a) + 1.0 / 0.3)),
        (ja.Gaussian(50.0), "remove_one", lambda a: ndtr(ndtri(a) + 0.02)),
        (
            ja.PureDP(2.0),
            "add_or_remove_one",
            lambda a: np.minimum(math.exp(2.0) * a, 1.0 - (1.0 - a) * math.exp(-2.0)),
        ),
        (ja.dp_sgd(1.0, 0.3, 1), "remove_one", lambda a: 0.3 * ndtr(ndtri(a) + 1.0) + 0.7 * a),
        (ja.dp_sgd(1.0, 0.3, 1), "add_one", None),
        (ja.ApproximateDP(0.0, 0.25), "add_or_remove_one", lambda a: np.minimum(a + 0.25, 1.0)),
    ],
)
def test_the_line_is_nowhere_below_the_best_attacker_and_hardly_above(mechanism, relation, exact):
    drawn, known = _read(mechanism, relation, 0.1).drawn, ja.profile(mechanism, relation)
    found = known.true_positive_rate(_DRAWN) if exact is None else exact(_DRAWN)
    low, high = (found.lower, found.upper) if exact is None else (found, found)
    assert np.all((drawn >= low * (1.0 - 1e-9)) & (drawn <= high * 1.03))


@pytest.mark.parametrize(("mass", "seed"), [(0.0, 1), (1.0, 2), (1.0, 3)])
def test_the_stand_in_of_points_is_no_better_than_the_mechanism(mass, seed):
    """No likelihood-ratio test of a mechanism with five outputs has more power than its stand-in allows."""
    draw = np.random.default_rng(seed)
    p, q = draw.dirichlet(np.ones(5)), draw.dirichlet(np.ones(5))
    q[0] = 0.0 if mass > 0.5 else q[0]
    q /= q.sum()
    both = lambda e: max(np.maximum(p - np.exp(e) * q, 0).sum(), np.maximum(q - np.exp(e) * p, 0).sum())
    stand_in = by_points([(float(e), float(both(e)) * (1 + 1e-12)) for e in np.linspace(0.0, 3.0, 7)])
    if stand_in is None:
        return
    for more, less in ((p, q), (q, p)):
        order = np.argsort(-more / np.maximum(less, 1e-300))
        fpr, tpr = np.cumsum(less[order]), np.cumsum(more[order])
        inner = fpr < 1.0
        known = ja.profile(stand_in).true_positive_rate(fpr[inner]).upper
        assert np.all(np.asarray(known) >= tpr[inner] - 1e-9)


def test_steps_of_one_candidate_of_a_private_choice_are_no_claim(path):
    """Two steps cost .634. Only the best of K such runs is released, which costs .881, so .634 may not be claimed."""
    plan = Plan(**CANDIDATE, repetitions=selection.Geometric(0.2))
    with Ledger.create(path, plan, run="c") as ledger:
        note(ledger, 0, noise=8.0)
    made = report(path)
    text = parsed(made).text
    assert not made.claims[0].may_be_claimed and made.readings == (None,) and "epsilon <= 0." in made.claims[0].trouble
    after = path.with_name("after")
    after.write_bytes(path.read_bytes())
    with Ledger.open(after) as ledger:  # the new plan has no choice, but the old one still costs
        ledger.replan(Plan(**CANDIDATE))
        note(ledger, 1, noise=8.0)
    assert report(after).claims[0].trouble == made.claims[0].trouble
    assert up(float(plan.epsilon.upper), 6) in text and "Only the best of K candidates is released" not in text
    with Ledger.create(path.with_name("two"), Plan(**CANDIDATE), run="c") as ledger:
        note(ledger, 0, noise=8.0)
    assert report(path.with_name("two")).may_all_be_claimed


def test_a_result_with_a_column_twice_is_refused(tmp_path):
    path = tmp_path / "r.csv"
    sweep(RUN, progress=False).to_csv(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},noise_multiplier", *(f"{line},9.0" for line in lines[1:])]))
    with pytest.raises(ja.InputError, match="column 'noise_multiplier' appears twice"):
        report(path)
    path.write_text("\ufeff" + "\n".join(lines))
    assert report(path).may_all_be_claimed


def test_an_address_in_a_name_is_no_link():
    text = report(table(name="see https://example.org or www.example.org"), rows=[0]).to_markdown()
    assert "https://" not in text and "www.example" not in text and "https\\://example" in text
