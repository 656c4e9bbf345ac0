"""The commands that read and write files: sweep, merge, plot, ledger and report."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxacct.cli import output
from jaxacct.core.bounds import Bounds
from jaxacct.core.text import unusual
from jaxacct.core.validation import InputError, choice
from jaxacct.report.claim import safe
from jaxacct.sweeps import merge as merged
from jaxacct.sweeps import plan
from jaxacct.sweeps import sweep as swept
from jaxacct.sweeps.journal import part_path, slice_of

if TYPE_CHECKING:
    from jaxacct.training import Ledger


def sweep(options: argparse.Namespace) -> int:
    """Solve every configuration of a grid; with --shard or --distributed, this process solves only one slice."""
    settings = {name: getattr(options, name) for name in ("relation", "engine", "rtol", "backend", "block", "shard")}
    if options.dry_run:
        return output.report(asdict(plan(options.grid, **settings)), output.plan_text, options)
    if options.out is None:
        raise InputError("--out is missing; name the result, such as --out result.csv")
    begin = time.monotonic()
    switches = {name: getattr(options, name) for name in ("progress", "resume", "overwrite", "distributed")}
    table = swept(options.grid, out=options.out, **settings, **switches)
    out = str(part_path(Path(options.out), slice_of(options.shard)))
    output.report(output.summary(table, out, time.monotonic() - begin), output.summary_text, options)
    return output.failed(table)


def merge(options: argparse.Namespace) -> int:
    """Merge the part files of a sweep, one for each slice, into one result."""
    begin = time.monotonic()
    table = merged(options.parts, options.out, overwrite=options.overwrite)
    output.report(output.summary(table, options.out, time.monotonic() - begin), output.summary_text, options)
    return output.failed(table)


def plot(options: argparse.Namespace) -> int:
    from jaxacct.plots import plot as drawn

    chosen = {name: getattr(options, name) for name in ("kind", "x", "by", "value")}
    if options.where is not None:
        pairs = [pair.partition("=") for pair in options.where.split(",")]
        if not all(name and sign and value for name, sign, value in pairs):
            raise InputError(f"where = {options.where!r} must be FIELD=VALUE, or several with commas between")
        chosen["where"] = {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    chosen["rows"] = output.row_numbers(options.rows)
    return output.report(drawn(options.result, options.out, **chosen), output.block, options)


def join(options: argparse.Namespace) -> None:
    """Connect the processes of a distributed sweep. If no option describes the processes, JAX asks the cluster."""
    if options.command != "sweep":
        return
    given = {name: getattr(options, name) for name in ("coordinator", "process_id", "process_count")}
    if not options.distributed:
        for name, value in given.items():
            if value is not None:
                raise InputError(f"--{name.replace('_', '-')} is for --distributed; add that, or leave it out")
        return
    if options.shard is not None:
        raise InputError("--shard and --distributed both slice the grid; leave one of them out")
    known = [value is not None for value in given.values()]
    if any(known) and not all(known):
        raise InputError("--coordinator, --process-id and --process-count belong together; give all three, or none")
    if all(known) and options.process_id not in range(options.process_count):
        raise InputError(
            f"--process-id = {options.process_id} must be a whole number >= 0 and < --process-count = "
            f"{options.process_count}; number the processes from 0"
        )
    try:
        jax.distributed.initialize(options.coordinator, options.process_count, options.process_id)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--distributed: {reason}; give --coordinator HOST:PORT, --process-id I and --process-count N"
        ) from None


def report(options: argparse.Namespace) -> int:
    """Write a report on the claims of a file. Return exit status 1 if one of them may not be made, otherwise 0."""
    from jaxacct.report import report as page_of  # a slow import that no other command needs

    prior = 0.5 if options.prior is None else options.prior
    settings = {"rows": output.row_numbers(options.rows), "prior": prior, "relation": options.relation}
    settings |= {name: getattr(options, name) or "" for name in ("model", "organisation", "contact")}
    made = page_of(options.file, options.out, delta=options.delta, **settings)
    claims, lines = [], {}
    for claim in made.claims:
        may, upper = claim.may_be_claimed, claim.upper
        words = f"{claim.quantity} <= {output.up(upper, 6)}" if may else "not to be claimed"
        one = {"of": claim.title, "may_be_claimed": may, "claim": words, "upper": upper, "at": claim.given}
        claims.append(one | {name: getattr(claim, name) for name in ("relation", "kind", "status", "obstacle")})
        asked = "epsilon" if claim.quantity == "delta" else "delta"
        at = f"at {asked} = {claim.given!r} ({claim.kind}{unusual(claim.relation)})"
        why = claim.trouble.rstrip(".") or claim.status or "no bracket"
        lines[claim.title] = f"{words} {at}" if may else f"{words} ({why})"
    written = str(options.out)
    text = lambda content: output.block({**lines, "written": written})
    output.report({"written": written, "claims": claims}, text, options)
    return int(not made.may_all_be_claimed)


def ledger(options: argparse.Namespace) -> int:
    """Print what each run in a ledger has spent, and the epsilon of all runs together (`jaxacct ledger show`)."""
    choice("action", options.action, ("show",))
    from jaxacct.training import Ledger  # a slow import that few commands need

    found = Ledger.read(options.ledger)
    at = found.plan.target_delta if options.delta is None else options.delta
    runs = [_run(found, name, at) for name in found.runs]
    try:
        together = _answer(found.epsilon(at))
    except InputError as error:  # no epsilon covers all runs, for example if two runs have different relations
        if len(runs) == 1:
            raise
        together = {"lower": None, "estimate": None, "upper": None, "kind": None, "status": str(error)}
    return output.report({"ledger": options.ledger, "delta": at, "runs": runs, **together}, _ledger_text, options)


def _run(ledger: Ledger, name: str, delta: float) -> dict[str, Any]:
    """Return the spending of one run as a dict."""
    spent, headers = ledger.runs[name], ledger.headers[name]
    plan = headers[-1].plan
    noted = all(line.told for line in headers)
    taken, ahead = ledger.taken_and_ahead(name)
    rows = lambda counts: [release._asdict() | {"count": count} for release, count in counts.items()]
    whole = float(ledger.epsilon(delta, run=name, whole=True).upper) if ledger.unfinished(name) else None
    tuning = ledger.choice(name)
    return {
        "run": name,
        "by": headers[0].by,
        "plans": len(headers),
        "target_epsilon": plan.target_epsilon,
        "target_delta": plan.target_delta,
        "relation": plan.relation,
        "unit": plan.unit,
        "steps": len(spent.numbers),
        "counted_again": spent.again,
        "replayed_exactly": spent.same,
        "cut_off": spent.torn,
        "outputs_seen_from": None if spent.looks is None or not noted else spent.looks.step,
        "outputs_noted": noted,
        "promised": rows(ahead),
        "upper_if_seen": whole,  # upper end of epsilon if outputs led to the run's early end
        "upper_of_tuning": None if tuning is None else float(tuning.epsilon.upper),
        "delta_of_tuning": None if tuning is None else tuning.target_delta,
        "releases": rows(taken),
        "others": [{"mechanism": repr(entry.mechanism)[:200], "note": entry.note} for entry in spent.noted],
        **_answer(ledger.epsilon(delta, run=name)),
    }


def _answer(bounds: Bounds) -> dict[str, Any]:
    ends = {name: output.plain(name, float(getattr(bounds, name))) for name in ("lower", "estimate", "upper")}
    return {**ends, "kind": bounds.kind, "status": bounds.status}


_COUNTED = {"fixed_batches": "passes", "random_allocation": "rounds", "cyclic_poisson": "passes", "fixed_order": "runs"}
"""Ways of sampling for which a ledger does not count steps, each with what is counted instead."""


def _ledger_text(report: dict[str, Any]) -> str:
    blocks = []
    parameter = lambda release, name: output.parameter(name, release[name])
    for one in report["runs"]:
        aside = {
            "counted_again": "replayed otherwise, counted again",
            "replayed_exactly": "replayed exactly, counted once",
            "cut_off": "cut off, counted",
        }
        words = ", ".join(f"{one[name]} {what}" for name, what in aside.items() if one[name])
        lines = {"run": safe(one["run"]), "by": safe(one["by"]) or None}
        if one["target_epsilon"] is not None:
            lines["target"] = f"epsilon {one['target_epsilon']!r} at delta {one['target_delta']!r}"
        lines["relation"] = one["relation"] + (f", unit {one['unit']}" if one["unit"] != "record" else "")
        lines["steps"] = f"{one['steps']}{f' ({words})' if words else ''}"
        for place, release in enumerate(one["releases"]):
            what = _COUNTED.get(release["sampling"], "steps")
            cap = f", cap {release['cap']} of {release['dataset_size']}" if release["cap"] else ""
            lines[f"segment {place + 1}"] = (
                f"{release['count']} {what}, {release['sampling']}, noise multiplier "
                f"{parameter(release, 'noise_multiplier')}, rate {parameter(release, 'sampling_probability')}{cap}"
            )
        step = one["outputs_seen_from"]
        why = "outputs were seen" + (" before its plan was left" if step is None else f" from step {step} on")
        if not one["outputs_noted"]:
            why = "an earlier version of jaxacct wrote this, and did not note whether outputs were seen"
        for place, release in enumerate(one["promised"]):
            lines[f"promised {place + 1}"] = (
                f"{release['count']} {_COUNTED.get(release['sampling'], 'steps')} not taken, noise multiplier "
                f"{parameter(release, 'noise_multiplier')}: {why}"
            )
        for place, other in enumerate(one["others"]):
            lines[f"other {place + 1}"] = f"{other['mechanism']}  {safe(other['note'])}".rstrip()
        lines["epsilon"] = _claim(one, report["delta"])
        if one["upper_if_seen"] is not None:
            whole = output.up(float(one["upper_if_seen"]), 6)
            lines["assumed"] = f"its plan is not at its end; if outputs decided that, epsilon is <= {whole}"
        if one["upper_of_tuning"] is not None:
            lines["not counted"] = (
                "the choice of this candidate among others; by its plan the whole tuning costs "
                f"epsilon <= {output.up(float(one['upper_of_tuning']), 6)} at delta = {one['delta_of_tuning']!r}"
            )
        blocks.append(output.block(lines))
    if len(report["runs"]) > 1:
        blocks.append(output.block({"all runs": _claim(report, report["delta"])}))
    return "\n\n".join(blocks)


def _claim(answer: dict[str, Any], delta: float) -> str:
    if answer["upper"] is None:
        return f"none: {answer['status']}"
    if answer["upper"] == "inf":
        return f"no finite bound at delta = {delta!r} ({answer['status']})"
    upper = output.up(answer["upper"], 6)
    return f"<= {upper} at delta = {delta!r} ({answer['kind']}; bracket from {output.down(answer['lower'], 6)})"
