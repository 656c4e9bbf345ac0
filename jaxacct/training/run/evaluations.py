"""Computes values of a run's parameters on public data, and exact sums of scores on private data, which are secret."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.types import PyTree
from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.training.clipping.examples_apart import for_each, one_of, refuse_closed_over, with_records
from jaxacct.training.plan import Plan
from jaxacct.training.plan.early_stop import UNITS
from jaxacct.training.run.state import Evaluation, State
from jaxacct.training.source import Source
from jaxacct.training.step.models import Untrained, join_model

UNIT_BITS, LOWER_BITS = 20, 10
"""A value is at most 2^UNIT_BITS units.  Its lowest LOWER_BITS bits and its other bits are summed apart, as int32."""
BLOCK_SIZE = 256
"""Number of examples whose values are computed together.  Blocks are computed one by one, which limits the memory."""


def units(value: Callable[[Any, Any], Any], params: Any, data: Any, unit: float, private: Any = ()) -> tuple[Any, Any]:
    """Return two int32 (upper, lower): the values sum to exactly (upper * 2^10 + lower) * unit.

    Each value is first clipped to [0, 1] (NaN is 0) and rounded to a multiple of `unit`.  The function `value` may
    close over neither the data nor other arrays that are `private`.
    """
    of_one = jax.make_jaxpr(lambda example: value(params, example))
    refuse_closed_over("value", of_one(one_of(data)), (data, private))

    def of_block(held: tuple[Any, Any]) -> Any:
        examples, present = held
        each = for_each("value", lambda example: value(params, example), examples)
        if each.shape != present.shape:
            raise InputError(
                f"value gives shape {each.shape[1:]} for one example, must be a number; take the mean of it"
            )
        each = jnp.asarray(each, jnp.float32)
        clipped = jnp.clip(jnp.where(jnp.isnan(each) | ~present, 0.0, each), 0.0, 1.0)
        each = jnp.round(clipped * (1.0 / unit)).astype(jnp.int32)
        return jnp.sum(each >> LOWER_BITS), jnp.sum(each & (2**LOWER_BITS - 1))

    size = jax.tree_util.tree_leaves(data)[0].shape[0]
    count = -(-size // BLOCK_SIZE)  # number of blocks, the last of which is filled up with zeros

    def cut(a: Any) -> Any:
        padded = jnp.pad(jnp.asarray(a), [(0, count * BLOCK_SIZE - size)] + [(0, 0)] * (np.ndim(a) - 1))
        return padded.reshape(count, BLOCK_SIZE, *padded.shape[1:])

    present = jnp.arange(count * BLOCK_SIZE).reshape(count, BLOCK_SIZE) < size
    upper, lower = (jnp.sum(part) for part in jax.lax.map(of_block, (jax.tree.map(cut, data), present)))
    return upper, lower


def require_countable(name: str, data: Any, remedy: str) -> None:
    """Raise InputError unless all arrays are equally long, with 1 to 2^20 rows: `units` can sum no more values."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)}
    # each 10-bit part of a value is at most 2^10, so the sum of 2^20 such parts is at most 2^30, which int32 holds
    if len(sizes) != 1 or () in sizes or not 1 <= next(iter(sizes))[0] <= 2**20:
        raise InputError(f"{name} has first axes {sorted(sizes)}, must be one from 1 to 2^20; {remedy}")


def refuse_shared(name: str, own: PyTree, private: PyTree, what: str) -> None:
    """Raise InputError if an array of `own` shares memory, or many rows, with a private array."""

    def arrays(tree: PyTree) -> list[Any]:
        opened = jax.tree.map(lambda leaf: leaf.dataset if isinstance(leaf, Source) else leaf, tree)
        return [leaf for leaf in jax.tree_util.tree_leaves(opened) if isinstance(leaf, np.ndarray | jax.Array)]

    def one_memory(a: Any, b: Any) -> bool:
        return a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.shares_memory(a, b))

    shared = any(itertools.starmap(one_memory, itertools.product(arrays(own), arrays(private))))
    if shared or with_records(arrays(own), private, columns=False, alike=True) is not None:
        raise InputError(f"{name} holds rows of the training data{what}")


class Evaluations:
    """Callback that stores a value in `values` every few steps and gives it to `tell`.  This is a look at outputs."""

    def __init__(self, evaluate: Callable[[Any, Any], Any], public_data: PyTree, every: int, private: PyTree) -> None:
        if public_data is None:
            raise InputError(
                "public_data is missing; give the data of evaluate, which must be public: a value on private data is "
                "a release of its own, such as a tuning.PrivateScore"
            )
        if not callable(evaluate):
            raise InputError(f"evaluate = {evaluate!r:.40} must be a function (params, public_data) -> number or dict")
        refuse_shared("public_data", public_data, private, " or validation data, which are private; give public data")
        self.values: list[Evaluation] = []
        self.tell: Callable[[int, Any], Any] = lambda step, value: None
        self._evaluate, self._data, self._every = evaluate, public_data, int(check("eval_every", every, COUNT))

    def __call__(self, state: State) -> None:
        step = state.step
        if step % self._every and step != state.plan.steps:
            return
        value = self._evaluate(state.params, self._data)
        several = isinstance(value, dict)
        value = {str(name): _number(one) for name, one in value.items()} if several else _number(value)
        self.values.append(Evaluation(step, value))
        self.tell(step, value)


def _number(value: Any) -> float:
    found = np.asarray(value)
    if found.ndim or (found.dtype.kind not in "biuf" and found.dtype.name != "bfloat16"):
        raise InputError(f"evaluate gave {value!r:.40}, must give a number, or a dict of numbers; take the mean of it")
    return float(found)


class ValidationScore:
    """Callable that returns the exact sum of clipped scores.  The sum is secret: only `EarlyStop.ends` may get it."""

    def __init__(self, score: Callable[[Any, Any], Any], validation: PyTree) -> None:
        require_countable("validation", validation, "give records")
        self._score, self._rows = score, jax.device_put(validation)
        self._count: Callable[[Any, Any], Any] | None = None

    def begin(self, trained: PyTree, rest: Untrained | None, private: PyTree) -> None:
        """Prepare the score for a model.  Refuse a score function that closes over private data."""
        of_one = lambda trained, example: self._score(join_model(trained, rest), example)
        trace = jax.make_jaxpr(of_one)(trained, one_of(self._rows))
        refuse_closed_over("score", trace, private, () if rest is None else rest.frozen)
        self._count = jax.jit(lambda trained, rows: units(of_one, trained, rows, 1.0 / UNITS))

    def __call__(self, trained: PyTree) -> int:
        """Return the sum of the scores that the parameters `trained` get, in units of 1/UNITS."""
        assert self._count is not None
        upper, lower = (int(part) for part in jax.device_get(self._count(trained, self._rows)))
        return upper * 2**LOWER_BITS + lower


def validation_score(plan: Plan, score: Any, validation: Any, several: bool) -> ValidationScore | None:
    """Return the score for a plan's early stop, None if it has none.  On a mesh (`several`) refuse an early stop."""
    if plan.early_stop is None:
        if score is not None or validation is not None:
            raise InputError("score and validation need a plan with an early stop; use Plan(..., early_stop=...)")
        return None
    if score is None or validation is None:
        raise InputError("the plan has an early stop, and score or validation is missing; give both")
    if several:
        raise InputError("the plan has an early stop, which does not run on a mesh; train on one device")
    return ValidationScore(score, validation)
