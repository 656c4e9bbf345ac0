"""Which mechanisms have a definition, and how a definition is asked: it names every field of its mechanism."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxacct.verification.ball_arithmetic import arb
from jaxacct.verification.result import NotCovered

__all__ = ["RULES", "Asked", "Part", "defines", "fields_of", "losses"]

Part = tuple[Any, int]
"""A loss and how often it is composed."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a definition is asked for: one direction of a relation.

    rate : probability with which the record takes part.
    alone : whether this is one step, with nothing beside it.
    """

    relation: str
    direction: str
    rate: Any = dataclasses.field(default_factory=lambda: arb(1))
    alone: bool = True

    @property
    def moved(self) -> int:
        """How far a record moves a statistic, in units of the add/remove sensitivity."""
        return 2 if self.relation == "replace_one" else 1

    @property
    def whole(self) -> bool:
        """Whether the record always takes part."""
        return bool(self.rate == 1)


Rule = Callable[..., list[Part]]
"""The losses of one run of a mechanism, from what is asked and from its fields, which are the rule's parameters."""
RULES: dict[type, Rule] = {}
"""The definition of each class; a subclass has none of its own."""

R = TypeVar("R", bound=Rule)


def defines(*classes: type) -> Callable[[R], R]:
    """Enter a rule as the definition of these classes."""

    def enter(rule: R) -> R:
        RULES.update(dict.fromkeys(classes, rule))
        return rule

    return enter


def losses(asked: Asked, mechanism: Any) -> list[Part]:
    """The losses of a mechanism by its definition."""
    held = fields_of(mechanism)
    return RULES[type(mechanism)](asked, **held)


def fields_of(mechanism: Any) -> dict[str, Any]:
    """The fields of a mechanism; NotCovered where its class has no rule, or a field that the rule does not name."""
    name = type(mechanism).__name__
    if type(mechanism) not in RULES:
        raise NotCovered(name)
    held = {field.name: getattr(mechanism, field.name) for field in dataclasses.fields(mechanism)}
    named = inspect.signature(RULES[type(mechanism)]).parameters
    if unread := [field for field in held if field not in named]:
        raise NotCovered(f"{name} with the field {unread[0]}")
    return held
