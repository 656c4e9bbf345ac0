"""`jaxacct ledger show`: what a training run has spent, derived from the entries of its ledger."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxacct.cli import output
from jaxacct.cli.arguments import ACTIONS
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, choice

if TYPE_CHECKING:
    from jaxacct.training import Ledger


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command."""
    if options.action is None:
        raise InputError(f"ACTION is missing; use one of {', '.join(ACTIONS)}, as in jaxacct ledger show LEDGER")
    choice("action", options.action, ACTIONS)
    if options.ledger is None:
        raise InputError("LEDGER is missing; name the file, as in jaxacct ledger show run.jsonl")
    if np.ndim(options.delta or 0):
        raise InputError("delta must be one number, not a list")
    from jaxacct.training import Ledger  # takes a while to import: only for this command

    report = _report(Ledger.read(options.ledger), options.ledger, options.delta)
    print(output.dumps(report) if options.json else _text(report))
    return 0


def _report(ledger: Ledger, path: str, delta: float | None) -> dict[str, Any]:
    at = ledger.plan.target_delta if delta is None else delta
    return {
        "ledger": path,
        "delta": at,
        "runs": [_one(ledger, name, at) for name in ledger.runs],
        **_answer(ledger.epsilon(at)),
    }


def _one(ledger: Ledger, name: str, delta: float) -> dict[str, Any]:
    spent, headers = ledger.runs[name], ledger.headers[name]
    plan = headers[-1].plan
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
        **_looks(ledger, name, delta),
        "releases": [release._asdict() | {"count": count} for release, count in spent.releases.items()],
        "others": [{"mechanism": repr(entry.mechanism)[:200], "note": entry.note} for entry in spent.noted],
        **_answer(ledger.epsilon(delta, run=name)),
    }


def _looks(ledger: Ledger, name: str, delta: float) -> dict[str, Any]:
    """From which step outputs were seen, the further steps that count, and epsilon if looks ended an unfinished run."""
    looks, found = ledger.runs[name].looks, ledger.promised(name)
    told = all(line.told for line in ledger.headers[name])
    seen = {"outputs_seen_from": None if looks is None or not told else looks.step, "outputs_noted": told}
    promised = [release._asdict() | {"count": count} for release, count in found.items()]
    unfinished = bool(ledger.unfinished(name))
    whole = float(ledger.epsilon(delta, run=name, whole=True).upper) if unfinished else None
    return seen | {"promised": promised, "upper_if_seen": "inf" if whole == np.inf else whole}


def _answer(bounds: Bounds) -> dict[str, Any]:
    ends = {name: float(getattr(bounds, name)) for name in ("lower", "estimate", "upper")}
    finite = {name: end if np.isfinite(end) else "inf" for name, end in ends.items()}
    return {**finite, "kind": bounds.kind, "status": bounds.status}


_COUNTED = {"fixed_batches": "passes", "random_allocation": "rounds"}
"""What is counted of a way of sampling, where it is not steps."""


def _text(report: dict[str, Any]) -> str:
    blocks = []
    for one in report["runs"]:
        aside = [
            f"{one['counted_again']} replayed otherwise, counted again" if one["counted_again"] else "",
            f"{one['replayed_exactly']} replayed exactly, counted once" if one["replayed_exactly"] else "",
            f"{one['cut_off']} cut off, counted" if one["cut_off"] else "",
        ]
        words = ", ".join(word for word in aside if word)
        lines = {"run": _safe(one["run"]), "by": _safe(one["by"]) or None}
        if one["target_epsilon"] is not None:
            lines["target"] = f"epsilon {one['target_epsilon']:g} at delta {one['target_delta']:g}"
        lines["relation"] = one["relation"] + (f", unit {one['unit']}" if one["unit"] != "record" else "")
        lines["steps"] = f"{one['steps']}{f' ({words})' if words else ''}"
        for place, release in enumerate(one["releases"]):
            what = _COUNTED.get(release["sampling"], "steps")
            cap = f", cap {release['cap']} of {release['dataset_size']}" if release["cap"] else ""
            lines[f"segment {place + 1}"] = (
                f"{release['count']} {what}, {release['sampling']}, noise multiplier "
                f"{release['noise_multiplier']:.6g}, rate {release['sampling_probability']:.6g}{cap}"
            )
        for place, release in enumerate(one["promised"]):
            lines[f"promised {place + 1}"] = (
                f"{release['count']} {_COUNTED.get(release['sampling'], 'steps')} not taken, noise multiplier "
                f"{release['noise_multiplier']:.6g}: {_why(one)}"
            )
        for place, other in enumerate(one["others"]):
            lines[f"other {place + 1}"] = f"{other['mechanism']}  {_safe(other['note'])}".rstrip()
        lines["epsilon"] = _claim(one, report["delta"])
        if one["upper_if_seen"] is not None:
            whole = one["upper_if_seen"] if one["upper_if_seen"] == "inf" else output.up(one["upper_if_seen"], 6)
            lines["assumed"] = f"its plan is not at its end; if outputs decided that, epsilon is <= {whole}"
        blocks.append(output.block(lines))
    if len(report["runs"]) > 1:
        blocks.append(output.block({"all runs": _claim(report, report["delta"])}))
    return "\n\n".join(blocks)


def _claim(answer: dict[str, Any], delta: float) -> str:
    if answer["upper"] == "inf":
        return f"no finite bound at delta = {delta!r} ({answer['status']})"
    upper = output.up(answer["upper"], 6)
    return f"<= {upper} at delta = {delta!r} ({answer['kind']}; bracket from {answer['lower']:.6g})"


def _why(one: dict[str, Any]) -> str:
    """Why steps that were not taken count."""
    if not one["outputs_noted"]:
        return "an earlier release wrote this, and did not note whether outputs were seen"
    step = one["outputs_seen_from"]
    return "outputs were seen" + (" before its plan was left" if step is None else f" from step {step} on")


def _safe(text: str) -> str:
    """Text from the file as it may be shown on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
