"""The subject of a sweep's result: rows as the file has them, each derived again before it is stated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds, explain
from jaxacct.core.validation import LARGEST_COUNT, InputError
from jaxacct.core.validation import shown as shown_value
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, NUMBERS, RATES, described
from jaxacct.report.blocks import Rows
from jaxacct.report.claim import Claim
from jaxacct.report.rounding import down, up
from jaxacct.report.subject import Subject, digest, origin, quoted
from jaxacct.report.wording import CHOICE_NOTE, RELATIONS, TRAINING, safe
from jaxacct.selection import select
from jaxacct.sweeps import Table, read_table, samplings
from jaxacct.sweeps import repetitions as laws
from jaxacct.sweeps.columns import WHOLE
from jaxacct.sweeps.grid import INPUTS

__all__ = ["MOST_DETAILED", "MOST_SHOWN", "from_table", "read_result"]

MOST_SHOWN = 50
"""Rows in the table of a page, unless rows are asked for."""
MOST_DETAILED = 3
"""Rows that are told in detail unless rows are asked for."""
MOST_ASKED = 20
"""Rows that may be asked for: each is a page with a picture."""
PARAMETERS = ("noise_multiplier", "sampling_probability", "steps")
"""What a run of DP-SGD is made from."""
_SHOWN = ("name", "sampling", "noise_multiplier", "sampling_probability", "steps", "cap", "group", "repetitions")
"""Columns of the file that the page shows, where they are there."""


def read_result(path: str, rows: Sequence[int] | None, tick: Callable[[str], None]) -> Subject:
    """The subject of a result file."""
    before = digest(path)
    tick("reading the result")
    subject = from_table(read_table(path), rows, tick, path)
    return Subject(**{**vars(subject), "origin": origin(path, before)})


def from_table(table: Table, rows: Sequence[int] | None, tick: Callable[[str], None], path: str = "") -> Subject:
    """The subject of a table.

    rows : those to be told in detail, from 0; by default the first three, and the first fifty in the table.
    """
    shown, detailed = _chosen(len(table), rows)
    claims = []
    for row in shown:
        tick(f"row {row}")
        claims.append(_claim(table, row))
    told = [claim for row, claim in zip(shown, claims, strict=True) if row in detailed]
    details = [_details(table, row) for row in detailed]
    stop = frozenset(place for place, claim in enumerate(claims) if not claim.may_be_claimed)
    name = quoted(path)
    return Subject(
        "the result of a sweep",
        f"The file has {len(table):,} row{'s' if len(table) > 1 else ''}, one configuration of DP-SGD each. "
        "It says what such a run would cost. Nothing on this page says that one was carried out.",
        told,
        _overview(table, shown, claims, stop, rows is not None),
        details,
        [claim.mechanism for claim in claims if claim.mechanism is not None],
        TRAINING,
        [f"sha256sum {name}", f"jaxacct verify {name}"] if path else ["jaxacct verify result.csv"],
        CHOICE_NOTE if "repetitions" in table.columns and any(table["repetitions"][shown]) else "",
    )


def _chosen(size: int, rows: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """(rows in the table, rows in detail)."""
    if size == 0:
        raise InputError("the result has no rows; there is nothing to report")
    if rows is None:
        return list(range(min(size, MOST_SHOWN))), list(range(min(size, MOST_DETAILED)))
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise InputError(f"rows = {shown_value(rows)} must be row numbers, such as [0, 2]")
    chosen = list(dict.fromkeys(rows))
    for row in chosen:
        if isinstance(row, bool | np.bool_) or not isinstance(row, int | np.integer):
            raise InputError(f"rows: {shown_value(row)} must be a whole number; rows are counted from 0")
    if not 0 < len(chosen) <= MOST_ASKED:
        raise InputError(f"rows: {len(chosen)} were asked for, limit {MOST_ASKED}; make several reports")
    for row in chosen:
        if not 0 <= row < size:
            raise InputError(f"rows: {row} must be >= 0 and < {size}; rows are counted from 0")
    return chosen, chosen


def _claim(table: Table, row: int) -> Claim:
    """One row, held against what its own parameters give now."""
    cells = {name: column[row] for name, column in table.columns.items()}
    quantity = "delta" if str(cells["quantity"]) == "delta" else "epsilon"
    asked = "epsilon" if quantity == "delta" else "delta" if str(cells["quantity"]) == "epsilon" else "target_delta"
    given = float(cells.get(asked, math.nan))
    relation, label = str(cells["relation"]), f"Row {row}"
    if cells.get("name"):
        label += f" of “{safe(str(cells['name']))}”"
    bounds, trouble = _stated(cells)
    mechanism = None
    if not trouble and relation not in RELATIONS:
        trouble = "Its neighbouring relation is not one that jaxacct knows."
    missing = [name for name in (asked, *PARAMETERS) if math.isnan(float(cells.get(name, math.nan)))]
    if not trouble and missing and bounds is not None and bounds.ok:
        trouble = f"The row has no {missing[0].replace('_', ' ')}."
    if not trouble and not missing:
        try:
            mechanism = _mechanism(cells)
        except (InputError, ValueError, KeyError) as error:
            trouble = f"Its parameters describe no run: {safe(str(error))[:200]}"
    claim = Claim(label, quantity, given, relation, bounds, mechanism, False, trouble)
    if not claim.may_be_claimed or mechanism is None:
        return claim
    return _compared(claim, mechanism)


def _stated(cells: dict[str, Any]) -> tuple[Bounds | None, str]:
    """The bracket that the file states, and what is wrong with it."""
    low, middle, high = (float(cells[name]) for name in ("lower", "estimate", "upper"))
    kind, status = safe(str(cells.get("kind", ""))), str(cells.get("status", ""))
    without = math.isnan(high) and not kind  # a row without an answer has no kind
    try:
        return Bounds(
            low, middle, high, "certified" if without else kind, status, safe(str(cells.get("engine", "")))
        ), ""
    except (ValueError, InputError):
        return None, f"The row of the file is no bracket that jaxacct writes (status {safe(status)[:60]!r})."


def _mechanism(cells: dict[str, Any]) -> Mechanism:
    _refuse_other_batches(cells)
    run = samplings.run_of_row(cells)
    word = str(cells.get("repetitions", ""))
    if not word:
        return run
    numbers = {name: float(cells[name]) for name in laws.LAWS[word]}
    return select(run, laws.law(word, numbers))


def _refuse_other_batches(cells: dict[str, Any]) -> None:
    """Refuse a batch size, slots or epochs, on the page, that do not give the sampling probability and the steps."""
    stated = {name: float(cells[name]) for name in NUMBERS if not math.isnan(float(cells.get(name, math.nan)))}
    sources = {name: other for name, *others in (RATES, LENGTHS) for other in others if {name, other} <= stated.keys()}
    given = {name: number for name, number in stated.items() if name not in sources}
    exact = described(given, str(cells.get("sampling", "")) or "poisson", int(stated.get("group", 1)))
    for name, source in sources.items():
        most = math.inf if name == "steps" else exact[name] * (1.0 + 1e-12)
        if not exact[name] * (1.0 - 1e-12) <= stated[name] <= most:
            raise InputError(f"{name} = {stated[name]!r} is not {exact[name]!r}, which follows from {source}")


def _compared(claim: Claim, mechanism: Mechanism) -> Claim:
    """The claim with the larger of both upper ends; nothing to claim where the two brackets have no point in common.

    All else that is stated of the bracket, its lower end, kind and status, is what was derived.
    """
    assert claim.bounds is not None
    ask = account.delta if claim.quantity == "delta" else account.epsilon
    fields = {name: getattr(claim, name) for name in ("title", "quantity", "given", "relation", "mechanism")}
    try:
        again = ask(mechanism, claim.given, relation=claim.relation)
    except InputError as error:
        return Claim(**fields, bounds=claim.bounds, trouble=f"It cannot be derived again: {safe(str(error))[:200]}")
    if not again.ok:
        words = f"Its parameters give an answer of status {again.status!r} now. {explain(str(again.status))}"
        return Claim(**fields, bounds=again, trouble=words)
    if not (again.lower <= claim.bounds.upper and claim.bounds.lower <= again.upper):
        words = (
            f"The file says {claim.quantity} <= {up(claim.upper, 9)}, but its parameters give "
            f"{down(float(again.lower), 9)} "
            f"to {up(float(again.upper), 9)} now. The file was changed, or is not of these parameters."
        )
        return Claim(**fields, bounds=again, trouble=words)
    upper = max(float(claim.bounds.upper), float(again.upper))
    bounds = Bounds(again.lower, again.estimate, upper, again.kind, again.status, again.engine)
    return Claim(**fields, bounds=bounds)


def _overview(table: Table, shown: list[int], claims: list[Claim], stop: frozenset[int], asked: bool) -> Rows:
    columns = [name for name in _SHOWN if name in table.columns]
    rows = []
    for row, claim in zip(shown, claims, strict=True):
        cells = [str(row), *(_cell(name, table[name][row]) for name in columns)]
        where = "epsilon" if claim.quantity == "delta" else "delta"
        given = "none" if math.isnan(claim.given) else f"{where} = {claim.given!r}"
        upper = f"{claim.quantity} <= {up(claim.upper, 6)}" if claim.may_be_claimed else "not to be claimed"
        rows.append([*cells, upper, given, claim.kind or "none", claim.status or "unknown"])
    caption = f"{len(shown):,} of {len(table):,} rows"
    if not asked and len(shown) < len(table):
        caption += f"; the limit is {MOST_SHOWN}, choose others with --rows"
    caption += ". Every figure that may be claimed was derived again from the row's parameters."
    header = ["row", *(name.replace("_", " ") for name in columns), "claim", "at", "kind", "status"]
    return Rows(caption, header, rows, stop)


def _details(table: Table, row: int) -> list[tuple[str, str]]:
    """The inputs of a row; what does not apply to it is left out."""
    names = [name for name in INPUTS if name in table.columns]
    cells = [(name, _cell(name, table[name][row])) for name in names]
    return [(name.replace("_", " ").capitalize(), cell) for name, cell in cells if cell != "none"]


def _cell(name: str, value: Any) -> str:
    """A cell in full: a run with a rounded noise multiplier could cost more than the page says."""
    if isinstance(value, str):
        return safe(value) or "none"
    number = float(value)
    if math.isnan(number):
        return "none"
    return f"{number:.0f}" if name in WHOLE and number.is_integer() and abs(number) <= LARGEST_COUNT else repr(number)


def is_result(path: str) -> bool:
    """Whether the name of a file is that of a result."""
    return Path(os.fspath(path)).suffix.lower() in (".csv", ".parquet")
