"""Programs are lowered for accelerators that this machine does not have, so every operation is known to exist there.

`jax.export` lowers to StableHLO for a platform, and refuses library calls whose form may change later.  It is a check
of lowering, not of running: nothing is compiled for the platform, and no number comes from it.
"""

import re
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxacct as ja
from jaxacct import selection
from jaxacct.engines import backend, programs
from jaxacct.kernels import law
from jaxacct.kernels.contour import plain
from jaxacct.training import AdaptiveClip, Plan, Trainer
from jaxacct.training.step.counts_and_losses import PrivateLoss
from jaxacct.training.step.step_function import Carried, numbers_at

DOUBLE = re.compile(r"(tensor<|x|complex<)f64>")
"""An array of float64, or of complex128, in a lowered program."""


def lowered(function, arguments, platform):
    """The program of a function for a platform, as text."""
    exported = jax.export.export(jax.jit(function), platforms=[platform])(*arguments)
    assert exported.platforms == (platform,)
    return exported.mlir_module()


# Accounting, for CUDA


class LoweredError(Exception):
    """A program is lowered, and NumPy cannot answer in its place, since it is written in JAX."""


@pytest.fixture
def for_cuda(monkeypatch):
    """Kernels that would be compiled are lowered for CUDA, under their names; NumPy then answers in their place."""
    found = {}

    def prepare(function, options, label, leaves, tree, device):
        flat = lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))
        found[label.split()[0].rpartition(".")[2]] = lowered(flat, leaves, "cuda")

        def answer(*leaves):
            if label.startswith(selection.__name__):
                raise LoweredError
            with np.errstate(all="ignore"):
                return flat(*(np.asarray(leaf) for leaf in leaves))

        return answer

    def by_xla(kernel, *arguments, **static):
        if kernel.__name__ not in found:
            found[kernel.__name__] = lowered(partial(kernel, **static), arguments, "cuda")
        return backend._by_numpy(kernel, *arguments, **static)

    monkeypatch.setattr(programs, "prepare", prepare)
    monkeypatch.setattr(backend, "_by_xla", by_xla)
    return found


@pytest.mark.slow  # the next test lowers the smaller kernels of lattices
def test_the_kernel_of_a_curve_lowers_for_cuda():
    one, none, losses = np.ones((2, 1)), np.ones((2, 0)), np.ones((2, 0, 1))
    sampled = 2.0 * one, 0.01 * one, 1e3 * one
    parts = law.LossLaw(np.ones(2), np.zeros(2), *sampled, none, none, losses, losses, none)
    with jax.enable_x64():
        kernel = partial(plain.delta, points=64, count=32)
        text = lowered(kernel, (parts, np.ones(2), np.full(2, np.log(1e-8))), "cuda")
    assert DOUBLE.search(text)


def test_the_kernels_of_lattices_lower_for_cuda(for_cuda):
    answer = ja.epsilon(ja.repeat(ja.Laplace(2.0), 30), 1e-5, rtol=1e-2, backend="xla")
    assert answer.engine == "lattice" and np.isfinite(answer.upper)
    assert {"laplace_cells", "upper_masses", "lower_masses", "compose"} <= set(for_cuda)
    assert "xcomplex<f64>>" in for_cuda["compose"]


QUESTIONS = {
    "epsilon": lambda run: ja.epsilon(run, 1e-5, backend="xla"),
    "delta": lambda run: ja.delta(run, 1.0, backend="xla"),
    "noise": lambda run: ja.calibrate_noise_multiplier([1.0, 2.0], 1e-5, 0.01, 1000, backend="xla"),
    "noise for a rate": lambda run: ja.calibrate_noise_multiplier(
        sampling_probability=0.01, steps=1000, target_tpr=0.05, at_fpr=0.01, backend="xla"
    ),
    "gradient": lambda run: ja.epsilon_gradient(run, 1e-5, backend="xla"),
    "lattice": lambda run: ja.epsilon(run, 1e-5, engine="lattice", rtol=1e-2, backend="xla"),
}


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_kernels_of_questions_lower_for_cuda(question, for_cuda):
    QUESTIONS[question](ja.dp_sgd(2.0, 0.01, 1000))
    assert for_cuda and all(DOUBLE.search(text) for text in for_cuda.values())


@pytest.mark.slow
@pytest.mark.parametrize("question", [ja.epsilon, ja.delta])
def test_the_kernels_of_selections_lower_for_cuda(question, for_cuda):
    run = selection.select(ja.Gaussian(3.0), selection.Geometric(0.1))
    with pytest.raises(LoweredError):
        question(run, 0.1, backend="xla")
    assert for_cuda and all(DOUBLE.search(text) for text in for_cuda.values())


# A private step, for CUDA and for TPUs


def dense(params, example):
    x, y = example
    return jnp.sum((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def convolution(params, example):
    image, y = example
    window = (1, 1), "SAME"
    seen = jax.lax.conv_general_dilated(image[None], params["in"], *window, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum((jnp.mean(jnp.tanh(seen)) * params["out"] - y) ** 2)


def dropped(params, example, key):
    return dense(params, (example[0] * jax.random.bernoulli(key, 0.9, example[0].shape), example[1]))


DENSE = dense, {"in": np.ones((3, 4), np.float32), "out": np.ones((4, 2), np.float32)}, (3,)
DROPPED = dropped, *DENSE[1:]
CONVOLUTION = convolution, {"in": np.ones((3, 3, 1, 2), np.float32), "out": np.ones(2, np.float32)}, (6, 6, 1)


def step_for(platform, network=DENSE, clip_norm=1.0, of_trainer=(), **rule):
    """A trainer's step, lowered as it would be on a machine whose default device is of that platform."""
    loss, params, shape = network
    plan = Plan(target_delta=1e-5, dataset_size=64, noise_multiplier=1.0, **rule)
    trainer = Trainer(loss, optax.adam(0.1), plan, clip_norm, micro_batch=4, **dict(of_trainer))
    state = trainer.init(params, bytes(32))
    carried = Carried(state.params, state.opt_state, state.clip_norm, np.int32(0))
    data = np.ones((64, *shape), np.float32), np.ones((64, 2), np.float32)
    words = np.zeros(8, np.uint32)
    now = numbers_at(plan, 0, trainer.adaptive, trainer.rule.private_loss, words)
    return lowered(trainer.step_function, (carried, words, words, data, now), platform)


POISSON = {"expected_batch_size": 8, "steps": 10}
OTHERS = {
    "vmap": {**POISSON, "of_trainer": {"method": "vmap"}},
    "keys of examples": {**POISSON, "network": DROPPED, "of_trainer": {"rngs": True}},
    "private loss": {**POISSON, "of_trainer": {"private_loss": PrivateLoss(5.0)}},
    "a convolution": {**POISSON, "network": CONVOLUTION},
    "adaptive": {**POISSON, "clip_norm": AdaptiveClip(1.0)},
    "truncated": {**POISSON, "sampling": "truncated_poisson"},
    "fixed": {"expected_batch_size": 8, "epochs": 2, "sampling": "fixed_batches"},
    "allocation": {"slots": 8, "epochs": 2, "sampling": "random_allocation"},
    "without replacement": {**POISSON, "sampling": "without_replacement"},
}


def check_step(platform, monkeypatch, **case):
    monkeypatch.setattr(jax, "default_backend", {"cuda": "gpu"}.get(platform, platform).__str__)
    text = step_for(platform, **case)
    assert "xui32>" in text and "xf32>" in text and not DOUBLE.search(text)
    return text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_private_step_lowers_and_the_host_seldom_waits(platform, monkeypatch):
    """On a GPU the host waits for the condition of every branch, and of every loop whose length is not known.

    The only such loop is the one over micro-batches. Each micro-batch has two branches: gradients, and their weights.
    """
    text = check_step(platform, monkeypatch, **POISSON)
    if platform == "tpu":
        return
    ends = re.findall(r"stablehlo.while.*?stablehlo.compare +LT, %iterArg\w*, %(\w+),", text, re.DOTALL)
    assert len(ends) == text.count("stablehlo.while") and sum(end.startswith("iterArg") for end in ends) == 1
    assert len(re.findall(r"stablehlo\.(?:case|if)", text)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_every_kind_of_private_step_lowers(platform, case, monkeypatch):
    check_step(platform, monkeypatch, **OTHERS[case])


# The check itself


def test_what_has_no_form_is_found():
    with pytest.raises(NotImplementedError, match="platform tpu"):
        lowered(jnp.linalg.eigvals, (np.ones((2, 2), np.float32),), "tpu")
    call = jax.ffi.ffi_call("a_function_of_this_host", jax.ShapeDtypeStruct((2,), np.float32))
    with pytest.raises(ValueError, match="a_function_of_this_host"):
        lowered(call, (np.ones(2, np.float32),), "cuda")
