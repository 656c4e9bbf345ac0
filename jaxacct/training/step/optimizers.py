"""Optimizers: one update, what an optimizer must not be given, and parameters that it never moves."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxacct.core.files import optional_package
from jaxacct.core.validation import InputError
from jaxacct.training.step.opened import paths
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.training.step.traces import trace

__all__ = ["look_at", "require_optimizer", "unmoved", "updated"]


def require_optimizer(optimizer: Any) -> None:
    """InputError for what is no Optax transformation."""
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise InputError(
            f"optimizer = {optimizer!r:.60} must be an Optax transformation; use optax.adam(1e-3), for example"
        )


def updated(optimizer: Any, mean: Any, opt_state: Any, params: Any, value: Any = None) -> tuple[Any, Any]:
    """(updates, state) of an Optax optimizer for a noisy mean of gradients.

    value : the private loss, for optimizers that look at the loss; None where none is released.

    Raises
    ------
    InputError : an optimizer that asks for what is not private, or for the loss where none is released.
    """
    optax = optional_package("optax", "training")
    more = {} if value is None else {"value": value}
    try:
        return optax.with_extra_args_support(optimizer).update(mean, opt_state, params, **more)
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        names = re.findall(r"'(\w+)'", missing.group(1))
        if names == ["value"]:
            raise InputError(
                "optimizer asks for value, the loss, which is not private; give private_loss=PrivateLoss(bound=...)"
            ) from None
        raise InputError(
            f"optimizer asks for {', '.join(names)}, computed from the data without noise; use one that needs the "
            "gradient alone, or the loss (value) besides"
        ) from None


def unmoved(optimizer: Any, opt_state: Any, params: Any, value: Any = None) -> list[str]:
    """The paths of parameters whose updates do not depend on the gradient, as by `optax.set_to_zero` under a mask."""
    closed = trace(lambda mean, state: updated(optimizer, mean, state, params, value)[0], params, opt_state)
    names = paths(params)
    moved = set(closed.jaxpr.invars[: len(names)])
    for eqn in closed.jaxpr.eqns:
        if any(var in moved for var in eqn.invars if not isinstance(var, Literal)):
            moved.update(eqn.outvars)
    outputs = closed.jaxpr.outvars
    return [name for name, var in zip(names, outputs, strict=True) if isinstance(var, Literal) or var not in moved]


def look_at(optimizer: Any, opt_state: Any, params: Any, private_loss: PrivateLoss | None) -> None:
    """InputError for an optimizer that asks for what is not private; a warning of parameters that it never moves."""
    value = None if private_loss is None else jnp.float32(0)
    still = unmoved(optimizer, opt_state, params, value)
    if still:
        more = f" and {len(still) - 1} more" if len(still) > 1 else ""
        warnings.warn(
            f"optimizer never moves {still[0]}{more}: they still share the clip norm and get noise; "
            "freeze them with trainable= instead",
            stacklevel=3,
        )
