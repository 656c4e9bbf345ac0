"""200 audits at simultaneous 99 %: none above what is true, and mechanisms with too little noise are caught."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from training_cases import gaussian_epsilon
from training_runs import linear, plan_of

from jaxacct import selection
from jaxacct.audit import (
    Cells,
    Claim,
    Report,
    Row,
    cell_audit,
    coin_guesses,
    from_scores,
    gaussian,
    gradient_canaries,
    one_run,
    winners,
)
from jaxacct.training import Trainer

RUNS, CONFIDENCE, DELTA = 200, 1 - 0.01 / 200, 1e-3
LAW = selection.Geometric(0.3)


def exact_epsilon(one, other):
    """The epsilon of two pmfs at DELTA, the larger of both directions, by root finding."""
    leak = lambda e: max(np.maximum(a - np.exp(e) * b, 0).sum() - DELTA for a, b in ((one, other), (other, one)))
    return brentq(leak, 0.0, 50.0, xtol=1e-10)


def folded(mu):
    """Cells of N(mu, 1) against N(0, 1) in ascending order of |x - 1.67|."""
    ends = np.concatenate([[-np.inf], np.linspace(-4, 7, 200), [np.inf]])
    order = np.argsort(np.abs(np.append(np.clip(ends[:-1], -9, 9)[1:], 9.0) - 1.67), kind="stable")
    masses = [np.diff(norm.cdf(ends - mean))[order] for mean in (mu, 0.0)]
    return Cells(*masses, np.zeros((order.size, 2)))


def of_cells(count, strength):
    """Selections by a score that is not monotone, cell by cell."""
    truth = exact_epsilon(*(selection.output_law(m, LAW) for m in folded(1.0)[:2]))
    for seed in range(count):
        found = cell_audit(folded(strength), LAW, delta=DELTA, runs=250_000, confidence=CONFIDENCE, seed=seed)
        yield found, truth


def of_candidates(count, strength):
    """Audits of selections by the score x, candidate by candidate. Half of the runs choose the threshold."""
    x = np.linspace(-8, 12, 4001)
    truth = exact_epsilon(*(selection.output_law(np.diff(norm.cdf(x - m), prepend=0, append=1), LAW) for m in (1, 0)))
    score = lambda x: x
    for seed in range(count):
        worlds = [winners(gaussian(m), score, LAW, 40_000, seed=2 * seed + i) for i, m in enumerate((0.0, strength))]
        yield from_scores(*worlds, delta=DELTA, confidence=CONFIDENCE), truth


def of_gaussians(count, strength):
    """Fits of Gaussian DP at given thresholds."""
    rng, truth = np.random.default_rng(0), gaussian_epsilon(1.0, DELTA)
    for _ in range(count):
        absent, present = rng.normal(size=(2, 4000)) + np.array([[0.0], [strength]])
        cuts = [0.0, 0.5, 1.0]
        yield (
            from_scores(absent, present, delta=DELTA, confidence=CONFIDENCE, method="gaussian_fit", thresholds=cuts),
            truth,
        )


def of_one_run(count, strength):
    """Coins of 1000 canaries, each through randomised response."""
    rng, truth = np.random.default_rng(1), 2.0
    for _ in range(count):
        included = rng.random(1000) < 0.5
        honest = rng.random(1000) < 1 / (1 + np.exp(-strength * truth))
        guessed = coin_guesses(np.where(honest, included, ~included) + rng.random(1000) / 2, included, 300, 300)
        yield one_run(*guessed, 1000, delta=1e-8, confidence=CONFIDENCE), truth


@functools.cache
def game_of_steps():
    return gradient_canaries(Trainer(linear, optax.sgd(1.0), plan_of(1, noise=0.5), 1.0), None)


def of_steps(count, strength):
    """Audits of the trainer's own step with a planted gradient. The noise is 0.5; the claim is for 0.5 * strength."""
    truth, game, params = gaussian_epsilon(2.0 / strength, DELTA), game_of_steps(), jnp.zeros(2)
    for seed in range(count):
        absent, present = (game.play(params, there, 1500, seed=seed).scores[:, 0] for there in (False, True))
        yield from_scores(absent, present, delta=DELTA, confidence=CONFIDENCE, method="gaussian_fit"), truth


AUDITS = (of_cells, of_candidates, of_gaussians, of_one_run, of_steps)


@pytest.mark.parametrize("runs", [5, pytest.param(RUNS, marks=pytest.mark.slow)])
def test_no_lower_bound_exceeds_a_claim(runs):
    rows = []
    for audit in AUDITS:
        for found, truth in audit(runs // len(AUDITS), 1.0):
            rows.append(Row(audit.__name__, found, (Claim("truth", truth, found.delta, "certified"),)))
        shares = [row.found.epsilon / row.claims[0].epsilon for row in rows[-runs // len(AUDITS) :]]
        assert np.median(shares) > 0.4, audit.__name__  # bounds of about 0 would prove nothing
    assert len(rows) == runs
    assert Report(rows).refuted == []


@pytest.mark.parametrize("audit", AUDITS, ids=lambda audit: audit.__name__)
def test_too_little_noise_is_caught(audit):
    """Noise smaller than claimed by a factor of 3."""
    for found, truth in audit(1, 3.0):
        assert Row("", found, (Claim("claimed", truth, found.delta),)).refuted
