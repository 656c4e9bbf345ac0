"""ja.calibrate: any one parameter of any mechanism, each value certified to meet its target."""

import math

import numpy as np
import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja


@settings(deadline=None, max_examples=12)
@given(st.floats(-3.0, 3.0), st.floats(-12.0, -1.0), st.floats(1e-6, 1e-2))
def test_the_scale_of_laplace_noise_is_known_in_closed_form(log_epsilon, log_delta, rtol):
    """delta(eps) = 1 - e^{(eps - 1/b)/2}, so b = 1/(eps - 2 log(1 - delta))."""
    epsilon, delta = math.exp(log_epsilon), 10.0**log_delta
    found = ja.calibrate(ja.Laplace, target_epsilon=epsilon, target_delta=delta, bracket=(1e-3, 1e3), rtol=rtol)
    least = 1.0 / (epsilon - 2.0 * math.log1p(-delta))
    assert found.ok and found.epsilon.upper <= epsilon
    assert least * (1.0 - 1e-9) <= found.value <= least * (1.0 + 4.0 * rtol * max(1.0, epsilon))


def test_a_calibration_is_as_close_as_is_asked():
    """The theorems' bracket, 2e-4 wide, ends a search only where rtol is not much finer."""
    for rtol in (1e-5, 1e-3):
        found = ja.calibrate(ja.Laplace, target_epsilon=1.0, target_delta=1e-4, bracket=(0.5, 2.0), rtol=rtol)
        assert found.status == "ok"
        assert found.value <= (1.0 + 4.0 * rtol) / (1.0 - 2.0 * math.log1p(-1e-4))


def test_a_batch_agrees_with_the_calibration_of_dp_sgd():
    target, rate = np.array([[0.5], [2.0]]), np.array([0.02, 1.0])
    found = ja.calibrate(
        lambda s: ja.dp_sgd(s, rate, 500), target_epsilon=target, target_delta=1e-5, bracket=(0.6, 300.0), rtol=2e-2
    )
    known = ja.calibrate_noise_multiplier(target, 1e-5, rate, 500)
    assert found.value.shape == (2, 2) and found.ok.all() and not found.best.any() and known.best.all()
    assert (found.epsilon.upper <= target).all()
    np.testing.assert_allclose(found.value, known.value, rtol=4e-2)
    again = ja.epsilon(ja.dp_sgd(found.value, rate, 500), 1e-5)
    assert (again.lower <= target).all() and (again.upper <= target * (1 + 1e-6)).all()


def test_whole_numbers_are_the_last_that_hold():
    found = ja.calibrate(
        lambda t: ja.repeat(ja.Gaussian(20.0), t),
        target_epsilon=[1.0, 3.0],
        target_delta=1e-6,
        bracket=(1, 1e6),
        whole=True,
    )
    assert (found.value == np.floor(found.value)).all()
    for value, target in zip(found.value, (1.0, 3.0), strict=True):
        one_more = ja.epsilon(ja.repeat(ja.Gaussian(20.0), value + 1), 1e-6)
        assert ja.epsilon(ja.repeat(ja.Gaussian(20.0), value), 1e-6).upper <= target < one_more.lower


def test_ends_of_the_bracket():
    found = ja.calibrate(ja.Gaussian, target_epsilon=[1e-3, 1e3, 1.0], target_delta=1e-5, bracket=(0.5, 100.0))
    assert found.status.tolist() == ["infeasible", "not_binding", "ok"]
    assert np.isnan(found.value[0]) and found.value[1] == 0.5 and found.ok.tolist() == [False, True, True]
    assert np.isnan(found.epsilon.upper[0])
    rising = ja.calibrate(ja.PureDP, target_epsilon=[5.0, 1.0], target_delta=1e-9, bracket=(0.1, 3.0), monotone=True)
    assert rising.status.tolist() == ["not_binding", "ok"] and rising.value[0] == 3.0
    assert 0.999 <= rising.value[1] <= 1.0 + 1e-6 and rising.best.tolist() == [False, True]  # no value > 3 is tried


def test_what_is_not_monotone_still_meets_the_target():
    """Epsilon has a hump inside the bracket. The value meets the target, and is never said to be the best."""

    def hump(x):
        return ja.PureDP(0.2 + 3.0 * np.exp(-((np.log(x) - 1.0) ** 2) * 8.0) + 0.3 / x)

    target = np.array([0.3, 0.45, 1.0, 3.0])
    found = ja.calibrate(hump, target_epsilon=target, target_delta=0.0, bracket=(0.5, 50.0))
    assert not found.best.any() and found.ok.any()
    some = target[found.ok]
    assert np.all(found.epsilon.upper[found.ok] <= some)
    assert np.all(ja.epsilon(hump(found.value[found.ok]), 0.0).lower <= some)


def test_a_selection_can_be_calibrated():
    from jaxacct import selection

    found = ja.calibrate(
        lambda s: selection.select(ja.Gaussian(s), selection.Geometric(0.5)),
        target_epsilon=1.0,
        target_delta=1e-5,
        bracket=(1.0, 30.0),
        rtol=1e-2,
    )
    known = ja.calibrate_noise_multiplier(1.0, 1e-5, 1.0, 1, repetitions=selection.Geometric(0.5))
    assert found.ok and found.epsilon.upper <= 1.0 and found.value == pytest.approx(known.value, rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mechanism": ja.Gaussian(1.0)}, "must be a function of the value"),
        ({"mechanism": lambda s: 3.0}, "is not a mechanism"),
        ({"bracket": 3.0}, "must be a pair"),
        ({"bracket": (2.0, 1.0)}, "lowest < highest"),
        ({"bracket": (0.0, 1.0)}, r"bracket\[0\] = 0.0 must be > 0"),
        ({"bracket": (1.5, 3.0), "whole": True}, "must be an integer"),
        ({"target_epsilon": [1.0, -1.0]}, r"target_epsilon\[1\] = -1.0"),
        ({"target_epsilon": [1.0] * 3, "mechanism": lambda s: ja.dp_sgd(s, [0.1, 0.2], 3)}, "do not broadcast"),
        ({"monotone": "yes"}, "must be True or False"),
        ({"rtol": 0.0}, "rtol"),
    ],
)
def test_bad_input_gets_one_line(arguments, words):
    given = {"mechanism": ja.Gaussian, "target_epsilon": 1.0, "target_delta": 1e-5, "bracket": (0.5, 50.0)} | arguments
    with pytest.raises(ja.InputError, match=words) as refused:
        ja.calibrate(given.pop("mechanism"), **given)
    assert "\n" not in str(refused.value)


CASES = {
    "noise": (lambda s: ja.repeat(ja.Gaussian(s), 1000), 0.5, 1e-6, False),
    "a rate, at most 1": (lambda q: ja.PoissonSampled(ja.PureDP(2.0), q), 0.5, 0.0, False),
    "a rate that is always met": (lambda q: ja.PoissonSampled(ja.PureDP(2.0), q), 5.0, 0.0, False),
    "steps": (lambda n: ja.repeat(ja.Gaussian(30.0), n), [0.5, 9.0], 1e-6, True),
    "growing": (ja.PureDP, [1e-4, 0.3, 20.0], 0.0, False),
    "never met": (lambda s: ja.PureDP(2.0 + 1.0 / s), [3.0, 1.0], 0.0, False),
    "unbounded": (ja.Gaussian, 1.0, 0.0, False),
    "a large batch of values": (ja.Laplace, np.geomspace(1e-5, 1e5, 11), 0.0, False),
    "just below a power of 10": (lambda s: ja.RandomAllocation(ja.Gaussian(s), [50.0, 52.0]), 2.0, 1e-5, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_search_finds_its_own_bracket(case):
    make, epsilon, delta, whole = CASES[case]
    given = {"target_epsilon": epsilon, "target_delta": delta, "whole": whole}
    ends = (1, 1e9) if whole else (1e-9, 1.0 if "rate" in case else 1e9)
    found, known = ja.calibrate(make, **given), ja.calibrate(make, **given, bracket=ends)
    assert np.array_equal(found.status, known.status) and np.array_equal(found.ok, known.ok)
    np.testing.assert_allclose(found.value, known.value, rtol=2e-3)
    upper = np.asarray(found.epsilon.upper)[np.asarray(found.ok)]
    assert np.all(upper <= np.broadcast_to(epsilon, np.shape(found.ok))[np.asarray(found.ok)])


def test_a_function_that_does_not_take_one_needs_a_bracket():
    below = lambda x: ja.Gaussian(x - 5.0)
    assert "give a bracket" in refusal(ja.calibrate, below, target_epsilon=1.0, target_delta=1e-5)
    found = ja.calibrate(below, target_epsilon=1.0, target_delta=1e-5, bracket=(5.1, 100.0))
    assert repr(found).startswith(f"Calibration(value={float(found.value)!r}, epsilon=Bounds(")


def test_targets_and_noise_of_zero_say_what_there_is_instead():
    assert "use target_advantage" in refusal(ja.calibrate_noise_multiplier, 0.0, 1e-5, 0.1, 10)
    assert "1e-9 to debug" in refusal(ja.dp_sgd, 0.0, 0.1, 10)
    assert ja.epsilon(ja.dp_sgd(1e-9, 0.1, 10), 1e-5).upper > 1e17
