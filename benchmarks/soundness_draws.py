"""What soundness.py draws at random, and tests of its answers from below, by mpmath alone."""

import mpmath as mp
import numpy as np

import jaxacct as ja

VERIFY_SEED = 20261124
"""Seed of the configurations that are put to ball arithmetic; each is drawn from this seed and its number."""


def log_uniform(rng, low, high, size=None):
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def number(rng, ordinary, extreme, size):
    """Log-uniform draws, each with probability 1/2 from the range `ordinary`, else from the range `extreme`."""
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
    """Two laws on up to six outcomes, with masses from 1e-300; at times a law gives no mass to one of the outcomes."""
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
    # the sum of the outputs: P(S) from below by one-sided Chebyshev, Q(S) exactly
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


def ordinary(number_of_block):
    """(kind, mechanism, delta) in the ordinary range; three of four numbers give a sampled Gaussian."""
    rng = np.random.default_rng([VERIFY_SEED, number_of_block])
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
