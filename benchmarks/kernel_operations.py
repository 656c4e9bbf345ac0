"""What a kernel computes, counted from its trace, and how fast this machine does such work.

Each primitive of the traced kernel counts as many elements as its result has (a reduction as many as its argument, a
dot product two for each term); in a loop, times the loop's length.
What moves data (reshapes, broadcasts, gathers) is not counted: the floor in throughput.py is the time of arithmetic.
"""

import collections
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.engines import backend
from jaxacct.kernels.arrays import log1p

SLOW = {
    "div": lambda x: 1.0 / x,
    "sqrt": jnp.sqrt,
    "exp": lambda x: jnp.exp(-x),
    "expm1": lambda x: jnp.expm1(-x),
    "log": jnp.log,
    "log1p": log1p,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "atan2": lambda x: jnp.arctan2(x, 0.7),
    "erfc": jax.lax.erfc,
    "pow": lambda x: x**0.37,
    "logistic": jax.nn.sigmoid,
}
"""Primitives dearer than a multiplication, each timed by itself."""
FREE = {
    *(
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "slice",
        "concatenate",
        "gather",
        "scatter",
        "rev",
        "stack",
    ),
    *("iota", "convert_element_type", "stop_gradient", "optimization_barrier", "dynamic_slice", "copy", "split", "pad"),
}
"""Primitives that move data and are not counted."""
WIDTH = 2048
"""Elements of a row."""
LENGTH = 64
"""Rounds of the timed loop."""
DEPTH = 16
"""Multiply-adds of a round, when multiply-adds are timed."""
ROWS = 64
"""Rows of a timed call."""
REPEATS = 15
"""Timed calls, of which the quickest counts."""


def count(function, *arguments):
    """{(part, operation): elements} for one call; part: "certificate" for code of certificates, else "solution"."""
    with jax.enable_x64():
        traced = jax.make_jaxpr(function)(*arguments)
    total = collections.Counter()
    _count(traced.jaxpr, 1, False, total)
    return total


def _count(jaxpr, times, certifying, total):
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        certificate = certifying or _in_certificate(equation.source_info.traceback)
        part = "certificate" if certificate else "solution"
        inner = [x for value in equation.params.values() for x in _jaxprs(value)]
        if inner:
            length = equation.params["length"] if name == "scan" else 1
            for each in inner:
                _count(each, times * length, certificate, total)
        elif name not in FREE:
            operation = name if name in SLOW else "cheap"
            total[part, operation] += times * _elements(equation, name)


def _jaxprs(value):
    found = [getattr(x, "jaxpr", x) for x in (value if isinstance(value, tuple | list) else (value,))]
    return [x for x in found if hasattr(x, "eqns")]


def _elements(equation, name):
    out = sum(v.aval.size for v in equation.outvars)
    if name == "dot_general":  # each term is a multiplication and an addition
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * out * int(np.prod([equation.invars[0].aval.shape[axis] for axis in contracted]))
    return max(out, equation.invars[0].aval.size) if name.startswith(("reduce_", "arg", "cum")) else out


def _in_certificate(traceback):
    return traceback is not None and any("certificate" in frame.file_name for frame in traceback.frames)


def _burn(x, op):
    """LENGTH rounds of an operation, or of DEPTH multiply-adds, on a row of numbers about 1."""

    def cheap(y):
        for _ in range(DEPTH):
            y = y * 0.3 + x
        return y

    return jax.lax.fori_loop(0, LENGTH, lambda _, y: (cheap if op is None else op)(y) * 0.1 + x, x)


def seconds_each():
    """Seconds per element of every operation: the least of REPEATS calls of `backend.in_chunks`, on all cores."""
    x = np.random.default_rng(0).uniform(0.6, 1.2, (ROWS, WIDTH))
    least = {}
    for name, op in {"cheap": None, **SLOW}.items():
        program = backend.Compiled(functools.partial(_burn, op=op), None, f"burn {name}")
        taken = []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            backend.in_chunks(program, 4, (x,), ROWS)
            taken.append(time.perf_counter() - begin)
        least[name] = min(taken[1:]) / (ROWS * WIDTH * LENGTH)
    cheap = least["cheap"] / (2 * DEPTH + 2)
    least["log1p"] -= least["log"] - 2 * cheap  # `log1p` also takes a log, which `count` counts as a log
    return {name: max(each - 2 * cheap, cheap) for name, each in least.items()} | {"cheap": cheap}
