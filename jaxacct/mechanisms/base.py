"""Base classes of mechanisms, the parts into which mechanisms expand, and the Python expression of a mechanism."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast, dataclass_transform

import jax
import numpy as np

from jaxacct.core import markup
from jaxacct.core.validation import RELATIONS, Constraint, InputError, Tracer, broadcast_shape, check, shown, with_hints

MOST_NUMBERS = 8
"""`expression` shows only this many numbers of a longer array."""
DIRECTIONS = ("remove", "add")
"""Directions of a dominating pair (P, Q): P is the law with the record ("remove") or without the record ("add")."""
SENSITIVITY = {"add_or_remove_one": 1.0, "add_one": 1.0, "remove_one": 1.0, "replace_one": 2.0, "zero_out": 1.0}
"""For each relation, how far one record can move the statistic, as a multiple of the distance under add/remove."""
M = TypeVar("M")


class GaussianPart(NamedTuple):
    """Gaussian of sensitivity 1 and standard deviation ``sigma``, Poisson sampled at ``rate``."""

    sigma: np.ndarray
    rate: np.ndarray


class LaplacePart(NamedTuple):
    """Laplace noise of sensitivity 1 and scale ``scale``, Poisson sampled at ``rate``."""

    scale: np.ndarray
    rate: np.ndarray


class FinitePart(NamedTuple):
    """A law with finitely many losses, in one direction and after sampling. `mass` and `infinity` sum to 1."""

    loss: np.ndarray  # the losses, of the batch shape and one trailing axis
    mass: np.ndarray  # P-masses of the losses, of the same shape
    infinity: np.ndarray  # P-mass at infinite loss, of the batch shape


class ConcentratedPart(NamedTuple):
    """Zero-concentrated guarantee: in both directions Rényi divergences of order alpha are at most xi + rho alpha."""

    rho: np.ndarray
    xi: np.ndarray


class FinitePair(NamedTuple):
    """A dominating pair (P, Q) of finitely many atoms (likelihood ratios), along the last axis of loss, p and q."""

    loss: np.ndarray  # log p/q of the atoms
    p: np.ndarray  # P-masses of the atoms
    q: np.ndarray  # Q-masses of the atoms
    p_infinity: np.ndarray  # the P-mass where dQ = 0
    q_infinity: np.ndarray  # the Q-mass where dP = 0
    excess: np.ndarray | None = None  # p/q - 1, if it is known more accurately than e^loss - 1


Part = GaussianPart | LaplacePart | FinitePart | ConcentratedPart


class Mechanism(ABC):
    """Mechanism, or batch of mechanisms: one configuration for each element of the numeric fields' common shape.

    ``register`` makes subclasses frozen dataclasses and pytrees. A field named in ``constraints`` is numeric: the
    constructor checks it and stores a float or a read-only float64 array. A tracer is stored unchecked. A pytree
    transformation may put any object in a field, so ``validated`` checks them again. Mechanisms are equal if class,
    structure and numbers are equal.

    >>> from jaxacct.mechanisms import Gaussian
    >>> isinstance(Gaussian(1.0), Mechanism), Gaussian(1.0) == Gaussian(1), Gaussian(1.0).kind
    (True, True, 'certified')
    """

    constraints: ClassVar[Mapping[str, Constraint]] = {}
    vectors: ClassVar[tuple[str, ...]] = ()
    """Names of numeric fields that hold a vector for each configuration. The axes before the last one are the batch."""
    exact_pair: ClassVar[bool] = False
    """True if neighbouring data sets provably attain the pair of `expand`. If False, answers are of kind "bound"."""
    follows_relation: ClassVar[bool] = False
    """True if the pair is derived for each relation. If False, the pair may hold for one relation only."""
    states_relation: ClassVar[bool] = False
    """True if the class adds a guarantee for one relation only, whatever the mechanisms inside it hold for."""

    def __post_init__(self) -> None:
        if "mechanism" in vars(self):
            require_mechanism("mechanism", vars(self)["mechanism"])
        for name, constraint in self.constraints.items():
            value = getattr(self, name)
            if not isinstance(value, Tracer):
                object.__setattr__(self, name, check(name, value, constraint))
        broadcast_shape(dict(_shapes(self)))

    @abstractmethod
    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        """Return the mechanism's independent parts in one direction, each with its number of runs (a whole float64)."""

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        """Return the parts from which lower ends are computed. The mechanism must dominate these parts."""
        return self.expand(relation, direction)

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        """Return the mass at infinity of one configuration in one direction, exactly; None if the mass is not known."""
        return None

    def has_bracket(self) -> bool:
        """Return whether lower ends must be computed from `expand_below`, since `expand` gives only upper ends."""
        return False

    def inside(self) -> list[Mechanism]:
        """Return the mechanisms that this mechanism is made of, in the order of its fields."""
        values = (value if isinstance(value, tuple) else (value,) for value in vars(self).values())
        return [item for items in values for item in items if isinstance(item, Mechanism)]

    def walk(self) -> Iterator[Mechanism]:
        """Yield the mechanism, and then every mechanism inside it, at any depth."""
        yield self
        for mechanism in self.inside():
            yield from mechanism.walk()

    def ordinary(self) -> bool:
        """Return True if answers come from the parts of `expand`, False if a `MechanismEngine` may answer instead."""
        return False

    def symmetric(self) -> bool:
        """Return whether the loss is known to have the same law for remove and for add, in every configuration."""
        return False

    def gaussians(self) -> list[tuple[Any, tuple[Any, ...]]] | None:
        """Return (noise, counts) of each Gaussian, which runs as often as the product of counts; None if others run."""
        return None

    def of_every_relation(self) -> bool:
        """Return True unless the mechanism contains a guarantee that was stated for one relation only."""
        inside = self.inside()
        known = all(one.of_every_relation() for one in inside) if inside else self.follows_relation
        return known and not self.states_relation

    def displaces(self) -> bool:
        """Return whether adding a record may push another out of a batch. Then zero_out differs from add/remove."""
        return any(mechanism.displaces() for mechanism in self.inside())

    def reveals(self, relation: str) -> bool:
        """Return whether a sample counts as public under the relation (README.md, "Sampled guarantees")."""
        return any(mechanism.reveals(relation) for mechanism in self.inside())

    def group_sizes(self) -> set[int]:
        """Return the sizes of the groups that the parts protect together. A guarantee covers the smallest of them."""
        return {int(size) for size in np.ravel(getattr(self, "group", 1))}

    def replaced_apart(self) -> bool:
        """Return whether no pair is known for a replaced record. A bound then counts one removal and one addition."""
        return any(mechanism.replaced_apart() for mechanism in self.inside())

    def require_pair(self, relation: str, what: str) -> None:
        """Refuse ``replace_one`` if no pair is known for a replaced record. `what` says of which mechanism."""
        if relation == "replace_one" and self.replaced_apart():
            raise InputError(f"relation = 'replace_one' gives no pair {what}; ask ja.epsilon or ja.delta for a bound")

    def validated(self) -> Self:
        """Return the mechanism rebuilt through its constructor, which checks every field."""
        values = {}
        for field in dataclasses.fields(cast(Any, self)):
            value = getattr(self, field.name)
            if isinstance(value, Mechanism):
                value = value.validated()
            elif isinstance(value, tuple):
                value = tuple(item.validated() if isinstance(item, Mechanism) else item for item in value)
            values[field.name] = value
        return type(self)(**values)

    def kind_under(self, relation: str, composed: bool = False) -> str:
        """Return the kind of an answer from `expand`: "certified" if neighbours attain its pair, else "bound".

        A mechanism made of others has the weakest of their kinds. `composed` says whether the mechanism runs more than
        once or beside others: if the worst neighbours differ from eps to eps, one step attains the pair at
        every eps, but a composition does not.
        """
        own = "certified" if self.exact_pair else "bound"
        return weakest([own, *(mechanism.kind_under(relation, composed) for mechanism in self.inside())])

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        """Return the kind of an answer whose upper end is from `expand` and whose lower end is from `expand_below`."""
        return self.kind_under(relation, composed)

    @property
    def kind(self) -> str:
        """Kind of an answer if one record is added or removed; for a selection, the kind inside a composition."""
        return self.kind_of_bracket(RELATIONS[0])

    def expression(self) -> str:
        """Return the mechanism as a user would type it (`ja` is jaxacct); arrays of more than 8 numbers are cut."""
        return call(self)

    def _repr_html_(self) -> str:
        shape = batch_shape(self)
        batch = f"{shape}, {math.prod(shape):,} configurations" if shape else "(), one configuration"
        pairs = [("typed", self.expression()), ("batch shape", batch), ("answers are", self.kind)]
        return markup.fields(type(self).__name__, pairs, code=("typed",))

    def _key(self) -> tuple[Any, ...]:
        leaves, structure = jax.tree_util.tree_flatten(self)
        return structure, tuple((np.shape(x), np.asarray(x, np.float64).tobytes()) for x in leaves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mechanism):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class BaseMechanism(Mechanism):
    """Mechanism that expands into one part, which can be Poisson sampled. The unsampled mechanism is symmetric.

    Subclasses define ``part``, and ``finite_pair`` if ``replace_one`` is supported for sampling without replacement.

    >>> from jaxacct.mechanisms import Gaussian, repeat
    >>> isinstance(Gaussian(1.0), BaseMechanism), isinstance(repeat(Gaussian(1.0), 10), BaseMechanism)
    (True, False)
    """

    finite: ClassVar[bool] = True
    """True if ``finite_pair`` returns the mechanism's own pair. If False, the returned pair only dominates it."""

    @abstractmethod
    def part(self, rate: np.ndarray, relation: str, direction: str) -> Part:
        """Return the part in one direction, if each record takes part independently with probability ``rate``."""

    def finite_pair(self, relation: str) -> FinitePair:
        """Return a pair with finitely many losses that dominates the unsampled mechanism under a relation."""
        raise InputError(
            f"relation = {relation!r} is not supported for {type(self).__name__} sampled without replacement; "
            "no pair of a replaced record is known for it, so claim nothing"
        )

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return [(self.part(np.asarray(1.0), relation, direction), np.asarray(1.0))]

    def symmetric(self) -> bool:
        return True


class Combinator(Mechanism):
    """Mechanism made of other mechanisms. It is symmetric if each of the others is symmetric."""

    def symmetric(self) -> bool:
        return all(mechanism.symmetric() for mechanism in self.inside())


class EqualToAnother(Mechanism):
    """A mechanism whose leak equals that of another mechanism, up to the rounding of the noise in `equivalent`."""

    @abstractmethod
    def equivalent(self, below: bool = False) -> Mechanism:
        """Return the mechanism that leaks as much. Its noise is rounded up for lower ends (`below`), else down."""

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self.equivalent().expand(relation, direction)

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return self.equivalent(below=True).expand_below(relation, direction)

    def has_bracket(self) -> bool:
        return True

    def symmetric(self) -> bool:
        return self.equivalent().symmetric()

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return weakest(["bound", self.equivalent().kind_under(relation, composed)])

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        return self.equivalent().kind_of_bracket(relation, composed)


class AdditiveNoise(BaseMechanism):
    """Additive noise. The only field is the deviation or scale of the noise divided by the add/remove sensitivity."""

    finite: ClassVar[bool] = False
    follows_relation: ClassVar = True
    law: ClassVar[type[GaussianPart] | type[LaplacePart]]

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        return Fraction(0)

    def part(self, rate: np.ndarray, relation: str, direction: str) -> Part:
        (field,) = self.constraints
        return self.law(np.asarray(getattr(self, field)) / SENSITIVITY[relation], rate)


def weakest(kinds: Iterable[str]) -> str:
    """Return the weakest kind. "certified" is the strongest, then "bound", then kinds that rest on an assumption."""
    found = set(kinds) - {"certified"}
    conditional = sorted(found - {"bound"})
    return conditional[0] if conditional else "bound" if found else "certified"


MOST_SHOWN = 40
"""If an array has more numbers than this, `repr` shows only its first and last numbers."""


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def register(cls: type[M]) -> type[M]:
    """Make a class a pytree, and a frozen dataclass unless it is one already. Unflattening a pytree checks nothing.

    Fields with metadata static=True are not leaves. The dataclass has no equality of its own: `Mechanism` defines it.
    """
    if "__dataclass_fields__" not in vars(cls):
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    if issubclass(cls, Mechanism) and cls.kind is not Mechanism.kind:
        raise TypeError(f"{cls.__name__}.kind is never asked; define kind_under(relation, composed), which is")
    fields = dataclasses.fields(cast(Any, cls))
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    static = tuple(f.name for f in fields if f.metadata.get("static"))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in children)

    def flatten(mechanism: M) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = vars(mechanism)
        return tuple(values[name] for name in children), tuple(values[name] for name in static)

    def flatten_with_keys(mechanism: M) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values, aux = flatten(mechanism)
        return tuple(zip(keys, values, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], values: Iterable[Any]) -> M:
        mechanism = object.__new__(cls)
        vars(mechanism).update(zip(children + static, (*values, *aux), strict=True))
        return mechanism

    whole = cls.__repr__
    optional = {field.name: field.default for field in fields if field.metadata.get("optional")}

    @functools.wraps(whole)
    def shown(self: M) -> str:
        with np.printoptions(threshold=MOST_SHOWN):
            usual = [f", {name}={getattr(self, name)!r}" for name in optional if getattr(self, name) == optional[name]]
            text = functools.reduce(lambda text, part: "".join(text.rsplit(part, 1)), usual, whole(self))
            return re.sub(r"np\.float64\(([^()]*)\)", r"\1", text)

    cls.__repr__ = shown  # type: ignore[assignment]  # mypy refuses to replace a method
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    if issubclass(cls, Mechanism):
        cls.__init__ = with_hints(cls.__init__)  # type: ignore[method-assign]  # mypy refuses to replace a method
    return cls


def batch_shape(mechanism: Mechanism) -> tuple[int, ...]:
    """Return the shape to which all numeric fields broadcast: one configuration for each element.

    Parameters
    ----------
    mechanism : Mechanism

    Returns
    -------
    tuple of int
        () for a single configuration.

    >>> from jaxacct.mechanisms import dp_sgd
    >>> batch_shape(dp_sgd([0.8, 1.0, 1.2], 0.01, 10_000))
    (3,)
    """
    known = vars(require_mechanism("mechanism", mechanism)).get("_shape")  # `Composed` may be long and caches its shape
    return cast(tuple[int, ...], known) if known is not None else broadcast_shape(dict(_shapes(mechanism)))


def on_batch(mechanism: Mechanism, name: str, values: Any) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Broadcast values against a batch of mechanisms. Return (shape, flat index of each element in the batch, values).

    >>> from jaxacct.mechanisms import Gaussian
    >>> shape, rows, deltas = on_batch(Gaussian([1.0, 2.0]), "delta", [[1e-5], [1e-6]])
    >>> shape, rows.tolist(), deltas.tolist()
    ((2, 2), [0, 1, 0, 1], [1e-05, 1e-05, 1e-06, 1e-06])
    """
    shape = broadcast_shape({"the mechanism": batch_shape(mechanism), name: np.shape(values)})
    return shape, rows_in(mechanism, shape), np.broadcast_to(np.asarray(values, np.float64), shape).reshape(-1)


def rows_in(mechanism: Mechanism, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast the flat indices of the mechanism's configurations to `shape`, and flatten the result."""
    mine = batch_shape(mechanism)
    return np.broadcast_to(np.arange(math.prod(mine)).reshape(mine), shape).reshape(-1)


def require_mechanism(name: str, value: object) -> Mechanism:
    """Return the value if it is a mechanism; else refuse it in an error that calls it `name`.

    >>> require_mechanism("mechanism", 1.0)
    Traceback (most recent call last):
        ...
    jaxacct.InputError: mechanism = 1.0 of type float is not a mechanism; use one such as \
Gaussian(noise_multiplier=1.0)
    """
    if isinstance(value, Mechanism):
        return value
    hint = "use one such as Gaussian(noise_multiplier=1.0)"
    if isinstance(value, list | tuple) and any(isinstance(item, Mechanism) for item in value):
        raise InputError(
            f"{name} is a {type(value).__name__} of {len(value)}; compose them with ja.compose(*mechanisms), "
            "or for a batch give one mechanism whose fields are arrays"
        )
    if isinstance(value, type) and issubclass(value, Mechanism):
        raise InputError(f"{name} = {value.__name__} is a class; {hint}")
    raise InputError(f"{name} = {shown(value)} of type {type(value).__name__} is not a mechanism; {hint}")


def _shapes(mechanism: Mechanism, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the batch shape of every numeric field, also of the mechanisms inside."""
    for field in dataclasses.fields(cast(Any, mechanism)):
        if field.metadata.get("static"):
            continue
        value, name = getattr(mechanism, field.name), prefix + field.name
        inner = value if isinstance(value, tuple) else (value,)
        for index, item in enumerate(inner):
            place = f"{name}[{index}]" if isinstance(value, tuple) else name
            if isinstance(item, Mechanism):
                yield from _shapes(item, place + ".")
            elif dataclasses.is_dataclass(item):  # the law of how often a selection runs its mechanism
                yield place, cast(Any, item).shape
            else:
                shape = np.shape(item)
                yield place, shape[:-1] if field.name in mechanism.vectors else shape


def element(mechanism: M, index: tuple[Any, ...]) -> M:
    """Return one configuration of a batch, as a mechanism without batch axes."""

    def law(value: Any) -> Any:
        inside = zip(index[len(index) - len(value.shape) :], value.shape, strict=True)
        return value.element(tuple(0 if n == 1 else i for i, n in inside))

    return cast(M, _picked(mechanism, batch_shape(cast(Any, mechanism)), index, law))


def take_rows(mechanism: M, rows: np.ndarray) -> M:
    """Return the configurations at `rows` of the flat batch."""
    shape = batch_shape(cast(Any, mechanism)) or (1,)
    law = lambda value: value.flattened(shape).taken(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all warnings were given when the mechanism was made
        return cast(M, _picked(mechanism, shape, np.unravel_index(rows, shape), law))


def _picked(owner: Any, shape: tuple[int, ...], index: tuple[Any, ...], law: Callable[[Any], Any]) -> Any:
    """Return the configurations at `index` of a mechanism or a tuple; `law` does so for a selection's law of K."""
    if isinstance(owner, tuple):
        return tuple(_picked(item, shape, index, law) for item in owner)
    taken = {}
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if isinstance(value, Mechanism | tuple):
            value = _picked(value, shape, index, law)
        elif dataclasses.is_dataclass(value) and not field.metadata.get("static"):
            value = law(value)
        elif field.name in owner.vectors:
            value = np.broadcast_to(value, shape + np.shape(value)[-1:])[index]
        elif not field.metadata.get("static"):
            picked = np.broadcast_to(value, shape)[index]
            value = picked if np.ndim(picked) else float(picked)
        taken[field.name] = value
    return type(owner)(**taken)


def call(owner: Any) -> str:
    """Return the call that builds an object, as a user would type it, without the fields that have their default."""
    given = []
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        alike = type(value) is type(field.default) and isinstance(value, str | bool | int) and value == field.default
        if field.init and value is not None and not alike:
            rule = getattr(owner, "constraints", {}).get(field.name)
            given.append(f"{field.name}={_written(value, bool(rule is not None and rule.integral))}")
    home = type(owner).__module__.split(".")[1]
    return f"{'ja' if home == 'mechanisms' else home}.{type(owner).__name__}({', '.join(given)})"


def as_typed(value: Any, whole: bool = False) -> str:
    """Return a number or an array as a user would type it; `whole` writes counts without a decimal point.

    >>> as_typed(1000.0, whole=True), as_typed(np.array([0.5, 1.0])), as_typed(np.zeros(1000))
    ('1000', '[0.5, 1.0]', '[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ... 1,000 numbers]')
    """
    if np.ndim(value) == 0:
        return str(int(value)) if whole and float(value).is_integer() else repr(float(value))
    if np.size(value) <= MOST_NUMBERS:
        return f"[{', '.join(as_typed(item, whole) for item in value)}]"
    first = np.ravel(value)[:MOST_NUMBERS]
    return f"[{', '.join(as_typed(item, whole) for item in first)}, ... {np.size(value):,} numbers]"


def _written(value: Any, whole: bool) -> str:
    if hasattr(value, "expression"):
        return cast(str, value.expression())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return call(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_written(item, whole) for item in value)}]"
    if isinstance(value, str | bool | int):
        return repr(value)
    try:
        return as_typed(value, whole)
    except (TypeError, ValueError):  # a tracer, or another object from a pytree transformation
        return repr(value)
