"""Who is in a batch: slots of random allocation, capped Poisson samples, and what the trainer's real steps draw.

Statistical tests use fixed keys; each would fail for fresh ones with probability below RARE, if the draws are right.
"""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from scipy import stats
from training_runs import KEY, drawing_trainer, linear, sgd

from jaxacct.core.chacha import key_from_bytes
from jaxacct.training import Plan, Trainer
from jaxacct.training.sampling import sampler

RARE = 1e-6


def key(number):
    return key_from_bytes(bytes([number]) * 32)


def chi_square(counts, expected):
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def taken(selection):
    return np.asarray(selection.indices)[: int(selection.count)].tolist()


def batches(trainer):
    """What each step of the trainer draws: a row for each step, a column for each record."""
    data = np.eye(trainer.plan.dataset_size, dtype=np.float32)
    seen = [np.zeros(len(data))]
    look = lambda state: seen.append(np.asarray(state.params))
    trainer.fit(trainer.init(jnp.zeros(len(data)), KEY), data, callbacks=[look], progress=False)
    return np.round(-np.diff(seen, axis=0)).astype(int)


def test_words_beyond_the_last_whole_multiple_are_drawn_again(monkeypatch):
    """The last word below the limit gives the last slot.  Larger words are drawn again: slots are exactly uniform."""
    answers, form = [], jax.ShapeDtypeStruct((5,), np.uint32)
    drawn = lambda words: np.array(answers.pop(0), np.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda now, *_: jax.pure_callback(drawn, form, jax.random.key_data(now)))
    draw = jax.jit(lambda number: sampler.slots(key(1), 5, number))
    for number in (1, 2, 3, 10, 12345, 3 * 2**29 + 1, 10**9):
        limit = 2**32 - 2**32 % number
        words = [0, number - 1, limit - 1, min(limit, 2**32 - 1), 2**32 - 1]
        answers[:] = words, [7 % number] * 5
        expected = [word % number if word < limit else 7 % number for word in words]
        assert draw(np.uint32(number)).tolist() == expected and expected[:3] == [0, number - 1, number - 1]


def test_slots_are_uniform_and_those_of_two_records_or_rounds_independent():
    draw = jax.jit(jax.vmap(lambda k: sampler.slots(k, 3, 5)))
    found = np.asarray(draw(jax.random.split(key(2), 5_000)))
    for record in range(3):
        assert chi_square(np.bincount(found[:, record], minlength=5), np.full(5, 1000.0)) > RARE
    for one, other in itertools.combinations(range(3), 2):
        assert chi_square(np.bincount(5 * found[:, one] + found[:, other], minlength=25), np.full(25, 200.0)) > RARE
    all_three = np.bincount(found @ np.array([25, 5, 1]), minlength=125)
    assert chi_square(all_three, np.full(125, 40.0)) > RARE
    rounds = np.bincount(5 * found[:-1:2, 0] + found[1::2, 0], minlength=25)
    assert chi_square(rounds, np.full(25, 100.0)) > RARE


def test_a_round_holds_every_record_once():
    draw = jax.jit(sampler.random_allocation, static_argnums=1)
    for each in range(3):
        of_round = [taken(draw(key(each), 101, 7, p)) for p in range(7)]
        assert sorted(itertools.chain(*of_round)) == list(range(101))
        assert all(batch == sorted(batch) for batch in of_round) and len({len(batch) for batch in of_round}) > 1


def law_of_capped(size, q, cap):
    """{subset: probability}, by enumeration of all draws and of all subsets that may be kept of a draw."""
    law = {}
    for drawn in itertools.product((False, True), repeat=size):
        members = [i for i in range(size) if drawn[i]]
        chance = q ** len(members) * (1 - q) ** (size - len(members))
        kept = list(itertools.combinations(members, min(cap, len(members))))
        for subset in kept:
            law[subset] = law.get(subset, 0.0) + chance / len(kept)
    return law


def capped_counts(draw, size, cap, law, runs=6_000):
    chosen = jax.jit(jax.vmap(lambda k: draw(k, size, 0.6, cap)))(jax.random.split(key(3), runs))
    indices, count = np.asarray(chosen.indices), np.asarray(chosen.count)
    found = [tuple(sorted(row[:number])) for row, number in zip(indices.tolist(), count, strict=True)]
    known = list(law)
    return np.bincount([known.index(subset) for subset in found], minlength=len(known)), runs


@pytest.mark.parametrize("cap", [2, *(pytest.param(cap, marks=pytest.mark.slow) for cap in (1, 4))])
def test_a_capped_sample_has_its_law(cap):
    law = law_of_capped(4, 0.6, cap)
    counts, runs = capped_counts(sampler.truncated_poisson, 4, cap, law)
    assert chi_square(counts, runs * np.array([*law.values()])) > RARE


def test_the_first_of_a_sample_are_no_uniform_subset():
    """The test above would fail for a sampler that keeps the first `cap` records drawn."""

    def first(k, size, q, cap):
        drawn = sampler.poisson(k, size, q)
        return sampler.Selection(drawn.indices[:cap], jnp.minimum(drawn.count, cap))

    law = law_of_capped(4, 0.6, 2)
    counts, runs = capped_counts(first, 4, 2, law)
    assert chi_square(counts, runs * np.array([*law.values()])) < 1e-30


def test_a_capped_batch_does_the_same_work_whatever_was_drawn():
    count = lambda calls, indices, mask: calls + 1
    inside = lambda total, indices, mask: total + mask.sum()

    @jax.jit
    def run(*drawn):
        over = lambda body, **more: sampler.over_micro_batches(sampler.Selection(*drawn), 3, body, 0, **more)
        return over(count), over(count, all_places=True), over(inside, all_places=True)

    assert [*map(int, run(np.zeros(8, np.int32), np.int32(1)))] == [1, 3, 1]


def test_steps_allocate_every_record_once_a_round_and_afresh():
    plan = Plan(
        target_delta=1e-5, dataset_size=20, slots=4, noise_multiplier=1e-6, steps=11, sampling="random_allocation"
    )
    assert plan.expected_batch_size == 5.0 and plan.sampling_probability == 0.25
    found = batches(drawing_trainer(plan))
    for first in (0, 4):
        assert (found[first : first + 4].sum(0) == 1).all()
    assert found[8:].sum(0).max() == 1 and found[8:].sum() < 20  # three of four slots
    assert (found[:4].argmax(0) != found[4:8].argmax(0)).any()
    assert len(set(found.sum(1).tolist())) > 1  # independent slots: batches differ in size


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_stay_within_the_cap(real):
    plan = Plan(
        target_delta=1e-5, dataset_size=20, sampling_probability=0.5, cap=10, noise_multiplier=1e-6, steps=30,
        sampling="truncated_poisson",
    )  # fmt: skip
    trained = lambda: Trainer(linear, sgd(plan.expected_batch_size), plan, 1.0, micro_batch=3)
    found = batches(trained() if real else drawing_trainer(plan))
    assert found.sum(1).max() == 10 and found.max() == 1 and found.sum(1).min() < 10
    assert found.sum(0).all()  # late records are drawn too; fresh keys would fail less than once in a million runs


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"slots": 4}, "slots = 4 needs sampling = 'random_allocation'"),
        ({"cap": 4}, "cap = 4 needs sampling = 'truncated_poisson'"),
        ({"slots": 4, "sampling": "random_allocation", "expected_batch_size": 3}, "both given; give one"),
        ({"slots": 2.5, "sampling": "random_allocation"}, "slots = 2.5 must be"),
        ({"cap": 0, "sampling": "truncated_poisson", "sampling_probability": 0.1}, "cap = 0 must be"),
        ({"unit": "person", "sampling_probability": 0.1}, "unit = 'person'"),
    ],
)
def test_bad_rules_are_refused(given, text):
    assert text in refusal(Plan, target_delta=1e-5, dataset_size=20, noise_multiplier=1.0, steps=3, **given)


@pytest.mark.parametrize("sampling", ["random_allocation", "truncated_poisson"])
def test_a_filter_is_refused_where_no_renyi_divergence_is_known(sampling):
    given = {"target_delta": 1e-5, "dataset_size": 60, "expected_batch_size": 15, "steps": 8, "target_epsilon": 5.0}
    assert "no finite Renyi divergence" in refusal(Plan, **given, sampling=sampling, data_dependent=True)


@pytest.mark.parametrize("rule", ["shuffled", "poisson_sampled", ""])
def test_an_unknown_rule_is_neither_drawn_nor_accounted_for(rule):
    """A rule that one place forgets is refused there; it is not taken for Poisson sampling."""
    from jaxacct.training.step import step_function
    from jaxacct.training.step.step_mechanisms import SAMPLING, single

    numbers = types.SimpleNamespace(threshold=sampler.threshold(0.5), size=2, position=0)
    unknown = types.SimpleNamespace(sampling=rule, cap=2)
    assert "has no accounting" in refusal(single, rule, 1.0, 0.1)
    assert "has no sampler" in refusal(step_function.draw, unknown, key(1), key(2), 8, numbers)
    words = np.zeros(8, np.uint32)
    assert "has no sampler" in refusal(step_function.draw_on_host, unknown, words, words, 8, numbers)
    for known in SAMPLING:
        assert single(known, 1.0, 0.25, cap=2, dataset_size=8)
