"""Any mechanism given by points of its privacy profile, through the pair that dominates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import NON_NEGATIVE, PROBABILITY, InputError, Tracer, check
from jaxacct.mechanisms.base import batch_shape, register
from jaxacct.mechanisms.finite import FiniteMechanism
from jaxacct.mechanisms.parts import FinitePair

__all__ = ["PrivacyProfile", "pair_of_profile", "profile_from_cdfs", "stacked"]

CDF_ERROR = 2e-15
"""Absolute error allowed for a distribution function, and for 1 less its value: 1e-15 that it may be off, and two
roundings."""
LEAST_GAP = 1e-9
"""Least distance of two epsilons of a profile: slopes lose digits as it shrinks."""
HULL_PASSES = 30
"""Passes over all points of a profile before what is left is gone through point by point."""
MASS_ROUNDING_UNITS = 8.0
"""Unit roundoffs by which each of the two terms of a mass is rounded up; each is a difference, an exponential and a
quotient."""


@register
@dataclass(frozen=True, eq=False)
class PrivacyProfile(FiniteMechanism):
    """Any mechanism known to be (``epsilon``_k, ``delta``_k)-DP for every k, through the pair that dominates it.

    The guarantee is delta(eps_k) <= delta_k for H_{e^eps}(P || Q) (remove) and H_{e^eps}(Q || P) <=
    ``reverse_delta``_k (add). The pair has the largest profile that these points allow: the lower convex hull of the
    points in (e^eps, delta), joined to the other direction by H_a(P || Q) = 1 - a + a H_{1/a}(Q || P), constant after
    the last point, so that the last delta is mass at infinity. It composes, and is sampled, like any other pair. The
    points are taken as they stand for the neighbouring relation in use; one point is ApproximateDP.

    Parameters
    ----------
    epsilon : array_like >= 0
        Ascending along the last axis by 1e-9 or more; the axes before it are the batch.
    delta : array_like in [0, 1]
        As many on the last axis.
    reverse_delta : array_like in [0, 1], optional
        As many on the last axis; the same as ``delta`` unless given.

    Raises
    ------
    InputError
        A value outside its limits, with its index; points that do not ascend, or vectors of different lengths.

    References
    ----------
    Doroshenko et al. (2022), Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions.
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Proposition 8.

    >>> import jaxacct as ja
    >>> known = ja.PrivacyProfile(epsilon=[0.0, 0.5, 1.0], delta=[0.3, 0.1, 1e-6])
    >>> [round(float(d), 6) for d in ja.delta(known, [0.0, 0.5, 1.0]).upper]
    [0.3, 0.1, 1e-06]
    """

    epsilon: Any
    delta: Any
    reverse_delta: Any = None
    constraints: ClassVar = {"epsilon": NON_NEGATIVE, "delta": PROBABILITY, "reverse_delta": PROBABILITY}
    vectors: ClassVar = ("epsilon", "delta", "reverse_delta")

    def __post_init__(self) -> None:
        if self.reverse_delta is None:
            object.__setattr__(self, "reverse_delta", self.delta)
        super().__post_init__()
        sizes = {name: np.shape(getattr(self, name))[-1:] for name in self.vectors}
        if len(set(sizes.values())) > 1 or sizes["epsilon"] in ((), (0,)):
            words = ", ".join(f"{name} {size[0] if size else 'none'}" for name, size in sizes.items())
            raise InputError(f"points on the last axis: {words}; give every field the same number, 1 or more")
        if not isinstance(self.epsilon, Tracer):
            _refuse_disorder(np.asarray(self.epsilon))

    def pair(self) -> FinitePair:
        shape = (*batch_shape(self), np.shape(self.epsilon)[-1])
        fields = (np.broadcast_to(getattr(self, name), shape).reshape(-1, shape[-1]) for name in self.vectors)
        return stacked([pair_of_profile(*row) for row in zip(*fields, strict=True)], shape[:-1])

    def symmetric(self) -> bool:
        return bool(np.all(np.equal(self.delta, self.reverse_delta)))


def profile_from_cdfs(p_cdf: Callable[[Any], Any], q_cdf: Callable[[Any], Any], grid: Any) -> PrivacyProfile:
    """The PrivacyProfile of a privacy loss given by its distribution functions under P and under Q.

    At the epsilons of the grid delta = Pr_P[L > eps] - e^eps Pr_Q[L > eps] for remove, and Pr_Q[L <= -eps] -
    e^eps Pr_P[L <= -eps] for add; between them the profile is the chord, after them constant, so that the
    answers are upper bounds whatever the grid: a fine one gives narrow ones.

    Parameters
    ----------
    p_cdf, q_cdf : callable
        Take an array x and return Pr[L <= x] under P and under Q. They are trusted to 1e-15 absolutely, which is added,
        so that deltas of interest should be above 1e-14 e^eps.
    grid : array_like >= 0
        Epsilons, ascending, shape (K,).

    Returns
    -------
    PrivacyProfile

    Raises
    ------
    InputError
        As PrivacyProfile, and for values of the functions outside [0, 1].

    References
    ----------
    Doroshenko et al. (2022), Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions.

    >>> import jaxacct as ja
    >>> import numpy as np
    >>> from scipy.stats import norm  # a Gaussian of noise multiplier 1
    >>> known = ja.profile_from_cdfs(norm(0.5, 1).cdf, norm(-0.5, 1).cdf, np.linspace(0, 6, 601))
    >>> round(float(ja.epsilon(known, 1e-5).upper), 3), round(float(ja.epsilon(ja.Gaussian(1.0), 1e-5).upper), 3)
    (4.377, 4.377)
    """
    grid = np.asarray(check("grid", grid, NON_NEGATIVE))
    named = (("p_cdf", p_cdf), ("q_cdf", q_cdf))
    p_above, q_above = (1.0 - np.asarray(check(name, cdf(grid), PROBABILITY)) for name, cdf in named)
    p_below, q_below = (np.asarray(check(name, cdf(-grid), PROBABILITY)) for name, cdf in named)
    grown = np.exp(grid)
    slack = CDF_ERROR * (1.0 + grown)
    forward, reverse = p_above - grown * q_above, q_below - grown * p_below
    return PrivacyProfile(grid, *(np.clip(delta + slack, 0.0, 1.0) for delta in (forward, reverse)))


@np.errstate(over="ignore")
def pair_of_profile(epsilon: np.ndarray, delta: np.ndarray, reverse: np.ndarray) -> FinitePair:
    """The dominating pair of the points of one configuration; epsilon ascending, all three of shape (K,).

    With f_k the vertices of the lower hull, an atom of loss eps_k > 0 has the P-mass

        p_k = (f_{k-1} - f_k)/(1 - e^{-(eps_k - eps_{k-1})}) - (f_k - f_{k+1})/(e^{eps_{k+1} - eps_k} - 1),

    which is e^{eps_k} times the change of slope there; atoms of loss -eps_k likewise from the reverse points,
    with the two laws exchanged. A negative p_k is a point above the hull. Masses are rounded up.
    """
    # the profile falls, also from one direction to the other: H_a(P || Q) at a = e^-eps is 1 - a + a reverse
    fall = np.minimum.accumulate
    across_f, across_r = (np.min(-np.expm1(-epsilon) + x * np.exp(-epsilon)) for x in (reverse, delta))
    f, r = fall(np.minimum(delta, across_f)), fall(np.minimum(reverse, across_r))
    away = np.flatnonzero(epsilon > 0.0)
    right, left = _hull(epsilon, f, away), _hull(epsilon, r, away)
    centre, rest, doubt = 1.0, 0.0, 0.0
    if epsilon[0] == 0.0:
        centre = float(min(f[0], r[0]))
        for values, chain in ((f, right), (r, left)):
            while _first_is_above(epsilon, values, chain, centre):
                chain.pop(0)
        rest = (
            1.0
            + 2.0 * MASS_ROUNDING_UNITS * ROUNDOFF
            - centre
            - _fall(epsilon, f, right, centre)
            - _fall(epsilon, r, left, centre)
        )
    if away.size and (epsilon[0] > 0.0 or rest < 0.0):
        centre, right, left = _bridge(epsilon, f, r, right, left)
        rest, doubt = 0.0, MASS_ROUNDING_UNITS * ROUNDOFF * centre
    size = epsilon.size
    p, q = np.zeros(2 * size + 1), np.zeros(2 * size + 1)
    p[size] = q[size] = max(rest, 0.0)
    for values, chain, here, there, side in ((f, right, p, q, 1), (r, left, q, p, -1)):
        at = np.array(chain, int)
        mass = _masses(epsilon[at], values[at], centre, doubt)
        here[size + side * (at + 1)] = mass
        there[size + side * (at + 1)] = mass * np.exp(-epsilon[at])
    loss = np.concatenate([-epsilon[::-1], [0.0], epsilon])
    last_f, last_r = (v[c[-1]] if c else centre for v, c in ((f, right), (r, left)))
    return FinitePair(loss, p, q, np.asarray(last_f), np.asarray(last_r))


def stacked(pairs: list[FinitePair], shape: tuple[int, ...]) -> FinitePair:
    """The pairs of all configurations of a batch as one, padded with atoms without mass."""
    most = max((pair.loss.size for pair in pairs), default=1)
    atoms = np.zeros((3, len(pairs), most))
    for row, pair in enumerate(pairs):
        for column, values in zip(atoms, pair[:3], strict=True):
            column[row, : values.size] = values
    loss, p, q = atoms.reshape(3, *shape, most)
    ends = np.array([[pair.p_infinity, pair.q_infinity] for pair in pairs], np.float64).reshape(-1, 2)
    return FinitePair(loss, p, q, ends[:, 0].reshape(shape), ends[:, 1].reshape(shape))


def _terms(epsilon: np.ndarray, f: np.ndarray, before: int, k: int, after: int, first: float) -> tuple[float, float]:
    """The two terms of p_k; `before` -1 is the centre, at eps 0 with value `first`; `after` -1 is none."""
    start, value = (0.0, first) if before < 0 else (epsilon[before], f[before])
    rise = (value - f[k]) / -np.expm1(start - epsilon[k])
    fall = 0.0 if after < 0 else (f[k] - f[after]) / np.expm1(epsilon[after] - epsilon[k])
    return rise, fall


def _masses(epsilon: np.ndarray, f: np.ndarray, centre: float, doubt: float) -> np.ndarray:
    """p_k of the vertices of a hull, rounded up; the value at the centre is known up to `doubt`."""
    if not epsilon.size:
        return epsilon
    rise = -np.diff(f, prepend=centre) / -np.expm1(-np.diff(epsilon, prepend=0.0))
    fall = np.append(-np.diff(f) / np.expm1(np.diff(epsilon)), 0.0)
    rounding = MASS_ROUNDING_UNITS * ROUNDOFF * (rise + fall)
    rounding[0] += doubt / -np.expm1(-epsilon[0])
    return np.maximum(rise - fall, 0.0) + rounding


def _hull(epsilon: np.ndarray, f: np.ndarray, points: np.ndarray) -> list[int]:
    """The points on the lower convex hull, from the first of them on.

    A point that is not below the chord of its neighbours is no vertex.  Of such points that are neighbours every other
    one is left out at a time, since rounding may hide a bend that several of them have together.
    """
    fallen = np.diff(f[points], prepend=np.inf) < 0.0
    fallen[-1:] = True
    points = points[fallen]
    for _ in range(HULL_PASSES):
        at, values = epsilon[points], f[points]
        slope, gap = -np.diff(values), np.diff(at)
        above = slope[:-1] / -np.expm1(-gap[:-1]) - slope[1:] / np.expm1(gap[1:]) <= 0.0
        if not above.any():
            return [int(k) for k in points]
        place = np.arange(above.size)
        odd = (place - np.maximum.accumulate(np.where(above, -1, place))) % 2 == 1
        points = np.delete(points, 1 + np.flatnonzero(above & odd))
    chain: list[int] = []
    for k in map(int, points):
        while len(chain) > 1 and np.subtract(*_terms(epsilon, f, chain[-2], chain[-1], k, 0.0)) <= 0.0:
            chain.pop()
        chain.append(k)
    return chain


def _first_is_above(epsilon: np.ndarray, f: np.ndarray, chain: list[int], centre: float) -> bool:
    """Whether the first point of a chain lies above the line from the centre to the second."""
    return len(chain) > 1 and bool(np.subtract(*_terms(epsilon, f, -1, chain[0], chain[1], centre)) < 0.0)


def _fall(epsilon: np.ndarray, f: np.ndarray, chain: list[int], centre: float) -> float:
    """Minus the slope in e^eps on the way from the centre to the first point of a chain."""
    with np.errstate(over="ignore"):
        return float((centre - f[chain[0]]) / np.expm1(epsilon[chain[0]])) if chain else 0.0


def _bridge(
    epsilon: np.ndarray, f: np.ndarray, r: np.ndarray, right: list[int], left: list[int]
) -> tuple[float, list[int], list[int]]:
    """Join the two chains by their common tangent: its value at eps 0, and what of the chains is on the hull."""
    right, left = list(right), list(left)
    while True:
        a, b = epsilon[left[0]], epsilon[right[0]]
        to_a, to_b = -np.expm1(-a), -np.expm1(-b)
        centre = to_b * (to_a + r[left[0]] * np.exp(-a)) + to_a * f[right[0]] * np.exp(-b)
        centre = float(centre / -np.expm1(-a - b))
        for values, chain in ((f, right), (r, left)):
            if _first_is_above(epsilon, values, chain, centre):
                chain.pop(0)
                break
        else:
            return centre, right, left


def _refuse_disorder(epsilon: np.ndarray) -> None:
    gap = np.diff(epsilon, axis=-1, prepend=0.0)
    bad = gap < LEAST_GAP
    bad[..., 0] &= gap[..., 0] != 0.0
    if bad.any():
        index = [int(i) for i in np.argwhere(bad)[0]]
        limit = f"{LEAST_GAP:g} or more above the one before" if index[-1] else f"0, or {LEAST_GAP:g} or more"
        raise InputError(
            f"epsilon{index} = {float(epsilon[tuple(index)])!r} must be {limit}; sort the points, or leave it out"
        )
