"""The loop of every tuning: draw K, train K candidates, keep the best of them by one order that holds for every K.

Candidates of a space are trained in chunks whose shapes do not depend on K; those of a search that looks at what came
before are trained one after the other.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core.chacha import key_from_bytes
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.progress import Progress
from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.selection import Categorical, Law
from jaxacct.training.plan import Plan
from jaxacct.tuning.search_spaces import plain
from jaxacct.tuning.side_by_side_training import key_words

CANDIDATES_PER_CALL = 16
"""Candidates in one call of the compiled program.  A fixed number, so that shapes do not depend on K."""


@dataclass(frozen=True)
class Winner:
    """One of the candidates that a tuning releases.

    Parameters
    ----------
    params : its parameters, a pytree.
    config : its hyper-parameters.
    score : by which it won.
    plan : by which it was trained; None of `tune_with`.

    >>> Winner(0.0, {"rate": 0.1}, 0.9).config
    {'rate': 0.1}
    """

    params: Leaf
    config: dict[str, Any]
    score: float
    plan: Plan | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Tried:
    """A candidate of an `Adaptive` search that was trained and scored.

    Parameters
    ----------
    config : its hyper-parameters.
    score : NaN where training or scoring raised an exception.
    result : its parameters, or what `train` of `tune_with` gave; None where an exception was raised.

    >>> Tried({"rate": 0.1}, 0.9, None).score
    0.9
    """

    config: dict[str, Any]
    score: float
    result: Leaf = field(repr=False)


@dataclass(frozen=True)
class Adaptive:
    """A search in place of a space: every candidate is proposed from all that were tried before.

    Bayesian optimisation, successive halving, hill climbing and warm starts are of this kind.  Candidates are trained
    one after the other and always counted as adaptive, ``candidates="adaptive"``: the whole history is paid for, so
    that a proposal may use all of it, and K need not be secret.  Take a fixed K, since a random one only costs.

    Parameters
    ----------
    propose : (history, key) -> config: a tuple of `Tried`, in order, and a JAX key for whatever is random.  It must not
        look at the data in any other way.  A config maps names to numbers and words.

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

    def proposed(self, history: Sequence[Tried], key: jax.Array) -> dict[str, Any]:
        """The next configuration."""
        found = self.propose(tuple(history), key)
        if not isinstance(found, Mapping):
            raise InputError(f"propose gives {type(found).__name__}, must give a mapping of names to numbers and words")
        return {name: plain(value) for name, value in found.items()}


class Secret:
    """All keys of a tuning, from 32 secret bytes, by default the operating system's."""

    def __init__(self, root: bytes | None) -> None:
        if root is not None and (not isinstance(root, bytes) or len(root) != 32):
            raise InputError("key must be 32 bytes; leave it out, or use secrets.token_bytes(32)")
        self._root = secrets.token_bytes(32) if root is None else root

    def root(self, purpose: bytes, number: int = 0) -> bytes:
        """32 bytes for one purpose and candidate."""
        return hmac.digest(self._root, purpose + number.to_bytes(8, "little"), "sha256")

    def choice(self, purpose: bytes, number: int, size: int) -> int:
        """A whole number below `size`, all equally likely."""
        return int.from_bytes(self.root(purpose, number)[:16], "little") * size >> 128

    def key(self, purpose: bytes, number: int = 0) -> Any:
        """`root` as a key of ChaCha20."""
        return key_from_bytes(self.root(purpose, number))


# How many candidates are trained


def truncated(law: Law, most: int) -> Categorical:
    """The law of K given K <= most, with its exact probabilities: for `pad`.

    Parameters
    ----------
    law : one law of K.
    most : where K ends; refused if K is hardly ever as small.

    Returns
    -------
    Categorical

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


def require_pad(law: Law, space: Any, pad: int | None) -> None:
    """InputError unless K <= pad for certain, and K is secret."""
    if pad is None:
        return
    if isinstance(space, Adaptive):
        raise InputError(
            f"pad = {pad!r} is for a secret K; leave it out, since an Adaptive search pays for a public one"
        )
    most = int(check("pad", pad, COUNT))
    every = math.fsum(law.probability(np.arange(most + 1)))
    if float(law.quantile(1.0 - ROUNDOFF)) > most or not math.isclose(every, 1.0):
        raise InputError(f"pad = {most}: K can be larger; use tuning.truncated(law, {most}) as the law of K")


# The best of K


class Raised(NamedTuple):
    """Stands for the result of a candidate whose training raised an exception, of which nothing else is kept."""


class Found(NamedTuple):
    """A candidate that was trained and scored."""

    number: int
    result: Any
    score: float


Group = Callable[[Sequence[int]], Sequence[Any]]
"""The results of some candidates of one kind, by their numbers."""


def rank(score: float, number: int) -> tuple[bool, float, int]:
    """One total order for every K: the larger score, NaN below -inf; of equals the candidate drawn first.

    >>> max(rank(-math.inf, 3), rank(math.nan, 0), rank(-math.inf, 4))
    (True, -inf, -3)
    """
    known = not math.isnan(score)
    return known, score if known else 0.0, -number


def selected(
    space: Any,
    law: Law,
    pad: int | None,
    top: int,
    secret: Secret,
    progress: bool | None,
    kind_of: Callable[[Mapping[str, Any], int], Hashable],
    group: Callable[[Any, Sequence[Mapping[str, Any]]], Group],
    value: Callable[[Any, int], float],
    together: int = CANDIDATES_PER_CALL,
) -> tuple[list[Found], list[dict[str, Any]]]:
    """(the best `top` of K candidates, best first; all configurations).  The first configuration has seen no data.

    kind_of : (config, number) -> a key; candidates with one key are trained together.  group : (kind, configs) -> a
    function that trains some candidates of this kind.  value : (result, number) -> score.
    """
    require_pad(law, space, pad)
    count = law.sample()
    if isinstance(space, Adaptive):
        # `propose` sees only outputs that are accounted for; K is public, and its exceptions are the user's own
        configs = [space.proposed([], secret.key(b"config", 0))]
        history: list[Tried] = []
        best: list[Found] = []
        with contextlib.closing(Progress(count, progress, unit="candidates")) as bar:
            for number in range(count):
                if number:
                    configs.append(space.proposed(history, secret.key(b"config", number)))
                config = configs[number]
                result = _attempt(lambda n=number, config=config: group(kind_of(config, n), configs)([n])[0])
                one = _scored(number, result, value)
                history.append(Tried(config, one.score, None if isinstance(one.result, Raised) else one.result))
                best = _best([*best, one], top)
                bar.update(number + 1)
        return _without_raised(best), configs
    work = count if pad is None else pad
    configs = [dict(space.sample(secret.key(b"config", number))) for number in range(max(work, 1))]
    kinds = [kind_of(config, number) for number, config in enumerate(configs[:work])]
    bar = Progress(work, progress if pad else False, unit="candidates")
    return best_few(kinds, lambda kind: group(kind, configs), value, count, top, bar, together), configs


def best_few(
    kinds: Sequence[Hashable],
    group: Callable[[Any], Group],
    value: Callable[[Any, int], float],
    count: int,
    top: int,
    bar: Progress,
    together: int = CANDIDATES_PER_CALL,
) -> list[Found]:
    """The best `top` of the first `count` candidates; all of them are trained and scored.

    kinds : of each candidate; those of one kind are trained in chunks by ``group(kind)``, a chunk being filled up with
    copies, so that every program has the shapes of the last.  A candidate whose training or score raises an exception
    has the score NaN and no result.  It takes its place and is then left out.
    """
    members: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        members.setdefault(kind, []).append(number)
    best: list[Found] = []
    done = 0
    with contextlib.closing(bar):
        for kind, numbers in members.items():
            run = group(kind)
            for start in range(0, len(numbers), together):
                some = numbers[start : start + together]
                filled = some + [some[-1]] * (together - len(some))
                for number, result in zip(some, _results(run, some, filled), strict=True):
                    one = _scored(number, result, value)  # candidates beyond K: the same work, nothing is kept
                    best = _best([*best, one] if number < count else best, top)
                done += len(some)
                bar.update(done)
    return _without_raised(best)


def several(
    train: Callable[[Any, Mapping[str, np.ndarray], np.ndarray], Any],
    secret: Secret,
    init: Callable[[Any], Any],
    configs: Sequence[Mapping[str, Any]],
) -> Group:
    """Train candidates in one call of `train`; words and None in their configs, which all share, are left out."""

    def run(numbers: Sequence[int]) -> list[Any]:
        firsts = [init(secret.key(b"init", number)) for number in numbers]
        params = jax.tree.map(lambda *x: np.stack([np.asarray(a) for a in x]), *firsts)
        names = [name for name, x in configs[numbers[0]].items() if not (x is None or isinstance(x, str))]
        columns = {name: np.array([configs[number][name] for number in numbers]) for name in names}
        done = jax.device_get(train(params, columns, key_words([secret.root(b"train", n) for n in numbers])))
        return [jax.tree.map(lambda x, row=row: x[row], done) for row in range(len(numbers))]

    return run


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a user's function, or Raised.

    An exception that went on would reveal its message, and how many candidates came before.  KeyboardInterrupt,
    SystemExit and other non-Exceptions pass through.
    """
    try:
        return function(*arguments)
    except Exception:  # any exception is part of the candidate's output
        return Raised()


def _results(run: Group, some: list[int], filled: list[int]) -> list[Any]:
    """The result of each candidate; if training them together raises, each is trained alone, and one spoils no other.

    A candidate's result depends on its own key alone; therefore training it again gives the same result.
    """
    together = _attempt(run, filled)
    if not isinstance(together, Raised):
        return list(together)[: len(some)]
    if len(filled) == 1:
        return [together]
    alone = (_attempt(run, [number] * len(filled)) for number in some)
    return [one if isinstance(one, Raised) else one[0] for one in alone]


def _scored(number: int, result: Any, value: Callable[[Any, int], float]) -> Found:
    score = result if isinstance(result, Raised) else _attempt(value, result, number)
    return Found(number, Raised(), math.nan) if isinstance(score, Raised) else Found(number, result, score)


def _best(some: list[Found], top: int) -> list[Found]:
    return sorted(some, key=lambda one: rank(one.score, one.number), reverse=True)[:top]


def _without_raised(some: list[Found]) -> list[Found]:
    return [one for one in some if not isinstance(one.result, Raised)]
