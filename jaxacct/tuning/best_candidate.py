"""The best of K candidates: trained in chunks whose shapes do not depend on K, compared by one order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core.progress import Progress
from jaxacct.tuning.keys_and_ledger import Secret
from jaxacct.tuning.side_by_side_training import key_words

__all__ = ["CANDIDATES_PER_CALL", "Raised", "attempt", "best_few", "best_of", "rank", "several"]

CANDIDATES_PER_CALL = 16
"""Candidates in one call of the compiled program.  A fixed number, so that shapes do not depend on K."""


class Raised(NamedTuple):
    """In place of the result of a candidate whose training raised an exception, of which nothing else is kept."""


def rank(score: float, number: int) -> tuple[bool, float, int]:
    """One total order for every K: the larger score, NaN below -inf; of equals the candidate drawn first.

    >>> max(rank(-math.inf, 3), rank(math.nan, 0), rank(-math.inf, 4))
    (True, -inf, -3)
    """
    known = not math.isnan(score)
    return known, score if known else 0.0, -number


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's gives, or Raised: an exception would tell its message, and how many came before.

    What is no Exception, such as KeyboardInterrupt and SystemExit, goes on.
    """
    try:
        return function(*arguments)
    except Exception:  # whatever it is, it is part of what the candidate puts out
        return Raised()


def several(
    train: Callable[[Any, Mapping[str, np.ndarray], np.ndarray], Any],
    secret: Secret,
    init: Callable[[Any], Any],
    configs: Sequence[Mapping[str, Any]],
) -> Callable[[Sequence[int]], list[Any]]:
    """A function from the numbers of some candidates to their parameters, all trained in one call of `train`.

    Words and None in the configs are left out: candidates trained together have them in common.
    """

    def run(numbers: Sequence[int]) -> list[Any]:
        firsts = [init(secret.key(b"init", number)) for number in numbers]
        params = jax.tree.map(lambda *x: np.stack([np.asarray(a) for a in x]), *firsts)
        names = [name for name, x in configs[numbers[0]].items() if not (x is None or isinstance(x, str))]
        columns = {name: np.array([configs[number][name] for number in numbers]) for name in names}
        done = jax.device_get(train(params, columns, key_words([secret.root(b"train", n) for n in numbers])))
        return [jax.tree.map(lambda x, row=row: x[row], done) for row in range(len(numbers))]

    return run


def best_few(
    kinds: Sequence[Hashable],
    group: Callable[[Any], Callable[[Sequence[int]], Sequence[Any]]],
    value: Callable[[Any, int], float],
    count: int,
    top: int,
    bar: Progress | None = None,
    together: int = CANDIDATES_PER_CALL,
) -> list[tuple[int, Any, float]]:
    """(number, result, score) of the best `top` of the first `count` candidates; all of them are trained and scored.

    kinds : of each candidate; those of one kind are trained in chunks by ``group(kind)``, a chunk being filled up with
    copies, so that every program has the shapes of the last.  value : (result, number) -> score.  A candidate whose
    training or score raises an exception has the score NaN and no result.  It takes its place and is then left out.
    """
    members: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        members.setdefault(kind, []).append(number)
    best: list[tuple[tuple[bool, float, int], int, Any, float]] = []
    done = 0
    with contextlib.nullcontext() if bar is None else contextlib.closing(bar):
        for kind, numbers in members.items():
            run = group(kind)
            for start in range(0, len(numbers), together):
                some = numbers[start : start + together]
                filled = some + [some[-1]] * (together - len(some))
                for number, result in zip(some, _results(run, some, filled), strict=True):
                    if number < count:
                        best.append(_ranked(number, result, value))
                    else:
                        _ranked(number, result, value)  # as much work, of which nothing is kept
                    best = sorted(best, key=lambda one: one[0], reverse=True)[:top]
                done += len(some)
                if bar is not None:
                    bar.update(done)
    return [one[1:] for one in best if not isinstance(one[2], Raised)]


def best_of(
    kinds: Sequence[Hashable],
    group: Callable[[Any], Callable[[Sequence[int]], Sequence[Any]]],
    value: Callable[[Any, int], float],
    count: int,
    bar: Progress | None = None,
    together: int = CANDIDATES_PER_CALL,
) -> tuple[int, Any, float] | None:
    """The best one, as for `best_few`; None if count is 0 or one that raised an exception wins."""
    found = best_few(kinds, group, value, count, 1, bar, together)
    return found[0] if found else None


def _ranked(
    number: int, result: Any, value: Callable[[Any, int], float]
) -> tuple[tuple[bool, float, int], int, Any, float]:
    """(rank, number, result, score) of a candidate, scored."""
    scored = result if isinstance(result, Raised) else attempt(value, result, number)
    if isinstance(scored, Raised):
        return rank(math.nan, number), number, Raised(), math.nan
    return rank(scored, number), number, result, scored


def _results(run: Callable[[Sequence[int]], Sequence[Any]], some: list[int], filled: list[int]) -> list[Any]:
    """Of each candidate; where training them together raises, of each by itself, lest one ruin the others.

    A candidate's result depends on its own key alone, so that the second training is the first one once more.
    """
    together = attempt(run, filled)
    if not isinstance(together, Raised):
        return list(together)[: len(some)]
    if len(filled) == 1:
        return [together]
    alone = (attempt(run, [number] * len(filled)) for number in some)
    return [one if isinstance(one, Raised) else one[0] for one in alone]
