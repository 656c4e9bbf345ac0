"""Where the calibration of DP-SGD starts: fast vectorised solves, estimates that search.py certifies.

Everything works on x = log(value).  The plain contour solves most rows; the split contour solves the others.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxacct.calibration.search import AIM, Start
from jaxacct.engines import contour
from jaxacct.engines.backend import evaluate
from jaxacct.kernels import calibration

ORDER = ("noise_multiplier", "sampling_probability", "steps")
TOLERANCE = 3e-7
"""Relative accuracy of delta in the fast solves."""
PLAIN = contour.LADDER[:2]
"""Rungs of the plain solve."""
PLAIN_FOR_DELTA = contour.LADDER[:3]
"""The same for a delta that is to be met: near eps = 0 the integrand decays slowly, and the plain one still serves."""
CALLS = 6
"""Most calls of the split solve for a row on one rung; each call places the windows anew."""
ENOUGH = 1e-6
"""A row is solved when the estimated error of x after the last secant step is below this."""
REACH, HALVINGS = 3.0, 14
"""`_one_hit` bisects between x - REACH and x + REACH, HALVINGS times."""
LASTING = 0.05
"""If x moved by less than this in its last call, the certificate uses the windows and the contour of that call."""
NEARLY = 1.5
"""A solve on a rung is accepted if it needs at most this many times the rung's nodes: it is only an estimate."""


class Goal(NamedTuple):
    """A parameter of DP-SGD to solve for, on a flat batch."""

    unknown: str
    epsilon: np.ndarray
    delta: np.ndarray
    known: dict[str, np.ndarray]
    limits: tuple[float, float]
    relation: str
    rtol: float
    hint: contour.Hint  # where the certificate should begin; filled in as it becomes known
    near: np.ndarray | None = None  # where the unknown is expected
    on_delta: bool = False  # whether delta at exactly this epsilon is to be met, instead of epsilon at this delta


class _Equation(NamedTuple):
    """The arguments of the kernels, row by row."""

    sign: np.ndarray
    base: np.ndarray
    unknown: np.ndarray
    epsilon: np.ndarray
    log_delta: np.ndarray
    log_tol: np.ndarray

    def take(self, rows: np.ndarray) -> _Equation:
        return _Equation(*(column[rows] for column in self))


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # targets at the ends of float64: x may be anything
def calibration_start(goal: Goal, rows: np.ndarray) -> tuple[Start, contour.Hint]:
    """A start for some rows of a goal, in the middle of the limits where no solve succeeds, and a hint for
    certificates."""
    known = {name: column[rows] for name, column in goal.known.items()}
    if goal.on_delta:  # epsilon may be 0
        epsilon, delta = goal.epsilon[rows], goal.delta[rows]
        delta = delta - AIM * goal.rtol * room(delta)
        log_delta, mu = np.log(delta), gaussian_mu(epsilon, delta)
    else:
        epsilon, log_delta = goal.epsilon[rows] * (1.0 - AIM * goal.rtol), np.log(goal.delta[rows])
        mu = _gaussian_mu_by_tail(epsilon, log_delta)
    nothing = np.zeros(rows.size)
    x = by_central_limit(goal, known, mu) if goal.near is None else np.log(goal.near[rows])
    found, hint = Start(x, nothing, nothing.astype(bool)), contour.no_hint(rows.size)
    if rows.size == 0:
        return found, hint
    full = known.get("sampling_probability", np.zeros(rows.size)) == 1.0
    if full.any():
        exact = mu[full] if goal.on_delta else gaussian_mu(epsilon[full], goal.delta[rows[full]])
        if goal.unknown == "noise_multiplier":
            found.x[full], found.slope[full] = 0.5 * np.log(known["steps"][full]) - np.log(exact), -epsilon[full]
        else:
            found.x[full] = 2.0 * np.log(exact * known["noise_multiplier"][full])
            found.slope[full] = 0.5 * epsilon[full]
        found.solved[full] = True
    unknown = np.array([name == goal.unknown for name in ORDER], np.float64)
    columns = [np.log(np.maximum(known.get(name, np.ones(rows.size)), 1e-300)) for name in ORDER]
    equation = _Equation(
        np.full(rows.size, -1.0 if goal.relation == "add_one" else 1.0),
        np.stack(columns, axis=1) * (1.0 - unknown),
        np.tile(unknown, (rows.size, 1)),
        epsilon,
        log_delta,
        np.full(rows.size, np.log(TOLERANCE)),
    )
    _plainly(goal, rows, equation, found, hint, mu)
    _split(goal, rows, equation, found, hint)
    known_x = np.isfinite(found.x)
    found.x[~known_x] = 0.5 * np.sum(np.log(goal.limits))
    found.solved[~known_x] = False
    return found, hint


def room(delta: np.ndarray) -> np.ndarray:
    """The unit of distances from a target delta: the smaller of delta and 1 - delta."""
    return np.minimum(delta, 1.0 - delta)


def gaussian_mu(epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The mu for which mu-GDP is (epsilon, delta)-DP, by bisection in log mu (an estimate)."""
    from jaxacct.engines import closed_form  # SciPy, which takes a while to import: only where a row needs it

    low, high = np.full(epsilon.shape, -30.0), np.full(epsilon.shape, 12.0)
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = closed_form.log_delta(np.exp(middle), epsilon)[0] > np.log(delta)
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.exp(low)


def _gaussian_mu_by_tail(epsilon: np.ndarray, log_delta: np.ndarray) -> np.ndarray:
    z = np.sqrt(-2.0 * log_delta)
    return 2.0 * epsilon / (z + np.sqrt(z**2 + 2.0 * epsilon))


def by_central_limit(goal: Goal, known: dict[str, np.ndarray], mu: np.ndarray) -> np.ndarray:
    """x by the central limit theorem."""
    with np.errstate(over="ignore", divide="ignore"):
        if goal.unknown == "noise_multiplier":
            x = -0.5 * np.log(np.log1p(mu**2 / (known["sampling_probability"] ** 2 * known["steps"])))
        elif goal.unknown == "steps":
            growth = np.expm1(np.minimum(known["noise_multiplier"] ** -2.0, 500.0))
            x = np.log(mu**2 / (known["sampling_probability"] ** 2 * growth))
        else:
            growth = np.expm1(np.minimum(known["noise_multiplier"] ** -2.0, 500.0))
            x = np.log(mu) - 0.5 * np.log(known["steps"] * growth)
    return np.clip(x, *np.log(goal.limits))


def _plainly(
    goal: Goal, rows: np.ndarray, equation: _Equation, found: Start, hint: contour.Hint, mu: np.ndarray
) -> None:
    """Rung by rung of the plain contour, each row on the one that its kernel says it needs."""
    rungs, spare = (PLAIN_FOR_DELTA, NEARLY) if goal.on_delta else (PLAIN, 1.0)
    low, high = np.log(goal.limits)
    variance = mu**2
    gap = equation.epsilon - variance / 2
    c = (gap + np.sqrt(gap**2 + 4 * variance)) / (2 * variance)
    due = np.where(found.solved, len(rungs), 0)
    for step, rung in enumerate(rungs):
        todo = np.flatnonzero(due == step)
        if todo.size == 0:
            continue
        static = {"points": rung.points, "count": rung.nodes, "rounds": 1 if step == 0 else 2}
        part = equation.take(todo)
        arguments = (*part[:3], found.x[todo], c[todo], *part[3:])
        solved = evaluate(calibration.solve, arguments, todo.size, rung.chunk, **static)
        x, of_delta, of_epsilon, residual, need = solved
        inside = (x > low - 1e-9) & (x < high + 1e-9)
        good = (np.abs(residual) < 1e-6) & (need <= spare * rung.nodes) & inside
        near = inside & (np.abs(residual) < 1.0)
        found.x[todo] = np.where(near, x, found.x[todo])
        slope = goal.delta[rows[todo]] * of_delta if goal.on_delta else of_epsilon
        found.slope[todo] = np.where(good, slope, found.slope[todo])
        found.solved[todo] = good
        if goal.on_delta:
            hint.near[todo], hint.rung[todo] = np.where(good, part.log_delta, 0.0), np.where(good, step, 0)
        wanted = np.searchsorted([spare * r.nodes for r in rungs], need)
        due[todo] = np.where(good, len(rungs), np.maximum(wanted, step + 1))


def _split(goal: Goal, asked: np.ndarray, equation: _Equation, found: Start, hint: contour.Hint) -> None:
    """Secant steps on the split contour until they are small, for what is left."""
    left = ~found.solved
    if not left.any():
        return
    low, high = np.log(goal.limits)
    sign = -1.0 if goal.unknown == "noise_multiplier" else 1.0
    slope = sign * -2.0 * equation.log_delta
    rows = np.flatnonzero(left)
    if not goal.on_delta:  # at eps = 0 that sum of single steps is above the true delta
        found.x[rows], slope[rows] = _one_hit(equation.take(rows), found.x[rows], slope[rows], sign)
    for place, rung in enumerate(contour.LADDER):
        if not rung.split or rung.chunk == 1:
            continue
        active = left.copy()
        for _ in range(CALLS):
            todo = np.flatnonzero(active)
            if todo.size == 0:
                break
            static = {"points": rung.points, "count": rung.nodes}
            part = equation.take(todo)
            arguments = (*part[:3], found.x[todo], slope[todo], *part[3:])
            leaves = evaluate(calibration.solve_split, arguments, todo.size, rung.chunk, **static)
            new = jax.tree.unflatten(calibration.SHAPE, leaves)
            usable = np.isfinite(new.x) & np.isfinite(new.residual)
            fits = (new.needs[:, 1] <= NEARLY * rung.nodes) & usable
            found.x[todo] = np.where(usable, np.clip(new.x, low, high), found.x[todo])
            slope[todo] = np.where(usable & (new.slope * sign > 0), new.slope, slope[todo])
            close = fits & (new.off < ENOUGH) & (new.moved < calibration.SETTLED)
            steep = goal.delta[asked[todo]] * new.slope if goal.on_delta else new.epsilon_slope
            found.slope[todo] = np.where(close, steep, found.slope[todo])
            found.solved[todo] = close
            _note(hint, todo, close, place, part.log_delta if goal.on_delta else part.epsilon, new)
            left[todo[close]] = False
            stuck = usable & (found.x[todo] != new.x) & (new.moved < calibration.SETTLED)
            active[todo] = ~close & usable & ~stuck & (fits | (new.moved > calibration.SETTLED))


def _note(
    hint: contour.Hint,
    rows: np.ndarray,
    close: np.ndarray,
    rung: int,
    near: np.ndarray,
    found: calibration.Solved,
) -> None:
    """Leave to the certificate what it need not find again."""
    rows = rows[close]
    hint.near[rows], hint.rung[rows] = near[close], rung
    hint.usable[rows] = found.moved[close] < LASTING
    for kept, new in zip(jax.tree.leaves(hint.placed), jax.tree.leaves(found.placed), strict=True):
        kept[rows] = new[close]


def _one_hit(equation: _Equation, x: np.ndarray, slope: np.ndarray, sign: float) -> tuple[np.ndarray, np.ndarray]:
    """(x, d log delta / dx), replaced where n times the delta of one sampled step equals delta at a more private value.

    This product is nearly a lower bound of the true delta, and nearly equal to it where few hits are expected.
    """
    from jaxacct.engines import closed_form  # SciPy, which takes a while to import: only where a row needs it

    def residual(x: np.ndarray) -> np.ndarray:
        sigma, q, n = np.exp(equation.base + x[:, None] * equation.unknown).T
        q = np.minimum(q, 1.0 - 1e-12)
        value, _ = closed_form.log_delta_of_one_step(sigma, q, equation.sign > 0, equation.epsilon)
        return np.log(n) + value - equation.log_delta

    # more private, and less private
    safe, bold = x + REACH * -sign, x + REACH * sign
    for _ in range(HALVINGS):
        middle = 0.5 * (safe + bold)
        above = residual(middle) > 0
        bold, safe = np.where(above, middle, bold), np.where(above, safe, middle)
    alone = 0.5 * (safe + bold)
    step = 1e-4
    steep = (residual(alone + step) - residual(alone - step)) / (2.0 * step)
    better = (sign * alone < sign * x) & np.isfinite(steep) & (sign * steep > 0)
    return np.where(better, alone, x), np.where(better, steep, slope)
