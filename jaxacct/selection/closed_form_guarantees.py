"""Theorems that turn (eps, delta) guarantees of the candidates into one of the selection, in closed form.

For the truncated negative binomial law of K, all of kind "bound"; looser than `selection.bound_epsilon`, but they need
only one or two points of the candidates' profiles.  And report noisy max with Gaussian noise, composed adaptively and
by Rényi divergences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import (
    COUNT,
    DELTA,
    DELTA_OR_ZERO,
    NON_NEGATIVE,
    POSITIVE,
    Constraint,
    InputError,
    check,
    check_flag,
)
from jaxacct.mechanisms import Gaussian, repeat
from jaxacct.representations.profile_conversions import Guarantee, gdp_from_profile
from jaxacct.selection.base_profile import upper_delta, upper_epsilon
from jaxacct.selection.law_of_k import TruncatedNegativeBinomial
from jaxacct.selection.named_bounds import least_growth

ROUNDED_UP = 1.0 + 1e-13
"""A factor larger than the rounding of any of these formulas, by which their values are rounded up."""


class Thresholds(NamedTuple):
    """Two points that every candidate's profile has to meet: delta(epsilon_1) <= delta_1 and likewise for 2."""

    epsilon_1: np.ndarray
    delta_1: np.ndarray
    epsilon_2: np.ndarray
    delta_2: np.ndarray


def two_point_selection(
    k: TruncatedNegativeBinomial,
    epsilon_1: ArrayLike,
    delta_1: ArrayLike,
    epsilon_2: ArrayLike | None = None,
    delta_2: ArrayLike | None = None,
) -> Guarantee:
    """`(eps_2 + (eta+1) log(e^{eps_1} + (1-gamma)/gamma delta_1), m delta_2)` for candidates with both guarantees.

    One point alone serves as both.  Pure eps-DP (delta 0) becomes (eta+2) eps: for geometric K the 3 eps of Liu and
    Talwar.

    Parameters
    ----------
    k : TruncatedNegativeBinomial
        The law of K, m its mean; all arguments broadcast.
    epsilon_1, epsilon_2 : array_like >= 0
    delta_1, delta_2 : array_like in [0, 1)
        Two guarantees of every candidate, each for both directions of the relation; without a second the first twice.

    Returns
    -------
    Guarantee
        epsilon and delta of the selection, kind "bound".

    References
    ----------
    Koskela, Redberg and Wang (2024), Corollaries 5.3, 5.4 and 6.2.  Liu and Talwar (2019), Theorem 1.3.

    >>> from jaxacct import selection
    >>> round(float(two_point_selection(selection.Geometric(0.1), 0.5, 0.0).epsilon), 9)
    1.5
    """
    _require(k)
    if (epsilon_2 is None) != (delta_2 is None):
        raise InputError("epsilon_2 and delta_2 go together; give both, or neither to use one point twice")
    first, missed = np.asarray(check("epsilon_1", epsilon_1, NON_NEGATIVE)), check("delta_1", delta_1, DELTA_OR_ZERO)
    second = first if epsilon_2 is None else np.asarray(check("epsilon_2", epsilon_2, NON_NEGATIVE))
    left = missed if delta_2 is None else check("delta_2", delta_2, DELTA_OR_ZERO)
    missed = np.asarray(missed)
    with np.errstate(over="ignore"):
        odds = np.where(missed > 0.0, (1.0 - np.asarray(k.gamma)) / np.asarray(k.gamma), 0.0)
    grown = first + np.log1p(odds * missed * np.exp(-first))
    epsilon = (second + (np.asarray(k.eta) + 1.0) * grown) * ROUNDED_UP
    epsilon, delta = np.broadcast_arrays(epsilon, np.minimum(k.mean * np.asarray(left) * ROUNDED_UP, 1.0))
    return Guarantee(epsilon, delta)


def random_stopping(k: TruncatedNegativeBinomial, epsilon: ArrayLike, delta: ArrayLike, cut: ArrayLike) -> Guarantee:
    """Liu and Talwar's form for geometric K: `(3 eps + 3 s, s T + cut)`, `s = sqrt(2 delta)`, `T = log(1/cut)/gamma`.

    It is here for comparison.  `two_point_selection` is never larger in either number, which is also why this form
    holds for K without a limit at T.

    Parameters
    ----------
    k : TruncatedNegativeBinomial
        Geometric; all arguments broadcast.
    epsilon : array_like >= 0
    delta : array_like in [0, 1)
        The guarantee of every candidate.
    cut : array_like in (0, 1)

    Returns
    -------
    Guarantee
        epsilon and delta of the selection, kind "bound".

    References
    ----------
    Liu and Talwar (2019), Theorem 3.5; README.md of this folder, "Liu and Talwar's (eps, delta) form".

    >>> from jaxacct import selection
    >>> [float(x.round(5)) for x in random_stopping(selection.Geometric(0.1), 0.5, 1e-10, 1e-6)[:2]]
    [1.50004, 0.00195]
    """
    _require(k)
    if np.any(np.asarray(k.eta) != 1.0):
        raise InputError("k must be geometric (eta = 1) here; use two_point_selection for other laws")
    eps, missed = np.asarray(check("epsilon", epsilon, NON_NEGATIVE)), np.asarray(check("delta", delta, DELTA_OR_ZERO))
    cut, root = np.asarray(check("cut", cut, DELTA)), np.sqrt(2.0 * missed)
    total = np.minimum((root * -np.log(cut) / np.asarray(k.gamma) + cut) * ROUNDED_UP, 1.0)
    found, total = np.broadcast_arrays(3.0 * (eps + root) * ROUNDED_UP, total)
    return Guarantee(found, total)


def thresholds(k: TruncatedNegativeBinomial, epsilon: float, delta: float, target_delta: float) -> Thresholds:
    """Two points for candidates that differ in noise, rate or length, from the Gaussian that is (epsilon, delta)-DP.

    Let delta_G be its profile.  eps_1 minimises `e^{eps_1} + (1-gamma)/gamma delta_G(eps_1)`, delta_1 = delta_G(eps_1),
    and eps_2 is where delta_G is delta_2 = target_delta/m.  Adjust every candidate to meet both points.  Then
    `two_point_selection` holds at target_delta; whether the candidates meet them is for the certified engines to say.

    Parameters
    ----------
    k : TruncatedNegativeBinomial
        One law of K.
    epsilon : float > 0
    delta, target_delta : float in (0, 1)

    Returns
    -------
    Thresholds
        epsilon_1, delta_1, epsilon_2 and delta_2.

    References
    ----------
    Koskela, Redberg and Wang (2024), Section 6.2.

    >>> from jaxacct import selection
    >>> k = selection.Geometric(0.1)
    >>> t = thresholds(k, 1.0, 1e-5, 1e-5)
    >>> round(float(two_point_selection(k, *t).epsilon), 3), round(float(two_point_selection(k, *t).delta), 7)
    (1.999, 1e-05)
    """
    _require(k)
    if k.shape:
        raise InputError(f"k is a batch of shape {k.shape} and must be one law here; call once for each")
    at, level = check("epsilon", epsilon, POSITIVE), check("delta", delta, DELTA)
    base = Gaussian(1.0 / gdp_from_profile(at, level).lower)
    first, _ = least_growth(base, k, "add_or_remove_one")
    second = np.asarray(check("target_delta", target_delta, DELTA)) / k.mean
    missed, last = upper_delta(base, first, "add_or_remove_one"), upper_epsilon(base, second, "add_or_remove_one")
    return Thresholds(first, missed, last, second / ROUNDED_UP**2)


def gaussian_selection(k: TruncatedNegativeBinomial, mu: ArrayLike, delta: ArrayLike) -> Guarantee:
    """The closed form for mu-Gaussian-DP candidates, which shows the growth like sqrt(log m).

    `eps = mu^2/2 + mu sqrt(2 log(m/delta)) + (eta+1) log(e^E + 1 - gamma)`, `E = mu^2/2 + mu sqrt(2 log(1/gamma))`.

    Parameters
    ----------
    k : TruncatedNegativeBinomial
        The law of K, m its mean; all arguments broadcast.
    mu : array_like > 0
    delta : array_like in (0, 1)

    Returns
    -------
    Guarantee
        epsilon and delta of the selection, kind "bound".

    References
    ----------
    Koskela, Redberg and Wang (2024), Corollary 5.5.

    >>> from jaxacct import selection
    >>> round(float(gaussian_selection(selection.Geometric(0.1), 0.2681, 1e-5).epsilon), 3)
    3.463
    """
    _require(k)
    mu, delta = np.asarray(check("mu", mu, POSITIVE)), np.asarray(check("delta", delta, DELTA))
    far = 0.5 * mu**2 + mu * np.sqrt(2.0 * np.maximum(np.log(k.mean) - np.log(delta), 0.0))
    one = 0.5 * mu**2 + mu * np.sqrt(2.0 * -np.log(k.gamma))
    grown = one + np.log1p((1.0 - np.asarray(k.gamma)) * np.exp(-one))
    epsilon, delta = np.broadcast_arrays((far + (np.asarray(k.eta) + 1.0) * grown) * ROUNDED_UP, delta)
    return Guarantee(epsilon, delta)


def propose_test_release_guarantee(
    epsilon: ArrayLike, delta: ArrayLike, test_epsilon: ArrayLike, test_delta: ArrayLike, failure: ArrayLike
) -> Guarantee:
    """Generalised propose-test-release: `(eps + eps_test, delta + delta_test + failure)`-DP.

    The proposal is run with a data-dependent (eps, delta) that an (eps_test, delta_test)-DP test finds to hold, and the
    test is wrong with probability at most ``failure``.  It has no Rényi guarantee; to tune it, pass this point to
    `two_point_selection`.

    Parameters
    ----------
    epsilon, test_epsilon : array_like >= 0
    delta, test_delta, failure : array_like in [0, 1)
        All broadcast.

    Returns
    -------
    Guarantee
        kind "bound".

    References
    ----------
    Redberg, Zhu and Wang (2023), Algorithm 2, as in Koskela, Redberg and Wang (2024), Theorem 6.1.

    >>> [float(x) for x in propose_test_release_guarantee(0.5, 1e-6, 0.25, 0.0, 1e-6)[:2]]
    [0.75, 2e-06]
    """
    each = check("epsilon", epsilon, NON_NEGATIVE), check("test_epsilon", test_epsilon, NON_NEGATIVE)
    names = {"delta": delta, "test_delta": test_delta, "failure": failure}
    losses = [np.asarray(check(name, value, DELTA_OR_ZERO)) for name, value in names.items()]
    eps, total = np.broadcast_arrays(np.add(*each), np.minimum(losses[0] + losses[1] + losses[2], 1.0))
    return Guarantee(eps, total)


def noisy_max_epsilon(
    noise_multiplier: ArrayLike, candidates: ArrayLike, steps: ArrayLike, delta: ArrayLike, *, monotone: bool = False
) -> Guarantee:
    """k-fold adaptive report noisy max with Gaussian noise: `m^k delta_k(eps) <= delta`, delta_k k Gaussians composed.

    Each step reports which of m ``candidates`` has the largest noisy score.  For few steps composing
    `ja.GaussianNoisyMax` is never looser by more than its discretisation, and usually much tighter.

    Parameters
    ----------
    noise_multiplier : array_like > 0
        Standard deviation of the noise, in units of what a score moves under the relation.
    candidates, steps : array_like of whole numbers >= 1
    delta : array_like in (0, 1)
        All broadcast.
    monotone : bool
        Whether all scores rise or all fall with a record: then the sensitivity is 1, otherwise 2.

    Returns
    -------
    Guarantee
        kind "bound"; epsilon is inf where delta/m^k is below 1e-300.

    References
    ----------
    Koskela, Redberg and Wang (2024), Theorem 3.3.

    >>> round(float(noisy_max_epsilon(10.0, 100, 1, 1e-5).epsilon), 3)
    0.932
    """
    sigma, m, k, target = _noisy(noise_multiplier, candidates, steps, delta, monotone)
    left = np.exp(np.log(target) - k * np.log(m)) / ROUNDED_UP
    epsilon = upper_epsilon(repeat(Gaussian(sigma / (1.0 if monotone else 2.0)), k), left, "add_or_remove_one")
    epsilon, target = np.broadcast_arrays(epsilon, target)
    return Guarantee(epsilon, target)


def noisy_max_renyi(
    noise_multiplier: ArrayLike, candidates: ArrayLike, order: ArrayLike, *, monotone: bool = False
) -> np.ndarray:
    """Rényi divergence of report noisy max with Gaussian noise, a bound: `a D^2/(2 sigma^2) + log(m)/(a-1)`.

    Parameters
    ----------
    noise_multiplier, candidates, monotone
        As for `noisy_max_epsilon`; D is 2, or 1 for monotone scores.
    order : array_like > 1
        The order a; all broadcast.

    Returns
    -------
    numpy.ndarray

    References
    ----------
    Zhu and Wang (2022), Theorem 8.

    >>> float(noisy_max_renyi(2.0, 1, 4.0).round(9))
    2.0
    """
    sigma, m, _, _ = _noisy(noise_multiplier, candidates, 1, 0.5, monotone)
    a = np.asarray(check("order", order, Constraint("use an order above 1", 1, lower_open=True)))
    return (a * (1.0 if monotone else 4.0) / (2.0 * sigma**2) + np.log(m) / (a - 1.0)) * ROUNDED_UP


def _noisy(sigma: Any, candidates: Any, steps: Any, delta: Any, monotone: bool) -> tuple[np.ndarray, ...]:
    check_flag("monotone", monotone, "say whether all scores move alike")
    values = (
        check("noise_multiplier", sigma, POSITIVE),
        check("candidates", candidates, COUNT),
        check("steps", steps, COUNT),
        check("delta", delta, DELTA),
    )
    return tuple(np.asarray(x) for x in values)


def _require(k: object) -> None:
    if not isinstance(k, TruncatedNegativeBinomial):
        raise InputError(f"k = {k!r:.60} must be a truncated negative binomial law; use selection.bound_epsilon")
