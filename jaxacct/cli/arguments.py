"""The options of each command, and the numbers in them."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from jaxacct import __version__

COMMANDS = (
    "epsilon",
    "delta",
    "calibrate",
    "risk",
    "select",
    "sweep",
    "merge",
    "plot",
    "ledger",
    "report",
    "verify",
    "warm",
)
"""The commands, in the order in which the help lists them."""
CONFIGURATION = {
    "noise_multiplier": "noise standard deviation relative to the clip norm",
    "sampling_probability": "probability of each record to be in the batch of a step",
    "steps": "number of steps",
    "dataset_size": "with --batch-size, instead of --sampling-probability",
    "batch_size": "expected batch size; sampling probability = batch size / data-set size",
    "slots": "of random_allocation and shuffled, instead of either: batches of a round or an epoch",
    "epochs": "instead of --steps: steps = ceil(epochs / sampling probability)",
    "cap": "of truncated_poisson: the most records of a batch",
    "group": "records of one person, protected together (default 1)",
}
"""Options that say which DP-SGD is meant, each with its help: the numbers of `dp_sgd_run.NUMBERS`."""
QUESTION = {
    "epsilon": {"delta": "delta of the guarantee"},
    "delta": {"epsilon": "epsilon of the guarantee"},
    "calibrate": {
        "target_epsilon": "epsilon to be met",
        "target_delta": "delta to be met",
        "advantage": "or: the largest TPR - FPR of a membership test",
        "tpr": "or: the largest true-positive rate, with --at-fpr",
        "bayes_success": "or: the largest probability of telling membership rightly, with --prior",
        "posterior": "or: the largest probability of membership after a positive test, with --prior and --at-fpr",
        "reconstruction": "or: the largest success of a reconstruction, with --baseline",
        "mu": "or: mu of Gaussian DP, wherever both error rates are at least --above-fpr",
        "at_fpr": "false-positive rate of --tpr or --posterior",
        "prior": "prior probability of membership, of --bayes-success or --posterior",
        "baseline": "success of a reconstruction without output",
        "above_fpr": "floor of the error rates for --mu (default 1e-10)",
    },
    "risk": {
        "fpr": "false-positive rates (default 0.01 0.001)",
        "prior": "prior probabilities of membership (default 0.1)",
        "baseline": "successes of a reconstruction without output (default 0.01)",
        "above_fpr": "floor of the error rates for mu of Gaussian DP, part of the claim (default 1e-10)",
    },
    "select": {
        "delta": "delta of the guarantee",
        "gamma": "of geometric, logarithmic and truncated_negative_binomial",
        "eta": "of truncated_negative_binomial",
        "mean": "of poisson",
        "trials": "of binomial",
        "probability_of_run": "of binomial: that a trial runs",
        "count": "of point_mass: how many runs",
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
"""Numeric options of each command beyond the configuration, each with its help."""
DESCRIPTION = {
    "epsilon": "Certified epsilon of DP-SGD, or of any --mechanism, at a given delta.",
    "delta": "Certified delta of DP-SGD, or of any --mechanism, at a given epsilon.",
    "calibrate": "Solve for whichever of --noise-multiplier, --steps and --sampling-probability is left out, "
    "so that DP-SGD meets (target epsilon, target delta), or keeps a risk such as --advantage. "
    "Exit status 1 where that is infeasible.",
    "risk": "What the best attack on DP-SGD achieves: advantage, true-positive rates, posterior, Bayes success, "
    "reconstruction, and mu of Gaussian DP above a floor, each as a certified bracket.",
    "select": "Epsilon of private selection at a given delta: DP-SGD is run K times, K random and secret, and the best "
    "candidate is released. The worst case over all scores, or a published bound; beside it what a single run costs.",
    "sweep": "Solve every configuration of a grid: TOML blocks of lists and ranges, or a CSV with one "
    "configuration per row. What a configuration leaves out is solved for. Solved rows are kept in RESULT.journal "
    "until the result is complete, also where Ctrl-C or SIGTERM ends it. Exit status 1 where a row has failed.",
    "merge": "Merge the parts that sweep --shard 1/n to n/n has written into one result, the same to the last byte as "
    "that of one process.",
    "plot": "Draw the result of a sweep: a value against an input with its bracket as a band, a heat map over two "
    "inputs, or the privacy profiles or trade-off curves of some rows. What is not asked for is chosen by the data.",
    "verify": "Check the brackets of a sweep's result, or the epsilon of a ledger, by a second program: ball "
    "arithmetic on the definition of the privacy loss. Exit status 3 where a bracket is refuted, 4 where one is "
    "undecided. Needs python-flint: pip install 'jaxacct[verify]'.",
    "report": "Write one page on a privacy claim, for somebody who must sign it: the claim in words, its "
    "assumptions, the "
    "risks with a picture, every mechanism, and how to verify it. Exit status 1 where a row or the whole is not to be "
    "claimed.",
    "warm": "Compile the programs of sweeps or of training ahead, and keep them on the disk for every later process. "
    "Without it the first call that needs a program compiles it.",
    "ledger": "What a training run has spent, from its ledger: who ran it, its steps with their noise and rates, "
    "replays that count twice, and the certified epsilon of each run and of all.",
}
"""What each command does, as its help says it; the first sentence is the line in the list of commands."""
EXAMPLE = {
    "verify": "jaxacct verify result.csv",
    "ledger": "jaxacct ledger show run.jsonl --delta 1e-6",
    "report": "jaxacct report run.jsonl --out report.html",
    "warm": "jaxacct warm --for sweep",
    "epsilon": "jaxacct epsilon --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5",
    "delta": "jaxacct delta --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --epsilon 2",
    "calibrate": "jaxacct calibrate --target-epsilon 2 --target-delta 1e-5 --sampling-probability 0.01 --steps 10000",
    "risk": "jaxacct risk --noise-multiplier 1 --sampling-probability 0.01 --steps 1000 --fpr 0.01 0.001 --prior 0.1",
    "select": "jaxacct select --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5 "
    "--repetitions geometric --gamma 0.1",
    "sweep": "jaxacct sweep examples/dpsgd_grid.toml --out result.csv",
    "merge": "jaxacct merge result.csv.1-of-2.part result.csv.2-of-2.part --out result.csv",
    "plot": "jaxacct plot result.csv --out figure.pdf --x target_epsilon --by epochs",
}
"""One command line of each command, at the end of its help."""
ACTIONS = ("show",)
"""What `jaxacct ledger` can do."""
POSITIONAL = ("command", "grid", "parts", "result", "action", "ledger", "file")
"""Arguments without a name, which are never suggested for a mistyped option."""
SWITCHES = {
    "dry_run": "show the plan and an estimate of the time, from a sample, and solve nothing else",
    "resume": "go on from the journal of an interrupted run, where there is one, in its blocks",
    "overwrite": "discard such a journal, and replace a RESULT that is there already",
    "distributed": "one of several processes under jax.distributed: solve a slice each, the first one merges",
}
"""Options of `jaxacct sweep` without a value, each with its help."""
SWEEP = {
    "shard": ("I/N", "solve slice I of N into RESULT.I-of-N.part, for jaxacct merge"),
    "block": ("ROWS", "rows solved between two writes (default: by the size of the grid, 512 to 4096)"),
    "coordinator": ("HOST:PORT", "with --distributed: address of process 0 (default: as the cluster says)"),
    "process_id": ("I", "with --distributed: number of this process, from 0 (default: as the cluster says)"),
    "process_count": ("N", "with --distributed: how many processes there are (default: as the cluster says)"),
}
"""Options of `jaxacct sweep` with a value: the name of the value, and the help."""
PLOT = {
    "kind": ("K", "curve, heatmap, profile or tradeoff"),
    "x": ("FIELD", "input along the horizontal axis"),
    "by": ("FIELD", "input with one curve per value; in a heat map the vertical axis"),
    "value": ("COLUMN", "what is drawn (default: what was solved for)"),
    "where": ("FIELD=VALUE,...", "only the rows with these values"),
    "rows": (
        "I,J,...",
        "rows for profiles and trade-off curves, from 0 among those of --where (default: up to six, evenly spread)",
    ),
}
"""Options of `jaxacct plot`: the name of the value, and the help."""
NUMBERS = ("block", "process_id", "process_count")
"""Options of which each must be one whole number."""
ENGINES = "auto (default), contour or lattice"
BACKENDS = "auto (default), numpy (compiles nothing) or xla (for very many configurations)"
SAMPLING = (
    "how batches are drawn: poisson (default), random_allocation (each record once in every 1/q steps), "
    "truncated_poisson (with --cap and --dataset-size), without_replacement, with_replacement (with --batch-size and "
    "--dataset-size) or shuffled (fixed batches in a random order, as most loaders draw them; relation zero_out)"
)
LAWS = "law of K: geometric, logarithmic, truncated_negative_binomial, poisson, binomial or point_mass"
BOUNDS = (
    "worst_case (default), or envelope, privacy_profile, renyi, auto (the smallest of these three), or monotone_score "
    "(true only for scores that are monotone in the likelihood ratio)"
)
CANDIDATES = "iid (default: each drawn afresh from one law), or adaptive (each may depend on the outputs before)"
MECHANISM = (
    'any mechanism, instead of the options that describe DP-SGD: the expression, such as "repeat(Laplace(10.0), 5)", '
    "or its JSON"
)
VERIFY = (
    "check the bracket by a second program, in ball arithmetic (needs python-flint: pip install 'jaxacct[verify]'); "
    "exit status 3 where it is refuted, 4 where it is undecided"
)
RELATIONS = "add_or_remove_one (default; zero_out for shuffled), add_one, remove_one, replace_one or zero_out"
"""This and the names above from ENGINES on: the help of options that several commands share, or that is long."""


class UsageError(Exception):
    """The command line was refused; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; numeric options are numbers, lists of them, or None where left out.

    Raises UsageError for unknown commands and options (with the near match) and values that are no numbers.
    """
    options, unknown = _parser().parse_known_args(_attach_negatives(arguments))
    if options.command is None:
        raise UsageError(f"give a command: {', '.join(COMMANDS)}; see jaxacct --help")
    if unknown:
        raise UsageError(_unknown(options, unknown[0]))
    for name in (*CONFIGURATION, *QUESTION.get(options.command, {}), "rtol", *NUMBERS):
        text = getattr(options, name, None)
        if text is not None:
            setattr(options, name, number(name, ",".join(text) if isinstance(text, list) else text))
    return options


def number(name: str, text: str) -> float | int | list[float | int]:
    """A number, or a list of them from text with commas; whole numbers stay exact.

    >>> number("steps", "100"), number("noise_multiplier", "0.8,1.0")
    (100, [0.8, 1.0])
    """
    words = [word.strip() for word in text.split(",")]
    values: list[float | int] = []
    for index, word in enumerate(words):
        try:
            values.append(int(word) if re.fullmatch(r"[+-]?[0-9]{1,300}", word) else float(word))
        except ValueError:
            place = f"{name}[{index}]" if len(words) > 1 else name
            raise UsageError(f"{place} = {word!r} must be a number, or several with commas between") from None
    return values if len(values) > 1 else values[0]


def _parser() -> _Parser:
    parser = _Parser(
        prog="jaxacct",
        description="Certified privacy accounting: epsilon, delta and calibrated noise of DP-SGD.",
        epilog="Numeric options take lists with commas: --noise-multiplier 0.8,1.0,1.2 answers for three.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxacct {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command,
            help=DESCRIPTION[command].split(".")[0],
            description=DESCRIPTION[command],
            epilog=f"example: {EXAMPLE[command]}",
            allow_abbrev=False,
        )
        _OPTIONS.get(command, _question_options)(sub, command)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _question_options(sub: _Parser, command: str) -> None:
    if command != "calibrate":
        sub.add_argument("--mechanism", metavar="M", help=MECHANISM)
    for name, text in {**CONFIGURATION, **QUESTION[command]}.items():
        sub.add_argument(_option(name), metavar="X", help=text)
    sub.add_argument("--sampling", default="poisson", metavar="S", help=SAMPLING)
    _accuracy_options(sub, engine=command != "calibrate")
    sub.add_argument("--verify", action="store_true", help=VERIFY)


def _risk_options(sub: _Parser, command: str) -> None:
    for name, text in CONFIGURATION.items():
        sub.add_argument(_option(name), metavar="X", help=text)
    sub.add_argument("--sampling", default="poisson", metavar="S", help=SAMPLING)
    for name, text in QUESTION[command].items():
        sub.add_argument(_option(name), metavar="X", nargs="+", help=text)
    _accuracy_options(sub, engine=False)


def _select_options(sub: _Parser, command: str) -> None:
    for name, text in {**CONFIGURATION, **QUESTION[command]}.items():
        sub.add_argument(_option(name), metavar="X", help=text)
    sub.add_argument("--sampling", default="poisson", metavar="S", help=SAMPLING)
    sub.add_argument("--repetitions", metavar="LAW", help=LAWS)
    sub.add_argument("--bound", default="worst_case", metavar="B", help=BOUNDS)
    sub.add_argument("--candidates", default="iid", metavar="C", help=CANDIDATES)
    sub.add_argument("--top", type=int, default=1, metavar="J", help="release the best J candidates (default 1)")
    sub.add_argument("--relation", metavar="R", help=RELATIONS)


def _sweep_options(sub: _Parser, command: str) -> None:
    sub.add_argument("grid", metavar="GRID", nargs="?", help="the grid, .toml or .csv")
    sub.add_argument("--out", metavar="RESULT", help="the result, .csv or .parquet (needs pyarrow)")
    for name, text in SWITCHES.items():
        sub.add_argument(_option(name), action="store_true", help=text)
    for name, (metavar, text) in SWEEP.items():
        sub.add_argument(_option(name), metavar=metavar, help=text)
    sub.add_argument("--progress", action="store_true", default=None, help="also in a pipe")
    sub.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress")
    _accuracy_options(sub, engine=True)


def _merge_options(sub: _Parser, command: str) -> None:
    sub.add_argument("parts", metavar="PART", nargs="*", help="the part files of all slices")
    sub.add_argument("--out", metavar="RESULT", help="the result, .csv or .parquet (needs pyarrow)")
    sub.add_argument("--overwrite", action="store_true", help="replace a RESULT that is there already")


def _plot_options(sub: _Parser, command: str) -> None:
    sub.add_argument("result", metavar="RESULT", nargs="?", help="the result of a sweep, .csv or .parquet")
    sub.add_argument("--out", metavar="FIGURE", help="the picture, .png, .svg or .pdf (needs matplotlib)")
    for name, (metavar, text) in PLOT.items():
        sub.add_argument(_option(name), metavar=metavar, help=text)


def _verify_options(sub: _Parser, command: str) -> None:
    sub.add_argument("result", metavar="FILE", nargs="?", help="the result of a sweep, .csv or .parquet, or a ledger")
    for name, text in QUESTION[command].items():
        sub.add_argument(_option(name), metavar="X", help=text)


def _ledger_options(sub: _Parser, command: str) -> None:
    sub.add_argument("action", metavar="ACTION", nargs="?", help=", ".join(ACTIONS))
    sub.add_argument("ledger", metavar="LEDGER", nargs="?", help="the ledger of a training run")
    for name, text in QUESTION[command].items():
        sub.add_argument(_option(name), metavar="X", help=text)


def _report_options(sub: _Parser, command: str) -> None:
    sub.add_argument("file", metavar="FILE", nargs="?", help="a ledger, the result of a sweep, or a plan as JSON")
    sub.add_argument("--out", metavar="PAGE", help="the page, .html or .md")
    sub.add_argument(
        "--rows", metavar="I,J,...", help="of a result: rows to be told in detail, from 0 (default: the first 3)"
    )
    for name, text in QUESTION[command].items():
        sub.add_argument(_option(name), metavar="X", help=text)
    sub.add_argument("--relation", default=None, metavar="R", help=f"of a mechanism: {RELATIONS}")


def _warm_options(sub: _Parser, command: str) -> None:
    sub.add_argument("--for", default="all", metavar="P", help="sweep, training or all (default)")


_OPTIONS = {
    "risk": _risk_options,
    "select": _select_options,
    "sweep": _sweep_options,
    "merge": _merge_options,
    "plot": _plot_options,
    "ledger": _ledger_options,
    "report": _report_options,
    "verify": _verify_options,
    "warm": _warm_options,
}
"""What adds the options of a command; epsilon, delta and calibrate share `_question_options`."""


def _accuracy_options(sub: _Parser, engine: bool) -> None:
    sub.add_argument("--relation", metavar="R", help=RELATIONS)
    if engine:
        sub.add_argument("--engine", default="auto", metavar="E", help=ENGINES)
    sub.add_argument("--rtol", default="1e-4", metavar="X", help="wanted relative width (default 1e-4)")
    sub.add_argument("--backend", default="auto", metavar="B", help=BACKENDS)


def _attach_negatives(arguments: Sequence[str]) -> list[str]:
    """`--steps -1e3` as `--steps=-1e3`, so that a negative number is read as a value and refused as one."""
    joined: list[str] = []
    for word in arguments:
        negative = re.match(r"-([0-9.]|inf|nan)", word)
        if negative and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _unknown(options: argparse.Namespace, word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected {word!r}; see jaxacct {options.command} --help"
    known = [_option(name) for name in vars(options) if name not in POSITIONAL]
    given = word.split("=")[0]
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"see jaxacct {options.command} --help"
    return f"unknown option {given}; {hint}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
