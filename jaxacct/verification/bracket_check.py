"""ja.verify: whether a bracket of epsilon or delta is true, by ball arithmetic on the mechanism's definition."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxacct.mechanisms.base import RELATIONS, Mechanism, batch_shape, element
from jaxacct.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    InputError,
    broadcast_shape,
    check,
    check_one,
    choice,
    refuse_tracers,
)
from jaxacct.verification import delta_enclosure, quick_enclosure
from jaxacct.verification.ball_arithmetic import ball, between, digits_of, outward, precision, until
from jaxacct.verification.loss_definition import directions, expand
from jaxacct.verification.result import NotCovered, OutOfTime, Unplanned, Verification

__all__ = ["verify"]


def verify(
    mechanism: Mechanism,
    bounds: Any,
    *,
    delta: Any = None,
    epsilon: Any = None,
    relation: str = "add_or_remove_one",
    seconds: float = 60.0,
) -> Verification:
    """Check a bracket of epsilon (give `delta`) or of delta (give `epsilon`) in ball arithmetic.

    This is a second program.  It starts from the definition of the privacy loss and shares no code with the engines.
    With delta(eps) the larger of the relation's directions, a bracket [lower, upper] of epsilon is

        verified where delta(upper) <= delta and delta(lower) >= delta were both enclosed,
        refuted where one of them was enclosed on the other side,
        undecided otherwise, within the time.

    lower = 0 and upper = inf hold always.  lower = inf holds where the mass at infinity exceeds delta.  A bracket of
    delta is compared with delta(epsilon) itself.  An end that is NaN is never verified.

    Parameters
    ----------
    mechanism : Mechanism
    bounds : Bounds, anything with `lower` and `upper`, or the result of a calibration (its `epsilon`)
    delta, epsilon : array_like
        Give one: delta where the bracket is of epsilon, epsilon where it is of delta.  It broadcasts with the mechanism
        and the bounds.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
        The neighbouring relation for which the bracket was computed.
    seconds : float
        Time limit of each configuration.

    Returns
    -------
    Verification
        `status`, `digits`, and `lower`, `upper`: an enclosure of the true delta at the epsilon `at`, which is the
        bracket's upper end (for a bracket of epsilon) or the epsilon given.

    Raises
    ------
    InputError
        Invalid values, or shapes that do not broadcast.
    ModuleNotFoundError
        The package python-flint is not installed (extra `verify`).

    References
    ----------
    jaxacct/verification/README.md has every formula with its proof; Johansson (2017), Arb, is the ball arithmetic.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.Gaussian(2.0), 1e-5)
    >>> ja.verify(ja.Gaussian(2.0), b, delta=1e-5).status
    'verified'
    >>> ja.verify(ja.Gaussian(1.999), b, delta=1e-5).status
    'refuted'
    """
    refuse_tracers("ja.verify", "nothing", mechanism=mechanism, delta=delta, epsilon=epsilon)
    if (delta is None) == (epsilon is None):
        raise InputError("give delta for a bracket of epsilon, or epsilon for a bracket of delta, and not both")
    choice("relation", relation, RELATIONS)
    seconds = check_one("seconds", seconds, POSITIVE, "it is the limit of each configuration")
    quantity = "epsilon" if epsilon is None else "delta"
    given = check("delta", delta, DELTA_OR_ZERO) if epsilon is None else check("epsilon", epsilon, NON_NEGATIVE)
    lower, upper = _bracket(bounds)
    shape = broadcast_shape(
        {"the mechanism": batch_shape(mechanism), "the bounds": lower.shape, "the value given": np.shape(given)}
    )
    mine = batch_shape(mechanism)
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape)
    low, high, values = (np.broadcast_to(np.asarray(x), shape) for x in (lower, upper, given))
    results = np.empty(shape, object)
    for index in np.ndindex(shape):
        place = np.unravel_index(int(rows[index]), mine) if mine else ()
        one = element(mechanism, tuple(int(i) for i in place))
        row = (float(low[index]), float(high[index]), float(values[index]))
        results[index] = _Configuration(one, relation, quantity, seconds).decide(*row)
    columns = [np.empty(shape, kind) for kind in ("<U9", int, float, float, float, float, object)]
    for index in np.ndindex(shape):
        for column, value in zip(columns, results[index], strict=True):
            column[index] = value
    if not shape:
        return Verification(*results[()])
    columns[-1] = columns[-1].astype(np.str_)
    for column in columns:
        column.setflags(write=False)
    return Verification(*columns)


def _bracket(bounds: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of Bounds, or of the epsilon of a calibration, as float64 of one shape."""
    held = bounds if hasattr(bounds, "lower") else getattr(bounds, "epsilon", bounds)
    if not (hasattr(held, "lower") and hasattr(held, "upper")):
        raise InputError(
            f"bounds = {bounds!r:.60} must have lower and upper; give the answer of ja.epsilon or ja.delta"
        )
    try:
        ends = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (held.lower, held.upper)))
    except (TypeError, ValueError):
        raise InputError("bounds must have numbers in lower and upper, of one shape") from None
    return ends[0], ends[1]


class _Configuration:
    """The check of one configuration, with every enclosure of delta that was found on the way."""

    def __init__(self, mechanism: Mechanism, relation: str, quantity: str, seconds: float) -> None:
        self.mechanism, self.relation, self.quantity, self.seconds = mechanism, relation, quantity, seconds
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds
        self.known: dict[float, Any] = {}
        self.reason = ""

    def decide(self, lower: float, upper: float, given: float) -> tuple[Any, ...]:
        """Status, digits, enclosure of delta, where, seconds and explanation."""
        at = given if self.quantity == "delta" else lower if math.isinf(upper) else upper
        try:
            if self.quantity == "delta":
                sides = {"upper": self._delta_at_most(given, upper), "lower": self._delta_at_least(given, lower)}
            else:
                sides = {"upper": self._upper(upper, given), "lower": self._lower(lower, given)}
        except NotCovered as error:
            sides, self.reason = {"upper": 0, "lower": 0}, f"no definition for {error}"
        return self._told(sides, (lower, upper), given, at)

    def _upper(self, end: float, delta: float) -> int:
        """1 where epsilon <= end, -1 where epsilon > end, 0 where that is not known."""
        if math.isnan(end) or end < 0:
            return 0 if math.isnan(end) else -1
        return 1 if math.isinf(end) else self._at_most(end, delta)

    def _lower(self, end: float, delta: float) -> int:
        """1 where epsilon >= end, -1 where epsilon < end, 0 where that is not known."""
        if math.isnan(end) or end <= 0:
            return 0 if math.isnan(end) else 1
        if delta == 0 and not math.isinf(end):
            return self._reaches(end)
        return self._at_least(end, delta)

    def _delta_at_most(self, epsilon: float, end: float) -> int:
        if math.isnan(end) or end < 0:
            return 0 if math.isnan(end) else -1
        return 1 if end >= 1 else self._at_most(epsilon, end)

    def _delta_at_least(self, epsilon: float, end: float) -> int:
        if math.isnan(end) or end <= 0:
            return 0 if math.isnan(end) else 1
        return -1 if end > 1 else self._at_least(epsilon, end)

    def _at_most(self, epsilon: float, target: float) -> int:
        """1 where delta(epsilon) <= target, -1 where it is larger, 0 where that is not known."""
        for found, aim in self._enclosures(epsilon, target):
            if found <= aim:
                return 1
            if found > aim:
                return -1
        return 0

    def _at_least(self, epsilon: float, target: float) -> int:
        """1 where delta(epsilon) >= target, -1 where it is smaller, 0 where that is not known.

        At an infinite epsilon, where delta is the mass at infinity, 1 only where it is larger.
        """
        for found, aim in self._enclosures(epsilon, target):
            if found > aim or (found >= aim and not math.isinf(epsilon)):
                return 1
            if found < aim:
                return -1
        return 0

    def _enclosures(self, epsilon: float, target: float) -> Iterator[tuple[Any, Any]]:
        """Finer and finer enclosures of delta(epsilon), the larger of the directions, each beside the target."""
        with precision(128):
            aim = ball(target)
        log_scale = math.log(target) if target > 0 else -800.0
        found = self._wide(epsilon)
        yield self._larger(found, epsilon, 160), aim
        for level in range(delta_enclosure.LEVELS):
            # the direction that may leak most comes first, and often decides alone
            for name in sorted(found, key=lambda each: -float(found[each].abs_upper())):
                if time.monotonic() > self.deadline:
                    self.reason = "the time was up"
                    return
                if any(found[name] < found[other] for other in found if other != name):
                    continue
                try:
                    with until(self.deadline):
                        build = functools.partial(self._composition, name)
                        closer = delta_enclosure.enclose(build, epsilon, log_scale, level)
                except (OutOfTime, Unplanned) as error:
                    self.reason = str(error) or "the time was up"
                    continue
                if closer.is_finite():
                    found[name] = closer
                    yield self._larger(found, epsilon, delta_enclosure.BITS[level]), aim

    def _wide(self, epsilon: float) -> dict[str, Any]:
        """An enclosure of each direction at almost no cost; two directions with equal losses appear once."""
        names = directions(self.mechanism, self.relation)
        with precision(160):
            alike = {self._composition(name).keys: name for name in reversed(names)}
            found = {}
            for name in reversed(alike.values()):
                composition, wide = self._composition(name), between(0, 1)
                if not math.isinf(epsilon):
                    simple = quick_enclosure.enclose(composition, ball(epsilon))
                    wide = simple if simple.is_finite() else wide
                if len(alike) > 1:
                    # often this shows that one direction leaks less than the other
                    most = delta_enclosure.at_most(composition, epsilon)
                    low, high = wide.lower().max(0), wide.upper()
                    wide = between(low.min(most), high.min(most)) if most.is_finite() else wide
                found[name] = wide
        return found

    def _larger(self, found: dict[str, Any], epsilon: float, bits: int) -> Any:
        with precision(bits):
            top = functools.reduce(lambda one, two: one.max(two), found.values())
        self.known[epsilon] = top
        return top

    def _composition(self, direction: str) -> Any:
        return expand(self.mechanism, self.relation, direction)

    def _reaches(self, end: float) -> int:
        """Whether epsilon at delta 0, the largest loss, is at least `end`."""
        for bits in delta_enclosure.BITS:
            with precision(bits):
                sides = []
                for name in directions(self.mechanism, self.relation):
                    composition = self._composition(name)
                    largest = composition.largest
                    unbounded = largest is None or composition.infinity > 0
                    above = unbounded or largest >= ball(end)
                    sides.append(1 if above else -1 if largest < ball(end) else 0)
            if 1 in sides:
                return 1
            if all(side == -1 for side in sides):
                return -1
        return 0

    def _told(self, sides: dict[str, int], ends: tuple[float, float], given: float, at: float) -> tuple[Any, ...]:
        seconds = time.monotonic() - self.begin
        low, high = outward(self.known[at]) if at in self.known else (0.0, 1.0)
        low, high = max(low, 0.0), min(high, 1.0)
        digits = min((digits_of(found) for found in self.known.values()), default=99)
        wrong = [name for name, side in sides.items() if side == -1]
        open_ = [name for name, side in sides.items() if side == 0]
        bracket = f"{self.quantity} in [{ends[0]!r}, {ends[1]!r}]"
        if wrong:
            status, words = "refuted", f"{bracket} is false: its {' and '.join(wrong)} end lies on the wrong side"
        elif open_:
            status = "undecided"
            words = f"{bracket} is not decided at its {' and '.join(open_)} end ({self.reason or 'too few digits'})"
        else:
            status, words = "verified", f"{bracket} holds"
        if status == "undecided" and not self.known:
            digits = 0
        words += f" (ball arithmetic, {digits} digits, {seconds:.1f} s)"
        return status, digits, low, high, at, seconds, words
