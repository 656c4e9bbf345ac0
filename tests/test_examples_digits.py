"""The digits example trains, and spends what it says."""

import importlib.util
import pathlib
import sys

import pytest

from jaxacct.training.ledger import Ledger

pytest.importorskip("sklearn")


def example(name):
    path = pathlib.Path(__file__).parents[1] / "examples" / "digits" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("memmap", [False, True])
def test_digits_are_learnt_within_the_target(tmp_path, memmap):
    digits = example("digits_cnn")
    train, test = digits.load_digits()
    plan, state, curve = digits.train_privately(
        3.0, train, test, 20, tmp_path / "run", False, tmp_path if memmap else None
    )
    assert curve[-1][0] == state.step == plan.steps and curve[-1][1] > 0.8
    assert 2.99 <= float(Ledger.read(tmp_path / "run").epsilon(1e-5).upper) <= 3.0
    openly = digits.train_openly(train, test, plan.steps)
    assert openly[-1][1] > 0.93
    digits.draw([("private", 3.0, curve), ("open", 3.0, openly)], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_digits_are_learnt_with_banded_noise(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "digits_cnn", example("digits_cnn"))
    script = example("correlated_noise")
    data, test = script.load_digits()
    found = script.plans(8.0, len(data[1]), epochs=4, bands=(4,))
    assert list(found) == ["DP-SGD", "random allocation", "banded noise, 4 bands"]
    assert all(7.9 < plan.epsilon.upper <= 8.0 for plan, _ in found.values())
    plan, _ = found["banded noise, 4 bands"]
    state = script.train(plan, data, 0.06)
    assert state.step == plan.steps and state.epsilon.upper <= 8.0
    assert script.accuracy_on(test)(state.params) > 0.7
    script.draw({8.0: {"banded": [[0.8, 0.9], [0.9, 0.95]]}}, [0.02, 0.06], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
