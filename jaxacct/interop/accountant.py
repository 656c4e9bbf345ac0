"""A certified accountant with dp_accounting's PrivacyAccountant interface (needs the dp_accounting package)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import numpy as np
from dp_accounting import dp_event, privacy_accountant
from scipy.special import ndtri

from jaxacct.accounting.account import delta as certified_delta
from jaxacct.accounting.account import epsilon as certified_epsilon
from jaxacct.core import validation
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.text import bracket
from jaxacct.core.types import ArrayLike, Numbers
from jaxacct.core.validation import OPEN_PROBABILITY, PROBABILITY, REAL, InputError, UnboundedLossError, check
from jaxacct.interop.dp_events import EventError, convert, events_inside, refuse
from jaxacct.mechanisms import (
    FiniteOutput,
    Mechanism,
    PureDP,
    RandomizedResponse,
    components,
    compose,
    directions,
    repeat,
)
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.mechanisms.finite import answers_at_random
from jaxacct.representations.mechanism_profile import profile
from jaxacct.selection import Selection

_RELATIONS = {
    privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE: "add_or_remove_one",
    privacy_accountant.NeighboringRelation.REPLACE_ONE: "replace_one",
    privacy_accountant.NeighboringRelation.REPLACE_SPECIAL: "zero_out",
}
_TREE = "SingleEpochTreeAggregationDpEvent"


class _RefusedEvent(privacy_accountant.UnsupportedEventError, InputError):
    """Raised for an unknown event, and for an event with numbers out of range."""


class CertifiedAccountant(privacy_accountant.PrivacyAccountant):
    """A replacement for dp_accounting's PLDAccountant and RdpAccountant. Its answers are certified upper bounds.

    It takes the events of `interop.from_dp_event`, and events without noise, whose epsilon is infinite.

    * REPLACE_ONE: Gaussian and Laplace events are read with sensitivity 2C, where C is the clip norm, since replacing a
      record's value of norm up to C moves a sum by up to 2C. For Poisson samples the upper bound need not be tight.
    * REPLACE_SPECIAL is `zero_out`: the special record contributes 0 and keeps its place. jax_privacy defaults to it.
    * Randomized response is refused under ADD_OR_REMOVE_ONE, for which it has no definition. Under
      REPLACE_SPECIAL the special record's answer is drawn uniformly from all answers, as dp_accounting defines it.
    * A guarantee (such as ZCDpEvent) holds for the accountant's relation alone. So sampling amplifies it little where
      a sample brings in other neighbours (jaxacct/mechanisms/README.md, "Sampled guarantees").
    * A refused event raises UnsupportedEventError, which here is a ValueError too.

    Parameters
    ----------
    neighboring_relation : dp_accounting.NeighboringRelation
        ADD_OR_REMOVE_ONE (default), REPLACE_ONE or REPLACE_SPECIAL.

    >>> import dp_accounting as dpa
    >>> step = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0))
    >>> round(CertifiedAccountant().compose(step, 1000).get_epsilon(1e-5), 5)
    1.82824
    >>> zeroed = CertifiedAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL)
    >>> zeroed.compose(step, 1000).get_epsilon(1e-5) == CertifiedAccountant().compose(step, 1000).get_epsilon(1e-5)
    True
    """

    def __init__(
        self,
        neighboring_relation: privacy_accountant.NeighboringRelation = (
            privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE
        ),
    ) -> None:
        if neighboring_relation not in _RELATIONS:
            raise InputError(
                f"neighboring_relation = {neighboring_relation!r:.80} is not supported; "
                "use NeighboringRelation.ADD_OR_REMOVE_ONE, REPLACE_ONE or REPLACE_SPECIAL"
            )
        super().__init__(neighboring_relation)
        self._relation = _RELATIONS[neighboring_relation]
        self._counts: dict[Mechanism, int] = {}
        self._private = True

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism composed so far. Raises InputError if an event without noise was composed."""
        if not self._private:
            raise InputError("an event without noise was composed, so there is no mechanism; start a new accountant")
        parts = [step if count == 1 else repeat(step, count) for step, count in self._counts.items()]
        return compose(*parts) if parts else PureDP(0.0)

    def get_epsilon(self, target_delta: float) -> float:
        """Return a certified upper bound of epsilon at a `target_delta` in [0, 1]. The bound may be infinite."""
        target = validation.check_one("target_delta", target_delta, PROBABILITY, "ask for one at a time")
        if not self._private:
            return math.inf
        if target == 1.0:
            return 0.0
        try:
            found = certified_epsilon(self._asked(), target, relation=self._relation)
        except UnboundedLossError:  # raised only at a delta of 0, where epsilon is infinite
            return math.inf
        low, high = float(found.lower), float(found.upper)
        if found.kind == "certified" and high > 2.0 * low and found.status == "width":
            warnings.warn(f"epsilon lies in {bracket(low, high, '.6g')}; the upper end is given", stacklevel=2)
        return high

    def get_delta(self, target_epsilon: float) -> float:
        """Return a certified upper bound of delta at `target_epsilon`, which may be negative or infinite."""
        if not self._private or target_epsilon == -math.inf:
            return 1.0
        if target_epsilon == math.inf:
            mechanism = self.mechanism
            sides = (components(mechanism, self._relation, side) for side in directions(mechanism, self._relation))
            return max(abs(float(side.delta_infinity[0])) for side in sides) * (1 + 8 * ROUNDOFF)
        target = validation.check_one("target_epsilon", target_epsilon, REAL, "ask for one at a time")
        return float(certified_delta(self._asked(), target, relation=self._relation).upper)

    def get_true_positive_rates(self, false_positive_rates: ArrayLike, deltas: ArrayLike | None = None) -> Numbers:
        """Return certified upper bounds of the true-positive rate of every attack at false-positive rates in [0, 1].

        A number gives a float, an array gives an array. `deltas` is ignored.

        >>> import dp_accounting as dpa
        >>> round(CertifiedAccountant().compose(dpa.GaussianDpEvent(1.0)).get_true_positive_rates(0.1), 5)
        0.38914
        """
        rates = np.asarray(check("false_positive_rates", false_positive_rates, PROBABILITY))
        found = np.ones(rates.shape)
        if self._private:
            found = 1.0 - profile(self._asked(), relation=self._relation).tradeoff(rates).lower
            found = np.minimum(found * (1.0 + 2.0 * ROUNDOFF), 1.0)
        return found if rates.ndim else float(found)

    def get_gdp_parameter_estimate(
        self, false_positive_rates: ArrayLike | None = None, deltas: ArrayLike | None = None
    ) -> float:
        """Return the least mu, rounded up, for which mu-Gaussian differential privacy bounds the true-positive rates.

        It is certified for the given `false_positive_rates` alone, by default for all error rates of at least 1e-10
        (`Profile.gdp_mu`). It is infinite if no mu is enough. `deltas` is ignored.

        >>> import dp_accounting as dpa
        >>> round(CertifiedAccountant().compose(dpa.GaussianDpEvent(2.0), 4).get_gdp_parameter_estimate(), 6)
        1.0
        """
        if not self._private:
            return math.inf
        if false_positive_rates is None:
            return float(profile(self._asked(), relation=self._relation).gdp_mu().upper)
        rates = np.atleast_1d(check("false_positive_rates", false_positive_rates, OPEN_PROBABILITY))
        reached, free = ndtri(self.get_true_positive_rates(rates)), ndtri(rates)
        return max(float(np.max(reached - free + 64.0 * ROUNDOFF * (1.0 + np.abs(free)))), 0.0)

    def compose(self, event: dp_event.DpEvent, count: int = 1) -> CertifiedAccountant:
        """Add `count` runs of the event."""
        if isinstance(event, dp_event.DpEvent) and isinstance(count, int):
            details = self._maybe_compose(event, count, False)
            if details is not None:
                name = type(details.invalid_event).__name__
                raise _RefusedEvent(f"{details.error_message} [caused by subevent {name:.60}]")
        super().compose(event, count)
        return self

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        """Add the event to a copy of the counts. Keep the copy only if `do_compose`. Return an error, or None."""
        try:
            mechanism = convert(event)
            counts = dict(self._counts)
            self._refuse_by_relation(event)
            steps_of = [] if mechanism is None else _steps(_under(mechanism, self._relation), max(count, 1))
            for step, steps in steps_of:
                counts[step] = counts.get(step, 0) + steps
            for step in dict(steps_of):
                self._check(step, counts[step])
        except InputError as error:
            at_fault = error.event if isinstance(error, EventError) else event
            return self.CompositionErrorDetails(invalid_event=at_fault, error_message=str(error))
        if do_compose:
            self._counts = counts
            self._private &= mechanism is not None
        return None

    def _check(self, step: Mechanism, count: int) -> None:
        # A selection and the mechanism that it repeats are refused in the same cases. Checking the mechanism is faster.
        if isinstance(step, Selection):
            repeat(step, count)
            self._check(step.mechanism, 1)
            return
        if self._relation == "add_or_remove_one" and answers_at_random(step):
            raise InputError(
                "neighboring_relation must be `REPLACE_ONE` or `REPLACE_SPECIAL` for RandomizedResponseDpEvent"
            )
        for direction in directions(step, self._relation):  # raise an error if the step cannot be split into parts
            components(repeat(step, count), self._relation, direction)

    def _asked(self) -> Mechanism:
        """Return the composed mechanism, or its only part, since some engines refuse a composition of one part."""
        mechanism = self.mechanism
        parts = mechanism.inside()
        return parts[0] if isinstance(mechanism, Composed) and len(parts) == 1 else mechanism

    def _refuse_by_relation(self, event: Any) -> None:
        """Refuse tree aggregation under "add_or_remove_one", and discrete Gaussian vectors under "replace_one"."""
        for each in events_inside(event):
            name = type(each).__name__
            if name == _TREE and self._relation == "add_or_remove_one":
                needed = "neighboring_relation must be REPLACE_SPECIAL or REPLACE_ONE for trees"
                refuse(each, "", f"{needed}; added records move others")
            composed = name in (_TREE, "ComposedDpEvent", "SelfComposedDpEvent")
            if not composed and any(type(inner).__name__ == _TREE for inner in events_inside(each)):
                refuse(each, "", "trees must not be sampled; leave out the sampling, which leaks no less")
            if name == "DiscreteGaussianDpEvent" and self._relation == "replace_one" and each.dimension != 1:
                vector = "ZCDpEvent(2 * sensitivity**2 / sigma**2)"
                refuse(each, "", f"dimension must be 1 under REPLACE_ONE; use {vector} for vectors")


def _under(mechanism: Mechanism, relation: str) -> Mechanism:
    """Return the mechanism; under "zero_out", with a pair (law, uniform law) for each unsampled randomized response."""
    if relation != "zero_out" or not answers_at_random(mechanism):
        return mechanism

    def zeroed(node: Any) -> Any:
        if not isinstance(node, RandomizedResponse):
            return node
        truth = min(node.probability * (1.0 + 4.0 * ROUNDOFF), 1.0)
        uniform = 1.0 / node.categories * (1.0 - 4.0 * ROUNDOFF)
        return FiniteOutput([truth, 1.0 - truth], [uniform, 1.0 - uniform])

    step = lambda node: isinstance(node, Mechanism) and not isinstance(node, Repeated | Composed)
    changed: Mechanism = jax.tree.map(zeroed, mechanism, is_leaf=step)
    return changed.validated()


def _steps(mechanism: Mechanism, count: int) -> list[tuple[Mechanism, int]]:
    """Take `count` runs of a mechanism apart. Return its single steps, each with its number of runs."""
    if isinstance(mechanism, Repeated):
        return _steps(mechanism.mechanism, count * int(mechanism.steps))
    if isinstance(mechanism, Composed):
        return [item for part in mechanism.mechanisms for item in _steps(part, count)]
    return [] if mechanism == PureDP(0.0) else [(mechanism, count)]
