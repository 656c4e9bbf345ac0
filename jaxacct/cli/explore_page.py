"""The page of `jaxacct explore`: it takes up to three runs of DP-SGD, and shows jaxacct's answers about these runs."""

from __future__ import annotations

import ctypes
import io
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import streamlit as st

from jaxacct.accounting import account
from jaxacct.cli.arguments import UsageError, number
from jaxacct.core.bounds import Bounds, explain
from jaxacct.core.text import bracket, outward
from jaxacct.core.validation import InputError, choice
from jaxacct.mechanisms import dp_sgd
from jaxacct.mechanisms.dp_sgd_run import (
    LENGTHS,
    NUMBERS,
    RATES,
    RULES,
    SAMPLING,
    described,
    numbers_of_rule,
    usual_relation,
)
from jaxacct.plots import plot_risks, style
from jaxacct.plots.results import View, draw_curves
from jaxacct.plots.side_by_side import Curve, draw_tradeoffs
from jaxacct.representations.mechanism_profile import Profile, profile
from jaxacct.representations.risk_table import Reading, RiskTable, risk
from jaxacct.sweeps import Table, sweep

RUNS = ("A", "B", "C")
SLIDERS = {
    "noise_multiplier": (0.3, 30.0, "1.0"),
    "sampling_probability": (1e-5, 1.0, "0.005"),
    "batch_size": (1, 100_000, "256"),
    "slots": (1, 10_000, "200"),
    "dataset_size": (100, 100_000_000, "50000"),
    "epochs": (1, 1000, "10"),
    "steps": (1, 1_000_000, "2000"),
    "cap": (1, 100_000, "400"),
    "bands": (1, 1000, "4"),
    "groups": (1, 1000, "8"),
    "group": (1, 100, "1"),
    "delta": (1e-12, 0.01, "1e-5"),
}
"""Each number's lowest and highest value on its slider, and its initial value. The text box takes any number."""
FIRST = {name: first for name, (_, _, first) in SLIDERS.items()}
FIRST |= {"runs": "1", "sampling": "poisson", "rate": "batch_size", "length": "epochs"}
"""The initial value of every setting."""
CHOICES = {"sampling": SAMPLING, "rate": RATES, "length": LENGTHS}
"""Lists from which the user chooses: the batch rule, and the numbers that set the batch size and the length."""
LABELS = {
    "delta": "$\\delta$ of the guarantee",
    "sampling": "batch rule",
    "rate": "batches given by",
    "length": "length given by",
}
"""Labels of some settings. All other labels are in `style.MEANING`."""
POINTS = 25
"""Number of points of the curve of epsilon over the steps."""
FPR = np.unique(np.concatenate([[1e-4, 1e-3, 0.003, 0.01, 0.03], np.linspace(0.0, 1.0, 21)]))
"""False positive rates at which a trade-off curve is computed."""
TICK, PATIENCE = 0.05, 0.4
"""The page checks for an answer every TICK seconds. It shows progress after PATIENCE seconds."""
PARTS = ("lower", "estimate", "upper", "kind", "status", "engine")
"""The fields of `Bounds`, in the order of its arguments."""
KEPT = 200
"""Largest number of answers that a session keeps."""


class Run(NamedTuple):
    """A DP-SGD run, and the delta at which questions about it are asked."""

    name: str
    numbers: dict[str, Any]
    sampling: str
    delta: Any

    @property
    def relation(self) -> str:
        return usual_relation(self.sampling)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `dp_sgd`; `sampling` is left out if it is "poisson"."""
        return self.numbers | ({} if self.sampling == SAMPLING[0] else {"sampling": self.sampling})

    def python(self) -> str:
        """Return Python code that computes the epsilon of this run."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        relation = "" if self.relation == usual_relation(SAMPLING[0]) else f", relation={self.relation!r}"
        return f"import jaxacct as ja\n\nrun = ja.dp_sgd({given})\nja.epsilon(run, delta={self.delta!r}{relation})"

    def command(self) -> str:
        """Return the shell command that computes the epsilon of this run."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in (self.given | {"delta": self.delta}).items()]
        return " ".join(["jaxacct epsilon", *words])

    def epsilon(self) -> Bounds:
        return account.epsilon(dp_sgd(**self.given), self.delta, relation=self.relation)

    def over_steps(self) -> Table:
        """Return a table of epsilon after the first step, after some steps in between, and after the last step."""
        group = self.numbers.get("group", 1)
        fields = described({n: x for n, x in self.numbers.items() if n != "group"}, self.sampling, group)
        whole = numbers_of_rule(self.sampling, fields, group)
        steps = np.unique(np.rint(np.geomspace(1.0, whole["steps"], POINTS)))
        rest = {name: value for name, value in self.given.items() if name in ("sampling", "group")}
        return sweep(whole | rest | {"steps": steps, "delta": self.delta}, progress=False)

    def tradeoff(self) -> Bounds:
        """Return the trade-off curve: a bracket of the false-negative rate at each false-positive rate in FPR."""
        return profile(dp_sgd(**self.given), self.relation).tradeoff(FPR)

    def risks(self) -> RiskTable:
        return risk(dp_sgd(**self.given), relation=self.relation)


QUESTIONS: dict[str, Callable[[Run], Any]] = {
    "epsilon": Run.epsilon,
    "epsilon over the steps": Run.over_steps,
    "trade-off curve": Run.tradeoff,
    "risks": Run.risks,
}
"""The questions about a run, in the order of the page, each with the method that answers it."""


class Work(threading.Thread):
    """A thread that answers one question, while the page shows progress. `stop` interrupts it as Ctrl-C does."""

    def __init__(self, question: Callable[[Run], Any], run: Run) -> None:
        super().__init__(daemon=True)
        self.question, self.of = question, run
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call `question`. Keep the result in `answer`, or the exception that the call raises in `error`."""
        try:
            self.answer = self.question(self.of)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """Raise KeyboardInterrupt in the thread if it is still at work."""
        if self.is_alive():
            thread, interrupt = ctypes.c_ulong(self.ident or 0), ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, interrupt)


class Stopped(Exception):
    """A question was not asked, because the user has pressed Stop."""


class Desk:
    """Asks the page's questions. It shows how many are answered, and a button that skips the open questions."""

    def __init__(self, slot: Any, total: int) -> None:
        self.slot, self.total, self.done, self.open = slot, total, 0, 0
        self.stopped = st.session_state.pop("stopped", False)
        self.bar: Any = None
        self.said = ""

    def ask(self, words: str, run: Run) -> Any:
        """Return the answer to a question about a run. After Stop, raise Stopped if the answer is not known yet."""
        kept, key = st.session_state.setdefault("answers", {}), (words, repr(run[1:]))
        if key not in kept:
            if self.stopped:
                self.open += 1
                raise Stopped
            kept[key] = self.answer(words, run)
            while len(kept) > KEPT:
                del kept[next(iter(kept))]
        self.done += 1
        return kept[key]

    def answer(self, words: str, run: Run) -> Any:
        """Return the answer to a question about a run, and show progress until it is there."""
        work, begin = Work(QUESTIONS[words], run), time.monotonic()
        work.start()
        try:
            while work.is_alive():
                work.join(TICK)
                st.session_state.get("stopped")  # raises an exception of streamlit if the user has changed anything
                seconds = time.monotonic() - begin
                if work.is_alive() and seconds > PATIENCE:
                    self.say(f"{words} of run {run.name}, {seconds:.0f} s")
        finally:
            work.stop()
        if work.error is not None:
            raise work.error
        return work.answer

    def say(self, words: str) -> None:
        """Show what is being computed, and a button Stop. Drawing is slow, so the same words are drawn only once."""
        if words == self.said:
            return
        self.said = words
        if self.bar is None:
            with self.slot.container(horizontal=True, vertical_alignment="center"):
                self.bar = st.empty()
                st.button("Stop", on_click=lambda: st.session_state.update(stopped=True))
        self.bar.progress(self.done / self.total, f"Computing: {words} ({self.done} of {self.total} answers are there)")

    def close(self) -> None:
        """Remove the progress bar; after Stop, show a button that resumes the work."""
        self.slot.empty()
        if self.open:
            with self.slot.container(horizontal=True, vertical_alignment="center"):
                st.info(f"Stopped: {self.open} of {self.total} answers are not computed.")
                st.button("Go on")


def page() -> None:
    """Show the page for the settings of the session; streamlit calls this after every change."""
    st.set_page_config("jaxacct explore", layout="wide")
    if "runs" not in st.session_state:
        restore()
    with st.sidebar:
        st.radio("runs side by side", [str(1 + i) for i in range(len(RUNS))], horizontal=True, key="runs")
        names = RUNS[: int(st.session_state.runs)]
        box("delta")
        words_of = {}
        for name, tab in zip(names, st.tabs([f"run {name}" for name in names]), strict=True):
            with tab:
                words_of[name] = inputs(name)
    st.subheader("How private is DP-SGD?")
    runs: dict[str, Run] = {}
    columns = dict(zip(names, st.columns(len(names)), strict=True))
    tops = {name: column.empty() for name, column in columns.items()}
    slot, (left, right) = st.empty(), st.columns([3, 2])
    places = {"epsilon over the steps": left.empty(), "trade-off curve": right.empty(), "risks": st.empty()}
    link(["runs", "delta", *(f"{name}.{word}" for name in names for word in (*CHOICES, *words_of[name]))])
    for name in names:
        try:
            runs[name] = read(name, words_of[name])
        except (InputError, UsageError) as error:
            columns[name].error(f"run {name}: {error}")
    desk = Desk(slot, max(1, len(runs) * len(QUESTIONS)))
    for words in QUESTIONS:
        answers = []
        for name, run in list(runs.items()):
            try:
                answers.append((run, desk.ask(words, run)))
            except Stopped:
                continue
            except Exception as error:
                if not isinstance(error, InputError):
                    traceback.print_exc()
                columns[name].error(f"run {name}: {error}")
                del runs[name]
                continue
            if words == "epsilon":
                with tops[name].container():
                    show_epsilon(*answers[-1])
        if answers and words in places:
            with places[words].container(), style.settings():
                SHOW[words](answers)
    desk.close()


def restore() -> None:
    """Copy the settings in the page's address into the session. Show an error for each invalid one."""
    st.session_state.update(runs=FIRST["runs"], delta=FIRST["delta"])
    for key, text in st.query_params.items():
        run, _, name = key.rpartition(".")
        try:
            if key == "runs":
                choice(key, text, [str(1 + i) for i in range(len(RUNS))])
            elif run in RUNS and name in CHOICES:
                choice(key, text, CHOICES[name])
            elif key != "delta" and not (run in RUNS and name in NUMBERS):
                raise InputError(f"{key} = {text!r} in the link is no setting of this page; leave it out")
            st.session_state[key] = text
        except InputError as error:
            st.error(str(error))


def link(keys: Iterable[str]) -> None:
    """Write the settings into the address of the page, and show this address."""
    given = {key: st.session_state[key] for key in keys}
    st.query_params.from_dict(given)
    with st.expander("link that holds these settings"):
        st.code(f"{(st.context.url or '').partition('?')[0]}?{urlencode(given)}", language=None, wrap_lines=True)


def inputs(run: str) -> list[str]:
    """Show the inputs of a run: lists of choices, and the numbers that the choices need. Return the numbers' names."""
    rule = RULES[pick(run, "sampling", SAMPLING)]
    known = [name for name in RATES if rule.knows(name)]
    rate = pick(run, "rate", [name for name in known if name in rule.needs()] or known)
    wanted = {"noise_multiplier", "group", rate, pick(run, "length", LENGTHS), *rule.needs(group=2)}
    wanted |= {"dataset_size"} if rate == "batch_size" else set()
    wanted |= {"groups"} if rule.in_turns else set()
    names = [name for name in SLIDERS if name in wanted]
    for name in names:
        box(f"{run}.{name}")
    return names


def initial(key: str) -> str:
    """Return the first value of a setting. A new run begins as a copy of the run before it."""
    run, _, name = key.rpartition(".")
    before = RUNS[max(RUNS.index(run) - 1, 0)] if run else ""
    return str(st.session_state.get(f"{before}.{name}", FIRST[name]))


def pick(run: str, name: str, options: Sequence[str]) -> str:
    """Show a list to choose from, and return the choice."""
    key = f"{run}.{name}"
    if st.session_state.setdefault(key, initial(key)) not in options:
        st.session_state[key] = options[0]
    return str(st.selectbox(LABELS[name], options, key=key, format_func=lambda word: word.replace("_", " ")))


def box(key: str) -> None:
    """Show the inputs of one number: a box that takes any number, and a slider that writes into the box."""
    state, name, slider = st.session_state, key.rpartition(".")[2], f"{key}.slider"
    low, high, _ = SLIDERS[name]
    st.markdown(LABELS.get(name) or style.MEANING[name])
    left, right = st.columns([3, 2])
    state.setdefault(key, initial(key))
    right.text_input(name.replace("_", " "), key=key, label_visibility="collapsed")
    try:
        value = float(number(name, state[key]))  # type: ignore[arg-type]  # a list raises TypeError
    except (UsageError, TypeError, OverflowError):
        value = math.nan
    if math.isfinite(value):
        state[slider] = value

    def move() -> None:
        state[key] = f"{state[slider]:.12g}"

    places = np.geomspace(low, high, 150)
    notches = {float(f"{place:.2g}") if low < 1 else float(f"{round(place):.2g}") for place in places}
    options, say = sorted({*notches, state.get(slider, float(low))}), lambda x: f"{x:,.12g}"
    label = f"{name.replace('_', ' ')}, slider"
    left.select_slider(label, options, key=slider, on_change=move, format_func=say, label_visibility="collapsed")


def read(name: str, words: Sequence[str]) -> Run:
    """Return the run called `name` from its inputs on the page. Refuse an input that is not one number."""
    texts = {word: st.session_state[f"{name}.{word}"] for word in words} | {"delta": st.session_state.delta}
    numbers = {word: number(word, text) for word, text in texts.items()}
    for word, value in numbers.items():
        if isinstance(value, list):
            raise InputError(f"{word} must be one number, not a list")
    delta = numbers.pop("delta")
    if numbers["group"] == 1:
        del numbers["group"]
    return Run(name, numbers, st.session_state[f"{name}.sampling"], delta)


def show_epsilon(run: Run, epsilon: Bounds) -> None:
    """Show a certified epsilon, what it means, and the Python code and the command that give it."""
    st.markdown(f"run {run.name}, δ = {run.delta!r}")
    st.title(f"ε ≤ {outward(epsilon.upper, '.5g', up=True)}", anchor=False)
    ends = bracket(epsilon.lower, epsilon.upper, ".8g")
    st.markdown(f"in {ends}, **{epsilon.kind}** ({epsilon.status}): {style.RELATION[run.relation]}")
    st.caption(explain(epsilon.status, epsilon.kind))
    with st.expander("the same in Python, and as a command"):
        st.code(run.python(), wrap_lines=True)
        st.code(run.command(), language="bash", wrap_lines=True)


def show_steps(answers: list[tuple[Run, Table]]) -> None:
    """Draw each run's epsilon against the number of steps."""
    tables = [table.beside({"name": np.full(len(table), f"run {run.name}", object)}) for run, table in answers]
    shared = [name for name in tables[0].columns if all(name in table.columns for table in tables)]
    table = Table({name: np.concatenate([each[name] for each in tables]) for name in shared})
    canvas, axes = style.figure(square=False)
    draw_curves(View(table, "epsilon", "epsilon", "steps", "name", {}), canvas, axes)
    take_away("epsilon_over_steps", canvas, table.to_pandas())


def show_tradeoffs(answers: list[tuple[Run, Bounds]]) -> None:
    known = [SimpleNamespace(tradeoff=lambda fpr, found=found: found) for _, found in answers]
    curves = [Curve(f"run {run.name}", cast(Profile, of)) for (run, _), of in zip(answers, known, strict=True)]
    canvas, axes = style.figure(square=True)
    draw_tradeoffs(axes, curves, FPR, relations(answers))
    frames = [pd.DataFrame({"fpr": FPR} | {part: getattr(found, part) for part in PARTS}) for _, found in answers]
    take_away("tradeoff", canvas, named(answers, frames))


def show_risks(answers: list[tuple[Run, RiskTable]]) -> None:
    """Draw the risks of the runs as bars, and say them in words."""
    left, right = st.columns([3, 2])
    names = [f"run {run.name}" for run, _ in answers]
    side_by_side = []
    for row in zip(*(table.readings for _, table in answers), strict=True):
        parts = (np.array([getattr(one.bounds, part) for one in row]) for part in PARTS)
        side_by_side.append(Reading(row[0].name, row[0].at, Bounds(*parts)))
    with left:
        canvas, axes = style.figure(square=False)
        plot_risks(RiskTable(tuple(side_by_side), answers[0][0].relation), names=names, axes=axes)
        style.title(axes, "what the best attack achieves: upper ends", relations(answers))
        take_away("risks", canvas, named(answers, [table.to_pandas() for _, table in answers]))
    for run, table in answers:
        with right.expander(f"risks of run {run.name} in words", expanded=len(answers) == 1):
            st.markdown("\n".join(f"* {sentence}" for sentence in table.explain()))


def relations(answers: list[tuple[Run, Any]]) -> str:
    """Return the runs' neighbouring relation in words. If the runs have several, write one line for each."""
    found: dict[str, list[str]] = {}
    for run, _ in answers:
        found.setdefault(style.RELATION[run.relation], []).append(run.name)
    if len(found) == 1:
        return next(iter(found))
    return "\n".join(f"{', '.join(names)}: {words}" for words, names in found.items())


def named(answers: list[tuple[Run, Any]], frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of the runs as one table, with the name of the run in the first column."""
    return pd.concat(frames, keys=[run.name for run, _ in answers], names=["run", None]).reset_index("run")


def take_away(stem: str, canvas: Any, frame: pd.DataFrame) -> None:
    """Show a picture, with buttons that save the picture and its numbers."""
    picture = io.BytesIO()
    canvas.savefig(picture, format="png", dpi=200)
    st.image(picture.getvalue(), width="stretch", alt=stem.replace("_", " "))
    with st.container(horizontal=True):
        st.download_button(f"{stem}.png", picture.getvalue(), f"{stem}.png", "image/png", on_click="ignore")
        st.download_button(f"{stem}.csv", frame.to_csv(index=False), f"{stem}.csv", "text/csv", on_click="ignore")


SHOW: dict[str, Callable[[Any], None]]
SHOW = {"epsilon over the steps": show_steps, "trade-off curve": show_tradeoffs, "risks": show_risks}
"""For each question but "epsilon", the function that draws the answers. `show_epsilon` draws an epsilon."""


def first_answer() -> None:
    """Compute the answer for the first settings, so that the first visitor does not wait for slow imports."""
    words = ("noise_multiplier", "batch_size", "dataset_size", "epochs")
    Run(RUNS[0], {word: number(word, FIRST[word]) for word in words}, SAMPLING[0], float(FIRST["delta"])).epsilon()
