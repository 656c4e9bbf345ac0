"""Writes numbers for people and for JSON: it rounds ends outward, and writes NaN and infinities as words."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Container, Sequence
from decimal import Context, Decimal
from typing import Any

import numpy as np

WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Words for the values that JSON cannot write as numbers."""
_FILL = re.compile(r"^.?[<>=^]", re.DOTALL)
"""Pattern of the fill and alignment with which a format specification may begin, such as "*>"."""
_NUMBER = re.compile(r"[-+]?\d[\d,_]*(\.\d*)?([eE][-+]?\d+)?%?")


def outward(value: float | Decimal, spec: str, up: bool) -> str:
    """Write a number in the format `spec`. Its exact value is rounded up if `up`, otherwise down.

    >>> outward(4.3749, ".3g", up=True), outward(4.3771, ".3g", up=False), outward(1e-5, ".3g", up=True)
    ('4.38', '4.37', '1.01e-05')
    """
    number = float(value)
    if not math.isfinite(number):
        return format(number, spec)
    exact, there, step = Decimal(value), number, math.ulp(number)
    unfilled = _FILL.sub("", spec)  # drops a fill such as "0": `_on_the_side` would take it for a digit
    while not _on_the_side(format(there, unfilled), exact, up):
        there = number + step if up else number - step
        step *= 2.0
        if not math.isfinite(there):
            return format(math.inf if up else -math.inf, spec)
    return format(there, spec)


def _on_the_side(text: str, exact: Decimal, up: bool) -> bool:
    found = _NUMBER.search(text)
    if found is None:
        return ("-" not in text) == up  # the text is "inf" or "-inf": the number times 100, for per cent, overflowed
    shown = Decimal(re.sub("[,_%]", "", found[0]))
    # 2000 digits are enough to divide any percentage by 100 without rounding
    shown = shown.scaleb(-2, Context(prec=2000)) if found[0].endswith("%") else shown
    return shown >= exact if up else shown <= exact


def percent(value: float) -> str:
    """Write a probability in per cent with three digits, rounded up, but never above 100.

    >>> percent(0.0291392), percent(0.9999999), percent(0.0)
    ('2.92 %', '100 %', '0 %')
    """
    if not value < 1.0:
        return "100 %"
    return f"{outward(Decimal(value).scaleb(2, Context(prec=2000)), '.3g', up=True)} %"


def plain_percent(value: float, other: bool = False) -> str:
    """Write a given probability p in per cent with every digit; if `other`, write 1 - p instead.

    >>> plain_percent(0.01), plain_percent(0.001), plain_percent(0.07, other=True), plain_percent(0.9999999999)
    ('1 %', '0.1 %', '93 %', '99.99999999 %')
    """
    given = Decimal(repr(float(value)))
    if other:
        given = Context(prec=400).subtract(Decimal(1), given)
    exact = given.scaleb(2, Context(prec=400))
    text = f"{exact:f}" if exact.adjusted() > -5 else f"{exact:e}"
    if len(text) > 24:  # only 1 - p with p near 0 is so long
        return "almost 100 %"
    return f"{text.rstrip('0').rstrip('.') if '.' in text and 'e' not in text else text} %"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Return the rows of a table as lines. Columns whose index is in `left` are left-aligned, others right-aligned."""
    forms = [f"{'<' if i in left else '>'}{max(map(len, column))}" for i, column in enumerate(zip(*rows, strict=True))]
    return ["  ".join(map(format, row, forms)) for row in rows]


def bracket(lower: float, upper: float, spec: str) -> str:
    """Return the text "[lower, upper]" with each end rounded outward."""
    return f"[{outward(lower, spec, up=False)}, {outward(upper, spec, up=True)}]"


def exact(value: float) -> str:
    """Write a given number with all its digits, so that it can be read back.

    >>> exact(1 / 7000), exact(np.float64(1e-5)), exact(2)
    ('0.00014285714285714287', '1e-05', '2.0')
    """
    return repr(float(value))


def listed(values: Any, form: Callable[[float], str], prefix: str = "") -> str:
    """Write one number, or an array of them as NumPy does, each as `form` writes it. A long array is cut."""
    written: Any = {"float_kind": form}
    return np.array2string(np.asarray(values, np.float64), prefix=prefix, threshold=8, formatter=written)


def unusual(relation: str, unit: str = "record") -> str:
    """Return words to add to a claim: its neighbouring relation and its unit, each only if it is not the usual one.

    >>> unusual("zero_out", "user"), unusual("add_or_remove_one")
    (', zero_out, unit user', '')
    """
    words = [] if relation == "add_or_remove_one" else [relation]
    return "".join(f", {word}" for word in words + ([] if unit == "record" else [f"unit {unit}"]))


def plain(value: Any) -> Any:
    """Convert numbers, words or arrays of them to plain Python for JSON, with NaN and infinities as words.

    >>> plain(np.array([1.5, np.inf])), plain(np.bool_(True)), plain("ok")
    ([1.5, 'inf'], True, 'ok')
    """
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value] if value.ndim else plain(value[()])
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    item = value.item() if isinstance(value, np.generic) else value
    return repr(item) if isinstance(item, float) and not math.isfinite(item) else item


def numbers(node: Any) -> Any:
    """Convert the output of `plain` back: the texts "nan", "inf" and "-inf" become numbers, all else stays."""
    if isinstance(node, list):
        return [numbers(item) for item in node]
    return WORDS.get(node, node) if isinstance(node, str) else node


def plain_repr(record: Any) -> str:
    """Return the `repr` of a dataclass, with NumPy's numbers as plain ones."""
    with np.printoptions(legacy="1.25"):
        return f"{type(record).__name__}({', '.join(f'{n}={x!r}' for n, x in vars(record).items())})"


def plain_record(record: Any) -> dict[str, Any]:
    """Return the fields of a result as plain Python; a field with `to_dict` is converted by that method."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: value.to_dict() if hasattr(value, "to_dict") else plain(value) for name, value in fields.items()}
