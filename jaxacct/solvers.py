"""Root finding for calibration: a fast vectorised solve, then a certified search for whatever it missed.

Everything works on x = log(value).  `certify(goal, rows, values)` returns certified Bounds of epsilon; a value
"holds" when their upper end does not exceed the target.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.guess import AIM, Goal, Guess, guess

NUDGES = 2
SEARCHES = 60

Certify = Callable[[Goal, np.ndarray, np.ndarray], Bounds]


class _Found:
    """The best value so far of every row, with its certified bounds."""

    def __init__(self, size: int) -> None:
        self.value = np.full(size, np.nan)
        self.status = np.full(size, "infeasible", dtype="<U28")
        self.ends = [np.full(size, np.nan) for _ in range(3)]
        self.word = [np.full(size, w, dtype="<U28") for w in ("certified", "infeasible", "")]

    def keep(self, rows: np.ndarray, values: np.ndarray, bounds: Bounds, mask: np.ndarray, status: str) -> None:
        rows = rows[mask]
        self.value[rows], self.status[rows] = values[mask], status
        for end, name in zip(self.ends, ("lower", "estimate", "upper"), strict=True):
            end[rows] = getattr(bounds, name)[mask]
        for word, name in zip(self.word, ("kind", "status", "engine"), strict=True):
            word[rows] = getattr(bounds, name)[mask]

    def fail(self, rows: np.ndarray, status: str) -> None:
        """No value: also none that was kept before, which did not meet the whole target."""
        self.status[rows] = status
        self.word[1][rows] = status
        for column in (self.value, *self.ends):
            column[rows] = np.nan

    def only_what_holds(self, target: np.ndarray) -> None:
        """Fail whatever claims a value without a certified epsilon, at that value, that meets the target."""
        claimed = np.isin(self.status, ("ok", "not_binding"))
        self.fail(np.flatnonzero(claimed & ~((self.ends[2] <= target) & np.isfinite(self.value))), "infeasible")

    def columns(self) -> tuple[np.ndarray, ...]:
        return (*self.ends, *self.word)


def solve(goal: Goal, certify: Certify) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """(values, statuses, columns of Bounds) for every row of the goal."""
    found = _Found(goal.epsilon.size)
    todo = _extreme(goal, certify, found)
    start = guess(goal, todo)
    for known, found_out in zip(jax.tree.leaves(goal.hint), jax.tree.leaves(start.hint), strict=True):
        known[todo] = found_out
    if goal.unknown == "steps":
        _integers(goal, certify, found, todo, start.x)
    else:
        left = _polish(goal, certify, found, todo, start)
        if left.size:
            position = np.searchsorted(todo, left)
            _search(goal, certify, found, left, start.x[position])
    found.only_what_holds(goal.epsilon)
    return found.value, found.status, found.columns()


def search(goal: Goal, certify: Certify, near: Goal) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """`solve` for what has no fast path, from the fast solution of a similar goal: the same, by the search alone."""
    found = _Found(goal.epsilon.size)
    todo = _extreme(goal, certify, found)
    _search(goal, certify, found, todo, guess(near, todo).x)
    found.only_what_holds(goal.epsilon)
    return found.value, found.status, found.columns()


def _extreme(goal: Goal, certify: Certify, found: _Found) -> np.ndarray:
    """Settle the rows in which the least private value that is searched already meets the target."""
    rows = np.arange(goal.epsilon.size)
    if goal.unknown == "sampling_probability":
        candidates, end = rows, goal.limits[1]
    else:
        rate = goal.known["sampling_probability"]
        candidates, end = rows[rate == 0], goal.limits[0 if goal.unknown == "noise_multiplier" else 1]
    if candidates.size == 0:
        return rows
    values = np.full(candidates.size, end)
    bounds = certify(goal, candidates, values)
    holds = bounds.upper <= goal.epsilon[candidates]
    found.keep(candidates, values, bounds, holds, "not_binding")
    return np.setdiff1d(rows, candidates[holds])


def _values(goal: Goal, x: np.ndarray) -> np.ndarray:
    """e^x inside the limits, exactly at them where x is."""
    low, high = goal.limits
    with np.errstate(over="ignore"):
        values = np.clip(np.exp(x), low, high)
    values = np.where(np.abs(x - np.log(low)) < 1e-12, low, values)
    return np.where(np.abs(x - np.log(high)) < 1e-12, high, values)


def _usual_slope(goal: Goal, rows: np.ndarray) -> np.ndarray:
    """d epsilon / dx as it is for Gaussians, near enough for a nudge."""
    return goal.epsilon[rows] * (-1.3 if goal.unknown == "noise_multiplier" else 1.0)


def _polish(goal: Goal, certify: Certify, found: _Found, rows: np.ndarray, start: Guess) -> np.ndarray:
    """Certify the fast solutions, nudging those that overshoot; returns the rows that need a search."""
    missed = rows[~start.solved]
    rows, x, slope = rows[start.solved], start.x[start.solved], start.slope[start.solved]
    for _ in range(1 + NUDGES):
        if rows.size == 0:
            break
        values = _values(goal, x)
        bounds = certify(goal, rows, values)
        target = goal.epsilon[rows]
        holds = (bounds.upper <= target) & (bounds.upper >= target * (1.0 - 0.5 * goal.rtol))
        found.keep(rows, values, bounds, holds, "ok")
        finite = np.where(np.isfinite(bounds.upper), bounds.upper, 2.0 * target)
        usual = ~np.isfinite(slope) | (slope == 0)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            gap = target * (1.0 - 2.0 * AIM * goal.rtol) - finite
            move = gap / np.where(usual, _usual_slope(goal, rows), slope)
        x = (x + np.clip(np.where(np.isnan(move), 0.0, 1.1 * move), -0.1, 0.1))[~holds]
        rows, slope = rows[~holds], slope[~holds]
    return np.sort(np.concatenate([missed, rows]))


def _search(goal: Goal, certify: Certify, found: _Found, rows: np.ndarray, guess: np.ndarray) -> None:
    """A bracketed secant on log epsilon, with certified upper ends.

    Both directions of the relation are certified, but the remove direction alone, the larger one as a rule, leads
    the way; only candidates that meet the target there are evaluated in both.
    """
    leader = goal._replace(relation="remove_one") if goal.relation == "add_or_remove_one" else goal
    x = _secant(leader, certify, found, rows, guess)
    settled = np.isin(found.status[rows], ("ok", "not_binding"))
    rows, x = rows[settled], x[settled]
    if leader is goal or rows.size == 0:
        return
    values = _values(goal, x)
    bounds = certify(goal, rows, values)
    good = bounds.upper <= goal.epsilon[rows]
    for status in ("ok", "not_binding"):
        found.keep(rows, values, bounds, good & (found.status[rows] == status), status)
    if not good.all():
        found.fail(rows[~good], "infeasible")
        _secant(goal, certify, found, rows[~good], x[~good])


def _secant(goal: Goal, certify: Certify, found: _Found, rows: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Settle rows in `found`; returns the x of the values kept (meaningless where a row is infeasible)."""
    low, high = np.log(goal.limits[0]), np.log(goal.limits[1])
    falling = goal.unknown == "noise_multiplier"  # epsilon falls with x
    safe_limit, bold_limit = (high, low) if falling else (low, high)
    infeasible = {"noise_multiplier": "infeasible_noise", "sampling_probability": "infeasible_rate"}[goal.unknown]
    size = rows.size
    x, kept = np.clip(guess, low, high), np.full(size, safe_limit)
    safe, bold = np.full(size, np.nan), np.full(size, np.nan)
    last_x, last_f = np.full(size, np.nan), np.full(size, np.nan)
    slope = np.full(size, -1.3 if falling else 1.0)
    reach = np.full(size, 0.3)
    aim = np.log1p(-0.2 * goal.rtol)
    active = np.ones(size, bool)
    for turn in range(SEARCHES):
        here = np.flatnonzero(active)
        if here.size == 0:
            break
        at, target = x[here], goal.epsilon[rows[here]]
        values = _values(goal, at)
        bounds = certify(goal, rows[here], values)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(bounds.upper / target)
        f = np.where(np.isnan(ratio), 8.0, np.clip(ratio, -8.0, 8.0))  # what is not known is taken for far too much
        holds = bounds.upper <= target
        close = holds & (bounds.upper >= target * (1.0 - 0.5 * goal.rtol))
        at_bold = holds & (np.abs(at - bold_limit) < 1e-12)
        at_safe = ~holds & (np.abs(at - safe_limit) < 1e-12)
        never = at_safe & ~np.isfinite(safe[here])
        nearer = np.abs(at - bold_limit) < np.abs(kept[here] - bold_limit)
        better = holds & (nearer | (found.status[rows[here]] == "infeasible"))
        found.keep(rows[here], values, bounds, better, "ok")
        found.keep(rows[here], values, bounds, at_bold, "not_binding")
        found.fail(rows[here[never]], infeasible)
        kept[here[better]] = at[better]
        safe[here], bold[here] = np.where(holds, at, safe[here]), np.where(holds, bold[here], at)
        with np.errstate(invalid="ignore", divide="ignore"):
            fresh = (f - last_f[here]) / (at - last_x[here])
            sound = np.isfinite(fresh) & (fresh * slope[here] > 0) & (np.abs(f) < 8.0)
            slope[here] = np.where(sound, fresh, slope[here])
            step = (aim - f) / slope[here]
            met = np.abs(safe[here] - bold[here]) < goal.met
        last_x[here], last_f[here] = at, f
        active[here[close | at_bold | at_safe | met]] = False
        following = np.clip(at + np.clip(step, -reach[here], reach[here]), low, high)
        bracketed = np.isfinite(safe[here]) & np.isfinite(bold[here])
        ends = np.sort(np.stack([safe[here], bold[here]]), axis=0)
        outside = ~((following > ends[0]) & (following < ends[1])) | (turn % 6 == 5)
        x[here] = np.where(bracketed & outside, 0.5 * (safe[here] + bold[here]), following)
        reach[here] = np.where(np.abs(step) > reach[here], 2.0 * reach[here], reach[here])
    return kept


def _integers(goal: Goal, certify: Certify, found: _Found, rows: np.ndarray, guess: np.ndarray) -> None:
    """The largest whole number that holds: gallop away from the guess, then bisect."""
    limit = goal.limits[1]
    holds_at, fails_at = np.zeros(rows.size), np.full(rows.size, np.inf)
    with np.errstate(over="ignore"):
        n = np.clip(np.floor(np.exp(guess) * (1 + AIM * goal.rtol)), 1.0, limit)
    stride = np.ones(rows.size)
    active = np.ones(rows.size, bool)
    while active.any():
        here = np.flatnonzero(active)
        bounds = certify(goal, rows[here], n[here])
        good = bounds.upper <= goal.epsilon[rows[here]]
        found.keep(rows[here], n[here], bounds, good, "ok")
        at_limit = good & (n[here] == limit)
        found.keep(rows[here], n[here], bounds, at_limit, "not_binding")
        found.fail(rows[here[~good & (n[here] == 1.0)]], "infeasible_steps")
        holds_at[here] = np.where(good, n[here], holds_at[here])
        fails_at[here] = np.where(good, fails_at[here], n[here])
        active &= (fails_at - holds_at > 1.0) & (holds_at < limit)
        bracketed = np.isfinite(fails_at) & (holds_at > 0)
        with np.errstate(invalid="ignore"):
            middle = np.floor(0.5 * (holds_at + np.where(np.isfinite(fails_at), fails_at, limit)))
        up, down = np.minimum(holds_at + stride, limit), np.maximum(fails_at - stride, 1.0)
        n = np.where(bracketed, middle, np.where(holds_at > 0, up, down))
        stride = np.where(bracketed, stride, 4.0 * stride)
