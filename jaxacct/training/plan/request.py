"""PlanRequest: a caller's request for a plan, checked but not yet solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxacct.calibration.noise_rate_steps import law_shape
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, PROBABILITY, Constraint, InputError, check_one, choice
from jaxacct.mechanisms import RELATIONS
from jaxacct.mechanisms.dp_sgd_run import SAME, usual_relation
from jaxacct.selection.law_of_k import Law
from jaxacct.training.plan.segments import Schedule
from jaxacct.training.step.step_mechanisms import ALLOCATION, FIXED, POISSON, SAMPLING, TRUNCATED

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


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The arguments of a `Plan`, `checked`, with None for those that the caller left out; the solver reads them."""

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
    noise_schedule: Schedule | None
    batch_schedule: Schedule | None
    repetitions: Law | None
    data_dependent: bool
    candidates: str
    slots: int | None
    cap: int | None
    unit: str


DEFAULTS: dict[str, Any] = dict.fromkeys(field.name for field in fields(PlanRequest)) | {
    "sampling": POISSON,
    "data_dependent": False,
    "candidates": "iid",
    "unit": "record",
}
"""The default of each setting; the signature of `Plan` has the same."""


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a plan with numbers as Python numbers; None stays.  InputError for what no plan can have."""
    found = dict(settings)
    if SAME[FIXED] == found["sampling"]:  # plans and ledgers write the other name
        found["sampling"] = FIXED
    choice("sampling", found["sampling"], SAMPLING)
    if found["relation"] is None:
        found["relation"] = usual_relation(found["sampling"])
    choice("relation", found["relation"], RELATIONS)
    choice("candidates", found["candidates"], ("iid", "adaptive"))
    choice("unit", found["unit"], ("record", "user"))
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
