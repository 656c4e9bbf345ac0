"""The Opacus accountant against a stand-in with Opacus's documented interface (Opacus itself needs PyTorch)."""

import abc
import copy
import math
import sys
import types

import pytest
from helpers import refusal

import jaxacct as ja
from jaxacct import interop


class IAccountant(abc.ABC):
    """What opacus.accountants.IAccountant asks for and offers (Opacus 1.6)."""

    @abc.abstractmethod
    def __init__(self):
        self.history = []

    @abc.abstractmethod
    def step(self, *, noise_multiplier, sample_rate): ...

    @abc.abstractmethod
    def get_epsilon(self, delta, *args, **kwargs): ...

    @abc.abstractmethod
    def __len__(self): ...

    @classmethod
    @abc.abstractmethod
    def mechanism(cls): ...

    def state_dict(self):
        return {"history": copy.deepcopy(self.history), "mechanism": self.mechanism()}

    def load_state_dict(self, state):
        if self.mechanism() != state["mechanism"]:
            raise ValueError(f"state_dict of {state['mechanism']}")
        self.history = state["history"]


@pytest.fixture
def registry(monkeypatch):
    """Yield the registry of a stand-in for Opacus, which can be imported while the test runs."""
    known = {}

    def register_accountant(mechanism, accountant, force=False):
        if mechanism in known and not force:
            raise ValueError(mechanism)
        known[mechanism] = accountant

    package, accountants = types.ModuleType("opacus"), types.ModuleType("opacus.accountants")
    accountants.IAccountant, accountants.register_accountant = IAccountant, register_accountant
    package.accountants = accountants
    monkeypatch.setitem(sys.modules, "opacus", package)
    monkeypatch.setitem(sys.modules, "opacus.accountants", accountants)
    monkeypatch.delitem(sys.modules, "jaxacct.interop.opacus_accountant", raising=False)
    monkeypatch.delitem(vars(interop), "OpacusAccountant", raising=False)  # an earlier test may have imported it
    yield known
    sys.modules.pop("jaxacct.interop.opacus_accountant", None)


def test_registered_under_its_name(registry):
    interop.register_opacus()
    interop.register_opacus()
    assert list(registry) == ["jaxacct"]
    accountant = registry["jaxacct"]()
    assert isinstance(accountant, IAccountant) and accountant.mechanism() == "jaxacct" and len(accountant) == 0


def test_steps_are_joined_and_counted(registry):
    accountant = interop.OpacusAccountant()
    for _ in range(3):
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    accountant.step(noise_multiplier=2.0, sample_rate=0.01)
    accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    assert accountant.history == [(1.0, 0.01, 3), (2.0, 0.01, 1), (1.0, 0.01, 1)] and len(accountant) == 5
    assert accountant.run == ja.compose(*(ja.dp_sgd(s, 0.01, n) for s, n in ((1.0, 3), (2.0, 1), (1.0, 1))))


def test_epsilon_is_the_certified_upper_end_and_below_opacus_s_own(registry):
    accountant = interop.OpacusAccountant()
    accountant.history = [(1.5, 0.04, 2250)]  # Opacus 1.x says 7.32911117 (RDP), 6.77739571 (PRV) at 1e-5
    upper = ja.epsilon(ja.dp_sgd(1.5, 0.04, 2250), 1e-5).upper
    assert accountant.get_epsilon(1e-5) == upper < 6.77739571
    assert "delta must be one number, not 2" in refusal(accountant.get_epsilon, [1e-5, 1e-6])


def test_no_steps_no_noise_and_no_data(registry):
    accountant = interop.OpacusAccountant()
    assert accountant.get_epsilon(1e-5) == 0.0
    accountant.step(noise_multiplier=0.0, sample_rate=0.0)
    assert accountant.get_epsilon(1e-5) == 0.0
    accountant.step(noise_multiplier=0.0, sample_rate=0.5)
    assert accountant.get_epsilon(1e-5) == math.inf


def test_states_are_saved_and_loaded(registry):
    accountant, other = interop.OpacusAccountant(), interop.OpacusAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=1.0)
    other.load_state_dict(accountant.state_dict())
    assert other.history == accountant.history and other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    with pytest.raises(ValueError, match="state_dict of prv"):
        other.load_state_dict({"history": [], "mechanism": "prv"})


@pytest.mark.parametrize(
    "history, expected",
    [
        ([(1.0, 2.0, 1)], "history[0].sample_rate = 2.0 must be"),
        ([(1.0, 0.1, 1), (-1.0, 0.1, 1)], "history[1].noise_multiplier = -1.0 must be"),
        ([(1.0, 0.1, 0)], "history[0].steps = 0 must be"),
        ([(1.0, math.nan, 1)], "history[0].sample_rate = nan must be"),
        ([(1.0, 0.1)], "history[0] must be (noise_multiplier, sample_rate, steps)"),
        ("rdp", "history must be a list, not str"),
    ],
)
def test_bad_histories_are_refused_and_not_taken(registry, history, expected):
    accountant = interop.OpacusAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.5)
    assert expected in refusal(accountant.load_state_dict, {"history": history, "mechanism": "jaxacct"})
    assert accountant.history == [(1.0, 0.5, 1)]
    accountant.history = history
    assert expected in refusal(accountant.get_epsilon, 1e-5)


def test_bad_steps_and_targets_are_refused(registry):
    accountant = interop.OpacusAccountant()
    assert "sample_rate = 1.5" in refusal(accountant.step, noise_multiplier=1.0, sample_rate=1.5)
    assert "noise_multiplier = nan" in refusal(accountant.step, noise_multiplier=math.nan, sample_rate=0.5)
    assert accountant.history == []
    for delta in (0.0, 1.0, math.nan):
        assert "delta = " in refusal(accountant.get_epsilon, delta)


def test_without_opacus_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.delitem(sys.modules, "jaxacct.interop.opacus_accountant", raising=False)
    monkeypatch.delitem(vars(interop), "OpacusAccountant", raising=False)  # an earlier test may have imported it
    assert "needs the package opacus; pip install 'jaxacct[opacus]'" in refusal(
        lambda: interop.OpacusAccountant(), error=ModuleNotFoundError
    )
