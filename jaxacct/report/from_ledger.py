"""The subject of a ledger: epsilon derived again from its entries, whatever its plans say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import DELTA, InputError, check_one
from jaxacct.report.blocks import Rows
from jaxacct.report.claim import Claim
from jaxacct.report.from_plan import SAMPLING
from jaxacct.report.rounding import up
from jaxacct.report.subject import Subject, counted, digest, origin, quoted
from jaxacct.report.wording import CHOICE_NOTE, FILTER_NOTE, TRAINING, USERS, about, mechanisms_in, safe
from jaxacct.selection import AdaptiveSelection, Selection
from jaxacct.training import Ledger

__all__ = ["from_ledger", "read_ledger"]

_DELTAS = np.geomspace(1e-10, 0.3, 14)
"""Where a Renyi filter is asked for epsilon, so that its risks can be read from these points."""


def read_ledger(path: str, delta: float | None, tick: Callable[[str], None]) -> Subject:
    """The subject of a file; InputError, in one line, for one that is damaged or still being written."""
    before = digest(path)
    _refuse_open(path)
    tick("reading the ledger")
    subject = from_ledger(Ledger.read(path), delta, tick, path)
    return Subject(**{**vars(subject), "origin": origin(path, before)})


def from_ledger(ledger: Ledger, delta: float | None, tick: Callable[[str], None], path: str = "") -> Subject:
    """The subject of a ledger that was read.

    delta : by default the last plan's.
    """
    at = ledger.plan.target_delta if delta is None else check_one("delta", delta, DELTA, "a report has one")
    tick("epsilon of the entries")
    names = list(ledger.runs)
    several = len(names) > 1
    bounds = ledger.epsilon(at)
    relation = ledger.plan.relation
    filtered = any(line.plan.filter for headers in ledger.headers.values() for line in headers)
    profile = _profile(ledger) if filtered else None
    title = "All runs of the ledger together" if several else f"The run “{safe(names[0])}”"
    mechanism = None if filtered else ledger.spent()
    claims = [Claim(title, "epsilon", at, relation, bounds, mechanism, True, _candidate(ledger), profile)]
    steps = sum(len(spent.numbers) for spent in ledger.runs.values())
    who = sorted({safe(line.by) for headers in ledger.headers.values() for line in headers if line.by})
    others = sum(len(spent.noted) for spent in ledger.runs.values())
    also = f" and {others:,} other release{'s' if others > 1 else ''}" if others else ""
    summary = (
        f"{len(names)} run{'s' if several else ''} with {steps:,} training steps{also} {'have' if several else 'has'} "
    )
    summary += f"been noted{' by ' + ', '.join(who) if who else ''}. Epsilon was derived again from the entries."
    return Subject(
        "a ledger of training runs",
        summary,
        claims,
        _spent(ledger, at),
        [_details(ledger)],
        [ledger.spent(), *(line.plan.mechanism for headers in ledger.headers.values() for line in headers)],
        _assumed(ledger, at),
        _commands(path or str(ledger.path), at),
        FILTER_NOTE if filtered else CHOICE_NOTE if _has_choice(ledger) else "",
        unit=ledger.plan.unit,
    )


def _details(ledger: Ledger) -> list[tuple[str, str]]:
    """What the last plan asked for, and whether it was kept."""
    plan = ledger.plan
    if plan.target_epsilon is None:
        return [("Target of the plan", "none")]
    target = f"epsilon {plan.target_epsilon!r} at delta {plan.target_delta!r}"
    spent = ledger.epsilon(plan.target_delta)
    kept = bool(spent.ok) and bool(spent.upper <= plan.target_epsilon)
    return [("Target of the plan", f"{target}: {'kept' if kept else 'not kept by all that the ledger holds'}")]


def _refuse_open(path: str) -> None:
    """Refuse a ledger that another process holds for writing, where the system has such locks."""
    if os.name != "posix":
        return
    import fcntl

    try:
        with Path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process is writing it; make the report when the run has ended") from None
    except OSError:
        return  # a file system without such locks


def _candidate(ledger: Ledger) -> str:
    """Why steps of one candidate of a private choice are no claim; empty where there are none.

    A candidate that was chosen by its score costs more than its own steps: the choice depends on the data, too.
    """
    for name, spent in ledger.runs.items():
        plan = ledger.headers[name][-1].plan
        if plan.repetitions is not None and (spent.numbers or spent.torn):
            return (
                f"The plan of the run “{safe(name)}” is for one candidate of a private choice, and what the "
                f"choice costs is not in its steps. By the plan the whole tuning costs epsilon "
                f"{_epsilon(plan.epsilon)} at delta = {plan.target_delta!r}. "
                "Report the plan, or a ledger that holds the tuning as one release."
            )
    return ""


def _has_choice(ledger: Ledger) -> bool:
    """Whether a private choice is among the entries."""
    inside = (one for spent in ledger.runs.values() for other in spent.others for one in mechanisms_in(other))
    return any(isinstance(one, Selection | AdaptiveSelection) for one in inside)


def _profile(ledger: Ledger) -> tuple[tuple[float, float], ...]:
    """Points of the profile of what a Renyi filter promises."""
    found = [(float(ledger.epsilon(float(d)).upper), float(d)) for d in _DELTAS]
    return tuple((e, d) for e, d in found if np.isfinite(e))


def _spent(ledger: Ledger, delta: float) -> Rows:
    rows = []
    several = len(ledger.runs) > 1
    for name, spent in ledger.runs.items():
        own = _epsilon(ledger.epsilon(delta, run=name)) if several else ""
        for release, count in spent.releases.items():
            rows.append(
                [
                    safe(name),
                    about(ledger.plan.unit, f"Gaussian noise, {SAMPLING[release.sampling]}"),
                    repr(release.noise_multiplier),
                    repr(release.sampling_probability),
                    f"{count:,}",
                    *([own] if several else []),
                ]
            )
            own = own and "as above"
        for release, count in ledger.promised(name).items():
            kind = about(ledger.plan.unit, f"not taken, but promised: {SAMPLING[release.sampling]}")
            numbers = [repr(release.noise_multiplier), repr(release.sampling_probability), f"{count:,}"]
            rows.append([safe(name), kind, *numbers, *([own] if several else [])])
            own = own and "as above"
        for entry in spent.noted:
            text = f"{safe(repr(entry.mechanism))[:300]} {safe(entry.note)}".rstrip()
            rows.append([safe(name), text, "", "", "1", *([own] if several else [])])
            own = own and "as above"
    header = ["run", "what was released", "noise multiplier", "sampling probability", "how often"]
    header += ["epsilon of the run"] if several else []
    return counted("Every release that counts. Equal ones are counted together.", header, rows)


def _epsilon(bounds: Bounds) -> str:
    upper = float(bounds.upper)
    return f"<= {up(upper, 6)} ({bounds.kind})" if bool(bounds.ok) and np.isfinite(upper) else f"none ({bounds.status})"


def _assumed(ledger: Ledger, delta: float) -> list[str]:
    unit = ledger.plan.unit  # one of all runs: others are not added up
    found = [
        *(about(unit, text) for text in TRAINING),
        "The ledger holds everything that was released. Its checksums tell damage and lost lines. They are no "
        "signature, and do not stop anybody who rewrites the file.",
        "Entries with equal fingerprints released the same output, to the last bit. They count once.",
        f"The number of {unit}s is public ({', '.join(_sizes(ledger))}).",
    ]
    if unit == "user":
        found.append(USERS)
    for name, spent in ledger.runs.items():
        run = f"In the run “{safe(name)}” "
        if spent.torn:
            found.append(
                f"{run}{spent.torn} step(s) were cut off in the file. Each counts as the most it can have been."
            )
        if spent.again:
            found.append(f"{run}{spent.again} step(s) were repeated with other randomness. They count again.")
        if spent.same:
            found.append(f"{run}{spent.same} step(s) were repeated exactly. They count once.")
        plans = [line.plan for line in ledger.headers[name]]
        if any(plan.filter for plan in plans):
            found.append(f"{run}later settings may depend on the data. A Renyi filter bounds every path.")
        else:
            found.append(f"{run}no setting was chosen by looking at the data or at outputs of the run.")
        if ledger.promised(name):
            found.append(_seen(ledger, name))
        elif name in ledger.unfinished(name):
            found.append(_early(ledger, name, delta))
    return found


def _seen(ledger: Ledger, name: str) -> str:
    """Why more counts than the steps that were taken."""
    looks, spent, plan = ledger.runs[name].looks, ledger.runs[name], ledger.headers[name][-1].plan
    text = f"The run “{safe(name)}” has {len(spent.numbers):,} of the {plan.steps:,} steps of its plan. "
    if not ledger.headers[name][-1].told:
        return (
            f"{text}An earlier release wrote it, which did not note whether outputs were seen. The whole plan counts."
        )
    if looks is None:
        return f"{text}It left an earlier plan after its outputs were seen. That plan counts to its end."
    return (
        f"{text}Its outputs could be seen from step {looks.step:,} on, and may have decided where it ended. So it "
        f"counts as far as it would have gone by itself, to step {looks.until:,}."
    )


def _early(ledger: Ledger, name: str, delta: float) -> str:
    """What an early end means, with what covers one that the data decided."""
    spent, plan = ledger.runs[name], ledger.headers[name][-1].plan
    text = (
        f"The run “{safe(name)}” has {len(spent.numbers):,} of the {plan.steps:,} steps of its plan. "
        f"This report assumes that neither the data nor its outputs decided where it ended."
    )
    whole = _epsilon(ledger.epsilon(delta, whole=True))
    return f"{text} If they did, the whole plan counts: epsilon {whole} at delta = {delta!r}."


def _sizes(ledger: Ledger) -> list[str]:
    return sorted({f"{line.plan.dataset_size:,}" for headers in ledger.headers.values() for line in headers})


def _commands(path: str, delta: float) -> list[str]:
    name = quoted(path)
    return [
        f"sha256sum {name}",
        f"jaxacct ledger show {name} --delta {delta!r}",
        f"jaxacct verify {name} --delta {delta!r}",
    ]
