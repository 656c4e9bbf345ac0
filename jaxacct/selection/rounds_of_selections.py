"""Rounds of selections that follow each other, each round's winner public: Bayesian optimisation in batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.validation import COUNT, DELTA, InputError, check_one
from jaxacct.mechanisms import Mechanism, compose, repeat
from jaxacct.selection.law_families import Law, PointMass, Poisson
from jaxacct.selection.law_of_k import require_law
from jaxacct.selection.mechanism import select

__all__ = ["rounds"]

ONE_DELTA = "the cheaper mechanism is chosen for one delta"
"""The remedy where delta is no single number."""


def rounds(
    run: Mechanism,
    k: Law | Sequence[Law],
    count: int | None = None,
    *,
    target_delta: float,
    relation: str = "add_or_remove_one",
    top: int = 1,
) -> Mechanism:
    """Several selections after each other: in round r the best of K_r candidates, K_r from a law of its own, is public.

    In a round the candidates are i.i.d. from one law of configurations, which may follow the *public* winners of the
    rounds before in any way.  Then each round is one selection for whatever came before, and the whole is their
    composition, of kind "bound".  It also costs at most what adaptive candidates cost, `sum_r K_r` of them.  Of the two
    mechanisms the one with the smaller epsilon at target_delta is returned; either holds at every delta.

    Parameters
    ----------
    run : Mechanism
        One candidate.
    k : Law, or sequence of Law
        The law of every round's K_r, or those of the rounds.  Fresh draws, all secret.
    count : int
        The number of rounds, where k is one law.
    target_delta : float in (0, 1)
    relation : str
        As for `ja.epsilon`.
    top : int
        How many of the best are public in each round, as for `select`.

    Returns
    -------
    Mechanism

    Raises
    ------
    InputError
        Another type, a batch, no rounds, or a number of rounds where k is a sequence.

    References
    ----------
    README.md of this folder, "Rounds".

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> whole = selection.rounds(ja.Gaussian(3.73), selection.Geometric(0.25), 2, target_delta=1e-5)
    >>> b = ja.epsilon(whole, 1e-5)
    >>> round(float(b.upper), 2), b.kind
    (2.12, 'bound')
    """
    delta = check_one("target_delta", target_delta, DELTA, ONE_DELTA)
    number = int(check_one("count", 1 if count is None else count, COUNT, ONE_DELTA))
    if not isinstance(k, Sequence):
        require_law("k", k)
    laws = [k] * number if isinstance(k, Law) else list(k)
    if not laws or (count is None) == isinstance(k, Law):
        raise InputError("rounds are one law of K and a count, or a sequence of laws without one; give either")
    for law in laws:
        require_law("k", law)
        if law.shape:
            raise InputError(f"k has a law of shape {law.shape}; give one law of K for each round")
    parts = Counter(laws).items()
    each: list[Any] = [repeat(select(run, law, top=top), times) for law, times in parts]
    one_by_one = each[0] if len(each) == 1 else compose(*each)
    together = _sum_of(laws)
    if together is None:
        return one_by_one
    adaptive = select(run, together, candidates="adaptive")
    costs = [account.epsilon(some, delta, relation=relation).upper for some in (one_by_one, adaptive)]
    if np.ndim(costs[0]):
        raise InputError(f"run is a batch of shape {np.shape(costs[0])}; give one mechanism")
    return adaptive if costs[1] < costs[0] else one_by_one


def _sum_of(laws: Sequence[Law]) -> Law | None:
    """The law of K_1 + K_2 + ...: for laws whose sum is one of theirs; None for others.

    For negative binomial laws, whose tails are heavy, the sum costs more than the rounds do.
    """
    fixed = [law for law in laws if type(law) is PointMass]
    if len(fixed) == len(laws):
        return PointMass(math.fsum(float(law.repetitions) for law in fixed))
    if all(type(law) is Poisson for law in laws):
        # the mean of the sum rounded up: D does not decrease in the mean
        return Poisson(math.nextafter(math.fsum(float(law.mean) for law in laws), math.inf))
    return None
