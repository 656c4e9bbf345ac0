"""Speed and bracket width against dp_accounting (and prv_accountant where it runs), in one run on one machine.

    python benchmarks/versus_dp_accounting.py [--count 1000] [--peer 20] [--repeats 5] [--backend numpy] [--json]

Typical DP-SGD: noise multiplier .5 to 5, sampling probability 1e-4 to .3, steps 100 to 1e5, all log-uniform, kept
where q T >= 10 (`--least-hits` changes it) and epsilon at delta = 1e-5 lies in [.3, 10].

Every time is in CPU seconds of the process, all threads together, since a peer takes one core and jaxacct all of them;
wall-clock seconds stand beside.  A peer answers one configuration at a time: its mean and its median over the
configurations are printed.  jaxacct answers a batch, so that its seconds a configuration are a mean over the rows;
what is printed is the median of `--repeats` warm calls.  A ratio divides a peer's mean by jaxacct's mean over the same
configurations, which are repeated until they fill a batch.  Beside it stands a peer's median over jaxacct's mean.
"""

import argparse
import json
import statistics
import time
from typing import NamedTuple

started = time.process_time()
import numpy as np  # noqa: E402

import jaxacct as ja  # noqa: E402

ja.epsilon  # noqa: B018  imports JAX
IMPORT_SECONDS = time.process_time() - started
DELTA = 1e-5
"""delta of every question."""


class Seconds(NamedTuple):
    """CPU and wall-clock seconds."""

    cpu: float
    wall: float


def clocked(call):
    """(Seconds of one call, its result)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall), result


def timed(call, repeats):
    """(first call, median of later calls, result)."""
    first, result = clocked(call)
    later = [clocked(call)[0] for _ in range(repeats)]
    return first, Seconds(*map(statistics.median, zip(*later, strict=True))), result


def typical(count, least_hits, seed=0):
    """(sigma, q, steps) of typical DP-SGD."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: np.exp(rng.uniform(np.log(low), np.log(high), 8 * count))
    sigma, q, steps = draw(0.5, 5), draw(1e-4, 0.3), np.round(draw(100, 1e5))
    rows = np.flatnonzero(q * steps >= least_hits)[: 4 * count]
    bounds = ja.epsilon(ja.dp_sgd(sigma[rows], q[rows], steps[rows]), DELTA, engine="contour")
    rows = rows[(bounds.estimate > 0.3) & (bounds.estimate < 10)][:count]
    return sigma[rows], q[rows], steps[rows]


def peer_epsilon(sigma, q, steps):
    from dp_accounting import dp_event
    from dp_accounting.pld import pld_privacy_accountant

    event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
    return pld_privacy_accountant.PLDAccountant().compose(event, int(steps)).get_epsilon(DELTA)


def peer_calibration(target, q, steps):
    import dp_accounting
    from dp_accounting import dp_event
    from dp_accounting.pld import pld_privacy_accountant

    def event(sigma):
        sampled = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
        return dp_event.SelfComposedDpEvent(sampled, int(steps))

    return dp_accounting.calibrate_dp_mechanism(
        pld_privacy_accountant.PLDAccountant,
        event,
        target,
        DELTA,
        tol=1e-4,
        bracket_interval=dp_accounting.ExplicitBracketInterval(0.3, 20.0),
    )


def prv_epsilon(sigma, q, steps):
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    law = PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=sigma)
    accountant = PRVAccountant(prvs=[law], max_self_compositions=[int(steps)], eps_error=0.01, delta_error=DELTA / 1000)
    return accountant.compute_epsilon(delta=DELTA, num_self_compositions=[int(steps)])


def one_at_a_time(call, *columns):
    """(CPU seconds of each configuration that was answered, number that failed)."""
    seconds, failed = [], 0
    for row in zip(*columns, strict=True):
        try:
            seconds.append(clocked(lambda row=row: call(*(float(x) for x in row)))[0].cpu)
        except Exception:  # peers raise on ordinary parameters, too: failures are counted
            failed += 1
    return seconds or [float("nan")], failed


def of_peer(name, seconds, failed):
    """Figures of a peer, by their names."""
    mean, median = statistics.mean(seconds), statistics.median(seconds)
    return {f"{name}, mean": mean, f"{name}, median": median, f"{name}, failed": failed}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="configurations a batch")
    parser.add_argument("--peer", type=int, default=20, help="configurations the peers are given")
    parser.add_argument("--repeats", type=int, default=5, help="warm calls")
    parser.add_argument("--least-hits", type=float, default=10.0, help="least q T")
    parser.add_argument(
        "--backend", action="append", choices=["numpy", "xla"], help="may be given twice; by default both, one by one"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    cold, warm, _ = timed(lambda: ja.epsilon(ja.dp_sgd(1.0, 0.01, 10_000), DELTA), options.repeats)
    sigma, q, steps = typical(options.count, options.least_hits)
    target = ja.epsilon(ja.dp_sgd(sigma, q, steps), DELTA).estimate
    few = np.linspace(0, sigma.size - 1, min(options.peer, sigma.size)).astype(int)
    same = np.resize(few, sigma.size)  # the peers' configurations, repeated until the batch is full
    figures = {"configurations": sigma.size, "import": IMPORT_SECONDS, "one epsilon, first": cold.cpu}
    figures |= {"one epsilon, warm": warm.cpu}
    peers = {
        "dp_accounting epsilon": one_at_a_time(peer_epsilon, sigma[few], q[few], steps[few]),
        "dp_accounting calibration": one_at_a_time(peer_calibration, target[few], q[few], steps[few]),
        "prv_accountant epsilon": one_at_a_time(prv_epsilon, sigma[few], q[few], steps[few]),
    }
    for name, found in peers.items():
        figures |= of_peer(name, *found)
    for backend in options.backend or ["numpy", "xla"]:
        ask = lambda rows, backend=backend: ja.epsilon(
            ja.dp_sgd(sigma[rows], q[rows], steps[rows]), DELTA, backend=backend
        )
        solve = lambda rows, backend=backend: ja.calibrate_noise_multiplier(
            target[rows], DELTA, q[rows], steps[rows], backend=backend
        )
        for name, call in (("epsilon", ask), ("calibration", solve)):
            first, later, found = timed(lambda call=call: call(slice(None)), options.repeats)
            label = f"{backend}, {name}"
            figures |= {f"{label}s, first call of all rows": first.cpu}
            figures |= {f"{label}s a CPU second": sigma.size / later.cpu, f"{label}s a second": sigma.size / later.wall}
            if name == "epsilon":
                width = found.relative_width
                figures |= {f"{label}, width median": np.median(width), f"{label}, width largest": np.max(width)}
            else:
                shortfall = np.max(1 - found.epsilon.upper / target)
                above = np.sum(~(found.epsilon.upper <= target))
                figures |= {f"{label}s above target": above, f"{label}, largest shortfall of epsilon": shortfall}
            mean = timed(lambda call=call: call(same), options.repeats)[1].cpu / sigma.size
            for peer, (seconds, _) in peers.items():
                if peer.endswith(name):
                    short = peer.split()[0]
                    figures |= {f"{label}, times {short}, means": statistics.mean(seconds) / mean}
                    figures |= {f"{label}, times {short}, its median": statistics.median(seconds) / mean}
        flat = [ja.dp_sgd(np.linspace(1.0, 3.0, 512), 0.02, t) for t in (1e3, 1e7)]
        few_steps, many = (
            timed(lambda run=run, backend=backend: ja.epsilon(run, DELTA, backend=backend), options.repeats)[1]
            for run in flat
        )
        figures |= {f"{backend}, time at T=1e7 over time at T=1e3": many.cpu / few_steps.cpu}

    if options.json:
        print(json.dumps({name: float(value) for name, value in figures.items()}))
        return
    print("CPU seconds, where nothing else is said")
    for name, value in figures.items():
        print(f"{name:48s} {value:12.4g}")


if __name__ == "__main__":
    main()
