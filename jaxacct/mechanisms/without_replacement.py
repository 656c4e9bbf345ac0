"""Sampling of a fixed number of records without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from jaxacct.mechanisms.base import DIRECTIONS, BaseMechanism, Mechanism, register, require_mechanism
from jaxacct.mechanisms.either_order import either_order
from jaxacct.mechanisms.finite import log_mixture, sample_pair
from jaxacct.mechanisms.parts import FinitePair, FinitePart, Part
from jaxacct.validation import PROBABILITY, InputError

__all__ = ["SampledWithoutReplacement"]


@register
@dataclass(frozen=True, eq=False)
class SampledWithoutReplacement(Mechanism):
    """A base mechanism run on a sample of fixed size without replacement, a share ``sampling_ratio`` g of the data.

    A sample of fixed size changes by a replacement, so (P, Q) is the base's pair under ``replace_one`` (twice the
    sensitivity of add/remove). Remove is ((1-g) Q + g P, Q), add is (Q, (1-g) Q + g P), and ``replace_one`` is the pair
    with profile H_a((1-g) Q + g P || Q) for a >= 1 and H_a(P || (1-g) P + g Q) for a < 1. A base whose two laws are not
    alike is replaced in either order, and (P, Q) has the larger of the two profiles (README.md, "Two orders of a
    replaced record"). Repeated or composed, a pair that joins several is a bound, and so are its Renyi divergences. For
    Gaussian and Laplace bases ``replace_one`` is put on finitely many losses from above (about 1e-5 in epsilon), and
    ``kind_under("replace_one")`` is "bound". Sampling a Repeated or Composed mechanism is refused, as in
    PoissonSampled. Not the same guarantee as Poisson sampling.

    Parameters
    ----------
    mechanism : BaseMechanism
        A single step.
    sampling_ratio : array_like in [0, 1]
        Sample size over data set size (the larger one under add/remove); broadcasts with the base's fields.

    Raises
    ------
    InputError
        Something that cannot be sampled, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 11 and
    Corollary 31. Lebeda et al. (2024), on accounting for sampling without replacement.

    >>> import jaxacct as ja
    >>> fixed = ja.SampledWithoutReplacement(ja.Gaussian(2.0), 0.01)
    >>> poisson = ja.PoissonSampled(ja.Gaussian(1.0), 0.01)  # half the noise: a replacement moves twice as far
    >>> bool(ja.epsilon(fixed, 1e-5).upper == ja.epsilon(poisson, 1e-5).upper)
    True
    """

    mechanism: Any
    sampling_ratio: Any
    constraints: ClassVar = {"sampling_ratio": PROBABILITY}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        if not isinstance(self.mechanism, BaseMechanism):
            raise InputError(
                f"SampledWithoutReplacement of {type(self.mechanism).__name__} is not supported; sample a single "
                "step, as in repeat(SampledWithoutReplacement(Gaussian(1.0), 0.01), 1000)"
            )
        super().__post_init__()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        replaced = relation == "replace_one" and not self._trivial()
        # these pairs join several pairs of data sets; Gaussian and Laplace bases are put on finitely many losses
        joined = replaced or not self.mechanism.symmetric()
        rough = replaced and not self.mechanism.finite
        return "bound" if rough or (joined and composed) else super().kind_under("replace_one", composed)

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        ratio = np.asarray(self.sampling_ratio, np.float64)
        once = np.asarray(1.0)
        if relation == "zero_out":
            raise InputError(
                "relation = 'zero_out' is not supported for SampledWithoutReplacement; use relation='replace_one', "
                "which covers it"
            )
        if self.mechanism.symmetric():
            if relation != "replace_one" or self._trivial():
                return [(self.mechanism.part(ratio, "replace_one", direction), once)]
            pair = self.mechanism.finite_pair(relation)
        else:
            base = [self.mechanism.part(once, "replace_one", each) for each in DIRECTIONS]
            pair = either_order(*(cast(FinitePart, part) for part in base))
            if relation != "replace_one" or self._trivial():
                return [(sample_pair(pair, ratio, direction), once)]
        return [(sample_pair(_replaced(pair, ratio), once, direction), once)]

    def symmetric(self) -> bool:
        return self._trivial()

    def displaces(self) -> bool:
        return True

    def _trivial(self) -> bool:
        ratio = np.asarray(self.sampling_ratio, np.float64)
        return bool(np.all((ratio == 0.0) | (ratio == 1.0)))


def _replaced(pair: FinitePair, ratio: np.ndarray) -> FinitePair:
    """The pair of Corollary 31: positive losses mixed towards Q, negative ones towards P, the rest at loss 0."""
    g = ratio[..., None]
    above, below = pair.loss > 0.0, pair.loss < 0.0
    mixed_p, mixed_q = (1.0 - g) * pair.q + g * pair.p, (1.0 - g) * pair.p + g * pair.q
    loss = np.where(above, log_mixture(pair.loss, g), -log_mixture(-pair.loss, g))
    p = np.where(above, mixed_p, np.where(below, pair.p, 0.0))
    q = np.where(above, pair.q, np.where(below, mixed_q, 0.0))
    p_infinity, q_infinity = ratio * pair.p_infinity, ratio * pair.q_infinity
    # what is common to both laws: P at loss 0, and (1-g) times the total variation
    apart = np.where(above, pair.p - pair.q, 0.0).sum(-1) + pair.p_infinity
    centre = np.where(above | below, 0.0, pair.p).sum(-1) + (1.0 - ratio) * np.maximum(apart, 0.0)
    shape = np.broadcast_shapes(loss.shape[:-1], centre.shape)

    def joined(values: np.ndarray, last: np.ndarray) -> np.ndarray:
        values = np.broadcast_to(values, (*shape, values.shape[-1]))
        return np.concatenate([values, np.broadcast_to(last, shape)[..., None]], -1)

    zero = np.zeros(shape)
    return FinitePair(
        joined(np.where(above | below, loss, 0.0), zero),
        joined(p, centre),
        joined(q, centre),
        np.broadcast_to(p_infinity, shape),
        np.broadcast_to(q_infinity, shape),
    )
