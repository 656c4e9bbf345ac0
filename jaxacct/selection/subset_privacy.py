"""Tuning on a random subset of the data: X_1 a Poisson sample of rate q, tuned on; then one training run.

Variant "rest" trains on what is left, X without X_1; variant "all" trains on X [Koskela and Kulkarni 2023].  By Rényi
divergences as published, or by privacy profiles, which are rigorous for both variants (README.md of this
folder, "Tuning on a random subset").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.types import ArrayLike, Numbers
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, PROBABILITY, InputError, check, choice
from jaxacct.mechanisms import Mechanism, PoissonSampled, PrivacyProfile, batch_shape, compose
from jaxacct.mechanisms.base import FinitePair, require_mechanism
from jaxacct.representations.renyi_divergences import epsilon_from_renyi, renyi_divergence
from jaxacct.selection.base_profile import Sides, upper_delta
from jaxacct.selection.law_of_k import Law
from jaxacct.selection.named_bounds import bound_delta, bound_epsilon, curve

VARIANTS = ("rest", "all")
"""The data on which the final run is trained: those outside the sample, or all."""
WHOLE_ORDERS = np.arange(2.0, 129.0)
"""Whole orders of the Rényi form, for which the published sums are finite."""
ROUNDED_UP = 1.0 + 1e-12
"""A factor larger than the rounding of any of these sums, by which they are rounded up."""
BOTH_SIDES = (Sides("remove_one", "add_one"), Sides("add_one", "remove_one"))
"""Removing and adding a record, each with its reverse."""


def subset_epsilon(
    tuned: Mechanism,
    k: Law,
    trained: Mechanism,
    sampling_probability: ArrayLike,
    delta: ArrayLike,
    *,
    variant: str = "rest",
    form: str = "profile",
) -> Bounds:
    """eps of "tune on a Poisson sample, then train once" for the release of the tuning's winner and the final run.

    Neighbours differ by adding or removing one record.

    Parameters
    ----------
    tuned : Mechanism
        One run of a candidate on the sample, one configuration.
    k : Law
        One law of K; for form "renyi" Poisson or truncated negative binomial.
    trained : Mechanism
        The final run, one configuration.
    sampling_probability : float in [0, 1]
        Of the sample.
    delta : float in (0, 1)
    variant : {"rest", "all"}
        The final run is on the data outside the sample, or on all data.
    form : {"profile", "renyi"}
        "profile": for "rest" the pair `q P_1 x Q_2 + (1-q) Q_1 x P_2` against `Q_1 x Q_2`, (P_1, Q_1) dominating the
        tuning by the envelope and (P_2, Q_2) the run; for "all" the sampled tuning and the run composed.  "renyi": for
        "rest" the published theorem, for "all" subsampled tuning composed with the run; whole orders from 2 to 128.

    Returns
    -------
    Bounds
        kind "bound", lower 0.

    References
    ----------
    Koskela and Kulkarni (2023), Theorem 1 (equations 3.6, 3.7).  Zhu and Wang (2019).  README.md of this folder,
    "Tuning on a random subset".

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> run = ja.Gaussian(4.0)
    >>> b = selection.subset_epsilon(run, selection.Poisson(10), run, 0.1, 1e-5)
    >>> whole = selection.bound_epsilon(run, selection.Poisson(10), 1e-5)
    >>> b.kind, bool(b.upper < whole.upper)
    ('bound', True)
    """
    require_mechanism("tuned", tuned)
    require_mechanism("trained", trained)
    if not isinstance(k, Law) or k.shape or batch_shape(tuned) or batch_shape(trained):
        raise InputError("tuned, k and trained must be one configuration each; call once for each")
    q = _scalar("sampling_probability", check("sampling_probability", sampling_probability, PROBABILITY))
    target = _scalar("delta", check("delta", delta, DELTA))
    choice("variant", variant, VARIANTS)
    if choice("form", form, ("profile", "renyi")) == "renyi":
        tuning = np.stack([curve(tuned, k, WHOLE_ORDERS, side) for side in BOTH_SIDES])
        run = np.stack([np.asarray(renyi_divergence(trained, WHOLE_ORDERS, side.forward).upper) for side in BOTH_SIDES])
        value = float(epsilon_from_renyi(WHOLE_ORDERS, subset_renyi(tuning, run, q, variant=variant), target).upper)
        return Bounds(0.0, value, value, "bound", "ok" if np.isfinite(value) else "width", "renyi")
    upper = lambda at: bound_epsilon(tuned, k, at, bound="envelope").upper
    at = lambda grid, name: bound_delta(tuned, k, grid, bound="envelope", relation=name).upper
    pair = _through_points(upper, at, target)
    if variant == "all":
        both = compose(PoissonSampled(pair, q), trained)
        value = float(account.epsilon(both, target).upper)
    else:
        upper, at = lambda at: account.epsilon(trained, at).upper, lambda grid, name: upper_delta(trained, grid, name)
        value = _rest(pair, _through_points(upper, at, target), q, target)
    return Bounds(0.0, value, value, "bound", "ok" if np.isfinite(value) else "width", "profile")


def subset_renyi(
    tuning: ArrayLike, training: ArrayLike, sampling_probability: float, *, variant: str = "rest"
) -> np.ndarray:
    """Rényi divergences at whole orders 2, ..., A of tuning on a sample and training, the larger direction.

    Parameters
    ----------
    tuning, training : array_like, shape (2, A - 1)
        Upper bounds at orders 2, ..., A for removing and for adding a record, of the tuning on its data and of the
        final run.
    sampling_probability : float in [0, 1]
    variant : {"rest", "all"}

    Returns
    -------
    numpy.ndarray, shape (A - 1,)

    References
    ----------
    Koskela and Kulkarni (2023), equations 3.6 and 3.7.  Zhu and Wang (2019).

    >>> tuning, training = np.full((2, 3), 0.5), np.full((2, 3), 0.2)
    >>> subset_renyi(tuning, training, 0.0).round(12).tolist()
    [0.2, 0.2, 0.2]
    """
    choice("variant", variant, VARIANTS)
    tuning, training = (np.asarray(x, np.float64) for x in (tuning, training))
    if tuning.ndim != 2 or tuning.shape != training.shape or tuning.shape[0] != 2:
        raise InputError(f"tuning {tuning.shape} and training {training.shape} must both be (2, A - 1)")
    q = _scalar("sampling_probability", check("sampling_probability", sampling_probability, PROBABILITY))
    value, worst = [], np.max(tuning, axis=0)
    for a in range(2, tuning.shape[1] + 2):
        j = np.arange(a + 1)
        if variant == "all":
            # Poisson sampling [Zhu, Wang 2019]: terms 0 and 1 add up to (1-q)^{a-1} (a q - q + 1), from 3 on times 3
            found = _sum(q, _moment(worst, j) + np.log(np.where(j > 2, 3.0, 1.0)))
        else:
            removed = _moment(tuning[0], j) + _moment(training[0], a - j)
            added = _moment(tuning[1], j[1:]) + _moment(training[1], a + 1 - j[1:])
            found = max(_sum(q, removed), _sum(q, added))
        value.append(found / (a - 1))
    total = np.array(value) + (np.max(training, axis=0) if variant == "all" else 0.0)
    return np.maximum(total, 0.0) * ROUNDED_UP


def expected_cost(
    k: Law, sampling_probability: ArrayLike, dataset_size: ArrayLike, epochs: ArrayLike, *, variant: str = "rest"
) -> Numbers:
    """Expected gradient evaluations: `E (m q n + (1-q) n)` for "rest", `E (m q n + n)` for "all"; m = E[K].

    Tuning on everything costs `E m n`.

    Parameters
    ----------
    k : Law
        The law of K; all arguments broadcast.
    sampling_probability : array_like in [0, 1]
        q, of the sample.
    dataset_size : array_like of whole numbers
        n records.
    epochs : array_like > 0
        E passes per run.
    variant : {"rest", "all"}

    Returns
    -------
    float or numpy.ndarray

    References
    ----------
    Koskela and Kulkarni (2023), section 3.4.

    >>> from jaxacct import selection
    >>> float(expected_cost(selection.Poisson(15), 0.1, 60_000, 40))
    5760000.0
    """
    choice("variant", variant, VARIANTS)
    q = np.asarray(check("sampling_probability", sampling_probability, PROBABILITY))
    n, e = np.asarray(check("dataset_size", dataset_size, COUNT)), np.asarray(check("epochs", epochs, POSITIVE))
    return (e * n * (k.mean * q + (1.0 - q if variant == "rest" else 1.0)))[()]


def _moment(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`(a - 1) R(a)` at whole orders, 0 at orders 0 and 1."""
    known: np.ndarray = np.concatenate([[0.0, 0.0], values * np.arange(1, values.size + 1)])
    return known[order]


def _sum(q: float, terms: np.ndarray) -> float:
    """`log sum_j C(n, j) q^j (1-q)^{n-j} e^{term j}`, j from 0 to n."""
    n, j = terms.size - 1, np.arange(terms.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = [np.where(x > 0, x * np.log(base), 0.0) for x, base in ((j, q), (n - j, 1.0 - q))]
    choose = gammaln(n + 1) - gammaln(j + 1) - gammaln(n - j + 1)
    return float(logsumexp(choose + powers[0] + powers[1] + terms))


def _through_points(
    epsilon: Callable[[float], Any], delta: Callable[[np.ndarray, str], np.ndarray], target: float
) -> PrivacyProfile:
    """A mechanism through upper ends of delta in both directions, up to an eps of a small share of the target."""
    top = float(epsilon(max(target * 1e-4, 1e-300)))
    # the product of two such pairs has 160,000 atoms
    grid = np.linspace(0.0, max(top, 1e-6) if np.isfinite(top) else 50.0, 400)
    return PrivacyProfile(grid, *(delta(grid, side.forward) for side in BOTH_SIDES))


def _rest(tuning: PrivacyProfile, training: PrivacyProfile, q: float, target: float) -> float:
    """The larger eps of the two directions of the product pair, by bisection, safe end."""
    (p1, q1, inf1), (p2, q2, inf2) = (atoms(x.pair()) for x in (tuning, training))
    base = np.outer(q1, q2).ravel()
    mixed = (q * np.outer(p1, q2) + (1.0 - q) * np.outer(q1, p2)).ravel()
    infinite = (q * inf1 + (1.0 - q) * inf2) * ROUNDED_UP
    if infinite > target:
        return float(np.inf)
    low, high = 0.0, float(np.max(tuning.epsilon) + np.max(training.epsilon)) + 1.0

    def leak(eps: float) -> float:
        forward = np.sum(np.maximum(mixed * ROUNDED_UP - np.exp(eps) * base, 0.0)) + infinite
        return float(max(forward, np.sum(np.maximum(base * ROUNDED_UP - np.exp(eps) * mixed, 0.0))))

    if leak(0.0) <= target:
        return 0.0
    if leak(high) > target:
        return float(np.inf)
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if leak(middle) <= target else (middle, high)
    return high


def atoms(pair: FinitePair) -> tuple[np.ndarray, np.ndarray, float]:
    """(P-masses, Q-masses with the mass that only Q has, P-mass that only P has)."""
    p, q = np.append(pair.p, 0.0), np.append(pair.q, pair.q_infinity)
    kept = (p > 0.0) | (q > 0.0)
    return p[kept], q[kept], float(pair.p_infinity)


def _scalar(name: str, value: float | np.ndarray) -> float:
    if np.ndim(value):
        raise InputError(f"{name} of shape {np.shape(value)} must be a single number here; call once for each")
    return float(value)
