"""delta of two and three sampled Gaussian steps: direct integration against sums over a line and plain quadrature."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxacct as ja

flint = pytest.importorskip("flint")

from jaxacct.verification import delta_enclosure, line_sum, loss_definition  # noqa: E402
from jaxacct.verification.ball_arithmetic import Unplanned, arb, precision  # noqa: E402

BOTH = pytest.mark.parametrize("direction", ["remove", "add"])


def steps(*pairs):
    return ja.compose(*(ja.PoissonSampled(ja.Gaussian(sigma), q) for sigma, q in pairs))


def builder(run, direction):
    return lambda: loss_definition.expand(run, "add_or_remove_one", direction).parts


def by_quadrature(pairs, epsilon, direction):
    """delta of two steps in mpmath: one integral of a closed form, over all outputs of the first step."""
    (s1, q1), (s2, q2) = ((mpmath.mpf(s), mpmath.mpf(q)) for s, q in pairs)
    grown = mpmath.exp(epsilon if direction == "remove" else -epsilon)
    tail = lambda u: mpmath.erfc(u / mpmath.sqrt(2)) / 2
    ratio = lambda u: 1 - q1 + q1 * mpmath.exp(u / s1 - 1 / (2 * s1**2))

    def last(limit):
        """E[(m - limit)_+] for remove, E[(limit - m)_+] for add."""
        below = limit <= 1 - q2
        if direction == "remove":
            if below:
                return 1 - limit
            u = s2 * mpmath.log((limit - 1 + q2) / q2) + 1 / (2 * s2)
            return (1 - q2) * tail(u) + q2 * tail(u - 1 / s2) - limit * tail(u)
        if below:
            return mpmath.mpf(0)
        u = s2 * mpmath.log((limit - 1 + q2) / q2) + 1 / (2 * s2)
        return limit * tail(-u) - (1 - q2) * tail(-u) - q2 * tail(1 / s2 - u)

    bent = []
    edge = grown / (1 - q2) - 1 + q1
    if edge > 0:
        bent = [s1 * mpmath.log(edge / q1) + 1 / (2 * s1)]
    points = sorted({mpmath.mpf(u) for u in (-14, -6, -2, 0, 2, 6, 14)} | {u for u in bent if abs(u) < 14})
    points += [points[-1] + 1 / s1] if direction == "remove" else []
    density = lambda u: mpmath.npdf(u) * ratio(u) * last(grown / ratio(u))
    total = mpmath.quad(density, points)
    return total if direction == "remove" else total / grown


@BOTH
@pytest.mark.parametrize(
    "pairs, epsilon",
    [
        (((1.0, 0.1), (1.0, 0.1)), 0.15),
        (((0.7, 0.3), (1.5, 0.01)), 0.2),
        (((2.0, 0.5), (0.5, 0.05)), 0.05),
        (((0.8, 0.9), (0.8, 0.9)), 3.0),
    ],
)
def test_two_steps_against_plain_quadrature(pairs, epsilon, direction):
    found = delta_enclosure.by_direct_integration(builder(steps(*pairs), direction), epsilon, -10.0, 12)
    with mpmath.workdps(20), precision(200):
        truth = by_quadrature(pairs, epsilon, direction)
        assert abs(mpmath.mpf(found.mid().str(30, radius=False)) - truth) < mpmath.mpf("1e-12")
        assert found.rad() < arb("1e-12")


@BOTH
@pytest.mark.parametrize(
    "pairs, epsilon",
    [
        (((1.0, 0.2),) * 2, 0.3),
        (((1.0, 0.2),) * 3, 0.3),
        pytest.param(((1.0, 0.2), (1.0, 0.2), (0.8, 0.1)), 0.4, marks=pytest.mark.slow),
        pytest.param(((1.0, 0.2), (1.3, 0.1), (0.8, 0.15)), 0.25, marks=pytest.mark.slow),
    ],
    ids=["two", "three alike", "two alike", "three"],
)
def test_direct_integration_equals_the_sum_over_a_line(pairs, epsilon, direction):
    """Two programs that share the definition of a step and nothing else."""
    build = builder(steps(*pairs), direction)
    found = delta_enclosure.by_direct_integration(build, epsilon, -8.0, 4)
    truth = line_sum.enclose(build, epsilon, -8.0, 5, 400_000)
    with precision(200):
        assert found.overlaps(truth)
        assert found.rad() < arb("1e-5") and truth.rad() < arb("1e-5")


def brute_force(pairs, epsilon, direction, count=20):
    """delta of three steps by a product rule over all outputs, to about three digits."""
    u = np.linspace(-7.0, 12.0, 4 * count)
    weight = np.exp(-u * u / 2) * (u[1] - u[0]) / math.sqrt(2 * math.pi)
    m = [1 - q + q * np.exp(u / s - 0.5 / s**2) for s, q in pairs]
    product = m[0][:, None, None] * m[1][None, :, None] * m[2][None, None, :]
    gain = product - math.exp(epsilon) if direction == "remove" else 1.0 - math.exp(epsilon) * product
    return float(np.einsum("i,j,k,ijk->", weight, weight, weight, np.maximum(gain, 0.0)))


@pytest.mark.slow  # the sums over a line above are of three steps too
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_three_steps_against_brute_force(direction):
    """The regions into which space is cut cover every output once."""
    pairs, epsilon = ((1.0, 0.5), (1.5, 0.3), (1.2, 0.6)), 0.2
    found = delta_enclosure.by_direct_integration(builder(steps(*pairs), direction), epsilon, -4.0, 6)
    assert float(found.mid()) == pytest.approx(brute_force(pairs, epsilon, direction), rel=2e-3)


@settings(deadline=None, max_examples=6)
@given(st.floats(0.3, 5.0), st.floats(0.3, 5.0), st.floats(-6.0, -0.1), st.floats(-6.0, -0.1), st.floats(-9.0, -1.0))
def test_engine_brackets_of_two_steps_are_verified_and_moved_ones_refuted(s1, s2, log_q1, log_q2, log_delta):
    run, delta = steps((s1, 10.0**log_q1), (s2, 10.0**log_q2)), 10.0**log_delta
    answer = ja.epsilon(run, delta)
    low, high = float(answer.lower), float(answer.upper)
    assert ja.verify(run, answer, delta=delta).status != "refuted"
    if not (low > 0 and high < low * (1 + 1e-5)):
        return
    for ends in ((low, low * (1 - 1e-4)), (high * (1 + 1e-4), high * 2)):
        wrong = ja.Bounds(ends[0], ends[0], ends[1]) if ends[0] <= ends[1] else ja.Bounds(0.0, 0.0, ends[1])
        assert ja.verify(run, wrong, delta=delta).status == "refuted"


def test_rare_steps_are_decided():
    """A sum over a line is longer here than is allowed."""
    run = ja.dp_sgd(0.7, 1e-6, 2)
    assert ja.verify(run, ja.epsilon(run, 1e-12), delta=1e-12).status == "verified"


def test_an_epsilon_at_the_largest_loss_is_left_to_others():
    """There no share of the loss is left for any step. The cuts are not finite, so no answer is given."""
    run = steps((1.0, 0.1), (1.0, 0.1))
    with pytest.raises(Unplanned, match="largest loss"):
        delta_enclosure.by_direct_integration(builder(run, "add"), -2 * math.log1p(-0.1), -20.0, 8)


def test_more_than_three_steps_are_left_to_the_sum():
    for count, fits in ((1, False), (2, True), (3, True), (4, False)):
        parts = builder(ja.dp_sgd(1.0, 0.1, count), "remove")()
        assert delta_enclosure.fits_direct_integration(parts) is fits
