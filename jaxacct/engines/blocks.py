"""Many configurations in blocks, on the cores of the machine, with a progress bar.

NumPy lets go of the interpreter inside its loops, so that two threads do two blocks at a time.  Where arrays are short
they mostly wait for each other: a batch that does not fill two blocks is done in one thread, which takes less CPU time
and is as soon done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import TypeVar

import numpy as np

from jaxacct.core.progress import Progress
from jaxacct.engines.contour import Answer

__all__ = ["BLOCK", "in_blocks", "on_cores"]

BLOCK = 256
"""Most configurations evaluated together."""
LEAST = 64
"""Fewest, where there are more than that many."""
MOST_THREADS = 8
ROWS_WITH_PROGRESS = 300
"""Configurations from which on a progress bar shows."""
FAILURES = (ArithmeticError, ValueError, IndexError, MemoryError)
"""What a block may raise; it is then done row by row, and a row that fails has no answer but the largest bracket."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Solve = Callable[..., np.ndarray]
"""(sigma, slots, given, ...) of some rows -> (3, rows): lower, estimate, upper."""


def in_blocks(solve: Solve, columns: list[np.ndarray]) -> Answer:
    """What `solve` finds for all rows of sigma, slots, a third number and more; like rows are done together."""
    sigma, slots, given = columns[:3]
    found = np.empty((3, sigma.size))
    order = np.lexsort((given, sigma, slots))
    threads = int(np.clip(sigma.size // BLOCK, 1, min(_cores(), MOST_THREADS)))
    size = int(np.clip(-(-sigma.size // (2 * threads)), LEAST, BLOCK)) if threads > 1 else BLOCK
    blocks = [order[first : first + size] for first in range(0, sigma.size, size)]

    def solved(rows: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # of this thread
            return _solved(solve, [column[rows] for column in columns])

    bar = Progress(sigma.size, None if sigma.size >= ROWS_WITH_PROGRESS else False)
    for at, ends in on_cores(solved, blocks, bar, [rows.size for rows in blocks], threads):
        found[:, blocks[at]] = ends
    return Answer(*found)


def on_cores(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    bar: Progress,
    sizes: Sequence[int] | None = None,
    threads: int = MOST_THREADS,
) -> Iterator[tuple[int, Result]]:
    """(place, what `work` returns) of every item, in any order; the bar is moved on by the items' sizes, or by 1 each.

    Where there is one item, or one of `threads`, all is done in the caller's own thread.  An interrupt cancels what has
    not begun.
    """
    done, most = 0, min(_cores(), threads, len(items))
    pool = ThreadPoolExecutor(most) if most > 1 else None
    try:
        if pool is None:
            found: Iterable[tuple[int, Result]] = ((at, work(item)) for at, item in enumerate(items))
        else:
            jobs = {pool.submit(copy_context().run, work, item): at for at, item in enumerate(items)}
            found = ((jobs[job], job.result()) for job in as_completed(jobs))
        for at, result in found:
            yield at, result
            done += 1 if sizes is None else sizes[at]
            bar.update(done)
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def _solved(solve: Solve, columns: list[np.ndarray]) -> np.ndarray:
    try:
        return solve(*columns)
    except FAILURES:
        if columns[0].size == 1:
            return np.array([[0.0], [0.0], [np.inf]])
        return np.concatenate([_solved(solve, [x[[i]] for x in columns]) for i in range(columns[0].size)], axis=1)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
