"""Upper bounds by name: `selection.bound_epsilon` and `selection.bound_delta` (README.md, "Bounds")."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import DELTA, NON_NEGATIVE, InputError, broadcast_shape, check, choice, refuse_tracers
from jaxacct.engines import backend
from jaxacct.mechanisms import RELATIONS, Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.representations.renyi_divergences import delta_from_renyi, epsilon_from_renyi, renyi_divergence
from jaxacct.selection import envelope
from jaxacct.selection.base_profile import SAYS_NOTHING, Sides, gaussian_mu, sides, under, upper_delta, upper_epsilon
from jaxacct.selection.law_of_k import Binomial, Law, Poisson, TruncatedNegativeBinomial, rebuilt, require_law
from jaxacct.selection.worst_case import MOST_KEPT

CHUNK = 256
"""Number of configurations computed at once: so few that their arrays stay in the processor's cache."""
PROFILE_LAWS = (TruncatedNegativeBinomial, Binomial, Poisson)
"""Laws of K, the number of runs, for which a bound from the base's privacy profile is published."""
RENYI_LAWS = (TruncatedNegativeBinomial, Poisson)
"""Laws of K for which a bound from the base's Rényi divergences is published."""
RENYI_ORDERS = 1.0 + np.geomspace(1e-2, 1e4, 241)
"""Rényi orders, 40 for each power of ten of `order - 1`. Each gives a true bound, so a coarse grid is enough."""
CHORD = 8
"""The base's delta is computed for every CHORD-th order. Chords bound it for the other orders."""
ROUNDED_UP = 1.0 + 1e-12
"""Factor by which the published bounds are rounded up. It covers the rounding error of each formula."""
REACHES = (9.0, 13.0, 37.5)
"""How many standard deviations the nodes may go beyond the means 0 and mu; beyond 37.5, masses underflow in float64."""


def by_profile(quantity: str, run: Mechanism, law: Law, given: np.ndarray, relation: str) -> np.ndarray:
    """Bound epsilon by `eps_base(delta/m) + shift`, or delta by `m delta_base(eps - shift)`, with m = E[K]."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape, given.shape)
    value = np.zeros(shape)
    for side in sides(run, relation):
        moved = shift(run, law, side)
        if quantity == "epsilon":
            left = np.broadcast_to(given / law.mean, shape) / ROUNDED_UP
            found = (upper_epsilon(run, left, side.forward) + moved) * ROUNDED_UP
        else:
            at = np.broadcast_to(given / ROUNDED_UP - moved, shape)
            base = upper_delta(run, np.maximum(at, -700.0), side.forward)
            found = np.where(at > -700.0, np.minimum(law.mean * base * ROUNDED_UP, 1.0), 1.0)
        value = np.maximum(value, found)
    return value


def shift(run: Mechanism, law: Law, side: Sides) -> np.ndarray:
    """Return the least shift of eps that the theorem for K's law allows; inf if none (README.md, "Which direction")."""
    if isinstance(law, TruncatedNegativeBinomial):
        return (np.asarray(law.eta) + 1.0) * least_growth(run, law, side.reverse) * ROUNDED_UP
    if isinstance(law, Binomial):
        return _binomial(run, law, side.forward)
    if isinstance(law, Poisson):
        # The theorem allows the shift m (e^{eps_1} - 1 + delta(eps_1)) for every eps_1 >= 0. This shift does not
        # decrease in eps_1, so it is least at eps_1 = 0. delta(0) is the total variation, the same in both directions.
        return np.asarray(law.mean) * upper_delta(run, np.zeros(()), side.forward) * ROUNDED_UP
    names = ", ".join(kind.__name__ for kind in PROFILE_LAWS)
    raise InputError(f"no profile bound is published for k = {type(law).__name__}; use {names}, or bound='envelope'")


def least_growth(run: Mechanism, law: TruncatedNegativeBinomial, relation: str) -> np.ndarray:
    """Return the log of the minimum over eps_1 >= 0 of `e^{eps_1} + (1-gamma)/gamma delta_base(eps_1)`."""
    odds = (1.0 - np.asarray(law.gamma)) / law.gamma
    # The sum is convex in e^{eps_1}, as `_least` needs. A search beyond the eps_1 with delta 1e-12 gains nothing.
    high = upper_epsilon(run, np.asarray(1e-12), relation)
    high = np.broadcast_to(np.where(np.isfinite(high), high, 50.0), np.broadcast_shapes(batch_shape(run), law.shape))
    return _least(high, lambda at: at + np.log1p(odds * np.exp(-at) * upper_delta(run, at, relation)))


def _binomial(run: Mechanism, law: Binomial, relation: str) -> np.ndarray:
    """Return the smallest shift that the theorem for binomial K allows, by a search over its free parameter eps_1."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape)
    n, p = np.broadcast_to(law.trials, shape), np.broadcast_to(law.probability_of_run, shape)

    def value(at: np.ndarray) -> np.ndarray:
        base = upper_delta(run, at, relation)
        meets = np.expm1(at) * (1.0 - p) >= p * base * ROUNDED_UP
        return np.where(meets, np.log1p(p * (np.expm1(at) + base)), np.inf)

    # The search ends at an eps_1 that meets the condition of the theorem (`meets`) even for delta = 1.
    alone = np.where(p == 1.0, np.inf, _least(np.log1p(p / np.maximum(1.0 - p, 1e-300)), value))
    return np.where(n == 1.0, 0.0, np.maximum(n - 1.0, 1.0) * alone) * ROUNDED_UP


def _least(high: np.ndarray, value: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the minimum over [0, high] of a function that first falls and then rises, by ever finer grids."""
    low, best = np.zeros(high.shape), np.full(high.shape, np.inf)
    for count in (49, 17, 17, 17, 17):  # sizes of the grids, which may be coarse: every `value` is a true bound
        grid = low + (high - low) * np.linspace(0.0, 1.0, count).reshape(-1, *(1,) * high.ndim)
        values = value(grid)
        at = np.argmin(values, axis=0)[None]
        low, high = (np.take_along_axis(grid, np.clip(at + d, 0, count - 1), 0)[0] for d in (-1, 1))
        best = np.minimum(best, np.take_along_axis(values, at, 0)[0])
    return best


def by_renyi(quantity: str, run: Mechanism, law: Law, given: np.ndarray, relation: str) -> np.ndarray:
    """Bound `quantity` from the selection's Rényi divergences in each direction. Return the larger upper bounds."""
    shape = np.broadcast_shapes(batch_shape(run), law.shape, given.shape)
    convert = epsilon_from_renyi if quantity == "epsilon" else delta_from_renyi
    value = np.zeros(())
    for side in sides(run, relation):
        values = curve(run, law, RENYI_ORDERS, side)
        # The batch of base and law may have fewer axes than `shape`. The missing axes are inserted after the orders.
        values = np.expand_dims(values, tuple(range(1, 2 + len(shape) - values.ndim)))
        values = np.broadcast_to(values, (RENYI_ORDERS.size, *shape))
        value = np.maximum(value, np.asarray(convert(RENYI_ORDERS, values, np.broadcast_to(given, shape)).upper))
    return value


def curve(run: Mechanism, law: Law, orders: np.ndarray, side: Sides) -> np.ndarray:
    """Return upper bounds (O, *batch) of the selection's Rényi divergences in one direction, at orders (O,) above 1.

    R is the base's divergence, R_reverse and delta_reverse belong to its reverse direction, and m = E[K].  Truncated
    negative binomial K: `R(a) + (1+eta) min_b ((1 - 1/b) R_reverse(b) + log(1/gamma)/b) + log(m)/(a-1)`.
    Poisson K: `log(e^-m + m e^{(a-1)(R(a) + m delta_reverse(eps_1))})/(a-1)` with `e^{eps_1} = 1 + 1/(a-1)`.
    """
    shape = np.broadcast_shapes(batch_shape(run), law.shape)
    along = orders.reshape(-1, *(1,) * len(shape))
    base = _divergence(run, along, side.forward)
    if isinstance(law, TruncatedNegativeBinomial):
        reverse = _divergence(run, along, side.reverse)
        spread = (1.0 - 1.0 / along) * reverse - np.log(law.gamma) / along
        value = base + (1.0 + np.asarray(law.eta)) * np.min(spread, axis=0) + np.log(law.mean) / (along - 1.0)
    elif isinstance(law, Poisson):
        grown = np.log(law.mean) + (along - 1.0) * (base + law.mean * _missed(run, along, side.reverse))
        value = np.logaddexp(-np.asarray(law.mean), grown) / (along - 1.0)
    else:
        names = ", ".join(kind.__name__ for kind in RENYI_LAWS)
        raise InputError(f"no Rényi bound is published for k = {type(law).__name__}; use {names}, or bound='envelope'")
    return np.maximum(value, 0.0) * ROUNDED_UP


def _missed(run: Mechanism, orders: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of delta at e^eps = 1 + 1/(order - 1): chords, since delta is convex in e^eps."""
    beyond = 1.0 / (orders.reshape(-1) - 1.0)  # e^eps - 1, which falls
    known = np.append(np.arange(0, beyond.size - 1, CHORD), beyond.size - 1)
    at = beyond[known].reshape(-1, *orders.shape[1:])
    high = upper_delta(run, np.log1p(at), relation)
    after = np.clip(np.searchsorted(known, np.arange(beyond.size)), 1, known.size - 1)
    share = (beyond.reshape(orders.shape) - at[after]) / (at[after - 1] - at[after])
    return high[after] * (1.0 - share) + high[after - 1] * share


def _divergence(run: Mechanism, orders: np.ndarray, relation: str) -> np.ndarray:
    """Return upper bounds of the base's Rényi divergences. Those of one configuration are cached."""
    if batch_shape(run):
        return np.asarray(renyi_divergence(run, orders, relation).upper)
    return _divergence_once(run, orders.tobytes(), relation).reshape(orders.shape)


@functools.lru_cache(MOST_KEPT)
def _divergence_once(run: Mechanism, orders: bytes, relation: str) -> np.ndarray:
    """Return upper bounds of one base's Rényi divergences, (O,). A search over laws of K asks for them again."""
    return np.asarray(renyi_divergence(run, np.frombuffer(orders), relation).upper)


def bound_epsilon(
    run: Mechanism, k: Law, delta: ArrayLike, *, bound: str = "auto", relation: str = "add_or_remove_one"
) -> Bounds:
    """Bound the eps for which "run K times, release the best" is (eps, delta)-DP whatever the score.

    Parameters
    ----------
    run : the base; it broadcasts with k and delta.
    k : the law of K.
    delta : array_like in (0, 1)
    bound : {"auto", "envelope", "privacy_profile", "renyi", "monotone_score"}
        "envelope" is for every law of K, and near the exact worst case for random K.  "privacy_profile" and "renyi" are
        published theorems, and refuse other laws than theirs.  "monotone_score" is true only for scores that are
        monotone in the likelihood ratio.  "auto" is the smallest bound that holds for every score and for the law k;
        `Bounds.engine` names the bound that was taken.
    relation : {"add_or_remove_one", "add_one", "remove_one", "replace_one", "zero_out"}

    Returns
    -------
    Bounds of kind "bound" (or "conditional: monotone score"), with lower 0.  Where the bound says nothing, upper is inf
    and the status "width".

    References
    ----------
    README.md of this folder, "The envelope" and "What every guarantee here assumes".  Koskela, Redberg and Wang (2024),
    Theorems 5.2 and 5.7, Corollary 5.8.  Papernot and Steinke (2022).  Xiang, Wang and Wang (2024), Algorithm 3.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = selection.bound_epsilon(ja.Gaussian(3.73), selection.Geometric(0.1), 1e-5, bound="privacy_profile")
    >>> round(float(b.upper), 4), b.kind
    (1.9992, 'bound')
    """
    return _evaluated("epsilon", run, k, np.asarray(check("delta", delta, DELTA)), bound, relation)


def bound_delta(
    run: Mechanism, k: Law, epsilon: ArrayLike, *, bound: str = "auto", relation: str = "add_or_remove_one"
) -> Bounds:
    """Bound the delta at eps >= 0 of "run K times, release the best" whatever the score.

    Parameters
    ----------
    run : the base; it broadcasts with k and epsilon.
    k : the law of K.
    epsilon : array_like >= 0
    bound, relation : as for `bound_epsilon`.

    Returns
    -------
    Bounds of kind "bound" (or "conditional: monotone score"), with lower 0.

    References
    ----------
    As for `bound_epsilon`.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> b = selection.bound_delta(ja.Gaussian(3.73), selection.Poisson(10), 2.3)
    >>> b.engine, bool(b.upper < 1e-5)
    ('envelope', True)
    """
    return _evaluated("delta", run, k, np.asarray(check("epsilon", epsilon, NON_NEGATIVE)), bound, relation)


def _evaluated(quantity: str, run: Mechanism, k: Law, values: np.ndarray, bound: str, relation: str) -> Bounds:
    """Return the named upper bound of `quantity`. "auto" is the least of the bounds that hold for every score."""
    require_mechanism("run", run)
    refuse_tracers(f"selection.bound_{quantity}", "the kernels", run=run, k=k)
    choice("relation", relation, RELATIONS)
    choice("bound", bound, ("auto", *BOUNDS))
    run, relation = under(run, relation)
    require_law("k", k)
    k = rebuilt(k)
    name = "delta" if quantity == "epsilon" else "epsilon"
    shape = broadcast_shape({"the mechanism": batch_shape(run), "k": k.shape, name: values.shape})
    known = {name: each for name, each in BOUNDS.items() if each.kind == "bound" and isinstance(k, each.laws)}
    most = SAYS_NOTHING[quantity]
    best, engine = np.full(shape, most), np.full(shape, next(iter(known)) if bound == "auto" else bound, dtype="<U16")
    for name in known if bound == "auto" else (bound,):
        with backend.job(best.size):
            found = np.broadcast_to(BOUNDS[name].upper(quantity, run, k, values, relation), shape)
        found = np.where((found >= 0.0) & (found <= most), found, most)  # NaN becomes the trivial bound
        engine = np.where(found < best, name, engine)
        best = np.minimum(best, found)
    kind, open_ = "bound" if bound == "auto" else BOUNDS[bound].kind, np.where(np.isinf(best), "width", "ok")
    status = np.where(best == 0.0, "zero", open_) if quantity == "epsilon" else "ok"
    return Bounds(np.zeros(shape), best, best, kind, status, engine)


def by_monotone_score(quantity: str, run: Mechanism, law: Law, given: np.ndarray, relation: str) -> np.ndarray:
    """Return eps or delta of selection by a monotone score, for unsampled Gaussians. The error of eps is about 1e-9."""
    if (mu := gaussian_mu(run)) is None:
        raise InputError("bound = 'monotone_score' needs a base of unsampled Gaussians; use bound='worst_case'")
    shape = np.broadcast_shapes(batch_shape(run), law.shape, given.shape)
    laws = law.flattened(shape)
    mu, given = (np.broadcast_to(x, shape).reshape(-1) for x in (mu.reshape(batch_shape(run)), given))
    mean = np.broadcast_to(law.mean, shape).reshape(-1)
    if quantity == "epsilon":
        # At most 1e-9 delta of the winner's mass is farther than `far` from the mean of the draws, so no nodes are
        # needed there. Beyond the nodes the log ratio is taken to be monotone.
        far = np.sqrt(2.0 * np.maximum(np.log(mean / 1e-9) - np.log(given), 0.0))
    else:
        # the base's loss is eps at the outcome given/mu + mu/2, and `far` goes 2 standard deviations beyond
        far = np.maximum(given / mu + 0.5 * mu + 2.0, REACHES[1])
    reach = np.asarray(np.searchsorted(REACHES[:-1], far))
    solve = crossing if quantity == "epsilon" else divergence
    found = np.empty(mu.size)
    for each in np.unique(reach):
        rows = np.flatnonzero(reach == each)
        for index in np.split(rows, range(CHUNK, rows.size, CHUNK)):
            found[index] = solve(line(laws.taken(index), mu[index], REACHES[each]), given[index])
    return found.reshape(shape)


# The winner is the largest of K draws from N(0, 1), or from N(mu, 1).  K has the generating function phi.  For draws
# with distribution function F and density f, the winner has the density phi'(F) f, and the mass phi(F(b)) - phi(F(a))
# in (a, b].  With probability phi(0), under both laws, K = 0 and nothing wins.  With P and Q the winner's two laws, the
# divergence at ratio E = e^eps is P(A) - E Q(A).  Here A is the set on which l, the log ratio of the densities, is
# above eps: a union of few intervals, whose ends `_best_set` solves for (README.md, "Computing monotone_score").


class Line(NamedTuple):
    """For each of R configurations: X nodes, the log ratio at each node, and the masses between neighbouring nodes."""

    laws: Law  # (R,) laws of K
    mu: np.ndarray  # (R,) the mean mu of N(mu, 1)
    x: np.ndarray  # (R, X) nodes, from -inf to inf
    log_ratio: np.ndarray  # (R, X) log of the winner's density for N(mu, 1) over that for N(0, 1); nan if both are 0
    present: np.ndarray  # (R, X - 1) masses of the winner's law for N(mu, 1) between neighbouring nodes
    without: np.ndarray  # (R, X - 1) masses of the winner's law for N(0, 1) between neighbouring nodes


def line(laws: Law, mu: np.ndarray, reach: float) -> Line:
    """Return the `Line` of the laws. If the log ratio has an extremum between two nodes, one node is moved to it."""
    steps = int(np.ceil(2.0 * reach / 0.32))  # the nodes around each mean are at most 0.32 apart
    own = np.linspace(-reach, reach, steps + 1)
    x = np.sort(np.concatenate([own + 0.0 * mu[:, None], own[:-1] + reach / steps + mu[:, None]], axis=1), axis=1)
    edge = np.full((mu.size, 1), np.inf)
    x = np.concatenate([-edge, x, edge], axis=1)
    column = laws.taken((slice(None), None))
    log_ratio, slope = _log_ratio(column, mu[:, None], x)
    turned = (slope[:, 2:-1] > 0.0) != (slope[:, 1:-2] > 0.0)
    row, cell = np.nonzero(turned & np.isfinite(slope[:, 2:-1]) & np.isfinite(slope[:, 1:-2]))
    cell, some, mean = cell + 1, laws.taken(row), mu[row]
    at = _zero(lambda z: _log_ratio(some, mean, z)[1], x[row, cell], x[row, cell + 1])
    node = cell + (at - x[row, cell] > x[row, cell + 1] - at)
    x[row, node], log_ratio[row, node] = at, _log_ratio(some, mean, at)[0]
    return Line(laws, mu, x, log_ratio, *(_masses(column, z[:, :-1], z[:, 1:]) for z in (x - mu[:, None], x)))


def _log_ratio(laws: Law, mu: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `Line.log_ratio` at x, and its slope; NaN if phi' is 0 or not finite."""
    logs, slopes = [], []
    for z in (x - mu, x):
        steep, ratio = laws.steepness(ndtr(z), ndtr(-z))
        logs.append(steep)
        slopes.append(ratio * np.exp(-0.5 * z**2) * (2.0 * np.pi) ** -0.5)
    with np.errstate(invalid="ignore"):
        log_ratio = (logs[0] - logs[1]) + mu * (x - 0.5 * mu)
        log_ratio = np.where(np.isfinite(x), log_ratio, x)
        return log_ratio, slopes[0] - slopes[1] + mu


def _masses(laws: Law, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the probabilities that the largest of K draws from N(0, 1) lies in the intervals (low, high]."""
    upper = low > 0.0  # where low > 0, a difference of upper tails loses fewer digits
    x, y = ndtr(high), ndtr(-high)
    return laws.rise(x, y, np.maximum(np.where(upper, ndtr(-low) - y, x - ndtr(low)), 0.0))


def _zero(function: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the x between `low` and `high` at which the function changes its sign, by the Illinois rule."""
    at_low, at_high = function(low), function(high)
    at, before = low, np.zeros(low.shape)
    for _ in range(12):  # few steps suffice: an error e in an end of A changes the divergence by about e^2
        with np.errstate(divide="ignore", invalid="ignore"):
            share = at_low / (at_low - at_high)
        at = low + np.where(np.isfinite(share), np.clip(share, 0.0, 1.0), 0.5) * (high - low)
        value = function(at)
        moved = np.where((value > 0.0) == (at_low > 0.0), 1.0, -1.0)  # 1 if the low end moves, -1 if the high end does
        halved = np.where(moved == before, 0.5, 1.0)
        low, at_low = np.where(moved > 0.0, at, low), np.where(moved > 0.0, value, at_low * halved)
        high, at_high = np.where(moved < 0.0, at, high), np.where(moved < 0.0, value, at_high * halved)
        before = moved
    return at


def _best_set(rows: Line, side: float, eps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (P(A), Q(A)) for the set A on which side * l > eps. P is `present` if side is 1, `without` if it is -1."""
    active = side * rows.log_ratio > eps[:, None]
    full = active[:, 1:] & active[:, :-1]
    masses = (rows.present, rows.without)[:: int(side)]
    first, second = (np.sum(np.where(full, each, 0.0), axis=1) for each in masses)
    row, cell = np.nonzero(active[:, 1:] != active[:, :-1])
    laws, mu, rising = rows.laws.taken(row), rows.mu[row], active[row, cell + 1]
    ends = np.stack([rows.x[row, cell], rows.x[row, cell + 1]])
    # `_zero` searches between the ends of the cell: replace an end at which l is not finite by the other end
    seen = np.isfinite([rows.log_ratio[row, cell], rows.log_ratio[row, cell + 1]])
    inner = np.where(seen, ends, ends[::-1])
    at = np.where(np.isinf(ends[0]), *ends)
    known = seen.any(axis=0)
    laws_of, mu_of, eps_of = laws.taken(known), mu[known], eps[row[known]]
    at[known] = _zero(lambda x: side * _log_ratio(laws_of, mu_of, x)[0] - eps_of, *inner[:, known])
    low, high = np.where(rising, at, ends[0]), np.where(rising, ends[1], at)
    shifts = (mu, 0.0 * mu)[:: int(side)]
    for total, shift in zip((first, second), shifts, strict=True):
        np.add.at(total, row, _masses(laws, low - shift, high - shift))
    return first, second


def divergence(rows: Line, eps: np.ndarray) -> np.ndarray:
    """Return the winner's hockey-stick divergence, (R,), at ratio e^eps, eps >= 0, in the worse direction."""
    found = np.zeros(rows.mu.size)
    for side in (1.0, -1.0):
        first, second = _best_set(rows, side, eps)
        with np.errstate(divide="ignore"):
            cost = np.exp(np.minimum(eps + np.log(second), envelope.LARGEST_EPS))
        found = np.maximum(found, first - cost)
    return found


def crossing(rows: Line, delta: np.ndarray) -> np.ndarray:
    """Return the least eps >= 0, (R,), at which `divergence` is at most delta; inf if this eps is above LARGEST_EPS."""
    largest, found = np.exp(envelope.LARGEST_EPS), np.ones(rows.mu.size)

    def grown(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the E at which `P(A) - E Q(A) = delta`, but at least `found` and at most e^LARGEST_EPS."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            above = (first - delta) / second
        return np.minimum(np.where(above > found, above, found), largest)

    for side in (1.0, -1.0):
        cells = (rows.present, rows.without)[:: int(side)]
        for share, cheap in ((1e-3, True), (1e-13, False)):  # first with whole cells as A, then with the exact A
            for _ in range(60):  # a few passes usually suffice, since the error falls faster than geometrically
                if cheap:
                    active = cells[0] > found[:, None] * cells[1]
                    masses = [np.sum(np.where(active, each, 0.0), axis=1) for each in cells]
                else:
                    masses = [*_best_set(rows, side, np.log(found))]
                before, found = found, grown(*masses)
                if not np.any((found > before * (1.0 + share)) & (found < largest)):
                    break
    return np.where(found < largest, np.log(found), np.inf)


class Bound(NamedTuple):
    """An upper bound of a selection's epsilon or delta."""

    upper: Callable[[str, Mechanism, Law, np.ndarray, str], np.ndarray]  # takes (quantity, base, law, values, relation)
    kind: str = "bound"
    laws: tuple[type[Law], ...] = (Law,)  # the laws of K for which the bound holds


BOUNDS = {
    "envelope": Bound(envelope.upper),
    "privacy_profile": Bound(by_profile, laws=PROFILE_LAWS),
    "renyi": Bound(by_renyi, laws=RENYI_LAWS),
    "monotone_score": Bound(by_monotone_score, kind="conditional: monotone score"),
}
"""The bound for each name that `bound_epsilon`, `bound_delta` and `select` take."""
