"""How many candidates a budget allows: the bound holds at the answer, and at one per cent more it does not."""

import numpy as np
import pytest
from helpers import refusal
from selection_cases import rows

import jaxacct as ja
from jaxacct import selection

SIGMA = 1 / 0.2681


@pytest.mark.slow
def test_the_numbers_of_the_reference_table_come_back():
    """If the target is the exact epsilon of a geometric K, the allowed mean is that of K, or up to 1 % less."""
    known = [
        (law, row) for law, row in rows() if row["repetitions"] == "truncated_negative_binomial" and law.eta == 1.0
    ]
    known = [(law, row) for law, row in known if row["gdp_mu"] == "0.2681"]
    target = np.array([float(row["epsilon_exact"]) for _, row in known])
    gamma = np.array([float(law.gamma) for law, _ in known])
    found = ja.repetitions_allowed(ja.Gaussian(SIGMA), target, 1e-5)
    assert found.ok.all() and set(found.status) == {"ok"} and set(found.epsilon.kind) == {"certified"}
    assert (found.epsilon.upper <= target).all() and (found.parameter >= gamma * (1 - 1e-4)).all()
    assert (found.repetitions <= 1 / gamma * (1 + 1e-4)).all() and (found.repetitions >= 0.99 / gamma).all()
    np.testing.assert_allclose(found.repetitions, 1 / found.parameter, rtol=1e-12)


def test_one_per_cent_more_does_not_meet_the_target():
    run, target = ja.Gaussian(SIGMA), np.array([1.2, 0.9])
    found = ja.repetitions_allowed(run, target, 1e-5)
    assert found.status.tolist() == ["ok", "infeasible"]
    assert found.ok.tolist() == [True, False] and np.isnan(found.parameter[1]) and found.epsilon.upper[0] <= target[0]
    more = selection.Geometric(1 / (1.01 * found.repetitions[0]))
    assert ja.epsilon(selection.select(run, more), 1e-5).upper > target[0]
    assert "no law of K meets every target" in refusal(getattr, found, "law")
    loose = ja.repetitions_allowed(run, 50.0, 1e-5)
    assert loose.status == "not_binding" and loose.repetitions == pytest.approx(1e6) and loose.epsilon.upper <= 50.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "eta", "more"),
    [
        ("poisson", None, lambda law: selection.Poisson(1.01 * law.mean)),
        ("point_mass", None, lambda law: selection.PointMass(law.repetitions + 1)),
        ("truncated_negative_binomial", -0.5, lambda law: selection.TruncatedNegativeBinomial(-0.5, law.gamma / 1.03)),
        ("logarithmic", None, lambda law: selection.Logarithmic(law.gamma / 1.03)),
    ],
)
def test_every_family(family, eta, more):
    run, target = ja.Gaussian([SIGMA, 1.2 * SIGMA]), 1.2
    found = ja.repetitions_allowed(run, target, 1e-5, family=family, eta=eta)
    assert found.ok.all() and (found.epsilon.upper <= target).all() and found.repetitions[1] > found.repetitions[0]
    assert (ja.epsilon(selection.select(run, found.law), 1e-5).upper <= target).all()
    assert (ja.epsilon(selection.select(run, more(found.law)), 1e-5).upper > target).all()
    assert found.law.mean == pytest.approx(found.repetitions)


def test_refusals():
    run = ja.Gaussian(1.0)
    assert "family = 'uniform' is not known" in refusal(ja.repetitions_allowed, run, 1.0, 1e-5, family="uniform")
    assert "needs eta" in refusal(ja.repetitions_allowed, run, 1.0, 1e-5, family="truncated_negative_binomial")
    assert "takes no eta" in refusal(ja.repetitions_allowed, run, 1.0, 1e-5, eta=0.5)
    assert "target_epsilon = 0.0 must be > 0" in refusal(ja.repetitions_allowed, run, 0.0, 1e-5)
    assert "run = 1.0 of type float is not a mechanism" in refusal(ja.repetitions_allowed, 1.0, 1.0, 1e-5)
    assert "rtol = 0 must be" in refusal(ja.repetitions_allowed, run, 1.0, 1e-5, rtol=0)
    assert "do not broadcast" in refusal(ja.repetitions_allowed, ja.Gaussian([1.0, 2.0]), [1.0, 2.0, 3.0], 1e-5)
