"""What each command does: options in, output and exit status out."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from jaxacct.bounds import explain
from jaxacct.cli import output
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.sweep import Table, sweep
from jaxacct.sweep.grid import expand
from jaxacct.validation import InputError

CALIBRATED = ("noise_multiplier", "sampling_probability", "steps")


def run(options: argparse.Namespace) -> int:
    """Run one parsed command and return its exit status."""
    if np.ndim(options.rtol):
        raise InputError("rtol must be one number, not a list")
    return _sweep(options) if options.command == "sweep" else _answer(options)


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
    print(output.as_json(table, batch) if options.json else output.as_text(table, batch))
    return _infeasible(table, batch) if solved in CALIBRATED else 0


def _infeasible(table: Table, batch: bool) -> int:
    """Exit status 1, with the reason on standard error, where a calibration has no answer."""
    solved = table[str(table["quantity"][0])]
    for index in np.flatnonzero(np.isnan(solved)):
        place = f"[{index}]" if batch else ""
        status = table["status"][index]
        print(f"jaxacct calibrate: {status}{place}: {explain(status)}", file=sys.stderr)
    return int(np.isnan(solved).any())


def _sweep(options: argparse.Namespace) -> int:
    if options.grid is None:
        raise InputError("GRID is missing; give a .toml or .csv file")
    if options.out is None:
        raise InputError("--out is missing; name the result, such as --out result.csv")
    begin = time.monotonic()
    table = sweep(
        options.grid,
        out=options.out,
        relation=options.relation,
        engine=options.engine,
        rtol=options.rtol,
        progress=options.progress,
    )
    seconds = time.monotonic() - begin
    summary = output.summary(table, options.out, seconds)
    print(output.dumps(summary) if options.json else output.summary_text(summary))
    return 0
