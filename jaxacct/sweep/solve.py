"""Solving one block of a sweep: rows of one quantity in, the same rows with their answers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxacct import account, calibrate
from jaxacct.bounds import Bounds
from jaxacct.mechanisms import RELATIONS, dp_sgd
from jaxacct.sweep import repetitions
from jaxacct.sweep.columns import ANSWER, WORDS
from jaxacct.sweep.grid import Grid
from jaxacct.sweep.table import Table, blank
from jaxacct.validation import OPEN_PROBABILITY, InputError, check, choice

_CALIBRATIONS: dict[str, Callable[..., calibrate.Calibration]] = {
    "noise_multiplier": calibrate.calibrate_noise_multiplier,
    "sampling_probability": calibrate.calibrate_sampling_probability,
    "steps": calibrate.calibrate_steps,
}


class Settings(NamedTuple):
    """What every row of a sweep is solved with."""

    relation: str
    engine: str
    rtol: float


def settings(grid: Grid, relation: str, engine: str, rtol: float) -> Settings:
    """The settings, refused where the grid cannot be solved with them.

    Calibrations choose their own engine and know the add and remove relations only; selections have one engine.
    """
    choice("relation", relation, RELATIONS)
    choice("engine", engine, account.ENGINES)
    calibrated = [word for word in _CALIBRATIONS if word in grid.quantity]
    if calibrated and engine != "auto":
        raise InputError(f"engine = {engine!r} is not available for solving {calibrated[0]}; use 'auto'")
    if "repetitions" in grid.inputs and engine != "auto":
        raise InputError(f"engine = {engine!r} is not available with repetitions; use 'auto'")
    if calibrated and relation == "replace_one":
        raise InputError(
            f"relation = 'replace_one' is not available for solving {calibrated[0]}; "
            "use 'add_or_remove_one', 'add_one' or 'remove_one'"
        )
    return Settings(relation, engine, float(np.asarray(check("rtol", rtol, OPEN_PROBABILITY)).item()))


def solve(grid: Grid, chosen: Settings, names: tuple[str, ...]) -> Table:
    """The rows of a grid that has one quantity, with their answers, in the columns named."""
    size = len(grid)
    given = {"name": grid.name, "quantity": grid.quantity, "relation": np.full(size, chosen.relation, object)}
    columns = blank(names, size).columns | given | grid.inputs | _answer(str(grid.quantity[0]), grid.inputs, chosen)
    return Table({name: columns[name] for name in names})


def _answer(quantity: str, inputs: Mapping[str, np.ndarray], chosen: Settings) -> dict[str, Any]:
    """The columns that the rows gain."""
    if quantity in _CALIBRATIONS:
        known = ("noise_multiplier", "sampling_probability", "steps", "target_epsilon", "target_delta")
        fields: dict[str, Any] = {name: inputs[name] for name in known if name != quantity}
        found = _CALIBRATIONS[quantity](**fields, relation=chosen.relation, rtol=chosen.rtol)
        status = np.where(found.status == "ok", found.epsilon.status, found.status)
        return _columns(found.epsilon) | {quantity: found.value, "status": _shared(status)}
    if "repetitions" in inputs and quantity == "epsilon":
        return _columns(repetitions.epsilon(inputs, chosen.relation, chosen.rtol))
    mechanism = dp_sgd(inputs["noise_multiplier"], inputs["sampling_probability"], inputs["steps"])
    if quantity == "epsilon":
        return _columns(account.epsilon(mechanism, inputs["delta"], **chosen._asdict()))
    return _columns(account.delta(mechanism, inputs["epsilon"], **chosen._asdict()))


def _columns(bounds: Bounds) -> dict[str, Any]:
    return {name: getattr(bounds, name) for name in ANSWER} | {
        name: _shared(np.asarray(getattr(bounds, name))) for name in WORDS
    }


def _shared(words: np.ndarray) -> np.ndarray:
    """Text as references to one object per word, so that a million rows cost a million references."""
    known, code = np.unique(words, return_inverse=True)
    return known.astype(object)[code]
