"""NumPy and XLA answer alike: the same status, ends that agree, alone and in a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja

RTOL = 1e-4


def agree(one, other, rtol=RTOL):
    """Statuses are the same, and ends differ by at most what the documentation says."""
    np.testing.assert_array_equal(one.status, other.status)
    for a, b in ((one.lower, other.lower), (one.upper, other.upper)):
        np.testing.assert_allclose(a, b, rtol=0.1 * rtol, atol=1e-9)


def mixed(count, seed):
    """Runs of every kind: some expect few hits, some many."""
    rng = np.random.default_rng(seed)
    steps = np.round(10 ** rng.uniform(1, 5, count))
    return ja.dp_sgd(rng.uniform(0.5, 4, count), 10 ** rng.uniform(-5, -0.5, count), steps), 10 ** rng.uniform(-12, -3)


def element(run, row):
    noise, rate = run.mechanism.mechanism.noise_multiplier[row], run.mechanism.sampling_probability[row]
    return ja.dp_sgd(noise, rate, run.steps[row])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_alone_and_in_a_batch_the_bits_are_the_same(seed):
    run, delta = mixed(12, seed)
    together = ja.epsilon(run, delta, rtol=RTOL)
    halfway = 0.5 * together.upper  # where delta is large enough for the contour
    profile = ja.delta(run, halfway, rtol=RTOL)
    for row in range(0, 12, 5):
        for alone, batch in (
            (ja.epsilon(element(run, row), delta, rtol=RTOL), together),
            (ja.delta(element(run, row), halfway[row], rtol=RTOL), profile),
        ):
            assert (alone.lower, alone.upper, alone.status) == (batch.lower[row], batch.upper[row], batch.status[row])


def test_alone_and_in_a_batch_the_lattice_gives_the_same_bits():
    run, epsilon = ja.repeat(ja.Laplace([0.7, 2.0]), [30, 5]), 1.0
    batch = ja.delta(run, epsilon)
    for row, (scale, steps) in enumerate([(0.7, 30), (2.0, 5)]):
        alone = ja.delta(ja.repeat(ja.Laplace(scale), steps), epsilon)
        assert (alone.lower, alone.upper, alone.status) == (batch.lower[row], batch.upper[row], batch.status[row])


@settings(deadline=None, max_examples=8)
@given(
    noise=st.floats(0.3, 20.0),
    rate=st.floats(1e-8, 1.0),
    steps=st.integers(1, 10**6),
    log_delta=st.floats(-60.0, -3.0),
)
def test_a_row_does_not_depend_on_the_others(noise, rate, steps, log_delta):
    others = ja.dp_sgd([noise, 1.0, 5.0], [rate, 0.01, 0.3], [steps, 1000, 20])
    delta = np.exp(log_delta)
    alone, batch = ja.epsilon(ja.dp_sgd(noise, rate, steps), delta), ja.epsilon(others, delta)
    assert (alone.lower, alone.upper, alone.status) == (batch.lower[0], batch.upper[0], batch.status[0])


@pytest.mark.slow  # test_program_cache.py compares both where the cheapest program answers
def test_both_backends_answer_alike_with_few_hits_and_many():
    run, delta = mixed(60, 7)
    agree(*(ja.epsilon(run, delta, rtol=RTOL, backend=name) for name in ("numpy", "xla")))


@pytest.mark.slow
def test_both_backends_answer_every_question_alike():
    run, delta = mixed(300, 8)
    agree(*(ja.epsilon(run, delta, rtol=RTOL, backend=name) for name in ("numpy", "xla")))
    agree(*(ja.delta(run, 0.7, rtol=RTOL, backend=name) for name in ("numpy", "xla")))
    rate, steps = run.mechanism.sampling_probability, run.steps
    found = [ja.calibrate_noise_multiplier(1.0, delta, rate, steps, backend=name) for name in ("numpy", "xla")]
    np.testing.assert_array_equal(found[0].status, found[1].status)
    np.testing.assert_allclose(found[0].value, found[1].value, rtol=2 * RTOL)
