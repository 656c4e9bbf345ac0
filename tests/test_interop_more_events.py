"""Events for fixed-size batches, caps, private selection, zCDP and trees, and events of later dp_accounting."""

import math
from dataclasses import dataclass

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import dp_event
from helpers import refusal

import jaxacct as ja
from jaxacct import interop, selection
from jaxacct.interop.accountant import CertifiedAccountant
from jaxacct.mechanisms import SampledWithoutReplacement, SampledWithReplacement, TruncatedPoissonSampled

Gauss, Repeat, Compose, Response = (
    dpa.GaussianDpEvent,
    dpa.SelfComposedDpEvent,
    dpa.ComposedDpEvent,
    dpa.RandomizedResponseDpEvent,
)
Select, Concentrated, Tree = (
    dp_event.RepeatAndSelectDpEvent,
    dp_event.ZCDpEvent,
    dp_event.SingleEpochTreeAggregationDpEvent,
)
ADD_OR_REMOVE, REPLACE, SPECIAL = (
    dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dpa.NeighboringRelation.REPLACE_ONE,
    dpa.NeighboringRelation.REPLACE_SPECIAL,
)
KNOWN = [
    (dp_event.SampledWithoutReplacementDpEvent(100, 7, Gauss(2.0)), SampledWithoutReplacement(ja.Gaussian(2.0), 0.07)),
    (dp_event.SampledWithReplacementDpEvent(100, 10, Gauss(2.0)), SampledWithReplacement(ja.Gaussian(2.0), 10, 100)),
    (
        dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 2.0),
        TruncatedPoissonSampled(ja.Gaussian(2.0), 0.1, 100, 20),
    ),
    (Select(Gauss(2.0), 10, 1.0), selection.select(ja.Gaussian(2.0), selection.Geometric(0.1))),
    (Select(Gauss(2.0), 10, math.inf), selection.select(ja.Gaussian(2.0), selection.Poisson(10))),
    (dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.5, 0.5]), ja.MixtureOfGaussians(2.0, [0, 1], [0.5, 0.5])),
]


@pytest.mark.parametrize("event, mechanism", KNOWN, ids=lambda x: type(x).__name__)
def test_there_and_back(event, mechanism):
    assert interop.from_dp_event(event) == mechanism
    assert interop.from_dp_event(interop.to_dp_event(mechanism)) == mechanism
    assert interop.from_json(interop.to_json(mechanism)) == mechanism


@pytest.mark.parametrize("mean, shape", [(2.0, 0.0), (50.0, 0.0), (3.0, 0.5), (7.0, 2.5), (1.5, 1.0)])
def test_the_law_of_a_selection_has_the_mean_of_the_event(mean, shape):
    law = interop.from_dp_event(Select(Gauss(1.0), mean, shape)).law
    k = np.arange(1.0, 20_000.0)
    assert float(np.sum(k * law.probability(k))) == pytest.approx(mean, rel=1e-9) and law.eta == shape
    assert interop.from_dp_event(Select(Gauss(1.0), 1.0, shape)) == ja.Gaussian(1.0)


def test_what_draws_nothing_leaks_nothing():
    for event in (
        dp_event.SampledWithoutReplacementDpEvent(10, 0, Gauss(0.0)),
        dp_event.SampledWithReplacementDpEvent(10, 0, Gauss(1.0)),
        dp_event.TruncatedSubsampledGaussianDpEvent(10, 0.1, 0, 1.0),
        dp_event.TruncatedSubsampledGaussianDpEvent(10, 0.0, 2, 0.0),
        Tree(0.0, 0),
        Select(dpa.NoOpDpEvent(), 2.0, 1.0),
        Concentrated(0.0),
    ):
        assert interop.from_dp_event(event) == ja.PureDP(0.0)
    for event in (
        dp_event.SampledWithoutReplacementDpEvent(10, 1, Gauss(0.0)),
        dp_event.SampledWithReplacementDpEvent(10, 1, Gauss(0.0)),
        dp_event.TruncatedSubsampledGaussianDpEvent(10, 0.1, 2, 0.0),
        Tree(0.0, 1),
        Select(Gauss(0.0), 2.0, 1.0),
    ):
        assert CertifiedAccountant(SPECIAL).compose(event).get_epsilon(0.1) == math.inf


def test_a_ratio_is_rounded_up():
    ratio = interop.from_dp_event(dp_event.SampledWithoutReplacementDpEvent(3, 1, Gauss(1.0))).sampling_ratio
    assert (
        0 <= ratio * 3 - 1 < 1e-15
        and interop.to_dp_event(SampledWithoutReplacement(ja.Gaussian(1.0), ratio)).source_dataset_size == 3
    )


def test_trees():
    for steps, depth in ((1, 1), (2, 2), (3, 2), (4, 3), ([3, 8, 1], 4)):
        found = interop.from_dp_event(Tree(2.0, steps))
        assert found == ja.repeat(ja.Gaussian(2.0), depth)
    event = Compose([Gauss(1.0), Repeat(Tree(3.0, 7), 2)])
    theirs = dpa.rdp.RdpAccountant(neighboring_relation=SPECIAL).compose(event).get_epsilon(1e-5)
    assert CertifiedAccountant(SPECIAL).compose(event).get_epsilon(1e-5) < theirs
    assert "for trees" in refusal(CertifiedAccountant().compose, event, error=dpa.UnsupportedEventError)


def test_zcdp_lies_between_its_gaussian_and_dp_accounting():
    rho = 0.125  # that of a Gaussian of noise multiplier 2
    ours = CertifiedAccountant().compose(Concentrated(rho))
    for delta in (1e-3, 1e-6):
        exact = CertifiedAccountant().compose(Gauss(2.0)).get_epsilon(delta)
        theirs = dpa.rdp.RdpAccountant().compose(Concentrated(rho)).get_epsilon(delta)
        assert exact <= ours.get_epsilon(delta) <= 1.002 * theirs


def test_zcdp_adds_up_within_an_event():
    once = ja.epsilon(interop.from_dp_event(Concentrated(0.3, 0.1)), 1e-6).upper
    for event in (
        Repeat(Concentrated(0.1, 0.1 / 3), 3),
        Compose([Concentrated(0.1, 0.1), Repeat(Repeat(Concentrated(0.1), 2), 1)]),
    ):
        assert np.isclose(ja.epsilon(interop.from_dp_event(event), 1e-6).upper, once, rtol=1e-9)
    plain = ja.epsilon(interop.from_dp_event(Concentrated(0.3)), 1e-6).upper
    assert np.isclose(plain + 0.1, once, rtol=1e-4)


def test_a_selection_below_the_bound_of_dp_accounting():
    event = Select(Gauss(3.0), 10, 1.0)
    ours = CertifiedAccountant().compose(event).get_epsilon(1e-5)
    assert ours == float(ja.epsilon(interop.from_dp_event(event), 1e-5).upper)
    assert ours < dpa.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert not CertifiedAccountant().supports(Select(Response(0.5, 3), 2.0, 1.0))
    assert CertifiedAccountant(REPLACE).supports(Select(Response(0.5, 3), 2.0, 1.0))


@pytest.mark.slow
def test_a_sampled_gaussian_that_is_replaced():
    """The accountant's delta agrees with dp_accounting's, whose pair is N(1) and N(-1), each mixed with N(0)."""
    event = dpa.PoissonSampledDpEvent(0.2, Gauss(1.0))
    ours = CertifiedAccountant(REPLACE).compose(event).get_delta(1.0)
    law = dpa.pld.privacy_loss_distribution.from_gaussian_mechanism
    low, high = (
        law(1.0, sampling_prob=0.2, pessimistic_estimate=kind, neighboring_relation=REPLACE).get_delta_for_epsilon(1.0)
        for kind in (False, True)
    )
    assert low <= ours <= 1.001 * high
    laplace = CertifiedAccountant(REPLACE).compose(dpa.PoissonSampledDpEvent(0.2, dpa.LaplaceDpEvent(1.0)))
    assert (
        laplace.get_delta(0.1) == ja.delta(ja.PoissonSampled(ja.Laplace(1.0), 0.2), 0.1, relation="replace_one").upper
    )


@dataclass(frozen=True)
class DiscreteGaussianDpEvent(dpa.DpEvent):
    sigma: float
    sensitivity: float = 1.0
    dimension: int | None = None


@dataclass(frozen=True)
class EpsilonDeltaDpEvent(dpa.DpEvent):
    epsilon: float
    delta: float


@dataclass(frozen=True)
class ExponentialMechanismDpEvent(dpa.DpEvent):
    epsilon: float


@dataclass(frozen=True)
class PermuteAndFlipDpEvent(dpa.DpEvent):
    epsilon: float


@dataclass(frozen=True)
class RandomAllocationDpEvent(dpa.DpEvent):
    event: dpa.DpEvent
    num_selected: int
    num_steps: int


LATER = (
    DiscreteGaussianDpEvent,
    EpsilonDeltaDpEvent,
    ExponentialMechanismDpEvent,
    PermuteAndFlipDpEvent,
    RandomAllocationDpEvent,
)
"""Stand-ins with the fields of dp_accounting's development version."""


@pytest.fixture
def later(monkeypatch):
    for cls in LATER:
        monkeypatch.setattr(dp_event, cls.__name__, cls, raising=False)


@pytest.mark.parametrize(
    "event, mechanism",
    [
        (DiscreteGaussianDpEvent(3.0, 2.0, 1), ja.DiscreteGaussian(3.0, sensitivity=2)),
        (EpsilonDeltaDpEvent(1.0, 1e-6), ja.ApproximateDP(1.0, 1e-6)),
        (EpsilonDeltaDpEvent(1.0, 0.0), ja.PureDP(1.0)),
        (ExponentialMechanismDpEvent(1.0), ja.ExponentialMechanism(1.0)),
        (PermuteAndFlipDpEvent(1.0), ja.ReportNoisyMax(1.0, noise="exponential")),
        (RandomAllocationDpEvent(Gauss(2.0), 2, 10), ja.mechanisms.RandomAllocation(ja.Gaussian(2.0), 10, 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_events_of_later_versions(later, event, mechanism):
    assert interop.from_dp_event(event) == mechanism
    assert interop.from_dp_event(interop.to_dp_event(mechanism)) == mechanism


def test_events_have_no_groups(later):
    """The old event of a random allocation left out the group, so it promised the epsilon of one record."""
    base, given = ja.Gaussian(2.0), {"group": 3}
    draws = [ja.RandomAllocation(base, 10, **given), ja.PoissonSampled(base, 0.1, **given)]
    draws += [ja.SampledWithoutReplacement(base, 0.1, dataset_size=100, **given)]
    draws += [ja.SampledWithReplacement(base, 10, 100, **given)]
    for step in draws:
        for run in (step, ja.repeat(step, 2)):
            assert f"{type(step).__name__} with group = 3 has no DpEvent" in refusal(interop.to_dp_event, run)


def test_what_later_versions_may_ask_and_is_refused(later):
    assert "dimension = 0 must be a whole number or None" in refusal(
        interop.from_dp_event, DiscreteGaussianDpEvent(3.0, 1.0, 0)
    )
    assert "num_selected = 3 must be a whole number from 0 to 2" in refusal(
        interop.from_dp_event, RandomAllocationDpEvent(Gauss(1.0), 3, 2)
    )
    assert "its base is a Gaussian" in refusal(
        interop.from_dp_event, RandomAllocationDpEvent(dpa.LaplaceDpEvent(1.0), 1, 2)
    )
    assert CertifiedAccountant().compose(EpsilonDeltaDpEvent(0.0, 1.0)).get_epsilon(0.5) == math.inf


def test_discrete_gaussians_of_any_dimension(later):
    """The zCDP of a discrete Gaussian does not depend on its dimension. One coordinate's own law gives less."""
    for dimension in (None, 7):
        found = interop.from_dp_event(DiscreteGaussianDpEvent(10.0, dimension=dimension))
        assert found == ja.ZCDP(0.005)
    accountant = CertifiedAccountant().compose(DiscreteGaussianDpEvent(10.0), 50)
    exact = ja.epsilon(ja.repeat(ja.DiscreteGaussian(10.0), 50), 1e-5).upper
    assert exact <= accountant.get_epsilon(1e-5) <= 1.15 * exact
    assert interop.from_dp_event(DiscreteGaussianDpEvent(2.0, math.sqrt(5.0))).rho >= 5.0 / 8.0
    assert interop.from_dp_event(DiscreteGaussianDpEvent(2.0, 0.0)) == ja.PureDP(0.0)
    assert CertifiedAccountant().compose(DiscreteGaussianDpEvent(0.0)).get_epsilon(1e-5) == math.inf
    message = refusal(CertifiedAccountant(REPLACE).compose, DiscreteGaussianDpEvent(10.0), error=ValueError)
    assert "use ZCDpEvent(2 * sensitivity**2 / sigma**2)" in message
    assert "sigma = -1.0 must be >= 0" in refusal(interop.from_dp_event, DiscreteGaussianDpEvent(-1.0))


def test_a_class_that_is_not_dp_accounting_s_own_is_not_known():
    if not hasattr(dp_event, "ExponentialMechanismDpEvent"):
        assert "is not supported" in refusal(interop.from_dp_event, ExponentialMechanismDpEvent(1.0))
