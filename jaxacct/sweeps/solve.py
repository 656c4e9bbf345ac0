"""Solves one block of a sweep: rows that all ask for the same quantity get their answers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration import noise_rate_steps
from jaxacct.calibration.dp_sgd_search import LEAST_RTOL, RISK_RULES, TARGETS
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, check_one, options
from jaxacct.engines.backend import suiting
from jaxacct.mechanisms import Mechanism, dp_sgd
from jaxacct.mechanisms.dp_sgd_run import (
    LENGTHS,
    NUMBERS,
    RATES,
    RULES,
    described,
    numbers_of_rule,
    rule_name,
    usual_relation,
)
from jaxacct.sweeps.grid import ANSWER, LAWS, WORDS, Grid
from jaxacct.sweeps.table import Table, blank

if TYPE_CHECKING:
    from jaxacct.selection import Law

_CALIBRATIONS: dict[str, Callable[..., noise_rate_steps.Calibration]] = {
    "noise_multiplier": noise_rate_steps.calibrate_noise_multiplier,
    "sampling_probability": noise_rate_steps.calibrate_sampling_probability,
    "steps": noise_rate_steps.calibrate_steps,
}
BASES_AT_ONCE = 16
"""Up to this many base runs (the runs that selections repeat) are solved together; a base run's profile takes 2 MB."""
USUAL = "usual"
"""If `Settings.relation` has this value, each row is solved under the usual relation of its batch rule."""


class FailedRows(UserWarning):
    """A warning that the engines raised an error for some rows; these rows have the status "failed" in the table.

    >>> issubclass(FailedRows, UserWarning)
    True
    """


class Settings(NamedTuple):
    relation: str
    engine: str
    rtol: float
    backend: str  # "auto" is already resolved, so that slices and resumed runs use one backend

    def relation_of(self, sampling: str) -> str:
        return usual_relation(sampling) if self.relation == USUAL else self.relation


def settings(grid: Grid, relation: str | None, engine: str, rtol: float, backend: str) -> Settings:
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
    """Return the table of a grid whose rows ask for one quantity. `alone`: whether the whole sweep is a single row."""
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
    """Return answers; a row that raises is "failed". Raise if all rows (several, or one `alone`) raise InputError."""
    failures: list[tuple[int, Exception]] = []
    # a failed row gets the trivial bracket of epsilon or delta, which always holds; a failed calibration gets NaN
    ends = {"epsilon": (0.0, np.inf, np.inf), "delta": (0.0, 1.0, 1.0)}.get(quantity, (np.nan,) * 3)
    failed: dict[str, Any] = {name: np.array([end]) for name, end in zip(ANSWER, ends, strict=True)}
    failed |= {name: np.array([word], object) for name, word in zip(WORDS, ("certified", "failed", ""), strict=True)}
    failed |= {quantity: np.array([np.nan])} if quantity in _CALIBRATIONS else {}

    def attempt(rows: np.ndarray) -> dict[str, Any]:
        try:
            return _answer(quantity, _rows(inputs, rows), chosen)
        except ImportError:
            raise
        except Exception as error:
            if rows.size == 1:
                failures.append((int(rows[0]), error))
                return failed
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


def _answer(quantity: str, inputs: Mapping[str, np.ndarray], chosen: Settings) -> dict[str, Any]:
    """Return the columns of the answers. Rows that are `alike` are solved in one call."""
    pieces = []
    for rule, rows in alike(inputs):
        some, relation = _rows(inputs, rows), chosen.relation_of(rule["sampling"])
        if quantity in _CALIBRATIONS:
            found = _calibrated(some, quantity, rule, relation=relation, rtol=chosen.rtol)
        elif quantity == "epsilon" and "repetitions" in some:
            found = _of_selections(some, rule, relation=relation, rtol=chosen.rtol)
        else:
            ask, at = (account.epsilon, "delta") if quantity == "epsilon" else (account.delta, "epsilon")
            found = columns_of(ask(run_of(some, rule), some[at], **chosen._replace(relation=relation)._asdict()))
        pieces.append((rows, found))
    return _joined(pieces)


def _rows(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in columns.items()}


def _joined(pieces: Sequence[tuple[np.ndarray, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the columns of all rows, from pairs (numbers of some rows, columns of these rows)."""
    order = np.argsort(np.concatenate([np.ravel(rows) for rows, _ in pieces]))
    return {name: np.concatenate([np.ravel(found[name]) for _, found in pieces])[order] for name in pieces[0][1]}


def columns_of(bounds: Bounds) -> dict[str, Any]:
    words = {name: _shared(np.asarray(getattr(bounds, name))) for name in WORDS}
    return {name: getattr(bounds, name) for name in ANSWER} | words


def _shared(words: Any) -> np.ndarray:
    """Replace equal words by one object, so that many rows share its memory."""
    known, code = np.unique(words, return_inverse=True)
    return known.astype(object)[code]


def alike(inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Split the rows into sets, one mechanism for each. Yield (batch rule and group size, row numbers) of each set."""
    size = next(iter(inputs.values())).size
    rules = inputs.get("sampling", np.full(size, "", object))
    group = np.nan_to_num(inputs.get("group", np.ones(size)), nan=1.0)
    in_epochs = np.isnan(inputs.get("steps", np.ones(size)))  # a mechanism takes steps or epochs, not both
    for word in dict.fromkeys(rules.tolist()):
        # With group size > 1 a mechanism takes one value, not a column, of each name in `single`: split rows by value.
        single = RULES[rule_name(word or "poisson")].taken_for_groups
        apart = [np.where(group == 1.0, 0.0, np.nan_to_num(inputs[name])) for name in single if name in inputs]
        numbers = np.stack([group, in_epochs, *apart])
        for kind in np.unique(numbers[:, rules == word], axis=1).T:
            rows = np.flatnonzero((rules == word) & np.all(numbers == kind[:, None], axis=0))
            yield {"sampling": word or "poisson", "group": int(kind[0])}, rows


def _numbers(inputs: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `dp_sgd` for these rows, other than the batch rule and the group size."""
    given = {name: inputs[name] for name in NUMBERS if name in inputs and not np.isnan(inputs[name]).all()}
    return numbers_of_rule(rule["sampling"], given, rule["group"])


def run_of(inputs: Mapping[str, Any], rule: Mapping[str, Any]) -> Mechanism:
    """Return the DP-SGD runs of some rows as one mechanism. The rows share a batch rule and a group size."""
    return dp_sgd(**{"noise_multiplier": math.nan} | _numbers(inputs, rule), **rule)


def run_of_row(row: Mapping[str, Any]) -> Mechanism:
    """Return the run that a row of a result (numbers or text) describes. Refuse numbers that contradict each other."""
    word = str(row.get("sampling", "") or "poisson")
    stated = {name: float(row[name]) for name in NUMBERS if not math.isnan(float(row.get(name, math.nan)))}
    group = int(check_one("group", stated.get("group", 1), NUMBERS["group"], "a row is one run"))
    _refuse_other_batches(stated, word, group)
    return run_of(stated, {"sampling": word, "group": group})


def _refuse_other_batches(stated: Mapping[str, float], sampling: str, group: int) -> None:
    """Refuse a row if its batch size, slots or epochs give another sampling rate or more steps than the row states."""
    sources = {name: other for name, *others in (RATES, LENGTHS) for other in others if {name, other} <= stated.keys()}
    given = {name: number for name, number in stated.items() if name not in sources}
    exact = described(given, sampling, group)
    for name, source in sources.items():
        most = math.inf if name == "steps" else exact[name] * (1.0 + 1e-12)
        if not exact[name] * (1.0 - 1e-12) <= stated[name] <= most:
            raise InputError(f"{name} = {stated[name]!r} is not {exact[name]!r}, which follows from {source}")


def asked_of(row: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and the value of the delta or epsilon at which a row's bracket holds. An absent value is NaN."""
    name = {"epsilon": "delta", "delta": "epsilon"}.get(str(row["quantity"]), "target_delta")
    return name, float(row.get(name, math.nan))


def target_of(row: Mapping[str, Any]) -> str | None:
    """Return the name of a row's target if the target is a risk other than epsilon; else return None."""
    return next((name for name in TARGETS if name in row and not np.isnan(float(row[name]))), None)


def missed_target(row: Mapping[str, Any]) -> str:
    """Return an error message if the upper bound of a calibrated row is above the row's target, else ""."""
    name, upper = target_of(row) or "target_epsilon", float(row["upper"])
    target = float(row.get(name, math.nan))
    return f"upper = {upper!r} is above {name} = {target!r}" if upper > target else ""


def _calibrated(inputs: Mapping[str, np.ndarray], quantity: str, rule: Mapping[str, Any], **settings: Any) -> Any:
    """Solve rows for `quantity`.  Return columns: the solved values, and the bracket of each row's epsilon or risk."""
    known = {name: column for name, column in _numbers(inputs, rule).items() if name != quantity}
    names = [name for name in ("target_epsilon", "target_delta", *RISK_RULES) if name in inputs]
    given = ~np.isnan(np.stack([inputs[name] for name in names]))
    pieces = []
    for pattern in np.unique(given, axis=1).T:
        rows = np.flatnonzero((given == pattern[:, None]).all(axis=0))
        targets = {name: inputs[name] for name, there in zip(names, pattern, strict=True) if there}
        found = _CALIBRATIONS[quantity](**_rows(targets | known, rows), **settings, **rule)
        bounds = found.epsilon if found.risk is None else found.risk
        status = np.where(found.status == "ok", bounds.status, found.status)
        pieces.append((rows, columns_of(bounds) | {quantity: found.value, "status": _shared(status)}))
    return _joined(pieces)


def law_of_k(word: str, numbers: Mapping[str, Any]) -> Law:
    """Return the law of K (the random number of repetitions) that a grid calls `word`; `numbers` has its parameters."""
    from jaxacct import selection

    given = [numbers[field] for field in LAWS[word]]
    law: Law = getattr(selection, word.title().replace("_", ""))(*given)  # "point_mass" is PointMass
    return law


def expected_repetitions(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return E[K], the expected number of repetitions, of every row.  Every row must have repetitions."""
    found = np.zeros(inputs["repetitions"].size)
    for word in dict.fromkeys(inputs["repetitions"].tolist()):
        rows = inputs["repetitions"] == word
        found[rows] = law_of_k(word, {field: inputs[field][rows] for field in LAWS[word]}).mean
    return found


def _of_selections(inputs: Mapping[str, np.ndarray], rule: Mapping[str, Any], **accuracy: Any) -> dict[str, Any]:
    """Return columns of epsilon. A row with repetitions gets its selection's epsilon; any other row gets its run's."""
    numbers, pieces = tuple(_numbers(inputs, rule)), []
    for word in dict.fromkeys(inputs["repetitions"].tolist()):
        of_word = np.flatnonzero(inputs["repetitions"] == word)
        for rows in _by_base(inputs, of_word, numbers) if word else [of_word]:
            pieces.append((rows, columns_of(_solved(word, _rows(inputs, rows), numbers, rule, **accuracy))))
    return _joined(pieces)


def _solved(
    word: str, some: Mapping[str, np.ndarray], numbers: Sequence[str], rule: Mapping[str, Any], **accuracy: Any
) -> Bounds:
    """Return epsilon of rows with the same law of K (`word`).  `numbers` names the columns that `dp_sgd` takes."""
    given: dict[str, Any] = {name: some[name][:, :1] if word else some[name] for name in numbers}
    mechanism: Mechanism = dp_sgd(**given, **rule)
    if word:
        from jaxacct.selection import select

        mechanism = select(mechanism, law_of_k(word, some))
    return account.epsilon(mechanism, some["delta"], **accuracy)


def _by_base(inputs: Mapping[str, np.ndarray], rows: np.ndarray, numbers: tuple[str, ...]) -> Iterator[np.ndarray]:
    """Group rows by base run (the run a selection repeats).  Yield row numbers, shape (base runs, rows per run)."""
    parameters = np.stack([inputs[name][rows] for name in numbers], axis=1)
    _, which, count = np.unique(parameters, axis=0, return_inverse=True, return_counts=True)
    sorted_rows = rows[np.argsort(which.ravel(), kind="stable")]
    first = np.cumsum(count) - count
    for size in np.unique(count):
        bases = first[count == size]
        for start in range(0, bases.size, BASES_AT_ONCE):
            yield sorted_rows[bases[start : start + BASES_AT_ONCE, None] + np.arange(size)]
