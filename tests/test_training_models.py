"""Models as they are: frozen parameters, keys for each example, aux, and refusals of what mixes examples."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import refusal
from training_runs import KEY, linear, plan_of, shared, still

import jaxacct
from jaxacct.core import chacha
from jaxacct.core.chacha import CHACHA20, key_from_bytes
from jaxacct.training import Trainer, clipped_sum, sensitivity
from jaxacct.training.ledger import Ledger
from jaxacct.training.run.program import Program
from jaxacct.training.step import models, noise
from jaxacct.training.step.models import join_model, loss_of, split_model
from jaxacct.training.step.step_function import Carried, numbers_at, unmoved

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
X = np.linspace(-1, 1, 36, dtype=np.float32).reshape(12, 3)
DATA = X, (X[:, 0] > 0).astype(np.int32)
EXAMPLE = X[0], DATA[1][0]
WORDS = np.arange(8, dtype=np.uint32)


class Linen(nn.Module):
    normalised: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4)(x)
        if self.normalised:
            x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


class Nnx(nnx.Module):
    def __init__(self, normalised=False):
        rngs = nnx.Rngs(0)
        self.first, self.drop, self.last = (
            nnx.Linear(3, 4, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
            nnx.Linear(4, 2, rngs=rngs),
        )
        self.norm = nnx.BatchNorm(4, rngs=rngs) if normalised else jnp.tanh

    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def equinox_model(rate=0.5):
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        layer: eqx.nn.Linear
        drop: eqx.nn.Dropout
        count: jax.Array

        def __call__(self, x, key=None):
            return self.drop(self.layer(x), key=key)

    return Model(eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(rate), jnp.arange(2))


compiled = functools.cache(jax.jit)


def one_step(trainer, params, data, **more):
    """A step of a trainer from params: (before, after, what it observed)."""
    trained, rest = split_model(params, trainer.trainable)
    before = Carried(
        trained, trainer.optimizer.init(trained), jax.tree.map(jnp.float32, trainer.clip_norm), jnp.int32(0)
    )
    now = numbers_at(trainer.plan, 0, None, trainer.rule.private_loss)
    after, seen = compiled(trainer.step_function)(before, WORDS, WORDS, data, now, rest)
    return before, after, seen


# What is frozen


def test_a_model_is_taken_apart_and_put_together_again():
    params = {"base": np.ones((2, 2), np.float32), "head": {"w": 3.0, "b": np.zeros(1)}}
    for trainable in (
        lambda p: p.startswith("head"),
        {"base": False, "head": True},
        {"base": False, "head": {"w": True, "b": True}},
    ):
        trained, rest = split_model(params, trainable)
        assert jax.tree.map(jnp.shape, trained) == {"base": None, "head": {"w": (), "b": (1,)}}
        assert [a.shape for a in rest.frozen] == [(2, 2)]
        again = join_model(jax.tree.map(lambda a: a + 1, trained), rest)
        assert float(again["head"]["w"]) == 4.0 and again["base"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert split_model(params)[1] is None
    assert "selects none" in refusal(split_model, params, lambda path: False)
    assert "is no prefix of the parameters" in refusal(split_model, params, {"base": True})


def test_modules_train_their_parameters_and_keep_the_rest():
    model = Nnx(normalised=True)
    trained, rest = split_model(model)
    assert set(trained["norm"]) == {"bias", "scale", "mean", "var"} and trained["norm"]["mean"] is None
    assert len(rest.frozen) == 2  # the averages; keys and counts of streams are none of the step's arguments
    assert (join_model(trained, rest).last.kernel == model.last.kernel).all()
    assert split_model(model, nnx.BatchStat)[0]["first"]["kernel"] is None
    module = equinox_model()
    trained, rest = split_model(module)
    assert trained.layer.weight is not None and trained.count is None and trained.drop.p is None
    assert join_model(trained, rest).drop.p == 0.5 and join_model(trained, rest).count.tolist() == [0, 1]


def test_what_is_frozen_has_no_noise_no_optimizer_state_and_no_site():
    loss = lambda p, x: 0.0 * jnp.sum(p["base"]["kernel"] @ (p["head"] * x))
    trainer = Trainer(loss, optax.adam(1.0), plan_of(4, noise=2.0), 3.0, trainable=lambda path: path == "head")
    params = {"base": {"kernel": np.ones((9, 3), np.float32)}, "head": np.zeros(3, np.float32)}
    assert list(trainer.norm_methods(params, X[:4])) == ["['head']"]
    recorded = optax.GradientTransformation(lambda p: p, lambda g, s, p: (g, g))
    # the noise is that of a model which has the trained part alone, whatever the clip norm of what is frozen
    key = noise.stream(jax.random.wrap_key_data(WORDS, impl=CHACHA20), noise.NOISE)
    alone = jax.jit(noise.add)(key, {"head": jnp.zeros(3)}, 6.0)["head"] / np.float32(4)
    for base in (1.0, 1e6):
        clip, trainable = {"base": base, "head": 3.0}, {"base": False, "head": True}
        trainer = shared(loss, recorded, plan_of(4, noise=2.0), clip, trainable=trainable)
        before, after, _ = one_step(trainer, params, X[:4])
        assert jax.tree.map(jnp.shape, before.opt_state) == {"base": {"kernel": None}, "head": (3,)}
        np.testing.assert_allclose(after.opt_state["head"], alone, rtol=1e-5)


def test_frozen_values_are_in_the_chain_of_keys():
    """Other frozen values make other gradients, and these gradients must have other noise."""
    trainer = Trainer(
        lambda p, x: linear(p["w"], x) * p["base"], optax.sgd(0.1), plan_of(12), 1.0, trainable=lambda p: p == "w"
    )

    def key(base):
        state = trainer.init({"w": np.zeros(3, np.float32), "base": base}, KEY)
        trained, rest = split_model(state.params, trainer.trainable)
        where = trainer.placement
        carried = where.carried(state, trained)
        program = Program(where, trainer.rule, trainer.plan, carried, state.lineage, 0, where.data(X, None), rest)
        return program.advance(program.line, 0)[1].key_fingerprint, program.session

    one, same, other = key(1.0), key(np.float32(1.0)), key(1.5)
    assert one == same and one[0] != other[0] and one[1] != other[1]


def test_a_mask_of_the_optimizer_that_freezes_is_noticed():
    params = {"base": {"w": jnp.zeros(2), "b": jnp.zeros(1)}, "head": jnp.zeros(3)}
    labels = {"base": "frozen", "head": "free"}
    frozen = optax.multi_transform({"free": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels)
    masked = optax.chain(optax.adam(0.1), optax.masked(optax.set_to_zero(), {"base": True, "head": False}))
    for optimizer in (frozen, masked):
        with pytest.warns(UserWarning, match=r"never moves base/b and 1 more: .* freeze them with trainable="):
            Trainer(lambda p, x: 0.0, optimizer, plan_of(3), 1.0).init(params)
    for optimizer in (
        optax.adamw(0.1),
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.chain(optax.clip(1.0), optax.lion(0.1)),
    ):
        assert unmoved(optimizer, optimizer.init(params), params) == []


# Keys


def masks(trainer, data, params):
    """The aux of one step: an array whose row i is example i's dropout mask, if the loss puts the mask there."""
    _, _, seen = one_step(trainer, params, data)
    return np.asarray(seen.aux)


@pytest.mark.parametrize("micro", [4, *(pytest.param(m, marks=pytest.mark.slow) for m in (1, 6))])
def test_dropout_of_an_example_depends_on_the_step_and_its_number_alone(micro):
    """An example's dropout mask is the same whatever the micro-batch, and whoever else is drawn."""

    def loss(w, example, key):
        mask = jax.random.bernoulli(key, 0.5, (64,))
        return jnp.sum(w) * 0.0, jax.nn.one_hot(example, 6)[:, None] * mask

    trainer = Trainer(loss, optax.sgd(0.1), plan_of(6), 1.0, rngs=True, has_aux=True, micro_batch=micro, method="vmap")
    found = masks(trainer, np.arange(6), np.zeros(1, np.float32))
    stream = noise.host_stream(WORDS, noise.MODEL)
    own = [chacha.host_bits(chacha.host_fold_in(stream, i), 64) < 2**31 for i in range(6)]
    assert (found == np.array(own)).all()
    assert len({row.tobytes() for row in found}) == 6 and 0.4 < found.mean() < 0.6


def test_first_parameters_of_linen_are_those_of_its_init():
    module, key = Linen(), jax.random.key(0)
    found = models.initialised(module, key, X[0], ("dropout", "other"), {"train": True})
    keys = {"params": key, "dropout": jax.random.fold_in(key, 1), "other": jax.random.fold_in(key, 2)}
    wanted = jax.jit(functools.partial(module.init, train=True))(keys, X[0])
    assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))


def test_modules_get_their_key_as_their_framework_expects():
    key, other = key_from_bytes(KEY), key_from_bytes(bytes(32))
    shapes = jax.eval_shape(functools.partial(Linen().init, train=False), key, X[0])
    variables = jax.tree.map(lambda a: np.linspace(-1, 1, a.size, dtype=a.dtype).reshape(a.shape), shapes)
    loss = loss_of(Linen(), CROSS_ENTROPY, True, {"train": True})

    @jax.jit
    def both():
        output = Linen().apply(variables, X[0], train=True, rngs={"dropout": key})
        return loss(variables, EXAMPLE, key), CROSS_ENTROPY(output, EXAMPLE[1])

    mine, flax = both()
    assert float(mine) == float(flax)
    module = equinox_model()
    loss = loss_of(module, CROSS_ENTROPY, True, None)
    assert float(loss(module, EXAMPLE, key)) == float(CROSS_ENTROPY(module(X[0], key=key), EXAMPLE[1]))
    model = Nnx()
    loss = loss_of(lambda model, example, key: jnp.sum(model(example[0]) ** 2), None, True, None)
    fresh = lambda: nnx.merge(*nnx.split(model))
    used = fresh()
    used(X[0])  # has drawn already: the stream begins anew all the same
    values = [float(loss(m, EXAMPLE, k)) for m, k in ((fresh(), key), (used, key), (fresh(), other))]
    assert values[0] == values[1] != values[2]


def test_a_linen_module_with_several_streams():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return (
                x
                + jax.random.normal(self.make_rng("noise"), x.shape)
                + jax.random.normal(self.make_rng("dropout"), x.shape)
            )

    keys = key_from_bytes(KEY), key_from_bytes(bytes(32))
    loss = loss_of(Noisy(), lambda out, _: jnp.sum(out), ("dropout", "noise"), None)
    assert float(loss({}, EXAMPLE, keys[0])) != float(loss({}, EXAMPLE, keys[1]))


class Itself(nn.Module):
    @nn.compact
    def __call__(module, x):
        return nn.Dense(2, name="only")(x)


class Several(nn.Module):
    @nn.compact
    def __call__(_, x, scale=2.0, *, train: bool = True):
        return scale * nn.Dense(2)(x)


class Anything(nn.Module):
    @nn.compact
    def __call__(*given, **named):
        return nn.Dense(2)(given[1])


class NamedSelf(nn.Module):
    @nn.compact
    def __call__(this, self):
        return nn.Dense(2)(self)


class Wrapped(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(m, x):
        return nn.Dense(2)(x)


@pytest.mark.parametrize("kind", [Itself, Several, Anything, NamedSelf, Wrapped, nn.Sequential])
def test_a_linen_module_may_call_its_own_argument_what_it_likes(kind):
    module = kind([nn.Dense(2)]) if kind is nn.Sequential else kind()
    params = module.init(jax.random.key(0), X[0])
    loss = loss_of(module, CROSS_ENTROPY, False, None)
    assert float(loss(params, EXAMPLE)) == float(CROSS_ENTROPY(module.apply(params, X[0]), EXAMPLE[1]))


def test_an_argument_that_is_missing_is_named_whatever_self_is_called():
    class Asks(nn.Module):
        @nn.compact
        def __call__(module, x, self, train):
            return nn.Dense(2)(x)

    assert "Asks asks for self, train" in refusal(loss_of, Asks(), CROSS_ENTROPY, False, {})
    loss_of(Asks(), CROSS_ENTROPY, False, {"self": 1, "train": True})


# Aux


def test_aux_is_summed_over_the_examples_that_contribute():
    data = np.array([[1.0, 0.0], [np.nan, 0.0], [3.0, 4.0], [9.0, 9.0]], np.float32)
    loss = lambda w, x: (linear(w, x), {"n": 1, "x": x})
    for method in ("auto", "vmap"):
        mask = np.array([True, True, True, False])
        done, aux = clipped_sum(loss, np.ones(2, np.float32), data, mask, 1.0, method, has_aux=True)
        assert int(done.not_finite) == 1 and int(aux["n"]) == 2 and aux["x"].tolist() == [4.0, 4.0]
        np.testing.assert_allclose(done.total, [1.6, 0.8], rtol=1e-5)


# Refusals


def traced(loss, model):
    """The loss of one example, traced as a step does."""
    trained, rest = split_model(model, None if isinstance(model, Nnx) else lambda path: path.startswith("params"))
    return jax.eval_shape(lambda t: loss(join_model(t, rest), EXAMPLE), trained)


def closing_over(model):
    return lambda w, x: linear(w, x) * model(x).sum()


def statistics():
    eqx = pytest.importorskip("equinox")
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")


def bare(loss_fn=linear, **more):
    return Trainer(loss_fn, optax.sgd(0.1), plan_of(12), 1.0, **more)


class FromData(nn.Module):
    """Its first scale is that of the example it is initialised with."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x / self.param("scale", lambda key: jnp.abs(x).max()))


VARIABLES = {"params": {}, "batch_stats": {"BatchNorm_0": {"mean": np.zeros(4), "var": np.ones(4)}}}


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: bare(Linen(), loss=CROSS_ENTROPY), "Linen asks for train; give apply_kwargs={'train': ...}"),
        (lambda: bare(Nnx()), "with a module, give loss as well"),
        (lambda: bare(linear, apply_kwargs={"train": True}), "apply_kwargs goes with a module"),
        (lambda: bare(3, loss=CROSS_ENTROPY), "loss goes with a module of Flax (linen or nnx) or Equinox"),
        (lambda: bare().init(), "params is missing"),
        (lambda: bare().init(VARIABLES), "has batch_stats besides params; what mixes examples"),
        (lambda: bare().init(statistics()), "has an equinox.nn.State, which mixes examples"),
        (
            lambda: bare(Linen(True), loss=CROSS_ENTROPY, rngs=True, apply_kwargs={"train": True}).init(example=X[0]),
            "what mixes examples (batch normalisation) is not private; use GroupNorm or LayerNorm",
        ),
        (
            lambda: traced(
                loss_of(Linen(), CROSS_ENTROPY, False, {"train": True}),
                Linen().init(jax.random.key(0), X[0], train=False),
            ),
            "draws random numbers and has no key for it; give rngs=True",
        ),
        (
            lambda: traced(
                loss_of(Linen(True), CROSS_ENTROPY, False, {"train": True}),
                Linen(True).init(jax.random.key(0), X[0], train=False),
            ),
            "changes state with its input, which mixes examples; use GroupNorm",
        ),
        (lambda: traced(loss_of(Nnx(), CROSS_ENTROPY, False, None), Nnx()), "draws random numbers and has no key"),
        (
            lambda: traced(loss_of(lambda m, e: jnp.sum(m.norm(m.first(e[0]))), None, False, None), Nnx(True)),
            "norm/mean, a BatchStat, is changed by the loss, which mixes examples; call model.eval()",
        ),
        (
            lambda: bare(closing_over(Nnx())).norm_methods(jnp.zeros(3), X),
            "the loss changes an nnx module that it closes over",
        ),
        (lambda: bare(lambda w, x: (linear(w, x), 1.0)).norm_methods(jnp.zeros(3), X), "give has_aux=True for"),
        (lambda: bare(lambda w, x: linear(w, jax.lax.pmean(x, "batch"))).norm_methods(jnp.zeros(3), X), "axis 'batch'"),
        (lambda: bare(FromData(), loss=CROSS_ENTROPY).init(example=X[0]), "depend on the values of the example"),
        (
            lambda: bare(Linen, loss=CROSS_ENTROPY),
            "is the class Linen, must be a module or a function; give Linen(...)",
        ),
        (
            lambda: bare(nn.Dense(2), loss=CROSS_ENTROPY).norm_methods(nn.Dense(2).init(jax.random.key(0), X[0]), X),
            "an example is one array, must be a pair (input, target)",
        ),
        (lambda: Trainer(linear, optax.adam, plan_of(6), 1.0), "must be an Optax transformation"),
        (lambda: bare().fit({"w": jnp.zeros(3)}, X), "must be a State"),
        (lambda: sensitivity({"a": None}), "holds no number"),
        (lambda: bare(linear, rngs=True), "loss_fn is called as (params, example, key), since rngs is given"),
        (lambda: bare(lambda w, x, key: linear(w, x)), "missing a required argument: 'key'"),
        (lambda: bare(nn.Dense(2), loss=CROSS_ENTROPY).init({"kernel": jnp.ones((3, 2))}), "give {'params': ...}"),
        (lambda: split_model({"a": jnp.ones(1)}, "a"), "trainable has 'a', must have bools"),
        (lambda: split_model({"a": jnp.ones(1), "b": jnp.ones(1)}, {"a": 1, "b": 0}), "must have bools"),
        (
            lambda: split_model({"a": jnp.ones(1)}, nnx.Param),
            "trainable is the type Param, which goes with an nnx module",
        ),
        (
            lambda: bare(equinox_model(), loss=CROSS_ENTROPY).norm_methods(equinox_model(), DATA),
            "random numbers and has no key",
        ),
        (lambda: bare(linear, has_aux=True).norm_methods(jnp.zeros(3), X), "must be (loss, aux), the loss a scalar"),
    ],
)
def test_what_cannot_be_trained_privately_is_refused(call, text):
    assert text in refusal(call)


def test_a_run_without_compiling_is_refused():
    trainer = Trainer(linear, optax.sgd(0.1), plan_of(6), 1.0)
    with jax.disable_jit():
        assert "jax_disable_jit is set" in refusal(trainer.fit, trainer.init(np.zeros(3, np.float32)), X)


def test_statistics_that_are_only_read_are_let_through():
    model = Nnx(True)
    model.eval()
    assert traced(loss_of(model, CROSS_ENTROPY, False, None), model).shape == ()
    variables = Linen(True).init(jax.random.key(0), X[0], train=False)
    assert traced(loss_of(Linen(True), CROSS_ENTROPY, False, {"train": False}), variables).shape == ()


# Whole runs


@pytest.mark.parametrize("real_steps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_with_all_of_it_is_compiled_once(monkeypatch, tmp_path, real_steps):
    compiled = []
    real = jax.stages.Lowered.compile
    if not real_steps:
        monkeypatch.setattr(Program, "run", lambda self, carried, *given: still(carried, *given, None))

    def compiles(lowered, **options):
        if not options:  # the check of the loss, once in a process, has options
            compiled.append(1)
        return real(lowered, **options) if options or real_steps else None

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiles)

    def loss(params, example, key):
        kept = jax.random.bernoulli(key, 0.5, example.shape) * example
        return jnp.sum((params["base"] * params["w"] - kept) ** 2), {"kept": jnp.sum(kept)}

    plan = plan_of(12, q=0.5, noise=2.0, steps=5)
    more = {"rngs": True, "has_aux": True, "trainable": {"base": False, "w": True}, "micro_batch": 3}
    trainer = Trainer(loss, optax.adam(0.1), plan, 1.0, **more)
    first = trainer.init({"base": jnp.full(3, 2.0), "w": jnp.zeros(3)}, KEY)
    state = trainer.fit(first, X, ledger=tmp_path / "run", progress=False)
    assert len(compiled) == 1 and state.step == 5
    assert state.params["base"].tolist() == [2.0] * 3 and (state.params["w"] != 0.0).all() == real_steps
    assert float(state.epsilon.upper) == float(plan.epsilon.upper)
    assert sum(Ledger.read(tmp_path / "run").releases().values()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_a_module_learns(kind, tmp_path):
    """A module with dropout learns under hardly any noise. A resumed run has the bits of an uninterrupted one."""
    model = {"linen": Linen, "nnx": Nnx, "equinox": lambda: equinox_model(0.2)}[kind]()
    more = {"apply_kwargs": {"train": True}} if kind == "linen" else {}

    def trainer():
        return Trainer(
            model, optax.adam(0.1), plan_of(12, noise=0.01, steps=40), 1.0, loss=CROSS_ENTROPY, rngs=True, **more
        )

    def begin():
        return trainer().init(key=KEY, example=X[0] if kind == "linen" else None)

    state = trainer().fit(begin(), DATA, progress=False)
    half = [lambda s: s.step == 20]
    trainer().fit(begin(), DATA, callbacks=half, checkpoints=tmp_path, progress=False)
    again = trainer().fit(begin(), DATA, checkpoints=tmp_path, progress=False)
    same = jax.tree.map(lambda a, b: (a == b).all(), split_model(state.params)[0], split_model(again.params)[0])
    assert all(jax.tree.leaves(same)) and again.step == 40
    if kind == "linen":
        output = model.apply(state.params, X, train=False)
    else:
        last = state.params
        if kind == "nnx":
            last.eval()
        else:
            last = pytest.importorskip("equinox").nn.inference_mode(last)
        output = jax.vmap(last)(X)
    assert (np.argmax(output, 1) == DATA[1]).mean() > 0.9


@pytest.mark.slow
def test_users_whose_examples_have_keys_of_their_own():
    def loss(w, example, key):
        return jnp.sum(w) * 0.0, jax.nn.one_hot(example, 6)[:, None] * jax.random.bernoulli(key, 0.5, (64,))

    from jaxacct.training.sampling.sampler import user_data

    plan = plan_of(2, unit="user")
    rows = user_data(jnp.arange(6), np.array([0, 0, 0, 1, 1, 1]), 2)
    found = []
    for micro in (1, 2):
        trainer = Trainer(
            loss, optax.sgd(0.1), plan, 1.0, rngs=True, has_aux=True, examples_per_user=3, micro_batch=micro
        )
        found.append(3 * masks(trainer, rows, np.zeros(1, np.float32)))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert len({row.round(3).tobytes() for row in found[0]}) == 6


def test_aux_of_a_user_is_the_mean_over_the_examples():
    """The mean is taken of a bool too, such as whether an example is classified rightly."""
    from jaxacct.training.step.step_function import mean_over_examples

    loss = mean_over_examples(lambda w, x: (linear(w, x), (x[0] > 0, x[0].astype(int), x[0])))
    weights = jnp.array([0.25, 0.25, 0.25, 0.25, 0.0])
    _, found = loss(jnp.zeros(1), (jnp.array([[1.0], [0.0], [1.0], [1.0], [1.0]]), weights))
    assert [float(each) for each in found] == [0.75] * 3


PAGE = pathlib.Path(jaxacct.__file__).parent / "training/README.md"
BLOCKS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text().partition("\n## Models\n")[2].partition("\n## ")[0], re.DOTALL
)


@pytest.mark.slow
def test_the_page_runs_as_it_stands():
    """Every block of the section on models, one after the other."""
    names = {}
    for block in BLOCKS:
        if "import equinox" in block:
            pytest.importorskip("equinox")
        exec(compile(block, str(PAGE), "exec"), names)
        if "state" in names:
            state = names.pop("state")
            assert state.step == 5 and 0.0 < float(state.epsilon.upper) <= 3.0
            assert names.pop("logits", np.zeros((64, 2))).shape == (64, 2)
    assert len(BLOCKS) == 10
