"""Matrix mechanisms: Gaussian noise that is correlated over the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import Leaf
from jaxacct.core.validation import NOISE, InputError, shown
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.banded_bins import bands_of, in_bins
from jaxacct.mechanisms.base import EqualToAnother, Mechanism, register
from jaxacct.mechanisms.combinators import compose, repeat
from jaxacct.mechanisms.sampled_batches import PoissonSampled
from jaxacct.strategies.strategy import BallsInBins, CyclicPoisson, FixedEpochs, Participation, Strategy, require_groups

SAME = 1e-12
"""The norms of two columns count as equal up to this relative difference."""


@register
@dataclass(frozen=True, eq=False)
class MatrixMechanism(EqualToAnother):
    """The release of C X + Z: row i of X is the sum of step i's clipped gradients, Z has N(0, s^2 R^2) entries.

    C is the ``strategy`` of n steps, s is ``noise_multiplier``, and R is the clip norm. Every model of a run with the
    correlated noise C^-1 Z follows from the release. Gradients may depend on all earlier outputs.

    Adding or removing a record must not move other records to other steps. A list that is shuffled and cut into batches
    moves them: ask for ``relation="zero_out"`` or ``"replace_one"`` there.

    * Without sampling it is one Gaussian of noise multiplier s / sens(C): exact.
    * With ``CyclicPoisson(b, q)`` and at least as many groups b as bands it is ceil(n/b) Poisson sampled Gaussians of
      noise multiplier ``s / ||C e_i||``, i = 0, b, 2b, ..., C e_i column i: exact for add, remove and zero-out.
    * With ``BallsInBins(b)`` and at most two bands it is one mixture of b Gaussians, one for each bin: exact for add,
      remove and zero-out.

    Parameters
    ----------
    strategy : Strategy
        One strategy for the whole batch, such as ``strategies.Banded(bands=8, steps=512)``.
    noise_multiplier : array_like > 0
        s: the noise's standard deviation divided by R, before C^-1.
    participation : Participation, optional
        ``FixedEpochs`` with the strategy's epochs by default.

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
        if isinstance(self.participation, BallsInBins):
            bands_of(self.strategy, self.participation.bins)
        else:
            self._divisors()

    def inside(self) -> list[Mechanism]:
        return [self.equivalent()]

    def equivalent(self, below: bool = False) -> Mechanism:
        """Return an equal mechanism that has no matrix. Its noise is rounded up if `below` is true, else down.

        >>> from jaxacct import strategies
        >>> run = MatrixMechanism(strategies.Toeplitz((3.0, 4.0), steps=8), 10.0)
        >>> round(float(run.equivalent().noise_multiplier), 9)
        2.0
        """
        if isinstance(self.participation, BallsInBins):
            return in_bins(self.strategy, self.noise_multiplier, self.participation.bins, below)
        noise = np.asarray(self.noise_multiplier, np.float64) * (1.0 + (4.0 if below else -4.0) * ROUNDOFF)
        runs = _runs([pair[0 if below else 1] for pair in self._divisors()], below)
        if isinstance(self.participation, CyclicPoisson):
            rate = self.participation.sampling_probability
            # a block whose norm is only known to be 0 or more is left out
            blocks = [repeat(PoissonSampled(Gaussian(noise / d), rate), n) for d, n in runs if d > 0.0]
            return blocks[0] if len(blocks) == 1 else compose(*blocks)
        return Gaussian(noise / runs[0][0])

    def _divisors(self) -> list[tuple[float, float]]:
        """Return bounds (lower, upper) of each Gaussian's sensitivity, by which the noise multiplier is divided."""
        strategy, participation = self.strategy, self.participation
        if isinstance(participation, CyclicPoisson):
            return _norms_of_blocks(strategy, participation.groups)
        bounds = strategy.sensitivity(participation)
        return [(float(bounds.lower), float(bounds.upper))]


def _norms_of_blocks(strategy: Strategy, groups: int) -> list[tuple[float, float]]:
    """Return (lower, upper) bounds of a group's column norms, largest first: for one group, and for every group."""
    require_groups(strategy, groups)
    lower, upper = strategy.squared_norms()
    blocks = -(-strategy.steps // groups)
    by_group = lambda norms: np.pad(norms, (0, blocks * groups - norms.size)).reshape(blocks, groups).T
    of_groups = np.sort(by_group(lower), 1)[:, ::-1]
    least = of_groups[np.argmax(of_groups.sum(1))]
    most = np.sort(by_group(upper), 1)[:, ::-1].max(0)
    spread = strategy.entry_error * strategy.steps**0.5  # bounds the norm of a column's error
    low = np.maximum(np.sqrt(np.maximum(least, 0.0)) * (1.0 - 2.0 * ROUNDOFF) - spread, 0.0)
    high = np.sqrt(most) * (1.0 + 2.0 * ROUNDOFF) + spread
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _runs(divisors: list[float], below: bool) -> list[tuple[float, int]]:
    """Return falling divisors as (divisor, count). Nearly equal ones become the least (if `below`) or the largest."""
    runs: list[tuple[float, int]] = []
    for divisor in divisors:
        if runs and divisor >= runs[-1][0] * (1.0 - SAME):
            runs[-1] = divisor if below else runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((divisor, 1))
    return runs
