"""A loss through which one example can reach another is refused in one line; a loss that only seems to is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from jax._src.interpreters import batching
from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from layers_and_operations import centred

from jaxacct.training import fresh_key
from jaxacct.training.clipping.clipped_sum import clipped_sum
from jaxacct.training.clipping.examples_apart import _KNOWN_TO_MIX, LANE_BY_LANE
from jaxacct.training.run.evaluations import units

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
FLOAT = jax.ShapeDtypeStruct((3,), jnp.float32)


@jax.custom_vjp
def centred_backwards(x):
    return x


centred_backwards.defvjp(lambda x: (x, None), lambda _, g: (centred(g),))


@jax.custom_batching.sequential_vmap
def one_by_one(x):
    return 2 * x


def scanned(x):
    return jax.lax.scan(lambda carry, _: (centred(carry), None), x, None, length=2)[0]


def branched(x):
    return jax.lax.cond(x[0] > 0, jax.jit(centred), jnp.sin, x)


MIXED = {
    "jax.custom_batching.custom_vmap": [centred, one_by_one, centred_backwards, scanned, branched],
    "jax.pure_callback": [
        lambda x: jax.pure_callback(lambda v: v - v.mean(0), FLOAT, x, vmap_method="expand_dims"),
        lambda x: jax.pure_callback(lambda v: v, FLOAT, x, vmap_method="sequential"),
    ],
    "jax.experimental.io_callback": [lambda x: jax.experimental.io_callback(lambda v: v, FLOAT, x)],
    "jax.ffi.ffi_call": [lambda x: jax.ffi.ffi_call("own", FLOAT, vmap_method="broadcast_all")(x)],
}
COLLECTIVE = {
    "psum": lambda x: jax.lax.psum(x, "devices"),
    "pmax": lambda x: jax.lax.pmax(x, "devices"),
    "ppermute": lambda x: jax.lax.ppermute(x, "devices", [(0, 1)]),
    "all_gather": lambda x: jax.lax.all_gather(x, "devices").sum(0),
    "axis_index": lambda x: x * jax.lax.axis_index("devices"),
}


def loss_of(function):
    """A loss whose gradient is the function of the example, or the function's own gradient."""
    return lambda p, x: jnp.sum(centred_backwards(p * x) if function is centred_backwards else p * function(x))


@pytest.mark.parametrize("method", ["vmap", "ghost"])
@pytest.mark.parametrize("call, function", [(call, f) for call, functions in MIXED.items() for f in functions])
def test_operations_that_see_the_whole_batch_are_refused(call, function, method):
    text = refusal(clipped_sum, loss_of(function), jnp.ones(3), BATCH, method=method)
    assert f"loss_fn calls {call}, which" in text and "must keep examples apart" in text


@pytest.mark.parametrize("name, function", COLLECTIVE.items())
def test_collectives_along_an_axis_from_outside_are_refused(name, function):
    run = jax.vmap(lambda x: clipped_sum(loss_of(function), jnp.ones(3), x).total, axis_name="devices")
    assert f"loss_fn calls {name} along axis 'devices'" in refusal(run, BATCH.reshape(2, 2, 3))


@pytest.mark.parametrize("begins", [{"model"}, set()], ids=["another axis", "no axis"])
def test_an_axis_from_outside_does_not_begin_in_a_shard_map_of_its_mesh(begins):
    """The inner map is manual over `begins` alone. Its mesh also has the axis of the trainer's devices."""
    mesh = jax.make_mesh((1, 1), ("devices", "model"))
    over = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    function = lambda x: jax.shard_map(COLLECTIVE["psum"], axis_names=begins, **over)(x)
    run = lambda batch: clipped_sum(loss_of(function), jnp.ones(3), batch).total
    trained = lambda run: jax.jit(jax.shard_map(run, mesh=mesh, axis_names={"devices"}, **over))
    assert "loss_fn calls psum along axis 'devices'" in refusal(trained(run), BATCH)
    own = lambda x: jax.shard_map(lambda a: a + jax.lax.psum(a, "model"), axis_names={"model"}, **over)(x)
    got = trained(lambda batch: clipped_sum(loss_of(own), jnp.ones(3), batch, clip_norm=1e3).total)(BATCH)
    np.testing.assert_allclose(got, 2.0 * BATCH.sum(0), rtol=1e-5)


def test_mutable_arrays_from_outside_are_refused():
    memory = jax.new_ref(jnp.zeros(3))
    assert "uses a mutable array" in refusal(clipped_sum, loss_of(lambda x: x + memory[...]), jnp.ones(3), BATCH)


def test_private_scores_that_mix_records_are_refused():
    count = lambda data: units(lambda _, x: centred(x)[0], 0.0, data, 2.0**-20)
    assert "value calls jax.custom_batching.custom_vmap" in refusal(count, BATCH)


def printed(x):
    jax.debug.print("{}", x[0])
    return x


def own_axis(x):
    return jax.vmap(lambda a: a / jax.lax.psum(jnp.abs(a), "entries"), axis_name="entries")(x)


@pytest.mark.parametrize("function", [printed, own_axis, lambda x: jax.lax.map(jnp.sin, x), jax.nn.softmax])
def test_operations_within_one_example_are_not(function):
    got = clipped_sum(loss_of(function), jnp.ones(3), BATCH, clip_norm=1e3)
    np.testing.assert_allclose(got.total, sum(function(x) for x in BATCH), rtol=1e-5)


# Operations that are not listed, and rows by their bits


@jax.custom_vjp
def through(x):
    return UNKNOWN.bind(x)


UNKNOWN, *BORROWED = map(Primitive, ("someones_own", "sin", "add_any", "tile", "copy_p"))  # some names are not public
for primitive in (UNKNOWN, *BORROWED):
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda args, axes: (args[0] - args[0].mean(0), axes[0])
    mlir.register_lowering(primitive, lambda context, x: [x])
through.defvjp(lambda x: (UNKNOWN.bind(x), None), lambda _, g: (g,))


def test_operations_of_other_packages_are_refused_by_name():
    text = refusal(clipped_sum, loss_of(through), jnp.ones(3), BATCH)
    assert text.startswith("loss_fn calls someones_own, which is not known to give each example of a batch what it")
    assert "use operations of jax.numpy" in text
    for one in BORROWED:
        borrowed = lambda p, x, one=one: jnp.sum(p * jax.lax.stop_gradient(one.bind(jax.lax.stop_gradient(x))))
        assert f"loss_fn calls {one.name}, which is not known" in refusal(clipped_sum, borrowed, jnp.ones(3), BATCH)


def test_a_rule_for_batches_that_mixes_rows_is_seen_by_its_bits(monkeypatch):
    mixing = lambda args, axes: (jnp.roll(jax.lax.erf(args[0]), 1, axis=axes[0]), axes[0])
    loss = loss_of(lambda x: jax.lax.stop_gradient(jax.lax.erf(x)) + 0.125)
    with monkeypatch.context() as patch:
        patch.setitem(batching.fancy_primitive_batchers, jax.lax.erf_p, lambda axis, args, axes: mixing(args, axes))
        text = refusal(clipped_sum, loss, jnp.ones(3), BATCH)
        assert text.startswith("loss_fn moves the result of one example when another changes")


@pytest.mark.parametrize("kind", ["rbg", pytest.param("unsafe_rbg", marks=pytest.mark.slow)])
def test_keys_of_rbg_are_refused_however_they_are_made(kind):
    seed = lambda x: (1e4 * x[0]).astype(jnp.int32)
    draw = lambda key: jax.random.bernoulli(key, 0.5, (3,))
    raw = lambda x: draw(jax.random.wrap_key_data(jnp.full(4, 7, jnp.uint32) + seed(x).astype(jnp.uint32), impl=kind))
    for function in (lambda x: x * draw(jax.random.key(seed(x), impl=kind)), lambda x: x * raw(x)):
        text = refusal(clipped_sum, loss_of(function), jnp.ones(3), BATCH)
        assert f"with a random key of type key<{'urbg' if kind[0] == 'u' else 'rbg'}>" in text and "threefry" in text
    with jax.default_prng_impl(kind):
        for make in (jax.random.key, jax.random.PRNGKey):
            text = refusal(clipped_sum, loss_of(lambda x, make=make: x * draw(make(seed(x)))), jnp.ones(3), BATCH)
            assert "with a random key of type" in text
        given = BATCH, jax.random.split(jax.random.key(0), 4)
        text = refusal(clipped_sum, lambda p, x: jnp.sum(p * x[0]), jnp.ones(3), given)
        assert text.startswith("loss_fn is given a random key of type")
        own = lambda p, x: jnp.sum(p * x[0] * draw(x[1]))  # the key that the trainer gives is ChaCha20's
        keys = jax.random.split(fresh_key(), 4)
        assert clipped_sum(own, jnp.ones(3), (BATCH, keys)).total.shape == (3,)


def test_every_operation_of_the_list_is_one_of_jax_or_was():
    known = {name.removesuffix("_p") for name in dir(primitives) if name.endswith("_p")}
    assert len(LANE_BY_LANE & known) > 150 and "rng_bit_generator" not in LANE_BY_LANE
    assert not LANE_BY_LANE & set(_KNOWN_TO_MIX)
