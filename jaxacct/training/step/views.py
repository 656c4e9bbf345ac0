"""A parameter seen with its axes reordered, split or merged: which entries each axis of the view goes through.

An axis is a list of steps (size, stride), outermost first: index i along it, written in the mixed base of the sizes, is
the sum of digit times stride in the parameter's own order of entries.  Casts change no place and are no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

__all__ = ["Step", "View", "merged"]

Step = tuple[int, int]
"""(size, stride)."""


@dataclass(frozen=True)
class View:
    """All entries of a parameter, or, inside of loops over its slices, those of one slice.

    axes : of each axis, its steps.  narrow : the dtype with the smallest range among those that the view went through.
    loops : around this view, outermost first: how often each runs, and the steps along which it cuts the parameter;
    None where all of its runs see the same.
    """

    axes: tuple[tuple[Step, ...], ...]
    narrow: Any
    loops: tuple[tuple[int, tuple[Step, ...] | None], ...] = ()

    @classmethod
    def of(cls, aval: Any) -> View:
        """An array as it lies, row by row."""
        strides = [math.prod(aval.shape[i + 1 :]) for i in range(aval.ndim)]
        return cls(tuple(_axis([step]) for step in zip(aval.shape, strides, strict=True)), aval.dtype)

    def transposed(self, permutation: Sequence[int]) -> View:
        """With its axes in another order."""
        return replace(self, axes=tuple(self.axes[i] for i in permutation))

    def cast(self, dtype: Any) -> View:
        """In another dtype."""
        narrow = min(self.narrow, jnp.dtype(dtype), key=lambda each: float(jnp.finfo(each).max))
        return replace(self, narrow=narrow)

    def sliced(self, length: int) -> View:
        """One slice of its first axis, in a loop over them."""
        return replace(self, axes=self.axes[1:], loops=(*self.loops, (length, self.axes[0])))

    def repeated(self, length: int) -> View:
        """The same in every run of a loop."""
        return replace(self, loops=(*self.loops, (length, None)))

    def reshaped(self, sizes: Sequence[int]) -> View | None:
        """With its entries, row by row, in other axes; None where an axis would have no constant strides.

        >>> import jax
        >>> view = View.of(jax.ShapeDtypeStruct((2, 6), float)).transposed((1, 0))
        >>> view.reshaped((3, 2, 2)).axes, view.reshaped((4, 3))
        ((((3, 2),), ((2, 1),), ((2, 6),)), None)
        """
        rest = list(merged(step for axis in self.axes for step in axis))
        axes = []
        for size in sizes:
            steps = []
            while size > 1:
                (here, stride), *rest = rest
                if here > size:
                    if here % size:
                        return None
                    rest.insert(0, (here // size, stride))
                    here, stride = size, stride * (here // size)
                if size % here:
                    return None
                steps.append((here, stride))
                size //= here
            axes.append(tuple(steps))
        return replace(self, axes=tuple(axes))


def merged(steps: Any) -> tuple[Step, ...]:
    """The same places in the same order, with as few steps as there can be.

    >>> merged([(2, 12), (3, 4), (5, 1)])
    ((6, 4), (5, 1))
    """
    out: list[Step] = []
    for size, stride in steps:
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        elif size > 1:
            out.append((size, stride))
    return tuple(out)


def _axis(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(step for step in steps if step[0] != 1)
