"""Random allocation, capped Poisson sampling and groups: jaxacct's widths and seconds beside those of its peers.

    python benchmarks/batch_rules.py [--python opake=/path/to/python3.13] [--repeats 3] [--count 1000] [--json]

Each library answers in a process of its own, one question at a time; seconds are medians after a first call, without
the imports.  A width is shown where a library gives both ends.  The number in brackets is upper / lower - 1, with the
library's upper end and jaxacct's certified lower end: a sound answer never has less than -1e-9.  Where jaxacct has no
lower end, its upper end is the divisor.  Then come jaxacct's warm rates for a batch, medians of the repeats, with CPU
seconds: epsilons of one round, calibrations of the noise of one round, and epsilons of composed rounds.
A library that needs another interpreter, or an environment of its own, is asked through the one that --python names.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

import jaxacct as ja

QUESTIONS = {
    "allocation, 1 round": ("allocation", 1.0, 100, 1, 1e-5),
    "allocation, 10 rounds": ("allocation", 2.0, 100, 10, 1e-5),
    "capped Poisson": ("capped", 1.0, 0.05, 1000, 75, 1000, 1e-5),
    "group of 5": ("group", 1.0, 0.01, 1000, 5, 1e-5),
}
"""Kind and arguments: (noise, slots, rounds, delta) of an allocation, (noise, q, n, cap, steps, delta) of capped
Poisson sampling, (noise, q, steps, group, delta) of a group."""
ANSWERS = {
    "jaxacct": """
import jaxacct as ja
def allocation(sigma, slots, rounds, delta):
    found = ja.epsilon(ja.repeat(ja.RandomAllocation(ja.Gaussian(sigma), slots=slots), rounds), delta)
    return float(found.lower), float(found.upper)
def capped(sigma, q, n, cap, steps, delta):
    one = ja.TruncatedPoissonSampled(ja.Gaussian(sigma), sampling_probability=q, dataset_size=n, cap=cap)
    found = ja.epsilon(ja.repeat(one, steps), delta)
    return float(found.lower), float(found.upper)
def group(sigma, q, steps, size, delta):
    found = ja.epsilon(ja.repeat(ja.PoissonSampled(ja.Gaussian(sigma), q, group=size), steps), delta)
    return float(found.lower), float(found.upper)
""",
    "dp_accounting": """
import dp_accounting as dp
from dp_accounting import pld
def composed(relation, event, steps, delta):
    accountant = pld.PLDAccountant(relation)
    return None, accountant.compose(dp.SelfComposedDpEvent(event, steps)).get_epsilon(delta)
def allocation(sigma, slots, rounds, delta):
    event = dp.RandomAllocationDpEvent  # in its development version
    return composed(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, event(dp.GaussianDpEvent(sigma), slots, 1), rounds, delta)
def capped(sigma, q, n, cap, steps, delta):
    event = dp.TruncatedSubsampledGaussianDpEvent(n, q, cap, sigma)
    return composed(dp.NeighboringRelation.REPLACE_SPECIAL, event, steps, delta)
def group(sigma, q, steps, size, delta):
    from scipy.stats import binom
    sizes = list(range(size + 1))
    event = dp.dp_event.MixtureOfGaussiansDpEvent(sigma, sizes, [float(x) for x in binom.pmf(sizes, size, q)])
    return composed(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, event, steps, delta)
""",
    "PLD_accounting": """
import warnings
from PLD_accounting.random_allocation_api import gaussian_allocation_epsilon_range
warnings.simplefilter("ignore")
def allocation(sigma, slots, rounds, delta):
    upper, lower = gaussian_allocation_epsilon_range(delta=delta, sigma=sigma, num_steps=slots, num_epochs=rounds)
    return lower, upper
""",
    "opake": """
import opake.api.accounting.core.opake_accounting as native
def allocation(sigma, slots, rounds, delta):
    one = native.random_allocation_gaussian_pld(sigma, slots, 1, native.DiscretizationConfig())
    return None, one.self_compose(rounds).epsilon_at(delta)
""",
}
"""By library: code that returns its (lower, upper), written as the library's own documentation says."""
ASK = """
import json, statistics, sys, time
questions, repeats = json.loads(sys.argv[1])
found = {}
for name, (kind, *asked) in questions.items():
    if kind not in globals():
        found[name] = "not offered"
        continue
    try:
        ends, seconds = globals()[kind](*asked), []
        while len(seconds) < repeats and sum(seconds) < 60:
            begin = time.perf_counter()
            globals()[kind](*asked)
            seconds.append(time.perf_counter() - begin)
        found[name] = [*ends, statistics.median(seconds)]
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}".split(chr(10))[0]
print(json.dumps(found))
"""


def asked(library, python, repeats):
    """Answers of a library by question: [lower, upper, seconds], or what it raised; None where it is not installed."""
    command = [python, "-c", ANSWERS[library] + ASK, json.dumps([QUESTIONS, repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def rounds_of(rng, count):
    """Noise multipliers from .5 to 10, slots from 10 to 10,000 with t sigma^2 >= 60, and deltas from 1e-12 to 1e-3."""
    sigma, slots = np.exp(rng.uniform(np.log(0.5), np.log(10.0), count)), 10.0 ** rng.uniform(1.0, 4.0, count)
    return sigma, np.ceil(np.maximum(slots, 60.0 / sigma**2)), 10.0 ** rng.uniform(-12.0, -3.0, count)


def rates(count, repeats):
    """(seconds, CPU seconds, questions, largest width) of each kind of question, warm.

    Composed rounds have a noise of their own in every repeat, so that their pairs are made anew.
    """
    rng = np.random.default_rng(0)
    sigma, slots, delta = rounds_of(rng, count)
    one = lambda s, some=slice(None): ja.RandomAllocation(ja.Gaussian(s), slots=slots[some])
    few, some = slice(0, max(count // 5, 1)), slice(0, max(count // 50, 1))
    epsilon = ja.epsilon(one(sigma), delta).upper
    target = np.where(epsilon > 0.0, epsilon, 1.0)[few]
    asks = {
        "epsilon of one round": lambda _: ja.epsilon(one(sigma), delta),
        "noise of one round": lambda _: (
            ja.calibrate(
                lambda s: one(s, few),
                target_epsilon=target,
                target_delta=delta[few],
                bracket=(0.3 * sigma[few], 3.0 * sigma[few]),
                monotone=True,
            ).epsilon
        ),
        "epsilon of 100 rounds": lambda turn: ja.epsilon(
            ja.repeat(one(sigma[some] * (1.0 + 1e-6 * turn), some), 100), delta[some]
        ),
    }
    found = {}
    for name, ask in asks.items():
        bounds, walls, cpus = ask(0), [], []
        for turn in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            ask(turn + 1)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        width = np.max(np.where(bounds.upper > 0.0, (bounds.upper - bounds.lower) / bounds.upper, 0.0))
        found[name] = statistics.median(walls), statistics.median(cpus), bounds.upper.size, float(width)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="LIBRARY=PATH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in options.python)
    answers = {name: asked(name, pythons.get(name, sys.executable), options.repeats) for name in ANSWERS}
    own = rates(options.count, options.repeats)
    if options.json:
        print(json.dumps({"answers": answers, "rates": own}))
        return
    print(f"{'':16}" + "".join(f"{name:>40}" for name in QUESTIONS))
    for name, found in answers.items():
        cells = []
        for question in QUESTIONS:
            value = found and found[question]
            if isinstance(value, list):
                lower, upper, seconds = value
                least = answers["jaxacct"][question][0] or answers["jaxacct"][question][1]  # there may be no lower end
                above = upper / least - 1
                width = "" if lower is None else f" width {1 - lower / upper:.0e}"
                cells.append(f"{upper:.6g} ({above:+.0e}){width} {seconds:.3g} s")
            else:
                cells.append("not installed" if value is None else value[:30])
        print(f"{name:16}" + "".join(f"{cell:>40}" for cell in cells))
    for name, (wall, cpu, size, width) in own.items():
        print(f"{name}: {size / wall:,.0f} a second ({1e3 * cpu / size:.2f} CPU ms each), largest width {width:.0e}")


if __name__ == "__main__":
    main()
