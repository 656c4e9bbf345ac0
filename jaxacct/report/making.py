"""`report`: from a file or an object to its page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.core.progress import Progress
from jaxacct.core.validation import OPEN_PROBABILITY, InputError, check_one, shown
from jaxacct.interop.documents import FORMAT, from_json
from jaxacct.mechanisms import Mechanism
from jaxacct.report.claim import Claim
from jaxacct.report.content import TITLE, page
from jaxacct.report.from_ledger import from_ledger, read_ledger
from jaxacct.report.from_mechanism import from_mechanism
from jaxacct.report.from_plan import from_plan
from jaxacct.report.from_table import from_table, is_result, read_result
from jaxacct.report.readings import Readings, by_points, points_of, read
from jaxacct.report.record import Report, page_path
from jaxacct.report.subject import Subject, digest, origin
from jaxacct.selection import AdaptiveSelection, Selection
from jaxacct.sweeps import Table
from jaxacct.training import Ledger, Plan
from jaxacct.training.plan.plan import load

__all__ = ["report"]

_LONGEST_DOCUMENT = 2**24
"""Bytes up to which a file may be a plan or a mechanism; a longer one is a ledger."""
_BOTH_WAYS = ("add_or_remove_one", "replace_one", "zero_out")
"""Relations under which a profile holds in both directions."""
_TICKS_OF_A_CLAIM = 6
"""Steps of the progress bar for each claim."""


def report(
    subject: Any,
    out: str | os.PathLike[str] | None = None,
    *,
    delta: float | None = None,
    rows: Sequence[int] | None = None,
    prior: float = 0.5,
    relation: str | None = None,
) -> Report:
    """One page on a privacy claim, for somebody who must sign it.

    The page says what is claimed in words, (epsilon <= upper) at a delta; under which neighbouring relation and which
    assumptions; what an attacker can reach at most; every mechanism; how to verify it; and what the claim does not say.
    Every figure that a claim relies on is the upper end of a bracket.  What is not ok is shown as not to be claimed.

    Parameters
    ----------
    subject : path, Ledger, Plan, Table or Mechanism
        A path is that of a ledger, of the result of a sweep (.csv or .parquet), of a plan or of a mechanism as JSON.
        The epsilon of a ledger is derived again from its entries, and that of a row from its parameters.
    out : path ending in .html or .md, optional
        Where the page is written; a file that is there is replaced.
    delta : float in (0, 1), optional
        Of a ledger (by default that of its last plan), and of a mechanism, which needs one.
    rows : row numbers from 0, optional
        Of a result: up to 20 rows to be told in detail; by default the first 3, and the first 50 in a table.
    prior : float in (0, 1)
        The probability, stated beforehand, from which an attacker starts.
    relation : str, optional
        Of a mechanism, "add_or_remove_one" by default; all others have their own.

    Returns
    -------
    Report

    Raises
    ------
    InputError
        One line for whatever cannot be read, reported or written: a ledger that is damaged or still being written, a
        file that is none of these, options that are for another subject.

    References
    ----------
    jaxacct/report/README.md.

    >>> import jaxacct as ja
    >>> from jaxacct.report import report
    >>> page = report(ja.Gaussian(2.0), delta=1e-5)
    >>> page.claims[0].upper == float(ja.epsilon(ja.Gaussian(2.0), 1e-5).upper)
    True
    >>> round(page.readings[0].rate(0.01), 4)
    0.0339
    """
    if out is not None:
        _refuse_same(subject, page_path(out))  # refused before the work
    prior = check_one("prior", prior, OPEN_PROBABILITY, "a report has one")
    bar = Progress(_TICKS_OF_A_CLAIM, None, unit="steps", pauses=(0.0, 60.0))
    done, most = 0, _TICKS_OF_A_CLAIM - 1

    def tick(what: str) -> None:
        nonlocal done
        bar.update(min(done, most), f"  {what}")
        done += 1

    try:
        about = _subject(subject, delta, rows, relation, tick)
        bar.update(_TICKS_OF_A_CLAIM, "  what is claimed")
        bar.close()
        bar = Progress(_TICKS_OF_A_CLAIM * len(about.claims), None, unit="steps", pauses=(0.0, 60.0))
        found = []
        for place, claim in enumerate(about.claims):
            done = _TICKS_OF_A_CLAIM * place
            most = done + _TICKS_OF_A_CLAIM - 1
            found.append(_readings(claim, prior, tick))
        bar.update(_TICKS_OF_A_CLAIM * len(about.claims), "  risks")
    finally:
        bar.close()
    made = Report(TITLE, tuple(about.claims), tuple(found), page(about, found), len(about.spent.stop))
    if out is not None:
        made.write(out)
    return made


def _refuse_same(subject: Any, out: Path) -> None:
    """Refuse a page that would take the place of what it is about; a ledger may have any name."""
    path = getattr(subject, "path", None) if isinstance(subject, Ledger) else subject
    if not isinstance(path, str | bytes | os.PathLike):
        return
    try:
        same = out.samefile(os.fsdecode(path))
    except (OSError, ValueError):  # one of them is not there, or is no path at all
        return
    if same:
        raise InputError(f"{out}: the report would overwrite what it is about; give another name")


def _subject(
    subject: Any, delta: float | None, rows: Sequence[int] | None, relation: str | None, tick: Callable[[str], None]
) -> Subject:
    kind = _kind(subject)
    if delta is not None and kind in ("result", "plan"):
        raise InputError(f"delta is for a ledger or a mechanism; a {kind} has its own")
    if relation is not None and kind != "mechanism":
        raise InputError(f"relation is for a mechanism; a {kind} has its own")
    relation = relation or "add_or_remove_one"
    if rows is not None and kind != "result":
        raise InputError("rows is for the result of a sweep; leave it out")
    if not isinstance(subject, str | os.PathLike):
        match kind:
            case "ledger":
                return from_ledger(subject, delta, tick)
            case "plan":
                return from_plan(subject, tick)
            case "result":
                return from_table(subject, rows, tick)
        return from_mechanism(subject, delta, relation, tick)
    path = os.fsdecode(subject)
    if kind == "ledger":
        return read_ledger(path, delta, tick)
    if kind == "result":
        return read_result(path, rows, tick)
    before = digest(path)
    text = Path(path).read_text(encoding="utf-8")
    try:
        if kind == "plan":
            found = from_plan(Plan.from_json(text), tick, path)
        else:
            found = from_mechanism(from_json(text), delta, relation, tick, path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Subject(**{**vars(found), "origin": origin(path, before)})


def _kind(subject: Any) -> str:
    """What a subject is: "ledger", "result", "plan" or "mechanism"."""
    for kind, word in ((Ledger, "ledger"), (Plan, "plan"), (Table, "result"), (Mechanism, "mechanism")):
        if isinstance(subject, kind):
            return word
    if not isinstance(subject, str | os.PathLike) or not os.fspath(subject):
        raise InputError(
            f"subject = {shown(subject)} must be a Ledger, a Plan, a Table, a Mechanism or the path of a file"
        )
    path = os.fsdecode(subject)
    return "result" if is_result(path) else _document(path)


def _document(path: str) -> str:
    """Whether a file is a plan, a mechanism, or (all others) to be read as a ledger."""
    if Path(path).exists() and not Path(path).is_file():
        raise InputError(f"{path}: cannot be read: it is a folder, a pipe or a device; give the path of a file")
    try:
        with Path(path).open("rb") as file:
            text = file.read(_LONGEST_DOCUMENT + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        node = load(text.decode()) if len(text) <= _LONGEST_DOCUMENT else None
    except ValueError:
        node = None
    form = node.get("format") if isinstance(node, dict) else None
    return {"jaxacct.plan": "plan", FORMAT: "mechanism"}.get(str(form), "ledger")


def _readings(claim: Claim, prior: float, tick: Callable[[str], None]) -> Readings | None:
    """The risks of a claim: of its mechanism, or of points of its profile where that is all there is, or too slow."""
    if not claim.may_be_claimed:
        return None
    mechanism, relation, points = claim.mechanism, claim.relation, claim.profile
    if points is None and isinstance(mechanism, Selection | AdaptiveSelection):
        points = tuple(
            points_of(mechanism, relation, claim.upper if claim.quantity == "epsilon" else claim.given, tick)
        )
    if points is not None:
        if relation not in _BOTH_WAYS:
            return None
        pair = (claim.upper, claim.given) if claim.quantity == "epsilon" else (claim.given, claim.upper)
        stand_in = by_points([*points, pair])
        found = read(stand_in, "add_or_remove_one", prior, tick).as_bounds() if stand_in is not None else None
    else:
        found = read(mechanism, relation, prior, tick) if mechanism is not None else None
    if found is None or not all(np.isfinite(b.upper).all() for b in found if hasattr(b, "upper")):
        return None
    return found
