"""Memory of a sweep of epsilon queries, and how its time grows with the number of configurations.

    python benchmarks/sweep.py [--sides 25 25 4 4] [--times 10] [--json]

Two product grids over one range of typical DP-SGD (noise multiplier .5 to 5, sampling probability 1e-3 to .1,
steps 1,000 to 100,000, delta 1e-8 to 1e-4) are solved by `ja.sweep` into a CSV, with its journal.  The small grid has
the given sides (10,000 rows); the large grid has `times` as many values of both the noise and the sampling probability
(1,000,000 rows).  The first run of the small grid compiles everything (cold); the median of its later runs counts.
Memory is the largest resident set of the whole process.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import jaxacct as ja

AXES = {
    "noise_multiplier": (0.5, 5.0),
    "sampling_probability": (1e-3, 0.1),
    "steps": (1e3, 1e5),
    "delta": (1e-8, 1e-4),
}


def grid(sides):
    """A product grid with so many values an axis."""
    axes = {name: np.geomspace(*ends, side) for (name, ends), side in zip(AXES.items(), sides, strict=True)}
    return axes | {"steps": np.round(axes["steps"])}


def timed(folder, sides):
    """Seconds of one sweep."""
    begin = time.perf_counter()
    ja.sweep(grid(sides), out=folder / "result.csv", overwrite=True)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sides", type=int, nargs=4, default=[25, 25, 4, 4], metavar="N")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    small = options.sides
    large = [options.times * small[0], options.times * small[1], *small[2:]]
    with tempfile.TemporaryDirectory() as name:
        cold, *warm = (timed(Path(name), small) for _ in range(options.repeats + 1))
        seconds = [statistics.median(warm), timed(Path(name), large)]
    rows = [math.prod(small), math.prod(large)]
    unit = 1024 if sys.platform != "darwin" else 1024**2
    report = {
        "rows": rows,
        "cold_seconds": cold,
        "seconds": seconds,
        "rows_per_second": [n / s for n, s in zip(rows, seconds, strict=True)],
        "time_per_row_large_over_small": seconds[1] / rows[1] / (seconds[0] / rows[0]),
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"cold {cold:.1f} s")
    for n, s in zip(rows, seconds, strict=True):
        print(f"{n:9,} rows  {s:8.1f} s  {n / s:7.0f} rows/s")
    print(f"time per row, large over small: {report['time_per_row_large_over_small']:.2f}")
    print(f"memory: {report['mebibytes']:.0f} MiB")


if __name__ == "__main__":
    main()
