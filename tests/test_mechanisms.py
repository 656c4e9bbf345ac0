"""Mechanisms as pytrees, and their components against direct enumeration of the pairs."""

import copy
import importlib
import itertools
import pickle
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from helpers import doctests_of, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

import jaxacct as ja
from jaxacct.mechanisms import (
    ApproximateDP,
    Composed,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomisedResponse,
    RandomizedResponse,
    batch_shape,
    components,
    compose,
    directions,
    dp_sgd,
    repeat,
)
from jaxacct.mechanisms.finite import FiniteMechanism, log_mixture

BOTH = "add_or_remove_one"
MODULES = [
    *(f"mechanisms.{name}" for name in ("base", "additive_noise", "finite", "combinators")),
    *("mechanisms.loss_components", "core.bounds", "core.validation"),
]

positive = st.floats(0.01, 100.0)
rates = st.floats(0.0, 1.0)
bases = st.one_of(
    positive.map(Gaussian),
    positive.map(Laplace),
    st.builds(RandomizedResponse, st.floats(0.01, 0.99), st.integers(2, 5)),
    positive.map(PureDP),
    st.builds(ApproximateDP, positive, st.floats(0.0, 0.5)),
)
steps = st.one_of(bases, st.builds(PoissonSampled, bases, rates))
mechanisms = st.recursive(
    steps,
    lambda inner: st.one_of(
        st.builds(repeat, inner, st.integers(1, 50)),
        st.lists(inner, min_size=1, max_size=3).map(lambda m: compose(*m)),
    ),
    max_leaves=4,
)


def hockey_stick(p, q, alpha):
    return sum(max(a - alpha * b, mpmath.mpf(0)) for a, b in zip(p, q, strict=True))


def finite_delta(parts, eps):
    """delta(eps) of a single finite part composed once: the sum over its atoms plus the mass at infinity."""
    loss, mass = parts.finite_loss[0, 0], parts.finite_mass[0, 0]
    with np.errstate(over="ignore"):
        return float(np.sum(mass * np.maximum(-np.expm1(eps - loss), 0.0)) + parts.delta_infinity[0])


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module):
    assert doctests_of(importlib.import_module(f"jaxacct.{module}")) > 0


# Pytrees


@given(mechanisms)
@settings(max_examples=50, deadline=None)
def test_pytree_round_trip(mechanism):
    leaves, structure = jax.tree_util.tree_flatten(mechanism)
    again = jax.tree_util.tree_unflatten(structure, leaves)
    assert again == mechanism and hash(again) == hash(mechanism) and type(again) is type(mechanism)
    assert pickle.loads(pickle.dumps(mechanism)) == mechanism
    placeholders = jax.tree_util.tree_unflatten(structure, [object()] * len(leaves))
    assert jax.tree_util.tree_structure(placeholders) == structure
    assert mechanism.validated() == mechanism


def test_a_mechanism_goes_through_a_compiled_program():
    rest = repeat(PoissonSampled(RandomizedResponse(0.7, 3), 0.1), 5)
    mechanism = compose(dp_sgd([0.8, 1.2], 0.01, 10), Laplace(2.0), ApproximateDP(0.5, 0.1), PureDP(1.0), rest)
    with jax.enable_x64():
        through = jax.jit(lambda m: m)(mechanism)
    assert type(through) is type(mechanism) and through.validated() == mechanism


def test_unflatten_does_not_validate_but_components_does():
    wrong = jax.tree_util.tree_map(lambda x: -x, dp_sgd([1.0, 2.0], 0.5, 3))
    assert wrong.steps == -3.0
    assert "= -1.0 must be" in refusal(components, jax.tree_util.tree_map(lambda x: -x, Gaussian(1.0)), BOTH, "add")
    assert "must be" in refusal(components, wrong, BOTH, "remove")
    empty = jax.tree_util.tree_map(lambda _: None, Gaussian(1.0))
    assert empty.noise_multiplier is None
    assert "noise_multiplier = None" in refusal(components, empty, BOTH, "remove")


def test_a_copy_whose_arrays_can_be_written_to_is_checked_again():
    for copied in (pickle.loads(pickle.dumps(dp_sgd([1.0, 2.0], 0.1, 3))), copy.deepcopy(dp_sgd([1.0, 2.0], 0.1, 3))):
        copied.mechanism.mechanism.noise_multiplier[1] = -1.0
        assert "noise_multiplier[1] = -1.0 must be" in refusal(components, copied, BOTH, "remove")
        assert "noise_multiplier[1] = -1.0 must be" in refusal(components, repeat(copied, 2), BOTH, "remove")


def test_vmap_and_jit_over_mechanisms():
    def kernel(mechanism):
        step = mechanism.mechanism
        return mechanism.steps * step.sampling_probability / step.mechanism.noise_multiplier

    batch = dp_sgd([0.5, 1.0, 2.0], [0.1, 0.2, 0.3], [10, 20, 30])
    expected = [2.0, 4.0, 4.5]
    np.testing.assert_allclose(jax.vmap(kernel)(batch), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(kernel))(batch), expected, rtol=1e-6)
    axes = jax.tree_util.tree_map(lambda x: 0 if np.ndim(x) else None, dp_sgd([0.5, 1.0], 0.1, 10))
    np.testing.assert_allclose(jax.vmap(kernel, in_axes=(axes,))(dp_sgd([0.5, 1.0], 0.1, 10)), [2.0, 1.0], rtol=1e-6)
    inside = jax.jit(lambda sigma: kernel(dp_sgd(sigma, 0.1, 10)))
    assert inside(0.5) == pytest.approx(2.0)
    gradient = jax.grad(kernel)(dp_sgd(0.5, 0.1, 10))
    assert gradient.mechanism.mechanism.noise_multiplier == pytest.approx(-4.0)


def test_tracers_still_have_shapes_to_broadcast():
    assert "do not broadcast" in refusal(jax.jit(lambda s: dp_sgd(s, [0.1, 0.2, 0.3], 1)), jnp.ones(2))


def test_fields_are_float64_and_frozen():
    source = np.array([1.0, 2.0])
    mechanism = Gaussian(source)
    source[0] = 5.0
    assert mechanism.noise_multiplier.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        mechanism.noise_multiplier[0] = 3.0
    with pytest.raises(AttributeError):
        mechanism.noise_multiplier = 3.0
    assert Gaussian([1.0]) != Gaussian(1.0) and Gaussian(1) == Gaussian(1.0) and Gaussian(1.0) != PureDP(1.0)
    assert RandomizedResponse(0.6) != RandomizedResponse(0.6, 3) and RandomisedResponse is RandomizedResponse


# Broadcasting


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_broadcasting_equals_one_configuration_at_a_time(data):
    shapes = data.draw(st.sampled_from([((), (), ()), ((3,), (), ()), ((2, 1), (3,), ()), ((1,), (2, 1), (3,))]))

    def draw(values, shape):
        size = int(np.prod(shape))
        return np.array(data.draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)

    sigma = draw(positive, shapes[0])
    q = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]), shapes[1])
    n = draw(st.integers(1, 1000), shapes[2])

    def build(s, r, t):
        extra = repeat(PoissonSampled(ApproximateDP(s, 0.1), r), t)
        return compose(dp_sgd(s, r, t), PoissonSampled(Laplace(s), r), extra, RandomizedResponse(0.7, 3))

    batch = build(sigma, q, n)
    shape = np.broadcast_shapes(*shapes)
    assert batch_shape(batch) == shape
    for direction in ("remove", "add"):
        whole = components(batch, BOTH, direction)
        for row, (s, r, t) in enumerate(zip(*(x.ravel() for x in np.broadcast_arrays(sigma, q, n)), strict=True)):
            single = components(build(s, r, t), BOTH, direction)
            one = whole.take(slice(row, row + 1))
            np.testing.assert_array_equal(one.mu2, single.mu2)
            np.testing.assert_array_equal(one.log_survival, single.log_survival)
            for field in ("gauss_n", "laplace_n", "finite_n"):
                counts, alone = getattr(one, field)[0], getattr(single, field)[0]
                np.testing.assert_array_equal(counts[counts > 0], alone[alone > 0])
            keep = one.finite_n[0] > 0
            width = single.finite_loss.shape[2]
            np.testing.assert_array_equal(one.finite_loss[0, keep][:, :width], single.finite_loss[0])
            np.testing.assert_array_equal(one.finite_mass[0, keep][:, :width], single.finite_mass[0])


def test_shapes_that_clash_are_named():
    message = refusal(dp_sgd, [1.0, 2.0], [0.1, 0.2, 0.3], 10)
    assert message.startswith("noise_multiplier of shape (2,) and sampling_probability of shape (3,) do not broadcast")
    assert "mechanisms[1].scale of shape (3,)" in refusal(compose, Gaussian([1.0, 2.0]), Laplace([1.0, 2.0, 3.0]))


def test_empty_batch():
    parts = components(compose(dp_sgd([], 0.1, 10), PureDP(1.0)), BOTH, "add")
    assert parts.sign.shape == (0,) and all(field.shape[0] == 0 for field in parts)


# Components


def test_gaussian_elements_by_rate():
    parts = components(dp_sgd(2.0, [0.0, 0.25, 1.0], 10), BOTH, "remove")
    assert parts.mu2.tolist() == [0.0, 0.0, 2.5]
    assert parts.gauss_n.tolist() == [[0.0], [10.0], [0.0]]
    assert parts.gauss_sigma.tolist() == [[1.0], [2.0], [1.0]] and parts.gauss_q.tolist() == [
        [0.5],
        [0.25],
        [0.5],
    ]
    assert parts.laplace_n.shape == (3, 0) and parts.finite_loss.shape[:2] == (3, 0)
    assert components(Gaussian([1.0, 2.0]), BOTH, "add").gauss_n.shape == (2, 0)
    for direction, sign in (("remove", 1.0), ("add", -1.0)):
        assert components(Gaussian(1.0), BOTH, direction).sign.tolist() == [sign]


def test_laplace_and_finite_at_rate_zero_are_absent():
    parts = components(compose(*(PoissonSampled(m, [0.0, 1.0]) for m in (Laplace(2.0), PureDP(1.0)))), BOTH, "add")
    assert parts.laplace_n.tolist() == [[0.0], [1.0]] and parts.laplace_q.tolist() == [[0.5], [1.0]]
    assert parts.finite_n.tolist() == [[0.0], [1.0]]
    gone = components(PoissonSampled(ApproximateDP(1.0, 0.1), 0.0), BOTH, "remove")
    assert gone.finite_n.shape == (1, 0) and gone.log_survival.tolist() == [0.0]


def test_all_fields_are_float64():
    mechanism = compose(dp_sgd(jnp.float32(1.5), 0.1, 3), Laplace(1), RandomizedResponse(0.6), ApproximateDP(1, 0))
    for field in components(mechanism, BOTH, "remove"):
        assert type(field) is np.ndarray and field.dtype == np.float64 and field.shape[0] == 1


def test_nested_repetition_and_composition_multiply_counts():
    inner = compose(repeat(Gaussian(2.0), 3), dp_sgd(1.0, 0.5, 4))
    parts = components(repeat(repeat(inner, 5), [1, 2]), BOTH, "remove")
    assert parts.mu2.tolist() == [3.75, 7.5] and parts.gauss_n.tolist() == [[20.0], [40.0]]


def test_equal_parts_are_merged():
    step = PoissonSampled(Gaussian([1.0, 2.0]), 0.1)
    parts = components(Composed((step,) * 7 + (repeat(step, 3), PureDP(1.0), PureDP(1.0))), BOTH, "remove")
    assert parts.gauss_n.tolist() == [[10.0], [10.0]] and parts.finite_n.tolist() == [[2.0], [2.0]]


def test_counts_never_wrap():
    exact = components(repeat(dp_sgd(1.0, 0.5, 2**52), 2), BOTH, "remove")
    assert exact.gauss_n[0, 0] == 2**53
    third = (2**53 + 1) // 3
    assert 3 * third == 2**53 + 1
    assert "must be <= 2**53" in refusal(components, repeat(dp_sgd(1.0, 0.5, third), 3), BOTH, "remove")
    too_many = repeat(dp_sgd(1.0, 0.5, [1, 2**50]), 2**10)
    assert refusal(components, too_many, BOTH, "add").startswith("total steps[1] = 1.15292e+18 must be <= 2**53")
    both = compose(dp_sgd(1.0, 0.5, 2**53), dp_sgd(1.0, 0.5, 1))
    assert "must be <= 2**53" in refusal(components, both, BOTH, "remove")


def test_sampling_a_sample_multiplies_rates():
    nested = PoissonSampled(PoissonSampled(Gaussian(1.0), [0.5, 1.0]), 0.25)
    assert components(nested, BOTH, "add").gauss_q.tolist() == [[0.125], [0.25]]
    tiny = PoissonSampled(PoissonSampled(Gaussian(1.0), 1e-200), 1e-200)
    assert "larger rates" in refusal(components, tiny, BOTH, "add")


def test_bad_structures_are_refused():
    assert "empty" in refusal(compose)
    assert "mechanisms[1]" in refusal(compose, Gaussian(1.0), 2.0)
    assert "compose(first, second)" in refusal(Composed, Gaussian(1.0))
    assert "steps = 1.5" in refusal(repeat, Gaussian(1.0), 1.5)
    for other in (3.0, None):
        assert refusal(PoissonSampled, other, 0.1).startswith(f"mechanism = {other} of type ")
    assert "is a class; use one such as Gaussian(noise_multiplier=1.0)" in refusal(PoissonSampled, Gaussian, 0.1)
    assert "not a mechanism" in refusal(components, 1.0, BOTH, "remove")
    assert "categories = 1" in refusal(RandomizedResponse, 0.5, 1)
    assert "relation = 'swap'" in refusal(components, Gaussian(1.0), "swap", "remove")
    assert "direction = 'both'" in refusal(components, Gaussian(1.0), BOTH, "both")


# Relations and directions


def test_directions():
    sampled, plain = (
        dp_sgd(1.0, [0.1, 1.0], 10),
        compose(Gaussian(1.0), Laplace(1.0), ApproximateDP(1.0, 0.1)),
    )
    assert directions(sampled, BOTH) == ("remove", "add")
    assert directions(plain, BOTH) == directions(dp_sgd(1.0, [0.0, 1.0], 10), BOTH) == ("remove",)
    assert directions(compose(plain, sampled), BOTH) == ("remove", "add")
    assert directions(sampled, "add_one") == ("add",) and directions(sampled, "remove_one") == ("remove",)
    assert directions(plain, "replace_one") == ("remove",)


@given(st.lists(bases, min_size=1, max_size=3).map(lambda m: compose(*m)))
@settings(max_examples=30, deadline=None)
def test_directions_of_unsampled_mechanisms_coincide(mechanism):
    remove, add = (components(mechanism, BOTH, direction) for direction in ("remove", "add"))
    for name in remove._fields:
        a, b = getattr(remove, name), getattr(add, name)
        if name in ("finite_loss", "finite_mass"):
            a, b = np.sort(a, -1), np.sort(b, -1)
        if name != "sign":
            np.testing.assert_array_equal(a, b)


def test_replace_one():
    parts = components(compose(Gaussian(2.0), Laplace(2.0), RandomizedResponse(0.7)), "replace_one", "remove")
    assert parts.mu2.tolist() == [1.0] and parts.laplace_scale.tolist() == [[1.0]]
    same = components(RandomizedResponse(0.7), BOTH, "remove")
    np.testing.assert_array_equal(parts.finite_loss, same.finite_loss)
    assert components(dp_sgd(1.0, 1.0, 5), "replace_one", "remove").mu2.tolist() == [20.0]
    assert dp_sgd(1.0, [1.0, 0.5], 5).kind_under("replace_one") == "bound"
    assert components(dp_sgd(1.0, [1.0, 0.5], 5), "replace_one", "remove").finite_n.tolist() == [[5.0], [5.0]]


# Finite parts against direct enumeration


@given(bases.filter(lambda m: hasattr(m, "pair")), rates, st.sampled_from(["remove", "add"]))
@settings(max_examples=80, deadline=None)
def test_finite_masses_sum_to_the_survival(base, q, direction):
    part = base.part(np.asarray(q), BOTH, direction)
    assert np.sum(part.mass) + part.infinity == pytest.approx(1.0, abs=4e-16)
    assert (part.mass >= 0).all() and np.isfinite(part.loss).all()
    # Q(dP > 0) = E_P[e^-L] never exceeds 1.
    assert np.sum(part.mass * np.exp(-part.loss)) <= 1 + 1e-13


@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.3, 2.0, 40.0])
@pytest.mark.parametrize("delta", [0.0, 1e-12, 1e-3, 0.4])
@pytest.mark.parametrize("q", [0.0, 1e-12, 1e-3, 0.5, 1 - 1e-12, 1.0])
def test_sampled_approximate_dp_against_hockey_stick_on_four_outcomes(epsilon, delta, q):
    mechanism = repeat(PoissonSampled(ApproximateDP(epsilon, delta), q), 1)
    with mpmath.workdps(60):
        e0, d0, rate = mpmath.mpf(epsilon), mpmath.mpf(delta), mpmath.mpf(q)
        likely = (1 - d0) / (1 + mpmath.exp(-e0))
        rare = (1 - d0) - likely
        p, base = [d0, likely, rare, mpmath.mpf(0)], [mpmath.mpf(0), rare, likely, d0]
        mixture = [(1 - rate) * b + rate * a for a, b in zip(p, base, strict=True)]
        for direction, (first, second) in {"remove": (mixture, base), "add": (base, mixture)}.items():
            parts = components(mechanism, BOTH, direction)
            if not parts.finite_n.size:
                assert q == 0.0 or (epsilon == 0.0 and (delta == 0.0 or (direction == "add" and q < 1.0)))
                continue
            for eps in (-1.0, 0.0, 1e-4, 0.2, 1.0, 10.0):
                truth = hockey_stick(first, second, mpmath.exp(mpmath.mpf(eps)))
                assert finite_delta(parts, eps) == pytest.approx(float(truth), rel=1e-11, abs=1e-16)


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("p", [1e-9, 0.2, 0.5, 0.5 + 1e-12, 0.9, 1 - 1e-9])
@pytest.mark.parametrize("q", [0.01, 0.6, 1.0])
def test_sampled_randomized_response_against_enumeration(k, p, q):
    with mpmath.workdps(60):
        truth, rate = mpmath.mpf(p), mpmath.mpf(q)
        other = (1 - truth) / (k - 1)
        first = [truth, other] + [other] * (k - 2)
        base = [other, truth] + [other] * (k - 2)
        mixture = [(1 - rate) * b + rate * a for a, b in zip(first, base, strict=True)]
        for direction, (one, two) in {"remove": (mixture, base), "add": (base, mixture)}.items():
            parts = components(PoissonSampled(RandomizedResponse(p, k), q), BOTH, direction)
            if not parts.finite_n.size:
                assert k == 2 and p == 0.5
                continue
            for eps in (0.0, 1e-3, 0.5, 5.0):
                expected = float(hockey_stick(one, two, mpmath.exp(mpmath.mpf(eps))))
                assert finite_delta(parts, eps) == pytest.approx(expected, rel=1e-10, abs=1e-15)


def test_log_mixture_is_relatively_accurate_everywhere():
    losses = [-2000.0, -745.0, -50.0, -1.0, -1e-3, -1e-12, 0.0, 1e-12, 1e-3, 1.0, 50.0, 699.0, 701.0, 2000.0]
    probabilities = [0.0, 1e-300, 1e-18, 1e-3, 0.3, 0.5, 0.7, 1 - 1e-3, 1 - 2**-53, 1.0]
    with mpmath.workdps(1000):
        for loss, q in itertools.product(losses, probabilities):
            exact = mpmath.log(1 - mpmath.mpf(q) + mpmath.mpf(q) * mpmath.exp(mpmath.mpf(loss)))
            value = float(log_mixture(np.asarray(loss), np.asarray(q)))
            assert abs(value - exact) <= 4e-16 * abs(exact) + 1e-300, (loss, q)


def test_delta_infinity_composes():
    parts = components(repeat(PoissonSampled(ApproximateDP(1.0, 1e-9), [0.5, 1.0]), 1000), BOTH, "remove")
    np.testing.assert_allclose(parts.delta_infinity, [-np.expm1(1000 * np.log1p(-q * 1e-9)) for q in (0.5, 1.0)])
    add = components(repeat(PoissonSampled(ApproximateDP(1.0, 1e-9), [0.5, 1.0]), 1000), BOTH, "add")
    np.testing.assert_allclose(add.delta_infinity, [0.0, -np.expm1(1000 * np.log1p(-1e-9))])


def test_extreme_parameters_stay_finite():
    mechanism = compose(PoissonSampled(PureDP(3000.0), 0.5), PureDP(3000.0), PoissonSampled(PureDP(3000.0), 1e-300))
    for direction in ("remove", "add"):
        parts = components(mechanism, BOTH, direction)
        assert np.isfinite(parts.finite_loss).all() and np.isfinite(parts.finite_mass).all()


def running_total(size):
    """A running total of many parts, one after the other."""
    run = Gaussian(900.0)
    for i in range(1, size):
        run = compose(run, Gaussian(900.0 + i))
    return run


def test_a_running_total_has_no_depth():
    run, laplace = running_total(1100), Laplace(50.0)
    flat = compose(*(Gaussian(900.0 + i) for i in range(1100)))
    assert run == flat and hash(run) == hash(flat) and repr(run) == repr(flat) and len(run.mechanisms) == 1100
    assert jax.tree.map(lambda x: x, run) == pickle.loads(pickle.dumps(run)) == copy.deepcopy(run) == run
    one, two = compose(run, laplace), compose(run, Gaussian(7.0))  # both grow from the same total
    assert one.mechanisms[-1] == laplace and two.mechanisms[-1] == Gaussian(7.0) and len(run.mechanisms) == 1100
    mu2 = sum((900.0 + i) ** -2 for i in range(1100))
    np.testing.assert_allclose(components(run, BOTH, "remove").mu2, mu2, rtol=1e-12)
    assert run.expression().startswith("ja.compose(ja.Gaussian(noise_multiplier=900.0), ja.Gau")


@pytest.fixture
def little_depth():
    """Fewer nested calls than usual, so that a nest of a few hundred is a deep one."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(220)
    yield
    sys.setrecursionlimit(usual)


def test_nests_of_repetitions_have_no_depth(little_depth):
    run = dp_sgd([0.8, 1.2], 0.01, 10)
    for _ in range(230):
        run = repeat(run, 1)
    assert run == dp_sgd([0.8, 1.2], 0.01, 10) and repeat(run, [2, 3]).steps.tolist() == [20.0, 30.0]
    for _ in range(230):
        run = compose(repeat(run, 1), Gaussian(30.0))
    assert run == compose(dp_sgd([0.8, 1.2], 0.01, 10), *[Gaussian(30.0)] * 230)
    assert batch_shape(run) == (2,)
    np.testing.assert_allclose(components(repeat(run, 2), BOTH, "add").mu2, 460 / 900, rtol=1e-12)
    inside = compose(Gaussian([1.0, 2.0]), Laplace(1.0))
    message = refusal(compose, inside, Gaussian([1.0, 2.0, 3.0]))
    assert "mechanisms[0].mechanisms[0].noise_multiplier" in message and "(3,)" in message


def brute_delta(eps, delta, steps, total):
    """Kairouz, Oh, Viswanath: steps with mass delta at infinity, the rest randomised response with e^eps."""
    p = 1 / (1 + np.exp(-eps))
    k = np.arange(steps + 1)
    loss = (2 * k - steps) * eps
    finite = np.sum(binom.pmf(k, steps, p) * np.maximum(-np.expm1(total - loss), 0))
    return 1 - (1 - delta) ** steps * (1 - finite)


@pytest.mark.parametrize("eps,delta,steps,total", [(0.1, 0.0, 30, 1e-5), (0.5, 1e-7, 10, 1e-4), (1.0, 1e-3, 3, 0.01)])
def test_compositions_of_a_guarantee_against_brute_force(eps, delta, steps, total):
    found = ja.epsilon(ja.repeat(ja.ApproximateDP(eps, delta), steps), total)
    assert brute_delta(eps, delta, steps, found.upper) <= total * (1 + 1e-9)
    assert brute_delta(eps, delta, steps, found.lower) >= total * (1 - 1e-9)
    advanced = eps * np.sqrt(2 * steps * np.log(1 / (total - steps * delta))) + steps * eps * np.tanh(eps / 2)
    assert found.lower <= min(advanced, steps * eps) * (1 + 1e-12)


def test_a_mechanism_that_says_nothing_of_its_pair_is_only_bounded():
    @dataclass(frozen=True, eq=False)
    class Newcomer(FiniteMechanism):
        def pair(self):
            return ja.PureDP(1.0).pair()

    one = Newcomer()
    assert one.kind_under("add_or_remove_one") == ja.PoissonSampled(one, 0.1).kind == ja.repeat(one, 3).kind == "bound"


@pytest.mark.filterwarnings("ignore:the lattice engine failed")
def test_noise_beyond_float64_is_no_privacy():
    """1/scale is infinite. The old code's finite pair lost all its masses, released nothing, and gave epsilon 0."""
    laplace, gauss = ja.Laplace(5e-324), ja.Gaussian([5e-324, 1.0])
    left_out = ja.SampledWithoutReplacement(laplace, 0.3)
    assert ja.epsilon(left_out, 1e-5, relation="replace_one").upper == np.inf
    assert ja.delta(left_out, 1.0, relation="replace_one").upper >= 0.3
    assert ja.delta(ja.PoissonSampled(laplace, 0.3), 1.0).upper >= 0.3
    found = ja.delta(ja.SampledWithReplacement(gauss, 4, 100), 1.0)
    assert found.upper[0] == 1.0 and 0.0043 < found.lower[1] <= found.upper[1] < 0.0044
