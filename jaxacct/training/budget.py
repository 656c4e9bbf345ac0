"""The hard stop: whether what a ledger holds and one more step stay within a plan's target; and what a stop costs.

While what is spent, and the step to come, are among the releases of a plan that is known to hold, nothing has to be
accounted for: leaving releases out never costs more.  When a ledger leaves its plan (steps were replayed, noise was
changed, something else was released), the longest way on that holds is certified once and becomes the plan to compare
with.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jaxacct.bounds import Bounds
from jaxacct.mechanisms import compose
from jaxacct.training.claims import claim
from jaxacct.training.releases import FIXED, Release, composed
from jaxacct.training.spent import Spent, total
from jaxacct.validation import InputError

if TYPE_CHECKING:
    from jaxacct.training.ledger import Ledger
    from jaxacct.training.plan import Plan

__all__ = ["allows", "counted", "furthest", "one_filter", "promised"]

_known: weakref.WeakKeyDictionary[Ledger, tuple[str, Counter[Release], int]] = weakref.WeakKeyDictionary()
"""For each ledger the last way on that was certified: of which plan, its releases, and the other entries then."""


def allows(plan: Plan, ledger: Ledger, next_step: int, partition: str | None = None) -> bool:
    """`Plan.allows`."""
    if plan.target_epsilon is None and plan.filter is None:
        return True
    if not 0 <= next_step < plan.steps:
        return False
    names = counted(plan, ledger)
    several = [ledger.runs[name] for name in names]
    one_filter(plan, [line.plan for name in names for line in ledger.headers[name]])
    others = sum(spent.others.total() for spent in several)
    run = ledger.run if plan.repetitions is not None else None
    wanted = ledger.releases(run) + _ahead(plan, ledger, next_step, 1, partition)
    if not others and plan.within and wanted <= plan.whole:
        return True
    document = plan.to_json()
    known = _known.get(ledger)
    if known is not None and known[0] == document and known[2] == others and wanted <= known[1]:
        return True

    def holds(steps: int) -> bool:
        return plan.holds(compose(total(several), composed(_ahead(plan, ledger, next_step, steps, partition))))

    least = furthest(holds, plan.steps - next_step)
    if least == 0:
        return False
    _known[ledger] = (document, ledger.releases(run) + _ahead(plan, ledger, next_step, least, partition), others)
    return True


def counted(plan: Plan, ledger: Ledger) -> list[str]:
    """The runs of a ledger that count against a plan: all, but the other runs of a tuning are in the law of K."""
    return [ledger.run] if plan.repetitions is not None else list(ledger.runs)


def one_filter(plan: Plan, others: Iterable[Plan]) -> None:
    """InputError where other plans have a Renyi filter of another order than a plan's, or where it has none."""
    orders = {other.filter.order for other in others if other.filter}
    if orders - {plan.filter.order if plan.filter else None}:
        raise InputError("the ledger has a Renyi filter of another order; nothing can be certified on top of it")


def furthest(holds: Callable[[int], bool], most: int) -> int:
    """The most steps, up to `most`, of which it holds; 0 where not even one does.  More steps never cost less."""
    if most < 1 or not holds(1):
        return 0
    if holds(most):
        return most
    least = 1  # so many hold, and `most` do not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if holds(middle) else (least, middle)
    return least


def promised(plan: Plan, ledger: Ledger, step: int) -> Bounds:
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


def _ahead(plan: Plan, ledger: Ledger, step: int, steps: int, partition: str | None) -> Counter[Release]:
    """What the next steps release; of fixed batches, a pass that is under way only what it does not cost already."""
    if plan.sampling != FIXED:
        return plan.releases_between(step, step + steps)
    if steps < 1:
        return Counter()
    end = step + steps
    _, first, last = plan.pass_of(step)
    found = plan.releases_between(min(last, end), end)
    noise = min(release.noise_multiplier for release in plan.releases_between(step, min(last, end)))
    if ledger.runs[ledger.run].within(first, last, step, partition) < noise**-2:
        found[Release(FIXED, noise, 1.0)] += 1
    return found
