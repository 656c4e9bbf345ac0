"""delta at negative epsilon, `H_{e^-x}(P||Q)`, against its definition by sums, integrals and closed forms."""

import json

import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from jaxacct import selection
from jaxacct.cli import main

NEGATIVE = np.array([-8.0, -1.5, -0.3, -1e-3, -1e-12])


def hockey_stick(p, q, epsilon):
    return np.maximum(p - np.exp(epsilon)[:, None] * q, 0.0).sum(axis=1)


@pytest.mark.parametrize("steps", [1, 3])
def test_finite_outputs_in_every_relation(steps):
    p, q = np.array([0.55, 0.3, 0.1, 0.05]), np.array([0.2, 0.3, 0.1, 0.4])
    run = ja.repeat(ja.FiniteOutput(p, q), steps)
    for _ in range(steps - 1):
        p, q = (np.outer(whole, one).ravel() for whole, one in ((p, [0.55, 0.3, 0.1, 0.05]), (q, [0.2, 0.3, 0.1, 0.4])))
    epsilon = np.append(NEGATIVE, [0.0, 0.4])
    one, other = hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon)
    truth = {"remove_one": one, "add_one": other, "add_or_remove_one": np.maximum(one, other)}
    for relation, exact in truth.items():
        found = ja.delta(run, epsilon, relation=relation)
        assert np.all(found.lower <= exact * (1 + 1e-12)) and np.all(exact <= found.upper * (1 + 1e-12))
        assert np.allclose(found.upper, exact, rtol=1e-4) and found.ok.all()
        assert np.array_equal(ja.profile(run, relation=relation).delta(epsilon).upper, found.upper)


def test_a_sampled_gaussian_against_its_integral():
    q, sigma = 0.3, 0.8
    x, step = np.linspace(-8.0, 9.0, 400_001, retstep=True)
    base = stats.norm.pdf(x, 0.0, sigma)
    mixed = (1 - q) * base + q * stats.norm.pdf(x, 1.0, sigma)
    for relation, (p, other) in (("remove_one", (mixed, base)), ("add_one", (base, mixed))):
        for epsilon in (-2.0, -0.2):
            exact = np.maximum(p - np.exp(epsilon) * other, 0.0).sum() * step
            found = ja.delta(ja.PoissonSampled(ja.Gaussian(sigma), q), epsilon, relation=relation)
            assert found.lower - 1e-9 <= exact <= found.upper + 1e-9 and found.upper - found.lower < 1e-4
    mu = 1 / 0.7
    exact = stats.norm.cdf(-NEGATIVE / mu + mu / 2) - np.exp(NEGATIVE) * stats.norm.cdf(-NEGATIVE / mu - mu / 2)
    assert np.allclose(ja.delta(ja.Gaussian(0.7), NEGATIVE).upper, exact, rtol=1e-12)


def test_kinds_statuses_and_mixed_batches():
    bound = ja.delta(selection.select(ja.Gaussian(2.0), selection.Geometric(0.3), bound="renyi"), [-1.0, 1.0])
    assert set(bound.kind) == {"bound"} and np.all(bound.upper <= 1.0)
    assert bound.lower[0] >= (1 - np.exp(-1.0)) * (1 - 1e-12)  # true for every pair
    pure = ja.delta(ja.PureDP(1.0), [-2.0, 0.5, 1.5])
    assert pure.upper[0] == pytest.approx(-np.expm1(-2.0)) and pure.status.tolist() == ["ok", "ok", "zero"]
    picked = selection.select(ja.Gaussian(3.0), selection.Geometric(0.5))
    below, above = (ja.delta(picked, epsilon) for epsilon in (-0.5, 0.5))
    scale = np.exp(-0.5)
    assert below.upper == pytest.approx(1 - scale + scale * above.upper, rel=1e-12)
    assert below.lower == pytest.approx(1 - scale + scale * above.lower, rel=1e-12)
    assert ja.delta(ja.Gaussian(1.0), -1e4).upper == 1.0


def test_sweeps_and_the_command_line(capsys):
    grid = {"noise_multiplier": [1.0], "sampling_probability": [0.1], "steps": [1], "epsilon": [-0.5, 0.5]}
    table = ja.sweep(grid)
    run = ja.dp_sgd(1.0, 0.1, 1)
    assert np.allclose(table["upper"], [ja.delta(run, e).upper for e in (-0.5, 0.5)], rtol=1e-9)
    words = "delta --noise-multiplier 1 --sampling-probability 0.1 --steps 1 --epsilon -0.5 --json"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["upper"] == pytest.approx(float(table["upper"][0]), rel=1e-9)
    with pytest.raises(ja.InputError, match="epsilon = -1.0 must be > 0"):
        ja.sweep({"sampling_probability": [0.1], "steps": [10], "epsilon": -1.0, "delta": 1e-5})
    with pytest.raises(ja.InputError, match="epsilon = nan"):
        ja.delta(run, np.nan)
