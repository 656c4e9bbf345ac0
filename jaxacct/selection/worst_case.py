"""The leak of the worst score, up to a bracket: epsilon and delta of "run K times, release the best"."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxacct.core.validation import broadcast_shape
from jaxacct.engines import backend, programs
from jaxacct.engines.devices import double_precision
from jaxacct.kernels import worst_score
from jaxacct.kernels.arrays import namespace
from jaxacct.kernels.worst_score import FINE, FINEST, GLANCE, MIDDLE, QUICK, STEADY, Resolution
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.selection.base_profile import SAYS_NOTHING, Curve, curves, meet, sides
from jaxacct.selection.law_of_k import Law

LARGEST_EPS = 600.0
"""Largest eps that is searched, short of the overflow of exp; beyond it delta is at most its value here."""
PER_CALL = 16
"""Configurations in one call of a compiled program; calls run on all cores, as single configurations do on NumPy."""
WIDTH = 1e-4
"""Absolute width of eps, and relative width of delta, above which a configuration is solved at a finer resolution."""
BASE_WIDTH = 1e-3
"""Widths that a base's own bracket may explain, relative to eps (to 1 where that is less), or to delta."""


def known_curves(run: Mechanism, coarse: bool = False) -> list[dict[str, Curve]]:
    """The curves of a base, computed once; `coarse` ones need half as many points of its profile."""
    with backend.job(1, apart=True):  # one base's profile
        return _kept_curves(run, coarse, backend.on_numpy(1))


@functools.lru_cache(maxsize=8)
def _kept_curves(run: Mechanism, coarse: bool, numpy: bool) -> list[dict[str, Curve]]:
    """The curves of a base, cached: a curve takes seconds for DP-SGD, and every question about the base uses it."""
    return curves(run, coarse)


def bracket(
    quantity: str, run: Mechanism, law: Law, values: Any, relation: str, width: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of "epsilon" at deltas in (0, 1), or of "delta" at eps >= 0; all arguments broadcast.

    width : a bracket of eps that is wider than WIDTH, and wider than the share `width` of eps, is computed again with
        more rows and columns; likewise a bracket of delta that is wider than either share of it.  With inf nothing is
        computed again, and points of a profile of delta are within some 1e-3.
    """
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape, quantity: np.shape(values)})
    # curves through half as many points will do
    known = known_curves(run, 1e-3 <= width < np.inf)
    size = int(np.prod(shape))
    base = np.broadcast_to(np.arange(len(known)).reshape(batch_shape(run)), shape).reshape(-1)
    flat = np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)
    laws, at = law.flattened(shape), np.minimum(flat, LARGEST_EPS)
    ends, plain = np.zeros((2, size)), backend.on_numpy(size, selections=True)
    before: list[str] = []
    for direction in (side.direction for side in sides(run, relation)):
        stacked = jax.tree.map(lambda *x: np.stack(x), *(each[direction] for each in known)) if size else None
        # a symmetric base among others has one curve for both directions: its second direction needs no answer
        open_ = [all(each[direction] is not each[name] for name in before) for each in known]
        due = np.flatnonzero(np.asarray(open_, bool)[base])
        before.append(direction)
        if quantity == "epsilon" and ends.any():
            # where a glance shows that this direction leaks at most delta at the upper end of the other direction,
            # the other direction's bracket is the answer for both
            at_end = np.minimum(ends[1, due], LARGEST_EPS)
            leak = _run("delta", GLANCE, stacked, base[due], laws.taken(due), at_end, plain)[1]
            due = due[~(leak <= flat[due]) & (ends[0, due] < np.inf)]
        if due.size:
            rows = base[due], laws.taken(due), at[due]
            ends[:, due] = _solved(quantity, stacked, rows, width, plain, ends[:, due])
    if quantity == "delta":
        ends[0] = np.where(flat > LARGEST_EPS, 0.0, ends[0])
    return ends[0].reshape(shape), ends[1].reshape(shape)


def _solved(
    quantity: str, stacked: Any, rows: tuple[np.ndarray, Law, np.ndarray], width: float, plain: bool, other: np.ndarray
) -> np.ndarray:
    """(2, B) ends of the larger of one direction and the other; a wide bracket is computed again more finely."""
    (base, laws, values), once = rows, width == np.inf
    first = MIDDLE if once and quantity == "delta" else QUICK
    low, high = _run(quantity, first, stacked, base, laws, values, plain)
    finer = () if once else (FINE, FINEST) if width == 0.0 else (STEADY, MIDDLE, FINE)
    due = low < np.inf
    for effort in finer:
        least, most = np.maximum(low, other[0]), np.maximum(high, other[1])
        aim = (
            np.maximum(WIDTH, width * np.where(due, least, 0.0)) if quantity == "epsilon" else max(WIDTH, width) * least
        )
        wide = np.flatnonzero(due & (high > other[1]) & ~(most <= least + aim))
        if wide.size:
            before = high[wide] - low[wide]
            ends = _run(quantity, effort, stacked, base[wide], laws.taken(wide), values[wide], plain)
            low[wide], high[wide] = meet((low[wide], high[wide]), ends, SAYS_NOTHING[quantity])
            after, scale = high[wide] - low[wide], np.maximum(high[wide], quantity == "epsilon")
            # little is gained if the width is mostly that of the base's own bracket, provided that it is small
            due[wide] = ~((after > 0.8 * before) & (after <= BASE_WIDTH * scale))
    return np.maximum(np.stack([low, high]), other)


def _run(
    quantity: str, effort: Resolution, stacked: Any, base: np.ndarray, laws: Law, values: np.ndarray, plain: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of each configuration, on NumPy if plain."""
    size, chunk = values.size, 1 if plain or values.size == 1 else PER_CALL
    if not plain:
        run = _compiled(quantity, effort)
        with double_precision():
            curve = jax.device_put(stacked)

    def one(start: int) -> np.ndarray:
        with double_precision(), np.errstate(all="ignore"):  # the law of a user may call JAX
            if plain:
                curve_of_one = _taken(stacked, base[start])
                return np.stack(_of_one(quantity, effort, curve_of_one, laws.taken(start), values[start]))[:, None]
            index = np.minimum(np.arange(start, start + chunk), size - 1)
            return np.stack(run(curve, base[index], laws.taken(index), values[index]))

    starts = range(0, size, chunk)
    if len(starts) > 1 and not plain:  # NumPy's calls are so short that threads would only wait for each other
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            pieces = list(pool.map(one, starts))
    else:
        pieces = [one(start) for start in starts]
    found = np.concatenate(pieces, axis=1)[:, :size] if pieces else np.zeros((2, 0))
    return found[0].copy(), found[1].copy()


def _taken(tree: Any, index: Any) -> Any:
    """The elements at `index` of every array of a pytree."""
    return jax.tree.map(lambda x: x[index], tree)


@functools.cache
def _compiled(quantity: str, effort: Resolution) -> backend.Compiled:
    # a quarter faster on CPUs that have such wide vectors, and without effect on others
    options = programs.known(xla_cpu_prefer_vector_width=512)
    return backend.Compiled(functools.partial(_program, quantity, effort), options, f"{__name__} {quantity} {effort}")


def _program(quantity: str, effort: Resolution, stacked: Any, base: Any, laws: Law, values: Any) -> Any:
    """(lower, upper) of each configuration, one after the other, so that each stays in the cache."""
    return jax.lax.map(
        lambda item: _of_one(quantity, effort, _taken(stacked, item[0]), *item[1:]), (base, laws, values)
    )


def _of_one(quantity: str, effort: Resolution, curve: Curve, law: Law, value: Any) -> tuple[Any, Any]:
    """(lower, upper) of one configuration."""
    xp = namespace(value)
    if quantity == "epsilon":
        return worst_score.epsilon(law, curve.above, curve.below, xp.log(value), xp.asarray(LARGEST_EPS), effort)
    return worst_score.delta(law, curve.above, curve.below, xp.exp(value), effort)
