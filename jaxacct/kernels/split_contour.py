"""delta(eps) where few steps matter: the contour integral of a split law, with the rest in closed form.

Cutting the far outcomes off frees the tilted law of losses that matter to nobody; taking the calm compositions out
frees the characteristic function of the near-atom of steps without a hit.  See aside.py and README.md of this folder.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.floats import ROUNDOFF
from jaxacct.kernels import aside, saddle
from jaxacct.kernels.contour import Bracketed
from jaxacct.kernels.law import Law
from jaxacct.kernels.split import AWAY, Window, cumulants, shares
from jaxacct.kernels.split_place import AXIS, Placed, frames_of, plan
from jaxacct.kernels.split_proof import ends, proof
from jaxacct.kernels.split_wave import Wave, estimate, wave_at

USUAL = -20.0
"""Where log delta starts if nothing is known."""
BELIEVED = 1e6
"""The trust in a start where a split rung has looked but certified nothing: believed, but to be improved on."""
SEARCH = 2.5
"""Rounds move eps by at most this factor."""


def _solve(wave: Wave, start, log_delta):
    def newton(_, eps):
        value, rate = estimate(wave, eps)
        rate = jnp.clip(rate, 0.05 / start, 5.0 * wave.c + 5.0)
        moved = eps + jnp.clip((value - log_delta) / rate, -0.4 * start, 0.4 * start)
        return jnp.clip(moved, start / SEARCH, start * SEARCH)

    return lax.fori_loop(0, 7, newton, start)


def _rounds(law: Law, follow, start, plan_at, points, count, rounds):
    """Place the contour and follow it to the next value, again and again; the last placement is returned."""

    def again(_, carry):
        placed = plan_at(carry[0])
        wave, made_from = wave_at(law, placed.place, points, count)
        return follow(carry[0], wave), placed, wave, made_from

    shapes = jax.eval_shape(again, 0, (start,))[1:]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, rounds, again, (start, *empty))


def _first(law: Law, log_delta, log_tol):
    """The saddle point approximation of eps when far outcomes are cut off by their mass alone."""
    high = jnp.where(law.sign > 0, aside.far_by_mass(law, log_delta + log_tol), AWAY)
    away = jnp.full_like(high, AWAY)
    both = shares(frames_of(law, Window(away, high, jnp.ones_like(log_delta)), 1.0, AXIS))
    return saddle.for_delta_of(lambda c: cumulants(law, 1.0, both, c), log_delta).epsilon


def epsilon(law: Law, log_delta_low, log_delta_high, start, log_tol, points, count, rounds):
    """`inf {eps : delta(eps) <= delta}` for a positive solution.

    start: a starting value and the factor by which the saddle point approximation may be off before the value is
    disbelieved (0: there is none; inf: it is the solution already).
    """
    guess = jnp.clip(_first(law, log_delta_low, log_tol), 1e-12, 1e9)
    value, trust = start
    likely = (value * trust > guess) & ((value < guess * trust) | (guess < 1e-11))
    start = jnp.where(likely, value, guess)
    rounds = jnp.where(jnp.isinf(trust), 1, rounds)
    solution, placed, wave, made_from = _rounds(
        law,
        lambda eps, wave: _solve(wave, eps, log_delta_low),
        start,
        lambda eps: plan(law, eps, log_delta_low, log_tol, count),
        points,
        count,
        rounds,
    )
    return _certified(law, placed, wave, made_from, solution, log_delta_low, log_delta_high, points)


def epsilon_placed(law: Law, log_delta_low, log_delta_high, start, placed: Placed, points, count):
    """The same from a solution and a place that are known already, from nearly the same law.

    The certificate bounds every error for this law, wherever the windows are; but what is left aside assumes the
    remove direction, so that in the other one nothing is certified for windows that cut anything off.
    """
    wave, made_from = wave_at(law, placed.place, points, count)
    solution = _solve(wave, start, log_delta_low)
    answer = _certified(law, placed, wave, made_from, solution, log_delta_low, log_delta_high, points)
    window = placed.place.window
    whole = (window.keep > 0) & (jnp.minimum(jnp.min(window.low), jnp.min(window.high)) >= AWAY)
    fits = (law.sign > 0) | whole
    lower, upper = jnp.where(fits, answer.lower, -jnp.inf), jnp.where(fits, answer.upper, jnp.inf)
    return answer._replace(lower=lower, upper=upper, ok=answer.ok & fits)


def _certified(law: Law, placed: Placed, wave, made_from, solution, log_delta_low, log_delta_high, points):
    shown = proof(law, placed, wave, made_from, points)
    _, rate = estimate(wave, solution)
    low, high = ends(wave, shown, solution)
    grain = 16.0 * ROUNDOFF * (jnp.abs(wave.k0) + jnp.abs(log_delta_low) + 4.0)
    rate = jnp.maximum(rate, 1e-3 / solution)
    above = solution + 1.05 * (jnp.maximum(high - log_delta_low, 0.0) + grain) / rate
    below = solution - 1.05 * (jnp.maximum(log_delta_high - low, 0.0) + grain) / rate
    lowers, uppers = jax.vmap(ends, (None, None, 0))(wave, shown, jnp.stack([below, above]))
    # the logarithms of delta come from outside, to a few units
    upper_ok = uppers[1] + 4.0 * ROUNDOFF * jnp.abs(log_delta_low) <= log_delta_low
    lower_ok = (
        (below > 0) & (below < jnp.inf) & (lowers[0] - 4.0 * ROUNDOFF * jnp.abs(log_delta_high) >= log_delta_high)
    )
    lower, upper = jnp.where(lower_ok, below, -jnp.inf), jnp.where(upper_ok, above, jnp.inf)
    return Bracketed(lower, solution, upper, upper_ok & lower_ok, shown.needs)


def delta(law: Law, eps, start, log_tol, points, count, rounds):
    """log of (lower, estimate, upper) of delta(eps), eps > 0; `start` as for epsilon, used from BELIEVED on."""
    begin = jnp.where(start[1] >= BELIEVED, start[0], USUAL)
    middle, placed, wave, made_from = _rounds(
        law,
        lambda log_delta, wave: jnp.clip(estimate(wave, eps)[0], log_delta - 20.0, 0.0),
        begin,
        lambda log_delta: plan(law, eps, log_delta, log_tol, count),
        points,
        count,
        rounds,
    )
    shown = proof(law, placed, wave, made_from, points)
    lower, upper = ends(wave, shown, eps)
    ok = jnp.isfinite(lower) & jnp.isfinite(upper)
    return Bracketed(lower, jnp.clip(middle, lower, upper), upper, ok, shown.needs)
