"""Batches of a shuffled data set: every record is in exactly one batch of a pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
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
"""Names of attacks. In each pass, "largest" sees only the largest output, and "allocation" sees all outputs."""
MOST_PASSES, MOST_ROWS = 1000, 16
"""Largest numbers of passes, and of answers in one call, for which attacks are computed. An answer takes up to 1 s."""


@register
@dataclass(frozen=True, eq=False)
class ShuffledBatches(Mechanism):
    """One pass over a data set that is shuffled and cut into ``batches`` of a fixed size, with a Gaussian on each.

    No amplification by the shuffle is claimed: a pass counts as one Gaussian, of sensitivity 1 for ``zero_out`` and of
    sensitivity 2 for ``replace_one``. ``kind`` is "bound". For several passes use ``ja.repeat``, with a fresh
    shuffle for each pass or the same one for all.

    The best known attack, with fresh shuffles, gives the lower ends of ``ja.epsilon`` and ``ja.delta``
    (README.md, "Shuffled batches"). The exact value between the two ends is not known. The lower ends are 0 for a
    single batch, for more than 1,000 passes, for more than 16 answers at once, and in profiles and risks.

    Add and remove are refused. If a record is removed, another record moves into its slot. This changes the sums of two
    batches, so the sensitivity is sqrt(5), not 1. Use ``zero_out``, which leaves the slot with a contribution of 0.

    For the same batch sizes Poisson sampling is usually proved to be much more private.

    Parameters
    ----------
    mechanism : Gaussian
        One step, with noise in units of the add/remove sensitivity.
    batches : array_like of whole numbers from 1 to 2**53
        Number of batches of one pass. The upper end of an answer does not depend on it.

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
                f"relation = {relation!r} is not supported for ShuffledBatches: a record that moves into the free slot "
                "changes two sums; ask about ja.Gaussian(noise_multiplier / 5**0.5) for each pass, which leaks no less"
            )
        sigma = np.asarray(self.mechanism.noise_multiplier, np.float64) / SENSITIVITY[relation]
        return [(GaussianPart(sigma, np.asarray(1.0)), np.asarray(1.0))]


def attacks_on(mechanism: Mechanism, relation: str, size: int) -> list[Mechanism]:
    """Return the attacks on composed passes whose deltas have certified brackets. Return [] if `size` > MOST_ROWS.

    An attack is a mechanism that shows only a part of each pass, so that the composition dominates the attack. `size`
    is the number of answers asked at once. For `batches` = 1 there is no attack, since the trainer writes 1
    whatever the true number is: the upper ends do not depend on the number.
    """
    if relation in LOSS_OF_PRESENCE or size > MOST_ROWS or not _in_reach(mechanism, 1.0):
        return []
    attacks = ATTACKS if _in_bulk(mechanism, SENSITIVITY[relation]) else ATTACKS[:1]
    found = [_attacked(mechanism, attack) for attack in attacks]
    return [one for one in found if one != mechanism and one.kind_of_bracket(relation, True) == "certified"]


def _in_reach(mechanism: Mechanism, times: float) -> bool:
    """Return whether each pass has several batches, and `times` repetitions make at most MOST_PASSES passes."""
    match mechanism:
        case ShuffledBatches():
            return bool(np.all(np.asarray(mechanism.batches) > 1.0)) and times <= MOST_PASSES
        case Repeated():
            return _in_reach(mechanism.mechanism, times * float(np.max(mechanism.steps, initial=1.0)))
        case Composed():
            return all(_in_reach(one, times) for one in mechanism.mechanisms)
    return True


def _in_bulk(mechanism: Mechanism, sensitivity: float) -> bool:
    """Return whether the attack on all outputs of a pass usually beats the attack on the largest output."""
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
@dataclass(frozen=True, eq=False)
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
        # With the record one output has the mean 2. Without it the mean is `moved`: 1 (zero_out) or 0 (replace_one).
        moved, shape = 2.0 - SENSITIVITY[relation], batch_shape(self)
        # a sigma below 1e-3 is out of the range of `_largest` and is raised to 1e-3, as if the attack added noise
        rows = (np.broadcast_to(x, shape).ravel() for x in (np.maximum(sigma, 1e-3), batches))
        laws = [_largest(2.0 / noise, moved / noise, t, direction) for noise, t in zip(*rows, strict=True)]
        return [(stacked_parts(laws, shape), np.asarray(1.0))]


def _largest(with_record: float, without: float, batches: float, direction: str) -> FinitePart:
    """Return the law of the loss of an attack that sees in which grid cell the largest of `batches` outputs lies."""
    from scipy import special  # slow to import

    # One output has the mean `with_record` under P and `without` under Q, in units of sigma. All others have mean 0.
    # The chance that all others are below `lowest` is e^-46. For 2 batches `lowest` would be -inf, so it is set to -10.
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
    """Return the chance that the largest output lies in each cell between two edges, and bounds of the errors.

    A chance is a difference of two lower tails, or of two upper tails where these are smaller. `log` is the logarithm
    of the lower tail, a sum of terms log Phi(x). `units` bounds the relative error of `log`, in roundoffs: x has a
    rounding error in proportion to the edge and the mean, and the slope of log Phi(x) is at most
    2 (|x| + 1) |log Phi(x)|.
    """
    from scipy import special

    log = special.log_ndtr(edges - mean) + (batches - 1.0) * special.log_ndtr(edges)
    size = np.where(np.isfinite(edges), np.abs(edges), 0.0)
    units = 20.0 + 2.0 * (np.abs(size - mean) + size + mean + 1.0) * (size + mean + 1.0) + 2.0 * size * (size + 1.0)
    lower, upper = np.exp(log), -np.expm1(log)
    # Where -log > 746, `lower` and its error underflow to 0. The factor -log is capped, since inf * 0 would be NaN.
    lower_off = ROUNDOFF * (4.0 + units * np.minimum(-log, 746.0)) * lower
    upper_off = ROUNDOFF * units * upper
    in_lower = lower[:-1] <= 0.5
    mass = np.where(in_lower, np.diff(lower), -np.diff(upper))
    off = np.where(in_lower, lower_off[:-1] + lower_off[1:], upper_off[:-1] + upper_off[1:])
    return np.maximum(mass, 0.0), off + LOST_TAIL
