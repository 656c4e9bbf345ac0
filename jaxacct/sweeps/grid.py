"""Makes a grid of DP-SGD configurations, one checked row for each, from named fields, records or a file."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import io
import itertools
import math
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.calibration.dp_sgd_search import RISK_RULES, given_target
from jaxacct.core.files import reading
from jaxacct.core.keywords import MEANINGS, OF_OTHERS, meant, nearest
from jaxacct.core.types import Index
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    OPEN_PROBABILITY,
    POSITIVE,
    REAL,
    Constraint,
    InputError,
    broadcast_shape,
    check,
    check_one,
    choice,
    shown,
)
from jaxacct.mechanisms.dp_sgd_run import LENGTHS, NUMBERS, OF_RULES, RATES, RULES, SOURCES, described, rule_name

LAWS: dict[str, tuple[str, ...]] = {
    "geometric": ("gamma",),
    "logarithmic": ("gamma",),
    "truncated_negative_binomial": ("eta", "gamma"),
    "poisson": ("mean",),
    "binomial": ("trials", "probability_of_run"),
    "point_mass": ("count",),
}
"""The laws of K by name, with the numbers that each law needs. K is the random number of runs of a selection."""

LAW_NUMBERS: dict[str, Constraint] = {
    "eta": Constraint("use an eta above -1, such as 1, 0 or -0.5", -1, lower_open=True),
    "gamma": OPEN_PROBABILITY,
    "mean": POSITIVE,
    "trials": COUNT,
    "probability_of_run": Constraint("use a probability above 0 and at most 1", 0, 1, lower_open=True),
    "count": COUNT,
}
"""The numbers of all laws of K, with their allowed values."""

FIELDS = NUMBERS | {"target_epsilon": POSITIVE, "target_delta": DELTA, "epsilon": REAL, "delta": DELTA}
FIELDS |= RISK_RULES | LAW_NUMBERS
"""Every number of a configuration, with its allowed values."""

INPUTS = ("sampling", *(field for field in FIELDS if field not in LAW_NUMBERS), "repetitions", *LAW_NUMBERS)
"""Every input of a configuration, in the order of the result's columns."""

QUANTITIES = ("noise_multiplier", "sampling_probability", "steps", "epsilon", "delta")
"""Quantities that a sweep can solve for."""

COUNTS = ("batch_size", *(name for name, rule in FIELDS.items() if rule.integral))
"""Fields whose ranges are rounded to whole numbers."""
WORDS_OF_INPUT = ("sampling", "repetitions")
"""Inputs that are text."""
ANSWER = ("lower", "estimate", "upper")
"""Columns that hold the bracket of an answer."""
WORDS = ("kind", "status", "engine")
"""Columns of text that describe the bracket."""
LARGEST_GRID = 10_000_000
"""Largest number of rows of a product, or of values of a range; more are refused. These rows take about a gigabyte."""

_RANGE_KEYS = ("start", "stop", "num", "scale")
"""Keys of a range; the first three are required."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Configurations of a sweep.  Every row has a name, the quantity to solve for, and the inputs.

    `jaxacct.sweeps.read_grid` makes a grid from a file, `jaxacct.sweeps.grid.expand` makes one from a dict.

    Parameters
    ----------
    name : array of str, shape (rows,); the text is empty for a row without a name.
    quantity : array of str, shape (rows,); the quantity that the sweep solves for in each row.
    inputs : dict of arrays, each of shape (rows,): text (`sampling`, `repetitions`) or float64; "" or NaN where absent.
    beside : dict of arrays, each of shape (rows,); other columns of the user, which are kept beside the answers.

    >>> import jaxacct.sweeps.grid
    >>> fields = {"noise_multiplier": [1.0, 2.0], "sampling_probability": 0.01, "steps": 10, "delta": 1e-5}
    >>> g = jaxacct.sweeps.grid.expand(fields)
    >>> len(g), g.take([1]).inputs["noise_multiplier"].tolist()
    (2, [2.0])
    """

    name: np.ndarray
    quantity: np.ndarray
    inputs: dict[str, np.ndarray]
    beside: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.quantity.size

    def take(self, rows: Index) -> Grid:
        """Return the rows at a NumPy index."""
        inputs = {field: column[rows] for field, column in self.inputs.items()}
        beside = {name: column[rows] for name, column in self.beside.items()}
        return Grid(self.name[rows], self.quantity[rows], inputs, beside)


def expand(fields: Mapping[str, Any], *, mode: str = "product", quantity: str | None = None, name: str = "") -> Grid:
    """Return the grid of all combinations of the fields' values; in mode "zip", of the fields broadcast together."""
    choice("mode", mode, ("product", "zip"))
    if quantity is not None:
        choice("quantity", quantity, QUANTITIES)
    for field in fields:
        if field not in INPUTS:
            raise InputError(f"unknown field {field!r}{suggest(field, INPUTS)}")
    axes = {field: _axis(field, value) for field, value in fields.items()}
    solved = _quantity(axes, quantity)
    if solved != "delta" and "epsilon" in axes:  # epsilon is a target here, so it must be positive
        check("epsilon", axes["epsilon"], POSITIVE)
    _require_law(axes, solved)
    _require_rule(axes, all if mode == "zip" else any)
    if mode == "product":
        size = math.prod(np.size(axis) for axis in axes.values())
        if size > LARGEST_GRID:
            raise InputError(f"the grid has {size:,} configurations; at most {LARGEST_GRID:,} fit; split it")
        meshed = list(np.meshgrid(*(np.ravel(axis) for axis in axes.values()), indexing="ij"))
    else:
        shape = broadcast_shape({field: np.shape(axis) for field, axis in axes.items()})
        meshed = [np.broadcast_to(axis, shape) for axis in axes.values()]
    columns = {field: np.array(axis).ravel() for field, axis in zip(axes, meshed, strict=True)}
    prefix = "" if solved in ("epsilon", "delta") else "target_"  # in a calibration, epsilon is target_epsilon
    words = {f"{p}{word}": f"{prefix}{word}" for word in ("epsilon", "delta") for p in ("", "target_")}
    columns = {words.get(field, field): column for field, column in _derived(columns, solved).items()}
    rows = next(iter(columns.values())).size
    inputs = {field: columns[field] for field in INPUTS if field in columns}
    return Grid(np.full(rows, name, dtype=object), np.full(rows, solved, dtype=object), inputs)


def concatenate(grids: Sequence[Grid]) -> Grid:
    """Return the rows of several grids, one grid after the other, with NaN or empty text for absent inputs."""
    inputs = {}
    for field in (field for field in INPUTS if any(field in grid.inputs for grid in grids)):
        absent, kind = ("", object) if field in WORDS_OF_INPUT else (np.nan, np.float64)
        inputs[field] = np.concatenate([g.inputs.get(field, np.full(len(g), absent, kind)) for g in grids])
    name, quantity = (np.concatenate([getattr(g, word) for g in grids]) for word in ("name", "quantity"))
    return Grid(name, quantity, inputs)


def suggest(word: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown word: the nearest known word, or all known words."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else f"; use one of {', '.join(known)}"


def _axis(field: str, value: Any) -> np.ndarray:
    if field in WORDS_OF_INPUT:
        axis = np.array(value, object)
        for index, word in np.ndenumerate(axis):
            place = f"{field}{list(index) if index else ''}"
            axis[index] = rule_name(word, place) if field == "sampling" else choice(place, word, LAWS)
    else:
        axis = np.asarray(check(field, _range(field, value) if isinstance(value, Mapping) else value, FIELDS[field]))
    if axis.size == 0:
        raise InputError(f"{field} is empty; give at least one value")
    return axis


def _range(field: str, value: Mapping[str, Any]) -> np.ndarray:
    for key in value:
        if key not in _RANGE_KEYS:
            raise InputError(f"{field} range has an unknown key {key!r}{suggest(key, _RANGE_KEYS)}")
    for key in _RANGE_KEYS[:3]:
        if key not in value:
            raise InputError(f"{field} range lacks {key!r}; write {{start = 0.5, stop = 8, num = 5}}")
    start, stop, num = (
        check_one(f"{field}.{key}", value[key], COUNT if key == "num" else FIELDS[field], "a range has one of each")
        for key in _RANGE_KEYS[:3]
    )
    if num > LARGEST_GRID:
        raise InputError(f"{field}.num = {num} must be <= {LARGEST_GRID}; use fewer values")
    scale = choice(f"{field}.scale", value.get("scale", "linear"), ("linear", "log"))
    if scale == "log" and min(start, stop) <= 0:
        raise InputError(f"{field} range on a log scale must have start and stop > 0; use scale = 'linear'")
    values = (np.geomspace if scale == "log" else np.linspace)(start, stop, int(num))
    return np.rint(values) if field in COUNTS else values


def _quantity(axes: Mapping[str, Any], stated: str | None) -> str:
    """Return the quantity that the fields leave open; refuse a grid that leaves open none or several."""
    targets = (("epsilon", "target_epsilon"), ("delta", "target_delta"))
    for first, second in (*targets, *itertools.combinations(RATES, 2), LENGTHS):
        if first in axes and second in axes:
            raise InputError(f"{first} and {second} say the same thing twice; leave one of them out")
    lone_size = "dataset_size" in axes and ("sampling" in axes or not set(RATES) & set(axes))
    if ("dataset_size" in axes) != ("batch_size" in axes) and not lone_size:
        lone, other = ("dataset_size", "batch_size")[:: 1 if "dataset_size" in axes else -1]
        raise InputError(f"{lone} needs {other}; give both, or sampling_probability instead")
    present = {field.removeprefix("target_") for field in axes}
    present |= {names[0] for names in (RATES, LENGTHS) if set(names) & set(axes)}
    if any(name in axes for name in RISK_RULES):
        first, second = (axes.get(f"target_{word}", axes.get(word)) for word in ("epsilon", "delta"))
        if given_target(first, second, {name: axes.get(name) for name in RISK_RULES}) is not None:
            present |= {"epsilon", "delta"}
    missing = [quantity for quantity in QUANTITIES if quantity not in present]
    if stated is not None:
        if stated not in missing:
            raise InputError(f"quantity = {stated!r} is given as well as asked for; leave {stated} out")
        missing.remove(stated)
        if missing:
            raise InputError(f"{_and(missing)} missing; {stated} needs the four others")
        return stated
    if not missing:
        raise InputError(f"nothing is left to solve for; leave out one of {', '.join(QUANTITIES)}")
    if len(missing) > 1:
        raise InputError(f"{_and(missing)} missing; leave out only the number that is solved for")
    return missing[0]


def _require_law(given: Mapping[str, Any], solved: str) -> None:
    """Refuse missing or extra parameters of `repetitions` (see `LAWS`), and `repetitions` if epsilon is not sought."""
    numbers = [field for field in LAW_NUMBERS if field in given]
    if "repetitions" not in given:
        if numbers:
            raise InputError(f"{numbers[0]} needs repetitions; name the law of K, such as 'geometric'")
        return
    for word in dict.fromkeys(np.ravel(given["repetitions"])):
        for field in (*LAWS[word], *numbers):
            if (field in LAWS[word]) != (field in given):
                which = f"repetitions = {word!r} takes {' and '.join(LAWS[word])}"
                raise InputError(f"{which}; {'leave out' if field in given else 'give'} {field}")
    if solved != "epsilon":
        raise InputError(f"{solved} cannot be solved for with repetitions; give {solved}, and leave out epsilon")


def _require_rule(given: Mapping[str, Any], enough: Callable[[Iterable[bool]], bool]) -> None:
    """Refuse a parameter (such as `cap`) that the batch rules do not take, and a rule that lacks a parameter.

    `enough` is `all` if each value stands in one row.  In a product, where a value meets every rule, it is `any`.
    """
    rows = np.ravel(given.get("sampling", "poisson")).tolist()
    rules = sorted(set(rows))
    for name in OF_RULES[1:]:  # without `slots`, the first name, which `described` checks
        knows = {rule: RULES[rule_name(rule)].knows(name) for rule in rules}
        if name in given and not enough(knows.values()):
            words = " or ".join(repr(word) for word, rule in RULES.items() if rule.knows(name))
            row = next(place for place, rule in enumerate(rows) if not knows[rule])
            but = f", and sampling[{row}] = {rows[row]!r}" if any(knows.values()) else ""
            raise InputError(f"{name} needs sampling = {words}{but}; name the batch rule that is run")
    for rule in rules:
        for name in RULES[rule_name(rule)].needs():
            if name not in given:
                raise InputError(f"sampling = {rule!r} needs {name}; give it")


def _derived(columns: dict[str, np.ndarray], solved: str) -> dict[str, np.ndarray]:
    """Compute rates, steps and groups from other columns. A value that the row's batch rule does not take is NaN."""
    own = [name for name in OF_RULES if name in columns]
    if not own and not any(name in columns for name in (*RATES[1:], *LENGTHS[1:])):
        return columns
    size = next(iter(columns.values())).size
    rules = columns.get("sampling", np.full(size, "poisson", object))
    found = {
        name: np.full(size, np.nan) for name in ("sampling_probability", "steps", "groups", *own) if name != solved
    }
    for rule in dict.fromkeys(rules.tolist()):
        rows = np.flatnonzero(rules == rule)
        given = [name for name in NUMBERS if name in columns and RULES[rule_name(rule)].knows(name)]
        run = described({name: columns[name][rows] for name in given}, rule, unknown=solved)
        for name, column in found.items():
            column[rows] = run.get(name, np.nan)
    return columns | {name: column for name, column in found.items() if not np.isnan(column).all()}


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]} are" if len(words) > 1 else f"{words[0]} is"


_SETTINGS = ("name", "quantity", "zip")
"""Keys of a TOML block that are no inputs."""
COLUMNS = ("name", "quantity", *INPUTS)
"""Columns that a sweep reads. All other columns of a grid are copied to the result, beside the answers."""
SETTLED_BY = {
    **SOURCES,
    "sampling_probability": ("dataset_size", *SOURCES["sampling_probability"]),
    **{f"{prefix}{name}": (name, f"target_{name}") for name in ("epsilon", "delta") for prefix in ("", "target_")},
}
"""Maps an input to other inputs that can give the same quantity.  A grid that has the input needs none of them."""


def read_grid(path: str | os.PathLike[str]) -> Grid:
    r"""Read a grid file and check it. An error message is one line that names the place in the file.

    A block of a TOML grid stands for all combinations of the values of its lists and ranges (both ends included, counts
    rounded; the last one written varies fastest).  With `zip = true` the lists are broadcast together instead::

        [defaults]                      # optional, shared by all blocks; a block may override
        target_delta = [1e-5, 1e-6]

        [[block]]
        name = "MNIST"                  # optional, the result's first column
        dataset_size = 60000            # with batch_size: sampling_probability = batch_size / dataset_size
        batch_size = [128, 256]
        epochs = [10, 20]               # steps = ceil(epochs * dataset_size / batch_size)
        target_epsilon = {start = 0.25, stop = 16, num = 7, scale = "log"}

    A block leaves out exactly one of noise_multiplier, sampling_probability, steps, epsilon (or target_epsilon) and
    delta (or target_delta): the sweep solves for it, and `quantity = "..."` may state it.  A risk (target_advantage, or
    target_tpr with at_fpr, for example) may replace epsilon and delta as the target.  With `repetitions = "geometric"`
    and `gamma = [0.1, 0.01]`, or another law of K of `jaxacct.sweeps.grid.LAWS`, epsilon is that of the best of K runs.
    A file without `[[block]]` is one block.  A CSV has the same names as columns; an empty cell is a value left out.
    Other columns are kept beside the answers.  A column is refused if its name resembles an absent input, or if it is a
    word of another question, such as `relation`, `candidates` or `unit`, which would change the answer.

    Parameters
    ----------
    path : path of a .toml or .csv file

    Returns
    -------
    Grid

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "grid.csv")
    ...     text = "noise_multiplier,sampling_probability,steps,delta\n1,0.01,10,1e-5\n2,0.01,10,1e-5\n"
    ...     size = path.write_text(text)
    ...     grid = read_grid(path)
    >>> len(grid), grid.inputs["noise_multiplier"].tolist()
    (2, [1.0, 2.0])
    """
    path = Path(path)
    readers = {".toml": _read_toml, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise InputError(f"{path}: a grid must end in .toml or .csv")
    with reading(path):
        try:
            # in a CSV, a line break may stand within a cell
            with path.open(encoding="utf-8-sig", newline="" if path.suffix.lower() == ".csv" else None) as file:
                text = file.read()
        except UnicodeDecodeError:
            raise InputError(f"{path}: cannot be read: it is not UTF-8 text") from None
    try:
        return readers[path.suffix.lower()](text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_toml(text: str) -> Grid:
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # a whole number with too many digits raises ValueError, too
        raise InputError(f"not valid TOML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InputError("not valid TOML: its arrays or tables are nested too deeply") from None
    defaults = document.pop("defaults", {})
    if not isinstance(defaults, dict):
        raise InputError("defaults must be a table; write [defaults]")
    if "block" not in document:
        return _block(defaults | document, "the grid")
    blocks = document.pop("block")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, Mapping) for block in blocks):
        raise InputError("block must be an array of tables; write [[block]]")
    for key in document:
        shared = key in INPUTS or key in _SETTINGS
        hint = "; write shared keys under [defaults]" if shared else suggest(key, ("block", "defaults"))
        raise InputError(f"unknown top-level key {key!r}{hint}")
    return concatenate(
        [_block(defaults | block, f"block {block.get('name', i)!r}") for i, block in enumerate(blocks, 1)]
    )


def _block(entries: Mapping[str, Any], place: str) -> Grid:
    for key, value in entries.items():
        if key not in _SETTINGS and key not in INPUTS:
            raise InputError(f"{place}: unknown key {key!r}{suggest(key, (*INPUTS, *_SETTINGS))}")
        wanted = {"name": str, "quantity": str, "zip": bool}.get(key)
        if wanted and not isinstance(value, wanted):
            kind = "true or false" if wanted is bool else "text in quotes"
            raise InputError(f"{place}: {key} = {value!r} must be {kind}")
    fields = {key: value for key, value in entries.items() if key not in _SETTINGS}
    mode = "zip" if entries.get("zip", False) else "product"
    try:
        return expand(fields, mode=mode, quantity=entries.get("quantity"), name=entries.get("name", ""))
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _read_csv(text: str) -> Grid:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise InputError(f"line {reader.line_num}: not valid CSV: {error}") from None
    if len(rows) < 2:
        raise InputError("no configurations; write a header line and one line per configuration")
    header = with_levels([cell.strip() for cell in rows[0][1]])
    records = [_record(header, number, cells) for number, cells in rows[1:]]
    columns = {name: [record[place] for record in records] for place, name in enumerate(header)}
    return grid_of_records(header, columns, [f"line {number}" for number, _ in rows[1:]])


def with_levels(names: list[str]) -> list[str]:
    """Name several nameless columns, which pandas writes for the levels of an index, as its `reset_index` does."""
    return [name or f"level_{place}" for place, name in enumerate(names)] if names.count("") > 1 else names


def _record(header: list[str], number: int, cells: list[str]) -> list[Any]:
    """Return the cells of one CSV line: numbers for inputs, text for other columns, None for empty cells."""
    if len(cells) != len(header):
        raise InputError(f"line {number}: {len(cells)} cells under a header of {len(header)}")
    record: list[Any] = []
    for column, cell in zip(header, (cell.strip() for cell in cells), strict=True):
        try:
            record.append(_number(cell, FIELDS[column]) if cell and column in FIELDS else cell or None)
        except ValueError:
            rule = FIELDS[column]
            wanted = f"{'' if rule.integral else 'a number '}{rule.limit}"
            raise InputError(f"line {number}: {column} = {shown(cell)} must be {wanted}") from None
    return record


def _number(cell: str, rule: Constraint) -> float:
    """Return the number that a cell spells. Raise ValueError if it spells none, or a count that float64 would round."""
    number = float(cell)
    if "_" in cell or (rule.integral and number.is_integer() and Decimal(cell) != number):
        raise ValueError(cell)
    return number


def as_grid(grid: Any, quantity: str | None = None) -> Grid:
    """Return the grid of a DataFrame or a list of dicts, in which None or NaN stands for a value that is left out."""
    if is_frame(grid):
        names = [str(name) for name in grid.columns]
        columns = {name: grid.iloc[:, place] for place, name in enumerate(names)}
        cells = {name: _with_none(column) if name in COLUMNS else column for name, column in columns.items()}
        return grid_of_records(names, cells, [f"row {label!r}" for label in grid.index], quantity)
    for place, record in enumerate(grid):
        if not isinstance(record, Mapping):
            raise InputError(
                f"grid[{place}] = {shown(record)} of type {type(record).__name__} is no record; give a list of dicts "
                "such as {'noise_multiplier': 1.0, 'sampling_probability': 0.01, 'steps': 1000, 'delta': 1e-5}"
            )
    names = list(dict.fromkeys(str(name) for record in grid for name in record))
    texts = [{str(name): value for name, value in record.items()} for record in grid]
    for place, (record, text) in enumerate(zip(grid, texts, strict=True)):
        if len(text) < len(record):
            raise InputError(f"record {place}: two of its columns have the same name as text; rename one of them")
    cells = {name: [record.get(name) for record in texts] for name in names}
    cells |= {name: _with_none(column) for name, column in cells.items() if name in COLUMNS}
    return grid_of_records(names, cells, [f"record {place}" for place in range(len(grid))], quantity)


def grid_of_records(
    names: Sequence[str], cells: Mapping[str, Any], places: Sequence[str], quantity: str | None = None
) -> Grid:
    """Make a grid from columns of cells, where None is a value left out. Error messages call row i `places[i]`."""
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"column {name!r} appears twice; leave one out")
    if not places:
        raise InputError("no configurations; give at least one row")
    _refuse_other_words(names, cells, places)
    known = {name: cells[name] for name in names if name in COLUMNS}
    for name, column in known.items():
        for place, cell in zip(places, column, strict=True):
            if isinstance(cell, list | tuple) or bool(getattr(cell, "shape", ())):
                raise InputError(
                    f"{place}: {name} = {shown(cell)} must be one value; a row is one configuration, write one for each"
                )
    rows = [
        {name: value for name, value in zip(known, row, strict=True) if value is not None}
        for row in zip(*known.values(), strict=True)
    ]
    patterns: dict[tuple[Any, ...], list[int]] = {}
    for row, record in enumerate(rows):
        if quantity is not None:
            record.setdefault("quantity", quantity)
        patterns.setdefault((record.get("quantity"), *(field for field in record if field in INPUTS)), []).append(row)
    order = np.concatenate([np.asarray(group) for group in patterns.values()])
    groups = [_group([rows[row] for row in group], [places[row] for row in group]) for group in patterns.values()]
    grid = concatenate(groups).take(np.argsort(order))
    beside = {name: _kept(cells[name]) for name in names if name not in COLUMNS}
    return Grid(grid.name, grid.quantity, grid.inputs, beside)


def _refuse_other_words(names: Sequence[str], cells: Mapping[str, Any], places: Sequence[str]) -> None:
    """Refuse a column named like a column of the answer, an absent input, or an argument of another question."""
    given = {name for one in names for name in (one, *SETTLED_BY.get(one, ()))}
    given |= set() if "repetitions" in given else set(LAW_NUMBERS)
    absent = [name for name in COLUMNS if name not in given]
    same = {_plain(name): name for name in COLUMNS}
    targets = {name.removeprefix("target_"): (name,) for name in RISK_RULES if name.startswith("target_")}
    meanings = {_plain(word): others for word, others in (MEANINGS | targets).items()}
    own = [name for name in names if name not in COLUMNS]
    asked = _asked_elsewhere() if own else {}
    for name in own:
        if name in (*ANSWER, *WORDS):
            raise InputError(f"column {name!r} has the name of a column of the answer; rename it, or leave it out")
        word = nearest(_plain(name), [*asked, *meanings], cutoff=0.9) or _plain(name)
        means = meanings.get(word, ())
        right = same.get(_plain(name)) or next((other for other in means if other in absent), "")
        right = right or meant(name, absent, cutoff=0.8)  # a lower cutoff would refuse the user's own columns
        if right:
            raise InputError(f"unknown column {name!r}; did you mean {right!r}? rename it, whichever it is")
        if word not in asked and means and means[0] not in given:
            word = _plain(means[0])
        if word in asked:
            rows = zip(places, _with_none(cells[name]), strict=True)
            filled = (f"{place}: {name} = {shown(cell)}" for place, cell in rows if cell is not None)
            said = next(filled, f"column {name!r}")
            raise InputError(f"{said} is no input of a sweep{asked[word]}, or rename the column if it is a note")
    if not any(name in INPUTS for name in names):
        raise InputError(f"no column is an input; give four of {', '.join(QUANTITIES)}")


def _asked_elsewhere() -> dict[str, str]:
    """Return {word: end of the message that refuses it}. Other questions take these words, no row of a sweep does."""
    from jaxacct.accounting.account import epsilon
    from jaxacct.calibration import any_parameter, noise_rate_steps
    from jaxacct.selection import select

    searches = [getattr(noise_rate_steps, f"calibrate_{name}") for name in QUANTITIES[:3]]
    questions = {f"; ask ja.{ask.__name__}": ask for ask in (epsilon, any_parameter.calibrate, *searches)}
    questions[", which releases the best of i.i.d. candidates; ask selection.select or `jaxacct select`"] = select
    found = {_plain(word): f"; ask {other}" for word, other in OF_OTHERS.items()}
    found |= {_plain(word): end for end, ask in questions.items() for word in inspect.signature(ask).parameters}
    for word in ("relation", "engine", "rtol", "backend"):
        found[word] = f", which has one {word} for all rows; give it as ja.sweep(grid, {word}=...) or --{word}"
    ours = {_plain(name) for name in (*COLUMNS, "run")}  # `run` is a mechanism, which no cell holds
    return {word: end for word, end in found.items() if word not in ours}


def _plain(name: str) -> str:
    """Return the letters and digits of a name, in lower case: two spellings of one name are then equal."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _group(records: list[dict[str, Any]], places: list[str]) -> Grid:
    """Make one grid from rows that give values of the same inputs. An error names the bad row."""
    fields = [field for field in records[0] if field in INPUTS]
    quantity = records[0].get("quantity")
    try:
        grid = expand({f: [r[f] for r in records] for f in fields}, mode="zip", quantity=quantity)
    except InputError:
        for place, record in zip(places, records, strict=True):
            try:
                expand({field: record[field] for field in fields}, mode="zip", quantity=quantity)
            except InputError as error:
                raise InputError(f"{place}: {error}") from None
        raise
    return Grid(np.array([str(r.get("name", "")) for r in records], dtype=object), grid.quantity, grid.inputs)


def _with_none(cells: Any) -> list[Any]:
    """Return the cells of an input, with None for NaN, pandas' NA and NaT, and empty text."""
    nan = lambda cell: isinstance(cell, float | np.floating) and math.isnan(cell)
    empty = lambda cell: isinstance(cell, str) and not cell.strip()
    missing = ("NAType", "NaTType")
    return [None if nan(cell) or empty(cell) or type(cell).__name__ in missing else cell for cell in cells]


def _kept(cells: Any) -> np.ndarray:
    """Return a column of the user as an array. None becomes NaN among numbers, and "" among other cells."""
    if hasattr(cells, "to_numpy"):
        return np.asarray(cells.to_numpy())
    kinds = {type(cell) for cell in cells}
    if kinds <= {int, float, bool} and len(kinds) == 1:
        array = np.array(cells)
        if array.dtype.kind in "fib":
            return array
    if kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array([np.nan if cell is None else cell for cell in cells], np.float64)
    column = np.empty(len(cells), object)
    column[:] = ["" if cell is None else cell for cell in cells]
    return column


def is_frame(grid: Any) -> bool:
    """Return whether an object has the attributes of a pandas.DataFrame; pandas is not imported."""
    return all(hasattr(grid, name) for name in ("iloc", "columns", "index"))
