"""`jaxacct epsilon`, `jaxacct delta` and `jaxacct calibrate`: each is a sweep of the configurations given."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from jaxacct.calibration.risk_targets import TARGETS
from jaxacct.cli import output
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.core.bounds import explain
from jaxacct.core.validation import InputError
from jaxacct.sweeps import Table, sweep
from jaxacct.sweeps.grid import expand

__all__ = ["run"]

CALIBRATED = ("noise_multiplier", "sampling_probability", "steps")
"""What a calibration can solve for."""


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command; lists of numbers are put side by side."""
    names = (*CONFIGURATION, *QUESTION[options.command])
    risks = {word.removeprefix("target_"): word for word in TARGETS} if options.command == "calibrate" else {}
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    fields = {risks.get(name, name): value for name, value in given.items()}
    if options.sampling != "poisson":
        fields["sampling"] = options.sampling
    quantity = None if options.command == "calibrate" else options.command
    grid = expand(fields, mode="zip", quantity=quantity)
    solved = str(grid.quantity[0])
    if options.command == "calibrate" and solved not in CALIBRATED:
        raise InputError(f"{' and '.join(CALIBRATED)} are all given; leave out the one to be solved for")
    engine = getattr(options, "engine", "auto")
    chosen = {"relation": options.relation, "engine": engine, "rtol": options.rtol, "backend": options.backend}
    table = sweep(grid, **chosen, progress=False)
    batch = any(np.ndim(value) for value in fields.values())
    if options.verify:
        return _answer_verified(table, batch, options)
    print(output.as_json(table, batch) if options.json else output.as_text(table, batch))
    return _infeasible(table, batch) if solved in CALIBRATED else output.failed(table)


def _answer_verified(table: Table, batch: bool, options: argparse.Namespace) -> int:
    """The answer with what the second program says of it."""
    from jaxacct.cli import verify

    rows = verify.checked(table, verify.SECONDS)
    if options.json:
        print(output.as_json(table, batch, {name: [row[name] for row in rows] for name in rows[0]}))
    else:
        print(output.as_text(table, batch))
        print("\n".join(verify.line(row) for row in rows))
    infeasible = _infeasible(table, batch) if str(table["quantity"][0]) in CALIBRATED else 0
    return verify.exit_status(rows) or infeasible


def _infeasible(table: Table, batch: bool) -> int:
    """Exit status 1, with the reason on standard error, where a calibration has no answer."""
    solved = table[str(table["quantity"][0])]
    for index in np.flatnonzero(np.isnan(solved)):
        place = f"[{index}]" if batch else ""
        status = table["status"][index]
        print(f"jaxacct calibrate: {status}{place}: {explain(status)}", file=sys.stderr)
    return int(np.isnan(solved).any())
