"""`jaxacct warm`: compile the programs of sweeps and of training ahead, and keep them.

Nothing lists the programs.  A few questions are asked of the code that answers users' questions, which compiles what
it needs; they are chosen so that together they reach every rung of the ladder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from jaxacct import account, calibration
from jaxacct.cli import output
from jaxacct.engines import compiling, program_cache, programs
from jaxacct.mechanisms import dp_sgd
from jaxacct.progress import Progress
from jaxacct.validation import InputError

__all__ = ["run"]

PURPOSES = {"sweep": (False,), "training": (True,), "all": (False, True)}
"""What --for may say, and whether that takes the quickly compiled programs of small jobs."""
RUNS = (
    (1.0, 1e-2, 1_000, 1e-5),
    (1.0, 1e-3, 10_000, 1e-5),
    (0.8, 1e-3, 1_000, 1e-5),
    (0.3, 1e-5, 10_000, 1e-5),
    (0.3, 1e-1, 10, 1e-20),
)
"""Noise multiplier, sampling probability, steps and delta of runs that differ in how many steps sample a record."""

Question = tuple[str, bool, tuple[float, float, int, float]]
"""A quantity, whether quickly compiled programs answer it, and a run."""


def run(options: argparse.Namespace) -> int:
    """Answer one parsed command."""
    purpose = vars(options)["for"]  # a word of Python
    if purpose not in PURPOSES:
        raise InputError(f"--for = {purpose!r} must be one of {', '.join(PURPOSES)}")
    before = program_cache.cache_info()
    if before.reason:
        raise InputError(f"compiled programs are not kept: {before.reason}")
    compiling.say_nothing()
    begin = time.monotonic()
    todo = list(questions(purpose))
    bar = Progress(len(todo), None, unit="questions")
    try:
        for done, question in enumerate(todo):
            bar.update(done, f"  {_prepared()} programs")
            ask(*question)
        bar.update(len(todo), f"  {_prepared()} programs")
    finally:
        bar.close()
    info = program_cache.cache_info()
    compiled, loaded, saved = (getattr(info, n) - getattr(before, n) for n in ("compiled", "loaded", "saved"))
    if saved < compiled:
        raise InputError(f"{info.folder}: {compiled - saved} of {compiled} programs could not be kept")
    told = {"compiled": compiled, "already there": loaded, "folder": str(info.folder)}
    size = {"kept": f"{info.programs} programs, {info.bytes / 2**20:.0f} of {info.limit_bytes / 2**20:.0f} MiB"}
    seconds = time.monotonic() - begin
    if options.json:
        print(output.dumps(told | {"programs": info.programs, "bytes": info.bytes, "seconds": seconds}))
    else:
        print(output.block(told | size | {"time": f"{seconds:.0f} s"}))
    return 0


def questions(purpose: str) -> Iterator[Question]:
    """What is asked: of each run its epsilon, the delta at that epsilon, and the noise for it."""
    for few in PURPOSES[purpose]:
        for quantity in ("epsilon", "delta", "calibrate"):
            for each in RUNS:
                yield quantity, few, each


def ask(quantity: str, few: bool, of: tuple[float, float, int, float]) -> None:
    """One question; its answer is of no interest."""
    noise, rate, steps, delta = of
    with programs.alike(few):
        if quantity == "epsilon":
            account.epsilon(dp_sgd(noise, rate, steps), delta)
        elif quantity == "delta":
            account.delta(dp_sgd(noise, rate, steps), 1.0)
        else:
            calibration.calibrate_noise_multiplier(1.0, delta, rate, steps)


def _prepared() -> int:
    return compiling.compiling.count + compiling.loading.count
