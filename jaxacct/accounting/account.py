"""Epsilon and delta of a mechanism as certified brackets: the public questions."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import jaxacct.accounting.mechanism_engines  # noqa: F401  # puts its engines in the list
from jaxacct.accounting.directions import answer
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.keywords import with_hints
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    DELTA_OR_ZERO,
    GIBIBYTE,
    REAL,
    check,
    options,
    refuse_tracers,
)
from jaxacct.engines.backend import job
from jaxacct.engines.protocol import Effort, MechanismQuestion
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.base import require_mechanism

__all__ = ["REVERSED", "delta", "delta_without_attacks", "effort_of_search", "epsilon"]

REVERSED = {"add_one": "remove_one", "remove_one": "add_one"}
"""Each relation with its directions exchanged. Relations that are not listed are symmetric."""
_KERNEL = "jaxacct.kernels.contour"
"""The module that an error message names to users who call from inside jit."""


@with_hints
def epsilon(
    mechanism: Mechanism,
    delta: ArrayLike,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
) -> Bounds:
    """Return the smallest epsilon >= 0 for which the mechanism is (epsilon, delta)-DP, as a certified bracket.

    `epsilon = inf {eps >= 0 : delta(eps) <= delta}`. Here `delta(eps)` is the largest of H_{e^eps}(P || Q) over the
    relation's directions, and H is the hockey-stick divergence of the composed dominating pair (P, Q). A privacy claim
    may use `upper`.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `delta` broadcast; the answer has their common shape.
    delta : array_like in [0, 1)
        0 is allowed where the privacy loss is bounded.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    engine : {"auto", "contour", "lattice"}
    rtol : float in (0, 1)
        Wanted relative width (upper - lower)/upper. A wider bracket still holds, and its status is "width". Some
        brackets are "ok" whatever rtol is: composed rounds of `RandomAllocation` and composed samples of several
        releases up to a width of 1e-3 in epsilon and .05 in delta, selections up to 2e-4.
    memory_bytes : int of 2**24 or more
        Limit on the lattice engine's memory.
    backend : {"auto", "numpy", "xla"}
        Which backend evaluates the kernels. NumPy compiles nothing. XLA compiles programs and keeps them
        (`jaxacct.cache_info`). On a CPU "auto" is NumPy for up to 40,000 configurations or 2,400 private selections,
        and for up to 1,500 configurations where `jaxacct warm` has compiled the programs. Both backends are
        certified; they agree to 1e-9 + rtol/10.

    Returns
    -------
    Bounds
        kind "certified": discretisation, truncation, aliasing and rounding are inside the bracket.

    Raises
    ------
    InputError
        Values are invalid, shapes do not broadcast, or an argument is a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10. jaxacct/kernels/README.md proves the engines' error bounds.

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.Gaussian(2.0), 1e-5)
    >>> round(float(b.upper), 6), b.kind
    (1.993091, 'certified')
    """
    refuse_tracers("ja.epsilon", _KERNEL, mechanism=mechanism, delta=delta)
    given = options(relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes, backend=backend)
    mechanism = require_mechanism("mechanism", mechanism)
    at, effort = np.asarray(check("delta", delta, DELTA_OR_ZERO)), Effort(given.rtol, given.memory_bytes)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        return answer(MechanismQuestion("epsilon", mechanism, at, given.relation, effort, given.engine, attacks=True))


@with_hints
def delta(
    mechanism: Mechanism,
    epsilon: ArrayLike,
    *,
    relation: str = "add_or_remove_one",
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
) -> Bounds:
    """Return the mechanism's privacy profile at one or many real eps, as a certified bracket.

    `delta(eps)` is the largest of H_{e^eps}(P || Q) over the relation's directions, and H is the hockey-stick
    divergence of the composed dominating pair (P, Q). The bracket is relatively accurate in the far tail, too. At a
    negative eps = -x delta follows from the reverse direction: `H_{e^-x}(P || Q) = 1 - e^-x + e^-x H_{e^x}(Q || P)`.

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
        kind "certified". A privacy claim may use `upper`.

    Raises
    ------
    InputError
        Values are invalid, shapes do not broadcast, or an argument is a tracer.

    References
    ----------
    Zhu, Dong and Wang (2022), Theorem 10 and Lemma 45. jaxacct/kernels/README.md proves the engines' error bounds.

    >>> import jaxacct as ja
    >>> b = ja.delta(ja.RandomizedResponse(0.75), 0.5)
    >>> round(float(b.upper), 6)
    0.33782
    """
    refuse_tracers("ja.delta", _KERNEL, mechanism=mechanism, epsilon=epsilon)
    keywords = {"relation": relation, "engine": engine, "rtol": rtol, "memory_bytes": memory_bytes, "backend": backend}
    return _delta(mechanism, epsilon, True, keywords)


def delta_without_attacks(mechanism: Mechanism, epsilon: Any, **keywords: Any) -> Bounds:
    """Return `delta`, with lower end 0 where only an attack gives a larger one: for many eps, or in a search."""
    return _delta(mechanism, epsilon, False, keywords)


def _delta(mechanism: Mechanism, epsilon: Any, attacks: bool, keywords: dict[str, Any]) -> Bounds:
    given = options(**keywords)
    mechanism = require_mechanism("mechanism", mechanism)
    epsilon = np.asarray(check("epsilon", epsilon, REAL))
    effort = Effort(given.rtol, given.memory_bytes)
    asked = MechanismQuestion("delta", mechanism, epsilon, given.relation, effort, given.engine, attacks=attacks)
    with contextlib.nullcontext() if given.backend == "auto" else job(1, given.backend):
        below = np.less(epsilon, 0.0)
        if not below.any():
            return answer(asked)
        asked = asked._replace(given=np.abs(epsilon))
        back = answer(asked._replace(relation=REVERSED.get(given.relation, given.relation)))
        ahead = answer(asked) if given.relation in REVERSED and not below.all() else back
        return _reflected(ahead, back, epsilon, given.rtol)


def _reflected(ahead: Bounds, back: Bounds, epsilon: float | np.ndarray, rtol: float) -> Bounds:
    """Return the profile at real eps: `ahead` has delta(|eps|), and `back` has delta(|eps|) of the reverse relation.

    At negative eps the answer is `1 - e^eps + e^eps back` (Zhu, Dong and Wang 2022, Lemma 45).
    """
    below, scale, gap = np.less(epsilon, 0.0), np.exp(np.minimum(epsilon, 0.0)), -np.expm1(np.minimum(epsilon, 0.0))
    ends = []
    for name, turn in (("lower", -8.0 * ROUNDOFF), ("estimate", 0.0), ("upper", 8.0 * ROUNDOFF)):
        reflected = np.clip((gap + scale * getattr(back, name)) * (1.0 + turn), 0.0, 1.0)
        ends.append(np.where(below, reflected, getattr(ahead, name)))
    low, high = ends[0], ends[2]
    # Adding 1 - e^-x > 0 can make a wide bracket relatively narrow.
    narrow = np.isin(back.status, ("ok", "zero")) | (np.equal(back.status, "width") & (high - low <= rtol * high))
    status = np.where(narrow, "ok", back.status)
    choose = lambda one, other: np.where(below, one, other)
    words = (choose(back.kind, ahead.kind), choose(status, ahead.status), choose(back.engine, ahead.engine))
    return Bounds(low, np.clip(ends[1], low, high), high, *words)


def effort_of_search(rtol: float) -> Effort:
    """Return the effort of one evaluation in a search that ends within `rtol` of its target."""
    return Effort(0.25 * rtol, in_search=True)
