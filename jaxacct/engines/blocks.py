"""Many configurations in blocks, on the cores of the machine, with a progress bar.

NumPy lets go of the interpreter inside its loops, so that two threads do two blocks at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from jaxacct.engines.contour import Answer
from jaxacct.progress import Progress

__all__ = ["BLOCK", "in_blocks"]

BLOCK = 128
"""Most configurations evaluated together."""
LEAST = 32
"""Fewest, where there are more than that many."""
MOST_THREADS = 8
ROWS_WITH_PROGRESS = 300
"""Configurations from which on a progress bar shows."""
FAILURES = (ArithmeticError, ValueError, IndexError, MemoryError)
"""What a block may raise; it is then done row by row, and a row that fails has no answer but the largest bracket."""

Solve = Callable[..., np.ndarray]
"""(sigma, slots, given) of some rows -> (3, rows): lower, estimate, upper."""


def in_blocks(solve: Solve, columns: list[np.ndarray]) -> Answer:
    """What `solve` finds for all rows of sigma, slots and a third number; like rows are done together."""
    sigma, slots, given = columns
    found = np.empty((3, sigma.size))
    order = np.lexsort((given, sigma, slots))
    threads = min(_cores(), MOST_THREADS)
    size = int(np.clip(-(-sigma.size // (4 * threads)), LEAST, BLOCK))
    blocks = [order[first : first + size] for first in range(0, sigma.size, size)]
    done, bar = 0, Progress(sigma.size, None if sigma.size >= ROWS_WITH_PROGRESS else False)

    def solved(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(all="ignore"):  # of this thread
            return rows, _solved(solve, [column[rows] for column in columns])

    if len(blocks) == 1:
        found[:, order] = solved(order)[1]
        return Answer(*found)
    pool = ThreadPoolExecutor(min(threads, len(blocks)))
    try:
        for job in as_completed([pool.submit(solved, rows) for rows in blocks]):
            rows, ends = job.result()
            found[:, rows] = ends
            done += rows.size
            bar.update(done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        bar.close()
    return Answer(*found)


def _solved(solve: Solve, columns: list[np.ndarray]) -> np.ndarray:
    try:
        return solve(*columns)
    except FAILURES:
        if columns[0].size == 1:
            return np.array([[0.0], [np.nan], [np.inf]])
        return np.concatenate([_solved(solve, [x[[i]] for x in columns]) for i in range(columns[0].size)], axis=1)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
