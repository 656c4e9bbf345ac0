"""The trace of a loss run with zeros added to the outputs of some of its operations: taps.

The gradient by a tap is the cotangent of that output.  In a loop a tap has one zero for each run, stacked, and what an
operation met is stacked as well; a checkpoint hands it out beside its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxacct.training.step.traces import bind, evaluate
from jaxacct.training.step.uses import Use, Written

__all__ = ["Met", "Place", "tapped", "zero_taps"]

Place = tuple[int, ...]
"""Of an operation in a trace, and before it of the loops and checkpoints around it."""
Met = dict[tuple[Place, int], Any]
"""By an operation's place and the number of an operand: its value, below one axis for each loop around it."""


def zero_taps(uses: Sequence[Use]) -> dict[Place, Any]:
    """The taps of these operations."""
    return {
        use.place: jnp.zeros(
            (*(length for length, _ in use.view.loops), *use.product.output.shape), use.product.output.dtype
        )
        for use in uses
    }


def tapped(written: Written, uses: Sequence[Use]) -> Callable[..., tuple[Any, tuple[Met, list[Any]]]]:
    """(taps, values) -> the first output of a trace; what the operations met, and the other outputs."""
    wanted = sorted({(use.place, use.product.other) for use in uses})

    def run(taps: Mapping[Place, Any], values: Sequence[Any]) -> tuple[Any, tuple[Met, list[Any]]]:
        (loss, *others), met = _run(written, values, taps, wanted, ())
        return loss, (met, others)

    return run


def _run(
    written: Written,
    values: Sequence[Any],
    taps: Mapping[Place, Any],
    wanted: Sequence[tuple[Place, int]],
    place: Place,
) -> tuple[list[Any], Met]:
    """The outputs of a trace that is at some place, and what its operations met; taps are those within it."""
    met: Met = {}

    def operation(number: int, eqn: Any, operands: list[Any]) -> list[Any]:
        here = (*place, number)
        inner = {other: tap for other, tap in taps.items() if len(other) > len(here) and other[: len(here)] == here}
        if inner:
            body = lambda values, taps: _run(written.inner[number], values, taps, wanted, here)
            with eqn.ctx.manager:
                outputs, within = (_scan if eqn.primitive.name == "scan" else _checkpoint)(eqn, body, operands, inner)
            met.update(within)
            return outputs
        outputs = bind(number, eqn, operands)
        if here not in taps:
            return outputs
        met.update({(at, i): operands[i] for at, i in wanted if at == here})
        return [outputs[0] + taps[here]]

    return evaluate(written.closed, values, operation), met


def _scan(eqn: Any, body: Any, operands: list[Any], taps: Mapping[Place, Any]) -> tuple[list[Any], Met]:
    """A loop whose body has taps of its own in each run."""
    p = eqn.params
    constants, carried = p["num_consts"], p["num_carry"]
    first, start, along = operands[:constants], operands[constants:][:carried], operands[constants + carried :]

    def one(carry: list[Any], each: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        outputs, met = body([*first, *carry, *each[0]], each[1])
        return outputs[:carried], (outputs[carried:], met)

    settings = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
    carry, (stacked, met) = jax.lax.scan(one, start, (along, dict(taps)), **settings)
    return [*carry, *stacked], met


def _checkpoint(eqn: Any, body: Any, operands: list[Any], taps: Mapping[Place, Any]) -> tuple[list[Any], Met]:
    """What is computed again in the backward pass; what its operations meet is kept."""
    settings = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return jax.checkpoint(body, **settings)(operands, dict(taps))
