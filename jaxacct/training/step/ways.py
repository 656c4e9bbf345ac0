"""Which way each parameter's norm is found, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxacct.training.step import ghost_norms as ghost
from jaxacct.training.step.traces import trace
from jaxacct.training.step.uses import Uses, Written, uses_of

__all__ = ["METHODS", "Found", "Way", "find_ways"]

METHODS = ("auto", "vmap", "ghost")
"""How norms are found; `clipped_sum` says what each word means."""


class Way(str):
    """How a parameter's norm is found, a word; and in ``reason`` why not as "ghost", empty where it is.

    >>> way = Way("vmap", "its use by mul is no product")
    >>> way == "vmap", way.reason
    (True, 'its use by mul is no product')
    """

    reason: str

    def __new__(cls, word: str, reason: str = "") -> Way:
        """A word with its reason."""
        way = super().__new__(cls, word)
        way.reason = reason
        return way


class Found(NamedTuple):
    """The trace of a loss, and for each parameter a `Site`, or how its norm is found otherwise."""

    written: Written
    ways: list[Any]


def find_ways(loss_fn: Any, params: Any, example: Any, method: str) -> Found:
    """How each parameter's norm is found."""
    leaves = jax.tree_util.tree_leaves(params)
    written, uses = uses_of(trace(loss_fn, params, example), len(leaves))
    return Found(
        written, [_way(i, leaf, each, method) for i, (leaf, each) in enumerate(zip(leaves, uses, strict=True))]
    )


def _way(leaf: int, value: Any, uses: Uses, method: str) -> Any:
    """A `Site`, or a `Way` that is none."""
    if not uses.known and not uses.others:
        return Way("none", "the loss has no gradient by it")
    if method == "vmap":
        return Way("vmap", "method='vmap'")
    site = ghost.site_of(leaf, value, uses)
    if isinstance(site, str):
        return Way("vmap", site)
    if not site.cheap and method == "auto":
        return Way("vmap", f"its gradient has fewer entries than the products of {site.rows} rows")
    return site
