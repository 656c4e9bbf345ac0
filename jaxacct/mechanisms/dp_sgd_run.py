"""DP-SGD as a mechanism: the numbers that describe a run, and the rules by which batches are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    COUNT,
    NOISE,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    Tracer,
    broadcast_shape,
    check,
    check_one,
    choice,
    refuse_where,
    require_at_most,
    with_hints,
)
from jaxacct.mechanisms.additive_noise import Gaussian
from jaxacct.mechanisms.base import Mechanism
from jaxacct.mechanisms.combinators import Repeated
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.mechanisms.sampled_batches import (
    PoissonSampled,
    SampledWithoutReplacement,
    SampledWithReplacement,
    TruncatedPoissonSampled,
)
from jaxacct.mechanisms.shuffled_batches import ShuffledBatches

NUMBERS: dict[str, Constraint] = {"dataset_size": COUNT, "batch_size": POSITIVE, "slots": COUNT, "epochs": POSITIVE}
NUMBERS |= {"noise_multiplier": NOISE, "sampling_probability": PROBABILITY, "steps": COUNT}
NUMBERS |= dict.fromkeys(("cap", "bands", "groups", "group"), COUNT)
"""Names of the numbers that describe a run, each with the values that the number may take."""
RATES = ("sampling_probability", "batch_size", "slots")
"""Numbers that give the batch size. A run has exactly one of them; `batch_size` also needs `dataset_size`."""
LENGTHS = ("steps", "epochs")
"""Numbers that give the length of a run. A run has exactly one of them."""
OF_RULES = ("slots", "cap", "bands", "groups")
"""Numbers that only some batch rules take."""
SOURCES = {names[0]: names[1:] for names in (RATES, LENGTHS)}
"""Numbers that a run may give in place of "sampling_probability", and those in place of "steps"."""
NOISE_RANGE = (0.1, 1e6)
"""Smallest and largest noise multiplier that searches try."""
ROUNDING = 1e-15
"""A quotient counts as a whole number (of steps or batches) if it differs from that number by at most this share."""


@with_hints
def dp_sgd(
    noise_multiplier: ArrayLike,
    sampling_probability: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    batch_size: ArrayLike | None = None,
    dataset_size: ArrayLike | None = None,
    slots: ArrayLike | None = None,
    epochs: ArrayLike | None = None,
    sampling: str = "poisson",
    cap: ArrayLike | None = None,
    bands: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group: int = 1,
) -> Repeated:
    """Describe DP-SGD: Gaussian steps on random batches.

    All numbers broadcast, one configuration per element: an array of noise multipliers is a batch of runs, not a
    schedule. (For a schedule, compose the steps.) The batch rule says how batches are drawn:

    * "poisson": every record independently with probability q in every step;
    * "random_allocation": a round has t = 1/q steps, called slots, and every record is in exactly one step of each
      round, drawn independently for each record and each round; an incomplete round counts as a whole one;
    * "truncated_poisson": a Poisson sample, cut to a uniformly random subset of ``cap`` records if it is larger;
    * "without_replacement": a uniformly random set of a share q of the data in every step;
    * "with_replacement": ``batch_size`` independent draws from the data in every step;
    * "cyclic_poisson": the records are split into ``groups``, and step i draws every record of group i mod ``groups``
      independently with probability q. ``bands`` steps share noise: see below;
    * "shuffled": the data are shuffled and cut into batches in every epoch, as most loaders do, with or without a
      smaller last batch; an incomplete epoch counts as a whole one. Ask with ``relation="zero_out"``.

    Give the size of batches by one of `sampling_probability`, `batch_size` (with `dataset_size`) and `slots`, and the
    length of the run by one of `steps` and `epochs`: `q = batch_size / dataset_size`, and `steps = ceil(epochs / q)`.

    For "cyclic_poisson" the answer is that of ``ceil(steps / groups)`` Poisson sampled Gaussians. It is a bound for
    every banded strategy whose columns have norm at most 1. For ``strategies.Banded(bands, steps)``, `MatrixMechanism`
    gives less epsilon if `groups` does not divide `steps`. The group of a record must not depend on other records. A
    replaced record may be in another group, so under ``replace_one`` the answer counts a removal and an addition.

    Parameters
    ----------
    noise_multiplier : array_like > 0, finite
        Standard deviation of the noise divided by the clip norm, which is the add/remove sensitivity.
    sampling_probability : array_like in [0, 1]
        q, the chance of each record to be in a batch; 1/q is a whole number for "random_allocation" and "shuffled".
        For "cyclic_poisson" only the records of one group can be in a batch, and q is their chance:
        `groups * batch_size / dataset_size`, not `batch_size / dataset_size`.
    steps : array_like of whole numbers from 1 to 2**53
    batch_size : array_like > 0, at most `dataset_size`
        Expected size of a batch, or the size of every batch (a whole number) if all are of one size.
    dataset_size : array_like of whole numbers >= 1
        Number of records of the larger data set under add/remove.
    slots : array_like of whole numbers >= 1
        Number of batches of a round ("random_allocation") or of an epoch ("shuffled"); q = 1/slots. `batch_size` gives
        `ceil(dataset_size / batch_size)` slots. For "shuffled" with `steps` it gives the `floor` of this quotient: a
        loader may drop a smaller last batch. Then an epoch has one step less, and `steps` steps take more epochs.
    epochs : array_like > 0
        Passes over the data. For "cyclic_poisson" a pass takes `groups / q` steps, not `1 / q`.
    sampling : {"poisson", "random_allocation", "truncated_poisson", "without_replacement", "with_replacement", \
"cyclic_poisson", "shuffled"}
        Batch rule. "fixed_batches", the word of `training.Plan`, means "shuffled".
    cap : array_like of whole numbers >= 1, optional
        Largest number of records of a batch, for "truncated_poisson".
    bands : array_like of whole numbers from 1 to `groups`
        Number of steps that share noise, for "cyclic_poisson".
    groups : array_like of whole numbers >= 1, optional
        Number of groups of records, for "cyclic_poisson"; `bands` by default.
    group : int >= 1
        Number of records of one person, which are protected together; one number for the whole batch.

    Returns
    -------
    Repeated
        For Poisson sampling ``repeat(PoissonSampled(Gaussian(noise_multiplier), sampling_probability), steps)``.

    References
    ----------
    Abadi et al. (2016), Deep Learning with Differential Privacy. README.md of this folder, for the other batch rules.
    Choquette-Choo et al. (2023), (Amplified) Banded Matrix Factorization, for "cyclic_poisson".

    >>> dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=1000).mechanism
    PoissonSampled(mechanism=Gaussian(noise_multiplier=1.0), sampling_probability=0.01)
    >>> dp_sgd(1.0, batch_size=256, dataset_size=50_000, epochs=10).steps
    1954.0
    >>> dp_sgd(1.0, 0.01, 1000, sampling="random_allocation").steps  # rounds of 100 steps
    10.0
    """
    given = {"noise_multiplier": noise_multiplier, "sampling_probability": sampling_probability, "steps": steps}
    given |= {"batch_size": batch_size, "dataset_size": dataset_size, "slots": slots, "epochs": epochs, "cap": cap}
    given |= {"bands": bands, "groups": groups}
    fields = described({name: value for name, value in given.items() if value is not None}, sampling, group)
    rule = RULES[rule_name(sampling)]
    if group != 1 and rule.instead_of_groups:
        raise InputError(
            f"group = {group!r} is not known with sampling = {rule_name(sampling)!r}; use {rule.instead_of_groups}, "
            "which leaks no less"
        )
    count = rounds_of(fields["steps"], fields[rule.period]) if rule.period else fields["steps"]
    of_group = {} if group == 1 else {"group": group, **{n: _only(fields[n]) for n in rule.taken_for_groups}}
    turns = {"in_turns": True} if rule.in_turns and np.any(np.greater(fields["groups"], 1.0)) else {}
    step = rule.step(Gaussian(noise_multiplier), *(fields[name] for name in rule.takes), **of_group, **turns)
    return Repeated(step, count)


def described(given: Mapping[str, Any], sampling: str, group: int = 1, unknown: str = "") -> dict[str, Any]:
    """Return the numbers of a run with `sampling_probability` and `steps` added. Refuse numbers that contradict others.

    A calibration solves for the number named `unknown`, which is not in `given`. If `unknown` is the sampling
    probability and `epochs` are given, no steps are added.

    >>> found = described({"batch_size": 30, "dataset_size": 100, "epochs": 2}, "shuffled", unknown="noise_multiplier")
    >>> found["slots"], found["sampling_probability"], found["steps"]
    (4.0, 0.25, 8.0)
    """
    rule, fields = RULES[rule_name(sampling)], dict(given)
    if rule.in_turns and "bands" in fields:
        fields.setdefault("groups", fields["bands"])
    check_one("group", group, NUMBERS["group"], "one size protects the whole batch")
    _require_numbers(rule, sampling, fields, group, unknown)
    checked = {n: x if isinstance(x, Tracer) else check(n, x, NUMBERS[n]) for n, x in fields.items()}
    broadcast_shape({name: np.shape(value) for name, value in checked.items()})
    if rule.period or "batch_size" in fields or "epochs" in fields:
        for name, value in fields.items():
            if name != "noise_multiplier" and isinstance(value, Tracer):
                raise InputError(f"{name} is a tracer; inside jit build the mechanism of one step, and repeat it")
    groups = np.asarray(checked["groups"] if rule.in_turns else 1.0)
    if rule.in_turns:
        reason = "or blocks of one record overlap, for which no bound is known; train with more groups or fewer bands"
        require_at_most("bands", np.asarray(checked["bands"]), "groups", groups, reason)
        fields["groups"] = _plain(np.maximum(groups, checked["bands"]))  # equals `groups`, broadcast against `bands`
    if "batch_size" in fields:
        batch = np.asarray(check("batch_size", fields["batch_size"], COUNT if rule.of_one_size else POSITIVE))
        size = np.asarray(checked["dataset_size"])
        require_at_most("batch_size", batch, "dataset_size", size, "use a smaller batch_size")
        if rule.in_turns:
            remedy = "use fewer groups or a smaller batch_size"
            require_at_most("batch_size", batch, "dataset_size / groups", size / groups, remedy)
        fields["sampling_probability"] = _plain(np.minimum(groups * batch / size, 1.0))
        if rule.in_passes:
            # If all batches have one size, a loader may drop a smaller last batch. An epoch then has one step less, and
            # the same `steps` take more epochs. So `slots` is rounded down, unless `epochs` are given.
            dropped = rule.of_one_size and "epochs" not in fields
            whole = np.floor(size / batch * (1.0 + ROUNDING)) if dropped else np.ceil(size / batch * (1.0 - ROUNDING))
            fields["slots"] = _plain(np.maximum(whole, 1.0))
    if "slots" in fields:
        fields["sampling_probability"] = _plain(1.0 / np.asarray(fields["slots"], np.float64))
    elif rule.in_passes and "sampling_probability" in fields:
        fields["slots"] = slots_of(fields["sampling_probability"], sampling)
    if "epochs" in fields and "sampling_probability" in fields:
        epochs = np.asarray(checked["epochs"])
        if rule.in_passes:
            exact = epochs * np.asarray(fields["slots"], np.float64)
        elif "batch_size" in fields:
            exact = epochs * size / batch
        else:
            rate = np.asarray(checked["sampling_probability"])
            if np.any(rate == 0.0):
                raise InputError("epochs needs a sampling_probability > 0; give steps instead")
            exact = epochs * groups / rate
        fields["steps"] = _plain(np.maximum(np.ceil(exact * (1.0 - ROUNDING)), 1.0))
        check("steps", fields["steps"], COUNT)
    return fields


def numbers_of_rule(sampling: str, fields: Mapping[str, Any], group: int = 1) -> dict[str, Any]:
    """Return the entries of `fields` that `dp_sgd` needs as arguments for a batch rule, not those that it computes."""
    rule = RULES[rule_name(sampling)]
    needs = (*rule.needs(group), *(["groups"] if rule.in_turns else []))
    rate = () if "batch_size" in needs else ("sampling_probability",)
    names = ["noise_multiplier", *rate, "steps" if "steps" in fields else "epochs", *needs]
    return {name: fields[name] for name in names if name in fields}


def usual_relation(sampling: str) -> str:
    """Return the neighbouring relation under which a run with this batch rule is accounted if the caller gives none."""
    return RULES[rule_name(sampling)].relation


def nearest_slots(sampling_probability: Any) -> np.ndarray:
    """Return the whole number nearest to 1/sampling_probability."""
    return np.rint(1.0 / np.asarray(sampling_probability, np.float64))


def slots_of(sampling_probability: Any, sampling: str = "random_allocation") -> float | np.ndarray:
    """Return 1/q, the slots of a round or epoch, for sampling probabilities q; refuse q if 1/q is not whole."""
    rate = np.asarray(check("sampling_probability", sampling_probability, PROBABILITY))
    exact = 1.0 / np.where(rate > 0.0, rate, 1.0)
    slots = nearest_slots(np.where(rate > 0.0, rate, 1.0))
    bad = (rate <= 0.0) | (np.abs(exact - slots) > 1e-9 * exact)
    rest = f"must be one over a whole number of slots for sampling = {sampling!r}; use 1/slots, such as 0.01"
    refuse_where(bad, "sampling_probability", rate, rest)
    return _plain(slots)


def rounds_of(steps: Any, size: Any) -> float | np.ndarray:
    """Return how many rounds of `size` steps the steps take; an incomplete round counts as a whole one."""
    return _plain(np.ceil(np.asarray(check("steps", steps, COUNT)) / np.asarray(size)))


def _only(values: Any) -> Any:
    """Return the one number that all elements of `values` equal. If they are unequal, return `values` unchanged."""
    distinct: Any = [] if isinstance(values, Tracer) else np.unique(values)
    return distinct[0] if len(distinct) == 1 else values


class Rule(NamedTuple):
    """A way to draw the batches of a run: the mechanism that accounts for the run, and the numbers that it needs."""

    step: Callable[..., Mechanism]  # builds the mechanism of one step, or of one round or epoch if `in_passes`
    takes: tuple[str, ...]  # numbers of a run that `step` takes
    taken_for_groups: tuple[str, ...] = ()  # further numbers that `step` takes if a group of records is protected
    in_passes: bool = False  # a record is in one batch of each round or epoch, which has `slots` batches
    in_turns: bool = False  # step i draws from record group i mod `groups`; noise is shared by `bands` steps
    of_one_size: bool = False  # every batch has the same whole number of records
    relation: str = "add_or_remove_one"  # neighbouring relation if the caller gives none
    instead_of_groups: str = ""  # "" if groups of records are supported, else the call that the error suggests

    def needs(self, group: int = 1) -> tuple[str, ...]:
        """Return the names of the numbers that a run needs besides noise, sampling rate and number of steps."""
        own = tuple(name for name in self.takes if name not in ("sampling_probability", "slots"))
        return own + ("bands",) * self.in_turns + self.taken_for_groups * (group != 1)

    @property
    def period(self) -> str:
        """Return "slots" (the steps of a round or epoch), "groups" (the steps of one turn for each group), or ""."""
        return "slots" if self.in_passes else "groups" if self.in_turns else ""

    def knows(self, name: str) -> bool:
        """Return whether the number `name` may be given with this rule. Numbers outside `OF_RULES` fit every rule."""
        return name not in OF_RULES or name in (*self.needs(), self.period)


def rule_name(sampling: Any, name: str = "sampling") -> str:
    """Return the name that a batch rule has in `RULES`. The error for an unknown rule calls the argument `name`."""
    word = sampling if isinstance(sampling, str) else ""
    if word in OTHER_RULES:
        raise InputError(f"{name} = {word!r} is not a rule of dp_sgd; build {OTHER_RULES[word]}")
    return choice(name, SAME.get(word, sampling), RULES)


def _require_numbers(rule: Rule, sampling: str, fields: Mapping[str, Any], group: int, unknown: str) -> None:
    """Refuse `fields` that lack a number, give one twice (as steps and as epochs), or give a number of another rule."""
    for names, name in ((RATES, "sampling_probability"), (LENGTHS, "steps")):
        said = [word for word in names if word in fields]
        if name == unknown and said:
            raise InputError(f"{said[0]} is given, and {unknown} is solved for; leave {said[0]} out")
        if name != unknown and len(said) != 1:
            if said:
                raise InputError(f"{said[0]} and {said[1]} say the same thing twice; leave one of them out")
            raise InputError(f"{name} is missing; give {name}, or {' or '.join(names[1:])} instead")
    if "batch_size" in fields and "dataset_size" not in fields:
        raise InputError("batch_size needs dataset_size; give both, or sampling_probability instead")
    for name in fields:
        if not rule.knows(name):
            words = " or ".join(repr(word) for word, other in RULES.items() if other.knows(name))
            raise InputError(f"{name} goes with sampling = {words}, not {sampling!r}; name the rule that is run")
    for name in rule.needs(group):
        if name not in fields:
            of = "" if name in rule.needs() else f" with group = {group!r}"
            raise InputError(f"{name} is missing; sampling = {sampling!r}{of} needs {MEANING[name]}")


MEANING = {
    "cap": "the most records of a batch",
    "dataset_size": "the number of records",
    "batch_size": "the number of draws of a step",
    "bands": "the number of steps that share noise",
}
"""Meanings of the numbers that a batch rule may need. The error for a missing number states its meaning."""


def _plain(value: Any) -> float | np.ndarray:
    """Return a scalar as a Python float, and an array as an array."""
    return float(value) if np.ndim(value) == 0 else np.asarray(value)


RULES = {
    "poisson": Rule(PoissonSampled, ("sampling_probability",)),
    "random_allocation": Rule(RandomAllocation, ("slots",), in_passes=True),
    "truncated_poisson": Rule(
        TruncatedPoissonSampled,
        ("sampling_probability", "dataset_size", "cap"),
        instead_of_groups="ja.dp_sgd(noise_multiplier / (2 * group), 1.0, steps)",
    ),
    "without_replacement": Rule(
        SampledWithoutReplacement, ("sampling_probability",), taken_for_groups=("dataset_size",), of_one_size=True
    ),
    "with_replacement": Rule(SampledWithReplacement, ("batch_size", "dataset_size"), of_one_size=True),
    "cyclic_poisson": Rule(
        PoissonSampled,
        ("sampling_probability",),
        in_turns=True,
        instead_of_groups="ja.dp_sgd(noise_multiplier / group, 1.0, ceil(steps / groups))",
    ),
    "shuffled": Rule(
        ShuffledBatches,
        ("slots",),
        in_passes=True,
        of_one_size=True,
        relation="zero_out",
        instead_of_groups="ja.dp_sgd(noise_multiplier / group, ..., sampling='shuffled')",
    ),
}
SAME = {"fixed_batches": "shuffled"}
"""Other names of batch rules, each with the name in `RULES`."""
OTHER_RULES = {"balls_in_bins": "ja.BallsInBins(ja.Gaussian(noise_multiplier), slots, epochs)"}
"""Batch rules whose runs are not one step repeated. `dp_sgd` refuses them, and names the mechanism to use instead."""
SAMPLING = tuple(RULES)
"""Names of the batch rules."""
