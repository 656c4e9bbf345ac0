"""The split contour: two steps against quadrature, moments against mpmath, hard cases against the lattice."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

import jaxacct as ja
from jaxacct.accounting.dispatch import kinds_of
from jaxacct.engines import closed_form, contour
from jaxacct.engines.protocol import Effort, Question
from jaxacct.kernels import arrays
from jaxacct.kernels.contour import split_parts
from jaxacct.mechanisms import components

HARD = [
    # few expected hits and a heavy tail, near-atoms, or a tiny delta
    # each epsilon is that of the lattice (to 0.1 %), or that of two rungs of the contour
    (1.0, 1e-3, 100, 1e-5, 0.0551651048),
    (0.5, 1e-4, 1000, 1e-6, 1.1633769277),
    (0.3, 1e-3, 1000, 1e-6, 21.67795404),
    (2.0, 1e-3, 100, 1e-6, 0.0189163205),
    (20.0, 2e-6, 100, 1e-20, 7.5301457857e-06),
    (0.8, 1e-6, 1000, 1e-28, 0.5643671268),
    (1.0, 1e-5, 1000, 1e-20, 0.0777053),
    (0.85077, 1.3467e-6, 24, 1.884e-22, 0.0458116),
    (17.93333, 3.852730145e-5, 181468, 2.4140542e-4, 0.0002825502),
]


def parts_of(sigma, q, steps, direction):
    return components(ja.dp_sgd(sigma, q, steps), f"{direction}_one", direction)


def split_only(monkeypatch):
    """Send every configuration to the split rungs at once."""
    rungs = tuple(rung for rung in contour.LADDER if rung.split)
    monkeypatch.setattr(contour, "LADDER", rungs)


def question(parts, target, floor):
    return Question(parts, kinds_of(parts), target, np.full(target.size, 1e-15), floor, Effort(1e-4))


def two_steps(sigma, q, direction, epsilon):
    """delta(eps) of two steps: the closed form of one, averaged over the other's outcome."""
    u = np.linspace(-14.0, 14.0 + 2.0 / sigma, 400_001)
    y = u / sigma - 0.5 / sigma**2
    log_mix = np.logaddexp(np.log1p(-q), np.log(q) + y)
    density = np.exp(-0.5 * u**2) / np.sqrt(2 * np.pi)
    loss = log_mix if direction == "remove" else -log_mix
    if direction == "remove":
        density = density * np.exp(log_mix)
    rest = epsilon - loss
    # below the support of the other step's loss, delta is 1 - e^eps
    value = np.empty_like(rest)
    inside = rest > 1e-12
    ones = np.full(inside.sum(), 1.0)
    one = closed_form.delta_of_one_step(
        sigma * ones, q * ones, np.full(inside.sum(), direction == "remove"), rest[inside]
    )
    value[inside] = one.estimate
    # negative eps: delta_P|Q(eps) = 1 - e^eps + e^eps delta_Q|P(-eps)
    other = closed_form.delta_of_one_step(
        np.full((~inside).sum(), sigma),
        np.full((~inside).sum(), q),
        np.full((~inside).sum(), direction != "remove"),
        np.maximum(-rest[~inside], 0.0),
    )
    value[~inside] = -np.expm1(rest[~inside]) + np.exp(rest[~inside]) * other.estimate
    return np.sum(density * value) * (u[1] - u[0])


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_two_steps_by_quadrature(monkeypatch, direction):
    split_only(monkeypatch)
    cases = [(1.0, 0.01, 0.05), (0.6, 0.001, 0.2), (2.0, 0.2, 0.1), (1.0, 0.3, 1.0), (0.5, 0.1, 3.0), (5.0, 0.01, 1e-3)]
    if direction == "add":
        cases = [(1.0, 0.3, 0.2), (2.0, 0.2, 0.1), (5.0, 0.5, 0.1), (0.7, 0.6, 0.8)]
    sigma, q, epsilon = (np.array(x) for x in zip(*cases, strict=True))
    answer = contour.Contour().delta(question(parts_of(sigma, q, 2, direction), epsilon, np.zeros(len(cases))))
    exact = np.array([two_steps(s, r, direction, e) for s, r, e in cases])
    narrow = answer.upper - answer.lower <= 1e-4 * answer.upper
    assert np.all(answer.lower <= exact * (1 + 1e-9))
    assert np.all(exact <= answer.upper * (1 + 1e-9))
    # in the add direction two steps leave a near-atom at the largest loss, which is the lattice's business
    assert direction == "add" or narrow.all()


@pytest.mark.parametrize(("sigma", "q", "steps", "delta", "epsilon"), HARD)
def test_hard_cases_are_narrow(sigma, q, steps, delta, epsilon):
    bounds = ja.epsilon(ja.dp_sgd(sigma, q, steps), delta)
    assert bounds.engine == "contour"
    assert bounds.relative_width < 2e-5
    assert bounds.lower <= epsilon * (1 + 2e-4)
    assert bounds.upper >= epsilon * (1 - 2e-4)


@pytest.mark.slow
def test_delta_and_epsilon_are_inverse():
    sigma, q, steps, delta, _ = (np.array(x) for x in zip(*HARD, strict=True))
    mechanism = ja.dp_sgd(sigma, q, steps)
    epsilon = ja.epsilon(mechanism, delta)
    above, below = ja.delta(mechanism, epsilon.upper), ja.delta(mechanism, epsilon.lower)
    assert np.all(above.lower <= delta)
    assert np.all(below.upper >= delta)
    assert np.all(above.upper / delta < 1.001)


@pytest.mark.slow
def test_heterogeneous_compositions_agree_with_the_lattice(monkeypatch):
    split_only(monkeypatch)
    mechanism = ja.compose(ja.dp_sgd(1.0, 1e-3, 60), ja.dp_sgd(2.0, 5e-3, 40), ja.Gaussian(30.0))
    for relation in ("remove_one", "add_one"):
        by_contour = ja.epsilon(mechanism, 1e-6, relation=relation, engine="contour")
        by_lattice = ja.epsilon(mechanism, 1e-6, relation=relation, engine="lattice")
        assert by_contour.relative_width < 1e-4
        assert max(by_contour.lower, by_lattice.lower) <= min(by_contour.upper, by_lattice.upper)


def test_a_coarse_grid_proves_nothing():
    """On a grid that misses the tilted law, the old Chernoff bound was below the truth."""
    parts = parts_of(45.40797879608346, 8.281134105296175e-05, 26, "remove")
    answer = contour.Contour().epsilon(question(parts, np.array([1.4891937537750569e-30]), np.array([-np.inf])))
    assert answer.lower[0] <= 9.65188151e-05 and answer.upper[0] >= 9.65188102e-05


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_quadrature_is_within_its_certificate(sign):
    """A and B on a warped grid of 384 points against a fine grid, at the highest frequency the grid follows."""
    values = list(map(np.float64, (0.8, 1e-2, sign, *((2.5, 5.0) if sign > 0 else (split_parts.NO_WINDOW,) * 2), 6.0)))
    sigma, q, _, low, high, c = values
    steps, t = split_parts.Steps(*values[:5]), 40.0
    with np.errstate(all="ignore"):
        nodes = split_parts.grid(steps, c, 384, t)
        tilted = split_parts.tilted(sign, c, nodes)
        bound = split_parts.step_errors(steps, c, nodes, tilted, t)
    sums = [np.sum(w * np.exp(1j * t * sign * nodes.loss)) for w in (tilted.bulk, tilted.jump)]
    logs = float(tilted.log_bulk), float(tilted.log_jump)
    # the trapezoidal rule is exact to rounding, since all derivatives vanish at the ends
    u, step = np.linspace(-11.0, 11.0, 200_001, retstep=True)
    log_mix = np.log1p(q * np.expm1(u / sigma - 0.5 / sigma**2))
    law = np.exp(-0.5 * u * u) / np.sqrt(2.0 * np.pi) * step
    width = [0.15 * min(sigma, 1), 0.1 * min(sigma, 1)]
    inside = ndtr((low - u) / width[0])
    windows = [share * ndtr((high - u) / width[1]) for share in (inside, ndtr((u - low) / width[0]))]
    for index in range(2 if sign > 0 else 1):
        tilt = law * windows[index] * np.exp((c + 1 if sign > 0 else -c) * log_mix)
        at_c, exact = np.sum(tilt), np.sum(tilt * np.exp(1j * t * sign * log_mix)) / np.sum(tilt)
        assert bound[index] < 1e-9
        assert abs(logs[index] - np.log(at_c)) < bound[index] + 1e-12
        assert abs(sums[index] - exact) < 2 * bound[index] + 1e-12


def test_log_ndtr_over_its_range():
    x = np.concatenate([np.linspace(-60.0, -30.0, 60), np.linspace(-30.0, 9.0, 200)])
    with mpmath.workdps(60):
        exact = [mpmath.log(mpmath.erfc(-mpmath.mpf(a) / mpmath.sqrt(2)) / 2) for a in x]
    with jax.enable_x64(), np.errstate(all="ignore"):
        by_xla = np.asarray(jax.jit(arrays.log_ndtr)(jnp.asarray(x)))
        sides = jax.jit(arrays.log_ndtr_sides)(jnp.asarray(-x))
        both = arrays.log_ndtr_sides(-x)
        for value in (by_xla, np.asarray(sides[1]), arrays.log_ndtr(x), both[1]):
            error = np.array([float(abs(mpmath.mpf(float(v)) - e)) for v, e in zip(value, exact, strict=True)])
            assert np.all(error <= 2.0**-53 * (12.0 + 3.0 * x**2))
        np.testing.assert_array_equal(both[0], arrays.log_ndtr(-x))


@settings(deadline=None, max_examples=12)
@given(st.floats(0.4, 8.0), st.floats(-5.0, -1.0), st.integers(2, 3000), st.floats(-20.0, -4.0), st.floats(1.05, 1.5))
def test_epsilon_falls_with_noise_and_delta(sigma, log_q, steps, log_delta, factor):
    q, delta = 10.0**log_q, 10.0**log_delta
    one = ja.epsilon(ja.dp_sgd(np.array([sigma, sigma * factor, sigma]), q, steps), delta * np.array([1, 1, factor]))
    assert one.lower[1] <= one.upper[0]
    assert one.lower[2] <= one.upper[0]
