"""A mu shown by tangents on one contour: held against exact tests, the lattice, single deltas and the profile."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct.accounting.risk_readings import Place, deltas_along
from jaxacct.calibration import risks
from jaxacct.engines import contour
from jaxacct.mechanisms import components

noise = ja.calibrate_noise_multiplier


def exact_mu(sigma, q, floor):
    """Return the largest mu of one step, by mpmath, over tests whose two error rates are both at least the floor.

    The best tests are thresholds: with the record the output is N(1, sigma^2) with probability q, else N(0, sigma^2).
    """

    def quantile(p):
        return mpmath.sqrt(2) * mpmath.erfinv(2 * p - 1)

    most = mpmath.mpf(0)
    with mpmath.workdps(25):
        for z in np.linspace(0.0, 6.0, 7):
            for edge in (mpmath.mpf(z), -quantile(mpmath.mpf(floor))):  # in deviations of the output
                above = mpmath.ncdf(-edge)
                power = (1 - q) * above + q * mpmath.ncdf(1 / mpmath.mpf(sigma) - edge)
                if above >= floor and 1 - power >= floor:
                    most = max(most, quantile(power) - quantile(above))
                below = mpmath.ncdf(edge)  # adding: the reversed test, which says "no record" below the threshold
                spread = (1 - q) * below + q * mpmath.ncdf(edge - 1 / mpmath.mpf(sigma))
                if spread >= floor and 1 - below >= floor:
                    most = max(most, quantile(below) - quantile(spread))
    return float(most)


@pytest.mark.parametrize(("q", "goal", "floor"), [(0.4, 0.3, 1e-4), (0.1, 0.6, 1e-10), (0.02, 1.0, 1e-6)])
def test_one_step_agrees_with_the_exact_tests(q, goal, floor):
    found = noise(target_mu=goal, above_fpr=floor, sampling_probability=q, steps=1)
    assert found.ok and found.risk.upper <= goal
    assert exact_mu(found.value, q, floor) <= goal
    assert exact_mu(found.value * (1 - 2e-4), q, floor) > goal


def test_no_sampling_is_the_closed_form():
    goal, steps = np.array([0.3, 1.0, 7.0, 40.0]), np.array([1, 100, 3, 16])
    found = noise(target_mu=goal, sampling_probability=1.0, steps=steps)
    assert found.ok.all() and np.allclose(found.value, np.sqrt(steps) / goal, rtol=1e-4)
    assert np.all(found.value >= np.sqrt(steps) / goal)


ROWS = np.array([[0.01, 1000, 0.52], [0.003, 9000, 0.6], [0.04, 12000, 1.8], [0.008, 18000, 0.87]]).T


@pytest.mark.slow
def test_the_reading_of_the_profile_agrees():
    q, steps, goal = ROWS
    found = noise(target_mu=goal, sampling_probability=q, steps=steps)
    at, below = (ja.profile(ja.dp_sgd(found.value * by, q, steps)).gdp_mu() for by in (1.0, 1.0 - 1e-4))
    assert found.ok.all() and found.best.all() and np.all(found.risk.upper <= goal)
    assert np.all(found.risk.upper - found.risk.lower <= 1e-4 * found.risk.upper)
    assert np.all(at.lower <= goal) and np.all(at.upper >= found.risk.lower) and np.all(below.lower > goal)


@pytest.mark.slow
def test_rows_that_tangents_leave_open_are_answered():
    # the first run has few hits, so the contour would need thousands of nodes; no noise meets the second target
    found = noise(target_mu=[1.0, 1e-9], sampling_probability=[0.0037, 0.5], steps=[120, 10**6])
    assert found.ok.tolist() == [True, False] and found.status[1] == "infeasible_noise"
    assert found.risk.upper[0] <= 1.0 < ja.profile(ja.dp_sgd(found.value[0] * (1 - 2e-4), 0.0037, 120)).gdp_mu().lower


@settings(max_examples=5, deadline=None)
@given(st.floats(0.3, 2.0), st.floats(0.3, 2.0), st.floats(0.005, 0.05))
def test_noise_falls_as_the_target_rises(one, other, q):
    found = noise(target_mu=[min(one, other), max(one, other)], above_fpr=1e-6, sampling_probability=q, steps=1000)
    assert found.ok.all() and np.all(found.risk.upper <= [min(one, other), max(one, other)])
    assert found.value[0] >= found.value[1] * (1 - 1e-4)


def asked():
    run = ja.dp_sgd(np.array([1.0, 0.8, 1.5]), np.array([0.01, 0.003, 0.03]), np.array([1000, 9000, 3000]))
    place = np.array([3.1, 4.0, 4.0])
    return run, place, place * np.linspace(0.0, 1.05, 9)[:, None]


@pytest.mark.parametrize("relation", ("add_or_remove_one", "remove_one", "add_one"))
def test_ends_far_from_the_contour_hold(relation):
    run, place, epsilon = asked()
    low, high = deltas_along(run, place, epsilon, epsilon == epsilon[-1], relation, 1e-4)
    one = ja.delta(run, epsilon, relation=relation, rtol=1e-6)
    assert np.all(low <= one.upper) and np.all(one.lower <= high)
    if relation == "add_or_remove_one":
        other = ja.delta(ja.dp_sgd(1.0, 0.01, 1000), epsilon[::8, 0], engine="lattice", rtol=1e-2)
        assert np.all(low[::8, 0] <= other.upper) and np.all(other.lower <= high[::8, 0])
        assert np.all(high <= one.upper * 1.01) and np.all(low[-1] >= high[-1] * (1 - 1e-4))


def test_negative_epsilons_are_left_open():
    run, place, epsilon = asked()
    low, high = deltas_along(run, place, epsilon - 0.1, epsilon > 0.0, "add_or_remove_one", 1e-4)
    assert np.all(low == 0.0) and np.all(high == 1.0)


@pytest.mark.parametrize("wrong", (np.nan, np.inf, -np.inf, -60.0, -1e-9))
def test_what_the_kernel_gets_wrong_shows_nothing(monkeypatch, wrong):
    def lies(kernel, arguments, size, chunk, **static):
        log = np.full(arguments[2].shape, wrong)
        return [log, log, log, np.full(log.shape, True), np.full((size, 1, 2), 1.0)]

    monkeypatch.setattr(contour, "evaluate", lies)
    if wrong == -1e-9:  # at a large eps, e^-1e-9 exceeds even delta without sampling
        run = ja.dp_sgd(np.array([100.0]), 0.5, 10)
        parts, epsilon = components(run, "remove_one", "remove"), np.linspace(0.5, 5.0, 9)[None]
        ends = contour.delta_along(parts, epsilon[:, -1], epsilon, 0 * epsilon, 1e-4 + 0 * epsilon, epsilon > 0, 1e-6)
        assert np.all(ends.lower == 0.0) and np.all(ends.upper == 1.0)
    run, place, _ = asked()
    low, high, _ = risks.by_tangents(
        ja.dp_sgd(0.3, 0.5, np.array([20, 20, 20])) if wrong == -60.0 else run,
        "add_or_remove_one",
        np.full(3, 1e-10),
        Place(place, np.ones(3)),
        1e-4,
        *risks.TRIES[0],
    )
    assert not narrow(low, high).any()


def narrow(low, high):
    return (low <= high) & np.isfinite(high) & (high - low <= 1e-4 * high)


@pytest.mark.parametrize("place", (np.nan, np.inf, 0.0, -1.0, 1e-300, 1e300))
def test_a_place_that_is_none_shows_nothing_false(place):
    mu = 0.522201  # of shared/reference/risk.csv
    run, there = ja.dp_sgd(np.array([1.0]), 0.01, 1000), Place(np.array([place]), np.ones(1))
    low, high, _ = risks.by_tangents(run, "add_or_remove_one", np.array([1e-10]), there, 1e-4, *risks.TRIES[1])
    assert np.all((low <= mu * (1 + 2e-6)) & (high >= mu * (1 - 2e-6)) | ~narrow(low, high))


def test_few_values_are_tried_where_large_losses_are_rare(monkeypatch):
    runs = np.array([(1.295e-3, 15309, 0.357), (4.105e-3, 763, 0.305), (3.187e-3, 1178, 0.317), (1.032e-3, 9195, 0.36)])
    tried, shown = [], risks.by_tangents

    def counted(run, relation, floor, *rest):
        tried.append(floor.size if rest[-2:] == risks.TRIES[0] else 0)
        return shown(run, relation, floor, *rest)

    monkeypatch.setattr(risks, "by_tangents", counted)
    found = ja.calibrate_noise_multiplier(
        target_mu=runs[:, 2], sampling_probability=runs[:, 0], steps=runs[:, 1], backend="numpy"
    )
    assert np.all(found.ok) and np.all(found.risk.upper <= runs[:, 2])
    assert sum(tried) <= 3 * len(runs)
