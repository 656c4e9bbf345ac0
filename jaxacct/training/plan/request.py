"""PlanRequest: what a caller asks of a plan, checked but not yet solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxacct.calibration.noise_of_selections import law_shape
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, PROBABILITY, Constraint, InputError, check_one, choice
from jaxacct.mechanisms import RELATIONS
from jaxacct.mechanisms.dp_sgd_run import SAME, usual_relation
from jaxacct.training.step.step_mechanisms import ALLOCATION, FIXED, POISSON, SAMPLING, TRUNCATED

__all__ = ["DEFAULTS", "DISPLACING", "PlanRequest", "checked", "requested"]

DISPLACING = ("add_or_remove_one", "add_one", "remove_one")
"""Relations under which shuffled batches of one size exchange another record, too."""

SIZE = Constraint("use a whole number of records or of slots", 1, 10**9, integral=True)
"""A number of slots of a round, or of records in a batch: slots are drawn in int32."""
_RULES: dict[str, Constraint] = {
    "target_epsilon": POSITIVE,
    "target_delta": DELTA,
    "dataset_size": COUNT,
    "sampling_probability": PROBABILITY,
    "expected_batch_size": POSITIVE,
    "noise_multiplier": POSITIVE,
    "steps": COUNT,
    "epochs": POSITIVE,
    "slots": SIZE,
    "cap": SIZE,
}
"""The numbers of a plan, each with the values that it may have."""
_CANDIDATES = ("iid", "adaptive")
"""What the runs of a tuning may be taken for (`jaxacct.selection.select`)."""
UNITS = ("record", "user")
"""Whose presence the guarantee is about, and what is drawn."""
_OPEN = {
    "noise_multiplier": ("noise_multiplier",),
    "steps": ("steps", "epochs"),
    "sampling_probability": ("sampling_probability", "expected_batch_size", "batch_schedule", "slots"),
}
"""The three things that a plan can be solved for, and the arguments that would give each of them."""


DEFAULTS: dict[str, Any] = {
    "target_epsilon": None,
    "target_delta": None,
    "dataset_size": None,
    "sampling_probability": None,
    "expected_batch_size": None,
    "noise_multiplier": None,
    "steps": None,
    "epochs": None,
    "sampling": POISSON,
    "relation": None,
    "noise_schedule": None,
    "batch_schedule": None,
    "repetitions": None,
    "data_dependent": False,
    "candidates": "iid",
    "slots": None,
    "cap": None,
    "unit": "record",
}
"""What a setting is where it is not given; the signature of `Plan` says the same."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The arguments of a `Plan`, checked.  None stands for what the caller left out.

    It is what the solver reads; nothing writes to it.  `requested` makes one.
    """

    target_epsilon: float | None
    target_delta: float
    dataset_size: int
    sampling_probability: float | None
    expected_batch_size: float | None
    noise_multiplier: float | None
    steps: int | None
    epochs: float | None
    sampling: str
    relation: str
    noise_schedule: Any
    batch_schedule: Any
    repetitions: Any
    data_dependent: bool
    candidates: str
    slots: int | None
    cap: int | None
    unit: str

    @property
    def searched_here(self) -> bool:
        """Whether open noise is found by a search along the segments, not by `ja.calibrate_noise_multiplier`.

        The latter knows Poisson sampling at one rate and one noise multiplier only.
        """
        scheduled = self.noise_schedule is not None or self.batch_schedule is not None
        return self.sampling != POISSON or scheduled or self.data_dependent

    def left_open(self) -> str | None:
        """The one thing to solve for ("noise_multiplier", "steps" or "sampling_probability"), or None.

        Raises
        ------
        InputError : too much or too little is left open, or it cannot be solved for together with the rest.
        """
        given = {key: [n for n in names if getattr(self, n) is not None] for key, names in _OPEN.items()}
        for names in given.values():
            if len(names) > 1:
                raise InputError(f"{names[0]} and {names[1]} are both given; give one of them")
        opened = [key for key, names in given.items() if not names]
        words = " and ".join(" or ".join(_OPEN[key][:2]) for key in opened)
        if self.target_epsilon is None:
            if opened:
                raise InputError(
                    f"{words} is left open without a target_epsilon to solve it for; give it, or the target"
                )
            return None
        if not opened:
            raise InputError(
                "target_epsilon is given and nothing is left open; leave out noise_multiplier, steps or the batch "
                "size, or leave out target_epsilon to have epsilon reported"
            )
        if len(opened) > 1:
            raise InputError(f"{words} are left open; one can be solved for, give the others")
        if opened[0] != "noise_multiplier":
            for name in ("noise_schedule", "batch_schedule", "repetitions"):
                if getattr(self, name) is not None:
                    raise InputError(f"{name} is given, so only noise_multiplier can be left open; give {words}")
        elif self.repetitions is not None and self.searched_here:
            raise InputError(
                "repetitions with a target need sampling = 'poisson' and no schedule; give noise_multiplier and leave "
                "out target_epsilon to have epsilon reported"
            )
        return opened[0]


def requested(settings: Mapping[str, Any]) -> PlanRequest:
    """The request of a caller, {argument of `Plan`: value}.

    Raises
    ------
    InputError : target_delta or dataset_size is missing, or a value is refused by `checked`.
    """
    for name in ("target_delta", "dataset_size"):
        if settings[name] is None:
            raise InputError(f"{name} is missing; a plan needs the {name.replace('_', ' ')}")
    return PlanRequest(**checked(settings))


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a plan with numbers as Python numbers; None stays.

    Raises
    ------
    InputError : a number outside its range or a batch of them, an unknown word, two settings that exclude each other.
    """
    found = dict(settings)
    if SAME[FIXED] == found["sampling"]:  # plans and ledgers write the other name
        found["sampling"] = FIXED
    choice("sampling", found["sampling"], SAMPLING)
    if found["relation"] is None:
        found["relation"] = usual_relation(found["sampling"])
    choice("relation", found["relation"], RELATIONS)
    choice("candidates", found["candidates"], _CANDIDATES)
    choice("unit", found["unit"], UNITS)
    for name, way in (("slots", ALLOCATION), ("cap", TRUNCATED)):
        if found[name] is not None and found["sampling"] != way:
            raise InputError(f"{name} = {found[name]!r:.40} needs sampling = {way!r}, found {found['sampling']!r}")
    if found["sampling"] == POISSON and found["relation"] == "replace_one":
        raise InputError(
            "relation = 'replace_one' is not a relation of plans with sampling = 'poisson'; give noise_multiplier, "
            "and ask ja.epsilon(plan.mechanism, delta, relation='replace_one'), which is larger"
        )
    if found["sampling"] == FIXED and found["relation"] in DISPLACING:
        raise InputError(
            f"relation = {found['relation']!r} does not hold with sampling = 'fixed_batches', where one record more "
            "moves another to another batch; account for each pass as ja.Gaussian(noise_multiplier / 5**0.5)"
        )
    for name, rule in _RULES.items():
        if found[name] is not None:
            number = check_one(name, found[name], rule, "a plan is for one run")
            found[name] = int(number) if rule is SIZE else number
    if found["repetitions"] is not None and law_shape(found["repetitions"]):
        raise InputError("repetitions must be one law of K, not a batch; a plan is for one run")
    if not isinstance(found["data_dependent"], bool):
        raise InputError(f"data_dependent = {found['data_dependent']!r:.40} must be True or False")
    if found["data_dependent"] and found["repetitions"] is not None:
        raise InputError("data_dependent = True with repetitions: the K runs of a tuning must all be the same; drop it")
    if found["data_dependent"] and found["sampling"] in (ALLOCATION, TRUNCATED):
        raise InputError(
            f"data_dependent = True is not supported with sampling = {found['sampling']!r}, whose steps no finite "
            "Renyi divergence is known for; fix the steps and their noise in advance"
        )
    return found
