"""How many records of a group are in a batch: binomial and hypergeometric laws, each probability within a unit.

Decimal arithmetic of 60 digits has no underflow to speak of, so that every recursion below starts anywhere.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

import numpy as np

from jaxacct.core.validation import InputError

__all__ = ["LARGEST_GROUP", "binomial", "hypergeometric"]

LARGEST_GROUP = 1000
"""Most records of a group."""
MOST_TERMS = 20_000
"""Most values of a count that are kept."""
LEAST = Decimal("1e-300")
"""Probabilities below this, all together, are left out: they are added to the bound of delta as if they were lost."""
_DIGITS = Context(prec=60)


def binomial(trials: int, chance: Decimal) -> np.ndarray:
    """Pr[Bin(trials, chance) = j] for j = 0, 1, ..., up to where less than 1e-300 is left.

    >>> binomial(2, Decimal("0.5")).tolist()
    [0.25, 0.5, 0.25]
    """
    with localcontext(_DIGITS):
        if chance >= 1:
            return np.eye(trials + 1)[trials]
        if chance <= 0:
            return np.ones(1)
        odds, rest = chance / (1 - chance), (1 - chance) ** trials
        terms = [rest]
        for j in range(trials):
            if terms[-1] * (trials + 1) < LEAST and j > chance * trials:
                break
            if j >= MOST_TERMS:
                raise InputError(
                    f"{float(chance * trials):.6g} contributions of one record or group in a batch are expected; "
                    f"so many are not counted; that must stay below about {MOST_TERMS}"
                )
            terms.append(terms[-1] * (trials - j) / (j + 1) * odds)
        return np.array([float(term) for term in terms])


def hypergeometric(size: int, group: int, batch: int) -> np.ndarray:
    """The chance that j of `group` records are among `batch` of `size`, drawn without replacement, j = 0..group.

    >>> hypergeometric(4, 2, 2).round(12).tolist()
    [0.166666666667, 0.666666666667, 0.166666666667]
    """
    first = max(0, group + batch - size)
    last = min(group, batch)
    with localcontext(_DIGITS):
        terms = [Decimal(1)]
        for j in range(first, last):
            terms.append(terms[-1] * ((group - j) * (batch - j)) / ((j + 1) * (size - group - batch + j + 1)))
        total = sum(terms)
        found = np.zeros(group + 1)
        found[first : last + 1] = [float(term / total) for term in terms]
    return found
