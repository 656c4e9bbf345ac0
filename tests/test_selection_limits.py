"""The ends of a selection's profile: largest losses and mass at infinity, by closed forms and by all score orders."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import refusal
from selection_cases import hockey_stick

import jaxacct as ja
from jaxacct import selection
from jaxacct.mechanisms.base import register
from jaxacct.selection import profile_ends
from jaxacct.selection.profile_ends import log_ratio_at_knots
from jaxacct.selection.worst_case import known_bases

LAWS = [
    selection.Geometric(0.1),
    selection.TruncatedNegativeBinomial(-0.5, 0.05),
    selection.Poisson(3.0),
    selection.Binomial(8, 0.4),
    selection.PointMass(3),
    selection.Categorical([0.1, 0.2, 0.0, 0.3, 0.4]),
    selection.Categorical([0.0, 0.0, 0.5, 0.0, 0.5]),
]


def ends(run, law, delta, relation="add_or_remove_one"):
    """(lower, upper) of epsilon at delta by the limits alone."""
    shape = np.broadcast_shapes(np.shape(delta), law.shape)
    nothing = np.stack([np.zeros(shape), np.full(shape, np.inf)])
    return profile_ends.narrowed(
        "epsilon", run, law, np.asarray(delta), relation, nothing, np.ones(np.broadcast_shapes(shape), bool)
    )


def orders(p, law):
    """An array (orders, outcomes): the law of the output under each order, with the outcomes in the order of `p`."""
    index = np.array(list(itertools.permutations(range(p.size))))
    back = np.argsort(index, axis=1)
    return np.take_along_axis(selection.output_law(p[index], law)[:, 1:], back, axis=1)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_no_order_has_a_larger_loss_and_a_fine_split_nearly_that(law):
    rng = np.random.default_rng(3)
    for p, q in (rng.dirichlet(np.full(3, 1.5), 2) for _ in range(4)):
        low, high = ends(ja.FiniteOutput(p, q), law, 0.0, "remove_one")
        top = np.argmax(p / q)
        share = np.array([1e-6, 0.05, 0.2, 0.75 - 1e-6])  # shares of the most revealing outcome, split at random
        fine = [np.concatenate([np.delete(x, top), x[top] * share]) for x in (p, q)]
        losses = np.log(orders(fine[0], law) / orders(fine[1], law))
        # with K = 3 the rarest output has 1e-17 of the mass, so that losses are known to about 1e-8
        assert losses.max() <= high + 1e-8 and high <= low * (1 + 2e-4)
        knots = not isinstance(law, selection.Categorical) and law != selection.PointMass(3)
        if knots:  # phi'(a + b v)/phi'(v) is monotone in v, so the largest loss is at a knot, and an order attains it
            assert losses.max() == pytest.approx(float(high), abs=2e-5)


def test_closed_forms_of_randomised_response():
    p = 0.75
    run, loss, reached, v = ja.RandomizedResponse(p), np.log(3.0), p, 1 - p
    for eta, gamma in ((1.0, 0.1), (0.5, 1e-3), (-0.5, 0.05), (0.0, 0.02)):
        ratio = (gamma + (1 - gamma) * (1 - v)) / (gamma + (1 - gamma) * (1 - reached))
        law = selection.TruncatedNegativeBinomial(eta, gamma)
        low, high = ends(run, law, 0.0)
        truth = loss + (eta + 1) * np.log(ratio)
        assert low <= truth <= high <= truth + 1e-4 and high <= (eta + 2) * loss
    low, high = ends(run, selection.Poisson(4.0), 0.0)
    assert low <= loss + 4.0 * (reached - v) <= high <= loss + 4.0 * (reached - v) + 1e-6
    low, high = ends(run, selection.PointMass(5), [0.0, 1e-30])
    assert (low <= 5 * loss).all() and (5 * loss <= high).all() and (high <= 5 * loss + 1e-6).all()


@pytest.mark.parametrize(
    ("run", "loss"), [pytest.param(ja.Laplace(2.0), 0.5, marks=pytest.mark.slow), (ja.PureDP(0.6), 0.6)], ids=repr
)
def test_bounded_losses_of_other_bases(run, loss):
    law = selection.TruncatedNegativeBinomial(1.0, 1e-3)
    low, high = ends(run, law, 1e-40)
    assert 2.5 * loss <= low <= high <= 3 * loss
    low, high = ends(ja.Gaussian(1.0), law, 1e-40)
    assert low == 0.0 and np.isinf(high)


@pytest.mark.parametrize("law", LAWS[:6], ids=repr)
def test_mass_at_infinity_is_that_of_the_outcomes_on_top(law):
    p, q = np.array([0.5, 0.3, 0.2 - 1e-3, 1e-3]), np.array([0.2, 0.3, 0.5, 0.0])
    on_top = selection.output_law(p, law)[-1]
    low, high = ends(ja.FiniteOutput(p, q), law, on_top * np.array([1 - 1e-6, 1 + 1e-6]), "remove_one")
    assert np.isinf(low[0]) and np.isinf(high[0]) and np.isfinite(high[1])
    reached = max(
        hockey_stick(selection.output_law(p[i], law), selection.output_law(q[i], law), high[1])
        for i in np.array(list(itertools.permutations(range(4))))
    )
    assert reached <= on_top * (1 + 1e-6)
    low, high = ends(ja.FiniteOutput(p, q), law, 0.0, "add_one")
    assert low <= high < np.inf


@pytest.mark.parametrize("run", [ja.Laplace(2.0), ja.RandomizedResponse(0.7)], ids=repr)
def test_a_symmetric_base_has_the_same_largest_loss_in_every_direction(run):
    both, *single = (ends(run, LAWS[0], [0.0], name) for name in ("add_or_remove_one", "remove_one", "add_one"))
    assert np.all(both[1] > 0.0) and all(np.array_equal(one, both) for one in single)


@pytest.mark.slow
@pytest.mark.parametrize("run", [ja.Laplace(2.0), ja.Gaussian(2.0), ja.RandomizedResponse(0.7)], ids=repr)
def test_a_symmetric_base_leaks_alike_in_every_direction_at_the_ends_too(run):
    """At tiny delta and at large eps, limits of the profile replace the curve.  The directions agree there too."""
    chosen = selection.select(run, selection.Geometric(0.1))
    for ask, values in ((ja.epsilon, [1e-3, 1e-10, 1e-20, 1e-40]), (ja.delta, [0.5, 3.0, 8.0, 30.0])):
        both, *single = (ask(chosen, values, relation=r) for r in ("add_or_remove_one", "remove_one", "add_one"))
        for one in single:
            np.testing.assert_array_equal(one.upper, both.upper)
            np.testing.assert_array_equal(one.lower, both.lower)
        assert both.upper[0] > 0.0


def test_deltas_on_both_sides_of_the_mass_at_infinity_in_one_batch():
    """The smallest delta of the batch decides where the table of eps ends for all its deltas."""
    run, delta = ja.compose(ja.Gaussian(1.0), ja.ApproximateDP(0.3, 1e-3)), [0.1, 1e-2, 1e-3, 1e-40]
    b = selection.bound_epsilon(run, selection.PointMass(1), delta, bound="envelope")
    alone = ja.epsilon(run, [0.1, 1e-2])
    assert np.all(b.upper[:2] >= alone.lower) and np.all(np.isfinite(b.upper[:2]))
    assert np.all(np.isinf(b.upper[2:]))


@pytest.mark.slow
def test_a_selection_says_where_mass_at_infinity_is_all_there_is():
    run = ja.compose(ja.Gaussian(1.0), ja.ApproximateDP(0.3, 1e-3))
    b = ja.epsilon(selection.select(run, selection.PointMass(1)), [0.1, 1e-2, 1e-3, 1e-40])
    assert np.all(np.isfinite(b.upper[:2])) and np.all(np.isinf(b.upper[2:])) and b.status[3] == "mass_at_infinity"


@pytest.mark.slow
def test_selections_of_bounded_loss_at_tiny_delta_and_none():
    law = selection.Geometric(0.1)
    run = ja.ApproximateDP([[0.7], [0.5]], [[0.0], [1e-6]])
    b = ja.epsilon(selection.select(run, law), [0.0, 1e-100, 0.9e-5])
    assert set(b.status[0]) == {"ok"} and set(b.kind[0]) == {"certified"} and (b.upper[0] <= 2.1).all()
    assert (np.diff(b.upper[0]) <= 1e-9).all() and (b.lower[0] > 1.8).all()
    assert set(b.status[1]) == {"mass_at_infinity"} and np.isinf(b.lower[1]).all()
    ends = profile_ends.narrowed("delta", ja.PureDP(0.7), law, 2.1, "add_one", np.array([0.0, 1.0]), np.array(True))
    assert (ends == 0.0).all()
    assert "delta[1] = 0" in refusal(
        ja.epsilon, selection.select(ja.Gaussian(1.0), selection.Geometric(0.1)), [1e-5, 0.0]
    )


def test_of_a_law_that_is_not_known_the_knots_decide_nothing():
    """Where the ratio is not proved monotone between knots, as for a user's own law, the bound by knots is infinite."""

    @register
    @dataclass(frozen=True, eq=False)
    class Own(selection.Poisson):
        """A user's class: its law of K may have another formula than its base class."""

    (base,) = known_bases(ja.FiniteOutput([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))
    above = base.curves["remove"].above
    assert np.isfinite(log_ratio_at_knots(above, selection.Poisson(3.0), 0.0))
    for law in (Own(3.0), selection.Categorical([0.5, 0.5])):
        assert log_ratio_at_knots(above, law, 0.0) == np.inf
