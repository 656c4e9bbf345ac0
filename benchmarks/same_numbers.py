"""Every number that a reader may rely on, to the last digit, before and after a change that must change none.

    python benchmarks/same_numbers.py --out before.json     # in a checkout of the old code
    python benchmarks/same_numbers.py --out after.json      # in the new one
    python benchmarks/same_numbers.py --compare before.json after.json

Both files must be made on one machine, as libraries differ in the last digit between machines.  Numbers are written
as float.hex(); what raises is written as its message; what a command prints is written as it is, without timings.  A
question about a public name that a checkout lacks is left out of its file, and the comparison says so.
"""

import argparse
import contextlib
import csv
import io
import json
import pathlib
import re
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TARGETS = (0.1, 1.0, 8.0)


def flat(value):
    """Bounds, calibrations, pytrees, arrays and numbers as nested lists of strings."""
    if isinstance(value, str):  # which has methods called lower and upper
        return [value]
    names = ("value", "lower", "estimate", "upper", "kind", "status", "engine", "epsilon")
    held = {name: flat(getattr(value, name)) for name in names if hasattr(value, name)}
    if held and not isinstance(value, np.ndarray):
        return held
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return [float(x).hex() for x in array.reshape(-1)]
    return [str(x) for x in array.reshape(-1)]


def reference():
    """Epsilon and delta of all rows of the reference table, epsilon of some by each engine, and three calibrations."""
    import jaxacct as ja

    rows = list(csv.DictReader((DATA / "dp_sgd.csv").open()))
    names = ("noise_multiplier", "sampling_probability", "steps", "delta", "epsilon")
    sigma, q, steps, delta, epsilon = (np.array([float(row[name]) for row in rows]) for name in names)
    for relation in ("add_or_remove_one", "remove_one", "add_one"):
        yield f"epsilon {relation}", lambda r=relation: ja.epsilon(ja.dp_sgd(sigma, q, steps), delta, relation=r)
        yield f"delta {relation}", lambda r=relation: ja.delta(ja.dp_sgd(sigma, q, steps), epsilon, relation=r)
    few = slice(None, None, 6)
    for engine in ("contour", "lattice"):
        run = ja.dp_sgd(sigma[few], q[few], steps[few])
        yield f"epsilon {engine}", lambda e=engine, m=run: ja.epsilon(m, delta[few], engine=e)
    yield "noise", lambda: ja.calibrate_noise_multiplier(epsilon, delta, q, steps)
    yield "rate", lambda: ja.calibrate_sampling_probability(epsilon, delta, sigma, steps)
    yield "steps", lambda: ja.calibrate_steps(epsilon, delta, sigma, q)
    yield "gradient", lambda: [np.asarray(x).tolist() for x in _leaves(ja.epsilon_gradient(_one(), 1e-5))]


def _one():
    import jaxacct as ja

    return ja.dp_sgd(0.9, 0.02, 500)


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def mechanisms():
    """One of each mechanism, their compositions, and the readings of a profile."""
    import jaxacct as ja

    finite = ja.FiniteOutput([0.5, 0.3, 0.2], [0.1, 0.3, 0.6])
    each = {
        "gaussian": ja.Gaussian([0.5, 2.0, 30.0]),
        "laplace": ja.Laplace([0.5, 2.0]),
        "laplaces": ja.repeat(ja.Laplace(10.0), 50),
        "sampled laplace": ja.repeat(ja.PoissonSampled(ja.Laplace(1.0), 0.05), 200),
        "response": ja.repeat(ja.RandomizedResponse(0.75), 20),
        "finite": ja.repeat(finite, 12),
        "pure": ja.PureDP(1.0),
        "approximate": ja.repeat(ja.ApproximateDP(0.1, 1e-9), 30),
        "discrete gaussian": ja.repeat(ja.DiscreteGaussian(2.0), 10),
        "discrete laplace": ja.repeat(ja.DiscreteLaplace(2.0, 3), 5),
        "exponential": ja.repeat(ja.ExponentialMechanism(0.2), 20),
        "without replacement": ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.1),
        "mixed": ja.compose(ja.dp_sgd(1.0, 0.01, 500), ja.Laplace(10.0), ja.ApproximateDP(0.1, 1e-7)),
        "two steps": ja.dp_sgd([0.8, 3.0], 0.05, 2),
        "few hits": ja.dp_sgd(0.8, 0.001, 1000),
    }
    for name, mechanism in each.items():
        yield f"{name}: epsilon", lambda m=mechanism: ja.epsilon(m, 1e-6)
        yield f"{name}: delta", lambda m=mechanism: ja.delta(m, 0.7)
    run = each["mixed"]
    readings = {
        "advantage": lambda p: p.advantage(),
        "tradeoff": lambda p: p.tradeoff([1e-3, 0.1]),
        "renyi": lambda p: p.renyi([2.0, 8.0]),
        "epsilon": lambda p: p.epsilon(1e-5),
        "delta": lambda p: p.delta([0.5, 2.0]),
    }
    for name, reading in readings.items():
        yield f"profile: {name}", lambda reading=reading: reading(ja.profile(run))


def selections():
    """Laws of K over one Gaussian and over DP-SGD, each bound, and noise for a whole tuning."""
    import jaxacct as ja
    from jaxacct import selection

    laws = {
        "geometric": selection.Geometric(0.1),
        "negative binomial": selection.TruncatedNegativeBinomial(0.5, 0.02),
        "logarithmic": selection.Logarithmic(0.05),
        "poisson": selection.Poisson(10.0),
        "binomial": selection.Binomial(20, 0.5),
        "point": selection.PointMass(4),
    }
    for name, law in laws.items():
        yield f"select {name}", lambda k=law: ja.epsilon(selection.select(ja.Gaussian(4.0), k), 1e-5)
        yield f"select {name}: delta", lambda k=law: ja.delta(selection.select(ja.Gaussian(4.0), k), 1.0)
    for bound in ("envelope", "privacy_profile", "renyi", "monotone_score"):
        law = laws["geometric"]
        yield f"select {bound}", lambda b=bound, k=law: ja.epsilon(selection.select(ja.Gaussian(4.0), k, bound=b), 1e-5)
    sgd = ja.dp_sgd(2.0, 0.01, 500)
    yield "select over dp_sgd", lambda: ja.epsilon(selection.select(sgd, laws["geometric"]), 1e-5)
    adaptive = selection.select(ja.Gaussian(4.0), laws["geometric"], candidates="adaptive")
    yield "select adaptive", lambda: ja.epsilon(adaptive, 1e-5)
    yield (
        "select composed",
        lambda: ja.epsilon(ja.compose(selection.select(ja.Gaussian(4.0), laws["geometric"]), ja.Gaussian(3.0)), 1e-5),
    )
    yield "attack", lambda: selection.attack(ja.Gaussian(4.0), laws["geometric"], delta=1e-5)
    yield (
        "noise with repetitions",
        lambda: ja.calibrate_noise_multiplier(2.0, 1e-5, 1.0, 1, repetitions=laws["geometric"]),
    )
    yield "allowed", lambda: ja.repetitions_allowed(ja.Gaussian(4.0), 2.0, 1e-5).law.gamma


def plans():
    """Training plans: what is solved for, and what it costs."""
    from jaxacct import training

    settings = {
        "noise": {"expected_batch_size": 512, "epochs": 20},
        "steps": {"expected_batch_size": 512, "noise_multiplier": 1.1},
        "batch": {"noise_multiplier": 1.5, "steps": 2000},
        "fixed": {"expected_batch_size": 500, "epochs": 4, "sampling": "fixed_batches"},
        "schedule": {"expected_batch_size": 512, "steps": 1000, "noise_schedule": [(500, 1.0), (None, 0.8)]},
        "filter": {"expected_batch_size": 512, "epochs": 5, "data_dependent": True},
    }
    for name, given in settings.items():

        def plan(given=given):
            made = training.Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, **given)
            return [made.noise_multiplier, made.sampling_probability, float(made.steps), float(made.epsilon.upper)]

        yield f"plan {name}", plan
        yield (
            f"plan {name}: JSON",
            lambda given=given: training.Plan(
                target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, **given
            ).to_json(),
        )


def refused():
    """The message of each bad input."""
    import jaxacct as ja

    yield "delta 2", lambda: ja.epsilon(ja.Gaussian(1.0), 2.0)
    yield "noise -1", lambda: ja.epsilon(ja.Gaussian([1.0, -1.0]), 1e-5)
    yield "rate 2", lambda: ja.dp_sgd(1.0, 2.0, 10)
    yield "shapes", lambda: ja.epsilon(ja.Gaussian([1.0, 2.0]), [1e-5] * 3)
    yield "relation", lambda: ja.epsilon(ja.Gaussian(1.0), 1e-5, relation="both")
    yield "rtol", lambda: ja.epsilon(ja.Gaussian(1.0), 1e-5, rtol=0)
    yield "a list", lambda: ja.epsilon([ja.Gaussian(1.0)], 1e-5)
    yield "infeasible", lambda: ja.calibrate_steps([1e-3, 1.0], 1e-5, 0.5, 0.5)


def commands():
    """What the command line prints."""
    run = "--noise-multiplier 1.0 --sampling-probability 0.01 --steps 10000"
    lines = {
        "epsilon": f"epsilon {run} --delta 1e-5",
        "epsilon json": f"epsilon {run} --delta 1e-5 --json",
        "delta": f"delta {run} --epsilon 2",
        "calibrate": "calibrate --target-epsilon 2 --target-delta 1e-5 --sampling-probability 0.01 --steps 10000",
        "select": f"select {run} --delta 1e-5 --repetitions geometric --gamma 0.1",
        "bad": f"epsilon {run} --delta 2",
        "help": "--help",
        **{f"help {name}": f"{name} --help" for name in ("epsilon", "calibrate", "select", "sweep", "plot", "ledger")},
    }
    for name, line in lines.items():
        yield name, lambda line=line: printed(line.split())
    yield "sweep", swept


def printed(words):
    """Exit status, and both outputs without timings."""
    from jaxacct import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(words)
        except SystemExit as stop:
            status = stop.code
    text = f"{status}\n{out.getvalue()}\n{err.getvalue()}"
    return re.sub(r"[0-9.]+ ?(s|ms|rows/s|a second)\b", "TIME", text.replace("\r", "\n"))


def swept():
    """The table of a small grid: the contour engine answers two rows, the lattice engine one."""
    with tempfile.TemporaryDirectory() as folder:
        grid, out = pathlib.Path(folder) / "grid.csv", pathlib.Path(folder) / "out.csv"
        grid.write_text(
            "noise_multiplier,sampling_probability,steps,delta\n1,0.01,1000,1e-5\n2,0.1,10,1e-6\n0.05,0.5,3,1e-9\n"
        )
        printed(["sweep", str(grid), "--out", str(out)])
        return out.read_text()


PARTS = {
    "reference": reference,
    "mechanisms": mechanisms,
    "selections": selections,
    "plans": plans,
    "refused": refused,
    "commands": commands,
}


def record(names):
    found = {}
    for part in names:
        for name, question in PARTS[part]():
            key = f"{part}: {name}"
            print(f"\r{key:70s}", end="", file=sys.stderr, flush=True)
            try:
                value = question()
                found[key] = value if isinstance(value, str) else flat(value)
            except AttributeError as error:
                found[key] = {"absent": str(error)}
            except Exception as error:
                found[key] = {"raised": f"{type(error).__name__}: {error}"}
    print(file=sys.stderr)
    return found


def compare(before, after):
    """How many answers differ; each is printed."""
    differences = 0
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            differences += 1
            print(f"{key}\n  before: {before.get(key)}\n  after:  {after.get(key)}")
    print(f"{len(before.keys() | after.keys())} answers, {differences} differ")
    return differences


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--compare", nargs=2, type=pathlib.Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.compare)
        sys.exit(1 if compare(before, after) else 0)
    if arguments.out is None:
        parser.error("give --out FILE or --compare BEFORE AFTER")
    arguments.out.write_text(json.dumps(record(arguments.parts), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
