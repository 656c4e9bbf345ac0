"""Lower ends of shuffled batches: what an attack reaches, against integrals of all outputs and simulated passes."""

import math

import batch_rules_oracles as oracles
import numpy as np
import pytest
from scipy import special

import jaxacct as ja


def shuffled(sigma, batches):
    return ja.ShuffledBatches(ja.Gaussian(sigma), batches=batches)


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 1.0), (2.0, 0.5)])
def test_two_batches_reach_nearly_what_all_outputs_tell(sigma, epsilon):
    exact = max(oracles.shuffled_two(sigma, epsilon, direction) for direction in ("remove", "add"))
    found = ja.delta(shuffled(sigma, 2), epsilon, relation="zero_out")
    assert 0.98 * exact <= found.lower <= exact * (1 + 1e-8) and exact <= found.upper
    assert (found.kind, found.status) == ("bound", "ok")


def test_nothing_is_said_of_a_pass_whose_batches_are_not_known():
    """The lower end is 0 for 1 batch (the trainer writes 1 for any number), for many passes and many configurations."""
    for run in (shuffled(1.0, 1), ja.repeat(shuffled(1.0, 5), 10**6), shuffled(np.full(100, 1.0), 5)):
        assert np.all(ja.epsilon(run, 1e-5, relation="zero_out").lower == 0.0)
    assert np.all(ja.delta(shuffled(2.0, 50), np.linspace(0.0, 5.0, 200), relation="zero_out").lower == 0.0)


def test_an_event_of_the_largest_output_in_closed_form():
    """The lower end reaches P(M > u) - e^eps Q(M > u), M the largest output, at the best u: Chua et al. (2024)."""
    sigma, batches, epsilon = 0.7, 20, 1.5
    u = np.linspace(0.0, 12.0, 4001)
    tail = lambda mean: -np.expm1(special.log_ndtr(u - mean) + (batches - 1) * special.log_ndtr(u))
    for relation, without in (("zero_out", 1.0), ("replace_one", 0.0)):
        reached = np.max(tail(2.0 / sigma) - math.exp(epsilon) * tail(without / sigma))
        found = ja.delta(shuffled(sigma, batches), epsilon, relation=relation)
        assert 0.998 * reached <= found.lower <= found.upper


@pytest.mark.slow
def test_two_passes_are_not_above_the_likelihood_ratio_of_all_outputs():
    """The lower end is at most the mean of (1 - e^eps / ratio)_+ over simulated outputs, plus 4 standard errors."""
    rng, sigma, batches, epsilon, count = np.random.default_rng(5), 1.0, 3, 1.0, 400_000
    total = np.zeros(count)
    for _ in range(2):
        y = rng.normal(size=(count, batches))
        y[:, 0] += 2.0 / sigma
        ratio = [special.logsumexp(m * y / sigma - m * m / (2 * sigma**2), axis=1) for m in (2.0, 1.0)]
        total += ratio[0] - ratio[1]
    gains = np.maximum(-np.expm1(epsilon - total), 0.0)
    most = gains.mean() + 4.0 * gains.std() / math.sqrt(count)
    passes = ja.repeat(shuffled(sigma, batches), 2)
    found = ja.delta(passes, epsilon, relation="zero_out")
    assert 0.9 * gains.mean() <= found.lower <= most


def test_passes_beside_other_mechanisms_and_in_batches():
    run = ja.compose(ja.repeat(shuffled([0.5, 2.0], 20), 3), ja.dp_sgd(2.0, 0.01, 100))
    alone = ja.epsilon(ja.dp_sgd(2.0, 0.01, 100), 1e-5)
    found = ja.epsilon(run, 1e-5, relation="zero_out")
    assert np.all(found.lower > alone.upper) and np.all(found.lower <= found.upper) and set(found.kind) == {"bound"}
    # beside a mechanism without a certified bracket, no attack is known and the lower end is 0
    mixed = ja.compose(shuffled(1.0, 20), ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.1, 100, 20))
    assert ja.epsilon(mixed, 1e-5, relation="zero_out").lower == 0.0


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("sigma", "batches"), [(1e-300, 3), (0.02, 2**53), (1e300, 7)])
def test_extremes(sigma, batches, relation):
    for epsilon in (0.0, 1.0, 800.0):
        found = ja.delta(shuffled(sigma, batches), epsilon, relation=relation)
        assert 0.0 <= found.lower <= found.upper <= 1.0 and found.status in ("ok", "width")
