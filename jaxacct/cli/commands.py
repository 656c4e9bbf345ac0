"""What each command does: options in, output and exit status out."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxacct.bounds import explain
from jaxacct.cli import ledger, output, select
from jaxacct.cli.arguments import CONFIGURATION, NUMBERS, PLOT, QUESTION
from jaxacct.engines import programs
from jaxacct.sweeps import Table, merge, plan, sweep
from jaxacct.sweeps.grid import expand
from jaxacct.sweeps.parts import part_path, slice_of
from jaxacct.validation import InputError

CALIBRATED = ("noise_multiplier", "sampling_probability", "steps")


def run(options: argparse.Namespace) -> int:
    """Run one parsed command and return its exit status."""
    for name in ("rtol", *NUMBERS):
        value = getattr(options, name, None)
        if np.ndim(value or 0):
            raise InputError(f"{name} must be one number, not a list")
        if name in NUMBERS and value is not None and not isinstance(value, int):
            raise InputError(f"{name} = {value!r} must be a whole number")
    known = {
        "select": select.run,
        "ledger": ledger.run,
        "sweep": _sweep,
        "merge": _merge,
        "plot": _plot,
        "verify": _verify,
    }
    return known.get(options.command, _answer)(options)


def _answer(options: argparse.Namespace) -> int:
    """epsilon, delta and calibrate: a small zipped sweep."""
    names = (*CONFIGURATION, *QUESTION[options.command])
    fields = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    quantity = None if options.command == "calibrate" else options.command
    grid = expand(fields, mode="zip", quantity=quantity)
    solved = str(grid.quantity[0])
    if options.command == "calibrate" and solved not in CALIBRATED:
        raise InputError(f"{' and '.join(CALIBRATED)} are all given; leave out the one to be solved for")
    engine = getattr(options, "engine", "auto")
    table = sweep(grid, relation=options.relation, engine=engine, rtol=options.rtol, progress=False)
    batch = any(np.ndim(value) for value in fields.values())
    if options.verify:
        return _answer_verified(table, batch, options)
    print(output.as_json(table, batch) if options.json else output.as_text(table, batch))
    return _infeasible(table, batch) if solved in CALIBRATED else _failed(table)


def _answer_verified(table: Table, batch: bool, options: argparse.Namespace) -> int:
    """The answer with what the second program says of it."""
    from jaxacct.cli import verification

    rows = verification.checked(table, 60.0)
    if options.json:
        print(output.as_json(table, batch, {name: [row[name] for row in rows] for name in rows[0]}))
    else:
        print(output.as_text(table, batch))
        print("\n".join(verification.line(row) for row in rows))
    infeasible = _infeasible(table, batch) if str(table["quantity"][0]) in CALIBRATED else 0
    return verification.exit_status(rows) or infeasible


def _verify(options: argparse.Namespace) -> int:
    from jaxacct.cli import verification

    return verification.run(options)


def _infeasible(table: Table, batch: bool) -> int:
    """Exit status 1, with the reason on standard error, where a calibration has no answer."""
    solved = table[str(table["quantity"][0])]
    for index in np.flatnonzero(np.isnan(solved)):
        place = f"[{index}]" if batch else ""
        status = table["status"][index]
        print(f"jaxacct calibrate: {status}{place}: {explain(status)}", file=sys.stderr)
    return int(np.isnan(solved).any())


def _failed(table: Table) -> int:
    """Exit status 1 where the engines failed on a row; a warning has said on which."""
    return int((table["status"] == "failed").any())


def _sweep(options: argparse.Namespace) -> int:
    if options.grid is None:
        raise InputError("GRID is missing; give a .toml or .csv file")
    settings = {name: getattr(options, name) for name in ("relation", "engine", "rtol", "block", "shard")}
    if options.dry_run:
        return _report(output.plan(plan(options.grid, **settings)), output.plan_text, options)
    if options.out is None:
        raise InputError("--out is missing; name the result, such as --out result.csv")
    if options.distributed:
        programs.keep_on(None)  # kept programs are those of a single process
    begin = time.monotonic()
    switches = {name: getattr(options, name) for name in ("progress", "resume", "overwrite", "distributed")}
    table = sweep(options.grid, out=options.out, **settings, **switches)
    out = str(part_path(Path(options.out), slice_of(options.shard)))
    _report(output.summary(table, out, time.monotonic() - begin), output.summary_text, options)
    return _failed(table)


def join(options: argparse.Namespace) -> None:
    """Become one of several processes, where a sweep asks for that, as the options or the cluster say."""
    if options.command != "sweep":
        return
    given = {name: getattr(options, name) for name in ("coordinator", "process_id", "process_count")}
    if not options.distributed:
        for name, value in given.items():
            if value is not None:
                raise InputError(f"--{name.replace('_', '-')} is for --distributed; add that, or leave it out")
        return
    if options.shard is not None:
        raise InputError("--shard and --distributed both slice the grid; leave one of them out")
    known = [value is not None for value in given.values()]
    if any(known) and not all(known):
        raise InputError("--coordinator, --process-id and --process-count belong together; give all three, or none")
    if all(known) and options.process_id not in range(options.process_count):
        raise InputError(
            f"--process-id = {options.process_id} must be a whole number >= 0 and < --process-count = "
            f"{options.process_count}; number the processes from 0"
        )
    try:
        jax.distributed.initialize(options.coordinator, options.process_count, options.process_id)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--distributed: {reason}; give --coordinator HOST:PORT, --process-id I and --process-count N"
        ) from None


def _merge(options: argparse.Namespace) -> int:
    if options.out is None:
        raise InputError("--out is missing; name the result, such as --out result.csv")
    begin = time.monotonic()
    table = merge(options.parts, options.out, overwrite=options.overwrite)
    _report(output.summary(table, options.out, time.monotonic() - begin), output.summary_text, options)
    return _failed(table)


def _plot(options: argparse.Namespace) -> int:
    if options.result is None:
        raise InputError("RESULT is missing; give the .csv or .parquet of a sweep")
    if options.out is None:
        raise InputError("--out is missing; name the picture, such as --out figure.png")
    from jaxacct.plots import plot

    chosen = {name: getattr(options, name) for name in PLOT}
    if options.where is not None:
        pairs = [pair.partition("=") for pair in options.where.split(",")]
        if not all(name and sign and value for name, sign, value in pairs):
            raise InputError(f"where = {options.where!r} must be FIELD=VALUE, or several with commas between")
        chosen["where"] = {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    if options.rows is not None:
        if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", options.rows):
            raise InputError(f"rows = {options.rows!r} must be a row number from 0, or several with commas between")
        chosen["rows"] = [int(word) for word in options.rows.split(",")]
    return _report(plot(options.result, options.out, **chosen), output.block, options)


def _report(report: dict[str, Any], as_text: Callable[[dict[str, Any]], str], options: argparse.Namespace) -> int:
    print(output.dumps(report) if options.json else as_text(report))
    return 0
