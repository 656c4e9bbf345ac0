"""The mechanism that one of dp_accounting's DpEvent trees describes (needs the dp_accounting package)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from dp_accounting import dp_event

from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.interop.dp_event_fields import EventError, checked, number, refuse, rounded, whole
from jaxacct.interop.dp_event_leaves import LARGEST_DATASET, LEAVES
from jaxacct.mechanisms import (
    Mechanism,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    SampledWithoutReplacement,
    SampledWithReplacement,
    compose,
    repeat,
)
from jaxacct.selection import Law, Poisson, TruncatedNegativeBinomial, select

__all__ = ["EventError", "convert", "events_inside", "from_dp_event", "supports"]

MAX_DEPTH = 64
"""Most events inside one another; this also ends cycles."""
MAX_EVENTS = 2**15
"""Most events in one tree."""


def from_dp_event(event: dp_event.DpEvent) -> Mechanism:
    """The mechanism that a DpEvent describes, for the neighbouring relation it will be asked about.

    Every class of dp_accounting 0.6.0 is known but UnsupportedDpEvent, and of later versions EpsilonDelta,
    DiscreteGaussian, ExponentialMechanism, PermuteAndFlip and RandomAllocation; by exact class.

    * NoOp and an empty composition become PureDP(0).
    * A composition inside a sample runs on one sample.
    * DiscreteGaussian in one dimension is the noise itself. Otherwise it is zCDP with rho = sensitivity^2/(2 sigma^2),
      where the sensitivity is Euclidean and that of the relation in use.
    * Discrete Laplace's parameter a becomes the scale 1/a, rounded down.
    * RandomizedResponse answers at random with its noise parameter p as probability. It becomes the probability
      1 - p + p/k of the true answer, rounded up, so that the loss is never understated. Its guarantee is for replacing
      a record.
    * RepeatAndSelect becomes `selection.select`, whose answer is the exact worst case over scores. The parameter of the
      law of K is solved for, so that the mean is that of the event to the last digits.
    * ZCDp becomes `ZCDP`, whose rho and xi add in every composition.
    * SingleEpochTreeAggregation is one Gaussian for each node above a leaf. It holds where no record moves to another
      leaf: for zero-out, not for add/remove.
    * The source data set of a batch of a fixed size is the larger of the two.

    Parameters
    ----------
    event : dp_accounting.dp_event.DpEvent

    Returns
    -------
    Mechanism

    Raises
    ------
    InputError
        With one line that names the place: for every other event (user classes, ...); for one
        that no noise protects; for parameters that are not numbers in range; for counts beyond 2**53; and for more than
        64 levels or 2**15 events.

    References
    ----------
    dp_accounting's dp_event.py says what each event means.

    >>> import dp_accounting as dpa
    >>> from_dp_event(dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0)), 100))
    Repeated(mechanism=PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01), steps=100.0)
    """
    mechanism = convert(event)
    if mechanism is None:
        raise EventError("", event, "has a part without noise and no finite epsilon; give every part noise")
    return mechanism


def supports(event: object) -> bool:
    """Whether `from_dp_event` knows every part of the event.

    Parameters
    ----------
    event : object

    Returns
    -------
    bool

    >>> import dp_accounting as dpa
    >>> supports(dpa.GaussianDpEvent(1.0)), supports(dpa.UnsupportedDpEvent())
    (True, False)
    """
    try:
        return convert(event) is not None
    except InputError:
        return False


def convert(event: object) -> Mechanism | None:
    """The mechanism of an event, or None where a part without noise leaves no finite epsilon.

    Raises EventError, an InputError, for whatever `from_dp_event` refuses.
    """
    return _convert(event, "", 0, iter(range(MAX_EVENTS)))


def events_inside(event: Any) -> Iterator[Any]:
    """The event and all those inside it, of a tree that `convert` has taken."""
    yield event
    for inner in getattr(event, "events", [getattr(event, "event", None)]):
        if inner is not None:
            yield from events_inside(inner)


def _name(event: object) -> str:
    """The name of the event's class where it is dp_accounting's own, else nothing."""
    kind = type(event)
    return kind.__name__ if getattr(dp_event, kind.__name__, None) is kind else ""


def _convert(event: Any, path: str, depth: int, count: Iterator[int]) -> Mechanism | None:
    if depth > MAX_DEPTH:
        raise EventError("", event, f"nested more than {MAX_DEPTH} deep, or in a cycle; compose in fewer levels")
    if next(count, None) is None:
        raise EventError("", event, f"more than {MAX_EVENTS} events; use SelfComposedDpEvent for equal ones")
    name = _name(event)
    if name in LEAVES:
        return LEAVES[name](event, path)
    if name == "ComposedDpEvent":
        return _composed(event, path, depth, count)
    if name not in _AROUND:
        known = (word for word in (*LEAVES, "ComposedDpEvent", *_AROUND) if hasattr(dp_event, word))
        words = ", ".join(word.removesuffix("DpEvent") for word in known)
        refuse(event, path, f"{type(event).__name__:.60} is not supported; use one of dp_event's {words}")
    inner = _convert(event.event, f"{path}.event", depth + 1, count)
    return checked(event, path, lambda: _AROUND[name](event, path, inner))


def _composed(event: Any, path: str, depth: int, count: Iterator[int]) -> Mechanism | None:
    if type(event.events) not in (list, tuple):
        refuse(event, path, f"events must be a list of events, not {type(event.events).__name__}")
    parts = [_convert(item, f"{path}.events[{place}]", depth + 1, count) for place, item in enumerate(event.events)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return compose(*known) if known else PureDP(0.0)


def _repeated(event: Any, path: str, inner: Mechanism | None) -> Mechanism | None:
    steps = check("count", number(event, "count", path), COUNT)
    return None if inner is None else repeat(inner, steps)


def _poisson(event: Any, path: str, inner: Mechanism | None) -> Mechanism | None:
    rate = number(event, "sampling_probability", path)
    sampled = PoissonSampled(PureDP(0.0) if inner is None else inner, rate)
    return None if inner is None and rate > 0 else sampled


def _without_replacement(event: Any, path: str, inner: Mechanism | None) -> Mechanism | None:
    size = whole(event, "source_dataset_size", path, 1)
    drawn = whole(event, "sample_size", path, 0, size)
    ratio = rounded(Fraction(drawn, size), 1.0)
    sampled = SampledWithoutReplacement(PureDP(0.0) if inner is None else inner, ratio)
    return PureDP(0.0) if drawn == 0 else None if inner is None else sampled


def _with_replacement(event: Any, path: str, inner: Mechanism | None) -> Mechanism | None:
    size = whole(event, "source_dataset_size", path, 2, LARGEST_DATASET)
    drawn = whole(event, "sample_size", path, 0, LARGEST_DATASET)
    if drawn == 0:
        return PureDP(0.0)
    return None if inner is None else SampledWithReplacement(inner, drawn, size)


def _selected(event: Any, path: str, inner: Mechanism | None) -> Mechanism | None:
    mean, shape = number(event, "mean", path), number(event, "shape", path)
    if not 1 <= mean < math.inf:
        refuse(event, path, f"mean = {mean!r:.30} must be >= 1 and finite; use the expected number of runs")
    if not shape >= 0:
        refuse(event, path, f"shape = {shape!r:.30} must be >= 0; use 1 for a geometric law, or infinity for Poisson")
    law: Law | None = Poisson(mean) if shape == math.inf else _negative_binomial(float(mean), float(shape))
    if inner is None or inner == PureDP(0.0) or law is None:
        return inner
    return select(inner, law)


def _negative_binomial(mean: float, shape: float) -> Law | None:
    """The law of this mean, which falls from infinity to 1 as gamma rises to 1; None for one run."""
    from scipy.optimize import brentq  # takes a while to import: only where it is needed

    if mean == 1.0:
        return None
    if shape == 1.0:
        return TruncatedNegativeBinomial(1.0, 1.0 / mean)
    excess = lambda log: math.log(float(TruncatedNegativeBinomial(shape, math.exp(log)).mean) / mean)
    low = -1.0
    while excess(low) < 0.0:
        low *= 2.0
        if low < -600.0:
            raise InputError(f"mean = {mean!r} is not reached with shape = {shape!r}; claim nothing for it")
    log = brentq(excess, low, -1e-15, xtol=1e-15, rtol=1e-15) if excess(-1e-15) < 0.0 else -1e-15
    return TruncatedNegativeBinomial(shape, math.exp(log))


def _allocated(event: Any, path: str, inner: Mechanism | None) -> Mechanism | None:
    slots = whole(event, "num_steps", path, 1)
    taken = whole(event, "num_selected", path, 0, slots)
    if taken == 0:
        return PureDP(0.0)
    return None if inner is None else RandomAllocation(inner, slots, taken)


_AROUND = {
    "SelfComposedDpEvent": _repeated,
    "PoissonSampledDpEvent": _poisson,
    "SampledWithoutReplacementDpEvent": _without_replacement,
    "SampledWithReplacementDpEvent": _with_replacement,
    "RepeatAndSelectDpEvent": _selected,
    "RandomAllocationDpEvent": _allocated,
}
"""By the name of the event's class: (event, path, mechanism of the event inside or None) -> mechanism or None."""
