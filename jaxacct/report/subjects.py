"""What a page is about (its subject): a ledger, a plan, a mechanism or a sweep's result."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds, explain
from jaxacct.core.files import lock, reading
from jaxacct.core.validation import DELTA, LARGEST_COUNT, RELATIONS, InputError, check_one, choice, shown
from jaxacct.interop.documents import FORMAT, from_json, to_json
from jaxacct.mechanisms import Mechanism, PrivacyProfile, batch_shape
from jaxacct.mechanisms.base import call
from jaxacct.mechanisms.combinators import Composed
from jaxacct.report import wording
from jaxacct.report.claim import Claim, down, safe, up
from jaxacct.report.page import Rows
from jaxacct.selection import select
from jaxacct.selection.any_selection import AnySelection
from jaxacct.sweeps import Table, read_table
from jaxacct.sweeps.grid import INPUTS, LAWS, is_frame
from jaxacct.sweeps.solve import asked_of, law_of_k, missed_target, run_of_row
from jaxacct.sweeps.table import ENDINGS, WHOLE
from jaxacct.training import Ledger, Plan
from jaxacct.training.ledger.format import KIND
from jaxacct.training.plan.plan import load
from jaxacct.training.step.step_mechanisms import ORDER

SAMPLING = {
    "poisson": "Poisson-sampled batches",
    "truncated_poisson": "Poisson-sampled batches, cut to a uniform subset where they are too large",
    "random_allocation": "one round, in which each record is in the batch of one random slot",
    "without_replacement": "batches of one size without replacement",
    "fixed_batches": "one pass over fixed batches",
    "cyclic_poisson": "one pass through the groups, with a Poisson-sampled batch of each",
    "fixed_order": "all passes of a run, in one order",
}
_DELTAS = np.geomspace(1e-10, 0.3, 14)
"""Deltas at which a Rényi filter's epsilon is computed, from which the risks of a filtered run follow."""
_LONGEST_CODE = 4000
"""Largest number of characters of a mechanism in code; the coefficients of about a hundred bands fit."""
_LONGEST_DOCUMENT = 2**24
"""Largest number of bytes of a plan or a mechanism; a longer file is a ledger."""
_OF_RATES = "each {unit} has a public sampling rate that was chosen without the data; the largest one is shown."
_MOST_RELEASES = 500
_MOST_SHOWN, _MOST_DETAILED, _MOST_ASKED = 50, 3, 20
"""How many rows of a sweep are listed at most, are shown in detail by default, and may be named by `rows`."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What a page reports on, such as a ledger or a plan, with its claims and how to check them."""

    what: str  # the kind of subject, in words
    summary: str
    claims: Sequence[Claim]  # the claims that the page states in detail
    spent: Rows  # a table of all releases, or of the rows of a sweep's result
    details: Sequence[Sequence[tuple[str, str]]]  # for each claim, (name, value) pairs of its settings
    mechanisms: Sequence[Mechanism]  # all mechanisms of the subject; the page states their assumptions
    assumed: Sequence[str]  # assumptions besides those of `mechanisms`
    verify: Sequence[str]  # command lines, or lines of Python, that check the claims
    note: str = ""  # what `verify` does not cover
    unit: str = "record"  # in what neighbouring data sets differ: "record" or "user"
    path: str = ""  # the file from which the subject was read; empty for an object
    sha256: str = ""


def subject_of(source: Any, delta: float | None, rows: Sequence[int] | None, relation: str | None) -> Subject:
    """Return the subject for `source`. Refuse options that its kind lacks, and a file that changes meanwhile."""
    if is_frame(source):
        source = read_table(source)
    kind = _kind(source)
    if delta is not None and kind in ("result", "plan"):
        raise InputError(f"delta is for a ledger or a mechanism; a {kind} has its own")
    if relation is not None and kind != "mechanism":
        raise InputError(f"relation is for a mechanism; a {kind} has its own")
    if rows is not None and kind != "result":
        raise InputError("rows is for the result of a sweep; leave it out")
    in_file = isinstance(source, str | os.PathLike)
    path = os.fsdecode(source) if in_file else ""
    before = _digest(path) if in_file else ""
    if kind == "ledger":
        if in_file:
            with contextlib.suppress(OSError), Path(path).open("rb") as file:  # a file system may have no locks
                lock(file, path, "make the report when the run has ended", shared=True)
        found = _of_ledger(Ledger.read(path) if in_file else source, delta, path)
    elif kind == "result":
        found = _of_table(read_table(path) if in_file else source, rows, path)
    else:
        text = Path(path).read_text(encoding="utf-8") if in_file else ""
        try:
            if kind == "plan":
                found = _of_plan(Plan.from_json(text) if in_file else source, path)
            else:
                mechanism = from_json(text) if in_file else source
                found = _of_mechanism(mechanism, delta, relation or "add_or_remove_one", path)
        except InputError as error:
            raise (InputError(f"{path}: {error}") if in_file else error) from None
    if in_file and _digest(path) != before:
        raise InputError(f"{path}: was changed while it was read; make the report when nothing writes to it")
    return dataclasses.replace(found, path=path, sha256=before)


def _kind(source: Any) -> str:
    """Return the kind of a source: "ledger", "result", "plan" or "mechanism". An unknown file counts as a ledger."""
    for kind, word in ((Ledger, "ledger"), (Plan, "plan"), (Table, "result"), (Mechanism, "mechanism")):
        if isinstance(source, kind):
            return word
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise InputError(
            f"subject = {shown(source)} must be a Ledger, a Plan, a Table, a Mechanism or the path of a file"
        )
    path = Path(os.fsdecode(source))
    if path.suffix.lower() in ENDINGS:
        return "result"
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: cannot be read: it is a folder, a pipe or a device; give the path of a file")
    with reading(path), path.open("rb") as file:
        text = file.read(_LONGEST_DOCUMENT + 1)
    try:
        node = load(text.decode()) if len(text) <= _LONGEST_DOCUMENT else None
    except ValueError:
        node = None
    form = node.get("format") if isinstance(node, dict) else None
    word = {"jaxacct.plan": "plan", FORMAT: "mechanism"}.get(str(form), "ledger")
    if word == "ledger" and text and not text.startswith(KIND):
        raise InputError(f"{path}: is no ledger: it does not begin with a run; nor a whole plan or mechanism; give one")
    return word


def _digest(path: str) -> str:
    with reading(path), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _quoted(path: str) -> str:
    """Return a path quoted for a command line; "-x", which would be read as an option, becomes "./-x"."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def counted(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Rows:
    """Return a table of the first `_MOST_RELEASES` rows. If `rows` has more, the caption says so."""
    if len(rows) > _MOST_RELEASES:
        caption += f" The first {_MOST_RELEASES:,} of {len(rows):,} kinds are shown; epsilon counts all."
    return Rows(caption, header, rows[:_MOST_RELEASES])


def _of_mechanism(mechanism: Mechanism, delta: float | None, relation: str, path: str) -> Subject:
    """Return the subject for one mechanism, whose epsilon at `delta` is claimed."""
    if delta is None:
        raise InputError("delta is missing; a mechanism has none of its own, give one such as 1e-5")
    at = check_one("delta", delta, DELTA, "a report has one")
    choice("relation", relation, RELATIONS)
    if batch_shape(mechanism):
        raise InputError(
            f"the mechanism of shape {batch_shape(mechanism)} must be one configuration; report one by one"
        )
    bounds = account.epsilon(mechanism, at, relation=relation)
    claim = Claim("One release of the mechanism", "epsilon", at, relation, bounds, mechanism)
    with np.printoptions(floatmode="unique"):
        texts = [safe(repr(m)) for m in (mechanism.inside() if isinstance(mechanism, Composed) else [mechanism])]
    parts = [[text if len(text) <= 600 else f"{text[:600]} ... (cut)"] for text in texts]
    ask = f'b = ja.epsilon(m, {at!r}, relation="{relation}")'
    check = f'print(b, ja.verify(m, b, delta={at!r}, relation="{relation}"))'
    lines = ["import jaxacct as ja", *_made(mechanism), ask, check]
    if path:
        read = f"from jaxacct.interop import from_json; m = from_json(open({path!r}).read())"
        code = f"import jaxacct as ja; {read}; {ask}; {check}"
        lines = [f"sha256sum {_quoted(path)}", f"python -c {shlex.quote(code)}"]
    return Subject(
        "a mechanism",
        "This is the description of a mechanism. Nothing on this page says that it was carried out.",
        [claim],
        Rows("The mechanism, and what it is made of.", ["mechanism"], parts),
        [[]],
        [mechanism],
        wording.GENERAL,
        lines,
    )


def _made(mechanism: Mechanism) -> list[str]:
    """Return lines of Python that make this mechanism again, with every digit of its parameters."""
    text = mechanism.expression()
    if "..." not in text and len(text) <= _LONGEST_CODE:
        used = [f"from jaxacct import {room}" for room in ("selection", "strategies") if f"{room}." in text]
        return [*used, f"m = {safe(text)}"]
    try:
        saved = to_json(mechanism)
    except InputError:
        saved = ""
    if 0 < len(saved) <= _LONGEST_CODE:
        return ["from jaxacct.interop import from_json", f"m = from_json({saved!r})"]
    return ["m = ...  # the mechanism, which this page cannot write down"]


def _of_plan(plan: Plan, path: str) -> Subject:
    """Return the subject for a plan that was not run. The plan states the delta of the claim."""
    bounds, mechanism, profile = plan.epsilon, plan.mechanism, None
    if plan.repetitions is not None:
        mechanism = select(mechanism, plan.repetitions, candidates=plan.candidates)
    if plan.filter and np.isfinite(bounds.upper):
        profile = tuple((plan.filter.epsilon(float(d)), float(d)) for d in _DELTAS)
    of = None if plan.filter else mechanism
    title = "The plan, if it is carried out as written"
    claim = Claim(title, "epsilon", plan.target_delta, plan.relation, bounds, of, profile=profile)
    target = (
        "It was asked to stay within no target."
        if plan.target_epsilon is None
        else f"Its target is epsilon {plan.target_epsilon!r} at delta {plan.target_delta!r}."
    )
    what = "Every release of one candidate of the plan" if plan.repetitions is not None else "Every release of the plan"
    header = ["what would be released", "noise multiplier", "sampling probability", "how often"]
    releases = [_release(plan, "Gaussian noise, ", *item) for item in plan.whole.items()]
    if plan.early_stop is not None:
        releases.append([f"{safe(repr(plan.early_stop.mechanism))} all answers of the early stop", "", "", "1"])
    code = f"p = Plan.from_json(open({path or 'plan.json'!r}).read()); print(p.epsilon)"
    if plan.filter is None and plan.repetitions is None:  # `ja.verify` covers only such plans
        code += f'; print(ja.verify(p.mechanism, p.epsilon, delta=p.target_delta, relation="{plan.relation}"))'
    python = f"python -c {shlex.quote(f'import jaxacct as ja; from jaxacct.training import Plan; {code}')}"
    return Subject(
        "a plan that was not run",
        f"This is a plan. Nothing on this page says that it was carried out. {target} What a run has spent is in its "
        "ledger, and needs a report of its own.",
        [claim],
        counted(f"{what}. Equal ones are counted together.", header, releases),
        [_numbers_of_plan(plan)],
        [mechanism],
        _assumed_of_plan(plan),
        [f"sha256sum {_quoted(path)}", python] if path else [python],
        wording.FILTER_NOTE if plan.filter else wording.CHOICE_NOTE if plan.repetitions is not None else "",
        plan.unit,
    )


def _numbers_of_plan(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan's settings as (name, value) pairs; batch size and noise are averages over segments."""
    average = " (average)" if len(plan.segments) > 1 else ""
    facts = [
        (f"{plan.unit.capitalize()}s in the data", f"{plan.dataset_size:,}"),
        ("Steps", f"{plan.steps:,}"),
        *([("Groups that take turns", f"{plan.groups:,}")] if plan.groups else []),
        (f"Expected batch size{average}", f"{plan.expected_batch_size:.10g}"),
        *([("Largest batch", f"{plan.cap:,}")] if plan.cap else []),
        *([("Slots of a round", f"{plan.slots:,}")] if plan.slots else []),
        (f"Noise multiplier{average}", repr(plan.noise_multiplier)),
    ]
    if plan.rates_digest is not None:
        facts.append((f"Sampling rates of {plan.unit}s", f"their SHA-256 is {plan.rates_digest}"))
    if (rule := plan.early_stop) is not None:
        facts.append(("Early stop", f"every {rule.every:,} steps, after {rule.patience:,} scores without a gain"))
    if plan.repetitions is not None:
        facts.append(("Candidates", f"{plan.candidates}, their number K by {plan.repetitions!r}"))
    return facts


def _release(plan: Plan, what: str, release: Any, count: int) -> list[str]:
    """Return one row of a table: the kind of release, its noise multiplier, its sampling probability, and `count`."""
    numbers = repr(release.noise_multiplier), repr(release.sampling_probability), f"{count:,}"
    cap = f": at most {release.cap:,} of {release.dataset_size:,} records" if release.cap else ""
    return [wording.about(plan.unit, f"{what}{SAMPLING[release.sampling]}{cap}"), *numbers]


def _assumed_of_plan(plan: Plan) -> list[str]:
    found = [wording.about(plan.unit, text) for text in wording.TRAINING]
    found.append(f"The number of {plan.unit}s, {plan.dataset_size:,}, is public.")
    if plan.rates_digest is not None:
        found.append(f"In the plan {_OF_RATES.format(unit=plan.unit)}")
    found += [f"In the plan {text}" for text in _of_steps(plan)]
    if plan.unit == "user":
        found.append(wording.USERS)
    if plan.filter:
        found.append(
            f"Later settings may depend on the data. A Renyi filter of order {plan.filter.order:g} bounds every path."
        )
    elif plan.early_stop is not None:
        found.append("No setting is chosen by looking at the data or at outputs. The early stop may end the run.")
    else:
        found.append("No setting, and not the end of the run, is chosen by looking at the data or at its outputs.")
    if plan.repetitions is not None:
        found.append(f"The number of candidates K has the law {plan.repetitions!r}, fixed beforehand.")
    return found


def _of_steps(plan: Plan) -> list[str]:
    """Return the assumptions about a record's steps, about noise that steps share, and about an early stop."""
    found = []
    if plan.groups is not None:
        found.append(wording.about(plan.unit, wording.TURNS).format(groups=plan.groups))
    if plan.sampling == ORDER:
        found.append(wording.about(plan.unit, wording.ONE_ORDER).format(batches=plan.batches))
    if plan.taps(0) is not None:
        found.append(wording.SHARED_NOISE.format(strategy=safe(call(plan.noise))))
    if plan.early_stop is not None:
        found.append(wording.ANSWERS)
    return found


def _of_ledger(ledger: Ledger, delta: float | None, path: str) -> Subject:
    """Return the subject for a ledger. Epsilon at `delta` is derived again from the ledger's entries."""
    at = ledger.plan.target_delta if delta is None else check_one("delta", delta, DELTA, "a report has one")
    names = list(ledger.runs)
    several = len(names) > 1
    bounds = ledger.epsilon(at)
    relation = ledger.plan.relation
    lines = [line for headers in ledger.headers.values() for line in headers]
    filtered = any(line.plan.filter for line in lines)
    profile = None
    if filtered:  # no mechanism describes a Renyi filter, but the filter promises an epsilon at each delta
        promised = ((float(ledger.epsilon(float(d)).upper), float(d)) for d in _DELTAS)
        profile = tuple((e, d) for e, d in promised if np.isfinite(e))
    title = "All runs of the ledger together" if several else f"The run “{safe(names[0])}”"
    mechanism = None if filtered else ledger.spent()
    claims = [Claim(title, "epsilon", at, relation, bounds, mechanism, True, _candidate(ledger), profile)]
    steps = sum(len(spent.numbers) for spent in ledger.runs.values())
    who = sorted({safe(line.by) for line in lines if line.by})
    others = sum(len(spent.noted) for spent in ledger.runs.values())
    inside = (one for spent in ledger.runs.values() for other in spent.others for one in wording.mechanisms_in(other))
    choice_noted = any(isinstance(one, AnySelection) for one in inside)
    also = f" and {others:,} other release{'s' if others > 1 else ''}" if others else ""
    name = _quoted(path or str(ledger.path))
    return Subject(
        "a ledger of training runs",
        f"{len(names)} run{'s' if several else ''} with {steps:,} training steps{also} {'have' if several else 'has'} "
        f"been noted{' by ' + ', '.join(who) if who else ''}. Epsilon was derived again from the entries.",
        claims,
        _spent(ledger, at),
        [_target_kept(ledger)],
        [ledger.spent(), *(line.plan.mechanism for line in lines)],
        _assumed_of_ledger(ledger, at),
        [f"sha256sum {name}", *(f"jaxacct {word} {name} --delta {at!r}" for word in ("ledger show", "verify"))],
        wording.FILTER_NOTE if filtered else wording.CHOICE_NOTE if choice_noted else "",
        ledger.plan.unit,
    )


def _target_kept(ledger: Ledger) -> list[tuple[str, str]]:
    """Return the last plan's target, and whether the ledger kept it, as one (name, value) pair."""
    plan = ledger.plan
    if plan.target_epsilon is None:
        return [("Target of the plan", "none")]
    target = f"epsilon {plan.target_epsilon!r} at delta {plan.target_delta!r}"
    spent = ledger.epsilon(plan.target_delta)
    kept = bool(spent.ok) and bool(spent.upper <= plan.target_epsilon)
    return [("Target of the plan", f"{target}: {'kept' if kept else 'not kept by all that the ledger holds'}")]


def _candidate(ledger: Ledger) -> str:
    """Return why nothing may be claimed: a run trained one candidate of a private choice. Return "" if none did."""
    for name in ledger.runs:
        if (plan := ledger.choice(name)) is not None:
            return (
                f"A plan of the run “{safe(name)}” is for one candidate of a private choice, and what the choice "
                f"costs is not in its steps. By the plan the whole tuning costs epsilon {_epsilon(plan.epsilon)} at "
                f"delta = {plan.target_delta!r}. Report the plan, or a ledger that holds the tuning as one release."
            )
    return ""


def _spent(ledger: Ledger, delta: float) -> Rows:
    """Return the table of all releases that the ledger counts, with each run's epsilon if there are several."""
    several, plan, rows = len(ledger.runs) > 1, ledger.plan, []
    for name, spent in ledger.runs.items():
        taken, ahead = ledger.taken_and_ahead(name)
        lines = [_release(plan, "Gaussian noise, ", *item) for item in taken.items()]
        lines += [_release(plan, "not taken, but promised: ", *item) for item in ahead.items()]
        lines += [[f"{safe(repr(one.mechanism))[:300]} {safe(one.note)}".rstrip(), "", "", "1"] for one in spent.noted]
        own = _epsilon(ledger.epsilon(delta, run=name)) if several else ""
        for place, line in enumerate(lines):
            rows.append([safe(name), *line, *([own if place == 0 else "as above"] if several else [])])
    header = ["run", "what was released", "noise multiplier", "sampling probability", "how often"]
    header += ["epsilon of the run"] if several else []
    return counted("Every release that counts. Equal ones are counted together.", header, rows)


def _epsilon(bounds: Bounds) -> str:
    upper = float(bounds.upper)
    return f"<= {up(upper, 6)} ({bounds.kind})" if bool(bounds.ok) and np.isfinite(upper) else f"none ({bounds.status})"


def _assumed_of_ledger(ledger: Ledger, delta: float) -> list[str]:
    unit = ledger.plan.unit  # all runs of a ledger have the same unit
    sizes = sorted({f"{line.plan.dataset_size:,}" for headers in ledger.headers.values() for line in headers})
    found = [
        *(wording.about(unit, text) for text in wording.TRAINING),
        "The ledger holds everything that was released. Its checksums tell damage and lost lines. They are no "
        "signature, and do not stop anybody who rewrites the file.",
        "Entries with equal fingerprints released the same output, to the last bit. They count once.",
        f"The number of {unit}s is public ({', '.join(sizes)}).",
    ]
    if unit == "user":
        found.append(wording.USERS)
    noted = [entry for spent in ledger.runs.values() for entry in spent.noted]
    if any(entry.note.startswith("tuning") and isinstance(entry.mechanism, PrivacyProfile) for entry in noted):
        found.append(wording.about(unit, wording.TUNED))
    for name, spent in ledger.runs.items():
        run = f"In the run “{safe(name)}” "
        if spent.torn:
            found.append(
                f"{run}{spent.torn} step(s) were cut off in the file, or may have been, where the run's name was cut "
                "off, too. Each counts as the most it can have been."
            )
        if spent.again:
            found.append(f"{run}{spent.again} step(s) were repeated with other randomness. They count again.")
        if spent.same:
            found.append(f"{run}{spent.same} step(s) were repeated exactly. They count once.")
        plans = [line.plan for line in ledger.headers[name]]
        if any(plan.rates_digest for plan in plans):
            found.append(f"{run}{_OF_RATES.format(unit=unit)}")
        found += dict.fromkeys(f"{run}{text}" for plan in plans for text in _of_steps(plan))
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
    """Return a text on why the ledger counts more steps of a run than the run took."""
    looks, spent, plan = ledger.runs[name].looks, ledger.runs[name], ledger.headers[name][-1].plan
    text = f"The run “{safe(name)}” has {len(spent.numbers):,} of the {plan.steps:,} steps of its plan. "
    if not ledger.headers[name][-1].told:
        written = "An earlier version of jaxacct wrote it and did not note whether outputs were seen."
        return f"{text}{written} The whole plan counts."
    if looks is None:
        return f"{text}It left an earlier plan after its outputs were seen. That plan counts to its end."
    return (
        f"{text}Its outputs could be seen from step {looks.step:,} on, and may have decided where it ended. So it "
        f"counts as far as it would have gone by itself, to step {looks.until:,}."
    )


def _early(ledger: Ledger, name: str, delta: float) -> str:
    """Return the assumption about a run that ended early, and the epsilon without this assumption."""
    spent, plan = ledger.runs[name], ledger.headers[name][-1].plan
    text = (
        f"The run “{safe(name)}” has {len(spent.numbers):,} of the {plan.steps:,} steps of its plan. "
        f"This report assumes that neither the data nor its outputs decided where it ended."
    )
    whole = _epsilon(ledger.epsilon(delta, whole=True))
    return f"{text} If they did, the whole plan counts: epsilon {whole} at delta = {delta!r}."


def _of_table(table: Table, rows: Sequence[int] | None, path: str) -> Subject:
    """Return the subject for a sweep's result. `rows` are the numbers, from 0, of the rows to show in detail."""
    listed, detailed = _chosen(len(table), rows)
    claims = [_claim(table, row) for row in listed]
    stated = [claim for row, claim in zip(listed, claims, strict=True) if row in detailed]
    inputs = [name for name in INPUTS if name in table.columns]
    cells = [[(name, _cell(name, table[name][row])) for name in inputs] for row in detailed]
    details = [[(name.replace("_", " ").capitalize(), c) for name, c in row if c != "none"] for row in cells]
    stop = frozenset(place for place, claim in enumerate(claims) if not claim.may_be_claimed)
    name = _quoted(path)
    return Subject(
        "the result of a sweep",
        f"The file has {len(table):,} row{'s' if len(table) > 1 else ''}, one configuration of DP-SGD each. "
        "It says what such a run would cost. Nothing on this page says that one was carried out.",
        stated,
        _overview(table, listed, claims, stop, rows is not None),
        details,
        [claim.mechanism for claim in claims if claim.mechanism is not None],
        (*wording.TRAINING, wording.CYCLIC) if "bands" in table.columns else wording.TRAINING,
        [f"sha256sum {name}", f"jaxacct verify {name}"] if path else ["jaxacct verify result.csv"],
        wording.CHOICE_NOTE if "repetitions" in table.columns and any(table["repetitions"][listed]) else "",
    )


def _chosen(size: int, rows: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows that the page lists, and those of the rows that it shows in detail."""
    if size == 0:
        raise InputError("the result has no rows; there is nothing to report")
    if rows is None:
        return list(range(min(size, _MOST_SHOWN))), list(range(min(size, _MOST_DETAILED)))
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise InputError(f"rows = {shown(rows)} must be row numbers, such as [0, 2]")
    chosen = list(dict.fromkeys(rows))
    for row in chosen:
        if isinstance(row, bool | np.bool_) or not isinstance(row, int | np.integer):
            raise InputError(f"rows: {shown(row)} must be a whole number; rows are counted from 0")
    if not 0 < len(chosen) <= _MOST_ASKED:
        raise InputError(f"rows: {len(chosen)} were asked for, limit {_MOST_ASKED}; make several reports")
    for row in chosen:
        if not 0 <= row < size:
            raise InputError(f"rows: {row} must be >= 0 and < {size}; rows are counted from 0")
    return chosen, chosen


def _claim(table: Table, row: int) -> Claim:
    """Return the claim of a row, whose answer is computed again and compared with the answer in the file."""
    cells = {name: column[row] for name, column in table.columns.items()}
    asked, given = asked_of(cells)
    quantity = "delta" if asked == "epsilon" else "epsilon"
    relation, label = str(cells["relation"]), f"Row {row}"
    if cells.get("name"):
        label += f" of “{safe(str(cells['name']))}”"
    bounds, trouble = _stated(cells)
    if not trouble and (missed := missed_target(cells)):
        trouble = f"Its {missed}."
    mechanism = None
    if not trouble and relation not in RELATIONS:
        trouble = "Its neighbouring relation is not one that jaxacct knows."
    length = "steps" if math.isnan(float(cells.get("epochs", math.nan))) else "epochs"
    needed = (asked, "noise_multiplier", "sampling_probability", length)
    missing = [name for name in needed if math.isnan(float(cells.get(name, math.nan)))]
    if not trouble and missing and bounds is not None and bounds.ok:
        trouble = f"The row has no {missing[0].replace('_', ' ')}."
    if not trouble and not missing:
        try:
            mechanism = run_of_row(cells)
            if word := str(cells.get("repetitions", "")):
                mechanism = select(mechanism, law_of_k(word, {name: float(cells[name]) for name in LAWS[word]}))
        except (InputError, ValueError, KeyError) as error:
            trouble = f"Its parameters describe no run: {safe(str(error))[:200]}"
    claim = Claim(label, quantity, given, relation, bounds, mechanism, False, trouble)
    return claim if not claim.may_be_claimed or mechanism is None else _compared(claim, mechanism)


def _stated(cells: dict[str, Any]) -> tuple[Bounds | None, str]:
    """Return (the bracket that the row states, ""), or (None, the reason) if this bracket is not valid."""
    low, middle, high = (float(cells[name]) for name in ("lower", "estimate", "upper"))
    kind, status = safe(str(cells.get("kind", ""))), str(cells.get("status", ""))
    if math.isnan(high) and not kind:  # a row without an answer has no `upper` and no `kind`
        kind = "certified"
    try:
        return Bounds(low, middle, high, kind, status, safe(str(cells.get("engine", "")))), ""
    except ValueError:
        return None, f"The row of the file is no bracket that jaxacct writes (status {safe(status)[:60]!r})."


def _compared(claim: Claim, mechanism: Mechanism) -> Claim:
    """Compute the bracket again. Claim the larger upper end; set `trouble` if the brackets are disjoint."""
    assert claim.bounds is not None
    ask = account.delta if claim.quantity == "delta" else account.epsilon
    try:
        again = ask(mechanism, claim.given, relation=claim.relation)
    except InputError as error:
        return dataclasses.replace(claim, trouble=f"It cannot be derived again: {safe(str(error))[:200]}")
    if not again.ok:
        words = f"Its parameters give an answer of status {again.status!r} now. {explain(str(again.status))}"
        return dataclasses.replace(claim, bounds=again, trouble=words)
    if not (again.lower <= claim.bounds.upper and claim.bounds.lower <= again.upper):
        words = (
            f"The file says {claim.quantity} <= {up(claim.upper, 9)}, but its parameters give "
            f"{down(float(again.lower), 9)} to {up(float(again.upper), 9)} now. The file was changed, or is not of "
            "these parameters."
        )
        return dataclasses.replace(claim, bounds=again, trouble=words)
    upper = max(float(claim.bounds.upper), float(again.upper))
    bounds = Bounds(again.lower, again.estimate, upper, again.kind, again.status, again.engine)
    return dataclasses.replace(claim, bounds=bounds)


def _overview(table: Table, listed: list[int], claims: list[Claim], stop: frozenset[int], asked: bool) -> Rows:
    """Return a table of rows with every input that a row has, and what may be claimed of each row."""
    columns = [name for name in ("name", *INPUTS, "relation") if name in table.columns]
    told = {name: [_cell(name, table[name][row]) for row in listed] for name in columns}
    told = {name: column for name, column in told.items() if set(column) != {"none"}}
    rows = []
    for row, claim, *cells in zip(listed, claims, *told.values(), strict=True):
        upper = f"{claim.quantity} <= {up(claim.upper, 6)}" if claim.may_be_claimed else "not to be claimed"
        rows.append([str(row), *cells, upper, claim.kind or "none", claim.status or "unknown"])
    caption = f"{len(listed):,} of {len(table):,} rows"
    if not asked and len(listed) < len(table):
        caption += f"; the limit is {_MOST_SHOWN}, choose others with --rows"
    caption += ". Every figure that may be claimed was derived again from the row's parameters."
    header = ["row", *(name.replace("_", " ") for name in told), "claim", "kind", "status"]
    return Rows(caption, header, rows, stop)


def _cell(name: str, value: Any) -> str:
    """Write a number with every digit: a run with a rounded noise multiplier could cost more than the page says."""
    if isinstance(value, str):
        return safe(value) or "none"
    number = float(value)
    if math.isnan(number):
        return "none"
    return f"{number:.0f}" if name in WHOLE and number.is_integer() and abs(number) <= LARGEST_COUNT else repr(number)
