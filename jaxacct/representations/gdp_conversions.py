"""Gaussian differential privacy (GDP): its profile, its trade-off function, and mu from a point of a profile."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import NON_NEGATIVE, OPEN_PROBABILITY, POSITIVE, PROBABILITY, check
from jaxacct.engines import closed_form

__all__ = ["gdp_from_profile", "profile_from_gdp", "tradeoff_from_gdp"]

_SLACK = 1e-14
"""Relative accuracy that is granted to SciPy's normal distribution."""
_SMALLEST = 1e-300
"""Below this the closed form's exponentials underflow, so that an upper end stays at it."""
_BISECTIONS = 90
"""Halvings of log mu: the ends then differ by less than their rounding."""
_LEAST_MU = 1e-8
"""Lower end of the bisection for mu."""


def profile_from_gdp(mu: Any, epsilon: Any) -> Bounds:
    """delta(eps) of mu-Gaussian differential privacy, `Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)`, certified.

    Parameters
    ----------
    mu : array_like, > 0
    epsilon : array_like, >= 0
        They broadcast.

    Returns
    -------
    Bounds
        kind "certified".

    References
    ----------
    Dong, Roth and Su (2022), Corollary 2.13.

    >>> float(profile_from_gdp(0.5, 1.0).estimate.round(9))
    0.006829595
    """
    mu, eps = np.broadcast_arrays(check("mu", mu, POSITIVE), check("epsilon", epsilon, NON_NEGATIVE))
    low, middle, high = closed_form.delta(mu, eps)
    high = np.maximum(high, _SMALLEST)  # below it exp underflows
    return Bounds(low, np.clip(middle, low, high), high, "certified", engine="closed_form")


def gdp_from_profile(epsilon: Any, delta: Any) -> Bounds:
    """The mu whose mu-GDP profile passes through (eps, delta): any mechanism that is mu-GDP for it satisfies both.

    A mechanism known to be (eps, delta)-DP at one point need not be mu-GDP for this mu.  A mechanism that is mu-GDP
    needs at least the largest such mu over its whole profile.

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in (0, 1)
        They broadcast.

    Returns
    -------
    Bounds
        kind "certified".

    References
    ----------
    Dong, Roth and Su (2022), Corollary 2.13, solved for mu.

    >>> float(gdp_from_profile(1.0, 0.006829595).estimate.round(6))
    0.5
    """
    eps, target = np.broadcast_arrays(check("epsilon", epsilon, NON_NEGATIVE), check("delta", delta, OPEN_PROBABILITY))

    def crossing(end: str) -> tuple[np.ndarray, np.ndarray]:
        below, above = np.full(eps.shape, np.log(_LEAST_MU)), np.log(np.sqrt(2.0 * eps) + 80.0)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (below + above)
            met = getattr(closed_form.delta(np.exp(middle), eps), end) <= target
            below, above = np.where(met, middle, below), np.where(met, above, middle)
        return np.exp(below), np.exp(above)

    low, high = crossing("upper")[0] * (1.0 - 1e-15), crossing("lower")[1] * (1.0 + 1e-15)
    return Bounds(low, np.sqrt(low) * np.sqrt(high), high, "certified", engine="closed_form")


def tradeoff_from_gdp(mu: Any, fpr: Any) -> Bounds:
    """The trade-off function of mu-Gaussian differential privacy, `f_mu(a) = Phi(Phi^-1(1 - a) - mu)`.

    Parameters
    ----------
    mu : array_like, >= 0
    fpr : array_like in [0, 1]
        They broadcast.

    Returns
    -------
    Bounds
        kind "certified", granting SciPy's normal distribution an accuracy of 1e-14.

    References
    ----------
    Dong, Roth and Su (2022), Definition 2.6.

    >>> float(tradeoff_from_gdp(1.0, 0.5).estimate.round(9))
    0.158655254
    """
    mu, a = np.broadcast_arrays(check("mu", mu, NON_NEGATIVE), check("fpr", fpr, PROBABILITY))
    quantile = -ndtri(a)
    value = ndtr(quantile - mu)
    with np.errstate(invalid="ignore"):
        relative = _SLACK * (4.0 + (np.abs(quantile - mu) + 1.0) * (np.abs(quantile) + mu))
    relative = np.where(np.isfinite(quantile), np.minimum(relative, 1.0), 0.0)
    return Bounds(value * (1.0 - relative), value, np.minimum(value * (1.0 + relative), 1.0), "certified")
