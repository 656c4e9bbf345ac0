"""What a verification says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["STATUSES", "NotCovered", "OutOfTime", "Unplanned", "Verification"]

STATUSES = {
    "verified": "both ends of the bracket were enclosed on their right side",
    "refuted": "an end of the bracket was enclosed on its wrong side: the bracket is false",
    "undecided": "neither was possible in the time, or the mechanism is not covered",
}


class NotCovered(Exception):
    """The mechanism has no definition here; the message says which."""


class OutOfTime(Exception):
    """The time limit was reached."""


class Unplanned(Exception):
    """No sum of a practicable size was found; the message says why."""


@dataclass(frozen=True, eq=False)
class Verification:
    """The outcome of `ja.verify`, one element per configuration (plain values for one configuration).

    status : "verified", "refuted" or "undecided".
    digits : decimal digits to which delta is known at every end that had to be decided, the fewest of them (0 where
        nothing is known, 99 where nothing had to be computed).
    lower, upper : float64 enclosure of the true delta at the epsilon `at`.
    at : the bracket's upper end for a bracket of epsilon (its lower end where upper is infinite), and the epsilon
        given for a bracket of delta.
    seconds : time taken.
    explanation : one line.
    """

    status: Any
    digits: Any
    lower: Any
    upper: Any
    at: Any
    seconds: Any
    explanation: Any
