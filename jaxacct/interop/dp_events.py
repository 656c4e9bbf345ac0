"""Conversion between dp_accounting's DpEvent trees and mechanisms (needs the dp_accounting package).

A little above 300 lines: the two directions of the conversion are each other's inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from dp_accounting import dp_event

from jaxacct.mechanisms import (
    DiscreteLaplace,
    Gaussian,
    Laplace,
    Mechanism,
    MixtureOfGaussians,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    batch_shape,
    compose,
    repeat,
)
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.validation import COUNT, InputError, check, refuse_tracers

__all__ = ["EventError", "convert", "from_dp_event", "supports", "to_dp_event"]

MAX_DEPTH = 64
"""Most events inside one another; this also ends cycles."""
MAX_EVENTS = 10_000
"""Most events in one tree."""
MAX_SENSITIVITIES = 1000
"""Most sensitivities of a MixtureOfGaussiansDpEvent."""
LARGEST_SCALE = 1e300
"""The scale of discrete Laplace noise whose parameter is so small that its inverse may be beyond float64."""
MAX_CATEGORIES = 2**53
"""Most answers of randomised response: float64 holds all whole numbers up to here."""


class EventError(InputError):
    """An event was refused; `event` is the one at fault, the message one line that says where it stands."""

    def __init__(self, path: str, event: object, reason: str) -> None:
        super().__init__(f"{path or 'event'}: {reason}")
        self.event = event


def from_dp_event(event: dp_event.DpEvent) -> Mechanism:
    """The mechanism that a DpEvent describes, for the neighbouring relation it will be asked about.

    These classes are known, by exact class: NoOp, Gaussian, Laplace, DiscreteLaplace, MixtureOfGaussians,
    RandomizedResponse, SelfComposed, Composed, and PoissonSampled of one of the first three or of another
    PoissonSampled.

    * NoOp and an empty composition become PureDP(0).
    * Discrete Laplace's parameter a becomes the scale 1/a, rounded down.
    * RandomizedResponse answers at random with its noise parameter p as probability. It becomes the probability
      1 - p + p/k of the true answer, rounded up, so that the loss is never understated. Its guarantee is for replacing
      a record.

    Parameters
    ----------
    event : dp_accounting.dp_event.DpEvent

    Returns
    -------
    Mechanism

    Raises
    ------
    InputError
        With one line that names the place: for every other event (fixed-size samples, sampled compositions, user
        classes, ...); for one that no noise protects; for parameters that are not numbers in range; for counts beyond
        2**53; and for more than 64 levels or 10,000 events.

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


def to_dp_event(mechanism: Mechanism) -> dp_event.DpEvent:
    """The DpEvent of a single mechanism (no batch): the inverse of `from_dp_event`.

    Randomized response needs a probability of at least 1/k. Its noise parameter is rounded down, so that the event
    never promises more. dp_accounting 0.6.0 has no event for PureDP(epsilon > 0) or ApproximateDP.

    Parameters
    ----------
    mechanism : Mechanism
        One configuration.

    Returns
    -------
    dp_accounting.dp_event.DpEvent

    Raises
    ------
    InputError
        A batch, or a mechanism that has no event.

    References
    ----------
    dp_accounting's dp_event.py says what each event means.

    >>> from jaxacct.mechanisms import dp_sgd
    >>> to_dp_event(dp_sgd(1.0, 0.5, 10)).count
    10
    """
    shape = batch_shape(mechanism)
    refuse_tracers("interop.to_dp_event", "the mechanism outside jit", mechanism=mechanism)
    if shape:
        raise InputError(f"a batch of shape {shape} has no DpEvent; convert one configuration at a time")
    return _event(mechanism.validated())


def _event(mechanism: Mechanism) -> dp_event.DpEvent:
    match mechanism:
        case Gaussian():
            return dp_event.GaussianDpEvent(mechanism.noise_multiplier)
        case Laplace():
            return dp_event.LaplaceDpEvent(mechanism.scale)
        case DiscreteLaplace():
            return dp_event.DiscreteLaplaceDpEvent(
                _rounded(1 / Fraction(mechanism.scale), math.inf), mechanism.sensitivity
            )
        case PureDP(epsilon=0.0):
            return dp_event.NoOpDpEvent()
        case RandomizedResponse():
            return _response_event(mechanism)
        case PoissonSampled(group=1):
            return dp_event.PoissonSampledDpEvent(mechanism.sampling_probability, _event(mechanism.mechanism))
        case Repeated():
            return dp_event.SelfComposedDpEvent(_event(mechanism.mechanism), int(mechanism.steps))
        case Composed():
            return dp_event.ComposedDpEvent([_event(item) for item in mechanism.mechanisms])
    raise InputError(f"{type(mechanism).__name__} has no DpEvent; account for it with jaxacct.epsilon")


def _response_event(mechanism: RandomizedResponse) -> dp_event.DpEvent:
    k, truth = mechanism.categories, Fraction(mechanism.probability)
    exact = (1 - truth) * Fraction(k, k - 1)
    if exact > 1:
        raise InputError(f"probability = {mechanism.probability!r} must be >= 1/{k} to have a DpEvent; use more")
    return dp_event.RandomizedResponseDpEvent(_rounded(exact, 0.0), k)


def _rounded(exact: Fraction, towards: float) -> float:
    """The nearest float64 on the side of the exact value that `towards` is on."""
    value = float(exact)
    beyond = Fraction(value) > exact if towards < exact else Fraction(value) < exact
    return math.nextafter(value, towards) if beyond else value


def convert(event: object) -> Mechanism | None:
    """The mechanism of an event, or None where a part without noise leaves no finite epsilon.

    Raises EventError, an InputError, for whatever `from_dp_event` refuses.
    """
    return _convert(event, "", 0, iter(range(MAX_EVENTS)))


def _convert(event: Any, path: str, depth: int, count: Iterator[int]) -> Mechanism | None:
    if depth > MAX_DEPTH:
        raise EventError("", event, f"nested more than {MAX_DEPTH} deep, or in a cycle; compose in fewer levels")
    if next(count, None) is None:
        raise EventError("", event, f"more than {MAX_EVENTS} events; use SelfComposedDpEvent for equal ones")
    kind = type(event)
    if kind in _LEAVES:
        return _LEAVES[kind](event, path)
    if kind is dp_event.SelfComposedDpEvent:
        inner = _convert(event.event, f"{path}.event", depth + 1, count)
        steps = _number(event, "count", path)
        return _checked(event, path, lambda: None if inner is None else repeat(inner, check("count", steps, COUNT)))
    if kind is dp_event.ComposedDpEvent:
        if type(event.events) not in (list, tuple):
            _refuse(event, path, f"events must be a list of events, not {type(event.events).__name__}")
        pairs = enumerate(event.events)
        parts = [_convert(item, f"{path}.events[{i}]", depth + 1, count) for i, item in pairs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return compose(*known) if known else PureDP(0.0)
    if kind is dp_event.PoissonSampledDpEvent:
        return _sampled(event, path, depth, count)
    _refuse(event, path, f"{kind.__name__:.60} is not supported; use {', '.join(t.__name__ for t in _LEAVES)}")


def _sampled(event: Any, path: str, depth: int, count: Iterator[int]) -> Mechanism | None:
    if type(event.event) not in _SAMPLED:
        _refuse(
            event,
            path,
            f"PoissonSampledDpEvent of {type(event.event).__name__:.60} is not supported; sample a single Gaussian "
            "or Laplace step and compose the samples",
        )
    inner = _convert(event.event, f"{path}.event", depth + 1, count)
    rate = _number(event, "sampling_probability", path)
    step = PureDP(0.0) if inner is None else inner
    sampled = _checked(event, path, lambda: PoissonSampled(step, rate))
    return None if inner is None and rate > 0 else sampled


def _additive(mechanism: Callable[[Any], Mechanism]) -> Callable[[Any, str], Mechanism | None]:
    def build(event: Any, path: str) -> Mechanism | None:
        noise = _number(event, "noise_multiplier", path)
        return None if noise == 0 else _checked(event, path, lambda: mechanism(noise))

    return build


def _response(event: Any, path: str) -> Mechanism | None:
    k, noise = _number(event, "num_buckets", path), _number(event, "noise_parameter", path)
    if not isinstance(k, int) or not 1 <= k <= MAX_CATEGORIES:
        _refuse(event, path, f"num_buckets = {k!r:.30} must be a whole number from 1 to 2**53; use the answers' number")
    if not 0 <= noise <= 1:
        _refuse(event, path, f"noise_parameter = {noise!r:.30} must be between 0 and 1; use a probability")
    if k == 1:
        return PureDP(0.0)
    truth = _rounded(1 - Fraction(noise) * Fraction(k - 1, k), 1.0)
    if truth == 1.0:
        return None
    return _checked(event, path, lambda: RandomizedResponse(truth, k))


def _discrete(event: Any, path: str) -> Mechanism | None:
    noise = _number(event, "noise_parameter", path)
    if noise == 0:
        return None
    if not 0 < noise < math.inf:
        _refuse(event, path, f"noise_parameter = {noise!r:.30} must be >= 0 and finite; use the inverse of the scale")
    scale = _rounded(1 / Fraction(noise), 0.0) if noise > 1 / LARGEST_SCALE else LARGEST_SCALE
    moved: Any = _number(event, "sensitivity", path)  # the constructor refuses what is no integer
    return _checked(event, path, lambda: DiscreteLaplace(scale, moved))


def _mixture(event: Any, path: str) -> Mechanism | None:
    sigma = _number(event, "standard_deviation", path)
    shifts, chances = (_numbers(event, name, path) for name in ("sensitivities", "sampling_probs"))
    mixture = _checked(event, path, lambda: MixtureOfGaussians(sigma or 1.0, shifts, chances))
    if not any(shift * chance for shift, chance in zip(shifts, chances, strict=True)):
        return PureDP(0.0)
    return mixture if sigma != 0 else None


_LEAVES: dict[type, Callable[[Any, str], Mechanism | None]] = {
    dp_event.NoOpDpEvent: lambda event, path: PureDP(0.0),
    dp_event.NonPrivateDpEvent: lambda event, path: None,
    dp_event.GaussianDpEvent: _additive(Gaussian),
    dp_event.LaplaceDpEvent: _additive(Laplace),
    dp_event.DiscreteLaplaceDpEvent: _discrete,
    dp_event.MixtureOfGaussiansDpEvent: _mixture,
    dp_event.RandomizedResponseDpEvent: _response,
}
_SAMPLED = (
    dp_event.NoOpDpEvent,
    dp_event.NonPrivateDpEvent,
    dp_event.GaussianDpEvent,
    dp_event.LaplaceDpEvent,
    dp_event.PoissonSampledDpEvent,
)


def _numbers(event: Any, name: str, path: str) -> list[float]:
    values = getattr(event, name)
    flat = type(values) in (list, tuple) or (type(values) is np.ndarray and values.ndim == 1)
    if not flat or not 0 < len(values) <= MAX_SENSITIVITIES:
        _refuse(event, path, f"{name} must be a list of 1 to {MAX_SENSITIVITIES} numbers; use [0.0, 1.0]")
    return [_plain(event, f"{name}[{i}]", value, path) for i, value in enumerate(values)]


def _number(event: Any, name: str, path: str) -> int | float:
    return _plain(event, name, getattr(event, name), path)


def _plain(event: Any, name: str, value: Any, path: str) -> int | float:
    """A parameter as a Python number; nothing but plain and NumPy scalars is looked into."""
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if type(value) not in (int, float):
        _refuse(event, path, f"{name} must be a number, not {type(value).__name__:.60}; use a Python float or int")
    return value


def _checked(event: Any, path: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except InputError as error:
        raise EventError(path.lstrip("."), event, str(error)) from None


def _refuse(event: Any, path: str, reason: str) -> NoReturn:
    raise EventError(path.lstrip("."), event, reason)
