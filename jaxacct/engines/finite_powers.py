"""Finite laws made ready for the lattice: light ends cut off, and some steps composed exactly into one.

Below, an atom between two nodes costs the lattice its mass times a step of the lattice, in every step of the
composition; many atoms per cell cost the square of that. Sums of two or more losses lie far denser than the losses
themselves, or coincide, as in randomised response, and leave fewer steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF

__all__ = ["MOST_PAIRS", "Atoms", "inexact", "powers", "trimmed"]

MOST_PAIRS = 2**17
"""Most pairs of atoms that are added up; sorting them takes some ten milliseconds."""
CUT_SHARE = 1e-6
"""What is cut off, over what may be left out: little, as a few more deviations cost little."""
UNDERFLOW = 1e-307
"""More than a product of masses loses below float64's range."""


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
