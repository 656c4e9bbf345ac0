"""dp_accounting's own tests of its PLDAccountant, with CertifiedAccountant in its place.

The module is imported from where dp_accounting is installed; each of its tests is run as it stands, but for the name
of the accountant.
"""

import unittest
from types import SimpleNamespace

import pytest
from dp_accounting import privacy_accountant

from jaxacct.interop.accountant import CertifiedAccountant

suite = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant_test", exc_type=ImportError)

WORDING = "refused or answered as wanted, in other words than theirs"
TWICE = "Laplace noise under REPLACE_ONE is answered: replacing a record moves the sum by up to 2C"
BOUNDED = "a Poisson sample of anything is answered under REPLACE_ONE, by a bound"
SHARPER = "the table is of their own bound, whose pair is looser under a cap (jaxacct/mechanisms/README.md)"

DIFFERENT = {
    "test_composition_errors_for_neighboring_relation1": TWICE,
    "test_composition_errors_for_neighboring_relation2": BOUNDED,
    "test_composition_errors_for_neighboring_relation3": TWICE,
    "test_composition_errors_for_neighboring_relation4": WORDING,
    "test_poisson_subsampling_laplace_not_supported_for_replace_one": BOUNDED,
    "test_truncated_subsampled_gaussian_basic": SHARPER,
}
"""Tests that do not pass, and why that is right."""
SLOW = (
    "test_mixture_of_gaussians_basic",
    "test_truncated_subsampled_gaussian_basic",
    "test_poisson_subsampled_gaussian",
    "test_self_composed_subsampled_gaussian",
    "test_composition_errors_for_neighboring_relation2",
    "test_laplace_basic",
    "test_poisson_subsampling_laplace_not_supported_for_replace_one",  # also in test_sampled_releases.py
)
"""Tests of compositions that the lattice engine answers, and two tests of compositions that have only a bound."""

NAMES = unittest.TestLoader().getTestCaseNames(suite.PldPrivacyAccountantTest)


def outcome(name, monkeypatch):
    """(passed, text of what went wrong) of one of their tests."""
    stand_in = SimpleNamespace(PLDAccountant=CertifiedAccountant, NeighborRel=privacy_accountant.NeighboringRelation)
    monkeypatch.setattr(suite, "pld_privacy_accountant", stand_in)
    found = unittest.TestResult()
    suite.PldPrivacyAccountantTest(name).run(found)
    trouble = [text for _, text in (*found.failures, *found.errors)]
    assert found.testsRun == 1
    return not trouble, "\n".join(trouble)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NAMES])
def test_their_test(name, monkeypatch):
    passed, trouble = outcome(name, monkeypatch)
    if name in DIFFERENT:
        assert not passed, f"{name} passes now; take it out of DIFFERENT"
    else:
        assert passed, trouble


def test_every_difference_is_one_of_their_tests():
    assert set(DIFFERENT) <= set(NAMES) and len(NAMES) > 40
