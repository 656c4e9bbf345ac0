"""The split contour's kernels give the same answers on NumPy, on jax.numpy and under vmap, in batches of any size."""

import functools

import jax
import numpy as np
import pytest

from jaxacct.kernels import calibration
from jaxacct.kernels.contour import split
from jaxacct.kernels.contour.split import Start
from jaxacct.kernels.law import LossLaw

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options that compile without optimisation, which takes a third of the time."""
RUNG = {"points": 384, "count": 128}
LOG_TOL = np.log(1e-7)


def laws():
    """Two sampled Gaussians, the second absent at times, in both directions; (law, log delta, epsilon near it)."""
    cases = [
        # sign, mu2, sigmas, rates, steps, log10 delta, epsilon
        (1.0, 0.0, (1.0, 1.0), (1e-3, 0.5), (100.0, 0.0), -5.0, 0.055),
        (1.0, 0.0, (0.5, 2.0), (1e-4, 1e-3), (1000.0, 50.0), -6.0, 1.17),
        (1.0, 0.01, (0.8, 1.0), (1e-6, 0.5), (1000.0, 0.0), -28.0, 1.3),
        (1.0, 0.0, (2.0, 1.0), (0.02, 0.5), (3000.0, 0.0), -8.0, 3.0),
        (-1.0, 0.0, (0.9, 4.0), (0.01, 0.2), (500.0, 20.0), -6.0, 1.0),
    ]
    sign, mu2, sigma, q, n, exponent, epsilon = (np.array(x) for x in zip(*cases, strict=True))
    size = sign.size
    none = [np.zeros((size, *shape)) for shape in ((0,), (0,), (0, 1), (0, 1), (0,))]
    return LossLaw(sign, mu2, sigma, q, n, *none), exponent * np.log(10.0), epsilon


def kernels():
    """(name, kernel, its arguments) for every kernel that the engine calls."""
    law, log_delta, epsilon = laws()
    log_tol, none = np.full(epsilon.size, LOG_TOL), np.zeros(epsilon.size)
    known_to = np.where(np.arange(epsilon.size) % 2 == 0, np.inf, 0.0)  # solution known (one round) or not (two)
    start = Start(epsilon, known_to)
    about = epsilon[:, None] * np.array([0.9, 1.0, 1.1])
    base = np.stack([none, np.log(law.gauss_q[:, 0]), np.log(law.gauss_n[:, 0])], axis=-1)
    unknown = np.tile([1.0, 0.0, 0.0], (epsilon.size, 1))
    unsolved = (law.sign, base, unknown, np.log(law.gauss_sigma[:, 0]), 2.0 * log_delta, epsilon, log_delta, log_tol)
    return [
        ("epsilon", functools.partial(split.epsilon, rounds=2), (law, log_delta, log_delta, start, log_tol)),
        ("delta", functools.partial(split.delta, rounds=2), (law, epsilon, Start(none, none), log_tol)),
        ("about", functools.partial(split.delta_about, rounds=2), (law, epsilon, about, Start(none, none), log_tol)),
        ("solve", calibration.solve_split, unsolved),
    ]


def on_numpy(kernel, arguments):
    with np.errstate(all="ignore"):
        return jax.tree.leaves(kernel(*arguments, **RUNG))


def compiled(function, arguments):
    with jax.enable_x64():
        program = jax.jit(function).lower(*arguments).compile(compiler_options=QUICK)
        return [np.asarray(x) for x in jax.tree.leaves(program(*arguments))]


@pytest.mark.parametrize("case", kernels(), ids=lambda case: case[0])
def test_the_bits_do_not_depend_on_the_batch(case):
    _, kernel, arguments = case
    whole = on_numpy(kernel, arguments)
    assert all(isinstance(x, np.ndarray) for x in whole)
    starts = range(0, whole[0].shape[0], 2)
    pieces = [on_numpy(kernel, jax.tree.map(lambda x, i=i: x[i : i + 2], arguments)) for i in starts]
    for all_at_once, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), all_at_once)
    # the bits do not depend on whether there is a batch axis, either
    for all_at_once, alone in zip(whole, on_numpy(kernel, jax.tree.map(lambda x: x[1], arguments)), strict=True):
        np.testing.assert_array_equal(alone, all_at_once[1])


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c[0]) for c in kernels()],
)
@pytest.mark.parametrize("under_vmap", [False, True], ids=["as it is", "vmap"])
@pytest.mark.slow
def test_numpy_and_jax_agree(case, under_vmap):
    name, kernel, arguments = case
    expected = on_numpy(kernel, arguments)
    call = functools.partial(kernel, **RUNG)
    found = compiled(jax.vmap(call) if under_vmap else call, arguments)
    for one, other in zip(expected, found, strict=True):
        if one.dtype == bool:
            np.testing.assert_array_equal(other, one)
        else:  # residuals and steps of the solve are small differences
            atol = 1e-9 if name == "solve" else 1e-11
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=atol)
    if name != "solve":
        assert expected[3].sum() >= 3  # most are certified


def test_a_value_that_is_known_takes_one_round():
    law, log_delta, epsilon = laws()
    log_tol, trusted = np.full(epsilon.size, LOG_TOL), Start(epsilon, np.full(epsilon.size, np.inf))
    arguments = (law, log_delta, log_delta, trusted, log_tol)
    once, twice = (on_numpy(functools.partial(split.epsilon, rounds=n), arguments) for n in (1, 2))
    for one, other in zip(once, twice, strict=True):
        np.testing.assert_array_equal(one, other)
