"""Finite laws on the lattice: dominated from below and dominating from above, for every eps."""

import jax
import numpy as np
import pytest

from jaxacct.engines.lattice_finite import Finite


def profile(loss, mass, eps):
    gain = -np.expm1(np.minimum(eps[:, None] - loss, 0.0))
    return gain @ mass


def random_law(rng, shape):
    size = rng.integers(2, 60)
    if shape == "scattered":
        loss, log_mass = rng.uniform(-3.0, 3.0, size), rng.uniform(-3.0, 0.0, size) * rng.choice([1, 10, 60])
    else:
        loss = np.linspace(-2.0, 2.0, size) ** (1 if shape == "even" else 3)
        log_mass = -0.5 * loss**2 * rng.choice([1, 15])
    mass = np.exp(log_mass - log_mass.max())
    return loss, mass / mass.sum()


@pytest.mark.parametrize("nodes", [64, 256, 4096])
@pytest.mark.parametrize("shape", ["scattered", "even", "cubic"])
def test_one_step_is_bracketed(shape, nodes):
    rng = np.random.default_rng(nodes)
    for _ in range(100):
        loss, mass = random_law(rng, shape)
        law = Finite(loss, mass, 1.0, 1.0)
        step = 1.05 * (loss.max() - loss.min()) / (nodes - 4)
        eps = np.concatenate([rng.uniform(-4.0, 4.0, 50), loss, loss - 1e-9])
        truth = profile(loss, mass, eps)
        for upper in (False, True):
            with jax.enable_x64():
                placed = law.place(law.extent(0.0, 0.0, 0.0), step, nodes, upper)
            at = placed.direction * (placed.origin + step * np.arange(nodes))
            masses = np.asarray(placed.mass)
            assert np.all(masses >= 0.0) and masses.dtype == np.float64
            if upper:
                assert np.all(profile(at + placed.shift, masses, eps) >= truth * (1 - 1e-15))
            else:
                assert np.all(profile(at - placed.shift, masses, eps) <= truth * (1 + 1e-15))


def test_lower_law_keeps_the_mean_ratio_where_the_ends_are_on_nodes():
    """Contracted, not shifted: nearly all of E_P[e^-L] survives on a coarse lattice."""
    loss = np.array([-1.0, -0.437, 0.1234, 0.5, 1.0])
    mass = np.array([0.1, 0.3, 0.3, 0.2, 0.1])
    with jax.enable_x64():
        placed = Finite(loss, mass, 1.0, 1.0).place((-1.0, 1.0), 0.01, 256, False)
    at = placed.direction * (placed.origin + 0.01 * np.arange(256))
    assert np.exp(-at) @ np.asarray(placed.mass) == pytest.approx(np.exp(-loss) @ mass, rel=1e-12)
