"""The subject of a mechanism, as Python holds it or as its JSON document says."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from jaxacct import account
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.combinators import Composed
from jaxacct.report.blocks import Rows
from jaxacct.report.claim import Claim
from jaxacct.report.subject import Subject, quoted
from jaxacct.report.wording import GENERAL, safe
from jaxacct.validation import DELTA, RELATIONS, InputError, check_one, choice

__all__ = ["from_mechanism"]


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
    lines = ["import jaxacct as ja", f"m = {safe(repr(mechanism))[:600]}", ask, check]
    if path:
        read = f"from jaxacct.interop import from_json; m = from_json(open({json.dumps(path)}).read())"
        code = f"import jaxacct as ja; {read}; {ask}; {check}"
        lines = [f"sha256sum {quoted(path)}", f"python -c {shlex.quote(code)}"]
    return Subject(
        "a mechanism",
        "This is the description of a mechanism. Nothing on this page says that it was carried out.",
        [claim],
        Rows("The mechanism, and what it is made of.", ["mechanism"], [[safe(repr(one))[:600]] for one in parts]),
        [[]],
        [mechanism],
        GENERAL,
        lines,
    )
