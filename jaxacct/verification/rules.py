"""The registry of definitions: a definition is a function whose parameters are the fields of its mechanism."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxacct.verification.ball_arithmetic import arb
from jaxacct.verification.result import NotCovered

__all__ = ["RULES", "Asked", "Part", "defines", "fields_of", "losses"]

Part = tuple[Any, int]
"""A loss, and the number of times that it is composed."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """The question to a definition: one direction of a relation.

    rate : probability that the record takes part.
    alone : whether the mechanism is a single step and no part of a composition.
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
"""Maps the question and the fields of a mechanism, passed by name, to the losses of one run."""
RULES: dict[type, Rule] = {}
"""The definition of each class; subclasses do not inherit it."""

R = TypeVar("R", bound=Rule)


def defines(*classes: type) -> Callable[[R], R]:
    """Register a rule as the definition of these classes."""

    def enter(rule: R) -> R:
        RULES.update(dict.fromkeys(classes, rule))
        return rule

    return enter


def losses(asked: Asked, mechanism: Any) -> list[Part]:
    """The losses that the definition of a mechanism gives."""
    held = fields_of(mechanism)
    return RULES[type(mechanism)](asked, **held)


def fields_of(mechanism: Any) -> dict[str, Any]:
    """The fields of a mechanism; NotCovered if its class has no rule, or the rule has no parameter for a field."""
    name = type(mechanism).__name__
    if type(mechanism) not in RULES:
        raise NotCovered(name)
    held = {field.name: getattr(mechanism, field.name) for field in dataclasses.fields(mechanism)}
    named = inspect.signature(RULES[type(mechanism)]).parameters
    if unread := [field for field in held if field not in named]:
        raise NotCovered(f"{name} with the field {unread[0]}")
    return held
