"""`jaxacct merge`: the parts that the slices of a sweep have written, as one result."""

from __future__ import annotations

import argparse
import time

from jaxacct.cli import output
from jaxacct.core.validation import InputError
from jaxacct.sweeps import merge

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command."""
    if options.out is None:
        raise InputError("--out is missing; name the result, such as --out result.csv")
    begin = time.monotonic()
    table = merge(options.parts, options.out, overwrite=options.overwrite)
    output.report(output.summary(table, options.out, time.monotonic() - begin), output.summary_text, options)
    return output.failed(table)
