"""NumPy's and SciPy's functions keep to the model of kernels/arrays.py on this machine, in every layout."""

import os
import subprocess
import sys
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from elementary_points import arguments_of, exactly

import jaxacct as ja
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines import backend
from jaxacct.kernels import arrays, elementary_check, lattice_laws
from jaxacct.kernels.elementary_check import VALUES, units_of


def in_all_layouts(function, arguments):
    """Contiguous, spread and reversed arrays, and pieces of 1 to 70 elements wherever they begin."""
    yield function(*arguments)
    for stride in (2, 3, -1):
        spread = [np.zeros(x.size * abs(stride))[::stride] for x in arguments]
        for place, x in zip(spread, arguments, strict=True):
            place[:] = x
        yield function(*spread)
    ends = np.cumsum(np.resize(np.arange(1, 71), arguments[0].size))
    cuts = np.concatenate([[0], ends[ends < arguments[0].size], [arguments[0].size]])
    yield np.concatenate([function(*(x[a:b] for x in arguments)) for a, b in pairwise(cuts)])


def assert_within_units(name, size, seed):
    arguments = arguments_of(name, size, seed)
    high, low = exactly(name, arguments)
    normal = np.abs(high) >= arrays.SMALLEST_NORMAL
    with np.errstate(all="ignore"):
        allowed = units_of(name, arguments, high) * ROUNDOFF * np.abs(high)
        for value in in_all_layouts(VALUES[name][0], arguments):
            wrong = np.abs((value - high) - low)
            assert np.all(np.abs(value[~normal]) <= arrays.SMALLEST_NORMAL)
            worst = np.argmax(np.where(normal, wrong / allowed, 0.0))
            assert np.all((wrong <= allowed)[normal]), [float(x[worst]).hex() for x in arguments]


@pytest.mark.parametrize("name", VALUES)
def test_numpys_functions_keep_to_their_units(name):
    assert_within_units(name, 100, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_numpys_functions_keep_to_their_units_at_many_points(name):
    for seed in range(1, 4):
        assert_within_units(name, 40_000, seed)


@pytest.mark.slow
@pytest.mark.parametrize("without", ["X86_V4 AVX512_ICL AVX512_SPR", "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"])
def test_without_the_vector_units(without):
    """Another processor's loops; names of units that NumPy does not know here are ignored."""
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": without}
    script = "from jaxacct.kernels import elementary_check as e; assert e.failure(special=True) is None"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment, check=True)


@pytest.mark.parametrize("angle", [6381956970095103 * 2.0**797, 1126833495400.4492, 1e300, -1e22])
def test_angles_beyond_the_largest_are_off_by_units_of_one(angle):
    """The first two are nearly multiples of pi/2, and glibc's sine is then off by more than its own units."""
    with mpmath.workprec(1400):
        for ours, exact in ((np.sin, mpmath.sin), (np.cos, mpmath.cos)):
            wrong = abs(mpmath.mpf(float(ours(angle))) - exact(mpmath.mpf(angle)))
            assert wrong <= arrays.SIMPLE_UNITS * ROUNDOFF


def test_log_ndtr_is_as_near_as_it_says():
    x = np.concatenate([np.random.default_rng(0).uniform(-60.0, 9.0, 1000), [-36.0, -37.5, 0.0]])
    ours = arrays.log_ndtr(x)
    with mpmath.workprec(160):
        for at, value in zip(x, ours, strict=True):
            exact = mpmath.log(mpmath.erfc(-mpmath.mpf(float(at)) / mpmath.sqrt(2)) / 2)
            assert abs(mpmath.mpf(float(value)) - exact) <= (12.0 + 3.0 * at * at) * ROUNDOFF


@pytest.mark.parametrize("length", [2**12, 2**15])
def test_numpys_transform_is_as_near_as_the_composition_assumes(length):
    """Roots of unity, from an impulse; and transforms against those in extended precision, where NumPy has that."""
    relative = lattice_laws.FFT_CONSTANT * ROUNDOFF * np.log2(length)
    found = np.fft.rfft(np.eye(1, length, 1)[0])
    with mpmath.workprec(100):
        for k in range(0, length // 2 + 1, 7):
            root = mpmath.expjpi(-2 * mpmath.mpf(k) / length)
            assert abs(mpmath.mpc(complex(found[k])) - root) <= 8 * ROUNDOFF
    if np.finfo(np.longdouble).eps < 1e-18:
        rng = np.random.default_rng(0)
        for weight in (rng.random(length), np.exp(-rng.uniform(0.0, 300.0, length)), rng.normal(size=length)):
            exact = np.fft.rfft(weight.astype(np.longdouble))
            wrong = np.abs(np.fft.rfft(weight) - exact)
            assert wrong.max() <= relative * np.abs(weight).sum()
            assert np.linalg.norm(wrong.astype(float)) <= relative * np.linalg.norm(np.abs(exact).astype(float))
            back = np.abs(np.fft.irfft(exact.astype(complex), n=length) - np.fft.irfft(exact, n=length))
            assert np.linalg.norm(back.astype(float)) <= (relative + ROUNDOFF) * np.linalg.norm(weight)


@pytest.mark.parametrize("name", VALUES)
def test_the_table_is_rounded_correctly(name):
    *arguments, value = elementary_check._table()[name].T
    high, _ = exactly(name, arguments)
    assert value.size >= 45
    np.testing.assert_array_equal(value, high)


def test_this_machine_passes():
    assert elementary_check.failure() is None
    assert elementary_check.failure(special=True) is None


@pytest.mark.parametrize("name", VALUES)
def test_an_inaccurate_function_is_noticed(name):
    function, _ = VALUES[name]
    assert not elementary_check._is_inaccurate(name, function)
    for wrong in (lambda *x: function(*x) * (1.0 + 1e-13), lambda *x: function(*x) * np.nan):
        assert elementary_check._is_inaccurate(name, wrong)


def test_xla_answers_where_numpy_is_inaccurate(monkeypatch):
    wrong = "NumPy's exp is less accurate than certificates assume"
    assert backend.on_numpy(1)
    monkeypatch.setattr(elementary_check, "failure", lambda special=False: wrong)
    backend._holds.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="XLA answers instead of NumPy"):
            assert not backend.on_numpy(1)
        with pytest.raises(ja.InputError, match="cannot certify on this machine"):
            ja.epsilon(ja.dp_sgd(1.0, 0.01, 1000), 1e-5, backend="numpy")
    finally:
        backend._holds.cache_clear()


def test_a_kernel_that_calls_erfc_does_not_answer_where_it_is_inaccurate(monkeypatch):
    wrong = "NumPy's erfc is less accurate than certificates assume"
    monkeypatch.setattr(elementary_check, "failure", lambda special=False: wrong if special else None)
    with pytest.warns(UserWarning, match="erfc is less accurate"):
        few_hits = ja.epsilon(ja.dp_sgd(0.8, 0.001, 1000), 1e-5, relation="remove_one", rtol=1e-2)
    assert few_hits.engine != "contour" and few_hits.upper >= 0.30355393551
