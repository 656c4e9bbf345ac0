"""Which file of this folder runs which command."""

from __future__ import annotations

import argparse
import importlib

import numpy as np

from jaxacct.cli.arguments import NUMBERS
from jaxacct.core.validation import InputError

__all__ = ["run"]

FILES = {
    "epsilon": "questions",
    "delta": "questions",
    "calibrate": "questions",
    "risk": "risk",
    "select": "select",
    "sweep": "sweep",
    "merge": "merge",
    "plot": "plot",
    "ledger": "ledger",
    "report": "report",
    "verify": "verify",
    "warm": "warm",
}
"""The file of each command: its `run` takes the parsed options and returns the exit status."""


def run(options: argparse.Namespace) -> int:
    """Run one parsed command and return its exit status."""
    for name in ("rtol", *NUMBERS):
        value = getattr(options, name, None)
        if np.ndim(value or 0):
            raise InputError(f"{name} must be one number, not a list")
        if name in NUMBERS and value is not None and not isinstance(value, int):
            raise InputError(f"{name} = {value!r} must be a whole number")
    status: int = importlib.import_module(f"jaxacct.cli.{FILES[options.command]}").run(options)
    return status
