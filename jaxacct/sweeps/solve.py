"""Solving one block of a sweep: rows of one quantity in, the same rows with their answers out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration import noise_rate_steps
from jaxacct.calibration.dp_sgd_search import LEAST_RTOL
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, options
from jaxacct.engines.backend import suiting
from jaxacct.mechanisms.dp_sgd_run import usual_relation
from jaxacct.sweeps import repetitions, risks, samplings
from jaxacct.sweeps.columns import ANSWER, WORDS
from jaxacct.sweeps.grid import Grid
from jaxacct.sweeps.table import Table, blank

_CALIBRATIONS: dict[str, Callable[..., noise_rate_steps.Calibration]] = {
    "noise_multiplier": noise_rate_steps.calibrate_noise_multiplier,
    "sampling_probability": noise_rate_steps.calibrate_sampling_probability,
    "steps": noise_rate_steps.calibrate_steps,
}
"""What solves for each quantity that is calibrated."""


USUAL = "usual"
"""Relation of a sweep whose batch rules have different usual relations: each row has that of its own rule."""


class FailedRows(UserWarning):
    """A warning: the engines raised on some rows, which are in the table with the status "failed".

    >>> issubclass(FailedRows, UserWarning)
    True
    """


class Settings(NamedTuple):
    """What every row of a sweep is solved with."""

    relation: str
    engine: str
    rtol: float
    backend: str  # never "auto": that of the whole grid, so that slices and resumed runs take the same

    def relation_of(self, sampling: str) -> str:
        """The relation of rows of a batch rule."""
        return usual_relation(sampling) if self.relation == USUAL else self.relation


def settings(grid: Grid, relation: str | None, engine: str, rtol: float, backend: str) -> Settings:
    """The settings, refused where the grid cannot be solved with them.

    Calibrations choose their own engine; selections have one.
    """
    usual = {usual_relation(word or "poisson") for word in np.unique(grid.inputs.get("sampling", ["poisson"]))}
    word = relation or usual.pop()
    chosen = options(relation=word, engine=engine, rtol=rtol, backend=backend)
    calibrated = [word for word in _CALIBRATIONS if word in grid.quantity]
    if calibrated and engine != "auto":
        raise InputError(f"engine = {engine!r} is not available for solving {calibrated[0]}; use 'auto'")
    if "repetitions" in grid.inputs and engine != "auto":
        raise InputError(f"engine = {engine!r} is not available with repetitions; use 'auto'")
    if calibrated:
        options(rtol=rtol, least_rtol=LEAST_RTOL)
    place = suiting(len(grid), selections="repetitions" in grid.inputs) if backend == "auto" else chosen.backend
    return Settings(USUAL if usual and relation is None else chosen.relation, chosen.engine, chosen.rtol, place)


def solve(grid: Grid, chosen: Settings, names: tuple[str, ...], alone: bool = False) -> Table:
    """The rows of a grid that has one quantity, with their answers, in the columns named.

    alone : the sweep has no other rows.
    """
    size = len(grid)
    rules = grid.inputs.get("sampling", np.full(size, "", object))
    relations = np.array([chosen.relation_of(rule or "poisson") for rule in rules.tolist()], object)
    given = {"name": grid.name, "quantity": grid.quantity, "relation": relations}
    answer = _answer_or_failed(str(grid.quantity[0]), grid.inputs, chosen, size, alone)
    columns = blank(names, size).columns | given | grid.inputs | answer
    return Table({name: columns[name] for name in names})


def _answer_or_failed(
    quantity: str, inputs: Mapping[str, np.ndarray], chosen: Settings, size: int, alone: bool
) -> dict[str, Any]:
    """`_answer`, in which a row that raises is a row of status "failed" and leaves the others as they are.

    What every row of a block, or the only row of a sweep, refuses as bad input is bad input of the call.
    """
    failures: list[tuple[int, Exception]] = []

    def attempt(rows: np.ndarray) -> dict[str, Any]:
        try:
            return _answer(quantity, {name: column[rows] for name, column in inputs.items()}, chosen)
        except ImportError:
            raise
        except Exception as error:
            if rows.size == 1:
                failures.append((int(rows[0]), error))
                return _failed(quantity)
        first, second = (attempt(half) for half in np.array_split(rows, 2))
        return {name: np.concatenate([first[name], second[name]]) for name in first}

    answer = attempt(np.arange(size))
    if failures:
        row, error = failures[0]
        if len(failures) == size and (alone or size > 1) and all(isinstance(e, InputError) for _, e in failures):
            raise error
        given = ", ".join(f"{name} = {column[row]}" for name, column in inputs.items() if column[row] == column[row])
        more = f" (and {len(failures) - 1:,} more in its block)" if len(failures) > 1 else ""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        warnings.warn(f"{quantity} failed at {given}: {reason}{more}", FailedRows, stacklevel=2)
    return answer


def _failed(quantity: str) -> dict[str, Any]:
    """The columns of one row of which nothing is known: what always holds, and no calibrated value."""
    ends = {"epsilon": (0.0, np.inf, np.inf), "delta": (0.0, 1.0, 1.0)}.get(quantity, (np.nan,) * 3)
    columns: dict[str, Any] = {name: np.array([end]) for name, end in zip(ANSWER, ends, strict=True)}
    columns |= {name: np.array([word], object) for name, word in zip(WORDS, ("certified", "failed", ""), strict=True)}
    return columns | ({quantity: np.array([np.nan])} if quantity in _CALIBRATIONS else {})


def _answer(quantity: str, inputs: Mapping[str, np.ndarray], chosen: Settings) -> dict[str, Any]:
    """The columns that the rows gain; rows of one batch rule are answered together."""
    pieces, places = [], []
    for given, rows in samplings.alike(inputs):
        pieces.append(_of_one_rule(quantity, {name: column[rows] for name, column in inputs.items()}, chosen, given))
        places.append(rows)
    order = np.argsort(np.concatenate(places))
    return {name: np.concatenate([piece[name] for piece in pieces])[order] for name in pieces[0]}


def _of_one_rule(
    quantity: str, inputs: Mapping[str, np.ndarray], chosen: Settings, given: dict[str, Any]
) -> dict[str, Any]:
    """The columns of rows that share a batch rule and group size; `given` says which, as `dp_sgd` takes them."""
    relation = chosen.relation_of(given["sampling"])
    if quantity in _CALIBRATIONS:
        solver = _CALIBRATIONS[quantity]
        value, word, bounds = risks.calibrated(solver, inputs, quantity, given, relation=relation, rtol=chosen.rtol)
        status = np.where(word == "ok", bounds.status, word)
        return _columns(bounds) | {quantity: value, "status": _shared(status)}
    if "repetitions" in inputs and quantity == "epsilon":
        return _columns(repetitions.epsilon(inputs, relation, chosen.rtol, given))
    mechanism = samplings.run(inputs, given)
    accuracy = chosen._replace(relation=relation)._asdict()
    if quantity == "epsilon":
        return _columns(account.epsilon(mechanism, inputs["delta"], **accuracy))
    return _columns(account.delta(mechanism, inputs["epsilon"], **accuracy))


def _columns(bounds: Bounds) -> dict[str, Any]:
    return {name: getattr(bounds, name) for name in ANSWER} | {
        name: _shared(np.asarray(getattr(bounds, name))) for name in WORDS
    }


def _shared(words: np.ndarray) -> np.ndarray:
    """Text as references to one object per word, so that a million rows cost a million references."""
    known, code = np.unique(words, return_inverse=True)
    return known.astype(object)[code]
