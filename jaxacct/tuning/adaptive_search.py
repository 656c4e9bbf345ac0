"""Searches that look at what came before: each candidate's configuration is proposed from those tried so far."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxacct.core.progress import Progress
from jaxacct.core.validation import InputError
from jaxacct.tuning.best_candidate import Raised, attempt, rank
from jaxacct.tuning.distributions import plain
from jaxacct.tuning.keys_and_ledger import Secret

__all__ = ["Adaptive", "Tried", "in_turn"]


@dataclass(frozen=True)
class Tried:
    """A candidate of an `Adaptive` search that was trained and scored.

    Parameters
    ----------
    config : dict
        Its hyper-parameters.
    score : float
        NaN where training or scoring raised an exception.
    result : pytree
        Its parameters, or what `train` of `tune_with` gave; None where an exception was raised.

    >>> Tried({"rate": 0.1}, 0.9, None).score
    0.9
    """

    config: dict[str, Any]
    score: float
    result: Any = field(repr=False)


@dataclass(frozen=True)
class Adaptive:
    """A search in place of a space: every candidate is proposed from all that were tried before.

    Bayesian optimisation, successive halving, hill climbing and warm starts are of this kind.  Candidates are trained
    one after the other and always counted as adaptive, ``candidates="adaptive"``: the whole history is paid for, so
    that a proposal may use all of it, and K need not be secret.  Take a fixed K, since a random one only costs.

    Parameters
    ----------
    propose : callable
        (history, key) -> config: a tuple of `Tried`, in order, and a JAX key for whatever is random.  It must not look
        at the data in any other way.

    Raises
    ------
    InputError
        propose is not callable; when it is called, a config that is no mapping of names to numbers and words.

    References
    ----------
    jaxacct/selection/README.md, "Candidates that depend on each other".

    >>> def propose(history, key):
    ...     return {"rate": 0.1 * 2.0 ** len(history)}
    >>> Adaptive(propose).proposed([], None)
    {'rate': 0.1}
    """

    propose: Callable[[tuple[Tried, ...], Any], Mapping[str, Any]]

    def __post_init__(self) -> None:
        if not callable(self.propose):
            raise InputError(f"propose = {self.propose!r:.40} must be a function (history, key) -> config")

    def proposed(self, history: list[Tried], key: Any) -> dict[str, Any]:
        """The next configuration."""
        found = self.propose(tuple(history), key)
        if not isinstance(found, Mapping):
            raise InputError(f"propose gives {type(found).__name__}, must give a mapping of names to numbers and words")
        return {name: plain(value) for name, value in found.items()}


def in_turn(
    search: Adaptive,
    count: int,
    train: Callable[[dict[str, Any], int], Any],
    value: Callable[[Any, int], float],
    top: int,
    secret: Secret,
    bar: Progress,
) -> list[tuple[dict[str, Any], int, Any, float]]:
    """(config, number, result, score) of the best `top` of so many candidates, one after the other, best first.

    train : (config, number) -> result.  An exception of `train` or `value` makes a candidate without a result; one of
    `propose` is the user's own, which sees nothing that is not paid for.
    """
    history: list[Tried] = []
    found: list[tuple[tuple[bool, float, int], tuple[dict[str, Any], int, Any, float]]] = []
    with contextlib.closing(bar):
        for number in range(count):
            config = search.proposed(history, secret.key(b"config", number))
            result = attempt(train, dict(config), number)
            score = result if isinstance(result, Raised) else attempt(value, result, number)
            if isinstance(score, Raised):
                result, score = Raised(), math.nan
            history.append(Tried(config, score, None if isinstance(result, Raised) else result))
            found.append((rank(score, number), (config, number, result, score)))
            bar.update(number + 1)
    best = sorted(found, key=lambda one: one[0], reverse=True)[:top]
    return [one for _, one in best if not isinstance(one[2], Raised)]
