"""Batches of a shuffled data set: every record is in exactly one batch of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import COUNT, InputError
from jaxacct.mechanisms.base import SENSITIVITY, Mechanism, register, require_mechanism
from jaxacct.mechanisms.gaussian_branches import LOSS_OF_PRESENCE, require_gaussian
from jaxacct.mechanisms.parts import GaussianPart, Part

__all__ = ["ShuffledBatches"]


@register
@dataclass(frozen=True, eq=False)
class ShuffledBatches(Mechanism):
    """One pass over a data set that is shuffled and cut into ``batches`` of a fixed size, with a Gaussian on each.

    No amplification by the shuffle is claimed. With the order revealed, one batch of the pass holds the record, and the
    pass is one Gaussian: of sensitivity 1 for ``zero_out``, of sensitivity 2 for ``replace_one``. ``kind`` is "bound".
    ``repeat`` it for several passes, with a fresh shuffle or the same one.

    The lower ends of ``ja.epsilon`` and ``ja.delta`` are what the best known attack reaches, with fresh shuffles:
    it sees the largest output of a pass where all other records contribute -1, or all outputs of a pass where they
    contribute 0 (``zero_out``) or -1 (``replace_one``). How private a pass is between the two ends is not known.
    They are 0 for a single batch, for more than 1,000 passes or 16 answers at once, and in profiles and risks.

    Add and remove are refused: with one record less the batches have another total size, and a record that moves into
    the free slot changes two sums, so that the sensitivity is not 1 but sqrt(5). Use ``zero_out``: the slot stays.

    For the same batch sizes Poisson sampling is usually proved to be much more private.

    Parameters
    ----------
    mechanism : Gaussian
        The step; noise in units of the add/remove sensitivity.
    batches : array_like of whole numbers from 1 to 2**53
        Batches of one pass; the upper end does not depend on it.

    Raises
    ------
    InputError
        A base that is not a Gaussian, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Chua et al. (2024), How Private are DP-SGD Implementations? README.md, "Shuffled batches".

    >>> import jaxacct as ja
    >>> b = ja.epsilon(ja.ShuffledBatches(ja.Gaussian(2.0), batches=100), 1e-5, relation="zero_out")
    >>> bool(b.upper == ja.epsilon(ja.Gaussian(2.0), 1e-5).upper), b.kind, round(float(b.lower), 2)
    (True, 'bound', 0.48)
    """

    mechanism: Any
    batches: Any
    constraints: ClassVar = {"batches": COUNT}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        require_gaussian("ShuffledBatches", self.mechanism)
        super().__post_init__()

    def symmetric(self) -> bool:
        return True

    def displaces(self) -> bool:
        return True

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if relation in LOSS_OF_PRESENCE:
            raise InputError(
                f"relation = {relation!r} is not supported for ShuffledBatches: a record that moves into the free slot "
                "changes two sums; ask about ja.Gaussian(noise_multiplier / 5**0.5) for each pass, which leaks no less"
            )
        sigma = np.asarray(self.mechanism.noise_multiplier, np.float64) / SENSITIVITY[relation]
        return [(GaussianPart(sigma, np.asarray(1.0)), np.asarray(1.0))]
