"""Answers that lose to another theorem of the package: each mechanism is asked by every way there is.

    python benchmarks/bounds_that_lose.py [--quick] [--only NAME]

A line is printed for each answer whose upper end is more than 1 % above the best of the other ways; the exit status
is then 1.  The ways, where they apply: each engine by name; Rényi accounting; the zero-concentrated guarantee; n times
the epsilon of one step at delta/n; the sum of the parts' epsilons; the epsilon at delta 0; equal steps composed one by
one; the mechanism without sampling; for "replace_one" the removal and the addition of a record; for "zero_out" the
answer under "replace_one"; and the named bounds of a selection.
"""

import argparse
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np

import jaxacct as ja
from jaxacct import representations, selection
from jaxacct.accounting.mechanism_engines import epsilon_replaced
from jaxacct.core.validation import InputError
from jaxacct.engines.protocol import MechanismQuestion
from jaxacct.mechanisms import Composed, Repeated

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from mechanism_tables import EXAMPLES  # found in the folder of the tests

RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")
DELTAS = (1e-2, 1e-6, 1e-50, 1e-300)
ALLOWED = 0.01
"""Share by which an answer may exceed the best of the other ways."""
LEAST = 1e-6
"""Epsilons below this are not compared."""


def mechanisms(quick: bool) -> Iterator[tuple[str, ja.Mechanism]]:
    """Yield (name, mechanism)."""
    gaussian = ja.Gaussian(4.0)
    for example in EXAMPLES:
        yield type(example).__name__, example
        if not quick:
            yield f"30 {type(example).__name__}", ja.repeat(example, 30)
    yield "groups", ja.dp_sgd(1.0, 0.01, 100, group=2)
    yield "zCDP and Gaussian", ja.compose(ja.ZCDP(0.1), ja.repeat(gaussian, 10))
    yield "zCDP, 50 parts", ja.compose(*(ja.ZCDP(0.002) for _ in range(50)))
    yield "200 maxima of 2", ja.repeat(ja.GaussianNoisyMax(40.0, 2), 200)
    if quick:
        return
    for steps in (1, 2, 10, 1000, 10**6):
        yield f"dp_sgd of {steps}", ja.dp_sgd(1.0, 0.01, steps)
    yield "little noise", ja.dp_sgd(0.3, 0.001, 20)
    yield "much noise", ja.dp_sgd(30.0, 0.01, 10_000)
    yield "groups of 20", ja.dp_sgd(4.0, 0.001, 1000, group=20)
    yield "capped", ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.01, 1000, 20), 100)
    yield "without replacement", ja.repeat(ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.01), 100)
    yield "with replacement", ja.repeat(ja.SampledWithReplacement(ja.Gaussian(1.0), 10, 1000), 100)
    yield "shuffled", ja.ShuffledBatches(ja.Gaussian(2.0), 10)
    yield "sampled Laplace", ja.repeat(ja.PoissonSampled(ja.Laplace(1.0), 0.1), 100)
    yield "sampled zCDP", ja.repeat(ja.PoissonSampled(ja.ZCDP(0.1), 0.1), 100)
    yield "zCDP and DP-SGD", ja.compose(ja.ZCDP(0.05, 0.1), ja.dp_sgd(1.0, 0.01, 100))
    yield "pure and zCDP", ja.compose(ja.repeat(ja.PureDP(0.05), 200), ja.ZCDP(0.2))
    yield "approximate", ja.repeat(ja.ApproximateDP(0.01, 1e-9), 300)
    for candidates in (2, 3, 5, 30, 1000):
        yield f"maxima of {candidates}", ja.repeat(ja.GaussianNoisyMax(20.0, candidates), 50)
    for law in (selection.Poisson(1e8), selection.Geometric(0.01)):
        for run in (ja.Laplace(1.0), ja.Gaussian(3.0)):
            yield f"selection of {type(run).__name__} by {type(law).__name__}", selection.select(run, law)


def ways(mechanism: ja.Mechanism, delta: float, relation: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield (name, function that returns an upper end of epsilon) for each way but a plain `ja.epsilon`."""
    upper = lambda asked, at=delta, **keywords: float(ja.epsilon(asked, at, relation=relation, **keywords).upper)
    chosen = isinstance(mechanism, selection.Selection)
    if chosen:
        for name in ("envelope", "renyi", "privacy_profile"):
            bound = lambda name=name: selection.bound_epsilon(
                mechanism.mechanism, mechanism.law, delta, bound=name, relation=relation
            )
            yield name, lambda bound=bound: float(bound().upper)
    else:
        for engine in ("contour", "lattice"):
            if engine == "contour" or delta >= 1e-10:  # below 1e-10 the lattice takes too long
                yield engine, lambda engine=engine: upper(mechanism, engine=engine)
        yield "Rényi", lambda: float(representations.rdp_epsilon(mechanism, delta, relation=relation).upper)
        yield "zCDP", lambda: _by_zcdp(mechanism, delta, relation)
    yield "delta 0", lambda: upper(mechanism, 0.0)
    if isinstance(mechanism, Repeated):
        n = int(mechanism.steps)
        yield "n steps", lambda: n * upper(mechanism.mechanism, delta / n)
        if n <= 200:
            yield "parts", lambda: upper(ja.compose(*(mechanism.mechanism for _ in range(n))))
    if isinstance(mechanism, Repeated) and hasattr(mechanism.mechanism, "sampling_probability"):
        step = mechanism.mechanism
        if getattr(step, "group", 1) == 1:
            yield "not sampled", lambda: upper(ja.repeat(step.mechanism, mechanism.steps))
    if isinstance(mechanism, Composed):
        share = delta / len(mechanism.mechanisms)
        yield "sum", lambda: sum(upper(one, share) for one in mechanism.mechanisms)
    if relation == "replace_one":
        two = lambda: epsilon_replaced(MechanismQuestion("epsilon", mechanism, delta, relation))
        yield "removed and added", lambda: float(two().upper)
    if relation == "zero_out":
        yield "replaced", lambda: float(ja.epsilon(mechanism, delta, relation="replace_one").upper)


def _by_zcdp(mechanism: ja.Mechanism, delta: float, relation: str) -> float:
    rho = float(representations.zero_concentrated(mechanism, relation).upper)
    return float(ja.epsilon(ja.ZCDP(rho), delta).upper) if 0.0 < rho < 1e100 else np.inf


def losses(quick: bool, only: str = "", log: Callable[[str], None] = lambda line: None) -> list[str]:
    """One line for each answer that is too large."""
    found = []
    for name, mechanism in mechanisms(quick):
        if only not in name:
            continue
        begun = time.process_time()
        for relation in RELATIONS[:1] if quick else RELATIONS:
            for delta in DELTAS[1:2] if quick else DELTAS:
                try:
                    answer = float(ja.epsilon(mechanism, delta, relation=relation).upper)
                except InputError:
                    continue  # `ja.epsilon` refuses the question
                best, way = np.inf, ""
                for word, ask in ways(mechanism, delta, relation) if answer > LEAST else ():
                    try:
                        value = ask()
                    except (InputError, ArithmeticError):
                        continue  # this way does not apply
                    if value < best:
                        best, way = value, word
                if answer > max(best * (1.0 + ALLOWED), LEAST):
                    found.append(f"{name}, {relation}, delta {delta:g}: {answer:.6g}, by {way} {best:.6g}")
                    log("LOSES: " + found[-1])
        log(f"{name}: {time.process_time() - begun:.1f} CPU seconds")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each mechanism once, at delta 1e-6, under add/remove")
    parser.add_argument("--only", default="", help="mechanisms whose name has this in it")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    lost = losses(given.quick, given.only, lambda line: print(line, flush=True))
    print(f"{len(lost)} answers lose to another way")
    sys.exit(bool(lost))
