"""How long a first answer takes: the command in fresh processes, with an empty cache and with a filled one.

    python benchmarks/cold_start.py [--repeat 5] [-- epsilon --noise-multiplier 1 ...]

The whole is the wall-clock time of the process.  Its stages come from within: importing, preparing programs (tracing,
lowering, compiling, saving; or loading), and the rest of the run; what is left is Python's own start and end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

QUERIES = {
    "epsilon": "epsilon --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --delta 1e-5",
    "delta": "delta --noise-multiplier 1 --sampling-probability 0.01 --steps 10000 --epsilon 2",
    "calibrate": "calibrate --target-epsilon 2 --target-delta 1e-5 --sampling-probability 0.01 --steps 10000",
}
STAGES = ("import", "trace", "lower", "compile", "save", "load", "run")
"""Stages of a first answer that are timed apart."""

STAGED = """
import functools, json, sys, time
begin = time.perf_counter()
from jaxacct.cli import command, commands, questions, select, sweep
spent = dict.fromkeys({stages!r}, 0.0)
spent["import"] = time.perf_counter() - begin

def timed(owner, name, stage):
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*arguments, **options):
        begin = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            spent[stage] += time.perf_counter() - begin

    setattr(owner, name, outer)

import jax
from jaxacct.engines import program_store, programs
timed(jax.stages.Traced, "lower", "lower")
timed(jax.stages.Lowered, "compile", "compile")
timed(program_store, "save", "save")
timed(program_store, "load", "load")
timed(backend.Compiled, "_prepare", "trace")
timed(commands, "run", "run")
command()
spent["trace"] -= sum(spent[name] for name in ("lower", "compile", "save", "load"))
spent["run"] -= sum(spent[name] for name in ("trace", "lower", "compile", "save", "load"))
print(json.dumps(spent), file=sys.stderr)
"""


def run(arguments: list[str], cache: str, code: list[str]) -> tuple[float, str]:
    """(seconds, standard error) of one process."""
    begin = time.perf_counter()
    environment = {**os.environ, "JAXACCT_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, *code, *arguments], env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.stderr)
    return seconds, done.stderr


def measure(name: str, arguments: list[str], repeat: int) -> None:
    whole: dict[str, list[float]] = {"cold": [], "warm": []}
    parts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    staged = ["-c", STAGED.format(stages=STAGES)]
    for _ in range(repeat):
        for samples, code in ((whole, ["-m", "jaxacct"]), (parts, staged)):
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("cold", "warm"):
                    seconds, errors = run(arguments, cache, code)
                    samples[kind].append(seconds if samples is whole else json.loads(errors.splitlines()[-1]))
    for kind in ("cold", "warm"):
        stages = "  ".join(f"{s} {statistics.median(p[s] for p in parts[kind]):.3f}" for s in STAGES)
        print(f"{name:<9} {kind}  whole {statistics.median(whole[kind]):.2f} s ({min(whole[kind]):.2f})  {stages}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="processes of each kind (default 5); medians are shown")
    parser.add_argument("query", nargs="*", help="a jaxacct command line instead of the three standard ones")
    options = parser.parse_args()
    queries = {"query": options.query} if options.query else {k: line.split() for k, line in QUERIES.items()}
    print("seconds: median of the whole (and least), then medians of the stages within")
    for name, arguments in queries.items():
        measure(name, arguments, options.repeat)


if __name__ == "__main__":
    main()
