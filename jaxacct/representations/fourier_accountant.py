"""Analytical Fourier accountant of Zhu, Dong and Wang 2022, for comparison with our engines.

Losses compose by adding log characteristic functions. Lévy's formula gives the distribution function F of the loss,

    F(l) = phi(0)/2 - (1/pi) int_0^inf Im(e^{-itl} phi(t)) / t dt,      delta(eps) = P(L > eps) - e^eps Q(L > eps),

with Gaussian quadrature in t. All answers are of kind "estimate". The errors are absolute, so a delta far below 1e-12
has no correct digit, and the quadrature error is only estimated, from two resolutions. `ja.delta` has neither limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    COUNT,
    NON_NEGATIVE,
    OPEN_PROBABILITY,
    POSITIVE,
    Constraint,
    InputError,
    check,
    choice,
    refuse_tracers,
)
from jaxacct.mechanisms import DIRECTIONS, Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.finite import log_mixture

LogPhi = Callable[[np.ndarray], np.ndarray]
DOUBLINGS = 4
"""Largest number of doublings of the upper limit of t, each made if the characteristic function is not small there."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
"""Nodes and weights of the Gauss-Legendre rule, which each panel in t uses."""


def fourier_delta(
    mechanism: Mechanism, epsilon: ArrayLike, *, method: str = "double_quadrature", relation: str = "add_or_remove_one"
) -> Bounds:
    """Estimate delta(eps) by Lévy's formula from the characteristic functions under P and Q.

    Parameters
    ----------
    mechanism : Mechanism
        One configuration.
    epsilon : array_like, >= 0
    method : {"double_quadrature", "analytical"}
        "analytical" takes Gaussian, Laplace and finite parts, whose characteristic functions are closed forms.
        "double_quadrature" also takes Poisson sampled parts, whose characteristic function is an integral itself.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds
        kind "estimate"; status "width" if the characteristic function does not decay (few steps with atoms) or the
        estimated error exceeds 1e-6.

    References
    ----------
    Zhu, Dong and Wang (2022), Algorithm 1.

    >>> import jaxacct as ja
    >>> float(fourier_delta(ja.Gaussian(1.0), 1.0, method="analytical").estimate.round(9))
    0.126936738
    """
    refuse_tracers("fourier_delta", "jaxacct.kernels.contour", mechanism=mechanism, epsilon=epsilon)
    choice("method", method, ("analytical", "double_quadrature"))
    eps = np.asarray(check("epsilon", epsilon, NON_NEGATIVE))
    if batch_shape(mechanism):
        raise InputError("mechanism must be one configuration here; call once for each, or use ja.delta for a batch")
    each = {d: components(mechanism, relation, d) for d in DIRECTIONS}
    parts = each["remove"]
    sampled = np.any(parts.gauss_n > 0) or np.any((parts.laplace_n > 0) & (parts.laplace_q < 1))
    if method == "analytical" and sampled:
        raise InputError("method = 'analytical' needs unsampled parts; use method='double_quadrature'")
    value, error = np.zeros(eps.shape), np.zeros(eps.shape)
    for direction in directions(mechanism, relation):
        forward, backward = each[direction], each["add" if direction == "remove" else "remove"]
        for index, e in np.ndenumerate(eps):
            p, p_error = _exceeds(_of(forward, np.positive), float(e))
            # the law of the loss under Q is that of minus the loss of the reverse pair
            q, q_error = _exceeds(_of(backward, np.conj), float(e))
            delta = p + float(forward.delta_infinity[0]) - np.exp(e) * q
            value[index] = max(value[index], min(delta, 1.0))
            error[index] = max(error[index], p_error + np.exp(e) * q_error)
    return _estimate(value - error, value, value + error, "fourier")


def riemann_delta(
    noise_multiplier: ArrayLike,
    sampling_probability: ArrayLike,
    steps: ArrayLike,
    epsilon: ArrayLike,
    *,
    direction: str = "remove",
    cells: int = 20_000,
    reach: float = 9.0,
) -> Bounds:
    """Estimate delta(eps) of DP-SGD from characteristic functions that are Riemann sums over the output.

    The output is cut into cells, and each cell has its exact mass under P and Q. The loss is monotone in the output, so
    in a cell it lies between its values at the edges. For the upper end of delta, a cell has the larger of the two
    losses under P and the smaller under Q; for the lower end the reverse. The mass beyond `reach` standard deviations
    widens both ends once for each step. The width falls only like steps/cells.

    Parameters
    ----------
    noise_multiplier : float, > 0
    sampling_probability : float in (0, 1)
    steps : int, >= 1
    epsilon : float, >= 0
    direction : {"remove", "add"}
    cells : int from 100 to 1,000,000
    reach : float, > 0
        Standard deviations of the noise beyond which outputs are left out.

    Returns
    -------
    Bounds
        kind "estimate": the ends bracket delta, apart from the quadrature error in t, which is estimated and added.

    References
    ----------
    Zhu, Dong and Wang (2022), Algorithm 2 and Theorem 43.

    >>> found = riemann_delta(1.0, 0.1, 50, 0.5, cells=1000)
    >>> bool(found.lower <= found.upper <= 1.0), found.kind
    (True, 'estimate')
    """
    choice("direction", direction, DIRECTIONS)
    sigma = float(check("noise_multiplier", noise_multiplier, POSITIVE))
    q = float(check("sampling_probability", sampling_probability, OPEN_PROBABILITY))
    n, eps = float(check("steps", steps, COUNT)), float(check("epsilon", epsilon, NON_NEGATIVE))
    count, reach = (
        int(check("cells", cells, Constraint("use between 100 and 1000000 cells", 100, 10**6, integral=True))),
        float(check("reach", reach, POSITIVE)),
    )
    x = np.linspace(-reach * sigma, 1.0 + reach * sigma, count + 1)
    base, hit = _cell_masses(x / sigma), _cell_masses((x - 1.0) / sigma)
    mixed = (1.0 - q) * base + q * hit
    loss = log_mixture((2.0 * x - 1.0) / (2.0 * sigma**2), np.asarray(q))
    p, other = (mixed, base) if direction == "remove" else (base, mixed)
    ends = (loss[:-1], loss[1:]) if direction == "remove" else (-loss[1:], -loss[:-1])
    missing = min(n * 2.0 * float(ndtr(-reach)), 1.0)
    sides = []
    for under_p, under_q in (ends, ends[::-1]):
        first, error = _exceeds(_atoms(under_p, p, n), eps)
        second, other_error = _exceeds(_atoms(under_q, other, n), eps)
        sides.append((first - np.exp(eps) * second, error + np.exp(eps) * other_error))
    (low, low_error), (high, high_error) = sides
    allowance = missing * (1.0 + np.exp(eps))
    low, high = max(low - low_error - allowance, 0.0), min(high + high_error + allowance, 1.0)
    low, middle, high = np.asarray([low, 0.5 * (low + high), high])
    return _estimate(low, middle, high, "riemann", narrow=np.inf)


def _cell_masses(edges: np.ndarray) -> np.ndarray:
    """Return masses of N(0, 1) between edges, as differences of the nearer tail, which keeps small masses accurate."""
    below, above = ndtr(edges), ndtr(-edges)
    return np.where(edges[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])


def _of(parts: Components, turn: Callable[[np.ndarray], np.ndarray]) -> LogPhi:
    return lambda t: turn(log_characteristic(parts, 0, t))


def _atoms(loss: np.ndarray, mass: np.ndarray, n: float) -> LogPhi:
    return lambda t: n * np.log(_integrate(1j * t, loss, mass))


def _exceeds(log_phi: LogPhi, eps: float) -> tuple[float, float]:
    """Estimate Pr[finite loss > eps] by Lévy's formula, and its error from two resolutions."""
    start = log_phi(np.zeros(1))[0].real
    probe = 1e-3
    for _ in range(3):  # log phi near t = 0 gives the mean and the deviation of the loss
        first = log_phi(np.array([probe]))[0] - start
        deviation = np.sqrt(max(-2.0 * first.real, 1e-24)) / probe
        probe = min(0.05 / max(deviation, 1e-12), 1e6)
    mean = first.imag / probe if abs(first.imag) < 3.0 else 0.0
    end = 8.6 / deviation  # a Gaussian phi is e^-37 at this t
    for _ in range(DOUBLINGS):
        if np.max(log_phi(np.linspace(end, 1.5 * end, 16)).real) < -37.0:  # e^-37 is below the unit roundoff
            break
        end *= 2.0
    left = float(np.exp(np.max(log_phi(np.linspace(end, 1.5 * end, 64)).real)))
    panels = int(np.ceil(end * (abs(eps - mean) + 4.0 * deviation) / 5.0)) + 4
    rough, fine = (_levy(log_phi, eps, end, count) for count in (panels, 2 * panels))
    value = 0.5 * np.exp(start) + fine
    return float(np.clip(value, 0.0, np.exp(start))), abs(fine - rough) + left / np.pi + 1e-14


def _levy(log_phi: LogPhi, eps: float, end: float, panels: int) -> float:
    """Compute `(1/pi) int_0^end Im(e^{-it eps} phi(t)) / t dt` by Gauss-Legendre on equal panels."""
    half = 0.5 * end / panels
    t = (half * (2.0 * np.arange(panels)[:, None] + 1.0 + _NODES)).ravel()
    weight = half * np.tile(_WEIGHTS, panels)
    return float(np.sum(weight * np.exp(log_phi(t) - 1j * t * eps).imag / t) / np.pi)


def _estimate(low: np.ndarray, value: np.ndarray, high: np.ndarray, engine: str, narrow: float = 1e-6) -> Bounds:
    low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    status = np.where(high - low <= narrow, "ok", "width")
    return Bounds(low, np.clip(value, low, high), high, "estimate", status, engine)


class LogCharacteristic(NamedTuple):
    """Logarithm of a characteristic function: exp(value) is the function, `value` is complex, `kind` is "estimate"."""

    value: np.ndarray
    kind: str


def log_characteristic(parts: Components, row: int, t: np.ndarray) -> np.ndarray:
    """Compute `log E_P[e^{itL} ; L < inf]` of one configuration at frequencies t (T,), up to multiples of 2 pi i."""
    z = 1j * np.asarray(t, np.float64)
    value = parts.mu2[row] * z * (z + 1.0) / 2.0
    removing = parts.sign[row] > 0
    power = z + 1.0 if removing else -z
    for sigma, q, n in zip(parts.gauss_sigma[row], parts.gauss_q[row], parts.gauss_n[row], strict=True):
        if n > 0:
            value = value + n * np.log(_sampled_gaussian(float(sigma), float(q), power))
    for b, q, n in zip(parts.laplace_scale[row], parts.laplace_q[row], parts.laplace_n[row], strict=True):
        if n > 0:
            value = value + n * (_laplace(float(b), z) if q == 1.0 else np.log(_sampled_laplace(float(b), q, power)))
    for loss, mass, n in zip(parts.finite_loss[row], parts.finite_mass[row], parts.finite_n[row], strict=True):
        if n > 0:
            value = value + n * np.log(np.exp(np.multiply.outer(z, loss)) @ mass)
    return value


def _laplace(b: float, z: np.ndarray) -> np.ndarray:
    x = (1.0 + 2.0 * z) / b
    return z / b + np.log(1.0 + z / b * np.expm1(-x) / x)


def _sampled_gaussian(sigma: float, q: float, power: np.ndarray) -> np.ndarray:
    """Integrate e^{power loss} over u = x/sigma ~ N(0, 1) by the trapezoid rule; high frequencies need small steps."""
    fastest = np.max(np.abs(power.imag)) / sigma
    height = min(6.0, 0.9 * np.pi * sigma)
    step = 2.0 * np.pi / (fastest + 40.0 / height + 0.5 * height)
    u = np.arange(-9.0, 9.0 + 1.0 / sigma + step, step)
    loss = log_mixture(u / sigma - 0.5 / sigma**2, np.asarray(q))
    weight = step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * u**2)
    return _integrate(power, loss, weight)


def _sampled_laplace(b: float, q: float, power: np.ndarray) -> np.ndarray:
    panels = int(np.ceil(2.0 / b * (0.25 * np.max(np.abs(power.imag)) + 4.0)))
    half = 1.0 / (b * panels)
    v = ((-1.0 / b + half * (2.0 * np.arange(panels) + 1.0))[:, None] + half * _NODES).ravel()
    weight = 0.25 * half * np.tile(_WEIGHTS, panels) * np.exp(-0.5 * (v + 1.0 / b))
    v = np.concatenate([[-1.0 / b, 1.0 / b], v])
    weight = np.concatenate([[0.5, 0.5 * np.exp(-1.0 / b)], weight])
    return _integrate(power, log_mixture(v, np.asarray(q)), weight)


def _integrate(power: np.ndarray, loss: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the sum of weight e^{power loss} over the nodes, a block of frequencies at a time."""
    block = max(1, 2**20 // loss.size)  # 2**20 exponentials take 16 MiB
    pieces = [np.exp(np.multiply.outer(power[i : i + block], loss)) @ weight for i in range(0, power.size, block)]
    return np.concatenate(pieces)
