"""`jaxacct report`: one page on a privacy claim, for somebody who must sign it."""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from jaxacct.cli import output
from jaxacct.cli.output import row_numbers
from jaxacct.core.validation import InputError

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command; exit status 1 where something on the page is not to be claimed."""
    if options.file is None:
        raise InputError("FILE is missing; give a ledger, the .csv or .parquet of a sweep, or a plan as JSON")
    if options.out is None:
        raise InputError("--out is missing; name the page, such as --out report.html")
    for name in ("delta", "prior"):
        if np.ndim(getattr(options, name) or 0):
            raise InputError(f"{name} must be one number, not a list")
    from jaxacct.report import report  # takes a while to import: only for this command

    made = report(
        options.file,
        options.out,
        delta=options.delta,
        rows=row_numbers(options.rows),
        prior=0.5 if options.prior is None else options.prior,
        relation=options.relation,
    )
    told = [
        {
            "of": claim.title,
            "may_be_claimed": claim.may_be_claimed,
            "claim": f"{claim.quantity} <= {output.up(claim.upper, 6)}"
            if claim.may_be_claimed
            else "not to be claimed",
            "upper": _plain(claim.upper),
            "at": claim.given,
            "kind": claim.kind,
            "status": claim.status,
        }
        for claim in made.claims
    ]
    output.report({"written": str(options.out), "claims": told}, _text, options)
    return int(not made.may_all_be_claimed)


def _plain(value: float) -> float | str | None:
    return None if math.isnan(value) else value if math.isfinite(value) else "inf"


def _text(content: dict[str, Any]) -> str:
    lines = {}
    for one in content["claims"]:
        asked = "epsilon" if one["claim"].startswith("delta") else "delta"
        at = (
            f" at {asked} = {one['at']!r} ({one['kind']})"
            if one["may_be_claimed"]
            else f" ({one['status'] or 'no bracket'})"
        )
        lines[one["of"]] = f"{one['claim']}{at}"
    return output.block({**lines, "written": content["written"]})
