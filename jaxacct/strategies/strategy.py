"""A strategy: the matrix C of a matrix mechanism C X + Z, with its sensitivity and the error of its prefix sums."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import Constraint, InputError, check_int, check_one
from jaxacct.strategies import sensitivity
from jaxacct.strategies.participation import (
    FixedEpochs,
    MinSeparation,
    Participation,
    SingleParticipation,
    require_divisor,
)
from jaxacct.strategies.sensitivity import Lags, Square

MOST_ENTRIES = 2**25
"""Largest number of entries of C^T C among which the worst pattern is searched for: some 1 GB of memory."""
STEPS = Constraint("use a number of steps that a run can take", 1, 10**6, integral=True)


class Strategy(ABC):
    """A matrix C of n columns, one for each step, whose noisy product C X + Z determines noisy prefix sums of X.

    The rows of X are the gradient sums of the steps; one record moves each of the rows it takes part in by at most 1.

    >>> from jaxacct.strategies import Banded
    >>> isinstance(Banded(2, steps=8), Strategy)
    True
    """

    steps: int
    epochs: int

    @property
    @abstractmethod
    def overlap(self) -> int:
        """Columns i and j of C are orthogonal where ``|i - j| >= overlap``."""

    @abstractmethod
    def lags(self) -> Lags:
        """Return bounds of the entries of C^T C."""

    @abstractmethod
    def squared_errors(self) -> np.ndarray:
        """Return the variance of each noisy prefix sum where every entry of Z has variance 1, (n,)."""

    @abstractmethod
    def squared_norms(self) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of the squared norm of each column, (n,) each."""

    def sensitivity(self, participation: Participation | None = None) -> Bounds:
        """Bound the sensitivity of C X under add or remove of one record, in clip norms.

        ``max_pi max_x ||sum_{i in pi} C e_i x_i^T||`` over the patterns pi of one record and contributions x_i of norm
        at most 1, which may depend on earlier outputs. ``replace_one`` doubles it.

        Parameters
        ----------
        participation : SingleParticipation, FixedEpochs or MinSeparation, optional
            ``FixedEpochs(epochs)`` of the strategy by default. Sampled participation has no single sensitivity.

        Returns
        -------
        Bounds
            ``kind`` is "certified". The ends differ by rounding where C^T C >= 0 on the worst pattern.

        References
        ----------
        Denisov et al. (2022), Improved Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive
        Streams. README.md of this folder, "Sensitivity".

        >>> from jaxacct.strategies import FixedEpochs, Identity
        >>> float(round(Identity(steps=64).sensitivity(FixedEpochs(16)).upper, 9))
        4.0
        """
        square = self._square(participation or FixedEpochs(self.epochs))
        lower, upper = np.sqrt(max(square.lower, 0.0)), np.sqrt(square.upper)
        lower, upper = lower * (1.0 - 2.0 * ROUNDOFF), upper * (1.0 + 2.0 * ROUNDOFF)
        status = "ok" if upper <= lower * (1.0 + 1e-4) else "width"
        return Bounds(lower, 0.5 * (lower + upper), upper, "certified", status)

    def _square(self, participation: Participation) -> Square:
        match participation:
            case SingleParticipation():
                lower, upper = self.squared_norms()
                return Square(float(lower.max()), float(upper.max()))
            case FixedEpochs(epochs=epochs):
                period = require_divisor(epochs, self.steps)
                return sensitivity.of_epochs(self._near(period), period)
            case MinSeparation(separation=separation, most=most):
                return sensitivity.of_patterns(self._near(separation), separation, most or self.steps)
        raise InputError(
            f"{type(participation).__name__} has no single sensitivity, since records are sampled; "
            "ask ja.epsilon(ja.MatrixMechanism(strategy, noise_multiplier, participation), delta)"
        )

    def _near(self, separation: int) -> Lags:
        """Return the entries of C^T C that steps of one record reach, which lie `separation` apart."""
        if self.overlap <= separation:
            lower, upper = self.squared_norms()
            return Lags(lower[None], upper[None])
        if self.overlap * self.steps > MOST_ENTRIES:
            raise InputError(
                f"steps = {self.steps} of a strategy with {self.overlap} overlapping columns must be <= "
                f"{MOST_ENTRIES // self.overlap}; use a participation whose steps lie {self.overlap} apart"
            )
        return self.lags()

    @property
    def error(self) -> float:
        """Mean squared error of the prefix sums at noise multiplier 1 for ``epochs`` fixed epochs.

        ``mean_i e_i sens^2`` with e_i the variance of prefix sum i per unit of noise, in squared clip norms.
        """
        return float(np.mean(self.squared_errors())) * self._own_square()

    @property
    def max_error(self) -> float:
        """Largest squared error of a prefix sum at noise multiplier 1, in squared clip norms."""
        return float(np.max(self.squared_errors())) * self._own_square()

    def _own_square(self) -> float:
        return float(self.sensitivity(FixedEpochs(self.epochs)).estimate) ** 2


def check_run(strategy: Strategy) -> None:
    """Check the number of steps and of epochs of a strategy, and store them as ints."""
    steps = check_one("steps", strategy.steps, STEPS, "a strategy is for one run")
    object.__setattr__(strategy, "steps", int(steps))
    object.__setattr__(strategy, "epochs", check_int("epochs", strategy.epochs, 1, "use a whole number"))
    require_divisor(strategy.epochs, strategy.steps)
