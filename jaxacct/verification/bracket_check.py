"""Check of a bracket of epsilon or delta against the mechanism's definition, in ball arithmetic: `ja.verify`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core import markup
from jaxacct.core.text import bracket, exact
from jaxacct.core.types import ArrayLike, Leaf
from jaxacct.core.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    RELATIONS,
    InputError,
    broadcast_shape,
    check,
    check_one,
    choice,
    refuse_tracers,
)
from jaxacct.mechanisms.base import Mechanism, batch_shape, element
from jaxacct.verification import delta_enclosure
from jaxacct.verification.ball_arithmetic import (
    NotCovered,
    OutOfTime,
    Unplanned,
    arb,
    ball,
    between,
    ctx,
    digits_of,
    gaussian_tail,
    outward,
    precision,
    until,
)
from jaxacct.verification.closed_form_losses import GaussianLoss
from jaxacct.verification.finite_losses import FiniteLosses
from jaxacct.verification.loss_definition import EITHER, directions, expand, mixes_orders
from jaxacct.verification.sampled_gaussian import SampledGaussian


@dataclass(frozen=True, eq=False)
class Verification:
    """The outcome of `ja.verify`: arrays with one element per configuration, or plain values for one configuration.

    Parameters
    ----------
    status : str or array of str
        "verified", "refuted" or "undecided".
    digits : int or array of int
        Decimal digits to which delta is known, the fewest of all epsilons at which it was computed.  0 where nothing is
        known, 99 where nothing had to be computed.
    lower, upper : float or array of float
        Enclosure of the true delta at the epsilon `at`.
    at : float or array of float
        The upper end of a bracket of epsilon (the lower end if the upper is infinite), or the epsilon given.
    seconds : float or array of float
        Time taken.
    explanation : str or array of str
        One line that states the claim and the reason for the status.

    >>> import jaxacct as ja
    >>> found = ja.verify(ja.Gaussian(2.0), ja.epsilon(ja.Gaussian(2.0), 1e-5), delta=1e-5)
    >>> found.status, found.lower <= found.upper, found.upper <= 1e-5
    ('verified', True, True)
    """

    status: Leaf
    digits: Leaf
    lower: Leaf
    upper: Leaf
    at: Leaf
    seconds: Leaf
    explanation: Leaf

    def _repr_html_(self) -> str:
        def cells(index: tuple[int, ...]) -> list[str]:
            names = ("status", "digits", "lower", "upper", "at", "explanation")
            status, digits, low, high, at, why = (np.asarray(getattr(self, name))[index] for name in names)
            return [str(status), str(digits), bracket(low, high, ".6g"), exact(at), str(why)]

        head = ("status", "digits", "delta", "at epsilon", "explanation")
        return markup.batch("Verification", head, np.shape(self.status), cells)


def verify(
    mechanism: Mechanism,
    bounds: object,
    *,
    delta: ArrayLike | None = None,
    epsilon: ArrayLike | None = None,
    relation: str = "add_or_remove_one",
    seconds: float = 60.0,
) -> Verification:
    """Check a bracket of epsilon (give `delta`) or of delta (give `epsilon`) in ball arithmetic.

    This is a second program.  It starts from the definition of the privacy loss and shares no code with the engines.
    Let delta(eps) be the larger delta of the relation's two directions.  A bracket [lower, upper] of epsilon is

        verified where both are proved: delta(upper) <= delta, and delta(eps) > delta for every eps < lower,
        refuted where the opposite of either is proved, or where lower > upper,
        undecided where neither verdict is proved within the time limit.

    lower = 0 and upper = inf hold always.  lower = inf holds where an infinite loss has a probability above delta.  A
    bracket of delta is compared with delta(epsilon).  An end that is NaN is never verified.  A bracket is undecided if
    its mechanism has no definition here, or has a field that the definition does not read.

    Parameters
    ----------
    mechanism : Mechanism
    bounds : Bounds, anything with `lower` and `upper`, or the result of a calibration, whose `epsilon` is checked
    delta, epsilon : array_like
        Delta for a bracket of epsilon, epsilon for one of delta.  It broadcasts with the mechanism and the bounds.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
        The neighbouring relation for which the bracket was computed.
    seconds : float
        Time limit of each configuration.

    Returns
    -------
    Verification
        `status`, the reason in `explanation`, and an enclosure of delta with the number of its `digits`.

    Raises
    ------
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
    _as_floats("delta" if epsilon is None else "epsilon", delta if epsilon is None else epsilon)
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
    """Return `lower` and `upper` of Bounds, or of the epsilon of a calibration, as float64 of one shape."""
    held = bounds if hasattr(bounds, "lower") else getattr(bounds, "epsilon", bounds)
    if not (hasattr(held, "lower") and hasattr(held, "upper")):
        raise InputError(
            f"bounds = {bounds!r:.60} must have lower and upper; give the answer of ja.epsilon or ja.delta"
        )
    try:
        ends = np.broadcast_arrays(_as_floats("lower", held.lower), _as_floats("upper", held.upper))
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise InputError("bounds must have numbers in lower and upper, of one shape") from None
    return ends[0], ends[1]


def _as_floats(name: str, given: Any) -> np.ndarray:
    """Return the values as float64. Refuse a value that float64 would round, for that would change the claim."""
    raw = np.asarray(given)
    if raw.dtype.kind == "c":
        raise InputError(f"{name} must be real numbers; give the claimed value")
    found = raw.astype(np.float64)
    if raw.dtype != np.float64 and not np.all((raw.astype(object) == found.astype(object)) | np.isnan(found)):
        raise InputError(f"{name} = {given!r:.60} is no float64; give the nearest one on the side that claims less")
    return found


class _Configuration:
    """Checks one configuration, and keeps every enclosure of delta found on the way."""

    def __init__(self, mechanism: Mechanism, relation: str, quantity: str, seconds: float) -> None:
        self.mechanism, self.relation, self.quantity, self.seconds = mechanism, relation, quantity, seconds
        self.directions = directions(mechanism, relation)
        self.mixed = mixes_orders(mechanism, relation)
        self.built: dict[Any, Any] = {}
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds
        self.known: dict[float, Any] = {}
        self.reason = ""

    def decide(self, lower: float, upper: float, given: float) -> tuple[Any, ...]:
        """Check [lower, upper] at the `given` epsilon or delta. Return the fields of a `Verification`, in order."""
        at = given if self.quantity == "delta" else lower if math.isinf(upper) else upper
        if lower > upper:
            return self._told({}, (lower, upper), at)
        try:
            if self.quantity == "delta":
                most = lambda: 1 if upper >= 1 else self._at_most(given, upper)
                least = lambda: -1 if lower > 1 else self._at_least(given, lower)
            else:
                most = lambda: 1 if math.isinf(upper) else self._at_most(upper, given)
                least = lambda: self._epsilon_at_least(lower, given)
            # `sides`: 1 for an end that holds, -1 for a false end, 0 for an undecided end.  No true value is below 0.
            sides = {"upper": 0 if math.isnan(upper) else -1 if upper < 0 else most()}
            sides |= {"lower": 0 if math.isnan(lower) else 1 if lower <= 0 else least()}
        except NotCovered as error:
            sides, self.reason = {"upper": 0, "lower": 0}, f"no definition for {error}"
        return self._told(sides, (lower, upper), at)

    def _epsilon_at_least(self, end: float, delta: float) -> int:
        """Return 1 where epsilon >= end, -1 where epsilon < end, 0 where neither is known."""
        found = self._by_largest_loss(end, delta)
        return found if found in (1, -1) else self._at_least(end, delta, found is None)

    def _by_largest_loss(self, end: float, delta: float) -> int | None:
        """Decide `epsilon >= end` if delta <= Pr[infinite loss], or return None (README.md, "What is verified")."""
        for bits in delta_enclosure.BITS:
            if time.monotonic() > self.deadline:
                self.reason = "the time was up"
                break
            with precision(bits):
                aim, place = ball(delta), ball(end)
                each = [self._composition(name) for name in range(len(self.directions))]
                if all(one.infinity < aim for one in each):
                    return None
                for one in each:
                    far = one.largest is None or one.largest >= place
                    if one.infinity > aim or (far and one.infinity >= aim):
                        return 1
                most = [self._composition(EITHER)] if self.mixed else each
                ends = [one.largest for one in most if one.infinity <= aim]
                if len(ends) == len(most) and all(top is not None and top < place for top in ends):
                    return -1
        return 0

    def _at_most(self, epsilon: float, target: float) -> int:
        """Return 1 where delta(epsilon) <= target, -1 where delta(epsilon) is larger, 0 where neither is known."""
        for low, high, aim in self._enclosures(epsilon, target):
            if high <= aim:
                return 1
            if low > aim:
                return -1
        return 0

    def _at_least(self, epsilon: float, target: float, equal: bool = True) -> int:
        """Return 1 if delta(epsilon) >= target, -1 if it is < target, else 0. If `equal` is False, 1 means > target."""
        for low, high, aim in self._enclosures(epsilon, target):
            if low > aim or (equal and low >= aim):
                return 1
            if high < aim:
                return -1
        return 0

    def _enclosures(self, epsilon: float, target: float) -> Iterator[tuple[Any, Any, Any]]:
        """Yield triples of balls: a lower and an upper bound of delta(epsilon), ever closer, and the target."""
        with precision(128):
            aim = ball(target)
        log_scale = math.log(target) if target > 0 else -800.0
        found = self._wide(epsilon)
        yield *self._larger(found, epsilon, 160), aim
        for level in range(delta_enclosure.LEVELS):
            # begin with the direction whose bound of delta is largest, since it often decides alone
            for name in sorted(found, key=lambda each: -float(found[each].abs_upper())):
                if time.monotonic() > self.deadline:
                    self.reason = "the time was up"
                    return
                if name != EITHER and any(found[name] < found[other] for other in found if other not in (name, EITHER)):
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
                    yield *self._larger(found, epsilon, delta_enclosure.BITS[level]), aim

    def _wide(self, epsilon: float) -> dict[Any, Any]:
        """Return a cheap enclosure of delta for each direction. Two directions with equal losses have one entry."""
        with precision(160):
            alike = {self._composition(name).keys: name for name in reversed(range(len(self.directions)))}
            names = [*reversed(alike.values()), *([EITHER] if self.mixed else [])]
            found = {}
            for name in names:
                composition, wide = self._composition(name), between(0, 1)
                if not math.isinf(epsilon):
                    simple = enclose(composition, ball(epsilon))
                    wide = simple if simple.is_finite() else wide
                if len(names) > 1:
                    # if Chernoff's bound shows a direction to have the smaller delta, `_enclosures` skips it
                    try:
                        with until(self.deadline):
                            most = delta_enclosure.at_most(composition, epsilon)
                    except OutOfTime:
                        most = arb("inf")
                    low, high = wide.lower().max(0), wide.upper()
                    wide = between(low.min(most), high.min(most)) if most.is_finite() else wide
                found[name] = wide
        return found

    def _larger(self, found: dict[Any, Any], epsilon: float, bits: int) -> tuple[Any, Any]:
        """Return lower and upper bounds of the directions' largest delta, as balls (README.md, "What is verified")."""
        with precision(bits):
            top = functools.reduce(lambda one, two: one.max(two), (x for name, x in found.items() if name != EITHER))
            high = found[EITHER] if self.mixed else top
            self.known[epsilon] = top.union(high) if self.mixed else top
        return top, high

    def _composition(self, name: Any) -> Any:
        """Return a direction's `Composition` at the set precision. `name`: EITHER, or an index of `self.directions`."""
        if (name, ctx.prec) not in self.built:
            order, direction = (self.mechanism, EITHER) if name == EITHER else self.directions[name]
            self.built[name, ctx.prec] = expand(order, self.relation, direction)
        return self.built[name, ctx.prec]

    def _told(self, sides: dict[str, int], ends: tuple[float, float], at: float) -> tuple[Any, ...]:
        seconds = time.monotonic() - self.begin
        low, high = outward(self.known[at]) if at in self.known else (0.0, 1.0)
        low, high = max(low, 0.0), min(high, 1.0)
        digits = min((digits_of(found) for found in self.known.values()), default=99)
        wrong = [name for name, side in sides.items() if side == -1]
        crossed = ends[0] > ends[1]
        open_ = [name for name, side in sides.items() if side == 0]
        claim = f"{self.quantity} in [{ends[0]!r}, {ends[1]!r}]"
        if crossed:
            status, words = "refuted", f"{claim} is false: its lower end is above its upper end"
        elif wrong:
            status, words = "refuted", f"{claim} is false: its {' and '.join(wrong)} end lies on the wrong side"
        elif open_:
            status = "undecided"
            words = f"{claim} is not decided at its {' and '.join(open_)} end ({self.reason or 'too few digits'})"
        else:
            status, words = "verified", f"{claim} holds"
        if status == "undecided" and not self.known:
            digits = 0
        words += f" (ball arithmetic, {digits} digits, {seconds:.1f} s)"
        return status, digits, low, high, at, seconds, words


def enclose(composition: Any, epsilon: Any) -> Any:
    """Return a ball that holds delta(epsilon) of a composition in one direction (README.md, "The quick enclosure")."""
    low, high = composition.infinity.max(0), arb(1)
    for part, count in composition.parts:
        if not count > 0:
            continue
        if hasattr(part, "hockey_stick"):
            low = low.max(part.hockey_stick(epsilon) + (part.infinity if isinstance(part, FiniteLosses) else 0))
        if type(part) is SampledGaussian:
            low = low.max(_any_output(part, count, epsilon))
    if composition.parts and all(type(part) in (SampledGaussian, GaussianLoss) for part, _ in composition.parts):
        square = arb(0)
        for part, count in composition.parts:
            square += count * (part.square if isinstance(part, GaussianLoss) else 1 / part.sigma**2)
        high = high.min(GaussianLoss(square).hockey_stick(epsilon))
    low, high = low.lower(), high.upper()
    # a law of integer noise may leave out far outcomes: the masses of the others are unchanged, so both bounds hold
    return between(low.max(0), high) if low <= high and high.is_finite() else arb("nan")


def _any_output(law: SampledGaussian, count: int, epsilon: Any) -> Any:
    """Bound delta from below by P(S) - e^eps Q(S). S means "an output is above u" (remove) or "none is" (add)."""
    best, shift, grown = arb(0), 1 / law.sigma, epsilon.exp()
    for place in (1, 2, 3, 4, 5, 6, 8, 10, 14, 20, *(shift + k for k in (-3, -1, 0, 2))):
        u = arb(place)
        plain, hit = gaussian_tail(u), gaussian_tail(u - shift)
        mixed = (1 - law.rate) * plain + law.rate * hit
        none, none_mixed = (1 - plain) ** count, (1 - mixed) ** count
        if law.direction == "remove":
            best = best.max((1 - none_mixed) - grown * (1 - none))
        else:
            best = best.max(none - grown * none_mixed)
    return best
