"""Privacy of one mechanism in every representation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.accounting.account import REVERSED
from jaxacct.accounting.dispatch import answered_by_parts, engine_of_mechanism, kinds_of
from jaxacct.accounting.risk_readings import (
    WIDTH,
    Deltas,
    best_epsilon,
    gaussian_fit,
    gaussian_regret,
    posterior_of,
    rate_at,
    start_at,
)
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds, by_column
from jaxacct.core.floats import ROUNDOFF, SMALLEST_POSITIVE
from jaxacct.core.types import ArrayLike, Foreign, PyTree
from jaxacct.core.validation import (
    FLOOR,
    GIBIBYTE,
    OPEN_PROBABILITY,
    PROBABILITY,
    REAL,
    InputError,
    check,
    choice,
    options,
    refuse_tracers,
    require_taken_out,
    with_hints,
)
from jaxacct.engines.loss_moments import Interval
from jaxacct.engines.protocol import MechanismQuestion
from jaxacct.mechanisms import DIRECTIONS, Components, Mechanism, batch_shape, components, directions
from jaxacct.mechanisms.base import element, on_batch, register, require_mechanism, take_rows
from jaxacct.mechanisms.finite import log_mixture
from jaxacct.mechanisms.loss_components import add_and_remove
from jaxacct.representations.profile_conversions import best_cells, conjugate, consistent
from jaxacct.representations.renyi_divergences import renyi_divergence, zero_concentrated

FARTHEST_EPSILON = 50.0
"""Last eps of a grid of slopes e^eps if no finite eps is found at which delta is near the mass at infinity."""
FARTHEST_LOSS = 600.0
"""Largest |loss| at which distribution functions are computed."""
TRADEOFF_ROUNDS = 4
"""Largest number of times that a grid of slopes e^eps is refined."""
EASY_WIDTH = 1e-4
"""If the bracket of delta(0) has at most this relative width, three values of delta are tried before a grid of eps."""
NARROW_ABSOLUTE = 1e-7
"""Width below which a bracket of the trade-off function is narrow, whatever its relative width."""


class LogCharacteristic(NamedTuple):
    """Complex logarithm of the characteristic function of a privacy loss."""

    value: np.ndarray
    kind: str


class LossDistribution(NamedTuple):
    """Brackets of the distribution functions Pr[loss <= l] under P and under Q (see `Profile.cdf`)."""

    p: Bounds
    q: Bounds


@register
@dataclass(frozen=True)
class Profile:
    """All representations of one mechanism (or batch) under one neighbouring relation, made by `ja.profile`.

    Arguments of the methods broadcast with the batch. Under `add_or_remove_one` each answer is the worse of the two
    directions, except in methods that take a direction. Under `remove_one` or `add_one` it is about one direction.

    Parameters
    ----------
    mechanism : Mechanism
    relation, engine, rtol, memory_bytes, backend : options of `ja.epsilon`.

    References
    ----------
    jaxacct/representations/README.md has the formulas with their proofs.

    >>> import jaxacct as ja
    >>> p = ja.profile(ja.Gaussian(1.0))
    >>> round(float(p.renyi(4.0).upper), 6), round(float(p.advantage().upper), 6)
    (2.0, 0.382925)
    """

    mechanism: Mechanism
    relation: str = field(metadata={"static": True})
    engine: str = field(metadata={"static": True})
    rtol: float = field(metadata={"static": True})
    memory_bytes: int = field(metadata={"static": True})
    backend: str = field(metadata={"static": True})

    def delta(self, epsilon: ArrayLike) -> Bounds:
        """Compute the privacy profile: delta at any real eps, certified.

        For eps = -x < 0, `H_{e^-x}(P||Q) = 1 - e^-x + e^-x H_{e^x}(Q||P)`, with the hockey-stick divergence H [Zhu,
        Dong and Wang 2022, Lemma 45].
        """
        refuse_tracers("Profile.delta", "jaxacct.kernels.contour", epsilon=epsilon)
        return account.profile_at(self.mechanism, epsilon, relation=self.relation, **self._settings())

    def epsilon(self, delta: ArrayLike) -> Bounds:
        """Compute the smallest eps >= 0 with delta(eps) <= `delta`, certified. `ja.epsilon` gives the same answer."""
        return account.epsilon(self.mechanism, delta, relation=self.relation, **self._settings())

    def tradeoff(self, fpr: ArrayLike) -> Bounds:
        """Compute the trade-off function f: the least false negative rate of a test with false positive rate `fpr`.

        `f(a) = sup_eps {1 - delta(eps) - e^eps a}` over all real eps [Dong, Roth and Su 2022, Proposition 2.12]. Under
        add_or_remove_one f is the convex envelope of the minimum of the two directions' trade-off functions. Each eps
        gives a lower bound of f, the convexity of delta in e^eps an upper bound (jaxacct/representations/README.md).
        If the bracket is wider than 1e-7, and wider than `rtol` times its upper end, the status is "width". If the kind
        is not "certified", `lower` and the status come from an upper bound of delta, and `upper` is 1 - fpr.
        """
        fpr = check("fpr", fpr, PROBABILITY)
        f = _tradeoff(self, fpr)
        if _kind(self) == "certified":
            return f
        return Bounds(f.lower, f.lower, np.clip(1.0 - fpr + 1e-16, f.lower, 1.0), f.kind, f.status, f.engine)

    def renyi(self, order: ArrayLike) -> Bounds:
        """Return certified bounds of the Rényi divergence of order `order` > 0, from `renyi_divergence`."""
        return renyi_divergence(self.mechanism, order, self.relation)

    def zcdp(self) -> Bounds:
        """Compute the smallest rho of zero-concentrated privacy, certified, by `zero_concentrated`."""
        return zero_concentrated(self.mechanism, self.relation)

    def cdf(self, loss: PyTree, direction: str = "remove") -> LossDistribution:
        """Compute distribution functions of the privacy loss L = log dP/dQ under P and Q, certified.

        For "remove", P is the law of the output with the record, and Q the law without it; "add" swaps them. As H(E) =
        delta(loss) is convex in E = e^loss, `Q(L > loss) = -dH/dE` lies between two difference quotients of H, and
        `P(L > loss) = H(E) + E Q(L > loss)`. At an atom of the loss a bracket is at least as wide as the atom's mass.
        """
        choice("direction", direction, DIRECTIONS)
        given = np.asarray(check("loss", loss, REAL))
        loss = np.clip(given, -FARTHEST_LOSS, FARTHEST_LOSS)
        side = self._one_direction(direction)
        at = replace(side.delta(loss), kind=_kind(side))
        ratio = np.exp(loss)
        least, most = np.zeros(at.shape), np.full(at.shape, np.inf)
        # keep the best bounds of four distances: short ones are near dH/dE, long ones have less rounding error
        for distance in (3e-2, 3e-3, 3e-4, 3e-5):
            right, left = side.delta(loss + distance), side.delta(loss - distance)
            rise, fall = np.exp(loss + distance) - ratio, ratio - np.exp(loss - distance)
            least = np.maximum(least, (at.lower - right.upper) / rise * (1.0 - 1e-10))
            most = np.minimum(most, (left.upper - at.lower) / fall * (1.0 + 1e-10))
        most = np.minimum(most, np.minimum(1.0, (1.0 - at.lower) / ratio))
        least = np.minimum(least, most)
        base = (1.0 - most, 1.0 - least)
        # 1e-15 is more than the rounding error of an end
        with_record = (1.0 - at.upper - ratio * most - 1e-15, 1.0 - at.lower - ratio * least + 1e-15)
        # A distribution function does not fall, so beyond FARTHEST_LOSS one end at `loss` also holds at `given`.
        ends = (
            (np.where(given < loss, 0.0, low), np.where(given > loss, 1.0, high)) for low, high in (with_record, base)
        )
        return LossDistribution(*(self._certified(low, high, at) for low, high in ends))

    def log_characteristic(self, t: ArrayLike, direction: str = "remove") -> LogCharacteristic:
        """Estimate `log E_P[e^{itL} ; L < inf]` of the privacy loss L of one direction at real frequencies t.

        Outcomes with an infinite loss add 0 to the expectation, so at t = 0 the value is log(1 - mass at infinity).
        """
        choice("direction", direction, DIRECTIONS)
        shape, rows, flat = on_batch(self.mechanism, "t", check("t", t, REAL))
        value = np.empty(flat.size, np.complex128)
        parts = components(self.mechanism, self.relation, direction)
        for row in np.unique(rows):
            value[rows == row] = log_characteristic(parts, int(row), flat[rows == row])
        return LogCharacteristic(value.reshape(shape)[()], "estimate")

    def gdp_mu(self, above_fpr: ArrayLike = 1e-10) -> Bounds:
        """Compute the smallest mu of Gaussian differential privacy above a floor of the error rates, certified.

        The claim is `f(a) >= f_mu(a)` wherever a >= above_fpr and f(a) >= above_fpr. Here f is the trade-off function
        of both directions, and `f_mu(a) = Phi(Phi^-1(1 - a) - mu)` [Dong, Roth and Su 2022, Definition 2.6]. The floor
        `above_fpr` is in (0, 1/2). A mu holds only together with its floor: over all of [0, 1] a Poisson sampled
        Gaussian has no smaller mu than an unsampled one. Composed Gaussians without sampling have one mu for every
        floor. Proof: jaxacct/representations/README.md, "Gaussian differential privacy".

        >>> import jaxacct as ja
        >>> round(float(ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), 0.1)).gdp_mu(1e-10).upper), 5)
        0.60193
        """
        return self.gaussian_readings(above_fpr, regret=False)[0]

    def gdp_regret(self, above_fpr: ArrayLike = 1e-10) -> Bounds:
        """Compute the regret of `gdp_mu`, certified: the least k with `f(a + k) - k <= f_mu(a)` for all a.

        f and f_mu are as in `gdp_mu`, with the upper end of mu. k is between 0 and 1/2 [Gomez et al. 2025,
        arXiv:2503.10945]. Proof: jaxacct/representations/README.md, "Gaussian differential privacy".

        >>> import jaxacct as ja
        >>> round(float(ja.profile(ja.PoissonSampled(ja.Gaussian(1.0), 0.1)).gdp_regret(1e-10).upper), 3)
        0.099
        """
        return self.gaussian_readings(above_fpr, regret=True)[1]

    def gaussian_readings(self, above_fpr: ArrayLike, regret: bool = True) -> tuple[Bounds, Bounds]:
        """Return (`gdp_mu`, `gdp_regret`), or (`gdp_mu`, `gdp_mu`) if `regret` is False."""
        # For add_one or remove_one, fit the f of add_or_remove_one. That f is its own inverse, and has the same mu.
        both = replace(self, relation="add_or_remove_one") if self.relation in REVERSED else self
        shape, rows, floor = on_batch(self.mechanism, "above_fpr", check("above_fpr", above_fpr, FLOOR))
        kind = _kind(both)
        exact = _mu_of_gaussians(both)[rows] if kind == "certified" else np.full(rows.size, np.nan)
        ends, words = np.stack([exact * (1.0 - 1e-14), exact, exact * (1.0 + 1e-14)]), np.full(rows.size, "ok", "<U16")
        lost, lost_words = np.zeros((3, rows.size)), words.copy()
        left = np.flatnonzero(np.isnan(exact))
        if left.size:
            deltas = both.deltas_of(rows[left])
            fit = gaussian_fit(deltas, floor[left], kind)
            ends[:, left], words[left] = (fit.mu.lower, fit.mu.estimate, fit.mu.upper), fit.mu.status
            if regret:
                found = gaussian_regret(deltas, fit.lines, np.asarray(fit.mu.upper), kind)
                lost[:, left], lost_words[left] = (found.lower, found.estimate, found.upper), found.status
        ends, lost = (end.reshape(3, *shape) for end in (ends, lost))
        mu = Bounds(ends[0], ends[1], ends[2], kind, words.reshape(shape), "tradeoff")
        if not regret:
            return mu, mu
        return mu, Bounds(lost[0], lost[1], lost[2], kind, lost_words.reshape(shape), "tradeoff")

    def advantage(self) -> Bounds:
        """Compute delta(0), the largest TPR - FPR of any test (membership advantage, total variation distance)."""
        return self.delta(0.0)

    def true_positive_rate(self, fpr: ArrayLike) -> Bounds:
        """Compute the largest true positive rate of any membership test at a false positive rate.

        It is 1 - f(fpr), with the `tradeoff` function f of one direction. Under add_or_remove_one it is the larger rate
        of the two directions: a test tells one pair of data sets apart, and `tradeoff` bounds the tests of all pairs.
        """
        fpr = check("fpr", fpr, PROBABILITY)
        f = _of_tests(self, fpr)
        low, high = np.clip(1.0 - f.upper - 1e-16, 0.0, 1.0), np.clip(1.0 - f.lower + 1e-16, 0.0, 1.0)
        status = np.where(is_narrow(low, high, self.rtol), "ok", "width")
        if _kind(self) != "certified":
            return Bounds(np.clip(fpr - 1e-16, 0.0, high), high, high, f.kind, status, f.engine)
        return Bounds(low, np.clip(1.0 - f.estimate, low, high), high, f.kind, status, f.engine)

    def posterior(self, prior: ArrayLike, fpr: ArrayLike) -> Bounds:
        """Compute the largest probability that a record was used, after a membership test says that it was.

        It is `prior tpr / (prior tpr + (1 - prior) fpr)`, where `prior` in (0, 1) is the probability, before the output
        is seen, that the record was used, and tpr is the true positive rate at `fpr` of tests for a record that was
        used, as under remove_one. For fpr = tpr = 0 it is `prior`. Under add_one the record was not used.
        """
        prior = np.asarray(check("prior", prior, OPEN_PROBABILITY))
        fpr = np.asarray(check("fpr", fpr, PROBABILITY))
        return self.posterior_at(prior, fpr, self.of_presence().true_positive_rate(fpr))

    def of_presence(self) -> Profile:
        """Return the profile of the tests for a record that was used, which is that of removing it if there is one."""
        both = self.relation not in REVERSED and add_and_remove(self.mechanism, self.relation)
        return self._one_direction("remove") if both else self

    def posterior_at(self, prior: ArrayLike, fpr: ArrayLike, rate: Bounds) -> Bounds:
        """Return `posterior(prior, fpr)`, given the bracket `rate` of the largest true-positive rate at `fpr`."""
        ends = (rate.lower, rate.estimate, rate.upper)
        low, middle, high = (posterior_of(end, prior, fpr, turn) for end, turn in zip(ends, (-1, 0, 1), strict=True))
        low = np.maximum(low, prior * (rate.lower >= fpr))  # if tpr >= fpr, the posterior is at least the prior
        # test the width again: a small true-positive rate with a narrow bracket may give a wide bracket here
        close = (
            is_narrow(low, high, self.rtol) if _kind(self) == "certified" else self.rtol * rate.upper >= NARROW_ABSOLUTE
        )
        status = np.where((rate.status == "ok") & ~close, "width", rate.status)
        return Bounds(low, np.clip(middle, low, high), high, rate.kind, status, rate.engine)

    def bayes_success(self, prior: ArrayLike) -> Bounds:
        """Compute the largest probability that an attack is right when it says whether the record was used.

        Let `prior` in (0, 1) be the probability p, before the output is seen, that the record was used. The best attack
        is right with probability `1 - p + p delta_remove(log((1 - p)/p))` = `p + (1 - p) delta_add(log(p/(1 - p)))`.
        The best guess without the output is right with probability `max(p, 1 - p)`. add_one, remove_one and
        add_or_remove_one have the same answer. In two cases the attack says which of two data sets was used: under
        replace_one, and under zero_out if an added record may push another out of a batch. There p may be the
        probability of either data set. Proof: jaxacct/representations/README.md, "Bayes success".

        >>> import jaxacct as ja
        >>> round(float(ja.profile(ja.Gaussian(0.5)).bayes_success(0.1).upper), 8)
        0.92993931
        """
        rare, odds, found = self._rare_member(prior)
        wrong = 8.0 * ROUNDOFF * (2.0 + odds)  # upper bound of the rounding errors of `odds` and of the sums below
        low, middle, high = (
            np.clip(1.0 - rare + rare * end + turn * wrong, 1.0 - rare, 1.0)
            for end, turn in ((found.lower, -1.0), (found.estimate, 0.0), (found.upper, 1.0))
        )
        return Bounds(low, middle, high, found.kind, found.status, found.engine)

    def bayes_excess(self, prior: ArrayLike) -> Bounds:
        """Compute `bayes_success(prior) - max(prior, 1 - prior)`, the gain of an attack over the best guess.

        It is `r delta(log((1 - r)/r))` with r = min(prior, 1 - prior), which keeps all digits of a small gain.

        >>> import jaxacct as ja
        >>> round(float(ja.profile(ja.Gaussian(2.0)).bayes_excess(0.1).upper), 9)
        1.69e-07
        """
        rare, odds, found = self._rare_member(prior)
        # an error d of `odds` moves `rare * delta` by at most `rare * P(L > odds) * d`, which is at most d
        wrong = 4.0 * ROUNDOFF * (2.0 + odds)
        moved, underflow = rare * wrong, 4.0 * SMALLEST_POSITIVE
        low, middle, high = (
            np.clip(rare * end * (1.0 + turn * 4.0 * ROUNDOFF) + turn * (moved + underflow), 0.0, rare)
            for end, turn in ((found.lower, -1.0), (found.estimate, 0.0), (found.upper, 1.0))
        )
        return Bounds(low, np.clip(middle, low, high), high, found.kind, found.status, found.engine)

    def _rare_member(self, prior: Any) -> tuple[np.ndarray, np.ndarray, Bounds]:
        """Return r = min(prior, 1 - prior), the epsilon log((1 - r)/r), and delta at this epsilon."""
        prior = np.asarray(check("prior", prior, OPEN_PROBABILITY))
        rare, odds = np.minimum(prior, 1.0 - prior), np.abs(np.log(prior) - np.log1p(-prior))
        whole = self.mechanism.symmetric() or not add_and_remove(self.mechanism, self.relation)
        present = (self if whole else self._one_direction("remove")).delta(odds)
        absent = present if whole or np.all(prior <= 0.5) else self._one_direction("add").delta(odds)
        found = by_column(lambda one, other: np.where(prior <= 0.5, one, other), present, absent)
        kind = self.mechanism.kind_of_bracket(self.relation if whole else "add_or_remove_one")
        return rare, odds, replace(found, kind=kind)

    def reconstruction(self, baseline: ArrayLike) -> Bounds:
        """Bound the probability that an attack reconstructs a record by 1 - f(baseline).

        `baseline` is the largest probability that an attack succeeds when the output does not depend on the record
        [Hayes, Mahloujifar and Balle 2023; Kaissis et al. 2023]. The relation must be one that takes the record out.
        """
        require_taken_out(self.relation)
        check("baseline", baseline, PROBABILITY)
        return self.of_presence().true_positive_rate(baseline)

    def plot(self, *, epsilon: ArrayLike | None = None, axes: Foreign = None) -> Foreign:
        """Draw delta against epsilon by `ja.plot_profiles`; return the matplotlib Axes.

        >>> import jaxacct as ja
        >>> ja.profile(ja.Gaussian(2.0)).plot(epsilon=[0.0, 0.5]).get_xlabel()
        'privacy loss $\\\\varepsilon$'
        """
        import jaxacct  # `jaxacct.plots` imports this module, so it cannot be imported above

        return jaxacct.plot_profiles(self, epsilon=epsilon, axes=axes)

    def plot_tradeoff(self, *, fpr: ArrayLike | None = None, axes: Foreign = None) -> Foreign:
        """Draw the trade-off function by `ja.plot_tradeoffs`; return the matplotlib Axes."""
        import jaxacct

        return jaxacct.plot_tradeoffs(self, fpr=fpr, axes=axes)

    def _repr_html_(self) -> str:
        pairs = [("mechanism", self.mechanism.expression()), ("relation", self.relation), ("engine", self.engine)]
        note = "methods: delta, epsilon, tradeoff, renyi, zcdp, advantage, bayes_success, ... and plot, plot_tradeoff"
        batch = str(batch_shape(self.mechanism) or "(), one configuration")
        return markup.fields("Profile", [*pairs, ("batch shape", batch)], note, code=("mechanism",))

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("engine", "rtol", "memory_bytes", "backend")}

    def _one_direction(self, direction: str) -> Profile:
        if self.mechanism.symmetric():
            return self
        if not add_and_remove(self.mechanism, self.relation):
            raise InputError(f"relation = {self.relation!r} has no single direction here; ask .delta or .tradeoff")
        return replace(self, relation=f"{direction}_one")

    def _certified(self, low: np.ndarray, high: np.ndarray, like: Bounds) -> Bounds:
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
        known = like.ok & (np.asarray(like.kind) != "certified")  # if delta is only a bound, any width is ok
        status = np.where((high - low <= 1e-3) | known, "ok", "width")
        return Bounds(low, 0.5 * (low + high), high, like.kind, status, like.engine)

    def deltas_of(self, rows: np.ndarray) -> Deltas:
        """Return a function (epsilon, some) -> `_curve` of the configurations `rows[some]` at `epsilon`."""
        single = batch_shape(self.mechanism) == ()

        def deltas(epsilon: np.ndarray, some: np.ndarray) -> Bounds:
            return _curve(self if single else replace(self, mechanism=take_rows(self.mechanism, rows[some])), epsilon)

        return deltas

    def element(self, index: tuple[int, ...]) -> Profile:
        """Return the profile of one configuration of the batch."""
        return replace(self, mechanism=element(self.mechanism, index))


@with_hints
def profile(
    mechanism: Mechanism,
    relation: str = "add_or_remove_one",
    *,
    engine: str = "auto",
    rtol: float = 1e-4,
    memory_bytes: int = GIBIBYTE,
    backend: str = "auto",
) -> Profile:
    """Return an object whose methods compute the privacy of a mechanism, one method for each representation.

    Parameters
    ----------
    mechanism : Mechanism
    relation, engine, rtol, memory_bytes, backend : options of `ja.epsilon`.

    Returns
    -------
    Profile

    References
    ----------
    jaxacct/representations/README.md has the formulas with their proofs.

    >>> import jaxacct as ja
    >>> p = ja.profile(ja.Gaussian(2.0))
    >>> round(float(p.delta(1.0).upper), 9), round(float(p.tradeoff(0.05).lower), 4), float(p.gdp_mu().estimate)
    (0.006829595, 0.8739, 0.5)
    """
    chosen = options(relation=relation, engine=engine, rtol=rtol, memory_bytes=memory_bytes, backend=backend)
    mechanism = require_mechanism("mechanism", mechanism)
    # called only to refuse an engine that cannot answer for this mechanism
    engine_of_mechanism(MechanismQuestion("delta", mechanism, relation=chosen.relation, engine=chosen.engine))
    return Profile(mechanism, *chosen)


def _kind(profile: Profile) -> str:
    """Return the kind of what follows from delta at several eps, which perhaps no single pair of data sets attains."""
    return profile.mechanism.kind_of_bracket(profile.relation, composed=True)


def _curve(profile: Profile, epsilon: np.ndarray) -> Bounds:
    """Return the bracket of delta. If only an upper bound is known, and its status is ok, both ends are this bound."""
    found = profile.delta(epsilon)
    if _kind(profile) == "certified":
        return found
    low = np.where(found.ok, found.upper, found.lower)
    return Bounds(low, found.upper, found.upper, found.kind, found.status, found.engine)


def _mu_of_gaussians(profile: Profile) -> np.ndarray:
    """Return mu of each row that composes unsampled Gaussians only or releases nothing, and NaN for the other rows."""
    size = int(np.prod(batch_shape(profile.mechanism)))
    if not answered_by_parts(profile.mechanism, profile.relation):
        return np.full(size, np.nan)
    mu, other = np.zeros(size), np.zeros(size, bool)
    for direction in directions(profile.mechanism, profile.relation):
        parts = components(profile.mechanism, profile.relation, direction)
        other |= sum(np.sum(n, axis=1) for n in (parts.gauss_n, parts.laplace_n, parts.finite_n)) > 0
        other |= parts.delta_infinity > 0
        mu = np.maximum(mu, parts.mu)  # not sqrt(mu2), since mu2 may under- or overflow
    return np.where(other, np.nan, mu)


def _tradeoff(profile: Profile, fpr: float | np.ndarray) -> Bounds:
    """Bracket f(fpr). If the kind is not "certified", the upper end is no bound of the true f."""
    mine, rtol = batch_shape(profile.mechanism), profile.rtol
    shape, rows, wanted = on_batch(profile.mechanism, "fpr", fpr)
    low, high = np.zeros(rows.size), 1.0 - wanted + 1e-16  # f <= 1 - fpr, which a guess without the output reaches
    smooth, exact = _smooth(profile)
    quick = np.flatnonzero(smooth[rows] & (wanted >= 1e-14) & (wanted <= 1.0 - 1e-9))
    hard = np.zeros(rows.size, bool)
    by_contours = profile.engine == "auto" and not exact[rows[quick]].any()
    asked = replace(profile, engine="contour") if by_contours else profile
    # `roughly` only serves to find the best eps, and its estimates are far more accurate than its rtol
    deltas_of, roughly = asked.deltas_of, replace(asked, rtol=max(rtol, 0.01)).deltas_of
    if quick.size:
        at_zero = deltas_of(rows[quick])(np.zeros((1, quick.size)), np.arange(quick.size))
        # f(fpr) is at least 1 - fpr - delta(0), and close to it where delta(0) is small
        low[quick] = np.maximum(1.0 - wanted[quick] - at_zero.upper[0] - 1e-15, 0.0)
        # f(a) = 1 - delta(0) - a at some rate a <= 1 - delta(0), and f does not rise
        most = 1.0 - at_zero.lower[0] + 1e-15
        high[quick] = np.where(wanted[quick] >= most, np.minimum(high[quick], most), high[quick])
        left = ~is_narrow(low[quick], high[quick], rtol)
        quick, at_zero = quick[left], at_zero[:, left]
        with np.errstate(divide="ignore", invalid="ignore"):
            width = (at_zero.upper[0] - at_zero.lower[0]) / at_zero.upper[0]
        easy = width <= EASY_WIDTH
        hard[quick[~easy]] = True
        quick, advantage, width = quick[easy], at_zero.estimate[0][easy], width[easy]
    if quick.size:  # three values of delta near the best eps
        deltas = deltas_of(rows[quick])
        place = best_epsilon(roughly(rows[quick]), wanted[quick], start_at(advantage, wanted[quick]))
        rates = rate_at(deltas, place, wanted[quick], np.maximum(WIDTH, 1.5 * np.sqrt(width)))
        low[quick], high[quick] = 1.0 - rates.upper - 1e-16, np.minimum(high[quick], 1.0 - rates.lower + 1e-16)
        # `hard` rows are left to lattices: their three values gave no upper end, though delta(0) has a narrow bracket.
        hard[quick] = (rates.lower <= wanted[quick]) & (width <= 0.1 * EASY_WIDTH) & ~exact[rows[quick]]
    open_ = ~is_narrow(low, high, rtol)
    for row in np.unique(rows[open_]):
        at = open_ & (rows == row)
        one = profile.element(np.unravel_index(row, mine)) if mine else profile
        by_lattice = [replace(one, engine="lattice")] if one.engine == "auto" else []
        order = [*by_lattice, one] if hard[at].any() else [one, *by_lattice[: int(exact[row])]]
        found = _tradeoff_by_slopes(order, wanted[at], rtol)
        low[at], high[at] = _agreed(profile, np.maximum(low[at], found.low), np.minimum(high[at], found.high))
    low, high = np.clip(low, 0.0, 1.0).reshape(shape), np.clip(high, 0.0, 1.0).reshape(shape)
    status = np.where(is_narrow(low, high, rtol), "ok", "width")
    kind = _kind(profile)
    return Bounds(low, 0.5 * (low + high), high, kind, status, "tradeoff")


def _of_tests(profile: Profile, fpr: float | np.ndarray) -> Bounds:
    """Bracket the least false negative rate of a test at `fpr`; such a test is about one direction."""
    f = _tradeoff(profile, fpr)  # at most that of either direction, so that its lower end holds
    if profile.mechanism.symmetric() or len(directions(profile.mechanism, profile.relation)) == 1:
        return f
    low, own = f.lower, np.ones(f.lower.shape)
    high = np.clip(1.0 - fpr + 1e-16, low, 1.0)  # by a guess without the output
    if add_and_remove(profile.mechanism, profile.relation):
        # Where f(fpr) > fpr, tests for a present record usually do better, elsewhere tests for an absent record. The
        # other direction is asked only where the first leaves a gap.
        first, wide = f.estimate > fpr, np.ones(low.shape, bool)
        for turn in (0, 1):
            for one, leads in (("remove_one", first), ("add_one", ~first)):
                asked = wide & (leads if turn == 0 else ~leads)
                if asked.any():
                    found = _tradeoff(replace(profile, relation=one), np.where(asked, fpr, 1.0))
                    high = np.where(asked, np.minimum(high, found.upper), high)
                    own = np.where(asked, np.minimum(own, found.lower), own)
            if turn == 1:
                low = np.where(wide, np.maximum(low, own), low)
            wide = ~is_narrow(1.0 - high, 1.0 - low, profile.rtol) & (high - low > 2.0 * (f.upper - f.lower))
    return Bounds(low, np.clip(f.estimate, low, high), high, f.kind, f.status, f.engine)


def _smooth(profile: Profile) -> np.ndarray:
    """Return (2, B): whether the loss has a density and no mass at infinity; whether delta needs no contour."""
    mechanism = profile.mechanism
    smooth = np.full(int(np.prod(batch_shape(mechanism))), answered_by_parts(mechanism, profile.relation))
    exact = ~smooth
    if smooth.size and smooth[0]:
        for side in directions(mechanism, profile.relation):
            parts = components(mechanism, profile.relation, side)
            steps, atoms = (np.sum(n, axis=1) for n in (parts.gauss_n, parts.finite_n))
            others = atoms + np.sum(parts.laplace_n, axis=1)
            smooth &= ((steps > 0) | (parts.mu > 0)) & (others == 0) & (parts.delta_infinity == 0)
            exact |= kinds_of(parts).before_contours()
    return np.stack([smooth, exact])


def is_narrow(low: np.ndarray, high: np.ndarray, rtol: float) -> np.ndarray:
    return high - low <= np.maximum(rtol * high, NARROW_ABSOLUTE)


def _tradeoff_by_slopes(by_engines: list[Profile], fpr: np.ndarray, rtol: float) -> Interval:
    """Bracket the trade-off function at the rates `fpr`, from delta at a grid of eps that is refined where needed.

    Where errors of delta cause most of the width, the best cells are asked for again by the next of the engines.
    """
    profile, *others = by_engines
    floor = _mass_at_infinity(profile)

    def ends(epsilon: np.ndarray) -> list[np.ndarray]:
        """Return e^eps, and the lower and upper ends of delta(eps) by `_curve`."""
        values = _curve(profile, epsilon)
        return [np.exp(epsilon), values.lower, values.upper]

    def reached(relation: str, tail: float) -> float:
        """Return an eps, at most 700, at which delta exceeds the mass at infinity by about `tail`."""
        some = replace(
            profile, relation=relation, rtol=max(rtol, 0.01) if profile.engine == "lattice" else profile.rtol
        )
        eps = float(some.epsilon(min(1.000001 * floor + tail, 0.5)).upper)
        return min(eps, 700.0) if np.isfinite(eps) else FARTHEST_EPSILON

    # only rates in (0, 1) need a grid of eps: f(1) is 0, and f(0) needs only `farthest`
    inner = fpr[(fpr > 0.0) & (fpr < 1.0)]
    least, most = (float(inner.min()), float(inner.max())) if inner.size else (0.5, 0.5)
    # At a rate a, the best eps maximises 1 - delta(eps) - e^eps a. If it is x > 0, then e^x a <= 1. If it is -x < 0,
    # then x <= log 2 + y, where the reverse direction's delta at y is (1 - a)/2. The 1.7 below is log 2 plus a margin.
    farthest = reached(profile.relation, 1e-10)
    highest, lowest = min(farthest, -np.log(least)), min(farthest, 20.0 - np.log1p(-most))
    if inner.size > 1:  # for a single rate this takes more time than the shorter grid saves
        lowest = min(lowest, reached(REVERSED.get(profile.relation, profile.relation), 0.45 * (1.0 - most)) + 1.7)
    epsilon = np.linspace(-max(lowest, 1e-6), max(highest, 1e-6), 65)
    if inner.size < fpr.size:
        epsilon = np.union1d(epsilon, farthest)
    if profile.engine == "lattice":
        epsilon = np.union1d(epsilon, _kinks(profile))
    # at the slope e^eps = 0 delta is 1
    x, below, above = (np.append(first, each) for first, each in zip((0.0, 1.0, 1.0), ends(epsilon), strict=True))
    low, high = np.zeros(fpr.shape), np.ones(fpr.shape)
    width = np.inf
    for turn in range(TRADEOFF_ROUNDS + 1):
        # keep the best ends of all grids: small cells magnify errors of delta
        found = conjugate(x, below, above, fpr, steepest=1.0, beyond=floor)
        low, high = np.maximum(low, found.low), np.minimum(high, found.high)
        wide = high - low > np.maximum(rtol * np.minimum(high, 1.0 - low), 1e-12)  # 1e-12 allows for errors of delta
        wide &= (fpr > 0.0) & (fpr < 1.0)
        before, width = width, float(np.max(high - low))
        if turn == TRADEOFF_ROUNDS or not wide.any():
            break
        cells = np.unique(best_cells(x, below, above, fpr[wide], 1.0))
        near = np.unique(np.concatenate([cells - 1, cells, cells + 1]))
        near = near[(near > 0) & (near < x.size - 1)]
        if not near.size:
            break
        places = np.arange(1, 5)[:, None] / 5
        # a finer grid helps little where errors of delta cause most of the width, or where it did not halve the width
        if width <= 2.0 * np.max((above - below)[np.append(cells, cells + 1)]) or (turn > 1 and width > 0.5 * before):
            if not others or width <= 0.01:  # so narrow a bracket of an error rate is asked of no other engine
                break
            profile, *others = others
            places = np.arange(6)[:, None] / 5
        asked = np.unique(np.log(x[near]) + places * np.log(x[near + 1] / x[near]))
        again = np.isin(x, x[np.union1d(near, near + 1)]) & (places.size == 6)
        x, below, above = (np.append(old[~again], new) for old, new in zip((x, below, above), ends(asked), strict=True))
        order = np.argsort(x)
        x, below, above = x[order], below[order], above[order]
    return _agreed(profile, low, high)


def _kinks(profile: Profile) -> list[float]:
    """Return the eps at which delta may bend: 0, where directions meet, and the loss of a run without the record."""
    parts = components(profile.mechanism, profile.relation, "remove")
    with np.errstate(divide="ignore"):
        missed = float(np.sum(parts.gauss_n[0] * np.log1p(-parts.gauss_q[0])))
    return [0.0, *(loss for loss in (missed, -missed) if abs(loss) < 20.0)]


def _agreed(profile: Profile, low: np.ndarray, high: np.ndarray) -> Interval:
    """Return [low, high]; where low > high, return [0, 1], or [low, low] if the kind is not "certified"."""
    return consistent(Interval(low, high)) if _kind(profile) == "certified" else Interval(low, np.maximum(low, high))


def _mass_at_infinity(profile: Profile) -> float:
    """Return the mass at infinity, a lower bound of every delta(eps), rounded down."""
    if profile.relation == "replace_one" and profile.mechanism.replaced_apart():
        return 0.0  # no dominating pair of laws is known for a replaced record, and 0 is a lower bound
    sides = directions(profile.mechanism, profile.relation)
    parts = [components(profile.mechanism, profile.relation, side, below=True) for side in sides]
    rounded = (part.delta_infinity[0] * (1.0 - (4.0 + part.infinity_units[0]) * ROUNDOFF) for part in parts)
    return max(0.0, *(float(mass) for mass in rounded))


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def log_characteristic(parts: Components, row: int, t: np.ndarray) -> np.ndarray:
    """Return `log E_P[e^{itL} ; L < inf]` of configuration `row` at frequencies t (T,), up to multiples of 2 pi i."""
    z = 1j * np.asarray(t, np.float64)
    value = parts.mu2[row] * z * (z + 1.0) / 2.0
    power = z + 1.0 if parts.sign[row] > 0 else -z
    for sigma, q, n in zip(parts.gauss_sigma[row], parts.gauss_q[row], parts.gauss_n[row], strict=True):
        if n > 0:
            value = value + n * np.log(_sampled_gaussian(float(sigma), float(q), power))
    for b, q, n in zip(parts.laplace_scale[row], parts.laplace_q[row], parts.laplace_n[row], strict=True):
        if n > 0:
            value = value + n * (_laplace(float(b), z) if q == 1.0 else np.log(_sampled_laplace(float(b), q, power)))
    for loss, mass, n in zip(parts.finite_loss[row], parts.finite_mass[row], parts.finite_n[row], strict=True):
        if n > 0:
            value = value + n * np.log(np.exp(np.multiply.outer(z, loss)) @ mass)
    return value


def _laplace(b: float, z: np.ndarray) -> np.ndarray:
    x = (1.0 + 2.0 * z) / b
    return z / b + np.log(1.0 + z / b * np.expm1(-x) / x)


def _sampled_gaussian(sigma: float, q: float, power: np.ndarray) -> np.ndarray:
    """Return, for each power, E[e^{power * loss}] over u = output / sigma ~ N(0, 1), as a sum over a grid of u."""
    fastest = np.max(np.abs(power.imag)) / sigma
    height = min(6.0, 0.9 * np.pi * sigma)
    step = 2.0 * np.pi / (fastest + 40.0 / height + 0.5 * height)
    u = np.arange(-9.0, 9.0 + 1.0 / sigma + step, step)
    loss = log_mixture(u / sigma - 0.5 / sigma**2, np.asarray(q))
    return integrate(power, loss, step / np.sqrt(2.0 * np.pi) * np.exp(-0.5 * u**2))


def _sampled_laplace(b: float, q: float, power: np.ndarray) -> np.ndarray:
    panels = int(np.ceil(2.0 / b * (0.25 * np.max(np.abs(power.imag)) + 4.0)))
    half = 1.0 / (b * panels)
    v = ((-1.0 / b + half * (2.0 * np.arange(panels) + 1.0))[:, None] + half * _NODES).ravel()
    weight = 0.25 * half * np.tile(_WEIGHTS, panels) * np.exp(-0.5 * (v + 1.0 / b))
    v = np.concatenate([[-1.0 / b, 1.0 / b], v])
    weight = np.concatenate([[0.5, 0.5 * np.exp(-1.0 / b)], weight])
    return integrate(power, log_mixture(v, np.asarray(q)), weight)


def integrate(power: np.ndarray, loss: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return, for each power, the sum of `weight * e^{power * loss}` over the nodes, in blocks to limit memory."""
    block = max(1, 2**20 // loss.size)
    pieces = [np.exp(np.multiply.outer(power[i : i + block], loss)) @ weight for i in range(0, power.size, block)]
    return np.concatenate(pieces)
