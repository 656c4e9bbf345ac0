"""The certified accountant calibrates unmodified execution plans of jax_privacy. Skipped without jax_privacy."""

import dp_accounting as dpa
import numpy as np
import pytest
from scipy.special import ndtr

from jaxacct.interop.accountant import CertifiedAccountant

pytest.importorskip("jax_privacy", exc_type=ImportError)
execution_plan = pytest.importorskip("jax_privacy.experimental.execution_plan", exc_type=ImportError)
batch_selection = pytest.importorskip("jax_privacy.batch_selection", exc_type=ImportError)

SPECIAL = dpa.NeighboringRelation.REPLACE_SPECIAL
TARGET = {"epsilon": 1.0, "delta": 1e-5}


def config(strategy, **settings):
    return execution_plan.BandMFExecutionPlanConfig(strategy=np.array(strategy), **settings)


def noise_of(plan):
    event = plan.dp_event
    while not hasattr(event, "noise_multiplier"):
        event = event.event
    return event.noise_multiplier


def test_the_default_relation_of_a_plan_without_sampling():
    """Every step uses all records, so delta has the closed form of a Gaussian mechanism."""
    plan = config([1.0], iterations=4, accountant=CertifiedAccountant(SPECIAL), **TARGET).plan
    mu = 2.0 / noise_of(plan)
    spent = ndtr(mu / 2 - 1.0 / mu) - np.exp(1.0) * ndtr(-mu / 2 - 1.0 / mu)
    assert 0.999 * TARGET["delta"] <= spent <= TARGET["delta"]


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["EQUAL_SPLIT", "INDEPENDENT"])
def test_a_sampled_plan_of_two_bands_against_jax_privacy_itself(partition):
    settings = dict(iterations=4, sampling_prob=0.2, partition_type=batch_selection.PartitionType[partition], **TARGET)
    default = config([1.0, 0.5], **settings)
    assert default.accountant.neighboring_relation is SPECIAL  # as of the certified accountant below
    ours, theirs = (
        noise_of(config([1.0, 0.5], accountant=accountant, **settings).plan)
        for accountant in (CertifiedAccountant(SPECIAL), default.accountant)
    )
    assert ours == pytest.approx(theirs, rel=1e-3)  # both searches stop at 1e-6; their bound is up to 1e-4 too large
    known = settings | {"epsilon": None, "delta": None, "noise_multiplier": ours}
    event = config([1.0, 0.5], accountant=CertifiedAccountant(SPECIAL), **known).plan.dp_event
    assert CertifiedAccountant(SPECIAL).compose(event).get_epsilon(1e-5) <= 1.0


def test_the_accountant_of_the_default_plan_is_not_used_up():
    accountant = CertifiedAccountant(SPECIAL)
    first, second = (config([1.0], iterations=4, accountant=accountant, **TARGET).plan for _ in range(2))
    assert noise_of(first) == noise_of(second) and accountant.get_epsilon(0.0) == 0.0
