"""Writes and reads the checkpoints of a run with Orbax.  They hold all that the next step depends on."""

from __future__ import annotations

import ast
import contextlib
import errno
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct.core.files import optional_package
from jaxacct.core.types import PyTree
from jaxacct.core.validation import InputError
from jaxacct.training.ledger import Ledger
from jaxacct.training.run.state import History, document, from_document
from jaxacct.training.sharding.placement import ALONE, Processes
from jaxacct.training.step.key_derivation import Lineage, Root, digest_tree
from jaxacct.training.step.models import LoRA, join_model, model_as_pytree, split_model
from jaxacct.training.step.step_function import Carried

_OWN = re.compile(r"\d+$|\d+\.orbax|.*orbax-checkpoint-tmp")
"""Pattern of the names that Orbax gives to files and folders in a folder of checkpoints."""


class Checkpoint(NamedTuple):
    """State of a run between two steps, as a checkpoint stores it."""

    step: int
    carried: Carried
    lineage: Lineage
    history: History
    # A digest of plan, program and data.  A run with the same digest repeats exactly the steps after the checkpoint.
    session: bytes  # b"" if no released step follows, or if no run can repeat the steps
    stopped: str = ""  # why the run stopped (see `State.stopped`); "" while the run goes on
    seen: bool = False  # whether outputs of the run were seen, as by a callback or `params_of`
    scores: tuple[int, ...] = ()  # the exact scores so far of the plan's early stop, which are secret


class Store:
    """Folder of checkpoints, which all processes share.  Only its owner may read it: it holds the run's secret key."""

    def __init__(self, folder: str | os.PathLike[str], processes: Processes = ALONE) -> None:
        ocp = optional_package("orbax.checkpoint", "a folder of checkpoints")
        self._ocp = ocp
        self._path = Path(folder).absolute()
        processes.decide(self._prepare)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        with self._writing():
            self._manager = ocp.CheckpointManager(self._path, options=options)

    def _prepare(self) -> bytes:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(self._path)
        except OSError as error:
            raise InputError(f"{self._path}: cannot hold private checkpoints: {error.strerror or error}") from None
        return b""

    def latest(self) -> int | None:
        """Return the number of the last checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, found: Checkpoint) -> None:
        """Write a checkpoint, complete on return.  Raise InputError if that fails; the earlier checkpoints stay."""
        line = found.lineage.fields() | {"root": found.lineage.root.key}
        notes = {name: v.hex() if isinstance(v, bytes) else v for name, v in line.items()}
        run: dict[str, Any] = {"leaves": _leaves(found.carried), "step": found.step, "lineage": notes}
        run |= {"history": document(found.history), "session": found.session.hex(), "stopped": found.stopped}
        run |= {"seen": found.seen} | ({"scores": found.scores} if found.scores else {})
        self._write(_plain(found.carried), run)

    def _write(self, carried: list[Any], run: dict[str, Any]) -> None:
        args, last = self._ocp.args, self.latest()
        items = args.StandardSave({"carried": [*map(_on_host, carried)]})
        with self._writing():
            _require_room(self._path, carried)
            number = 0 if last is None else last + 1
            self._manager.save(number, args=args.Composite(arrays=items, run=args.JsonSave(run)), force=True)
            self._manager.wait_until_finished()

    def notes(self, number: int) -> dict[str, Any]:
        """Return the entries of a checkpoint that are not arrays."""
        if not (self._path / str(number) / "run").exists():
            raise InputError(
                f"checkpoint {number} does not say what was spent: an earlier version wrote it; finish its run with "
                "that version, or begin another run in another folder"
            )
        args = self._ocp.args
        return dict(self._manager.restore(number, args=args.Composite(run=args.JsonRestore())).run)

    def look(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return notes and arrays of the last checkpoint.  If the run may go on, record that outputs were seen."""
        number = self.latest()
        if number is None:
            raise InputError(f"{self._path}: holds no checkpoint; give the folder that fit had as checkpoints=")
        args, run = self._ocp.args, self.notes(number)
        if "leaves" not in run:
            raise InputError(f"checkpoint {number} is of an earlier version, which kept no names; resume it with fit")
        target = [np.broadcast_to(np.zeros((), jax.numpy.dtype(kind)), shape) for _, shape, kind in run["leaves"]]
        composite = args.Composite(arrays=args.StandardRestore({"carried": target}))
        found = self._manager.restore(number, args=composite).arrays["carried"]
        history = from_document(run["history"])
        if run["step"] and run["stopped"] not in ("finished", "budget"):
            if history.ledger is not None:
                with Ledger.open(history.ledger.path, history.ledger.run) as ledger:
                    ledger.require(history.ledger)
                    ledger.seen(run["step"])
            if not run["seen"]:
                self._write(found, run | {"seen": True})
        return run, found

    def load(self, number: int, like: Carried, digest_of: Callable[[Any], bytes] = digest_tree) -> Checkpoint:
        """Return a checkpoint, with arrays of the tree structure, shapes and devices of ``like``."""
        args, run = self._ocp.args, self.notes(number)
        own = _leaves(like)
        if "leaves" in run and run["leaves"] != own:
            told = _first_difference(run["leaves"], own)
            raise InputError(f"checkpoint {number} is not of this model and optimizer: {told}")
        target = {"carried": jax.tree.map(self._ocp.utils.to_shape_dtype_struct, _plain(like))}
        try:
            found = self._manager.restore(number, args=args.Composite(arrays=args.StandardRestore(target)))
        except (ValueError, TypeError, KeyError) as error:
            reason = str(error).splitlines()[0][:80]
            raise InputError(f"checkpoint {number} is not of this model and optimizer ({reason}); use them") from None
        leaves = jax.tree_util.tree_leaves(found.arrays["carried"])
        carried = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(leaves, jax.tree.leaves(like), strict=True)):
            raise InputError(
                f"checkpoint {number} has other shapes than this model and optimizer; use those that it was saved with"
            )
        known = {name: run["lineage"][name] for name in Lineage.__slots__ if name in run["lineage"]}
        values: dict[str, Any] = {name: bytes.fromhex(v) if isinstance(v, str) else v for name, v in known.items()}
        line = Lineage(**values | {"root": Root(values["root"])})
        # an old checkpoint has no names: two leaves of equal shape and dtype may be swapped; only the digest shows that
        alike = len({repr(kind) for _, *kind in own}) < len(own)
        if "leaves" not in run and alike and digest_of(carried) != line.seal:
            raise InputError(
                f"checkpoint {number} is of an earlier version, which kept no names, and of another model, "
                "optimizer or mesh; go on with the ones that wrote it"
            )
        spent = from_document(run["history"])
        session, scores = bytes.fromhex(run["session"]), tuple(run.get("scores", ()))
        return Checkpoint(run["step"], carried, line, spent, session, run["stopped"], run["seen"], scores)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Make files that are written in this context private to their owner.  Raise InputError if writing fails."""
        errors = logging.getLogger("absl")
        told = lambda record: record.levelno < logging.ERROR
        errors.addFilter(told)
        before = os.umask(0o077)
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "RESOURCE_EXHAUSTED" in str(error)
            first = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise InputError(
                f"{self._path}: a checkpoint cannot be written ({'the disk is full' if full else first[:120]}); mend "
                "that and call fit again, which resumes from the last one"
            ) from None
        finally:
            os.umask(before)
            errors.removeFilter(told)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._manager.close()


def params_of(folder: str | os.PathLike[str], like: PyTree = None, *, average: bool = False) -> PyTree:
    """Return the parameters in the last checkpoint of a run, for inference.  This needs no key, data or trainer.

    If the run has not ended, this function notes in the checkpoint and in the ledger that outputs were seen.  From then
    on the whole plan counts as spent, even if the run takes no further step.

    Do not call this function while `fit` writes to the folder.  During `fit`, a callback can read the parameters.

    Parameters
    ----------
    folder : the folder that `Trainer.fit` was given as ``checkpoints``.
    like : parameters, a module or the result of `lora`, as `Trainer.init` took them.  It gives the frozen part, and may
        be left out if all parameters were trained and are one array or nested dicts of arrays.
    average : whether to return the moving average of an `averaged` optimizer instead, in float32 or wider.

    Returns
    -------
    pytree : of the form of that run's ``state.params``, with NumPy arrays.

    Raises
    ------
    InputError : the folder has no checkpoint; ``like`` is needed, or is another model; the run has not ended, and its
        ledger is missing or in use.

    References
    ----------
    jaxacct/training/ledger/README.md, "Outputs that were seen".

    >>> import tempfile, jax.numpy as jnp, optax
    >>> from jaxacct.training import Plan, Trainer, params_of
    >>> plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=5.0, steps=3)
    >>> trainer = Trainer(lambda w, x: jnp.sum((w["a"] - x) ** 2), optax.sgd(0.1), plan, clip_norm=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = trainer.init({"a": jnp.zeros(2)})
    ...     state = trainer.fit(state, jnp.ones((10, 2)), checkpoints=folder, progress=False)
    ...     params = params_of(folder)
    >>> bool((params["a"] == state.params["a"]).all())
    True
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: is no folder of checkpoints; give the folder that fit had as checkpoints=")
    with contextlib.closing(Store(path)) as store:
        run, arrays = store.look()
    prefix = r"opt_state(?:\.\w+)*?\.average" if average else "params"
    picked = [both for both in zip(run["leaves"], arrays, strict=True) if re.match(rf"{prefix}(?![\w])", both[0][0])]
    if not picked:
        raise InputError(f"{path}: holds no moving average; give average=True where the optimizer is averaged(...)")
    there = [[re.sub(prefix, "params", name, count=1), *kind] for (name, *kind), _ in picked]
    values = [array for _, array in picked]
    if like is None:
        return _nested([leaf[0].removeprefix("params") for leaf in there], values)
    tree, _ = model_as_pytree(like)
    own = {f"params{_name(at)}" for at, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}
    if lost := {leaf[0] for leaf in there} - own:
        raise InputError(f"like is not the model of the checkpoint: it has no {min(lost):.80}; give that run's model")
    part, inside = (tree.base, ".base") if isinstance(tree, LoRA) else (tree, "")
    names = {leaf[0].removeprefix(f"params{inside}") for leaf in there}
    trainable = jax.tree_util.tree_map_with_path(lambda at, _: _name(at) in names, part)
    trained, rest = split_model(like, trainable)
    found = _leaves(Carried(trained, None, None, None))
    said = 2 if average else 3  # of an average, compare only name and shape, since its dtype may be wider
    if [leaf[:said] for leaf in found] != [leaf[:said] for leaf in there]:
        raise InputError(f"like is not the model of the checkpoint: {_first_difference(there, found)}")
    return join_model(jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(trained), values), rest)


def _nested(names: list[str], values: list[np.ndarray]) -> Any:
    """Return nested dicts of arrays from names such as "['a']['b']".  If the only name is "", return its array."""
    if names == [""]:
        return values[0]
    found: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        keys = re.findall(r"\[('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\]", name)
        if name != "".join(f"[{key}]" for key in keys):
            raise InputError(f"the parameter {name!r:.80} lies in no nested dicts; give the model as like=")
        *outer, last = map(ast.literal_eval, keys)
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return found


def _require_room(folder: Path, carried: list[Any]) -> None:
    """Raise OSError if the disk has no room for a checkpoint.  Call this before the checkpoint is written."""
    leaves = [jax.numpy.asarray(leaf) for leaf in carried]
    size = sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards if part.replica_id == 0)
    if hasattr(os, "posix_fallocate"):
        with tempfile.TemporaryFile(dir=folder) as file:
            # reserve the bytes of the arrays, and 16 KiB for each array and for each of 16 other files
            os.posix_fallocate(file.fileno(), 0, size + 2**14 * (16 + len(leaves)))


def _make_private(folder: Path) -> None:
    """Make a folder private to its owner.  Refuse another user's folder, and an open folder with foreign files."""
    status = folder.stat()
    if os.name == "posix" and status.st_uid != os.geteuid():
        raise InputError(f"{folder}: belongs to another user, who could read the secret key of the run; use your own")
    inside = [path for path in folder.iterdir() if not path.is_symlink()]
    others = [path.name for path in inside if not _OWN.match(path.name)]
    if status.st_mode & 0o077 and others:
        raise InputError(f"{folder}: is open to others and holds {others[0]!r:.60}, no checkpoint; use another folder")
    folder.chmod(0o700)
    for path in (each for top in inside if _OWN.match(top.name) for each in (top, *top.rglob("*"))):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _leaves(carried: Carried) -> list[list[Any]]:
    """Return [name, shape, dtype] of every array, in the order of the leaves of the tree."""
    found = jax.tree_util.tree_flatten_with_path(carried)[0]
    return [
        [_name(path).removeprefix("."), list(np.shape(leaf)), str(jax.numpy.asarray(leaf).dtype)]
        for path, leaf in found
    ]


def _name(path: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", jax.tree_util.keystr(path))


def _first_difference(there: list[list[Any]], own: list[list[Any]]) -> str:
    """Return a message about the first array that differs between a checkpoint and the model."""
    told = lambda leaf: "nothing" if leaf is None else f"{leaf[0]:.80} of shape {tuple(leaf[1])} and dtype {leaf[2]}"
    alone = [leaf for leaf in there if leaf not in own], [leaf for leaf in own if leaf not in there]
    one, other = next((a, b) for a, b in zip_longest(*(alone if any(alone) else (there, own))) if a != b)
    return f"it has {told(one)} where the model has {told(other)}; use the model and optimizer that wrote it"


def _on_host(leaf: Any) -> Any:
    """Return an array of one device as a NumPy array, which Orbax writes faster; other arrays and keys as they are."""
    numeric = not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(leaf) if numeric and len(getattr(leaf, "devices", tuple)()) < 2 else leaf


def _plain(carried: Carried) -> list[Any]:
    """Return the leaves of the state, in order, as arrays.  `load` takes their tree structure from ``like``."""
    return [jax.numpy.asarray(leaf) for leaf in jax.tree_util.tree_leaves(carried)]
