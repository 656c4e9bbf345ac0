"""Scores on private data: noisy counts of sensitivity 1, and the cost that they add to a selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier
from jaxacct.core.bounds import Bounds
from jaxacct.core.chacha import key_words
from jaxacct.core.types import Leaf
from jaxacct.core.validation import Constraint, InputError, check_one, choice
from jaxacct.mechanisms import Gaussian, Mechanism, PrivacyProfile, compose, repeat
from jaxacct.mechanisms.base import weakest
from jaxacct.samplers.exact_draws import KeyedBits, rounded_gaussian
from jaxacct.selection import Law, candidates_profile, rounds, select
from jaxacct.training.run.evaluations import LOWER_BITS, UNIT_BITS, require_countable

PROFILE_POINTS = 48
"""Number of evenly spaced epsilons, from 0 to twice the bound, in the profile of a tuning scored on validation data."""


@dataclass(frozen=True)
class PrivateScore:
    """Score by a noisy count on private data: the sum over the examples of a value in [0, 1], plus noise.

    One record changes the sum of the rounded values by at most 1; the noisy count is the rounded output of a Gaussian
    mechanism.  With "validation" the two data sets share no record.  By parallel composition the tuning then costs as
    much as a selection among trainings or as a selection among scores, whichever costs more.  With "training" a
    candidate costs as much as its training and its score together.

    Parameters
    ----------
    value : (params, example) -> a number, clipped to [0, 1] (NaN counts as 0), which depends on no other example.
    data : pytree of arrays, the examples along the first axis, at most 2^20.
    on : "validation" if `data` have no record of the training data, else "training".
    noise_multiplier : standard deviation of the noise on the count, in examples.  If left out ("validation" only), the
        tuning takes the least noise with which a selection among noisy scores meets the target.
    unit : a power of two from 2^-20 to 1.  Values are rounded to multiples of `unit`, which must not depend on data.

    References
    ----------
    README.md of this folder, "Private scores".

    >>> score = PrivateScore(lambda w, x: x > w, np.arange(10.0), noise_multiplier=2.0)
    >>> score.on
    'validation'
    """

    value: Callable[[Any, Any], Any]
    data: Leaf
    on: str = "validation"
    noise_multiplier: float | None = None
    unit: float = 2.0**-UNIT_BITS

    def __post_init__(self) -> None:
        choice("on", self.on, ("validation", "training"))
        if self.unit not in [2.0**-k for k in range(UNIT_BITS + 1)]:
            raise InputError(f"unit = {self.unit!r:.40} must be a power of two from 2^-20 to 1; use 2.0**-20")
        require_countable("data", self.data, "put the examples there")
        if self.noise_multiplier is None:
            if self.on == "training":
                raise InputError("noise_multiplier is missing; with on='training' give the noise, in examples")
        else:  # noise of at most 1e100 keeps a noisy count below the largest float
            finite = Constraint("use an ordinary {name}, such as 30.0", 0, 1e100, lower_open=True)
            check_one("noise_multiplier", self.noise_multiplier, finite, "use the same noise for every candidate")

    def mechanism(self) -> Mechanism:
        """Return the Gaussian mechanism whose rounded output is the noisy count of one candidate."""
        return Gaussian(self.noise_multiplier)


def noisy(count: tuple[Any, Any], key: Any, noise_multiplier: Any, unit: float) -> float:
    """Add noise from `key` to `count`, a whole number of units. Return the sum in examples, rounded once to a float."""
    upper, lower = (int(part) for part in count)
    deviation = Fraction(float(noise_multiplier)) / Fraction(unit)
    source = KeyedBits(np.asarray(key_words(key), "<u4").tobytes())
    return (upper * 2**LOWER_BITS + lower + rounded_gaussian(deviation**2, source)) * unit


class Whole(NamedTuple):
    """Cost of a tuning: its epsilon, the mechanism of the whole, the mechanism of one candidate, delta and relation."""

    epsilon: Bounds
    mechanism: Mechanism
    candidate: Mechanism
    delta: float
    relation: str


def whole(
    candidate: Mechanism,
    law: Law,
    score: Any,  # a function of public data, or a PrivateScore with its noise
    delta: float,
    relation: str,
    known: Bounds | None = None,  # epsilon of the selection by a public score, if already computed
    candidates: str = "iid",
    top: int = 1,
    count: int = 1,
) -> Whole:
    """Return the cost of `count` selections in sequence, each of which releases the best `top` candidates."""
    private = isinstance(score, PrivateScore)
    if private and score.on == "training":
        candidate = compose(candidate, score.mechanism())
        known = None

    def chosen_among(one: Mechanism) -> Mechanism:
        if count > 1 and candidates == "iid":
            return rounds(one, law, count, target_delta=delta, relation=relation, top=top)
        whole = select(one, law, candidates=candidates, top=top)
        return whole if count == 1 else repeat(whole, count)

    chosen = chosen_among(candidate)
    found = account.epsilon(chosen, delta, relation=relation) if known is None else known
    # `rounds` is a bound. So is a score under replace_one: it moves by 1, and its Gaussian is taken to move by 2.
    if (count > 1 and candidates == "iid") or (private and relation == "replace_one"):
        found = Bounds(0.0, found.upper, found.upper, weakest([str(found.kind), "bound"]), found.status, found.engine)
    if not private or score.on == "training":
        return Whole(found, chosen, candidate, delta, relation)
    by_score = chosen_among(score.mechanism())
    other = account.epsilon(by_score, delta, relation=relation)
    worse = found if found.upper >= other.upper else other
    kind = "certified" if found.kind == other.kind == "certified" else "bound"
    lower = float(max(found.lower, other.lower)) if kind == "certified" else 0.0
    both = Bounds(lower, worse.upper, worse.upper, kind, worse.status, worse.engine)
    shown = max(float(worse.upper), 1e-3)
    grid = np.union1d(np.linspace(0.0, 2.0 * shown, PROFILE_POINTS), [shown])
    grid = grid[np.concatenate([[True], np.diff(grid) > 1e-6])]
    outer = relation if relation in ("replace_one", "zero_out") else "add_or_remove_one"
    profile = candidates_profile([chosen, by_score], grid, relation=outer)
    # For eps >= worse.upper, delta(eps) <= `delta` is proved in the directions of `relation`.  Cap the profile there.
    known_at = lambda way, each: np.where((grid >= shown) & (relation != way), np.minimum(each, delta), each)
    points = known_at("add_one", profile.delta), known_at("remove_one", profile.reverse_delta)
    return Whole(both, PrivacyProfile(grid, *points), candidate, delta, relation)


def with_noise(score: Any, plan: Any, candidates: str, top: int, count: int) -> Any:
    """Return the score. A private score without a noise multiplier gets the least noise that meets the target."""
    if not isinstance(score, PrivateScore) or score.noise_multiplier is not None:
        return score
    if top > 1 or count > 1:
        raise InputError("noise_multiplier of the score is missing; give it for several winners or rounds")
    target, selection = plan.target_epsilon, {"repetitions": plan.repetitions, "candidates": candidates}
    if target is None:
        raise InputError("noise_multiplier of the score is missing; give it, or make the plan with a target_epsilon")
    c = calibrate_noise_multiplier(target, plan.target_delta, 1.0, 1, relation=plan.relation, **selection)
    if not c.ok:
        raise InputError(f"target_epsilon = {target!r} cannot be met by a private score; raise the target")
    return replace(score, noise_multiplier=float(c.value))
