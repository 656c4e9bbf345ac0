"""What a law of K is: a frozen pytree with its generating function, probabilities, quantiles and draws."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from jax.typing import ArrayLike

from jaxacct.core.validation import Constraint, InputError, Tracer, broadcast_shape, check
from jaxacct.engines.devices import double_precision
from jaxacct.samplers.exact_draws import generator

__all__ = ["LARGEST_K", "WHOLE_K", "Law", "evaluated", "require_law"]

LARGEST_K = 2**53
"""Largest number of candidates: the whole numbers up to it are float64 exactly.  Quantiles beyond are refused."""
WHOLE_K = Constraint("use whole numbers of {name}", 0, LARGEST_K, integral=True)
"""What a number k of candidates must be."""
_LEAST_SLOPE = 1e-290
"""phi' below which float64 may have lost it."""
_GAUSS_POINTS, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(10)
_BELOW_ONE = Constraint("use a {name} in [0, 1)", 0, 1, upper_open=True)


class Law(ABC):
    """A law of K, the number of candidates of a selection, or a batch of laws: one per element of its fields' shape.

    K must be drawn independently of the data and be kept secret, the running time included (README.md of this folder,
    "What every guarantee here assumes").  Subclasses are frozen dataclasses that ``register`` makes pytrees.  They are
    checked as mechanisms are, and tracers pass.

    Parameters
    ----------
    fields
        Those of the subclass, named in ``constraints``; scalars or arrays that broadcast.

    >>> from jaxacct import selection
    >>> law = selection.Geometric([0.5, 0.1])
    >>> isinstance(law, selection.Law), law.shape, law.element((1,)).mean
    (True, (2,), np.float64(10.0))
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
            if not isinstance(value, Tracer):
                object.__setattr__(self, name, check(name, value, constraint))
        _ = self.shape

    def __init_subclass__(cls, **options: Any) -> None:
        """A class with another generating function takes over no formula that was derived from the one before."""
        super().__init_subclass__(**options)
        if "generating" in cls.__dict__:
            for name in ("slopes", "steepness", "rise"):
                if name not in cls.__dict__:
                    setattr(cls, name, getattr(Law, name))

    @property
    def shape(self) -> tuple[int, ...]:
        """The batch shape that the fields broadcast to."""
        each = {name: np.shape(getattr(self, name)) for name in self.constraints}
        return broadcast_shape({name: s[:-1] if name in self.vectors else s for name, s in each.items()})

    @abstractmethod
    def generating(self, y: ArrayLike) -> tuple[Any, Any, Any]:
        """(phi, phi', phi'') of `phi(x) = E[x^K]` at x = 1 - y, y in [0, 1]; broadcasts with the batch.

        NumPy for NumPy's arrays.  Traceable, then to be called inside ``jax.enable_x64()``.  Relatively accurate to
        about 1e-13 near both ends.
        """

    def slopes(self, y: ArrayLike) -> tuple[Any, Any]:
        """(phi', phi''), as `generating` has them; overridden where phi itself would take much of the time."""
        return self.generating(y)[1:]

    def steepness(self, x: Any, y: Any) -> tuple[Any, Any]:
        """(log phi', phi''/phi') at x, NumPy; y = 1 - x, both relatively accurate.

        -inf and 0 where phi' has left float64.
        """
        _, first, second = evaluated(self, y)
        seen = first > _LEAST_SLOPE
        safe = np.where(seen, first, 1.0)
        return np.where(seen, np.log(safe), -np.inf), np.where(seen, second, 0.0) / safe

    def rise(self, x: Any, y: Any, d: Any) -> Any:
        """`phi(x) - phi(x - d)`, relatively accurate, NumPy; y = 1 - x, all three relatively accurate.

        By ten points of Gauss and Legendre where a law has no closed form.
        """
        at = np.asarray(d) * (0.5 - 0.5 * _GAUSS_POINTS.reshape(-1, *(1,) * np.ndim(d)))
        slopes = evaluated(self, np.minimum(y + at, 1.0))[1]
        return 0.5 * np.asarray(d) * np.tensordot(_GAUSS_WEIGHTS, slopes, 1)

    @abstractmethod
    def probability(self, k: Any) -> np.ndarray:
        """Pr[K = k] for whole numbers k >= 0 that broadcast with the batch."""

    @abstractmethod
    def survival(self, k: Any) -> np.ndarray:
        """Pr[K > k] for whole numbers k >= 0 that broadcast with the batch."""

    def quantile(self, p: Any) -> np.ndarray:
        """The least k with Pr[K <= k] >= p, for p in [0, 1) that broadcasts with the batch.

        InputError where it is above 2**53.
        """
        p = np.asarray(check("p", p, _BELOW_ONE))
        return self._first_at_most(1.0 - p)

    def sample(self, rng: random.Random | None = None) -> int:
        """One draw of K, which must stay secret.

        Whoever learns K, or how long the selection ran, has more than the privacy guarantees account for.  The draw
        inverts float64 tails, which are relatively accurate to r = 1e-11, at a uniform multiple of 2^-53.  For every n
        it is within `2 r E[K] + 2^-53 (n + 2) + 2 Pr[K > n]` of the law in total variation (README.md of this folder,
        "What is drawn").

        Parameters
        ----------
        rng : random.Random, optional
            Only to repeat an experiment without private data; by default the operating system's randomness.

        Returns
        -------
        int

        Raises
        ------
        InputError
            The law is a batch.
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

    def flattened(self, shape: tuple[int, ...]) -> Self:
        """The fields broadcast to a batch and flattened, for kernels that are mapped over configurations."""
        fields = {}
        for name in self.constraints:
            value = np.asarray(getattr(self, name), np.float64)
            tail = value.shape[-1:] if name in self.vectors else ()
            fields[name] = np.broadcast_to(value, shape + tail).reshape(-1, *tail)
        return type(self)(**fields)

    def taken(self, index: Any) -> Self:
        """Laws of a flattened batch by their places, or by the index of an array such as [:, None]; not checked."""
        found = object.__new__(type(self))
        for name in self.constraints:
            object.__setattr__(found, name, getattr(self, name)[index])
        return found

    def _first_at_most(self, level: np.ndarray, strict: bool = False) -> np.ndarray:
        """The least k with Pr[K > k] <= level, or < level."""

        def done(k: np.ndarray) -> np.ndarray:
            tail = self.survival(k)
            return tail < level if strict else tail <= level

        shape = np.broadcast_shapes(self.shape, level.shape)
        below, above = np.full(shape, -1.0), np.zeros(shape)
        while not np.all(found := done(above)):
            if np.any(2.0 * above >= LARGEST_K):
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


def require_law(name: str, value: Any) -> None:
    """InputError, naming the argument, for anything but a law of K."""
    if not isinstance(value, Law):
        raise InputError(f"{name} = {value!r:.40} must be a law of K; use one such as selection.Geometric(0.1)")


def evaluated(law: Law, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`law.generating(y)` on the host: NumPy float64, also of a law of a user that calls JAX."""
    with double_precision(), np.errstate(all="ignore"):
        value, first, second = law.generating(np.asarray(y, np.float64))
    return np.asarray(value), np.asarray(first), np.asarray(second)
