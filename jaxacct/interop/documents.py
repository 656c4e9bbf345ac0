"""Mechanisms as text that is safe to read: JSON that round-trips exactly, and expressions such as `Laplace(10.0)`."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from jaxacct.core.keywords import nearest
from jaxacct.core.validation import LARGEST_COUNT, InputError, refuse_tracers
from jaxacct.mechanisms import Mechanism, batch_shape

LONGEST = 10_000
"""Largest number of characters of an expression, so that a hostile expression cannot take long."""
_MAKERS = {
    "jaxacct.mechanisms": ("compose", "repeat", "dp_sgd"),
    "jaxacct.selection": ("select", "Geometric", "Logarithmic"),
}
"""For each module, its functions that make a mechanism or a law of K (the random number of runs of a selection)."""
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: float(base) ** float(exponent),
}
"""Allowed operations. Powers are computed in floats, since a power of large whole numbers can take forever."""
FORMAT = "jaxacct.mechanism"
VERSION = 1
MAX_CHARACTERS = 2**23
"""Largest number of characters of a document. This limit and those below protect the reader from hostile text."""
MAX_DEPTH = 64
MAX_MECHANISMS = 2**15
MAX_BATCH = 2**20
"""Largest number of elements of the batch to which the shapes in a document broadcast."""
MAX_AXES = 16
"""Largest number of axes of an array; NumPy itself allows 64."""
NAMES_SHOWN = 12
"""Largest number of class names in an error message."""
MAX_WORD = 64
"""Largest number of characters of a field that holds a word, such as the name of a noise."""


class _Object(NamedTuple):
    """A JSON object as its (key, value) pairs in order, duplicates included."""

    pairs: list[tuple[str, Any]]


class _Refused(NamedTuple):
    """Takes the place of a JSON number that this format does not hold. `reason` says why."""

    reason: str


def to_json(mechanism: Mechanism) -> str:
    """Return the mechanism as one line of JSON, which `from_json` turns back into an equal mechanism.

    A mechanism is an object with its class name as `type`, and its fields. A batch is an object with its `shape`, and
    its `values` in C order. Numbers are the shortest decimals that give the same float64.

    Parameters
    ----------
    mechanism : Mechanism
        A public class of `jaxacct.mechanisms` or `jaxacct.selection`.

    Returns
    -------
    str

    Raises
    ------
    InputError
        If the class is not a public mechanism, a field is invalid, or a limit of `from_json` is exceeded.
    TracerError
        If a field is a tracer.

    >>> from jaxacct.mechanisms import Gaussian
    >>> to_json(Gaussian([0.1, 2.0]))[60:]
    '"type": "Gaussian", "noise_multiplier": {"shape": [2], "values": [0.1, 2.0]}}}'
    """
    return _text(mechanism, every=False)


def to_whole_json(mechanism: Mechanism) -> str:
    """Return a mechanism as JSON with every field that is not None. `to_json` also leaves out fields with defaults."""
    return _text(mechanism, every=True)


def _text(mechanism: Mechanism, every: bool) -> str:
    batch_shape(mechanism)
    refuse_tracers("interop.to_json", "the mechanism outside jit", mechanism=mechanism)
    mechanism.validated()
    count = iter(range(MAX_MECHANISMS))
    document = {"format": FORMAT, "version": VERSION, "mechanism": _encode(mechanism, "mechanism", 0, count, every)}
    _check_batch(mechanism)
    text = json.dumps(document, allow_nan=False)
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"the document has {len(text)} characters, limit {MAX_CHARACTERS}; split the batch")
    return text


def from_json(text: str) -> Mechanism:
    """Read the mechanism of a JSON document that `to_json` wrote.

    Documents from strangers are safe: every value goes through the checks of its class. Nothing is imported or run.

    Parameters
    ----------
    text : str
        A document of `to_json`.

    Returns
    -------
    Mechanism

    Raises
    ------
    InputError
        For NaN, Infinity, and numbers that float64 cannot hold; for duplicate, missing and unknown keys; for other
        versions; for more than 2**23 characters, 64 levels, 2**15 mechanisms, 16 axes, or 2**20 elements of the batch.

    >>> from_json('{"format": "jaxacct.mechanism", "version": 1, "mechanism": {"type": "PureDP", "epsilon": -1}}')
    Traceback (most recent call last):
        ...
    jaxacct.InputError: mechanism: epsilon = -1 must be >= 0; use a finite number of 0 or more
    """
    if not isinstance(text, str):
        raise InputError(f"text must be a str, not {type(text).__name__}; decode bytes as UTF-8 first")
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"text has {len(text)} characters, limit {MAX_CHARACTERS}; split the batch")
    try:
        refused = lambda word: _Refused(f"{word} is not a number here")
        numbers: Any = {"parse_int": _integer, "parse_float": _float, "parse_constant": refused}
        document = json.loads(text, object_pairs_hook=_Object, **numbers)
    except json.JSONDecodeError as error:
        raise InputError(f"text is not JSON: {error}; use what to_json wrote") from None
    except RecursionError:
        raise InputError(f"text is nested too deeply, limit {MAX_DEPTH}; compose in fewer levels") from None
    keys = _keys(document, "document", {"format", "version", "mechanism"})
    if keys["format"] != FORMAT:
        _refuse("format", f"must be {FORMAT!r}", keys["format"])
    if type(keys["version"]) is not int or keys["version"] != VERSION:
        _refuse("version", f"must be {VERSION}, the one this release reads", keys["version"])
    mechanism = _decode(keys["mechanism"], "mechanism", 0, iter(range(MAX_MECHANISMS)))
    _check_batch(mechanism)
    return mechanism


@functools.cache
def classes() -> dict[str, type[Any]]:
    """Return the public, concrete mechanism classes by name."""
    return _public(Mechanism)


@functools.cache
def laws() -> dict[str, type[Any]]:
    """Return the public laws of K, the number of runs of a selection, by name."""
    return _public(importlib.import_module("jaxacct.selection").Law)


@functools.cache
def strategies() -> dict[str, type[Any]]:
    """Return, by name, the strategies of matrix mechanisms and the ways in which records participate."""
    home = importlib.import_module("jaxacct.strategies")
    return {name: getattr(home, name) for name in home.__all__ if dataclasses.is_dataclass(getattr(home, name))}


def _public(base: type[Any]) -> dict[str, type[Any]]:
    homes = map(importlib.import_module, ("jaxacct.mechanisms", "jaxacct.selection"))
    every = (getattr(home, name) for home in homes for name in home.__all__)
    return {x.__name__: x for x in every if isinstance(x, type) and issubclass(x, base) and not inspect.isabstract(x)}


def _encode(mechanism: Mechanism, path: str, depth: int, count: Iterator[int], every: bool) -> dict[str, Any]:
    _enter(path, depth, count)
    cls = type(mechanism)
    if classes().get(cls.__name__) is not cls:
        raise InputError(f"{path}: {cls.__name__} has no JSON form; use one of {_some_of(classes())}")
    out: dict[str, Any] = {"type": cls.__name__}
    for field in dataclasses.fields(cls):
        value = getattr(mechanism, field.name)
        here = f"{path}.{field.name}"
        if field.metadata.get("optional") and value == field.default and (not every or value is None):
            continue  # so that the text is the same as before the class had this field
        if isinstance(value, Mechanism):
            out[field.name] = _encode(value, here, depth + 1, count, every)
        elif field.name in cls.constraints:
            out[field.name] = _encode_numbers(value)
        elif isinstance(value, tuple):
            out[field.name] = [_encode(item, f"{here}[{i}]", depth + 1, count, every) for i, item in enumerate(value)]
        elif laws().get(type(value).__name__) is type(value):
            numbers = {name: _encode_numbers(getattr(value, name)) for name in value.constraints}
            out[field.name] = {"type": type(value).__name__, **numbers}
        elif strategies().get(type(value).__name__) is type(value):
            out[field.name] = {"type": type(value).__name__, **dataclasses.asdict(value)}
        else:
            out[field.name] = _static(value, here)
    return out


def _some_of(classes: Iterable[str]) -> str:
    """Return the names of the first few classes; all names would make an error message too long."""
    names = sorted(classes)
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" or {rest} more classes of jaxacct.mechanisms" if rest > 0 else "")


def _encode_numbers(value: Any) -> Any:
    array = np.asarray(value, np.float64)
    return {"shape": list(array.shape), "values": array.ravel().tolist()} if array.shape else array.item()


def _decode(node: Any, path: str, depth: int, count: Iterator[int]) -> Mechanism:
    _enter(path, depth, count)
    cls = _class_of(node, path, classes())
    fields = {field.name: field for field in dataclasses.fields(cls)}
    absent = {name for name, field in fields.items() if field.metadata.get("optional")} - set(dict(node.pairs))
    keys = _keys(node, path, {"type", *fields} - absent)
    values = {}
    for field_name, field in fields.items():
        if field_name in absent:
            continue
        value, here = keys[field_name], f"{path}.{field_name}"
        if field_name in cls.constraints:
            values[field_name] = _decode_numbers(value, here)
        elif field.metadata.get("static"):
            values[field_name] = (_decode_strategy if isinstance(value, _Object) else _static)(value, here)
        elif isinstance(value, list):
            values[field_name] = tuple(_decode(item, f"{here}[{i}]", depth + 1, count) for i, item in enumerate(value))
        elif field_name == "law":
            values[field_name] = _decode_law(value, here)
        else:
            values[field_name] = _decode(value, here, depth + 1, count)
    return cast(Mechanism, _built(cls, path, values))


def _decode_law(node: Any, path: str) -> Any:
    cls = _class_of(node, path, laws())
    keys = _keys(node, path, {"type", *cls.constraints})
    return _built(cls, path, {name: _decode_numbers(keys[name], f"{path}.{name}") for name in cls.constraints})


def _decode_strategy(node: Any, path: str) -> Any:
    """Return a strategy or participation. Refuse an empty list, which the class would replace by its own numbers."""
    cls = _class_of(node, path, strategies())
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    keys = _keys(node, path, {"type", *defaults})
    values: dict[str, Any] = {}
    for name in keys.keys() - {"type"}:
        value, here = keys[name], f"{path}.{name}"
        if isinstance(value, list):
            rows = value if value and isinstance(value[0], list) else [value]
            numbers = [tuple(_number(item, here) for item in row) for row in rows if isinstance(row, list)]
            if not numbers or len(numbers) < len(rows) or not all(numbers):
                _refuse(here, "must be a list of numbers, or of lists of numbers", value)
            values[name] = tuple(numbers) if rows is value else numbers[0]
        else:
            values[name] = None if value is None is defaults[name] else _number(value, here)
    return _built(cls, path, values)


def _class_of(node: Any, path: str, known: dict[str, type[Any]]) -> type[Any]:
    name = dict(node.pairs).get("type") if isinstance(node, _Object) else None
    if not isinstance(name, str) or name not in known:
        _refuse(path, f"must be an object whose type is one of {_some_of(known)}", name or node)
    return known[name]


def _built(cls: type[Any], path: str, values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _decode_numbers(value: Any, path: str) -> Any:
    if not isinstance(value, _Object):
        return _number(value, path)
    keys = _keys(value, path, {"shape", "values"})
    shape, values = keys["shape"], keys["values"]
    if not isinstance(values, list):
        _refuse(f"{path}.values", "must be a list of numbers", values)
    good = isinstance(shape, list) and 0 < len(shape) <= MAX_AXES
    if not good or not all(type(n) is int and 0 <= n <= MAX_BATCH for n in shape) or math.prod(shape) != len(values):
        _refuse(f"{path}.shape", f"must be 1 to {MAX_AXES} lengths whose product is {len(values)}", shape)
    return np.array([_number(item, f"{path}.values[{i}]") for i, item in enumerate(values)], np.float64).reshape(shape)


def _number(value: Any, path: str) -> int | float:
    return value if type(value) in (int, float) else _refuse(path, "must be a number that float64 holds", value)


def _static(value: Any, path: str) -> Any:
    if type(value) in (int, float, bool) or (type(value) is str and len(value) <= MAX_WORD):
        return value
    _refuse(path, f"must be a number, a boolean or a string of at most {MAX_WORD} characters", value)


def _keys(node: Any, path: str, wanted: set[str]) -> dict[str, Any]:
    """Return the values of a JSON object by key.  Refuse the object unless it has just the wanted keys, each once."""
    words = ", ".join(sorted(wanted))
    if not isinstance(node, _Object):
        _refuse(path, f"must be an object with the keys {words}", node)
    names = [name for name, _ in node.pairs]
    for name in names:
        if name not in wanted:
            _refuse(path, f"has an unknown key; its keys are {words}", name)
        if names.count(name) > 1:
            _refuse(path, "has a key twice; give each once", name)
    for name in sorted(wanted.difference(names)):
        _refuse(path, f"lacks a key; its keys are {words}", name)
    return dict(node.pairs)


def _enter(path: str, depth: int, count: Iterator[int]) -> None:
    if depth > MAX_DEPTH:
        raise InputError(f"the mechanism is nested more than {MAX_DEPTH} deep; compose in fewer levels")
    if next(count, None) is None:
        raise InputError(f"{path[:80]}: more than {MAX_MECHANISMS} mechanisms; use Repeated for equal ones")


def _check_batch(mechanism: Mechanism) -> None:
    shape = batch_shape(mechanism)
    if math.prod(shape) > MAX_BATCH:
        raise InputError(f"the batch of shape {shape} has more than {MAX_BATCH} elements; split it")


def _integer(text: str) -> Any:
    # 17 characters hold a sign and 2**53; a longer text is not converted
    if len(text) > 17 or abs(int(text)) > LARGEST_COUNT:
        return _Refused(f"the integer {text:.20}{'...' * (len(text) > 20)} is beyond 2**53")
    return int(text)


def _float(text: str) -> Any:
    value = float(text)
    vanished = value == 0.0 and any(digit in "123456789" for digit in text.lower().partition("e")[0])
    return _Refused(f"{text:.20} is beyond float64") if math.isinf(value) or vanished else value


def _refuse(path: str, rule: str, value: Any) -> NoReturn:
    if isinstance(value, _Refused):
        found = value.reason
    elif isinstance(value, _Object | list):
        found = "an object" if isinstance(value, _Object) else "a list"
    else:
        found = ascii(value) if len(ascii(value)) <= 60 else ascii(value)[:57] + "..."
    raise InputError(f"{path} {rule}; found {found}")


def mechanism_of(text: str) -> Mechanism:
    """Read the mechanism of an expression such as `Laplace(10.0)`, or of a JSON document of `to_json`."""
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
    """Evaluate one node of an expression; refuse a node that is not allowed."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_operand(left), _operand(right))
        case ast.Call(func=function, args=args, keywords=words):
            given = {str(word.arg): _value(word.value) for word in words if word.arg is not None}
            if len(given) == len(words):
                return _called(function, [_value(item) for item in args], given)
    raise InputError(f"{ast.unparse(node)[:60]!r} cannot stand in a mechanism; use mechanisms, numbers and lists")


def _operand(node: ast.expr) -> Any:
    value = _value(node)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{ast.unparse(node)[:60]!r} is no number; calculate with numbers alone")
    return value


def _called(function: ast.expr, args: list[Any], given: dict[str, Any]) -> Any:
    """Call what `function` names, such as ja.Gaussian. Of the two BallsInBins, call the one that fits the arguments."""
    makers = ((name, importlib.import_module(home)) for home, names in _MAKERS.items() for name in names)
    known = classes() | laws() | {name: getattr(module, name) for name, module in makers}
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    found = [some[name] for some in (known, strategies()) if name in some]
    if not found:
        hint = nearest(name, known | strategies())
        raise InputError(f"{ast.unparse(function)[:60]!r} is no mechanism{f'; did you mean {hint!r}?' if hint else ''}")
    for maker in found:
        with contextlib.suppress(TypeError):
            inspect.signature(maker).bind(*args, **given)
            found = [maker]
            break
    return found[0](*args, **given)
