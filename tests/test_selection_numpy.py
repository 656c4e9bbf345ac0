"""The worst score on NumPy: the same answers as by XLA, the same alone and in a batch, and nothing compiled."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct import selection
from jaxacct.core.validation import POSITIVE
from jaxacct.engines import backend
from jaxacct.kernels import worst_score
from jaxacct.kernels.worst_score import GLANCE
from jaxacct.mechanisms.base import register
from jaxacct.selection.base_profile import bases
from jaxacct.selection.law_of_k import Law

BASES = {
    "gaussian": ja.Gaussian(1.0),
    "mass at infinity": ja.compose(ja.Gaussian(2.0), ja.ApproximateDP(0.3, 1e-3)),
    "atoms": ja.FiniteOutput([1e-3, 0.02, 0.03, 0.15, 0.3, 0.499], [0.0, 0.001, 0.01, 0.139, 0.35, 0.5]),
}
LAWS = {
    "negative binomial": selection.TruncatedNegativeBinomial([0.0, 5.0], [0.001, 0.3]),
    "poisson": selection.Poisson([10.0, 1e4]),
    "binomial": selection.Binomial([20.0, 1e3], [0.5, 1.0]),
    "categorical": selection.TwoPoint(1, 100, [0.1, 0.9]),
}


@pytest.fixture
def compiled():
    """The names of the events in which XLA compiled something."""
    names = []
    listen = lambda event, seconds, **_: names.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("name", "quantity"),
    [("poisson", "delta"), *((name, "epsilon") for name in LAWS)],
)
@pytest.mark.slow  # quick runs test these programs by a law that calls JAX, below
def test_numpy_and_xla_agree(name, quantity):
    """One program for each law and quantity serves all bases."""
    batch = LAWS[name].flattened((2,))

    def ends(law, above, below, value):
        xp = jnp if isinstance(value, jax.Array) else np
        if quantity == "delta":
            return worst_score.delta(law, above, below, 1.0 / value**0.1, GLANCE)
        return worst_score.epsilon(law, above, below, xp.log(value), 600.0 * xp.ones_like(value), GLANCE)

    with jax.enable_x64():
        program = jax.jit(ends, compiler_options={"xla_backend_optimization_level": 0})
        for base in BASES.values():
            curve = bases(base)[0].curves["remove"]
            for i, value in ((0, 1e-2), (1, 1e-6)):
                law = jax.tree.map(lambda x, i=i: x[i], batch)
                with np.errstate(all="ignore"):
                    plain = ends(law, *curve, np.float64(value))
                assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(plain))
                np.testing.assert_allclose(plain, program(law, *curve, jnp.float64(value)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("quantity", ["epsilon", "delta"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(quantity):
    law, at = LAWS["negative binomial"], np.array([[1e-2], [1e-5], [1e-9]])
    run = ja.Gaussian(2.0)
    ask = getattr(ja, quantity)
    with backend.job(1, "numpy"):
        batch = ask(selection.select(run, law), at, rtol=1e-2)
        for index in np.ndindex(batch.upper.shape):
            alone = ask(selection.select(run, law.element(index[1:])), at[index[0], 0], rtol=1e-2)
            assert (alone.lower, alone.upper) == (batch.lower[index], batch.upper[index])


def test_a_small_selection_compiles_nothing(compiled):
    for run, law in (
        (ja.Gaussian(1.7), selection.Geometric(0.17)),
        (ja.PureDP(0.37), selection.TwoPoint(1, 9, 0.3)),
    ):
        chosen = selection.select(run, law)
        found = ja.epsilon(chosen, [1e-3, 1e-6])
        assert np.all(found.upper - found.lower <= 0.01)
        assert np.all(ja.delta(chosen, 0.3).upper > 0.0)
        assert selection.attack(run, law, delta=1e-6) <= found.upper[1]
    assert compiled == []


@register
@dataclass(frozen=True, eq=False)
class OwnPoisson(Law):
    """A user's law, which calls JAX."""

    mean: Any
    constraints: ClassVar = {"mean": POSITIVE}

    def generating(self, y):
        value = jnp.exp(-self.mean * y)
        return value, self.mean * value, self.mean**2 * value

    def probability(self, k):
        return selection.Poisson(self.mean).probability(k)

    def survival(self, k):
        return selection.Poisson(self.mean).survival(k)


def test_a_law_that_calls_jax_has_the_same_answer():
    own, known = (
        ja.epsilon(selection.select(ja.Gaussian(2.0), law(3.0)), 1e-6, rtol=1e-2)
        for law in (OwnPoisson, selection.Poisson)
    )
    np.testing.assert_allclose([own.lower, own.upper], [known.lower, known.upper], rtol=1e-9)


def test_a_class_with_another_generating_function_takes_over_no_derivative():
    @register
    @dataclass(frozen=True, eq=False)
    class Shifted(selection.TruncatedNegativeBinomial):
        """The law of K + 1."""

        def generating(self, y):
            value, first, second = super().generating(y)
            return (1.0 - y) * value, value + (1.0 - y) * first, 2.0 * first + (1.0 - y) * second

    law, y = Shifted(1.0, 0.2), np.array([0.0, 0.3, 1.0])
    np.testing.assert_array_equal(law.slopes(y), law.generating(y)[1:])
