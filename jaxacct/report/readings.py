"""The risks of a claim: what an attacker can get out of one output, in rates and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import OPEN_PROBABILITY, check_one
from jaxacct.mechanisms import Mechanism, PrivacyProfile
from jaxacct.representations.mechanism_profile import profile

__all__ = ["FALSE_POSITIVE_RATES", "Readings", "by_points", "points_of", "read"]

FALSE_POSITIVE_RATES = (1e-2, 1e-3)
"""The false-positive rates at which a report states the true-positive rate."""
_CURVE = np.unique(np.concatenate([np.geomspace(1e-4, 1.0, 33), FALSE_POSITIVE_RATES]))
"""The false-positive rates of the picture, those of the sentences among them."""
_SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Of the claimed epsilon: where a profile is evaluated that is slow to evaluate."""
_LEAST_GAP = 1e-4
"""Least distance of two points of a profile, above what `PrivacyProfile` asks for."""


class Readings(NamedTuple):
    """What an attacker can reach; every field is certified from above by its `upper`.

    fpr, tpr : false-positive rates and the largest true-positive rates at them, (G,).
    advantage : the largest difference of the two.  prior : a probability stated beforehand.
    posterior : the largest probability that an accusation is right, at `FALSE_POSITIVE_RATES`, given the prior.
    bayes_success : the largest probability of telling rightly, given the prior.
    """

    fpr: np.ndarray
    tpr: Bounds
    advantage: Bounds
    prior: float
    posterior: Bounds
    bayes_success: Bounds

    def rate(self, fpr: float) -> float:
        """The upper end of the true-positive rate at one of `FALSE_POSITIVE_RATES`."""
        return float(self.tpr.upper[np.flatnonzero(self.fpr == fpr)[0]])

    def as_bounds(self) -> Readings:
        """The same upper ends, as those of a mechanism that leaks less than the one that was read."""
        tpr, advantage, posterior, success = (
            Bounds(np.zeros_like(b.upper), b.upper, b.upper, "bound", "ok", b.engine)
            for b in (self.tpr, self.advantage, self.posterior, self.bayes_success)
        )
        return self._replace(tpr=tpr, advantage=advantage, posterior=posterior, bayes_success=success)


def read(mechanism: Mechanism, relation: str, prior: float, tick: Callable[[str], None]) -> Readings:
    """The readings of one mechanism; `tick` is told of each before it is computed.

    Parameters
    ----------
    mechanism : Mechanism
        One configuration.
    relation : str
    prior : float in (0, 1)
        The probability, before the output is seen, that the record was used.
    tick : callable
        Shows progress.
    """
    prior = check_one("prior", prior, OPEN_PROBABILITY, "it is one probability")
    known = profile(mechanism, relation)
    tick("true-positive rates")
    tpr = known.true_positive_rate(_CURVE)
    tick("advantage")
    advantage = known.advantage()
    tick("posterior")
    posterior = known.posterior(prior, FALSE_POSITIVE_RATES)
    tick("Bayes success")
    return Readings(_CURVE, tpr, advantage, prior, posterior, known.bayes_success(prior))


def points_of(
    mechanism: Mechanism, relation: str, epsilon: float, tick: Callable[[str], None]
) -> list[tuple[float, float]]:
    """A few points (epsilon, delta) of the profile of a mechanism that takes seconds for each, from above."""
    tick("privacy profile")
    known = profile(mechanism, relation)
    at = np.asarray(_SHARES) * epsilon if epsilon > 0.0 else np.zeros(1)
    return list(zip(at.tolist(), np.asarray(known.delta(at).upper).tolist(), strict=True))


def by_points(points: Sequence[tuple[float, float]]) -> PrivacyProfile | None:
    """A mechanism that leaks at least what the points of a profile allow, in either direction; None without a point."""
    kept: list[tuple[float, float]] = []
    for epsilon, delta in sorted(points):
        if not (np.isfinite(epsilon) and 0.0 <= delta < 1.0):
            continue
        if kept and delta >= kept[-1][1]:
            continue
        least = kept[-1][0] + _LEAST_GAP if kept else _LEAST_GAP if epsilon else 0.0
        epsilon = max(epsilon, least)  # the profile falls: what holds at an epsilon holds beyond it
        kept.append((epsilon, delta))
    return PrivacyProfile([e for e, _ in kept], [d for _, d in kept]) if kept else None
