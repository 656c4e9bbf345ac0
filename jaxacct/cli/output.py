"""Format answers as a short aligned block of text for people, or as one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxacct.calibration.dp_sgd_search import BESIDE, USUAL_FLOOR
from jaxacct.core.bounds import explain
from jaxacct.core.text import aligned, exact
from jaxacct.core.validation import InputError
from jaxacct.mechanisms.dp_sgd_run import SOURCES
from jaxacct.report.claim import CLAIMABLE, down, up
from jaxacct.sweeps import Table
from jaxacct.sweeps.grid import ANSWER
from jaxacct.sweeps.solve import target_of
from jaxacct.sweeps.table import WHOLE


def as_json(table: Table, batch: bool, more: dict[str, list[Any]] | None = None) -> str:
    """Write the columns of `table` and `more` as one JSON object: lists for a batch, single values otherwise."""
    constant = ("quantity", "relation")
    rows = {name: column.tolist() for name, column in table.columns.items()} | (more or {})
    return dumps({name: row if batch and name not in constant else row[0] for name, row in rows.items()})


def dumps(thing: dict[str, Any]) -> str:
    """Write strict JSON, indented. `plain` says what stands for the numbers that JSON lacks."""
    return json.dumps(plain("", thing), indent=2, allow_nan=False)


def report(content: dict[str, Any], as_text: Callable[[dict[str, Any]], str], options: argparse.Namespace) -> int:
    """Print content as JSON or as text, as the options ask; return exit status 0."""
    print(dumps(content) if options.json else as_text(content))
    return 0


def failed(table: Table) -> int:
    """Return exit status 1 if a row has the status "failed", otherwise 0. The sweep has already warned of the row."""
    return int((table["status"] == "failed").any())


def as_text(table: Table, batch: bool, beside: Mapping[str, str] | None = None) -> str:
    """Write a batch as a table. Write one answer as lines, with the lines in `beside`. Brackets are rounded outward."""
    if batch:
        usual = set(table["relation"].tolist()) == {"add_or_remove_one"}
        shown = [name for name in table.columns if name != "quantity" and not (name == "relation" and usual)]
        rows = ([_short(name, table[name][i]) for name in shown] for i in range(len(table)))
        return "\n".join(aligned([shown, *rows]))
    row = {name: column[0] for name, column in table.columns.items()}
    quantity = str(row["quantity"])
    measured = _measured(row)
    lines: dict[str, Any] = {}
    if quantity != measured:
        lines[quantity] = parameter(quantity, row[quantity])
    if not math.isnan(row["upper"]):
        lines[measured] = f"{row['estimate']:.9g}  ({row['kind']})"
        lines["bracket"] = f"{down(row['lower'], 10)} to {up(row['upper'], 10)}"
        lines["claim"] = _claim(row)
    lines |= beside or {}
    if any(name in row for names in SOURCES.values() for name in names):
        derived = {name: row[name] for name in ("sampling_probability", "steps") if name in row and name != quantity}
        lines["run"] = ", ".join(f"{name} = {parameter(name, value)}" for name, value in derived.items()) or None
    lines["engine"] = row["engine"] or None
    words = explain(str(row["status"]), str(row["kind"]) or "certified")
    return block(lines | {"relation": row["relation"], "status": f"{row['status']}: {words}"})


def summary(table: Table, out: str, seconds: float) -> dict[str, Any]:
    """Return a sweep's counts of rows by quantity, relation and so on, and the range of each `ANSWER` column."""
    counts = {
        word: dict(Counter(str(value) for value in table[word] if value))
        for word in ("quantity", "relation", "kind", "status", "engine")
    }
    known = {end: table[end][~np.isnan(table[end])] for end in ANSWER}
    ranges = {end: {of.__name__: of(x, default=None) for of in (min, max)} for end, x in known.items()}
    rate = len(table) / max(seconds, 1e-9)
    return {"rows": len(table), "out": out, **counts, **ranges, "seconds": seconds, "rows_per_second": rate}


def summary_text(report: dict[str, Any]) -> str:
    """Write the summary as text, with a sentence that explains each status other than "ok"."""
    lines = {"rows": f"{report['rows']:,}"}
    lines |= {word: _counts(report[word]) for word in ("quantity", "relation", "kind", "status", "engine")}
    low, high = report["upper"]["min"], report["upper"]["max"]
    if low is not None:
        lines["upper"] = f"{down(float(low), 6)} to {up(float(high), 6)}"
    lines["time"] = f"{report['seconds']:.1f} s, {report['rows_per_second']:,.0f} rows per second"
    lines["written"] = report["out"]
    return block(lines | {status: explain(status) for status in report["status"] if status != "ok"})


def plan_text(report: dict[str, Any]) -> str:
    """Write the plan of a sweep as text."""
    number, total = report["shard"]
    lines = {
        "configurations": f"{report['configurations']:,} ({_counts(report['quantities'])})",
        "slice": f"{number} of {total}: {report['own']:,} configurations" if total > 1 else None,
        "blocks": f"{report['blocks']:,} of up to {report['block']:,} rows, one quantity each",
        "backend": report["backend"],
        "devices": report["devices"],
        "time": f"about {_duration(report['seconds'])}, from {report['sample']:,} configurations solved just now",
        "start": f"{_duration(report['first_seconds'])} before that for compiling; less where programs are cached",
        "memory": f"up to {report['memory_bytes'] / 2**30:.1f} GiB, 1 GiB of it the lattice engine's limit",
    }
    return block(lines)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def block(report: dict[str, Any]) -> str:
    """Write a report as aligned lines of name and text; leave out absent values."""
    lines = {name: _words(value) for name, value in report.items() if value not in (None, {})}
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    text = lambda name, word: word if isinstance(word, str) else parameter(name, word)
    return ", ".join(f"{name} = {text(name, word)}" for name, word in value.items())


def _claim(row: dict[str, Any]) -> str:
    """Return the claim that may be published, with the upper end rounded up."""
    if str(row["kind"]) not in CLAIMABLE:
        return f"none without more ({row['kind']})"
    if not math.isfinite(row["upper"]):
        return "none (no finite upper end)"
    measured = _measured(row)
    if measured == "delta":
        return f"delta <= {up(row['upper'], 6)} at epsilon = {float(row['epsilon'])!r}"
    risk = target_of(row)
    if risk is not None:
        at = _beside(risk, row)
        return f"{measured} <= {up(row['upper'], 6)}{at} (target {float(row[risk])!r})"
    at = row["delta"] if row["quantity"] == "epsilon" else row["target_delta"]
    target = f" (target {float(row['target_epsilon'])!r})" if "target_epsilon" in row else ""
    return f"epsilon <= {up(row['upper'], 6)} at delta = {float(at)!r}{target}"


def _beside(risk: str, row: dict[str, Any]) -> str:
    """Return the part of a claim that states the risk's settings, such as " at prior = 0.5"."""
    if risk == "target_mu":
        floor = float(row.get("above_fpr", math.nan))
        return f" where both error rates are at least {USUAL_FLOOR if math.isnan(floor) else floor!r}"
    beside = [f"{name.removeprefix('at_')} = {float(row[name])!r}" for name in BESIDE.get(risk, ())]
    return f" at {', '.join(beside)}" if beside else ""


def _measured(row: dict[str, Any]) -> str:
    risk = target_of(row)
    if risk is not None:
        return risk.removeprefix("target_")
    return "delta" if row["quantity"] == "delta" else "epsilon"


def parameter(name: str, value: float) -> str:
    """Write a parameter. Ten digits are enough for a noise multiplier, rounded up, and for a rate, rounded down."""
    if math.isnan(value):
        return "none"
    text = str(int(value)) if name == "steps" else f"{value:.10g}"
    rounded = {"noise_multiplier": up, "sampling_probability": down}
    return text if float(text) == value else rounded[name](value, 10) if name in rounded else exact(value)


def _short(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value or "-"
    if name in ("upper", "base_upper"):
        return up(value, 8)
    if name == "lower":
        return down(value, 8)
    return f"{value:.10g}" if name == "estimate" else parameter(name, value)


def plain(name: str, value: Any) -> Any:
    """Return what stands for a value in JSON, at any depth: NaN is None, an infinity is text, a whole count an int."""
    if isinstance(value, dict):
        return {key: plain(key, cell) for key, cell in value.items()}
    if isinstance(value, list | tuple):
        return [plain(name, cell) for cell in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return int(value) if name in WHOLE and value.is_integer() else value


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def row_numbers(text: str | None) -> list[int] | None:
    """Parse row numbers, which count from 0; None stays None."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise InputError(f"rows = {text!r} must be a row number from 0, or several with commas between")
    return [int(word) for word in text.split(",")]
