"""Composition theorems in closed form, and limit theorems, each with its kind.

`basic_composition`, `advanced_composition` and `parallel_composition` are bounds.  `exact_composition` is the best
possible where no more is known than that each step is (eps, delta)-DP.  `gdp_clt` and `clt_epsilon` are asymptotic and
bound nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    check,
    choice,
)
from jaxacct.engines import closed_form
from jaxacct.mechanisms import ApproximateDP, repeat

__all__ = [
    "CLT_VARIANTS",
    "Guarantee",
    "advanced_composition",
    "basic_composition",
    "clt_epsilon",
    "exact_composition",
    "gdp_clt",
    "parallel_composition",
]

_UP = 1.0 + 1e-14
"""Factor by which results are rounded up, more than the rounding of the operations behind them."""
CLT_VARIANTS = ("poisson", "simplified", "uniform")
"""Limit theorems of `gdp_clt`, whose docstring has their formulas."""


class Guarantee(NamedTuple):
    """An (epsilon, delta) guarantee, delta at most 1, with the kind of statement it is.

    Parameters
    ----------
    epsilon, delta : numpy.ndarray
        Of one shape.
    kind : str
        "bound": epsilon and delta hold, and need not be the least.

    >>> guarantee = basic_composition([0.1, 0.2], 1e-6)
    >>> guarantee.kind
    'bound'
    """

    epsilon: np.ndarray
    delta: np.ndarray
    kind: str = "bound"


def basic_composition(epsilon: Any, delta: Any) -> Guarantee:
    """The composition of (eps_i, delta_i)-DP mechanisms is (sum eps_i, sum delta_i)-DP, under any relation.

    It holds for mechanisms that are chosen adaptively as well.

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in [0, 1)
        They broadcast; the sum runs over the last axis.

    Returns
    -------
    Guarantee
        kind "bound".

    References
    ----------
    Dwork, Kenthapadi, McSherry, Mironov and Naor (2006).

    >>> [round(float(x), 12) for x in basic_composition([0.1, 0.2], 1e-6)[:2]]
    [0.3, 2e-06]
    """
    eps, delta = _both(epsilon, delta)
    return Guarantee(np.sum(eps, axis=-1) * _UP, np.minimum(np.sum(delta, axis=-1) * _UP, 1.0))


def parallel_composition(epsilon: Any, delta: Any) -> Guarantee:
    """Mechanisms on disjoint parts of the data, each record in one part fixed in advance: (max eps_i, max delta_i).

    This is for add_or_remove_one, where a record changes one part only.  Under replace_one a record may change two
    parts, and those compose.

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in [0, 1)
        They broadcast; the maximum runs over the last axis.

    Returns
    -------
    Guarantee
        kind "bound".

    References
    ----------
    McSherry (2009).

    >>> [float(x) for x in parallel_composition([0.1, 0.2], [1e-6, 1e-7])[:2]]
    [0.2, 1e-06]
    """
    eps, delta = _both(epsilon, delta)
    return Guarantee(np.max(eps, axis=-1), np.max(delta, axis=-1))


def advanced_composition(epsilon: Any, delta: Any, steps: Any, slack: Any, *, form: str = "tight") -> Guarantee:
    """k-fold adaptive composition of (eps, delta)-DP: `(eps sqrt(2k log(1/slack)) + k d(eps), k delta + slack)`.

    In the "tight" form d(eps) = eps tanh(eps/2), the largest mean loss, which is that of randomised response.  In the
    "textbook" form d(eps) = eps (e^eps - 1).

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in [0, 1)
    steps : array_like, whole numbers k >= 1
    slack : array_like in (0, 1)
        What is added to delta.  All four broadcast.
    form : {"tight", "textbook"}

    Returns
    -------
    Guarantee
        kind "bound".

    References
    ----------
    Dwork, Rothblum and Vadhan (2010); Dwork and Roth (2014), Theorem 3.20.

    >>> float(advanced_composition(0.1, 0.0, 100, 1e-5).epsilon.round(6))
    5.29811
    """
    choice("form", form, ("tight", "textbook"))
    eps, delta = _both(epsilon, delta)
    k, slack = np.asarray(check("steps", steps, COUNT)), np.asarray(check("slack", slack, DELTA))
    drift = eps * (np.tanh(0.5 * eps) if form == "tight" else np.expm1(eps))
    total = eps * np.sqrt(2.0 * k * np.log(1.0 / slack)) + k * drift
    return Guarantee(total * _UP, np.minimum((k * delta + slack) * _UP, 1.0))


def exact_composition(epsilon: Any, delta: Any, steps: Any, total_delta: Any) -> Bounds:
    """The smallest epsilon of any k-fold adaptive composition of (eps, delta)-DP mechanisms, certified.

    One pair of laws dominates all (eps, delta)-DP mechanisms, and this is the epsilon of its composition:
    `ja.epsilon(ja.repeat(ja.ApproximateDP(epsilon, delta), steps), total_delta)`.

    Parameters
    ----------
    epsilon : array_like, >= 0
    delta : array_like in [0, 1)
    steps : array_like, whole numbers >= 1
    total_delta : array_like in [0, 1)
        delta of the composition.  All four broadcast.

    Returns
    -------
    Bounds
        kind "certified".

    References
    ----------
    Kairouz, Oh and Viswanath (2015).

    >>> float(exact_composition(0.1, 0.0, 2, 0.0).upper.round(9))
    0.2
    """
    return account.epsilon(repeat(ApproximateDP(epsilon, delta), steps), total_delta)


def gdp_clt(noise_multiplier: Any, sampling_probability: Any, steps: Any, *, variant: str = "poisson") -> np.ndarray:
    """mu of the Gaussian limit of DP-SGD, which at any finite size bounds nothing in either direction.

    With noise multiplier s, sampling probability q and T steps, the variants are

    * "poisson": `q sqrt(T (e^{1/s^2} - 1))`;
    * "simplified": `q sqrt(T)/s`;
    * "uniform", for batches of fixed size: `sqrt(2) q sqrt(T) sqrt(e^{1/s^2} Phi(1.5/s) + 3 Phi(-0.5/s) - 2)`.

    Parameters
    ----------
    noise_multiplier : array_like, > 0
    sampling_probability : array_like in [0, 1]
    steps : array_like, whole numbers >= 1
        All three broadcast.
    variant : {"poisson", "simplified", "uniform"}

    Returns
    -------
    numpy.ndarray

    References
    ----------
    "poisson": Bu, Dong, Long and Su (2020).  "simplified": Xiang et al. (2024), equation 18.  "uniform": Dong, Roth
    and Su (2022), Corollary 5.4.

    >>> [round(float(gdp_clt(0.8, 0.01, 2000, variant=v)), 6) for v in CLT_VARIANTS]
    [0.868416, 0.559017, 1.170244]
    """
    choice("variant", variant, CLT_VARIANTS)
    s = np.asarray(check("noise_multiplier", noise_multiplier, POSITIVE))
    q = np.asarray(check("sampling_probability", sampling_probability, PROBABILITY))
    root = q * np.sqrt(check("steps", steps, COUNT))
    if variant == "simplified":
        return root / s
    with np.errstate(over="ignore"):
        if variant == "poisson":
            return root * np.sqrt(np.expm1(1.0 / s**2))
        square = np.exp(1.0 / s**2) * ndtr(1.5 / s) + 3.0 * ndtr(-0.5 / s) - 2.0
    return np.sqrt(2.0 * np.maximum(square, 0.0)) * root


def clt_epsilon(
    noise_multiplier: Any, sampling_probability: Any, steps: Any, delta: Any, *, variant: str = "poisson"
) -> Bounds:
    """epsilon of DP-SGD by the central limit theorem.  This is not a privacy guarantee.

    `ja.epsilon(ja.dp_sgd(...), delta)` is certified.

    Parameters
    ----------
    noise_multiplier, sampling_probability, steps, variant
        As in `gdp_clt`.
    delta : array_like in (0, 1)
        Broadcasts with the first three.

    Returns
    -------
    Bounds
        kind "asymptotic": lower, estimate and upper are one number, and the truth may lie on either side.

    References
    ----------
    Those of `gdp_clt`; the profile of the limit is Dong, Roth and Su (2022), Corollary 2.13.

    >>> round(float(clt_epsilon(0.8, 0.01, 2000, 1e-5).estimate), 3)
    3.72
    """
    delta = np.asarray(check("delta", delta, DELTA))
    mu, delta = np.broadcast_arrays(gdp_clt(noise_multiplier, sampling_probability, steps, variant=variant), delta)
    flat, target = mu.reshape(-1), delta.reshape(-1)
    live = (flat > 0) & np.isfinite(flat)
    value = np.where(flat > 0, np.inf, 0.0)
    if live.any():
        value[live] = closed_form.epsilon(flat[live], target[live], np.zeros(int(live.sum()))).estimate
    value = value.reshape(mu.shape)
    return Bounds(value, value, value, "asymptotic", engine="clt")


def _both(epsilon: Any, delta: Any) -> tuple[np.ndarray, np.ndarray]:
    eps, delta = check("epsilon", epsilon, NON_NEGATIVE), check("delta", delta, DELTA_OR_ZERO)
    eps, delta = np.broadcast_arrays(eps, delta)
    return eps, delta
