"""Defines the options of each command, and parses command lines."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxacct import __version__

CONFIGURATION = {
    "noise_multiplier": "noise standard deviation relative to the clip norm",
    "sampling_probability": "probability of each record to be in a batch (cyclic_poisson: each record of one group)",
    "steps": "number of steps",
    "dataset_size": "number of records; with --batch-size it replaces --sampling-probability",
    "batch_size": "expected batch size; sampling probability = batch size / data-set size",
    "slots": "batches of a round (random_allocation) or an epoch (shuffled), in place of --sampling-probability",
    "epochs": "passes over the data, in place of --steps: steps = ceil(epochs / sampling probability)",
    "cap": "largest number of records of a batch (truncated_poisson)",
    "bands": "number of steps that share noise (cyclic_poisson)",
    "groups": "number of groups that take turns (cyclic_poisson; default: the bands)",
    "group": "records of one person, protected together (default 1)",
}
"""Options that describe the DP-SGD run, each with its help. Their names are the names in `dp_sgd_run.NUMBERS`."""
QUESTION = {
    "epsilon": {"delta": "delta of the guarantee"},
    "delta": {"epsilon": "epsilon of the guarantee"},
    "calibrate": {
        "target_epsilon": "epsilon to be met",
        "target_delta": "delta to be met",
        "advantage": "or this target: the largest TPR - FPR of a membership test",
        "tpr": "or this target: the largest true-positive rate, with --at-fpr",
        "bayes_success": "or this target: the largest probability of telling membership rightly, with --prior",
        "posterior": "or this target: the largest posterior after a positive test, with --prior and --at-fpr",
        "reconstruction": "or this target: the largest success of a reconstruction, with --baseline",
        "mu": "or this target: mu of Gaussian DP, wherever both error rates are at least --above-fpr",
        "at_fpr": "false-positive rate of --tpr or --posterior",
        "prior": "prior probability of membership, of --bayes-success or --posterior",
        "baseline": "success of a reconstruction without output",
        "above_fpr": "floor of the error rates for --mu (default 1e-10)",
    },
    "advise": {"target_epsilon": "epsilon to be met", "target_delta": "delta to be met"},
    "risk": {
        "fpr": "false-positive rates (default 0.01 0.001)",
        "prior": "prior probabilities of membership (default 0.5)",
        "baseline": "successes of a reconstruction without output (default 0.01)",
        "above_fpr": "floor of the error rates for mu of Gaussian DP, part of the claim (default 1e-10)",
    },
    "select": {
        "delta": "delta of the guarantee",
        "gamma": "gamma of geometric, logarithmic and truncated_negative_binomial; less means more runs",
        "eta": "shape of truncated_negative_binomial (1 is geometric, 0 logarithmic)",
        "mean": "mean number of runs of poisson",
        "trials": "largest number of runs of binomial",
        "probability_of_run": "probability of binomial that a trial is run",
        "count": "number of runs of point_mass",
    },
    "ledger": {"delta": "delta of the guarantee (default: that of the last plan)"},
    "report": {
        "delta": "of a ledger: delta of the guarantee (default: that of the last plan); a mechanism needs one",
        "prior": "probability from which an attacker starts (default 0.5)",
    },
    "verify": {
        "delta": "of a ledger: delta of the guarantee (default: that of the last plan)",
        "seconds": "time limit of each row (default 60)",
    },
}
"""Numeric options of each command, each with its help. `CONFIGURATION` has the options that describe the DP-SGD run."""
WHOLE_NUMBERS = ("block", "process_id", "process_count", "port")
"""Options that take one whole number."""
SINGLE = {"risk": ("above_fpr",), "ledger": ("delta",), "report": ("delta", "prior"), "verify": ("delta", "seconds")}
"""For each command, the options that take a single number and no list."""
REQUIRED = {
    "advise": {
        name: f"{name} is missing; give --{name.replace('_', '-')}"
        for name in ("target_epsilon", "target_delta", "dataset_size", "batch_size")
    },
    "sweep": {"grid": "GRID is missing; give a .toml or .csv file"},
    "merge": {"out": "--out is missing; name the result, such as --out result.csv"},
    "plot": {
        "result": "RESULT is missing; give the .csv or .parquet of a sweep",
        "out": "--out is missing; name the picture, such as --out figure.png",
    },
    "ledger": {
        "action": "ACTION is missing; use one of show, as in jaxacct ledger show LEDGER",
        "ledger": "LEDGER is missing; name the file, as in jaxacct ledger show run.jsonl",
    },
    "report": {
        "file": "FILE is missing; give a ledger, the .csv or .parquet of a sweep, or a plan as JSON",
        "out": "--out is missing; name the page, such as --out report.html",
    },
    "verify": {"result": "FILE is missing; give the .csv or .parquet of a sweep, or the ledger of a training run"},
}
"""Options that a command cannot do without, each with the error message."""

Option = tuple[str, dict[str, Any]]
"""A flag or name, and the keyword arguments with which argparse's `add_argument` is called."""


class Command(NamedTuple):
    """A command of the command line. `jaxacct --help` shows the first sentence of the command's `description`."""

    description: str
    example: str
    options: tuple[Option, ...]


def _option(name: str, text: str, metavar: str = "X", **more: Any) -> Option:
    return f"--{name.replace('_', '-')}", {"metavar": metavar, "help": text, **more}


def _switch(name: str, text: str, **more: Any) -> Option:
    return f"--{name.replace('_', '-')}", {"action": "store_true", "help": text, **more}


def _word(name: str, text: str, nargs: str = "?", metavar: str = "") -> Option:
    """Return a positional argument."""
    return name, {"metavar": metavar or name.upper(), "nargs": nargs, "help": text}


def _numbers(names: Mapping[str, str], **more: Any) -> list[Option]:
    return [_option(name, text, **more) for name, text in names.items()]


RELATIONS = "add_or_remove_one (default; zero_out for shuffled), add_one, remove_one, replace_one or zero_out"
_MECHANISM = _option(
    "mechanism",
    'any mechanism, instead of the options that describe DP-SGD: the expression, such as "repeat(Laplace(10.0), 5)", '
    "or its JSON",
    "M",
)
_SAMPLING = _option(
    "sampling",
    "how batches are drawn: poisson (default), random_allocation (each record once in every 1/q steps), "
    "truncated_poisson (with --cap and --dataset-size), without_replacement, with_replacement (with --batch-size and "
    "--dataset-size), cyclic_poisson (banded noise and Poisson samples of groups that take turns, with --bands) or "
    "shuffled (fixed batches in a random order, as most loaders draw them; relation zero_out)",
    "S",
    default="poisson",
)
_ACCURACY = (
    _option("relation", RELATIONS, "R"),
    _option("engine", "auto (default), contour or lattice", "E", default="auto"),
    _option("rtol", "wanted relative width (default 1e-4)", default="1e-4"),
    _option("backend", "auto (default), numpy (compiles nothing) or xla (for very many rows)", "B", default="auto"),
)
_WITHOUT_ENGINE = (_ACCURACY[0], *_ACCURACY[2:])
_VERIFY = _switch(
    "verify",
    "check the bracket by a second program, in ball arithmetic (needs python-flint: pip install 'jaxacct[verify]'); "
    "exit status 3 where it is refuted, 4 where it is undecided",
)
_RESULT = "the result, .csv or .parquet (needs pyarrow)"


COMMANDS = {
    "epsilon": Command(
        "Certified epsilon of DP-SGD, or of any --mechanism, at a given delta.",
        "jaxacct epsilon --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5",
        (_MECHANISM, *_numbers(CONFIGURATION | QUESTION["epsilon"]), _SAMPLING, *_ACCURACY, _VERIFY),
    ),
    "delta": Command(
        "Certified delta of DP-SGD, or of any --mechanism, at a given epsilon.",
        "jaxacct delta --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --epsilon 2",
        (_MECHANISM, *_numbers(CONFIGURATION | QUESTION["delta"]), _SAMPLING, *_ACCURACY, _VERIFY),
    ),
    "calibrate": Command(
        "Solve for whichever of --noise-multiplier, --steps and --sampling-probability is left out, "
        "so that DP-SGD meets (target epsilon, target delta), or keeps a risk such as --advantage. "
        "Exit status 1 where that is infeasible.",
        "jaxacct calibrate --target-epsilon 2 --target-delta 1e-5 --sampling-probability 0.01 --steps 10000",
        (*_numbers(CONFIGURATION | QUESTION["calibrate"]), _SAMPLING, *_WITHOUT_ENGINE, _VERIFY),
    ),
    "advise": Command(
        "Which correlated noise has the least error at a budget and a batch size: DP-SGD, banded noise with cyclic "
        "Poisson sampling, and buffered noise without sampling. Exit status 1 where none meets the budget.",
        "jaxacct advise --target-epsilon 2 --target-delta 1e-5 --dataset-size 60000 --batch-size 600 --epochs 10",
        (
            *_numbers(QUESTION["advise"]),
            *_numbers({"dataset_size": "number of records", "batch_size": "expected number of records of a step"}),
            *_numbers({"epochs": "passes over the data", "steps": "instead of --epochs"}),
            _option("bands", "numbers of bands (default: 2 4 8 16 32, and a pass of at most 64 steps)", nargs="+"),
            _ACCURACY[0],
            _option("out", "also write the table, .csv, or a picture, .png, .svg or .pdf (needs matplotlib)", "FILE"),
        ),
    ),
    "risk": Command(
        "What the best attack on DP-SGD achieves: advantage, true-positive rates, posterior, Bayes success, "
        "reconstruction, and mu of Gaussian DP above a floor, each as a certified bracket.",
        "jaxacct risk --noise-multiplier 1 --sampling-probability 0.01 --steps 1000 --fpr 0.01 0.001 --prior 0.1",
        (*_numbers(CONFIGURATION), _SAMPLING, *_numbers(QUESTION["risk"], nargs="+"), *_WITHOUT_ENGINE),
    ),
    "select": Command(
        "Epsilon of private selection at a given delta: DP-SGD is run K times, K random and secret, and the best "
        "candidate is released. It is the worst case over all scores, or a published bound. The cost of a single run "
        "stands beside it.",
        "jaxacct select --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5 "
        "--repetitions geometric --gamma 0.1",
        (
            *_numbers(CONFIGURATION | QUESTION["select"]),
            _SAMPLING,
            _option(
                "repetitions",
                "law of K: geometric, logarithmic, truncated_negative_binomial, poisson, binomial or point_mass",
                "LAW",
            ),
            _option(
                "bound",
                "worst_case (default), or envelope, privacy_profile, renyi, auto (the smallest of these three), or "
                "monotone_score (true only for scores that are monotone in the likelihood ratio)",
                "B",
                default="worst_case",
            ),
            _option(
                "candidates",
                "iid (default: each drawn afresh from one law), or adaptive (each may depend on the outputs before)",
                "C",
                default="iid",
            ),
            _option("top", "release the best J candidates (default 1)", "J", type=int, default=1),
            _ACCURACY[0],
        ),
    ),
    "sweep": Command(
        "Solve every configuration of a grid: TOML blocks of lists and ranges, or a CSV with one "
        "configuration per row. What a configuration leaves out is solved for. Solved rows are kept in RESULT.journal "
        "until the result is complete, and outlive Ctrl-C and SIGTERM. Exit status 1 if a row has failed.",
        "jaxacct sweep examples/dpsgd_grid.toml --out result.csv",
        (
            _word("grid", "the grid, .toml or .csv"),
            _option("out", _RESULT, "RESULT"),
            _switch("dry_run", "show the plan and an estimate of the time, from a sample, and solve nothing else"),
            _switch("resume", "go on from the journal of an interrupted run, if there is one, with its blocks"),
            _switch("overwrite", "discard such a journal, and replace a RESULT that is there already"),
            _switch("distributed", "one of several processes under jax.distributed, each of which solves a slice"),
            _option("shard", "solve slice I of N into RESULT.I-of-N.part, for jaxacct merge", "I/N"),
            _option("block", "rows solved between two writes (default: 512 to 4096, more for a larger grid)", "ROWS"),
            _option("coordinator", "with --distributed: address of process 0 (default: the cluster's)", "HOST:PORT"),
            _option("process_id", "with --distributed: number of this process, from 0 (default: the cluster's)", "I"),
            _option("process_count", "with --distributed: number of processes (default: the cluster's)", "N"),
            _switch("progress", "show progress in a pipe too", default=None),
            ("--no-progress", {"dest": "progress", "action": "store_false", "help": "show no progress"}),
            *_ACCURACY,
        ),
    ),
    "merge": Command(
        "Merge the parts that sweep --shard 1/n to n/n has written into one result, the same to the last byte as "
        "that of one process.",
        "jaxacct merge result.csv.1-of-2.part result.csv.2-of-2.part --out result.csv",
        (
            _word("parts", "the part files of all slices", "*", "PART"),
            _option("out", _RESULT, "RESULT"),
            _switch("overwrite", "replace a RESULT that is there already"),
        ),
    ),
    "plot": Command(
        "Draw the result of a sweep: a value against an input with its bracket as a band, a heat map over two inputs, "
        "or the privacy profiles or trade-off curves of some rows. What is not asked for is chosen by the data.",
        "jaxacct plot result.csv --out figure.pdf --x target_epsilon --by epochs",
        (
            _word("result", "the result of a sweep, .csv or .parquet"),
            _option("out", "the picture, .png, .svg or .pdf (needs matplotlib)", "FIGURE"),
            _option("kind", "curve, heatmap, profile or tradeoff", "K"),
            _option("x", "input along the horizontal axis", "FIELD"),
            _option("by", "input with one curve per value; in a heat map the vertical axis", "FIELD"),
            _option("value", "column that is drawn (default: what was solved for)", "COLUMN"),
            _option("where", "only the rows with these values", "FIELD=VALUE,..."),
            _option(
                "rows",
                "rows for profiles and trade-off curves, from 0 among those of --where (default: up to six, evenly "
                "spread)",
                "I,J,...",
            ),
        ),
    ),
    "ledger": Command(
        "What a training run has spent, from its ledger: who ran it, its steps with their noise and rates, "
        "steps that were run again and count twice, and the certified epsilon of each run and of all.",
        "jaxacct ledger show run.jsonl --delta 1e-6",
        (_word("action", "show"), _word("ledger", "the ledger of a training run"), *_numbers(QUESTION["ledger"])),
    ),
    "report": Command(
        "Write one page on a privacy claim, for somebody who must sign it: the claim in words, its assumptions, the "
        "risks with a picture, every mechanism, and how to verify it. Exit status 1 where a row or the whole is not to "
        "be claimed.",
        "jaxacct report run.jsonl --out report.html",
        (
            _word("file", "a ledger, the result of a sweep, or a plan as JSON"),
            _option("out", "the page, .html or .md", "PAGE"),
            _option("rows", "rows of a result that are shown in detail, from 0 (default: the first 3)", "I,J,..."),
            *_numbers(QUESTION["report"]),
            _option("relation", f"of a mechanism: {RELATIONS}", "R"),
            _option("model", "what the page is about, shown at its top", "TEXT"),
            _option("organisation", "who releases it", "TEXT"),
            _option("contact", "whom to ask about it", "TEXT"),
        ),
    ),
    "verify": Command(
        "Check the brackets of a sweep's result, or the epsilon of a ledger, by a second program: ball "
        "arithmetic on the definition of the privacy loss. Exit status 3 where a bracket is refuted, 4 where one is "
        "undecided. Needs python-flint: pip install 'jaxacct[verify]'.",
        "jaxacct verify result.csv",
        (
            _word("result", "the result of a sweep, .csv or .parquet, or a ledger", metavar="FILE"),
            *_numbers(QUESTION["verify"]),
        ),
    ),
    "explore": Command(
        "Open a page in the browser, for this machine alone: sliders for up to three runs of DP-SGD, with certified "
        "epsilon, trade-off curve, epsilon over steps and risks. Needs streamlit: pip install 'jaxacct[explore]'.",
        "jaxacct explore",
        (
            _option("port", "port of the page (default: the first free one from 8501)", "N"),
            _switch("no_browser", "open no browser"),
        ),
    ),
    "warm": Command(
        "Compile the programs of sweeps or of training ahead, and keep them on the disk for every later process. "
        "Without it the first call that needs a program compiles it.",
        "jaxacct warm --for sweep",
        (_option("for", "sweep, training or all (default)", "P", default="all"),),
    ),
}
"""The commands, in the order of the help."""


class UsageError(Exception):
    """The command line was refused; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. A numeric option becomes a number or a list of numbers, or None if it is left out."""
    options, unknown = _parser().parse_known_args(_attach_negatives(arguments))
    if options.command is None:
        raise UsageError(f"give a command: {', '.join(COMMANDS)}; see jaxacct --help")
    if unknown:
        raise UsageError(_unknown(options, unknown[0]))
    for name in (*CONFIGURATION, *QUESTION.get(options.command, {}), "rtol", *WHOLE_NUMBERS):
        text = getattr(options, name, None)
        if text is not None:
            one = name in ("rtol", *WHOLE_NUMBERS, *SINGLE.get(options.command, ()))
            setattr(options, name, number(name, ",".join(text) if isinstance(text, list) else text, one))
    for name, advice in REQUIRED.get(options.command, {}).items():
        if getattr(options, name) is None:
            raise UsageError(advice)
    for name in ("rtol", *WHOLE_NUMBERS, *SINGLE.get(options.command, ())):
        value = getattr(options, name, None)
        if isinstance(value, list):
            raise UsageError(f"{name} must be one number, not a list")
        if name in WHOLE_NUMBERS and isinstance(value, float):
            raise UsageError(f"{name} = {value!r} must be a whole number")
    return options


def number(name: str, text: str, one: bool = False) -> float | int | list[float | int]:
    """Parse a number, or a list of numbers with commas between. Whole numbers without point or exponent become int."""
    wanted = f"{'whole ' * (name in WHOLE_NUMBERS)}number{'' if one else ', or several with commas between'}"
    words = [word.strip() for word in text.split(",")]
    values: list[float | int] = []
    for index, word in enumerate(words):
        try:
            values.append(int(word) if re.fullmatch(r"[+-]?[0-9]{1,300}", word) else float(word))
        except ValueError:
            place = f"{name}[{index}]" if len(words) > 1 else name
            raise UsageError(f"{place} = {word!r} must be a {wanted}") from None
    return values if len(values) > 1 else values[0]


@functools.cache  # building the parser takes longer than running most commands
def _parser() -> _Parser:
    parser = _Parser(
        prog="jaxacct",
        description="Certified privacy accounting: epsilon, delta and calibrated noise of DP-SGD.",
        epilog="Numeric options take lists with commas: --noise-multiplier 0.8,1.0,1.2 answers for three.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxacct {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.description.split(".")[0],
            description=command.description,
            epilog=f"example: {command.example}",
            allow_abbrev=False,
        )
        for flag, settings in (*command.options, _switch("json", "print one JSON object")):
            sub.add_argument(flag, **settings)
    return parser


def _attach_negatives(arguments: Sequence[str]) -> list[str]:
    """Join `--steps -1e3` into one word, `--steps=-1e3`; otherwise argparse would take the number for an option."""
    joined: list[str] = []
    for word in arguments:
        if re.match(r"-([0-9.]|inf|nan)", word) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _unknown(options: argparse.Namespace, word: str) -> str:
    if re.match(r"[0-9.]", word):
        return f"unexpected {word!r}; several numbers have commas between, such as 4,16"
    if not word.startswith("-"):
        return f"unexpected {word!r}; see jaxacct {options.command} --help"
    known = [flag for flag, _ in COMMANDS[options.command].options if flag.startswith("--")]
    given = word.split("=")[0]
    near = difflib.get_close_matches(given, [*known, "--json"], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"see jaxacct {options.command} --help"
    return f"unknown option {given}; {hint}"
