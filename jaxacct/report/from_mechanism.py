"""The subject of a mechanism, as Python holds it or as its JSON document says."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.validation import DELTA, RELATIONS, InputError, check_one, choice
from jaxacct.interop.documents import to_json
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.combinators import Composed
from jaxacct.report.blocks import Rows
from jaxacct.report.claim import Claim
from jaxacct.report.subject import Subject, quoted
from jaxacct.report.wording import GENERAL, safe

__all__ = ["from_mechanism"]


_LONGEST = 600
"""Characters of a mechanism that a page shows."""


def _typed(mechanism: Mechanism) -> str:
    """A mechanism with every digit of its numbers."""
    with np.printoptions(floatmode="unique", threshold=40):
        return safe(repr(mechanism))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... (cut)"


def _made(mechanism: Mechanism) -> list[str]:
    """Lines of Python that make the mechanism again, to the last digit."""
    text = repr(mechanism)
    if "array(" not in text and len(text) <= _LONGEST:
        return [f"m = {safe(text)}"]
    try:
        saved = to_json(mechanism)
    except InputError:
        saved = ""
    if 0 < len(saved) <= _LONGEST:
        return ["from jaxacct.interop import from_json", f"m = from_json({saved!r})"]
    return ["m = ...  # the mechanism, which this page cannot write down"]


def from_mechanism(
    mechanism: Mechanism, delta: float | None, relation: str, tick: Callable[[str], None], path: str = ""
) -> Subject:
    """The subject of one configuration, at a delta."""
    if delta is None:
        raise InputError("delta is missing; a mechanism has none of its own, give one such as 1e-5")
    at = check_one("delta", delta, DELTA, "a report has one")
    choice("relation", relation, RELATIONS)
    if batch_shape(mechanism):
        raise InputError(
            f"the mechanism of shape {batch_shape(mechanism)} must be one configuration; report one by one"
        )
    tick("epsilon of the mechanism")
    bounds = account.epsilon(mechanism, at, relation=relation)
    claim = Claim("One release of the mechanism", "epsilon", at, relation, bounds, mechanism)
    parts = mechanism.inside() if isinstance(mechanism, Composed) else [mechanism]
    ask = f'b = ja.epsilon(m, {at!r}, relation="{relation}")'
    check = f'print(b, ja.verify(m, b, delta={at!r}, relation="{relation}"))'
    lines = ["import jaxacct as ja", *_made(mechanism), ask, check]
    if path:
        read = f"from jaxacct.interop import from_json; m = from_json(open({path!r}).read())"
        code = f"import jaxacct as ja; {read}; {ask}; {check}"
        lines = [f"sha256sum {quoted(path)}", f"python -c {shlex.quote(code)}"]
    return Subject(
        "a mechanism",
        "This is the description of a mechanism. Nothing on this page says that it was carried out.",
        [claim],
        Rows("The mechanism, and what it is made of.", ["mechanism"], [[_cut(_typed(one))] for one in parts]),
        [[]],
        [mechanism],
        GENERAL,
        lines,
    )
