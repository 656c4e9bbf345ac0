"""No digit of a released number gives away what the noise hides: attacks on every kind of release."""

import functools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from release_attacks import check_hidden, clopper_pearson, guesses, least_epsilon
from scipy import stats

import jaxacct as ja
from jaxacct import tuning
from jaxacct.samplers import exact_draws
from jaxacct.training import AdaptiveClip, Plan, PrivateLoss, Trainer
from jaxacct.tuning.candidates import Secret
from jaxacct.tuning.tuning_run import value_of

KEY = bytes(range(32))
COUNTS = np.arange(1001)


@functools.cache
def score_of(sigma, unit, key):
    score = tuning.PrivateScore(lambda w, x: x < w, np.arange(1000.0), noise_multiplier=sigma, unit=unit)
    return value_of(score, Secret(key))


def scores(counts, sigma, unit=2.0**-20, key=KEY):
    """A private score for each exact count among 1,000 records."""
    value = score_of(sigma, unit, key)
    return np.array([value(np.float32(count), number) for number, count in enumerate(counts)])


@pytest.mark.parametrize(("sigma", "unit"), [(20.0, 2.0**-20), (30.0, 2.0**-20), (200.0, 2.0**-20), (30.0, 1.0)])
def test_a_private_score_hides_its_count(sigma, unit):
    truth = np.random.default_rng(int(sigma)).integers(0, 1001, 100)
    check_hidden(scores(truth, sigma, unit), truth, COUNTS, np.full(1001, 1 / 1001), sigma)


@pytest.mark.parametrize("sigma", [20.0, 30.0, 200.0])
def test_two_data_sets_cannot_be_told_apart_by_a_private_score(sigma):
    both = scores(np.repeat([611, 612], 400), sigma)
    without, with_one = both[:400], both[400:]
    accounted = float(ja.epsilon(ja.Gaussian(sigma), 1e-5).upper)
    assert least_epsilon(without, with_one, (611, 612), sigma, 1e-5) <= accounted


def test_private_scores_are_whole_units_and_follow_from_the_key():
    found = scores(np.full(50, 7), 3.0)
    assert np.array_equal(found * 2.0**20, np.rint(found * 2.0**20)) and len(set(found % 1)) > 40
    coarse = scores(np.full(50, 7), 3.0, unit=1.0)
    assert np.array_equal(coarse, np.rint(coarse)) and len(set(coarse)) > 5
    assert np.array_equal(found, scores(np.full(50, 7), 3.0))
    assert not np.any(found == scores(np.full(50, 7), 3.0, key=bytes(32)))


@functools.cache
def batches(sigma):
    """Return the member counts, private losses and clip norms of 60 steps. A batch has about 1,000 of 2,000 records."""
    rule = AdaptiveClip(1.0, learning_rate=0.1, count_noise=sigma / 2)
    how = {"clip_norm": rule, "private_loss": PrivateLoss(bound=4.0, noise=sigma / 4)}
    plan = Plan(target_delta=1e-5, dataset_size=2000, sampling_probability=0.5, noise_multiplier=1.0, steps=60)
    trainer = Trainer(lambda w, x: 0.0 * w + x, optax.sgd(0.0), plan, micro_batch=2000, **how)
    told, norms = [], []
    see = lambda state: norms.append(float(state.clip_norm))
    start = trainer.init(jnp.float32(0.0), KEY)
    trainer.fit(start, np.full(2000, 3.0, np.float32), callbacks=[see], log=told.append, progress=False)
    steps = [record for record in told if record["event"] == "step"]
    members = np.array([record["not_private"]["members"] for record in steps])
    return members, np.array([record.get("private", {}).get("loss", 0.0) for record in steps]), np.array(norms)


MEMBERS = np.arange(800, 1201)
PRIOR = stats.binom.pmf(MEMBERS, 2000, 0.5)


@pytest.mark.parametrize("sigma", [20.0, 30.0, 200.0])
def test_a_private_loss_hides_how_many_there_are(sigma):
    """Every loss is 3 and the bound is 4, so each member of the batch adds 3 - 4/2 = 1 to the centred sum."""
    truth, losses, _ = batches(sigma)
    released, inside = (losses - 2.0) * 1000.0, (losses > 0.0) & (losses < 4.0)  # a loss clipped to 0 or 4 tells less
    check_hidden(released[inside], truth[inside], MEMBERS, PRIOR, sigma)
    units = released[inside] * 256.0  # of 4/1024 each
    assert len(units) > 54 and np.max(np.abs(units - np.rint(units))) < 0.2


@pytest.mark.parametrize("sigma", [20.0, 30.0, 200.0])
def test_the_count_of_an_adaptive_clip_norm_is_hidden(sigma):
    """No gradient is clipped, so that each member adds 1/2 and the sum is half the number of members."""
    truth, _, norms = batches(sigma)
    released = -np.diff(np.log(np.append(1.0, norms))) / 0.1 * 2000.0
    check_hidden(released, truth, MEMBERS, PRIOR, sigma)
    assert np.max(np.abs(released - np.rint(released))) < 0.1  # whole numbers, as the count


def test_the_attacks_find_noise_of_float32():
    rng, truth = np.random.default_rng(5), np.full(100, 417)
    z = rng.standard_normal(100).astype(np.float32).astype(float)
    found = guesses(truth + 30.0 * (1 + 2.0**-20) * z, COUNTS, 30.0)
    assert np.sum(found[f"float32 deviations of {1 + 2.0**-20}"] == truth) > 90
    with pytest.raises(AssertionError, match="100 of 100 right"):
        check_hidden(truth + 0.3, truth, COUNTS, np.full(1001, 1 / 1001), 30.0)
    assert clopper_pearson(0, 400, 1e-9) == pytest.approx(1 - 1e-9 ** (1 / 400))
    short = lambda: 30.0 * (1 + 2.0**-20) * rng.standard_normal(400).astype(np.float32).astype(float)
    assert least_epsilon(417 + short(), 418 + short(), (417, 418), 30.0, 1e-5) > 1.0


# The noise


@pytest.mark.parametrize("std", [Fraction(1, 10), Fraction(0.4), Fraction(4, 3), Fraction(7)])
def test_rounded_gaussian_noise_fits_its_law(std):
    rng, reach = exact_draws.KeyedBits(KEY), int(12 * std) + 2
    draws = np.array([exact_draws.rounded_gaussian(std * std, rng) for _ in range(2000)])
    ends = stats.norm.cdf(np.arange(-reach, reach + 2) - 0.5, scale=float(std))
    expected, seen = np.diff(ends) * 2000, np.bincount(draws + reach, minlength=2 * reach + 1)
    common = expected >= 5
    pooled = [np.append(x[common], x[~common].sum() + 1e-3) for x in (seen, expected)]
    pooled[1] *= pooled[0].sum() / pooled[1].sum()
    assert stats.chisquare(*pooled).pvalue > 1e-6


def test_rounded_gaussian_noise_of_a_fine_grid_is_gaussian():
    rng, std = exact_draws.KeyedBits(KEY), Fraction(30) * 2**20
    draws = np.array([exact_draws.rounded_gaussian(std * std, rng) for _ in range(2000)], float)
    assert stats.kstest(draws / float(std), "norm").pvalue > 1e-6


def test_rounded_gaussian_noise_far_below_its_grid_is_zero_and_takes_no_longer():
    rng = exact_draws.KeyedBits(KEY)
    assert {exact_draws.rounded_gaussian(Fraction(1e-15) ** 2, rng) for _ in range(20)} == {0}


def test_bits_of_a_key():
    one, two = exact_draws.KeyedBits(KEY), exact_draws.KeyedBits(KEY)
    pieces = [one.getrandbits(k) for k in (1, 300, 7, 64)]
    assert two.getrandbits(372) == sum(x << place for x, place in zip(pieces, (0, 1, 301, 308), strict=True))
    draws = [exact_draws.KeyedBits(bytes([n] * 32)).randrange(10**30) for n in range(20)]
    assert len(set(draws)) == 20 and max(draws) < 10**30
    with pytest.raises(NotImplementedError):
        one.random()
