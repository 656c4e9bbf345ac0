"""A composed mechanism in the canonical form that every engine takes: its components in one direction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import Numbers
from jaxacct.core.validation import LARGEST_COUNT, RELATIONS, InputError, choice, refuse_tracers, refuse_where
from jaxacct.mechanisms.base import (
    DIRECTIONS,
    ConcentratedPart,
    FinitePart,
    GaussianPart,
    LaplacePart,
    Mechanism,
    Part,
    batch_shape,
    require_mechanism,
)
from jaxacct.mechanisms.concentrated import concentrated_pair
from jaxacct.mechanisms.finite import sample_pair

LEAST_SQUARE = 1e-280
"""Smallest sum of squares that is used. A smaller sum may have lost digits to underflow, and its inverse may be inf."""
TOO_MANY = "must be <= 2**53; so many are not accounted for", "{:.6g}".format
"""For `refuse_where`: the words that refuse a number of steps, and the function that formats the number."""
LARGEST_GAP = 1e-3
"""A finite law's masses must sum to 1 up to this error. If they sum to less, the law is replaced by one that reveals
everything. If they sum to more in a law for lower ends, it is replaced by one that releases nothing."""


class Components(NamedTuple):
    """One direction of a composed mechanism; every array is NumPy float64 with a leading batch axis B.

    The loss of the composition is the sum of the independent losses of its parts (README.md, "Composition"). A Gaussian
    part of noise s and sampling rate q has the pair (1 - q) N(0, s^2) + q N(1, s^2), N(0, s^2). Its likelihood ratio at
    x is mix = 1 - q + q e^y, y = x/s^2 - 1/(2 s^2). For "remove" P is the first law, Q is the second, and the loss is
    log mix. For "add" P and Q are exchanged, and the loss is -log mix. Laplace parts follow the same rule with the pair
    Lap(0, b), Lap(1, b). The parts describe the finite loss only; their masses sum to 1 - delta_infinity.

    Parameters
    ----------
    sign : (B,)
        +1 for remove, -1 for add.
    mu2 : (B,)
        Sum of n / sigma^2 over Gaussians sampled at q == 1; their total loss is N(mu2/2, mu2).
    gauss_sigma, gauss_q, gauss_n : (B, J)
        Poisson-sampled Gaussians, 0 < q < 1, composed n times. A part with n = 0 is absent (with sigma = 1, q = .5).
    laplace_scale, laplace_q, laplace_n : (B, K)
        Laplace noise of sensitivity 1 and scale b, 0 < q <= 1. A part with n = 0 is absent (with scale = 1, q = .5).
    finite_loss, finite_mass : (B, F, A)
        Finite losses and P-masses of the finite parts, with sampling and sign already applied. Padding is 0.
    finite_n : (B, F)
        Number of times that each finite part is composed; 0 if it is absent.
    log_survival : (B,)
        Sum of n * log1p(-mass at infinity) over the finite parts.
    mu : (B,)
        Square root of mu2. It is positive and finite also where mu2 under- or overflows.
    delta_infinity : (B,)
        Probability under P of an infinite loss, -expm1(log_survival).
    infinity_units : (B,)
        Bound of the relative error of delta_infinity, in units of 2^-53 (README.md, "Rounding of finite laws").
    rho, xi : (B,)
        The zCDP guarantee of all zCDP parts together, which the last finite part represents; 0 if there is none.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function.

    >>> from jaxacct.mechanisms import Laplace, components
    >>> components(Laplace([2.0, 4.0]), "add_or_remove_one", "remove").laplace_scale.tolist()
    [[2.0], [4.0]]
    """

    sign: np.ndarray
    mu2: np.ndarray
    gauss_sigma: np.ndarray
    gauss_q: np.ndarray
    gauss_n: np.ndarray
    laplace_scale: np.ndarray
    laplace_q: np.ndarray
    laplace_n: np.ndarray
    finite_loss: np.ndarray
    finite_mass: np.ndarray
    finite_n: np.ndarray
    log_survival: np.ndarray
    mu: np.ndarray
    delta_infinity: np.ndarray
    infinity_units: np.ndarray
    rho: np.ndarray
    xi: np.ndarray

    def take(self, index: np.ndarray | slice) -> Components:
        """Return the components of some batch elements (an index array, a mask or a slice)."""
        return Components(*(field[index] for field in self))

    def guaranteed(self) -> np.ndarray:
        """Return for each batch element whether its last finite part represents a zCDP guarantee, (B,)."""
        return (self.rho > 0.0) | (self.xi > 0.0)


def components(mechanism: Mechanism, relation: str, direction: str, below: bool = False) -> Components:
    """Expand a mechanism into its components in one direction ("remove" or "add") of a neighbouring relation.

    The batch is flattened in C order. Every field is checked again. Equal parts are merged.

    Parameters
    ----------
    mechanism : Mechanism
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    direction : {"remove", "add"}
    below : bool
        Whether to take the parts of `expand_below`, with which only the lower end of a bracket may be computed.

    Returns
    -------
    Components

    Raises
    ------
    TracerError
        A field holds a tracer.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorems 10 and 11.

    >>> from jaxacct.mechanisms import Gaussian, compose, dp_sgd
    >>> run = compose(dp_sgd([0.8, 1.2], 0.01, 1000), Gaussian(2.0))
    >>> parts = components(run, "add_or_remove_one", "remove")
    >>> parts.gauss_sigma.tolist(), parts.gauss_n.tolist(), parts.mu2.tolist()
    ([[0.8], [1.2]], [[1000.0], [1000.0]], [0.25, 0.25])
    """
    choice("relation", relation, RELATIONS)
    choice("direction", direction, DIRECTIONS)
    shape = batch_shape(mechanism)
    refuse_tracers("components", "jaxacct.kernels.contour", mechanism=mechanism)
    checked = mechanism.validated()
    with np.errstate(over="ignore", invalid="ignore"):  # a part that overflows is found by `law` below
        counted = checked.expand_below(relation, direction) if below else checked.expand(relation, direction)
    size = int(np.prod(shape, dtype=np.int64))

    mu2, mu = np.zeros(size), np.zeros(size)
    (sigma, rate), n = _columns(counted, GaussianPart, shape)
    with np.errstate(over="ignore"):
        for each_sigma, plain in zip(sigma.T, np.where(rate == 1.0, n, 0.0).T, strict=True):
            mu2 += plain / each_sigma / each_sigma
            mu = np.hypot(mu, np.sqrt(plain) / each_sigma)
    mu = np.where((mu2 > LEAST_SQUARE) & (mu2 < 1.0 / LEAST_SQUARE), np.sqrt(mu2), mu)
    sampled = [(sigma, rate, np.where((rate > 0.0) & (rate < 1.0), n, 0.0))]
    (scale, rate), n = _columns(counted, LaplacePart, shape)
    sampled.append((scale, rate, np.where(rate > 0.0, n, 0.0)))
    noise = []
    for scale, rate, n in sampled:  # drop parts that no row has; a row that lacks a part has count 0 for it
        scale, rate, n = (np.compress(n.any(axis=0), x, axis=1) for x in (scale, rate, n))
        noise.append((np.where(n > 0.0, scale, 1.0), np.where(n > 0.0, rate, 0.5), n))
    gauss, laplace = noise

    (loss, mass, infinity), n = _columns(counted, FinitePart, shape)
    total = mass.sum(axis=2) + infinity
    with np.errstate(invalid="ignore"):
        law = np.isfinite(loss).all(axis=2) & (total <= 1.0 + LARGEST_GAP if below else total >= 1.0 - LARGEST_GAP)
    if not law.all():  # where a number such as 1/scale overflowed, delta counts as 1, or as 0 if `below`
        loss, mass = (np.where(law[:, :, None], each, 0.0) for each in (loss, mass))
        infinity = np.where(law, infinity, 0.0 if below else 1.0)
    rho, xi = _concentrated(counted, shape)
    if rho.any() or xi.any():
        together = sample_pair(concentrated_pair(rho, xi), np.asarray(1.0), direction)
        loss, mass = (
            np.concatenate([_padded(old, new.shape[-1]), _padded(new[:, None], old.shape[-1])], axis=1)
            for old, new in ((loss, together.loss), (mass, together.mass))
        )
        infinity = np.concatenate([infinity, together.infinity[:, None]], axis=1)
        n = np.concatenate([n, np.where((rho > 0.0) | (xi > 0.0), 1.0, 0.0)[:, None]], axis=1)
    active = (loss != 0.0).any(axis=2) | (infinity > 0.0)  # parts whose losses are all 0 leak nothing and are dropped
    n = np.where(active, n, 0.0)
    with np.errstate(divide="ignore"):  # log 0 = -inf if all mass is at infinity
        survival = np.where(active, n * np.log1p(-np.where(active, infinity, 0.0)), 0.0)
    log_survival = sum(survival.T, np.zeros(size))
    loss, mass, n = (np.compress(n.any(axis=0), x, axis=1) for x in (loss, mass, n))
    sign = np.full(size, 1.0 if direction == "remove" else -1.0)
    units = np.full(size, 16.0 + loss.shape[1] + loss.shape[2])
    lost = -np.expm1(log_survival)
    return Components(sign, mu2, *gauss, *laplace, loss, mass, n, log_survival, mu, lost, units, rho, xi)


def directions(mechanism: Mechanism, relation: str) -> tuple[str, ...]:
    """Return the directions of a relation. The answer under the relation is the largest answer in these directions.

    remove_one and add_one have one direction. The other relations have both, or only "remove" where the two coincide.

    Parameters
    ----------
    mechanism : Mechanism
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    tuple of str

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> from jaxacct.mechanisms import Gaussian, dp_sgd
    >>> directions(Gaussian(1.0), "add_or_remove_one"), directions(dp_sgd(1.0, 0.01, 10), "add_or_remove_one")
    (('remove',), ('remove', 'add'))
    """
    choice("relation", relation, RELATIONS)
    require_mechanism("mechanism", mechanism)
    if relation == "add_one":
        return ("add",)
    if relation == "remove_one" or mechanism.symmetric():
        return ("remove",)
    return DIRECTIONS


def add_and_remove(mechanism: Mechanism, relation: str) -> bool:
    """Return whether a relation's two directions are add_one and remove_one (README.md, "Zero out").

    >>> from jaxacct.mechanisms import Gaussian, SampledWithoutReplacement
    >>> add_and_remove(Gaussian(1.0), "zero_out")
    True
    >>> add_and_remove(SampledWithoutReplacement(Gaussian(1.0), 0.1), "zero_out")
    False
    """
    zeroed_apart = relation == "zero_out" and (mechanism.displaces() or mechanism.reveals("zero_out"))
    return relation != "replace_one" and not zeroed_apart


def exact_product(first: Numbers, second: Numbers) -> np.ndarray:
    """Multiply whole numbers up to 2**53 that are held in float64; refuse a product above 2**53."""
    a, b = np.broadcast_arrays(first, second)
    refuse_where(a > LARGEST_COUNT // b.astype(np.int64), "total steps", a * b, *TOO_MANY)
    return a * b


def exact_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Add whole numbers up to 2**53 that are held in float64; refuse a sum above 2**53."""
    a, b = np.broadcast_arrays(first, second)
    refuse_where(a > LARGEST_COUNT - b, "total steps", a + b, *TOO_MANY)
    return a + b


def _columns(
    counted: list[tuple[Part, np.ndarray]], kind: type[Part], shape: tuple[int, ...]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (fields, counts) of the parts of type `kind`, with axes (B, J) or (B, J, A), for J distinct parts."""
    joined: dict[tuple[bytes, ...], tuple[list[np.ndarray], np.ndarray]] = {}
    for part, count in counted:
        if not isinstance(part, kind):
            continue
        atoms = part.loss.shape[-1:] if isinstance(part, FinitePart) else ()
        trailing = (atoms, atoms, ())
        flat = [
            np.broadcast_to(np.asarray(x, np.float64), shape + axes).reshape(-1, *axes)
            for x, axes in zip(part, trailing, strict=False)
        ]
        total = np.broadcast_to(np.asarray(count, np.float64), shape).reshape(-1)
        key = tuple(x.tobytes() for x in flat)
        joined[key] = (flat, exact_sum(joined[key][1], total) if key in joined else total)
    size, width = int(np.prod(shape, dtype=np.int64)), 1
    for flat, _ in joined.values():
        width = max(width, flat[0].shape[-1]) if kind is FinitePart else width
    axes = [(width,), (width,), ()] if kind is FinitePart else [(), ()]
    fields = [np.zeros((size, len(joined), *extra)) for extra in axes]
    counts = np.zeros((size, len(joined)))
    for column, (flat, total) in enumerate(joined.values()):
        counts[:, column] = total
        for field, values in zip(fields, flat, strict=True):
            if values.ndim == 1:
                field[:, column] = values
            else:
                field[:, column, : values.shape[1]] = values
    return fields, counts


def _concentrated(counted: list[tuple[Part, np.ndarray]], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of rho and the sum of xi over all zero-concentrated guarantees, rounded up, (B,) each."""
    total = np.zeros((2, int(np.prod(shape, dtype=np.int64))))
    for part, count in counted:
        if isinstance(part, ConcentratedPart):
            total += [np.broadcast_to(each * count, shape).reshape(-1) for each in part]
            total *= 1.0 + 4.0 * ROUNDOFF
    if not np.all(np.isfinite(total)):
        raise InputError("the rho or xi of all zero-concentrated guarantees exceeds float64; use fewer repetitions")
    return total[0], total[1]


def _padded(atoms: np.ndarray, width: int) -> np.ndarray:
    """Return atoms with zeros added at the end of the last axis, up to the length `width`."""
    return np.pad(atoms, ((0, 0), (0, 0), (0, max(width - atoms.shape[-1], 0))))
