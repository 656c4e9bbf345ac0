"""The canonical form of a composed mechanism: what every engine consumes, one direction at a time."""

from __future__ import annotations

from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from jaxacct.mechanisms.base import DIRECTIONS, RELATIONS, Mechanism, batch_shape, require_mechanism
from jaxacct.mechanisms.parts import FinitePart, GaussianPart, LaplacePart, Part
from jaxacct.validation import LARGEST_COUNT, InputError, choice, refuse_tracers

__all__ = ["Components", "components", "directions", "exact_product", "exact_sum"]

LEAST_SQUARE = 1e-280
"""Below it a square may have lost digits to underflow, and above its inverse its root is taken by itself."""

P = TypeVar("P", GaussianPart, LaplacePart, FinitePart)


class Components(NamedTuple):
    """One direction of a composed mechanism; every array float64 NumPy with leading batch axis B.

    The loss of the composition is the sum of the independent losses of the parts below (README.md,
    "Composition"). A Gaussian part is the pair N(1, s^2), N(0, s^2); with u = x/s and y = u/s - 1/(2 s^2) the
    sampled likelihood ratio is mix = 1 - q + q e^y. Remove: P has density N(u) mix, Q has N(u), loss = +log
    mix. Add: P has density N(u), Q has N(u) mix, loss = -log mix. Laplace parts follow the same rule with
    the pair Lap(0, b), Lap(1, b).

    The parts describe the finite loss only, a sub-probability under P; the mass at infinity is kept apart,
    so that delta(eps) = E_P[(1 - e^{eps - L})_+ ; L < inf] + delta_infinity with delta_infinity =
    -expm1(log_survival), and the finite expectation taken over the product of the finite parts as they stand
    (their masses sum to the survival).

    Parameters
    ----------
    sign : (B,)
        +1 remove (P is the mixture, Q the base Q); -1 add (P is the base Q, Q the mixture).
    mu2 : (B,)
        Sum of n / sigma^2 over Gaussians sampled at q == 1; their total loss is N(mu2/2, mu2).
    gauss_sigma, gauss_q, gauss_n : (B, J)
        Poisson-sampled Gaussians, 0 < q < 1, composed n times; n = 0 is absent (dummies sigma = 1, q = 0.5).
    laplace_scale, laplace_q, laplace_n : (B, K)
        Laplace of sensitivity 1 and scale b, 0 < q <= 1; n = 0 is absent (dummies scale = 1, q = 0.5).
    finite_loss, finite_mass : (B, F, A)
        Finite losses and P-masses of a finite-output part in this direction, with sampling and sign already applied;
        padding has mass 0 and loss 0. Masses sum to 1 minus the part's mass at infinity.
    finite_n : (B, F)
        How many times each finite part is composed; 0 is absent.
    log_survival : (B,)
        Sum of n * log1p(-mass at infinity) over the finite parts.
    mu : (B,)
        Square root of mu2, which is neither 0 nor inf where mu2 under- or overflows.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function (dominating pairs,
    their composition and their sampling).

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

    @property
    def delta_infinity(self) -> np.ndarray:
        """(B,) probability under P of an infinite loss, -expm1(log_survival)."""
        return -np.expm1(self.log_survival)

    @property
    def infinity_units(self) -> int:
        """How many units of 2^-53 of itself delta_infinity is off at most (README.md, "Rounding of finite laws")."""
        return 16 + self.finite_loss.shape[1] + self.finite_loss.shape[2]

    def take(self, index: np.ndarray | slice) -> Components:
        """The same components restricted to some batch elements (an index array, a mask or a slice)."""
        return Components(*(field[index] for field in self))


def components(mechanism: Mechanism, relation: str, direction: str) -> Components:
    """The components of a mechanism in one direction ("remove" or "add") of a neighbouring relation.

    The batch is flattened to B = prod(batch_shape(mechanism)), in C order. Every field is checked again, so
    a mechanism altered by a pytree transformation is refused here at the latest. Equal parts are merged.

    Parameters
    ----------
    mechanism : Mechanism
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one"}
    direction : {"remove", "add"}

    Returns
    -------
    Components

    Raises
    ------
    InputError
        An invalid field, a relation that the mechanism does not support, or a total step count above 2**53.
    TracerError
        A tracer in a field.

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
    counted = mechanism.validated().expand(relation, direction)
    gauss = _merged(counted, GaussianPart, shape)
    laplace = _merged(counted, LaplacePart, shape)
    finite = _merged(counted, FinitePart, shape)
    size = int(np.prod(shape, dtype=np.int64))

    mu2, mu = np.zeros(size), np.zeros(size)
    for part, count in gauss:
        with np.errstate(over="ignore"):
            mu2 += np.where(part.rate == 1.0, count / part.sigma / part.sigma, 0.0)
            mu = np.hypot(mu, np.where(part.rate == 1.0, np.sqrt(count) / part.sigma, 0.0))
    mu = np.where((mu2 > LEAST_SQUARE) & (mu2 < 1.0 / LEAST_SQUARE), np.sqrt(mu2), mu)
    proper = [(part, np.where((part.rate > 0.0) & (part.rate < 1.0), count, 0.0)) for part, count in gauss]
    taken = [(part, np.where(part.rate > 0.0, count, 0.0)) for part, count in laplace]
    loss, mass, finite_n, log_survival = _finite_columns(finite, size)
    return Components(
        np.full(size, 1.0 if direction == "remove" else -1.0),
        mu2,
        *_sampled_columns([(part.sigma, part.rate, count) for part, count in proper], size),
        *_sampled_columns([(part.scale, part.rate, count) for part, count in taken], size),
        loss,
        mass,
        finite_n,
        log_survival,
        mu,
    )


def directions(mechanism: Mechanism, relation: str) -> tuple[str, ...]:
    """The directions whose worse one answers for a relation.

    remove_one and add_one need their own; add_or_remove_one and replace_one need both, or only
    ``("remove",)`` where the two coincide (nothing sampled at 0 < q < 1).

    Parameters
    ----------
    mechanism : Mechanism
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one"}

    Returns
    -------
    tuple of str
        "remove", "add", or both.

    Raises
    ------
    InputError
        No mechanism, or another relation.

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


def exact_product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Product of whole numbers up to 2**53 held in float64; refused where it exceeds 2**53."""
    a, b = np.broadcast_arrays(first, second)
    bad = a > LARGEST_COUNT // b.astype(np.int64)
    if bad.any():
        _refuse_counts(bad, a * b)
    return a * b


def exact_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sum of whole numbers up to 2**53 held in float64; refused where it exceeds 2**53."""
    a, b = np.broadcast_arrays(first, second)
    bad = a > LARGEST_COUNT - b
    if bad.any():
        _refuse_counts(bad, a + b)
    return a + b


def _merged(
    counted: list[tuple[Part, np.ndarray]], kind: type[P], shape: tuple[int, ...]
) -> list[tuple[P, np.ndarray]]:
    """The parts of one kind, flattened to leading axis B, equal parts joined by adding their counts."""
    joined: dict[tuple[bytes, ...], tuple[P, np.ndarray]] = {}
    for part, count in counted:
        if not isinstance(part, kind):
            continue
        atoms = part.loss.shape[-1:] if isinstance(part, FinitePart) else ()
        trailing = (atoms, atoms, ())
        flat = kind(
            *(
                np.broadcast_to(np.asarray(x, np.float64), shape + axes).reshape(-1, *axes)
                for x, axes in zip(part, trailing, strict=False)
            )
        )
        total = np.broadcast_to(np.asarray(count, np.float64), shape).reshape(-1)
        key = tuple(x.tobytes() for x in flat)
        joined[key] = (flat, exact_sum(joined[key][1], total) if key in joined else total)
    return list(joined.values())


def _sampled_columns(
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B, J) scale, rate and count of the columns present anywhere, with dummies where the count is 0."""
    present = [column for column in columns if column[2].any()]
    if not present:
        return np.ones((size, 0)), np.full((size, 0), 0.5), np.zeros((size, 0))
    scale, rate, count = (np.stack(arrays, axis=1) for arrays in zip(*present, strict=True))
    return np.where(count > 0.0, scale, 1.0), np.where(count > 0.0, rate, 0.5), count


def _finite_columns(
    finite: list[tuple[FinitePart, np.ndarray]], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Losses and masses padded with mass 0, counts and log survival; loss-free parts are absent."""
    width = max((part.loss.shape[-1] for part, _ in finite), default=1)
    loss, mass = np.zeros((size, len(finite), width)), np.zeros((size, len(finite), width))
    count, log_survival = np.zeros((size, len(finite))), np.zeros(size)
    for f, (part, times) in enumerate(finite):
        atoms = part.loss.shape[-1]
        loss[:, f, :atoms], mass[:, f, :atoms] = part.loss, part.mass
        active = (part.loss != 0.0).any(axis=-1) | (part.infinity > 0.0)
        count[:, f] = np.where(active, times, 0.0)
        with np.errstate(divide="ignore"):  # all mass at infinity: nothing survives
            log_survival += np.where(active, times * np.log1p(-np.where(active, part.infinity, 0.0)), 0.0)
    keep = count.any(axis=0) if size else np.zeros(len(finite), bool)
    return loss[:, keep], mass[:, keep], count[:, keep], log_survival


def _refuse_counts(bad: np.ndarray, value: np.ndarray) -> NoReturn:
    index = [int(i) for i in np.argwhere(bad)[0]]
    place = f"{index}" if index else ""
    raise InputError(f"total steps{place} = {float(value[tuple(index)]):.6g} must be <= 2**53; use fewer repetitions")
