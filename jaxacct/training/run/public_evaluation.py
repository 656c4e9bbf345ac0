"""Values of a function of the parameters and public data, computed while a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxacct.core.types import PyTree
from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.training.run.state import Evaluation, State


class Evaluations:
    """Callback that computes a value every few steps, keeps it and passes it to `tell`. Each call looks at outputs."""

    def __init__(self, evaluate: Callable[[Any, Any], Any], public_data: PyTree, every: int, data: PyTree) -> None:
        if public_data is None:
            raise InputError(
                "public_data is missing; give the data of evaluate, which must be public: a value on private data is "
                "a release of its own, such as a tuning.PrivateScore"
            )
        if not callable(evaluate):
            raise InputError(f"evaluate = {evaluate!r:.40} must be a function (params, public_data) -> number or dict")
        arrays = [leaf for leaf in jax.tree_util.tree_leaves(data) if isinstance(leaf, np.ndarray | jax.Array)]
        on_host = lambda leaves: [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        for leaf in jax.tree_util.tree_leaves(public_data):
            shared = (np.shares_memory(one, other) for one in on_host([leaf]) for other in on_host(arrays))
            if any(leaf is other for other in arrays) or any(shared):
                raise InputError("public_data holds rows of the training data, which are private; give public data")
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
