"""Each Python snippet of the README runs by itself, and the one that trains runs twice."""

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


def test_training_run_twice_gives_the_same_model(tmp_path, monkeypatch, capsys):
    """With fewer epochs."""
    check = (
        "assert state.epsilon.upper <= 3.0 and state.step == plan.steps\n"
        "kernels = [x.tobytes().hex() for x in (params['params']['layers_0']['kernel'], "
        "np.asarray(state.params['params']['layers_0']['kernel']))]\n"
        "assert kernels[0] == kernels[1]\n"
        "print(kernels[0], state.epsilon, open('run.jsonl').read())"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BLOCKS, "training", BLOCKS["training"].replace("epochs=5", "epochs=1"))
    told = []
    for _ in range(2):
        run("training", check)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


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
