"""The table in README.md of which representation is answered for which mechanism, and with what kind.

It is made by asking the code, and a test compares it with the page.
"""

from __future__ import annotations

from typing import Any

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.table import EXAMPLES
from jaxacct.representations.mechanism_profile import Profile, profile
from jaxacct.representations.renyi_accounting import rdp_epsilon

__all__ = ["table"]

_QUESTIONS = {
    "epsilon, delta, trade-off, loss CDFs": lambda p: p.mechanism,  # their kind is the privacy profile's
    "Rényi": lambda p: p.renyi(2.0),
    "zCDP": lambda p: p.zcdp(),
    "log characteristic function": lambda p: p.log_characteristic(1.0),
    "epsilon by Rényi": lambda p: rdp_epsilon(p.mechanism, 1e-3, orders=[2.0, 8.0]),
}
"""Columns of the table, each with the question that is asked."""


def table(examples: tuple[Mechanism, ...] = EXAMPLES) -> str:
    """Markdown: a row for every mechanism, a column for every representation under add/remove; see README.md.

    "open": certified, but the bracket has no finite upper end.

    >>> from jaxacct.mechanisms import Gaussian
    >>> print(table((Gaussian(1.0),)).splitlines()[2])
    | Gaussian | certified | certified | certified | estimate | bound |
    """
    lines = [f"| mechanism | {' | '.join(_QUESTIONS)} |", "|---" * (len(_QUESTIONS) + 1) + "|"]
    for example in examples:
        cells = [_kind(profile(example), question) for question in _QUESTIONS.values()]
        lines.append(f"| {type(example).__name__} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _kind(asked: Profile, question: Any) -> str:
    """The kind of an answer, or that there is none."""
    try:
        answer = question(asked)
    except InputError:
        return "refused"
    return "open" if getattr(answer, "status", "ok") == "width" and answer.upper == float("inf") else str(answer.kind)
