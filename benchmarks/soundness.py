"""An attack on the certificates: random configurations over the whole range of float64.

    python benchmarks/soundness.py --out soundness.jsonl [--count 100000] [--seconds 3600]
    python benchmarks/soundness.py --out verified.jsonl --stage verify [--count 2000]

Both stages go on where the file ends; a block that was cut off is done again.  What is drawn, and the threshold tests,
are in soundness_draws.py; what is printed at the end is in soundness_report.py.

*attack* (the default): noise 1e-12 to 1e170, Laplace scales 1e-10 to 1e10, sampling probabilities 1e-300 to 1, steps 1
to 2^53, delta 1e-300 to .999, eps 0 to 1e300, finite laws with atoms of 1e-300, compositions of up to 50 unlike
mechanisms, every relation but zero_out.  An answer is *false* where

* a threshold test by mpmath (on one output, on any, on all, or on their sum) shows that its upper end is too small;
* its upper end exceeds the upper end for the same mechanism without sampling;
* its upper end is below the lower end for more noise, fewer steps, less sampling or a larger delta;
* its ends are out of order, or delta and epsilon, or the lattice and the contour engine, contradict each other.
Answers with status "contradiction" are counted apart.

*verify*: `ja.verify` checks answers of the ordinary range (noise .2 to 100, steps to 1e6, delta from 1e-30) by ball
arithmetic.  If a bracket is verified, brackets that lie 1e-4 below and above it must not be verified.
"""

import argparse
import collections
import json
import pathlib
import time

import mpmath as mp
import numpy as np
from soundness_draws import (
    any_step,
    counts,
    deltas,
    directions,
    finite_law,
    gaussian_tests,
    log_uniform,
    noises,
    ordinary,
    rates,
    refuted_from_below,
)
from soundness_report import done_before, report_attack, report_verified

import jaxacct as ja

MEMORY_BYTES = 2**25
"""Limit of the lattice engine in bytes: it then answers in about a second, but its bracket may be wide."""
FAMILIES = ("dp_sgd", "gaussian", "one_step", "laplace", "finite", "without_replacement", "mixed")
"""Kinds of configurations; block k of the attack draws from one of them, in turn."""
RELATIONS = ("add_or_remove_one", "remove_one", "add_one")
"""Relations under which every mechanism has an answer."""
ATTACK_SEED = 20261123
"""Seed of the attack; each block is drawn from this seed and the block's number."""


# --- one block of each family -------------------------------------------------------------------------------------


def ask(record, question, *given, **options):
    """The bounds, or None where the question raised; ends out of order and contradictions are noted in the record."""
    try:
        bounds = question(*given, memory_bytes=MEMORY_BYTES, **options)
    except Exception as error:
        record["raised"].append(f"{type(error).__name__}: {error}; {given!r}, {options!r}"[:600])
        return None
    low, mid, high = (np.atleast_1d(x) for x in (bounds.lower, bounds.estimate, bounds.upper))
    if not np.all((low <= mid) & (mid <= high)) or np.any(np.isnan(low)):
        record["false"].append(f"ends out of order: {bounds!r}"[:300])
    for i, (engine, status) in enumerate(zip(*map(np.atleast_1d, (bounds.engine, bounds.status)), strict=True)):
        record["tally"][f"{engine} {status}"] += 1
        if status == "contradiction":
            record["contradictions"].append(f"row {i} of {question.__name__}{given!r}, {options!r}"[:6000])
    return bounds


def width_of(low, high):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(low == high, 0.0, (high - low) / high)


def keep_widths(record, sigma, bounds):
    for s, low, high in zip(sigma, np.atleast_1d(bounds.lower), np.atleast_1d(bounds.upper), strict=True):
        decade = "inf" if not np.isfinite(high) else "0" if high == 0 else str(int(np.floor(np.log10(high))))
        width = float(width_of(low, high))
        record["widths"].append([int(np.floor(np.log10(s))), decade, width if np.isfinite(width) else 1.0])


def batch(rng, record, sigma, q, steps):
    """Check epsilon of DP-SGD by threshold tests, unsampled runs and more private runs, and check delta by epsilon."""
    size = sigma.size
    delta, relation = deltas(rng, size), str(rng.choice(RELATIONS))
    run = ja.dp_sgd(sigma, q, steps)
    bounds = ask(record, ja.epsilon, run, delta, relation=relation)
    if bounds is None:
        return
    keep_widths(record, sigma, bounds)
    unsampled = ja.epsilon(ja.repeat(ja.Gaussian(sigma), steps), delta)
    for i in range(size):
        case = f"epsilon(dp_sgd({sigma[i]!r}, {q[i]!r}, {steps[i]!r}), {delta[i]!r}, {relation})"
        if not bounds.upper[i] <= unsampled.upper[i] * (1 + 1e-9):
            record["false"].append(f"{case} = {bounds[i]!r} exceeds {unsampled.upper[i]!r} without sampling")
        if q[i] == 1.0:
            continue
        for direction in directions(relation):
            # P(S) - e^eps Q(S) may cancel to delta, or to the size of 1/sigma
            with mp.workdps(60 + int(2 * abs(np.log10(sigma[i])) - np.log10(delta[i]) - np.log10(q[i]))):
                tests = gaussian_tests(sigma[i], q[i], steps[i], direction)
                refuted = refuted_from_below(tests, delta[i], bounds.upper[i])
            if refuted:
                record["false"].append(f"{case} = {bounds[i]!r} contradicts a threshold test")
    change = int(rng.integers(4))
    more = rng.uniform(1.0, 3.0, size)
    weaker = [sigma * more, q / more, np.maximum(np.floor(steps / more), 1.0), np.minimum(delta * more, 0.999)][change]
    given = [sigma, q, steps, delta]
    given[change] = weaker
    private = ask(record, ja.epsilon, ja.dp_sgd(*given[:3]), given[3], relation=relation)
    if private is not None:
        for i in np.flatnonzero(private.lower > bounds.upper):
            record["false"].append(
                f"argument {change} of dp_sgd({sigma[i]!r}, {q[i]!r}, {steps[i]!r}), {delta[i]!r}, {relation}, "
                f"changed to {weaker[i]!r}: {private[i]!r} above {bounds[i]!r}"
            )
    eps = np.where(np.isfinite(bounds.upper), bounds.upper, 1.0) * log_uniform(rng, 0.5, 1.5, size)
    back = ask(record, ja.delta, run, eps, relation=relation)
    if back is None:
        return
    for i in range(size):
        # delta falls as eps grows: it is at most delta[i] from the upper end on, at least delta[i] below the lower
        false = (eps[i] >= bounds.upper[i] and back.lower[i] > delta[i] * (1 + 1e-9)) or (
            eps[i] < bounds.lower[i] and back.upper[i] < delta[i] * (1 - 1e-9)
        )
        if false:
            record["false"].append(
                f"dp_sgd({sigma[i]!r}, {q[i]!r}, {steps[i]!r}), {relation}: delta({eps[i]!r}) = {back[i]!r} "
                f"contradicts epsilon({delta[i]!r}) = {bounds[i]!r}"
            )


def both_engines(rng, record):
    """Check that the contour and the lattice engine agree on one ordinary run."""
    sigma, q, steps = (float(log_uniform(rng, *x)) for x in ((0.3, 30.0), (1e-4, 0.5), (1.0, 1e5)))
    run, delta = ja.dp_sgd(sigma, q, np.floor(steps)), float(log_uniform(rng, 1e-15, 0.1))
    one = ask(record, ja.epsilon, run, delta, engine="contour")
    two = ask(record, ja.epsilon, run, delta, engine="lattice")
    if one is not None and two is not None and max(one.lower, two.lower) > min(one.upper, two.upper):
        record["false"].append(f"dp_sgd({sigma!r}, {q!r}, {np.floor(steps)!r}) at {delta!r}: {one!r} and {two!r}")


def single(rng, record, mechanism, relation):
    """Check epsilon of any mechanism by its epsilon at a larger delta, and by its delta at several epsilons."""
    delta = float(deltas(rng, ()))
    bounds = ask(record, ja.epsilon, mechanism, delta, relation=relation)
    if bounds is None:
        return
    keep_widths(record, [1.0], bounds)
    weaker = min(delta * float(rng.uniform(1.0, 10.0)), 0.999)
    private = ask(record, ja.epsilon, mechanism, weaker, relation=relation)
    if private is not None and private.lower > bounds.upper:
        record["false"].append(f"{mechanism!r:.400} at {weaker!r} {private!r}, at {delta!r} {bounds!r}")
    for at in {float(bounds.upper), float(bounds.lower), float(log_uniform(rng, 1e-300, 1e300))}:
        if not np.isfinite(at):
            continue
        back = ask(record, ja.delta, mechanism, at, relation=relation)
        if back is None:
            continue
        false = (at >= bounds.upper and back.lower > delta * (1 + 1e-9)) or (
            at < bounds.lower and back.upper < delta * (1 - 1e-9)
        )
        if false:
            record["false"].append(
                f"{mechanism!r:.400}, {relation}: delta({at!r}) {back!r}, epsilon({delta!r}) {bounds!r}"
            )


def block(number_of_block, size):
    """One block of the attack, from its number alone."""
    rng = np.random.default_rng([ATTACK_SEED, number_of_block])
    record = {"block": number_of_block, "tally": collections.Counter(), "false": [], "raised": [], "widths": []}
    record["contradictions"] = []
    begin = time.perf_counter()
    family = FAMILIES[number_of_block % len(FAMILIES)]
    few = max(size // 8, 1)
    if family == "dp_sgd":
        batch(rng, record, noises(rng, size), rates(rng, size), counts(rng, size))
        both_engines(rng, record)
    elif family == "gaussian":
        batch(rng, record, noises(rng, size), np.ones(size), counts(rng, size))
    elif family == "one_step":
        batch(rng, record, noises(rng, size), rates(rng, size), np.ones(size))
    else:
        for _ in range(few):
            relation = str(rng.choice(RELATIONS))
            if family == "laplace":
                step = ja.Laplace(float(log_uniform(rng, 1e-10, 1e10)))
                step = ja.PoissonSampled(step, float(rates(rng, ()))) if rng.random() < 0.7 else step
                mechanism = ja.repeat(step, float(counts(rng, ())))
            elif family == "finite":
                mechanism = (
                    finite_law(rng) if rng.random() < 0.5 else ja.repeat(finite_law(rng), float(counts(rng, ())))
                )
                relation = str(rng.choice([*RELATIONS, "replace_one"]))
            elif family == "without_replacement":
                base = finite_law(rng) if rng.random() < 0.5 else ja.Gaussian(float(log_uniform(rng, 1e-2, 1e3)))
                mechanism = ja.SampledWithoutReplacement(base, float(rates(rng, ())))
                relation = str(rng.choice([*RELATIONS, "replace_one"]))
            else:
                parts = [any_step(rng) for _ in range(int(log_uniform(rng, 2.0, 51.0)))]
                mechanism = ja.compose(
                    *(ja.repeat(x, float(counts(rng, ()))) if rng.random() < 0.3 else x for x in parts)
                )
            single(rng, record, mechanism, relation)
    record["seconds"], record["family"] = time.perf_counter() - begin, family
    record["answers"] = sum(record["tally"].values())
    return record


# --- ball arithmetic ----------------------------------------------------------------------------------------------


def put_to_the_test(number_of_block, seconds):
    kind, mechanism, delta = ordinary(number_of_block)
    record = {"block": number_of_block, "kind": kind, "case": repr(mechanism), "delta": delta}
    bounds = ja.epsilon(mechanism, delta)
    low, high = float(bounds.lower), float(bounds.upper)
    record.update(lower=low, upper=high, ok=bool(bounds.ok), engine=bounds.engine)
    found = ja.verify(mechanism, bounds, delta=delta, seconds=seconds)
    record.update(status=found.status, digits=int(found.digits), seconds=float(found.seconds))
    if found.status == "verified" and low > 0.0 and np.isfinite(high):
        wrong_upper = ja.Bounds(0.0, 0.0, low * (1 - 1e-4))
        wrong_lower = ja.Bounds(high * (1 + 1e-4), high * (1 + 1e-4), high * (1 + 1e-4))
        moved = [
            ja.verify(mechanism, wrong, delta=delta, seconds=seconds).status for wrong in (wrong_upper, wrong_lower)
        ]
        record["moved"] = moved
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--stage", choices=("attack", "verify"), default="attack")
    parser.add_argument("--count", type=int, default=None, help="100,000 answers, or 2,000 put to ball arithmetic")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; run again to go on")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each configuration in ball arithmetic")
    parser.add_argument("--block", type=int, default=64, help="configurations of a batch")
    arguments = parser.parse_args()
    attacking = arguments.stage == "attack"
    goal = arguments.count or (100_000 if attacking else 2_000)
    mp.mp.dps = 40
    records = done_before(arguments.out)
    begin, last = time.perf_counter(), 0.0
    reached = sum(r["answers"] for r in records) if attacking else len(records)
    started = reached
    with arguments.out.open("a") as file:
        while reached < goal and time.perf_counter() - begin < arguments.seconds:
            place = len(records)
            record = block(place, arguments.block) if attacking else put_to_the_test(place, arguments.limit)
            file.write(json.dumps(record) + "\n")
            file.flush()
            records.append(record)
            reached += record["answers"] if attacking else 1
            now = time.perf_counter() - begin
            if now - last > 5.0:
                rate = (reached - started) / now
                print(
                    f"\r{reached} of {goal}, {rate:.1f} a second, {(goal - reached) / rate / 60:.0f} min left",
                    end="",
                    flush=True,
                )
                last = now
    print()
    (report_attack if attacking else report_verified)(records)


if __name__ == "__main__":
    main()
