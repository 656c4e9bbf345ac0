"""Batch rules in a grid: the columns that say how batches are drawn, and the runs of rows that may differ in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxacct.core.validation import COUNT, Constraint, InputError, choice
from jaxacct.mechanisms import SAMPLING, Mechanism, dp_sgd

__all__ = ["FIELDS", "alike", "require", "run", "run_of_row", "settings", "words"]

_PARAMETERS = ("noise_multiplier", "sampling_probability", "steps")
_NUMBERS = ("cap", "dataset_size")
FIELDS: dict[str, Constraint] = {"cap": COUNT, "group": COUNT}
"""The numbers of a batch rule, with the values that they may take; `dataset_size` is one of all grids."""


def words(value: Any) -> np.ndarray:
    """Names of batch rules, one or an array of them; InputError for anything else."""
    axis = np.asarray(value, object)
    for index, word in np.ndenumerate(axis):
        choice(f"sampling{list(index) if index else ''}", word, SAMPLING)
    return axis


def require(given: Mapping[str, Any]) -> None:
    """Refuse a cap without the rule that has one, and that rule without its numbers."""
    rules = set(np.ravel(given["sampling"])) if "sampling" in given else set()
    if "cap" in given and "truncated_poisson" not in rules:
        raise InputError("cap needs sampling = 'truncated_poisson'; leave it out, or name that batch rule")
    for name in ("cap", "dataset_size"):
        if "truncated_poisson" in rules and name not in given:
            raise InputError(f"sampling = 'truncated_poisson' needs {name}; give it")


def alike(inputs: Mapping[str, np.ndarray]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """(settings of `dp_sgd`, rows) for the rows of one batch rule and group size each.

    >>> inputs = {"steps": np.ones(3), "group": np.array([1.0, 2.0, 1.0])}
    >>> [(given, rows.tolist()) for given, rows in alike(inputs)]
    [({}, [0, 2]), ({'group': 2}, [1])]
    """
    size = next(iter(inputs.values())).size
    rule = inputs.get("sampling", np.full(size, "", object))
    group = np.nan_to_num(inputs.get("group", np.ones(size)), nan=1.0)
    for word in dict.fromkeys(rule.tolist()):
        for number in np.unique(group[rule == word]):
            rows = np.flatnonzero((rule == word) & (group == number))
            yield settings(word, number, {name: column[rows] for name, column in inputs.items()}), rows


def settings(word: str, group: float, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `dp_sgd` for a batch rule, its group size and the numbers beside them."""
    given: dict[str, Any] = {"sampling": word} if word not in ("", "poisson") else {}
    if group != 1.0:
        given["group"] = int(group)
    if word == "truncated_poisson":
        given |= {"cap": inputs["cap"], "dataset_size": inputs["dataset_size"]}
    elif word == "without_replacement" and group != 1.0:
        given["dataset_size"] = inputs.get("dataset_size")
    return given


def run_of_row(row: Mapping[str, Any]) -> Mechanism:
    """The run of one row of a result, whose cells are numbers and text.

    >>> row = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "steps": 10.0, "group": 2.0, "cap": float("nan")}
    >>> run_of_row(row).expression()
    'ja.dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=10, group=2)'
    """
    group = float(row.get("group", math.nan))
    word = str(row.get("sampling", "") or "")
    if word:
        words(word)
    given = settings(word, 1.0 if math.isnan(group) else group, {n: float(row.get(n, math.nan)) for n in _NUMBERS})
    return run({name: float(row[name]) for name in _PARAMETERS}, given)


def run(inputs: Mapping[str, Any], given: Mapping[str, Any]) -> Mechanism:
    """The run of rows with the same settings."""
    return dp_sgd(inputs["noise_multiplier"], inputs["sampling_probability"], inputs["steps"], **given)
