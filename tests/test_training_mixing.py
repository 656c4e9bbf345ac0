"""Losses through which examples can reach one another are refused in one line; what only looks like it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal

from jaxacct.training.step.clipping import clipped_sum
from jaxacct.tuning.private_score import units

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
FLOAT = jax.ShapeDtypeStruct((3,), jnp.float32)


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(size, batched, x):
    return x - x.mean(0), True


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
