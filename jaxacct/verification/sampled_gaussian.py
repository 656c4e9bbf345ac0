"""The Poisson-sampled Gaussian: M(z) = E_P[e^{zL}] as a sum over nodes, with an error that does not grow with Im z.

Proofs: README.md of this folder, "The sampled Gaussian" and "Outputs cut in two".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.verification.ball_arithmetic import acb, acb_mat, arb, between, ctx, gaussian_tail, tick, within
from jaxacct.verification.closed_form_losses import GaussianLoss, sampled_hockey_stick
from jaxacct.verification.sampled_gaussian_planning import SampledGaussianPlanning

__all__ = ["SampledGaussian"]


@dataclass(frozen=True)
class SampledGaussian(SampledGaussianPlanning):
    """N(1, sigma^2) against N(0, sigma^2), sampled at a rate in (0, 1).

    With u ~ N(0, 1) and y = u/sigma - 1/(2 sigma^2), mix = 1 - rate + rate e^y, remove has M(z) = E[mix^{z+1}] and add
    M(z) = E[mix^{-z}]; both are entire.  With cuts, only their share of every output is in the mean.
    """

    infinity = None

    @property
    def key(self) -> Any:
        return ("SampledGauss", self.sigma.str(40), self.rate.str(40), self.direction)

    @property
    def largest(self) -> Any:
        return None if self.direction == "remove" else -(1 - self.rate).log()

    @property
    def least(self) -> Any:
        return (1 - self.rate).log() if self.direction == "remove" else None

    @property
    def masses(self) -> tuple[Any, Any]:
        """P- and Q-mass of the outputs, of their share with cuts: M(0) and M(-1)."""
        plain, hit = (self._mass(shift) for shift in (0, 1 / self.sigma))
        mixed = (1 - self.rate) * plain + self.rate * hit
        return (mixed, plain) if self.direction == "remove" else (plain, mixed)

    def _mass(self, shift: Any) -> Any:
        """E[share of N(shift, 1)]: a closed form for one cut; a second cut takes away at most what it leaves out."""
        found = []
        for cut in self.cuts:
            spread = (1 + arb(cut.width) ** 2).sqrt()
            found.append(gaussian_tail(cut.side * (arb(cut.place) - shift) / spread))
        if not found:
            return arb(1)
        return between(found[0] - sum((1 - x for x in found[1:]), arb(0)), found[0])

    def hockey_stick(self, epsilon: Any) -> Any:
        """One step, from the unsampled profile at a shifted epsilon."""
        base = GaussianLoss(1 / self.sigma**2)
        return sampled_hockey_stick(base, self.rate, self.direction, epsilon)

    def decay(self, c: Any, t: Any, count: int) -> Any:
        """Upper bound of |M(c + is)| for all s >= t: the line is moved by an angle, where mix^{it} decays."""
        value, angle = self._best_angle(float(c.mid()), float(t.mid()))
        fallen = max(float(self.log_mgf(np.array([float(c.mid())]))[0]) - value, 0.0)
        return self._moved_bound(c, t, arb(angle), float(np.log(count) + 12.0) + fallen)

    def mgf(self, z: Any) -> Any:
        """M at a real point above 0 or below -1."""
        x = z.real
        return acb(self.mean(x) if x > 0 else self.mirrored.mean(-1 - x))

    def values(self, c: Any, step: Any, rows: range, width: int, count: int, bits: float) -> Iterator[list[Any]]:
        """Enclosures of M(c + i j step) for j = row * width + 0 ... width - 1, one row at a time.

        e^{i(a + b)l} = e^{ia l} e^{ib l}: a block of rows is one product of two matrices.
        """
        nodes = _Nodes(self, c, count, bits)
        error = acb(within(nodes.error), within(nodes.error))
        size = len(nodes.weights)
        # each power by its own exponential: a product of many balls would be blown up by each turn
        places = [acb(0, step * b) for b in range(width)]
        right = []
        for x in nodes.logs:
            tick()
            right += [(place * x).exp() for place in places]
        matrix = acb_mat(size, width, right)
        block = max(1, min(len(rows), width))
        start = list(rows)
        for at in range(0, len(start), block):
            tick()
            some = start[at : at + block]
            left = []
            for row in some:
                tick()
                place = acb(0, step * (row * width))
                left += [w * (place * x).exp() for w, x in zip(nodes.weights, nodes.logs, strict=True)]
            product = acb_mat(len(some), size, left) * matrix
            for i in range(len(some)):
                yield [product[i, b] + error for b in range(width)]

    def _moved_bound(self, c: Any, t: Any, angle: Any, wanted: float) -> Any:
        """e^{(sigma angle)^2/2} E[|mix|^e e^{-t arg mix}] on the line at an angle, by the trapezoid rule."""
        exponent = self._exponent(c)
        strip, turn, wanted = self._strip(float(c.mid()), float(angle.mid()), wanted)
        h = 2 * arb.pi() / arb(max(turn, 1.0))
        low, high = self._range(float(c.mid()), wanted)
        total = arb(0)
        for j in _whole_between(low, high, h):
            tick()
            u = j * h
            mixed = self._mix(u, angle).log()
            total += self._share(u) * (-u * u / 2 + exponent * mixed.real - t * mixed.imag).exp()
        total *= h / (2 * arb.pi()).sqrt() * self._risen(angle)
        error = 2 * self._apart(c, angle, strip) / ((2 * arb.pi() * self.sigma * strip / h).exp() - 1)
        total += error * self.mean(c).upper()
        small = self.mean(c) * (-arb(wanted)).exp()
        total += self._outside(c, low, high, h, small) * self._grown(c, angle)
        return total.abs_upper()

    def mean(self, c: Any) -> Any:
        """M(c) at a real c > 0, on the real line: its error is a share of M(c) itself."""
        known = self._means.get((c.str(40), ctx.prec))
        if known is not None:
            return known
        found, turn, wanted, _ = self.line(float(c.mid()), 60.0, 1.0)
        strip, h = arb(found), 2 * arb.pi() / arb(turn)
        low, high = self._range(float(c.mid()), wanted)
        exponent, total = self._exponent(c), arb(0)
        for j in _whole_between(low, high, h):
            tick()
            u = j * h
            total += self._share(u) * (-u * u / 2 + exponent * self._mix_real(u).log()).exp()
        total *= h / (2 * arb.pi()).sqrt()
        total = between(total, total + self._outside(c, low, high, h, total * arb(-60).exp()))
        share = within(self._trapezoid(c, strip, strip, h))
        found = total / (1 - share)
        self._means[(c.str(40), ctx.prec)] = found
        return found

    def _mix(self, u: Any, angle: Any) -> Any:
        y = acb(u / self.sigma - 1 / (2 * self.sigma**2), angle)
        return 1 - self.rate + self.rate * y.exp()

    def _mix_real(self, u: Any) -> Any:
        return 1 - self.rate + self.rate * (u / self.sigma - 1 / (2 * self.sigma**2)).exp()

    def _share_of_slope(self, u: Any) -> Any:
        """sigma times the slope of log mix, which rises with u."""
        y = u / self.sigma - 1 / (2 * self.sigma**2)
        return self.rate * y.exp() / (1 - self.rate + self.rate * y.exp())

    def _share(self, u: Any) -> Any:
        share = arb(1)
        for cut in self.cuts:
            share *= cut.share(u)
        return share

    def _risen(self, angle: Any) -> Any:
        stretch = self.sigma**2 * sum((1 / arb(cut.width) ** 2 for cut in self.cuts), arb(1))
        return (stretch * angle**2 / 2).exp()

    def _grown(self, c: Any, angle: Any) -> Any:
        """Bound of |N(u) mix^e| on the line at an angle relative to the real line, without the phase of e."""
        risen = self._risen(angle)
        return risen if self.direction == "remove" else risen * (angle / 2).cos() ** -c

    def _apart(self, c: Any, angle: Any, strip: Any) -> Any:
        """The same bound where log mix is replaced by the mean of log mix at angle + strip and at angle - strip."""
        risen = self._risen(angle) * self._risen(strip)
        if self.direction == "remove":
            return risen
        return risen * (((angle + strip) / 2).cos() * ((angle - strip) / 2).cos()) ** (-c / 2)

    def _trapezoid(self, c: Any, strip: Any, angle: Any, h: Any) -> Any:
        """Bound of the trapezoid rule's error as a share of M(c): lines `strip` away, none beyond `angle`."""
        return 2 * self._grown(c, angle) / ((2 * arb.pi() * self.sigma * strip / h).exp() - 1)

    def _outside(self, c: Any, low: Any, high: Any, h: Any, small: Any) -> Any:
        """Bound of h times the sum of N(u) mix^e over the nodes beyond the range, on the real line.

        Beyond an end U the slope of log mix^e away from it is at most g, and N (with its share) falls at a rate of at
        least f.  The sum is therefore at most the value at U times h + 1/(f - g).  On the right of remove g is
        (c + 1)/sigma.  The stretch up to there is bounded piece by piece: on [a, b] the value is at most
        N(a) mix(b)^e.  A piece is halved until its bound is below `small`.
        """
        exponent, total = self._exponent(c), arb(0)
        if self.direction == "remove":
            last = arb(self._steep(float((exponent / self.sigma).upper()) + 1.0, 1))
            pieces = [(high, last)] if last > high else []
            high = last if pieces else high
            while pieces:
                tick()
                a, b = pieces.pop()
                bound = self._value(a, b, exponent, 1) * (b - a + h)
                if bound > small and b - a > 1e-6:
                    pieces += [(a, (a + b) / 2), ((a + b) / 2, b)]
                else:
                    total += bound
        for end, side in ((low, -1), (high, 1)):
            slope = arb(0)
            if self.direction == "remove" and side > 0:
                slope = exponent / self.sigma
            if self.direction == "add" and side < 0:
                slope = c * self._share_of_slope(end) / self.sigma
            gap = self._fall(end, side) - slope
            if not gap > 0:
                return arb("inf")
            total += self._value(end, end, exponent, side) * (h + 1 / gap)
        return total.abs_upper()

    def _fall(self, end: Any, side: int) -> Any:
        """The least rate at which N, with the shares that fall too, falls beyond an end.

        A share adds x/width^2, x its distance from the cut in units of u, as d log Phi(-x)/dx <= -x for x >= 0.
        """
        fall = side * end
        for cut in self.cuts:
            if cut.side != side:
                fall += (side * (end - arb(cut.place))).max(0) / arb(cut.width) ** 2
        return fall

    def _value(self, a: Any, b: Any, exponent: Any, side: int) -> Any:
        """N(a) mix(b)^exponent, times the largest shares beyond a on that side."""
        value = (-a * a / 2 + exponent * self._mix_real(b).log()).exp() / (2 * arb.pi()).sqrt()
        for cut in self.cuts:
            if cut.side != side:
                value *= cut.share(a)
        return value


class _Nodes:
    """Weights w and exponents l with M(c + it) = sum of w e^{itl} within `error`, for every t >= 0."""

    def __init__(self, law: SampledGaussian, c: Any, count: int, bits: float) -> None:
        found, turn, wanted, _ = law.line(float(c.mid()), bits + float(np.log(count)))
        angle = arb(found)
        h = 2 * arb.pi() / arb(turn)
        exponent = law._exponent(c)
        low, high = law._range(float(c.mid()), wanted)
        sign = 1 if law.direction == "remove" else -1
        self.weights, self.logs = [], []
        scale = h / (2 * arb.pi()).sqrt()
        for j in _whole_between(low, high, h):
            tick()
            u = j * h
            moved = acb(u, sign * law.sigma * angle)
            log = law._mix(u, sign * angle).log()
            self.weights.append(scale * law._share(moved) * (-moved * moved / 2 + exponent * log).exp())
            self.logs.append(sign * log)
        self.error = law._trapezoid(c, angle, 2 * angle, h) * law.mean(c).upper()
        self.error += law._outside(c, low, high, h, law.mean(c) * (-arb(wanted)).exp()) * law._grown(c, angle)


def _whole_between(low: Any, high: Any, h: Any) -> range:
    """The whole numbers j with low <= j h <= high, and no fewer."""
    return range(int(float((low / h).floor().lower())), int(float((high / h).ceil().upper())) + 1)
