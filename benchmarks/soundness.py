"""An attack on the certificates: random configurations over the whole range of float64.

    python benchmarks/soundness.py --out soundness.jsonl [--configurations 100000] [--seconds 3600]
    python benchmarks/soundness.py --out verified.jsonl --stage verify [--configurations 2000]

Both stages go on where the file ends; a block that was cut off is done again.

*attack* (the default): noise 1e-12 to 1e170, Laplace scales 1e-10 to 1e10, sampling probabilities 1e-300 to 1, steps 1
to 2^53, delta 1e-300 to .999, eps 0 to 1e300, finite laws with atoms of 1e-300, compositions of up to 50 unlike
mechanisms, every relation.  An answer is *false* where

* a threshold test by mpmath, on one output, on any of them, on all of them, or on their sum, exceeds what it allows;
* it exceeds the answer without sampling;
* the same question with more noise, fewer steps, less sampling or a larger delta has a larger lower end than its upper;
* the lattice and the contour engine contradict each other, or status is "contradiction".

*verify*: the ordinary range (noise .2 to 100, steps to 1e6, delta from 1e-30), stratified, put to ball arithmetic
(`ja.verify`); each bracket is then asked about again with one end moved 1e-4 the wrong way, which must be refuted.
"""

import argparse
import collections
import json
import pathlib
import statistics
import time

import mpmath as mp
import numpy as np

import jaxacct as ja

MEMORY = 2**25
"""Limit of the lattice engine here: an answer in about a second, if a wide one."""
FAMILIES = ("dp_sgd", "gaussian", "one_step", "laplace", "finite", "without_replacement", "mixed")
RELATIONS = ("add_or_remove_one", "remove_one", "add_one")


def log_uniform(rng, low, high, size=None):
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def number(rng, ordinary, extreme, size):
    """Half the draws from the ordinary range, half from all of it."""
    return np.where(rng.random(size) < 0.5, log_uniform(rng, *ordinary, size), log_uniform(rng, *extreme, size))


def rates(rng, size):
    return np.minimum(number(rng, (1e-5, 1.0), (1e-300, 1.0), size), 1.0)


def counts(rng, size):
    return np.floor(number(rng, (1.0, 1e6), (1.0, 2.0**53), size))


def deltas(rng, size):
    return number(rng, (1e-12, 0.1), (1e-300, 0.999), size)


def noises(rng, size):
    return number(rng, (0.1, 100.0), (1e-12, 1e170), size)


def finite_law(rng):
    """Two laws on up to six outcomes, with atoms from 1e-300; now and then one that only one of them has."""
    size = int(rng.integers(2, 7))
    p, q = (number(rng, (1e-3, 1.0), (1e-300, 1.0), size) for _ in range(2))
    if rng.random() < 0.2:
        p[int(rng.integers(size))] = 0.0
    if rng.random() < 0.2:
        q[int(rng.integers(size))] = 0.0
    p[0], q[1] = p[0] + 1e-3, q[1] + 1e-3
    p, q = p / p.sum(), q / q.sum()
    return ja.FiniteOutput(p / p.sum(), q / q.sum())


def any_step(rng):
    kind = int(rng.integers(6))
    if kind == 0:
        return ja.Gaussian(float(noises(rng, ())))
    if kind == 1:
        return ja.PoissonSampled(ja.Gaussian(float(noises(rng, ()))), float(rates(rng, ())))
    if kind == 2:
        return ja.Laplace(float(log_uniform(rng, 1e-10, 1e10)))
    if kind == 3:
        return ja.PoissonSampled(ja.Laplace(float(log_uniform(rng, 1e-10, 1e10))), float(rates(rng, ())))
    if kind == 4:
        return ja.ApproximateDP(float(log_uniform(rng, 1e-300, 1e4)), float(log_uniform(rng, 1e-300, 1e-3)))
    return finite_law(rng)


# --- tests from below, by mpmath alone ---------------------------------------------------------------------------


def tail(x):
    """Pr[N(0, 1) > x]."""
    return mp.erfc(x / mp.sqrt(2)) / 2


def gaussian_tests(sigma, q, steps, direction):
    """(P(S), Q(S)) of tests on outputs of n sampled Gaussians: one output, any of them, all of them, and their sum."""
    s, n = 1 / mp.mpf(sigma), mp.mpf(steps)
    q = mp.mpf(q)
    for u in [*map(mp.mpf, (-1, 1, 3, 5)), s / 2, s - 3, s - 1, s + 1]:
        mixed = (1 - q) * tail(u) + q * tail(u - s)
        p, other = (mixed, tail(u)) if direction == "remove" else (tail(-u), (1 - q) * tail(-u) + q * tail(s - u))
        yield p, other
        if n > 1:
            yield -mp.expm1(n * mp.log1p(-p)) if p < 1 else p, n * other
            yield mp.exp(n * mp.log(p)), mp.exp(n * mp.log(other))
    # the sum of the outputs, by Chebyshev under the mixture, exactly under the other
    if direction == "remove":
        deviation = mp.sqrt(n * (1 + q * (1 - q) * s * s))
        for z in (2, 10):
            at = (n * q * s - z * deviation) / mp.sqrt(n)
            yield 1 - 1 / (1 + mp.mpf(z) ** 2), tail(at)


def refuted_from_below(tests, delta, upper):
    """Whether some test shows that delta(upper) > delta."""
    if not np.isfinite(upper):
        return False
    delta, grown = (
        mp.mpf(float(delta)) * (1 + mp.mpf(10) ** -12),
        mp.exp(mp.mpf(float(upper)) * (1 + mp.mpf(10) ** -12)),
    )
    return any(p - grown * other > delta for p, other in tests)


def directions(relation):
    return {"remove_one": ("remove",), "add_one": ("add",)}.get(relation, ("remove", "add"))


# --- one block of each family -------------------------------------------------------------------------------------


def ask(record, question, *given, **options):
    """The bounds, or None where the question raised; ends are looked at, and what is wrong with them is counted."""
    try:
        bounds = question(*given, memory_bytes=MEMORY, **options)
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
    """A batch of DP-SGD runs: epsilon, tests, the run without sampling, a more private neighbour; delta."""
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
        # delta falls with eps: beyond the upper end it is at most the target, before the lower end at least
        false = (eps[i] >= bounds.upper[i] and back.lower[i] > delta[i] * (1 + 1e-9)) or (
            eps[i] < bounds.lower[i] and back.upper[i] < delta[i] * (1 - 1e-9)
        )
        if false:
            record["false"].append(
                f"dp_sgd({sigma[i]!r}, {q[i]!r}, {steps[i]!r}), {relation}: delta({eps[i]!r}) = {back[i]!r} "
                f"contradicts epsilon({delta[i]!r}) = {bounds[i]!r}"
            )


def both_engines(rng, record):
    """A few ordinary runs by the contour engine and by the lattice engine."""
    sigma, q, steps = (float(log_uniform(rng, *x)) for x in ((0.3, 30.0), (1e-4, 0.5), (1.0, 1e5)))
    run, delta = ja.dp_sgd(sigma, q, np.floor(steps)), float(log_uniform(rng, 1e-15, 0.1))
    one = ask(record, ja.epsilon, run, delta, engine="contour")
    two = ask(record, ja.epsilon, run, delta, engine="lattice")
    if one is not None and two is not None and max(one.lower, two.lower) > min(one.upper, two.upper):
        record["false"].append(f"dp_sgd({sigma!r}, {q!r}, {np.floor(steps)!r}) at {delta!r}: {one!r} and {two!r}")


def single(rng, record, mechanism, relation):
    """Any mechanism: epsilon against delta, and a repetition or a weaker question against it."""
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
    rng = np.random.default_rng([20261123, number_of_block])
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


def ordinary(number_of_block):
    """One configuration of the ordinary range, its kind by its number: three in four are sampled Gaussians."""
    rng = np.random.default_rng([20261124, number_of_block])
    delta = float(log_uniform(rng, 1e-30, 0.1))
    if number_of_block % 4 != 3:
        sigma, q, steps = (float(log_uniform(rng, *x)) for x in ((0.2, 100.0), (1e-5, 1.0), (1.0, 1e6)))
        return "sampled Gaussian", ja.dp_sgd(sigma, q, np.floor(steps)), delta
    kind = number_of_block // 4 % 4
    if kind == 0:
        return (
            "finite",
            ja.repeat(ja.RandomizedResponse(float(rng.uniform(0.51, 0.99))), int(rng.integers(1, 200))),
            delta,
        )
    if kind == 1:
        return (
            "Gaussian",
            ja.repeat(ja.Gaussian(float(log_uniform(rng, 0.2, 100.0))), int(rng.integers(1, 10_000))),
            delta,
        )
    if kind == 2:
        return "Laplace", ja.repeat(ja.Laplace(float(log_uniform(rng, 0.1, 100.0))), int(rng.integers(1, 30))), delta
    return (
        "mixed",
        ja.compose(
            ja.repeat(ja.Gaussian(float(log_uniform(rng, 0.5, 50.0))), int(rng.integers(1, 20))),
            ja.Laplace(float(log_uniform(rng, 0.3, 30.0))),
        ),
        delta,
    )


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


# --- running and reporting ----------------------------------------------------------------------------------------


def done_before(path):
    """The records of whole lines, and the file cut behind them."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def report_attack(records):
    tally = collections.Counter()
    for record in records:
        tally.update(record["tally"])
    false, raised, contradictions = (
        [x for record in records for x in record[name]] for name in ("false", "raised", "contradictions")
    )
    total = sum(tally.values())
    print(
        f"answers {total}  false {len(false)}  raised {len(raised)}  contradictions seen and voided "
        f"{len(contradictions)}  seconds {sum(r['seconds'] for r in records):.0f}"
    )
    for name, count in tally.most_common():
        print(f"  {name:32s} {count:8d}")
    for title, column in (("decade of noise", 0), ("decade of epsilon", 1)):
        groups = collections.defaultdict(list)
        for record in records:
            for row in record["widths"]:
                groups[row[column]].append(row[2])
        print(f"median relative width by {title}:")
        order = sorted(groups, key=lambda x: float(x) if x != "inf" else np.inf)
        print("  " + ", ".join(f"{x}: {statistics.median(groups[x]):.1e} ({len(groups[x])})" for x in order))
    for line in (false + raised + contradictions)[:40]:
        print("  !", line)


def report_verified(records):
    for kind in sorted({r["kind"] for r in records}):
        mine = [r for r in records if r["kind"] == kind]
        tally = collections.Counter(r["status"] for r in mine)
        moved = collections.Counter(x for r in mine for x in r.get("moved", []))
        width = statistics.median([(r["upper"] - r["lower"]) / r["upper"] if r["upper"] else 0.0 for r in mine])
        print(
            f"{kind:18s} {dict(tally)}  undecided {tally['undecided'] / len(mine):.1%}  moved by 1e-4: {dict(moved)}  "
            f"median digits {statistics.median(r['digits'] for r in mine)}  width {width:.1e}  "
            f"seconds {sum(r['seconds'] for r in mine):.0f}"
        )
    for record in records:
        if record["status"] == "refuted" or "verified" in record.get("moved", []):
            print("  !", {k: v for k, v in record.items() if k != "block"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--stage", choices=("attack", "verify"), default="attack")
    parser.add_argument(
        "--configurations", type=int, default=None, help="100,000 answers, or 2,000 put to ball arithmetic"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; run again to go on")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each configuration in ball arithmetic")
    parser.add_argument("--block", type=int, default=64, help="configurations of a batch")
    arguments = parser.parse_args()
    attacking = arguments.stage == "attack"
    goal = arguments.configurations or (100_000 if attacking else 2_000)
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
