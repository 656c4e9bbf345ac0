"""How good a private choice is: the exponential mechanism's utility theorem and its inverses.

With Delta the sensitivity of the utility, k candidates of which r reach the optimum OPT [McSherry and Talwar
2007; Dwork and Roth 2014, Theorem 3.11]:

    Pr[ u(choice) <= OPT - (2 Delta / epsilon) (log(k / r) + t) ] <= e^{-t}.

Monotone utilities (adding a record never lowers any, or never raises any) need Delta where others need 2
Delta. All arguments broadcast; every answer is a theorem's bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.validation import COUNT, DELTA, POSITIVE, InputError, broadcast_shape, check

__all__ = ["exponential_epsilon", "exponential_error", "exponential_failure"]


def exponential_error(
    epsilon: Any, beta: Any, candidates: Any, *, optimal: Any = 1, sensitivity: Any = 1.0, monotone: bool = False
) -> Any:
    """The shortfall that is reached or exceeded with probability at most `beta`, in units of the utility.

    Parameters
    ----------
    epsilon : array_like > 0
    beta : array_like in (0, 1)
    candidates : array_like of whole numbers
    optimal : array_like of whole numbers
        How many candidates reach the optimum, at most ``candidates``.
    sensitivity : array_like > 0
        The most that one record moves any single utility; all broadcast.
    monotone : bool
        Whether one record moves all utilities the same way.

    Returns
    -------
    float or numpy.ndarray

    References
    ----------
    McSherry and Talwar (2007); Dwork and Roth (2014), Theorem 3.11.

    >>> round(float(exponential_error(1.0, 0.05, 100)), 4)
    15.2018
    """
    return _balance(monotone, epsilon=epsilon, beta=beta, k=candidates, r=optimal, Delta=sensitivity)


def exponential_failure(
    epsilon: Any, error: Any, candidates: Any, *, optimal: Any = 1, sensitivity: Any = 1.0, monotone: bool = False
) -> Any:
    """The probability, at most, that the choice falls short of the optimum by `error` or more.

    Parameters
    ----------
    epsilon, error : array_like > 0
    candidates, optimal, sensitivity, monotone
        As for `exponential_error`.

    Returns
    -------
    float or numpy.ndarray

    References
    ----------
    As for `exponential_error`.

    >>> round(float(exponential_failure(1.0, 15.2018, 100)), 4)
    0.05
    """
    eps, a, odds, unit = _checked(monotone, epsilon=epsilon, error=error, k=candidates, r=optimal, Delta=sensitivity)
    return np.minimum(1.0, odds * np.exp(-eps * a / unit))[()]


def exponential_epsilon(
    error: Any, beta: Any, candidates: Any, *, optimal: Any = 1, sensitivity: Any = 1.0, monotone: bool = False
) -> Any:
    """The epsilon with which the shortfall stays below `error` except with probability `beta`.

    Parameters
    ----------
    error : array_like > 0
    beta : array_like in (0, 1)
    candidates, optimal, sensitivity, monotone
        As for `exponential_error`.

    Returns
    -------
    float or numpy.ndarray

    References
    ----------
    As for `exponential_error`.

    >>> round(float(exponential_epsilon(15.2018, 0.05, 100)), 4)
    1.0
    """
    return _balance(monotone, error=error, beta=beta, k=candidates, r=optimal, Delta=sensitivity)


_RULES = {"epsilon": POSITIVE, "beta": DELTA, "error": POSITIVE, "k": COUNT, "r": COUNT, "Delta": POSITIVE}
"""What each argument must be, by its symbol in the formula."""
_NAMES = {"k": "candidates", "r": "optimal", "Delta": "sensitivity"}
"""The name of the argument, where it is not the symbol."""


def _balance(monotone: bool, **given: Any) -> Any:
    """The error from epsilon, or epsilon from the error: their product is 2 Delta log(k / (r beta))."""
    first, b, odds, unit = _checked(monotone, **given)
    return (unit / first * (np.log(odds) - np.log(b)))[()]


def _checked(monotone: bool, **given: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The first two arguments, k / r, and 2 Delta (or Delta)."""
    values = {name: np.asarray(check(_NAMES.get(name, name), x, _RULES[name])) for name, x in given.items()}
    broadcast_shape({_NAMES.get(name, name): x.shape for name, x in values.items()})
    first, second, k, r, delta = values.values()
    if np.any(r > k):
        raise InputError(f"optimal must be <= candidates; found {np.max(r):g} of {np.min(k):g}, count them again")
    return first, second, k / r, delta * (1.0 if monotone else 2.0)
