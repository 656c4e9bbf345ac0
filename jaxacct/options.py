"""The options that public calls share (relation, engine, rtol, memory_bytes), checked alike wherever they appear.

A further option (a backend, say) is one more field of `Options` and one more line of `options`: callers read the fields
by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxacct.mechanisms.base import RELATIONS
from jaxacct.validation import LARGEST_COUNT, Constraint, check_one, choice

__all__ = ["ENGINES", "GIBIBYTE", "SIDED", "Options", "options", "tolerance"]

ENGINES = ("auto", "contour", "lattice")
"""The words that `engine` may be; "auto" lets every engine answer where it suits."""
GIBIBYTE = 2**30
"""Bytes; the usual limit on the lattice engine's memory."""
SIDED = RELATIONS[:3]
"""The relations that calibrations know."""
LEAST_MEMORY = 2**24
"""Below this the shortest lattice of a large composition does not fit."""
_MEMORY = Constraint("use a whole number of bytes, such as 2**30", LEAST_MEMORY, LARGEST_COUNT, integral=True)


class Options(NamedTuple):
    """Checked options; their meaning is that of the parameters of `jaxacct.epsilon`."""

    relation: str = RELATIONS[0]
    engine: str = "auto"
    rtol: float = 1e-4
    memory_bytes: int = GIBIBYTE


def options(
    *,
    relation: Any = RELATIONS[0],
    engine: Any = "auto",
    rtol: Any = 1e-4,
    memory_bytes: Any = GIBIBYTE,
    relations: Sequence[str] = RELATIONS,
    least_rtol: float = 0.0,
) -> Options:
    """The options as a record, or one line that refuses the first that cannot be used.

    relations : those that the call knows.  least_rtol : the smallest rtol that it takes; 0 for any above 0.

    >>> options(rtol=0.01).rtol
    0.01
    >>> options(memory_bytes=-5)
    Traceback (most recent call last):
        ...
    jaxacct.validation.InputError: memory_bytes = -5 must be an integer >= 16777216 and <= 2**53; use a whole number \
of bytes, such as 2**30
    """
    words = choice("relation", relation, relations), choice("engine", engine, ENGINES)
    memory = check_one("memory_bytes", memory_bytes, _MEMORY, "one limit serves the whole batch")
    return Options(*words, tolerance(rtol, least_rtol), int(memory))


def tolerance(rtol: Any, least: float = 0.0, usual: str = "1e-4") -> float:
    """A relative width: one number from `least` (above it where that is 0) to below 1."""
    rule = Constraint(f"use {usual} or so", least, 1, lower_open=least == 0.0, upper_open=True)
    return float(check_one("rtol", rtol, rule, "one tolerance serves the whole batch"))
