"""Make the page that states a privacy claim, in the order in which the signer reads it."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import jaxacct
from jaxacct.core.bounds import KINDS, Bounds, explain
from jaxacct.core.files import replacing
from jaxacct.core.progress import waiting
from jaxacct.core.text import percent, plain_percent
from jaxacct.core.validation import OPEN_PROBABILITY, InputError, check_one
from jaxacct.interop.documents import to_json
from jaxacct.report import page, wording
from jaxacct.report.claim import Claim, down, safe, up
from jaxacct.report.readings import FALSE_POSITIVE_RATES, Readings, attacker_curve, readings_of
from jaxacct.report.subjects import Subject, subject_of
from jaxacct.sweeps.table import out_path
from jaxacct.training import Ledger

ENDINGS = (".html", ".htm", ".md")
_VERIFIED = (
    "“Verified” means that a second program, which shares no code with the first, started again from the definition of "
    "the privacy loss and enclosed delta in ball arithmetic on the right side of both ends of the bracket. “Refuted” "
    "means that one end is false. “Undecided” says nothing either way: the time ran out, or the mechanism is not "
    "covered. It needs the package python-flint: pip install 'jaxacct[verify]'. Verification is of the numbers. It "
    "does not check that the run did what the file says."
)


def report(
    subject: object,
    out: str | os.PathLike[str] | None = None,
    *,
    delta: float | None = None,
    rows: Sequence[int] | None = None,
    prior: float = 0.5,
    relation: str | None = None,
    model: str = "",
    organisation: str = "",
    contact: str = "",
) -> Report:
    """Make one page on a privacy claim, for the person who must sign it.

    The page states the claim (an upper end of epsilon or delta), its neighbouring relation and assumptions, the largest
    success of an attacker, every mechanism, how to verify the claim, and what the claim does not say. If an answer is
    not ok, the page says that it must not be claimed.

    Parameters
    ----------
    subject : Ledger, Plan, Table, Mechanism, the DataFrame that a sweep returned, or the path of a ledger, of a sweep's
        result (.csv or .parquet), or of a plan or a mechanism as JSON. Epsilon is derived again from the entries of a
        ledger, and from the parameters of each row of a sweep.
    out : path of the page, ending in .html or .md. An existing file is replaced.
    delta : float in (0, 1); the delta of the claim. A mechanism needs it. For a ledger the default is the delta of its
        last plan. A plan and the result of a sweep have their own delta.
    rows : numbers, from 0, of the rows of a sweep's result that the page describes in detail, at most 20. By default
        the page describes the first 3 rows in detail, and lists the first 50 rows in a table.
    prior : float in (0, 1); the probability, before the output is seen, that the record was used.
    relation : the neighbouring relation of a mechanism, by default "add_or_remove_one". Other subjects have their own.
    model, organisation, contact : the model's name, who releases it, and whom to ask; for the top of the page.

    Returns
    -------
    Report

    Raises
    ------
    InputError : if the subject cannot be read or reported (such as a damaged or open ledger), if an option does not
        apply to the subject, or if the page cannot be written.

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
    if out is not None:  # refuse a wrong path before the work
        _refuse_same(subject, _page_path(out))
    prior = check_one("prior", prior, OPEN_PROBABILITY, "a report has one")
    with waiting(None, "claims") as work:
        about = subject_of(subject, delta, rows, relation)
        found = []
        for claim in about.claims:
            found.append(readings_of(claim, prior))
            work.done += 1
    whose = {"Model": model, "Organisation": organisation, "Contact": contact}
    named = [(name, safe(text)) for name, text in whose.items() if text]
    blocks = tuple(_blocks(about, found, datetime.now(UTC), named))
    made = Report("Privacy report", tuple(about.claims), tuple(found), blocks, len(about.spent.stop))
    if out is not None:
        made.write(out)
    return made


@dataclass(frozen=True, eq=False)
class Report:
    """A page on one or several privacy claims, made by `jaxacct.report.report`.

    Parameters
    ----------
    title : str
    claims : the claims that the page states in detail.
    readings : the risks of each claim; None for a claim whose risks were not derived.
    blocks : the pieces of the page, in order.
    rows_not_claimed : how many rows of the page's table must not be claimed.

    References
    ----------
    jaxacct/report/README.md.

    >>> import jaxacct as ja
    >>> from jaxacct.report import report
    >>> page = report(ja.Gaussian(2.0), delta=1e-5)
    >>> page.claims[0].may_be_claimed, "# Privacy report" in page.to_markdown(), "<script" in page.to_html()
    (True, True, False)
    """

    title: str
    claims: tuple[Claim, ...]
    readings: tuple[Readings | None, ...]
    blocks: tuple[page.Block, ...]
    rows_not_claimed: int = 0

    @property
    def may_all_be_claimed(self) -> bool:
        """Whether every claim and every row of the table may be claimed."""
        return self.rows_not_claimed == 0 and all(claim.may_be_claimed for claim in self.claims)

    def to_html(self) -> str:
        """Return the page as one HTML file, which has no scripts and loads nothing."""
        return page.html(self.title, self.blocks)

    def to_markdown(self) -> str:
        """Return the page as Markdown, without the picture of the attacker's rates."""
        return page.markdown(self.blocks)

    def write(self, out: str | os.PathLike[str]) -> None:
        """Write the page to the file `out`: Markdown if `out` ends in .md, else HTML. Raise InputError on failure."""
        path = _page_path(out)
        text = self.to_markdown() if path.suffix.lower() == ".md" else self.to_html()
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _page_path(out: object) -> Path:
    """Return `out` as a path. Refuse an object that is no path, an ending that is not in ENDINGS, and a folder."""
    path = out_path(out, "the page, such as 'report.html'")
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: a report must end in {', '.join(ENDINGS)}")
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: it is a folder")
    return path


def _refuse_same(subject: Any, out: Path) -> None:
    """Refuse to write the page over the file of its subject, such as a ledger whose name ends in .html."""
    path = getattr(subject, "path", None) if isinstance(subject, Ledger) else subject
    if not isinstance(path, str | bytes | os.PathLike):
        return
    try:
        same = out.samefile(os.fsdecode(path))
    except (OSError, ValueError):  # one of the files does not exist, or `path` is not a valid path
        return
    if same:
        raise InputError(f"{out}: the report would overwrite what it is about; give another name")


def _blocks(
    subject: Subject, readings: Sequence[Readings | None], when: datetime, named: Sequence[tuple[str, str]]
) -> Iterator[page.Block]:
    """Yield the pieces of the page. `named` has (name, text) pairs of the model, the organisation and the contact."""
    path = safe(subject.path)
    yield page.Heading("Privacy report", 1)
    of = f"{subject.what}, {path}" if path else subject.what
    yield page.Paragraph(f"On {of}, made on {when:%d %B %Y}.")
    if named:
        yield page.Facts(named)
    yield page.Paragraph(subject.summary)
    many = len(subject.claims) > 1
    for place, (claim, risk) in enumerate(zip(subject.claims, readings, strict=True)):
        words = wording.in_words(claim)
        single = "What is claimed" if claim.happened else "What could be claimed"
        yield page.Heading(claim.title if many else single, new_page=place > 0)
        yield page.Statement(
            f"{claim.title}: the claim" if not many else "The claim",
            wording.figure(claim),
            wording.about(subject.unit, words) if claim.may_be_claimed else words,
            claim.may_be_claimed,
        )
        yield page.Facts([*subject.details[place], *_facts(claim, subject.unit)])
        yield from _risk(claim, risk, 3 if many else 2, subject.unit)
    yield page.Heading("What was assumed", new_page=many)
    kinds = [claim.kind for claim in subject.claims if claim.kind]
    yield page.Items(wording.assumptions(subject.mechanisms, kinds, subject.assumed, subject.unit))
    yield page.Heading("What the claim does not say")
    groups = {claim.group for claim in subject.claims} | {min(one.group_sizes()) for one in subject.mechanisms}
    yield page.Items([wording.about(subject.unit, text) for text in wording.limits(groups)])
    yield page.Heading("Every mechanism")
    yield subject.spent
    yield page.Heading("How to verify it")
    yield page.Paragraph("With jaxacct installed, and the file in place:" if path else "With jaxacct installed:")
    yield page.Code([safe(line) for line in subject.verify])
    if subject.note:
        yield page.Paragraph(subject.note)
    yield page.Paragraph(_VERIFIED)
    yield page.Heading("Record")
    yield page.Facts(_record(subject, when))
    yield page.Blanks(("Name", "Date", "Signature"))


def _facts(claim: Claim, unit: str) -> list[tuple[str, str]]:
    known_as = wording.of_group(claim.group, wording.RELATIONS.get(claim.relation, ""))
    relation = wording.about(unit, known_as) if known_as else safe(claim.relation)[:60]
    facts = [("Neighbouring relation", f"{relation}."), ("Unit of privacy", wording.unit_of(unit, claim.group))]
    if claim.bounds is not None:
        lower, kind, meaning = float(claim.bounds.lower), claim.kind, KINDS.get(claim.kind.split(":")[0], "")
        bracket = f"{down(lower, 9)} <= {claim.quantity} <= {up(claim.upper, 9)}"
        facts += [
            ("Bracket", "none" if np.isnan(lower) else bracket),
            ("Kind", f"{kind}: {meaning}" if meaning else "none"),
            ("Status", f"{claim.status}: {explain(claim.status, kind or 'certified')}"),
            ("Computed by", safe(str(claim.bounds.engine)) or "none"),
        ]
    return facts


def _risk(claim: Claim, readings: Readings | None, level: int, unit: str) -> Iterator[page.Block]:
    if not claim.may_be_claimed:
        return
    yield page.Heading("What an attacker can do", level)
    if readings is None:
        yield page.Paragraph(
            "The risks of this claim were not derived, since its profile is known in one direction only."
        )
        return
    kinds = sorted({str(kind) for bounds in readings if isinstance(bounds, Bounds) for kind in np.ravel(bounds.kind)})
    yield page.Paragraph(
        f"These are limits for every attacker, also one who knows all other {unit}s, the program and its settings. "
        f"The kind of these figures is {' or '.join(kinds)}."
    )
    yield page.Items([wording.about(unit, text) for text in wording.risks(readings, claim.relation, claim.group)])
    told = "; ".join(f"at {plain_percent(fpr)} at most {percent(readings.rate(fpr))}" for fpr in FALSE_POSITIVE_RATES)
    yield page.Picture(
        attacker_curve(readings),
        f"True-positive rate against false-positive rate: {told}.",
        "The rates of the best attacker, both axes logarithmic. The dashed line is guessing without the output.",
    )


def _record(subject: Subject, when: datetime) -> list[tuple[str, str]]:
    facts = [("Made", f"{when:%Y-%m-%d %H:%M:%S} UTC")]
    if subject.path:
        facts += [("File", safe(subject.path)), ("SHA-256 of the file", subject.sha256)]
    for claim in subject.claims:
        if claim.mechanism is not None:
            name = "SHA-256 of the mechanism's document"
            try:
                told = hashlib.sha256(to_json(claim.mechanism).encode()).hexdigest()
            except InputError as error:
                told = f"none: {safe(str(error))[:120]}"
            facts.append((name if len(subject.claims) == 1 else f"{name}, {claim.title}", told))
    facts.append(("jaxacct", jaxacct.__version__))
    facts += [(name, importlib.import_module(name).__version__) for name in ("jax", "jaxlib", "numpy", "scipy")]
    return [*facts, ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
