"""dp_accounting's DpEvent trees as mechanisms, and mechanisms as events (needs the dp_accounting package).

Events may come from a stranger, so only plain numbers are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from dp_accounting import dp_event

from jaxacct.core.validation import COUNT, LARGEST_COUNT, InputError, check, refuse_tracers
from jaxacct.mechanisms import (
    ZCDP,
    ApproximateDP,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    Gaussian,
    Laplace,
    MatrixMechanism,
    Mechanism,
    MixtureOfGaussians,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    ReportNoisyMax,
    SampledWithoutReplacement,
    SampledWithReplacement,
    TruncatedPoissonSampled,
    batch_shape,
    compose,
    repeat,
)
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.mechanisms.matrix_mechanism import SharedBins
from jaxacct.selection import Law, Poisson, Selection, TruncatedNegativeBinomial, select

MAX_SENSITIVITIES = 1000
"""Largest number of elements of an event's field that is a list."""
MAX_DEPTH = 64
"""Largest number of levels of nested events. An event that contains itself exceeds this limit and is refused."""
MAX_EVENTS = 2**15
"""Largest number of events in one tree."""
LARGEST_SCALE = 1e300
"""Larger scales of discrete Laplace noise are lowered to this number, to stay finite. Less noise raises epsilon."""
LARGEST_DATASET = 10**9
"""Largest number of records of a data set, for Poisson samples of a capped size and for samples with replacement."""
Leaf = Callable[[Any, str], Mechanism | None]


def _additive(mechanism: Callable[[Any], Mechanism]) -> Leaf:
    def build(event: Any, path: str) -> Mechanism | None:
        noise = number(event, "noise_multiplier", path)
        return None if noise == 0 else checked(event, path, lambda: mechanism(noise))

    return build


def _by_epsilon(mechanism: Callable[[Any], Mechanism]) -> Leaf:
    return lambda event, path: checked(event, path, lambda: mechanism(number(event, "epsilon", path)))


def _response(event: Any, path: str) -> Mechanism | None:
    k, noise = number(event, "num_buckets", path), number(event, "noise_parameter", path)
    if not isinstance(k, int):
        refuse(event, path, f"num_buckets = {k!r:.30} must be a whole number from 1 to 2**53; use the answers' number")
    k = whole(event, "num_buckets", path, 1)
    if not 0 <= noise <= 1:
        refuse(event, path, f"noise_parameter = {noise!r:.30} must be between 0 and 1; use a probability")
    if k == 1:
        return PureDP(0.0)
    truth = rounded(1 - Fraction(noise) * Fraction(k - 1, k), 1.0)
    return None if truth == 1.0 else checked(event, path, lambda: RandomizedResponse(truth, k))


def _discrete_laplace(event: Any, path: str) -> Mechanism | None:
    noise = finite(event, "noise_parameter", path)
    if noise == 0:
        return None
    scale = rounded(1 / Fraction(noise), 0.0) if noise > 1 / LARGEST_SCALE else LARGEST_SCALE
    moved: Any = number(event, "sensitivity", path)  # may be a non-integer, which `DiscreteLaplace` refuses
    return checked(event, path, lambda: DiscreteLaplace(scale, moved))


def _discrete_gaussian(event: Any, path: str) -> Mechanism | None:
    """Return `DiscreteGaussian` if the dimension is 1. Otherwise return `ZCDP`, for a Euclidean sensitivity."""
    sigma, moved, dimension = number(event, "sigma", path), number(event, "sensitivity", path), event.dimension
    if dimension is not None and (type(dimension) is not int or dimension < 1):
        refuse(event, path, f"dimension = {dimension!r:.30} must be a whole number or None; use that of the vector")
    if dimension != 1:
        sigma, moved = (finite(event, name, path) for name in ("sigma", "sensitivity"))
        if moved == 0 or sigma == 0:
            return PureDP(0.0) if moved == 0 else None
        return checked(event, path, lambda: ZCDP(rounded(Fraction(moved) ** 2 / (2 * Fraction(sigma) ** 2), math.inf)))
    if moved == 0:
        return PureDP(0.0)
    whole(event, "sensitivity", path, 1)
    return None if sigma == 0 else checked(event, path, lambda: DiscreteGaussian(sigma, int(moved)))


def _mixture(event: Any, path: str) -> Mechanism | None:
    sigma = number(event, "standard_deviation", path)
    shifts, chances = (numbers(event, name, path) for name in ("sensitivities", "sampling_probs"))
    mixture = checked(event, path, lambda: MixtureOfGaussians(sigma or 1.0, shifts, chances))
    if not any(shift * chance for shift, chance in zip(shifts, chances, strict=True)):
        return PureDP(0.0)
    return mixture if sigma != 0 else None


def _guarantee(event: Any, path: str) -> Mechanism | None:
    epsilon, delta = number(event, "epsilon", path), number(event, "delta", path)
    build = lambda: ApproximateDP(epsilon, delta) if delta != 0 else PureDP(epsilon)
    return None if delta == 1 else checked(event, path, build)


def _zcdp(event: Any, path: str) -> Mechanism | None:
    rho, xi = (finite(event, name, path) for name in ("rho", "xi"))
    return checked(event, path, lambda: ZCDP(float(rho), float(xi)) if rho > 0 else PureDP(float(xi)))


def _tree(event: Any, path: str) -> Mechanism | None:
    """Return one Gaussian per tree node that a record may change: one per binary digit of the largest step count."""
    counts = event.step_counts
    counts = list(counts) if type(counts) in (list, tuple) else [counts]
    if not counts or any(type(n) is not int or not 0 <= n <= 2**53 for n in counts):
        refuse(event, path, "step_counts must be one or more whole numbers from 0 to 2**53; use the steps of each tree")
    noise, depth = number(event, "noise_multiplier", path), max(counts).bit_length()
    if depth == 0:
        return PureDP(0.0)
    return None if noise == 0 else checked(event, path, lambda: repeat(Gaussian(noise), depth))


def _capped(event: Any, path: str) -> Mechanism | None:
    size, cap = (whole(event, name, path, 0, LARGEST_DATASET) for name in ("dataset_size", "truncated_batch_size"))
    rate, noise = number(event, "sampling_probability", path), number(event, "noise_multiplier", path)
    build = lambda: TruncatedPoissonSampled(Gaussian(noise or 1.0), rate, max(size, 1), max(cap, 1))
    step = checked(event, path, build)
    if 0 in (size, cap, rate):
        return PureDP(0.0)
    return step if noise != 0 else None


LEAVES: dict[str, Leaf] = {
    "NoOpDpEvent": lambda event, path: PureDP(0.0),
    "NonPrivateDpEvent": lambda event, path: None,
    "GaussianDpEvent": _additive(Gaussian),
    "LaplaceDpEvent": _additive(Laplace),
    "DiscreteLaplaceDpEvent": _discrete_laplace,
    "DiscreteGaussianDpEvent": _discrete_gaussian,
    "MixtureOfGaussiansDpEvent": _mixture,
    "RandomizedResponseDpEvent": _response,
    "ExponentialMechanismDpEvent": _by_epsilon(ExponentialMechanism),
    "PermuteAndFlipDpEvent": _by_epsilon(lambda epsilon: ReportNoisyMax(epsilon, "exponential")),
    "EpsilonDeltaDpEvent": _guarantee,
    "ZCDpEvent": _zcdp,
    "SingleEpochTreeAggregationDpEvent": _tree,
    "TruncatedSubsampledGaussianDpEvent": _capped,
}
"""The reader of each class of events. Older versions of dp_accounting lack some of these classes."""


def from_dp_event(event: dp_event.DpEvent) -> Mechanism:
    """Return the mechanism that a DpEvent describes. The neighbouring relation is an argument of `jaxacct.epsilon`.

    All classes of dp_accounting 0.6.0 are known except UnsupportedDpEvent. Of later versions EpsilonDelta,
    DiscreteGaussian, ExponentialMechanism, PermuteAndFlip and RandomAllocation are known. Subclasses are refused.

    * NoOp and an empty composition become PureDP(0).
    * The parts of a composition inside a sample all run on the same sample.
    * DiscreteGaussian in one dimension becomes `DiscreteGaussian`. Otherwise it becomes zCDP with
      rho = sensitivity^2/(2 sigma^2). The event must then give the Euclidean sensitivity under the relation in use.
    * Discrete Laplace's parameter a becomes the scale 1/a, rounded down.
    * RandomizedResponse among k answers with the noise parameter p gives the true one with probability 1 - p + p/k,
      rounded up, so that the loss is never understated. The guarantee is for replacing a record.
    * RepeatAndSelect becomes `selection.select`. Its law of K, the number of runs, has the event's mean up to rounding.
    * ZCDp becomes `ZCDP`. In a composition the rho of all ZCDp events add up, and so do their xi.
    * SingleEpochTreeAggregation becomes one Gaussian for each tree node that a record may change. The guarantee holds
      for zero-out, which moves no record to another leaf, but not for add/remove.
    * For batches of a fixed size the event's data-set size is the size of the larger of two neighbouring data sets.

    Parameters
    ----------
    event : dp_accounting.dp_event.DpEvent

    Returns
    -------
    Mechanism

    Raises
    ------
    InputError
        For every other event, an event without noise, parameters that are not numbers in range, counts beyond 2**53,
        and more than 64 levels or 2**15 events. The message names the event's place in the tree.

    References
    ----------
    dp_accounting's dp_event.py.

    >>> import dp_accounting as dpa
    >>> from_dp_event(dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0)), 100))
    Repeated(mechanism=PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01), steps=100.0)
    """
    mechanism = convert(event)
    if mechanism is None:
        raise EventError("", event, "has a part without noise and no finite epsilon; give every part noise")
    return mechanism


def supports(event: object) -> bool:
    """Return whether `from_dp_event` knows every part of the event.

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
    """Return the mechanism of an event, or None where a part without noise leaves no finite epsilon."""
    return _convert(event, "", 0, iter(range(MAX_EVENTS)))


def events_inside(event: Any) -> Iterator[Any]:
    """Yield the events of a tree that `convert` has accepted, the root first."""
    yield event
    for inner in getattr(event, "events", [getattr(event, "event", None)]):
        if inner is not None:
            yield from events_inside(inner)


def _convert(event: Any, path: str, depth: int, count: Iterator[int]) -> Mechanism | None:
    if depth > MAX_DEPTH:
        raise EventError("", event, f"nested more than {MAX_DEPTH} deep, or in a cycle; compose in fewer levels")
    if next(count, None) is None:
        raise EventError("", event, f"more than {MAX_EVENTS} events; use SelfComposedDpEvent for equal ones")
    kind = type(event)
    # a user's subclass gets the name "" and is refused: its meaning may differ from that of its base class
    name = kind.__name__ if getattr(dp_event, kind.__name__, None) is kind else ""
    if name in LEAVES:
        return LEAVES[name](event, path)
    if name == "ComposedDpEvent":
        return _composed(event, path, depth, count)
    if name not in _AROUND:
        known = (word for word in (*LEAVES, "ComposedDpEvent", *_AROUND) if hasattr(dp_event, word))
        words = ", ".join(word.removesuffix("DpEvent") for word in known)
        refuse(event, path, f"{kind.__name__:.60} is not supported; use one of dp_event's {words}")
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
    """Return the law of K, the number of runs, with this shape and mean; None if K is always 1."""
    from scipy.optimize import brentq  # a slow import that few events need

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
"""The reader, (event, path, inner mechanism) -> mechanism, of each class of events that hold an inner event."""


class EventError(InputError):
    """Raised for the refused `event`. The message names its place in the tree."""

    def __init__(self, path: str, event: object, reason: str) -> None:
        super().__init__(f"{path or 'event'}: {reason}")
        self.event = event


def refuse(event: Any, path: str, reason: str) -> NoReturn:
    """Raise an EventError for the event at a path."""
    raise EventError(path.lstrip("."), event, reason)


def checked(event: Any, path: str, build: Callable[[], Any]) -> Any:
    """Return `build()`. An InputError of `build` becomes an EventError that names the event's place."""
    try:
        return build()
    except InputError as error:
        raise EventError(path.lstrip("."), event, str(error)) from None


def number(event: Any, name: str, path: str) -> int | float:
    """Return a field as a Python number; accept only plain and NumPy scalars."""
    return _plain(event, name, getattr(event, name), path)


def finite(event: Any, name: str, path: str) -> int | float:
    """Return a field, which must be a finite number >= 0."""
    value = number(event, name, path)
    if not 0 <= value < math.inf:
        refuse(event, path, f"{name} = {value!r:.30} must be >= 0 and finite; give the mechanism its number")
    return value


def numbers(event: Any, name: str, path: str) -> list[float]:
    """Return a field, which must be a list of numbers."""
    values = getattr(event, name)
    flat = type(values) in (list, tuple) or (type(values) is np.ndarray and values.ndim == 1)
    if not flat or not 0 < len(values) <= MAX_SENSITIVITIES:
        refuse(event, path, f"{name} must be a list of 1 to {MAX_SENSITIVITIES} numbers; use [0.0, 1.0]")
    return [_plain(event, f"{name}[{i}]", value, path) for i, value in enumerate(values)]


def whole(event: Any, name: str, path: str, least: int, most: int = LARGEST_COUNT) -> int:
    """Return a field, which must be a whole number from `least` to `most`."""
    value = number(event, name, path)
    if not least <= value <= most or value != int(value):
        largest = "2**53" if most == LARGEST_COUNT else str(most)
        refuse(event, path, f"{name} = {value!r:.30} must be a whole number from {least} to {largest}; use an integer")
    return int(value)


def rounded(exact: Fraction, towards: float) -> float:
    """Round an exact value to float64, in the direction of `towards`."""
    value = float(exact)
    beyond = Fraction(value) > exact if towards < exact else Fraction(value) < exact
    return math.nextafter(value, towards) if beyond else value


def _plain(event: Any, name: str, value: Any, path: str) -> int | float:
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if type(value) not in (int, float):
        refuse(event, path, f"{name} must be a number, not {type(value).__name__:.60}; use a Python float or int")
    return value


def to_dp_event(mechanism: Mechanism) -> dp_event.DpEvent:
    """Return the DpEvent of a single mechanism (no batch); this is the inverse of `from_dp_event`.

    Randomized response among k answers must give the true answer with probability at least 1/k. Its event's noise
    parameter is rounded down, so that the event never promises more privacy than the mechanism has. A sampling ratio
    becomes a sample size and a data-set size whose ratio, rounded up, is the sampling ratio. A matrix mechanism becomes
    the Gaussians that it equals, sampled or not; where groups take turns, the event is for adding and removing alone,
    since it cannot say that a replaced record may change its group. PureDP(epsilon > 0), ApproximateDP,
    DiscreteGaussian, ExponentialMechanism, ReportNoisyMax and RandomAllocation need a later dp_accounting than 0.6.0.

    Parameters
    ----------
    mechanism : Mechanism

    Returns
    -------
    dp_accounting.dp_event.DpEvent

    Raises
    ------
    InputError
        If the mechanism is a batch, or has no event.

    References
    ----------
    dp_accounting's dp_event.py.

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
    """Return the event of a mechanism; refuse a mechanism whose event the installed dp_accounting lacks."""
    if isinstance(mechanism, MatrixMechanism):
        one = mechanism.equivalent()
        if isinstance(one, SharedBins):
            raise InputError("MatrixMechanism with BallsInBins and two bands has no DpEvent; ask jaxacct.epsilon")
        return _event(one)
    name, given = _named(mechanism)
    kind = getattr(dp_event, name, None)
    if kind is None:
        raise InputError(f"the installed dp_accounting lacks {name}; account for it with jaxacct.epsilon")
    return kind(**given)


def _named(mechanism: Mechanism) -> tuple[str, dict[str, Any]]:
    """Return the class name and the fields of the event that describes the mechanism."""
    inside = lambda: _event(mechanism.inside()[0])
    match mechanism:
        case Repeated():
            return "SelfComposedDpEvent", {"event": inside(), "count": int(mechanism.steps)}
        case Composed():
            return "ComposedDpEvent", {"events": [_event(item) for item in mechanism.mechanisms]}
        case PoissonSampled(group=1):
            rate = mechanism.sampling_probability
            return "PoissonSampledDpEvent", {"sampling_probability": rate, "event": inside()}
        case SampledWithoutReplacement(group=1):
            drawn, size = _sizes(mechanism.sampling_ratio)
            sizes = {"source_dataset_size": size, "sample_size": drawn}
            return "SampledWithoutReplacementDpEvent", sizes | {"event": inside()}
        case SampledWithReplacement(group=1):
            sizes = {"source_dataset_size": int(mechanism.dataset_size), "sample_size": int(mechanism.batch_size)}
            return "SampledWithReplacementDpEvent", sizes | {"event": inside()}
        case TruncatedPoissonSampled():
            sizes = {"dataset_size": int(mechanism.dataset_size), "truncated_batch_size": int(mechanism.cap)}
            sizes |= {"noise_multiplier": mechanism.mechanism.noise_multiplier}
            rate = mechanism.sampling_probability
            return "TruncatedSubsampledGaussianDpEvent", sizes | {"sampling_probability": rate}
        case RandomAllocation(group=1):
            slots = {"num_selected": int(mechanism.participations), "num_steps": int(mechanism.slots)}
            return "RandomAllocationDpEvent", slots | {"event": inside()}
        case Selection(bound="worst_case", law=Poisson() | TruncatedNegativeBinomial()):
            law = mechanism.law
            mean, shape = float(law.mean), float(law.eta) if isinstance(law, TruncatedNegativeBinomial) else math.inf
            if mean < 1.0 or shape < 0.0:
                raise InputError(f"mean = {mean!r} and eta = {shape!r} have no DpEvent; use mean >= 1 and eta >= 0")
            return "RepeatAndSelectDpEvent", {"event": inside(), "mean": mean, "shape": shape}
        case Gaussian():
            return "GaussianDpEvent", {"noise_multiplier": mechanism.noise_multiplier}
        case Laplace():
            return "LaplaceDpEvent", {"noise_multiplier": mechanism.scale}
        case DiscreteLaplace():
            noise = rounded(1 / Fraction(mechanism.scale), math.inf)
            return "DiscreteLaplaceDpEvent", {"noise_parameter": noise, "sensitivity": mechanism.sensitivity}
        case DiscreteGaussian():
            given = {"sigma": mechanism.sigma, "sensitivity": mechanism.sensitivity, "dimension": 1}
            return "DiscreteGaussianDpEvent", given
        case MixtureOfGaussians():
            shifts, chances = (np.asarray(x).tolist() for x in (mechanism.sensitivities, mechanism.probabilities))
            given = {"standard_deviation": mechanism.noise_multiplier, "sensitivities": shifts}
            return "MixtureOfGaussiansDpEvent", given | {"sampling_probs": chances}
        case PureDP(epsilon=0.0):
            return "NoOpDpEvent", {}
        case PureDP() | ApproximateDP():
            return "EpsilonDeltaDpEvent", {"epsilon": mechanism.epsilon, "delta": getattr(mechanism, "delta", 0.0)}
        case ExponentialMechanism() | ReportNoisyMax(noise="gumbel"):
            return "ExponentialMechanismDpEvent", {"epsilon": mechanism.epsilon}
        case ReportNoisyMax(noise="exponential"):
            return "PermuteAndFlipDpEvent", {"epsilon": mechanism.epsilon}
        case RandomizedResponse():
            k, truth = mechanism.categories, Fraction(mechanism.probability)
            exact = (1 - truth) * Fraction(k, k - 1)
            if exact > 1:
                words = f"probability = {mechanism.probability!r} must be >= 1/{k} to have a DpEvent; ask ja.epsilon"
                raise InputError(words)
            return "RandomizedResponseDpEvent", {"noise_parameter": rounded(exact, 0.0), "num_buckets": k}
    group = getattr(mechanism, "group", 1)
    words = f"{type(mechanism).__name__}{f' with group = {group:g}' if group != 1 else ''}"
    raise InputError(f"{words} has no DpEvent; account for it with jaxacct.epsilon")


def _sizes(ratio: float) -> tuple[int, int]:
    """Return the sizes of a sample and a data set whose ratio, rounded up, is `ratio`."""
    for exact in (Fraction(ratio).limit_denominator(10**6), Fraction(ratio)):
        if exact.denominator <= LARGEST_COUNT and rounded(exact, 1.0) == ratio:
            return exact.numerator, exact.denominator
    raise InputError(f"sampling_ratio = {ratio!r} is no ratio of whole numbers up to 2**53; use a larger one")
