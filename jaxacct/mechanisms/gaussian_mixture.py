"""Gaussian noise on a sum that a record moves by a random amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, batch_shape, register
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.finite_output import refuse_sums, sums
from jaxacct.mechanisms.parts import FinitePair, FinitePart
from jaxacct.mechanisms.profile import pair_of_profile, stacked
from jaxacct.validation import NON_NEGATIVE, POSITIVE, PROBABILITY, InputError, Tracer

__all__ = ["MixtureOfGaussians"]

CENTRAL_QUANTILES, QUANTILES_PER_TAIL = 2000, 250
"""Quantiles at which the profile is taken: within 9 deviations of the two ends, and beyond up to 37.

So many cost about 1e-4 in epsilon; at 37 deviations the normal tail is 6e-300."""
PROFILE_ROUNDING = 1e-12
"""Relative error allowed for the two terms whose difference is a point of the profile.

Ample for a few roundings of logarithms up to 700 in magnitude, 8e-14 each."""
LEAST_RELATIVE_GAP = 1e-7
"""Points nearer than this, relative to the largest shift in deviations, are left out.

Slopes between nearer points lose their digits."""


@register
@dataclass(frozen=True, eq=False)
class MixtureOfGaussians(BaseMechanism):
    """Gaussian noise on a sum to which a record, or a group, contributes ``sensitivities``_i with probability p_i.

    Pair: sum_i p_i N(s_i, sigma^2), N(0, sigma^2), with the loss log sum_i p_i e^{(s_i x - s_i^2/2)/sigma^2}
    increasing in x. Sensitivities 0, 1, ..., k with binomial probabilities are a group of k records under
    Poisson sampling; s = (0, 1), p = (1-q, q) is the Poisson sampled Gaussian. For vectors, s_i are bounds of
    their norms. The pair's profile is put on 2500 losses from above (about 1e-4 in epsilon): ``kind`` is
    "bound". For add and remove; ``replace_one`` is refused.

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
    'bound'
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
                "relation = 'replace_one' is not supported for MixtureOfGaussians; use relation='add_or_remove_one'"
            )
        shape, size = batch_shape(self), np.shape(self.sensitivities)[-1]
        sigma = np.broadcast_to(self.noise_multiplier, shape)
        shifts = np.broadcast_to(np.asarray(self.sensitivities) / sigma[..., None], (*shape, size))
        weights = np.asarray(self.probabilities)
        weights = np.broadcast_to(weights / sums(weights)[..., None], (*shape, size))
        rows = zip(shifts.reshape(-1, size), weights.reshape(-1, size), strict=True)
        return sample_pair(stacked([_mixture_pair(*row) for row in rows], shape), rate, direction)


def _mixture_pair(shift: np.ndarray, weight: np.ndarray) -> FinitePair:
    """The pair of the profile at the losses of a grid of quantiles u = x/sigma; shifts in deviations, shape (A,)."""
    from scipy import special  # takes a while to import: only where it is needed

    shift, weight = shift[weight > 0.0], weight[weight > 0.0]
    widest = float(shift.max())
    if widest == 0.0:
        return pair_of_profile(np.zeros(1), np.zeros(1), np.zeros(1))
    bulk = np.linspace(-9.0, 9.0 + widest, CENTRAL_QUANTILES)
    u = np.concatenate(
        [
            np.linspace(-37.0, -9.0, QUANTILES_PER_TAIL)[:-1],
            bulk,
            np.linspace(9.0, 37.0, QUANTILES_PER_TAIL)[1:] + widest,
        ]
    )
    each = np.log(weight) + shift * u[:, None] - 0.5 * shift**2
    loss = special.logsumexp(each, axis=1)

    def points(sign: float) -> tuple[np.ndarray, np.ndarray]:
        """(eps, delta), the gain of one law over e^eps times the other above u (sign 1), or below it (-1)."""
        of_q = special.log_ndtr(-sign * u)
        of_p = special.logsumexp(np.log(weight) + special.log_ndtr(sign * (shift - u[:, None])), axis=1)
        first, second = (of_p, of_q + loss) if sign > 0 else (of_q, of_p - loss)
        gain, cost = np.exp(first), np.exp(second)
        eps, delta = sign * loss, np.maximum(gain - cost, 0.0) + PROFILE_ROUNDING * (gain + cost)
        order = np.flatnonzero(eps > 0.0)[:: int(sign)]
        return eps[order], np.minimum(delta[order], 1.0)

    forward, reverse = points(1.0), points(-1.0)
    nothing = float(weight[shift == 0.0].sum())
    if nothing > 0.0:  # the loss of add is at most -log of the chance of no contribution
        largest = -np.log(nothing) * (1.0 + 1e-15) + 1e-15
        keep = reverse[0] < largest
        reverse = (np.append(reverse[0][keep], largest), np.append(reverse[1][keep], 0.0))
    epsilon = np.concatenate([forward[0], reverse[0]])
    none = (np.ones(forward[0].size), np.ones(reverse[0].size))
    delta, back = np.concatenate([forward[1], none[1]]), np.concatenate([none[0], reverse[1]])
    order = np.argsort(epsilon, kind="stable")
    epsilon, delta, back = epsilon[order], delta[order], back[order]
    # of points that nearly coincide only the last is kept, with what the earlier ones say
    delta, back = np.minimum.accumulate(delta), np.minimum.accumulate(back)
    keep = np.append(np.diff(epsilon) > LEAST_RELATIVE_GAP * widest, True) & (epsilon > LEAST_RELATIVE_GAP * widest)
    return pair_of_profile(epsilon[keep], delta[keep], back[keep])
