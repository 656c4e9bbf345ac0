"""Algorithm 3 of Xiang, Wang, Wang 2024: what a selection leaks when its score is monotone in the likelihood ratio.

**Not a bound for general scores**: for a base of (1, 1e-5)-DP and geometric K of mean 10 it says 1.144, and the score
|x - 1.67| leaks 1.531.  So every answer is of kind "conditional: monotone score"
(README.md of this folder, "The condition of `monotone_score`").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import DELTA, NON_NEGATIVE, POSITIVE, InputError, broadcast_shape, check, choice
from jaxacct.kernels import order_renyi, order_statistics
from jaxacct.kernels.order_statistics import REACHES
from jaxacct.mechanisms import Mechanism, batch_shape, components
from jaxacct.representations.renyi_conversions import delta_from_renyi, epsilon_from_renyi, log_kappa
from jaxacct.selection.base_profile import common_shape
from jaxacct.selection.law_of_k import Law, require_law

__all__ = ["KIND", "delta", "epsilon", "gaussian_mu", "monotone_score_delta", "monotone_score_epsilon"]

KIND = "conditional: monotone score"
"""The kind of every answer here, which is no guarantee for other scores."""
RENYI_ORDERS = 1.0 + np.geomspace(0.05, 60.0, 40)
"""Orders of the Rényi form, from 1.05 to 61, evenly in the logarithm of `order - 1`."""
FORMS = ("hockey_stick", "renyi")
"""The two laws are compared by the hockey-stick divergence itself or through Rényi divergences."""
LEFT_OUT = 1e-9
"""Share of delta that may lie beyond the nodes, where l is taken to be monotone."""
FURTHER = 2.0
"""Standard deviations by which the nodes go beyond the place where l of the base is eps."""
CHUNK = 256
"""Rows that are worked on at once: their arrays stay in the processor's cache."""
PANELS = (32, 64, 256)
"""Panels of the sums for Rényi divergences; a row takes the least that makes them narrow enough."""


def monotone_score_epsilon(mu: Any, k: Law, delta: Any, *, form: str = "hockey_stick") -> Bounds:
    """eps of a selection among mu-Gaussian-DP candidates **if** the score is monotone in the likelihood ratio.

    The best of K draws of N(mu, 1) is compared with the best of K draws of N(0, 1), in both directions: to about 1e-9,
    through Rényi divergences to about 1e-4.  It must never be used as a guarantee for other scores.

    Parameters
    ----------
    mu : array_like > 0
        Of a Gaussian base sqrt(steps)/noise_multiplier.  A mu from a central limit theorem makes the answer asymptotic
        besides.
    k : Law
        The law of K; mu, k and delta broadcast.
    delta : array_like in (0, 1)
    form : {"hockey_stick", "renyi"}
        By the hockey-stick divergence directly, or through Rényi divergences, which is looser.

    Returns
    -------
    Bounds
        kind "conditional: monotone score", lower 0.

    References
    ----------
    Xiang, Wang and Wang (2024), Algorithm 3; README.md of this folder, "The condition of `monotone_score`" and
    "Computing `monotone_score`".

    >>> from jaxacct import selection
    >>> b = selection.monotone_score_epsilon(0.2681, selection.Geometric(0.1), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.144, 'conditional: monotone score')
    """
    delta = np.asarray(check("delta", delta, DELTA))
    mu, shape = _checked(mu, k, "delta", delta)
    if choice("form", form, FORMS) == "renyi":
        values = _by_orders("epsilon", mu, k, delta, shape)
        upper = np.asarray(epsilon_from_renyi(RENYI_ORDERS, values, np.broadcast_to(delta, shape)).upper)
    else:
        upper = _by_intervals("epsilon", mu, k, delta, shape)
    return Bounds(np.zeros(shape), upper, upper, KIND, np.where(np.isinf(upper), "width", "ok"), form)


def monotone_score_delta(mu: Any, k: Law, epsilon: Any, *, form: str = "hockey_stick") -> Bounds:
    """delta at eps >= 0 of a selection **if** the score is monotone in the likelihood ratio.

    Parameters
    ----------
    mu, k, form
        As for `monotone_score_epsilon`.
    epsilon : array_like >= 0

    Returns
    -------
    Bounds
        kind "conditional: monotone score", lower 0.

    References
    ----------
    As for `monotone_score_epsilon`.

    >>> from jaxacct import selection
    >>> round(float(selection.monotone_score_delta(0.2681, selection.Geometric(0.1), 1.14372).upper), 6)
    1e-05
    """
    epsilon = np.asarray(check("epsilon", epsilon, NON_NEGATIVE))
    mu, shape = _checked(mu, k, "epsilon", epsilon)
    if choice("form", form, FORMS) == "renyi":
        values = _by_orders("delta", mu, k, epsilon, shape)
        upper = np.asarray(delta_from_renyi(RENYI_ORDERS, values, np.broadcast_to(epsilon, shape)).upper)
    else:
        upper = np.minimum(_by_intervals("delta", mu, k, epsilon, shape), 1.0)
    return Bounds(np.zeros(shape), upper, upper, KIND, engine=form)


def epsilon(run: Mechanism, law: Law, delta: np.ndarray, relation: str) -> np.ndarray:
    """`monotone_score_epsilon` of a base that is Gaussian throughout."""
    common_shape(run, law, "delta", delta)
    return np.asarray(monotone_score_epsilon(gaussian_mu(run), law, delta).upper)


def delta(run: Mechanism, law: Law, epsilon: np.ndarray, relation: str) -> np.ndarray:
    """`monotone_score_delta` of a base that is Gaussian throughout."""
    common_shape(run, law, "epsilon", epsilon)
    return np.asarray(monotone_score_delta(gaussian_mu(run), law, epsilon).upper)


def gaussian_mu(run: Mechanism) -> np.ndarray:
    """mu of unsampled Gaussians, composed; InputError for any other base."""
    parts = components(run, "add_or_remove_one", "remove")
    if any(np.any(n > 0) for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)) or np.any(parts.mu2 == 0):
        raise InputError(
            "bound = 'monotone_score' needs a base of unsampled Gaussians; use bound='worst_case', or "
            "selection.monotone_score_epsilon with a mu of your own"
        )
    return np.sqrt(parts.mu2).reshape(batch_shape(run))


def _checked(mu: Any, k: Law, name: str, values: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    require_law("k", k)
    mu = np.asarray(check("mu", mu, POSITIVE))
    return mu, broadcast_shape({"mu": mu.shape, "k": k.shape, name: values.shape})


def _by_intervals(quantity: str, mu: np.ndarray, law: Law, given: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """eps at delta or delta at eps by `order_statistics`, over rows of like reach."""
    laws = law.flattened(shape)
    mu, given = (np.broadcast_to(x, shape).reshape(-1) for x in (mu, given))
    mean = np.broadcast_to(law.mean, shape).reshape(-1)
    if quantity == "epsilon":
        far = np.sqrt(2.0 * np.maximum(np.log(mean / LEFT_OUT) - np.log(given), 0.0))
    else:
        far = np.maximum(given / mu + 0.5 * mu + FURTHER, REACHES[1])
    reach = np.asarray(np.searchsorted(REACHES[:-1], far))
    solve = order_statistics.crossing if quantity == "epsilon" else order_statistics.divergence
    found = np.empty(mu.size)
    for index in _chunks(reach, CHUNK):
        line = order_statistics.line(laws.taken(index), mu[index], REACHES[reach[index[0]]])
        found[index] = solve(line, given[index])
    return found.reshape(shape)


def _by_orders(quantity: str, mu: np.ndarray, law: Law, given: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rényi divergences (O, *shape) at the first order and at those on the way to the best one, inf at the others.

    With c = order - 1 both `c R` and log kappa are convex in c.  So what is minimised over the orders, a convex
    function of c or one over c, has one valley, and the search of Fibonacci finds its least value.
    """
    laws = law.flattened(shape)
    mu, given = (np.broadcast_to(x, shape).reshape(-1) for x in (mu, given))
    values = np.full((RENYI_ORDERS.size, mu.size), np.inf)
    ends, count = order_renyi.panels(laws, mu, RENYI_ORDERS[-1])
    size = np.asarray(np.searchsorted(PANELS[:-1], count))
    for index in _chunks(size, CHUNK):
        rows = order_renyi.nodes(laws.taken(index), mu[index], ends[index], PANELS[size[index[0]]])
        values[:, index] = _searched(quantity, rows, given[index])
    return values.reshape(RENYI_ORDERS.shape + shape)


def _searched(quantity: str, rows: order_renyi.Nodes, given: np.ndarray) -> np.ndarray:
    """The divergences (O, R) that a search of Fibonacci for the best order evaluates, and inf elsewhere."""
    place = np.arange(given.size)
    values = np.full((RENYI_ORDERS.size, given.size), np.inf)

    def aim(k: np.ndarray) -> np.ndarray:
        inside = np.minimum(k, RENYI_ORDERS.size - 1)
        values[inside, place] = order_renyi.renyi(rows, RENYI_ORDERS[inside])
        c = RENYI_ORDERS[inside] - 1.0
        if quantity == "epsilon":
            found = values[inside, place] + (log_kappa(c) - np.log(given)) / c
        else:
            found = c * (values[inside, place] - given) + log_kappa(c)
        return np.where(k < RENYI_ORDERS.size, found, np.inf)

    aim(0 * place)  # the order next to 1, which decides whether eps is 0
    wide, narrow = 34, 21
    before = np.full(given.size, -1)
    one, two = aim(before + narrow), aim(before + wide)
    while narrow > 1:
        left = one <= two  # an inf on both sides is on the right of the valley
        before = np.where(left, before, before + narrow)
        wide, narrow = narrow, wide - narrow
        fresh = aim(before + np.where(left, narrow, wide))
        one, two = np.where(left, fresh, two), np.where(left, one, fresh)
    return values


def _chunks(kind: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The places of at most `size` rows of the same kind at a time."""
    for each in np.unique(kind):
        places: np.ndarray = np.flatnonzero(kind == each)
        yield from (places[begin : begin + size] for begin in range(0, places.size, size))
