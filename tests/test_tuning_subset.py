"""Tuning on a random subset: its accounting, cost and plan, and what the runs of it see."""

import copy
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import refusal
from scipy.special import ndtr
from scipy.stats import binom

import jaxacct as ja
from jaxacct import selection, tuning
from jaxacct.training import AdaptiveClip
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan.segments import Segment
from jaxacct.tuning import Adaptive, key_words, side_by_side, subset_tuning, tune_on_subset
from jaxacct.tuning import plans as tuning_plans

DELTA, POINTS = 1e-5, tuning_plans.TUNING_POINTS


def randomised(p):
    """The profile of randomised response through its corners."""
    most = float(np.log(p / (1 - p)))
    return ja.PrivacyProfile([0.0, most], [2 * p - 1, 0.0])


@pytest.mark.parametrize(("q", "variant"), [(0.1, "rest"), (0.6, "rest"), (0.1, "all"), (0.6, "all")])
def test_product_against_enumeration(q, variant):
    a, b = 0.7, 0.6
    p1, p2 = np.array([a, 1 - a]), np.array([b, 1 - b])
    q1, q2 = p1[::-1], p2[::-1]
    base = np.outer(q1, q2)
    mixed = q * np.outer(p1, q2) + (1 - q) * np.outer(q1, p2)
    if variant == "all":
        mixed = np.outer(q * p1 + (1 - q) * q1, p2)
    found = tuning_plans.product(randomised(a), randomised(b), q, variant)
    for eps in (0.0, 0.05, 0.2, 0.5, 1.0):
        removed = np.maximum(mixed - np.exp(eps) * base, 0).sum()
        added = np.maximum(base - np.exp(eps) * mixed, 0).sum()
        assert found.delta(eps, "remove_one") == pytest.approx(removed, abs=1e-9)
        assert found.delta(eps, "add_one") == pytest.approx(added, abs=1e-9)
        assert found.delta(eps, "remove_one") >= removed - 1e-15 and found.delta(eps, "add_one") >= added - 1e-15
    grid = np.linspace(0, 2, 50_001)
    leak = np.maximum(mixed[..., None] - np.exp(grid) * base[..., None], 0).sum((0, 1))
    leak = np.maximum(leak, np.maximum(base[..., None] - np.exp(grid) * mixed[..., None], 0).sum((0, 1)))
    assert found.epsilon(0.03) == pytest.approx(grid[np.argmax(leak <= 0.03)], abs=6e-5)


def gaussian_delta(eps, mu):
    return ndtr(mu / 2 - eps / mu) - np.exp(eps) * ndtr(-mu / 2 - eps / mu)


@pytest.mark.slow
def test_without_a_share_only_the_final_run_counts_and_with_all_only_the_tuning(monkeypatch):
    monkeypatch.setattr(tuning_plans, "TUNING_POINTS", POINTS)
    run, law = ja.Gaussian(3.0), selection.Geometric(0.2)
    tuning, final = tuning_plans.profile_of_tuning(run, law, DELTA), tuning_plans.profile_of_run(run, DELTA)
    alone = tuning_plans.product(tuning, final, 0.0, "rest").epsilon(DELTA)
    assert gaussian_delta(alone, 1 / 3) <= DELTA <= gaussian_delta(alone - 0.002, 1 / 3)
    every = tuning_plans.product(tuning, final, 1.0, "rest").epsilon(DELTA)
    exact = ja.epsilon(selection.select(run, law), DELTA)
    assert exact.lower <= every <= exact.upper * 1.002


def test_the_whole_holds_for_every_score_order_of_a_finite_base():
    """Each score order of three outputs, with the winner's law summed over all K, is below the profile of the whole."""
    rng = np.random.default_rng(3)
    for q, law in ((0.2, selection.Geometric(0.3)), (0.7, selection.Poisson(2.0))):
        (p1, q1), (p2, q2) = (rng.dirichlet(np.full(3, 2.0), 2) for _ in range(2))
        tuning = tuning_plans.profile_of_tuning(ja.FiniteOutput(p1, q1), law, 0.01)
        final = tuning_plans.profile_of_run(ja.FiniteOutput(p2, q2), 0.01)
        for variant in ("rest", "all"):
            whole = tuning_plans.product(tuning, final, q, variant)
            for order in itertools.permutations(range(3)):
                with_it, without = (selection.output_law(each[list(order)], law) for each in (p1, q1))
                mixed = q * np.outer(with_it, q2) + (1 - q) * np.outer(without, p2)
                if variant == "all":
                    mixed = np.outer(q * with_it + (1 - q) * without, p2)
                base = np.outer(without, q2)
                for eps in (0.0, 0.3, 1.0):
                    removed = np.maximum(mixed - np.exp(eps) * base, 0).sum()
                    added = np.maximum(base - np.exp(eps) * mixed, 0).sum()
                    assert removed <= whole.delta(eps, "remove_one") + 1e-12
                    assert added <= whole.delta(eps, "add_one") + 1e-12


@pytest.mark.parametrize("variant", ["rest", pytest.param("all", marks=pytest.mark.slow)])
def test_exact_worst_case_is_below_the_envelope(variant):
    run, law = ja.Gaussian(4.0), selection.Poisson(15)
    tuning, final = (
        tuning_plans.profile_of_tuning(run, law, DELTA),
        tuning_plans.profile_of_run(run, DELTA),
    )
    ours = tuning_plans.product(tuning, final, 0.1, variant).epsilon(DELTA)
    assert ours < selection.subset_epsilon(run, law, run, 0.1, DELTA, variant=variant).upper


@pytest.fixture(scope="module", autouse=True)
def few_points():
    """Plans are made quickly, through few points of the tuning's profile, which are all upper ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_plans, "TUNING_POINTS", 8)
        yield


SETTINGS = {"target_epsilon": 2.0, "target_delta": DELTA, "dataset_size": 200, "share": 0.25, "steps": 3}


def plan_of(points=None, **changed):
    """Return a plan.  points : the number of points of its tuning's profile, by default as few as `few_points` sets."""
    with pytest.MonkeyPatch.context() as patch:
        if points is not None:
            patch.setattr(tuning_plans, "TUNING_POINTS", points)
        given = SETTINGS | {"repetitions": selection.Poisson(4), "sampling_probability": 1.0} | changed
        return tuning_plans.SubsetPlan(**given)


def grid(points):
    """A plan with two settings, whose mixture needs many points of the tuning's profile to be accurate."""
    return plan_of(points, steps=[2, 6], sampling_probability=[1.0])


@pytest.fixture(scope="module")
def plans():
    return {"rest": plan_of(), "all": plan_of(variant="all"), "final": plan_of(noise_ratio=0.8)}


@pytest.mark.slow
def test_plans_meet_their_target(plans):
    for plan in [*plans.values(), grid(POINTS)]:
        assert plan.target_epsilon * 0.998 <= plan.epsilon.upper <= plan.target_epsilon
        assert plan.epsilon.kind == "bound"
        # the mechanism in the ledger is the whole: anybody finds the same epsilon in it
        again = ja.epsilon(plan.mechanism, DELTA).upper
        assert plan.epsilon.upper * 0.9999 <= again <= plan.target_epsilon


def test_noise_is_monotone(plans):
    sigma = {name: plan.settings[0].tuning_noise for name, plan in plans.items()}
    assert sigma["rest"] < sigma["all"]
    favoured = plans["final"].settings[0]
    assert favoured.final_noise == pytest.approx(0.8 * favoured.tuning_noise)
    assert favoured.final_noise < sigma["rest"] < favoured.tuning_noise


def test_settings_share_one_guarantee(monkeypatch):
    """Runs of 2 and of 6 steps have the same (epsilon, delta).  A fixed value replaces the search for the noise."""
    monkeypatch.setattr(
        tuning_plans, "least_noise", lambda epsilon, target, near: 0.5
    )  # with noise .5 a run is (2, DELTA)-DP
    whole = grid(20)
    short, long = whole.settings
    assert (short.steps, long.steps) == (2, 6)
    # Gaussians with the same (epsilon, delta) have the same sigma / sqrt(steps)
    assert long.tuning_noise / short.tuning_noise == pytest.approx(np.sqrt(3.0), rel=1e-3)
    assert ja.epsilon(ja.repeat(ja.Gaussian(short.tuning_noise), 2), DELTA).upper == pytest.approx(2.0, rel=1e-3)
    # all settings then have the profile of a single one; their mixture, through points, costs a little more
    monkeypatch.setattr(tuning_plans, "least_noise", lambda epsilon, target, near: short.tuning_noise)
    alone = plan_of(20, steps=2).epsilon.upper
    assert alone * 0.999 <= whole.epsilon.upper <= 1.3 * alone


@pytest.mark.slow
def test_settings_cost_little_more_than_one():
    short = grid(POINTS).settings[0]
    alone = plan_of(POINTS).settings[0].tuning_noise * np.sqrt(2 / 3)
    assert 0.99 * alone <= short.tuning_noise <= 1.01 * alone


def test_cost_against_simulation(plans):
    rng, plan = random.Random(1), plans["rest"]
    law, n, q, epochs = plan.repetitions, 200, 0.25, 3.0
    draws = np.array([law.sample(rng) for _ in range(1000)])
    samples = np.random.default_rng(2).binomial(n, q, draws.size)
    spent = draws * samples * epochs + (n - samples) * epochs
    assert plan.cost.expected == pytest.approx(spent.mean(), rel=0.03)
    assert plan.cost.expected == epochs * n * (4 * q + 1 - q) and plans["all"].cost.expected == epochs * n * (4 * q + 1)
    exact = plan.cost.of(draws)
    assert np.mean(exact <= plan.cost.quantile(0.9)) >= 0.9 > np.mean(exact < plan.cost.quantile(0.9))
    everything = tuning_plans.Cost(law, n, epochs)
    assert everything.expected == 4 * n * epochs and everything.of(0) == 0.0
    assert plan.cost.of(0) == (1 - q) * n * epochs


class Rates:
    def sample(self, key):
        return {"learning_rate": float(jax.random.uniform(key, minval=0.5, maxval=1.5))}


def tuned(plan, data, monkeypatch, k=5, score=None, **changed):
    monkeypatch.setattr(type(plan.repetitions), "sample", lambda self: k)
    settings = {"init": lambda key: jnp.zeros(200), "score": score or (lambda w: float(w[0])), "clip_norm": 10.0}
    return subset_tuning.tune_on_subset(
        lambda w, x: -jnp.vdot(w, x),
        lambda c: optax.sgd(c["learning_rate"]),
        Rates(),
        data,
        plan,
        **({"candidates": "iid"} | settings | changed),
    )


@pytest.fixture(scope="module")
def quiet(plans):
    """The same plans with next to no noise, to see what a run is trained on; their epsilon is not used."""
    made = {name: copy.copy(plans[name]) for name in ("rest", "all")}
    for plan in made.values():
        vars(plan)["settings"] = (tuning_plans.Setting(1.0, 3, 1e-9, 1e-9),)
    return made


def by_hand(*_, **__):
    """Runs that move each parameter vector by its rate along the records that are there; nothing is compiled."""

    def train(params, configs, keys, held, private, trial):
        rows, there = held
        return params + np.asarray(configs["learning_rate"])[:, None] * (np.asarray(there) @ np.asarray(rows))

    return train


def test_the_sample_is_tuned_on_and_the_rest_is_trained_on(plans, monkeypatch):
    monkeypatch.setattr(subset_tuning, "side_by_side", by_hand)
    test_who_sees_the_sample("rest", plans, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rest", "all"])
def test_who_sees_the_sample(variant, quiet, monkeypatch):
    """Record i pulls coordinate i: what a run has seen is where its parameters moved."""
    seen = []
    score = lambda w: seen.append(np.asarray(w)) or float(w[0])
    found = tuned(quiet[variant], np.eye(200, dtype=np.float32), monkeypatch, score=score, key=bytes(range(32)))
    moved = np.array(seen) > 1e-4
    assert len(seen) == 5 and (moved == moved[0]).all()  # one sample for all candidates
    sample, final = moved[0], np.asarray(found.params) > 1e-4
    assert 25 <= sample.sum() <= 80  # 50 expected
    assert (final == ~sample).all() if variant == "rest" else final.all()


@pytest.mark.slow
def test_winner_extrapolation_and_one_sample_per_key(quiet, monkeypatch):
    seen = []
    score = lambda w: seen.append(float(w.max())) or seen[-1]
    found = tuned(quiet["rest"], np.eye(200, dtype=np.float32), monkeypatch, score=score)
    # a record that is present moves its coordinate by rate / batch per step, so the winner has the largest rate
    assert found.score == max(seen) == pytest.approx(3 * found.tuned_config["learning_rate"] / 50, rel=1e-3)
    assert found.config["learning_rate"] == pytest.approx(3.0 * found.tuned_config["learning_rate"])
    assert float(found.params.max()) == pytest.approx(3 * found.config["learning_rate"] / 150, rel=1e-3)
    kept = tuned(quiet["rest"], np.eye(200, dtype=np.float32), monkeypatch, extrapolate="adam", key=b"k" * 32)
    assert kept.config == kept.tuned_config
    warm = tuned(quiet["rest"], np.eye(200, dtype=np.float32), monkeypatch, warm_start=True, key=b"k" * 32)
    assert (np.asarray(warm.params) > 1e-4).all() and not (np.asarray(kept.params) > 1e-4).all()


@pytest.mark.slow
def test_nan_loses_and_no_candidate_is_no_failure(quiet, monkeypatch):
    seen = []
    score = lambda w: seen.append(float(w.max())) or (np.nan if len(seen) != 2 else -1.0)
    data = np.eye(200, dtype=np.float32)
    assert tuned(quiet["rest"], data, monkeypatch, score=score).score == -1.0
    none = tuned(quiet["rest"], data, monkeypatch, k=0)
    assert none.status == "none" and np.isnan(none.score) and np.isfinite(none.params).all()


@pytest.mark.slow
def test_one_ledger_entry_before_anything_runs(plans, monkeypatch, tmp_path):
    data, sizes = np.eye(200, dtype=np.float32), []
    for k in (1, 17):
        path = tmp_path / f"{k}.jsonl"

        def score(params, path=path):
            assert len(path.read_text().splitlines()) == 2  # the run and its one entry are there already
            return 0.0

        found = tuned(plans["rest"], data, monkeypatch, k=k, ledger=path, score=score)
        assert found.status == "tuned"
        lines = path.read_text().splitlines()
        assert len(lines) == 2
        sizes.append(len(lines[1]) - len(Ledger.read(path).run))
        assert Ledger.read(path).epsilon(DELTA).upper == pytest.approx(found.epsilon.upper, rel=1e-4)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "more",
    [
        {"clip_norm": -1.0},
        {"method": "fast"},
        {"micro_batch": 0},
        {"space": "rate"},
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_before_it_is_paid_for(plans, monkeypatch, tmp_path, more):
    class Other:
        def sample(self, key):
            return {"rate": 0.1}

    if "space" in more:
        monkeypatch.setitem(globals(), "Rates", Other)
        more = {}
    refusal(tuned, plans["rest"], np.eye(200, dtype=np.float32), monkeypatch, ledger=tmp_path / "ledger", **more)
    assert not (tmp_path / "ledger").exists()


@jax.custom_vjp
def careless(w, x):
    """A loss whose derivative ignores its cotangent. Multiplying the loss by 0 takes no example out."""
    return jnp.sum(w * x)


careless.defvjp(lambda w, x: (jnp.sum(w * x), x), lambda x, _: (x, jnp.zeros_like(x)))


@pytest.mark.parametrize("clip_norm", [1.0, AdaptiveClip(1.0, count_noise=0.01)], ids=["norm", "adaptive"])
def test_rows_that_fill_up_the_sample_add_nothing(clip_norm):
    """They are copies of record 0, which is outside the sample here. Ten records are in it."""
    rows = np.zeros((400, 2), np.float32)
    rows[1:11, 1] = 1.0
    plan = subset_tuning._OfSample.of([Segment(0, 2, 1e-3, 1.0, 10.0)], target_delta=DELTA, dataset_size=80)
    train = side_by_side(careless, lambda config: optax.sgd(1.0), plan, clip_norm=clip_norm, filled_up=True)

    def trained(first):
        rows[0, 0] = first
        held = subset_tuning._held(rows, np.arange(1, 11), 80)
        return train(jnp.zeros((1, 2)), {}, key_words([bytes(32)]), held)[0]

    with_record = trained(1.0)
    np.testing.assert_array_equal(with_record, trained(0.0))
    np.testing.assert_allclose(with_record, [0.0, -2.0], atol=0.1)


@pytest.mark.parametrize("held", [np.ones((4, 2)), (np.ones((4, 2)), np.array([1, 0, 2, 1])), (np.ones((4, 2)),)])
def test_data_that_are_filled_up_have_a_mask(held):
    plan = subset_tuning._OfSample.of([Segment(0, 2, 1e-3, 1.0, 4.0)], target_delta=DELTA, dataset_size=4)
    train = side_by_side(careless, lambda config: optax.sgd(1.0), plan, filled_up=True)
    text = refusal(train, jnp.zeros((1, 2)), {}, key_words([bytes(32)]), held)
    assert text.startswith("data must be (examples, mask) with a bool array")


@pytest.mark.parametrize(("size", "share"), [(400, 0.1), (4000, 0.05), (60_000, 0.1), (10, 1.0), (3, 1e-9)])
def test_the_room_of_a_sample_is_rarely_exceeded_and_not_the_whole(size, share):
    room = subset_tuning._room(size, share)
    assert binom.sf(room, size, share) <= 1e-18 and (room == 1 or binom.sf(room - 1, size, share) > 1e-18)


def test_a_clip_norm_may_adapt(plans):
    found = tune_on_subset(
        lambda w, x: jnp.sum((w - x) ** 2),
        lambda config: optax.sgd(config["learning_rate"]),
        tuning.grid(learning_rate=[0.01]),
        np.ones((200, 2), np.float32),
        plans["rest"],
        init=lambda key: jnp.zeros(2),
        score=lambda w: 0.0,
        clip_norm=AdaptiveClip(0.1),
    )
    assert found.status in ("tuned", "none") and np.isfinite(found.params).all()


def test_refusals(plans):
    make = lambda **changed: tuning_plans.SubsetPlan(
        **({"target_epsilon": 2.0, "target_delta": DELTA, "dataset_size": 9, "share": 0.5, "sampling_probability": 1.0}
           | {"repetitions": selection.Poisson(4), "steps": 3} | changed)
    )  # fmt: skip
    assert "share = 1.0" in refusal(make, share=1.0)
    assert "variant = 'both'" in refusal(make, variant="both")
    assert "one of epochs and steps" in refusal(make, epochs=2.0)
    assert "law of K" in refusal(make, repetitions=5)
    assert "one law" in refusal(tuning_plans.Cost, selection.Poisson([1.0, 2.0]), 9, 1.0)
    assert "share = 0.5 must be 1" in refusal(tuning_plans.Cost, selection.Poisson(1.0), 9, 1.0, "everything", 0.5)
    assert "has no 'learning_rate'" in refusal(subset_tuning.extrapolated, {"lr": 0.1}, 2.0)
    assert "no noise" in refusal(tuning_plans.least_noise, lambda sigma: 9.0, 1.0, 2.0)
    nothing = lambda *args: None
    arguments = nothing, nothing, Rates(), np.ones((3, 2)), plans["rest"]
    words = refusal(subset_tuning.tune_on_subset, *arguments, init=nothing, score=nothing, candidates="iid")
    assert "must be (200,)" in words
    assert "space of type Rates may keep state" in refusal(
        subset_tuning.tune_on_subset, *arguments, init=nothing, score=nothing
    )
    for space in ({"rate": [0.1]}, Adaptive(lambda history, key: {"rate": 0.1})):  # the latter is never i.i.d.
        arguments = nothing, nothing, space, np.ones((3, 2)), plans["rest"]
        words = refusal(subset_tuning.tune_on_subset, *arguments, init=nothing, score=nothing, candidates="iid")
        assert "draws nothing; use tuning.grid" in words
