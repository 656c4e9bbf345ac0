"""The subject of a plan that was not run: what would be released, and what that would cost."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import numpy as np

from jaxacct import selection
from jaxacct.mechanisms import Mechanism
from jaxacct.report.blocks import Rows
from jaxacct.report.claim import Claim
from jaxacct.report.subject import Subject, counted, quoted
from jaxacct.report.wording import CHOICE_NOTE, FILTER_NOTE, TRAINING, USERS, about
from jaxacct.training import Plan

__all__ = ["SAMPLING", "from_plan"]

SAMPLING = {
    "poisson": "Poisson-sampled batches",
    "truncated_poisson": "Poisson-sampled batches, cut to a uniform subset where they are too large",
    "random_allocation": "one round, in which each record is in the batch of one random slot",
    "without_replacement": "batches of one size without replacement",
    "fixed_batches": "one pass over fixed batches",
}
"""How a batch is drawn, in words."""
_DELTAS = np.geomspace(1e-10, 0.3, 14)
"""Where the promise of a Renyi filter is read, for its risks."""


def _planned(plan: Plan) -> Mechanism:
    """What a plan releases, with the private choice around it where there is one."""
    if plan.repetitions is None:
        return plan.mechanism
    return selection.select(plan.mechanism, plan.repetitions, candidates=plan.candidates)


def from_plan(plan: Plan, tick: Callable[[str], None], path: str = "") -> Subject:
    """The subject of a plan, at its own delta."""
    tick("epsilon of the plan")
    bounds = plan.epsilon
    mechanism = _planned(plan)
    profile = None
    if plan.filter:
        promises = ((plan.filter.epsilon(float(d)), float(d)) for d in _DELTAS)
        profile = tuple(promises) if np.isfinite(bounds.upper) else None
    title = "The plan, if it is carried out as written"
    claim = Claim(
        title, "epsilon", plan.target_delta, plan.relation, bounds, None if plan.filter else mechanism, profile=profile
    )
    target = (
        "It was asked to stay within no target."
        if plan.target_epsilon is None
        else f"Its target is epsilon {plan.target_epsilon!r} at delta {plan.target_delta!r}."
    )
    return Subject(
        "a plan that was not run",
        f"This is a plan. Nothing on this page says that it was carried out. {target} What a run has spent is in its "
        "ledger, and needs a report of its own.",
        [claim],
        _releases(plan),
        [_details(plan)],
        [mechanism],
        _assumed(plan),
        _commands(plan, path),
        FILTER_NOTE if plan.filter else CHOICE_NOTE if plan.repetitions is not None else "",
        unit=plan.unit,
    )


def _details(plan: Plan) -> list[tuple[str, str]]:
    """The plan in numbers; with a schedule they are averages."""
    average = " (average)" if len(plan.segments) > 1 else ""
    facts = [
        (f"{plan.unit.capitalize()}s in the data", f"{plan.dataset_size:,}"),
        ("Steps", f"{plan.steps:,}"),
        (f"Expected batch size{average}", f"{plan.expected_batch_size:.10g}"),
        *([("Largest batch", f"{plan.cap:,}")] if plan.cap else []),
        *([("Slots of a round", f"{plan.slots:,}")] if plan.slots else []),
        (f"Noise multiplier{average}", repr(plan.noise_multiplier)),
    ]
    if plan.repetitions is not None:
        facts.append(("Candidates", f"{plan.candidates}, their number K by {plan.repetitions!r}"))
    return facts


def _releases(plan: Plan) -> Rows:
    rows = [
        [
            about(plan.unit, f"Gaussian noise, {SAMPLING[release.sampling]}"),
            repr(release.noise_multiplier),
            repr(release.sampling_probability),
            f"{count:,}",
        ]
        for release, count in plan.whole.items()
    ]
    header = ["what would be released", "noise multiplier", "sampling probability", "how often"]
    what = "Every release of one candidate of the plan" if plan.repetitions is not None else "Every release of the plan"
    return counted(f"{what}. Equal ones are counted together.", header, rows)


def _assumed(plan: Plan) -> list[str]:
    found = [about(plan.unit, text) for text in TRAINING]
    found.append(f"The number of {plan.unit}s, {plan.dataset_size:,}, is public.")
    if plan.unit == "user":
        found.append(USERS)
    if plan.filter:
        found.append(
            f"Later settings may depend on the data. A Renyi filter of order {plan.filter.order:g} bounds every path."
        )
    else:
        found.append("No setting, and not the end of the run, is chosen by looking at the data or at its outputs.")
    if plan.repetitions is not None:
        found.append(f"The number of candidates K has the law {plan.repetitions!r}, fixed beforehand.")
    return found


def _commands(plan: Plan, path: str) -> list[str]:
    """Lines that derive the claim again; of what the second program covers, also those that verify it."""
    name = path or "plan.json"
    lines = [f"sha256sum {quoted(name)}"] if path else []
    code = f"p = Plan.from_json(open({name!r}).read()); print(p.epsilon)"
    if plan.filter is None and plan.repetitions is None:
        code += f'; print(ja.verify(p.mechanism, p.epsilon, delta=p.target_delta, relation="{plan.relation}"))'
    whole = f"import jaxacct as ja; from jaxacct.training import Plan; {code}"
    return [*lines, f"python -c {shlex.quote(whole)}"]
