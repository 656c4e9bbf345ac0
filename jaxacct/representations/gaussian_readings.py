"""mu of Gaussian differential privacy above a floor, and its regret, for every configuration of a profile."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxacct.accounting.dispatch import answered_by_parts
from jaxacct.accounting.gaussian_mu import gaussian_fit
from jaxacct.accounting.gaussian_regret import gaussian_regret
from jaxacct.accounting.true_positive_rates import Deltas
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import Constraint, broadcast_shape, check
from jaxacct.mechanisms import Mechanism, batch_shape, components, directions

__all__ = ["FLOOR", "gaussian_readings"]

FLOOR = Constraint("use a floor such as 1e-10, which is part of the claim", 0, 0.5, lower_open=True, upper_open=True)
"""What `above_fpr` may be."""


class SymmetricProfile(Protocol):
    """What is read of a profile whose relation is its own reverse: `jaxacct.Profile`, which imports this module."""

    @property
    def mechanism(self) -> Mechanism: ...

    @property
    def relation(self) -> str: ...

    def deltas_of(self, rows: np.ndarray) -> Deltas:
        """The bracket of delta for some rows of the flat batch."""


def gaussian_readings(profile: SymmetricProfile, above_fpr: Any, regret: bool) -> tuple[Bounds, Bounds]:
    """(mu, regret) of every configuration; the second is mu again where the regret is not asked for."""
    floor = np.asarray(check("above_fpr", above_fpr, FLOOR))
    mine = batch_shape(profile.mechanism)
    shape = broadcast_shape({"the mechanism": mine, "above_fpr": floor.shape})
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    floor = np.broadcast_to(floor, shape).reshape(-1)
    kind = profile.mechanism.kind_of_bracket(profile.relation)
    exact = _exact(profile)[rows] if kind == "certified" else np.full(rows.size, np.nan)
    ends, words = np.stack([exact * (1.0 - 1e-14), exact, exact * (1.0 + 1e-14)]), np.full(rows.size, "ok", "<U16")
    lost, lost_words = np.zeros((3, rows.size)), words.copy()
    left = np.flatnonzero(np.isnan(exact))
    if left.size:
        deltas = profile.deltas_of(rows[left])
        fit = gaussian_fit(deltas, floor[left], kind)
        ends[:, left], words[left] = (fit.mu.lower, fit.mu.estimate, fit.mu.upper), fit.mu.status
        if regret:
            found = gaussian_regret(deltas, fit.lines, np.asarray(fit.mu.upper), kind)
            lost[:, left], lost_words[left] = (found.lower, found.estimate, found.upper), found.status
    ends, lost = (end.reshape(3, *shape) for end in (ends, lost))
    mu = Bounds(ends[0], ends[1], ends[2], kind, words.reshape(shape), "tradeoff")
    if not regret:
        return mu, mu
    return mu, Bounds(lost[0], lost[1], lost[2], kind, lost_words.reshape(shape), "tradeoff")


def _exact(profile: SymmetricProfile) -> np.ndarray:
    """mu of rows that are Gaussians without sampling, or nothing; NaN for others."""
    size = int(np.prod(batch_shape(profile.mechanism)))
    if not answered_by_parts(profile.mechanism):
        return np.full(size, np.nan)
    mu, other = np.zeros(size), np.zeros(size, bool)
    for direction in directions(profile.mechanism, profile.relation):
        parts = components(profile.mechanism, profile.relation, direction)
        other |= sum(np.sum(n, axis=1) for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)) > 0
        other |= parts.delta_infinity > 0
        mu = np.maximum(mu, parts.mu)  # not the root of mu2, which may under- or overflow
    return np.where(other, np.nan, mu)
