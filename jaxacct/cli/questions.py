"""`jaxacct epsilon`, `jaxacct delta` and `jaxacct calibrate`: each is a sweep of the configurations given."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.risk_targets import TARGETS
from jaxacct.cli import output
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.core.bounds import explain
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import element
from jaxacct.sweeps import Table, sweep
from jaxacct.sweeps.columns import ANSWER, WORDS
from jaxacct.sweeps.grid import expand

__all__ = ["run"]

CALIBRATED = ("noise_multiplier", "sampling_probability", "steps")
"""What a calibration can solve for."""


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command; lists of numbers are put side by side."""
    if getattr(options, "mechanism", None) is not None:
        return _of_mechanism(options)
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
    return _told(table, batch, options)


def _of_mechanism(options: argparse.Namespace) -> int:
    """Answer for a mechanism that is given as an expression or as JSON."""
    from jaxacct.interop.expressions import mechanism_of

    for name in CONFIGURATION:
        if getattr(options, name) is not None or options.sampling != "poisson":
            word = "sampling" if options.sampling != "poisson" else name
            raise InputError(f"--mechanism describes all that is run; leave out --{word.replace('_', '-')}")
    asked = "delta" if options.command == "epsilon" else "epsilon"
    at = getattr(options, asked)
    if at is None:
        raise InputError(f"{asked} is missing; give --{asked}")
    mechanism = mechanism_of(options.mechanism)
    relation = options.relation or "add_or_remove_one"
    accuracy = {"engine": options.engine, "rtol": options.rtol, "backend": options.backend}
    answer = account.epsilon if options.command == "epsilon" else account.delta
    bounds = answer(mechanism, at, relation=relation, **accuracy)
    shape = np.shape(bounds.upper)
    words = {"quantity": options.command, "mechanism": mechanism.expression(), asked: np.asarray(at, np.float64)}
    words |= {"relation": relation} | {name: getattr(bounds, name) for name in (*ANSWER, *WORDS)}
    columns = {name: np.broadcast_to(np.asarray(word), shape).ravel() for name, word in words.items()}
    table = Table({n: column.astype(object) if column.dtype.kind == "U" else column for n, column in columns.items()})
    own = np.broadcast_to(np.arange(math.prod(batch_shape(mechanism))).reshape(batch_shape(mechanism)), shape).ravel()
    each = lambda row: element(mechanism, np.unravel_index(own[row], batch_shape(mechanism)))
    return _told(table, bool(shape), options, each)


def _told(
    table: Table, batch: bool, options: argparse.Namespace, mechanism: Callable[[int], Mechanism] | None = None
) -> int:
    """Print an answer; with --verify, also the verdict of the second program."""
    if options.verify:
        return _answer_verified(table, batch, options, mechanism)
    print(output.as_json(table, batch) if options.json else output.as_text(table, batch))
    return _infeasible(table, batch) if str(table["quantity"][0]) in CALIBRATED else output.failed(table)


def _answer_verified(
    table: Table, batch: bool, options: argparse.Namespace, mechanism: Callable[[int], Mechanism] | None
) -> int:
    """The answer with what the second program says of it."""
    from jaxacct.cli import verify

    rows = verify.checked(table, verify.SECONDS, mechanism)
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
