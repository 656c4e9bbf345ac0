"""Algorithm 3 of Xiang, Wang, Wang 2024: the leak of a selection whose score is monotone in the likelihood ratio.

**Not a bound for general scores**: for a base of (1, 1e-5)-DP and geometric K of mean 10 it says 1.144, and the score
|x - 1.67| leaks 1.531.  So every answer is of kind "conditional: monotone score"
(README.md of this folder, "The condition of `monotone_score`").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import DELTA, NON_NEGATIVE, POSITIVE, InputError, broadcast_shape, check, choice
from jaxacct.kernels import order_statistics
from jaxacct.kernels.order_statistics import REACHES
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.representations.renyi_conversions import delta_from_renyi, epsilon_from_renyi
from jaxacct.selection.base_profile import gaussian_mu
from jaxacct.selection.law_of_k import Law, require_law

KIND = "conditional: monotone score"
"""The kind of every answer here, which is no guarantee for other scores."""
RENYI_ORDERS = 1.0 + np.geomspace(0.05, 60.0, 40)
"""Orders of the Rényi form, from 1.05 to 61, evenly in the logarithm of `order - 1`."""
CHUNK = 256
"""Rows computed at once: their arrays stay in the processor's cache."""
PANELS = (32, 64, 256)
"""Numbers of panels of the sums for Rényi divergences; a row takes the first for which panels are narrow enough."""


def monotone_score_epsilon(mu: ArrayLike, k: Law, delta: ArrayLike, *, form: str = "hockey_stick") -> Bounds:
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
    found = _answer("epsilon", mu, k, np.asarray(check("delta", delta, DELTA)), form)
    return Bounds(np.zeros(found.shape), found, found, KIND, np.where(np.isinf(found), "width", "ok"), form)


def monotone_score_delta(mu: ArrayLike, k: Law, epsilon: ArrayLike, *, form: str = "hockey_stick") -> Bounds:
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
    found = np.minimum(_answer("delta", mu, k, np.asarray(check("epsilon", epsilon, NON_NEGATIVE)), form), 1.0)
    return Bounds(np.zeros(found.shape), found, found, KIND, engine=form)


def upper(quantity: str, run: Mechanism, law: Law, given: np.ndarray, relation: str) -> np.ndarray:
    """`monotone_score_epsilon` or `monotone_score_delta` of a base that is Gaussian throughout."""
    if (mu := gaussian_mu(run)) is None:
        raise InputError(
            "bound = 'monotone_score' needs a base of unsampled Gaussians; use bound='worst_case', or "
            "selection.monotone_score_epsilon with a mu of your own"
        )
    ask = monotone_score_epsilon if quantity == "epsilon" else monotone_score_delta
    return np.asarray(ask(mu.reshape(batch_shape(run)), law, given).upper)


def _answer(quantity: str, mu: Any, k: Law, given: np.ndarray, form: str) -> np.ndarray:
    require_law("k", k)
    mu = np.asarray(check("mu", mu, POSITIVE))
    name = "delta" if quantity == "epsilon" else "epsilon"
    shape = broadcast_shape({"mu": mu.shape, "k": k.shape, name: given.shape})
    if choice("form", form, ("hockey_stick", "renyi")) == "hockey_stick":
        return _by_intervals(quantity, mu, k, given, shape)
    convert = epsilon_from_renyi if quantity == "epsilon" else delta_from_renyi
    values = _by_orders(mu, k, shape)
    return np.asarray(convert(RENYI_ORDERS, values, np.broadcast_to(given, shape)).upper)


def _by_intervals(quantity: str, mu: np.ndarray, law: Law, given: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """eps at delta or delta at eps by `order_statistics`, over rows of like reach."""
    laws = law.flattened(shape)
    mu, given = (np.broadcast_to(x, shape).reshape(-1) for x in (mu, given))
    mean = np.broadcast_to(law.mean, shape).reshape(-1)
    if quantity == "epsilon":
        # 1e-9 of delta may lie beyond the nodes, where l is taken to be monotone
        far = np.sqrt(2.0 * np.maximum(np.log(mean / 1e-9) - np.log(given), 0.0))
    else:
        far = np.maximum(given / mu + 0.5 * mu + 2.0, REACHES[1])  # somewhat beyond where l of the base is eps
    reach = np.asarray(np.searchsorted(REACHES[:-1], far))
    solve = order_statistics.crossing if quantity == "epsilon" else order_statistics.divergence
    found = np.empty(mu.size)
    for index in _chunks(reach, CHUNK):
        line = order_statistics.line(laws.taken(index), mu[index], REACHES[reach[index[0]]])
        found[index] = solve(line, given[index])
    return found.reshape(shape)


def _by_orders(mu: np.ndarray, law: Law, shape: tuple[int, ...]) -> np.ndarray:
    """Rényi divergences (O, *shape)."""
    laws, mu = law.flattened(shape), np.broadcast_to(mu, shape).reshape(-1)
    values = np.empty((RENYI_ORDERS.size, mu.size))
    ends, count = order_statistics.panels(laws, mu, RENYI_ORDERS[-1])
    size = np.asarray(np.searchsorted(PANELS[:-1], count))
    for index in _chunks(size, CHUNK):
        rows = order_statistics.nodes(laws.taken(index), mu[index], ends[index], PANELS[size[index[0]]])
        values[:, index] = [order_statistics.renyi(rows, np.full(index.size, order)) for order in RENYI_ORDERS]
    return values.reshape(RENYI_ORDERS.shape + shape)


def _chunks(kind: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The places of at most `size` rows of the same kind at a time."""
    for each in np.unique(kind):
        places: np.ndarray = np.flatnonzero(kind == each)
        yield from (places[begin : begin + size] for begin in range(0, places.size, size))
