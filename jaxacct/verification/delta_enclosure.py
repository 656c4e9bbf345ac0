"""Encloses delta(eps) in one direction, by the method that suits the law, at several levels of effort."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from flint import arb_poly

from jaxacct.verification import hit_counts, line_sum, small_loss_steps
from jaxacct.verification.ball_arithmetic import NotCovered, Unplanned, acb, arb, ball, between, precision, tick, within
from jaxacct.verification.closed_form_losses import LaplaceLoss
from jaxacct.verification.finite_losses import FiniteLosses, spread
from jaxacct.verification.loss_definition import Composition
from jaxacct.verification.random_allocation import AllocationLoss
from jaxacct.verification.sampled_gaussian import SampledGaussian

FAR_TOO_MANY = 10**30
"""Stands for any number of total losses that is too large to enumerate."""
LEVELS = 4
"""Number of levels of effort. Each tuple below has one entry for each level."""
BITS = (160, 320, 1280, 5120)
"""Bits of precision of closed forms and of enumeration at each level. Some laws lose thousands to cancellation."""
DIGITS = (4, 10, 15, 22)
"""Decimal digits wanted of a sum over a line (line_sum.py) at each level. Level 0 decides most brackets."""
NODES = (20_000, 100_000, 400_000, 1_000_000)
"""Largest number of nodes of a sum over a line at each level. The last number bounds the time and memory of a sum."""
GAUSSIAN_DIGITS = (12, 15, 19, 25)
"""DIGITS if all steps are sampled Gaussians. Their brackets are so narrow that fewer digits seldom decide."""


def enclose(build: Callable[[], Composition], epsilon: float, log_scale: float, level: int) -> Any:
    """Enclose delta(epsilon) of one direction, to compare it with e^log_scale. A higher level (0 to 3) is tighter."""
    with precision(BITS[level]):
        composition = build()
        parts, infinite = composition.parts, composition.infinity
        if math.isinf(epsilon) or not parts:
            return infinite
        left_out = between(0, composition.cut.abs_upper()) + within(composition.lost * ball(epsilon).exp())
        largest = composition.largest
        if largest is not None and largest <= ball(epsilon):
            return infinite + left_out
        if level == 0 and all(count > 0 and hasattr(part, "hockey_stick") for part, count in parts):
            # delta(eps) is at most the sum of the steps' total variations: a sum below e^log_scale is close enough
            most = sum((count * part.hockey_stick(ball(0.0)) for part, count in parts), infinite + left_out)
            if most.abs_upper() < ball(log_scale).exp():
                return between(0, most.abs_upper())
        if len(parts) == 1 and parts[0][1] == 1 and isinstance(parts[0][0], AllocationLoss):
            return parts[0][0].one_round(ball(epsilon), log_scale - DIGITS[level] * math.log(10.0))
        exact = _exactly(parts, ball(epsilon), level)
        if exact is not None:
            return exact + infinite + left_out
    for part, _ in parts:
        if not hasattr(part, "log_mgf"):
            words = "several rounds of" if isinstance(part, AllocationLoss) else "a composition with"
            raise NotCovered(f"{words} {part.key[0]}")
    return _by_integrals(lambda: build().parts, parts, epsilon, log_scale, level).max(0) + infinite + left_out


def at_most(composition: Composition, epsilon: float) -> Any:
    """Bound delta(epsilon) of one direction from above by Chernoff's bound. Return inf if no bound is found."""
    parts = composition.parts
    if math.isinf(epsilon) or not parts or not all(count > 0 and hasattr(part, "log_mgf") for part, count in parts):
        return arb("inf")
    largest = composition.largest
    if largest is not None and largest <= ball(epsilon):
        return composition.infinity + composition.cut
    try:
        return line_sum.at_most(parts, epsilon) + composition.infinity + composition.cut
    except Unplanned:
        return arb("inf")


def _by_integrals(build: Callable[[], Any], parts: Any, epsilon: float, log_scale: float, level: int) -> Any:
    """Enclose the part of delta from finite losses, by hit counts, a sum over a line or direct integration."""
    if hit_counts.applies(parts):
        with precision(BITS[level]):
            found, near = hit_counts.enclose(build(), ball(epsilon)), ball(log_scale).exp()
            if arb(found.rad()) < found.abs_upper().max(near) * arb(10) ** -GAUSSIAN_DIGITS[level]:
                return found
    if not small_loss_steps.only_sampled_gaussians(parts):
        return line_sum.enclose(build, epsilon, log_scale, DIGITS[level], NODES[level])
    digits, most = GAUSSIAN_DIGITS[level], max(NODES[level], 100_000)
    methods = [lambda: line_sum.enclose(build, epsilon, log_scale, digits, most)]
    if fits_direct_integration(parts):
        methods.insert(0, lambda: by_direct_integration(build, epsilon, log_scale, digits))
        if sum(count for _, count in parts) > 2:
            # three steps take two nested integrals, hence seconds: try a short sum over a line first
            methods.insert(0, lambda: line_sum.enclose(build, epsilon, log_scale, digits, most, 4_000_000))
    for method in methods[:-1]:
        with contextlib.suppress(Unplanned):
            return method()
    return methods[-1]()


def _exactly(parts: Any, epsilon: Any, level: int) -> Any:
    """Enclose the part of delta from finite losses by a formula or by enumeration; return None if neither applies."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0].hockey_stick(epsilon)
    if len(parts) == 1:
        ((part, count),) = parts
        if isinstance(part, LaplaceLoss) and count <= 300:  # limits the cost, which grows as count^2
            # the terms of the sum cancel, and the bits lost grow in proportion to the count
            with precision(BITS[level] + 8 * count):
                return repeated_laplace(part.top, count, epsilon)
        if isinstance(part, FiniteLosses):
            found = power_of_grid(part, count, epsilon, 200_000)
            if found is not None:
                return found
    if all(isinstance(part, FiniteLosses) for part, _ in parts):
        if not all(part.loss for part, _ in parts):
            return arb(0)
        many = states(parts)
        # at most this many total losses are added up one by one, at each level; a sum over a line replaces more
        if many <= (300_000, 300_000, 300_000, 2_000_000)[level]:
            return enumerate_totals(sorted(parts, key=lambda item: states([item])), epsilon)
    return None


def states(parts: Any) -> int:
    """Return the number of possible total losses, a product of binomial coefficients, or FAR_TOO_MANY if it is huge."""
    total = 1
    for part, count in parts:
        atoms = len(part.loss)
        if atoms == 0:
            return 0
        if count > 10**7 and atoms > 1:
            return FAR_TOO_MANY
        total *= math.comb(count + atoms - 1, atoms - 1)
        if total > 10**12:
            return FAR_TOO_MANY
    return total


def enumerate_totals(parts: Any, epsilon: Any) -> Any:
    """Return delta from finite losses: the sum, over all total losses, of their mass times (1 - e^{eps - loss})_+."""
    *rest, last = parts
    fixed = [(arb(0), arb(1))]
    for part, count in rest:
        fixed = [(x + y, m * n) for x, m in fixed for y, n in _totals(part, count)]
    total = arb(0)
    for loss, mass in _totals(*last):
        for start, share in fixed:
            gap = epsilon - loss - start
            if not gap >= 0:
                total += mass * share * (-gap.expm1()).max(0)
    return total


def power_of_grid(part: Any, count: int, epsilon: Any, most: int) -> Any:
    """Return `enumerate_totals` by a power of a polynomial, or None (no grid, < 3 losses, or > `most` terms)."""
    if part.grid is None or len(part.loss) < 3:
        return None
    offset, step, ks = part.grid
    low, by = min(ks), spread(part.grid)
    if (max(ks) - low) // by * count > most:
        return None
    masses = [arb(0)] * ((max(ks) - low) // by + 1)
    for k, p in zip(ks, part.p, strict=True):
        masses[(k - low) // by] += p
    tick()
    total = arb(0)
    for j, mass in enumerate((arb_poly(masses) ** count).coeffs()):
        gap = epsilon - count * offset - (count * low + j * by) * step
        if not gap >= 0:
            total += mass * (-gap.expm1()).max(0)
    return total


def repeated_laplace(top: Any, count: int, epsilon: Any) -> Any:
    """Return delta(eps) of `count` Laplace mechanisms by a closed form (README.md, "One step, and enumeration")."""
    total = arb(0)
    for k in range(count + 1):
        tick()
        d = (2 * k - count) * top - epsilon
        if d <= 0:
            continue
        d = d.max(0)
        small = (-d / 2).exp()
        integrals, term = [-(-d).expm1(), (1 - small) ** 2], 2 * small
        for m in range(2, count + 1):
            term *= d / 2 / (m - 1)
            integrals.append(integrals[m - 2] - term)
        powers = arb_poly([1, 1]) ** k * arb_poly([1, -1]) ** (count - k)
        inner = sum((a * b for a, b in zip(powers.coeffs(), integrals, strict=False)), arb(0))
        total += math.comb(count, k) * (-(count - k) * top).exp() * inner
    return total / arb(2) ** count


def _totals(part: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Yield (total loss, mass) for every way to distribute `count` steps over the outcomes of a law."""
    if len(part.loss) == 1:
        yield count * part.loss[0], part.p[0] ** count
        return
    if len(part.loss) == 2:
        (one, two), (p, q) = part.loss, part.p
        mass, ratio = q**count, p / q
        for k in range(count + 1):
            if k % 4096 == 0:
                tick()
            yield k * one + (count - k) * two, mass
            mass *= ratio * (count - k) / (k + 1)
        return
    # p^k/k! for k = 0, 1, ..., count
    terms = lambda p: list(accumulate(range(1, count + 1), lambda term, k: term * p / k, initial=arb(1)))
    powers = [terms(p) for p in part.p]
    yield from _multinomial(part.loss, powers, count, arb(0), arb(count).gamma() * count)


def _multinomial(losses: Any, powers: Any, left: int, loss: Any, mass: Any) -> Iterator[tuple[Any, Any]]:
    if len(losses) == 1:
        yield loss + left * losses[0], mass * powers[0][left]
        return
    tick()
    for k in range(left + 1):
        yield from _multinomial(losses[1:], powers[1:], left - k, loss + k * losses[0], mass * powers[0][k])


def fits_direct_integration(parts: Any) -> bool:
    """Return whether the parts are two or three sampled Gaussian steps. More steps would nest too many integrals."""
    return all(type(part) is SampledGaussian for part, _ in parts) and 2 <= sum(n for _, n in parts) <= 3


def by_direct_integration(build: Callable[[], Any], epsilon: float, log_scale: float, digits: int) -> Any:
    """Enclose delta(epsilon) of 2 or 3 sampled Gaussian steps, to about 10^-digits max(e^log_scale, delta)."""
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


class _Aims(NamedTuple):
    """The tolerances of every integral: `tolerance` is absolute, `share` is relative."""

    tolerance: Any
    share: Any


@dataclass(frozen=True)
class _Step:
    """One sampled Gaussian step. High outputs add to delta if the sign is 1 (remove), low ones if it is -1 (add)."""

    law: SampledGaussian
    sign: int

    def ratio(self, u: Any) -> Any:
        """Return the likelihood ratio 1 - q + q e^{u/sigma - 1/(2 sigma^2)} at an output u."""
        law = self.law
        return 1 - law.rate + law.rate * (u / law.sigma - 1 / (2 * law.sigma**2)).exp()

    def place(self, m: Any) -> Any:
        """Return the output u whose likelihood ratio is m. Where u is not analytic in m, the result is not finite."""
        law = self.law
        return law.sigma * ((m - 1 + law.rate) / law.rate).log(True) + 1 / (2 * law.sigma)

    def beyond(self, u: Any) -> tuple[Any, Any]:
        """Return the masses, under P and under Q, of the outputs beyond u: above u for remove, below u for add."""
        law, root = self.law, arb(2).sqrt()
        plain = (self.sign * u / root).erfc() / 2
        hit = (self.sign * (u - 1 / law.sigma) / root).erfc() / 2
        return plain + law.rate * (hit - plain), plain


def _payoff(steps: list[_Step], places: list[Any], grown: Any) -> Any:
    """Return E[sign (m_1 ... m_n - grown)] over the outputs beyond all `places`, with m_i the ratio of step i."""
    p, q = acb(1), acb(1)
    for step, u in zip(steps, places, strict=True):
        one, two = step.beyond(u)
        p, q = p * one, q * two
    return steps[0].sign * (p - grown * q)


def _last(step: _Step, grown: Any) -> Any:
    """Return E[(sign (m - grown))_+] of one step with the likelihood ratio m."""
    return _payoff([step], [step.place(grown)], grown)


def _cuts(steps: list[_Step], grown: Any) -> list[Any]:
    """Return one output for each step, so that the ratios m multiply to `grown` and all m/(1 - rate) are equal."""
    floors = [1 - step.law.rate for step in steps]
    share = grown
    for floor in floors:
        share = share / floor
    share = (share.log(True) / len(steps)).exp()
    return [step.place(floor * share) for step, floor in zip(steps, floors, strict=True)]


def _whole(steps: list[_Step], grown: Any, aims: _Aims) -> Any:
    """Enclose E[(sign (m_1 ... m_n - grown))_+] of two or three steps, with m_i the likelihood ratio of step i."""
    cuts = _cuts(steps, acb(grown))
    if not all(cut.is_finite() for cut in cuts):
        raise Unplanned("its epsilon is too near the largest loss")
    total = _payoff(steps, cuts, grown) * steps[0].sign ** (len(steps) - 1)
    for i, many in _distinct(steps):
        rest, others = _without(steps, i), _without(cuts, i)
        inner: Callable[[Any], Any]
        if len(rest) == 1:
            inner = lambda m, other=rest[0]: _last(other, grown / m)  # type: ignore[misc]  # mypy infers no type of a default
        else:
            inner = _Two(rest, others, grown, 1 - steps[i].law.rate, steps[i].ratio(cuts[i]), aims)
        total += many * _below(steps[i], cuts[i], inner, aims)
    return total.real


class _Two:
    """The integral over two steps, as a function of the third step's ratio m (README.md, "Two and three steps")."""

    def __init__(self, steps: list[_Step], cuts: list[Any], grown: Any, least: Any, most: Any, aims: _Aims) -> None:
        self.steps, self.cuts, self.grown, self.aims = steps, cuts, grown, aims
        # The integrand is largest where the third step's ratio is `worst`. The lower ends found there serve all ratios.
        worst = most if steps[0].sign > 0 else least
        self.lows = {}
        for i, _ in _distinct(steps):
            (other,) = _without(steps, i)
            inner = lambda m, other=other: _last(other, grown / (worst * m))
            self.lows[i] = _end(steps[i], cuts[i], inner, aims.tolerance)[0]

    def __call__(self, m: Any) -> Any:
        # An integral at m is known no better than m, so `_integral` adds the relative width of m to its tolerance.
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
    """Return a pair for each distinct law: the index of its first step, and the number of steps with this law."""
    keys = [step.law.key for step in steps]
    return [(i, keys.count(key)) for i, key in enumerate(keys) if key not in keys[:i]]


def _integrand(step: _Step, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function u -> N(u) m inner(m) of the output u, with the ratio m at u and the normal density N."""

    def value(u: Any) -> Any:
        m = step.ratio(u)
        return (-u * u / 2).exp() / (2 * arb.pi()).sqrt() * m * inner(m)

    return value


def _below(step: _Step, cut: Any, inner: Callable[[Any], Any], aims: _Aims) -> Any:
    """Enclose the integral of `_integrand` over the outputs from -inf to the cut."""
    low, left = _end(step, cut, inner, aims.tolerance)
    return _integral(_integrand(step, inner), low, cut, aims, arb(0)) + left


def _left(step: _Step, low: Any, inner: Callable[[Any], Any]) -> Any:
    """Enclose the integral of `_integrand` from -inf to `low`, as Pr[u < low] times a mean of m inner(m)."""
    m = acb(between(1 - step.law.rate, step.ratio(low).real))
    return (-low / arb(2).sqrt()).erfc() / 2 * m * inner(m)


def _end(step: _Step, cut: Any, inner: Callable[[Any], Any], tolerance: Any) -> tuple[Any, Any]:
    """Return the lower end of the range of integration, and an enclosure of the integral below that end."""
    top = min(float(cut.real.mid()), 0.0)
    for away in range(1, 60):
        tick()
        low = acb(top - away)
        left = _left(step, low, inner)
        if left.abs_upper() < tolerance:
            return low, left
    raise Unplanned("its range is too long")


def _integral(function: Callable[[Any], Any], low: Any, high: Any, aims: _Aims, wide: Any) -> Any:
    """Enclose the integral from `low` to `high`, both balls. `wide`: relative width of the ball m of `_Two`, else 0."""
    way = high - low

    def along(t: Any, _: bool) -> Any:
        tick()
        return function(low + way * t) * way

    rough = 1 + wide / aims.share
    # with a large `wide` this integral serves only the error bound of the outer integral, so few evaluations suffice
    limits: dict[str, Any] = {"eval_limit": 300, "use_heap": True} if wide > aims.share else {}
    tolerance, share = aims.tolerance * rough, (aims.share * rough).min(arb("0.1"))
    return acb.integral(along, acb(0), acb(1), abs_tol=tolerance, rel_tol=share, **limits)
