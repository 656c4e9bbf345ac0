"""The answers and times of every installed accountant of DP-SGD for the same few questions.

    python benchmarks/peers.py [--python opake=/path/to/python3.13] [--repeats 3] [--json]

Each library answers in a process of its own, one configuration at a time; jaxacct also answers 1,000 copies of each
question at once.  Seconds are medians after a first call, without the imports.  The number in brackets is
answer / lower - 1, with jaxacct's certified lower end: a sound answer never has less than -1e-9.  --python names the
interpreter of a library that needs another one, or an environment of its own.
"""

import argparse
import json
import subprocess
import sys

import numpy as np

import jaxacct as ja

QUESTIONS = {
    "ordinary": (1.0, 0.01, 1000, 1e-5),
    "longer": (0.8, 0.004, 10_000, 1e-5),
    "few hits": (0.8, 0.001, 1000, 1e-5),
    "delta 1e-10": (1.0, 0.01, 1000, 1e-10),
    "delta 1e-15": (1.0, 0.01, 1000, 1e-15),
}
"""noise multiplier, sampling probability, steps, delta."""
ANSWERS = {
    "jaxacct": """
import jaxacct as ja
def answer(sigma, q, steps, delta):
    return float(ja.epsilon(ja.dp_sgd(sigma, q, steps), delta).upper)
""",
    "dp_accounting": """
from dp_accounting.pld import privacy_loss_distribution
def answer(sigma, q, steps, delta):
    one = privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=q)
    return one.self_compose(steps).get_epsilon_for_delta(delta)
""",
    "prv_accountant": """
from prv_accountant import PRVAccountant
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism
def answer(sigma, q, steps, delta):
    law = PoissonSubsampledGaussianMechanism(noise_multiplier=sigma, sampling_probability=q)
    accountant = PRVAccountant(
        prvs=law, max_self_compositions=steps, eps_error=1e-3, delta_error=delta * 1e-3
    )
    return accountant.compute_epsilon(delta=delta, num_self_compositions=[steps])[2]
""",
    "opake": """
import opake.api.accounting.core.opake_accounting as native
def answer(sigma, q, steps, delta):
    one = native.poisson_pld(native.gaussian_pld(sigma, native.DiscretizationConfig()), q)
    return one.self_compose(steps).epsilon_at(delta)
""",
    "PLD_accounting": """
import warnings
from dp_accounting.pld import privacy_loss_distribution
from PLD_accounting.subsample_pld import subsample_pld
warnings.simplefilter("ignore")
def answer(sigma, q, steps, delta):
    base = privacy_loss_distribution.from_gaussian_mechanism(sigma)
    return subsample_pld(pld=base, sampling_probability=q).self_compose(steps).get_epsilon_for_delta(delta)
""",
}
"""By library: code that returns its epsilon, written as the library's own documentation says."""
ASK = """
import json, statistics, sys, time
questions, repeats = json.loads(sys.argv[1])
found = {}
for name, asked in questions.items():
    try:
        epsilon, seconds = answer(*asked), []
        for _ in range(repeats):
            begin = time.perf_counter()
            answer(*asked)
            seconds.append(time.perf_counter() - begin)
        found[name] = [float(epsilon), statistics.median(seconds)]
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}".split(chr(10))[0]
print(json.dumps(found))
"""


def asked(library, python, repeats):
    """Answers of a library by question: [epsilon, seconds], or what it raised; None where it is not installed."""
    command = [python, "-c", ANSWERS[library] + ASK, json.dumps([QUESTIONS, repeats])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def batch_seconds():
    """Seconds for each of 1,000 copies of a question, answered at once."""
    import time

    found = {}
    for name, (sigma, q, steps, delta) in QUESTIONS.items():
        many = ja.dp_sgd(np.full(1000, sigma), q, steps)
        ja.epsilon(many, delta)
        begin = time.perf_counter()
        ja.epsilon(many, delta)
        found[name] = (time.perf_counter() - begin) / 1000
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="LIBRARY=PATH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in options.python)
    least = {name: float(ja.epsilon(ja.dp_sgd(s, q, n), d).lower) for name, (s, q, n, d) in QUESTIONS.items()}
    answers = {name: asked(name, pythons.get(name, sys.executable), options.repeats) for name in ANSWERS}
    if options.json:
        print(json.dumps({"lower": least, "answers": answers, "batch_seconds": batch_seconds()}))
        return
    print(f"{'':16}" + "".join(f"{name:>30}" for name in QUESTIONS))
    for name, found in answers.items():
        cells = []
        for question in QUESTIONS:
            value = found and found[question]
            if isinstance(value, list):
                cells.append(f"{value[0]:.6g} ({value[0] / least[question] - 1:+.0e}) {value[1]:.3g} s")
            else:
                cells.append("not installed" if value is None else value[:24])
        print(f"{name:16}" + "".join(f"{cell:>30}" for cell in cells))
    print(f"{'1,000 at once':16}" + "".join(f"{seconds:>28.2g} s" for seconds in batch_seconds().values()))


if __name__ == "__main__":
    main()
