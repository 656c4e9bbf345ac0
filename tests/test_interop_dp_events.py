"""DpEvents in and out: round trips, unequal events of one mechanism, and hostile trees refused."""

import math
from fractions import Fraction

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import dp_event
from helpers import compositions, doctests_of, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct import interop
from jaxacct.interop import dp_events
from jaxacct.interop.accountant import CertifiedAccountant

Gauss, Laplace, Poisson = dpa.GaussianDpEvent, dpa.LaplaceDpEvent, dpa.PoissonSampledDpEvent
Discrete, Mixture = dpa.dp_event.DiscreteLaplaceDpEvent, dpa.dp_event.MixtureOfGaussiansDpEvent
Repeat, Compose, Response = dpa.SelfComposedDpEvent, dpa.ComposedDpEvent, dpa.RandomizedResponseDpEvent


def test_doctests():
    assert doctests_of(dp_events) > 0


positive = st.floats(0.01, 100.0)
steps = st.one_of(positive.map(ja.Gaussian), positive.map(ja.Laplace), st.just(ja.PureDP(0.0)))
steps = steps | st.builds(ja.PoissonSampled, steps, st.floats(0.0, 1.0))
mechanisms = compositions(steps)


@given(mechanisms)
@settings(max_examples=60, deadline=None)
def test_round_trip(mechanism):
    event = interop.to_dp_event(mechanism)
    assert isinstance(event, dpa.DpEvent) and interop.supports(event)
    assert interop.from_dp_event(event) == mechanism


@given(st.floats(0.0, 1.0), st.integers(2, 100))
@settings(max_examples=200, deadline=None)
def test_randomized_response_never_understates_the_loss(noise, k):
    exact = 1 - Fraction(noise) * Fraction(k - 1, k)
    event = Response(noise, k)
    if not interop.supports(event):
        assert exact > 1 - 2**-53
        return
    mechanism = interop.from_dp_event(event)
    assert exact <= Fraction(mechanism.probability) < exact + Fraction(1, 2**52)
    back = interop.to_dp_event(mechanism) if exact * k >= 1 else event
    assert Fraction(back.noise_parameter) <= Fraction(noise) and back.num_buckets == k


@given(st.floats(0.01, 99.0), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_discrete_laplace_never_overstates_the_noise(noise, sensitivity):
    mechanism = interop.from_dp_event(Discrete(noise, sensitivity))
    assert Fraction(mechanism.scale) * Fraction(noise) <= 1 < Fraction(mechanism.scale) * Fraction(noise) * (1 + 2**-50)
    assert interop.to_dp_event(mechanism).noise_parameter >= noise and mechanism.sensitivity == sensitivity


def test_what_is_not_equal_but_the_same():
    assert interop.from_dp_event(Compose([])) == ja.PureDP(0.0)
    assert interop.from_dp_event(Mixture(0, [0], [1.0])) == ja.PureDP(0.0)
    assert interop.from_dp_event(Response(0.0, 1)) == ja.PureDP(0.0)
    assert interop.from_dp_event(Poisson(0.0, Gauss(0.0))).sampling_probability == 0.0
    assert interop.from_dp_event(Gauss(np.float32(1.5))) == ja.Gaussian(1.5)
    assert interop.from_dp_event(Repeat(Gauss(1), np.int64(3))) == ja.repeat(ja.Gaussian(1.0), 3)


def test_mechanisms_without_an_event_are_refused():
    assert "batch of shape (2,) has no DpEvent" in refusal(interop.to_dp_event, ja.Gaussian([1.0, 2.0]))
    assert "SmoothSensitivityGaussian has no DpEvent" in refusal(
        interop.to_dp_event, ja.compose(ja.SmoothSensitivityGaussian(4.0, 0.1), ja.Gaussian(1.0))
    )
    if not hasattr(dpa.dp_event, "EpsilonDeltaDpEvent"):
        assert "lacks EpsilonDeltaDpEvent" in refusal(interop.to_dp_event, ja.ApproximateDP(0.1, 1e-5))
    assert "must be >= 1/2" in refusal(interop.to_dp_event, ja.RandomizedResponse(0.4))
    assert "is not a mechanism" in refusal(interop.to_dp_event, Gauss(1.0))


Capped, Tree = dp_event.TruncatedSubsampledGaussianDpEvent, dp_event.SingleEpochTreeAggregationDpEvent


class Unknown(dpa.GaussianDpEvent):
    """A user's class may mean anything, so it is not taken for its base."""


class Trap(float):
    def __float__(self):
        raise AssertionError("executed")


def cycle(through):
    inner = Compose([])
    inner.events.append(through(inner))
    return inner


def chain(levels):
    event = Gauss(1.0)
    for _ in range(levels):
        event = Repeat(event, 1)
    return event


def doubled(levels):
    event = Gauss(1.0)
    for _ in range(levels):
        event = Compose([event, event])
    return event


def endless():
    while True:
        yield Gauss(1.0)


HOSTILE = {
    "not an event": ("GaussianDpEvent", "str is not supported"),
    "none": (None, "NoneType is not supported"),
    "a class": (Gauss, "type is not supported"),
    "a mechanism": (ja.Gaussian(1.0), "Gaussian is not supported"),
    "unsupported": (dpa.UnsupportedDpEvent(), "UnsupportedDpEvent is not supported"),
    "subclass": (Unknown(1.0), "Unknown is not supported"),
    "trees of no length": (
        Tree(1.0, []),
        "step_counts must be one or more whole",
    ),
    "tree of half a step": (
        Tree(1.0, 0.5),
        "step_counts must be one or more whole",
    ),
    "more than all records": (
        dp_event.SampledWithoutReplacementDpEvent(10, 11, Gauss(1.0)),
        "sample_size = 11 must be a whole number from 0 to 10",
    ),
    "drawn Laplace noise": (
        dp_event.SampledWithReplacementDpEvent(10, 2, Laplace(1.0)),
        "SampledWithReplacement of Laplace is not supported",
    ),
    "one record drawn": (
        dp_event.SampledWithReplacementDpEvent(1, 2, Gauss(1.0)),
        "source_dataset_size = 1 must be a whole number from 2",
    ),
    "half a record": (Capped(10.5, 0.1, 2, 1.0), "dataset_size = 10.5 must be a whole number from 0 to 1000000000"),
    "capped at NaN": (Capped(10, 0.1, math.nan, 1.0), "truncated_batch_size = nan must be a whole number"),
    "less than one run": (dp_event.RepeatAndSelectDpEvent(Gauss(1.0), 0.5, 1.0), "mean = 0.5 must be >= 1"),
    "negative shape": (dp_event.RepeatAndSelectDpEvent(Gauss(1.0), 2.0, -0.5), "shape = -0.5 must be >= 0"),
    "NaN shape": (dp_event.RepeatAndSelectDpEvent(Gauss(1.0), 2.0, math.nan), "shape = nan must be >= 0"),
    "negative rho": (dp_event.ZCDpEvent(-1.0), "rho = -1.0 must be >= 0"),
    "infinite xi": (dp_event.ZCDpEvent(1.0, math.inf), "xi = inf must be >= 0 and finite"),
    "non-private": (dpa.NonPrivateDpEvent(), "has a part without noise and no finite epsilon"),
    "no noise": (Compose([Gauss(1.0), Laplace(0)]), "has a part without noise and no finite epsilon"),
    "NaN noise": (Gauss(math.nan), "event: noise_multiplier = nan must be finite and > 0"),
    "infinite noise": (Laplace(math.inf), "event: scale = inf must be finite and > 0"),
    "negative noise": (Compose([Gauss(1.0), Gauss(-1.0)]), "events[1]: noise_multiplier = -1.0 must be > 0"),
    "text for noise": (Gauss("1.0"), "noise_multiplier must be a number, not str"),
    "boolean noise": (Gauss(True), "noise_multiplier must be a number, not bool"),
    "array noise": (Gauss(np.ones(3)), "noise_multiplier must be a number, not ndarray"),
    "no value": (Gauss(None), "noise_multiplier must be a number, not NoneType"),
    "float that runs code": (Gauss(Trap(1.0)), "noise_multiplier must be a number, not Trap"),
    "rate above 1": (Poisson(1.5, Gauss(1.0)), "sampling_probability = 1.5 must be >= 0 and <= 1"),
    "NaN rate": (Poisson(math.nan, Gauss(1.0)), "sampling_probability = nan must be finite"),
    "rate above 1 without noise": (Poisson(1.5, Gauss(0.0)), "sampling_probability = 1.5 must be"),
    "negative parameter": (Discrete(-1.0, 1), "noise_parameter = -1.0 must be >= 0"),
    "NaN parameter": (Discrete(math.nan, 1), "noise_parameter = nan must be >= 0"),
    "half a sensitivity": (Discrete(1.0, 1.5), "sensitivity = 1.5 must be an integer"),
    "hardly any noise": (Discrete(1e4, 1), "must be >= 0.01; use more noise"),
    "mixture that does not sum to 1": (Mixture(1.0, [0.0, 1.0], [0.5, 0.4]), "probabilities"),
    "mixture of nothing": (Mixture(1.0, [], []), "sensitivities must be a list of 1 to 1000 numbers"),
    "mixture of unequal lists": (Mixture(1.0, [1.0], [0.5, 0.5]), "sensitivities and probabilities must be vectors"),
    "mixture of texts": (Mixture(1.0, ["1"], [1.0]), "sensitivities[0] must be a number, not str"),
    "mixture of ragged lists": (Mixture(1.0, [[1.0]], [1.0]), "sensitivities[0] must be a number, not list"),
    "mixture of None": (Mixture(1.0, [None], [1.0]), "sensitivities[0] must be a number, not NoneType"),
    "mixture of NaN": (Mixture(1.0, [math.nan], [1.0]), "sensitivities[0] = nan must be finite"),
    "mixture with NaN noise": (Mixture(math.nan, [1.0], [1.0]), "noise_multiplier = nan must be finite"),
    "count 0": (Repeat(Gauss(1.0), 0), "event: count = 0 must be an integer >= 1"),
    "count -1 without noise": (Repeat(Gauss(1.0), -1), "event: count = -1 must be an integer >= 1"),
    "half a count": (Repeat(Gauss(1.0), 0.5), "event: count = 0.5 must be an integer"),
    "NaN count": (Repeat(Gauss(1.0), math.nan), "event: count = nan must be"),
    "huge count": (Repeat(Gauss(1.0), 10**400), "event: count = inf must be"),
    "text for events": (Compose("Gaussian"), "events must be a list of events, not str"),
    "no events": (Compose(None), "events must be a list of events, not NoneType"),
    "endless events": (Compose(endless()), "events must be a list of events, not generator"),
    "number among events": (Compose([Gauss(1.0), 3]), "events[1]: int is not supported"),
    "noise parameter above 1": (Response(1.5, 2), "noise_parameter = 1.5 must be between 0 and 1"),
    "NaN noise parameter": (Response(math.nan, 2), "noise_parameter = nan must be between 0 and 1"),
    "no buckets": (Response(0.5, 0), "num_buckets = 0 must be a whole number"),
    "half a bucket": (Response(0.5, 2.5), "num_buckets = 2.5 must be a whole number"),
    "huge buckets": (Response(0.5, 10**40), "must be a whole number from 1 to 2**53"),
    "deep": (chain(5000), "nested more than 64 deep"),
    "cycle": (cycle(lambda inner: inner), "nested more than 64 deep, or in a cycle"),
    "cycle through a repetition": (cycle(lambda inner: Repeat(inner, 2)), "nested more than 64 deep, or in a cycle"),
    "shared events that double": (doubled(60), "more than 1024 events"),
    "many": (Compose([Gauss(1.0)] * 2**10), "more than 1024 events"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_trees_are_refused_in_one_line(case, monkeypatch):
    monkeypatch.setattr(dp_events, "MAX_EVENTS", 2**10)
    event, expected = HOSTILE[case]
    message = refusal(interop.from_dp_event, event)
    assert expected in message and len(message) < 400
    assert not interop.supports(event)
    if isinstance(event, dpa.DpEvent) and "without noise and no finite" not in expected:
        accountant = CertifiedAccountant()
        assert not accountant.supports(event)
        assert expected in refusal(accountant.compose, event, error=dpa.UnsupportedEventError)
        assert accountant.get_epsilon(0.0) == 0.0 and isinstance(accountant.ledger, dpa.NoOpDpEvent)
