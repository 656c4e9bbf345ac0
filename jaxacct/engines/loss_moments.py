"""Certified brackets of `log E_P[e^{cL}]`, the moments of the loss (jaxacct/representations/README.md, "Moments").

The power p is c + 1 for remove and -c for add. `k * ROUNDOFF` allows for k roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.kernels.contour.core import log_kappa
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.mechanisms.loss_components import Components

START = np.geomspace(1e-3, 1e5, 33)
"""The search for the best Rényi order alpha starts with these values of alpha - 1."""
NATS = 75.0
"""The trapezoid rule's step and ends are chosen so that the moment has a relative error of about e^-NATS."""
MOST_NODES = 2**16
"""Largest number of nodes of one quadrature. Where more are needed, the bracket is wide or infinite."""
LARGEST_ERROR = 0.1
"""If a rule's error, relative to the moment, is at least this number, the rule gives no bound. Rounding errors of
exponents count by their mean, as they do to first order, only if all of them are below this number."""
_ABSCISSAE, _WEIGHTS = np.polynomial.legendre.leggauss(20)
"""Gauss-Legendre rule on [-1, 1], for sampled Laplace noise between the two atoms of the loss."""
_LARGEST_EXPONENT = 700.0
"""An exponent above this number is lowered to it, because e^710 exceeds float64's range."""


class Interval(NamedTuple):
    """Arrays of lower and upper bounds: low <= truth <= high in each element."""

    low: np.ndarray
    high: np.ndarray


class _Nodes(NamedTuple):
    """A quadrature rule for expectations under Q."""

    log_weight: np.ndarray  # (rows, nodes) logarithm of each node's weight
    loss: np.ndarray  # (rows, nodes) log mix at each node
    weight_rounding: np.ndarray  # rounding error of `log_weight`, in units of ROUNDOFF
    loss_rounding: np.ndarray  # rounding error of `loss`, in units of ROUNDOFF
    relative: np.ndarray  # (rows, 1) error of the rule, relative to the moment


@np.errstate(over="ignore", invalid="ignore")  # a bound beyond float64's range becomes inf or NaN
def log_moments(parts: Components, c: np.ndarray) -> Interval:
    """Return the bracket of `K(c) = log E_P[e^{cL} ; L < inf]`, c > -1, (B,); [-inf, inf] where nodes are too few."""
    low = high = parts.mu2 * c * (c + 1.0) / 2.0
    slack = 4.0 * ROUNDOFF * np.abs(low)
    low, high = low - slack, high + slack
    power = np.where(parts.sign > 0, c + 1.0, -c)
    beyond = np.where(parts.sign > 0, c, power - 1.0)  # power - 1
    for j in range(parts.gauss_n.shape[1]):
        n, sigma, q = (x[:, j] for x in (parts.gauss_n, parts.gauss_sigma, parts.gauss_q))
        low, high = _add(low, high, n, _where(n, _sampled_gaussian, sigma, q, power, beyond))
    for k in range(parts.laplace_n.shape[1]):
        n, scale, q = (x[:, k] for x in (parts.laplace_n, parts.laplace_scale, parts.laplace_q))
        whole = np.where(q == 1.0, n, 0.0)
        low, high = _add(low, high, whole, _where(whole, _laplace, scale, c))
        low, high = _add(low, high, n - whole, _where(n - whole, _sampled_laplace, scale, q, power))
    for f in range(parts.finite_n.shape[1]):
        # If `known`, the last part stands for a zCDP guarantee: its log moment is at most c (xi + rho (c + 1)).
        known = parts.guaranteed() & (c > 0.0) & (f == parts.finite_n.shape[1] - 1)
        each = Interval(np.zeros(c.shape), c * (parts.xi + parts.rho * (c + 1.0)) * (1.0 + 8.0 * ROUNDOFF))
        if not known.all():
            other = _finite(parts.finite_loss[:, f], parts.finite_mass[:, f], c, parts.log_survival < 0)
            each = Interval(*(np.where(known, *ends) for ends in zip(each, other, strict=True)))
        low, high = _add(low, high, parts.finite_n[:, f], each)
    return Interval(low, high)


def _add(low: np.ndarray, high: np.ndarray, n: np.ndarray, each: Interval) -> tuple[np.ndarray, np.ndarray]:
    used = n > 0
    low = low + np.where(used, n * np.where(used, each.low, 0.0), 0.0)
    high = high + np.where(used, n * np.where(used, each.high, 0.0), 0.0)
    return low - 2.0 * ROUNDOFF * np.abs(low), high + 2.0 * ROUNDOFF * np.abs(high)


def _where(n: np.ndarray, moment: Callable[..., Interval], *columns: np.ndarray) -> Interval:
    """Return the brackets that `moment` computes for the rows with n > 0, and [0, 0] for all other rows."""
    rows = np.flatnonzero(n > 0)
    low, high = np.zeros(n.size), np.zeros(n.size)
    if rows.size:  # equal rows, as of one configuration at many eps, are computed once
        unlike, place = np.unique([column[rows] for column in columns], axis=1, return_inverse=True)
        low[rows], high[rows] = (end[place.reshape(-1)] for end in moment(*unlike))
    return Interval(low, high)


def _finite(loss: np.ndarray, mass: np.ndarray, c: np.ndarray, leaking: np.ndarray) -> Interval:
    """Return the bracket of log sum_atoms mass e^{c loss}, atoms (B, A). If `leaking`, masses may add up to below 1."""
    atoms = mass.shape[1] + 8.0
    exponent = c[:, None] * loss
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    # `inexact`: largest relative error of each mass, in units of ROUNDOFF
    raised, inexact = exponent + log_mass, 32.0 - 8.0 * np.where(mass > 0, log_mass, 0.0)
    top = np.max(raised, axis=1, initial=-745.0)
    weight = np.exp(raised - top[:, None])
    total = np.maximum(np.sum(weight, axis=1), 1e-300)  # keeps the log finite for an absent part, whose masses are 0
    value = top + np.log(total)
    error = ROUNDOFF * (
        atoms + np.abs(top) + np.sum(weight * (16.0 + inexact + 8.0 * np.abs(exponent)), axis=1) / total
    )
    low, high = value - error, value + error
    # unless the law is `leaking`, the moment is 1 + `shift`, and only `shift` has rounding errors
    with np.errstate(over="ignore", invalid="ignore"):
        added = mass * np.expm1(exponent)
        shift = np.sum(added, axis=1)
        turned = 4.0 * mass * np.abs(exponent) * np.exp(exponent)
        wrong = ROUNDOFF * np.sum((atoms + 8.0 + inexact) * np.abs(added) + turned, axis=1)
        small = ~leaking & (np.abs(shift) + wrong < 0.5)
        near_low = np.log1p(np.where(small, shift - wrong, 0.0))
        near_high = np.log1p(np.where(small, shift + wrong, 0.0))
    spread = 4.0 * ROUNDOFF * np.maximum(np.abs(near_low), np.abs(near_high))
    low = np.where(small, np.maximum(low, near_low - spread), low)
    return Interval(low, np.where(small, np.minimum(high, near_high + spread), high))


def _laplace(scale: np.ndarray, c: np.ndarray) -> Interval:
    """Return the bracket of `K(c) = s + log1p(-s (1 - e^-x)/x)` of Laplace noise; s = c/scale, x = (1 + 2c)/scale."""
    s, x = c / scale, (1.0 + 2.0 * c) / scale
    safe = np.where(x == 0.0, 1.0, x)
    g = np.where(x == 0.0, 1.0, -np.expm1(-safe) / safe)
    value = s + np.log1p(-s * g)
    error = 24.0 * ROUNDOFF * (np.abs(s) + np.abs(s * g) * (1.0 + np.abs(x)) + np.abs(value))
    return Interval(value - error, value + error)


def _sampled_laplace(scale: np.ndarray, q: np.ndarray, power: np.ndarray) -> Interval:
    """Return the bracket of log E_Q[mix^power] from Q's two atoms and from quadrature on panels between them."""
    low, high = np.empty(scale.size), np.empty(scale.size)
    for row in range(scale.size):
        b, p = scale[row], power[row]
        needed = np.ceil(1.0 / (b * min(0.25, 1.0 / (abs(p) + 1.0))))
        if needed * _ABSCISSAE.size > MOST_NODES:
            low[row], high[row] = _by_the_top_atom(b, q[row], p)
            continue
        panels = int(needed)
        half = 1.0 / (b * panels)
        centre = -1.0 / b + half * (2.0 * np.arange(panels) + 1.0)
        v = (centre[:, None] + half * _ABSCISSAE).ravel()
        log_w = (np.log(0.25 * half * _WEIGHTS) + np.zeros((panels, 1))).ravel() - 0.5 * (v + 1.0 / b)
        v = np.concatenate([[-1.0 / b, 1.0 / b], v])[None]
        log_w = np.concatenate([[np.log(0.5), np.log(0.5) - 1.0 / b], log_w])[None]
        loss = log_mixture(v, q[row])
        posterior = np.exp(np.log(q[row]) + v - loss)
        # 1e-22: relative error of the rule on a panel, proved in jaxacct/representations/README.md
        nodes = _Nodes(log_w, loss, 16.0 + 4.0 / b, 4.0 * np.abs(loss) + 8.0 * posterior / b, np.array([[1e-22]]))
        ends = _evaluate(nodes, p[None, None])
        low[row], high[row] = ends.low[0], ends.high[0]
    return Interval(low, high)


def _by_the_top_atom(scale: float, q: float, power: float) -> tuple[float, float]:
    """Bracket log E_Q[mix^power]: at most the largest mix^power, and at least this times the Q-mass of its atom."""
    at, log_mass = (1.0, -np.log(2.0) - 1.0 / scale) if power > 0 else (-1.0, -np.log(2.0))
    largest = power * float(log_mixture(np.asarray(at / scale), np.asarray(q)))
    slack = 32.0 * ROUNDOFF * (largest + 1.0 / scale + 1.0)
    return max(log_mass + largest - slack, 0.0), largest + slack


def _sampled_gaussian(sigma: np.ndarray, q: np.ndarray, power: np.ndarray, c: np.ndarray) -> Interval:
    """Return the bracket of log E_Q[mix^power], with c = power - 1, which is more accurate where `power` is near 1."""
    low, high = np.empty(sigma.size), np.empty(sigma.size)
    # so little noise gives moments a closed form, up to a relative error of about e^(-1/(8 sigma^2))
    little = (sigma <= 0.05) & ((power < 0.0) | (power >= 1.0))
    if (rows := np.flatnonzero(little)).size:
        low[rows], high[rows] = _little_noise(sigma[rows], q[rows], power[rows], c[rows])
    if (rows := np.flatnonzero(~little)).size:
        low[rows], high[rows] = _by_trapezoids(sigma[rows], q[rows], power[rows])
    return Interval(low, high)


def _little_noise(sigma: np.ndarray, q: np.ndarray, power: np.ndarray, c: np.ndarray) -> Interval:
    """Bracket log E_Q[mix^power], power < 0 or >= 1: by (1 - q)^power, plus E_Q[(q e^y)^power] if power >= 1."""
    half, log_q, log_rest = 0.5 / sigma**2, np.log(q), np.log1p(-q)
    # a power >= 1: the moment is 1 + shift + rest, where 0 <= rest <= e^log_rest_most
    down, up = c * log_rest, c * (log_q + power * half)
    small = up < 30.0
    rise = np.exp(np.where(small, up, 0.0))
    shift = (1.0 - q) * np.expm1(down) + q * np.expm1(np.where(small, up, 0.0))
    turned = (1.0 - q) * np.abs(down) + q * rise * np.where(small, np.abs(c) * (np.abs(log_q) + power * half), 0.0)
    wrong = 16.0 * ROUNDOFF * ((1.0 - q) * np.abs(np.expm1(down)) + q * np.abs(rise - 1.0) + turned)
    parts = power * log_rest, power * (log_q + c * half)
    size = np.abs(parts[0]) + power * (np.abs(log_q) + np.abs(c) * half) + 1.0
    value, slack = np.logaddexp(*parts), 16.0 * ROUNDOFF * size
    near, far = (power - 0.5) * log_rest + 0.5 * log_q, 0.5 * log_rest + (power - 0.5) * (log_q + (power - 1.5) * half)
    log_rest_most = np.logaddexp(near - 0.25 * half, far) + np.log(np.abs(power)) + c * np.log(2.0) + 1e-9 * size
    rest = np.exp(np.where(small, log_rest_most, -np.inf))
    lower = np.where(small, np.log1p(shift - wrong), value - slack)
    upper = np.where(small, np.log1p(shift + wrong + rest), value + slack + np.log1p(np.exp(log_rest_most - value)))
    # a power < 0: mix is at least 1 - q, and E (1 + w)^power >= 1 - E min(1, -power w) for w = q e^y/(1 - q)
    most = power * log_rest
    cost = 0.5 * (np.log(np.abs(power)) + log_q - log_rest) - 0.25 * half
    least = most + np.log1p(-np.exp(np.minimum(cost * (1.0 - 1e-9), -1e-9)))
    lower, upper = np.where(power < 0.0, least, lower), np.where(power < 0.0, most, upper)
    edge = 8.0 * ROUNDOFF
    return Interval(lower - edge * np.abs(lower), upper + edge * np.abs(upper))


def _by_trapezoids(sigma: np.ndarray, q: np.ndarray, power: np.ndarray) -> Interval:
    """Return the bracket of log E_Q[mix^power] by the trapezoid rule over u, where sigma u is the output."""
    bottom, top, height, growth, step = _plan(sigma, q, power)
    count = np.ceil((top - bottom) / step) + 1.0
    count = np.where(np.isfinite(count), np.minimum(count, MOST_NODES), MOST_NODES)
    low, high = np.full(sigma.size, -np.inf), np.full(sigma.size, np.inf)
    # If a row's `count` of nodes is too small to give any bound (`_evaluate`), none of its nodes is computed.
    useful = 2.0 * np.pi * height * (count - 1.0) / (top - bottom) > growth + np.log(2.0 / LARGEST_ERROR)
    order = np.flatnonzero(useful)[np.argsort(count[useful])]
    start = 0
    while start < order.size:
        end = start + 1
        most = 2.0 * count[order[start]]
        # arrays fit into a cache if all rows together have at most 2^16 nodes
        while end < order.size and count[order[end]] <= min(most, 2**16 / (end + 1 - start)):
            end += 1
        rows = order[start:end]
        plan = (x[rows, None] for x in (sigma, q, bottom, top, height, growth))
        nodes = _trapezoid(int(count[rows].max()), *plan)
        low[rows], high[rows] = _evaluate(nodes, power[rows, None])
        start = end
    return Interval(low, high)


def _plan(sigma: np.ndarray, q: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return a trapezoid rule of error e^-NATS, as (lower end in u, upper end in u, height, growth, step).

    The integrand on the line Im u = height bounds the error. On this line, the integrand's modulus is at most e^growth
    times the integrand at Re u.
    """
    above = np.maximum(p, 1.0)
    excess = above * (above - 1.0) / (2.0 * sigma**2)
    least = np.maximum(0.0, above * np.log(q) + excess)
    reach = np.sqrt(2.0 * (NATS + np.maximum(0.0, np.log(q) + excess - least)))
    c = np.maximum(-p, 0.0)
    move = c * q / sigma
    by_floor = np.sqrt(2.0 * (NATS - c * np.log1p(-q)))
    by_jensen = move + np.sqrt(2.0 * NATS + move**2 + move / sigma)
    height = np.minimum(np.minimum(8.0, 0.9 * np.pi * sigma), sigma * np.sqrt(80.0 / np.maximum(c, 1e-9)))
    growth = 0.5 * height**2 - c * np.log(np.cos(0.5 * height / sigma))
    bottom = -np.where(c > 0, np.minimum(by_floor, by_jensen), reach)
    return bottom, above / sigma + reach, height, growth, 2.0 * np.pi * height / (NATS + growth)


def _trapezoid(
    count: int,
    sigma: np.ndarray,
    q: np.ndarray,
    bottom: np.ndarray,
    top: np.ndarray,
    height: np.ndarray,
    growth: np.ndarray,
) -> _Nodes:
    """Return the trapezoid rule with `count` nodes from `bottom` to `top`. Every argument array is (rows, 1)."""
    step = (top - bottom) / (count - 1)
    u = bottom + step * np.arange(count)
    y = u / sigma - 0.5 / sigma**2
    loss = log_mixture(y, q)
    posterior = np.exp(np.minimum(np.log(q) + y - loss, 0.0))
    decay = 2.0 * np.pi * height / step
    with np.errstate(over="ignore"):
        relative = 2.0 * np.exp(growth - decay) / -np.expm1(-decay) + 1e-31
    log_weight = np.log(step) - 0.5 * np.log(2.0 * np.pi) - 0.5 * u**2
    placed = 2.0 * (np.abs(u) + np.abs(bottom))  # distance of a node from its place on an exact grid
    loss_rounding = 4.0 * np.abs(loss) + posterior * (8.0 * (np.abs(u) / sigma + 1.0 / sigma**2) + placed / sigma)
    return _Nodes(log_weight, loss, 12.0 + 4.0 * u**2 + placed * np.abs(u), loss_rounding, relative)


@np.errstate(over="ignore", invalid="ignore")
def _evaluate(nodes: _Nodes, p: np.ndarray) -> Interval:
    """Return the bracket of log E_Q[mix^p] by a quadrature rule. A moment near 1 is computed by `_difference`."""
    exponent = p * nodes.loss
    raised = nodes.log_weight + exponent
    top = np.max(raised, axis=1, keepdims=True)
    weight = np.exp(raised - top)
    total = np.sum(weight, axis=1, keepdims=True)
    value = top + np.log(total)
    per_node = ROUNDOFF * (nodes.weight_rounding + 8.0 * np.abs(exponent) + np.abs(p) * nodes.loss_rounding)
    # The log of a sum of exponentials is off by at most the largest error of an exponent, and about by the mean error.
    worst, mean = np.max(per_node, axis=1, keepdims=True), np.sum(weight * per_node, axis=1, keepdims=True) / total
    of_nodes = np.where(worst < LARGEST_ERROR, mean * (1.0 + 2.0 * worst), worst)
    error = ROUNDOFF * (64.0 + np.abs(value) + np.abs(top)) + of_nodes + 2.0 * nodes.relative
    known = nodes.relative < LARGEST_ERROR
    low, high = np.where(known, value - error, -np.inf), np.where(known, value + error, np.inf)

    small = known & (np.abs(value) < 0.4) & (worst < LARGEST_ERROR)
    if not small.any():
        return Interval(low[:, 0], high[:, 0])
    shift, spread = _difference(nodes, p, exponent, raised)
    small &= np.abs(shift) + spread < 0.6
    near_low = np.log1p(np.where(small, shift - spread, 0.0))
    near_high = np.log1p(np.where(small, shift + spread, 0.0))
    near_low, near_high = near_low - 4.0 * ROUNDOFF * np.abs(near_low), near_high + 4.0 * ROUNDOFF * np.abs(near_high)
    low = np.where(small, np.maximum(low, near_low), low)
    high = np.where(small, np.minimum(high, near_high), high)
    return Interval(low[:, 0], high[:, 0])


@np.errstate(over="ignore", invalid="ignore")
def _difference(
    nodes: _Nodes, p: np.ndarray, exponent: np.ndarray, raised: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `E_Q[mix^p - 1 - p (mix - 1)]` (see `_evaluate`) and a bound on its error, for moments below 2."""
    base = np.exp(nodes.log_weight)
    lifted = np.exp(np.minimum(raised, _LARGEST_EXPONENT))
    mixed = np.exp(np.minimum(nodes.log_weight + nodes.loss, _LARGEST_EXPONENT))
    gentle = np.abs(exponent) < 1.0
    rise = np.where(gentle, base * np.expm1(np.where(gentle, exponent, 0.0)), lifted - base)
    line = np.where(np.abs(nodes.loss) < 1.0, base * np.expm1(np.minimum(nodes.loss, 1.0)), mixed - base)
    added = rise - p * line
    wrong = (64.0 + nodes.weight_rounding) * np.abs(added) + 8.0 * (np.abs(rise) + np.abs(p * line))
    wrong += 4.0 * np.abs(exponent) * lifted + np.abs(p) * np.abs(lifted - mixed) * nodes.loss_rounding
    # where |exponent| >= 1, `raised` and `log_weight` may be large and have large rounding errors
    steep = np.abs(raised) * lifted + np.abs(nodes.log_weight) * base
    wrong += 8.0 * np.where(gentle, 0.0, steep)
    wrong += 8.0 * np.abs(p) * np.where(np.abs(nodes.loss) < 1.0, 0.0, np.abs(nodes.log_weight + nodes.loss) * mixed)
    spread = ROUNDOFF * np.sum(wrong, axis=1, keepdims=True)
    return np.sum(added, axis=1, keepdims=True), spread + nodes.relative * (3.0 + np.abs(p)) * 2.0


def least_epsilon(
    parts: Components,
    delta: np.ndarray,  # (B,) the target delta minus the mass at infinity, above 0
    orders: np.ndarray | None = None,
) -> np.ndarray:
    """Return upper bounds of epsilon, (B,), by Rényi orders 1 + `orders`, or by a search for each row's best order."""
    log_delta = np.log(delta)
    best, least = _minimise(parts, lambda c, k: _sum_up(k, log_kappa(c), -log_delta) / c, orders)
    variation = np.sqrt(_square_of_variation(least))  # a 0 here is an underflow, so `near` ignores it
    near = (parts.log_survival == 0) & (variation > 0.0) & (delta * (1.0 - 1e-14) >= variation)
    return np.where(near, 0.0, np.maximum(best + 1e-13 * np.abs(best), 0.0))


def least_delta(parts: Components, epsilon: np.ndarray, orders: np.ndarray | None = None) -> np.ndarray:
    """Return upper bounds, (B,), of delta minus the mass at infinity. For `orders` see `least_epsilon`."""
    best, least = _minimise(parts, lambda c, k: _sum_up(k, -c * epsilon, log_kappa(c)), orders)
    finite = np.exp(np.minimum(best, 0.0)) * (1.0 + 1e-12) + SMALLEST_POSITIVE
    known = (parts.log_survival == 0) & (epsilon >= 0.0)
    near = np.where(known, np.sqrt(_square_of_variation(least)) * (1.0 + 1e-14), 1.0)
    return np.where(near > 0.0, np.minimum(finite, near), finite)


def _sum_up(*terms: np.ndarray) -> np.ndarray:
    """Return an upper bound of the exact sum of the terms: the computed sum plus a bound of its rounding error."""
    total, size = sum(terms, np.zeros(())), sum(map(np.abs, terms), np.zeros(()))
    return total + 4.0 * ROUNDOFF * size


def _square_of_variation(divergence: np.ndarray) -> np.ndarray:
    """Given a Rényi divergence, bound the squared total variation (Pinsker; Bretagnolle and Huber)."""
    divergence = np.maximum(divergence, 0.0)
    return np.minimum(0.5 * divergence, -np.expm1(-divergence))


def _minimise(
    parts: Components, objective: Callable[[np.ndarray, np.ndarray], np.ndarray], orders: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each row, the smallest objective and the smallest Rényi divergence among the orders that are tried.

    The objective is a valid bound at any c = order - 1. It has one minimum, since it, or c times it, is convex in c.
    """
    size = parts.mu2.size
    c = np.sort(START if orders is None else orders)[:, None] + np.zeros(size)
    best, least = np.full(size, np.inf), np.full(size, np.inf)
    if parts.finite_n.shape[1] == 1 and parts.guaranteed().all():  # no atom is read, so none is copied
        parts = parts._replace(finite_loss=parts.finite_loss[..., :0], finite_mass=parts.finite_mass[..., :0])
    for _ in range(4 if orders is None else 1):  # rounds of the search for the best order
        high = log_moments(parts.take(np.tile(np.arange(size), len(c))), c.ravel()).high.reshape(c.shape)
        k = np.where(np.isnan(high), np.inf, high)
        values = np.nan_to_num(objective(c, k), nan=np.inf, posinf=np.inf, neginf=-np.inf)
        at = np.argmin(values, axis=0)[None]
        best = np.minimum(best, np.take_along_axis(values, at, 0)[0])
        least = np.minimum(least, np.min(k / c, axis=0))
        left, right = (np.take_along_axis(c, np.clip(at + d, 0, c.shape[0] - 1), 0) for d in (-1, 1))
        c = left * (right / left) ** np.linspace(0.0, 1.0, 13)[:, None]
    return best, least
