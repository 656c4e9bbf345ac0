"""Attacks on a released number: guesses of the exact number behind it, and how often a guess may be right."""

import math

import numpy as np
from scipy import stats

ALMOST_SURE = 1e-9
"""Upper bound of the probability that a correct release fails one of these tests."""
SCALES = (1.0, 1.0 + 2.0**-20, 1.0 + 2.0**-23, 1.0 - 2.0**-24)
"""Factors by which noise may have been raised before it was rounded."""


def guesses(released, counts, std):
    """{attack: its guess of the count behind each released number}, among all counts that are possible.

    One attack guesses the nearest count. The others guess the count for which noise or noise/std is nearest to a
    float32 or has the fewest binary digits [Mironov 2012].
    """
    noise = np.asarray(released, float)[:, None] - np.asarray(counts, float)
    found = {"nearest": np.abs(noise)}
    for scale in SCALES:
        short = (noise / (std * scale)).astype(np.float32).astype(float)
        found[f"float32 deviations of {scale}"] = np.abs(short * (std * scale) - noise)
    found["float32"] = np.abs(noise.astype(np.float32).astype(float) - noise)
    for name, x in (("digits", noise), ("digits in deviations", noise / std)):
        mantissa = np.ldexp(np.frexp(x)[0], 53).astype(np.int64)
        found[name] = -np.log2((mantissa & -mantissa).clip(1))
    # among equally good counts, the nearest comes first
    order = {name: np.lexsort((np.abs(noise), badness), axis=1)[:, 0] for name, badness in found.items()}
    return {name: np.asarray(counts)[first] for name, first in order.items()}


def best_rate(counts, prior, std):
    """How often the best guess is right where the noise is N(0, std^2) exactly; rounding can only lower it.

    The rate is the integral of the maximum, over the counts, of prior times density.
    """
    counts, prior = np.asarray(counts, float)[:, None], np.asarray(prior, float)[:, None]
    x = np.linspace(counts.min() - 12 * std, counts.max() + 12 * std, 10_001)
    top = np.max(prior * np.exp(-0.5 * ((x - counts) / std) ** 2), axis=0)
    return float(np.sum(top) * (x[1] - x[0]) / (std * math.sqrt(2 * math.pi))) * (1 + 1e-4)


def check_hidden(released, truth, counts, prior, std):
    """No attack is right more often than `best_rate` allows. A correct release fails with chance <= ALMOST_SURE."""
    limit, found = best_rate(counts, prior, std), guesses(released, counts, std)
    for name, guess in found.items():
        right = int(np.sum(guess == truth))
        chance = stats.binom.sf(right - 1, len(truth), limit)
        assert chance > ALMOST_SURE / len(found), f"{name}: {right} of {len(truth)} right; possible is {limit:.4f}"


def least_epsilon(without, with_one, counts, std, delta):
    """A lower bound on epsilon, at confidence 1 - ALMOST_SURE, by all attacks on the releases of two neighbours."""
    first, second = guesses(without, counts, std), guesses(with_one, counts, std)
    level, found = ALMOST_SURE / (2 * len(first)), 0.0
    for name in first:
        wrong = clopper_pearson(np.sum(first[name] == counts[1]), len(without), level)
        missed = clopper_pearson(np.sum(second[name] == counts[0]), len(with_one), level)
        if wrong < 1 - delta - missed:
            found = max(found, math.log((1 - delta - missed) / wrong))
    return found


def clopper_pearson(hits, n, level):
    """An upper bound, at confidence 1 - level, of the probability of an event that happened `hits` times in n."""
    return 1.0 if hits == n else float(stats.beta.isf(level, hits + 1, n - hits))
