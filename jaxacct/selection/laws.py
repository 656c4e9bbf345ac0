"""Laws of K, the number of candidates that a private selection tries: frozen pytrees, scalars or batches."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxacct.kernels import generating
from jaxacct.mechanisms.base import register
from jaxacct.samplers.exact import generator
from jaxacct.validation import (
    COUNT,
    OPEN_PROBABILITY,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    broadcast_shape,
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
]

LARGEST = 2**53
"""Quantiles beyond this are refused."""
_ETA = Constraint("use an eta above -1, such as 1 (geometric), 0 (logarithmic) or -0.5", -1, lower_open=True)
_TRIED = Constraint("use a probability above 0 and at most 1", 0, 1, lower_open=True)
_WHOLE = Constraint("use whole numbers of {name}", 0, LARGEST, integral=True)
_BELOW_ONE = Constraint("use a {name} in [0, 1)", 0, 1, upper_open=True)
_SUM = 1e-13
_NODES = np.arange(-420, 40) * 0.16
"""Nodes of the trapezoid rule in log t; see `_tail`."""


class Law(ABC):
    """A law of K, or a batch of them: one per element of the broadcast of its numeric fields.

    K must be drawn independently of the data and kept secret, the running time included (README.md).
    Subclasses are frozen dataclasses made pytrees by ``register``, checked as mechanisms are; tracers pass.
    """

    constraints: ClassVar[Mapping[str, Constraint]] = {}
    vectors: ClassVar[tuple[str, ...]] = ()
    """Fields whose last axis belongs to one law; the axes before it are the batch."""

    if TYPE_CHECKING:

        @property
        def mean(self) -> Any:
            """E[K]."""

    def __post_init__(self) -> None:
        for name, constraint in self.constraints.items():
            value = getattr(self, name)
            if not is_tracer(value):
                object.__setattr__(self, name, check(name, value, constraint))
        _ = self.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The batch shape that the fields broadcast to."""
        each = {name: np.shape(getattr(self, name)) for name in self.constraints}
        return broadcast_shape({name: s[:-1] if name in self.vectors else s for name, s in each.items()})

    @abstractmethod
    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        """(phi, phi', phi'') of `phi(x) = E[x^K]` at x = 1 - y, y in [0, 1]; broadcasts with the batch.

        Traceable, to be called inside ``jax.enable_x64()``; relatively accurate to about 1e-13 near both ends.
        """

    @abstractmethod
    def probability(self, k: Any) -> np.ndarray:
        """Pr[K = k] for whole numbers k >= 0 that broadcast with the batch."""

    @abstractmethod
    def survival(self, k: Any) -> np.ndarray:
        """Pr[K > k] for whole numbers k >= 0 that broadcast with the batch."""

    def quantile(self, p: Any) -> np.ndarray:
        """The least k with Pr[K <= k] >= p, p in [0, 1) broadcasting with the batch.

        InputError where it is above 2**53.
        """
        p = np.asarray(check("p", p, _BELOW_ONE))
        return self._first_at_most(1.0 - p)

    def sample(self, rng: random.Random | None = None) -> int:
        """One draw of K, from the operating system's randomness unless a generator is given: a secret.

        Whoever learns K, or how long the selection ran, has more than the privacy guarantees account for.  It is an
        inverse of float64 probabilities at a uniform multiple of 2^-53, within 1e-10 of the law in total variation.
        InputError for a batch.

        rng : a ``random.Random``, only to repeat an experiment without private data.
        """
        if self.shape:
            raise InputError(f"a batch of laws of shape {self.shape} has no single K; sample one law at a time")
        return int(self._first_at_most(np.asarray(1.0 - generator(rng).random()), strict=True))

    def element(self, index: tuple[int, ...]) -> Self:
        """One law of the batch."""
        taken = {}
        for name in self.constraints:
            value = np.asarray(getattr(self, name))
            tail = value.shape[-1:] if name in self.vectors else ()
            taken[name] = np.broadcast_to(value, self.shape + tail)[index]
        return type(self)(**taken)

    def _first_at_most(self, level: np.ndarray, strict: bool = False) -> np.ndarray:
        """The least k with Pr[K > k] <= level, or < level."""

        def done(k: np.ndarray) -> np.ndarray:
            tail = self.survival(k)
            return tail < level if strict else tail <= level

        shape = np.broadcast_shapes(self.shape, level.shape)
        below, above = np.full(shape, -1.0), np.zeros(shape)
        while not np.all(found := done(above)):
            if np.any(2.0 * above >= LARGEST):
                raise InputError("the quantile exceeds 2**53 candidates; use a larger gamma or a smaller p")
            below, above = np.where(found, below, above), np.where(found, above, 2.0 * above + 1.0)
        while np.any(above - below > 1.0):
            middle = np.floor(0.5 * (below + above))
            middle = np.where(middle == below, above, middle)
            found = done(middle)
            below, above = np.where(found, below, middle), np.where(found, middle, above)
        return above

    def __eq__(self, other: object) -> bool:
        """Same class and the same numbers in the same shapes."""
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.constraints)

    def __hash__(self) -> int:
        return hash((type(self), *(np.asarray(getattr(self, name)).tobytes() for name in self.constraints)))


@register
@dataclass(frozen=True, eq=False)
class TruncatedNegativeBinomial(Law):
    """`Pr[K = k] = (1-gamma)^k/(gamma^-eta - 1) prod_{l<k} (l + eta)/(l + 1)`, k >= 1; at eta = 0 logarithmic.

    Mean `eta (1/gamma - 1)/(1 - gamma^eta)`.  eta = 1 is geometric; the smaller eta, the less privacy it costs and
    the more K varies.

    eta : > -1.  gamma : strictly between 0 and 1.  Scalars or arrays.  Source: Papernot, Steinke 2022.

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
        each = self._scale() * self.gamma**self.eta * np.exp(at * np.log1p(-self.gamma)) / at * self._rising(at - 1.0)
        return np.where(k >= 1.0, each, 0.0)

    def survival(self, k: Any) -> np.ndarray:
        """`c (1-gamma)^{k+1} (eta+1)_k/k! int_0^1 u^k (1-(1-gamma)u)^{eta-1} du`, by Taylor's remainder of phi."""
        k = np.asarray(check("k", k, _WHOLE))
        scale = self._scale() * np.exp((k + 1.0) * np.log1p(-self.gamma)) * self._rising(k)
        return np.where(k >= 1.0, np.minimum(scale * _tail(k, self.eta, self.gamma), 1.0), 1.0)

    def _scale(self) -> Any:
        """`eta/(1 - gamma^eta)`, at eta = 0 `1/log(1/gamma)`."""
        whole = np.asarray(self.eta) * np.log(self.gamma)
        flat = np.abs(whole) < 1e-290
        return np.where(flat, -1.0 / np.log(self.gamma), -self.eta / np.where(flat, 1.0, np.expm1(whole)))[()]

    def _rising(self, k: np.ndarray) -> np.ndarray:
        """`(eta + 1)_k/k!`."""
        from scipy.special import betaln  # takes a while to import: only where it is needed

        return np.exp(-betaln(k + 1.0, np.asarray(self.eta) + 1.0)) / (k + np.asarray(self.eta) + 1.0)


def Geometric(gamma: Any) -> TruncatedNegativeBinomial:
    """`Pr[K = k] = gamma (1-gamma)^{k-1}`: the truncated negative binomial law with eta = 1, of mean 1/gamma.

    >>> float(Geometric(0.1).mean.round(9))
    10.0
    """
    return TruncatedNegativeBinomial(1.0, gamma)


def Logarithmic(gamma: Any) -> TruncatedNegativeBinomial:
    """`Pr[K = k] = (1-gamma)^k/(k log(1/gamma))`: the truncated negative binomial law with eta = 0.

    >>> float(Logarithmic(0.01).mean.round(5))
    21.49758
    """
    return TruncatedNegativeBinomial(0.0, gamma)


@register
@dataclass(frozen=True, eq=False)
class Poisson(Law):
    """`Pr[K = k] = e^{-mean} mean^k/k!`; K = 0, of probability e^{-mean}, releases something independent of the data.

    mean : > 0; a scalar or an array.

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
    """`Pr[K = k] = C(n, k) p^k (1-p)^{n-k}`, n ``trials`` of ``probability_of_run`` p; K = 0 as for Poisson.

    trials : whole numbers >= 1.  probability_of_run : in (0, 1].  Scalars or arrays.

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
    """K = ``repetitions``, always: fixed, known, and by far the most costly in privacy.

    repetitions : whole numbers >= 1; a scalar or an array.

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

    probabilities : in [0, 1], summing to 1 (to 1e-13) along the last axis; the axes before it are the batch.

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
        bad = np.abs(total - 1.0) > _SUM
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

    few, many : whole numbers, few < many <= 10^6.  probability_of_few : in [0, 1].

    Source: Xiang, Wang, Wang 2024, equation 21.

    >>> float(TwoPoint(1, 100, 0.1).mean.round(9))
    90.1
    """
    last = int(check("many", many, Constraint("use a whole number from 1 to 10^6", 1, 1e6, integral=True)))
    first = int(check("few", few, Constraint("use a whole number below many", 0, last - 1, integral=True)))
    share = np.asarray(check("probability_of_few", probability_of_few, PROBABILITY))
    probabilities = np.zeros((*share.shape, last + 1))
    probabilities[..., first], probabilities[..., last] = share, 1.0 - share
    return Categorical(probabilities)


def evaluated(law: Law, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`law.generating(y)` on the host: NumPy float64."""
    with jax.enable_x64():
        value, first, second = _generating(law, np.asarray(y, np.float64))
        return np.asarray(value), np.asarray(first), np.asarray(second)


_generating = jax.jit(lambda law, y: law.generating(y))


def _tail(k: np.ndarray, eta: Any, gamma: Any) -> np.ndarray:
    """`int_0^1 u^k (1 - (1-gamma) u)^{eta-1} du`, k >= 1: the trapezoid rule in v, u = e^-t, t = e^v/(k+1)."""
    shape = np.broadcast_shapes(np.shape(k), np.shape(eta), np.shape(gamma))
    k, eta, gamma = (np.broadcast_to(x, shape)[..., None] for x in (k, eta, gamma))
    with np.errstate(under="ignore"):
        scaled = np.exp(_NODES)
        t = scaled / (k + 1.0)
        kernel = gamma - (1.0 - gamma) * np.expm1(-t)
        return np.sum(np.exp(-scaled) * t * kernel ** (eta - 1.0), axis=-1) * (_NODES[1] - _NODES[0])
