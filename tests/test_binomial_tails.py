"""Bounds of binomial tails against mpmath: they are never on the wrong side, and are tight where that matters."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.quick_bounds import Chance, chance, log_tail_above, log_tail_below


def known(p, side="hit"):
    """The `Chance` of an event and its exact probability in mpmath: p for a hit, 1 - p for a miss."""
    p = np.float64(p)
    log_p, log_rest = np.log(p), np.log1p(-p)
    wrong_p, wrong_rest = 4.0 * ROUNDOFF * (1.0 + abs(log_p)), 4.0 * ROUNDOFF * (1.0 + abs(log_rest))
    if side == "miss":
        log_p, log_rest, wrong_p, wrong_rest = log_rest, log_p, wrong_rest, wrong_p
    exact = mpmath.mpf(float(p))
    return chance(*(np.array([x]) for x in (log_p, log_rest, wrong_p, wrong_rest))), (
        exact if side == "hit" else 1 - exact
    )


def log_tail(n, k, p):
    """log Pr[N >= k], to 40 digits at least."""
    n, k = int(n), int(k)
    if n <= 400:
        terms = [(1 - p) ** n]
        for j in range(n):
            terms.append(terms[-1] * (n - j) / (j + 1) * p / (1 - p))
        tail, rest = mpmath.fsum(terms[k:]), mpmath.fsum(terms[:k])
        return mpmath.log(tail) if tail < rest else mpmath.log1p(-rest)  # the larger is 1 minus the smaller
    return mpmath.log(series(n, k, p, 1)) if k > n * p else mpmath.log1p(-series(n, k - 1, p, -1))


def series(n, k, p, way):
    """The sum of the terms k, k + way, ..., which must fall, up to a remainder below 1e-45 of the sum."""
    if k < 0 or k > n:
        return mpmath.mpf(0)
    log_term = mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1)
    term = mpmath.exp(log_term + k * mpmath.log(p) + (n - k) * mpmath.log1p(-p))
    total, j = term, k
    while 0 <= j + way <= n:
        up = mpmath.mpf(n - j) / (j + 1) * p / (1 - p) if way > 0 else mpmath.mpf(j) / (n - j + 1) * (1 - p) / p
        term, j = term * up, j + way
        total += term
        if up < 1 and term < total * mpmath.mpf(10) ** -45 * (1 - up):
            break
    return total


def check(n, k, p, side="hit"):
    """(above - truth, below - truth) in logarithms, after a check that below <= truth <= above."""
    # enough digits for 1 - p to be exact
    with mpmath.workdps(80 + (int(-np.log10(p)) if side == "miss" else 0)):
        hit, exact = known(p, side)
        at = np.array([float(n)]), np.array([float(k)])
        above, below = (float(f(*at, hit)[0]) for f in (log_tail_above, log_tail_below))
        tail = log_tail(n, k, exact)
        assert above <= 0.0 and below <= 0.0
        assert mpmath.mpf(above) >= tail, (n, k, p, above, tail)
        assert mpmath.mpf(below) <= tail, (n, k, p, below, tail)
        return float(above - tail), float(below - tail)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 60), st.data(), st.floats(-690.0, -1e-15), st.sampled_from(["hit", "miss"]))
def test_small_laws(n, data, log_p, side):
    k = data.draw(st.integers(1, n))
    p = float(np.exp(log_p))
    if 0.0 < p < 1.0:
        check(n, k, p, side)


@pytest.mark.parametrize("p", [1e-300, 1e-20, 1e-6, 0.01, 0.3, 0.5, 0.9, 1 - 1e-6, 1 - 2.0**-53])
def test_every_count_of_a_few_steps(p):
    for side in ("hit", "miss"):
        for n in (1, 2, 3, 17):
            for k in range(1, n + 1):
                check(n, k, p, side)


@pytest.mark.parametrize("n", [1000, 2**20, 10**12, 2**53])
@pytest.mark.parametrize("p", [1e-300, 1e-17, 1e-9, 1e-4, 0.3, 0.999])
def test_large_laws_in_their_tails(n, p):
    # deviations are below 1e3 and tails are far out, so that the exact tail is a sum of at most thousands of terms
    mean, deviation = n * p, np.sqrt(n * p * (1 - p))
    for z in (-40.0, -9.0, 9.0, 40.0, 300.0):
        k = np.ceil(mean + z * deviation)
        if 1 <= k <= n and deviation < 1e3:
            check(n, k, p)
    if mean < 1e3:
        for k in (1, 2, 5, 100, n):
            if k > mean + 5 * deviation:
                check(n, k, p)


def test_ends_of_large_laws_are_exact_powers():
    for n in (2**40, 2**53):
        for p in (1e-300, 1e-12, 0.5, 1 - 1e-10):
            hit, exact = known(p)
            n_, one = np.array([float(n)]), np.array([1.0])
            with mpmath.workdps(60):
                all_hit, none = n * mpmath.log(exact), n * mpmath.log1p(-exact)
                some = mpmath.log(-mpmath.expm1(none))
            assert log_tail_above(n_, n_, hit)[0] >= all_hit >= log_tail_below(n_, n_, hit)[0]
            assert log_tail_above(n_, one, hit)[0] >= some >= log_tail_below(n_, one, hit)[0]


def test_the_bounds_are_near():
    for n, p in ((50, 0.1), (400, 0.02), (10**6, 1e-6), (10**12, 1e-13)):
        for k in range(max(int(2 * n * p), 1), max(int(2 * n * p), 1) + 4):
            above, below = check(n, k, p)
            assert above < 0.8 and below > -0.2, (n, k, p)  # `below` leaves out 1/12 in Stirling's series
    above, below = check(2**53, 2, 1e-30)
    assert above < 0.1 and below > -0.1
    # far below the mean, 1 minus the tail is at most Chernoff's bound
    assert check(10**6, 100, 1e-3)[1] > -1e-100


def test_what_is_not_known_gives_nothing():
    nothing = np.array([np.inf])
    blind = Chance(np.array([-1e-20]), np.array([-46.0]), nothing, nothing)
    n, k = np.array([10.0]), np.array([5.0])
    assert log_tail_above(n, k, blind)[0] == 0.0
    assert not log_tail_below(n, k, blind)[0] > -np.inf
    for bad in (np.nan, np.array([np.nan])):
        of_nan = chance(np.array([bad]).ravel(), np.array([-1.0]), np.array([1e-16]), np.array([1e-16]))
        assert log_tail_above(n, k, of_nan)[0] == 0.0
        assert not log_tail_below(n, k, of_nan)[0] > -np.inf


def test_a_chance_near_one_is_taken_from_its_rest():
    rest = -80.0
    hit = chance(*(np.array([x]) for x in (0.0, rest, 1e-15, 1e-13)))
    with mpmath.workdps(60):
        exact = mpmath.log1p(-mpmath.exp(rest))
    assert abs(hit.log_p[0] - exact) <= hit.error_p[0] < 1e-40
    # 1 - p may be 3/4 or more here and tells nothing of p: log p and its error stay as given
    vague = chance(*(np.array([x]) for x in (-0.6, -0.8, 1.0, 1.0)))
    assert vague.error_p[0] == 1.0 and vague.log_p[0] == -0.6
