"""What a selection asks of its base: few questions, and narrow answers for rare samples and for little noise."""

import numpy as np
import pytest

import jaxacct as ja
from jaxacct import selection
from jaxacct.selection import base_profile, envelope
from jaxacct.selection.base_profile import bases, sides
from jaxacct.selection.envelope import profile_points, table_of
from jaxacct.selection.named_bounds import RENYI_ORDERS, _missed
from jaxacct.selection.profile_ends import by_base

RARE = ja.dp_sgd(10.0, 1e-9, 1000)
LITTLE = ja.dp_sgd(0.38, 2.9e-5, 250)


@pytest.mark.parametrize(("run", "row", "share"), [(RARE, 0, 0.9), (LITTLE, 1, 0.06)], ids=["rare", "little noise"])
def test_profiles_are_narrow(run, row, share):
    """Rare samples: the last eps was 1e-6, far beyond all losses.  Little noise: no contour bounds the added record."""
    known = bases(run, coarse=True)[0].profile
    assert np.mean(known.high[row] - known.low[row] <= 0.01 * known.high[row]) > share


@pytest.mark.parametrize("options", [{}, {"candidates": "adaptive"}, {"top": 2}], ids=["iid", "adaptive", "top"])
def test_a_delta_above_all_total_variation_asks_nothing(monkeypatch, options):
    """E[K] = 10, and delta(0) of a base is at most 5.1e-8. The answer took 12 CPU seconds."""
    monkeypatch.setattr(base_profile, "delta", None)
    chosen = selection.select(ja.dp_sgd(10.0, 1e-9, 1e6), selection.Geometric([0.1, 0.2]), **options)
    found = ja.epsilon(chosen, 1e-6)
    assert (found.upper == 0.0).all() and np.all(found.status == "zero") and np.all(found.kind == "certified")
    assert (chosen._total_variation(chosen.mechanism) > 1e-7).all()


def test_where_no_loss_lies_delta_is_the_chance_of_a_hit():
    """With noise .01 every loss is below .02 or above 600. Between these eps delta is the same."""
    known = bases(ja.dp_sgd(0.01, 0.001, 10), coarse=True)[0].profile
    flat = (known.eps > 0.02) & (known.eps < 600.0)
    truth = -np.expm1(10 * np.log1p(-0.001))
    assert np.all((known.low[0, flat] <= truth) & (truth <= known.high[0, flat]))
    assert np.all(known.high[0, flat] - known.low[0, flat] <= 1e-9 * truth)


def test_a_bound_from_below_holds_at_every_smaller_eps():
    """No contour bounds delta from below at some of these eps, but one does at larger eps."""
    low = bases(LITTLE, coarse=True)[0].profile.low
    assert np.all(np.diff(low, axis=1) <= 0.0)


def test_a_base_with_a_mass_at_infinity_shares_contours(monkeypatch):
    """Each of its 1,280 eps had a contour of its own: a selection took 91 CPU seconds."""
    asked, real = [], base_profile.delta
    monkeypatch.setattr(
        base_profile, "delta", lambda run, at, **rest: asked.append(np.size(at)) or real(run, at, **rest)
    )
    run = ja.compose(ja.dp_sgd(1.0, 0.05, 50), ja.ApproximateDP(0.1, 1e-7))
    known = bases(run, coarse=True)[0].profile
    assert sum(asked) < 100 and np.mean(known.high - known.low <= 1e-3 * known.high) > 0.7
    for row, relation in enumerate(("remove_one", "add_one")):
        exact = real(run, known.eps[5:320:45], relation=relation)
        low, high = known.low[row, 5:320:45], known.high[row, 5:320:45]
        assert np.all((low <= np.asarray(exact.upper)) & (np.asarray(exact.lower) <= high))
        assert np.all(low[low > 0.0] >= 1e-7 * (1.0 - 1e-12))


def test_laws_of_k_share_what_lies_beyond_a_profile(monkeypatch):
    """Each law of K asked for 128 epsilons of its own: a search over laws took over 20 CPU seconds."""
    asked, real = [], envelope.upper_delta
    monkeypatch.setattr(envelope, "upper_delta", lambda run, eps, *rest: asked.append(eps) or real(run, eps, *rest))
    run = ja.dp_sgd(1.0, 0.05, 50)
    side, known = sides(run, "add_or_remove_one")[0], []
    for level in (3e-40, 4e-40, 5e-40):
        known.append(profile_points(run, level, side))
        assert np.all(known[-1][1][-1] <= level)
    assert len(asked) == 1
    eps = np.log(known[0][0][-60::20])
    assert np.all(ja.delta(run, eps, relation=side.forward).lower <= known[0][1][-60::20])


@pytest.mark.slow  # a run takes 10 CPU seconds
@pytest.mark.parametrize("run", [RARE, LITTLE], ids=["rare samples", "little noise"])
def test_points_beyond_the_profile_lie_above_it(run):
    side = sides(run, "add_or_remove_one")[1]
    table, _ = table_of(*profile_points(run, 1e-40, side))
    assert table.delta[-1] <= 1.1e-40
    eps = np.linspace(0.0, np.log(table.ratio[-1]), 7)[1:]
    assert np.all(table.about(eps)[0] >= np.asarray(ja.delta(run, eps, relation=side.forward).lower))


def test_chords_are_above_the_deltas_that_a_renyi_bound_misses():
    run, orders = ja.dp_sgd([2.0, 4.0], 0.01, 10), RENYI_ORDERS[::8, None]
    found = _missed(run, orders, "add_one")
    exact = ja.delta(run, np.log1p(1.0 / (orders - 1.0)), relation="add_one")
    assert found.shape == (31, 2) and np.all(np.diff(found, axis=0) >= 0.0)
    assert np.all(found >= np.asarray(exact.lower))
    np.testing.assert_allclose(found[::8], np.asarray(exact.upper)[::8], rtol=1e-3, atol=1e-12)


def test_a_second_law_asks_about_its_own_levels_alone(monkeypatch):
    asked, real = [], base_profile._asked
    monkeypatch.setattr(base_profile, "_asked", lambda *given: asked.append(given[0]) or real(*given))
    for seen, law in enumerate((selection.Geometric(0.1), selection.Geometric(0.2))):
        by_base("epsilon", ja.dp_sgd(2.0, 0.02, 37), law, np.asarray(1e-6), "add_or_remove_one")
        assert asked.count("delta") == 2 and asked.count("epsilon") == 2 + 2 * (
            seen + 1
        )  # at the target, and at target/E[K]
