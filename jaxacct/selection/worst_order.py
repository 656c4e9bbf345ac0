"""The worst score of a selection as an order of the outcomes, with the epsilon it reaches; what an order releases."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import DELTA, PROBABILITY, InputError, check, choice
from jaxacct.engines import backend
from jaxacct.engines.devices import double_precision
from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_score import FINE, Inner
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.selection.base_profile import sides, under
from jaxacct.selection.law_of_k import Law, evaluated
from jaxacct.selection.mechanism import CANDIDATES, Selection
from jaxacct.selection.worst_case import LARGEST_EPS, bracket, known_curves


class Attack(float):
    """The epsilon that a score order reaches, which is a lower bound of every honest answer, together with the order.

    Outcomes of the base are ranked by likelihood ratio: rank u is the Q-mass of those with a higher one.  The active
    ranks are scored above exactly the ranks in (u, served], and below everything else.

    Parameters
    ----------
    epsilon : float
    direction : {"remove", "add"}
    rank : numpy.ndarray, shape (R + 1,)
        The ends of the active intervals of ranks, from 0.
    served : numpy.ndarray, shape (R,)
        Up to which rank each interval is served; it does not increase.

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
        """The number itself."""
        return float(self)

    def score(self, rank: ArrayLike) -> np.ndarray:
        """Scores in [0, 1] of outcomes by their rank u in [0, 1]; of two candidates the larger score wins.

        Outcomes with dQ = 0 have rank 0 and come before all others.
        """
        u = np.asarray(rank, np.float64)
        active = u < self.rank[-1]
        # time runs through the Q-mass: an active outcome is served when the inactive ranks up to `served` are
        row = np.clip(np.searchsorted(self.rank, u, side="right") - 1, 0, self.served.size - 1)
        below = self.served[row] - u
        # an inactive outcome of rank w comes after the active ones that are served before it
        rows = np.searchsorted(-self.served, -u, side="right")
        before = self.rank[-1] - self.rank[np.minimum(rows, self.served.size)]
        first = self.served[-1]
        inactive = np.where(u <= first, first - u, u - self.rank[-1] + before)
        return np.where(u == 0.0, 1.0, np.where(active, below, inactive))


def attack(
    run: Mechanism, k: Law, *, delta: float, relation: str = "add_or_remove_one", candidates: str = "iid"
) -> Attack:
    """The worst score at `delta`, and the epsilon that it reaches: no honest answer for the selection is below it.

    The order is that of a base whose trade-off curve is just below that of `run`, so that any base with at least the
    curve of `run` reaches at least this.

    Parameters
    ----------
    run : Mechanism
    k : Law
    delta : float in (0, 1)
        One configuration of each.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    candidates : {"iid"}
        Others are refused: of adaptive candidates the lower end of `ja.epsilon` is reached.

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
    if choice("candidates", candidates, CANDIDATES) != "iid":
        raise InputError(
            "candidates = 'adaptive' has no worst order of scores: candidates that carry their history reach the lower "
            "end of ja.epsilon(select(..., candidates='adaptive'), delta); use that"
        )
    chosen = Selection(run, k)
    target = float(np.asarray(check("delta", delta, DELTA)))
    if batch_shape(chosen):
        raise InputError(
            f"an attack is on one selection, not on a batch of shape {batch_shape(chosen)}; take an element"
        )
    best: Attack | None = None
    run, relation = under(run, relation)
    find = _order if backend.on_numpy(1) else _compiled_order
    curves = known_curves(run)[0]
    for side in sides(run, relation):
        curve, direction = curves[side.direction], side.direction
        reached = float(bracket("epsilon", run, k, target, side.forward, math.inf)[0])
        with double_precision(), np.errstate(all="ignore"):
            order, (gain, cost) = find(k, curve.below, np.exp(min(reached, LARGEST_EPS)))
            gain, cost = float(gain), float(cost)
        count = int(np.sum(np.asarray(order.active)))
        epsilon = max(math.log((gain - target) / cost), 0.0) if gain > target and cost > 0.0 else 0.0
        found = Attack(epsilon, direction, np.asarray(order.row_q)[: count + 1], np.asarray(order.served_q)[:count])
        best = found if best is None or found > best else best
    assert best is not None
    return best


def _order(law: Law, below: Inner, ratio: Any) -> Any:
    """The best order at E = ratio, and the gain and cost that it attains."""
    order = worst_score.best_order(law, below, ratio, FINE)
    return order, worst_score.attained(law, below, order)


_compiled_order = jax.jit(_order)


def output_law(probabilities: ArrayLike, k: Law) -> np.ndarray:
    """Probabilities with which "run K times, release the best" releases each outcome of a finite base.

    `Pr[y] = sum_k Pr[K = k] (F(<= y)^k - F(< y)^k) = phi(F(<= y)) - phi(F(< y))`, F the distribution function of the
    base along the order of the scores, one outcome per score.  Accurate to 1e-14 absolutely.

    Parameters
    ----------
    probabilities : array_like, shape (..., n)
        Of the base's outcomes, in ascending order of their score; they sum to 1 (to 1e-13).
    k : Law
        One law of K.

    Returns
    -------
    numpy.ndarray, shape (..., n + 1)
        First the probability that K = 0 and nothing is released, then that of each outcome.

    References
    ----------
    Xiang, Wang and Wang (2024), Theorem 2.

    >>> from jaxacct import selection
    >>> output_law([0.5, 0.5], selection.PointMass(2)).tolist()
    [0.0, 0.25, 0.75]
    """
    each = np.atleast_1d(check("probabilities", probabilities, PROBABILITY))
    bad = np.abs(np.sum(each, axis=-1) - 1.0) > 1e-13
    if np.any(bad):
        raise InputError("probabilities must sum to 1 along the last axis; divide them by their sum")
    if not isinstance(k, Law) or k.shape:
        raise InputError(f"k = {k!r:.60} must be one law of K; use one such as selection.Geometric(0.1)")
    above = np.cumsum(each[..., ::-1], axis=-1)[..., ::-1]  # 1 - F(< y)
    y = np.concatenate([np.ones((*each.shape[:-1], 1)), above[..., 1:], np.zeros((*each.shape[:-1], 1))], axis=-1)
    value = evaluated(k, np.clip(y, 0.0, 1.0))[0]
    return np.concatenate([value[..., :1], np.maximum(np.diff(value, axis=-1), 0.0)], axis=-1)
