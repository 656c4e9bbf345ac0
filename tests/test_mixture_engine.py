"""The contour of compositions of Gaussian mixtures, held against quadrature, mpmath, other engines and theorems."""

import math
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest
from helpers import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import jaxacct as ja
from jaxacct.core.floats import ROUNDOFF
from jaxacct.engines.mixture import delta_of_step, one_delta, rows_of_branches
from jaxacct.kernels.contour.mixture import BranchLaw, Part, largest_modulus_gap, quadrature
from jaxacct.mechanisms.base import BaseMechanism, register
from jaxacct.mechanisms.gaussian_mixtures import OfGaussianMixtures, cells_below

SIDES = ("remove_one", "add_one")


def exact_m(shift, weight, power, t):
    """M on the line, int phi mix^(power + i t) du, by a fine sum with the digits of long doubles."""
    u, step = np.linspace(np.longdouble(-40), np.longdouble(60), 20_001, retstep=True)
    log_mix = np.log(sum(w * np.exp(s * u - s * s / 2) for s, w in zip(shift.astype(u.dtype), weight, strict=True)))
    total = np.sum(np.exp((power + 1j * np.longdouble(t)) * log_mix - u * u / 2)) * step
    return total / np.sqrt(8 * np.arctan(np.longdouble(1)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("shift", "weight"), [([0.0, 1.0, 2.0], [0.81, 0.18, 0.01]), ([0.5, 1.5], [0.25, 0.75])])
def test_moment_generating_function_lies_within_its_error(sign, shift, weight):
    c, t = 1.7, 6.0
    law = BranchLaw(np.array(shift), np.array(weight), sign)
    found = quadrature(law, c, t, -40.0)
    power, turn = (c + 1.0, t) if sign > 0 else (-c, -t)
    whole, at = (exact_m(np.array(shift), weight, power, turned) for turned in (0.0, turn))
    assert abs(found.log_m - np.log(whole.real)) <= found.log_m_error < 1e-12
    ratio = np.sum(found.p * np.exp(1j * t * sign * found.log_mix))
    error = found.from_step + min(found.by_size, t * found.by_length)
    assert abs(ratio - at / whole) <= 2.2 * error + found.log_m_error < 1e-11


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bound_of_the_modulus_holds_for_all_larger_t(sign):
    law = BranchLaw(np.array([0.0, 1.0, 3.0]), np.array([0.7, 0.2, 0.1]), sign)
    found = quadrature(law, 0.8, 60.0, -30.0)
    t = np.linspace(0.1, 60.0, 400)
    modulus = np.abs((found.p * np.exp(1j * t[:, None] * found.log_mix)).sum(axis=1))
    later = np.maximum.accumulate(modulus[::-1])[::-1]
    bound = 1.0 - largest_modulus_gap(found, t)
    assert np.all(later <= bound + 1e-12) and bound[-1] < 0.5


@pytest.mark.parametrize("relation", SIDES)
def test_one_step_agrees_with_quadrature(relation):
    shift, weight, sigma, eps = np.array([0.0, 1.0, 2.0]), np.array([0.6, 0.3, 0.1]), 1.3, 0.4
    u = np.linspace(-12, 14, 400_001)
    p, q = (weight[:, None] * norm.pdf(u - shift[:, None] / sigma)).sum(axis=0), norm.pdf(u)
    if relation == "add_one":
        p, q = q, p
    known = np.maximum(p - math.exp(eps) * q, 0.0).sum() * (u[1] - u[0])
    found = ja.delta(ja.MixtureOfGaussians(sigma, shift, weight), eps, relation=relation)
    assert found.estimate == pytest.approx(known, rel=1e-7) and found.kind == "certified"
    assert found.lower <= found.estimate <= found.upper <= found.lower * (1 + 1e-9)


@pytest.mark.parametrize("relation", SIDES)
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"), [(1.0, 0.01, 1000, 1e-5), (0.7, 0.2, 3, 1e-3), (5.0, 0.1, 10**6, 1e-9)]
)
def test_two_shifts_are_the_sampled_gaussian(relation, sigma, q, steps, delta):
    """Another contour answers `dp_sgd`. Its certificate shares nothing with that of the mixtures' contour."""
    mixture = ja.repeat(ja.MixtureOfGaussians(sigma, [0.0, 1.0], [1.0 - q, q]), steps)
    one, two = (ja.epsilon(m, delta, relation=relation) for m in (mixture, ja.dp_sgd(sigma, q, steps)))
    assert one.engine == "mixture_contour" and one.relative_width < 1e-6
    assert one.lower <= two.upper and two.lower <= one.upper


def test_lattice_agrees_and_is_asked_for_by_name():
    run = ja.dp_sgd(1.0, 0.05, 40, group=3)
    one, two = ja.epsilon(run, 1e-5), ja.epsilon(run, 1e-5, engine="lattice")
    assert (one.engine, two.engine, two.kind) == ("mixture_contour", "lattice", "certified")
    assert two.lower <= one.lower <= one.upper <= two.upper and two.relative_width < 1e-2


def test_gaussians_beside_mixtures():
    """A mixture of one shift is a Gaussian, so that the composition has a closed form."""
    run = ja.compose(ja.repeat(ja.MixtureOfGaussians(2.0, [1.0], [1.0]), 3), ja.Gaussian(4.0), ja.dp_sgd(5.0, 1.0, 2))
    both = ja.Gaussian(1.0 / math.sqrt(3 / 4 + 1 / 16 + 2 / 25))
    one, two = ja.epsilon(run, 1e-6), ja.epsilon(both, 1e-6)
    assert one.lower <= two.upper and two.lower <= one.upper and one.relative_width < 1e-7


def test_beside_other_noise_the_lattice_answers_from_two_pairs():
    found = ja.epsilon(
        ja.compose(ja.repeat(ja.SampledWithReplacement(ja.Gaussian(4.0), 10, 200), 5), ja.Laplace(3.0)), 1e-5
    )
    assert found.engine == "lattice" and found.kind == "certified" and 0.0 < found.lower < found.upper


@given(
    sigma=st.floats(0.4, 20.0), q=st.floats(1e-3, 0.9), steps=st.integers(1, 3000), group=st.integers(2, 6),
    log_delta=st.floats(-25.0, -2.0),
)  # fmt: skip
@settings(deadline=None, max_examples=4)
def test_epsilon_and_delta_are_inverse(sigma, q, steps, group, log_delta):
    run, delta = ja.dp_sgd(sigma, q, steps, group=group), math.exp(log_delta)
    found = ja.epsilon(run, delta)
    assert found.lower <= found.upper
    if found.lower > 0.0 and found.upper < 300.0:
        assert ja.delta(run, found.upper).lower <= delta
        assert ja.delta(run, found.lower * (1 - 1e-12)).upper >= delta


@pytest.mark.parametrize(("sigma", "q", "steps"), [
    (1e6, 0.1, 1), (1.0, 1e-12, 1), (1e6, 0.01, 10**9),
    pytest.param(0.02, 0.01, 1, marks=pytest.mark.slow), pytest.param(1e6, 0.1, 10**12, marks=pytest.mark.slow),
    pytest.param(0.02, 0.01, 7, marks=pytest.mark.slow), pytest.param(0.02, 0.01, 10**12, marks=pytest.mark.slow),
    pytest.param(1.0, 1e-12, 7, marks=pytest.mark.slow), pytest.param(1e6, 0.1, 7, marks=pytest.mark.slow),
    pytest.param(1.0, 1e-12, 10**12, marks=pytest.mark.slow),  # the lattice compiles
])  # fmt: skip
def test_extremes_hold_or_say_so(sigma, q, steps):
    """No end is NaN. A group's upper end is at least the lower end of one record, which other engines answer."""
    run, one = ja.dp_sgd(sigma, q, steps, group=3), ja.dp_sgd(sigma, q, steps)
    for ask, value in ((ja.epsilon, 1e-6), (ja.delta, 1.0)):
        found, least = ask(run, value), ask(one, value)
        assert found.lower <= found.estimate <= found.upper
        assert found.upper >= least.lower * (1 - 1e-9)
        assert found.ok or found.status == "width"


def test_delta_zero_is_refused_where_the_loss_is_unbounded():
    assert "delta = 0" in refusal(ja.epsilon, ja.dp_sgd(1.0, 0.1, 10, group=2), 0.0)


def test_batches_answer_row_by_row():
    run = ja.repeat(ja.PoissonSampled(ja.Gaussian([1.0, 2.0]), 0.05, group=2), [[10], [100]])
    found = ja.epsilon(run, 1e-5)
    assert found.shape == (2, 2)
    one = ja.epsilon(ja.dp_sgd(2.0, 0.05, 100, group=2), 1e-5)
    assert found.upper[1, 1] == one.upper and found.lower[1, 1] == one.lower


@pytest.mark.parametrize("sigma", [1e-200, 1e-100])
@pytest.mark.parametrize("relation", ["add_or_remove_one", "zero_out", "replace_one"])
def test_noise_too_small_for_float64_is_no_privacy(sigma, relation):
    """All losses are infinite. Delta is 1 even if the rounded-up chances of a step's two parts have a sum above 1."""
    step = ja.TruncatedPoissonSampled(ja.Gaussian(sigma), 0.1, 100, 12)
    assert ja.epsilon(step, 1e-5, relation=relation).upper > 1e100
    assert ja.delta(step, 1.0, relation=relation).upper == 1.0


def test_squares_of_shifts_beyond_float64_end_in_no_exception():
    for ask, value, least in ((ja.epsilon, 1e-5, 1e100), (ja.delta, 1.0, 0.4)):
        assert ask(ja.MixtureOfGaussians(1e-200, [0.0, 1.0], [0.6, 0.4]), value).upper >= least


def test_equal_shifts_are_one_contribution():
    """In the add direction the loss is at most -log 0.6. For a larger epsilon, delta is nearly 0."""
    row = rows_of_branches(ja.MixtureOfGaussians(1.0, [0.0, 0.0, 1.0], [0.3, 0.3, 0.4]), "add_one")[0]
    assert one_delta(row, -1.0, 0.5)[1] == pytest.approx(3.20747887e-07, rel=1e-8)
    assert one_delta(row, -1.0, 0.511)[2] < 1e-299


def test_many_gaussians_are_rounded_once():
    """Merging 2000 Gaussians one by one would put the shift off by 22 roundoffs, more than the engine allows for."""
    noise, count = 1.0254237288135593, 2000
    run = ja.compose(ja.MixtureOfGaussians(1e9, [0.0, 1.0], [0.5, 0.5]), *[ja.Gaussian(noise)] * count)
    ((_, mixture), (_, (branch,))) = rows_of_branches(run, "remove_one")[0]
    assert mixture[0].shifts[1] == 1e-9
    with mpmath.workdps(40):
        exact = mpmath.sqrt(count) / mpmath.mpf(noise)
        assert abs(branch.shifts[0] / exact - 1) <= 4 * ROUNDOFF


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_beyond_700_of_a_chance_left_out(steps):
    """In the add direction a step's loss is at most -log rare. Without the rare shift 0 it would be about 1250."""
    rare = 1e-306
    run = ja.repeat(ja.MixtureOfGaussians(0.02, [0.0, 1.0], [rare, 1.0]), steps)
    largest = -steps * math.log(rare)
    assert ja.delta(run, largest + 0.5, relation="add_one").lower == 0.0
    assert ja.epsilon(run, 0.1, relation="add_one").lower <= largest
    rarest = ja.repeat(ja.MixtureOfGaussians(0.02, [0.0, 1.0], [1e-320, 1.0]), steps)
    assert ja.epsilon(rarest, 0.1, relation="add_one").lower <= steps * 737.0


def test_losses_too_small_for_their_grid_leave_a_profile():
    step = ja.TruncatedPoissonSampled(ja.Gaussian(9.3), 1.2e-10, 14, 7)
    assert ja.delta(step, 0.0, relation="zero_out").upper < 1e-8


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_masses_that_underflow_make_no_losses(direction):
    """SciPy's ndtr is 0 below -37.68. In the last cell, u > 38.24, the mean of u exceeds 38.24 by less than .03."""
    shift = 1.2390848230492350
    loss = cells_below(np.array([shift]), np.ones(1), direction).loss
    assert 40.0 < loss.max() < shift * 38.3 - 0.5 * shift**2


def test_many_epsilons_share_contours_and_each_is_what_it_is_alone():
    run = ja.repeat(ja.PoissonSampled(ja.Gaussian(1.5), 0.05, group=3), 200)
    eps = np.array([2.0, 0.0, 0.7, 0.71, 5.0, 1.0])
    many = ja.delta(run, eps)
    alone = [ja.delta(run, one) for one in eps]
    assert (many.upper - many.lower <= 1e-5 * many.upper).all()
    for place, one in enumerate(alone):
        assert one.lower <= many.upper[place] and many.lower[place] <= one.upper
        assert many.upper[place] == pytest.approx(one.upper, rel=1e-5)


@register
@dataclass(frozen=True, eq=False)
class _Own(BaseMechanism, OfGaussianMixtures):
    """A user's mixture of Gaussians."""

    inner: Any

    def has_bracket(self):
        return True

    def attained(self, relation):
        return True

    def branches(self, relation):
        return self.inner.branches(relation)

    def part(self, rate, relation, direction):
        return self.inner.part(rate, relation, direction)


def test_a_users_mixture_is_sampled_as_a_mixture():
    known = ja.MixtureOfGaussians(1.0, [0.5, 1.0], [0.5, 0.5])
    own, other = (ja.delta(ja.PoissonSampled(each, 0.2), 0.5) for each in (_Own(known), known))
    assert (own.lower, own.upper, own.kind, own.engine) == (other.lower, other.upper, other.kind, other.engine)


@np.errstate(all="ignore")
def test_a_delta_of_0_is_shown_and_not_rounded():
    """The old code gave [0, 0] where eps is the last float below the largest loss, and where log mix is nearly flat."""
    rates = [*np.round(np.random.default_rng(5).uniform(1e-4, 0.9999, 12), 4), 0.9837]
    with mpmath.workdps(60):
        for rate in rates:
            first, second = mpmath.mpf(1.0 - rate), mpmath.mpf(rate)
            top = mpmath.log1p(second / first)
            eps = float(top) if mpmath.mpf(float(top)) < top else float(np.nextafter(float(top), 0.0))
            found = ja.delta(ja.MixtureOfGaussians(0.05, [0.0, 1.0], [1.0 - rate, rate]), eps, relation="add_one")
            odds = (mpmath.exp(-mpmath.mpf(eps)) * (first + second) - first) / second
            u, kept = mpmath.log(odds) / 20 + 10, first / (first + second)
            mass = kept * mpmath.ncdf(u) + (1 - kept) * mpmath.ncdf(u - 20)
            assert found.upper >= mpmath.ncdf(u) - mpmath.exp(mpmath.mpf(eps)) * mass, rate
        for sigma, rate in ((1e5, 1e-12), (1e10, 1e-10), (30.0, 1e-15)):
            law = ja.MixtureOfGaussians(sigma, [0.0, 1.0], [1.0 - rate, rate])
            least = rate * 0.39 / sigma  # delta(0) is rate (Phi(s/2) - Phi(-s/2)), with s = 1/sigma
            assert ja.delta(law, 0.0, relation="remove_one").upper >= least
            assert ja.epsilon(law, 0.1 * least, relation="remove_one").upper > 0.0


@pytest.mark.parametrize("rate", [1e-3, 1e-7, 1e-9, 7e-13, 1e-15, 1e-17])
def test_the_largest_loss_is_that_of_the_rate(rate):
    """The old code took it from the weight 1 - rate, which has lost the rate's digits: too small by up to 8e-4."""
    law = ja.MixtureOfGaussians(1.0, [0.0, 1.0], [1.0 - rate, rate])
    with mpmath.workdps(60):
        first, second = mpmath.mpf(1.0 - rate), mpmath.mpf(rate)
        far = (first + second * mpmath.exp(mpmath.mpf("-29.5"))) / (first + second)  # mix at the output -29
        assert ja.epsilon(law, 1e-250, relation="add_one").upper >= -mpmath.log(far)


@np.errstate(all="ignore")
def test_one_step_of_any_mixture_is_bracketed():
    """The exact delta is computed in extended precision, at eps that are losses of the step. No slack is allowed."""
    rng = np.random.default_rng(8)
    with mpmath.workdps(80):
        for _ in range(60):
            shift = np.unique(np.append(0.0, np.exp(rng.uniform(-7.0, 4.0, rng.integers(1, 4)))))
            weight = 10.0 ** -rng.uniform(0.0, 14.0, shift.size)
            weight[0] = 1.0
            weight /= weight.sum()
            sign = rng.choice([1.0, -1.0])
            s, total = [mpmath.mpf(x) for x in shift], sum(map(mpmath.mpf, weight))
            w = [mpmath.mpf(x) / total for x in weight]
            mix = lambda u, w=w, s=s: sum(a * mpmath.exp(b * u - b * b / 2) for a, b in zip(w, s, strict=True))
            u = rng.uniform(-30.0, 30.0) + (rng.choice(shift) if sign > 0 else 0.0)
            eps = max(sign * float(mpmath.log(mix(mpmath.mpf(u)))), 0.0)
            below, above = mpmath.mpf(-1e6), mpmath.mpf(1e6)  # bisect for the output whose loss is eps
            for _ in range(260):
                middle = (below + above) / 2
                below, above = (middle, above) if sign * mpmath.mpf(eps) > mpmath.log(mix(middle)) else (below, middle)
            of_p = sum(a * mpmath.ncdf(sign * (b - above)) for a, b in zip(w, s, strict=True))
            of_q, grown = mpmath.ncdf(-sign * above), mpmath.exp(mpmath.mpf(eps))
            exact = max(of_p - grown * of_q if sign > 0 else of_q - grown * of_p, 0)
            low, _, high = delta_of_step(Part(1.0, (1.0,), 0.0, (BranchLaw(shift, weight, sign),)), eps)
            assert low <= exact <= high, (shift, weight, sign, eps)


def test_a_delta_below_float64_is_not_0():
    """The old code gave [0, 0] at eps 38, and a false upper end of epsilon at delta = 1e-318."""
    law = ja.MixtureOfGaussians(1.0, [0.0, 1.0], [0.75, 0.25])
    for run, eps in ((law, 38.0), (law, 200.0), (ja.repeat(law, 2), 100.0), (ja.compose(law, ja.Gaussian(1.0)), 120.0)):
        for relation in ("add_or_remove_one", "remove_one"):
            found = ja.delta(run, eps, relation=relation)
            assert found.lower == 0.0 < found.upper <= 2e-305
    with mpmath.workdps(60):
        most = float(ja.epsilon(law, 1e-318).upper)
        if most < 1e4:
            u = mpmath.log((mpmath.exp(most) - 0.75) / 0.25) + 0.5
            mass = 0.75 * mpmath.ncdf(-u) + 0.25 * mpmath.ncdf(1 - u) - mpmath.exp(most) * mpmath.ncdf(-u)
            assert mass <= mpmath.mpf(1e-318)
    assert ja.delta(law, 1.0, relation="add_one").upper == 0.0  # the largest loss is log(4/3)
