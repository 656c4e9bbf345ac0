"""The options that public calls share (relation, engine, rtol, memory_bytes), checked alike wherever they appear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxacct.mechanisms.base import RELATIONS, Mechanism
from jaxacct.validation import LARGEST_COUNT, Constraint, InputError, check_one, choice, shown

__all__ = ["ENGINES", "GIBIBYTE", "SIDED", "Options", "mechanism_for", "options", "tolerance"]

ENGINES = ("auto", "contour", "lattice")
GIBIBYTE = 2**30
SIDED = RELATIONS[:3]
"""The relations that calibrations know."""
LEAST_MEMORY = 2**24
"""Below this the shortest lattice of a large composition does not fit."""
_MEMORY = Constraint("use a whole number of bytes, such as 2**30", LEAST_MEMORY, LARGEST_COUNT, integral=True)
_HINT = "use one such as Gaussian(noise_multiplier=1.0)"


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


def mechanism_for(value: Any) -> Mechanism:
    """The value, if it is a mechanism; refused in one line otherwise."""
    if isinstance(value, list | tuple) and any(isinstance(item, Mechanism) for item in value):
        raise InputError(
            f"mechanism is a {type(value).__name__} of {len(value)}; compose them with ja.compose(*mechanisms), "
            "or for a batch give one mechanism whose fields are arrays"
        )
    if isinstance(value, type) and issubclass(value, Mechanism):
        raise InputError(f"mechanism = {value.__name__} is a class; {_HINT}")
    if not isinstance(value, Mechanism):
        raise InputError(f"mechanism = {shown(value)} of type {type(value).__name__} is not a mechanism; {_HINT}")
    return value
