"""Numbers as text, rounded to the side on which a claim still holds."""

from __future__ import annotations

from decimal import Context, Decimal

from jaxacct.core.text import outward

__all__ = ["down", "percent", "plain_percent", "up"]


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
