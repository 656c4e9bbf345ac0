"""The digits example trains, and spends what it says."""

import importlib.util
import pathlib

import pytest

from jaxacct.training.ledger import Ledger

pytest.importorskip("sklearn")


@pytest.mark.slow
@pytest.mark.parametrize("memmap", [False, True])
def test_digits_are_learnt_within_the_target(tmp_path, memmap):
    path = pathlib.Path(__file__).parents[1] / "examples" / "digits" / "digits_cnn.py"
    spec = importlib.util.spec_from_file_location("digits_cnn", path)
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
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
