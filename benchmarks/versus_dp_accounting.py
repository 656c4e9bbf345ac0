"""Speed and bracket width against dp_accounting (and prv_accountant where it runs), in one run on one machine.

    python benchmarks/versus_dp_accounting.py [--count 1000] [--peer 20] [--repeats 5] [--json]

Typical DP-SGD: noise multiplier .5 to 5, sampling probability 1e-4 to .3, steps 100 to 1e5, all log-uniform, kept
where q T >= 10 (`--least-hits` changes it) and epsilon at delta = 1e-5 lies in [.3, 10].
Cold is the first call (tracing and compilation included), warm the median of later ones; import is apart.
The peers answer a subset of the same configurations, one at a time, as they must.
"""

import argparse
import inspect
import json
import statistics
import time

started = time.perf_counter()
import numpy as np  # noqa: E402

import jaxacct as ja  # noqa: E402

ja.epsilon  # noqa: B018  imports JAX
IMPORT_SECONDS = time.perf_counter() - started
DELTA = 1e-5
"""delta of every question."""


def timed(call, repeats):
    """(first call, median of later calls, result)."""
    begin = time.perf_counter()
    result = call()
    first = time.perf_counter() - begin
    later = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        later.append(time.perf_counter() - begin)
    return first, statistics.median(later), result


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
    """(median seconds a configuration, number that failed)."""
    seconds, failed = [], 0
    for row in zip(*columns, strict=True):
        begin = time.perf_counter()
        try:
            call(*(float(x) for x in row))
        except Exception:  # peers raise on ordinary parameters: that is a result, and counted
            failed += 1
            continue
        seconds.append(time.perf_counter() - begin)
    return (statistics.mean(seconds) if seconds else float("nan")), failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="configurations a batch")
    parser.add_argument("--peer", type=int, default=20, help="configurations the peers are given")
    parser.add_argument("--repeats", type=int, default=5, help="warm calls")
    parser.add_argument("--least-hits", type=float, default=10.0, help="least q T")
    parser.add_argument(
        "--backend", default="xla", help="xla (default: warm rates are about its programs), numpy or auto"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = {"backend": options.backend} if "backend" in inspect.signature(ja.epsilon).parameters else {}

    cold, single_warm, _ = timed(lambda: ja.epsilon(ja.dp_sgd(1.0, 0.01, 10_000), DELTA), options.repeats)
    sigma, q, steps = typical(options.count, options.least_hits)
    run, count = ja.dp_sgd(sigma, q, steps), sigma.size
    _, epsilon_warm, bounds = timed(lambda: ja.epsilon(run, DELTA, **chosen), options.repeats)
    target = bounds.estimate
    solve = lambda: ja.calibrate_noise_multiplier(target, DELTA, q, steps, **chosen)
    calibrate_first, calibrate_warm, solved = timed(solve, options.repeats)
    few = slice(0, options.peer)
    peer_eps, _ = one_at_a_time(peer_epsilon, sigma[few], q[few], steps[few])
    peer_cal, peer_cal_failed = one_at_a_time(peer_calibration, target[few], q[few], steps[few])
    prv_eps, prv_failed = one_at_a_time(prv_epsilon, sigma[few], q[few], steps[few])
    by_steps = {}
    for t in (1e3, 1e7):
        flat = ja.dp_sgd(np.linspace(1.0, 3.0, 512), 0.02, t)
        by_steps[t] = timed(lambda flat=flat: ja.epsilon(flat, DELTA, **chosen), options.repeats)[1] / 512

    width = bounds.relative_width
    figures = {
        "configurations": count,
        "import seconds": IMPORT_SECONDS,
        "one epsilon, first, seconds": cold,
        "one epsilon, warm, seconds": single_warm,
        "epsilon warm per second": count / epsilon_warm,
        "calibrations, first (compiles on xla), seconds": calibrate_first,
        "calibrations warm per second": count / calibrate_warm,
        "dp_accounting seconds per epsilon": peer_eps,
        "dp_accounting seconds per calibration": peer_cal,
        "dp_accounting calibrations that failed": peer_cal_failed,
        "prv_accountant seconds per epsilon": prv_eps,
        "prv_accountant queries that failed": prv_failed,
        "epsilon ratio to dp_accounting": peer_eps * count / epsilon_warm,
        "epsilon ratio to prv_accountant": prv_eps * count / epsilon_warm,
        "calibration ratio to dp_accounting": peer_cal * count / calibrate_warm,
        "relative width median": float(np.median(width)),
        "relative width largest": float(np.max(width)),
        "calibrations above target": int(np.sum(~(solved.epsilon.upper <= target))),
        "largest shortfall of epsilon": float(np.max(1 - solved.epsilon.upper / target)),
        "time at T=1e7 over time at T=1e3": by_steps[1e7] / by_steps[1e3],
    }
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:42s} {value:12.4g}")


if __name__ == "__main__":
    main()
