"""Calibration returns the safe end, close to the target, and says why where it cannot."""

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.calibration import noise_rate_steps
from jaxacct.calibration.search import Start, least_private
from jaxacct.core.bounds import STATUSES, Bounds
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE


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
def test_noise_multipliers_of_a_batch(count):
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
    c = ja.calibrate_steps([1e-3, 2.0], 1e-9, [0.5, 8.0], 1.0)
    assert list(c.status) == ["infeasible_steps", "ok"] and list(c.ok) == [False, True]
    assert np.isnan(c.value[0]) and c.value[1] > 1
    assert "noise multiplier" in ja.explain(c.status[0])
    free = ja.calibrate_sampling_probability(10.0, 1e-5, 5.0, 3)
    assert free.status == "not_binding" and free.value == 1.0
    loose = ja.calibrate_noise_multiplier(1.0, 0.3, 1e-4, 10)
    assert loose.status == "not_binding" and loose.value == NOISE_RANGE[0]
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
    """Every value meets its target, within 1e-4 if its status is "ok". Every other status gives a reason."""
    rng = np.random.default_rng(5)
    q, steps = 10.0 ** rng.uniform(-5, 0, 1000), np.round(10.0 ** rng.uniform(0, 6, 1000))
    delta, eps = 10.0 ** rng.uniform(-12, -3, 1000), 10.0 ** rng.uniform(-2, 2, 1000)
    c = ja.calibrate_noise_multiplier(eps, delta, q, steps)
    solved = c.status == "ok"
    assert np.all(c.epsilon.upper[c.ok] <= eps[c.ok])
    assert np.all(c.epsilon.upper[solved] >= eps[solved] * (1 - 1e-4))
    assert set(c.status) <= {"ok", "not_binding", "infeasible_noise"}


# Upper ends of epsilon, some or all of them nan or inf: a value with such an end never counts


def unknown_everywhere(noise, target):
    return np.full(noise.size, np.nan)


def infinite_everywhere(noise, target):
    return np.full(noise.size, np.inf)


def unknown_here_and_there(noise, target):
    wave = np.sin(1e4 * np.log(noise))
    return np.where(wave > 0.3, np.nan, target * np.exp(0.2 * wave))


def infinite_here_and_there(noise, target):
    return np.where(np.sin(1e4 * np.log(noise)) > 0, np.inf, target / np.minimum(noise, 1e300) ** 0.01)


def true_but_for_a_hole(noise, target):
    return np.where(np.abs(np.log(noise / 8.0)) < 0.2, np.nan, 8.0 * target / noise)


@pytest.mark.parametrize(
    "upper",
    [unknown_everywhere, infinite_everywhere, unknown_here_and_there, infinite_here_and_there, true_but_for_a_hole],
)
@pytest.mark.parametrize("unknown", ["noise_multiplier", "steps", "sampling_probability"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_is_not_known_never_counts(monkeypatch, upper, unknown):
    seen = {}

    def certify(goal, rows, values):
        assert np.all((values >= goal.limits[0]) & (values <= goal.limits[1]))  # dp_sgd would refuse the whole batch
        noise = values if unknown == "noise_multiplier" else 1.0 / values
        top = upper(noise, goal.epsilon[rows])
        seen.update({(int(row), float(value)): end for row, value, end in zip(rows, values, top, strict=True)})
        lower = np.where(np.isnan(top), np.nan, 0.0)
        return Bounds(lower, top, top, status="width", engine="none")

    def no_guess(goal, rows):
        x = np.array([np.nan, np.inf, -np.inf, 0.0, 2.0])[: rows.size]
        x = np.where(np.isfinite(x), x, 0.5 * np.sum(np.log(goal.limits)))
        return Start(x, np.full(rows.size, np.nan), np.arange(rows.size) % 2 == 0)

    monkeypatch.setattr(noise_rate_steps, "certified", certify)
    monkeypatch.setattr(noise_rate_steps, "started", no_guess)
    target = np.array([1e-300, 1e-10, 1.0, 1e10, 1e300])
    known = {"noise_multiplier": 1.0, "steps": 4, "sampling_probability": 0.5}
    known.pop(unknown)
    found = getattr(ja, f"calibrate_{unknown}")(target, 1e-5, **known)
    assert (np.isfinite(found.value) == found.ok).all() and (np.isnan(found.epsilon.upper) == ~found.ok).all()
    for row in np.flatnonzero(found.ok):
        assert seen[row, float(found.value[row])] == found.epsilon.upper[row] <= target[row]
    if upper in (unknown_everywhere, infinite_everywhere):
        assert not found.ok.any()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 2**53])
def test_targets_at_the_ends_of_float64_are_answered_and_met(steps):
    target, delta = np.meshgrid([1e-300, 1.0, 1e300], [1e-300, 0.5, 1 - 1e-16])
    found = [ja.calibrate_noise_multiplier(target, delta, 1.0, steps)]
    noises = np.array((1e-300, 1e6) if steps == 1 else (0.1, 1e300))[:, None, None]
    found.append(ja.calibrate_steps(target, delta, noises, 1.0, max_steps=steps))
    for c in found:
        assert (np.isfinite(c.value) == c.ok).all() and not (c.ok & ~(c.epsilon.upper <= target)).any()
        assert set(np.unique(c.status)) <= set(STATUSES)


def test_one_search_from_upper_ends_finds_any_crossing():
    for root in (0.11, 3.0, 9e5):
        upper = lambda x, root=root: (root / x) ** 1.5
        found = least_private(upper, 1.0, 1.0, (0.1, 1e6), falls=True, rtol=1e-5)
        assert root < found < root * (1 + 1e-5)
    assert np.isnan(least_private(lambda x: 2 + 0 * x, 1.0, 1.0, (0.1, 1e6), falls=True, rtol=1e-4))
    assert np.isnan(least_private(lambda x: np.nan * x, 1.0, 1.0, (0.1, 1e6), falls=True, rtol=1e-4))
    assert least_private(lambda x: 0 * x, 1.0, 1.0, (0.1, 1e6), falls=True, rtol=1e-4) == 0.1
    for most in (1, 2, 17, 123_456):
        asked = []

        def upper(n, most=most, asked=asked):
            asked.extend(n)
            return n / (most + 0.5)

        assert least_private(upper, 1.0, 1e3, (1, 1e9), falls=False, rtol=1e-4, whole=True) == most
        assert len(asked) < 25
