"""Bounds at a prompt: what compares, what formats, what comes back from JSON and pickle, and what is refused."""

import copy
import functools
import json
import math
import operator
import pickle
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct.core.text import outward

ONE = ja.Bounds(1.0, 1.25, 1.5, engine="contour")
DEEP = functools.reduce(lambda inside, _: [inside], range(100_000), 1.5)
BATCH = ja.Bounds([0.0, np.nan], [1.0, np.nan], [np.inf, np.nan], "bound", ["ok", "failed"], "x")


@pytest.mark.parametrize(
    ("compare", "sure", "never"),
    [
        (operator.lt, "b.upper < 3", "b.lower >= 3"),
        (operator.le, "b.upper <= 3", "b.lower > 3"),
        (operator.gt, "b.lower > 3", "b.upper <= 3"),
        (operator.ge, "b.lower >= 3", "b.upper < 3"),
    ],
)
def test_an_order_says_which_end_answers_which_question(compare, sure, never):
    """The advice is tried on brackets on either side of 3 and around it: it never says yes and no at once."""
    with pytest.raises(TypeError) as refused:
        compare(ONE, 3)
    message = str(refused.value)
    assert f"{sure} says" in message and f"{never} that" in message and "\n" not in message
    for low, high in ((1, 2), (2, 4), (4, 5), (3, 3), (2, 3), (3, 4)):
        b, truths = ja.Bounds(low, low, high), [compare(x, 3) for x in np.linspace(low, high, 9)]
        assert eval(sure, {"b": b}) == all(truths)
        assert eval(never, {"b": b}) == (not any(truths))


@pytest.mark.parametrize("other", [3, 3.0, np.float64(3.0), np.ones(2), ONE, None, "x", math.nan])
@pytest.mark.parametrize("bounds", [ONE, BATCH], ids=["one", "batch"])
def test_no_comparison_answers_in_silence(bounds, other):
    for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        for pair in ((bounds, other), (other, bounds)):
            with pytest.raises(TypeError) as refused:
                compare(*pair)
            assert "\n" not in str(refused.value) and "bracket b" in str(refused.value)


def test_truth_and_float_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"float\(b.upper\) in a claim"):
        float(ONE)
    with pytest.raises(TypeError, match=r"float\(b.upper\) in a claim"):
        math.isnan(ONE)
    for bounds in (ONE, BATCH):
        with pytest.raises(TypeError, match=r"b\.ok says"):
            bool(bounds)
    for arithmetic in (operator.add, operator.mul):
        with pytest.raises(TypeError):
            arithmetic(ONE, np.float64(1.0))


def test_a_bracket_is_formatted_with_its_ends_outward():
    assert f"{ja.Bounds(4.3771, 4.3772, 4.3773):.3g}" == "[4.37, 4.38]"
    assert f"{ONE}" == repr(ONE)
    assert f"{ja.Bounds(0, 1, 4.3749, 'bound'):.3g}" == "[0, 4.38] bound"
    assert f"{BATCH:.2f}" == "[0.00, inf] bound, [nan, nan] bound failed"
    assert f"{ja.Bounds(*np.ones((3, 2, 10))):.1f}".endswith("[1.0, 1.0], ... 10 more rows of 20 are not shown")
    with pytest.raises(ValueError, match="Unknown format code"):
        f"{ONE:d}"


@pytest.mark.parametrize("shape", [(), (3,), (20,)])
def test_shown_ends_enclose_the_bracket(shape):
    """The ends are read back from the text, element by element; a long batch is cut."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lower, estimate, upper = np.sort(np.exp(5.0 * rng.normal(size=(3, *shape))), axis=0)
        text = repr(ja.Bounds(lower, estimate, upper))
        one = text.replace("[", "lower=[").replace(", ", "]upper=[", 1) if not shape else text
        for name, end, sign in (("lower", lower, 1), ("upper", upper, -1)):
            shown = [Decimal(word) for word in one.split(f"{name}=[")[1].split("]")[0].split() if word != "..."]
            known = np.ravel(end)[[0, 1, 2, -3, -2, -1] if shape == (20,) else slice(None)]
            assert len(shown) == known.size
            assert all(sign * (Decimal(x) - there) >= 0 for x, there in zip(known.tolist(), shown, strict=True))
            assert np.allclose(known, np.array(shown, float), rtol=1e-8)


@settings(deadline=None, max_examples=100)
@given(
    x=st.floats(allow_nan=False, allow_infinity=False),
    spec=st.sampled_from(
        [".1g", ".3g", ".6g", ".17g", ".20g", "g", ".0f", ".3f", ".2e", ",.2f", ".1%", ">30.4g", "+.3g"]
    ),
)
def test_text_is_never_on_the_wrong_side(x, spec):
    """Against exact decimals: the two texts, read as numbers, enclose x, and one of them is format(x, spec)."""
    high, low = outward(x, spec, up=True), outward(x, spec, up=False)

    def read(text):
        plain = text.replace(",", "").strip()
        return Decimal(plain.removesuffix("%")) / 100 if plain.endswith("%") else Decimal(plain)

    assert read(low) <= Decimal(x) <= read(high)
    nearest = format(x, spec)
    assert nearest in (low, high)


@pytest.mark.parametrize(
    ("x", "spec", "up", "down"),
    [
        (-4.3771, "=10.3g", "-     4.37", "-     4.38"),
        (4.3749, "1>8.3g", "11114.38", "11114.37"),
        (4.3749, "->8.3g", "----4.38", "----4.37"),
        (-4.3749, "x<8.3g", "-4.37xxx", "-4.38xxx"),
        (0.43749, "%^9.1%", "%%43.8%%%", "%%43.7%%%"),
    ],
)
def test_what_fills_a_text_is_no_part_of_its_number(x, spec, up, down):
    assert outward(x, spec, up=True) == up and outward(x, spec, up=False) == down


def test_a_text_that_overflows_is_infinite():
    assert outward(np.finfo(float).max, ".2g", up=True) == "1.8e+308"
    assert [outward(math.inf, ".3g", up=up) for up in (True, False)] == ["inf", "inf"]


def same(a, b):
    names = ("lower", "estimate", "upper", "kind", "status", "engine", "ok")
    return a.shape == b.shape and all(
        np.array_equal(np.asarray(getattr(a, n)), np.asarray(getattr(b, n)), equal_nan=n in names[:3]) for n in names
    )


@pytest.mark.parametrize(
    "bounds", [ONE, BATCH, BATCH[:0], ja.Bounds(0.0, 0.1, 1 / 3)], ids=["one", "two", "none", "third"]
)
def test_bounds_come_back_from_json_pickle_and_copies(bounds):
    text = json.dumps(bounds.to_dict(), allow_nan=False)
    for back in (
        ja.Bounds.from_dict(json.loads(text)),
        pickle.loads(pickle.dumps(bounds)),
        copy.deepcopy(bounds),
    ):
        assert same(bounds, back)
        assert not bounds.shape or not back.upper.flags.writeable


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"upper": "x"}, "upper = 'x' must hold numbers"),
        ({"upper": True}, "upper = True must hold numbers"),
        ({"upper": None}, "upper = None must hold numbers"),
        ({"upper": 1.0}, "must be in this order"),
        ({"upper": [1.5, [1.5]]}, "upper is a ragged"),
        ({"upper": DEEP}, "upper is a ragged"),
        ({"engine": DEEP}, "engine is a ragged"),
        ({"kind": "sure"}, "kind 'sure' is not known"),
        ({"status": 3}, "status = 3 must hold words"),
        ({"lower": [1.0, 1.0], "upper": [1.5, 1.5, 1.5]}, "saved is no saved Bounds"),
        ({"more": 1}, "is no saved Bounds"),
    ],
)
def test_a_dict_that_is_no_saved_bounds_is_refused_in_one_line(change, words):
    with pytest.raises(ja.InputError) as refused:
        ja.Bounds.from_dict(ONE.to_dict() | change)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_calibrations_are_plain_dicts():
    found = ja.calibrate_noise_multiplier([1e-6, 2.0], [1e-30, 1e-5], 1.0, 1)
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["value"] == ["nan", float(found.value[1])] and saved["ok"] == [False, True]
    assert same(ja.Bounds.from_dict(saved["epsilon"]), found.epsilon)
    risk = ja.calibrate_noise_multiplier(None, None, 1.0, 1, target_advantage=0.38)
    assert json.loads(json.dumps(risk.to_dict()))["value"] == float(risk.value)


def test_a_batch_is_iterated_and_one_is_not():
    ends = [float(one.upper) for one in ja.Bounds([1, 2], [1, 2], [1, 3])]
    assert ends == [1.0, 3.0]
    with pytest.raises(TypeError, match="single configuration"):
        iter(ONE)
        list(ONE)


def test_results_that_hold_a_bracket_can_be_compared_and_kept_in_sets():
    from jaxacct.tuning import Tuned

    run = ja.Gaussian(2.0)
    first, second = (Tuned(0.0, {"rate": 0.1}, 0.9, "tuned", ja.epsilon(run, 1e-5), run) for _ in range(2))
    assert first == first and first != second and len({first, second}) == 2
