"""delta(epsilon) of batch rules by ways that share nothing with jaxacct: roots, quadrature, enumeration, Monte Carlo.

A law on the line is a dict {mean in deviations of the noise: weight}.  All values but those by Monte Carlo have many
more correct digits than jaxacct's brackets; a Monte Carlo interval misses with a probability below 1e-9.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
from mpmath import mp
from scipy import integrate, optimize, special, stats

__all__ = [
    "allocation_add",
    "allocation_by_sampling",
    "allocation_nested",
    "allocation_remove",
    "any_hockey_stick",
    "binomial_law",
    "cap_numbers",
    "clopper_pearson",
    "finite_allocation",
    "group_of_allocation_by_sampling",
    "hockey_stick",
    "hypergeometric_law",
    "k_of_t_by_sampling",
    "mixture",
    "put",
    "shuffled_two",
    "truncated_bound",
    "truncated_by_enumeration",
    "two_steps",
    "zero_out_pair",
]

DIGITS = 60
"""Decimal digits of mpmath: two terms of size 1 may cancel down to delta = 1e-30."""
FAILURE = 1e-9
"""The probability with which a Monte Carlo interval misses."""


# ---- mixtures of normal laws on the line -------------------------------------------------------------------------


def mixture(shift, weights, sigma):
    """{j shift/sigma: weight_j}."""
    with mp.workdps(DIGITS):
        return {j * mp.mpf(shift) / mp.mpf(sigma): w for j, w in enumerate(weights) if w}


def binomial_law(n, q, most=None):
    """Weights of Bin(n, q) as mpf, from 0 to `most`; q is a float or an mpf."""
    with mp.workdps(DIGITS):
        q = mp.mpf(q)
        top = n if most is None else min(n, most)
        return [mp.binomial(n, j) * q**j * (1 - q) ** (n - j) for j in range(top + 1)]


def hypergeometric_law(n, k, batch):
    """Weights of j = 0, 1, ... marked records among `batch` records drawn from n, k of which are marked."""
    with mp.workdps(DIGITS):
        most = min(k, batch)
        return [mp.mpf(math.comb(k, j) * math.comb(n - k, batch - j)) / math.comb(n, batch) for j in range(most + 1)]


def zero_out_pair(rate, sigma, above):
    """(P, Q) for a zeroed record that a full batch keeps with chance `rate`: at e^eps >= 1 if `above`, else < 1."""
    with mp.workdps(DIGITS):
        s, g = 1 / mp.mpf(sigma), mp.mpf(rate)
        if above:
            return {-s: 1 - g, s: g}, {-s: 1 - g, mp.mpf(0): g}
        return {s: mp.mpf(1)}, {s: 1 - g, mp.mpf(0): g}


def hockey_stick(p, q, a):
    """int (p - a q)_+ of two mixtures, in DIGITS digits; p - a q may change sign at most once."""
    with mp.workdps(DIGITS):
        terms = defaultdict(mp.mpf)
        for mean, weight in p.items():
            terms[mean] += weight
        for mean, weight in q.items():
            terms[mean] -= a * weight
        means = sorted(mean for mean in terms if terms[mean])
        signs = [mp.sign(terms[mean]) for mean in means]
        changes = sum(one != two for one, two in itertools.pairwise(signs))
        if changes == 0:
            return max(mp.mpf(0), sum(terms.values(), mp.mpf(0)))
        assert changes == 1, "an exponential sum has at most as many zeros as changes of sign"
        up = signs[-1] > 0
        place = _zero([(mean, terms[mean]) for mean in means], up)
        ends = ((mean - place) if up else (place - mean) for mean in means)
        return max(mp.mpf(0), sum(terms[mean] * mp.ncdf(end) for mean, end in zip(means, ends, strict=True)))


def _zero(terms, up):
    """Where sum of c e^{m x - m^2/2} changes sign."""

    def value(x):
        return sum(c * mp.exp(m * x - m * m / 2) for m, c in terms) * (1 if up else -1)

    low, high = mp.mpf(-1), mp.mpf(1)
    while value(low) > 0:
        low *= 2
    while value(high) < 0:
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < 0 else (low, middle)
    # `gain` and `loss` each sum to nearly an exponential, so their log ratio is nearly linear: Newton's method
    gain = [(m, c) for m, c in terms if (c > 0) == up]
    loss = [(m, -c) for m, c in terms if (c > 0) != up]

    def log_ratio(x):
        one, two = (sum(abs(c) * mp.exp(m * x - m * m / 2) for m, c in side) for side in (gain, loss))
        three, four = (sum(abs(c) * m * mp.exp(m * x - m * m / 2) for m, c in side) for side in (gain, loss))
        return mp.log(one / two), three / one - four / two

    x = (low + high) / 2
    for _ in range(200):
        height, slope = log_ratio(x)
        low, high = (x, high) if height < 0 else (low, x)
        step = height / slope if slope else mp.inf
        following = x - step if low <= x - step <= high else (low + high) / 2
        if abs(following - x) <= mp.mpf(10) ** (-DIGITS // 2 - 8) * (1 + abs(x)):
            return following
        x = following
    return x


def two_steps(p, q, a, step=0.04):
    """`hockey_stick` of two independent steps of (P, Q): int p(x) H(P || Q; a q(x)/p(x)) dx by the trapezoid rule.

    The relative error was 2e-7 at most with a step of 0.1, and 3e-9 with 0.04, at three records and sigma = 1.2.
    """
    means = [float(m) for m in (*p, *q)]
    total = mp.mpf(0)
    with mp.workdps(DIGITS):
        for x in np.arange(min(means) - 8.0, max(means) + 8.0, step):
            x = mp.mpf(float(x))
            density, other = (sum(w * mp.npdf(x - m) for m, w in law.items()) for law in (p, q))
            total += mp.mpf(step) * density * hockey_stick(p, q, a * other / density)
    return total


# ---- random allocation -------------------------------------------------------------------------------------------


def put(k, t, sigma):
    """E(k - X_1 - ... - X_t)_+ for t = 1 or 2, X_i = e^{u_i/sigma - 1/(2 sigma^2)}, by mpmath."""
    with mp.workdps(DIGITS):
        s = 1 / mp.mpf(sigma)
        if k <= 0:
            return mp.mpf(0)
        if t == 1:
            d = mp.log(k) / s
            return k * mp.ncdf(d + s / 2) - mp.ncdf(d - s / 2)
        top = mp.log(k) / s + s / 2
        # the integrand has its mass where X_1 and X_2 are both near k/2, or where one of them is near k
        low = min(-mp.mpf(18), top - 18)
        pieces = [low + (top - low) * mp.mpf(j) / 60 for j in range(60)]
        pieces += [top - (top - low) / 60 / mp.mpf(4) ** j for j in range(1, 12)] + [top]
        return mp.quad(lambda u: mp.npdf(u) * put(k - mp.exp(s * u - s * s / 2), 1, sigma), pieces, maxdegree=5)


def allocation_remove(t, sigma, epsilon):
    """delta for a record in one of t = 1 or 2 slots: 1 - e^eps + put(t e^eps)/t."""
    with mp.workdps(DIGITS):
        grown = mp.exp(mp.mpf(epsilon))
        return 1 - grown + put(t * grown, t, sigma) / t


def allocation_add(t, sigma, epsilon):
    with mp.workdps(DIGITS):
        grown = mp.exp(mp.mpf(epsilon))
        return grown * put(t / grown, t, sigma) / t


def allocation_nested(t, sigma, epsilon, direction):
    """delta for a record in one of a few slots, by t - 1 nested sums of positive float64 terms; relative error 1e-9."""
    s, strike = 1.0 / sigma, t * math.exp(epsilon if direction == "remove" else -epsilon)
    total = float(_price(np.array([strike]), t, s, direction == "remove")[0]) / t
    return total if direction == "remove" else total * math.exp(epsilon)


def _price(k, t, s, call):
    """E(S - k)_+ if `call`, else E(k - S)_+, where S is a sum of t log-normals X_i and k > 0 an array.

    The trapezoid rule in w, with X_1 = k/(1 + e^-w), covers X_1 < k; its integrand is analytic for |Im w| < pi.
    The part of a call with X_1 > k is added in closed form.
    """
    d = np.log(k) / s
    if t == 1:
        if call:
            return np.maximum(special.ndtr(s / 2 - d) - k * special.ndtr(-d - s / 2), 0.0)
        return np.maximum(k * special.ndtr(d + s / 2) - special.ndtr(d - s / 2), 0.0)
    h = 0.25 * min(s, 1.0)
    far = s * (13.0 + s) + abs(float(np.max(np.abs(np.log(k)))))
    w = np.arange(-far, far + 40.0, h)  # + 40, since the terms of a call fall only like e^-w
    u = (np.log(k)[:, None] + special.log_expit(w)) / s + s / 2
    weights = np.exp(-0.5 * u * u + special.log_expit(-w)) * (h / s / math.sqrt(2 * math.pi))
    some = weights > 1e-60
    rest, inner = (k[:, None] * special.expit(-w))[some], np.zeros(weights.shape)
    inner[some] = np.concatenate([_price(x, t - 1, s, call) for x in np.array_split(rest, 1 + rest.size // 4096)])
    total = (weights * inner).sum(-1)
    return total + special.ndtr(s / 2 - d) + (t - 1 - k) * special.ndtr(-d - s / 2) if call else total


def _interval(values):
    """An interval for the mean of values in [0, 1], by the empirical Bernstein inequality (Maurer, Pontil 2009)."""
    log = math.log(4.0 / FAILURE)
    half = math.sqrt(2.0 * values.var(ddof=1) * log / values.size) + 7.0 * log / (3.0 * (values.size - 1))
    return values.mean() - half, values.mean() + half


def allocation_by_sampling(t, sigma, epsilon, direction, count, seed=0):
    """Interval for delta: the mean of (1 - e^eps/S)_+ under P (remove) or (1 - e^eps S)_+ under Q (add), S = dP/dQ."""
    return k_of_t_by_sampling(1, t, sigma, epsilon, direction, count, seed)


def k_of_t_by_sampling(k, t, sigma, epsilon, direction, count, seed=0):
    """Interval for delta as in `allocation_by_sampling`, but for a record in k of t slots: S = e_k(X)/C(t, k)."""
    rng, s = np.random.default_rng(seed), 1.0 / sigma
    u = rng.standard_normal((count, t))
    if direction == "remove":
        u[:, :k] += s
    x = np.exp(s * u - s * s / 2)
    sums = np.zeros((k + 1, count))
    sums[0] = 1.0
    for j in range(t):
        for i in range(min(k, j + 1), 0, -1):
            sums[i] += x[:, j] * sums[i - 1]
    return _values(sums[k] / math.comb(t, k), epsilon, direction)


def group_of_allocation_by_sampling(t, sigma, epsilon, direction, count, seed=0):
    """Interval for delta of two records in independent slots; dP/dQ is a mean over all pairs of slots."""
    rng, s = np.random.default_rng(seed), 1.0 / sigma
    u = rng.standard_normal((count, t))
    if direction == "remove":
        for _ in range(2):
            u[np.arange(count), rng.integers(0, t, count)] += s
    total = np.zeros(count)
    for i, j in itertools.product(range(t), repeat=2):
        mean = np.zeros(t)
        mean[i] += s
        mean[j] += s
        total += np.exp(u @ mean - 0.5 * mean @ mean)
    return _values(total / t**2, epsilon, direction)


def _values(ratio, epsilon, direction):
    grown = math.exp(epsilon)
    return _interval(np.maximum(1.0 - (grown / ratio if direction == "remove" else grown * ratio), 0.0))


def finite_allocation(p, q, t, epsilon):
    """(remove, add) of a finite pair in one of t slots, by enumeration of every output."""
    grown, remove, add = math.exp(epsilon), 0.0, 0.0
    for outputs in itertools.product(range(len(p)), repeat=t):
        below = math.prod(q[o] for o in outputs)
        above = sum(math.prod((p if i == slot else q)[o] for i, o in enumerate(outputs)) for slot in range(t)) / t
        remove, add = remove + max(above - grown * below, 0.0), add + max(below - grown * above, 0.0)
    return remove, add


# ---- a cap on a Poisson sample -----------------------------------------------------------------------------------


def cap_numbers(n, q, cap):
    """As mpf: tau = Pr[the other records fill the batch], and q' = Pr[a record is kept | the others fill the batch]."""
    with mp.workdps(DIGITS):
        law = binomial_law(n - 1, q)
        tau = sum(law[cap:], mp.mpf(0))
        kept = sum((law[m] * mp.mpf(q) * cap / (m + 1) for m in range(cap, n)), mp.mpf(0))
        return tau, kept / tau if tau else mp.mpf(0)


def truncated_bound(n, q, cap, sigma, epsilon, relation, direction):
    """Bound on delta of one capped Poisson step: tau delta(others fill the batch) + (1 - tau) delta(they do not)."""
    with mp.workdps(DIGITS):
        tau, rate = cap_numbers(n, q, cap)
        a, q, s = mp.exp(mp.mpf(epsilon)), mp.mpf(q), 1 / mp.mpf(sigma)
        none = {mp.mpf(0): mp.mpf(1)}
        plain = {mp.mpf(0): 1 - q, s: q}, none
        if relation == "add_remove":
            capped = {mp.mpf(0): 1 - rate, 2 * s: rate}, none
        elif relation == "zero_out":
            capped = zero_out_pair(rate, sigma, direction == "remove")
        else:
            plain = {mp.mpf(0): 1 - q, s: q}, {mp.mpf(0): 1 - q, -s: q}
            capped = {mp.mpf(0): 1 - rate, 2 * s: rate}, none
            direction = "remove"  # for a >= 1 the bound is the same in both directions
        total = mp.mpf(0)
        for share, (one, two) in ((1 - tau, plain), (tau, capped)):
            if share:
                total += share * (hockey_stick(one, two, a) if direction == "remove" else hockey_stick(two, one, a))
        return total


def truncated_by_enumeration(records, q, cap):
    """{sum of the kept records: probability}, by enumeration of samples and kept subsets; None is no record."""
    records, law = [x for x in records if x is not None], defaultdict(float)
    for drawn in itertools.product((0, 1), repeat=len(records)):
        chance = math.prod(q if d else 1 - q for d in drawn)
        sample = [x for x, d in zip(records, drawn, strict=True) if d]
        subsets = list(itertools.combinations(sample, min(cap, len(sample))))
        for subset in subsets:
            law[float(sum(subset))] += chance / len(subsets)
    return dict(law)


def any_hockey_stick(p, q, sigma, a):
    """int (p - a q)_+ of two mixtures on the line with any number of changes of sign, error about 1e-12."""
    means = np.array(sorted({*p, *q})) / sigma
    terms = np.array([p.get(m, 0.0) - a * q.get(m, 0.0) for m in sorted({*p, *q})])

    def value(x):
        x = np.asarray(x)[..., None]
        return (terms * np.exp(means * x - means**2 / 2 - np.abs(x) * np.abs(means).max())).sum(-1)

    grid = np.linspace(means.min() - 60.0, means.max() + 60.0, 4001)
    heights = value(grid)
    crossed = np.flatnonzero(heights[:-1] * heights[1:] < 0)
    places = [optimize.brentq(value, grid[i], grid[i + 1], xtol=1e-13) for i in crossed]
    ends, total = [-np.inf, *places, np.inf], 0.0
    for low, high in itertools.pairwise(ends):
        total += max(float(terms @ (special.ndtr(high - means) - special.ndtr(low - means))), 0.0)
    return total


# ---- shuffled batches --------------------------------------------------------------------------------------------


def shuffled_two(sigma, epsilon, direction):
    """delta to 1e-9 of two shuffled batches: others -1, a record 1 in P = mean_i N(2 e_i) or 0 in Q = mean_i N(e_i)."""
    s, grown = 1.0 / sigma, math.exp(epsilon)
    two, one = (1.0, -grown) if direction == "remove" else (-grown, 1.0)

    def inner(y):
        """N(y) E_x(two A_2 + one A_1)_+, A_m = e^{m s x - m^2 s^2/2} + e^{m s y - m^2 s^2/2}: quadratic in e^{s x}."""
        rest = two * math.exp(2 * s * y - 2 * s * s) + one * math.exp(s * y - s * s / 2)
        a, b = two * math.exp(-2 * s * s), one * math.exp(-s * s / 2)
        square = b * b - 4 * a * rest
        zeros = sorted((-b + sign * math.sqrt(square)) / (2 * a) for sign in (-1, 1)) if square > 0 else []
        ends = [-np.inf, *(math.log(z) / s for z in zeros if z > 0), np.inf]
        total = 0.0
        for low, high in itertools.pairwise(ends):
            part = sum(
                c * (special.ndtr(high - m) - special.ndtr(low - m)) for c, m in ((two, 2 * s), (one, s), (rest, 0.0))
            )
            total += max(part, 0.0)
        return total * math.exp(-y * y / 2) / math.sqrt(2 * math.pi)

    ends = np.linspace(-9.0, 9.0 + 2 * s, 41)
    return 0.5 * sum(integrate.quad(inner, x, y, epsabs=1e-13, epsrel=1e-9)[0] for x, y in itertools.pairwise(ends))


def clopper_pearson(hits, count, failure=FAILURE):
    """An interval of a probability from hits in count trials."""
    low = stats.beta.ppf(failure / 2, hits, count - hits + 1) if hits else 0.0
    high = stats.beta.ppf(1 - failure / 2, hits + 1, count - hits) if hits < count else 1.0
    return float(low), float(high)
