"""epsilon and delta of a mechanism, as certified brackets: mechanism + engine -> Bounds.

The two directions of the neighbouring relation are composed separately and the larger is taken at the end.
`engine="auto"` uses the closed form where the mechanism is Gaussian throughout, the average of one for two sampled
steps, the contour engine where its certificate is narrow, and the lattice engine for the rest; `Bounds.engine` says
which one answered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.dispatch import (
    Methods,
    Side,
    absent,
    both_directions,
    by_engines,
    delta_by_formula,
    delta_by_two_steps,
    delta_limits,
    epsilon_by_formula,
    epsilon_by_two_steps,
    epsilon_limits,
    lattice,
    narrow,
)
from jaxacct.engines import contour
from jaxacct.engines.contour import Answer
from jaxacct.engines.quick_bounds import largest_loss, largest_loss_above
from jaxacct.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.mechanisms import Components, Mechanism, batch_shape
from jaxacct.options import GIBIBYTE, mechanism_for, options
from jaxacct.validation import (
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    InputError,
    broadcast_shape,
    check,
    refuse_tracers,
)

NARROW, SHARE = 1e-6, 0.01
"""The contour engine stops refining at a relative width of this share of rtol, or at the first if that is more."""
_KERNEL = "jaxacct.kernels.contour"


class Effort(NamedTuple):
    """How narrow brackets should be: in the end, and engine by engine."""

    rtol: float
    contour_width: float
    contour_tolerance: float
    lattice_rtol: float


def epsilon(
    mechanism: Mechanism,
    delta: Any,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
) -> Bounds:
    """The smallest epsilon >= 0 for which the mechanism is (epsilon, delta)-DP, as a certified bracket.

    `epsilon = inf {eps >= 0 : delta(eps) <= delta}` with `delta(eps) = sup over the relation's directions of
    H_{e^eps}(P || Q)`, the hockey-stick divergence of the composed dominating pair.  `upper` is what a privacy
    claim may use.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `delta` broadcast; the answer has their common shape.
    delta : array_like in [0, 1)
        0 is allowed where the privacy loss is bounded.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one"}
    engine : {"auto", "contour", "lattice"}
    rtol : float in (0, 1)
        Wanted relative width (upper - lower)/upper; where it is not reached the bracket still holds and the
        status is "width".
    memory_bytes : int of 2**24 or more
        Limit on the lattice engine's memory.

    Returns
    -------
    Bounds
        kind "certified": discretisation, truncation, aliasing and rounding are inside the bracket.

    Raises
    ------
    InputError
        Invalid values, shapes that do not broadcast, or a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10; the engines' own error bounds are in jaxacct/kernels/README.md.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.Gaussian(2.0), 1e-5)
    >>> round(float(b.upper), 6), b.kind
    (1.993091, 'certified')
    """
    refuse_tracers("ja.epsilon", _KERNEL, mechanism=mechanism, delta=delta)
    relation, engine, rtol, memory_bytes = options(
        relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes
    )
    mechanism = mechanism_for(mechanism, engine)
    delta = check("delta", delta, DELTA_OR_ZERO)
    effort = Effort(rtol, _contour_width(rtol), contour.TOLERANCE, 0.1 * rtol)
    return bracket_epsilon(mechanism, delta, relation, engine, effort, memory_bytes)


def bracket_epsilon(
    mechanism: Mechanism,
    delta: float | np.ndarray,
    relation: str,
    engine: str,
    effort: Effort,
    memory_bytes: int,
    hint: contour.Hint | None = None,
) -> Bounds:
    """`epsilon` for checked arguments, with the effort of each engine spelt out."""
    rtol = effort.rtol
    known = mechanism.direct("epsilon", delta, relation, rtol)
    if known is not None:
        return known
    shape = _common_shape(mechanism, delta, "delta")

    def solve(parts: Components, target: np.ndarray, floor: np.ndarray) -> Side:
        infinite = parts.delta_infinity
        bounded = ~((parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1))
        unbounded = (target == 0) & ~bounded
        if unbounded.any():
            raise InputError(
                f"delta{_index(unbounded, shape)} = 0 must be > 0 for a mechanism with an unbounded loss; "
                "use a small positive delta such as 1e-5"
            )
        finite = target - infinite
        wrong = parts.infinity_units * ROUNDOFF * infinite
        with np.errstate(over="ignore"):
            slack = (4.0 * ROUNDOFF * target + wrong) / np.maximum(finite, SMALLEST_POSITIVE)
        at_infinity = finite < -wrong
        exact_zero = target == 0
        live = (finite > 0) & (slack < 1e-3)
        methods = Methods(
            lambda p, rows: epsilon_by_formula(p, finite[rows], slack[rows]),
            lambda p, rows: epsilon_by_two_steps(p, finite[rows], slack[rows], floor[rows]),
            lambda p, rows: _not_negative(
                contour.epsilon(
                    p,
                    finite[rows],
                    slack[rows],
                    floor[rows],
                    effort.contour_width,
                    effort.contour_tolerance,
                    jax.tree.map(lambda known: known[rows], hint),
                )
            ),
            lambda p, rows: [
                lattice().epsilon(
                    p,
                    row,
                    finite[row] * (1 - slack[row]),
                    finite[row] * (1 + slack[row]),
                    rtol=effort.lattice_rtol,
                    memory_bytes=memory_bytes,
                )
                for row in rows
            ],
            lambda p, rows, thorough: epsilon_limits(p, finite[rows], slack[rows], thorough),
        )
        side = by_engines(parts, np.flatnonzero(live & ~absent(parts)), engine, rtol, floor, methods)
        low, mid, high = (np.maximum(x, 0.0) for x in side.answer)
        largest = largest_loss(parts)
        # what is left of delta is 0, or lost in the rounding of the mass at infinity
        edge = ~live & ~at_infinity
        low = np.where(edge, np.where(exact_zero, np.maximum(2.0 * largest - largest_loss_above(parts), 0.0), 0.0), low)
        mid = np.where(edge, np.where(bounded, largest, np.inf), mid)
        high = np.where(edge, np.where(bounded, largest_loss_above(parts), np.inf), high)
        low, mid, high = (np.where(at_infinity, np.inf, x) for x in (low, mid, high))
        nothing = absent(parts)
        low, mid, high = (np.where(nothing, 0.0, x) for x in (low, mid, high))
        return Side(Answer(low, mid, high), np.where(live, side.engine, "closed_form"), side.contradicted)

    side = both_directions(mechanism, delta, shape, relation, solve)
    low, _, high = side.answer
    status = np.where(narrow(low, high, rtol), "ok", "width").astype("<U16")
    status = np.where(side.contradicted, "contradiction", status)
    status = np.where(high == 0, "zero", status)
    status = np.where(np.isinf(low), "mass_at_infinity", status)
    return _bounds(shape, side, status, mechanism.kind_under(relation))


def delta(
    mechanism: Mechanism,
    epsilon: Any,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
) -> Bounds:
    """The privacy profile delta(eps) of the mechanism at one or many eps >= 0, as a certified bracket.

    `delta(eps) = max over directions of H_{e^eps}(P || Q)`, relative accuracy also in the far tail.
    Parameters, errors and sources are those of `jaxacct.epsilon`.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.RandomizedResponse(0.75), 0.5)
    >>> round(float(b.upper), 6)
    0.33782
    """
    refuse_tracers("ja.delta", _KERNEL, mechanism=mechanism, epsilon=epsilon)
    relation, engine, rtol, memory_bytes = options(
        relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes
    )
    mechanism = mechanism_for(mechanism, engine)
    epsilon = check("epsilon", epsilon, NON_NEGATIVE)
    known = mechanism.direct("delta", epsilon, relation, rtol)
    if known is not None:
        return known

    def solve(parts: Components, eps: np.ndarray, floor: np.ndarray) -> Side:
        infinite = parts.delta_infinity
        methods = Methods(
            lambda p, rows: delta_by_formula(p, eps[rows]),
            lambda p, rows: delta_by_two_steps(p, eps[rows]),
            lambda p, rows: contour.delta(
                p,
                eps[rows],
                np.maximum(floor - infinite, 0.0)[rows] * (1 - 8 * ROUNDOFF),
                _contour_width(rtol),
            ),
            lambda p, rows: lattice().deltas(p, rows, eps[rows], rtol=0.1 * rtol, memory_bytes=memory_bytes),
            lambda p, rows, thorough: delta_limits(p, eps[rows], thorough),
        )
        asked = np.flatnonzero(~absent(parts) & (infinite < 1.0))
        side = by_engines(parts, asked, engine, rtol, floor, methods)
        low, mid, high = (np.where(absent(parts), 0.0, x) for x in side.answer)
        low, mid, high = np.clip(low, 0, 1) + infinite, mid + infinite, np.minimum(high, 1.0) + infinite
        wrong = parts.infinity_units * ROUNDOFF * infinite
        low = np.maximum(low - 4 * ROUNDOFF * low - wrong, 0.0)
        high = np.minimum(high + 4 * ROUNDOFF * high + wrong, 1.0)
        agree = low <= high
        low, high = np.where(agree, low, np.maximum(infinite - wrong, 0.0)), np.where(agree, high, 1.0)
        return Side(Answer(low, np.clip(mid, low, high), high), side.engine, side.contradicted | ~agree)

    shape = _common_shape(mechanism, epsilon, "epsilon")
    side = both_directions(mechanism, epsilon, shape, relation, solve)
    low, _, high = side.answer
    status = np.where(narrow(low, high, rtol), "ok", "width").astype("<U16")
    status = np.where(side.contradicted, "contradiction", status)
    return _bounds(shape, side, np.where(high == 0, "zero", status), mechanism.kind_under(relation))


def _not_negative(answer: Answer) -> Answer:
    """A bracket of `inf {eps : delta(eps) <= delta}` over all eps as one over eps >= 0."""
    return Answer(*(np.maximum(end, 0.0) for end in answer))


def _contour_width(rtol: float) -> float:
    return 0.5 * min(rtol, max(NARROW, SHARE * rtol))


def _common_shape(mechanism: Mechanism, values: float | np.ndarray, name: str) -> tuple[int, ...]:
    return broadcast_shape({"the mechanism": batch_shape(mechanism), name: np.shape(values)})


def _index(bad: np.ndarray, shape: tuple[int, ...]) -> str:
    where = [int(i) for i in np.argwhere(bad.reshape(shape))[0]] if shape else []
    return str(where) if where else ""


def _bounds(shape: tuple[int, ...], side: Side, status: np.ndarray, kind: str) -> Bounds:
    """The bracket as an answer; below a bound nothing is claimed of the mechanism, so lower is 0 there."""
    low, mid, high = (x.reshape(shape) for x in side.answer)
    low = low if kind == "certified" else np.zeros_like(low)
    return Bounds(low, mid, high, kind, status.reshape(shape), side.engine.reshape(shape))
