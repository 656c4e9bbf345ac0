"""Checkpoints of a run with Orbax: all that the next step depends on, so that a resumed run is the same run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxacct.files import optional_package
from jaxacct.training.run import history
from jaxacct.training.run.history import History
from jaxacct.training.run.processes import ALONE, Processes
from jaxacct.training.step.key_derivation import Lineage
from jaxacct.training.step.step_function import Carried
from jaxacct.validation import InputError

__all__ = ["Checkpoint", "Store"]

_KEPT = 2
"""Checkpoints kept: the last, and the one before it."""
_OWN = re.compile(r"\d+$|\d+\.orbax|.*orbax-checkpoint-tmp")
"""Names in a folder of checkpoints."""


class Checkpoint(NamedTuple):
    """All of a run between two steps.

    session : a digest of the plan, program and data with which steps may have been taken since; b"" if none were.
    stopped : why the run stopped, as in the state; "" while it goes on.  seen : whether callbacks looked at outputs.
    """

    step: int
    carried: Carried
    lineage: Lineage
    history: History
    session: bytes
    stopped: str = ""
    seen: bool = False


class Store:
    """A folder of checkpoints, readable by its owner alone, whatever it was before: it holds the secret key of the run.

    A checkpoint is parameters, optimizer state, clip norm, the step, the lineage (the key and the chain from which all
    batches and noise follow), and the history (what was spent).  It appears whole or not at all.  They are numbered in
    the order of writing, from 0.  Of arrays that are spread over several devices or processes, each process writes and
    reads its own parts; the folder is then one that all of them see.
    """

    def __init__(self, folder: str | os.PathLike[str], processes: Processes = ALONE) -> None:
        ocp = optional_package("orbax.checkpoint", "a folder of checkpoints")
        self._ocp = ocp
        self._path = Path(folder).absolute()
        processes.decide(self._prepare)
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        with _private_files():
            self._manager = ocp.CheckpointManager(self._path, options=options)

    def _prepare(self) -> bytes:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(self._path)
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be used for checkpoints, which its owner alone may read: "
                f"{error.strerror or error}"
            ) from None
        return b""

    def latest(self) -> int | None:
        """The number of the last checkpoint."""
        return self._manager.latest_step()

    def save(self, found: Checkpoint) -> None:
        """Write a checkpoint; it is complete when this returns."""
        notes = {name: v.hex() if isinstance(v, bytes) else v for name, v in found.lineage._asdict().items()}
        run = {
            "step": found.step,
            "lineage": notes,
            "history": history.document(found.history),
            "session": found.session.hex(),
            "stopped": found.stopped,
            "seen": found.seen,
        }
        args = self._ocp.args
        items = args.StandardSave({"carried": _plain(found.carried)})
        last = self.latest()
        with _private_files():
            number = 0 if last is None else last + 1
            self._manager.save(number, args=args.Composite(arrays=items, run=args.JsonSave(run)), force=True)
            self._manager.wait_until_finished()

    def load(self, number: int, like: Carried) -> Checkpoint:
        """A checkpoint with the structure, shapes and dtypes of ``like``; InputError, in one line, for any other."""
        if not (self._path / str(number) / "run").exists():
            raise InputError(
                f"checkpoint {number} does not say what was spent: an earlier version wrote it; finish its run with "
                "that version, or begin another run in another folder"
            )
        args = self._ocp.args
        target = {"carried": jax.tree.map(self._ocp.utils.to_shape_dtype_struct, _plain(like))}
        try:
            found = self._manager.restore(
                number, args=args.Composite(arrays=args.StandardRestore(target), run=args.JsonRestore())
            )
        except (ValueError, TypeError, KeyError) as error:
            reason = str(error).splitlines()[0][:80]
            raise InputError(f"checkpoint {number} is not of this model and optimizer ({reason}); use them") from None
        leaves = jax.tree_util.tree_leaves(found.arrays["carried"])
        carried = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(leaves, jax.tree.leaves(like), strict=True)):
            raise InputError(f"checkpoint {number} has other shapes than this model and optimizer; use those it is of")
        run: dict[str, Any] = dict(found.run)
        known = Lineage._field_defaults | run["lineage"]  # earlier releases knew fewer of them
        values = (known[name] for name in Lineage._fields)
        line = Lineage._make(bytes.fromhex(v) if isinstance(v, str) else v for v in values)
        spent = history.from_document(run["history"])
        return Checkpoint(run["step"], carried, line, spent, bytes.fromhex(run["session"]), run["stopped"], run["seen"])

    def close(self) -> None:
        """Wait for what is being written."""
        self._manager.close()


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Files made in here are their owner's alone, from the start."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _make_private(folder: Path) -> None:
    """Take everyone's rights but the owner's from a folder and the checkpoints in it; InputError where one may not."""
    status = folder.stat()
    if os.name == "posix" and status.st_uid != os.geteuid():
        raise InputError(f"{folder}: belongs to another user, who could read the secret key of the run; use your own")
    inside = [path for path in folder.iterdir() if not path.is_symlink()]
    others = [path.name for path in inside if not _OWN.match(path.name)]
    if status.st_mode & 0o077 and others:
        raise InputError(
            f"{folder}: is open to other users and holds {others[0]!r:.60}, which is no checkpoint; use another folder"
        )
    folder.chmod(0o700)
    for path in (each for top in inside if _OWN.match(top.name) for each in (top, *top.rglob("*"))):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _plain(carried: Carried) -> list[Any]:
    """The arrays in their order; the structure is that of the model and optimizer at hand."""
    return [jax.numpy.asarray(leaf) for leaf in jax.tree_util.tree_leaves(carried)]
