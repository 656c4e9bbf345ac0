"""Brackets of privacy quantities: lower end, estimate and upper end, with a kind of statement and a status."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from jaxacct.core import markup
from jaxacct.core.text import bracket, listed, numbers, outward, plain
from jaxacct.core.types import ArrayLike, Leaf, Numbers
from jaxacct.core.validation import InputError, shown

KINDS = {
    "certified": "rigorous upper and lower bound, numerical error included",
    "bound": "the upper end is a theorem's bound; the lower end is not claimed to be near the truth",
    "estimate": "converged numerics, error estimated only",
    "asymptotic": "a limit law, no bound either way",
    "conditional": "true only under an extra assumption, named after a colon",
}
"""Kinds of statement, each with its meaning. A kind such as "conditional: monotone score" names its assumption."""

_NEEDS_NO_ACTION = {
    "ok": "The bracket is as narrow as asked for, or as its method can give; use upper in a privacy claim.",
    "zero": "delta is at least delta(0), so epsilon is 0; nothing to do.",
    "mass_at_infinity": "delta is below the mass at infinity, so epsilon is infinite; ask for a larger "
    "delta, or lower the delta of an approximate-DP part.",
    "not_binding": "Every value searched meets the target; the value is the end of the search range, and the "
    "target could be tightened.",
    "loose": "The value meets the target, but it is not shown to be the best one: epsilon is known too roughly "
    "there, or hardly changes with the value; use it, or try a less private one.",
}
"""Statuses under which `Bounds.ok` is True, each with its meaning."""
_NEEDS_ACTION = {
    "width": "The bracket holds but is wider than asked for; use upper, raise the memory limit, loosen the "
    "tolerance or choose the other engine.",
    "contradiction": "Two ways of computing this contradict each other, so that neither is used; the bracket is "
    "what simple theorems give and holds. Please report the configuration.",
    "failed": "The engines failed on this configuration, and the bracket is only what always holds; claim nothing, "
    "try another engine or a configuration near it, and report it.",
    "infeasible": "No value meets the target; raise the target epsilon or delta.",
    "infeasible_mass_at_infinity": "The mass at infinity alone exceeds the target delta; raise the target "
    "delta, or lower the delta of an approximate-DP part.",
    "infeasible_noise": "No searched noise multiplier meets the target; raise the target epsilon or delta, "
    "lower the steps or the sampling probability, or search wider with ja.calibrate(..., bracket=(low, high)).",
    "infeasible_steps": "One step already exceeds the target; raise the noise multiplier or the target, or "
    "lower the sampling probability.",
    "infeasible_rate": "No searched sampling probability meets the target; raise the noise multiplier or the "
    "target, or lower the steps.",
}
"""Statuses under which `Bounds.ok` is False, each with its meaning."""
STATUSES = {**_NEEDS_NO_ACTION, **_NEEDS_ACTION}
"""Every status, with a sentence that says what the status means and what to do."""

_OK_BUT_NOT_CERTIFIED = {
    "bound": "The bound was evaluated, and the truth may lie far below it; use upper in a privacy claim.",
    "estimate": "The numerics converged, their error is estimated only; do not use it in a privacy claim.",
    "asymptotic": "A limit law was evaluated, which bounds nothing; do not use it in a privacy claim.",
    "conditional": "The answer holds under the assumption that its kind names; claim nothing without that.",
}
"""Meaning of the status "ok" under each kind that is not "certified"."""


def explain(status: ArrayLike, kind: ArrayLike = "certified") -> Numbers:
    """Return one sentence that says what a status means for an answer of some kind, and what the user should do.

    Parameters
    ----------
    status : a text or an array of texts, such as `b.status` of a Bounds or a Calibration.
    kind : a text or an array of texts, such as `b.kind`; broadcasts with the status.

    Returns
    -------
    str or numpy.ndarray : a `str` for one status and one kind; otherwise an array of texts of their common shape.

    >>> explain("zero")
    'delta is at least delta(0), so epsilon is 0; nothing to do.'
    >>> explain("ok", "bound")
    'The bound was evaluated, and the truth may lie far below it; use upper in a privacy claim.'
    >>> explain(["zero", "zero"]).tolist() == 2 * [explain("zero")]
    True
    """
    try:
        words, kinds = np.broadcast_arrays(np.asarray(status, object), np.asarray(kind, object))
    except ValueError:
        raise InputError("status and kind do not broadcast; give one kind, or one for each status") from None
    sentences = [_sentence(w, kinds[i], str(list(i)) if i else "") for i, w in np.ndenumerate(words)]
    return np.array(sentences, np.str_).reshape(words.shape) if words.ndim else sentences[0]


def _sentence(status: Any, kind: Any, place: str = "") -> str:
    word, statement = str(status), str(kind).split(":")[0]
    if word in KINDS:
        raise InputError(f"status{place} = {shown(status)} is a kind; use explain('ok', {word!r})")
    if word not in STATUSES:
        raise InputError(f"status{place} = {shown(status)} is not known; use one of {', '.join(STATUSES)}")
    if statement not in KINDS:
        raise InputError(f"kind{place} = {shown(kind)} is not known; use one of {', '.join(KINDS)}")
    return _OK_BUT_NOT_CERTIFIED.get(statement, STATUSES[word]) if word == "ok" else STATUSES[word]


@dataclass(frozen=True, eq=False, repr=False)
class Bounds:
    """Bracket lower <= estimate <= upper of a privacy quantity, one element for each configuration of the batch.

    The attribute ``ok`` is True where the status needs no action. If one of lower, estimate and upper is
    NaN, all three are NaN and ``ok`` is False. `jaxacct.explain` says what a kind and a status mean.

    A bracket is not one number, so ``b <= 3`` raises TypeError. ``b.upper <= 3`` supports the claim "at most 3", and
    ``b.lower > 3`` refutes it. ``f"{b:.4g}"`` rounds the ends outward, and names any kind other than "certified" and
    any status other than "ok".

    Parameters
    ----------
    lower, estimate, upper : numbers that broadcast with each other; stored as NumPy float64 of the batch shape.
    kind, status : one of `jaxacct.core.bounds.KINDS` and one of `STATUSES`; or arrays of such texts.
    engine : the name of the method that answered; or an array of such texts.

    Raises
    ------
    ValueError : the ends are out of order, an end is NaN although the status is ok, or a kind or status is unknown.

    >>> b = Bounds(1.0, 1.25, 1.5, kind="certified", engine="contour")
    >>> b
    Bounds(1.25 in [1, 1.5], certified, ok, contour)
    >>> bool(b.ok), float(b.relative_width), f"epsilon in {b:.3g}"
    (True, 0.3333333333333333, 'epsilon in [1, 1.5]')
    """

    __array_ufunc__ = None  # makes `array <= b` call the method of this class, which raises TypeError

    lower: Leaf
    estimate: Leaf
    upper: Leaf
    kind: Leaf = "certified"
    status: Leaf = "ok"
    engine: Leaf = ""
    ok: Leaf = field(init=False)

    def __post_init__(self) -> None:
        ends = [np.asarray(end, dtype=np.float64) for end in (self.lower, self.estimate, self.upper)]
        words = [np.asarray(word, dtype=np.str_) for word in (self.kind, self.status, self.engine)]
        lower, estimate, upper, kind, status, engine = map(np.array, np.broadcast_arrays(*ends, *words))
        shape = lower.shape
        distinct = [dict.fromkeys(word.ravel().tolist()) for word in words[:2]]  # faster than np.unique
        for word in distinct[0]:
            if word.split(":")[0] not in KINDS:
                raise ValueError(f"kind {word!r} is not known; use one of {', '.join(KINDS)}")
        for word in distinct[1]:
            if word not in STATUSES:
                raise InputError(f"status = {shown(word)} is not known; use one of {', '.join(STATUSES)}")
        ok = np.zeros(shape, bool)
        for word in distinct[1].keys() & _NEEDS_NO_ACTION.keys():
            ok |= status == word
        unanswered = ~ok & np.isnan(lower) & np.isnan(estimate) & np.isnan(upper)
        bad = ~((lower <= estimate) & (estimate <= upper)) & ~unanswered
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"bounds{list(index) if index else ''}: lower = {lower[index]}, "
                f"estimate = {estimate[index]}, upper = {upper[index]} must be in this order"
            )
        for name, array in zip((*_SAVED, "ok"), (lower, estimate, upper, kind, status, engine, ok), strict=True):
            array.setflags(write=False)
            value = array if shape else array[()]
            object.__setattr__(self, name, str(value) if isinstance(value, np.str_) else value)

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.upper)

    @property
    def relative_width(self) -> Numbers:
        """Quotient (upper - lower) / upper: 0 where the ends are equal, NaN where only the upper end is infinite."""
        lower, upper = np.asarray(self.lower), np.asarray(self.upper)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(lower == upper, 0.0, (upper - lower) / upper)[()]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("Bounds of a single configuration have no length; use .lower, .estimate and .upper")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Bounds:
        """Return the bounds of the part of the batch that a NumPy index selects."""
        if not self.shape and index is not Ellipsis and not (isinstance(index, tuple) and not index):
            raise TypeError("Bounds of a single configuration take no index; use .lower, .estimate and .upper")
        return Bounds(*(np.asarray(getattr(self, name))[index] for name in _SAVED))

    def __repr__(self) -> str:
        if not self.shape:
            words = ", ".join(word for word in (self.kind, self.status, self.engine) if word)
            return f"Bounds({self.estimate:.9g} in {bracket(self.lower, self.upper, '.9g')}, {words})"
        forms: dict[str, Callable[[float], str]] = {
            "lower": functools.partial(outward, spec=".9g", up=False),
            "estimate": "{:.9g}".format,
            "upper": functools.partial(outward, spec=".9g", up=True),
        }
        ends = ",\n       ".join(
            f"{name}={listed(getattr(self, name), form, ' ' * (8 + len(name)))}" for name, form in forms.items()
        )
        counts = [Counter(array.ravel().tolist()).most_common() for array in (self.kind, self.status, self.engine)]
        tally = lambda each: each[0][0] if len(each) == 1 else ", ".join(f"{count} {word}" for word, count in each)
        words = "; ".join(map(tally, counts))
        return f"Bounds({ends},\n       {words})"

    def to_dict(self) -> dict[str, Any]:
        """Return the bounds as plain Python for JSON: a batch as lists; NaN and infinities as "nan", "inf" and "-inf".

        >>> Bounds(0.0, 1.0, np.inf, kind="bound").to_dict()
        {'lower': 0.0, 'estimate': 1.0, 'upper': 'inf', 'kind': 'bound', 'status': 'ok', 'engine': ''}
        """
        return {name: plain(getattr(self, name)) for name in _SAVED}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Bounds:
        """Return the bounds of a dict that `to_dict` made; raise InputError for any other dict.

        >>> Bounds.from_dict(Bounds(0.0, 1.0, np.inf, kind="bound").to_dict())
        Bounds(1 in [0, inf], bound, ok)
        """
        if not isinstance(saved, Mapping) or set(saved) != set(_SAVED):
            keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise InputError(f"saved = {shown(keys)} is no saved Bounds; use what to_dict made: {', '.join(_SAVED)}")
        for name in _SAVED:
            wanted, what = ("fiu", "numbers") if name in _SAVED[:3] else ("U", "words")
            try:
                held = np.asarray(numbers(saved[name]) if what == "numbers" else saved[name])
            except (ValueError, RecursionError):  # RecursionError: lists nested more deeply than `to_dict` nests them
                raise InputError(f"{name} is a ragged sequence; use what to_dict made") from None
            if held.size and held.dtype.kind not in wanted:
                raise InputError(f"{name} = {shown(saved[name])} must hold {what}; use what to_dict made")
        try:
            return cls(*(numbers(saved[name]) for name in _SAVED[:3]), *(saved[name] for name in _SAVED[3:]))
        except ValueError as error:
            raise InputError(f"saved is no saved Bounds: {error}; use what to_dict made") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Bounds, tuple(getattr(self, name) for name in _SAVED)

    def __iter__(self) -> Iterator[Bounds]:
        return (self[index] for index in range(len(self)))

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        if not self.shape:
            return _formatted(self, spec)
        shown_rows, rest = markup.cut(int(np.prod(self.shape)))
        flat = [self[np.unravel_index(row, self.shape)] for row in shown_rows]
        return f"{', '.join(_formatted(one, spec) for one in flat)}{f', ... {rest}' if rest else ''}"

    def _repr_html_(self) -> str:
        """Return the HTML table that a notebook shows, with the ends rounded outward. A long batch is cut."""

        def cells(index: tuple[int, ...]) -> list[str]:
            one = self[index]
            ends = [outward(one.lower, ".6g", up=False), f"{one.estimate:.6g}", outward(one.upper, ".6g", up=True)]
            return [*ends, one.kind, one.status, one.engine]

        return markup.batch("Bounds", _SAVED, self.shape, cells)

    def _refuse_order(self, sign: str, other: Any) -> NoReturn:
        value = _named(other)
        opposite = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[sign]
        sure, never = ("upper", "lower") if "<" in sign else ("lower", "upper")
        raise TypeError(
            f"b {sign} {value} has no answer for a bracket b: b.{sure} {sign} {value} says that it surely holds, "
            f"b.{never} {opposite} {value} that it surely does not"
        )

    __lt__ = functools.partialmethod(_refuse_order, "<")
    __le__ = functools.partialmethod(_refuse_order, "<=")
    __gt__ = functools.partialmethod(_refuse_order, ">")
    __ge__ = functools.partialmethod(_refuse_order, ">=")

    def __eq__(self, other: object) -> bool:
        value = _named(other)
        raise TypeError(
            f"b == {value} has no answer for a bracket b: (b.lower <= {value}) & ({value} <= b.upper) says whether it "
            "holds the value; compare two brackets end by end"
        )

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a bracket is neither true nor false; b.ok says whether it can be used, b is None is a test")

    def __float__(self) -> float:
        raise TypeError(
            "float(b) would hide an end of the bracket b; use float(b.upper) in a claim, float(b.lower) to refute one"
        )


_SAVED = ("lower", "estimate", "upper", "kind", "status", "engine")
"""Fields that `Bounds` takes and `to_dict` saves."""


def by_column(function: Callable[..., Any], *bounds: Bounds) -> Bounds:
    """For each field, call `function` with that field of every Bounds; return the results as one Bounds."""
    return Bounds(*(function(*(np.asarray(getattr(one, name)) for one in bounds)) for name in _SAVED))


def in_order(parts: Sequence[tuple[Any, Bounds]]) -> Bounds:
    """Return the Bounds of a whole batch in the order of its rows, from pairs (row numbers, Bounds of these rows)."""
    order = np.argsort(np.concatenate([np.ravel(rows) for rows, _ in parts]))
    whole = lambda *pieces: np.concatenate(list(map(np.ravel, pieces)))[order]
    return by_column(whole, *(bounds for _, bounds in parts))


def _named(other: Any) -> str:
    """Return the text for `other` in the error of a comparison: a number, a text or None as it is, else "x"."""
    known = isinstance(other, str | int | float | np.generic) or other is None
    return shown(other.item() if isinstance(other, np.generic) else other) if known else "x"


def _formatted(one: Bounds, spec: str) -> str:
    """Return one bracket as text. The text names the kind unless it is "certified", and the status unless "ok"."""
    words = ([] if one.kind == "certified" else [one.kind]) + ([] if one.status == "ok" else [one.status])
    return " ".join([bracket(one.lower, one.upper, spec), *words])
