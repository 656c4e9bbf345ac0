"""The `jaxacct` command: one clear line and exit status 2 for bad input, 1 for an infeasible calibration.

Whatever needs JAX is imported when a command runs, so that help and mistyped options answer at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from jaxacct.cli.arguments import UsageError, parse

__all__ = ["command", "main"]

INTERRUPTED = 130
BROKEN_PIPE = 141


def command() -> int:
    """`main` as a process of its own, which ends before there is much garbage to look for."""
    gc.set_threshold(200_000)
    status = main()
    gc.freeze()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv[1:]` by default) and return its exit status.

    0: answered.  1: answered, but a calibration is infeasible.  2: bad input.  3, 4: a verification refuted a
    bracket, or left one undecided.  130: interrupted.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = f"jaxacct {arguments[0]}" if arguments and not arguments[0].startswith("-") else "jaxacct"
    try:
        options = parse(arguments)
        from jaxacct.cli import cache, commands
        from jaxacct.validation import InputError

        try:
            commands.join(options)  # before anything asks JAX for its devices
            cache.enable()
            status = commands.run(options)
            sys.stdout.flush()
            return status
        except InputError as error:
            return _refuse(command, str(error))
    except UsageError as error:
        return _refuse(command, str(error))
    except KeyboardInterrupt as interrupt:
        print(f"{command}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _refuse(command: str, message: str) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return 2
