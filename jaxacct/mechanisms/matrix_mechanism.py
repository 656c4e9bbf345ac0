"""Matrix mechanisms: Gaussian noise is correlated over steps. For balls in bins neighbouring bins may share noise."""

from __future__ import annotations

import functools
import math
from dataclasses import field
from typing import ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.progress import waiting
from jaxacct.core.types import Leaf
from jaxacct.core.validation import NOISE, POSITIVE, InputError, shown
from jaxacct.kernels.contour.allocation import falling, losses_for
from jaxacct.kernels.contour.banded_bins import Bins, Profile
from jaxacct.mechanisms.additive_noise import Gaussian, profile_of_gaussian
from jaxacct.mechanisms.base import EqualToAnother, Mechanism, Part, batch_shape, register
from jaxacct.mechanisms.combinators import compose, repeat
from jaxacct.mechanisms.finite import sample_pair
from jaxacct.mechanisms.profile import BracketedProfile, direction_of, pair_above, pair_below, stacked, stacked_parts
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.mechanisms.sampled_batches import PoissonSampled
from jaxacct.strategies.strategy import BallsInBins, CyclicPoisson, FixedEpochs, Participation, Strategy, require_groups

SAME = 1e-12
"""The norms of two columns count as equal up to this relative difference."""
SMALLEST = 1e-200
"""The variance of a bin's normal variable must be from SMALLEST to 1/SMALLEST."""
KEPT = 64
"""Number of runs whose contours are cached, and number of runs whose profiles are cached."""


@register
class MatrixMechanism(EqualToAnother):
    """The release of C X + Z: row i of X is the sum of step i's clipped gradients, Z has N(0, s^2 R^2) entries.

    C is the ``strategy`` of n steps, s is ``noise_multiplier``, and R is the clip norm. A run that adds noise C^-1 Z
    leaks no more, since its models are functions of C X + Z. Gradients may depend on all earlier outputs.

    Adding or removing a record must not move other records to other steps. Where it does, as in batches cut from a
    shuffled list, ask for ``relation="zero_out"`` or ``"replace_one"``.

    The answer is exact in these cases. The last two are for add, remove and zero-out.

    * Without sampling the release is one Gaussian of noise multiplier s / sens(C).
    * With ``CyclicPoisson(b, q)`` and b at least the number of bands it is Poisson sampled Gaussians of noise
      multiplier s / |column i of C|, i = j, j + b, ..., for the worst group j (0 if C is Toeplitz).
    * With ``BallsInBins(b)`` and at most two bands it is a mixture of b Gaussians.

    Parameters
    ----------
    strategy : Strategy
        One strategy for the whole batch, such as ``strategies.Banded(bands=8, steps=512)``.
    noise_multiplier : array_like > 0
        s: the standard deviation of an entry of Z, divided by R.
    participation : Participation, optional
        ``FixedEpochs`` with the strategy's epochs by default. `dataclasses.replace` keeps that of the copied mechanism.

    References
    ----------
    Denisov et al. (2022), arXiv:2202.08312. Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization,
    arXiv:2306.08153. Proofs: jaxacct/strategies/README.md.

    >>> import jaxacct as ja
    >>> from jaxacct import strategies
    >>> sampled = strategies.CyclicPoisson(groups=8, sampling_probability=0.08)
    >>> run = ja.MatrixMechanism(strategies.Banded(bands=8, steps=512), 1.0, sampled)
    >>> bool(ja.epsilon(run, 1e-5).upper <= ja.epsilon(ja.dp_sgd(1.0, 0.08, 64), 1e-5).upper * 1.000001)
    True
    """

    strategy: Strategy = field(metadata={"static": True})
    noise_multiplier: Leaf
    participation: Participation | None = field(default=None, metadata={"static": True})
    constraints: ClassVar = {"noise_multiplier": NOISE}

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise InputError(
                f"strategy = {shown(self.strategy)} is no strategy; use strategies.Banded(bands=8, steps=512), say"
            )
        if not self.strategy.steps:
            raise InputError(f"strategy = {shown(self.strategy)} has no steps; give the number of steps of the run")
        if self.participation is None:
            object.__setattr__(self, "participation", FixedEpochs(self.strategy.epochs))
        if not isinstance(self.participation, Participation):
            raise InputError(
                f"participation = {shown(self.participation)} is not known; use strategies.FixedEpochs(1), "
                "MinSeparation, SingleParticipation, CyclicPoisson or BallsInBins"
            )
        super().__post_init__()
        match self.participation:
            case BallsInBins(bins=bins):
                bands_of(self.strategy, bins)
            case CyclicPoisson(groups=groups):
                require_groups(self.strategy, groups)
            case _:
                self.strategy.sensitivity(self.participation)

    def inside(self) -> list[Mechanism]:
        return [self.equivalent()]

    def equivalent(self, below: bool = False) -> Mechanism:
        """Return an equal mechanism without a matrix. Its noise is rounded up for lower bounds (`below`), else down.

        >>> from jaxacct import strategies
        >>> run = MatrixMechanism(strategies.Toeplitz((3.0, 4.0), steps=8), 10.0)
        >>> round(float(run.equivalent().noise_multiplier), 9)
        2.0
        """
        if isinstance(self.participation, BallsInBins):
            return in_bins(self.strategy, self.noise_multiplier, self.participation.bins, below)
        noise = np.asarray(self.noise_multiplier, np.float64) * (1.0 + (4.0 if below else -4.0) * ROUNDOFF)
        if isinstance(self.participation, CyclicPoisson):
            groups, rate = self.participation.groups, self.participation.sampling_probability
            block = lambda norm: PoissonSampled(Gaussian(noise / norm), rate, in_turns=groups > 1)
            # a norm of 0 would make the noise infinite, which leaks nothing, so such columns are left out
            blocks = [repeat(block(norm), n) for norm, n in _norms(self.strategy, groups, below) if norm > 0.0]
            return blocks[0] if len(blocks) == 1 else compose(*blocks)
        moves = self.strategy.sensitivity(self.participation)
        return Gaussian(noise / float(moves.lower if below else moves.upper))


def _norms(strategy: Strategy, groups: int, below: bool) -> list[tuple[float, int]]:
    """Return bounds of the norms of the columns that one group of records uses, as (bound, count), largest first.

    If `below`, they are lower bounds, for the group with the largest sum of squares. Otherwise the k-th is an upper
    bound of the k-th largest norm in every group.
    """
    squares, blocks, side = strategy.squared_norms()[0 if below else 1], -(-strategy.steps // groups), 1.0 - 2.0 * below
    by_group = np.pad(squares, (0, blocks * groups - squares.size)).reshape(blocks, groups).T
    falling_squares = np.sort(by_group, 1)[:, ::-1]
    square = falling_squares[np.argmax(falling_squares.sum(1))] if below else falling_squares.max(0)
    spread = strategy.entry_error * strategy.steps**0.5  # bounds the norm of a column's error
    norms = np.sqrt(np.maximum(square, 0.0)) * (1.0 + side * 2.0 * ROUNDOFF) + side * spread
    runs: list[tuple[float, int]] = []  # nearly equal bounds become the least of them if `below`, else the largest
    for norm in np.maximum(norms, 0.0).tolist():
        if runs and norm >= runs[-1][0] * (1.0 - SAME):
            runs[-1] = norm if below else runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((norm, 1))
    return runs


def bands_of(strategy: Strategy, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return |C[i, i]| and |C[i, i - 1]| (0 for i = 0) of every step i. Refuse `bins` for which no bound is known."""
    if strategy.overlap > 2:
        raise InputError(
            f"{type(strategy).__name__} has {strategy.overlap} bands, and balls in bins need at most 2: no bound is "
            "known for more; use strategies.Banded(2, ...), or CyclicPoisson, which allows as many bands as groups"
        )
    rows = getattr(strategy, "entries", None)
    if rows is None or strategy.entry_error:
        raise InputError(
            f"{type(strategy).__name__} has no bound with balls in bins; use strategies.Banded(2, ...) or Toeplitz"
        )
    if not strategy.overlap <= bins <= strategy.steps:
        raise InputError(
            f"bins = {bins} must be between {strategy.overlap}, the number of bands, and steps = {strategy.steps}: "
            "no bound is known for other runs; use more steps, or a participation without sampling"
        )
    rows = np.abs(np.pad(rows, ((0, 2 - len(rows)), (0, 0))))
    return rows[0], np.append(0.0, rows[1, :-1])


def normals_of(strategy: Strategy, bins: int, noise: float) -> Bins:
    """Return `Bins`: one normal variable for each bin. The run's likelihood ratio is a function of these variables."""
    diagonal, beside = bands_of(strategy, bins)
    rows = -(-strategy.steps // bins)
    by_bin = lambda values: np.pad(values / noise, (0, rows * bins - values.size)).reshape(rows, bins).T
    one, two = by_bin(diagonal), by_bin(beside)
    total = lambda values: np.array([math.fsum(row) for row in values.tolist()])
    with np.errstate(over="ignore", under="ignore"):
        variance = total(one * one) + np.roll(total(two * two), -1)
    if not SMALLEST <= variance.min() <= variance.max() <= 1.0 / SMALLEST:
        raise InputError(
            f"noise_multiplier = {noise} is too far from the columns of {type(strategy).__name__}: squares of their "
            "quotients are lost to rounding; use a noise multiplier between 1e-90 and 1e90"
        )
    return Bins(variance, np.roll(total(one * two), -1))


@functools.lru_cache(maxsize=KEPT)
def contours_of(strategy: Strategy, bins: int, noise: float) -> Profile:
    """Return the profile of a run, cached since the contours that one call places serve later calls too."""
    return Profile(normals_of(strategy, bins, noise))


def epsilon_of_bins(strategy: Strategy, bins: int, noise: float, signs: list[float], delta: float) -> np.ndarray:
    """Return (lower, estimate, upper) of eps at `delta`: the largest over the directions `signs` (1 remove, -1 add)."""
    profile, found = contours_of(strategy, bins, noise), np.zeros(3)
    mu = _largest(profile)
    eps = np.linspace(0.0, mu * (0.5 * mu + 40.0), 4001)
    # A Gaussian mechanism that also reveals the bin has at least the run's delta. So eps is at most the first grid
    # point where the Gaussian's delta is <= `delta`. At the last grid point the Gaussian's delta counts as 0.
    most = float(eps[np.argmax(np.append(profile_of_gaussian(mu, eps[:-1]), 0.0) <= delta)])
    for sign in signs:
        if not found[0] or profile.known(sign, found[:1])[2, 0] > delta:  # else eps in this direction is <= found[0]
            found = np.maximum(found, profile.epsilon(sign, delta, most))
    return found


def delta_of_bins(
    strategy: Strategy, bins: int, noise: float, signs: list[float], epsilon: np.ndarray, width: float, least: float
) -> np.ndarray:
    """Return (lower, estimate, upper) of delta at K eps, (3, K): the largest over the directions `signs`."""
    # brackets aim at the relative width `width`; where delta is below `least`, they may be wider
    profile = contours_of(strategy, bins, noise)
    at, back = np.unique(epsilon, return_inverse=True)
    found, largest = np.zeros((3, at.size)), profile_of_gaussian(_largest(profile), at)
    for sign in signs:
        one = profile.delta(sign, at, width, least=np.maximum(least, found[0]))
        found = np.maximum(found, np.minimum(one, largest))
    return found[:, back]


def _largest(profile: Profile) -> float:
    """Return the sensitivity, rounded up, of the Gaussian mechanism that also reveals the record's bin."""
    return float(profile.bins.sizes.max()) * (1.0 + 32.0 * ROUNDOFF)


@functools.lru_cache(maxsize=KEPT)
def _profiles(strategy: Strategy, bins: int, noise: float) -> tuple[BracketedProfile, ...]:
    """Return two profiles of a run, for remove and for add. Each brackets delta at some hundred values of eps."""
    profile = contours_of(strategy, bins, noise)
    mu, found = _largest(profile), []
    # `slots` is chosen so that random allocation's likelihood ratio has the standard deviation of the bins' ratio
    slots = max(np.expm1(min(mu * mu, 600.0)) / profile.bins.deviation**2, 1.0)
    with waiting(2, "directions of a round") as work:
        for sign, least in ((1.0, 3e-10), (-1.0, 1e-16)):
            eps = losses_for(mu, slots, sign)
            low, _, high = delta_of_bins(strategy, bins, noise, [sign], eps, 1e-5, least)
            found.append(BracketedProfile(*falling(eps, low, high)))
            work.done += 1
    return tuple(found)


@register
class SharedBins(Mechanism):
    """Balls in bins where neighbouring bins share noise. A dominating and a dominated pair bracket compositions."""

    strategy: Strategy = field(metadata={"static": True})
    noise_multiplier: Leaf
    bins: int = field(metadata={"static": True})
    constraints: ClassVar = {"noise_multiplier": POSITIVE}
    follows_relation: ClassVar = True

    def replaced_apart(self) -> bool:
        return True

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        pairs = [pair_above(*each) for each in self._each(relation)]
        return [(sample_pair(stacked(pairs, batch_shape(self)), np.asarray(1.0), direction), np.asarray(1.0))]

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        parts = [direction_of(pair_below(*each), direction) for each in self._each(relation)]
        return [(stacked_parts(parts, batch_shape(self)), np.asarray(1.0))]

    def _each(self, relation: str) -> list[tuple[BracketedProfile, ...]]:
        self.require_pair(relation, "for balls in bins")
        return [_profiles(self.strategy, self.bins, noise) for noise in np.ravel(self.noise_multiplier).tolist()]

    def has_bracket(self) -> bool:
        return True

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return "certified" if relation != "replace_one" else "bound"


def in_bins(strategy: Strategy, noise: np.ndarray, bins: int, below: bool) -> Mechanism:
    """Return `RandomAllocation` if no bins share noise, and all are equal or there is only one; else `SharedBins`."""
    diagonal, beside = bands_of(strategy, bins)
    equal = strategy.steps % bins == 0 and np.all(diagonal == diagonal[0])
    if not beside.any() and (equal or bins == 1):
        rounding = 1.0 + (8.0 if below else -8.0) * ROUNDOFF
        size = np.sqrt(math.fsum(diagonal[::bins] ** 2))
        return RandomAllocation(Gaussian(noise / size * rounding), float(bins))
    return SharedBins(strategy, noise, bins)
