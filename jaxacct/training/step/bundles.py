"""Small arrays side by side in one, so that a program has one operation for all of them: it is compiled once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Bundle", "bundled"]

_SMALL = 2**14
"""Entries of an array that is copied into a bundle; larger ones are bundles of their own and are not copied."""


@dataclass(frozen=True)
class Bundle:
    """Arrays that are taken as one.  members : their numbers.  shapes : theirs.  group : of all of them."""

    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    group: int

    @property
    def size(self) -> int:
        """Entries of all members."""
        return sum(map(math.prod, self.shapes))

    def joined(self, arrays: Sequence[Any]) -> Any:
        """(examples, entries) from the members' values, the examples in front."""
        flat = [array.reshape(len(array), -1) for array in arrays]
        return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)

    @property
    def starts(self) -> list[int]:
        """Where each member begins."""
        return [0, *itertools.accumulate(map(math.prod, self.shapes))][:-1]

    def parted(self, total: Any, starts: Iterable[Any]) -> list[Any]:
        """The members' parts of an array of entries; starts : the next ones are where they begin, and may be data.

        >>> bundle = Bundle((0, 1), ((), (2,)), 0)
        >>> [part.tolist() for part in bundle.parted(bundle.joined([jnp.ones(1), jnp.zeros((1, 2))])[0], [0, 1])]
        [1.0, [0.0, 0.0]]
        """
        part = lambda start, size: jax.lax.dynamic_slice_in_dim(total, start, size, allow_negative_indices=False)
        pairs = zip(self.shapes, starts, strict=False)
        return [part(start, math.prod(shape)).reshape(shape) for shape, start in pairs]


def bundled(members: Sequence[int], shapes: Sequence[tuple[int, ...]], groups: Sequence[int]) -> list[Bundle]:
    """The members in bundles: the small ones of each group together; shapes and groups are those of all numbers."""
    together: dict[Any, list[int]] = {}
    for i in members:
        small = math.prod(shapes[i]) <= _SMALL
        together.setdefault((groups[i], None if small else i), []).append(i)
    return [Bundle(tuple(each), tuple(shapes[i] for i in each), group) for (group, _), each in together.items()]
