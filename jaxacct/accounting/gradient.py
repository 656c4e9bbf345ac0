"""Derivatives of epsilon in every numeric field of a mechanism, from a differentiated contour integral for delta."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxacct.accounting import account
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    DELTA,
    Constraint,
    InputError,
    broadcast_shape,
    check,
    options,
    refuse_tracers,
    with_hints,
)
from jaxacct.engines import contour
from jaxacct.engines.backend import evaluate, job
from jaxacct.engines.protocol import MechanismQuestion
from jaxacct.kernels.calibration import sensitivity
from jaxacct.mechanisms import Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.mechanisms.loss_components import add_and_remove

FIELD_STEP = 1e-5
"""Relative step of a field for the central difference of the loss law: about the cube root of the unit roundoff, so
that rounding and curvature cause errors of about the same size."""
MOST_FIELDS = 400
"""Largest number of fields for which a gradient is computed, since the time is proportional to it."""


@with_hints
def epsilon_gradient(
    mechanism: Mechanism, delta: ArrayLike, *, relation: str = "add_or_remove_one", backend: str = "auto"
) -> Mechanism:
    """Return `d epsilon / d field` for every numeric field, at fixed delta, as a pytree like the mechanism.

    By the implicit function theorem the derivative is (d log delta/d field) / (-d log delta/d epsilon), in the larger
    direction of the neighbouring relation. It is an estimate: accurate to a relative 1e-6 or so where a contour
    reproduces delta, and elsewhere to about 1e-3, as a difference quotient of epsilon. It is 0 where epsilon is 0 or
    infinite. Counts are differentiated as if they were real. A difference quotient moves a count n by at least 1, and
    is accurate to about 1/(2 n). If a count cannot grow by 1, its derivative is NaN in all configurations. At an end of
    its range, a field is differentiated from inside.

    Parameters
    ----------
    mechanism : Mechanism
        Its numeric fields and `delta` broadcast; each field is one number per configuration.
    delta : array_like in (0, 1)
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}
    backend : {"auto", "numpy", "xla"}
        As for `jaxacct.epsilon`.

    Returns
    -------
    Mechanism
        A mechanism of the same structure. Its leaves are float64 arrays of the common batch shape, in units of epsilon
        per unit of the field.

    Raises
    ------
    InputError
        Values are invalid, shapes do not broadcast, a field is a vector, there are more than 400 fields, or an argument
        is a tracer.

    References
    ----------
    jaxacct/kernels/README.md.

    >>> import jaxacct as ja
    >>> g = ja.epsilon_gradient(ja.dp_sgd(1.0, 0.01, 1000), 1e-5)
    >>> round(float(g.mechanism.mechanism.noise_multiplier), 3)
    -3.823
    """
    refuse_tracers("ja.epsilon_gradient", "jaxacct.kernels.contour", mechanism=mechanism, delta=delta)
    chosen = options(relation=relation, backend=backend)
    mechanism, relation = require_mechanism("mechanism", mechanism), chosen.relation
    delta = check("delta", delta, DELTA)
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), "delta": np.shape(delta)})
    leaves, structure = jax.tree.flatten(mechanism)
    if any(one.vectors for one in mechanism.walk()):
        raise InputError(
            "epsilon_gradient needs fields that are one number a configuration; this mechanism holds vectors, so "
            "difference ja.epsilon along a direction of interest"
        )
    if len(leaves) > MOST_FIELDS:
        raise InputError(
            f"epsilon_gradient takes at most {MOST_FIELDS} fields and this mechanism has {len(leaves)}; gather equal "
            "parts by ja.repeat, or difference ja.epsilon along a direction of interest"
        )
    full = [np.broadcast_to(np.asarray(leaf, np.float64), shape).reshape(-1) for leaf in leaves]
    flat_delta = np.broadcast_to(np.asarray(delta, np.float64), shape).reshape(-1)
    with job(flat_delta.size, chosen.backend):
        gradients = [np.zeros(flat_delta.size) for _ in leaves]
        whole, floor = jax.tree.unflatten(structure, full), np.full(flat_delta.size, -np.inf)
        sides: dict[str, Any] = {}
        for direction in directions(mechanism, relation):  # epsilons below those of the first direction are not refined
            sides[direction] = _one_sided(whole, flat_delta, relation, direction, floor)
            floor = np.maximum(floor, sides[direction].lower)
        largest = np.max([side.estimate for side in sides.values()], axis=0)
        moving = np.isfinite(largest) & (largest > 0)
        for direction, side in sides.items():
            rows = np.flatnonzero(moving & (side.estimate == largest))
            if rows.size:
                fields = [column[rows] for column in full]
                answers = _differentiate(structure, fields, flat_delta[rows], largest[rows], relation, direction)
                for gradient, answer in zip(gradients, answers, strict=True):
                    gradient[rows] = answer
    return jax.tree.unflatten(structure, [g.reshape(shape)[()] for g in gradients])


def _one_sided(
    mechanism: Mechanism, delta: np.ndarray, relation: str, direction: str, floor: np.ndarray | None = None
) -> Any:
    one = f"{direction}_one" if add_and_remove(mechanism, relation) else relation
    return account.answer(MechanismQuestion("epsilon", mechanism, delta, one, floor=floor, attacks=True))


def _differentiate(
    structure: Any, fields: list[np.ndarray], delta: np.ndarray, epsilon: np.ndarray, relation: str, direction: str
) -> list[np.ndarray]:
    """Return an array of derivatives for each field, for a flat batch of configurations in one direction."""
    marked = jax.tree.unflatten(structure, range(structure.num_leaves))
    allowed = [_constraint(marked, path) for path, _ in jax.tree_util.tree_flatten_with_path(marked)[0]]

    def at(index: int, values: np.ndarray) -> Mechanism:
        return jax.tree.unflatten(structure, [*fields[:index], values, *fields[index + 1 :]])

    parts = components(at(0, fields[0]), relation, direction)
    answers: list[np.ndarray] = []
    rough: list[tuple[int, np.ndarray]] = []
    for index, field in enumerate(fields):
        low, high = _around(allowed[index], field, FIELD_STEP)
        try:
            below, above = (components(at(index, v), relation, direction) for v in (low, high))
        except InputError:
            if not allowed[index].integral:
                raise
            # the count plus 1 is invalid in one configuration, so the derivative is NaN in all
            answers.append(np.full(delta.size, np.nan))
            continue
        answer = np.full(delta.size, np.nan)
        same = all(a.shape == b.shape == c.shape for a, b, c in zip(parts, below, above, strict=True))
        rows = np.flatnonzero(contour.reach(parts).answers & same)
        if rows.size:
            width = (high - low)[rows]
            tangent = jax.tree.map(
                lambda a, b, w=width: (a - b) / w.reshape(-1, *[1] * (a.ndim - 1)),
                contour.law(above, rows),
                contour.law(below, rows),
            )
            # the mass at infinity is a part of delta, so its change counts too
            finite = (delta - parts.delta_infinity)[rows]
            along, slope = _along(contour.law(parts, rows), tangent, epsilon[rows], finite)
            lost = (above.delta_infinity - below.delta_infinity)[rows] / width
            answer[rows] = (along + lost / finite) / slope
        left = np.flatnonzero(~np.isfinite(answer))
        if left.size:
            rough.append((index, left))
        answers.append(answer)
    if rough:
        # Difference quotients of epsilon. Steps below 1e-3 would magnify the lattice's errors of about 1e-5 too much.
        moved = [((index, rows), _around(allowed[index], fields[index][rows], 1e-3)) for index, rows in rough]
        columns = [
            np.concatenate([np.concatenate(both if i == f else [field[rows]] * 2) for (i, rows), both in moved])
            for f, field in enumerate(fields)
        ]
        given = np.concatenate([delta[rows] for _, rows in rough for _ in range(2)])
        found = _one_sided(jax.tree.unflatten(structure, columns), given, relation, direction).estimate
        for (index, rows), (low, high) in moved:
            first, second, found = np.split(found, [rows.size, 2 * rows.size])
            answers[index][rows] = (second - first) / (high - low)
    return answers


def _constraint(mechanism: Any, path: tuple[Any, ...]) -> Constraint:
    """Return the values that the field at a path into a mechanism may take."""
    for key in path[:-1]:
        mechanism = getattr(mechanism, key.name) if hasattr(key, "name") else mechanism[key.idx]
    constraint: Constraint = type(mechanism).constraints[path[-1].name]
    return constraint


def _around(allowed: Constraint, values: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper value of a field for a difference quotient, within the field's allowed limits."""
    if allowed.integral:
        # A difference of 1 is exact for the field `steps`, in which the components of the loss law are linear.
        width = 1.0 if step == FIELD_STEP else np.maximum(np.round(step * values), 1.0)
        return values, values + width
    width = step * np.where(values == 0.0, 1.0, np.abs(values))
    upper = np.inf if allowed.upper is None else allowed.upper
    return np.maximum(values - width, allowed.lower), np.minimum(values + width, upper)


def _along(law: Any, tangent: Any, epsilon: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (derivative of log delta along `tangent`, -d log delta/d eps). The first is NaN if all contours fail."""
    along, slope = np.full(epsilon.size, np.nan), np.ones(epsilon.size)
    log_tol = np.full(epsilon.size, np.log(contour.TOLERANCE))
    due = np.zeros(epsilon.size, int)
    for step, rung in enumerate(contour.PLAIN):
        todo = np.flatnonzero(due == step)
        if todo.size == 0:
            continue
        arguments = jax.tree.map(lambda a, rows=todo: a[rows], (law, tangent, epsilon, log_tol))
        static = {"points": rung.points, "count": rung.nodes}
        change, rate, log_delta, needs = evaluate(sensitivity, arguments, todo.size, rung.chunk, **static)
        with np.errstate(invalid="ignore", divide="ignore"):
            # a contour's derivatives are used if its delta equals the given delta up to this relative difference
            good = np.abs(log_delta - np.log(delta[todo])) <= 1e-3
        good &= np.all(needs <= (rung.points, rung.nodes), axis=1)
        along[todo[good]], slope[todo[good]] = change[good], rate[good]
        due[todo] = np.where(good, len(contour.PLAIN), np.maximum(contour.rung_for(needs), step + 1))
    return along, slope
