"""False brackets near the truth are never verified; benchmarks/attack_verifier.py has the whole attack."""

import pathlib
import runpy

import pytest

pytest.importorskip("flint")

ATTACK = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "benchmarks" / "attack_verifier.py"))


@pytest.mark.parametrize("name", ATTACK["QUICK"])
def test_no_false_bracket_is_verified(name):
    counts, wrong = ATTACK["attack"](name, 6, 2.0)
    assert not wrong
    assert counts.total() > 50 and sum(n for (*_, status), n in counts.items() if status == "refuted") > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACK["CASES"])
def test_no_false_bracket_of_any_mechanism_is_verified(name):
    _, wrong = ATTACK["attack"](name, 20, 5.0, seed=2)
    assert not wrong
