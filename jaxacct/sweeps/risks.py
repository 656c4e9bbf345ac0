"""Risks as targets of a sweep's rows: which columns they have, and the calibrations that meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxacct.calibration.dp_sgd_search import Calibration
from jaxacct.calibration.risk_targets import BESIDE, RULES, TARGETS, given_target
from jaxacct.core.bounds import Bounds
from jaxacct.sweeps import samplings

__all__ = ["FIELDS", "calibrated", "is_target", "target_of"]

FIELDS = RULES
"""The columns of a risk: the targets, and what belongs to them."""
_SIDE = tuple(name for name in RULES if name not in TARGETS)


def is_target(axes: Mapping[str, Any]) -> bool:
    """Whether a risk is the target of these fields; InputError where the targets are not one."""
    if not any(name in axes for name in FIELDS):
        return False
    words = {name: axes.get(name) for name in (*TARGETS, *_SIDE)}
    first, second = (axes.get(f"target_{word}", axes.get(word)) for word in ("epsilon", "delta"))
    return given_target(first, second, words) is not None


def target_of(row: Mapping[str, Any]) -> str | None:
    """The name of the risk that a row of a table has as its target, None where it has none."""
    return next((name for name in TARGETS if name in row and not np.isnan(float(row[name]))), None)


def calibrated(
    solve: Callable[..., Calibration],
    inputs: Mapping[str, np.ndarray],
    quantity: str,
    rule: Mapping[str, Any],
    **settings: Any,
) -> tuple[np.ndarray, np.ndarray, Bounds]:
    """(value, status, bracket) of rows that may have different targets: of epsilon, or of the risk.

    rule : the batch rule and group size of all rows, as `dp_sgd` takes them.
    """
    known = {name: column for name, column in samplings.numbers(inputs, rule).items() if name != quantity}
    settings |= rule
    size = next(iter(known.values())).size
    left = np.ones(size, bool)
    pieces: list[tuple[np.ndarray, Calibration, Bounds]] = []
    for target in (*TARGETS, "target_epsilon"):
        if target not in inputs:
            continue
        rows = np.flatnonzero(left & ~np.isnan(inputs[target]))
        left[rows] = False
        beside = ("target_delta",) if target == "target_epsilon" else BESIDE.get(target, ())
        # a floor that is left out is the usual one
        fields = {name: inputs[name][rows] for name in (target, *beside) if name in inputs}
        open_ = np.isnan(fields["above_fpr"]) if "above_fpr" in fields else np.zeros(rows.size, bool)
        for part in (np.flatnonzero(~open_), np.flatnonzero(open_)):
            if not part.size:
                continue
            given = {name: column[part] for name, column in fields.items() if not np.isnan(column[part]).any()}
            found = solve(**given, **{name: column[rows[part]] for name, column in known.items()}, **settings)
            pieces.append((rows[part], found, found.epsilon if found.risk is None else found.risk))
    order = np.argsort(np.concatenate([rows for rows, _, _ in pieces]))
    join = lambda take: np.concatenate([np.asarray(take(found, bounds)) for _, found, bounds in pieces])[order]
    columns = [
        join(lambda found, bounds, name=name: getattr(bounds, name))
        for name in ("lower", "estimate", "upper", "kind", "status", "engine")
    ]
    return join(lambda found, bounds: found.value), join(lambda found, bounds: found.status), Bounds(*columns)
