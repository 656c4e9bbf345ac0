"""ja.verify reads every field of every mechanism, knows flat profiles, and mixes the orders of replaced records."""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import math
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mechanism_tables import EXAMPLES

import jaxacct as ja
from jaxacct import selection
from jaxacct.mechanisms.base import Mechanism, register

pytest.importorskip("flint")

from jaxacct.verification import delta_enclosure
from jaxacct.verification.ball_arithmetic import NotCovered, ball, precision
from jaxacct.verification.finite_losses import from_masses, in_either_order
from jaxacct.verification.loss_definition import RULES, directions, expand


def bracket(lower, upper):
    return SimpleNamespace(lower=lower, upper=upper)


def status(mechanism, lower, upper, **asked):
    return ja.verify(mechanism, bracket(lower, upper), **asked).status


GAUSSIAN = ja.Gaussian(2.0)
MECHANISMS = [
    *EXAMPLES,
    ja.AboveThreshold(4.0, 4.0, answers=2, monotone=True),
    ja.ReportNoisyMax(1.0, "gumbel"),
    ja.RandomizedResponse(0.6, 3),
    ja.PoissonSampled(GAUSSIAN, 0.2),
    ja.PoissonSampled(GAUSSIAN, 0.2, group=3),
    ja.PoissonSampled(ja.PoissonSampled(GAUSSIAN, 0.2), 0.5),
    ja.PoissonSampled(ja.AboveThreshold(4.0, 4.0), 0.2),
    ja.SampledWithoutReplacement(GAUSSIAN, 0.2),
    ja.SampledWithoutReplacement(GAUSSIAN, 0.2, group=2, dataset_size=20),
    ja.SampledWithReplacement(GAUSSIAN, 3, 20, group=2),
    ja.TruncatedPoissonSampled(GAUSSIAN, 0.2, 20, 4),
    ja.RandomAllocation(GAUSSIAN, 1, group=5),
    ja.RandomAllocation(GAUSSIAN, 4, participations=2),
    ja.ShuffledBatches(GAUSSIAN, 4),
    selection.select(GAUSSIAN, selection.Geometric(0.5)),
    selection.select(GAUSSIAN, selection.Geometric(0.5), candidates="adaptive"),
    selection.select(GAUSSIAN, selection.Geometric(0.5), top=2),
    ja.repeat(ja.compose(ja.PureDP(0.3), ja.repeat(ja.ApproximateDP(0.2, 0.01), 2)), 2),
]
SAME = {
    ("ReportNoisyMax", "noise", "exponential"): "Laplace and exponential noise have one theorem",
    ("SampledWithoutReplacement", "dataset_size", 21): "it belongs to a group, and this is one record",
}
"""Fields that do not matter, and why."""


def other_values(value):
    """Values that a field may have instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [x for x in ("laplace", "exponential", "gumbel", "envelope", "renyi") if x != value]
    if isinstance(value, Mechanism):
        return [new for name in names(value) for new in itertools.islice(moved(value, name), 1)]
    if isinstance(value, tuple):
        return [(*value[:i], new, *value[i + 1 :]) for i, one in enumerate(value) for new in other_values(one)]
    if value is None:
        return [21]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, np.ndarray) and value.ndim:
        return [value[::-1], np.r_[value[1:], value[:1]]]
    return [value + 1.0, value * 0.75, value * 1.25] if isinstance(value, float) else []


def names(mechanism):
    return [field.name for field in dataclasses.fields(mechanism)]


def moved(mechanism, name):
    """The mechanism with another value of a field, where its constructor allows one."""
    if name == "in_turns":  # says something of replaced records alone, and is no part of a definition there
        return
    for value in other_values(getattr(mechanism, name)):
        with contextlib.suppress(ja.InputError):
            yield dataclasses.replace(mechanism, **{name: value})


def enclosure(mechanism, relation):
    """Balls of delta in every direction, or None where it is undecided."""
    try:
        found = []
        for order, direction in directions(mechanism, relation):
            build = lambda order=order, direction=direction: expand(order, relation, direction)
            found += [delta_enclosure.enclose(build, epsilon, -30.0, 0) for epsilon in (0.05, 0.6)]
        return found
    except NotCovered:
        return None


LONG = (ja.NumericSparse, ja.RandomAllocation)


@pytest.mark.parametrize(
    "mechanism",
    [pytest.param(m, marks=pytest.mark.slow) if isinstance(m, LONG) else m for m in MECHANISMS],
    ids=lambda m: m.expression().replace("ja.", ""),
)
def test_every_field_moves_the_answer_or_is_not_covered(mechanism):
    for relation in ("add_or_remove_one", *([] if isinstance(mechanism, LONG) else ["replace_one"])):
        before = enclosure(mechanism, relation)
        if before is None:
            continue
        for name in names(mechanism):
            # `moved` is empty where the constructor allows no other value, such as a group of no Gaussian
            nested = isinstance(getattr(mechanism, name), Mechanism | tuple)
            for other in itertools.islice(moved(mechanism, name), None if nested else 1):
                value = getattr(other, name)
                if (type(mechanism).__name__, name, value if isinstance(value, str | int) else None) in SAME:
                    continue
                if relation == "replace_one" and name == "monotone":
                    continue  # a record that is replaced may move queries both ways
                after = enclosure(other, relation)
                if after is None:
                    continue
                same = len(before) == len(after) and all(a.overlaps(b) for a, b in zip(before, after, strict=True))
                assert not same, (name, value, before, after)


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_field_that_a_rule_does_not_name_is_not_covered(kind):
    """A subclass has no definition, with or without a further field, alone and inside other mechanisms."""
    example = next(m for m in MECHANISMS if type(m) is kind)
    held = {name: getattr(example, name) for name in names(example)}
    more = dataclasses.make_dataclass("More", [("extra", Any, 0.0)], bases=(kind,), frozen=True, eq=False)
    plain = dataclasses.make_dataclass("Plain", [], bases=(kind,), frozen=True, eq=False)
    for made in (register(more)(**held), register(plain)(**held)):
        for run in (made, ja.compose(ja.PureDP(0.1), made), ja.compose(made, ja.PureDP(0.1)), ja.repeat(made, 2)):
            found = ja.verify(run, bracket(0.0, 0.3), epsilon=0.1)
            assert found.status == "undecided" and "no definition" in found.explanation


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_rule_names_the_fields_and_uses_them(kind):
    rule = RULES[kind]
    named = list(inspect.signature(rule).parameters)[1:]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(kind))
    loaded = {node.id for node in ast.walk(ast.parse(inspect.getsource(rule))) if isinstance(node, ast.Name)}
    assert set(named) <= loaded


def test_a_known_class_with_a_new_field_is_not_covered(monkeypatch):
    """A field that a later version of a class adds is refused, though nobody has changed the class's rule."""
    made = dataclasses.make_dataclass("Later", [("noise_multiplier", Any), ("group", int, 1)], frozen=True)
    from jaxacct.verification import loss_definition

    monkeypatch.setitem(loss_definition.RULES, made, loss_definition.RULES[ja.Gaussian])
    with pytest.raises(NotCovered, match="Later with the field group"):
        loss_definition.fields_of(made(1.0))


def test_a_group_in_random_allocation_is_undecided():
    run = ja.RandomAllocation(GAUSSIAN, 1, group=5)
    assert status(run, 1.0, 2.0, delta=1e-5) == "undecided"
    answer = ja.epsilon(run, 1e-5)
    assert ja.verify(run, answer, delta=1e-5).status == "undecided"


FLAT = [
    (ja.ApproximateDP(1.0, 1e-5), 1e-5, 1.0),
    (ja.ApproximateDP(0.0, 0.25), 0.25, 0.0),
    (ja.repeat(ja.ApproximateDP(1.0, 0.5), 2), 0.75, 2.0),
    (ja.compose(ja.ApproximateDP(1.0, 0.25), ja.PureDP(0.5)), 0.25, 1.5),
    (ja.FiniteOutput([0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25]), 0.25, math.log(2.0)),
    (ja.PureDP(0.5), 0.0, 0.5),
    (ja.repeat(ja.Laplace(2.0), 3), 0.0, 1.5),
    (ja.RandomizedResponse(0.75), 0.0, math.log(3.0)),
    (ja.compose(ja.Laplace(2.0), ja.ApproximateDP(0.25, 0.125)), 0.125, 0.75),
]


@pytest.mark.parametrize("run, delta, epsilon", FLAT, ids=lambda x: str(x)[:40])
def test_a_flat_profile_holds_no_lower_end_beyond_the_largest_loss(run, delta, epsilon):
    """delta(.) has reached the mass at infinity at the largest loss, and stays there."""
    for shift in (1e-12, 1e-9, 1e-3, 1.0, 100.0):
        low = epsilon + shift
        assert status(run, low, math.inf, delta=delta) == "refuted"
        assert status(run, low, low + 1.0, delta=delta) == "refuted"
        assert status(run, low + 1.0, low, delta=delta) == "refuted"
        assert status(run, 0.0, epsilon - shift, delta=delta) == "refuted"
    assert status(run, math.inf, math.inf, delta=delta) == "refuted"
    assert status(run, max(epsilon - 1e-12, 0.0), epsilon + 1e-12, delta=delta) == "verified"
    if epsilon == 1.0:
        assert status(run, epsilon, epsilon, delta=delta) == "verified"  # exact: the profile is flat from there on


def test_at_the_mass_at_infinity_of_an_unbounded_loss_epsilon_is_infinite():
    run = ja.compose(GAUSSIAN, ja.ApproximateDP(0.0, 0.25))
    assert status(run, math.inf, math.inf, delta=0.25) == "verified"
    assert status(run, 0.0, 1e3, delta=0.25) != "verified"
    assert status(run, math.inf, math.inf, delta=0.25 + 1e-12) == "refuted"
    assert status(GAUSSIAN, math.inf, math.inf, delta=0.0) == "verified"


def test_ends_that_cross_or_hold_nothing():
    for run in (GAUSSIAN, ja.PureDP(1.0), ja.PrivacyProfile([0.0, 1.0], [0.3, 0.0])):
        assert status(run, 2.0, 1.0, delta=1e-5) == "refuted"
        assert status(run, 0.3, 0.2, epsilon=0.5) == "refuted"
        assert status(run, math.inf, -math.inf, delta=1e-5) == "refuted"
    assert status(GAUSSIAN, 1e-9, 1.0, delta=0.9) == "refuted"  # epsilon is 0
    assert status(GAUSSIAN, -1.0, -0.5, delta=1e-5) == "refuted"
    assert status(GAUSSIAN, -1.0, 0.0, delta=0.9) == "verified"
    for lower, upper in itertools.product((math.nan, 0.0, 1.0, math.inf), repeat=2):
        if math.nan in (lower, upper) or lower != lower or upper != upper:
            assert status(GAUSSIAN, lower, upper, delta=1e-5) != "verified"
    found = ja.verify(GAUSSIAN, bracket([[2.0], [1.9]], [2.0, 1.0, 1.999]), delta=1e-5)
    assert found.status.tolist() == [["refuted", "refuted", "refuted"], ["verified", "refuted", "verified"]]


FIRST, SECOND = ([0.9, 0.1], [0.6, 0.4]), ([0.6, 0.4], [0.9, 0.1])


def hockey_stick(pairs, epsilon):
    """delta(epsilon) of independent steps, summed over all outcomes; `pairs` has the two laws of each step."""
    total = 0.0
    for outcome in itertools.product(*(range(len(p)) for p, _ in pairs)):
        p, q = (math.prod(law[k][i] for law, i in zip(pairs, outcome, strict=True)) for k in (0, 1))
        total += max(p - math.exp(epsilon) * q, 0.0)
    return total


def test_mixed_orders_of_replaced_records_count():
    """Brute force gives the largest delta over all fixed orders, and over orders that depend on the first output."""
    run, epsilon = ja.compose(ja.FiniteOutput(*FIRST), ja.FiniteOutput(*SECOND)), 0.3
    ways = list(itertools.product((FIRST, FIRST[::-1]), (SECOND, SECOND[::-1])))
    fixed = max(hockey_stick(way, epsilon) for way in ways)
    adaptive = 0.0
    for p, q in (FIRST, FIRST[::-1]):
        left = [epsilon - math.log(a / b) for a, b in zip(p, q, strict=True)]
        adaptive = max(
            adaptive,
            sum(
                a * max(hockey_stick([way], x) for way in (SECOND, SECOND[::-1])) for a, x in zip(p, left, strict=True)
            ),
        )
    assert fixed == pytest.approx(0.38353, abs=1e-5) and adaptive >= fixed
    asked = {"epsilon": epsilon, "relation": "replace_one"}
    assert status(run, 0.2, 0.28, **asked) == "refuted"
    for shift in (1e-9, 1e-4, 0.1):
        assert status(run, 0.0, fixed * (1 - shift), **asked) == "refuted"
        assert status(run, 0.0, adaptive * (1 - shift), **asked) != "verified"
    assert status(run, fixed * (1 - 1e-9), 1.0, **asked) == "verified"
    answer = ja.delta(run, epsilon, relation="replace_one")
    assert ja.verify(run, answer, **asked).status == "verified"
    # if only one step has unlike orders, the answer beside it may choose the order
    response = [0.6, 0.4]
    alone = ja.compose(ja.FiniteOutput(*FIRST), ja.RandomizedResponse(0.6))
    left = [epsilon - math.log(a / b) for a, b in zip(response, response[::-1], strict=True)]
    most = sum(
        a * max(hockey_stick([way], x) for way in (FIRST, FIRST[::-1])) for a, x in zip(response, left, strict=True)
    )
    either = max(hockey_stick([way, (response, response[::-1])], epsilon) for way in (FIRST, FIRST[::-1]))
    assert most > 1.001 * either and status(alone, 0.0, most * (1 - 1e-9), **asked) != "verified"
    assert status(alone, either * (1 - 1e-9), most * (1 + 1e-9), **asked) == "verified"


def test_many_orders_are_bounded_without_trying_them():
    run = ja.compose(*(ja.FiniteOutput([x, 1 - x], [0.2, 0.8]) for x in (0.3, 0.4, 0.6, 0.7)))
    for relation in ("replace_one", "add_or_remove_one"):
        answer = ja.delta(run, 0.5, relation=relation)
        assert ja.verify(run, answer, epsilon=0.5, relation=relation).status == "verified"
    ways = [([x, 1 - x], [0.2, 0.8]) for x in (0.3, 0.4, 0.6, 0.7)]
    common = max(hockey_stick(way, 0.5) for way in (ways, [way[::-1] for way in ways]))
    assert status(run, 0.0, common * 0.999, epsilon=0.5, relation="replace_one") == "refuted"


def test_the_pair_of_the_larger_profile_has_that_profile():
    """Random laws, some with outcomes that the other law lacks, at random epsilons, against the larger order's sum."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        p, q = (rng.dirichlet(np.full(5, 0.4)) * (rng.uniform(size=5) < 0.8) + 1e-9 for _ in range(2))
        p[rng.integers(5)], q[rng.integers(5)] = 0.0, 0.0
        p, q = p / p.sum(), q / q.sum()
        with precision(200):
            law = from_masses("pair", in_either_order(p.tolist(), q.tolist()), ball(1), "either")
            for epsilon in rng.uniform(-2.0, 4.0, 10):
                found = law.hockey_stick(ball(epsilon)) + law.infinity
                both = max(hockey_stick([(p, q)], epsilon), hockey_stick([(q, p)], epsilon))
                assert abs(float(found.mid()) - both) < 1e-12


@pytest.mark.parametrize(
    "upper", [1 - Fraction(1, 10**20), 1 - Decimal(10) ** -20, np.longdouble(1) - np.longdouble(2) ** -60, 1 + 0j]
)
def test_what_is_no_float64_is_refused(upper):
    """Epsilon is 1: a number a little below it must not be verified by the float64 beside it."""
    with pytest.raises(ja.InputError) as caught:
        ja.verify(ja.Laplace(1.0), bracket(0.0, upper), delta=0.0)
    assert "upper" in str(caught.value) and "\n" not in str(caught.value)
    assert status(ja.Laplace(1.0), 0, Fraction(1), delta=0.0) == "verified"


def test_a_delta_that_is_no_float64_is_refused():
    with pytest.raises(ja.InputError, match="delta = .* is no float64"):
        ja.verify(ja.ApproximateDP(1.0, 1e-5), bracket(0.0, 1.0), delta=Fraction(1, 10**5) - Fraction(1, 10**30))
