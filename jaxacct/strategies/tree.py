"""Tree aggregation: noisy sums of the nodes of binary trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxacct.core.validation import InputError, check_int
from jaxacct.strategies.sensitivity import Lags
from jaxacct.strategies.strategy import Strategy, check_run


@dataclass(frozen=True)
class PrefixSum(Strategy):
    """Tree aggregation: C has one row for each node of a binary tree over the steps of a block.

    A prefix sum adds the nodes of its binary expansion to those of the whole blocks before it.

    Parameters
    ----------
    steps : int
        n, the number of leaves.
    epochs : int
        Fixed epochs for which ``error`` and ``max_error`` are stated; it divides ``steps``.
    restarts : int
        Number of blocks, each with trees of its own; it divides ``steps``. With as many restarts as epochs each pass is
        one block.

    References
    ----------
    Kairouz et al. (2021), Practical and Private (Deep) Learning without Sampling or Shuffling, arXiv:2103.00039.

    >>> tree = PrefixSum(steps=64)
    >>> float(round(tree.sensitivity().upper ** 2, 9)), round(tree.error, 4)
    (7.0, 21.1094)
    """

    steps: int
    epochs: int = 1
    restarts: int = 1

    def __post_init__(self) -> None:
        check_run(self)
        object.__setattr__(self, "restarts", check_int("restarts", self.restarts, 1, "use a whole number"))
        if self.steps % self.restarts:
            raise InputError(f"restarts = {self.restarts} must divide steps = {self.steps}; use blocks of one length")

    @property
    def block(self) -> int:
        """Steps of a block."""
        return self.steps // self.restarts

    @property
    def overlap(self) -> int:
        return 1 << (self.block.bit_length() - 1)  # leaves of the largest node

    def lags(self) -> Lags:
        leaf = np.arange(self.steps) % self.block
        shared = np.zeros((self.overlap, self.steps))
        for level in range(self.block.bit_length()):
            node = leaf >> level
            whole = (node + 1) << level <= self.block  # the tree has no node that ends after the block
            for lag in range(1 << level):
                shared[lag] += whole & (node == (leaf + lag) >> level)
        return Lags(shared, shared)

    def squared_norms(self) -> tuple[np.ndarray, np.ndarray]:
        leaf = np.arange(self.steps) % self.block
        levels = np.arange(self.block.bit_length())[:, None]
        nodes = np.sum(((leaf >> levels) + 1) << levels <= self.block, 0).astype(np.float64)
        return nodes, nodes

    def squared_errors(self) -> np.ndarray:
        blocks, leaves = np.divmod(np.arange(self.steps) + 1, self.block)
        return blocks * float(self.block.bit_count()) + np.array([int(count).bit_count() for count in leaves], float)
