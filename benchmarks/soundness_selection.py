"""Attack on the certificates of selections: laws and bases over the whole range of float64.

    python benchmarks/soundness_selection.py [--seed 0] [--count 20]

`cases(seed)` yields cases without end; `check(case)` returns a line for each thing that is wrong with a case's answers.
For bases of few outcomes, sums over K for every order of the outcomes bound delta from below.  The library's delta of
the base is the truth for K = 1.  For any K, that delta times Pr[K > 0] is a lower bound, as the score may be constant.
Ends must be in order, and infinite only with a status that says so; epsilon must fall in delta and delta in epsilon;
delta at the upper epsilon must be at most the target; and pure epsilon must grow at most (eta + 2)-fold under
TruncatedNegativeBinomial.
"""

import argparse
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import jaxacct as ja
from jaxacct import selection

__all__ = ["Case", "cases", "check"]

DELTAS = np.array([1e-300, 1e-100, 1e-20, 1e-9, 1e-5, 1e-2, 0.3, 0.999])
EPSILONS = np.array([0.0, 1e-300, 1e-9, 0.1, 1.0, 10.0, 1e3, 1e300])
TOLERANCE = 1e-9
"""Relative rounding of the oracles."""


class Case(NamedTuple):
    """One selection; p, q are the base's outcomes where it has few."""

    run: Any
    law: Any
    relation: str
    p: np.ndarray | None = None
    q: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"select({self.run!r}, {self.law!r}), {self.relation}"


def cases(seed: int) -> Iterator[Case]:
    """Cases in an order that the seed decides."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    while True:
        law, relation = _law(rng, pick), pick("add_or_remove_one", "remove_one", "add_one")
        if rng.random() < 0.4:
            p, q = _outcomes(rng, pick)
            yield Case(ja.FiniteOutput(p, q), law, relation, p, q)
            continue
        size = float(10.0 ** pick(-300.0, -12.0, -8.0, -3.0, -0.5, 0.3, 1.5, 2.8, 2.82, 3.0, 5.0, 12.0, 300.0))
        kind = rng.integers(4)
        if kind == 0:
            run = ja.PureDP(size)
        elif kind == 1:
            run = ja.ApproximateDP(size, pick(1e-300, 1e-12, 1e-3, 0.999))
        else:
            noise = min(max(1.0 / size, 1e-12), 1e8)
            run = ja.Gaussian(noise) if kind == 2 else ja.Laplace(noise)
        yield Case(run, law, relation)


def check(case: Case) -> list[str]:
    """What is wrong with the answers for one case; empty where nothing is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [f"{case}: {line}" for line in _wrong(case)]
    except Exception as error:  # a crash is a finding like any other
        return [f"{case}: {type(error).__name__}: {error}"]


def _wrong(case: Case) -> list[str]:
    run, law, relation = case.run, case.law, case.relation
    chosen, wrong = selection.select(run, law), []
    eps = ja.epsilon(chosen, DELTAS, relation=relation)
    delta = ja.delta(chosen, EPSILONS, relation=relation)

    def require(holds: Any, words: str) -> None:
        if not np.all(holds):  # NaN does not hold
            wrong.append(words)

    up, down = 1.0 + TOLERANCE, 1.0 - TOLERANCE
    for name, found, most in (("epsilon", eps, np.inf), ("delta", delta, 1.0)):
        require((found.lower >= 0.0) & (found.lower <= found.upper) & (found.upper <= most), f"{name}: {found}")
        require(found.lower[1:] <= found.upper[:-1] * up, f"{name} grows: {found}")
    require(np.isfinite(eps.upper) | ~np.isin(eps.status, ["ok", "zero"]), f"open, yet fine: {eps}")
    some = np.flatnonzero(np.isfinite(eps.upper))
    if some.size:
        at_upper = ja.delta(chosen, eps.upper[some], relation=relation)
        require(at_upper.lower <= DELTAS[some] * up, f"delta at the upper epsilon: {at_upper} at {eps.upper[some]}")
    _, once, first = _masses(law)
    base = ja.delta(run, EPSILONS, relation=relation)
    require(delta.upper >= (1.0 - once) * base.lower * down - 1e-15, f"below a constant score: {delta}, base {base}")
    if once == 0.0:
        single = ja.epsilon(run, DELTAS, relation=relation)
        require(eps.upper >= single.lower * down, f"below a constant score: {eps}, base {single}")
    if first == 1.0:
        require(
            (delta.lower <= base.upper * up) & (delta.upper <= base.upper * 1.01 + 1e-15), f"K = 1: {delta}, {base}"
        )
    if isinstance(run, ja.PureDP) and isinstance(law, selection.TruncatedNegativeBinomial):
        limit = (law.eta + 2.0) * run.epsilon
        require(eps.upper <= limit * up, f"above (eta + 2) epsilon = {limit}: {eps}")
    if case.p is not None and case.q is not None:
        near = EPSILONS[EPSILONS <= 10.0]
        worst = _worst_order(case.p, case.q, law, near, relation)
        require(delta.upper[: near.size] >= worst * down - 1e-13, f"below an order of outcomes: {delta}, {worst}")
    return wrong


def _law(rng: np.random.Generator, pick: Any) -> Any:
    kind = rng.integers(5)
    if kind == 0:
        return selection.TruncatedNegativeBinomial(
            pick(-0.99, -0.5, 0.0, 1.0, 3.0, 500.0), pick(1e-9, 0.01, 0.3, 1 - 1e-9)
        )
    if kind == 1:
        return selection.Poisson(pick(1e-9, 0.5, 10.0, 1e3, 1e6))
    if kind == 2:
        return selection.Binomial(*pick((1, 0.3), (2, 0.5), (20, 1.0), (1e6, 1e-9), (1e6, 0.5)))
    if kind == 3:
        return selection.PointMass(pick(1, 2, 3, 1000))
    masses = pick([0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5], [0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 1e-300, 0.0])
    return selection.Categorical(masses)


def _outcomes(rng: np.random.Generator, pick: Any) -> tuple[np.ndarray, np.ndarray]:
    """(p, q) on two to four outcomes; in each, at times, one outcome has mass 0 or a very small one."""
    n = int(rng.integers(2, 5))
    p, q = rng.dirichlet(np.full(n, 0.7), 2)
    for side in (p, q):
        if rng.random() < 0.5:
            side[rng.integers(n)] = pick(0.0, 1e-300, 1e-12, 1e-5)
    return p / p.sum(), q / q.sum()


def _masses(law: Any) -> tuple[float, float, float]:
    """(mean, Pr[K = 0], Pr[K = 1])."""
    return float(law.mean), float(law.probability(0)), float(law.probability(1))


def _worst_order(p: np.ndarray, q: np.ndarray, law: Any, eps: np.ndarray, relation: str) -> np.ndarray:
    """The largest hockey-stick divergence of a winner over all orders of the outcomes; 0 where K may exceed 199."""
    top = 200
    mass = law.probability(np.arange(top))
    if math.fsum(mass) < 1.0 - 1e-14:
        return np.zeros(eps.size)
    directions = {"remove_one": [(0, 1)], "add_one": [(1, 0)]}.get(relation, [(0, 1), (1, 0)])
    best = np.zeros(eps.size)
    for order in itertools.permutations(range(p.size)):
        released = []
        for side in (p, q):
            ends = np.concatenate([[0.0], np.cumsum(side[list(order)])])[:, None] ** np.arange(top)
            ends[0, 0] = 1.0
            released.append(np.diff(ends @ mass))
        for here, there in directions:
            gap = released[here] - np.exp(eps)[:, None] * released[there]
            best = np.maximum(best, np.sum(np.maximum(gap, 0.0), axis=1))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    found = 0
    for case in itertools.islice(cases(options.seed), options.count):
        lines = check(case)
        found += bool(lines)
        print("\n".join(lines) if lines else f"{case}: holds", flush=True)
    raise SystemExit(f"{found} of {options.count} cases do not hold" if found else 0)


if __name__ == "__main__":
    main()
