"""Upper bounds of what a selection leaks, by name: `selection.bound_epsilon` and `selection.bound_delta`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import DELTA, NON_NEGATIVE, check, choice, refuse_tracers
from jaxacct.engines import backend
from jaxacct.mechanisms import RELATIONS, Mechanism
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.selection import envelope_bound, monotone_score, published_profile_bounds, published_renyi_bounds
from jaxacct.selection.base_profile import SAYS_NOTHING, common_shape, under
from jaxacct.selection.law_of_k import Law

__all__ = ["BOUNDS", "Bound", "bound_delta", "bound_epsilon"]


class Bound(NamedTuple):
    """How a bound is evaluated, and for which laws.

    `epsilon` and `delta` are functions of (base, law of K, values, relation).
    """

    epsilon: Callable[[Mechanism, Law, np.ndarray, str], np.ndarray]
    delta: Callable[[Mechanism, Law, np.ndarray, str], np.ndarray]
    kind: str = "bound"
    laws: tuple[type[Law], ...] = (Law,)


BOUNDS = {
    "envelope": Bound(envelope_bound.epsilon, envelope_bound.delta),
    "privacy_profile": Bound(
        published_profile_bounds.epsilon, published_profile_bounds.delta, laws=published_profile_bounds.LAWS
    ),
    "renyi": Bound(published_renyi_bounds.epsilon, published_renyi_bounds.delta, laws=published_renyi_bounds.LAWS),
    "monotone_score": Bound(monotone_score.epsilon, monotone_score.delta, kind=monotone_score.KIND),
}
"""The bounds by the names that `bound_epsilon`, `bound_delta` and `select` take."""
_TRUE_FOR_ANY_SCORE = [name for name, bound in BOUNDS.items() if bound.kind == "bound"]
"""Those that hold whatever the score: "auto" takes the smallest of them."""


def bound_epsilon(
    run: Mechanism, k: Law, delta: Any, *, bound: str = "auto", relation: str = "add_or_remove_one"
) -> Bounds:
    """eps for which "run K times, release the best" is (eps, delta)-DP, by a bound on the leak of any score.

    Parameters
    ----------
    run : Mechanism
        The base; it broadcasts with k and delta.
    k : Law
        The law of K.
    delta : array_like in (0, 1)
    bound : {"auto", "envelope", "privacy_profile", "renyi", "monotone_score"}
        "envelope" is for every law of K, and near the exact worst case for random K.  "privacy_profile" and "renyi" are
        published theorems for some laws.  "monotone_score" is Algorithm 3 of Xiang, Wang and Wang, which is only true
        for scores that are monotone in the likelihood ratio.  "auto" is the smallest of the first three that applies,
        named in `engine`.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "bound" (or "conditional: monotone score"), lower 0; inf with status "width" where the bound says nothing.
        It holds under README.md of this folder, "What every guarantee here assumes".

    Raises
    ------
    InputError
        Invalid values, or a law that the bound does not cover.

    References
    ----------
    The envelope: README.md of this folder, "The envelope".  Koskela, Redberg and Wang (2024), Theorems 5.2 and 5.7,
    Corollary 5.8.  Papernot and Steinke (2022).  Xiang, Wang and Wang (2024), Algorithm 3.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = selection.bound_epsilon(ja.Gaussian(3.73), selection.Geometric(0.1), 1e-5, bound="privacy_profile")
    >>> round(float(b.upper), 4), b.kind
    (1.9992, 'bound')
    """
    target = np.asarray(check("delta", delta, DELTA))
    upper, engine = _evaluated(run, k, "delta", target, bound, relation)
    status = np.where(np.isinf(upper), "width", np.where(upper == 0.0, "zero", "ok"))
    return Bounds(np.zeros(upper.shape), upper, upper, _kind(bound), status, engine)


def bound_delta(
    run: Mechanism, k: Law, epsilon: Any, *, bound: str = "auto", relation: str = "add_or_remove_one"
) -> Bounds:
    """delta at eps >= 0 of "run K times, release the best", by a bound on the leak of any score.

    Parameters
    ----------
    run : Mechanism
        The base; it broadcasts with k and epsilon.
    k : Law
        The law of K.
    epsilon : array_like >= 0
    bound, relation : str
        As for `bound_epsilon`.

    Returns
    -------
    Bounds
        kind "bound" (or "conditional: monotone score"), lower 0.

    Raises
    ------
    InputError
        Invalid values, or a law that the bound does not cover.

    References
    ----------
    As for `bound_epsilon`.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = selection.bound_delta(ja.Gaussian(3.73), selection.Poisson(10), 2.3)
    >>> b.engine, bool(b.upper < 1e-5)
    ('envelope', True)
    """
    at = np.asarray(check("epsilon", epsilon, NON_NEGATIVE))
    upper, engine = _evaluated(run, k, "epsilon", at, bound, relation)
    return Bounds(np.zeros(upper.shape), upper, upper, _kind(bound), engine=engine)


def _evaluated(
    run: Mechanism, k: Law, name: str, values: np.ndarray, bound: str, relation: str
) -> tuple[np.ndarray, np.ndarray]:
    """Upper ends of the other quantity, and which bound gave them."""
    require_mechanism("run", run)
    refuse_tracers("selection.bound_" + ("epsilon" if name == "delta" else "delta"), "the kernels", run=run, k=k)
    choice("relation", relation, RELATIONS)
    choice("bound", bound, ("auto", *BOUNDS))
    run, relation = under(run, relation)
    shape = common_shape(run, k, name, values)
    names = [bound] if bound != "auto" else [one for one in _TRUE_FOR_ANY_SCORE if isinstance(k, BOUNDS[one].laws)]
    most = SAYS_NOTHING["epsilon" if name == "delta" else "delta"]
    best, engine = np.full(shape, most), np.full(shape, names[0], dtype="<U16")
    for one in names:
        solve = BOUNDS[one].epsilon if name == "delta" else BOUNDS[one].delta
        with backend.job(best.size):
            found = np.broadcast_to(solve(run, k, values, relation), shape)
        found = np.where((found >= 0.0) & (found <= most), found, most)  # what is not a number says nothing
        engine = np.where(found < best, one, engine)
        best = np.minimum(best, found)
    return best, engine


def _kind(bound: str) -> str:
    return "bound" if bound == "auto" else BOUNDS[bound].kind
