"""Linear regression by propose-test-release: sensitivities by brute force, noise against claims, and the script."""

import importlib
import pathlib

import numpy as np
import pytest
from scipy import integrate, stats
from training_cases import gaussian_epsilon

import jaxacct as ja
from jaxacct import selection

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "linear_regression"
RARE = 1e-6
"""Least p-value of a statistical test."""


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def regression():
    return importlib.import_module("regression")


@pytest.fixture
def accounting():
    return importlib.import_module("accounting")


def neighbours():
    """Pairs of data (X, y): with a record of norm 1 or 0 and target 1 or -1, and with zeros in place of this record."""
    rng = np.random.default_rng(3)
    for size, scale in ((3, 1.0), (30, 1.0), (30, 0.2), (200, 1.0)):
        x = rng.normal(size=(size, 4)) * np.array([1.0, 1.0, 0.3, 0.05])
        x *= scale / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0)
        y = np.clip(x @ np.array([2.0, -1.0, 1.0, 3.0]) + 0.3 * rng.normal(size=size), -1.0, 1.0)
        weakest = np.linalg.eigh(x.T @ x)[1][:, 0]
        for direction in (*rng.normal(size=(6, 4)), weakest, np.zeros(4)):
            record = direction / max(np.linalg.norm(direction), 1e-300)
            for target in (-1.0, 1.0):
                with_it, without = (
                    (np.vstack([x, record]), np.append(y, target)),
                    (np.vstack([x, 0 * record]), np.append(y, 0)),
                )
                yield with_it, without


def test_normalising_takes_each_record_by_itself(regression):
    rng = np.random.default_rng(0)
    features = regression.CENTRES + regression.SPREADS * rng.normal(size=(50, 10)) * rng.choice([1, 9], (50, 1))
    target = rng.uniform(-500, 900, 50)
    x, y = regression.normalised(features, target)
    assert (np.linalg.norm(x, axis=1) <= 1.0).all() and (np.abs(y) <= 1.0).all()
    alone = [regression.normalised(f[None], t[None]) for f, t in zip(features, target, strict=True)]
    np.testing.assert_array_equal(x, np.vstack([a for a, _ in alone]))
    np.testing.assert_array_equal(y, np.concatenate([b for _, b in alone]))


@pytest.mark.parametrize("lam", [1.5, 4.0, 100.0])
def test_sensitivities(regression, lam):
    """Sensitivities of all quantities that get noise, for all pairs of `neighbours`, in both orders."""
    theta_of = lambda data: regression.ridge(*data, lam)[1]
    for pair in neighbours():
        values = [np.linalg.eigvalsh(x.T @ x)[0] for x, _ in pair]
        assert abs(values[0] - values[1]) <= 1.0 + 1e-9
        norms = [1.0 + np.linalg.norm(theta_of(data)) for data in pair]
        for data, value, norm in zip(pair, values, norms, strict=True):
            limit = -np.log1p(-1.0 / (lam + max(value, 0.0)))  # what a test that knows the eigenvalue would use
            assert abs(np.log(norms[0] / norms[1])) <= limit + 1e-12
            assert norm <= regression.residual_bound(len(data[1]), lam, max(value, 0.0)) + 1e-12
            assert norm <= regression.residual_bound(len(data[1]), lam) + 1e-12
        for theta in (theta_of(pair[0]), 5.0 * theta_of(pair[1]), np.zeros(4)):
            errors = [regression.clipped_error(*data, theta) for data in pair]
            assert abs(errors[0] - errors[1]) <= 1.0 + 1e-9
        for radius in (0.1, 1.0):
            found = [regression.constrained_ridge(*data, lam, radius) for data in pair]
            assert max(np.linalg.norm(t) for t in found) <= radius + 1e-9
            assert np.linalg.norm(found[0] - found[1]) <= (1.0 + radius) / lam + 1e-9


def test_constrained_ridge_is_the_minimum(regression):
    x, y = next(neighbours())[0]
    theta = regression.constrained_ridge(x, y, 0.5, 0.2)
    value = lambda t: np.sum((y - x @ t) ** 2) + 0.5 * t @ t
    rng = np.random.default_rng(1)
    others = rng.normal(size=(2000, 4))
    others *= 0.2 * rng.uniform(size=(2000, 1)) / np.linalg.norm(others, axis=1, keepdims=True)
    near = theta + 1e-3 * rng.normal(size=(2000, 4))
    near *= np.minimum(1.0, 0.2 / np.linalg.norm(near, axis=1, keepdims=True))
    assert all(value(theta) <= value(other) + 1e-9 for other in np.vstack([others, near]))


def hockey_stick(first, second, epsilon):
    """H_{e^eps} of two normal laws on the line, by the trapezoid rule."""
    z = np.linspace(
        *(side(l.mean() + k * l.std() for l in (first, second) for k in (-12, 12)) for side in (min, max)), 40_001
    )
    return integrate.trapezoid(np.maximum(first.pdf(z) - np.exp(epsilon) * second.pdf(z), 0.0), z)


@pytest.mark.parametrize(("mean", "variance"), [(0.3, 0.9), (1.0, 0.5), (0.05, 0.99), (0.2, 0.999)])
def test_profile_of_the_posterior_pair(regression, mean, variance):
    p, q = stats.norm(0.0, 1.0), stats.norm(mean, np.sqrt(variance))
    for epsilon in (0.0, 0.1, 0.5, 1.5):
        exact = max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))
        assert regression.posterior_delta(epsilon, mean, variance) == pytest.approx(exact, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("lam", "precision"), [(3.0, 0.1), (8.0, 1.0), (8.0, 20.0), (100.0, 5.0)])
def test_the_pair_is_above_every_two_posteriors(regression, lam, precision):
    """The pair's delta is at least that of any two posteriors, whose density ratio depends only on record @ theta."""
    for number, pair in enumerate(neighbours()):
        if number % 7:
            continue
        record = pair[0][0][-1]
        if not record.any():
            continue
        fits = [regression.ridge(*data, lam) for data in pair]
        full = [stats.multivariate_normal(t, np.linalg.inv(precision * h)) for h, t in fits]
        line = [stats.norm(record @ t, np.sqrt(record @ np.linalg.inv(precision * h) @ record)) for h, t in fits]
        for theta in full[0].rvs(3, random_state=0):
            ratio = full[0].logpdf(theta) - full[1].logpdf(theta)
            assert ratio == pytest.approx(line[0].logpdf(record @ theta) - line[1].logpdf(record @ theta), abs=1e-6)
        for (x, _), (_, theta) in zip(pair, fits, strict=True):
            share = 1.0 / (lam + max(np.linalg.eigvalsh(x.T @ x)[0], 0.0))
            bound = regression.posterior_pair(precision, share, 1.0 + np.linalg.norm(theta))
            for epsilon in (0.0, 0.3, 1.0):
                allowed = float(regression.posterior_delta(epsilon, *bound))
                for first, second in (line, line[::-1]):
                    assert hockey_stick(first, second, epsilon) <= allowed * (1 + 1e-5) + 1e-9


def test_the_precision_is_the_largest_that_holds(regression):
    for share, residual, epsilon, delta in ((0.02, 1.5, 1.0, 1e-6), (0.01, 3.0, np.array([0.1, 0.5]), [1e-2, 1e-6])):
        found = regression.posterior_precision(share, residual, epsilon, np.asarray(delta))
        pairs = [regression.posterior_pair(c * found, share, residual) for c in (1.0, 1.002)]
        met = [bool(np.all(regression.posterior_delta(epsilon, *pair) <= delta)) for pair in pairs]
        assert met == [True, False]
    assert (
        regression.posterior_precision(0.9, 1.0, 0.01, 1e-9)
        == 0.0
        == regression.posterior_precision(1.0, 1.0, 9.0, 0.1)
    )


def test_noise_has_the_scale_that_is_claimed(regression):
    (x, y), _ = next(neighbours())
    rng, draws, lam = np.random.default_rng(), 4000, 2.0
    h, theta = regression.ridge(x, y, lam)
    samples = np.array([regression.sample_posterior(rng, h, theta, 3.0) for _ in range(draws)])
    white = (samples - theta) @ np.linalg.cholesky(3.0 * h)  # covariance I
    noise = ja.calibrate_noise_multiplier(
        target_epsilon=1.0, target_delta=1e-6, sampling_probability=1.0, steps=1
    ).value
    assert gaussian_epsilon(1.0 / noise, 1e-6) <= 1.0
    centre = regression.constrained_ridge(x, y, lam, 1.0)
    outputs = np.array([regression.output_perturbation(rng, x, y, lam, noise, 1.0) for _ in range(draws)])
    for values in (white, (outputs - centre) / (noise * 2.0 / lam)):
        assert stats.chi2(values.size).cdf(np.sum(values**2)) == pytest.approx(0.5, abs=0.5 - RARE)
        assert np.abs(np.cov(values.T) - np.eye(4)).max() < 6.0 * np.sqrt(2.0 / draws)


def test_released_bounds_fail_as_seldom_as_they_say(regression):
    (x, y), _ = list(neighbours())[-1]
    rng, lam, failure, draws = np.random.default_rng(), 5.0, 0.2, 4000
    eigenvalue = np.linalg.eigvalsh(x.T @ x)[0]
    norm = 1.0 + np.linalg.norm(regression.ridge(x, y, lam)[1])
    found = np.array([regression.released_bounds(rng, x, y, lam, 0.02, 2.0, failure) for _ in range(draws)])
    for wrong in (found[:, 0] > eigenvalue, found[:, 1] < norm):
        assert stats.binomtest(int(wrong.sum()), draws, 0.5 * failure, alternative="greater").pvalue > RARE
    assert eigenvalue > 0.2  # so that no draw is cut at 0
    law = stats.norm(eigenvalue + 0.02 * stats.norm.ppf(failure / 2), 0.02)
    assert stats.kstest(found[:, 0], law.cdf).pvalue > RARE


@pytest.mark.slow
def test_a_candidate_costs_what_its_parts_compose_to(accounting):
    """A candidate's delta exceeds that of its parts composed as one Gaussian, by little more than `failure`."""
    budget = accounting.Budget(0.5, selection.Geometric(0.1), 1e-6)
    assert np.sum(budget.parts**2) == pytest.approx(0.25)
    candidate, gaussian = budget.candidate, ja.Gaussian(2.0)
    at = np.array([0.0, 0.3, 1.0, 2.0])
    assert (np.asarray(candidate.epsilon)[[0, -1]] - [0.0, 2.6] < 0.3).all()
    exact, found = ja.delta(gaussian, at).upper, ja.delta(candidate, at).upper
    assert (found >= exact + budget.failure).all() and (found <= 1.05 * exact + 4 * budget.failure).all()
    epsilon, delta = budget.point(1e-7)
    assert delta <= 1e-7 * (1 + 1e-9) and epsilon > float(ja.epsilon(candidate, 1e-7).upper)


@pytest.mark.slow
def test_calibrated_budgets_meet_their_target(accounting):
    law, names = selection.Geometric(0.1), accounting.ACCOUNTINGS
    found = [accounting.calibrated(4.0, 1e-6, law, name, rounds=10) for name in names[:2]]
    for budget, name in zip(found, names, strict=False):
        assert 3.8 <= budget.epsilon(name) <= 4.0
    assert found[0].mu < found[1].mu
    with pytest.raises(ja.InputError, match="too small for a tuning"):
        accounting.calibrated(1e-4, 1e-6, law, "one point", rounds=3)


@pytest.mark.slow
def test_the_script_runs(accounting, tmp_path, capsys):
    pytest.importorskip("sklearn")
    tuning = importlib.import_module("tuning")
    rows = tuning.main(["--quick", "--out", str(tmp_path)])
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "tuning.csv").read_text().splitlines()) == len(rows) + 1
    assert "tuned, worst case" in capsys.readouterr().out
    error = {row[3]: row[4] for row in rows}
    assert error["not private"] < error["OPS-balanced"] < error["zero"] and error["tuned, worst case"] < error["zero"]
    budget = accounting.Budget(0.5, tuning.CANDIDATES, tuning.DELTA)
    sharper = [budget.epsilon(name) for name in accounting.ACCOUNTINGS]
    assert sharper[2] < sharper[1] < sharper[0]
