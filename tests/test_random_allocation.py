"""Random allocation in rounds: table values, closed forms, Monte Carlo, monotonicity, kinds, batches, refusals."""

import pickle
import warnings

import jax
import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from jaxacct import selection
from jaxacct.accounting import account
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import components, random_allocation
from jaxacct.mechanisms.profile import BracketedProfile, direction_of, pair_above, pair_below

# (sigma, t, rounds, delta, lower, upper). Other code made pairs by float64 contours and composed them. The ends are
# moved outward by 1e-9.
TABLE = [
    (2.0, 100, 2, 1e-5, 0.251893167, 0.251953147),
    (2.0, 100, 100, 1e-5, 2.14051742, 2.14103131),
    (2.0, 100, 10, 1e-8, 0.855591202, 0.855790616),
    (2.0, 20, 2, 1e-5, 0.609860855, 0.610121281),
    (2.0, 20, 10, 1e-5, 1.4593105, 1.45997171),
    (2.0, 20, 2, 1e-10, 1.03126495, 1.03276592),
]
SLOW = [
    (1.0, 100, 10, 1e-5, 1.70120059, 1.70202435),
    (1.0, 100, 100, 1e-5, 6.04254771, 6.04545468),
    (1.0, 1000, 2, 1e-6, 0.237886954, 0.238042397),
    (1.0, 1000, 10, 1e-6, 0.539968568, 0.540208812),
]
# the same columns, where one large slot decides; the ends come from a single pass with fewer losses
ONE_SLOT = [
    (0.586, 3644, 100, 1e-6, 3.69997675, 3.70374041),
    (0.68, 12_000, 100, 1e-10, 2.0578289, 2.06089639),
    (0.88, 67, 2, 1e-6, 1.93452403, 1.93728898),
]
# (t, k, delta(1.5)) at sigma = 1, by Monte Carlo of the law with all slots
PARTICIPATIONS = [(4, 2, 0.0766), (5, 2, 0.0548), (6, 3, 0.148), (3, 2, 0.113)]


REVEALED = [({"participations": 3.0}, np.sqrt(3.0)), ({"group": 12}, 12.0), ({}, 1.0)]


def allocation(sigma=2.0, slots=100, rounds=1, **more):
    return ja.repeat(ja.RandomAllocation(ja.Gaussian(sigma), slots, **more), rounds)


def gaussian_delta(mu, eps):
    return stats.norm.cdf(0.5 * mu - eps / mu) - np.exp(eps) * stats.norm.cdf(-0.5 * mu - eps / mu)


@pytest.mark.parametrize("row", [*TABLE, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)], ids=str)
def test_table(row):
    sigma, t, rounds, delta, low, high = row
    found = ja.epsilon(allocation(sigma, t, rounds), delta)
    assert found.kind == "certified" and found.lower <= high and found.upper >= low
    assert found.upper - found.lower <= (1e-3 if rounds >= 100 else 2.5e-3) * found.upper
    back = ja.delta(allocation(sigma, t, rounds), 0.5 * (low + high))
    assert back.lower <= 1.1 * delta and back.upper >= 0.9 * delta


@pytest.mark.parametrize("relation", ["remove_one", "add_one"])
def test_what_rounding_takes_from_the_pair_below_keeps_no_place_far_from_the_rest(relation):
    found = ja.delta(allocation(1.3170539360488889, 8, 3), [0.0, 0.1], relation=relation)
    assert np.all(found.upper - found.lower < 1e-3 * found.upper) and np.all(found.status == "ok")


def test_one_slot_is_the_base_under_a_replaced_record():
    base = ja.epsilon(ja.Gaussian(3.0), 1e-5, relation="replace_one")
    for one in (ja.RandomAllocation(ja.Gaussian(3.0), 1), ja.BallsInBins(ja.Gaussian(6.0), 1, 4)):
        found = ja.epsilon(one, 1e-5, relation="replace_one")
        assert found.kind == "certified" and found.lower <= base.upper and base.lower <= found.upper
        assert found.upper <= base.upper * (1.0 + 1e-5) and found.status == "ok"


@pytest.mark.parametrize("sigma", [*(pytest.param(x, marks=pytest.mark.slow) for x in (1e20, 1e154)), 1e308])
def test_rounds_of_hardly_any_loss_have_an_upper_end(sigma):
    found = ja.epsilon(allocation(sigma, 3, 10), 1e-9)
    assert found.lower == 0.0 <= found.upper <= ja.epsilon(ja.repeat(ja.Gaussian(sigma), 10), 1e-9).upper + 1e-3


def test_a_single_round_of_pairs_holds_the_engine_for_one_round():
    one = ja.RandomAllocation(ja.Gaussian(2.0), 100)
    exact = ja.epsilon(one, 1e-5, relation="remove_one")
    pairs = ja.epsilon(ja.repeat(one, 1), 1e-5, relation="remove_one", engine="lattice", rtol=1e-2)
    assert (exact.engine, pairs.engine) == ("allocation", "lattice")
    assert pairs.lower <= exact.upper and exact.lower <= pairs.upper


def test_rows_of_one_round_are_asked_of_the_engine_for_one_round():
    one = ja.RandomAllocation(ja.Gaussian(np.array([[2.0], [3.0]])), 100)
    twice = ja.repeat(ja.repeat(one, 1), np.array([1.0, 2.0]))
    for ask, at in ((ja.epsilon, 1e-5), (ja.delta, 0.1)):
        alone, found = ask(one, at), ask(twice, at)
        np.testing.assert_array_equal(found.upper[:, 0], alone.upper[:, 0])
        np.testing.assert_array_equal(found.lower[:, 0], alone.lower[:, 0])
        assert np.all(found.engine == [["allocation", "lattice"]] * 2) and np.all(found.kind == "certified")
    np.testing.assert_array_equal(found.upper[:, 1], ja.delta(ja.repeat(one, 2), 0.1).upper[:, 0])
    assert ja.delta(ja.repeat(one, 1), 0.1).engine.tolist() == [["allocation"], ["allocation"]]
    with pytest.raises(InputError, match="= 0 must be > 0"):
        ja.epsilon(twice, 0.0)


@pytest.mark.slow  # `test_relations` has a run of equal rounds
def test_rows_of_one_round_are_a_bound_where_a_record_is_replaced():
    few = ja.repeat(ja.RandomAllocation(ja.Gaussian(2.0), 4), np.array([1.0, 2.0]))
    assert ja.epsilon(few, 1e-5, relation="replace_one").kind[0] == "bound"


@pytest.mark.parametrize("mu", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-4])
def test_pairs_of_a_known_profile_lie_on_its_two_sides(mu, noise):
    eps = mu * np.linspace(0.0, 0.5 * mu + 9.0, 90)
    exact = gaussian_delta(mu, eps)
    exact = np.maximum(exact, 0.0)
    known = BracketedProfile(eps, np.maximum(exact * (1.0 - noise) - 1e-13, 0.0), exact * (1.0 + noise) + 1e-13)
    at = np.linspace(0.0, eps[-1], 1001)
    truth = gaussian_delta(mu, at)
    for direction in ("remove", "add"):
        part = direction_of(pair_below(known, known), direction)
        gain = np.maximum(-np.expm1(np.minimum(at[:, None] - part.loss, 0.0)), 0.0)
        below = gain @ part.mass
        assert abs(part.mass.sum() - 1.0) < 1e-12
        assert np.all(below <= truth + 1e-14) and np.max(truth - below) < 0.02
    above = pair_above(known, known)
    gain = np.maximum(-np.expm1(np.minimum(at[:, None] - above.loss, 0.0)), 0.0)
    assert np.all(gain @ above.p + above.p_infinity >= truth - 1e-14)


def test_one_slot_is_the_base_and_all_slots_are_plain_releases():
    rounds = ja.epsilon(allocation(2.0, 1, 20), 1e-5)
    plain = ja.epsilon(ja.Gaussian(2.0 / np.sqrt(20.0)), 1e-5)
    assert rounds.kind == "certified" and rounds.upper == pytest.approx(plain.upper, rel=1e-12)
    every = ja.RandomAllocation(ja.Gaussian(2.0), 20, participations=20)
    assert every.kind == "certified" and every.symmetric()
    assert ja.epsilon(every, 1e-5).upper == pytest.approx(plain.upper, rel=1e-12)
    assert ja.epsilon(every, 1e-5, relation="replace_one").upper == pytest.approx(
        ja.epsilon(ja.Gaussian(1.0 / np.sqrt(20.0)), 1e-5).upper, rel=1e-12
    )


@pytest.mark.parametrize("row", [PARTICIPATIONS[3], pytest.param(PARTICIPATIONS[0], marks=pytest.mark.slow)], ids=str)
def test_some_of_the_slots_are_bounded_by_blocks(row):
    t, k, monte_carlo = row
    found = ja.delta(ja.RandomAllocation(ja.Gaussian(1.0), t, participations=k), 1.5)
    assert found.kind == "bound" and found.lower == 0.0 and monte_carlo < found.upper < 1.25 * monte_carlo


@pytest.mark.parametrize(
    "other",
    [ja.Laplace(3.0), pytest.param(ja.dp_sgd(1.0, 0.01, 10), marks=pytest.mark.slow)],
    ids=["laplace", "poisson"],
)
def test_composition_in_both_orders_lies_between_what_it_must(other):
    rounds = allocation(2.0, 100, 10)
    one, two = ja.epsilon(ja.compose(rounds, other), 1e-5), ja.epsilon(ja.compose(other, rounds), 1e-5)
    assert one.kind == "certified" and one.lower == two.lower and one.upper == two.upper
    alone = ja.epsilon(rounds, 1e-5)
    assert one.upper > alone.lower
    assert one.lower < ja.epsilon(rounds, 0.5e-5).upper + ja.epsilon(other, 0.5e-5).upper


def test_brackets_are_monotone_in_rounds_noise_and_slots():
    more_rounds = ja.epsilon(allocation(2.0, 100, [2, 10, 100]), 1e-5)
    assert np.all(more_rounds.lower[1:] > more_rounds.upper[:-1])
    assert ja.epsilon(allocation(3.0, 100, 10), 1e-5).upper < more_rounds.lower[1]
    assert ja.epsilon(allocation(2.0, 20, 10), 1e-5).lower > more_rounds.upper[1]
    assert more_rounds.upper[2] < ja.epsilon(ja.repeat(ja.Gaussian(2.0), 100), 1e-5).lower


def test_a_batch_is_its_elements():
    batch = ja.repeat(ja.RandomAllocation(ja.Gaussian([[2.0], [3.0]]), [1, 20, 100]), 10)
    found = ja.epsilon(batch, 1e-5)
    assert found.upper.shape == (2, 3) and np.all(found.kind == "certified")
    for index in ((0, 0), (0, 1), (0, 2), (1, 2)):
        one = ja.epsilon(allocation([2.0, 3.0][index[0]], [1, 20, 100][index[1]], 10), 1e-5)
        assert found.upper[index] == pytest.approx(one.upper, rel=1e-9)
        assert found.lower[index] == pytest.approx(one.lower, rel=1e-9)


def test_relations():
    run = allocation(2.0, 100, 10)
    both, remove, add, zero = (
        ja.epsilon(run, 1e-5, relation=name) for name in ("add_or_remove_one", "remove_one", "add_one", "zero_out")
    )
    assert both.upper == zero.upper == max(remove.upper, add.upper) and remove.upper > add.upper
    replaced = ja.epsilon(run, 1e-5, relation="replace_one")
    assert replaced.kind == "bound" and replaced.lower == 0.0
    assert 1.5 * both.upper < replaced.upper < ja.epsilon(run, 1e-6).upper * 2.0
    delta = ja.delta(run, np.array([replaced.upper, 1.0]), relation="replace_one")
    assert np.all(delta.kind == "bound") and delta.upper[0] < 1.2e-5
    # each split of epsilon = 1 into x and 1 - x gives a bound; the answer is at most the bounds of these three splits
    x = np.array([0.25, 0.5, 0.75])
    removed, added = ja.delta(run, x, relation="remove_one"), ja.delta(run, 1.0 - x, relation="add_one")
    split = removed.upper + np.exp(x) * added.upper
    assert np.all(delta.upper[1] <= split * (1.0 + 1e-9))


def test_kinds_and_what_takes_the_dominating_pair_alone():
    run = allocation(2.0, 100, 10)
    assert run.kind == "certified" and run.kind_under("add_or_remove_one") == "bound"
    assert ja.compose(run, ja.MixtureOfGaussians(1.0, [0.0, 1.0], [0.5, 0.5])).kind == "certified"
    assert ja.compose(run, ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.1, 50, 9)).kind == "bound"
    assert ja.compose(run, ja.Gaussian(1.0)).kind == "certified"
    assert allocation(2.0, 100, 10, participations=2).kind == "bound"
    assert str(ja.profile(run).renyi(2.0).kind) == "bound"


@pytest.mark.slow  # the test above has other questions that use only the dominating pair
def test_a_selection_of_rounds_is_a_bound(coarse_pairs):
    run = allocation(2.0, 100, 10)
    chosen = ja.epsilon(selection.select(run, selection.Geometric(0.5)), 1e-5)
    assert chosen.kind == "bound" and chosen.lower == 0.0 and chosen.upper > ja.epsilon(run, 1e-5).lower


def test_pair_below_has_no_mass_at_infinity_and_the_one_above_a_little():
    run = allocation(2.0, 100, 10)
    above, below = (components(run, "add_or_remove_one", "remove", below=below) for below in (False, True))
    assert 0.0 < above.delta_infinity[0] < 1e-25 and below.delta_infinity[0] == 0.0
    tiny = ja.epsilon(run, 1e-40)  # less than `above.delta_infinity`: asked again with losses farther away
    assert 0.0 < tiny.lower < tiny.upper < ja.epsilon(ja.Gaussian(2.0 / np.sqrt(10.0)), 1e-40).lower
    assert tiny.status == "width"
    none = ja.epsilon(run, 1e-305)
    assert none.upper == np.inf and np.isfinite(none.lower) and none.status == "width"


def test_readings_of_the_profile_hold_the_gaussian_shape():
    run = ja.profile(allocation(2.0, 20))
    rate, advantage = run.true_positive_rate(0.01), run.advantage()
    assert rate.kind == advantage.kind == "certified"
    assert 0.01 < rate.lower <= rate.upper < 0.5 and rate.upper - rate.lower < 1e-4
    assert advantage.lower >= rate.lower - 0.01 and advantage.upper - advantage.lower < 1e-6  # delta at eps = 0 alone


@pytest.mark.slow  # the test above reads the same profile; other tests check `gdp_mu`
def test_mu_of_a_round_is_near_that_of_a_gaussian():
    mu = ja.profile(allocation(2.0, 20)).gdp_mu(1e-2)
    # one round is near a Gaussian of mu^2 = (e^(1/4) - 1)/20 at a small loss
    assert mu.lower <= mu.upper < 1.6 * np.sqrt(np.expm1(0.25) / 20.0) < 2.0 * mu.upper


def test_groups():
    alone = ja.epsilon(allocation(2.0, 100, 10), 1e-5)
    two, three = (ja.epsilon(allocation(2.0, 100, 10, group=g), 1e-5) for g in (2, 3))
    assert two.kind == "bound" and two.lower == 0.0
    # At first order, two independent records cost twice as much as one record. Two records in one bin, which halves
    # the noise, would cost more than `two`.
    assert 1.9 * alone.lower < two.upper < three.upper
    assert ja.epsilon(allocation(2.0, 1, 10, group=2), 1e-5).upper == pytest.approx(
        ja.epsilon(ja.repeat(ja.Gaussian(1.0), 10), 1e-5).upper, rel=1e-12
    )


@pytest.mark.parametrize(
    ("kind", "of"),
    # the slow cases reveal the k slots of one record, or the slots of g records
    [(kind, of) if of == 1.0 else pytest.param(kind, of, marks=pytest.mark.slow) for kind, of in REVEALED],
    ids=["participations", "group", "alone"],
)
@pytest.mark.parametrize("sigma", [0.01, pytest.param(0.2, marks=pytest.mark.slow)])
def test_no_round_costs_more_than_its_slots_revealed(sigma, kind, of):
    """Revealed slots give a Gaussian of noise sigma/g for g records in one slot, of sigma/sqrt(k) for k slots."""
    found = ja.epsilon(ja.repeat(ja.RandomAllocation(ja.Gaussian(sigma), 5, **kind), 2), 1e-5)
    revealed = ja.epsilon(ja.repeat(ja.Gaussian(sigma / of), 2), 1e-5).upper
    assert found.upper <= 1.01 * revealed and found.status in ("ok", "width")


def test_a_group_of_two_is_above_two_records_in_independent_bins():
    """dP/dQ = (S_1^2 - (1 - e^{-s^2}) S_2)/t^2 for two records, by sampling under Q."""
    sigma, t, eps = 2.0, 20, 0.5
    s = 1.0 / sigma
    x = np.exp(s * np.random.default_rng(3).normal(size=(200_000, t)) - 0.5 * s * s)
    ratio = (x.sum(axis=1) ** 2 + np.expm1(-s * s) * np.sum(x * x, axis=1)) / t**2
    gain = np.maximum(ratio - np.exp(eps), 0.0)
    low = gain.mean() - 4.0 * gain.std() / np.sqrt(gain.size)
    assert abs(ratio.mean() - 1.0) < 0.01
    found = ja.delta(allocation(sigma, t, 1, group=2), eps).upper
    assert low < found < 2.0 * gain.mean()


def test_the_same_bins_in_every_epoch():
    with pytest.warns(UserWarning, match="five times less"):
        kept = ja.BallsInBins(ja.Gaussian(2.0), 20, 4)
    one = ja.epsilon(ja.RandomAllocation(ja.Gaussian(1.0), 20), 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning comes only when the mechanism is made
        found = ja.epsilon(kept, 1e-5)
        twice = ja.epsilon(ja.repeat(kept, 2), 1e-5, rtol=1e-2)
    assert found.kind == "certified" and found.upper == pytest.approx(one.upper, rel=1e-7)
    assert found.lower <= one.upper and one.lower <= found.upper
    again = ja.epsilon(allocation(1.0, 20, 2), 1e-5, rtol=1e-2)
    assert twice.lower <= again.upper and again.lower <= twice.upper
    assert found.lower > 1.5 * ja.epsilon(allocation(2.0, 20, 4), 1e-5).upper


def test_calibration_of_rounds():
    rounds = ja.calibrate(
        lambda n: allocation(2.0, 100, n), target_epsilon=1.0, target_delta=1e-5, bracket=(1, 1000), whole=True
    )
    assert rounds.epsilon.upper <= 1.0 < ja.epsilon(allocation(2.0, 100, rounds.value + 1), 1e-5).upper


@pytest.mark.slow  # every noise multiplier that is tried needs a profile of its own
def test_calibration_of_noise():
    noise = ja.calibrate(
        lambda s: allocation(s, 20, 10), target_epsilon=1.2, target_delta=1e-5, bracket=(2.0, 3.0), rtol=1e-2
    )
    assert noise.status == "ok" and 1.18 < noise.epsilon.upper <= 1.2


@pytest.mark.slow  # as above
def test_gradient_is_a_difference():
    run = allocation(2.0, 20, 10)
    slope = float(ja.epsilon_gradient(run, 1e-5).mechanism.mechanism.noise_multiplier)
    ends = [float(ja.epsilon(allocation(s, 20, 10), 1e-5).estimate) for s in (1.98, 2.02)]
    assert slope == pytest.approx((ends[1] - ends[0]) / 0.04, rel=2e-2)


def test_pytrees():
    one = ja.RandomAllocation(ja.Gaussian([1.0, 2.0]), 10)
    leaves, structure = jax.tree.flatten(one)
    assert len(leaves) == 4 and jax.tree.unflatten(structure, leaves) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert jax.jit(lambda m: m.mechanism.noise_multiplier.sum())(one) == 3.0
    assert one.expression().startswith("ja.RandomAllocation(")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ja.RandomAllocation(ja.Laplace(1.0), 10), "RandomAllocation of Laplace"),
        (lambda: ja.RandomAllocation(ja.Gaussian(1.0), 0), "slots = 0"),
        (lambda: ja.RandomAllocation(ja.Gaussian(1.0), 2.5), "slots = 2.5"),
        (lambda: ja.RandomAllocation(ja.Gaussian(1.0), [3, 2], 3), r"participations\[1\] = 3"),
        (lambda: ja.RandomAllocation(ja.Gaussian(1.0), 5, 2, group=2), "group = 2"),
        (lambda: ja.epsilon(allocation(2.0, 100, 10), 0.0), "delta = 0"),
        (lambda: ja.epsilon(allocation(2.0, 100, 10), 0.0, relation="replace_one"), "delta = 0"),
        (lambda: ja.profile(allocation(2.0, 100, 10), "replace_one").renyi(2.0), "replace_one"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_ends_that_contradict_each_other_claim_nothing(monkeypatch):
    """To imitate a defect, the pair below is taken from another mechanism, which is less private."""
    run = allocation(2.0, 100, 10)
    worse = ja.RandomAllocation(ja.Gaussian(2.0), 90)
    monkeypatch.setattr(ja.RandomAllocation, "expand_below", lambda self, *asked: worse._parts(*asked, True))
    found = ja.epsilon(run, 1e-5)
    assert found.status == "contradiction" and found.upper == np.inf and found.lower == 0.0


def fails(*given):
    raise RuntimeError("out of it")


@pytest.mark.parametrize(
    ("failing", "sigma", "is_finite"),
    [
        ("round_profiles", 2.0625, True),
        ("pair_below", 2.0626, True),
        ("profile_of_gaussian", 2.0627, False),
        ("pair_above", 2.0628, False),
    ],
)
def test_a_round_whose_pairs_fail_leaves_the_others(failing, sigma, is_finite, monkeypatch):
    """The failed round's upper end is at most that of the Gaussian that reveals the slot, or it is infinite."""
    batch = allocation([sigma, 2.125], 20, 10)  # no other test caches the pairs of this sigma
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="out of it"):
        ja.epsilon(allocation(2.125, 20, 10), 1e-5)
        patch.setattr(random_allocation, failing, fails)
        found = ja.epsilon(batch, 1e-5)
    expected = ja.epsilon(batch, 1e-5)  # a failure is not cached
    told = ja.epsilon(ja.repeat(ja.Gaussian(sigma), 10), 1e-5).upper
    assert found.upper[1] == expected.upper[1] and found.status.tolist() == ["width", "ok"]
    assert found.lower[0] <= expected.upper[0] and expected.lower[0] <= found.upper[0]
    assert found.upper[0] <= (told * (1.0 + 1e-3) if is_finite else np.inf) and expected.status[0] == "ok"


@pytest.mark.slow  # the quick `test_only_the_wide_rows_of_a_batch_are_asked_again` has the first row
@pytest.mark.parametrize(("sigma", "slots", "rounds", "delta", "lower", "upper"), ONE_SLOT)
def test_rounds_where_one_slot_decides_are_asked_again_with_more_losses(sigma, slots, rounds, delta, lower, upper):
    run = allocation(sigma, slots, rounds)
    found = ja.epsilon(run, delta)
    assert found.status == "ok" and found.upper - found.lower <= 1e-3 * found.upper
    assert found.lower <= upper and lower <= found.upper
    again = ja.epsilon(run, delta)  # no call starts from the bracket of an earlier one
    assert (again.lower, again.upper) == (found.lower, found.upper)


def test_a_first_lattice_that_says_nothing_is_no_reason_to_stop():
    """The first two lattices gave relative widths of nearly 1, such as 1 - 2e-5 and .93. The next one gives .002."""
    rounds = ja.repeat(ja.RandomAllocation(ja.Gaussian(1.0), 100_000), 100)
    found = ja.delta(rounds, np.array([0.2, 0.27]))
    assert np.all(found.status == "ok") and np.all(found.upper - found.lower < 0.02 * found.upper)


def test_what_is_wider_than_a_thousandth_does_not_say_ok(monkeypatch):
    monkeypatch.setattr(account, "WIDE", 1.0)  # nothing is asked again
    found = ja.epsilon(allocation(0.586, 3644, 100), 1e-6)
    assert found.upper - found.lower > 1e-3 * found.upper and found.status == "width"
    loose = ja.epsilon(allocation(0.586, 3644, 100), 1e-6, rtol=3e-3)
    assert loose.status == "ok"


def test_only_the_wide_rows_of_a_batch_are_asked_again():
    batch = ja.epsilon(allocation([2.0, 0.586], [100, 3644], 100), [1e-5, 1e-6])
    alone = [ja.epsilon(allocation(*row, 100), delta) for row, delta in (((2.0, 100), 1e-5), ((0.586, 3644), 1e-6))]
    assert batch.lower[1] <= ONE_SLOT[0][5] and ONE_SLOT[0][4] <= batch.upper[1]
    for i, one in enumerate(alone):
        assert batch.lower[i] <= one.upper and one.lower <= batch.upper[i] and batch.status[i] == "ok"


def test_a_second_bracket_that_contradicts_the_first_leaves_neither(monkeypatch):
    first, second = account._larger_of_pairs, []

    def other(*asked):
        side = first(*asked)
        if second:  # the second bracket is put above the first
            side.answer.lower[:] = 3.0 * side.answer.upper
            side.answer.upper[:] = 4.0 * side.answer.upper
        second.append(side)
        return side

    monkeypatch.setattr(account, "_larger_of_pairs", other)
    monkeypatch.setattr(account, "WIDE", 1e-9)
    found = ja.epsilon(allocation(2.0, 20, 2), 1e-5)
    assert len(second) == 2 and (found.lower, found.upper, found.status) == (0.0, np.inf, "contradiction")


@pytest.mark.parametrize("delta", [1e-30, 1e-100])
def test_many_rounds_have_an_upper_end_at_tiny_deltas(delta):
    """Beyond a round's own losses, at smaller deltas, the Gaussian that reveals the slot bounds the round."""
    rounds = ja.repeat(ja.RandomAllocation(ja.Gaussian(1.0), 100), np.array([10.0, 10.0]))
    found = ja.epsilon(rounds, np.array([1e-5, delta]))
    assert found.status.tolist() == ["ok", "width"] and np.all(found.lower <= found.upper)
    assert found.upper[0] == ja.epsilon(rounds, 1e-5).upper[0]
    told = ja.epsilon(ja.Gaussian(1.0 / np.sqrt(10.0)), delta)
    assert found.lower[1] < found.upper[1] < told.lower


@pytest.mark.parametrize("sigma, slots, rounds", [(1.0, 2, 3), (3.0, 2, 20)])
def test_far_losses_hold_against_the_usual_ones(monkeypatch, sigma, slots, rounds):
    """Both upper ends are finite, and neither is below the lower end of the other bracket."""
    mechanism = ja.repeat(ja.RandomAllocation(ja.Gaussian(sigma), slots), rounds)
    with random_allocation.with_losses("far"):
        for delta in (1e-25,):
            far = ja.epsilon(mechanism, delta)
            token = random_allocation._LOSSES.set("usual")
            usual = ja.epsilon(mechanism, delta)
            random_allocation._LOSSES.reset(token)
            assert far.lower <= usual.upper < np.inf and usual.lower <= far.upper < np.inf


def test_a_replaced_record_where_one_part_of_eps_is_negative():
    """The old bound at eps = 0 was twice the total variation between the laws with and without one record."""
    step, sigma, eps = 0.05, 0.8, np.array([0.0, 0.3])
    x = np.arange(-7.0, 7.0, step)
    near, far = (np.exp(-0.5 * ((x - shift) / sigma) ** 2) for shift in (1.0, -1.0))
    none = np.exp(-0.5 * (x / sigma) ** 2)
    p, q = (np.outer(each, none) + np.outer(none, each) for each in (near, far))
    truth = [np.sum(np.maximum(p - np.exp(e) * q, 0.0)) * step**2 / (4.0 * np.pi * sigma**2) for e in eps]
    run = ja.RandomAllocation(ja.Gaussian(sigma), 2)
    found = ja.delta(run, eps, relation="replace_one").upper
    apart = ja.delta(run, 0.0).lower
    assert np.all(found >= truth) and found[1] < found[0] < 1.9 * apart
