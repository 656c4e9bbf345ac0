"""Laws of K, the number of candidates that a private selection tries: frozen pytrees, scalars or batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jax.typing import ArrayLike

from jaxacct.core.validation import COUNT, POSITIVE, PROBABILITY, Constraint, InputError, Tracer, check
from jaxacct.kernels import generating
from jaxacct.kernels.arrays import namespace
from jaxacct.mechanisms.base import register
from jaxacct.selection.law_of_k import WHOLE_K, Law
from jaxacct.selection.negative_binomial import Geometric, Logarithmic, TruncatedNegativeBinomial

__all__ = [
    "Binomial",
    "Categorical",
    "Geometric",
    "Law",
    "Logarithmic",
    "PointMass",
    "Poisson",
    "TruncatedNegativeBinomial",
    "TwoPoint",
    "largest_k",
]

_TRIED = Constraint("use a probability above 0 and at most 1", 0, 1, lower_open=True)
_SUM_ERROR = 1e-13
"""The probabilities of a Categorical law sum to 1 up to this: a few roundings of a sum of many."""


@register
@dataclass(frozen=True, eq=False)
class Poisson(Law):
    """`Pr[K = k] = e^{-mean} mean^k/k!`.

    K = 0, of probability e^{-mean}, releases something that is independent of the data.

    Parameters
    ----------
    mean : array_like > 0

    Raises
    ------
    InputError
        mean is not positive and finite.

    References
    ----------
    Papernot and Steinke (2022).

    >>> float(Poisson(mean=10).probability(0).round(9))
    4.54e-05
    """

    mean: Any
    constraints: ClassVar = {"mean": POSITIVE}

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.poisson(self.mean, y)

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]:
        return generating.poisson_steepness(self.mean, y)

    def rise(self, x: Any, y: Any, d: Any) -> Any:
        return generating.poisson_rise(self.mean, y, d)

    def probability(self, k: Any) -> np.ndarray:
        from scipy.stats import poisson

        return np.asarray(poisson.pmf(check("k", k, WHOLE_K), self.mean))

    def survival(self, k: Any) -> np.ndarray:
        from scipy.special import pdtrc

        return np.asarray(pdtrc(check("k", k, WHOLE_K), self.mean))


@register
@dataclass(frozen=True, eq=False)
class Binomial(Law):
    """`Pr[K = k] = C(n, k) p^k (1-p)^{n-k}`, n ``trials`` of ``probability_of_run`` p.

    K = 0, of probability (1-p)^n, releases something that is independent of the data.

    Parameters
    ----------
    trials : array_like of whole numbers >= 1
    probability_of_run : array_like in (0, 1]

    References
    ----------
    jaxacct/selection/README.md, "The worst score", holds for every law of K.

    >>> float(Binomial(20, 0.5).mean)
    10.0
    """

    trials: Any
    probability_of_run: Any
    constraints: ClassVar = {"trials": COUNT, "probability_of_run": _TRIED}

    @property
    def mean(self) -> Any:
        """E[K]."""
        return np.multiply(self.trials, self.probability_of_run)[()]

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.binomial(self.trials, self.probability_of_run, y)

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        return generating.binomial_slopes(self.trials, self.probability_of_run, y)

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]:
        return generating.binomial_steepness(self.trials, self.probability_of_run, x, y)

    def rise(self, x: Any, y: Any, d: Any) -> Any:
        return generating.binomial_rise(self.trials, self.probability_of_run, x, y, d)

    def probability(self, k: Any) -> np.ndarray:
        from scipy.stats import binom

        return np.asarray(binom.pmf(check("k", k, WHOLE_K), self.trials, self.probability_of_run))

    def survival(self, k: Any) -> np.ndarray:
        from scipy.stats import binom

        return np.asarray(binom.sf(check("k", k, WHOLE_K), self.trials, self.probability_of_run))


@register
@dataclass(frozen=True, eq=False)
class PointMass(Law):
    """K = ``repetitions``, always: fixed, known, and for i.i.d. candidates the most costly in privacy.

    Parameters
    ----------
    repetitions : array_like of whole numbers >= 1

    Raises
    ------
    InputError
        repetitions is no whole number of 1 or more.

    References
    ----------
    jaxacct/selection/README.md, "The worst score", holds for every law of K.

    >>> int(PointMass(10).quantile(0.5))
    10
    """

    repetitions: Any
    constraints: ClassVar = {"repetitions": COUNT}

    @property
    def mean(self) -> Any:
        """E[K]."""
        return self.repetitions

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.binomial(self.repetitions, 1.0, y)

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        return generating.binomial_slopes(self.repetitions, 1.0, y)

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]:
        return generating.binomial_steepness(self.repetitions, 1.0, x, y)

    def rise(self, x: Any, y: Any, d: Any) -> Any:
        return generating.binomial_rise(self.repetitions, 1.0, x, y, d)

    def probability(self, k: Any) -> np.ndarray:
        return np.where(np.equal(check("k", k, WHOLE_K), self.repetitions), 1.0, 0.0)

    def survival(self, k: Any) -> np.ndarray:
        return np.where(np.less(check("k", k, WHOLE_K), self.repetitions), 1.0, 0.0)


@register
@dataclass(frozen=True, eq=False)
class Categorical(Law):
    """Any law on 0, 1, ..., n - 1: Pr[K = k] = ``probabilities``[..., k].

    Parameters
    ----------
    probabilities : array_like in [0, 1]
        They sum to 1 (to 1e-13) along the last axis; the axes before it are the batch.

    Raises
    ------
    InputError
        A probability is outside [0, 1], or a sum is not 1.

    References
    ----------
    jaxacct/selection/README.md, "The worst score", holds for every law of K.

    >>> float(Categorical([0.0, 0.5, 0.5]).mean)
    1.5
    """

    probabilities: Any
    constraints: ClassVar = {"probabilities": PROBABILITY}
    vectors: ClassVar = ("probabilities",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.probabilities, Tracer):
            return
        total = np.sum(self.probabilities, axis=-1) if np.ndim(self.probabilities) else np.zeros(())
        bad = np.abs(total - 1.0) > _SUM_ERROR
        if np.any(bad):
            index = [int(i) for i in np.argwhere(bad)[0]]
            raise InputError(
                f"sum of probabilities{index if index else ''} = {float(total[tuple(index)])!r} must be 1; "
                "give Pr[K = 0], Pr[K = 1], ... along the last axis"
            )

    @property
    def mean(self) -> Any:
        """E[K]."""
        return np.sum(self.probabilities * np.arange(np.shape(self.probabilities)[-1]), axis=-1)

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        xp = namespace(self.probabilities, y)
        each = xp.moveaxis(xp.asarray(self.probabilities), -1, 0)
        return generating.categorical(each, xp.broadcast_to(y, np.broadcast_shapes(np.shape(y), each.shape[1:])))

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]:
        return generating.categorical_steepness(np.moveaxis(self.probabilities, -1, 0), x)

    def rise(self, x: Any, y: Any, d: Any) -> Any:
        return generating.categorical_rise(np.moveaxis(self.probabilities, -1, 0), x, d)

    def probability(self, k: Any) -> np.ndarray:
        return self._at(np.asarray(self.probabilities), check("k", k, WHOLE_K))

    def survival(self, k: Any) -> np.ndarray:
        beyond = np.cumsum(np.asarray(self.probabilities)[..., ::-1], axis=-1)[..., ::-1]
        return self._at(beyond[..., 1:], check("k", k, WHOLE_K))

    @staticmethod
    def _at(values: np.ndarray, k: Any) -> np.ndarray:
        """values[..., k], 0 beyond the last."""
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1))], axis=-1)
        index = np.minimum(k, values.shape[-1] - 1).astype(int)
        shape = np.broadcast_shapes(values.shape[:-1], index.shape)
        values = np.broadcast_to(values, shape + values.shape[-1:])
        return np.take_along_axis(values, np.broadcast_to(index, shape)[..., None], axis=-1)[..., 0]


def TwoPoint(few: int, many: int, probability_of_few: Any) -> Categorical:
    """K = ``few`` with ``probability_of_few``, else ``many``: the Categorical law on 0, ..., many.

    Parameters
    ----------
    few, many : int
        Whole numbers, few < many <= 10^6.
    probability_of_few : array_like in [0, 1]

    Returns
    -------
    Categorical

    Raises
    ------
    InputError
        The numbers are not whole or not in order, or the probability is outside [0, 1].

    References
    ----------
    Xiang, Wang and Wang (2024), equation 21.

    >>> float(TwoPoint(1, 100, 0.1).mean.round(9))
    90.1
    """
    last = int(check("many", many, Constraint("use a whole number from 1 to 10^6", 1, 1e6, integral=True)))
    first = int(check("few", few, Constraint("use a whole number below many", 0, last - 1, integral=True)))
    share = np.asarray(check("probability_of_few", probability_of_few, PROBABILITY))
    probabilities = np.zeros((*share.shape, last + 1))
    probabilities[..., first], probabilities[..., last] = share, 1.0 - share
    return Categorical(probabilities)


def largest_k(law: Law) -> float:
    """The largest k of positive probability of one law; inf where there is none."""
    if isinstance(law, PointMass):
        return float(law.repetitions)
    if isinstance(law, Binomial):
        return float(law.trials)
    if isinstance(law, Categorical):
        return float(np.max(np.flatnonzero(np.asarray(law.probabilities) > 0.0), initial=0))
    return np.inf
