"""Rows a second of every public question, warm, so that every slow question is seen.

    python benchmarks/questions.py [--rows 1000] [--only NAME ...] [--limit 60] [--json]

Each question is asked with 8 rows to compile, with 8 rows to guess its rate, and then with --rows rows, or with as many
as by the guess take half of --limit, if these are fewer.  If that call takes less than half of --limit, it is repeated
and the repetition counts.  CPU time is given, too: other work on the machine changes it less.  "points" is the number
of values of the base's profile, or of the integrand, that a row takes, where the method's constants decide that number.
Rates below 1,000 rows a second of wall time are marked.  --only takes beginnings of names.
"""

import argparse
import json
import time

import numpy as np

import jaxacct as ja
from jaxacct import selection

SLOW = 1000.0
"""Rows a second below which a question is marked."""
FIRST_ROWS = 8
"""Rows with which a question is compiled and its rate is guessed."""


def questions():
    """By name: (function that asks the question with n rows, number of values that a row takes or None)."""
    noise = lambda n: np.random.default_rng(0).uniform(0.7, 8.0, n)
    gaussian = lambda n: ja.Gaussian(noise(n))
    sgd = lambda n: ja.dp_sgd(noise(n), 0.01, 1000)
    chosen = lambda law, **options: lambda n: selection.select(gaussian(n), law, **options)
    geometric, poisson, binomial = selection.Geometric(0.1), selection.Poisson(10.0), selection.Binomial(20, 0.5)
    found = {}
    for name, made in {"Gaussian": gaussian, "Laplace": lambda n: ja.Laplace(noise(n)), "dp_sgd": sgd}.items():
        found[f"epsilon {name}"] = (lambda n, made=made: ja.epsilon(made(n), 1e-5), None)
        found[f"delta {name}"] = (lambda n, made=made: ja.delta(made(n), 1.0), None)
        found[f"tradeoff {name}"] = (lambda n, made=made: ja.profile(made(n)).tradeoff(0.1), None)
        found[f"renyi {name}"] = (lambda n, made=made: ja.profile(made(n)).renyi(4.0), None)
        found[f"epsilon_gradient {name}"] = (lambda n, made=made: ja.epsilon_gradient(made(n), 1e-5), None)
    target = {"target_delta": 1e-5}
    eps = lambda n: np.linspace(0.5, 8.0, n)
    found["calibrate_noise_multiplier"] = (
        lambda n: ja.calibrate_noise_multiplier(target_epsilon=eps(n), sampling_probability=0.01, steps=1000, **target),
        None,
    )
    found["calibrate_steps"] = (
        lambda n: ja.calibrate_steps(target_epsilon=eps(n), noise_multiplier=1.0, sampling_probability=0.01, **target),
        None,
    )
    found["calibrate_sampling_probability"] = (
        lambda n: ja.calibrate_sampling_probability(target_epsilon=eps(n), noise_multiplier=1.0, steps=1000, **target),
        None,
    )
    rates = {"sampling_probability": 0.01, "steps": 1000}
    risks = {
        "target_advantage": lambda n: {"target_advantage": np.linspace(0.05, 0.5, n)},
        "target_tpr": lambda n: {"target_tpr": np.linspace(0.02, 0.2, n), "at_fpr": 0.01},
        "target_bayes_success": lambda n: {"target_bayes_success": np.linspace(0.55, 0.75, n), "prior": 0.5},
        "target_mu": lambda n: {"target_mu": np.linspace(0.5, 3.0, n)},
    }
    for name, given in risks.items():
        found[f"calibrate_noise_multiplier {name}"] = (
            lambda n, given=given: ja.calibrate_noise_multiplier(**given(n), **rates),
            None,
        )
    found["risk dp_sgd"] = (lambda n: ja.risk(sgd(n)), None)
    found["advantage dp_sgd"] = (lambda n: ja.profile(sgd(n)).advantage(), None)
    found["true_positive_rate dp_sgd"] = (lambda n: ja.profile(sgd(n)).true_positive_rate(0.01), None)
    found["rdp_epsilon dp_sgd"] = (lambda n: ja.rdp_epsilon(sgd(n), 1e-5), None)
    found["calibrate Gaussian"] = (
        lambda n: ja.calibrate(ja.Gaussian, target_epsilon=eps(n), bracket=(0.1, 100.0), **target),
        None,
    )
    known = {"monotone_score": 233, "privacy_profile": 49 + 4 * 17, "renyi": 2 * 241, "envelope": 4001}
    for bound, values in known.items():
        for name, law in {"geometric": geometric, "Poisson": poisson, "binomial": binomial}.items():
            if isinstance(law, selection.BOUNDS[bound].laws):
                made = chosen(law, bound=bound)
                found[f"select {bound} {name} epsilon"] = (lambda n, made=made: ja.epsilon(made(n), 1e-5), values)
                found[f"select {bound} {name} delta"] = (lambda n, made=made: ja.delta(made(n), 1.0), values)
    exact, adaptive = chosen(geometric), chosen(poisson, candidates="adaptive")
    found["select worst_case geometric epsilon"] = (lambda n: ja.epsilon(exact(n), 1e-5), None)
    found["select worst_case geometric delta"] = (lambda n: ja.delta(exact(n), 1.0), None)
    found["select adaptive Poisson epsilon"] = (lambda n: ja.epsilon(adaptive(n), 1e-5), None)
    found["select top=2 geometric epsilon"] = (
        lambda n: ja.epsilon(selection.select(gaussian(n), geometric, top=2), 1e-5),
        None,
    )
    found["repetitions_allowed"] = (lambda n: ja.repetitions_allowed(gaussian(n), 12.0, 1e-5), None)
    return found


def timed(ask, rows):
    """(wall seconds, CPU seconds) of a question."""
    wall, busy = time.perf_counter(), time.process_time()
    ask(rows)
    return time.perf_counter() - wall, time.process_time() - busy


def measured(name, ask, values, rows, limit):
    """One line of the table."""
    try:
        timed(ask, FIRST_ROWS)
        wall, _ = timed(ask, FIRST_ROWS)
        rows = int(min(rows, max(FIRST_ROWS, limit / 2.0 / wall * FIRST_ROWS)))
        first, _ = timed(ask, rows)
        wall, busy = timed(ask, rows) if first < limit / 2.0 else (first, float("nan"))
    except ja.InputError as error:
        return {"question": name, "refused": str(error)}
    rate = rows / wall
    return {
        "question": name,
        "rows": rows,
        "rows_per_second": rate,
        "cpu_us_per_row": busy / rows * 1e6,
        "points": values,
        "slow": rate < SLOW,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name, (ask, values) in questions().items():
        if not name.startswith(tuple(options.only)):
            continue
        line = measured(name, ask, values, options.rows, options.limit)
        if options.json:
            print(json.dumps(line), flush=True)
        elif "refused" in line:
            print(f"{name:44} refused: {line['refused']}", flush=True)
        else:
            points = "-" if values is None else values
            mark = "  SLOW" if line["slow"] else ""
            print(
                f"{name:44}{line['rows']:8}{line['rows_per_second']:12.0f} rows/s"
                f"{line['cpu_us_per_row']:12.0f} us CPU/row{points:>8} points{mark}",
                flush=True,
            )


if __name__ == "__main__":
    main()
