"""Finite laws on the lattice: at every eps, the true delta lies between those of the lower and the upper law."""

import math

import mpmath
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.engines import lattice_parts
from jaxacct.engines.backend import runner
from jaxacct.engines.lattice_parts import Finite


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
    for _ in range(12):
        loss, mass = random_law(rng, shape)
        law = Finite(loss, mass, 1.0, 1.0)
        step = 1.05 * (loss.max() - loss.min()) / (nodes - 4)
        eps = np.concatenate([rng.uniform(-4.0, 4.0, 50), loss, loss - 1e-9])
        truth = profile(loss, mass, eps)
        for upper in (False, True):
            placed = law.place(law.extent(0.0, 0.0, 0.0), step, nodes, upper, runner())
            at = placed.direction * (placed.origin + step * np.arange(nodes))
            masses = np.asarray(placed.mass)
            assert np.all(masses >= 0.0) and masses.dtype == np.float64
            if upper:
                assert np.all(profile(at + placed.shift, masses, eps) >= truth * (1 - 1e-15))
            else:
                assert np.all(profile(at - placed.shift, masses, eps) <= truth * (1 + 1e-15))


def test_lower_law_keeps_the_mean_ratio_where_the_ends_are_on_nodes():
    """The lower law is contracted, not shifted: nearly all of E_P[e^-L] survives on a coarse lattice."""
    loss = np.array([-1.0, -0.437, 0.1234, 0.5, 1.0])
    mass = np.array([0.1, 0.3, 0.3, 0.2, 0.1])
    placed = Finite(loss, mass, 1.0, 1.0).place((-1.0, 1.0), 0.01, 256, False, runner())
    at = placed.direction * (placed.origin + 0.01 * np.arange(256))
    assert np.exp(-at) @ np.asarray(placed.mass) == pytest.approx(np.exp(-loss) @ mass, rel=1e-12)


# Steps composed into one


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 1001])
def test_powers_of_two_atoms_are_binomial(steps):
    loss, mass = np.array([0.3, -0.2]), np.array([0.6, 0.39])
    laws = lattice_parts.powers(lattice_parts.trimmed(loss, mass, steps, -math.inf), steps)
    assert sum(count * round(x.loss.size - 1) for x, count in laws) == steps  # k steps have k + 1 losses
    (law, count), rest = laws[0], laws[1:]
    size = law.loss.size - 1
    with mpmath.workdps(40):
        exact = [mpmath.binomial(size, k) * mpmath.mpf(0.6) ** k * mpmath.mpf(0.39) ** (size - k)
                 for k in range(size + 1)]  # fmt: skip
        off = np.array([float(abs(a - mpmath.mpf(b))) for a, b in zip(exact, law.mass, strict=True)])
    assert np.all(off <= law.wrong) and np.all(law.wrong <= 1e-9 * law.mass)
    assert np.all(
        np.abs(law.loss - (0.3 * np.arange(size + 1) - 0.2 * (size - np.arange(size + 1)))) <= law.blur + 1e-15
    )
    assert law.blur <= 1e-12 * size and count >= 1.0 and all(c == 1.0 for _, c in rest)


def test_powers_keep_the_moments_of_a_scattered_law():
    rng = np.random.default_rng(3)
    loss, mass = random_law(rng, "scattered")
    atoms = lattice_parts.trimmed(loss, mass, 11.0, -40.0)
    assert atoms.away <= 2 * math.exp(-40.0) and np.all(np.diff(atoms.loss) >= 0)
    laws = lattice_parts.powers(atoms, 11.0)
    assert laws[0][1] < 11.0 and max(x.loss.size for x, _ in laws) <= lattice_parts.MOST_PAIRS
    for tilt in (-1.0, 0.0, 0.7):
        parts = sum(count * math.log(np.exp(tilt * x.loss) @ x.mass) for x, count in laws)
        assert parts == pytest.approx(11.0 * math.log(np.exp(tilt * loss) @ mass), abs=1e-11)


@pytest.mark.parametrize("steps", [100, 5000])
def test_sampled_sparse_atoms_come_out_narrow(steps):
    """Each release lowers the lower law by a step where atoms are far apart. Composing releases first avoids this."""
    run = ja.repeat(ja.PoissonSampled(ja.DiscreteGaussian(1.0), 0.02), steps)
    bounds = ja.epsilon(run, 1e-5, relation="remove_one", memory_bytes=2**27)
    assert bounds.relative_width < 1e-4
    best = ja.epsilon(run, 1e-5, relation="remove_one", rtol=1e-3)
    assert best.lower <= bounds.upper and bounds.lower <= best.upper


def test_two_atoms_and_laplace_by_conditioning():
    """The truth is a sum over the number of right answers of n randomised responses, which is binomial."""
    n, p, b, eps = 40, 0.55, 2.0, 2.5
    k = np.arange(n + 1)
    chance = np.array([math.comb(n, int(i)) * p**i * (1 - p) ** (n - i) for i in k])
    left = eps - (2 * k - n) * math.log(p / (1 - p))
    laplace = np.where(left > 0, -np.expm1(np.minimum(0.5 * (left - 1 / b), 0)), 0.0)
    # below eps = 0: H_{e^x} = 1 - e^x + e^x H_{e^-x}
    back = -np.expm1(left) + np.exp(left) * -np.expm1(np.minimum(0.5 * (-left - 1 / b), 0))
    truth = float(chance @ np.where(left > 0, laplace, back))
    bounds = ja.delta(ja.compose(ja.repeat(ja.RandomizedResponse(p), n), ja.Laplace(b)), eps)
    assert bounds.lower <= truth * (1 + 1e-12) and truth * (1 - 1e-12) <= bounds.upper
    assert bounds.relative_width < 1e-5


def test_an_atom_is_left_where_nearly_all_mass_is_at_infinity():
    atoms = lattice_parts.trimmed(np.array([-3.0, -1.0, 0.0]), np.array([1e-16, 3e-16, 2e-16]), 1.0, -15.0)
    assert atoms.loss.tolist() == [-1.0] and atoms.away >= 3e-16
    nearly_none = ja.FiniteOutput(np.array([1e-13, 1.0 - 1e-13]), np.array([1.0, 0.0]))
    assert ja.delta(nearly_none, 0.5, engine="lattice").ok
