"""Defines matrix mechanisms: the columns of each matrix C, and how far one record moves C X, where X is the data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxacct import strategies as known
from jaxacct.verification.ball_arithmetic import NotCovered, arb, ball, between, tick

Column = dict[Any, Any]
"""The non-zero entries of a column of C, by row."""
MOST_ENTRIES = 100_000
"""Largest number of entries of a matrix C that the verifier covers."""
MOST_PATTERNS = 20_000
"""Largest number of patterns, which are the sets of steps in which a record may take part."""
MOST_SIGNS = 10
"""If a pattern has at most this many steps, all signs of the contributions are tried."""
NEARLY = arb(1e-12)
"""Two squared norms are merged into one ball if their relative difference is below this."""
Moves = tuple[Any, list[tuple[Any, int]]]
"""The rate at which a record is sampled, and pairs (squared move of a release, number of such releases)."""


def _toeplitz(column: Sequence[Any], steps: int) -> list[Column]:
    _require_size(steps, len(column))
    return [{first + lag: c for lag, c in enumerate(column[: steps - first])} for first in range(steps)]


def _require_size(steps: int, bands: int) -> None:
    if steps * bands > MOST_ENTRIES:
        raise NotCovered(f"a matrix of more than {MOST_ENTRIES} entries")


def _given(coefficients: Sequence[float], steps: int) -> list[Column]:
    return _toeplitz([ball(c) for c in coefficients], steps)


def _buffered(buffers: int, steps: int, scales: Sequence[float], decays: Sequence[float]) -> list[Column]:
    _require_size(steps, steps)
    terms = [(ball(scales[k]), ball(decays[k])) for k in range(buffers)]
    powers = [sum((scale * decay**lag for scale, decay in terms), arb(0)) for lag in range(steps - 1)]
    return _toeplitz([arb(1), *powers], steps)


def _banded_inverse(inverse_bands: int, steps: int, inverse: Sequence[float]) -> list[Column]:
    """Return the columns of C. The first solves inverse * column = (1, 0, 0, ...), where * is a convolution."""
    _require_size(steps, steps)
    given = [ball(d) for d in inverse[:inverse_bands]]
    column = [1 / given[0]]
    for row in range(1, steps):
        earlier = sum((given[lag] * column[row - lag] for lag in range(1, min(len(given), row + 1))), arb(0))
        column.append(-earlier / given[0])
    return _toeplitz(column, steps)


def _column_normalised(bands: int, steps: int, diagonals: Sequence[Sequence[float]]) -> list[Column]:
    _require_size(steps, bands)
    lags = lambda first: range(min(bands, steps - first))
    return [{first + lag: ball(diagonals[lag][first]) for lag in lags(first)} for first in range(steps)]


def _tree(steps: int, restarts: int) -> list[Column]:
    """Return the column of each step: 1 at the nodes (block, level, place) of the tree that hold the step.

    A node that does not end within its block of `size` steps is left out.
    """
    _require_size(steps, steps.bit_length())
    size = steps // restarts
    nodes = lambda leaf: [(k, leaf >> k) for k in range(size.bit_length()) if ((leaf >> k) + 1) << k <= size]
    return [{(step // size, *node): arb(1) for node in nodes(step % size)} for step in range(steps)]


def _product(one: Column, other: Column) -> Any:
    return sum((entry * other[row] for row, entry in one.items() if row in other), arb(0))


def _squared_move(columns: list[Column], patterns: list[Sequence[int]]) -> Moves:
    """Enclose the largest || sum_{i in pi} C e_i x_i^T ||^2 over the patterns pi and contributions |x_i| <= 1.

    With the Gram matrix G of the columns, the square is sum_ij G_ij <x_i, x_j>, at most sum_ij |G_ij|.  The lower end
    comes from contributions x_i = +x or -x in one pattern: it is the largest square over all signs.  Where there are
    too many signs (`MOST_SIGNS`), it is the larger of the square for equal signs and the mean square over all signs,
    which is the trace of G.
    """
    gram = functools.lru_cache(None)(lambda i, j: _product(columns[i], columns[j]))

    def total(pattern: Sequence[int], signs: Sequence[int] | None) -> Any:
        tick()
        found = sum((gram(i, i) for i in pattern), arb(0))
        for (m, i), (n, j) in itertools.combinations(enumerate(pattern), 2):
            found += 2 * (abs(gram(i, j)) if signs is None else signs[m] * signs[n] * gram(i, j))
        return found

    sizes = [total(pattern, None) for pattern in patterns]
    worst = patterns[max(range(len(sizes)), key=lambda place: float(sizes[place].mid()))]
    rest = len(worst) - 1
    signs = itertools.product((1, -1), repeat=rest) if rest < MOST_SIGNS else [(1,) * rest]
    trace = sum((gram(i, i) for i in worst), arb(0))
    reached = functools.reduce(arb.max, (total(worst, (1, *each)) for each in signs), trace)
    return arb(1), [(between(reached, functools.reduce(arb.max, sizes)), 1)]


def _in_epochs(columns: list[Column], epochs: int) -> Moves:
    period, rest = divmod(len(columns), epochs)
    if rest:
        raise NotCovered("epochs that do not divide the steps")
    return _squared_move(columns, [range(first, len(columns), period) for first in range(period)])


def _apart(columns: list[Column], separation: int, most: int | None) -> Moves:
    longest = -(-len(columns) // separation)
    most = longest if most is None else min(most, longest)

    def after(pattern: tuple[int, ...]) -> Iterator[Sequence[int]]:
        later = range(pattern[-1] + separation if pattern else 0, len(columns))
        if not later or len(pattern) == most:
            yield pattern
            return
        # longer gaps are skipped, since a further step would fit into such a gap and never lower the sum of |G_ij|
        for step in later[:separation] if most == longest else later:
            yield from after((*pattern, step))

    patterns = list(itertools.islice(after(()), MOST_PATTERNS + 1))
    if len(patterns) > MOST_PATTERNS:
        raise NotCovered(f"more than {MOST_PATTERNS} patterns of participation")
    return _squared_move(columns, patterns)


def _cyclic(columns: list[Column], groups: int, sampling_probability: float) -> Moves:
    """Enclose the squared norms of the columns of one group, in descending order; nearly equal norms share one ball.

    A record belongs to one of several groups. At each rank, the norm of one group is the lower end of the ball, and the
    largest norm of all groups is the upper end.
    """
    for first, column in enumerate(columns):
        if not all(type(row) is int and first <= row < first + groups for row in column):
            raise NotCovered("cyclic Poisson sampling of more bands than groups, or of a tree")
    squares = [_product(column, column) for column in columns]
    size = lambda square: float(square.mid())
    ranked = [sorted(squares[j::groups], key=size, reverse=True) for j in range(min(groups, len(squares)))]
    by_rank = list(itertools.zip_longest(*ranked, fillvalue=arb(0)))
    leading = max(range(len(ranked)), key=lambda j: sum(map(size, ranked[j])))
    runs: list[tuple[Any, int]] = []
    for each in (between(rank[leading], functools.reduce(arb.max, rank)) for rank in by_rank):
        if not each > 0:
            raise NotCovered("a block of noise whose column may be 0")
        if runs and abs(runs[-1][0] - each) < NEARLY * each:
            runs[-1] = runs[-1][0].union(each), runs[-1][1] + 1
        else:
            runs.append((each, 1))
    return ball(sampling_probability), runs


MATRICES: dict[type, Callable[..., list[Column]]] = {
    known.Identity: lambda steps: _toeplitz([arb(1)], steps),
    known.Toeplitz: _given,
    known.Banded: lambda bands, steps, coefficients: _given(coefficients[:bands], steps),
    known.BLT: _buffered,
    known.BandedInverse: _banded_inverse,
    known.ColumnNormalised: _column_normalised,
    known.PrefixSum: _tree,
}
"""For each class of strategy, the function from its fields to the columns of C. `epochs` is left out, since no matrix
depends on it."""
WAYS: dict[type, Callable[..., Moves]] = {
    known.SingleParticipation: lambda columns: _squared_move(columns, [(step,) for step in range(len(columns))]),
    known.FixedEpochs: _in_epochs,
    known.MinSeparation: _apart,
    known.CyclicPoisson: _cyclic,
}
"""For each class of participation, the function from the columns of C and the fields of the class to `Moves`."""
