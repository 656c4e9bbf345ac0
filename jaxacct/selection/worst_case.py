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

from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_plan import FINE, MIDDLE, QUICK, Effort
from jaxacct.mechanisms import RELATIONS, Mechanism, batch_shape
from jaxacct.selection.curve import Curve, curves
from jaxacct.selection.laws import Law
from jaxacct.validation import broadcast_shape

__all__ = ["HIGHEST", "bracket", "known_curves"]

HIGHEST = 600.0
"""Largest eps that is looked for; beyond it delta is that at it, or less."""
CHUNK = 16
"""Configurations in one call of the compiled program."""
WIDTH = 1.8e-4
"""Absolute width of eps above which a configuration is looked at more finely."""
GAIN, BASE = 0.8, 1e-3
"""A finer look that leaves more than this share of the width, where that is small relative to eps, has found that the
base's own bracket is what is left."""
KEPT = 8
"""How many bases' curves are kept."""
_kept: OrderedDict[Any, list[list[Curve]]] = OrderedDict()


def known_curves(run: Mechanism, relation: str) -> list[list[Curve]]:
    """The curves of a base, computed once."""
    key = run, relation
    if key not in _kept:
        found = curves(run, relation)
        _kept[key] = found
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
        return found
    return _kept[key]


def bracket(
    quantity: str, run: Mechanism, law: Law, values: Any, relation: str, fine: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of "epsilon" at deltas in (0, 1), or of "delta" at eps >= 0; all broadcast.

    fine : whether an epsilon that is not narrow is looked at again with more rows and columns.
    """
    assert relation in RELATIONS
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape, quantity: np.shape(values)})
    sides = known_curves(run, "add_or_remove_one" if relation in ("add_one", "remove_one") else relation)
    size = int(np.prod(shape))
    base = np.broadcast_to(np.arange(len(sides)).reshape(batch_shape(run)), shape).reshape(-1)
    flat = np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)
    laws = law.flattened(shape)
    ends = np.zeros((2, size))
    for side in range(max((len(each) for each in sides), default=1)):
        if len(sides[0]) > 1 and relation == ("remove_one", "add_one")[1 - side]:
            continue
        stacked = jax.tree.map(lambda *x: np.stack(x), *(each[side] for each in sides)) if size else None
        ends = np.maximum(ends, _solved(quantity, stacked, base, laws, np.minimum(flat, HIGHEST), fine))
    if quantity == "delta":
        ends[0] = np.where(flat > HIGHEST, 0.0, ends[0])
    return ends[0].reshape(shape), ends[1].reshape(shape)


def _solved(quantity: str, stacked: Any, base: np.ndarray, laws: Law, values: np.ndarray, fine: bool) -> np.ndarray:
    """(2, B) ends for one direction; what is wide is done again with more rows and columns."""
    low, high = _in_chunks(quantity, QUICK, stacked, base, laws, values)
    # a program more takes longer to compile than it saves on a few
    finer = () if not fine or quantity != "epsilon" else (FINE,) if values.size <= CHUNK else (MIDDLE, FINE)
    due = low < np.inf
    for effort in finer:
        wide = np.flatnonzero(due & (high > low + WIDTH))
        if wide.size:
            before = high[wide] - low[wide]
            some = jax.tree.map(lambda x, wide=wide: x[wide], laws)
            ends = _in_chunks(quantity, effort, stacked, base[wide], some, values[wide])
            low[wide], high[wide] = np.maximum(low[wide], ends[0]), np.minimum(high[wide], ends[1])
            after = high[wide] - low[wide]
            due[wide] = ~((after > GAIN * before) & (after <= BASE * np.maximum(high[wide], 1.0)))
    return np.stack([low, high])


def _in_chunks(
    quantity: str, effort: Effort, stacked: Any, base: np.ndarray, laws: Law, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    chunk = CHUNK if values.size > 1 else 1
    with jax.enable_x64():
        curve = jax.device_put(stacked)

    def one(start: int) -> np.ndarray:
        index = np.minimum(np.arange(start, start + chunk), values.size - 1)
        with jax.enable_x64():
            some = jax.tree.map(lambda x: x[index], laws)
            return np.stack(_program(quantity, effort, curve, base[index], some, values[index]))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        pieces = list(pool.map(one, range(0, values.size, chunk)))
    found = np.concatenate(pieces, axis=1)[:, : values.size] if pieces else np.zeros((2, 0))
    return found[0].copy(), found[1].copy()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _program(quantity: str, effort: Effort, stacked: Any, base: Any, laws: Law, values: Any) -> Any:
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
