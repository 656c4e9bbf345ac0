"""What makes random allocation quick, and what could make it wrong: directions left out, blocks, shared contours."""

import threading

import jax
import mpmath
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.core.progress import Progress
from jaxacct.engines import allocation, backend
from jaxacct.kernels.contour import allocation as contour
from jaxacct.kernels.contour import allocation_law
from jaxacct.kernels.contour.allocation import put_below
from jaxacct.mechanisms import random_allocation

SIGMA = np.array([0.5, 0.7, 1.0, 2.0, 4.0, 9.0, 2.0, 1.0])
SLOTS = np.array([300, 200, 100, 20, 30, 10_000, 5, 1000])
DELTA = np.array([1e-10, 1e-5, 1e-8, 1e-3, 1e-6, 1e-12, 1e-4, 1e-5])


def round_profile(s, t, sign):
    return contour.round_profiles(np.array([s]), np.array([t]), sign)[0]


@pytest.mark.parametrize("share", [0.3, 1.0, 1.5])
def test_chernoffs_bound_is_above_the_put_and_not_far_above(share):
    eps = share * allocation.epsilon(SIGMA, SLOTS, DELTA, "add").estimate
    exact = allocation.delta(SIGMA, SLOTS, eps, "add")
    above = put_below(1 / SIGMA, SLOTS.astype(float), np.exp(-eps)) + eps
    assert np.all(above >= np.log(exact.lower)) and np.all(above <= np.log(exact.upper) + 6.0)


@pytest.mark.parametrize("chernoff", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_larger_direction_is_the_larger_of_both(chernoff, monkeypatch):
    if not chernoff:  # without Chernoff's bound, contours at the floor decide
        monkeypatch.setattr(allocation, "put_below", lambda s, t, k: np.full_like(s, np.inf))
    both = allocation.epsilon(SIGMA, SLOTS, DELTA, None)
    sides = [allocation.epsilon(SIGMA, SLOTS, DELTA, direction) for direction in ("remove", "add")]
    np.testing.assert_allclose(both.lower, np.max([side.lower for side in sides], axis=0), rtol=1e-9)
    np.testing.assert_allclose(both.upper, np.max([side.upper for side in sides], axis=0), rtol=1e-9)


def test_a_direction_above_the_floor_is_solved():
    exact = allocation.epsilon(SIGMA, SLOTS, DELTA, "add")
    for share in (0.3, 1.0 - 1e-5):  # a floor below epsilon changes nothing
        ends = allocation.search(
            -1.0, 1 / SIGMA, SLOTS.astype(float), DELTA, np.full(8, 50.0), 1e-4, share * exact.lower
        )
        np.testing.assert_allclose(ends[0], exact.lower, rtol=2e-6)
        np.testing.assert_allclose(ends[2], exact.upper, rtol=2e-6)


def test_a_wide_bracket_holds_a_narrow_one():
    one = ja.RandomAllocation(ja.Gaussian(SIGMA), SLOTS)
    narrow = ja.epsilon(one, DELTA, rtol=1e-6)
    for rtol in (0.9, 0.1):
        wide = ja.epsilon(one, DELTA, rtol=rtol)
        assert np.all(wide.lower <= narrow.upper) and np.all(narrow.lower <= wide.upper) and np.all(wide.status == "ok")


def test_a_row_that_fails_leaves_the_others(monkeypatch):
    def search(sign, s, *rest):
        if np.any(s == 1.0):
            raise MemoryError
        return found(sign, s, *rest)

    found = allocation.search
    expected = ja.epsilon(ja.RandomAllocation(ja.Gaussian(SIGMA), SLOTS), DELTA)
    monkeypatch.setattr(allocation, "search", search)
    got = ja.epsilon(ja.RandomAllocation(ja.Gaussian(SIGMA), SLOTS), DELTA)
    fine = SIGMA != 1.0
    np.testing.assert_allclose(got.upper[fine], expected.upper[fine], rtol=1e-6)
    assert np.all(got.upper[~fine] >= expected.upper[~fine]) and np.all(got.status == np.where(fine, "ok", "width"))


def test_blocks_go_to_threads_and_every_row_comes_back(monkeypatch):
    monkeypatch.setattr(backend.devices, "cores", lambda: 3)
    seen = set()

    def solve(a, b, c):
        seen.add(threading.get_ident())
        return np.array([a, b, c])

    columns = [np.random.default_rng(i).random(700) for i in range(3)]
    np.testing.assert_array_equal(backend.in_blocks(solve, columns), columns)
    assert threading.get_ident() not in seen


def test_an_interrupt_cancels_what_has_not_begun(monkeypatch):
    monkeypatch.setattr(backend.devices, "cores", lambda: 1)
    begun, gate = [], threading.Event()

    def work(item):
        begun.append(item)
        if item == 0:
            raise KeyboardInterrupt
        gate.wait(5.0)

    threading.Timer(0.05, gate.set).start()
    with pytest.raises(KeyboardInterrupt):
        list(backend.on_cores(work, range(50), Progress(50, False)))
    assert len(begun) < 50


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("sigma", "slots"), [(1.0, 100), (0.55, 250), (4.0, 30)])
def test_losses_read_together_hold_their_own_deltas(sign, sigma, slots):
    found = round_profile(1 / sigma, float(slots), sign)
    some = np.linspace(0, found.epsilon.size - 1, 12).astype(int)
    exact = allocation.delta(sigma, slots, found.epsilon[some], "remove" if sign > 0 else "add")
    assert np.all(found.lower[some] <= exact.upper * (1 + 1e-12))
    assert np.all(found.upper[some] >= exact.lower * (1 - 1e-12))
    for least, width in ((3.1e-7, 1e-4), (2.1e-9, 1e-3), (1e-12, 1e-2)):  # the errors of chords exceed these widths
        large = found.upper > least
        assert np.all((found.upper - found.lower)[large] <= width * found.upper[large])


def test_a_deep_put_is_placed_by_its_own_scale():
    """Guesses by the lognormal law exceed the delta of adding by factors of e^5 to e^18 here."""
    found = round_profile(2.0, 237.0, -1.0)
    large = (found.upper < 1e-4) & (found.upper > 1e-12)
    assert large.sum() > 20 and np.all((found.upper - found.lower)[large] <= 1e-2 * found.upper[large])


def test_a_profile_whose_contours_fail_has_its_theorems(monkeypatch):
    def fails(*given):
        raise MemoryError

    expected = round_profile(0.5, 100.0, 1.0)
    monkeypatch.setattr(contour, "contours_at", fails)
    found = round_profile(0.5, 100.0, 1.0)
    assert np.all(found.lower <= expected.upper) and np.all(found.upper >= expected.lower)
    assert np.any(found.upper > 1.1 * expected.upper)


@pytest.mark.parametrize(("sigma", "slots"), [(0.398, 143.0), (0.362, 10.0)])
def test_little_noise_needs_no_long_lines(sigma, slots):
    """The old code took thousands of nodes: on the jumps' line for 143 slots, on the bulk's line for 10."""
    s, t, eps = np.full(6, 1 / sigma), np.full(6, slots), np.linspace(6.0, 12.0, 6)
    guess = allocation_law.guess(1.0, s, t, np.exp(eps))
    found = contour.contours_at(1.0, s, t, np.exp(eps), guess, 1e-9)
    lines = [one for _, each in found for one in (each, each.bulk) if one is not None]
    assert max(one.place.line.count.max() for one in lines) < 600


def test_rounds_together_have_the_profiles_they_have_alone(monkeypatch):
    s, t = np.array([0.5, 1.5, 1e-5]), np.array([100.0, 300.0, 7.0])  # only theorems bound the last round
    alone = [round_profile(*one, -1.0) for one in zip(s, t, strict=True)]
    together = contour.round_profiles(s, t, -1.0)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.epsilon, other.epsilon)
        np.testing.assert_allclose(one.upper, other.upper, rtol=2e-4, atol=1e-16)
        assert np.all(one.lower <= other.upper) and np.all(other.lower <= one.upper)
    contours_at = contour.contours_at

    def fails_for_some(sign, s, *more):
        if np.any(s == 1.5):
            raise MemoryError
        return contours_at(sign, s, *more)

    monkeypatch.setattr(contour, "contours_at", fails_for_some)
    found = contour.round_profiles(s, t, -1.0)
    np.testing.assert_array_equal(found[0].upper, alone[0].upper)
    assert np.any(found[1].upper > 1.1 * alone[1].upper)


def test_nodes_that_are_left_out_are_counted(monkeypatch):
    s, t, k = np.array([1.0, 2.0]), np.array([100.0, 300.0]), np.exp(np.array([0.6, 4.0]))
    guess = np.log([1e-5, 1e-8])
    exact = contour.brackets_at(1.0, s, t, k, guess)
    for share in (1e-9, 1e-6, 1e-3):
        monkeypatch.setattr(allocation_law, "NEGLIGIBLE", share)
        found = contour.brackets_at(1.0, s, t, k, guess)
        assert np.all(found[0] <= exact[2]) and np.all(found[2] >= exact[0])
    assert np.all(found[2] - found[0] > 2.0 * (exact[2] - exact[0]))  # leaving out so many nodes widens the bracket


def test_calibrations_of_a_batch_meet_their_targets_from_any_side():
    slots = np.array([50, 200])
    found = ja.calibrate(
        lambda s: ja.RandomAllocation(ja.Gaussian(s), slots),
        target_epsilon=[0.3, 1.0],
        target_delta=1e-6,
        bracket=(0.2, 30.0),
        monotone=True,
        rtol=5e-2,
    )
    there = ja.epsilon(ja.RandomAllocation(ja.Gaussian(found.value), slots), 1e-6)
    assert np.all(found.status == "ok") and np.all(there.upper <= [0.3, 1.0])
    assert np.all(there.upper >= np.multiply([0.3, 1.0], 1 - 0.2))
    inverse = ja.calibrate(  # epsilon grows with x
        lambda x: ja.RandomAllocation(ja.Gaussian(1 / x), slots[:1]),
        target_epsilon=[0.3],
        target_delta=1e-6,
        bracket=(1 / 30.0, 5.0),
        monotone=True,
        rtol=5e-2,
    )
    np.testing.assert_allclose(1 / inverse.value, found.value[:1], rtol=0.1)


def test_turns_are_within_the_units_that_are_counted():
    rng = np.random.default_rng(0)
    angle = np.concatenate([10.0 ** rng.uniform(-18, 5, 300), np.pi * np.arange(1, 40), 0.5 * np.pi * np.arange(1, 40)])
    angle = np.concatenate([angle, -angle, [0.0]])
    with mpmath.workdps(40):
        exact = [mpmath.expm1(1j * mpmath.mpf(float(a))) for a in angle]
        wrong = [
            float(abs(mpmath.mpc(complex(z)) - e)) for z, e in zip(allocation_law.turned_by(angle), exact, strict=True)
        ]
    assert np.all(np.array(wrong) <= 16 * 2.0**-53 * np.minimum(np.abs(angle), 2.0))


def test_a_round_has_the_same_digits_beside_other_rounds():
    """Slices of a sweep are merged to the last byte. Rounds in one array took the number of nodes of the longest."""
    rounds = [(0.8, 10.0), (1.9, 33.0), (3.0, 10.0)]
    together = random_allocation._profiles_of(rounds, "usual")
    for one, found in zip(rounds, together, strict=True):
        (alone,) = random_allocation._profiles_of([one], "usual")
        assert all(map(np.array_equal, jax.tree.leaves(alone), jax.tree.leaves(found)))
