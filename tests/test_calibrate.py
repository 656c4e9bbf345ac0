"""Calibration returns the safe end, close to the target, and says why where it cannot."""

import numpy as np
import pytest

import jaxacct as ja


def typical(count, seed):
    """DP-SGD configurations with epsilon between .3 and 10, found from their noise multiplier."""
    rng = np.random.default_rng(seed)
    sigma, q = (
        np.exp(rng.uniform(np.log(0.6), np.log(5), count)),
        np.exp(rng.uniform(np.log(1e-3), np.log(0.3), count)),
    )
    steps = np.round(np.exp(rng.uniform(np.log(100), np.log(1e5), count)))
    delta = 10.0 ** rng.uniform(-10, -4, count)
    eps = ja.epsilon(ja.dp_sgd(sigma, q, steps), delta).estimate
    keep = (eps > 0.3) & (eps < 10)
    return sigma[keep], q[keep], steps[keep], delta[keep], eps[keep]


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_noise_multipliers_of_a_batch(quick, count):
    sigma, q, steps, delta, eps = typical(count, 0)
    c = ja.calibrate_noise_multiplier(eps, delta, q, steps)
    assert np.all(c.ok) and set(c.status) == {"ok"}
    assert np.all(c.epsilon.upper <= eps)
    assert np.all(c.epsilon.upper >= eps * (1 - 1e-4))
    np.testing.assert_allclose(c.value, sigma, rtol=1e-3)
    again = ja.epsilon(ja.dp_sgd(c.value, q, steps), delta)
    assert np.all(again.upper <= eps)


@pytest.mark.slow
def test_sampling_probabilities_of_a_batch():
    sigma, q, steps, delta, eps = typical(40, 1)
    c = ja.calibrate_sampling_probability(eps, delta, sigma, steps)
    assert np.all(c.ok) and np.all(c.epsilon.upper <= eps) and np.all(c.epsilon.upper >= eps * (1 - 1e-4))
    np.testing.assert_allclose(c.value, q, rtol=1e-3)


def test_steps_are_the_largest_that_hold():
    sigma, q, _, delta, eps = typical(12, 2)
    c = ja.calibrate_steps(eps, delta, sigma, q)
    assert np.all(c.ok) and np.all(c.value == np.round(c.value))
    assert np.all(c.epsilon.upper <= eps)
    over = ja.epsilon(ja.dp_sgd(sigma, q, c.value + 1), delta)
    assert np.all(over.upper > eps * (1 - 1e-6))


@pytest.mark.parametrize("eps", [1e-3, 50.0, 300.0])
def test_extreme_targets(eps):
    c = ja.calibrate_noise_multiplier(eps, 1e-6, 0.05, 1000)
    assert c.ok and eps * (1 - 1e-4) <= c.epsilon.upper <= eps


def test_full_batch_is_the_gaussian_mechanism():
    c = ja.calibrate_noise_multiplier([0.5, 4.0], 1e-6, 1.0, 100)
    assert np.all(c.epsilon.upper <= [0.5, 4.0]) and np.all(c.epsilon.engine == "closed_form")
    np.testing.assert_allclose(c.epsilon.upper, [0.5, 4.0], rtol=1e-4)


def test_what_cannot_be_met_says_so_and_leaves_the_rest_alone():
    c = ja.calibrate_steps([1e-3, 2.0], 1e-9, [0.5, 2.0], 0.1)
    assert list(c.status) == ["infeasible_steps", "ok"] and list(c.ok) == [False, True]
    assert np.isnan(c.value[0]) and c.value[1] > 1
    assert "noise multiplier" in ja.explain(c.status[0])
    free = ja.calibrate_sampling_probability(10.0, 1e-5, 5.0, 3)
    assert free.status == "not_binding" and free.value == 1.0
    loose = ja.calibrate_noise_multiplier(1.0, 0.3, 1e-4, 10)
    assert loose.status == "not_binding" and loose.value == ja.calibrate.NOISE_RANGE[0]
    absent = ja.calibrate_noise_multiplier(1.0, 1e-5, 0.0, 10)
    assert absent.status == "not_binding" and absent.epsilon.upper == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1e-5, 0.01, 100), "target_epsilon = -1.0"),
        (([1.0, np.nan], 1e-5, 0.01, 100), r"target_epsilon\[1\] = nan"),
        ((1.0, 1.5, 0.01, 100), "target_delta = 1.5"),
        ((1.0, 1e-5, 1.2, 100), "sampling_probability = 1.2"),
        ((1.0, 1e-5, 0.01, 2.5), "steps = 2.5"),
        ((1.0, 1e-5, [0.1, 0.2], [1, 2, 3]), "sampling_probability|steps"),
        (("one", 1e-5, 0.01, 100), "target_epsilon"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ja.InputError, match=message) as error:
        ja.calibrate_noise_multiplier(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_thousand_random_targets():
    """Targets anywhere: safe for every one, within 1e-4, and a reason where there is no answer."""
    rng = np.random.default_rng(5)
    q, steps = 10.0 ** rng.uniform(-5, 0, 1000), np.round(10.0 ** rng.uniform(0, 6, 1000))
    delta, eps = 10.0 ** rng.uniform(-12, -3, 1000), 10.0 ** rng.uniform(-2, 2, 1000)
    c = ja.calibrate_noise_multiplier(eps, delta, q, steps)
    solved = c.status == "ok"
    assert np.all(c.epsilon.upper[c.ok] <= eps[c.ok])
    assert np.all(c.epsilon.upper[solved] >= eps[solved] * (1 - 1e-4))
    assert set(c.status) <= {"ok", "not_binding", "infeasible_noise"}
