"""Rounds of selections, and adaptive candidates as a game that is played."""

import math

import numpy as np
import pytest
from helpers import refusal
from scipy.stats import binom

import jaxacct as ja
from jaxacct import selection

BASE = ja.Gaussian(1.0 / 0.2680511)  # (1, 1e-5)-DP
TABLE = {  # (N, R): epsilons for geometric, Poisson and fixed K, all of mean N/R; selection/README.md, "Rounds"
    (8, 1): (1.487, 1.793, 2.739),
    (8, 2): (2.122, 2.288, 2.989),
    (8, 4): (2.745, 2.862, 3.187),
    (16, 2): (2.454, 2.967, 3.941),
    (16, 4): (3.365, 3.631, 4.397),
    (16, 8): (4.169, 4.301, 4.748),
    (64, 2): (3.109, 5.456, 6.266),
    (64, 4): (4.634, 6.300, 7.269),
    (64, 8): (6.344, 7.449, 8.553),
    (64, 16): (8.080, 8.738, 9.934),
}


def row(candidates, count, number=3):
    """The epsilons of R rounds of N/R candidates, as compositions, for the first laws of the table."""
    mean = candidates / count
    laws = (selection.Geometric(1.0 / mean), selection.Poisson(mean), selection.PointMass(mean))[:number]
    return [float(ja.epsilon(ja.repeat(selection.select(BASE, law), count), 1e-5).upper) for law in laws]


def test_the_beginning_of_the_table(coarse_pairs):
    (found,) = row(8, 2, number=1)
    assert TABLE[8, 2][0] - 2e-3 <= found <= TABLE[8, 2][0] + 0.05


@pytest.mark.slow  # thirty compositions
@pytest.mark.parametrize("key", TABLE, ids=str)
def test_the_table(key):
    np.testing.assert_allclose(row(*key), TABLE[key], atol=2e-3)


def test_the_cheaper_of_rounds_and_adaptive_candidates(coarse_pairs):
    """Eight rounds with K always 2, composed, cost more than the 16-fold composition of the base itself."""
    whole = selection.rounds(BASE, selection.PointMass(2), 8, target_delta=1e-5)
    assert whole == selection.select(BASE, selection.PointMass(16.0), candidates="adaptive")
    assert ja.epsilon(whole, 1e-5).upper == ja.epsilon(ja.repeat(BASE, 16), 1e-5).upper
    law = selection.Poisson(4.0)
    assert selection.rounds(BASE, law, 2, target_delta=1e-5) == ja.repeat(selection.select(BASE, law), 2)


def test_rounds_that_differ_are_composed(coarse_pairs):
    laws = [selection.Geometric(0.5), selection.Poisson(2.0), selection.Geometric(0.5)]
    whole = selection.rounds(BASE, laws, target_delta=1e-5)
    parts = [ja.repeat(selection.select(BASE, laws[0]), 2), ja.repeat(selection.select(BASE, laws[1]), 1)]
    assert whole == ja.compose(*parts)
    found = ja.epsilon(whole, 1e-5)
    one, two = (float(ja.epsilon(selection.select(BASE, law), 1e-5 / 3, rtol=1e-2).upper) for law in laws[:2])
    assert found.kind == "bound" and 1.0 < found.upper < 2 * one + two
    more = selection.rounds(BASE, [selection.Geometric(0.5)] * 2, target_delta=1e-5, top=2)
    assert more == ja.repeat(selection.select(BASE, laws[0], top=2), 2)


def test_what_are_no_rounds_is_refused():
    law = selection.Geometric(0.5)
    either = "one law of K and a count, or a sequence of laws"
    assert either in refusal(selection.rounds, BASE, law, target_delta=1e-5)
    assert either in refusal(selection.rounds, BASE, [law], 2, target_delta=1e-5)
    assert either in refusal(selection.rounds, BASE, [], target_delta=1e-5)
    assert "must be a law of K" in refusal(selection.rounds, BASE, [law, 3], target_delta=1e-5)
    assert "k = 3 must be a law of K" in refusal(selection.rounds, BASE, 3, 2, target_delta=1e-5)
    assert "one law of K for each round" in refusal(
        selection.rounds, BASE, [selection.Geometric([0.5, 0.1])], target_delta=1e-5
    )


def test_an_adversary_who_encodes_history_reaches_the_adaptive_answer():
    """Each candidate outputs the transcript so far and one fresh draw.  The longest output wins, and only it is seen.

    The likelihood ratio of a transcript depends on its length and on how often the base told the truth.  The simulated
    likelihood-ratio test leaks the adaptive answer, which is more than the i.i.d. answer.
    """
    mass, trials, rng = np.array([0.1, 0.3, 0.35, 0.25]), 100_000, np.random.default_rng(20261124)
    law, run = selection.Categorical(mass), ja.RandomizedResponse(0.75)
    for ratio in (2.0, 5.0):
        sure = []
        for truth in (0.75, 0.25):
            length = rng.choice(4, trials, p=mass)
            told = np.zeros(trials, int)
            for k in range(1, 4):  # candidate k outputs the transcript so far with one draw more
                told += (k <= length) & (rng.random(trials) < truth)
            event = binom.pmf(told, length, 0.75) > ratio * binom.pmf(told, length, 0.25)
            sure.append(np.mean(event))
        estimate = sure[0] - ratio * sure[1]
        error = math.sqrt((sure[0] * (1 - sure[0]) + ratio**2 * sure[1] * (1 - sure[1])) / trials)
        found = ja.delta(selection.select(run, law, candidates="adaptive"), math.log(ratio))
        assert abs(estimate - found.upper) <= 4.5 * error and error < 1.2e-2
        if ratio == 5.0:
            assert ja.delta(selection.select(run, law), math.log(ratio)).upper < estimate - 4.5 * error
