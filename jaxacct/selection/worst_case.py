"""What the worst score leaks, exactly up to a bracket: epsilon and delta of "run K times, release the best"."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.engines import programs
from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_mesh import FINE, FINEST, GLANCE, MIDDLE, QUICK, STEADY, Resolution
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.selection.base import MOST, meet, sides
from jaxacct.selection.curve import Curve, curves
from jaxacct.selection.laws import Law
from jaxacct.validation import broadcast_shape

__all__ = ["HIGHEST", "bracket", "known_curves"]

HIGHEST = 600.0
"""Largest eps that is looked for; beyond it delta is that at it, or less."""
CHUNK = 16
"""Configurations in one call of the compiled program."""
WIDTH = 1e-4
"""Absolute width of eps, relative width of delta, above which a configuration is looked at more finely."""
GAIN, BASE = 0.8, 1e-3
"""A finer look that leaves more than this share of the width, where that is small relative to eps, has found that the
base's own bracket is what is left."""
KEPT = 8
"""How many bases' curves are kept."""
_kept: OrderedDict[Mechanism, list[dict[str, Curve]]] = OrderedDict()


def known_curves(run: Mechanism) -> list[dict[str, Curve]]:
    """The curves of a base, computed once."""
    if run not in _kept:
        found = curves(run)
        _kept[run] = found
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
        return found
    return _kept[run]


def bracket(
    quantity: str, run: Mechanism, law: Law, values: Any, relation: str, width: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of "epsilon" at deltas in (0, 1), or of "delta" at eps >= 0; all broadcast.

    width : what is not as narrow as WIDTH (of a delta: as this share of it), or as the share `width` of it, is looked
    at again with more rows and columns; inf: nothing is, and points of a profile of delta are within some 1e-3.
    """
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape, quantity: np.shape(values)})
    known = known_curves(run)
    size = int(np.prod(shape))
    base = np.broadcast_to(np.arange(len(known)).reshape(batch_shape(run)), shape).reshape(-1)
    flat = np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)
    laws, at = law.flattened(shape), np.minimum(flat, HIGHEST)
    ends, quick = np.zeros((2, size)), programs.quickly(size)
    before: list[str] = []
    for direction in (side.direction for side in sides(run, relation)):
        stacked = jax.tree.map(lambda *x: np.stack(x), *(each[direction] for each in known)) if size else None
        # a symmetric base among others has one curve twice, and has then been answered
        open_ = [all(each[direction] is not each[name] for name in before) for each in known]
        due = np.flatnonzero(np.asarray(open_, bool)[base])
        before.append(direction)
        if quantity == "epsilon" and size > CHUNK and ends.any():
            # the other direction's bracket is that of both, where a glance shows that this one leaks at most delta at
            # its upper end
            some = jax.tree.map(lambda x, due=due: x[due], laws)
            leak = _in_chunks("delta", GLANCE, stacked, base[due], some, np.minimum(ends[1, due], HIGHEST), quick)[1]
            due = due[~(leak <= flat[due]) & (ends[0, due] < np.inf)]
        if due.size:
            some = jax.tree.map(lambda x, due=due: x[due], laws)
            ends[:, due] = _solved(quantity, stacked, base[due], some, at[due], width, quick, ends[:, due])
    if quantity == "delta":
        ends[0] = np.where(flat > HIGHEST, 0.0, ends[0])
    return ends[0].reshape(shape), ends[1].reshape(shape)


def _solved(
    quantity: str,
    stacked: Any,
    base: np.ndarray,
    laws: Law,
    values: np.ndarray,
    width: float,
    quick: bool,
    other: np.ndarray,
) -> np.ndarray:
    """(2, B) ends of one direction and the other, whose ends are known or 0, together.

    What is wide is done again with more rows and columns, unless it is the other direction that is.
    """
    once = width == np.inf
    first = MIDDLE if once and quantity == "delta" else QUICK
    low, high = _in_chunks(quantity, first, stacked, base, laws, values, quick)
    # a program more takes longer to compile than it saves on a few
    some_more = (MIDDLE, FINE) if width == 0.0 else (STEADY, MIDDLE, FINE)
    finer = () if once else (FINE, FINEST) if values.size <= CHUNK else some_more
    due = low < np.inf
    for effort in finer:
        least, most = np.maximum(low, other[0]), np.maximum(high, other[1])
        aim = (
            np.maximum(WIDTH, width * np.where(due, least, 0.0)) if quantity == "epsilon" else max(WIDTH, width) * least
        )
        wide = np.flatnonzero(due & (high > other[1]) & ~(most <= least + aim))
        if wide.size:
            before = high[wide] - low[wide]
            some = jax.tree.map(lambda x, wide=wide: x[wide], laws)
            ends = _in_chunks(quantity, effort, stacked, base[wide], some, values[wide], quick)
            low[wide], high[wide] = meet((low[wide], high[wide]), ends, MOST[quantity])
            after, scale = high[wide] - low[wide], np.maximum(high[wide], quantity == "epsilon")
            due[wide] = ~((after > GAIN * before) & (after <= BASE * scale))
    return np.maximum(np.stack([low, high]), other)


def _in_chunks(
    quantity: str, effort: Resolution, stacked: Any, base: np.ndarray, laws: Law, values: np.ndarray, quick: bool
) -> tuple[np.ndarray, np.ndarray]:
    chunk, run = CHUNK if values.size > 1 else 1, _compiled(quick)
    with jax.enable_x64():
        curve = jax.device_put(stacked)

    def one(start: int) -> np.ndarray:
        index = np.minimum(np.arange(start, start + chunk), values.size - 1)
        with jax.enable_x64():
            some = jax.tree.map(lambda x: x[index], laws)
            return np.stack(run(quantity, effort, curve, base[index], some, values[index]))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        pieces = list(pool.map(one, range(0, values.size, chunk)))
    found = np.concatenate(pieces, axis=1)[:, : values.size] if pieces else np.zeros((2, 0))
    return found[0].copy(), found[1].copy()


@functools.cache
def _compiled(quick: bool) -> Any:
    # a quarter faster on CPUs that have vectors so wide, and nothing to others
    options = programs.QUICK if quick else {"xla_cpu_prefer_vector_width": 512}
    return jax.jit(_program, static_argnums=(0, 1), compiler_options=programs.known(**options))


def _program(quantity: str, effort: Resolution, stacked: Any, base: Any, laws: Law, values: Any) -> Any:
    """(lower, upper) of each configuration, one after the other, so that each stays in the cache."""

    def one(item: Any) -> Any:
        which, law, value = item
        curve = jax.tree.map(lambda x: x[which], stacked)
        if quantity == "epsilon":
            return worst_score.epsilon(
                law.generating, curve.above, curve.below, jnp.log(value), jnp.asarray(HIGHEST), effort
            )
        return worst_score.delta(law.generating, curve.above, curve.below, jnp.exp(value), effort)

    return jax.lax.map(one, (base, laws, values))
