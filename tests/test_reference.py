"""Every row of the reference table, in each direction and in both: inside the bracket, narrow, and close."""

import jax
import numpy as np
import pytest

import jaxacct as ja

RELATIONS = {"epsilon": "add_or_remove_one", "epsilon_remove": "remove_one", "epsilon_add": "add_one"}
ROUNDED = 3e-7  # the table has nine digits


@pytest.fixture(scope="module")
def answers(dp_sgd_table):
    """For each column of epsilon, its bounds in every row."""
    t = dp_sgd_table
    run = ja.dp_sgd(t["noise_multiplier"], t["sampling_probability"], t["steps"])
    return {column: ja.epsilon(run, t["delta"], relation=relation) for column, relation in RELATIONS.items()}


@pytest.mark.parametrize("column", RELATIONS)
def test_reference_rows(dp_sgd_table, answers, column):
    bounds, truth = answers[column], dp_sgd_table[column]
    assert np.all(bounds.lower <= truth * (1 + ROUNDED)) and np.all(truth * (1 - ROUNDED) <= bounds.upper)
    assert np.all(bounds.ok) and np.all(bounds.relative_width <= 1e-4)
    np.testing.assert_allclose(bounds.estimate, truth, rtol=1e-6)


@pytest.mark.slow
def test_reference_rows_on_request_to_a_millionth(dp_sgd_table):
    t = dp_sgd_table
    run = ja.dp_sgd(t["noise_multiplier"], t["sampling_probability"], t["steps"])
    bounds = ja.epsilon(run, t["delta"], rtol=1e-6)
    assert np.all(bounds.relative_width <= 1e-6)
    assert np.all(bounds.lower <= t["epsilon"] * (1 + ROUNDED))
    assert np.all(bounds.upper >= t["epsilon"] * (1 - ROUNDED))


def test_directions_are_taken_at_the_end(answers):
    both, *single = (answers[column] for column in RELATIONS)
    single = [each.upper for each in single]
    assert np.all(both.upper <= np.max(single, axis=0) * (1 + 1e-9))
    assert np.all(both.upper >= np.max(single, axis=0) * (1 - 1e-6))


@pytest.mark.slow
def test_delta_inverts_epsilon(dp_sgd_table):
    t = {key: column[:30:4] for key, column in dp_sgd_table.items()}
    run = ja.dp_sgd(t["noise_multiplier"], t["sampling_probability"], t["steps"])
    bounds = ja.epsilon(run, t["delta"])
    above, below = ja.delta(run, bounds.upper), ja.delta(run, np.maximum(bounds.lower, 0))
    assert np.all(above.lower <= t["delta"] * (1 + 1e-9))
    assert np.all(below.upper >= t["delta"] * (1 - 1e-9))
    np.testing.assert_allclose(above.estimate, t["delta"], rtol=1e-3)


def test_user_flags_are_left_alone(dp_sgd_table):
    before = jax.config.jax_enable_x64
    ja.epsilon(ja.dp_sgd(1.0, 0.01, 1000), 1e-5)
    assert jax.config.jax_enable_x64 is before
    assert jax.numpy.ones(2).dtype == jax.numpy.float32
