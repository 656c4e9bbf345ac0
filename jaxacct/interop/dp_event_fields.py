"""Reading the fields of a DpEvent from a stranger: plain numbers only, and refusals that say where they stand."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np

from jaxacct.core.validation import InputError

__all__ = ["EventError", "checked", "number", "numbers", "refuse", "rounded", "whole"]

MAX_SENSITIVITIES = 1000
"""Most numbers of a field that is a list."""
LARGEST_WHOLE = 2**53
"""Largest whole number: float64 holds all up to here."""


class EventError(InputError):
    """An event was refused; `event` is the one at fault, the message one line that says where it stands."""

    def __init__(self, path: str, event: object, reason: str) -> None:
        super().__init__(f"{path or 'event'}: {reason}")
        self.event = event


def refuse(event: Any, path: str, reason: str) -> NoReturn:
    """Raise an EventError for the event at a path."""
    raise EventError(path.lstrip("."), event, reason)


def checked(event: Any, path: str, build: Callable[[], Any]) -> Any:
    """What `build` returns; its InputError becomes one of this event."""
    try:
        return build()
    except InputError as error:
        raise EventError(path.lstrip("."), event, str(error)) from None


def number(event: Any, name: str, path: str) -> int | float:
    """A field as a Python number; nothing but plain and NumPy scalars is looked into."""
    return _plain(event, name, getattr(event, name), path)


def numbers(event: Any, name: str, path: str) -> list[float]:
    """A field that is a list of numbers."""
    values = getattr(event, name)
    flat = type(values) in (list, tuple) or (type(values) is np.ndarray and values.ndim == 1)
    if not flat or not 0 < len(values) <= MAX_SENSITIVITIES:
        refuse(event, path, f"{name} must be a list of 1 to {MAX_SENSITIVITIES} numbers; use [0.0, 1.0]")
    return [_plain(event, f"{name}[{i}]", value, path) for i, value in enumerate(values)]


def whole(event: Any, name: str, path: str, least: int, most: int = LARGEST_WHOLE) -> int:
    """A field that is a whole number from `least` to `most`."""
    value = number(event, name, path)
    if not least <= value <= most or value != int(value):
        largest = "2**53" if most == LARGEST_WHOLE else str(most)
        refuse(event, path, f"{name} = {value!r:.30} must be a whole number from {least} to {largest}; use an integer")
    return int(value)


def rounded(exact: Fraction, towards: float) -> float:
    """The nearest float64 on the side of the exact value that `towards` is on.

    >>> rounded(Fraction(1, 10), 0.0) <= Fraction(1, 10) <= rounded(Fraction(1, 10), 1.0)
    True
    """
    value = float(exact)
    beyond = Fraction(value) > exact if towards < exact else Fraction(value) < exact
    return math.nextafter(value, towards) if beyond else value


def _plain(event: Any, name: str, value: Any, path: str) -> int | float:
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if type(value) not in (int, float):
        refuse(event, path, f"{name} must be a number, not {type(value).__name__:.60}; use a Python float or int")
    return value
