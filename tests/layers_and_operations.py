"""About 230 layers and operations, each a function of one example, for tests that examples are kept apart.

`PROGRAMS` has for each name a function (weights, x) -> array, where weights and x have shape (4, 4) and x is positive;
`LAYERS` has modules of linen, each with the shape and dtype of its input; `REFUSED` has programs that must be refused.
"""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.experimental import pallas

from jaxacct.core.chacha import CHACHA20

_UNARY = """
    abs sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arctanh exp exp2 expm1 log log2 log10 log1p sqrt
    cbrt square reciprocal floor ceil rint trunc sign negative degrees sinc i0 nan_to_num conj real imag angle
    signbit isnan cumsum cumprod sort argsort flip rot90 ravel transpose diff fliplr triu tril diagonal unwrap ptp
    median mean var std max min sum prod argmax argmin nanmean nansum nanmax nanstd all any count_nonzero cov
    corrcoef trace
"""
_NN = """
    relu relu6 sigmoid softplus sparse_plus soft_sign silu log_sigmoid leaky_relu hard_sigmoid hard_silu hard_tanh
    elu celu selu gelu glu squareplus mish softmax log_softmax standardize logsumexp identity
"""
_SPECIAL = "erf erfc erfinv gammaln digamma expit logit ndtr ndtri log_ndtr i0e i1e i1 entr expi spence exp1 factorial"


def _weighted(function):
    """A program (w, x) -> w.sum() function(x), for a function that takes no weights."""
    return lambda w, x: w.sum() * function(x)


def _of(module, names):
    prefix = module.__name__.rpartition(".")[2]
    return {f"{prefix}.{name}": _weighted(getattr(module, name)) for name in names.split()}


def _positive(x):
    return x @ x.T + 4.0 * jnp.eye(4)


_LINALG = {
    "cholesky": lambda x: jnp.linalg.cholesky(_positive(x)),
    "eigh": lambda x: jnp.linalg.eigh(_positive(x))[0],
    "eigvals": lambda x: jnp.abs(jnp.linalg.eigvals(lax.stop_gradient(x))),
    "svd": lambda x: jnp.linalg.svd(x)[1],
    "qr": lambda x: jnp.linalg.qr(x)[1],
    "inv": lambda x: jnp.linalg.inv(_positive(x)),
    "det": jnp.linalg.det,
    "slogdet": lambda x: jnp.linalg.slogdet(_positive(x))[1],
    "solve": lambda x: jnp.linalg.solve(_positive(x), x),
    "lstsq": lambda x: jnp.linalg.lstsq(x, x[:, 0])[0],
    "pinv": jnp.linalg.pinv,
    "norm": jnp.linalg.norm,
    "matrix_power": lambda x: jnp.linalg.matrix_power(x, 3),
    "expm": jax.scipy.linalg.expm,
    "lu": lambda x: jax.scipy.linalg.lu(x)[2],
    "triangular": lambda x: jax.scipy.linalg.solve_triangular(_positive(x), x, lower=True),
    "tridiagonal": lambda x: lax.linalg.tridiagonal_solve(0 * x[0], 4 + x[0], 0 * x[0], x),
    "schur": lambda x: lax.linalg.schur(lax.stop_gradient(x))[0],
    "hessenberg": lambda x: lax.linalg.hessenberg(lax.stop_gradient(x))[0],
    "householder": lambda x: lax.linalg.householder_product(x, x[0]),
    "cg": lambda x: jax.scipy.sparse.linalg.cg(_positive(x), x[0], maxiter=5)[0],
    "gmres": lambda x: jax.scipy.sparse.linalg.gmres(_positive(x), x[0], maxiter=2)[0],
}
_LAX = {
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "approx_max_k": lambda x: lax.approx_max_k(x, 2)[0],
    "sort_two": lambda x: lax.sort((x[0], x[1]), num_keys=1)[1],
    "cummax": lax.cummax,
    "cummin": lambda x: lax.cummin(x, reverse=True),
    "cumlogsumexp": lax.cumlogsumexp,
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"),
    "reduce_window_add": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "SAME"),
    "reduce": lambda x: lax.reduce(x, 0.0, lambda a, b: a + b, (0,)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, ((3 * x[0, 0]).astype(int), 0), (2, 2)),
    "dynamic_update": lambda x: lax.dynamic_update_slice(x, x[:2, :2], ((3 * x[0, 0]).astype(int), 1)),
    "gather": lambda x: x[(4 * x[0]).astype(int)],
    "gather_clip": lambda x: jnp.take(x, (9 * x[0]).astype(int), axis=0, mode="clip"),
    "gather_fill": lambda x: jnp.take(x, (5 * x[0]).astype(int), axis=0, mode="fill", fill_value=0.0),
    "promised": lambda x: x.at[(9 * x[0]).astype(int)].get(mode="promise_in_bounds"),
    "scatter_add": lambda x: jnp.zeros(4).at[(4 * x[0]).astype(int)].add(x[1]),
    "scatter_set": lambda x: x.at[(4 * x[0]).astype(int)].set(x[1]),
    "scatter_mul": lambda x: x.at[0, (4 * x[0]).astype(int)].multiply(x[1]),
    "scatter_max": lambda x: x.at[(4 * x[0]).astype(int)].max(x),
    "scatter_min": lambda x: x.at[(9 * x[0]).astype(int)].min(x, mode="drop"),
    "scatter_promised": lambda x: x.at[(9 * x[0]).astype(int)].add(x, mode="promise_in_bounds", unique_indices=True),
    "segment_sum": lambda x: jax.ops.segment_sum(x, (3 * x[:, 0]).astype(int), 3),
    "one_hot": lambda x: jax.nn.one_hot((4 * x[0]).astype(int), 4) @ x,
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1]) * x[2],
    "histogram": lambda x: jnp.histogram(x, 5, (0.0, 1.0))[0] * x[0, 0],
    "interp": lambda x: jnp.interp(x[0], jnp.sort(x[1]), x[2]),
    "quantile": lambda x: jnp.quantile(x, 0.3),
    "unique": lambda x: jnp.unique(jnp.round(x, 1), size=5, fill_value=0.0),
    "nonzero": lambda x: x.ravel()[jnp.nonzero(x.ravel() > 0.5, size=3)[0]],
    "where": lambda x: jnp.where(x > 0.5, x, -x),
    "select": lambda x: lax.select_n((x > 0.5).astype(int), x, 2 * x),
    "clamp": lambda x: lax.clamp(0.2, x, 0.8),
    "pad": lambda x: jnp.pad(x, 2, mode="reflect"),
    "roll": lambda x: jnp.roll(x, 1, axis=0) * x,
    "tile": lambda x: jnp.tile(x, (2, 3)),
    "repeat": lambda x: jnp.repeat(x, 2, axis=0),
    "concatenate": lambda x: jnp.concatenate([x, x.T]),
    "stack": lambda x: jnp.stack([x, x + 1]),
    "split": lambda x: jnp.split(x, 2)[1],
    "einsum": lambda x: jnp.einsum("ij,jk,ki->i", x, x, x),
    "kron": lambda x: jnp.kron(x[:2, :2], x),
    "outer": lambda x: jnp.outer(x[0], x[1]),
    "cross": lambda x: jnp.cross(x[:, :3], x[:, 1:]),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "polyval": lambda x: jnp.polyval(x[0], x[1]),
    "meshgrid": lambda x: jnp.meshgrid(x[0], x[1])[0],
    "bitcast": lambda x: x * (lax.bitcast_convert_type(x, jnp.int32) & 1),
    "shifts": lambda x: x * ((100 * x).astype(int) >> 1 << 2),
    "population": lambda x: x * lax.population_count((100 * x).astype(jnp.uint32)),
    "clz": lambda x: x * lax.clz((100 * x).astype(jnp.uint32)),
    "nextafter": lambda x: jnp.nextafter(lax.stop_gradient(x), 2.0),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32),
    "int8": lambda x: (
        x * lax.dot((10 * x).astype(jnp.int8), (10 * x).astype(jnp.int8), preferred_element_type=jnp.int32)
    ),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "rfft2": lambda x: jnp.real(jnp.fft.rfft2(x)),
    "ifft": lambda x: jnp.real(jnp.fft.ifft(x)),
    "irfft": lambda x: jnp.fft.irfft(x.astype(complex)),
    "stft": lambda x: jnp.abs(jax.scipy.signal.stft(jnp.tile(x.ravel(), 2), nperseg=8)[2]),
    "dct": lambda x: jax.scipy.fft.dct(x),
    "resize": lambda x: jax.image.resize(x, (6, 6), "bicubic"),
    "map_coordinates": lambda x: jax.scipy.ndimage.map_coordinates(x, [3 * x[0], 3 * x[1]], order=1),
    "gammainc": lambda x: special.gammainc(1 + x, x),
    "gammaincc": lambda x: special.gammaincc(1 + x, 9 * x),
    "zeta": lambda x: special.zeta(2 + x, 1 + x),
    "polygamma": lambda x: special.polygamma(1, 1 + x),
    "logsumexp": special.logsumexp,
    "multigammaln": lambda x: special.multigammaln(4 + x, 2),
    "pow": lambda x: x**x,
    "integer_pow": lambda x: x**5,
    "atan2": lambda x: jnp.arctan2(x, x.T),
    "hypot": lambda x: jnp.hypot(x, x.T),
    "logaddexp": lambda x: jnp.logaddexp(x, x.T),
    "rem": lambda x: x % 0.3,
    "divmod": lambda x: jnp.divmod(x, 0.3)[1],
    "maximum": lambda x: jnp.maximum(x, x.T),
    "xlogy": lambda x: special.xlogy(x, x),
    "attention": lambda x: jax.nn.dot_product_attention(*[x[:, None, :]] * 3),
    "causal_attention": lambda x: jax.nn.dot_product_attention(*[x[:, None, :]] * 3, is_causal=True),
    "batched_product": lambda x: lax.dot_general(x[None], x[None], (((2,), (1,)), ((0,), (0,)))),
    "optimization_barrier": lax.optimization_barrier,
    "stop_gradient": lambda x: lax.stop_gradient(x) * x,
    "platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "device_put": lambda x: jax.device_put(x, jax.devices()[0]),
    "debug_print": lambda x: (jax.debug.print("", ordered=False), x)[1],
    "tree": lambda x: jax.tree.map(jnp.sin, {"a": x})["a"],
    "jit": lambda x: jax.jit(jnp.tanh)(x),
    "vmap": lambda x: jax.vmap(lambda row: row / jnp.sum(row))(x),
    "own_axis": lambda x: jax.vmap(lambda a: a / lax.psum(a, "own"), axis_name="own")(x),
    "inner_grad": lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) ** 2))(x),
    "hessian": lambda x: jax.hessian(lambda y: jnp.sum(y**3))(x[0]),
    "linearize": lambda x: jax.linearize(jnp.sin, x)[1](x),
}


@jax.custom_jvp
def _own_jvp(x):
    return jnp.sin(x)


_own_jvp.defjvp(lambda primals, tangents: (_own_jvp(*primals), tangents[0] * 2.0))


@jax.custom_vjp
def _own_vjp(x):
    return jnp.sin(x)


_own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))


def _internal_memory(x):
    memory = jax.new_ref(x)
    memory[0] = memory[1] * 2
    memory[1, 1] += memory[2, 2]
    return memory[...]


_LOOPS = {
    "scan": lambda w, x: lax.scan(lambda c, row: (jnp.tanh(w @ c + row), c), x[0], x)[1],
    "scan_reverse": lambda w, x: lax.scan(lambda c, row: (c * row, c), x[0], x, reverse=True, unroll=2)[0] * w,
    "while": lambda w, x: w * lax.stop_gradient(lax.while_loop(lambda v: v.sum() < 30, lambda v: 1.3 * v, x)),
    "fori": lambda w, x: w * lax.fori_loop(0, 3, lambda i, v: v * jnp.cos(v), x),
    "fori_of_data": lambda w, x: (
        w * lax.stop_gradient(lax.fori_loop(0, (6 * x[0, 0]).astype(int), lambda i, v: v * 0.9, x))
    ),
    "cond": lambda w, x: w * lax.cond(x[0, 0] > 0.5, jnp.sin, lambda v: v @ v, x),
    "switch": lambda w, x: w * lax.switch((3 * x[0, 0]).astype(int), [jnp.sin, jnp.cos, jnp.tanh], x),
    "map": lambda w, x: w * lax.map(lambda row: row / row.sum(), x),
    "batched_map": lambda w, x: w * lax.map(lambda row: row / row.sum(), x, batch_size=2),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(w @ x))(w, x),
    "custom_jvp": lambda w, x: _own_jvp(w * x),
    "custom_vjp": lambda w, x: _own_vjp(w * x),
    "memory_within": lambda w, x: w * _internal_memory(x),
    "product": lambda w, x: x @ w,
    "transposed": lambda w, x: w.T @ x,
    "cast_product": lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
    "lookup": lambda w, x: w[(4 * x[0]).astype(int)],
    "tied": lambda w, x: w[(4 * x[0]).astype(int)] @ w.T,
    "conv": lambda w, x: lax.conv(x[None, None], w[None, None, :2, :2], (1, 1), "VALID"),
    "conv_of_data": lambda w, x: w * lax.conv(x[None, None], x[None, None, :1, :1], (1, 1), "SAME")[0, 0],
    "conv_dilated": lambda w, x: lax.conv_general_dilated(
        x[None, None], w[None, None, :2, :2], (1, 1), "SAME", rhs_dilation=(2, 2)
    ),
    "conv_grouped": lambda w, x: lax.conv_general_dilated(x[None], w[:, None, :2], (1,), "SAME", feature_group_count=4),
}


def _draws(impl):
    """A function that makes a random key from the first entry of an example."""
    return lambda x: jax.random.key((1e4 * x[0, 0]).astype(int), impl=impl)


def _random(key_of):
    draw = {
        "normal": lambda k: jax.random.normal(k, (4, 4)),
        "dropout": lambda k: jax.random.bernoulli(k, 0.5, (4, 4)),
        "split": lambda k: jax.random.uniform(jax.random.split(k, 3)[2], (4, 4)),
        "fold_in": lambda k: jax.random.uniform(jax.random.fold_in(k, 3), (4, 4)),
        "permutation": lambda k: jax.random.permutation(k, 16).reshape(4, 4),
        "categorical": lambda k: jax.random.categorical(k, jnp.zeros((4, 4, 3))),
        "truncated": lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (4, 4)),
        "gamma": lambda k: jax.random.gamma(k, 2.0, (4, 4)),
        "randint": lambda k: jax.random.randint(k, (4, 4), 0, 9),
        "bits": lambda k: jax.random.bits(k, (4, 4)) % 7,
        "choice": lambda k: jax.random.choice(k, 16, (4, 4), replace=False),
        "poisson": lambda k: jax.random.poisson(k, 3.0, (4, 4)) if "threefry" in str(jax.random.key_impl(k)) else 1.0,
    }
    program = lambda function: lambda w, x: w * x * function(key_of(x))
    return {name: program(function) for name, function in draw.items()}


PROGRAMS = {
    **_of(jnp, _UNARY),
    **_of(jax.nn, _NN),
    **_of(special, _SPECIAL),
    **{f"linalg.{name}": _weighted(f) for name, f in _LINALG.items()},
    **{f"lax.{name}": _weighted(f) for name, f in _LAX.items()},
    **{f"loop.{name}": f for name, f in _LOOPS.items()},
    **{f"threefry.{name}": f for name, f in _random(_draws("threefry2x32")).items()},
    **{f"chacha20.{name}": f for name, f in _random(_draws(CHACHA20)).items() if name != "poisson"},
}

LOSSES = {
    f"optax.{name}": f
    for name, f in {
        "l2": optax.l2_loss,
        "huber": optax.huber_loss,
        "log_cosh": optax.log_cosh,
        "cosine": optax.cosine_distance,
        "softmax": lambda a, b: optax.softmax_cross_entropy(a, jax.nn.softmax(b)),
        "integer": lambda a, b: optax.softmax_cross_entropy_with_integer_labels(a, (3 * b[:, 0]).astype(int)),
        "smoothed": lambda a, b: optax.softmax_cross_entropy(a, optax.smooth_labels(jnp.eye(4), 0.1)) * b[0],
        "sigmoid": lambda a, b: optax.sigmoid_binary_cross_entropy(a, b > 0.5),
        "focal": lambda a, b: optax.sigmoid_focal_loss(a, (b > 0.5).astype(float)),
        "hinge": lambda a, b: optax.hinge_loss(a, jnp.sign(b - 0.5)),
        "kl": lambda a, b: optax.kl_divergence(jax.nn.log_softmax(a), jax.nn.softmax(b)),
        "ctc": lambda a, b: optax.ctc_loss(
            a[None], jnp.zeros((1, 4)), (3 * b[None, :2, 0]).astype(int), jnp.zeros((1, 2))
        ),
        "triplet": lambda a, b: jnp.maximum(jnp.sum((a[0] - b[0]) ** 2) - jnp.sum((a[0] - b[1]) ** 2) + 1.0, 0.0),
    }.items()
}
PROGRAMS |= {name: (lambda loss: lambda w, x: loss(w @ x, x))(f) for name, f in LOSSES.items()}


class _Recurrent(nn.Module):
    cell: str

    @nn.compact
    def __call__(self, x):
        return nn.RNN(getattr(nn, self.cell)(3))(x)


class _Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(9, 4)(tokens)
        x = x + nn.SelfAttention(2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        return x + nn.Dense(4)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(x))))


_ROWS, _IMAGE, _TOKENS = ((4, 4), jnp.float32), ((6, 6, 4), jnp.float32), ((5,), jnp.int32)
LAYERS = {
    "linen.Dense": (nn.Dense(3), _ROWS),
    "linen.DenseGeneral": (nn.DenseGeneral((2, 2), axis=(0, 1)), _ROWS),
    "linen.Einsum": (nn.Einsum((4, 3), "ab,bc->ac"), _ROWS),
    "linen.Conv": (nn.Conv(3, (3, 3)), _IMAGE),
    "linen.ConvStrided": (nn.Conv(3, (3, 3), (2, 2), padding="VALID"), _IMAGE),
    "linen.ConvGrouped": (nn.Conv(4, (3, 3), feature_group_count=2), _IMAGE),
    "linen.Conv1D": (nn.Conv(3, (3,)), _ROWS),
    "linen.ConvTranspose": (nn.ConvTranspose(3, (2, 2), (2, 2)), _IMAGE),
    "linen.ConvLocal": (nn.ConvLocal(2, (3, 3)), _IMAGE),
    "linen.Embed": (nn.Embed(9, 3), _TOKENS),
    "linen.LayerNorm": (nn.LayerNorm(), _ROWS),
    "linen.RMSNorm": (nn.RMSNorm(), _ROWS),
    "linen.GroupNorm": (nn.GroupNorm(2), _IMAGE),
    "linen.InstanceNorm": (nn.InstanceNorm(), _IMAGE),
    "linen.WeightNorm": (nn.WeightNorm(nn.Dense(3)), _ROWS),
    "linen.PReLU": (nn.PReLU(), _ROWS),
    "linen.SelfAttention": (nn.SelfAttention(2), _ROWS),
    "linen.remat": (nn.remat(nn.Dense)(3), _ROWS),
    "linen.LSTM": (_Recurrent("LSTMCell"), _ROWS),
    "linen.GRU": (_Recurrent("GRUCell"), _ROWS),
    "linen.SimpleCell": (_Recurrent("SimpleCell"), _ROWS),
    "linen.MGU": (_Recurrent("MGUCell"), _ROWS),
    "linen.Transformer": (_Transformer(), _TOKENS),
    "linen.Pools": (
        nn.Sequential([nn.Conv(2, (3, 3)), functools.partial(nn.max_pool, window_shape=(2, 2)), nn.relu]),
        _IMAGE,
    ),
    "linen.AvgPool": (nn.Sequential([nn.Conv(2, (1, 1)), functools.partial(nn.avg_pool, window_shape=(3, 3))]), _IMAGE),
}


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(size, batched, x):
    return x - x.mean(0), True


def _host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def _kernel(x):
    def body(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


REFUSED = {
    "betainc": lambda w, x: w * special.betainc(1 + x[0], 2.0, lax.stop_gradient(x[1])),
    **{f"rbg.{name}": f for name, f in _random(_draws("rbg")).items() if name != "poisson"},
    **{f"unsafe_rbg.{name}": f for name, f in _random(_draws("unsafe_rbg")).items() if name != "poisson"},
    "rng_bit_generator": lambda w, x: w * lax.rng_bit_generator((9e4 * x[0]).astype(jnp.uint32), (4, 4))[1],
    "custom_vmap": lambda w, x: w * centred(x),
    "sequential_vmap": lambda w, x: w * jax.custom_batching.sequential_vmap(jnp.sin)(x),
    "pure_callback": lambda w, x: w * _host(lax.stop_gradient(x)),
    "pallas_call": lambda w, x: w * _kernel(lax.stop_gradient(x)),
    "in_a_loop": lambda w, x: w * lax.fori_loop(0, 2, lambda i, v: centred(v), x),
    "in_a_checkpoint": lambda w, x: jax.checkpoint(lambda w, x: w * centred(x))(w, x),
}
