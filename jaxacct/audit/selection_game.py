"""The reduced selection game on the device: draw K, draw K candidates, keep the best by a score, millions of times.

Selections are exchangeable: how many of a batch have K = 1, 2, 3, ... is multinomial, so that a batch is drawn in
ascending order of K, in blocks whose selections all need about as many candidates, and shuffled afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.progress import Progress
from jaxacct.core.validation import COUNT, PROBABILITY, Constraint, InputError, check
from jaxacct.selection.law_families import Law

__all__ = [
    "SEED_RANGE",
    "SELECTIONS_PER_CALL",
    "count_winners",
    "finite",
    "gaussian",
    "in_chunks",
    "repetition_counts",
    "winners",
]

SELECTIONS_PER_BLOCK = 2**13
"""Selections that draw their candidates side by side: few enough for a block to stay in the processor's cache."""
SELECTIONS_PER_CALL = 2**18
"""Selections in one call of the compiled program; calls run on all cores."""
LONGEST_TABLE = 2**16
"""Longest table of the probabilities of K.  A K beyond the table is drawn by the quantiles of its law."""
BEYOND_TABLE = 1e-10
"""The table ends where the probability of a larger K has fallen to this, if that is earlier."""
_ERFINV_MIDDLE = np.sqrt(2.0) * np.array(
    [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164]
    + [0.246640727, 1.50140941]
)
"""erfinv(x)/x times sqrt(2) as a polynomial of `w - 5/2`, w = -log(1 - x^2) below 5 [Giles 2012]."""
_ERFINV_TAIL = np.sqrt(2.0) * np.array(
    [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047]
    + [1.00167406, 2.83297682]
)
"""The same as a polynomial of `sqrt(w) - 3` for w above 5."""
SEED_RANGE = Constraint("use a whole number as {name}", 0, 2**63, integral=True)
"""What a seed must be: 63 bits, from which keys are made."""


def gaussian(mean: float = 0.0) -> Partial:
    """The candidates of a Gaussian base: outcomes N(mean, 1), float32, from 32 bits each.

    Masses of tails are right to 1e-5 of themselves down to 1e-7, to 1e-4 down to 1e-8 and to 2 % at 1e-10, where
    outcomes end, beyond 6.3 standard deviations.

    Parameters
    ----------
    mean : float

    Returns
    -------
    callable
        (key, shape) -> outcomes, traceable.

    Raises
    ------
    InputError
        The mean is not finite.

    References
    ----------
    Giles (2012), for the polynomials.

    >>> draw = gaussian(1.0)
    >>> abs(float(draw(jax.random.key(0), (10_000,)).mean()) - 1.0) < 0.05
    True
    """
    return Partial(_gaussian, np.float32(check("mean", mean, Constraint("use a finite {name}", -1e6, 1e6))))


def finite(probabilities: Any) -> Partial:
    """The candidates of a base with outcomes 0, 1, ..., n - 1, int32, or of a curve cut into cells.

    Parameters
    ----------
    probabilities : array_like, shape (n,)
        They sum to 1, and are realised to 2^-32.

    Returns
    -------
    callable
        (key, shape) -> outcomes, traceable.

    Raises
    ------
    InputError
        No vector that sums to 1.

    >>> finite([0.2, 0.8])(jax.random.key(0), (5,)).shape
    (5,)
    """
    each = np.asarray(check("probabilities", probabilities, PROBABILITY))
    if each.ndim != 1 or abs(each.sum() - 1.0) > 1e-9:
        raise InputError("probabilities must be a vector that sums to 1; divide it by its sum")
    return Partial(_finite, np.minimum(np.cumsum(each)[:-1] * 2.0**32, 2.0**32 - 1.0).astype(np.uint32))


def winners(
    draw: Callable[[Any, tuple[int, ...]], Any],
    score: Callable[[Any], Any],
    law: Law,
    runs: int,
    *,
    seed: int = 0,
    progress: bool | None = False,
) -> np.ndarray:
    """The outcome that is released in each of `runs` selections.

    Parameters
    ----------
    draw : callable
        (key, shape) -> outcomes of candidates, traceable: `gaussian`, `finite`, or any other.
    score : callable
        outcomes -> numbers of the same shape, traceable; the largest wins, of equal ones the first, NaN never.
    law : Law
        One law of K.
    runs : int
    seed : int
        The same seed gives the same winners, whatever the number of threads.
    progress : bool, optional
        A line on standard error; None only on a terminal.

    Returns
    -------
    numpy.ndarray of float32, shape (runs,)
        NaN where K = 0.

    Raises
    ------
    InputError
        Invalid values, or a batch of laws.

    References
    ----------
    README.md of this folder, "The selection game".

    >>> from jaxacct import selection
    >>> best = winners(gaussian(), lambda x: x, selection.PointMass(100), 1000)
    >>> bool(2.4 < best.mean() < 2.6)  # 2.508 is expected
    True
    """
    play = functools.partial(_winners, _traced(draw), _traced(score))

    def one(key: Any, repetitions: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
        found = np.asarray(play(key, repetitions)).reshape(-1)[-size:]
        return rng.permutation(found)

    return np.concatenate(list(in_chunks(one, law, runs, seed, progress)))


def count_winners(
    draw: Callable[[Any, tuple[int, ...]], Any],
    score: Callable[[Any], Any],
    law: Law,
    runs: int,
    event: Callable[[Any], Any],
    *,
    seed: int = 0,
    progress: bool | None = False,
) -> np.ndarray:
    """How many of `runs` winners are in an event: for more runs than are to be kept.

    Parameters
    ----------
    draw, score, law, runs, seed, progress
        As for `winners`.
    event : callable
        outcomes of shape (n,) -> bool of shape (n,), or (events, n) for several, traceable; NaN is K = 0.

    Returns
    -------
    numpy.ndarray of int64, shape () or (events,)

    Raises
    ------
    InputError
        Invalid values, or a batch of laws.

    >>> from jaxacct import selection
    >>> int(count_winners(gaussian(), lambda x: x, selection.PointMass(3), 1000, lambda x: x > -10.0))
    1000
    """
    play = functools.partial(_counted, _traced(draw), _traced(score), _traced(event))

    def one(key: Any, repetitions: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
        return np.asarray(play(key, repetitions, np.int32(repetitions.size - size)), np.int64)

    return np.sum(list(in_chunks(one, law, runs, seed, progress)), axis=0)


def in_chunks(
    one: Callable[[Any, np.ndarray, np.random.Generator, int], Any],
    law: Law,
    runs: int,
    seed: int,
    progress: bool | None = False,
) -> Iterator[Any]:
    """`one(key, repetitions, rng, size)` for chunks of selections, on all cores, in order.

    repetitions : (blocks, SELECTIONS_PER_BLOCK), ascending; the last `size` of them count, and those before are 0.
    """
    if not isinstance(law, Law) or law.shape:
        raise InputError(f"law = {law!r:.60} must be one law of K; use one such as selection.Geometric(0.1)")
    runs, seed = int(check("runs", runs, COUNT)), int(check("seed", seed, SEED_RANGE))
    table = _table(law)
    sizes = [min(SELECTIONS_PER_CALL, runs - start) for start in range(0, runs, SELECTIONS_PER_CALL)]
    bar = Progress(runs, progress, unit="selections")

    def chunk(place: int) -> Any:
        sequence = np.random.SeedSequence([seed, place])
        rng = np.random.default_rng(sequence)
        size = sizes[place]
        drawn = np.sort(repetition_counts(law, table, size, rng))
        repetitions = np.concatenate([np.zeros(SELECTIONS_PER_CALL - size, np.int32), drawn])
        key = jax.random.wrap_key_data(jnp.asarray(sequence.generate_state(2)), impl="threefry2x32")
        return one(key, repetitions.reshape(-1, SELECTIONS_PER_BLOCK), rng, size)

    with contextlib.closing(bar), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for place, found in enumerate(pool.map(chunk, range(len(sizes)))):
            bar.update(sum(sizes[: place + 1]))
            yield found


def repetition_counts(law: Law, table: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` draws of K, int32, in ascending order except for those beyond the table."""
    counts = rng.multinomial(size, table)
    drawn = np.repeat(np.arange(table.size - 1, dtype=np.int32), counts[:-1])
    if not counts[-1]:
        return drawn
    far = law.quantile(np.minimum(1.0 - table[-1] * rng.random(counts[-1]), 1.0 - ROUNDOFF))
    if np.max(far) >= 2**31:
        raise InputError("K exceeds 2**31 candidates; simulate a law with fewer")
    return np.concatenate([drawn, np.maximum(far, table.size - 1).astype(np.int32)])


def _table(law: Law) -> np.ndarray:
    """Pr[K = 0], Pr[K = 1], ..., and last the probability of all that is beyond."""
    last = int(min(float(law.quantile(1.0 - BEYOND_TABLE)), LONGEST_TABLE))
    each = np.append(law.probability(np.arange(last + 1.0)), law.survival(np.asarray(float(last))))
    return each / each.sum()


def _gaussian(mean: Any, key: Any, shape: tuple[int, ...]) -> Any:
    """One bit for the sign, 31 for the tail's mass p below 1/2: sqrt(2) erfinv(1 - 2p), with w from p itself."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    p = ((bits >> np.uint32(1)).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    w = -jnp.log(4.0 * p * (1.0 - p))
    middle, tail = (
        jnp.polyval(_ERFINV_MIDDLE.astype(np.float32), w - 2.5),
        jnp.polyval(_ERFINV_TAIL.astype(np.float32), jnp.sqrt(w) - 3.0),
    )
    size = jnp.where(w < 5.0, middle, tail) * (1.0 - 2.0 * p)
    return jnp.where(bits & np.uint32(1), size, -size) + mean


def _finite(ends: Any, key: Any, shape: tuple[int, ...]) -> Any:
    return jnp.searchsorted(ends, jax.random.bits(key, shape, jnp.uint32), side="right").astype(jnp.int32)


@jax.jit
def _winners(draw: Any, score: Any, key: Any, repetitions: Any) -> Any:
    """The winners of every block, one block after the other."""

    def block(item: Any) -> Any:
        key, most = item

        def candidate(i: Any, carry: Any) -> Any:
            best, released = carry
            outcome = draw(jax.random.fold_in(key, i), most.shape)
            value = score(outcome).astype(jnp.float32)
            value = jnp.where(jnp.isnan(value), -jnp.inf, value)
            better = (i < most) & ((value > best) | (i == 0))
            return jnp.where(better, value, best), jnp.where(better, outcome.astype(jnp.float32), released)

        nothing = jnp.full(most.shape, -jnp.inf, jnp.float32), jnp.full(most.shape, jnp.nan, jnp.float32)
        return jax.lax.fori_loop(0, jnp.max(most), candidate, nothing)[1]

    return jax.lax.map(block, (jax.random.split(key, repetitions.shape[0]), repetitions))


@jax.jit
def _counted(draw: Any, score: Any, event: Any, key: Any, repetitions: Any, skipped: Any) -> Any:
    released = _winners(draw, score, key, repetitions).reshape(-1)
    return jnp.sum(event(released) & (jnp.arange(released.size) >= skipped), axis=-1, dtype=jnp.int32)


def _traced(function: Callable[..., Any]) -> Partial:
    """A function as a pytree: compiled once for every function, whatever the arrays of a Partial."""
    return function if isinstance(function, Partial) else Partial(function)
