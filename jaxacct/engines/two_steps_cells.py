"""Where the cells of two steps go: many where the integrand of delta is bent, few elsewhere.

Nothing here enters a bound; a bad choice makes it wide.  The width of the bracket is about `int N T w^3` with w(u)
the cells' width and T the size of `|d(G'' z^2 s^2)/du|`; for a given number of cells it is least if their density is
`(N T)^{1/4}`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

from jaxacct.engines import closed_form
from jaxacct.engines.two_steps_bound import LARGEST_TURN, LONGEST_CELL, Steps, first_loss, log_bend, shifted

__all__ = ["Survey", "placed", "surveyed"]

TAIL_SHARE = 1e-10
"""Share of delta that may lie in a tail, times what is not known of h there."""
FIRST_SHARE = 0.7
"""Share of the cells that is handed out before the others are used to let their widths grow gradually."""
SHORTER = 1.02
"""By how much cells are shorter than they must be: one that lies in two intervals has the mean of their widths."""
GROWTH = 0.2
"""By how much of its distance from another cell a cell may be longer than that one."""
POINTS_BEYOND = 12
"""By how many points of the survey the cells go further to the right than they must."""
REACH = 39.0
"""Deviations beyond which a normal law has no mass in float64."""
LEAST_LOG_DENSITY = -20.0
"""Least logarithm of the density of cells, over the largest."""
LEAST_INTEGRAND = 1e-305
"""What an integrand below it is replaced by before its logarithm is taken."""
_ABOUT = np.concatenate([-np.geomspace(60.0, 1e-9, 36), [0.0], np.geomspace(1e-9, 60.0, 36)])
"""Points of the survey about a place where the integrand may have a kink, in the exponent y: dense towards it."""
_WIDE = np.linspace(-REACH, REACH, 105)
"""Points of the survey about either mode, in deviations: four to three deviations."""


class Survey(NamedTuple):
    """What the integrand looks like on a rough grid."""

    u: np.ndarray  # (B, S) ascending
    loss: np.ndarray  # (B, S) log mix
    left: np.ndarray  # (B, S) how much h differs from there to the far left, at most
    right: np.ndarray  # (B, S) and to the far right
    delta: np.ndarray  # (B,) estimate


def surveyed(steps: Steps, eps: np.ndarray) -> Survey:
    """The integrand at eps (B,): about either mode, and about the places where it may have a kink."""
    eps = eps[:, None]
    s = 1.0 / steps.sigma
    signed = np.where(steps.removing, eps, -eps)
    knee = np.log1p(-steps.q) - np.log(steps.q)
    # where nothing of eps is left for the second step, and where the first exceeds eps by all that the second can lose
    places = [_exponent(steps, loss) for loss in (signed, signed - np.log1p(-steps.second_q))]
    centres = [(np.where(np.isfinite(y), y, knee) / s + 0.5 * s) + _ABOUT / s for y in (knee, *places)]
    u = np.concatenate([_WIDE + 0.0 * s, _WIDE + s, *centres], axis=1)
    u = np.sort(np.clip(u, -REACH, REACH + np.where(steps.removing, s, 0.0)), axis=1)
    loss, off = first_loss(steps, u)
    log_mass = -0.5 * u * u - 0.5 * np.log(2.0 * np.pi) + np.where(steps.removing, loss, 0.0)
    every = np.concatenate([np.log1p(-steps.q), loss], axis=1)
    off = np.concatenate([0.0 * eps, off], axis=1)
    at = eps - np.where(steps.removing, every, -every)
    low, high = closed_form.profile_of_one_step(steps.second_sigma, steps.second_q, steps.removing, at, off)
    logs = log_mass + np.log(np.maximum(low[:, 1:], LEAST_INTEGRAND))
    delta = np.sum(_log_linear(logs, np.diff(u, axis=1)), axis=1)
    limit = np.where(steps.removing, 1.0, 0.0)
    left, right = (
        np.maximum(high, high[:, :1]) - np.minimum(low, low[:, :1]),
        np.maximum(high, limit) - np.minimum(low, limit),
    )
    return Survey(u, loss, left[:, 1:], right[:, 1:], delta)


def _exponent(steps: Steps, loss: np.ndarray) -> np.ndarray:
    """y with log(1 - q + q e^y) = loss; -inf where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.log(np.maximum(1.0 + np.expm1(np.minimum(loss, 1.0)) / steps.q, 0.0))
        return np.where(
            loss > 1.0, loss + np.log1p((steps.q - 1.0) * np.exp(-np.maximum(loss, 1.0))) - np.log(steps.q), rest
        )


def _log_linear(logs: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The integral over each interval of a function whose logarithm is linear there."""
    rise = np.diff(logs, axis=1)
    mean = np.where(np.abs(rise) < 1e-6, 1.0, np.expm1(-np.abs(rise)) / np.where(rise == 0.0, 1.0, -np.abs(rise)))
    return np.exp(np.maximum(logs[:, :-1], logs[:, 1:])) * mean * width


def placed(steps: Steps, eps: np.ndarray, count: int, survey: Survey) -> np.ndarray:
    """(B, count + 1) nodes for delta near eps (B,)."""
    u, s = survey.u, 1.0 / steps.sigma
    left, right = _unknown(steps, survey)
    inside = left[:, 1:] & right[:, :-1]
    width = np.diff(u, axis=1) * inside
    density = _density(steps, eps[:, None], survey)
    density = np.maximum(density[:, :-1], density[:, 1:])
    far = np.maximum(np.abs(u[:, :-1]), np.abs(u[:, 1:]))
    least = SHORTER * np.maximum((far + 2.0 * s) / LARGEST_TURN, 1.0 / LONGEST_CELL)
    used = np.sum(least * width, axis=1, keepdims=True)
    every = least + density * _share(FIRST_SHARE * count - used, density * width)
    extra = np.maximum(every, 1.0 / _graded(u, 1.0 / every)) - least
    total = np.cumsum((least + extra * _share(count - used, extra * width)) * width, axis=1)
    total = np.concatenate([np.zeros_like(total[:, :1]), total], axis=1)
    nodes = np.empty((u.shape[0], count + 1))
    for row in range(u.shape[0]):
        some = np.flatnonzero(inside[row])
        if some.size:
            some = np.arange(some[0], some[-1] + 2)
            ends = np.linspace(total[row, some[0]], total[row, some[-1]], count + 1)
            nodes[row] = np.interp(ends, total[row, some], u[row, some])
        else:  # two tails alone, from where the right one may be left
            nodes[row] = u[row, np.argmax(~right[row])]
    return nodes


def _share(left: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(B, 1) the factor by which what is wanted uses up what is left."""
    return np.maximum(left, 0.0) / np.maximum(np.sum(wanted, axis=1, keepdims=True), 1e-300)


def _graded(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The largest widths of at most w, on the intervals between u, that grow by GROWTH per unit of u at most."""
    left, right = GROWTH * u[:, :-1], GROWTH * u[:, 1:]
    graded = w.copy()
    rising = np.minimum.accumulate((w - right)[:, :-1], axis=1) + left[:, 1:]
    falling = np.minimum.accumulate((w + left)[:, :0:-1], axis=1)[:, ::-1] - right[:, :-1]
    graded[:, 1:] = np.minimum(graded[:, 1:], rising)
    graded[:, :-1] = np.minimum(graded[:, :-1], falling)
    return np.maximum(graded, 1e-300)


def _density(steps: Steps, eps: np.ndarray, survey: Survey) -> np.ndarray:
    """(B, S) (N T)^{1/4} over its largest value, at least e^-20."""
    s, mu2 = 1.0 / steps.sigma, np.square(1.0 / steps.second_sigma)
    t = np.where(steps.removing, eps, -eps) - survey.loss
    value = shifted(steps, t)
    y = s * (survey.u - 0.5 * s)
    share = np.exp(np.minimum(np.log(steps.q) + y - survey.loss, 0.0))
    value = np.where(np.isfinite(value), value, -1e3 * (1.0 + mu2))
    inverse = np.exp(np.minimum(-value, 300.0))
    steep = np.minimum(1.0 + (1.0 - steps.second_q) / steps.second_q * inverse, 1e200)
    rate = s * share * (3.0 + np.abs(1.5 + value / mu2) * steep)
    bend = log_bend(steps, eps)[0] - 3.0 * survey.loss - value * (1.5 + 0.5 * value / mu2)
    logs = -0.5 * survey.u**2 + 2.0 * y + bend + np.log(np.maximum(rate, 1e-300))
    logs = 0.25 * np.where(np.isnan(logs), -np.inf, logs)
    top = np.max(logs, axis=1, keepdims=True)
    return np.exp(np.maximum(logs - np.where(np.isfinite(top), top, 0.0), LEAST_LOG_DENSITY))


def _unknown(steps: Steps, survey: Survey) -> tuple[np.ndarray, np.ndarray]:
    """(B, S) where too much of delta would be unknown, were all on the left of it one tail, or all on the right."""
    s, q = 1.0 / steps.sigma, np.where(steps.removing, steps.q, 0.0)
    u, enough = survey.u, TAIL_SHARE * survey.delta[:, None]
    below, above = ((1.0 - q) * special.ndtr(-side * u) + q * special.ndtr(-side * (u - s)) for side in (-1.0, 1.0))
    left, right = below * survey.left > enough, above * survey.right > enough
    # where rounding leaves h unknown neither need be monotone
    left, right = np.maximum.accumulate(left, axis=1), np.maximum.accumulate(right[:, ::-1], axis=1)[:, ::-1]
    # in the add direction h may be 0 beyond a point, and that point moves with eps
    right[:, POINTS_BEYOND:] |= right[:, :-POINTS_BEYOND]
    return left, right
