"""Private selection in a grid: laws of K by name, and the epsilon of "run K times, release the best" row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import COUNT, OPEN_PROBABILITY, POSITIVE, Constraint, InputError, choice
from jaxacct.mechanisms import dp_sgd
from jaxacct.sweeps import samplings

if TYPE_CHECKING:
    from jaxacct.selection import Law

__all__ = ["FIELDS", "LAWS", "epsilon", "expected", "law", "require", "words"]

LAWS: dict[str, tuple[str, ...]] = {
    "geometric": ("gamma",),
    "logarithmic": ("gamma",),
    "truncated_negative_binomial": ("eta", "gamma"),
    "poisson": ("mean",),
    "binomial": ("trials", "probability_of_run"),
    "point_mass": ("count",),
}
"""The laws that may be named, and the numbers of each."""

FIELDS: dict[str, Constraint] = {
    "eta": Constraint("use an eta above -1, such as 1, 0 or -0.5", -1, lower_open=True),
    "gamma": OPEN_PROBABILITY,
    "mean": POSITIVE,
    "trials": COUNT,
    "probability_of_run": Constraint("use a probability above 0 and at most 1", 0, 1, lower_open=True),
    "count": COUNT,
}
"""The numbers of all laws, with the values that they may take."""

BASES_AT_ONCE = 16
"""Base mechanisms, each with a curve of some 2 MB, that are solved together."""


def words(value: Any) -> np.ndarray:
    """Names of laws, one or an array of them; InputError for anything else."""
    axis = np.asarray(value, object)
    for index, word in np.ndenumerate(axis):
        choice(f"repetitions{list(index) if index else ''}", word, LAWS)
    return axis


def require(given: Mapping[str, Any], solved: str) -> None:
    """Refuse numbers of a law without its name, a name without its numbers, and what cannot be solved for."""
    numbers = [field for field in FIELDS if field in given]
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


def law(word: str, numbers: Mapping[str, Any]) -> Law:
    """The law of K with this name.

    >>> float(law("binomial", {"trials": 20, "probability_of_run": 0.5}).mean)
    10.0
    """
    from jaxacct import selection  # takes a while to import, and rows without repetitions do not need it

    made: dict[str, Callable[..., Law]] = {
        "geometric": selection.Geometric,
        "logarithmic": selection.Logarithmic,
        "truncated_negative_binomial": selection.TruncatedNegativeBinomial,
        "poisson": selection.Poisson,
        "binomial": selection.Binomial,
        "point_mass": selection.PointMass,
    }
    return made[word](*(numbers[field] for field in LAWS[word]))


def expected(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """E[K] of every row, all of which have repetitions."""
    found = np.zeros(inputs["repetitions"].size)
    for word in dict.fromkeys(inputs["repetitions"].tolist()):
        rows = inputs["repetitions"] == word
        found[rows] = law(word, {field: inputs[field][rows] for field in LAWS[word]}).mean
    return found


def epsilon(inputs: Mapping[str, np.ndarray], relation: str, rtol: float, rule: Mapping[str, Any]) -> Bounds:
    """The epsilon of every row: of its base where it has no repetitions, else of the selection, for the worst score.

    inputs : noise_multiplier, sampling_probability, steps, delta, repetitions and the numbers of the laws, each (B,).
    rule : the batch rule and group size of all rows, as `dp_sgd` takes them.
    """
    size = inputs["delta"].size
    numbers = tuple(samplings.numbers(inputs, rule))
    ends, labels = np.full((3, size), np.nan), np.full((3, size), "", object)
    for word in dict.fromkeys(inputs["repetitions"].tolist()):
        for rows in _alike(inputs, np.flatnonzero(inputs["repetitions"] == word), word != "", numbers):
            some = {name: column[rows] for name, column in inputs.items()}
            found = _solved(word, some, relation, rtol, numbers, rule)
            ends[:, rows] = found.lower, found.estimate, found.upper
            labels[:, rows] = found.kind, found.status, found.engine
    return Bounds(*ends, *labels)


def _solved(
    word: str,
    some: Mapping[str, np.ndarray],
    relation: str,
    rtol: float,
    numbers: Sequence[str],
    rule: Mapping[str, Any],
) -> Bounds:
    """Rows of one law; `numbers` are the columns that a run is made from."""
    if not word:
        given: dict[str, Any] = {name: some[name] for name in numbers}
        return account.epsilon(dp_sgd(**given, **rule), some["delta"], relation=relation, rtol=rtol)
    from jaxacct.selection import select

    given = {name: some[name][:, :1] for name in numbers}
    chosen = select(dp_sgd(**given, **rule), law(word, some))
    return account.epsilon(chosen, some["delta"], relation=relation, rtol=rtol)


def _alike(
    inputs: Mapping[str, np.ndarray], rows: np.ndarray, selected: bool, numbers: Sequence[str]
) -> Iterator[np.ndarray]:
    """The rows in arrays (bases, rows of that base), so that the curve of a base is computed once."""
    if not selected:
        yield rows
        return
    parameters = np.stack([inputs[name][rows] for name in numbers], axis=1)
    _, which, count = np.unique(parameters, axis=0, return_inverse=True, return_counts=True)
    sorted_rows = rows[np.argsort(which.ravel(), kind="stable")]
    first = np.cumsum(count) - count
    for size in np.unique(count):
        bases = first[count == size]
        for start in range(0, bases.size, BASES_AT_ONCE):
            yield sorted_rows[bases[start : start + BASES_AT_ONCE, None] + np.arange(size)]
