"""Plans as JSON, safe to read from strangers: the segments as they are run, nothing that has to be solved again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from jaxacct import selection
from jaxacct.core.validation import COUNT, POSITIVE, PROBABILITY, InputError, check
from jaxacct.interop.documents import from_json, to_json
from jaxacct.mechanisms import PureDP
from jaxacct.training.plan.filters import Filter
from jaxacct.training.plan.request import DISPLACING
from jaxacct.training.plan.schedule import Segment, slots_for
from jaxacct.training.plan.solved import SolvedPlan
from jaxacct.training.step.step_mechanisms import ALLOCATION, FIXED, OF_ONE_SIZE, slots_of

__all__ = ["load", "plan_document", "plan_from"]

_FORMAT, _VERSION = "jaxacct.plan", 1
"""What a document says of itself; this release reads no other version."""
_MAX_SEGMENTS = 10**6
"""More than any run needs (one for each of a million steps); a longer list from a stranger is refused unread."""
_PLAIN = ("target_epsilon", "target_delta", "dataset_size", "sampling", "relation", "noise_multiplier")
"""The settings that a document holds as they are."""
_UNUSUAL = {"candidates": "iid", "cap": None, "unit": "record"}
"""Settings that a document holds where they are not these."""
_SEGMENT_NUMBERS = {
    "steps": COUNT,
    "noise_multiplier": POSITIVE,
    "sampling_probability": PROBABILITY,
    "expected_batch_size": POSITIVE,
}
"""What a segment is written as, in this order, with the values that each number may have."""
_NEAR_SIZE = 1e-9
"""How far, relatively, a segment's expected batch size may be from rate times dataset_size: rounding, no more."""

Solved = TypeVar("Solved", bound=SolvedPlan)


def plan_document(plan: SolvedPlan) -> dict[str, Any]:
    """A plan as an object that JSON can hold; `Plan.from_document` turns it back into an equal plan.

    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=50, sampling_probability=1.0, noise_multiplier=5.0, steps=4)
    >>> plan_document(plan)["segments"]
    [[4, 5.0, 1.0, 50.0]]
    """
    law = None
    if plan.repetitions is not None:
        law = json.loads(to_json(selection.select(PureDP(0.0), plan.repetitions)))["mechanism"]["law"]
    return {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(plan, name) for name in _PLAIN},
        "segments": [list(segment[1:]) for segment in plan.segments],
        "filter": list(plan.filter) if plan.filter else None,
        "repetitions": law,
        **{name: getattr(plan, name) for name, usual in _UNUSUAL.items() if getattr(plan, name) != usual},
    }


def plan_from(node: Any, make: Callable[..., Solved]) -> Solved:
    """The plan of a document; InputError, in one line, for whatever is no plan.  Its epsilon is computed anew.

    make : (segments, **settings) -> plan: the `of` of a plan's class.
    """
    wanted = ("format", "version", *_PLAIN, "segments", "filter", "repetitions")
    # a document without a key of these is of a plan with the usual setting: older documents have no such keys
    if not isinstance(node, dict) or set(node) - set(_UNUSUAL) != set(wanted):
        raise InputError(f"plan must be an object with the keys {', '.join(wanted)}")
    if node["format"] != _FORMAT or node["version"] != _VERSION or type(node["version"]) is not int:
        raise InputError(f"plan: format and version must be {_FORMAT!r} and {_VERSION}, which this release reads")
    rows = node["segments"]
    if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_SEGMENTS:
        raise InputError(f"plan: segments must be a list of 1 to {_MAX_SEGMENTS} segments")
    settings = {name: node[name] for name in _PLAIN}
    if settings["sampling"] == FIXED and settings["relation"] in DISPLACING:
        settings["relation"] = "zero_out"  # what older releases meant: the record's place stays empty
    for name in ("target_delta", "dataset_size", "noise_multiplier"):
        if settings[name] is None:
            raise InputError(f"plan: {name} is missing; give a number")
    settings["repetitions"] = _law(node["repetitions"])
    settings["filter"] = _filter(node["filter"])
    settings |= {name: node.get(name, usual) for name, usual in _UNUSUAL.items()}
    plan = make(_segments(rows), **settings)
    for place, segment in enumerate(plan.segments):
        rate, size = segment.sampling_probability, segment.expected_batch_size
        near = math.isclose(plan.dataset_size * rate, size, rel_tol=_NEAR_SIZE) and rate > 0.0
        if plan.sampling in OF_ONE_SIZE:
            near = near and rate == size / plan.dataset_size and size == round(size)
        elif plan.sampling == ALLOCATION:
            near = near and rate == 1.0 / slots_of(rate) and slots_of(rate) == slots_for(plan.dataset_size, size)
        if not near:
            raise InputError(
                f"plan: segments[{place}]: expected_batch_size must be sampling_probability * dataset_size"
            )
    return plan


def load(text: str) -> Any:
    """JSON whose objects have no key twice and whose numbers are finite; ValueError otherwise."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    def number(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number here")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _segments(rows: list[Any]) -> list[Segment]:
    """The segments of a document, one row each."""
    found: list[Segment] = []
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(_SEGMENT_NUMBERS):
            raise InputError(f"plan: segments[{place}] must be a list of {', '.join(_SEGMENT_NUMBERS)}")
        items = zip(_SEGMENT_NUMBERS.items(), row, strict=True)
        steps, *rest = (check(f"segments[{place}].{name}", value, rule) for (name, rule), value in items)
        if any(np.ndim(value) for value in (steps, *rest)):
            raise InputError(f"plan: segments[{place}] must hold numbers; found a list")
        start = found[-1].end if found else 0
        found.append(Segment(start, int(steps), *(float(value) for value in rest)))
    return found


def _filter(node: Any) -> Filter | None:
    """The filter of a document.  What it promises is claimed only where the segments fit in it (`Plan.promised`)."""
    if node is None:
        return None
    if not isinstance(node, list) or len(node) != 2:
        raise InputError("plan: filter must be a list of its order and its budget, or null")
    order, budget = (float(check("filter", value, POSITIVE)) for value in node)
    if not order > 1.0:
        raise InputError(f"plan: the order of the filter = {order!r} must be > 1")
    return Filter(order, budget)


def _law(node: Any) -> Any:
    """The law of K in a document, read as that of a selection."""
    if node is None:
        return None
    chosen = {"type": "Selection", "mechanism": {"type": "PureDP", "epsilon": 0.0}, "law": node, "bound": "worst_case"}
    text = json.dumps({"format": "jaxacct.mechanism", "version": 1, "mechanism": chosen})
    chosen_again: Any = from_json(text)
    return chosen_again.law
