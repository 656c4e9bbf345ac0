"""`jaxacct warm`: compile the programs of sweeps and of training in advance, and keep the programs on the disk.

It asks public functions a few example questions. Together these questions need the programs of all array sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator

from jaxacct.accounting import account
from jaxacct.calibration import noise_rate_steps
from jaxacct.cli import output
from jaxacct.core.progress import Progress
from jaxacct.core.validation import InputError, choice
from jaxacct.engines import backend, programs
from jaxacct.mechanisms import dp_sgd

PURPOSES = {"sweep": ("xla",), "training": ("auto",), "all": ("xla", "auto")}
"""Values of --for, each with the backends whose programs it compiles. Large sweeps run on XLA. Plans and ledgers ask
few questions, for which "auto" compiles nothing on a CPU."""
NOISE, RATE, STEPS = (0.3, 1.0, 100.0), (1e-5, 1e-3, 0.1), (10_000, 10_000_000)
"""Noise multipliers, sampling probabilities and steps of the questions for epsilon and delta."""
DELTA, EPSILON = (1e-3, 1e-20), (0.1, 3.0)
"""Deltas at which epsilon is asked for, and epsilons at which delta is asked for."""
TARGETS = tuple(itertools.product((0.5, 4.0), (1e-5, 1e-9)))
"""Pairs (epsilon, delta) that are the targets of the calibrations."""
KNOWN: dict[Callable[..., object], tuple[tuple[float, float], ...]] = {
    noise_rate_steps.calibrate_noise_multiplier: tuple(itertools.product(RATE, (100, 10_000))),
    noise_rate_steps.calibrate_steps: tuple(itertools.product((0.7, 2.0), (1e-3, 0.1))),
}
"""Each calibration's known parameters: (sampling probability, steps), or (noise multiplier, sampling probability)."""

Question = Callable[[], object]


def run(options: argparse.Namespace) -> int:
    """Run `jaxacct warm` and return its exit status."""
    purpose = vars(options)["for"]  # `for` is a keyword of Python
    choice("--for", purpose, PURPOSES)
    before = programs.cache_info()
    if before.reason:
        raise InputError(f"compiled programs are not kept: {before.reason}")
    programs.say_nothing()
    begin = time.monotonic()
    todo = [(name, question) for name in PURPOSES[purpose] for question in questions()]
    with contextlib.closing(Progress(len(todo), None, unit="questions")) as bar:
        for done, (name, question) in enumerate(todo):
            bar.update(done, f"  {_prepared()} programs")
            with backend.job(1, name):
                question()
        bar.update(len(todo), f"  {_prepared()} programs")
    info = programs.cache_info()
    compiled, loaded, saved = (getattr(info, n) - getattr(before, n) for n in ("compiled", "loaded", "saved"))
    if saved < compiled:
        raise InputError(f"{info.folder}: {compiled - saved} of {compiled} programs could not be kept")
    if "xla" in PURPOSES[purpose]:
        programs.note_warm()
    counts = {"compiled": compiled, "already there": loaded, "folder": str(info.folder)}
    size = {"kept": f"{info.programs} programs, {info.bytes / 2**20:.0f} of {info.limit_bytes / 2**20:.0f} MiB"}
    seconds = time.monotonic() - begin
    if options.json:
        print(output.dumps(counts | {"programs": info.programs, "bytes": info.bytes, "seconds": seconds}))
    else:
        print(output.block(counts | size | {"time": f"{seconds:.0f} s"}))
    return 0


def questions() -> Iterator[Question]:
    """Yield functions without arguments. Each compiles programs when it is called; its result is not used."""
    for of in itertools.product(NOISE, RATE, STEPS):
        for delta in DELTA:
            yield functools.partial(account.epsilon, dp_sgd(*of), delta, engine="contour")
        for epsilon in EPSILON:
            yield functools.partial(account.delta, dp_sgd(*of), epsilon, engine="contour")
    for calibrate, numbers in KNOWN.items():
        for known, target in itertools.product(numbers, TARGETS):
            yield functools.partial(calibrate, *target, *known)


def _prepared() -> int:
    return programs.compiling.count + programs.loading.count
