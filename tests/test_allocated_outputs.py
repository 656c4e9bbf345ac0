"""Random allocation of mechanisms with finitely many outputs: every assignment and every output, one by one."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct.core.validation import InputError
from jaxacct.interop import from_json, to_json


def brute_force(p, q, slots, taken, grown, direction):
    """H of (mean law over assignments, law without a record), or the reverse, by enumeration of all slots' outputs."""
    p, q = ([Fraction(float(x)) / sum(Fraction(float(y)) for y in law) for x in law] for law in (p, q))
    choices = list(itertools.combinations(range(slots), taken))
    total = Fraction(0)
    for outputs in itertools.product(range(len(p)), repeat=slots):
        nobody = math.prod(q[o] for o in outputs)
        there = sum(math.prod(p[o] if i in chosen else q[o] for i, o in enumerate(outputs)) for chosen in choices)
        there /= len(choices)
        one, other = (there, nobody) if direction == "remove" else (nobody, there)
        total += max(one - grown * other, Fraction(0))
    return float(total)


LAWS = st.integers(2, 3).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 5), min_size=n, max_size=n)] * 2))


@settings(max_examples=25)
@given(LAWS, st.integers(1, 4), st.data(), st.floats(0.0, 3.0))
def test_every_assignment_of_random_laws(laws, slots, data, epsilon):
    if not all(any(law) for law in laws):
        return
    taken = data.draw(st.integers(1, slots))
    p, q = (np.array(law) / sum(law) for law in laws)
    run = ja.RandomAllocation(ja.FiniteOutput(p, q), slots=slots, participations=taken)
    for relation, direction in (("remove_one", "remove"), ("add_one", "add")):
        exact = brute_force(p, q, slots, taken, Fraction(math.exp(epsilon)), direction)
        found = ja.delta(run, epsilon, relation=relation)
        assert found.lower <= exact * (1 + 1e-12) + 1e-15 and exact <= found.upper * (1 + 1e-12) + 1e-15
        assert found.upper - found.lower <= 1e-3 * found.upper + 1e-12 and found.kind == "certified"


def test_classes_by_their_laws():
    rare, likely = 1 / (1 + math.e**0.5), 1 / (1 + math.e**-0.5)
    for base, p, q in (
        (ja.RandomizedResponse(0.75, categories=4), [0.75, 1 / 12, 1 / 6], [1 / 12, 0.75, 1 / 6]),
        (ja.PureDP(0.5), [likely, rare], [rare, likely]),
        (ja.ApproximateDP(0.5, 0.01), [0.99 * likely, 0.99 * rare, 0.01, 0], [0.99 * rare, 0.99 * likely, 0, 0.01]),
    ):
        exact = max(brute_force(p, q, 3, 2, Fraction(math.exp(0.25)), way) for way in ("remove", "add"))
        found = ja.delta(ja.RandomAllocation(base, slots=3, participations=2), 0.25)
        assert math.isclose(found.lower, exact, rel_tol=1e-4) and math.isclose(found.upper, exact, rel_tol=1e-4)


def test_all_slots_are_a_composition_and_one_is_the_base():
    base = ja.RandomizedResponse(0.7)
    for run, same in (
        (ja.RandomAllocation(base, 6, 6), ja.repeat(base, 6)),
        (ja.RandomAllocation(base, 1), base),
        (ja.RandomAllocation(ja.PureDP(0.0), 5), ja.PureDP(0.0)),
    ):
        one, other = ja.delta(run, [0.0, 1.0], relation="remove_one"), ja.delta(same, [0.0, 1.0])
        np.testing.assert_allclose(one.upper, other.upper, rtol=1e-4, atol=1e-12)


def test_the_largest_loss_at_delta_0_and_masses_beyond_float64():
    """The largest likelihood ratio is 3: every slot has the output that a record makes likely (mass .75 (1/4)^1999)."""
    found = ja.epsilon(ja.RandomAllocation(ja.RandomizedResponse(0.75), slots=2000), 0.0, relation="remove_one")
    assert found.upper == pytest.approx(math.log(3.0), rel=1e-12) and found.lower <= found.upper
    assert ja.delta(ja.RandomAllocation(ja.RandomizedResponse(0.75), slots=2000), 0.01).status == "ok"


def test_the_smallest_losses_and_masses():
    """A mass of 1e-300 at infinity is more than 1e-310; and the largest loss of two slots is twice that of one."""
    run = ja.RandomAllocation(ja.ApproximateDP(0.0, 1e-300), slots=5)
    assert ja.epsilon(run, 1e-310).upper == np.inf
    run = ja.RandomAllocation(ja.PureDP(1e-300), slots=5, participations=2)
    assert ja.epsilon(run, 0.0).upper == pytest.approx(2e-300, rel=1e-12)


def test_batches_compositions_and_export():
    run = ja.repeat(ja.RandomAllocation(ja.PureDP([0.5, 1.0]), slots=[[10], [20]], participations=2), 5)
    found = ja.epsilon(ja.compose(run, ja.dp_sgd(2.0, 0.01, 100)), 1e-5)
    assert found.upper.shape == (2, 2) and np.all(np.diff(found.upper, axis=1) > 0) and np.all(found.ok)
    lone = ja.repeat(ja.RandomAllocation(ja.PureDP(1.0), slots=20, participations=2), 5)
    assert ja.epsilon(ja.compose(lone, ja.dp_sgd(2.0, 0.01, 100)), 1e-5).upper == found.upper[1, 1]
    assert from_json(to_json(lone)) == lone
    assert eval(lone.expression(), {"ja": ja}) == lone


def test_refusals():
    with pytest.raises(InputError, match="20,000"):
        ja.epsilon(ja.RandomAllocation(ja.RandomizedResponse(0.75, categories=3), slots=1000), 1e-5)
    with pytest.raises(InputError, match=r"slots\[1\] = 1e\+06"):
        ja.epsilon(ja.RandomAllocation(ja.PureDP(0.1), slots=[10, 10**6]), 1e-5)
    with pytest.raises(InputError, match=r"epsilon = 1e\+300"):
        ja.epsilon(ja.RandomAllocation(ja.PureDP(1e300), slots=10), 1e-5)
    with pytest.raises(InputError, match="replace_one"):
        ja.epsilon(ja.RandomAllocation(ja.PureDP(1.0), slots=10), 1e-5, relation="replace_one")
    with pytest.raises(InputError, match="group"):
        ja.RandomAllocation(ja.PureDP(1.0), slots=10, group=2)
    with pytest.raises(InputError, match="Laplace"):
        ja.RandomAllocation(ja.Laplace(1.0), slots=10)
