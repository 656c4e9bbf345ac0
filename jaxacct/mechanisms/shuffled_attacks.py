"""What two attacks see of shuffled batches: pairs that a pass dominates, for the lower ends of brackets.

All other records contribute -1, or 0.  README.md, "Shuffled batches", has the laws and why they are dominated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxacct.core.floats import LOST_TAIL, ROUNDOFF
from jaxacct.mechanisms.base import SENSITIVITY, Mechanism, batch_shape, register
from jaxacct.mechanisms.bracketing_pairs import lowered_part
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.gaussian_branches import LOSS_OF_PRESENCE
from jaxacct.mechanisms.mixture_cells import stacked_parts
from jaxacct.mechanisms.parts import FinitePart, Part
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.mechanisms.shuffled_batches import ShuffledBatches

__all__ = ["attacks_on"]

ATTACKS = ("largest", "allocation")
"""The largest output of a pass, where the others contribute -1; all outputs, where they contribute 0 (zero_out)."""
FAR = 38.0
"""Deviations beyond which no output is told from a larger one."""
MOST_PASSES, MOST_ROWS = 1000, 16
"""Passes and configurations up to which attacks are asked about: each takes up to a second."""
BULK = 60.0
"""batches sigma^2 from which on, with sigma >= 1, random allocation is fast, and no single output decides."""
LEAST_NOISE = 1e-3
"""Noise multiplier below which the masses of one law are 0 where the other has its own."""
CELL, MOST_CELLS = 0.05, 2000
"""Width of a cell of the largest output, in units of the loss and of deviations, and how many there are at most."""


def attacks_on(mechanism: Mechanism, relation: str, size: int) -> list[Mechanism]:
    """Compositions that one of shuffled batches dominates, each with a certified pair; none for other mechanisms.

    size : how many answers are asked for.  Of more than MOST_ROWS none is improved.

    Nor are there any where a pass has a single batch, as the trainer writes it: how many there were is not known then.
    """
    if relation in LOSS_OF_PRESENCE or size > MOST_ROWS or not _in_reach(mechanism, 1.0):
        return []
    attacks = ATTACKS if _in_bulk(mechanism, SENSITIVITY[relation]) else ATTACKS[:1]
    found = [_attacked(mechanism, attack) for attack in attacks]
    return [one for one in found if one != mechanism and one.kind_of_bracket(relation, True) == "certified"]


def _in_reach(mechanism: Mechanism, times: float) -> bool:
    """Whether all passes over shuffled batches, each run so many times, are few and of several batches."""
    match mechanism:
        case ShuffledBatches():
            return bool(np.all(np.asarray(mechanism.batches) > 1.0)) and times <= MOST_PASSES
        case Repeated():
            return _in_reach(mechanism.mechanism, times * float(np.max(mechanism.steps)))
        case Composed():
            return all(_in_reach(one, times) for one in mechanism.mechanisms)
    return True


def _in_bulk(mechanism: Mechanism, sensitivity: float) -> bool:
    """Whether all outputs of every pass tell more than the largest, as a rule: else they only take longer."""
    if isinstance(mechanism, ShuffledBatches):
        sigma = np.asarray(mechanism.mechanism.noise_multiplier) / sensitivity
        return bool(np.all((sigma >= 1.0) & (sigma >= np.sqrt(BULK / np.asarray(mechanism.batches)))))
    return all(_in_bulk(inner, sensitivity) for inner in mechanism.inside())


def _attacked(mechanism: Mechanism, attack: str) -> Mechanism:
    """The mechanism with what an attack sees in place of every pass over shuffled batches."""
    match mechanism:
        case ShuffledBatches():
            return _SeenBatches(mechanism.mechanism, mechanism.batches, attack)
        case Repeated():
            return dataclasses.replace(mechanism, mechanism=_attacked(mechanism.mechanism, attack))
        case Composed():
            return dataclasses.replace(mechanism, mechanisms=tuple(_attacked(x, attack) for x in mechanism.mechanisms))
    return mechanism


@register
@dataclass(frozen=True, eq=False)
class _SeenBatches(Mechanism):
    """What an attack sees of a pass."""

    mechanism: Any
    batches: Any
    attack: str = field(metadata={"static": True})

    def symmetric(self) -> bool:
        return False

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        sigma, batches = np.asarray(self.mechanism.noise_multiplier), np.asarray(self.batches)
        if self.attack == "allocation":
            seen = RandomAllocation(Gaussian(sigma / SENSITIVITY[relation]), batches)
            return seen.expand_below("zero_out", direction)
        # zero_out moves the largest mean from 2 to 1, replace_one from 2 to 0
        moved, shape = 2.0 - SENSITIVITY[relation], batch_shape(self)
        # more noise is post-processing, and what is seen more clearly is out of range
        rows = (np.broadcast_to(x, shape).ravel() for x in (np.maximum(sigma, LEAST_NOISE), batches))
        laws = [_largest(2.0 / noise, moved / noise, t, direction) for noise, t in zip(*rows, strict=True)]
        return [(stacked_parts(laws, shape), np.asarray(1.0))]


def _largest(with_record: float, without: float, batches: float, direction: str) -> FinitePart:
    """The law of the loss of the largest of `batches` normal outputs, of which one has a mean, where its cell is seen.

    with_record, without : that mean under P and under Q, in deviations; those of the others are 0.
    """
    from scipy import special  # takes a while to import: only where it is needed

    # where the largest of the others is rarely below: with a chance of e^-46, or of Phi(-10) for each
    lowest = max(-special.ndtri(-np.expm1(-46.0 / (batches - 1.0))), -10.0)
    highest = with_record + FAR
    step = CELL / max(1.0, with_record - without)
    inner = np.linspace(lowest, highest, int(np.clip((highest - lowest) / step, 2, MOST_CELLS)))
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    (p, p_off), (q, q_off) = (_masses(edges, mean, batches) for mean in (with_record, without))
    if direction == "add":
        p, p_off, q, q_off = q, q_off, p, p_off
    return lowered_part(p - p_off, q + q_off)


def _masses(edges: np.ndarray, mean: float, batches: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses of the largest output between edges, and their errors: differences of the smaller tail.

    An edge is off by a rounding of its size and of the mean.  The slope of log Phi(x) is at most 2 (|x| + 1) times
    log Phi(x) itself, so that the logarithm of the lower tail, a sum of two such, is known relatively (`units`).
    """
    from scipy import special

    log = special.log_ndtr(edges - mean) + (batches - 1.0) * special.log_ndtr(edges)
    size = np.where(np.isfinite(edges), np.abs(edges), 0.0)
    units = 20.0 + 2.0 * (np.abs(size - mean) + size + mean + 1.0) * (size + mean + 1.0) + 2.0 * size * (size + 1.0)
    lower, upper = np.exp(log), -np.expm1(log)
    # what is below e^-746 underflows
    lower_off = ROUNDOFF * (4.0 + units * np.minimum(-log, 746.0)) * lower
    upper_off = ROUNDOFF * units * upper
    in_lower = lower[:-1] <= 0.5
    mass = np.where(in_lower, np.diff(lower), -np.diff(upper))
    off = np.where(in_lower, lower_off[:-1] + lower_off[1:], upper_off[:-1] + upper_off[1:])
    return np.maximum(mass, 0.0), off + LOST_TAIL
