"""epsilon and delta of a mechanism, as certified brackets: the public questions, and how they become questions to
engines.

Each direction of the neighbouring relation is composed and answered by itself, and the larger answer is taken at the
end.  Which engine answers is decided in dispatch.py; `Bounds.engine` says which one did.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.dispatch import Side, ask_engines, engine_of_mechanism, is_open, kinds_of
from jaxacct.engines.backend import job
from jaxacct.engines.contour import TOLERANCE, Answer, Hint
from jaxacct.engines.protocol import Effort, Question
from jaxacct.engines.quick_bounds import largest_loss
from jaxacct.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.mechanisms import Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.validation import (
    DELTA_OR_ZERO,
    GIBIBYTE,
    NON_NEGATIVE,
    InputError,
    Options,
    broadcast_shape,
    check,
    options,
    refuse_tracers,
)

__all__ = ["bracket_epsilon", "delta", "effort_of", "effort_of_search", "epsilon"]

REFINED_SHARE = 0.01
"""The contour engine refines to `0.5 min(rtol, max(NARROWEST, REFINED_SHARE rtol))`, relatively: a narrow bracket costs
it little more than one of width rtol."""
NARROWEST = 1e-6
"""Below this width the share of rtol is not followed; only a smaller rtol asks for less."""
_KERNEL = "jaxacct.kernels.contour"
"""What to call inside jit."""


def epsilon(
    mechanism: Mechanism,
    delta: Any,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
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
    backend : {"auto", "numpy", "xla"}
        What evaluates the kernels.  NumPy compiles nothing; XLA compiles programs, and keeps them
        (`jaxacct.cache_info`).  "auto" is NumPy for up to 40,000 configurations on a CPU, or up to 1,500 where
        `jaxacct warm` has compiled the programs ahead.  Both are certified; they agree to 1e-9 + rtol/10.

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
    given = options(relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes, backend=backend)
    mechanism = require_mechanism("mechanism", mechanism)
    delta = check("delta", delta, DELTA_OR_ZERO)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        return bracket_epsilon(mechanism, delta, given.relation, effort_of(given), given.engine)


def bracket_epsilon(
    mechanism: Mechanism,
    delta: float | np.ndarray,
    relation: str,
    effort: Effort,
    engine: str = "auto",
    hint: Hint | None = None,
) -> Bounds:
    """`epsilon` for checked arguments, with the effort of each engine spelt out.

    hint : where the contour engine should begin, row by row of the flat batch.
    """
    whole = engine_of_mechanism(mechanism, engine)
    if whole is not None:
        return whole.epsilon(mechanism, np.asarray(delta), relation, effort.rtol)
    return _worse_direction("epsilon", mechanism, delta, relation, effort, engine, hint)


def delta(
    mechanism: Mechanism,
    epsilon: Any,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
) -> Bounds:
    """The privacy profile delta(eps) of the mechanism at one or many eps >= 0, as a certified bracket.

    `delta(eps) = max over directions of H_{e^eps}(P || Q)`, the hockey-stick divergence of the composed dominating
    pair. The bracket is relatively accurate also in the far tail.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `epsilon` broadcast; the answer has their common shape.
    epsilon : array_like >= 0
    relation, engine, rtol, memory_bytes, backend
        As for `jaxacct.epsilon`.

    Returns
    -------
    Bounds
        kind "certified"; `upper` is what a privacy claim may use.

    Raises
    ------
    InputError
        Invalid values, shapes that do not broadcast, or a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10; the engines' own error bounds are in jaxacct/kernels/README.md.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.RandomizedResponse(0.75), 0.5)
    >>> round(float(b.upper), 6)
    0.33782
    """
    refuse_tracers("ja.delta", _KERNEL, mechanism=mechanism, epsilon=epsilon)
    given = options(relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes, backend=backend)
    mechanism = require_mechanism("mechanism", mechanism)
    epsilon = check("epsilon", epsilon, NON_NEGATIVE)
    effort = effort_of(given)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        whole = engine_of_mechanism(mechanism, given.engine)
        if whole is not None:
            return whole.delta(mechanism, np.asarray(epsilon), given.relation, effort.rtol)
        return _worse_direction("delta", mechanism, epsilon, given.relation, effort, given.engine)


def effort_of(given: Options) -> Effort:
    """The effort of each engine that a relative width calls for."""
    rtol = given.rtol
    contour_width = 0.5 * min(rtol, max(NARROWEST, REFINED_SHARE * rtol))
    return Effort(rtol, contour_width, TOLERANCE, 0.1 * rtol, given.memory_bytes)


def effort_of_search(rtol: float) -> Effort:
    """The effort of one evaluation in a search that ends within `rtol` of its target."""
    return Effort(0.25 * rtol, 0.25 * rtol, 0.01 * rtol, 0.2 * rtol, GIBIBYTE)


@np.errstate(under="ignore")  # bounds allow for it; a user may have asked NumPy to raise
def _worse_direction(
    quantity: str,
    mechanism: Mechanism,
    given: float | np.ndarray,
    relation: str,
    effort: Effort,
    engine: str,
    hint: Hint | None = None,
) -> Bounds:
    """The bracket of "epsilon" at given deltas, or of "delta" at given epsilons: the larger of the directions' answers.

    If the kind is not "certified", the lower end is set to 0.
    """
    mine = batch_shape(mechanism)
    shape = broadcast_shape({"the mechanism": mine, "delta" if quantity == "epsilon" else "epsilon": np.shape(given)})
    target = np.broadcast_to(np.asarray(given, np.float64), shape).reshape(-1)
    rows = np.broadcast_to(np.arange(int(np.prod(mine))).reshape(mine), shape).reshape(-1)
    worst = Answer(*(np.full(target.shape, -np.inf) for _ in range(3)))
    engines: np.ndarray = np.full(target.shape, "", dtype="<U32")
    contradicted = np.zeros(target.shape, bool)
    with job(target.size):
        for direction in directions(mechanism, relation):
            parts = components(mechanism, relation, direction)
            parts = parts if mine == shape else parts.take(rows)
            if quantity == "epsilon":
                _refuse_zero_delta(parts, target, shape)
                side = _one_epsilon(parts, target, worst.lower, effort, engine, hint)
            else:
                side = _one_delta(parts, target, worst.lower, effort, engine)
            engines = np.where(side.answer.upper > worst.upper, side.engine, engines)
            worst = Answer(*(np.maximum(a, b) for a, b in zip(worst, side.answer, strict=True)))
            contradicted |= side.contradicted
    kind = mechanism.kind_under(relation)
    status = np.where(is_open(worst, effort.rtol), "width", "ok").astype("<U16")
    status[contradicted] = "contradiction"
    status[worst.upper == 0] = "zero"
    if quantity == "epsilon":
        status[worst.lower == np.inf] = "mass_at_infinity"
    if kind != "certified":
        worst = worst._replace(lower=np.zeros(target.shape))
    low, mid, high, status, engines = (x.reshape(shape) for x in (*worst, status, engines))
    return Bounds(low, mid, high, kind, status, engines)


def _one_epsilon(
    parts: Components, target: np.ndarray, floor: np.ndarray, effort: Effort, engine: str, hint: Hint | None
) -> Side:
    """Epsilon in one direction: what is left of delta beside the mass at infinity goes to the engines."""
    kinds, infinite = kinds_of(parts), parts.delta_infinity
    finite = target - infinite
    wrong = parts.infinity_units * ROUNDOFF * infinite
    with np.errstate(over="ignore"):
        slack = (4.0 * ROUNDOFF * target + wrong) / np.maximum(finite, SMALLEST_POSITIVE)
    at_infinity = finite < -wrong
    live = (finite > 0) & (slack < 1e-3)
    question = Question(parts, kinds, finite, slack, floor, effort, hint)
    side = ask_engines("epsilon", question, live & ~kinds.empty, engine)
    low, mid, high = (np.maximum(end, 0.0) for end in side.answer)
    # what is left of delta is 0, or lost in the rounding of the mass at infinity
    edge = ~live & ~at_infinity
    largest, above = largest_loss(parts)
    unbounded = (parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1)
    low = np.where(edge, np.where(target == 0, np.maximum(2.0 * largest - above, 0.0), 0.0), low)
    mid, high = np.where(edge, np.where(unbounded, np.inf, [largest, above]), [mid, high])
    known = (np.where(kinds.empty, 0.0, np.where(at_infinity, np.inf, end)) for end in (low, mid, high))
    return Side(Answer(*known), np.where(live, side.engine, "closed_form"), side.contradicted)


def _one_delta(parts: Components, eps: np.ndarray, floor: np.ndarray, effort: Effort, engine: str) -> Side:
    """Delta in one direction: that of the finite losses by the engines, and the mass at infinity."""
    kinds, infinite = kinds_of(parts), parts.delta_infinity
    question = Question(parts, kinds, eps, np.zeros(eps.shape), floor, effort)
    side = ask_engines("delta", question, ~kinds.empty & (infinite < 1.0), engine)
    low, mid, high = (np.where(kinds.empty, 0.0, end) for end in side.answer)
    low, mid, high = np.clip(low, 0, 1) + infinite, mid + infinite, np.minimum(high, 1.0) + infinite
    wrong = parts.infinity_units * ROUNDOFF * infinite
    low = np.maximum(low - 4 * ROUNDOFF * low - wrong, 0.0)
    high = np.minimum(high + 4 * ROUNDOFF * high + wrong, 1.0)
    agree = low <= high
    low, high = np.where(agree, low, np.maximum(infinite - wrong, 0.0)), np.where(agree, high, 1.0)
    return Side(Answer(low, np.clip(mid, low, high), high), side.engine, side.contradicted | ~agree)


def _refuse_zero_delta(parts: Components, target: np.ndarray, shape: tuple[int, ...]) -> None:
    """delta = 0 is for mechanisms of bounded loss."""
    bad = (target == 0) & ((parts.mu > 0) | np.any(parts.gauss_n > 0, axis=1))
    if bad.any():
        where = [int(i) for i in np.argwhere(bad.reshape(shape))[0]]
        raise InputError(
            f"delta{where or ''} = 0 must be > 0 for a mechanism with an unbounded loss; "
            "use a small positive delta such as 1e-5"
        )
