"""The accountant of Zhu, Dong and Wang 2022: delta by Lévy's formula, from characteristic functions.

Losses compose by adding log characteristic functions. Lévy's formula gives the distribution function F of the loss,

    F(l) = phi(0)/2 - (1/pi) int_0^inf Im(e^{-itl} phi(t)) / t dt,      delta(eps) = P(L > eps) - e^eps Q(L > eps),

with Gaussian quadrature in t. All answers are of kind "estimate". The errors are absolute, so a delta far below 1e-12
has no correct digit, and the quadrature error is only estimated, from two resolutions. `ja.delta` has neither limit.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import ndtr

import jaxacct as ja
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
)
from jaxacct.mechanisms import DIRECTIONS, Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.representations.mechanism_profile import integrate, log_characteristic

LogPhi = Callable[[np.ndarray], np.ndarray]
DOUBLINGS = 4
"""Largest number of doublings of the upper limit of t, each made if the characteristic function is not small there."""
REACH = 9.0
"""Standard deviations of the noise beyond which the Riemann sums leave outputs out."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
"""Nodes and weights of the Gauss-Legendre rule, which each panel in t uses."""


def fourier_delta(
    mechanism: Mechanism, epsilon: ArrayLike, *, method: str = "double_quadrature", relation: str = "add_or_remove_one"
) -> ja.Bounds:
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

    >>> float(fourier_delta(ja.Gaussian(1.0), 1.0, method="analytical").estimate.round(9))
    0.126936738
    """
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
            # under Q the loss has the law of -L, where L is the loss of the reverse pair
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
) -> ja.Bounds:
    """Estimate delta(eps) of DP-SGD from characteristic functions that are Riemann sums over the output.

    The output is cut into cells, and each cell has its exact mass under P and Q. The loss is monotone in the output, so
    in a cell it lies between its values at the edges. For the upper end of delta, a cell has the larger of the two
    losses under P and the smaller under Q; for the lower end the reverse. The mass beyond `REACH` standard deviations
    widens both ends once for each step. The width falls only like steps/cells.

    Parameters
    ----------
    noise_multiplier : float, > 0
    sampling_probability : float in (0, 1)
    steps : int, >= 1
    epsilon : float, >= 0
    direction : {"remove", "add"}
    cells : int from 100 to 1,000,000

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
    count = int(check("cells", cells, Constraint("use between 100 and 1000000 cells", 100, 10**6, integral=True)))
    x = np.linspace(-REACH * sigma, 1.0 + REACH * sigma, count + 1)
    base, hit = _cell_masses(x / sigma), _cell_masses((x - 1.0) / sigma)
    mixed = (1.0 - q) * base + q * hit
    loss = log_mixture((2.0 * x - 1.0) / (2.0 * sigma**2), np.asarray(q))
    p, other = (mixed, base) if direction == "remove" else (base, mixed)
    ends = (loss[:-1], loss[1:]) if direction == "remove" else (-loss[1:], -loss[:-1])
    missing = min(n * 2.0 * float(ndtr(-REACH)), 1.0)
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
    return lambda t: n * np.log(integrate(1j * t, loss, mass))


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


def _estimate(low: np.ndarray, value: np.ndarray, high: np.ndarray, engine: str, narrow: float = 1e-6) -> ja.Bounds:
    low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    status = np.where(high - low <= narrow, "ok", "width")
    return ja.Bounds(low, np.clip(value, low, high), high, "estimate", status, engine)
