"""`--rows`: row numbers with commas between."""

from __future__ import annotations

import re

from jaxacct.core.validation import InputError

__all__ = ["row_numbers"]


def row_numbers(text: str | None) -> list[int] | None:
    """The numbers of rows, from 0; None where the option was left out.

    >>> row_numbers("0,2,4"), row_numbers(None)
    ([0, 2, 4], None)
    """
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise InputError(f"rows = {text!r} must be a row number from 0, or several with commas between")
    return [int(word) for word in text.split(",")]
