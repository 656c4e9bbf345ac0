"""Laws of K, the number of candidates that a private selection tries. A law is a frozen pytree, or a batch of laws."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from jax.typing import ArrayLike
from scipy.special import gammaln, pdtrc

from jaxacct.core.types import Index, Leaf, Numbers
from jaxacct.core.validation import (
    COUNT,
    LARGEST_COUNT,
    OPEN_PROBABILITY,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    Tracer,
    broadcast_shape,
    check,
    refuse_where,
)
from jaxacct.engines.devices import double_precision
from jaxacct.kernels import generating
from jaxacct.kernels.arrays import namespace
from jaxacct.mechanisms.base import register
from jaxacct.samplers.exact_draws import generator

ETA_RANGE = Constraint("use an eta above -1, such as 1 (geometric), 0 (logarithmic) or -0.5", -1, lower_open=True)
WHOLE_K = Constraint("use whole numbers of {name}", 0, LARGEST_COUNT, integral=True)
"""Allowed values of a number k of candidates."""
LEAST = 1e-290
"""A derivative of phi, the generating function of K, is trusted if it exceeds this. A smaller one may lack digits."""
_GAUSS_POINTS, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(10)


class Law(ABC):
    """A law of K, the number of candidates of a selection. Fields that are arrays make a batch of laws.

    K must be drawn independently of the data.  If candidates are i.i.d., K and the running time must be kept secret
    (README.md of this folder, "What every guarantee here assumes").  Subclasses are frozen dataclasses.

    Parameters
    ----------
    fields
        Fields of the subclass, named in ``constraints``: scalars or arrays that broadcast.

    >>> from jaxacct import selection
    >>> law = selection.Geometric([0.5, 0.1])
    >>> isinstance(law, selection.Law), law.shape, law.element((1,)).mean
    (True, (2,), np.float64(10.0))
    """

    constraints: ClassVar[Mapping[str, Constraint]] = {}
    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of the fields whose last axis belongs to one law. The axes before it are the batch."""

    if TYPE_CHECKING:

        @property
        def mean(self) -> Any:
            """The mean E[K]."""

    def __post_init__(self) -> None:
        for name, constraint in self.constraints.items():
            value = getattr(self, name)
            if not isinstance(value, Tracer):
                object.__setattr__(self, name, check(name, value, constraint))
        _ = self.shape

    def __init_subclass__(cls, **options: Any) -> None:
        """Replace inherited `slopes`, `steepness` and `rise` by those of `Law` if a subclass defines `generating`."""
        super().__init_subclass__(**options)
        if "generating" in cls.__dict__:
            for name in ("slopes", "steepness", "rise"):
                if name not in cls.__dict__:
                    setattr(cls, name, getattr(Law, name))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the batch. The fields broadcast to it."""
        each = {name: np.shape(getattr(self, name)) for name in self.constraints}
        return broadcast_shape({name: s[:-1] if name in self.vectors else s for name, s in each.items()})

    @abstractmethod
    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        """Return (phi, phi', phi'') of `phi(x) = E[x^K]` at x = 1 - y, for y in [0, 1] that broadcasts with the batch.

        NumPy arrays give NumPy arrays.  Inside ``jax.enable_x64()`` the method is traceable.  The relative error of the
        answer is about 1e-13, also for y near 0 and near 1.
        """

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        """Return only (phi', phi'') of `generating`. A law overrides this method if phi itself takes much time."""
        return self.generating(y)[1:]

    def steepness(self, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        """Return (log phi', phi''/phi') at x, given accurate x and y = 1 - x, or (-inf, 0) where phi' underflows."""
        return _steepness(*evaluated(self, y)[1:])

    def rise(self, x: np.ndarray, y: np.ndarray, d: np.ndarray) -> Numbers:
        """Return `phi(x) - phi(x - d)`, as accurate as x, y = 1 - x and d, by quadrature of phi'."""
        at = np.asarray(d) * (0.5 - 0.5 * _GAUSS_POINTS.reshape(-1, *(1,) * np.ndim(d)))
        return 0.5 * np.asarray(d) * np.tensordot(_GAUSS_WEIGHTS, evaluated(self, np.minimum(y + at, 1.0))[1], 1)

    @abstractmethod
    def probability(self, k: ArrayLike) -> np.ndarray:
        """Return Pr[K = k] for whole numbers k >= 0 that broadcast with the batch."""

    @abstractmethod
    def survival(self, k: ArrayLike) -> np.ndarray:
        """Return Pr[K > k] for whole numbers k >= 0 that broadcast with the batch."""

    def quantile(self, p: ArrayLike) -> np.ndarray:
        """Return the least k with Pr[K <= k] >= p, for p in [0, 1) that broadcasts with the batch.

        A k above 2**53 raises InputError.
        """
        below_one = Constraint("use a number in [0, 1)", 0, 1, upper_open=True)
        return self._first_at_most(1.0 - np.asarray(check("p", p, below_one)))

    def sample(self, rng: random.Random | None = None) -> int:
        """Draw one K, which must stay secret unless candidates are adaptive. A batch of laws raises InputError.

        For i.i.d. candidates no guarantee holds against observers who learn K, or how long the selection ran.  If the
        tails Pr[K > k] have relative errors of at most r = 1e-11, the drawn K has a total variation distance of at most
        `2 r E[K] + 2^-53 (n + 2) + 2 Pr[K > n]` from the law, for every n (README.md of this folder, "What is drawn").

        Parameters
        ----------
        rng : random.Random, optional
            Defaults to the operating system's generator.  Give `rng` only to repeat an experiment without private data.
        """
        if self.shape:
            raise InputError(f"a batch of laws of shape {self.shape} has no single K; sample one law at a time")
        return int(self._first_at_most(np.asarray(1.0 - generator(rng).random()), strict=True))

    def element(self, index: tuple[int, ...]) -> Self:
        """Return the law at `index` of the batch."""
        return type(self)(**{name: value[index] for name, value in self._broadcast(self.shape)})

    def flattened(self, shape: tuple[int, ...]) -> Self:
        """Return the laws broadcast to a batch shape and flattened to one axis, over which kernels are mapped."""
        each = {name: value.astype(np.float64) for name, value in self._broadcast(shape)}
        return type(self)(**{name: value.reshape(-1, *value.shape[len(shape) :]) for name, value in each.items()})

    def _broadcast(self, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each field's name and its values, broadcast to a batch shape."""
        for name in self.constraints:
            value = np.asarray(getattr(self, name))
            yield name, np.broadcast_to(value, shape + (value.shape[-1:] if name in self.vectors else ()))

    def taken(self, index: Index) -> Self:
        """Return the laws, unchecked, at an index of a flattened batch. An index `(rows, None)` adds an axis."""
        found = object.__new__(type(self))
        for name in self.constraints:
            object.__setattr__(found, name, getattr(self, name)[index])
        return found

    def _first_at_most(self, level: np.ndarray, strict: bool = False) -> np.ndarray:
        """Return the least k with Pr[K > k] <= level. If `strict`, return the least k with Pr[K > k] < level."""

        def done(k: np.ndarray) -> np.ndarray:
            tail = self.survival(k)
            return tail < level if strict else tail <= level

        shape = np.broadcast_shapes(self.shape, level.shape)
        below, above = np.full(shape, -1.0), np.zeros(shape)
        while not np.all(found := done(above)):
            if np.any(2.0 * above >= LARGEST_COUNT):
                raise InputError("the quantile exceeds 2**53 candidates; use a larger gamma or a smaller p")
            below, above = np.where(found, below, above), np.where(found, above, 2.0 * above + 1.0)
        while np.any(above - below > 1.0):
            middle = np.floor(0.5 * (below + above))
            middle = np.where(middle == below, above, middle)
            found = done(middle)
            below, above = np.where(found, below, middle), np.where(found, middle, above)
        return above

    def __eq__(self, other: object) -> bool:
        """Return whether the other law has the same class, and its fields have the same shapes and values."""
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.constraints)

    def __hash__(self) -> int:
        return hash((type(self), *(np.asarray(getattr(self, name)).tobytes() for name in self.constraints)))


def require_law(name: str, value: Any) -> None:
    """Raise InputError if `value` is not a law of K. The message calls the argument `name`."""
    if not isinstance(value, Law):
        raise InputError(f"{name} = {value!r:.40} must be a law of K; use one such as selection.Geometric(0.1)")


def rebuilt(law: Law) -> Law:
    """Return the law rebuilt through its constructor, which checks every field."""
    return type(law)(**{name: getattr(law, name) for name in law.constraints})


def _steepness(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (log phi', phi''/phi') from phi' and phi'', or (-inf, 0) where phi' underflows."""
    seen = first > LEAST
    safe = np.where(seen, first, 1.0)
    return np.where(seen, np.log(safe), -np.inf), np.where(seen, second, 0.0) / safe


def evaluated(law: Law, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `law.generating(y)` as NumPy float64 on the host, even for a user's law that calls JAX."""
    with double_precision(), np.errstate(all="ignore"):
        value, first, second = law.generating(np.asarray(y, np.float64))
    return np.asarray(value), np.asarray(first), np.asarray(second)


@register
class TruncatedNegativeBinomial(Law):
    """Truncated negative binomial law, k >= 1: `Pr[K = k] = (1-gamma)^k/(gamma^-eta - 1) prod_{l<k} (l + eta)/(l + 1)`.

    At eta = 0 the law is logarithmic, and at eta = 1 it is geometric.  The smaller eta is, the less privacy K
    candidates cost, and the more K varies.

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

    eta: Leaf
    gamma: Leaf
    constraints: ClassVar = {"eta": ETA_RANGE, "gamma": OPEN_PROBABILITY}

    @property
    def mean(self) -> Numbers:
        return self._scale() * (1.0 - self.gamma) / self.gamma

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.truncated_negative_binomial(self.eta, self.gamma, y)

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        return generating.grown_base(self.eta, self.gamma, y)[-2:]

    def steepness(self, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        odds, more = (1.0 - self.gamma) / self.gamma, self.eta + 1.0  # phi' = mean (1 + odds y)^-(eta+1)
        return np.log(self.mean) - more * np.log1p(odds * y), more * odds / (1.0 + odds * y)

    def rise(self, x: np.ndarray, y: np.ndarray, d: np.ndarray) -> Numbers:
        # phi(x) - phi(x - d) = mean/odds b^-eta (1 - (1 + odds d/b)^-eta)/eta, with b = 1 + odds y
        odds, flat = (1.0 - self.gamma) / self.gamma, np.abs(self.eta) < 1e-290
        grown = np.log1p(odds * d / (1.0 + odds * y))
        share = np.where(flat, grown, -np.expm1(-self.eta * grown) / np.where(flat, 1.0, self.eta))
        return self.mean / odds * np.exp(-self.eta * np.log1p(odds * y)) * share

    def probability(self, k: ArrayLike) -> np.ndarray:
        k = np.asarray(check("k", k, WHOLE_K))
        at = np.maximum(k, 1.0)
        # for large eta the factors overflow or underflow, while their product does not, so logarithms are added
        grown = np.asarray(self.eta) * np.log(self.gamma) + at * np.log1p(-self.gamma) + self._log_rising(at - 1.0)
        return np.where(k >= 1.0, self._scale() / at * np.exp(grown), 0.0)

    def survival(self, k: ArrayLike) -> np.ndarray:
        """Return Pr[K > k], a Taylor remainder, `_scale (1-gamma)^{k+1} exp(_log_rising + _log_tail)`."""
        k = np.asarray(check("k", k, WHOLE_K))
        if np.any(np.asarray(self.eta) > 1e6):  # the integrand's peak is so narrow that `_log_tail` needs many terms
            raise InputError(f"eta = {np.max(self.eta)!r} must be at most 1e+06 for tails; use a smaller eta")
        log = (k + 1.0) * np.log1p(-self.gamma) + self._log_rising(k) + _log_tail(k, self.eta, self.gamma)
        return np.where(k >= 1.0, np.minimum(self._scale() * np.exp(np.minimum(log, 700.0)), 1.0), 1.0)

    def _scale(self) -> Any:
        """Return `eta/(1 - gamma^eta)`, or at eta = 0 its limit `1/log(1/gamma)`."""
        whole = np.asarray(self.eta) * np.log(self.gamma)
        flat = np.abs(whole) < 1e-290
        return np.where(flat, -1.0 / np.log(self.gamma), -self.eta / np.where(flat, 1.0, np.expm1(whole)))[()]

    def _log_rising(self, k: np.ndarray) -> np.ndarray:
        """Return `log((eta + 1)_k / k!)`, where `(x)_k = x (x + 1) ... (x + k - 1)`."""
        eta, z = np.asarray(self.eta), np.asarray(k) + 1.0
        # from z = 30 on, Stirling's formula gives log-gamma(z + eta) - log-gamma(z), without large terms that cancel
        far = np.maximum(z, 30.0)
        series = lambda x: (1.0 / 12.0 - (1.0 / 360.0 - (1.0 / 1260.0 - 1.0 / (1680.0 * x**2)) / x**2) / x**2) / x
        grown = (far - 0.5) * np.log1p(eta / far) + eta * (np.log(far + eta) - 1.0) + series(far + eta) - series(far)
        return np.where(z < 30.0, gammaln(z + eta) - gammaln(z), grown) - gammaln(eta + 1.0)


def Geometric(gamma: ArrayLike) -> TruncatedNegativeBinomial:
    """Make the geometric law `Pr[K = k] = gamma (1-gamma)^{k-1}`, of mean 1/gamma: negative binomial with eta = 1.

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


def Logarithmic(gamma: ArrayLike) -> TruncatedNegativeBinomial:
    """Make the logarithmic law `Pr[K = k] = (1-gamma)^k/(k log(1/gamma))`: negative binomial with eta = 0.

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
    """Return `log int_0^1 u^k (1 - (1-gamma) u)^{eta-1} du`, k >= 1, by trapezoids in v: u = e^-t, t = e^v/(k+1)."""
    shape = np.broadcast_shapes(np.shape(k), np.shape(eta), np.shape(gamma))
    k, eta, gamma = (np.broadcast_to(x, shape)[..., None] for x in (k, eta, gamma))
    most = float(np.max(eta, initial=1.0))
    # for large eta the integrand has a peak of width eta^-1/2, so the step of v shrinks like that width
    step = 0.16 * min(np.sqrt(16.0 / most), 1.0)
    scaled = np.exp(np.arange(np.floor(-67.2 / step), np.log(600.0 + 2.0 * most) / step) * step)
    t = scaled / (k + 1.0)
    log = np.log(t) - scaled + (eta - 1.0) * np.log(gamma - (1.0 - gamma) * np.expm1(-t))
    top = np.max(log, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(log - top), axis=-1) * step) + top[..., 0]


@register
class Poisson(Law):
    """Poisson law, `Pr[K = k] = e^{-mean} mean^k/k!`. For K = 0 the release is independent of the data.

    Parameters
    ----------
    mean : array_like > 0

    References
    ----------
    Papernot and Steinke (2022).

    >>> float(Poisson(mean=10).probability(0).round(9))
    4.54e-05
    """

    mean: Leaf
    constraints: ClassVar = {"mean": POSITIVE}

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.poisson(self.mean, y)

    def steepness(self, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        return np.log(self.mean) - self.mean * y, self.mean + 0.0 * y

    def rise(self, x: np.ndarray, y: np.ndarray, d: np.ndarray) -> Numbers:
        return np.exp(-self.mean * y) * -np.expm1(-self.mean * d)

    def probability(self, k: ArrayLike) -> np.ndarray:
        from scipy.stats import poisson

        return np.asarray(poisson.pmf(check("k", k, WHOLE_K), self.mean))

    def survival(self, k: ArrayLike) -> np.ndarray:
        return np.asarray(pdtrc(check("k", k, WHOLE_K), self.mean))


class _Trials(Law):
    """The law of the number of successes in n trials, each of probability p."""

    @property
    @abstractmethod
    def _trials(self) -> tuple[Any, Any]:
        """The number n and the probability p of the trials."""

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        return generating.binomial(*self._trials, y)

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        return generating.binomial_slopes(*self._trials, y)

    def steepness(self, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        n, p = self._trials
        log_base, base = generating.binomial_base(p, x, y)
        return np.log(n * p) + (n - 1.0) * log_base, (n - 1.0) * p / base

    def rise(self, x: np.ndarray, y: np.ndarray, d: np.ndarray) -> Numbers:
        n, p = self._trials
        log_base, base = generating.binomial_base(p, x, y)
        with np.errstate(divide="ignore"):
            left = np.log1p(-np.minimum(p * d / base, 1.0))
        return np.exp(n * log_base) * -np.expm1(n * left)


@register
class Binomial(_Trials):
    """Binomial law, `Pr[K = k] = C(n, k) p^k (1-p)^{n-k}`. For K = 0 the release is independent of the data.

    Parameters
    ----------
    trials : array_like of whole numbers >= 1
        n, the number of trials.
    probability_of_run : array_like in (0, 1]
        p, the probability that a trial adds 1 to K.

    References
    ----------
    jaxacct/selection/README.md, "The worst score": the theorem there holds for every law of K.

    >>> float(Binomial(20, 0.5).mean)
    10.0
    """

    trials: Leaf
    probability_of_run: Leaf
    constraints: ClassVar = {
        "trials": COUNT,
        "probability_of_run": Constraint("use a probability above 0 and at most 1", 0, 1, lower_open=True),
    }

    @property
    def mean(self) -> Numbers:
        return np.multiply(self.trials, self.probability_of_run)[()]

    @property
    def _trials(self) -> tuple[Any, Any]:
        return self.trials, self.probability_of_run

    def probability(self, k: ArrayLike) -> np.ndarray:
        from scipy.stats import binom

        return np.asarray(binom.pmf(check("k", k, WHOLE_K), self.trials, self.probability_of_run))

    def survival(self, k: ArrayLike) -> np.ndarray:
        from scipy.stats import binom

        return np.asarray(binom.sf(check("k", k, WHOLE_K), self.trials, self.probability_of_run))


@register
class PointMass(_Trials):
    """Law of a fixed, known K = ``repetitions``.

    For i.i.d. candidates a fixed K costs more privacy than a geometric or Poisson law of the same mean.

    Parameters
    ----------
    repetitions : array_like of whole numbers >= 1

    References
    ----------
    jaxacct/selection/README.md, "The worst score": the theorem there holds for every law of K.

    >>> int(PointMass(10).quantile(0.5))
    10
    """

    repetitions: Leaf
    constraints: ClassVar = {"repetitions": COUNT}

    @property
    def mean(self) -> Numbers:
        return self.repetitions

    @property
    def _trials(self) -> tuple[Any, Any]:
        return self.repetitions, 1.0

    def probability(self, k: ArrayLike) -> np.ndarray:
        return np.where(np.equal(check("k", k, WHOLE_K), self.repetitions), 1.0, 0.0)

    def survival(self, k: ArrayLike) -> np.ndarray:
        return np.where(np.less(check("k", k, WHOLE_K), self.repetitions), 1.0, 0.0)


@register
class Categorical(Law):
    """Law on 0, 1, ..., n - 1 given by a list: Pr[K = k] = ``probabilities``[..., k].

    Parameters
    ----------
    probabilities : array_like in [0, 1]
        They sum to 1 (to 1e-13) along the last axis. The axes before it are the batch.

    References
    ----------
    jaxacct/selection/README.md, "The worst score": the theorem there holds for every law of K.

    >>> float(Categorical([0.0, 0.5, 0.5]).mean)
    1.5
    """

    probabilities: Leaf
    constraints: ClassVar = {"probabilities": PROBABILITY}
    vectors: ClassVar = ("probabilities",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.probabilities, Tracer):
            return
        total = np.sum(self.probabilities, axis=-1) if np.ndim(self.probabilities) else np.zeros(())
        rest = "must be 1; give Pr[K = 0], Pr[K = 1], ... along the last axis"
        # 1e-13 allows for the rounding of a sum of many terms
        refuse_where(np.abs(total - 1.0) > 1e-13, "sum of probabilities", total, rest)

    @property
    def mean(self) -> Numbers:
        return np.sum(self.probabilities * np.arange(np.shape(self.probabilities)[-1]), axis=-1)

    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        xp = namespace(self.probabilities, y)
        each = xp.moveaxis(xp.asarray(self.probabilities), -1, 0)
        return generating.categorical(each, xp.broadcast_to(y, np.broadcast_shapes(np.shape(y), each.shape[1:])))

    def steepness(self, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        return _steepness(*generating.polynomial(np.moveaxis(self.probabilities, -1, 0), x)[1:])

    def rise(self, x: np.ndarray, y: np.ndarray, d: np.ndarray) -> Numbers:
        return generating.categorical_rise(np.moveaxis(self.probabilities, -1, 0), x, d)

    def probability(self, k: ArrayLike) -> np.ndarray:
        return self._at(np.asarray(self.probabilities), check("k", k, WHOLE_K))

    def survival(self, k: ArrayLike) -> np.ndarray:
        beyond = np.cumsum(np.asarray(self.probabilities)[..., ::-1], axis=-1)[..., ::-1]
        return self._at(beyond[..., 1:], check("k", k, WHOLE_K))

    @staticmethod
    def _at(values: np.ndarray, k: Any) -> np.ndarray:
        """Return values[..., k], or 0 where k is beyond the last index."""
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1))], axis=-1)
        index = np.minimum(k, values.shape[-1] - 1).astype(int)
        shape = np.broadcast_shapes(values.shape[:-1], index.shape)
        values = np.broadcast_to(values, shape + values.shape[-1:])
        return np.take_along_axis(values, np.broadcast_to(index, shape)[..., None], axis=-1)[..., 0]


def TwoPoint(few: int, many: int, probability_of_few: ArrayLike) -> Categorical:
    """Make the law under which K is ``few`` with probability ``probability_of_few``, and otherwise ``many``.

    Parameters
    ----------
    few, many : int
        Whole numbers, few < many <= 10^6.
    probability_of_few : array_like in [0, 1]

    Returns
    -------
    Categorical

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
    """Return the largest k that has a positive probability under one law. Return inf if K is unbounded."""
    if isinstance(law, PointMass):
        return float(law.repetitions)
    if isinstance(law, Binomial):
        return float(law.trials)
    if isinstance(law, Categorical):
        return float(np.max(np.flatnonzero(np.asarray(law.probabilities) > 0.0), initial=0))
    return np.inf


def derivative(law: Law, order: int) -> tuple[float, Law]:
    """Return (scale, other law) with phi^(order) = scale psi', where phi generates `law` and psi the other law.

    The scale is 0 if K is always below `order` >= 2 (README.md of this folder, "The best j").
    """
    more = order - 1
    if more == 0:
        return 1.0, law
    none = 0.0, law
    if type(law) is TruncatedNegativeBinomial:
        other = TruncatedNegativeBinomial(law.eta + more, law.gamma)
        with np.errstate(over="ignore"):
            steps = [(law.eta + i) * ((1.0 - law.gamma) / law.gamma) for i in range(1, order)]
            return float(law.mean * np.prod(steps) / other.mean), other
    if type(law) is Poisson:
        with np.errstate(over="ignore"):
            return max(float(np.float64(law.mean) ** more), LEAST), law
    if type(law) is Binomial:
        trials, share = float(law.trials) - more, law.probability_of_run
        scale = math.prod(trials + i for i in range(more, 0, -1))
        return (max(float(scale * share**more), LEAST), Binomial(trials, share)) if trials >= 1.0 else none
    if type(law) is PointMass:
        count = float(law.repetitions)
        return (math.prod(count - i for i in range(more)), PointMass(count - more)) if count > more else none
    if type(law) is Categorical:
        mass = np.asarray(law.probabilities)
        k = np.arange(more, mass.size, dtype=np.float64)
        weight = mass[more:] * np.prod([k - i for i in range(more)], axis=0)
        if not weight[1:].any():
            return none
        share = weight / np.max(weight)  # divided by the largest weight, since the sum of the weights may underflow
        return max(math.fsum(weight), LEAST), Categorical(share / math.fsum(share))
    raise InputError(
        f"k of type {type(law).__name__} has no higher derivatives; use a law of jaxacct.selection, such as Categorical"
    )


def probability_of(law: Law, count: int) -> float:
    """Return an upper bound of `Pr[K = count] = phi^(count)(0)/count!`, count >= 1, phi the generating function."""
    scale, other = derivative(law, count)
    found = (scale * float(evaluated(other, np.ones(()))[1]) * (1.0 + 4e-12) + LEAST) / math.factorial(count)
    return min(found, 1.0) if scale > 0.0 else 0.0
