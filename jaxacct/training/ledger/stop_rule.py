"""The stop rule: whether what a ledger holds and one more step stay within a plan's target.

A plan that was solved for is known to meet its target.  While what is spent and the step to come are among its
releases, nothing has to be accounted for: leaving releases out never costs more.  A ledger leaves its plan when steps
were replayed, noise was changed, or something else was released.  Then the longest way on that still meets the target
is certified once, and later steps are compared with that.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import compose
from jaxacct.training.ledger.contents import Contents, ahead
from jaxacct.training.ledger.totals import Spent, at_most, total
from jaxacct.training.plan import Plan
from jaxacct.training.step.step_mechanisms import Release, composed

__all__ = ["counted", "furthest", "leaves_room", "one_filter", "one_unit", "room"]


class _Certified(NamedTuple):
    """What was certified last for a ledger: so many releases, along a plan, beside so many entries of other kinds."""

    plan: str
    releases: Counter[Release]
    others: int


_certified: weakref.WeakKeyDictionary[Contents, _Certified] = weakref.WeakKeyDictionary()
"""For each ledger the longest way on that was certified, so that its steps need no accounting of their own."""


def leaves_room(plan: Plan, ledger: Contents, next_step: int, partition: str | None = None) -> bool:
    """`Ledger.leaves_room`, for a step of a plan that has a target or a filter."""
    held, others = _held(plan, ledger, ledger.run)
    wanted = held + ahead(plan, ledger.runs[ledger.run], next_step, 1, partition)
    if not others and plan.within and wanted <= plan.whole:
        return True
    document = plan.to_json()
    known = _certified.get(ledger)
    if known is not None and known.plan == document and known.others == others and wanted <= known.releases:
        return True
    least = room(plan, ledger, next_step, partition)
    if least == 0:
        return False
    way_on = held + ahead(plan, ledger.runs[ledger.run], next_step, least, partition)
    _certified[ledger] = _Certified(document, way_on, others)
    return True


def room(plan: Plan, ledger: Contents, step: int, partition: str | None = None, run: str | None = None) -> int:
    """How many steps of a plan, from `step` on, fit its target and filter beside what the ledger holds.

    run : the run that takes them, by default the current one.  A name that the ledger does not hold is a new run.
    """
    name = ledger.run if run is None else run
    own, left = ledger.runs.get(name, Spent()), plan.steps - step
    if plan.target_epsilon is None and plan.filter is None:
        return left
    held, others = _held(plan, ledger, name)
    if not others and plan.within and held + ahead(plan, own, step, left, partition) <= plan.whole:
        return left
    several = [replace(ledger.runs[each], releases=Counter()) for each in counted(plan, ledger, name)]
    beside = [total(several)] if others else []
    return furthest(
        lambda steps: plan.holds(compose(*beside, composed(at_most(held + ahead(plan, own, step, steps, partition))))),
        left,
    )


def _held(plan: Plan, ledger: Contents, run: str) -> tuple[Counter[Release], int]:
    """The steps, and the number of other mechanisms, that count against the next steps of a run."""
    names = counted(plan, ledger, run)
    plans = [line.plan for name in names for line in ledger.headers[name]]
    one_filter(plan, plans)
    one_unit(plan, plans)
    held: Counter[Release] = Counter()
    for name in names:
        spent = ledger.runs[name]
        held += spent.releases + (spent.owed if name == run else ledger.promised(name))
    return held, sum(ledger.runs[name].others.total() for name in names)


def counted(plan: Plan, ledger: Contents, run: str | None = None) -> list[str]:
    """The runs that count against a plan: all; with repetitions only the run itself, as the law of K covers others."""
    name = ledger.run if run is None else run
    return [each for each in ledger.runs if plan.repetitions is None or each == name]


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
