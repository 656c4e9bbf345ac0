"""A mechanism from the text that a user types: the expression of Python, or JSON."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from jaxacct import mechanisms, selection
from jaxacct.core.keywords import nearest
from jaxacct.core.validation import InputError
from jaxacct.interop.documents import classes, from_json, laws
from jaxacct.mechanisms import Mechanism, batch_shape

__all__ = ["mechanism_of"]

LONGEST = 10_000
"""An expression has at most this many characters, so that a hostile one cannot take long."""
_MAKERS = {mechanisms: ("compose", "repeat", "dp_sgd"), selection: ("select", "Geometric", "Logarithmic")}
"""Functions that make a mechanism or a law of K."""
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: float(base) ** float(exponent),
}
"""Allowed operations.  Powers are of floats, since powers of whole numbers can take forever."""


def mechanism_of(text: str) -> Mechanism:
    """The mechanism of an expression such as `Laplace(10.0)`, or of JSON as `to_json` writes it.

    The names are those of `jaxacct.mechanisms` and `jaxacct.selection`, with or without `ja.` before them.  Numbers,
    lists and arithmetic may stand in it; nothing else of Python is run.

    Raises InputError, in one line, for anything else.

    >>> mechanism_of("compose(Gaussian(2.0), repeat(ja.Laplace(scale=1/0.1), 3))").expression()
    'ja.compose(ja.Gaussian(noise_multiplier=2.0), ja.repeat(ja.Laplace(scale=10.0), steps=3))'
    """
    if text.lstrip().startswith("{"):
        try:
            found = from_json(text)
        except InputError as error:
            raise InputError(f"mechanism: {error}") from None
    else:
        if len(text) > LONGEST:
            raise InputError(f"mechanism has {len(text):,} characters, must have at most {LONGEST:,}; give it as JSON")
        try:
            found = _value(ast.parse(text.strip(), mode="eval").body)
        except InputError:
            raise
        except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            why = f"{error.msg} at character {error.offset}" if isinstance(error, SyntaxError) else error
            raise InputError(f"mechanism = {text!r:.80} is no mechanism ({why}); write one as Laplace(10.0)") from None
    if isinstance(found, Mechanism) and 0 in batch_shape(found):
        raise InputError(f"mechanism = {text!r:.80} is an empty batch; give at least one number")
    if not isinstance(found, Mechanism):
        raise InputError(f"mechanism = {text!r:.80} is no mechanism; write one as Laplace(10.0)")
    return found


def _value(node: ast.expr) -> Any:
    """The value of one node; InputError for what is not allowed."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_number(left), _number(right))
        case ast.Call(func=function, args=args, keywords=words):
            given = {str(word.arg): _value(word.value) for word in words if word.arg is not None}
            if len(given) == len(words):
                return _called(function)(*map(_value, args), **given)
    raise InputError(f"{ast.unparse(node)[:60]!r} cannot stand in a mechanism; use mechanisms, numbers and lists")


def _number(node: ast.expr) -> Any:
    value = _value(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{ast.unparse(node)[:60]!r} is no number; calculate with numbers alone")
    return value


def _called(function: ast.expr) -> Callable[..., Any]:
    """The class or function of a name such as Gaussian, ja.Gaussian or selection.select."""
    known = classes() | laws() | {name: getattr(room, name) for room, names in _MAKERS.items() for name in names}
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in known:
        hint = nearest(name, known)
        raise InputError(f"{ast.unparse(function)[:60]!r} is no mechanism{f'; did you mean {hint!r}?' if hint else ''}")
    return known[name]  # type: ignore[no-any-return]  # the values are classes and functions
