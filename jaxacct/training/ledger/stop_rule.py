"""The stop rule: whether what a ledger holds and one more step stay within a plan's target; and what a stop costs.

A plan that was solved for is known to meet its target.  While what is spent and the step to come are among its
releases, nothing has to be accounted for: leaving releases out never costs more.  A ledger leaves its plan when steps
were replayed, noise was changed, or something else was released.  Then the longest way on that still meets the target
is certified once, and later steps are compared with that.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxacct.bounds import Bounds
from jaxacct.mechanisms import compose
from jaxacct.training.ledger.claim import claim
from jaxacct.training.ledger.contents import Contents
from jaxacct.training.ledger.totals import Spent, total
from jaxacct.training.plan import Plan
from jaxacct.training.step.step_mechanisms import BY_PASS, Release, composed, release_of_pass
from jaxacct.validation import InputError

__all__ = ["counted", "furthest", "leaves_room", "one_filter", "one_unit", "promised"]


class _Certified(NamedTuple):
    """What was certified last for a ledger: so many releases, along a plan, beside so many entries of other kinds."""

    plan: str
    releases: Counter[Release]
    others: int


_certified: weakref.WeakKeyDictionary[Contents, _Certified] = weakref.WeakKeyDictionary()
"""For each ledger the longest way on that was certified, so that its steps need no accounting of their own."""


def leaves_room(plan: Plan, ledger: Contents, next_step: int, partition: str | None = None) -> bool:
    """`Ledger.leaves_room`, for a step of a plan that has a target or a filter."""
    names = counted(plan, ledger)
    several = [ledger.runs[name] for name in names]
    plans = [line.plan for name in names for line in ledger.headers[name]]
    one_filter(plan, plans)
    one_unit(plan, plans)
    others = sum(spent.others.total() for spent in several)
    run = ledger.run if plan.repetitions is not None else None
    wanted = ledger.releases(run) + _ahead(plan, ledger, next_step, 1, partition)
    if not others and plan.within and wanted <= plan.whole:
        return True
    document = plan.to_json()
    known = _certified.get(ledger)
    if known is not None and known.plan == document and known.others == others and wanted <= known.releases:
        return True

    def holds(steps: int) -> bool:
        return plan.holds(compose(total(several), composed(_ahead(plan, ledger, next_step, steps, partition))))

    least = furthest(holds, plan.steps - next_step)
    if least == 0:
        return False
    way_on = ledger.releases(run) + _ahead(plan, ledger, next_step, least, partition)
    _certified[ledger] = _Certified(document, way_on, others)
    return True


def counted(plan: Plan, ledger: Contents) -> list[str]:
    """The runs of a ledger that count against a plan: all of them.

    Of a plan with repetitions only the current one does: the law of K accounts for the other runs of the tuning.
    """
    return [ledger.run] if plan.repetitions is not None else list(ledger.runs)


def one_filter(plan: Plan, others: Iterable[Plan]) -> None:
    """InputError where one of the other plans has a Renyi filter, and the plan has none or one of another order."""
    orders = {other.filter.order for other in others if other.filter}
    if orders - {plan.filter.order if plan.filter else None}:
        raise InputError("the ledger has a Renyi filter of another order; nothing can be certified on top of it")


def one_unit(plan: Plan, others: Iterable[Plan]) -> None:
    """InputError where one of the other plans counts users and the plan records, or the other way round."""
    units = {other.unit for other in others} - {plan.unit}
    if units:
        raise InputError(
            f"unit = {plan.unit!r}, but what was spent before is for unit = {units.pop()!r}: a record's guarantee is "
            "none for a user; use one unit for both"
        )


def furthest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number of steps, up to `most`, for which `holds` is true; 0 where it is true for none.

    It must be true for all smaller numbers: more steps never cost less.
    """
    if most < 1 or not holds(1):
        return 0
    if holds(most):
        return most
    least = 1  # so many hold, and `most` do not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if holds(middle) else (least, middle)
    return least


def promised(plan: Plan, ledger: Contents, step: int) -> Bounds:
    """Epsilon of what counts in a ledger and of the plan's steps from `step` on: what an early stop is covered by.

    Whatever ends a run early, what it has put out is a part of what it would have put out.  A filter holds on every
    path as it is.
    """
    runs = []
    for name in counted(plan, ledger):
        spent, headers = ledger.runs[name], ledger.headers[name]
        if name == ledger.run and not any(line.plan.filter for line in headers):
            rest = _ahead(plan, ledger, step, plan.steps - step, None)
            spent = Spent(spent.releases + rest, spent.others)
        runs.append((spent, headers))
    return claim(runs, plan.target_delta, plan.relation)


def _ahead(plan: Plan, ledger: Contents, step: int, steps: int, partition: str | None) -> Counter[Release]:
    """What the next steps release.

    With fixed batches a pass costs what its dearest step costs, and so does a round of random allocation.  So the pass
    under way adds a release only if its steps to come have less noise than those in the ledger.
    """
    if plan.sampling not in BY_PASS:
        return plan.releases_between(step, step + steps)
    if steps < 1:
        return Counter()
    end = step + steps
    _, first, last = plan.pass_of(step)
    found = plan.releases_between(min(last, end), end)
    noise = min(release.noise_multiplier for release in plan.releases_between(step, min(last, end)))
    if ledger.runs[ledger.run].within(first, last, step, partition) < noise**-2:
        found[release_of_pass(plan.sampling, noise, plan.at(step).sampling_probability)] += 1
    return found
