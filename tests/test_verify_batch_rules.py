"""ja.verify of the batch rules against roots, quadrature, Monte Carlo and the reference values."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import batch_rules_oracles as oracles
import pytest
from mpmath import mp

import jaxacct as ja
from jaxacct.mechanisms.random_allocation import RandomAllocation

flint = pytest.importorskip("flint")

from jaxacct.verification import delta_enclosure  # noqa: E402
from jaxacct.verification.ball_arithmetic import Unplanned, ball, outward, precision  # noqa: E402
from jaxacct.verification.loss_definition import expand  # noqa: E402
from jaxacct.verification.random_allocation import AllocationLoss  # noqa: E402

NOTHING = {mp.mpf(0): mp.mpf(1)}


def enclosed(mechanism, direction, epsilon, near, relation="add_or_remove_one", level=1):
    """Ends of the enclosure of delta(epsilon) in one direction, as fine as a comparison with `near` asks for."""
    build = lambda: expand(mechanism, relation, direction)
    return outward(delta_enclosure.enclose(build, epsilon, math.log(near) - 3.0, level))


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    """Oracles compute in 25 digits, which are enough for `holds`."""
    monkeypatch.setattr(oracles, "DIGITS", 25)


def holds(ends, value, share=1e-8):
    """Whether the enclosure is narrow and holds the value, whose relative error is at most `share`."""
    low, high = ends
    value = float(value)
    return low <= value * (1 + share) and high >= value * (1 - share) and high - low <= 1e-6 * value


def allocated(sigma, slots, direction, epsilon, near):
    with precision(128):
        return outward(AllocationLoss(ball(sigma), slots, direction).one_round(ball(epsilon), math.log(near) - 20.0))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("slots", "sigma", "epsilon"), [(2, 1.0, 1.0), (2, 30.0, 0.1), (3, 2.0, 0.5), (2, 100.0, 0.0)])
def test_few_slots_by_nested_sums(slots, sigma, epsilon, direction):
    found = oracles.allocation_nested(slots, sigma, epsilon, direction)
    assert holds(allocated(sigma, slots, direction, epsilon, found), found, 1e-7)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_many_slots_by_sampling(direction):
    low, high = oracles.allocation_by_sampling(40, 1.0, 0.3, direction, 40_000)
    ends = allocated(1.0, 40, direction, 0.3, high)
    assert low <= ends[1] and ends[0] <= high


@pytest.mark.parametrize(
    ("slots", "sigma", "remove", "add", "delta"),
    [
        (100, 1.0, 0.6209396716, 0.4219534733, 1e-5),
        (100, 2.0, 0.1731916553, 0.1701418063, 1e-5),
        (2, 2.0, 1.461945332, 1.380546813, 1e-5),
    ],
)
def test_allocation_at_reference_values(slots, sigma, remove, add, delta):
    """Another contour gave the epsilons, in 48 digits; their ten digits here give delta to about seven."""
    for direction, epsilon in (("remove", remove), ("add", add)):
        low, high = allocated(sigma, slots, direction, epsilon, delta)
        assert math.isclose(low, delta, rel_tol=1e-6) and math.isclose(high, delta, rel_tol=1e-6)


def test_a_sum_that_is_too_long_says_so():
    with precision(128), pytest.raises(Unplanned, match="too long"):
        AllocationLoss(ball(0.02), 3, "remove").one_round(ball(100.0), math.log(1e-9))


def test_a_bracket_of_random_allocation_is_verified_and_a_wrong_one_refuted():
    step = RandomAllocation(ja.Gaussian(2.0), slots=100)
    for lower, upper, relation, status in (
        (0.17320, 1.0, "remove_one", "refuted"),
        (0.17014, 0.17015, "add_one", "verified"),
    ):
        claim = SimpleNamespace(lower=lower, upper=upper)
        assert ja.verify(step, claim, delta=1e-5, relation=relation).status == status


def test_what_is_not_covered_is_undecided_with_its_reason():
    wide = SimpleNamespace(lower=0.1, upper=5.0)
    one = RandomAllocation(ja.Gaussian(1.0), slots=10)
    several = ja.verify(ja.repeat(one, 3), wide, delta=1e-5)
    assert several.status == "undecided" and "several rounds of RandomAllocation" in several.explanation
    replaced = ja.verify(one, wide, delta=1e-5, relation="replace_one")
    assert replaced.status == "undecided" and "replace_one" in replaced.explanation
    capped = ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.5, 6, 3), 2)
    removed = ja.verify(capped, wide, delta=1e-5, relation="zero_out")
    assert removed.status == "undecided" and "zero_out where a record displaces others" in removed.explanation
    twice = ja.verify(RandomAllocation(ja.Gaussian(1.0), slots=10, participations=2), wide, delta=1e-5)
    assert twice.status == "undecided" and "several slots" in twice.explanation


def test_one_slot_is_the_gaussian():
    step = RandomAllocation(ja.Gaussian(1.0), slots=1)
    assert ja.verify(step, ja.epsilon(ja.Gaussian(1.0), 1e-5), delta=1e-5).status == "verified"


MIXTURES = {
    "group": (ja.PoissonSampled(ja.Gaussian(1.2), 0.2, group=3), (1, oracles.binomial_law(3, 0.2), 1.2)),
    "large group": (ja.PoissonSampled(ja.Gaussian(50.0), 0.9, group=100), (1, oracles.binomial_law(100, 0.9), 50.0)),
    "without replacement": (
        ja.SampledWithoutReplacement(ja.Gaussian(3.0), 0.5, group=2, dataset_size=10),
        (2, oracles.hypergeometric_law(10, 2, 5), 3.0),
    ),
    "with replacement": (
        ja.SampledWithReplacement(ja.Gaussian(2.0), 10, 64),
        (2, oracles.binomial_law(10, 1 / 64), 2.0),
    ),
}


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("name", MIXTURES)
def test_one_step_of_a_mixture_by_its_root(name, direction):
    mechanism, law = MIXTURES[name]
    pair = oracles.mixture(*law), NOTHING
    found = oracles.hockey_stick(*(pair if direction == "remove" else pair[::-1]), mp.exp(mp.mpf(0.125)))
    assert holds(enclosed(mechanism, direction, 0.125, float(found)), found)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_two_steps_of_a_group_by_quadrature(direction):
    mechanism, law = MIXTURES["group"]
    pair = oracles.mixture(*law), NOTHING
    found = oracles.two_steps(*(pair if direction == "remove" else pair[::-1]), mp.e, step=0.1)
    assert holds(enclosed(ja.repeat(mechanism, 2), direction, 1.0, float(found)), found, 1e-6)


@pytest.mark.parametrize("relation", ["add_remove", "zero_out"])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_step_with_a_cap(relation, direction):
    mechanism = ja.TruncatedPoissonSampled(ja.Gaussian(1.0), 0.5, 6, 3)
    found = oracles.truncated_bound(6, 0.5, 3, 1.0, 0.25, relation, direction)
    asked = "zero_out" if relation == "zero_out" else "add_or_remove_one"
    assert holds(enclosed(mechanism, direction, 0.25, float(found), asked), found)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_zero_out_without_replacement(direction):
    mechanism = ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.25)
    pair = oracles.zero_out_pair(0.25, 1.0, direction == "remove")
    found = oracles.hockey_stick(*(pair if direction == "remove" else pair[::-1]), mp.exp(mp.mpf(0.25)))
    assert holds(enclosed(mechanism, direction, 0.25, float(found), "zero_out"), found)


@pytest.mark.parametrize(
    ("mechanism", "remove", "add", "delta"),
    [
        (ja.dp_sgd(2.0, 0.01, 10_000, group=5), 15.8606694, 15.2168673, 1e-6),
        (ja.dp_sgd(3.0, 0.2, 50, group=4), None, None, 1e-5),
        (ja.repeat(ja.TruncatedPoissonSampled(ja.Gaussian(2.0), 0.05, 1000, 60), 1000), 4.68408149, 3.86727508, 1e-5),
    ],
)
def test_many_steps_at_reference_values(mechanism, remove, add, delta):
    """A damped inversion in float64 gave the epsilons, to nine digits."""
    if remove is None:
        rows = csv.DictReader((Path(__file__).parent / "data" / "groups.csv").open())
        (row,) = [r for r in rows if r["noise_multiplier"] == "3" and r["group"] == "4"]
        remove, add = float(row["epsilon_remove"]), float(row["epsilon_add"])
    for direction, epsilon in (("remove", remove), ("add", add)):
        low, high = enclosed(mechanism, direction, epsilon, delta, level=0)
        assert low <= delta * (1 + 1e-6) and high >= delta * (1 - 1e-6) and high - low < 1e-3 * delta


def test_a_batch_smaller_than_the_group():
    step = ja.SampledWithoutReplacement(ja.Gaussian(1.0), 0.05, group=3, dataset_size=20)
    pair = oracles.mixture(2, oracles.hypergeometric_law(20, 3, 1), 1.0), NOTHING
    found = oracles.hockey_stick(*pair, mp.e)
    assert holds(enclosed(step, "remove", 1.0, float(found)), found)


def test_a_group_without_replacement_is_not_verified_by_the_pair_of_one_record():
    alone = ja.epsilon(ja.SampledWithoutReplacement(ja.Gaussian(3.0), 0.5), 1e-5)
    group = ja.SampledWithoutReplacement(ja.Gaussian(3.0), 0.5, group=2, dataset_size=10)
    assert ja.verify(group, alone, delta=1e-5).status == "refuted"


@pytest.mark.parametrize(("n", "q", "cap"), [(200, 1 - 1e-12, 131), (200, 0.99, 1), (10_000, 0.1, 100)])
def test_a_cap_far_below_the_mean_is_not_free(n, q, cap):
    """The old code gave epsilon = 0 if a binomial term exceeds the term at the cap by a factor of 1e308."""
    step = ja.TruncatedPoissonSampled(ja.Gaussian(0.5), q, n, cap)
    found = ja.delta(step, 0.0, relation="remove_one")
    # with probability 1 - 1e-300 the others fill the batch, and the record is in it with probability cap/n
    least = float(cap / n * (mp.ncdf(2) - mp.ncdf(-2)))
    assert found.upper >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("sigma", "draws", "n", "steps", "delta"),
    [(0.5, 1, 100, 1e9, 1e-3), (5.0, 1, 100, 1e8, 1e-5), (20.0, 2, 10_000, 1e9, 1e-12)],
)
def test_brackets_of_very_many_steps_are_not_refuted(sigma, draws, n, steps, delta):
    """The old code did not count all rounding of a billion steps: delta at the upper end was 3e-8 too large."""
    mechanism = ja.repeat(ja.SampledWithReplacement(ja.Gaussian(sigma), draws, n), steps)
    found = ja.epsilon(mechanism, delta, relation="add_one")
    assert ja.verify(mechanism, found, delta=delta, relation="add_one").status != "refuted"
