"""Questions that have been slow: CPU seconds, width and status of each, in a process of its own.

    python benchmarks/slow_corners.py [--base OLD_CHECKOUT] [--limit SECONDS] [--only WORD]

With `--base` every line runs in the other checkout, too, and the last column is the ratio of the CPU seconds. A line
that needs more than the limit is stopped. Engines have been asked something small before, so that imports do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

LINES = {
    "few steps, delta 1e-3": "ja.epsilon(ja.dp_sgd(1.0, 105 / 100_000, 5), 1e-3)",
    "few steps, delta .01": "ja.epsilon(ja.dp_sgd(1.0, 0.01, 5), 0.01)",
    "noise .01": "ja.epsilon(ja.dp_sgd(0.01, 0.1, 20), 1e-5)",
    "plan with noise .01": "plan(noise_multiplier=0.01, dataset_size=2000, expected_batch_size=100, epochs=1)",
    "trade-off, noise .1": "ja.profile(ja.dp_sgd(0.1, 0.01, 100)).tradeoff(0.1)",
    "trade-off, noise .2": "ja.profile(ja.dp_sgd(0.2, 0.01, 100)).tradeoff(0.1)",
    "trade-off, noise 1": "ja.profile(ja.dp_sgd(1.0, 0.01, 100)).tradeoff(0.1)",
    "trade-off, rtol 1e-7": "ja.profile(ja.dp_sgd(0.1, 0.01, 100), rtol=1e-7).tradeoff(0.1)",
    "plan with repetitions": (
        "plan(target_epsilon=3, dataset_size=2000, expected_batch_size=100, epochs=2, repetitions=Geometric(0.2))"
    ),
    "events, truncated Poisson": "by_events(lambda s: E.TruncatedSubsampledGaussianDpEvent(10_000, 0.01, 150, s))",
    "events, without replacement": (
        "by_events(lambda s: E.SampledWithoutReplacementDpEvent(10_000, 100, E.GaussianDpEvent(s)))"
    ),
    "events, 1,000 equal trees": "trees()",
    "100 exponential mechanisms": "ja.epsilon(ja.repeat(ja.ExponentialMechanism(0.1), 100), [1e-4, 1e-6, 1e-8])",
    "far eps": "ja.delta(ja.dp_sgd(7.09, 2.524e-4, 80110), 0.27)",
    "far eps, a grid": "ja.delta(ja.dp_sgd(7.09, 2.524e-4, 80110), [0.25, 0.26, 0.27, 0.28, 0.29])",
    "allocation, 100,000 slots": "ja.epsilon(ja.repeat(ja.RandomAllocation(ja.Gaussian(0.3), 100_000), 5), 1e-6)",
    "allocation, 10,000 rounds": "ja.epsilon(ja.repeat(ja.RandomAllocation(ja.Gaussian(0.3), 2), 10_000), 1e-6)",
    "allocation, noise .1": "ja.epsilon(ja.repeat(ja.RandomAllocation(ja.Gaussian(0.1), 50), 3), 1e-6)",
    "with replacement": "ja.epsilon(ja.repeat(ja.SampledWithReplacement(ja.Gaussian(1.0), 16, 100_000), 8), 1e-6)",
    "with replacement, a curve": (
        'ja.profile(ja.dp_sgd(1.0, batch_size=10, dataset_size=1000, steps=100, sampling="with_replacement"))'
        ".tradeoff([0.0, 1e-4, 1e-3, 0.01, 0.03, *(i / 20 for i in range(1, 21))])"
    ),
    "a replaced record, allocation": (
        'ja.calibrate_noise_multiplier(8.0, 1e-5, slots=11, steps=23, sampling="random_allocation", '
        'relation="replace_one")'
    ),
    "a replaced record, advice": (
        "advise_strategy(target_epsilon=8.0, target_delta=1e-5, dataset_size=1050, batch_size=100.0, steps=23, "
        'relation="replace_one")'
    ),
    "delta 1e-300": "ja.calibrate_noise_multiplier(1.0, 1e-300, 0.01, 1000)",
    "a total of 10,000": "ja.epsilon(total(10_000, lambda i: ja.Gaussian(900.0 + i)), 1e-6)",
    "a total of 400 runs": "ja.epsilon(total(400, lambda i: ja.dp_sgd(900.0 + i, 0.01, 1 + i)), 1e-6)",
}


def plan(**settings: object) -> object:
    from jaxacct.training import Plan

    return Plan(target_delta=1e-5, **settings)


def by_events(event: object) -> object:
    """The noise at which 1,000 steps `event(noise)` have epsilon 1, by dp_accounting's search."""
    import dp_accounting
    from dp_accounting import dp_event as E

    from jaxacct.interop import CertifiedAccountant

    make = lambda noise: E.SelfComposedDpEvent(event(noise), 1000)
    return dp_accounting.calibrate_dp_mechanism(CertifiedAccountant, make, 1.0, 1e-5)


def trees() -> object:
    import dp_accounting
    from dp_accounting import dp_event as E

    from jaxacct.interop import CertifiedAccountant

    accountant = CertifiedAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(E.ComposedDpEvent([E.SingleEpochTreeAggregationDpEvent(5.0, 64)] * 1000))
    return accountant.get_epsilon(1e-5)


def total(parts: int, part: object) -> object:
    """The mechanisms part(0), part(1), ... composed by adding one at a time."""
    import jaxacct as ja

    run = part(0)
    for i in range(1, parts):
        run = ja.compose(run, part(i))
    return run


def answer(name: str) -> None:
    """Print what one line takes and gives, as JSON."""
    import numpy as np

    import jaxacct as ja

    known: dict[str, object] = {"ja": ja, "plan": plan, "by_events": by_events, "trees": trees, "total": total}
    if "E." in LINES[name]:
        from dp_accounting import dp_event

        known["E"] = dp_event
    if "advise" in LINES[name]:
        from jaxacct.training import advise_strategy

        known["advise_strategy"] = advise_strategy
    if "Geometric" in LINES[name]:
        from jaxacct.selection import Geometric

        known["Geometric"] = Geometric
    ja.epsilon(ja.compose(ja.dp_sgd(1.0, 0.01, 100), ja.Laplace(50.0)), 1e-5, engine="lattice")
    ja.epsilon(ja.dp_sgd(1.0, 0.01, 100), 1e-5)
    begin = time.process_time()
    found = eval(LINES[name], known)
    seconds = time.process_time() - begin
    bounds = getattr(found, "epsilon", found)
    number = found if isinstance(found, float) else np.nan
    upper, lower = (np.asarray(getattr(bounds, end, number)) for end in ("upper", "lower"))
    with np.errstate(all="ignore"):
        width = float(np.max((upper - lower) / upper))
    status = sorted(set(np.ravel(getattr(bounds, "status", "")).tolist()))
    print(json.dumps({"seconds": seconds, "upper": upper.tolist(), "width": width, "status": ", ".join(status)}))


def run(name: str, checkout: Path, limit: float) -> dict[str, object]:
    """One line in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--answer", name]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    try:
        done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"status": f"stopped after {limit:g} s"}
    if done.returncode:
        return {"status": done.stderr.decode().strip().splitlines()[-1][:60]}
    return dict(json.loads(done.stdout.decode().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base", type=Path, help="another checkout, for comparison")
    parser.add_argument("--limit", type=float, default=300.0, help="wall seconds for one line")
    parser.add_argument("--only", default="", help="lines with this word in their name")
    parser.add_argument("--answer", choices=LINES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answer(given.answer)
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = [here] + ([given.base.resolve()] if given.base else [])
    for name in (name for name in LINES if given.only in name):
        found = [run(name, checkout, given.limit) for checkout in checkouts]
        texts = [
            f"{one['seconds']:7.2f} s, width {one['width']:.1e} {one['status']}" if "seconds" in one else one["status"]
            for one in found
        ]
        both = len(found) == 2 and all("seconds" in one for one in found)
        ratio = f"{float(str(found[0]['seconds'])) / float(str(found[1]['seconds'])):.2f}" if both else ""
        print(f"{name:28} {'   before: '.join(map(str, texts))}   {ratio}", flush=True)


if __name__ == "__main__":
    main()
