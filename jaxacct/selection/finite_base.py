"""The exact output law of a selection whose base has finitely many outcomes."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.validation import PROBABILITY, InputError, check
from jaxacct.selection.law_of_k import Law, evaluated

__all__ = ["output_law"]


def output_law(probabilities: Any, k: Law) -> np.ndarray:
    """Probabilities with which "run K times, release the best" releases each outcome of a finite base.

    `Pr[y] = sum_k Pr[K = k] (F(<= y)^k - F(< y)^k) = phi(F(<= y)) - phi(F(< y))`, F the distribution function of the
    base along the order of the scores, one outcome per score.  Accurate to 1e-14 absolutely.

    Parameters
    ----------
    probabilities : array_like, shape (..., n)
        Of the base's outcomes, in ascending order of their score; they sum to 1 (to 1e-13).
    k : Law
        One law of K.

    Returns
    -------
    numpy.ndarray, shape (..., n + 1)
        First the probability that K = 0 and nothing is released, then that of each outcome.

    Raises
    ------
    InputError
        The probabilities do not sum to 1, or k is not one law.

    References
    ----------
    Xiang, Wang and Wang (2024), Theorem 2.

    >>> from jaxacct import selection
    >>> output_law([0.5, 0.5], selection.PointMass(2)).tolist()
    [0.0, 0.25, 0.75]
    """
    each = np.atleast_1d(check("probabilities", probabilities, PROBABILITY))
    bad = np.abs(np.sum(each, axis=-1) - 1.0) > 1e-13
    if np.any(bad):
        raise InputError("probabilities must sum to 1 along the last axis; divide them by their sum")
    if not isinstance(k, Law) or k.shape:
        raise InputError(f"k = {k!r:.60} must be one law of K; use one such as selection.Geometric(0.1)")
    above = np.cumsum(each[..., ::-1], axis=-1)[..., ::-1]  # 1 - F(< y)
    y = np.concatenate([np.ones((*each.shape[:-1], 1)), above[..., 1:], np.zeros((*each.shape[:-1], 1))], axis=-1)
    value = evaluated(k, np.clip(y, 0.0, 1.0))[0]
    return np.concatenate([value[..., :1], np.maximum(np.diff(value, axis=-1), 0.0)], axis=-1)
