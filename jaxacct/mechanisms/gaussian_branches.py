"""Mechanisms whose loss is that of a mixture of Gaussians, or of one of several such mixtures that is drawn."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.validation import InputError, shown
from jaxacct.mechanisms.base import Mechanism, batch_shape
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.mixture_cells import cells_below, stacked_parts
from jaxacct.mechanisms.parts import Part

__all__ = ["LOSS_OF_PRESENCE", "Branch", "OfGaussianMixtures", "require_gaussian", "rows_of", "whole_number"]

LOSS_OF_PRESENCE = ("add_or_remove_one", "add_one", "remove_one")
"""The relations under which a record, or a group, is there or not."""


class Branch(NamedTuple):
    """With probability `share` the pair is (sum_j weights_j N(shifts_j, 1), N(0, 1)), shifts >= 0 in deviations."""

    share: float
    shifts: np.ndarray
    """(A,)"""
    weights: np.ndarray
    """(A,) each within a unit of its value."""
    doubt: float = 0.0
    """Relative error of the share."""


class OfGaussianMixtures(Mechanism):
    """A mechanism with branches, which the contour engine of mixtures asks for (engines/mixture.py).

    Where that engine does not answer, the lattice has two pairs: `expand` dominates, and `expand_below` is the pair of
    the branches seen through cells of u.
    """

    @abstractmethod
    def branches(self, relation: str) -> list[list[Branch]] | None:
        """The branches of every configuration in the flat order of the batch, for the direction remove.

        The direction add is the same pairs with their laws exchanged.  None where no such pairs answer.
        """

    def ordinary(self) -> bool:
        """Whether it is a Gaussian, sampled or not, that the engines of compositions answer as well."""
        return False

    def of_gaussians(self) -> bool:
        """Whether there are branches at all."""
        return True

    @abstractmethod
    def attained(self, relation: str) -> bool:
        """Whether the branches are the mechanism's own pair, and not only a bound of it."""

    def has_bracket(self) -> bool:
        return self.of_gaussians() and not self.ordinary()

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return "certified" if self._pair_is_known(relation) else self.kind_under(relation, composed)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        if not self._pair_is_known(relation):
            return self.expand(relation, direction)
        laws = [cells_below(row[0].shifts, row[0].weights, direction) for row in self.branches(relation) or []]
        return [(stacked_parts(laws, batch_shape(self)), np.asarray(1.0))]

    def _pair_is_known(self, relation: str) -> bool:
        return self.has_bracket() and relation != "replace_one" and self.attained(relation)


def require_gaussian(name: str, mechanism: Any) -> None:
    """Refuse any base but a Gaussian; for several Gaussians the error names the one that they equal."""
    if isinstance(mechanism, Gaussian):
        return
    one = mechanism.gaussians() is not None
    remedy = (
        "give the one Gaussian of noise (sum z^-2)^(-1/2) that they are"
        if one
        else (
            "its law is not known there, so account for it without the sampling, with noise for the most that all the "
            "records together move it"
        )
    )
    raise InputError(f"{name} of {type(mechanism).__name__} is not supported; {remedy}")


def whole_number(name: str, value: Any, most: int) -> int:
    """One whole number from 1 to `most`; integral floats are accepted, since calibrations search over floats."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if np.ndim(value) or isinstance(value, bool) or not (number == np.floor(number) and 1 <= number <= most):
        raise InputError(f"{name} = {shown(value)} must be one whole number from 1 to {most}; ask for one at a time")
    return int(number)


def rows_of(mechanism: Mechanism, *fields: Any) -> list[tuple[float, ...]]:
    """The values of some fields, one tuple for each configuration in the flat order of the batch."""
    shape = batch_shape(mechanism)
    flat = (np.broadcast_to(np.asarray(field, np.float64), shape).reshape(-1).tolist() for field in fields)
    return list(zip(*flat, strict=True))
