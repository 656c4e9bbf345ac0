"""The goal of a search for one parameter of Poisson sampled DP-SGD, and estimates of x = log(value) to start from.

Fast solves give the estimates, with delta by a plain or a split contour (engines/contour.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.accounting import account
from jaxacct.accounting.account import answer
from jaxacct.calibration.search import AIM, CLAIMED, BestValues, Search, Start
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.floats import bisected
from jaxacct.core.text import plain_record, plain_repr
from jaxacct.core.types import Leaf
from jaxacct.core.validation import (
    DELTA,
    FLOOR,
    OPEN_PROBABILITY,
    POSITIVE,
    Constraint,
    InputError,
    broadcast_shape,
    check,
    options,
    refuse_tracers,
)
from jaxacct.engines import contour
from jaxacct.engines.backend import evaluate
from jaxacct.engines.contour import no_hint
from jaxacct.engines.protocol import MechanismQuestion
from jaxacct.kernels import calibration
from jaxacct.mechanisms import Mechanism
from jaxacct.mechanisms.dp_sgd_run import NUMBERS, dp_sgd

ORDER = ("noise_multiplier", "sampling_probability", "steps")
TOLERANCE = 3e-7
"""The contours of the fast solves (top of this file) leave out terms of this size, relative to delta."""
PLAIN = contour.LADDER[:2]
"""Sizes of the plain contour that are tried in turn if epsilon is the target. Each is a `contour.Rung`."""
PLAIN_FOR_DELTA = contour.LADDER[:3]
"""As PLAIN, if delta is the target. The integrand decays slowly near eps = 0, and then needs more nodes."""
NEARLY = 1.5
"""Largest allowed ratio of needed nodes (estimated) to a contour's nodes; 1 on plain contours for a target epsilon."""
RATE_RANGE = (1e-12, 1.0)
"""Smallest and largest sampling probability that are searched."""
MAX_STEPS = 10**9
"""Largest number of steps that is searched, unless the call says otherwise."""
LEAST_RTOL = 1e-7
"""Smallest rtol allowed: brackets narrower than this are not always found."""
INFEASIBLE = dict(zip(ORDER, ("infeasible_noise", "infeasible_rate", "infeasible_steps"), strict=True))
"""For each unknown, the status of a row in which no value meets the target."""
BESIDE: dict[str, tuple[str, ...]] = {
    "target_advantage": (),
    "target_tpr": ("at_fpr",),
    "target_bayes_success": ("prior",),
    "target_posterior": ("prior", "at_fpr"),
    "target_reconstruction": ("baseline",),
    "target_mu": ("above_fpr",),
}
"""The risks that can be the target of a calibration, each with the settings that belong to it."""
TARGETS = tuple(BESIDE)
USUAL_FLOOR = 1e-10
"""Default of `above_fpr`, the least error rate at which mu of Gaussian DP must hold."""
RISK_RULES: dict[str, Constraint] = dict.fromkeys((*TARGETS[:5], "at_fpr", "prior", "baseline"), OPEN_PROBABILITY) | {
    "target_mu": POSITIVE,
    "above_fpr": FLOOR,
}
"""Allowed values of each target and setting."""
_EPSILON = Constraint("use a positive {name}; for delta at epsilon 0 use target_advantage", 0, lower_open=True)
RULES: dict[str, Constraint] = {"target_epsilon": _EPSILON, "target_delta": DELTA, **NUMBERS, **RISK_RULES}
"""Allowed values of each number of a calibration."""


def given_target(target_epsilon: Any, target_delta: Any, risks: dict[str, Any]) -> dict[str, Any] | None:
    """Return a dict of the target risk, first, and the risk's settings; None if the target is epsilon with delta."""
    named = [name for name in TARGETS if risks[name] is not None]
    wanted = [*(["target_epsilon"] if target_epsilon is not None or target_delta is not None else []), *named]
    choices = f"target_epsilon with target_delta, or one of {', '.join(TARGETS)}"
    if len(wanted) != 1:
        which = f" ({', '.join(wanted)})" if wanted else ""
        raise InputError(f"{len(wanted)} targets are given{which}; give {choices}")
    belongs = BESIDE.get(wanted[0], ())
    for other in ("at_fpr", "prior", "baseline", "above_fpr"):
        if risks[other] is not None and other not in belongs:
            owners = " or ".join(name for name, more in BESIDE.items() if other in more)
            raise InputError(f"{other} belongs to {owners}; leave it out beside {wanted[0]}")
        if risks[other] is None and other in belongs and other != "above_fpr":
            raise InputError(f"{wanted[0]} needs {other}; give both")
    if not named:
        if target_epsilon is None:
            raise InputError("target_delta needs target_epsilon; give both")
        if target_delta is None:
            raise InputError("target_epsilon needs target_delta; give both")
        return None
    return {name: USUAL_FLOOR if risks[name] is None else risks[name] for name in (named[0], *belongs)}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Calibrated values with the certified epsilon that they give; made by the calibrations.

    Parameters
    ----------
    value : array of the batch shape; NaN where `ok` is False.
    epsilon : Bounds at that value; `epsilon.upper <= target_epsilon` wherever `ok`.  If the target is a risk, lower,
        estimate and upper all equal the one eps at which delta was evaluated.  The risk follows from eps and delta.
    status : str or array of str
        "ok" (the value meets the target, and either a slightly less private value is shown to miss the target, or
        epsilon is within rtol of the target), "not_binding" (every searched value meets the target; the value is the
        end of the search range), "loose" (the value meets the target, but neither of the two facts that make "ok" is
        shown), or "infeasible_..." (`jaxacct.explain(status)` says what would help).
    ok : bool or array of bool; whether a value meets the target.
    best : bool or array of bool; whether the value is shown to be the best one, up to a relative distance
        d = min(10 rtol, max(0.01, rtol)).  `best` is True only if epsilon is monotone in the value.  In addition,
        either a value that is less private by d must miss the target, or epsilon must be within rtol of the target and
        change fast enough with the value.  For an epsilon of kind "bound" the value is the best for that bound.  If the
        target is a risk, the same holds with the risk in place of epsilon.  At "not_binding" `best` is False, unless
        the value is a sampling probability of 1.
    risk : Bounds of the risk at that value, or None where epsilon is the target.  `risk.upper` is at most the target
        wherever `ok`; elsewhere it is NaN.
    relation : neighbouring relation for which epsilon and the risk hold.

    >>> import jaxacct as ja
    >>> c = ja.calibrate_noise_multiplier([1e-6, 2.0], [1e-30, 1e-5], 1.0, 1)
    >>> c.ok.tolist(), c.status.tolist(), c.value.round(3).tolist()
    ([False, True], ['infeasible_noise', 'ok'], [nan, 1.994])
    """

    value: Leaf
    epsilon: Bounds
    status: Leaf
    ok: Leaf
    best: Leaf = True
    risk: Leaf = None
    relation: str = field(kw_only=True)

    __repr__ = plain_repr

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain Python, ready for JSON; `Bounds.from_dict` reads "epsilon" and "risk" back."""
        return plain_record(self)

    def _repr_html_(self) -> str:
        """Return HTML with the brackets, and with unrounded values, since a rounded value need not meet the target."""
        name, bounds = ("epsilon", self.epsilon) if self.risk is None else ("risk", self.risk)

        def cells(index: tuple[int, ...]) -> list[str]:
            value, status, best = (np.asarray(x)[index] for x in (self.value, self.status, self.best))
            return [repr(float(value)), f"{bounds[index]:.6g}", str(status), "yes" if best else "not known"]

        head = ("value", name, "status", "best")
        return markup.batch("Calibration", head, np.shape(self.value), cells)


class Goal(NamedTuple):
    """The question of a calibration: which parameter of DP-SGD is wanted, and for which target, in a flat batch."""

    unknown: str  # name of the parameter that is solved for
    epsilon: np.ndarray  # the target epsilon; if `on_delta`, the epsilon at which delta is taken
    delta: np.ndarray  # the delta at which epsilon is taken; if `on_delta`, the target delta
    known: dict[str, np.ndarray]  # values of the other parameters
    limits: tuple[float, float]  # smallest and largest value of the unknown that are searched
    relation: str
    rtol: float  # largest relative distance of epsilon below the target
    hint: contour.Hint  # the answer to expect and the contour to try first; the fast solves fill it in
    near: np.ndarray | None = None  # guess of the unknown
    on_delta: bool = False  # whether delta is the target, instead of epsilon

    def take(self, rows: np.ndarray) -> Goal:
        columns = {name: getattr(self, name) for name in ("epsilon", "delta", "known", "hint", "near")}
        return self._replace(**jax.tree.map(itemgetter(rows), columns))

    def run(self, rows: np.ndarray, values: np.ndarray) -> Mechanism:
        """Return the runs of some rows with these values of the unknown."""
        return dp_sgd(**{name: column[rows] for name, column in self.known.items()} | {self.unknown: values})


def checked(
    unknown: str,
    target: dict[str, Any],
    known: dict[str, Any],
    relation: str,
    limits: tuple[float, float],
    rtol: float,
    backend: str,
    more_shapes: dict[str, tuple[int, ...]] | None = None,
) -> tuple[Goal, dict[str, np.ndarray], tuple[int, ...]]:
    """Return the goal, the target's flat numbers, and the shape. For a risk, the goal's epsilon and delta are 0."""
    refuse_tracers(f"ja.calibrate_{unknown}", "jaxacct.kernels.calibration", **target, **known)
    chosen = options(relation=relation, rtol=rtol, backend=backend, least_rtol=LEAST_RTOL)
    numbers = {name: check(name, value, RULES[name]) for name, value in (target | known).items()}
    shape = broadcast_shape({name: np.shape(value) for name, value in numbers.items()} | (more_shapes or {}))
    flat = {k: np.broadcast_to(np.asarray(v, np.float64), shape).reshape(-1) for k, v in numbers.items()}
    wanted, others = ({name: flat[name] for name in some} for some in (target, known))
    size = int(np.prod(shape))
    epsilon, delta = (wanted.get(name, np.zeros(size)) for name in ("target_epsilon", "target_delta"))
    settings = limits, chosen.relation, chosen.rtol, no_hint(size)
    return Goal(unknown, epsilon, delta, others, *settings, on_delta="target_epsilon" not in target), wanted, shape


def search_for(goal: Goal, evaluate: Any) -> Search:
    """Return the search for a goal."""
    size = goal.epsilon.size
    first = np.full(size, True)  # rows in which the least protective limit is tried first
    if goal.unknown == "noise_multiplier" and "steps" in goal.known:  # delta is at most the chance of a sample
        first = chance_of_a_sample(goal.known) <= goal.delta
    elif goal.unknown != "sampling_probability":
        first = goal.known["sampling_probability"] == 0
    return Search(
        evaluate=evaluate,
        target=goal.epsilon,
        lowest=np.full(size, goal.limits[0]),
        highest=np.full(size, goal.limits[1]),
        falls=np.full(size, goal.unknown == "noise_multiplier"),
        rtol=goal.rtol,
        whole=goal.unknown == "steps",
        infeasible=INFEASIBLE[goal.unknown],
        privates_first=first,
        all_there_is=goal.unknown == "sampling_probability" and goal.limits[1] == 1.0,
    )


def chance_of_a_sample(known: dict[str, np.ndarray]) -> np.ndarray:
    """Return the probabilities that a run of Poisson samples, with these rates and steps, samples a record at all."""
    with np.errstate(divide="ignore"):
        return -np.expm1(known["steps"] * np.log1p(-known["sampling_probability"]))


def certified(goal: Goal, rows: np.ndarray, values: np.ndarray) -> Bounds:
    """Return certified Bounds of epsilon for `rows`, with `values` for the unknown, as narrow as a search needs."""
    effort, hint = account.effort_of_search(goal.rtol), jax.tree.map(itemgetter(rows), goal.hint)
    run, delta = goal.run(rows, values), goal.delta[rows]
    return answer(MechanismQuestion("epsilon", run, delta, goal.relation, effort, hint=hint))


def result(
    found: BestValues,
    shape: tuple[int, ...],
    relation: str,
    monotone: bool = True,
    bounds: Bounds | None = None,
    risk: Bounds | None = None,
) -> Calibration:
    """Return the result in the shape of the batch, with the search's Bounds of epsilon unless `bounds` is given."""
    ok = np.isin(found.status, CLAIMED).reshape(shape)
    status = found.status.reshape(shape) if shape else str(found.status[0])
    best = ok & monotone & found.shown.reshape(shape)
    at = found.bounds(shape) if bounds is None else bounds
    return Calibration(found.value.reshape(shape)[()], at, status, ok[()], best[()], risk, relation=relation)


class _Equation(NamedTuple):
    """Arguments of the kernels. The logarithms of noise, rate and steps are the array (B, 3) `base + x * unknown`."""

    sign: np.ndarray
    base: np.ndarray
    unknown: np.ndarray  # 1 in the column of the unknown and 0 in the others
    epsilon: np.ndarray
    log_delta: np.ndarray
    log_tol: np.ndarray


# NumPy's warnings are off, since values near the ends of float64's range may overflow. A wrong x then costs only time.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def started(goal: Goal, rows: np.ndarray) -> Start:
    """Estimate where the search of some rows starts. Fill in `goal.hint`, which starts the certified evaluations."""
    known = {name: column[rows] for name, column in goal.known.items()}
    if goal.on_delta:  # mu by bisection, since the tail bound below would give mu = 0 where epsilon is 0
        epsilon, delta = goal.epsilon[rows], goal.delta[rows]
        delta = delta - AIM * goal.rtol * room(delta)
        log_delta, mu = np.log(delta), gaussian_mu(epsilon, delta)
    else:
        epsilon, log_delta = goal.epsilon[rows] * (1.0 - AIM * goal.rtol), np.log(goal.delta[rows])
        z = np.sqrt(-2.0 * log_delta)
        mu = 2.0 * epsilon / (z + np.sqrt(z**2 + 2.0 * epsilon))  # by the Gaussian tail bound
    nothing = np.zeros(rows.size)
    x = by_central_limit(goal, known, mu) if goal.near is None else np.log(goal.near[rows])
    found, hint = Start(x, nothing, nothing.astype(bool)), no_hint(rows.size)
    full = known.get("sampling_probability", np.zeros(rows.size)) == 1.0
    if full.any():
        exact = mu[full] if goal.on_delta else gaussian_mu(epsilon[full], goal.delta[rows[full]])
        if goal.unknown == "noise_multiplier":
            found.x[full], found.slope[full] = 0.5 * np.log(known["steps"][full]) - np.log(exact), -1.0
        else:
            found.x[full], found.slope[full] = 2.0 * np.log(exact * known["noise_multiplier"][full]), 0.5
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
    _plainly(goal, equation, found, hint, mu)
    _split(goal, equation, found, hint)
    known_x = np.isfinite(found.x)
    found.x[~known_x] = 0.5 * np.sum(np.log(goal.limits))
    found.solved[~known_x] = False
    goal.hint.near[rows], goal.hint.rung[rows] = hint
    return found


def room(delta: np.ndarray) -> np.ndarray:
    """Return the unit in which distances from a target delta are measured: the smaller of delta and 1 - delta."""
    return np.minimum(delta, 1.0 - delta)


def gaussian_mu(epsilon: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Estimate the mu for which mu-GDP is (epsilon, delta)-DP, by bisection in log mu."""
    from jaxacct.engines import closed_form  # imports SciPy, which is slow, so only where a row needs it

    enough = lambda log_mu: closed_form.log_delta(np.exp(log_mu), epsilon)[0] <= np.log(delta)
    return np.exp(bisected(np.full(epsilon.shape, -30.0), np.full(epsilon.shape, 12.0), enough, 60)[0])


def by_central_limit(goal: Goal, known: dict[str, np.ndarray], mu: np.ndarray) -> np.ndarray:
    """Estimate x, the logarithm of the unknown, by the central limit theorem."""
    growth = np.expm1(np.minimum(known.get("noise_multiplier", 1.0) ** -2.0, 500.0))
    if goal.unknown == "noise_multiplier":
        x = -0.5 * np.log(np.log1p(mu**2 / (known["sampling_probability"] ** 2 * known["steps"])))
    elif goal.unknown == "steps":
        x = np.log(mu**2 / (known["sampling_probability"] ** 2 * growth))
    else:
        x = np.log(mu) - 0.5 * np.log(known["steps"] * growth)
    return np.clip(x, *np.log(goal.limits))


def _plainly(goal: Goal, equation: _Equation, found: Start, hint: contour.Hint, mu: np.ndarray) -> None:
    """Solve on plain contours of growing size ("rungs"). A row that one rung leaves unsolved moves to a larger rung."""
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
        part = jax.tree.map(itemgetter(todo), equation)
        arguments = (*part[:3], found.x[todo], c[todo], *part[3:])
        solved = evaluate(calibration.solve, arguments, todo.size, rung.chunk, **static)
        x, of_delta, of_epsilon, residual, need = solved
        inside = (x > low - 1e-9) & (x < high + 1e-9)
        good = (np.abs(residual) < 1e-6) & (need <= spare * rung.nodes) & inside
        near = inside & (np.abs(residual) < 1.0)
        found.x[todo] = np.where(near, x, found.x[todo])
        slope = of_delta if goal.on_delta else of_epsilon / part.epsilon
        found.slope[todo] = np.where(good, slope, found.slope[todo])
        found.solved[todo] = good
        if goal.on_delta:
            hint.near[todo], hint.rung[todo] = np.where(good, part.log_delta, 0.0), np.where(good, step, 0)
        wanted = np.searchsorted([spare * r.nodes for r in rungs], need)
        due[todo] = np.where(good, len(rungs), np.maximum(wanted, step + 1))


def _split(goal: Goal, equation: _Equation, found: Start, hint: contour.Hint) -> None:
    """Solve the unsolved rows on the split contour by secant steps, until the steps are small."""
    left = ~found.solved
    if not left.any():
        return
    low, high = np.log(goal.limits)
    sign = -1.0 if goal.unknown == "noise_multiplier" else 1.0
    slope = sign * -2.0 * equation.log_delta
    rows = np.flatnonzero(left)
    # A target delta may be asked for near eps = 0, where the sum of the steps' deltas (`_one_hit`) exceeds the run's.
    if not goal.on_delta:
        found.x[rows], slope[rows] = _one_hit(
            jax.tree.map(itemgetter(rows), equation), found.x[rows], slope[rows], sign
        )
    for place, rung in enumerate(contour.LADDER):
        if not rung.split or rung.chunk == 1:
            continue
        active = left.copy()
        # Each call of `solve_split` places the contour's windows anew. A row gets at most six calls on one rung.
        for _ in range(6):
            todo = np.flatnonzero(active)
            if todo.size == 0:
                break
            static = {"points": rung.points, "count": rung.nodes}
            part = jax.tree.map(itemgetter(todo), equation)
            arguments = (*part[:3], found.x[todo], slope[todo], *part[3:])
            new = calibration.Solved(*evaluate(calibration.solve_split, arguments, todo.size, rung.chunk, **static))
            usable = np.isfinite(new.x) & np.isfinite(new.residual)
            fits = (new.needs[:, 1] <= NEARLY * rung.nodes) & usable
            found.x[todo] = np.where(usable, np.clip(new.x, low, high), found.x[todo])
            slope[todo] = np.where(usable & (new.slope * sign > 0), new.slope, slope[todo])
            # a row is solved if the contour has enough nodes, x is off by an estimated 1e-6 at most, and x moved little
            close = fits & (new.off < 1e-6) & (new.moved < calibration.SETTLED)
            steep = new.slope if goal.on_delta else new.epsilon_slope / part.epsilon
            found.slope[todo] = np.where(close, steep, found.slope[todo])
            found.solved[todo] = close
            near = part.log_delta if goal.on_delta else part.epsilon
            hint.near[todo[close]], hint.rung[todo[close]] = near[close], place
            left[todo[close]] = False
            stuck = usable & (found.x[todo] != new.x) & (new.moved < calibration.SETTLED)
            active[todo] = ~close & usable & ~stuck & (fits | (new.moved > calibration.SETTLED))


def _one_hit(equation: _Equation, x: np.ndarray, slope: np.ndarray, sign: float) -> tuple[np.ndarray, np.ndarray]:
    """Move x to the root of `steps * (a step's delta) = target` if the root protects more; return x, d log delta/dx."""
    # Away from eps = 0 the run's delta is about `steps * (a step's delta)` or more. So an x that protects less than the
    # root misses the target.
    from jaxacct.engines import closed_form  # imports SciPy, which is slow, so only where a row needs it

    def residual(x: np.ndarray) -> np.ndarray:
        sigma, q, n = np.exp(equation.base + x[:, None] * equation.unknown).T
        q = np.minimum(q, 1.0 - 1e-12)
        value, _ = closed_form.log_delta_of_one_step(sigma, q, equation.sign > 0, equation.epsilon)
        return np.log(n) + value - equation.log_delta

    # `safe` protects more than the solution, and `bold` less
    bold, safe = bisected(x + 3.0 * sign, x + 3.0 * -sign, lambda x: residual(x) > 0, 14)
    alone = 0.5 * (safe + bold)
    step = 1e-4
    steep = (residual(alone + step) - residual(alone - step)) / (2.0 * step)
    better = (sign * alone < sign * x) & np.isfinite(steep) & (sign * steep > 0)
    return np.where(better, alone, x), np.where(better, steep, slope)
