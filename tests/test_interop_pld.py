"""Export to dp_accounting's PrivacyLossDistribution: the pessimistic one from above, the optimistic one from below."""

import doctest

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from helpers import refusal

import jaxacct as ja
from jaxacct import interop
from jaxacct.interop import dp_accounting_pld
from jaxacct.mechanisms import FiniteOutput, PoissonSampled, SampledWithoutReplacement

ROUNDING = 1e-9
"""Relative error of dp_accounting's deltas: its convolutions round, and it cuts tails of 1e-15."""

CASES = {
    "gaussian": (ja.Gaussian(2.0), "add_or_remove_one"),
    "replaced": (ja.Laplace(3.0), "replace_one"),
    "sampled": (PoissonSampled(ja.Gaussian(1.0), 0.1), "add_or_remove_one"),
    "zeroed": (PoissonSampled(ja.Laplace(1.0), 0.3), "zero_out"),
    "finite": (FiniteOutput([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]), "add_or_remove_one"),
    "with an infinite loss": (FiniteOutput([0.9, 0.1, 0.0], [0.8, 0.0, 0.2]), "add_or_remove_one"),
    "sampled finite": (PoissonSampled(ja.RandomizedResponse(0.75), 0.2), "add_or_remove_one"),
    "repeated": (ja.repeat(ja.RandomizedResponse(0.6, 3), 5), "replace_one"),
    "composed": (ja.compose(ja.Gaussian(3.0), ja.PureDP(0.25), ja.Gaussian(4.0)), "add_or_remove_one"),
    "nothing": (PoissonSampled(ja.Gaussian(1.0), 0.0), "add_or_remove_one"),
}


def test_doctests():
    result = doctest.testmod(dp_accounting_pld)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("case", CASES)
def test_both_estimates_against_the_bracket(case):
    mechanism, relation = CASES[case]
    at = np.array([0.0, 0.1, 0.5])
    ours = ja.delta(mechanism, at, relation=relation)
    low, high = (
        np.array([law.get_delta_for_epsilon(eps) for eps in at])
        for law in (
            interop.to_dp_accounting_pld(
                mechanism, relation, value_discretization_interval=1e-3, pessimistic=pessimistic
            )
            for pessimistic in (False, True)
        )
    )
    assert np.all(ours.lower <= high * (1 + ROUNDING) + 1e-14) and np.all(low <= ours.upper * (1 + ROUNDING) + 1e-14)
    assert np.all(low <= high) and np.all(high - low <= 0.02 * np.abs(ours.upper) + 2e-3)


def test_it_composes_with_laws_of_dp_accounting():
    law = interop.to_dp_accounting_pld(FiniteOutput([0.6, 0.4], [0.4, 0.6]), value_discretization_interval=1e-3)
    both = law.compose(
        privacy_loss_distribution.from_gaussian_mechanism(2.0, value_discretization_interval=1e-3)
    ).get_delta_for_epsilon(0.5)
    ours = ja.delta(ja.compose(FiniteOutput([0.6, 0.4], [0.4, 0.6]), ja.Gaussian(2.0)), 0.5)
    assert ours.lower <= both <= 1.02 * ours.upper


def test_of_a_bound_only_the_pessimistic_one():
    chosen = SampledWithoutReplacement(ja.RandomizedResponse(0.75), 0.1)
    several = ja.repeat(chosen, 3)
    law = interop.to_dp_accounting_pld(several, "replace_one", value_discretization_interval=1e-3)
    assert law.get_delta_for_epsilon(0.2) >= ja.delta(several, 0.2, relation="replace_one").lower
    assert "from above only" in refusal(interop.to_dp_accounting_pld, several, "replace_one", pessimistic=False)


def test_what_is_refused():
    export = interop.to_dp_accounting_pld
    assert "batch of shape (2,)" in refusal(export, ja.Gaussian([1.0, 2.0]))
    assert "relation = 'add_one' is not known" in refusal(export, ja.Gaussian(1.0), "add_one")
    assert "must be True or False" in refusal(export, ja.Gaussian(1.0), pessimistic=1)
    assert "must be > 0" in refusal(export, ja.Gaussian(1.0), value_discretization_interval=0.0)
    assert "too short" in refusal(export, ja.PureDP(100.0), value_discretization_interval=1e-6)


def test_a_distribution_that_is_composed_further_covers_every_order_of_a_replaced_record():
    """One order for the whole gave .40003 for .48, and .23360 for .31944, where each order follows from the outputs."""
    step, response = ja.FiniteOutput([0.5, 0.5], [0.9, 0.1]), ja.RandomizedResponse(0.6)
    law, other = (ja.interop.to_dp_accounting_pld(each, "replace_one") for each in (step, response))
    alone = float(ja.delta(step, 0.3, relation="replace_one").upper)
    assert alone <= law.get_delta_for_epsilon(0.3) * (1.0 + 1e-9) <= 1.001 * alone
    assert law.compose(other).get_delta_for_epsilon(0.0) >= 0.48 * (1.0 - 1e-9)
    assert law.self_compose(2).get_delta_for_epsilon(1.0) >= 0.31944 * (1.0 - 1e-5)
