"""The truncated negative binomial laws of K, with the geometric and the logarithmic law among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jax.typing import ArrayLike

from jaxacct.core.validation import OPEN_PROBABILITY, Constraint, InputError, check
from jaxacct.kernels import generating
from jaxacct.mechanisms.base import register
from jaxacct.selection.law_of_k import WHOLE_K, Law

__all__ = ["ETA_RANGE", "Geometric", "Logarithmic", "TruncatedNegativeBinomial"]

ETA_RANGE = Constraint("use an eta above -1, such as 1 (geometric), 0 (logarithmic) or -0.5", -1, lower_open=True)
"""What eta must be."""
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

    References
    ----------
    Papernot and Steinke (2022).

    >>> TruncatedNegativeBinomial(eta=[1.0, 0.0], gamma=0.01).mean.round(5)
    array([100.     ,  21.49758])
    """

    eta: Any
    gamma: Any
    constraints: ClassVar = {"eta": ETA_RANGE, "gamma": OPEN_PROBABILITY}

    @property
    def mean(self) -> Any:
        """E[K]."""
        return self._scale() * (1.0 - self.gamma) / self.gamma

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.truncated_negative_binomial(self.eta, self.gamma, y)

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        return generating.truncated_negative_binomial_slopes(self.eta, self.gamma, y)

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]:
        return generating.truncated_negative_binomial_steepness(self.mean, self.eta, self.gamma, y)

    def rise(self, x: Any, y: Any, d: Any) -> Any:
        return generating.truncated_negative_binomial_rise(self.mean, self.eta, self.gamma, y, d)

    def probability(self, k: Any) -> np.ndarray:
        k = np.asarray(check("k", k, WHOLE_K))
        at = np.maximum(k, 1.0)
        # in logarithms: for large eta the factors leave float64 while their product does not
        grown = np.asarray(self.eta) * np.log(self.gamma) + at * np.log1p(-self.gamma) + self._log_rising(at - 1.0)
        return np.where(k >= 1.0, self._scale() / at * np.exp(grown), 0.0)

    def survival(self, k: Any) -> np.ndarray:
        """`c (1-gamma)^{k+1} (eta+1)_k/k! int_0^1 u^k (1-(1-gamma)u)^{eta-1} du`, by Taylor's remainder of phi."""
        k = np.asarray(check("k", k, WHOLE_K))
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

    References
    ----------
    Papernot and Steinke (2022); the geometric law is that of Liu and Talwar (2019).

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

    References
    ----------
    Papernot and Steinke (2022).

    >>> float(Logarithmic(0.01).mean.round(5))
    21.49758
    """
    return TruncatedNegativeBinomial(0.0, gamma)


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
