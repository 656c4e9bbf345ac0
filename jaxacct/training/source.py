"""Source: examples that need not be in memory.  While the device computes a step, threads load the next batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.types import Leaf
from jaxacct.core.validation import COUNT, Constraint, InputError, check


class Stopped(Exception):
    """Raised to end the loading of batches that are no longer wanted."""


@dataclass(frozen=True)
class Source:
    """Examples for `Trainer.fit` that need not fit in memory: each step loads the examples of its own batch.

    The host draws the same records as the device would from the same key, and threads load their examples during the
    previous step.  A run compiles once.  At most ``prefetch + 2`` batches are in memory.

    Parameters
    ----------
    dataset : anything with ``__len__`` and ``__getitem__`` (a NumPy array or memmap, grain's ``MapDataset``, a Hugging
        Face ``Dataset`` with format "numpy", a list), or a tuple or dict of these, one for each part of an example.
        Arrays are read a batch at a time, other data item by item; an item is a pytree of numbers and arrays.  Item i
        always belongs to record i.  All items have the structure, shapes and dtypes of item 0.
    workers : the number of threads that load, >= 1; use 1 if several threads must not read the dataset at once.
    prefetch : the number of batches that are loaded ahead of the step, >= 0; with 0 the step waits for its batch.
    repeats : whether a record has the same bits whenever it is loaded.  If True, a cut-off run with a ledger repeats
        the steps after its last checkpoint exactly, at no further cost.  If False, as for random augmentation, it takes
        these steps with new randomness, and they cost privacy a second time.

    References
    ----------
    jaxacct/training/step/README.md, "Keys", says why the key of the noise depends on the loaded data.

    >>> import numpy as np
    >>> source = Source({"image": np.zeros((50, 8, 8), np.float32), "label": list(range(50))})
    >>> len(source), {name: part.shape for name, part in source.layout.example.items()}
    (50, {'image': (8, 8), 'label': ()})
    """

    dataset: Leaf
    workers: int = 2
    prefetch: int = 1
    repeats: bool = True

    def __post_init__(self) -> None:
        check("workers", self.workers, COUNT)
        batches = Constraint("use a number of batches from 0, such as 1", 0, 2**20, integral=True)
        check("prefetch", self.prefetch, batches)
        self.layout  # noqa: B018 - computing the layout refuses a bad dataset before its first use

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout of the examples, found from the arrays of the dataset and, for other data, from item 0."""
        return Layout(self.dataset)

    def __len__(self) -> int:
        return self.layout.size

    def __repr__(self) -> str:
        more = f"workers={self.workers}, prefetch={self.prefetch}, repeats={self.repeats}"
        return f"Source({type(self.dataset).__name__} of {len(self):,} examples, {more})"


def require_rows(data: Any, size: int | None, sources: bool = False) -> None:
    """Raise InputError unless all arrays hold numbers, of `size` examples.  A Source is refused unless `sources`."""
    if isinstance(data, Source) and not sources:
        raise InputError("data is a Source, which is not loaded side by side; give arrays, or train by a Trainer each")
    leaves = jax.tree_util.tree_leaves_with_path(data)
    for path, leaf in leaves:
        if isinstance(leaf, np.ndarray):
            _dtype(f"data{jax.tree_util.keystr(path)}", leaf)
    sizes = {(len(data),)} if isinstance(data, Source) else {np.shape(leaf)[:1] for _, leaf in leaves}
    if size is not None and sizes != {(size,)}:
        raise InputError(
            f"data has first axes {sorted(sizes)}, must be ({size},), the plan's dataset_size; "
            "make the plan for these data"
        )


def source_of_mapped(data: Any) -> Any:
    """Return data with a memory map as a Source, so that no file is copied into memory.  Return other data as given."""
    structure: Any = jax.tree_util.tree_structure(data)
    if not any(_is_mapped(leaf) for leaf in jax.tree_util.tree_leaves(data)):
        return data
    source = Source(data)
    if jax.tree_util.tree_structure(source.layout.example) != structure:
        raise InputError(f"data is {_short(structure)} with a memory map in it; put the maps into a tuple or a dict")
    return source


def _is_mapped(array: Any) -> bool:
    """Return whether an array is a memory map, or a view of one."""
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


class Layout:
    """Shapes and dtypes of a dataset's examples, and methods that load the examples."""

    size: int  # the number of examples
    example: Any  # a pytree with the shapes and dtypes that one example has on the device

    def __init__(self, dataset: Any) -> None:
        parts, structure = jax.tree_util.tree_flatten_with_path(dataset, is_leaf=_is_column)
        self._columns = [_column(jax.tree_util.keystr(path), part) for path, part in parts]
        sizes = sorted({len(column.rows) for column in self._columns})
        if len(sizes) != 1:
            raise InputError(f"dataset has parts of {sizes} examples, must have one number; use parts of one length")
        self.size = sizes[0]
        if not 1 <= self.size < 2**31:
            raise InputError(f"dataset has {self.size} examples, must have 1 to 2**31 - 1; give those to train on")
        self.example = jax.tree_util.tree_unflatten(structure, [column.example for column in self._columns])

    def buffers(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Return an array of zeros for each leaf of an example, of shape `shape` followed by the leaf's own shape."""
        return [np.zeros((*shape, *leaf.shape), leaf.dtype) for leaf in jax.tree_util.tree_leaves(self.example)]

    def load(self, numbers: np.ndarray, into: Sequence[np.ndarray], stopped: Callable[[], bool]) -> None:
        """Load the examples with these `numbers` into the buffers `into`.  Raise Stopped once `stopped()` is true."""
        self._check_length()
        rest = list(into)
        for column in self._columns:
            column.load(numbers, rest[: column.leaves], stopped)
            del rest[: column.leaves]
        self._check_length()

    def _check_length(self) -> None:
        for column in self._columns:
            if len(column.rows) != self.size:
                raise InputError(
                    f"dataset{column.name} has {len(column.rows)} examples, had {self.size} when the Source was made; "
                    "let nothing change it while it is trained on, and make the Source anew"
                )


class _Arrays:
    """A part of a dataset, given as one array.  One NumPy call gathers the rows of a batch."""

    leaves = 1

    def __init__(self, name: str, rows: np.ndarray) -> None:
        self.name, self.rows = name, rows
        self.example = jax.ShapeDtypeStruct(rows.shape[1:], _dtype(f"dataset{name}", rows))

    def load(self, numbers: np.ndarray, into: Sequence[np.ndarray], stopped: Callable[[], bool]) -> None:
        if stopped():
            raise Stopped
        if self.rows.dtype == into[0].dtype:
            np.take(self.rows, numbers, axis=0, out=into[0], mode="clip")  # the default mode would copy the rows twice
        else:
            _store(f"dataset{self.name}", self.rows[numbers], into[0])


class _Items:
    """Part of a dataset that is read item by item."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name, self.rows = name, rows
        self._structure: Any
        found, self._structure = jax.tree_util.tree_flatten(self._item(0) if len(rows) else ())
        self._shapes = [self._shape(0, place, leaf) for place, leaf in enumerate(found)]
        self.leaves = len(self._shapes)
        leaves = [jax.ShapeDtypeStruct(*shape) for shape in self._shapes]
        self.example = jax.tree_util.tree_unflatten(self._structure, leaves)

    def load(self, numbers: np.ndarray, into: Sequence[np.ndarray], stopped: Callable[[], bool]) -> None:
        rows: dict[int, int] = {}
        for row, number in enumerate(numbers.tolist()):
            if stopped():
                raise Stopped
            if (known := rows.setdefault(number, row)) != row:
                for each in into:
                    each[row] = each[known]
                continue
            found, structure = jax.tree_util.tree_flatten(self._item(number))
            if structure != self._structure:
                raise InputError(
                    f"dataset{self.name}[{number}] is {_short(structure)}, item 0 is {_short(self._structure)}; "
                    "let all items have one structure"
                )
            for place, leaf in enumerate(found):
                shape = self._shape(number, place, leaf)
                if shape != self._shapes[place]:
                    first = self._shapes[place]
                    raise InputError(
                        f"dataset{self.name}[{number}] has a part of shape {shape[0]} and dtype {shape[1]}, where item "
                        f"0 has {first[0]} and {first[1]}; pad or convert items to one shape"
                    )
                _store(f"dataset{self.name}[{number}]", np.asarray(leaf), into[place][row, ...])

    def _item(self, number: int) -> Any:
        try:
            return self.rows[number]
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(
                f"dataset{self.name}[{number}] cannot be loaded ({words:.200}); mend the dataset"
            ) from error

    def _shape(self, number: int, place: int, leaf: Any) -> tuple[Any, ...]:
        array = np.asarray(leaf)
        return array.shape, _dtype(f"dataset{self.name}[{number}], part {place},", array)


def _is_column(part: Any) -> bool:
    """Return whether a part of a dataset is a sequence of examples.  A tuple or dict is not: its entries are parts."""
    return not isinstance(part, tuple | dict) and (hasattr(part, "__getitem__") or hasattr(part, "__iter__"))


def _column(name: str, part: Any) -> _Arrays | _Items:
    if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")) or isinstance(part, str | bytes):
        raise InputError(
            f"dataset{name} is {type(part).__name__}, must have __len__ and __getitem__; give what can be looked up by "
            "number, or a list of the examples"
        )
    if isinstance(part, np.ndarray | jax.Array):
        if np.ndim(part) < 1:
            raise InputError(f"dataset{name} is an array of shape (), must have examples; use a first axis for them")
        return _Arrays(name, np.asarray(part))
    return _Items(name, part)


def _dtype(name: str, array: np.ndarray) -> np.dtype[Any]:
    """Return the dtype that an array has on the device; raise InputError if it holds no numbers."""
    dtype = array.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise InputError(f"{name} has dtype {dtype}, must be numbers; leave other parts out, or encode them")
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))


def _store(name: str, given: np.ndarray, into: np.ndarray) -> None:
    """Write numbers into an array of the device's dtype; refuse integers that this dtype cannot hold."""
    into[...] = given
    if given.dtype != into.dtype and given.dtype.kind in "iu" and not np.array_equal(given, into):
        raise InputError(
            f"{name} has integers that {into.dtype} cannot hold, as JAX would have them; make them smaller"
        )


def _short(structure: Any) -> str:
    return f"{' '.join(str(structure).split()):.80}"
