"""Three accountings of one mechanism: generalised propose-test-release whose ridge is tuned by a private selection.

A candidate releases two noisy statistics (the test), one posterior sample if the test lets it pass, and a noisy score.
README.md proves that a candidate's delta is at most that of `test` and `proposal` composed, plus `failure`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

import jaxacct as ja
from jaxacct import selection

ACCOUNTINGS = ("one point", "two points", "worst case")
POINTS = 40
LARGEST = 6.0
"""Largest mu of a candidate that `calibrated` tries."""


@dataclass(frozen=True)
class Budget:
    """A candidate's privacy, as the mu of a Gaussian, the law of the number of candidates, and the tuning's delta."""

    mu: float
    law: selection.Law
    delta: float
    shares: tuple[float, float, float, float] = (0.05, 0.1, 0.2, 0.65)
    """Shares of mu^2 that least eigenvalue, norm, score and proposal get."""

    @property
    def parts(self):
        """mu of (least eigenvalue, norm, score, proposal)."""
        return self.mu * np.sqrt(np.array(self.shares))

    @property
    def failure(self):
        """Probability that the test is wrong; also how far `proposal` may lie above the delta of its Gaussian."""
        return 0.1 * self.delta / float(self.law.mean)

    @cached_property
    def proposal(self):
        """(epsilon, delta) points that the posterior sample must meet: a Gaussian's, with `failure` added to delta."""
        gaussian = ja.Gaussian(1.0 / self.parts[3])
        epsilon = np.linspace(0.0, float(ja.epsilon(gaussian, self.failure).upper), POINTS)
        return epsilon, np.minimum(np.asarray(ja.delta(gaussian, epsilon).upper) + self.failure, 1.0)

    @cached_property
    def test(self):
        """The Gaussian of the test and the score together."""
        return ja.Gaussian(1.0 / float(np.linalg.norm(self.parts[:3])))

    @cached_property
    def candidate(self):
        """The profile of a candidate: the test, the score and the proposal composed exactly, and `failure` more."""
        both = ja.compose(self.test, ja.PrivacyProfile(*self.proposal))
        last = float(ja.epsilon(both, 4.0 * self.failure).upper)
        epsilon = np.linspace(0.0, last, 2 * POINTS)
        return ja.PrivacyProfile(epsilon, np.minimum(ja.delta(both, epsilon).upper + self.failure, 1.0))

    def point(self, delta):
        """(epsilon, delta) of a candidate by Theorem 6.1: the test's point, plus the proposal's, plus (0, failure)."""
        each = 0.5 * (delta - self.failure)
        proposal = float(ja.epsilon(ja.PrivacyProfile(*self.proposal), each).upper)
        test = float(ja.epsilon(self.test, each).upper)
        return proposal + test, 2 * each + self.failure

    def epsilon(self, accounting):
        """Epsilon at `delta` of the tuning by one of ACCOUNTINGS; an upper bound."""
        if accounting == "worst case":
            return float(ja.epsilon(selection.select(self.candidate, self.law), self.delta).upper)
        dear = self.point(self.delta / float(self.law.mean) * (1.0 - 1e-9))
        if accounting == "one point":
            found = [two_points(self.law, dear, dear)]
        else:
            cheap = [self.point(delta) for delta in np.geomspace(dear[1], 0.5, 25)]
            found = [two_points(self.law, one, dear) for one in cheap]
        return min(found)


def two_points(law, cheap, dear):
    """Epsilon at E[K] delta_2 of a selection whose candidates all meet two points (eps, delta); Theorem 5.2."""
    (eps_1, delta_1), (eps_2, _) = cheap, dear
    grown = np.log(np.exp(eps_1) + (1.0 - law.gamma) / law.gamma * delta_1)
    return float(eps_2 + (law.eta + 1.0) * grown) * (1.0 + 1e-13)


def calibrated(epsilon, delta, law, accounting, rounds=14):
    """The Budget with the largest mu whose tuning is (epsilon, delta)-DP by that accounting; mu to 1 part in 1000."""
    low, high = np.log(1e-3), np.log(LARGEST)
    best = None
    for _ in range(rounds):
        middle = 0.5 * (low + high)
        budget = Budget(float(np.exp(middle)), law, delta)
        if budget.epsilon(accounting) <= epsilon:
            low, best = middle, budget
        else:
            high = middle
    if best is None:
        raise ja.InputError(f"epsilon = {epsilon!r} is too small for a tuning; use a larger one")
    return best
