"""Inputs are refused in one line that names the index; results never claim more than they have."""

import math
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from hypothesis import given
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct import interop, representations, selection, tuning
from jaxacct.core.bounds import KINDS, STATUSES, Bounds, explain
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    OPEN_PROBABILITY,
    POSITIVE,
    PROBABILITY,
    InputError,
    TracerError,
    broadcast_shape,
    check,
    choice,
    refuse_tracers,
)
from jaxacct.mechanisms import Gaussian, batch_shape, components, compose, directions, dp_sgd

CONSTRAINTS = {
    "positive": (POSITIVE, [5e-324, 1.0, 1e300], [0.0, -1.0, math.nan, math.inf, -math.inf]),
    "non-negative": (NON_NEGATIVE, [0.0, 2.0], [-1e-300, math.nan, math.inf]),
    "probability": (PROBABILITY, [0.0, 1e-300, 1.0], [-1e-9, 1.0000000000000002, math.nan, math.inf]),
    "open probability": (OPEN_PROBABILITY, [1e-300, 0.5], [0.0, 1.0, math.nan]),
    "delta": (DELTA, [1e-30, 0.5], [0.0, 1.0, 2.0, -1e-5, math.nan]),
    "delta or zero": (DELTA_OR_ZERO, [0.0, 0.5], [1.0, 2.0, -1e-5, math.nan]),
    "count": (
        COUNT,
        [1, 1e4, 2**53, np.int32(7)],
        [0, 1.5, 2**53 + 1, 2**70, 10**400, -3, math.nan, math.inf],
    ),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_each_constraint_accepts_its_set_and_nothing_else(name):
    constraint, good, bad = CONSTRAINTS[name]
    for value in good:
        assert check("field", value, constraint) == float(value)
    for value in bad:
        assert "must be" in refusal(check, "field", value, constraint)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.data())
def test_the_first_bad_index_is_named_exactly(values, data):
    index = data.draw(st.integers(0, len(values) - 1))
    values[index] = data.draw(st.sampled_from([-1.0, 0.0, math.nan, math.inf]))
    message = refusal(check, "noise_multiplier", values, POSITIVE)
    assert message.startswith(f"noise_multiplier[{index}] = {values[index]!r} must be ")


def test_messages_in_full():
    assert refusal(check, "noise_multiplier", [1, 1, 1, -1.0], POSITIVE) == (
        "noise_multiplier[3] = -1.0 must be > 0; use a positive, finite number"
    )
    assert refusal(check, "noise_multiplier", math.nan, POSITIVE) == (
        "noise_multiplier = nan must be finite and > 0; use a positive, finite number"
    )
    assert refusal(check, "steps", [[1, 2], [3, 2.5]], COUNT) == (
        "steps[1, 1] = 2.5 must be an integer >= 1 and <= 2**53; use a whole number, 1 or more"
    )
    assert refusal(check, "delta", 1.0, DELTA) == (
        "delta = 1.0 must be > 0 and < 1; use a small positive delta such as 1e-5"
    )


@pytest.mark.parametrize("value", ["1.0", b"1", None, True, [True], 1j, [1j], [None], ["1"], {}, [[1.0], [1.0, 2.0]]])
def test_wrong_types_are_refused(value):
    assert "steps" in refusal(check, "steps", value, COUNT)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (np.ma.masked_array([1.0, 2.0], [False, True]), "steps[1] = masked"),
        (np.ma.masked_array([[1, 2], [3, 4]], [[0, 0], [1, 0]]), "steps[1, 0] = masked"),
        (np.ma.masked_array(7.0, True), "steps = masked"),
        (np.ma.masked, "steps = masked"),
        ([1.0, np.ma.masked_array([2.0, 3.0], [False, True])][1:], "steps[0, 1] = masked"),
        (bytearray(b"1"), "steps = bytearray(b'1')"),
        (memoryview(b"1"), "steps = <memory"),
        ([bytearray(b"1")], "steps[0] = bytearray(b'1')"),
        ([True, 2.0], "steps[0] = True"),
        ((2, [3, False])[1], "steps[1] = False"),
        ([(2, 3), (4, np.True_)], "steps[1, 1] = "),
        ([1.0, np.array([True])][1:], "steps has dtype bool"),
    ],
)
def test_absent_cells_bytes_and_truth_values_are_no_numbers(value, place):
    assert refusal(check, "steps", value, COUNT).startswith(place)


def test_what_is_a_number_is_still_one():
    endless = []
    endless.append(endless)
    assert "ragged" in refusal(check, "steps", endless, COUNT)
    for value in ([1, 2.0], (np.float32(1), 2), [[1], [2]], np.ma.masked_array([1.0, 2.0], False), range(1, 3)):
        assert np.ravel(check("steps", value, COUNT)).tolist() == [1.0, 2.0]


def test_values_come_back_as_read_only_float64_copies():
    given_array = np.array([1, 2], np.int32)
    out = check("steps", given_array, COUNT)
    assert out.dtype == np.float64 and not out.flags.writeable and given_array.flags.writeable
    assert type(check("steps", np.int64(3), COUNT)) is float
    assert check("delta", jnp.asarray([0.5, 0.25], jnp.bfloat16), DELTA).tolist() == [0.5, 0.25]
    assert check("delta", Fraction(1, 4), DELTA) == 0.25
    assert check("delta", [], DELTA).shape == (0,)


def test_broadcasting_names_both_fields_and_shapes():
    assert broadcast_shape({"a": (3, 1), "b": (), "c": (4,)}) == (3, 4)
    message = refusal(broadcast_shape, {"a": (1,), "noise_multiplier": (3,), "steps": (2,)})
    assert message.startswith("noise_multiplier of shape (3,) and steps of shape (2,) do not broadcast; ")


def test_three_way_clash_names_a_real_pair():
    message = refusal(broadcast_shape, {"a": (3, 1), "b": (1, 2), "c": (3, 4)})
    assert message.startswith("b of shape (1, 2) and c of shape (3, 4)")


def test_choice_lists_what_is_allowed():
    assert choice("engine", "auto", ("auto", "lattice")) == "auto"
    assert refusal(choice, "engine", "fft", ("auto", "lattice")) == (
        "engine = 'fft' is not known; use one of 'auto', 'lattice'"
    )
    assert "engine = ['auto']" in refusal(choice, "engine", ["auto"], ("auto", "lattice"))


def test_tracers_are_refused_by_field_and_the_kernel_is_named():
    def public(mechanism, delta):
        refuse_tracers("ja.epsilon", "jaxacct.kernels.contour", mechanism=mechanism, delta=delta)
        return 0.0

    expected = "ja.epsilon is a host call and was given a tracer (field {}); inside jit use jaxacct.kernels.contour"
    traced = jax.jit(lambda s: public(Gaussian(s), 1e-5))
    assert refusal(traced, 1.0, error=TypeError).startswith(expected.format("noise_multiplier"))
    nested = jax.jit(lambda s: public(compose(Gaussian(1.0), dp_sgd(s, 0.1, 3)), 1e-5))
    assert expected.format("mechanisms[1].mechanism.mechanism.noise_multiplier") in refusal(nested, 1.0)
    assert expected.format("delta") in refusal(jax.jit(lambda d: public(Gaussian(1.0), d)), 1e-5)
    assert public(Gaussian(1.0), 1e-5) == 0.0


def test_components_and_check_refuse_tracers():
    def traced(sigma):
        return components(Gaussian(sigma), "add_or_remove_one", "remove").mu2

    assert "tracer" in refusal(jax.jit(traced), 1.0, error=TracerError)
    assert "tracer" in refusal(jax.jit(lambda d: check("delta", d, DELTA)), 0.1, error=TracerError)


def test_messages_are_one_short_line_whatever_is_refused():
    class Strange:
        def __repr__(self):
            raise RuntimeError("no")

    for value in ("x" * 10**6, "a\nb", np.ones((30, 30)), 10**5000, Strange(), ["auto"] * 10**5):
        assert len(refusal(choice, "engine", value, ("auto", "lattice"))) < 200
    for value in ("x" * 10**6, "a\nb", Strange(), [Strange()]):
        assert len(refusal(check, "steps", value, COUNT)) < 200
    assert str(InputError("first\n   second")) == "first second"


# Options

SINGLE = Gaussian(2.0)
CHOSEN = selection.select(ja.RandomizedResponse(0.75), selection.PointMass(1))
GRID = {"noise_multiplier": 2.0, "sampling_probability": 1, "steps": 1, "delta": 1e-5}
CALLS = {
    "epsilon": (lambda **k: ja.epsilon(SINGLE, 1e-5, **k), ("relation", "engine", "rtol", "memory_bytes")),
    "delta": (lambda **k: ja.delta(SINGLE, 1.0, **k), ("relation", "engine", "rtol", "memory_bytes")),
    "epsilon of a selection": (lambda **k: ja.epsilon(CHOSEN, 1e-5, **k), ("relation", "rtol", "memory_bytes")),
    "delta of a selection": (lambda **k: ja.delta(CHOSEN, 1.0, **k), ("relation", "rtol", "memory_bytes")),
    "profile": (lambda **k: ja.profile(SINGLE, **k), ("relation", "engine", "rtol", "memory_bytes")),
    "gradient": (lambda **k: ja.epsilon_gradient(SINGLE, 1e-5, **k), ("relation",)),
    "noise": (lambda **k: ja.calibrate_noise_multiplier(1.0, 1e-5, 1.0, 1, **k), ("relation", "rtol")),
    "rate": (lambda **k: ja.calibrate_sampling_probability(1.0, 1e-5, 9.0, 1, **k), ("relation", "rtol")),
    "steps": (lambda **k: ja.calibrate_steps(1.0, 1e-5, 9.0, 1.0, **k), ("relation", "rtol", "max_steps")),
    "sweep": (lambda **k: ja.sweep(GRID, **k), ("relation", "engine", "rtol", "block")),
    "repetitions_allowed": (lambda **k: ja.repetitions_allowed(SINGLE, 1.0, 1e-5, **k), ("relation", "rtol")),
    "bound_epsilon": (lambda **k: selection.bound_epsilon(SINGLE, selection.PointMass(2), 1e-5, **k), ("relation",)),
    "rdp_epsilon": (lambda **k: ja.rdp_epsilon(SINGLE, 1e-5, **k), ("relation",)),
}
WRONG = {
    "relation": ["swap", None, 3, ["add_one"]],
    "engine": ["fft", None, 3, ["auto"]],
    "rtol": ["x", math.nan, math.inf, -1, 0, 1, 2, None, True, 1j, [1e-4, 1e-3], {}],
    "memory_bytes": [-5, 0, 1, "x", None, 2**30 + 0.5, math.nan, math.inf, 2**70, [2**30, 2**30], True],
    "max_steps": [-5, 0, "x", None, 1.5, math.nan, [1, 2], 2**53 + 1],
    "block": [-5, 0, "x", 1.5, math.nan, [1, 2], 2**53 + 1],
}


@pytest.mark.parametrize("name", CALLS)
def test_options_are_refused_alike_wherever_they_appear(name):
    call, takes = CALLS[name]
    for option in takes:
        usual = option == "relation" and name in ("noise", "rate", "steps", "sweep")  # None: the batch rule's own
        for value in WRONG[option]:
            if value is None and usual:
                continue
            message = refusal(call, **{option: value})
            assert (message.startswith(option) and "use" in message) or "one" in message, (option, value, message)


def test_options_that_can_be_used_are():
    assert ja.epsilon(SINGLE, 1e-5, rtol=np.float64(0.01), memory_bytes=2.0**30, engine="lattice").engine == "lattice"
    assert ja.profile(SINGLE, "add_one", rtol=0.01, memory_bytes=2**24).memory_bytes == 2**24


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        None,
        "x",
        Gaussian,
        {},
        [Gaussian(1.0), Gaussian(2.0)],
        (Gaussian(1.0),),
        np.ones((3, 40)),
        selection.PointMass(2),
    ],
)
def test_what_is_no_mechanism_is_refused(value):
    """Every public call that takes a mechanism refuses the value in one line, in one style, and names the argument."""
    law = selection.Geometric(0.1)
    calls = {
        "mechanism": [
            *(
                lambda m, f=f: f(m, 1e-5)
                for f in (ja.epsilon, ja.delta, ja.epsilon_gradient, ja.rdp_epsilon, ja.repeat)
            ),
            *(lambda m, f=f: f(m, 0.1) for f in (ja.PoissonSampled, ja.SampledWithoutReplacement, ja.rdp_delta)),
            lambda m: representations.renyi_divergence(m, 2.0),
            *(lambda m, f=f: f(m) for f in (ja.profile, batch_shape, representations.renyi_curve, interop.to_json)),
            *(lambda m, f=f: f(m) for f in (representations.zero_concentrated, interop.to_dp_event)),
            lambda m: components(m, "add_one", "add"),
            lambda m: directions(m, "add_or_remove_one"),
            lambda m: ja.ProposeTestRelease(m, 1.0, 1.0),
            lambda m: ja.verify(m, ja.Bounds(1, 1, 1), delta=1e-5),
        ],
        "mechanisms[0]": [lambda m: ja.compose(m, SINGLE)],
        "candidates[0]": [lambda m: selection.candidates_profile([m], [0.0, 1.0])],
        "run": [
            *(lambda m, f=f: f(m, law) for f in (selection.select, selection.Selection, selection.AdaptiveSelection)),
            *(lambda m, f=f: f(m, law, 1e-5) for f in (selection.bound_epsilon, selection.bound_delta)),
            lambda m: selection.attack(m, law, delta=1e-5),
            lambda m: ja.repetitions_allowed(m, 3.0, 1e-5),
            lambda m: tuning.tune_with(float, tuning.grid(a=[1]), m, law, target_delta=1e-5, score=float),
        ],
        "tuned": [lambda m: selection.subset_epsilon(m, law, SINGLE, 0.1, 1e-5)],
        "trained": [lambda m: selection.subset_epsilon(SINGLE, law, m, 0.1, 1e-5)],
    }
    for name, takers in calls.items():
        for call in takers:
            message = refusal(call, value)
            assert message.startswith(f"{name} "), message
            assert "compose" in message or message.endswith("; use one such as Gaussian(noise_multiplier=1.0)"), message
            assert len(message) < 200, message


@pytest.mark.parametrize("engine", ["lattice", "contour"])
def test_an_engine_that_cannot_answer_refuses(engine):
    words = f"engine = {engine!r} cannot answer for a Selection, which has a method of its own; use 'auto'"
    assert refusal(ja.epsilon, CHOSEN, 1e-5, engine=engine) == words
    assert refusal(ja.delta, CHOSEN, 1.0, engine=engine) == words
    assert refusal(ja.profile, CHOSEN, engine=engine) == words
    assert ja.epsilon(CHOSEN, 1e-5).engine == "worst_score"


# Bounds


def test_bounds_of_one_configuration():
    b = Bounds(1.0, 1.25, 1.5, kind="certified", engine="contour")
    assert all(isinstance(end, np.float64) for end in (b.lower, b.estimate, b.upper))
    assert type(b.kind) is type(b.status) is type(b.engine) is str
    assert b.ok and b.shape == () and b.relative_width == pytest.approx(1 / 3)
    assert b[()].upper == 1.5
    for call in (lambda: b[0], lambda: len(b), lambda: list(b)):
        with pytest.raises(TypeError, match="single configuration"):
            call()


def test_bounds_of_a_batch():
    b = Bounds([0, 1, np.nan], [0, 1, np.nan], [0, 2, np.nan], status=["zero", "width", "infeasible_noise"])
    assert b.shape == (3,) == b.kind.shape == b.status.shape == b.ok.shape == b.engine.shape
    assert b.lower.dtype == np.float64 and b.ok.tolist() == [True, False, False]
    np.testing.assert_array_equal(b.relative_width, [0.0, 0.5, np.nan])
    assert [x.status for x in b] == ["zero", "width", "infeasible_noise"]
    assert b[1:].shape == (2,) and type(b[1].status) is str
    assert "1 zero, 1 width, 1 infeasible_noise" in repr(b)
    with pytest.raises(ValueError, match="read-only"):
        b.upper[0] = 0.0


def test_relative_width_edges():
    b = Bounds(
        [0.0, np.inf, 1.0],
        [0.0, np.inf, 2.0],
        [0.0, np.inf, np.inf],
        status=["zero", "mass_at_infinity", "width"],
    )
    np.testing.assert_array_equal(b.relative_width, [0.0, 0.0, np.nan])


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=1, max_size=6))
def test_bounds_hold_only_in_order(rows):
    lower, estimate, upper = np.array(rows).T
    bad = np.flatnonzero(~((lower <= estimate) & (estimate <= upper)))
    if bad.size:
        with pytest.raises(ValueError, match=re.escape(f"bounds[{bad[0]}]: ")):
            Bounds(lower, estimate, upper)
    else:
        assert Bounds(lower, estimate, upper).ok.all()


@pytest.mark.parametrize("ends", [(np.nan,) * 3, (np.nan, 1.0, 1.0), (0.0, np.nan, 1.0), (0.0, 1.0, np.nan)])
def test_an_ok_answer_is_never_nan(ends):
    with pytest.raises(ValueError, match="must be in this order"):
        Bounds(*ends)
    if not all(np.isnan(ends)):
        with pytest.raises(ValueError, match="must be in this order"):
            Bounds(*ends, status="infeasible")


def test_kinds_and_statuses_are_known():
    for kind in KINDS:
        assert Bounds(0, 1, 2, kind=kind).kind == kind
    assert Bounds(0, 1, 2, kind="conditional: monotone score").kind == "conditional: monotone score"
    for status in STATUSES:
        assert explain(status) == STATUSES[status] and explain(status).endswith(".")
    with pytest.raises(InputError, match=r"status = 'bound' is a kind; use explain\('ok', 'bound'\)"):
        explain("bound")
    narrow = explain("ok")
    assert "bracket" in narrow and all("bracket" not in explain("ok", kind) for kind in KINDS if kind != "certified")
    assert "far below it" in explain("ok", "bound") and explain("width", "bound") == STATUSES["width"]
    assert "assumption" in explain("ok", "conditional: monotone score")
    with pytest.raises(ValueError, match="is not known"):
        explain("ok", "exact")
    for wrong in ("fine", None, 3, {"a": 1}, {"ok"}, ["ok", "fine"]):
        assert "is not known" in refusal(explain, wrong)
    assert "is not known" in refusal(explain, [["ok"], ["ok", "ok"]])
    assert refusal(explain, ["ok", "fine"]).startswith("status[1] = 'fine' is not known")


def test_statuses_are_explained_one_by_one():
    b = Bounds([0, 1], [0, 1], [0, 2], status=["zero", "width"])
    assert explain(b.status, b.kind).tolist() == [STATUSES["zero"], STATUSES["width"]]
    assert explain(b.status).dtype.kind == "U" and explain([["ok"], ["zero"]]).shape == (2, 1)
    assert explain("ok", ["bound", "certified"]).tolist() == [explain("ok", "bound"), explain("ok")]
    assert explain(b[0].status) == STATUSES["zero"] and type(explain(b[0].status)) is str
    assert explain(np.array([], str)).shape == (0,)
    assert "do not broadcast" in refusal(explain, ["ok", "ok"], ["bound"] * 3)


def test_known_words_are_what_bounds_may_hold():
    for wrong in ({"kind": "exact"}, {"status": "fine"}):
        with pytest.raises(ValueError, match="is not known"):
            Bounds(0, 1, 2, **wrong)
