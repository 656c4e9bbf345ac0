"""Checkpoints of a run with Orbax: all that the next step depends on, so that a resumed run is the same run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from jaxacct.training.lineage import Lineage
from jaxacct.training.steps import Carried
from jaxacct.validation import InputError

__all__ = ["Store"]

KEPT = 2
"""Checkpoints kept: the last, and the one before it."""


class Store:
    """A folder of checkpoints, readable by its owner alone: it holds the secret key of the run.

    A checkpoint is parameters, optimizer state, clip norm, the step, and the lineage (the key and the chain from which
    all batches and noise follow).  It appears whole or not at all.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        path = Path(folder).absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be used for checkpoints: {error.strerror or error}") from None
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(path, options=options)

    def latest(self) -> int | None:
        """The step of the last checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, carried: Carried, line: Lineage) -> None:
        """Write a checkpoint; it is complete when this returns."""
        notes = {name: v.hex() if isinstance(v, bytes) else v for name, v in line._asdict().items()}
        items = {"carried": _plain(carried)}
        args = self._ocp.args
        self._manager.save(
            step, args=args.Composite(arrays=args.StandardSave(items), lineage=args.JsonSave(notes)), force=True
        )
        self._manager.wait_until_finished()

    def load(self, step: int, like: Carried) -> tuple[Carried, Lineage]:
        """A checkpoint with the structure, shapes and dtypes of ``like``; InputError, in one line, for any other."""
        args = self._ocp.args
        target = {"carried": jax.tree.map(self._ocp.utils.to_shape_dtype_struct, _plain(like))}
        try:
            found = self._manager.restore(
                step, args=args.Composite(arrays=args.StandardRestore(target), lineage=args.JsonRestore())
            )
        except (ValueError, TypeError, KeyError) as error:
            reason = str(error).splitlines()[0][:80]
            raise InputError(f"checkpoint {step} is not of this model and optimizer ({reason}); use them") from None
        leaves = jax.tree_util.tree_leaves(found.arrays["carried"])
        carried = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(leaves, jax.tree.leaves(like), strict=True)):
            raise InputError(f"checkpoint {step} has other shapes than this model and optimizer; use those it is of")
        notes: dict[str, Any] = dict(found.lineage)
        values = (notes[name] for name in Lineage._fields)
        return carried, Lineage._make(bytes.fromhex(v) if isinstance(v, str) else v for v in values)

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()


def _plain(carried: Carried) -> list[Any]:
    """The arrays in their order; the structure is that of the model and optimizer at hand."""
    return [jax.numpy.asarray(leaf) for leaf in jax.tree_util.tree_leaves(carried)]
