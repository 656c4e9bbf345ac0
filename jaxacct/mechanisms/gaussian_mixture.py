"""Gaussian noise on a sum that a record moves by a random amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.validation import NON_NEGATIVE, POSITIVE, PROBABILITY, InputError, Tracer
from jaxacct.mechanisms.base import BaseMechanism, batch_shape, register
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.finite_output import refuse_sums, sums
from jaxacct.mechanisms.gaussian_branches import Branch, OfGaussianMixtures
from jaxacct.mechanisms.mixture_profiles import mixture_pair
from jaxacct.mechanisms.parts import FinitePart
from jaxacct.mechanisms.profile import stacked

__all__ = ["MixtureOfGaussians"]


@register
@dataclass(frozen=True, eq=False)
class MixtureOfGaussians(BaseMechanism, OfGaussianMixtures):
    """Gaussian noise on a sum to which a record, or a group, contributes ``sensitivities``_i with probability p_i.

    Pair: sum_i p_i N(s_i, sigma^2), N(0, sigma^2), with the loss log sum_i p_i e^{(s_i x - s_i^2/2)/sigma^2}
    increasing in x. Sensitivities 0, 1, ..., k with binomial probabilities are a group of k records under
    Poisson sampling; s = (0, 1), p = (1-q, q) is the Poisson sampled Gaussian. For vectors, s_i are bounds of
    their norms. Alone, repeated, or composed with Gaussians, its answers are certified brackets of this pair. Elsewhere
    its profile is put on 2500 losses from above (about 1e-4 in epsilon), of which ``kind`` speaks: "bound". For add and
    remove; ``replace_one`` is refused.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        sigma, in the units of the sensitivities.
    sensitivities : array_like >= 0
        s_i on the last axis; the axes before it are the batch.
    probabilities : array_like in [0, 1]
        p_i on the last axis, as many, summing to 1 within 1e-12 (then divided by the sum).

    Raises
    ------
    InputError
        A value outside its limits, with its index; vectors that do not sum to 1, or of different lengths.

    References
    ----------
    Choquette-Choo et al. (2024), on mixture of Gaussians mechanisms.

    >>> import jaxacct as ja
    >>> pair_of_records = ja.MixtureOfGaussians(2.0, sensitivities=[0, 1, 2], probabilities=[0.81, 0.18, 0.01])
    >>> ja.delta(pair_of_records, 0.5).kind
    'certified'
    """

    noise_multiplier: Any
    sensitivities: Any
    probabilities: Any
    constraints: ClassVar = {
        "noise_multiplier": POSITIVE,
        "sensitivities": NON_NEGATIVE,
        "probabilities": PROBABILITY,
    }
    vectors: ClassVar = ("sensitivities", "probabilities")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [np.shape(getattr(self, name))[-1:] for name in self.vectors]
        if sizes[0] != sizes[1] or sizes[0] in ((), (0,)):
            raise InputError("sensitivities and probabilities must be vectors; give both the same number, 1 or more")
        if not isinstance(self.probabilities, Tracer):
            refuse_sums("probabilities", self.probabilities)

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return "bound"

    def symmetric(self) -> bool:
        return False

    def part(self, rate: np.ndarray, relation: str, direction: str) -> FinitePart:
        if relation == "replace_one":
            raise InputError(
                "relation = 'replace_one' is not supported for MixtureOfGaussians; ask about "
                "ja.Gaussian(noise_multiplier / largest sensitivity), which leaks no less"
            )
        return sample_pair(stacked([mixture_pair(*row) for row in self.rows()], batch_shape(self)), rate, direction)

    def rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Shifts in deviations and weights of every configuration, in the flat order of the batch."""
        shape, size = batch_shape(self), np.shape(self.sensitivities)[-1]
        sigma = np.broadcast_to(self.noise_multiplier, shape)
        shifts = np.broadcast_to(np.asarray(self.sensitivities) / sigma[..., None], (*shape, size))
        weights = np.asarray(self.probabilities)
        weights = np.broadcast_to(weights / sums(weights)[..., None], (*shape, size))
        return list(zip(shifts.reshape(-1, size), weights.reshape(-1, size), strict=True))

    def branches(self, relation: str) -> list[list[Branch]] | None:
        if relation == "replace_one":
            return None
        return [[Branch(1.0, shift, weight)] for shift, weight in self.rows()]

    def attained(self, relation: str) -> bool:
        return True
