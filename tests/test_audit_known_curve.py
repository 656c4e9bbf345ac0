"""The audit in one run against a known curve: published forms, an oracle, coverage, and broken mechanisms."""

import json
from decimal import Decimal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import linprog
from scipy.stats import norm
from training_runs import plan_of

import jaxacct as ja
from jaxacct.audit import (
    Claim,
    LowerBound,
    Report,
    Row,
    coin_guesses,
    gradient_canaries,
    one_run,
)
from jaxacct.audit.single_run import _p_value, by_gaussian, by_lines, claimed_lines
from jaxacct.core.validation import InputError
from jaxacct.training import Trainer

LEVEL = 0.001


def p_value(correct, guesses, canaries, claim, guessed="both"):
    """The p-value of `one_run`, also where all canaries are guessed to be in, which `one_run` refuses."""
    counts = np.broadcast_arrays(correct, guesses, canaries)
    flat = (np.asarray(x, np.float64).reshape(-1, 1) for x in counts)
    return _p_value(*flat, by_lines(claimed_lines(claim, guessed)), guessed).reshape(counts[0].shape)


def test_a_plan_whose_filter_promises_no_curve_is_no_claim():
    """Outputs may change the run, so refuting the original plan's curve would not refute the filter's promise."""
    plan = plan_of(100, noise=3.0, steps=4, data_dependent=True)
    with pytest.raises(InputError, match="promises an epsilon at every delta, but no curve; give plan.mechanism"):
        one_run(95, 100, 100, claim=plan)
    assert one_run(95, 100, 100, claim=plan.mechanism, delta=1e-5).claim.startswith("curve of ")


@pytest.mark.parametrize(
    ("m", "g", "c", "both", "only_in"),
    [(100, 100, 75, 0.703, 0.352), (100, 20, 19, 0.391, 0.244), (20, 20, 17, 0.360, 0.183)],
)
def test_values_of_a_second_program(m, g, c, both, only_in):
    found = [p_value(c, g, m, 1.0, guessed=word) for word in ("both", "in")]
    np.testing.assert_allclose(found, [both, only_in], atol=1.01e-3)


def oracle(c, g, m, mu, half):
    """max Pr[N >= c] over laws of N by a linear programme, with 300 tangents in place of Phi(Phi^-1(x) + mu)."""
    x = np.concatenate([norm.cdf(np.linspace(-7, 7, 300) - mu / 2)])
    value, slope = norm.cdf(norm.ppf(x) + mu), norm.pdf(norm.ppf(x) + mu) / norm.pdf(norm.ppf(x))
    t, rows, limits = np.arange(g + 1), [], []
    for i in range(1, g + 1):
        right, wrong = np.where(t >= i, t / m, 0.0), np.where(t >= i - 1, (g - t) / m, 0.0)
        scale = 2.0 if half else 1.0
        rows.append(scale * right - slope[:, None] * scale * wrong)
        limits.append(value - slope * x)
    solved = linprog(
        -(t >= c).astype(float), np.concatenate(rows), np.concatenate(limits), np.ones((1, g + 1)), 1.0, method="highs"
    )
    return -solved.fun


@pytest.mark.parametrize(("c", "g", "m", "mu"), [(9, 10, 30, 1.0), (10, 12, 12, 0.5), (14, 15, 40, 2.0)])
@pytest.mark.parametrize("guessed", ["both", "in"])
def test_the_recursion_is_the_optimum_of_a_linear_programme(c, g, m, mu, guessed):
    found = p_value(c, g, m, mu, guessed=guessed)
    assert found == pytest.approx(oracle(c, g, m, mu, guessed == "in"), rel=3e-3)


def test_the_lines_are_a_tight_lower_bound_of_the_inverse():
    y = np.concatenate([np.geomspace(1e-9, 0.5, 999), 1.0 - np.geomspace(1e-9, 0.5, 999)])
    for guessed in ("both", "in"):
        lines = claimed_lines(ja.Gaussian(1.0), guessed)
        found, exact = by_lines(lines)(y), norm.cdf(norm.ppf(y) - 1.0)
        assert np.all(found <= exact * (1 + 1e-12))
        np.testing.assert_allclose(found, exact, rtol=2e-3)
        brute = np.max((y[:, None] - lines.intercept) / lines.slope, axis=1)
        np.testing.assert_allclose(found, np.maximum(brute, 0.0), rtol=1e-12)
    below = by_gaussian(np.float64(1.0))(y)
    assert np.all(below <= norm.cdf(norm.ppf(y) - 1.0)) and np.isinf(by_gaussian(np.float64(1.0))(np.array(1.1)))


def test_the_lines_of_one_direction_are_above_its_exact_curve():
    """One sampled step: the likelihood-ratio test by hand.  Removing and adding differ."""
    q, cut = 0.3, np.linspace(-6.0, 7.0, 400)
    without, present = norm.sf(cut), (1 - q) * norm.sf(cut) + q * norm.sf(cut - 1.0)
    for guessed, (x, y) in (("in", (without, present)), ("both", (1 - present, 1 - without))):
        lines = claimed_lines(ja.PoissonSampled(ja.Gaussian(1.0), q), guessed)
        above = np.min(lines.intercept + x[:, None] * lines.slope, axis=1)
        assert np.all(above >= y * (1 - 1e-12))
        if guessed == "in":
            np.testing.assert_allclose(above, y, atol=1e-4)


def test_pure_dp_and_a_claim_of_no_leak():
    """The p-value of randomised response, with all canaries guessed, is at least the exact binomial tail."""
    q = np.exp(1.0) / (1.0 + np.exp(1.0))
    c = np.arange(21)
    from scipy.stats import binom

    p = p_value(c, 20, 20, ja.FiniteOutput([q, 1 - q], [1 - q, q]))
    assert np.all(p >= binom.sf(c - 1, 20, q) * (1 - 1e-9))
    assert p[0] == 1.0 and np.all(np.diff(p) <= 1e-12)


def test_p_falls_with_the_count_and_a_batch_is_its_elements():
    claim = ja.Gaussian(1.0)
    c = np.arange(0, 41, 4)
    for guessed in ("both", "in"):
        p = p_value(c, 40, [[100], [400]], claim, guessed=guessed)
        assert np.all(np.diff(p, axis=1) <= 1e-12) and p.shape == (2, 11) and np.all(p[:, 0] == 1.0)
        alone = p_value(36, 40, 400, claim, guessed=guessed)
        assert alone == pytest.approx(p[1, 9], rel=1e-8)
    found = one_run(c, 40, 100, claim=1.0, delta=1e-5)
    assert np.all(np.diff(found.mu) >= 0) and found.mu[7] == pytest.approx(
        one_run(28, 40, 100, claim=1.0, delta=1e-5).mu
    )


def scores(rng, runs, m, mu):
    included = rng.random((runs, m)) < 0.5
    return rng.normal(size=(runs, m)) + mu * included, included


def test_no_true_claim_is_refuted_in_200_runs():
    """Independent canaries of exactly the claimed strength."""
    rng, mu = np.random.default_rng(0), 2.0
    runs, included = scores(rng, 200, 300, mu)
    both = [coin_guesses(s, i, 30, 30)[0] for s, i in zip(runs, included, strict=True)]
    only_in = [coin_guesses(s, i, 60, 0)[0] for s, i in zip(runs, included, strict=True)]
    for counts, guessed in ((both, "both"), (only_in, "in")):
        found = one_run(counts, 60, 300, claim=mu, delta=1e-5, confidence=1 - LEVEL, guessed=guessed)
        assert not np.any(found.refuted) and np.all(found.mu <= mu) and np.median(found.mu) > 0.3


STEPS, NOISE, RATE, CANARIES = 16, 16.0, 0.1, 1000
"""Settings of simulated trainers: mu is 1/4 if steps take all data, and every canary has a direction of its own."""
FULL, SAMPLED = ja.dp_sgd(NOISE, 1.0, STEPS), ja.dp_sgd(1.0, RATE, 1)
ONE = {"noise": 1.0, "steps": 1}


def summed(rng, included, noise=NOISE, pull=1.0, rate=1.0, steps=STEPS):
    """The component, along each canary, of the total of all noisy sums."""
    taken = rng.binomial(steps, rate, size=included.size)
    return pull * taken * included + noise * np.sqrt(steps) * rng.normal(size=included.size)


def last(rng, included, noise=NOISE):
    """The component of the last noisy sum along each canary; noise = 0 if the second half of the steps adds none."""
    return included + noise * rng.normal(size=included.size)


@pytest.mark.parametrize(
    ("claim", "score", "right", "broken"),
    [
        (FULL, last, {}, {"noise": 0.0}),
        (FULL, summed, {}, {"pull": 5.0}),
        (SAMPLED, summed, ONE | {"rate": RATE}, ONE),
    ],
    ids=["noise forgotten in half the steps", "clipped at five times the norm", "sampling forgotten"],
)
@pytest.mark.parametrize("guessed", ["both", "in"])
def test_broken_trainers_are_refuted_and_right_ones_are_not(claim, score, right, broken, guessed):
    rng = np.random.default_rng(1)
    included = rng.random(CANARIES) < 0.5
    split = (100, 100) if guessed == "both" else (200, 0)
    tries = [coin_guesses(score(rng, included, **change), included, *split) for change in (right, broken)]
    correct, guesses = map(list, zip(*tries, strict=True))
    found = one_run(correct, guesses, CANARIES, claim=claim, delta=1e-5, confidence=1 - LEVEL, guessed=guessed)
    assert found.refuted.tolist() == [False, True], (correct, found)


def test_a_plan_brings_its_delta_and_its_relation():
    plan = plan_of(1000, noise=NOISE, steps=STEPS)
    found = one_run(70, 100, 1000, claim=plan, guessed="in")
    assert found.delta == 1e-5 and found.claim == "curve of the plan" and not found.refuted
    assert found.p_value == pytest.approx(p_value(70, 100, 1000, FULL, guessed="in"), rel=1e-6)
    replaced = ja.profile(ja.Gaussian(1.0), "replace_one")
    assert p_value(95, 100, 1000, replaced) == pytest.approx(p_value(95, 100, 1000, 2.0), rel=1e-3)


def test_a_report_shows_the_curve_beside_other_audits():
    test = one_run(100, 100, 1000, claim=0.2, delta=1e-5, confidence=0.999)
    rows = [Row("curve", test, (Claim("low", 0.1, 1e-5),)), Row("other", LowerBound(0.1, 1e-5, 0.9, 9, "x"), ())]
    report = Report(rows)
    text = str(report).splitlines()
    assert text[0].endswith("trade-off curve") and text[1].endswith("!!") and text[2].endswith("-")
    assert text[-1] == "1 claimed curves are refuted, marked !!" and "p-value of the 0.2-Gaussian DP" in str(report)
    assert [row.name for row in report.refuted_curves] == ["curve"]
    rows = json.loads(report.to_json())["rows"]
    assert rows[-1]["kind"] == "trade-off curve" and rows[-1]["refuted"] and rows[-1]["p_value"] <= 1e-3
    assert str(Report([Row("r", one_run(50, 100, 1000, claim=1.0, delta=1e-5), ())])).endswith("no claim is refuted")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: one_run(5, 4, 9, claim=1.0, delta=0.1), "correct = 5 must be <= guesses = 4"),
        (lambda: one_run(3, 9, 9, claim=1.0, delta=0.1, guessed="in"), "guesses = 9 must be <= canaries - 1 = 8"),
        (lambda: one_run(3, 4, 9, claim=1.0), "delta = None must be a number unless claim is a Plan"),
        (lambda: one_run(3, 4, 9), "delta = None must be a number"),
        (lambda: one_run(2.5, 4, 9, claim=1.0, delta=0.1), "correct = 2.5 must be"),
        (lambda: one_run(3, 4, 9, claim=1.0, delta=0.1, guessed="out"), "guessed = 'out'"),
        (lambda: one_run(3, 4, 9, claim="plan", delta=0.1), "claim = 'plan'"),
        (lambda: one_run(3, 4, 9, claim=-1.0, delta=0.1), "claim = -1.0 must be > 0"),
        (lambda: one_run(3, 4, 9, claim=ja.Gaussian([1.0, 2.0]), delta=0.1), "claim is a batch of mechanisms"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "noise", "clipping", "sampling"])
def test_the_real_trainer(monkeypatch, fault):
    """The trainer's own step, with a fault put into it.  The claim is the plan's."""
    from jaxacct.training.step import noise, step_function

    claim = runs = plan_of(400, noise=8.0, steps=4)
    if fault == "noise":
        right = noise.add
        monkeypatch.setattr(noise, "add", lambda key, tree, std: right(key, tree, std / 10))
    if fault == "clipping":
        clip = step_function.clipped_sum
        looser = lambda loss, params, batch, mask, norm, *more, **named: clip(
            loss, params, batch, mask, 5.0 * norm, *more, **named
        )
        monkeypatch.setattr(step_function, "clipped_sum", looser)
    if fault == "sampling":
        claim, runs = (plan_of(400, noise=2.0, steps=4, q=q) for q in (0.1, 1.0))
    game = gradient_canaries(Trainer(lambda p, x: jnp.sum(p) * 0.0, optax.sgd(1.0), runs, 1.0), None, 400)
    included = np.random.default_rng(0).random(400) < 0.5
    scored = game.play(jnp.zeros(400), included, 1, seed=1).scores[0]
    found = one_run(*coin_guesses(scored, included, 100, 0), 400, claim=claim, confidence=1 - LEVEL, guessed="in")
    assert found.refuted is (fault != "none"), found


def test_what_is_shown_is_no_more_than_what_is_shown_to_hold():
    """Lower bounds are shown rounded down, the p-value up, each against exact decimals; delta has all its digits."""
    for correct in range(70, 96):
        found = one_run(correct, 100, 1000, claim=0.3, delta=1 / 7000, confidence=0.9999999)
        text = repr(found)
        after = lambda word, text=text: Decimal(text.split(word)[1].split(" ")[0].strip(",;"))
        assert after("mu >= ") <= Decimal(found.mu) and after("epsilon >= ") <= Decimal(found.epsilon)
        assert after(" p = ") >= Decimal(found.p_value)
        assert "at delta 0.00014285714285714287, confidence 0.9999999," in text
    many = one_run([80, 90, 95], 100, 1000, delta=1e-5)
    shown = repr(many).split("[")[1].split("]")[0].split()
    assert all(Decimal(word) <= Decimal(x) for word, x in zip(shown, many.epsilon.tolist(), strict=True))
