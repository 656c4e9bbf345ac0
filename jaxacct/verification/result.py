"""What a verification says, and the exceptions by which it stops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxacct.core import markup
from jaxacct.core.text import bracket
from jaxacct.core.types import Leaf


class NotCovered(Exception):
    """The verifier has no definition of the mechanism; the message names it."""


class OutOfTime(Exception):
    """The time limit was reached."""


class Unplanned(Exception):
    """No sum of a practicable size was found; the message says why."""


@dataclass(frozen=True, eq=False)
class Verification:
    """The outcome of `ja.verify`: arrays with one element per configuration, or plain values for one configuration.

    Parameters
    ----------
    status : str or array of str
        "verified", "refuted" or "undecided".
    digits : int or array of int
        Decimal digits to which delta is known.  Of all ends that had to be decided, it is the fewest.  It is 0 where
        nothing is known, and 99 where nothing had to be computed.
    lower, upper : float or array of float
        Enclosure of the true delta at the epsilon `at`.
    at : float or array of float
        For a bracket of epsilon its upper end, or its lower end where the upper end is infinite.  For a bracket of
        delta the epsilon given.
    seconds : float or array of float
        Time taken.
    explanation : str or array of str
        One line.

    >>> import jaxacct as ja
    >>> found = ja.verify(ja.Gaussian(2.0), ja.epsilon(ja.Gaussian(2.0), 1e-5), delta=1e-5)
    >>> found.status, found.lower <= found.upper, found.upper <= 1e-5
    ('verified', True, True)
    """

    status: Leaf
    digits: Leaf
    lower: Leaf
    upper: Leaf
    at: Leaf
    seconds: Leaf
    explanation: Leaf

    def _repr_html_(self) -> str:
        def cells(index: tuple[int, ...]) -> list[str]:
            names = ("status", "digits", "lower", "upper", "at", "explanation")
            status, digits, low, high, at, why = (np.asarray(getattr(self, name))[index] for name in names)
            return [str(status), str(digits), bracket(low, high, ".6g"), f"{at:.6g}", str(why)]

        head = ("status", "digits", "delta", "at epsilon", "explanation")
        return markup.batch("Verification", head, np.shape(self.status), cells)
