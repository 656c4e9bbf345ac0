"""The winner of a selection by its rank alone: one draw a selection, however large K, for scores that order cells.

Ties split at random, the scores of K candidates are as good as K uniform numbers; the largest has the law v^K, so that
`V = U^{1/K}` is the winner's rank: given cells in ascending order of their score, the winner is the cell in which V
lies.  Over K, `Pr[V <= v] = phi(v)`, so cell c wins with probability `phi(F(<= c)) - phi(F(< c))`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.audit.error_counts import clopper_pearson
from jaxacct.audit.lower_bound import LowerBound, error_of
from jaxacct.audit.selection_game import in_chunks
from jaxacct.core.validation import COUNT, DELTA, PROBABILITY, InputError, check
from jaxacct.engines.devices import double_precision
from jaxacct.selection import Attack, Law, output_law

__all__ = ["Cells", "attack_cells", "cell_audit", "cell_counts", "winning_ranks"]


class Cells(NamedTuple):
    """Cells of a base's outcomes in ascending order of their score, and their masses under either law.

    Parameters
    ----------
    numerator, denominator : numpy.ndarray, shape (cells,)
        Each sums to 1; with the record and without it for the direction "remove".
    rank : numpy.ndarray, shape (cells, 2)
        The ends of each cell's interval of ranks u, the denominator's mass of larger likelihood ratios.

    >>> Cells(np.array([0.75, 0.25]), np.array([0.25, 0.75]), np.zeros((2, 2))).numerator.tolist()
    [0.75, 0.25]
    """

    numerator: np.ndarray
    denominator: np.ndarray
    rank: np.ndarray


def attack_cells(found: Attack, curve: Any) -> Cells:
    """The worst-case score of `selection.attack` as an order on the cells between which it jumps.

    Within a cell the order makes no difference to what the cell as a whole is given.

    Parameters
    ----------
    found : Attack
    curve : callable
        T(u), the largest numerator mass of a set of denominator mass u, in the attack's direction; of arrays.

    Returns
    -------
    Cells

    Raises
    ------
    InputError
        The curve is no trade-off curve.

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
    if top[0] > 0.0:  # what the denominator never puts out goes on top
        numerator, denominator = np.append(numerator, top[0]), np.append(denominator, 0.0)
        rank = np.concatenate([rank, np.zeros((1, 2))])
    return Cells(numerator / numerator.sum(), denominator / denominator.sum(), rank)


def winning_ranks(law: Law, runs: int, *, seed: int = 0, progress: bool | None = False) -> np.ndarray:
    """1 - V of the winner in each of `runs` selections, V its rank: accurate near 0.

    A candidate scores above the winner with this probability: through the quantiles of any score it is the winner.

    Parameters
    ----------
    law, runs, seed, progress
        As for `winners`.

    Returns
    -------
    numpy.ndarray of float64, shape (runs,)
        NaN where K = 0.

    Raises
    ------
    InputError
        Invalid values, or a batch of laws.

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
            found = np.asarray(_ranks(key, repetitions)).reshape(-1)[-size:]
        return rng.permutation(found)

    return np.concatenate(list(in_chunks(one, law, runs, seed, progress)))


def cell_counts(masses: Any, law: Law, runs: int, *, seed: int = 0, progress: bool | None = False) -> np.ndarray:
    """How many of `runs` selections each cell wins, cells in ascending order of their score.

    Parameters
    ----------
    masses : array_like in [0, 1], shape (cells,)
        They sum to 1.
    law, runs, seed, progress
        As for `winners`.

    Returns
    -------
    numpy.ndarray of int64, shape (cells + 1,)
        The first is of K = 0, as in `selection.output_law`, the probabilities of which these are counts.

    Raises
    ------
    InputError
        Invalid values, or a batch of laws.

    >>> from jaxacct import selection
    >>> counts = cell_counts([0.5, 0.5], selection.PointMass(2), 1000)
    >>> int(counts.sum()), bool(200 < counts[1] < 300)
    (1000, True)
    """
    masses = np.asarray(check("masses", masses, PROBABILITY))
    if masses.ndim != 1 or abs(masses.sum() - 1.0) > 1e-9:
        raise InputError("masses must be a vector that sums to 1; divide it by its sum")
    # ends of the cells from the top down: 1 - V below the first is the last cell
    above = np.cumsum(masses[::-1])[:-1] / masses.sum()

    def one(key: Any, repetitions: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
        with double_precision():
            counts = np.array(_counted(above, key, repetitions), np.int64)
        counts[-1] -= repetitions.size - size  # what fills the chunk up has K = 0
        return counts

    return sum(in_chunks(one, law, runs, seed, progress))[::-1]


def cell_audit(
    cells: Cells, law: Law, *, delta: float, runs: int, confidence: float = 0.95, seed: int = 0
) -> LowerBound:
    """A lower bound on the epsilon of a selection whose score orders `cells`, from `runs` selections in either world.

    The adversary's event, the winners with the largest likelihood ratios, is chosen from the cells' exact laws
    (`selection.output_law`) and not from what is simulated.  So Clopper and Pearson's limits hold as they stand.

    Parameters
    ----------
    cells : Cells
    law : Law
        One law of K.
    delta : float in (0, 1)
    runs : int
    confidence : float in (0, 1)
    seed : int

    Returns
    -------
    LowerBound

    Raises
    ------
    InputError
        Invalid values, or a batch of laws.

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
    # the event of which the expected counts would show most
    wrong, missed = (np.clip(np.round(x * runs), 0, runs) for x in (cost, 1.0 - gain))
    shown = clopper_pearson(wrong, runs, missed, runs, delta=delta, confidence=confidence).epsilon
    event = order[: int(np.argmax(shown)) + 1]
    hits = [
        int(cell_counts(masses, law, runs, seed=2 * seed + place)[event].sum())
        for place, masses in enumerate((cells.numerator, cells.denominator))
    ]
    return clopper_pearson(hits[1], runs, runs - hits[0], runs, delta=delta, confidence=confidence)


def _top(key: Any, repetitions: Any) -> Any:
    """1 - U^{1/K} from 53 random bits, in float64; NaN where K = 0."""
    bits = jax.random.bits(key, repetitions.shape, jnp.uint64) >> np.uint64(11)
    exponential = -jnp.log((bits.astype(jnp.float64) + 0.5) * 2.0**-53)
    return jnp.where(repetitions > 0, -jnp.expm1(-exponential / repetitions), jnp.nan)


@jax.jit
def _ranks(key: Any, repetitions: Any) -> Any:
    return _top(key, repetitions)


@jax.jit
def _counted(above: Any, key: Any, repetitions: Any) -> Any:
    """How often each cell wins, from the top down, and last how often K = 0."""
    top = jnp.where(repetitions > 0, _top(key, repetitions), 2.0).reshape(-1)
    cell = jnp.searchsorted(above, top, side="right")
    cell = jnp.where(top > 1.5, above.size + 1, cell)
    return jnp.zeros(above.size + 2, jnp.int32).at[cell].add(1)
