"""Strategies of matrix mechanisms, which correlate the noise of the steps of a run."""

from jaxacct.strategies.matrices import BLT, Banded, BandedInverse, ColumnNormalised, Identity, PrefixSum, Toeplitz
from jaxacct.strategies.strategy import (
    BallsInBins,
    CyclicPoisson,
    FixedEpochs,
    MinSeparation,
    SingleParticipation,
    Strategy,
)

__all__ = [
    "BLT",
    "BallsInBins",
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
