"""Strategies of matrix mechanisms, which correlate the noise of the steps of a run."""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
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

_MATRICES = ("BLT", "Banded", "BandedInverse", "ColumnNormalised", "Identity", "PrefixSum", "Toeplitz")
_HOMES = {name: "matrices" if name in _MATRICES else "strategy" for name in __all__}
if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
