"""One round of random allocation: the certified engine against tables, closed forms, quadrature and itself."""

import csv
import pathlib

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import jaxacct as ja
from jaxacct.accounting.mechanism_engines import OneRound
from jaxacct.core.validation import InputError
from jaxacct.engines import allocation
from jaxacct.kernels.contour import allocation as contour
from jaxacct.kernels.contour import allocation_law
from jaxacct.mechanisms.random_allocation import RandomAllocation

ROWS = np.array(
    [  # sigma, t, delta, epsilon_remove, epsilon_add: computed twice each, by unlike methods in up to 66 digits
        (1, 2, 1e-5, 3.697385213, 3.079732588),
        (2, 2, 1e-5, 1.461945332, 1.380546813),
        (1, 3, 1e-5, 3.305099568, 2.508420773),
        (1, 4, 1e-5, 3.030426665, 2.168869106),
        (2, 10, 1e-5, 0.6220592388, 0.5864209511),
        (10, 10, 1e-6, 0.116231314, 0.1161876797),
        (1, 100, 1e-10, 2.076562873, 0.6880367825),
        (1, 100, 1e-5, 0.6209396716, 0.4219534733),
        (4, 100, 1e-5, 0.07630294921, 0.07616718003),
        (0.5, 1000, 1e-6, 4.106015909, 0.5610208843),
        (0.7, 1000, 1e-5, 0.5840129125, 0.2384494231),
        (2, 1000, 1e-6, 0.05923145678, 0.05887640216),
        (1, 10000, 1e-15, 0.3029473836, 0.09129888553),
        (3, 10000, 1e-9, 0.01603456201, 0.01602406737),
    ]
)
DIGITS = 3e-7
"""Relative tolerance for the table, whose epsilons are rounded to ten digits."""
DIRECTIONS = ("remove", "add")


@pytest.mark.parametrize(("direction", "column"), [("remove", 3), ("add", 4)])
def test_the_table_of_values(direction, column):
    sigma, t, delta = ROWS[:, :3].T
    found = allocation.epsilon(sigma, t, delta, direction)
    assert np.all(found.lower <= ROWS[:, column] * (1 + DIGITS)) and np.all(
        found.upper >= ROWS[:, column] * (1 - DIGITS)
    )
    assert np.all(found.upper - found.lower <= 1e-6 * found.upper)
    there = allocation.delta(sigma, t, ROWS[:, column], direction)
    np.testing.assert_allclose(there.estimate, delta, rtol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_slot_is_the_gaussian_mechanism(direction):
    sigma = np.array([0.3, 1.0, 7.0])
    expected = ja.epsilon(ja.Gaussian(sigma), 1e-6)
    found = allocation.epsilon(sigma, 1, 1e-6, direction)
    np.testing.assert_allclose(found.upper, expected.upper, rtol=1e-12)
    assert np.all(found.lower <= expected.upper) and np.all(found.upper >= expected.lower)


def payoff_of_two(sigma, k, sign):
    """E(S - k)_+ or E(k - S)_+ for two slots, to 1e-12: Black-Scholes in one slot, quadrature in the other."""
    s, strike, top = 1.0 / sigma, 2.0 * k, 1.0 / sigma + 14.0
    kink = (np.log(strike) + 0.5 * s * s) / s
    near = np.geomspace(1e-7, 6.0, 30)
    ends = np.unique(np.clip(np.concatenate([np.linspace(-14.0, top, 60), kink - near, kink + near]), -14.0, top))
    x, weight = np.polynomial.legendre.leggauss(20)
    half = 0.5 * np.diff(ends)[:, None]
    u = ends[:-1, None] + half + half * x
    left = strike - np.exp(s * u - 0.5 * s * s)
    d = -np.log(np.where(left > 0, left, 1.0)) / s
    if sign > 0:
        given = np.where(left > 0, special.ndtr(d + 0.5 * s) - left * special.ndtr(d - 0.5 * s), 1.0 - left)
    else:
        given = np.where(left > 0, left * special.ndtr(0.5 * s - d) - special.ndtr(-d - 0.5 * s), 0.0)
    return float(np.sum(half * weight * np.exp(-0.5 * u * u) * given)) / np.sqrt(8.0 * np.pi)


@pytest.mark.parametrize(("sigma", "eps"), [(1.0, 1.0), (0.5, 6.0), (3.0, 2.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_two_slots_against_quadrature(sigma, eps, sign):
    k = np.exp(sign * eps)
    expected = payoff_of_two(sigma, k, sign) * (1.0 if sign > 0 else 1.0 / k)
    found = allocation.delta(sigma, 2, eps, "remove" if sign > 0 else "add")
    assert found.lower[0] * (1 - 1e-12) <= expected <= found.upper[0] * (1 + 1e-12)
    assert found.upper[0] - found.lower[0] <= 1e-6 * found.upper[0]


@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_where_one_slot_decides_a_closed_form_is_above_and_near(sigma):
    eps = np.array([0.0, 0.5 / sigma**2])
    expected = np.array([payoff_of_two(sigma, np.exp(each), 1) for each in eps])
    above = allocation_law.one_slot_above(np.full(2, 1.0 / sigma), np.full(2, 2.0), np.exp(eps))
    assert np.all(above >= expected * (1 - 1e-12))
    assert sigma > 0.1 or np.all(above <= expected * (1 + 1e-5))


def test_one_slot_of_many_is_not_below_a_contour():
    s, t, k = np.full(3, 10.0), np.full(3, 50.0), np.exp([47.0, 50.0, 53.0])
    low, _, high, _ = contour.brackets_at(1.0, s, t, k, allocation_law.guess(1.0, s, t, k))
    above = allocation_law.one_slot_above(s, t, k)
    assert np.all(low <= above) and np.all(above <= high * (1 + 1e-9)) and np.all(high - low < 1e-9 * high)


@pytest.mark.parametrize(("sigma", "sign"), [(0.15, 1), (0.3, 1), (0.3, -1)])
def test_profiles_of_little_noise_against_quadrature(sigma, sign):
    """Where delta is large, the old brackets were a few thousandths wide. Parity of call and put makes them narrow."""
    profile = contour.round_profiles(np.array([1.0 / sigma]), np.array([2.0]), float(sign))[0]
    for place in np.linspace(0, np.searchsorted(-profile.lower, -1e-5), 3).astype(int).tolist():
        eps = profile.epsilon[place]
        expected = payoff_of_two(sigma, np.exp(sign * eps), sign) * (1.0 if sign > 0 else np.exp(eps))
        assert profile.lower[place] * (1 - 1e-12) <= expected <= profile.upper[place] * (1 + 1e-12)
        assert sign < 0 or eps < 0.3 or profile.upper[place] - profile.lower[place] <= 5e-4 * expected


def test_both_directions_agree_at_zero():
    """delta(0) is the total variation distance in both directions. The two computations share no integral."""
    sigma, t = np.array([0.5, 1.0, 1.0, 4.0]), np.array([3, 10, 1000, 100])
    remove, add = (allocation.delta(sigma, t, 0.0, direction) for direction in DIRECTIONS)
    assert np.all(np.maximum(remove.lower, add.lower) <= np.minimum(remove.upper, add.upper))
    np.testing.assert_allclose(remove.estimate, add.estimate, rtol=1e-7)


@pytest.mark.parametrize("eps", [0.1, 0.5])
def test_call_and_put_of_one_threshold_differ_by_its_distance_from_the_mean(eps):
    """E(S - k)_+ - E(k - S)_+ = 1 - k. The contours of the two expectations lie on opposite sides of 0."""
    s, t, k = np.full(2, 0.5), np.full(2, 20.0), np.exp([eps, -eps])
    call, put = (contour.brackets_at(sign, s, t, k, allocation_law.guess(sign, s, t, k)) for sign in (1.0, -1.0))
    assert np.all(call[0] - put[2] <= 1 - k + 1e-15) and np.all(call[2] - put[0] >= 1 - k - 1e-15)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_far_below_rounding_delta_is_relatively_accurate(direction):
    sigma, t = np.array([1.0, 0.5]), np.array([20, 50])
    found = allocation.epsilon(sigma, t, 1e-25, direction)
    assert np.all(found.lower > 0) and np.all(found.upper - found.lower <= 1e-3 * found.upper)
    there = allocation.delta(sigma, t, found.upper, direction)
    assert np.all(there.lower <= 1e-25)


EXTREMES = [
    (1e-3, 2),
    (1e-3, 2**53),
    (0.05, 1e5),
    (1e6, 2),
    (1e6, 2**53),
    (5e-324, 7),
    (1e-200, 1e12),
    (1e308, 3),
    (20.0, 1e9),
    (0.3, 1e9),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extremes_have_a_bracket_between_nothing_and_the_gaussian(direction):
    sigma, t = np.array(EXTREMES).T
    with np.errstate(all="ignore"):
        alone = ja.epsilon(ja.Gaussian(np.clip(sigma, 1e-150, 1e150)), 1e-6).upper
        for target in (1e-6, 1e-300):
            found = allocation.epsilon(sigma, t, target, direction)
            assert np.all((found.lower >= 0) & (found.lower <= found.estimate) & (found.estimate <= found.upper))
            inside = (sigma > 1e-150) & (sigma < 1e150) & (target == 1e-6)
            assert np.all(found.upper[inside] <= alone[inside] * (1 + 1e-9))
        for eps in (0.0, 1.0, 1e300):
            found = allocation.delta(sigma, t, eps, direction)
            assert np.all((found.lower >= 0) & (found.lower <= found.upper) & (found.upper <= 1))


@settings(max_examples=15, deadline=None)
@given(
    st.floats(0.4, 8.0), st.integers(2, 2000), st.floats(-12.0, -2.0), st.sampled_from(DIRECTIONS), st.floats(1.01, 2.0)
)
def test_epsilon_falls_with_noise_slots_and_delta(sigma, t, exponent, direction, factor):
    target = 10.0**exponent
    sigmas = np.array([sigma, sigma * factor, sigma, sigma])
    slots = np.array([t, t, np.ceil(t * factor), t])
    deltas = np.array([target, target, target, min(target * factor, 0.5)])
    found = allocation.epsilon(sigmas, slots, deltas, direction)
    assert np.all(found.lower <= found.upper) and np.all(found.lower[1:] <= found.upper[0])
    assert found.upper[0] <= ja.epsilon(ja.Gaussian(sigma), target).upper * (1 + 1e-12)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.4, 8.0), st.integers(2, 2000), st.floats(-12.0, -2.0), st.sampled_from(DIRECTIONS))
def test_the_ends_of_epsilon_are_seen_in_delta(sigma, t, exponent, direction):
    target = 10.0**exponent
    found = allocation.epsilon(sigma, t, target, direction)
    there = allocation.delta(sigma, t, np.array([found.lower[0], found.upper[0]]), direction)
    assert there.lower[1] <= target
    assert found.lower[0] == 0.0 or there.upper[0] >= target


def test_the_mechanism_takes_the_larger_direction():
    mechanism = RandomAllocation(ja.Gaussian([1.0, 2.0]), 100)
    both = ja.epsilon(mechanism, 1e-5)
    remove, add = (ja.epsilon(mechanism, 1e-5, relation=name) for name in ("remove_one", "add_one"))
    np.testing.assert_array_equal(both.upper, np.maximum(remove.upper, add.upper))
    np.testing.assert_array_equal(ja.epsilon(mechanism, 1e-5, relation="zero_out").upper, both.upper)
    assert both.kind.tolist() == ["certified"] * 2 and both.status.tolist() == ["ok"] * 2
    assert both.engine.tolist() == [OneRound.name] * 2
    assert ja.epsilon(mechanism, 0.7).status.tolist() == ["zero"] * 2
    assert np.all(ja.delta(mechanism, both.upper).lower <= 1e-5)


def test_a_width_that_is_not_reached_is_said():
    found = ja.epsilon(RandomAllocation(ja.Gaussian(0.01), 2**40), 1e-6)
    assert found.status == "width" and not found.ok


@pytest.mark.parametrize("sigma", [5e-324, 1e-200])
def test_an_upper_end_that_says_nothing_is_not_ok(sigma):
    found = ja.epsilon(ja.RandomAllocation(ja.Gaussian(sigma), [2, 10**9]), 1e-5)
    assert np.all(found.upper == np.inf) and np.all(found.status == "width") and not np.any(found.ok)


def test_delta_zero_is_refused():
    with pytest.raises(InputError, match=r"delta\[1\] = 0 must be > 0"):
        ja.epsilon(RandomAllocation(ja.Gaussian(1.0), 10), [1e-5, 0.0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_placement_of_the_contour_brackets_the_same_value(sign, monkeypatch):
    """No bound depends on where the contour is placed: with a bulk or without, and for a poor guess of the value."""
    rng = np.random.default_rng(7)
    s, t = np.exp(rng.uniform(-2.5, 1.5, 8)), np.floor(np.exp(rng.uniform(0.7, 11.0, 8)))
    k = np.exp(sign * rng.uniform(0.1, 4.0, 8) * np.minimum(np.sqrt(np.expm1(s * s) / t), 1.0))
    lower, upper = allocation_law.bounds(sign, s, t, k)
    guess = np.clip(allocation_law.guess(sign, s, t, k), np.log(lower + 1e-290), np.log(upper + 1e-290))
    monkeypatch.setattr(contour, "MOST_NODES", 600)
    for split in (False, True):
        monkeypatch.setattr(contour, "place", lambda *given, split=split: contour._place(*given, split))
        for shift in (-8.0, 0.0, 6.0):
            with np.errstate(all="ignore"):
                low, _, high, _ = contour.brackets_at(sign, s, t, k, guess + shift)
            lower, upper = np.maximum(lower, low), np.minimum(upper, high)
    assert np.all(lower <= upper)
    assert np.sum((upper - lower) / upper < 1e-5) >= 3  # 600 nodes do not suffice for all


@pytest.mark.parametrize("blur", [0.01, 0.03, 0.2])
def test_windows_at_complex_arguments_are_below_their_bounds(blur):
    """At cell edges |Phi((0 - u - i alpha)/blur)| has a bound even if e^{y^2/2} overflows and Phi(-x) underflows."""
    windows = allocation_law.Windows(*(np.array([x]) for x in (0.0, blur, 2.0, 0.1, -3.0, 3.0)))
    cells = allocation_law.cells_of(np.array([1.0]), np.array([100.0]), windows, 160)
    cuts = allocation_law.cuts_of(cells, windows)
    with mpmath.workdps(20):
        for share in (0.5, 0.95, 1.0):
            alpha = np.minimum(share * np.maximum(np.abs(cells.edges[0]), 0.02), 1.4)
            bulk, jump = allocation_law.shares(cuts, np.maximum(alpha[:-1], alpha[1:])[None])
            for j in range(0, 160, 7):
                u = mpmath.mpc(cells.edges[0, j], alpha[j])
                low, more, far = (mpmath.erfc(z / mpmath.sqrt(2)) / 2 for z in (u / blur, -u / blur, (u - 2) / 0.1))
                for exact, bound in ((low, bulk), (more, jump)):
                    assert abs(exact * far) <= bound[0, j] * (1 + 1e-12) + 1e-300


def test_the_path_beside_a_window_keeps_it_near_0_or_1():
    """More than 13 widths below a window, the window's bound is 1 to float64, even in cells many widths wide."""
    s, t = np.array([2.0, 1.0]), np.array([1000.0, 100.0])
    windows = allocation_law.Windows(*(np.array([x, x]) for x in (-np.inf, 1.0, 3.0, 0.01, -8.0, 3.1)))
    cells = allocation_law.cells_of(s, t, windows, 160)
    alpha = contour._path(cells, windows, np.array([1e6, 1e4]), np.array([True, False]))
    near = allocation_law.shares(allocation_law.cuts_of(cells, windows), np.maximum(alpha[:, 1:], alpha[:, :-1]))[1]
    away = cells.edges[:, 1:] < 3.0 - 13 * 0.01
    assert np.all(near[away] <= 1.0 + 1e-15) and alpha.max() > 0.3


def test_a_hundred_deltas_of_a_laplace_inversion_in_fifty_digits():
    """The reference E(k - S)_+ inverts a transform in arb. The transform is also an integral, along a rotated line."""
    with (pathlib.Path(__file__).parent / "data" / "random_allocation_deltas.csv").open() as lines:
        known = list(csv.DictReader(lines))
    columns = "noise_multiplier", "slots", "epsilon", "delta"
    for direction in DIRECTIONS:
        mine = [[float(row[name]) for name in columns] for row in known if row["direction"] == direction]
        sigma, slots, eps, delta = np.array(mine).T
        there = allocation.delta(sigma, slots, eps, direction)
        assert np.all(there.lower <= delta * (1 + 1e-14)) and np.all(there.upper >= delta * (1 - 1e-14))
        assert np.all(there.upper - there.lower <= 3e-6 * delta)
        for rtol, rows in ((1e-6, slice(0, None, 12)), (1e-1, slice(1, None, 12))):
            found = allocation.epsilon(sigma[rows], slots[rows], delta[rows], direction, rtol)
            assert np.all(found.lower <= eps[rows] * (1 + 1e-13)) and np.all(found.upper >= eps[rows] * (1 - 1e-13))
