"""Algorithm 3 of Xiang, Wang, Wang 2024: what a selection leaks when its score is monotone in the likelihood ratio.

**Not a bound for general scores**: for a base of (1, 1e-5)-DP and geometric K of mean 10 it says 1.144, and the score
|x - 1.67| leaks 1.531.  So every answer is of kind "conditional: monotone score"
(README.md of this folder, "The condition of monotone_score").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.kernels import order_statistics
from jaxacct.mechanisms import Mechanism, batch_shape, components
from jaxacct.representations.renyi_conversions import delta_from_renyi, epsilon_from_renyi
from jaxacct.selection.base_profile import common_shape
from jaxacct.selection.law_of_k import Law, require_law
from jaxacct.validation import DELTA, NON_NEGATIVE, POSITIVE, InputError, broadcast_shape, check, choice

__all__ = ["KIND", "delta", "epsilon", "gaussian_mu", "monotone_score_delta", "monotone_score_epsilon"]

KIND = "conditional: monotone score"
"""The kind of every answer here, which is no guarantee for other scores."""
RENYI_ORDERS = 1.0 + np.geomspace(0.05, 60.0, 40)
"""Orders of the Rényi form, from 1.05 to 61, evenly in the logarithm of `order - 1`."""
FORMS = ("hockey_stick", "renyi")
"""The two laws are compared by the hockey-stick divergence itself or through Rényi divergences."""
LARGEST_EPS = 700.0
"""Largest eps that is searched: its exp is finite."""


def monotone_score_epsilon(mu: Any, k: Law, delta: Any, *, form: str = "hockey_stick") -> Bounds:
    """eps of a selection among mu-Gaussian-DP candidates **if** the score is monotone in the likelihood ratio.

    The best of K draws of N(mu, 1) is compared with the best of K draws of N(0, 1), in both directions, by trapezoid
    sums: to about 1e-4.  It must never be used as a guarantee for other scores.

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

    Raises
    ------
    InputError
        Invalid values.

    References
    ----------
    Xiang, Wang and Wang (2024), Algorithm 3; README.md of this folder, "The condition of monotone_score".

    >>> from jaxacct import selection
    >>> b = selection.monotone_score_epsilon(0.2681, selection.Geometric(0.1), 1e-5)
    >>> round(float(b.upper), 3), b.kind
    (1.144, 'conditional: monotone score')
    """
    delta = np.asarray(check("delta", delta, DELTA))
    mu, shape = _checked(mu, k, "delta", delta)
    if choice("form", form, FORMS) == "renyi":
        upper = np.asarray(epsilon_from_renyi(RENYI_ORDERS, _curve(mu, k, shape), np.broadcast_to(delta, shape)).upper)
    else:
        highest = 2.0 * mu * (40.0 + mu) * np.maximum(1.0, np.minimum(k.quantile(0.999), 1e6))
        upper = _run("epsilon", k, shape, mu, delta, np.minimum(highest, LARGEST_EPS))
        upper = np.where(upper < np.minimum(np.broadcast_to(highest, shape), LARGEST_EPS) * (1 - 1e-9), upper, np.inf)
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

    Raises
    ------
    InputError
        Invalid values.

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
        upper = np.asarray(delta_from_renyi(RENYI_ORDERS, _curve(mu, k, shape), np.broadcast_to(epsilon, shape)).upper)
    else:
        upper = _run("hockey_stick", k, shape, mu, epsilon)
        upper = np.where(upper <= 1.0, upper, 1.0)
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


def _curve(mu: np.ndarray, law: Law, shape: tuple[int, ...]) -> np.ndarray:
    """Rényi divergences (O, *shape)."""
    orders = RENYI_ORDERS.reshape(-1, *(1,) * len(shape))
    return np.maximum(_run("renyi", law, RENYI_ORDERS.shape + shape, mu, orders), 0.0)


def _run(name: str, law: Law, shape: tuple[int, ...], *numbers: np.ndarray) -> np.ndarray:
    """A kernel over the flattened batch."""
    flat = [np.broadcast_to(x, shape).reshape(-1) for x in numbers]
    with jax.enable_x64():
        found = _kernel(name)(law.flattened(shape), *flat)
    return np.asarray(found).reshape(shape)


@cache
def _kernel(name: str) -> Callable[..., Any]:
    each = getattr(order_statistics, name)
    return jax.jit(lambda law, *numbers: jax.lax.map(lambda a: each(a[0].generating, *a[1]), (law, numbers)))
