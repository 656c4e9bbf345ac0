"""epsilon and delta of a mechanism, as certified brackets: the public questions, and how they become questions to
the directions of the neighbouring relation (directions.py), each with an effort.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import jaxacct.accounting.gaussian_mixtures  # noqa: F401  # puts its engine in the list
from jaxacct.accounting.directions import worse_direction
from jaxacct.accounting.dispatch import engine_of_mechanism
from jaxacct.accounting.replacement_in_two_steps import Ask, delta_replaced, epsilon_replaced, smaller
from jaxacct.accounting.sampled_once import sampled_once
from jaxacct.accounting.single_round import single_rounds
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.keywords import with_hints
from jaxacct.core.validation import (
    DELTA_OR_ZERO,
    GIBIBYTE,
    REAL,
    Options,
    check,
    options,
    refuse_tracers,
)
from jaxacct.engines.backend import job
from jaxacct.engines.contour import TOLERANCE, Hint
from jaxacct.engines.protocol import Effort
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.balls_in_bins import replaced_in_two_steps
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.mechanisms.poisson_sampled import groups_inside
from jaxacct.mechanisms.shuffled_attacks import attacks_on

__all__ = ["REVERSED", "bracket_epsilon", "delta", "effort_of", "effort_of_search", "epsilon"]

REFINED_SHARE = 0.01
"""The contour engine refines to `0.5 min(rtol, max(NARROWEST, REFINED_SHARE rtol))`, relatively: a narrow bracket costs
it little more than one of width rtol."""
NARROWEST = 1e-6
"""Below this width the share of rtol is not followed; only a smaller rtol asks for less."""
REVERSED = {"add_one": "remove_one", "remove_one": "add_one"}
"""The relation with the two directions exchanged; relations not listed are symmetric."""
_KERNEL = "jaxacct.kernels.contour"
"""What to call inside jit."""


@with_hints
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
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    engine : {"auto", "contour", "lattice"}
    rtol : float in (0, 1)
        Wanted relative width (upper - lower)/upper; where it is not reached the bracket still holds and the
        status is "width". Composed rounds of `RandomAllocation` and composed samples of several releases are "ok" up
        to a width of 1e-3 in epsilon and .05 in delta, selections up to 2e-4.
    memory_bytes : int of 2**24 or more
        Limit on the lattice engine's memory.
    backend : {"auto", "numpy", "xla"}
        What evaluates the kernels.  NumPy compiles nothing; XLA compiles programs, and keeps them
        (`jaxacct.cache_info`).  "auto" is NumPy for up to 40,000 configurations (2,400 private selections) on a
        CPU, or up to 1,500 where `jaxacct warm` has compiled the programs ahead.  Both are certified; they agree to
        1e-9 + rtol/10.

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
        found = bracket_epsilon(mechanism, delta, given.relation, effort_of(given), given.engine)
        ask = lambda attacked: bracket_epsilon(attacked, delta, given.relation, effort_of(given))
        return _above_attacks(found, mechanism, given.relation, ask)


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
    once = _sampled_once("epsilon", mechanism, delta, relation, effort, engine)
    if once is not None:
        return once
    if relation == "replace_one" and replaced_in_two_steps(mechanism):
        return epsilon_replaced(mechanism, np.asarray(delta), _upper_ends(mechanism, effort, engine))
    if relation == "replace_one" and groups_inside(mechanism):
        one = worse_direction("epsilon", mechanism, delta, relation, effort, engine, hint)
        return smaller(one, epsilon_replaced(mechanism, np.asarray(delta), _upper_ends(mechanism, effort, engine)))
    whole = engine_of_mechanism(mechanism, engine)
    if whole is not None:
        return whole.epsilon(mechanism, np.asarray(delta), relation, effort.rtol)
    apart = single_rounds(
        "epsilon",
        mechanism,
        np.asarray(delta, np.float64),
        engine,
        lambda some, at: bracket_epsilon(some, at, relation, effort),
    )
    if apart is not None:
        return apart
    return worse_direction("epsilon", mechanism, delta, relation, effort, engine, hint)


def _bracket_delta(
    mechanism: Mechanism, epsilon: float | np.ndarray, relation: str, effort: Effort, engine: str
) -> Bounds:
    """`delta` for checked arguments."""
    once = _sampled_once("delta", mechanism, epsilon, relation, effort, engine)
    if once is not None:
        return once
    if relation == "replace_one" and replaced_in_two_steps(mechanism):
        return delta_replaced(mechanism, np.asarray(epsilon), _upper_ends(mechanism, effort, engine))
    if relation == "replace_one" and groups_inside(mechanism):
        one = worse_direction("delta", mechanism, epsilon, relation, effort, engine)
        return smaller(one, delta_replaced(mechanism, np.asarray(epsilon), _upper_ends(mechanism, effort, engine)))
    whole = engine_of_mechanism(mechanism, engine)
    if whole is not None:
        return whole.delta(mechanism, np.asarray(epsilon), relation, effort.rtol)
    apart = single_rounds(
        "delta",
        mechanism,
        np.asarray(epsilon, np.float64),
        engine,
        lambda some, at: _bracket_delta(some, at, relation, effort, engine),
    )
    if apart is not None:
        return apart
    return worse_direction("delta", mechanism, epsilon, relation, effort, engine)


def _sampled_once(
    quantity: str, mechanism: Mechanism, given: float | np.ndarray, relation: str, effort: Effort, engine: str
) -> Bounds | None:
    """The answer of `sampled_once`; None where it has none, or where the user chose an engine."""

    def ask(quantity: str, some: Mechanism, values: np.ndarray, under: str) -> Bounds:
        return (bracket_epsilon if quantity == "epsilon" else _bracket_delta)(some, values, under, effort, engine)

    if engine != "auto":
        return None
    return sampled_once(quantity, mechanism, np.asarray(given, np.float64), relation, effort.rtol, ask)


def _above_attacks(found: Bounds, mechanism: Mechanism, relation: str, ask: Callable[[Mechanism], Bounds]) -> Bounds:
    """A bound, with the lower end of the best attack that is known of the mechanism."""
    low = found.lower
    for attacked in attacks_on(mechanism, relation, found.upper.size):
        low = np.fmax(low, ask(attacked).lower)
    if low is found.lower:
        return found
    agree = low <= found.upper  # of ends that contradict each other the theorem's stands
    low = np.where(agree, low, found.lower)
    status = np.where(agree, found.status, "contradiction")
    return Bounds(low, np.clip(found.estimate, low, found.upper), found.upper, found.kind, status, found.engine)


def _upper_ends(mechanism: Mechanism, effort: Effort, engine: str) -> Ask:
    """Upper ends of "epsilon" or "delta" under other relations."""

    def upper(quantity: str, values: np.ndarray, relation: str) -> np.ndarray:
        ask = bracket_epsilon if quantity == "epsilon" else _bracket_delta
        return np.asarray(ask(mechanism, values, relation, effort, engine).upper)

    return upper


@with_hints
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
    """The privacy profile delta(eps) of the mechanism at one or many real eps, as a certified bracket.

    `delta(eps) = max over directions of H_{e^eps}(P || Q)`, the hockey-stick divergence of the composed dominating
    pair. The bracket is relatively accurate also in the far tail. At negative eps = -x delta follows from the reverse
    direction: `H_{e^-x}(P || Q) = 1 - e^-x + e^-x H_{e^x}(Q || P)`.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `epsilon` broadcast; the answer has their common shape.
    epsilon : array_like
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
    Zhu, Dong and Wang (2022), Theorem 10 and Lemma 45; the engines' own error bounds are in jaxacct/kernels/README.md.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.RandomizedResponse(0.75), 0.5)
    >>> round(float(b.upper), 6)
    0.33782
    """
    refuse_tracers("ja.delta", _KERNEL, mechanism=mechanism, epsilon=epsilon)
    keywords: dict[str, Any] = {
        "relation": relation,
        "engine": engine,
        "rtol": rtol,
        "memory_bytes": memory_bytes,
        "backend": backend,
    }
    found = delta_without_attacks(mechanism, epsilon, **keywords)
    ask = lambda attacked: delta_without_attacks(attacked, epsilon, **keywords | {"engine": "auto"})
    return _above_attacks(found, mechanism, relation, ask)


def delta_without_attacks(mechanism: Mechanism, epsilon: Any, **keywords: Any) -> Bounds:
    """`delta`, but with lower end 0 where only an attack gives another: for many eps, or in a search."""
    given = options(**keywords)
    mechanism = require_mechanism("mechanism", mechanism)
    epsilon = check("epsilon", epsilon, REAL)
    ask = lambda at, relation: _bracket_delta(mechanism, at, relation, effort_of(given), given.engine)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        below = np.less(epsilon, 0.0)
        if not below.any():
            return ask(epsilon, given.relation)
        back = ask(np.abs(epsilon), REVERSED.get(given.relation, given.relation))
        one_way = given.relation in REVERSED and not below.all()
        ahead = ask(np.abs(epsilon), given.relation) if one_way else back
        return _reflected(ahead, back, epsilon, given.rtol)


def _reflected(ahead: Bounds, back: Bounds, epsilon: float | np.ndarray, rtol: float) -> Bounds:
    """delta at real eps: `ahead` is delta(|eps|), `back` that of the reverse relation, which serves negative eps.

    `H_{e^-x}(P||Q) = 1 - e^-x + e^-x H_{e^x}(Q||P)` (Zhu, Dong and Wang 2022, Lemma 45).
    """
    below, scale, gap = np.less(epsilon, 0.0), np.exp(np.minimum(epsilon, 0.0)), -np.expm1(np.minimum(epsilon, 0.0))
    ends = []
    for name, turn in (("lower", -8.0 * ROUNDOFF), ("estimate", 0.0), ("upper", 8.0 * ROUNDOFF)):
        reflected = np.clip((gap + scale * getattr(back, name)) * (1.0 + turn), 0.0, 1.0)
        ends.append(np.where(below, reflected, getattr(ahead, name)))
    low, high = ends[0], ends[2]
    # adding 1 - e^-x > 0 can make a wide bracket relatively narrow
    narrow = np.isin(back.status, ("ok", "zero")) | (np.equal(back.status, "width") & (high - low <= rtol * high))
    status = np.where(narrow, "ok", back.status)
    choose = lambda one, other: np.where(below, one, other)
    words = (choose(back.kind, ahead.kind), choose(status, ahead.status), choose(back.engine, ahead.engine))
    return Bounds(low, np.clip(ends[1], low, high), high, *words)


def effort_of(given: Options) -> Effort:
    """The effort of each engine that a relative width calls for."""
    rtol = given.rtol
    contour_width = 0.5 * min(rtol, max(NARROWEST, REFINED_SHARE * rtol))
    return Effort(rtol, contour_width, TOLERANCE, 0.1 * rtol, given.memory_bytes)


def effort_of_search(rtol: float) -> Effort:
    """The effort of one evaluation in a search that ends within `rtol` of its target."""
    return Effort(0.25 * rtol, 0.25 * rtol, 0.01 * rtol, 0.2 * rtol, GIBIBYTE)
