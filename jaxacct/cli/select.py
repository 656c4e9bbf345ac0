"""`jaxacct select`: the epsilon of running DP-SGD K times and releasing the best, beside that of a single run."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.cli import output
from jaxacct.cli.arguments import CONFIGURATION, QUESTION
from jaxacct.core.validation import InputError, choice
from jaxacct.mechanisms.dp_sgd_run import usual_relation
from jaxacct.sweeps import Table, repetitions, samplings, sweep
from jaxacct.sweeps.columns import ANSWER, WORDS
from jaxacct.sweeps.grid import Grid, expand


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command; the worst score by a small zipped sweep, published bounds law by law."""
    if options.repetitions is None:
        raise InputError(f"repetitions is missing; name the law of K: {', '.join(repetitions.LAWS)}")
    names = (*CONFIGURATION, *QUESTION["select"])
    fields = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.sampling != "poisson":
        fields["sampling"] = options.sampling
    relation = options.relation or usual_relation(options.sampling)
    laws = [word.strip() for word in options.repetitions.split(",")]
    fields["repetitions"] = laws if len(laws) > 1 else laws[0]
    grid = expand(fields, mode="zip", quantity="epsilon")
    table = _solved(grid, options.bound, relation, options.candidates, options.top)
    batch = any(np.ndim(value) for value in fields.values())
    said = {"candidates": np.full(len(grid), options.candidates, object)}
    said |= {"top": np.full(len(grid), options.top)} if options.top != 1 else {}
    table = Table(table.columns | said | _beside(grid, relation))
    print(output.as_json(table, batch) if options.json else _text(table, batch))
    return 0


def _solved(grid: Grid, bound: str, relation: str, candidates: str, top: int) -> Table:
    from jaxacct import selection

    choice("bound", bound, ("worst_case", "auto", *selection.BOUNDS))
    if bound == "worst_case" and candidates == "iid" and top == 1:
        return sweep(grid, relation=relation, progress=False)
    inputs, size = grid.inputs, len(grid)
    answer = {name: np.zeros(size) for name in ANSWER} | {name: np.full(size, "", object) for name in WORDS}
    for word in dict.fromkeys(inputs["repetitions"].tolist()):
        rows = np.flatnonzero(inputs["repetitions"] == word)
        some = {name: column[rows] for name, column in inputs.items()}
        law = repetitions.law(word, some)
        if candidates == "iid" and top == 1:
            found = selection.bound_epsilon(_base(some), law, some["delta"], bound=bound, relation=relation)
        else:
            chosen = selection.select(_base(some), law, bound=bound, candidates=candidates, top=top)
            found = account.epsilon(chosen, some["delta"], relation=relation)
        for name, column in answer.items():
            column[rows] = getattr(found, name)
    return Table({"quantity": grid.quantity, **inputs, "relation": np.full(size, relation, object), **answer})


def _base(inputs: dict[str, np.ndarray]) -> Any:
    kinds = list(samplings.alike(inputs))
    if len(kinds) > 1:
        raise InputError("group must be one number, not a list; ask for one size at a time")
    return samplings.run(inputs, kinds[0][0])


def _beside(grid: Grid, relation: str) -> dict[str, np.ndarray]:
    """What a single run costs, and how many there are on average."""
    base = account.epsilon(_base(grid.inputs), grid.inputs["delta"], relation=relation)
    columns = {f"base_{name}": np.asarray(getattr(base, name)) for name in (*ANSWER, "kind", "status")}
    return columns | {"expected_repetitions": repetitions.expected(grid.inputs)}


def _text(table: Table, batch: bool) -> str:
    hidden = [f"base_{name}" for name in ("lower", "estimate", "kind", "status")] if batch else []
    shown = Table({name: column for name, column in table.columns.items() if name not in hidden})
    if batch:
        return output.as_text(shown, batch)
    one = {name: column[0] for name, column in table.columns.items()}
    single = f"epsilon <= {output.up(one['base_upper'], 6)} ({one['base_kind']}) for a single run"
    more = [("released", f"the best {one['top']}, or all where K is less")] if "top" in one else []
    return output.as_text(shown, batch, [("base", single), ("E[K]", f"{one['expected_repetitions']:.6g}"), *more])
