"""Audits of the trainer's real step under every batch rule: nearly the epsilon that is claimed, and never above it.

The other records are those under which the rule leaks most, and runs are told apart by their likelihood ratio.
Samplers that are broken on purpose are caught.  Each bound is wrong with probability 0.001 at most.
"""

from math import comb
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy.special import logsumexp
from training_runs import linear

from jaxacct import strategies
from jaxacct.audit import from_scores
from jaxacct.training import Plan, Trainer, clipped_sum
from jaxacct.training.sampling import sampler
from jaxacct.training.step import noise, step_function
from jaxacct.training.step.step_function import Carried, numbers_at
from jaxacct.training.step.step_mechanisms import BY_PASS, CYCLIC

DELTA, RUNS, AT_ONCE = 0.02, 60_000, 2000


def noisy_sums(plan, data, runs, seed, users=None, most=None, one_round_key=False, mesh=None):
    """The noisy sums of real steps, shape (runs, steps), in clip norms; the gradient of a record is the record."""
    trainer = Trainer(linear, optax.sgd(1.0), plan, 1.0, examples_per_user=most, mesh=mesh)
    data = trainer.placement.data(np.asarray(data, np.float32)[:, None], users)
    passes = [plan.pass_of(t)[:2] if plan.sampling in BY_PASS else (0, t) for t in range(plan.steps)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *[numbers_at(plan, t, None) for t in range(plan.steps)])
    one_key = one_round_key or plan.sampling == CYCLIC
    which = np.array([0 if one_key else number for number, _ in passes])

    def run(words, data):
        params = jnp.zeros(1)

        def step(carried, now):
            key, pass_key, settings = now
            after, _ = trainer.step_function(carried, key, pass_key, data, settings)
            return after, (carried.params - after.params)[0] * settings.expected_batch_size

        start = Carried(params, trainer.rule.begin(params), jnp.float32(1.0), jnp.int32(0))
        return jax.lax.scan(step, start, (words[: plan.steps], words[plan.steps :][which], stacked))[1]

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    program = jax.jit(jax.vmap(run, (0, None)), out_shardings=everywhere)
    rng = np.random.default_rng(seed)

    def words():
        drawn = rng.integers(0, 2**32, (AT_ONCE, plan.steps + which.max() + 1, 8), np.uint32)
        if plan.sampling == CYCLIC:  # the record is in group 0 of all runs
            drawn[:, plan.steps] = GROUP_0
        return drawn

    sums = np.concatenate([np.asarray(program(words(), data), np.float64) for _ in range(runs // AT_ONCE)])
    return sums if plan.noise is None else sums @ of_matrix(plan.noise).T


GROUP_0 = next(
    words
    for words in np.arange(800, dtype=np.uint32).reshape(-1, 8)
    if sampler.host_slots(noise.host_stream(words, noise.SAMPLING), 3, 3)[0] == 0
)
"""Words of a key under which the first of three records is in group 0 of three."""


def of_matrix(strategy):
    """C of a banded strategy, with columns of norm at most 1: C times the noise of the steps is independent noise."""
    column = np.array(strategy.column) / np.linalg.norm(strategy.column)
    return sum(np.diag(np.full(strategy.steps - lag, c), -lag) for lag, c in enumerate(column))


class Law(NamedTuple):
    """The means of the sums of one block of steps, and how likely each is."""

    means: np.ndarray
    weights: np.ndarray


def law(points):
    return Law(np.atleast_2d(np.array([*points], float).reshape(len(points), -1)), np.array([*points.values()]))


def loss(sums, sigma, with_it, without):
    """log P/Q of the sums, block by block."""
    width = with_it.means.shape[1]
    blocks = sums.reshape(len(sums), -1, 1, width)
    density = lambda of: logsumexp(-((blocks - of.means) ** 2).sum(-1) / (2 * sigma**2), b=of.weights, axis=-1)
    return (density(with_it) - density(without)).sum(-1)


class Case(NamedTuple):
    """The plan and data with a record, those without it, and the laws of a block for both."""

    plan: Plan
    data: list
    other_plan: Plan
    other_data: list
    with_it: Law
    without: Law
    more: dict | None = None


def plan_of(size, steps, noise_multiplier, /, **more):
    return Plan(target_delta=DELTA, dataset_size=size, steps=steps, noise_multiplier=noise_multiplier, **more)


def allocation(steps=8, noise=0.7, **more):
    plan = plan_of(3, steps, noise, sampling="random_allocation", slots=4)
    slots = {tuple(row): 0.25 for row in np.eye(4)}
    return Case(plan, [1, 0, 0], plan, [0, 0, 0], law(slots), law({(0.0,) * 4: 1.0}), more)


def capped(size=10, q=0.9, cap=2, noise=1.4, steps=2, ignored=False):
    """A case where the other records are -1 and the record takes the place of one of them."""
    make = lambda n: plan_of(n, steps, noise, sampling="truncated_poisson", sampling_probability=q, cap=cap)
    with_it, without = {}, {}
    room = size if ignored else cap
    for others in range(size):
        chance = comb(size - 1, others) * q**others * (1 - q) ** (size - 1 - others)
        alone = -min(others, room)
        without[alone] = without.get(alone, 0.0) + chance
        kept = q * min(1.0, room / (others + 1))  # drawn, and not cut off
        together = 1 - min(others, room - 1)
        for place, share in ((alone, chance * (1 - kept)), (together, chance * kept)):
            with_it[place] = with_it.get(place, 0.0) + share
    return Case(make(size), [1] + [-1] * (size - 1), make(size - 1), [-1] * (size - 1), law(with_it), law(without))


def without_replacement():
    make = lambda n: plan_of(n, 3, 2.0, sampling="without_replacement", expected_batch_size=2)
    return Case(make(6), [1] + [-1] * 5, make(5), [-1] * 5, law({-2: 2 / 3, 0: 1 / 3}), law({-2: 1.0}))


def fixed():
    plan = plan_of(4, 2, 0.7, sampling="fixed_batches", expected_batch_size=2)
    with_it, without = law({(0, -2): 0.5, (-2, 0): 0.5}), law({(-1, -2): 0.5, (-2, -1): 0.5})
    return Case(plan, [1, -1, -1, -1], plan, [0, -1, -1, -1], with_it, without)


def users(length=1):
    """A case of three users, of whom the first has three examples, which together move the sum by `length` if drawn."""
    plan = plan_of(3, 3, 1.0, sampling_probability=0.5, unit="user")
    with_it = law({0: 0.5, length: 0.5})
    more = {"users": [0, 0, 0, 1, 2], "most": 3}
    return Case(plan, [5, 5, 5, 0, 0], plan, [0] * 5, with_it, law({0: 1.0}), more)


def poisson():
    plan = plan_of(3, 3, 1.0, sampling_probability=0.5)
    return Case(plan, [1, 0, 0], plan, [0, 0, 0], law({0: 0.5, 1: 0.5}), law({0: 1.0}))


def cyclic(sigma=1.0):
    """A case whose record, of group 0, is drawn in each pass with probability 0.5 and then adds a column of C."""
    more = {"sampling": "cyclic_poisson", "sampling_probability": 0.5, "groups": 3}
    plan = plan_of(3, 9, sigma, noise=strategies.Banded(3, 9), **more)
    block = of_matrix(plan.noise)[:3, 0]
    with_it = law({tuple(block): 0.5, (0.0,) * 3: 0.5})
    return Case(plan, [1, 0, 0], plan, [0, 0, 0], with_it, law({(0.0,) * 3: 1.0}))


def found(case, seed, mesh=None, sigma=None):
    """(lower bound, claim) of a case.  sigma : the noise that the attack expects, by default the plan's."""
    claimed = float(case.plan.epsilon.upper)
    sums = [
        noisy_sums(plan, data, RUNS, seed + place, mesh=mesh, **case.more or {})
        for place, (plan, data) in enumerate([(case.other_plan, case.other_data), (case.plan, case.data)])
    ]
    sigma = sigma or case.plan.noise_multiplier
    absent, present = (loss(each, sigma, case.with_it, case.without) for each in sums)
    audited = from_scores(absent, present, delta=DELTA, confidence=0.999, thresholds=claimed * np.array([0.9, -0.9]))
    return audited.epsilon, claimed


CASES = {
    "poisson": poisson,
    "random_allocation": allocation,
    "truncated_poisson": capped,
    "without_replacement": without_replacement,
    "fixed_batches": fixed,
    "users": users,
    "cyclic_poisson": cyclic,
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", CASES)
def test_the_real_step_leaks_what_is_claimed_and_no_more(rule):
    epsilon, claimed = found(CASES[rule](), 1)
    assert 0.8 * claimed < epsilon <= claimed


@pytest.mark.slow
def test_one_allocation_for_all_rounds_is_caught():
    case = allocation(steps=24, noise=1.5, one_round_key=True)
    together = Law(np.tile(case.with_it.means, 6), case.with_it.weights)
    epsilon, claimed = found(case._replace(with_it=together, without=law({(0.0,) * 24: 1.0})), 2)
    assert epsilon > 1.05 * claimed


@pytest.mark.slow
def test_a_cap_that_is_ignored_is_caught(monkeypatch):
    """The cap keeps one of ten records.  Without it about nine are kept, and nearly always the audited record."""
    monkeypatch.setattr(sampler, "truncated_poisson", lambda key, size, rate, cap: sampler.poisson(key, size, rate))
    epsilon, claimed = found(capped(cap=1, noise=2.0, steps=4, ignored=True), 3)
    assert epsilon > 1.2 * claimed


@pytest.mark.slow
def test_the_first_of_a_sample_in_place_of_a_uniform_subset_is_caught(monkeypatch):
    def first(key, size, rate, cap):
        drawn = sampler.poisson(key, size, rate)
        return sampler.Selection(drawn.indices[:cap], jnp.minimum(drawn.count, cap))

    monkeypatch.setattr(sampler, "truncated_poisson", first)
    case = capped(cap=1, noise=1.5, steps=4)
    epsilon, claimed = found(case._replace(with_it=law({1: 0.9, -1: 0.1})), 4)
    assert epsilon > 1.2 * claimed


@pytest.mark.slow
def test_users_whose_examples_are_clipped_one_by_one_are_caught(monkeypatch):
    def split(loss, params, members, mask, clip_norm, method, has_aux):
        examples, weights = members[0]
        there = jnp.repeat(mask, 3) & (weights.ravel() > 0)
        summed = clipped_sum(linear, params, examples.reshape(-1, 1), there)
        return summed, clipped_sum(loss, params, members, mask, clip_norm, method, has_aux)[1]

    monkeypatch.setattr(step_function, "clipped_sum", split)
    epsilon, claimed = found(users(length=3), 5)
    assert epsilon > 1.2 * claimed


@pytest.mark.slow
def test_correlated_noise_that_is_too_small_is_caught(monkeypatch):
    real = Plan.taps
    less = lambda self, step: real(self, step)._replace(own=0.7 * real(self, step).own)
    monkeypatch.setattr(Plan, "taps", less)
    epsilon, claimed = found(cyclic(), 6, sigma=0.7)
    assert epsilon > 1.1 * claimed


@pytest.mark.slow
def test_groups_that_change_are_caught(monkeypatch):
    """A record in two groups takes part in twice as many steps."""

    def both(key, group_key, size, rate, number, position):
        return sampler.poisson(key, size, rate)

    monkeypatch.setattr(sampler, "cyclic_poisson", both)
    case = cyclic(2.0)
    columns = of_matrix(case.plan.noise)
    picked = [np.array(x) for x in np.ndindex(*(2,) * 9)]
    with_it = Law(np.array([columns @ x for x in picked]), np.full(len(picked), 0.5**9))
    epsilon, claimed = found(case._replace(with_it=with_it, without=law({(0.0,) * 9: 1.0})), 7)
    assert epsilon > 1.2 * claimed
