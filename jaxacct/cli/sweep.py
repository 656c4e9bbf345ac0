"""`jaxacct sweep`: solve every configuration of a grid, alone or as one of several processes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax

from jaxacct.cli import output
from jaxacct.core.validation import InputError
from jaxacct.sweeps import plan, sweep
from jaxacct.sweeps.parts import part_path, slice_of

__all__ = ["join", "run"]


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command."""
    if options.grid is None:
        raise InputError("GRID is missing; give a .toml or .csv file")
    settings = {name: getattr(options, name) for name in ("relation", "engine", "rtol", "backend", "block", "shard")}
    if options.dry_run:
        return output.report(output.plan(plan(options.grid, **settings)), output.plan_text, options)
    if options.out is None:
        raise InputError("--out is missing; name the result, such as --out result.csv")
    begin = time.monotonic()
    switches = {name: getattr(options, name) for name in ("progress", "resume", "overwrite", "distributed")}
    table = sweep(options.grid, out=options.out, **settings, **switches)
    out = str(part_path(Path(options.out), slice_of(options.shard)))
    output.report(output.summary(table, out, time.monotonic() - begin), output.summary_text, options)
    return output.failed(table)


def join(options: argparse.Namespace) -> None:
    """Become one of several processes, where a sweep asks for that, as the options or the cluster say."""
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
