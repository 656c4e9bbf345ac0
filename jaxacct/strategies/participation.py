"""Ways in which one record takes part in the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass

from jaxacct.core.validation import PROBABILITY, InputError, check_int, check_one

_WHOLE = "use a whole number"


@dataclass(frozen=True)
class SingleParticipation:
    """A record takes part in at most one step.

    >>> from jaxacct.strategies import Banded
    >>> float(round(Banded(4, steps=64).sensitivity(SingleParticipation()).upper, 9))
    1.0
    """


@dataclass(frozen=True)
class FixedEpochs:
    """A record takes part in steps j, j + n/epochs, j + 2 n/epochs, ... of n steps, for one j < n/epochs.

    Parameters
    ----------
    epochs : int
        Passes over the data; it divides the number of steps.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> from jaxacct.strategies import Banded
    >>> float(round(Banded(4, steps=64).sensitivity(FixedEpochs(4)).upper, 9))
    2.0
    """

    epochs: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", check_int("epochs", self.epochs, 1, _WHOLE))


@dataclass(frozen=True)
class MinSeparation:
    """A record takes part in any steps of which two lie at least ``separation`` apart, at most ``most`` of them.

    Parameters
    ----------
    separation : int
        b: steps i < j of one record have j - i >= b.
    most : int, optional
        Largest number of steps of one record; ceil(n/b), which no pattern exceeds, by default.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> from jaxacct.strategies import Banded
    >>> float(round(Banded(4, steps=64).sensitivity(MinSeparation(16)).upper, 9))
    2.0
    """

    separation: int
    most: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "separation", check_int("separation", self.separation, 1, _WHOLE))
        if self.most is not None:
            object.__setattr__(self, "most", check_int("most", self.most, 1, _WHOLE))


@dataclass(frozen=True)
class CyclicPoisson:
    """Records are split into groups once; step i draws each record of group i mod ``groups`` independently.

    The group of a record must not depend on the content of other records: draw it from a hash of the record's own
    identifier. An equal split of a shuffled list moves other records when one is added, and holds for ``zero_out`` and
    ``replace_one`` only.

    Parameters
    ----------
    groups : int
        b, at least the number of bands of the strategy.
    sampling_probability : float in [0, 1]
        q, the chance of each record of a group; a constant, which is not computed from the group's size.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> CyclicPoisson(groups=8, sampling_probability=0.08)
    CyclicPoisson(groups=8, sampling_probability=0.08)
    """

    groups: int
    sampling_probability: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", check_int("groups", self.groups, 1, _WHOLE))
        rate = check_one("sampling_probability", self.sampling_probability, PROBABILITY, "a strategy is for one run")
        object.__setattr__(self, "sampling_probability", float(rate))


Participation = SingleParticipation | FixedEpochs | MinSeparation | CyclicPoisson


def require_divisor(epochs: int, steps: int) -> int:
    """Return the steps of one epoch, or refuse epochs that do not divide the steps."""
    if steps % epochs:
        raise InputError(
            f"epochs = {epochs} must divide steps = {steps}; use {steps // epochs * epochs or epochs} steps, or "
            "MinSeparation(separation=...), which covers a partial epoch"
        )
    return steps // epochs
