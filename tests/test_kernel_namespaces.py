"""One source of the contour kernels on NumPy, on JAX with batch axes, and on JAX under vmap."""

import operator
from functools import partial

import jax
import numpy as np
import pytest

from jaxacct.kernels import calibration, law
from jaxacct.kernels.calibration import sensitivity
from jaxacct.kernels.contour import core, plain
from jaxacct.kernels.law import cumulants, saddle_point

ROWS = 12
POINTS, COUNT = 64, 32


def laws(gaussians: int, others: int) -> law.LossLaw:
    """Random laws of `gaussians` sampled Gaussians, `others` Laplace parts and `others` finite parts each."""
    rng = np.random.default_rng(gaussians + 10 * others)
    alone = 0.3 if gaussians == 0 else 0.0
    return law.LossLaw(
        rng.choice([-1.0, 1.0], ROWS),
        alone + rng.uniform(0.0, 0.1, ROWS),
        np.exp(rng.uniform(-0.5, 1.5, (ROWS, gaussians))),
        np.exp(rng.uniform(-4.0, -0.1, (ROWS, gaussians))),
        np.floor(np.exp(rng.uniform(0.0, 6.0, (ROWS, gaussians)))),
        np.exp(rng.uniform(-0.5, 3.0, (ROWS, others))),
        np.full((ROWS, others), 3.0),
        rng.normal(0.0, 1.0, (ROWS, others, 5)),
        rng.dirichlet(np.ones(5), (ROWS, others)),
        np.full((ROWS, others), 2.0),
    )


CASES = {"sampled": laws(1, 0), "two sampled": laws(2, 0), "mixed": laws(1, 1), "no sampled": laws(0, 1)}
RNG = np.random.default_rng(5)
EPSILON, LOG_DELTA = RNG.uniform(0.3, 4.0, ROWS), np.log(10.0) * RNG.uniform(-10.0, -2.0, ROWS)
LOG_TOL = np.full(ROWS, np.log(1e-8))


def on_numpy(kernel, *arguments):
    with np.errstate(all="ignore"):
        return [np.asarray(x) for x in jax.tree.leaves(kernel(*arguments))]


def on_jax(kernel, *arguments):
    """Return a kernel's result on JAX. Compiling without optimisation cuts the time to a third."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with jax.enable_x64():
        compiled = jax.jit(kernel).lower(*arguments).compile(compiler_options=options)
        return [np.asarray(x) for x in jax.tree.leaves(compiled(*arguments))]


def shapes_on_jax(kernel, *arguments):
    """What the kernel returns when JAX traces it and computes nothing."""
    with jax.enable_x64():
        return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(kernel, *arguments))]


COMPILED = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
"""If compiled, JAX's values are compared with NumPy's; if not, only JAX's shapes are."""
QUESTIONS = {
    "epsilon": (partial(plain.epsilon, points=POINTS, count=COUNT, rounds=2), (LOG_DELTA, LOG_DELTA, LOG_TOL)),
    "delta": (partial(plain.delta, points=POINTS, count=COUNT), (EPSILON, LOG_TOL)),
}


@pytest.mark.parametrize(
    ("question", "case", "under_vmap"),
    [("epsilon", "mixed", False), ("delta", "sampled", True)],
)
@pytest.mark.slow  # test_program_cache.py also compares NumPy and XLA on epsilon
def test_the_namespaces_agree(question, case, under_vmap):
    kernel, values = QUESTIONS[question]
    first = on_numpy(kernel, CASES[case], *values)
    other = on_jax(jax.vmap(kernel) if under_vmap else kernel, CASES[case], *values)
    narrow = first[3] & (first[2] - first[0] < 1e-5)
    assert narrow.sum() >= 2
    assert [x.shape for x in other] == [x.shape for x in first]
    assert (other[3] == first[3])[narrow].all()
    np.testing.assert_allclose(other[1][narrow], first[1][narrow], rtol=1e-9)
    for end in (0, 2):
        np.testing.assert_allclose(other[end][narrow], first[end][narrow], rtol=1e-9 + 1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_numpy_gives_the_same_bits_in_any_batch(case, question):
    kernel, values = QUESTIONS[question]
    whole = on_numpy(kernel, CASES[case], *values)
    for chunk in (1, 5):
        rows = [slice(start, start + chunk) for start in range(0, ROWS, chunk)]
        pieces = [on_numpy(kernel, *jax.tree.map(operator.itemgetter(some), (CASES[case], *values))) for some in rows]
        for one, columns in zip(whole, zip(*pieces, strict=True), strict=True):
            np.testing.assert_array_equal(one, np.concatenate(columns))


def test_sensitivity_is_a_difference():
    """Sensitivities equal central differences (fourth order) of the trapezoid sum, with the contour held fixed."""
    rng = np.random.default_rng(3)
    this, points, count = CASES["mixed"], 256, 64
    tangent = jax.tree.map(lambda x: 0.1 * x * rng.normal(0.0, 1.0, x.shape), this)._replace(sign=np.zeros(ROWS))
    found = on_numpy(partial(sensitivity, points=points, count=count), this, tangent, EPSILON, LOG_TOL)
    with np.errstate(all="ignore"):
        point = saddle_point(partial(cumulants, this, nodes=plain.axis_nodes(points)), "epsilon", EPSILON)
        c, period, *images = plain.place(this, point, EPSILON, LOG_TOL, plain.axis_nodes(points))

    def log_value(along, epsilon):
        moved = jax.tree.map(lambda x, dx: x + along * dx, this, tangent)
        at = plain.nodes_at(moved, c, 2.0 * np.pi / period, LOG_TOL, points, count, tuple(images))
        return at.k0 - at.c * epsilon + np.log(core.trapezoid(at, epsilon)[0])

    def slope(function, h):
        return (8.0 * (function(h) - function(-h)) - function(2.0 * h) + function(-2.0 * h)) / (12.0 * h)

    with np.errstate(all="ignore"):
        wanted = slope(lambda h: log_value(h, EPSILON), 1e-3)
        fall = slope(lambda h: log_value(0.0, EPSILON + h), 1e-3)
        value = log_value(0.0, EPSILON)
    fine = np.all(found[3] <= (points, count), axis=1)
    assert fine.sum() >= 2
    np.testing.assert_allclose(found[2][fine], value[fine], rtol=1e-12)
    scale = np.abs(wanted) + np.abs(found[1])
    assert np.max(np.abs(found[0] - wanted)[fine] / scale[fine]) < 1e-7
    np.testing.assert_allclose(found[1][fine], -fall[fine], rtol=1e-7)


@pytest.mark.parametrize("unknown", (0, 1, 2))
def test_calibration_slopes_are_differences(unknown):
    rng = np.random.default_rng(unknown)
    sign, c = rng.choice([-1.0, 1.0], ROWS), np.exp(rng.uniform(-1.0, 2.0, ROWS))
    x = np.stack([rng.uniform(-0.5, 1.0, ROWS), rng.uniform(-5.0, -1.0, ROWS), rng.uniform(0.0, 7.0, ROWS)])
    direction = np.eye(3)[unknown]
    with np.errstate(all="ignore"):
        found = calibration.saddle_slopes(calibration.single(sign, *x), np.broadcast_to(direction, (ROWS, 3)), c, 64)

    def value(step):
        return law.cumulants(calibration.single(sign, *(x + step * direction[:, None])), c, 64)

    with np.errstate(all="ignore"):
        exact, moved = value(0.0), [value(step) for step in (1e-3, -1e-3, 2e-3, -2e-3)]
    slopes = [(8.0 * (a - b) - (more - less)) / 12e-3 for a, b, more, less in zip(*moved, strict=True)]
    for one, other in zip(found, [*exact, *slopes], strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)


@COMPILED
def test_the_best_eps_of_a_rate_is_the_same_in_both_namespaces_and_balances_the_rates(compiled):
    rng = np.random.default_rng(3)
    log_q, log_n = rng.uniform(-4.0, -3.0, ROWS), np.log(np.full(ROWS, 2000.0))
    goal, fpr = rng.uniform(0.1, 0.4, ROWS), rng.uniform(0.01, 0.05, ROWS)
    arguments = np.ones(ROWS), log_q, log_n, np.zeros(ROWS), np.full(ROWS, 2.0), np.log(goal), np.log(fpr)
    tolerance, static = np.full(ROWS, np.log(1e-7)), {"points": 192, "count": 64}
    with np.errstate(all="ignore"):
        found = calibration.solve_rate(*arguments, tolerance, **static, steps=4)
    kernel = partial(calibration.solve_rate, **static, steps=4)
    if compiled:
        other = on_jax(kernel, *arguments, tolerance)
        for one, two in zip(found[:2], other[:2], strict=True):  # not `need`, which is rounded up coarsely
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)
    else:
        assert shapes_on_jax(kernel, *arguments, tolerance) == [(x.shape, x.dtype) for x in found]
    eps, x, moved, off, slope, need = found
    assert np.all(moved < 1e-3) and np.all(np.abs(off) < 1e-4) and np.all(slope < 0.0) and np.all(need <= 64)
    one = np.ones(ROWS)
    with np.errstate(all="ignore"):
        at = calibration.single(one, x, log_q, log_n)
        values = [plain.delta(at, eps + shift, tolerance, **static).estimate for shift in (-1e-3, 0.0, 1e-3)]
    rates = [np.exp(value) + np.exp(eps + shift) * fpr for value, shift in zip(values, (-1e-3, 0.0, 1e-3), strict=True)]
    np.testing.assert_allclose(rates[1], goal, rtol=2e-3)  # x is the noise solved for at this eps
    assert np.all(rates[1] <= np.minimum(rates[0], rates[2]) * (1.0 + 1e-5))


@COMPILED
def test_deltas_on_one_contour_are_those_of_single_contours_in_both_namespaces(compiled):
    one, sigma = np.ones(ROWS), np.random.default_rng(5).uniform(0.8, 1.2, ROWS)
    arguments = one, np.log(sigma), np.log(0.02 * one), np.log(2000.0 * one)
    around, static = np.array([0.8, 1.0, 1.3]) * one[:, None], {"points": 64, "count": 32}
    tolerance = np.log(1e-7) * one

    def kernel(*arrays):
        return plain.delta_about(calibration.single(*arrays[:4]), *arrays[4:], **static)

    with np.errstate(all="ignore"):
        found = kernel(*arguments, one, around, tolerance)
        single = [plain.delta(calibration.single(*arguments), eps, tolerance, **static) for eps in around.T]
    arguments = (*arguments, one, around, tolerance)
    if compiled:
        np.testing.assert_allclose(found.estimate, on_jax(jax.vmap(kernel), *arguments)[1], rtol=1e-9)
    for column, alone in enumerate(single):
        good = found.ok[:, column] & alone.ok
        assert good.sum() >= ROWS // 2
        assert np.all((found.lower[:, column] <= alone.upper)[good] & (alone.lower <= found.upper[:, column])[good])
