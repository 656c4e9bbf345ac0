"""What a first call costs in a fresh process, with an empty cache of programs and then with a full one.

    python benchmarks/first_call.py [--repeats 3] [--only NAME ...] [--json FILE]

The table has medians of wall-clock and CPU seconds of the import and of the call.  An import finds Python's bytecode on
the disk.  Compiling and loading are parts of the call, as `jaxacct.cache_info` counts them.  Where dp_accounting is
installed, the table has its calls, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MIXED = (
    "rng = np.random.default_rng(0)\n"
    "q, steps = 10 ** rng.uniform(-4, -0.5, 1000), np.round(10 ** rng.uniform(2, 5, 1000))\n"
)
"""A thousand runs, of which a quarter expect few hits."""
RUN = "run = ja.dp_sgd(1.0, 0.01, 1000)\n"


class Line(NamedTuple):
    """A line of the table: imports, the call, and preparations before the call, which are not timed."""

    imports: str
    call: str
    before: str = ""
    package: str = ""  # what must be installed


JAXACCT = "import jaxacct as ja\n"
LINES = {
    "epsilon": Line(JAXACCT + "ja.epsilon, ja.dp_sgd", "ja.epsilon(ja.dp_sgd(1.0, 0.01, 1000), 1e-5)"),
    "epsilon, few hits": Line(JAXACCT + "ja.epsilon, ja.dp_sgd", "ja.epsilon(ja.dp_sgd(0.8, 0.001, 1000), 1e-5)"),
    "delta": Line(JAXACCT + "ja.delta, ja.dp_sgd", "ja.delta(ja.dp_sgd(1.0, 0.01, 1000), 1.0)"),
    "calibration": Line(
        JAXACCT + "ja.calibrate_noise_multiplier", "ja.calibrate_noise_multiplier(2.0, 1e-5, 0.01, 10_000)"
    ),
    "gradient": Line(
        JAXACCT + "ja.epsilon_gradient, ja.dp_sgd", "ja.epsilon_gradient(ja.dp_sgd(1.0, 0.01, 1000), 1e-5)"
    ),
    "profile, three readings": Line(
        JAXACCT + "ja.profile, ja.dp_sgd", "p = ja.profile(run); p.delta(1.0), p.tradeoff(0.05), p.epsilon(1e-5)", RUN
    ),
    "selection": Line(
        JAXACCT + "from jaxacct import selection\nja.epsilon, selection.select",
        "ja.epsilon(selection.select(run, selection.Geometric(0.1)), 1e-5)",
        RUN,
    ),
    "plan of a tuning": Line(
        JAXACCT + "from jaxacct import selection\nfrom jaxacct.training import Plan",
        "Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, expected_batch_size=512, epochs=20,\n"
        "     repetitions=selection.Geometric(0.1))",
    ),
    "1,000 epsilon": Line(
        JAXACCT + "import numpy as np\nja.epsilon, ja.dp_sgd",
        "ja.epsilon(ja.dp_sgd(sigma, q, steps), 1e-5)",
        MIXED + "sigma = rng.uniform(0.5, 5, 1000)",
    ),
    "1,000 calibrations": Line(
        JAXACCT + "import numpy as np\nja.calibrate_noise_multiplier",
        "ja.calibrate_noise_multiplier(target, 1e-5, q, steps)",
        MIXED + "target = 10 ** rng.uniform(-0.5, 1, 1000)",
    ),
    "main job, 1,120 rows": Line(
        JAXACCT + "ja.sweep", f"ja.sweep({str(ROOT / 'examples' / 'dpsgd_grid.toml')!r}, out='grid.csv')"
    ),
    "plot of profiles": Line(
        "from jaxacct import cli\nfrom jaxacct.cli import files",
        "assert cli.main(line.split()) == 0",
        "line = 'plot grid.csv --kind profile --where ' + WHERE + ' --out profiles.png'",
        package="matplotlib",
    ),
    "dp_accounting: epsilon": Line(
        "import dp_accounting\nfrom dp_accounting.pld import PLDAccountant",
        "PLDAccountant().compose(event).get_epsilon(1e-5)",
        "event = dp_accounting.SelfComposedDpEvent(\n"
        "    dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000)",
        package="dp_accounting",
    ),
    "dp_accounting: calibration": Line(
        "import dp_accounting\nfrom dp_accounting.pld import PLDAccountant",
        "dp_accounting.calibrate_dp_mechanism(PLDAccountant, make, 2.0, 1e-5)",
        "make = lambda noise: dp_accounting.SelfComposedDpEvent(\n"
        "    dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(noise)), 10_000)",
        package="dp_accounting",
    ),
}
"""What is timed, by the name that --only takes."""
PLOTTED = "name=MNIST,target_delta=1e-5,epochs=10,batch_size=128"
"""The rows of grid.csv that the plot shows, as in the README; the line "main job" writes the file."""
PROCESS = """
import json, os, sys, time
line, grid = json.loads(sys.argv[1]), sys.argv[2]
names = {"WHERE": grid}
def clocks():
    return time.perf_counter(), time.process_time()
def timed(code):
    begin = clocks()
    exec(code, names)
    return [after - before for before, after in zip(begin, clocks(), strict=True)]
told = {"import": timed(line["imports"])}
exec(line["before"], names)
told["call"] = timed(line["call"])
if "jaxacct" in sys.modules:
    import jaxacct
    info = jaxacct.cache_info()
    told |= {"compiling": info.compile_seconds, "loading": info.load_seconds}
    told |= {"compiled": info.compiled, "loaded": info.loaded}
print(json.dumps(told), file=sys.stderr)
"""
"""Times the import and the call, in a process of its own."""


def once(line: Line, cache: str, folder: str) -> dict:
    """The figures of one process."""
    environment = {**os.environ, "JAXACCT_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["PYTHONPYCACHEPREFIX"] = str(Path(folder, "bytecode"))
    for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    Path(folder, "grid.csv").unlink(missing_ok=True) if "out=" in line.call else None
    command = [sys.executable, "-c", PROCESS, json.dumps(line._asdict()), PLOTTED]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    told = json.loads(done.stderr.splitlines()[-1])
    flat = {f"{what}_{clock}": told[what][i] for what in ("import", "call") for i, clock in enumerate(("wall", "cpu"))}
    return flat | {name: told[name] for name in ("compiling", "loading", "compiled", "loaded") if name in told}


def measure(line: Line, repeats: int, folder: str) -> dict[str, dict[str, float]]:
    """Medians with an empty cache, and with the cache that the call before has filled."""
    samples: dict[str, list[dict]] = {"empty": [], "full": []}
    with tempfile.TemporaryDirectory() as cache:
        once(line, cache, folder)  # writes the bytecode of what is imported, as an installation has it
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind in samples if "ja" in line.imports else ("empty",):
                samples[kind].append(once(line, cache, folder))
    return {
        kind: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for kind, found in samples.items()
        if found
    }


def row(name: str, kind: str, found: dict[str, float]) -> str:
    """A line of the Markdown table."""
    times = [f"{found[f'{what}_{clock}']:.2f}" for what in ("import", "call") for clock in ("wall", "cpu")]
    parts = [f"{found['compiling']:.2f}", f"{found['loading']:.2f}"] if "compiling" in found else ["", ""]
    return f"| {name} | {kind} | {' | '.join(times + parts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind (default 3); medians are shown")
    parser.add_argument("--only", action="append", choices=LINES, help="only this line; may be given several times")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON, too")
    options = parser.parse_args()
    results = {}
    print("| call | cache | import, wall s | import, CPU s | call, wall s | call, CPU s | of it compiling | loading |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or LINES:
            line = LINES[name]
            if line.package and not importlib.util.find_spec(line.package):
                print(f"| {name} | {line.package} is not installed | | | | | | |", flush=True)
                continue
            if "grid.csv" in line.before and not Path(folder, "grid.csv").exists():
                once(LINES["main job, 1,120 rows"], str(Path(folder, "cache")), folder)
            results[name] = measure(line, options.repeats, folder)
            for kind, found in results[name].items():
                print(row(name, kind, found), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
