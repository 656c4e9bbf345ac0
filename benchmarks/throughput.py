"""Where the time of a large batch goes, and that time divided by what its arithmetic alone would take.

    python benchmarks/throughput.py [--count 10000] [--repeats 3] [--least-hits 10] [--json]

Typical DP-SGD as in versus_dp_accounting.py.  For epsilon queries and for calibrations of the noise multiplier:
configurations per second; evaluations per solve (rows given to compiled programs), by kernel and resolution; the shares
of the wall-clock time that each program, the certificates (by counted operations), the lattice engine and Python take;
and the floor: the operations in the kernels' traces, times the seconds that this machine takes for each in plain loops,
measured in the same run.
"""

import argparse
import collections
import contextlib
import functools
import json
import statistics
import time

import jax
import numpy as np
from kernel_operations import count, seconds_each
from versus_dp_accounting import DELTA, typical

import jaxacct as ja
from jaxacct.engines import backend, lattice


class Stage:
    """One compiled program: its kernel, seconds, rows asked and rows computed (the last chunk is padded)."""

    def __init__(self, kernel, static):
        self.kernel = functools.partial(kernel, **static)
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        self.name = f"{name} {'/'.join(map(str, static.values()))}"
        self.seconds, self.rows, self.padded, self.calls, self.shapes = 0.0, 0, 0, 0, None

    def add(self, seconds, chunk, arguments, size):
        self.seconds += seconds
        self.rows += size
        self.padded += -(-size // chunk) * chunk
        self.calls += 1
        self.shapes = jax.tree.map(lambda a: np.asarray(a)[:1], arguments)

    def operations(self):
        """Elements a row, by part and operation."""
        return count(jax.vmap(self.kernel), *self.shapes)


@contextlib.contextmanager
def watched():
    """Yield (stages by program, [seconds, calls] of the lattice engine), which each question asked inside adds to."""
    stages, by_run, by_lattice = {}, {}, [0.0, 0]
    choose, run_in_chunks, solve = backend.program, backend.in_chunks, lattice.epsilon

    def program(kernel, **static):
        chosen = choose(kernel, **static)
        by_run[chosen] = stages.setdefault((kernel, tuple(static.items())), Stage(kernel, static))
        return chosen

    def in_chunks(run, chunk, arguments, size):
        begin = time.perf_counter()
        answer = run_in_chunks(run, chunk, arguments, size)
        by_run[run].add(time.perf_counter() - begin, chunk, arguments, size)
        return answer

    def epsilon(*arguments, **options):
        begin = time.perf_counter()
        answer = solve(*arguments, **options)
        by_lattice[0], by_lattice[1] = by_lattice[0] + time.perf_counter() - begin, by_lattice[1] + 1
        return answer

    backend.program, backend.in_chunks, lattice.epsilon = program, in_chunks, epsilon
    try:
        with backend.job(1, "xla"):
            yield stages, by_lattice
    finally:
        backend.program, backend.in_chunks, lattice.epsilon = choose, run_in_chunks, solve


def measure(solve, repeats):
    """(median seconds; then for one more, watched call: its seconds, stages, and the lattice's seconds and calls)."""
    walls = []
    with backend.job(1, "xla"):
        solve()  # compiles
        for _ in range(repeats):
            begin = time.perf_counter()
            solve()
            walls.append(time.perf_counter() - begin)
    with watched() as (stages, by_lattice):
        begin = time.perf_counter()
        solve()
        wall = time.perf_counter() - begin
    return statistics.median(walls), wall, list(stages.values()), *by_lattice


def figures_of(configurations, rates, median, wall, stages, lattice_seconds, lattice_rows):
    """What is reported of one kind of question."""
    rows, floor, certificate, by_operation = [], 0.0, 0.0, collections.Counter()
    for stage in stages:
        parts = collections.Counter()
        for (part, operation), elements in stage.operations().items():
            parts[part] += elements * rates[operation]
            by_operation[operation] += stage.rows * elements * rates[operation]
        each = sum(parts.values())
        floor += stage.rows * each
        certificate += stage.seconds * parts["certificate"] / each
        rows.append(
            {
                "program": stage.name,
                "rows a solve": stage.rows / configurations,
                "calls": stage.calls,
                "padding": stage.padded / stage.rows - 1.0,
                "share": stage.seconds / wall,
                "us a row": 1e6 * stage.seconds / stage.rows,
                "floor us": 1e6 * each,
                "over floor": stage.seconds / (stage.rows * each),
                "certificate": parts["certificate"] / each,
            }
        )
    compiled = sum(stage.seconds for stage in stages)
    return {
        "configurations": configurations,
        "warm seconds": median,
        "configurations per second": configurations / median,
        "evaluations per solve": sum(stage.rows for stage in stages) / configurations,
        "share of the compiled programs": compiled / wall,
        "share of certificates in them": certificate / compiled,
        "share of the lattice engine": lattice_seconds / wall,
        "solved by the lattice engine": lattice_rows,
        "share of Python": 1.0 - (compiled + lattice_seconds) / wall,
        "floor seconds": floor,
        "over the floor": median / floor,
        "share of the floor": {name: seconds / floor for name, seconds in by_operation.most_common()},
        "programs": rows,
    }


def show(name, figures):
    print(f"\n{name}")
    for key, value in figures.items():
        if isinstance(value, float | int):
            print(f"  {key:34s} {value:12.4g}")
    print("  floor:  " + "  ".join(f"{key} {share:.0%}" for key, share in figures["share of the floor"].items()))
    columns = [key for key in figures["programs"][0] if key != "program"]
    print(f"  {'program':34s}" + "".join(f"{key:>13s}" for key in columns))
    for row in figures["programs"]:
        print(f"  {row['program']:34s}" + "".join(f"{row[key]:13.3g}" for key in columns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="configurations a batch")
    parser.add_argument("--repeats", type=int, default=3, help="warm calls")
    parser.add_argument("--least-hits", type=float, default=10.0, help="least q T")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    before = seconds_each()
    sigma, q, steps = typical(options.count, options.least_hits)
    run = ja.dp_sgd(sigma, q, steps)
    target = ja.epsilon(run, DELTA).estimate
    questions = {
        "epsilon": lambda: ja.epsilon(run, DELTA),
        "calibration": lambda: ja.calibrate_noise_multiplier(target, DELTA, q, steps),
    }
    measured = {name: measure(solve, options.repeats) for name, solve in questions.items()}
    rates = {name: min(each, before[name]) for name, each in seconds_each().items()}  # other work may have slowed a run
    figures = {name: figures_of(sigma.size, rates, *taken) for name, taken in measured.items()}
    figures["nanoseconds an operation, all cores"] = {name: 1e9 * each for name, each in rates.items()}
    if options.json:
        print(json.dumps(figures))
        return
    for name in questions:
        show(name, figures[name])
    print("\nnanoseconds an operation, all cores, in plain loops")
    print("  " + "  ".join(f"{name} {1e9 * each:.3g}" for name, each in rates.items()))


if __name__ == "__main__":
    main()
