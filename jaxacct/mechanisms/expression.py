"""A mechanism as the expression that a user would type, and the HTML that a notebook shows of it."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np

from jaxacct.core import markup

MOST_NUMBERS = 8
"""Numbers of an array that are written; the count of all is said."""


def call(owner: Any) -> str:
    """The class of a record with its fields, as it would be typed; fields that have their default are left out.

    >>> import jaxacct as ja
    >>> ja.repeat(ja.PoissonSampled(ja.Gaussian([1.0, 2.0]), 0.01), 1000).expression()
    'ja.dp_sgd(noise_multiplier=[1.0, 2.0], sampling_probability=0.01, steps=1000)'
    >>> ja.compose(ja.Gaussian(1.0), ja.repeat(ja.Laplace(2.0), 3)).expression()
    'ja.compose(ja.Gaussian(noise_multiplier=1.0), ja.repeat(ja.Laplace(scale=2.0), steps=3))'
    """
    given = []
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        alike = type(value) is type(field.default) and isinstance(value, str | bool | int) and value == field.default
        if field.init and value is not None and not alike:
            rule = getattr(owner, "constraints", {}).get(field.name)
            given.append(f"{field.name}={_written(value, bool(rule is not None and rule.integral))}")
    home = type(owner).__module__.split(".")[1]
    return f"{'ja' if home == 'mechanisms' else home}.{type(owner).__name__}({', '.join(given)})"


def number(value: Any, whole: bool = False) -> str:
    """A number or an array as it would be typed; `whole` for counts.

    >>> number(1000.0, whole=True), number(np.array([0.5, 1.0])), number(np.zeros(1000))
    ('1000', '[0.5, 1.0]', '[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ... 1,000 numbers]')
    """
    if np.ndim(value) == 0:
        return str(int(value)) if whole and float(value).is_integer() else repr(float(value))
    if np.size(value) <= MOST_NUMBERS:
        return f"[{', '.join(number(item, whole) for item in value)}]"
    first = np.ravel(value)[:MOST_NUMBERS]
    return f"[{', '.join(number(item, whole) for item in first)}, ... {np.size(value):,} numbers]"


def html_form(expression: str, name: str, shape: tuple[int, ...], kind: str) -> str:
    """A mechanism in a notebook: its expression, its batch shape, and the kind of its answers."""
    batch = f"{shape}, {int(np.prod(shape)):,} configurations" if shape else "(), one configuration"
    return markup.fields(name, [("typed", expression), ("batch shape", batch), ("answers are", kind)], code=("typed",))


def _written(value: Any, whole: bool) -> str:
    if hasattr(value, "expression"):
        return cast(str, value.expression())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return call(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_written(item, whole) for item in value)}]"
    if isinstance(value, str | bool | int):
        return repr(value)
    try:
        return number(value, whole)
    except (TypeError, ValueError):  # a tracer, or anything else that a pytree transformation put there
        return repr(value)
