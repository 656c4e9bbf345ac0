"""The hard stop: whether what a ledger holds and one more step stay within a plan's target; and what a stop costs.

While what is spent, and the step to come, are among the releases of a plan that is known to hold, nothing has to be
accounted for: leaving releases out never costs more.  When a ledger leaves its plan (steps were replayed, noise was
changed, something else was released), the longest way on that holds is certified once and becomes the plan to compare
with.
"""

from __future__ import annotations

import weakref
from collections import Counter
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

__all__ = ["allows", "promised"]

_known: weakref.WeakKeyDictionary[Ledger, tuple[str, Counter[Release], int]] = weakref.WeakKeyDictionary()
"""For each ledger the last way on that was certified: of which plan, its releases, and the other entries then."""


def allows(plan: Plan, ledger: Ledger, next_step: int, partition: str | None = None) -> bool:
    """`Plan.allows`."""
    if plan.target_epsilon is None:
        return True
    if not 0 <= next_step < plan.steps:
        return False
    run = ledger.run if plan.repetitions is not None else None  # the other runs of a tuning are in the law of K
    several = [spent for name, spent in ledger.runs.items() if run in (None, name)]
    headers = [line for name, lines in ledger.headers.items() if run in (None, name) for line in lines]
    orders = {line.plan.filter.order for line in headers if line.plan.filter}
    if orders - {plan.filter.order if plan.filter else None}:
        raise InputError("the ledger has a Renyi filter of another order; nothing can be certified on top of it")
    others = sum(spent.others.total() for spent in several)
    wanted = ledger.releases(run) + _ahead(plan, ledger, next_step, 1, partition)
    if not others and plan.within and wanted <= plan.whole:
        return True
    document = plan.to_json()
    known = _known.get(ledger)
    if known is not None and known[0] == document and known[2] == others and wanted <= known[1]:
        return True

    def holds(steps: int) -> bool:
        return plan.holds(compose(total(several), composed(_ahead(plan, ledger, next_step, steps, partition))))

    if not holds(1):
        return False
    least, most = 1, plan.steps - next_step + 1  # so many more steps hold, so many do not
    if holds(most - 1):
        least = most - 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if holds(middle) else (least, middle)
    _known[ledger] = (document, ledger.releases(run) + _ahead(plan, ledger, next_step, least, partition), others)
    return True


def promised(plan: Plan, ledger: Ledger, step: int) -> Bounds:
    """Epsilon of the ledger's current run and of the plan's steps from `step` on: what an early stop is covered by.

    Whatever ends a run early, what it has put out is a part of what it would have put out.  A filter holds on every
    path as it is.
    """
    if any(line.plan.filter for line in ledger.headers[ledger.run]):
        return ledger.epsilon(plan.target_delta, plan.relation, ledger.run)
    spent = ledger.runs[ledger.run]
    rest = Spent(spent.releases + _ahead(plan, ledger, step, plan.steps - step, None), spent.others)
    return claim([(rest, ledger.headers[ledger.run])], plan.target_delta, plan.relation)


def _ahead(plan: Plan, ledger: Ledger, step: int, steps: int, partition: str | None) -> Counter[Release]:
    """What the next steps release; of fixed batches, a pass that is under way only what it does not cost already."""
    if plan.sampling != FIXED:
        return plan.releases_after(step + steps) - plan.releases_after(step)
    found: Counter[Release] = Counter()
    for first, last in plan.passes:
        low, high = max(first, step), min(last, step + steps)
        if low >= high:
            continue
        noise = min(s.noise_multiplier for s in plan.segments if s.start < high and low < s.end)
        already = ledger.runs[ledger.run].within(first, last, step, partition) if first <= step else 0.0
        if already < noise**-2:
            found[Release(FIXED, noise, 1.0)] += 1
    return found
