"""The worst score of a selection: brackets of epsilon and delta, the score itself, and the law of the output."""

from __future__ import annotations

import functools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import DELTA, PROBABILITY, InputError, broadcast_shape, check, choice
from jaxacct.engines import backend, programs
from jaxacct.engines.devices import double_precision
from jaxacct.kernels import worst_score
from jaxacct.kernels.arrays import namespace
from jaxacct.kernels.worst_score import FINE, FINEST, GLANCE, MIDDLE, QUICK, STEADY, Inner, Resolution
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import element, require_mechanism
from jaxacct.selection.base_profile import SAYS_NOTHING, Base, Curve, bases, meet, sides, under
from jaxacct.selection.law_of_k import Law, evaluated, require_law

LARGEST_EPS = 600.0
"""Largest eps that is searched, far from overflow of e^eps. At a larger eps, delta(LARGEST_EPS) bounds delta."""
MOST_KEPT = 128
"""Number of bases whose curves are kept. The curves of a base take up to 2 MB."""
_kept: dict[tuple[Mechanism, bool, bool], Base] = {}
"""Bases by (mechanism, `coarse`, whether NumPy computed them). The most recently used bases are at the end."""
_keeping = threading.Lock()
WIDTH = 1e-4
"""Width above which a bracket is computed again at a finer resolution, absolute for eps and relative for delta."""


def known_bases(run: Mechanism, coarse: bool = False) -> list[Base]:
    """Return the Base of each configuration, from the cache if possible. `coarse` halves the number of curve points."""
    with backend.job(1, apart=True):  # NumPy or XLA is chosen as for one base, even for a large batch
        shape, way = batch_shape(run), (coarse, backend.on_numpy(1))
        each = [element(run, index) if shape else run for index in np.ndindex(shape)]
        keys = [(one, *way) for one in each]
        if any(key in _kept for key in keys):
            kept = [_kept.get(key) for key in keys]  # copied, since another thread may drop a base from `_kept`
            found = [bases(one, coarse)[0] if base is None else base for one, base in zip(each, kept, strict=True)]
        else:
            found = bases(run, coarse)
    with _keeping:
        for key, base in zip(keys, found, strict=True):
            _kept.pop(key, None)
            _kept[key] = base
        for key in list(_kept)[:-MOST_KEPT]:
            del _kept[key]
    return found


def bracket(quantity: str, run: Mechanism, law: Law, values: Any, relation: str, width: float = 0.0) -> np.ndarray:
    """Return brackets (2, *shape) of "epsilon" or "delta". Refine those wider than WIDTH and the relative `width`."""
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": law.shape, quantity: np.shape(values)})
    # coarse curves give brackets that are narrow enough for a finite `width` of 1e-3 or more
    known = [each.curves for each in known_bases(run, 1e-3 <= width < np.inf)]
    size = int(np.prod(shape))
    base = np.broadcast_to(np.arange(len(known)).reshape(batch_shape(run)), shape).reshape(-1)
    flat = np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)
    laws, at = law.flattened(shape), np.minimum(flat, LARGEST_EPS)
    ends, plain = np.zeros((2, size)), backend.on_numpy(size, selections=True)
    before: list[str] = []
    for direction in (side.direction for side in sides(run, relation)):
        stacked = jax.tree.map(lambda *x: np.stack(x), *(each[direction] for each in known)) if size else None
        # a symmetric base in a batch has one curve for both directions, so that its second direction is skipped
        open_ = [all(each[direction] is not each[name] for name in before) for each in known]
        due = np.flatnonzero(np.asarray(open_, bool)[base])
        before.append(direction)
        if quantity == "epsilon" and ends.any():
            # `leak` bounds this direction's delta at the upper end of the first direction's bracket of epsilon. If it
            # is at most the given delta, that bracket holds for both directions.
            at_end = np.minimum(ends[1, due], LARGEST_EPS)
            leak = _run("delta", GLANCE, stacked, base[due], laws.taken(due), at_end, plain)[1]
            due = due[~(leak <= flat[due]) & (ends[0, due] < np.inf)]
        if due.size:
            rows = base[due], laws.taken(due), at[due]
            ends[:, due] = _solved(quantity, stacked, rows, width, plain, ends[:, due])
    if quantity == "delta":
        ends[0] = np.where(flat > LARGEST_EPS, 0.0, ends[0])
    return ends.reshape(2, *shape)


def _solved(
    quantity: str, stacked: Any, rows: tuple[np.ndarray, Law, np.ndarray], width: float, plain: bool, other: np.ndarray
) -> np.ndarray:
    """Compute brackets (2, B) of `quantity` in this direction. Return the larger of their ends and those of `other`."""
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
            # if `effort` hardly narrowed a narrow bracket, the width comes from the curve: no finer effort helps
            due[wide] = ~((after > 0.8 * before) & (after <= 1e-3 * scale))
    return np.maximum(np.stack([low, high]), other)


def _run(
    quantity: str, effort: Resolution, stacked: Any, base: np.ndarray, laws: Law, values: np.ndarray, plain: bool
) -> np.ndarray:
    """Return brackets (2, B) of `quantity` for the worst score, by NumPy if `plain`, else by a compiled program."""
    size, chunk = values.size, 1 if values.size == 1 else 16  # configurations in one call of the program
    if plain:
        with double_precision(), np.errstate(all="ignore"):  # float64, since a user's law may call JAX
            rows = zip(base, map(laws.taken, range(size)), values, strict=True)
            each = [_of_one(quantity, effort, _taken(stacked, place), law, value) for place, law, value in rows]
        return np.array(each, np.float64).reshape(-1, 2).T
    run = _compiled(quantity, effort)
    with double_precision():
        curve = jax.device_put(stacked)

    def one(start: int) -> np.ndarray:
        with double_precision(), np.errstate(all="ignore"):
            index = np.minimum(np.arange(start, start + chunk), size - 1)
            return np.stack(run(curve, base[index], laws.taken(index), values[index]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pieces = list(pool.map(one, range(0, size, chunk)))
    return np.concatenate([*pieces, np.zeros((2, 0))], axis=1)[:, :size]


def _taken(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


@functools.cache
def _compiled(quantity: str, effort: Resolution) -> backend.Compiled:
    # vectors of 512 bits make CPUs that have them a quarter faster; on other CPUs the option has no effect
    options = programs.known(xla_cpu_prefer_vector_width=512)
    return backend.Compiled(functools.partial(_program, quantity, effort), options, f"{__name__} {quantity} {effort}")


def _program(quantity: str, effort: Resolution, stacked: Any, base: Any, laws: Law, values: Any) -> Any:
    """Return the bracket of each configuration, one after the other: each stays in the processor's cache."""
    return jax.lax.map(
        lambda item: _of_one(quantity, effort, _taken(stacked, item[0]), *item[1:]), (base, laws, values)
    )


def _of_one(quantity: str, effort: Resolution, curve: Curve, law: Law, value: Any) -> tuple[Any, Any]:
    """Return lower and upper bounds of the `quantity` of one configuration."""
    xp = namespace(value)
    if quantity == "epsilon":
        return worst_score.epsilon(law, curve.above, curve.below, xp.log(value), xp.asarray(LARGEST_EPS), effort)
    return worst_score.delta(law, curve.above, curve.below, xp.exp(value), effort)


class Attack(float):
    """The epsilon that an order of scores reaches, together with the order. No valid claim is below this epsilon.

    The rank u of an outcome of the base is the Q-mass of the outcomes with a larger likelihood ratio.  An outcome whose
    rank is below ``rank[-1]`` is active.  An active outcome scores above the outcomes of the ranks in (u, served], and
    below all others.

    Parameters
    ----------
    epsilon : float
    direction : {"remove", "add"}
    rank : ends of the active intervals of ranks, ascending from 0, shape (R + 1,).
    served : for each interval, the largest rank that its outcomes outscore; not increasing, shape (R,).

    References
    ----------
    README.md of this folder, "The worst score".

    >>> found = Attack(0.6, "remove", np.array([0.0, 0.1]), np.array([0.3]))
    >>> found.epsilon, found.score([0.0, 0.05, 0.2, 0.5]).round(2).tolist()
    (0.6, [1.0, 0.25, 0.1, 0.5])
    """

    direction: str
    rank: np.ndarray
    served: np.ndarray

    def __new__(cls, epsilon: float, direction: str, rank: np.ndarray, served: np.ndarray) -> Attack:
        self = super().__new__(cls, epsilon)
        self.direction, self.rank, self.served = direction, rank, served
        return self

    @property
    def epsilon(self) -> float:
        """The epsilon as a plain float."""
        return float(self)

    def score(self, rank: ArrayLike) -> np.ndarray:
        """Return the scores, in [0, 1], of outcomes of rank `rank`; rank 0, where dQ = 0, has the largest."""
        u = np.asarray(rank, np.float64)
        active = u < self.rank[-1]
        # a score is the Q-mass of all outcomes that score lower: for an active outcome, those of the ranks (u, served]
        row = np.clip(np.searchsorted(self.rank, u, side="right") - 1, 0, self.served.size - 1)
        below = self.served[row] - u
        # an inactive outcome of rank u outscores active outcomes whose `served` is below u; `before` is their Q-mass
        rows = np.searchsorted(-self.served, -u, side="right")
        before = self.rank[-1] - self.rank[np.minimum(rows, self.served.size)]
        first = self.served[-1]
        inactive = np.where(u <= first, first - u, u - self.rank[-1] + before)
        return np.where(u == 0.0, 1.0, np.where(active, below, inactive))


def attack(
    run: Mechanism, k: Law, *, delta: float, relation: str = "add_or_remove_one", candidates: str = "iid"
) -> Attack:
    """Return the epsilon that the worst score reaches at `delta`, with the score.

    The score is the worst one for a curve just below the trade-off curve of `run`, which maps u to the largest P-mass
    of a set of Q-mass u.  Every base whose trade-off curve is nowhere below that of `run` reaches this epsilon.  If two
    data sets attain the curve, no valid claim is below it.  For a sample of fixed size perhaps no two data sets do.

    Parameters
    ----------
    run : one configuration of the base.
    k : one law of K.
    delta : float in (0, 1)
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    candidates : "iid"; "adaptive" is refused, since adaptive candidates reach the lower end of `ja.epsilon`.

    Returns
    -------
    Attack

    References
    ----------
    README.md of this folder, "The worst score".

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> found = selection.attack(ja.Gaussian(3.73), selection.Geometric(0.1), delta=1e-5)
    >>> round(found, 3)
    1.54
    """
    if choice("candidates", candidates, ("iid", "adaptive")) != "iid":
        raise InputError(
            "candidates = 'adaptive' has no worst order of scores: candidates that carry their history reach the lower "
            "end of ja.epsilon(select(..., candidates='adaptive'), delta); use that"
        )
    require_mechanism("run", run)
    require_law("k", k)
    target = float(np.asarray(check("delta", delta, DELTA)))
    if shape := broadcast_shape({"the mechanism": batch_shape(run), "k": k.shape}):
        raise InputError(f"an attack is on one selection, not on a batch of shape {shape}; take an element")
    each: list[Attack] = []
    run, relation = under(run, relation, either_order=False)  # an attack has one order
    find = _order if backend.on_numpy(1) else jax.jit(_order)
    curves = known_bases(run)[0].curves
    for side in sides(run, relation):
        below = curves[side.direction].below
        reached = float(bracket("epsilon", run, k, target, side.forward, math.inf)[0])
        with double_precision(), np.errstate(all="ignore"):
            order, (gain, cost) = find(k, below, np.exp(min(reached, LARGEST_EPS)))
        gain, cost = float(gain), float(cost)
        count = int(np.sum(np.asarray(order.active)))
        epsilon = max(math.log((gain - target) / cost), 0.0) if gain > target and cost > 0.0 else 0.0
        each.append(
            Attack(epsilon, side.direction, np.asarray(order.row_q)[: count + 1], np.asarray(order.served_q)[:count])
        )
    return max(each)


def _order(law: Law, below: Inner, ratio: Any) -> Any:
    """Return the order of scores that leaks most at e^eps = `ratio`, and (gain, cost): delta >= gain - e^eps cost."""
    order = worst_score.best_order(law, below, ratio, FINE)
    return order, worst_score.attained(law, below, order)


def output_law(probabilities: ArrayLike, k: Law) -> np.ndarray:
    """Compute the probability with which "run K times, release the best" releases each outcome of a finite base.

    With phi the generating function of K, and F the distribution function of the base along the order of the scores:
    `Pr[y] = sum_k Pr[K = k] (F(<= y)^k - F(< y)^k) = phi(F(<= y)) - phi(F(< y))`.  No two outcomes have equal scores.
    The absolute error is at most 1e-14.

    Parameters
    ----------
    probabilities : the n outcomes' probabilities, shape (..., n), by ascending score; they sum to 1 (to 1e-13).
    k : one law of K.

    Returns
    -------
    numpy.ndarray, shape (..., n + 1): the probability that K = 0 and nothing is released, then that of each outcome.

    References
    ----------
    Xiang, Wang and Wang (2024), Theorem 2.

    >>> from jaxacct import selection
    >>> output_law([0.5, 0.5], selection.PointMass(2)).tolist()
    [0.0, 0.25, 0.75]
    """
    each = np.atleast_1d(check("probabilities", probabilities, PROBABILITY))
    if np.any(np.abs(np.sum(each, axis=-1) - 1.0) > 1e-13):
        raise InputError("probabilities must sum to 1 along the last axis; divide them by their sum")
    if not isinstance(k, Law) or k.shape:
        raise InputError(f"k = {k!r:.60} must be one law of K; use one such as selection.Geometric(0.1)")
    above = np.cumsum(each[..., ::-1], axis=-1)[..., ::-1]  # 1 - F(< y)
    y = np.concatenate([np.ones((*each.shape[:-1], 1)), above[..., 1:], np.zeros((*each.shape[:-1], 1))], axis=-1)
    value = evaluated(k, np.clip(y, 0.0, 1.0))[0]
    return np.concatenate([value[..., :1], np.maximum(np.diff(value, axis=-1), 0.0)], axis=-1)
