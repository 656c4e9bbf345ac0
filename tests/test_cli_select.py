"""`jaxacct select`: reference values of Gaussian bases, what is printed, and one line for whatever is wrong."""

import json
import math

import pytest
from selection_cases import rows
from test_cli import answered, no_cache, refused  # noqa: F401

BASE = "--sampling-probability 1 --steps 1 --delta 1e-5"
ONE = f"select --noise-multiplier 2 {BASE}"
OPTIONS = {
    "truncated_negative_binomial": ("eta", "gamma"),
    "poisson": ("mean",),
    "binomial": ("trials", "probability_of_run"),
    "point_mass": ("count",),
}
FOUR = [row for _, row in rows() if row["repetitions"] in OPTIONS and row["gdp_mu"] == "0.2681"]


def line(row):
    """The command for a row of the reference table."""
    values = [part.split("=")[1] for part in row["parameters"].split(";")]
    options = zip(OPTIONS[row["repetitions"]], values, strict=True)
    law = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options)
    return f"select --noise-multiplier {1 / float(row['gdp_mu'])!r} {BASE} --repetitions {row['repetitions']} {law}"


@pytest.mark.parametrize("row", FOUR, ids=lambda row: f"{row['repetitions']} {row['parameters']}")
def test_the_monotone_score_of_every_law_is_that_of_the_reference_table(capsys, row):
    answer = json.loads(answered(capsys, f"{line(row)} --bound monotone_score --json"))
    assert math.isclose(answer["upper"], float(row["epsilon_monotone_score"]), rel_tol=1e-5)
    assert answer["kind"] == "conditional: monotone score"
    assert math.isclose(answer["expected_repetitions"], float(row["expected_repetitions"]), rel_tol=1e-5)
    assert math.isclose(answer["base_upper"], float(row["base_epsilon"]), rel_tol=1e-5)
    assert answer["base_kind"] == "certified"


def test_the_worst_score_is_certified_and_brackets_the_reference(capsys):
    row = FOUR[0]
    out = answered(capsys, f"{line(row)} --json")
    answer = json.loads(out)
    exact = float(row["epsilon_exact"])
    assert answer["lower"] <= exact + 1e-6 and exact - 1e-6 <= answer["upper"] <= exact + 1e-4
    assert answer["lower"] <= answer["estimate"] <= answer["upper"]
    assert (answer["kind"], answer["status"], answer["engine"]) == ("certified", "ok", "worst_score")
    assert answer["base_upper"] < answer["lower"]


def test_published_bounds_say_what_they_are_and_are_ordered_as_in_the_table(capsys):
    geometric = FOUR[0]
    upper = {}
    for bound in ("envelope", "privacy_profile", "renyi", "auto"):
        answer = json.loads(answered(capsys, f"{line(geometric)} --bound {bound} --json"))
        assert (answer["kind"], answer["lower"]) == ("bound", 0.0)
        upper[bound] = answer["upper"]
    assert math.isclose(upper["privacy_profile"], float(geometric["epsilon_published_profile_bound"]), rel_tol=1e-4)
    assert upper["auto"] == upper["envelope"] < upper["privacy_profile"] < upper["renyi"]


def test_the_human_answer_says_what_may_be_claimed_and_what_one_run_costs(capsys):
    out = answered(capsys, f"{ONE} --repetitions geometric --gamma 0.1 --bound privacy_profile")
    assert "claim     epsilon <= 3.75701 at delta = 1e-05" in out and "(bound)" in out
    assert "status    ok: The bound was evaluated, and the truth may lie far below it" in out
    assert "base      epsilon <= 1.9931 (certified) for a single run" in out and "E[K]      10" in out
    out = answered(capsys, f"{ONE} --repetitions geometric --gamma 0.1 --bound monotone_score")
    assert "claim     none without more (conditional: monotone score)" in out
    assert "status    ok: The answer holds under the assumption that its kind names" in out


def test_lists_and_several_laws_answer_for_a_batch(capsys):
    words = "--repetitions geometric,logarithmic --gamma 0.1,0.01 --bound privacy_profile"
    answer = json.loads(answered(capsys, f"{ONE} {words} --json"))
    assert answer["repetitions"] == ["geometric", "logarithmic"] and answer["gamma"] == [0.1, 0.01]
    assert answer["expected_repetitions"] == pytest.approx([10, 0.99 / 0.01 / math.log(100)])
    each = [
        json.loads(answered(capsys, f"{ONE} --repetitions {law} --gamma {gamma} --bound privacy_profile --json"))
        for law, gamma in (("geometric", 0.1), ("logarithmic", 0.01))
    ]
    assert answer["upper"] == pytest.approx([one["upper"] for one in each], rel=1e-12)
    lines = answered(capsys, f"{ONE} {words}").splitlines()
    assert len(lines) == 3 and len({len(text) for text in lines}) == 1 and "base_upper" in lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "repetitions is missing; name the law of K: geometric, logarithmic"),
        ("--repetitions geometrical --gamma 0.1", "repetitions = 'geometrical' is not known; use one of 'geometric'"),
        ("--repetitions geometric", "repetitions = 'geometric' takes gamma; give gamma"),
        ("--repetitions geometric,foo --gamma 0.1", "repetitions[1] = 'foo' is not known"),
        ("--repetitions binomial --trials 3", "takes trials and probability_of_run; give probability_of_run"),
        ("--repetitions poisson --gamma 0.1 --mean 3", "repetitions = 'poisson' takes mean; leave out gamma"),
        ("--repetitions geometric --gamma 1", "gamma = 1 must be > 0 and < 1"),
        ("--repetitions geometric --gamma 0.1,2", "gamma[1] = 2.0 must be > 0 and < 1"),
        ("--repetitions truncated_negative_binomial --eta -1 --gamma 0.1", "eta = -1 must be > -1"),
        ("--repetitions point_mass --count 1.5", "count = 1.5 must be an integer >= 1"),
        ("--repetitions poisson --mean 3 --bound best", "bound = 'best' is not known; use one of 'worst_case'"),
        ("--repetitions point_mass --count 3 --bound renyi", "no Rényi bound is published for k = PointMass"),
        ("--repetitions poisson --mean 3 --candidates any", "candidates = 'any' is not known; use one of 'iid'"),
        (
            "--repetitions poisson --mean 3 --bound auto --candidates adaptive",
            "bound = 'auto' is for i.i.d. candidates",
        ),
        ("--repetitions poisson --mean 3 --top 0", "top = 0 must be an integer >= 1 and <= 16"),
        ("--repetitions poisson --mean 3 --top 2 --bound auto", "bound = 'auto' is for one winner"),
        ("--repetitions poisson --mean 3 --relation swap", "relation = 'swap' is not known"),
        ("--repetitions poisson --mean 3 --rtol 1e-3", "unknown option --rtol"),
        ("--repetitions poisson --mean 3 --epsilon 1", "unknown option --epsilon"),
        ("--repetitions poisson --mean 1,2 --noise-multiplier 1,2,3", "do not broadcast"),
    ],
)
def test_bad_input_exits_2_with_one_line(capsys, words, message):
    refusal = refused(capsys, f"{ONE} {words}")
    assert refusal.startswith("jaxacct select: ") and message in refusal


def test_adaptive_candidates_cost_more_and_the_answer_says_so(capsys):
    words = f"select --noise-multiplier {1 / 0.2680511!r} {BASE} --repetitions poisson --mean 10,8 --json"
    found = {which: json.loads(answered(capsys, f"{words} --candidates {which}")) for which in ("iid", "adaptive")}
    assert [round(x, 3) for x in found["adaptive"]["upper"]] == [4.266, 3.843]
    for which, answer in found.items():
        assert answer["candidates"] == [which] * 2 and answer["kind"] == ["certified"] * 2
    assert all(a > 1.9 * b for a, b in zip(found["adaptive"]["upper"], found["iid"]["upper"], strict=True))


def test_several_winners_cost_more_and_the_answer_says_so(capsys):
    words = f"select --noise-multiplier {1 / 0.2680511!r} {BASE} --repetitions poisson --mean 10 --json"
    found = json.loads(answered(capsys, f"{words} --top 2"))
    assert round(found["upper"], 3) == 2.566 and (found["kind"], found["top"]) == ("bound", 2)
    assert "top" not in json.loads(answered(capsys, words))
    assert "released  the best 2" in answered(capsys, f"{words} --top 2".replace(" --json", ""))
