"""Strategies of matrix mechanisms, which correlate the noise of the steps of a run."""

from jaxacct.strategies.column_normalised import ColumnNormalised
from jaxacct.strategies.participation import (
    CyclicPoisson,
    FixedEpochs,
    MinSeparation,
    SingleParticipation,
)
from jaxacct.strategies.strategy import Strategy
from jaxacct.strategies.toeplitz import BLT, Banded, BandedInverse, Identity, Toeplitz
from jaxacct.strategies.tree import PrefixSum

__all__ = [
    "BLT",
    "Banded",
    "BandedInverse",
    "ColumnNormalised",
    "CyclicPoisson",
    "FixedEpochs",
    "Identity",
    "MinSeparation",
    "PrefixSum",
    "SingleParticipation",
    "Strategy",
    "Toeplitz",
]
