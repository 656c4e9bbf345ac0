"""Batches of a shuffled data set: every record is in exactly one batch of a pass."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import LOST_TAIL, ROUNDOFF
from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, InputError
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.base import SENSITIVITY, FinitePart, GaussianPart, Mechanism, Part, batch_shape, register
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.mechanisms.gaussian_mixtures import LOSS_OF_PRESENCE, require_gaussian
from jaxacct.mechanisms.profile import lowered_part, stacked_parts
from jaxacct.mechanisms.random_allocation import RandomAllocation

ATTACKS = ("largest", "allocation")
"""Names of attacks on a pass. "largest" sees only the largest output, and "allocation" sees all outputs."""
MOST_PASSES, MOST_ROWS = 1000, 16
"""Largest numbers of passes, and of answers in one call, for which attacks are computed. An answer takes up to 1 s."""


@register
class ShuffledBatches(Mechanism):
    """One pass over a data set that is shuffled and cut into ``batches`` of a fixed size, with a Gaussian on each.

    No amplification by the shuffle is claimed: a pass counts as one Gaussian, of sensitivity 1 for ``zero_out`` and 2
    for ``replace_one``. ``kind`` is "bound". ``ja.repeat`` covers several passes, whether each is shuffled afresh or
    all have the same order. Poisson sampling with the same batch size usually has a much smaller proved epsilon.

    The best known attack on fresh shuffles gives the lower ends of ``ja.epsilon`` and ``ja.delta`` (README.md,
    "Shuffled batches"). They are 0 for a single batch, above 1,000 passes or 16 answers, in `Profile.delta` and risks.

    Add and remove are refused. If a record is removed, another record moves into its slot. This changes the sums of two
    batches, so the sensitivity is sqrt(5), not 1. Use ``zero_out``, which leaves the slot with a contribution of 0.

    Parameters
    ----------
    mechanism : Gaussian; one step, with noise in units of the add/remove sensitivity.
    batches : whole numbers from 1 to 2**53; batches of one pass. The upper end of an answer does not depend on them.

    References
    ----------
    Chua et al. (2024), How Private are DP-SGD Implementations? README.md, "Shuffled batches".

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.ShuffledBatches(ja.Gaussian(2.0), batches=100), 1e-5, relation="zero_out")
    >>> bool(b.upper == ja.epsilon(ja.Gaussian(2.0), 1e-5).upper), b.kind, round(float(b.lower), 2)
    (True, 'bound', 0.48)
    """

    mechanism: Leaf
    batches: Leaf
    constraints: ClassVar = {"batches": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_gaussian("ShuffledBatches", self.mechanism)

    def symmetric(self) -> bool:
        return True

    def displaces(self) -> bool:
        return True

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if relation in LOSS_OF_PRESENCE:
            raise InputError(
                f"relation = {relation!r} is not supported for ShuffledBatches, where another record fills the slot; "
                "ask about ja.Gaussian(noise_multiplier / 5**0.5) for each pass, which leaks no less, or make "
                "the other claim that the slot stays empty: relation='zero_out'"
            )
        sigma = np.asarray(self.mechanism.noise_multiplier, np.float64) / SENSITIVITY[relation]
        return [(GaussianPart(sigma, np.asarray(1.0)), np.asarray(1.0))]


def attacks_on(mechanism: Mechanism, relation: str, size: int) -> list[Mechanism]:
    """Return mechanisms that `mechanism` dominates. They show only a part of each pass, and have certified brackets."""
    # `size` is the number of answers that are asked at once
    if relation in LOSS_OF_PRESENCE or size > MOST_ROWS or not _in_reach(mechanism, 1.0):
        return []
    attacks = ATTACKS if _in_bulk(mechanism, SENSITIVITY[relation]) else ATTACKS[:1]
    found = [_attacked(mechanism, attack) for attack in attacks]
    return [one for one in found if one != mechanism and one.kind_of_bracket(relation, True) == "certified"]


def _in_reach(mechanism: Mechanism, times: float) -> bool:
    """Return whether each pass has several batches, and `times` repetitions have at most MOST_PASSES passes."""
    match mechanism:
        case ShuffledBatches():  # the trainer writes `batches` = 1 whatever the true number of batches is
            return bool(np.all(np.asarray(mechanism.batches) > 1.0)) and times <= MOST_PASSES
        case Repeated():
            return _in_reach(mechanism.mechanism, times * float(np.max(mechanism.steps, initial=1.0)))
        case Composed():
            return all(_in_reach(one, times) for one in mechanism.mechanisms)
    return True


def _in_bulk(mechanism: Mechanism, sensitivity: float) -> bool:
    """Return whether the attack "allocation" usually beats the attack "largest" on every pass."""
    if isinstance(mechanism, ShuffledBatches):
        sigma = np.asarray(mechanism.mechanism.noise_multiplier) / sensitivity
        return bool(np.all((sigma >= 1.0) & (sigma >= np.sqrt(60.0 / np.asarray(mechanism.batches)))))
    return all(_in_bulk(inner, sensitivity) for inner in mechanism.inside())


def _attacked(mechanism: Mechanism, attack: str) -> Mechanism:
    """Return the mechanism with every pass over shuffled batches replaced by what an attack sees of it."""
    match mechanism:
        case ShuffledBatches():
            return _SeenBatches(mechanism.mechanism, mechanism.batches, attack)
        case Repeated():
            return dataclasses.replace(mechanism, mechanism=_attacked(mechanism.mechanism, attack))
        case Composed():
            return dataclasses.replace(mechanism, mechanisms=tuple(_attacked(x, attack) for x in mechanism.mechanisms))
    return mechanism


@register
class _SeenBatches(Mechanism):
    """What an attack sees of one pass: the largest output, or all outputs."""

    exact_pair: ClassVar = True
    mechanism: Any
    batches: Any
    attack: str = field(metadata={"static": True})

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        sigma, batches = np.asarray(self.mechanism.noise_multiplier), np.asarray(self.batches)
        if self.attack == "allocation":
            seen = RandomAllocation(Gaussian(sigma / SENSITIVITY[relation]), batches)
            return seen.expand_below("zero_out", direction)
        # One output has mean 2 with the record, and mean `moved` without it: 1 (zero_out) or 0 (replace_one).
        moved, shape = 2.0 - SENSITIVITY[relation], batch_shape(self)
        # `_largest` needs sigma >= 1e-3. If sigma is smaller, the attack adds noise itself, so the bound stays valid.
        rows = (np.broadcast_to(x, shape).ravel() for x in (np.maximum(sigma, 1e-3), batches))
        laws = [_largest(2.0 / noise, moved / noise, t, direction) for noise, t in zip(*rows, strict=True)]
        return [(stacked_parts(laws, shape), np.asarray(1.0))]


def _largest(with_record: float, without: float, batches: float, direction: str) -> FinitePart:
    """Return the loss law of an attack that sees the grid cell of the largest output. Means are in units of sigma."""
    from scipy import special  # slow to import

    # All other outputs are below `lowest` with probability e^-46. If `lowest` rounds to -inf (2 batches), use -10.
    lowest = max(-special.ndtri(-np.expm1(-46.0 / (batches - 1.0))), -10.0)
    highest = with_record + 38.0
    step = 0.05 / max(1.0, with_record - without)
    inner = np.linspace(lowest, highest, int(np.clip((highest - lowest) / step, 2, 2000)))
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    (p, p_off), (q, q_off) = (_masses(edges, mean, batches) for mean in (with_record, without))
    if direction == "add":
        p, p_off, q, q_off = q, q_off, p, p_off
    return lowered_part(p - p_off, q + q_off)


def _masses(edges: np.ndarray, mean: float, batches: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the chance that the largest output lies in each cell between two edges, and bounds of the errors."""
    from scipy import special

    # `log` is log Pr[largest output <= edge]; one output has the mean `mean`, the others have mean 0. `units`
    # bounds its relative error in roundoffs: an argument x of log Phi has a rounding error in proportion to the edge
    # and the mean, and the slope of log Phi at x is at most 2 (|x| + 1) |log Phi(x)|.
    log = special.log_ndtr(edges - mean) + (batches - 1.0) * special.log_ndtr(edges)
    size = np.where(np.isfinite(edges), np.abs(edges), 0.0)
    units = 20.0 + 2.0 * (np.abs(size - mean) + size + mean + 1.0) * (size + mean + 1.0) + 2.0 * size * (size + 1.0)
    lower, upper = np.exp(log), -np.expm1(log)
    # where -log > 746, `lower` and its error underflow to 0; the cap avoids inf * 0
    lower_off = ROUNDOFF * (4.0 + units * np.minimum(-log, 746.0)) * lower
    upper_off = ROUNDOFF * units * upper
    in_lower = lower[:-1] <= 0.5
    mass = np.where(in_lower, np.diff(lower), -np.diff(upper))
    off = np.where(in_lower, lower_off[:-1] + lower_off[1:], upper_off[:-1] + upper_off[1:])
    return np.maximum(mass, 0.0), off + LOST_TAIL
