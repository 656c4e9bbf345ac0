"""Poisson sampling: each record takes part independently with a given probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.mechanisms.base import BaseMechanism, Mechanism, register, require_mechanism
from jaxacct.mechanisms.parts import Part
from jaxacct.validation import PROBABILITY, InputError

__all__ = ["PoissonSampled"]


@register
@dataclass(frozen=True, eq=False)
class PoissonSampled(Mechanism):
    """A base mechanism run on a Poisson sample: each record is in it with ``sampling_probability`` q.

    With (P, Q) the base pair: remove ((1-q) Q + q P, Q), add (Q, (1-q) Q + q P). The two directions differ for
    0 < q < 1; q = 1 is the base and q = 0 leaks nothing. Sampling a sample multiplies the rates. ``replace_one`` is
    refused for 0 < q < 1. Sampling a Repeated or Composed mechanism is refused: sampling once and composing inside is
    another mechanism than composing sampled steps.

    Parameters
    ----------
    mechanism : BaseMechanism or PoissonSampled
        A single step.
    sampling_probability : array_like in [0, 1]
        q; broadcasts with the base's fields.

    Raises
    ------
    InputError
        Something that cannot be sampled, a value outside its limits, with its index, or shapes that do not broadcast.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 11.

    >>> from jaxacct.mechanisms import Gaussian
    >>> PoissonSampled(Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    """

    mechanism: Any
    sampling_probability: Any
    constraints: ClassVar = {"sampling_probability": PROBABILITY}

    def __post_init__(self) -> None:
        require_mechanism("mechanism", self.mechanism)
        if not isinstance(self.mechanism, BaseMechanism | PoissonSampled):
            raise InputError(
                f"PoissonSampled of {type(self.mechanism).__name__} is not supported; sample a single step, "
                "as in repeat(PoissonSampled(Gaussian(1.0), 0.01), 1000)"
            )
        super().__post_init__()

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        base, rate = self._flat()
        proper = (rate > 0.0) & (rate < 1.0)
        if relation == "replace_one" and proper.any():
            index = [int(i) for i in np.argwhere(proper)[0]]
            place = f"sampling_probability{index if index else ''}"
            raise InputError(
                f"relation = 'replace_one' is not supported with {place} = "
                f"{float(rate[tuple(index)])!r}; use relation='add_or_remove_one', or probability 1"
            )
        return [(base.part(rate, relation, direction), np.asarray(1.0))]

    def symmetric(self) -> bool:
        base, rate = self._flat()
        return base.symmetric() and bool(np.all((rate == 0.0) | (rate == 1.0)))

    @property
    def kind(self) -> str:
        return self.mechanism.kind

    def _flat(self) -> tuple[BaseMechanism, np.ndarray]:
        """The base under all the sampling, and the product of the rates."""
        rate = np.asarray(self.sampling_probability, np.float64)
        if not isinstance(self.mechanism, PoissonSampled):
            return self.mechanism, rate
        base, inner = self.mechanism._flat()
        product = rate * inner
        if np.any((product == 0.0) & (rate > 0.0) & (inner > 0.0)):
            raise InputError("nested sampling_probability multiply to less than float64 can hold; use larger rates")
        return base, product
