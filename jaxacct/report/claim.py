"""Claim: one answer that a report states, whether it may be published, and its figures as safe text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal

from jaxacct.core.bounds import Bounds, explain
from jaxacct.core.text import outward
from jaxacct.mechanisms import Mechanism


def safe(text: str) -> str:
    """Text from a file, with everything that does not print as a question mark."""
    return "".join(c if c.isprintable() else "?" for c in text)


def up(value: float, digits: int) -> str:
    """A number of at most `digits` significant digits, rounded up.

    >>> up(1.23401, 4), up(float("inf"), 4)
    ('1.235', 'inf')
    """
    return outward(value, f".{digits}g", up=True)


def down(value: float, digits: int) -> str:
    """A number of at most `digits` significant digits, rounded down.

    >>> down(1.23499, 4)
    '1.234'
    """
    return outward(value, f".{digits}g", up=False)


def percent(value: float) -> str:
    """A probability in per cent with three digits, rounded up, and never above 100.

    >>> percent(0.0291392), percent(0.9999999), percent(0.0)
    ('2.92 %', '100 %', '0 %')
    """
    if not value < 1.0:
        return "100 %"
    return f"{outward(Decimal(value).scaleb(2, Context(prec=2000)), '.3g', up=True)} %"


def plain_percent(value: float, other: bool = False) -> str:
    """A probability that was given, not computed, or (`other`) 1 less it, in per cent with every digit.

    >>> plain_percent(0.01), plain_percent(0.001), plain_percent(0.07, other=True), plain_percent(0.9999999999)
    ('1 %', '0.1 %', '93 %', '99.99999999 %')
    """
    given = Decimal(repr(float(value)))
    if other:
        given = Context(prec=400).subtract(Decimal(1), given)
    exact = given.scaleb(2, Context(prec=400))
    text = f"{exact:f}" if exact.adjusted() > -5 else f"{exact:e}"
    if len(text) > 24:  # 1 less a number near 0
        return "almost 100 %"
    return f"{text.rstrip('0').rstrip('.') if '.' in text and 'e' not in text else text} %"


CLAIMABLE = ("certified", "bound")
"""Kinds whose upper end may be claimed without a further assumption."""


@dataclass(frozen=True, eq=False)
class Claim:
    """One answer, its subject, and any obstacle to claiming it.

    What may be claimed is `upper`:

        (epsilon <= upper) at the given delta, or (delta <= upper) at the given epsilon.

    Parameters
    ----------
    title : str
        What the answer is of.
    quantity : {"epsilon", "delta"}
        What `bounds` brackets.
    given : float
        The delta or the epsilon at which it does.
    relation : str
        The neighbouring relation.
    bounds : Bounds or None
        The bracket of one configuration; None where there is none.
    mechanism : Mechanism or None
        What is claimed of, where it can be written down as one mechanism.
    happened : bool
        False of a plan or a configuration, which says what would be released.
    trouble : str
        Why nothing may be claimed although `bounds` may say ok; empty where nothing stands in the way.
    profile : tuple of (epsilon, delta), or None
        Points of the privacy profile from which the risks are read, where the mechanism itself does not give them.

    Raises
    ------
    ValueError
        Bounds of a batch.

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
        """The end that a claim may use; NaN where there is none."""
        return math.nan if self.bounds is None else float(self.bounds.upper)

    @property
    def kind(self) -> str:
        """What kind of statement the bounds are; empty where there are none."""
        return "" if self.bounds is None else str(self.bounds.kind)

    @property
    def status(self) -> str:
        """The status of the bounds; empty where there are none."""
        return "" if self.bounds is None else str(self.bounds.status)

    @property
    def obstacle(self) -> str:
        """Why nothing may be claimed, in words; empty where it may."""
        if self.trouble:
            return self.trouble
        if self.bounds is None:
            return "There is no answer."
        if not bool(self.bounds.ok) or self.kind.split(":")[0] not in CLAIMABLE:
            return str(explain(self.status, self.kind))
        if not math.isfinite(self.upper):
            return str(explain(self.status, self.kind))
        return ""

    @property
    def may_be_claimed(self) -> bool:
        """Whether the status needs no action, the kind needs no further assumption, and the upper end is finite."""
        return self.obstacle == ""
