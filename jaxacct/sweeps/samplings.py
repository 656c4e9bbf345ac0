"""Batch rules in a grid: the columns that say how batches are drawn, and the runs of rows that may differ in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, dp_sgd
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, NUMBERS, RATES, described, numbers_of_rule, rule_name, rule_of

__all__ = ["alike", "derived", "numbers", "require", "run", "run_of_row", "words"]


def words(value: Any) -> np.ndarray:
    """Names of batch rules, one or an array of them; InputError for anything else."""
    axis = np.array(value, object)
    for index, word in np.ndenumerate(axis):
        axis[index] = rule_name(word, f"sampling{list(index) if index else ''}")
    return axis


def require(given: Mapping[str, Any]) -> None:
    """Refuse numbers of a batch rule without the rule, and a rule without its numbers."""
    rules = sorted(set(np.ravel(given["sampling"]))) if "sampling" in given else ["poisson"]
    if "cap" in given and "truncated_poisson" not in rules:
        raise InputError("cap needs sampling = 'truncated_poisson'; leave it out, or name that batch rule")
    for rule in rules:
        for name in rule_of(rule).needs:
            if name not in given:
                raise InputError(f"sampling = {rule!r} needs {name}; give it")


def derived(columns: dict[str, np.ndarray], solved: str) -> dict[str, np.ndarray]:
    """The columns, completed by the sampling probability and the steps where these follow from other columns."""
    if not any(name in columns for name in (*RATES[1:], *LENGTHS[1:])):
        return columns
    size = next(iter(columns.values())).size
    rules = columns.get("sampling", np.full(size, "poisson", object))
    found = {name: np.full(size, np.nan) for name in ("sampling_probability", "steps") if name != solved}
    for rule in dict.fromkeys(rules.tolist()):
        rows = np.flatnonzero(rules == rule)
        names = [name for name in NUMBERS if name in columns and (name != "cap" or "cap" in rule_of(rule).needs)]
        run_ = described({name: columns[name][rows] for name in names}, rule, unknown=solved)
        for name, column in found.items():
            column[rows] = run_.get(name, np.nan)
    return columns | {name: column for name, column in found.items() if not np.isnan(column).all()}


def alike(inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Rows that share a batch rule, a group size, and whether they have steps: pairs (rule and size, rows).

    >>> inputs = {"steps": np.ones(3), "group": np.array([1.0, 2.0, 1.0])}
    >>> [(rule, rows.tolist()) for rule, rows in alike(inputs)]
    [({'sampling': 'poisson', 'group': 1}, [0, 2]), ({'sampling': 'poisson', 'group': 2}, [1])]
    """
    size = next(iter(inputs.values())).size
    rules = inputs.get("sampling", np.full(size, "", object))
    group = np.nan_to_num(inputs.get("group", np.ones(size)), nan=1.0)
    in_epochs = np.isnan(inputs.get("steps", np.ones(size)))
    for word in dict.fromkeys(rules.tolist()):
        for number, by_epochs in np.unique(np.stack([group, in_epochs])[:, rules == word], axis=1).T:
            rows = np.flatnonzero((rules == word) & (group == number) & (in_epochs == by_epochs))
            yield {"sampling": word or "poisson", "group": int(number)}, rows


def numbers(inputs: Mapping[str, Any], rule: Mapping[str, Any]) -> dict[str, Any]:
    """The columns from which the runs of a batch rule and group size are made."""
    given = {name: inputs[name] for name in NUMBERS if name in inputs and not np.isnan(inputs[name]).all()}
    return numbers_of_rule(rule["sampling"], given, rule["group"])


def run(inputs: Mapping[str, Any], rule: Mapping[str, Any]) -> Mechanism:
    """The runs of rows with the same batch rule and group size."""
    return dp_sgd(**numbers(inputs, rule), **rule)


def run_of_row(row: Mapping[str, Any]) -> Mechanism:
    """The run of one row of a result, whose cells are numbers and text.

    >>> row = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "steps": 10.0, "group": 2.0, "cap": float("nan")}
    >>> run_of_row(row).expression()
    'ja.dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=10, group=2)'
    """
    word = str(row.get("sampling", "") or "poisson")
    words(word)
    cells = {name: float(row[name]) for name in NUMBERS if name in row}
    group = cells.get("group", math.nan)
    given = {name: cell for name, cell in cells.items() if not math.isnan(cell)}
    return run(given, {"sampling": word, "group": 1 if math.isnan(group) else int(group)})
