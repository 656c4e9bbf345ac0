"""An execution plan of jax_privacy, as it is, calibrated by the certified accountant; skipped where it is missing."""

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
    """One batch of all records each step: the noise has a closed form."""
    plan = config([1.0], iterations=4, accountant=CertifiedAccountant(SPECIAL), **TARGET).plan
    mu = 2.0 / noise_of(plan)
    spent = ndtr(mu / 2 - 1.0 / mu) - np.exp(1.0) * ndtr(-mu / 2 - 1.0 / mu)
    assert 0.999 * TARGET["delta"] <= spent <= TARGET["delta"]


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["EQUAL_SPLIT", "INDEPENDENT"])
def test_a_sampled_plan_of_two_bands_against_jax_privacy_itself(partition):
    settings = dict(iterations=4, sampling_prob=0.2, partition_type=batch_selection.PartitionType[partition], **TARGET)
    default = config([1.0, 0.5], **settings)
    assert default.accountant.neighboring_relation is SPECIAL  # what the certified one has to stand in for
    ours, theirs = (
        noise_of(config([1.0, 0.5], accountant=accountant, **settings).plan)
        for accountant in (CertifiedAccountant(SPECIAL), default.accountant)
    )
    assert ours == pytest.approx(theirs, rel=1e-3)  # both search to 1e-6, theirs from a bound 1e-4 wide
    known = settings | {"epsilon": None, "delta": None, "noise_multiplier": ours}
    event = config([1.0, 0.5], accountant=CertifiedAccountant(SPECIAL), **known).plan.dp_event
    assert CertifiedAccountant(SPECIAL).compose(event).get_epsilon(1e-5) <= 1.0


def test_the_accountant_of_the_default_plan_is_not_used_up():
    accountant = CertifiedAccountant(SPECIAL)
    first, second = (config([1.0], iterations=4, accountant=accountant, **TARGET).plan for _ in range(2))
    assert noise_of(first) == noise_of(second) and accountant.get_epsilon(0.0) == 0.0
