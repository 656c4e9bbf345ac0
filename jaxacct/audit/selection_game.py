"""Simulates selections. A selection draws a number K, draws K candidates, and releases the one with the best score."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jax.tree_util import Partial

from jaxacct.audit.error_counts import LowerBound, clopper_pearson, error_of
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.progress import Progress
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import COUNT, DELTA, PROBABILITY, Constraint, InputError, check
from jaxacct.engines.devices import double_precision
from jaxacct.selection import Attack, Law, output_law

SELECTIONS_PER_CALL = 2**18
"""Number of selections that one call of the compiled program simulates. The calls are shared among all cores."""
LONGEST_TABLE = 2**16
"""Largest K whose probability the table holds.  A K beyond the table is drawn by the quantiles of the law of K."""
SEED_RANGE = Constraint("use a whole number as {name}", 0, 2**63, integral=True)
"""Allowed seeds: 63 bits, from which keys are made."""


def gaussian(mean: float = 0.0) -> Partial:
    """Return a function that draws outcomes of a Gaussian candidate, N(mean, 1), each a float32 from 32 random bits.

    The probability that an outcome lies in a tail has a relative error of at most 1e-5.  No outcome is farther than 6.4
    standard deviations from the mean; the Gaussian's own tail beyond has a probability of about 1e-10.

    Parameters
    ----------
    mean : float

    Returns
    -------
    callable : (key, shape) -> outcomes, traceable.

    References
    ----------
    Moshier (1989), Methods and Programs for Mathematical Functions, for the quantiles (`jax.scipy.special.ndtri`).

    >>> draw = gaussian(1.0)
    >>> abs(float(draw(jax.random.key(0), (10_000,)).mean()) - 1.0) < 0.05
    True
    """
    return Partial(_gaussian, np.float32(check("mean", mean, Constraint("use a finite {name}", -1e6, 1e6))))


def finite(probabilities: ArrayLike) -> Partial:
    """Return a function that draws outcomes of a candidate with n possible outcomes, the int32 numbers 0 to n - 1.

    Parameters
    ----------
    probabilities : array_like, shape (n,); they sum to 1.  Their cumulative sums are realised to within 2^-32.

    Returns
    -------
    callable : (key, shape) -> outcomes, traceable.

    >>> finite([0.2, 0.8])(jax.random.key(0), (5,)).shape
    (5,)
    """
    each = _law_of("probabilities", probabilities)
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
    """Simulate `runs` selections, and return the outcome that each releases.

    Parameters
    ----------
    draw : (key, shape) -> outcomes of candidates, traceable: `gaussian`, `finite`, or any other.
    score : outcomes -> numbers of equal shape, traceable.  The first of the largest numbers wins.  NaN counts as -inf.
    law : one law of K, the number of candidates of a selection.
    runs : int
    seed : a seed determines the winners, whatever the number of threads.
    progress : whether a line on standard error shows the progress; None shows it only on a terminal.

    Returns
    -------
    numpy.ndarray of float32, shape (runs,) : NaN where K = 0.

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
    """Simulate `runs` selections and count the winners in an event, without keeping the winners.

    Parameters
    ----------
    draw, score, law, runs, seed, progress : as for `winners`.
    event : outcomes of n winners (NaN if K = 0) -> whether each is in the event, shape (n,) or (events, n); traceable.

    Returns
    -------
    numpy.ndarray of int64, shape () or (events,)

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
    """Yield `one(key, repetitions, rng, size)` per chunk: the last `size` repetitions are draws of K, the others 0."""
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
        # in ascending order of K, the selections of a block need about equally many candidates
        drawn = np.sort(repetition_counts(law, table, size, rng))
        repetitions = np.concatenate([np.zeros(SELECTIONS_PER_CALL - size, np.int32), drawn])
        key = jax.random.wrap_key_data(jnp.asarray(sequence.generate_state(2)), impl="threefry2x32")
        # a block of 2^13 selections stays in the processor's cache
        return one(key, repetitions.reshape(-1, 2**13), rng, size)

    with contextlib.closing(bar), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for place, found in enumerate(pool.map(chunk, range(len(sizes)))):
            bar.update(sum(sizes[: place + 1]))
            yield found


def repetition_counts(law: Law, table: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return `size` draws of K as int32: ascending draws of the K in `table`, then unsorted draws of larger K."""
    counts = rng.multinomial(size, table)
    drawn = np.repeat(np.arange(table.size - 1, dtype=np.int32), counts[:-1])
    if not counts[-1]:
        return drawn
    far = law.quantile(np.minimum(1.0 - table[-1] * rng.random(counts[-1]), 1.0 - ROUNDOFF))
    if np.max(far) >= 2**31:
        raise InputError("K exceeds 2**31 candidates; simulate a law with fewer")
    return np.concatenate([drawn, np.maximum(far, table.size - 1).astype(np.int32)])


def _table(law: Law) -> np.ndarray:
    """Return Pr[K = 0], Pr[K = 1], ..., and last the probability of all larger K."""
    last = int(min(float(law.quantile(1.0 - 1e-10)), LONGEST_TABLE))
    each = np.append(law.probability(np.arange(last + 1.0)), law.survival(np.asarray(float(last))))
    return each / each.sum()


def _law_of(name: str, values: Any) -> np.ndarray:
    """Return probabilities as an array; raise InputError unless they are a vector that sums to 1."""
    each = np.asarray(check(name, values, PROBABILITY))
    if each.ndim != 1 or abs(each.sum() - 1.0) > 1e-9:
        raise InputError(f"{name} must be a vector that sums to 1; divide it by its sum")
    return each


def _gaussian(mean: Any, key: Any, shape: tuple[int, ...]) -> Any:
    """Draw N(mean, 1). One bit draws the side of the mean, and 31 bits draw p < 1/2, the mass beyond the outcome."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    p = ((bits >> np.uint32(1)).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    size = -ndtri(p)
    return jnp.where(bits & np.uint32(1), size, -size) + mean


def _finite(ends: Any, key: Any, shape: tuple[int, ...]) -> Any:
    """Draw outcomes 0, 1, ... with the cumulative probabilities `ends`, which are in units of 2^-32."""
    return jnp.searchsorted(ends, jax.random.bits(key, shape, jnp.uint32), side="right").astype(jnp.int32)


@jax.jit
def _winners(draw: Any, score: Any, key: Any, repetitions: Any) -> Any:
    """Return the outcome that each selection releases, float32 of the shape of `repetitions`; NaN where K = 0."""

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
    """Return how many winners are in an event, leaving out the first `skipped` selections."""
    released = _winners(draw, score, key, repetitions).reshape(-1)
    return jnp.sum(event(released) & (jnp.arange(released.size) >= skipped), axis=-1, dtype=jnp.int32)


def _traced(function: Callable[..., Any]) -> Partial:
    """Return a function as a Partial, a pytree. Partials that differ only in arrays share one compiled program."""
    return function if isinstance(function, Partial) else Partial(function)


class Cells(NamedTuple):
    """Cells of a candidate's outcomes, in ascending order of their score, and the mass of each cell under two laws.

    Parameters
    ----------
    numerator, denominator : shape (cells,); each sums to 1.  For "remove" the numerator is the law with the record.
    rank : shape (cells, 2); lowest and highest rank in each cell.  The rank of an outcome is the denominator's mass of
        all outcomes that have a larger likelihood ratio.

    >>> Cells(np.array([0.75, 0.25]), np.array([0.25, 0.75]), np.zeros((2, 2))).numerator.tolist()
    [0.75, 0.25]
    """

    numerator: np.ndarray
    denominator: np.ndarray
    rank: np.ndarray


def attack_cells(found: Attack, curve: Callable[[np.ndarray], np.ndarray]) -> Cells:
    """Cut the outcomes into cells, at the ranks at which the score of an attack jumps (`selection.attack`).

    Parameters
    ----------
    found : Attack
    curve : the trade-off function T in the attack's direction, for arrays.  T(u) is the largest numerator mass of
        outcomes whose denominator mass is u.

    Returns
    -------
    Cells

    >>> found = Attack(0.6, "remove", np.array([0.0, 0.1]), np.array([0.3]))  # as `selection.attack` finds them
    >>> cells = attack_cells(found, np.sqrt)
    >>> cells.denominator.round(3).tolist(), cells.numerator.round(3).tolist()
    ([0.2, 0.1, 0.7], [0.231, 0.316, 0.452])
    """
    ends = np.unique(np.concatenate([[0.0, 1.0], found.rank, found.served]))
    top = np.asarray(curve(ends), np.float64)
    if top.shape != ends.shape or not np.all(np.diff(top) >= 0.0) or abs(top[-1] - 1.0) > 1e-9 or top[0] < 0.0:
        raise InputError("curve must be a trade-off curve, from T(0) >= 0 up to T(1) = 1; give numerator masses")
    numerator, rank = np.diff(top), np.stack([ends[:-1], ends[1:]], axis=1)
    order = np.argsort(found.score(rank.mean(axis=1)), kind="stable")
    numerator, denominator, rank = numerator[order], np.diff(ends)[order], rank[order]
    if top[0] > 0.0:  # outcomes of denominator mass 0 have the highest score, so their cell is the last
        numerator, denominator = np.append(numerator, top[0]), np.append(denominator, 0.0)
        rank = np.concatenate([rank, np.zeros((1, 2))])
    return Cells(numerator / numerator.sum(), denominator / denominator.sum(), rank)


def winning_ranks(law: Law, runs: int, *, seed: int = 0, progress: bool | None = False) -> np.ndarray:
    """Simulate `runs` selections.  For each winner return the probability that a fresh candidate scores above it.

    The law of this probability is the same for all score functions without ties.  Probabilities near 0 are accurate.

    Parameters
    ----------
    law, runs, seed, progress : as for `winners`.

    Returns
    -------
    numpy.ndarray of float64, shape (runs,) : NaN where K = 0.

    References
    ----------
    README.md of this folder, "The selection game".

    >>> from jaxacct import selection
    >>> top = winning_ranks(selection.PointMass(9), 10_000)
    >>> bool(0.095 < top.mean() < 0.105)  # 1/(9 + 1)
    True
    """

    def one(key: Any, repetitions: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
        with double_precision():
            found = np.asarray(_top(key, repetitions)).reshape(-1)[-size:]
        return rng.permutation(found)

    return np.concatenate(list(in_chunks(one, law, runs, seed, progress)))


def cell_counts(masses: ArrayLike, law: Law, runs: int, *, seed: int = 0, progress: bool | None = False) -> np.ndarray:
    """Simulate `runs` selections and count the wins of each cell.  The cells are in ascending order of their score.

    Parameters
    ----------
    masses : array_like in [0, 1], shape (cells,); they sum to 1.
    law, runs, seed, progress : as for `winners`.

    Returns
    -------
    numpy.ndarray of int64, shape (cells + 1,) : number of selections with K = 0, then the wins of each cell.

    >>> from jaxacct import selection
    >>> counts = cell_counts([0.5, 0.5], selection.PointMass(2), 1000)
    >>> int(counts.sum()), bool(200 < counts[1] < 300)
    (1000, True)
    """
    masses = _law_of("masses", masses)
    # the mass of a cell and of all cells above it, for each cell but the lowest, from the top cell down
    above = np.cumsum(masses[::-1])[:-1] / masses.sum()

    def one(key: Any, repetitions: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
        with double_precision():
            counts = np.array(_counted_cells(above, key, repetitions), np.int64)
        counts[-1] -= repetitions.size - size  # do not count the selections of K = 0 that fill up the chunk
        return counts

    return sum(in_chunks(one, law, runs, seed, progress))[::-1]


def cell_audit(
    cells: Cells, law: Law, *, delta: float, runs: int, confidence: float = 0.95, seed: int = 0
) -> LowerBound:
    """Bound from below, by simulation, the epsilon of a selection whose score orders `cells`.

    The selection is simulated `runs` times with each of the two laws of a candidate.  The adversary's event is that the
    winner has one of the largest likelihood ratios.  The event is chosen by the exact laws (`selection.output_law`),
    before the simulation.  So Clopper and Pearson's limits hold without held-out runs.

    Parameters
    ----------
    cells, law : Cells, and one law of K.
    delta, confidence : float in (0, 1)
    runs, seed : int

    Returns
    -------
    LowerBound

    References
    ----------
    As for `clopper_pearson`.

    >>> from jaxacct import selection
    >>> cells = Cells(np.array([0.75, 0.25]), np.array([0.25, 0.75]), np.zeros((2, 2)))  # randomised response, log 3
    >>> found = cell_audit(cells, selection.PointMass(1), delta=1e-5, runs=1_000_000)
    >>> bool(0.98 * np.log(3) < found.epsilon < np.log(3)), found.trials
    (True, 2000000)
    """
    error_of(confidence)
    runs = int(check("runs", runs, COUNT))
    delta = float(np.asarray(check("delta", delta, DELTA)))
    one, other = output_law(cells.numerator, law), output_law(cells.denominator, law)
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(np.where(one > 0.0, -np.log(one / other), np.inf), kind="stable")
        gain, cost = np.cumsum(one[order]), np.cumsum(other[order])
    # choose the event whose bound of epsilon is the largest at the expected counts
    wrong, missed = (np.clip(np.round(x * runs), 0, runs) for x in (cost, 1.0 - gain))
    shown = clopper_pearson(wrong, runs, missed, runs, delta=delta, confidence=confidence).epsilon
    event = order[: int(np.argmax(shown)) + 1]
    hits = [
        int(cell_counts(masses, law, runs, seed=2 * seed + place)[event].sum())
        for place, masses in enumerate((cells.numerator, cells.denominator))
    ]
    return clopper_pearson(hits[1], runs, runs - hits[0], runs, delta=delta, confidence=confidence)


@jax.jit
def _top(key: Any, repetitions: Any) -> Any:
    """Return 1 - U^{1/K} in float64, for uniform U of 53 random bits; NaN where K = 0."""
    bits = jax.random.bits(key, repetitions.shape, jnp.uint64) >> np.uint64(11)
    exponential = -jnp.log((bits.astype(jnp.float64) + 0.5) * 2.0**-53)
    return jnp.where(repetitions > 0, -jnp.expm1(-exponential / repetitions), jnp.nan)


@jax.jit
def _counted_cells(above: Any, key: Any, repetitions: Any) -> Any:
    """Return how many selections each cell wins, from the top cell down. The last entry counts those with K = 0."""
    top = jnp.where(repetitions > 0, _top(key, repetitions), 2.0).reshape(-1)
    cell = jnp.searchsorted(above, top, side="right")
    cell = jnp.where(top > 1.5, above.size + 1, cell)
    return jnp.zeros(above.size + 2, jnp.int32).at[cell].add(1)
