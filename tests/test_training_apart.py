"""Examples apart: no row's contribution moves by a bit when another row changes, or the program is refused.

A row's contribution is what `clipped_sum` returns where the mask selects that row alone.  Norms, scaling and ghost
kernels are thus tested too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import refusal
from layers_and_operations import LAYERS, PROGRAMS, REFUSED

from jaxacct.training.clipping.clipped_sum import clipped_sum

ROWS = 4
RNG = np.random.default_rng(0)
WEIGHTS = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)
ALL = [*PROGRAMS, *LAYERS]


def loss_and_params(name):
    """(loss, parameters, the shape and dtype of an example)."""
    if name in LAYERS:
        module, (shape, dtype) = LAYERS[name]
        params = jax.jit(module.init)(jax.random.key(0), np.ones(shape, dtype))
        return lambda p, x: jnp.sum(jnp.sin(module.apply(p, x))), params, shape, dtype
    function = PROGRAMS[name] if name in PROGRAMS else REFUSED[name]
    as_number = lambda out: jnp.sum(jnp.sin(jnp.asarray(out).astype(jnp.float32)))
    return lambda w, x: as_number(function(w, x)), WEIGHTS, (4, 4), jnp.float32


def rows(shape, dtype):
    drawn = RNG.integers(0, 9, (ROWS, *shape)) if dtype == jnp.int32 else RNG.uniform(0.05, 0.95, (ROWS, *shape))
    return drawn.astype(dtype)


def moved(name, method):
    """The rows whose contribution moves when another row is replaced."""
    loss, params, shape, dtype = loss_and_params(name)
    run = jax.jit(lambda batch, mask: clipped_sum(loss, params, batch, mask, 0.5, method))
    before, other = rows(shape, dtype), rows(shape, dtype)
    bits = lambda batch, i: [np.asarray(a).tobytes() for a in jax.tree.leaves(run(batch, np.arange(ROWS) == i))]
    found = set()
    for changed in (0, ROWS - 1):
        after = before.copy()
        after[changed] = other[changed]
        found |= {i for i in range(ROWS) if i != changed and bits(before, i) != bits(after, i)}
    assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(run(before, np.ones(ROWS, bool))))
    return found


def test_there_are_two_hundred_programs():
    assert len(ALL) + len(REFUSED) >= 200


@pytest.mark.parametrize("name", ALL[::58])
def test_no_row_moves_with_another(name):
    assert moved(name, "auto") == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_no_row_of_any_program_moves_with_another(name):
    assert moved(name, "ghost" if name in LAYERS or name.startswith("loop") else "vmap") == set()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_keep_rows_apart_is_refused(name):
    loss, params, shape, dtype = loss_and_params(name)
    text = refusal(clipped_sum, loss, params, rows(shape, dtype))
    assert text.startswith("loss_fn calls ") and "must keep examples apart; " in text
