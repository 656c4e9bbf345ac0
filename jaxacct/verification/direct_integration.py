"""delta(eps) of two or three sampled Gaussian steps by direct integration; the last step is a closed form.

With m_i = 1 - q_i + q_i e^{y_i}, the ratio of step i at its output u_i ~ N(0, 1), and E = e^eps

    remove: delta = E[(m_1 ... m_n - E)_+],    add: delta = E times E[(1/E - m_1 ... m_n)_+].

The outputs are cut where each step has an equal share of the loss.  No integral then meets the point where the last
step's threshold leaves the real line.  Proofs: README.md of this folder, "Two and three steps".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxacct.verification.ball_arithmetic import acb, arb, ball, between, precision, tick
from jaxacct.verification.result import Unplanned
from jaxacct.verification.sampled_gaussian import SampledGaussian

MOST_STEPS = 3
"""Most steps: four would nest three integrals, and are left to the sum over a line."""
FARTHEST_DEVIATIONS = 60
"""The search for the lower end of a range gives up at this distance below the cut, in deviations of the noise."""


def fits(parts: Any) -> bool:
    """Whether these are two or three sampled Gaussian steps."""
    return all(type(part) is SampledGaussian for part, _ in parts) and 2 <= sum(n for _, n in parts) <= MOST_STEPS


def enclose(build: Callable[[], Any], epsilon: float, log_scale: float, digits: int) -> Any:
    """Enclose delta(epsilon) to about `digits` digits of itself or of e^log_scale."""
    with precision(int(100 + 4 * digits)):
        parts = build()
        sign = 1 if parts[0][0].direction == "remove" else -1
        grown = (sign * ball(epsilon)).exp()
        steps = [_Step(part, sign) for part, count in parts for _ in range(count)]
        tolerance = ball(log_scale).exp() * arb(10) ** -digits
        if sign < 0:
            tolerance *= grown
        found = _whole(steps, grown, _Aims(tolerance, arb(10) ** -digits))
        return found if sign > 0 else found / grown


@dataclass(frozen=True)
class _Aims:
    """Tolerances of every integral: absolute, and as a share of its value."""

    tolerance: Any
    share: Any


@dataclass(frozen=True)
class _Step:
    """One step.  For remove, sign = 1 and outputs above a threshold count; for add, sign = -1 and those below."""

    law: SampledGaussian
    sign: int

    def ratio(self, u: Any) -> Any:
        """m = 1 - q + q e^y at an output."""
        law = self.law
        return 1 - law.rate + law.rate * (u / law.sigma - 1 / (2 * law.sigma**2)).exp()

    def place(self, m: Any) -> Any:
        """The output at which the ratio is m; not finite where that is not analytic in m."""
        law = self.law
        return law.sigma * ((m - 1 + law.rate) / law.rate).log(True) + 1 / (2 * law.sigma)

    def beyond(self, u: Any) -> tuple[Any, Any]:
        """P- and Q-mass of the outputs that count."""
        law, root = self.law, arb(2).sqrt()
        plain = (self.sign * u / root).erfc() / 2
        hit = (self.sign * (u - 1 / law.sigma) / root).erfc() / 2
        return plain + law.rate * (hit - plain), plain


def _payoff(steps: list[_Step], places: list[Any], grown: Any) -> Any:
    """The sum of +-(m_1 ... m_n - grown) over the outputs that all count."""
    p, q = acb(1), acb(1)
    for step, u in zip(steps, places, strict=True):
        one, two = step.beyond(u)
        p, q = p * one, q * two
    return steps[0].sign * (p - grown * q)


def _last(step: _Step, grown: Any) -> Any:
    """One step: E[+-(m - grown)_+]."""
    return _payoff([step], [step.place(grown)], grown)


def _cuts(steps: list[_Step], grown: Any) -> list[Any]:
    """Outputs whose ratios multiply to `grown`, each ratio the same multiple of its infimum 1 - q."""
    floors = [1 - step.law.rate for step in steps]
    share = grown
    for floor in floors:
        share = share / floor
    share = (share.log(True) / len(steps)).exp()
    return [step.place(floor * share) for step, floor in zip(steps, floors, strict=True)]


def _whole(steps: list[_Step], grown: Any, aims: _Aims) -> Any:
    """E[+-(m_1 ... m_n - grown)_+] of two or three steps."""
    cuts = _cuts(steps, acb(grown))
    if not all(cut.is_finite() for cut in cuts):
        raise Unplanned("its epsilon is too near the largest loss")
    total = _payoff(steps, cuts, grown) * steps[0].sign ** (len(steps) - 1)
    for i, many in _distinct(steps):
        rest, others = _without(steps, i), _without(cuts, i)
        inner: Callable[[Any], Any]
        if len(rest) == 1:
            # the checker cannot infer the type of a default argument of a lambda
            inner = lambda m, other=rest[0]: _last(other, grown / m)  # type: ignore[misc]  # mypy infers no type of a default
        else:
            inner = _Two(rest, others, grown, 1 - steps[i].law.rate, steps[i].ratio(cuts[i]), aims)
        total += many * _below(steps[i], cuts[i], inner, aims)
    return total.real


class _Two:
    """What two steps add to a third whose ratio is m, below its cut (README.md, "Two and three steps")."""

    def __init__(self, steps: list[_Step], cuts: list[Any], grown: Any, least: Any, most: Any, aims: _Aims) -> None:
        self.steps, self.cuts, self.grown, self.aims = steps, cuts, grown, aims
        # remove pays most where the third step's ratio is largest, add where it is least
        worst = most if steps[0].sign > 0 else least
        self.lows = {}
        for i, _ in _distinct(steps):
            (other,) = _without(steps, i)
            inner = lambda m, other=other: _last(other, grown / (worst * m))
            self.lows[i] = _end(steps[i], cuts[i], inner, aims.tolerance)[0]

    def __call__(self, m: Any) -> Any:
        # where m is a wide ball, its integrals cannot be known more closely than m
        wide = (m.rad() / m.abs_lower()).abs_upper()
        if not wide < 1:
            return acb("nan")
        grown = self.grown / m
        places = _cuts(self.steps, grown)
        total = self.steps[0].sign * _payoff(self.steps, places, grown)
        for i, many in _distinct(self.steps):
            (other,) = _without(self.steps, i)
            inner = lambda m, other=other: _last(other, grown / m)
            function = _integrand(self.steps[i], inner)
            low = self.lows[i]
            half = _integral(function, low, self.cuts[i], self.aims, wide) + _left(self.steps[i], low, inner)
            total += many * (half / 2 + _integral(function, self.cuts[i], places[i], self.aims, wide))
        return total


def _without(items: list[Any], i: int) -> list[Any]:
    return items[:i] + items[i + 1 :]


def _distinct(steps: list[_Step]) -> list[tuple[int, int]]:
    """The index of the first step of each law, and how many steps have that law."""
    keys = [step.law.key for step in steps]
    return [(i, keys.count(key)) for i, key in enumerate(keys) if key not in keys[:i]]


def _integrand(step: _Step, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """N(u) m inner(m)."""

    def value(u: Any) -> Any:
        m = step.ratio(u)
        return (-u * u / 2).exp() / (2 * arb.pi()).sqrt() * m * inner(m)

    return value


def _below(step: _Step, cut: Any, inner: Callable[[Any], Any], aims: _Aims) -> Any:
    """int_{-inf}^{cut} N(u) m inner(m) du."""
    low, left = _end(step, cut, inner, aims.tolerance)
    return _integral(_integrand(step, inner), low, cut, aims, arb(0)) + left


def _left(step: _Step, low: Any, inner: Callable[[Any], Any]) -> Any:
    """The integral below an end: Pr[u < low] times a mean of m inner(m)."""
    m = acb(between(1 - step.law.rate, step.ratio(low).real))
    return (-low / arb(2).sqrt()).erfc() / 2 * m * inner(m)


def _end(step: _Step, cut: Any, inner: Callable[[Any], Any], tolerance: Any) -> tuple[Any, Any]:
    """(the lower end of the range, bounds of the integral below it)."""
    top = min(float(cut.real.mid()), 0.0)
    for away in range(1, FARTHEST_DEVIATIONS):
        tick()
        low = acb(top - away)
        left = _left(step, low, inner)
        if left.abs_upper() < tolerance:
            return low, left
    raise Unplanned("its range is too long")


def _integral(function: Callable[[Any], Any], low: Any, high: Any, aims: _Aims, wide: Any) -> Any:
    """The integral from any member of one ball to any of another, not closer than the relative radius `wide`."""
    way = high - low

    def along(t: Any, _: bool) -> Any:
        tick()
        return function(low + way * t) * way

    rough = 1 + wide / aims.share
    # it need only bound an outer error
    limits: dict[str, Any] = {"eval_limit": 300, "use_heap": True} if wide > aims.share else {}
    tolerance, share = aims.tolerance * rough, (aims.share * rough).min(arb("0.1"))
    return acb.integral(along, acb(0), acb(1), abs_tol=tolerance, rel_tol=share, **limits)
