"""Guarantees in closed form for selections and for report noisy max, and for candidates that differ in privacy.

The theorems for the truncated negative binomial law of K are of kind "bound".  They are looser than
`selection.bound_epsilon`, but need only one or two points of the candidates' profiles.

A selection needs one guarantee that holds for every candidate.  Candidates may differ in noise, sampling rate and
length of training.  Then either each candidate gets the noise that meets a common target, or the index of the candidate
is drawn by known weights and released, and the profiles are mixed [Koskela, Kulkarni 2023, section 4, appendix D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    RELATIONS,
    Constraint,
    InputError,
    broadcast_shape,
    check,
    check_flag,
    choice,
)
from jaxacct.mechanisms import Gaussian, Mechanism, PrivacyProfile, batch_shape, dp_sgd
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE
from jaxacct.representations.profile_conversions import Guarantee, gdp_from_profile
from jaxacct.representations.renyi_divergences import renyi_divergence
from jaxacct.selection.base_profile import under, upper_delta, upper_epsilon
from jaxacct.selection.law_of_k import TruncatedNegativeBinomial
from jaxacct.selection.named_bounds import least_growth

LINE_ORDERS = np.arange(2.0, 65.0)
"""Default Rényi orders of `line_noise_multiplier`: whole orders up to 64."""
ROUNDED_UP = 1.0 + 1e-13
"""Factor by which values are rounded up: it exceeds the rounding of every formula of this file."""


class Thresholds(NamedTuple):
    """Two points for every candidate's profile: delta(epsilon_1) <= delta_1 and delta(epsilon_2) <= delta_2."""

    epsilon_1: np.ndarray
    delta_1: np.ndarray
    epsilon_2: np.ndarray
    delta_2: np.ndarray


def two_point_selection(
    k: TruncatedNegativeBinomial,
    epsilon_1: ArrayLike,
    delta_1: ArrayLike,
    epsilon_2: ArrayLike | None = None,
    delta_2: ArrayLike | None = None,
) -> Guarantee:
    """Bound a selection whose candidates all meet two points, (eps_1, delta_1) and (eps_2, delta_2).

    The selection is `(eps_2 + (eta+1) log(e^{eps_1} + (1-gamma)/gamma delta_1), m delta_2)`-DP, m = E[K].  One point
    may serve as both.  Pure eps-DP (delta 0) becomes (eta+2) eps: for geometric K the 3 eps of Liu and Talwar.

    Parameters
    ----------
    k : TruncatedNegativeBinomial
        The law of K; all arguments broadcast.
    epsilon_1, epsilon_2 : array_like >= 0
    delta_1, delta_2 : array_like in [0, 1)
        Two guarantees of every candidate, each for both directions of the relation; the second defaults to the first.

    Returns
    -------
    Guarantee
        epsilon and delta of the selection, kind "bound".

    References
    ----------
    Koskela, Redberg and Wang (2024), Corollaries 5.3, 5.4 and 6.2.  Liu and Talwar (2019), Theorem 1.3.

    >>> from jaxacct import selection
    >>> round(float(two_point_selection(selection.Geometric(0.1), 0.5, 0.0).epsilon), 9)
    1.5
    """
    _require(k)
    if (epsilon_2 is None) != (delta_2 is None):
        raise InputError("epsilon_2 and delta_2 go together; give both, or neither to use one point twice")
    first, missed = np.asarray(check("epsilon_1", epsilon_1, NON_NEGATIVE)), check("delta_1", delta_1, DELTA_OR_ZERO)
    second = first if epsilon_2 is None else np.asarray(check("epsilon_2", epsilon_2, NON_NEGATIVE))
    left = missed if delta_2 is None else check("delta_2", delta_2, DELTA_OR_ZERO)
    missed = np.asarray(missed)
    with np.errstate(over="ignore"):
        odds = np.where(missed > 0.0, (1.0 - np.asarray(k.gamma)) / np.asarray(k.gamma), 0.0)
    grown = first + np.log1p(odds * missed * np.exp(-first))
    epsilon = (second + (np.asarray(k.eta) + 1.0) * grown) * ROUNDED_UP
    return _broadcast(epsilon, np.minimum(k.mean * np.asarray(left) * ROUNDED_UP, 1.0))


def thresholds(k: TruncatedNegativeBinomial, epsilon: float, delta: float, target_delta: float) -> Thresholds:
    """Choose two points for candidates that differ in noise, rate or length, from the profile of a Gaussian.

    Let delta_G be the profile of the (epsilon, delta)-DP Gaussian.  eps_1 minimises the sum
    `e^{eps_1} + (1-gamma)/gamma delta_G(eps_1)`, and delta_1 = delta_G(eps_1).  At eps_2 the profile delta_G is
    delta_2 = target_delta/E[K].  If every candidate meets both points, `two_point_selection` holds at target_delta.
    The certified engines decide whether a candidate meets them.

    Parameters
    ----------
    k : TruncatedNegativeBinomial
        One law of K.
    epsilon : float > 0
    delta, target_delta : float in (0, 1)

    Returns
    -------
    Thresholds
        epsilon_1, delta_1, epsilon_2 and delta_2.

    References
    ----------
    Koskela, Redberg and Wang (2024), Section 6.2.

    >>> from jaxacct import selection
    >>> k = selection.Geometric(0.1)
    >>> t = thresholds(k, 1.0, 1e-5, 1e-5)
    >>> round(float(two_point_selection(k, *t).epsilon), 3), round(float(two_point_selection(k, *t).delta), 7)
    (1.999, 1e-05)
    """
    _require(k)
    if k.shape:
        raise InputError(f"k is a batch of shape {k.shape} and must be one law here; call once for each")
    at, level = check("epsilon", epsilon, POSITIVE), check("delta", delta, DELTA)
    base = Gaussian(1.0 / gdp_from_profile(at, level).lower)
    first, _ = least_growth(base, k, "add_or_remove_one")
    second = np.asarray(check("target_delta", target_delta, DELTA)) / k.mean
    missed, last = upper_delta(base, first, "add_or_remove_one"), upper_epsilon(base, second, "add_or_remove_one")
    return Thresholds(first, missed, last, second / ROUNDED_UP**2)


def noisy_max_renyi(
    noise_multiplier: ArrayLike, candidates: ArrayLike, order: ArrayLike, *, monotone: bool = False
) -> np.ndarray:
    """Bound the Rényi divergence of report noisy max with Gaussian noise: `a D^2/(2 sigma^2) + log(m)/(a-1)`.

    Parameters
    ----------
    noise_multiplier : array_like > 0
        Standard deviation of the noise, divided by the largest change of a score by one record.
    candidates : array_like of whole numbers >= 1
        m.
    order : array_like > 1
        The order a; all broadcast.
    monotone : bool
        Whether a record moves all scores in one direction: D is then 1, otherwise 2.

    Returns
    -------
    numpy.ndarray

    References
    ----------
    Zhu and Wang (2022), Theorem 8.

    >>> float(noisy_max_renyi(2.0, 1, 4.0).round(9))
    2.0
    """
    check_flag("monotone", monotone, "say whether all scores move alike")
    sigma = np.asarray(check("noise_multiplier", noise_multiplier, POSITIVE))
    m = np.asarray(check("candidates", candidates, COUNT))
    a = np.asarray(check("order", order, Constraint("use an order above 1", 1, lower_open=True)))
    return (a * (1.0 if monotone else 4.0) / (2.0 * sigma**2) + np.log(m) / (a - 1.0)) * ROUNDED_UP


def _broadcast(epsilon: Any, delta: Any) -> Guarantee:
    """Return the Guarantee of epsilon and delta, broadcast to one shape."""
    epsilon, delta = np.broadcast_arrays(epsilon, delta)
    return Guarantee(epsilon, delta)


def _require(k: object) -> None:
    """Raise InputError for anything but a truncated negative binomial law."""
    if not isinstance(k, TruncatedNegativeBinomial):
        raise InputError(f"k = {k!r:.60} must be a truncated negative binomial law; use selection.bound_epsilon")


def candidates_profile(
    candidates: Sequence[Mechanism],
    epsilon: ArrayLike,
    weights: ArrayLike | None = None,
    relation: str = "add_or_remove_one",
) -> PrivacyProfile:
    """Return one guarantee for candidates drawn at random: a mechanism given by its profile at points `epsilon`.

    Without weights the guarantee is the pointwise maximum of the candidates' profiles.  It holds for every rule of
    drawing that does not depend on the data.  With weights it is `sum_j w_j delta_j(eps)`, in each direction by itself.
    It then also covers the release of the index.

    Parameters
    ----------
    candidates : sequence of Mechanism
        One configuration each.
    epsilon : array_like, shape (G,)
        Values >= 0, ascending by 1e-9 or more.
    weights : array_like, optional
        The probability with which each candidate is drawn; they sum to 1.
    relation : {"add_or_remove_one", "replace_one", "zero_out"}

    Returns
    -------
    PrivacyProfile

    References
    ----------
    Koskela and Kulkarni (2023), Lemma 1 (for Rényi divergences); README.md of this folder, "Candidates that differ in
    their privacy".

    >>> import jaxacct as ja
    >>> two = [ja.Gaussian(2.0), ja.Gaussian(4.0)]
    >>> worst, mixed = candidates_profile(two, [0.0, 1.0]), candidates_profile(two, [0.0, 1.0], [0.5, 0.5])
    >>> bool(worst.delta[1] >= 1.9 * mixed.delta[1])
    True
    """
    if not candidates:
        raise InputError("candidates is empty; give at least one mechanism")
    for index, one in enumerate(candidates):
        require_mechanism(f"candidates[{index}]", one)
        if batch_shape(one):
            raise InputError(
                f"candidates[{index}] is a batch of shape {batch_shape(one)}; give its elements one by one"
            )
    grid = np.atleast_1d(check("epsilon", epsilon, NON_NEGATIVE))
    choice("relation", relation, RELATIONS)
    if relation in ("add_one", "remove_one"):
        raise InputError(f"relation = {relation!r} has one direction; use 'add_or_remove_one' or 'replace_one'")
    runs = [under(one, relation)[0] for one in candidates]
    each = np.array([[upper_delta(run, grid, name) for name in ("remove_one", "add_one")] for run in runs])
    if weights is None:
        return PrivacyProfile(grid, *np.max(each, axis=0))
    share = np.atleast_1d(check("weights", weights, PROBABILITY))
    if share.shape != (len(candidates),) or abs(float(np.sum(share)) - 1.0) > 1e-12:
        raise InputError(f"weights must be {len(candidates)} numbers that sum to 1; give the probabilities of drawing")
    return PrivacyProfile(grid, *np.minimum(np.tensordot(share, each, axes=1) * (1.0 + 1e-12), 1.0))


def line_noise_multiplier(
    slope: ArrayLike, sampling_probability: ArrayLike, steps: ArrayLike, orders: ArrayLike = LINE_ORDERS
) -> np.ndarray:
    """Find the least noise for which DP-SGD has Rényi divergences of at most `slope * order` at all orders.

    Random search then needs one Rényi guarantee, the line: candidates may be drawn from any distribution of (sampling
    probability, steps), each with its own noise.

    Parameters
    ----------
    slope : array_like > 0
    sampling_probability : array_like in (0, 1]
    steps : array_like of whole numbers
        All three broadcast.
    orders : array_like > 1, shape (O,)
        The orders that will be used later.

    Returns
    -------
    numpy.ndarray
        Noise multipliers from a bisection up to 1e6, each of which meets the line; NaN where none meets it.

    References
    ----------
    Koskela and Kulkarni (2023), appendix D.

    >>> float(line_noise_multiplier(0.5, 1.0, 4).round(6))
    2.0
    """
    c = np.asarray(check("slope", slope, POSITIVE))
    q = np.asarray(check("sampling_probability", sampling_probability, PROBABILITY))
    orders = np.atleast_1d(check("orders", orders, POSITIVE))
    if np.any(orders <= 1.0):
        raise InputError(f"orders = {float(np.min(orders))!r} must be > 1; use orders above 1")
    shape = broadcast_shape({"slope": c.shape, "sampling_probability": q.shape, "steps": np.shape(steps)})
    along = orders.reshape(-1, *(1,) * len(shape))

    def meets(log_sigma: np.ndarray) -> np.ndarray:
        found = renyi_divergence(dp_sgd(np.exp(log_sigma), q, steps), along).upper
        return np.all(found <= c * along, axis=0)

    low, high = (np.full(shape, np.log(end)) for end in NOISE_RANGE)
    enough, all_enough = meets(high), meets(low)
    for _ in range(32):
        middle = 0.5 * (low + high)
        good = meets(middle)
        low, high = np.where(good, low, middle), np.where(good, middle, high)
    return np.where(enough, np.exp(np.where(all_enough, np.log(NOISE_RANGE[0]), high)), np.nan)[()]
