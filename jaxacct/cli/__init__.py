"""The `jaxacct` command. Modules that need JAX are imported when a command runs, so that the help appears at once."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jaxacct.cli.arguments import UsageError, parse

__all__ = ["command", "main"]

RUNS = {
    **{name: ("questions", name) for name in ("advise", "risk", "select", "verify")},
    **{name: ("files", name) for name in ("sweep", "merge", "plot", "ledger", "report")},
    "explore": ("explore", "run"),
    "warm": ("warm", "run"),
}
"""The file and the function that run a command; a command that is not listed runs `questions.run`."""


def command() -> int:
    """Run `main` as the whole process, and return its exit status, or 143 after SIGTERM."""
    gc.set_threshold(200_000)  # collect garbage rarely, since the process ends soon
    received: list[int] = []

    def terminate(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt("terminated")  # the command then ends as after Ctrl-C

    signal.signal(signal.SIGTERM, terminate)
    status = main()
    gc.freeze()
    return 143 if received and status == 130 else status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv[1:]` by default) and return its exit status.

    0: answered.  1: answered, but a calibration is infeasible, a row failed, or a claim of a report may not be made.
    2: bad input, or a file or standard output that cannot be written.  3: a verification refuted a bracket.  4: a
    verification left a bracket undecided.  130: interrupted.  141: the reader of standard output has gone.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = f"jaxacct {arguments[0]}" if arguments and not arguments[0].startswith("-") else "jaxacct"
    for stream in (sys.stdout, sys.stderr):  # an encoding may lack a character, such as a quotation mark
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        options = parse(arguments)
        from jaxacct.cli import files
        from jaxacct.core.validation import InputError

        try:
            files.join(options)  # connects a distributed sweep; JAX allows this only before it lists its devices
            with warnings.catch_warnings():
                warnings.showwarning = _shown(command, warnings.showwarning)
                status = run(options)
            if sys.stdout is not None:  # it is None where standard output is closed
                sys.stdout.flush()
            return status
        except InputError as error:
            return _refuse(command, str(error))
    except UsageError as error:
        return _refuse(command, str(error))
    except KeyboardInterrupt as interrupt:
        print(f"{command}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is None:
            _drop_output()
        return _refuse(command, f"{error.filename or 'standard output: cannot be written'}: {error.strerror or error}")


def run(options: argparse.Namespace) -> int:
    """Run one parsed command and return its exit status."""
    module, name = RUNS.get(options.command, ("questions", "run"))
    status: int = getattr(importlib.import_module(f"jaxacct.cli.{module}"), name)(options)
    return status


def _shown(command: str, usual: Any) -> Any:
    """Return a function that shows a warning of failed rows as one line, and other warnings as usual."""
    from jaxacct.sweeps.solve import FailedRows

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, FailedRows):
            print(f"{command}: {message}", file=sys.stderr)
        else:
            usual(message, category, *place, **more)

    return show


def _drop_output() -> None:
    """Redirect standard output to nowhere, so that the flush at the end of the process does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(command: str, message: str) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return 2
