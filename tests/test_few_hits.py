"""The fast solvers, on runs in which a record is sampled in few steps."""

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.calibration.dp_sgd_search import ORDER
from jaxacct.engines import contour
from jaxacct.kernels import calibration
from jaxacct.kernels.contour import split as split_contour
from jaxacct.mechanisms import components

SIGMA, Q, STEPS = 1.1924314883792062, 0.0006182305844248414, 34042.0


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_converged_saddle_search_stays_where_it_is(compiled):
    # rounding makes the last Newton steps leave their bracket; the old code then bisected it and lost the answer
    parts = components(ja.dp_sgd(np.full(16, SIGMA), Q, STEPS), "remove_one", "remove")
    first = jax.jit(split_contour._first) if compiled else split_contour._first
    with jax.enable_x64(), np.errstate(all="ignore"):
        found = np.asarray(first(contour.law(parts), np.full(16, np.log(1e-5)), np.full(16, np.log(1e-7))))
    np.testing.assert_allclose(found, 0.402693, rtol=1e-3)


def test_the_split_solve_finds_the_noise_and_its_slope():
    sigma, q, steps, delta = 0.8, 1e-3, 2000.0, 1e-5
    ends = [ja.epsilon(ja.dp_sgd(sigma * f, q, steps), delta, relation="remove_one") for f in (1.0, 0.999, 1.001)]
    target, low, high = (float(b.estimate) for b in ends)
    unknown = np.array([name == "noise_multiplier" for name in ORDER], float)
    base = np.log([1.0, q, steps])
    x, slope = np.log([0.7]), np.array([2.0 * np.log(delta)])
    log = np.log([delta]), np.log([1e-7])
    with np.errstate(all="ignore"):
        for _ in range(3):
            arguments = np.ones(1), base[None], unknown[None], x, slope, np.array([target]), *log
            found = calibration.solve_split(*arguments, points=384, count=128)
            x, slope = found.x, found.slope
    np.testing.assert_allclose(np.exp(x), sigma, rtol=1e-8)
    assert abs(found.residual[0]) < 1e-8 and found.moved[0] < 1e-6 and found.off[0] < 1e-10
    np.testing.assert_allclose(found.epsilon_slope, (high - low) / np.log(1.001 / 0.999), rtol=1e-4)
    assert slope[0] < 0 and found.epsilon_slope[0] < 0


@pytest.mark.slow
def test_few_hits_are_calibrated_at_once():
    c = ja.calibrate_noise_multiplier([0.5, 2.0, 4.0], 1e-5, [1e-3, 2e-3, 6e-3], [500, 300, 150])
    assert np.all(c.ok) and np.all(c.epsilon.upper <= [0.5, 2.0, 4.0])
    assert np.all(c.epsilon.upper >= np.array([0.5, 2.0, 4.0]) * (1 - 1e-4))
    assert set(c.epsilon.engine) == {"contour"}


def test_places_made_for_other_laws_certify_nothing_false():
    """A contour placed for another law gives sound bounds. All laws are of remove: window cuts have no bound in add."""
    sigma, q = np.array([0.6, 0.8, 1.0, 1.5, 0.8]), np.array([1e-3, 1e-3, 3e-4, 2e-3, 1e-4])
    steps, delta = np.array([500.0, 2000.0, 3000.0, 1000.0, 9000.0]), 1e-5
    run = ja.dp_sgd(sigma, q, steps)
    laws, truth = {}, {}
    for direction in ("remove", "add"):
        laws[direction] = contour.law(components(run, f"{direction}_one", direction))
        truth[direction] = ja.epsilon(run, delta, relation=f"{direction}_one")
    log_delta, log_tol, law, known = (
        np.full(5, np.log(delta)),
        np.full(5, np.log(1e-7)),
        laws["remove"],
        truth["remove"],
    )
    certified = 0
    with np.errstate(all="ignore"):
        for made_for in ("remove", "add"):
            there = split_contour.place(laws[made_for], truth[made_for].estimate, log_delta, log_tol, count=128)
            for shift in (0, 1, 3):
                placed = jax.tree.map(lambda leaf, by=shift: np.roll(leaf, by, axis=0), there)
                made = split_contour.integrand_at(law, placed.contour, 384, 128)
                found = split_contour._Round(np.ones(5), known.estimate, placed, *made)
                answer = split_contour._certified(law, found, log_delta, log_delta, 384)
                lower, _, upper, ok, _ = map(np.asarray, answer)
                assert np.all(lower <= known.upper) and np.all(upper >= known.lower), (made_for, shift)
                certified += np.sum(ok)
    assert certified >= 5  # each law is certified on its own contour, and sometimes on another law's
