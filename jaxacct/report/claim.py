"""`Claim`: one answer, and any reason against claiming it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxacct.core.bounds import Bounds, explain
from jaxacct.core.text import outward
from jaxacct.mechanisms import Mechanism


def safe(text: str) -> str:
    """Return text with a question mark in place of every character that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text)


def up(value: float, digits: int) -> str:
    """Write a number with at most `digits` significant digits, rounded up."""
    return outward(value, f".{digits}g", up=True)


def down(value: float, digits: int) -> str:
    """Write a number with at most `digits` significant digits, rounded down."""
    return outward(value, f".{digits}g", up=False)


CLAIMABLE = ("certified", "bound")
"""Kinds of `Bounds` whose upper end may be claimed without a further assumption."""


@dataclass(frozen=True, eq=False)
class Claim:
    """An answer, the mechanism that it is about, and any reason against claiming it.

    The claim is (epsilon <= upper) at the given delta, or (delta <= upper) at the given epsilon.

    Parameters
    ----------
    title : name of the mechanism or run that the answer is about.
    quantity : {"epsilon", "delta"}; the quantity that `bounds` brackets.
    given : the delta or the epsilon at which `bounds` holds.
    relation : the neighbouring relation.
    bounds : the bracket of one configuration; None where there is no answer.
    mechanism : the mechanism of the claim; None where no single mechanism describes it.
    happened : whether a run took place; False for a plan, a mechanism or a row of a sweep, which only describe a run.
    trouble : a reason against the claim that `bounds` does not show; empty if there is none.
    profile : tuple of (epsilon, delta), or None; if given, the risks follow from these points, not from `mechanism`.

    Raises
    ------
    ValueError : if `bounds` is a batch.

    References
    ----------
    jaxacct/report/README.md, "What may be claimed".

    >>> import jaxacct as ja
    >>> run = ja.Gaussian(2.0)
    >>> claim = Claim("one release", "epsilon", 1e-5, "add_or_remove_one", ja.epsilon(run, 1e-5), run)
    >>> claim.may_be_claimed, claim.upper == float(claim.bounds.upper)
    (True, True)
    """

    title: str
    quantity: str
    given: float
    relation: str
    bounds: Bounds | None
    mechanism: Mechanism | None = None
    happened: bool = False
    trouble: str = ""
    profile: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        if self.bounds is not None and self.bounds.shape:
            raise ValueError(f"bounds of shape {self.bounds.shape} must be of one configuration")

    @property
    def upper(self) -> float:
        """The upper end of `bounds`; NaN if `bounds` is None."""
        return math.nan if self.bounds is None else float(self.bounds.upper)

    @property
    def group(self) -> int:
        """How many records the claim covers together, such as those of one person; 1 if `mechanism` is None."""
        return 1 if self.mechanism is None else min(self.mechanism.group_sizes())

    @property
    def kind(self) -> str:
        """The `kind` of `bounds`, such as "certified"; empty if `bounds` is None."""
        return "" if self.bounds is None else str(self.bounds.kind)

    @property
    def status(self) -> str:
        """The `status` of `bounds`, such as "ok"; empty if `bounds` is None."""
        return "" if self.bounds is None else str(self.bounds.status)

    @property
    def obstacle(self) -> str:
        """The reason against the claim, in words; empty if the claim may be made."""
        if self.trouble:
            return self.trouble
        if self.bounds is None:
            return "There is no answer."
        claimable = bool(self.bounds.ok) and self.kind.split(":")[0] in CLAIMABLE and math.isfinite(self.upper)
        return "" if claimable else str(explain(self.status, self.kind))

    @property
    def may_be_claimed(self) -> bool:
        """Whether `trouble` is empty, the status is ok, `upper` is finite, and the kind is one of `CLAIMABLE`."""
        return self.obstacle == ""
