"""Laws of K, the number of candidates that a private selection tries: frozen pytrees, scalars or batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxacct.kernels import generating
from jaxacct.mechanisms.base import register
from jaxacct.selection.law_of_k import LARGEST_K, Law, evaluated
from jaxacct.validation import (
    COUNT,
    OPEN_PROBABILITY,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    check,
    is_tracer,
)

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
    "evaluated",
    "largest_k",
]

_ETA = Constraint("use an eta above -1, such as 1 (geometric), 0 (logarithmic) or -0.5", -1, lower_open=True)
_TRIED = Constraint("use a probability above 0 and at most 1", 0, 1, lower_open=True)
_WHOLE = Constraint("use whole numbers of {name}", 0, LARGEST_K, integral=True)
_SUM_ERROR = 1e-13
"""The probabilities of a Categorical law sum to 1 up to this: a few roundings of a sum of many."""
_TAIL_STEP = 0.16
"""Step of the trapezoid rule in log t that computes tails; see `_log_tail`."""
_SHARP_ETA = 16.0
"""eta from which on that step is finer, since the integrand has a peak of width eta^-1/2."""
_LARGEST_ETA = 1e6
"""Largest eta of which tails are computed; beyond it the integrand is too sharp for the number of terms."""


@register
@dataclass(frozen=True, eq=False)
class TruncatedNegativeBinomial(Law):
    """`Pr[K = k] = (1-gamma)^k/(gamma^-eta - 1) prod_{l<k} (l + eta)/(l + 1)`, k >= 1; at eta = 0 logarithmic.

    The mean is `eta (1/gamma - 1)/(1 - gamma^eta)`.  eta = 1 is the geometric law.  The smaller eta, the less privacy K
    candidates cost and the more K varies.

    Parameters
    ----------
    eta : array_like > -1
    gamma : array_like in (0, 1)

    Raises
    ------
    InputError
        A field is outside its range, or the fields do not broadcast.

    References
    ----------
    Papernot and Steinke (2022).

    >>> TruncatedNegativeBinomial(eta=[1.0, 0.0], gamma=0.01).mean.round(5)
    array([100.     ,  21.49758])
    """

    eta: Any
    gamma: Any
    constraints: ClassVar = {"eta": _ETA, "gamma": OPEN_PROBABILITY}

    @property
    def mean(self) -> Any:
        return self._scale() * (1.0 - self.gamma) / self.gamma

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.truncated_negative_binomial(self.eta, self.gamma, jnp.asarray(y))

    def probability(self, k: Any) -> np.ndarray:
        k = np.asarray(check("k", k, _WHOLE))
        at = np.maximum(k, 1.0)
        # in logarithms: for large eta the factors leave float64 while their product does not
        grown = np.asarray(self.eta) * np.log(self.gamma) + at * np.log1p(-self.gamma) + self._log_rising(at - 1.0)
        return np.where(k >= 1.0, self._scale() / at * np.exp(grown), 0.0)

    def survival(self, k: Any) -> np.ndarray:
        """`c (1-gamma)^{k+1} (eta+1)_k/k! int_0^1 u^k (1-(1-gamma)u)^{eta-1} du`, by Taylor's remainder of phi."""
        k = np.asarray(check("k", k, _WHOLE))
        if np.any(np.asarray(self.eta) > _LARGEST_ETA):
            raise InputError(
                f"eta = {np.max(self.eta)!r} must be at most {_LARGEST_ETA:g} for tails; use a smaller eta"
            )
        log = (k + 1.0) * np.log1p(-self.gamma) + self._log_rising(k) + _log_tail(k, self.eta, self.gamma)
        return np.where(k >= 1.0, np.minimum(self._scale() * np.exp(np.minimum(log, 700.0)), 1.0), 1.0)

    def _scale(self) -> Any:
        """`eta/(1 - gamma^eta)`, at eta = 0 `1/log(1/gamma)`."""
        whole = np.asarray(self.eta) * np.log(self.gamma)
        flat = np.abs(whole) < 1e-290
        return np.where(flat, -1.0 / np.log(self.gamma), -self.eta / np.where(flat, 1.0, np.expm1(whole)))[()]

    def _log_rising(self, k: np.ndarray) -> np.ndarray:
        """`log (eta + 1)_k/k!`."""
        from scipy.special import gammaln  # takes a while to import: only where it is needed

        eta, z = np.asarray(self.eta), np.asarray(k) + 1.0
        far = np.maximum(z, 30.0)  # from there by Stirling's series, whose leading terms would cancel as they stand
        series = lambda x: (1.0 / 12.0 - (1.0 / 360.0 - (1.0 / 1260.0 - 1.0 / (1680.0 * x**2)) / x**2) / x**2) / x
        grown = (far - 0.5) * np.log1p(eta / far) + eta * (np.log(far + eta) - 1.0) + series(far + eta) - series(far)
        return np.where(z < 30.0, gammaln(z + eta) - gammaln(z), grown) - gammaln(eta + 1.0)


def Geometric(gamma: Any) -> TruncatedNegativeBinomial:
    """`Pr[K = k] = gamma (1-gamma)^{k-1}`: the truncated negative binomial law with eta = 1, of mean 1/gamma.

    Parameters
    ----------
    gamma : array_like in (0, 1)

    Returns
    -------
    TruncatedNegativeBinomial

    Raises
    ------
    InputError
        gamma is outside its range.

    >>> float(Geometric(0.1).mean.round(9))
    10.0
    """
    return TruncatedNegativeBinomial(1.0, gamma)


def Logarithmic(gamma: Any) -> TruncatedNegativeBinomial:
    """`Pr[K = k] = (1-gamma)^k/(k log(1/gamma))`: the truncated negative binomial law with eta = 0.

    Parameters
    ----------
    gamma : array_like in (0, 1)

    Returns
    -------
    TruncatedNegativeBinomial

    Raises
    ------
    InputError
        gamma is outside its range.

    >>> float(Logarithmic(0.01).mean.round(5))
    21.49758
    """
    return TruncatedNegativeBinomial(0.0, gamma)


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

    >>> float(Poisson(mean=10).probability(0).round(9))
    4.54e-05
    """

    mean: Any
    constraints: ClassVar = {"mean": POSITIVE}

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.poisson(self.mean, jnp.asarray(y))

    def probability(self, k: Any) -> np.ndarray:
        from scipy.stats import poisson

        return np.asarray(poisson.pmf(check("k", k, _WHOLE), self.mean))

    def survival(self, k: Any) -> np.ndarray:
        from scipy.special import pdtrc

        return np.asarray(pdtrc(check("k", k, _WHOLE), self.mean))


@register
@dataclass(frozen=True, eq=False)
class Binomial(Law):
    """`Pr[K = k] = C(n, k) p^k (1-p)^{n-k}`, n ``trials`` of ``probability_of_run`` p.

    K = 0, of probability (1-p)^n, releases something that is independent of the data.

    Parameters
    ----------
    trials : array_like of whole numbers >= 1
    probability_of_run : array_like in (0, 1]

    Raises
    ------
    InputError
        A field is outside its range, or the fields do not broadcast.

    >>> float(Binomial(20, 0.5).mean)
    10.0
    """

    trials: Any
    probability_of_run: Any
    constraints: ClassVar = {"trials": COUNT, "probability_of_run": _TRIED}

    @property
    def mean(self) -> Any:
        return np.multiply(self.trials, self.probability_of_run)[()]

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.binomial(self.trials, self.probability_of_run, jnp.asarray(y))

    def probability(self, k: Any) -> np.ndarray:
        from scipy.stats import binom

        return np.asarray(binom.pmf(check("k", k, _WHOLE), self.trials, self.probability_of_run))

    def survival(self, k: Any) -> np.ndarray:
        from scipy.stats import binom

        return np.asarray(binom.sf(check("k", k, _WHOLE), self.trials, self.probability_of_run))


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

    >>> int(PointMass(10).quantile(0.5))
    10
    """

    repetitions: Any
    constraints: ClassVar = {"repetitions": COUNT}

    @property
    def mean(self) -> Any:
        return self.repetitions

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.binomial(self.repetitions, 1.0, jnp.asarray(y))

    def probability(self, k: Any) -> np.ndarray:
        return np.where(np.equal(check("k", k, _WHOLE), self.repetitions), 1.0, 0.0)

    def survival(self, k: Any) -> np.ndarray:
        return np.where(np.less(check("k", k, _WHOLE), self.repetitions), 1.0, 0.0)


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

    >>> float(Categorical([0.0, 0.5, 0.5]).mean)
    1.5
    """

    probabilities: Any
    constraints: ClassVar = {"probabilities": PROBABILITY}
    vectors: ClassVar = ("probabilities",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_tracer(self.probabilities):
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
        return np.sum(self.probabilities * np.arange(np.shape(self.probabilities)[-1]), axis=-1)

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        each = jnp.moveaxis(jnp.asarray(self.probabilities), -1, 0)
        y = jnp.asarray(y)
        return generating.categorical(each, jnp.broadcast_to(y, jnp.broadcast_shapes(y.shape, each.shape[1:])))

    def probability(self, k: Any) -> np.ndarray:
        return self._at(np.asarray(self.probabilities), check("k", k, _WHOLE))

    def survival(self, k: Any) -> np.ndarray:
        beyond = np.cumsum(np.asarray(self.probabilities)[..., ::-1], axis=-1)[..., ::-1]
        return self._at(beyond[..., 1:], check("k", k, _WHOLE))

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


def _log_tail(k: np.ndarray, eta: Any, gamma: Any) -> np.ndarray:
    """`log int_0^1 u^k (1 - (1-gamma) u)^{eta-1} du`, k >= 1: the trapezoid rule in v, u = e^-t, t = e^v/(k+1)."""
    shape = np.broadcast_shapes(np.shape(k), np.shape(eta), np.shape(gamma))
    k, eta, gamma = (np.broadcast_to(x, shape)[..., None] for x in (k, eta, gamma))
    most = float(np.max(eta, initial=1.0))
    step = _TAIL_STEP * min(np.sqrt(_SHARP_ETA / most), 1.0)  # for large eta the integrand has a peak of width eta^-1/2
    scaled = np.exp(np.arange(np.floor(-67.2 / step), np.log(600.0 + 2.0 * most) / step) * step)
    t = scaled / (k + 1.0)
    kernel = gamma - (1.0 - gamma) * np.expm1(-t)
    log = np.log(t) - scaled + (eta - 1.0) * np.log(kernel)
    top = np.max(log, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(log - top), axis=-1) * step) + top[..., 0]
