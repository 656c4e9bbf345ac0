"""`--verify` and `jaxacct verify`: brackets checked by the second program, in ball arithmetic."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.cli import output
from jaxacct.core.validation import InputError
from jaxacct.sweeps import Table, samplings
from jaxacct.sweeps.result_files import ENDINGS
from jaxacct.sweeps.risks import target_of
from jaxacct.sweeps.table import read_table

REFUTED = 3
"""Exit status where a bracket is refuted."""
UNDECIDED = 4
"""Exit status where none is refuted and one is undecided."""
SECONDS = 60.0
"""Time limit of each configuration, unless --seconds says otherwise."""


def run(options: argparse.Namespace) -> int:
    """`jaxacct verify RESULT|LEDGER`."""
    if options.result is None:
        raise InputError("FILE is missing; give the .csv or .parquet of a sweep, or the ledger of a training run")
    for name in ("delta", "seconds"):
        if np.ndim(getattr(options, name) or 0):
            raise InputError(f"{name} must be one number, not a list")
    seconds = SECONDS if options.seconds is None else float(options.seconds)
    if Path(options.result).suffix.lower() in ENDINGS:
        if options.delta is not None:
            raise InputError("--delta is for a ledger; the rows of a result have their own")
        rows = checked(read_table(options.result), seconds)
    else:
        rows = [_ledger(options.result, options.delta, seconds)]
    counts = Counter(row["verification"] for row in rows)
    report = {"file": options.result, "rows": len(rows), "counts": dict(counts)}
    if options.json:
        print(output.dumps(report | {"results": rows}))
    else:
        for index, row in enumerate(rows):
            if row["verification"] not in ("verified", "no answer"):
                print(f"row {index}: {line(row)}")
        print(output.block({"rows": str(len(rows)), **{word: str(count) for word, count in counts.items()}}))
    return exit_status(rows)


def checked(table: Table, seconds: float, mechanism: Callable[[int], Any] | None = None) -> list[dict[str, Any]]:
    """What the second program says of every row of a table; rows without an answer say so.

    mechanism : that of a row, where the columns do not describe it.
    """
    rows = [{name: column[i] for name, column in table.columns.items()} for i in range(len(table))]
    return [_row(row, seconds, mechanism(i) if mechanism else None) for i, row in enumerate(rows)]


def line(row: dict[str, Any]) -> str:
    """One line for a person.

    >>> line({"verification": "verified", "verification_digits": 9, "verification_seconds": 1.23})
    'verified to 9 digits (ball arithmetic, 1.2 s)'
    """
    if row["verification"] == "verified":
        return f"verified to {row['verification_digits']} digits (ball arithmetic, {row['verification_seconds']:.1f} s)"
    return f"{row['verification']}: {row['verification_words']}"


def exit_status(rows: list[dict[str, Any]]) -> int:
    """3 where a bracket is refuted, else 4 where one is undecided, else 0."""
    found = {row["verification"] for row in rows}
    return REFUTED if "refuted" in found else UNDECIDED if "undecided" in found else 0


def _row(row: dict[str, Any], seconds: float, mechanism: Any = None) -> dict[str, Any]:
    lower, upper = float(row["lower"]), float(row["upper"])
    if math.isnan(lower) and math.isnan(upper):
        return _said("no answer", 0, 0.0, "the row has no bracket")
    if row.get("repetitions"):
        return _said("undecided", 0, 0.0, "selections are not covered")
    if target_of(row) is not None:
        return _said("undecided", 0, 0.0, "risks are not covered")
    mechanism = samplings.run_of_row(row) if mechanism is None else mechanism
    if str(row["quantity"]) == "delta":
        asked = {"epsilon": float(row["epsilon"])}
    else:
        asked = {"delta": float(row["delta" if str(row["quantity"]) == "epsilon" else "target_delta"])}
    return _verified(mechanism, lower, upper, asked, str(row["relation"]), seconds)


def _ledger(path: str, delta: float | None, seconds: float) -> dict[str, Any]:
    """The ledger's claimed epsilon against the composition of its entries."""
    from jaxacct.training import Ledger  # takes a while to import: only for this command
    from jaxacct.training.ledger.contents import MANY_RELEASES

    ledger = Ledger.read(path)
    differ = len(set().union(*(ledger.counting(name).releases for name in ledger.runs)))
    if differ > MANY_RELEASES:
        words = f"the ledger has {differ} releases that differ, and up to {MANY_RELEASES} are checked"
        return _said("undecided", 0, 0.0, words)
    at = ledger.plan.target_delta if delta is None else delta
    bounds = ledger.epsilon(at)
    relations = {header.plan.relation for headers in ledger.headers.values() for header in headers}
    return _verified(
        ledger.spent(), float(bounds.lower), float(bounds.upper), {"delta": float(at)}, relations.pop(), seconds
    )


def _verified(
    mechanism: Any, lower: float, upper: float, asked: dict[str, float], relation: str, seconds: float
) -> dict[str, Any]:
    try:
        from jaxacct.verification import verify
    except ModuleNotFoundError as error:
        raise InputError(str(error)) from None
    found = verify(mechanism, _Bracket(lower, upper), relation=relation, seconds=seconds, **asked)
    return _said(found.status, found.digits, found.seconds, found.explanation)


class _Bracket:
    """Both ends as the file has them; `Bounds` would refuse some."""

    def __init__(self, lower: float, upper: float) -> None:
        self.lower, self.upper = lower, upper


def _said(status: str, digits: int, seconds: float, words: str) -> dict[str, Any]:
    return {
        "verification": str(status),
        "verification_digits": int(digits),
        "verification_seconds": float(seconds),
        "verification_words": str(words),
    }
