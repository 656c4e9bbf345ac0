"""Finite laws of the loss on the lattice: connect the dots from above, contracted from below.

*Below*, atoms are placed on the coordinate l = -loss with the P-masses as base measure, as for add (see
`kernels.lattice_masses`), since atoms may be many steps apart, where that kernel has nothing to merge.  With v(alpha) =
int (alpha' - alpha)_+ dP, alpha = e^l, the polygon through v at the nodes exceeds v on the cells that hold atoms
by at most E_k = Delta_k a_k b_k/(a_k + b_k).  A polygon c with c >= E_k at both ends of these cells, straight
between them, is subtracted; its corners lie on nodes that have mass, which pays for them.  A node whose mass
turns negative is taken out (its neighbours share the debt, keeping mass and mean), which lowers the polygon.
At either end the masses may be too small to pay: there atoms are moved to the next lower loss instead.

Before that, light ends are cut off, and some steps are composed exactly into one.  The reason: below, an atom
between two nodes costs the lattice its mass times a step of the lattice, in every step of the composition; many
atoms per cell cost the square of that. Sums of two or more losses lie far denser than the losses themselves, or
coincide, as in randomised response, and leave fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.lattice_backend import Runner
from jaxacct.engines.lattice_part import ApproximateLaw, Placed
from jaxacct.kernels.certificate import FINITE_LOSS_ERROR

__all__ = ["MOST_PAIRS", "Finite", "powers", "trimmed"]

MOST_PAIRS = 2**17
"""Most pairs of atoms that are added up; sorting them takes some ten milliseconds."""
CUT_SHARE = 1e-6
"""What is cut off, over what may be left out: little, as a few more deviations cost little."""
UNDERFLOW = 1e-307
"""More than a product of masses loses below float64's range."""
LOSS_UNITS = 128.0
"""Units of rounding that a loss may be off by: 16 of the finite classes, `16 + 4 (1 + 1.45 |log q|)` of others
that are sampled at q, down to 1e-8 (mechanisms/README.md, "Rounding of finite laws")."""
MOST_GAPS = 64
"""How many distances of a finite law steer the choice of the step: those of the heaviest atoms."""


@dataclass(frozen=True)
class Finite:
    """A finite loss law in the direction asked for, composed `count` times."""

    loss: np.ndarray
    mass: np.ndarray
    count: float
    sign: float
    away: float = 0.0
    """P-mass of losses left out: at infinity above, not there below."""
    blur: float = 0.0
    """How far each loss may be off."""
    wrong: np.ndarray | None = None
    """How far each mass may be off, as one that came from exp(x) unless told."""

    def pieces(self, cut: float, most_pairs: int = MOST_PAIRS) -> list[Finite]:
        """The same composition with fewer steps, but for losses of mass e^cut."""
        laws = powers(trimmed(self.loss, self.mass, self.count, cut), self.count, most_pairs)
        return [Finite(x.loss, x.mass, count, self.sign, x.away, x.blur, x.wrong) for x, count in laws]

    def sketch(self, cut: float) -> ApproximateLaw:
        return ApproximateLaw(self.loss, np.log(self.mass), self.count)

    def extent(self, theta: float, cut: float, share: float) -> tuple[float, float]:
        return float(self.loss.min()), float(self.loss.max())

    def highest(self) -> float:
        return float(self.loss.max())

    def gaps(self) -> list[tuple[float, float]]:
        far = self.loss - self.loss.min()
        heaviest = np.argsort(self.mass * far)[-MOST_GAPS:]
        return [(float(far[i]), self.count * float(self.mass[i])) for i in heaviest if far[i] > 0]

    def step(self, step: float, upper: bool) -> float:
        return step

    def place(self, extent: tuple[float, float], step: float, nodes: int, upper: bool, run: Runner) -> Placed:
        sign = 1.0 if upper else -1.0
        place = sign * self.loss
        origin = float(place.min())
        far = (place - origin) / step
        shift = (
            ROUNDOFF * (LOSS_UNITS * np.abs(self.loss).max() + 8.0 * (abs(origin) + step))
            + FINITE_LOSS_ERROR
            + self.blur
        )
        nearest = np.rint(far)
        exact = np.abs(far - nearest) * step <= shift
        cell = np.where(exact, nearest, np.floor(far)).astype(np.int64)
        inside = np.where(exact, 0.0, far - cell) * step
        wrong = inexact(self.mass) if self.wrong is None else self.wrong
        given = np.maximum(self.mass + sign * wrong, 0.0)
        mass = np.zeros(nodes)
        if upper:
            # of a loss inside a cell: e^-loss is kept on average
            right = np.expm1(-inside) / np.expm1(-step)
            left = np.exp(-inside) * np.expm1(inside - step) / np.expm1(-step)
            np.add.at(mass, cell, given * left)
            np.add.at(mass, cell + 1, given * right)
        else:
            for index, amount in _contracted(cell, inside, given, step):
                np.add.at(mass, index, amount)
        mass *= 1.0 + sign * ROUNDOFF * self.loss.size
        away = self.away if upper else 0.0
        return Placed(mass, origin, sign, self.count, 2.0 * float(shift), away, 0.0)


def _contracted(
    cell: np.ndarray, inside: np.ndarray, mass: np.ndarray, step: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(nodes, masses) of laws on the nodes whose sum is dominated by the atoms at l = cell * step + inside."""
    order = np.lexsort((inside, cell))
    cell, inside, mass = cell[order], inside[order], mass[order]
    start, stop = _payers(cell, mass, step)
    moved = cell + (inside > 0.0)  # to the next lower loss
    first, last = moved[start], moved[stop]
    kept = (first < moved) & (moved < last)
    if not inside[kept].any():
        return [(moved, mass)]
    b = mass[kept] * np.expm1(inside[kept]) / np.expm1(step)
    a = mass[kept] * np.expm1(inside[kept] - step) / np.expm1(-step)
    index = np.unique(np.concatenate([[first, last], cell[kept], cell[kept][inside[kept] > 0.0] + 1]))
    here, after = np.searchsorted(index, cell[kept]), np.searchsorted(index, cell[kept] + 1)
    partial = inside[kept] > 0.0
    have_a, have_b, exact = np.zeros(index.size), np.zeros(index.size), np.zeros(index.size)
    np.add.at(have_a, here[partial], a[partial])
    np.add.at(have_b, here[partial], b[partial])
    np.add.at(exact, here[~partial], mass[kept][~partial])
    exact[0], exact[-1] = mass[moved == first].sum(), mass[moved == last].sum()
    total = exact + have_a
    np.add.at(total, after[partial], b[partial])
    jumps = _jumps(index, total, have_a, have_b, step)
    found = _without_debts(index, jumps, step)
    if found is None:
        return [(moved, mass)]
    rest = (moved < first) | (moved > last)
    return [(moved[rest], mass[rest]), found]


def _payers(cell: np.ndarray, mass: np.ndarray, step: float) -> tuple[int, int]:
    """The first and the last atom with the mass to pay for a corner of c next to it."""
    gap = np.maximum(np.diff(cell), 1) * step
    from_right = step * np.append(mass[1:] / -np.expm1(-gap), 0.0)
    with np.errstate(over="ignore"):
        from_left = step * np.append(0.0, mass[:-1] / np.expm1(gap))
    return int(np.argmax(mass >= from_right)), mass.size - 1 - int(np.argmax((mass >= from_left)[::-1]))


def _jumps(index: np.ndarray, total: np.ndarray, a: np.ndarray, b: np.ndarray, step: float) -> np.ndarray:
    """Masses at the nodes less the corners of c; a_j and b_j are the hat masses of the cell that begins at node j."""
    growth = np.expm1(step)
    # g_j = c/alpha at the node: c >= E at both ends of a cell, but 0 at either end of the law, where the slope must do
    excess = growth * a * (b / np.where(b > 0.0, a + b, 1.0))
    g = excess.copy()
    g[1:] = np.maximum(g[1:], excess[:-1] * np.exp(-step))
    g[1] = max(g[1], a[0] * growth * np.exp(-step))
    g[-2] = max(g[-2], b[-2] * growth)
    g[0] = g[-1] = 0.0
    g *= 1.0 + 32.0 * ROUNDOFF
    distance = np.diff(index) * step
    fall, rise = g[:-1] * np.exp(-distance) / -np.expm1(-distance), g[1:] / -np.expm1(-distance)
    slope = rise - fall
    size = rise + fall
    corner = np.append(slope, 0.0) - np.append(0.0, slope)
    return total - corner - 32.0 * ROUNDOFF * (total + np.append(size, 0.0) + np.append(0.0, size))


def _without_debts(index: np.ndarray, jumps: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray] | None:
    """The nodes that are left once those with negative mass have been taken out.

    The debt of the node of lowest loss is paid by the one before it, which has a higher loss and so lowers every
    payoff more; that of the node of highest loss cannot be paid (None).
    """
    nodes: list[int] = []
    masses: list[float] = []
    coming, owed = index.tolist(), jumps.tolist()
    indebted = [*np.flatnonzero(jumps < 0.0).tolist(), len(coming)]
    place = debtor = 0  # in `coming`, and in `indebted` of the first debt that is not behind it
    again: list[tuple[int, float]] = []  # a node that is looked at once more
    while again or place < len(coming):
        while indebted[debtor] < place:
            debtor += 1
        if not again and owed[place] >= 0.0:  # all nodes up to the next debt
            end = max(indebted[debtor], place + 1)
            nodes += coming[place:end]
            masses += owed[place:end]
            place = end
            continue
        if again:
            node, mass = again.pop()
        else:
            node, mass = coming[place], owed[place]
            place += 1
        if mass >= 0.0:
            nodes.append(node)
            masses.append(mass)
            continue
        if not nodes:
            return None
        debt, to_left = mass * (1.0 + 16.0 * ROUNDOFF), 1.0
        if place < len(coming):
            following, owned = coming[place], owed[place]
            before, behind = (node - nodes[-1]) * step, (following - node) * step
            whole = -np.expm1(-before - behind)
            to_left, to_right = -np.expm1(-behind) / whole, np.exp(-behind) * -np.expm1(-before) / whole
            owed[place] = owned + debt * to_right - 4.0 * ROUNDOFF * abs(owned)
        # the node before is looked at again: it may now be in debt itself
        again.append((nodes.pop(), masses.pop() * (1.0 - 4.0 * ROUNDOFF) + debt * to_left))
    return np.array(nodes), np.array(masses)


class Atoms(NamedTuple):
    """A finite law of the loss."""

    loss: np.ndarray  # (A,) ascending
    mass: np.ndarray  # (A,) P-masses
    wrong: np.ndarray  # (A,) how far each mass may be off
    away: float  # P-mass of what was left out
    blur: float  # how far each loss may be off


def inexact(mass: np.ndarray) -> np.ndarray:
    """How far a mass that came from exp(x) may be off: a few units times |x|."""
    return mass * ROUNDOFF * (32.0 + 8.0 * np.abs(np.log(mass)))


def trimmed(loss: np.ndarray, mass: np.ndarray, count: float, cut: float) -> Atoms:
    """The law in ascending order, without what has mass e^cut times CUT_SHARE at either end in ``count`` steps."""
    order = np.argsort(loss)
    loss, mass = loss[order], mass[order]
    light = np.exp(cut) * CUT_SHARE / count
    keep = (np.cumsum(mass) > light) & (np.cumsum(mass[::-1])[::-1] > light)
    keep[np.argmax(mass)] = True  # where nearly all mass is at infinity, all atoms together may be light
    away = float(mass[~keep].sum()) * (1.0 + 1e-12)
    loss, mass = loss[keep], mass[keep]
    return Atoms(loss, mass, inexact(mass), away, 0.0)


def powers(atoms: Atoms, count: float, most_pairs: int = MOST_PAIRS) -> list[tuple[Atoms, float]]:
    """Laws with counts that together are the law composed ``count`` times.

    most_pairs : of atoms that are added up.
    """
    doubled = [atoms]
    while 2.0 ** len(doubled) <= count and doubled[-1].loss.size ** 2 <= most_pairs:
        doubled.append(_sum(doubled[-1], doubled[-1]))
    whole = 2.0 ** (len(doubled) - 1)
    repeats, rest = divmod(count, whole)
    digits = [law for k, law in enumerate(doubled[:-1]) if int(rest) >> k & 1]
    laws = [(doubled[-1], repeats)] if repeats > 1.0 else []
    singles = digits if laws else [*digits, doubled[-1]]
    while len(singles) > 1 and singles[0].loss.size * singles[1].loss.size <= most_pairs:
        singles[:2] = [_sum(singles[0], singles[1])]
    return laws + [(law, 1.0) for law in singles]


def _sum(first: Atoms, second: Atoms) -> Atoms:
    """The law of the sum of two independent losses; sums that differ by no more than rounding are taken for one."""
    loss = np.add.outer(first.loss, second.loss).ravel()
    mass = np.multiply.outer(first.mass, second.mass).ravel()
    most = np.multiply.outer(first.mass + first.wrong, second.mass + second.wrong).ravel()
    order = np.argsort(loss, kind="stable")
    loss, mass, wrong = loss[order], mass[order], (most - mass)[order]
    size = float(max(abs(loss[0]), abs(loss[-1])))
    new = np.append(True, np.diff(loss) > 16.0 * ROUNDOFF * size)
    group, start = np.cumsum(new) - 1, loss[new]
    blur = first.blur + second.blur + ROUNDOFF * size + float(np.max(loss - start[group]))
    total, many = np.bincount(group, mass), np.bincount(group)
    wrong = np.bincount(group, wrong) + ROUNDOFF * (many + 8.0) * total + UNDERFLOW * many
    keep = total > 0.0
    return Atoms(start[keep], total[keep], wrong[keep], first.away + second.away + float(wrong[~keep].sum()), blur)
