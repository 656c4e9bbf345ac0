"""The content of a page: a subject and its risks as blocks, in the order in which somebody who signs reads them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np

import jaxacct
from jaxacct.core.validation import InputError
from jaxacct.interop.documents import to_json
from jaxacct.mechanisms import Mechanism
from jaxacct.report import wording
from jaxacct.report.blocks import Blanks, Block, Code, Facts, Heading, Items, Paragraph, Picture, Statement
from jaxacct.report.claim import Claim
from jaxacct.report.picture import attacker_curve
from jaxacct.report.readings import FALSE_POSITIVE_RATES, Readings
from jaxacct.report.rounding import down, percent, plain_percent, up
from jaxacct.report.subject import Subject

__all__ = ["page"]

TITLE = "Privacy report"
_VERIFIED = (
    "“Verified” means that a second program, which shares no code with the first, started again from the definition of "
    "the privacy loss and enclosed delta in ball arithmetic on the right side of both ends of the bracket. “Refuted” "
    "means that one end is false. “Undecided” says nothing either way: the time ran out, or the mechanism is "
    "not covered. "
    "It needs the package python-flint: pip install 'jaxacct[verify]'. Verification is of the numbers. It does not "
    "check that the run did what the file says."
)


def page(subject: Subject, readings: Sequence[Readings | None], when: datetime | None = None) -> tuple[Block, ...]:
    """All blocks of a page."""
    return tuple(_blocks(subject, readings, when or datetime.now(UTC)))


def _blocks(subject: Subject, readings: Sequence[Readings | None], when: datetime) -> Iterator[Block]:
    yield Heading(TITLE, 1)
    of = f"{subject.what}, {wording.safe(subject.origin.path)}" if subject.origin.path else subject.what
    yield Paragraph(f"On {of}, made on {when:%d %B %Y}.")
    yield Paragraph(subject.summary)
    many = len(subject.claims) > 1
    for place, (claim, risk) in enumerate(zip(subject.claims, readings, strict=True)):
        words = wording.in_words(claim)
        single = "What is claimed" if claim.happened else "What could be claimed"
        yield Heading(claim.title if many else single, new_page=place > 0)
        yield Statement(
            f"{claim.title}: the claim" if not many else "The claim",
            wording.figure(claim),
            wording.about(subject.unit, words) if claim.may_be_claimed else words,
            claim.may_be_claimed,
        )
        yield Facts([*subject.details[place], *_facts(claim, subject.unit)])
        yield from _risk(claim, risk, 3 if many else 2, subject.unit)
    yield Heading("What was assumed", new_page=many)
    kinds = [claim.kind for claim in subject.claims if claim.kind]
    yield Items(wording.assumptions(subject.mechanisms, kinds, subject.assumed, subject.unit))
    yield Heading("What the claim does not say")
    yield Items(wording.limits(subject.unit))
    yield Heading("Every mechanism")
    yield subject.spent
    yield Heading("How to verify it")
    yield Paragraph(
        "With jaxacct installed, and the file in place:" if subject.origin.path else "With jaxacct installed:"
    )
    yield Code([wording.safe(line) for line in subject.verify])
    if subject.note:
        yield Paragraph(subject.note)
    yield Paragraph(_VERIFIED)
    yield Heading("Record")
    yield Facts(_record(subject, when))
    yield Blanks(("Name", "Date", "Signature"))


def _facts(claim: Claim, unit: str) -> list[tuple[str, str]]:
    known_as = wording.RELATIONS.get(claim.relation)
    relation = wording.about(unit, known_as) if known_as else wording.safe(claim.relation)[:60]
    facts = [
        ("Neighbouring relation", f"{relation}."),
        ("Unit of privacy", wording.UNIT[unit]),
    ]
    if claim.bounds is not None:
        ends = [float(getattr(claim.bounds, name)) for name in ("lower", "upper")]
        known = ends[0] == ends[0]
        bracket = f"{down(ends[0], 9)} <= {claim.quantity} <= {up(ends[1], 9)}" if known else "none"
        facts += [
            ("Bracket", bracket),
            ("Kind", wording.kind_in_words(claim.kind)),
            ("Status", wording.described(claim.status, claim.kind)),
            ("Computed by", wording.safe(str(claim.bounds.engine)) or "none"),
        ]
    return facts


def _risk(claim: Claim, readings: Readings | None, level: int, unit: str) -> Iterator[Block]:
    if not claim.may_be_claimed:
        return
    yield Heading("What an attacker can do", level)
    if readings is None:
        yield Paragraph("The risks of this claim were not derived, since its profile is known in one direction only.")
        return
    yield Paragraph(
        f"These are limits for every attacker, also one who knows all other {unit}s, the program and its settings. "
        f"The kind of these figures is {' or '.join(_kinds(readings))}."
    )
    yield Items([wording.about(unit, text) for text in wording.risks(readings, claim.relation)])
    told = "; ".join(f"at {plain_percent(fpr)} at most {percent(readings.rate(fpr))}" for fpr in FALSE_POSITIVE_RATES)
    yield Picture(
        attacker_curve(readings),
        f"True-positive rate against false-positive rate: {told}.",
        "The rates of the best attacker, both axes logarithmic. The dashed line is guessing without the output.",
    )


def _kinds(readings: Readings) -> list[str]:
    """The kinds of the figures, each once."""
    every = (readings.tpr, readings.advantage, readings.posterior, readings.bayes_success)
    return sorted({str(kind) for bounds in every for kind in np.ravel(bounds.kind)})


def _record(subject: Subject, when: datetime) -> list[tuple[str, str]]:
    facts = [("Made", f"{when:%Y-%m-%d %H:%M:%S} UTC")]
    if subject.origin.path:
        facts += [("File", wording.safe(subject.origin.path)), ("SHA-256 of the file", subject.origin.sha256)]
    for claim in subject.claims:
        if claim.mechanism is not None:
            name = "SHA-256 of the mechanism's document"
            facts.append((name if len(subject.claims) == 1 else f"{name}, {claim.title}", _document(claim.mechanism)))
    facts.append(("jaxacct", jaxacct.__version__))
    facts += [(name, _version(name)) for name in ("jax", "jaxlib", "numpy", "scipy")]
    return [*facts, ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]


def _document(mechanism: Mechanism) -> str:
    """The digest of what `jaxacct.interop.to_json` writes of a mechanism."""
    try:
        return hashlib.sha256(to_json(mechanism).encode()).hexdigest()
    except InputError as error:
        return f"none: {wording.safe(str(error))[:120]}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
