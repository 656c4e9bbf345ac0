"""The host draws the records that the device draws, from the same keys, index by index; draws that repeat included."""

import hashlib
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct.core import chacha
from jaxacct.core.chacha import CHACHA20, block, host_bits, host_block, host_split
from jaxacct.training.run import program
from jaxacct.training.sampling import sampler
from jaxacct.training.sampling.sampler import grouped, host_of_users, of_users, user_data
from jaxacct.training.step import noise
from jaxacct.training.step.step_function import Numbers, StepRule, draw, draw_on_host

WORDS, OTHERS = np.random.default_rng(5).integers(0, 2**32, (2, 12, 8), dtype=np.uint32)


def key_of(words):
    return jax.random.wrap_key_data(jnp.asarray(words), impl=CHACHA20)


def rule_of(sampling, cap=None):
    return StepRule(None, None, sampling, 4, "auto", None, cap)


def numbers_of(q=0.0, size=1, position=0):
    return Numbers(sampler.threshold(q), np.int32(size), np.int32(position), 1.0, 1.0, 0.0)


def on_both(rule, size, cases):
    """Yield (indices of the device, indices of the host) for each case, from one compiled program."""
    one = lambda words, pass_words, now: draw(rule, key_of(words), key_of(pass_words), size, now)
    run = jax.jit(one)
    for words, pass_words, now in cases:
        found = run(words, pass_words, now)
        yield np.asarray(found.indices)[: int(found.count)], draw_on_host(rule, words, pass_words, size, now)


def test_the_keystream_is_the_devices():
    counter = np.array([0, 1, 7, 2**32 - 1], np.uint32)
    np.testing.assert_array_equal(host_block(WORDS[0], counter, (1, 2, 3)), block(WORDS[0], counter, [1, 2, 3]))
    key = key_of(WORDS[0])
    np.testing.assert_array_equal(host_bits(WORDS[0], 23, 37), np.asarray(jax.random.bits(key, (60,), jnp.uint32))[37:])
    np.testing.assert_array_equal(np.array(host_split(WORDS[0])), jax.random.key_data(jax.random.split(key)))
    np.testing.assert_array_equal(noise.host_stream(WORDS[0], 7), jax.random.key_data(noise.stream(key, 7)))


def test_a_long_keystream_is_made_in_pieces(monkeypatch):
    whole = host_bits(WORDS[0], 100)
    monkeypatch.setattr(chacha, "_HOST_BLOCKS", 3)
    np.testing.assert_array_equal(host_bits(WORDS[0], 100), whole)


def test_a_sample_of_many_records_is_drawn_in_pieces(monkeypatch):
    """Its memory is that of a piece, however many records there are."""
    now = numbers_of(1e-3)
    tracemalloc.start()
    try:
        whole = draw_on_host(rule_of("poisson"), WORDS[0], OTHERS[0], 2**22 + 5, now)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 14e6 and 3500 < whole.size < 4900  # the words of all records take 17e6 bytes
    monkeypatch.setattr(sampler, "_HOST_PIECE", 2**24)
    np.testing.assert_array_equal(draw_on_host(rule_of("poisson"), WORDS[0], OTHERS[0], 2**22 + 5, now), whole)


RULES = {
    "poisson": (rule_of("poisson"), [{"q": q} for q in (0.0, 0.1, 0.7, 1.0)]),
    "truncated_poisson": (rule_of("truncated_poisson", 20), [{"q": q} for q in (0.0, 0.1, 0.7, 1.0)]),
    "without_replacement": (rule_of("without_replacement"), [{"size": size} for size in (1, 30, 101, 200)]),
    "fixed_batches": (rule_of("fixed_batches"), [{"size": 30, "position": p} for p in range(5)]),
    "random_allocation": (rule_of("random_allocation"), [{"size": 4, "position": p} for p in range(4)]),
    "cyclic_poisson": (rule_of("cyclic_poisson"), [{"q": 0.7, "size": 4, "position": p} for p in range(4)]),
}


SLOW = {"without_replacement", "fixed_batches"}
"""Rules with the permutation of truncated samples, which the quick tests draw."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RULES])
def test_every_rule_draws_the_same_records(name):
    rule, settings = RULES[name]
    pairs = list(zip(WORDS, OTHERS, strict=True))
    cases = [(*pair, numbers_of(**more)) for more in settings for pair in pairs]
    sizes = set()
    for device, host in on_both(rule, 101, cases):
        np.testing.assert_array_equal(device, host)
        sizes.add(len(host))
    assert len(sizes) > 1 and max(sizes) > 0


def test_high_words_that_are_equal_are_decided_by_the_low_ones():
    """The rate's threshold has the high word of record 40; a random word equals it once in 2^32 draws."""
    key = noise.host_stream(WORDS[0], noise.SAMPLING)
    high, low = host_bits(key, 2 * 101).reshape(2, 101)
    counts = []
    for more in (0, 1):
        now = numbers_of()._replace(threshold=np.array([0, high[40], low[40] + more], np.uint32))
        ((device, host),) = on_both(rule_of("poisson"), 101, [(WORDS[0], OTHERS[0], now)])
        np.testing.assert_array_equal(device, host)
        counts.append(len(host))
    assert counts[1] == counts[0] + 1


@pytest.mark.parametrize("number", [1, 3, 2**31 + 1])
def test_slots_that_are_drawn_again_are_the_same(number):
    """The range of 2^31 + 1 slots fits only once into 2^32, so that about half of the words are drawn again."""
    _, now = host_split(WORDS[1])
    assert (host_bits(now, 101) > 2**31).sum() > 20
    device = jax.jit(sampler.slots, static_argnums=1)(key_of(WORDS[1]), 101, np.uint32(number))
    np.testing.assert_array_equal(device, sampler.host_slots(WORDS[1], 101, number))


@pytest.mark.parametrize("size", [5, pytest.param(7, marks=pytest.mark.slow)])
def test_permutations_with_ties_are_drawn_again_alike(monkeypatch, size):
    """Sort keys of 2 + 1 bits, among which ties are the rule."""
    rounds = []
    real, real_split = host_bits, host_split
    few = lambda high_low: jnp.stack([high_low[0] & 3, high_low[1] & 1])
    real_bits = jax.random.bits
    of_jax = types.SimpleNamespace(**vars(jax.random))
    of_jax.bits = lambda key, shape, dtype: few(real_bits(key, shape, dtype))
    monkeypatch.setattr(sampler, "jax", types.SimpleNamespace(random=of_jax, lax=jax.lax))
    monkeypatch.setattr(
        sampler, "host_bits", lambda key, count, first=0: np.asarray(few(real(key, count).reshape(2, -1))).reshape(-1)
    )
    monkeypatch.setattr(sampler, "host_split", lambda key: rounds.append(1) or real_split(key))
    permuted = jax.jit(lambda words: sampler.permutation(key_of(words), size))
    for words in WORDS[:10]:
        np.testing.assert_array_equal(permuted(words), sampler.host_permutation(words, size))
    assert len(rounds) > 20


def test_draws_are_what_they_were():
    """A saved run depends on them.  Where this changes, `_HOST` in run/program.py must change as well."""
    told = hashlib.sha256()
    for name, (rule, settings) in RULES.items():
        for more in settings:
            found = draw_on_host(rule, WORDS[0], OTHERS[0], 101, numbers_of(**more))
            told.update(f"{name} {found.tolist()}".encode())
    order, first, count = grouped(np.arange(70) % 8, 8, {(70,)})
    told.update(
        str(
            host_of_users(noise.host_stream(WORDS[0], noise.EXAMPLES), order, first, count, np.arange(8), 3)[0].tolist()
        ).encode()
    )
    assert (program._HOST, told.hexdigest()) == (
        b"host 1",
        "57e18554e18a172c1c04cc155d923f97be159dc162cfdef472c097f2a3e3fd3d",
    )


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(20, marks=pytest.mark.slow)])
def test_of_users_the_same_examples_are_taken(most):
    ids = np.random.default_rng(2).integers(0, 8, 70) * 2  # users of odd number have no example
    order, first, count = grouped(ids, 16, {(70,)})
    data = user_data(jnp.arange(70), ids, 16)
    chosen = np.array([4, 0, 3, 15, 2, 14])
    run = jax.jit(lambda key: of_users(noise.stream(key, noise.EXAMPLES), data, chosen, most))
    for words in WORDS[:5]:
        (examples, weights), has_any = run(key_of(words))
        has_any = np.asarray(has_any)
        numbers, shares = host_of_users(
            noise.host_stream(words, noise.EXAMPLES), order, first, count, chosen[has_any], most
        )
        np.testing.assert_array_equal(has_any, count[chosen] > 0)
        np.testing.assert_array_equal(numbers, np.asarray(examples)[has_any])
        np.testing.assert_array_equal(shares, np.asarray(weights)[has_any])
