"""A user's script that names every public name of every public package: `mypy --strict` accepts it.

`tests/test_front_door.py` checks it, and two broken copies of it, as if jaxacct were installed; nothing runs it.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import jaxacct as ja
from jaxacct import (
    audit,
    interop,
    mechanisms,
    plots,
    representations,
    samplers,
    selection,
    strategies,
    sweeps,
    training,
    tuning,
)
from jaxacct import report as reporting
from jaxacct import verification as verifying
from jaxacct.sweeps import merge


def strategies_of_every_kind() -> list[float]:
    found: list[strategies.Strategy] = [
        strategies.BLT(2, steps=8),
        strategies.Banded(2, steps=8, epochs=2),
        strategies.BandedInverse(2, steps=8),
        strategies.ColumnNormalised(2, steps=8),
        strategies.Identity(steps=8),
        training.strategies.Identity(steps=8),
        strategies.PrefixSum(steps=8, restarts=2),
        strategies.Toeplitz((1.0, 0.5), steps=8),
    ]
    ways = (strategies.SingleParticipation(), strategies.FixedEpochs(2), strategies.MinSeparation(4, most=2))
    return [float(strategy.sensitivity(way).upper) for strategy in found for way in ways]


def mechanisms_of_every_kind() -> list[ja.Mechanism]:
    gaussian = ja.Gaussian(noise_multiplier=[0.8, 1.0, 1.2])
    sampled = ja.PoissonSampled(gaussian, sampling_probability=0.01)
    points = ja.PrivacyProfile(epsilon=[0.0, 1.0], delta=[0.3, 1e-6], reverse_delta=[0.3, 1e-6])
    pure: list[ja.Mechanism] = [
        ja.AboveThreshold(threshold_scale=4.0, query_scale=8.0, answers=2, monotone=True),
        ja.ApproximateDP(epsilon=0.1, delta=1e-7),
        ja.DiscreteGaussian(sigma=2.0, sensitivity=1),
        ja.DiscreteLaplace(scale=2.0, sensitivity=1),
        ja.ExponentialMechanism(epsilon=0.5),
        ja.FiniteOutput(p=[0.75, 0.25], q=[0.25, 0.75]),
        ja.GaussianNoisyMax(noise_multiplier=10.0, candidates=100, monotone=False),
        ja.Laplace(scale=10.0),
        ja.PartitionSelection(epsilon=0.1, delta=1e-8, contributions=5),
        ja.MatrixMechanism(strategies.Banded(2, 8), 2.0, strategies.CyclicPoisson(2, 0.1)),
        ja.MatrixMechanism(strategies.Banded(2, 8), 2.0, strategies.BallsInBins(4)),
        ja.MixtureOfGaussians(2.0, sensitivities=[0, 1], probabilities=[0.9, 0.1]),
        ja.NumericSparse(threshold_scale=4.0, query_scale=8.0, value_scale=4.0),
        ja.ProposeTestRelease(gaussian, test_scale=2.0, threshold=30.0),
        ja.PureDP(epsilon=1.0),
        ja.ZCDP(rho=0.1),
        ja.RandomAllocation(ja.Gaussian(2.0), slots=100, participations=1),
        ja.BallsInBins(ja.Gaussian(2.0), slots=100, epochs=1),
        ja.RandomisedResponse(probability=0.75),
        ja.RandomizedResponse(probability=0.75, categories=3),
        ja.ReportNoisyMax(epsilon=0.5, noise="gumbel"),
        ja.SampledWithoutReplacement(gaussian, sampling_ratio=0.1),
        ja.SmoothSensitivityGaussian(noise_multiplier=4.0, smoothness=0.05),
    ]
    run: mechanisms.Repeated = ja.repeat(sampled, steps=1000)
    total: mechanisms.Composed = ja.compose(run, *pure)
    return [total, points, ja.dp_sgd(noise_multiplier=1.0, sampling_probability=0.01, steps=1000)]


def from_distribution_functions(cdf: Callable[[Any], Any]) -> ja.PrivacyProfile:
    return ja.profile_from_cdfs(cdf, cdf, grid=np.linspace(0.0, 6.0, 601))


def parts_of(mechanism: mechanisms.Mechanism) -> mechanisms.Components:
    assert mechanisms.batch_shape(mechanism) == ()
    words: tuple[str, ...] = mechanisms.directions(mechanism, mechanisms.RELATIONS[0])
    same: list[Any] = [
        mechanisms.AboveThreshold,
        mechanisms.ApproximateDP,
        mechanisms.BaseMechanism,
        mechanisms.DiscreteGaussian,
        mechanisms.DiscreteLaplace,
        mechanisms.ExponentialMechanism,
        mechanisms.FiniteOutput,
        mechanisms.Gaussian,
        mechanisms.GaussianNoisyMax,
        mechanisms.Laplace,
        mechanisms.MatrixMechanism,
        mechanisms.MixtureOfGaussians,
        mechanisms.NumericSparse,
        mechanisms.PartitionSelection,
        mechanisms.PoissonSampled,
        mechanisms.PrivacyProfile,
        mechanisms.ProposeTestRelease,
        mechanisms.PureDP,
        mechanisms.ZCDP,
        mechanisms.RandomAllocation,
        mechanisms.BallsInBins,
        mechanisms.RandomisedResponse,
        mechanisms.RandomizedResponse,
        mechanisms.ReportNoisyMax,
        mechanisms.SampledWithoutReplacement,
        mechanisms.SmoothSensitivityGaussian,
    ]
    made = (mechanisms.compose, mechanisms.dp_sgd, mechanisms.profile_from_cdfs, mechanisms.repeat)
    print(mechanisms.DIRECTIONS, words, same, made)
    return mechanisms.components(mechanism, "add_or_remove_one", "remove")


def accounted(run: ja.Mechanism) -> float:
    b: ja.Bounds = ja.epsilon(
        run, delta=1e-5, relation="add_or_remove_one", engine="auto", rtol=1e-4, memory_bytes=2**30
    )
    d: ja.Bounds = ja.delta(run, epsilon=2.0, relation="add_one")
    p: ja.Profile = ja.profile(run, relation="remove_one", engine="lattice")
    pictures = [ja.plot_profiles({"A": run}), ja.plot_tradeoffs(p), plots.plot_profiles(run), plots.plot_tradeoffs(run)]
    pictures += [ja.risk(run).plot(), plots.plot_risks(ja.risk(run)), ja.plot_risks(ja.risk(run))]
    pictures += [p.plot(), p.plot_tradeoff(fpr=[0.1]), b.to_dict(), ja.Bounds.from_dict(b.to_dict()), run.expression()]
    gradient: ja.Mechanism = ja.epsilon_gradient(run, delta=1e-5)
    renyi: list[ja.Bounds] = [ja.rdp_epsilon(run, 1e-5, orders=[2.0]), ja.rdp_delta(run, 1.0)]
    c: ja.Calibration = ja.calibrate_noise_multiplier(
        target_epsilon=2.0, target_delta=1e-5, sampling_probability=0.01, steps=10_000, candidates="iid"
    )
    more = [
        ja.calibrate_steps(2.0, 1e-5, noise_multiplier=1.0, sampling_probability=0.01, max_steps=10**6),
        ja.calibrate_sampling_probability(2.0, 1e-5, noise_multiplier=1.0, steps=100),
    ]
    by_risk: ja.Calibration = ja.calibrate_noise_multiplier(
        target_tpr=0.05, at_fpr=0.01, sampling_probability=0.01, steps=1000
    )
    readings: ja.RiskTable = ja.risk(run, fpr=(0.01, 0.001), prior=0.1)
    any_parameter: ja.Calibration = ja.calibrate(
        lambda scale: ja.Laplace(scale), target_epsilon=2.0, target_delta=1e-5, bracket=(0.1, 100.0)
    )
    allowed: ja.AllowedRepetitions = ja.repetitions_allowed(run, target_epsilon=3.0, target_delta=1e-5)
    checked: ja.Verification = ja.verify(run, b, delta=1e-5, seconds=10.0)
    again: verifying.Verification = verifying.verify(run, d, epsilon=2.0)
    try:
        print(
            ja.explain(b.status, b.kind),
            c.value,
            any_parameter.ok,
            by_risk.value,
            readings["advantage"].upper,
            more,
            allowed.repetitions,
            gradient,
            renyi,
            p.tradeoff(0.05),
        )
    except ja.InputError as error:
        print(error, checked.status, again.digits, ja.__version__)
    return float(b.upper)


def swept(out: Path) -> sweeps.Table:
    grid = {"noise_multiplier": [0.8, 1.0], "sampling_probability": 0.01, "steps": 1000, "delta": 1e-5}
    planned: sweeps.Plan = sweeps.plan(grid, mode="product")
    print(planned.seconds, ja.sweep is sweeps.sweep)
    try:
        table: sweeps.Table = ja.sweep(grid, out=out, resume=True)
    except (sweeps.SweepInterrupted, sweeps.FailedRows) as stopped:
        print(stopped)
        table = merge([out]) if out.exists() else sweeps.merge([out], overwrite=True)
    read: sweeps.Grid = sweeps.read_grid("grid.toml")
    drawn: dict[str, Any] = plots.plot(table, "figure.png", kind="curve")
    records: sweeps.Table = ja.sweep(
        [{"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 9, "delta": 1e-5}]
    )
    print(len(read), drawn, len(records))
    return sweeps.read_table(out)


def selected(run: ja.Mechanism) -> ja.Bounds:
    laws: list[selection.Law] = [
        selection.Binomial(trials=20, probability_of_run=0.5),
        selection.Categorical(probabilities=[0.5, 0.5]),
        selection.Geometric(gamma=0.1),
        selection.Logarithmic(gamma=0.1),
        selection.PointMass(repetitions=3),
        selection.Poisson(mean=10.0),
        selection.TruncatedNegativeBinomial(eta=0.5, gamma=0.1),
        selection.TwoPoint(few=1, many=10, probability_of_few=0.5),
    ]
    k = selection.TruncatedNegativeBinomial(eta=1.0, gamma=0.1)
    chosen: selection.Selection | selection.AdaptiveSelection | selection.TopSelection
    chosen = selection.select(run, laws[0], bound="worst_case", top=1)
    several: ja.Mechanism = selection.rounds(run, laws[0], 4, target_delta=1e-5, top=2)
    worst: selection.Attack = selection.attack(run, laws[0], delta=1e-5)
    bounds: list[ja.Bounds] = [
        selection.bound_delta(run, k, 1.0),
        selection.bound_epsilon(run, k, 1e-5, bound="renyi"),
        selection.subset_epsilon(run, k, run, 0.1, 1e-5),
    ]
    others: list[Any] = [
        selection.candidates_profile([run], [0.0, 1.0]),
        selection.output_law([0.5, 0.5], k),
    ]
    print(selection.BOUNDS, several, worst.epsilon, bounds, others)
    return ja.epsilon(chosen, 1e-5)


def represented(run: ja.Mechanism) -> list[ja.Bounds]:
    curve: representations.RenyiCurve = representations.renyi_curve(run)
    print(
        curve.orders,
    )
    return [
        representations.delta_from_renyi([2.0], [0.1], 1.0),
        representations.epsilon_from_renyi([2.0], [0.1], 1e-5),
        representations.gdp_from_profile([0.0, 1.0], [0.3, 0.1]),
        representations.profile_from_tradeoff([0.0, 1.0], [1.0, 0.0], 1.0),
        representations.rdp_delta(run, 1.0),
        representations.rdp_epsilon(run, 1e-5),
        representations.renyi_divergence(run, 2.0),
        representations.tradeoff_from_profile([0.0, 1.0], [0.3, 0.1], 0.1),
        representations.tradeoff_from_renyi([2.0], [0.1], 0.1),
        representations.zero_concentrated(run),
    ]


def trained(loss: Callable[[Any, Any], Any], optimizer: Any, params: Any, data: Any) -> training.State:
    plan = training.Plan(target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, expected_batch_size=512, epochs=20)
    rule: training.EarlyStop = training.EarlyStop(epsilon=0.2, every=50)
    training.Plan(3.0, 1e-5, 1000, 0.1, steps=100, early_stop=rule)
    float(training.Plan(3.0, 1e-5, 2, steps=100, sampling_rates=[0.1, 0.2]).own_epsilon.upper[0])
    clip = training.AdaptiveClip(1.0, quantile=0.5)
    trainer = training.Trainer(loss, optimizer, plan, clip_norm=clip, micro_batch=64)
    clipped: training.Clipped = training.clipped_sum(loss, params, data, clip_norm=1.0)
    key = training.fresh_key()
    batches = [training.poisson(key, 100, 0.1), training.fixed_batches(key, 100, 10, 0)]
    batches.append(training.without_replacement(key, 100, 10))
    steady = training.PrivateLoss(bound=5.0)
    low: training.LoRA = training.lora(params, 8, alpha=16.0)
    training.Trainer(loss, optimizer, plan, 1.0, rngs=True, has_aux=True, private_loss=steady).init(low)
    total: int = training.over_micro_batches(batches[0], 8, lambda carry, rows, mask: carry, 0)
    print(
        clipped.total,
        total,
        training.CHACHA20,
        training.sensitivity(1.0),
        training.norm_methods(loss, params, data),
    )
    print(training.noisy_mean(key, 1.0, 1.0, 512.0), training.Segment, training.Ledger.open("run.jsonl"))
    source = training.Source(data, workers=2, prefetch=1, repeats=False)
    print(len(source), trainer.norm_methods(params, source))
    advice = training.advise_strategy(
        target_epsilon=3.0, target_delta=1e-5, dataset_size=60_000, batch_size=600, epochs=20, bands=[4, 8]
    )
    print(advice.best.strategy, advice.plan_arguments(), advice.plot())
    return trainer.fit(trainer.init(params), source, ledger="run.jsonl")


def tuned(loss: Callable[[Any, Any], Any], make: Callable[[Mapping[str, Any]], Any], data: Any) -> tuning.Tuned:
    law = selection.Geometric(0.1)
    rate: tuning.Distribution = tuning.LogUniform(1e-3, 1.0)
    space: tuning.Space = tuning.Random({"rate": rate, "clip": tuning.Choice([1, 2]), "decay": tuning.Uniform(0, 1)})
    points: tuning.Grid = tuning.grid(rate=[0.1, 0.2])
    matched = tuning.MatchedPlan(3.0, 1e-5, 60_000, law, sampling_probability=0.01, epochs=10)
    subset = tuning.SubsetPlan(3.0, 1e-5, 60_000, 0.1, law, sampling_probability=0.01, epochs=10)
    score = tuning.PrivateScore(lambda params, data: 0.5, data, noise_multiplier=10.0)
    small: tuning.SubsetTuned = tuning.tune_on_subset(
        loss, make, points, data, subset, init=lambda key: 0.0, score=lambda params: 0.5
    )
    whole = tuning.SearchPlan(3.0, 1e-5, 60_000, law, sampling_probability=0.01, epochs=10, rounds=4)
    history: list[tuning.Tried] = []
    search = tuning.Adaptive(lambda tried, key: {"rate": 0.1 * len(tried) + len(history)})
    in_rounds = tuning.tune_in_rounds(
        loss, make, space, data, whole, update=lambda winners: points, init=lambda key: 0.0, score=score
    )
    winners: tuple[tuning.Winner, ...] = in_rounds.winners
    print(search, winners)
    cost = tuning.Cost(law, 60_000, 10)
    advice: tuning.Advice = tuning.advise(3.0, 1e-5, 60_000, 0.01, epochs=10)
    words = tuning.key_words([bytes(32)])
    train = tuning.side_by_side(loss, make, training.Plan(noise_multiplier=1.0), clip_norm=1.0)
    other = tuning.tune_with(lambda config, key: 0.0, space, ja.Gaussian(1.0), law, target_delta=1e-5, score=float)
    print(small.config, cost, advice.options, words, train, tuning.extrapolated({"rate": 0.1}, 10.0), other.status)
    print(tuning.truncated(law, 100))
    return tuning.tune(loss, make, space, data, matched, init=lambda key: 0.0, score=score, clip_norm=1.0)


def audited(trainer: training.Trainer, data: Any, run: ja.Mechanism) -> audit.Report:
    law = selection.Geometric(0.1)
    found: audit.LowerBound = audit.clopper_pearson(1, 100, 1, 100, delta=1e-5, confidence=0.95)
    cells: audit.Cells = audit.attack_cells(selection.attack(run, law, delta=1e-5), np.sqrt)
    game: audit.Game = audit.gradient_canaries(trainer, data, count=10)
    played: type[audit.Played] = audit.Played
    others = [
        audit.gaussian_fit(1, 100, 1, 100, delta=1e-5),
        audit.from_scores([0.0], [1.0], delta=1e-5),
        audit.one_run(60, 100, 100, delta=1e-5),
        audit.cell_audit(cells, law, delta=1e-5, runs=1000),
    ]
    test: audit.CurveTest = audit.one_run(60, 100, 200, claim=run, delta=1e-5, guessed="in")
    print(test.refuted, test.p_value)
    counts = [
        audit.cell_counts([0.5, 0.5], law, 1000),
        audit.count_winners(audit.gaussian(1.0), lambda x: x, law, 1000, lambda x: x > 0),
        audit.winners(audit.finite([0.5, 0.5]), lambda x: x, law, 1000, seed=1),
        audit.winning_ranks(law, 1000),
    ]
    print(others, counts, played, audit.one_run_p_value(1.0, 60, 100, 100, 1e-5), audit.coin_guesses([0.0], [1], 1, 1))
    print(game, audit.input_canary(trainer, data, 0))
    return audit.Report([audit.Row("run", found, (audit.Claim("claimed", 3.0, 1e-5, kind="bound"),))])


def exchanged(run: ja.Mechanism, event: Any) -> str:
    interop.register_opacus()
    accountants: tuple[Any, ...] = (interop.CertifiedAccountant(), interop.OpacusAccountant())
    if interop.supports(event):
        run = interop.from_dp_event(event)
    print(accountants, interop.to_dp_event(interop.from_json(interop.to_json(run))))
    print(interop.to_jax_privacy(interop.from_jax_privacy([1.0, 0.5], steps=8)))
    return interop.to_json(run)


def sampled_exactly() -> list[Any]:
    sparse = samplers.SparseVector(epsilon=1, threshold=10, sensitivity=1, rng=random.Random(0))
    return [
        samplers.DiscreteGaussianNoise(variance=100).release([12, 7]),
        samplers.DiscreteLaplaceNoise(scale=10).release([12]),
        samplers.ExponentialChoice(epsilon=1.0).sample_exact([10, 9, 2]),
        samplers.GaussianNoisyMaxChoice(noise_multiplier=10.0, monotone=True),
        samplers.NoisyMaxChoice(epsilon=1.0, noise="laplace"),
        samplers.PartitionChoice(1.0, 1e-6).sample({"a": 3, "b": 1}),
        samplers.ThresholdedCounts(1.0, 1e-6, contributions=2).release({"a": 3}),
        samplers.exponential_error(1.0, 0.1, 10),
        sparse,
    ]


def kept_programs() -> int:
    info: ja.CacheInfo = ja.cache_info()
    print(info.folder, info.used, info.reason, info.bytes, info.compile_seconds)
    return ja.clear_cache()


def a_page_to_sign(plan: training.Plan) -> list[float]:
    page: reporting.Report = reporting.report(plan, "report.html", prior=0.1)
    claims: tuple[reporting.Claim, ...] = page.claims
    print(page.to_html(), page.to_markdown(), page.may_all_be_claimed)
    return [claim.upper for claim in claims if claim.may_be_claimed]


def batches_drawn_otherwise() -> list[ja.Mechanism]:
    base, rule = ja.Gaussian(2.0), mechanisms.SAMPLING[1]
    print(ja.cap_for(0.05, 1000, 100, 1e-5), mechanisms.cap_for, interop.to_dp_accounting_pld)
    print(mechanisms.RandomAllocation, mechanisms.BallsInBins, mechanisms.TruncatedPoissonSampled)
    print(mechanisms.SampledWithReplacement, mechanisms.ShuffledBatches)
    print(
        training.random_allocation,
        training.truncated_poisson,
        training.cyclic_poisson,
    )
    print(training.params_of("run", average=True), training.averaged(None), training.Averaged)
    return [
        ja.repeat(ja.RandomAllocation(base, slots=100), 10),
        ja.BallsInBins(base, 100, 10),
        ja.TruncatedPoissonSampled(base, 0.05, dataset_size=1000, cap=90),
        ja.SampledWithReplacement(base, 10, 1000),
        ja.ShuffledBatches(base, 100),
        ja.dp_sgd(2.0, 0.01, 1000, sampling=rule, group=1),
    ]
