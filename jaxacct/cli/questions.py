"""The commands epsilon, delta, calibrate, advise, risk, select and verify."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.dp_sgd_search import ORDER as CALIBRATED
from jaxacct.calibration.dp_sgd_search import TARGETS
from jaxacct.cli import output
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.core.bounds import explain, in_order
from jaxacct.core.validation import InputError, choice
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import element
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, RATES, usual_relation
from jaxacct.sweeps import Table, read_table, sweep
from jaxacct.sweeps.grid import ANSWER, LAWS, WORDS, Grid, expand
from jaxacct.sweeps.solve import (
    alike,
    asked_of,
    columns_of,
    expected_repetitions,
    law_of_k,
    missed_target,
    run_of,
    run_of_row,
    target_of,
)
from jaxacct.sweeps.table import ENDINGS

REFUTED, UNDECIDED = 3, 4
"""Exit statuses of a verification: REFUTED if a bracket is refuted, else UNDECIDED if a bracket is undecided."""
SECONDS = 60.0
"""Time limit of a verification for each configuration, in seconds. `jaxacct verify --seconds` sets another."""

Run = Callable[[int], Mechanism]
"""Given a row's number, return the row's mechanism. Needed for tables whose columns do not describe mechanisms."""


def _fields(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those options in `names` that the user gave, and the batch rule unless it is Poisson."""
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return given | ({} if options.sampling == "poisson" else {"sampling": options.sampling})


def _batch(fields: dict[str, Any]) -> bool:
    return any(np.ndim(value) for value in fields.values())


def _run(inputs: dict[str, np.ndarray]) -> tuple[Mechanism, str]:
    """Return one mechanism that holds the runs of all rows, and its batch rule. Refuse rows that need more than one."""
    kinds = list(alike(inputs))
    if len(kinds) > 1:
        name = "group" if len({kind["group"] for kind, _ in kinds}) > 1 else "dataset_size"
        raise InputError(f"{name} must be one number, not a list; ask for one size at a time")
    return run_of(inputs, kinds[0][0]), kinds[0][0]["sampling"]


def run(options: argparse.Namespace) -> int:
    """Run the command epsilon, delta or calibrate as one sweep. The i-th numbers of all lists form configuration i."""
    if getattr(options, "mechanism", None) is not None:
        return _of_mechanism(options)
    risks = {word.removeprefix("target_"): word for word in TARGETS} if options.command == "calibrate" else {}
    given = _fields(options, (*CONFIGURATION, *QUESTION[options.command]))
    fields = {risks.get(name, name): value for name, value in given.items()}
    grid = expand(fields, mode="zip", quantity=None if options.command == "calibrate" else options.command)
    if options.command == "calibrate" and str(grid.quantity[0]) not in CALIBRATED:
        raise InputError(f"{' and '.join(CALIBRATED)} are all given; leave out the one to be solved for")
    engine = getattr(options, "engine", "auto")
    chosen = {"relation": options.relation, "engine": engine, "rtol": options.rtol, "backend": options.backend}
    return _print_answer(sweep(grid, **chosen, progress=False), _batch(fields), options)


def _of_mechanism(options: argparse.Namespace) -> int:
    """Answer epsilon or delta of a mechanism that is given as an expression or as JSON."""
    from jaxacct.interop.documents import mechanism_of

    for name in ("sampling", *CONFIGURATION):
        if getattr(options, name) != ("poisson" if name == "sampling" else None):
            raise InputError(f"--mechanism describes all that is run; leave out --{name.replace('_', '-')}")
    asked = "delta" if options.command == "epsilon" else "epsilon"
    at = getattr(options, asked)
    if at is None:
        raise InputError(f"{asked} is missing; give --{asked}")
    mechanism = mechanism_of(options.mechanism)
    relation = options.relation or "add_or_remove_one"
    accuracy = {"engine": options.engine, "rtol": options.rtol, "backend": options.backend}
    answer = account.epsilon if options.command == "epsilon" else account.delta
    bounds = answer(mechanism, at, relation=relation, **accuracy)
    shape, own_shape = np.shape(bounds.upper), batch_shape(mechanism)
    words = {"quantity": options.command, "mechanism": mechanism.expression(), asked: np.asarray(at, np.float64)}
    words |= {"relation": relation} | {name: getattr(bounds, name) for name in (*ANSWER, *WORDS)}
    columns = {name: np.broadcast_to(np.asarray(word), shape).ravel() for name, word in words.items()}
    table = Table({n: column.astype(object) if column.dtype.kind == "U" else column for n, column in columns.items()})
    own = np.broadcast_to(np.arange(math.prod(own_shape)).reshape(own_shape), shape).ravel()
    one = lambda row: element(mechanism, np.unravel_index(own[row], own_shape))
    return _print_answer(table, bool(shape), options, one)


def _print_answer(table: Table, batch: bool, options: argparse.Namespace, mechanism: Run | None = None) -> int:
    """Print an answer and, with --verify, the second program's verdicts; return the exit status."""
    rows = _checked(table, SECONDS, mechanism) if options.verify else []
    if options.json:
        print(output.as_json(table, batch, {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}))
    else:
        print("\n".join([output.as_text(table, batch), *map(verdict, rows)]))
    solved = str(table["quantity"][0])
    if solved not in CALIBRATED:
        return _status(rows) or (0 if options.verify else output.failed(table))
    missing = np.flatnonzero(np.isnan(table[solved]))
    for index in missing:
        place = f"[{index}]" if batch else ""
        status = table["status"][index]
        print(f"jaxacct calibrate: {status}{place}: {explain(status)}", file=sys.stderr)
    return _status(rows) or int(missing.size > 0)


def risk(options: argparse.Namespace) -> int:
    """Print the risks of one configuration, or of several side by side."""
    from jaxacct.representations.risk_table import risk as table_of_risks  # a slow import that no other command needs

    fields = _fields(options, CONFIGURATION)
    for names in (("noise_multiplier",), RATES, LENGTHS):
        if not set(names) & set(fields):
            raise InputError(f"{names[0]} is missing; give --{names[0].replace('_', '-')}")
    # `expand` requires a delta. No risk depends on the delta, so any value serves.
    runs, rule = _run(expand(fields | {"delta": 0.5}, mode="zip", quantity="epsilon").inputs)
    given = {name: getattr(options, name) for name in QUESTION["risk"] if getattr(options, name) is not None}
    settings = {"relation": options.relation or usual_relation(rule), "rtol": options.rtol, "backend": options.backend}
    table = table_of_risks(runs if _batch(fields) else element(runs, (0,)), **given, **settings)
    print(output.dumps(table.to_dict()) if options.json else table)
    return 0


def advise(options: argparse.Namespace) -> int:
    """Print the error of noisy gradient sums for each way to correlate noise. With --out, write a table or plot too."""
    from jaxacct.plots import style  # slow imports that few commands need
    from jaxacct.training import advise_strategy

    path = None if options.out is None else Path(options.out)
    if path is not None and path.suffix.lower() != ".csv":
        style.check_picture(path)
    given = {name: x for name, x in vars(options).items() if name not in ("command", "json", "out") and x is not None}
    advice = advise_strategy(**given)
    if path is not None and path.suffix.lower() == ".csv":
        advice.to_csv(path)
    elif path is not None:
        with style.settings():
            canvas, axes = style.figure(square=False)
            advice.plot(axes)
            style.save(canvas, path)
    print(output.dumps(advice.to_dict()) if options.json else advice)
    return int(all(option.status.startswith("infeasible") for option in advice.options))


def select(options: argparse.Namespace) -> int:
    """Print the epsilon of running DP-SGD K times and releasing the best, and the epsilon of a single run."""
    if options.repetitions is None:
        raise InputError(f"repetitions is missing; name the law of K: {', '.join(LAWS)}")
    relation = options.relation or usual_relation(options.sampling)
    laws = [word.strip() for word in options.repetitions.split(",")]
    fields = _fields(options, (*CONFIGURATION, *QUESTION["select"])) | {"repetitions": laws if laws[1:] else laws[0]}
    grid, batch = expand(fields, mode="zip", quantity="epsilon"), _batch(fields)
    columns = _selected(grid, options.bound, relation, options.candidates, options.top).columns
    columns |= {"candidates": np.full(len(grid), options.candidates, object)}
    columns |= {"top": np.full(len(grid), options.top)} if options.top != 1 else {}
    base = account.epsilon(_run(grid.inputs)[0], grid.inputs["delta"], relation=relation)
    columns |= {f"base_{name}": np.asarray(getattr(base, name)) for name in (*ANSWER, "kind", "status")}
    table = Table(columns | {"expected_repetitions": expected_repetitions(grid.inputs)})
    if options.json:
        print(output.as_json(table, batch))
        return 0
    beside = {}
    if batch:
        hidden = [f"base_{name}" for name in ("lower", "estimate", "kind", "status")]
        table = Table({name: column for name, column in table.columns.items() if name not in hidden})
    else:
        one = {name: column[0] for name, column in table.columns.items()}
        beside["base"] = f"epsilon <= {output.up(one['base_upper'], 6)} ({one['base_kind']}) for a single run"
        beside["E[K]"] = f"{one['expected_repetitions']:.6g}"
        if "top" in one:
            beside["released"] = f"the best {one['top']}, or all where K is less"
    print(output.as_text(table, batch, beside))
    return 0


def _selected(grid: Grid, bound: str, relation: str, candidates: str, top: int) -> Table:
    """Return a table with each selection's epsilon. Solve all rows in one sweep, or the rows of each law of K apart."""
    from jaxacct import selection

    choice("bound", bound, ("worst_case", "auto", *selection.BOUNDS))
    usual = candidates == "iid" and top == 1
    if bound == "worst_case" and usual:
        return sweep(grid, relation=relation, progress=False)
    inputs, parts = grid.inputs, []
    for word in dict.fromkeys(inputs["repetitions"].tolist()):
        rows = np.flatnonzero(inputs["repetitions"] == word)
        some = {name: column[rows] for name, column in inputs.items()}
        base, law = _run(some)[0], law_of_k(word, some)
        if usual:
            found = selection.bound_epsilon(base, law, some["delta"], bound=bound, relation=relation)
        else:
            chosen = selection.select(base, law, bound=bound, candidates=candidates, top=top)
            found = account.epsilon(chosen, some["delta"], relation=relation)
        parts.append((rows, found))
    answer = columns_of(in_order(parts))
    return Table({"quantity": grid.quantity, **inputs, "relation": np.full(len(grid), relation, object), **answer})


def verify(options: argparse.Namespace) -> int:
    """Let the second program check a sweep's result or a ledger (`jaxacct verify RESULT|LEDGER`)."""
    seconds = SECONDS if options.seconds is None else float(options.seconds)
    if Path(options.result).suffix.lower() in ENDINGS:
        if options.delta is not None:
            raise InputError("--delta is for a ledger; the rows of a result have their own")
        rows = _checked(read_table(options.result), seconds)
    else:
        rows = [_ledger_checked(options.result, options.delta, seconds)]
    counts = Counter(row["verification"] for row in rows)
    if options.json:
        print(output.dumps({"file": options.result, "rows": len(rows), "counts": dict(counts), "results": rows}))
    else:
        for index, row in enumerate(rows):
            if row["verification"] not in ("verified", "no answer"):
                print(f"row {index}: {verdict(row)}")
        print(output.block({"rows": str(len(rows)), **{word: str(count) for word, count in counts.items()}}))
    return _status(rows)


def _status(rows: list[dict[str, Any]]) -> int:
    """Return exit status 3 if a bracket is refuted, else 4 if a bracket is undecided, else 0."""
    found = {row["verification"] for row in rows}
    return REFUTED if "refuted" in found else UNDECIDED if "undecided" in found else 0


def verdict(row: dict[str, Any]) -> str:
    """Return the verdict on one row as a line of text."""
    if row["verification"] == "verified":
        return f"verified to {row['verification_digits']} digits (ball arithmetic, {row['verification_seconds']:.1f} s)"
    return f"{row['verification']}: {row['verification_words']}"


def _checked(table: Table, seconds: float, mechanism: Run | None = None) -> list[dict[str, Any]]:
    """Return the second program's result for every row of a table, also for rows without an answer."""
    rows = [{name: column[i] for name, column in table.columns.items()} for i in range(len(table))]
    for number, row in enumerate(rows):
        if math.isnan(asked_of(row)[1]) and target_of(row) is None:
            raise InputError(f"row {number}: {asked_of(row)[0]} is missing, at which its bracket holds; give it")
    return [_row_checked(row, seconds, mechanism(i) if mechanism else None) for i, row in enumerate(rows)]


def _row_checked(row: dict[str, Any], seconds: float, mechanism: Mechanism | None) -> dict[str, Any]:
    lower, upper = float(row["lower"]), float(row["upper"])
    if math.isnan(lower) and math.isnan(upper):
        return _said("no answer", "the row has no bracket")
    if missed := missed_target(row):
        return _said("refuted", missed)
    if row.get("repetitions"):
        return _said("undecided", "selections are not covered")
    if target_of(row) is not None:
        return _said("undecided", "risks are not covered")
    try:
        mechanism = run_of_row(row) if mechanism is None else mechanism
    except InputError as error:
        return _said("undecided", f"its parameters describe no run: {error}")
    name, at = asked_of(row)
    return _verified(mechanism, lower, upper, {name.removeprefix("target_"): at}, str(row["relation"]), seconds)


def _ledger_checked(path: str, delta: float | None, seconds: float) -> dict[str, Any]:
    """Let the second program compose the ledger's entries and check the ledger's epsilon. Return the verdict."""
    from jaxacct.training import Ledger  # a slow import that few commands need
    from jaxacct.training.ledger.contents import MANY_RELEASES

    ledger = Ledger.read(path)
    differ = len(set().union(*(ledger.counting(name).releases for name in ledger.runs)))
    if differ > MANY_RELEASES:
        words = f"the ledger has {differ} releases that differ, and up to {MANY_RELEASES} are checked"
        return _said("undecided", words)
    at = ledger.plan.target_delta if delta is None else delta
    bounds, relation = ledger.epsilon(at), ledger.plan.relation
    return _verified(ledger.spent(), float(bounds.lower), float(bounds.upper), {"delta": float(at)}, relation, seconds)


def _verified(
    mechanism: Mechanism, lower: float, upper: float, asked: dict[str, float], relation: str, seconds: float
) -> dict[str, Any]:
    try:
        from jaxacct.verification import verify as by_second_program
    except ModuleNotFoundError as error:
        raise InputError(str(error)) from None
    bracket = SimpleNamespace(lower=lower, upper=upper)  # a file may hold lower > upper, which `Bounds` would refuse
    found = by_second_program(mechanism, bracket, relation=relation, seconds=seconds, **asked)
    return _said(found.status, found.explanation, found.digits, found.seconds)


def _said(status: str, words: str, digits: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    return {
        "verification": str(status),
        "verification_digits": int(digits),
        "verification_seconds": float(seconds),
        "verification_words": str(words),
    }
