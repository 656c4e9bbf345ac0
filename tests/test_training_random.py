"""Randomness of training: the generator against RFC 8439, the noise against mpmath, the samplers' laws."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from helpers import refusal
from scipy import stats

from jaxacct.core import chacha
from jaxacct.training import noisy_mean
from jaxacct.training.sampling import sampler
from jaxacct.training.step import noise

RARE = 1e-6
"""Every statistical test here has fixed seeds and would fail by chance less often than this."""


def key(number):
    return jax.random.key(number, impl=chacha.CHACHA20)


def taken(chosen):
    """The examples of a selection, as a list."""
    return np.asarray(chosen.indices)[: int(chosen.count)].tolist()


def words(text):
    return np.frombuffer(bytes.fromhex(text.replace(" ", "").replace(":", "")), "<u4")


# ChaCha20 [RFC 8439]: section 2.3.2 and appendix A.1, vectors 1 to 5

VECTORS = [
    (
        bytes(range(32)).hex(),
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2"
        "b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a37"
        "6a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d5"
        "31ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a8eca00bbb4a73bdad192b5c42f73f2fd"
        "4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00" * 32,
        0,
        "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c78a970e0e955c14f3a88e741b97c286f7"
        "5f8fc299e8148362fa198a39531bed6d",
    ),
]


@pytest.mark.parametrize("secret, counter, nonce, expected", VECTORS)
def test_rfc_8439_block(secret, counter, nonce, expected):
    out = jax.jit(chacha.block)(words(secret), np.array([counter], np.uint32), words(nonce))
    assert np.asarray(out).astype("<u4").tobytes().hex() == expected


def test_bits_are_the_keystream_of_the_rfc():
    zero = chacha.key_from_bytes(bytes(32))
    stream = VECTORS[1][3] + VECTORS[2][3]
    assert np.asarray(jax.random.bits(zero, (32,))).astype("<u4").tobytes().hex() == stream
    assert np.asarray(jax.random.bits(zero, (99,), "uint8")).tobytes().hex() == stream[: 2 * 99]
    assert np.asarray(jax.random.bits(zero, (7,), "uint16")).astype("<u2").tobytes().hex() == stream[:28]
    with jax.enable_x64():
        assert np.asarray(jax.random.bits(zero, (5,), "uint64")).astype("<u8").tobytes().hex() == stream[:80]


def test_keys_that_come_from_a_key_differ():
    root = chacha.fresh_key()
    keys = [root, *jax.random.split(root, 5), *(jax.random.fold_in(root, i) for i in range(5)), chacha.fresh_key()]
    keys += [noise.stream(root, p, s) for p in (1, 2, 3, 4) for s in (0, 1)]
    assert len({np.asarray(jax.random.key_data(k)).tobytes() for k in keys}) == len(keys)
    seeds = [jax.random.key(s, impl=chacha.CHACHA20) for s in (0, 1, 2**31)]
    with jax.enable_x64():
        seeds += [jax.random.key(s, impl=chacha.CHACHA20) for s in (2**32, 2**33)]
    assert len({np.asarray(jax.random.key_data(k)).tobytes() for k in seeds}) == len(seeds)


def test_generator_serves_the_rest_of_jax():
    normal = jax.vmap(lambda k: jax.random.normal(k, (1000,)))
    both = jax.jit(lambda k: (normal(jax.random.split(k, 4)), jax.random.permutation(k, 50)))
    draws, order = both(key(1))
    assert stats.kstest(np.asarray(draws).ravel(), "norm").pvalue > RARE
    assert sorted(order.tolist()) == list(range(50))


def test_keys_must_be_32_bytes():
    assert "32 bytes" in refusal(chacha.key_from_bytes, b"short")


# Noise


@pytest.mark.parametrize("dtype, places", [("float32", 2e-6), ("float64", 1e-13)])
def test_normal_from_bits_against_mpmath(dtype, places):
    edges = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    rows = [(h, l, t) for h in edges for l in (0, 12345, 2**32 - 1) for t in (0, 3, 2**31 + 2, 2**32 - 1, 77777777)]
    rows += np.random.default_rng(0).integers(0, 2**32, (60, 3)).tolist()
    high, low, turn = (np.array(c, np.uint32) for c in zip(*rows, strict=True))
    with jax.enable_x64():
        got = np.stack([np.asarray(x) for x in jax.jit(noise.from_bits, static_argnums=3)(high, low, turn, dtype)])
    assert got.dtype == dtype and np.abs(got).max() > 9.4  # the farthest draw there is
    mpmath.mp.dps = 40
    for column, (h, l, t) in enumerate(rows):
        u = (mpmath.mpf(h) * 2**32 + l + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** 64
        radius = mpmath.sqrt(-2 * mpmath.log(u))
        angle = (mpmath.mpf(t >> 2) + mpmath.mpf(1) / 2) / 2**30 * mpmath.pi / 2
        for row, (value, bit) in enumerate([(mpmath.sin(angle), t & 1), (mpmath.cos(angle), t & 2)]):
            exact = radius * value * (-1 if bit else 1)
            assert abs(got[row, column] - exact) <= places * abs(exact)


def test_normal_has_the_law_and_the_tail():
    draws = np.asarray(jax.jit(noise.add)(key(3), jnp.zeros((400, 501)), 1.0))
    assert stats.kstest(draws.ravel(), "norm").pvalue > RARE
    assert abs(np.corrcoef(draws[:, ::2].ravel(), np.roll(draws, 1, 0)[:, ::2].ravel())[0, 1]) < 5 / math.sqrt(1e5)


def test_noise_on_a_tree():
    tree = {"a": np.full((300, 7), 5, np.float32), "b": np.zeros(501, jnp.bfloat16), "c": np.float32(0)}
    noisy = jax.jit(noise.add)(key(4), tree, 3.0)
    assert noisy["b"].dtype == jnp.float32 and noisy["c"].shape == ()
    draws = np.concatenate([(np.asarray(noisy[k], np.float64) - (5 if k == "a" else 0)).ravel() / 3 for k in "abc"])
    assert stats.kstest(draws, "norm").pvalue > RARE
    assert len(np.unique(np.round(draws, 4))) > 2000  # no leaf repeats another's noise


ODD_SIZES = [(1,), (), (31,), (0,), (32,), (33,), (7, 9), (1,), (257, 3), (64,)]
"""Shapes of leaves around whole units, empty ones among them."""


@pytest.fixture
def small_pieces(monkeypatch):
    """Let noise be drawn in several pieces, the last of them not full, instead of in one piece."""
    monkeypatch.setattr(noise, "_PIECE_ON_CPU", 5)


@pytest.fixture
def columns(monkeypatch):
    """All (counter, place, third) that noise asks the generator for, as they come."""
    seen, real = [], noise.noise_words

    def noted(words, *triple):
        jax.debug.callback(lambda *each: seen.extend(zip(*(x.tolist() for x in each), strict=True)), *triple)
        return real(words, *triple)

    monkeypatch.setattr(noise, "noise_words", noted)
    return seen


def zeros(shapes, dtype=jnp.float32):
    return [np.zeros(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("pieces", [pytest.param("one", marks=pytest.mark.slow), "small_pieces"])
def test_no_column_of_the_keystream_is_used_twice(pieces, request, columns):
    if pieces != "one":
        request.getfixturevalue(pieces)
    with jax.enable_x64():  # two dtypes are drawn one after the other
        tree = zeros(ODD_SIZES[1:4]) + zeros(ODD_SIZES[3:6], jnp.float64) + zeros(ODD_SIZES[-2:])
        jax.block_until_ready(compiled()(key(40), tree))
        jax.effects_barrier()
    of_leaves = [triple for triple in columns if triple[1] < len(tree)]  # the others fill a piece up, and are dropped
    assert len(set(of_leaves)) == len(of_leaves)
    wanted = {(u, place, t) for place, leaf in enumerate(tree) for u in range(-(-leaf.size // 32)) for t in range(3)}
    assert set(of_leaves) == wanted


def compiled():
    """`noise.add` traced anew, whatever was traced before a fixture changed it."""
    return jax.jit(lambda secret, tree: noise.add(secret, tree, 1.0))


def draws_of_a_leaf(words, place, size):
    """The draws of one leaf, from the RFC's block function and the documented layout alone."""
    units = -(-size // 32)
    most = np.arange(25)  # more than any leaf here has: one shape for all
    blocks = [chacha.host_block(words, most, (place, third, 4)) for third in range(3)]
    pairs = [np.asarray(each) for each in jax.jit(noise.from_bits, static_argnums=3)(*blocks, "float32")]
    return np.array([pairs[p // units >= 16][p % units, p // units % 16] for p in range(size)])


@pytest.mark.parametrize("pieces", [pytest.param("one", marks=pytest.mark.slow), "small_pieces"])
def test_a_leaf_gets_the_noise_of_its_place_and_size_whatever_the_others_are(pieces, request):
    if pieces != "one":
        request.getfixturevalue(pieces)
    secret = key(41)
    alone = [
        draws_of_a_leaf(np.asarray(jax.random.key_data(secret)), i, math.prod(shape))
        for i, shape in enumerate(ODD_SIZES)
    ]
    others = [shape if i % 2 else (45,) for i, shape in enumerate(ODD_SIZES)]
    for shapes in (ODD_SIZES, others):
        noisy = compiled()(secret, zeros(shapes))
        for got, shape, draws, own in zip(noisy, shapes, alone, ODD_SIZES, strict=True):
            assert got.shape == shape
            if shape == own:
                np.testing.assert_allclose(np.ravel(got), draws, rtol=2e-6)


def test_noise_takes_all_bits_of_a_key_and_only_them():
    """No block of the noise is a block of another purpose: the nonces end with different words."""
    words = chacha.key_words(key(42))
    noise_blocks = {tuple(c) for c in np.asarray(chacha.noise_words(words, *(np.arange(4, dtype=np.uint32),) * 3)).T}
    other = {tuple(r) for p in range(4) for r in chacha.host_block(np.asarray(words), np.arange(4), (0, 0, p))}
    assert len(noise_blocks) == 4 and len(other) == 16 and not noise_blocks & other
    draw = jax.jit(
        jax.vmap(lambda data: noise.add(jax.random.wrap_key_data(data, impl=chacha.CHACHA20), jnp.zeros(32), 1.0))
    )
    changed = np.asarray(words) ^ np.eye(9, 8, dtype=np.uint32) * np.uint32(2**31)  # row k: word k's bit; row 8: none
    assert len(np.unique(draw(changed))) == 9 * 32


def test_a_tree_in_several_pieces_has_the_law(small_pieces):
    drawn = compiled()(key(43), zeros([(1711,)] * 30))
    values = np.stack(drawn)
    assert stats.kstest(values.ravel(), "norm").pvalue > RARE
    assert len(np.unique(values)) > 0.999 * values.size  # float32 has 24 bits, so a few draws tie
    between = np.corrcoef(values)[np.triu_indices(30, 1)] * math.sqrt(1711)
    assert abs(between).max() < 6 and abs(between.var() - 1) < 0.5


def test_a_tree_without_entries_has_no_noise():
    assert noise.add(key(44), {}, 1.0) == {}
    assert compiled()(key(44), zeros([(0,), (3, 0)]))[1].shape == (3, 0)


# Samplers


@pytest.mark.parametrize("q", [0.0, 1e-30, 2.0**-64, 1e-5, 0.01, 1 / 3, 0.5, 1 - 2.0**-53, 1.0])
def test_threshold_is_q_rounded_down(q):
    certain, high, low = (int(x) for x in sampler.threshold(q))
    realised = Fraction(certain * 2**64 + high * 2**32 + low, 2**64)
    assert 0 <= Fraction(q) - realised < Fraction(1, 2**64)
    if q >= 2.0**-11:
        assert realised == Fraction(q)


def test_poisson_compares_all_64_bits():
    """Against Python integers, at thresholds next to the drawn words."""
    n = 64
    bits = np.asarray(jax.random.bits(key(5), (2, n)), np.uint64)
    drawn = [int(h) * 2**32 + int(l) for h, l in bits.T]
    draw = jax.jit(lambda limit: sampler.poisson(key(5), n, limit))
    for at in (drawn[7], drawn[7] + 1, drawn[20] + 1, 0, 2**64 - 1):
        limit = np.array([0, *divmod(at, 2**32)], np.uint32)
        chosen = draw(limit)
        assert taken(chosen) == [i for i in range(n) if drawn[i] < at]


def chi_square(counts, expected):
    """p-value of counts, with cells pooled until ten are expected in each."""
    pooled, seen, want = [], 0.0, 0.0
    for c, e in zip(counts, expected, strict=True):
        seen, want = seen + c, want + e
        if want >= 10:
            pooled.append((seen, want))
            seen = want = 0.0
    pooled[-1] = (pooled[-1][0] + seen, pooled[-1][1] + want)
    seen, want = np.array(pooled).T
    return stats.chi2.sf(((seen - want) ** 2 / want).sum(), len(pooled) - 1)


@pytest.fixture(scope="module")
def poisson_draws():
    """6,000 Poisson samples of 24 examples at q = 0.3, as a matrix of bits."""

    def one(k):
        chosen = sampler.poisson(k, 24, 0.3)
        live = jnp.arange(24) < chosen.count
        return jnp.zeros(24, bool).at[jnp.where(live, chosen.indices, 24)].set(True, mode="drop")

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(key(6), 6_000)))


def test_poisson_inclusion_and_independence(poisson_draws):
    draws, n = poisson_draws, len(poisson_draws)
    both = draws.T.astype(int) @ draws.astype(int)
    for counts, probability in ((np.diag(both), 0.3), (both[np.tril_indices(24, -1)], 0.09)):
        tails = np.minimum(stats.binom.cdf(counts, n, probability), stats.binom.sf(counts - 1, n, probability))
        assert 2 * tails.min() > RARE / counts.size


def test_poisson_batch_size_is_binomial(poisson_draws):
    counts = np.bincount(poisson_draws.sum(1), minlength=25)
    assert chi_square(counts, len(poisson_draws) * stats.binom.pmf(np.arange(25), 24, 0.3)) > RARE


def test_one_compilation_for_a_hundred_draws():
    traces = []

    @jax.jit
    def total(k, step, limit):
        traces.append(1)
        chosen = sampler.poisson(noise.stream(k, noise.SAMPLING, step), 400, limit)
        body = lambda carry, indices, mask: (carry[0] + jnp.sum(jnp.where(mask, indices, 0)), carry[1] + 1)
        return chosen, *sampler.over_micro_batches(chosen, 32, body, (jnp.int32(0), jnp.int32(0)))

    root, sizes = key(7), set()
    for step in range(100):
        q = [0.0, 0.01, 0.2, 0.9, 1.0][step % 5]
        chosen, sum_, rounds = total(root, step, sampler.threshold(q))
        count = int(chosen.count)
        assert int(rounds) == -(-count // 32)
        assert int(sum_) == sum(taken(chosen))
        sizes.add(count)
    assert len(traces) == 1 and total._cache_size() == 1
    assert {0, 400} <= sizes and len(sizes) > 20


def test_permutation_is_uniform():
    orders = np.asarray(jax.jit(jax.vmap(lambda k: sampler.permutation(k, 4)))(jax.random.split(key(8), 2_400)))
    codes = orders @ np.array([64, 16, 4, 1])
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24 and chi_square(counts, np.full(24, 100.0)) > RARE


def test_permutation_draws_again_when_two_sort_keys_are_equal(monkeypatch):
    real, calls = jax.random.bits, []

    def tied(k, shape, dtype):
        calls.append(1)
        drawn = real(k, shape, dtype)
        return jnp.zeros_like(drawn) if len(calls) == 1 else drawn

    monkeypatch.setattr(jax.random, "bits", tied)
    found = jax.jit(lambda: sampler.permutation(key(9), 9))().tolist()
    assert sorted(found) == list(range(9)) != found and len(calls) > 1


def test_without_replacement_has_the_size_and_is_uniform():
    draw = jax.jit(jax.vmap(lambda k: sampler.without_replacement(k, 6, 2)))
    chosen = draw(jax.random.split(key(10), 3_000))
    assert set(chosen.count.tolist()) == {2}
    first = np.sort(np.asarray(chosen.indices)[:, :2], 1)
    counts = np.unique(first @ np.array([6, 1]), return_counts=True)[1]
    assert len(counts) == 15 and chi_square(counts, np.full(15, 200.0)) > RARE


def test_fixed_batches_take_every_example_once_an_epoch():
    draw = jax.jit(sampler.fixed_batches, static_argnums=1)
    for epoch in range(3):
        batches = [draw(noise.stream(key(11), noise.SAMPLING, epoch), 103, 20, p) for p in range(6)]
        assert [int(b.count) for b in batches] == [20] * 5 + [3]
        order = [i for b in batches for i in taken(b)]
        assert sorted(order) == list(range(103)) and order != sorted(order)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: sampler.poisson(key(0), 0, 0.5), "dataset_size = 0 must be an integer from 1"),
        (lambda: sampler.poisson(key(0), 10, 1.5), "sampling_probability = 1.5 must be"),
        (lambda: sampler.poisson(jax.random.key(0), 4, 0.5), "key has 64 bits"),
        (lambda: sampler.fixed_batches(jax.random.key(0), 4, 2, 0), "key has 64 bits"),
        (lambda: jax.jit(noise.add)(jax.random.key(0), {"w": jnp.zeros(2)}, 1.0), "key has 64 bits"),
        (lambda: noisy_mean(jax.random.PRNGKey(0), 1.0, 1.0, 10.0), "must be a typed JAX key"),
        (
            lambda: sampler.over_micro_batches(sampler.Selection(np.arange(4), 4), 2.5, max, 0),
            "micro_batch = 2.5 must be",
        ),
    ],
)
def test_bad_sampling_is_refused(call, text):
    assert text in refusal(call)
