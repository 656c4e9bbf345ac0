"""`jaxacct plot`: a picture of the result of a sweep."""

from __future__ import annotations

import argparse

from jaxacct.cli import output
from jaxacct.cli.arguments import PLOT
from jaxacct.cli.output import row_numbers
from jaxacct.core.validation import InputError

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command."""
    if options.result is None:
        raise InputError("RESULT is missing; give the .csv or .parquet of a sweep")
    if options.out is None:
        raise InputError("--out is missing; name the picture, such as --out figure.png")
    from jaxacct.plots import plot

    chosen = {name: getattr(options, name) for name in PLOT}
    if options.where is not None:
        pairs = [pair.partition("=") for pair in options.where.split(",")]
        if not all(name and sign and value for name, sign, value in pairs):
            raise InputError(f"where = {options.where!r} must be FIELD=VALUE, or several with commas between")
        chosen["where"] = {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    if options.rows is not None:
        chosen["rows"] = row_numbers(options.rows)
    return output.report(plot(options.result, options.out, **chosen), output.block, options)
