"""Checks of inputs, and of the options that public calls share. An error says in one line what to do."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
Tracer = jax.core.Tracer
"""Object that JAX puts in place of a number while it traces a function. A tracer has no value to check."""
RELATIONS = ("add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out")
"""Neighbouring relations. Scales and noise multipliers are always in units of the add/remove sensitivity."""
ENGINES = ("auto", "contour", "lattice")
"""Values of the option `engine`. For "auto" the package chooses the engines for each question."""
GIBIBYTE = 2**30
"""Default limit on the lattice engine's memory, in bytes."""
LARGEST_COUNT = 2**53
"""Largest number of steps: float64 holds every integer up to this one exactly."""
_NO_NUMBER = (str, bytes, bytearray, memoryview, bool, np.bool_, type(None))
MOST_SHOWN_CHARACTERS = 60
"""Largest number of characters of a refused value in a message, so that the message stays one readable line."""


def covers(claimed: str, other: str) -> bool:
    """Return whether a guarantee under the relation `claimed` is also one under the relation `other`."""
    return other == claimed or (claimed == "add_or_remove_one" and other in ("add_one", "remove_one"))


def require_taken_out(relation: str) -> None:
    """Refuse a bound of reconstruction under "add_one", where outputs come from the data without the record."""
    if relation == "add_one":
        raise InputError("relation = 'add_one' bounds no reconstruction; use 'remove_one', which takes the record out")


class InputError(ValueError):
    """Refusal of an input. The message is one line: the name (and index), the value, the limit and the remedy.

    Parameters
    ----------
    message : line breaks in it become spaces.

    >>> import jaxacct as ja
    >>> ja.Laplace([1.0, -1.0])
    Traceback (most recent call last):
        ...
    jaxacct.InputError: scale[1] = -1.0 must be > 0; use a positive, finite number
    """

    __module__ = "jaxacct"  # users import the class from here

    def __init__(self, message: str = "") -> None:
        super().__init__(re.sub(r"\s*\n\s*", " ", message))


class TracerError(InputError, TypeError):
    """Refusal of a JAX tracer by a function that needs numbers. The message says what to do instead."""


class UnboundedLossError(InputError):
    """Refusal of delta = 0 for an unbounded loss. `bad` is True in the refused rows. `what` names the mechanism."""

    def __init__(self, bad: np.ndarray, what: str = "a mechanism") -> None:
        self.bad = bad
        place = _place("delta", np.argwhere(bad)[0])
        super().__init__(
            f"{place} = 0 must be > 0 for {what} with an unbounded loss; use a small positive delta such as 1e-5"
        )


class UnknownKeyword(TypeError):
    """Refusal of a keyword that a function does not have. The message names a likely keyword, or all keywords."""


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that its refusal of an unknown keyword names the keyword that was meant.

    >>> with_hints(lambda steps: 2 * steps)(num_steps=2)
    Traceback (most recent call last):
        ...
    jaxacct.core.validation.UnknownKeyword: <lambda>() has no keyword 'num_steps'; did you mean 'steps'?
    """
    code = inspect.unwrap(function).__code__
    ours = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = frozenset(ours[code.co_posonlyargcount :])

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not names.issuperset(kwargs):
            raise _unknown(function.__qualname__, ours, kwargs) from None
        return function(*args, **kwargs)

    return checked


def _unknown(call: str, ours: tuple[str, ...], given: Iterable[str]) -> UnknownKeyword:
    from jaxacct.core.keywords import meant  # needed only for an error message

    name = call.removesuffix(".__init__").rpartition(".")[2]
    known = [word for word in ours if word != "self"]
    wrong = next(word for word in given if word not in known)
    right = meant(wrong, [word for word in known if word not in given])
    hint = f"did you mean {right!r}?" if right else f"use {', '.join(known)}"
    return UnknownKeyword(f"{name}() has no keyword {wrong!r}; {hint}")


@dataclass(frozen=True)
class Constraint:
    """The finite real numbers that a field may hold. `remedy` ends an error message; ``{name}`` is the field name."""

    remedy: str
    lower: float | int
    upper: float | int | None = None
    lower_open: bool = False
    upper_open: bool = False
    integral: bool = False

    def holds(self, values: Any) -> Any:
        """Return whether a number is in the set; for an array, a mask. NaN and infinities are outside the set."""
        good = (values > self.lower if self.lower_open else values >= self.lower) & (abs(values) < math.inf)
        if self.upper is not None:
            good &= values < self.upper if self.upper_open else values <= self.upper
        if self.integral:
            good &= values == np.floor(values)
        return good

    @property
    def limit(self) -> str:
        """The set in words, for messages: ``> 0``, ``>= 0 and <= 1``."""
        lower = self.lower if isinstance(self.lower, int) else f"{self.lower:g}"
        ends = [] if self.lower == -math.inf else [f"{'>' if self.lower_open else '>='} {lower}"]
        if self.upper is not None:
            upper = "2**53" if self.upper == LARGEST_COUNT else f"{self.upper:g}"
            ends.append(f"{'<' if self.upper_open else '<='} {upper}")
        return ("an integer " if self.integral else "") + " and ".join(ends)


POSITIVE = Constraint("use a positive, finite number", 0, lower_open=True)
NOISE = Constraint("use a positive, finite number, or 1e-9 to debug", 0, lower_open=True)
REAL = Constraint("use a finite number", -np.inf)
NON_NEGATIVE = Constraint("use a finite number of 0 or more", 0)
PROBABILITY = Constraint("use a number between 0 and 1", 0, 1)
OPEN_PROBABILITY = Constraint("use a number strictly between 0 and 1", 0, 1, lower_open=True, upper_open=True)
DELTA = Constraint("use a small positive {name} such as 1e-5", 0, 1, lower_open=True, upper_open=True)
DELTA_OR_ZERO = Constraint("use 0 or a small positive {name} such as 1e-5", 0, 1, upper_open=True)
FLOOR = Constraint("use a floor such as 1e-10, which is part of the claim", 0, 0.5, lower_open=True, upper_open=True)
COUNT = Constraint("use a whole number, 1 or more", 1, LARGEST_COUNT, integral=True)
RECORDS = Constraint("use a whole number of records", 1, 1e9, integral=True)
# below 2**24 bytes (16 MiB), no lattice of a large composition would fit
MEMORY = Constraint("use a whole number of bytes, such as 2**30", 2**24, LARGEST_COUNT, integral=True)


def check(name: str, value: Any, constraint: Constraint) -> float | np.ndarray:
    """Return the value as a float or a read-only float64 array, or refuse it. A tracer raises TracerError."""
    # a Python number is checked as it is: a check as a NumPy array would take ten times as long
    if (type(value) is float or (type(value) is int and abs(value) <= LARGEST_COUNT)) and constraint.holds(value):
        return float(value)
    if isinstance(value, Tracer):
        raise TracerError(f"{name} is a tracer and has no value to check; pass a number, or stay outside jit")
    try:
        raw = np.asarray(value)
    except ValueError:
        raise InputError(f"{name} {_expected(constraint)}, not a ragged sequence; give every row one length") from None
    _refuse_no_numbers(name, value, (), constraint)
    if raw.dtype == object:
        raw = _from_objects(name, raw, constraint)
    if jax.numpy.issubdtype(raw.dtype, np.floating):
        raw = raw.astype(np.float64)
    elif not jax.numpy.issubdtype(raw.dtype, np.integer):  # integers are checked uncast: float64 rounds above 2**53
        raise InputError(f"{name} has dtype {raw.dtype} and {_expected(constraint)}; {_remedy(name, constraint)}")
    bad = ~constraint.holds(raw)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        value = raw[index].item()
        must = " and ".join(filter(None, ["" if np.isfinite(value) else "finite", constraint.limit]))
        raise InputError(f"{_place(name, index)} = {value!r} must be {must}; {_remedy(name, constraint)}")
    values = raw.astype(np.float64)
    if values.ndim == 0:
        return float(values)
    values.setflags(write=False)
    return values


def check_one(name: str, value: Any, constraint: Constraint, reason: str) -> int | float:
    """Return the value as an int if it must be whole, else as a float. Refuse an array; `reason` ends the message."""
    number = check(name, value, constraint)
    if isinstance(number, np.ndarray):
        raise InputError(f"{name} must be one number, not {number.size}; {reason}")
    return int(number) if constraint.integral else float(number)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return the value if it is one of the allowed words; else refuse it in one line that lists the words."""
    words = tuple(allowed)
    if isinstance(value, str) and value in words:
        return value
    raise InputError(f"{name} = {shown(value)} is not known; use one of {', '.join(map(repr, words))}")


def refuse_where(
    bad: np.ndarray,
    name: str,
    values: Any,
    rest: str | Callable[[tuple[int, ...]], str],
    written: Callable[[float], str] = repr,
) -> None:
    """Refuse the first value where `bad` is True. `rest` is the end of the message, or a function from index to end."""
    if np.any(bad):
        index = tuple(np.argwhere(bad)[0].tolist())
        value = float(np.broadcast_to(values, np.shape(bad))[index])
        place = _place(name, index if np.size(bad) > 1 else ())
        raise InputError(f"{place} = {written(value)} {rest if isinstance(rest, str) else rest(index)}")


def require_at_most(name: str, values: np.ndarray, of: str, limits: np.ndarray, remedy: str) -> None:
    """Refuse the first value above its limit. Values and limits broadcast; `of` names the limit in the message."""
    shape = broadcast_shape({name: values.shape, of: limits.shape})
    limit = np.broadcast_to(limits, shape)
    rest = lambda index: f"must be <= {of} = {limit[index]:g}; {remedy}"
    refuse_where(np.broadcast_to(values > limits, shape), name, values, rest, "{:g}".format)


def check_int(name: str, value: Any, least: int, remedy: str) -> int:
    """Return a Python or NumPy integer >= `least` as an int; refuse floats."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} = {value!r} must be an integer >= {least}; {remedy}")
    return int(value)


def check_flag(name: str, value: Any, question: str) -> None:
    """Refuse any value but a Python bool.  The message ends with `question`, which says how to choose."""
    if not isinstance(value, bool):
        raise InputError(f"{name} = {shown(value)} must be True or False; {question}")


class Options(NamedTuple):
    """Checked options that public calls share; `jaxacct.epsilon` documents them."""

    relation: str = RELATIONS[0]
    engine: str = "auto"
    rtol: float = 1e-4
    memory_bytes: int = GIBIBYTE
    backend: str = "auto"


def options(
    *,
    relation: Any = RELATIONS[0],
    engine: Any = "auto",
    rtol: Any = 1e-4,
    memory_bytes: Any = GIBIBYTE,
    backend: Any = "auto",
    least_rtol: float = 0.0,
    usual_rtol: str = "1e-4",
) -> Options:
    """Return the options as a record, or refuse the first invalid one; `rtol` must be > 0 and at least `least_rtol`."""
    words = choice("relation", relation, RELATIONS), choice("engine", engine, ENGINES)
    place = choice("backend", backend, ("auto", "numpy", "xla"))
    memory = int(check_one("memory_bytes", memory_bytes, MEMORY, "one limit serves the whole batch"))
    width = Constraint(f"use {usual_rtol} or so", least_rtol, 1, lower_open=least_rtol == 0.0, upper_open=True)
    return Options(*words, check_one("rtol", rtol, width, "one tolerance serves the whole batch"), memory, place)


def shown(value: Any) -> str:
    """Return the text that stands for a value in a message: one line of at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the integer has too many digits for repr, or the object's own __repr__ fails
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN_CHARACTERS else f"{text[: MOST_SHOWN_CHARACTERS - 3]}..."


def broadcast_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common shape of named shapes; if two clash, the error names them and shows their shapes."""
    try:
        return np.broadcast_shapes(*filter(None, shapes.values()))
    except ValueError:
        sizes = lambda pair: zip(*(reversed(shapes[name]) for name in pair), strict=False)
        clash = lambda pair: any(a != b and 1 not in (a, b) for a, b in sizes(pair))
        first, second = next(filter(clash, itertools.combinations(shapes, 2)))
        raise InputError(
            f"{first} of shape {shapes[first]} and {second} of shape {shapes[second]} do not broadcast; "
            "give all fields one shape, or length 1 along an axis"
        ) from None


def refuse_tracers(call: str, traceable: str, **arguments: Any) -> None:
    """Refuse tracers in the arguments of the public call `call`. The error proposes `traceable` for use inside jit."""
    for argument, value in arguments.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, Tracer):
                field = jax.tree_util.keystr(path).lstrip(".") or argument
                raise TracerError(
                    f"{call} is a host call and was given a tracer (field {field}); "
                    f"inside jit use {traceable}, or call {call} outside jit, vmap and grad"
                )


def _refuse_no_numbers(name: str, value: Any, index: tuple[int, ...], constraint: Constraint) -> None:
    """Refuse text, bytes, truth values and masked cells, also inside lists. NumPy reads some of them as numbers."""
    word = shown(value) if isinstance(value, _NO_NUMBER) else ""
    if isinstance(value, list | tuple):
        if not {float, int, np.float64}.issuperset(map(type, value)):
            for place, item in enumerate(value):
                _refuse_no_numbers(name, item, (*index, place), constraint)
    elif isinstance(value, np.ma.MaskedArray) and len(masked := np.argwhere(np.ma.getmaskarray(value))):
        word, index = "masked", (*index, *masked[0].tolist())
    if word:
        raise InputError(f"{_place(name, index)} = {word} {_expected(constraint)}; {_remedy(name, constraint)}")


def _from_objects(name: str, raw: np.ndarray, constraint: Constraint) -> np.ndarray:
    """Convert an object array of real numbers (integers beyond 64 bits, fractions) to float64; refuse other objects."""
    values = np.empty(raw.shape, np.float64)
    for index, item in np.ndenumerate(raw):
        real = isinstance(item, numbers.Real) and not isinstance(item, bool)
        if not real:
            raise InputError(
                f"{_place(name, index)} = {shown(item)} {_expected(constraint)}; {_remedy(name, constraint)}"
            )
        try:
            values[index] = float(item)
        except OverflowError:
            values[index] = np.inf if item > 0 else -np.inf
    return values


def _expected(constraint: Constraint) -> str:
    return f"must be {'' if constraint.integral else 'a number '}{constraint.limit}".rstrip()


def _place(name: str, index: Iterable[int]) -> str:
    places = ", ".join(map(str, index))
    return f"{name}[{places}]" if places else name


def _remedy(name: str, constraint: Constraint) -> str:
    return constraint.remedy.format(name=name.rsplit(".", 1)[-1].replace("_", " "))
