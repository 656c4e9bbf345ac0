"""A part of a composition as the lattice engine sees it: approximated for planning, placed for the bracket.

The approximation only steers choices of tilt, window and range; nothing certified depends on it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from jaxacct.engines.lattice_backend import Runner
from jaxacct.kernels import lattice_masses
from jaxacct.kernels.lattice_cells import Cells

__all__ = ["ApproximateLaw", "LatticePart", "Placed", "atoms_on", "last_node", "placed_from"]

SUM_ROUNDING = 1e-8
"""How far below 1 the sum of up to 2^22 masses may come out by rounding alone, 4e-10, with room to spare."""


class ApproximateLaw(NamedTuple):
    """An approximation of one part's law."""

    loss: np.ndarray
    log_mass: np.ndarray  # under P
    repeats: float  # how often it is composed


class Placed(NamedTuple):
    """One part on the lattice, rounded up or down: P-mass k sits at the loss `direction (origin + k h)`."""

    mass: np.ndarray  # (N,)
    origin: float
    direction: float  # +1 or -1
    repeats: float  # how often it is composed
    shift: float  # bound of the error of the losses
    infinity: float  # P-mass moved to +infinity (upper law)
    deficit: float  # bounds P-mass by which losses are overstated (lower law); its P-mass is at most 1 + deficit


class LatticePart(Protocol):
    """What the engine asks of a part."""

    @property
    def count(self) -> float:
        """How often it is composed."""

    @property
    def sign(self) -> float:
        """+1 remove, -1 add."""

    def sketch(self, cut: float) -> ApproximateLaw:
        """Approximate loss law under P without the highest losses, of mass e^cut in the composition."""

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        """Range of the ratio coordinate to put on the lattice.

        What lies beyond has mass at most e^cut (the highest losses) and tilted mass at most e^share (the
        lowest), in the composition.
        """

    def highest(self) -> float:
        """The largest loss, inf where there is none."""

    def gaps(self) -> list[tuple[float, float]]:
        """Distances that should be multiples of the step, with weights."""

    def step(self, step: float, upper: bool) -> float:
        """The step nearest to `step` that puts this law's own atoms on nodes."""

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        """The law on the lattice."""


def last_node(extent: tuple[float, float], origin: float, step: float, nodes: int) -> int:
    """Index of the last node needed to reach the extent's upper end."""
    return int(np.clip(np.ceil((extent[1] - origin) / step - 1e-9), 1, nodes - 2))


def atoms_on(nodes: int, pairs: list[tuple[int, float]], upper: bool) -> np.ndarray:
    """Masses on nodes, rounded outward by `1e-14` relative (inward for a lower law)."""
    atoms = np.zeros(nodes)
    for k, mass in pairs:
        atoms[k] += mass * (1.0 + 1e-14 if upper else 1.0 - 1e-14)
    return atoms


def placed_from(
    law: LatticePart,
    cells: Cells,
    pairs: list[tuple[int, float]],
    origin: float,
    step: float,
    last: int,
    upper: bool,
    shift: float,
    infinity: float,
    run: Runner,
) -> Placed:
    """Masses from cells and from atoms on nodes, for the laws that live on the ratio coordinate.

    For remove the loss ascends with the coordinate.  For add it descends: the masses are made in ascending order of
    the loss, node k as node N - 1 - k, and turned round again.  The laws are probabilities.  Above, what their masses
    do not sum up to is at infinity; below, a sum above 1 is no bound.
    """
    atoms = atoms_on(cells.low.shape[0], pairs, upper)
    turned = law.sign < 0
    first, end = 0, atoms.shape[0] - 1
    if turned:
        cells, atoms = cells.reversed(), atoms[::-1]
        first, last = end - last, end
    if upper:
        mass, missing = np.asarray(run(lattice_masses.upper_masses, cells, atoms)), 0.0
    else:
        mass, missing = lattice_masses.cancelled(
            np.asarray(run(lattice_masses.lower_masses, cells, atoms, step, first, last)), step
        )
    total = float(np.sum(mass))
    if upper:
        lost = 1.0 - total - infinity
        if not lost <= SUM_ROUNDING:
            infinity = infinity + lost * (1.0 + 1e-9) if np.isfinite(lost) else 1.0
    elif not total <= 1.0 + SUM_ROUNDING:
        missing = float("inf")
    return Placed(mass[::-1] if turned else mass, origin, law.sign, law.count, shift, infinity, missing)
