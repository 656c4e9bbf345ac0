"""Optimizers: one update, and what an optimizer must not be given."""

from __future__ import annotations

import re
from typing import Any

from jaxacct.validation import InputError

__all__ = ["updated"]


def updated(optimizer: Any, mean: Any, opt_state: Any, params: Any, value: Any = None) -> tuple[Any, Any]:
    """(updates, state) of an Optax optimizer for a noisy mean of gradients.

    value : the private loss, for optimizers that look at the loss; None where none is released.

    Raises
    ------
    InputError : an optimizer that asks for what is not private, or for the loss where none is released.
    """
    import optax

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
