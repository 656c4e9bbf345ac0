"""Mechanisms as JSON: exact round trips, and refusal of malformed and hostile documents."""

import json

import numpy as np
import pytest
from helpers import compositions, doctests_of, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct import selection
from jaxacct.interop import documents, from_json, to_json
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.base import register

positive = st.floats(5e-324, 1.7e308)
rates = st.floats(0.0, 1.0)


def batches(values):
    shapes = st.sampled_from([(1,), (3,), (2, 3), (2, 1, 3)])
    return values | shapes.flatmap(
        lambda shape: st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))).map(
            lambda numbers: np.array(numbers).reshape(shape)
        )
    )


bases = st.one_of(
    batches(positive).map(ja.Gaussian),
    batches(positive).map(ja.Laplace),
    st.builds(ja.RandomizedResponse, batches(st.floats(0.01, 0.99)), st.integers(2, 5)),
    batches(positive).map(ja.PureDP),
    st.builds(ja.ApproximateDP, positive, batches(st.floats(0.0, 0.5))),
)
steps = bases | st.builds(ja.PoissonSampled, bases, rates)
mechanisms = compositions(steps)


def test_doctests():
    assert doctests_of(documents) > 0


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_round_trip_is_exact(data):
    try:
        mechanism = data.draw(mechanisms)
    except ja.InputError:  # shapes drawn that do not broadcast
        return
    text = to_json(mechanism)
    again = from_json(text)
    assert again == mechanism and to_json(again) == text  # equality compares the bytes of every number


@pytest.mark.parametrize("cls", documents.classes().values(), ids=lambda cls: cls.__name__)
def test_every_public_class_states_how_each_field_is_stored(cls):
    for field in documents.dataclasses.fields(cls):
        numeric, static = field.name in cls.constraints, bool(field.metadata.get("static"))
        inner = field.name in ("mechanism", "mechanisms", "law")
        assert numeric + static + inner == 1, f"{cls.__name__}.{field.name} needs a form in interop/documents.py"


LAWS = [
    selection.TruncatedNegativeBinomial([0.0, 1.0], 0.1),
    selection.Poisson(3.5),
    selection.Binomial(7, 0.25),
    selection.PointMass(4),
    selection.Categorical([0.5, 0.25, 0.25]),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_selections_round_trip_with_their_law(law):
    assert {type(law).__name__ for law in LAWS} == set(documents.laws())
    chosen = selection.select(ja.dp_sgd([1.0, 2.0], 0.1, 10), law)
    assert from_json(to_json(ja.compose(chosen, ja.Laplace(1.0)))) == ja.compose(chosen, ja.Laplace(1.0))


def test_hostile_laws_are_refused():
    def refused(law):
        node = {"type": "Selection", "mechanism": GAUSSIAN, "law": law, "bound": "worst_case"}
        return refusal(from_json, document(node))

    assert "mechanism.law must be an object whose type is one of Binomial" in refused({"type": "Gaussian"})
    assert "mechanism.law: mean = -1" in refused({"type": "Poisson", "mean": -1})
    assert "mechanism.law has an unknown key" in refused({"type": "Poisson", "mean": 1, "shape": []})
    assert "mechanism.law must be an object" in refused(7)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_batches_keep_their_shape(shape):
    again = from_json(to_json(ja.Gaussian(np.ones(shape))))
    assert np.shape(again.noise_multiplier) == shape


def document(node, **changes):
    return json.dumps({"format": "jaxacct.mechanism", "version": 1, "mechanism": node} | changes)


def raw(fields):
    return '{"format": "jaxacct.mechanism", "version": 1, "mechanism": {' + fields + "}}"


GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1.0}


def nested(levels):
    node = GAUSSIAN
    for _ in range(levels):
        node = {"type": "Repeated", "mechanism": node, "steps": 1}
    return node


def batch(shape, values):
    return document({"type": "Gaussian", "noise_multiplier": {"shape": shape, "values": values}})


WIDE = [{"type": "Gaussian", "noise_multiplier": {"shape": s, "values": [1.0] * 2000}} for s in ([2000], [2000, 1])]

HOSTILE = {
    "not JSON": ("{", "text is not JSON: "),
    "empty": ("", "text is not JSON: "),
    "two documents": (document(GAUSSIAN) * 2, "text is not JSON: Extra data"),
    "byte order mark": ("\ufeff" + document(GAUSSIAN), "text is not JSON: "),
    "bytes": (document(GAUSSIAN).encode(), "text must be a str, not bytes"),
    "list at the top": ("[]", "document must be an object with the keys"),
    "no version": ('{"format": "jaxacct.mechanism", "mechanism": {}}', "document lacks a key"),
    "other format": (document(GAUSSIAN, format="pickle"), "format must be 'jaxacct.mechanism'; found 'pickle'"),
    "later version": (document(GAUSSIAN, version=2), "version must be 1, the one this release reads; found 2"),
    "version true": (document(GAUSSIAN, version=True), "version must be 1, the one this release reads; found True"),
    "extra key": (document(GAUSSIAN, comment="x"), "document has an unknown key"),
    "no type": (document({"noise_multiplier": 1.0}), "mechanism must be an object whose type is one of"),
    "private class": (document({"type": "BaseMechanism"}), "mechanism must be an object whose type"),
    "helper class": (document({"type": "Components"}), "mechanism must be an object whose type"),
    "dotted type": (document({"type": "os.system", "command": "true"}), "mechanism must be an object whose type"),
    "type a list": (document({"type": ["Gaussian"]}), "mechanism must be an object whose type"),
    "unknown field": (document(GAUSSIAN | {"__class__": 1}), "mechanism has an unknown key"),
    "missing field": (document({"type": "Gaussian"}), "mechanism lacks a key"),
    "duplicate key": (
        raw('"type": "Gaussian", "noise_multiplier": 9.0, "noise_multiplier": 1.0'),
        "mechanism has a key twice; give each once; found 'noise_multiplier'",
    ),
    "NaN": (raw('"type": "Gaussian", "noise_multiplier": NaN'), "NaN is not a number here"),
    "Infinity": (raw('"type": "PureDP", "epsilon": Infinity'), "Infinity is not a number here"),
    "-Infinity": (raw('"type": "PureDP", "epsilon": -Infinity'), "-Infinity is not a number here"),
    "overflow": (raw('"type": "PureDP", "epsilon": 1e999'), "mechanism.epsilon must be a number that float64"),
    "underflow": (raw('"type": "PureDP", "epsilon": 1e-999'), "mechanism.epsilon must be a number that float64"),
    "huge integer": (
        raw('"type": "Repeated", "mechanism": {}, "steps": 1' + "0" * 100_000),
        "mechanism.mechanism must be an object",
    ),
    "huge count": (document({"type": "Repeated", "mechanism": GAUSSIAN, "steps": 10**30}), "is beyond 2**53"),
    "count 2**53 + 1": (document({"type": "Repeated", "mechanism": GAUSSIAN, "steps": 2**53 + 1}), "beyond 2**53"),
    "half a step": (document({"type": "Repeated", "mechanism": GAUSSIAN, "steps": 0.5}), "mechanism: steps = 0.5"),
    "negative noise": (document(GAUSSIAN | {"noise_multiplier": -1}), "mechanism: noise_multiplier = -1 must be > 0"),
    "boolean": (document(GAUSSIAN | {"noise_multiplier": True}), "mechanism.noise_multiplier must be a number"),
    "text for a number": (document(GAUSSIAN | {"noise_multiplier": "1"}), "mechanism.noise_multiplier must be a"),
    "null": (document(GAUSSIAN | {"noise_multiplier": None}), "mechanism.noise_multiplier must be a number"),
    "bare list": (document(GAUSSIAN | {"noise_multiplier": [1.0]}), "mechanism.noise_multiplier must be a number"),
    "boolean in a batch": (batch([2], [1.0, True]), "mechanism.noise_multiplier.values[1] must be a number"),
    "shape too large": (batch([3], [1.0, 2.0]), "mechanism.noise_multiplier.shape must be"),
    "shape negative": (batch([-1, -2], [1.0, 2.0]), "mechanism.noise_multiplier.shape must be"),
    "shape of booleans": (batch([True], [1.0]), "mechanism.noise_multiplier.shape must be"),
    "many axes": (batch([1] * 17, [1.0]), "mechanism.noise_multiplier.shape must be 1 to 16 lengths"),
    "batch that broadcasts to 4e6": (document({"type": "Composed", "mechanisms": WIDE}), "has more than 1048576"),
    "empty composition": (document({"type": "Composed", "mechanisms": []}), "mechanism: mechanisms is empty"),
    "one for many": (document({"type": "Composed", "mechanisms": GAUSSIAN}), "mechanism: mechanisms must be a tuple"),
    "many for one": (
        document({"type": "Repeated", "mechanism": [GAUSSIAN], "steps": 1}),
        "mechanism: mechanism is a tuple of 1",
    ),
    "number in a composition": (
        document({"type": "Composed", "mechanisms": [GAUSSIAN, 3]}),
        "mechanism.mechanisms[1] must be an object",
    ),
    "bad field far down": (
        document({"type": "Composed", "mechanisms": [nested(2) | {"steps": "x"}]}),
        "mechanism.mechanisms[0].steps must be a number",
    ),
    "text for categories": (
        document({"type": "RandomizedResponse", "probability": 0.6, "categories": "two\n"}),
        "mechanism: categories = 'two\\n' must be an integer",
    ),
    "long text for categories": (
        document({"type": "RandomizedResponse", "probability": 0.6, "categories": "a" * 10**6}),
        "mechanism.categories must be a number, a boolean or a string of at most 64",
    ),
    "categories 1e999": (
        raw('"type": "RandomizedResponse", "probability": 0.6, "categories": 1e999'),
        "mechanism.categories must be",
    ),
    "deep": (document(nested(70)), "nested more than 64 deep"),
    "very deep": ('{"a":' * 200_000, "text is nested too deeply"),
    "very deep lists": ("[" * 200_000, "text is nested too deeply"),
    "many": (document({"type": "Composed", "mechanisms": [GAUSSIAN] * 2**10}), "more than 1024 mechanisms"),
    "long": (" " * (2**23 + 1), "text has 8388609 characters, limit 8388608"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_documents_are_refused_in_one_line(case, monkeypatch):
    monkeypatch.setattr(documents, "MAX_MECHANISMS", 2**10)
    text, expected = HOSTILE[case]
    message = refusal(from_json, text)
    assert expected in message and len(message) < 500


def test_limits_hold_for_writing_too(monkeypatch):
    monkeypatch.setattr(documents, "MAX_MECHANISMS", 2**10)
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 2**15)
    wide = ja.compose(ja.Gaussian(np.ones(2000)), ja.Gaussian(np.ones((2000, 1))))
    assert "has more than 1048576" in refusal(to_json, wide)
    shared = ja.compose(*[ja.compose(*[ja.Gaussian(1.0)] * 2**5)] * 2**5)
    assert "more than 1024 mechanisms" in refusal(to_json, shared)
    tall = ja.Gaussian(1.0)
    for _ in range(33):
        tall = ja.compose(ja.repeat(tall, 2), ja.Gaussian(1.0))
    assert "nested more than 64" in refusal(to_json, tall)
    assert "limit 32768" in refusal(to_json, ja.Gaussian(np.full(2_000, 1 / 3)))


def test_only_the_library_s_own_classes_are_written():
    @register
    @documents.dataclasses.dataclass(frozen=True, eq=False)
    class Gaussian(ja.Gaussian):
        pass

    assert issubclass(Gaussian, Mechanism)
    assert "Gaussian has no JSON form" in refusal(to_json, Gaussian(1.0))
    assert "is not a mechanism" in refusal(to_json, 3.0)


def test_a_running_total_of_thousands_is_written():
    run = ja.Gaussian(900.0)
    for i in range(2_000):
        run = ja.compose(run, ja.Gaussian(900.0 + i))
    assert from_json(to_json(run)) == run
