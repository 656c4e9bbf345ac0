"""Candidates that differ in what affects privacy: noise, sampling rate, length of training.

A selection needs one guarantee for every candidate that may be drawn.  Either every candidate is given noise to meet
a common target and the worst of the grid counts (grid and random search of Koskela and Kulkarni 2023, section 4 and
appendix D), or the index is drawn by known weights and released with the output, and the profiles are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    RELATIONS,
    InputError,
    broadcast_shape,
    check,
    choice,
)
from jaxacct.mechanisms import Mechanism, PrivacyProfile, batch_shape, dp_sgd
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE
from jaxacct.representations.renyi_divergences import renyi_divergence
from jaxacct.selection.base_profile import under, upper_delta

LINE_ORDERS = np.arange(2.0, 65.0)
"""Orders at which the line bounds Rényi divergences unless others are given: whole orders up to 64."""


def candidates_profile(
    candidates: Sequence[Mechanism],
    epsilon: ArrayLike,
    weights: ArrayLike | None = None,
    relation: str = "add_or_remove_one",
) -> PrivacyProfile:
    """One guarantee for candidates drawn at random, as a mechanism through points at `epsilon`.

    Without weights it is the pointwise maximum of the candidates' profiles, for whatever rule of drawing that does not
    depend on the data.  With weights it is `sum_j w_j delta_j(eps)`, direction by direction, also when the index is
    released.

    Parameters
    ----------
    candidates : sequence of Mechanism
        One configuration each.
    epsilon : array_like, shape (G,)
        Values >= 0, ascending by 1e-9 or more.
    weights : array_like, optional
        One per candidate, >= 0 and summing to 1: the probabilities with which the candidate is drawn.
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
    """Random search: the least noise for which DP-SGD has Rényi divergences at most `slope * order` at all orders.

    Candidates drawn from any distribution of (sampling probability, steps), each with its own noise, then share one
    Rényi guarantee, the line.  A selection among them can be bounded by it.

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
        Noise multipliers, the safe ends of bisections up to 1e6; NaN where none is enough.

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
