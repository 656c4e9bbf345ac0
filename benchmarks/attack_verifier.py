"""An attack on `ja.verify`: brackets that are false by 1e-9 to 1, for many mechanisms and five relations.

    python benchmarks/attack_verifier.py [--count 100] [--seconds 5] [--only laplace]

A false bracket has an end on the wrong side of the truth, by a relative or an absolute shift, or its ends swapped.  The
truth is a closed form or a sum over all outcomes, in mpmath, which shares no code with the package.  Without such a
form or sum, an engine's certified bracket takes the place of the truth, and shifts begin at its ends.  `ja.verify` must
call a false bracket refuted or undecided.  It is also given the bracket of the truth, which it must not call refuted.
The exit status is 1 where a false bracket is verified or a true one refuted.
"""

import argparse
import collections
import itertools
import math
import sys
import time
from types import SimpleNamespace

import mpmath as mp
import numpy as np

import jaxacct as ja

RELATIONS = ("add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out")
BOTH = ("add_or_remove_one", "zero_out")
"""Relations whose profile is the larger of those of both directions; a record moves a statistic by 1."""
SHIFTS = np.logspace(-9.0, 0.0, 19)
DIGITS = 50
mp.mp.dps = DIGITS


# The truth: a law is a list of (P-mass, Q-mass); a profile is a function of eps


def losses_of(pairs):
    """(loss, P-mass) of finitely many outcomes, and the P-mass of an infinite loss."""
    kept = [(mp.log(p / q), p) for p, q in pairs if p > 0 and q > 0]
    return kept, mp.fsum(p for p, q in pairs if q == 0)


def composed(*laws):
    """The profile of independent steps, by all combinations of their outcomes."""
    total, lost = {mp.mpf(0): mp.mpf(1)}, mp.mpf(0)
    for pairs in laws:
        kept, infinite = losses_of(pairs)
        lost += infinite - lost * infinite
        added = collections.defaultdict(mp.mpf)
        for (loss, mass), (more, share) in itertools.product(total.items(), kept):
            added[loss + more] += mass * share
        total = added

    def delta(eps):
        above = (mass * -mp.expm1(eps - loss) for loss, mass in total.items() if loss > eps)
        return mp.fsum(above) + lost

    return delta


def swapped(pairs):
    return [(q, p) for p, q in pairs]


def sampled(pairs, rate, add):
    mixed = [((1 - rate) * q + rate * p, q) for p, q in pairs]
    return swapped(mixed) if add else mixed


def response(eps, delta=0):
    likely = (1 - mp.mpf(delta)) / (1 + mp.exp(-mp.mpf(eps)))
    rare = 1 - mp.mpf(delta) - likely
    return [(likely, rare), (rare, likely), (mp.mpf(delta), mp.mpf(0)), (mp.mpf(0), mp.mpf(delta))]


def gaussian(mu):
    def delta(eps):
        return mp.ncdf(mu / 2 - eps / mu) - mp.exp(eps) * mp.ncdf(-mu / 2 - eps / mu)

    return delta


def sampled_gaussian(sigma, rate, add):
    """The profile of one step, by the threshold test at the output where p = e^eps q."""

    def delta(eps):
        level = mp.exp(-eps if add else eps)
        left = (level - 1 + rate) / rate
        if left <= 0:
            return mp.mpf(0) if add else 1 - mp.exp(eps)
        at = sigma * sigma * mp.log(left) + mp.mpf(0.5)
        plain = mp.ncdf(at / sigma if add else -at / sigma)
        hit = mp.ncdf((at - 1) / sigma if add else (1 - at) / sigma)
        mixed = (1 - rate) * plain + rate * hit
        return plain - mp.exp(eps) * mixed if add else mixed - mp.exp(eps) * plain

    return delta


def laplace(top):
    return lambda eps: -mp.expm1((eps - top) / 2) if eps < top else mp.mpf(0)


def bounded_range(top):
    return lambda eps: (mp.exp(top / 2) - mp.exp(eps / 2)) ** 2 / mp.expm1(top) if eps < top else mp.mpf(0)


def discrete_laplace(scale, shift):
    r = mp.exp(-1 / mp.mpf(scale))
    noise = lambda x: (1 - r) / (1 + r) * r ** abs(x)
    inner = [(noise(x - shift), noise(x)) for x in range(1, shift)]
    half = 1 / (1 + r)
    return [(half * r**shift, half), *inner, (half, half * r**shift)]


def discrete_gaussian(sigma, shift):
    reach = int(40 * sigma) + shift
    weight = lambda x: mp.exp(-mp.mpf(x * x) / (2 * mp.mpf(sigma) ** 2))
    whole = mp.fsum(weight(x) for x in range(-reach, reach + 1))
    beyond = mp.mpf(10) ** -400  # stands for outcomes farther out, whose losses have no bound
    return [(beyond, 0), (0, beyond)] + [
        (weight(x - shift) / whole, weight(x) / whole) for x in range(-reach, reach + shift)
    ]


def finite(p, q):
    one, two = ([mp.mpf(x) / mp.fsum(law) for x in law] for law in (p, q))
    return list(zip(one, two, strict=True))


def categories(p, k):
    other = (1 - mp.mpf(p)) / (k - 1)
    return [(mp.mpf(p), other), (other, mp.mpf(p)), ((k - 2) * other, (k - 2) * other)]


def moved(relation):
    return 2 if relation == "replace_one" else 1


def alike(make):
    """A profile that is the same in both directions."""
    return lambda relation: [make(moved(relation))]


def of_law(*laws, orders=False):
    """The profiles of composed laws by direction; with `orders`, replace_one swaps each law or not, in every way."""

    def profiles(relation):
        if orders and relation == "replace_one":
            ways = itertools.product(*((law, swapped(law)) for law in laws))
            return [composed(*way) for way in ways]
        names = [relation.split("_")[0]] if relation in ("add_one", "remove_one") else ["remove", "add"]
        return [composed(*(laws if name == "remove" else map(swapped, laws))) for name in names]

    return profiles


def by_direction(make):
    """The profiles make(add) by direction, where `add` is true for the add direction; None for replace_one."""

    def profiles(relation):
        if relation == "replace_one":
            return None
        names = [relation.split("_")[0]] if relation in ("add_one", "remove_one") else ["remove", "add"]
        return [make(name == "add") for name in names]

    return profiles


def engine(_):
    """No closed form: the truth is an engine's certified bracket."""
    return "engine"


P, Q = [0.5, 0.3, 0.2], [0.1, 0.3, 0.6]
LEFT, RIGHT = ([0.9, 0.1], [0.6, 0.4]), ([0.6, 0.4], [0.9, 0.1])
MASSES = ([0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25])
CASES = {
    "Gaussian": (ja.Gaussian(2.0), alike(lambda k: gaussian(mp.mpf(k) / 2))),
    "Gaussians": (ja.repeat(ja.Gaussian(4.0), 4), alike(lambda k: gaussian(mp.mpf(k) / 2))),
    "Laplace": (ja.Laplace(2.0), alike(lambda k: laplace(mp.mpf(k) / 2))),
    "RandomizedResponse": (ja.RandomizedResponse(0.75), of_law(categories(0.75, 2))),
    "three answers": (ja.RandomizedResponse(0.6, 3), of_law(categories(0.6, 3))),
    "PureDP": (ja.PureDP(0.7), of_law(response(0.7))),
    "PureDP, repeated": (ja.repeat(ja.PureDP(0.3), 3), of_law(*[response(0.3)] * 3)),
    "ApproximateDP": (ja.ApproximateDP(1.0, 1e-5), of_law(response(1, 1e-5))),
    "ApproximateDP, repeated": (ja.repeat(ja.ApproximateDP(1.0, 0.5), 2), of_law(*[response(1, 0.5)] * 2)),
    "ApproximateDP, composed": (
        ja.compose(ja.ApproximateDP(0.0, 0.25), ja.PureDP(0.5)),
        of_law(response(0, 0.25), response(0.5)),
    ),
    "FiniteOutput": (ja.FiniteOutput(P, Q), of_law(finite(P, Q), orders=True)),
    "FiniteOutput with masses": (ja.FiniteOutput(*MASSES), of_law(finite(*MASSES), orders=True)),
    "FiniteOutput, repeated": (
        ja.repeat(ja.FiniteOutput(P, Q), 3),
        lambda relation: [
            composed(*[way] * 3)
            for way in {"add_one": [swapped(finite(P, Q))], "remove_one": [finite(P, Q)]}.get(
                relation, [finite(P, Q), swapped(finite(P, Q))]
            )
        ],
    ),
    "FiniteOutput, composed": (
        ja.compose(ja.FiniteOutput(*LEFT), ja.FiniteOutput(*RIGHT)),
        of_law(finite(*LEFT), finite(*RIGHT), orders=True),
    ),
    "FiniteOutput beside others": (
        ja.compose(ja.FiniteOutput(P, Q), ja.PureDP(0.5), ja.FiniteOutput(*LEFT)),
        of_law(finite(P, Q), response(0.5), finite(*LEFT), orders=True),
    ),
    "ExponentialMechanism": (ja.ExponentialMechanism(1.0), alike(lambda k: bounded_range(mp.mpf(1)))),
    "ReportNoisyMax": (ja.ReportNoisyMax(0.8), alike(lambda k: laplace(mp.mpf(0.8)))),
    "ReportNoisyMax, gumbel": (ja.ReportNoisyMax(0.8, "gumbel"), alike(lambda k: bounded_range(mp.mpf(0.8)))),
    "AboveThreshold": (
        ja.AboveThreshold(4.0, 8.0, answers=2),
        alike(lambda k: composed(response(k * mp.mpf(0.75)))),
    ),
    "AboveThreshold, monotone": (
        ja.AboveThreshold(4.0, 8.0, answers=2, monotone=True),
        lambda relation: [composed(response(1.5 if relation == "replace_one" else 0.5))],
    ),
    "DiscreteLaplace": (
        ja.DiscreteLaplace(2.0, 3),
        alike(lambda k: composed(discrete_laplace(2.0, 3 * k))),
    ),
    "DiscreteGaussian": (ja.DiscreteGaussian(1.5, 2), alike(lambda k: composed(discrete_gaussian(1.5, 2 * k)))),
    "sampled Gaussian": (
        ja.PoissonSampled(ja.Gaussian(1.0), 0.25),
        by_direction(lambda add: sampled_gaussian(mp.mpf(1), mp.mpf(0.25), add)),
    ),
    "sampled twice": (
        ja.PoissonSampled(ja.PoissonSampled(ja.Gaussian(1.0), 0.5), 0.5),
        by_direction(lambda add: sampled_gaussian(mp.mpf(1), mp.mpf(0.25), add)),
    ),
    "sampled response": (
        ja.repeat(ja.PoissonSampled(ja.PureDP(1.0), 0.25), 2),
        by_direction(lambda add: composed(*[sampled(response(1), mp.mpf(0.25), add)] * 2)),
    ),
    "sampled ApproximateDP": (
        ja.PoissonSampled(ja.ApproximateDP(1.0, 0.25), 0.5),
        by_direction(lambda add: composed(sampled(response(1, 0.25), mp.mpf(0.5), add))),
    ),
    "NumericSparse": (ja.NumericSparse(8.0, 16.0, 8.0, answers=2), engine),
    "Laplaces": (ja.repeat(ja.Laplace(2.0), 3), engine),
    "mixed": (ja.compose(ja.Gaussian(1.0), ja.repeat(ja.PureDP(0.1), 5)), engine),
    "sampled Laplace": (ja.PoissonSampled(ja.Laplace(2.0), 0.1), engine),
    "DP-SGD": (ja.dp_sgd(1.0, 0.01, 1000), engine),
    "two steps": (ja.dp_sgd(0.8, 0.1, 2), engine),
    "group": (ja.repeat(ja.PoissonSampled(ja.Gaussian(3.0), 0.2, group=4), 20), engine),
    "without replacement": (ja.SampledWithoutReplacement(ja.Gaussian(2.0), 0.25), engine),
    "without replacement, finite": (ja.SampledWithoutReplacement(ja.FiniteOutput(P, Q), 0.25), engine),
    "with replacement": (ja.repeat(ja.SampledWithReplacement(ja.Gaussian(4.0), 10, 100), 20), engine),
    "capped": (ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.05, 1000, 75), engine),
    "RandomAllocation": (ja.RandomAllocation(ja.Gaussian(2.0), 100), engine),
}
"""(mechanism, relation -> profiles): None leaves the relation out; "engine" says that no profile is known."""
QUICK = ("ApproximateDP", "ApproximateDP, repeated", "FiniteOutput, composed", "FiniteOutput with masses", "Laplace")
"""Cases that the verifier of November 2026 got wrong; each takes well under a second."""


def root(delta, target):
    """The least eps >= 0 with delta(eps) <= target, by bisection; infinite where delta(eps) > target for all eps."""
    if delta(mp.mpf(0)) <= target:
        return mp.mpf(0)
    high = mp.mpf(1)
    while delta(high) > target:
        high *= 2
        if high > 2**20:
            return mp.inf
    low = mp.mpf(0)
    while high - low > mp.mpf(10) ** (8 - DIGITS) * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > target else (low, middle)
    return high


def truth(mechanism, relation, profiles, quantity, given):
    """Ends between which the truth lies, as floats; None where it is not known."""
    if profiles == "engine":
        ask = ja.epsilon if quantity == "epsilon" else ja.delta
        try:
            found = ask(mechanism, given, relation=relation)
        except ja.InputError:
            return None
        return (float(found.lower), float(found.upper)) if found.kind == "certified" else (0.0, float(found.upper))
    top = lambda eps: max(each(eps) for each in profiles)
    near = float(root(top, mp.mpf(given)) if quantity == "epsilon" else top(mp.mpf(given)))
    # the ends are moved out so that rounding makes no bracket false
    below, above = (math.nextafter(near, to) if math.isfinite(near) else near for to in (-math.inf, math.inf))
    return max(below, 0.0), above


def false_brackets(low, high, count, rng):
    """Brackets with the lower, the upper or both ends beyond a truth in [low, high], by relative or absolute shifts."""
    for k in range(count):
        shift = SHIFTS[k % SHIFTS.size] * rng.uniform(1.0, 2.0)
        ends = []
        if math.isfinite(high):
            above = high + shift * (1.0 if k % 2 or high < 1e-300 else high)
            ends.append((above, above * (1.0 + rng.uniform()) + shift))
            ends.append((above, math.inf))
        if low > 0.0 and math.isfinite(low):
            below = low - shift * (1.0 if k % 2 else low)
            ends.append((max(below, 0.0) * rng.uniform() if below > 0 else below, below))
            ends.append((0.0, below))
        if math.isinf(low):
            ends += [(0.0, 1.0 / shift), (1.0, 1e6)]
        if len(ends) > 2:
            ends.append((ends[0][0], ends[-1][1]))
        yield ends[rng.integers(len(ends))] if ends else (1.0, 0.5)


def givens(quantity, profiles):
    """Epsilons at which delta is asked, or deltas at which epsilon is asked, one of them the mass at infinite loss."""
    if quantity == "delta":
        return (0.0, 0.3, 1.0)
    flat = []
    if profiles != "engine":
        flat = [float(max(each(mp.mpf(2000)) for each in profiles))]
    return (1e-5, 0.1, *(x for x in flat if x < 1.0))


@mp.workdps(DIGITS)  # other code in this process may have set mpmath's precision
def attack(name, count, seconds, seed=1):
    """Counts of (relation, quantity, whether the bracket was true, status), and what was wrong."""
    mechanism, profiles_of = CASES[name]
    rng, counts, wrong = np.random.default_rng(seed), collections.Counter(), []
    for relation in RELATIONS:
        profiles = profiles_of(relation)
        if profiles is None:
            continue
        for quantity in ("epsilon", "delta"):
            choices = givens(quantity, profiles)
            for given in choices:
                if quantity == "epsilon" and given == 0.0 and profiles == "engine":
                    continue
                known = truth(mechanism, relation, profiles, quantity, given)
                if known is None:
                    continue
                other = "delta" if quantity == "epsilon" else "epsilon"
                tried = [(ends, False) for ends in false_brackets(*known, -(-count // len(choices)), rng)]
                for (lower, upper), true in [*tried, (known, True)]:
                    found = ja.verify(
                        mechanism,
                        SimpleNamespace(lower=lower, upper=upper),
                        **{other: given},
                        relation=relation,
                        seconds=seconds,
                    )
                    counts[relation, quantity, true, found.status] += 1
                    if found.status == ("refuted" if true else "verified"):
                        wrong.append(f"{name}, {relation}, {other} = {given!r}: {found.explanation}")
    return counts, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=100, help="false brackets of each mechanism, relation and question"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="limit of one verification")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    total, bad = collections.Counter(), []
    print(f"{'mechanism':30} {'relation':18} {'of':8} {'false: verified, refuted, undecided':>37}   true")
    for name in CASES:
        if given.only.lower() not in name.lower():
            continue
        start = time.process_time()
        counts, wrong = attack(name, given.count, given.seconds)
        bad += wrong
        for relation, quantity in dict.fromkeys(key[:2] for key in counts):
            row = [counts[relation, quantity, False, status] for status in ("verified", "refuted", "undecided")]
            held = [counts[relation, quantity, True, status] for status in ("verified", "refuted", "undecided")]
            total.update(dict(zip(("verified", "refuted", "undecided"), row, strict=True)))
            print(f"{name:30} {relation:18} {quantity:8} {row[0]:13} {row[1]:10} {row[2]:12}   {held}", flush=True)
        print(f"{name:30} {time.process_time() - start:.1f} CPU s", flush=True)
    print(f"\nfalse brackets: {dict(total)}")
    print("\n".join(bad))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
