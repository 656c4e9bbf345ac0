"""One sample on which several mechanisms run: its epsilon and delta follow exactly from the profile of the composition.

Let q be the sampling rate, H the profile of the composition without sampling, a = e^eps and k = 1 - (1 - q) a:

    remove: delta(eps) = q H(1 + (a - 1)/q),        add: delta(eps) = k H(1 + (a - 1)/k) if k > 0, otherwise 0.

Repeated and composed samples use dominating pairs instead (jaxacct/mechanisms/sampled_releases.py).  The proofs are in
mechanisms/README.md, "Several releases from one sample".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxacct.accounting.dispatch import is_open
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import broadcast_shape
from jaxacct.engines.protocol import Answer
from jaxacct.mechanisms import Composed, Mechanism, PoissonSampled, Repeated, SampledWithoutReplacement, batch_shape
from jaxacct.mechanisms.base import weakest
from jaxacct.mechanisms.finite import log_mixture

__all__ = ["sampled_once"]

UNITS = 32.0
"""Bound on the rounding of a transformed eps or delta, in units of ROUNDOFF: up to four operations of a few units."""
SECTIONS = 16
"""Points at which one turn of the search for epsilon evaluates delta, per configuration."""
LARGEST_EPSILON = 1e300
"""Largest epsilon at which delta of the releases is evaluated."""
MOST_SEARCHES = 40
"""Turns of the search for epsilon; each divides the bracket by 17."""
Ask = Callable[[str, Mechanism, np.ndarray, str], Bounds]
"""(quantity, mechanism, values, relation) -> brackets."""
Ends = tuple[np.ndarray, np.ndarray]
"""Lower and upper ends."""
_SIDES = {"remove_one": ("remove",), "replace_one": ("remove",), "add_one": ("add",)}
"""The formula of each listed relation; the other relations take the larger of both."""


def sampled_once(
    quantity: str, mechanism: Mechanism, given: np.ndarray, relation: str, rtol: float, ask: Ask
) -> Bounds | None:
    """Brackets of "epsilon" or "delta" for one sample with several releases, from brackets of the releases.

    None for any other mechanism, and for a relation whose answer does not follow from the profile of the releases.
    """
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), "delta or epsilon": given.shape})
    while isinstance(mechanism, Repeated | Composed):  # unwrap a composition of one mechanism
        inner = mechanism.inside()
        if len(inner) > 1 or (isinstance(mechanism, Repeated) and np.any(np.not_equal(mechanism.steps, 1.0))):
            return None
        mechanism = inner[0]
    drawn = mechanism.several(relation) if isinstance(mechanism, PoissonSampled | SampledWithoutReplacement) else None
    if drawn is None:
        return None
    base, rate, relations = drawn
    q, at = (np.broadcast_to(np.asarray(x, np.float64), shape) for x in (rate, given))
    run = _Releases(base, q, ask, rtol)
    low, high = np.zeros(shape), np.zeros(shape)
    for side in _SIDES.get(relation, ("remove", "add")):
        if quantity == "delta":
            ends = run.delta(at, side, relations[side])
        else:
            ends = run.epsilon(at, side, relations[side], high)
        low, high = np.maximum(low, ends[0]), np.maximum(high, ends[1])
    kind = weakest({*run.kinds, mechanism.kind_of_bracket(relation)})
    low = low if kind == "certified" else np.zeros(shape)
    agree = low <= high
    low, high = np.where(agree, low, 0.0), np.where(agree, high, 1.0 if quantity == "delta" else np.inf)
    with np.errstate(invalid="ignore"):
        middle = np.where(np.isfinite(high), low + 0.5 * (high - low), high) if kind == "certified" else high
    status = np.where((kind == "certified") & is_open(Answer(low, middle, high), rtol), "width", "ok").astype("<U32")
    status[np.isinf(high)] = "width"
    status[~agree] = "contradiction"
    status[high == 0.0] = "zero"
    if quantity == "epsilon":
        status[low == np.inf] = "mass_at_infinity"
    return Bounds(low, middle, high, kind, status, run.engine)


class _Releases:
    """The releases from one sample: their composition, the sampling rate, and the brackets of the composition."""

    def __init__(self, base: Mechanism, rate: np.ndarray, ask: Ask, rtol: float) -> None:
        self.base, self.rate, self.rtol, self._ask = base, rate, rtol, ask
        self.kinds: set[str] = set()
        self.engine = np.full(rate.shape, "", "<U32")

    def ask(self, quantity: str, values: np.ndarray, relation: str) -> Bounds:
        """Brackets of the releases without the sampling; values may have extra leading axes."""
        found = self._ask(quantity, self.base, values, relation)
        self.kinds |= set(np.ravel(found.kind).tolist())
        words = np.asarray(found.engine).reshape(-1, *self.rate.shape)[0] if found.upper.size else self.engine
        self.engine = np.where(self.engine == "", words, self.engine)
        return found

    def delta(self, eps: np.ndarray, side: str, relation: str) -> Ends:
        """Ends of delta in one direction; eps may have extra leading axes."""
        wrong, q = UNITS * ROUNDOFF, self.rate
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            risen = np.expm1(eps)
            if side == "remove":
                least, most = q + 0.0 * eps, q + 0.0 * eps
            else:
                factor, off = q - (1.0 - q) * risen, wrong * (q + (1.0 - q) * risen)
                factor, off = np.where(q == 1.0, 1.0, factor), np.where(q == 1.0, 0.0, off)
                least, most = np.maximum(factor - off, 0.0), np.maximum(factor + off, 0.0)
            inner = [_inner(eps, risen, factor) for factor in (least, most)]
        inside = np.stack([inner[0] * (1.0 + wrong), inner[1] * (1.0 - wrong)])
        found = self.ask("delta", np.minimum(inside, LARGEST_EPSILON), relation)
        low = np.where(inside[0] > LARGEST_EPSILON, 0.0, least * found.lower[0] * (1.0 - wrong))
        return np.where(least > 0.0, low, 0.0), np.where(most > 0.0, most * found.upper[1] * (1.0 + wrong), 0.0)

    def epsilon(self, delta: np.ndarray, side: str, relation: str, known: np.ndarray) -> Ends:
        """Ends of epsilon in one direction; `known`, an upper end of the other direction, ends the search early."""
        wrong, q = UNITS * ROUNDOFF, self.rate
        if side == "remove":
            share = np.where(delta < q, delta / np.where(q > 0.0, q, 1.0), 0.5)
            more, less = share * (1.0 + wrong), share * (1.0 - wrong)
            low = _outer(self.ask("epsilon", np.minimum(more, 0.5 + 0.5 * less), relation).lower, q) * (1.0 - wrong)
            high = _outer(self.ask("epsilon", less, relation).upper, q) * (1.0 + wrong)
            return np.where((delta < q) & (more < 1.0), low, 0.0), np.where(delta < q, high, 0.0)
        return self._searched(delta, relation, known)

    def _searched(self, delta: np.ndarray, relation: str, known: np.ndarray) -> Ends:
        """Ends of epsilon in the add direction, where 0 <= epsilon <= -log(1 - q)."""
        q = self.rate
        with np.errstate(divide="ignore"):
            top = np.where(q < 1.0, -np.log1p(-q) * (1.0 + UNITS * ROUNDOFF), np.inf)
        plain = self.ask("epsilon", np.where(q > 0.0, delta, 0.5), relation)  # sampling leaks no more than the releases
        low, high = np.where(q < 1.0, 0.0, plain.lower), np.minimum(plain.upper, top)
        high = np.where(q > 0.0, high, 0.0)
        low = np.where(q > 0.0, low, 0.0)
        ends = self.delta(np.where(np.isfinite(known), known, 0.0), "add", relation)
        small = (ends[1] <= delta) & np.isfinite(known)  # the other direction decides
        high = np.where(small, np.minimum(high, known), high)
        share = np.arange(1, SECTIONS + 1).reshape(-1, *(1,) * q.ndim) / (SECTIONS + 1)
        for _ in range(MOST_SEARCHES):
            wide = high * (1.0 - 0.25 * self.rtol) > low  # an infinite end stays as it is
            if not np.any(~small & np.isfinite(high) & wide):
                break
            first = np.where(np.isfinite(low), low, 0.0)
            last = np.where(np.isfinite(high), high, first)
            at = np.concatenate([first[None], first + share * (last - first)])
            ends = self.delta(at, "add", relation)
            above, below = ends[0] > delta, ends[1] <= delta
            before, low = low, np.maximum(low, np.max(np.where(above, at, 0.0), axis=0))
            narrower = np.minimum(high, np.min(np.where(below, at, np.inf), axis=0))
            if np.all((narrower == high) & (low == before)):
                break
            high = narrower
        return np.minimum(low, high), high


def _inner(eps: np.ndarray, risen: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """log(1 + (e^eps - 1)/factor), the epsilon at which the releases are evaluated."""
    safe = np.where(factor > 0.0, factor, 1.0)
    ratio = risen / safe
    return np.where(np.isfinite(ratio), np.log1p(ratio), eps - np.log(safe))


def _outer(loss: np.ndarray, q: np.ndarray) -> np.ndarray:
    """log(1 - q + q e^loss); infinite where the loss is infinite and q > 0."""
    mixed = log_mixture(np.where(np.isfinite(loss), loss, 0.0), q)
    return np.where(np.isfinite(loss), np.maximum(mixed, 0.0), np.where(q > 0.0, np.inf, 0.0))
