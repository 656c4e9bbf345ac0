"""Risk calibrations and readings beside riskcal and gdpnum, in one run: seconds, values, and the side of the truth.

    pip install "jaxacct[benchmark]"
    python benchmarks/risk.py [--rows 300] [--backend xla] [--json]

The truth is the certified bracket of `ja.risk`.  "below" says that a risk is reported below the truth, "above" that it
is reported above, which is safe, and "missed" that a noise leaves more risk than the target.  CPU seconds stand beside
wall seconds: other work changes them less.  Each batch question of jaxacct is asked once before it is timed.
"""

import argparse
import functools
import json
import time
import warnings

import numpy as np

import jaxacct as ja

RUN = (1.0, 0.01, 1000)
"""Noise multiplier, sampling probability and steps of the readings."""
FPR = 0.001
GRIDS = (1e-3, 1e-4)
"""Discretisation intervals of the loss distributions that riskcal and gdpnum read; 1e-4 is the default of both."""


def timed(question):
    """(answer, seconds of wall time, of CPU)."""
    wall, cpu = time.perf_counter(), time.process_time()
    answer = question()
    return answer, time.perf_counter() - wall, time.process_time() - cpu


def side(value, bounds):
    """Where a reading lies: a risk below the truth is unsafe."""
    return "below (unsafe)" if value < bounds.lower else "above" if value > bounds.upper else "inside"


def ours(rows, backend="auto"):
    """Yield the seconds of each of our calibrations, which run on `backend`, and of each of our readings."""
    rng = np.random.default_rng(0)
    q, steps = 10.0 ** rng.uniform(-2.5, -0.7, rows), np.round(10.0 ** rng.uniform(2.0, 4.0, rows))
    run = {"sampling_probability": q, "steps": steps}
    power = rng.uniform(0.01, 0.1, rows)
    noise = functools.partial(ja.calibrate_noise_multiplier, backend=backend)
    typical, typical_mu = typical_runs(rows)
    few = {name: column[: max(rows // 10, 1)] for name, column in run.items()}
    questions = {
        "noise for epsilon": lambda: noise(2.0, 1e-5, **run),
        "noise for advantage": lambda: noise(target_advantage=power, **run),
        "noise for tpr": lambda: noise(target_tpr=power, at_fpr=FPR, **run),
        "noise for bayes_success": lambda: noise(target_bayes_success=0.9 + 0.1 * power, prior=0.1, **run),
        "noise for mu": lambda: noise(target_mu=1.0, **run),
        "noise for mu, typical runs": lambda: noise(target_mu=typical_mu, **typical),
        "tpr reading": lambda: ja.profile(ja.dp_sgd(1.0, q, steps)).true_positive_rate(FPR),
        "mu reading": lambda: ja.profile(ja.dp_sgd(1.0, **few)).gdp_mu(),
    }
    for name, question in questions.items():
        question()
        answer, wall, cpu = timed(question)
        size, good = np.size(answer.ok), int(np.sum(answer.ok))
        row = {"question": name, "rows": size, "ok": good, "seconds": wall, "cpu": cpu}
        yield row | {"per second": size / wall}


def typical_runs(rows):
    """Sampling probabilities and steps of runs with noise 0.6 to 2, and the runs' mu by the central limit theorem."""
    rng, tried = np.random.default_rng(0), 40 * rows
    q, steps = 10.0 ** rng.uniform(-3.0, np.log10(0.05), tried), np.round(10.0 ** rng.uniform(2.3, 4.3, tried))
    mu = q * np.sqrt(steps * np.expm1(1.0 / rng.uniform(0.6, 2.0, tried) ** 2))
    kept = np.flatnonzero((mu > 0.3) & (mu < 2.0))[:rows]
    return {"sampling_probability": q[kept], "steps": steps[kept]}, mu[kept]


def theirs(tell):
    """Pass to `tell` each reading of riskcal and gdpnum, and calibrations by riskcal and jaxacct, for RUN."""
    from dp_accounting.pld import privacy_loss_distribution
    from gdpnum import PLDConverter
    from riskcal import analysis
    from riskcal.calibration import dpsgd

    noise, q, steps = RUN
    truth = ja.risk(ja.dp_sgd(*RUN), fpr=FPR)
    tpr, mu = truth["true_positive_rate", FPR], truth["gdp_mu"]
    tell({"question": f"truth, tpr at {FPR:g}", "value": float(tpr.estimate), "side": "certified"})
    tell({"question": "truth, mu above 1e-10", "value": float(mu.estimate), "side": "certified"})

    def add(name, question, bounds):
        try:
            value, wall, cpu = timed(question)
        except Exception as error:  # a failure is a row of the table
            tell({"question": name, "side": f"failed: {error}"[:80]})
            return
        told = side(float(value), bounds)
        tell({"question": name, "value": float(value), "seconds": wall, "cpu": cpu, "side": told})

    for grid in GRIDS:
        pld, wall, cpu = timed(
            lambda grid=grid: privacy_loss_distribution.from_gaussian_mechanism(
                standard_deviation=noise, sampling_prob=q, value_discretization_interval=grid
            ).self_compose(steps)
        )
        tell({"question": f"dp_accounting PLD, interval {grid:g}", "seconds": wall, "cpu": cpu, "side": ""})
        add("riskcal advantage", lambda pld=pld: analysis.get_advantage_from_pld(pld), truth["advantage"])
        add("riskcal tpr", lambda pld=pld: 1.0 - analysis.get_beta_from_pld(pld, alpha=FPR), tpr)
        add("gdpnum tpr", lambda pld=pld: 1.0 - PLDConverter(pld).get_beta(FPR), tpr)
        add("gdpnum mu", lambda pld=pld: PLDConverter(pld).get_mu(), mu)

    def calibrated(name, question, target, read):
        try:
            value, wall, cpu = timed(question)
        except Exception as error:
            tell({"question": name, "side": f"failed: {error}"[:80]})
            return
        reached = read(ja.dp_sgd(float(value), q, steps))
        kept = "kept" if reached.upper <= target else "missed (unsafe)" if reached.lower > target else "undecided"
        tell({"question": name, "value": float(value), "seconds": wall, "cpu": cpu, "side": kept})

    given = {"sampling_probability": q, "steps": steps}
    tpr_of = lambda run: ja.profile(run).true_positive_rate(FPR)
    calibrated(
        "jaxacct noise for advantage .1",
        lambda: ja.calibrate_noise_multiplier(target_advantage=0.1, **given).value,
        0.1,
        lambda run: ja.profile(run).advantage(),
    )
    calibrated(
        "riskcal noise for advantage .1",
        lambda: dpsgd.find_noise_multiplier_for_advantage(advantage=0.1, sample_rate=q, num_steps=steps),
        0.1,
        lambda run: ja.profile(run).advantage(),
    )
    calibrated(
        "jaxacct noise for tpr .004",
        lambda: ja.calibrate_noise_multiplier(target_tpr=0.004, at_fpr=FPR, **given).value,
        0.004,
        tpr_of,
    )
    calibrated(
        "riskcal noise for tpr .004",
        lambda: dpsgd.find_noise_multiplier_for_err_rates(alpha=FPR, beta=0.996, sample_rate=q, num_steps=steps),
        0.004,
        tpr_of,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--backend", choices=["auto", "numpy", "xla"], default="auto", help="of our calibrations")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the compared packages warn
    tell = lambda row: print(json.dumps(row) if options.json else shown(row), flush=True)
    theirs(tell)
    for row in ours(options.rows, options.backend):
        tell(row)


def shown(row):
    """One line for a person."""
    clock = f"{row['seconds']:8.2f} s {row['cpu']:8.2f} s CPU" if "seconds" in row else ""
    if "rows" in row:
        told = f"{row['ok']} of {row['rows']} rows, {row['per second']:.0f} a second"
    else:
        told = f"{row['value']:.8g}  {row['side']}" if "value" in row else row["side"]
    return f"{row['question']:<36} {clock:>26}  {told}"


if __name__ == "__main__":
    main()
