"""The engine of compositions of Gaussian mixtures: groups, capped and fixed samples, and Gaussians beside them.

Every direction of the relation is composed and answered by itself, and the larger answer is taken at the end, as in
directions.py, which answers from the dominating finite pairs where the contour cannot.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct.accounting.dispatch import is_open
from jaxacct.core.bounds import Bounds
from jaxacct.core.progress import Progress
from jaxacct.core.validation import GIBIBYTE, broadcast_shape
from jaxacct.engines.contour import TOLERANCE, Answer
from jaxacct.engines.mixture import suits
from jaxacct.engines.protocol import Effort, MechanismEngine, register
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.mechanisms.base import Combinator, take_rows
from jaxacct.mechanisms.base import register as register_mechanism
from jaxacct.mechanisms.parts import Part

if TYPE_CHECKING:
    from jaxacct.engines.mixture import Ends, Known, Row
from jaxacct.accounting.directions import worse_direction

__all__ = ["MixtureContour"]

SIGNS = {"add_one": (-1.0,), "remove_one": (1.0,)}
"""The directions of a relation: 1 remove, -1 add; both where it is not listed."""
ROWS_WITH_PROGRESS = 8
"""Configurations from which on a progress bar shows."""


@register_mechanism
@dataclass(frozen=True, eq=False)
class _Above(Combinator):
    """A mechanism of which only the pair that dominates it is known."""

    mechanism: Any

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self.mechanism.expand(relation, direction)

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"


class MixtureContour(MechanismEngine):
    """Compositions of Gaussian mixtures and Gaussians, by a contour integral."""

    name = "mixture_contour"
    beside_parts = True

    def supports(self, mechanism: Mechanism) -> bool:
        return suits(mechanism)

    def epsilon(self, mechanism: Mechanism, delta: np.ndarray, relation: str, rtol: float) -> Bounds:
        return _bracket("epsilon", mechanism, delta, relation, rtol)

    def delta(self, mechanism: Mechanism, epsilon: np.ndarray, relation: str, rtol: float) -> Bounds:
        return _bracket("delta", mechanism, epsilon, relation, rtol)


register(MixtureContour())


def _bracket(quantity: str, mechanism: Mechanism, given: np.ndarray, relation: str, rtol: float) -> Bounds:
    effort = Effort(rtol, 0.5 * rtol, TOLERANCE, 0.1 * rtol, GIBIBYTE)
    from jaxacct.engines import mixture  # SciPy: only where a mixture is asked about

    rows = mixture.rows_of_branches(mechanism, relation)
    if rows is None:
        return worse_direction(quantity, mechanism, given, relation, effort, "auto")
    mine = batch_shape(mechanism)
    other = "delta" if quantity == "epsilon" else "epsilon"
    shape = broadcast_shape({"the mechanism": mine, other: np.shape(given)})
    target = np.broadcast_to(given, shape).reshape(-1)
    places = np.broadcast_to(np.arange(len(rows)).reshape(mine), shape).reshape(-1)
    answer = Answer(*np.full((3, target.size), np.nan))
    bar = Progress(target.size, None if target.size > ROWS_WITH_PROGRESS else False)
    place, known = -1, dict[float, mixture.Known]()
    with contextlib.closing(bar):
        for done, at in enumerate(np.lexsort((target, places)).tolist()):  # neighbours share contours
            if places[at] != place:
                place, known = int(places[at]), {}
            ends = _larger(quantity, rows[place], float(target[at]), relation, known)
            answer.lower[at], answer.estimate[at], answer.upper[at] = ends
            bar.update(done + 1)
    engine = np.full(target.size, MixtureContour.name, dtype="<U32")
    certified = mixture.attained(mechanism, relation)
    with np.errstate(invalid="ignore"):
        left = np.flatnonzero(~(answer.upper < np.inf) | is_open(answer, rtol))
    for at in left.tolist():  # one by one: a row that fails there as well does not end the others
        one = take_rows(mechanism, places[[at]]) if mine else mechanism
        lower, upper, word = _by_parts(quantity, one, float(target[at]), relation, effort, certified)
        low = float(np.fmax(np.fmax(answer.lower[at], lower), 0.0))
        if upper < answer.upper[at] or np.isnan(answer.upper[at]):
            engine[at] = word
        high = float(np.fmin(answer.upper[at], upper))
        if not low <= high:  # two ways contradict each other: neither is used
            low, high, engine[at] = 0.0, (np.inf if quantity == "epsilon" else 1.0), "theorem"
        answer.lower[at], answer.upper[at] = low, high
        answer.estimate[at] = np.clip(np.fmin(answer.estimate[at], high), low, high)
    status = np.where(is_open(answer, rtol), "width", "ok").astype("<U16")
    status[answer.upper == 0.0] = "zero"
    lower_ends = answer.lower if certified else np.zeros(target.size)
    low_end, middle, high_end = (end.reshape(shape) for end in (lower_ends, answer.estimate, answer.upper))
    kind = "certified" if certified else "bound"
    return Bounds(low_end, middle, high_end, kind, status.reshape(shape), engine.reshape(shape))


def _by_parts(
    quantity: str, one: Mechanism, given: float, relation: str, effort: Effort, certified: bool
) -> tuple[float, float, str]:
    """(lower, upper, engine) from the pairs that bound one configuration; no lower end where it is not certified."""
    found = worse_direction(quantity, one, given, relation, effort, "auto")
    lower, upper = (float(np.reshape(end, -1)[0]) for end in (found.lower, found.upper))
    word = str(np.reshape(found.engine, -1)[0])
    if not certified:
        return -np.inf, upper, word
    if np.reshape(found.status, -1)[0] == "width":  # one pair alone has a lattice that suits it better
        alone = worse_direction(quantity, _Above(one), given, relation, effort, "auto")
        upper = float(np.fmin(upper, np.reshape(alone.upper, -1)[0]))
    return lower, upper, word


def _larger(quantity: str, row: Row, value: float, relation: str, known: dict[float, Known]) -> Ends:
    """Each end is the larger of the directions' ends.  Without an upper end in one direction there is none."""
    from jaxacct.engines import mixture

    if quantity == "epsilon" and value == 0.0:
        return mixture.UNKNOWN  # refused, or known from the largest loss
    signs = SIGNS.get(relation, (1.0, -1.0))
    if quantity == "epsilon":
        found = np.array([mixture.one_epsilon(row, sign, value) for sign in signs])
    else:
        found = np.array([mixture.one_delta(row, sign, value, known.setdefault(sign, {})) for sign in signs])
    if np.isnan(found[:, 1]).any():
        return float(np.max(found[:, 0])), np.nan, np.inf
    low, mid, high = (float(x) for x in found.max(axis=0))
    return low, mid, high
