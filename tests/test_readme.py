"""Each Python snippet of the README runs by itself."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = dict(zip(("first", "training", "tuning"), re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL), strict=True))


def run(block, check):
    """Run a snippet and a check after it."""
    exec(f"{BLOCKS[block]}\n{check}\n", {"__name__": "__main__"})


def test_the_first_snippet_keeps_its_promises():
    run("first", "assert c.ok and c.epsilon.upper <= 2.0 and b.ok.all()")


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_gives_the_model_that_its_checkpoint_holds(tmp_path, monkeypatch, request, real):
    """The snippet runs with one epoch. If its steps are not real, nothing is compiled."""
    if not real:
        request.getfixturevalue("still_steps")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BLOCKS, "training", BLOCKS["training"].replace("epochs=5", "epochs=1"))
    run(
        "training",
        "assert state.epsilon.upper <= 3.0 and state.step == plan.steps\n"
        "kernels = [x['params']['layers_0']['kernel'] for x in (params, state.params)]\n"
        "assert np.array_equal(*kernels)",
    )


@pytest.mark.slow
def test_tuning_stays_within_its_budget():
    run("tuning", "assert best.epsilon.upper <= 3.0")


def test_what_the_readme_promises_about_itself():
    assert len(TEXT.split()) <= 1000
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    table = TEXT[TEXT.index("| extra |") : TEXT.index("## The first number")]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)))) <= extras
    for page in (ROOT / "examples" / "tutorials").glob("*.md"):
        assert f"(examples/tutorials/{page.name})" in TEXT, page
