"""Koskela, Redberg, Wang 2024, Figure 8: candidates of different noise and length that meet two common thresholds.

The text of the paper has lost all but the lengths 4000, 10000 and 18000.  The thresholds of a Gaussian that is
(1.5, 1e-6)-DP, m = 10, sampling probability 0.01 and sigma = 2, 3 and 4 are chosen: the longest runs that meet the
thresholds then have nearly these lengths.  Corollary 6.2 needs only the thresholds; our bound takes the pointwise
largest of the three candidates' profiles.
"""

from typing import NamedTuple

import numpy as np
from selecting import epsilons, run

import jaxacct as ja
from jaxacct import selection
from jaxacct.representations.profile_conversions import gdp_from_profile

TARGET, DELTA, RATE, SIGMAS, M = 1.5, 1e-6, 0.01, (2.0, 3.0, 4.0), 10.0
STEPS = 100
"""Lengths of runs are looked for among multiples of this."""


class Thresholds(NamedTuple):
    """Two points for every candidate's profile: delta(epsilon_1) <= delta_1 and delta(epsilon_2) <= delta_2."""

    epsilon_1: float
    delta_1: float
    epsilon_2: float
    delta_2: float

    def selected(self, law: selection.TruncatedNegativeBinomial) -> float:
        """Corollary 6.2: epsilon of the selection at delta = E[K] delta_2."""
        grown = np.log(np.exp(self.epsilon_1) + (1.0 - law.gamma) / law.gamma * self.delta_1)
        return float(self.epsilon_2 + (law.eta + 1.0) * grown)


def thresholds(law: selection.TruncatedNegativeBinomial) -> Thresholds:
    """The points on the profile of the (TARGET, DELTA)-DP Gaussian that make `selected` least (Section 6.2)."""
    gaussian = ja.Gaussian(1.0 / gdp_from_profile(TARGET, DELTA).lower)
    first = np.linspace(0.0, 2.0 * TARGET, 3001)
    missed = ja.delta(gaussian, first).upper
    best = np.argmin(np.exp(first) + (1.0 - law.gamma) / law.gamma * missed)
    second = DELTA / float(law.mean)
    return Thresholds(first[best], missed[best], float(ja.epsilon(gaussian, second).upper), second)


def longest(sigma: float, points: Thresholds) -> int:
    """Steps for which DP-SGD meets both thresholds."""
    steps = np.arange(3000, 20_001, STEPS)
    runs = ja.dp_sgd(sigma, RATE, steps)
    first = ja.delta(runs, float(points.epsilon_1), rtol=1e-3).upper <= points.delta_1
    second = ja.epsilon(runs, float(points.delta_2), rtol=1e-3).upper <= points.epsilon_2
    return int(np.max(steps[first & second]))


def numbers(small: bool) -> dict[str, dict[str, np.ndarray]]:
    sigmas = SIGMAS[:1] if small else SIGMAS
    law = selection.Geometric(1.0 / M)
    points = thresholds(law)
    steps = [longest(sigma, points) for sigma in sigmas]
    runs = [ja.dp_sgd(sigma, RATE, t) for sigma, t in zip(sigmas, steps, strict=True)]
    common = selection.candidates_profile(runs, np.linspace(0.0, 5.0, 201))
    each = [epsilons(one, law, DELTA, "privacy_profile") for one in runs]
    columns = {name: np.array([float(one[name]) for one in each]) for name in each[0]}
    alike = {
        "thresholds (Corollary 6.2)": points.selected(law),
        "all three (ours)": ja.epsilon(selection.select(common, law), DELTA).upper,
    }
    together = {name: np.full(len(sigmas), float(value)) for name, value in alike.items()}
    print("longest runs:", dict(zip(sigmas, steps, strict=True)))
    return {f"K geometric, m = {M:g}, delta = {DELTA:g}": {"sigma": np.array(sigmas), **columns, **together}}


if __name__ == "__main__":
    run(__doc__, numbers, "epsilon")
