"""How many candidates are trained: K of them, or always the same number, so that the running time reveals nothing."""

from __future__ import annotations

import math

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.selection import Categorical, Law

__all__ = ["fits", "numbers_to_train", "truncated"]


def truncated(law: Law, most: int) -> Categorical:
    """The law of K given K <= most, with its exact probabilities: for `pad`.

    Parameters
    ----------
    law : Law
        One law of K.
    most : int

    Returns
    -------
    Categorical

    Raises
    ------
    InputError
        A batch of laws, or a `most` that K hardly ever stays below.

    >>> from jaxacct import selection
    >>> truncated(selection.Geometric(0.5), 2).probabilities.round(6).tolist()
    [0.0, 0.666667, 0.333333]
    """
    number = int(check("most", most, COUNT))
    if law.shape:
        raise InputError(f"law of shape {law.shape} must be one law of K; truncate its elements one by one")
    mass = np.asarray(law.probability(np.arange(number + 1)), np.float64)
    total = math.fsum(mass)
    if total < 1e-3:
        raise InputError(f"most = {number}: K is at most that with probability {total:.2g}; raise it")
    return Categorical(mass / total)


def fits(law: Law, pad: int) -> None:
    """InputError unless K <= pad for certain."""
    if float(law.quantile(1.0 - ROUNDOFF)) > pad or not math.isclose(
        math.fsum(law.probability(np.arange(pad + 1))), 1.0
    ):
        raise InputError(f"pad = {pad}: K can be larger; use tuning.truncated(law, {pad}) as the law of K")


def numbers_to_train(law: Law, pad: int | None) -> tuple[int, int]:
    """(K, how many candidates are trained)."""
    if pad is not None:
        fits(law, pad)
    count = law.sample()
    return count, count if pad is None else pad
