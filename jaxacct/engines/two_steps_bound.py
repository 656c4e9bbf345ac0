"""Bounds of two steps' delta: the closed form of the second, averaged over what the first puts out.

With N the normal law and `z = e^{s u - s^2/2}`, s = 1/sigma, the first step's output u has the likelihood ratio z under
N, `mix = 1 - q + q z`, the loss log mix (remove) or -log mix (add), and

    delta(eps) = int N(du) G(z(u)),    remove: G = mix h(eps - log mix),    add: G = h(eps + log mix),

h(eps) being the second step's `H_{e^eps}(P || Q)`, for any real eps.

*A cell.*  G is convex in z, since h is convex in e^eps and mix is affine in z.  On a cell from a to b let A_a and A_b
be the weights with `A_a + A_b = N(cell)` and `A_a z_a + A_b z_b = int z dN`, let C = `int (z - z_a)(z_b - z) dN`, and
m <= G'' <= M.  Both `G - m z^2/2` and `M z^2/2 - G` are convex and lie below their chords; therefore

    A_a G_a + A_b G_b - M C/2  <=  int_cell G dN  <=  A_a G_a + A_b G_b - m C/2,

which are apart by the third power of the cell's width.  P(cell) is `mix_a A_a + mix_b A_b` (remove) or A_a + A_b (add),
and h is monotone in u: P(cell) times the lesser of h_a and h_b is another lower bound, for where G'' is hardly bounded.

*The tails* on either side of the cells have P(tail) times a value between h at the last node and h at the limit: at
z = 0 on the left, where mix = 1 - q; 1 (remove) or 0 (add) on the right.

*G''.*  With t = eps - log mix, lambda = log((q_2 + e^t - 1)/q_2) and mu_2 = 1/sigma_2, remove:

    G'' = q^2 e^{2 eps}/(q_2 mu_2 sqrt(2 pi)) mix^-3 exp(-mu_2^2/8 - 3 lambda/2 - lambda^2/(2 mu_2^2)),

and 0 once `e^t <= 1 - q_2`.  (G is `int (c dP - d dQ)_+` over the second step's Gaussian pair, with c = q_2 mix and
d = e^eps - (1 - q_2) mix: where both are affine in z, `G'' = (c d' - d c')^2 H''(d/c)/c^3`, H'' being known.)  The add
direction is `1 - E mix + E G_remove` at -eps, E = e^eps: its G'' is E times that with -eps in place of eps.  On a cell
mix rises and lambda falls, and the exponent is concave in lambda with its top at -3 mu_2^2/2: that gives m and M.

*The weights* A_a, A_b and C, by ten Gauss points on cells so short that `w (|u| + 2 s) <= 2` and w <= 1/4.  With
u = a + w v the integrands are N(a) w times `D = e^{-a w v - w^2 v^2/2}` times p, 1 - p, or p (1 - p) (e^{s w} - 1)^2
z_a^2, for `p = (e^{s w v} - 1)/(e^{s w} - 1)`.  On the ellipse about [0, 1] with the parameter 12 both |v| and |1 - v|
are below 3.53, so that D p and D (1 - p) are below 6200 and D p (1 - p) is below 22000.  Gauss's rule is exact for
degree 19, so its error is below `4 12^-19/11` = 1.2e-21 times these.  As v >= p >= .58 v, and D >= .13 where s w = 0
and .96 where s w = 1, the integrals are above .06 and .02: the weights are known within 2e-16 of themselves, and C
within 2e-15, rounding apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import closed_form

__all__ = ["Cells", "Steps", "bounds", "cells", "first_loss", "log_bend", "shifted"]

LONGEST_CELL = 0.25
"""The longest cell w, in deviations."""
LARGEST_TURN = 2.0
"""The largest w (|u| + 2 s) of a cell."""
WEIGHT_ERROR = 2e-14
"""Relative error of a cell's weights: of the quadrature, of its sum of ten positive terms, and of their products."""
BEND_ERROR = 1e-13
"""The same of C."""
LOG_NORMAL_TOP = -0.5 * np.log(2.0 * np.pi)
"""Logarithm of the standard normal density at 0."""
UNDERFLOW = 1e-304
"""More than what underflows in a sum of products of masses and profiles."""
LOG_ZERO = -1e300
"""The logarithm of 0 where arithmetic with infinities would not do."""
_ABSCISSAE, _HALVES = np.polynomial.legendre.leggauss(10)
_NODES, _WEIGHTS = 0.5 * (_ABSCISSAE + 1.0), 0.5 * _HALVES
"""Of Gauss-Legendre on [0, 1]."""
LARGEST_EXPONENT = 700.0
"""Cap of exponents: e^700 is near the end of float64's range."""


class Steps(NamedTuple):
    """Two sampled Gaussians in one direction; every array (B, 1).  The first one's output is integrated over."""

    sigma: np.ndarray
    q: np.ndarray
    second_sigma: np.ndarray
    second_q: np.ndarray
    removing: np.ndarray

    def take(self, rows: np.ndarray | slice) -> Steps:
        """Some of the rows."""
        return Steps(*(x[rows] for x in self))


class Cells(NamedTuple):
    """Cells of the first step's output, and what of the bounds does not depend on eps."""

    nodes: np.ndarray  # (B, N + 1)
    loss: np.ndarray  # (B, N + 1) log mix at the nodes
    off: np.ndarray  # (B, N + 1) how far that may be off
    first: np.ndarray  # (B, N) weight of h at the left end
    last: np.ndarray  # (B, N) and at the right end, both masses of P
    wrong: np.ndarray  # (B, N) relative error of these weights
    log_bend: np.ndarray  # (B, N) log of C/2
    bend_wrong: np.ndarray  # (B, N) error of that logarithm
    below: np.ndarray  # (B, 2) bounds of P(u < first node)
    above: np.ndarray  # (B, 2) bounds of P(u > last node)
    sound: np.ndarray  # (B,) whether every cell is short enough for the quadrature

    def take(self, rows: np.ndarray) -> Cells:
        """Those of some of the rows."""
        return Cells(*(x[rows] for x in self))


def first_loss(steps: Steps, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log mix of the first step at u, bound on its error).

    The exponent y = s u - s^2/2 is known to 4 units of |s u| + s^2, and log mix moves by q z/mix times that.  Otherwise
    it is known to 16 units: of itself where it is log1p(q (z - 1)) with |q (z - 1)| <= 1/2, and of 1 and the logarithms
    that go into it where it is log((1 - q) + q z).
    """
    s, q = 1.0 / steps.sigma, steps.q
    y = s * (u - 0.5 * s)
    part = q * np.expm1(np.minimum(y, LARGEST_EXPONENT))
    small = np.abs(part) <= 0.5
    far = np.logaddexp(np.log1p(-q), np.log(q) + y)
    loss = np.where(small, np.log1p(np.where(small, part, 0.0)), far)
    share = np.exp(np.minimum(np.log(q) + y - loss, 0.0))
    off = share * 4.0 * ROUNDOFF * (np.abs(s * u) + s * s) * 1.01
    rounding = np.where(small, np.abs(loss), 1.0 + np.abs(loss) + np.abs(np.log(q)) + np.abs(y) * share)
    return loss, off + 16.0 * ROUNDOFF * rounding


def cells(steps: Steps, nodes: np.ndarray) -> Cells:
    """The cells between nodes (B, N + 1), which do not fall from left to right."""
    s = 1.0 / steps.sigma
    left, w = nodes[:, :-1], np.diff(nodes, axis=1)
    turn, whole = w * np.maximum(np.abs(left), np.abs(nodes[:, 1:])), np.expm1(s * w)
    short = (w <= LONGEST_CELL) & (turn + 2.0 * s * w <= LARGEST_TURN) & (whole > 1e-290)
    divisor = np.where(short, whole, 1.0)
    begin, end, bend = (np.zeros_like(w) for _ in range(3))
    for v, weight in zip(_NODES, _WEIGHTS, strict=True):
        density = weight * np.exp(-v * w * (left + 0.5 * v * w))
        part = np.expm1(v * s * w) / divisor
        begin += density * (1.0 - part)
        end += density * part
        bend += density * part * (1.0 - part)
    loss, off = first_loss(steps, nodes)
    counted = np.where(steps.removing, loss, 0.0)
    log_scale = np.log(np.maximum(w, 1e-300)) - 0.5 * left * left + LOG_NORMAL_TOP
    first = np.exp(log_scale + counted[:, :-1]) * begin
    last = np.exp(log_scale + counted[:, 1:]) * end
    size = np.abs(log_scale) + left * left + np.abs(counted[:, :-1]) + np.abs(counted[:, 1:])
    moved = np.where(steps.removing, off[:, :-1] + off[:, 1:], 0.0)
    y = s * (left - 0.5 * s)
    log_bend = log_scale + 2.0 * (y + np.log(divisor)) + np.log(np.where(short, bend, 1.0)) - np.log(2.0)
    bend_wrong = BEND_ERROR + 16.0 * ROUNDOFF * (
        size + np.abs(s * left) + s * s + np.abs(np.log(divisor)) + np.abs(log_bend)
    )
    wrong = WEIGHT_ERROR + 8.0 * ROUNDOFF * size + 1.1 * moved
    empty = w == 0.0
    return Cells(
        nodes,
        loss,
        off,
        np.where(empty, 0.0, first),
        np.where(empty, 0.0, last),
        wrong,
        np.where(empty, LOG_ZERO, log_bend),
        bend_wrong,
        _tail(steps, nodes[:, :1], -1.0),
        _tail(steps, nodes[:, -1:], 1.0),
        np.all((short | empty) & (w >= 0.0) & (wrong < 0.05), axis=1),
    )


def _tail(steps: Steps, at: np.ndarray, side: float) -> np.ndarray:
    """(B, 2) bounds of the first step's P-mass beyond a point, below it (side -1) or above it (1)."""
    s, q = 1.0 / steps.sigma, np.where(steps.removing, steps.q, 0.0)
    mass, wrong = np.zeros_like(at), np.zeros_like(at)
    for share, x in ((1.0 - q, -side * at), (q, -side * (at - s))):
        term = share * special.ndtr(x)
        mass, wrong = mass + term, wrong + term * ROUNDOFF * (64.0 + 8.0 * (np.abs(x) + 1.0) * (np.abs(at) + s))
    return np.concatenate([np.maximum(mass - wrong, 0.0), np.minimum(mass + wrong, 1.0)], axis=1)


def shifted(steps: Steps, t: np.ndarray) -> np.ndarray:
    """lambda = log((q_2 + e^t - 1)/q_2); -inf where that is not positive."""
    q = steps.second_q
    ratio = np.expm1(np.minimum(t, 1.0)) / q
    near = np.log1p(np.where(ratio > -1.0, ratio, 0.0))
    far = t - np.log(q) + np.log1p((q - 1.0) * np.exp(-np.maximum(t, 1.0)))
    return np.where(t > 1.0, far, np.where(ratio > -1.0, near, -np.inf))


def log_bend(steps: Steps, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log of G'' mix^3 without the exponent in lambda, bound on its error); (B, 1)."""
    mu = 1.0 / steps.second_sigma
    grown = np.where(steps.removing, 2.0, -1.0) * eps
    terms = (2.0 * np.log(steps.q), -np.log(steps.second_q), -np.log(mu), grown, -0.125 * mu * mu, LOG_NORMAL_TOP)
    value, size = np.asarray(sum(terms)), np.asarray(sum(np.abs(term) for term in terms))
    return value, 16.0 * ROUNDOFF * (1.0 + size)


def _bends(steps: Steps, made: Cells, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(m C/2, M C/2) of every cell, rounded down and up."""
    t = np.where(steps.removing, eps, -eps) - made.loss
    value, mu2 = shifted(steps, t), np.square(1.0 / steps.second_sigma)
    off = made.off + 2.0 * ROUNDOFF * (np.abs(eps) + np.abs(made.loss))
    with np.errstate(over="ignore", invalid="ignore"):
        # lambda moves by e^t/(q_2 + e^t - 1) = 1 + (1 - q_2) e^-lambda/q_2 per unit of t, by 10 % more .09 further down
        inverse = np.exp(-value)
        moved = 1.1 * off * (1.0 + (1.0 - steps.second_q) / steps.second_q * inverse)
        moved += 16.0 * ROUNDOFF * (np.abs(value) + np.where(t < 0.0, inverse, 0.0))
        exponent = -value * (1.5 + 0.5 * value / mu2)
        size = np.abs(value)
        wrong = moved * (1.5 + (size + moved) / mu2) + 16.0 * ROUNDOFF * size * (1.5 + size / mu2)
        known = (moved < 0.09) & np.isfinite(wrong)
    top = 1.125 * mu2 * (1.0 + 8.0 * ROUNDOFF)
    straight = np.expm1(np.minimum(t, 1.0) + off) < -steps.second_q * (1.0 + 4.0 * ROUNDOFF)
    low = np.where(known, exponent - wrong, -np.inf)
    high = np.where(straight, -np.inf, np.where(known, exponent + wrong, top))
    peak = -1.5 * mu2
    across = (value[:, :-1] >= peak) & (value[:, 1:] <= peak)
    most = np.where(across, top, np.maximum(high[:, :-1], high[:, 1:]))
    least = np.minimum(low[:, :-1], low[:, 1:])
    fixed, error = log_bend(steps, eps)
    error = error + made.bend_wrong
    three, loose = 3.0 * made.loss, 3.1 * made.off
    base = made.log_bend + fixed
    up = base - three[:, :-1] + most + error + loose[:, :-1] + 8.0 * ROUNDOFF * (np.abs(base) + np.abs(three[:, :-1]))
    down = base - three[:, 1:] + least - error - loose[:, 1:] - 8.0 * ROUNDOFF * (np.abs(base) + np.abs(three[:, 1:]))
    return np.exp(np.minimum(down, LARGEST_EXPONENT)) * (1.0 - 1e-12), np.exp(np.minimum(up, LARGEST_EXPONENT)) * (
        1.0 + 1e-12
    )


def bounds(steps: Steps, made: Cells, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) of delta(eps), eps (B,) >= 0; [0, 1] where nothing is known."""
    eps = eps[:, None]
    sign = np.where(steps.removing, -1.0, 1.0)
    end = np.log1p(-steps.q)
    loss, off = np.concatenate([end, made.loss], axis=1), np.concatenate([-4.0 * ROUNDOFF * end, made.off], axis=1)
    at = eps + sign * loss
    off = off + 2.0 * ROUNDOFF * (np.abs(eps) + np.abs(loss))
    low, high = closed_form.profile_of_one_step(steps.second_sigma, steps.second_q, steps.removing, at, off)
    least, most = _bends(steps, made, eps)
    # h rises with u in the remove direction and falls in the add direction
    limit = np.where(steps.removing[:, 0], 1.0, 0.0)
    (lowest, low), (highest, high) = ((x[:, 0], x[:, 1:]) for x in (low, high))
    less, more = 1.0 - made.wrong, 1.0 + made.wrong
    chord = (made.first * low[:, :-1] + made.last * low[:, 1:]) * less - most
    flat = (made.first + made.last) * less * np.minimum(low[:, :-1], low[:, 1:])
    lower = np.sum(np.fmax(chord, flat), axis=1)
    chord = (made.first * high[:, :-1] + made.last * high[:, 1:]) * more
    upper = np.sum(np.maximum(chord - least, 0.0), axis=1)
    lower += made.below[:, 0] * np.minimum(lowest, low[:, 0]) + made.above[:, 0] * np.minimum(limit, low[:, -1])
    upper += made.below[:, 1] * np.maximum(highest, high[:, 0]) + made.above[:, 1] * np.maximum(limit, high[:, -1])
    rounding = ROUNDOFF * (made.nodes.shape[1] + 64.0)
    lower, upper = np.maximum(lower * (1.0 - rounding) - UNDERFLOW, 0.0), upper * (1.0 + rounding) + UNDERFLOW
    known = made.sound & (lower <= upper)
    return np.where(known, np.minimum(lower, 1.0), 0.0), np.where(known, np.minimum(upper, 1.0), 1.0)
