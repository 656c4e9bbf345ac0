"""Subject: what a report is about, whatever it was read from."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.report.blocks import Rows
from jaxacct.report.claim import Claim

__all__ = ["Origin", "Subject", "counted", "digest", "origin", "quoted"]

_PIECE = 2**20
"""Bytes that are read at a time."""
_MOST_RELEASES = 500
"""Kinds of release that a page lists."""


@dataclass(frozen=True)
class Origin:
    """The file that was read: its path as it was given, and its SHA-256 digest.  Both are empty for a Python object."""

    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, eq=False)
class Subject:
    """What a page is about.

    what : what was read, in words.  summary : one sentence on what happened, or would happen.
    claims : those to be told in detail.  spent : every mechanism, as a table.
    details : names and what they are, for each claim.
    mechanisms : all that takes part, for the assumptions.  assumed : assumptions of its own.
    verify : command lines, or lines of Python, that check the claims.  note : what they do not check.  origin : the
    file.  unit : what neighbours differ in, "record" or "user".
    """

    what: str
    summary: str
    claims: Sequence[Claim]
    spent: Rows
    details: Sequence[Sequence[tuple[str, str]]]
    mechanisms: Sequence[Mechanism]
    assumed: Sequence[str]
    verify: Sequence[str]
    note: str = ""
    origin: Origin = Origin()
    unit: str = "record"


def counted(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Rows:
    """A table of releases, cut at a stated limit."""
    if len(rows) > _MOST_RELEASES:
        caption += f" The first {_MOST_RELEASES:,} of {len(rows):,} kinds are shown; epsilon counts all."
    return Rows(caption, header, rows[:_MOST_RELEASES])


def quoted(path: str) -> str:
    """A path as a word of a command line, which no command takes for an option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def digest(path: str) -> str:
    """The SHA-256 digest of a file; InputError where it cannot be read."""
    found = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_PIECE):
                found.update(piece)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return found.hexdigest()


def origin(path: str, before: str) -> Origin:
    """Where a subject was read from; InputError where the file changed while it was read."""
    if digest(path) != before:
        raise InputError(f"{path}: was changed while it was read; make the report when nothing writes to it")
    return Origin(path, before)
