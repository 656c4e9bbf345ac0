"""Mechanisms made of others: one repeated, several run in a row, or one run only where a test finds the data stable."""

from __future__ import annotations

import contextlib
import itertools
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.types import ArrayLike, Leaf
from jaxacct.core.validation import COUNT, NON_NEGATIVE, POSITIVE, InputError, check, with_hints
from jaxacct.mechanisms.additive_noise import Gaussian, Laplace
from jaxacct.mechanisms.base import (
    DIRECTIONS,
    Combinator,
    FinitePart,
    Mechanism,
    Part,
    as_typed,
    batch_shape,
    register,
    require_mechanism,
    weakest,
)
from jaxacct.mechanisms.finite import ApproximateDP, sample_pair
from jaxacct.mechanisms.loss_components import exact_product
from jaxacct.mechanisms.profile import either_order
from jaxacct.mechanisms.sampled_batches import PoissonSampled

MOST_DIGITS = 2**20
"""Largest number of binary digits of an exact mass at infinity. A float64 to the power 20,000 has about this many."""


@register
class Repeated(Combinator):
    """A mechanism composed with itself ``steps`` times, adaptively: losses add (README.md, "Composition").

    Nested repetitions become one: their counts multiply, and the product must stay within 2**53.

    Parameters
    ----------
    mechanism : Mechanism
        One step.
    steps : array_like of whole numbers from 1 to 2**53, which broadcasts with the mechanism's fields

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> Repeated(Gaussian(2.0), steps=100)
    Repeated(mechanism=Gaussian(noise_multiplier=2.0), steps=100.0)
    """

    mechanism: Leaf
    steps: Leaf
    constraints: ClassVar = {"steps": COUNT}

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.mechanism
        if type(inner) is Repeated and all(isinstance(n, float | np.ndarray) for n in (self.steps, inner.steps)):
            with contextlib.suppress(InputError):  # if the product exceeds 2**53, the repetitions stay nested
                product = exact_product(np.asarray(inner.steps), np.asarray(self.steps))
                vars(self).update(mechanism=inner.mechanism, steps=check("steps", product, COUNT))

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        one = self.mechanism
        parts = in_either_order(one, relation) if self._mixes_orders(relation) else one.expand(relation, direction)
        return [(part, exact_product(n, self.steps)) for part, n in parts]

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return [(part, exact_product(n, self.steps)) for part, n in self.mechanism.expand_below(relation, direction)]

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        inner, steps = self.mechanism.infinity_exactly(relation, direction), int(self.steps)
        if inner is None or (inner > 0 and steps * inner.denominator.bit_length() > MOST_DIGITS):
            return None
        return 1 - (1 - inner) ** steps if inner else inner

    def has_bracket(self) -> bool:
        return self.mechanism.has_bracket()

    def gaussians(self) -> list[tuple[Any, tuple[Any, ...]]] | None:
        inner = self.mechanism.gaussians()
        return None if inner is None else [(noise, (*counts, self.steps)) for noise, counts in inner]

    def expression(self) -> str:
        steps, step = f"steps={as_typed(self.steps, whole=True)}", self.mechanism
        if not isinstance(step, PoissonSampled) or type(step.mechanism) is not Gaussian or step.in_turns:
            return f"ja.repeat({step.expression()}, {steps})"
        noise, rate = as_typed(step.mechanism.noise_multiplier), as_typed(step.sampling_probability)
        group = f", group={step.group}" if step.group > 1 else ""
        return f"ja.dp_sgd(noise_multiplier={noise}, sampling_probability={rate}, {steps}{group})"

    def _mixes_orders(self, relation: str) -> bool:
        """Return True for ``replace_one`` if the two directions may differ in two or more of the steps."""
        return relation == "replace_one" and self._several() and not self.mechanism.symmetric()

    def _several(self) -> bool:
        return bool(np.any(np.greater(self.steps, 1.0)))

    def group_sizes(self) -> set[int]:
        return set(self.mechanism.group_sizes())

    def kind_under(self, relation: str, composed: bool = False) -> str:
        kind = self.mechanism.kind_under(relation, composed or self._several())
        return "bound" if kind == "certified" and self._mixes_orders(relation) else kind

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        kind = self.mechanism.kind_of_bracket(relation, composed or self._several())
        return "bound" if kind == "certified" and self._mixes_orders(relation) else kind


FIRST_SHOWN = 8
"""`repr` shows this many mechanisms of a composition."""


@register
class Composed(Combinator):
    """Several mechanisms run one after the other on the same data, each free to depend on earlier outputs.

    The list of mechanisms must be fixed in advance: it may not depend on outputs. Parts with groups of different sizes
    give a bound, which covers a group of the smallest size. Under ``replace_one`` the answer is a
    bound if the two directions differ in one of several mechanisms (README.md, "Two orders of a replaced record").

    Parameters
    ----------
    mechanisms : tuple of Mechanism
        One or more mechanisms, whose fields broadcast against each other.

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> Composed((Gaussian(1.0), Gaussian(2.0)))
    Composed(mechanisms=(Gaussian(noise_multiplier=1.0), Gaussian(noise_multiplier=2.0)))
    """

    exact_pair: ClassVar = True
    mechanisms: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.mechanisms, Mechanism) or not isinstance(self.mechanisms, tuple | list):
            raise InputError("mechanisms must be a tuple of mechanisms; use compose(first, second)")
        if not self.mechanisms:
            raise InputError("mechanisms is empty; compose at least one mechanism")
        given = [_without_one(require_mechanism(f"mechanisms[{i}]", m)) for i, m in enumerate(self.mechanisms)]
        try:
            shape = np.broadcast_shapes(*(batch_shape(mechanism) for mechanism in given))
        except ValueError:
            super().__post_init__()  # raises an error that names the two fields that clash
            raise
        first, *rest = (one.mechanisms if type(one) is Composed else (one,) for one in given)
        vars(self).update(mechanisms=first + tuple(itertools.chain.from_iterable(rest)), _shape=shape)

    def __repr__(self) -> str:
        first, count = self.mechanisms[:FIRST_SHOWN], len(self.mechanisms)
        rest = f", ... {count:,} in all" if count > FIRST_SHOWN else "," if count == 1 else ""
        return f"Composed(mechanisms=({', '.join(map(repr, first))}{rest}))"

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        mixes, parts = self._mixes_orders(relation), list[tuple[Part, np.ndarray]]()
        for one in self.mechanisms:
            either = mixes and not one.symmetric()
            parts += in_either_order(one, relation) if either else one.expand(relation, direction)
        return parts

    def expand_below(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        return [item for mechanism in self.mechanisms for item in mechanism.expand_below(relation, direction)]

    def gaussians(self) -> list[tuple[Any, tuple[Any, ...]]] | None:
        inner = [mechanism.gaussians() for mechanism in self.mechanisms]
        return [item for items in inner for item in items or ()] if all(items is not None for items in inner) else None

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        survival = Fraction(1)
        for mechanism in self.mechanisms:
            inner = mechanism.infinity_exactly(relation, direction)
            if inner is None or survival.denominator.bit_length() + inner.denominator.bit_length() > MOST_DIGITS:
                return None
            survival *= 1 - inner
        return 1 - survival

    def has_bracket(self) -> bool:
        return any(mechanism.has_bracket() for mechanism in self.mechanisms)

    def expression(self) -> str:
        return f"ja.compose({', '.join(mechanism.expression() for mechanism in self.mechanisms)})"

    def _mixes_orders(self, relation: str) -> bool:
        """Return True for ``replace_one`` if there are several mechanisms, and one is asymmetric."""
        return relation == "replace_one" and len(self.mechanisms) > 1 and not self.symmetric()

    def group_sizes(self) -> set[int]:
        return set().union(*(one.group_sizes() for one in self.mechanisms))

    def kind_under(self, relation: str, composed: bool = False) -> str:
        return self._weaker(super().kind_under(relation, composed or len(self.mechanisms) > 1), relation)

    def kind_of_bracket(self, relation: str, composed: bool = False) -> str:
        composed = composed or len(self.mechanisms) > 1
        return self._weaker(weakest(one.kind_of_bracket(relation, composed) for one in self.mechanisms), relation)

    def _weaker(self, kind: str, relation: str) -> str:
        # a part for a larger group counts more records than the smallest group, which is what the whole covers
        mixed = len(self.mechanisms) > 1 and len(self.group_sizes()) > 1
        return "bound" if kind == "certified" and (mixed or self._mixes_orders(relation)) else kind


def _without_one(mechanism: Mechanism) -> Mechanism:
    """Return the mechanism, but without `Repeated` if it is a composition that is repeated once."""
    if type(mechanism) is Repeated and isinstance(mechanism.steps, float) and mechanism.steps == 1.0:
        return mechanism.mechanism if type(mechanism.mechanism) is Composed else mechanism
    return mechanism


def in_either_order(mechanism: Mechanism, relation: str) -> list[tuple[Part, np.ndarray]]:
    """Return the parts under `relation`. A finite part is replaced by a part that dominates it in both directions."""
    parts: list[tuple[Part, np.ndarray]] = []
    forward, reverse = (mechanism.expand(relation, direction) for direction in DIRECTIONS)
    for (one, count), (two, _) in zip(forward, reverse, strict=True):
        if isinstance(one, FinitePart) and isinstance(two, FinitePart):
            one = sample_pair(either_order(one, two), np.asarray(1.0), "remove")
        parts.append((one, count))
    return parts


@with_hints
def repeat(mechanism: Mechanism, steps: ArrayLike) -> Repeated:
    """Compose the mechanism with itself ``steps`` times.

    Parameters
    ----------
    mechanism : Mechanism
    steps : array_like of whole numbers from 1 to 2**53, which broadcasts with the mechanism's fields

    Returns
    -------
    Repeated

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> repeat(Gaussian(noise_multiplier=2.0), 100).steps
    100.0
    """
    return Repeated(mechanism, steps)


def compose(*mechanisms: Mechanism) -> Composed:
    """Compose different mechanisms, whose fields broadcast against each other.

    Parameters
    ----------
    *mechanisms : Mechanism
        One or more mechanisms, fixed in advance. Each may depend on the outputs of the mechanisms before it.

    Returns
    -------
    Composed

    References
    ----------
    Zhu, Dong, Wang (2022), Optimal Accounting of Differential Privacy via Characteristic Function, Theorem 10.

    >>> len(compose(Gaussian(1.0), Gaussian(2.0)).mechanisms)
    2
    """
    return Composed(mechanisms)


@register
class ProposeTestRelease(Combinator):
    """Release ``mechanism`` only if a noisy distance says that the data is far from unstable data.

    Data is unstable where ``mechanism`` lacks its guarantee. The distance to instability is the least number of steps,
    from neighbour to neighbour, that reach unstable data. The distance is released with Laplace noise of scale
    ``test_scale``. If the noisy distance exceeds ``threshold``, the mechanism is run. On two unstable neighbours the
    mechanism may reveal everything, but on each it is run with probability at most

        delta_infinity = e^{-threshold/test_scale}/2.

    The answer is for the composition of the Laplace mechanism, a mass delta_infinity at infinite loss, and
    ``mechanism``, under the relation whose steps the distance counts. These steps go both ways. ``kind`` is "bound".

    Parameters
    ----------
    mechanism : Mechanism
    test_scale : array_like > 0, finite
        Scale of the Laplace noise on the distance. It broadcasts with the mechanism's fields.
    threshold : array_like >= 0, finite

    References
    ----------
    Dwork, Lei (2009), Differential Privacy and Robust Statistics. Dwork, Roth (2014), The Algorithmic Foundations of
    Differential Privacy, Section 7.3.

    >>> import jaxacct as ja
    >>> guarded = ja.ProposeTestRelease(ja.Gaussian(5.0), test_scale=2.0, threshold=30.0)
    >>> float(ja.epsilon(guarded, 1e-7).upper)  # e^{-15}/2 is 1.5e-7
    inf
    """

    mechanism: Leaf
    test_scale: Leaf
    threshold: Leaf
    constraints: ClassVar = {"test_scale": POSITIVE, "threshold": NON_NEGATIVE}
    states_relation: ClassVar = True  # the distance counts steps of one relation

    def expand(self, relation: str, direction: str) -> list[tuple[Part, np.ndarray]]:
        test = Laplace(self.test_scale).expand("add_or_remove_one", direction)
        missed = ApproximateDP(0.0, self._passing()).expand(relation, direction)
        either = relation == "replace_one" and not self.mechanism.symmetric()  # its order may depend on the distance
        inside = in_either_order(self.mechanism, relation) if either else self.mechanism.expand(relation, direction)
        return [*test, *missed, *inside]

    def infinity_exactly(self, relation: str, direction: str) -> Fraction | None:
        inner = self.mechanism.infinity_exactly(relation, direction)
        return None if inner is None else 1 - (1 - Fraction(float(self._passing()))) * (1 - inner)

    def _passing(self) -> np.ndarray:
        """Return the probability that the mechanism runs on unstable data, rounded up and never 0."""
        with np.errstate(over="ignore"):
            # larger ratios change nothing, since e^-800 is below the smallest float64
            ratio = np.minimum(np.asarray(self.threshold) / np.asarray(self.test_scale), 800.0)
        return 0.5 * np.exp(-ratio) * (1.0 + ROUNDOFF * (8.0 + 2.0 * ratio)) + 2.0 * SMALLEST_POSITIVE
