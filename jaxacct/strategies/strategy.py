"""A strategy: the matrix C of a matrix mechanism C X + Z, and its sensitivity (README.md, "Sensitivity")."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.validation import PROBABILITY, Constraint, InputError, check_int, check_one

MOST_PATTERNS = 4000
"""All participation patterns are compared if there are at most this many."""
MOST_ENTRIES = 2**25
"""The search for a worst pattern stores at most this many entries of C^T C, and so takes about 1 GB of memory."""
MOST_SHOWN = 800
"""`repr` cuts the text of a field after this many characters, which is about 40 numbers."""
STEPS = Constraint("use a number of steps that a run can take", 1, 10**6, integral=True)


@dataclass(frozen=True)
class SingleParticipation:
    """A record takes part in at most one step.

    >>> from jaxacct.strategies import Banded
    >>> float(round(Banded(4, steps=64).sensitivity(SingleParticipation()).upper, 9))
    1.0
    """


class _Counted:
    """Base class of participations. It checks that the fields are whole numbers, except a sampling probability."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "sampling_probability":
                object.__setattr__(self, name, float(check_one(name, value, PROBABILITY, "a strategy is for one run")))
            elif value is not None:
                store_whole(self, name)


@dataclass(frozen=True)
class FixedEpochs(_Counted):
    """A record takes part in steps j, j + n/epochs, j + 2 n/epochs, ... of n steps, for one j < n/epochs.

    Parameters
    ----------
    epochs : the number of passes over the data, a divisor of the number of steps.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> from jaxacct.strategies import Banded
    >>> float(round(Banded(4, steps=64).sensitivity(FixedEpochs(4)).upper, 9))
    2.0
    """

    epochs: int


@dataclass(frozen=True)
class MinSeparation(_Counted):
    """A record takes part in at most ``most`` steps, any two of which lie at least ``separation`` apart.

    Parameters
    ----------
    separation : b: steps i < j of one record have j - i >= b.
    most : the largest number of steps of one record; by default ceil(n/b) for n steps, which no pattern exceeds.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> from jaxacct.strategies import Banded
    >>> float(round(Banded(4, steps=64).sensitivity(MinSeparation(16)).upper, 9))
    2.0
    """

    separation: int
    most: int | None = None


@dataclass(frozen=True)
class CyclicPoisson(_Counted):
    """Records are split into groups once; step i draws each record of group i mod ``groups`` independently.

    The group of a record must not depend on other records: draw it from a hash of the record's identifier, for example.
    For equal parts of a shuffled list, the accounting holds under ``zero_out`` and ``replace_one`` only. A replaced
    record may be in another group, so under ``replace_one`` it is removed and another one is added.

    Parameters
    ----------
    groups : b, at least the number of bands of the strategy.
    sampling_probability : q in [0, 1], a record's chance to be drawn. Do not derive it from the size of the group.

    References
    ----------
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, arXiv:2306.08153.

    >>> CyclicPoisson(groups=8, sampling_probability=0.08)
    CyclicPoisson(groups=8, sampling_probability=0.08)
    """

    groups: int
    sampling_probability: float


@dataclass(frozen=True)
class BallsInBins(_Counted):
    """Each record is put into one of ``bins`` bins once, uniformly. Step i uses all records of bin i mod ``bins``.

    The bin of a record must not depend on other records. Bins that are cut from a shuffled list are not covered, since
    adding one record moves others to other bins. In jax_privacy this sampling is called BallsInBinsSampling.

    Parameters
    ----------
    bins : b, the number of steps of an epoch. The strategy must have 1 or 2 bands, and no more than b bands.

    References
    ----------
    Chua et al. (2024), Balls-and-Bins Sampling for DP-SGD, arXiv:2412.16802.

    >>> BallsInBins(bins=50)
    BallsInBins(bins=50)
    """

    bins: int


Participation = SingleParticipation | FixedEpochs | MinSeparation | CyclicPoisson | BallsInBins


def store_whole(record: Any, name: str) -> None:
    """Check that a field of a frozen dataclass is a whole number >= 1, and store it as an int."""
    object.__setattr__(record, name, check_int(name, getattr(record, name), 1, "use a whole number"))


def require_divisor(epochs: int, steps: int) -> int:
    """Return the steps of one epoch, or refuse epochs that do not divide the steps."""
    if steps % epochs:
        raise InputError(
            f"epochs = {epochs} must divide steps = {steps}; use {steps // epochs * epochs or epochs} steps, or "
            "MinSeparation(separation=...), which covers a partial epoch"
        )
    return steps // epochs


def require_groups(strategy: Strategy, groups: int) -> None:
    """Refuse fewer groups of records than the strategy has bands: no bound is known for that case."""
    if strategy.overlap > groups:
        raise InputError(
            f"groups = {groups} must be >= {strategy.overlap}, the number of bands of the strategy: blocks of one "
            "record would overlap, and no bound is known for them; use more groups, or fewer bands"
        )


class Strategy(ABC):
    """A matrix C of n columns, one for each step, whose noisy product C X + Z determines noisy prefix sums of X.

    Row i of X is the gradient sum of step i. A record changes only the rows of steps that use it, each by at most 1.

    >>> from jaxacct.strategies import Banded
    >>> isinstance(Banded(2, steps=8), Strategy)
    True
    """

    steps: int
    epochs: int
    _given: tuple[str, ...] = ()  # names of the fields, such as `coefficients`, that were given and not searched for

    def __post_init__(self) -> None:
        """Check the fields. With `steps` = 0 there is no matrix yet; a `Plan` later calls `for_steps` to make one."""
        given = tuple(one.name for one in fields(cast(Any, self)) if not one.repr and np.size(getattr(self, one.name)))
        object.__setattr__(self, "_given", given)
        for one in fields(cast(Any, self)):
            if one.type in ("int", int) and one.default != 0:  # `steps` may be 0 for now
                store_whole(self, one.name)
        if type(self.steps) is int and self.steps == 0:
            return
        object.__setattr__(self, "steps", int(check_one("steps", self.steps, STEPS, "a strategy is for one run")))
        require_divisor(self.epochs, self.steps)
        self._settle()

    def __repr__(self) -> str:
        """Return the text of the call that makes the strategy. It omits searched-for numbers and cuts long values."""
        shown = [one.name for one in fields(cast(Any, self)) if one.repr or one.name in self._given]
        texts = [f"{name}={getattr(self, name)!r}" for name in shown]
        cut = [text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..." for text in texts]
        return f"{type(self).__name__}({', '.join(cut)})"

    @abstractmethod
    def _settle(self) -> None:
        """Check and store the fields other than `steps` and `epochs`. If the matrix is not given, search for it."""

    def for_steps(self, steps: int) -> Self:
        """Return this strategy for a run of `steps` steps. Coefficients that it already has are not searched for again.

        >>> from jaxacct.strategies import Banded
        >>> Banded(2).for_steps(64) == Banded(2, steps=64)
        True
        """
        return replace(self, steps=steps)  # type: ignore[type-var]  # every strategy is a dataclass

    @abstractmethod
    def taps(self, step: int) -> Taps:
        """Return the weights that give the noise of a step, which is row `step` of C^-1 Z (README.md, "Streaming")."""

    @property
    @abstractmethod
    def overlap(self) -> int:
        """A distance in steps: columns i and j of C are orthogonal if ``|i - j| >= overlap``."""

    @property
    def entry_error(self) -> float:
        """Upper bound of the rounding error of each entry of C. It is 0 if no entry is computed from other numbers."""
        return 0.0

    @abstractmethod
    def lags(self, count: int) -> np.ndarray:
        """Return `count` <= overlap diagonals of G = C^T C, (count, n), with G[i, i + d] (0 if i + d >= n) at [d, i].

        The error of an entry is at most `rounding` times the same entry of |C|^T |C|.
        """

    @property
    def rounding(self) -> float:
        return 2.0 * (self.overlap + 2) * ROUNDOFF

    @abstractmethod
    def squared_errors(self) -> np.ndarray:
        """Return the variance of each noisy prefix sum, (n,), if every entry of Z has variance 1."""

    def squared_norms(self) -> tuple[np.ndarray, np.ndarray]:
        """Return lower and upper bounds of the squared norm of each column, (n,) each."""
        (squares,) = self.lags(1)
        return squares * (1.0 - self.rounding), squares * (1.0 + self.rounding)

    def sensitivity(self, participation: Participation | None = None) -> Bounds:
        """Bound the sensitivity of C X under add or remove of one record, in clip norms; ``replace_one`` doubles it.

        The sensitivity is ``max_pi max_x ||sum_{i in pi} C e_i x_i^T||``. Here pi is a pattern, the set of steps of one
        record, and x_i is the record's contribution to step i. It has norm at most 1 and may depend on earlier outputs.

        Parameters
        ----------
        participation : SingleParticipation, MinSeparation, or FixedEpochs, by default ``FixedEpochs(epochs)``.

        Returns
        -------
        Bounds of kind "certified", which differ by rounding alone if C^T C is >= 0 on the worst pattern.

        References
        ----------
        Denisov et al. (2022), arXiv:2202.08312. README.md of this folder, "Sensitivity".

        >>> from jaxacct.strategies import FixedEpochs, Identity
        >>> float(round(Identity(steps=64).sensitivity(FixedEpochs(16)).upper, 9))
        4.0
        """
        if not self.steps:
            raise InputError("steps is missing; give the number of steps of the run")
        least, most = self._square(*self._apart(participation or FixedEpochs(self.epochs)))
        # the error of a column has norm <= entry_error sqrt(n); `spread` bounds the sum of n such norms
        spread = self.entry_error * self.steps**1.5
        lower, upper = max(np.sqrt(max(least, 0.0)) - spread, 0.0), np.sqrt(most) + spread
        lower, upper = lower * (1.0 - 2.0 * ROUNDOFF), upper * (1.0 + 2.0 * ROUNDOFF)
        status = "ok" if upper <= lower * (1.0 + 1e-4) else "width"
        return Bounds(lower, 0.5 * (lower + upper), upper, "certified", status)

    def _apart(self, participation: Participation) -> tuple[int, int, bool]:
        """Return a record's least gap between steps, its largest number of steps, and whether all gaps are equal."""
        match participation:
            case SingleParticipation():
                return self.steps, 1, True
            case FixedEpochs(epochs=epochs):
                return require_divisor(epochs, self.steps), epochs, True
            case MinSeparation(separation=separation, most=most):
                return separation, most or self.steps, False
        raise InputError(
            f"{type(participation).__name__} has no single sensitivity, since records are sampled; "
            "ask ja.epsilon(ja.MatrixMechanism(strategy, noise_multiplier, participation), delta)"
        )

    def _square(self, separation: int, most: int, periodic: bool) -> tuple[float, float]:
        """Bound the squared sensitivity for the patterns that `_apart` describes."""
        count = 1 if self.overlap <= separation else self.overlap
        if count > 1 and count * self.steps > MOST_ENTRIES:
            raise InputError(
                f"steps = {self.steps} of a strategy with {count} overlapping columns must be <= "
                f"{MOST_ENTRIES // count}; claim nothing, or train for fewer steps"
            )
        lags, longest = self.lags(count), min(most, -(-self.steps // separation))
        if periodic:
            lower, upper = of_all(lags, np.arange(self.steps).reshape(most, separation))
        else:
            lower, upper = of_patterns(lags, separation, most)
        rounding = (8.0 * (longest + 1) * ROUNDOFF + 2.0 * self.rounding * longest) * upper  # README.md, "Sensitivity"
        return lower - rounding, upper + rounding

    @property
    def error(self) -> float:
        """Mean squared error of the prefix sums at noise multiplier 1, in squared clip norms: ``sens^2 mean_i e_i``.

        Here sens is the sensitivity under ``FixedEpochs(epochs)``, and e_i are the `squared_errors`.
        """
        return self._own_square() * float(np.mean(self.squared_errors()))

    @property
    def max_error(self) -> float:
        """Largest mean squared error of one prefix sum, ``sens^2 max_i e_i``, in the units of `error`."""
        return self._own_square() * float(np.max(self.squared_errors()))

    def _own_square(self) -> float:
        return float(self.sensitivity(FixedEpochs(self.epochs)).estimate) ** 2


class Taps(NamedTuple):
    """Weights of step i. Its noise is ``w_i = own z_i + sum_k past_k B_k``: z_i is fresh noise, the B_k are m buffers.

    After the step, buffer B_k becomes ``keep_k B_k + of_sum_k w_i + of_fresh_k z_i``. All buffers begin at 0.
    """

    own: float
    past: np.ndarray  # (m,), like the three fields after it
    keep: np.ndarray
    of_sum: np.ndarray
    of_fresh: np.ndarray


def ring(step: int, own: float, past: np.ndarray, of_sum: bool) -> Taps:
    """Return the weights of a step. Its m buffers hold the last m noises w if `of_sum`, else fresh noises z."""
    # if `past` is empty, add a weight of 0: a strategy without buffers would be taken for independent noise
    past = np.pad(past, (0, int(not past.size)))
    count = past.size
    turned, now = np.zeros((2, count))
    steps = np.arange(max(step - count, 0), step)  # step j is in buffer j mod m
    turned[steps % count] = past[step - 1 - steps]
    now[step % count] = 1.0
    return Taps(own, turned, 1.0 - now, now * of_sum, now * (not of_sum))


def of_patterns(lags: np.ndarray, separation: int, most: int) -> tuple[float, float]:
    """Bound the squared sensitivity, except rounding, over patterns of <= `most` steps with gaps >= `separation`."""
    weights = _weights(lags, separation, most)
    upper, pattern = _heaviest(weights, separation, most)
    single = [int(np.argmax(lags[0]))]
    lower = max(of_all(lags, np.array(each)[:, None])[0] for each in (pattern, single))
    if lower < upper * (1.0 - 1e-13):  # otherwise the two bounds agree up to rounding
        found = list(itertools.islice(_longest((), weights.size, separation, most), MOST_PATTERNS + 1))
        if len(found) <= MOST_PATTERNS:
            return of_all(lags, np.array([*itertools.zip_longest(*found, fillvalue=-1)]))
    return min(lower, upper), upper


def of_all(lags: np.ndarray, patterns: np.ndarray) -> tuple[float, float]:
    """Bound the squared sensitivity, except rounding, over `patterns`; a column has one pattern's steps, then -1s."""
    # a record that contributes e_1 or -e_1 to each step, with the signs below, attains the lower bound
    signs = np.ones(patterns.shape)
    lower, upper = np.zeros((2, patterns.shape[1]))
    for place, step in enumerate(patterns):
        earlier = patterns[: place + 1]
        lag = step - earlier
        known = (step >= 0) & (lag < len(lags))
        entries = np.where(known, lags[np.where(known, lag, 0), earlier], 0.0) * np.where(lag > 0, 2.0, 1.0)
        others = (signs[:place] * entries[:place]).sum(0)
        signs[place] = np.where(others >= 0.0, 1.0, -1.0)
        lower += entries[place] + np.abs(others)
        upper += np.abs(entries).sum(0)
    return float(lower.max()), float(upper.max())


def _longest(begun: tuple[int, ...], steps: int, separation: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the patterns from `begun` that no step can prolong. A longer one never has a lower sum of |(C^T C)_ij|."""
    later = range(begun[-1] + separation if begun else 0, steps)
    if not later or len(begun) == most:
        yield begun
        return
    # If `most` limits no pattern, a gap of 2 * separation or more has room for one more step. So skip such gaps.
    for step in later[:separation] if most * separation >= steps else later:
        yield from _longest((*begun, step), steps, separation, most)


def _weights(lags: np.ndarray, separation: int, most: int) -> np.ndarray:
    """Return (n,): the largest |G_ii| + 2 sum_{j > i} |G_ij| over the patterns that contain step i, with G = C^T C."""
    magnitude = np.abs(lags)
    last = deque(_sums(magnitude[separation:], separation, most - 1), 1)
    return np.asarray(magnitude[0] + 2.0 * last.pop()[-1]) if last else magnitude[0]


def _heaviest(weights: np.ndarray, separation: int, most: int) -> tuple[float, list[int]]:
    """Return the largest sum of weights of at most `most` steps with gaps >= `separation`, and these steps."""
    sums = [*_sums(weights, separation, most)][::-1]
    pattern, step, layer = list[int](), 0, sums[0].size - 1
    free = layer < most
    while step < len(sums) and layer > 0:
        if step + 1 == len(sums) or sums[step][layer] > sums[step + 1][layer]:
            pattern.append(step)
            layer -= not free
            step += separation
        else:
            step += 1
    return float(sums[0][-1]), pattern


def _sums(rows: np.ndarray, separation: int, most: int) -> Iterator[np.ndarray]:
    """For r = n - 1, ..., 0 yield the largest sums, (layers, ...), of rows numbered >= r with gaps >= `separation`."""
    # layer m sums at most m rows; if `most` rules out no choice, there are two layers: 0 (no rows) and 1 (any number)
    free = most * separation >= len(rows)
    later = deque([np.zeros(((1 if free else most) + 1, *rows.shape[1:]))] * separation, separation)
    for row in rows[::-1]:
        before = later[0][1:] if free else later[0][:-1]  # the sums of rows at least `separation` later
        later.append(np.concatenate([later[-1][:1], np.maximum(later[-1][1:], row + before)]))
        yield later[-1]
