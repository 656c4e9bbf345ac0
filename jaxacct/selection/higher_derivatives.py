"""Derivatives of the generating function of K beyond the first: those of every law here are phi' of another law."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.selection.law_families import Binomial, Categorical, PointMass, Poisson, TruncatedNegativeBinomial
from jaxacct.selection.law_of_k import Law, evaluated

__all__ = ["Derivative", "derivative", "probability_of"]

LEAST = 1e-290
"""Below this float64 may have lost a derivative, which then counts as this much: 0 is for K < j, always."""
RELATIVE_ERROR = 4e-12
"""More than the relative error of a derivative."""


class Derivative(NamedTuple):
    """`phi^(j) = scale psi'`, psi the generating function of ``law``; scale 0 where K is always below j."""

    scale: float
    law: Law


def derivative(law: Law, order: int) -> Derivative:
    """The derivative phi^(order) of one law, order >= 1; InputError for a law that is not one of this library.

    Negative binomial: phi is an affine function of `b^-eta` with b linear in x, so that phi^(j) is a multiple of
    `b^-(eta+j)`, as phi' is for eta + j - 1.  Poisson: phi' = mean phi.  Binomial: a trial less, each time.  Any other
    finite law: `phi^(j-1)` is a polynomial with coefficients >= 0, which is a multiple of a generating function.

    >>> from jaxacct import selection
    >>> derivative(selection.Binomial(4, 0.5), 3)
    Derivative(scale=3.0, law=Binomial(trials=2.0, probability_of_run=0.5))
    """
    more = order - 1
    if more == 0:
        return Derivative(1.0, law)
    none = Derivative(0.0, law)
    if type(law) is TruncatedNegativeBinomial:
        other = TruncatedNegativeBinomial(law.eta + more, law.gamma)
        with np.errstate(over="ignore"):
            steps = [(law.eta + i) * ((1.0 - law.gamma) / law.gamma) for i in range(1, order)]
            return Derivative(float(law.mean * np.prod(steps) / other.mean), other)
    if type(law) is Poisson:
        with np.errstate(over="ignore"):
            return Derivative(max(float(np.float64(law.mean) ** more), LEAST), law)
    if type(law) is Binomial:
        scale, trials = _falling(float(law.trials), more), float(law.trials) - more
        share = law.probability_of_run
        return Derivative(max(float(scale * share**more), LEAST), Binomial(trials, share)) if trials >= 1.0 else none
    if type(law) is PointMass:
        count = float(law.repetitions)
        return Derivative(_falling(count, more), PointMass(count - more)) if count > more else none
    if type(law) is Categorical:
        mass = np.asarray(law.probabilities)
        k = np.arange(more, mass.size, dtype=np.float64)
        weight = mass[more:] * np.prod([k - i for i in range(more)], axis=0)
        if not weight[1:].any():
            return none
        share = weight / np.max(weight)  # before the sum, lest that be less than float64 holds
        return Derivative(max(math.fsum(weight), LEAST), Categorical(share / math.fsum(share)))
    raise InputError(
        f"k of type {type(law).__name__} has no higher derivatives; use a law of jaxacct.selection, such as Categorical"
    )


def _falling(count: float, factors: int) -> float:
    """`count (count - 1) ...`, so many factors."""
    return math.prod(count - i for i in range(factors))


def probability_of(law: Law, count: int) -> float:
    """An upper end of Pr[K = count], count >= 1: `phi^(count)(0)/count!`."""
    scale, other = derivative(law, count)
    slope = float(evaluated(other, np.ones(()))[1])
    found = (scale * slope * (1.0 + RELATIVE_ERROR) + LEAST) / math.factorial(count)
    return min(found, 1.0) if scale > 0.0 else 0.0
