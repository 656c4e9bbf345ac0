"""Encloses delta of one round of random allocation. Proofs: README.md, "One round of random allocation"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import acb_mat

from jaxacct.verification.ball_arithmetic import (
    PRODUCTS_AT_A_TIME,
    Unplanned,
    acb,
    arb,
    between,
    gaussian_tail,
    precision,
    tick,
    within,
)
from jaxacct.verification.small_loss_steps import where_it_falls_to

ANGLES = np.geomspace(1e-5, 1.0, 60)
"""Angles tried for the path of the quadrature of phi, in units of about pi/4. The one with fewest nodes is used."""
MOST_NODES = 1_000_000
"""Largest number of nodes of one sum over Im z."""
MARGIN = 14.0
"""Safety margin in nats: the error that the quadrature of phi aims at is e^MARGIN times smaller than needed."""


@dataclass(frozen=True)
class AllocationLoss:
    """The loss of one round of random allocation in one direction (README.md defines S, X, s, put and phi)."""

    sigma: Any
    slots: int
    direction: str
    infinity = None
    largest = None

    @property
    def key(self) -> Any:
        return ("RandomAllocation", self.sigma.str(40), self.slots, self.direction)

    def one_round(self, epsilon: Any, log_tolerance: float) -> Any:
        """Enclose delta(epsilon) with an error of about e^log_tolerance."""
        remove = self.direction == "remove"
        size = float(epsilon.mid())
        if size > 700.0:
            raise Unplanned("e^epsilon is out of reach")
        wanted = log_tolerance - (0.0 if remove else size)
        with np.errstate(all="ignore"):
            plan = _Plan(float(self.sigma.mid()), self.slots, float(np.exp(size if remove else -size)), wanted)
        with precision(plan.bits):
            grown = epsilon.exp()
            if remove:
                return (1 - grown + self._put(grown, plan)).max(0)
            return (grown * self._put(1 / grown, plan)).max(0)

    def _put(self, k: Any, plan: _Plan) -> Any:
        """Enclose E(k - S)_+ = (1/2 pi i) int e^{zk} phi(z)^t/z^2 dz by the trapezoid rule on Re z = c."""
        c, step, t = arb(plan.c), 2 * arb.pi() / arb(plan.period), self.slots
        period = arb(plan.period)
        if not period >= k:
            raise Unplanned("its period is too short")
        total, last = arb(0), (plan.count - 1) * step
        turns = [acb(0, step * j * k).exp() for j in range(plan.width)]
        for row, values in zip(plan.rows, self._values(c, step, plan), strict=True):
            tick()
            place = acb(0, step * (row * plan.width) * k).exp()
            for j, turn in enumerate(turns):
                z = acb(c, (row * plan.width + j) * step)
                term = (values[j] ** t / (z * z) * (place * turn)).real
                total += term / 2 if row == 0 and j == 0 else term
        scale = (c * k).exp() / arb.pi()
        cut = within(self._beyond(c, last, plan) ** t * scale / last)
        decay = (-c * period).exp()
        images = decay * (k + period) / (1 - decay) ** 2
        return total * step * scale + cut - between(0, images.abs_upper())

    def _beyond(self, c: Any, y: Any, plan: _Plan) -> Any:
        """Bound |phi(c + iy')| for all y' >= y by e^{(sigma angle)^2/2} phi(c cos(angle) + y sin(angle))."""
        angle = arb(plan.turned)
        r = c * angle.cos() + y * angle.sin()
        weights, exponents, error = self._nodes(r, arb(0), arb(plan.real_strip), plan)
        total = sum((w * (r * x).exp() for w, x in zip(weights, exponents, strict=True)), acb(0)).real
        return ((total + error) * ((angle * self.sigma) ** 2 / 2).exp()).abs_upper()

    def _values(self, c: Any, step: Any, plan: _Plan) -> Any:
        """Yield enclosures of phi(c + 1j * n * step) at integers n, one row of the plan after another."""
        weights, exponents, error = self._nodes(c, arb(plan.angle), arb(plan.strip), plan)
        size, spread = len(weights), acb(within(error), within(error))
        right = []
        for x in exponents:
            tick()
            right += [(acb(0, step * b) * x).exp() for b in range(plan.width)]
        matrix = acb_mat(size, plan.width, right)
        block = max(1, min(len(plan.rows), PRODUCTS_AT_A_TIME // (size * plan.width)))
        grown = [w * (c * x).exp() for w, x in zip(weights, exponents, strict=True)]
        for at in range(0, len(plan.rows), block):
            some, left = plan.rows[at : at + block], []
            for row in some:
                tick()
                place = acb(0, step * (row * plan.width))
                left += [w * (place * x).exp() for w, x in zip(grown, exponents, strict=True)]
            product = acb_mat(len(some), size, left) * matrix
            for i in range(len(some)):
                yield [product[i, b] + spread for b in range(plan.width)]

    def _nodes(self, c: Any, angle: Any, strip: Any, plan: _Plan) -> tuple[list[Any], list[Any], Any]:
        """Return (weights w, exponents x, error): phi(z) is within `error` of the sum of w e^{zx} where Re z >= c.

        This holds for Im z >= 0 if the angle is positive, and for real z if it is 0.  The path is Im u = -angle sigma.
        """
        s, t, down = 1 / self.sigma, self.slots, angle * self.sigma
        width = strip * self.sigma
        h = 2 * arb.pi() * width / arb(plan.digits + float((2 * width * width).upper()))
        low, high = -arb(plan.reach), arb(plan.right if bool(angle > 0) else plan.reach)
        first, last = int(float((low / h).floor().lower())), int(float((high / h).ceil().upper()))
        weights, exponents, scale = [], [], h / (2 * arb.pi()).sqrt()
        for j in range(first, last + 1):
            u = acb(j * h, -down)
            weights.append(scale * (-u * u / 2).exp())
            exponents.append(-(s * u - s * s / 2).exp() / t)
        grown = (down * down / 2).exp()
        far = -(s * last * h - s * s / 2).exp() / t
        outside = gaussian_tail(-first * h) + gaussian_tail(last * h) * (c * angle.cos() * far).exp()
        # the error is bounded on two lines, one `width` above and one `width` below the path Im u = -down
        if bool(angle > 0):
            if not (strip <= angle and angle + strip <= arb.pi() / 2):
                raise Unplanned("its path is turned too far")
            sizes = ((width - down) ** 2 / 2).exp() + ((width + down) ** 2 / 2).exp()
        else:
            if not strip <= arb.pi() / 2:
                raise Unplanned("its path is turned too far")
            sizes = 2 * (width * width / 2).exp()
        error = sizes / ((2 * arb.pi() * width / h).exp() - 1) + outside * grown
        return weights, exponents, error.abs_upper()


class _Plan:
    """The choice of the line, the period and the nodes of all sums, in floats. A bad choice only widens the result."""

    def __init__(self, sigma: float, t: int, k: float, wanted: float) -> None:
        self.sigma, self.t = sigma, t
        s = 1.0 / sigma
        self._u = np.linspace(-40.0, 12.0, 4001)
        self._x = np.exp(np.minimum(s * self._u - 0.5 * s * s, 600.0)) / t
        self._density = -0.5 * self._u**2 - 0.5 * np.log(2 * np.pi) + np.log(self._u[1] - self._u[0])
        self.c = self._saddle(k)
        start = float(self.c * k + t * self._log_phi(np.array([self.c]))[0] - 2 * np.log(self.c))
        goal = wanted - 2.0
        self.period = max(k, (np.log(k + 100.0 / self.c) - goal) / self.c) * 1.000001
        step = 2 * np.pi / self.period
        last, self.turned = self._cut(k, goal, step)
        if not last / step < MOST_NODES:
            raise Unplanned("its sum is too long")
        self.count = int(np.ceil(last / step)) + 2
        self.width = max(1, int(np.sqrt(self.count)))
        self.rows = range(-(-self.count // self.width))
        self.count = len(self.rows) * self.width
        # accuracy of phi in nats: phi^t has t times the relative error of phi, and the errors of all terms add up
        small = float(self._log_phi(np.array([self.c]))[0])
        self.digits = max(start - goal, 1.0) - small + np.log(t) + np.log(self.count) + MARGIN
        self.angle, nodes = self._angle(s)
        self.strip = self.angle
        self.real_strip = min(1.5, 3.0 * s)
        self.reach = float(np.sqrt(2 * (self.digits + 0.5 * (self.angle * sigma) ** 2))) + 0.5
        big = np.log(max(self.digits + 0.5 * (self.angle * sigma) ** 2, 1.0) * t / self.c / np.cos(self.angle))
        self.right = float(min(self.reach, max((big / s + 0.5 * s), 1.0)))
        self.bits = int(64 + 1.45 * (self.digits + (2 * self.angle * sigma) ** 2) + 2 * np.log2(t + 1))
        if self.bits > 3000 or not nodes * self.count < 60_000_000:  # too much cancellation, or too many terms
            raise Unplanned("its sum is too long")

    def _log_phi(self, r: np.ndarray) -> np.ndarray:
        logs = self._density - r[:, None] * self._x
        top = logs.max(-1)
        return np.asarray(top + np.log(np.exp(logs - top[:, None]).sum(-1)))

    def _saddle(self, k: float) -> float:
        grid = np.geomspace(1e-6, 1e9, 120) / k
        for _ in range(3):
            values = grid * k + self.t * self._log_phi(grid) - 2 * np.log(grid)
            best = int(np.argmin(np.where(np.isfinite(values), values, np.inf)))
            grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 20)
        return float(grid[10])

    def _cut(self, k: float, goal: float, step: float) -> tuple[float, float]:
        """Return the least y, to 2 %, where a bound of the terms with Im z > y is <= e^goal, and the bound's angle."""
        angles = np.geomspace(1e-6, 1.0, 200) * (np.pi / 2 * 0.999)

        def bounds(y: float) -> np.ndarray:
            r = self.c * np.cos(angles) + y * np.sin(angles)
            each = 0.5 * (angles * self.sigma) ** 2 + self._log_phi(r)
            return np.asarray(self.t * each + self.c * k - np.log(np.pi * y))

        far = where_it_falls_to(lambda y: bounds(y).min(), step, step * 1e6, goal)
        return far, float(angles[int(np.argmin(bounds(far)))]) if np.isfinite(far) else 0.0

    def _angle(self, s: float) -> tuple[float, float]:
        """Return the path's angle with the fewest quadrature nodes, and this number of nodes."""
        widths = ANGLES * (np.pi / 4 * 0.999) / s
        turns = (self.digits + 2 * widths**2) / widths
        nodes = 2 * np.sqrt(2 * (self.digits + 0.5 * widths**2)) * turns / (2 * np.pi)
        best = int(np.argmin(nodes))
        return float(widths[best] * s), float(nodes[best])
