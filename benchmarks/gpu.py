"""Epsilon queries and calibrations on JAX's default device, GPU or CPU, and whether its brackets agree with the CPU's.

    python benchmarks/gpu.py [--count 2000] [--repeats 5] [--compare 200] [--widen 1] [--json]

DP-SGD with noise multiplier .5 to 5, sampling probability 1e-4 to .3 and steps 100 to 1e5, log-uniform, kept where
the central limit of the privacy loss has mu in [.1, 2].  "cold" is the first call; "warm" is the median of later calls.
"compiling" sums the seconds that JAX reports for compilations: several run at a time, so the sum may exceed "cold".
The first --compare configurations are solved again by a process that sees the CPU alone; 0 leaves this out.
--widen multiplies the number of configurations in one call of a program: wide devices need more of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

import jaxacct as ja
from jaxacct.calibration import dp_sgd_search
from jaxacct.engines import contour

DELTA = 1e-5
"""delta of every question."""
COMPILING = "/jax/core/compile/backend_compile_duration"
"""The event by which JAX reports the seconds of a compilation."""


def configurations(count, seed=0):
    """(sigma, q, steps), the same ones on every platform."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: np.exp(rng.uniform(np.log(low), np.log(high), 40 * count + 400))
    sigma, q, steps = draw(0.5, 5), draw(1e-4, 0.3), np.round(draw(100, 1e5))
    mu = q * np.sqrt(steps * np.expm1(sigma**-2))
    rows = np.flatnonzero((mu > 0.1) & (mu < 2.0))[:count]
    return sigma[rows], q[rows], steps[rows]


def questions(sigma, q, steps):
    """The two questions by name; the target epsilon of a calibration is 4 mu, mu by the central limit."""
    target = 4.0 * q * np.sqrt(steps * np.expm1(sigma**-2))
    return {
        "epsilon": lambda: ja.epsilon(ja.dp_sgd(sigma, q, steps), DELTA),
        "calibration": lambda: ja.calibrate_noise_multiplier(target, DELTA, q, steps),
    }


def answers(count):
    """What is compared, as flat arrays."""
    asked = questions(*configurations(count))
    bounds, solved = asked["epsilon"](), asked["calibration"]()
    return {"lower": bounds.lower, "upper": bounds.upper, "sigma": solved.value}


def measure(solve, count, repeats, compiled):
    """Cold, compiling and warm seconds of one question, and its answer."""
    compiled.clear()
    begin = time.perf_counter()
    result = solve()
    cold = time.perf_counter() - begin
    programs, seconds = len(compiled), sum(compiled)
    warm = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = solve()
        warm.append(time.perf_counter() - begin)
    bounds = getattr(result, "epsilon", result)
    return {
        "configurations": count,
        "cold seconds": cold,
        "programs compiled": programs,
        "compiling seconds, summed": seconds,
        "warm seconds": statistics.median(warm),
        "warm seconds, least": min(warm),
        "configurations per second": count / statistics.median(warm),
        "relative width, median": float(np.median(bounds.relative_width)),
        "relative width, largest": float(np.max(bounds.relative_width)),
        "not ok": int(np.sum(bounds.status != "ok")),
        "answered by the lattice": int(np.sum(bounds.engine == "lattice")),
    }


def agreement(mine, reference):
    """How two devices' answers to the same questions differ."""
    meet = (mine["lower"] <= reference["upper"]) & (reference["lower"] <= mine["upper"])
    off = {name: np.abs(mine[name] - reference[name]) for name in ("lower", "upper", "sigma")}
    units = {name: off[name] / np.spacing(reference[name]) for name in off}
    return {
        "compared with the CPU": meet.size,
        "epsilon brackets that do not meet": int(np.sum(~meet)),
        "brackets equal to the last bit": int(np.sum((off["lower"] == 0) & (off["upper"] == 0))),
        "upper end apart, units in the last place, median": float(np.median(units["upper"])),
        "upper end apart, units in the last place, largest": float(np.max(units["upper"])),
        "upper end apart, relative, largest": float(np.max(off["upper"] / reference["upper"])),
        "lower end apart, relative, largest": float(np.max(off["lower"] / reference["upper"])),
        "noise multipliers equal to the last bit": int(np.sum(off["sigma"] == 0)),
        "noise multiplier apart, relative, largest": float(np.max(off["sigma"] / reference["sigma"])),
    }


def on_the_cpu(count):
    """`answers` by a process that sees the CPU alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "answers.npz")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, __file__, "--answer", str(count), path], env=environment, check=True)
        with np.load(path) as held:
            return dict(held)


def widen(times):
    """Multiply the number of configurations in each call of a program."""
    for module, name in ((contour, "LADDER"), (contour, "PLAIN"), (dp_sgd_search, "PLAIN")):
        setattr(module, name, tuple(rung._replace(chunk=times * rung.chunk) for rung in getattr(module, name)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="configurations a batch")
    parser.add_argument("--repeats", type=int, default=5, help="warm calls")
    parser.add_argument("--compare", type=int, default=200, help="configurations also solved on the CPU")
    parser.add_argument("--widen", type=int, default=1, help="times as many configurations in one call of a program")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        np.savez(options.answer[1], **answers(int(options.answer[0])))
        return

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(seconds) if event == COMPILING else None
    )
    widen(options.widen)
    figures = {"platform": jax.default_backend(), "devices": [device.device_kind for device in jax.local_devices()]}
    show(figures, options.json)
    for name, solve in questions(*configurations(options.count)).items():
        figures[name] = measure(solve, options.count, options.repeats, compiled)
        show({name: figures[name]}, options.json)
    if options.compare:
        figures["agreement"] = agreement(answers(options.compare), on_the_cpu(options.compare))
        show({"agreement": figures["agreement"]}, options.json)
    if options.json:
        print(json.dumps(figures))


def show(figures, quiet):
    """Print figures unless `quiet`; called for each part, as the next part may take minutes to compile."""
    for name, value in figures.items():
        if quiet:
            return
        if not isinstance(value, dict):
            print(f"{name:52s} {value}", flush=True)
            continue
        print(f"\n{name}", flush=True)
        for key, each in value.items():
            print(f"  {key:50s} {each:12.4g}", flush=True)


if __name__ == "__main__":
    main()
