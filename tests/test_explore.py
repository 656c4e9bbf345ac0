"""The page of `jaxacct explore`: it has a control for every argument of a run, and agrees with the public functions."""

import ast
import socket
import threading
import time

import numpy as np
import pytest
from helpers import refusal

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest
from test_run_record import RUNS as RUN_OF_RULE

import jaxacct as ja
from jaxacct.cli import explore, explore_page, main
from jaxacct.cli.explore_page import CHOICES, FIRST, QUESTIONS, SLIDERS, Run, Work
from jaxacct.core.text import outward
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, NUMBERS, RATES, RULES, SAMPLING, usual_relation

SLOW = Run("A", {"noise_multiplier": 1.0, "batch_size": 256, "dataset_size": 50_000, "epochs": 10}, "poisson", 1e-5)

QUICK = ("poisson", "shuffled", "cyclic_poisson", "random_allocation")
"""Batch rules of the quick run. The page treats every other rule like one of these."""


def script():
    from jaxacct.cli.explore_page import page

    page()


@pytest.fixture
def epsilon_alone(monkeypatch):
    monkeypatch.setattr(explore_page, "QUESTIONS", {"epsilon": QUESTIONS["epsilon"]})


def opened(link=()):
    """Return the page that a user sees after following a link with these settings."""
    page = AppTest.from_function(script, default_timeout=120)
    page.query_params.update(link)
    page.run()
    assert not page.exception
    return page


def link_of(sampling, run="A"):
    """Return link settings for the example run of a batch rule."""
    numbers = {"noise_multiplier": 2.0, **RUN_OF_RULE[sampling]}
    rate, length = (next(name for name in names if name in numbers) for names in (RATES, LENGTHS))
    given = {"sampling": sampling, "rate": rate, "length": length} | numbers
    return {f"{run}.{name}": str(value) for name, value in given.items()}


def test_the_page_knows_every_word_of_a_run():
    """Every number that `dp_sgd` takes has a slider and a first value. Every choice has its options."""
    assert set(SLIDERS) == {*NUMBERS, "delta"}
    assert set(FIRST) == {*SLIDERS, *CHOICES, "runs"}
    for name, (low, high, _) in SLIDERS.items():
        assert low <= float(FIRST[name]) <= high, name
    assert CHOICES == {"sampling": SAMPLING, "rate": RATES, "length": LENGTHS} and set(SAMPLING) == set(RULES)


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(rule, marks=() if rule in QUICK[:2] else pytest.mark.slow) for rule in RULES],
)
def test_the_page_says_what_python_and_the_command_say(sampling, epsilon_alone, capsys):
    page = opened(link_of(sampling))
    asked = ja.epsilon(
        ja.dp_sgd(2.0, **RUN_OF_RULE[sampling], sampling=sampling), 1e-5, relation=usual_relation(sampling)
    )
    shown = float(page.title[0].value.removeprefix("ε ≤ "))
    assert asked.upper <= shown <= asked.upper * 1.001
    assert any(f"**{asked.kind}** ({asked.status})" in one.value for one in page.markdown)
    python, command, _ = (each.value for each in page.code)
    body, last = ast.parse(python).body[:-1], ast.parse(python).body[-1]
    names = {}
    exec(compile(ast.Module(body, []), "page", "exec"), names)
    assert eval(compile(ast.Expression(last.value), "page", "eval"), names).upper == asked.upper
    assert main(command.split()[1:]) == 0
    assert f"epsilon <= {outward(asked.upper, '.6g', up=True)} at delta = 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(rule, marks=() if rule in QUICK else pytest.mark.slow) for rule in RULES],
)
def test_the_curve_over_the_steps_ends_at_epsilon(sampling, monkeypatch):
    monkeypatch.setattr(explore_page, "POINTS", 2)
    run = Run("A", {"noise_multiplier": 2.0, **RUN_OF_RULE[sampling]}, sampling, 1e-5)
    table, epsilon = run.over_steps(), run.epsilon()
    assert table["steps"][0] == 1 and table["upper"][-1] == pytest.approx(float(epsilon.upper), rel=1e-9)
    assert set(table["relation"]) == {run.relation}


def test_a_link_holds_the_settings_of_three_runs(epsilon_alone):
    given = {
        "runs": "3",
        "delta": "1e-7",
        **link_of("poisson"),
        **link_of("random_allocation", "B"),
        **link_of("cyclic_poisson", "C"),
    }
    first = opened(given)
    link = {name: value[0] if isinstance(value, list) else value for name, value in first.query_params.items()}
    assert given.items() <= link.items() and set(link) - set(given) == {"A.group", "B.group", "C.group"}
    again = opened(link)
    assert [one.value for one in again.title] == [one.value for one in first.title]
    assert len({one.value for one in again.title}) == 3
    assert {one.key: one.value for one in again.text_input} == {one.key: one.value for one in first.text_input}


def test_a_slider_moves_its_number_and_a_number_its_slider(epsilon_alone):
    page = opened({"A.noise_multiplier": "1.2345"})
    slider = page.select_slider(key="A.noise_multiplier.slider")
    assert slider.value == 1.2345
    before = page.title[0].value
    slider.set_value(2.0).run()
    assert page.text_input(key="A.noise_multiplier").value == "2" and page.title[0].value != before
    assert "noise_multiplier=2," in page.code[0].value
    page.radio(key="runs").set_value("2").run()  # a new run begins as a copy
    assert page.title[0].value == page.title[1].value and page.text_input(key="B.noise_multiplier").value == "2"


@pytest.mark.parametrize(
    "link, words",
    [
        ({"A.noise_multiplier": "-1"}, "noise_multiplier = -1 must be > 0"),
        ({"A.noise_multiplier": "one"}, "noise_multiplier = 'one' must be a number"),
        pytest.param(
            {"A.noise_multiplier": "1,2"}, "noise_multiplier must be one number, not a list", marks=pytest.mark.slow
        ),
        pytest.param({"A.batch_size": "60000"}, "batch_size = 60000", marks=pytest.mark.slow),
        pytest.param({"delta": "2"}, "delta = 2", marks=pytest.mark.slow),
        ({"A.sampling": "truncated_poisson", "A.group": "2"}, "group = 2 is not known"),
        pytest.param({"A.colour": "red"}, "A.colour = 'red' in the link is no setting", marks=pytest.mark.slow),
        ({"A.sampling": "poison"}, "A.sampling = 'poison' is not known"),
        ({"runs": "4"}, "runs = '4'"),
    ],
)
def test_bad_input_is_one_line(link, words, epsilon_alone):
    page = opened(link)
    assert words in page.error[0].value and len(page.error) == 1 and "\n" not in page.error[0].value


def test_a_run_with_bad_input_does_not_hide_the_other(epsilon_alone):
    page = opened({"runs": "2", "A.noise_multiplier": "-1", "B.noise_multiplier": "2"})
    assert len(page.title) == 1 and page.error[0].value.startswith("run A: noise_multiplier = -1")


def test_a_defect_is_one_line_on_the_page_and_a_traceback_on_the_terminal(monkeypatch, capsys):
    def broken(run):
        raise RuntimeError("out of ink")

    monkeypatch.setattr(explore_page, "QUESTIONS", {"epsilon": broken})
    page = opened()
    assert [one.value for one in page.error] == ["run A: out of ink"] and not page.exception
    assert "Traceback" in capsys.readouterr().err


def test_a_question_is_interrupted_and_can_be_asked_again():
    work = Work(QUESTIONS["risks"], SLOW)
    work.start()
    time.sleep(0.3)
    work.stop()
    work.join(20.0)
    assert not work.is_alive() and isinstance(work.error, KeyboardInterrupt) and work.answer is None
    again = Work(QUESTIONS["epsilon"], SLOW)
    again.start()
    again.join()
    assert again.answer.upper == SLOW.epsilon().upper
    again.stop()  # stopping a thread that has ended does nothing
    assert threading.main_thread().is_alive()


def test_stop_leaves_what_is_known_and_go_on_asks_the_rest(epsilon_alone):
    page = AppTest.from_function(script, default_timeout=60)
    page.session_state["stopped"] = True
    page.run()
    assert page.info[0].value == "Stopped: 1 of 1 answers are not computed." and not page.title
    next(one for one in page.button if one.label == "Go on").click().run()
    assert not page.info and page.title[0].value.startswith("ε ≤ ")


def test_pictures_and_tables_of_three_runs(monkeypatch):
    monkeypatch.setattr(explore_page, "FPR", np.array([0.0, 0.1, 1.0]))
    monkeypatch.setattr(explore_page, "POINTS", 3)
    full = {"A.rate": "sampling_probability", "A.sampling_probability": "1", "A.length": "steps", "A.steps": "4"}
    page = opened({"runs": "3", **full, "C.noise_multiplier": "2"})
    assert not page.error and len(page.title) == 3
    assert {one.label for one in page.get("download_button")} == {
        f"{stem}.{ending}" for stem in ("epsilon_over_steps", "tradeoff", "risks") for ending in ("png", "csv")
    }
    assert [one.label for one in page.expander if "words" in one.label] == [f"risks of run {n} in words" for n in "ABC"]


def test_ports(monkeypatch):
    assert explore.ADDRESS == "127.0.0.1"
    with socket.socket() as taken:
        taken.bind((explore.ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port = {port} cannot be opened" in refusal(explore.free_port, port)
        monkeypatch.setattr(explore, "PORTS", range(port, port + 20))
        assert explore.free_port(None) > port
    for port in (0, 65_536, -1):
        assert "must be from 1 to 65535" in refusal(explore.free_port, port)


def test_the_names_of_runs_in_the_picture_of_risks():
    table = ja.risk(ja.Gaussian(np.array([1.0, 2.0])))
    assert "names has 1 entries" in refusal(ja.plot_risks, table, names=["A"])
    labels = [text.get_text() for text in ja.plot_risks(table, names=["run A", "run B"]).get_legend().get_texts()]
    assert labels[-2:] == ["run A", "run B"]
